"""What the memory of a rank's tensors allows: can it be saved, does it keep what is read into it.

Before a save or a load: a tensor without contents, or whose storage was freed; two names of one
storage with different places. Before a load alone: a tensor whose elements share memory, or whose
``to_local()`` is a copy that nobody keeps; and the keys that share memory::

    "head.w" and "embed.w" are one storage, and a rule shards only "embed.w"  -> a fault of "head.w"
    torch.ones(3).expand(2, 3): two rows, one memory                          -> a fault
    "head.w" and "embed.w" are one storage, and whole                         -> tied keys
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp_placements._torch import (
    PLAIN_TYPES,
    components,
    facts_of,
    is_dtensor_like,
    is_made_of_others,
    storage_key,
)
from dcp_placements.bind.own_chunks import names_its_chunks
from dcp_placements.bind.rule_and_dtensor import Placed, Placing, is_tensor
from dcp_placements.errors import Fault
from dcp_placements.layout.boxes import format_boxes
from dcp_placements.layout.sharding import Box
from dcp_placements.rules.mesh_axes import mesh_state


def tensor_faults(
    tensors: Iterable[tuple[str, torch.Tensor]], placed: Mapping[str, Placed], *, has_contents: bool
) -> list[Fault]:
    """Return a fault for each tensor without contents, and for each storage with two places.

    Args:
        tensors: Local tensors by the checkpoint's key; a stack has several.
        placed: The places of those that have one; a tensor without one is whole.
        has_contents: Whether a meta tensor, which has none, is a fault.
    """
    faults = []
    # By start in memory: the first tensor there, and all tensors where there are several.
    first: dict[int, tuple[str, torch.Tensor]] = {}
    starts: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for fqn, tensor in tensors:
        is_plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
        if has_contents and tensor.is_meta:
            faults.append(Fault(fqn, "is a meta tensor, which has no contents to save", _META))
            continue
        if not tensor.numel():
            continue
        start = tensor.data_ptr() if is_plain else data_pointer(tensor)
        if (
            # FSDP frees memory so; the cheap test comes first.
            is_plain
            and start == tensor.storage_offset() * tensor.itemsize
            and not tensor.untyped_storage().nbytes()
        ):
            headline = f"the storage of this {tuple(tensor.shape)} {tensor.dtype} tensor was freed"
            faults.append(Fault(fqn, headline, _FREED))
        elif not is_plain and _is_around_dtensors(tensor):
            kind = type(tensor).__name__
            headline = f"is a {kind} around DTensors, of which every rank has another part"
            faults.append(Fault(fqn, headline, _AROUND))
        elif start and first.setdefault(start, named := (fqn, tensor)) is not named:
            starts.setdefault(start, [first[start]]).append(named)
    for aliases in starts.values():
        faults += _alias_faults(aliases, placed)
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
    if isinstance(tensor, DTensor) or not is_made_of_others(tensor):
        return False
    inner = components(tensor)
    return any(isinstance(held, DTensor) or _is_around_dtensors(held) for held in inner)


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
        first_placed = placed.get(first)
        is_missed = first_placed is None or (first_placed.rule is None and fqn in placed)
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


def data_pointer(tensor: torch.Tensor, *, of_storage: bool = False) -> int:
    """Return where a tensor's elements, or those of all views of it, begin; 0 without memory."""
    try:
        return tensor.untyped_storage().data_ptr() if of_storage else tensor.data_ptr()
    except RuntimeError:  # wrapper subclasses and fake tensors have no memory
        return 0


def memory_faults(
    placing: Placing, destinations: Sequence[tuple[str, torch.Tensor]]
) -> list[Fault]:
    """Return the tensors whose memory does not keep what is read into it.

    Args:
        placing: The rank's state dict, bound.
        destinations: The tensors that are read into, and their keys; a key may have several.
    """
    faults = []
    # Each call of to_local() may make another tensor: what is read into it is lost at the end.
    like_dtensors: dict[str, list[Any]] = {}
    for fqn in dict.fromkeys([fqn for fqn, _ in destinations]):
        sources = placing.sources.get(fqn)
        values = [placing.state_dict[fqn]] if sources is None else [of.value for of in sources]
        if like := [of for of in values if not isinstance(of, DTensor) and is_dtensor_like(of)]:
            like_dtensors[fqn] = like
    storages: dict[str, set[int]] = {fqn: set() for fqn in like_dtensors}
    for fqn, tensor in destinations:
        if fqn in storages:
            storages[fqn].add(data_pointer(tensor, of_storage=True))
        is_spread = tensor.layout is torch.strided and not tensor.is_contiguous()
        if is_spread and share_memory([tensor]):
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
    for fqn, values in like_dtensors.items():
        for value in values:
            local = facts_of(value)[0]
            if local.numel() and data_pointer(local, of_storage=True) not in storages[fqn]:
                headline = (
                    f"to_local() of this {type(value).__name__} makes a copy: what is read would "
                    "be lost"
                )
                out = (
                    "way out:     load into the tensor that it holds, and make the copy afterwards"
                )
                faults.append(Fault(fqn, headline, (out,)))
                break
    return faults


def memory_key(value: Any) -> Hashable:
    """Return what only the names of one tensor have in common: its memory, and its own place.

    Tied weights have it in common, also where FSDP leaves a rank no elements of them.

    >>> w = torch.ones(4, 3)
    >>> memory_key(w) == memory_key(w.detach()), memory_key(w) == memory_key(w.clone())
    (True, False)
    >>> memory_key(w) == memory_key(w[:2]), memory_key(0.1)
    (False, None)

    Args:
        value: A value of a state dict.

    Returns:
        None for a value that is no tensor, or whose memory is not known.
    """
    if not is_tensor(value) or names_its_chunks(value):
        return None
    local, mesh, placements, shape = facts_of(value)
    storage = storage_key(local) if local.layout is torch.strided else None
    if storage is None:
        return None
    memory = storage, local.storage_offset(), local.dtype, _view_of(local)
    return memory, None if mesh is None else mesh_state(mesh), placements, tuple(shape)


def tied_keys(destinations: Sequence[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """Return the keys that overlap in memory, each with all that it overlaps, also over others.

    If the checkpoint has different tensors under the keys of one memory, the one that is read last
    would stay, so a load compares what it reads under all of them.

    >>> w, b = torch.ones(4), torch.ones(2)
    >>> tied_keys([("embed", w), ("head", w), ("bias", b)])
    {'embed': ('embed', 'head'), 'head': ('embed', 'head')}

    Args:
        destinations: The tensors that are read into, and their keys; a key may have several.
    """
    tensors = [tensor for _, tensor in destinations]
    # The start is 0 for tensors that have no memory, or none that can be seen.
    starts = np.array([data_pointer(tensor) for tensor in tensors], np.int64)
    nbytes = np.zeros(len(tensors), np.int64)
    for number in np.flatnonzero(starts).tolist():
        tensor = tensors[number]
        nbytes[number] = tensor.nbytes if tensor.is_contiguous() else extent(tensor)
    held = np.flatnonzero(nbytes)
    held = held[starts[held].argsort(kind="stable")]
    ends = np.maximum.accumulate((starts + nbytes)[held])
    cuts = (0, *np.flatnonzero(starts[held][1:] >= ends[:-1]) + 1, len(held))
    tied: dict[str, tuple[str, ...]] = {}
    for begin, end in pairwise(cuts):
        if end - begin < 2:
            continue
        overlapping = held[begin:end].tolist()
        views = [tensors[number] for number in overlapping]
        # The extent of a column of a matrix has other columns, too.
        if all(view.is_contiguous() for view in views) or share_memory(views):
            keys = tuple(dict.fromkeys([destinations[number][0] for number in sorted(overlapping)]))
            tied.update(dict.fromkeys(keys, keys))
    return tied


def share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two elements, of one tensor or of two, share memory.

    Each tensor marks its memory in units that divide all strides: if fewer bytes are marked than
    the tensors have, some are shared. The halves [:, :3] and [:, 3:] of a float32 (4, 6) tensor are
    rows of 12 bytes, 24 bytes apart: the unit is 12, the marks 0, 2, 4, 6 and 1, 3, 5, 7.

    >>> share_memory([torch.ones(3).expand(2, 3)]), share_memory([*torch.ones(4, 6).split(3, 1)])
    (True, False)
    """
    starts = list(map(data_pointer, tensors))
    first = min(starts)
    views: list[tuple[int, int, list[int], list[int]]] = []
    unit = 0
    for start, tensor in zip(starts, tensors, strict=True):
        block = tensor.itemsize  # adjacent bytes; the other dims repeat such blocks
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
    ends = [start - first + extent(tensor) for start, tensor in zip(starts, tensors, strict=True)]
    marks = np.zeros(max(ends) // max(unit, 1), bool)
    for offset, block, strides, sizes in views:
        shape, steps = (*sizes, block // unit), (*[stride // unit for stride in strides], 1)
        np.lib.stride_tricks.as_strided(marks[offset // unit :], shape, steps)[...] = True
    return int(marks.sum()) * unit < sum(tensor.nbytes for tensor in tensors)


def extent(tensor: torch.Tensor) -> int:
    """Return the count of bytes from the first element of a tensor to the end of its last."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.itemsize if tensor.numel() else 0
