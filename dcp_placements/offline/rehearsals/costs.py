"""What the parts of a rank cost to read: bytes, read items and files.

Tensors of one shape and dtype that are stored alike are one class, and all ranks that hold the same
box of a class have the same need. So costs are computed once per need, not per tensor and rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_placements._torch import TensorStorageMetadata
from dcp_placements.layout.boxes import Index
from dcp_placements.layout.byte_ranges import segments
from dcp_placements.layout.sharding import Box, Intervals, Layout, Sharding
from dcp_placements.load.reads import holes_of, pieces_of
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.names.renames import Numbers, holds
from dcp_placements.offline.checkpoint import Checkpoint, StoredTensor
from dcp_placements.rules.placement import CheckpointPlacement
from dcp_placements.storage.merged_reads import SMALL_NBYTES, cheap_gap
from dcp_placements.storage.metadata.chunk_list import ChunkList
from dcp_placements.storage.metadata.record import Cuts, cuts_of
from dcp_placements.storage.metadata.table import Array
from dcp_placements.storage.tensor_record import HEADS_NBYTES


@dataclass(frozen=True, slots=True)
class Need:
    """What the tensors of a part cost every rank that holds one box of them."""

    wanted: int  # bytes of the elements
    memory: int  # bytes of the local tensors, padding included
    slices: int  # bytes that ``PlacementFileSystemReader`` reads
    chunks: int  # bytes that torch's ``FileSystemReader`` reads
    reads: int  # read items
    files: Array  # numbers of the files
    holes: tuple[Box, ...]  # boxes of each tensor that no chunk covers
    placeless: tuple[str, ...]  # keys of tensors with a chunk that has no file


@dataclass(slots=True, eq=False)
class TensorClass:
    """Tensors of one shape and dtype that are stored as the same boxes."""

    shape: tuple[int, ...]  # of the whole tensors
    dtype: torch.dtype  # of their elements
    stored: Index  # their chunks
    fqns: list[str]  # their keys
    files: Array  # the file's number, by tensor and chunk; -1 where the metadata name no file
    nbytes: Array  # the length of the record, by tensor and chunk
    example: torch.Tensor  # a meta tensor of that shape and dtype
    are_steps: bool  # whether they are stacked optimizer steps, of which the ranks have scalars
    _needs: dict[tuple[tuple[Intervals, ...], bytes], Need] = field(default_factory=dict)

    @property
    def total_nbytes(self) -> int:
        """Bytes of all whole tensors."""
        return len(self.fqns) * prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of one class under one rule, by their positions in the class."""

    tensors: TensorClass
    members: Array

    @property
    def key(self) -> Hashable:
        """Equal for equal parts."""
        return self.tensors, self.members.tobytes()

    @property
    def fqn(self) -> str:
        """The first key, which stands for all."""
        return self.tensors.fqns[int(self.members[0])]

    @property
    def fqns(self) -> list[str]:
        """All keys."""
        return [self.tensors.fqns[member] for member in self.members.tolist()]

    def need(self, layout: Layout) -> Need:
        """Return what a rank with this layout needs."""
        key = (layout.intervals, self.members.tobytes())
        needs = self.tensors._needs
        if key not in needs:
            needs[key] = _need(self, layout)
        return needs[key]


@dataclass(frozen=True, slots=True)
class RankPart:
    """The tensors of a part, as one rank holds them."""

    part: Part  # the tensors
    placement: CheckpointPlacement | None  # by the rank's rule; None without a rule
    rule: str | None  # the rule's name; None without a rule
    # Of all that decides how the tensors are cut, equal on all ranks that cut them alike
    key: Hashable
    # The axes over which FSDP cuts them, flattened into the last axis of ``sharding``
    own: Sequence[str]
    sharding: Sharding  # how they are cut
    layout: Layout  # where the rank's local tensors lie

    @property
    def content(self) -> Hashable:
        """Equal for ranks that hold the same boxes of the same tensors."""
        return self.part.key, self.layout.intervals

    def declared_cuts(self) -> Cuts:
        """Return the cuts of the tensors as a save in that world would record them."""
        names: list[str | None] = []
        if self.placement is not None:
            mesh = self.placement.mesh
            names += mesh.mesh_dim_names or [None] * len(mesh.shape)
        # Several axes flattened into one have no name that a save could have recorded.
        names.append(self.own[0] if len(self.own) == 1 else None)
        return cuts_of(self.sharding, names)


def tensor_classes(
    checkpoint: Checkpoint, expected: set[str] | None, file_numbers: Mapping[str, int]
) -> list[TensorClass]:
    """Return the tensors of a checkpoint by class."""
    by_kind: dict[Any, list[StoredTensor]] = {}
    states = OptimizerStates(checkpoint.metadata.state_dict_metadata)
    for fqn, tensor in checkpoint.tensors.items():
        if expected is None or fqn in expected:
            is_step = fqn.endswith(".step") and states.of(fqn) is not None
            kind = tensor.shape, tensor.dtype, tensor.cut, is_step
            by_kind.setdefault(kind, []).append(tensor)
    classes = []
    for (*_, are_steps), tensors in by_kind.items():
        first = tensors[0]
        chunks = [tensor.chunks for tensor in tensors]
        files = [[-1 if c.file is None else file_numbers[c.file] for c in row] for row in chunks]
        nbytes = [[chunk.nbytes for chunk in row] for row in chunks]
        shape = (len(tensors), len(first.boxes))  # also of tensors without chunks
        stored = checkpoint.metadata.state_dict_metadata[first.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        classes.append(
            TensorClass(
                first.shape,
                first.dtype,
                Index(ChunkList.of(stored.chunks, len(stored.size)).array),
                [tensor.fqn for tensor in tensors],
                np.array(files, np.int64).reshape(shape),
                np.array(nbytes, np.int64).reshape(shape),
                torch.empty(first.shape, dtype=first.dtype, device="meta"),
                are_steps,
            )
        )
    return classes


def parts_by_rule(
    classes: Sequence[TensorClass],
    rule_of: Callable[[str, TensorClass], Any],
    numbers: Numbers | None,
) -> list[Part]:
    """Return the tensors of each class that a rank has, by rule."""
    parts = []
    for tensors in classes:
        by_rule: dict[Any, list[int]] = {}
        for member, fqn in enumerate(tensors.fqns):
            if numbers is None or holds(numbers, fqn):
                rule = rule_of(fqn, tensors) if tensors.shape else None
                by_rule.setdefault(rule, []).append(member)
        parts += [Part(tensors, np.array(members, np.int64)) for members in by_rule.values()]
    return parts


def _need(part: Part, layout: Layout) -> Need:
    tensors, itemsize = part.tensors, part.tensors.dtype.itemsize
    members = len(part.members)
    of_chunk: dict[int, tuple[Box, list[Box]]] = {}  # by chunk: its box, and what is read of it
    holes: list[Box] = []
    destinations = [chunk.box for chunk in layout.chunks()]
    for box in destinations:
        met = pieces_of(box, tensors.stored)
        for index, chunk, piece in met:
            of_chunk.setdefault(index, (chunk, []))[1].append(piece)
        holes += holes_of(box, met)
    indices = np.array(list(of_chunk), np.int64)
    files = tensors.files[part.members][:, indices]
    nbytes = tensors.nbytes[part.members][:, indices]
    items = np.array([len(pieces) for _, pieces in of_chunk.values()], np.int64)
    slices = 0
    for column, (chunk, pieces) in enumerate(of_chunk.values()):
        exact = sum(piece.numel for piece in pieces) * itemsize
        lengths = nbytes[:, column]
        # The reader reads a small record whole if it needs most of it.
        whole = (lengths <= SMALL_NBYTES) & (2 * (exact + HEADS_NBYTES[0]) >= lengths)
        slices += int(np.where(whole, lengths, _slices_nbytes(chunk, pieces, itemsize)).sum())
    placeless = np.flatnonzero((files < 0).any(axis=1)).tolist()
    return Need(
        wanted=sum(box.numel for box in destinations) * itemsize * members,
        memory=prod(layout.local_shape) * itemsize * members,
        slices=slices,
        chunks=int((nbytes * items).sum()),
        reads=int(items.sum()) * members,
        files=np.unique(files[files >= 0]),
        holes=tuple(holes),
        placeless=tuple(tensors.fqns[int(part.members[row])] for row in placeless),
    )


def _slices_nbytes(stored: Box, pieces: Sequence[Box], itemsize: int) -> int:
    """Return the bytes that are read for pieces of a stored chunk, one after another."""
    return sum(
        segments(
            stored.sizes,
            offsets=[a - b for a, b in zip(piece.offsets, stored.offsets, strict=True)],
            lengths=piece.sizes,
            itemsize=itemsize,
            gap=cheap_gap,
        ).total_nbytes
        for piece in pieces
    )
