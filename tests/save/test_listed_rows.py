"""Rows that ranks name themselves: what is saved and what is refused, element by element."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import read_whole, refusal
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    PlacementError,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Stack,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World
from tests.storage_scenes import save_alone, save_no_dist

COLUMNS = 5


def listed(rank: int, rows: Sequence[Sequence[int]], dim: int = 0) -> PlacementSavePlanner:
    """Return the planner of a rank that names its rows of the whole tensor."""
    mesh, shape = World(len(rows)).mesh(rank, ep=len(rows)), [(4, 5), (5, 4)][dim]
    by = CheckpointPlacement(mesh, {"ep": IndexShard(dim, rows[rank])}, global_shape=shape)
    return PlacementSavePlanner(PlacementRules({"w": by}))


def test_a_key_of_which_every_rank_names_no_row_is_refused(tmp_path: Path) -> None:
    message = refusal(
        lambda: World(2).save(
            tmp_path, lambda rank: {"w": torch.zeros(0, 5)}, lambda rank: listed(rank, [(), ()])
        )
    )
    assert "w: nobody holds all of the (4, 5) tensor" in message


@pytest.mark.parametrize("dim", [0, 1])
def test_m39_a_rank_that_saves_by_itself_may_hold_no_row(tmp_path: Path, dim: int) -> None:
    """With ``no_dist=True``; without collectives it is refused, as every rank is."""
    whole, world = torch.arange(20.0).reshape([(4, 5), (5, 4)][dim]), World(2)
    for rank, rows in enumerate([(2, 0, 3, 1), ()]):
        held = {"w": whole.index_select(dim, torch.tensor(rows, dtype=torch.long))}
        planner = listed(rank, [(2, 0, 3, 1), ()], dim)
        with warnings.catch_warnings(action="ignore"):
            save_no_dist(world, rank, tmp_path / f"{rank}", held, planner)
        with world._as(rank), pytest.raises(PlacementError, match="use_collectives=False"):
            save_alone(tmp_path / "refused", rank, held, planner)
    assert torch.equal(read_whole(tmp_path / "0")["w"], whole)
    stored = dcp.FileSystemReader(tmp_path / "1").read_metadata().state_dict_metadata["w"]
    assert (tuple(stored.size), stored.chunks) == (tuple(whole.shape), [])


def test_rows_of_an_axis_of_one_rank_may_be_named_where_a_dtensor_shards_it(
    tmp_path: Path,
) -> None:
    """Its own shard is the whole; an axis of one rank without a name is any other such axis."""
    whole = torch.arange(6.0).reshape(3, 2)
    rows = (2, 0, 1)
    for names in (("ep",), None):
        mesh = FakeMesh((1,), ("ep",), rank=0)
        tensor = FakeDTensor(whole[list(rows)], FakeMesh((1,), names, rank=0), [Shard(1)], (3, 2))
        by = CheckpointPlacement(mesh, {"ep": IndexShard(0, rows)}, global_shape=(3, 2))
        path = tmp_path / str(names)
        planner = PlacementSavePlanner(PlacementRules({"w": by}))
        World(1).save(path, lambda rank, held=tensor: {"w": held}, lambda rank, by=planner: by)
        assert torch.equal(read_whole(path)["w"], whole)


def repeated(rank: int, *, of: str, drift: float, part: int = 0) -> dict[str, Any]:
    """Four rows on two ranks, of which rank 0 holds row 1 twice: as one tensor, or one by one."""
    whole = torch.arange(1.0, 1 + 4 * COLUMNS).reshape(4, COLUMNS)
    rows = [[1, 0, 1], [2, 3]][rank]
    held = whole[rows].clone()
    if rank == 0:
        held[[0, 2][part], COLUMNS // 2] += drift
    norm = torch.ones(3)
    if of == "index":
        return {"layers.0.w1": held, "norm": norm}
    return {f"layers.0.experts.{at}.w1": row for at, row in enumerate(held)} | {"norm": norm}


def repeated_planner(rank: int, of: str, **options: Any) -> PlacementSavePlanner:
    rows = [[1, 0, 1], [2, 3]][rank]
    if of == "index":
        mesh = World(2).mesh(rank, ep=2)
        placement = CheckpointPlacement(mesh, {"ep": IndexShard(0, rows)}, global_shape=(4, 5))
        return PlacementSavePlanner(PlacementRules({"layers": placement}), **options)
    rename = Renames(Renumber("experts.{}", rows, total=4), Stack("experts.{}", total=4))
    return PlacementSavePlanner(rename=rename, **options)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("digests", ["sampled", "full"])
@pytest.mark.parametrize("of", ["index", "stack"])
def test_m38_a_row_that_one_rank_holds_twice_with_different_contents_is_refused(
    tmp_path: Path, of: str, digests: str, part: int
) -> None:
    message = refusal(
        lambda: World(2).save(
            tmp_path,
            lambda rank: repeated(rank, of=of, drift=0.5, part=part),
            lambda rank: repeated_planner(rank, of, digests=digests),
        )
    )
    key = "layers.0.w1" if of == "index" else "layers.0.experts.w1"
    assert f"{key}: 2 copies of [1:2, :] of (4, 5) on one rank have different contents" in message
    assert "way out:" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, {"digests": "off"}, {"on_conflict": "warn"}], ids=str)
@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize("of", ["index", "stack"])
def test_m38_a_row_that_one_rank_holds_twice_is_saved_once_where_that_is_let_pass(
    tmp_path: Path, of: str, drift: float, options: dict[str, str]
) -> None:
    if drift and not options:
        pytest.skip("refused, see above")
    warns = drift and "on_conflict" in options
    with pytest.warns(UserWarning, match="have different contents") if warns else nullcontext():
        World(2).save(
            tmp_path,
            lambda rank: repeated(rank, of=of, drift=drift),
            lambda rank: repeated_planner(rank, of, **options),
        )
    key = "layers.0.w1" if of == "index" else "layers.0.experts.w1"
    whole = torch.arange(1.0, 1 + 4 * COLUMNS).reshape(4, COLUMNS)
    read = read_whole(tmp_path)[key]
    either = [whole[1], whole[1].clone()]
    either[1][COLUMNS // 2] += drift
    assert torch.equal(read[[0, 2, 3]], whole[[0, 2, 3]])
    assert any(torch.equal(read[1], copy) for copy in either)


@pytest.mark.parametrize("whole", [torch.zeros, torch.ones])
def test_m38_equal_copies_of_many_ranks_rows_and_moments_do_not_warn(
    tmp_path: Path, whole: Callable[..., torch.Tensor]
) -> None:
    maps = ((0, 1, 0), (2, 2, 1), (3, 0))

    def state_dict(rank: int) -> dict[str, Any]:
        made = {f"layers.0.experts.{at}.w": whole(2, 3) for at in range(len(maps[rank]))}
        return {
            "model": made,
            "optim": {
                "state": {key: {"step": torch.zeros(()), "exp_avg": whole(2, 3)} for key in made},
                "param_groups": [{"params": [*made]}],
            },
        }

    def planner(rank: int) -> PlacementSavePlanner:
        number = Renumber("experts.{}", maps[rank], total=4)
        return PlacementSavePlanner(rename=Renames(number, Stack("experts.{}", total=4)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        World(3).save(tmp_path, state_dict, planner)
