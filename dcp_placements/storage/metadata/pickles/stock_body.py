"""The part of ``.metadata`` that grows with keys and chunks, as torch's own pickle.

In this pickle the entries of two chunks differ only in a few numbers. So they are written as arrays
of records of equal length, which refer to shared values in the pickle's memo. ``pickle.load`` makes
torch's objects of it; writing needs none of them.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np

from dcp_placements.storage.index.columns import Ints
from dcp_placements.storage.index.coordinates import Numbering
from dcp_placements.storage.index.entries import OBJECT, OTHER, Entries
from dcp_placements.storage.index.row_index import RowIndex

NO_STOCK_METADATA = (
    "this checkpoint has no stock metadata: run `dcp-placements merge-metadata PATH`"
)
"""Plain DCP ends in "No module named ..." and this, so there is no dot in it."""

PROTOCOL = b"\x80\x03"
"""A pickle begins with it."""

_MARKER_TEXT = b"dcp_placements index "
MARKER_NBYTES = 2 + 5 + len(_MARKER_TEXT) + 32 + 1

_I32 = 1 << 31
_PIECE_ROWS = 1 << 16

CLASSES = (
    *("MetadataIndex", "_StorageInfo", "ChunkStorageMetadata", "TensorStorageMetadata"),
    *("BytesStorageMetadata", "Size"),
)
NAMES = (
    *("fqn", "offset", "relative_path", "length", "transform_descriptors"),
    *("offsets", "sizes", "properties", "size", "chunks", "state_dict_metadata", "storage_data"),
)
"""Classes and names of attributes. Records refer to them by one byte: they come first in the
pickle, so that their numbers are small."""

Part = bytes | tuple[str, str]
"""Of a record: bytes that all have, or a name and a kind of integers."""


def marker(digest: bytes) -> bytes:
    """Return how a pickle begins whose index has this digest. It has no effect on its value."""
    text = _MARKER_TEXT + digest.hex().encode()
    return PROTOCOL + b"X" + struct.pack("<I", len(text)) + text + b"0"


def marked_digest(head: bytes) -> bytes | None:
    """Return the digest in the beginning of a pickle; None where there is none."""
    text = head[7 + len(_MARKER_TEXT) : MARKER_NBYTES - 1]
    try:
        digest = bytes.fromhex(text.decode())
    except ValueError:
        return None
    return digest if head[:MARKER_NBYTES] == marker(digest) else None


def refusing_pickle(digest: bytes) -> bytes:
    """Return a pickle that refuses to load, with a sentence that tells how to write another."""
    return marker(digest) + f"c{NO_STOCK_METADATA}\nMetadata\n.".encode()


def is_refusing(head: bytes) -> bool:
    """Whether the beginning of a pickle is that of one that refuses to load."""
    return head[MARKER_NBYTES:].startswith(f"c{NO_STOCK_METADATA}\n".encode())


@dataclass(slots=True)
class Memo:
    """The numbers of values in the pickle's memo.

    Attributes:
        words: Of classes and attribute names, as the bytes that refer to them.
        fqns: By key.
        paths: By file, writer by writer.
        transforms: By number; 0 for None.
        properties: By number.
        others: By number.
        count: How many there are.
    """

    words: Mapping[str, bytes]
    fqns: Ints
    paths: Ints
    transforms: Ints
    properties: Ints
    others: Ints
    count: int


def memo_of(
    numbers: Mapping[Hashable, int],
    classes: Mapping[str, int],
    count: int,
    entries: Entries,
    index: RowIndex,
) -> Memo:
    """Return the memo of a head.

    Args:
        numbers: Of texts, and of lists of texts by their tuples.
        classes: Numbers by name.
        count: How many there are; properties and other entries are the last.
        entries: Of all keys.
        index: Of all rows.

    Raises:
        KeyError: A text, a list of texts or a class is missing.
        ValueError: A class or the name of an attribute is not among the first.
    """
    words = {name: b"h" + bytes([classes[name]]) for name in CLASSES}
    words |= {name: b"h" + bytes([numbers[name]]) for name in NAMES}
    first_other = count - len(entries.others)
    return Memo(
        words,
        np.array(list(map(numbers.__getitem__, index.fqns)), np.int64),
        np.array([numbers[path] for path in index.writers.files()], np.int64),
        np.array([0 if v is None else numbers[v] for v in index.transforms], np.int64),
        np.arange(first_other - len(entries.properties), first_other),
        np.arange(first_other, count),
        count,
    )


class Body:
    """The rest of a pickle, by its head.

    Args:
        memo: The head's.
        entries: Of all keys.
        index: Of all rows.
    """

    def __init__(self, memo: Memo, entries: Entries, index: RowIndex) -> None:
        self.memo, self.entries, self.index = memo, entries, index
        own = [one.offsets for one in index.places if one.offsets is not None and one.listed < 0]
        shapes = [np.array(shape, np.int64).reshape(1, -1) for shape in entries.shapes]
        lists = list(entries.lists)
        tables = [*[c.offsets for c in lists], *[c.sizes for c in lists], *own, *shapes]
        self.sizes = Numbering(tables)
        first = memo.count
        numbers = [of_table + first for of_table in self.sizes.numbers]
        self.offsets, self.extents = numbers[: len(lists)], numbers[len(lists) : 2 * len(lists)]
        self.own = iter(numbers[2 * len(lists) : 2 * len(lists) + len(own)])
        self.shapes = np.array([of[0] for of in numbers[len(numbers) - len(shapes) :]], np.int64)
        self.chunks = Numbering(
            [np.stack(pair, axis=1) for pair in zip(self.offsets, self.extents, strict=True)]
        )
        self.first_chunk = first + len(self.sizes)
        self.first_list = self.first_chunk + len(self.chunks)

    def pieces(self) -> Iterator[bytes | bytearray]:
        """Yield it in bounded pieces."""
        words = self.memo.words
        yield from self._size_records()
        yield from self._chunk_records()
        for number, chunks in enumerate(self.chunks.numbers, self.first_list):
            column = chunks + self.first_chunk
            yield b"](" + records([b"j", ("chunk", "<u4")], {"chunk": column}) + b"e"
            yield put(number)
        yield b"}" + words["state_dict_metadata"] + b"}("
        yield from self._entry_records()
        yield b"us" + words["storage_data"] + b"}"
        yield from self._row_records()
        # Into the state of the metadata, and that into the metadata.
        yield b"sb."

    def _size_records(self) -> Iterator[bytes | bytearray]:
        first = self.memo.count
        for sizes in self.sizes.unique:
            count, ndim = sizes.shape
            is_wide = bool(count and ndim and int(sizes.max()) >= _I32)
            parts: list[Part] = [self.memo.words["Size"], b"("]
            for dim in range(ndim):
                parts += _number(f"size{dim}", is_wide=is_wide)
            parts += [b"t\x85Rr", ("number", "<u4"), b"0"]
            columns = {f"size{dim}": column for dim, column in enumerate(sizes.T)}
            yield records(parts, columns | {"number": np.arange(first, first + count)})
            first += count

    def _chunk_records(self) -> Iterator[bytes | bytearray]:
        words = self.memo.words
        parts: list[Part] = [
            words["ChunkStorageMetadata"] + b")\x81}(" + words["offsets"] + b"j",
            ("offsets", "<u4"),
            words["sizes"] + b"j",
            ("sizes", "<u4"),
            b"ubr",
            ("number", "<u4"),
            b"0",
        ]
        for pairs in self.chunks.unique:
            numbers = np.arange(self.first_chunk, self.first_chunk + len(pairs))
            columns = {"offsets": pairs[:, 0], "sizes": pairs[:, 1], "number": numbers}
            yield records(parts, columns)

    def _entry_records(self) -> Iterator[bytes | bytearray]:
        memo, words = self.memo, self.memo.words
        forms = np.array(self.entries.forms, np.int64).reshape(-1, 3)
        form_of = np.asarray(self.entries.form_of, np.int64)
        key: list[Part] = [b"j", ("key", "<u4")]
        tensor: list[Part] = [words["TensorStorageMetadata"] + b")\x81}("]
        for name in ("properties", "size", "chunks"):
            tensor += [words[name] + b"j", (name, "<u4")]
        kinds = np.minimum(forms[form_of, 0], 0).tolist()
        start = 0
        for kind, alike in groupby(kinds):
            stop = start + len(list(alike))
            properties, shapes, lists = forms[form_of[start:stop]].T
            columns = {"key": memo.fqns[start:stop]}
            if kind == OBJECT:
                yield records([*key, words["BytesStorageMetadata"] + b")\x81"], columns)
            elif kind == OTHER:
                other: list[Part] = [b"j", ("other", "<u4")]
                yield records([*key, *other], columns | {"other": memo.others[shapes]})
            else:
                columns |= {
                    "properties": memo.properties[properties],
                    "size": self.shapes[shapes],
                    "chunks": lists + self.first_list,
                }
                yield records([*key, *tensor, b"ub"], columns)
            start = stop

    def _row_records(self) -> Iterator[bytes | bytearray]:
        memo, index = self.memo, self.index
        offsets = {
            number: self.offsets[one.listed] if one.listed >= 0 else next(self.own)
            for number, one in enumerate(index.places)
            if one.offsets is not None
        }
        is_moved = np.array([steps is not None for steps in index.transforms], bool)
        pool: dict[tuple[bool, bool], list[_Rows]] = {}
        pooled = 0
        pieces = ((n, *piece) for n, keys in index.classes() for piece in index.pieces(n, keys))
        for number, keys, places in pieces:
            shape = places.shape[:2]
            columns = {
                "fqn": memo.fqns[keys][:, None],
                "offset": offsets.get(number, _NO_OFFSET),
                "path": memo.paths[places[..., 0]],
                "start": places[..., 2],
                "length": places[..., 3],
            }
            if not is_moved.any():
                pool.setdefault((number in offsets, False), []).append((shape, columns))
            else:
                columns["transforms"] = memo.transforms[places[..., 1]]
                moved = is_moved[places[..., 1]]
                for transformed in np.unique(moved).tolist():
                    chosen = moved == transformed
                    some = {n: np.broadcast_to(c, shape)[chosen] for n, c in columns.items()}
                    kind = number in offsets, transformed
                    pool.setdefault(kind, []).append((some["fqn"].shape, some))
            pooled += prod(shape)
            if pooled >= _PIECE_ROWS:
                yield from self._pooled(pool)
                pooled = 0
        yield from self._pooled(pool)

    def _pooled(self, pool: dict[tuple[bool, bool], list[_Rows]]) -> Iterator[bytearray]:
        for (is_chunk, transformed), held in sorted(pool.items(), key=itemgetter(0)):
            largest = max(int(rows[name].max()) for _, rows in held for name in ("start", "length"))
            parts = _row_parts(self.memo.words, is_chunk, transformed, is_wide=largest >= _I32)
            data, filled = _blank_records(parts, sum(prod(shape) for shape, _ in held))
            at = 0
            for shape, rows in held:
                block = filled[at : at + prod(shape)].reshape(shape)
                for name in filled.dtype.names or ():
                    block[name] = rows[name]
                at += block.size
            yield data
        pool.clear()


_Rows = tuple[tuple[int, ...], dict[str, Ints]]
"""The shape of an array of rows, and columns that are broadcast to it."""

_NO_OFFSET = np.zeros(1, np.int64)


def _row_parts(
    words: Mapping[str, bytes], is_chunk: bool, transformed: bool, *, is_wide: bool
) -> list[Part]:
    """Return the parts of the record of a row: an index and a place, put into the dict."""
    # NEWOBJ of the class, then BUILD with a dict of its attributes; "j" gets a shared name.
    parts: list[Part] = [words["MetadataIndex"] + b")\x81}(" + words["fqn"] + b"j", ("fqn", "<u4")]
    if is_chunk:
        parts += [words["offset"] + b"j", ("offset", "<u4")]
    parts += [b"ub" + words["_StorageInfo"] + b")\x81}(" + words["relative_path"] + b"j"]
    parts += [("path", "<u4"), words["offset"], *_number("start", is_wide=is_wide)]
    parts += [words["length"], *_number("length", is_wide=is_wide)]
    if transformed:
        parts += [words["transform_descriptors"] + b"j", ("transforms", "<u4")]
    return [*parts, b"ubs"]


def _number(name: str, *, is_wide: bool) -> list[Part]:
    return [b"\x8a\x08", (name, "<i8")] if is_wide else [b"J", (name, "<i4")]


def records(parts: Sequence[Part], columns: Mapping[str, Ints]) -> bytearray:
    """Return records of equal length.

    Args:
        parts: Of each record.
        columns: By name, the integers of all records.
    """
    data, filled = _blank_records(parts, len(next(iter(columns.values()))))
    for name in filled.dtype.names or ():
        filled[name] = columns[name]
    return data


def _blank_records(parts: Sequence[Part], count: int) -> tuple[bytearray, np.ndarray[Any, Any]]:
    """Return records whose integers are 0, and the array to write these into."""
    row, dtype = _layout(tuple(parts))
    data = bytearray(row) * count
    return data, np.frombuffer(data, dtype)


@lru_cache(maxsize=64)
def _layout(parts: tuple[Part, ...]) -> tuple[bytes, np.dtype[Any]]:
    """Return a record whose integers are 0, and where these are."""
    row = b""
    fields: dict[str, tuple[str, int]] = {}
    for part in parts:
        if isinstance(part, bytes):
            row += part
        else:
            name, kind = part
            fields[name] = kind, len(row)
            row += bytes(int(kind[-1]))
    layout = {
        "names": list(fields),
        "formats": [kind for kind, _ in fields.values()],
        "offsets": [offset for _, offset in fields.values()],
        "itemsize": len(row),
    }
    return row, np.dtype(layout)  # type: ignore[call-overload]


def put(number: int) -> bytes:
    """Return what puts the top of the stack into the memo, and takes it off."""
    return b"r" + struct.pack("<I", number) + b"0"


def get(number: int) -> bytes:
    """Return what puts a value of the memo on the stack."""
    return b"j" + struct.pack("<I", number)


def values_end(memo: Memo) -> bytes:
    """Return how the pickle of values in an index ends; it begins as the head does."""
    lists = [
        b"](" + b"".join(map(get, held.tolist())) + b"e" for held in (memo.properties, memo.others)
    ]
    return b"".join([*lists, b"\x87."])
