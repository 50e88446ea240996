"""python scripts/examples/megatron_lite.py

Eight ranks of a Megatron Lite job in one process: TP 2, PP 2, EP 2. Saves, reads the file back with
torch's default planner, and prints what it holds of a stage's layer and of an expert.
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import Placements, presets
from dcp_placements.testing import World

LAYERS, EXPERTS, HIDDEN, WIDTH = 4, 4, 3, 4
SIZES = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}


def whole_fc1(layer: int, expert: int) -> torch.Tensor:
    """Gate over up: what the weight is when nothing is parallel."""
    return torch.arange(2.0 * WIDTH * HIDDEN).reshape(-1, HIDDEN) + 1000 * layer + 100 * expert


def whole_gate_up(layer: int) -> torch.Tensor:
    return whole_fc1(layer, 9)


def state_dict(rank: int) -> dict:
    """What one rank of the trainer has: local layers, local experts, [gate; up] of its TP part."""
    dense, expert = presets.megatron_meshes(rank, 8, **SIZES)
    pp, _, _, tp = dense.get_coordinate()
    ep = expert.get_coordinate()[2]
    model = {}
    for local in range(LAYERS // 2):
        layer = pp * LAYERS // 2 + local
        gate, up = whole_gate_up(layer).chunk(2)
        mine = torch.cat([gate.chunk(2)[tp], up.chunk(2)[tp]])
        model[f"layers.{local}.mlp.gate_up.linear.weight"] = mine
        for i in range(EXPERTS // 2):
            fc1 = whole_fc1(layer, ep * EXPERTS // 2 + i)
            model[f"layers.{local}.moe.experts.fc1.weight{i}"] = fc1
    return {f"model_pp{pp}": model}


def placements(rank: int) -> Placements:
    dense, expert = presets.megatron_meshes(rank, 8, **SIZES)
    stage = dense.get_coordinate()[0]
    layers = range(stage * LAYERS // 2, (stage + 1) * LAYERS // 2)  # model.layer_indices
    return presets.megatron_lite(dense, expert, experts=EXPERTS, layers=layers, num_layers=LAYERS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        World(8).save(path, state_dict, lambda rank: placements(rank).save_planner())
        found = {
            "model.layers.3.mlp.gate_up.linear.weight": torch.zeros(2 * WIDTH, HIDDEN),
            "model.layers.3.moe.experts.fc1.weight3": torch.zeros(2 * WIDTH, HIDDEN),
        }
        dcp.load(found, checkpoint_id=path, no_dist=True)
    dense, expert = found.values()
    print("layer 3 of stage 1, gate over up:", torch.equal(dense, whole_gate_up(3)))
    print("its expert 3, local number 1 on ep 1:", torch.equal(expert, whole_fc1(3, 3)))
