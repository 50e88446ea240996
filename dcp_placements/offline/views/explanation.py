"""One tensor from its rule to the bytes of files: rule, axes, chunks, byte ranges."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod
from typing import Any

import torch

from dcp_placements._torch import TensorStorageMetadata
from dcp_placements.errors import CannotLook, PlacementError, format_names
from dcp_placements.layout.byte_ranges import segments
from dcp_placements.layout.sharding import Box, LayoutError
from dcp_placements.layout.tiling import uncovered
from dcp_placements.load.reads import StoredChunks
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint, StoredChunk, StoredTensor
from dcp_placements.offline.declared import MeshAxes, mesh_at, rules_at
from dcp_placements.offline.views.cutting import fsdp_axes, known_axes, layout_at, whole_sharding
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.rules.patterns import rule_name
from dcp_placements.rules.placement import format_placement
from dcp_placements.storage.file_reads import CountedFile, FilePart
from dcp_placements.storage.metadata.record import record_of
from dcp_placements.storage.tensor_record import RecordHeads


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """One stored chunk.

    Attributes:
        box: In the whole tensor.
        file: Name of its file; None where the metadata say no place.
        rank: The rank that wrote it, where the file's name says so.
        start: Where its record begins in the file, in bytes.
        nbytes: Length of the record.
        elements: Where its elements begin in the file; None where they do not lie there as they
            are (other strides, transforms), or the file is not there.
    """

    box: Box
    file: str | None
    rank: int | None
    start: int
    nbytes: int
    elements: int | None


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Where a part of a rank's tensor is read from.

    Attributes:
        box: The part, in the whole tensor.
        file: Name of the file; None where the metadata say no place.
        first: The first of its bytes in the file; None where that is not to be known.
        last: The byte behind its last.
        nbytes: Bytes of it.
        runs: In how many runs these bytes lie.
    """

    box: Box
    file: str | None
    first: int | None
    last: int | None
    nbytes: int
    runs: int


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank holds of the tensor.

    Attributes:
        rank: Its number, the last axis fastest.
        coordinate: Its position along each axis.
        local_shape: Of its local tensor, padding included.
        ranges: Where that is in the files.
        holes: What of it nobody stored.
    """

    rank: int
    coordinate: tuple[int, ...]
    local_shape: tuple[int, ...]
    ranges: tuple[ByteRange, ...]
    holes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One tensor, from its rule to the bytes of files.

    Attributes:
        fqn: Its key.
        shape: Of the whole tensor.
        dtype: Its torch name without ``torch.``.
        chunks: As it is stored.
        saved_rule: The rule that it was saved by, where that is stored.
        saved_axes: The mesh axes that it was saved from, where they are stored.
        saved_cuts: How axes cut it then, in the order in which they applied, where that is stored.
        rule: The rule that speaks for it among those that were given; None for none.
        axes: What each axis of the given mesh does to it, in words.
        ranks: What each rank of the given mesh holds of it.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[ChunkPlace, ...]
    saved_rule: str | None
    saved_axes: Mapping[str, int]
    saved_cuts: tuple[str, ...] = ()
    rule: str | None = None
    axes: Mapping[str, str] | None = None
    ranks: tuple[RankPart, ...] = ()


def explain(
    path: str | os.PathLike[str] | Checkpoint,
    fqn: str,
    *,
    rules: Callable[[MeshCoordinate], Any] | None = None,
    axes: MeshAxes | None = None,
    fsdp: Sequence[str] = (),
    rank: int | None = None,
) -> Explanation:
    """Return where a tensor is stored, and where each rank of a world would find its part.

    Args:
        path: The checkpoint.
        fqn: The tensor's key.
        rules: Called with each rank's place in the mesh, as for ``rehearse``; None: only what is
            stored is told.
        axes: The mesh: sizes by axis name, the last axis fastest in rank order.
        fsdp: Axes over which FSDP cuts dim 0 inside whatever the rule says.
        rank: Only this one; None for all.

    Raises:
        CannotLook: There is no checkpoint, no such tensor in it, or ``rules`` fails.
        PlacementError: A rule that does not fit the tensor.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    tensor = checkpoint.tensors.get(fqn)
    if tensor is None:
        raise _unknown(checkpoint, fqn)
    told = checkpoint.provenance or {}
    places = _places(checkpoint, tensor)
    record = record_of(checkpoint.metadata)
    explained = Explanation(
        fqn=fqn,
        shape=tensor.shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        chunks=places,
        saved_rule=(told.get("rules") or {}).get(fqn),
        saved_axes=told.get("axes") or {},
        saved_cuts=() if record is None else tuple(map(str, record.cuts(fqn))),
    )
    if rules is None or axes is None:
        return explained
    own = known_axes(axes, fsdp)
    size = prod(axes.values())
    if rank is not None and not 0 <= rank < size:
        raise CannotLook(f"there is no rank {rank}: the mesh has {size}")
    metadata = checkpoint.metadata.state_dict_metadata[fqn]
    assert isinstance(metadata, TensorStorageMetadata)
    work = _Ranks(tensor, StoredChunks(metadata), places, axes, own)
    parts = []
    for number in range(size) if rank is None else (rank,):
        spoken, *_ = rules_at(rules, axes, number)
        parts.append(work.part(number, spoken))
    return replace(explained, rule=work.rule, axes=work.told, ranks=tuple(parts))


def _unknown(checkpoint: Checkpoint, fqn: str) -> CannotLook:
    if fqn in checkpoint.objects:
        place = checkpoint.objects[fqn]
        return CannotLook(
            f"{fqn} is an object and no tensor: {place.nbytes} bytes from byte {place.start} of "
            f"{place.file}"
        )
    near = [key for key in checkpoint.tensors if key.endswith("." + fqn)]
    near = near or get_close_matches(fqn, list(checkpoint.tensors), 4)
    way = f"likely:      {format_names(near, 4)}" if near else "way out:     inspect lists its keys"
    return CannotLook(f"{checkpoint.path}: no tensor {fqn}\n    {way}")


def _places(checkpoint: Checkpoint, tensor: StoredTensor) -> tuple[ChunkPlace, ...]:
    raw = checkpoint.format == SAFETENSORS
    return tuple(
        ChunkPlace(
            chunk.box,
            chunk.file,
            chunk.writer,
            chunk.start,
            chunk.nbytes,
            chunk.start if raw else _elements(checkpoint, chunk),
        )
        for chunk in tensor.chunks
    )


def _elements(checkpoint: Checkpoint, chunk: StoredChunk) -> int | None:
    """Return where a chunk's elements begin in its file."""
    if chunk.file is None or chunk.transforms or checkpoint.directory.size(chunk.file) is None:
        return None
    try:
        with checkpoint.directory.open(chunk.file) as stream:
            part = FilePart(CountedFile(stream), chunk.start, chunk.nbytes)
            known = RecordHeads().find(part, chunk.nbytes)
    except (OSError, EOFError):
        return None
    return None if known is None else chunk.start + known.start


class _Ranks:
    """What ranks hold of one tensor.

    Attributes:
        rule: What the rule is called that spoke; None for none.
        told: What each axis does, in words.
    """

    def __init__(
        self,
        tensor: StoredTensor,
        stored: StoredChunks,
        places: Sequence[ChunkPlace],
        axes: MeshAxes,
        fsdp: Sequence[str],
    ) -> None:
        self.rule: str | None = None
        self.told: dict[str, str] = {}
        self._tensor = tensor
        self._stored = stored
        self._places = places
        self._axes = axes
        self._fsdp = fsdp

    def part(self, rank: int, rules: Any) -> RankPart:
        """Return what one rank holds.

        Raises:
            PlacementError: A rule that does not fit the tensor.
        """
        tensor, axes = self._tensor, self._axes
        placement = None
        if tensor.shape:
            placement = rules(
                tensor.fqn, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            )
        coordinate = mesh_at(axes, rank).get_coordinate()
        own = fsdp_axes(tensor.shape, placement, self._fsdp)
        try:
            sharding = whole_sharding(tensor.shape, placement, axes, own)
            layout = layout_at(sharding, placement, axes, own, coordinate)
        except (PlacementError, LayoutError) as error:
            raise PlacementError(f"{tensor.fqn}: rank {rank}: {error}") from error
        self._tell(rules, placement, own)
        ranges: list[ByteRange] = []
        holes: list[Box] = []
        for chunk in layout.chunks():
            meeting = self._stored.meeting(chunk.box)
            ranges += [self._range(at, stored, shared) for at, stored, shared in meeting]
            holes += uncovered(chunk.box, [shared for _, _, shared in meeting])
        return RankPart(rank, coordinate, layout.local_shape, tuple(ranges), tuple(holes))

    def _tell(self, rules: Any, placement: Any, own: Iterable[str]) -> None:
        if self.told:
            return
        self.rule = None if placement is None else rule_name(rules, self._tensor.fqn)
        said: dict[str, str] = {}
        if placement is not None:
            names = placement.mesh.mesh_dim_names or ()
            said = {
                name: format_placement(entry)
                for name, entry in zip(names, placement.placements, strict=False)
            }
        self.told = {
            name: "FSDP: Shard(0) inside the rule's cuts"
            if name in own
            else said.get(name, "Replicate()")
            for name in self._axes
        }

    def _range(self, at: int, stored: Box, shared: Box) -> ByteRange:
        place = self._places[at]
        itemsize = self._tensor.dtype.itemsize
        nbytes = shared.numel * itemsize
        offsets = [a - b for a, b in zip(shared.offsets, stored.offsets, strict=True)]
        plan = segments(stored.sizes, offsets=offsets, lengths=shared.sizes, itemsize=itemsize)
        if place.elements is None:
            return ByteRange(shared, place.file, None, None, nbytes, prod(plan.counts))
        first = place.elements + plan.start
        steps = zip(plan.counts, plan.steps, strict=True)
        last = first + sum((count - 1) * step for count, step in steps) + plan.nbytes
        return ByteRange(shared, place.file, first, last, nbytes, prod(plan.counts))
