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
from dcp_placements.storage.file_reads import cheap_gap, segments
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
        self._places: dict[str, tuple[list[int], list[int]]] = {}
        self._opened: list[Ints] = []  # rank and file, as one number

    def add_objects(self, ranks: Sequence[int], fqns: Sequence[str]) -> None:
        """Add the objects that some ranks read, each of them all."""
        for fqn in fqns:
            stored = self._checkpoint.objects[fqn]
            if stored.file is not None:
                for name in ("slices", "chunks", "exchange"):
                    self.of_rank[name][ranks] += stored.nbytes
                self.of_rank["reads"][ranks] += 1
                self._open(np.array(ranks, np.int64), self._numbers[stored.file])

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

    def _open(self, ranks: Ints, files: Ints | int) -> None:
        self._opened.append(np.unique(ranks * len(self._numbers) + files))

    def _add(self, tensors: Sequence[StoredTensor], cover: Cover) -> None:
        first, count, boxes = tensors[0], len(tensors), cover.boxes
        itemsize = first.dtype.itemsize
        stored = first.cut.index
        box, chunk = stored.meeting(boxes)
        shared = intersect(boxes[box], stored.boxes[chunk])
        exact = numel(shared) * itemsize
        places = [self._places_of(one) for one in tensors]
        nbytes, times = np.unique([one[1] for one in places], axis=0, return_counts=True)
        by_pair = np.array(list(_slices(stored.boxes[chunk], shared, itemsize)), np.int64)
        slices = np.zeros(len(boxes), np.int64)
        chunks, reads = slices.copy(), slices.copy()
        for lengths, number in zip(nbytes.reshape(len(times), -1)[:, chunk], times, strict=True):
            whole = is_read_whole(lengths, exact)
            np.add.at(slices, box, np.where(whole, lengths, by_pair) * number)
            np.add.at(chunks, box, lengths * number)
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
        self._add_files(tensors, np.array([one[0] for one in places], np.int64), box, chunk, cover)

    def _add_files(
        self, tensors: Sequence[StoredTensor], files: Ints, box: Ints, chunk: Ints, cover: Cover
    ) -> None:
        """Add the files of the pairs of boxes and stored chunks that meet.

        Args:
            tensors: The tensors.
            files: By tensor and chunk, the number of the file; -1 for none.
            box: Of each pair, the box.
            chunk: Of each pair, the chunk.
            cover: Who holds the boxes.
        """
        files = files.reshape(len(tensors), -1)
        used, of_used = np.unique(chunk, return_inverse=True)
        of_chunk = [np.unique(files[:, at]) for at in used]
        counts = np.array([len(one) for one in of_chunk], np.int64)
        starts = np.cumsum(counts) - counts
        pair, at = expanded(starts[of_used], counts[of_used])
        file = np.concatenate([np.zeros(0, np.int64), *of_chunk])[at]
        row, place = expanded(cover.starts[box[pair]], np.diff(cover.starts)[box[pair]])
        ranks = cover.ranks[cover.order[place]]
        has_file = file[row] >= 0
        self._open(ranks[has_file], file[row][has_file])
        if not has_file.all():
            for number in np.flatnonzero((files[:, used] < 0).any(axis=1)).tolist():
                self.placeless[tensors[number].fqn] = np.unique(ranks[~has_file]).tolist()

    def _places_of(self, tensor: StoredTensor) -> tuple[list[int], list[int]]:
        """Return the number of the file of each chunk, -1 for none, and the record's length."""
        if tensor.fqn not in self._places:
            chunks = tensor.chunks
            files = [-1 if one.file is None else self._numbers[one.file] for one in chunks]
            self._places[tensor.fqn] = files, [one.nbytes for one in chunks]
        return self._places[tensor.fqn]


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
    found = segments(shape, offsets=start, lengths=sizes, itemsize=itemsize, gap=cheap_gap)
    return found.total_nbytes
