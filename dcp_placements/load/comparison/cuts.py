"""Does a load shard a tensor as the save did: by the same axis, on the same dim, in the same way?

Only axes that both sides declare on one dim are compared, in a canonical form, since several
declarations mean one layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Kind, LayoutError, part_sizes, unknown_kind
from dcp_placements.storage.metadata.record import Cuts, SavedCut


@dataclass(frozen=True, slots=True)
class Difference:
    """A cut that a load declares in another way than the save did.

    Attributes:
        axes: The axes: one, or several in another order.
        saved: How the save declared them, as text.
        loaded: How the load does.
        way_out: What to declare instead.
    """

    axes: tuple[str, ...]
    saved: str
    loaded: str
    way_out: str

    def fault(self, fqn: str, rule: str | None) -> Fault:
        """Return the fault of a key.

        Args:
            fqn: The key.
            rule: The name of the rule that applies; None where none does.
        """
        axes = " and ".join(map(repr, self.axes))
        return Fault(
            fqn,
            f"this load cuts it by {axes} in another way than the save did",
            (
                f"saved:       {self.saved}",
                f"this load:   {self.loaded}",
                f"by rule:     {rule or 'no rule, its own DTensor'}",
                "reason:      other rows of the whole would come to each rank, or in another order",
                f"way out:     {self.way_out}; or waive={{pattern: reason}} where both are right",
            ),
        )


def differences(saved: Cuts, loaded: Cuts, shape: Sequence[int]) -> Iterator[Difference]:
    """Yield the cuts that a load declares in another way than the save did.

    Args:
        saved: The cuts of the save.
        loaded: Those of the load.
        shape: Of the whole tensor.
    """
    if saved == loaded or 0 in shape:
        return
    for dim in sorted({cut.dim for cut in saved} & {cut.dim for cut in loaded}):
        one, other = ([cut for cut in cuts if cut.dim == dim] for cuts in (saved, loaded))
        if not any(cut.kind is Kind.LISTED for cut in (*one, *other)):
            yield from _dim_differences(canonical(one), canonical(other), shape[dim])


def canonical(cuts: Sequence[SavedCut]) -> list[SavedCut]:
    """Return the cuts of one dim as plain and fused ones.

    ``_StridedShard(dim, split_factor=k)`` before plain cuts into ``k`` pieces is a plain cut after
    them: torch declares FSDP over shards of ``tp`` or ``ep`` so.
    """
    ordered: list[SavedCut] = []
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
                if _count(cut.parts) == 1:
                    cut = cut._replace(kind=Kind.PLAIN, parts=1)
            case Kind.PLAIN | Kind.LISTED:
                pass
            case _:
                raise unknown_kind(cut.kind)
        ordered.insert(at, cut)
    return ordered


def _dim_differences(
    saved: Sequence[SavedCut], loaded: Sequence[SavedCut], size: int
) -> Iterator[Difference]:
    one = {cut.axis: cut for cut in saved if cut.axis is not None}
    other = {cut.axis: cut for cut in loaded if cut.axis is not None}
    common = [axis for axis in one if axis in other]
    differing = [axis for axis in common if not _may_be_equal(one[axis], other[axis], size)]
    for axis in differing:
        yield Difference(
            (axis,),
            str(one[axis]),
            str(other[axis]),
            f'{{"{axis}": {one[axis].placement}}} in the rules of this load, as it was saved',
        )
    if differing:
        return
    # An axis of size 1 cuts nothing, so its place in the order does not matter.
    cutting = {axis for axis in common if one[axis].size > 1 and other[axis].size > 1}
    first, second = ([axis for axis in side if axis in cutting] for side in (one, other))
    if first != second:
        yield Difference(
            tuple(sorted(cutting)),
            ", then ".join([str(one[axis]) for axis in first]),
            ", then ".join([str(other[axis]) for axis in second]),
            f"cut by {' before '.join(map(repr, first))}, as it was saved: the axis that cuts "
            "what the others have left is a _StridedShard where it stands left of them in the mesh",
        )


def _count(parts: int | tuple[int, ...]) -> int:
    return parts if isinstance(parts, int) else len(parts)


def _may_be_equal(saved: SavedCut, loaded: SavedCut, size: int) -> bool:
    """Whether two cuts by axes of one name may be the same declaration."""
    if saved.kind != loaded.kind:
        plain = saved if saved.kind is Kind.PLAIN else loaded
        return plain.size == 1  # a whole tensor
    return saved.kind is Kind.PLAIN or _same_parts(saved.parts, loaded.parts, size)


def _same_parts(one: int | tuple[int, ...], other: int | tuple[int, ...], size: int) -> bool:
    """Whether two declarations give the same parts of a dim, which may be padded or cut before.

    >>> _same_parts(2, (8, 8), 16), _same_parts((4, 2, 2), (2, 1, 1), 8), _same_parts(2, 3, 6)
    (True, True, False)
    """
    if one == other:
        return True
    try:
        sizes = [
            part_sizes(parts, size if isinstance(against, int) else sum(against))
            for parts, against in ((one, other), (other, one))
            if isinstance(parts, int)
        ]
    except LayoutError:
        return False
    sizes += [list(parts) for parts in (one, other) if not isinstance(parts, int)]
    first, second = sizes
    if len(first) != len(second):
        return False
    a, b = sum(first), sum(second)
    in_proportion = all(x * b == y * a for x, y in zip(first, second, strict=True))
    return in_proportion or _ends(first, size) == _ends(second, size)


def _ends(sizes: Sequence[int], size: int) -> list[int]:
    """Return where parts end in a dim, without the padding behind it."""
    ends, at = [], 0
    for part in sizes:
        at += part
        ends.append(min(at, size))
    return ends
