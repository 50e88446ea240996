"""Which parameter each tensor of a Megatron optimizer belongs to.

A mixed-precision optimizer that is not distributed keeps its tensors by number. The numbers run
over parameter groups, and in a group over the model's parameters in their own order; the groups are
those of weight decay or none, of experts or not (Megatron-LM ``core/optimizer/__init__.py``,
``core/optimizer/optimizer.py``). That order is taken at its word only where counts and shapes agree
with it, and where each float32 copy rounds to the very weight that it is said to be the copy of.

A distributed optimizer keeps flat buffers instead, in the order of its gradient buckets, which is
in no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_placements.formats.megatron.torch_files import same_bits

Path = tuple[str | int, ...]
"""Keys from the top of a file's dict down to a value."""

MASTER = "fp32_param"
"""What the float32 copy of a weight is called, as in ``torch_dist`` checkpoints."""

FLAT = (
    "a distributed optimizer: its flat buffers are in the order of gradient buckets, which is in "
    "no file; load it in Megatron, and save it as torch_dist, --dist-ckpt-optim-fully-reshardable"
)
"""Why the tensors of a distributed optimizer cannot be imported."""

_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq")


class NotRecoverable(Exception):
    """Why the tensors of an optimizer cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a file, in the model's order.

    Attributes:
        chunk: The model chunk that it is of.
        name: Its key there.
        tensor: Its elements.
    """

    chunk: int
    name: str
    tensor: torch.Tensor

    @property
    def is_of_expert(self) -> bool:
        """Whether it is one of a routed expert's."""
        return ".mlp.experts." in f".{self.name}"

    @property
    def decays(self) -> bool:
        """Whether weight decay applies, by Megatron's standard rule."""
        return self.tensor.dim() > 1 and not self.name.endswith(".bias")


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor or number of an optimizer.

    Attributes:
        parameter: Whose.
        name: Which: ``exp_avg``, ``step``, ``fp32_param``.
        path: Where it stands in the file.
    """

    parameter: Parameter
    name: str
    path: Path


def parameters(chunks: Sequence[tuple[int, Mapping[str, Any]]]) -> list[Parameter]:
    """Return the parameters of a file's model chunks, in the model's order."""
    return [
        Parameter(number, name, value)
        for number, chunk in chunks
        for name, value in chunk.items()
        if isinstance(value, torch.Tensor)
        and not name.endswith("_extra_state")
        and name.rpartition(".")[2] not in _BUFFERS
    ]


def optimizer_entries(
    held: Mapping[str, Any], model: Sequence[Parameter], *, flat_files: bool
) -> list[StateEntry]:
    """Return what a file's optimizer holds, each with its parameter.

    Args:
        held: The file.
        model: Its parameters.
        flat_files: Whether files of a distributed optimizer stand beside it.

    Raises:
        NotRecoverable: They cannot be told apart, with the reason.
    """
    if "optimizer" not in held:
        raise NotRecoverable("there is none in the files")
    whole = held["optimizer"]
    parts: list[tuple[Path, Any]] = [(("optimizer",), whole)]
    if isinstance(whole, list):
        parts = [(("optimizer", number), part) for number, part in enumerate(whole)]
    # A stage without experts has an optimizer of them that holds nothing.
    parts = [(path, part) for path, part in parts if not _is_stub(part)]
    found: list[StateEntry] = []
    groups = [group for _, part in parts for group in _groups(part, flat_files)]
    split = any(group.get("is_expert_parallel") for group in groups)
    for path, part in parts:
        found += _entries_of(part, path, model, split)
    taken = {(entry.parameter.chunk, entry.parameter.name) for entry in found}
    left = [p.name for p in model if (p.chunk, p.name) not in taken]
    if left:
        raise NotRecoverable(
            f"{len(left)} of {len(model)} parameters are in no group, the first {left[0]}"
        )
    return found


def _is_stub(part: Any) -> bool:
    return not part or (isinstance(part, dict) and part.get("optimizer", part) is None)


def _groups(part: Any, flat_files: bool) -> list[dict[str, Any]]:
    inner = part.get("optimizer", part) if isinstance(part, dict) else None
    if isinstance(inner, dict) and ("state" not in inner or flat_files):
        raise NotRecoverable(FLAT)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        raise NotRecoverable("it is of no form that is known")
    return list(inner["param_groups"])


def _entries_of(
    part: Mapping[str, Any], at: Path, model: Sequence[Parameter], split: bool
) -> Iterator[StateEntry]:
    inner, path = (part["optimizer"], (*at, "optimizer")) if "optimizer" in part else (part, at)
    masters_key = next((key for key in _MASTERS if key in part), None)
    masters = part[masters_key] if masters_key is not None else None
    for number, group in enumerate(inner["param_groups"]):
        decays = float(group.get("wd_mult", group.get("pre_wd_mult", 1.0))) != 0.0
        members = [
            parameter
            for parameter in model
            if parameter.decays == decays
            and (not split or parameter.is_of_expert == bool(group.get("is_expert_parallel")))
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
                if isinstance(value, torch.Tensor) and value.dim():
                    _check_shape(parameter, name, value)
                yield StateEntry(parameter, name, (*path, "state", key, name))
            if state and "step" not in state and "step" in group:
                yield StateEntry(parameter, "step", (*path, "param_groups", number, "step"))
        if masters is not None and masters_key is not None:
            halves = [p for p in members if p.tensor.dtype in (torch.float16, torch.bfloat16)]
            copies = masters[number] if number < len(masters) else []
            if len(copies) != len(halves):
                raise NotRecoverable(
                    f"{where} has {len(copies)} float32 copies of {len(halves)} weights"
                )
            for position, (parameter, copy) in enumerate(zip(halves, copies, strict=True)):
                _check_shape(parameter, MASTER, copy)
                if not same_bits(copy.to(parameter.tensor.dtype), parameter.tensor):
                    raise NotRecoverable(
                        f"{where}: the float32 copy number {position} does not round to "
                        f"{parameter.name}, so the order is another one"
                    )
                yield StateEntry(parameter, MASTER, (*at, masters_key, number, position))


def _check_shape(parameter: Parameter, name: str, value: torch.Tensor) -> None:
    if value.shape != parameter.tensor.shape:
        raise NotRecoverable(
            f"{name} of {tuple(value.shape)} where {parameter.name} has "
            f"{tuple(parameter.tensor.shape)}, so the order is another one"
        )
