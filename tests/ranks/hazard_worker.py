"""One of four gloo ranks: runs every scenario where real ranks matter, in one launch.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 4 \\
        tests/ranks/hazard_worker.py OUT [scenario ...]

Writes ``OUT/<rank>.json``: by scenario the errors, the warnings and what else was seen.
``test_hazards_ranks.py`` starts it once and asserts on what it wrote.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from tests.ranks.scenes import (
    Facts,
    Scenarios,
    arange,
    differing,
    errors_of,
    files,
    heard,
    local,
    refusal,
    same,
    stock_whole,
)

WORLD = 4
EXPERTS, HIDDEN, WIDTH = 8, 5, 3
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

SCENARIOS = Scenarios()
scenario = SCENARIOS.add


# Rows of the table with tensors alone.


def expert_dtensor(mesh: DeviceMesh, whole: torch.Tensor) -> DTensor:
    part = whole.chunk(2)[mesh.get_local_rank("ep")]
    return distribute_tensor(part, mesh["fsdp"], [Shard(0)])


def by_ep(mesh: DeviceMesh, *patterns: str) -> PlacementRules:
    placement = CheckpointPlacement(mesh, {"ep": Shard(0)})
    return PlacementRules(dict.fromkeys(patterns, placement))


@scenario
def m17(path: Path) -> Facts:
    """Without collectives: no save by our planner or writer, and no load of the whole."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    whole = arange(8, 3)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "norm": arange(3)}
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine = half[dist.get_rank() // 2]
    outcome: Facts = {}
    for name, writer in (("torch", dcp.FileSystemWriter), ("ours", PlacementFileSystemWriter)):

        def save(call: Any = dcp.save, writer: Any = writer, **options: Any) -> Any:
            return call(
                state,
                storage_writer=writer(path),
                planner=PlacementSavePlanner(),
                use_collectives=False,
                **options,
            )

        outcome[name] = refusal(save)
        outcome[f"{name}_in_a_group"] = refusal(lambda save=save: save(process_group=mine))
        outcome[f"{name}_in_a_thread"] = refusal(lambda save=save: save(dcp.async_save).result())
    outcome["files"] = files(path)

    torchs = path / "torch"
    dcp.save(state, checkpoint_id=torchs, use_collectives=False)
    outcome["torch_files"] = files(torchs)
    target = {"w": torch.full((8, 3), 77.0), "norm": torch.zeros(3)}
    outcome["by_our_planner"] = refusal(
        lambda: dcp.load(target, checkpoint_id=torchs, planner=PlacementLoadPlanner())
    )
    reader = PlacementFileSystemReader(torchs)
    try:
        dcp.load(target, storage_reader=reader, planner=PlacementLoadPlanner())
    except (AssertionError, dcp.CheckpointException) as error:
        outcome["by_our_reader"] = errors_of(error)
    outcome["untouched"] = same(target["w"], torch.full((8, 3), 77.0))
    again = {"w": DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)]), "norm": torch.zeros(3)}
    dcp.load(again, checkpoint_id=torchs)
    found = {"w": local(again["w"]), "norm": again["norm"]}
    outcome["by_torch"] = differing(found, {"w": local(state["w"]), "norm": arange(3)})
    return outcome


@scenario
def m18(path: Path) -> Facts:
    """Two process groups save into one directory, one after the other."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    outcome: Facts = {}
    for half, group in enumerate(halves):
        if mine == half:
            with heard() as texts:
                dcp.save(
                    {"w": arange(4, 3, start=100 * half)},
                    checkpoint_id=path,
                    planner=PlacementSavePlanner(),
                    process_group=group,
                )
            outcome["texts"] = texts
        dist.barrier()
    return outcome


@scenario
def equal_sets(path: Path) -> Facts:
    """The order in a set of texts is another one in every process."""
    names = ["w1", "w2", "w3", "router", "norm", "embed", "head"]
    state: dict[str, Any] = {"set": (set(names),), "frozenset": frozenset(names)}
    with heard() as texts:
        dcp.save(state, checkpoint_id=path, planner=PlacementSavePlanner())
    loaded = dict.fromkeys(state)
    dcp.load(loaded, checkpoint_id=path, planner=PlacementLoadPlanner())
    equal = [name for name, value in state.items() if value == loaded[name]]
    return {"texts": texts, "equal": sorted(equal), "keys": sorted(state), "seed": hash("seed")}


# The main job: FSDP2 with expert parallelism and AdamW.


class Experts(nn.Module):
    """The rank's own experts in one tensor per matrix."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, WIDTH, HIDDEN))
        self.w2 = nn.Parameter(torch.empty(count, HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bh,ewh,eow->bo", x, self.w1, self.w2).clone()


class Model(nn.Module):
    """A dense layer of uneven size, experts, and a parameter that no step ever reaches."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.experts = Experts(experts)
        self.head = nn.Linear(HIDDEN, 7)
        self.unused = nn.Parameter(torch.empty(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        return self.head(x + self.experts(x))


class Trainer:
    """The model as a trainer wraps it on this mesh of axes (ep, edp), and its optimizer."""

    def __init__(self, ep: int, seed: int) -> None:
        shape = (ep, WORLD // ep)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "edp"))
        self.model = Model(EXPERTS // ep)
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                full = torch.randn(EXPERTS, *parameter.shape[1:])
                part = self.mesh.get_local_rank("ep")
                parameter.copy_(
                    full.chunk(ep)[part] if "experts" in name else torch.randn(parameter.shape)
                )
        fully_shard(self.model.experts, mesh=self.mesh["edp"])
        fully_shard(self.model, mesh=init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    @property
    def rules(self) -> PlacementRules:
        return PlacementRules({"experts.*": CheckpointPlacement(self.mesh, {"ep": Shard(0)})})

    def step(self, number: int) -> None:
        torch.manual_seed(1000 * number + dist.get_rank())
        self.model(torch.randn(2, HIDDEN)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
        }

    def apply(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optim"], options=FLAT)

    def locals(self) -> dict[str, torch.Tensor]:
        return local_tensors(self.state_dict())


def local_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": local(value).detach().clone()
        for part, entries in state.items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


def whole_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the truth on every rank: all local tensors, gathered and put together by hand."""
    held: list[Any] = [None] * WORLD
    dist.all_gather_object(held, trainer.locals())
    ep, edp = trainer.mesh.shape
    wholes = {}
    for name, own in held[0].items():
        parts = [tensors[name] for tensors in held]
        if not own.dim():
            wholes[name] = own
        else:  # rank = ep coordinate * edp + edp coordinate, so rows lie in the order of ranks
            assert ep * edp == WORLD
            wholes[name] = torch.cat(parts)
    return wholes


def cut(name: str, whole: torch.Tensor, ep: int) -> torch.Tensor:
    """Return what this rank holds of a whole tensor on a mesh of this ep: plain slicing."""
    if not whole.dim():
        return whole
    rank, edp = dist.get_rank(), WORLD // ep
    if ".experts." in f".{name}":
        part = list(whole.chunk(ep)[rank // edp].chunk(edp))
        return part[rank % edp]
    parts = list(whole.chunk(WORLD))
    return parts[rank] if rank < len(parts) else whole[:0]


def load_into(trainer: Trainer, path: Path, **options: Any) -> PlacementLoadPlanner:
    state = trainer.state_dict()
    planner = PlacementLoadPlanner(trainer.rules, **options)
    dcp.load(state, checkpoint_id=path, planner=planner)
    trainer.apply(state)
    return planner


_trained: dict[str, Any] = {}


def trained() -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Return a trainer after three steps, and the whole tensors; made once."""
    if not _trained:
        trainer = Trainer(ep=2, seed=1)
        for number in range(3):
            trainer.step(number)
        _trained.update(trainer=trainer, wholes=whole_tensors(trainer))
    return _trained["trainer"], _trained["wholes"]


def main_checkpoint(path: Path) -> Path:
    """Return the directory of the main job's checkpoint."""
    return path.parent / "main_job" / "checkpoint"


@scenario
def main_job(path: Path) -> Facts:
    trainer, wholes = trained()
    planner = PlacementSavePlanner(trainer.rules)
    with heard() as texts:
        dcp.save(trainer.state_dict(), checkpoint_id=main_checkpoint(path), planner=planner)
    outcome: Facts = {
        "texts": texts,
        "stateless": list(planner.report.stateless),
        "nbytes": [planner.report.unique_nbytes, planner.report.whole_nbytes],
        "names": sorted(wholes),
        "experts": list(wholes["model.experts.w1"].shape),
    }
    outcome["differing"] = differing(stock_whole(main_checkpoint(path)), wholes)
    return outcome


@scenario
def main_job_comes_back(path: Path) -> Facts:
    """The same mesh, a new model: all local tensors equal, and so after another step."""
    trainer, _ = trained()
    before = trainer.locals()
    other = Trainer(ep=2, seed=2)
    with heard() as texts:
        planner = load_into(other, main_checkpoint(path))
    found = other.locals()
    unused = {name: value for name, value in found.items() if ".unused." in name}
    outcome: Facts = {
        "texts": texts,
        "differing": differing(found, {**before, **unused}),
        "compared": len(before),
        "stateless": list(planner.report.stateless),
        "unused_names": sorted(unused),
        "unused_state": {name: float(value.abs().sum()) for name, value in unused.items()},
    }
    go_on = copy_of(trainer)
    for each in (go_on, other):
        each.step(9)
    a, b = go_on.locals(), other.locals()
    outcome["differing_after_a_step"] = [name for name in differing(a, b) if ".unused." not in name]
    return outcome


def copy_of(trainer: Trainer) -> Trainer:
    """Return a trainer with the same weights and moments, copied without a checkpoint."""
    made = Trainer(ep=2, seed=3)
    source = trainer.state_dict()
    target = made.state_dict()
    for part, entries in target.items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and name in source[part]:
                local(value).copy_(local(source[part][name]))
    made.apply(target)
    return made


def reshard(path: Path, ep: int) -> Facts:
    _, wholes = trained()
    other = Trainer(ep=ep, seed=4)
    with heard() as texts:
        planner = load_into(other, main_checkpoint(path))
    wanted = {name: cut(name, whole, ep) for name, whole in wholes.items()}
    found = other.locals()
    return {
        "texts": texts,
        "differing": [n for n in differing(found, wanted) if ".unused." not in n],
        "compared": len(wanted),
        "shape": list(found["model.experts.w1"].shape),
        "stateless": list(planner.report.stateless),
        "unused": {name: float(value.sum()) for name, value in found.items() if ".unused." in name},
    }


@scenario
def reshard_to_ep4(path: Path) -> Facts:
    return reshard(path, 4)


@scenario
def reshard_to_ep1(path: Path) -> Facts:
    return reshard(path, 1)


@scenario
def rules_forgotten(path: Path) -> Facts:
    """The main job with no rules: refused at save; loaded without them: refused, too."""
    trainer, _ = trained()
    state = trainer.state_dict()
    refused = refusal(lambda: dcp.save(state, checkpoint_id=path, planner=PlacementSavePlanner()))
    before = local_tensors(state)
    at_load = refusal(
        lambda: dcp.load(state, checkpoint_id=main_checkpoint(path), planner=PlacementLoadPlanner())
    )
    return {
        "refused": refused,
        "files": files(path),
        "refused_at_load": at_load,
        "changed": differing(local_tensors(state), before),
    }


def saved_in_the_background(path: Path, kind: AsyncCheckpointerType) -> Facts:
    """The state at the call is what is saved, whatever training does meanwhile; twice."""
    trainer, wholes = trained()
    planner = PlacementSavePlanner(trainer.rules, enable_plan_caching=True)
    seen = []
    for number in range(2):
        moved = copy_of(trainer)
        with torch.no_grad():
            local(moved.model.head.weight).add_(number)
        running: Any = dcp.async_save(
            moved.state_dict(),
            checkpoint_id=path / str(number),
            planner=planner,
            async_checkpointer_type=kind,
        )
        if hasattr(running, "staging_completion"):
            running.staging_completion.result()
        with torch.no_grad():
            for parameter in moved.model.parameters():
                local(parameter).fill_(77)
        getattr(running, "upload_completion", running).result()
        dist.barrier()
        wanted = {name: whole for name, whole in wholes.items() if ".unused" not in name}
        wanted["model.head.weight"] = wanted["model.head.weight"] + number
        found = stock_whole(path / str(number))
        seen.append(differing({n: w for n, w in found.items() if ".unused" not in n}, wanted))
    return {"differing": seen, "compared": len(wanted)}


@scenario
def async_save_in_a_thread(path: Path) -> Facts:
    return saved_in_the_background(path, AsyncCheckpointerType.THREAD)


@scenario
def async_save_in_a_process(path: Path) -> Facts:
    return saved_in_the_background(path, AsyncCheckpointerType.PROCESS)


@scenario
def async_save_refused(path: Path) -> Facts:
    """A refusal in the background arrives where the result is asked for."""
    state = {"layers.w": arange(4, 3, start=dist.get_rank())}
    logged = io.StringIO()
    logging.getLogger("dcp_placements").addHandler(logging.StreamHandler(logged))
    running = dcp.async_save(state, checkpoint_id=path, planner=PlacementSavePlanner())
    refused = refusal(lambda: running.result())  # type: ignore[union-attr]
    return {"refused": refused, "files": files(path), "logged": logged.getvalue()}


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=90))
    torch.set_num_threads(1)
    SCENARIOS.run(sys.argv[2:], out, lambda name: out / name)


if __name__ == "__main__":
    assert os.environ.get("RANK"), "start it with python -m torch.distributed.run"
    main()
