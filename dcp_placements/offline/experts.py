"""Which experts a checkpoint has, layer by layer, by its keys and chunks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
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
    """The parts of the key of an expert's tensor.

    Attributes:
        layer: The key up to the experts, different for each layer.
        index: The expert; None where all experts of a layer are stacked in one tensor.
        name: The rest of the key.
        dim: The dim along which experts are stacked.
    """

    layer: str
    index: int | None
    name: str
    dim: int = 0


def expert_key(fqn: str) -> ExpertKey | None:
    """Return the parts of an expert's key; None for other keys.

    >>> expert_key("layers.0.mlp.experts.3.w1.weight")
    ExpertKey(layer='layers.0.mlp.experts', index=3, name='w1.weight', dim=0)
    >>> expert_key("layers.0.shared_experts.w1") is None
    True

    Megatron also stacks layers (``decoder.layers.mlp.experts...``, without a number). Experts are
    then the second dim.
    """
    match = _KEY.match(fqn)
    if match is None:
        return None
    index = None if match["index"] is None else int(match["index"])
    return ExpertKey(match["layer"], index, match["name"], 1 if _LAYER_AXIS.search(fqn) else 0)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        layer: The part of the keys up to the experts.
        stacked: Whether they are in one tensor; otherwise each has keys of its own.
        tensors: Names of the tensors that an expert has.
        experts: Those with every element of all of these tensors.
        gaps: Those that lack some or all elements, up to the highest index of any layer.
        doubles: Those with an element that is stored twice.
    """

    JSON: ClassVar[str] = "stacked tensors experts gaps doubles"

    layer: str
    stacked: bool
    tensors: tuple[str, ...]
    experts: tuple[int, ...]
    gaps: tuple[int, ...]
    doubles: tuple[int, ...]


@dataclass(slots=True)
class _Tally:
    """What the tensors of one layer hold; the experts by index."""

    names: set[str] = field(default_factory=set)
    complete: Counter[int] = field(default_factory=Counter)
    doubles: set[int] = field(default_factory=set)


def find_experts(tensors: Iterable[StoredTensor]) -> tuple[ExpertLayer, ...]:
    """Return the experts of every layer that has any, in the order of the keys."""
    layers: dict[tuple[str, bool], _Tally] = {}
    count = 0
    for tensor in tensors:
        key = expert_key(tensor.fqn)
        if key is None or (key.index is None and len(tensor.shape) <= key.dim):
            continue
        if key.index is None:
            indices = range(tensor.shape[key.dim])
            lacking, doubles = _stacked(tensor, key.dim)
        else:
            indices = range(key.index, key.index + 1)
            lacking, doubles = _alone(tensor, key.index)
        tally = layers.setdefault((key.layer, key.index is None), _Tally())
        tally.names.add(key.name)
        tally.complete.update(set(indices) - lacking)
        tally.doubles |= doubles
        count = max(count, indices.stop)
    result = []
    for (layer, stacked), tally in layers.items():
        experts = tuple(i for i in range(count) if tally.complete[i] == len(tally.names))
        gaps = tuple(sorted({*range(count)} - {*experts}))
        names, twice = tuple(sorted(tally.names)), tuple(sorted(tally.doubles))
        result.append(ExpertLayer(layer, stacked, names, experts, gaps, twice))
    return tuple(result)


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
