"""Many tensors from one: experts from an MLP, layers from a shorter model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import FILL, arange, refusal, without_warning
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    Placements,
    Renames,
    Renumber,
    Replace,
    Split,
    Stack,
)
from dcp_placements.testing import FakeDTensor, World, cut
from tests.drawn_worlds import Draw

UPCYCLED = Replace("experts.*", "mlp")


def dense(path: Path, *, flat: bool = False) -> dict[str, Any]:
    """Save a dense model with its optimizer state, by torch's own planner."""
    w, norm = arange(8, 6), arange(6, start=100)
    moments = {"step": torch.tensor(5.0), "exp_avg": arange(8, 6, start=200)}
    optim: dict[str, Any] = {
        "state": {"mlp.w": moments},
        "param_groups": [{"lr": 0.5, "params": ["mlp.w"]}],
    }
    if flat:
        optim = {f"state.mlp.w.{name}": value for name, value in moments.items()}
        optim["param_groups.mlp.w.lr"] = 0.5
    state = {"model": {"mlp.w": w, "norm": norm}, "optim": optim}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return state


def sparse(rank: int, size: int, *, flat: bool, experts: int = 2) -> dict[str, Any]:
    """Return a rank's blank experts, each cut by FSDP."""
    mesh = World(size).mesh(rank, fsdp=size)

    def blank() -> FakeDTensor:
        return FakeDTensor.distribute(torch.full((8, 6), float(FILL)), mesh, [Shard(0)])

    names = [f"experts.{number}.w" for number in range(experts)]
    weights: dict[str, Any] = {name: blank() for name in names}
    weights["norm"] = torch.full((6,), float(FILL))
    moments = {name: {"step": torch.tensor(0.0), "exp_avg": blank()} for name in names}
    optim: dict[str, Any] = {
        "state": moments,
        "param_groups": [{"lr": 0.1, "params": names}],
    }
    if flat:
        optim = {
            f"state.{n}.{k}": value for n, held in moments.items() for k, value in held.items()
        }
        optim |= {f"param_groups.{name}.lr": 0.1 for name in names}
    return {"model": weights, "optim": optim}


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_experts_and_their_state_are_those_of_one_mlp(
    tmp_path: Path, size: int, flat: bool
) -> None:
    whole = dense(tmp_path, flat=flat)
    planners = [Placements(None, rename=UPCYCLED).load_planner() for _ in range(size)]
    with without_warning():
        states = World(size).load(
            tmp_path, lambda rank: sparse(rank, size, flat=flat), planners.__getitem__
        )
    weight, moment = whole["model"]["mlp.w"], arange(8, 6, start=200)
    for rank, state in enumerate(states):
        for number in range(2):
            name = f"experts.{number}.w"
            held = state["optim"]
            own = (
                {key: held[f"state.{name}.{key}"] for key in ("step", "exp_avg")}
                if flat
                else held["state"][name]
            )
            rate = held[f"param_groups.{name}.lr"] if flat else held["param_groups"][0]["lr"]
            piece = cut(weight, [Shard(0)], [size], [rank])
            assert torch.equal(state["model"][name].to_local(), piece)
            assert torch.equal(own["exp_avg"].to_local(), cut(moment, [Shard(0)], [size], [rank]))
            assert (float(own["step"]), rate) == (5.0, 0.5)
        assert torch.equal(state["model"]["norm"], whole["model"]["norm"])
    report = planners[0].report
    assert report.several["model.mlp.w"] == ("model.experts.0.w", "model.experts.1.w")
    assert re.search(r"several: +\d: 2 by model.mlp.w", str(report))
    assert report.missing == report.unread == ()


def test_state_may_be_left_out_and_begins_anew(tmp_path: Path) -> None:
    dense(tmp_path)
    state = sparse(0, 1, flat=False)
    state["optim"]["state"]["experts.0.w"]["step"].fill_(1.0)  # torch's dummy step

    def weights_alone(key: str) -> str:
        renamed = UPCYCLED(key)
        return renamed if key.startswith("model.") else key

    placements = Placements(None, rename=weights_alone)
    with without_warning():
        World(1).load(
            tmp_path,
            lambda rank: state,
            lambda rank: placements.load_planner(
                optional=["optim.state.experts"], waive={"optim.state.mlp": "begins anew"}
            ),
        )
    assert torch.equal(state["model"]["experts.1.w"].to_local(), arange(8, 6))
    for name in ("experts.0.w", "experts.1.w"):
        held = state["optim"]["state"][name]
        assert not held["exp_avg"].to_local().any()
        assert not held["step"]


LAYERS = 3


@pytest.mark.parametrize("with_whole", [False, True], ids=["", "whole"])
def test_a_deeper_model_begins_as_the_layers_of_a_shorter_one(
    tmp_path: Path, with_whole: bool
) -> None:
    whole = {f"model.layers.{layer}.w": arange(4, 3, start=50 * layer) for layer in range(LAYERS)}
    World(1).save(tmp_path, lambda rank: dict(whole), lambda rank: Placements(None).save_planner())
    # Five layers of three, on two stages.
    of_stages = [0, 1, 1], [2, 2]
    specification = {key: (4, 3) for key in whole} if with_whole else None

    def placements(rank: int) -> Placements:
        rename = Renumber("layers.{}", of_stages[rank], total=LAYERS)
        return Placements(None, rename=rename, whole=specification)

    def blank(rank: int) -> dict[str, Any]:
        return {f"model.layers.{at}.w": torch.zeros(4, 3) for at in range(len(of_stages[rank]))}

    with without_warning():
        states = World(2).load(tmp_path, blank, lambda rank: placements(rank).load_planner())
    for rank, state in enumerate(states):
        for at, layer in enumerate(of_stages[rank]):
            expected = whole[f"model.layers.{layer}.w"]
            assert torch.equal(state[f"model.layers.{at}.w"], expected)


def test_the_comparison_with_the_save_knows_several_tensors_of_one(tmp_path: Path) -> None:
    """A rule of the load that the save did not have is refused for them as for any other."""
    whole = torch.cat([arange(4, 6), arange(4, 6, start=100)])

    def placements(rank: int, placement: Any) -> Placements:
        mesh = World(2).mesh(rank, tp=2)
        rules = {"mlp": CheckpointPlacement(mesh, {"tp": placement})}
        return Placements(rules, rename=Renames(UPCYCLED, optional=True))

    def held(rank: int, value: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.chunk(2)[rank] for part in value.chunk(2)])

    World(2).save(
        tmp_path,
        lambda rank: {"mlp.w": held(rank, whole)},
        lambda rank: placements(rank, FusedShard(0, 2)).save_planner(),
    )

    def blank(rank: int) -> dict[str, Any]:
        return {f"experts.{number}.w": torch.zeros(4, 6) for number in range(3)}

    loaded = World(2).load(
        tmp_path, blank, lambda rank: placements(rank, FusedShard(0, 2)).load_planner()
    )
    for rank, state in enumerate(loaded):
        assert all(torch.equal(value, held(rank, whole)) for value in state.values())
    text = refusal(
        lambda: World(2).load(
            tmp_path, blank, lambda rank: placements(rank, Shard(0)).load_planner()
        )
    )
    assert "mlp.w: this load cuts it by 'tp' in another way than the save did" in text


def test_fused_experts_are_filled_from_the_parts_of_one_mlp(tmp_path: Path) -> None:
    gate, up = arange(4, 3), arange(4, 3, start=50)
    dcp.save({"mlp.gate": gate, "mlp.up": up}, checkpoint_id=tmp_path, no_dist=True)
    rename = Renames(UPCYCLED, Split("mlp.gate_up", ("mlp.gate", "mlp.up")))

    def state(rank: int) -> dict[str, Any]:
        return {f"experts.{number}.gate_up": torch.zeros(4, 3) for number in range(2)}

    def placements(rank: int) -> Placements:
        mesh = World(2).mesh(rank, tp=2)
        rules = {"mlp": CheckpointPlacement(mesh, {"tp": FusedShard(0, 2)})}
        return Placements(rules, rename=rename)

    states = World(2).load(tmp_path, state, lambda rank: placements(rank).load_planner())
    for rank, loaded in enumerate(states):
        expected = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        assert torch.equal(loaded["experts.0.gate_up"], expected)
        assert torch.equal(loaded["experts.1.gate_up"], expected)
    text = refusal(
        lambda: World(2).save(tmp_path / "no", state, lambda rank: placements(rank).save_planner())
    )
    assert "experts.0.gate_up" in text


def test_experts_of_one_are_rows_of_a_stack_as_well(tmp_path: Path) -> None:
    """A shorter list of experts, stored as one tensor: redundant rows, as for expert maps."""
    stack = arange(2, 4, 3)
    dcp.save({"experts.w": stack}, checkpoint_id=tmp_path, no_dist=True)
    rename = Renames(Renumber("experts.{}", [0, 1, 0, 1, 1], total=2), Stack("experts.{}", total=2))
    state = {f"experts.{number}.w": torch.zeros(4, 3) for number in range(5)}
    World(1).load(
        tmp_path, lambda rank: state, lambda rank: Placements(None, rename=rename).load_planner()
    )
    for number, row in enumerate([0, 1, 0, 1, 1]):
        assert torch.equal(state[f"experts.{number}.w"], stack[row])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (torch.zeros(8, 6, dtype=torch.bfloat16), "different dtypes, shapes or placements"),
        (torch.zeros(6, 8), "different dtypes, shapes or placements"),
        (0.5, "what is no tensor"),
    ],
    ids=["dtype", "shape", "a number"],
)
def test_what_differs_in_kind_is_refused_with_the_keys(
    tmp_path: Path, other: Any, text: str
) -> None:
    dense(tmp_path)
    state = {"model": {"experts.0.w": torch.zeros(8, 6), "experts.1.w": other}}
    planner = Placements(None, rename=UPCYCLED).load_planner()
    refused = refusal(lambda: World(1).load(tmp_path, lambda rank: state, lambda rank: planner))
    assert text in refused
    assert "model.experts.1.w" in refused


def test_a_save_gives_one_name_to_one_tensor(tmp_path: Path) -> None:
    planner = Placements(None, rename=UPCYCLED).save_planner()
    state = sparse(0, 1, flat=False)
    text = refusal(lambda: World(1).save(tmp_path, lambda rank: state, lambda rank: planner))
    assert "model.mlp.w: rename() gives this one name to both model.experts.0.w" in text
    assert not list(tmp_path.rglob("*.distcp"))


@dataclass(frozen=True)
class Drawn:
    """A file, and the names in it of the keys of each rank; every name is asked for.

    Attributes:
        whole: The tensors of the file.
        names: By rank, the name of each of its keys.
        dim: The dim that all are cut on.
        by_dtensor: Whether a DTensor says so; otherwise a rule does.
    """

    whole: dict[str, torch.Tensor]
    names: list[list[str]]
    dim: int
    by_dtensor: bool

    def part(self, rank: int, value: torch.Tensor) -> torch.Tensor:
        return cut(value, [Shard(self.dim)], [len(self.names)], [rank])

    def blank(self, rank: int) -> dict[str, Any]:
        state: dict[str, Any] = {}
        mesh = World(len(self.names)).mesh(rank, axis=len(self.names))
        for number, name in enumerate(self.names[rank]):
            value = torch.full_like(self.whole[name], FILL)
            state[f"k{number}"] = self.part(rank, value).clone()
            if self.by_dtensor:
                state[f"k{number}"] = FakeDTensor.distribute(value, mesh, [Shard(self.dim)])
        return state

    def placements(self, rank: int) -> Placements:
        mesh = World(len(self.names)).mesh(rank, axis=len(self.names))
        rules = {
            name: CheckpointPlacement(
                mesh, {"axis": Shard(self.dim)}, global_shape=tuple(value.shape)
            )
            for name, value in self.whole.items()
        }
        names = self.names[rank]
        return Placements(
            None if self.by_dtensor else rules, rename=lambda key: names[int(key[1:])]
        )


@pytest.mark.worlds(120)
def test_random_names_are_filled_with_what_the_file_has(seeds: range, tmp_path: Path) -> None:
    """Any mapping of keys to names, under any cut, against plain slicing."""
    for seed in seeds:
        draw = Draw(f"several {seed}")
        shapes = [(draw.randint(1, 9), draw.randint(1, 6)) for _ in range(draw.randint(1, 4))]
        whole = {f"w{at}": arange(*shape, start=1000 * at) for at, shape in enumerate(shapes)}
        dcp.save(dict(whole), checkpoint_id=tmp_path / str(seed), no_dist=True)
        names = [
            [*whole, *[draw.choice([*whole]) for _ in range(draw.randint(0, 5))]]
            for _ in range(draw.randint(1, 4))
        ]
        drawn = Drawn(whole, names, draw.randint(0, 1), draw.chance(50))
        planners = [drawn.placements(rank).load_planner() for rank in range(len(names))]
        states = World(len(names)).load(tmp_path / str(seed), drawn.blank, planners.__getitem__)
        for rank, state in enumerate(states):
            for at, name in enumerate(names[rank]):
                value = state[f"k{at}"]
                local = value.to_local() if drawn.by_dtensor else value
                assert torch.equal(local, drawn.part(rank, whole[name])), (seed, rank, at)
