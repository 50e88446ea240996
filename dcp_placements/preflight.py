"""The pre-flight: all checks of a save, without writing a byte."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, SavePlan

from dcp_placements._torch import DistWrapper, state_dicts_of_statefuls, world_size
from dcp_placements.advice.block import has_declaration
from dcp_placements.advice.facts import TensorFacts, differing_axes
from dcp_placements.advice.proposal import (
    PlainPlan,
    axis_names,
    declared_by,
    one_error,
    plain_plan,
)
from dcp_placements.declaration import Placements
from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_faults,
)
from dcp_placements.layout.boxes import Shape
from dcp_placements.names.known_names import EXPERT_AXIS
from dcp_placements.report import SaveReport
from dcp_placements.rules.named_axes import NamedAxes, NamedAxis
from dcp_placements.rules.patterns import PlacementRules
from dcp_placements.save.planner import PlacementSavePlanner
from dcp_placements.table.digests import sampled_digests


def check(
    state_dict: dict[str, Any],
    rules: Any,
    process_group: dist.ProcessGroup | None = None,
    *,
    whole: Any = None,
    **options: Any,
) -> SaveReport:
    """Return the report of a save of ``state_dict``, or refuse as the save would.

    Call it on all ranks, at step 0 and whenever the rules are new. One gather of the plans
    and one answer; no data moves but the digests.

    Args:
        state_dict: The state dict, as for ``dcp.save``.
        rules: ``Placements``, or rules as for ``PlacementSavePlanner``.
        process_group: The process group, as for ``dcp.save``.
        whole: The unsharded model, or that of each level, as for ``Placements``, in place of that
            of ``rules``.
        options: Further options of ``PlacementSavePlanner``; with ``Placements``, of its
            ``save_planner``.

    Returns:
        The report on all ranks together, the same on each of them.

    Raises:
        PlacementError: All that a save would refuse, on all ranks, with a declaration to paste
            where one is known that passes; no state dict, or no rules.
    """
    if not isinstance(state_dict, Mapping):
        raise PlacementError(f"state_dict= is a {type(state_dict).__name__}: pass {{key: value}}")
    if whole is not None:
        options["whole"] = whole
    by_rules = partial(PlacementSavePlanner, rules)
    planner = (rules.save_planner if isinstance(rules, Placements) else by_rules)(**options)
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0
    plain = state_dicts_of_statefuls(state_dict)
    meshes = planner.rules.meshes if isinstance(planner.rules, PlacementRules) else []
    meshes = list(filter(axis_names, meshes))

    def on_rank() -> PlansOfRank:
        planner.set_up_planner(plain, is_coordinator=rank == 0)
        plan = planner.create_local_plan()
        shards = _declared_shards(planner) if planner.whole is None else {}
        return PlansOfRank(plan, shards, plain_plan(plain, meshes))

    def on_coordinator(sent: list[PlansOfRank]) -> SaveReport:
        try:
            planner.create_global_plan([each.plan for each in sent])
        except PlacementError as refusal:
            of_tensors = planner._save.meshes
            raise _with_declaration(refusal, planner, sent, [*meshes, *of_tensors]) from None
        if planner.whole is None and (notes := _equal_shards([each.shards for each in sent])):
            planner.report.warnings += tuple(map(str, notes))
            warnings.warn(format_faults("look at this save", notes, "note"), stacklevel=2)
        return planner.report

    try:
        ranks = DistWrapper(process_group, world_size() > 1, 0)
        return ranks.all_reduce("check", on_rank, on_coordinator)
    except CheckpointException as failed:
        raise one_error(failed) from None


class PlansOfRank(NamedTuple):
    """What a rank sends to be checked.

    Attributes:
        plan: The plan of a save as it is declared.
        shards: The shards of tensors that the rules cut; none with ``whole=``.
        plain: The plan of a save without rules.
    """

    plan: SavePlan
    shards: dict[str, DeclaredShard]
    plain: PlainPlan


class DeclaredShard(NamedTuple):
    """A shard of a tensor that the rules cut.

    Attributes:
        shape: Shape of the whole tensor.
        positions: Position of the rank along each axis that cuts it.
        digest: Digest of the shard; None where all its elements are equal.
    """

    shape: Shape
    positions: dict[str | None, int]
    digest: bytes | None


def _with_declaration(
    refusal: PlacementError,
    planner: PlacementSavePlanner,
    sent: Sequence[PlansOfRank],
    meshes: Sequence[Any],
) -> PlacementError:
    """Return a refusal that ends in a declaration which passes, where one is known."""
    if has_declaration(str(refusal)):
        return refusal
    block = declared_by([each.plain for each in sent], planner.whole, meshes)
    return PlacementError(f"{refusal}\n\n{block}") if block else refusal


def _declared_shards(planner: PlacementSavePlanner) -> dict[str, DeclaredShard]:
    """Return the shards of tensors that the rules cut, with the rank's position along each axis."""
    shards: dict[str, DeclaredShard] = {}
    tensors: dict[str, torch.Tensor] = {}
    for fqn, placed in planner._save.placing.placed.items():
        cuts = zip(placed.place.sharding.cuts, placed.place.positions, strict=False)
        positions = {
            cut.axis: position
            for cut, position in cuts
            if cut.size > 1 and isinstance(position, int)
        }
        if placed.rule is not None and positions and len(placed.tensors) == 1:
            shards[fqn] = DeclaredShard(placed.place.sharding.global_shape, positions, None)
            tensors[fqn] = placed.tensor
    digests = _contents_of(tensors)
    return {fqn: shard._replace(digest=digests[fqn]) for fqn, shard in shards.items()}


def _contents_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes | None]:
    """Return digests of local tensors; None for a tensor whose elements are all equal."""
    values = [tensor.detach() for tensor in tensors.values()]
    digests = dict(zip(tensors, sampled_digests(values), strict=True))
    for fqn, local in zip(tensors, values, strict=True):
        if not local.numel() or bool((local == local[(0,) * local.dim()]).all()):
            digests[fqn] = None
    return digests


def _equal_shards(of_ranks: Sequence[Mapping[str, DeclaredShard]]) -> list[Fault]:
    """Return notes on shards that are equal along an axis of a rule, and not constant.

    Expert-parallel axes are left out: experts may well be equal before the first step.
    """
    notes = []
    for fqn in dict.fromkeys(fqn for shards in of_ranks for fqn in shards):
        held = [shards[fqn] for shards in of_ranks if fqn in shards]
        names = [name for name in held[0].positions if name]
        positions = {name: [shard.positions.get(name, 0) for shard in held] for name in names}
        axes = {name: NamedAxis(max(along) + 1, tuple(along)) for name, along in positions.items()}
        facts = [
            (rank, TensorFacts(held[rank].shape, digest=held[rank].digest))
            for rank in range(len(held))
        ]
        equal = differing_axes([facts], NamedAxes(axes), names)[1]
        for axis in sorted(name for name in equal if not EXPERT_AXIS.match(name)):
            details = (
                f"found:       equal parts, of which the rule makes {held[0].shape}",
                f"likely:      a tensor that every rank of {axis!r} holds whole, declared Shard; "
                "or parts that were initialized with one seed",
                "way out:     None in the rules where it is replicated; whole= proves the shape",
            )
            notes.append(Fault(fqn, f"its parts along {axis!r} are bit for bit equal", details))
    return notes
