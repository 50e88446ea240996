"""Reads the index that earlier versions wrote, where nothing else says what is where.

It is read for checkpoints of ``stock_metadata=False`` alone; of others the pickle is read.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import IO, Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements._torch import StorageInfo
from dcp_placements.layout.boxes import Ints
from dcp_placements.storage.columns import IndexDamage, split
from dcp_placements.storage.torch_metadata import ChunkList

_MAGIC = b"dcp_placements/3"
_TRAILER = struct.Struct("<QQQ16s16s")
_HEAD = struct.Struct("<BBQQ")
_KINDS = ("<u1", "<u2", "<u4", "<i1", "<i2", "<i4", "<i8")
_STEPS, _RUNS = 1, 2
_MOST = 1 << 24
"""Bytes of a block, numbers of a column, and rows."""


def has_older_index(stream: IO[bytes]) -> bool:
    """Whether a file ends with the index of an earlier version."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(max(size - len(_MAGIC), 0))
    return stream.read() == _MAGIC


def read_older_index(stream: IO[bytes], load: Callable[[IO[bytes]], Any]) -> Metadata:
    """Return the metadata in such an index, as torch has them.

    Args:
        stream: The ``.metadata`` file.
        load: Unpickles what is neither key nor row.

    Raises:
        IndexDamage: It is damaged.
    """
    try:
        return _Index(stream).metadata(load)
    except IndexDamage:
        raise
    except (struct.error, zlib.error, ValueError, IndexError, UnicodeDecodeError) as error:
        raise IndexDamage(str(error)) from error


def older_file_names(stream: IO[bytes]) -> set[str]:
    """Return the names of the data files in such an index.

    Raises:
        Exception: It is damaged; of any type.
    """
    return _Index(stream).file_names()


class _Columns:
    """Columns of integers and texts, one after another."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)

    def ints(self) -> Ints:
        form, kind, length, stored = _HEAD.unpack(self._stream.read(_HEAD.size))
        if max(length, stored) > _MOST:
            raise IndexDamage("a column of more numbers than are read")
        values = self._array(kind, stored)
        if form == _RUNS:
            counts = self._array(self._stream.read(1)[0], stored)
            if stored and (int(counts.min()) < 1 or sum(counts.tolist()) != length):
                raise IndexDamage("runs of other lengths than their column")
            return np.cumsum(np.repeat(values, counts), dtype=np.int64)
        return np.cumsum(values, dtype=np.int64) if form == _STEPS else values

    def data(self) -> bytes:
        (length,) = struct.unpack("<Q", self._stream.read(8))
        return self._stream.read(min(length, _MOST))

    def texts(self) -> list[str]:
        stops = accumulate(self.ints().tolist(), initial=0)
        data = self.data()
        return [data[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(stops)]

    def _array(self, kind: int, count: int) -> Ints:
        dtype = np.dtype(_KINDS[kind])
        return np.frombuffer(self._stream.read(count * dtype.itemsize), dtype, count).astype(
            np.int64
        )


class _Index:
    def __init__(self, stream: IO[bytes]) -> None:
        size = stream.seek(0, io.SEEK_END)
        stream.seek(size - _TRAILER.size)
        start, stored, nbytes, digest, _ = _TRAILER.unpack(stream.read())
        stream.seek(start)
        data = stream.read(size - start - _TRAILER.size)
        if stored > len(data) or xxhash.xxh3_128_digest(data[-stored:]) != digest:
            raise IndexDamage("its directory is not what was written")
        columns = _Columns(_inflated(data[-stored:], nbytes))
        stops = list(accumulate(columns.ints().tolist(), initial=0))
        sizes = columns.ints().tolist()
        checksums = columns.data()
        self._directory = _Columns(columns.data())
        blocks = [data[a:b] for a, b in pairwise(stops)]
        if b"".join(map(xxhash.xxh3_64_digest, blocks)) != checksums:
            raise IndexDamage("a block is not what was written")
        self._blocks = iter([_inflated(b, n) for b, n in zip(blocks, sizes, strict=True)])

    def file_names(self) -> set[str]:
        _, templates, _, places, _, lists = [self._directory.ints() for _ in range(6)]
        for _ in range(len(templates) + len(places) + len(lists)):
            next(self._blocks)
        shared = _Columns(next(self._blocks))
        for _ in range(3):  # forms and shapes
            shared.ints()
        return {name for _, names in _writers(shared)[0] for name in names}

    def metadata(self, load: Callable[[IO[bytes]], Any]) -> Metadata:
        parts = [self._directory.ints() for _ in range(6)]
        listed = self._directory.ints().tolist()
        keys, pairs, _, _ = self._directory.ints().tolist()
        templates = [
            part
            for columns, sizes in self._parts(parts[0:2], 1)
            for part in _templates(columns, sizes[0])
        ]
        places, own = list[Any](), list[Ints | None]()
        for columns, sizes in self._parts(parts[2:4], 2):
            both = columns.ints(), columns.ints()
            places += zip(*[split(column, sizes[0].tolist()) for column in both], strict=True)
            shapes = sizes.T.tolist()
            some = listed[len(own) : len(own) + len(shapes)]
            tables = _tables(
                columns, [s for s, at in zip(shapes, some, strict=True) if at < 0 <= s[1]]
            )
            own += [
                next(tables) if at < 0 <= s[1] else None for s, at in zip(shapes, some, strict=True)
            ]
        lists = []
        for columns, sizes in self._parts(parts[4:6], 2):
            shapes = sizes.T.tolist()
            boxes = zip(list(_tables(columns, shapes)), list(_tables(columns, shapes)), strict=True)
            lists += [ChunkList(np.stack(pair, axis=1)) for pair in boxes]
        shared, texts = _Columns(next(self._blocks)), _Columns(next(self._blocks))
        forms = shared.ints().reshape(3, -1).T.tolist()
        dims, flat = shared.ints(), shared.ints()
        shapes = [tuple(part.tolist()) for part in split(flat, dims.tolist())]
        writers, transforms = _writers(shared)
        fqns = texts.texts()
        form_of, of_keys = texts.ints().tolist(), texts.ints().reshape(2, pairs).T.tolist()
        metadata: Metadata
        metadata, properties, others = load(io.BytesIO(next(self._blocks)))
        entries: dict[str, Any] = {}
        for fqn, number in zip(fqns[:keys], form_of, strict=True):
            kind, shape, at = forms[number]
            if kind >= 0:
                chunks: Any = lists[at]
                entries[fqn] = TensorStorageMetadata(
                    properties[kind], torch.Size(shapes[shape]), chunks
                )
            else:
                entries[fqn] = BytesStorageMetadata() if kind == -1 else others[shape]
        if sum([len(places[number][0]) for _, number in of_keys]) > _MOST:
            raise IndexDamage("more rows than are read")
        data: dict[MetadataIndex, StorageInfo] = {}
        for key, number in of_keys:
            table = lists[listed[number]].offsets if listed[number] >= 0 else own[number]
            count = len(places[number][0])
            offsets = [None] * count if table is None else table.tolist()
            for offset, writer, ordinal in zip(
                offsets, *map(Ints.tolist, places[number]), strict=True
            ):
                template, files = writers[writer]
                file, steps, start, length = templates[template][key, ordinal]
                index = MetadataIndex(fqns[key], offset)
                data[index] = StorageInfo(files[file], start, length, transforms[steps])
        metadata.state_dict_metadata, metadata.storage_data = entries, data
        return metadata

    def _parts(self, directory: Sequence[Ints], columns: int) -> Iterator[tuple[_Columns, Ints]]:
        """Yield the blocks of one kind of parts, and the sizes of the parts in each."""
        sizes, at = directory[0].reshape(columns, -1), 0
        for count in directory[1].tolist():
            yield _Columns(next(self._blocks)), sizes[:, at : at + count]
            at += count


def _templates(columns: _Columns, counts: Ints) -> list[dict[tuple[int, int], tuple[int, ...]]]:
    """Return by key and ordinal: file, transforms, start and length."""
    table = np.stack([columns.ints() for _ in range(6)], axis=1)
    return [
        {(key, ordinal): tuple(row) for key, ordinal, *row in table[stop - count : stop].tolist()}
        for stop, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True)
    ]


def _tables(columns: _Columns, shapes: Sequence[Sequence[int]]) -> Iterator[Ints]:
    parts = split(columns.ints(), [prod(shape) for shape in shapes])
    for part, (count, ndim) in zip(parts, shapes, strict=True):
        yield part.reshape(ndim, count).T


def _writers(columns: _Columns) -> tuple[list[tuple[int, list[str]]], list[list[str] | None]]:
    """Return by writer its template and the names of its files; and the lists of transforms."""
    template_of, naming_of, numbers, counts, has_number = [
        columns.ints().tolist() for _ in range(5)
    ]
    before, behind = columns.texts(), columns.texts()
    stops = list(accumulate(counts, initial=0))
    writers = []
    for template, naming, number in zip(template_of, naming_of, numbers, strict=True):
        parts = range(stops[naming], stops[naming + 1])
        names = [f"{before[n]}{number}{behind[n]}" if has_number[n] else before[n] for n in parts]
        writers.append((template, names))
    steps, rest = columns.ints().tolist(), iter(columns.texts())
    return writers, [None if n < 0 else [next(rest) for _ in range(n)] for n in steps]


def _inflated(stored: bytes, nbytes: int) -> bytes:
    inflating = zlib.decompressobj()
    data = inflating.decompress(stored, min(nbytes, _MOST) + 1)
    if len(data) != nbytes:
        raise IndexDamage("a block inflates to another size than it had")
    return data
