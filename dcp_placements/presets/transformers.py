"""Hugging Face transformers: a model's own plans for tensor and expert parallelism.

Facts: transformers 5.23. Plans are ``model.tp_plan`` and ``model.ep_plan`` (from
``base_model_tp_plan`` and ``base_model_ep_plan`` of ``models/*/configuration_*.py``), a style per
module or parameter, with ``*`` for numbers. ``shard_param`` of ``distributed/tensor_parallel.py``
and ``distributed/expert_parallel.py`` defines the effect of a style; a module with an EP rule keeps
no TP rule (``distributed/mixin.py``, ``_resolve_parallel_plans``). The router (``mlp.gate.weight``)
and its ``e_score_correction_bias`` are in no plan: they are replicated, though their dim 0 is the
number of experts.

If transformers itself has distributed the model, its DTensors have the same placements, and the
rules change nothing except for fused weights, whose parts a DTensor cannot express.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from dcp_placements.declaration import Placements
from dcp_placements.errors import PlacementError
from dcp_placements.presets.preset import rules_of, starred
from dcp_placements.rules.mesh_axes import Mesh, format_mesh
from dcp_placements.rules.placement import CheckpointPlacement, FusedShard

FUSED = 2  # gate and up

STYLES: dict[str, tuple[Any, Any]] = {
    "colwise": (Shard(-2), Shard(-1)),
    "colwise_rep": (Shard(-2), Shard(-1)),
    "colwise_gather_output": (Shard(-2), Shard(-1)),
    "rowwise": (Shard(-1), None),
    "rowwise_rep": (Shard(-1), None),
    "rowwise_split_input": (Shard(-1), None),
    "packed_colwise": (FusedShard(-2, FUSED), Shard(-1)),
    "packed_rowwise": (FusedShard(-1, FUSED), None),
    "embedding_rowwise": (Shard(0), None),
    "embedding_colwise": (Shard(1), None),
    "grouped_gemm": (Shard(0), Shard(0)),
}
"""The placement of a weight, and of a tensor of one dim (a bias); None: replicated."""

UNCUT = {
    *("all_reduce", "ep_dispatch_experts", "local_params", "mla_kv_a_proj", "moe_identity_expert"),
    *("moe_tp_experts", "replicate", "replicated_with_grad_allreduce", "sequence_parallel"),
}
"""Styles that concern only a module's inputs and outputs."""


def transformers(model: nn.Module, mesh: Mesh, *, tp: str = "tp", ep: str = "ep") -> Placements:
    """Return the placements of a transformers model whose experts or weights are cut over ``mesh``.

    The state dict has the model's names, under any prefix. Axes of ``mesh`` other than ``tp`` and
    ``ep`` hold replicas, or FSDP's shards, which the DTensors describe.

    Args:
        model: The model, before or after FSDP2.
        mesh: The model's mesh, or the part of it that has the two axes.
        tp: The axis of tensor parallelism, if there is one.
        ep: The axis of expert parallelism, if there is one.

    Raises:
        PlacementError: The model has no plan for an axis of several ranks, or a style is unknown.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if not sizes:
        raise PlacementError(
            f"mesh {format_mesh(mesh)} has no axis names: give mesh_dim_names=, so that {tp!r} and "
            f"{ep!r} can be found"
        )
    kinds = {ep: "ep_plan", tp: "tp_plan"}
    plans = {
        axis: getattr(model, kind, None) or {} for axis, kind in kinds.items() if axis in sizes
    }
    for axis, plan in plans.items():
        if sizes[axis] > 1 and not plan:
            raise PlacementError(
                f"axis {axis!r} of the mesh has {sizes[axis]} ranks, but "
                f"{type(model).__name__} has no {kinds[axis]}\n"
                f"    way out:     model.{kinds[axis]} = {{...}}, or your own rules"
            )
    placements: dict[str, CheckpointPlacement | None] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        axis, style = _axis_and_style(plans, name)
        cut = _cut(style, parameter.dim(), name)
        placements[name] = None if cut is None else CheckpointPlacement(mesh, {axis: cut})
    return Placements(rules_of(placements))


def _axis_and_style(plans: Mapping[str, Mapping[str, str]], name: str) -> tuple[str, str]:
    """Return the axis that cuts a parameter, and its style; the plan of the first axis wins."""
    parameter = starred(name)
    module = parameter.rpartition(".")[0]
    for axis, plan in plans.items():
        for entry in (parameter, module):
            if entry in plan:
                return axis, plan[entry]
        # Below a module of this plan no other plan applies.
        names = module.split(".")
        if any(".".join(names[:end]) in plan for end in range(1, len(names))):
            break
    return "", "replicate"


def _cut(style: str, ndim: int, name: str) -> Any:
    if style in UNCUT:
        return None
    if style not in STYLES:
        raise PlacementError(
            f"{name}: style {style!r} of the model's plan is not known\n"
            f"    known:       {', '.join(sorted(STYLES))}\n"
            "    way out:     your own PlacementRules for this model"
        )
    weight, one_dim = STYLES[style]
    return weight if ndim > 1 else one_dim
