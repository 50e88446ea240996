"""What travels between a rank and the coordinator, and what a rank writes of it.

A rank sends its tables, boxes and digests, and beside them a statement: rules that matched, lint,
options. It gets an assignment, which it makes torch's write items of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, product, repeat
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import ChunkStorageMetadata, WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Box
from dcp_placements.names.renames import Step
from dcp_placements.rules.patterns import Matches
from dcp_placements.runs import WriteItemOfSave, made
from dcp_placements.save.digests import SentDigests
from dcp_placements.storage.metadata.pickles.tensor_properties import (
    PORTABLE_PROPERTIES,
    PROPERTIES,
)
from dcp_placements.table.table import OBJECT, PLAIN, SHARD, Group, Holding, Sent, unpacked_ints


class LocalPlan(NamedTuple):
    """All that one rank sends to the coordinator.

    Ep rank 1 of two, of a rule that shards ``experts.w1`` of shape ``(4, 3)``::

        LocalPlan(1, Sent((b"... table ...",), b"... 1 ...", b"... 2, 0, 2, 3 ..."), (1,))

    Attributes:
        rank: Its global rank.
        sent: Its tables and its boxes.
        coordinate: Its position along each of ``Statement.axis_sizes``, in that order.
        digests: Of what it holds.
        statement: A ``Statement``, pickled and compressed.
        faults: Why the rank cannot save, packed; it has nothing else then.
    """

    rank: int
    sent: Sent = Sent()
    coordinate: tuple[int, ...] = ()
    digests: SentDigests = SentDigests()
    statement: bytes = b""
    faults: bytes = b""


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank sends beside its keys; the same on most ranks of a pipeline stage.

    Attributes:
        matched: By rule the number of keys here; 0 of patterns that match none.
        rename_matches: By step of its rename, whether a key here matches.
        stateless: Parameters without optimizer state where others have it.
        notes: Warnings of this rank.
        renames: What the checkpoint is to keep of its rename.
        axis_sizes: Sizes of the named mesh axes that it knows of.
        digest_kind: ``"sampled"``, ``"full"`` or ``"off"``.
        world: Number of ranks, which decides of which groups there are digests.
        directory: That it writes into; empty for none.
        step: The training step that its planner was given; None for none.
    """

    matched: Matches = field(default_factory=dict)
    rename_matches: Matches = field(default_factory=dict)
    stateless: tuple[str, ...] = ()
    notes: tuple[Fault, ...] = ()
    renames: tuple[Step, ...] = ()
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    digest_kind: str = "off"
    world: int = 1
    directory: str = ""
    step: int | None = None


class Assignment(NamedTuple):
    """What the coordinator sends to one rank: what it writes.

    A *piece* is a group of a key table, or a part of one where other tables have some of its keys,
    too. The ranks that hold equal boxes of a piece each write a *run* of its keys: from one
    position among them to another.

    Attributes:
        runs: Packed: start and stop of a run for each box of each piece of each table of the rank,
            in order.
        pieces: For each table whose groups are split, packed: the piece of each key. Pieces are
            numbered in the order in which they begin.
        save_id: Names the save.
    """

    runs: bytes
    pieces: tuple[bytes, ...] = ()
    save_id: bytes = b""

    def is_written(self, holding: Holding) -> list[bool]:
        """Return for each box of each key of each group of ``holding`` if the rank writes it."""
        runs = iter(unpacked_ints(self.runs).reshape(-1, 2).tolist())
        is_written = []
        for at, groups in enumerate(holding.tables):
            of_keys = self.pieces[at] if self.pieces else b""
            split = iter(unpacked_ints(of_keys).tolist() if of_keys else ())
            # By piece, the runs of its boxes, and how many of its keys have been.
            runs_of: dict[int, list[list[int]]] = {}
            seen: dict[int, int] = {}
            for number, held in enumerate(groups):
                for _ in held.fqns:
                    piece = next(split, number)
                    if piece not in runs_of:
                        runs_of[piece] = list(islice(runs, len(held.boxes)))
                    position = seen.get(piece, 0)
                    seen[piece] = position + 1
                    is_written += [start <= position < stop for start, stop in runs_of[piece]]
        return is_written


def assigned_items(
    holding: Holding, assignment: Assignment, save: Any, *, is_known: bool = False
) -> list[WriteItem]:
    """Return the write items that a rank was assigned, group by group; a group's share data.

    Args:
        holding: What the rank has.
        assignment: What it writes of that.
        save: The state of its save, which the items know.
        is_known: Whether they know their tensors, too, where these have a place.
    """
    is_written = iter(assignment.is_written(holding))
    items: list[WriteItem] = []
    for held in holding.groups:
        boxes = [_values(held.group, box) for box in held.boxes]
        chunks = held.data() if is_known and held.group.kind == SHARD else repeat(None)
        for (fqn, (offsets, one)), chunk in zip(product(held.fqns, boxes), chunks, strict=False):
            if next(is_written):
                index = made(MetadataIndex, {"fqn": fqn, "offset": offsets, "index": None})
                values = {"index": index, **one, "run": save, "chunk": chunk}
                items.append(made(WriteItemOfSave, values))
    return items


def _values(group: Group, box: Box) -> tuple[torch.Size | None, dict[str, Any]]:
    """Return the offsets of the items of a group's box, and what these say of it."""
    if group.kind == OBJECT:
        return None, {"type": WriteItemType.BYTE_IO, "bytes_io_data": None, "tensor_data": None}
    kind = WriteItemType.TENSOR if group.kind == PLAIN else WriteItemType.SHARD
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, tensor_properties(group), torch.Size(group.shape))
    return chunk.offsets, {"type": kind, "bytes_io_data": None, "tensor_data": data}


def tensor_properties(group: Group) -> TensorProperties:
    """Return the properties of a group's tensors that metadata keeps.

    Strides, where torch has them, are those of C order; its own planner has those of the part that
    the first rank holds.
    """
    assert group.dtype is not None
    properties = TensorProperties(group.dtype, group.layout, group.requires_grad)
    if PROPERTIES > PORTABLE_PROPERTIES:
        vars(properties)["strides"] = torch.empty(group.shape, device="meta").stride()
    return properties
