"""When two declarations of the cuts of one dim are equal.

Several declarations leave the same rows at every coordinate: torch declares FSDP over shards of
``tp`` as a ``_StridedShard`` that stands first, a rule as a plain cut that stands last. Both are
brought into one form, of plain and fused cuts, in which kinds, parts and the order of the axes are
compared.

An axis may have another size on each side: equal declarations cut equally for any size. So an axis
of size 1 counts where a rule declares it, and it cuts on the other side; one that no rule declares
is left alone. For the same reason a ragged cut equals a plain one: the shards of both follow each
other in the order of the ranks, and where they end is no more than another topology.

The parts of a fused tensor may be tensors of their own on one side; their cuts follow from those of
the fused tensor. ``up``, the second half of a tensor of 8 rows, is cut so::

    FusedShard(0, 2) over tp=2      Shard(0) over tp=2
    Shard(0) over tp=2              none: the half is on one of the two ranks

Only integers here, no messages, so that all of it is tested against plain slicing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from math import floor, prod
from typing import NamedTuple

from dcp_placements.errors import CannotPlace
from dcp_placements.layout.sharding import (
    Cut,
    Cuts,
    FusedPart,
    Kind,
    part_sizes,
    unknown_kind,
)


class Difference(NamedTuple):
    """Cuts of one dim over the same axes in which two declarations differ.

    Over one axis the kinds or the parts differ, over several axes their order::

        Difference((Cut(0, "tp", 2),), (Cut(0, "tp", 2, Kind.FUSED, 2),))

    Attributes:
        first: The cuts of the first declaration.
        second: The cuts of the second.
    """

    first: Cuts
    second: Cuts


def canonical(cuts: Sequence[Cut]) -> list[Cut]:
    """Return the cuts of one dim as plain, ragged, fused and listed ones.

    ``_StridedShard(dim, split_factor=k)`` before plain cuts into ``k`` equal shards is a plain cut
    after them, and after the axes of size 1 that follow. Otherwise it is a fused cut of ``k``
    parts. FSDP over shards of ``tp=2``, as torch declares it::

        _StridedShard(0, split_factor=2) over fsdp, Shard(0) over tp
        -> Shard(0) over tp, Shard(0) over fsdp

    Raises:
        CannotPlace: A cut has a kind that is not known.
    """
    ordered: list[Cut] = []
    for cut in reversed(cuts):
        index = 0  # of the cut among the later ones
        match cut.kind:
            case Kind.STRIDED:
                assert isinstance(cut.parts, int)
                shards = 1
                for after in ordered:
                    if after.kind is not Kind.PLAIN or cut.parts % (shards * after.size):
                        break
                    shards, index = shards * after.size, index + 1
                if shards == cut.parts:
                    cut = cut._replace(kind=Kind.PLAIN, parts=1)
                else:
                    cut, index = cut._replace(kind=Kind.FUSED), 0
            case Kind.FUSED:
                cut = cut._replace(copies=())  # on how many ranks a shard is, is of a topology
                if cut.parts == 1 or (isinstance(cut.parts, tuple) and len(cut.parts) == 1):
                    cut = cut._replace(kind=Kind.PLAIN, parts=1)
            case Kind.PLAIN | Kind.RAGGED | Kind.LISTED:
                pass
            case Kind.FLAT:
                raise CannotPlace(f"{cut} is no cut of one dim")
            case _:
                raise unknown_kind(cut.kind)
        ordered.insert(index, cut)
    return ordered


def cuts_of_part(cuts: Sequence[Cut], size: int) -> list[Cut]:
    """Return the cuts of a part of a fused tensor, which follow from those of the fused tensor.

    ``FusedShard`` cuts each of its own parts plainly. So it cuts ``up``, the rows 8 to 16 of
    [gate, up], where some of its parts are exactly these rows::

        FusedShard(0, 2)           [0:8] [8:16]                up: Shard(0)
        FusedShard(0, 4)           [0:4] [4:8] [8:12] [12:16]  up: FusedShard(0, (4, 4))
        FusedShard(0, (6, 4, 6))   [0:6] [6:10] [10:16]        not known: [6:10] is of both

    A plain cut that leaves groups whole cuts every part plainly: of q in four groups [q, k, v] over
    two ranks, each rank has two. Any other plain cut, and any ragged one, is not known: ``up`` is
    on one of two ranks.

    Args:
        cuts: The cuts of one dim, in their canonical form, with ``Cut.of``.
        size: The size of the part along it.

    Returns:
        The cuts up to the first that is not known.

    Raises:
        CannotPlace: A kind of cut for which this is not known.
    """
    result: list[Cut] = []
    of = cuts[0].of
    if of is None:
        return [*cuts]
    groups, whole = of.groups, size // of.sizes[of.number] * sum(of.sizes)
    for cut in cuts:
        parts: tuple[int, ...] = (size,)
        match cut.kind:
            case Kind.FUSED:
                fused = part_sizes(cut.parts, whole) if isinstance(cut.parts, int) else cut.parts
                parts = _parts_inside(fused, of, groups)
                if not parts:
                    return result
            case Kind.PLAIN:
                if groups % cut.size:
                    return result
                groups //= cut.size
            case Kind.RAGGED:
                return result
            case Kind.STRIDED | Kind.LISTED | Kind.FLAT:
                raise CannotPlace(f"how {cut} cuts the parts of a fused tensor is not known")
            case _:
                raise unknown_kind(cut.kind)
        if len(parts) > 1:
            result.append(cut._replace(kind=Kind.FUSED, parts=parts, of=None))
        else:
            result.append(cut._replace(kind=Kind.PLAIN, parts=1, of=None))
    return result


def _parts_inside(rows: Sequence[int], of: FusedPart, groups: int) -> tuple[int, ...]:
    """Return the sizes of those parts of a fused cut that are, together, one fused tensor.

    Both divisions of the dim are compared in units of a group, as the sizes of both are relative.
    ``up`` of [gate, up], in one group, under a cut of the parts (4, 4, 4, 4)::

        parts   [0:1/4] [1/4:1/2] [1/2:3/4] [3/4:1]
        up                        [1/2:1]             (4, 4)

    Args:
        rows: The sizes of the parts of the cut.
        of: The tensor's part of the fused tensor.
        groups: The number of times that the sequence of these tensors repeats in the dim.

    Returns:
        The sizes; empty where a part of the cut belongs to several tensors.
    """
    total, group_size = sum(rows), sum(of.sizes)
    if not total:
        return ()
    first = Fraction(sum(of.sizes[: of.number]), group_size)
    share = Fraction(of.sizes[of.number], group_size)
    inside = []
    for size, end in zip(rows, accumulate(rows), strict=True):
        start, stop = Fraction((end - size) * groups, total), Fraction(end * groups, total)
        group = floor(start)
        if first <= start - group and stop - group <= first + share:
            inside.append(size)
    return tuple(inside) if Fraction(sum(inside), total) == share else ()


def differences(first: Sequence[Cut], second: Sequence[Cut], size: int) -> Iterator[Difference]:
    """Yield the cuts of one dim, over axes that both sides declare, that differ.

    Args:
        first: The cuts of one dim by one declaration, in their canonical form.
        second: The cuts by the other.
        size: The size of the dim, without padding.
    """
    by_first, by_second = declared(first), declared(second)
    common = [axis for axis in by_first if axis in by_second]
    behind = [
        axis
        for axis in common
        if _leaves_parts(first, by_first[axis], by_second[axis])
        or _leaves_parts(second, by_second[axis], by_first[axis])
    ]
    common = [axis for axis in common if axis not in behind]
    differing = []
    for axis in common:
        sides = Difference((by_first[axis],), (by_second[axis],))
        is_same = same_parts(_parts(by_first[axis]), _parts(by_second[axis]), size)
        if not is_same and _has_effect(sides, 1):
            differing.append(axis)
            yield sides
    if differing:
        return
    # The order counts among axes that cut on both sides. An axis of size 1 has the place that a
    # rule gives it, and none where only a DTensor has it.
    cutting = [axis for axis in common if min(by_first[axis].size, by_second[axis].size) > 1]
    ruled = [axis for axis in common if by_first[axis].by_rule and by_second[axis].by_rule]
    for axes in (cutting, ruled):
        reordered = [axis for axis in by_second if axis in axes]
        in_order = tuple([by_first[axis] for axis in axes])
        sides = Difference(in_order, tuple([by_second[axis] for axis in reordered]))
        if axes != reordered and _has_effect(sides, 2):
            yield sides
            return


def declared(cuts: Sequence[Cut]) -> dict[str, Cut]:
    """Return the cuts that cut something, or that a rule declares, by axis."""
    return {cut.axis: cut for cut in cuts if cut.axis is not None and (cut.size > 1 or cut.by_rule)}


def _has_effect(sides: Difference, count: int) -> bool:
    """Whether at least ``count`` of the axes cut on some side; else no row depends on them."""
    return any(sum([cut.size > 1 for cut in cuts]) >= count for cuts in sides)


def _leaves_parts(cuts: Sequence[Cut], cut: Cut, fused: Cut) -> bool:
    """Whether a plain cut stands behind a DTensor's own of as many shards as a fused one has parts.

    ``_StridedShard(0, split_factor=2)`` over tp leaves the rows of ``FusedShard(0, 2)``. Before
    a DTensor's own ``Shard(0)`` over fsdp=2 it is, canonically, the plain cut behind that; before
    one over fsdp=3 it is the fused cut.

    Args:
        cuts: The cuts of one dim, in their canonical form.
        cut: One of them.
        fused: The cut of the other side.
    """
    before = [each for each in cuts[: cuts.index(cut)] if each.size > 1]
    is_own = all(each.kind is Kind.PLAIN and not each.by_rule for each in before)
    is_plain = is_own and cut.kind is Kind.PLAIN
    return is_plain and fused.kind is Kind.FUSED and fused.parts == prod(c.size for c in before)


def _parts(cut: Cut) -> int | tuple[int, ...]:
    """Return the parts inside of which a cut in its canonical form cuts."""
    match cut.kind:
        case Kind.PLAIN | Kind.FUSED:
            return cut.parts
        case Kind.RAGGED:
            return 1  # one part, as of a plain cut
        case Kind.STRIDED | Kind.LISTED | Kind.FLAT:
            raise CannotPlace(f"{cut} is compared by the rows of its ranks, not as a declaration")
        case _:
            raise unknown_kind(cut.kind)


def same_parts(parts: int | tuple[int, ...], other: int | tuple[int, ...], size: int) -> bool:
    """Whether two declarations give the same parts of a dim, which may be padded or cut before.

    >>> same_parts(2, (8, 8), 16), same_parts((4, 2, 2), (2, 1, 1), 8), same_parts(2, 3, 6)
    (True, True, False)
    """
    if isinstance(parts, int) and isinstance(other, int):
        return parts == other
    total = next(sum(side) for side in (parts, other) if not isinstance(side, int))
    counts = [side if isinstance(side, int) else len(side) for side in (parts, other)]
    if counts[0] != counts[1]:
        return False
    sizes, others = (part_sizes(p, total) if isinstance(p, int) else [*p] for p in (parts, other))
    whole, other_whole = sum(sizes), sum(others)
    if all(n * other_whole == m * whole for n, m in zip(sizes, others, strict=True)):
        return True  # the same proportions
    # Where the parts end in the dim, without the padding behind it.
    ends, other_ends = ([min(end, size) for end in accumulate(of)] for of in (sizes, others))
    return ends == other_ends
