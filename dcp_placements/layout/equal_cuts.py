"""When two declarations of the cuts of one dim are one.

Several declarations leave the same rows at every coordinate: torch declares FSDP over shards of
``tp`` as a ``_StridedShard`` that stands first, a rule as a plain cut that stands last. Both are
brought into one form, of plain and fused cuts, in which kinds, parts and the order of the axes are
compared. An axis may have another size on each side: what is equal cuts alike for any size. So an
axis of size 1 counts where a rule declares it, and it cuts on the other side; one that no rule
declares is left alone.

The parts of a fused tensor may be tensors of their own on one side; their cuts follow from those of
the fused tensor. Of ``up``, the second half of a tensor of 8 rows::

    FusedShard(0, 2) over tp=2      Shard(0) over tp=2
    Shard(0) over tp=2              none: the half is on one of the two ranks

Only integers here, no messages, so that all of it is tested against plain slicing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from dcp_placements.errors import CannotPlace
from dcp_placements.layout.sharding import Cut, Cuts, Kind, part_sizes, unknown_kind


class Difference(NamedTuple):
    """Cuts of one dim over the same axes in which two declarations differ.

    Of one axis another kind or other parts; of several axes their order, as each side has it::

        Difference((Cut(0, "tp", 2),), (Cut(0, "tp", 2, Kind.FUSED, 2),))

    Attributes:
        first: As the first declaration has them.
        second: As the second has them.
    """

    first: Cuts
    second: Cuts


def canonical(cuts: Sequence[Cut]) -> list[Cut]:
    """Return the cuts of one dim as plain, fused and listed ones.

    ``_StridedShard(dim, split_factor=k)`` before plain cuts into ``k`` pieces is a plain cut after
    them, and after the axes of size 1 that follow, where the pieces are of one size. Otherwise it
    is a fused cut of ``k`` parts.

    Raises:
        CannotPlace: A kind that is not known.
    """
    ordered: list[Cut] = []
    for cut in reversed(cuts):
        at = 0
        match cut.kind:
            case Kind.STRIDED:
                assert isinstance(cut.parts, int)
                pieces = 1
                for after in ordered:
                    if after.kind is not Kind.PLAIN or cut.parts % (pieces * after.size):
                        break
                    pieces, at = pieces * after.size, at + 1
                if pieces == cut.parts:
                    cut = cut._replace(kind=Kind.PLAIN, parts=1)
                else:
                    cut, at = cut._replace(kind=Kind.FUSED), 0
            case Kind.FUSED:
                if cut.parts == 1 or (isinstance(cut.parts, tuple) and len(cut.parts) == 1):
                    cut = cut._replace(kind=Kind.PLAIN, parts=1)
            case Kind.PLAIN | Kind.LISTED:
                pass
            case _:
                raise unknown_kind(cut.kind)
        ordered.insert(at, cut)
    return ordered


def cuts_of_part(cuts: Sequence[Cut], size: int) -> list[Cut]:
    """Return how a part of a fused tensor is cut where axes cut that; the first that are known.

    Tensors that are joined by ``FusedShard`` are each cut plainly, and so are those of groups that
    an axis leaves whole.

    Args:
        cuts: Of one dim, in their canonical form, with ``Cut.of``.
        size: Of the part, along it.

    Raises:
        CannotPlace: A kind of cut for which this is not known.
    """
    known: list[Cut] = []
    of = cuts[0].of
    if of is None:
        return [*cuts]
    unit, groups = sum(of.sizes), of.groups
    start = sum(of.sizes[: of.number])
    stop = start + of.sizes[of.number]
    whole = size // of.sizes[of.number] * unit
    for cut in cuts:
        parts: tuple[int, ...] = ()
        match cut.kind:
            case Kind.FUSED:
                fused = part_sizes(cut.parts, whole) if isinstance(cut.parts, int) else cut.parts
                total, ends = sum(fused), [*accumulate(fused)]
                # In units of the groups, those that lie in this part of one of them.
                for rows, end in zip(fused, ends, strict=True):
                    low, high = (end - rows) * unit * groups, end * unit * groups
                    group = low // (unit * total)
                    first, last = group * unit + start, group * unit + stop
                    if first * total <= low and high <= last * total:
                        parts += (rows,)
                if sum(parts) * unit != total * (stop - start):
                    return known
            case Kind.PLAIN:
                if groups % cut.size:
                    return known
                groups //= cut.size
            case Kind.STRIDED | Kind.LISTED:
                raise CannotPlace(f"how {cut} cuts the parts of a fused tensor is not known")
            case _:
                raise unknown_kind(cut.kind)
        kind = Kind.FUSED if len(parts) > 1 else Kind.PLAIN
        known.append(cut._replace(kind=kind, parts=parts if len(parts) > 1 else 1, of=None))
    return known


def differences(first: Sequence[Cut], second: Sequence[Cut], size: int) -> Iterator[Difference]:
    """Yield the cuts of one dim, over axes that both sides declare, that are not one declaration.

    Args:
        first: Of one dim, in their canonical form.
        second: Those of the other side.
        size: Of the dim, without padding.
    """
    one, other = declared(first), declared(second)
    common = [axis for axis in one if axis in other]
    differing = []
    for axis in common:
        cuts = one[axis], other[axis]
        is_same = same_parts(_parts(one[axis]), _parts(other[axis]), size)
        if not is_same and _has_effect([cuts[:1], cuts[1:]], 1):
            differing.append(axis)
            yield Difference(cuts[:1], cuts[1:])
    if differing:
        return
    # The place of an axis of size 1 is what a rule says, and none where a DTensor has it.
    cutting = [axis for axis in common if min(one[axis].size, other[axis].size) > 1]
    ruled = [axis for axis in common if one[axis].by_rule and other[axis].by_rule]
    for axes in (cutting, ruled):
        reordered = [axis for axis in other if axis in axes]
        sides = tuple([one[axis] for axis in axes]), tuple([other[axis] for axis in reordered])
        if axes != reordered and _has_effect(sides, 2):
            yield Difference(*sides)
            return


def declared(cuts: Sequence[Cut]) -> dict[str, Cut]:
    """Return by axis the cuts that cut something, or that a rule declares."""
    return {cut.axis: cut for cut in cuts if cut.axis is not None and (cut.size > 1 or cut.by_rule)}


def _has_effect(sides: Sequence[Cuts], count: int) -> bool:
    """Whether on some side at least ``count`` of the axes cut: else no row depends on them."""
    return any(sum([cut.size > 1 for cut in cuts]) >= count for cuts in sides)


def _parts(cut: Cut) -> int | tuple[int, ...]:
    """Return the parts inside of which a cut in its canonical form cuts."""
    match cut.kind:
        case Kind.PLAIN | Kind.FUSED:
            return cut.parts
        case Kind.STRIDED | Kind.LISTED:
            raise CannotPlace(f"{cut} is compared by the rows of its ranks, not as a declaration")
        case _:
            raise unknown_kind(cut.kind)


def same_parts(one: int | tuple[int, ...], other: int | tuple[int, ...], size: int) -> bool:
    """Whether two declarations give the same parts of a dim, which may be padded or cut before.

    >>> same_parts(2, (8, 8), 16), same_parts((4, 2, 2), (2, 1, 1), 8), same_parts(2, 3, 6)
    (True, True, False)
    """
    total = next((sum(parts) for parts in (one, other) if not isinstance(parts, int)), size)
    first, second = (part_sizes(p, total) if isinstance(p, int) else [*p] for p in (one, other))
    if len(first) != len(second):
        return False
    a, b = sum(first), sum(second)
    in_proportion = all(x * b == y * a for x, y in zip(first, second, strict=True))
    # Where the parts end in the dim, without the padding behind it.
    ends = [[min(end, size) for end in accumulate(parts)] for parts in (first, second)]
    return in_proportion or ends[0] == ends[1]
