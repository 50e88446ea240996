"""``doctor`` on EP-unaware saves: what it says survived is what is in the files."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    MeshCoordinate,
    PlacementRules,
    PlacementSavePlanner,
    Renumber,
)
from dcp_placements.offline import CannotLook, Checkpoint, diagnose, rescue, verify
from dcp_placements.offline.repairs.surviving_experts import OVERWRITTEN, UNCLEAR, WHOLE, Diagnosis
from dcp_placements.testing import World, cut, real_dtensor
from tests.offline_scenes import Run, overwriting, save_sharded

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


def save(
    path: Path, axes: dict[str, int], layers: int = 2, *, lowest: bool = False, **options: Any
) -> None:
    world = World(torch.Size(axes.values()).numel())
    world.save(
        path,
        lambda rank: state_dict(world.mesh(rank, **axes), layers, **options),
        lambda rank: dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=lowest),
    )


def load(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors, as torch's own planner reads them."""
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        key: torch.full(expected.size, -1.0)
        for key, expected in stored.items()
        if hasattr(expected, "properties")
    }
    dcp.load(found, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    return found


def assert_true(path: Path, found: Diagnosis) -> None:
    """Compare every survivor with what is in the files."""
    read = load(path)
    assert found.tensors
    for fqn, tensor in found.tensors.items():
        if fqn.endswith(".step"):
            continue
        for survivor in tensor.survivors:
            held = (
                read[fqn.replace("{}", str(survivor.row))]
                if "{}" in fqn
                else read[fqn][survivor.row]
            )
            numbers = set(held.floor().flatten().tolist())
            assert (len(numbers) > 1) is survivor.torn
            if not survivor.torn:
                assert numbers == {survivor.expert}


@examples(8)
@given(
    st.sampled_from(
        [{"ep": 2, "edp": 2}, {"edp": 2, "ep": 3}, {"ep": 4, "edp": 1}, {"ep": 6, "edp": 3}]
    ),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0, 1]),
)
def test_what_is_said_to_have_survived_is_in_the_files(
    tmp_path_factory: pytest.TempPathFactory,
    axes: dict[str, int],
    layers: int,
    lowest: bool,
    alone: bool,
    fsdp_dim: int | None,
) -> None:
    if alone and fsdp_dim == 1:
        fsdp_dim = 0
    path = tmp_path_factory.mktemp("unaware")
    save(path, axes, layers, lowest=lowest, alone=alone, fsdp_dim=fsdp_dim)
    found = diagnose(path, axes=axes)
    assert not found.healthy
    assert {tensor.verdict for tensor in found.tensors.values()} == {OVERWRITTEN}
    assert {tensor.experts for tensor in found.tensors.values()} == {EXPERTS}
    assert_true(path, found)
    for loss in found.layers.values():
        assert sorted(loss.kept + loss.weights_only + loss.lost) == list(range(EXPERTS))
    if lowest:
        kept = tuple(range(EXPERTS // axes["ep"]))
        assert all(loss.kept == kept for loss in found.layers.values())


def test_a_stock_save_of_many_tensors_leaves_a_mixture(tmp_path: Path) -> None:
    axes = {"ep": 2, "edp": 2}
    save(tmp_path, axes, 3)
    kept = {tensor.kept for tensor in diagnose(tmp_path, axes=axes).tensors.values()}
    assert len(kept) > 1


def test_chunks_of_different_experts_make_a_torn_one(tmp_path: Path) -> None:
    # Chunk by chunk, columns of each expert: written by whoever has less to write.
    axes = {"edp": 4, "ep": 3}
    save(tmp_path, axes, 2, fsdp_dim=1)
    found = diagnose(tmp_path, axes=axes)
    assert any(survivor.torn for t in found.tensors.values() for survivor in t.survivors)
    assert_true(tmp_path, found)


def test_a_mesh_in_which_ranks_cannot_have_written_what_they_did(tmp_path: Path) -> None:
    save(tmp_path, {"ep": 2, "edp": 2}, 1, lowest=True)
    assert_true(tmp_path, diagnose(tmp_path, axes={"ep": 2, "edp": 2}))
    with pytest.raises(CannotLook, match=r"ranks 0 and 1 wrote different parts of it"):
        diagnose(tmp_path, axes={"edp": 2, "ep": 2})


def test_without_a_mesh_rows_and_ranks_are_told(tmp_path: Path) -> None:
    save(tmp_path, {"ep": 2, "edp": 2}, 1)
    found = diagnose(tmp_path)
    assert found.layers == {}
    tensor = found.tensors["model.layers.0.experts.w1"]
    assert (tensor.verdict, tensor.stored, tensor.experts) == (OVERWRITTEN, 6, EXPERTS)
    files = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    wrote = {
        index.offset[0]: int(info.relative_path.split("_")[2])
        for index, info in files.items()
        if index.fqn == tensor.fqn
    }
    assert [s.ranks for s in tensor.survivors] == [(wrote[row // 3 * 3],) for row in range(6)]
    assert all(survivor.expert is None for survivor in tensor.survivors)


def test_how_many_experts_there_are(tmp_path: Path) -> None:
    dcp.save({"layers.0.experts.w1": torch.ones(4, 3, 2)}, checkpoint_id=tmp_path)

    def verdict(**options: Any) -> tuple[str, str]:
        (tensor,) = diagnose(tmp_path, **options).tensors.values()
        return tensor.verdict, tensor.reason

    assert verdict() == (UNCLEAR, "how many experts the model has is not known")
    assert verdict(experts_per_layer=4) == (WHOLE, "")
    assert verdict(experts_per_layer=8) == (OVERWRITTEN, "")
    assert verdict(axes={"ep": 1}) == (WHOLE, "")
    assert verdict(axes={"ep": 3}) == (OVERWRITTEN, "")
    assert verdict(experts_per_layer=6)[0] == UNCLEAR
    expected = verdict(experts_per_layer=8, axes={"ep": 4})
    assert expected == (UNCLEAR, "8 experts in parts of 4 make 2 ep ranks, not 4")


def test_a_sound_save_is_healthy(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path)
    ran = run("doctor", tmp_path, "--experts-per-layer", 8)
    assert ran.code == 0
    assert "experts:   all there, in 2 tensors" in ran.out
    refused = run("doctor", tmp_path, "--experts-per-layer", 8, "--rescue", tmp_path / "out")
    assert refused.code == 1
    assert "so nothing is to be rescued" in refused.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("axis", ["ep", "expert_parallel"])
def test_a_save_by_rules_is_sound_whatever_the_mesh(tmp_path: Path, run: Run, axis: str) -> None:
    world = World(4)
    axes = {"ep": 2, "edp": 2}

    def planner(rank: int) -> PlacementSavePlanner:
        mesh = MeshCoordinate(
            (axis, "edp"), (2, 2), tuple(world.mesh(rank, **axes).get_coordinate())
        )
        rules = PlacementRules({"experts": CheckpointPlacement(mesh, {axis: Shard(0)})})
        return PlacementSavePlanner(rules, digests="sampled" if axis == "ep" else "full")

    world.save(tmp_path, lambda rank: state_dict(world.mesh(rank, **axes), 1), planner)
    for mesh in ("ep=4,edp=2", "ep=2,edp=2", "edp=1,ep=1", "dp=4"):
        ran = run("doctor", tmp_path, "--mesh", mesh)
        assert ran.code == 0
        assert "experts:   all there, in 9 tensors" in ran.out
        assert f"saved as:    Shard(0) over '{axis}' of size 2" in ran.out
        assert "mesh:      not used, the checkpoint records how" in ran.out
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
    assert "without gaps" in tensor.reason


def test_grouped_weights_are_numbered_too(tmp_path: Path) -> None:
    keys = [f"layers.0.experts.linear_fc1.weight{number}" for number in range(2)]
    dcp.save({key: torch.ones(64, 2) for key in keys}, checkpoint_id=tmp_path)
    found = diagnose(tmp_path, axes={"ep": 2})
    (tensor,) = found.tensors.values()
    assert tensor.fqn == "layers.0.experts.linear_fc1.weight{}"
    assert (tensor.verdict, tensor.stored, tensor.experts) == (OVERWRITTEN, 2, 4)


@pytest.mark.parametrize("alone", [False, True], ids=["stacked", "alone"])
@pytest.mark.parametrize("fsdp_dim", [None, 0])
def test_a_rescue_holds_what_is_sound_and_nothing_else(
    tmp_path: Path, alone: bool, fsdp_dim: int | None
) -> None:
    path, out, axes = tmp_path / "unaware", tmp_path / "rescued", {"ep": 3, "edp": 2}
    save(path, axes, 2, lowest=True, alone=alone, fsdp_dim=fsdp_dim)
    checkpoint = Checkpoint(path)
    found = rescue(checkpoint, diagnose(checkpoint, axes=axes), out)
    assert verify(out, contents=True).sound
    read, before = load(out), load(path)
    assert set(found.lost["layers.0.experts"]) == set(range(4, EXPERTS))
    kept = set()
    for key, tensor in read.items():
        parts = key.split(".")
        if "experts" in parts and parts[-1] != "step":
            number = int(parts[parts.index("experts") + 1])
            name = next(part for part in parts if part in WEIGHTS)
            state = parts[-1] if parts[-1] in STATE else ""
            assert torch.equal(tensor, whole(name, state)[number]), key
            kept.add(number)
        elif parts[-1] != "step":
            assert torch.equal(tensor, before[key])
    assert kept == set(range(4))
    assert len(found.experts) == 2 * 4 * (9 + 3 * alone)
    assert json.loads((out / "rescue.json").read_text())["left_out"] == list(found.left_out)
    nested: dict[str, Any] = dcp.FileSystemReader(out).read_metadata().planner_data
    assert nested["optim.state.layers.1.experts.3.w1.exp_avg"] == (
        *("optim", "state", "layers.1.experts.3.w1", "exp_avg"),
    )


def test_a_rescue_of_a_mixture_takes_no_expert_with_a_lost_weight(tmp_path: Path) -> None:
    path, axes = tmp_path / "unaware", {"ep": 2, "edp": 2}
    save(path, axes, 3)
    checkpoint = Checkpoint(path)
    diagnosis = diagnose(checkpoint, axes=axes)
    found = rescue(checkpoint, diagnosis, tmp_path / "rescued")
    read = load(tmp_path / "rescued")
    for layer, loss in diagnosis.layers.items():
        weights = {int(k.split(".")[4]) for k in read if k.startswith(f"model.{layer}.")}
        assert weights == {*loss.kept, *loss.weights_only}
    assert set(found.copied) <= {*read, *Checkpoint(tmp_path / "rescued").objects}


def test_a_rescue_never_overwrites_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    path, axes = tmp_path / "unaware", {"ep": 2, "edp": 2}
    save(path, axes, 1)
    checkpoint = Checkpoint(path)
    found = diagnose(checkpoint, axes=axes)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious").write_text("x")
    with pytest.raises(CannotLook, match="is there already"):
        rescue(checkpoint, found, tmp_path / "there")
    largest = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot be read"):
        rescue(checkpoint, found, tmp_path / "rescued")
    assert {file.name for file in tmp_path.iterdir()} == {"unaware", "there"}


def test_a_checkpoint_that_is_overwritten_while_it_is_rescued_is_refused(tmp_path: Path) -> None:
    path, axes = tmp_path / "unaware", {"ep": 2, "edp": 2}
    save(path, axes, 1)
    checkpoint = Checkpoint(path)
    found = diagnose(checkpoint, axes=axes)
    with pytest.raises(CannotLook, match="it was overwritten while it was read"):
        rescue(checkpoint, found, tmp_path / "out", progress=overwriting(path, "*.distcp"))
    assert not (tmp_path / "out").exists()


def test_commands(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "unaware"
    save(path, {"ep": 2, "edp": 2}, 1, lowest=True)
    ran = run("doctor", path, "--mesh", "ep=2,edp=2")
    assert ran.code == 1
    assert "layers.0.experts  0-5       -             6-11" in ran.out
    result = run("doctor", path, "--mesh", "ep=2,edp=2", "--json").json
    assert result["healthy"] is False
    assert result["layers"]["layers.0.experts"]["lost"] == list(range(6, 12))
    assert "way out:     --mesh" in run("doctor", path).out
    rescued = run("doctor", path, "--mesh", "ep=2,edp=2", "--rescue", tmp_path / "out", "--json")
    assert rescued.json["rescue"]["lost"] == {"layers.0.experts": list(range(6, 12))}
    for wrong in (
        ("--mesh", "dp=4"),
        ("--mesh", "ep=1"),
        ("--mesh", "ep=2,edp=2", "--rescue", path),
    ):
        ran = run("doctor", path, *wrong)
        assert (ran.code, ran.out) == (2, "")
