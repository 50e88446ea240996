"""The index in a file: a zip archive of ``.npy`` arrays at the end of ``.metadata``.

Everything is read at once, compared with one digest, and checked before it is used. The beginning
of the pickle before it repeats the digest, so that an index behind the pickle of another save is
noticed.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint import BytesStorageMetadata, TensorStorageMetadata

from dcp_placements.layout.boxes import Ints
from dcp_placements.storage.checks import check_files
from dcp_placements.storage.columns import (
    Column,
    IndexDamage,
    check_below,
    packed_columns,
    packed_texts,
    split,
    unpacked_columns,
    unpacked_texts,
)
from dcp_placements.storage.index import LARGEST, RowIndex
from dcp_placements.storage.torch_metadata import ChunkList, Entries, portable_state
from dcp_placements.storage.written import from_ends, origin, to_starts

Opener = Callable[[], AbstractContextManager[IO[bytes]]]
"""Opens the file, again and again."""

MAGIC = b"dcp_placements/5"
DIGEST_NBYTES = 16

MOST_NUMBERS = 1 << 26
"""Integers that an index may have, in a file of unknown origin."""

MOST_DIMS = 64

_OBJECT, _OTHER = -1, -2
_APART = -1
"""In place of the class of a key in an index of earlier versions."""

_NOT_ITS_KIND = KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError
"""What a value of another type than expected is met with."""

_END = struct.Struct("<4s4H2LH")
"""The end of a zip archive; its comment follows: the digest, and ``MAGIC``."""

_COMMENT_NBYTES = DIGEST_NBYTES + len(MAGIC)
_TAIL_NBYTES = 1 << 16
_TOTAL_RATIO, _SPARE_NBYTES = 256, 1 << 26
"""The members inflate to at most so many times the archive, and some more."""


def packed_index(
    index: RowIndex, pickled: Callable[[list[Any], list[Any]], bytes]
) -> tuple[bytes, bytes]:
    """Return the archive of an index, and its digest.

    Args:
        index: The rows; its entries are stored with it.
        pickled: Returns a pickle of what is neither key nor row, with the properties of tensors and
            the entries of other classes than DCP's.
    """
    entries = index.entries
    keys, of_keys = packed_texts(index.fqns)
    files, of_files = packed_texts(index.files)
    forms, properties, shapes, others = _packed_forms(entries)
    *rows, starts, lengths = index.rows
    numbers = [chunks.array.T.ravel() for chunks in entries.lists]
    columns: dict[str, Sequence[Column]] = {
        "keys": [*of_keys, entries.form_of, index.class_of],
        "files": [*of_files, index.file_counts, index.template_of],
        "templates": [*rows, from_ends(starts, lengths), lengths],
        "places": [index.listed, index.counts, *index.places],
        "entries": list(np.array(forms, np.int64).reshape(-1, 3).T),
        "chunks": [
            [len(chunks) for chunks in entries.lists],
            [chunks.array.shape[2] for chunks in entries.lists],
            np.concatenate([np.zeros(0, np.int64), *numbers]),
        ],
    }
    names = {
        "keys": keys,
        "files": files,
        "transforms": index.transforms,
        "shapes": shapes,
        "offsets": list(index.own.values()),
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as held:

        def add(name: str, data: bytes) -> None:
            info = zipfile.ZipInfo(name)  # of no date
            info.compress_type = zipfile.ZIP_DEFLATED
            held.writestr(info, data, compresslevel=6)

        for name, some in columns.items():
            packed = packed_columns(some)
            # The narrowest type of integers that has a sign.
            kind = np.min_scalar_type(min(int(packed.min()), -1 - int(packed.max())))
            array = io.BytesIO()
            np.lib.format.write_array(array, packed.astype(kind), (1, 0), allow_pickle=False)
            add(f"{name}.npy", array.getvalue())
        add("names.json", json.dumps(names, separators=(",", ":")).encode())
        add("values.pkl", pickled(properties, others))
    data = stream.getvalue()[:-2]
    digest = xxhash.xxh3_128_digest(data)
    return data + struct.pack("<H", _COMMENT_NBYTES) + digest + MAGIC, digest


def _packed_forms(
    entries: Entries,
) -> tuple[list[tuple[int, int, int]], list[Any], list[tuple[int, ...]], list[Any]]:
    """Return by form numbers of properties, shape and list of chunks; and what has the numbers.

    In place of the number of properties is ``_OBJECT``; or ``_OTHER`` of an entry of another class
    than DCP's, with its number in place of that of a shape.
    """
    properties: dict[Any, tuple[int, Any]] = {}
    shapes: dict[tuple[int, ...], int] = {}
    forms = []
    others: list[Any] = []
    for form, listed in zip(entries.forms, entries.list_of, strict=True):
        if type(form) is TensorStorageMetadata:
            one = form.properties
            kind, _ = properties.setdefault(portable_state(one), (len(properties), one))
            forms.append((kind, shapes.setdefault(tuple(form.size), len(shapes)), listed))
        elif type(form) is BytesStorageMetadata:
            forms.append((_OBJECT, 0, 0))
        else:
            forms.append((_OTHER, len(others), 0))
            others.append(form)
    return forms, [one for _, one in properties.values()], list(shapes), others


def unpacked_index(held: Archive, properties: Sequence[Any], others: Sequence[Any]) -> RowIndex:
    """Return the index in an archive, checked.

    Args:
        held: The archive.
        properties: Of tensors, by number.
        others: Entries of other classes than DCP's.

    Raises:
        IndexDamage: It is none.
    """
    try:
        index = _unpacked(held, properties, others)
        index.check()
    except IndexDamage:
        raise
    except _NOT_ITS_KIND as error:
        raise IndexDamage(f"something is not of its kind: {error}") from error
    return index


def _unpacked(held: Archive, properties: Sequence[Any], others: Sequence[Any]) -> RowIndex:
    names = held.names
    of_keys, numbers, form_of, class_of = held.columns["keys"]
    _, _, file_counts, template_of = held.columns["files"]
    *rows, gaps, lengths = held.columns["templates"]
    listed, counts, *places = held.columns["places"]
    fqns = unpacked_texts(names["keys"], of_keys, numbers)
    transforms = [None if s is None else tuple(map(str, s)) for s in names["transforms"]]
    lists = _lists(*held.columns["chunks"])
    shapes = [torch.Size(shape) for shape in names["shapes"]]
    if len(form_of) > len(fqns):
        raise IndexDamage("other keys than there are")
    forms, list_of = unpacked_forms(held.columns["entries"], properties, shapes, lists, others)
    check_below(form_of, len(forms))
    entries = Entries(fqns[: len(form_of)], form_of.tolist(), forms, lists, list_of)
    check_below(listed, len(lists), -1)
    own = [[None if o is None else tuple(map(int, o)) for o in some] for some in names["offsets"]]
    index = RowIndex(
        entries,
        fqns,
        transforms,
        held.files(),
        file_counts,
        template_of,
        np.stack([*rows, to_starts(gaps, lengths), lengths]),
        class_of,
        listed,
        dict(zip(np.flatnonzero(listed < 0).tolist(), own, strict=True)),
        counts,
        np.stack(places),
    )
    if "apart" in held.columns:
        _add_apart(index, held.columns["apart"])
    return index


def _add_apart(index: RowIndex, columns: Sequence[Ints]) -> None:
    """Add the keys of one chunk in all, as earlier versions stored them, to what was unpacked.

    Args:
        index: Without them.
        columns: Key, position in the files of all, transforms, start, length, dims; -1 of objects.
    """
    key, file, steps, start, length, dims = columns
    check_below(key, len(index.fqns))
    check_below(dims, MOST_DIMS + 1, -1)
    key, last = np.unique(key[::-1], return_index=True)  # of two for one key the later one counts
    if not np.array_equal(key, np.flatnonzero(index.class_of == _APART)):
        raise IndexDamage("a key apart that is not there")
    file, steps, start, length, dims = [
        one[::-1][last] for one in (file, steps, start, length, dims)
    ]
    writer, classes = len(index.template_of), len(index.counts)
    number = np.full_like(key, writer)
    rows = np.stack([number, key, dims + 1, file, steps, start, length])
    index.rows = np.concatenate([index.rows, rows], axis=1)
    index.template_of = np.append(index.template_of, writer)
    index.files = [*index.files, *index.files]
    index.file_counts = np.append(index.file_counts, len(index.files) // 2)
    kinds, kind_of = np.unique(dims, return_inverse=True)
    index.class_of[key] = classes + kind_of
    index.listed = np.append(index.listed, np.full_like(kinds, -1))
    index.own = {
        **index.own,
        **{classes + n: [origin(ndim)] for n, ndim in enumerate(kinds.tolist())},
    }
    index.counts = np.append(index.counts, np.ones_like(kinds))
    places = np.stack([np.zeros_like(kinds), np.full_like(kinds, writer), kinds + 1])
    index.places = np.concatenate([index.places, places], axis=1)


def _lists(counts: Ints, dims: Ints, numbers: Ints) -> list[ChunkList]:
    check_below(dims, MOST_DIMS + 1)
    check_below(counts, LARGEST)
    check_below(numbers, LARGEST)
    shapes = list(zip(dims.tolist(), counts.tolist(), strict=True))
    parts = split(numbers, [2 * prod(shape) for shape in shapes])
    return [
        ChunkList(np.ascontiguousarray(part.reshape(ndim, 2, count).T))
        for part, (ndim, count) in zip(parts, shapes, strict=True)
    ]


def unpacked_forms(
    columns: Sequence[Ints],
    properties: Sequence[Any],
    shapes: Sequence[torch.Size],
    lists: Sequence[ChunkList],
    others: Sequence[Any],
) -> tuple[list[Any], list[int]]:
    """Return torch's object of each form, and the number of its list of chunks; -1 for none."""
    kinds, numbers, of_list = columns
    check_below(kinds, len(properties), _OTHER)
    check_below(numbers[kinds >= 0], len(shapes))
    check_below(of_list[kinds >= 0], len(lists))
    check_below(numbers[kinds == _OTHER], len(others))
    forms: list[Any] = []
    for kind, number, listed in zip(*[column.tolist() for column in columns], strict=True):
        if kind == _OBJECT:
            forms.append(BytesStorageMetadata())
        elif kind == _OTHER:
            forms.append(others[number])
        else:
            shape, chunks = shapes[number], lists[listed]
            if len(shape) != chunks.array.shape[2] or min(shape, default=0) < 0:
                raise IndexDamage("a tensor with chunks of other dims")
            forms.append(TensorStorageMetadata(properties[kind], shape, chunks))
    return forms, np.where(kinds >= 0, of_list, -1).tolist()


class Archive(NamedTuple):
    """The index in a file, as it was archived.

    Attributes:
        digest: As ``packed_index`` returned it.
        names: What was stored as JSON.
        columns: By name of a member.
        values: The pickle.
    """

    digest: bytes
    names: Any
    columns: Mapping[str, Sequence[Ints]]
    values: bytes

    @staticmethod
    def at_end_of(stream: IO[bytes], most: int | None = None) -> Archive | None:
        """Return the archive that a file ends with; None where it ends with none.

        Args:
            stream: The file.
            most: Integers that all columns of a member may have; None for any number.

        Raises:
            IndexDamage: It is not what was written.
        """
        size = stream.seek(0, io.SEEK_END)
        nbytes, data = min(_TAIL_NBYTES, size), b""
        while len(data) < nbytes:
            stream.seek(size - nbytes)
            data = stream.read(nbytes)
            end = len(data) - _COMMENT_NBYTES - _END.size
            if not data.endswith(MAGIC) or end < 0:
                return None
            *_, directory_nbytes, start, _ = _END.unpack_from(data, end)
            nbytes = start + directory_nbytes + _END.size + _COMMENT_NBYTES
            if nbytes > size:
                raise IndexDamage("its directory is beyond its end")
        return Archive.of(data[-nbytes:], most)

    @staticmethod
    def of(data: bytes, most: int | None = None) -> Archive:
        """Return what an archive has, as ``at_end_of``."""
        at = len(data) - _COMMENT_NBYTES
        digest = data[at : at + DIGEST_NBYTES]
        if xxhash.xxh3_128_digest(memoryview(data)[: at - 2]) != digest:
            raise IndexDamage("it is not what was written")
        members = {}
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as held:
                infos = held.infolist()
                if sum(i.file_size for i in infos) > _TOTAL_RATIO * len(data) + _SPARE_NBYTES:
                    raise IndexDamage("it inflates to far more than its file")
                for info in infos:
                    with held.open(info) as member:
                        # Without a size all of what it inflates to would be read.
                        members[info.filename] = member.read(info.file_size)
            names, values = json.loads(members.pop("names.json")), members.pop("values.pkl")
            arrays = {name.removesuffix(".npy"): _integers(held) for name, held in members.items()}
        except IndexDamage:
            raise
        except Exception as error:
            # A member may be anything; the header of an array is a Python expression.
            raise IndexDamage(f"a member is not of its kind: {error}") from error
        columns = {name: unpacked_columns(array, most) for name, array in arrays.items()}
        return Archive(digest, names, columns, values)

    def files(self) -> list[str]:
        """Return the names of all files.

        Raises:
            IndexDamage: They are none, or not those of files in the checkpoint.
        """
        try:
            form_of, numbers, *_ = self.columns["files"]
            names = unpacked_texts(self.names["files"], form_of, numbers)
            check_files(names)
        except _NOT_ITS_KIND as error:
            raise IndexDamage(f"names of files that are none: {error}") from error
        return names


def _integers(data: bytes) -> Ints:
    """Return the array in a ``.npy`` file, of which no more is allocated than it has bytes."""
    stream = io.BytesIO(data)
    np.lib.format.read_magic(stream)
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    array = np.frombuffer(stream.read(), dtype)
    if dtype.kind != "i" or (len(array),) != shape:
        raise ValueError("no array of integers")
    return array.astype(np.int64)
