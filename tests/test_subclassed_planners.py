"""Planners that others derive from these as torch's documentation derives them from its own."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    SavePlan,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_placements import (
    PlacementError,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)


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


def half_precision(base: Any) -> Any:
    """Return the planner that torch's documentation derives to save in half precision."""

    class FP16Planner(base):  # type: ignore[misc]
        def create_local_plan(self) -> SavePlan:
            plan: SavePlan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, write_item: WriteItem) -> Any:
            data = super().resolve_data(write_item)
            return data if write_item.type == WriteItemType.BYTE_IO else data.to(torch.float16)

    return FP16Planner()


def refusal(failed: CheckpointException) -> str:
    (error, _) = failed.failures[0]
    assert isinstance(error, PlacementError)
    return str(error)


def test_items_changed_before_they_are_there_are_refused(tmp_path: Path) -> None:
    """Torch makes the metadata of the items in a local plan, where this package has none."""

    class Replaces(PlacementSavePlanner):
        def create_local_plan(self) -> SavePlan:
            return dataclasses.replace(super().create_local_plan(), items=[])

    for planner in (half_precision(PlacementSavePlanner), Replaces()):
        with pytest.raises(CheckpointException) as refused:
            dcp.save(whole(), checkpoint_id=tmp_path, planner=planner, no_dist=True)
        assert "no items before finish_plan()" in refusal(refused.value)
        assert "a subclass reads or replaces" in refusal(refused.value)
        assert not list(tmp_path.iterdir())


def test_data_of_another_dtype_than_the_metadata_s_are_refused(tmp_path: Path) -> None:
    class Casts(PlacementSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            data = super().resolve_data(write_item)
            return data if write_item.type == WriteItemType.BYTE_IO else data.to(torch.float16)

    writer = PlacementFileSystemWriter(tmp_path)
    with pytest.raises(CheckpointException) as refused:
        dcp.save(whole(), storage_writer=writer, planner=Casts(), no_dist=True)
    text = refusal(refused.value)
    assert text.startswith("w, rank 0: ")
    assert "torch.float16 of shape (4, 3)" in text
    assert "torch.float32 of shape (4, 3)" in text
    assert "way out:" in text
    assert not (tmp_path / ".metadata").exists()


def test_data_of_another_shape_are_refused(tmp_path: Path) -> None:
    class Cuts(PlacementSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            data = super().transform_object(write_item, object)
            return data[1:] if isinstance(data, torch.Tensor) else data

    writer = PlacementFileSystemWriter(tmp_path)
    with pytest.raises(CheckpointException, match=r"of shape \(3, 3\)"):
        dcp.save(whole(), storage_writer=writer, planner=Cuts(), no_dist=True)
    assert not (tmp_path / ".metadata").exists()


def test_a_cast_that_the_metadata_know_of_is_written(tmp_path: Path) -> None:
    """Torch's own planner has it in the items, from which the metadata are made."""
    writer = PlacementFileSystemWriter(tmp_path)
    planner = half_precision(DefaultSavePlanner)
    dcp.save(whole(), storage_writer=writer, planner=planner, no_dist=True)
    assert torch.equal(loaded(tmp_path)["w"], whole()["w"])


@pytest.mark.parametrize("base", [DefaultSavePlanner, PlacementSavePlanner])
def test_a_save_planner_has_the_attributes_of_torch_s(base: Any, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Saves(base):  # type: ignore[misc]
        def create_local_plan(self) -> SavePlan:
            seen["first"] = dict(self.mappings), self.is_coordinator
            self.state_dict["w"] = self.state_dict["w"] + 1
            self.plan = super().create_local_plan()
            return self.plan

        def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
            self.global_plan, self.metadata = super().create_global_plan(all_plans)
            seen["metadata"] = sorted(self.metadata.state_dict_metadata)
            return self.global_plan, self.metadata

        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            plan = super().finish_plan(new_plan)
            self.plan = dataclasses.replace(plan, items=list(plan.items))
            return self.plan

    planner = Saves()
    dcp.save(
        {"m": {"w": torch.ones(2)}, "w": torch.ones(3)}, checkpoint_id=tmp_path, planner=planner
    )
    assert seen == {"first": ({"m.w": ("m", "w"), "w": ("w",)}, True), "metadata": ["m.w", "w"]}
    assert sorted(planner.metadata.state_dict_metadata) == ["m.w", "w"]
    assert {"m.w", "w"} <= {item.index.fqn for item in planner.plan.items}
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["w"], torch.full((3,), 2.0))


@pytest.mark.parametrize("base", [DefaultLoadPlanner, PlacementLoadPlanner])
def test_a_load_planner_has_the_attributes_of_torch_s(base: Any, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Loads(base):  # type: ignore[misc]
        def set_up_planner(self, *args: Any, **options: Any) -> None:
            super().set_up_planner(*args, **options)
            seen["mappings"], seen["coordinator"] = dict(self.mappings), self.is_coordinator
            seen["stored"] = sorted(self.metadata.state_dict_metadata)
            seen["given"] = self.original_state_dict

        def create_local_plan(self) -> LoadPlan:
            return super().create_local_plan()  # type: ignore[no-any-return]

    saved = {"m": {"w": torch.ones(2)}, "lr": 0.5}
    dcp.save(saved, checkpoint_id=tmp_path, planner=DefaultSavePlanner())
    state = {"m": {"w": torch.zeros(2)}, "lr": 0.0}
    dcp.load(state, checkpoint_id=tmp_path, planner=Loads())
    assert seen.pop("given")["m"]["w"] is state["m"]["w"]  # type: ignore[index]
    mappings = {"m.w": ("m", "w"), "lr": ("lr",)}
    assert seen == {"mappings": mappings, "coordinator": True, "stored": ["lr", "m.w"]}
    assert state["lr"] == 0.5
    assert torch.equal(state["m"]["w"], torch.ones(2))  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:The function definition for SavePlanner.set_up_planner")
def test_a_subclass_may_pass_on_whatever_it_is_set_up_with(tmp_path: Path) -> None:
    class Saves(PlacementSavePlanner):
        def set_up_planner(self, *args: Any, **options: Any) -> None:
            super().set_up_planner(*args, **options)

    planner = Saves()
    dcp.save(whole(), checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert planner.is_coordinator
    assert torch.equal(loaded(tmp_path)["w"], whole()["w"])


@pytest.mark.parametrize(
    "hook", ["lookup_tensor", "transform_tensor", "resolve_tensor", "commit_tensor"]
)
@pytest.mark.parametrize("is_derived", [True, False])
def test_a_hook_is_called_for_each_of_many_small_tensors(
    hook: str, is_derived: bool, tmp_path: Path
) -> None:
    """Whether a subclass has it, or the planner itself."""
    saved = {f"w{at}": torch.full((2, 3), float(at)) for at in range(9)}
    dcp.save(saved, storage_writer=PlacementFileSystemWriter(tmp_path), no_dist=True)
    seen: list[str] = []

    def called(planner: Any, value: Any, *others: Any) -> Any:
        seen.append(getattr(value, "dest_index", value).fqn)
        return getattr(PlacementLoadPlanner, hook)(planner, value, *others)

    planner: Any = PlacementLoadPlanner()
    if is_derived:
        planner = type("Loads", (PlacementLoadPlanner,), {hook: called})()
    else:
        setattr(planner, hook, functools.partial(called, planner))
    loaded = {key: torch.nn.Parameter(torch.zeros(2, 3)) for key in saved}
    dcp.load(loaded, storage_reader=PlacementFileSystemReader(tmp_path), planner=planner)
    assert sorted(seen) == sorted(saved)
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
