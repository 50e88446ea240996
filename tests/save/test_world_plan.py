"""Plans as key tables and boxes: what travels, what the coordinator makes of it."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, digest_budget, refusal
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    MeshCoordinate,
    PlacementError,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.testing import FakeDTensor, World, cut

WORLD = World(8)


def hsdp(rank: int, whole: torch.Tensor) -> FakeDTensor:
    mesh = WORLD.mesh(rank, replicate=2, fsdp=4)
    return FakeDTensor.distribute(whole, mesh, [Replicate(), Shard(0)])


def planners(**options: Any) -> Callable[[int], PlacementSavePlanner]:
    made = [PlacementSavePlanner(**options) for _ in range(WORLD.size)]
    return lambda rank: made[rank]


@pytest.fixture
def few_digests() -> Iterator[None]:
    """Leave room for 40 digests of a rank, as in a world of very many ranks."""
    with digest_budget(40 * 8 * 8):
        yield


@pytest.mark.parametrize("drift", [0, 1])
def test_the_digests_of_a_rank_of_thousands_fit_into_their_budget(drift: int) -> None:
    """Eight ranks of so many take part; what they send is what each of all would."""
    world = World(20_000)
    keys = [f"layers.{i}.{part}" for i in range(60) for part in ("w1", "w2", "norm")]
    keys += [f"optim.state.{key}.{name}" for key in keys for name in ("exp_avg", "step")]

    def state_dict(rank: int) -> dict[str, Any]:
        made = {key: torch.full((2, 2), float(i)) for i, key in enumerate([*keys, "embed"])}
        if rank == 3:
            made["layers.33.w2"] += drift
        return made

    made, plans = PlacementSavePlanner(), []
    for rank in range(8):
        with world._as(rank):
            planner = PlacementSavePlanner() if rank else made
            planner.set_up_planner(state_dict(rank), is_coordinator=rank == 0)
            plans.append(pickle.loads(pickle.dumps(planner.create_local_plan())))
    assert all(0 < len(plan.planner_data.digests) <= 4 << 10 for plan in plans)
    with world._as(0):
        if not drift:
            with pytest.warns(UserWarning, match="8 of 20000 ranks take part"):
                made.create_global_plan(plans)
            return
        match = r"layers\.33\.w2: 2 different contents on 8 ranks"
        with pytest.raises(PlacementError, match=match) as refused:
            made.create_global_plan(plans)
    assert "embed" not in str(refused.value)


def test_of_tensors_of_several_boxes_the_one_that_differs_is_named(tmp_path: Path) -> None:
    def state_dict(rank: int) -> dict[str, Any]:
        wholes = {"a": arange(8, 3), "b": arange(8, 3, start=rank // 7)}
        return {key: cut(w, [FusedShard(0, 2)], (2,), (rank % 2,)) for key, w in wholes.items()}

    def planner(rank: int) -> PlacementSavePlanner:
        placement = CheckpointPlacement(WORLD.mesh(rank, dp=4, tp=2), {"tp": FusedShard(0, 2)})
        return PlacementSavePlanner(PlacementRules({"*": placement}))

    message = refusal(lambda: WORLD.save(tmp_path, state_dict, planner))
    assert "b: 2 different contents on 4 ranks" in message
    assert "\na" not in message


def test_keys_that_some_ranks_have_beside_those_of_their_mesh_are_saved(tmp_path: Path) -> None:
    """Each of them alone has to be whole: the ranks of a mesh may hold other tensors."""

    def state_dict(rank: int, late: torch.Tensor) -> dict[str, Any]:
        extra = {"late": late} if rank == 3 else {}
        return {"w": hsdp(rank, arange(8, 3))} | extra

    made = WORLD.save(tmp_path / "whole", lambda rank: state_dict(rank, arange(4, 3)), planners())
    assert made[0].report.partial_keys == {"late": (3,)}
    read = {"w": torch.zeros(8, 3), "late": torch.zeros(4, 3)}
    dcp.load(read, checkpoint_id=tmp_path / "whole", no_dist=True)
    assert torch.equal(read["late"], arange(4, 3))
    message = refusal(
        lambda: WORLD.save(
            tmp_path / "part", lambda rank: state_dict(rank, hsdp(3, arange(4, 3))), planners()
        )
    )
    assert "late: nobody holds all of the (4, 3) tensor" in message
    assert "the key is on rank 3 and not on ranks 0-2, 4-7" in message


class TestStages:
    """Two pipeline stages of four ranks each; the embedding is on both."""

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
        self, tmp_path: Path, key: str, rank: int, large: bool
    ) -> None:
        with digest_budget(40 * 8 * 8) if large else nullcontext():
            message = refusal(
                lambda: WORLD.save(
                    tmp_path, lambda at: self.deep(at, drift=(key, rank)), planners()
                )
            )
        assert f"{key}: 2 different contents on " in message
        assert f"rank {rank}" in message
        assert not list(tmp_path.glob("*.distcp"))

    @pytest.mark.usefixtures("few_digests")
    def test_m35_equal_tied_keys_of_a_large_world_do_not_warn(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = WORLD.save(tmp_path, self.deep, planners())
        written = Counter(i.index for p in made for i in p.plan.items if i.tensor_data is not None)
        assert set(written.values()) == {1}
        read = {"model.embed.weight": torch.zeros(8, 3), "model.layers.79.w": torch.zeros(8, 3)}
        dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
        assert all(torch.equal(tensor, arange(8, 3)) for tensor in read.values())

    @pytest.mark.usefixtures("few_digests")
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
        message = refusal(
            lambda: WORLD.save(tmp_path / "other", lambda rank: state_dict(rank, 1), planners())
        )
        assert "model.embed.weight: 2 different contents on 4 ranks" in message


class TestRanksWithOtherKeysBeside:
    """Ranks with more keys fold their digests into fewer buckets, or fold where others do not."""

    WORLD = World(4)

    @pytest.mark.parametrize("more", [False, True])
    def test_a_rank_with_the_coordinate_of_another_is_refused(
        self, tmp_path: Path, more: bool
    ) -> None:
        """The last rank has no row, and says that it has the first."""
        whole = arange(3, 2)

        def state_dict(rank: int) -> dict[str, Any]:
            made = {"m.w": whole[rank : rank + 1].clone() if rank < 3 else torch.ones(1, 2)}
            return made | ({"m.other": torch.ones(2)} if more and rank == 3 else {})

        def planner(rank: int) -> PlacementSavePlanner:
            mesh = MeshCoordinate(("ep",), (4,), (rank % 3,))
            rules = {"m.w": CheckpointPlacement(mesh, {"ep": Shard(0)}, global_shape=(3, 2))}
            if more:
                rules["m.other"] = CheckpointPlacement(mesh, {"ep": Replicate()})
            return PlacementSavePlanner(PlacementRules(rules))

        message = refusal(lambda: self.WORLD.save(tmp_path, state_dict, planner))
        assert "m.w: ranks 0, 3 hold the same part, [0:1, :]" in message


def test_ranks_that_count_other_ranks_than_the_coordinator_are_refused() -> None:
    """Of which tensors there are digests depends on it: they would be compared with others'."""
    planners = [PlacementSavePlanner() for _ in range(4)]
    plans = []
    for rank, planner in enumerate(planners):
        with World(2 if rank == 3 else 4)._as(rank):
            planner.set_up_planner({"w": torch.ones(2)}, is_coordinator=rank == 0)
            plans.append(planner.create_local_plan())
    with World(4)._as(0), pytest.raises(PlacementError) as refused:
        planners[0].create_global_plan(plans)
    text = str(refused.value)
    assert "how many ranks torch.distributed has: 4 on ranks 0-2; 2 on rank 3" in text


def test_a_rank_refuses_what_another_planner_assigned() -> None:
    planner = PlacementSavePlanner()
    planner.set_up_planner({"w": torch.ones(2)}, is_coordinator=True)
    plan = planner.create_local_plan()
    for looks in (len, list, lambda items: items[0]):
        with pytest.raises(PlacementError, match="the coordinator uses another planner"):
            looks(pickle.loads(pickle.dumps(plan)).items)
    with pytest.raises(PlacementError, match="the coordinator uses another planner"):
        planner.finish_plan(plan)
