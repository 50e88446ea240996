"""Tensors of the whole model that a checkpoint has in part or not at all, and what would save them.

Of a save by torch's planners on ``pp=2, etp=2``, whose stages counted their layers from 0::

    LostTensor("layers.0.w1", (4, 6), (8, 6), "half of dim 0 is stored", '{"tp": Shard(0)}')
    LostTensor("layers.2.w1", None, (8, 6), "not stored", 'rename=Renumber("layers.{}", ...)')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dcp_placements.layout.boxes import Shape
from dcp_placements.names.known_names import EXPERTS, GATE_UP, QKV
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.short_text import folded_keys, natural_key, numbers_in
from dcp_placements.table.table import holding_of
from dcp_placements.table.whole import WholeModel, compare_with_whole
from dcp_placements.table.world import World


@dataclass(frozen=True, slots=True)
class LostTensor:
    """A tensor of the whole model that the checkpoint does not have as the model has it."""

    fqn: str  # its key
    stored: Shape | None  # the shape that is stored; None where it is not
    whole: Shape | None  # its shape in the whole model; None where the model has no such key
    reason: str  # the difference
    declaration: str  # what a save would have declared to hold all of it; empty if that is open

    @property
    def difference(self) -> str:
        """The two shapes, and the reason: ``(4, 6) of (8, 6): 1 of 2 parts along dim 0``."""
        shapes = [str(shape) for shape in (self.stored, self.whole) if shape is not None]
        return f"{' of '.join(shapes)}: {self.reason}" if shapes else self.reason


class ComparedWithWhole(NamedTuple):
    """A checkpoint, compared with the whole model.

    Attributes:
        lost: Tensors that differ.
        notes: Levels and tensors that are not compared, and why.
        text: The number of keys that were compared, and the tensors that were not.
    """

    lost: tuple[LostTensor, ...]
    notes: tuple[str, ...]
    text: str


def compared_with_whole(checkpoint: Checkpoint, whole: WholeModel) -> ComparedWithWhole:
    """Return what a checkpoint lacks of the whole model; no data is read."""
    keys = [*checkpoint.tensors, *checkpoint.objects]
    states = OptimizerStates(dict.fromkeys(keys))
    values: dict[str, object] = {
        fqn: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for fqn, tensor in checkpoint.tensors.items()
    }
    values.update(dict.fromkeys(checkpoint.objects))
    world = World([holding_of(values, {}).packed()])
    compared = compare_with_whole(whole, world, states)
    shapes = compared.shapes()
    stored = {fqn: tensor.shape for fqn, tensor in checkpoint.tensors.items()}
    of_stored, of_whole = _numbers(stored), _numbers(shapes)
    lost = []
    for fault in compared.faults:
        own, wanted = stored.get(fault.fqn), shapes.get(fault.fqn)
        reason, declaration = fault.headline, ""
        if own is not None and wanted is not None:
            reason, declaration = _cut(fault.fqn, own, wanted) or (reason, "")
        elif wanted is not None:
            reason, declaration = "not stored", _numbered(fault.fqn, of_stored, of_whole)
        lost.append(LostTensor(fault.fqn, own, wanted, reason, declaration))
    lost.sort(key=lambda tensor: natural_key(tensor.fqn))
    return ComparedWithWhole(tuple(lost), tuple(map(str, compared.notes)), compared.text)


def _cut(fqn: str, stored: Shape, whole: Shape) -> tuple[str, str] | None:
    """Return how much of a tensor is stored, and the placements of a save that holds all of it.

    Returns:
        The reason and the declaration; None where the whole is no multiple of what is stored.
    """
    if len(stored) != len(whole):
        return None
    texts, placements = [], []
    for dim, (part, size) in enumerate(zip(stored, whole, strict=True)):
        if part == size:
            continue
        if not part or size % part:
            return None
        texts.append(f"1 of {size // part} parts along dim {dim}")
        axis = "ep" if dim == 0 and EXPERTS.search(fqn) else "tp"
        placement = f"Shard({dim})"
        if axis == "tp" and QKV.search(fqn):
            placement = f"FusedShard({dim}, (rows of Q, of K, of V))"
        elif axis == "tp" and GATE_UP.search(fqn):
            placement = f"FusedShard({dim}, 2)"
        placements.append(f'"{axis}": {placement}')
    return (f"{' and '.join(texts)} is stored", f"{{{', '.join(placements)}}}") if texts else None


def _numbers(fqns: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of keys by the text before them: ``{"layers.": {0, 1}}``."""
    numbers: dict[str, set[int]] = {}
    for fqn in fqns:
        for head, number, _ in numbers_in(fqn):
            numbers.setdefault(head, set()).add(number)
    return numbers


def _numbered(fqn: str, stored: Mapping[str, set[int]], whole: Mapping[str, set[int]]) -> str:
    """Return the rename that would have numbered a key; empty where its numbers are stored.

    Args:
        fqn: A key that is not stored.
        stored: The numbers of the keys that are stored, as ``_numbers`` returns them.
        whole: The numbers of the keys of the whole model.
    """
    for head, number, _ in numbers_in(fqn):
        held = stored.get(head, set())
        if held and number not in held:
            pattern = ".".join([*head.split(".")[-2:-1], "{}"])
            total = max(whole[head]) + 1
            return f'rename=Renumber("{pattern}", contiguous([...], at=rank), total={total})'
    return ""


def lines_of(lost: Iterable[LostTensor]) -> list[str]:
    """Return the lines that say what is lost, equal ones of several keys folded."""
    texts = {tensor.fqn: (tensor.difference, tensor.declaration) for tensor in lost}
    lines = []
    for folded in folded_keys(texts):
        difference, declaration = texts[folded.keys[0]]
        lines.append(f"{folded.name}: {difference}")
        if declaration:
            lines.append(f"    would hold it: {declaration}")
    return lines
