"""One rank of the smoke, under torchrun: the save phase, or the load phase, of a batch of cases.

Leaves ``<case>-<planner>/<phase>-<rank>.json`` for the driver after each case. The only module of
the smoke that knows ``dcp_placements``: :func:`planners` holds the lines a user adds.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ep_smoke_model import EXPERTS, HIDDEN, WIDTH, Trainer, whole_tensors
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

STEPS = 3  # before the save, and again after it
AXES = ("pp", "hsdp", "edp", "ep", "tp")


def planners(kind: str, mesh: DeviceMesh) -> tuple[SavePlanner, LoadPlanner]:
    """The pair of planners: torch's own, or ours with the rules that a user would write."""
    if kind == "stock":
        return dcp.DefaultSavePlanner(), dcp.DefaultLoadPlanner()

    from dcp_placements import CheckpointPlacement, FusedShard, Placements, Renumber

    def by_tp(placement: Any, *shape: int) -> CheckpointPlacement:
        return CheckpointPlacement(mesh, {"tp": placement}, global_shape=shape)

    by_ep = CheckpointPlacement(mesh, {"ep": Shard(0)})
    rules = {
        "hc_head.*": None,  # asked first: the pattern of the head below would match it as well
        "*head.*": by_ep,
        "embed.weight": by_ep,
        "experts.w*": by_ep,
        "attention.qkv": by_tp(FusedShard(0, 3), 3 * HIDDEN, HIDDEN),
        "attention.out": by_tp(Shard(1), HIDDEN, HIDDEN),
        "shared_expert.w2": by_tp(Shard(1), HIDDEN, WIDTH),
        "shared_expert": by_tp(Shard(0), WIDTH, HIDDEN),
    }
    each = EXPERTS // mesh["ep"].size()
    first = mesh.get_local_rank("ep") * each
    rename = Renumber("experts_list.{}", range(first, first + each), total=EXPERTS)
    placements = Placements(rules, rename=rename)
    return placements.save_planner(), placements.load_planner()


def state_dict(trainer: Trainer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "model": get_model_state_dict(trainer.model),
        "optim": get_optimizer_state_dict(trainer.model, trainer.optimizer, options=options),
        "train": {"step": trainer.step},
    }


def apply_state_dict(trainer: Trainer, state: dict[str, Any]) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_model_state_dict(trainer.model, state["model"])
    set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optim"], options=options)
    trainer.step = state["train"]["step"]


def local_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's own tensors by flat key, copied to the CPU."""
    found = {}
    for part, values in state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                local = value.to_local() if isinstance(value, DTensor) else value
                found[f"{part}.{key}"] = local.detach().cpu().clone()
    return found


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Any]:
    """How far two flat state dicts lie apart: ``unequal`` in bits, ``max_delta`` in values."""
    shapes, unequal, delta = [], [], 0.0
    both = sorted(found.keys() & wanted.keys())
    for key in both:
        a, b = found[key], wanted[key]
        if a.shape != b.shape or a.dtype != b.dtype:
            shapes.append(f"{key}: {tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}")
        elif not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            unequal.append(key)
            delta = max(delta, (a.double() - b.double()).abs().max().item())
    return {
        "tensors_compared": len(both),
        "unequal": unequal,
        "max_delta": delta,
        "missing_keys": sorted(wanted.keys() - found.keys()),
        "unexpected_keys": sorted(found.keys() - wanted.keys()),
        "shape_mismatches": shapes,
    }


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collects the texts of warnings, except notices to developers."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    notices = (DeprecationWarning, FutureWarning)
    texts += sorted({str(w.message) for w in caught if not issubclass(w.category, notices)})


def ask_oracle(trainer: Trainer, locals_: dict[str, Tensor], path: Path) -> dict[str, Any] | None:
    """Called on every rank; rank 0 returns how the file differs from the tensors that all hold."""
    held: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    coordinate = {axis: trainer.mesh.get_local_rank(axis) for axis in AXES}
    dist.gather_object((coordinate, locals_), held)
    if held is None:
        return None
    stored = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with collected_warnings():  # torch points out that it takes this for one process, as it should
        dcp.load(stored, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    return compare(stored, whole_tensors(held))


def save_phase(
    trainer: Trainer, kind: str, how: str, path: Path, reference: Path
) -> dict[str, Any]:
    losses = trainer.train(STEPS)
    state = state_dict(trainer)
    saved = local_tensors(state)
    saver, _ = planners(kind, trainer.mesh)
    with collected_warnings() as texts:
        if how == "now":
            dcp.save(state, checkpoint_id=path, planner=saver)
            losses += trainer.train(STEPS)
        else:
            losses += train_during_save(trainer, state, saver, how, path)
    oracle = ask_oracle(trainer, saved, path)
    ended = local_tensors(state_dict(trainer))
    torch.save({"step": STEPS, "saved": saved, "ended": ended}, reference)
    return {"losses": losses, "oracle": oracle, "warnings": texts}


def train_during_save(
    trainer: Trainer, state: dict[str, Any], saver: SavePlanner, how: str, path: Path
) -> list[float]:
    """Save in a thread or a process, and train on meanwhile."""
    saving: Any = dcp.async_save(
        state,
        checkpoint_id=path,
        planner=saver,
        # A thread's collectives must not mix with those of the training.
        process_group=dist.new_group(backend="gloo"),
        async_checkpointer_type=AsyncCheckpointerType[how.upper()],
    )
    losses = trainer.train(STEPS)
    getattr(saving, "upload_completion", saving).result()
    dist.barrier()
    return losses


def load_phase(
    trainer: Trainer, kind: str, how: str, path: Path, reference: Path
) -> dict[str, Any]:
    wanted = torch.load(reference, weights_only=True)
    state = state_dict(trainer)
    _, loader = planners(kind, trainer.mesh)
    with collected_warnings() as texts:
        dcp.load(state, checkpoint_id=path, planner=loader)
    apply_state_dict(trainer, state)

    # From the model and the optimizer again, and not from `state`: what training goes on with.
    loaded = compare(local_tensors(state_dict(trainer)), wanted["saved"])
    steps = {"loaded_step": trainer.step, "saved_step": wanted["step"]}
    trainer.train(STEPS)
    ended = compare(local_tensors(state_dict(trainer)), wanted["ended"])
    return {"save_load": loaded | steps, "continue": ended | steps, "warnings": texts}


def run_rank(phase: str, jobs: list[str], work: Path, device: str) -> None:
    """Run one phase of every job, given as ``case:planner:<pp>x<hsdp>x<edp>x<ep>x<tp>:how``."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        devices = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % devices)
        # NCCL has no two ranks on one device.
        is_shared = int(os.environ["LOCAL_WORLD_SIZE"]) > devices
        backend = "cpu:gloo,cuda:gloo" if is_shared else "cpu:gloo,cuda:nccl"
    # A planner that skips a collective on one rank shall not hold the others for half an hour.
    dist.init_process_group(backend, timeout=timedelta(minutes=2))
    rank = dist.get_rank()
    for job in jobs:
        name, kind, sizes, how = job.split(":")
        folder = work / f"{name}-{kind}"
        result: dict[str, Any]
        try:
            shape = tuple(int(size) for size in sizes.split("x"))
            mesh = init_device_mesh(device, shape, mesh_dim_names=AXES)
            # Other weights on the load side, so that what is not loaded shows.
            trainer = Trainer(mesh, seed=0 if phase == "save" else 1)
            run = save_phase if phase == "save" else load_phase
            result = run(trainer, kind, how, folder / "checkpoint", folder / f"rank{rank}.pt")
        except BaseException:  # torch's CheckpointException is no Exception
            result = {"error": traceback.format_exc()}
        (folder / f"{phase}-{rank}.json").write_text(json.dumps(result))
        if "error" in result:
            # Others may wait for this rank, also in an exit handler: torchrun ends them now.
            print(result["error"], file=sys.stderr, flush=True)
            os._exit(1)
    dist.destroy_process_group()
