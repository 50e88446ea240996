"""``transfer``: who sends what to whom, between two worlds."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Annotated

import typer

from dcp_placements.cli.arguments import (
    MESH,
    RULES,
    TARGET_MESH,
    TARGET_RULES,
    Fsdp,
    Json,
    TargetFsdp,
    rename_option,
)
from dcp_placements.cli.printing import counted, print_lines, print_table, short, show
from dcp_placements.cli.progress import progress
from dcp_placements.errors import format_nbytes
from dcp_placements.offline import Checkpoint, check_picture_name, save_figure
from dcp_placements.offline.declared import MeshAxes, Rename, resolve
from dcp_placements.transfer.picture import transfer_figure
from dcp_placements.transfer.plan import transfer_plan
from dcp_placements.transfer.summary import TransferSummary, summarize
from dcp_placements.transfer.world import TransferWorld

MAX_ROWS = 32


def transfer_command(
    ckpt: Annotated[
        str, typer.Argument(metavar="CKPT", help="A checkpoint that has the source's tensors.")
    ],
    mesh: Annotated[MeshAxes, MESH],
    rules: Annotated[str, RULES],
    target_mesh: Annotated[MeshAxes, TARGET_MESH],
    target_rules: Annotated[str, TARGET_RULES],
    fsdp: Fsdp = "",
    target_fsdp: TargetFsdp = "",
    target_tensors: Annotated[
        str | None,
        typer.Option(metavar="CKPT", help="A checkpoint that has the target's tensors."),
    ] = None,
    rename: Annotated[
        Rename | None, rename_option("A function from the source's keys to the target's.")
    ] = None,
    hosts: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Ranks per host; prefers senders on the same host."),
    ] = 0,
    apart: Annotated[
        bool, typer.Option("--apart", help="The target's ranks follow the source's.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Draw the bytes by pair, as .png or .svg."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Plan which rank of one world sends which bytes to which of another. No data is read."""
    if output is not None:
        check_picture_name(output)
    near = hosts or None
    size = prod(mesh.values())
    ranks = range(size, size + prod(target_mesh.values())) if apart else None
    functions = resolve(rules), resolve(target_rules)
    with progress("transfer"):
        wanted = None if target_tensors is None else Checkpoint(target_tensors).tensors
        source = TransferWorld(mesh, functions[0], Checkpoint(ckpt).tensors, fsdp=fsdp, hosts=near)
        target = TransferWorld(
            target_mesh, functions[1], wanted, fsdp=target_fsdp, ranks=ranks, hosts=near
        )
        plan = transfer_plan(source, target, rename=rename)
        found = summarize(plan)
        if output is not None:
            save_figure(transfer_figure(plan), output)
    return show(found, lambda: _print(found), json=json)


def _print(found: TransferSummary) -> None:
    pairs = sorted(found.pairs, key=lambda pair: -pair.nbytes)[:MAX_ROWS]
    print_table(
        ("from", "to", "bytes", "messages", ""),
        [
            (
                str(pair.source),
                str(pair.target),
                format_nbytes(pair.nbytes),
                f"{pair.messages:,}",
                "copied" if pair.source == pair.target else "",
            )
            for pair in (pairs if len(found.pairs) > MAX_ROWS else found.pairs)
        ],
        right="from to bytes messages",
    )
    if len(found.pairs) > MAX_ROWS:
        print_lines(f"... the largest {MAX_ROWS} of {len(found.pairs):,} pairs (--json has all)")
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for pair in found.pairs:
        if pair.source != pair.target:
            sent[pair.source] += pair.nbytes
            received[pair.target] += pair.nbytes
    print_lines(
        "",
        f"in all:    {format_nbytes(found.sent_nbytes)} sent, "
        f"{format_nbytes(found.copied_nbytes)} copied within a rank",
    )
    for label, by_rank in (("sender:", sent), ("receiver:", received)):
        if by_rank:
            rank, most = by_rank.most_common(1)[0]
            print_lines(f"{label:<10} {format_nbytes(most)} at most, rank {rank}")
    if found.unused:
        print_lines(f"unused:    {counted(len(found.unused), 'tensor')}: {short(found.unused)}")
    if found.casts:
        tensors = counted(len(found.casts), "tensor")
        print_lines(f"cast:      {tensors} of another dtype: {short(list(found.casts))}")
