"""Every optimizer of torch.optim passes: saved in one topology, loaded in another, without a word.

The state is that of the optimizer itself, trained whole in one process. What a rank has of it is
cut by plain slicing: dim 0 of all that has the rows of its parameter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, assert_same, blank, without_warning
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, Placements
from dcp_placements.testing import FakeDTensor, World

ROWS = 8
OPTIMIZERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "LBFGS": (torch.optim.LBFGS, {}),
    "Muon": (torch.optim.Muon, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SparseAdam": (torch.optim.SparseAdam, {}),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(arange(ROWS, 6) / 10)
        self.vector = nn.Parameter(arange(ROWS) / 10)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.conv = nn.Parameter(arange(ROWS, 4, 3, 5) / 100)


CUT = ("matrix", "vector", "conv")


def trained(name: str, steps: int, *, flat: bool) -> dict[str, Any]:
    """Return the state dict of a whole model, after these steps or, by torch, a dummy one."""
    kind, options = OPTIMIZERS[name]
    model = Model()
    parameters = [model.matrix] if name == "Muon" else list(model.parameters())
    optimizer = kind(parameters, lr=0.01, **options)
    for step in range(steps):
        for at, parameter in enumerate(parameters):
            grad = torch.linspace(-1, 1 + at + step, parameter.numel()).reshape(parameter.shape)
            is_sparse = name == "SparseAdam" and grad.dim()
            parameter.grad = grad.to_sparse(1) if is_sparse else grad
        if name == "SparseAdam":
            model.scalar.grad = None
        optimizer.step(*([lambda: torch.tensor(1.0)] if name == "LBFGS" else []))
    optimizer.zero_grad()
    if name in ("LBFGS", "SparseAdam"):  # torch takes no dummy step of these
        names = {one: key for key, one in model.named_parameters()}
        held = optimizer.state_dict()
        (group,) = held["param_groups"]
        order = [names[one] for one in parameters]
        optim: dict[str, Any] = {
            "state": {order[at]: one for at, one in held["state"].items()},
            "param_groups": [{**group, "params": order}],
        }
    else:
        form = StateDictOptions(flatten_optimizer_state_dict=flat)
        optim = get_optimizer_state_dict(model, optimizer, options=form)
    return {"model": {key: one.detach() for key, one in model.named_parameters()}, "optim": optim}


def part_of(value: Any, rank: int, size: int, *, path: tuple[str, ...] = ()) -> Any:
    """Return what a rank has: its rows of all that has the rows of a parameter that is cut."""
    if isinstance(value, dict):
        return {k: part_of(v, rank, size, path=(*path, str(k))) for k, v in value.items()}
    if isinstance(value, list):
        return [part_of(one, rank, size, path=path) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    has_rows = (
        value.dim()
        and value.shape[0] == ROWS
        and any(part in CUT for key in path for part in key.split("."))
    )
    return value.chunk(size)[rank].clone() if has_rows else value.clone()


def over_fsdp(value: Any, mesh: Any, *, path: tuple[str, ...] = ()) -> Any:
    """Return a state dict whose tensors with rows are DTensors over the mesh."""
    if isinstance(value, dict):
        return {k: over_fsdp(v, mesh, path=(*path, str(k))) for k, v in value.items()}
    has_rows = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == ROWS
    if has_rows and any(part in CUT for key in path for part in key.split(".")):
        return FakeDTensor.distribute(value, mesh, [Shard(0)])
    return value


def planners(whole: Any, rank: int, size: int) -> Placements:
    placement = CheckpointPlacement(World(size).mesh(rank, ep=size), {"ep": Shard(0)})
    return Placements({f"model.{key}": placement for key in CUT}, whole=whole)


@pytest.mark.parametrize(
    ("flat", "with_whole"), [(False, True), (True, False)], ids=["nested-whole", "flattened"]
)
@pytest.mark.parametrize("steps", [0, 1], ids=["no step", "a step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_changes_topology_without_a_word(
    tmp_path: Path, name: str, steps: int, flat: bool, with_whole: bool
) -> None:
    if flat and name in ("LBFGS", "SparseAdam"):
        pytest.skip("this test has them in nested form alone")
    state = trained(name, steps, flat=flat)
    whole = {key: tuple(one.shape) for key, one in state["model"].items()} if with_whole else None
    two, four = World(2), World(4)
    with without_warning():
        saved = two.save(
            tmp_path,
            lambda rank: part_of(state, rank, 2),
            lambda rank: planners(whole, rank, 2).save_planner(),
        )
        read = blank(state)
        dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
        assert_same(read["model"], state["model"])
        assert_same(read["optim"], state["optim"])
        loads = [planners(whole, rank, 4).load_planner() for rank in range(4)]
        loaded = [blank(part_of(state, rank, 4)) for rank in range(4)]
        four.load(tmp_path, loaded.__getitem__, loads.__getitem__)
    assert saved[0].report.warnings == ()
    for rank in range(4):
        assert_same(loaded[rank], part_of(state, rank, 4))
        assert (loads[rank].report.missing, loads[rank].report.stateless) == ((), ())
        assert loads[rank].report.warnings == ()


@pytest.mark.parametrize("steps", [0, 1], ids=["no step", "a step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_passes_under_fsdp_alone(
    tmp_path: Path, name: str, steps: int
) -> None:
    state = trained(name, steps, flat=False)

    def held(rank: int, size: int) -> dict[str, Any]:
        return dict(over_fsdp(state, World(size).mesh(rank, fsdp=size)))

    with without_warning():
        World(4).save(
            tmp_path, lambda rank: held(rank, 4), lambda rank: Placements(None).save_planner()
        )
        read = blank(state)
        dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
        assert_same(read, state)
        loaded = [blank(held(rank, 2)) for rank in range(2)]
        World(2).load(tmp_path, loaded.__getitem__, lambda rank: Placements(None).load_planner())
    for rank in range(2):
        assert_same(loaded[rank], held(rank, 2))
