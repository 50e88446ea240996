"""Megatron Core by names alone: for files, where there is no model.

Facts: Megatron-LM ``megatron/core/``. ``linear_qkv`` is ordered by query group, and its rows are
cut plainly, even through a group (``transformer/attention.py``); ``linear_fc1`` is gate over up on
each rank (``transformer/mlp.py``); norms, routers, and biases of weights that are cut by row are
replicated; experts are cut by expert tensor parallelism (``transformer/moe/experts.py``).
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Shard

from dcp_placements.presets.megatron_core import VOCABULARY
from dcp_placements.rules.mesh import Mesh
from dcp_placements.rules.patterns import PlacementRules
from dcp_placements.rules.placement import CheckpointPlacement, FusedShard

_COLUMN = ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "eh_proj")
_REPLICATED = (
    *("*norm.weight", "*norm.bias", "*layer_norm_weight", "*layer_norm_bias"),
    *("router.weight", "router.bias", "router.expert_bias", "shared_experts.gate_weight"),
    *("linear_q_down_proj.weight", "linear_kv_down_proj.weight"),
    *("position_embeddings.weight", "tokentype_embeddings.weight"),
)


def megatron_core_names(
    tp: Mesh, etp: Mesh, *, gated: bool, vocabulary: tuple[int, int, int] | None = None
) -> PlacementRules:
    """Return rules for Megatron Core's names; a replicated tensor has a rule that is None.

    Args:
        tp: One axis, over the tensor-parallel ranks.
        etp: One axis, over the tensor-parallel ranks of an expert.
        gated: Whether ``linear_fc1`` joins gate and up.
        vocabulary: Rows of the whole vocabulary without and with padding, and hidden size; None
            without padding.
    """
    fc1 = [FusedShard(0, 2) if gated else Shard(0)]
    column, row = CheckpointPlacement(tp, [Shard(0)]), CheckpointPlacement(tp, [Shard(1)])
    rules: dict[Any, CheckpointPlacement | None] = {}
    for expert in ("experts.linear_{}*", "experts.local_experts.*.linear_{}"):
        for kind in ("weight", "bias"):
            rules[expert.format(f"fc1.{kind}")] = CheckpointPlacement(etp, fc1)
        rules[expert.format("fc2.weight")] = CheckpointPlacement(etp, [Shard(1)])
        rules[expert.format("fc2.bias")] = None
    rules |= dict.fromkeys(_REPLICATED)
    for name in VOCABULARY:
        rules[name] = column
        if vocabulary is not None:
            words, padded, hidden = vocabulary
            tail = () if name.endswith("bias") else (hidden,)
            rules[name] = CheckpointPlacement(
                tp, [Shard(0)], global_shape=(words, *tail), padded_shape=(padded, *tail)
            )
    for kind in ("weight", "bias"):
        rules |= {f"{name}.{kind}": column for name in _COLUMN}
        rules[f"linear_fc1.{kind}"] = CheckpointPlacement(tp, fc1)
    for name in ("linear_proj", "linear_fc2"):
        rules |= {f"{name}.weight": row, f"{name}.bias": None}
    return PlacementRules(rules)
