"""Plans as tables and coordinates: what travels, what the coordinator makes of it."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    PlacementRules,
    PlacementSavePlanner,
    save_planner,
)
from fakes import FakeDTensor, World

WORLD = World(8)
MIB = 1 << 20


def arange(*shape: int, start: int = 0) -> torch.Tensor:
    numel = int(torch.Size(shape).numel())
    return torch.arange(start, start + numel, dtype=torch.float32).reshape(shape)


def hsdp(rank: int, whole: torch.Tensor) -> FakeDTensor:
    mesh = WORLD.mesh(rank, replicate=2, fsdp=4)
    return FakeDTensor.distribute(whole, mesh, [Replicate(), Shard(0)])


def planners(**options: Any) -> Callable[[int], PlacementSavePlanner]:
    made = [PlacementSavePlanner(**options) for _ in range(WORLD.size)]
    return lambda rank: made[rank]


def refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointException) as caught:
        work()
    return str(caught.value.failures[0][0])


@pytest.fixture
def large_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make eight ranks too many for digests of every item and a table from every rank."""
    monkeypatch.setattr(save_planner, "EXACT_WORLD", 4)


def offers(state_dict: Callable[[int], dict[str, Any]]) -> list[Any]:
    """Return what each rank sends."""
    sent = []
    for rank in range(WORLD.size):
        with WORLD._as(rank):
            planner = PlacementSavePlanner()
            planner.set_up_planner(state_dict(rank), is_coordinator=rank == 0)
            sent.append(planner.create_local_plan())
    return sent


@pytest.mark.usefixtures("large_world")
def test_one_rank_of_a_mesh_sends_its_table_and_the_others_its_name() -> None:
    whole = arange(13, 3)
    keys = [f"layers.{i}.w" for i in range(300)]
    plans = offers(lambda rank: {key: hsdp(rank, whole) for key in keys})
    assert [plan.planner_data.tables[0].packed is not None for plan in plans] == [True] + [
        False
    ] * 7
    assert max(len(pickle.dumps(plan)) for plan in plans[1:]) < 1024


def test_the_items_of_a_plan_are_there_for_whoever_looks() -> None:
    plans = offers(lambda rank: {"w": hsdp(rank, arange(13, 3)), "step": 3})
    assert [item.index.fqn for item in plans[1].items] == ["w", "step"]
    assert tuple(plans[1].items[0].tensor_data.chunk.offsets) == (4, 0)
    with pytest.raises(RuntimeError, match="not sent"):
        len(pickle.loads(pickle.dumps(plans[1])).items)
    with WORLD._as(0):
        planner = PlacementSavePlanner()
        planner.set_up_planner({}, is_coordinator=True)
        planned, _ = planner.create_global_plan(pickle.loads(pickle.dumps(plans)))
    written = Counter(item.index for plan in planned for item in plan.items)
    assert set(written.values()) == {1}
    assert len(written) == 5


@pytest.mark.usefixtures("large_world")
def test_a_large_world_saves_whole_tensors(tmp_path: Path) -> None:
    wholes = {f"layers.{i}.w": arange(13 + i, 3, start=i) for i in range(5)}
    WORLD.save(
        tmp_path,
        lambda rank: {key: hsdp(rank, whole) for key, whole in wholes.items()} | {"step": 7},
        planners(),
    )
    read: dict[str, Any] = {key: torch.zeros_like(whole) for key, whole in wholes.items()}
    dcp.load(read | {"step": 0}, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(read[key], whole) for key, whole in wholes.items())


@pytest.mark.usefixtures("large_world")
def test_a_large_world_names_the_keys_among_which_replicas_differ(tmp_path: Path) -> None:
    def state_dict(rank: int) -> dict[str, Any]:
        drift = 1 if rank == 5 else 0
        return {f"w{i}": hsdp(rank, arange(8, 3, start=drift if i == 2 else 0)) for i in range(40)}

    told = refusal(lambda: WORLD.save(tmp_path, state_dict, planners()))
    assert "different contents on ranks 1, 5" in told
    assert "w2" in told
    assert "w3," not in told
    assert "check(state_dict, rules) compares key by key" in told
    assert not list(tmp_path.glob("*.distcp"))


@pytest.mark.usefixtures("large_world")
def test_a_large_world_names_one_of_two_pieces_of_a_tensor(tmp_path: Path) -> None:
    """Two items a tensor: a digest stands for a piece, and the key is that of its tensor."""

    def state_dict(rank: int) -> dict[str, Any]:
        rows = [0, 2] if rank % 2 == 0 else [1, 3]
        made = {f"w{i}": arange(4, 3, start=i)[rows].clone() for i in range(40)}
        if rank == 5:
            made["w3"][1] += 1
        return made

    made = [
        PlacementSavePlanner(
            PlacementRules(
                {
                    "w*": CheckpointPlacement(
                        WORLD.mesh(rank, dp=4, tp=2), [Replicate(), FusedShard(0, 2)]
                    )
                }
            )
        )
        for rank in range(WORLD.size)
    ]
    told = refusal(lambda: WORLD.save(tmp_path, state_dict, lambda rank: made[rank]))
    assert "w3" in told
    assert told.count("w3: different contents on ranks 1, 3, 5, 7") == 1
    assert "w0" not in told


@pytest.mark.usefixtures("large_world")
@pytest.mark.parametrize("count", [30, 3000])
def test_a_large_world_names_the_object_of_each_rank_among_thousands(
    count: int, tmp_path: Path
) -> None:
    def state_dict(rank: int) -> dict[str, Any]:
        groups = {f"group{i}.lr": i / 8 for i in range(count)}
        return {"w": hsdp(rank, arange(8, 3))} | groups | {"group7.rng": rank % 4}

    made = planners()
    with pytest.warns(UserWarning, match=r"group7\.rng: this object differs between ranks 0, 4; "):
        WORLD.save(tmp_path, state_dict, made)
    assert len(made(0).report.warnings) == 1
    with WORLD._as(1):
        made(1).set_up_planner(state_dict(1), is_coordinator=False)
        offer = made(1).create_local_plan().planner_data
    assert sum(len(blob) for told in offer.tables for blob in told.digests.values()) <= 512


@pytest.mark.usefixtures("large_world")
def test_a_large_world_names_the_objects_among_which_several_differ(tmp_path: Path) -> None:
    def state_dict(rank: int) -> dict[str, Any]:
        groups = {f"group{i}": (rank if i in (3, 700) else 0) for i in range(1000)}
        return {"w": hsdp(rank, arange(8, 3))} | groups

    with pytest.warns(UserWarning, match="this object, or others, differ") as caught:
        WORLD.save(tmp_path, state_dict, planners())
    assert "group3, " in str(caught[0].message)
    assert "group700" in str(caught[0].message)
    assert "one or more of 8 keys" in str(caught[0].message)


def stepping(rank: int) -> dict[str, Any]:
    whole = arange(13, 3)
    keys = [f"layers.{i // 17}.part{i % 17}" for i in range(1037)]
    return {key: hsdp(rank, whole) for key in keys} | {
        f"state.{key}.step": torch.tensor(3.0) for key in keys
    }


@pytest.mark.usefixtures("large_world")
def test_a_rank_with_thousands_of_plain_scalars_sends_a_kilobyte() -> None:
    plan = offers(stepping)[3]
    assert [told.packed is not None for told in plan.planner_data.tables] == [False, True]
    digests = sum(len(blob) for told in plan.planner_data.tables for blob in told.digests.values())
    assert len(pickle.dumps(plan)) - digests < 1024
    assert pickle.loads(pickle.dumps(plan.planner_data)) == plan.planner_data


@pytest.mark.usefixtures("large_world")
def test_two_exchanged_replicas_differ_in_a_large_world(tmp_path: Path) -> None:
    """Sixteen buckets, and two keys of one bucket with their contents exchanged on one rank."""

    def state_dict(rank: int) -> dict[str, Any]:
        keys = [f"w{i:02}" for i in range(32)]
        values = [arange(8, 3, start=i) for i in range(32)]
        if rank == 5:
            values[1], values[17] = values[17], values[1]
        return {key: hsdp(rank, value) for key, value in zip(keys, values, strict=True)}

    told = refusal(lambda: WORLD.save(tmp_path, state_dict, planners()))
    assert "w01, w17" in told


@pytest.mark.usefixtures("large_world")
def test_a_rank_that_holds_other_tensors_than_its_mesh_is_refused(tmp_path: Path) -> None:
    def state_dict(rank: int) -> dict[str, Any]:
        extra = {"late": hsdp(rank, arange(4, 3))} if rank == 3 else {}
        return {"w": hsdp(rank, arange(8, 3))} | extra

    told = refusal(lambda: WORLD.save(tmp_path, state_dict, planners()))
    assert "rank 3 hold other tensors than the first rank of their mesh" in told
    assert "dcp_placements.check" in told


def test_big_replicas_are_spread_by_bytes_and_small_ones_stay_together(tmp_path: Path) -> None:
    big = torch.zeros(4 * 2 * MIB // 4)
    small = torch.zeros(64)
    made = WORLD.save(
        tmp_path,
        lambda rank: (
            {f"big.{i}": hsdp(rank, big) for i in range(4)}
            | {f"small.{i}": hsdp(rank, small) for i in range(20)}
            | {f"norm.{i}": small.clone() for i in range(20)}
        ),
        planners(),
    )
    nbytes: list[int] = []
    for planner in made:
        sizes = [
            item.tensor_data.chunk.sizes.numel() * 4
            for item in planner.plan.items
            if item.tensor_data
        ]
        nbytes.append(sum(sizes))
    assert max(nbytes) <= 1.05 * sum(nbytes) / len(nbytes)
    holders = {
        rank
        for rank, planner in enumerate(made)
        for item in planner.plan.items
        if item.index.fqn.startswith("norm.")
    }
    assert holders == {0}
    small_holders = {
        rank
        for rank, planner in enumerate(made)
        for item in planner.plan.items
        if item.index.fqn.startswith("small.")
    }
    assert small_holders == {0, 1, 2, 3}


def test_keys_of_one_class_share_one_chunk_list(tmp_path: Path) -> None:
    WORLD.save(
        tmp_path, lambda rank: {f"w{i}": hsdp(rank, arange(13, 3)) for i in range(50)}, planners()
    )
    stored = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert all(isinstance(entry, TensorStorageMetadata) for entry in stored.values())
    assert len({id(entry.chunks) for entry in stored.values()}) == 1


class TestStages:
    """Two pipeline stages of four ranks each; the embedding is on both."""

    @staticmethod
    def state_dict(rank: int, drift: int = 0) -> dict[str, Any]:
        stage = rank // 4
        mesh = WORLD.mesh(rank, pp=2, fsdp=4)["fsdp"]
        embed = arange(9, 3, start=drift if stage else 0)
        return {
            f"layers.{stage}.w": FakeDTensor.distribute(
                arange(7, 3, start=stage), mesh, [Shard(0)]
            ),
            "embed": FakeDTensor.distribute(embed, mesh, [Shard(0)]),
            f"layers.{stage}.norm": arange(3, start=stage),
        }

    def test_a_key_of_two_tables_is_written_once(self, tmp_path: Path) -> None:
        made = WORLD.save(tmp_path, self.state_dict, planners())
        written = Counter(item.index for planner in made for item in planner.plan.items)
        assert set(written.values()) == {1}
        read = {"embed": torch.zeros(9, 3), "layers.1.w": torch.zeros(7, 3)}
        dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(read["embed"], arange(9, 3))
        assert torch.equal(read["layers.1.w"], arange(7, 3, start=1))
        assert made[0].report.partial_keys["layers.1.w"] == (4, 5, 6, 7)
        assert "embed" not in made[0].report.partial_keys

    def test_a_key_of_two_tables_that_differs_is_refused(self, tmp_path: Path) -> None:
        told = refusal(
            lambda: WORLD.save(tmp_path, lambda rank: self.state_dict(rank, drift=1), planners())
        )
        assert "embed: 2 different contents" in told
        assert "differs along 'pp'" in told
        assert not list(tmp_path.glob("*.distcp"))

    @staticmethod
    def deep(rank: int, drift: tuple[str, int] | None = None) -> dict[str, Any]:
        """Many layers a stage; the embedding and its moments are sharded and on both stages."""
        stage = rank // 4
        mesh = WORLD.mesh(rank, pp=2, replicate=2, fsdp=2)["replicate", "fsdp"]
        made: dict[str, Any] = {}
        keys = [f"model.layers.{i + 40 * stage}.w" for i in range(40)] + ["model.embed.weight"]
        for key in keys:
            for name in (key, f"optim.state.{key}.exp_avg"):
                whole = arange(8, 3, start=1 if drift == (name, rank) else 0)
                made[name] = FakeDTensor.distribute(whole, mesh, [Replicate(), Shard(0)])
            step = f"optim.state.{key}.step"
            made[step] = torch.tensor(7.0 + (drift == (step, rank)))
        return made | {"lr": 0.1 + (drift == ("lr", rank))}

    @pytest.mark.parametrize("large", [False, True])
    @pytest.mark.parametrize("rank", [0, 3, 4, 7])
    @pytest.mark.parametrize(
        "key",
        [
            "model.embed.weight",
            "optim.state.model.embed.weight.exp_avg",
            "optim.state.model.embed.weight.step",
        ],
    )
    def test_m35_a_tied_key_of_two_stages_that_drifted_is_refused_in_a_large_world(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, rank: int, large: bool
    ) -> None:
        if large:
            monkeypatch.setattr(save_planner, "EXACT_WORLD", 4)
        told = refusal(
            lambda: WORLD.save(tmp_path, lambda at: self.deep(at, drift=(key, rank)), planners())
        )
        assert f"{key}: 2 different contents on " in told
        assert f"rank {rank}" in told
        assert not list(tmp_path.glob("*.distcp"))

    @pytest.mark.usefixtures("large_world")
    def test_m35_a_whole_stage_that_drifted_is_refused_in_a_large_world(
        self, tmp_path: Path
    ) -> None:
        """No rank of one stage differs from another of it: two tables contradict each other."""
        key = "model.embed.weight"

        def state_dict(rank: int) -> dict[str, Any]:
            return self.deep(rank, drift=(key, rank) if rank >= 4 else None)

        told = refusal(lambda: WORLD.save(tmp_path, state_dict, planners()))
        assert f"{key}: 2 different contents on 4 ranks" in told
        assert "ranks 0, 2" in told
        assert "ranks 4, 6" in told
        assert "model.layers" not in told

    @pytest.mark.usefixtures("large_world")
    def test_m35_equal_tied_keys_of_a_large_world_do_not_warn(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = WORLD.save(tmp_path, self.deep, planners())
        written = Counter(item.index for planner in made for item in planner.plan.items)
        assert set(written.values()) == {1}
        read = {"model.embed.weight": torch.zeros(8, 3), "model.layers.79.w": torch.zeros(8, 3)}
        dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
        assert all(torch.equal(tensor, arange(8, 3)) for tensor in read.values())

    @pytest.mark.usefixtures("large_world")
    def test_m35_an_object_of_two_stages_that_differs_is_noted_in_a_large_world(
        self, tmp_path: Path
    ) -> None:
        with pytest.warns(UserWarning, match="lr: this object differs between rank"):
            WORLD.save(tmp_path, lambda rank: self.deep(rank, drift=("lr", 5)), planners())

    @pytest.mark.usefixtures("large_world")
    def test_m35_a_tied_key_that_is_cut_otherwise_on_the_other_stage_is_compared(
        self, tmp_path: Path
    ) -> None:
        """The same boxes by other meshes: no class is the same, and each box is compared."""

        def state_dict(rank: int, drift: int = 0) -> dict[str, Any]:
            made = self.deep(rank)
            if rank >= 4:
                mesh = WORLD.mesh(rank, pp=2, tp=2, dp=2)["tp", "dp"]
                whole = arange(8, 3, start=drift)
                made["model.embed.weight"] = FakeDTensor.distribute(
                    whole, mesh, [Shard(0), Replicate()]
                )
            return made

        WORLD.save(tmp_path / "equal", state_dict, planners())
        told = refusal(
            lambda: WORLD.save(tmp_path / "other", lambda rank: state_dict(rank, 1), planners())
        )
        assert "model.embed.weight: 2 different contents on 4 ranks" in told
