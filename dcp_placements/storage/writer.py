"""A ``FileSystemWriter`` for many small tensors and many ranks; what it writes, torch reads.

The files are those of torch's writer. The writer differs from torch's in three ways: it divides
items among the files of several threads by the bytes of their chunks, not of whole tensors; it
writes small tensors without ``torch.save``; and it sends the locations of chunks, and stores them
in ``.metadata``, in columns.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import IO, Any, Literal

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcp_placements._torch import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    SerializationFormat,
    StorageInfo,
    StoragePrefix,
)
from dcp_placements.errors import PlacementError
from dcp_placements.items import quiet_gc
from dcp_placements.storage.index import build_index, index_of_locations
from dcp_placements.storage.metadata_file import (
    read_file_names,
    send_compactly,
    write_metadata,
)
from dcp_placements.storage.provenance import COPIES, provenance_of
from dcp_placements.storage.rank_metadata import without_collectives
from dcp_placements.storage.record_writes import split_by_chunk, write_items
from dcp_placements.storage.remote import is_url
from dcp_placements.storage.save_ids import id_in_name, is_data_file, name_with_id
from dcp_placements.storage.store import Entry, hidden_name
from dcp_placements.storage.store_path import StorePath
from dcp_placements.storage.torch_metadata import StoredLocation, build_entries
from dcp_placements.storage.write_results import WriteResults

logger = logging.getLogger(__name__)

REMOVAL_S = 5.0
"""Ranks wait this long for the removal of older files, which continues afterwards."""

MOST_STOCK_ROWS = 5_000_000
"""The most chunks of all ranks for which stock metadata are written: 260 MB of ``.metadata``."""


class PlacementFileSystemWriter(StorePath, FileSystemWriter):
    """Writes checkpoints that torch's readers read; takes the arguments of ``FileSystemWriter``.

    ``dcp.save(state_dict, storage_writer=PlacementFileSystemWriter(path), planner=...)``, with
    any planner. ``storage_data`` of the ``Metadata`` that ``dcp.save`` returns is a read-only
    mapping; ``dict()`` converts it.

    The names of data files have the id of the save, as in ``__3_5e0f1a2b_0.distcp``. A save over
    an older checkpoint leaves the older files as they are, and removes them when its own
    ``.metadata`` is in place: until then the older checkpoint is whole, and the directory holds
    both. ``.metadata`` has a unique temporary name; such a file of a killed save is removed, too.

    A URL is written through fsspec. On an object store ``.metadata`` is uploaded last, in one
    request, under its own name.

    Args:
        path: A directory, or a URL that fsspec knows (``s3://bucket/checkpoint``).
        stock_metadata: Whether ``.metadata`` has what plain DCP reads: 52 bytes for each chunk of
            each rank. Without it only ``PlacementFileSystemReader`` and the command line read the
            checkpoint, by an index; ``dcp-placements stock-metadata`` adds it later. ``"auto"``
            leaves it out above 5 million chunks, where each rank of plain DCP would take minutes
            and gigabytes to read it, and says so.
        storage_options: Options that fsspec passes to the file system of a URL.

    Raises:
        PlacementError: No reader of ``.distcp`` files reads this ``serialization_format``.
    """

    _before: Mapping[str, Entry] = {}

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        stock_metadata: bool | Literal["auto"] = "auto",
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        path = self._absolute(path)
        super().__init__(path, *args, **kwargs)
        if self.serialization_format != SerializationFormat.TORCH_SAVE:
            raise PlacementError(
                f"serialization_format={self.serialization_format}: no reader, torch's included, "
                "reads .distcp files of this format\n"
                "    way out:     leave it at TORCH_SAVE; for safetensors files use torch's "
                "HuggingFaceStorageWriter, or dcp-placements export"
            )
        self.stock_metadata = stock_metadata
        self._storage_options = dict(storage_options or {})
        self._syncs_local_files = self.sync_files
        self._use(path)

    def _use(self, path: str | os.PathLike[str]) -> None:
        super()._use(path)
        # For a file at a URL torch would sync all file systems of the machine.
        self.sync_files = self._syncs_local_files and not is_url(path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save. Called on every rank.

        Raises:
            PlacementError: The save is without collectives.
        """
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not self.use_collectives:
            raise without_collectives()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files of every rank. Called on the coordinator."""
        self._before = self.store.states_of(self._metadata_name)
        own = uuid.uuid4().bytes
        prepared = []
        for number, plan in enumerate(plans):
            # The planner of this package sends an id, the same to all ranks.
            save_id = getattr(plan.planner_data, "save_id", own)
            name = name_with_id(f"__{number}_", save_id)
            prepared.append(replace(plan, storage_data=StoragePrefix(name)))
        return prepared

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Called on every rank.

        Returns:
            A future of a sequence of ``WriteResult`` that is small to send.

        Raises:
            Exception: The planner or the file system raised it, in any thread.
        """
        if self.transforms.extensions:
            return super().write_data(plan, planner)
        if not self.single_file_per_rank:
            buckets = [[item] for item in plan.items]
        else:
            buckets = [items for items in split_by_chunk(self.thread_count, plan.items) if items]
        names = [f"{plan.storage_data.prefix}{n}{DEFAULT_SUFFIX}" for n in range(len(buckets))]

        def write(name: str, items: Sequence[WriteItem]) -> tuple[str, Any]:
            threads, ahead = self.thread_count, self.per_thread_copy_ahead
            with self.store.create(name, sync=self.sync_files) as stream:
                written = write_items(items, stream, planner, threads=threads, ahead_nbytes=ahead)
                return name, list(written)

        try:
            if self.thread_count == 1:
                results: Any = WriteResults.of_records(map(write, names, buckets))
            else:
                with ThreadPoolExecutor(self.thread_count) as pool:
                    results = WriteResults.of_records(pool.map(write, names, buckets))
        except BaseException:
            self._remove(names)
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``, which completes the checkpoint. Called on the coordinator.

        Then the data files of the older checkpoint are removed; other ranks wait for this at most
        a few seconds.
        """
        name = self._metadata_name
        state = self.store.states_of(name).get(name)
        older = self._older_files() if state is not None else set()
        self._write_metadata(metadata, results)
        # Otherwise the removal of the older files may reach the disk before the new name.
        if not self.sync_files or self.store.sync():
            # A copy removes them, since this writer may begin another save, elsewhere.
            removal = threading.Thread(target=copy(self)._remove_older, args=(older,))
            try:
                removal.start()
            except RuntimeError:  # the system gives this process no more threads
                self._remove_older(older)
            else:
                removal.join(REMOVAL_S)
        if state != self._before.get(name):
            warnings.warn(
                f"{self.path}: another save into this directory ended while this one was under "
                "way, and this one has replaced it: what only the other saved is lost\n"
                "    likely:      several ranks save by themselves (no_dist=True) into it\n"
                "    way out:     save with all ranks; or give each save a directory of its own",
                stacklevel=2,
            )

    @property
    def _metadata_name(self) -> str:
        return str(os.path.basename(self._get_metadata_path()))

    def _older_files(self) -> set[str]:
        """Return the data files in the index of the existing metadata; empty without an index.

        Nothing in the metadata is executed. Only names of data files in this directory are
        returned, whatever the index names.
        """
        try:
            opener = self.store.opener(self._metadata_name)
            return set(filter(is_data_file, read_file_names(opener)))
        except Exception as error:
            logger.warning("%s: files of an older save are left over: %s", self.path, error)
            return set()

    def _remove_older(self, names: set[str]) -> None:
        """Remove the files of the checkpoint that this save has replaced."""
        try:
            self._remove(names if any(map(id_in_name, names)) else self._names_without_id())
            # Another save is writing the files that have changed meanwhile.
            now = self.store.states_of(self._metadata_name)
            unchanged = {name for name, state in self._before.items() if now.get(name) == state}
            self._remove(unchanged - {self._metadata_name})
            self.store.drop_lock(hidden_name(self._metadata_name, ".lock"))
        except OSError as error:
            logger.warning("%s: files of an older save are left over: %s", self.path, error)

    def _names_without_id(self) -> set[str]:
        """Return the files of an older checkpoint of torch's writer.

        Torch's writer may be writing files of these names again. Files of the older checkpoint are
        not newer than its metadata, which existed when this save began.
        """
        if self._metadata_name not in self._before:
            return set()
        latest = self._before[self._metadata_name].written
        files = self.store.entries(lambda name: is_data_file(name) and id_in_name(name) is None)
        times = {name: entry.written for name, entry in files.items()}
        if latest is None:
            return set()
        return {name for name, time in times.items() if time is not None and time <= latest}

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files of this directory; never through a link. Failures are logged."""
        try:
            self.store.remove(names)
        except OSError as error:
            logger.warning("%s: files of another save are left over: %s", self.path, error)

    def _write_metadata(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        columns: list[Any] = [result for result in results if isinstance(result, WriteResults)]
        others = [
            result for held in results if not isinstance(held, WriteResults) for result in held
        ]
        if any(type(result.storage_data) is not StorageInfo for result in others):
            super().finish(metadata, results)  # a subclass has its own type of results
            return
        with quiet_gc():
            entries = build_entries(metadata.state_dict_metadata)
            metadata.version = CURRENT_DCP_VERSION
            copies = bool((provenance_of(metadata) or {}).get(COPIES))
            if len(columns) == len(results):
                metadata.storage_data = build_index(columns, entries, copies=copies)
            else:
                every = [result for held in results for result in held]
                locations = [
                    StoredLocation.of(result.index, result.storage_data) for result in every
                ]
                metadata.storage_data = index_of_locations(locations, entries, copies=copies)
            metadata.storage_meta = self.storage_meta()
            has_stock = self._has_stock(len(metadata.storage_data))
            facts = metadata.planner_data, metadata.storage_data, metadata.storage_meta
            written = Metadata(entries.stored(), *facts, metadata.version)
            with self._replaced_metadata() as stream:
                packed = write_metadata(written, stream, stock_metadata=has_stock)
            send_compactly(metadata, packed)

    @contextmanager
    def _replaced_metadata(self) -> Iterator[IO[bytes]]:
        try:
            # Another save into this directory has a temporary name of its own.
            with self.store.replace(self._metadata_name, sync=self.sync_files) as stream:
                yield stream
        except FileNotFoundError as error:
            if self.store.entry() is None:
                raise PlacementError(
                    f"{self.path}: the directory was removed while this save wrote into it\n"
                    "    likely:      a job that removes older checkpoints took it for one\n"
                    "    way out:     save again; keep what has no .metadata yet"
                ) from error
            raise PlacementError(
                f"{self._get_metadata_path()}: another save into this directory ended meanwhile, "
                "and removed what this one had written under another name\n"
                "    way out:     a directory for each job"
            ) from error

    def _has_stock(self, rows: int) -> bool:
        """Whether to write the pickle that plain DCP reads."""
        if self.stock_metadata == "auto" and rows > MOST_STOCK_ROWS:
            warnings.warn(
                f"{self.path}: {rows:,} chunks: what plain DCP reads is left out of .metadata, as "
                "each of its ranks would read all of them; PlacementFileSystemReader loads it\n"
                "    way out:     dcp-placements stock-metadata PATH writes it later; "
                "PlacementFileSystemWriter(stock_metadata=True) does now, and False says nothing",
                stacklevel=2,
            )
            return False
        return bool(self.stock_metadata)
