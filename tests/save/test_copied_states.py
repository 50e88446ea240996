"""State that follows its parameter for its shape alone, and is equal on all ranks: warned of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, without_warning
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, PlacementRules, Placements
from dcp_placements.testing import World

WEIGHT = arange(8, 4)
COPY = arange(4, 4, start=500)
CUT = "is cut like its parameter, and ranks with different parts have equal contents"


def state(rank: int, size: int, **held: Any) -> dict[str, Any]:
    """Return what a rank has of a weight in ``size`` shards, beside this state of it."""
    weight = WEIGHT.chunk(size)[rank].clone()
    groups = [{"lr": 0.1, "params": ["w"]}]
    return {"model": {"w": weight}, "optim": {"state": {"w": held}, "param_groups": groups}}


def planner(rank: int, above: dict[str, Any] | None = None, **options: Any) -> Any:
    mesh = World(2).mesh(rank, ep=2)
    rules = {**(above or {}), "w": CheckpointPlacement(mesh, {"ep": Shard(0)})}
    return Placements(PlacementRules(rules)).save_planner(**options)


def dion(rank: int) -> dict[str, Any]:
    """Return the state of Dion where each of two ranks has the whole of Q."""
    momentum = arange(8, 4, start=100).chunk(2)[rank].clone()
    return state(rank, 2, momentum=momentum, Q=COPY.clone())


def test_a_copy_with_the_shape_of_a_shard_is_warned_of_with_a_line_that_mends_it(
    tmp_path: Path,
) -> None:
    with pytest.warns(UserWarning, match=CUT) as caught:
        World(2).save(tmp_path / "as a moment", dion, planner)
    (text,) = [str(warning.message) for warning in caught]
    assert "optim.state.w.Q: " in text
    assert "momentum" not in text
    assert "found:       (4, 4), stored as (8, 4), on ranks 0-1" in text
    line = text.partition('way out:     "')[2].partition('"')[0]
    assert line == "state.**.Q"
    with without_warning():
        World(2).save(tmp_path / "mended", dion, lambda rank: planner(rank, {line: None}))
        read = {"optim.state.w.Q": torch.zeros(4, 4)}
        dcp.load(read, checkpoint_id=tmp_path / "mended", no_dist=True)
    assert torch.equal(read["optim.state.w.Q"], COPY)


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(lambda rank: {"exp_avg": COPY, "exp_avg_sq": COPY}, id="known by name"),
        pytest.param(lambda rank: {"momentum_buffer": COPY}, id="Muon"),
        pytest.param(lambda rank: {"Q": torch.zeros(4, 4)}, id="zeros, before a step"),
        pytest.param(lambda rank: {"Q": torch.full((4, 4), 0.3)}, id="an option, before a step"),
        pytest.param(lambda rank: {"m": COPY + rank}, id="contents that differ"),
        pytest.param(lambda rank: {"Q": arange(5, 5)}, id="the shape of no shard"),
        pytest.param(lambda rank: {"Q": torch.zeros(4, 4) if rank else COPY}, id="a part of zeros"),
        pytest.param(lambda rank: {"step": torch.tensor(3.0)}, id="a scalar"),
    ],
)
def test_moments_and_new_state_are_not_warned_of(tmp_path: Path, held: Any) -> None:
    with without_warning():
        World(2).save(tmp_path, lambda rank: state(rank, 2, **held(rank)), planner)


def test_state_in_levels_has_the_line_of_the_first(tmp_path: Path) -> None:
    nested = {"GG": {"0": COPY, "1": COPY + 1}}
    with pytest.warns(UserWarning, match='"state.\\*\\*.GG": None') as caught:
        World(2).save(tmp_path / "0", lambda rank: state(rank, 2, **nested), planner)
    (text,) = [str(warning.message) for warning in caught]
    assert text.count(CUT) == 1
    assert "1 other key" in text
    with without_warning():
        World(2).save(
            tmp_path / "1",
            lambda rank: state(rank, 2, **nested),
            lambda rank: planner(rank, {"state.**.GG": None}),
        )


@pytest.mark.parametrize("digests", ["sampled", "full", "off"])
def test_a_waiver_and_no_digests_silence_it(tmp_path: Path, digests: str) -> None:
    waive = {} if digests == "off" else {"state.**.Q": "parts that are equal"}
    with without_warning():
        World(2).save(tmp_path, dion, lambda rank: planner(rank, digests=digests, waive=waive))


def test_copies_along_one_axis_are_seen_where_another_cuts_them_truly(tmp_path: Path) -> None:
    # The columns of Q are cut by tp; its rows are whole on each ep rank.
    q, momentum = arange(4, 8, start=500), arange(8, 8, start=100)

    def held(rank: int, *, copied: bool) -> dict[str, Any]:
        ep, tp = divmod(rank, 2)
        rows = q if copied else momentum.chunk(2)[ep] * 2
        part = rows.chunk(2, 1)[tp].clone()
        weight = arange(8, 8).chunk(2)[ep].chunk(2, 1)[tp].clone()
        groups = [{"lr": 0.1, "params": ["w"]}]
        optim = {"state": {"w": {"Q": part}}, "param_groups": groups}
        return {"model": {"w": weight}, "optim": optim}

    def saver(rank: int) -> Any:
        mesh = World(4).mesh(rank, ep=2, tp=2)
        placement = CheckpointPlacement(mesh, {"ep": Shard(0), "tp": Shard(1)})
        return Placements({"w": placement}).save_planner()

    with pytest.warns(UserWarning, match=CUT):
        World(4).save(tmp_path / "copies", lambda rank: held(rank, copied=True), saver)
    with without_warning():
        World(4).save(tmp_path / "parts", lambda rank: held(rank, copied=False), saver)


def test_few_keys_of_a_name_and_shape_are_sent(tmp_path: Path) -> None:
    names = [f"layers.{n}.w" for n in range(40)]

    def held(rank: int) -> dict[str, Any]:
        optim = {
            "state": {name: {"Q": COPY} for name in names},
            "param_groups": [{"params": names}],
        }
        weights = {name: WEIGHT.chunk(2)[rank].clone() for name in names}
        return {"model": weights, "optim": optim}

    with pytest.warns(UserWarning, match=CUT) as caught:
        World(2).save(tmp_path, held, planner)
    (text,) = [str(warning.message) for warning in caught]
    assert text.count(CUT) == 1
