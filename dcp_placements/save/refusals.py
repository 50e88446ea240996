"""The text of what refuses a save or is warned of: what was found, the ranks, the way out.

A message is about a piece, keys that lie alike on the same ranks, and is worked out once for all of
them. Two ep ranks that both call other experts ``experts.w1``::

    experts.w1: 2 different contents on 2 ranks that claim to be replicas
        place:       [0:2, :] of (2, 3)
        content A:   rank 0 (ep=0)
        content B:   rank 1 (ep=1)
        the copies:  differs along 'ep'
        likely:      it is sharded over 'ep': it needs a rule with Shard on that axis; ...
        way out:     PlacementRules({pattern: CheckpointPlacement(mesh, {axis: Shard(dim)})})
        by rule:     no rule
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dcp_placements.bind.one_tensor import Placed
from dcp_placements.errors import Fault, format_count, format_nbytes, format_ranks
from dcp_placements.layout.boxes import (
    as_boxes,
    format_box,
    format_boxes,
    overlaps,
    uncovered,
    within,
)
from dcp_placements.layout.sharding import Box, Chunk, format_cuts
from dcp_placements.names.optimizer_state import FLATTEN, OptimizerStates, is_by_position
from dcp_placements.report import SaveReport
from dcp_placements.table.digests import Digests
from dcp_placements.table.table import OBJECT, Group
from dcp_placements.table.world import NO_RULE, Piece, World

if TYPE_CHECKING:
    from dcp_placements.save.coordinator import Coordinator

T = TypeVar("T")

_MOST_SHOWN = 4
_FEW = 8
_RANKS_OWN = (
    "likely:      a state of each rank's own (random numbers, a data loader), or one that has "
    "drifted apart",
    "way out:     a name per rank (f'rng.{rank}') for a state of each rank's own",
)
_GROUPS = (
    "likely:      the ranks have other parameter groups at this position, as stages of a pipeline "
    "do: a load would give all of them the options of one",
    FLATTEN,
)
_ANYWAY = 'on_conflict="warn" saves one of the copies anyway, and loses the others'


def disagreement(save: Coordinator, piece: Piece) -> list[Fault]:
    """Return that tables say different things of the keys of a piece."""
    values: tuple[tuple[str, Callable[[Group], Any]], ...] = (
        ("what it is", lambda one: "another object" if one.kind == OBJECT else "a tensor"),
        ("the shape of the whole tensor", lambda one: one.shape),
        ("its dtype", lambda one: one.dtype),
    )
    unlike = ((what, _ranks_by(save, piece, value)) for what, value in values)
    what, ranks = next((what, ranks) for what, ranks in unlike if len(ranks) > 1)
    details = ["way out:     make it the same on all ranks, or give each a key of its own"]
    if what == values[1][0]:
        details = [
            "likely:      uneven shards without global_shape= (a rule) or shape= "
            "(DTensor.from_local), so that each rank infers a whole of its own; or the ranks "
            "have different rules for it; or one name for different tensors",
            "way out:     global_shape= in the rule, or shape= and stride= of from_local(); "
            "the same rules on all ranks; a name of its own (rename=) for each tensor",
        ]
        if len(set(map(len, ranks))) == 1:
            largest = tuple(map(max, zip(*ranks, strict=True)))
            if holes := uncovered(Box.whole(largest), piece.boxes):
                details.insert(0, f"nobody holds {format_boxes(holes, largest)}")
    return _of_keys(save, piece, f"the ranks do not agree on {what}: {_by(ranks)}", details)


def tiling(save: Coordinator, piece: Piece, *, complete: bool) -> list[Fault]:
    """Return why the boxes of a piece do not make the whole of its tensors.

    Args:
        save: The save.
        piece: The piece.
        complete: Whether the plans are all there are.
    """
    cover, whole = piece.cover, Box.whole(piece.group.shape)
    if crossing := overlaps(cover.boxes):
        claimed = dict.fromkeys(box for pair in crossing[:2] for box in pair)
        headline = f"ranks claim parts of {whole.sizes} that overlap without being the same"
        details = [
            *[
                f"claimed:     {_box(save, piece, box)} by {_holders(save, piece, box)}"
                for box in claimed
            ],
            "likely:      the same name is sharded on some ranks and whole, or cut otherwise, "
            "on others",
            "way out:     one placement for this name on all ranks, or a name of its own for "
            "each tensor",
        ]
        return _of_keys(save, piece, headline, details)
    beyond = np.flatnonzero(~within(whole, cover.boxes) & (cover.numel > 0)).tolist()
    if beyond:
        headline = f"{_box(save, piece, beyond[0])} lies beyond the whole tensor of shape "
        details = [f"claimed by   {_holders(save, piece, beyond[0])}"]
        return _of_keys(save, piece, f"{headline}{whole.sizes}", details)
    return _hole(save, piece) if complete else []


def _hole(save: Coordinator, piece: Piece) -> list[Fault]:
    shape, cover = piece.group.shape, piece.cover
    whole, held = prod(shape), int(cover.numel.sum())
    holes = format_boxes(uncovered(Box.whole(shape), cover.boxes, 5), shape)
    details = [f"missing:     {holes} ({whole - held} of {whole} elements)"]
    having = sorted({rank for one in piece.sources for rank in save.world.members[one.table]})
    lacking = sorted(set(range(len(save.plans))).difference(having))
    if lacking:
        ranks = f"{_ranks(save, having)} and not on {_ranks(save, lacking)}"
        details.append(f"the key is on {ranks}")
    details += [
        f"declared:    {format_cuts(piece.group.cuts)}; "
        f"{format_count(len(save.plans), 'rank')} save",
        "way out:     save with all ranks that hold a part and with the key on each of them; "
        "drop an axis over which it is not sharded from its rule; name every row by some "
        "rank's IndexShard or rename= (a Stack of local numbers needs a Renumber before it; "
        "where rows were never stepped, one that leaves state a tensor per row)",
    ]
    return _of_keys(save, piece, f"nobody holds all of the {shape} tensor", details)


def conflicts(
    save: Coordinator, piece: Piece, positions: Sequence[int], digests: Digests
) -> Iterator[Fault]:
    """Yield that ranks hold one box of keys with different contents.

    Args:
        save: The save.
        piece: The piece.
        positions: Of the keys that differ.
        digests: Theirs, by row and key.
    """
    # Most keys that differ do so between the same ranks.
    known: dict[Any, tuple[Fault, list[str]]] = {}
    for position, column in zip(positions, digests.T, strict=True):
        _, first, content = np.unique(column, return_index=True, return_inverse=True)
        # By rank, the first rank with the same content: whatever the digests are.
        axes = save.reduced.get(piece.fqns[position], ())
        key = first[content].tobytes() + (column == 0).tobytes(), axes
        if key not in known:
            known[key] = _conflict(save, piece, column, axes)
        fault, differs = known[key]
        if len(differs) == 1 and _is_dense(save, piece, position):
            save.drifted.setdefault(differs[0], []).append(piece.fqns[position])
        headline, details = fault.headline, fault.details
        if piece.group.kind == OBJECT and is_by_position(piece.fqns[position], save.lists):
            details += _GROUPS
        elif piece.group.kind == OBJECT:
            headline, details = f"{headline}; that of the lowest is kept", details + _RANKS_OWN
        yield from _of_keys(save, piece, headline, details, fault.place, [position])


def drift(save: Coordinator) -> dict[str, Fault]:
    """Return by key what is said in place of its conflict where nearly all replicas differ.

    A rule that is missing leaves others that are equal: norms along tp, and all but the experts
    along ep. Where those differ as well, the trainer has let them drift.
    """
    axis, fqns = max(save.drifted.items(), key=lambda one: len(one[1]), default=("", []))
    compared = sum(
        _is_dense(save, piece, at)
        for piece in (save.world.pieces if fqns else ())
        if piece.cover.has_replicas
        for at in range(len(piece.fqns))
    )
    if len(fqns) < max(_FEW, 0.9 * compared):
        return {}
    headline = f"{len(fqns)} of the {compared} tensors that no rule speaks of differ along"
    details = (
        f"likely:      replicas along {axis!r} have drifted apart: gradients that are clipped "
        "by a norm, or averaged over a group, of each rank's own; running means, or seeds, of "
        "each rank's own; not a rule that is missing",
        "way out:     mend the trainer; check(state_dict, placements) after a step says which "
        f"replicas differ; {_ANYWAY}",
    )
    return {fqn: Fault(fqn, f"{headline} {axis!r}", details) for fqn in fqns}


def _is_dense(save: Coordinator, piece: Piece, position: int) -> bool:
    """Whether a tensor is no expert's, and no rule speaks of it."""
    is_tensor = piece.group.kind != OBJECT and 0 not in piece.group.shape
    is_expert = "expert" in piece.fqns[position]
    return is_tensor and not is_expert and save.world.rules(piece, position) == NO_RULE


def reduced_axes(world: World) -> dict[str, tuple[str, ...]]:
    """Map keys of optimizer state to the axes that cut their parameter, and not them.

    Along these axes the state is reduced, as the means of rows and columns are.
    """
    groups = {fqn: piece.group for piece in world.pieces for fqn in piece.fqns}
    states = OptimizerStates(dict.fromkeys(groups))
    owners = {fqn: state.owner for fqn in groups if (state := states.of(fqn)) is not None}
    weights = states.weights_of(set(owners.values()), groups)
    reduced = {}
    for fqn, owner in owners.items():
        own = {cut.axis for cut in groups[fqn].cuts}
        cuts = [cut for key in weights[owner] for cut in groups[key].cuts if cut.size > 1]
        axes = [cut.axis for cut in cuts if cut.axis is not None and cut.axis not in own]
        reduced[fqn] = tuple(dict.fromkeys(axes))
    return reduced


def _conflict(
    save: Coordinator, piece: Piece, digests: Digests, reduced: Sequence[str] = ()
) -> tuple[Fault, list[str]]:
    """Return what is said of all keys with such digests by row, and along what they differ.

    Args:
        save: The save.
        piece: Theirs.
        digests: By row.
        reduced: As ``reduced_axes`` returns it.
    """
    cover = piece.cover
    ordered, ranks = digests[cover.order].tolist(), cover.ranks[cover.order].tolist()
    differing = []
    for box, (start, stop) in enumerate(pairwise(cover.starts.tolist())):
        contents = _ranks_by_digest(ordered[start:stop], ranks[start:stop])
        if len(contents) > 1:
            differing.append((box, contents))
    (box, contents), *others = differing
    more = f" (and {len(others)} more place{'s' if len(others) > 1 else ''})" if others else ""
    differs, agrees = _along(save, contents)
    details = []
    for letter, members in zip("ABCDEFGH", contents.values(), strict=False):
        at = [f"{name}={_coordinate(save, members[0])[name]}" for name in differs]
        where = f" ({', '.join(at)})" if at else ""
        details.append(f"content {letter}:   {_ranks(save, members)}{where}")
    if len(contents) > 8:
        details.append(f"... {len(contents)} different contents in all")
    if differs:
        tail = f", agrees along {_quoted(agrees)}" if agrees else ""
        details.append(f"the copies:  differs along {_quoted(differs)}{tail}")
    count = len({rank for members in contents.values() for rank in members})
    headline = f"{len(contents)} different contents on {count} ranks that claim to be replicas"
    if piece.group.kind == OBJECT:
        return Fault("", headline, tuple(details)), differs
    if reduced and (not differs or not set(differs).isdisjoint(reduced)):
        details += [
            f"likely:      statistics of a part: its parameter is cut over {_quoted(reduced)}, and "
            f"this state of shape {piece.group.shape} is not: each rank has reduced its own part",
            "way out:     reduce them over these ranks in the optimizer, so that they are those of "
            "the whole; or a name per rank, or a rule for this key itself",
            f"             {_ANYWAY}",
        ]
        place = f"place:       {_box(save, piece, box)} of {piece.group.shape}{more}"
        return Fault("", headline, tuple(details), (place,)), differs
    along = f" over {_quoted(differs, ' or ')}" if differs else ""
    details += [
        f"likely:      it is sharded{along}: it needs a rule with Shard; or every rank counts "
        "its own from 0 (experts, layers); or replicas have drifted apart",
        "way out:     PlacementRules({pattern: CheckpointPlacement(mesh, {axis: Shard(dim)})})",
        '             rename=Renumber("experts.{}", this rank\'s experts, total=) where a '
        "rank's numbers are its own; with Stack, a Renumber before the Stack",
        "             a name per rank (f'rng.{rank}') for a state of each rank's own",
        f"             {_ANYWAY}",
    ]
    place = f"place:       {_box(save, piece, box)} of {piece.group.shape}{more}"
    return Fault("", headline, tuple(details), (place,)), differs


def _along(save: Coordinator, contents: Mapping[int, Sequence[int]]) -> tuple[list[str], list[str]]:
    """Return the axes that tell contents apart, and those along which copies agree."""
    at = {rank: _coordinate(save, rank) for ranks in contents.values() for rank in ranks}
    sizes = dict(size for one in save.statements.values() for size in one.axis_sizes.items())
    differs, agrees, seen_whole = [], [], []
    for name in sorted(set.intersection(*map(set, at.values()))):
        positions = [{at[rank][name] for rank in ranks} for ranks in contents.values()]
        everywhere = set.union(*positions)
        if len(everywhere) < 2:
            continue
        if sum(map(len, positions)) == len(everywhere):
            differs.append(name)
            seen_whole += [name] if len(everywhere) == sizes[name] else []
        elif max(map(len, positions)) > 1:
            agrees.append(name)
    # An axis of which only some positions are seen may tell them apart by chance.
    return seen_whole or differs, agrees


def undigested(save: Coordinator, fqn: str, ranks: Sequence[int]) -> Fault:
    """Return that the contents of a key cannot be read on some ranks."""
    return Fault(
        fqn,
        f"is not compared between {_ranks(save, ranks)} and the other ranks that hold it: there "
        "it is sparse, or of a class whose parts cannot be read",
        ("way out:     make sure that its copies are equal, or store its plain tensors",),
    )


def same_coordinate(save: Coordinator, piece: Piece) -> list[Fault]:
    """Return that ranks hold equal boxes though the mesh has a part for each of them."""
    box = int(np.diff(piece.cover.starts).argmax())
    headline = (
        f"{_holders(save, piece, box)} hold the same part, {_box(save, piece, box)} of "
        f"{piece.group.shape}, though its mesh has a part for every rank"
    )
    way_out = "way out:     on every rank the mesh, and get_coordinate(), as that rank sees it"
    return _of_keys(save, piece, headline, [way_out], positions=[0])


def _of_keys(
    save: Coordinator,
    piece: Piece,
    headline: str,
    details: Iterable[str],
    place: tuple[str, ...] = (),
    positions: Sequence[int] | None = None,
) -> list[Fault]:
    """Return a fault of each key of a piece, or of some; its last line names its rules."""
    found = []
    for at in range(len(piece.fqns)) if positions is None else positions:
        by_rule = f"by rule:     {save.world.rules(piece, at)}"
        found.append(Fault(piece.fqns[at], headline, (*details, by_rule), place))
    return found


def _ranks_by(save: Coordinator, piece: Piece, value: Callable[[Group], T]) -> dict[T, str]:
    """Return the ranks that have a piece, as text, by a value of their groups."""
    ranks: dict[T, list[int]] = {}
    for source in piece.sources:
        members = save.world.members[source.table].tolist()
        ranks.setdefault(value(source.group), []).extend(members)
    return {value: _ranks(save, of_value) for value, of_value in ranks.items()}


def _box(save: Coordinator, piece: Piece, box: int) -> str:
    (one,) = as_boxes(piece.cover.boxes[[box]])
    return format_box(one, piece.group.shape)


def _holders(save: Coordinator, piece: Piece, box: int) -> str:
    return _ranks(save, piece.cover.holders(box).tolist())


def _coordinate(save: Coordinator, at: int) -> dict[str, int]:
    plan = save.plans[at]
    return dict(zip(save.statements[plan.statement].axis_sizes, plan.coordinate, strict=True))


def _ranks(save: Coordinator, positions: Iterable[int]) -> str:
    return format_ranks(save.plans[at].rank for at in positions)


def repeat_fault(placed: Placed, copies: Sequence[Chunk]) -> Fault:
    """Return that this rank holds a box several times, with different contents."""
    shape = placed.place.sharding.global_shape
    return copies_fault(placed.fqn, copies[0].box, shape, len(copies), placed.rule)


def copies_fault(
    fqn: str, box: Box, shape: tuple[int, ...], count: int, rule: str | None = None
) -> Fault:
    """Return that one rank holds a box ``count`` times, with different contents."""
    return Fault(
        fqn,
        f"{count} copies of {format_box(box, shape)} of {shape} on one rank have different "
        "contents",
        (
            f"way out:     make the copies equal, or correct the numbers; {_ANYWAY}",
            f"by rule:     {rule or NO_RULE}",
        ),
    )


def this_save(headline: str, *details: str) -> Fault:
    """Return a fault of a save as such, of no key."""
    return Fault("this save", headline, details)


def unlike(what: str, values: Mapping[T, Sequence[int]], *details: str) -> Fault:
    """Return that ranks were given different values.

    Args:
        what: What they do about it, as text.
        values: The ranks by value.
        details: The reason, and what makes them equal.
    """
    texts = {repr(value): format_ranks(ranks) for value, ranks in values.items()}
    return this_save(f"{what}: {_by(texts)}", *details)


def not_all_ranks(report: SaveReport, ranks: Sequence[int], size: int) -> Fault:
    """Return that a save does not have what ranks hold that take no part in it.

    Args:
        report: On what is saved.
        ranks: Those that take part.
        size: Number of ranks that there are.
    """
    headline = f"{len(ranks)} of {size} ranks take part"
    if len(ranks) == 1:
        headline = f"rank {ranks[0]} of {size} ranks saves by itself"
    details, keys = [], report.keys
    lacking = [fqn for fqn, key in keys.items() if key.unique_nbytes < key.whole_nbytes]
    if lacking:
        key = keys[lacking[0]]
        details.append(
            f"missing:     parts of {len(lacking)} of {len(keys)} tensors, as of {lacking[0]}: "
            f"{format_nbytes(key.unique_nbytes)} of {format_nbytes(key.whole_nbytes)} are saved"
        )
    return this_save(
        headline,
        *details,
        "reason:      what only other ranks hold is not saved; and if they save into the same "
        "directory, they overwrite files and .metadata of each other",
        "way out:     dcp.save on all ranks after init_process_group(), without no_dist=True; or "
        "a directory for each group",
    )


def _ranks_by_digest(digests: Sequence[int], ranks: Sequence[int]) -> dict[int, list[int]]:
    """Return the ranks by the digest of what they hold, where several hold something."""
    ranks_by: dict[int, list[int]] = {}
    for digest, rank in zip(digests, ranks, strict=True) if len(ranks) > 1 else ():
        if digest:
            ranks_by.setdefault(digest, []).append(rank)
    return ranks_by


def _by(ranks: Mapping[T, str]) -> str:
    """Return values with their ranks: ``(8, 3) on ranks 0-2; (8, 4) on rank 3``."""
    shown = [f"{value} on {text}" for value, text in ranks.items()]
    return "; ".join(shown[:_MOST_SHOWN]) + ("; ..." if len(shown) > _MOST_SHOWN else "")


def _quoted(names: Sequence[str], separator: str = ", ") -> str:
    return separator.join(f"'{name}'" for name in names)
