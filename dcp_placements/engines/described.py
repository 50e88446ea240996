"""What each path of an item is of the checkpoint, on one rank: plain values, which a file keeps.

An item is a nested dict that an engine saves as it is, in a file per rank. Its keys in the
checkpoint begin with its own: ``{"model": {"experts.w": ...}}`` has ``model.experts.w``, as in DCP.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dcp_placements._torch import facts_of, flatten_state_dict, has_hooks, world_size
from dcp_placements.bind.own_chunks import LISTS, lists_its_chunks
from dcp_placements.bind.rank_shard import RankShard
from dcp_placements.bind.state_dict import is_tensor, place
from dcp_placements.errors import Fault, RankFaults
from dcp_placements.layout.sharding import Box
from dcp_placements.names.flat import Path, rename_keys
from dcp_placements.names.renames import Step, recorded
from dcp_placements.names.stacks_and_parts import Rename
from dcp_placements.rules.patterns import Rules
from dcp_placements.storage.provenance import cut_of_plain, plain_of_cut
from dcp_placements.storage.safe_pickle import DTYPES
from dcp_placements.table.digests import digests_by_chunk, may_have_replicas
from dcp_placements.table.table import OBJECT, Group, Holding, group_of, held_chunks, holding_of


class ChunkOfPath(NamedTuple):
    """A chunk of a tensor of the checkpoint, in the local tensor at a path.

    Attributes:
        box: In the whole tensor.
        start: Where it begins in the local tensor, in elements of C order.
        steps: From one element to the next along each of its dims, likewise.
        digest: Of its contents; empty where there is none.
    """

    box: Box
    start: int = 0
    steps: tuple[int, ...] = ()
    digest: bytes = b""


class PartOfPath(NamedTuple):
    """What a path is of one key of the checkpoint.

    Ep rank 1 of two, of an expert of shape ``(4, 3)``::

        PartOfPath("model.experts.w", Group("shard", (4, 3), ...), (2, 3),
                   (ChunkOfPath(Box((2, 0), (2, 3)), 0, (3, 1)),))
    """

    fqn: str
    group: Group
    local_shape: tuple[int, ...]
    chunks: tuple[ChunkOfPath, ...]

    def plain(self) -> dict[str, Any]:
        """Return it as plain values, without digests."""
        group = self.group
        return {
            "fqn": self.fqn,
            "kind": group.kind,
            "shape": group.shape,
            "dtype": str(group.dtype).removeprefix("torch."),
            "axis_names": group.axis_names,
            "cuts": tuple(map(plain_of_cut, group.cuts)),
            "padded_shape": group.padded_shape,
            "parts": group.parts,
            "local_shape": self.local_shape,
            "chunks": tuple([(*one.box, one.start, one.steps) for one in self.chunks]),
        }

    @staticmethod
    def of_plain(values: Mapping[str, Any], digests: Iterable[bytes]) -> PartOfPath:
        """Return the part of plain values, and the digests of its chunks."""
        padded = values["padded_shape"]
        group = Group(
            values["kind"],
            tuple(values["shape"]),
            DTYPES.get(("torch", values["dtype"])),
            axis_names=tuple(values["axis_names"]),
            cuts=tuple([cut_of_plain(*cut) for cut in values["cuts"]]),
            padded_shape=None if padded is None else tuple(padded),
            parts=values["parts"],
        )
        chunks = [
            ChunkOfPath(Box(tuple(offsets), tuple(sizes)), start, tuple(steps), digest)
            for (offsets, sizes, start, steps), digest in zip(
                values["chunks"], digests, strict=True
            )
        ]
        return PartOfPath(values["fqn"], group, tuple(values["local_shape"]), tuple(chunks))


@dataclass(eq=False)
class RankParts:
    """What a rank has of an item.

    Attributes:
        paths: By path in the item, what it is of the checkpoint.
        renames: The renames in force.
        faults: What cannot be placed.
    """

    paths: dict[Path, list[PartOfPath]] = field(default_factory=dict)
    renames: tuple[Step, ...] = ()
    faults: list[Fault] = field(default_factory=list)


DigestOf = Callable[[str, Path, ChunkOfPath], bytes]
"""Gives the digest of a chunk of a key at a path."""


def rank_parts(
    item_key: str,
    value: Any,
    rules: Rules | None,
    rename: Rename | None,
    *,
    digest_of: DigestOf | None = None,
) -> RankParts:
    """Return what this rank has of an item.

    Args:
        item_key: Of the item.
        value: The item; of a file, with ``meta`` tensors.
        rules: This rank's.
        rename: This rank's.
        digest_of: Of what is in a file; None: the contents are read.
    """
    flat, mappings = flatten_state_dict({item_key: value})
    twins = _Twins(flat)
    try:
        state, paths, reshaped, _ = rename_keys(flat, mappings, rename)
        twin_state, _, twin_reshaped, _ = rename_keys(twins.state_dict, mappings, rename)
    except RankFaults as refusal:
        return RankParts(faults=list(refusal.faults))
    twin = place(twin_state, rules, paths, twin_reshaped, rename=rename, has_contents=False)
    placing, digests = twin, digest_of
    if digest_of is None:
        placing = place(state, rules, paths, reshaped, rename=rename)
    found = RankParts({}, () if rename is None else recorded(rename, flat, placing.state_dict))
    found.faults = [*placing.faults, *twins.faults]
    if found.faults:
        return found
    if digest_of is None:
        held = holding_of(placing.state_dict, placing.placed, {}, placing.absent).groups
        held = [one for one in held if may_have_replicas(one.group, world_size())]
        of_key = digests_by_chunk(Holding(held), "sampled", lambda index: None)

        def digests(fqn: str, path: Path, chunk: ChunkOfPath) -> bytes:
            by_offsets = of_key.get(fqn, {})  # of an object None
            return by_offsets.get(chunk.box.offsets, by_offsets.get(None, b""))

    assert digests is not None
    for fqn, one in placing.state_dict.items():
        placed = placing.placed.get(fqn)
        if fqn in placing.absent:
            continue
        group, boxes = group_of(fqn, one if placed is None else placed)
        group = group._replace(layout=torch.strided, requires_grad=False)
        views = [None] if group.kind == OBJECT else [twin.state_dict[fqn]]
        if placed is not None:
            views = list(map(twin.placed[fqn].view, held_chunks(twin.placed[fqn])))
        path = placing.mappings.get(fqn, (item_key, fqn))[1:]
        of_path: dict[Path, tuple[tuple[int, ...], list[ChunkOfPath]]] = {}
        if not boxes:
            of_path[path] = ((), [])
        for box, view in zip(boxes, views, strict=True):
            key, start = twins.find(view)
            own = path if key is None else mappings[key][1:]
            chunk = ChunkOfPath(box, start, () if view is None else tuple(view.stride()))
            chunk = chunk._replace(digest=digests(fqn, own, chunk)[:8])
            of_path.setdefault(own, (twins.shapes.get(key, ()), []))[1].append(chunk)
        for own, (shape, chunks) in of_path.items():
            found.paths.setdefault(own, []).append(PartOfPath(fqn, group, shape, tuple(chunks)))
    return found


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
