"""When two declarations of the cuts of one dim are one.

Several declarations leave the same rows at every coordinate: torch declares FSDP over shards of
``tp`` as a ``_StridedShard`` that stands first, a rule as a plain cut that stands last. Both are
brought into one form, of plain and fused cuts, in which kinds, parts and the order of the axes are
compared. An axis may have another size on each side: what is equal cuts alike for any size.

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
    them, where the pieces are of one size. Otherwise it is a fused cut of ``k`` parts.

    Raises:
        CannotPlace: A kind that is not known.
    """
    ordered: list[Cut] = []
    for cut in reversed(cuts):
        at = 0
        match cut.kind:
            case Kind.STRIDED:
                pieces = 1
                while pieces != cut.parts and at < len(ordered) and ordered[at].kind is Kind.PLAIN:
                    pieces *= ordered[at].size
                    at += 1
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
    """Yield the cuts of one dim, over axes that both sides have, that are not one declaration.

    Args:
        first: Of one dim, in their canonical form.
        second: Those of the other side.
        size: Of the dim, without padding.
    """
    one = {cut.axis: cut for cut in first if cut.axis is not None}
    other = {cut.axis: cut for cut in second if cut.axis is not None}
    common = [axis for axis in one if axis in other]
    differing = [axis for axis in common if not _may_be_equal(one[axis], other[axis], size)]
    for axis in differing:
        yield Difference((one[axis],), (other[axis],))
    # An axis of size 1 cuts nothing, so its place in the order does not matter.
    cutting = {axis for axis in common if one[axis].size > 1 and other[axis].size > 1}
    ours, theirs = (
        tuple([cut for axis, cut in side.items() if axis in cutting]) for side in (one, other)
    )
    if [cut.axis for cut in ours] != [cut.axis for cut in theirs] and not differing:
        yield Difference(ours, theirs)


def _may_be_equal(one: Cut, other: Cut, size: int) -> bool:
    """Whether two cuts by axes of one name may be the same declaration."""
    first, second = _parts(one), _parts(other)
    if one.kind != other.kind:
        plain = one if one.kind is Kind.PLAIN else other
        return plain.size == 1  # a whole tensor
    return same_parts(first, second, size)


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
