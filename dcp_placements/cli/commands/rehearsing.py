"""``rehearse``: would a checkpoint load into a topology."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, FsdpAxes, Json
from dcp_placements.cli.printing import (
    counted,
    number,
    print_json,
    print_table,
    say,
    say_text,
    short,
    size,
)
from dcp_placements.errors import format_faults, format_ranks
from dcp_placements.offline import CannotLook
from dcp_placements.offline.declared import parse_mesh, resolve
from dcp_placements.offline.rehearsals.rehearsal import RankRehearsal, Rehearsal

MAX_ROWS = 16
MAX_RANKS_WIDTH = 16


def rehearse_command(
    ckpt: CheckpointPath,
    rules: Annotated[
        str, typer.Option(metavar="MODULE:FUNC", help="A function: mesh -> PlacementRules.")
    ],
    mesh: Annotated[str, typer.Option(metavar="AXIS=SIZE,...", help="Such as ep=16,edp=2.")],
    fsdp: FsdpAxes = "",
    expect: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's keys: a JSON list, or one per line."),
    ] = None,
    json: Json = False,
) -> int:
    """Plan a load on every rank of a world that need not be there. No data is read."""
    found = offline.rehearse(
        ckpt,
        resolve(rules),
        parse_mesh(mesh),
        fsdp=[name.strip() for name in fsdp.split(",") if name.strip()],
        expect=None if expect is None else _keys(expect),
    )
    if json:
        print_json(found)
    else:
        _print(found)
    return 0 if found.loads else 1


def _keys(path: Path) -> list[str]:
    try:
        text = path.read_text()
        if not text.lstrip().startswith("["):
            return [line.strip() for line in text.splitlines() if line.strip()]
        keys = json_text.loads(text)
    except (OSError, ValueError) as error:
        raise CannotLook(f"{path}: no list of keys: {error}") from error
    if not all(isinstance(key, str) for key in keys):
        raise CannotLook(f"{path}: a list of keys must be of text")
    return list(keys)


def _print(found: Rehearsal) -> None:
    alike: dict[tuple[int, ...], list[RankRehearsal]] = {}
    for rank in found.ranks:
        costs = (rank.wanted_nbytes, rank.memory_nbytes, rank.slices_nbytes, rank.chunks_nbytes)
        alike.setdefault((*costs, rank.reads, rank.files), []).append(rank)
    rows = [_row(ranks[0], _ranks(ranks)) for ranks in alike.values()]
    if len(rows) > MAX_ROWS:
        ordered = sorted(found.ranks, key=lambda rank: (rank.slices_nbytes, rank.rank))
        told = {"least": 0, "median": len(ordered) // 2, "most": -1}
        rows = [_row(ordered[at], f"{name}: {ordered[at].rank}") for name, at in told.items()]
    print_table(
        ("ranks", "wants", "reads", "", "stock reads", " ", "records", "files"),
        rows,
        right="wants reads stock records files",
    )
    mesh = ", ".join(f"{name}={length}" for name, length in found.axes.items())
    sliced = sum(rank.slices_nbytes for rank in found.ranks)
    whole = sum(rank.chunks_nbytes for rank in found.ranks)
    exchanged = sum(rank.exchange_nbytes for rank in found.ranks)
    say(
        "",
        f"mesh:      {mesh}: {counted(len(found.ranks), 'rank')}",
        f"memory:    {size(max(rank.memory_nbytes for rank in found.ranks))} at most, on a rank",
        f"in all:    {size(sliced)} read of {size(found.unique_nbytes)}, stock {size(whole)}",
        f"exchange:  {size(exchanged)} read with exchange=True",
        f"whole:     {counted(found.replicated, 'tensor')} that no rule cuts",
    )
    if found.unmatched:
        say(f"unmatched: {short([repr(pattern) for pattern in found.unmatched])}")
    if found.unread:
        say(f"unread:    {counted(len(found.unread), 'key')}: {short(found.unread)}")
    if found.missing:
        say(f"missing:   {counted(len(found.missing), 'key')}: {short(found.missing)}")
    if found.notes:
        say_text(format_faults("a load would warn", found.notes, "note"))
    if found.faults:
        say_text(format_faults("does not load", found.faults))
    say("loads" if found.loads else "does not load")


def _ranks(ranks: Sequence[RankRehearsal]) -> str:
    told = format_ranks(rank.rank for rank in ranks).partition(" ")[2]
    if len(told) <= MAX_RANKS_WIDTH:
        return told
    return f"{told.partition(',')[0]}, ... ({number(len(ranks))})"


def _row(rank: RankRehearsal, name: str) -> tuple[str, ...]:
    return (
        name,
        size(rank.wanted_nbytes),
        size(rank.slices_nbytes),
        _times(rank.slices_nbytes, rank.wanted_nbytes),
        size(rank.chunks_nbytes),
        _times(rank.chunks_nbytes, rank.wanted_nbytes),
        number(rank.reads),
        number(rank.files),
    )


def _times(nbytes: int, wanted: int) -> str:
    return f"{nbytes / wanted:.2f}x" if wanted else "-"
