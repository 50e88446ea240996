"""The replica sets that a rank belongs to: ranks that need the same boxes, and which boxes.

Ranks need the same along every mesh axis that does not shard a tensor. Tensors with the same such
axes form one set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from dcp_placements._torch import (
    Metadata,
    MetadataIndex,
    ReadItem,
    TensorStorageMetadata,
    axis_group,
)
from dcp_placements.bind.binding import Place
from dcp_placements.bind.placed import Placing
from dcp_placements.layout.sharding import Box, Cut
from dcp_placements.load.exchange.broadcast import Line
from dcp_placements.load.exchange.shares import Claim, Destination, Share
from dcp_placements.storage.metadata.save_ids import writer_of

ReadsOf = Mapping[tuple[str, int], Sequence[ReadItem]]
"""The reads of each destination, by key and number of the chunk."""


class Target(NamedTuple):
    """A destination box of this rank that other ranks need, too.

    Attributes:
        fqn: The checkpoint's key.
        at: Its number among the tensor's chunks.
        box: The box, in the checkpoint's tensor.
        itemsize: Of the stored elements, in bytes.
        tensor: The local tensor that it is part of.
    """

    fqn: str
    at: int
    box: Box
    itemsize: int
    tensor: torch.Tensor

    @property
    def dim(self) -> int:
        """The first dim longer than 1, along which the box is split; 0 where there is none."""
        return next((dim for dim, size in enumerate(self.box.sizes) if size > 1), 0)

    def nbytes(self, share: Share) -> int:
        """Return how many bytes of the local tensor a share fills."""
        rows = self.box.sizes[self.dim] if self.box.sizes else 1
        return self.box.numel // rows * (share.stop - share.start) * self.tensor.dtype.itemsize

    def view(self, share: Share, lookup: Callable[[MetadataIndex], torch.Tensor]) -> torch.Tensor:
        """Return a share as a view of the memory that ``lookup`` returns for the box."""
        index = MetadataIndex(self.fqn, torch.Size(self.box.offsets), self.at)
        whole = lookup(index).detach()
        if not self.box.sizes:
            return whole
        return whole.narrow(self.dim, share.start, share.stop - share.start)


@dataclass(slots=True)
class ReplicaSet:
    """Ranks that need the same boxes: a grid, with one line per axis.

    Attributes:
        label: The names of the axes.
        lines: This rank's line along each axis.
        targets: The boxes.
    """

    label: str
    lines: tuple[Line, ...]
    targets: list[Target] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple([len(line.ranks) for line in self.lines])

    @property
    def coordinate(self) -> tuple[int, ...]:
        return tuple([line.position for line in self.lines])

    @property
    def member(self) -> int:
        """This rank's number: its place in the grid, the last axis fastest."""
        number = 0
        for position, size in zip(self.coordinate, self.sizes, strict=True):
            number = number * size + position
        return number

    def coordinate_of(self, member: int) -> tuple[int, ...]:
        """Return a member's place in the grid."""
        places = []
        for size in reversed(self.sizes):
            member, position = divmod(member, size)
            places.append(position)
        return tuple(reversed(places))

    def claim(self) -> Claim:
        """Return what this rank sends the coordinator for the set."""
        content = xxhash.xxh3_64()
        for target in self.targets:
            facts = (target.fqn, *target.box, target.tensor.dtype, target.tensor.device.type)
            content.update(repr(facts).encode())
        lines = tuple([line.hash(self.label) for line in self.lines])
        return Claim(content.intdigest(), lines, self.sizes, self.coordinate)


def replica_sets(
    state_dict: Mapping[str, Any],
    placing: Placing,
    metadata: Metadata,
    *,
    world: Line,
    excluded: Callable[[str], bool],
) -> list[ReplicaSet]:
    """Return the replica sets of a rank.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        metadata: The checkpoint's.
        world: All ranks of the load.
        excluded: Whether this rank reads a key for itself alone.
    """
    sets: dict[tuple[str, tuple[Line, ...]], ReplicaSet] = {}
    lines_of: dict[Place, tuple[str, tuple[Line, ...]]] = {}
    for fqn in sorted(state_dict):
        stored = metadata.state_dict_metadata.get(fqn)
        if not isinstance(stored, TensorStorageMetadata) or excluded(fqn):
            continue
        placed = placing.placed.get(fqn)
        value = state_dict[fqn] if placed is None else placed.tensor
        if not _has_plain_bytes(value):
            continue
        label = "plain tensors" if value.dim() else "scalars"
        lines: tuple[Line, ...] = (world,)
        boxes = [Box.whole(tuple(value.shape))]
        if placed is not None:
            # A tensor of stacked rows is no single piece of memory.
            if placed.is_stack or placed.has_own_key:
                continue
            if placed.place not in lines_of:
                lines_of[placed.place] = _replicated_lines(placed.place)
            label, lines = lines_of[placed.place]
            boxes = [chunk.box for chunk in placed.chunks]
        if math.prod(len(line.ranks) for line in lines) == 1:
            continue
        replicas = sets.setdefault((label, lines), ReplicaSet(label, lines))
        itemsize = stored.properties.dtype.itemsize
        replicas.targets += [
            Target(fqn, at, box, itemsize, value) for at, box in enumerate(boxes) if box.numel
        ]
    return [replicas for replicas in sets.values() if replicas.targets]


def _replicated_lines(place: Place) -> tuple[str, tuple[Line, ...]]:
    """Return the names of the axes that replicate a tensor, and this rank's line along each."""
    names: list[str] = []
    lines: list[Line] = []
    if place.is_uniform and place.homes:
        sharded = {cut.axis for cut in place.sharding.cuts if isinstance(cut, Cut)}
        for at, (axis, home) in enumerate(zip(place.axes, place.homes, strict=True)):
            if at in sharded or axis.size == 1:
                continue
            group = axis_group(*home)
            if group is not None and dist.get_world_size(group) == axis.size:
                names.append(str(axis.name))
                lines.append(Line.of(group))
    return " x ".join(names), tuple(lines)


def _has_plain_bytes(value: Any) -> bool:
    """Whether the bytes of a value can be sent as they are."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not (value.is_conj() or value.is_neg() or value.is_quantized)
    )


def destinations(replicas: ReplicaSet, reads: ReadsOf, metadata: Metadata) -> list[Destination]:
    """Return the boxes of a set as their shares are computed.

    Args:
        replicas: The set.
        reads: All that this rank needs.
        metadata: The checkpoint's.
    """
    # Only of a single line does a rank know all members.
    ranks = replicas.lines[0].ranks if len(replicas.lines) == 1 else ()
    boxes = []
    for target in replicas.targets:
        rows = target.box.sizes[target.dim] if target.box.sizes else 1
        writer = _writer(reads[target.fqn, target.at], metadata) if ranks else None
        member = ranks.index(writer) if writer in ranks else None
        boxes.append(Destination(target.box.numel * target.itemsize, rows, member))
    return boxes


def _writer(reads: Sequence[ReadItem], metadata: Metadata) -> int | None:
    """Return the rank that wrote a destination box, where it is stored as one chunk."""
    item, *others = reads
    stored = metadata.state_dict_metadata[item.storage_index.fqn]
    assert isinstance(stored, TensorStorageMetadata)
    if others or item.lengths != stored.chunks[item.storage_index.index or 0].sizes:
        return None
    info = (metadata.storage_data or {}).get(item.storage_index)
    return writer_of(str(getattr(info, "relative_path", "")))


def clipped(item: ReadItem, dim: int, share: Share) -> ReadItem | None:
    """Return the part of a read that falls into a share; None where there is none."""
    if not item.lengths:
        return item
    begin = item.dest_offsets[dim]
    start = max(begin, share.start)
    stop = min(begin + item.lengths[dim], share.stop)
    if start >= stop:
        return None
    if (start, stop) == (begin, begin + item.lengths[dim]):
        return item
    offsets = list(item.dest_offsets)
    stored_offsets = list(item.storage_offsets)
    lengths = list(item.lengths)
    offsets[dim], lengths[dim] = start, stop - start
    stored_offsets[dim] += start - begin
    return replace(
        item,
        dest_offsets=torch.Size(offsets),
        storage_offsets=torch.Size(stored_offsets),
        lengths=torch.Size(lengths),
    )
