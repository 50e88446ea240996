"""Storages: two names of one, of which a rule matches only one; tensors without contents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dcp_placements._torch import DTensor, has_hooks
from dcp_placements.bind.placed import Placed, Placing
from dcp_placements.errors import Fault

_PLAIN = torch.Tensor, torch.nn.Parameter
_USUAL = {*_PLAIN, DTensor}

_LOW = 1 << 40
"""Views of a freed storage begin at their offset in it: below this, where little else is."""


def storage_faults(state_dict: Mapping[str, Any], placed: Mapping[str, Placed]) -> list[Fault]:
    """Return a fault for each tensor whose storage was freed, or has two different places.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placed: The places of its tensors; a tensor without one is whole.
    """
    named = [(fqn, place.tensor) for fqn, place in placed.items()]
    if len(placed) < len(state_dict):
        others = [(fqn, value) for fqn, value in state_dict.items() if fqn not in placed]
        named += [(fqn, value) for fqn, value in others if isinstance(value, torch.Tensor)]
    pointers = data_pointers([tensor for _, tensor in named])
    faults = freed_faults(named) if min(pointers, default=_LOW) < _LOW else []
    if faults or len({*pointers} - {0}) == len(pointers) - pointers.count(0):
        return faults
    return _alias_faults(state_dict, placed)


def meta_faults(state_dict: Mapping[str, Any], placing: Placing) -> list[Fault]:
    """Return a fault for each tensor of a save that has no contents.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: The places of its tensors.
    """
    faults = []
    for fqn, value in state_dict.items():
        placed = placing.placed.get(fqn)
        tensors = (value,) if placed is None else placed.tensors
        if fqn not in placing.absent and any(
            isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors
        ):
            faults.append(
                Fault(
                    fqn,
                    "is a meta tensor, which has no contents to save",
                    (
                        "likely:      a model made under torch.device('meta') of which to_empty() "
                        "and the initialisation left some parameters or buffers out",
                        "way out:     materialise it before the save, or leave this key out",
                    ),
                )
            )
    return faults


def nested_faults(state_dict: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each tensor that is made of DTensors: no rank has the whole of it."""
    return [
        Fault(
            fqn,
            f"is a {type(value).__name__} around DTensors, of which every rank has another part",
            (
                "reason:      it would be stored as one object, the part of one rank",
                f"way out:     a DTensor around {type(value).__name__}; or its DTensors under keys "
                "of their own",
            ),
        )
        for fqn, value in state_dict.items()
        if type(value) not in _USUAL and isinstance(value, torch.Tensor) and _has_dtensor(value)
    ]


def _has_dtensor(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return False
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return any(isinstance(part, DTensor) or _has_dtensor(part) for part in parts)


def freed_faults(named: Iterable[tuple[str, torch.Tensor]]) -> list[Fault]:
    """Return a fault for each tensor whose storage has no memory any more: to use it is a crash."""
    return [
        Fault(
            fqn,
            f"the storage of this {tuple(tensor.shape)} {tensor.dtype} tensor was freed",
            (
                "likely:      this is an unsharded parameter of FSDP, or a view of one, that was "
                "taken from the model during a step",
                "way out:     take the state dict from the model anew, or leave this key out",
            ),
        )
        for fqn, tensor in named
        if type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.numel()
        and not tensor.untyped_storage().nbytes()
    ]


def _alias_faults(state_dict: Mapping[str, Any], placed: Mapping[str, Placed]) -> list[Fault]:
    """Return a fault for each name of a view of a storage that has two different places."""
    faults = []
    names: dict[Any, str] = {}
    first_at: dict[int, tuple[str, torch.Tensor]] = {}
    for fqn, value in state_dict.items():
        place = placed.get(fqn)
        tensor = value if place is None else place.tensor
        if place is None and (not isinstance(tensor, torch.Tensor) or has_hooks(tensor)):
            continue
        pointer = _data_pointer(tensor)
        if not pointer:
            continue
        # Nearly always the only tensor there, so its view is needed only when a second comes.
        name, there = first_at.setdefault(pointer, (fqn, tensor))
        if name == fqn:
            continue
        names.setdefault((pointer, _view_of(there)), name)
        first = names.setdefault((pointer, _view_of(tensor)), fqn)
        other = placed.get(first)
        if first == fqn or not tensor.numel() or _lie_alike(place, other):
            continue
        speaks = other is None or (other.rule is None and place is not None)
        ruled, missed = (fqn, first) if speaks else (first, fqn)
        rule = placed[ruled].rule
        likely = f"rule {rule} speaks for {ruled} and misses {missed}"
        way_out = "name both in the rules, with one placement"
        if rule is None:
            lost = "without its DTensor or its attributes" if missed not in placed else "cut anew"
            likely = f"{missed} is a view of {ruled}, {lost}"
            way_out = f"the same tensor under both names; or no {missed} in the state dict"
        faults.append(
            Fault(
                missed,
                f"it is in one storage with {ruled}, but the two lie differently in the checkpoint",
                (
                    f"{ruled}: {_place_text(placed.get(ruled))}",
                    f"{missed}: {_place_text(placed.get(missed))}",
                    f"likely:      {likely}",
                    f"way out:     {way_out}",
                ),
            )
        )
    return faults


def _lie_alike(one: Placed | None, other: Placed | None) -> bool:
    if one is None or other is None:
        placed = one or other
        return placed is None or (
            placed.place.is_whole and tuple(placed.tensor.shape) == placed.global_shape
        )
    return (one.global_shape, one.chunks) == (other.global_shape, other.chunks)


def _place_text(placed: Placed | None) -> str:
    if placed is None:
        return "no rule, the whole tensor"
    axes = placed.place.axes
    if placed.rule is None and not axes:
        return f"{len(placed.chunks)} listed chunks of a {placed.global_shape} tensor"
    mesh = ", ".join(f"{axis.name or 'axis'}={axis.size}" for axis in axes)
    by = "no rule" if placed.rule is None else f"rule {placed.rule}"
    return f"{by}, part of a {placed.global_shape} tensor over ({mesh})"


def _view_of(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return the size and stride of each dim: which elements of its storage a tensor has.

    A tensor and its transpose, or the half of its columns, are different views of one storage.
    """
    strides: Sequence[int] = tensor.stride() if tensor.layout is torch.strided else tensor.shape
    dims = zip(tensor.shape, strides, strict=True)
    return tuple([(size, 0 if size == 1 else stride) for size, stride in dims])


def data_pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return where the elements of each tensor begin in memory; 0 where it has none."""
    try:
        return [tensor.data_ptr() for tensor in tensors]
    except RuntimeError:  # wrapper subclasses and fake tensors have no memory
        return list(map(_data_pointer, tensors))


def _data_pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
