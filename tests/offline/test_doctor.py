"""``doctor``: of EP-unaware saves it counts the experts that are missing."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementRules,
    PlacementSavePlanner,
    Renumber,
)
from dcp_placements.offline import diagnose
from dcp_placements.offline.doctor import OVERWRITTEN, UNCLEAR, WHOLE
from dcp_placements.testing import World, cut, real_dtensor
from tests.offline_scenes import Run, save_sharded

EXPERTS = 12
WEIGHTS = {"w1": (EXPERTS, 4, 6), "w2": (EXPERTS, 6, 4), "bias": (EXPERTS, 6)}
STATE = ("exp_avg", "exp_avg_sq")


def whole(name: str, state: str = "") -> torch.Tensor:
    """Return all experts' tensor: the whole part of each element is the expert's number."""
    shape = WEIGHTS[name]
    numbers = torch.arange(float(EXPERTS)).reshape(-1, *[1] * (len(shape) - 1))
    return numbers + torch.zeros(shape) + (0.25 * (1 + STATE.index(state)) if state else 0.0)


def state_dict(
    mesh: Any, layers: int, *, alone: bool = False, fsdp_dim: int | None = 0
) -> dict[str, Any]:
    """Return one rank's part: its experts under names that other ep ranks have, too.

    Args:
        mesh: With axes ``ep`` and ``edp``.
        layers: How many.
        alone: One tensor per expert, numbered locally.
        fsdp_dim: The dim that FSDP cuts over ``edp``; None for plain tensors.
    """
    (position,) = mesh["ep"].get_coordinate()
    ranks = mesh["ep"].size()

    def sharded(tensor: torch.Tensor) -> Any:
        if fsdp_dim is None:
            return tensor
        over = mesh["edp"]
        placements = [Shard(fsdp_dim)]
        local = cut(tensor, placements, over.shape, over.get_coordinate())
        return real_dtensor(local, over, placements, tensor.shape)

    made: dict[str, Any] = {"model": {}, "optim": {"state": {}, "param_groups": {}}, "step": 3}
    for layer in range(layers):
        made["model"][f"layers.{layer}.router.weight"] = torch.arange(EXPERTS * 3.0).reshape(-1, 3)
        made["model"][f"layers.{layer}.shared_experts.w1"] = torch.ones(5) * layer
        for name, state in product(WEIGHTS, ("", *STATE)):
            local = cut(whole(name, state), [Shard(0)], (ranks,), (position,))
            parts = {f"layers.{layer}.experts.{name}": local}
            if alone:
                parts = {f"layers.{layer}.experts.{n}.{name}": t for n, t in enumerate(local)}
            for key, tensor in parts.items():
                if state:
                    made["optim"]["state"].setdefault(key, {})[state] = sharded(tensor)
                    made["optim"]["state"][key]["step"] = torch.tensor(3.0)
                else:
                    made["model"][key] = sharded(tensor)
                    made["optim"]["param_groups"][key] = {"lr": 0.1}
    return made


def save(path: Path, axes: dict[str, int], layers: int = 2, **options: Any) -> None:
    world = World(torch.Size(axes.values()).numel())
    world.save(
        path,
        lambda rank: state_dict(world.mesh(rank, **axes), layers, **options),
        lambda rank: dcp.DefaultSavePlanner(),
    )


@pytest.mark.parametrize("alone", [False, True], ids=["stacked", "alone"])
@pytest.mark.parametrize("fsdp_dim", [None, 0])
@pytest.mark.parametrize("ep", [2, 3])
def test_of_an_unaware_save_the_part_of_one_ep_rank_is_stored(
    tmp_path: Path, run: Run, ep: int, fsdp_dim: int | None, alone: bool
) -> None:
    save(tmp_path, {"ep": ep, "edp": 2}, alone=alone, fsdp_dim=fsdp_dim)
    ran = run("doctor", tmp_path)  # the routers' shapes tell the number
    assert ran.code == 1
    line = f"{EXPERTS // ep} of {EXPERTS} experts stored; the router says {EXPERTS}"
    assert ran.out.splitlines()[0] == (
        f"model.layers.0-1.experts, optim.state.layers.0-1.experts: {line}"
    )
    document = run("doctor", tmp_path, "--json").json
    assert document["healthy"] is False
    for layer in (0, 1):
        weight = f"model.layers.{layer}.experts.{'{}.' if alone else ''}w1"
        assert document["tensors"][weight] == {
            "stored": EXPERTS // ep,
            "experts": EXPERTS,
            "verdict": OVERWRITTEN,
            "reason": f"the router says {EXPERTS}",
        }
    assert {tensor["verdict"] for tensor in document["tensors"].values()} == {OVERWRITTEN}


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("convert", ["export", "reshard"])
def test_a_conversion_warns_of_experts_that_were_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, convert: str
) -> None:
    save(tmp_path / "lost", {"ep": 2, "edp": 1})
    save(tmp_path / "sound", {"ep": 1, "edp": 2})
    (tmp_path / "no_rules.py").write_text(
        "from dcp_placements import Placements\ndef rules(mesh):\n    return Placements(None)\n"
    )
    options: list[Any] = []
    if convert == "reshard":
        monkeypatch.syspath_prepend(tmp_path)
        options = ["--rules", "no_rules:rules", "--mesh", "dp=2"]
    assert "replicas" not in run(convert, tmp_path / "sound", tmp_path / "all", *options).err
    ran = run(convert, tmp_path / "lost", tmp_path / "part", *options)
    assert ran.code == 0
    assert f"{EXPERTS // 2} of {EXPERTS} experts stored; the router says {EXPERTS}" in ran.err
    assert "took the experts of other ep ranks for replicas" in ran.err


def test_m111_keys_beside_experts_are_called_not_checked(tmp_path: Path, run: Run) -> None:
    # The embedding is cut over ep, too: half of it is lost, and nothing in its name says so.
    lost = {"layers.0.experts.w1": torch.ones(4, 3, 2), "embedding": torch.ones(8, 2), "step": 3}
    dcp.save(lost, checkpoint_id=tmp_path)
    ran = run("doctor", tmp_path, "--experts-per-layer", 8)
    line = "layers.0.experts: 4 of 8 experts stored; --experts-per-layer says 8"
    assert line in ran.out.splitlines()
    assert "not checked: 2 other keys" in ran.out
    assert "sound" not in ran.out
    assert diagnose(tmp_path, experts_per_layer=8).unchecked == ("embedding", "step")


def test_how_many_experts_there_are(tmp_path: Path) -> None:
    dcp.save({"layers.0.experts.w1": torch.ones(4, 3, 2)}, checkpoint_id=tmp_path)

    def verdict(**options: Any) -> tuple[str, str]:
        (tensor,) = diagnose(tmp_path, **options).tensors.values()
        return tensor.verdict, tensor.reason

    assert verdict() == (UNCLEAR, "how many experts the model has is not known")
    assert verdict(experts_per_layer=4) == (WHOLE, "--experts-per-layer says 4")
    assert verdict(experts_per_layer=8) == (OVERWRITTEN, "--experts-per-layer says 8")
    assert verdict(axes={"ep": 1}) == (WHOLE, "--mesh says 4")
    assert verdict(axes={"ep": 3}) == (OVERWRITTEN, "--mesh says 12")
    assert verdict(experts_per_layer=6)[0] == UNCLEAR
    assert verdict(experts_per_layer=4, axes={"ep": 3})[0] == WHOLE


def test_a_sound_save_is_healthy(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path)
    ran = run("doctor", tmp_path, "--experts-per-layer", 8)
    assert ran.code == 0
    assert "layers.0.experts: 8 of 8 experts stored; --experts-per-layer says 8" in ran.out


def test_a_save_by_rules_is_sound_whatever_the_mesh(tmp_path: Path, run: Run) -> None:
    world = World(4)
    axes = {"ep": 2, "edp": 2}

    def planner(rank: int) -> PlacementSavePlanner:
        mesh = world.mesh(rank, **axes)
        return PlacementSavePlanner(
            PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})
        )

    world.save(tmp_path, lambda rank: state_dict(world.mesh(rank, **axes), 1), planner)
    for mesh in ("ep=4,edp=2", "ep=2,edp=2", "edp=1,ep=1", "dp=4"):
        ran = run("doctor", tmp_path, "--mesh", mesh)
        assert ran.code == 0
        assert "12 of 12 experts stored; saved as Shard(0) over 'ep' of size 2" in ran.out
    assert run("doctor", tmp_path, "--experts-per-layer", 24).code == 1


@pytest.mark.parametrize("numbered", [True, False])
def test_a_save_that_numbers_experts_is_sound(tmp_path: Path, numbered: bool) -> None:
    world = World(4)
    axes = {"ep": 2, "edp": 2}

    def planner(rank: int) -> PlacementSavePlanner:
        (position,) = world.mesh(rank, **axes)["ep"].get_coordinate()
        mine = range(6 * position, 6 * position + 6)
        if numbered:
            return PlacementSavePlanner(None, rename=Renumber("experts.{}", mine, total=EXPERTS))
        # Numbers of layers alone: the experts of ranks are taken for replicas, silently.
        layers = Renumber("layers.{}", [0], total=1)
        return PlacementSavePlanner(None, rename=layers, digests="off")

    world.save(tmp_path, lambda rank: state_dict(world.mesh(rank, **axes), 1, alone=True), planner)
    diagnosis = diagnose(tmp_path, axes={"ep": 4, "edp": 1} if numbered else axes)
    assert diagnosis.healthy is numbered
    assert {tensor.verdict for tensor in diagnosis.tensors.values()} == {
        WHOLE if numbered else OVERWRITTEN
    }


def test_fsdp_alone_proves_nothing(tmp_path: Path) -> None:
    world = World(4)
    axes = {"ep": 2, "edp": 2}
    world.save(
        tmp_path,
        lambda rank: state_dict(world.mesh(rank, **axes), 1),
        lambda rank: PlacementSavePlanner(None, digests="off"),
    )
    diagnosis = diagnose(tmp_path, axes=axes)
    assert {tensor.verdict for tensor in diagnosis.tensors.values()} == {OVERWRITTEN}


def test_gaps_in_local_numbers_are_unclear(tmp_path: Path) -> None:
    keys = [f"layers.0.experts.{number}.w1" for number in (0, 2)]
    dcp.save({key: torch.ones(2, 2) for key in keys}, checkpoint_id=tmp_path)
    (tensor,) = diagnose(tmp_path, experts_per_layer=4).tensors.values()
    assert tensor.verdict == UNCLEAR
    assert tensor.reason == "they are not numbered from 0 without gaps: 0, 2"


def test_grouped_weights_are_numbered_too(tmp_path: Path) -> None:
    keys = [f"layers.0.experts.linear_fc1.weight{number}" for number in range(2)]
    dcp.save({key: torch.ones(64, 2) for key in keys}, checkpoint_id=tmp_path)
    found = diagnose(tmp_path, axes={"ep": 2})
    (tensor,) = found.tensors.values()
    assert tensor.fqn == "layers.0.experts.linear_fc1.weight{}"
    assert (tensor.verdict, tensor.stored, tensor.experts) == (OVERWRITTEN, 2, 4)


def test_a_mesh_that_cannot_have_saved_it_is_refused(tmp_path: Path, run: Run) -> None:
    save(tmp_path, {"ep": 2, "edp": 2}, 1)
    assert run("doctor", tmp_path, "--mesh", "ep=2,edp=2").code == 1
    for wrong, message in (("dp=4", "has no axis ep"), ("ep=1", "has 1 ranks, but")):
        assert message in run.fails("doctor", tmp_path, "--mesh", wrong)


@pytest.mark.parametrize(
    ("key", "shape"), [(f"layers.0.experts.{1 << 62}.w1", (2,)), ("experts.w1", (10**9, 0))]
)
def test_very_many_experts_take_no_memory(tmp_path: Path, key: str, shape: tuple[int, ...]) -> None:
    dcp.save({key: torch.empty(shape)}, checkpoint_id=tmp_path)
    (tensor,) = diagnose(tmp_path, experts_per_layer=8).tensors.values()
    assert tensor.verdict == UNCLEAR
