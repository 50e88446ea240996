"""Megatron Lite: two fixed meshes, and a placement for each kind of name.

Facts: Megatron-LM ``experimental/lite/megatron/lite/``. The table is what ``PLACEMENT_FN`` and
``EXPERT_CLASSIFIER`` of ``model/*/lite/checkpoint.py`` say (DeepSeek-V4, Kimi K2, Qwen3-MoE), on
the meshes of ``primitive/ckpt/dcp.py``, but for what they leave to communication or get wrong:

- ``gate_up`` and ``fc1`` hold [gate; up] on each rank (``primitive/ckpt/hf_weights.py``,
  ``split_gate_up``).
- ``fc*.weight{i}`` counts this rank's experts (``primitive/modules/experts.py``); here the number
  is that of the whole, and EP is in the name instead of in dim 0.
- ``hc_head`` is replicated, though "head" is in its name; so are ``layer_norm_weight`` inside of
  ``gate_up``, and ``linear_q_down_proj`` and ``linear_kv_down_proj``, though "down" is in theirs.
- ``model_pp{r}`` stands for the same model on every stage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch.distributed.tensor import Shard

from dcp_placements.errors import PlacementError
from dcp_placements.names.renames import Renames
from dcp_placements.names.renumber import Renumber, Replace, contiguous
from dcp_placements.placements import Placements
from dcp_placements.presets.megatron import check_meshes, position, without_axis
from dcp_placements.presets.preset import axis_sizes
from dcp_placements.rules.mesh import Mesh
from dcp_placements.rules.patterns import PlacementRules
from dcp_placements.rules.placement import CheckpointPlacement, FusedShard

VOCABULARY_MULTIPLE = 128
"""``pad_vocab_for_tp`` pads to the least common multiple of this and TP."""


def megatron_lite(
    dense_mesh: Mesh,
    expert_mesh: Mesh | None = None,
    *,
    experts: int | None = None,
    layers: Sequence[int] | None = None,
    num_layers: int | None = None,
    vocabulary: tuple[int, int] | None = None,
    data_parallel: str = "ddp",
) -> Placements:
    """Return the placements of a Megatron Lite model on this rank.

    The state dict is the framework's own: ``{"model_pp{r}": model.state_dict()}`` on stage ``r`` of
    several, ``{"model": ...}`` on a single one; an optimizer's, keyed by name, beside it.

    Args:
        dense_mesh: Axes ``pp``, ``dp``, ``cp``, ``tp``, C order (``megatron_meshes``).
        expert_mesh: Axes ``pp``, ``edp``, ``ep``, ``etp``, C order; None for a dense model.
        experts: Routed experts per layer, over all EP ranks.
        layers: The numbers that this stage's layers have in the whole (``model.layer_indices``),
            where they count from 0 on each stage (Kimi K2, Qwen3-MoE). None where they have the
            numbers of the whole already (DeepSeek-V4).
        num_layers: Layers of all stages: a save that lacks any is refused. None: not checked.
        vocabulary: Rows without padding, and hidden size; None where nothing is padded.
        data_parallel: ``"ddp"``, ``"fsdp2"`` or ``"megatron_fsdp"``.

    Raises:
        PlacementError: Meshes that do not fit each other, experts that EP does not divide, or a
            combination that cannot run, with the reason.
    """
    # Megatron Lite wraps experts over expert data parallelism of their own, so EP and FSDP2 go
    # together there (primitive/optimizers/fsdp2/wrap.py, wrap_fsdp2_module), unlike in Megatron.
    check_meshes(dense_mesh, expert_mesh, "ddp" if data_parallel == "fsdp2" else data_parallel)
    tp = axis_sizes(dense_mesh, "tp")["tp"]
    column = CheckpointPlacement(dense_mesh, {"tp": Shard(0)})
    row = CheckpointPlacement(dense_mesh, {"tp": Shard(1)})
    gated = CheckpointPlacement(dense_mesh, {"tp": FusedShard(0, 2)})
    rows = column
    if vocabulary is not None:
        padded = -(-vocabulary[0] // (m := math.lcm(VOCABULARY_MULTIPLE, tp))) * m
        rows = CheckpointPlacement(
            dense_mesh,
            {"tp": Shard(0)},
            global_shape=vocabulary,
            padded_shape=(padded, vocabulary[1]),
        )
    rules: dict[str | re.Pattern[str], CheckpointPlacement | None] = {"hc_head.*": None}
    renames: list[Renumber | Replace] = []
    if layers is not None:
        # One per place where a parameter's name begins; "mtp.layers" has the numbers of the whole.
        renames.append(Renumber("model*.layers.{}", layers, num_layers))
        renames += [
            Renumber(f"{part}.layers.{{}}", layers, None) for part in ("state", "param_groups")
        ]
    if expert_mesh is not None:
        of_expert = without_axis(expert_mesh, "ep")
        rules["experts.fc1.weight*"] = CheckpointPlacement(of_expert, {"etp": FusedShard(0, 2)})
        rules["experts.fc2.weight*"] = CheckpointPlacement(of_expert, {"etp": Shard(1)})
        renames.append(_expert_numbers(expert_mesh, experts))
    rules |= {
        "eh_proj.linear.weight": column,
        "qkv.linear.weight": column,
        "linear_q_up_proj.linear.weight": column,
        "linear_kv_up_proj.linear.weight": column,
        "attn.proj.linear.weight": row,
        "linear_proj.linear.weight": row,
        "gate_up.weight": gated,
        "gate_up.linear.weight": gated,
        "down.weight": row,
        "down.linear.weight": row,
        "embed.**.weight": rows,
        "embed_tokens.**.weight": rows,
        "mtp_embed.**.weight": rows,
        "head.**.weight": rows,
        "lm_head.**.weight": rows,
    }
    renames.append(Replace("model_pp*", "model"))
    return Placements(PlacementRules(rules, optional=True), rename=Renames(*renames))


def _expert_numbers(expert_mesh: Mesh, experts: int | None) -> Renumber:
    ep = axis_sizes(expert_mesh, "ep")["ep"]
    if experts is None or experts % ep:
        raise PlacementError(
            f"experts={experts} over ep={ep}: give the number of routed experts per layer, which "
            "EP must divide (primitive/utils, ensure_divisible)"
        )
    ids = contiguous([experts // ep] * ep, at=position(expert_mesh, "ep"))
    return Renumber("experts.fc*.weight{}", ids, experts)
