"""``inspect``: what is in a checkpoint, and where the chunks of one tensor are.

Values of small objects are shown: numbers, strings and containers of them. Nothing is called.
"""

from __future__ import annotations

import io
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dcp_placements.errors import (
    KeyFamily,
    families,
    format_count,
    format_name,
    format_nbytes,
    natural_key,
)
from dcp_placements.layout.boxes import format_box
from dcp_placements.layout.sharding import Box, Cuts
from dcp_placements.offline.checkpoint import Checkpoint, StoredRecord, StoredTensor, ranks_of
from dcp_placements.offline.declared import matching_keys
from dcp_placements.offline.texts import format_table, ranges, short
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.checked_load import saved_pickle
from dcp_placements.storage.provenance import SaveRecord
from dcp_placements.storage.safe_pickle import DTYPES, ORDERED_DICT, SafeUnpickler
from dcp_placements.storage.save_ids import writer_of

MAX_GROUPS = 12
"""Groups of tensors, and of objects, that are shown at first."""

MAX_CUTS = 6
MAX_VALUE = 60
"""Characters of an object's value that are shown."""

READ_NBYTES = 1 << 16
"""The longest record whose value is read."""

READ_OBJECTS = 32
"""Objects whose values are read: at a URL each takes a request."""

MAX_DEPTH = 8
MAX_ELEMENTS = 1000

SHOWN_PROVENANCE = ("save_id", "step", "world_size", "versions")
"""The other keys have an entry for each tensor."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # its torch name without ``torch.``
    chunks: int  # number of boxes that it is stored as
    files: tuple[str, ...]  # names of the files that hold any of it
    ranks: tuple[int, ...]  # ranks that wrote any of it, as far as the files' names tell
    nbytes: int  # bytes of the whole tensor's elements


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One key that is no tensor."""

    files: tuple[str, ...]  # the name of its file; none if the metadata names none
    nbytes: int  # length of its record
    # What it is, if it is small and plain: numbers, strings and containers of them; else None
    value: Any = None


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors whose keys differ in numbers alone, with one shape and dtype."""

    name: str  # their keys as one name, with ranges of numbers
    tensors: int  # how many they are
    shape: tuple[int, ...]  # of each whole tensor
    dtype: str  # its torch name without ``torch.``
    chunks: int  # of all of them
    ranks: tuple[int, ...]  # ranks that wrote any of them, as far as the files' names show
    nbytes: int  # bytes of all their elements


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file."""

    nbytes: int | None  # its size; None if it is missing
    rank: int | None  # the rank that wrote it, if its name tells
    data: bool  # whether it holds tensors or objects


@dataclass(frozen=True, slots=True)
class CutsInfo:
    """Tensors that were cut alike when they were saved."""

    cuts: tuple[str, ...]  # the cut of each axis as text, in the order in which they apply
    keys: tuple[str, ...]  # the tensors


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is in a checkpoint."""

    JSON: ClassVar[str] = "path format groups tensors objects files totals provenance cuts renames"

    path: str  # where it is
    format: str  # ``"dcp"``, ``"torch_dist"`` (Megatron) or ``"safetensors"``
    tensors: Mapping[str, TensorInfo]  # by key
    objects: Mapping[str, ObjectInfo]  # by key
    files: Mapping[str, FileInfo]  # by name; those that hold data, and the others beside them
    # Its record of the save (``save_id``, ``step``, ``world_size``, ``versions``); None if it has
    # none
    provenance: Mapping[str, Any] | None
    cuts: tuple[CutsInfo, ...] = ()  # the cuts of the save, if the checkpoint records them
    renames: tuple[str, ...] = ()  # the renames of the save, if the checkpoint records them

    @property
    def chunks(self) -> int:
        """Number of chunks of all tensors."""
        return sum(tensor.chunks for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors' elements."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that wrote any tensor."""
        return _ranks(self.tensors.values())

    @property
    def groups(self) -> tuple[TensorGroup, ...]:
        """The tensors by groups of numbered keys, in natural order."""
        with quiet_gc():
            kinds = {fqn: (tensor.shape, tensor.dtype) for fqn, tensor in self.tensors.items()}
            return tuple(
                [_group(one, [self.tensors[fqn] for fqn in one.keys]) for one in families(kinds)]
            )

    @property
    def totals(self) -> dict[str, Any]:
        """Counts over the whole checkpoint."""
        return {
            "tensors": len(self.tensors),
            "objects": len(self.objects),
            "chunks": self.chunks,
            "bytes": self.nbytes,
            "ranks": self.ranks,
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, *, keys: bool = False, width: int | None = None) -> str:
        """Return tensors, objects, files and the record of the save.

        Args:
            keys: Every key and every file, in place of groups of keys.
            width: Of a terminal, to which tables are folded.
        """
        listed = self._key_lines(width) if keys else self._group_lines(width)
        return "\n".join([*listed, "", *map(format_name, self._save_lines())])

    def _group_lines(self, width: int | None) -> list[str]:
        lines: list[str] = []
        groups = self.groups
        largest = sorted(groups, key=lambda group: group.nbytes, reverse=True)[:MAX_GROUPS]
        if groups:
            rows = [
                (
                    *(group.name, f"{group.tensors:,}", str(group.shape), group.dtype),
                    *(format_nbytes(group.nbytes), f"{group.chunks:,}", ranges(group.ranks)),
                )
                for group in groups
                if group in largest
            ]
            columns = ("tensors", "keys", "shape", "dtype", "bytes", "chunks", "ranks")
            lines += format_table(columns, rows, right="keys bytes chunks", width=width)
        if rest := len(groups) - len(largest):
            lines.append(f"... and {format_count(rest, 'smaller group')}; --keys lists every key")
        of_objects = families(list(self.objects))
        if of_objects:
            listed = []
            for family in of_objects[:MAX_GROUPS]:
                stored = [self.objects[key] for key in family.keys]
                value = _brief(stored[0].value) if len(stored) == 1 else "-"
                nbytes = format_nbytes(sum(one.nbytes for one in stored))
                listed.append((family.name, value, f"{len(stored):,}", nbytes))
            headings = ("objects", "value", "keys", "bytes")
            lines += ["", *format_table(headings, listed, right="keys bytes", width=width)]
        if more := of_objects[MAX_GROUPS:]:
            lines.append(f"... and {format_count(len(more), 'more group')}; --keys lists every key")
        return lines

    def _key_lines(self, width: int | None) -> list[str]:
        tensors: list[tuple[str, ...]] = [
            (
                *(fqn, str(tensor.shape), tensor.dtype, format_nbytes(tensor.nbytes)),
                *(f"{tensor.chunks:,}", short(tensor.files, 1), ranges(tensor.ranks)),
            )
            for fqn, tensor in self.tensors.items()
        ]
        objects: list[tuple[str, ...]] = [
            (fqn, _brief(one.value), format_nbytes(one.nbytes), short(one.files, 1))
            for fqn, one in self.objects.items()
        ]
        files: list[tuple[str, ...]] = [
            (
                name,
                "missing" if file.nbytes is None else format_nbytes(file.nbytes),
                "-" if file.rank is None else str(file.rank),
            )
            for name, file in self.files.items()
        ]
        lines: list[str] = []
        for columns, rows in (
            (("tensor", "shape", "dtype", "bytes", "chunks", "files", "ranks"), tensors),
            (("object", "value", "bytes", "file"), objects),
            (("file", "bytes", "rank"), files),
        ):
            if rows:
                rows.sort(key=lambda row: natural_key(row[0]))
                table = format_table(columns, rows, right="bytes chunks", width=width)
                lines += [*([""] if lines else []), *table]
        return lines

    def _save_lines(self) -> list[str]:
        files = {name: file for name, file in self.files.items() if file.data}
        missing = [name for name, file in files.items() if file.nbytes is None]
        nbytes = format_nbytes(sum(file.nbytes or 0 for file in files.values()))
        lines = [
            f"format:     {self.format}",
            f"totals:     {format_count(len(self.tensors), 'tensor')} in "
            f"{format_count(self.chunks, 'chunk')}, {format_nbytes(self.nbytes)}; "
            f"{format_count(len(self.objects), 'object')}",
            f"files:      {format_count(len(files), 'file')} of data, {nbytes}"
            + (f"; missing: {short(missing)}" if missing else ""),
            f"ranks:      {ranges(self.ranks)}",
        ]
        if self.provenance is None:
            lines.append("save:       the checkpoint has no record of it")
        for key, value in (self.provenance or {}).items():
            if isinstance(value, dict):
                value = ", ".join(f"{name} {item}" for name, item in value.items())
            if value not in ("", None):
                lines.append(f"{key.replace('_', ' ') + ':':<11} {value}")
        for number, group in enumerate(self.cuts[:MAX_CUTS]):
            names = short([family.name for family in families(group.keys)])
            label = "" if number else "cut:"
            lines.append(f"{label:<11} {names}: {', then '.join(group.cuts)}")
        if more := len(self.cuts) - MAX_CUTS:
            lines += [f"{'':<11} and {format_count(more, 'more cut')}; --json"] if more > 0 else []
        return [*lines, *[f"{'renamed:':<11} {rename}" for rename in self.renames]]


def inspect(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    fqn: str | None = None,
) -> Inspection:
    """Return what is in a checkpoint, by its metadata and the values of its small objects.

    Args:
        path: The checkpoint.
        fqn: A pattern, as in ``PlacementRules``: only the keys that match it are listed.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; or no key matches ``fqn``.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    with quiet_gc():
        return _inspected(checkpoint, fqn)


def _inspected(checkpoint: Checkpoint, fqn: str | None) -> Inspection:
    record = checkpoint.record
    provenance = checkpoint.provenance or {}
    keys = matching_keys(fqn, [*checkpoint.tensors, *checkpoint.objects])
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name in keys}
    objects = {name: stored for name, stored in checkpoint.objects.items() if name in keys}
    values = plain_values(checkpoint, objects.values())
    shown = {key: provenance[key] for key in SHOWN_PROVENANCE if key in provenance}
    return Inspection(
        path=checkpoint.path,
        format=checkpoint.format,
        tensors=_tensor_infos(tensors),
        objects={
            name: ObjectInfo((stored.file,) if stored.file else (), stored.nbytes, values.get(name))
            for name, stored in objects.items()
        },
        files={
            name: FileInfo(size, writer_of(name), name in checkpoint.files)
            for name, size in sorted({**checkpoint.files, **checkpoint.other_files}.items())
        },
        provenance=shown if provenance else None,
        cuts=() if record is None else _cuts(record, tensors),
        renames=() if record is None else tuple(map(str, record.renames)),
    )


def _tensor_infos(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorInfo]:
    """Return what is shown of each tensor; tensors that differ in their keys alone share it."""
    alike: dict[Hashable, TensorInfo] = {}
    infos = {}
    for fqn, tensor in tensors.items():
        files = tensor.files
        kind = tensor.shape, tensor.dtype, tensor.count, files
        info = alike.get(kind)
        if info is None:
            info = alike[kind] = TensorInfo(
                tensor.shape,
                tensor.dtype_name,
                tensor.count,
                files,
                ranks_of(files),
                tensor.nbytes,
            )
        infos[fqn] = info
    return infos


def _ranks(tensors: Iterable[TensorInfo]) -> tuple[int, ...]:
    """Return the ranks that wrote any of some tensors, sorted."""
    ranks: set[int] = set()
    last: tuple[int, ...] = ()
    for tensor in tensors:
        # Tensors that are alike share one tuple, which may have thousands of ranks.
        if tensor.ranks is not last:
            last = tensor.ranks
            ranks.update(last)
    return tuple(sorted(ranks))


def _group(family: KeyFamily, tensors: Sequence[TensorInfo]) -> TensorGroup:
    return TensorGroup(
        name=family.name,
        tensors=len(tensors),
        shape=tensors[0].shape,
        dtype=tensors[0].dtype,
        chunks=sum(tensor.chunks for tensor in tensors),
        ranks=_ranks(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
    )


def _cuts(record: SaveRecord, fqns: Iterable[str]) -> tuple[CutsInfo, ...]:
    keys: dict[Cuts, list[str]] = {}
    for fqn in fqns:
        if cuts := record.cuts(fqn):
            keys.setdefault(cuts, []).append(fqn)
    return tuple(CutsInfo(tuple(map(str, cuts)), tuple(fqns)) for cuts, fqns in keys.items())


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """One chunk of a tensor, and its record in a file."""

    JSON: ClassVar[str] = "box file start nbytes rank"

    box: Box  # in the whole tensor
    file: str | None  # None where the metadata name no place
    start: int  # where its record begins in the file, in bytes
    nbytes: int  # length of the record
    rank: int | None  # the rank that wrote it, if the file's name tells


@dataclass(frozen=True, slots=True)
class TensorChunks:
    """Where one tensor of a checkpoint is stored."""

    fqn: str  # its key
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # its torch name without ``torch.``
    nbytes: int  # of the whole tensor's elements
    cuts: tuple[str, ...]  # the cut of each axis, if the checkpoint records them
    chunks: tuple[ChunkInfo, ...]  # in the metadata's order

    def __str__(self) -> str:
        return self.text()

    def text(self, *, width: int | None = None) -> str:
        """Return a line for each chunk, and what the tensor is; ``width`` as of ``Inspection``."""
        rows = [
            (
                format_box(chunk.box, self.shape),
                "-" if chunk.rank is None else str(chunk.rank),
                "nowhere" if chunk.file is None else chunk.file,
                *(f"{chunk.start:,}", f"{chunk.nbytes:,}"),
            )
            for chunk in self.chunks
        ]
        columns = ("chunk", "rank", "file", "offset", "length")
        lines = format_table(columns, rows, right="rank offset length", width=width)
        whole = f"{self.shape} {self.dtype}, {format_nbytes(self.nbytes)}"
        lines += ["", f"{self.fqn}: {whole} in {format_count(len(self.chunks), 'chunk')}"]
        lines += [f"cut: {', then '.join(self.cuts)}"] if self.cuts else []
        return "\n".join(map(format_name, lines))


def inspect_tensor(path: str | os.PathLike[str] | Checkpoint, fqn: str) -> TensorChunks:
    """Return where the chunks of one tensor are: box, file, offset, length and writer.

    Args:
        path: The checkpoint.
        fqn: The tensor's key.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; or it has no such tensor.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    tensor, record = checkpoint.tensor(fqn), checkpoint.record
    return TensorChunks(
        fqn,
        tensor.shape,
        tensor.dtype_name,
        tensor.nbytes,
        () if record is None else tuple(map(str, record.cuts(fqn) or ())),
        tuple(
            [
                ChunkInfo(box, one.file, one.start, one.nbytes, one.writer)
                for box, one in zip(tensor.boxes, tensor.chunks, strict=True)
            ]
        ),
    )


class _PlainUnpickler(SafeUnpickler):
    subject = "a plain value"
    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {
        **ORDERED_DICT,
        **{name: str(dtype) for name, dtype in DTYPES.items()},
    }


def plain_values(checkpoint: Checkpoint, objects: Iterable[StoredRecord]) -> dict[str, Any]:
    """Return the values of the first small objects, by key.

    Objects that are large or broken, and those that hold other values, are left out.
    """
    values = {}
    small = [stored for stored in objects if stored.nbytes <= READ_NBYTES]
    for stored in small[:READ_OBJECTS]:
        try:
            record = checkpoint.read_record(stored, READ_NBYTES)
            data, _ = saved_pickle(io.BytesIO(record or b""))
            value = _PlainUnpickler(data).load()
        except Exception:
            # A broken or hostile record can raise anything; verify reports it.
            continue
        if _is_small(value):
            values[stored.fqn] = value
    return values


def _is_small(value: Any) -> bool:
    """Whether a value is short to print; a file can refer to one list again and again."""
    count = 0
    todo = [(value, 0)]
    while todo:
        inner, depth = todo.pop()
        count += 1
        if count > MAX_ELEMENTS or depth > MAX_DEPTH:
            return False
        if isinstance(inner, Mapping):
            if not all(isinstance(key, str | int) for key in inner):
                return False  # JSON has no other keys
            todo += [(item, depth + 1) for item in inner.values()]
        elif isinstance(inner, list | tuple | set | frozenset):
            todo += [(item, depth + 1) for item in inner]
    return True


def _brief(value: object) -> str:
    text = "-" if value is None else repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."
