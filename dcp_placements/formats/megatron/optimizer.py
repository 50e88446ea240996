"""Which parameter each tensor of a Megatron optimizer belongs to.

A mixed-precision optimizer that is not distributed numbers its tensors. The numbers run over the
parameter groups, and within a group over the model's parameters in the model's order; groups are
with or without weight decay, and of experts or not (Megatron-LM ``core/optimizer/__init__.py``,
``core/optimizer/optimizer.py``). That order is trusted only if counts and shapes agree with it, and
if each float32 copy rounds to its weight.

A distributed optimizer keeps flat buffers instead, in the order of its gradient buckets, which is
in no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_placements.formats.megatron.files import model_chunks
from dcp_placements.offline.differences.comparing import same_bits

KeyPath = tuple[str | int, ...]
"""Keys from the top of a file's dict down to a value."""

MASTER = "fp32_param"
"""The name of the float32 copy of a weight, as in ``torch_dist`` checkpoints."""

FLAT = (
    "a distributed optimizer: its flat buffers are in the order of gradient buckets, which is in "
    "no file; load it in Megatron, and save it as torch_dist, --dist-ckpt-optim-fully-reshardable"
)
"""Why the tensors of a distributed optimizer cannot be imported."""

_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq")


class NotRecoverable(Exception):
    """Why the parameters of an optimizer's tensors are unknown."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor or number of an optimizer."""

    chunk: int  # the model chunk of its parameter
    parameter: str  # the parameter's name there
    name: str  # the name of the state: ``exp_avg``, ``step``, ``fp32_param``
    path: KeyPath  # its keys in the file


@dataclass(frozen=True, slots=True)
class _Parameter:
    chunk: int
    name: str
    tensor: torch.Tensor

    @property
    def is_of_expert(self) -> bool:
        return ".mlp.experts." in f".{self.name}"

    @property
    def decays(self) -> bool:
        """Whether weight decay applies, by Megatron's standard rule."""
        return self.tensor.dim() > 1 and not self.name.endswith(".bias")

    def entry(self, name: str, value: Any, path: KeyPath) -> StateEntry:
        """Return the entry of its state; a tensor must have its shape."""
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != self.tensor.shape:
            raise NotRecoverable(
                f"{name} of {tuple(value.shape)} where {self.name} has "
                f"{tuple(self.tensor.shape)}, so the order is another one"
            )
        return StateEntry(self.chunk, self.name, name, path)


def optimizer_entries(contents: Mapping[str, Any], *, has_flat_files: bool) -> list[StateEntry]:
    """Return the optimizer state in a file, with the parameter of each tensor.

    Args:
        contents: Of the file.
        has_flat_files: Whether files of a distributed optimizer are beside it.

    Raises:
        NotRecoverable: The parameters of the tensors are unknown, with the reason.
    """
    if "optimizer" not in contents:
        raise NotRecoverable("there is none in the files")
    model = [
        _Parameter(number, name, value)
        for number, chunk in model_chunks(contents)
        for name, value in chunk.items()
        if isinstance(value, torch.Tensor)
        and not name.endswith("_extra_state")
        and name.rpartition(".")[2] not in _BUFFERS
    ]
    whole = contents["optimizer"]
    parts: list[tuple[KeyPath, Any]] = [(("optimizer",), whole)]
    if isinstance(whole, list):
        parts = [(("optimizer", number), part) for number, part in enumerate(whole)]
    # A stage without experts has an empty optimizer for them.
    parts = [(path, part) for path, part in parts if not _is_empty(part)]
    groups = [group for _, part in parts for group in _groups(part, has_flat_files)]
    by_experts = any(group.get("is_expert_parallel") for group in groups)
    entries = [e for path, part in parts for e in _part_entries(part, path, model, by_experts)]
    with_state = {(entry.chunk, entry.parameter) for entry in entries}
    without = [p.name for p in model if (p.chunk, p.name) not in with_state]
    if without:
        raise NotRecoverable(
            f"{len(without)} of {len(model)} parameters are in no group, the first {without[0]}"
        )
    return entries


def _is_empty(part: Any) -> bool:
    return not part or (isinstance(part, dict) and part.get("optimizer", part) is None)


def _groups(part: Any, has_flat_files: bool) -> list[dict[str, Any]]:
    inner = part.get("optimizer", part) if isinstance(part, dict) else None
    if isinstance(inner, dict) and ("state" not in inner or has_flat_files):
        raise NotRecoverable(FLAT)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        raise NotRecoverable("its form is unknown")
    return list(inner["param_groups"])


def _part_entries(
    part: Mapping[str, Any], at: KeyPath, model: Sequence[_Parameter], by_experts: bool
) -> Iterator[StateEntry]:
    """Yield the entries of one optimizer."""
    inner, path = (part["optimizer"], (*at, "optimizer")) if "optimizer" in part else (part, at)
    masters_key = next((key for key in _MASTERS if part.get(key) is not None), None)
    for number, group in enumerate(inner["param_groups"]):
        decays = float(group.get("wd_mult", group.get("pre_wd_mult", 1.0))) != 0.0
        members = [
            parameter
            for parameter in model
            if parameter.decays == decays
            and (not by_experts or parameter.is_of_expert == bool(group.get("is_expert_parallel")))
        ]
        ids = group.get("params", [])
        where = f"group {number} (weight decay {'on' if decays else 'off'})"
        if len(ids) != len(members):
            raise NotRecoverable(
                f"{where} has {len(ids)} parameters, where the model has {len(members)} such"
            )
        for parameter, key in zip(members, ids, strict=True):
            state = inner["state"].get(key, {})
            for name, value in state.items():
                yield parameter.entry(name, value, (*path, "state", key, name))
            if state and "step" not in state and "step" in group:
                yield parameter.entry("step", None, (*path, "param_groups", number, "step"))
        if masters_key is not None:
            masters, at_group = part[masters_key], (*at, masters_key, number)
            copies = masters[number] if number < len(masters) else []
            yield from _master_entries(members, copies, at_group, where)


def _master_entries(
    members: Sequence[_Parameter], copies: Sequence[torch.Tensor], at: KeyPath, where: str
) -> Iterator[StateEntry]:
    """Yield the float32 copies of a group's 16-bit weights; each must round to its weight."""
    halves = [p for p in members if p.tensor.dtype in (torch.float16, torch.bfloat16)]
    if len(copies) != len(halves):
        raise NotRecoverable(f"{where} has {len(copies)} float32 copies of {len(halves)} weights")
    for position, (parameter, copy) in enumerate(zip(halves, copies, strict=True)):
        entry = parameter.entry(MASTER, copy, (*at, position))
        if not same_bits(copy.to(parameter.tensor.dtype), parameter.tensor):
            raise NotRecoverable(
                f"{where}: the float32 copy number {position} does not round to "
                f"{parameter.name}, so the order is another one"
            )
        yield entry
