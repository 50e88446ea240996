"""A ``FileSystemReader`` that reads only the requested slices, in file order, into the targets.

Torch's reader loads every stored chunk whole, whatever slice of it is requested, and first reads
the chunk's zip directory. This reader finds the elements by the few hundred bytes before them.
``torch.load`` reads other formats, strides and extensions.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.futures import Future

from dcp_placements._torch import global_rank, logged_where_torch_drops_it
from dcp_placements.errors import (
    PlacementError,
    fault_error,
    format_faults,
    raise_faults,
)
from dcp_placements.items import quiet_gc
from dcp_placements.report import Traffic
from dcp_placements.short_text import format_count
from dcp_placements.storage.file_reads import ByteRange, CountedFile
from dcp_placements.storage.index import locations_of, with_copies
from dcp_placements.storage.metadata_file import read_metadata
from dcp_placements.storage.record_reads import (
    DAMAGED,
    IS_DAMAGED,
    NO_EXTENSION,
    ChunkReader,
    RecordRead,
)
from dcp_placements.storage.save_ids import (
    ID_NBYTES,
    ID_PREFIX,
    MIXED,
    id_fault,
    id_item,
    id_records,
    ids_to_check,
    missing_file,
)
from dcp_placements.storage.store_path import StorePath
from dcp_placements.storage.torch_metadata import StoredLocation, check_facts, refusing
from dcp_placements.storage.wrong_path import no_checkpoint, unreadable_metadata


@runtime_checkable
class WantsReader(Protocol):
    """The data sent with a load plan that depends on whether the reader calls ``AfterReads``."""

    def with_reader(self) -> Any:
        """Return the data to send from a rank whose reader calls ``AfterReads``."""
        ...


@runtime_checkable
class AfterReads(Protocol):
    """A load planner with work to do after a rank has read its items and compared the files."""

    def finish_reads(
        self, plan: LoadPlan, error: BaseException | None, *, traffic: Traffic, unchecked: int
    ) -> None:
        """Finish, or raise.

        Args:
            plan: The plan that was read, as the planner finished it.
            error: The error of this rank's reads; None if they succeeded.
            traffic: Files opened and bytes read.
            unchecked: Number of records without a checksum to compare.
        """
        ...


class PlacementFileSystemReader(StorePath, FileSystemReader):
    """Reads all checkpoints that ``FileSystemReader`` reads, and takes the same arguments.

    ``dcp.load(state_dict, storage_reader=PlacementFileSystemReader(path), planner=...)``, with any
    planner. A directory that has only the metadata of single ranks, which
    ``dcp.save(..., use_collectives=False)`` writes, is refused.

    Args:
        path: A directory, or a URL that fsspec knows (``s3://bucket/checkpoint``).
        restricted: Whether the checkpoint is untrusted. ``.metadata`` is then read by a reader that
            makes only DCP's own records and calls nothing; objects (values that are no tensors) are
            loaded if ``torch.load(weights_only=True)`` accepts them, and refused otherwise, where
            DCP would call whatever their pickles name; files that are no plain files, and links
            that lead out of the checkpoint's directory, are refused. Tensors call nothing either
            way.
        check_crc: Whether what is read whole (all elements of a stored chunk, an object) is
            compared with the CRC-32 that torch's format has of it, whichever writer wrote it.
            Slices are not compared. Records without checksums are counted, and warned of once.
        thread_count: Threads that read; by default 8 from a URL, and 1 from a directory. The
            planner is called by one of them at a time.
        storage_options: What fsspec passes to the file system of a URL.

    Attributes:
        bytes_read: Bytes read from data files so far.
        opens: Number of data files opened so far.
        reads: Number of calls that read from data files so far.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        check_crc: bool = True,
        restricted: bool = False,
        thread_count: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        path = self._absolute(path)
        super().__init__(path, *args, **kwargs)
        self.check_crc = check_crc
        self.restricted = restricted
        self.thread_count = thread_count
        self._storage_options = dict(storage_options or {})
        self.bytes_read = self.opens = self.reads = 0
        self._stored: Mapping[str, Any] = {}
        self._ids: Mapping[str, StoredLocation] = {}
        self._refusal: Exception | None = None
        self._use(path)

    @logged_where_torch_drops_it
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata. Called on every rank.

        Raises:
            NoCheckpoint: There are no metadata.
            PlacementError: The metadata cannot be read, or are refused with ``restricted``. With
                ``rank=`` always, because metadata of one rank describe only its own chunks.
        """
        if kwargs.get("rank") is not None:
            # Torch asks for these after those of all ranks were refused.
            raise PlacementError("for the same reason") from self._refusal
        self._refusal = None
        try:
            name = os.path.basename(self._get_metadata_path(None))
            if self.store.entry(name) is None:
                raise no_checkpoint(self.store)
            metadata = self._read_metadata(name)
        except Exception as error:
            self._refusal = error
            raise
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        # Anything else is refused when the load begins.
        if isinstance(metadata.storage_meta, StorageMeta):
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the checkpoint's metadata. Called on every rank.

        Raises:
            PlacementError: DCP does not write such metadata.
        """
        with refusing():
            check_facts(metadata)
        ids, faults = id_records(metadata.storage_data)
        raise_faults(IS_DAMAGED, faults)
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._stored = metadata.state_dict_metadata
        self._ids = ids

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Announce that this reader calls the planner's exchange. Called on every rank."""
        plan = super().prepare_local_plan(plan)
        if isinstance(plan.planner_data, WantsReader):
            return replace(plan, planner_data=plan.planner_data.with_reader())
        return plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items. Called on every rank.

        Raises:
            PlacementError: Files do not hold what the metadata say.
        """
        opens, nbytes = self.opens, self.bytes_read
        failed: BaseException | None = None
        readers: list[ChunkReader] = []
        try:
            self._read(plan, planner, readers)
        except BaseException as error:
            # Ranks that wait for this rank's reads have to learn of it.
            failed = error
        unchecked = sum(reader.unchecked for reader in readers)
        if isinstance(planner, AfterReads):
            traffic = Traffic(self.opens - opens, self.bytes_read - nbytes)
            planner.finish_reads(plan, failed, traffic=traffic, unchecked=unchecked)
        elif failed is not None:
            raise failed
        self._warn_of_unchecked(unchecked)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _warn_of_unchecked(self, records: int) -> None:
        if records and global_rank() == 0:
            warnings.warn(
                f"{self.path}: {format_count(records, 'record')} on rank 0 read without a "
                "comparison, as checksums are not there\n"
                "    likely:      saved after torch.serialization.set_crc32_options(False)\n"
                "    way out:     save with checksums; PlacementFileSystemReader(check_crc=False) "
                "does not look for them",
                stacklevel=3,
            )

    def _read(self, plan: LoadPlan, planner: LoadPlanner, readers: list[ChunkReader]) -> None:
        """Read items; append each thread's reader to ``readers``."""
        threads = self.thread_count or self.store.reading_threads
        with quiet_gc():
            items = plan.items
            if self._ids:
                items = [i for i in items if not i.storage_index.fqn.startswith(ID_PREFIX)]
            locations = locations_of(items, self.storage_data, global_rank())
            wanted = [
                RecordRead(
                    item, location.path, location.start, location.length, location.transforms
                )
                for item, location in zip(items, locations, strict=True)
            ]
            wanted.sort(key=itemgetter(1, 2, 3))
            files = {file: list(some) for file, some in groupby(wanted, itemgetter(1))}
        ids = {record.path: record for record in ids_to_check(files, self._ids)}
        files |= {file: [] for file in ids if file not in files}
        most = threads // max(len(files), 1)
        jobs = [(file, share) for file in sorted(files) for share in _shares(files[file], most)]
        waiting, lock, grad = iter(jobs), threading.Lock(), torch.is_grad_enabled()

        def read() -> None:
            # Each thread has its own buffers.
            work = ChunkReader(
                planner,
                self._stored,
                self.transforms.transform_load_stream,
                storage_data=self.storage_data,
                check_crc=self.check_crc,
                restricted=self.restricted,
                lock=lock,
            )
            readers.append(work)
            with torch.set_grad_enabled(grad):  # the setting of a thread, not of the process
                for name, share in waiting:
                    try:
                        self._read_file(work, name, share, ids.get(name))
                    except BaseException:
                        jobs.clear()  # the other threads end, too
                        raise

        if min(threads, len(jobs)) <= 1:
            with quiet_gc():
                read()
        else:
            with ThreadPoolExecutor(min(threads, len(jobs))) as pool:
                for result in [pool.submit(read) for _ in range(min(threads, len(jobs)))]:
                    result.result()
        # Files whose ids count for other files may have been replaced before those were read.
        others = [file for file in files if files[file] and file not in self._ids]
        for record in ids_to_check(others, self._ids):
            self._read_file(readers[0], record.path, [], record)

    def _read_file(
        self,
        work: ChunkReader,
        name: str,
        wanted: Sequence[RecordRead],
        record: StoredLocation | None,
    ) -> None:
        """Read the records of one file. Runs in any thread."""
        with ExitStack() as stack:
            try:
                file = CountedFile(stack.enter_context(self.store.open(name)))
            except FileNotFoundError as error:
                fault = missing_file(name)
                if wanted:
                    fault = with_copies(fault, self.storage_data, wanted[0].item, name)
                text = format_faults("the checkpoint is not whole", [fault])
                raise PlacementError(text) from error
            try:
                self._check_id(file, record)
                work.read(file, wanted)
                if wanted:
                    # Torch's writer writes into the file that is there.
                    self._check_id(file, record)
            except EOFError as error:  # it was cut off since it was opened
                text = f"it cannot be read: {error}"
                raise fault_error(IS_DAMAGED, name, text, *DAMAGED) from error
            finally:
                with _COUNTING:
                    self.opens += 1
                    self.bytes_read += file.nbytes
                    self.reads += file.reads

    def _check_id(self, file: CountedFile, record: StoredLocation | None) -> None:
        """Compare the id of the save that wrote a file with the id in the metadata.

        Raises:
            PlacementError: The ids differ.
        """
        if record is None:
            return
        nbytes = max(min(record.length, ID_NBYTES, file.size - record.start), 0)
        stream: Any = ByteRange(file, record.start, nbytes).stream()
        if record.transforms:
            undone = self.transforms.transform_load_stream
            try:
                stream = undone(id_item(record), record.transforms, stream)
            except ValueError as error:  # of torch's registry of extensions
                text = f"its id cannot be decoded: {error}"
                raise fault_error(IS_DAMAGED, record.path, text, *NO_EXTENSION) from error
        raise_faults(MIXED, filter(None, [id_fault(record, bytes(stream.read(-1)))]))

    def _read_metadata(self, name: str) -> Metadata:
        try:
            return read_metadata(self.store.opener(name), restricted=self.restricted)
        except (PlacementError, OSError):
            raise
        except Exception as error:
            # A broken or hostile pickle can raise anything.
            # A traceback would print the cause, which has untrusted text.
            cause = None if self.restricted else error
            raise unreadable_metadata(self.store, name, error) from cause


SHARE_NBYTES = 1 << 20
"""The least bytes of a file for each thread, where several read it."""


def _shares(wanted: Sequence[RecordRead], most: int) -> Iterator[Sequence[RecordRead]]:
    """Yield the reads of a file in up to ``most`` shares, for as many threads."""
    shares = max(min(most, 1 + sum([read.nbytes for read in wanted]) // SHARE_NBYTES), 1)
    step = max(-(-len(wanted) // shares), 1)
    for start in range(0, max(len(wanted), 1), step):
        yield wanted[start : start + step]


_COUNTING = threading.Lock()
