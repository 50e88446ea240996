"""Which rank reads what several ranks need: the coordinator's part of an exchange.

Each rank sends what it needs with its plan, as tables like those of a save. The rank that would
write a tensor in a save of what the ranks hold reads it for all, so a restart reads its own files.
The coordinator answers with the readers.

Two ranks that both need the norms of four layers, and one expert each::

    answer to both     norms: set 1, experts: 0, which is none
    set 1              ranks [0, 1], stops [2, 4]: rank 0 reads the first two norms, rank 1 the rest
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dcp_placements.errors import Fault
from dcp_placements.layout.boxes import Array, Ints
from dcp_placements.load.load_message import LoadMessage
from dcp_placements.short_text import format_ranks
from dcp_placements.table.owners import runs_of
from dcp_placements.table.table import Sent, packed_ints
from dcp_placements.table.world import Piece, World


@dataclass(frozen=True, slots=True)
class Answer:
    """The coordinator's answer to what a rank could have from others.

    Attributes:
        is_active: Whether anything is exchanged on any rank; all ranks then agree after the reads.
        numbers: The number of the set of each box of each key of each group, packed; 0 for none.
        sets: The ranks of each set, packed, by its number: the reader, then all that need the box.
        obstacle: Why nothing is exchanged, where the user can change it.
    """

    is_active: bool = False
    numbers: bytes = packed_ints(())
    sets: Mapping[int, bytes] = field(default_factory=dict)
    obstacle: Fault | None = None


def answers(messages: Sequence[LoadMessage]) -> list[Answer]:
    """Return the coordinator's answer to each rank; called if any rank would exchange.

    Args:
        messages: The messages of the ranks, in the order of the process group.
    """
    ranks = [message.rank for message in messages]
    without = [message.rank for message in messages if message.wish is None]
    why = way_out = ""
    if without:
        why = f"the planner of {format_ranks(without)} was not given exchange=True"
        way_out = "exchange=True on all ranks"
    elif not all(message.has_reader for message in messages):
        why = "the storage reader does not call the exchange after the reads"
        way_out = "storage_reader=PlacementFileSystemReader(path)"
    elif {message.group for message in messages} != {hash(tuple(ranks))}:
        why = f"the load runs on another process group, of {len(ranks)} ranks"
        way_out = "exchange=group, the one that the load runs on"
    if why:
        details = (f"because:     {why}", f"way out:     {way_out}")
        headline = "every rank reads all that it needs by itself"
        return [Answer(obstacle=Fault("exchange=True", headline, details))] * len(messages)
    return _readers([message.wish or Sent() for message in messages], ranks)


def _readers(wishes: Sequence[Sent], ranks: Sequence[int]) -> list[Answer]:
    """Return the answers that say who reads what each rank needs."""
    world = World(wishes)
    # Bytes can be sent where the ranks have the keys in one shape and dtype.
    sent = [
        piece
        for piece in world.pieces
        if len({(source.group.shape, source.group.dtype) for source in piece.sources}) == 1
    ]
    runs = runs_of(
        [piece.cover for piece in sent],
        [len(piece.fqns) for piece in sent],
        [piece.group.itemsize for piece in sent],
        ranks=len(wishes),
        undivided=[False] * len(sent),
    )
    # The number of each set, by the ranks that need a box and the reader's position among them.
    numbers: dict[tuple[bytes, int], int] = {}
    sets = np.zeros(world.count, np.int32)
    for piece, of_piece in zip(sent, runs, strict=True):
        piece.put(sets, _sets(piece, of_piece, numbers))
    if not numbers:
        return [Answer()] * len(wishes)
    rank_of = np.array(ranks, np.int64)
    packed = []
    for members, reader in numbers:
        needing = rank_of[np.frombuffer(members, np.int64)]
        packed.append(packed_ints([int(needing[reader]), *needing.tolist()]))
    answers_of_ranks = []
    for row in world.by_rank(sets):
        own = {int(number): packed[number - 1] for number in np.unique(row) if number}
        answers_of_ranks.append(Answer(True, packed_ints(row), own))
    return answers_of_ranks


def _sets(piece: Piece, runs: Ints, numbers: dict[tuple[bytes, int], int]) -> Array:
    """Return the number of the set of each row and key of a piece; number sets that are new."""
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
