"""The faults of a proof that fails, as messages: which boxes, whose, and the way out.

A message is about a piece, so it is worked out once for all keys of it. ``Holders`` names whoever
holds the boxes. Two ep ranks that both have the first half of ``experts.w1``, a ``(4, 3)``::

    experts.w1: nobody holds all of the (4, 3) tensor
        missing:     [2:4, :] (6 of 12 elements)
        declared:    dim 0: ep
        way out:     save with all ranks that hold a part ...
        by rule:     no rule
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import assert_never

from dcp_placements.errors import Fault, uneven_line
from dcp_placements.layout.boxes import as_boxes, format_box, format_boxes, uncovered
from dcp_placements.layout.sharding import Box, Kind, format_cuts
from dcp_placements.pages import UNEVEN_PAGE
from dcp_placements.short_text import format_count
from dcp_placements.table.prove import Broken, Doubled, Unlike
from dcp_placements.table.world import NO_RULE, Piece, World

_MOST_SHOWN = 4
ANYWAY = 'on_conflict="warn" saves one of the copies anyway, and loses the others'
ALL_RANKS = (
    "way out:     save with all ranks that hold a part and with the key on each of them; "
    "drop an axis over which it is not sharded from its rule; name every row by some "
    "rank's IndexShard or rename= (a Stack of local numbers needs a Renumber before it; "
    "where rows were never stepped, one that leaves state a tensor per row)"
)


@dataclass(frozen=True)
class Holders:
    """The holders of the boxes that are proved, as messages name them.

    Attributes:
        name: Returns the holders at some positions as text: ``"ranks 0-2"``.
        noun: What a holder is, such as ``"rank"``.
        inside: The preposition before the names: ``"on"`` ranks, ``"in"`` files.
        count: Number of holders.
        missing: The way out where boxes are missing.
        coordinate: Returns the position of a holder along the axes that it knows.
        axis_sizes: The sizes of all these axes.
    """

    name: Callable[[Iterable[int]], str]
    noun: str
    inside: str
    count: int
    missing: str
    coordinate: Callable[[int], Mapping[str, int]] = lambda position: {}
    axis_sizes: Mapping[str, int] = field(default_factory=dict)


def is_uneven(finding: Unlike | Broken | Doubled) -> bool:
    """Return whether ranks hold tensors of one key that differ in size alone, as parts may do."""
    if not isinstance(finding, Unlike) or finding.what != "shape":
        return False
    return len({len(source.group.shape) for source in finding.piece.sources}) == 1


def proof_faults(finding: Unlike | Broken | Doubled, world: World, holders: Holders) -> list[Fault]:
    """Return the faults of the keys of a piece whose boxes do not make wholes."""
    match finding:
        case Unlike():
            return _unlike_faults(finding, world, holders)
        case Broken():
            return _broken_faults(finding, world, holders)
        case Doubled(piece, box):
            headline = (
                f"{holders_text(holders, piece, box)} hold the same part, {box_text(piece, box)} "
                f"of {piece.group.shape}, though its mesh has a part for every {holders.noun}"
            )
            way_out = (
                "way out:     on every rank the mesh, and get_coordinate(), as that rank sees it"
            )
            return faults_of_keys(world, piece, headline, [way_out], positions=[0])
        case _:
            assert_never(finding)


_MOST_SHARDS = 16
"""Sizes that a message lists."""

_ASPECTS = {
    "kind": "what it is",
    "sizes": "the sizes of its shards",
    "shape": "the shape of the whole tensor",
    "dtype": "its dtype",
    "layout": "its layout",
}


def _unlike_faults(finding: Unlike, world: World, holders: Holders) -> list[Fault]:
    """Return faults saying that the holders of a piece do not agree on its keys."""
    piece, what, of_value = finding
    details = [
        f"way out:     make it the same on all {holders.noun}s, or give each a key of its own"
    ]
    if what == "shape":
        details = [
            "likely:      uneven shards without global_shape= (a rule) or shape= "
            "(DTensor.from_local), so that each rank infers a whole of its own; or the ranks "
            "have different rules for it; or one name for different tensors",
            "way out:     global_shape= in the rule, or shape= and stride= of from_local(); "
            "the same rules on all ranks; a name of its own (rename=) for each tensor",
        ]
        if (line := _uneven_line(piece)) is not None:
            details.insert(1, line)
            details.append(UNEVEN_PAGE)
        elif (line := _flat_line(piece, holders)) is not None:
            details += [line, UNEVEN_PAGE]
        shapes = [source.group.shape for source in piece.sources]
        if len(set(map(len, shapes))) == 1:
            largest = tuple(map(max, zip(*shapes, strict=True)))
            if holes := uncovered(Box.whole(largest), piece.boxes):
                details.insert(0, f"nobody holds {format_boxes(holes, largest)}")
    shown = [f"{value} {holders.inside} {holders.name(some)}" for value, some in of_value.items()]
    values = "; ".join(shown[:_MOST_SHOWN]) + ("; ..." if len(shown) > _MOST_SHOWN else "")
    headline = f"the {holders.noun}s do not agree on {_ASPECTS[what]}: {values}"
    return faults_of_keys(world, piece, headline, details)


def _uneven_line(piece: Piece) -> str | None:
    """Return the line for holders that declare equal shards, and have uneven ones.

    Each infers a whole of as many shards as its own, where its boxes tell its position: two ranks
    with three and five of eight rows have the boxes ``[0:3]`` of 6 rows and ``[5:10]`` of 10.

    Returns:
        None where the holders declare more than that, or do not have all shards.
    """
    groups = [source.group for source in piece.sources]
    shapes = [group.shape for group in groups]
    if len({group.cuts for group in groups}) > 1 or len(set(map(len, shapes))) > 1:
        return None
    uneven = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    cuts = [cut for cut in groups[0].cuts if uneven == [cut.dim] and cut.by_rule]
    if len(cuts) != 1 or cuts[0].kind is not Kind.PLAIN or cuts[0].axis is None:
        return None
    (cut,) = cuts
    assert cut.dim is not None, "it is plain"
    sizes: dict[int, int] = {}
    for source in piece.sources:
        size = source.group.shape[cut.dim] // cut.size
        for start in source.boxes[:, 0, cut.dim].tolist() if size else ():
            if sizes.setdefault(start // size, size) != size:
                return None
    has_empty = any(0 in shape for shape in shapes)
    if len(sizes) < cut.size and not has_empty:
        return None
    shards = tuple([sizes.get(position, 0) for position in range(cut.size)])
    return uneven_line(cuts[0].axis, cut.dim, shards)


def _flat_line(piece: Piece, holders: Holders) -> str | None:
    """Return the line for holders of 1-d tensors that no one cuts, which may be flat ranges.

    Their sizes, in the order of the holders, are those of ``FlatShard`` where one axis has all of
    them; what the whole is they do not show. None where a holder lacks the key, or cuts it.
    """
    sizes: dict[int, int] = {}
    for source in piece.sources:
        group = source.group
        if len(group.shape) != 1 or group.cuts:
            return None
        sizes |= dict.fromkeys(source.ranks.tolist(), group.shape[0])
    if len(sizes) != holders.count or holders.count > _MOST_SHARDS:
        return None
    shards = tuple([size for _, size in sorted(sizes.items())])
    return (
        f"or:          ranges of a flattened tensor: {{axis: FlatShard({shards})}} and "
        "global_shape= in its rule, where these are all of one axis"
    )


def _broken_faults(finding: Broken, world: World, holders: Holders) -> list[Fault]:
    """Return why the boxes of a piece do not make the whole of its tensors."""
    piece, (kind, numbers, boxes) = finding
    shape, cover = piece.group.shape, piece.cover
    match kind:
        case "overlap":
            headline = f"{holders.noun}s claim parts of {shape} that overlap without being the same"
            details = [
                *[
                    f"claimed:     {box_text(piece, box)} by {holders_text(holders, piece, box)}"
                    for box in dict.fromkeys(numbers[:4])
                ],
                "likely:      the same name is sharded on some ranks and whole, or cut otherwise, "
                "on others",
                "way out:     one placement for this name on all ranks, or a name of its own for "
                "each tensor",
            ]
        case "out_of_bounds":
            headline = (
                f"{box_text(piece, numbers[0])} lies beyond the whole tensor of shape {shape}"
            )
            details = [f"claimed by   {holders_text(holders, piece, numbers[0])}"]
        case "hole":
            whole, held = prod(shape), int(cover.numel.sum())
            headline = f"nobody holds all of the {shape} tensor"
            text = format_boxes(boxes[:5], shape)
            details = [f"missing:     {text} ({whole - held} of {whole} elements)"]
            members = [world.members[source.table].tolist() for source in piece.sources]
            having = set(chain.from_iterable(members))
            if lacking := sorted(set(range(holders.count)) - having):
                texts = [f"{holders.inside} {holders.name(some)}" for some in (having, lacking)]
                details.append(f"the key is {' and not '.join(texts)}")
            everybody = format_count(holders.count, holders.noun)
            details.append(f"declared:    {format_cuts(piece.group.cuts)}; {everybody} in all")
            shards = prod(cut.size for cut in piece.group.cuts)
            if shards > holders.count and world.rules(piece, 0) != NO_RULE:
                details.append(
                    f"likely:      these axes make {shards} shards: the rule matches too much, or "
                    "has an axis over which the tensor is whole, or is cut by its DTensor already"
                )
            details.append(holders.missing)
        case "repeated":
            raise AssertionError("the boxes of a cover differ")
        case _:
            assert_never(kind)
    return faults_of_keys(world, piece, headline, details)


def copies_fault(
    fqn: str, box: Box, shape: tuple[int, ...], count: int, rule: str | None = None
) -> Fault:
    """Return a fault saying that one rank holds a box ``count`` times, with different contents."""
    return Fault(
        fqn,
        f"{count} copies of {format_box(box, shape)} of {shape} on one rank have different "
        "contents",
        (
            f"way out:     make the copies equal, or correct the numbers; {ANYWAY}",
            f"by rule:     {rule or NO_RULE}",
        ),
    )


def faults_of_keys(
    world: World,
    piece: Piece,
    headline: str,
    details: Iterable[str],
    where: tuple[str, ...] = (),
    positions: Sequence[int] | None = None,
) -> list[Fault]:
    """Return a fault for each key of a piece, or for some; its last line names its rules."""
    faults = []
    for position in range(len(piece.fqns)) if positions is None else positions:
        by_rule = f"by rule:     {world.rules(piece, position)}"
        faults.append(Fault(piece.fqns[position], headline, (*details, by_rule), where))
    return faults


def box_text(piece: Piece, box: int) -> str:
    return format_box(as_boxes(piece.cover.boxes[[box]])[0], piece.group.shape)


def holders_text(holders: Holders, piece: Piece, box: int) -> str:
    return holders.name(piece.cover.holders(box).tolist())
