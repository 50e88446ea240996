"""What each path of an item is of the checkpoint, on one rank: plain values, which a file keeps.

An item is a nested dict that an engine saves as it is, in a file per rank. Its keys in the
checkpoint begin with its own: ``{"model": {"experts.w": ...}}`` has ``model.experts.w``, as in DCP.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from dcp_placements._torch import (
    facts_of,
    flatten_state_dict,
    has_hooks,
    is_dtensor_like,
    world_size,
)
from dcp_placements.bind.lint import dropped_rows, lint
from dcp_placements.bind.own_chunks import LISTS, lists_its_chunks
from dcp_placements.bind.place import numberings, place
from dcp_placements.bind.rank_shard import RankShard
from dcp_placements.bind.rule_and_dtensor import is_tensor
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Box
from dcp_placements.names.flat import Path, rename_keys
from dcp_placements.names.numbers import Numberings
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.names.renames import Step, recorded
from dcp_placements.names.stacks_and_parts import Rename
from dcp_placements.rules.patterns import Rules, compile_pattern
from dcp_placements.storage.file_reads import c_strides
from dcp_placements.storage.provenance import cut_of_plain, plain_of_cut
from dcp_placements.storage.safe_pickle import DTYPES
from dcp_placements.storage.saved_file import SavedChunk
from dcp_placements.table.digests import (
    DIGEST_NBYTES,
    full_digest,
    may_have_replicas,
    object_digest,
    sampled_digests,
)
from dcp_placements.table.table import OBJECT, Group, HeldBoxes, group_of, held_chunks, holding_of
from dcp_placements.table.whole import WholeModel, compare_with_whole
from dcp_placements.table.world import World


class PartOfPath(NamedTuple):
    """What a path is of one key of the checkpoint.

    Ep rank 1 of two, of an expert of shape ``(4, 3)``::

        PartOfPath("model.experts.w", Group("shard", (4, 3), ...), "'experts.w'",
                   (Box((2, 0), (2, 3)),),
                   (SavedChunk(("experts.w",), (2, 3), torch.float32, (2, 3), 0, (3, 1)),),
                   (b"... 8 bytes ...",))

    Attributes:
        fqn: The key.
        group: What it has in common with other keys.
        rule: The name of the rule that matched; None for no rule.
        boxes: In the whole tensor; some twice, where the rank holds copies.
        chunks: Of each box, where it lies in the local tensor at the path.
        digests: Of each box, of its contents; empty where there is none.
    """

    fqn: str
    group: Group
    rule: str | None
    boxes: tuple[Box, ...]
    chunks: tuple[SavedChunk, ...]
    digests: tuple[bytes, ...]

    def plain(self) -> dict[str, Any]:
        """Return it as plain values, without digests."""
        group = self.group
        return {
            "fqn": self.fqn,
            "rule": self.rule,
            "kind": group.kind,
            "shape": group.shape,
            "dtype": str(group.dtype).removeprefix("torch."),
            "axis_names": group.axis_names,
            "cuts": tuple(map(plain_of_cut, group.cuts)),
            "padded_shape": group.padded_shape,
            "parts": group.shards,
            "local_shape": self.chunks[0].shape if self.chunks else (),
            "chunks": tuple(
                [
                    (*box, chunk.start, chunk.steps)
                    for box, chunk in zip(self.boxes, self.chunks, strict=True)
                ]
            ),
        }

    @staticmethod
    def of_plain(path: Path, values: Mapping[str, Any], digests: Iterable[bytes]) -> PartOfPath:
        """Return the part of a path's plain values, and the digests of its boxes."""
        padded, dtype = values["padded_shape"], DTYPES.get(("torch", values["dtype"]))
        group = Group(
            values["kind"],
            tuple(values["shape"]),
            dtype,
            axis_names=tuple(values["axis_names"]),
            cuts=tuple([cut_of_plain(*cut) for cut in values["cuts"]]),
            padded_shape=None if padded is None else tuple(padded),
            shards=values["parts"],
        )
        boxes, chunks, local_shape = [], [], tuple(values["local_shape"])
        for offsets, sizes, start, steps in values["chunks"]:
            numbers = *offsets, *sizes, *steps, *local_shape, start
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError(f"{values['fqn']} has a chunk at {numbers}")
            boxes.append(Box(tuple(offsets), tuple(sizes)))
            _check_within(values["fqn"], local_shape, start, sizes, steps)
            lies = tuple(sizes), start, tuple(steps)
            chunks.append(SavedChunk(path, local_shape, dtype, *lies))
        of_boxes = tuple(boxes), tuple(chunks), tuple(digests)
        return PartOfPath(values["fqn"], group, values["rule"], *of_boxes)


def _check_within(
    fqn: str, shape: Sequence[int], start: int, sizes: Sequence[int], steps: Sequence[int]
) -> None:
    """Check that a chunk of a tensor of a shape is within it, and made of its dims.

    Raises:
        ValueError: It is not.
    """
    left: dict[int, int] = {}  # how many there are from the start, by step
    rest = start
    for size, step in zip(shape, c_strides(tuple(shape)), strict=True):
        index, rest = divmod(rest, step)
        left[step] = max(left.get(step, 0), size - index)
    longer = [(size, step) for size, step in zip(sizes, steps, strict=True) if size > 1]
    is_within = prod(shape) == 1 or all(size <= left.get(step, 0) for size, step in longer)
    if prod(sizes) and not (is_within and start < prod(shape)):
        raise ValueError(f"{fqn} has a chunk at {start} by {tuple(steps)} in {tuple(shape)}")


@dataclass(eq=False)
class RankParts:
    """What a rank has of an item.

    Attributes:
        paths: By path in the item, what it is of the checkpoint.
        renames: The renames in force.
        numberings: The lists of keys to which they give numbers.
        faults: What cannot be placed.
        notes: What is likely declared wrongly.
    """

    paths: dict[Path, list[PartOfPath]] = field(default_factory=dict)
    renames: tuple[Step, ...] = ()
    numberings: Numberings = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)

    @property
    def all(self) -> list[PartOfPath]:
        """The parts of all paths."""
        return [part for of_path in self.paths.values() for part in of_path]


def rank_parts(
    item_key: str,
    value: Any,
    rules: Rules | None,
    rename: Rename | None,
    *,
    whole: WholeModel | None = None,
    waive: Mapping[str, str] | None = None,
    has_contents: bool = True,
) -> RankParts:
    """Return what this rank has of an item.

    Args:
        item_key: Of the item.
        value: The item; of a file, with ``meta`` tensors.
        rules: This rank's.
        rename: This rank's.
        whole: The unsharded model, which the shapes here are compared with.
        waive: Patterns of keys that are not compared with it.
        has_contents: Whether the tensors have contents, of which there are digests then.
    """
    flat, mappings = flatten_state_dict({item_key: value})
    twins = _Twins(flat)
    renamed, twin_renamed = (
        rename_keys(values, mappings, rename) for values in (flat, twins.state_dict)
    )
    if renamed.faults or twin_renamed.faults:
        return RankParts(faults=renamed.faults or twin_renamed.faults)
    paths = renamed.mappings
    placing = twin = place(
        twin_renamed.state_dict,
        *(rules, paths, twin_renamed.reshaped),
        rename=rename,
        has_contents=False,
    )
    if has_contents:
        placing = place(renamed.state_dict, rules, paths, renamed.reshaped, rename=rename)
    found = RankParts({}, recorded(rename), numberings(placing, renamed.numbered))
    found.faults = [*placing.faults, *twins.faults]
    if found.faults:
        return found
    waived, placed_all = list(map(compile_pattern, waive or ())), placing.placed.values()
    if has_contents:
        found.notes += lint(placed_all, renamed=rename is not None, waived=waived)
    if has_contents and whole is None:
        found.notes += dropped_rows(placed_all, waived=waived)
    if whole is not None:
        holding = holding_of(placing.state_dict, placing.placed, {}, placing.absent)
        world = World([holding.sent])
        states = OptimizerStates(placing.state_dict)
        found.faults, notes, _ = compare_with_whole(whole, world, states, waived, complete=False)
        found.notes += notes
    views: dict[str, tuple[Group, HeldBoxes, list[Any]]] = {}
    contents: dict[str, list[torch.Tensor]] = {}
    for fqn, one in placing.state_dict.items():
        placed = placing.placed.get(fqn)
        if fqn in placing.absent:
            found.paths.setdefault(placing.mappings.get(fqn, (item_key, fqn))[1:], [])
            continue
        group, boxes = group_of(fqn, one if placed is None else placed)
        group = group._replace(layout=torch.strided, requires_grad=False)
        held, of_twin = [one], [None if group.kind == OBJECT else twin.state_dict[fqn]]
        if placed is not None:
            # With copies of a box, which a save leaves out.
            chunks = held_chunks(placed) if 0 in group.shape else placed.place.chunks
            boxes = tuple([Box(chunk.offsets, chunk.sizes) for chunk in chunks])
            held, of_twin = list(map(placed.view, chunks)), list(map(twin.placed[fqn].view, chunks))
        views[fqn] = group, boxes, of_twin
        if has_contents and group.kind != OBJECT and may_have_replicas(group, world_size()):
            contents[fqn] = held
    digests = iter(sampled_digests([one for held in contents.values() for one in held]))
    for fqn, (group, boxes, of_twin) in views.items():
        path = placing.mappings.get(fqn, (item_key, fqn))[1:]
        of_path: dict[Path, list[tuple[Box, SavedChunk, bytes]]] = {} if boxes else {path: []}
        for box, view in zip(boxes, of_twin, strict=True):
            digest = next(digests) if fqn in contents else None
            if group.kind == OBJECT and has_contents:
                digest = object_digest(placing.state_dict[fqn], partial(_in_object, fqn, found))
            key, start = twins.find(view)
            own = path if key is None else mappings[key][1:]
            lies = box.sizes, start, () if view is None else tuple(view.stride())
            chunk = SavedChunk(own, twins.shapes.get(key, ()), group.dtype, *lies)
            of_path.setdefault(own, []).append((box, chunk, (digest or b"")[:DIGEST_NBYTES]))
        for own, found_there in of_path.items():
            columns = tuple(zip(*found_there, strict=True)) or ((), (), ())
            rule = placing.placed[fqn].rule if fqn in placing.placed else None
            found.paths.setdefault(own, []).append(PartOfPath(fqn, group, rule, *columns))
    return found


def _in_object(fqn: str, found: RankParts, tensor: torch.Tensor) -> bytes | None:
    """Return the digest of a tensor in an object; a part of a tensor there is a fault."""
    if not is_dtensor_like(tensor):
        return full_digest(tensor)
    headline = "is an object with a DTensor in it: a load would put this rank's part there, whole"
    way_out = "way out:     a dict or a list in place of the tuple, or a key of its own"
    found.faults.append(Fault(fqn, headline, (way_out,)))
    return b""


def is_optimizer(item: Any) -> bool:
    """Whether an item is an optimizer's state, which has no key of the whole model's."""
    heads = {str(key).partition(".")[0] for key in item} if type(item) is dict else set()
    return bool(heads) and heads <= {"state", "param_groups"}


class _Twins:
    """A state dict without contents, of which each view tells what it is a view of.

    The tensors lie one after another in one ``meta`` storage, each in C order.

    Args:
        state_dict: Flat.

    Attributes:
        state_dict: The twins.
        shapes: Of the local tensors, by key.
        faults: Of tensors that cannot be read in place.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.state_dict: dict[str, Any] = dict(state_dict)
        self.shapes: dict[str | None, tuple[int, ...]] = {}
        self.faults: list[Fault] = []
        self._starts: list[int] = []
        self._keys: list[str] = []
        end, memory = 0, torch.empty(1 << 60, dtype=torch.uint8, device="meta")
        for key, value in state_dict.items():
            if not is_tensor(value):
                continue
            if has_hooks(value) or not _is_plain(facts_of(value)[0]):
                headline = f"is a {type(value).__name__} that cannot be read from a file in place"
                way_out = "way out:     a plain tensor or DTensor; or an item without a resharder"
                self.faults.append(Fault(key, headline, (way_out,)))
                continue
            local, mesh, placements, shape = facts_of(value)
            nbytes = local.numel() * local.dtype.itemsize
            twin: Any = memory[end : end + nbytes].view(local.dtype).view(local.shape)
            for name in (*LISTS, "global_shape") if lists_its_chunks(local) else ():
                setattr(twin, name, getattr(local, name))
            self._starts.append(end)
            self._keys.append(key)
            self.shapes[key] = tuple(local.shape)
            whole = twin if mesh is None else RankShard(twin, mesh, placements, shape)
            self.state_dict[key] = whole
            end += -(-nbytes // 16) * 16  # aligned for every dtype

    def find(self, view: torch.Tensor | None) -> tuple[str | None, int]:
        """Return the key of what a tensor is a view of, and where it begins there, in elements.

        No key where it has no elements.
        """
        if view is None or not view.numel():
            return None, 0
        start = int(view.storage_offset()) * view.dtype.itemsize
        # Tensors without elements begin where the next one does.
        at = bisect_right(self._starts, start) - 1
        return self._keys[at], (start - self._starts[at]) // view.dtype.itemsize


_FLATTEN = "__tensor_flatten__"
"""What tensors have that are made of others."""


def _is_plain(tensor: torch.Tensor) -> bool:
    is_other = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not is_other and not hasattr(tensor, _FLATTEN)
