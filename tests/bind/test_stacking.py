"""Experts by name on the ranks, stacked in the checkpoint, and the other way round."""

from __future__ import annotations

import pickle
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import digest_budget
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    PlacementError,
    PlacementFileSystemReader,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Replace,
    Row,
    Rows,
    Stack,
    Unstack,
)
from dcp_placements.testing import FakeDTensor, World, cut, real_dtensor

ROWS, COLUMNS = 5, 4
STATE = ("model.{}", "optim.state.{}.exp_avg")


def truth(experts: int) -> dict[str, torch.Tensor]:
    """Return the whole stacked tensors ``(experts, 5, 4)``, by where they stand."""
    whole = torch.arange(float(experts * ROWS * COLUMNS)).reshape(experts, ROWS, COLUMNS)
    return {STATE[0]: whole + 1, STATE[1]: -whole - 1}


@dataclass(frozen=True)
class Topology:
    """How some ranks hold the experts.

    Attributes:
        experts: How many there are.
        maps: Which of them each ``ep`` position has, in order.
        fsdp: Ranks along that axis, and the dim of the local tensor that they cut.
        etp: Ranks along that axis, and the dim of one expert that they cut.
        split: Whether each expert is a tensor of its own on the ranks.
        redundant: Whether the rule of a split topology names ``ep``, too.
    """

    experts: int
    maps: tuple[tuple[int, ...], ...]
    fsdp: tuple[int, int] = (1, 0)
    etp: tuple[int, int] = (1, 0)
    split: bool = True
    redundant: bool = True

    @property
    def world(self) -> World:
        """The ranks."""
        return World(len(self.maps) * self.fsdp[0] * self.etp[0])

    def mesh(self, rank: int) -> Any:
        """Return the mesh of all ranks."""
        return self.world.mesh(rank, ep=len(self.maps), fsdp=self.fsdp[0], etp=self.etp[0])

    def state_dict(self, rank: int, *, filled: bool = True, step: float = 3.0) -> dict[str, Any]:
        """Return what a rank holds, cut by plain slicing."""
        mesh = self.mesh(rank)
        ep, _, etp = mesh.get_coordinate()
        held: dict[str, Any] = {}
        for where, whole in truth(self.experts).items():
            mine = cut(whole, [IndexShard(0, self.maps[ep])], (1,), (0,))
            mine = cut(mine, [Shard(1 + self.etp[1])], (self.etp[0],), (etp,))
            names = [f".{i}" for i in range(len(mine))] if self.split else [""]
            for name, part in zip(names, mine if self.split else [mine], strict=True):
                fqn = f"layers.0.experts{name}.w1"
                tensor: Any = FakeDTensor.distribute(part, mesh["fsdp"], [Shard(self.fsdp[1])])
                held[where.format(fqn)] = tensor
                held[f"optim.state.{fqn}.step"] = torch.tensor(step)
                held[f"optim.param_groups.{fqn}.lr"] = 0.5
        held["model.norm"] = torch.ones(3)
        if not filled:
            for fqn, value in held.items():
                if isinstance(value, FakeDTensor):
                    value.to_local().fill_(-99)
                elif isinstance(value, torch.Tensor):
                    value.fill_(-99)
                else:
                    held[fqn] = 0.0
        return held

    def options(self, rank: int, *, stacked: bool) -> dict[str, Any]:
        """Return rules and rename for a checkpoint whose experts are stacked, or not."""
        mesh, etp = self.mesh(rank), self.etp[1]
        ep = self.maps[mesh.get_coordinate()[0]]
        shape = (self.experts, ROWS, COLUMNS)
        rename: Any = None
        if self.split:
            rename = Renumber("experts.{}", ep, total=self.experts)
            if stacked:
                rename = Renames(rename, Stack("experts.{}", total=self.experts))
        elif not stacked:
            rename = Unstack("experts.{}")
        if self.split and not stacked:
            by = CheckpointPlacement(mesh, {"etp": Shard(etp)}, global_shape=shape[1:])
            return {"rules": PlacementRules({"experts.*.w1": by}), "rename": rename}
        placements: dict[str, Any] = {"etp": Shard(1 + etp)}
        if not self.split:
            placements["ep"] = IndexShard(0, ep)
        elif self.redundant:
            placements["ep"] = Shard(0)
        by = CheckpointPlacement(mesh, placements, global_shape=shape)
        return {"rules": PlacementRules({"experts.w1": by}), "rename": rename}


def assert_holds(path: Path, experts: int, *, stacked: bool, steps: Any) -> None:
    """Compare a checkpoint, as torch's own planner reads it, with the whole."""
    wanted: dict[str, Any] = {"model.norm": torch.ones(3)}
    names = [""] if stacked else [f".{i}" for i in range(experts)]
    for where, whole in truth(experts).items():
        for name, part in zip(names, [whole] if stacked else whole, strict=True):
            wanted[where.format(f"layers.0.experts{name}.w1")] = part
    for name in names:
        wanted[f"optim.state.layers.0.experts{name}.w1.step"] = steps
        wanted[f"optim.param_groups.layers.0.experts{name}.w1.lr"] = 0.5
    read = {
        key: torch.full_like(value, -7) if isinstance(value, torch.Tensor) else None
        for key, value in wanted.items()
    }
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert set(stored) == set(wanted)
    dcp.load(read, checkpoint_id=path, planner=DefaultLoadPlanner(), no_dist=True)
    assert_equal(read, wanted)


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        one, other = (
            v.to_local() if isinstance(v, FakeDTensor) else v for v in (found[key], value)
        )
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other), key
        else:
            assert one == other, key


def save(path: Path, by: Topology, *, stacked: bool, **options: Any) -> list[Any]:
    return by.world.save(
        path,
        by.state_dict,
        lambda rank: PlacementSavePlanner(**by.options(rank, stacked=stacked), **options),
    )


def load(path: Path, into: Topology, *, stacked: bool, **options: Any) -> None:
    """Load, and compare with what a rank of that topology ought to hold."""
    before = {rank: into.state_dict(rank, filled=False) for rank in range(into.world.size)}
    storage = {
        (rank, key): value.to_local().data_ptr()
        for rank, held in before.items()
        for key, value in held.items()
        if isinstance(value, FakeDTensor)
    }
    into.world.load(
        path,
        lambda rank: before[rank],
        lambda rank: PlacementLoadPlanner(**into.options(rank, stacked=stacked), **options),
    )
    for rank, held in before.items():
        assert_equal(held, into.state_dict(rank))
    for (rank, key), pointer in storage.items():
        assert before[rank][key].to_local().data_ptr() == pointer


def drawn_map(data: st.DataObject, experts: int, name: str) -> tuple[tuple[int, ...], ...]:
    ranks = data.draw(st.integers(1, 3), f"ep ranks that {name}")
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert in data.draw(st.permutations(range(experts)), f"order of those that {name}"):
        holders = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=2))
        for rank in sorted(holders):
            held[rank].append(expert)
    return tuple(map(tuple, held))


def drawn(data: st.DataObject, experts: int, name: str) -> Topology:
    split = data.draw(st.booleans(), f"those that {name} have experts by name")
    return Topology(
        experts,
        drawn_map(data, experts, name),
        fsdp=data.draw(st.tuples(st.integers(1, 2), st.integers(0, 1 if split else 2))),
        etp=data.draw(st.tuples(st.integers(1, 2), st.integers(0, 1))),
        split=split,
        redundant=data.draw(st.booleans()),
    )


@examples(15)
@given(st.data())
def test_whatever_form_ranks_and_checkpoint_have_the_bytes_are_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    experts = data.draw(st.integers(1, 5), "experts")
    stacked = data.draw(st.booleans(), "stacked in the checkpoint")
    saving, loading = drawn(data, experts, "save"), drawn(data, experts, "load")
    path = tmp_path_factory.mktemp("form")
    planners = save(path, saving, stacked=stacked)
    steps = torch.full((experts,), 3.0) if stacked and saving.split else torch.tensor(3.0)
    assert_holds(path, experts, stacked=stacked, steps=steps)
    report = planners[0].report
    for key, expected in report.keys.items():
        assert expected.unique_nbytes == expected.whole_nbytes, key
    assert report.warnings == ()
    load(path, loading, stacked=stacked)


UNEVEN = ((7, 0, 3), (1, 2, 4, 5, 6))
SPLIT = Topology(8, UNEVEN, fsdp=(2, 1), etp=(2, 0))
WHOLE = Topology(8, ((0, 1, 2, 3), (4, 5, 6, 7)), fsdp=(2, 0), split=False)


@pytest.mark.filterwarnings("ignore:look at this load .1 note.\\nverify='digests'")
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("saving", [SPLIT, WHOLE], ids=["split", "whole"])
def test_digests_are_stored_and_verified_in_either_form(
    tmp_path: Path, saving: Topology, stacked: bool
) -> None:
    save(tmp_path, saving, stacked=stacked, digests="full")
    for into in (SPLIT, WHOLE):
        load(tmp_path, into, stacked=stacked, verify="digests")
    planner = PlacementLoadPlanner(**saving.options(0, stacked=stacked), verify="digests")
    saving.world.load(
        tmp_path,
        lambda rank: saving.state_dict(rank, filled=False),
        lambda rank: (
            planner
            if rank == 0
            else PlacementLoadPlanner(**saving.options(rank, stacked=stacked), verify="digests")
        ),
    )
    assert planner.report.verified
    assert not planner.report.unverified


def adam(experts: Sequence[int], *, sign: int = 1, steps: Sequence[int] = ()) -> dict[str, Any]:
    """Return local experts of two numbers each; ``steps`` of those that have optimizer state."""
    held: dict[str, Any] = {}
    for local, expert in enumerate(experts):
        held[f"experts.{local}.w1"] = torch.full((2,), sign * (expert + 1.0))
        if local < len(steps):
            held[f"optim.state.experts.{local}.w1.exp_avg"] = torch.full((2,), sign * expert + 0.5)
            held[f"optim.state.experts.{local}.w1.step"] = torch.tensor(float(steps[local]))
    return held


def stack(ids: Sequence[int], total: int, **options: Any) -> Renames:
    return Renames(Renumber("experts.{}", ids, total), Stack("experts.{}", total, **options))


def refusal(run: Any) -> str:
    with pytest.raises(CheckpointException) as refused:
        run()
    error = next(iter(refused.value.failures.values()))[0]
    assert isinstance(error, PlacementError), refused.value
    return str(error)


def save_alone(path: Path, state_dict: dict[str, Any], rename: Any, **options: Any) -> Any:
    planner = PlacementSavePlanner(rename=rename, **options)
    dcp.save(state_dict, checkpoint_id=path, planner=planner, no_dist=True)
    return planner


def load_alone(path: Path, state_dict: dict[str, Any], rename: Any, **options: Any) -> Any:
    planner = PlacementLoadPlanner(rename=rename, **options)
    dcp.load(state_dict, checkpoint_id=path, planner=planner, no_dist=True)
    return planner


def read_plainly(path: Path) -> dict[str, Any]:
    """Return all tensors of a checkpoint as torch's own planner reads them."""
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    read = {
        key: torch.empty(tuple(kept.size), dtype=kept.properties.dtype)  # type: ignore[union-attr]
        for key, kept in stored.items()
        if hasattr(kept, "size")
    }
    dcp.load(read, checkpoint_id=path, planner=DefaultLoadPlanner(), no_dist=True)
    return read


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_rows_lie_along_any_dim_in_either_direction(tmp_path: Path, dim: int) -> None:
    parts = [torch.arange(6.0).reshape(2, 3) + 10 * i for i in range(4)]
    by_name: dict[str, Any] = {f"experts.{i}.w": part for i, part in enumerate(parts)}
    save_alone(tmp_path / "stacked", by_name, Stack("experts.{}", 4, dim=dim))
    whole = torch.stack(parts, dim)
    assert torch.equal(read_plainly(tmp_path / "stacked")["experts.w"], whole)

    save_alone(tmp_path / "named", {"experts.w": whole}, Unstack("experts.{}", dim=dim))
    read = read_plainly(tmp_path / "named")
    assert sorted(read) == sorted(by_name)
    for key, part in by_name.items():
        assert torch.equal(read[key], part)

    for at, rename, wanted in (
        ("stacked", Stack("experts.{}", 4, dim=dim), by_name),
        ("named", Unstack("experts.{}", dim=dim), {"experts.w": whole}),
    ):
        held = {key: torch.zeros_like(value) for key, value in wanted.items()}
        load_alone(tmp_path / at, held, rename)
        assert_equal(held, wanted)


def test_numbers_inside_a_component_are_stacked_and_unstacked(tmp_path: Path) -> None:
    """Grouped experts as Megatron names them: weight0, weight1, ..."""
    world = World(2)

    def held(rank: int, sign: int) -> dict[str, Any]:
        return {
            f"decoder.layers.3.mlp.experts.linear_fc1.weight{i}": torch.full(
                (2, 3), sign * (2.0 * rank + i + 1)
            )
            for i in range(2)
        }

    def rename(rank: int) -> Renames:
        pattern = "experts.linear_fc*.weight{}"
        numbered = Renumber(pattern, range(2 * rank, 2 * rank + 2), total=4)
        return Renames(numbered, Stack(pattern, 4), Replace("linear_fc1.weight", "gate_up_proj"))

    world.save(
        tmp_path, lambda rank: held(rank, 1), lambda rank: PlacementSavePlanner(rename=rename(rank))
    )
    key = "decoder.layers.3.mlp.experts.gate_up_proj"
    read = read_plainly(tmp_path)
    assert list(read) == [key]
    assert torch.equal(read[key], torch.stack([torch.full((2, 3), i + 1.0) for i in range(4)]))
    loaded = world.load(
        tmp_path,
        lambda rank: held(rank, -1),
        lambda rank: PlacementLoadPlanner(rename=rename(rank)),
    )
    for rank in range(2):
        assert_equal(loaded[rank], held(rank, 1))
    unstack = Renames(
        Unstack("experts.gate_up_proj{}"), Replace("experts.gate_up_proj*", "experts.fc1.weight")
    )
    assert unstack(key) == Rows(
        "decoder.layers.3.mlp.experts.fc1.weight", "decoder.layers.3.mlp.experts.fc1.weight", 0
    )
    assert Unstack("experts.fc1.weight{}")("experts.fc1.weight").fqn == "experts.fc1.weight{}"  # type: ignore[union-attr]


def test_steps_of_their_own_are_kept_row_by_row(tmp_path: Path) -> None:
    world = World(2)
    ids = [[2, 0], [1]]
    world.save(
        tmp_path,
        lambda rank: adam(ids[rank], steps=[5 + 10 * rank, 6]),
        lambda rank: PlacementSavePlanner(rename=stack(ids[rank], 3)),
    )
    read = read_plainly(tmp_path)
    assert torch.equal(read["optim.state.experts.w1.step"], torch.tensor([6.0, 15.0, 5.0]))
    assert torch.equal(
        read["optim.state.experts.w1.exp_avg"], torch.tensor([[0.5] * 2, [1.5] * 2, [2.5] * 2])
    )
    held = adam([1, 2], sign=-1, steps=[0, 0])
    load_alone(tmp_path, held, stack([1, 2], 3))
    assert_equal(held, adam([1, 2], steps=[15, 5]))

    whole = {"optim.state.experts.w1.step": torch.tensor(0.0)}
    message = refusal(lambda: load_alone(tmp_path, whole, None))
    assert "optim.state.experts.w1.step: rank 0 has one value for all rows" in message
    assert re.search(r"the checkpoint has (5|6|15)\.0 and (5|6|15)\.0", message)


def test_one_step_for_all_rows_is_read_from_rows_that_agree(tmp_path: Path) -> None:
    save_alone(tmp_path, adam([0, 1, 2], steps=[4, 4, 4]), stack([0, 1, 2], 3))
    whole = {
        "experts.w1": torch.zeros(3, 2),
        "optim.state.experts.w1.exp_avg": torch.zeros(3, 2),
        "optim.state.experts.w1.step": torch.tensor(0.0),
    }
    planner = load_alone(tmp_path, whole, None)
    assert whole["optim.state.experts.w1.step"] == 4
    assert torch.equal(whole["experts.w1"], torch.tensor([[1.0] * 2, [2.0] * 2, [3.0] * 2]))
    assert planner.report.missing == ()


def test_rows_by_name_that_do_not_agree_are_no_one_step(tmp_path: Path) -> None:
    save_alone(tmp_path, adam([0, 1, 2], steps=[4, 4, 7]), None)
    whole = {
        "experts.w1": torch.zeros(3, 2),
        "optim.state.experts.w1.exp_avg": torch.zeros(3, 2),
        "optim.state.experts.w1.step": torch.tensor(0.0),
    }
    message = refusal(lambda: load_alone(tmp_path, whole, Unstack("experts.{}")))
    assert "4.0 for optim.state.experts.0.w1.step and 7.0 for optim.state.experts.2.w1" in message


def test_rows_of_which_some_were_never_stepped_are_no_one_step(tmp_path: Path) -> None:
    save_alone(tmp_path, adam([0, 1, 2], steps=[4, 4]), None)
    whole = {
        "experts.w1": torch.zeros(3, 2),
        "optim.state.experts.w1.exp_avg": torch.zeros(3, 2),
        "optim.state.experts.w1.step": torch.tensor(0.0),
    }
    message = refusal(lambda: load_alone(tmp_path, whole, Unstack("experts.{}")))
    assert "optim.state.experts.w1.step: the checkpoint has optimizer state of 2 rows" in message
    assert "none of 1" in message
    assert "never stepped" in message


def test_a_stack_with_a_row_that_nobody_holds_is_refused(tmp_path: Path) -> None:
    message = refusal(
        lambda: save_alone(tmp_path, adam([0, 1, 2], steps=[4, 4]), stack([0, 1, 2], 3))
    )
    assert "optim.state.experts.w1.exp_avg" in message
    assert "nobody holds all of the (3, 2) tensor" in message
    assert "a Stack has local numbers, without a Renumber before it" in message
    assert "missing:     [2:3, :] (2 of 6 elements)" in message
    assert "never stepped" in message
    assert "key if '.state.' in key else stack(key)" in message
    assert not list(tmp_path.glob("*metadata*"))


def test_state_a_tensor_per_row_beside_stacked_parameters_may_lack(tmp_path: Path) -> None:
    """The way out of a stack with rows that were never stepped, as the refusal tells it."""
    stacked = Stack("experts.{}", 3)

    def rename(key: str) -> str | Row | Rows:
        return key if ".state." in key else stacked(key)

    saved = adam([0, 1, 2], steps=[4, 4])
    save_alone(tmp_path, saved, rename)
    read = read_plainly(tmp_path)
    assert torch.equal(
        read["experts.w1"], torch.stack([saved[f"experts.{i}.w1"] for i in range(3)])
    )
    assert "optim.state.experts.2.w1.exp_avg" not in read
    held = adam([0, 1, 2], sign=-1, steps=[9, 9, 9])
    kept = held["optim.state.experts.2.w1.exp_avg"].clone()
    load_alone(tmp_path, held, rename)
    assert torch.equal(held["optim.state.experts.2.w1.exp_avg"], kept)
    assert held["optim.state.experts.2.w1.step"] == 0
    assert all(torch.equal(held[key], value) for key, value in saved.items())


def test_objects_of_a_stack_must_be_equal(tmp_path: Path) -> None:
    def held(second: float) -> dict[str, Any]:
        groups = {f"optim.param_groups.experts.{i}.w1.lr": lr for i, lr in enumerate((0.1, second))}
        return {**adam([0, 1]), **groups}

    message = refusal(lambda: save_alone(tmp_path, held(0.2), stack([0, 1], 2)))
    assert "optim.param_groups.experts.w1.lr: one object cannot be stored for all rows" in message
    assert "experts.0.w1.lr is 0.1" in message
    assert "experts.1.w1.lr is 0.2" in message
    save_alone(tmp_path, held(0.1), stack([0, 1], 2))
    loaded = held(0.7)
    load_alone(tmp_path, loaded, stack([0, 1], 2))
    assert loaded["optim.param_groups.experts.0.w1.lr"] == 0.1
    assert loaded["optim.param_groups.experts.1.w1.lr"] == 0.1


def test_nested_state_dicts_keep_their_form(tmp_path: Path) -> None:
    def nested(sign: int) -> dict[str, Any]:
        return {
            "model": {f"experts.{i}.w1": torch.full((2,), sign * (i + 1.0)) for i in range(3)},
            "optim": {
                "state": {
                    f"experts.{i}.w1": {"exp_avg": torch.full((2,), sign * (i + 0.5))}
                    for i in range(3)
                },
                "param_groups": {f"experts.{i}.w1": {"betas": (0.9, sign)} for i in range(3)},
            },
        }

    save_alone(tmp_path, nested(1), Stack("experts.{}", 3))
    whole: dict[str, Any] = {
        "model": {"experts.w1": torch.zeros(3, 2)},
        "optim": {
            "state": {"experts.w1": {"exp_avg": torch.zeros(3, 2)}},
            "param_groups": {"experts.w1": {"betas": None}},
        },
    }
    dcp.load(whole, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(), no_dist=True)
    assert whole["optim"]["param_groups"]["experts.w1"]["betas"] == (0.9, 1)
    assert whole["model"]["experts.w1"][:, 0].tolist() == [1, 2, 3]
    held = nested(-1)
    load_alone(tmp_path, held, Stack("experts.{}", 3))
    for i in range(3):
        key = f"experts.{i}.w1"
        assert torch.equal(held["model"][key], torch.full((2,), i + 1.0))
        assert torch.equal(held["optim"]["state"][key]["exp_avg"], torch.full((2,), i + 0.5))
        assert held["optim"]["param_groups"][key]["betas"] == (0.9, 1)


def test_torch_s_own_dtensors_are_stacked_and_unstacked(tmp_path: Path) -> None:
    world = World(4)
    whole = torch.arange(4 * 5 * 3.0).reshape(4, 5, 3)

    def held(rank: int, *, split: bool, filled: bool) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        ep, fsdp = mesh.get_coordinate() or ()
        mine = whole[2 * ep : 2 * ep + 2]
        parts = {f"experts.{i}.w": mine[i] for i in range(2)} if split else {"experts.w": mine}
        made = {}
        for key, part in parts.items():
            local = cut(part, [Shard(0)], (2,), (fsdp,))
            local = local if filled else torch.full_like(local, -1)
            made[key] = real_dtensor(local, mesh["fsdp"], [Shard(0)], part.shape)
        return made

    def options(rank: int, *, split: bool) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        rules = PlacementRules({"experts.w": CheckpointPlacement(mesh, {"ep": Shard(0)})})
        ids = range(2 * (rank // 2), 2 * (rank // 2) + 2)
        return {"rules": rules, "rename": stack(ids, 4) if split else None}

    for split in (True, False):
        path = tmp_path / str(split)
        world.save(
            path,
            lambda rank, split=split: held(rank, split=split, filled=True),
            lambda rank, split=split: PlacementSavePlanner(**options(rank, split=split)),
        )
        assert torch.equal(read_plainly(path)["experts.w"], whole)
        for into in (True, False):
            loaded = world.load(
                path,
                lambda rank, into=into: held(rank, split=into, filled=False),
                lambda rank, into=into: PlacementLoadPlanner(**options(rank, split=into)),
            )
            for rank in range(4):
                for key, value in held(rank, split=into, filled=True).items():
                    assert torch.equal(loaded[rank][key].to_local(), value.to_local())


def test_a_row_that_a_rank_holds_twice_is_written_once_and_read_twice(tmp_path: Path) -> None:
    world = World(2)
    ids = [[1, 0, 1], [2, 1]]
    planners = world.save(
        tmp_path,
        lambda rank: adam(ids[rank], steps=[3] * 3),
        lambda rank: PlacementSavePlanner(rename=stack(ids[rank], 3)),
    )
    report = planners[0].report  # type: ignore[attr-defined]
    assert report.keys["experts.w1"].unique_nbytes == 24
    loaded = world.load(
        tmp_path,
        lambda rank: adam(ids[rank], sign=-1, steps=[0] * 3),
        lambda rank: PlacementLoadPlanner(rename=stack(ids[rank], 3)),
    )
    for rank in range(2):
        assert_equal(loaded[rank], adam(ids[rank], steps=[3] * 3))


def test_replicas_of_a_row_that_differ_are_refused(tmp_path: Path) -> None:
    message = refusal(
        lambda: World(2).check(
            lambda rank: {"experts.0.w": torch.full((2,), 1.0 + rank)},
            lambda rank: PlacementSavePlanner(rename=Stack("experts.{}", 1)),
        )
    )
    assert "experts.w: 2 different contents on 2 ranks" in message


@pytest.mark.parametrize(
    ("held", "rename", "expected"),
    [
        (
            {"experts.0.w": torch.zeros(2), "experts.1.w": torch.zeros(3)},
            Stack("experts.{}", 2),
            "cannot stack rows of different dtypes, shapes or placements",
        ),
        (
            {"experts.0.w": torch.zeros(2), "experts.1.w": 3},
            Stack("experts.{}", 2),
            "cannot stack what is no tensor",
        ),
        (
            {"experts.0.w": torch.zeros(2), "experts.w": torch.zeros(2)},
            Stack("experts.{}", 1),
            "gives this one name to both",
        ),
        ({"experts.2.w": torch.zeros(2)}, Stack("experts.{}", 2), "beyond the 2 rows"),
        ({"w": torch.zeros(2)}, lambda key: Row(key, 3, 2), "gave row 3 of 2"),
        (
            {"a.w": torch.zeros(2), "b.w": torch.zeros(2)},
            lambda key: Row("w", 0 if key < "b" else 1, 2 if key < "b" else 3),
            "one of 2 rows on dim 0, and b.w as one of 3 rows on dim 0",
        ),
        (
            {"experts.w": torch.zeros(2)},
            Unstack("experts.{}", dim=1),
            "cannot be unstacked on dim 1: its shape is (2,)",
        ),
        (
            {"experts.0.w": torch.zeros(2)},
            Stack("experts.{}", 2, dim=2),
            "rows of shape (2,) on dim 2",
        ),
        ({"experts.w": torch.tensor(2.0)}, Unstack("experts.{}"), "its rows cannot be determined"),
        ({"experts.w.lr": 0.1}, Unstack("experts.{}"), "its rows cannot be determined"),
        (
            {"experts.w": torch.zeros(2), "experts.0.w": torch.zeros(())},
            Unstack("experts.{}.w"),
            "gives this one name to a row and to another value",
        ),
        (
            {"experts.0.w": torch.zeros(2)},
            Renames(Stack("experts.{}", 2), Unstack("w.{}")),
            "already is stacked or unstacked",
        ),
    ],
)
def test_what_cannot_be_stacked_or_unstacked_is_refused(
    tmp_path: Path, held: dict[str, Any], rename: Any, expected: str
) -> None:
    assert expected in refusal(lambda: save_alone(tmp_path, held, rename))
    assert not list(tmp_path.iterdir())


def test_a_rule_for_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    world = World(1)
    rules = PlacementRules(
        {"experts.w1": CheckpointPlacement(world.mesh(0, ep=1), [Shard(0)], global_shape=(5, 2))}
    )
    message = refusal(lambda: save_alone(tmp_path, adam([0, 1]), stack([0, 1], 2), rules=rules))
    assert "stacks 2 rows on dim 0 of a tensor of 2 dims" in message
    assert "global_shape=(5, 2)" in message


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("by", [SPLIT, WHOLE], ids=["split", "whole"])
def test_cached_plans_and_folded_digests(tmp_path: Path, by: Topology, stacked: bool) -> None:
    planners = [
        PlacementSavePlanner(**by.options(rank, stacked=stacked), enable_plan_caching=True)
        for rank in range(by.world.size)
    ]
    for turn in range(3):
        path = tmp_path / f"cached{turn}"
        by.world.save(path, by.state_dict, lambda rank: planners[rank])
        load(path, SPLIT, stacked=stacked)
    with digest_budget(8):
        save(tmp_path / "large", by, stacked=stacked)
    load(tmp_path / "large", WHOLE, stacked=stacked)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("by", [SPLIT, WHOLE], ids=["split", "whole"])
def test_a_save_without_collectives_leaves_no_row_to_others(
    tmp_path: Path, by: Topology, stacked: bool
) -> None:
    by.world.save(
        tmp_path,
        by.state_dict,
        lambda rank: PlacementSavePlanner(**by.options(rank, stacked=stacked)),
        use_collectives=False,
    )
    before = {rank: SPLIT.state_dict(rank, filled=False) for rank in range(SPLIT.world.size)}
    SPLIT.world.load(
        tmp_path,
        lambda rank: before[rank],
        lambda rank: PlacementLoadPlanner(**SPLIT.options(rank, stacked=stacked)),
        lambda rank: PlacementFileSystemReader(tmp_path),
    )
    for rank, held in before.items():
        assert_equal(held, SPLIT.state_dict(rank))


def test_a_check_reports_a_stack_s_shape() -> None:
    report = SPLIT.world.check(
        SPLIT.state_dict, lambda rank: PlacementSavePlanner(**SPLIT.options(rank, stacked=True))
    ).report  # type: ignore[attr-defined]
    assert report.keys["model.layers.0.experts.w1"].shape == (8, 5, 4)


def test_a_row_that_a_stacked_tensor_holds_twice_is_written_once_and_read_twice(
    tmp_path: Path,
) -> None:
    by = Topology(3, ((1, 0, 1), (2, 1)), fsdp=(2, 1), split=False)
    planners = save(tmp_path, by, stacked=False)
    assert_holds(tmp_path, 3, stacked=False, steps=torch.tensor(3.0))
    for expected in planners[0].report.keys.values():
        assert expected.unique_nbytes == expected.whole_nbytes
    load(tmp_path, by, stacked=False)


def test_plain_moments_follow_their_parameter_into_stack_and_rows(tmp_path: Path) -> None:
    """An optimizer that keeps plain moments of what is a DTensor."""
    world = World(2)
    whole = torch.arange(4 * 4 * 3.0).reshape(4, 4, 3)

    def held(rank: int, *, split: bool, filled: bool) -> dict[str, Any]:
        mesh = world.mesh(rank, fsdp=2)
        parts = {f"experts.{i}.w": whole[i] for i in range(4)} if split else {"experts.w": whole}
        made: dict[str, Any] = {}
        for key, part in parts.items():
            local = cut(part, [Shard(0)], (2,), (rank,))
            local = local if filled else torch.full_like(local, -1)
            made[key] = FakeDTensor(local, mesh, [Shard(0)], part.shape)
            made[f"optim.state.{key}.exp_avg"] = -local
        return made

    for split, rename in ((True, Stack("experts.{}", 4)), (False, Unstack("experts.{}"))):
        path = tmp_path / str(split)
        world.save(
            path,
            lambda rank, split=split: held(rank, split=split, filled=True),
            lambda rank, rename=rename: PlacementSavePlanner(rename=rename),
        )
        read = read_plainly(path)
        for i in range(4):
            if split:
                assert torch.equal(read["optim.state.experts.w.exp_avg"][i], -whole[i])
            else:
                assert torch.equal(read[f"optim.state.experts.{i}.w.exp_avg"], -whole[i])
        loaded = world.load(
            path,
            lambda rank, split=split: held(rank, split=split, filled=False),
            lambda rank, rename=rename: PlacementLoadPlanner(rename=rename),
        )
        for rank in range(2):
            assert_equal(loaded[rank], held(rank, split=split, filled=True))


def test_plain_moments_follow_into_a_stack_whose_rule_picks_rows_too(tmp_path: Path) -> None:
    """Rows of each expert by an IndexShard, and the experts themselves, distinguished by name."""
    world, rows = World(2), ((2, 0), (1,))
    whole = torch.arange(3 * 4.0).reshape(3, 4)[:, :3].contiguous()

    def held(rank: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for i in range(3):
            made[f"experts.{i}.w"] = whole[i][list(rows[rank])]
            made[f"optim.state.experts.{i}.w.exp_avg"] = -made[f"experts.{i}.w"]
        return made

    def planner(rank: int) -> PlacementSavePlanner:
        by = CheckpointPlacement(
            world.mesh(rank, tp=2), {"tp": IndexShard(1, rows[rank])}, global_shape=whole.shape
        )
        rules = PlacementRules({re.compile("^experts"): by})
        return PlacementSavePlanner(rules, rename=Stack("experts.{}", 3))

    world.save(tmp_path, held, planner)
    read = read_plainly(tmp_path)
    assert torch.equal(read["experts.w"], whole)
    assert torch.equal(read["optim.state.experts.w.exp_avg"], -whole)


def test_a_planner_that_was_used_can_be_sent_to_another_process_and_used_again(
    tmp_path: Path,
) -> None:
    saving = PlacementSavePlanner(rename=stack([1, 0], 2), enable_plan_caching=True)
    loading = PlacementLoadPlanner(rename=stack([1, 0], 2))
    for turn in range(2):
        path = tmp_path / str(turn)
        state_dict = adam([1, 0], steps=[turn, turn])
        dcp.save(state_dict, checkpoint_id=path, planner=saving, no_dist=True)
        held = adam([1, 0], sign=-1, steps=[9, 9])
        dcp.load(held, checkpoint_id=path, planner=loading, no_dist=True)
        assert_equal(held, state_dict)
        saving, loading = pickle.loads(pickle.dumps((saving, loading)))


def rows_with_objects(kind: str, *, equal: bool) -> dict[str, Any]:
    saved: dict[str, Any] = {}
    for i in range(2):
        value = 1.0 if equal else float(i)
        saved[f"experts.{i}.w1"] = torch.full((3, 4), float(i))
        saved[f"optim.state.experts.{i}.w1.exp_avg"] = torch.full((3, 4), -float(i))
        saved[f"optim.state.experts.{i}.w1.extra"] = (
            np.full((2, 2), value) if kind == "arrays" else deque([torch.full((2,), value)])
        )
    return saved


@pytest.mark.parametrize(
    ("kind", "equal"), [("arrays", True), ("arrays", False), ("tensors", False)]
)
def test_objects_with_elements_are_compared_when_one_stands_for_all_rows(
    kind: str, equal: bool, tmp_path: Path
) -> None:
    saved = rows_with_objects(kind, equal=equal)
    dcp.save(saved, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    held: dict[str, Any] = {
        "experts.w1": torch.zeros(2, 3, 4),
        "optim.state.experts.w1.exp_avg": torch.zeros(2, 3, 4),
        "optim.state.experts.w1.extra": "",
    }
    if not equal:
        message = refusal(lambda: load_alone(tmp_path, held, Unstack("experts.{}")))
        assert "optim.state.experts.w1.extra: rank 0 has one value for all rows" in message
        return
    load_alone(tmp_path, held, Unstack("experts.{}"))
    assert np.array_equal(held["optim.state.experts.w1.extra"], np.ones((2, 2)))
