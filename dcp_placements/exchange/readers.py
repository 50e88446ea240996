"""Which rank reads what several ranks need: the coordinator's part of an exchange.

With its plan each rank sends what it needs, in the tables of a save. Who reads a tensor for all is
who would write it in a save of what they hold, so a restart reads its own files. The coordinator
answers with the readers.

Two ranks that both need the norms of four layers, and each another expert::

    answer to both     norms: set 1, experts: 0, which is none
    set 1              ranks [0, 1], stops [2, 4]: rank 0 reads the first two norms, rank 1 the rest
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dcp_placements.errors import Fault
from dcp_placements.layout.boxes import Array, Ints
from dcp_placements.load.messages import LoadMessage
from dcp_placements.short_text import format_ranks
from dcp_placements.table.owners import runs_of
from dcp_placements.table.table import Sent, packed_ints
from dcp_placements.table.world import Piece, World


@dataclass(frozen=True, slots=True)
class Answer:
    """The coordinator's answer to what a rank could have from others.

    Attributes:
        is_active: Whether anything is exchanged on any rank; all ranks then agree after the reads.
        numbers: Packed: the set of each box of each key of each group; 0 for none.
        sets: By number, packed: the rank that reads it, then all that need it.
        obstacle: Why nothing is exchanged, where the user can change it.
    """

    is_active: bool = False
    numbers: bytes = packed_ints(())
    sets: Mapping[int, bytes] = field(default_factory=dict)
    obstacle: Fault | None = None


def answers(messages: Sequence[LoadMessage]) -> list[Answer]:
    """Return the coordinator's answer to each rank, where any would exchange.

    Args:
        messages: Of the ranks, in the order of the process group.
    """
    ranks = [one.rank for one in messages]
    without = [one.rank for one in messages if one.wish is None]
    why = way_out = ""
    if without:
        why = f"the planner of {format_ranks(without)} was not given exchange=True"
        way_out = "exchange=True on all ranks"
    elif not all(one.has_reader for one in messages):
        why = "the storage reader does not call the exchange after the reads"
        way_out = "storage_reader=PlacementFileSystemReader(path)"
    elif {one.group for one in messages} != {hash(tuple(ranks))}:
        why = f"the load runs on another process group, of {len(ranks)} ranks"
        way_out = "exchange=group, the one that the load runs on"
    if why:
        details = (f"because:     {why}", f"way out:     {way_out}")
        headline = "every rank reads all that it needs by itself"
        return [Answer(obstacle=Fault("exchange=True", headline, details))] * len(messages)
    return _readers([one.wish or Sent() for one in messages], ranks)


def _readers(wishes: Sequence[Sent], ranks: Sequence[int]) -> list[Answer]:
    """Return for each rank who reads what it needs."""
    world = World(wishes)
    # Bytes can be sent where the ranks have the keys in one shape and dtype.
    alike = [
        len({(source.group.shape, source.group.dtype) for source in piece.sources}) == 1
        for piece in world.pieces
    ]
    sent = [piece for piece, is_alike in zip(world.pieces, alike, strict=True) if is_alike]
    runs = runs_of(
        [piece.cover for piece in sent],
        [len(piece.fqns) for piece in sent],
        [piece.group.itemsize for piece in sent],
        ranks=len(wishes),
        undivided=[False] * len(sent),
    )
    # By the ranks that need a box, and the one among them that reads it, its number.
    numbers: dict[tuple[bytes, int], int] = {}
    sets = np.zeros(world.count, np.int32)
    for piece, run in zip(sent, runs, strict=True):
        piece.put(sets, _sets(piece, run, numbers))
    if not numbers:
        return [Answer()] * len(wishes)
    rank_of = np.array(ranks, np.int64)
    packed = []
    for members, reader in numbers:
        held = rank_of[np.frombuffer(members, np.int64)]
        packed.append(packed_ints([int(held[reader]), *held.tolist()]))
    found = []
    for row in world.by_rank(sets):
        own = {int(number): packed[number - 1] for number in np.unique(row) if number}
        found.append(Answer(True, packed_ints(row), own))
    return found


def _sets(piece: Piece, runs: Ints, numbers: dict[tuple[bytes, int], int]) -> Array:
    """Return by row and key of a piece the set of its box, which is numbered where it is new."""
    cover, keys = piece.cover, np.arange(len(piece.fqns))
    of_box = np.zeros((len(cover.boxes), len(keys)), np.int32)
    for box in np.flatnonzero((np.diff(cover.starts) > 1) & (cover.numel > 0)).tolist():
        rows = cover.order[cover.starts[box] : cover.starts[box + 1]]
        members = cover.ranks[rows].tobytes()
        readers = np.maximum.accumulate(runs[rows, 1]).searchsorted(keys, "right")
        for reader in dict.fromkeys(readers.tolist()):
            number = numbers.setdefault((members, reader), len(numbers) + 1)
            of_box[box, readers == reader] = number
    return of_box[cover.box_of]
