"""Megatron Lite: two fixed meshes, and a placement for each kind of name.

Facts: Megatron-LM ``experimental/lite/megatron/lite/``. The table follows ``PLACEMENT_FN`` and
``EXPERT_CLASSIFIER`` of ``model/*/lite/checkpoint.py`` (DeepSeek-V4, Kimi K2, Qwen3-MoE), on the
meshes of ``primitive/ckpt/dcp.py``, except where those rely on communication or are wrong:

- ``gate_up`` and ``fc1`` hold [gate; up] on each rank (``primitive/ckpt/hf_weights.py``,
  ``split_gate_up``).
- ``fc*.weight{i}`` numbers this rank's experts (``primitive/modules/experts.py``); here the number
  is that in the whole model, so EP is in the name instead of in dim 0.
- ``hc_head`` is replicated, though "head" is in its name; so are ``layer_norm_weight`` inside of
  ``gate_up``, and ``linear_q_down_proj`` and ``linear_kv_down_proj``, though "down" is in theirs.
- ``model_pp{r}`` is the same model on every stage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Shard

from dcp_placements.declaration import Placements
from dcp_placements.errors import PlacementError
from dcp_placements.names.renames import Renames, Renumber, Replace
from dcp_placements.presets.megatron import check_meshes, expert_numbers, without_axis
from dcp_placements.presets.preset import axis_sizes
from dcp_placements.rules.mesh_axes import Mesh
from dcp_placements.rules.patterns import PlacementRules
from dcp_placements.rules.placement import CheckpointPlacement, FusedShard

_COLUMNS = (
    "eh_proj.linear",
    "qkv.linear",
    "linear_q_up_proj.linear",
    "linear_kv_up_proj.linear",
)
_ROW = ("attn.proj.linear", "linear_proj.linear", "down", "down.linear")
_GATED = ("gate_up", "gate_up.linear")
_VOCABULARY = ("embed.**", "embed_tokens.**", "mtp_embed.**", "head.**", "lm_head.**")

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
    several, ``{"model": ...}`` on a single one; optimizer state, keyed by name, beside it.

    Args:
        dense_mesh: Axes ``pp``, ``dp``, ``cp``, ``tp``, C order (``megatron_meshes``).
        expert_mesh: Axes ``pp``, ``edp``, ``ep``, ``etp``, C order; None for a dense model.
        experts: Routed experts per layer, over all EP ranks.
        layers: The numbers of this stage's layers in the whole model (``model.layer_indices``), if
            each stage numbers its layers from 0 (Kimi K2, Qwen3-MoE). None if the state dict has
            the numbers of the whole model already (DeepSeek-V4).
        num_layers: Layers of all stages: a save that lacks any is refused. None: not checked.
        vocabulary: Rows without padding, and hidden size; None without padding.
        data_parallel: ``"ddp"``, ``"fsdp2"`` or ``"megatron_fsdp"``.

    Raises:
        PlacementError: Meshes do not fit each other, EP does not divide the experts, or Megatron
            does not support the combination.
    """
    # Megatron Lite wraps experts over expert data parallelism of their own, so EP and FSDP2 go
    # together there (primitive/optimizers/fsdp2/wrap.py, wrap_fsdp2_module), unlike in Megatron.
    check_meshes(dense_mesh, expert_mesh, "ddp" if data_parallel == "fsdp2" else data_parallel)
    rules: dict[str | re.Pattern[str], CheckpointPlacement | None] = {"hc_head.*": None}
    renames: list[Renumber | Replace] = []
    if layers is not None:
        # A parameter's name begins in these places; "mtp.layers" has the numbers of the whole.
        renames.append(Renumber("model*.layers.{}", layers, num_layers))
        renames += [
            Renumber(f"{level}.layers.{{}}", layers, None) for level in ("state", "param_groups")
        ]
    if expert_mesh is not None:
        ep = axis_sizes(expert_mesh, "ep")["ep"]
        if experts is None or experts % ep:
            raise PlacementError(
                f"experts={experts} over ep={ep}: give the number of routed experts per layer, "
                "which EP must divide (primitive/utils, ensure_divisible)"
            )
        of_expert = without_axis(expert_mesh, "ep")
        rules["experts.fc1.weight*"] = CheckpointPlacement(of_expert, {"etp": FusedShard(0, 2)})
        rules["experts.fc2.weight*"] = CheckpointPlacement(of_expert, {"etp": Shard(1)})
        numbers = expert_numbers(expert_mesh, experts)
        renames.append(Renumber("experts.fc*.weight{}", numbers, experts))
    for names, placement in _dense_placements(dense_mesh, vocabulary).items():
        rules |= dict.fromkeys([f"{name}.weight" for name in names], placement)
    renames.append(Replace("model_pp*", "model"))
    return Placements(PlacementRules(rules, optional=True), rename=Renames(*renames, optional=True))


def _dense_placements(
    mesh: Mesh, vocabulary: tuple[int, int] | None
) -> dict[tuple[str, ...], CheckpointPlacement]:
    """Return the placements outside the experts, by the names of their modules."""
    shapes: dict[str, Any] = {}
    if vocabulary is not None:
        words, hidden = vocabulary
        multiple = math.lcm(VOCABULARY_MULTIPLE, axis_sizes(mesh, "tp")["tp"])
        padded = -(-words // multiple) * multiple
        shapes = {"global_shape": vocabulary, "padded_shape": (padded, hidden)}
    return {
        _COLUMNS: CheckpointPlacement(mesh, {"tp": Shard(0)}),
        _ROW: CheckpointPlacement(mesh, {"tp": Shard(1)}),
        _GATED: CheckpointPlacement(mesh, {"tp": FusedShard(0, 2)}),
        _VOCABULARY: CheckpointPlacement(mesh, {"tp": Shard(0)}, **shapes),
    }
