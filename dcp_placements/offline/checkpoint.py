"""A checkpoint to read, whatever its format: tensors made of chunks, each with a place in a file.

A format is one class, in ``sources``: it says which files are its own, how they are described in
DCP's terms, and what proves a record. All else stands here, once, so that commands see one kind of
checkpoint. Of two ep ranks::

    source.tensors["experts.w1"].chunks    (StoredRecord("experts.w1", [0:2, :], "__0_0.distcp", 0),
                                            StoredRecord("experts.w1", [2:4, :], "__1_0.distcp", 0))
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements.errors import (
    CannotLook,
    PlacementError,
)
from dcp_placements.items import object_read
from dcp_placements.layout.boxes import Index, as_boxes, unique
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.directory import versions_of
from dcp_placements.rules.mesh_axes import MeshAxes
from dcp_placements.short_text import (
    format_error,
    format_name,
    format_names,
    near_names,
)
from dcp_placements.storage.file_reads import ByteRange
from dcp_placements.storage.index import RowIndex, index_of
from dcp_placements.storage.provenance import SaveRecord, provenance_of, record_of
from dcp_placements.storage.record_head import RecordHead
from dcp_placements.storage.safe_pickle import RefusedGlobal
from dcp_placements.storage.save_ids import (
    writer_of,
)
from dcp_placements.storage.state_dict_file import Records
from dcp_placements.storage.store import Store
from dcp_placements.storage.torch_metadata import Offset

MOST_ROWS = 1 << 26
"""Chunks of a checkpoint of unknown origin that are handled one by one."""


NEAR_KEYS, NEAR_CHUNKS = 64, 16
"""So many adjacent keys are looked up together, of at most so many chunks each."""


class StoredRecord(NamedTuple):
    """A stretch of a file, as the metadata describe it: one chunk of a tensor, or an object."""

    fqn: str  # the key
    box: Box | None  # the chunk's box in the whole tensor; None for an object
    file: str | None = None  # name of its file; None where the metadata name none
    # Offset of its record in the file, in bytes. A record of a ``.distcp`` file is a small zip file
    # around the elements; one of a safetensors file is the elements
    start: int = 0
    nbytes: int = 0  # length of the record
    # Names of the transforms that the record went through, such as compression
    transforms: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """The offset of its end in the file, in bytes."""
        return self.start + self.nbytes

    @property
    def rank(self) -> int | None:
        """The rank that wrote it, by its file's name; None where the name has no rank."""
        return None if self.file is None else writer_of(self.file)


class SourceTensor:
    """A whole tensor: a stored one, or one that a rename makes."""

    __slots__ = ()
    fqn: str  # its key
    shape: tuple[int, ...]  # shape of the whole tensor
    dtype: torch.dtype  # dtype of its elements

    @property
    def dtype_name(self) -> str:
        """The name of the dtype, without ``torch.``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def origin(self) -> str:
        """What its elements are, as text that differs where they do."""
        return self.fqn

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor's elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> Box:
        """The box of the whole tensor."""
        return Box.whole(self.shape)


class ChunkBoxes(Index):
    """The boxes of tensors that are cut alike, in the metadata's order."""

    @cached_property
    def listed(self) -> tuple[Box, ...]:
        """The boxes, one object each."""
        return tuple(as_boxes(self.boxes))

    @cached_property
    def by_offset(self) -> dict[Offset, Box | None]:
        """The boxes by their offsets; of two with equal offsets, the one with elements."""
        return {box.offsets: box for box in sorted(self.listed, key=lambda box: box.numel)}


@dataclass(slots=True, eq=False)  # frozen would be three times as slow to make
class StoredTensor(SourceTensor):
    """One stored tensor."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: ChunkBoxes
    _checkpoint: Checkpoint

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Boxes of its chunks, in the metadata's order; tensors with equal boxes share them."""
        return self.cut.listed

    @property
    def count(self) -> int:
        """The number of its chunks."""
        return len(self.cut.boxes)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold any of it, sorted."""
        return self._checkpoint.files_by_key.get(self.fqn, ())

    @property
    def chunks(self) -> tuple[StoredRecord, ...]:
        """Its chunks, one for each of ``boxes``."""
        locations = self._checkpoint.locations_of(self.fqn)
        nowhere: tuple[Any, ...] = (None,)
        return tuple(
            [
                StoredRecord(self.fqn, box, *locations.get(box.offsets, nowhere))
                for box in self.boxes
            ]
        )


@dataclass(slots=True)
class LeftOut:
    """Something in ranks' files that is not in the checkpoint."""

    what: str  # its name in the files
    why: str  # the reason
    entries: int = 0  # number of entries of that name
    nbytes: int = 0  # bytes of tensors in them


class WholeTensors(NamedTuple):
    """Tensors that ranks' files hold together, described in DCP's terms.

    Attributes:
        directory: The files.
        files: Names of the ranks' files.
        metadata: Metadata of the whole tensors.
        records: Where their chunks are in the files.
        notes: Contents that are not read.
        left_out: Contents of the files that are no tensors of the model.
        accounted: Bytes of the files beside the tensors, by what became of them.
        versions: Versions of all files, from before they were read.
    """

    directory: Store
    files: Sequence[str]
    metadata: Metadata
    records: Records
    notes: Sequence[str]
    left_out: Sequence[LeftOut]
    accounted: Mapping[str, int]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What the names of files do not say; ``open_source`` has their meanings."""

    files: str | None = None
    rules: Callable[..., Any] | None = None
    axes: MeshAxes | None = None
    vocab_size: int | None = None
    expert_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class CheckpointFault:
    """One fault of a checkpoint."""

    kind: str  # the kind, one stable word; the guide of cli lists them
    tensors: tuple[str, ...]  # the keys concerned, sorted
    files: tuple[str, ...]  # the files concerned, sorted
    message: str  # the numbers in the files against those declared


FileFinding = tuple[str, str]
"""The kind of a fault, and its message without the record's name."""


class RecordChecks(Protocol):
    """The checks of ``verify`` that a format asks for, of its records and files."""

    def saved(self, byte_range: ByteRange, record: StoredRecord) -> Iterator[FileFinding]:
        """Yield the faults of a record that is a file of ``torch.save`` of its own."""

    def checksums(self, byte_range: ByteRange) -> Iterator[FileFinding]:
        """Yield the parts of a file of ``torch.save`` that do not match their checksums."""

    def advance(self, nbytes: int) -> None:
        """Count bytes as checked."""


class Checkpoint(ABC):
    """A checkpoint, opened to be read. No process group is needed, and no data is read yet.

    ``open_source`` makes them. A subclass is a format.

    Args:
        directory: The files.
        metadata: DCP's metadata, or other metadata in DCP's terms.
        notes: Contents that are not read.
        left_out: Contents of the files that are no tensors of the model.
        accounted: Bytes of the files beside the tensors, by what became of them.
        absent: File by key, of keys that an index names and the file lacks.
        versions: File versions from before anything was read; by default those at the beginning of
            a conversion.

    Attributes:
        subject: What its files are, for messages.
        takes: The names of the options of ``open_source`` that it takes.
        format: Its name, such as ``"dcp"``, as ``inspect`` shows it.
        is_beside_others: Whether files of other formats may be beside it.
        is_dcp: Whether DCP's readers read it as it is.
        is_of_hub: Whether its keys are a model's alone, and scales stand beside quantized weights,
            as on the Hugging Face hub.
        holds_objects: Whether objects are read, not tensors alone.
        may_share_bytes: Whether two records may share a part of their bytes.
        unproved: Why nothing proves the contents; empty where checksums do.
        is_compared: Whether all of its files were compared with their checksums.
        why_not_resharded: Why it is not rewritten for another world; empty where it is.
        rows: The locations of all chunks.
        tensors: Tensors by key, in the checkpoint's order.
        objects: Objects by key.
        provenance: Facts about its save that it stores; None where it stores none.
        versions: File versions; a conversion is refused if they change.

    Raises:
        CannotLook: Metadata cannot be read or are refused.
    """

    subject: ClassVar[str]
    takes: ClassVar[tuple[str, ...]] = ()
    format: str
    is_beside_others: ClassVar[bool] = False
    is_dcp: ClassVar[bool] = False
    is_of_hub: ClassVar[bool] = False
    holds_objects: ClassVar[bool] = False
    may_share_bytes: ClassVar[bool] = False
    unproved: ClassVar[str] = ""
    is_compared: bool = False
    why_not_resharded: str = ""

    def __init__(
        self,
        directory: Store,
        metadata: Metadata,
        *,
        notes: Sequence[str] = (),
        left_out: Sequence[LeftOut] = (),
        accounted: Mapping[str, int] | None = None,
        absent: Mapping[str, str] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.directory, self.metadata = directory, metadata
        self.notes, self.left_out = notes, left_out
        self.accounted, self.absent = accounted or {}, absent or {}
        self.versions = versions or {}
        rows = metadata.storage_data
        self.rows = rows if isinstance(rows, RowIndex) else index_of(metadata)
        entries = self.rows.entries
        self._located = lru_cache(maxsize=256)(self._near_locations)
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, StoredRecord] = {}
        cuts = [ChunkBoxes(chunks.array) for chunks in entries.lists]
        kinds: list[tuple[tuple[int, ...], torch.dtype, ChunkBoxes] | None] = [
            (tuple(form.size), form.properties.dtype, cuts[n]) if n >= 0 else None
            for form, n in zip(entries.forms, entries.list_of, strict=True)
        ]
        for fqn, number in zip(entries.fqns, entries.form_of, strict=True):
            kind = kinds[number]
            if kind is None:
                location = self.locations_of(fqn).get(None)
                self.objects[fqn] = StoredRecord(fqn, None, *(location or (None,)))
            else:
                shape, dtype, cut = kind
                self.tensors[fqn] = StoredTensor(fqn, shape, dtype, cut, self)
        self.provenance: Mapping[str, Any] | None = provenance_of(metadata)

    @classmethod
    @abstractmethod
    def is_in(cls, names: Sequence[str]) -> bool:
        """Whether a directory with files and directories of these names has this format."""

    @classmethod
    @abstractmethod
    def of(cls, directory: Store, options: SourceOptions) -> Self:
        """Return the checkpoint in a directory."""

    @abstractmethod
    def head(self, tensor: StoredTensor, chunk: StoredRecord) -> RecordHead | None:
        """Return what the record of a ``chunk`` of a ``tensor`` is; None if the record says it."""

    @abstractmethod
    def verify_record(
        self, checks: RecordChecks, byte_range: ByteRange, record: StoredRecord
    ) -> Iterator[FileFinding]:
        """Yield the faults of a record, by the checks that its format has.

        Args:
            checks: The checks.
            byte_range: The bytes of the record.
            record: The record of a chunk or an object.
        """

    def verify_file(self, checks: RecordChecks, file: ByteRange) -> Iterator[FileFinding]:
        """Yield the faults of the contents of a whole ``file``, where it has checksums of its own.

        Args:
            checks: The checks.
            file: The bytes of the file.
        """
        return iter(())

    def own_faults(self) -> Iterator[CheckpointFault]:
        """Yield faults that only its format can have: files of another save."""
        return iter(())

    def description_faults(self, *, contents: bool) -> Iterator[CheckpointFault]:
        """Yield faults of the file that describes it, which its data do not share.

        Args:
            contents: Whether everything is read.
        """
        return iter(())

    def signs(self) -> Iterator[str]:
        """Yield signs of damage that prove none."""
        return iter(())

    def changed_files(self) -> list[str]:
        """Return what describes it and was written again since it was opened."""
        return []

    def identity(self) -> Iterator[object]:
        """Yield what decides its tensors and has no version of a file."""
        return iter(())

    def names_before_export(self) -> Mapping[str, str]:
        """Map names of tensors to those before the rename of the export that wrote the files."""
        return {}

    def begin_conversion(self) -> None:
        """Note file versions, unless they were noted; and prove what reads of records do not.

        Raises:
            CannotLook: The contents of a file are not what was written.
        """
        self.versions = self.versions or versions_of(self.directory, self.files)

    @property
    def path(self) -> str:
        """Its directory or URL."""
        return self.directory.path

    @cached_property
    def record(self) -> SaveRecord | None:
        """The record of its save; None where it has none."""
        return record_of(self.provenance, tuple(self.metadata.state_dict_metadata))

    @cached_property
    def files(self) -> dict[str, int | None]:
        """Bytes of every file that the metadata name, sorted by name; None for a missing one."""
        return {name: self.directory.size(name) for name in sorted(set(self.rows.files))}

    @cached_property
    def other_files(self) -> dict[str, int]:
        """Bytes of the files in the directory that hold no tensor or object."""
        return {
            name: size
            for name in self.directory.names()
            if name not in self.files and (size := self.directory.size(name)) is not None
        }

    def tensor(self, fqn: str) -> StoredTensor:
        """Return the tensor of key ``fqn``.

        Raises:
            CannotLook: There is none of that name; near names are in the message.
        """
        if fqn in self.tensors:
            return self.tensors[fqn]
        if fqn in self.objects:
            raise CannotLook(f"{fqn} is an object and no tensor")
        near = [key for key in self.tensors if key.endswith("." + fqn)]
        near = near or near_names(fqn, self.tensors, 4)
        likely = f"likely:      {format_names(near, 4)}"
        hint = likely if near else "way out:     inspect lists its keys"
        raise CannotLook(f"{self.path}: no tensor {format_name(fqn)}\n    {hint}")

    @cached_property
    def files_by_key(self) -> dict[str, tuple[str, ...]]:
        """Names of the files that hold any of a key, sorted, by key."""
        rows = self.rows
        files_of: dict[str, tuple[str, ...]] = {}
        for keys in self.key_classes:
            number = int(rows.class_of[keys[0]])
            for some, table in rows.row_batches(number, np.array(keys)) if number >= 0 else ():
                first, kinds = unique(table.file)
                names = [
                    tuple(sorted({rows.files[file] for file in files}))
                    for files in table.file[first].tolist()
                ]
                fqns = map(rows.fqns.__getitem__, some.tolist())
                files_of.update(zip(fqns, map(names.__getitem__, kinds.tolist()), strict=True))
        return files_of

    def locations_of(self, fqn: str) -> dict[Offset, tuple[Any, ...]]:
        """Return file, start, nbytes and transforms of each chunk of ``fqn``, by offset."""
        number = self.rows.numbers.get(fqn, -1)
        if number >= 0 and (held := self._located(number // NEAR_KEYS).get(number)) is not None:
            return held
        return {
            row.offset: (row.path, row.start, row.length, row.transforms or ())
            for row in self.rows.rows_of(fqn)
        }

    def _near_locations(self, batch: int) -> dict[int, dict[Offset, tuple[Any, ...]]]:
        """Return ``locations_of`` of adjacent keys by number, but of those with many chunks.

        To look up one key takes as long as some dozens, and most commands go through all keys.
        """
        rows = self.rows
        class_of = rows.class_of[batch * NEAR_KEYS : (batch + 1) * NEAR_KEYS]
        steps = [names or () for names in rows.transforms]
        located: dict[int, dict[Offset, tuple[Any, ...]]] = {}
        for number in np.unique(class_of[class_of >= 0]).tolist():
            offsets = rows.offsets(number)
            if len(offsets) > NEAR_CHUNKS:
                continue
            keys = np.flatnonzero(class_of == number) + batch * NEAR_KEYS
            for some, table in rows.row_batches(number, keys):
                by_key = np.stack(table, axis=2).tolist()
                for key, places in zip(some.tolist(), by_key, strict=True):
                    located[key] = {
                        offset: (rows.files[file], start, nbytes, steps[step])
                        for offset, (file, step, start, nbytes) in zip(offsets, places, strict=True)
                    }
        return located

    def boxes_of(self, fqn: str) -> Mapping[Offset, Box | None]:
        """Return the listed chunks of ``fqn``, by offset; none of an unknown key."""
        if fqn in self.tensors:
            return self.tensors[fqn].cut.by_offset
        return {None: None} if fqn in self.objects else {}

    @cached_property
    def key_classes(self) -> list[list[int]]:
        """Numbers of keys in ``rows``; keys that are cut and placed equally are in one list."""
        entries, count = self.rows.entries, len(self.rows.fqns)
        cuts = np.full(count, -2)  # of keys without an entry
        cuts[: len(entries.fqns)] = np.array([*entries.list_of, -1])[entries.form_of]
        _, numbers = unique(np.stack([self.rows.class_of, cuts], axis=1))
        order = np.argsort(numbers, kind="stable")
        classes = np.split(order, np.cumsum(np.bincount(numbers))[:-1])
        return sorted([keys.tolist() for keys in classes if len(keys)])

    def records(self) -> Iterator[StoredRecord]:
        """Yield the records of all tensors and objects that have a location, and their copies."""
        rows = self.rows
        files, steps, fqns = rows.files, [names or () for names in rows.transforms], rows.fqns
        for keys in self.key_classes:
            offsets, boxes = rows.offsets_of(fqns[keys[0]]), self.boxes_of(fqns[keys[0]])
            chunks = [
                (index, boxes[offset]) for index, offset in enumerate(offsets) if offset in boxes
            ]
            if not chunks:
                continue
            for some, table in rows.row_batches(int(rows.class_of[keys[0]]), np.array(keys)):
                by_key = np.stack(table, axis=2).tolist()
                for key, locations in zip(some.tolist(), by_key, strict=True):
                    for index, box in chunks:
                        file, step, start, length = locations[index]
                        location = files[file], start, length, steps[step]
                        yield StoredRecord(fqns[key], box, *location)
        for fqn, tensor in self.tensors.items() if rows.has_copies else ():
            first, boxes = None, tensor.cut.by_offset
            for row in rows.rows_of(fqn, copies=True):
                if row.offset is not None and row.offset == first and row.offset in boxes:
                    location = row.path, row.start, row.length, row.transforms or ()
                    yield StoredRecord(fqn, boxes[row.offset], *location)
                first = row.offset

    def read_record(self, stored: StoredRecord, most: int) -> bytes | None:
        """Return the record of a chunk or an object, as it was before its transforms.

        Args:
            stored: One of the checkpoint's.
            most: Largest number of bytes to return.

        Returns:
            The bytes; None where there are more, before or after the transforms.

        Raises:
            FileNotFoundError: The metadata name no file for it, or it is not there.
            OSError: The file cannot be read.
            Exception: A transform is not known here, or cannot be undone.
        """
        if stored.file is None:
            raise FileNotFoundError("the metadata names no file for it")
        if stored.nbytes > most:
            return None
        with self.directory.open(stored.file) as stream:
            stream.seek(stored.start)
            record = stream.read(stored.nbytes)
        if not stored.transforms:
            return record
        from torch.distributed.checkpoint import FileSystemReader

        undone = FileSystemReader(".").transforms.transform_load_stream
        stream = undone(
            object_read(MetadataIndex(stored.fqn)), stored.transforms, io.BytesIO(record)
        )
        content: bytes = stream.read(most + 1)
        return None if len(content) > most else content


AnySource = str | os.PathLike[str] | Checkpoint
"""A path or URL, or an opened checkpoint, whose own options count."""


@lru_cache(maxsize=1 << 10)
def ranks_of(files: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks that wrote files, sorted, by the files' names."""
    return tuple(sorted({rank for file in files if (rank := writer_of(file)) is not None}))


@contextmanager
def reading(directory: Store, name: str) -> Iterator[None]:
    """Turn every error of the block, which reads metadata, into one message."""
    where = f"{directory.path}/{name}"
    try:
        yield
    except RefusedGlobal as error:
        raise CannotLook(
            f"{where}: refused, {error}\n"
            "    why:         a pickle calls what it names; nothing of it was executed\n"
            "    way out:     a file of unknown origin should not be loaded by anything else either"
        ) from error
    except OSError as error:
        raise CannotLook(f"{where}: cannot be read: {format_name(error)}") from error
    except PlacementError as error:
        # Its text is this package's, and has nothing of the file's.
        raise CannotLook(f"{where}: {error}") from error
    except Exception as error:
        # A broken or hostile pickle can raise anything.
        raise CannotLook(
            f"{where}: this is no metadata of DCP's that can be read\n"
            f"    found:       {format_error(error)}\n"
            "    likely:      the file was damaged or cut short"
        ) from error


def check_count(path: str, count: int) -> None:
    """Refuse more chunks than can be handled one by one; an index may claim any number.

    Args:
        path: Path of the checkpoint, for the message.
        count: Number of chunks.

    Raises:
        CannotLook: There are more.
    """
    if count > MOST_ROWS:
        raise CannotLook(
            f"{path}: {count:,} chunks, and at most {MOST_ROWS:,} are handled one by one\n"
            "    why:         each takes memory, or space on the disk, and a small index can claim "
            "any number\n"
            "    way out:     PlacementFileSystemReader loads a checkpoint of any size"
        )
