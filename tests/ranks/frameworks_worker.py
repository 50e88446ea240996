"""One of four gloo ranks: functions that take no planner save and load an expert-parallel model.

    python -m torch.distributed.run --standalone --nproc-per-node 4 \\
        tests/ranks/frameworks_worker.py OUT save|load FRAMEWORK ...

For each framework ``save`` trains a model (expert parallel 2, FSDP2 2), saves it by the framework
inside ``installed`` and again without, and writes what each rank holds to
``OUT/FRAMEWORK/held_<rank>.pt``. ``load`` makes the model anew with other weights, loads both, and
writes ``ours_<rank>.pt`` and ``stock_<rank>.pt`` there. ``test_frameworks.py`` compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import CheckpointPlacement, Placements, installed
from tests.ranks.scenes import leave

EXPERTS, WIDTH = 6, 4


class Experts(nn.Module):
    """This rank's experts, all in one tensor ``[experts, width, width]``."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bw,ewv->bv", x, self.weight).tanh()


class Model(nn.Module):
    """A dense layer that all ranks share, and experts that differ by ``ep``."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts(EXPERTS // ep_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(self.dense(x))
        return out


def model_on(mesh: DeviceMesh, world: DeviceMesh, seed: int) -> Model:
    """Return the model under FSDP2, with weights that differ by expert-parallel rank."""
    model = Model(mesh["ep"].size())
    for number, parameter in enumerate(model.parameters()):
        ep_rank = mesh.get_local_rank("ep") if number else 0
        generator = torch.Generator().manual_seed(seed + 10 * number + ep_rank)
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    fully_shard(model.experts, mesh=mesh["fsdp"])
    fully_shard(model, mesh=world)
    return model


def train(model: Model, optimizer: torch.optim.Optimizer, steps: int) -> None:
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, WIDTH)).square().sum().backward()
        optimizer.step()


def held(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return this rank's part of every weight and moment, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        values = {"weight": parameter, **optimizer.state[parameter]}
        for kind, value in values.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            found[f"{name}/{kind}"] = local.detach().clone()
    return found


class Accelerate:
    """accelerate's functions for FSDP2, which pass torch's default planners."""

    def __init__(self) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        self.plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True
        )
        self.accelerator = Accelerator(cpu=True)

    def save(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

        save_fsdp_model(self.plugin, self.accelerator, model, str(path))
        save_fsdp_optimizer(self.plugin, self.accelerator, optimizer, model, str(path))

    def load(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from accelerate.utils import load_fsdp_model, load_fsdp_optimizer

        load_fsdp_model(self.plugin, self.accelerator, model, str(path))
        load_fsdp_optimizer(self.plugin, self.accelerator, optimizer, model, str(path))


class Lightning:
    """Fabric's ``ModelParallelStrategy``, which passes no planner."""

    def __init__(self) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(
            parallelize_fn=lambda module, mesh: module,
            data_parallel_size=4,
            tensor_parallel_size=1,
            save_distributed_checkpoint=True,
        )
        self.fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
        self.fabric.launch()

    def _state(self, model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model, "optimizer": optimizer, "step": 2}

    def save(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.fabric.strategy.save_checkpoint(path, self._state(model, optimizer))

    def load(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.fabric.strategy.load_checkpoint(path, self._state(model, optimizer))


class Trainer:
    """The parts of transformers' ``Trainer`` that save and resume under FSDP2.

    Accelerate has no FSDP on CPUs, so the trainer is told of it when it is made.
    """

    def __init__(self) -> None:
        self.plugin = Accelerate().plugin

    def _trainer(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> Any:
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(output_dir=str(path.parent), use_cpu=True, report_to=[])
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        trainer = Trainer(model, arguments, optimizers=(optimizer, scheduler))
        trainer.accelerator.state.fsdp_plugin = self.plugin
        trainer.is_fsdp_enabled = True
        return trainer

    def save(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        path.mkdir(exist_ok=True)
        self._trainer(path, model, optimizer)._save_optimizer_and_scheduler(str(path))

    def load(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        trainer = self._trainer(path, model, optimizer)
        trainer._load_from_checkpoint(str(path), model)
        trainer._load_optimizer_and_scheduler(str(path))


class NemoAutoModel:
    """NeMo AutoModel's checkpointer, which saves by planners of its own."""

    def __init__(self) -> None:
        from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
        from nemo_automodel.components.checkpoint.config import CheckpointingConfig

        with_group()
        config = CheckpointingConfig(model_save_format="torch_save", save_consolidated=False)
        rank = dist.get_rank()
        self.checkpointer = Checkpointer(config, dp_rank=rank, tp_rank=0, pp_rank=0)

    def save(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.checkpointer.save_model(model, str(path))
        self.checkpointer.save_optimizer(optimizer, model, str(path))

    def load(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.checkpointer.load_model(model, str(path / "model"))
        self.checkpointer.load_optimizer(optimizer, model, str(path))


class LlamaFactory:
    """LLaMA-Factory's functions for FSDP2, which pass no planner."""

    def save(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from llamafactory.v1.plugins.trainer_plugins.distributed import fsdp2

        fsdp2.save_checkpoint(model, optimizer, str(path))

    def load(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from llamafactory.v1.plugins.trainer_plugins.distributed import fsdp2

        fsdp2.load_checkpoint(model, optimizer, str(path))


class Optimizers:
    """An optimizer, with the state dict of torchtitan's container: keys are parameters' names."""

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.both = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(*self.both, options=AsyncSave.OPTIONS)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(*self.both, optim_state_dict=state, options=AsyncSave.OPTIONS)


class Position:
    """The state of a scheduler or data loader."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"step": 2}


class Torchtitan:
    """torchtitan's checkpoint manager, which passes no planner."""

    def __init__(self) -> None:
        with_group()

    def _manager(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> Any:
        from torchtitan.components.checkpointer import CheckpointManager

        config = CheckpointManager.Config(
            enable=True,
            folder=str(path),
            interval=1,
            keep_latest_k=0,
            initial_load_model_only=False,
        )
        return CheckpointManager(
            config,
            dataloader=Position(),
            model_parts=[model],
            optimizers=Optimizers(model, optimizer),
            lr_schedulers=Position(),
            states={},
            sd_adapter=None,
        )

    def save(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        assert self._manager(path, model, optimizer).save(2)

    def load(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        assert self._manager(path, model, optimizer).load()


class Torchtune:
    """torchtune's ``DistributedCheckpointer``, which passes no planner."""

    def _checkpointer(self, path: Path) -> Any:
        from torchtune.training.checkpointing import DistributedCheckpointer

        return DistributedCheckpointer(checkpoint_dir=str(path), output_dir=str(path))

    def save(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        weights, moments = get_state_dict(model, optimizer, options=AsyncSave.OPTIONS)
        state = {"model": weights, "optimizer": moments}
        self._checkpointer(path).save_checkpoint(state, epoch=2)

    def load(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        weights, moments = get_state_dict(model, optimizer, options=AsyncSave.OPTIONS)
        state = {"model": weights, "optimizer": moments}
        state = self._checkpointer(path).load_checkpoint(state)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=AsyncSave.OPTIONS,
        )


class Olmo:
    """OLMo-core's functions, which pass torch's default planner to a save and none to a load.

    Storage is its own.
    """

    def save(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from olmo_core.distributed.checkpoint import save_model_and_optim_state

        save_model_and_optim_state(str(path), model, optimizer, flatten_optimizer_state=True)

    def load(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from olmo_core.distributed.checkpoint import load_model_and_optim_state

        load_model_and_optim_state(str(path), model, optimizer, flatten_optimizer_state=True)


class Torchtnt:
    """torchtnt's callback that saves, and its ``restore``, which pass torch's default planners."""

    def _unit(self, model: Model, optimizer: torch.optim.Optimizer) -> Any:
        from torchtnt.framework.unit import AppStateMixin

        unit = AppStateMixin()
        unit.model, unit.optimizer = ModelState(model), Optimizers(model, optimizer)
        return unit

    def save(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from torchtnt.framework.callbacks.dcp_saver import DistributedCheckpointSaver

        saver = DistributedCheckpointSaver(str(path.parent))
        assert saver._save(str(path), self._unit(model, optimizer).app_state())

    def load(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from torchtnt.framework.callbacks.dcp_saver import DistributedCheckpointSaver

        DistributedCheckpointSaver.restore(str(path), self._unit(model, optimizer))


class ModelState:
    """A model with the state dict of its DTensors."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


class AsyncSave:
    """``dcp.async_save`` and ``dcp.load`` without a planner, as torchtitan and AReaL call them."""

    OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, kind: AsyncCheckpointerType) -> None:
        self.kind = kind

    def save(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> Any:
        weights, moments = get_state_dict(model, optimizer, options=self.OPTIONS)
        state = {"model": weights, "optimizer": moments}
        # Training has collectives of its own meanwhile.
        group = dist.new_group(backend="gloo")
        running = dcp.async_save(
            state,
            checkpoint_id=path,
            process_group=group,
            async_checkpointer_type=self.kind,
        )
        return getattr(running, "upload_completion", running)

    def load(self, path: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
        weights, moments = get_state_dict(model, optimizer, options=self.OPTIONS)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=weights,
            optim_state_dict=moments,
            options=self.OPTIONS,
        )


FRAMEWORKS: dict[str, Callable[[], Any]] = {
    "accelerate": Accelerate,
    "lightning": Lightning,
    "transformers": Trainer,
    "nemo_automodel": NemoAutoModel,
    "torchtitan": Torchtitan,
    "llamafactory": LlamaFactory,
    "torchtune": Torchtune,
    "olmo_core": Olmo,
    "torchtnt": Torchtnt,
    "thread": partial(AsyncSave, AsyncCheckpointerType.THREAD),
    "process": partial(AsyncSave, AsyncCheckpointerType.PROCESS),
}


def with_group() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def run(out: Path, name: str, act: str) -> None:
    framework = FRAMEWORKS[name]()
    with_group()
    out.mkdir(exist_ok=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    model = model_on(mesh, world, seed=1 if act == "save" else 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    placement = CheckpointPlacement(mesh, [Shard(0), Replicate()])
    placements = Placements({"experts.weight": placement})
    train(model, optimizer, steps=2 if act == "save" else 1)
    if act == "save":
        torch.save(held(model, optimizer), out / f"held_{dist.get_rank()}.pt")
    contexts = {"stock": nullcontext(), "ours": installed(placements)}
    for planners, context in contexts.items():
        with context:
            pending = getattr(framework, act)(out / f"{planners}_checkpoint", model, optimizer)
        if pending is not None:
            if planners == "ours":  # training goes on meanwhile
                train(model, optimizer, steps=1)
            pending.result()
        if act == "load":
            torch.save(held(model, optimizer), out / f"{planners}_{dist.get_rank()}.pt")
    dist.barrier()


if __name__ == "__main__":
    _, folder, act, *names = sys.argv
    for name in names:
        run(Path(folder) / name, name, act)
    leave()
