"""What each path of an item is of the checkpoint, on one rank: plain values, which a file keeps.

An item is a nested dict that an engine saves as it is, in a file per rank. Its keys in the
checkpoint begin with its own: ``{"model": {"experts.w": ...}}`` has ``model.experts.w``, as in DCP.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dcp_placements._torch import facts_of, flatten_state_dict, has_hooks, world_size
from dcp_placements.bind.own_chunks import LISTS, lists_its_chunks
from dcp_placements.bind.rank_shard import RankShard
from dcp_placements.bind.state_dict import is_tensor, place
from dcp_placements.errors import Fault, RankFaults
from dcp_placements.layout.sharding import Box
from dcp_placements.names.flat import Path, check_texts, rename_keys
from dcp_placements.names.renames import Step, recorded
from dcp_placements.names.stacks_and_parts import Rename
from dcp_placements.rules.patterns import Rules
from dcp_placements.storage.provenance import (
    cut_of_plain,
    plain_of_cut,
    plain_of_rename,
    rename_of_plain,
)
from dcp_placements.storage.safe_pickle import DTYPES
from dcp_placements.table.digests import digests_by_chunk, may_have_replicas
from dcp_placements.table.table import OBJECT, Group, Holding, group_of, held_chunks, holding_of

VERSION = 1
"""Of the plain values."""

_ALIGNMENT = 16


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
        """Return it as plain values."""
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
    def of_plain(values: Mapping[str, Any], digests: Sequence[bytes]) -> PartOfPath:
        """Return the part of plain values, and the digests of its chunks."""
        group = Group(
            str(values["kind"]),
            _ints(values["shape"]),
            None if values["kind"] == OBJECT else DTYPES["torch", values["dtype"]],
            axis_names=tuple(values["axis_names"]),
            cuts=tuple([cut_of_plain(*cut) for cut in values["cuts"]]),
            padded_shape=None if values["padded_shape"] is None else _ints(values["padded_shape"]),
            parts=values["parts"],
        )
        chunks = tuple(
            [
                ChunkOfPath(Box(_ints(offsets), _ints(sizes)), int(start), _ints(steps), digest)
                for (offsets, sizes, start, steps), digest in zip(
                    values["chunks"], digests, strict=True
                )
            ]
        )
        return PartOfPath(str(values["fqn"]), group, _ints(values["local_shape"]), chunks)


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))


@dataclass
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

    def plain(self, path: Path) -> tuple[dict[str, Any], tuple[tuple[bytes, ...], ...]]:
        """Return as plain values what a path is, and the digests of its chunks, part by part."""
        parts = tuple([part.plain() for part in self.paths[path]])
        digests = tuple([tuple([one.digest for one in p.chunks]) for p in self.paths[path]])
        return {"parts": parts, "renames": tuple(map(plain_of_rename, self.renames))}, digests

    def add_plain(self, path: Path, values: Mapping[str, Any]) -> None:
        """Take in plain values, with digests."""
        self.paths[path] = list(map(PartOfPath.of_plain, values["parts"], values["digests"]))
        self.renames = tuple([rename_of_plain(*step) for step in values["renames"]])


DigestOf = Callable[[Path, ChunkOfPath], bytes]


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
    is_file = digest_of is not None
    flat, mappings = flatten_state_dict({item_key: value})
    try:
        check_texts(flat)
        state, paths, reshaped, _ = rename_keys(flat, mappings, rename)
        twins = _Twins(flat)
        twin_state, _, twin_reshaped, _ = rename_keys(twins.state_dict, mappings, rename)
    except RankFaults as refusal:
        return RankParts(faults=list(refusal.faults))
    twin = place(twin_state, rules, paths, twin_reshaped, rename=rename, has_contents=False)
    placing = twin if is_file else place(state, rules, paths, reshaped, rename=rename)
    found = RankParts({}, () if rename is None else recorded(rename, flat, placing.state_dict))
    found.faults = [*placing.faults, *twins.faults]
    if found.faults:
        return found
    digests: Mapping[str, Mapping[Any, bytes]] = {}
    if not is_file:
        holding = holding_of(placing.state_dict, placing.placed, {}, placing.absent)
        shared = [one for one in holding.groups if may_have_replicas(one.group, world_size())]
        digests = digests_by_chunk(Holding(shared), "sampled", lambda index: None)
    for fqn, held in placing.state_dict.items():
        if fqn in placing.absent:
            continue
        placed = placing.placed.get(fqn)
        group, boxes = group_of(fqn, held if placed is None else placed)
        group = group._replace(layout=torch.strided, requires_grad=False)
        views: Sequence[Any] = [None]
        if placed is not None:
            views = list(map(twin.placed[fqn].view, held_chunks(twin.placed[fqn])))
        elif group.kind != OBJECT:
            views = [twin.state_dict[fqn]]
        if not boxes:
            own = placing.mappings.get(fqn, (item_key, fqn))[1:]
            found.paths.setdefault(own, []).append(PartOfPath(fqn, group, (), ()))
        of_path: dict[Path, list[ChunkOfPath]] = {}
        shapes: dict[Path, tuple[int, ...]] = {}
        for box, view in zip(boxes, views, strict=True):
            key, start = twins.find(view)
            at_key = placing.mappings.get(fqn, (item_key, fqn))
            own = (mappings[key] if key is not None else at_key)[1:]
            chunk = ChunkOfPath(box, start, () if view is None else tuple(view.stride()))
            at = None if group.kind == OBJECT else box.offsets
            digest = digests.get(fqn, {}).get(at, b"")
            digest = digest_of(own, chunk) if digest_of is not None else digest
            of_path.setdefault(own, []).append(chunk._replace(digest=digest[:8]))
            shapes[own] = twins.shapes.get(key, ())
        for own, chunks in of_path.items():
            part = PartOfPath(fqn, group, shapes[own], tuple(chunks))
            found.paths.setdefault(own, []).append(part)
    return found


class _Twins:
    """A state dict without contents, of which each view tells what it is a view of.

    The tensors lie one after another in one ``meta`` storage, in C order each.

    Args:
        state_dict: Flat.

    Attributes:
        state_dict: The twins.
        shapes: Of the local tensors, by key.
        faults: Of tensors that an engine's file cannot be read in place of.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.state_dict: dict[str, Any] = dict(state_dict)
        self.shapes: dict[str | None, tuple[int, ...]] = {}
        self.faults: list[Fault] = []
        self._starts: list[int] = []
        self._keys: list[str] = []
        end, facts = 0, {}
        for key, value in state_dict.items():
            if not is_tensor(value):
                continue
            local = None if has_hooks(value) else facts_of(value)[0]
            if local is None or local.is_quantized or local.layout is not torch.strided:
                kind = type(value).__name__ if local is None else f"{local.layout} {local.dtype}"
                headline = f"is a {kind} tensor, of which no part of a file can be read in place"
                way_out = "way out:     a plain tensor or DTensor; or an item without a resharder"
                self.faults.append(Fault(key, headline, (way_out,)))
                continue
            facts[key] = facts_of(value)
            self._starts.append(end)
            self._keys.append(key)
            self.shapes[key] = tuple(local.shape)
            end += -(-local.numel() * local.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        memory = torch.empty(end, dtype=torch.uint8, device="meta")
        for start, key in zip(self._starts, self._keys, strict=True):
            local, mesh, placements, shape = facts[key]
            nbytes = local.numel() * local.dtype.itemsize
            twin = memory[start : start + nbytes].view(local.dtype).view(local.shape)
            if lists_its_chunks(local):
                for name in (*LISTS, "global_shape"):
                    setattr(twin, name, getattr(local, name))
            self.state_dict[key] = (
                twin if mesh is None else RankShard(twin, mesh, placements, shape)
            )

    def find(self, view: torch.Tensor | None) -> tuple[str | None, int]:
        """Return the key of what a tensor is a view of, and where it begins there, in elements.

        No key where it has no elements.
        """
        if view is None or not view.numel():
            return None, 0
        start = int(view.storage_offset()) * view.dtype.itemsize
        at = bisect_right(self._starts, start) - 1
        # Tensors without elements begin where the next one does.
        return self._keys[at], (start - self._starts[at]) // view.dtype.itemsize
