"""The idea: where each element of a rank's local tensor lies in the whole tensor.

A whole tensor is cut one mesh axis after the other. Per tensor dim we keep an ordered list of
intervals of the whole, at first ``[(0, size)]``; every cut of that dim keeps this coordinate's part
of the concatenated list. The remaining lists are a *layout*: their product is the set of chunks,
each a box of the local tensor and the equal box of the whole tensor.

Only integers here, no torch and no process group, so the layout of any rank of any world can be
computed anywhere, and it can be tested against plain slicing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import NamedTuple, Never

Interval = tuple[int, int]
"""``(start, stop)`` in elements of the whole tensor's dim, ``start < stop``."""

Intervals = tuple[Interval, ...]


class LayoutError(ValueError):
    """A cut that the size of its dim does not allow; the text has the cut and the numbers."""


class Box(NamedTuple):
    """A rectangle of elements: ``offsets`` and ``sizes``, one int per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements inside; 1 for a scalar."""
        return prod(self.sizes)


class Chunk(NamedTuple):
    """One box of a shard, in local and in global coordinates, in elements."""

    local_offsets: tuple[int, ...]  # its start in the rank's local tensor
    offsets: tuple[int, ...]  # its start in the checkpoint's tensor
    sizes: tuple[int, ...]  # the same in both
    part: int = 0  # which local tensor holds it, where a rank has the rows of a stack one by one

    @property
    def box(self) -> Box:
        """The box in the checkpoint's tensor."""
        return Box(self.offsets, self.sizes)


class Kind(StrEnum):
    """How a cut splits its dim; the record of a save has the values.

    Who treats kinds differently names each of them and ends in ``unknown_kind``, so that mypy shows
    every place where a new kind is not handled, and none of them takes it for another.
    """

    PLAIN = "plain"
    """As ``torch.chunk`` does."""
    FUSED = "fused"
    """Several logical tensors are joined along the dim, and each is cut on its own."""
    STRIDED = "strided"
    """Each of the pieces that later cuts make is cut on its own (torch's ``_StridedShard``)."""
    LISTED = "rows"
    """Each rank lists the rows that it holds."""


def unknown_kind(kind: Never) -> LayoutError:
    """Return the refusal of a cut whose kind is not handled at some place."""
    return LayoutError(f"a cut of kind {kind!s} is not supported here")


class Cut(NamedTuple):
    """One mesh axis cuts one tensor dim, as it was declared; an axis of size 1, too.

    Of expert weights as ``{"ep": Shard(0)}`` over two ranks: ``Cut(0, "ep", 2)``. It is the same on
    every rank: where a rank stands, and which rows it lists, is its ``Position``.

    Attributes:
        dim: Tensor dim, from 0; -1 where it is none of this tensor, which is a row of the one that
            was cut, and ranks along the axis hold other rows.
        axis: Name of the mesh axis; None where it has none, as the rows of a stack.
        size: Ranks along it.
        kind: How it cuts.
        parts: What a fused or strided cut cuts inside of: the number of parts (split as by
            ``torch.chunk``) or their sizes. 1 of any other.
    """

    dim: int
    axis: str | None
    size: int
    kind: Kind = Kind.PLAIN
    parts: int | tuple[int, ...] = 1

    @property
    def placement(self) -> str:
        """Its placement, as its user would declare it."""
        match self.kind:
            case Kind.PLAIN:
                return f"Shard({self.dim})"
            case Kind.FUSED:
                return f"FusedShard({self.dim}, {self.parts})"
            case Kind.STRIDED:
                return f"_StridedShard({self.dim}, split_factor={self.parts})"
            case Kind.LISTED:
                rows = "one tensor per row" if self.dim < 0 else f"rows of dim {self.dim}"
                return f"{rows}, each rank its own"
            case _:
                raise unknown_kind(self.kind)

    def __str__(self) -> str:
        if self.kind is Kind.LISTED and self.dim >= 0:
            return self.placement
        axis = "an axis" if self.axis is None else repr(self.axis)
        return f"{self.placement} over {axis} of size {self.size}"


Cuts = tuple[Cut, ...]
"""In the order in which they apply."""

Position = int | tuple[int, ...]
"""Where a rank stands along the axis of a cut; of a listed cut, the rows that it lists, as indices
into the rows that earlier cuts of the dim leave."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one coordinate's local tensor lies in the checkpoint's tensor.

    Attributes:
        global_shape: Shape of the checkpoint's tensor.
        intervals: Per dim, the intervals of the tensor *that was cut*, in local order. They may
            extend beyond ``global_shape`` if that tensor was padded.
    """

    global_shape: tuple[int, ...]
    intervals: tuple[Intervals, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor, padding included."""
        return tuple([_total(dim) for dim in self.intervals])

    def chunks(self) -> tuple[Chunk, ...]:
        """Return the chunks, in C order of the local tensor; empty ones and padding left out.

        ``Layout((6,), (((0, 2), (3, 5)),))`` holds rows 0, 1, 3 and 4::

            local_offsets   offsets   sizes
            (0,)            (0,)      (2,)
            (2,)            (3,)      (2,)
        """
        per_dim = map(dim_pieces, self.intervals, self.global_shape)
        return tuple([_chunk(pieces) for pieces in itertools.product(*per_dim)])


def dim_pieces(intervals: Intervals, size: int) -> list[tuple[int, int, int]]:
    """Return ``(start in the local tensor, start in the whole, length)`` of what a dim stores.

    Args:
        intervals: Those that a coordinate holds of the dim, in local order.
        size: The size of the dim in the checkpoint; what lies beyond it is padding.
    """
    if len(intervals) == 1 and intervals[0][1] <= size:
        return [(0, intervals[0][0], intervals[0][1] - intervals[0][0])]
    pieces = []
    local_offset = 0
    for start, stop in intervals:
        kept = min(stop, size) - start
        if kept > 0:
            pieces.append((local_offset, start, kept))
        local_offset += stop - start
    return pieces


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a whole tensor is cut, the same for all ranks.

    Of expert weights over two ep ranks::

        Sharding((4, 3), (Cut(0, "ep", 2),))

    Attributes:
        global_shape: Shape of the checkpoint's tensor.
        cuts: In the order in which they apply. The checkpoint's placements come first, the
            tensor's own (FSDP) last, because FSDP cuts the model-parallel part.
        padded_shape: The shape that was cut, where it is larger than ``global_shape``.
    """

    global_shape: tuple[int, ...]
    cuts: Cuts = ()
    padded_shape: tuple[int, ...] | None = None

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The shape that the cuts apply to."""
        return self.global_shape if self.padded_shape is None else self.padded_shape

    @property
    def is_uniform(self) -> bool:
        """Whether the cuts alone tell what a rank at any position holds: no rows are listed."""
        return not any(cut.kind is Kind.LISTED for cut in self.cuts)

    def at(self, positions: Sequence[Position]) -> Layout:
        """Return the layout of a rank by its position along the axis of each cut.

        A ``(5, 3)`` tensor cut on dim 0 by both axes of mesh ``(dp=2, tp=2)``::

            positions    rows
            (0, 0)       0 1
            (0, 1)           2
            (1, 0)             3
            (1, 1)               4

        Raises:
            LayoutError: A cut that does not fit the rows that are left.
        """
        dims = range(len(self.global_shape))
        return Layout(self.global_shape, tuple([self.dim_at(dim, positions) for dim in dims]))

    def dim_at(self, dim: int, positions: Sequence[Position]) -> Intervals:
        """Return the intervals that a rank holds of one dim, padding included."""
        size = self.cut_shape[dim]
        intervals: Intervals = ((0, size),) if size else ()
        for cut, position in zip(self.cuts, positions, strict=True):
            if cut.dim == dim:
                intervals = cut_intervals(intervals, cut, position)
        return intervals

    def positions(self) -> Iterator[tuple[int, ...]]:
        """Yield the positions of all ranks, those of the last cut fastest; no rows are listed."""
        return itertools.product(*[range(cut.size) for cut in self.cuts])


def cut_intervals(intervals: Intervals, cut: Cut, position: Position) -> Intervals:
    """Return what a cut leaves of the concatenated ``intervals`` of its dim, at one position."""
    match cut.kind:
        case Kind.LISTED:
            assert not isinstance(position, int)
            return pick_intervals(intervals, position)
        case Kind.PLAIN | Kind.FUSED | Kind.STRIDED:
            assert isinstance(position, int)
            return shard_intervals(intervals, cut.size, position, cut.parts)
        case _:
            raise unknown_kind(cut.kind)


def shard_intervals(
    intervals: Intervals, ranks: int, coordinate: int, parts: int | tuple[int, ...] = 1
) -> Intervals:
    """Return the part of the concatenated ``intervals`` that one of ``ranks`` coordinates keeps.

    ``torch.chunk`` semantics: pieces of ``ceil(total / ranks)``, so the last may be short or empty.
    With ``parts`` that happens inside each part; ``torch.distributed``'s ``_StridedShard(dim,
    split_factor=k)`` is ``parts=k``.

    Ten rows over two ranks, coordinate 1::

        parts=1                     rows 5 6 7 8 9
        parts=2                     rows 3 4 8 9
        parts=(6, 2, 2)             rows 3 4 5 7 9

    Raises:
        LayoutError: Part sizes that do not add up to the number of rows.
    """
    total = _total(intervals)
    if parts == 1:
        return _slice(intervals, *_piece(total, ranks, coordinate))
    kept: list[Interval] = []
    part_start = 0
    for part_size in part_sizes(parts, total):
        start, stop = _piece(part_size, ranks, coordinate)
        kept += _slice(intervals, part_start + start, part_start + stop)
        part_start += part_size
    return _merged(kept, {start for start, _ in intervals})


def pick_intervals(intervals: Intervals, indices: Sequence[int]) -> Intervals:
    """Return rows ``indices`` of the concatenated ``intervals``, in that order.

    Raises:
        LayoutError: An index beyond the rows of ``intervals``.
    """
    total = _total(intervals)
    kept: list[Interval] = []
    for index in indices:
        if not 0 <= index < total:
            raise LayoutError(f"index {index} of IndexShard is outside the {total} rows of its dim")
        kept += _slice(intervals, index, index + 1)
    # Not merged: a row is one chunk on every rank that holds it, so that replicas have equal boxes
    # whichever rows are adjacent.
    return tuple(kept)


def part_sizes(parts: int | tuple[int, ...], total: int) -> list[int]:
    """Return the sizes of the parts of ``total`` rows.

    >>> part_sizes(2, 5), part_sizes((4, 1, 1), 6)
    ([3, 2], [4, 1, 1])
    """
    if isinstance(parts, int):
        return [stop - start for start, stop in (_piece(total, parts, i) for i in range(parts))]
    if sum(parts) != total:
        raise LayoutError(
            f"parts {parts} add up to {sum(parts)}, but {total} rows are being cut there"
        )
    return list(parts)


def _piece(total: int, ranks: int, coordinate: int) -> Interval:
    step = -(-total // ranks)
    start = min(coordinate * step, total)
    return start, min(start + step, total)


def _slice(intervals: Intervals, start: int, stop: int) -> Intervals:
    if len(intervals) == 1:
        origin = intervals[0][0]
        return ((origin + start, origin + stop),) if start < stop else ()
    kept = []
    position = 0
    for a, b in intervals:
        low = max(start - position, 0)
        high = min(stop - position, b - a)
        if low < high:
            kept.append((a + low, a + high))
        position += b - a
        if position >= stop:
            break
    return tuple(kept)


def _merged(intervals: list[Interval], starts: set[int]) -> Intervals:
    """Join pieces of one interval that are adjacent; listed rows stay one chunk each."""
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start and start not in starts:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _total(intervals: Intervals) -> int:
    if len(intervals) == 1:
        return intervals[0][1] - intervals[0][0]
    return sum([stop - start for start, stop in intervals])


def _chunk(pieces: tuple[tuple[int, int, int], ...]) -> Chunk:
    if not pieces:
        return Chunk((), (), ())
    local_offsets, offsets, sizes = zip(*pieces, strict=True)
    return Chunk(local_offsets, offsets, sizes)
