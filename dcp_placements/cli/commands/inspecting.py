"""``inspect``: what is in a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, Fqn, Json
from dcp_placements.cli.printing import counted, print_lines, print_table, ranges, short, show
from dcp_placements.errors import format_nbytes
from dcp_placements.offline.experts import ExpertLayer
from dcp_placements.offline.views.inspection import Inspection


def inspect_command(
    ckpt: CheckpointPath,
    fqn: Fqn = None,
    experts: Annotated[bool, typer.Option(help="The experts of each layer.")] = False,
    json: Json = False,
) -> int:
    """List tensors, objects and files, and the record of the save."""
    inspection = offline.inspect(ckpt, fqn=fqn, experts=experts)
    return show(inspection, lambda: _print(inspection), json=json)


def _print(inspection: Inspection) -> None:
    if inspection.experts is not None:
        _print_experts(inspection.experts)
        return
    _print_tables(inspection)
    tensors, objects = len(inspection.tensors), len(inspection.objects)
    print_lines(
        "",
        f"format:    {inspection.format}",
        f"totals:    {counted(tensors, 'tensor')} in {counted(inspection.chunks, 'chunk')}, "
        f"{format_nbytes(inspection.nbytes)}; {counted(objects, 'object')}",
    )
    if shadows := inspection.shadows:
        print_lines(
            f"shadows:   of {counted(shadows.keys, 'key')} in {counted(shadows.copies, 'record')}, "
            f"{format_nbytes(shadows.nbytes)}"
        )
    if inspection.provenance is None:
        print_lines("save:      the checkpoint has no record of it")
    for key, value in (inspection.provenance or {}).items():
        if isinstance(value, dict):
            value = ", ".join(f"{name}={item}" for name, item in value.items())
        print_lines(f"{key + ':':<10} {value}")
    for group in inspection.cuts:
        print_lines(f"saved with: {', then '.join(group.cuts)}: {short(group.keys)}")
    for rename in inspection.renames:
        print_lines(f"saved with: rename={rename}")
    print_lines(f"digests:   {f'{inspection.digests:,}' if inspection.digests else 'none'} stored")


def _print_tables(inspection: Inspection) -> None:
    if inspection.tensors:
        print_table(
            ("tensor", "shape", "dtype", "bytes", "chunks", "files", "ranks"),
            [
                (
                    fqn,
                    str(tensor.shape),
                    tensor.dtype,
                    format_nbytes(tensor.nbytes),
                    f"{tensor.chunks:,}",
                    short(tensor.files, 1),
                    ranges(tensor.ranks),
                )
                for fqn, tensor in inspection.tensors.items()
            ],
            right="bytes chunks",
        )
    if inspection.objects:
        print_lines("")
        print_table(
            ("object", "bytes", "file"),
            [
                (fqn, format_nbytes(stored.nbytes), stored.file or "-")
                for fqn, stored in inspection.objects.items()
            ],
            right="bytes",
        )
    print_lines("")
    print_table(
        ("file", "bytes", "rank"),
        [
            (
                name,
                "missing" if file.nbytes is None else format_nbytes(file.nbytes),
                "-" if file.rank is None else str(file.rank),
            )
            for name, file in inspection.files.items()
        ],
        right="bytes",
    )


def _print_experts(layers: tuple[ExpertLayer, ...]) -> None:
    if not layers:
        print_lines("no key names experts")
        return
    print_table(
        ("layer", "experts", "gaps", "doubles", "tensors"),
        [
            (
                layer.layer + (" (stacked)" if layer.stacked else ""),
                ranges(layer.experts),
                ranges(layer.gaps),
                ranges(layer.doubles),
                short(layer.tensors),
            )
            for layer in layers
        ],
    )
