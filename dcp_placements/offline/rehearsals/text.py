"""A rehearsal as text: what each rank reads, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dcp_placements.errors import format_count, format_faults, format_name, format_nbytes
from dcp_placements.layout.boxes import format_box
from dcp_placements.offline.declared import format_mesh_axes
from dcp_placements.offline.texts import format_table, ranges, short

if TYPE_CHECKING:
    from dcp_placements.offline.rehearsals.rehearsal import RankRehearsal, Rehearsal, Request

COLUMNS = ("ranks", "wants", "reads", "reads/wants", "stock", "stock/wants", "chunks", "files")
MAX_ROWS = 16
MAX_RANKS_WIDTH = 16


def rehearsal_text(rehearsal: Rehearsal, width: int | None = None) -> str:
    """Return a table of ranks, or of requests; sums; and whether it loads.

    Args:
        rehearsal: Its result.
        width: Of a terminal, to which the table is folded.
    """
    if rehearsal.requests:
        requests = [_request(one) for one in rehearsal.requests]
        table = format_table(("key", "box", "ranks", "files"), requests, width=width)
    else:
        rows = _rows(rehearsal.ranks)
        table = format_table(COLUMNS, rows, right=" ".join(COLUMNS[1:]), width=width)
    ranks = format_count(len(rehearsal.ranks), "rank")
    memory = max(rank.memory_nbytes for rank in rehearsal.ranks)
    ours = format_nbytes(sum(rank.slices_nbytes for rank in rehearsal.ranks))
    stock = format_nbytes(sum(rank.chunks_nbytes for rank in rehearsal.ranks))
    exchanged = format_nbytes(sum(rank.exchange_nbytes for rank in rehearsal.ranks))
    lines = [
        "",
        f"mesh:      {format_mesh_axes(rehearsal.axes)}: {ranks}",
        f"memory:    {format_nbytes(memory)} at most, on a rank",
        f"in all:    {ours} read of {format_nbytes(rehearsal.unique_nbytes)}, stock {stock}",
        f"exchange:  {exchanged} read with exchange=True",
        f"uncut:     {format_count(rehearsal.replicated, 'tensor')}, whole on every rank",
    ]
    for label, keys in (("unread", rehearsal.unread), ("missing", rehearsal.missing)):
        if keys:
            lines.append(f"{label + ':':<10} {format_count(len(keys), 'key')}: {short(keys)}")
    lines = [*table, *map(format_name, lines)]
    if rehearsal.notes:
        lines.append(format_faults("a load would warn", rehearsal.notes, "note"))
    if rehearsal.faults:
        lines.append(format_faults("does not load", rehearsal.faults))
    elif rehearsal.missing:
        lines.append("does not load: the checkpoint lacks keys that are expected")
    else:
        but = ", but with declarations that match no key" if rehearsal.unmatched else ""
        lines.append(f"loads{but}")
    return "\n".join(lines)


def _request(request: Request) -> tuple[str, ...]:
    box = format_box(request.box, request.shape)
    return request.fqn, box, _ranks(request.ranks), short(request.files)


def _rows(ranks: Sequence[RankRehearsal]) -> list[tuple[str, ...]]:
    """Return a row per distinct cost; if these are too many, of the least, median and most read."""
    equal: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        equal.setdefault(_costs(rank), []).append(rank.rank)
    if len(equal) <= MAX_ROWS:
        return [(_ranks(numbers), *costs) for costs, numbers in equal.items()]
    ordered = sorted(ranks, key=lambda rank: (rank.slices_nbytes, rank.rank))
    extremes = {"least": ordered[0], "median": ordered[len(ordered) // 2], "most": ordered[-1]}
    return [(f"{label}: {rank.rank}", *_costs(rank)) for label, rank in extremes.items()]


def _ranks(numbers: Sequence[int]) -> str:
    text = ranges(numbers)
    if len(text) <= MAX_RANKS_WIDTH:
        return text
    return f"{text.partition(',')[0]}, ... ({len(numbers):,})"


def _costs(rank: RankRehearsal) -> tuple[str, ...]:
    return (
        format_nbytes(rank.wanted_nbytes),
        format_nbytes(rank.slices_nbytes),
        _times(rank.slices_nbytes, rank.wanted_nbytes),
        format_nbytes(rank.chunks_nbytes),
        _times(rank.chunks_nbytes, rank.wanted_nbytes),
        f"{rank.reads:,}",
        f"{rank.files:,}",
    )


def _times(nbytes: int, wanted: int) -> str:
    return f"{nbytes / wanted:.2f}x" if wanted else "-"
