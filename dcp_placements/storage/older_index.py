"""Reads the index that earlier versions wrote, where nothing else says what is where.

It is read for checkpoints of ``stock_metadata=False`` alone; of others the pickle is read. Its
templates and places are those of ``RowIndex``, in columns of another form.
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

from dcp_placements.layout.boxes import Ints
from dcp_placements.storage.index import NOWHERE, RowIndex, with_chunks
from dcp_placements.storage.packing import LARGEST, IndexDamage, check_below, split
from dcp_placements.storage.torch_metadata import ChunkList, Entries

_MAGIC = b"dcp_placements/3"
_TRAILER = struct.Struct("<QQQ16s16s")
_HEAD = struct.Struct("<BBQQ")
_KINDS = ("<u1", "<u2", "<u4", "<i1", "<i2", "<i4", "<i8")
_STEPS, _RUNS = 1, 2
_MOST = 1 << 24
"""Bytes of a block, and numbers of a column."""


def has_older_index(stream: IO[bytes]) -> bool:
    """Whether a file ends with the index of an earlier version."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(max(size - len(_MAGIC), 0))
    return stream.read() == _MAGIC


def read_older_index(
    stream: IO[bytes], load: Callable[[IO[bytes]], Any]
) -> tuple[Metadata, RowIndex]:
    """Return the metadata in such an index, without entries and rows; and these, checked.

    Args:
        stream: The ``.metadata`` file.
        load: Unpickles what is neither key nor row.

    Raises:
        IndexDamage: It is damaged.
    """
    try:
        metadata, index = _unpacked(stream, load)
        index.check()
    except IndexDamage:
        raise
    except (struct.error, zlib.error, ValueError, IndexError, UnicodeDecodeError) as error:
        raise IndexDamage(str(error)) from error
    return metadata, index


def _unpacked(stream: IO[bytes], load: Callable[[IO[bytes]], Any]) -> tuple[Metadata, RowIndex]:
    directory, blocks = _blocks_in(stream)
    parts = [directory.ints() for _ in range(6)]
    listed, (keys, pairs, _, _) = directory.ints(), directory.ints().tolist()
    tables = [np.zeros((7, 0), np.int64)]
    for columns, (counts,) in _parts(blocks, parts[0:2], 1):
        number = np.repeat(np.arange(len(counts)) + int(tables[-1][0].max(initial=-1)) + 1, counts)
        tables.append(np.stack([number, *[columns.ints() for _ in range(6)]]))
    places = [np.zeros((3, 0), np.int64)]
    places_of_class: list[int] = []
    cut: list[Ints] = []
    for columns, (of_classes, dims) in _parts(blocks, parts[2:4], 2):
        chunks = np.concatenate([np.zeros(0, np.int64), *map(np.arange, of_classes.tolist())])
        places.append(np.stack([chunks, columns.ints(), columns.ints()]))
        sizes = enumerate(
            zip(of_classes.tolist(), dims.tolist(), strict=True), len(places_of_class)
        )
        places_of_class += of_classes.tolist()
        # Of classes without a list the offsets are here; objects have none.
        own = [(at, *size) for at, size in sizes if listed[at] < 0 and size[1] >= 0]
        cut += _tables(columns, [size for _, *size in own])
        listed[[at for at, *_ in own]] = -2
    lists = []
    for columns, shape in _parts(blocks, parts[4:6], 2):
        shapes = shape.T.tolist()
        boxes = zip(list(_tables(columns, shapes)), list(_tables(columns, shapes)), strict=True)
        lists += [ChunkList(np.stack(pair, axis=1)) for pair in boxes]
    check_below(listed, len(lists), -2)
    listed[listed == -2] = np.arange(len(cut)) + len(lists)
    every = [*lists, *[ChunkList(np.stack([one, np.zeros_like(one)], axis=1)) for one in cut]]
    shared, texts = _Columns(next(blocks)), _Columns(next(blocks))
    forms, dims = shared.ints().reshape(3, -1), shared.ints()
    whole = [torch.Size(part.tolist()) for part in split(shared.ints(), dims.tolist())]
    template_of, files, transforms = _writers(shared)
    fqns, form_of = texts.texts(), texts.ints()
    key, number = texts.ints().reshape(2, pairs)
    check_below(key, len(fqns))
    if len(np.unique(key)) < len(key):
        raise IndexDamage("a key of several classes")
    class_of = np.full(len(fqns), NOWHERE)
    class_of[key] = number
    metadata, properties, others = load(io.BytesIO(next(blocks)))
    check_below(forms[1:, forms[0] >= 0].ravel(), LARGEST)
    made: list[Any] = []
    list_of: list[int] = []
    for kind, size, at in forms.T.tolist():
        # Of tensors it is the number of their properties.
        list_of.append(at if kind >= 0 else -1)
        form: Any = BytesStorageMetadata() if kind == -1 else None
        if kind >= 0:
            form = TensorStorageMetadata(properties[kind], whole[size], [])
        made.append(with_chunks(others[size] if kind < -1 else form, list_of[-1], lists))
    check_below(form_of, len(made))
    return metadata, RowIndex(
        Entries(fqns[:keys], form_of.tolist(), made, lists, list_of),
        fqns,
        transforms,
        [name for names in files for name in names],
        np.array(list(map(len, files)), np.int64),
        template_of,
        np.concatenate(tables, axis=1),
        class_of,
        every,
        listed,
        np.array(places_of_class, np.int64),
        np.concatenate(places, axis=1),
    )


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


def _blocks_in(stream: IO[bytes]) -> tuple[_Columns, Iterator[bytes]]:
    """Return the directory of an index, and its blocks."""
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
    checksums, directory = columns.data(), _Columns(columns.data())
    blocks = [data[a:b] for a, b in pairwise(stops)]
    if b"".join(map(xxhash.xxh3_64_digest, blocks)) != checksums:
        raise IndexDamage("a block is not what was written")
    return directory, iter([_inflated(b, n) for b, n in zip(blocks, sizes, strict=True)])


def _parts(
    blocks: Iterator[bytes], directory: Sequence[Ints], columns: int
) -> Iterator[tuple[_Columns, Ints]]:
    """Yield the blocks of one kind of parts, and the sizes of the parts in each."""
    sizes, at = directory[0].reshape(columns, -1), 0
    for count in directory[1].tolist():
        yield _Columns(next(blocks)), sizes[:, at : at + count]
        at += count


def _tables(columns: _Columns, shapes: Sequence[Sequence[int]]) -> Iterator[Ints]:
    parts = split(columns.ints(), [prod(shape) for shape in shapes])
    for part, (count, ndim) in zip(parts, shapes, strict=True):
        yield part.reshape(ndim, count).T


def _writers(columns: _Columns) -> tuple[Ints, list[list[str]], list[tuple[str, ...] | None]]:
    """Return by writer its template, and the names of its files; and the lists of transforms."""
    template_of = columns.ints()
    naming_of, numbers, counts, has_number = [columns.ints().tolist() for _ in range(4)]
    before, behind = columns.texts(), columns.texts()
    stops = list(accumulate(counts, initial=0))
    files = []
    for naming, number in zip(naming_of, numbers, strict=True):
        parts = range(stops[naming], stops[naming + 1])
        names = [f"{before[n]}{number}{behind[n]}" if has_number[n] else before[n] for n in parts]
        files.append(names)
    steps, rest = columns.ints().tolist(), iter(columns.texts())
    transforms = [None if n < 0 else tuple([next(rest) for _ in range(n)]) for n in steps]
    return template_of, files, transforms


def _inflated(stored: bytes, nbytes: int) -> bytes:
    inflating = zlib.decompressobj()
    data = inflating.decompress(stored, min(nbytes, _MOST) + 1)
    if len(data) != nbytes:
        raise IndexDamage("a block inflates to another size than it had")
    return data
