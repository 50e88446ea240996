"""Declarations that fit the shapes and are still likely wrong: by names, axes and padding.

Each becomes a warning with its reason. A user silences it by pattern, with a reason that the report
keeps, and never for all keys at once. For example::

    "layers.0.mlp.gate_up_proj" as Shard(0) over "tp"   its name says several tensors in one
    "experts.w1" as Replicate() over "ep"               its name says expert
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dcp_placements.bind.rule_and_dtensor import Place, Placed
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Cut, Kind
from dcp_placements.names.known_names import (
    COPIED_BY_NAME,
    DATA_AXIS,
    EXPERT_AXIS,
    EXPERTS,
    GATE_UP,
    NAMES_EXPERT,
    NUMBERED_EXPERT,
    QKV,
    TENSOR_AXIS,
)
from dcp_placements.rules.mesh_axes import Axis
from dcp_placements.rules.patterns import matches_any

_CONTIGUOUS = Kind.PLAIN, Kind.RAGGED
"""Kinds of which a rank has one contiguous shard of what is cut."""

# The lines of each finding, with placeholders: headline "is declared as cut by {outer.axis!r} first
# ..." and the values {"axis": "tp", "outer": Cut(0, "fsdp", 4), ...} become "is declared as cut by
# 'fsdp' first and by 'tp' inside that".
_ORDER = (
    "is declared as cut by {outer.axis!r} first and by {axis!r} inside that",
    "found:       {outer.placement} over {outer.axis!r} left of {cut.placement} over {axis!r}",
    "reason:      FSDP cuts what {axis!r} has left; reversed, rows come out permuted in another "
    "topology",
    "way out:     _StridedShard({cut.dim}, split_factor={size}) over {outer.axis!r}",
)
_FUSED = (
    "its name says several tensors in one, but {axis!r} cuts it {how}",
    "found:       {cut}",
    "reason:      a rank that holds {held} pieces of the whole; rows come out permuted in another "
    "topology",
    "way out:     FusedShard({cut.dim}, {parts}",
)
_NO_EQUAL_PARTS = (
    "its dim {cut.dim} of size {size} is no {count} equal parts",
    "found:       {cut}, of a {shape} tensor",
    "likely:      parts of unequal sizes, as Q, K and V with grouped queries: rows come out "
    "permuted in another topology",
    "way out:     FusedShard({cut.dim}, (the size of each part, ...))",
)
_IS_GATE_UP = {"held": "[its gate; its up] has two", "parts": "2), or the sizes of the parts"}
_IS_QKV = {
    "held": "[its Q; its K; its V] has three",
    "parts": "(rows of Q, rows of K, rows of V)), or 3 where they are equal",
}
_OTHER_DIM = (
    "{axis!r} cuts dim {cut.dim}, and stacked experts lie along dim 0",
    "found:       {cut}, of a {shape} tensor",
    'way out:     {{"{axis}": Shard(0)}}: expert-parallel ranks hold whole experts',
)
_REPLICAS = (
    "its name says expert, but it is declared equal along {axis!r}",
    "found:       Replicate() over {axis!r} of size {size}: all but one of them would be dropped",
    'way out:     rename=Renumber("experts.{{}}", this rank\'s experts, total=) where the number '
    'in the name is local; {{"{axis}": Shard(0)}} for a part of each',
)
_GLUED = (
    "its name says one expert, but a rule cuts it along {axis!r}",
    "found:       {cut}, which joins those of {size} ranks to one {shape} tensor",
    'way out:     rename=Renumber("experts.{{}}", this rank\'s experts, total=), and no Shard over '
    "{axis!r}",
)
_NO_EXPERTS = (
    "its name is not that of experts, but {axis!r} cuts it",
    "found:       {cut}, which makes a {shape} tensor; of a router, a norm, an attention or a "
    "shared expert ranks along {axis!r} mostly have equal copies",
    "way out:     a pattern that matches the experts alone, such as 'experts'",
)
_RIGHT = "             or waive={pattern: reason} where this is right"


def lint(
    placed: Iterable[Placed],
    *,
    renamed: bool = False,
    waived: Sequence[re.Pattern[str]] = (),
    checks_padding: bool = False,
) -> Iterator[Fault]:
    """Yield a finding for each tensor whose declaration is likely wrong.

    All are about a tensor- or expert-parallel axis, so that the names of most tensors are not
    searched; or about padding.

    Args:
        placed: The tensors of one ``Placing``, with the checkpoint's keys.
        renamed: Whether the keys differ from the rank's own, so that a number in them is global.
        waived: Patterns of keys without findings.
        checks_padding: Whether padding, which is not stored, is compared: rows may be lost in it
            where ``whole=`` does not prove the shapes.
    """
    doubts_of: dict[Place, list[Doubt]] = {}
    shared: dict[Hashable, tuple[str, tuple[str, ...]]] = {}
    for tensor in placed:
        if tensor.place not in doubts_of:
            doubts_of[tensor.place] = _doubts(tensor.place)
        for doubt in doubts_of[tensor.place]:
            for texts, values in _findings(tensor, *doubt, renamed=renamed):
                if not matches_any(waived, tensor.fqn):
                    headline, *details = [text.format_map(values) for text in texts]
                    rule = f"by rule:     {tensor.rule or 'no rule, its own DTensor'}"
                    lines = headline, (*details, _RIGHT, rule)
                    # Equal lines are one object, which a pickle has once.
                    yield Fault(tensor.fqn, *shared.setdefault(lines, lines))
        is_padded = tensor.place.sharding.padded_shape is not None and not tensor.rows
        if checks_padding and is_padded and not matches_any(waived, tensor.fqn):
            yield from _dropped_rows(tensor)


def _dropped_rows(tensor: Placed) -> Iterator[Fault]:
    """Yield a finding for each padded dim of a tensor whose padding is not constant.

    Padding is not stored, so rows of the whole may be lost there.
    """
    sharding = tensor.place.sharding
    for dim, (size, padded) in enumerate(
        zip(sharding.global_shape, sharding.cut_shape, strict=True)
    ):
        if size == padded or not any(map(_vary, _pads(tensor, dim))):
            continue
        yield Fault(
            tensor.fqn,
            f"[{size}:{padded}] of dim {dim} is padding by the rule, and is not constant",
            (
                f"found:       global_shape={sharding.global_shape}, "
                f"padded_shape={sharding.padded_shape}; what is beyond is not stored",
                f"way out:     a larger size of dim {dim} in global_shape=, if rows are lost; "
                "whole= proves it; waive={pattern: reason} where they may be",
            ),
        )


def _pads(placed: Placed, dim: int) -> list[torch.Tensor]:
    """Return the views of a local tensor along a dim that hold padding only."""
    tensor, place, pads, end = placed.tensor.detach(), placed.place, list[torch.Tensor](), 0
    if any(cut.kind is Kind.FLAT for cut in place.sharding.cuts):
        size, unpadded = place.sharding.global_shape[dim], place.sharding.cut_shape
        for chunk in replace(place.sharding, global_shape=unpadded).shard(place.positions)[1]:
            view = placed.view(chunk)
            stored = max(0, size - chunk.offsets[dim])
            pads += [view.narrow(dim, stored, n)] if (n := view.shape[dim] - stored) > 0 else []
        return pads
    held = {(chunk.local_offsets[dim], chunk.sizes[dim]) for chunk in placed.place.chunks}
    for start, size in [*sorted(held), (tensor.shape[dim], 0)]:
        if start > end:
            pads.append(tensor.narrow(dim, end, start - end))
        end = start + size
    return pads


def _vary(padding: torch.Tensor) -> bool:
    """Whether the elements of a tensor are not all the same value."""
    if padding.is_floating_point() and padding.itemsize == 1:
        padding = padding.float()  # float8 tensors cannot be compared
    return padding.numel() > 0 and bool((padding != padding.flatten()[:1]).any())


class Doubt(NamedTuple):
    """An axis along which a declaration may be wrong.

    With ``Shard(0)`` over fsdp, then over tp: ``Doubt(tp, Cut(0, "tp", 2), Cut(0, "fsdp", 4))``.

    Attributes:
        axis: The axis.
        cut: The cut over it; None where it holds replicas.
        outer: The data-parallel cut of the same dim that comes before ``cut``, if any.
    """

    axis: Axis
    cut: Cut | None
    outer: Cut | None


def _doubts(place: Place) -> list[Doubt]:
    """Return the tensor- and expert-parallel axes of a place along which ranks list no rows."""
    doubts: list[Doubt] = []
    for axis in place.axes:
        name = axis.name or ""
        if axis.size == 1 or not (TENSOR_AXIS.match(name) or EXPERT_AXIS.match(name)):
            continue
        outer: dict[int | None, Cut] = {}
        for cut in place.sharding.cuts:
            if cut.axis == name:
                break
            if cut.kind in _CONTIGUOUS and cut.size > 1 and DATA_AXIS.match(cut.axis or ""):
                outer.setdefault(cut.dim, cut)
        else:
            doubts.append(Doubt(axis, None, None))
            continue
        if cut.kind not in (Kind.LISTED, Kind.FLAT) and not cut.is_of_rows:
            doubts.append(Doubt(axis, cut, outer.get(cut.dim)))
    return doubts


def _findings(
    placed: Placed, axis: Axis, cut: Cut | None, outer: Cut | None, *, renamed: bool
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the lines of each finding along one axis, and the values of their placeholders."""
    fqn, name = placed.fqn, axis.name or ""
    is_numbered = NUMBERED_EXPERT.search(fqn) is not None
    values: dict[str, Any] = {"axis": name, "size": axis.size, "cut": cut, "outer": outer}
    values["shape"] = placed.place.sharding.global_shape
    is_plain = cut is not None and cut.kind in _CONTIGUOUS
    if is_plain and outer is not None:
        yield _ORDER, values
    if TENSOR_AXIS.match(name):
        # A user who gave the sizes of the parts has counted them.
        is_fused = cut is not None and cut.kind is Kind.FUSED and isinstance(cut.parts, int)
        count = cut.parts if cut is not None and is_fused else 1 if is_plain else None
        values["how"] = "plainly" if is_plain else f"as {count} parts"
        rows = 0
        if cut is not None and cut.dim is not None:
            rows = placed.place.sharding.cut_shape[cut.dim]
        if is_fused and isinstance(count, int) and rows % count:
            yield _NO_EQUAL_PARTS, {**values, "size": rows, "count": count}
        if QKV.search(fqn) and count not in (None, 3):
            yield _FUSED, {**values, **_IS_QKV}
        elif GATE_UP.search(fqn) and count not in (None, 2):
            yield _FUSED, {**values, **_IS_GATE_UP}
    elif EXPERTS.search(fqn):
        # Rows that no axis shards are those of a stack, whose names are distinct.
        if any(own_cut.axis is None for own_cut in placed.place.sharding.cuts):
            return
        if cut is None and not (renamed and is_numbered) and not placed.is_reduced:
            yield _REPLICAS, values
        if (
            cut is not None
            and cut.dim
            and len(placed.place.sharding.global_shape) == 3
            and not is_numbered
        ):
            yield _OTHER_DIM, values
        if is_numbered and cut is not None and cut.by_rule:
            yield _GLUED, values
    elif (
        cut is not None
        and placed.rule
        and not NAMES_EXPERT.search(fqn)
        and COPIED_BY_NAME.search(fqn)
    ):
        yield _NO_EXPERTS, values
