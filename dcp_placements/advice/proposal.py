"""A declaration, proposed to all ranks: what shapes, names and contents leave possible.

Each rank plans a save without rules, so the coordinator has what it would have of that save. A
proposal is not a declaration: what shapes and contents leave open is said, nothing is applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from dcp_placements._torch import (
    DistWrapper,
    named_axes,
    state_dicts_of_statefuls,
    world_size,
)
from dcp_placements.advice.block import Proposal, block_in
from dcp_placements.advice.deciding import decide
from dcp_placements.declaration import Placements
from dcp_placements.errors import PlacementError, raise_faults_of_ranks
from dcp_placements.save.coordinator import NOT_PLACED, Coordinator
from dcp_placements.save.local_plan import LocalPlan
from dcp_placements.save.planner import PlacementSavePlanner
from dcp_placements.table.whole import WholeModel


class PlainPlan(NamedTuple):
    """What a rank would save without rules, and where it is along the axes of meshes.

    Attributes:
        plan: What it would send to the coordinator.
        axes: By name, its position along an axis, and the size of that.
    """

    plan: LocalPlan
    axes: Mapping[str, tuple[int, int]]


def propose_placements(
    whole: Any,
    state_dict: dict[str, Any],
    mesh: Any,
    process_group: dist.ProcessGroup | None = None,
) -> Proposal:
    """Return the declaration that fits what the ranks hold of the unsharded model.

    Call it on all ranks, with weights that differ as those of a real model do, and best after
    a step. The coordinator gets shapes and digests of all ranks, some 100 bytes for each tensor and
    rank; no data moves. Nothing is applied: read what it prints, and paste it.

    Args:
        whole: The unsharded model, as for ``Placements``; None where it is not known, so that names
            decide which dims are cut.
        state_dict: The state dict, as for ``dcp.save``.
        mesh: The mesh whose axes shard tensors beside their DTensors, with axis names; or several.
        process_group: The process group, as for ``dcp.save``.

    Returns:
        The proposal; its text is the same on all ranks.

    Raises:
        PlacementError: A mesh without names, a state dict with no key of the model, or one that
            cannot be placed by itself.
    """
    model = None if whole is None else WholeModel.of(whole)
    meshes = [*mesh] if isinstance(mesh, list | tuple) else [mesh]
    if not meshes or not all(map(axis_names, meshes)):
        raise PlacementError("mesh= has no axis names: init_device_mesh(..., mesh_dim_names=(...))")
    plain = state_dicts_of_statefuls(state_dict)

    def decided(plans: list[PlainPlan]) -> Proposal:
        return proposed(plans, model, meshes)

    try:
        ranks = DistWrapper(process_group, world_size() > 1, 0)
        proposal = ranks.all_reduce("propose", lambda: plain_plan(plain, meshes), decided)
    except CheckpointException as failed:
        raise one_error(failed) from None
    rules, rename = proposal.on(MeshesByAxes(meshes))
    proposal.placements = Placements(rules, rename=rename, whole=model)
    return proposal


def plain_plan(state_dict: dict[str, Any], meshes: Sequence[Any]) -> PlainPlan:
    """Return what this rank would save without rules.

    Args:
        state_dict: Nested, of plain values.
        meshes: Those with axis names.
    """
    planner = PlacementSavePlanner(None)
    planner.set_up_planner(state_dict)
    return PlainPlan(planner.create_local_plan().planner_data, named_axes(meshes))


def proposed(
    plans: Sequence[PlainPlan], whole: WholeModel | None, meshes: Sequence[Any]
) -> Proposal:
    """Return what fits the plans of all ranks.

    Args:
        plans: The plans of all ranks.
        whole: The unsharded model; None where it is not known.
        meshes: The meshes, seen from the coordinator.

    Raises:
        PlacementError: A rank cannot place its tensors, or none has a key of the model.
    """
    sent = [plain.plan for plain in plans]
    if any(plan.faults for plan in sent):
        raise_faults_of_ranks(NOT_PLACED, {plan.rank: plan.faults for plan in sent})
    return decide(_coordinator(plans, whole, meshes).facts(), whole)


def declared_by(plans: Sequence[PlainPlan], whole: WholeModel | None, meshes: Sequence[Any]) -> str:
    """Return the block by which what all ranks hold passes; empty where none is known.

    Args:
        plans: The plans of all ranks.
        whole: The unsharded model; None where it is not known.
        meshes: The meshes, seen from the coordinator.
    """
    if any(plain.plan.faults for plain in plans):
        return ""
    try:
        _coordinator(plans, whole, meshes).prove()
    except PlacementError as refusal:
        return block_in(str(refusal))
    return str(Proposal())


def _coordinator(
    plans: Sequence[PlainPlan], whole: WholeModel | None, meshes: Sequence[Any]
) -> Coordinator:
    return Coordinator(
        [plain.plan for plain in plans],
        size=world_size(),
        waived={},
        strict=True,
        whole=whole,
        meshes=meshes,
        axes=[plain.axes for plain in plans],
    )


def one_error(failed: CheckpointException) -> Exception:
    """Return the coordinator's refusal, or the error of the first rank that failed."""
    errors = [failed.failures[rank][0] for rank in sorted(failed.failures)]
    error = next((failure for failure in errors if isinstance(failure, PlacementError)), errors[0])
    return error if isinstance(error, Exception) else RuntimeError(str(failed))


def axis_names(mesh: Any) -> tuple[str, ...]:
    """Return the names of the axes of a mesh; none where it has no names, or is no mesh."""
    return tuple(getattr(mesh, "mesh_dim_names", None) or ())


class MeshesByAxes:
    """Several meshes by the names of their axes, as a declaration asks for them.

    Args:
        meshes: The meshes; the first that has the axes is sliced.
    """

    def __init__(self, meshes: Sequence[Any]) -> None:
        self._meshes = meshes

    def __getitem__(self, names: str | tuple[str, ...]) -> Any:
        wanted = {names} if isinstance(names, str) else {*names}
        mesh = next(each for each in self._meshes if wanted <= {*axis_names(each)})
        return mesh[names]
