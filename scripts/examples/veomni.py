"""python scripts/examples/veomni.py

Four ranks of a VeOmni job in one process: EP 2, FSDP2 on dim 0 of what EP leaves, as for Muon.
Saves the raw state, and reads the file with torch's default planner: the experts are in order.
"""

import tempfile
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_placements import Placements, presets
from dcp_placements.testing import FakeMesh, World, real_dtensor

NAME = "model.layers.0.mlp.experts.gate_proj"
WHOLE = torch.arange(8.0).repeat_interleave(2).reshape(8, 2)  # row i is expert i
AXES = {"ep_fsdp": 2, "ep": 2}


def mesh(rank: int) -> FakeMesh:
    return World(4).mesh(rank, **AXES)


def specs(rank: int) -> dict:
    """In a trainer: model._fqn2spec_info, or the model itself."""
    spec = SimpleNamespace(para_name="ep", placement=Shard(0), para_fsdp_mesh=mesh(rank))
    return {NAME: spec}


def state_dict(rank: int) -> dict:
    """The raw parameter: a DTensor over ``ep_fsdp`` alone, of this rank's experts."""
    fsdp, ep = mesh(rank).get_coordinate()
    part = WHOLE.chunk(2)[ep]
    local = part.chunk(2)[fsdp].clone()
    return {"model": {NAME: real_dtensor(local, mesh(rank)["ep_fsdp"], [Shard(0)], part.shape)}}


def placements(rank: int) -> Placements:
    return presets.veomni(specs(rank))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        World(4).save(path, state_dict, lambda rank: placements(rank).save_planner())
        found = {f"model.{NAME}": torch.zeros(8, 2)}
        dcp.load(found, checkpoint_id=path, no_dist=True)
    rows = found[f"model.{NAME}"][:, 0].int().tolist()
    print("experts in the file:", *rows)
