"""``inspect``: what is in a checkpoint, where the chunks of one tensor are, and all shapes.

Values of small objects are shown: numbers, strings and containers of them. Nothing is called.
"""

from __future__ import annotations

import io
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pickle import UnpicklingError
from typing import Any, ClassVar, TypeVar

from dcp_placements.errors import CannotLook
from dcp_placements.items import quiet_gc
from dcp_placements.layout.boxes import format_box
from dcp_placements.layout.sharding import Box, Cuts
from dcp_placements.names.rename_results import Rename
from dcp_placements.offline.assembly import assembled
from dcp_placements.offline.checkpoint import (
    AnySource,
    Checkpoint,
    StoredRecord,
    StoredTensor,
    ranks_of,
)
from dcp_placements.offline.key_patterns import matching_keys
from dcp_placements.offline.sources.opening import open_source
from dcp_placements.offline.texts import MAX_VALUE, brief, format_table, ranges, short
from dcp_placements.short_text import (
    folded_keys,
    format_count,
    format_name,
    format_names,
    format_nbytes,
    natural_key,
)
from dcp_placements.storage.provenance import SaveRecord
from dcp_placements.storage.safe_pickle import (
    DTYPES,
    ORDERED_DICT,
    RefusedGlobal,
    SafeUnpickler,
    check_unfolded,
)
from dcp_placements.storage.save_ids import writer_of
from dcp_placements.storage.store import StorageOptions
from dcp_placements.storage.torch_load import saved_pickle

_T = TypeVar("_T")

SHOWN_GROUPS = 12
"""Groups of tensors, and of objects, that are shown at first."""

MAX_CUTS = 6
READ_NBYTES = 1 << 16
"""The longest record whose value is read."""

READ_OBJECTS = 32
"""Objects whose values are read: at a URL each takes a request."""

MAX_ELEMENTS = 4000
"""The largest value that is shown: elements of containers and characters of text."""

SHOWN_PROVENANCE = ("save_id", "step", "world_size", "versions")
"""The other keys have an entry for each tensor."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor."""

    shape: tuple[int, ...]  # shape of the whole tensor
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
    # Its value, if that is small and plain: numbers, strings and containers of them; else None
    value: Any = None
    reason: str = ""  # why ``value`` is None; empty where the object is shown


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors whose keys differ in numbers alone, with one shape and dtype."""

    name: str  # their keys as one name, with ranges of numbers
    tensors: int  # number of tensors
    shape: tuple[int, ...]  # shape of each whole tensor
    dtype: str  # its torch name without ``torch.``
    chunks: int  # number of chunks of all tensors
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
    """Tensors with equal cuts when they were saved."""

    cuts: tuple[str, ...]  # the cut of each axis as text, in the order in which they apply
    keys: tuple[str, ...]  # keys of the tensors


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is in a checkpoint."""

    path: str  # path of the checkpoint
    format: str  # ``Checkpoint.format``
    groups: tuple[TensorGroup, ...]  # groups of numbered keys, in natural order
    tensors: Mapping[str, TensorInfo]  # by key
    objects: Mapping[str, ObjectInfo]  # by key
    files: Mapping[str, FileInfo]  # by name; those that hold data, and the others beside them
    totals: Mapping[str, Any]  # ``tensors``, ``objects``, ``chunks``, ``bytes`` and ``ranks``
    # Its record of the save (``save_id``, ``step``, ``world_size``, ``versions``); None if it has
    # none
    provenance: Mapping[str, Any] | None
    cuts: tuple[CutsInfo, ...]  # the cuts of the save, if the checkpoint records them
    renames: tuple[str, ...]  # the renames of the save, if the checkpoint records them
    notes: tuple[str, ...] = ()  # contents of the checkpoint that are not read

    def __str__(self) -> str:
        return self.text()

    def text(self, *, keys: bool = False) -> str:
        """Return tensors, objects, files and the record of the save.

        Args:
            keys: Whether to list every key and every file instead of groups of keys.
        """
        lines: list[str] = []
        for headings, rows, more in self._keys() if keys else self._largest():
            lines += format_table(headings, rows, right="keys bytes chunks") if rows else []
            lines += [f"... and {more}; --keys lists every key"] if more else []
            lines += [""] if rows else []
        return "\n".join([*lines, *map(format_name, self._save_lines())])

    def _largest(self) -> Iterator[_Table]:
        """Yield the tables of the largest groups of keys."""
        groups = self.groups
        by_nbytes = sorted(range(len(groups)), key=lambda n: groups[n].nbytes, reverse=True)
        largest = sorted(by_nbytes[:SHOWN_GROUPS])
        rows = [
            (
                *(group.name, f"{group.tensors:,}", str(group.shape), group.dtype),
                *(format_nbytes(group.nbytes), f"{group.chunks:,}", ranges(group.ranks)),
            )
            for group in map(groups.__getitem__, largest)
        ]
        rest = len(groups) - len(largest)
        more = format_count(rest, "smaller group") if rest else ""
        yield ("tensors", "keys", "shape", "dtype", "bytes", "chunks", "ranks"), rows, more
        listed = []
        objects = folded_keys(list(self.objects))
        for folded in objects[:SHOWN_GROUPS]:
            stored = [self.objects[key] for key in folded.keys]
            reasons = {info.reason for info in stored}
            value = _value_text(stored[0]) if len(stored) == 1 or len(reasons) == 1 else "-"
            if len(stored) > 1 and not stored[0].reason:
                value = "-"  # each has its own
            nbytes = format_nbytes(sum(info.nbytes for info in stored))
            listed.append((folded.name, value, f"{len(stored):,}", nbytes))
        rest = len(objects) - len(listed)
        more = format_count(rest, "more group") if rest else ""
        yield ("objects", "value", "keys", "bytes"), listed, more

    def _keys(self) -> Iterator[_Table]:
        """Yield the tables of all keys and files."""
        tensors = [
            (
                *(fqn, str(tensor.shape), tensor.dtype, format_nbytes(tensor.nbytes)),
                *(f"{tensor.chunks:,}", short(tensor.files, 1), ranges(tensor.ranks)),
            )
            for fqn, tensor in _natural(self.tensors)
        ]
        yield ("tensor", "shape", "dtype", "bytes", "chunks", "files", "ranks"), tensors, ""
        objects = [
            (
                fqn,
                _value_text(info),
                format_nbytes(info.nbytes),
                short(info.files, 1),
            )
            for fqn, info in _natural(self.objects)
        ]
        yield ("object", "value", "bytes", "file"), objects, ""
        files = [
            (
                name,
                "missing" if file.nbytes is None else format_nbytes(file.nbytes),
                "-" if file.rank is None else str(file.rank),
            )
            for name, file in _natural(self.files)
        ]
        yield ("file", "bytes", "rank"), files, ""

    def _save_lines(self) -> Iterator[str]:
        files = {name: file for name, file in self.files.items() if file.data}
        missing = [name for name, file in files.items() if file.nbytes is None]
        nbytes = format_nbytes(sum(file.nbytes or 0 for file in files.values()))
        tensors, chunks, objects = (
            format_count(self.totals[f"{noun}s"], noun) for noun in ("tensor", "chunk", "object")
        )
        yield f"format:     {self.format}"
        total = format_nbytes(self.totals["bytes"])
        yield f"totals:     {tensors} in {chunks}, {total}; {objects}"
        lost = f"; missing: {short(missing)}" if missing else ""
        yield f"files:      {format_count(len(files), 'file')} of data, {nbytes}{lost}"
        yield f"ranks:      {ranges(self.totals['ranks'])}"
        if self.provenance is None:
            yield "save:       the checkpoint has no record of it"
        for key, value in (self.provenance or {}).items():
            if isinstance(value, dict):
                value = ", ".join(f"{name} {item}" for name, item in value.items())
            if value not in ("", None):
                yield f"{key.replace('_', ' ') + ':':<11} {value}"
        for number, cut in enumerate(self.cuts[:MAX_CUTS]):
            names = short([folded.name for folded in folded_keys(cut.keys)])
            yield f"{'' if number else 'cut:':<11} {names}: {', then '.join(cut.cuts)}"
        if len(self.cuts) > MAX_CUTS:
            more = format_count(len(self.cuts) - MAX_CUTS, "more cut")
            yield f"{'':<11} and {more}; --json"
        yield from [f"{'renamed:':<11} {rename}" for rename in self.renames]
        yield from [f"{'note:':<11} {note}" for note in self.notes]


def _value_text(info: ObjectInfo) -> str:
    """Return the value of an object, or why it is not shown."""
    return f"not shown: {info.reason}" if info.reason else brief(info.value)


_Table = tuple[Sequence[str], Sequence[Sequence[str]], str]
"""Headings, rows, and a text of what is left out."""


def _natural(items: Mapping[str, _T]) -> list[tuple[str, _T]]:
    return sorted(items.items(), key=lambda item: natural_key(item[0]))


@quiet_gc()
def inspect(
    path: AnySource,
    *,
    fqn: str | None = None,
    storage_options: StorageOptions = None,
) -> Inspection:
    """Return what is in a checkpoint, by its metadata and the values of its small objects.

    Args:
        path: The checkpoint.
        fqn: A pattern, as in ``PlacementRules``: only the keys that match it are listed.
        storage_options: Options that fsspec passes to the file system of a URL.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; or no key matches ``fqn``.
    """
    checkpoint = open_source(path, storage_options=storage_options)
    record = checkpoint.record
    provenance = checkpoint.provenance or {}
    keys = matching_keys(fqn, [*checkpoint.tensors, *checkpoint.objects])
    stored = {name: tensor for name, tensor in checkpoint.tensors.items() if name in keys}
    held = {name: record for name, record in checkpoint.objects.items() if name in keys}
    values = plain_values(checkpoint, held.values())
    tensors = _tensor_infos(stored, checkpoint.files_by_key)
    every = tensors.values()
    return Inspection(
        path=checkpoint.path,
        format=checkpoint.format,
        groups=tuple(_groups(tensors)),
        tensors=tensors,
        objects={
            name: ObjectInfo((record.file,) if record.file else (), record.nbytes, *values[name])
            for name, record in held.items()
        },
        files={
            name: FileInfo(size, writer_of(name), name in checkpoint.files)
            for name, size in sorted({**checkpoint.files, **checkpoint.other_files}.items())
        },
        totals={
            "tensors": len(tensors),
            "objects": len(held),
            "chunks": sum([info.chunks for info in every]),
            "bytes": sum([info.nbytes for info in every]),
            "ranks": _ranks(every),
        },
        provenance={key: provenance[key] for key in SHOWN_PROVENANCE if key in provenance}
        if provenance
        else None,
        cuts=() if record is None else _cuts(record, tensors),
        renames=() if record is None else tuple(map(str, record.renames)),
        notes=tuple(checkpoint.notes),
    )


def _tensor_infos(
    stored: Mapping[str, StoredTensor], files_of: Mapping[str, tuple[str, ...]]
) -> dict[str, TensorInfo]:
    """Return the facts on tensors by key; tensors that differ in their keys alone share them."""
    infos: dict[Hashable, TensorInfo] = {}
    tensors = {}
    for name, tensor in stored.items():
        files = files_of.get(name, ())
        kind = tensor.shape, tensor.dtype, tensor.cut, files
        if kind not in infos:
            shown = (
                tensor.shape,
                tensor.dtype_name,
                tensor.count,
                files,
                ranks_of(files),
                tensor.nbytes,
            )
            infos[kind] = TensorInfo(*shown)
        tensors[name] = infos[kind]
    return tensors


def _ranks(tensors: Iterable[TensorInfo]) -> tuple[int, ...]:
    """Return the ranks that wrote a chunk of some tensors, sorted."""
    return tuple(sorted(set(chain.from_iterable({info.ranks for info in tensors}))))


def _groups(tensors: Mapping[str, TensorInfo]) -> Iterator[TensorGroup]:
    """Yield tensors whose keys differ in numbers alone, with one shape and dtype."""
    for folded in folded_keys({fqn: (info.shape, info.dtype) for fqn, info in tensors.items()}):
        held = [tensors[fqn] for fqn in folded.keys]
        chunks, nbytes = sum([info.chunks for info in held]), sum([info.nbytes for info in held])
        kind = held[0].shape, held[0].dtype
        yield TensorGroup(folded.name, len(held), *kind, chunks, _ranks(held), nbytes)


def _cuts(record: SaveRecord, fqns: Iterable[str]) -> tuple[CutsInfo, ...]:
    keys: dict[Cuts, list[str]] = {}
    for fqn in fqns:
        if cuts := record.cuts(fqn):
            keys.setdefault(cuts, []).append(fqn)
    return tuple(CutsInfo(tuple(map(str, cuts)), tuple(fqns)) for cuts, fqns in keys.items())


@dataclass(frozen=True, slots=True)
class TensorChunks:
    """Where one tensor of a checkpoint is stored."""

    fqn: str  # its key
    shape: tuple[int, ...]  # shape of the whole tensor
    dtype: str  # its torch name without ``torch.``
    nbytes: int  # bytes of the whole tensor's elements
    cuts: tuple[str, ...]  # the cut of each axis, if the checkpoint records them
    chunks: tuple[StoredRecord, ...]  # chunks in the metadata's order

    def __str__(self) -> str:
        rows = [
            (
                format_box(chunk.box or Box.whole(self.shape), self.shape),
                "-" if chunk.rank is None else str(chunk.rank),
                "nowhere" if chunk.file is None else chunk.file,
                *(f"{chunk.start:,}", f"{chunk.nbytes:,}"),
            )
            for chunk in self.chunks
        ]
        columns = ("chunk", "rank", "file", "offset", "length")
        lines = format_table(columns, rows, right="rank offset length")
        whole = f"{self.shape} {self.dtype}, {format_nbytes(self.nbytes)}"
        lines += ["", f"{self.fqn}: {whole} in {format_count(len(self.chunks), 'chunk')}"]
        lines += [f"cut: {', then '.join(self.cuts)}"] if self.cuts else []
        return "\n".join(map(format_name, lines))


def inspect_tensor(
    path: AnySource,
    fqn: str,
    *,
    storage_options: StorageOptions = None,
) -> TensorChunks:
    """Return where the chunks of one tensor are: box, file, offset, length and writer.

    Args:
        path: The checkpoint.
        fqn: The tensor's key.
        storage_options: Options that fsspec passes to the file system of a URL.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; or it has no such tensor.
    """
    checkpoint = open_source(path, storage_options=storage_options)
    tensor, record = checkpoint.tensor(fqn), checkpoint.record
    cuts = () if record is None else tuple(map(str, record.cuts(fqn) or ()))
    facts = tensor.shape, tensor.dtype_name, tensor.nbytes
    return TensorChunks(fqn, *facts, cuts, tensor.chunks)


def shapes(
    path: AnySource,
    rename: Rename | None = None,
    *,
    storage_options: StorageOptions = None,
) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every tensor of a checkpoint; only metadata and headers are read.

    Args:
        path: A checkpoint of any format, such as a directory of safetensors from the Hub.
        rename: Map from its keys to the model's, where they differ: to a name, or to the
            ``Row``, ``Rows`` or ``Parts`` of a ``Stack``, an ``Unstack`` or a ``Split``.
        storage_options: Options that fsspec passes to the file system of a URL.

    Raises:
        CannotLook: It is no checkpoint, cannot be read, or lacks files; or ``rename`` has no name
            for a key, gives one name twice, or makes a stack of which rows are missing.
    """
    checkpoint = open_source(path, storage_options=storage_options)
    if lost := sorted(set(checkpoint.absent.values())):
        raise CannotLook(f"{checkpoint.path}: it is not whole: {format_names(lost)} missing")
    tensors = assembled(checkpoint.path, checkpoint.tensors, rename)
    return {fqn: tensor.shape for fqn, tensor in tensors.items()}


class _PlainUnpickler(SafeUnpickler):
    subject = "a plain value"
    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {
        **ORDERED_DICT,
        **{name: str(dtype) for name, dtype in DTYPES.items()},
    }


def plain_values(
    checkpoint: Checkpoint, objects: Iterable[StoredRecord]
) -> dict[str, tuple[Any, str]]:
    """Return by key the value of each object and an empty text, or None and why it is not shown.

    The first small objects are read; those that are large or broken, and those that hold other
    values, are not shown.
    """
    values: dict[str, tuple[Any, str]] = {}
    count = 0
    for stored in objects:
        if stored.nbytes > READ_NBYTES:
            values[stored.fqn] = None, f"more than {format_nbytes(READ_NBYTES)}"
            continue
        count += 1
        if count > READ_OBJECTS:
            values[stored.fqn] = None, f"not among the first {READ_OBJECTS}"
            continue
        # A broken or hostile record can raise anything; verify reports it.
        try:
            values[stored.fqn] = _plain_value(checkpoint, stored), ""
        except RefusedGlobal as error:
            values[stored.fqn] = None, f"holds {format_name(error.name, MAX_VALUE)}"
        except FileNotFoundError:
            values[stored.fqn] = None, "its file is missing"
        except CannotLook as error:
            values[stored.fqn] = None, str(error)
        except OSError as error:
            values[stored.fqn] = None, f"its record cannot be read: {format_name(error)}"
        except Exception:
            values[stored.fqn] = None, "its record cannot be read"
    return values


def _plain_value(checkpoint: Checkpoint, stored: StoredRecord) -> Any:
    """Return the value of an object.

    Raises:
        CannotLook: It is too long to be shown, or has keys that JSON does not have.
        Exception: It cannot be read, or holds other values.
    """
    record = checkpoint.read_record(stored, READ_NBYTES)
    if record is None:
        raise CannotLook(f"more than {format_nbytes(READ_NBYTES)}")
    data, _ = saved_pickle(io.BytesIO(record))
    value = _PlainUnpickler(data).load()
    try:
        check_unfolded([value], MAX_ELEMENTS)
    except UnpicklingError:
        raise CannotLook(f"more than {MAX_ELEMENTS:,} elements") from None
    try:
        json.dumps(value, default=str)
    except TypeError:
        raise CannotLook("its keys are neither text nor numbers") from None
    return value
