"""torchrun --nproc-per-node 2 scripts/examples/transformers_moe.py

A Qwen3-MoE with random weights: experts cut over ``ep`` by hand, all of it wrapped by FSDP2. Saves
from any even number of ranks, then loads the whole model in one process with torch's default
planner, and compares its logits with those of the model that was cut.
"""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from dcp_placements import presets

CONFIG = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=24,
    moe_intermediate_size=12,
    num_experts=4,
    num_experts_per_tok=2,
)
TOKENS = torch.arange(12)[None]


def whole_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIG, experts_implementation="eager").eval()


def main(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("ep", "fsdp"))
    model = whole_model(seed=0)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name, whole in list(experts.named_parameters()):
            mine = whole.detach().chunk(2)[mesh.get_local_rank("ep")].clone()
            setattr(experts, name, nn.Parameter(mine))
        experts.num_experts //= 2
        fully_shard(experts, mesh=mesh["fsdp"])
    fully_shard(model)

    placements = presets.transformers(model, mesh)
    state_dict = {"model": model.state_dict()}
    dcp.save(state_dict, checkpoint_id=path, planner=placements.save_planner())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    main(shared[0])
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        trained, loaded = whole_model(seed=0), whole_model(seed=1)
        dcp.load({"model": loaded.state_dict()}, checkpoint_id=shared[0])
        with torch.no_grad():
            print("logits equal:", torch.equal(trained(TOKENS).logits, loaded(TOKENS).logits))
