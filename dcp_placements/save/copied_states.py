"""State that follows its parameter for its shape alone, and is a copy on each rank.

Dion keeps ``Q (N, R)`` beside a momentum ``(M, N)``, whole on each rank. Where two ep ranks hold
``(4, 4)`` each of a weight ``(8, 4)``, and R is 4, Q has the shape of a moment and would be stored
as ``(8, 4)``. The ranks then hold different parts by the declaration, and equal contents::

    rank 0    DoubtfulState("optim.state.w.Q", "Q", b"91f3...")    [0:4, :] of (8, 4)
    rank 1    DoubtfulState("optim.state.w.Q", "Q", b"91f3...")    [4:8, :] of (8, 4)

Nothing is inferred from that: the save warns, with the line that makes Q a replica. Nothing is sent
of moments that are known by name, of constants, as before a first step, and of more than a few keys
of a name and shape.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from dcp_placements.bind.rule_and_dtensor import Placed, Placing
from dcp_placements.errors import Fault
from dcp_placements.names.known_states import KNOWN_STATES
from dcp_placements.rules.patterns import matches_any
from dcp_placements.save.local_plan import DoubtfulState
from dcp_placements.short_text import format_count
from dcp_placements.table.digests import digests_of_varied
from dcp_placements.table.proof_faults import Holders
from dcp_placements.table.world import Piece, World

_MOST_OF_A_SHAPE = 4
"""Keys of one name and local shape that are sent: these mostly are right or wrong together."""


def doubtful_states(placing: Placing) -> tuple[DoubtfulState, ...]:
    """Return this rank's state that may be a copy on each rank. Called on every rank.

    Args:
        placing: The tensors of the rank, with the checkpoint's keys, optimizer state among them.
    """
    followers = [
        (fqn, placed)
        for fqn, placed in placing.placed.items()
        if placed.is_follower and not placed.is_whole
    ]
    if not followers:
        return ()
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    chosen: list[tuple[str, Placed]] = []
    for fqn, placed in sorted(followers, key=lambda item: item[0]):
        if (state := placing.states.of(fqn)) is None:
            continue
        key = state.name.partition(".")[0], tuple(placed.tensor.shape)
        if state.name not in KNOWN_STATES and counts[key] < _MOST_OF_A_SHAPE:
            counts[key] += 1
            chosen.append((key[0], placed))
    digests = digests_of_varied([placed.tensor for _, placed in chosen])
    return tuple(
        [
            DoubtfulState(placed.fqn, name, digest)
            for (name, placed), digest in zip(chosen, digests, strict=True)
            if digest is not None
        ]
    )


def copied_states(
    doubtful: Sequence[Sequence[DoubtfulState]],
    world: World,
    holders: Holders,
    waived: Sequence[re.Pattern[str]],
) -> list[Fault]:
    """Return a note for each name of state that ranks with other parts hold equal.

    Args:
        doubtful: What each rank has sent, as ``doubtful_states`` returns it.
        world: What the ranks hold.
        holders: The ranks, as messages name them.
        waived: Patterns of keys of which nothing is said.
    """
    digest_of: dict[str, dict[int, bytes]] = {}
    name_of: dict[str, str] = {}
    for rank, of_rank in enumerate(doubtful):
        for state in of_rank:
            if not matches_any(waived, state.fqn):
                digest_of.setdefault(state.fqn, {})[rank] = state.digest
                name_of[state.fqn] = state.name
    copied: dict[str, list[tuple[str, Piece]]] = {}
    for piece in world.pieces:
        for fqn in piece.fqns if digest_of else ():
            if fqn in digest_of and _are_copies(piece, digest_of[fqn]):
                copied.setdefault(name_of[fqn], []).append((fqn, piece))
    return [_note(name, of_name, holders) for name, of_name in copied.items()]


def _are_copies(piece: Piece, digests: dict[int, bytes]) -> bool:
    """Whether each content of a key is that of ranks that hold different boxes of it.

    Args:
        piece: The piece of the key.
        digests: The digest of its contents, by rank; of ranks without one, these are not known.
    """
    contents: Counter[bytes | None] = Counter()
    for ranks in piece.cover.ranks_by_boxes().values():
        of_boxes = {digests.get(rank) for rank in ranks}
        contents[of_boxes.pop() if len(of_boxes) == 1 else None] += 1
    return None not in contents and min(contents.values(), default=0) > 1


def _note(name: str, copied: Sequence[tuple[str, Piece]], holders: Holders) -> Fault:
    """Return the note on state of one name."""
    fqn, piece = copied[0]
    ranks = holders.name(sorted(set(piece.ranks.tolist())))
    sizes = tuple(piece.boxes[0][1].tolist())
    more = f", as {format_count(len(copied) - 1, 'other key')} of this name" if copied[1:] else ""
    return Fault(
        fqn,
        f"is cut like its parameter, and ranks with different parts have equal contents{more}",
        (
            f"found:       {sizes}, stored as {piece.group.shape}, on {ranks}",
            "likely:      each rank has all of it, and its shape is by chance that of a shard: it "
            "is stored several times in a row, and another topology loads a part of that",
            f'way out:     "state.**.{name}": None in the rules, above the rule of the parameter',
            "             or waive={pattern: reason} where these are parts",
        ),
    )
