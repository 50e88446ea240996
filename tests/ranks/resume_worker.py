"""One of two gloo ranks: a run that saves, or the same run after a restart.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks/resume_worker.py \\
        OUT first|resumed

Rank 0 writes ``OUT/<run>.json``: what the reports said of the plans. ``test_plan_record.py`` starts
it twice.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner
from tests.ranks.leaving import leave


def main() -> None:
    out, run = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    torch.manual_seed(0 if run == "first" else 1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    state_dict: dict[str, Any] = {"model": model.state_dict()}
    after = None
    if run == "resumed":
        after = PlacementLoadPlanner()
        dcp.load(state_dict, checkpoint_id=out / "first0", planner=after)
    said = []

    def save(planner: PlacementSavePlanner) -> None:
        dcp.save(state_dict, checkpoint_id=out / f"{run}{len(said)}", planner=planner)
        said.append(planner.report.plan_cache)

    planner = PlacementSavePlanner(enable_plan_caching=True, after=after, step=100)
    save(planner)
    save(planner)
    state_dict = {"model": {key: value.double() for key, value in state_dict["model"].items()}}
    save(PlacementSavePlanner(enable_plan_caching=True, after=after))
    if dist.get_rank() == 0:
        (out / f"{run}.json").write_text(json.dumps(said))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
