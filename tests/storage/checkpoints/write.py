"""Write the checkpoints of ``test_checkpoints_of_other_versions.py`` beside this file.

Run under each version to add: ``python tests/storage/checkpoints/write.py``. A directory is named
by torch and Python: ``stock`` in it is torch's own planner and writer, ``placements`` is ours.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemWriter,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.testing import World, cut, real_dtensor

HERE = Path(__file__).parent
WHOLE = {
    "experts": torch.arange(12.0).reshape(4, 3),
    "norm": torch.arange(5).to(torch.bfloat16),
}
STEP = 3


def write() -> None:
    """Write both checkpoints into the working directory, whose path is not stored."""
    world = World(2)

    def placement(rank: int) -> CheckpointPlacement:
        return CheckpointPlacement(world.mesh(rank, ep=2), [Shard(0)])

    def state_dict(rank: int, complete: bool) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2)
        local = cut(WHOLE["experts"], [Shard(0)], mesh.shape, mesh.get_coordinate() or ())
        shape = tuple(WHOLE["experts"].shape)
        experts = real_dtensor(local, mesh, [Shard(0)], shape) if complete else local
        return {"experts": experts, "norm": WHOLE["norm"].clone(), "step": STEP}

    world.save("stock", lambda rank: state_dict(rank, True), lambda rank: DefaultSavePlanner())
    world.save(
        "placements",
        lambda rank: state_dict(rank, False),
        lambda rank: PlacementSavePlanner(
            PlacementRules({"experts": placement(rank)}), digests="full"
        ),
        lambda rank: PlacementFileSystemWriter("placements"),
    )


if __name__ == "__main__":
    python = ".".join(platform.python_version_tuple()[:2])
    target = HERE / f"torch-{torch.__version__.partition('+')[0]}-py{python}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    with contextlib.chdir(target):
        write()
