"""``doctor``: what an EP-unaware save left of the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, Json, Mesh, number
from dcp_placements.cli.printing import print_lines, print_table, ranges, short, show
from dcp_placements.cli.progress import progress
from dcp_placements.errors import format_count, format_names, format_nbytes, format_ranks
from dcp_placements.offline.as_json import to_json

if TYPE_CHECKING:
    from dcp_placements.offline.repairs.rescue import Rescue
    from dcp_placements.offline.repairs.surviving_experts import Diagnosis, ExpertTensor


def doctor_command(
    ckpt: CheckpointPath,
    experts_per_layer: Annotated[int | None, number("The number of experts in a layer.")] = None,
    mesh: Mesh = None,
    rescue: Annotated[
        str | None, typer.Option(metavar="OUT", help="Write the sound tensors to a new checkpoint.")
    ] = None,
    json: Json = False,
) -> int:
    """Report which experts survived a save that took them for replicas, and who wrote them.

    --mesh is the mesh of the run that saved, in rank order. One of its axes must be ep. It is not
    used for a checkpoint that records how its experts were saved.
    """
    with progress("doctor"):
        checkpoint = offline.Checkpoint(ckpt)
        diagnosis = offline.diagnose(checkpoint, experts_per_layer=experts_per_layer, axes=mesh)
    document = to_json(diagnosis)
    rescued = None
    if rescue is not None:
        with progress("rescue") as step:
            rescued = offline.rescue(checkpoint, diagnosis, rescue, progress=step)
        document["rescue"] = to_json(rescued)

    def print_result() -> None:
        _print(diagnosis)
        if mesh is not None and diagnosis.axes is None:
            print_lines("mesh:      not used, the checkpoint records how its experts were saved")
        if rescued is not None:
            _print_rescue(rescued)

    return show(document, print_result, json=json, code=0 if diagnosis.healthy else 1)


def _print(diagnosis: Diagnosis) -> None:
    overwritten, unclear = diagnosis.of("overwritten"), diagnosis.of("unclear")
    if overwritten:
        print_table(
            ("tensor", "stored", "of", "survived"),
            [(t.fqn, str(t.stored), str(t.experts), _survivors(t)) for t in overwritten],
            right="stored of",
        )
        print_lines("")
    if diagnosis.layers:
        print_table(
            ("layer", "complete", "weights only", "lost"),
            [
                (loss.layer, ranges(loss.kept), ranges(loss.weights_only), ranges(loss.lost))
                for loss in diagnosis.layers.values()
            ],
        )
        print_lines("")
    if unclear:
        by_reason: dict[str, list[str]] = {}
        for tensor in unclear:
            by_reason.setdefault(tensor.reason, []).append(tensor.fqn)
        for reason, fqns in by_reason.items():
            print_lines(f"unclear: {format_names(fqns, 3)}: {reason}")
        print_lines("    way out:     --experts-per-layer and --mesh of the run that saved", "")
    print_lines(f"sound:     {format_count(len(diagnosis.sound), 'key')} beside lost experts")
    if not diagnosis.tensors:
        print_lines("experts:   no key names any")
    elif diagnosis.healthy:
        print_lines(f"experts:   all there, in {format_count(len(diagnosis.tensors), 'tensor')}")
        if recorded := sorted({t.reason for t in diagnosis.tensors.values() if t.reason}):
            print_lines(f"    saved as:    {short(recorded)}")
    elif overwritten:
        number = format_count(len(overwritten), "tensor")
        print_lines(f"experts:   overwritten in {number}: others passed for replicas")
        if diagnosis.axes is None:
            way_out = "--mesh of the run that saved says which experts these rows are"
            print_lines(f"    way out:     {way_out}")


def _print_rescue(rescued: Rescue) -> None:
    print_lines(
        f"rescued:   {format_count(len(rescued.copied), 'key')} as before, "
        f"{format_count(len(rescued.experts), 'expert tensor')}; {format_nbytes(rescued.nbytes)}",
        f"{rescued.path}: written, what is left out stands in rescue.json",
    )


def _survivors(tensor: ExpertTensor) -> str:
    """Return the numbers of survivors, by the ranks that wrote them."""
    numbers: dict[str, list[int]] = {}
    for survivor in tensor.survivors:
        text = f"{{}} from {format_ranks(survivor.ranks)}"
        if survivor.expert is None:
            text = ("torn row " if survivor.torn else "row ") + text
        number = survivor.row if survivor.expert is None else survivor.expert
        numbers.setdefault(text, []).append(number)
    return "; ".join(text.replace("{}", ranges(listed)) for text, listed in numbers.items())
