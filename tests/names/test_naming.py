"""This rank's keys as the checkpoint's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_placements import (
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.errors import format_faults
from dcp_placements.names.flat import rename_keys


def test_two_keys_that_become_one_are_refused_with_all_names() -> None:
    keys = ("b.w", "a.w", "c.w", "x.v", "y.v")
    *_, faults = rename_keys(dict.fromkeys(keys), {}, lambda key: key[-1])
    message = format_faults("not renamed", faults)
    assert "w: rename() gives this one name to both b.w and a.w" in message
    assert "w: rename() gives this one name to both b.w and c.w" in message
    assert "v: rename() gives this one name to both x.v and y.v" in message
    assert "map every key of a rank to a key of its own" in message
    assert "way out:" in message
    assert message.index("v: ") < message.index("w: ")


@pytest.mark.parametrize("result", [None, 3, ("a", "b")])
def test_what_is_no_name_is_refused(result: Any) -> None:
    *_, faults = rename_keys({"a.w": 1}, {}, lambda key: result)
    assert f"a.w: rename() gave {result!r}" in str(*faults)


def test_rules_see_the_checkpoint_s_names(tmp_path: Any) -> None:
    asked: list[str] = []

    def rules(fqn: str, tensor: Any) -> None:
        asked.append(fqn)

    dcp.save(
        {"layers": {"0": torch.ones(2)}},
        checkpoint_id=tmp_path,
        planner=PlacementSavePlanner(rules, rename=lambda key: key.replace("0", "6")),
        no_dist=True,
    )
    assert set(asked) == {"layers.6"}


@pytest.mark.parametrize("keys", [("", "a"), ("a", "")])
def test_a_key_without_text_is_a_key_of_a_name(keys: tuple[str, str], tmp_path: Path) -> None:
    whole = torch.arange(1.0, 4.0)
    state = {key: torch.zeros(3) + number for number, key in enumerate(keys)}

    def rename(key: str) -> str:
        return "x"

    with pytest.raises(CheckpointException) as refused:
        dcp.save(
            state, checkpoint_id=tmp_path, planner=PlacementSavePlanner(rename=rename), no_dist=True
        )
    assert "x: rename() gives this one name to both" in str(refused.value.failures[0][0])
    dcp.save({"x": whole}, checkpoint_id=tmp_path, no_dist=True)
    planner = PlacementLoadPlanner(rename=rename)
    dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert all(torch.equal(tensor, whole) for tensor in state.values())
