"""Experts that a resume without a rule has made equal are named once, at a save after training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, PlacementRules, PlacementSavePlanner, SaveReport
from dcp_placements.testing import FakeDTensor, World

WORLD = World(4, {"ep": 2, "edp": 2})
LAYERS = range(3)
SAYS = "the experts are bit for bit equal on all 2 positions along 'ep'"


def value(*key: Any, shape: tuple[int, ...] = (4, 3)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash(key) % 2**31))


def state(
    *,
    equal: tuple[int, ...] = tuple(LAYERS),
    moment: float = 1.0,
    name: str = "experts.w1",
    fsdp: bool = False,
    world: World = WORLD,
) -> Any:
    """Return what each rank has: experts that are equal along ep in some layers, and moments."""

    def of_rank(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, **world.meshes[0])
        ep = mesh["ep"].get_local_rank() if "ep" in world.meshes[0] else 0
        model: dict[str, Any] = {"norm.weight": torch.ones(3)}
        moments: dict[str, Any] = {}
        for layer in LAYERS:
            key = f"layers.{layer}.{name}"
            weight = value(layer, 0 if layer in equal else ep)
            both = weight, moment * weight.square()
            if fsdp:
                edp = mesh["edp"]
                parts = [each.chunk(2)[edp.get_local_rank()] for each in both]
                both = tuple(FakeDTensor(p, edp, [Shard(0)], weight.shape) for p in parts)
            model[key] = both[0]
            moments[key] = {"step": torch.tensor(float(moment > 0)), "exp_avg_sq": both[1]}
        groups = [{"params": [*moments], "lr": 0.1}]
        return {"model": model, "optim": {"state": moments, "param_groups": groups}}

    return of_rank


def report_of(state_of: Any, world: World = WORLD, **options: Any) -> SaveReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = world.check(state_of, lambda rank: PlacementSavePlanner(**options))
    return planner.report  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("fsdp", [False, True])
def test_experts_that_a_resume_made_equal_are_named_once(tmp_path: Path, fsdp: bool) -> None:
    planners: list[Any] = []

    def planner(rank: int) -> PlacementSavePlanner:
        planners.append(PlacementSavePlanner())
        return planners[-1]

    with pytest.warns(UserWarning, match="bit for bit equal") as told:
        WORLD.save(tmp_path, state(fsdp=fsdp), planner)
    (warning,) = planners[0].report.warnings
    assert SAYS in warning
    assert "3 tensors, as model.layers.0.experts.w1" in warning
    assert sum(SAYS in str(each.message) for each in told) == 1
    assert (tmp_path / ".metadata").exists()


@pytest.mark.parametrize("name", ["experts.0.w1.weight", "mlp.experts.gate_up_proj"])
def test_lists_and_stacks(name: str) -> None:
    assert SAYS in "".join(report_of(state(name=name)).warnings)


def test_weights_alone_with_a_step() -> None:
    def weights(rank: int) -> dict[str, Any]:
        return {"model": state()(rank)["model"]}

    assert SAYS in "".join(report_of(weights, step=3).warnings)
    assert not report_of(weights).warnings
    assert not report_of(weights, step=0).warnings


def test_nothing_is_said_where_equal_experts_are_right() -> None:
    assert not report_of(state(moment=0.0)).warnings  # before the first step
    assert not report_of(state(), World(2, {"ep": 1, "edp": 2})).warnings
    assert not report_of(state(), World(4, {"dp": 2, "tp": 2})).warnings
    assert not report_of(state(name="shared_experts.w1")).warnings
    assert not report_of(state(name="mlp.w1")).warnings
    assert not report_of(state(), waive={"experts": "they are copies"}).warnings


def test_nothing_is_said_where_a_rule_or_the_tensor_itself_cuts_them() -> None:
    def rules(rank: int) -> PlacementSavePlanner:
        mesh = WORLD.mesh(rank, ep=2, edp=2)
        return PlacementSavePlanner(
            PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})
        )

    assert not WORLD.check(state(), rules).report.warnings  # type: ignore[attr-defined]

    def cut(rank: int) -> dict[str, Any]:
        """One layer's experts are a DTensor over ep: those of the others are equal by chance."""
        of_rank = state()(rank)
        mesh = WORLD.mesh(rank, ep=2, edp=2)["ep"]
        of_rank["model"]["layers.0.experts.w1"] = FakeDTensor(
            value(0, mesh.get_local_rank(), shape=(2, 3)), mesh, [Shard(0)], (4, 3)
        )
        of_rank["optim"]["state"].pop("layers.0.experts.w1")
        of_rank["optim"]["param_groups"][0]["params"].pop(0)
        return of_rank

    assert not report_of(cut).warnings


def test_experts_that_differ_are_refused_as_before() -> None:
    with pytest.raises(dcp.CheckpointException) as refused:
        report_of(state(equal=(0, 1)))
    assert "model.layers.2.experts.w1, optim" in str(refused.value.failures[0][0])
    told = report_of(state(equal=(0, 1)), on_conflict="warn").warnings
    assert SAYS not in "".join(told)
