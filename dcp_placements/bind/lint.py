"""What can be seen of a rank's tensors before anything is planned: storages, and likely mistakes.

Faults: two names of one storage with different places, tensors without contents, memory that does
not keep what is read into it. Warnings: a declaration that fits the shapes and is still likely
wrong. A warning has its reason and is silenced by pattern, with a reason of the user's own that the
report keeps, and never for all keys at once.

A model that ties its embedding and its head has one memory under two keys. If a checkpoint has
different tensors under the two, the one that is read last would stay, so a load asks which keys
overlap (``tied_keys``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp_placements._torch import PLAIN, facts_of, is_dtensor_like
from dcp_placements.bind.one_tensor import Place, Placed
from dcp_placements.errors import Fault
from dcp_placements.layout.boxes import format_boxes
from dcp_placements.layout.sharding import Box, Cut, Kind
from dcp_placements.rules.mesh import Axis
from dcp_placements.rules.patterns import matches_any


def tensor_faults(
    tensors: Iterable[tuple[str, torch.Tensor]], placed: Mapping[str, Placed], *, is_save: bool
) -> list[Fault]:
    """Return a fault for each tensor without contents, and for each storage with two places.

    Args:
        tensors: Local tensors by the checkpoint's key; a stack has several.
        placed: The places of those that have one; a tensor without one is whole.
        is_save: Whether a meta tensor, which has no contents, is a fault.
    """
    faults = []
    # By start in memory the first tensor there; of those with several all of them.
    first: dict[int, tuple[str, torch.Tensor]] = {}
    starts: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for fqn, tensor in tensors:
        is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided
        if is_save and tensor.is_meta:
            faults.append(Fault(fqn, "is a meta tensor, which has no contents to save", _META))
        elif not tensor.numel():
            continue
        elif (
            # Memory that was freed, as FSDP does it; the cheap question is asked first.
            is_plain
            and tensor.data_ptr() == tensor.storage_offset() * tensor.itemsize
            and not tensor.untyped_storage().nbytes()
        ):
            headline = f"the storage of this {tuple(tensor.shape)} {tensor.dtype} tensor was freed"
            faults.append(Fault(fqn, headline, _FREED))
        elif not is_plain and _is_around_dtensors(tensor):
            kind = type(tensor).__name__
            headline = f"is a {kind} around DTensors, of which every rank has another part"
            faults.append(Fault(fqn, headline, _AROUND))
        else:
            start = tensor.data_ptr() if is_plain else data_pointer(tensor)
            one = fqn, tensor
            if start and first.setdefault(start, one) is not one:
                starts.setdefault(start, [first[start]]).append(one)
    for named in starts.values():
        faults += _alias_faults(named, placed)
    return faults


_META = (
    "way out:     materialise it before the save (to_empty() and the initialisation leave some "
    "parameters or buffers out), or leave this key out",
)
_FREED = (
    "likely:      an unsharded parameter of FSDP, or a view of one, taken during a step",
    "way out:     take the state dict from the model anew, or leave this key out",
)
_AROUND = ("way out:     a DTensor around such a tensor; or its DTensors under keys of their own",)


def _is_around_dtensors(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return False
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return any(isinstance(part, DTensor) or _is_around_dtensors(part) for part in parts)


def _alias_faults(
    named: Sequence[tuple[str, torch.Tensor]], placed: Mapping[str, Placed]
) -> Iterator[Fault]:
    """Yield the faults of tensors of one storage whose equal views have different places."""
    names: dict[Any, str] = {}
    for fqn, tensor in named:
        first = names.setdefault(_view_of(tensor), fqn)
        boxes, other = (_boxes(tensor, placed.get(name)) for name in (fqn, first))
        if boxes == other:
            continue
        one = placed.get(first)
        is_missed = one is None or (one.rule is None and fqn in placed)
        ruled, missed = (fqn, first) if is_missed else (first, fqn)
        ruled_boxes, missed_boxes = (boxes, other) if is_missed else (other, boxes)
        yield Fault(
            missed,
            f"it is in one storage with {ruled}, but the two lie differently in the checkpoint",
            (
                "likely:      a rule speaks for one of them and misses the other; or one is a view "
                "without the DTensor or the attributes of the other",
                "way out:     name both in the rules, with one placement; or the same tensor under "
                "both names",
            ),
            (
                f"{ruled} is:  {format_boxes(*ruled_boxes)}",
                f"{missed} is: {format_boxes(*missed_boxes)}",
            ),
        )


def _boxes(tensor: torch.Tensor, placed: Placed | None) -> tuple[list[Box], tuple[int, ...]]:
    """Return the boxes of a local tensor in the checkpoint, and the shape there."""
    if placed is None:
        return [Box.whole(tuple(tensor.shape))], tuple(tensor.shape)
    return [chunk.box for chunk in placed.place.chunks], placed.place.sharding.global_shape


def _view_of(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return the size and stride of each dim: which elements of its storage a tensor has.

    A tensor and its transpose, or the half of its columns, are different views of one storage.
    """
    strides: Sequence[int] = tensor.stride() if tensor.layout is torch.strided else tensor.shape
    dims = zip(tensor.shape, strides, strict=True)
    return tuple([(size, 0 if size == 1 else stride) for size, stride in dims])


def data_pointer(tensor: torch.Tensor) -> int:
    """Return where the elements of a tensor begin in memory; 0 where it has none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # wrapper subclasses and fake tensors have no memory
        return 0


def tied_keys(destinations: Sequence[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """Return the keys that overlap in memory, each with all that it overlaps, also over others.

    >>> w, b = torch.ones(4), torch.ones(2)
    >>> tied_keys([("embed", w), ("head", w), ("bias", b)])
    {'embed': ('embed', 'head'), 'head': ('embed', 'head')}

    Args:
        destinations: The tensors that are read into, and their keys; a key may have several.
    """
    tensors = [tensor for _, tensor in destinations]
    # Of tensors that have no memory, or none that can be seen, the start is 0.
    starts = np.array([data_pointer(tensor) for tensor in tensors], np.int64)
    nbytes = np.zeros(len(tensors), np.int64)
    for number in np.flatnonzero(starts).tolist():
        tensor = tensors[number]
        nbytes[number] = tensor.nbytes if tensor.is_contiguous() else _extent(tensor)
    held = np.flatnonzero(nbytes)
    held = held[starts[held].argsort(kind="stable")]
    ends = np.maximum.accumulate((starts + nbytes)[held])
    cuts = (0, *np.flatnonzero(starts[held][1:] >= ends[:-1]) + 1, len(held))
    tied: dict[str, tuple[str, ...]] = {}
    for begin, end in pairwise(cuts):
        if end - begin < 2:
            continue
        run = held[begin:end].tolist()
        views = [tensors[at] for at in run]
        # The extent of a column of a matrix has other columns, too.
        if all(view.is_contiguous() for view in views) or _share_memory(views):
            keys = tuple(dict.fromkeys([destinations[at][0] for at in sorted(run)]))
            tied.update(dict.fromkeys(keys, keys))
    return tied


def memory_faults(
    state_dict: Mapping[str, Any], destinations: Sequence[tuple[str, torch.Tensor]]
) -> list[Fault]:
    """Return the tensors whose memory does not keep what is read into it."""
    faults = []
    # Each call of to_local() may make another tensor: what is read into it is lost at the end.
    values = {fqn: state_dict[fqn] for fqn, _ in destinations}
    values = {fqn: value for fqn, value in values.items() if not isinstance(value, DTensor)}
    alike = {fqn for fqn, value in values.items() if is_dtensor_like(value)}
    starts = {(fqn, data_pointer(tensor)) for fqn, tensor in destinations if fqn in alike}
    for fqn, tensor in destinations:
        is_spread = tensor.layout is torch.strided and not tensor.is_contiguous()
        if not is_spread and fqn not in alike:
            continue
        if is_spread and _share_memory([tensor]):
            headline = (
                f"several elements of this {tuple(tensor.shape)} tensor are one memory: what is "
                "read would be overwritten"
            )
            details = (
                f"found:       strides {tensor.stride()}, in elements",
                "way out:     put a copy into the state dict (tensor.clone() has memory of its "
                "own for each element), or the tensor that it was made from",
            )
            faults.append(Fault(fqn, headline, details))
        is_new = fqn in alike and (fqn, data_pointer(facts_of(values[fqn])[0])) not in starts
        if is_new and tensor.numel():
            kind = type(values[fqn]).__name__
            headline = f"to_local() of this {kind} makes a copy: what is read would be lost"
            out = "way out:     load into the tensor that it holds, and make the copy afterwards"
            faults.append(Fault(fqn, headline, (out,)))
    return faults


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two elements, of one tensor or of two, are one memory.

    >>> _share_memory([torch.ones(3).expand(2, 3)]), _share_memory([*torch.ones(4, 6).split(3, 1)])
    (True, False)
    """
    starts = list(map(data_pointer, tensors))
    first = min(starts)
    views: list[tuple[int, int, list[int], list[int]]] = []
    unit = 0
    for start, tensor in zip(starts, tensors, strict=True):
        block = tensor.itemsize  # bytes in a row; the other dims are of such blocks
        strides: list[int] = []
        sizes: list[int] = []
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if stride * tensor.itemsize == block:
                block *= size
            elif stride and size > 1:
                strides.append(stride * tensor.itemsize)
                sizes.append(size)
        if tensor.numel():
            views.append((start - first, block, strides, sizes))
            unit = gcd(unit, start - first, block, *strides)
    ends = [start - first + _extent(tensor) for start, tensor in zip(starts, tensors, strict=True)]
    marks = np.zeros(max(ends) // max(unit, 1), bool)
    for offset, block, strides, sizes in views:
        shape, steps = (*sizes, block // unit), (*[stride // unit for stride in strides], 1)
        np.lib.stride_tricks.as_strided(marks[offset // unit :], shape, steps)[...] = True
    return int(marks.sum()) * unit < sum(tensor.nbytes for tensor in tensors)


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def equal_values(one: Any, other: Any) -> bool:
    """Whether two objects are equal; tensors and arrays in them by their elements.

    >>> equal_values({"betas": [torch.ones(2)]}, {"betas": [torch.ones(2)]})
    True
    """
    try:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            return one.keys() == other.keys() and all(equal_values(one[k], other[k]) for k in one)
        if isinstance(one, list | tuple) and type(one) is type(other):
            return len(one) == len(other) and all(map(equal_values, one, other))
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            return one.dtype == other.dtype and np.array_equal(one, other)
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # arrays within other objects
        return False


NUMBERED_EXPERT = re.compile(r"experts\.(?:\d+|[\w.]*(?:weight|bias)\d+)(?:\.|$)")
"""One tensor per expert: distinct by its number, if names are renamed to global ones."""
_EXPERTS = re.compile(r"(?:^|\.)(?:local_|routed_|inner_)?experts(?:\.|$)")
# Megatron's linear_qkv and Megatron Lite's qkv.linear are laid out per query group: not among them.
QKV = re.compile(
    r"(?:^|\.)(?:(?:to_)?qkv(?!\.linear)(?:_proj)?|query_key_value|c_attn|[Ww]qkv|W_pack"
    r"|in_proj(?=_weight|_bias))(?:_weight|_bias)?(?:\.|$)"
)
GATE_UP = re.compile(
    r"(?:^|\.)(?:(?:gate_(?:and_)?up|up_gate)(?:_proj)?|proj_gate_up|linear_fc1"
    r"|in_proj(?!_weight|_bias)|w1[23]|w1_?w3)(?:_weight|_bias)?(?:\.|$)"
)
# Parameters of which every expert-parallel rank has a copy.
_COPIED = re.compile(
    r"(?:^|\.)(?:router|gate|(?:self_)?att(?:n|ention)|(?:\w+_)?(?:layer)?norm\d*"
    r"|shared_experts?|expert_bias)(?:\.|$)"
)
_OF_EXPERT = re.compile(r"(?<!shared_)expert(?!_bias)")
_TENSOR_AXIS = re.compile(r"^(?:e?tp|tensor(?:_.*)?|model_parallel)$")
EXPERT_AXIS = re.compile(r"^(?:ep|expert(?:_parallel|_model_parallel)?)$")
_DATA_AXIS = re.compile(r"^(?:.*fsdp.*|e?dp(?:_.*)?|data(?:_.*)?)$")

_ORDER = (
    "is declared as cut by {outer.axis!r} first and by {axis!r} inside that",
    "found:       Shard({cut.dim}) over {outer.axis!r} left of Shard({cut.dim}) over {axis!r}",
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
) -> Iterator[Fault]:
    """Yield a finding for each tensor whose declaration is likely wrong.

    All are about a tensor- or expert-parallel axis, so that most tensors need no look at their
    names.

    Args:
        placed: The tensors of one ``Placing``, with the checkpoint's keys.
        renamed: Whether they differ from the rank's own, so that a number in them is global.
        waived: Patterns of keys without findings.
    """
    doubts_of: dict[Place, list[Doubt]] = {}
    for one in placed:
        if one.place not in doubts_of:
            doubts_of[one.place] = _doubts(one.place)
        for doubt in doubts_of[one.place]:
            for texts, facts in _findings(one, *doubt, renamed=renamed):
                if not matches_any(waived, one.fqn):
                    headline, *details = [text.format_map(facts) for text in texts]
                    rule = f"by rule:     {one.rule or 'no rule, its own DTensor'}"
                    yield Fault(one.fqn, headline, (*details, _RIGHT, rule))


def dropped_rows(
    placed: Iterable[Placed], *, waived: Sequence[re.Pattern[str]] = ()
) -> Iterator[Fault]:
    """Yield a finding for each tensor whose padding, which is not stored, is not constant.

    Args:
        placed: As for ``lint``.
        waived: Patterns of keys without findings.
    """
    for one in placed:
        sharding = one.place.sharding
        is_padded = sharding.padded_shape not in (None, sharding.global_shape)
        if not is_padded or one.parts or matches_any(waived, one.fqn):
            continue
        for dim, (size, cut) in enumerate(
            zip(sharding.global_shape, sharding.cut_shape, strict=True)
        ):
            if size == cut or not any(map(_vary, _pads(one, dim))):
                continue
            yield Fault(
                one.fqn,
                f"[{size}:{cut}] of dim {dim} is padding by the rule, and is not constant",
                (
                    f"found:       global_shape={sharding.global_shape}, "
                    f"padded_shape={sharding.padded_shape}; what is beyond is not stored",
                    f"way out:     a larger size of dim {dim} in global_shape=, if rows are lost; "
                    "whole= proves it; waive={pattern: reason} where they may be",
                ),
            )


def _pads(placed: Placed, dim: int) -> list[torch.Tensor]:
    """Return the views of a local tensor along a dim that hold padding only."""
    tensor, pads, end = placed.tensor.detach(), [], 0
    held = {(one.local_offsets[dim], one.sizes[dim]) for one in placed.place.chunks}
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


Doubt = tuple[Axis, Cut | None, Cut | None]
"""An axis, the cut over it, and the data-parallel cut of the same dim that comes before that."""


def _doubts(place: Place) -> list[Doubt]:
    """Return the tensor- and expert-parallel axes of a place along which ranks list no rows."""
    doubts: list[Doubt] = []
    for axis in place.axes:
        name = axis.name or ""
        if axis.size == 1 or not (_TENSOR_AXIS.match(name) or EXPERT_AXIS.match(name)):
            continue
        outer: dict[int, Cut] = {}
        for cut in place.sharding.cuts:
            if cut.axis == name:
                break
            if cut.kind is Kind.PLAIN and cut.size > 1 and _DATA_AXIS.match(cut.axis or ""):
                outer.setdefault(cut.dim, cut)
        else:
            doubts.append((axis, None, None))
            continue
        if cut.kind is not Kind.LISTED and cut.dim >= 0:
            doubts.append((axis, cut, outer.get(cut.dim)))
    return doubts


def _findings(
    placed: Placed, axis: Axis, cut: Cut | None, outer: Cut | None, *, renamed: bool
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the texts of what is likely wrong along one axis, and what they tell."""
    fqn, name = placed.fqn, axis.name or ""
    is_numbered = NUMBERED_EXPERT.search(fqn) is not None
    facts = {"axis": name, "size": axis.size, "cut": cut, "outer": outer}
    facts["shape"] = placed.place.sharding.global_shape
    is_plain = cut is not None and cut.kind is Kind.PLAIN
    if is_plain and outer is not None:
        yield _ORDER, facts
    if _TENSOR_AXIS.match(name):
        # Parts that are given with their sizes are known to whoever gave them.
        is_fused = cut is not None and cut.kind is Kind.FUSED and isinstance(cut.parts, int)
        count = cut.parts if cut is not None and is_fused else 1 if is_plain else None
        facts["how"] = "plainly" if is_plain else f"as {count} parts"
        if QKV.search(fqn) and count not in (None, 3):
            yield _FUSED, {**facts, **_IS_QKV}
        elif GATE_UP.search(fqn) and count not in (None, 2):
            yield _FUSED, {**facts, **_IS_GATE_UP}
    elif _EXPERTS.search(fqn):
        # Rows that no axis shards are those of a stack, whose names are distinct.
        if any(one.axis is None for one in placed.place.sharding.cuts):
            return
        if cut is None and not (renamed and is_numbered) and not placed.is_reduced:
            yield _REPLICAS, facts
        if (
            cut is not None
            and cut.dim
            and len(placed.place.sharding.global_shape) == 3
            and not is_numbered
        ):
            yield _OTHER_DIM, facts
        if is_numbered and cut is not None and cut.by_rule:
            yield _GLUED, facts
    elif cut is not None and placed.rule and not _OF_EXPERT.search(fqn) and _COPIED.search(fqn):
        yield _NO_EXPERTS, facts
