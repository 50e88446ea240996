"""This rank's keys as the checkpoint's keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import (
    PlacementError,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.names.flat import rename_keys
from dcp_placements.testing import World


def test_two_keys_that_become_one_are_refused_with_all_names() -> None:
    with pytest.raises(PlacementError) as refused:
        rename_keys({"b.w": 1, "a.w": 2, "c.w": 3, "x.v": 4, "y.v": 5}, {}, lambda key: key[-1])
    message = str(refused.value)
    assert "w: rename() gives this one name to both b.w and a.w" in message
    assert "w: rename() gives this one name to both b.w and c.w" in message
    assert "v: rename() gives this one name to both x.v and y.v" in message
    assert "map every key of a rank to a key of its own" in message
    assert "way out:" in message
    assert message.index("v: ") < message.index("w: ")


@pytest.mark.parametrize("result", [None, 3, ("a", "b")])
def test_what_is_no_name_is_refused(result: Any) -> None:
    with pytest.raises(PlacementError) as refused:
        rename_keys({"a.w": 1}, {}, lambda key: result)
    assert f"a.w: rename() gave {result!r}" in str(refused.value)


def global_name(rank: int) -> Any:
    """Two layers per pipeline stage, numbered from 0 on each."""

    def rename(key: str) -> str:
        parts = key.split(".")
        at = parts.index("layers") + 1
        return ".".join([*parts[:at], str(int(parts[at]) + 2 * rank), *parts[at + 1 :]])

    return rename


def test_objects_load_under_their_local_names(tmp_path: Any) -> None:
    world = World(2)
    world.save(
        tmp_path,
        lambda rank: {"rng": {"layers": {"0": f"state of {rank}"}}},
        lambda rank: PlacementSavePlanner(rename=global_name(rank)),
    )
    loaded = world.load(
        tmp_path,
        lambda rank: {"rng": {"layers": {"0": "nothing yet"}}},
        lambda rank: PlacementLoadPlanner(rename=global_name(rank)),
    )
    assert [state["rng"]["layers"]["0"] for state in loaded] == ["state of 0", "state of 1"]


def test_rules_see_the_checkpoint_s_names(tmp_path: Any) -> None:
    asked: list[str] = []

    def rules(fqn: str, tensor: Any) -> None:
        asked.append(fqn)

    dcp.save(
        {"layers": {"0": torch.ones(2)}},
        checkpoint_id=tmp_path,
        planner=PlacementSavePlanner(rules, rename=global_name(3)),
        no_dist=True,
    )
    assert set(asked) == {"layers.6"}


def test_a_local_name_that_another_stage_s_key_has_is_no_sign_of_an_old_checkpoint(
    tmp_path: Any,
) -> None:
    """On rank 1 ``layers.0`` is layer 2, and the checkpoint has a ``layers.0``, of rank 0."""
    world = World(2)

    def rename(rank: int) -> Any:
        def renamed(key: str) -> str:
            return global_name(rank)(key) if key.startswith("layers") else key

        return renamed

    def held(rank: int, sign: int) -> dict[str, Any]:
        weights = {str(i): torch.full((3,), sign * (10.0 * rank + i + 1)) for i in range(2)}
        return {"layers": weights, "hyper": {"lr": sign * 0.1}}

    world.save(
        tmp_path, lambda rank: held(rank, 1), lambda rank: PlacementSavePlanner(rename=rename(rank))
    )
    loaded = world.load(
        tmp_path,
        lambda rank: held(rank, -1),
        lambda rank: PlacementLoadPlanner(rename=rename(rank)),
    )
    for rank in range(2):
        assert loaded[rank]["hyper"] == {"lr": 0.1}
        for i in range(2):
            assert torch.equal(loaded[rank]["layers"][str(i)], held(rank, 1)["layers"][str(i)])
