"""Does a load shard a tensor as the save did: by the same axis, on the same dim, in the same way?

Only axes that both sides declare on one dim are compared, in a canonical form, since several
declarations mean one layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from dcp_placements.bind.binding import Placed
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Cut, Cuts, Kind, part_sizes, unknown_kind
from dcp_placements.storage.metadata.record import SaveRecord


class Difference(NamedTuple):
    """A cut that a load declares in another way than the save did.

    A fused weight that is loaded without its rule::

        Difference(("tp",), "FusedShard(0, 2) over 'tp' of size 2",
                   "Shard(0) over 'tp' of size 2", '{"tp": FusedShard(0, 2)} in the rules ...')

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
                f"way out:     {self.way_out}; or waive={{pattern: reason}} where both are right",
            ),
        )


def differences(saved: Cuts, loaded: Cuts, shape: Sequence[int]) -> Iterator[Difference]:
    """Yield the cuts of equal dims that a load declares in another way than the save did.

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


def differences_by_rule(saved: Cuts, placed: Placed, record: SaveRecord) -> Iterator[Difference]:
    """Yield differences that shapes cannot show, of a tensor that a rule declares.

    Where one axis alone cuts another dim, or has another size, the shape of the local tensor
    proves the rule: a checkpoint is loaded into another topology. What a DTensor says of itself is
    so.

    Args:
        saved: The cuts of the save.
        placed: The tensor.
        record: The checkpoint's.
    """
    loaded = placed.place.sharding.cuts
    one, other = _cutting(saved), _cutting(loaded)
    swapped = [
        axis
        for axis in sorted(one.keys() & other.keys())
        if one[axis].dim != other[axis].dim and min(one[axis].dim, other[axis].dim) >= 0
    ]
    if len(swapped) > 1:
        before, now = (", then ".join(str(of[axis]) for axis in swapped) for of in (one, other))
        yield Difference(tuple(swapped), before, now, "these axes on the dims of the save")
    # Rows of a stack are numbered by names, and a stack may be one tensor in another model.
    is_stacked = any(step.kind == "Stack" for step in record.renames)
    here = {axis.name: axis.size for axis in placed.place.axes}
    for axis, cut in one.items():
        if cut.kind is not Kind.LISTED:
            continue
        if not is_stacked and other.get(axis) == Cut(cut.dim, axis, cut.size):
            rows = f"IndexShard({cut.dim}, this rank's rows)"
            way_out = f'{{"{axis}": {rows}}} in the rules of this load'
            yield Difference((axis,), str(cut), str(other[axis]), way_out)
        elif cut.dim < 0 and axis not in other and here.get(axis) == cut.size:
            # The axis of the save is here, too, and ranks along another one hold other rows.
            for name, another in other.items():
                if another.dim < 0 and another.size == cut.size:
                    way_out = f'the stacked tensor cut by "{axis}" in the rules of this load'
                    yield Difference((axis, name), str(cut), str(another), way_out)


def _cutting(cuts: Cuts) -> dict[str, Cut]:
    """Return the cuts by axes of more than one rank, by name."""
    return {cut.axis: cut for cut in cuts if cut.axis is not None and cut.size > 1}


def canonical(cuts: Sequence[Cut]) -> list[Cut]:
    """Return the cuts of one dim as plain and fused ones.

    ``_StridedShard(dim, split_factor=k)`` before plain cuts into ``k`` pieces is a plain cut after
    them: torch declares FSDP over shards of ``tp`` or ``ep`` so.
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


def _dim_differences(
    saved: Sequence[Cut], loaded: Sequence[Cut], size: int
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


def _may_be_equal(saved: Cut, loaded: Cut, size: int) -> bool:
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
    total = next((sum(parts) for parts in (one, other) if not isinstance(parts, int)), size)
    first, second = (part_sizes(p, total) if isinstance(p, int) else [*p] for p in (one, other))
    if len(first) != len(second):
        return False
    a, b = sum(first), sum(second)
    in_proportion = all(x * b == y * a for x, y in zip(first, second, strict=True))
    # Where the parts end in the dim, without the padding behind it.
    ends = [[min(end, size) for end in accumulate(parts)] for parts in (first, second)]
    return in_proportion or ends[0] == ends[1]


def format_cuts(cuts: Cuts) -> str:
    """Return cuts as text, in their order."""
    return ", then ".join(map(str, cuts)) or "whole, cut by no axis"


def shape_mismatch(
    stored: tuple[int, ...],
    needed: tuple[int, ...],
    needs: str,
    rule: str | None,
    cuts: tuple[Cuts, Cuts] | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Return headline and details of the fault that a tensor is stored in another shape.

    Args:
        stored: The checkpoint's shape.
        needed: The shape of the whole tensor that a local one and its rule make.
        needs: Who needs it, and the shape.
        rule: The name of the rule that applies; None where none does.
        cuts: Of the save and of the load; None where they are not recorded.
    """
    details = []
    if cuts is not None:
        details += [f"saved:       {format_cuts(cuts[0])}", f"this load:   {format_cuts(cuts[1])}"]
    differing = [d for d, (a, b) in enumerate(zip(stored, needed, strict=False)) if a != b]
    if len(stored) == len(needed) and len(differing) == 1:
        (dim,) = differing
        small, large = sorted((stored[dim], needed[dim]))
        larger, smaller, cause = "stored", "needed", "does this load lack a rule for it,"
        if stored[dim] == small:
            larger, smaller, cause = "needed", "stored", "saved without its placement"
        if cuts is not None and cuts[0] == cuts[1] != ():
            details.append("likely:      a model of another size: the two declare the same cuts")
        elif small and large % small == 0:
            details.append(
                f"likely:      on dim {dim} the {larger} size is {large // small} times the "
                f"{smaller} one: {cause} on an axis of size {large // small}?"
            )
    # Rows beyond the stored ones, fewer than they are, on a dim that the load cuts.
    is_padded = (
        rule is not None
        and len(stored) == len(needed)
        and len(differing) == 1
        and stored[differing[0]] < needed[differing[0]] < 2 * stored[differing[0]]
        and (cuts is None or any(cut.dim == differing[0] for cut in cuts[1]))
    )
    if is_padded:
        details = [line for line in details if "a model of another size" not in line]
        details.append("likely:      uneven parts, or padding: rows that are not stored")
    if rule is not None:
        details.append(f"by rule:     {rule}")
    if is_padded:
        details.append(
            f"way out:     global_shape={stored} in the rule, and padded_shape={needed} for padding"
        )
    details.append("way out:     build the model as it was saved, or correct the rule of this key")
    return (
        f"the checkpoint holds a {stored} tensor, but {needs} (torch: Size mismatch)",
        tuple(details),
    )
