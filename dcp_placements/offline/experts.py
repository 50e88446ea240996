"""Which experts a checkpoint has, by its keys and chunks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from dcp_placements.errors import CannotLook, format_name
from dcp_placements.layout.boxes import Index, as_array, as_boxes, intersect, overlaps, uncovered
from dcp_placements.layout.sharding import Box, Kind
from dcp_placements.names.renames import number_in
from dcp_placements.offline.checkpoint import Checkpoint, StoredTensor

_KEY = re.compile(
    r"^(?P<layer>(?:.*\.)?(?!shared_)\w*experts(?:_list)?)(?:\.(?P<index>\d+))?\.(?P<name>.+)$"
)
# Megatron's grouped linear layers have one weight per expert.
_GROUPED = re.compile(r"^(?P<head>.*(?:weight|bias))(?P<index>\d+)(?P<state>\.[^.]+)?$")
_LAYER_AXIS = re.compile(r"(^|\.)layers\.(?!\d)")
_ANY_EXPERT = "123456789"

MOST_EXPERTS = 1 << 20
"""More experts than any layer has; those of a layer are listed one by one."""


@dataclass(frozen=True, slots=True)
class ExpertKey:
    """The parts of an expert tensor's key."""

    layer: str  # the key up to the experts, which identifies the layer
    index: int | None  # the expert; None if one tensor holds all experts of the layer
    name: str  # the rest of the key, with ``{}`` for the index where that stands at its end
    dim: int = 0  # the dim along which experts are stacked

    @property
    def template(self) -> str:
        """The key with ``{}`` for the expert."""
        return (
            f"{self.layer}.{self.name}" if "{}" in self.name else f"{self.layer}.{{}}.{self.name}"
        )


def expert_key(fqn: str) -> ExpertKey | None:
    """Return the parts of an expert tensor's key; None for the key of anything else.

    >>> expert_key("layers.0.mlp.experts.3.w1.weight")
    ExpertKey(layer='layers.0.mlp.experts', index=3, name='w1.weight', dim=0)
    >>> expert_key("layers.0.experts.linear_fc1.weight3.exp_avg")
    ExpertKey(layer='layers.0.experts', index=3, name='linear_fc1.weight{}.exp_avg', dim=0)
    >>> expert_key("layers.0.shared_experts.w1") is None
    True

    Megatron also stacks layers (``decoder.layers.mlp.experts...``, without a number): experts are
    the second dim there.
    """
    match = _KEY.match(fqn)
    if match is None:
        return None
    layer, index, name = match["layer"], match["index"], match["name"]
    if index is None and (grouped := _GROUPED.match(name)):
        index, name = grouped["index"], f"{grouped['head']}{{}}{grouped['state'] or ''}"
    dim = 1 if _LAYER_AXIS.search(fqn) else 0
    return ExpertKey(layer, None if index is None else int(index), name, dim)


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """One tensor of all experts of a layer: stacked, or as a tensor per expert."""

    layer: str  # as in ``ExpertKey``
    name: str  # as in ``ExpertKey``
    dim: int | None  # the dim along which experts are stacked; None if each has its own tensor
    members: Mapping[int, StoredTensor]  # the stacked tensor under 0, or the tensors by expert

    @property
    def stored(self) -> int:
        """The number of experts that are stored."""
        return len(self.experts)

    @property
    def experts(self) -> list[int]:
        """The numbers of the experts that are stored."""
        if self.dim is None:
            return list(self.members)
        return list(range(self.members[0].shape[self.dim]))

    @property
    def keys(self) -> list[str]:
        """The keys of the tensors."""
        return [tensor.fqn for tensor in self.members.values()]

    def flaws(self) -> Iterator[tuple[int, bool, bool]]:
        """Yield each stored expert, and whether its chunks have holes, and overlaps."""
        for first, tensor in self.members.items():
            for number, flaws in enumerate(_flaws(tensor.boxes, tensor.whole, self.dim), first):
                yield number, *flaws


def expert_families(tensors: Iterable[StoredTensor]) -> dict[str, ExpertFamily]:
    """Return the tensors of experts by key, with ``{}`` for the expert if each has a key.

    Raises:
        CannotLook: A number, or a dim, is beyond what is listed.
    """
    families: dict[str, ExpertFamily] = {}
    numbered: dict[str, tuple[ExpertKey, dict[int, StoredTensor]]] = {}
    for tensor in tensors:
        key = expert_key(tensor.fqn)
        if key is None:
            continue
        is_stacked = key.index is None and len(tensor.shape) > key.dim
        last = tensor.shape[key.dim] - 1 if is_stacked else key.index or 0
        if last >= MOST_EXPERTS:
            raise CannotLook(
                f"{format_name(tensor.fqn)}: its name and shape say that a layer has an expert "
                f"{last:,}, and the first {MOST_EXPERTS:,} are listed"
            )
        if key.index is not None:
            _, members = numbered.setdefault(key.template, (key, {}))
            members[key.index] = tensor
        elif is_stacked:
            families[tensor.fqn] = ExpertFamily(key.layer, key.name, key.dim, {0: tensor})
    for template, (key, members) in numbered.items():
        members = dict(sorted(members.items()))
        families[template] = ExpertFamily(key.layer, key.name, None, members)
    return families


# Most tensors of a model are cut as others are.
@lru_cache(maxsize=64)
def _flaws(boxes: tuple[Box, ...], whole: Box, dim: int | None) -> list[tuple[bool, bool]]:
    """Return of each row of a dim (None: of the whole) whether boxes have holes, and overlaps."""
    array = as_array(boxes, len(whole.sizes))
    rows = as_array([whole], len(whole.sizes))
    alike = np.ones(1, int)
    if dim is not None:
        # The rows between two edges of boxes are alike, so the first of them is looked at.
        size = whole.sizes[dim]
        edges = np.concatenate([[0, size], array[:, 0, dim], array[:, :, dim].sum(1)])
        edges = np.unique(edges.clip(0, size))
        alike = np.diff(edges)
        rows = rows.repeat(len(alike), axis=0)
        rows[:, 0, dim], rows[:, 1, dim] = edges[:-1], 1
    row_of, met = Index(array).meeting(rows)
    flaws = []
    for number, row in enumerate(as_boxes(rows)):
        inside = intersect(array[met[row_of == number]], rows[[number]])
        flaw = bool(uncovered(row, inside, 1)), bool(overlaps(inside, 1))
        flaws += [flaw] * int(alike[number])
    return flaws


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one layer."""

    JSON: ClassVar[str] = "stacked tensors experts gaps doubles"

    layer: str  # the part of the keys up to the experts
    stacked: bool  # whether one tensor holds all of them; otherwise they have keys of their own
    tensors: tuple[str, ...]  # names of the tensors that an expert has
    experts: tuple[int, ...]  # those that have all of these tensors, complete
    # Those that lack some or all of them, below the highest index that any layer has
    gaps: tuple[int, ...]
    doubles: tuple[int, ...]  # those with an element that is stored twice


def find_experts(tensors: Iterable[StoredTensor]) -> tuple[ExpertLayer, ...]:
    """Return the experts of every layer that has any, in the order of the keys."""
    layers: dict[tuple[str, bool], list[ExpertFamily]] = {}
    end = 0
    for family in expert_families(tensors).values():
        layers.setdefault((family.layer, family.dim is not None), []).append(family)
        end = max([end, *(expert + 1 for expert in family.experts)])
    result = []
    for (layer, is_stacked), families in layers.items():
        complete: Counter[int] = Counter()
        doubles = set()
        for family in families:
            for expert, has_holes, has_overlaps in family.flaws():
                complete[expert] += not has_holes
                if has_overlaps:
                    doubles.add(expert)
        experts = tuple(e for e in range(end) if complete[e] == len(families))
        gaps = tuple(sorted({*range(end)} - {*experts}))
        names = tuple(sorted(family.name for family in families))
        result.append(ExpertLayer(layer, is_stacked, names, experts, gaps, tuple(sorted(doubles))))
    return tuple(result)


def recorded_experts(
    checkpoint: Checkpoint, families: Mapping[str, ExpertFamily], *, axis: str
) -> dict[str, str]:
    """Return how each expert tensor was saved, as far as the checkpoint records it.

    A stacked tensor counts if its dim of experts was cut over ``axis``, or into rows that ranks
    list. Another cut of that dim proves nothing: FSDP makes one without a rule.
    Tensors with a key per expert count if a rename numbered the experts.

    It is text by key, without the tensors of which nothing is recorded; ranks hold different
    experts along ``axis``.
    """
    record = checkpoint.record
    if record is None:
        return {}
    result = {}
    for fqn, family in families.items():
        if family.dim is None:
            key = fqn.replace("{}", _ANY_EXPERT)
            for step in record.renames:
                if "{}" in step.pattern:
                    found = number_in(step.pattern, key)
                    if found is not None and found.number == int(_ANY_EXPERT):
                        result[fqn] = str(step)
            continue
        for cut in record.cuts(fqn):
            if cut.dim == family.dim and (cut.axis == axis or cut.kind is Kind.LISTED):
                result.setdefault(fqn, str(cut))
    return result
