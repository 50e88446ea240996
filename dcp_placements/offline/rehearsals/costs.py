"""What ranks read of a checkpoint for the boxes that they need: bytes, read items and files.

Costs are computed once for each different box of tensors that are stored alike, and then added to
the ranks that hold the box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dcp_placements.layout.boxes import Boxes, Ints, expanded, intersect, numel
from dcp_placements.offline.checkpoint import Checkpoint, StoredTensor
from dcp_placements.storage.file_reads import c_strides, cheap_gap, segments
from dcp_placements.storage.record_reads import is_read_whole
from dcp_placements.table.world import Cover

COLUMNS = ("wanted", "slices", "chunks", "exchange", "reads")
"""Of the elements; of what this package's reader reads, and torch's; with an exchange; items."""


class Costs:
    """The costs of all ranks.

    Attributes:
        of_rank: By column, one number per rank.
        placeless: The ranks that need a chunk for which the metadata name no file, by key.
    """

    def __init__(self, checkpoint: Checkpoint, size: int) -> None:
        self.of_rank = {name: np.zeros(size, np.int64) for name in COLUMNS}
        self.placeless: dict[str, list[int]] = {}
        self._checkpoint = checkpoint
        self._numbers = {name: number for number, name in enumerate(checkpoint.files)}
        self._opened: list[Ints] = []  # rank and file, as one number

    def add_objects(self, ranks: Sequence[int], fqns: Sequence[str]) -> None:
        """Add the objects that some ranks read, each of them all."""
        for fqn in fqns:
            stored = self._checkpoint.objects[fqn]
            if stored.file is not None:
                for name in ("slices", "chunks", "exchange"):
                    self.of_rank[name][ranks] += stored.nbytes
                self.of_rank["reads"][ranks] += 1
                file = self._numbers[stored.file]
                self._opened.append(np.array(ranks, np.int64) * len(self._numbers) + file)

    def add(self, fqns: Sequence[str], cover: Cover) -> None:
        """Add tensors that the same ranks hold in the same boxes."""
        alike: dict[Any, list[StoredTensor]] = {}
        for fqn in fqns:
            if (one := self._checkpoint.tensors.get(fqn)) is not None:
                alike.setdefault((one.cut, one.dtype), []).append(one)
        for tensors in alike.values():
            if len(tensors[0].shape) == cover.boxes.shape[2]:
                self._add(tensors, cover)

    def files(self) -> Ints:
        """Return the files that ranks open, ``[pairs, 2]``: rank and number, sorted."""
        pairs = np.unique(np.concatenate([np.zeros(0, np.int64), *self._opened]))
        return np.stack(np.divmod(pairs, max(len(self._numbers), 1)), axis=1)

    def _add(self, tensors: Sequence[StoredTensor], cover: Cover) -> None:
        count, boxes, itemsize = len(tensors), cover.boxes, tensors[0].dtype.itemsize
        stored = tensors[0].cut.index
        box, chunk = stored.meeting(boxes)
        shared = intersect(boxes[box], stored.boxes[chunk])
        exact = numel(shared) * itemsize
        # Of each tensor the files and lengths of its chunks; file -1 for none.
        files, nbytes = np.array([self._places(one) for one in tensors], np.int64).swapaxes(0, 1)
        by_pair = np.array(list(_slices(stored.boxes[chunk], shared, itemsize)), np.int64)
        slices, chunks, reads = np.zeros((3, len(boxes)), np.int64)
        for lengths, number in zip(*np.unique(nbytes, axis=0, return_counts=True), strict=True):
            whole = is_read_whole(lengths[chunk], exact)
            np.add.at(slices, box, np.where(whole, lengths[chunk], by_pair) * number)
            np.add.at(chunks, box, lengths[chunk] * number)
        np.add.at(reads, box, count)
        holders = np.maximum(np.diff(cover.starts), 1)
        of_box = {
            "wanted": cover.numel * itemsize * count,
            "slices": slices,
            "chunks": chunks,
            "exchange": -(-slices // holders),
            "reads": reads,
        }
        for name, values in of_box.items():
            np.add.at(self.of_rank[name], cover.ranks, values[cover.box_of])
        size = len(self._numbers)
        for of_chunk in np.unique(files, axis=0):
            # Each box with each file once, then each holder of the box with the file.
            pairs = np.unique(box * (size + 1) + of_chunk[chunk] + 1)
            opened, file = np.divmod(pairs, size + 1)
            row, place = expanded(cover.starts[opened], np.diff(cover.starts)[opened])
            ranks, file = cover.ranks[cover.order[place]], file[row] - 1
            self._opened.append(np.unique(ranks[file >= 0] * size + file[file >= 0]))
            if len(lacking := ranks[file < 0]):
                alike = (files == of_chunk).all(axis=1)
                for at in np.flatnonzero(alike).tolist():
                    self.placeless[tensors[at].fqn] = np.unique(lacking).tolist()

    def _places(self, tensor: StoredTensor) -> tuple[list[int], list[int]]:
        """Return the number of the file of each chunk, -1 for none, and the record's length."""
        chunks = tensor.chunks
        files = [-1 if one.file is None else self._numbers[one.file] for one in chunks]
        return files, [one.nbytes for one in chunks]


def _slices(stored: Boxes, shared: Boxes, itemsize: int) -> Iterator[int]:
    """Yield the bytes that are read for each part of a stored chunk."""
    offsets = shared[:, 0] - stored[:, 0]
    columns = stored[:, 1], offsets, shared[:, 1]
    for shape, start, sizes in zip(*[column.tolist() for column in columns], strict=True):
        yield _slice_nbytes(tuple(shape), tuple(start), tuple(sizes), itemsize)


@lru_cache(maxsize=1 << 14)
def _slice_nbytes(
    shape: tuple[int, ...], start: tuple[int, ...], sizes: tuple[int, ...], itemsize: int
) -> int:
    strides = c_strides(shape)
    found = segments(strides, offsets=start, lengths=sizes, itemsize=itemsize, gap=cheap_gap)
    return found.total_nbytes
