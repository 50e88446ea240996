"""A ``FileSystemWriter`` for many small tensors and many ranks; what it writes, torch reads.

The files are those of torch's writer. The writer differs from torch's in three ways: it divides
items among the files of several threads by the bytes of their chunks, not of whole tensors; it
writes small tensors without ``torch.save``; and it sends the places of chunks, and stores them in
``.metadata``, in columns.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO, UnsupportedOperation
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
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
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.index.building import build_index
from dcp_placements.storage.index.storage_table import StorageTable, paths_of
from dcp_placements.storage.index.stored_entries import StoredEntries, entries_of
from dcp_placements.storage.metadata.file import (
    SentIndex,
    SentPart,
    read_file_names,
    write_metadata,
)
from dcp_placements.storage.metadata.rank_files import saves_before
from dcp_placements.storage.metadata.record import REPLACED, RESERVED_KEY, stored
from dcp_placements.storage.metadata.save_ids import (
    file_state,
    is_data_file,
    named,
    sync_directory,
    unfinished_files,
    unfinished_name,
)
from dcp_placements.storage.metadata.table import RowsBuilder, join
from dcp_placements.storage.metadata.write_results import WriteResults, rows_written
from dcp_placements.storage.record_writer import errors_of
from dcp_placements.storage.records.data_file import DataFile, split_by_chunk
from dcp_placements.storage.remote import (
    RemoteFileSystem,
    UrlPath,
    is_url,
    local_or_url,
)

logger = logging.getLogger(__name__)

STOCK_ROW_NBYTES = 52
"""Of ``.metadata``, for each chunk of each rank."""


class PlacementFileSystemWriter(UrlPath, FileSystemWriter):
    """Writes a checkpoint that any reader of torch's reads; takes what ``FileSystemWriter`` takes.

    ``dcp.save(state_dict, storage_writer=PlacementFileSystemWriter(path), planner=...)``, with
    any planner. ``storage_data``, ``state_dict_metadata`` and ``planner_data`` of the ``Metadata``
    that ``dcp.save`` returns are read-only mappings; ``dict()`` converts them.

    The names of data files carry the id of the save, as in ``__3_5e0f1a2b_0.distcp``. A save over
    an older checkpoint leaves its files as they are, and removes them when its own ``.metadata``
    is in place: until then the older checkpoint is whole, and the directory holds both. So does the
    temporary name of ``.metadata``; what a killed save left under one is removed, too.

    A URL is written through fsspec. On an object store ``.metadata`` is uploaded last, in one
    request, under its own name.

    Args:
        path: A directory, or a URL that fsspec knows (``s3://bucket/checkpoint``).
        stock_metadata: Whether ``.metadata`` has what plain DCP reads: 52 bytes for each chunk of
            each rank. Without it only ``PlacementFileSystemReader`` and the command line read the
            checkpoint, by an index; ``dcp-placements merge-metadata`` adds it later.
        stock_limit: Bytes of stock metadata beyond which the writer warns.
        storage_options: What fsspec passes to the file system of a URL.

    Raises:
        PlacementError: A ``serialization_format`` that no reader of ``.distcp`` files reads.
    """

    _unfinished: Mapping[str, Any] = {}
    _before: tuple[int, ...] | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        stock_metadata: bool = True,
        stock_limit: int = 1 << 30,
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        path = local_or_url(path)
        super().__init__(path, *args, **kwargs)
        if self.serialization_format != SerializationFormat.TORCH_SAVE:
            raise PlacementError(
                f"serialization_format={self.serialization_format}: no reader, torch's included, "
                "reads .distcp files of this format\n"
                "    way out:     leave it at TORCH_SAVE; for safetensors files use torch's "
                "HuggingFaceStorageWriter, or dcp-placements export"
            )
        self.stock_metadata = stock_metadata
        self.stock_limit = stock_limit
        self._storage_options = dict(storage_options or {})
        self._syncs_local_files = self.sync_files
        if is_url(path):
            self._use(path)

    def _use(self, path: str | os.PathLike[str]) -> None:
        super()._use(path)
        # Torch would sync all file systems of the machine for a file that is on none.
        self.sync_files = self._syncs_local_files and not is_url(path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse ranks' own metadata beside a ``.metadata``. Called on every rank."""
        if type(self.fs) is FileSystem:
            # The process may change its working directory before all is written.
            self.path = Path(self.path).absolute()
        if not self.use_collectives and self.fs.exists(self._get_metadata_path(None)):
            raise PlacementError(
                f"{self.path}: has a .metadata, which readers take in place of the ranks' own that "
                "use_collectives=False writes\n"
                "    way out:     save into another directory, or remove .metadata"
            )
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files of every rank. Called on the coordinator."""
        self._unfinished = self._unfinished_files()
        self._before = file_state(self._get_metadata_path(None))
        own = uuid.uuid4().bytes
        prepared = []
        for number, plan in enumerate(plans):
            given = plan.storage_data
            prefix = f"__{number}_" if given is None else given.prefix
            # The planner of this package sends an id, the same to all ranks.
            save_id = getattr(plan.planner_data, "save_id", own)
            prepared.append(replace(plan, storage_data=StoragePrefix(named(prefix, save_id))))
        return prepared

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Called on every rank.

        Returns:
            A future of a sequence of ``WriteResult`` that is small to send.

        Raises:
            Exception: Whatever the planner or the file system raised, in any thread.
        """
        if self.transforms.extensions:
            return super().write_data(plan, planner)
        if not self.single_file_per_rank:
            buckets = [[item] for item in plan.items]
        else:
            buckets = split_by_chunk(self.thread_count, plan.items)
        files: queue.Queue[DataFile] = queue.Queue()
        names = [f"{plan.storage_data.prefix}{n}{DEFAULT_SUFFIX}" for n in range(len(buckets))]
        for name, bucket in zip(names, buckets, strict=True):
            files.put(DataFile(name, bucket))
        builders = [RowsBuilder() for _ in range(max(self.thread_count, 1))]
        failures: list[BaseException] = []

        def work(builder: RowsBuilder) -> None:
            try:
                self._write_files(files, planner, builder)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(builder,)) for builder in builders[1:]]
        for thread in threads:
            thread.start()
        work(builders[0])
        for thread in threads:
            thread.join()
        if failures:
            self._remove(names)
            raise failures[0]
        future: Future[list[WriteResult]] = Future()
        rows = join(builder.rows() for builder in builders)
        future.set_result(WriteResults(rows))  # type: ignore[arg-type]
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``, which completes the checkpoint. Called on the coordinator.

        Then remove the data files of the checkpoint that was there before. Without collectives
        it is called on every rank, and writes that rank's own metadata file.
        """
        older = self._older_files()
        state = file_state(self._get_metadata_path(None))
        is_other = self.use_collectives and state != self._before
        if older and not self.use_collectives and stored(metadata) is not None:
            path = self._get_metadata_path(self.rank)
            metadata.planner_data[RESERVED_KEY][REPLACED] = saves_before(self._opener(path))
        self._write_metadata(metadata, results)
        if older:
            assert metadata.storage_data is not None
            self._remove(older - paths_of(metadata.storage_data))
        if self._unfinished:
            # What has changed meanwhile is being written by another save.
            now = self._unfinished_files()
            self._remove(name for name, at in self._unfinished.items() if now.get(name) == at)
        if is_other:
            warnings.warn(
                f"{self.path}: another save into this directory ended while this one was under "
                "way, and this one has replaced it: what only the other saved is lost\n"
                "    likely:      several ranks save by themselves (no_dist=True) into it\n"
                "    way out:     save with all ranks; or give each save a directory of its own",
                stacklevel=2,
            )

    def _unfinished_files(self) -> Mapping[str, Any]:
        path = self._get_metadata_path(None if self.use_collectives else self.rank)
        return unfinished_files(path) if type(self.fs) is FileSystem else {}

    def _opener(self, path: Any) -> Any:
        """Return what opens an existing file, any number of times."""
        if isinstance(self.fs, RemoteFileSystem):
            return self.fs.opener(os.fspath(path))
        return partial(self.fs.create_stream, path, "rb")

    def _older_files(self) -> set[str]:
        """Return the data files that the existing metadata name; none if they are unreadable.

        Nothing in them is executed. Whatever they name, only names of data files in this
        directory are returned.
        """
        path = self._get_metadata_path(None if self.use_collectives else self.rank)
        if not self.fs.exists(path):
            return set()
        try:
            names = read_file_names(self._opener(path))
        except Exception as error:
            logger.warning("%s cannot be read, so the files that it names stay: %s", path, error)
            return set()
        return set(filter(is_data_file, names))

    def _remove(self, names: Iterable[str]) -> None:
        """Remove data files of this directory; never through a link. Failures are logged."""
        for name in sorted(names):
            path = self.fs.concat_path(self.path, name)
            try:
                if not self.fs.exists(path):
                    continue
                if type(self.fs) is FileSystem and not stat.S_ISREG(os.lstat(path).st_mode):
                    continue
                self.fs.rm_file(path)
            except OSError as error:
                logger.warning("%s is left over from an older save: %s", path, error)

    def _write_metadata(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if not all(map(_is_known, results)):
            super().finish(metadata, results)
            return
        with quiet_gc():
            entries = entries_of(metadata.state_dict_metadata)
            metadata.version = CURRENT_DCP_VERSION
            metadata.storage_data = StorageTable(build_index(map(rows_written, results), entries))
            metadata.storage_meta = self.storage_meta()
            if self.stock_metadata:
                self._warn_of_size(len(metadata.storage_data))
            stored: Any = StoredEntries(entries)
            written = replace(metadata, state_dict_metadata=stored)
            write = partial(write_metadata, written, stock_metadata=self.stock_metadata)
            path = self._get_metadata_path(None if self.use_collectives else self.rank)
            if isinstance(self.fs, RemoteFileSystem) and self.fs.is_object_store:
                upload = BytesIO()
                sent = write(upload)
                self.fs.put(os.fspath(path), upload.getvalue())
                _send(metadata, sent)
                return
            # Another save into this directory has a name of its own.
            name = unfinished_name(os.path.basename(path))
            new = self.fs.concat_path(self.path, name)
            try:
                with errors_of(new), self.fs.create_stream(new, "wb") as stream:
                    sent = write(stream)
                    self._sync(stream)
            except BaseException:
                self._remove([name])
                raise
            _send(metadata, sent)
        if type(self.fs) is FileSystem:
            # Atomic: a job that is killed here leaves the older checkpoint or the new one.
            os.replace(new, path)
            if self.sync_files:
                # What the older .metadata names is removed next, and may be gone first otherwise.
                sync_directory(self.path)
            return
        if self.fs.exists(path):
            self.fs.rm_file(path)
        self.fs.rename(new, path)

    def _warn_of_size(self, rows: int) -> None:
        nbytes = rows * STOCK_ROW_NBYTES
        if nbytes > self.stock_limit:
            warnings.warn(
                f".metadata has {rows:,} chunks, which make {nbytes / 1e9:,.1f} GB of stock "
                "metadata; every rank of plain DCP reads all of them\n"
                "    way out:     PlacementFileSystemWriter(stock_metadata=False), if "
                "PlacementFileSystemReader loads it; or a larger stock_limit=",
                stacklevel=2,
            )

    def _write_files(
        self, files: queue.Queue[DataFile], planner: SavePlanner, builder: RowsBuilder
    ) -> None:
        """Write files until the queue is empty. Runs in every thread."""
        ahead = {"threads": self.thread_count, "ahead_nbytes": self.per_thread_copy_ahead}
        while True:
            try:
                file = files.get_nowait()
            except queue.Empty:
                return
            path = self.fs.concat_path(self.path, file.name)
            with errors_of(path), self.fs.create_stream(path, "wb") as stream:
                file.write(stream, planner, builder, **ahead)
                self._sync(stream)

    def _sync(self, stream: Any) -> None:
        if not self.sync_files:
            return
        stream.flush()
        try:
            os.fsync(stream.fileno())
        except (AttributeError, UnsupportedOperation):
            os.sync()


def _send(metadata: Metadata, sent: SentIndex) -> None:
    """Let metadata be pickled as the index that was written, for the other ranks."""
    assert isinstance(metadata.storage_data, StorageTable)
    metadata.storage_data = StorageTable(metadata.storage_data.index, sent=sent)
    for name in ("state_dict_metadata", "planner_data"):
        held = getattr(metadata, name)
        if type(held) is dict:
            setattr(metadata, name, SentPart(sent, name, held))


def _is_known(results: Sequence[WriteResult]) -> bool:
    """Whether results are of torch's writer or this one, not of a subclass with its own type."""
    return isinstance(results, WriteResults) or all(
        type(result.storage_data) is StorageInfo for result in results
    )
