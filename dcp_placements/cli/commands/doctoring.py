"""``doctor``: expert tensors of which fewer experts are stored than the model has."""

from __future__ import annotations

from typing import Annotated

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, Mesh, number
from dcp_placements.cli.printing import Shown, progress


def doctor_command(
    ckpt: CheckpointPath,
    experts_per_layer: Annotated[int | None, number("The number of experts in a layer.")] = None,
    mesh: Mesh = None,
) -> Shown:
    """Report tensors whose experts were taken for replicas, so that only a part is stored.

    --mesh is the mesh of the run that saved. One of its axes must be ep. It is used where neither
    the checkpoint nor a router's shape tells how many experts there are.
    """
    with progress("doctor"):
        diagnosis = offline.diagnose(ckpt, experts_per_layer=experts_per_layer, axes=mesh)
    return Shown(diagnosis, 0 if diagnosis.healthy else 1)
