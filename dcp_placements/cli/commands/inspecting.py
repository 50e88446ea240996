"""``inspect``: what is in a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, Fqn, Json
from dcp_placements.cli.printing import counted, number, print_json, print_table, say, short, size
from dcp_placements.errors import format_ranks
from dcp_placements.offline.experts import ExpertLayer
from dcp_placements.offline.views.inspection import Inspection


def inspect_command(
    ckpt: CheckpointPath,
    fqn: Fqn = None,
    experts: Annotated[bool, typer.Option(help="The experts of each layer.")] = False,
    json: Json = False,
) -> int:
    """List tensors, objects, files, and what the checkpoint says of its making."""
    found = offline.inspect(ckpt, fqn=fqn, experts=experts)
    if json:
        print_json(found)
    else:
        _print(found)
    return 0


def _print(found: Inspection) -> None:
    if found.experts is not None:
        _print_experts(found.experts)
        return
    if found.tensors:
        print_table(
            ("tensor", "shape", "dtype", "bytes", "chunks", "files", "ranks"),
            [
                (
                    fqn,
                    str(tensor.shape),
                    tensor.dtype,
                    size(tensor.nbytes),
                    number(tensor.chunks),
                    short(tensor.files, 1),
                    format_ranks(tensor.ranks).partition(" ")[2] if tensor.ranks else "-",
                )
                for fqn, tensor in found.tensors.items()
            ],
            right="bytes chunks",
        )
    if found.objects:
        say("")
        print_table(
            ("object", "bytes", "file"),
            [(fqn, size(told.nbytes), told.file or "-") for fqn, told in found.objects.items()],
            right="bytes",
        )
    say("")
    print_table(
        ("file", "bytes", "rank"),
        [
            (
                name,
                "missing" if file.nbytes is None else size(file.nbytes),
                "-" if file.rank is None else str(file.rank),
            )
            for name, file in found.files.items()
        ],
        right="bytes",
    )
    say("", f"format:    {found.format}")
    say(
        f"totals:    {counted(len(found.tensors), 'tensor')} in {counted(found.chunks, 'chunk')}, "
        f"{size(found.nbytes)}; {counted(len(found.objects), 'object')}"
    )
    if found.shadows is not None:
        kept = found.shadows
        say(
            f"shadows:   of {counted(kept.keys, 'key')} in {counted(kept.copies, 'record')}, "
            f"{size(kept.nbytes)}"
        )
    if found.provenance is None:
        say("making:    the checkpoint does not say")
    else:
        for key, value in found.provenance.items():
            told = (
                ", ".join(f"{name}={held}" for name, held in value.items())
                if isinstance(value, dict)
                else value
            )
            say(f"{key + ':':<10} {told}")
    for known in found.cuts:
        say(f"saved with: {', then '.join(known.cuts)}: {short(known.keys)}")
    for rename in found.renames:
        say(f"saved with: rename={rename}")
    say(f"digests:   {number(found.digests)} stored" if found.digests else "digests:   none stored")


def _print_experts(layers: tuple[ExpertLayer, ...]) -> None:
    if not layers:
        say("no key names experts")
        return
    print_table(
        ("layer", "experts", "gaps", "doubles", "tensors"),
        [
            (
                layer.layer + (" (stacked)" if layer.stacked else ""),
                _indices(layer.experts),
                _indices(layer.gaps),
                _indices(layer.doubles),
                short(layer.tensors),
            )
            for layer in layers
        ],
    )


def _indices(indices: tuple[int, ...]) -> str:
    return format_ranks(indices).partition(" ")[2] if indices else "-"
