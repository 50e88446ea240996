"""``explain``: one tensor, from its rule to the bytes of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import RULES, CheckpointPath, Fsdp, Json, Mesh
from dcp_placements.cli.printing import print_lines, print_table, show
from dcp_placements.cli.progress import progress
from dcp_placements.errors import format_count, format_nbytes
from dcp_placements.layout.tiling import format_box
from dcp_placements.offline.declared import format_mesh_axes, resolve

if TYPE_CHECKING:
    from dcp_placements.offline.views.explanation import Explanation, RankPart

MAX_ROWS = 64


def explain_command(
    ckpt: CheckpointPath,
    fqn: Annotated[str, typer.Argument(metavar="FQN", help="The tensor's key.")],
    rules: Annotated[str | None, RULES] = None,
    mesh: Mesh = None,
    fsdp: Fsdp = "",
    rank: Annotated[int | None, typer.Option(metavar="N", help="Only this rank.")] = None,
    json: Json = False,
) -> int:
    """Follow one tensor from its rule to axes, chunks, files and byte ranges."""
    if (rules is None) != (mesh is None):
        raise typer.BadParameter("--rules and --mesh go together")
    if rules is None and (rank is not None or fsdp):
        raise typer.BadParameter("--rank and --fsdp need --rules and --mesh")
    with progress("explain"):
        function = None if rules is None else resolve(rules)
        explanation = offline.explain(ckpt, fqn, rules=function, axes=mesh, fsdp=fsdp, rank=rank)
    return show(explanation, lambda: _print(explanation), json=json)


def _print(explanation: Explanation) -> None:
    print_lines(f"{explanation.fqn}: {explanation.shape} {explanation.dtype}")
    if explanation.saved_axes:
        saved_rule = explanation.saved_rule
        rule = "no rule" if saved_rule is None else f"rule {saved_rule}"
        print_lines(f"saved by {rule}, from a mesh of {format_mesh_axes(explanation.saved_axes)}")
    if explanation.saved_cuts:
        print_lines(f"saved with: {', then '.join(explanation.saved_cuts)}")
    chunks = explanation.chunks
    print_lines("", f"stored in {format_count(len(chunks), 'chunk')}:")
    print_table(
        ("chunk", "file", "rank", "record", "elements from"),
        [
            (
                format_box(chunk.box, explanation.shape),
                chunk.file or "nowhere",
                "-" if chunk.rank is None else str(chunk.rank),
                f"{chunk.start:,}-{chunk.start + chunk.nbytes:,}",
                "-" if chunk.elements is None else f"{chunk.elements:,}",
            )
            for chunk in chunks[:MAX_ROWS]
        ],
        right="rank record elements from",
    )
    _print_more(chunks, "chunk", "--json has them all")
    if explanation.axes is not None:
        given_rule = explanation.rule
        print_lines("", "no rule matches it" if given_rule is None else f"by rule {given_rule}:")
        print_lines(*[f"    {name}: {text}" for name, text in explanation.axes.items()], "")
        _print_ranks(explanation, list(explanation.axes))


def _print_ranks(explanation: Explanation, axis_names: Sequence[str]) -> None:
    rows = []
    for part in explanation.ranks:
        position = zip(axis_names, part.coordinate, strict=True)
        coordinate = " ".join(f"{name}={index}" for name, index in position)
        cells = list(_part_cells(part, explanation.shape)) or [("nothing", *"----")]
        rows += [(str(part.rank), coordinate, *row) for row in cells]
    print_table(
        ("rank", "coordinate", "holds", "file", "range", "bytes", "runs"),
        rows[:MAX_ROWS],
        right="rank range bytes runs",
    )
    _print_more(rows, "row", "--rank R for one, --json for all")


def _part_cells(part: RankPart, shape: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    for span in part.ranges:
        yield (
            format_box(span.box, shape),
            span.file or "nowhere",
            "-" if span.first is None else f"{span.first:,}-{span.last:,}",
            format_nbytes(span.nbytes),
            f"{span.runs:,}",
        )
    for hole in part.holes:
        yield format_box(hole, shape), "nobody stored it", "-", "-", "-"


def _print_more(rows: Sequence[object], noun: str, hint: str) -> None:
    if len(rows) > MAX_ROWS:
        print_lines(f"... and {format_count(len(rows) - MAX_ROWS, f'more {noun}')}; {hint}")
