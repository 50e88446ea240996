"""Names of ranks' files: which file is which rank's, and which are not the model's.

verl's FSDP trainers leave, of a world of 8 ranks, in ``global_step_N/actor``::

    model_world_size_8_rank_0.pt .. _rank_7.pt        the model: DTensors of FSDP2
    optim_world_size_8_rank_0.pt ..                   the optimizer's state, by position
    extra_state_world_size_8_rank_0.pt ..             schedule and random states
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice

from dcp_placements.errors import CannotLook, Fault, raise_faults
from dcp_placements.short_text import format_names

_VERLS_MODEL = re.compile(r"model_world_size_(\d+)_rank_\{rank\}\.pt")
_VERLS_OTHERS = {
    "optim_world_size_": "optimizer state by position: no file has the names of its parameters",
    "extra_state_world_size_": "schedule and random states: of the run, not of the model",
}
MOST_NAMED = 8
"""Missing ranks that a message names."""

_NUMBERED = re.compile(r"(.*rank[_-]?)(\d+)(\.(?:pt|pth|bin))")


def rank_file_names(names: Iterable[str], pattern: str | None = None) -> dict[str, dict[int, str]]:
    """Return the names of ranks' files: by their common text, and by rank.

    Args:
        names: Names of all files of a directory.
        pattern: The files' name with ``{rank}`` for the rank's number; None for all names that end
            in a rank's number.

    >>> rank_file_names(["m_rank_0.pt", "m_rank_1.pt", "notes.txt"])
    {'m_rank_{rank}.pt': {0: 'm_rank_0.pt', 1: 'm_rank_1.pt'}}
    >>> rank_file_names(["shard-0.pth", "m_rank_0.pt"], "shard-{rank}.pth")
    {'shard-{rank}.pth': {0: 'shard-0.pth'}}
    """
    numbered = _NUMBERED
    if pattern is not None:
        head, _, tail = pattern.partition("{rank}")
        numbered = re.compile(f"({re.escape(head)})(\\d+)({re.escape(tail)})")
    kinds: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        if (match := numbered.fullmatch(name)) is not None:
            kinds.setdefault(f"{match[1]}{{rank}}{match[3]}", {})[int(match[2])] = name
    return kinds


def why_left_out(name: str) -> str | None:
    """Return why a file of verl's is not the model's; None for other files."""
    return next((why for head, why in _VERLS_OTHERS.items() if name.startswith(head)), None)


def names_by_rank(path: str, names: Iterable[str], pattern: str | None) -> Sequence[str]:
    """Return the name of each rank's file, in rank order.

    Args:
        path: Path of the directory, for messages.
        names: Names of all files in it.
        pattern: Argument of ``rank_file_names``.

    Raises:
        CannotLook: There are no such names, or those of several kinds; or the pattern has no
            place for the rank.
        PlacementError: Ranks are missing.
    """
    names = sorted(names)
    if pattern is not None and "{rank}" not in pattern:
        raise CannotLook(
            f"files={pattern!r} has no {{rank}}, for the number of the rank\n"
            "    way out:     such as --files 'shard-{rank}.pth'"
        )
    kinds = rank_file_names(names, pattern)
    if pattern is None:
        models = [kind for kind in kinds if _VERLS_MODEL.fullmatch(kind)]
        kinds = {kind: kinds[kind] for kind in models or kinds if not why_left_out(kind)}
    if len(kinds) != 1:
        raise CannotLook(
            f"{path}: {'files of several kinds' if kinds else 'no file per rank'}\n"
            f"    found:       {format_names(list(kinds) or names, 6) or 'nothing'}\n"
            "    way out:     files= (--files NAME_{rank}.pt) says which"
        )
    ((kind, by_rank),) = kinds.items()
    others = {*names}.difference(by_rank.values())
    if again := [name for name in sorted(others) if kind in rank_file_names([name], pattern)]:
        raise CannotLook(
            f"{path}: several files of one rank: {format_names(again, 4)} beside those whose "
            "numbers are written otherwise\n"
            "    likely:      files of two saves, of which one writes 01 for 1\n"
            "    way out:     a directory with the files of one of them"
        )
    verls = _VERLS_MODEL.fullmatch(kind)
    size = int(verls[1]) if verls else max(by_rank) + 1
    # A name may have any number: ranks are not listed one by one.
    lacking = size - sum(rank < size for rank in by_rank)
    missing = islice((str(rank) for rank in range(size) if rank not in by_rank), MOST_NAMED)
    headline = f"of {size} ranks these have no file: {', '.join(missing)}"
    if lacking > MOST_NAMED:
        headline += f" and {lacking - MOST_NAMED:,} more"
    elif not lacking:
        headline = f"files of {len(by_rank)} ranks, of which there are {size} by their names"
    if lacking or len(by_rank) > size:
        raise_faults(f"{path} is not complete", [Fault(kind, headline)])
    return [by_rank[rank] for rank in range(size)]
