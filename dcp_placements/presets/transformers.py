"""Hugging Face transformers: a model's own plans of tensor and expert parallelism.

Facts: transformers 5.23. Plans are ``model.tp_plan`` and ``model.ep_plan`` (from
``base_model_tp_plan`` and ``base_model_ep_plan`` of ``models/*/configuration_*.py``), a style per
module or parameter, with ``*`` for numbers. What a style does to a parameter is in ``shard_param``
of ``distributed/tensor_parallel.py`` and ``distributed/expert_parallel.py``; where a module has an
EP rule it keeps no TP rule (``distributed/mixin.py``, ``_resolve_parallel_plans``). The router
(``mlp.gate.weight``) and its ``e_score_correction_bias`` are in no plan: they are whole on each
rank, though their dim 0 is the number of experts.

A model that transformers itself has distributed holds DTensors that say the same: then the rules
change nothing, but for fused weights, whose parts a DTensor cannot name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from dcp_placements.errors import PlacementError
from dcp_placements.placements import Placements
from dcp_placements.presets.preset import rules_of, starred
from dcp_placements.rules.mesh import Mesh, format_mesh
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
"""What a style does to a weight, and to a tensor of one dim (a bias); None: whole on each rank."""

UNCUT = {
    "all_reduce",
    "ep_dispatch_experts",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
}
UNCUT |= {"moe_tp_experts", "replicate", "replicated_with_grad_allreduce", "sequence_parallel"}
"""Styles that are about a module's inputs and outputs alone."""


def transformers(model: nn.Module, mesh: Mesh, *, tp: str = "tp", ep: str = "ep") -> Placements:
    """Return the placements of a transformers model whose experts or weights are cut over ``mesh``.

    The state dict has the model's names, under any prefix. Axes of ``mesh`` that are neither ``tp``
    nor ``ep`` hold replicas, or FSDP's shards, of which the DTensors speak.

    Args:
        model: The model, before or after FSDP2.
        mesh: The mesh that it is on, or the part of it that has the two axes.
        tp: The axis of tensor parallelism, if there is one.
        ep: The axis of expert parallelism, if there is one.

    Raises:
        PlacementError: An axis of several ranks that the model has no plan for, or a style that is
            not known here.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if not sizes:
        raise PlacementError(
            f"mesh {format_mesh(mesh)} has no axis names: give mesh_dim_names=, so that {tp!r} and "
            f"{ep!r} can be found"
        )
    kinds = {ep: "ep_plan", tp: "tp_plan"}
    plans = {axis: _plan(model, kind) for axis, kind in kinds.items() if axis in sizes}
    for axis, plan in plans.items():
        if sizes[axis] > 1 and not plan:
            raise PlacementError(
                f"axis {axis!r} of the mesh has {sizes[axis]} ranks, but "
                f"{type(model).__name__} has no {kinds[axis]}\n"
                f"    way out:     model.{kinds[axis]} = {{...}}, or rules of your own"
            )
    made: dict[tuple[str, Any], CheckpointPlacement] = {}
    placements: dict[str, CheckpointPlacement | None] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found = _find(plans, name)
        cut = None if found is None else _cut(found[1], parameter.dim(), name)
        if found is None or cut is None:
            placements[name] = None
            continue
        key = (found[0], cut)
        if key not in made:
            made[key] = CheckpointPlacement(mesh, {found[0]: cut})
        placements[name] = made[key]
    return Placements(rules_of(placements))


def _plan(model: nn.Module, kind: str) -> Mapping[str, str]:
    return getattr(model, kind, None) or {}


def _find(plans: Mapping[str, Mapping[str, str]], name: str) -> tuple[str, str] | None:
    """Return the axis that cuts a parameter and its style; expert parallelism is asked first."""
    parameter = starred(name)
    module = parameter.rpartition(".")[0]
    for axis, plan in plans.items():
        for entry in (parameter, module):
            if entry in plan:
                return axis, plan[entry]
        # Below a module of this plan no other plan speaks.
        parts = module.split(".")
        if any(".".join(parts[:end]) in plan for end in range(1, len(parts))):
            return None
    return None


def _cut(style: str, ndim: int, name: str) -> Any:
    if style in UNCUT:
        return None
    if style not in STYLES:
        raise PlacementError(
            f"{name}: style {style!r} of the model's plan is not known here\n"
            f"    known:       {', '.join(sorted(STYLES))}\n"
            "    way out:     PlacementRules of your own for this model"
        )
    weight, one_dim = STYLES[style]
    return weight if ndim > 1 else one_dim
