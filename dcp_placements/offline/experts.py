"""Which experts a checkpoint has, layer by layer, by its keys and chunks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import overlaps, uncovered
from dcp_placements.offline.checkpoint import StoredTensor

_KEY = re.compile(
    r"^(?P<layer>(?:.*\.)?(?!shared_)\w*experts(?:_list)?)(?:\.(?P<index>\d+))?\.(?P<name>.+)$"
)
_LAYER_AXIS = re.compile(r"(^|\.)layers\.(?!\d)")


@dataclass(frozen=True, slots=True)
class ExpertKey:
    """What the key of an expert's tensor says.

    Attributes:
        layer: The part of the key up to the experts; what layers are told apart by.
        index: The expert; None where all of a layer are stacked in one tensor.
        name: The rest of the key.
        dim: The dim along which experts are stacked.
    """

    layer: str
    index: int | None
    name: str
    dim: int = 0


def expert_key(fqn: str) -> ExpertKey | None:
    """Return what a key says of experts; None where it is not one of theirs.

    >>> expert_key("layers.0.mlp.experts.3.w1.weight")
    ExpertKey(layer='layers.0.mlp.experts', index=3, name='w1.weight', dim=0)
    >>> expert_key("layers.0.shared_experts.w1") is None
    True

    Megatron stacks layers, too (``decoder.layers.mlp.experts...``, without a number): experts are
    the second dim there.
    """
    found = _KEY.match(fqn)
    if found is None:
        return None
    index = None if found["index"] is None else int(found["index"])
    return ExpertKey(found["layer"], index, found["name"], 1 if _LAYER_AXIS.search(fqn) else 0)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        layer: The part of the keys up to the experts.
        stacked: Whether all of them are in one tensor; otherwise they have keys of their own.
        tensors: Names of the tensors that an expert has.
        experts: Those that have all of these tensors, complete.
        gaps: Those that lack some or all of them, below the highest index that any layer has.
        doubles: Those of which some element is stored twice.
    """

    JSON: ClassVar[str] = "stacked tensors experts gaps doubles"

    layer: str
    stacked: bool
    tensors: tuple[str, ...]
    experts: tuple[int, ...]
    gaps: tuple[int, ...]
    doubles: tuple[int, ...]


def find_experts(tensors: Iterable[StoredTensor]) -> tuple[ExpertLayer, ...]:
    """Return the experts of every layer that has any, in the order of the keys."""
    layers: dict[tuple[str, bool], dict[str, list[tuple[ExpertKey, StoredTensor]]]] = {}
    for tensor in tensors:
        key = expert_key(tensor.fqn)
        if key is None or (key.index is None and len(tensor.shape) <= key.dim):
            continue
        names = layers.setdefault((key.layer, key.index is None), {})
        names.setdefault(key.name, []).append((key, tensor))
    whole: dict[tuple[str, bool], Counter[int]] = {}
    twice: dict[tuple[str, bool], set[int]] = {}
    counts: dict[tuple[str, bool], int] = {}
    for place, names in layers.items():
        found = whole[place] = Counter()
        doubles = twice[place] = set()
        for members in names.values():
            for key, tensor in members:
                if key.index is None:
                    lacking, double = _stacked(tensor, key.dim)
                    indices: Iterable[int] = range(tensor.shape[key.dim])
                    counts[place] = max(counts.get(place, 0), tensor.shape[key.dim])
                else:
                    lacking, double = _alone(tensor, key.index)
                    indices = (key.index,)
                    counts[place] = max(counts.get(place, 0), key.index + 1)
                found.update(set(indices) - lacking)
                doubles |= double
    highest = max(counts.values(), default=0)
    made = []
    for place, names in layers.items():
        held = tuple(i for i in range(highest) if whole[place][i] == len(names))
        gaps = tuple(sorted(set(range(highest)) - set(held)))
        made.append(
            ExpertLayer(*place, tuple(sorted(names)), held, gaps, tuple(sorted(twice[place])))
        )
    return tuple(made)


def _stacked(tensor: StoredTensor, dim: int) -> tuple[set[int], set[int]]:
    boxes = [box for box in tensor.boxes if box.numel]
    lacking = _rows(uncovered(tensor.whole, boxes, limit=1 << 20), dim)
    doubles: set[int] = set()
    for one, other in overlaps(boxes, limit=1 << 10):
        start = max(one.offsets[dim], other.offsets[dim])
        stop = min(one.offsets[dim] + one.sizes[dim], other.offsets[dim] + other.sizes[dim])
        doubles.update(range(start, stop))
    return lacking, doubles


def _alone(tensor: StoredTensor, index: int) -> tuple[set[int], set[int]]:
    boxes = [box for box in tensor.boxes if box.numel]
    lacking = {index} if uncovered(tensor.whole, boxes, limit=1) else set()
    return lacking, {index} if overlaps(boxes, limit=1) else set()


def _rows(boxes: Iterable[Box], dim: int) -> set[int]:
    return {
        row for box in boxes for row in range(box.offsets[dim], box.offsets[dim] + box.sizes[dim])
    }
