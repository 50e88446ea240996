"""A checkpoint as its files describe it, whoever wrote them: DCP's, or safetensors.

Both come to the same: tensors made of chunks, and for each chunk a place in a file. So safetensors
headers are put into DCP's own terms, and everything that looks at checkpoints looks at those.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_placements._torch import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_placements.errors import CannotLook, PlacementError, format_name, format_names
from dcp_placements.layout.alike import BySequence
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.directory import Directory, no_checkpoint
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.metadata.file import read_metadata
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.rank_files import merge_rank_metadata, rank_file_rank
from dcp_placements.storage.metadata.save_ids import ID_PREFIX, IdRecord, id_records, writer_of
from dcp_placements.storage.metadata.shadow_records import shadowed
from dcp_placements.storage.metadata.table import (
    Array,
    Rows,
    RowsBuilder,
    StorageTable,
    rows_of_entries,
)
from dcp_placements.storage.restricted_pickle import RefusedGlobal
from dcp_placements.storage.safetensors_files import LARGEST, Entry, counts, read_header

DCP = "dcp"
TORCH_DIST = "torch_dist"
SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One chunk of a tensor, and where it is.

    Attributes:
        box: In the whole tensor, in elements.
        file: Name of its file; None where the metadata says no place.
        start: Where its record begins in the file, in bytes. A record of a ``.distcp`` file is a
            small zip file around the elements; one of a safetensors file is the elements.
        nbytes: Length of the record.
        transforms: What the record went through on its way to the file; empty for nothing.
    """

    box: Box
    file: str | None
    start: int = 0
    nbytes: int = 0
    transforms: tuple[str, ...] = ()

    @property
    def writer(self) -> int | None:
        """The rank that wrote it, by its file's name; None where that does not say."""
        return None if self.file is None else writer_of(self.file)


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor.

    Attributes:
        fqn: Its key.
        shape: Of the whole tensor.
        dtype: As stored.
        boxes: Of its chunks, in the metadata's order; one object for tensors that are cut alike.
        cut: The number of ``boxes`` in this checkpoint: the same for tensors that are cut alike.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    cut: int
    _places: _Places

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor's elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> Box:
        """All of it."""
        return Box((0,) * len(self.shape), self.shape)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold any of it, sorted."""
        return self._places.files(self.fqn)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote any of it, sorted; none where the files' names do not say."""
        return tuple(sorted({r for file in self.files if (r := writer_of(file)) is not None}))

    @property
    def chunks(self) -> tuple[StoredChunk, ...]:
        """Its chunks, one for each of ``boxes``."""
        found = self._places.by_offset(self.fqn)
        return tuple([_chunk(box, found.get(box.offsets)) for box in self.boxes])


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One key that is no tensor: bytes, which are not looked into.

    Attributes:
        fqn: Its key.
        file: Name of its file; None where the metadata says no place.
        start: Where its record begins in the file, in bytes.
        nbytes: Length of the record.
    """

    fqn: str
    file: str | None
    start: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StoredPack:
    """Copies of tensors, or of objects, that ranks wrote beside the canonical ones.

    Attributes:
        fqns: The keys of what is copied, in the order in which they stand in a record.
        tensor: Of all copies in one; of objects None.
        copies: The records. The offsets of a tensor's are the writer's number, then the chunk's.
    """

    fqns: tuple[str, ...]
    tensor: StoredTensor | None
    copies: tuple[StoredChunk, ...]


class Checkpoint:
    """A checkpoint, opened to be looked at. No process group, and no data is read yet.

    Args:
        path: A directory, or a URL that fsspec knows. What is understood: DCP with one
            ``.metadata`` or with one per rank, Megatron's ``torch_dist``, safetensors.

    Attributes:
        directory: Its files.
        format: ``"dcp"``, ``"torch_dist"`` or ``"safetensors"``.
        metadata: What it says of itself, in DCP's terms.
        tensors: By key, in the checkpoint's order.
        objects: By key.
        shadows: Copies of some of them (``shadows=``), by pack; a pack of objects has no tensor.
        provenance: What it says of its own making; None where it says nothing.
        unfound: File by key, of what the index of safetensors files names and the file has not.

    Raises:
        CannotLook: No such path, no checkpoint in it, or metadata that cannot be read or is
            refused.
        PlacementError: Ranks' own metadata that contradict each other.
    """

    def __init__(self, path: str | os.PathLike[str] | Directory) -> None:
        self.directory = path if isinstance(path, Directory) else Directory(path)
        names = self.directory.names()
        with quiet_gc():
            self.unfound: dict[str, str] = {}
            self.format, self.metadata = self._read(names)
            self._rows = _checked(self.directory.path, self.metadata)
            places = _Places(self._rows)
            self.tensors: dict[str, StoredTensor] = {}
            self.objects: dict[str, StoredObject] = {}
            alike: BySequence[tuple[tuple[Box, ...], int]] = BySequence(_ends)
            self._cuts: dict[tuple[Box, ...], int] = {}
            for fqn, told in self.metadata.state_dict_metadata.items():
                if isinstance(told, BytesStorageMetadata):
                    row = places.by_offset(fqn).get(None)
                    self.objects[fqn] = StoredObject(fqn, *(row or (None,))[:3])
                    continue
                known = alike.get(told.chunks)
                if known is None:
                    boxes = tuple([Box(tuple(c.offsets), tuple(c.sizes)) for c in told.chunks])
                    known = alike.put(told.chunks, (boxes, self._cut(boxes)))
                self.tensors[fqn] = StoredTensor(
                    fqn, tuple(told.size), told.properties.dtype, *known, places
                )
        self.provenance: Mapping[str, Any] | None = stored(self.metadata)
        _check_provenance(self.directory.path, self.provenance or {})
        self._places = places
        self.shadows = {
            key: self._pack(key, tuple(fqns)) for key, fqns in shadowed(self.provenance).items()
        }

    @property
    def path(self) -> str:
        """Where it is."""
        return self.directory.path

    @cached_property
    def files(self) -> dict[str, int | None]:
        """Bytes of every file that the metadata names, sorted by name; None for a missing one."""
        return {name: self.directory.size(name) for name in sorted(set(self._rows.paths))}

    @cached_property
    def other_files(self) -> dict[str, int]:
        """Bytes of the files in the directory that hold no tensor or object."""
        found = {name: self.directory.size(name) for name in self.directory.names()}
        return {
            name: size
            for name, size in found.items()
            if size is not None and name not in self.files
        }

    def _read(self, names: Sequence[str]) -> tuple[str, Metadata]:
        """Return the format and the metadata."""
        directory = self.directory
        if ".metadata" in names:
            return _dcp_format(directory, names), read_pickle(directory, ".metadata")
        parts = rank_parts(directory)
        if parts:
            return DCP, merge_rank_metadata(parts)
        files = [name for name in names if name.endswith(".safetensors")]
        if files:
            metadata, self.unfound = _safetensors_metadata(directory, names, files)
            return SAFETENSORS, metadata
        raise no_checkpoint(directory, inside=[n for n in names if _is_one(directory, n)])

    def _pack(self, key: str, fqns: tuple[str, ...]) -> StoredPack:
        tensor = self.tensors.get(fqns[0]) if fqns else None
        places = self._places.by_offset(key)
        if tensor is None:
            copies = tuple([StoredChunk(Box((), ()), *place) for place in places.values()])
            return StoredPack(fqns, None, copies)
        sizes = {box.offsets: box.sizes for box in tensor.boxes}
        found = []
        for offset in places:
            if offset is not None and offset[1:] in sizes:
                extent = (len(fqns), *sizes[offset[1:]])
                found.append(Box(offset, extent))
        shape = (len(fqns), *tensor.shape)
        held = tuple(found)
        made = StoredTensor(key, shape, tensor.dtype, held, self._cut(held), self._places)
        return StoredPack(fqns, made, made.chunks)

    @cached_property
    def id_records(self) -> dict[str, IdRecord]:
        """Where files say which save wrote them, by file; names that carry an id are left out."""
        return id_records(StorageTable(self._rows))

    def _cut(self, boxes: tuple[Box, ...]) -> int:
        """Return the number of boxes; equal ones have one."""
        return self._cuts.setdefault(boxes, len(self._cuts))

    def unclaimed(self) -> list[tuple[str, tuple[int, ...] | None, str]]:
        """Return ``(key, offsets, file)`` of what files hold and no tensor's chunk claims."""
        found: list[tuple[str, tuple[int, ...] | None, str]] = []
        claims: dict[int, set[tuple[int, ...] | None]] = {}
        for fqn in self._rows.fqns:
            if fqn.startswith(ID_PREFIX):
                continue
            pack = self.shadows.get(fqn)
            if pack is not None and pack.tensor is None:
                continue
            tensor = self.tensors.get(fqn) if pack is None else pack.tensor
            if tensor is None:
                claimed: set[tuple[int, ...] | None] = {None} if fqn in self.objects else set()
            else:
                claimed = claims.setdefault(tensor.cut, {box.offsets for box in tensor.boxes})
            for offset, row in self._places.by_offset(fqn).items():
                if offset not in claimed:
                    found.append((fqn, offset, row[0]))
        return found


_Place = tuple[str, int, int, tuple[str, ...]]


class _Places:
    """Where what is stored of each key is: the rows of one key lie together."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        order = np.argsort(rows.rows["fqn"], kind="stable")
        self._sorted: Array = rows.rows[order]
        self._numbers = {fqn: number for number, fqn in enumerate(rows.fqns)}
        self._starts = np.searchsorted(self._sorted["fqn"], np.arange(len(rows.fqns) + 1))

    def _of(self, fqn: str) -> Array:
        number = self._numbers.get(fqn)
        if number is None:
            return self._sorted[:0]
        return self._sorted[self._starts[number] : self._starts[number + 1]]

    def files(self, fqn: str) -> tuple[str, ...]:
        paths = self._rows.paths
        return tuple(sorted(paths[number] for number in np.unique(self._of(fqn)["path"])))

    def by_offset(self, fqn: str) -> dict[tuple[int, ...] | None, _Place]:
        # As in a dict, of two rows about the same the later one holds.
        rows = self._rows
        return {
            rows.offsets[offset]: (
                rows.paths[path],
                start,
                length,
                rows.transforms[transforms] or (),
            )
            for _, offset, path, transforms, start, length in self._of(fqn).tolist()
        }


def _chunk(box: Box, place: _Place | None) -> StoredChunk:
    return StoredChunk(box, None) if place is None else StoredChunk(box, *place)


def _is_one(directory: Directory, name: str) -> bool:
    marks = (".metadata", "model.safetensors.index.json", "model.safetensors")
    return any(directory.size(f"{name}/{mark}") is not None for mark in marks)


def _dcp_format(directory: Directory, names: Sequence[str]) -> str:
    if "metadata.json" in names:
        try:
            with directory.open("metadata.json") as stream:
                told = json.loads(stream.read(1 << 20))
        except (ValueError, OSError, RecursionError):
            return DCP
        if isinstance(told, dict) and told.get("sharded_backend") == TORCH_DIST:
            return TORCH_DIST
    return DCP


def rank_parts(directory: Directory) -> list[tuple[int, Metadata]]:
    """Return what every rank of a save without collectives says of itself, by rank.

    Raises:
        CannotLook: As ``read_pickle``.
    """
    ranks = sorted((r, n) for n in directory.names() if (r := rank_file_rank(n)) is not None)
    parts = [(rank, read_pickle(directory, name)) for rank, name in ranks]
    for (_, name), (_, part) in zip(ranks, parts, strict=True):
        _checked(f"{directory.path}/{name}", part)
    return parts


def read_pickle(directory: Directory, name: str) -> Metadata:
    """Return what a file of metadata says; nothing that it names is executed.

    Raises:
        CannotLook: It is refused, or cannot be read.
    """
    where = f"{directory.path}/{name}"
    try:
        with directory.open(name) as stream:
            found = read_metadata(stream, restricted=True)
    except RefusedGlobal as error:
        raise CannotLook(
            f"{where}: refused, {error}\n"
            "    why:         a pickle calls what it names; nothing of it was executed\n"
            "    way out:     a file of unknown origin should not be loaded by anything else either"
        ) from error
    except OSError as error:
        raise CannotLook(f"{where}: cannot be read: {format_name(error)}") from error
    except Exception as error:
        # Whatever a broken or hostile pickle makes of itself.
        raise _unreadable(where, error) from error
    return found


def _unreadable(where: str, error: object) -> CannotLook:
    return CannotLook(
        f"{where}: this is no metadata of DCP's that can be read\n"
        f"    found:       {format_name(error)}\n"
        "    likely:      the file was damaged or cut short"
    )


def _checked(path: str, metadata: Any) -> Rows:
    """Return the rows of ``storage_data``, after a look at the types and numbers of everything.

    Raises:
        CannotLook: Something is not what DCP's own readers expect.
    """
    try:
        if type(metadata) is not Metadata:
            raise TypeError(f"a {type(metadata).__name__} in place of a Metadata")
        seen: deque[tuple[Any, int]] = deque(maxlen=16)
        for fqn, told in metadata.state_dict_metadata.items():
            _check_key(fqn, told, seen)
        data = metadata.storage_data
        rows = data.rows if isinstance(data, StorageTable) else _rows_of_dict(data)
        columns = {"fqn": rows.fqns, "offset": rows.offsets, "path": rows.paths}
        for name, known in (*columns.items(), ("transforms", rows.transforms)):
            if len(rows.rows) and int(rows.rows[name].max()) >= len(known):
                raise ValueError(f"a row names a {name} that is not there")
        for name in ("start", "length"):
            if len(rows.rows) and int(rows.rows[name].min()) < 0:
                raise ValueError(f"a negative {name}")
        for file in rows.paths:
            if not isinstance(file, str) or os.path.isabs(file) or ".." in file.split("/"):
                raise ValueError(f"a file outside of the checkpoint: {file!r}")
            os.fsencode(file)
            if "\0" in file:
                raise ValueError("a file's name that no file can have")
        if not all(type(fqn) is str for fqn in rows.fqns):
            raise TypeError("a key that is no text")
    except PlacementError:
        raise
    except Exception as error:
        # Attributes of any type, or none, can be in a pickle.
        raise _unreadable(path, error) from error
    return rows


def _check_key(fqn: Any, told: Any, seen: deque[tuple[Any, int]]) -> None:
    if type(fqn) is not str:
        raise TypeError(f"a key that is a {type(fqn).__name__}")
    if type(told) is BytesStorageMetadata:
        return
    if type(told) is not TensorStorageMetadata:
        raise TypeError(f"{fqn}: a {type(told).__name__}")
    dims = len(counts(told.size))
    if not isinstance(told.properties.dtype, torch.dtype):
        raise TypeError(f"{fqn}: a dtype that is a {type(told.properties.dtype).__name__}")
    if prod(told.size) * told.properties.dtype.itemsize >= LARGEST:
        raise ValueError(f"{fqn}: a size that no tensor has")
    # Tensors that are cut alike share one list, which then needs one look only.
    if any(chunks is told.chunks and dims == known for chunks, known in seen):
        return
    for chunk in told.chunks:
        if len(counts(chunk.offsets)) != dims or len(counts(chunk.sizes)) != dims:
            raise ValueError(f"{fqn}: a chunk of other dims than its {dims}")
    seen.append((told.chunks, dims))


def _ends(chunk: ChunkStorageMetadata) -> Hashable:
    return tuple(chunk.offsets), tuple(chunk.sizes)


_KINDS = {
    **{"rules": Mapping, "digests": Mapping, "shadows": Mapping, "axes": Mapping},
    **{"versions": Mapping, "options": Mapping, "row_maps": Mapping},
}


def _check_provenance(path: str, told: Mapping[str, Any]) -> None:
    """Raise ``CannotLook`` where what a checkpoint says of its making is not of the kind it is."""
    faults = [
        f"its {name} are a {type(told[name]).__name__}"
        for name, kind in _KINDS.items()
        if told.get(name) is not None and not isinstance(told[name], kind)
    ]
    for name, kind in (("rules", str), ("digests", Mapping), ("shadows", (list, tuple))):
        held = told.get(name)
        values = held.items() if isinstance(held, Mapping) else ()
        if not all(type(key) is str and isinstance(value, kind) for key, value in values):
            faults.append(f"its {name} are not by key")
    if faults:
        raise _unreadable(path, f"what it says of its making is broken: {faults[0]}")


def _rows_of_dict(data: Any) -> Rows:
    for index, info in data.items():
        if type(index) is not MetadataIndex or type(info) is not StorageInfo:
            raise TypeError(f"a {type(info).__name__} for a {type(index).__name__}")
    return rows_of_entries(data.items())


def _safetensors_metadata(
    directory: Directory, names: Sequence[str], files: Sequence[str]
) -> tuple[Metadata, dict[str, str]]:
    """Return what safetensors files hold as DCP's metadata, and what they lack of the index."""
    index = _index(directory, names)
    if index is not None:
        # Other files in the directory may be copies (consolidated and sharded) of the same.
        files = sorted(set(index.values()))
    found: dict[str, list[tuple[str, Entry]]] = {}
    for name in files:
        size = directory.size(name)
        if size is None:
            continue
        with directory.open(name) as stream:
            for fqn, entry in read_header(stream, f"{directory.path}/{name}", size).items():
                found.setdefault(fqn, []).append((name, entry))
    stored_metadata: dict[str, Any] = {}
    builder = RowsBuilder()
    for fqn in sorted(found):
        entries = found[fqn]
        boxes = [entry.box for _, entry in entries]
        if len({(entry.dtype, len(entry.box.sizes)) for _, entry in entries}) > 1:
            raise CannotLook(
                f"{directory.path}: {format_name(fqn)} differs in dtype or dims between its files: "
                + format_names([name for name, _ in entries])
            )
        ends = zip(*(map(sum, zip(*box, strict=True)) for box in boxes), strict=True)
        whole = torch.Size(map(max, ends))
        stored_metadata[fqn] = TensorStorageMetadata(
            TensorProperties(entries[0][1].dtype),
            whole,
            [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes],
        )
        for name, entry in entries:
            offsets = torch.Size(entry.box.offsets)
            builder.add(
                MetadataIndex(fqn, offsets), path=name, start=entry.start, length=entry.nbytes
            )
    unfound = {
        fqn: name
        for fqn, name in (index or {}).items()
        if name not in [file for file, _ in found.get(fqn, ())]
    }
    return Metadata(stored_metadata, storage_data=StorageTable(builder.rows())), unfound


def _index(directory: Directory, names: Sequence[str]) -> dict[str, str] | None:
    """Return file by key, as the index says; None where there is none."""
    found = [name for name in names if name.endswith(".safetensors.index.json")]
    if not found:
        return None
    where = f"{directory.path}/{found[0]}"
    try:
        with directory.open(found[0]) as stream:
            told = json.loads(stream.read())["weight_map"]
        if not all(type(k) is str and type(v) is str and "/" not in v for k, v in told.items()):
            raise ValueError("keys or files that are no plain names")
    except (*(OSError, ValueError, KeyError, TypeError, AttributeError), RecursionError) as error:
        raise CannotLook(
            f"{where}: this is no index of safetensors files: {format_name(error)}"
        ) from error
    return dict(told)
