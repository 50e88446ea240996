"""What names say: experts, fused projections, and the axes of meshes.

Names are asked for hints in messages alone; no tensor is placed by its name. For example::

    NUMBERED_EXPERT   "layers.0.mlp.experts.7.w1.weight"
    QKV               "layers.0.self_attn.qkv_proj.weight"
    EXPERT_AXIS       "ep"
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NUMBERED_EXPERT = re.compile(r"experts\.(?:\d+|[\w.]*(?:weight|bias)\d+)(?:\.|$)")
"""One tensor per expert: distinct by its number, if names are renamed to global ones."""
EXPERTS = re.compile(r"(?:^|\.)(?:local_|routed_|inner_)?experts(?:\.|$)")


_NAME_END = r"(?:\.|$)"

# Megatron's linear_qkv and Megatron Lite's qkv.linear are laid out per query group: not among them.
_QKV = {
    ("Q", "K", "V"): r"(?:to_)?qkv(?!\.linear)(?:_proj)?|query_key_value|c_attn|[Ww]qkv|W_pack"
    r"|in_proj(?=_weight|_bias)",
}
_GATE_UP = {
    ("up", "gate"): r"up_gate(?:_proj)?",
    ("gate", "up"): r"gate_(?:and_)?up(?:_proj)?|proj_gate_up|linear_fc1",
    ("w1", "w3"): r"w13|w1_?w3",
    ("w1", "w2"): r"w12",
    (): r"in_proj(?!_weight|_bias)",
}
"""Names of fused projections, by the names of what they join, in order."""


def _joining(names: Iterable[str], end: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|\.)(?:{'|'.join(names)}){end}")


QKV = _joining(_QKV.values(), rf"(?:_weight|_bias)?{_NAME_END}")
GATE_UP = _joining(_GATE_UP.values(), rf"(?:_weight|_bias)?{_NAME_END}")

_NAMES_OF_PARTS = [
    (_joining([name], rf"(?:_\w+)?{_NAME_END}"), parts) for parts, name in (_QKV | _GATE_UP).items()
]
"""The names with any ending, as quantized elements have (gate_up_proj_blocks); and their parts."""


def parts_by_name(fqn: str, count: int) -> tuple[str, ...]:
    """Return the names of the tensors that one joins, as far as its own name tells them.

    >>> parts_by_name("layers.0.attn.qkv_proj.weight", 3), parts_by_name("layers.0.w", 2)
    (('Q', 'K', 'V'), ())

    Args:
        fqn: The key.
        count: The number of tensors.
    """
    for pattern, names in _NAMES_OF_PARTS:
        if pattern.search(fqn) and len(names) == count:
            return names
    return ()


# Parameters of which every expert-parallel rank has a copy.
COPIED_BY_NAME = re.compile(
    r"(?:^|\.)(?:router|gate|(?:self_)?att(?:n|ention)|(?:\w+_)?(?:layer)?norm\d*"
    r"|shared_experts?|expert_bias)(?:\.|$)"
)
# The two names of a tied weight. Several models call their head an output, or a projection.
NAMES_HEAD = re.compile(
    r"(?:^|\.)(?:(?:\w+_)?head|output(?:_layer|_proj(?:ection)?)?|embed_out|unembed(?:ding)?)(?:\.|$)"
)
NAMES_EMBEDDING = re.compile(
    r"(?:^|\.)(?:(?:\w+_)?embed(?:ding|dings|_tokens|_in|der)?s?|wte|shared)(?:\.|$)"
)
EXTRA_STATE = "_extra_state"
"""The last component of what torch stores of a module's ``get_extra_state``."""

NAMES_EXPERT = re.compile(r"(?<!shared_)expert(?!_bias)")
TENSOR_AXIS = re.compile(r"^(?:e?tp|tensor(?:_.*)?|model_parallel)$")
EXPERT_AXIS = re.compile(r"^(?:ep|expert(?:_parallel|_model_parallel)?)$")
DATA_AXIS = re.compile(r"^(?:.*fsdp.*|e?dp(?:_.*)?|data(?:_.*)?)$")

WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Components that ``torch.compile``, DDP, FSDP and checkpointing put into the names of weights."""

RUNNING_STATISTIC = re.compile(r"(?:^|[._])(?:running_(?:mean|var)|num_batches_tracked)$")
"""Buffers of ``BatchNorm``, in which each data-parallel rank has the means of its own batches."""
