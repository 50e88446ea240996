"""Planners that others derive from these as torch's documentation derives them from its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import LoadPlan, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner


def whole() -> dict[str, Any]:
    return {"w": torch.arange(12.0).reshape(4, 3), "lr": 0.1}


def loaded(path: Path) -> dict[str, Any]:
    """Return what torch's default planner reads."""
    state = {"w": torch.full((4, 3), -1.0), "lr": -1.0}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_what_is_looked_up_equals_torch_s_own_index(tmp_path: Path) -> None:
    instead = {MetadataIndex("w", torch.Size([0, 0])): torch.full((4, 3), 7.0)}
    memory = {MetadataIndex("w", torch.Size([0, 0])): torch.zeros(4, 3)}

    class Saves(PlacementSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Any:
            found = instead.get(index)
            return super().lookup_object(index) if found is None else found

    class Loads(PlacementLoadPlanner):
        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            found = memory.get(index)
            return super().lookup_tensor(index) if found is None else found

    dcp.save(whole(), checkpoint_id=tmp_path, planner=Saves(), no_dist=True)
    assert torch.equal(loaded(tmp_path)["w"], torch.full((4, 3), 7.0))
    dcp.load(whole(), checkpoint_id=tmp_path, planner=Loads(), no_dist=True)
    assert torch.equal(memory[MetadataIndex("w", torch.Size([0, 0]))], torch.full((4, 3), 7.0))


def test_the_items_of_a_plan_equal_torch_s_own(tmp_path: Path) -> None:
    """Equal both ways round, also as keys; other items are others."""
    finished: list[Any] = []

    class Saves(PlacementSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            plan = super().finish_plan(new_plan)
            finished.append((WriteItem, plan.items))
            return plan

    class Loads(PlacementLoadPlanner):
        def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
            plan = super().finish_plan(new_plan)
            finished.append((ReadItem, plan.items))
            return plan

    dcp.save(whole(), checkpoint_id=tmp_path, planner=Saves(), no_dist=True)
    dcp.load(whole(), checkpoint_id=tmp_path, planner=Loads(), no_dist=True)
    assert len(finished) == 2
    for kind, items in finished:
        plain = [kind(**{k: v for k, v in vars(item).items() if k != "run"}) for item in items]
        assert any(one != plain[0] for one in plain)
        for at, item in enumerate(items):
            assert [item == one for one in plain] == [one == item for one in plain]
            assert [item == one for one in plain] == [plain[at] == one for one in plain]
            if kind is ReadItem:  # write items have no hash: torch's tensor properties have none
                assert hash(item) == hash(plain[at])
            assert item != vars(item)
