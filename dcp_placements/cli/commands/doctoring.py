"""``doctor``: expert tensors of which fewer experts are stored than the model has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, Json, Mesh, number
from dcp_placements.cli.printing import print_lines, short, show
from dcp_placements.cli.progress import progress
from dcp_placements.errors import format_count, format_names

if TYPE_CHECKING:
    from dcp_placements.offline.doctor import Diagnosis


def doctor_command(
    ckpt: CheckpointPath,
    experts_per_layer: Annotated[int | None, number("The number of experts in a layer.")] = None,
    mesh: Mesh = None,
    json: Json = False,
) -> int:
    """Report tensors whose experts were taken for replicas, so that only a part is stored.

    --mesh is the mesh of the run that saved. One of its axes must be ep. It is used where neither
    the checkpoint nor a router's shape tells how many experts there are.
    """
    with progress("doctor"):
        diagnosis = offline.diagnose(ckpt, experts_per_layer=experts_per_layer, axes=mesh)
    code = 0 if diagnosis.healthy else 1
    return show(diagnosis, lambda: _print(diagnosis), json=json, code=code)


def _print(diagnosis: Diagnosis) -> None:
    by_finding: dict[tuple[str, str], list[str]] = {}
    for tensor in diagnosis.tensors.values():
        finding = tensor.reason
        if tensor.verdict == "overwritten":
            finding = f"{tensor.stored} of {tensor.experts} experts stored"
        by_finding.setdefault((tensor.verdict, finding), []).append(tensor.fqn)
    for (verdict, finding), fqns in by_finding.items():
        if verdict != "whole":
            print_lines(f"{verdict}: {format_names(fqns, 3)}: {finding}")
    verdicts = {verdict for verdict, _ in by_finding}
    if "unclear" in verdicts:
        print_lines("    way out:     --experts-per-layer, or --mesh of the run that saved")
    if "overwritten" in verdicts:
        print_lines(
            "    likely:      the save took the experts of other ep ranks for replicas",
            "    way out:     they are nowhere in this checkpoint; save with rules from where they "
            "still are",
        )
    if not diagnosis.tensors:
        print_lines("experts:     no key names any")
    elif diagnosis.healthy:
        print_lines(f"experts:     all there, in {format_count(len(diagnosis.tensors), 'tensor')}")
        if recorded := sorted({t.reason for t in diagnosis.tensors.values() if t.reason}):
            print_lines(f"    saved as:    {short(recorded)}")
    if diagnosis.unchecked:
        print_lines(f"not checked: {format_count(len(diagnosis.unchecked), 'other key')}")
