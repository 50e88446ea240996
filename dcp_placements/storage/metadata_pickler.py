"""``.metadata`` as torch's own pickle, whose rows, one per chunk, are written in bulk.

In this pickle the rows of two chunks differ in a few numbers only. So rows are written as arrays of
records of equal length, which refer to values in the pickle's memo. ``pickle.load`` creates torch's
objects from them, while writing needs none. All other values are pickled as usual.
"""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from dcp_placements._torch import MemoryFormat, StorageInfo
from dcp_placements.layout.boxes import Ints
from dcp_placements.storage.index import RowIndex
from dcp_placements.storage.metadata_unpickler import PATHS_OF_3_13
from dcp_placements.storage.torch_metadata import portable_state

NO_STOCK_METADATA = (
    "this checkpoint has no stock metadata: run `dcp-placements stock-metadata PATH`"
)
"""Plain DCP fails with "No module named ..." and this text, which therefore has no dot."""

_PROTOCOL = b"\x80\x03"
"""The first bytes of the pickle. Protocol 3 has no frames, which would need the rows' length."""

_MARKER_TEXT = b"dcp_placements index "
MARKER_NBYTES = 2 + 5 + len(_MARKER_TEXT) + 32 + 1

_I32 = 1 << 31

_CLASSES = (MetadataIndex, StorageInfo)
_PLACE_FIELDS = ("fqn", "offset", "relative_path", "length", "transform_descriptors")
"""Classes and attributes come first in the pickle, so that rows refer to them by one byte."""


def marker(digest: bytes) -> bytes:
    """Return the first bytes of a pickle whose index has this digest; they do not change its value.

    They push a text on the stack and pop it again.
    """
    text = _MARKER_TEXT + digest.hex().encode()
    return _PROTOCOL + b"X" + struct.pack("<I", len(text)) + text + b"0"


def marked_digest(head: bytes) -> bytes | None:
    """Return the digest in the first bytes of a pickle; None without one."""
    text = head[7 + len(_MARKER_TEXT) : MARKER_NBYTES - 1]
    try:
        digest = bytes.fromhex(text.decode())
    except ValueError:
        return None
    return digest if head[:MARKER_NBYTES] == marker(digest) else None


def refusing_pickle(digest: bytes) -> bytes:
    """Return a pickle that fails to load, with a message that says how to add stock metadata."""
    return marker(digest) + f"c{NO_STOCK_METADATA}\nMetadata\n.".encode()


def is_refusing(head: bytes) -> bool:
    """Whether these are the first bytes of a pickle that fails to load."""
    return head[MARKER_NBYTES:].startswith(f"c{NO_STOCK_METADATA}\n".encode())


def values_pickle(metadata: Metadata, forms: Sequence[Any]) -> bytes:
    """Return the pickle inside an index: metadata without entries and rows, and the forms.

    Args:
        metadata: The whole metadata.
        forms: Forms of entries, whose chunks are left out.
    """
    pickling = _Pickling()
    plain = [
        replace(form, chunks=[]) if type(form) is TensorStorageMetadata else form for form in forms
    ]
    return b"".join([_PROTOCOL, pickling.plain(metadata), pickling.dump(plain), b"\x86."])


def stock_pickle(metadata: Metadata, index: RowIndex, digest: bytes) -> Iterator[bytes | bytearray]:
    """Yield the pickle that every torch reads, in blocks of bounded size.

    Args:
        metadata: The metadata; entries and rows are those of ``index``.
        index: The index.
        digest: Digest of the index's archive.
    """
    pickling, entries = _Pickling(), index.entries
    yield marker(digest)
    yield pickling.dump((*_CLASSES, *_PLACE_FIELDS)) + b"0"
    texts = tuple(dict.fromkeys((*index.fqns, *index.files)))
    yield pickling.dump(texts) + b"0"
    yield pickling.plain(metadata)
    yield b"}" + pickling.dump("state_dict_metadata")
    lists = [chunks.as_list() for chunks in entries.lists]
    forms = [
        form if number < 0 else replace(form, chunks=lists[number])
        for form, number in zip(entries.forms, entries.list_of, strict=True)
    ]
    stored = entries._replace(forms=forms).stored()
    yield pickling.dump(stored) + b"s" + pickling.dump("storage_data")
    own = [
        torch.Size(offset)
        for chunks in index.lists[len(lists) :]
        for offset in chunks.offsets.tolist()
    ]
    yield pickling.dump(own) + b"0"
    # None is put into the memo, too, so that all records refer to it in the same way.
    steps = []
    for descriptors in index.transforms:
        steps.append(pickling.count())
        yield b"" if descriptors is None else pickling.dump(list(descriptors)) + b"0"
    none = pickling.count()
    yield b"Nr" + struct.pack("<I", none) + b"0}"
    numbers = [
        none if descriptors is None else n
        for descriptors, n in zip(index.transforms, steps, strict=True)
    ]
    memo = {None: none} | pickling.memo()
    yield from _rows(index, memo, np.array(numbers, np.int64))
    # Set the rows in the state of the metadata, and the state in the metadata.
    yield b"sb."


def _rows(index: RowIndex, memo: Mapping[Any, int], steps: Ints) -> Iterator[bytearray]:
    """Yield the records of all rows, which refer to earlier values, in blocks of bounded size.

    Args:
        index: The index.
        memo: Memo numbers of keys, files, offsets, classes and attributes.
        steps: Memo number of each list of transforms.
    """
    words = {name: b"h" + bytes([memo[name]]) for name in (*_CLASSES, *_PLACE_FIELDS)}
    integer, code = "<i4", b"J"
    if max(column.max(initial=0) for column in (index.rows.start, index.rows.length)) >= _I32:
        integer, code = "<i8", b"\x8a\x08"
    # NEWOBJ of the class, then BUILD with a dict of its attributes; "j" gets a shared value.
    attributes = [
        (words[MetadataIndex] + b")\x81}(" + words["fqn"] + b"j", "fqn", "<u4"),
        (words["offset"] + b"j", "offset", "<u4"),
        (b"ub" + words[StorageInfo] + b")\x81}(" + words["relative_path"] + b"j", "path", "<u4"),
        (words["offset"] + code, "start", integer),
        (words["length"] + code, "length", integer),
    ]
    if set(index.transforms) - {None}:
        attributes.append((words["transform_descriptors"] + b"j", "transforms", "<u4"))
    record, fields = b"", []
    for before, name, kind in attributes:
        fields.append((name, kind, len(record) + len(before)))
        record += before + bytes(int(kind[-1]))
    record += b"ubs"
    names = ("names", "formats", "offsets")
    layout: Any = dict(zip(names, zip(*fields, strict=True), strict=True))
    dtype = np.dtype(layout | {"itemsize": len(record)})
    fqns = np.array([memo[fqn] for fqn in index.fqns], np.int64)
    paths = np.array([memo[path] for path in index.files], np.int64)
    order = np.argsort(index.class_of, kind="stable")
    starts = index.class_of[order].searchsorted(np.arange(len(index.classes.locations) + 1))
    for number, (begin, end) in enumerate(pairwise(starts.tolist())):
        offsets = np.array([memo[offset] for offset in index.offsets(number)])
        keys = order[begin:end]
        for batch, located in index.row_batches(number, keys):
            data = bytearray(record) * located.file.size
            rows = np.frombuffer(data, dtype).reshape(located.file.shape)
            columns = [fqns[batch][:, None], offsets, paths[located.file]]
            columns += [located.start, located.length, steps[located.transforms]]
            for (name, _, _), column in zip(fields, columns, strict=False):
                rows[name] = column
            yield data


class _Pickling:
    """One pickle, written block by block; later blocks refer to the memo of earlier ones."""

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
        """Return opcodes that push a value on the stack; with ``fast`` they use no memo."""
        self._pickler.fast = fast
        self._buffer.seek(0)
        self._buffer.truncate()
        self._pickler.dump(value)
        return self._buffer.getvalue()[2:-1]

    def plain(self, metadata: Metadata) -> bytes:
        """Return opcodes that push metadata without entries and rows, as every torch reads them."""
        plain, data = copy.copy(metadata), metadata.planner_data
        for name in ("state_dict_metadata", "storage_data"):
            vars(plain).pop(name, None)
        meta = plain.storage_meta
        if meta is not None and type(meta.checkpoint_id).__module__ == PATHS_OF_3_13:
            plain.storage_meta = replace(meta, checkpoint_id=str(meta.checkpoint_id))
        if type(data) is not dict:
            return self.dump(plain)
        del plain.planner_data
        # In the memo the paths of keys would take half of the index, and nothing refers to them.
        paths = {
            key: path
            for key, path in data.items()
            if type(key) is str and type(path) is tuple and set(map(type, path)) <= {str, int}
        }
        blocks = [self.dump(plain), b"}", self.dump("planner_data"), self.dump(paths, fast=True)]
        for item in data.items():
            if item[0] not in paths:
                blocks += [*map(self.dump, item), b"s"]
        return b"".join([*blocks, b"sb"])

    def count(self) -> int:
        """Return the number of values in the memo, which is the memo number of the next one."""
        return len(self._pickler.memo.copy())

    def memo(self) -> dict[Any, int]:
        """Return the memo numbers of texts, sizes and classes; the first of equal ones."""
        held = sorted(self._pickler.memo.copy().values(), key=itemgetter(0), reverse=True)
        kinds = str, torch.Size, type
        return {value: number for number, value in held if isinstance(value, kinds)}


def _portable(properties: TensorProperties) -> tuple[Any, ...]:
    """Return the reduction of properties: that of ``pickle``, with fewer fields."""
    return copyreg.__newobj__, (TensorProperties,), portable_state(properties)  # type: ignore[attr-defined]
