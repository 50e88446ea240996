"""Does a load cut a tensor as the save did: by the same axis, the same dim, in the same way.

Only what both sides declare is compared: an axis that one of them does not have, or has on another
dim, says nothing. Compared are canonical forms, since several declarations mean one layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dcp_placements.layout.sharding import LayoutError, part_sizes
from dcp_placements.storage.metadata.record import FUSED, PLAIN, ROWS, STRIDED, Cuts, SavedCut


@dataclass(frozen=True, slots=True)
class Difference:
    """A cut that a load declares otherwise than the save did.

    Attributes:
        axes: The axes that it is about: one, or two in another order.
        saved: How it was saved, in words.
        loaded: How it would be loaded.
        way_out: What to declare instead.
    """

    axes: tuple[str, ...]
    saved: str
    loaded: str
    way_out: str


def differences(saved: Cuts, loaded: Cuts, shape: Sequence[int]) -> Iterator[Difference]:
    """Yield what a load declares otherwise than the save did.

    Args:
        saved: The cuts of the save.
        loaded: Those of the load.
        shape: Of the whole tensor.
    """
    if 0 in shape:
        return
    for dim in sorted({cut.dim for cut in saved} & {cut.dim for cut in loaded}):
        one, other = ([cut for cut in cuts if cut.dim == dim] for cuts in (saved, loaded))
        if any(cut.kind == ROWS for cut in (*one, *other)):
            continue
        yield from _dim_differences(canonical(one), canonical(other), shape[dim])


def canonical(cuts: Sequence[SavedCut]) -> list[SavedCut]:
    """Return the cuts of one dim as plain and fused ones.

    ``_StridedShard(dim, split_factor=k)`` before plain cuts of ``k`` pieces is a plain cut after
    them: that is how torch writes FSDP of what ``tp`` or ``ep`` has cut.
    """
    ordered: list[SavedCut] = []
    for cut in reversed(cuts):
        at = 0
        if cut.kind == STRIDED:
            pieces = 1
            while pieces != cut.parts and at < len(ordered) and ordered[at].kind == PLAIN:
                pieces *= ordered[at].size
                at += 1
            if pieces == cut.parts:
                cut = cut._replace(kind=PLAIN, parts=1)
            else:
                cut, at = cut._replace(kind=FUSED), 0
        elif cut.kind == FUSED and _count(cut.parts) == 1:
            cut = cut._replace(kind=PLAIN, parts=1, interleaved=False)
        ordered.insert(at, cut)
    return ordered


def _dim_differences(
    saved: Sequence[SavedCut], loaded: Sequence[SavedCut], size: int
) -> Iterator[Difference]:
    one = {cut.axis: cut for cut in saved if cut.axis is not None}
    other = {cut.axis: cut for cut in loaded if cut.axis is not None}
    common = [axis for axis in one if axis in other]
    unlike = [axis for axis in common if not _alike(one[axis], other[axis], size)]
    for axis in unlike:
        yield Difference(
            (axis,),
            str(one[axis]),
            str(other[axis]),
            f'{{"{axis}": {one[axis].placement}}} in the rules of this load, as it was saved',
        )
    if unlike:
        return
    # An axis of size 1 cuts nothing, so it stands nowhere in the order.
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


def _alike(saved: SavedCut, loaded: SavedCut, size: int) -> bool:
    """Whether two cuts by axes of one name may be the same declaration."""
    if saved.kind != loaded.kind:
        plain = saved if saved.kind == PLAIN else loaded
        return plain.size == 1  # a whole tensor
    return saved.kind == PLAIN or (
        saved.interleaved == loaded.interleaved and _same_parts(saved.parts, loaded.parts, size)
    )


def _same_parts(one: int | tuple[int, ...], other: int | tuple[int, ...], size: int) -> bool:
    """Whether parts are the same ones, of a dim that may be cut by other axes before or padded.

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
    return in_proportion or _begins(first, size) == _begins(second, size)


def _begins(sizes: Sequence[int], size: int) -> list[int]:
    """Return where parts end in a dim, padding behind it left out."""
    ends, at = [], 0
    for part in sizes:
        at += part
        ends.append(min(at, size))
    return ends
