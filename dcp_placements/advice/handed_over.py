"""The declaration that a refused save hands over.

The coordinator has compared what all ranks hold, and refuses it. Where shapes, names and contents
show a declaration by which the same state dict passes, its message ends in that; elsewhere it says
nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dcp_placements.advice.block import Proposal
from dcp_placements.advice.deciding import OF_EACH_RANK, decide
from dcp_placements.advice.facts import FactsOfRanks
from dcp_placements.advice.unnamed_axes import with_unnamed_axes
from dcp_placements.errors import PlacementError
from dcp_placements.rules.named_axes import NamedAxes
from dcp_placements.rules.patterns import compile_pattern, matches_any
from dcp_placements.table.digests import digests_by_cell
from dcp_placements.table.statement import Stated, listed_parameters
from dcp_placements.table.whole import WholeModel
from dcp_placements.table.world import World


def facts_of(
    world: World,
    digests: Sequence[bytes],
    size: int,
    statements: Collection[Stated],
    named: NamedAxes,
    ranks: Sequence[int],
) -> FactsOfRanks:
    """Return what all ranks of a save hold.

    Args:
        world: Their tables and boxes.
        digests: By rank, as they are sent.
        size: Number of ranks that there are.
        statements: What they state beside.
        named: The axes of the program.
        ranks: The global ranks, in the order of the plans.
    """
    different = [each.statement for each in statements]
    return FactsOfRanks(
        world,
        digests_by_cell(world, digests, size),
        named,
        ranks,
        listed_parameters(statements),
        different[0].digests,
    )


def handed_over(
    facts: FactsOfRanks,
    whole: WholeModel | None = None,
    *,
    drifted: Collection[str] = (),
    refused: Collection[str] | None = None,
) -> tuple[str, bool]:
    """Return what a refusal hands over, and whether it is a declaration that passes.

    Args:
        facts: What all ranks hold.
        whole: The unsharded model; None where it is not known.
        drifted: Keys whose copies have drifted apart.
        refused: Where there are rules or renames, to which it is added, what has faults by these.
    """
    proposal = None
    if facts.sizes or any(map(OF_EACH_RANK.search, facts.tensors)):
        proposal = _fitting(facts, whole, drifted=drifted)
    if proposal is None and refused is None:
        more, strides = with_unnamed_axes(facts)
        if strides:
            proposal = _fitting(more, whole, drifted=drifted, strides=strides)
    if proposal is None:
        return "", False
    states = [state for key in facts.tensors if (state := facts.states.of(key)) is not None]
    if any(state.parameter.isdecimal() for state in states):
        return _STATE_BY_POSITION, False
    if refused is None:
        return str(proposal), True
    # More rules mend no rule that is wrong; and, as the first, none may match what another cuts.
    patterns = list(map(compile_pattern, proposal.rules))
    for key in filter(facts.is_ruled, facts.tensors):
        if key in refused or matches_any(patterns, key):
            return "", False
    return proposal.additions(), True


def _fitting(facts: FactsOfRanks, whole: WholeModel | None, **given: Any) -> Proposal | None:
    """Return a declaration that fits; None where something stays unexplained."""
    try:
        proposal = decide(facts, whole, **given)
    except PlacementError:
        return None
    has_any = proposal.rules or proposal.numberings or proposal.own_names
    return proposal if has_any and not proposal.unsolved else None


_STATE_BY_POSITION = (
    "A declaration can follow from this once optimizer state names its parameters, as\n"
    "    get_optimizer_state_dict(model, optimizer, options=StateDictOptions("
    "flatten_optimizer_state_dict=True))\n"
    "of torch.distributed.checkpoint.state_dict does: now it has their positions."
)
