"""Does a load shard a tensor as the save did: by the same axis, on the same dim, in the same way?

Only axes that both sides declare on one dim are compared, in a canonical form, since several
declarations mean one layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dcp_placements.bind.placed import Placed
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Kind, LayoutError, part_sizes, unknown_kind
from dcp_placements.load.policy import Policy
from dcp_placements.storage.metadata.record import Cuts, SavedCut, SaveRecord, cuts_of


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


class Alike(Protocol):
    """Keys that are placed alike."""

    @property
    def placed(self) -> Placed | None:
        """The first of them; None where they have no place."""
        ...

    @property
    def fqns(self) -> Sequence[str]:
        """The keys."""
        ...


def compare_cuts(
    record: SaveRecord, groups: Iterable[Alike], policy: Policy
) -> tuple[list[Fault], str]:
    """Return the keys that axes shard in another way than the save had it, and the result as text.

    Args:
        record: The checkpoint's.
        groups: What the rank reads.
        policy: What is accepted.
    """
    faults: list[Fault] = []
    compared = waived = 0
    # Layouts of many shapes are cut in a few ways.
    cuts_by: dict[Any, Cuts] = {}
    for group in groups:
        if group.placed is None:
            continue
        place = group.placed.place
        key = place.sharding.cuts, place.axes
        if key not in cuts_by:
            cuts_by[key] = cuts_of(place.sharding, [axis.name for axis in place.axes])
        # Of equal places most keys were cut alike, too.
        members: dict[int, list[str]] = {}
        for fqn in group.fqns:
            members.setdefault(record.group_of[fqn], []).append(fqn)
        for number, fqns in members.items():
            saved, loaded = record.groups[number], cuts_by[key]
            if not saved or not loaded:
                continue
            compared += len(fqns)
            differing = tuple(differences(saved, loaded, place.global_shape))
            refused = [fqn for fqn in fqns if not policy.waives(fqn)] if differing else []
            waived += len(fqns) - len(refused) if differing else 0
            rule = group.placed.rule
            faults += [one.fault(fqn, rule) for fqn in refused for one in differing]
    count = compared - waived
    text = "declared as saved"
    if compared:
        text += f": {count} key{'' if count == 1 else 's'}"
    return faults, text + (f"; {waived} differ, waived" if waived else "")


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
    details = [] if cuts is None else list(_compared(*cuts))
    differing = [d for d, (a, b) in enumerate(zip(stored, needed, strict=False)) if a != b]
    as_saved = cuts is not None and cuts[0] == cuts[1] != ()
    if len(stored) == len(needed) and len(differing) == 1 and not as_saved:
        dim = differing[0]
        small, large = sorted((stored[dim], needed[dim]))
        if small and large % small == 0:
            details.append(_factor_text(dim, large // small, stored[dim] < needed[dim]))
    if rule is not None:
        details.append(f"by rule:     {rule}")
    details.append("way out:     build the model as it was saved, or correct the rule of this key")
    return (
        f"the checkpoint holds a {stored} tensor, but {needs} (torch: Size mismatch)",
        tuple(details),
    )


def _compared(saved: Cuts, loaded: Cuts) -> Iterator[str]:
    """Yield how the save and the load declare a key, and what follows from it."""
    for label, cuts in (("saved:", saved), ("this load:", loaded)):
        yield f"{label:<12} {', then '.join(map(str, cuts)) or 'whole, cut by no axis'}"
    dims = {cut.axis: cut.dim for cut in loaded}
    if any(cut.axis in dims and cut.dim != dims[cut.axis] for cut in saved):
        yield (
            "likely:      one of the two declares a wrong dim; if the save does, load as it was "
            "saved, on as many ranks, and save again with the right dim"
        )
    elif saved and saved == loaded:
        yield "likely:      a model of another size: the two declare the same cuts"


def _factor_text(dim: int, factor: int, stored_is_smaller: bool) -> str:
    larger, smaller, cause = "stored", "needed", "does this load lack a rule for it,"
    if stored_is_smaller:
        larger, smaller, cause = "needed", "stored", "saved without its placement"
    return (
        f"likely:      on dim {dim} the {larger} size is {factor} times the {smaller} one: {cause} "
        f"on an axis of size {factor}?"
    )
