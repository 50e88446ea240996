"""What can be seen of a rank's tensors before anything is planned: storages, and likely mistakes.

Faults: two names of one storage with different places, tensors without contents. Warnings: a
declaration that fits the shapes and is still likely wrong. A warning has its reason and is silenced
by pattern, with a reason of the user's own that the report keeps, and never for all keys at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp_placements._torch import has_hooks
from dcp_placements.bind.placed import Place, Placed, Placing
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Cut, Kind

_PLAIN = torch.Tensor, torch.nn.Parameter


def storage_faults(state_dict: Mapping[str, Any], placed: Mapping[str, Placed]) -> list[Fault]:
    """Return a fault for each tensor whose storage was freed, or has two different places.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placed: The places of its tensors; a tensor without one is whole.
    """
    tensors = {
        fqn: placed[fqn].tensor if fqn in placed else value
        for fqn, value in state_dict.items()
        if fqn in placed or (isinstance(value, torch.Tensor) and not has_hooks(value))
    }
    if freed := freed_faults(tensors.items()):
        return freed
    at: dict[int, list[str]] = {}
    for fqn, tensor in tensors.items():
        at.setdefault(data_pointer(tensor), []).append(fqn)
    faults = []
    for pointer, fqns in at.items():
        names: dict[Any, str] = {}
        for fqn in fqns if pointer and len(fqns) > 1 else ():
            first = names.setdefault(_view_of(tensors[fqn]), fqn)
            if not _lie_alike(placed.get(fqn), placed.get(first)):
                faults.append(_alias_fault(first, fqn, placed))
    return faults


def _alias_fault(first: str, second: str, placed: Mapping[str, Placed]) -> Fault:
    """Return the fault of two names of one storage with different places."""
    one, other = placed.get(first), placed.get(second)
    speaks = one is None or (one.rule is None and other is not None)
    ruled, missed = (second, first) if speaks else (first, second)
    rule = placed[ruled].rule
    likely = f"rule {rule} speaks for {ruled} and misses {missed}"
    way_out = "name both in the rules, with one placement"
    if rule is None:
        likely = (
            f"{missed} is a view of {ruled}, without its DTensor or its attributes, or cut anew"
        )
        way_out = f"the same tensor under both names; or no {missed} in the state dict"
    return Fault(
        missed,
        f"it is in one storage with {ruled}, but the two lie differently in the checkpoint",
        (
            f"{ruled}: {_place_text(placed.get(ruled))}",
            f"{missed}: {_place_text(placed.get(missed))}",
            f"likely:      {likely}",
            f"way out:     {way_out}",
        ),
    )


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
        if type(value) not in (*_PLAIN, DTensor)
        and isinstance(value, torch.Tensor)
        and _has_dtensor(value)
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


def data_pointers(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return where the elements of each tensor begin in memory; 0 where it has none."""
    return list(map(data_pointer, tensors))


def data_pointer(tensor: torch.Tensor) -> int:
    """Return where the elements of a tensor begin in memory; 0 where it has none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # wrapper subclasses and fake tensors have no memory
        return 0


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


# Projections that join several in one tensor; Megatron's linear_qkv and Megatron Lite's qkv.linear
# are not among them, since they are laid out per query group and may be cut plainly.
FUSED_NAME = re.compile(
    r"(?:^|\.)(?:gate_up(?:_proj)?|qkv(?!\.linear)(?:_proj)?|query_key_value|linear_fc1|in_proj"
    r"|c_attn|wqkv|W_pack|w13)(?:_weight|_bias)?(?:\.|$)"
)
# Those that join three: Q, K and V. The in_proj.weight of a mixer is none of them.
QKV_NAME = re.compile(r"(?:^|\.)(?:w?qkv|query_key_value|c_attn|W_pack|in_proj_(?:weight|bias))")
EXPERT_NAME = re.compile(r"(?:^|\.)(?:local_|routed_|inner_)?experts(?:\.|$)")
# One tensor per expert: distinct by its number, if names are renamed to global ones.
NUMBERED_EXPERT = re.compile(r"experts\.(?:\d+|[\w.]*(?:weight|bias)\d+)(?:\.|$)")
# Parameters of which every expert-parallel rank has a copy.
COPIED_NAME = re.compile(
    r"(?:^|\.)(?:router|gate|(?:self_)?att(?:n|ention)|(?:\w+_)?(?:layer)?norm\d*)(?:\.|$)"
)
TENSOR_AXIS = re.compile(r"^(?:e?tp|tensor(?:_.*)?|model_parallel)$")
EXPERT_AXIS = re.compile(r"^(?:ep|expert(?:_parallel|_model_parallel)?)$")
DATA_AXIS = re.compile(r"^(?:.*fsdp.*|e?dp(?:_.*)?|data(?:_.*)?)$")


Finding = tuple[str, ...]
"""A headline and details."""


def lint(
    placed: Iterable[Placed],
    *,
    renamed: bool = False,
    waived: Sequence[re.Pattern[str]] = (),
) -> Iterator[Fault]:
    """Yield a finding for each tensor whose declaration is likely wrong.

    Args:
        placed: The tensors of one ``Placing``, with the checkpoint's keys.
        renamed: Whether they differ from the rank's own, so that a number in them is global.
        waived: Patterns of keys without findings.
    """
    cuts_of: dict[Place, list[Cut] | None] = {}
    for one in placed:
        if one.place not in cuts_of:
            cuts_of[one.place] = _cuts_in_doubt(one.place)
        cuts = cuts_of[one.place]
        if cuts is None:
            continue
        findings = [*_wrong_order(cuts), *_fused(one, cuts), *_experts(one, cuts, renamed)]
        findings += _copied(one, cuts)
        if findings and any(pattern.search(f".{one.fqn}") for pattern in waived):
            continue
        rule = f"by rule:     {one.rule or 'no rule, its own DTensor'}"
        for headline, *details in findings:
            yield Fault(one.fqn, headline, (*details, rule))


def _cuts_in_doubt(place: Place) -> list[Cut] | None:
    """Return the cuts that may be wrong; None without a tensor- or expert-parallel axis.

    All findings are about such an axis, so that most tensors need no look at their names.
    """
    names = [axis.name for axis in place.axes if axis.name is not None and axis.size > 1]
    if not any(TENSOR_AXIS.match(name) or EXPERT_AXIS.match(name) for name in names):
        return None
    return [
        cut
        for cut in place.sharding.cuts
        if cut.kind is not Kind.LISTED and cut.axis is not None and cut.size > 1
    ]


def _wrong_order(cuts: Sequence[Cut]) -> Iterator[Finding]:
    for outer, inner in combinations(cuts, 2):
        if (
            outer.dim == inner.dim
            and outer.kind is inner.kind is Kind.PLAIN
            and _over(outer, DATA_AXIS)
            and (_over(inner, TENSOR_AXIS) or _over(inner, EXPERT_AXIS))
        ):
            yield (
                f"is declared as cut by {outer.axis!r} first and by {inner.axis!r} inside that",
                f"found:       Shard({outer.dim}) over {outer.axis!r} left of "
                f"Shard({inner.dim}) over {inner.axis!r}",
                f"reason:      FSDP cuts what {inner.axis!r} has left, so {inner.axis!r} "
                "comes first; with the order reversed the rows come out permuted in another "
                "topology",
                f"way out:     _StridedShard({outer.dim}, split_factor={inner.size}) over "
                f"{outer.axis!r}; or waive={{pattern: reason}} where the order is right",
            )


def _fused(placed: Placed, cuts: Sequence[Cut]) -> Iterator[Finding]:
    is_qkv = QKV_NAME.search(placed.fqn) is not None
    held, parts = "[its gate; its up] has two", "2), or the sizes of the parts"
    if is_qkv:
        held = "[its Q; its K; its V] has three"
        parts = "(rows of Q, rows of K, rows of V)), or 3 where they are equal"
    for cut in cuts if FUSED_NAME.search(placed.fqn) is not None else ():
        headline = ""
        if cut.kind is Kind.PLAIN:
            headline = f"its name says several tensors in one, but {cut.axis!r} cuts it plainly"
        elif is_qkv and cut.kind is Kind.FUSED and cut.parts == 2:
            headline = f"its name says Q, K and V in one, but {cut.axis!r} cuts it as two parts"
        if headline and _over(cut, TENSOR_AXIS):
            yield (
                headline,
                f"found:       {cut}",
                f"reason:      a rank that holds {held} pieces of the "
                "whole; taken otherwise, the rows come out permuted in another topology",
                f"way out:     FusedShard({cut.dim}, {parts}; or "
                "waive={pattern: reason} where this cut is right, as with parts that "
                "alternate row by row",
            )


def _copied(placed: Placed, cuts: Sequence[Cut]) -> Iterator[Finding]:
    for cut in cuts if placed.rule is not None and "expert" not in placed.fqn else ():
        if _over(cut, EXPERT_AXIS) and COPIED_NAME.search(placed.fqn) is not None:
            yield (
                f"its name is not that of experts, but {cut.axis!r} cuts it",
                f"found:       {cut}, which makes a {placed.global_shape} tensor",
                "reason:      expert-parallel ranks have equal copies of routers, attention and "
                "norms; as parts, the copies become one tensor that is too large",
                "likely:      a pattern that matches more than the experts",
                "way out:     a pattern such as 'experts'; or waive={pattern: reason} where the "
                "ranks hold different parts",
            )


def _experts(placed: Placed, cuts: Sequence[Cut], renamed: bool) -> Iterator[Finding]:
    numbered = NUMBERED_EXPERT.search(placed.fqn) is not None
    all_cuts, shape = placed.place.sharding.cuts, placed.global_shape
    # Rows that no axis shards are those of a stack, whose names are distinct.
    if (renamed and numbered) or any(cut.axis is None for cut in all_cuts):
        return
    if EXPERT_NAME.search(placed.fqn) is None:
        return
    for cut in cuts:
        if len(shape) == 3 and cut.dim and _over(cut, EXPERT_AXIS) and not numbered:
            yield (
                f"{cut.axis!r} cuts dim {cut.dim}, and stacked experts lie along dim 0",
                f"found:       {cut}, of a {shape} tensor",
                "reason:      expert-parallel ranks hold whole experts; joined along another "
                "dim, parts of different experts become one",
                f'way out:     {{"{cut.axis}": Shard(0)}}; or waive={{pattern: reason}} where '
                f"dim {cut.dim} numbers the experts",
            )
    cutting = {cut.axis for cut in all_cuts}
    for axis in placed.place.axes:
        if axis.size > 1 and axis.name not in cutting and EXPERT_AXIS.match(axis.name or ""):
            shard = f'{{"{axis.name}": Shard(0)}}'
            local = (
                'rename=Renumber("experts.{}", this rank\'s experts, total=) where the number in '
                "the name is local; "
            )
            yield (
                f"its name says expert, but it is declared equal along {axis.name!r}",
                f"found:       Replicate() over {axis.name!r} of size {axis.size}",
                "reason:      expert-parallel ranks hold different experts; as replicas "
                "all but one of them would be dropped",
                f"way out:     {f'{local}{shard} for a part of each' if numbered else shard}; or "
                "waive={pattern: reason} where they are equal",
            )


def _over(cut: Cut, axes: re.Pattern[str]) -> bool:
    return cut.axis is not None and axes.match(cut.axis) is not None
