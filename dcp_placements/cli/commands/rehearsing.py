"""``rehearse`` and ``reshard``: would a checkpoint load into a world; one rewritten for it."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import (
    MESH,
    RULES,
    CheckpointPath,
    DryRun,
    Fqn,
    Fsdp,
    Json,
    Out,
    fsdp_of,
)
from dcp_placements.cli.printing import print_lines, print_table, print_text, show
from dcp_placements.cli.progress import progress
from dcp_placements.errors import CannotLook, format_count, format_faults, format_nbytes
from dcp_placements.offline.declared import format_mesh_axes, resolve
from dcp_placements.offline.texts import ranges, short
from dcp_placements.transfer.world import MeshAxes

if TYPE_CHECKING:
    from dcp_placements.offline.rehearsals.rehearsal import RankRehearsal, Rehearsal, Request

COLUMNS = ("ranks", "wants", "reads", "reads/wants", "stock", "stock/wants", "chunks", "files")
MAX_ROWS = 16
MAX_RANKS_WIDTH = 16


def rehearse_command(
    ckpt: CheckpointPath,
    rules: Annotated[str, RULES],
    mesh: Annotated[MeshAxes, MESH],
    fsdp: Fsdp = None,
    expect: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's keys: a JSON list, or one per line."),
    ] = None,
    fqn: Fqn = None,
    json: Json = False,
) -> int:
    """Plan a load on every rank of a mesh that need not exist. No data is read."""
    keys = None if expect is None else _keys(expect)
    with progress("rehearse", "ranks") as step:
        rehearsal = offline.rehearse(
            ckpt,
            resolve(rules),
            mesh,
            fsdp=fsdp_of(fsdp),
            expect=keys,
            fqn=fqn,
            progress=step,
        )
    code = 0 if rehearsal.loads and not rehearsal.unmatched else 1
    return show(rehearsal, lambda: _print(rehearsal), json=json, code=code)


def reshard_command(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint to rewrite.")],
    out: Out,
    rules: Annotated[str, RULES],
    mesh: Annotated[MeshAxes, MESH],
    fsdp: Fsdp = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Rewrite a checkpoint for the mesh that will load it: each rank's bytes in one file.

    After an interruption the same command continues. Other files in the checkpoint's directory
    are not copied.
    """
    with progress("reshard") as step:
        result = offline.reshard(
            src, out, resolve(rules), mesh, fsdp=fsdp_of(fsdp), dry_run=dry_run, progress=step
        )
    return show(result, lambda: print_text(str(result)), json=json)


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


def _print(rehearsal: Rehearsal) -> None:
    if rehearsal.requests:
        rows = [_request(one) for one in rehearsal.requests]
        print_table(("key", "box", "ranks", "files"), rows)
    else:
        print_table(COLUMNS, _rows(rehearsal.ranks), right=" ".join(COLUMNS[1:]))
    ranks = format_count(len(rehearsal.ranks), "rank")
    memory = max(rank.memory_nbytes for rank in rehearsal.ranks)
    ours = format_nbytes(sum(rank.slices_nbytes for rank in rehearsal.ranks))
    stock = format_nbytes(sum(rank.chunks_nbytes for rank in rehearsal.ranks))
    exchanged = format_nbytes(sum(rank.exchange_nbytes for rank in rehearsal.ranks))
    print_lines(
        "",
        f"mesh:      {format_mesh_axes(rehearsal.axes)}: {ranks}",
        f"memory:    {format_nbytes(memory)} at most, on a rank",
        f"in all:    {ours} read of {format_nbytes(rehearsal.unique_nbytes)}, stock {stock}",
        f"exchange:  {exchanged} read with exchange=True",
        f"uncut:     {format_count(rehearsal.replicated, 'tensor')}, whole on every rank",
    )
    for label, keys in (("unread", rehearsal.unread), ("missing", rehearsal.missing)):
        if keys:
            print_lines(f"{label + ':':<10} {format_count(len(keys), 'key')}: {short(keys)}")
    if rehearsal.notes:
        print_text(format_faults("a load would warn", rehearsal.notes, "note"))
    if rehearsal.faults:
        print_text(format_faults("does not load", rehearsal.faults))
    elif rehearsal.missing:
        print_lines("does not load: the checkpoint lacks keys that are expected")
    else:
        but = ", but with declarations that match no key" if rehearsal.unmatched else ""
        print_lines(f"loads{but}")


def _request(request: Request) -> tuple[str, ...]:
    from dcp_placements.layout.boxes import format_box  # imports numpy

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
