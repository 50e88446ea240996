"""Do the reads end in the model: destinations against live storage.

A state dict that was cast, gathered or copied on its way takes every byte that is read, and the
model never sees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dcp_placements.errors import Fault
from dcp_placements.interop import DTensor, has_hooks, is_dtensor_like, local_tensor
from dcp_placements.optimizer_state import OptimizerStates
from dcp_placements.placing import Placing
from dcp_placements.report import LoadReport


def live_faults(
    state_dict: Mapping[str, Any],
    placing: Placing,
    live: torch.nn.Module | Iterable[torch.Tensor],
    report: LoadReport,
) -> list[Fault]:
    """Return the tensors that are no part of ``live``; optimizer state is noted in the report only.

    A tensor is part of it when its memory lies in the storage of one of its parameters, buffers
    or tensors. Tensors without elements are.
    """
    tensors = (
        [*live.parameters(), *live.buffers()] if isinstance(live, torch.nn.Module) else list(live)
    )
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
        copies.append(fqn)
        if states.of(fqn) is None:
            faults.append(
                Fault(
                    fqn,
                    "what is read would end in a copy, not in the model",
                    (
                        "likely:      the state dict was cast, gathered or cloned after it was "
                        "taken from the model",
                        "way out:     take it anew; or load without live=, and put it into the "
                        "model yourself",
                    ),
                )
            )
    report.copies = tuple(copies)
    return faults


def fleeting_faults(state_dict: Mapping[str, Any], placing: Placing) -> list[Fault]:
    """Return the DTensor-likes whose ``to_local()`` makes another tensor each time.

    What is read into such a one is gone when the load ends.
    """
    return [
        Fault(
            fqn,
            f"to_local() of this {type(value).__name__} makes a copy: what is read would be lost",
            (
                "likely:      it casts, gathers or unpacks what it holds",
                "way out:     load into the tensor that it holds, and let it make its copy after",
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
