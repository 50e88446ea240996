"""Megatron Core: read off the parameters of a model, as Megatron marks them.

Facts: Megatron-LM ``megatron/core/``, from the first that speaks to the last:

- ``_tensor_parallel_mode`` (``"column"``, ``"row"``, ``"replicated"``) and ``_tp_duplicated``, set
  by ``distributed/fsdp/mcore_fsdp_adapter.py``.
- Experts: ``linear_fc1`` is cut by column and ``linear_fc2`` by row over expert tensor parallelism
  (``tp_axis_map`` in ``extensions/transformer_engine.py``). Their attributes do not say so where
  Transformer Engine made them: it is told of no parallelism there. ``allreduce`` is False only for
  EP > 1 (``extensions/transformer_engine.py``, ``tensor_parallel/layers.py``), so that what is an
  expert is told by ``experts`` in the name, as ``mcore_fsdp_adapter.py`` does.
- ``parallel_mode`` of a Transformer Engine module (``"column"``, ``"row"``, None), which sets
  ``tensor_model_parallel`` on each weight, on that of a duplicated ``TELinear``, too
  (``transformer_engine/pytorch/module/linear.py``).
- ``tensor_model_parallel``, ``partition_dim``, ``partition_stride``
  (``tensor_parallel/layers.py``, ``set_tensor_model_parallel_attributes``).
- ``linear_fc1`` joins gate and up where ``config.gated_linear_unit`` (``transformer/mlp.py``), each
  cut on its own, whatever ``partition_stride`` says. ``linear_qkv`` lies by query group and is cut
  plainly (``transformer/attention.py``).
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

from dcp_placements.errors import PlacementError
from dcp_placements.names.keys import Rename
from dcp_placements.names.renames import Renames
from dcp_placements.names.renumber import Renumber, Replace, contiguous
from dcp_placements.placements import Placements
from dcp_placements.presets.megatron import check_meshes, position, without_axis
from dcp_placements.presets.preset import axis_sizes, rules_of
from dcp_placements.rules.mesh import Mesh
from dcp_placements.rules.placement import CheckpointPlacement, FusedShard

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
NUMBERED_EXPERTS = [
    "experts.local_experts.{}",
    "experts.linear_fc*.weight{}",
    "experts.linear_fc*.bias{}",
]

Cut = tuple[int, int]
"""A dim, and the number of tensors that are joined along it."""


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
    for one model, ``{"model0": ..., "model1": ...}`` for the chunks of a virtual pipeline. Leave
    out ``_extra_state``, which Transformer Engine keeps per rank.

    Args:
        model: The model of this rank, or its chunks, wrapped or not.
        dense_mesh: Axes ``pp``, ``dp``, ``cp``, ``tp``, C order (``megatron_meshes``).
        expert_mesh: Axes ``pp``, ``edp``, ``ep``, ``etp``, C order; None without experts.
        vocab_size: Rows of the vocabulary without padding; None where nothing is padded.
        data_parallel: ``"ddp"`` (with the distributed optimizer, too), ``"fsdp2"``,
            ``"megatron_fsdp"`` or ``"megatron_fsdp_v2"``.

    Raises:
        PlacementError: Meshes that do not fit the model, a combination that Megatron refuses, with
            its reason, or a parameter whose layout cannot be described.
    """
    check_meshes(dense_mesh, expert_mesh, data_parallel)
    chunks = [_unwrapped(chunk) for chunk in (model if isinstance(model, Sequence) else [model])]
    config = next((chunk.config for chunk in chunks if hasattr(chunk, "config")), None)
    table = _Table(config, dense_mesh, expert_mesh, vocab_size)
    _check_config(config, dense_mesh, expert_mesh)
    prefixes = [f"model{at}." for at in range(len(chunks))] if len(chunks) > 1 else [""]
    rename = _rename(chunks, config, expert_mesh)
    placements: dict[str, CheckpointPlacement | None] = {}
    for prefix, chunk in zip(prefixes, chunks, strict=True):
        for name, module, parameter in _parameters(chunk):
            fqn = rename.name(prefix + name).removeprefix("model.")
            placements[fqn] = table.placement(name, module, parameter)
    return Placements(rules_of(placements), rename=rename, waive=_waived(config))


class _Table:
    """The placements of one model: one object per kind, so that tensors that lie alike share it."""

    def __init__(self, config: Any, dense: Mesh, expert: Mesh | None, vocab_size: int | None):
        self.gated = bool(getattr(config, "gated_linear_unit", False))
        self.dense = dense
        self.expert = None if expert is None else without_axis(expert, "ep")
        self.vocab_size = vocab_size
        self.made: dict[Any, CheckpointPlacement] = {}

    def placement(
        self, name: str, module: nn.Module, parameter: nn.Parameter
    ) -> CheckpointPlacement | None:
        expert = _is_expert(name)
        cut = _cut(name, module, parameter, expert=expert, gated=self.gated)
        if cut is None:
            return None
        mesh, axis = (self.expert, "etp") if expert else (self.dense, "tp")
        if mesh is None:
            raise PlacementError(
                f"{name} is an expert's, but there is no expert_mesh=\n"
                "    way out:     expert_mesh= with axes pp, edp, ep, etp (megatron_meshes)"
            )
        rows = None
        if self.vocab_size is not None and name.endswith(VOCABULARY):
            rows = (self.vocab_size, *parameter.shape[1:])
            padded = (parameter.shape[0] * axis_sizes(mesh, axis)[axis], *parameter.shape[1:])
        key = (axis, cut, rows)
        if key not in self.made:
            dim, parts = cut
            self.made[key] = CheckpointPlacement(
                mesh,
                {axis: Shard(dim) if parts == 1 else FusedShard(dim, parts)},
                global_shape=rows,
                padded_shape=None if rows is None else padded,
            )
        return self.made[key]


def _cut(
    name: str, module: nn.Module, parameter: nn.Parameter, *, expert: bool, gated: bool
) -> Cut | None:
    """Return how tensor parallelism cuts a parameter; None for one that all of its ranks hold."""
    owner, _, last = name.rpartition(".")
    role = owner.rpartition(".")[2]
    is_bias = last.startswith("bias")
    fused = 2 if gated and role == "linear_fc1" else 1
    mode = getattr(parameter, "_tensor_parallel_mode", None)
    if mode is None and expert:
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
        told = {k: v for k, v in vars(parameter).items() if "parallel" in k or "partition" in k}
        raise PlacementError(
            f"{name} is marked as tensor-parallel, but not along which dim\n"
            f"    found:       {told}\n"
            "    way out:     set its partition_dim; or rules of your own, asked before these"
        )
    stride = int(getattr(parameter, "partition_stride", 1))
    return dim, max(stride, fused) if dim == 0 else stride


def _is_expert(name: str) -> bool:
    return "experts" in name.split(".")


def _parameters(chunk: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield ``(name, module that owns it, parameter)``, a tied one under each of its names."""
    for owner, module in chunk.named_modules():
        for last, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{owner}.{last}" if owner else last, module, parameter


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP, Float16Module and their like."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def _rename(chunks: Sequence[nn.Module], config: Any, expert_mesh: Mesh | None) -> Renames:
    steps: list[Rename] = []
    ids: dict[int | str, Sequence[int]] = {
        at: _layer_numbers(chunk) for at, chunk in enumerate(chunks)
    }
    total = getattr(config, "num_layers", None)
    if len(chunks) > 1:
        steps.append(Renumber("model{chunk}.decoder.layers.{}", ids, total))
        # The last one is for the pattern itself, which the numbers of all ranks are checked by.
        steps += [Replace(f"model{at}", "model") for at in (*range(len(chunks)), "{chunk}")]
    elif ids[0]:
        steps.append(Renumber("decoder.layers.{}", ids[0], total))
    experts = getattr(config, "num_moe_experts", None)
    if experts and expert_mesh is not None:
        ep = axis_sizes(expert_mesh, "ep")["ep"]
        mine = contiguous([experts // ep] * ep, at=position(expert_mesh, "ep"))
        steps += [Renumber(pattern, mine, experts) for pattern in NUMBERED_EXPERTS]
    return Renames(*steps)


def _layer_numbers(chunk: nn.Module) -> Sequence[int]:
    """Return the numbers in the whole, from 0, of the decoder's layers in local order."""
    numbers: list[int] = []
    for name, module in chunk.named_modules():
        if re.search(r"(^|\.)decoder\.layers\.\d+$", name):
            number = getattr(module, "layer_number", None)
            if number is None:
                raise PlacementError(
                    f"{name} ({type(module).__name__}) has no layer_number, so its place in the "
                    "whole is not known\n"
                    "    way out:     a rename= of your own (dcp_placements.names.renames)"
                )
            numbers.append(int(number) - 1)
    if numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return range(numbers[0], numbers[0] + len(numbers))
    return numbers


def _check_config(config: Any, dense: Mesh, expert: Mesh | None) -> None:
    """Check that the meshes are those that the model was built for."""
    declared = {
        "tensor_model_parallel_size": (dense, "tp"),
        "pipeline_model_parallel_size": (dense, "pp"),
        "context_parallel_size": (dense, "cp"),
    }
    if expert is not None:
        declared["expert_model_parallel_size"] = (expert, "ep")
        declared["expert_tensor_parallel_size"] = (expert, "etp")
    for option, (mesh, axis) in declared.items():
        wanted, found = getattr(config, option, None), axis_sizes(mesh, axis)[axis]
        if wanted is not None and wanted != found:
            raise PlacementError(
                f"the model was built with {option}={wanted}, but axis {axis!r} of the mesh has "
                f"{found} ranks"
            )
    experts = getattr(config, "num_moe_experts", None)
    if experts and expert is not None and experts % axis_sizes(expert, "ep")["ep"]:
        raise PlacementError(f"num_moe_experts={experts} cannot be cut by the mesh's axis 'ep'")


def _waived(config: Any) -> dict[str, str]:
    if getattr(config, "gated_linear_unit", False):
        return {}
    return {"linear_fc1": "gated_linear_unit is off: linear_fc1 is one tensor"}
