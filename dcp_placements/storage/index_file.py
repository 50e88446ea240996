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
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import IO, Any

import numpy as np
import xxhash

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
from dcp_placements.storage.index import LARGEST, Places, RowIndex
from dcp_placements.storage.torch_metadata import OTHER, ChunkList, Entries, Form
from dcp_placements.storage.written import from_ends, to_starts

Opener = Callable[[], AbstractContextManager[IO[bytes]]]
"""Opens the file, again and again."""

MAGIC = b"dcp_placements/5"
DIGEST_NBYTES = 16

MOST_NUMBERS = 1 << 26
"""Integers that an index may have, in a file of unknown origin."""

MOST_DIMS = 64

_NOT_ITS_KIND = KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError
"""What a value of another type than expected is met with."""

_END = struct.Struct("<4s4H2LH")
"""The end of a zip archive; its comment follows: the digest, and ``MAGIC``."""

_COMMENT_NBYTES = DIGEST_NBYTES + len(MAGIC)
_TAIL_NBYTES = 1 << 16
_TOTAL_RATIO, _SPARE_NBYTES = 256, 1 << 26
"""The members inflate to at most so many times the archive, and some more."""


def packed_index(values: bytes, index: RowIndex) -> tuple[bytes, bytes]:
    """Return the archive of an index, and its digest.

    Args:
        values: The pickle of what is neither key nor row.
        index: The rows; its entries are stored with it.
    """
    entries, places = index.entries, index.places
    keys, of_keys = packed_texts(index.fqns)
    files, of_files = packed_texts(index.files)
    *rows, starts, lengths = index.rows
    none = np.zeros(0, np.int64)
    columns: dict[str, Sequence[Column]] = {
        "keys": [*of_keys, entries.form_of, index.place_of],
        "files": [*of_files, index.file_counts, index.template_of],
        "templates": [*rows, from_ends(starts, lengths), lengths],
        "apart": list(index.apart),
        "places": [
            [one.listed for one in places],
            [len(one.chunks) for one in places],
            np.concatenate([none, *[one.chunks for one in places]]),
            np.concatenate([none, *[one.writers for one in places]]),
            np.concatenate([none, *[one.slots for one in places]]),
        ],
        "entries": list(np.array(entries.forms, np.int64).reshape(-1, 3).T),
        "chunks": [
            [len(chunks) for chunks in entries.lists],
            [chunks.array.shape[2] for chunks in entries.lists],
            np.concatenate([none, *[chunks.array.T.ravel() for chunks in entries.lists]]),
        ],
    }
    names = {
        "keys": keys,
        "files": files,
        "transforms": index.transforms,
        "shapes": entries.shapes,
        "offsets": [one.own for one in places if one.listed < 0],
    }
    return archive(columns, names, values)


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
    except IndexDamage:
        raise
    except _NOT_ITS_KIND as error:
        raise IndexDamage(f"something is not of its kind: {error}") from error
    index.check()
    return index


def _unpacked(held: Archive, properties: Sequence[Any], others: Sequence[Any]) -> RowIndex:
    names = held.names
    *of_keys, form_of, place_of = held.columns("keys", 4)
    *_, file_counts, template_of = held.columns("files", 4)
    *rows, gaps, lengths = held.columns("templates", 7)
    listed, counts, *of_places = held.columns("places", 5)
    fqns = unpacked_texts(names["keys"], *of_keys)
    files = held.files()
    transforms = [
        None if steps is None else tuple(map(str, steps)) for steps in names["transforms"]
    ]
    lists = _lists(*held.columns("chunks", 3))
    shapes = [tuple(map(int, shape)) for shape in names["shapes"]]
    forms = held.columns("entries", 3)
    _check_forms(forms, len(properties), shapes, lists, len(others))
    check_below(form_of, len(forms[0]))
    if len(place_of) != len(fqns) or len(form_of) > len(fqns):
        raise IndexDamage("other keys than there are")
    entries = Entries(
        fqns[: len(form_of)],
        form_of.tolist(),
        [Form(*form) for form in zip(*[column.tolist() for column in forms], strict=True)],
        properties,
        shapes,
        lists,
        others,
    )
    own = iter(names["offsets"])
    places = []
    parts = [split(column, counts.tolist()) for column in of_places]
    for number, chunks, *both in zip(listed.tolist(), *parts, strict=True):
        offsets = (
            ()
            if number >= 0
            else [None if o is None else tuple(map(int, o)) for o in next(own, ())]
        )
        count = len(lists[number]) if 0 <= number < len(lists) else len(offsets)
        if not count or int(chunks[-1]) != count - 1:
            raise IndexDamage("places of other chunks than there are")
        places.append(Places(max(number, -1), offsets, chunks, *both))
    table = np.stack([*rows, to_starts(gaps, lengths), lengths])
    apart = np.stack(held.columns("apart", 6))
    return RowIndex(
        entries, fqns, transforms, files, file_counts, template_of, table, apart, place_of, places
    )


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


def _check_forms(
    forms: Sequence[Ints],
    properties: int,
    shapes: Sequence[Any],
    lists: Sequence[ChunkList],
    others: int,
) -> None:
    kinds, numbers, of_list = forms
    check_below(kinds, properties, OTHER)
    is_tensor = kinds >= 0
    check_below(numbers[is_tensor], len(shapes))
    check_below(of_list[is_tensor], len(lists))
    check_below(numbers[kinds == OTHER], others)
    for shape, number in zip(numbers[is_tensor].tolist(), of_list[is_tensor].tolist(), strict=True):
        if len(shapes[shape]) != lists[number].array.shape[2] or min(shapes[shape], default=0) < 0:
            raise IndexDamage("a tensor with chunks of other dims")


def archive(
    columns: Mapping[str, Sequence[Column]], names: Any, values: bytes
) -> tuple[bytes, bytes]:
    """Return a zip archive of an index, and its digest.

    Args:
        columns: By name of a member.
        names: What is stored as JSON.
        values: A pickle of the rest.
    """
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as held:
        for name, some in columns.items():
            packed = packed_columns(some)
            # The narrowest type of integers that has a sign.
            kind = np.min_scalar_type(min(int(packed.min()), -1 - int(packed.max())))
            array = io.BytesIO()
            np.lib.format.write_array(array, packed.astype(kind), (1, 0), allow_pickle=False)
            _add(held, f"{name}.npy", array.getvalue())
        _add(held, "names.json", json.dumps(names, separators=(",", ":")).encode())
        _add(held, "values.pkl", values)
    data = stream.getvalue()[:-2]
    digest = xxhash.xxh3_128_digest(data)
    return data + struct.pack("<H", _COMMENT_NBYTES) + digest + MAGIC, digest


def _add(held: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name)  # of no date
    info.compress_type = zipfile.ZIP_DEFLATED
    held.writestr(info, data, compresslevel=6)


class Archive:
    """The index in a file, as it was archived.

    Args:
        data: The archive.
        most: Integers that all columns of a member may have; None for any number.

    Attributes:
        digest: As ``archive`` returned it.
        names: What was stored as JSON.
        values: The pickle.

    Raises:
        IndexDamage: It is not what was written.
    """

    def __init__(self, data: bytes, most: int | None = None) -> None:
        at = len(data) - _COMMENT_NBYTES
        self.digest = data[at : at + DIGEST_NBYTES]
        if xxhash.xxh3_128_digest(memoryview(data)[: at - 2]) != self.digest:
            raise IndexDamage("it is not what was written")
        self._most = most
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as held:
                infos = held.infolist()
                if sum(i.file_size for i in infos) > _TOTAL_RATIO * len(data) + _SPARE_NBYTES:
                    raise IndexDamage("it inflates to far more than its file")
                self._members = {}
                for info in infos:
                    with held.open(info) as member:
                        # Without a size all of what it inflates to would be read.
                        self._members[info.filename] = member.read(info.file_size)
            self.names = json.loads(self._member("names.json"))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise IndexDamage(str(error)) from error
        except IndexDamage:
            raise
        except (ValueError, RecursionError) as error:
            raise IndexDamage("names that are none") from error
        self.values = self._member("values.pkl")

    def columns(self, name: str, count: int | None = None) -> list[Ints]:
        """Return the columns of a member; ``count`` of them."""
        stream = io.BytesIO(self._member(f"{name}.npy"))
        try:
            np.lib.format.read_magic(stream)
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            if dtype.kind != "i" or len(shape) != 1:
                raise ValueError("no integers")
            array = np.frombuffer(stream.read(), dtype)
            if len(array) != shape[0]:
                raise ValueError("another size")
        except Exception as error:
            # Its header is a Python expression, of which anything may be wrong.
            raise IndexDamage(f"{name}.npy is no array of integers") from error
        columns = unpacked_columns(array.astype(np.int64), self._most)
        if count is not None and len(columns) != count:
            raise IndexDamage(f"{name}.npy has {len(columns)} columns, not {count}")
        return columns

    def files(self) -> list[str]:
        """Return the names of all files."""
        try:
            names = unpacked_texts(self.names["files"], *self.columns("files", 4)[:2])
            check_files(names)
        except _NOT_ITS_KIND as error:
            raise IndexDamage(f"names of files that are none: {error}") from error
        return names

    def _member(self, name: str) -> bytes:
        if name not in self._members:
            raise IndexDamage(f"{name} is missing")
        return self._members[name]


def archive_of(stream: IO[bytes]) -> bytes | None:
    """Return the archive that a file ends with; None where it ends with none.

    Raises:
        IndexDamage: It is cut off.
    """
    size = stream.seek(0, io.SEEK_END)
    tail = _last(stream, size, min(_TAIL_NBYTES, size))
    end = len(tail) - _COMMENT_NBYTES - _END.size
    if not tail.endswith(MAGIC) or end < 0:
        return None
    *_, directory_nbytes, start, _ = _END.unpack_from(tail, end)
    nbytes = start + directory_nbytes + _END.size + _COMMENT_NBYTES
    if nbytes > size:
        raise IndexDamage("its directory is beyond its end")
    return tail[-nbytes:] if nbytes <= len(tail) else _last(stream, size, nbytes)


def _last(stream: IO[bytes], size: int, nbytes: int) -> bytes:
    stream.seek(size - nbytes)
    data = stream.read(nbytes)
    if len(data) != nbytes:
        raise IndexDamage("the file is cut off")
    return data
