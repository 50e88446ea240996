"""The keys of the checkpoint at each path of an item, on one rank, as plain values in a file.

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
    is_made_of_others,
    world_size,
)
from dcp_placements.bind.lint import lint
from dcp_placements.bind.own_chunks import LISTS, lists_its_chunks
from dcp_placements.bind.place import numberings, place
from dcp_placements.bind.rank_shard import RankShard
from dcp_placements.bind.rule_and_dtensor import Placing, is_tensor
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Box
from dcp_placements.names.flat import Path, rename_keys
from dcp_placements.names.recorded_numbers import Numberings
from dcp_placements.names.rename_results import Rename
from dcp_placements.names.renames import Step, recorded
from dcp_placements.rules.patterns import Rules, compile_pattern
from dcp_placements.storage.file_reads import c_strides
from dcp_placements.storage.provenance import cut_of_plain, plain_of_cut
from dcp_placements.storage.safe_pickle import DTYPES
from dcp_placements.storage.state_dict_file import SavedChunk
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


class KeyAtPath(NamedTuple):
    """What a path has of one key of the checkpoint.

    Ep rank 1 of two, of an expert of shape ``(4, 3)``::

        KeyAtPath("model.experts.w", Group("shard", (4, 3), ...), "'experts.w'",
                   (Box((2, 0), (2, 3)),),
                   (SavedChunk(("experts.w",), (2, 3), torch.float32, (2, 3), 0, (3, 1)),),
                   (b"... 8 bytes ...",))

    Attributes:
        fqn: The key.
        group: What it has in common with other keys.
        rule: The name of the rule that matched; None for no rule.
        boxes: In the whole tensor; some twice, where the rank holds copies.
        chunks: For each box, where it is in the local tensor at the path.
        digests: The digest of each box; empty where there is none.
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
    def of_plain(path: Path, values: Mapping[str, Any], digests: Iterable[bytes]) -> KeyAtPath:
        """Return what plain values, and the digests of its boxes, say of a key at a path."""
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
            chunks.append(
                SavedChunk(path, local_shape, dtype, tuple(sizes), start=start, steps=tuple(steps))
            )
        columns = tuple(boxes), tuple(chunks), tuple(digests)
        return KeyAtPath(values["fqn"], group, values["rule"], *columns)


def _check_within(
    fqn: str, shape: Sequence[int], start: int, sizes: Sequence[int], steps: Sequence[int]
) -> None:
    """Check that a chunk is within its local tensor, along the tensor's dims.

    From element 3 of a ``(4, 3)`` tensor there are 3 more rows and 3 columns::

        start 3, sizes (3, 3), steps (3, 1)    within
        start 3, sizes (4, 3), steps (3, 1)    one row too many

    Args:
        fqn: The key, for the message.
        shape: The shape of the local tensor.
        start: The first element of the chunk in it.
        sizes: The sizes of the chunk.
        steps: The distance of elements along each of its dims.

    Raises:
        ValueError: It is not.
    """
    left: dict[int, int] = {}  # by step, how many indices there are from the start
    rest = start
    for size, step in zip(shape, c_strides(tuple(shape)), strict=True):
        index, rest = divmod(rest, step)
        left[step] = max(left.get(step, 0), size - index)
    longer = [(size, step) for size, step in zip(sizes, steps, strict=True) if size > 1]
    is_within = prod(shape) == 1 or all(size <= left.get(step, 0) for size, step in longer)
    if prod(sizes) and not (is_within and start < prod(shape)):
        raise ValueError(f"{fqn} has a chunk at {start} by {tuple(steps)} in {tuple(shape)}")


@dataclass(eq=False)
class RankKeys:
    """The keys of the checkpoint that a rank has in an item.

    Attributes:
        paths: What each path in the item has of which keys.
        renames: The renames in force.
        numberings: The lists of keys to which they give numbers.
        faults: What cannot be placed.
        notes: What is likely declared wrongly.
    """

    paths: dict[Path, list[KeyAtPath]] = field(default_factory=dict)
    renames: tuple[Step, ...] = ()
    numberings: Numberings = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)

    @property
    def all(self) -> list[KeyAtPath]:
        """The keys at all paths; a key of several paths is there once for each."""
        return [key for of_path in self.paths.values() for key in of_path]


def rank_keys(
    item_key: str,
    value: Any,
    rules: Rules | None,
    rename: Rename | None,
    *,
    whole: WholeModel | None = None,
    waive: Mapping[str, str] | None = None,
    has_contents: bool = True,
) -> RankKeys:
    """Return the keys that this rank has in an item.

    Args:
        item_key: The key of the item.
        value: The item; one that a file describes has ``meta`` tensors.
        rules: This rank's rules.
        rename: This rank's renaming.
        whole: The unsharded model, which the shapes are compared with.
        waive: Patterns of keys that are not compared with it.
        has_contents: Whether the tensors have contents, which get digests then.
    """
    flat, mappings = flatten_state_dict({item_key: value})
    twins = _Twins(flat)
    renamed, twin_renamed = (
        rename_keys(values, mappings, rename) for values in (flat, twins.state_dict)
    )
    if renamed.faults or twin_renamed.faults:
        return RankKeys(faults=renamed.faults or twin_renamed.faults)
    paths = renamed.mappings
    placing = twin = place(
        twin_renamed.state_dict,
        *(rules, paths, twin_renamed.reshaped),
        rename=rename,
        has_contents=False,
    )
    if has_contents:
        placing = place(renamed.state_dict, rules, paths, renamed.reshaped, rename=rename)
    keys = RankKeys({}, recorded(rename), numberings(placing, renamed.numbered))
    keys.faults = [*placing.faults, *twins.faults]
    if keys.faults:
        return keys
    waived, placed_all = list(map(compile_pattern, waive or ())), placing.placed.values()
    if has_contents:
        keys.notes += lint(
            placed_all, renamed=rename is not None, waived=waived, checks_padding=whole is None
        )
    if whole is not None:
        holding = holding_of(placing.state_dict, placing.placed, {}, placing.absent)
        world = World([holding.packed()])
        against_whole = compare_with_whole(whole, world, placing.states, waived, complete=False)
        keys.faults = against_whole.faults
        keys.notes += against_whole.notes
    for fqn in filter(placing.absent.__contains__, placing.state_dict):
        keys.paths.setdefault(placing.mappings.get(fqn, (item_key, fqn))[1:], [])
    views = {
        fqn: _views_of(fqn, placing, twin)
        for fqn in placing.state_dict
        if fqn not in placing.absent
    }
    compared = [
        fqn
        for fqn, of_key in views.items()
        if has_contents
        and of_key.group.kind != OBJECT
        and may_have_replicas(of_key.group, world_size())
    ]
    digests = iter(sampled_digests([view for fqn in compared for view in views[fqn].contents]))
    of_tensors = {fqn: [next(digests) for _ in views[fqn].contents] for fqn in compared}
    for fqn, (group, boxes, contents, of_twin) in views.items():
        of_boxes: list[bytes | None] = of_tensors.get(fqn, [None] * len(contents))
        if group.kind == OBJECT and has_contents:
            digest = object_digest(placing.state_dict[fqn], partial(_in_object, fqn, keys))
            of_boxes = [digest for _ in boxes]
        path = placing.mappings.get(fqn, (item_key, fqn))[1:]
        of_path: dict[Path, list[tuple[Box, SavedChunk, bytes]]] = {} if boxes else {path: []}
        for box, view, of_box in zip(boxes, of_twin, of_boxes, strict=True):
            key, start = twins.find(view)
            own = path if key is None else mappings[key][1:]
            steps = () if view is None else tuple(view.stride())
            chunk = SavedChunk(
                own, twins.shapes.get(key, ()), group.dtype, box.sizes, start=start, steps=steps
            )
            of_path.setdefault(own, []).append((box, chunk, (of_box or b"")[:DIGEST_NBYTES]))
        rule = placing.placed[fqn].rule if fqn in placing.placed else None
        for own, rows in of_path.items():
            columns = tuple(zip(*rows, strict=True)) or ((), (), ())
            keys.paths.setdefault(own, []).append(KeyAtPath(fqn, group, rule, *columns))
    return keys


class _Views(NamedTuple):
    """What a rank has of one key, box by box.

    Attributes:
        group: What the key has in common with others.
        boxes: In the whole tensor; some twice, where the rank holds copies.
        contents: The tensor of each box, or the object.
        of_twin: The same view of the twin, which tells where it is; None of an object.
    """

    group: Group
    boxes: HeldBoxes
    contents: list[Any]
    of_twin: list[Any]


def _views_of(fqn: str, placing: Placing, twin: Placing) -> _Views:
    """Return what a rank has of one key.

    Args:
        fqn: The key.
        placing: The rank's tensors, bound.
        twin: Their twins, bound.
    """
    value, placed = placing.state_dict[fqn], placing.placed.get(fqn)
    group, boxes = group_of(fqn, value if placed is None else placed)
    group = group._replace(layout=torch.strided, requires_grad=False)
    if placed is None:
        of_twin = None if group.kind == OBJECT else twin.state_dict[fqn]
        return _Views(group, boxes, [value], [of_twin])
    # With copies of a box, which a save leaves out.
    chunks = held_chunks(placed) if 0 in group.shape else placed.place.chunks
    return _Views(
        group,
        tuple([Box(chunk.offsets, chunk.sizes) for chunk in chunks]),
        list(map(placed.view, chunks)),
        list(map(twin.placed[fqn].view, chunks)),
    )


def _in_object(fqn: str, keys: RankKeys, tensor: torch.Tensor) -> bytes | None:
    """Return the digest of a tensor in an object; a DTensor there is a fault.

    Args:
        fqn: The key of the object.
        keys: Get the fault.
        tensor: The tensor.
    """
    if not is_dtensor_like(tensor):
        return full_digest(tensor)
    headline = "is an object with a DTensor in it: a load would put this rank's part there, whole"
    way_out = "way out:     a dict or a list in place of the tuple, or a key of its own"
    keys.faults.append(Fault(fqn, headline, (way_out,)))
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
        shapes: The shapes of the local tensors, by key.
        faults: The tensors that cannot be read in place.
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
        """Return the key of the twin that a tensor is a view of, and its first element there.

        A tensor without elements has no key.
        """
        if view is None or not view.numel():
            return None, 0
        start = int(view.storage_offset()) * view.dtype.itemsize
        # A tensor without elements begins where the next one does.
        index = bisect_right(self._starts, start) - 1
        return self._keys[index], (start - self._starts[index]) // view.dtype.itemsize


def _is_plain(tensor: torch.Tensor) -> bool:
    is_other = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not is_other and not is_made_of_others(tensor)
