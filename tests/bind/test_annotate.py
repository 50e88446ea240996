"""``annotate``: what the attributes say is plain slicing, and torch's own planners save by it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import read_whole
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    PlacementError,
    Stack,
    annotate,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut

STOCK = hasattr(dcp, "CheckpointableTensor")
NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
WHOLE = torch.arange(9 * 5).reshape(9, 5).float()
AXES = {"ep": 2, "tp": 2}

CASES = {
    "one axis": [Shard(0), Replicate()],
    "uneven on both": [Shard(0), Shard(1)],
    "one dim twice": [Shard(0), Shard(0)],
    "replicas": [Replicate(), Shard(1)],
    "fused": [FusedShard(0, (5, 4)), Replicate()],
}


@pytest.fixture
def any_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an older torch annotate, for those who look at the attributes themselves."""
    monkeypatch.setattr(
        import_module("dcp_placements.bind.annotate"), "HAS_CHECKPOINTABLE_TENSOR", True
    )


def local(rank: int, placements: list[Any]) -> tuple[torch.Tensor, FakeMesh]:
    mesh = World(4).mesh(rank, **AXES)
    return cut(WHOLE, placements, mesh.shape, mesh.get_coordinate()), mesh


def declared(rank: int, placements: list[Any]) -> dict[str, Any]:
    tensor, mesh = local(rank, placements)
    rule = CheckpointPlacement(mesh, placements, global_shape=tuple(WHOLE.shape))
    return annotate({"model": {"w": tensor}, "step": 3}, {"w": rule})


@pytest.mark.usefixtures("any_torch")
@pytest.mark.parametrize("placements", CASES.values(), ids=CASES)
def test_attributes_say_which_elements_a_rank_has(placements: list[Any]) -> None:
    for rank in range(4):
        tensor = declared(rank, placements)["model"]["w"]
        assert tensor.global_shape == (9, 5)
        covered = torch.zeros(tensor.shape, dtype=torch.bool)
        for offsets, begin, sizes in zip(
            tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True
        ):
            here = tuple(slice(o, o + s) for o, s in zip(begin, sizes, strict=True))
            there = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            assert torch.equal(tensor[here], WHOLE[there])
            covered[here] = True
        assert covered.all()


@pytest.mark.usefixtures("any_torch")
def test_nothing_is_copied_and_nothing_of_the_users_is_changed() -> None:
    tensor, mesh = local(1, [Shard(0), Replicate()])
    rule = CheckpointPlacement(mesh, [Shard(0), Replicate()], global_shape=(9, 5))
    state = {"model": {"w": tensor, "b": torch.ones(2)}, "step": [1, 2]}
    annotated = annotate(state, {"w": rule})
    assert annotated["model"]["w"].data_ptr() == tensor.data_ptr()
    assert not any(hasattr(tensor, name) for name in NAMES)
    assert annotated["model"]["b"] is state["model"]["b"]
    assert annotated["step"] == [1, 2]
    assert state["model"]["w"] is tensor


@pytest.mark.usefixtures("any_torch")
def test_states_follow_and_keys_are_renamed() -> None:
    tensor, mesh = local(3, [Shard(0), Replicate()])
    rule = CheckpointPlacement(mesh, [Shard(0), Replicate()], global_shape=(9, 5))
    state = {
        "model": {"w": tensor},
        "optim": {"state": {"w": {"exp_avg": tensor + 1, "step": torch.tensor(2.0)}}},
    }
    annotated = annotate(state, {"whole": rule}, rename=lambda key: key.replace(".w", ".whole"))
    weight, moment = annotated["model"]["whole"], annotated["optim"]["state"]["whole"]["exp_avg"]
    assert weight.global_offsets == moment.global_offsets == ((5, 0),)
    assert not hasattr(annotated["optim"]["state"]["whole"]["step"], "global_shape")


@pytest.mark.usefixtures("any_torch")
def test_what_stock_planners_cannot_do_is_refused() -> None:
    state = {f"experts.{n}.w": torch.ones(2) for n in range(2)}
    with pytest.raises(PlacementError, match=r"experts\.w[\s\S]*stock planners cannot"):
        annotate(state, {}, rename=Stack("experts.{}.w", total=2))
    tensor, mesh = local(0, [Shard(0), Replicate()])
    wrong = CheckpointPlacement(mesh, [Shard(1), Replicate()], global_shape=(9, 5))
    with pytest.raises(PlacementError, match=r"w: holds a \(5, 5\) tensor"):
        annotate({"w": tensor}, {"w": wrong})


@pytest.mark.usefixtures("any_torch")
def test_rows_that_a_rank_holds_twice_are_refused() -> None:
    mesh = World(4).mesh(0, **AXES)
    rule = CheckpointPlacement(mesh, [IndexShard(0, (1, 0, 1)), Replicate()], global_shape=(9, 5))
    with pytest.raises(PlacementError, match="w: this rank holds some of its rows several times"):
        annotate({"w": torch.zeros(3, 5)}, {"w": rule})


@pytest.mark.usefixtures("any_torch")
def test_a_model_in_place_of_its_tensors_is_refused() -> None:
    mesh = World(4).mesh(0, **AXES)
    rule = CheckpointPlacement(mesh, [Shard(0), Replicate()])
    model = torch.nn.Linear(2, 4)
    with pytest.raises(PlacementError, match=r"model: is a Linear[\s\S]*value\.state_dict\(\)"):
        annotate({"model": model}, {"weight": rule})
    annotated = annotate({"model": model.state_dict()}, {"weight": rule})
    assert annotated["model"]["weight"].global_shape == (8, 2)


@pytest.mark.skipif(STOCK, reason="needs a torch before 2.14")
def test_an_older_torch_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"needs torch 2\.14[\s\S]*installed\("):
        annotate({}, {})


@pytest.mark.skipif(not STOCK, reason="needs torch 2.14")
@pytest.mark.parametrize("placements", CASES.values(), ids=CASES)
def test_stock_planners_save_and_load_by_it(tmp_path: Path, placements: list[Any]) -> None:
    world = World(4)
    world.save(
        tmp_path, lambda rank: declared(rank, placements), lambda rank: dcp.DefaultSavePlanner()
    )
    assert torch.equal(read_whole(tmp_path)["model.w"], WHOLE)

    other = [Shard(1), Shard(0)]
    targets = [torch.zeros_like(local(rank, other)[0]) for rank in range(4)]

    def target(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, **AXES)
        rule = CheckpointPlacement(mesh, other, global_shape=(9, 5))
        return annotate({"model": {"w": targets[rank]}, "step": 0}, {"w": rule})

    loaded = world.load(tmp_path, target, lambda rank: dcp.DefaultLoadPlanner())
    for rank in range(4):
        assert torch.equal(targets[rank], local(rank, other)[0])
        assert loaded[rank]["step"] == 3


@pytest.mark.skipif(not STOCK, reason="needs torch 2.14")
def test_stock_planners_save_listed_rows_and_dtensors(tmp_path: Path) -> None:
    rows = [(0, 2, 4, 6, 8), (1, 3, 5, 7)]

    def state(rank: int) -> dict[str, Any]:
        mesh = World(4).mesh(rank, ep=2, fsdp=2)
        ep, fsdp = mesh.get_coordinate()
        held = WHOLE[list(rows[ep])]
        part = FakeDTensor.distribute(held, FakeMesh((2,), ("fsdp",), rank=fsdp), [Shard(1)])
        rule = CheckpointPlacement(
            mesh, [IndexShard(0, rows[ep]), Replicate()], global_shape=(9, 5)
        )
        return annotate({"model": {"w": part}}, {"w": rule})

    World(4).save(tmp_path, state, lambda rank: dcp.DefaultSavePlanner())
    assert torch.equal(read_whole(tmp_path)["model.w"], WHOLE)
