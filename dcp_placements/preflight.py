"""The pre-flight: all checks of a save, without writing a byte."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, SavePlan

from dcp_placements._torch import DistWrapper, state_dicts_of_statefuls, world_size
from dcp_placements.advice.proposal import (
    LocalTensor,
    RankFacts,
    TensorFacts,
    along,
    axis_names,
    contents_of,
    decide,
    one_error,
    rank_facts,
)
from dcp_placements.bind.lint import EXPERT_AXIS
from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_faults,
)
from dcp_placements.placements import Placements
from dcp_placements.report import SaveReport
from dcp_placements.rules.patterns import PlacementRules
from dcp_placements.save.planner import PlacementSavePlanner


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
        PlacementError: All that a save would refuse, on all ranks, with rules to paste where
            ``whole=`` is known and the rules have a mesh; no state dict, or no rules.
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
    mesh = max(filter(axis_names, meshes), key=lambda candidate: len(candidate.shape), default=None)

    def on_rank() -> tuple[SavePlan, RankFacts | None]:
        planner.set_up_planner(plain, is_coordinator=rank == 0)
        plan = planner.create_local_plan()
        if planner.whole is None:
            return plan, _declared_shards(planner)
        return plan, None if mesh is None else rank_facts(plain, mesh)

    def on_coordinator(sent: list[tuple[SavePlan, RankFacts | None]]) -> SaveReport:
        try:
            planner.create_global_plan([plan for plan, _ in sent])
            shards = [facts for _, facts in sent if facts]
            if planner.whole is None and (notes := _equal_shards(shards)):
                planner.report.warnings += tuple(map(str, notes))
                warnings.warn(format_faults("look at this save", notes, "note"), stacklevel=2)
        except PlacementError as refusal:
            facts = [of_rank for _, of_rank in sent if of_rank is not None]
            if planner.whole is None or mesh is None or len(facts) < len(sent):
                raise
            sizes = dict(zip(axis_names(mesh), mesh.shape, strict=True))
            try:
                decision = decide(planner.whole, facts, sizes)
            except PlacementError:
                raise refusal from None
            raise PlacementError(f"{refusal}\n\n{_FITS}\n\n{decision}") from None
        return planner.report

    try:
        ranks = DistWrapper(process_group, world_size() > 1, 0)
        return ranks.all_reduce("check", on_rank, on_coordinator)
    except CheckpointException as failed:
        raise one_error(failed) from None


def _declared_shards(planner: PlacementSavePlanner) -> RankFacts:
    """Return the shards of tensors that the rules cut, with the rank's position along each axis."""
    tensors: dict[str, TensorFacts] = {}
    shards = {}
    for fqn, placed in planner._save.placing.placed.items():
        cuts = zip(placed.place.sharding.cuts, placed.place.positions, strict=False)
        positions = [
            (cut.axis, position)
            for cut, position in cuts
            if cut.size > 1 and isinstance(position, int)
        ]
        if placed.rule is not None and positions and len(placed.tensors) == 1:
            shape = placed.place.sharding.global_shape
            tensors[fqn] = TensorFacts(shape, tuple(positions), None)
            shards[fqn] = placed.tensor
    digests = contents_of(shards)
    facts = {fqn: tensor._replace(digest=digests[fqn]) for fqn, tensor in tensors.items()}
    return RankFacts({}, facts)


def _equal_shards(facts: Sequence[RankFacts]) -> list[Fault]:
    """Return notes on shards that are equal along an axis of a rule, and not constant.

    Expert-parallel axes are left out: experts may be equal before the first step.
    """
    notes = []
    for fqn in dict.fromkeys(fqn for rank in facts for fqn in rank.tensors):
        held = [rank.tensors[fqn] for rank in facts if fqn in rank.tensors]
        axes = [name for name, _ in held[0].own if name and not EXPERT_AXIS.match(name)]
        shards = [
            LocalTensor(
                {name: position for name, position in tensor.own if name}, tensor._replace(own=())
            )
            for tensor in held
        ]
        for axis in sorted(along([shards], axes)[1]):
            details = (
                f"found:       equal parts, of which the rule makes {held[0].shape}",
                f"likely:      a tensor that every rank of {axis!r} holds whole, declared Shard; "
                "or parts that were initialized with one seed",
                "way out:     None in the rules where it is replicated; whole= proves the shape",
            )
            notes.append(Fault(fqn, f"its parts along {axis!r} are bit for bit equal", details))
    return notes


_FITS = "this fits the shapes, the names and the contents of all ranks; read it before you use it:"
