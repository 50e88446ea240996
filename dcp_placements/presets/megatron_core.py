"""Megatron Core: placements from the attributes that Megatron sets on a model's parameters.

Facts: Megatron-LM ``megatron/core/``; the first attribute that is set decides:

- ``_tensor_parallel_mode`` (``"column"``, ``"row"``, ``"replicated"``) and ``_tp_duplicated``, set
  by ``distributed/fsdp/mcore_fsdp_adapter.py``.
- Experts: ``linear_fc1`` is cut by column and ``linear_fc2`` by row over expert tensor parallelism
  (``tp_axis_map`` in ``extensions/transformer_engine.py``). Their attributes do not say so if
  Transformer Engine made them, without parallelism. ``allreduce`` is False only for EP > 1
  (``extensions/transformer_engine.py``, ``tensor_parallel/layers.py``), so ``experts`` in the name
  identifies an expert, as in ``mcore_fsdp_adapter.py``.
- ``parallel_mode`` of a Transformer Engine module (``"column"``, ``"row"``, None), which sets
  ``tensor_model_parallel`` on each weight, including that of a duplicated ``TELinear``
  (``transformer_engine/pytorch/module/linear.py``).
- ``tensor_model_parallel``, ``partition_dim``, ``partition_stride``
  (``tensor_parallel/layers.py``, ``set_tensor_model_parallel_attributes``).
- ``linear_fc1`` joins gate and up where ``config.gated_linear_unit`` (``transformer/mlp.py``), each
  cut on its own, whatever ``partition_stride`` says. ``linear_qkv`` is ordered by query group and
  is cut plainly (``transformer/attention.py``).
- A layer's number in the whole: ``layer_number``, from 1 (``transformer/transformer_layer.py``).
  With virtual stages there is one model per chunk, ``model0``, ``model1``, ... in the state dict
  (``megatron/training/checkpointing.py``, ``generate_state_dict``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from dcp_placements.declaration import Placements
from dcp_placements.errors import PlacementError
from dcp_placements.names.rename_results import Rename
from dcp_placements.names.renames import Renames, Renumber, Replace
from dcp_placements.presets.megatron import check_meshes, expert_numbers, without_axis
from dcp_placements.presets.preset import axis_sizes, rules_of
from dcp_placements.rules.mesh_axes import Mesh
from dcp_placements.rules.placement import CheckpointPlacement, FusedShard

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
NUMBERED_EXPERTS = [
    "experts.local_experts.{}",
    "experts.linear_fc*.weight{}",
    "experts.linear_fc*.bias{}",
]

DimCut = tuple[int, int]
"""A dim, and the number of tensors joined along it."""


def megatron_core(
    model: nn.Module | Sequence[nn.Module],
    dense_mesh: Mesh,
    expert_mesh: Mesh | None = None,
    *,
    vocab_size: int | None = None,
    data_parallel: str = "ddp",
) -> Placements:
    """Return the placements of a Megatron Core model on this rank.

    The state dict has the names of the model without its wrappers (``module.``): under any prefix
    for one model, ``{"model0": ..., "model1": ...}`` for the chunks of a virtual pipeline. It must
    not contain ``_extra_state``, which Transformer Engine keeps per rank.

    Args:
        model: The model of this rank, or its chunks, wrapped or not.
        dense_mesh: Axes ``pp``, ``dp``, ``cp``, ``tp``, C order (``megatron_meshes``).
        expert_mesh: Axes ``pp``, ``edp``, ``ep``, ``etp``, C order; None without experts.
        vocab_size: Rows of the vocabulary without padding; None if there is none.
        data_parallel: ``"ddp"`` (also with the distributed optimizer), ``"fsdp2"``,
            ``"megatron_fsdp"`` or ``"megatron_fsdp_v2"``.

    Raises:
        PlacementError: Meshes do not fit the model, Megatron does not support the combination, or
            a parameter's layout cannot be expressed.
    """
    check_meshes(dense_mesh, expert_mesh, data_parallel)
    chunks = [_unwrapped(chunk) for chunk in (model if isinstance(model, Sequence) else [model])]
    config = next((chunk.config for chunk in chunks if hasattr(chunk, "config")), None)
    _check_config(config, dense_mesh, expert_mesh)
    prefixes = [f"model{number}." for number in range(len(chunks))] if len(chunks) > 1 else [""]
    rename = _rename(chunks, config, expert_mesh)
    gated = bool(getattr(config, "gated_linear_unit", False))
    of_expert = None if expert_mesh is None else without_axis(expert_mesh, "ep")
    placements: dict[str, CheckpointPlacement | None] = {}
    for prefix, chunk in zip(prefixes, chunks, strict=True):
        for name, module, parameter in _parameters(chunk):
            fqn = rename.name(prefix + name).removeprefix("model.")
            is_expert = "experts" in name.split(".")
            cut = _cut(name, module, parameter, is_expert=is_expert, gated=gated)
            if cut is None:
                placements[fqn] = None
                continue
            mesh, axis = (of_expert, "etp") if is_expert else (dense_mesh, "tp")
            if mesh is None:
                raise PlacementError(
                    f"{name} is an expert's, but there is no expert_mesh=\n"
                    "    way out:     expert_mesh= with axes pp, edp, ep, etp (megatron_meshes)"
                )
            placements[fqn] = _placement(name, cut, parameter, mesh, axis, vocab_size)
    waive = {} if gated else {"linear_fc1": "gated_linear_unit is off: linear_fc1 is one tensor"}
    return Placements(rules_of(placements), rename=rename, waive=waive)


def _placement(
    name: str, cut: DimCut, parameter: nn.Parameter, mesh: Mesh, axis: str, vocab_size: int | None
) -> CheckpointPlacement:
    dim, parts = cut
    shapes: dict[str, Any] = {}
    if vocab_size is not None and name.endswith(VOCABULARY):
        rows, *rest = parameter.shape
        padded = rows * axis_sizes(mesh, axis)[axis]
        shapes = {"global_shape": (vocab_size, *rest), "padded_shape": (padded, *rest)}
    shard = Shard(dim) if parts == 1 else FusedShard(dim, parts)
    return CheckpointPlacement(mesh, {axis: shard}, **shapes)


def _cut(
    name: str, module: nn.Module, parameter: nn.Parameter, *, is_expert: bool, gated: bool
) -> DimCut | None:
    """Return how tensor parallelism cuts a parameter; None if it is replicated."""
    owner, _, last = name.rpartition(".")
    role = owner.rpartition(".")[2]
    is_bias = last.startswith("bias")
    fused = 2 if gated and role == "linear_fc1" else 1
    mode = getattr(parameter, "_tensor_parallel_mode", None)
    if mode is None and is_expert:
        if re.fullmatch(r"weight[12]", last) and role == "experts":
            raise PlacementError(
                f"{name}: GroupedMLP joins the experts of a rank along one dim and reads them as "
                "[experts, ...] (transformer/moe/experts.py); no placement can say so\n"
                "    way out:     TEGroupedMLP or SequentialMLP: moe_use_legacy_grouped_gemm=False"
            )
        mode = {"linear_fc1": "column", "linear_fc2": "row"}.get(role, "replicated")
    if mode is None and getattr(parameter, "_tp_duplicated", False):
        mode = "replicated"
    if mode is None and hasattr(module, "parallel_mode"):
        mode = "replicated" if last.startswith("layer_norm") else module.parallel_mode
        mode = mode or "replicated"
    if mode is not None:
        if mode == "replicated" or (mode == "row" and is_bias):
            return None
        return (0, fused) if mode == "column" else (1, 1)
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim = int(getattr(parameter, "_tp_partition_dim", getattr(parameter, "partition_dim", -1)))
    if dim < 0:
        marks = {k: v for k, v in vars(parameter).items() if "parallel" in k or "partition" in k}
        raise PlacementError(
            f"{name} is marked as tensor-parallel, but not along which dim\n"
            f"    found:       {marks}\n"
            "    way out:     set its partition_dim; or your own rules, matched before these"
        )
    stride = int(getattr(parameter, "partition_stride", 1))
    return dim, max(stride, fused) if dim == 0 else stride


def _parameters(chunk: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield ``(name, module that owns it, parameter)``, a tied one under each of its names."""
    for owner, module in chunk.named_modules():
        for last, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{owner}.{last}" if owner else last, module, parameter


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers such as DDP and Float16Module."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def _rename(chunks: Sequence[nn.Module], config: Any, expert_mesh: Mesh | None) -> Renames:
    steps: list[Rename] = []
    ids: dict[int | str, Sequence[int]] = {
        number: _layer_numbers(chunk) for number, chunk in enumerate(chunks)
    }
    total = getattr(config, "num_layers", None)
    if len(chunks) > 1:
        steps.append(Renumber("model{chunk}.decoder.layers.{}", ids, total))
        # The last one renames the pattern itself, which the check of all ranks' numbers uses.
        steps += [Replace(f"model{number}", "model") for number in (*range(len(chunks)), "{chunk}")]
    elif ids[0]:
        steps.append(Renumber("decoder.layers.{}", ids[0], total))
    experts = getattr(config, "num_moe_experts", None)
    if experts and expert_mesh is not None:
        numbers = expert_numbers(expert_mesh, experts)
        steps += [Renumber(pattern, numbers, experts) for pattern in NUMBERED_EXPERTS]
    return Renames(*steps, optional=True)


def _layer_numbers(chunk: nn.Module) -> Sequence[int]:
    """Return the numbers in the whole model, from 0, of the decoder's layers in local order."""
    numbers: list[int] = []
    for name, module in chunk.named_modules():
        if re.search(r"(^|\.)decoder\.layers\.\d+$", name):
            number = getattr(module, "layer_number", None)
            if number is None:
                raise PlacementError(
                    f"{name} ({type(module).__name__}) has no layer_number, so its number in the "
                    "whole model is unknown\n"
                    "    way out:     your own rename= (dcp_placements.names.renames)"
                )
            numbers.append(int(number) - 1)
    consecutive = range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
    return consecutive if numbers == list(consecutive) else numbers


def _check_config(config: Any, dense: Mesh, expert: Mesh | None) -> None:
    """Check that the model was built for these meshes."""
    declared = {
        "tensor_model_parallel_size": (dense, "tp"),
        "pipeline_model_parallel_size": (dense, "pp"),
        "context_parallel_size": (dense, "cp"),
    }
    if expert is not None:
        declared["expert_model_parallel_size"] = (expert, "ep")
        declared["expert_tensor_parallel_size"] = (expert, "etp")
    for option, (mesh, axis) in declared.items():
        wanted, size = getattr(config, option, None), axis_sizes(mesh, axis)[axis]
        if wanted is not None and wanted != size:
            raise PlacementError(
                f"the model was built with {option}={wanted}, but axis {axis!r} of the mesh has "
                f"{size} ranks"
            )
    experts = getattr(config, "num_moe_experts", None)
    if experts and expert is not None and experts % axis_sizes(expert, "ep")["ep"]:
        raise PlacementError(f"num_moe_experts={experts} cannot be cut by the mesh's axis 'ep'")
