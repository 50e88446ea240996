"""Experts that all ranks along an expert-parallel axis hold bit for bit equal, after training.

A checkpoint that DCP's own planners wrote may have the experts of one ep rank alone. A resume gives
these to all ranks, and nothing differs any more, so that no save is refused. Two ep ranks after
such a resume, with moments of a step::

    layers.0.experts.w1    (4, 3), of equal contents where ep is 0 and where it is 1
    optim.state.layers.0.experts.w1.exp_avg    is not zero

Experts are equal before the first step, too, where each rank draws them by one seed. So moments
that have been stepped are asked for, or a step that the planner was given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from dcp_placements.advice.facts import FactsOfRanks
from dcp_placements.errors import Fault
from dcp_placements.names.known_names import EXPERT_AXIS, NAMES_EXPERT
from dcp_placements.rules.patterns import matches_any
from dcp_placements.short_text import format_count, without_numbers
from dcp_placements.table.table import OBJECT
from dcp_placements.table.world import NO_RULE, Piece

_MOST_READ = 64
"""Keys whose digests are read until one differs from that of a constant."""


def equal_experts(
    facts: FactsOfRanks, *, waived: Sequence[re.Pattern[str]], is_stepped: bool
) -> list[Fault]:
    """Return a note on experts that are equal along an axis; empty where there are none.

    Args:
        facts: What all ranks of a save hold, whose replicas are all equal.
        waived: Patterns of keys of which nothing is said.
        is_stepped: Whether it is known that the model has been trained.
    """
    axes = [name for name in facts.sizes if EXPERT_AXIS.match(name)]
    weights: list[str] = []
    moments: list[str] = []
    shared: set[str] = set(axes)
    for piece in facts.world.pieces if axes else ():
        if piece.group.kind == OBJECT or not piece.group.shape:
            continue
        of_piece = [
            fqn
            for position, fqn in enumerate(piece.fqns)
            if NAMES_EXPERT.search(fqn)
            and facts.world.rules(piece, position) == NO_RULE
            and not matches_any(waived, fqn)
        ]
        if not of_piece:
            continue
        shared &= _axes_of_replicas(facts, piece, axes)
        if not shared:
            return []
        for fqn in of_piece:
            (weights if facts.states.of(fqn) is None else moments).append(fqn)
    differing = [fqn for fqn in weights[:_MOST_READ] if _is_not_constant(facts, fqn)]
    is_stepped = is_stepped or any(_is_not_constant(facts, fqn) for fqn in moments[:_MOST_READ])
    if not differing or not is_stepped:
        return []
    axis = next(name for name in axes if name in shared)
    pattern = without_numbers(differing[0]).replace("{}", "*")
    headline = (
        f"the experts are bit for bit equal on all {facts.sizes[axis]} positions along {axis!r}, "
        "and have been trained"
    )
    details = (
        f"found:       {format_count(len(weights), 'tensor')}, as {differing[0]}, of which no rule "
        "speaks",
        "likely:      a resume of a checkpoint that was saved without a rule: it has the experts "
        "of one of these ranks, and all have loaded them",
        "way out:     an older checkpoint, which dcp-placements doctor calls whole, and a rule "
        "with Shard from then on",
        f"             where they are meant to be replicas: waive={{{pattern!r}: reason}}",
    )
    return [Fault("this save", headline, details)]


def _axes_of_replicas(facts: FactsOfRanks, piece: Piece, axes: list[str]) -> set[str]:
    """Return the axes at each position of which ranks hold each box of a piece."""
    cover, shared = piece.cover, set[str]()
    for name in axes:
        positions = np.asarray(facts.named.axes[name].positions)[cover.ranks]
        places = np.unique(np.stack([cover.box_of, positions]), axis=1)
        if places.shape[1] == len(cover.boxes) * facts.sizes[name]:
            shared.add(name)
    return shared


def _is_not_constant(facts: FactsOfRanks, fqn: str) -> bool:
    """Whether a tensor has elements that differ, which a new moment or bias has not."""
    return any(shard.digest is not None for _, shard in facts.held(fqn))
