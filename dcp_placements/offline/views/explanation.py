"""One tensor from its rule to the bytes of files: rule, axes, chunks, byte ranges."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
from dcp_placements.offline.views.cutting import fsdp_axes, in_mesh_order, layout_at, whole_sharding
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.rules.patterns import asked, rule_name
from dcp_placements.rules.placement import CheckpointPlacement, format_placement
from dcp_placements.storage.file_reads import CountedFile, FilePart
from dcp_placements.storage.tensor_record import RecordHeads


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """One stored chunk."""

    box: Box  # in the whole tensor
    file: str | None  # name of its file; None if the metadata names none
    rank: int | None  # the rank that wrote it, if the file's name tells it
    start: int  # where its record begins in the file, in bytes
    nbytes: int  # length of the record
    # Where its elements begin in the file; None if they are not stored contiguously and
    # untransformed, or the file is missing
    elements: int | None


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Where a part of a rank's tensor is read from."""

    box: Box  # the part, in the whole tensor
    file: str | None  # name of the file; None if the metadata names none
    first: int | None  # the first of its bytes in the file; None if that is not known
    last: int | None  # the byte after its last
    nbytes: int  # bytes of the part
    runs: int  # number of runs of consecutive bytes


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of the tensor that one rank holds."""

    rank: int  # its number, the last axis fastest
    coordinate: tuple[int, ...]  # its position along each axis
    local_shape: tuple[int, ...]  # of its local tensor, padding included
    ranges: tuple[ByteRange, ...]  # where its elements are in the files
    holes: tuple[Box, ...]  # its boxes that no chunk has


@dataclass(frozen=True, slots=True)
class Explanation:
    """One tensor, from its rule to the bytes of files."""

    fqn: str  # its key
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # its torch name without ``torch.``
    chunks: tuple[ChunkPlace, ...]  # where it is stored
    saved_rule: str | None  # the rule of the save, if the checkpoint records it
    saved_axes: Mapping[str, int]  # the mesh axes of the save, if the checkpoint records them
    # The cuts of the save in the order in which they applied, if the checkpoint records them
    saved_cuts: tuple[str, ...] = ()
    rule: str | None = None  # the rule that matches it among those given; None for none
    axes: Mapping[str, str] | None = None  # what each axis of the given mesh does to it, as text
    ranks: tuple[RankPart, ...] = ()  # the part that each rank of the given mesh holds


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
        rules: Called with each rank's place in the mesh, as for ``rehearse``; None to return only
            where the tensor is stored.
        axes: The mesh: sizes by axis name, the last axis fastest in rank order.
        fsdp: Axes over which FSDP cuts dim 0, inside the rule's cuts.
        rank: Only this one; None for all.

    Raises:
        CannotLook: There is no checkpoint, no such tensor in it, or ``rules`` fails; one of
            ``rules`` and ``axes`` without the other, or ``rank`` or ``fsdp`` without them.
        PlacementError: A rule that does not fit the tensor.
    """
    if (rules is None) != (axes is None) or (rules is None and (rank is not None or fsdp)):
        raise CannotLook("rules= and axes= go together; rank= and fsdp= need both")
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    tensor = tensor_of(checkpoint, fqn)
    provenance = checkpoint.provenance or {}
    record = checkpoint.record
    explanation = Explanation(
        fqn=fqn,
        shape=tensor.shape,
        dtype=tensor.dtype_name,
        chunks=tuple(_place(checkpoint, chunk) for chunk in tensor.chunks),
        saved_rule=(provenance.get("rules") or {}).get(fqn),
        saved_axes=provenance.get("axes") or {},
        saved_cuts=() if record is None else tuple(map(str, record.cuts(fqn))),
    )
    if rules is None or axes is None:
        return explanation
    fsdp = in_mesh_order(axes, fsdp)
    size = prod(axes.values())
    if rank is not None and not 0 <= rank < size:
        raise CannotLook(f"there is no rank {rank}: the mesh has {size}")
    metadata = checkpoint.metadata.state_dict_metadata[fqn]
    assert isinstance(metadata, TensorStorageMetadata)
    source = _Source(tensor, StoredChunks(metadata), explanation.chunks)
    example = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    parts: list[RankPart] = []
    for number in range(size) if rank is None else (rank,):
        rank_rules, *_ = rules_at(rules, axes, number)
        placement = asked(rank_rules, fqn, example) if tensor.shape else None
        own = fsdp_axes(tensor.shape, placement, fsdp)
        parts.append(source.part(number, placement, axes, own))
        if len(parts) == 1:
            rule = None if placement is None else rule_name(rank_rules, fqn)
            texts = _axis_texts(axes, placement, own)
    return replace(explanation, rule=rule, axes=texts, ranks=tuple(parts))


def tensor_of(checkpoint: Checkpoint, fqn: str) -> StoredTensor:
    """Return a tensor of a checkpoint.

    Raises:
        CannotLook: It has none of that name; near names are in the message.
    """
    if fqn in checkpoint.tensors:
        return checkpoint.tensors[fqn]
    if fqn in checkpoint.objects:
        stored = checkpoint.objects[fqn]
        raise CannotLook(
            f"{fqn} is an object and no tensor: {stored.nbytes} bytes from byte {stored.start} of "
            f"{stored.file}"
        )
    near = [key for key in checkpoint.tensors if key.endswith("." + fqn)]
    near = near or get_close_matches(fqn, list(checkpoint.tensors), 4)
    hint = (
        f"likely:      {format_names(near, 4)}" if near else "way out:     inspect lists its keys"
    )
    raise CannotLook(f"{checkpoint.path}: no tensor {fqn}\n    {hint}")


def _place(checkpoint: Checkpoint, chunk: StoredChunk) -> ChunkPlace:
    is_raw = checkpoint.format == SAFETENSORS
    elements = chunk.start if is_raw else _elements(checkpoint, chunk)
    return ChunkPlace(chunk.box, chunk.file, chunk.writer, chunk.start, chunk.nbytes, elements)


def _elements(checkpoint: Checkpoint, chunk: StoredChunk) -> int | None:
    """Return where a chunk's elements begin in its file."""
    if chunk.file is None or chunk.transforms or checkpoint.directory.size(chunk.file) is None:
        return None
    try:
        with checkpoint.directory.open(chunk.file) as stream:
            part = FilePart(CountedFile(stream), chunk.start, chunk.nbytes)
            record = RecordHeads().find(part, chunk.nbytes)
    except (OSError, EOFError):
        return None
    return None if record is None else chunk.start + record.start


def _axis_texts(
    axes: MeshAxes, placement: CheckpointPlacement | None, own: Sequence[str]
) -> dict[str, str]:
    """Return what each axis does to a tensor."""
    texts = dict.fromkeys(axes, "Replicate()")
    if placement is not None:
        names = placement.mesh.mesh_dim_names or ()
        for name, entry in zip(names, placement.placements, strict=False):
            if name in texts:
                texts[name] = format_placement(entry)
    return texts | dict.fromkeys(own, "FSDP: Shard(0) inside the rule's cuts")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where one tensor is stored."""

    tensor: StoredTensor
    stored: StoredChunks
    places: Sequence[ChunkPlace]

    def part(
        self,
        rank: int,
        placement: CheckpointPlacement | None,
        axes: MeshAxes,
        own: Sequence[str],
    ) -> RankPart:
        """Return the part that one rank holds.

        Raises:
            PlacementError: A rule that does not fit the tensor.
        """
        coordinate = mesh_at(axes, rank).get_coordinate()
        try:
            sharding = whole_sharding(self.tensor.shape, placement, axes, own)
            layout = layout_at(sharding, placement, axes, own, coordinate)
        except (PlacementError, LayoutError) as error:
            raise PlacementError(f"{self.tensor.fqn}: rank {rank}: {error}") from error
        ranges: list[ByteRange] = []
        holes: list[Box] = []
        for chunk in layout.chunks():
            meeting = self.stored.meeting(chunk.box)
            ranges += [self._range(self.places[n], stored, box) for n, stored, box in meeting]
            holes += uncovered(chunk.box, [box for _, _, box in meeting])
        return RankPart(rank, coordinate, layout.local_shape, tuple(ranges), tuple(holes))

    def _range(self, place: ChunkPlace, stored: Box, box: Box) -> ByteRange:
        """Return the bytes of a box within a stored chunk."""
        itemsize = self.tensor.dtype.itemsize
        nbytes = box.numel * itemsize
        offsets = [a - b for a, b in zip(box.offsets, stored.offsets, strict=True)]
        plan = segments(stored.sizes, offsets=offsets, lengths=box.sizes, itemsize=itemsize)
        runs = prod(plan.counts)
        if place.elements is None:
            return ByteRange(box, place.file, None, None, nbytes, runs)
        first = place.elements + plan.start
        steps = zip(plan.counts, plan.steps, strict=True)
        last = first + sum((count - 1) * step for count, step in steps) + plan.nbytes
        return ByteRange(box, place.file, first, last, nbytes, runs)
