"""``.metadata`` as torch's own pickle, which grows with chunks: its rows are written in bulk.

In this pickle the rows of two chunks differ in a few numbers only. So they are written as arrays of
records of equal length, which refer to values in the pickle's memo. ``pickle.load`` makes torch's
objects of it; writing needs none of them. All else is what torch's objects are pickled to.
"""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties

from dcp_placements._torch import MemoryFormat, StorageInfo
from dcp_placements.layout.boxes import Ints
from dcp_placements.storage.index import APART, RowIndex
from dcp_placements.storage.metadata_pickle import PATHS_OF_3_13
from dcp_placements.storage.torch_metadata import Entries, StoredEntries, portable_state
from dcp_placements.storage.written import Offset, origin

NO_STOCK_METADATA = (
    "this checkpoint has no stock metadata: run `dcp-placements merge-metadata PATH`"
)
"""Plain DCP ends in "No module named ..." and this, so there is no dot in it."""

_PROTOCOL = b"\x80\x03"
"""A pickle begins with it. This protocol has no frames, which would need the length of the rows."""

_MARKER_TEXT = b"dcp_placements index "
MARKER_NBYTES = 2 + 5 + len(_MARKER_TEXT) + 32 + 1

_I32 = 1 << 31

_CLASSES = (MetadataIndex, StorageInfo)
_NAMES = ("fqn", "offset", "relative_path", "length", "transform_descriptors")
"""Classes and attributes that rows refer to by one byte: they come first in the pickle."""

Part = bytes | tuple[str, str]
"""Of a record: bytes that all have, or a name and a kind of integers."""


def marker(digest: bytes) -> bytes:
    """Return how a pickle begins whose index has this digest. It has no effect on its value."""
    text = _MARKER_TEXT + digest.hex().encode()
    return _PROTOCOL + b"X" + struct.pack("<I", len(text)) + text + b"0"


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


def values_pickle(metadata: Metadata, entries: Entries) -> bytes:
    """Return what an index has as a pickle: metadata without entries and rows, and their values.

    Args:
        metadata: All of it.
        entries: Of all keys: their properties, and those that are of other classes.
    """
    pickling = _Pickling()
    # The keys first: paths, which are not in the memo, refer to them.
    parts = [pickling.dump(tuple(entries.fqns)), b"0", _plain_metadata(pickling, metadata, entries)]
    values = [pickling.dump(list(one)) for one in (entries.properties, entries.others)]
    return b"".join([_PROTOCOL, *parts, *values, b"\x87."])


def stock_pickle(metadata: Metadata, index: RowIndex, digest: bytes) -> Iterator[bytes | bytearray]:
    """Yield the pickle that every torch reads, in bounded pieces.

    Args:
        metadata: All of it but entries and rows.
        index: Of entries and rows.
        digest: Of the archive of the index.
    """
    pickling, entries = _Pickling(), index.entries
    yield marker(digest)
    yield pickling.dump((*_CLASSES, *_NAMES)) + b"0"
    texts = tuple(dict.fromkeys((*index.fqns, *index.files)))
    yield pickling.dump(texts) + b"0"
    yield _plain_metadata(pickling, metadata, entries)
    yield b"}" + pickling.dump("state_dict_metadata")
    # One object of each size, which is pickled once; and one list of chunks.
    size = cache(torch.Size)
    lists = [
        [ChunkStorageMetadata(*map(size, box)) for box in chunks.boxes()]
        for chunks in entries.lists
    ]
    yield pickling.dump(_torchs_entries(entries, lists)) + b"s" + pickling.dump("storage_data")
    own = chain.from_iterable(one.own for one in index.places if one.listed < 0)
    rest = dict.fromkeys(chain(own, map(origin, np.unique(index.apart[5]).tolist())))
    yield pickling.dump([size(offset) for offset in rest if offset is not None]) + b"0"
    steps = []
    for one in index.transforms:
        steps.append(-1 if one is None else len(pickling.memo()))
        yield pickling.dump(None if one is None else list(one)) + b"0"
    yield b"}"
    yield from _Rows(pickling.memo(), index, np.array(steps, np.int64)).records()
    # Into the state of the metadata, and that into the metadata.
    yield b"sb."


def _torchs_entries(
    entries: Entries, lists: Sequence[list[ChunkStorageMetadata]]
) -> dict[str, Any]:
    """Return torch's dict: an object of its own for each key."""
    found = dict(StoredEntries(entries))
    of_key = entries.list_numbers()
    for fqn, number in zip(entries.fqns, of_key, strict=True):
        if number >= 0:
            one = found[fqn]
            found[fqn] = TensorStorageMetadata(one.properties, one.size, lists[number])
    return found


class _Rows:
    """The records of all rows, which refer to what was pickled before.

    Args:
        memo: Number and value of what was.
        index: Of the rows.
        steps: By list of transforms, its number; -1 for none.
    """

    def __init__(self, memo: Sequence[tuple[int, Any]], index: RowIndex, steps: Ints) -> None:
        self._index, self._steps = index, steps
        # Of equal values the first one counts: those of records have small numbers.
        first = [(value, number) for number, value in reversed(memo)]
        texts = {value: number for value, number in first if type(value) is str}
        kinds = {value.__name__: n for value, n in first if isinstance(value, type)}
        self._sizes = {value: number for value, number in first if type(value) is torch.Size}
        self._fqns = np.array([texts[fqn] for fqn in index.fqns], np.int64)
        self._paths = np.array([texts[path] for path in index.files], np.int64)
        self._words = {kind.__name__: b"h" + bytes([kinds[kind.__name__]]) for kind in _CLASSES}
        self._words |= {name: b"h" + bytes([texts[name]]) for name in _NAMES}

    def records(self) -> Iterator[bytearray]:
        """Yield them in bounded pieces."""
        index = self._index
        for number, keys in index.classes():
            offsets = self._offsets(number, keys)
            done = 0
            for some, rows in index.pieces(number, keys):
                file, steps, start, length = np.moveaxis(rows, 2, 0)
                of_piece = offsets[done : done + len(some)] if number == APART else offsets
                columns = {
                    "fqn": self._fqns[some][:, None],
                    "offset": of_piece,
                    "path": self._paths[file],
                    "start": start,
                    "length": length,
                    "transforms": self._steps[steps],
                }
                done += len(some)
                whole = {name: np.broadcast_to(c, file.shape) for name, c in columns.items()}
                kinds = 2 * (whole["offset"] >= 0) + (whole["transforms"] >= 0)
                for kind in np.unique(kinds).tolist():
                    chosen = kinds == kind
                    yield self._records(
                        {name: c[chosen] for name, c in whole.items()}, *divmod(kind, 2)
                    )

    def _offsets(self, number: int, keys: Ints) -> Ints:
        """Return the numbers of offsets in the memo, by chunk or by key apart; -1 for None."""
        if number == APART:
            fqns = [self._index.fqns[key] for key in keys.tolist()]
            return np.array([[self._number(self._index.offsets_of(fqn)[0])] for fqn in fqns])
        return np.array([self._number(offset) for offset in self._index.offsets(number)], np.int64)

    def _number(self, offset: Offset) -> int:
        return -1 if offset is None else self._sizes[torch.Size(offset)]

    def _records(self, columns: Mapping[str, Ints], is_chunk: int, has_steps: int) -> bytearray:
        """Return rows: an index and a place each, put into the dict."""
        words = self._words
        is_wide = max(int(columns[name].max()) for name in ("start", "length")) >= _I32
        # NEWOBJ of the class, then BUILD with a dict of its attributes; "j" gets a shared value.
        parts: list[Part] = [words["MetadataIndex"] + b")\x81}(" + words["fqn"] + b"j"]
        parts += [("fqn", "<u4")]
        if is_chunk:
            parts += [words["offset"] + b"j", ("offset", "<u4")]
        parts += [b"ub" + words[StorageInfo.__name__] + b")\x81}(" + words["relative_path"] + b"j"]
        for name, word in (("path", b""), ("start", words["offset"]), ("length", words["length"])):
            kind = "<u4" if name == "path" else "<i8" if is_wide else "<i4"
            code = {"<u4": b"", "<i8": b"\x8a\x08", "<i4": b"J"}[kind]
            parts += [word + code, (name, kind)]
        if has_steps:
            parts += [words["transform_descriptors"] + b"j", ("transforms", "<u4")]
        row, dtype = _layout((*parts, b"ubs"))
        data = bytearray(row) * len(columns["fqn"])
        filled = np.frombuffer(data, dtype)
        for name in dtype.names or ():
            filled[name] = columns[name]
        return data


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


def _plain_metadata(pickling: _Pickling, metadata: Metadata, entries: Entries) -> bytes:
    """Return the pickle of metadata without entries and rows, in the form that every torch reads.

    Args:
        pickling: Its memo has the keys.
        metadata: All of it.
        entries: Have the keys.
    """
    plain = copy.copy(metadata)
    for name in ("state_dict_metadata", "storage_data"):
        vars(plain).pop(name, None)
    if metadata.storage_meta is not None:
        plain.storage_meta = _portable_meta(metadata.storage_meta)
    data = metadata.planner_data
    if type(data) is not dict:
        return pickling.dump(plain)
    del plain.planner_data
    texts = dict(zip(entries.fqns, entries.fqns, strict=True))
    paths = {
        texts.get(key, key): path
        for key, path in data.items()
        if type(path) is tuple and type(key) is str
    }
    if not set(map(type, chain.from_iterable(paths.values()))) <= {str, int}:
        paths = {}
    if 1 in set(map(len, paths.values())):
        # The path of many keys is the key alone.
        paths = {key: (key,) if path == (key,) else path for key, path in paths.items()}
    parts = [pickling.dump(plain), b"}", pickling.dump("planner_data")]
    # In the memo paths would take half of the index, and nothing refers to them.
    parts.append(pickling.dump(paths, fast=True))
    for item in [item for item in data.items() if item[0] not in paths]:
        parts += [*map(pickling.dump, item), b"s"]
    return b"".join([*parts, b"sb"])


class _Pickling:
    """One pickle, piece by piece; later pieces refer to what earlier ones put into the memo."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._pickler = pickle.Pickler(self._buffer, 3)
        self._pickler.dispatch_table = {
            **copyreg.dispatch_table,
            TensorProperties: _portable,
            # Python 3.11 before 3.11.4 would pickle a call of getattr.
            MemoryFormat: lambda member: (MemoryFormat, (member.value,)),
        }

    def dump(self, value: Any, *, fast: bool = False) -> bytes:
        """Return what puts a value on the stack.

        Args:
            value: What to pickle.
            fast: Whether to put nothing of it into the memo. It must have no cycles.
        """
        self._pickler.fast = fast
        self._buffer.seek(0)
        self._buffer.truncate()
        self._pickler.dump(value)
        return self._buffer.getvalue()[2:-1]

    def memo(self) -> list[tuple[int, Any]]:
        """Return numbers and values of the memo, in the order of the numbers."""
        return sorted(self._pickler.memo.copy().values(), key=itemgetter(0))


def _portable(properties: TensorProperties) -> tuple[Any, ...]:
    """Return how to pickle properties: as ``pickle`` does, with fewer fields."""
    return copyreg.__newobj__, (TensorProperties,), portable_state(properties)  # type: ignore[attr-defined]


def _portable_meta(meta: StorageMeta) -> StorageMeta:
    path = meta.checkpoint_id
    if type(path).__module__ != PATHS_OF_3_13:
        return meta
    meta = copy.copy(meta)
    meta.checkpoint_id = str(path)
    return meta
