"""python scripts/examples/megatron_core.py

Four ranks of a Megatron Core job in one process: TP 2, EP 2. The modules stand for Megatron's, with
the attributes that Megatron sets. Saves, and reads the file with torch's default planner.
"""

import tempfile
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcp_placements import Placements, presets
from dcp_placements.testing import World

EXPERTS, HIDDEN, WIDTH, VOCAB = 4, 3, 4, 10
EMBEDDING = torch.arange(float(VOCAB * HIDDEN)).reshape(VOCAB, HIDDEN)


def fc1(expert: int) -> torch.Tensor:
    return torch.arange(2.0 * WIDTH * HIDDEN).reshape(-1, HIDDEN) + 100 * expert


def meshes(rank: int) -> tuple:
    """In a trainer: of torch.distributed.get_rank(), with the sizes of the run's arguments."""
    return presets.megatron_meshes(rank, 4, tp=2, ep=2, etp=1)


def parallel(weight: torch.Tensor, *, allreduce: bool) -> nn.Module:
    """A column-parallel linear layer or embedding, marked as Megatron marks it."""
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    module.weight.tensor_model_parallel = True
    module.weight.partition_dim, module.weight.partition_stride = 0, 1
    module.weight.allreduce = allreduce
    return module


def model(rank: int) -> nn.Module:
    dense, expert = meshes(rank)
    tp, ep = dense.get_coordinate()[3], expert.get_coordinate()[2]
    padded = torch.cat([EMBEDDING, torch.zeros(2, HIDDEN)])  # to a multiple of what TP needs
    made = nn.Module()
    made.config = SimpleNamespace(
        gated_linear_unit=True, num_moe_experts=EXPERTS, num_layers=1, tensor_model_parallel_size=2
    )
    made.embedding = nn.Module()
    made.embedding.word_embeddings = parallel(padded.chunk(2)[tp], allreduce=True)
    made.decoder, layer = nn.Module(), nn.Module()
    made.decoder.layers = nn.ModuleList([layer])
    layer.layer_number, layer.mlp = 1, nn.Module()
    layer.mlp.experts = nn.Module()
    layer.mlp.experts.local_experts = nn.ModuleList([nn.Module(), nn.Module()])
    for local, module in enumerate(layer.mlp.experts.local_experts):
        module.linear_fc1 = parallel(fc1(2 * ep + local), allreduce=False)
    return made


def placements(rank: int) -> Placements:
    return presets.megatron_core(model(rank), *meshes(rank), vocab_size=VOCAB)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        World(4).save(
            path,
            lambda rank: {"model": model(rank).state_dict()},
            lambda rank: placements(rank).save_planner(),
        )
        prefix = "model.decoder.layers.0.mlp.experts.local_experts"
        found = {f"{prefix}.{i}.linear_fc1.weight": torch.zeros(8, 3) for i in range(EXPERTS)}
        found["model.embedding.word_embeddings.weight"] = torch.zeros(VOCAB, HIDDEN)
        dcp.load(found, checkpoint_id=path, no_dist=True)
    *experts, embedding = found.values()
    print("experts 0-3:", all(torch.equal(w, fc1(i)) for i, w in enumerate(experts)))
    print("vocabulary without its padding:", torch.equal(embedding, EMBEDDING))
