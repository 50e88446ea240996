"""Fused tensors on the ranks, one tensor per part in the checkpoint; files of the hub, loaded."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
)
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    Parts,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Split,
    Unstack,
)
from dcp_placements.presets import hub
from dcp_placements.testing import FakeDTensor, World, cut
from tests.preset_scenes import read_whole
from tests.strategies import arange, examples

GATE_UP = "layers.0.mlp.experts.gate_up_proj"
DOWN = "layers.0.mlp.experts.down_proj"


def parts_of(whole: torch.Tensor, split: Split, names: str, rows: bool) -> dict[str, torch.Tensor]:
    """Return the parts by plain slicing, group after group."""
    found = {}
    for number, row in enumerate(whole.unbind(0) if rows else [whole]):
        held: dict[str, list[torch.Tensor]] = {name: [] for name in split.names}
        unit = row.shape[split.dim] // sum(split.sizes) // split.groups
        pieces = row.split([size * unit for size in split.sizes * split.groups], split.dim)
        for name, piece in zip(split.names * split.groups, pieces, strict=True):
            held[name].append(piece)
        for name, each in held.items():
            at = names.replace("{}", str(number)).replace("fused", name)
            found[at] = torch.cat(each, split.dim).contiguous()
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw a fused tensor, how it is split, and how 4 ranks cut it."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    groups, dim = draw(st.integers(1, 2)), draw(st.integers(0, 1))
    rows = draw(st.booleans())
    shape = [draw(st.integers(1, 5)), draw(st.integers(1, 5))]
    shape[dim] = sum(sizes) * groups * draw(st.integers(1, 3))
    if rows:
        shape.insert(0, draw(st.sampled_from([2, 4])))
    split = Split(
        "fused", [f"part{n}" for n in range(len(sizes))], dim=dim, sizes=sizes, groups=groups
    )
    at = draw(st.integers(0, len(shape) - 1))
    tp: Any = Shard(at)
    if at == dim + rows and draw(st.booleans()):
        unit = shape[at] // sum(sizes) // groups
        tp = FusedShard(at, tuple(size * unit for size in sizes * groups))
    elif at == 0 and draw(st.booleans()):
        order = draw(st.permutations(range(shape[0])))
        tp = (tuple(order[: len(order) // 2]), tuple(order[len(order) // 2 :]))
    return tuple(shape), split, rows, tp, draw(st.integers(0, len(shape) - 1))


@examples(15)
@given(case=cases())
def test_parts_are_those_of_slicing_and_come_back(
    case: tuple[Any, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape, split, rows, tp, own_dim = case
    root = tmp_path_factory.mktemp("split")
    whole, world = arange(shape) + 1, World(4)
    rename = Renames(Unstack("a.{}.fused"), split) if rows else split
    wanted = parts_of(whole, split, "a.{}.fused" if rows else "a.fused", rows)

    def placement(rank: int) -> Any:
        return IndexShard(0, tp[rank // 2]) if isinstance(tp, tuple) else tp

    def local(rank: int) -> FakeDTensor:
        mesh = world.mesh(rank, tp=2, fsdp=2)
        mine = cut(whole, [placement(rank)], (2,), (rank // 2,))
        return FakeDTensor.distribute(mine, mesh["fsdp"], [Shard(own_dim)])

    def rules(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, tp=2, fsdp=2)
        by = CheckpointPlacement(mesh, {"tp": placement(rank)}, global_shape=shape)
        return PlacementRules({"a.fused": by})

    world.save(
        root / "saved",
        lambda rank: {"a.fused": local(rank)},
        lambda rank: PlacementSavePlanner(rules(rank), rename=rename),
    )
    found = read_whole(root / "saved")
    assert sorted(found) == sorted(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    dcp.save(dict(wanted), checkpoint_id=root / "stock", no_dist=True)

    def empty(rank: int) -> dict[str, Any]:
        made = local(rank)
        made.to_local().fill_(-1)
        return {"a.fused": made}

    loaded = world.load(
        root / "stock", empty, lambda rank: PlacementLoadPlanner(rules(rank), rename=rename)
    )
    for rank in range(4):
        assert torch.equal(loaded[rank]["a.fused"].to_local(), local(rank).to_local())


def model(experts: int = 4) -> dict[str, torch.Tensor]:
    """Return a module's whole tensors."""
    return {
        GATE_UP: arange((experts, 6, 4)) + 1,
        DOWN: arange((experts, 4, 3)) + 1000,
        "layers.0.mlp.gate.weight": arange((experts, 4)) + 2000,
        "norm.weight": arange((5,)) + 3000,
    }


def hub_files(path: Path, whole: dict[str, torch.Tensor]) -> None:
    """Write what the hub has for Mixtral: a matrix per expert, in two files."""
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    base = "layers.0.block_sparse_moe"
    for number in range(len(whole[GATE_UP])):
        gate, up = whole[GATE_UP][number].chunk(2)
        files[number % 2][f"{base}.experts.{number}.w1.weight"] = gate.contiguous()
        files[0][f"{base}.experts.{number}.w3.weight"] = up.contiguous()
        files[1][f"{base}.experts.{number}.w2.weight"] = whole[DOWN][number].contiguous()
    files[0][f"{base}.gate.weight"] = whole["layers.0.mlp.gate.weight"]
    files[1]["norm.weight"] = whole["norm.weight"]
    path.mkdir()
    for number, held in enumerate(files):
        save_file(held, path / f"model-{number + 1:05}-of-00002.safetensors")


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_files_of_the_hub_fill_stacked_and_fused_experts_with_what_is_needed(
    ep: int, dim: int, tmp_path: Path
) -> None:
    whole, world = model(), World(4)
    hub_files(tmp_path / "hub", whole)
    slices: dict[int, int] = {}

    def state_dict(rank: int, fill: float | None = None) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=ep, fsdp=4 // ep)
        made: dict[str, Any] = {}
        for name, tensor in whole.items():
            local = tensor
            if "experts" in name:
                local = cut(tensor, [Shard(0)], (ep,), mesh["ep"].get_coordinate())
            at = dim if "experts" in name else 0
            made[name] = FakeDTensor.distribute(local, mesh["fsdp"], [Shard(at)])
            if fill is not None:
                made[name].to_local().fill_(fill)
        return made

    def planner(rank: int) -> PlacementLoadPlanner:
        mesh = world.mesh(rank, ep=ep, fsdp=4 // ep)
        rules = {"mlp.experts": CheckpointPlacement(mesh, {"ep": Shard(0)})}
        return PlacementLoadPlanner(PlacementRules(rules), rename=hub.mixtral)

    read = HuggingFaceStorageReader._process_read_request

    def counted(self: Any, file: Any, item: Any, planner: Any) -> None:
        slices[id(planner)] = slices.get(id(planner), 0) + item.lengths.numel()
        read(self, file, item, planner)

    with mock.patch.object(HuggingFaceStorageReader, "_process_read_request", counted):
        loaded = world.load(
            tmp_path / "hub",
            lambda rank: state_dict(rank, -1),
            planner,
            lambda rank: HuggingFaceStorageReader(str(tmp_path / "hub")),
        )
    needed = []
    for rank in range(4):
        wanted = state_dict(rank)
        for name, tensor in wanted.items():
            assert torch.equal(loaded[rank][name].to_local(), tensor.to_local()), name
        needed.append(sum(tensor.to_local().numel() for tensor in wanted.values()))
    assert sorted(slices.values()) == sorted(needed), "other elements than the needed ones are read"


def test_optimizer_state_is_split_with_its_parameter(tmp_path: Path) -> None:
    whole, world = arange((4, 6, 2)), World(2)
    rename = Renames(Unstack("experts.{}.fused"), Split("fused", ("a", "b")))
    states = ("model.experts.fused", "optim.state.experts.fused.exp_avg")

    def state_dict(rank: int, fill: bool = False) -> dict[str, Any]:
        made: dict[str, Any] = {
            name: cut(whole + n, [Shard(0)], (2,), (rank,)) for n, name in enumerate(states)
        }
        made["optim.state.experts.fused.step"] = torch.tensor(7.0)
        made["optim.param_groups.experts.fused.lr"] = 0.5
        if fill:
            for name, value in made.items():
                made[name] = torch.full_like(value, -1) if name[-2:] != "lr" else 0.0
        return made

    def rules(rank: int) -> PlacementRules:
        by = CheckpointPlacement(world.mesh(rank, ep=2), {"ep": Shard(0)})
        return PlacementRules({"experts.fused": by})

    world.save(
        tmp_path / "c", state_dict, lambda rank: PlacementSavePlanner(rules(rank), rename=rename)
    )
    found = read_whole(tmp_path / "c")
    for number in range(4):
        for at, part in enumerate(("a", "b")):
            fqn = f"experts.{number}.{part}"
            rows = slice(3 * at, 3 * at + 3)
            assert torch.equal(found[f"model.{fqn}"], whole[number, rows])
            assert torch.equal(found[f"optim.state.{fqn}.exp_avg"], whole[number, rows] + 1)
            assert found[f"optim.state.{fqn}.step"] == 7
    loaded = world.load(
        tmp_path / "c",
        lambda rank: state_dict(rank, fill=True),
        lambda rank: PlacementLoadPlanner(rules(rank), rename=rename),
    )
    for rank in range(2):
        for name, value in state_dict(rank).items():
            assert torch.equal(torch.as_tensor(loaded[rank][name]), torch.as_tensor(value)), name


def test_what_cannot_be_split_is_told(tmp_path: Path) -> None:
    for names, more in (((), {}), (("a", "b"), {"sizes": (1,)}), (("a",), {"groups": 0})):
        with pytest.raises(PlacementError, match="need a name and a size from 1 on each"):
            Split("w", names, **more)  # type: ignore[arg-type]
    with pytest.raises(CheckpointException) as refused:
        World(1).save(
            tmp_path,
            lambda rank: {"w": torch.ones(5, 3), "v": torch.ones(4)},
            lambda rank: PlacementSavePlanner(
                rename=Renames(Split("w", ("a", "b")), Split("v", ("c",), dim=2))
            ),
        )
    message = str(refused.value.failures[0][0])
    assert "w: cannot be split: 5 on dim 0 cannot be cut into 1 x (1, 1)" in message
    assert "v: cannot be split: there is no dim 2, the shape is (4,)" in message
    with pytest.raises(CheckpointException) as refused:
        World(1).save(
            tmp_path,
            lambda rank: {"w": torch.ones(4), "a": torch.ones(2)},
            lambda rank: PlacementSavePlanner(rename=Split("w", ("a", "b"))),
        )
    assert "a: rename= gives this one name" in str(refused.value.failures[0][0])


def test_a_split_is_a_value() -> None:
    split = Split("a.qkv", ("a.q", "a.k"), dim=1, sizes=(4, 1), groups=2)
    again = pickle.loads(pickle.dumps(split))
    assert again("x.a.qkv.w") == split("x.a.qkv.w")
    assert again("x.a.qkv.w") == Parts(("x.a.q.w", "x.a.k.w"), "x.a.qkv.w", 1, (4, 1), 2)
    assert repr(again) == repr(split)
    assert Renames(Unstack("e.{}.w"), Split("w", "ab"))("e.w") == Parts(
        ("e.{}.a", "e.{}.b"), "e.w", 0, (1, 1), 1, 0
    )
    assert Renames(split).table(["a.qkv", "b"]) == "a.qkv -> a.q + a.k"


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("cut_parts", [False, True])
def test_parts_of_picked_rows_lie_where_their_ranks_hold_them(
    groups: int, cut_parts: bool, tmp_path: Path
) -> None:
    """An expert map over one dim; the fused dim in pieces that no plain shard makes, or in runs."""
    rows, fused = ((0,), (4, 2, 1, 3)), FusedShard(1, 2) if cut_parts else Replicate()
    whole, world = arange((5, 4)), World(6)
    split = Split("a.fused", ["a.q", "a.k"], dim=1, groups=groups)

    def local(rank: int) -> torch.Tensor:
        placements = [IndexShard(0, rows[rank // 3]), fused]
        return cut(whole, placements, (2, 3), divmod(rank, 3))

    def rules(rank: int) -> PlacementRules:
        mesh, picks = world.mesh(rank, ep=2, tp=3), IndexShard(0, rows[rank // 3])
        by = CheckpointPlacement(mesh, {"ep": picks, "tp": fused}, global_shape=(5, 4))
        return PlacementRules({"a.fused": by})

    world.save(
        tmp_path,
        lambda rank: {"a.fused": local(rank)},
        lambda rank: PlacementSavePlanner(rules(rank), rename=split),
    )
    found = read_whole(tmp_path)
    wanted = {"q": whole[:, ::2], "k": whole[:, 1::2]}
    if groups == 1:
        wanted = {"q": whole[:, :2], "k": whole[:, 2:]}
    for name, part in wanted.items():
        assert torch.equal(found[f"a.{name}"], part)
