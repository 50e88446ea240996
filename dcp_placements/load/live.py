"""``live=``: do the reads end in the model?

A state dict that was cast, gathered or copied takes every byte that is read, and the model never
sees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dcp_placements._torch import DTensor, has_hooks, is_dtensor_like, local_tensor
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault, PlacementError
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.names.renamed_keys import Path
from dcp_placements.report import LoadReport


def live_faults(
    state_dict: Mapping[str, Any],
    placing: Placing,
    live: torch.nn.Module | Iterable[torch.Tensor],
    report: LoadReport,
    mappings: Mapping[str, Path],
) -> list[Fault]:
    """Return the copies of ``live``'s tensors; those of optimizer state are in the report only.

    A tensor is part of ``live`` when its memory is within the storage of a parameter, buffer or
    tensor of ``live``, or when it has no elements. Any other tensor is a copy if its key names a
    parameter or buffer. Where ``live`` has no names (an iterable), or none that the state dict has,
    it is a copy if it has the shape and the kind of dtype of a tensor of ``live``.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        live: What the load is for.
        report: Takes in the copies.
        mappings: Each key's path in the nested state dict, which gives this rank's own name.
    """
    names = _names(live) if isinstance(live, torch.nn.Module) else set()
    tensors = _tensors(live)
    named = {fqn for fqn in state_dict if names and _is_named(fqn, mappings.get(fqn), names)}
    kinds = {kind for tensor in tensors for kind in _kinds(tensor)}
    ranges = {_range(local_tensor(t) if is_dtensor_like(t) else t) for t in tensors}
    starts = {start: stop for start, stop in ranges if start}
    faults = []
    copies = []
    states = OptimizerStates(state_dict)
    for fqn, value in state_dict.items():
        placed = placing.placed.get(fqn)
        held = placed.tensors if placed is not None else [value]
        if all(_is_live(tensor, starts) for tensor in held):
            continue
        is_state = states.of(fqn) is not None
        of_live = fqn in named if named else any(not kinds.isdisjoint(_kinds(t)) for t in held)
        if is_state or of_live:
            copies.append(fqn)
        if of_live and not is_state:
            faults.append(
                Fault(
                    fqn,
                    "what is read would end in a copy, not in the model",
                    (
                        "likely:      the state dict was cast, gathered or cloned after it was "
                        "taken from the model",
                        "way out:     take it from the model again; or load without live=, and put "
                        "it into the model yourself",
                    ),
                )
            )
    report.copies = tuple(copies)
    return faults


def _tensors(live: torch.nn.Module | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(live, torch.nn.Module):
        return [*live.parameters(), *live.buffers()]
    tensors = list(live)
    others = {
        type(tensor).__name__
        for tensor in tensors
        if not (isinstance(tensor, torch.Tensor) or is_dtensor_like(tensor))
    }
    if others:
        raise PlacementError(
            f"live= has values that are no tensors: {', '.join(sorted(others))}\n"
            "    way out:     live=model, or its tensors: live=model.parameters()"
        )
    return tensors


def _names(live: torch.nn.Module) -> set[str]:
    """Return the names of parameters and buffers, without the wrappers around modules."""
    names = [name for name, _ in live.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in live.named_buffers(remove_duplicate=False)]
    return {_unwrapped(name) for name in names}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _is_named(fqn: str, path: Path | None, names: set[str]) -> bool:
    """Whether a key of the checkpoint, or of this rank, is one of the names or ends in one."""
    for key in (fqn, *([] if path is None else [".".join(map(str, path))])):
        run = _unwrapped(key)
        while run:
            if run in names:
                return True
            run = run.partition(".")[2]
    return False


def _kinds(tensor: Any) -> set[tuple[tuple[int, ...], Any]]:
    """Return shape and kind of dtype; of a DTensor those of the whole and of the local tensor."""
    dtype = "float" if tensor.dtype.is_floating_point else tensor.dtype
    local = local_tensor(tensor) if is_dtensor_like(tensor) else tensor
    return {(tuple(tensor.shape), dtype), (tuple(local.shape), dtype)}


_WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


def fleeting_faults(state_dict: Mapping[str, Any], placing: Placing) -> list[Fault]:
    """Return the DTensor-likes whose ``to_local()`` makes another tensor each time.

    Bytes that are read into such a tensor are lost when the load ends.
    """
    return [
        Fault(
            fqn,
            f"to_local() of this {type(value).__name__} makes a copy: what is read would be lost",
            (
                "likely:      it casts, gathers or unpacks what it holds",
                "way out:     load into the tensor that it holds, and make the copy afterwards",
            ),
        )
        for fqn, value in state_dict.items()
        if type(value) is not DTensor
        and is_dtensor_like(value)
        and (placed := placing.placed.get(fqn)) is not None
        and placed.tensor.numel()
        and _range(local_tensor(value)) != _range(placed.tensor)
    ]


def _is_live(tensor: Any, starts: Mapping[int, int]) -> bool:
    if not isinstance(tensor, torch.Tensor) or has_hooks(tensor) or not tensor.numel():
        return True
    start, stop = _range(tensor)
    return bool(start) and stop <= starts.get(start, 0)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the tensor's storage begins and ends in memory; zeros where it has none."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except (RuntimeError, NotImplementedError):  # wrapper subclasses have no memory of their own
        return 0, 0
