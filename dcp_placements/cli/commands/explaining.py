"""``explain``: one tensor, from its rule to the bytes of files."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, FsdpAxes, Json, MeshSpec, RulesSpec
from dcp_placements.cli.printing import counted, number, print_json, print_table, say, size
from dcp_placements.layout.tiling import format_box
from dcp_placements.offline.declared import parse_mesh, resolve
from dcp_placements.offline.views.explanation import Explanation

MAX_ROWS = 64


def explain_command(
    ckpt: CheckpointPath,
    fqn: Annotated[str, typer.Argument(metavar="FQN", help="The tensor's key.")],
    rules: RulesSpec = None,
    mesh: MeshSpec = None,
    fsdp: FsdpAxes = "",
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    json: Json = False,
) -> int:
    """Follow one tensor from its rule to axes, chunks, files and byte ranges."""
    if (rules is None) != (mesh is None):
        raise typer.BadParameter("--rules and --mesh go together")
    found = offline.explain(
        ckpt,
        fqn,
        rules=None if rules is None else resolve(rules),
        axes=None if mesh is None else parse_mesh(mesh),
        fsdp=[name.strip() for name in fsdp.split(",") if name.strip()],
        rank=rank,
    )
    if json:
        print_json(found)
    else:
        _print(found)
    return 0


def _print(found: Explanation) -> None:
    say(f"{found.fqn}: {found.shape} {found.dtype}")
    if found.saved_axes:
        axes = ", ".join(f"{name}={size}" for name, size in found.saved_axes.items())
        said = "no rule" if found.saved_rule is None else f"rule {found.saved_rule}"
        say(f"saved by {said}, from a mesh of {axes}")
    if found.saved_cuts:
        say(f"saved with: {', then '.join(found.saved_cuts)}")
    say("", f"stored in {counted(len(found.chunks), 'chunk')}:")
    print_table(
        ("chunk", "file", "rank", "record", "elements from"),
        [
            (
                format_box(chunk.box, found.shape),
                chunk.file or "nowhere",
                "-" if chunk.rank is None else str(chunk.rank),
                f"{number(chunk.start)}-{number(chunk.start + chunk.nbytes)}",
                "-" if chunk.elements is None else number(chunk.elements),
            )
            for chunk in found.chunks[:MAX_ROWS]
        ],
        right="rank record elements from",
    )
    if len(found.chunks) > MAX_ROWS:
        say(f"... and {counted(len(found.chunks) - MAX_ROWS, 'more chunk')}; --json has them all")
    if found.axes is None:
        return
    say("", "no rule speaks for it" if found.rule is None else f"by rule {found.rule}:")
    for name, does in found.axes.items():
        say(f"    {name}: {does}")
    say("")
    rows = []
    for part in found.ranks:
        coordinate = " ".join(
            f"{name}={at}" for name, at in zip(found.axes, part.coordinate, strict=True)
        )
        for known in part.ranges:
            where = (
                "-" if known.first is None else f"{number(known.first)}-{number(known.last or 0)}"
            )
            rows.append(
                (
                    str(part.rank),
                    coordinate,
                    format_box(known.box, found.shape),
                    known.file or "nowhere",
                    where,
                    size(known.nbytes),
                    number(known.runs),
                )
            )
        for hole in part.holes:
            rows.append(
                (
                    *(str(part.rank), coordinate, format_box(hole, found.shape)),
                    *("nobody stored it", "-", "-", "-"),
                )
            )
        if not part.ranges and not part.holes:
            rows.append((str(part.rank), coordinate, "nothing", "-", "-", "-", "-"))
    print_table(
        ("rank", "coordinate", "holds", "file", "range", "bytes", "runs"),
        rows[:MAX_ROWS],
        right="rank range bytes runs",
    )
    if len(rows) > MAX_ROWS:
        say(
            f"... and {counted(len(rows) - MAX_ROWS, 'more row')}; --rank R for one, --json for all"
        )
