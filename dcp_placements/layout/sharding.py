"""The idea: where each element of a rank's local tensor lies in the whole tensor.

A whole tensor is cut one mesh axis after the other. Per tensor dim we keep an ordered list of
intervals of the whole, at first ``[(0, size)]``; every cut of that dim keeps this coordinate's part
of the concatenated list. The product of the remaining lists is the set of chunks, each a box of the
local tensor and the equal box of the whole tensor.

A flat cut, always the last, divides what is left in C order, element by element. A range of it is
the end of a row, whole rows and the beginning of a row, in each dim: at most ``2n - 1`` boxes.

Only integers here, no torch and no process group, so the layout of any rank of any world can be
computed anywhere, and it can be tested against plain slicing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, product
from math import prod
from operator import add, mul, sub
from typing import NamedTuple, Never

from dcp_placements.errors import CannotPlace

Interval = tuple[int, int]
"""``(start, stop)`` in elements of the whole tensor's dim, ``start < stop``."""

Intervals = tuple[Interval, ...]


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
    """One box of a shard, in local and in global coordinates, in elements.

    Row 1 of a ``(4, 3)`` tensor, on a rank that holds the elements 2 to 9 of it, flattened::

        Chunk((1,), (1, 0), (1, 3), strides=(3, 1))
    """

    local_offsets: tuple[int, ...]  # its start in the rank's local tensor
    offsets: tuple[int, ...]  # its start in the checkpoint's tensor
    sizes: tuple[int, ...]  # the same in both
    row: int = 0  # which of ``Placed.rows`` holds it; 0 where the local tensor is one
    strides: tuple[int, ...] | None = None  # in a local tensor that is 1-d, a range; else None

    @property
    def box(self) -> Box:
        """The box in the checkpoint's tensor."""
        return Box(self.offsets, self.sizes)


class Kind(StrEnum):
    """How a cut splits its dim; the record of a save has the values.

    Code that treats kinds differently names each of them and ends in ``unknown_kind``, so that mypy
    shows every place where a new kind is not handled, and no place takes it for another kind.
    """

    PLAIN = "plain"
    """As ``torch.chunk`` does."""
    FUSED = "fused"
    """Several logical tensors are joined along the dim, and each is cut on its own."""
    STRIDED = "strided"
    """Each of the shards that later cuts make is cut on its own (torch's ``_StridedShard``)."""
    RAGGED = "ragged"
    """Into contiguous shards of declared sizes, one per rank of the axis."""
    FLAT = "flat"
    """The flattened tensor into ranges of declared sizes: a cut of no single dim, and the last."""
    LISTED = "rows"
    """Each rank lists the rows that it holds."""

    @classmethod
    def _missing_(cls, value: object) -> Never:
        raise _unknown_kind(value)  # the record of a later version may have one


def unknown_kind(kind: Never) -> CannotPlace:
    """Return the refusal of a cut whose kind is not handled at some place."""
    return _unknown_kind(kind)


def _unknown_kind(value: object) -> CannotPlace:
    return CannotPlace(f"a cut of kind {value!s:.40} is not supported here")


class FusedPart(NamedTuple):
    """Which part of a fused tensor a tensor is. ``up`` of gate and up, joined once, is::

        FusedPart(1, (1, 1), 1)

    Attributes:
        number: The part's index among the parts.
        sizes: The sizes of the parts, relative to each other.
        groups: The number of times that the sequence of parts repeats.
    """

    number: int
    sizes: tuple[int, ...]
    groups: int


class Cut(NamedTuple):
    """One mesh axis cuts one tensor dim, as it was declared; an axis of size 1, too.

    Expert weights as ``{"ep": Shard(0)}`` over two ranks have ``Cut(0, "ep", 2)``. A cut is the
    same on every rank: where a rank stands, and which rows it lists, is its ``Position``.

    Attributes:
        dim: Tensor dim, from 0; -1 where this tensor is a row of the one that is cut, along the dim
            of the rows: ranks along the axis hold other rows. None for a flat cut.
        axis: Name of the mesh axis; None where it has none, as the rows of a stack.
        size: Number of ranks along it.
        kind: How it cuts.
        parts: The parts inside of which a fused or strided cut cuts: their number (split as by
            ``torch.chunk``) or their sizes. The sizes of the shards of a ragged cut, or of the
            ranges of a flat one, one per rank of the axis. 1 for any other kind.
        of: The part of the fused tensor that this tensor is, where the cut is that of the fused
            tensor; else None.
        by_rule: Whether a rule declares it. A rule may be wrong; a DTensor's own cut is not.
        copies: For each part of a fused cut, the number of neighbouring ranks that have each of its
            shards; empty where each rank has one of its own.
    """

    dim: int | None
    axis: str | None
    size: int
    kind: Kind = Kind.PLAIN
    parts: int | tuple[int, ...] = 1
    of: FusedPart | None = None
    by_rule: bool = False
    copies: tuple[int, ...] = ()

    @property
    def is_of_rows(self) -> bool:
        """Whether it cuts the dim of the rows of which this tensor is one."""
        return self.dim is not None and self.dim < 0

    @property
    def placement(self) -> str:
        """The placement as a user would declare it."""
        dim = "dim of the rows" if self.is_of_rows else self.dim
        match self.kind:
            case Kind.PLAIN:
                return f"Shard({dim})"
            case Kind.FUSED:
                copies = f", copies={self.copies}" if self.copies else ""
                return f"FusedShard({dim}, {self.parts}{copies})"
            case Kind.STRIDED:
                return f"_StridedShard({dim}, split_factor={self.parts})"
            case Kind.RAGGED:
                return f"RaggedShard({dim}, {format_sizes(self.parts)})"
            case Kind.FLAT:
                return f"FlatShard({'' if self.parts == 1 else format_sizes(self.parts)})"
            case Kind.LISTED:
                rows = "one tensor per row" if self.is_of_rows else f"rows of dim {dim}"
                return f"{rows}, each rank its own"
            case _:
                raise unknown_kind(self.kind)

    def __str__(self) -> str:
        if self.kind is Kind.LISTED and not self.is_of_rows:
            return self.placement
        axis = "an axis" if self.axis is None else repr(self.axis)
        whole = "" if self.of is None else " of the fused tensor"
        return f"{self.placement}{whole} over {axis} of size {self.size}"


Cuts = tuple[Cut, ...]
"""The cuts of a tensor, in the order in which they apply."""

Position = int | tuple[int, ...]
"""Where a rank stands along the axis of a cut; for a listed cut, the rows that it lists, as indices
into the rows that earlier cuts of the dim leave."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a whole tensor is cut, the same for all ranks.

    Expert weights over two ep ranks::

        Sharding((4, 3), (Cut(0, "ep", 2),))

    Attributes:
        global_shape: Shape of the checkpoint's tensor.
        cuts: The cuts, in the order in which they apply. The checkpoint's placements come first,
            the tensor's own (FSDP) last, because FSDP cuts the model-parallel part.
        padded_shape: The shape that was cut, where it is larger than ``global_shape``.
    """

    global_shape: tuple[int, ...]
    cuts: Cuts = ()
    padded_shape: tuple[int, ...] | None = None

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The shape that the cuts apply to."""
        return self.global_shape if self.padded_shape is None else self.padded_shape

    def shard(self, positions: Sequence[Position]) -> tuple[tuple[int, ...], tuple[Chunk, ...]]:
        """Return the local shape and the chunks of a rank, by its position along each cut's axis.

        The local shape includes padding. The chunks are in C order of the local tensor; empty ones
        and padding are left out. A range of the flattened tensor is a local tensor of one dim. A
        ``(5, 3)`` tensor cut on dim 0 by both axes of mesh ``(dp=2, tp=2)``::

            positions    rows
            (0, 0)       0 1
            (0, 1)           2
            (1, 0)             3
            (1, 1)               4

        Raises:
            CannotPlace: A cut does not fit the rows that are left.
        """
        dims = [self.dim_at(dim, positions) for dim in range(len(self.global_shape))]
        chunks = []
        for by_dim in product(*map(dim_intervals, dims, self.global_shape)):
            local_offsets, offsets, sizes = zip(*by_dim, strict=True) if by_dim else ((), (), ())
            chunks.append(Chunk(local_offsets, offsets, sizes))
        local_shape = tuple([sum([stop - start for start, stop in held]) for held in dims])
        if any(cut.kind is Kind.FLAT for cut in self.cuts):
            start, stop = self._flat_range(prod(local_shape), positions)
            return (stop - start,), tuple(flat_chunks(local_shape, chunks, start, stop))
        return local_shape, tuple(chunks)

    def _flat_range(self, numel: int, positions: Sequence[Position]) -> tuple[int, int]:
        """Return the range that the flat cut leaves of ``numel`` elements, at some positions.

        Raises:
            CannotPlace: It is not the last cut, or its sizes do not add up to ``numel``.
        """
        numbers = [number for number, cut in enumerate(self.cuts) if cut.kind is Kind.FLAT]
        cut, position = self.cuts[numbers[0]], positions[numbers[0]]
        if len(self.cuts) > numbers[0] + 1:
            raise not_last(str(cut), str(self.cuts[numbers[0] + 1]))
        assert isinstance(position, int)
        assert isinstance(cut.parts, tuple)
        check_sizes(cut.parts, cut.axis, cut.size, "FlatShard")
        if (total := sum(cut.parts)) != numel:
            before = format_cuts(self.cuts[:-1]) if numbers[0] else ""
            left = f", which {before} leaves" if before else ""
            raise CannotPlace(
                f"the sizes {format_sizes(cut.parts)} of FlatShard add up to {total}, but {numel} "
                f"elements are being divided there: those of a {self.cut_shape} tensor{left}"
            )
        start = sum(cut.parts[:position])
        return start, start + cut.parts[position]

    def dim_at(self, dim: int, positions: Sequence[Position]) -> Intervals:
        """Return the intervals that a rank holds of one dim, in local order, padding included."""
        size = (self.padded_shape or self.global_shape)[dim]
        intervals: Intervals = ((0, size),) if size else ()
        for cut, position in zip(self.cuts, positions, strict=True):
            if cut.dim == dim:
                intervals = cut_intervals(intervals, cut, position)
        return intervals

    def positions(self) -> Iterator[tuple[int, ...]]:
        """Yield the positions of all ranks, those of the last cut fastest; no rows are listed."""
        return product(*[range(cut.size) for cut in self.cuts])


def flat_chunks(
    shape: tuple[int, ...], chunks: Iterable[Chunk], start: int, stop: int
) -> Iterator[Chunk]:
    """Yield the chunks of a range of a flattened part of a tensor, in local order.

    The elements 2 to 5 of a part of ``(4, 3)``, which is rows 4 to 7 of the whole:

    >>> for chunk in flat_chunks((4, 3), [Chunk((0, 0), (4, 0), (4, 3))], 2, 6):
    ...     print(chunk.local_offsets, chunk.offsets, chunk.sizes, chunk.strides)
    (0,) (4, 2) (1, 1) (3, 1)
    (1,) (5, 0) (1, 3) (3, 1)

    Args:
        shape: The shape of the part, padding included.
        chunks: The chunks of the part, if it had not been flattened; padding has none.
        start: The first element of the range.
        stop: The end of the range.
    """
    strides = tuple([prod(shape[dim + 1 :]) for dim in range(len(shape))])
    of_part = list(chunks)
    for offsets, sizes in range_boxes(shape, start, stop):
        for chunk in of_part:
            starts = tuple(map(max, offsets, chunk.local_offsets))
            ends = map(min, map(add, offsets, sizes), map(add, chunk.local_offsets, chunk.sizes))
            shared = tuple(map(sub, ends, starts))
            if min(shared, default=1) > 0:
                inside = map(sub, starts, chunk.local_offsets)
                first = sum(map(mul, starts, strides)) - start
                box = tuple(map(add, chunk.offsets, inside)), shared
                yield Chunk((first,), *box, strides=strides)


def range_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a range of the elements of a tensor in C order, in that order.

    >>> [*range_boxes((4, 3), 2, 10)]  # doctest: +NORMALIZE_WHITESPACE
    [Box(offsets=(0, 2), sizes=(1, 1)), Box(offsets=(1, 0), sizes=(2, 3)),
     Box(offsets=(3, 0), sizes=(1, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # the range is within a row
        ends = [(last, start - last * row, stop - last * row)]
    else:
        ends = [(first - 1, start - (first - 1) * row, row), (last, 0, stop - last * row)]
    for number, (index, low, high) in enumerate(ends):
        if number and first < last:
            yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
        if low < row:
            for offsets, sizes in range_boxes(shape[1:], low, high):
                yield Box((index, *offsets), (1, *sizes))


def dim_intervals(intervals: Intervals, size: int) -> list[tuple[int, int, int]]:
    """Return ``(start in the local tensor, start in the whole, length)`` of each stored interval.

    Rows 0, 1, 3 and 4, of which the last is padding:

    >>> dim_intervals(((0, 2), (3, 5)), size=4)
    [(0, 0, 2), (2, 3, 1)]

    Args:
        intervals: The intervals that a coordinate holds of the dim, in local order.
        size: The size of the dim in the checkpoint; rows beyond it are padding.
    """
    stored = []
    local_offset = 0
    for start, stop in intervals:
        length = min(stop, size) - start
        if length > 0:
            stored.append((local_offset, start, length))
        local_offset += stop - start
    return stored


def cut_intervals(intervals: Intervals, cut: Cut, position: Position) -> Intervals:
    """Return what a cut leaves of the concatenated ``intervals`` of its dim, at one position.

    A plain cut splits as ``torch.chunk`` does, into ``ceil(total / ranks)`` rows each, so the last
    shard may be short or empty. With ``parts`` each part is split so; torch's
    ``_StridedShard(dim, split_factor=k)`` is ``parts=k``. Ten rows over two ranks, position 1::

        parts=1                     rows 5 6 7 8 9
        parts=2                     rows 3 4 8 9
        parts=(6, 2, 2)             rows 3 4 5 7 9

    A ragged cut splits into shards of ``parts`` rows, of which one position has one: ``(6, 4)``
    leaves rows 6 7 8 9 there.

    Listed rows stand in the order of the list. Each stays an interval of its own, so that a row has
    the same box on every rank that holds it, whichever rows are adjacent.

    The ranges that a cut keeps are counted in the concatenated rows, then looked up. Position 1 of
    a plain cut over two ranks keeps rows 4 .. 7 of the eight rows of two intervals:

    >>> cut_intervals(((0, 6), (12, 14)), Cut(0, "tp", 2), 1)
    ((4, 6), (12, 14))

    Raises:
        CannotPlace: The sizes of the parts or shards do not add up to the number of rows, shards
            are not as many as ranks, or a listed row is beyond the rows.
    """
    total = sum([stop - start for start, stop in intervals])
    ranges: list[Interval] = []  # what is kept, in rows of the concatenated intervals
    match cut.kind:
        case Kind.LISTED:
            assert not isinstance(position, int)
            for index in position:
                if not 0 <= index < total:
                    headline = f"index {index} of IndexShard is outside the {total} rows of its dim"
                    raise CannotPlace(headline)
                ranges.append((index, index + 1))
        case Kind.RAGGED:
            assert isinstance(position, int)
            assert isinstance(cut.parts, tuple)
            check_sizes(cut.parts, cut.axis, cut.size, "RaggedShard", rows=total)
            first = sum(cut.parts[:position])
            ranges.append((first, first + cut.parts[position]))
        case Kind.FLAT:
            raise CannotPlace(f"{cut} divides no single dim")
        case Kind.PLAIN | Kind.FUSED | Kind.STRIDED:
            assert isinstance(position, int)
            first = 0
            sizes = [total] if cut.parts == 1 else part_sizes(cut.parts, total)
            for number, size in enumerate(sizes):
                copies = cut.copies[number] if cut.copies else 1
                if cut.size % copies:
                    raise CannotPlace(
                        f"{copies} copies of part {number} of {cut} do not divide its ranks"
                    )
                step = -(-size * copies // cut.size)
                low = min(position // copies * step, size)
                ranges.append((first + low, first + min(low + step, size)))
                first += size
        case _:
            raise unknown_kind(cut.kind)
    # Adjacent ranges of one interval are one. Rows, and shards that several ranks have, stay boxes
    # of their own, whichever are adjacent on some of these ranks.
    merges = cut.kind is not Kind.LISTED and not cut.copies
    kept: list[Interval] = []
    for low, high in ranges:
        passed = 0  # rows of the intervals before this one
        for first, last in intervals:
            start, stop = first + max(low - passed, 0), min(first + high - passed, last)
            if merges and kept and kept[-1][1] == start and first < start < stop:
                kept[-1] = kept[-1][0], stop
            elif start < stop:
                kept.append((start, stop))
            passed += last - first
    return tuple(kept)


def not_last(flat: str, after: str) -> CannotPlace:
    """Return the refusal of a flat cut that another cut comes after; both are given as text."""
    return CannotPlace(
        f"{flat} divides the flattened tensor and is its last cut, but {after} comes after it",
        "likely:      the axes of the rule's mesh in another order than that of the cuts: tp, ep "
        "and pp cut first, and what they leave is flattened",
        'way out:     a mesh for this rule whose last axis it is, as MeshCoordinate(("tp", "dp"), '
        "(tp ranks, dp ranks), (tp rank, dp rank)) in place of (dp, tp)",
    )


def check_sizes(
    sizes: tuple[int, ...],
    axis: str | None,
    count: int,
    placement: str,
    *,
    rows: int | None = None,
) -> None:
    """Refuse the sizes of shards that are not one per rank of an axis, or not those of all rows.

    Args:
        sizes: The sizes.
        axis: The name of the axis.
        count: The number of ranks along it.
        placement: The name of the placement's class.
        rows: The number of rows that are cut; None where it is not known, or no rows are cut.

    Raises:
        CannotPlace: There are more sizes, or fewer, than the ``count`` ranks; or they do not add up
            to ``rows``.
    """
    if len(sizes) != count:
        over = "its axis" if axis is None else f"axis {axis!r}"
        raise CannotPlace(
            f"{placement} has {len(sizes)} sizes, {format_sizes(sizes)}, but {over} has "
            f"{count} {'rank' if count == 1 else 'ranks'}",
            "way out:     a size for each rank of the axis, in their order; 0 where it has nothing",
        )
    if rows not in (None, sum(sizes)):
        raise CannotPlace(
            f"the sizes {format_sizes(sizes)} of {placement} add up to {sum(sizes)}, but {rows} "
            "rows are being cut there"
        )


def part_sizes(parts: int | tuple[int, ...], total: int) -> list[int]:
    """Return the sizes of the parts of ``total`` rows; parts without a row at the end are left out.

    >>> part_sizes(2, 5), part_sizes((4, 1, 1), 6), part_sizes(9, 2)
    ([3, 2], [4, 1, 1], [1, 1])
    """
    if isinstance(parts, int):
        step = -(-total // parts)
        return [max(0, min(step, total - start * step)) for start in range(min(parts, total))]
    if sum(parts) != total:
        raise CannotPlace(
            f"parts {parts} add up to {sum(parts)}, but {total} rows are being cut there"
        )
    return list(parts)


def declared_sizes(cuts: Sequence[Cut]) -> str | None:
    """Return as text the cuts on whose sizes ranks have to agree; None without any."""
    sized = [cut for cut in cuts if cut.kind in (Kind.RAGGED, Kind.FLAT)]
    return format_cuts(sized) if sized else None


def sizes_differ(of_ranks: Iterable[Cuts]) -> bool:
    """Whether ranks declare other sizes of shards or ranges than each other.

    Parts that are left by other cuts may have another number of elements on other ranks, so ranges
    are compared where their sizes add up to the same.
    """
    first: dict[int | None, Cuts] = {}
    for cuts in of_ranks:
        for kind in (Kind.RAGGED, Kind.FLAT):
            sized = tuple([cut for cut in cuts if cut.kind is kind])
            totals = [sum(cut.parts) for cut in sized if isinstance(cut.parts, tuple)]
            key = totals[0] if kind is Kind.FLAT and totals else None
            if sized and first.setdefault(key, sized) != sized:
                return True
    return False


def format_sizes(sizes: int | tuple[int, ...]) -> str:
    """Return sizes as Python, many of them with equal ones counted.

    >>> format_sizes((5, 3, 0, 2)), format_sizes((8, *[4] * 30, 1, 2))
    ('(5, 3, 0, 2)', '(8, *[4] * 30, 1, 2)')
    """
    if isinstance(sizes, int) or len(sizes) <= _LISTED_SIZES:
        return str(sizes)
    texts = []
    for size, equal in groupby(sizes):
        count = len([*equal])
        texts += [f"*[{size}] * {count}"] if count > 2 else [str(size)] * count
    return f"({', '.join(texts)}{',' * (len(texts) == 1)})"


_LISTED_SIZES = 16
"""The most sizes that a message lists one by one."""


def format_cuts(cuts: Sequence[Cut]) -> str:
    """Return cuts as text, in their order."""
    return ", then ".join(map(str, cuts)) or "whole, cut by no axis"
