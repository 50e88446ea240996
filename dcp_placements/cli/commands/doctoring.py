"""``doctor``: what an EP-unaware save left of the experts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, Json, MeshSpec
from dcp_placements.cli.printing import counted, print_json, print_table, progress, say, size
from dcp_placements.errors import format_names, format_ranks
from dcp_placements.offline.as_json import to_json
from dcp_placements.offline.declared import parse_mesh
from dcp_placements.offline.repairs.diagnosis import OVERWRITTEN, UNCLEAR, Diagnosis, ExpertTensor
from dcp_placements.offline.repairs.rescue import LIST


def doctor_command(
    ckpt: CheckpointPath,
    experts_per_layer: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many experts a layer has.")
    ] = None,
    mesh: MeshSpec = None,
    rescue: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write what is sound to a new checkpoint.")
    ] = None,
    json: Json = False,
) -> int:
    """Tell which experts survived a save that took them for replicas, and from which rank.

    The mesh is that of the run that saved, in rank order; one axis is ep.
    """
    checkpoint = offline.Checkpoint(ckpt)
    found = offline.diagnose(
        checkpoint,
        experts_per_layer=experts_per_layer,
        axes=None if mesh is None else parse_mesh(mesh),
    )
    told = to_json(found)
    if rescue is not None:
        with progress("rescue") as step:
            rescued = offline.rescue(checkpoint, found, rescue, progress=step)
        told["rescue"] = to_json(rescued)
    if json:
        print_json(told)
        return 0 if found.healthy else 1
    _print(found)
    if rescue is not None:
        say(
            f"rescued:   {counted(len(rescued.copied), 'key')} as before, "
            f"{counted(len(rescued.experts), 'expert tensor')}; {size(rescued.nbytes)}",
            f"{rescue}: written, what is left out stands in {LIST}",
        )
    return 0 if found.healthy else 1


def _print(found: Diagnosis) -> None:
    overwritten, unclear = found.of(OVERWRITTEN), found.of(UNCLEAR)
    if overwritten:
        print_table(
            ("tensor", "stored", "of", "survived"),
            [(t.fqn, str(t.stored), str(t.experts), _survivors(t)) for t in overwritten],
            right="stored of",
        )
        say("")
    if found.layers:
        print_table(
            ("layer", "complete", "weights only", "lost"),
            [
                (loss.layer, _numbers(loss.kept), _numbers(loss.weights_only), _numbers(loss.lost))
                for loss in found.layers.values()
            ],
        )
        say("")
    if unclear:
        reasons: dict[str, list[str]] = {}
        for tensor in unclear:
            reasons.setdefault(tensor.reason, []).append(tensor.fqn)
        for reason, fqns in reasons.items():
            say(f"unclear: {format_names(fqns, 3)}: {reason}")
        say("    way out:     --experts-per-layer and --mesh of the run that saved", "")
    say(f"sound:     {counted(len(found.sound), 'key')} beside lost experts")
    if not found.tensors:
        say("experts:   no key names any")
    elif found.healthy:
        say(f"experts:   all there, in {counted(len(found.tensors), 'tensor')}")
    elif overwritten:
        say(
            f"experts:   overwritten in {counted(len(overwritten), 'tensor')}: others passed for "
            "replicas"
        )
        if found.axes is None:
            say("    way out:     --mesh of the run that saved says which experts these rows are")


def _survivors(tensor: ExpertTensor) -> str:
    by: dict[str, list[int]] = {}
    for survivor in tensor.survivors:
        number = survivor.row if survivor.expert is None else survivor.expert
        what = "torn row " if survivor.torn else "row " if survivor.expert is None else ""
        by.setdefault(f"{what}{{}} from {format_ranks(survivor.ranks)}", []).append(number)
    return "; ".join(told.replace("{}", _numbers(numbers)) for told, numbers in by.items())


def _numbers(numbers: Iterable[int]) -> str:
    found = list(numbers)
    return format_ranks(found).partition(" ")[2] if found else "-"
