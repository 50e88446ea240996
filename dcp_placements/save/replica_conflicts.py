"""Replicas whose contents differ: their faults, and whether they have drifted apart.

Two ep ranks that both call different experts ``experts.w1``::

    experts.w1: 2 different contents on 2 ranks that claim to be replicas
        place:       [0:2, :] of (2, 3)
        content A:   rank 0 (ep=0)
        content B:   rank 1 (ep=1)
        the copies:  differs along 'ep'
        likely:      it is sharded over 'ep': it needs a rule with Shard on that axis; ...
        way out:     the declaration below, after a look at it
        by rule:     no rule
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain, combinations, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from dcp_placements.bind.rule_and_dtensor import Placed
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Chunk
from dcp_placements.names.known_names import RUNNING_STATISTIC, TENSOR_AXIS
from dcp_placements.names.optimizer_state import FLATTEN, OptimizerStates, is_by_position
from dcp_placements.pages import MESSAGES_PAGE, STAGES_PAGE
from dcp_placements.table.digests import Digests
from dcp_placements.table.proof_faults import (
    ANYWAY,
    Holders,
    box_text,
    copies_fault,
    faults_of_keys,
)
from dcp_placements.table.prove import Compared
from dcp_placements.table.table import OBJECT
from dcp_placements.table.world import NO_RULE, Piece, World

_SHOWN_AXES = 4
_MOST_TOGETHER = 3
_SHOWN_RANKS = 8
_RANKS_OWN = (
    "likely:      a state of each rank's own (random numbers, a data loader), or one that has "
    "drifted apart",
    "way out:     a name per rank (f'rng.{rank}') for a state of each rank's own",
)
_OTHER_GROUPS = (
    "likely:      the ranks have other parameter groups at this position, as stages of a pipeline "
    "do: a load would give all of them the options of one",
    FLATTEN,
    STAGES_PAGE,
)
_OWN_NUMBER = (
    "likely:      a number of each rank's own, such as a loss, or one that has drifted apart",
    "way out:     all_reduce it before the save; or a name per rank (f'loss.{rank}')",
    f"             {ANYWAY}",
)
_OWN_MEANS = (
    "likely:      running means of each data-parallel rank's own batches; one save may take the "
    "mean of one rank and the variance of another",
    "way out:     SyncBatchNorm; or torch.distributed.broadcast(buffer, src=0) before a save",
    f"             {ANYWAY}",
)
_TEMPLATE = (
    "way out:     PlacementRules({pattern: CheckpointPlacement(mesh, {axis: Shard(dim)})})",
    '             rename=Renumber("experts.{}", this rank\'s experts, total=) where a '
    "rank's numbers are its own; with Stack, a Renumber before the Stack",
)
_DECLARED = ("way out:     the declaration below, after a look at it",)


def with_declaration(fault: Fault) -> Fault:
    """Return a fault whose way out is the declaration that stands below all faults."""
    start = fault.details.index(_TEMPLATE[0]) if _TEMPLATE[0] in fault.details else None
    if start is None:
        return fault
    details = list(fault.details)
    details[start : start + len(_TEMPLATE)] = _DECLARED
    return replace(fault, details=tuple(details))


class Conflict(NamedTuple):
    """A key of which holders have one box with different contents.

    Attributes:
        fault: The fault of the key.
        is_own: Whether it is an object of each rank's own, of which one is kept.
        drifted: The single axis along which the tensor differs; None where there are several, for
            an expert, and for a key that a rule matches.
    """

    fault: Fault
    is_own: bool
    drifted: str | None


def conflicts_of(
    compared: Compared,
    world: World,
    holders: Holders,
    *,
    reduced: Mapping[str, tuple[str, ...]],
    lists: Set[str],
) -> Iterator[Conflict]:
    """Yield the keys of which holders have one box with different contents.

    Args:
        compared: The piece that was compared.
        world: The tables of the holders.
        holders: The holders.
        reduced: The result of ``reduced_axes``.
        lists: The keys of all lists of parameters in parameter groups.
    """
    piece = compared.piece
    # Most keys that differ do so between the same ranks.
    texts: dict[Any, tuple[Fault, list[str]]] = {}
    for position, column in zip(compared.positions, compared.contents.T, strict=True):
        fqn = piece.fqns[position]
        _, first, content = np.unique(column, return_index=True, return_inverse=True)
        # The first row with the same content, for each row: equal whatever the digests are.
        axes = reduced.get(fqn, ())
        is_mean = RUNNING_STATISTIC.search(fqn) is not None
        key = first[content].tobytes() + (column == 0).tobytes(), axes, is_mean
        if key not in texts:
            texts[key] = _conflict(piece, column, holders, axes, is_mean=is_mean)
        fault, differs = texts[key]
        headline, details = fault.headline, fault.details
        is_own = piece.group.kind == OBJECT and not is_by_position(fqn, lists)
        if is_own:
            headline, details = f"{headline}; that of the lowest is kept", details + _RANKS_OWN
        elif piece.group.kind == OBJECT:  # groups decide on the parameters
            details += _OTHER_GROUPS
        (of_key,) = faults_of_keys(world, piece, headline, details, fault.where, [position])
        is_drift = len(differs) == 1 and _is_dense(world, piece, position)
        yield Conflict(of_key, is_own, differs[0] if is_drift else None)


def drift_faults(
    differing: Sequence[Conflict], compared: Sequence[Piece], world: World
) -> dict[str, Fault]:
    """Return the fault of drifted replicas by key; empty unless nearly all replicas differ.

    A missing rule leaves other replicas equal: norms along tp, and all but the experts along ep.
    Where those differ as well, the trainer has let them drift. Along a tensor-parallel axis all
    weights may be cut, so only vectors that differ, as those of norms, show it.

    Args:
        differing: The conflicts of the save.
        compared: The pieces whose replicas were compared.
        world: The tables of the ranks.
    """
    drifted: dict[str, list[str]] = {}
    for conflict in differing:
        if conflict.drifted is not None:
            drifted.setdefault(conflict.drifted, []).append(conflict.fault.fqn)
    axis, fqns = max(drifted.items(), key=lambda item: len(item[1]), default=("", []))
    dense = [
        (piece.fqns[position], len(piece.group.shape))
        for piece in (compared if fqns else ())
        for position in range(len(piece.fqns))
        if _is_dense(world, piece, position)
    ]
    count = len(dense)
    if len(fqns) < max(_SHOWN_RANKS, 0.9 * count):
        return {}
    vectors = {fqn for fqn, ndim in dense if ndim == 1}
    if TENSOR_AXIS.match(axis) and not (vectors and vectors <= set(fqns)):
        return {}
    headline = f"{len(fqns)} of the {count} tensors that no rule speaks of differ along"
    details = (
        f"likely:      replicas along {axis!r} have drifted apart: gradients that are clipped "
        "by a norm, or averaged over a group, of each rank's own; running means, or seeds, of "
        "each rank's own; not a rule that is missing",
        "way out:     mend the trainer; check(state_dict, placements) after a step says which "
        f"replicas differ; {ANYWAY}",
    )
    return {fqn: Fault(fqn, f"{headline} {axis!r}", details) for fqn in fqns}


def _is_dense(world: World, piece: Piece, position: int) -> bool:
    """Whether a key is a tensor that no rule matches and that belongs to no expert.

    Rules are never asked about scalars, so these are none.
    """
    shape = piece.group.shape
    is_tensor = piece.group.kind != OBJECT and bool(shape) and 0 not in shape
    is_expert = "expert" in piece.fqns[position]
    return is_tensor and not is_expert and world.rules(piece, position) == NO_RULE


def reduced_axes(world: World, states: OptimizerStates) -> dict[str, tuple[str, ...]]:
    """Map keys of optimizer state to the axes that cut their parameter, but not the state.

    Along these axes the state is reduced, such as the means of rows and columns.

    Args:
        world: The tables of the ranks.
        states: The optimizer state among their keys.
    """
    groups = {fqn: piece.group for piece in world.pieces for fqn in piece.fqns}
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
    piece: Piece, digests: Digests, holders: Holders, reduced: Sequence[str], *, is_mean: bool
) -> tuple[Fault, list[str]]:
    """Return the fault of all keys with these digests, without a key, and the axes that differ.

    Args:
        piece: The piece of the keys.
        digests: The digest of each row.
        holders: The holders.
        reduced: The axes along which the keys are reduced.
        is_mean: Whether the keys are running means.
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
    choices, agrees = _along(holders, contents)
    differs = list(dict.fromkeys(chain.from_iterable(choices)))
    is_together = any(len(axes) > 1 for axes in choices)
    details = []
    for letter, members in zip("ABCDEFGH", contents.values(), strict=False):
        coordinate = [f"{name}={holders.coordinate(members[0])[name]}" for name in differs]
        on_axes = f" ({', '.join(coordinate)})" if coordinate else ""
        details.append(f"content {letter}:   {holders.name(members)}{on_axes}")
    if len(contents) > 8:
        details.append(f"... {len(contents)} different contents in all")
    if differs:
        tail = f", agrees along {_quoted(agrees)}" if agrees else ""
        separator = " or " if is_together else ", "
        axes_text = separator.join([_quoted(axes, " and ") for axes in choices[:_SHOWN_AXES]])
        together = " together" if is_together else ""
        details.append(f"the copies:  differs along {axes_text}{together}{tail}")
    count = len({rank for members in contents.values() for rank in members})
    headline = (
        f"{len(contents)} different contents on {count} {holders.noun}s that claim to be replicas"
    )
    if piece.group.kind == OBJECT:
        return Fault("", headline, tuple(details)), differs
    where = f"place:       {box_text(piece, box)} of {piece.group.shape}{more}"
    if reduced and (not differs or not set(differs).isdisjoint(reduced)):
        details += [
            f"likely:      statistics of a part: its parameter is cut over {_quoted(reduced)}, and "
            f"this state of shape {piece.group.shape} is not: each rank has reduced its own part",
            "way out:     reduce them over these ranks in the optimizer, so that they are those of "
            "the whole; or a name per rank, or a rule for this key itself",
            f"             {ANYWAY}",
        ]
        return Fault("", headline, tuple(details), (where,)), differs
    if is_mean or not piece.group.shape:
        details += _OWN_MEANS if is_mean else _OWN_NUMBER
        return Fault("", headline, tuple(details), (where,)), differs
    along = " or ".join([_quoted(axes, " and ") for axes in choices[:_SHOWN_AXES]])
    along = f" over {along}" if along else ""
    details += [
        f"likely:      it is sharded{along}: it needs a rule with Shard; or every rank counts "
        "its own from 0 (experts, layers); or replicas have drifted apart",
        *_TEMPLATE,
        "             a name per rank (f'rng.{rank}') for a state of each rank's own",
        f"             {ANYWAY}",
        MESSAGES_PAGE,
    ]
    return Fault("", headline, tuple(details), (where,)), differs


def _along(
    holders: Holders, contents: Mapping[int, Sequence[int]]
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the axes along which contents differ, and those along which they agree.

    Args:
        holders: The holders.
        contents: The holders of each content.

    Returns:
        The axes whose positions tell which content a holder has, the fewest that do: each of
        several tells it alone, and those of one tuple together. And the other axes along which
        holders of one content differ in their position.
    """
    coordinates = {rank: holders.coordinate(rank) for ranks in contents.values() for rank in ranks}

    def positions(axes: Sequence[str]) -> list[set[tuple[int, ...]]]:
        return [
            {tuple([coordinates[rank][name] for name in axes]) for rank in ranks}
            for ranks in contents.values()
        ]

    def everywhere(axes: Sequence[str]) -> int:
        return len(set.union(*positions(axes)))

    names = sorted(set.intersection(*map(set, coordinates.values())))
    names = [name for name in names if everywhere([name]) > 1]
    differs: list[tuple[str, ...]] = []
    for count in range(1, _MOST_TOGETHER + 1):
        differs = [
            axes
            for axes in combinations(names, count)
            if sum(map(len, positions(axes))) == everywhere(axes)
        ]
        if differs:
            break
    # Along an axis of which only some positions are seen they may differ by chance.
    sizes = holders.axis_sizes
    seen_whole = [
        axes for axes in differs if everywhere(axes) == prod([sizes[name] for name in axes])
    ]
    telling = {name for axes in differs for name in axes}
    agrees = [
        name for name in names if name not in telling and max(map(len, positions([name]))) > 1
    ]
    return seen_whole or differs, agrees


def undigested(fqn: str, ranks: str) -> Fault:
    """Return a note that the contents of a key cannot be read on some ranks."""
    return Fault(
        fqn,
        f"is not compared between {ranks} and the other ranks that hold it: there "
        "it is sparse, or of a class whose parts cannot be read",
        ("way out:     make sure that its copies are equal, or store its plain tensors",),
    )


def repeat_fault(placed: Placed, copies: Sequence[Chunk]) -> Fault:
    """Return a fault saying that this rank holds a box several times, with different contents."""
    shape = placed.place.sharding.global_shape
    return copies_fault(placed.fqn, copies[0].box, shape, len(copies), placed.rule)


def _ranks_by_digest(digests: Sequence[int], ranks: Sequence[int]) -> dict[int, list[int]]:
    """Map digests to the ranks that have them; empty where one rank alone holds the box."""
    ranks_by: dict[int, list[int]] = {}
    for digest, rank in zip(digests, ranks, strict=True) if len(ranks) > 1 else ():
        if digest:
            ranks_by.setdefault(digest, []).append(rank)
    return ranks_by


def _quoted(names: Sequence[str], separator: str = ", ") -> str:
    return separator.join(f"'{name}'" for name in names)
