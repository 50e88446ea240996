"""python scripts/examples/torchtitan.py

Four ranks of a torchtitan job in one process (NeMo AutoModel is alike): EP is an axis of the
experts' own DTensors, so that the planners need no rule. Saves with ours and with torch's default
planner; the chunks in both files are the same.
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import PlacementSavePlanner
from dcp_placements.testing import World, cut, real_dtensor

NAME = "layers.1.moe.routed_experts.inner_experts.w1_EFD"
WHOLE = torch.arange(96.0).reshape(8, 4, 3)
PLACEMENTS = (_StridedShard(0, split_factor=2), Shard(0))  # over ("efsdp", "ep"); ep cuts first


def state_dict(rank: int) -> dict:
    mesh = World(4).mesh(rank, efsdp=2, ep=2)
    local = cut(WHOLE, PLACEMENTS, mesh.shape, mesh.get_coordinate())
    return {NAME: real_dtensor(local, mesh, PLACEMENTS, WHOLE.shape)}


def chunks(path: str) -> set:
    stored = FileSystemReader(path).read_metadata().state_dict_metadata[NAME].chunks
    return {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as stock:
        World(4).save(ours, state_dict, lambda rank: PlacementSavePlanner())
        World(4).save(stock, state_dict, lambda rank: DefaultSavePlanner())
        found = {NAME: torch.zeros(8, 4, 3)}
        dcp.load(found, checkpoint_id=ours, no_dist=True)
        print("whole in the file:", torch.equal(found[NAME], WHOLE))
        print("the same chunks as with torch's planner:", chunks(ours) == chunks(stock))
