"""Saves without collectives, which are refused, and the metadata of single ranks that they leave.

``dcp.save(..., use_collectives=False)`` writes no ``.metadata``, but one ``__<rank>.metadata`` per
rank with only that rank's chunks. So no reader finds the whole tensors in it, and torch's planner
loads on each rank what that rank saved. Two ep ranks, each with half of the experts::

    __0.metadata    experts.w1 of (4, 3): [0:2, :]
    __1.metadata    experts.w1 of (4, 3): [2:4, :]
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from dcp_placements.errors import PlacementError
from dcp_placements.short_text import format_names

_RANK_METADATA = re.compile(r"__\d+\.metadata")

_OUT = (
    "    likely:      dcp.save(..., use_collectives=False) by torch's planner\n"
    "    way out:     load it by torch's planner and reader on the ranks that saved it, each into "
    "what it had, and save that again with collectives"
)


def without_collectives() -> PlacementError:
    """Return the error of a save with ``use_collectives=False``."""
    return PlacementError(
        "use_collectives=False: such a save is refused, and nothing was written\n"
        "    reason:      each rank would describe its own part alone, in a __<rank>.metadata of "
        "its own, and no reader loads the whole tensors from these\n"
        "    way out:     drop it: to plan all ranks together takes milliseconds; a "
        "rank that has whole tensors saves them by itself with no_dist=True"
    )


def only_of_ranks(path: str | os.PathLike[str], names: Iterable[str]) -> str | None:
    """Return the text of an error if a directory has the metadata of single ranks alone.

    Args:
        path: The directory or URL, which has no ``.metadata``.
        names: The names of the files in it.

    Returns:
        The text; None if there are no metadata of ranks, either.
    """
    of_ranks = sorted(filter(_RANK_METADATA.fullmatch, names), key=lambda name: (len(name), name))
    if not of_ranks:
        return None
    return (
        f"{os.fspath(path)}: no checkpoint of whole tensors: there is no .metadata, and that of a "
        f"rank describes its own part alone\n    found:       {format_names(of_ranks, 4)}\n{_OUT}"
    )
