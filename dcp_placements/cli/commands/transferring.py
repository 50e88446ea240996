"""``transfer``: who sends what to whom, between two worlds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import (
    MESH,
    RULES,
    Fsdp,
    Json,
    fsdp_option,
    mesh_option,
    rename_option,
)
from dcp_placements.cli.printing import print_lines, print_table, short, show
from dcp_placements.cli.progress import progress
from dcp_placements.errors import format_count, format_nbytes
from dcp_placements.offline.declared import MeshAxes, Rename, resolve

if TYPE_CHECKING:
    from dcp_placements.transfer.plan import TransferPlan

MAX_ROWS = 32
SAME = "The same for the target."


def transfer_command(
    ckpt: Annotated[
        str, typer.Argument(metavar="CKPT", help="A checkpoint that has the source's tensors.")
    ],
    mesh: Annotated[MeshAxes, MESH],
    rules: Annotated[str, RULES],
    target_mesh: Annotated[MeshAxes, mesh_option("--target-mesh", SAME)],
    target_rules: Annotated[str, typer.Option("--target-rules", metavar="MODULE:FUNC", help=SAME)],
    fsdp: Fsdp = "",
    target_fsdp: Annotated[Any, fsdp_option("--target-fsdp", SAME)] = "",
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
    near = hosts or None
    size = prod(mesh.values())
    ranks = range(size, size + prod(target_mesh.values())) if apart else None
    with progress("transfer"):
        from dcp_placements.transfer.picture import transfer_figure
        from dcp_placements.transfer.plan import transfer_plan
        from dcp_placements.transfer.world import TransferWorld

        if output is not None:
            offline.check_picture_name(output)
        functions = resolve(rules), resolve(target_rules)
        tensors = offline.Checkpoint(ckpt).tensors
        wanted = None if target_tensors is None else offline.Checkpoint(target_tensors).tensors
        source = TransferWorld(mesh, functions[0], tensors, fsdp=fsdp, hosts=near)
        target = TransferWorld(
            target_mesh, functions[1], wanted, fsdp=target_fsdp, ranks=ranks, hosts=near
        )
        plan = transfer_plan(source, target, rename=rename)
        pairs = list(zip(*[column.tolist() for column in plan.pairs()], strict=True))
        if output is not None:
            offline.save_figure(transfer_figure(plan), output)
    document = {"source": mesh, "target": target_mesh, **_document(plan, pairs)}
    code = 1 if plan.unmatched else 0
    return show(document, lambda: _print(document, pairs), json=json, code=code)


def _document(plan: TransferPlan, pairs: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    copied = sum(nbytes for sender, receiver, nbytes, _ in pairs if sender == receiver)
    names = "source", "target", "bytes", "messages"
    return {
        "sent_bytes": sum(nbytes for *_, nbytes, _ in pairs) - copied,
        "copied_bytes": copied,
        "unused": plan.unused,
        "casts": list(plan.casts),
        "unmatched": list(plan.unmatched),
        "pairs": [dict(zip(names, pair, strict=True)) for pair in pairs],
    }


def _print(document: dict[str, Any], pairs: list[tuple[Any, ...]]) -> None:
    largest = sorted(pairs, key=lambda pair: -pair[2])[:MAX_ROWS]
    print_table(
        ("from", "to", "bytes", "messages", ""),
        [
            (
                str(sender),
                str(receiver),
                format_nbytes(nbytes),
                f"{messages:,}",
                "copied" if sender == receiver else "",
            )
            for sender, receiver, nbytes, messages in (pairs if len(pairs) <= MAX_ROWS else largest)
        ],
        right="from to bytes messages",
    )
    if len(pairs) > MAX_ROWS:
        print_lines(f"... the largest {MAX_ROWS} of {len(pairs):,} pairs (--json has all)")
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for sender, receiver, nbytes, _ in pairs:
        if sender != receiver:
            sent[sender] += nbytes
            received[receiver] += nbytes
    print_lines(
        "",
        f"in all:    {format_nbytes(document['sent_bytes'])} sent, "
        f"{format_nbytes(document['copied_bytes'])} copied within a rank",
    )
    for label, by_rank in (("sender:", sent), ("receiver:", received)):
        if by_rank:
            rank, most = by_rank.most_common(1)[0]
            print_lines(f"{label:<10} {format_nbytes(most)} at most, rank {rank}")
    if unused := document["unused"]:
        print_lines(f"unused:    {format_count(len(unused), 'tensor')}: {short(unused)}")
    if casts := document["casts"]:
        print_lines(
            f"cast:      {format_count(len(casts), 'tensor')} of another dtype: {short(casts)}"
        )
