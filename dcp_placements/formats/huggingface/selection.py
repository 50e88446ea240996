"""Which tensors of a checkpoint are the model's, and what the model calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcp_placements.errors import PlacementError, format_names
from dcp_placements.names.optimizer_state import OptimizerStates, possible_parameters
from dcp_placements.offline.checkpoint import Checkpoint, StoredTensor
from dcp_placements.offline.checks.structure import (
    CheckpointFault,
    file_faults,
    place_faults,
    records_by_file,
    tiling_faults,
)
from dcp_placements.offline.declared import matcher


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a checkpoint is wanted.

    Attributes:
        tensors: By the model's own name for it, in the checkpoint's order.
        prefix: What stands before it in the checkpoint's key; empty for nothing.
        left_out: The checkpoint's other keys, sorted.
    """

    tensors: dict[str, StoredTensor]
    prefix: str
    left_out: tuple[str, ...]


def select(
    checkpoint: Checkpoint,
    *,
    prefix: str | None = None,
    optimizer: bool = False,
    exclude: Sequence[str] = (),
) -> Selection:
    """Return the tensors of the model, by the names that the model has for them.

    Args:
        checkpoint: The checkpoint.
        prefix: What stands before the names; keys without it are left out. By default what the
            checkpoint itself says: of ``{"model": model.state_dict()}`` that is ``model``.
        optimizer: Whether optimizer state comes along, under its key in the checkpoint.
        exclude: Patterns of keys to leave out, as in ``PlacementRules``.

    Raises:
        CannotLook: A pattern with an empty component.
        PlacementError: No tensor is left, or what is wanted is not whole.
    """
    unwanted = [matcher(pattern) for pattern in exclude]
    wanted = [
        tensor
        for fqn, tensor in checkpoint.tensors.items()
        if not any(matches(fqn) for matches in unwanted)
    ]
    of_optimizer = OptimizerStates({**checkpoint.tensors, **checkpoint.objects})
    states = [tensor for tensor in wanted if _is_state(tensor.fqn, of_optimizer)]
    model = [tensor for tensor in wanted if not _is_state(tensor.fqn, of_optimizer)]
    head = _told_prefix(checkpoint, model) if prefix is None else prefix.rstrip(".")
    start = f"{head}." if head else ""
    found = {t.fqn.removeprefix(start): t for t in model if t.fqn.startswith(start)}
    if optimizer:
        found |= {tensor.fqn: tensor for tensor in states}
    if not found:
        raise PlacementError(
            f"{checkpoint.path}: none of its {len(checkpoint.tensors)} tensors is wanted"
            + (f": no key begins with {start!r}" if model else "")
            + f"\n    it has:      {format_names(list(checkpoint.tensors), 4) or 'no tensors'}"
        )
    kept = {tensor.fqn for tensor in found.values()}
    # What an index names and no file has is no tensor of the checkpoint, but it should be one.
    lost = {f for f in checkpoint.unfound if not any(matches(f) for matches in unwanted)}
    _check_whole(checkpoint, kept | {fqn for fqn in lost if fqn.startswith(start)})
    rest = sorted({*checkpoint.tensors, *checkpoint.objects} - kept)
    return Selection(found, head, tuple(rest))


def _is_state(fqn: str, states: OptimizerStates) -> bool:
    """Whether a tensor is an optimizer's; one that is stored alone is told by its first name."""
    if states.of(fqn) is not None or ".param_groups." in f".{fqn}.":
        return True
    return fqn.startswith("optim") and bool(possible_parameters(fqn))


def _told_prefix(checkpoint: Checkpoint, tensors: Sequence[StoredTensor]) -> str:
    """Return under which keys the saved state dict was nested, if it was the same for all."""
    told = checkpoint.metadata.planner_data
    heads = set()
    for tensor in tensors:
        path = told.get(tensor.fqn) if isinstance(told, dict) else None
        if not isinstance(path, tuple | list) or ".".join(map(str, path)) != tensor.fqn:
            return ""
        heads.add(".".join(map(str, path[:-1])))
    return heads.pop() if len(heads) == 1 else ""


def _check_whole(checkpoint: Checkpoint, kept: set[str]) -> None:
    records = records_by_file(checkpoint)
    faults: list[CheckpointFault] = [*tiling_faults(checkpoint), *place_faults(checkpoint)]
    faults += file_faults(checkpoint, records)
    told = []
    for fault in faults:
        names = [fqn for fqn in fault.tensors if fqn in kept]
        if names:
            told.append(f"{format_names(names, 4)}: {fault.kind}: {fault.message}")
    if told:
        raise PlacementError(
            f"{checkpoint.path}: what is wanted of it is not whole\n    "
            + "\n    ".join(sorted(told))
        )
