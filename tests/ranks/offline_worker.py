"""One of four gloo ranks: saves checkpoints for the command line to look at.

    OMP_NUM_THREADS=1 python tests/ranks/forked.py 4 tests/ranks/offline_worker.py OUT

Experts over ``ep`` and then FSDP, a dense layer over FSDP, AdamW moments. Writes into OUT:
``ours``, ``stock_files`` (the same planner, torch's writer), ``unmerged`` (without collectives),
``stock`` (torch's planner: one ep rank's experts are lost), ``later`` (a step on), ``hf_sharded``
(the whole weights, cut and written by torch), ``truth`` (the whole tensors in one file).
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
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemWriter,
    PlacementRules,
    PlacementSavePlanner,
)
from tests.ranks.scenes import leave

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model(nn.Module):
    """A router, stacked experts of this ep rank, a dense layer."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(5, 8)
        self.dense = nn.Linear(5, 7)
        torch.manual_seed(1 + mesh["ep"].get_local_rank())
        self.experts = nn.ParameterDict({"w1": torch.randn(4, 5, 3), "w2": torch.randn(4, 3, 5)})
        for part in (self.router, self.dense, self.experts):
            fully_shard(part, mesh=mesh["fsdp"])

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Train on made-up gradients, which differ from element to element."""
        for number, parameter in enumerate(self.parameters()):
            assert isinstance(parameter, DTensor)
            local = parameter.to_local()
            made = torch.linspace(-1, 1, local.numel()).reshape(local.shape) + number
            parameter.grad = DTensor.from_local(
                made,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        optimizer.step()


def whole(tensor: torch.Tensor, fqn: str, mesh: DeviceMesh) -> torch.Tensor:
    """Return the whole tensor by torch's own gathering."""
    part = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if "experts" not in fqn or not part.ndim:
        return part
    parts = [torch.empty_like(part) for _ in range(mesh["ep"].size())]
    dist.all_gather(parts, part.contiguous(), group=mesh.get_group("ep"))
    return torch.cat(parts)


def main() -> None:
    """Save everything."""
    warnings.simplefilter("ignore")
    out = Path(sys.argv[1])
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=90))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    model = Model(mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model.step(optimizer)
    rules = PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})

    def state() -> dict[str, Any]:
        return {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer, options=FLAT),
        }

    def planner(**more: Any) -> PlacementSavePlanner:
        return PlacementSavePlanner(rules, **more)

    saved = state()
    dcp.save(
        saved,
        storage_writer=PlacementFileSystemWriter(out / "ours"),
        planner=planner(digests="full", step=1),
    )
    dcp.save(saved, checkpoint_id=out / "stock_files", planner=planner())
    dcp.save(saved, checkpoint_id=out / "unmerged", planner=planner(), use_collectives=False)
    dcp.save(saved, checkpoint_id=out / "stock")
    truth = {}
    for part, held in saved.items():
        for fqn, value in held.items():
            if isinstance(value, torch.Tensor):
                truth[f"{part}.{fqn}"] = whole(value.detach(), fqn, mesh)
    sharded = {
        fqn: distribute_tensor(truth[f"model.{fqn}"], mesh, [Shard(0), Replicate()])
        for fqn in saved["model"]
    }
    dcp.save(
        sharded,
        storage_writer=HuggingFaceStorageWriter(out / "hf_sharded", save_distributed=True),
    )
    if dist.get_rank() == 0:
        (out / "truth").mkdir()
        save_file({k: v.contiguous() for k, v in truth.items()}, out / "truth" / "all.safetensors")
    model.step(optimizer)
    dcp.save(state(), checkpoint_id=out / "later", planner=planner(step=2))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
