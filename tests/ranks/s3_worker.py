"""One of four gloo ranks: saves and loads of a checkpoint in a bucket.

    OMP_NUM_THREADS=1 python tests/ranks/forked.py 4 tests/ranks/s3_worker.py OUT URL [NAME ...]

Writes ``OUT/<rank>.json``: by scenario what differs from the whole tensors cut by plain slicing.
``test_s3_ranks.py`` starts it.
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from tests.ranks.scenes import Facts, Scenarios, arange, local, same

SCENARIOS = Scenarios()
scenario = SCENARIOS.add
SHAPES = {
    "experts.w1": (8, 130, 77),
    "experts.w2": (8, 77, 130),
    "dense": (250, 301),
    "norm": (61,),
}


def wholes(start: int = 0) -> dict[str, torch.Tensor]:
    """Return the tensors of the model: two of stacked experts, a sharded and a replicated one."""
    return {name: arange(*shape, start=start) for name, shape in SHAPES.items()}


def mesh_of(ep: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ep, 4 // ep), mesh_dim_names=("ep", "fsdp"))


def rules_on(mesh: DeviceMesh) -> PlacementRules:
    return PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})


def state_on(mesh: DeviceMesh, start: int = 0, *, blank: bool = False) -> dict[str, Any]:
    """Return this rank's state: experts over ``ep`` and then ``fsdp``, "dense" over ``fsdp``."""
    ep, fsdp = map(mesh.get_local_rank, ("ep", "fsdp"))
    state: dict[str, Any] = {"step": -1 if blank else start}
    for name, whole in wholes(start).items():
        state[name] = whole
        if "experts" in name:
            experts = whole.chunk(mesh["ep"].size())[ep]
            mine = experts.chunk(mesh["fsdp"].size(), 1)[fsdp].clone()
            state[name] = DTensor.from_local(
                mine, mesh["fsdp"], [Shard(1)], shape=experts.shape, stride=experts.stride()
            )
        elif name == "dense":
            mine = whole.chunk(mesh["fsdp"].size())[fsdp].clone()
            state[name] = DTensor.from_local(
                mine, mesh, [Replicate(), Shard(0)], shape=whole.shape, stride=whole.stride()
            )
        if blank:
            state[name] = torch.full_like(state[name], 77)
    return state


def save(url: str, mesh: DeviceMesh, start: int = 0, **options: Any) -> None:
    dcp.save(
        state_on(mesh, start),
        storage_writer=PlacementFileSystemWriter(url, thread_count=2),
        planner=PlacementSavePlanner(rules_on(mesh), **options),
    )


def load(url: str, mesh: DeviceMesh, start: int = 0, **options: Any) -> Facts:
    """Load, and compare with the cut of the whole tensors."""
    reader = PlacementFileSystemReader(url)
    state = state_on(mesh, blank=True)
    planner = PlacementLoadPlanner(rules_on(mesh), **options)
    dcp.load(state, storage_reader=reader, planner=planner)
    wanted = state_on(mesh, start)
    differing = [name for name in SHAPES if not same(local(state[name]), local(wanted[name]))]
    return {"differing": differing + ["step"] * (state["step"] != start)}


@scenario
def resharded(url: str) -> Facts:
    """Saved over an older step, and loaded by the ranks that saved, and by other meshes."""
    save(url, mesh_of(4), 4)
    save(url, mesh_of(2), 5)
    return {f"ep{ep}": load(url, mesh_of(ep), 5) for ep in (2, 4, 1)}


def main() -> None:
    out, url, *chosen = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=60))
    SCENARIOS.run(chosen, Path(out), lambda name: f"{url}/{name}")


if __name__ == "__main__":
    main()
