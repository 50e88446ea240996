"""The pair in place of torch's: every option, every storage, every way to be called."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_same
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    SavePlanner,
)
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    MeshCoordinate,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.storage.provenance import RESERVED_KEY
from dcp_placements.storage.save_ids import ID_PREFIX
from dcp_placements.testing import World

SavePlanners = [DefaultSavePlanner, PlacementSavePlanner]
LoadPlanners = [DefaultLoadPlanner, PlacementLoadPlanner]


of_torch_s_own_making = pytest.mark.filterwarnings(
    "ignore:`_get_pg_default_device` will be deprecated", "ignore:Multiple backends are registered"
)


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mixed(sign: int = 1) -> dict[str, Any]:
    """Return what state dicts may hold; with ``sign=-1`` a template with other values."""
    return {
        "model": {
            "w": sign * torch.arange(15.0).reshape(5, 3),
            "scalar": torch.tensor(sign * 3.5),
            "empty": torch.zeros(0, 4),
            "ints": sign * torch.arange(7),
            "transposed": (sign * torch.arange(6.0).reshape(2, 3)).t(),
            "half": (sign * torch.arange(5.0)).bfloat16(),
        },
        "optim": {
            "state": [{"exp_avg": sign * torch.ones(3)}, {"exp_avg": sign * torch.zeros(2)}],
            "param_groups": [{"lr": sign * 0.1, "params": [0, 1], "betas": (0.9, 0.95)}],
        },
        "tensors": [sign * torch.arange(3.0), sign * torch.arange(4.0)],
        "numbers": [sign * 1, sign * 2],
        "step": sign * 12,
        "name": "run" if sign > 0 else "",
        "pair": (sign * 1, "x"),
        "array": np.arange(4) * sign,
        "1.2": {"dotted.key": sign * torch.ones(2)},
    }


def save(path: Path, state_dict: dict[str, Any], planner: SavePlanner | None = None) -> None:
    dcp.save(state_dict, checkpoint_id=path, planner=planner, no_dist=True)


def load(path: Path, state_dict: dict[str, Any], planner: Any = None) -> dict[str, Any]:
    dcp.load(state_dict, checkpoint_id=path, planner=planner, no_dist=True)
    return state_dict


@pytest.mark.parametrize("loading", LoadPlanners)
@pytest.mark.parametrize("saving", SavePlanners)
def test_without_rules_the_pair_reads_and_writes_what_torch_s_does(
    saving: Callable[[], Any], loading: Callable[[], Any], tmp_path: Path
) -> None:
    save(tmp_path, mixed(), saving())
    template = mixed(-1)
    held = template["model"]["w"]
    load(tmp_path, template, loading())
    assert_same(template, mixed())
    assert template["model"]["w"] is held


@pytest.mark.parametrize("options", [{}, {"flatten_state_dict": False}])
def test_without_rules_the_metadata_is_that_of_torch_s_planner_but_for_the_identity(
    options: dict[str, bool], tmp_path: Path
) -> None:
    state_dict = mixed() if not options else {"w": torch.ones(3, 2), "s": torch.tensor(1), "o": [1]}
    found = []
    for planner in (DefaultSavePlanner, PlacementSavePlanner):
        path = tmp_path / planner.__name__
        save(path, state_dict, planner(**options))
        found.append(FileSystemReader(path).read_metadata())
    ours, theirs = found[1], found[0]
    for entry in theirs.state_dict_metadata.values():
        # From torch 2.15 on: the strides of rank 0's own tensor, and with our planner C order.
        if getattr(getattr(entry, "properties", None), "strides", None) is not None:
            entry.properties.strides = torch.empty(entry.size, device="meta").stride()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    provenance = ours.planner_data.pop(RESERVED_KEY)
    assert set(provenance) == {"save_id", "versions", "world_size", "cuts", "renames"}
    assert ours.planner_data == (theirs.planner_data or {})
    records = [index for index in ours.storage_data if index not in theirs.storage_data]
    assert all(index.fqn.startswith(ID_PREFIX) for index in records)
    nbytes = sum(ours.storage_data.pop(index).length for index in records)
    for index, info in ours.storage_data.items():
        assert info == dataclasses.replace(
            theirs.storage_data[index], offset=theirs.storage_data[index].offset + nbytes
        )
    assert len(ours.storage_data) == len(theirs.storage_data)


def test_every_option_of_torch_s_planners_is_there_with_its_default() -> None:
    for ours, theirs in (
        (PlacementSavePlanner, DefaultSavePlanner),
        (PlacementLoadPlanner, DefaultLoadPlanner),
    ):
        expected = inspect.signature(theirs.__init__).parameters
        found = inspect.signature(ours.__init__).parameters
        for name, parameter in expected.items():
            if name != "self":
                assert found[name].default == parameter.default, name
                assert found[name].kind is inspect.Parameter.KEYWORD_ONLY, name
        assert issubclass(ours, theirs)


def test_state_dicts_that_are_not_flattened_round_trip(tmp_path: Path) -> None:
    state_dict = {"w": torch.arange(6.0), "group": {"lr": 0.1}, "step": 3}
    save(tmp_path, dict(state_dict), PlacementSavePlanner(flatten_state_dict=False))
    for planner in (DefaultLoadPlanner, PlacementLoadPlanner):
        template = {"w": torch.zeros(6), "group": {"lr": 9.9}, "step": 9}
        made = planner(flatten_state_dict=False)
        load(tmp_path, template, made)
        assert torch.equal(template["w"], state_dict["w"])
        assert made.state_dict["group"] == {"lr": 0.1}
        assert made.state_dict["step"] == 3
    assert template["group"] == {"lr": 0.1}
    assert template["step"] == 3


class Unlisted:
    """A value of a type that torch replaces by None before it loads."""


def test_objects_go_under_the_keys_that_are_there_which_need_not_be_strings(
    tmp_path: Path,
) -> None:
    """Torch puts them under a second key, the text of the first."""

    def state_dict(value: int) -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30] * value)
        state = {"state": {0: {"step": value}, 10: {"step": value}}, "groups": [{1: value}]}
        others = {None: value, True: [value], (1, 2): {"x": value}, -3: value}
        return {"scheduler": scheduler.state_dict(), "optim": state, "others": others}

    save(tmp_path, state_dict(2), PlacementSavePlanner())
    template = state_dict(3)
    kept = Unlisted()
    template["others"][5] = kept
    load(tmp_path, template, PlacementLoadPlanner(optional=["others.5"]))
    assert template["others"].pop(5) is kept
    assert template == state_dict(2)


def test_rules_speak_for_keys_that_are_not_flattened(tmp_path: Path) -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    world = World(2)

    def rules(rank: int) -> PlacementRules:
        placement = CheckpointPlacement(world.mesh(rank, ep=2), {"ep": Shard(0)})
        return PlacementRules({"layers.experts.w1": placement})

    key = "layers.experts.w1"
    world.save(
        tmp_path,
        lambda rank: {key: whole.chunk(2)[rank].clone()},
        lambda rank: PlacementSavePlanner(rules(rank), flatten_state_dict=False),
    )
    assert torch.equal(load(tmp_path, {key: torch.zeros(4, 2)})[key], whole)
    loaded = world.load(
        tmp_path,
        lambda rank: {key: torch.zeros(2, 2)},
        lambda rank: PlacementLoadPlanner(rules(rank), flatten_state_dict=False),
    )
    assert [torch.equal(loaded[r][key], whole.chunk(2)[r]) for r in range(2)] == [True, True]


def expert_rules(world: World, rank: int) -> PlacementRules:
    mesh = world.mesh(rank, ep=world.size)
    return PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})


def test_planners_travel_with_their_rules_and_options(tmp_path: Path) -> None:
    """async_save in a process pickles the planner; before a save, and after one."""
    world = World(2)
    whole = torch.arange(12.0).reshape(4, 3)
    planners = [
        PlacementSavePlanner(expert_rules(world, rank), digests="full", waive={"experts": "a test"})
        for rank in range(2)
    ]
    for step in range(2):
        planners = [pickle.loads(pickle.dumps(planner)) for planner in planners]
        path = tmp_path / str(step)
        world.save(
            path, lambda rank: {"experts": whole.chunk(2)[rank].clone()}, planners.__getitem__
        )
        assert torch.equal(load(path, {"experts": torch.zeros(4, 3)})["experts"], whole)
        assert planners[0].digests == "full"
        assert planners[0].waive == {"experts": "a test"}
    loading = [
        pickle.loads(pickle.dumps(PlacementLoadPlanner(expert_rules(world, rank), cast="error")))
        for rank in range(2)
    ]
    loaded = world.load(path, lambda rank: {"experts": torch.zeros(2, 3)}, loading.__getitem__)
    assert all(torch.equal(loaded[r]["experts"], whole.chunk(2)[r]) for r in range(2))
    assert pickle.loads(pickle.dumps(loading[0])).cast == "error"


class Labelled(torch.Tensor):
    """A class that no reader of files is told of."""


@pytest.mark.parametrize("kind", [Labelled, torch.nn.Buffer, torch.nn.Parameter])
@pytest.mark.parametrize("shape", [(3,), (300, 40)])
def test_tensors_of_another_class_are_stored_as_plain_ones(
    tmp_path: Path, kind: Any, shape: tuple[int, ...]
) -> None:
    values = {f"w.{at}": torch.full(shape, at + 1.0) for at in range(5)}

    def of_kind(tensor: torch.Tensor) -> torch.Tensor:
        is_class = kind is Labelled
        made: torch.Tensor = tensor.clone().as_subclass(kind) if is_class else kind(tensor.clone())
        return made

    for writer in (FileSystemWriter(tmp_path / "a"), PlacementFileSystemWriter(tmp_path / "b")):
        saved = {key: of_kind(value) for key, value in values.items()}
        dcp.save(saved, storage_writer=writer, planner=PlacementSavePlanner(), no_dist=True)
        plain = {key: torch.zeros(shape) for key in values}
        assert_same(load(writer.path, plain), values)
        again = {key: of_kind(torch.zeros(shape)) for key in values}
        load(writer.path, again, PlacementLoadPlanner())
        assert all(torch.equal(again[key].detach(), values[key]) for key in values)


def test_a_directory_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"step-\xff")
    save(path, {"w": torch.ones(3)}, PlacementSavePlanner())
    assert torch.equal(load(path, {"w": torch.zeros(3)})["w"], torch.ones(3))


@of_torch_s_own_making
@pytest.mark.usefixtures("one_rank_group")
def test_meta_templates_are_made_as_torch_makes_them(tmp_path: Path) -> None:
    save(tmp_path, mixed())
    found = []
    for planner in LoadPlanners:
        with torch.device("meta"):
            template: dict[str, Any] = {
                "model": {"w": torch.empty(5, 3), "half": torch.empty(5, dtype=torch.bfloat16)},
                "tensors": [torch.empty(3), torch.empty(4)],
            }
        dcp.load(template, checkpoint_id=tmp_path, planner=planner())
        found.append(template)
        assert template["model"]["w"].device.type == "cpu"
        assert torch.equal(template["model"]["w"], mixed()["model"]["w"])
    assert_same(found[0], found[1])


@of_torch_s_own_making
@pytest.mark.usefixtures("one_rank_group")
def test_meta_templates_with_rules_take_the_rank_s_part(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    save(tmp_path, {"experts": whole})
    mesh = MeshCoordinate(("ep",), (2,), (1,))
    rules = PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})
    state = {"experts": torch.empty(2, 3, device="meta")}
    dcp.load(state, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(rules))
    assert torch.equal(state["experts"], whole[2:])


@pytest.mark.parametrize("kind", [PlacementSavePlanner, PlacementLoadPlanner])
def test_m55_a_report_before_planning_says_so(tmp_path: Path, kind: Any) -> None:
    planner = kind()
    assert "not planned yet" in str(planner.report)
    planner.set_up_planner({"w": torch.ones(2)})
    assert "not planned yet" in str(planner.report)
    state = {"w": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    if kind is PlacementSavePlanner:
        dcp.save(state, checkpoint_id=tmp_path / "new", planner=planner, no_dist=True)
    else:
        dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert "not planned yet" not in str(planner.report)


@pytest.mark.parametrize("loader", LoadPlanners)
def test_m72_unflattened_state_keeps_keys_that_are_numbers(loader: Any, tmp_path: Path) -> None:
    def stepped(steps: int) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        optimizer = torch.optim.AdamW([weight])
        for _ in range(steps):
            weight.sum().backward()
            optimizer.step()
        return optimizer

    saved = stepped(3).state_dict()
    state = {"optim": saved, "by number": {7: {"empty": {}, (1, 2): torch.ones(2)}}}
    dcp.save(state, checkpoint_id=tmp_path, planner=PlacementSavePlanner(flatten_state_dict=False))
    fresh = stepped(1)
    target = {"optim": fresh.state_dict(), "by number": {7: None}}
    planner = loader(flatten_state_dict=False)
    dcp.load(target, checkpoint_id=tmp_path, planner=planner)
    found = planner.state_dict
    assert list(found["optim"]["state"]) == [0]
    fresh.load_state_dict(found["optim"])
    (state_of_weight,) = fresh.state.values()
    assert state_of_weight["step"] == 3
    assert torch.equal(state_of_weight["exp_avg"], saved["state"][0]["exp_avg"])
    assert list(found["by number"]) == [7]
    assert found["by number"][7]["empty"] == {}
    assert torch.equal(found["by number"][7][1, 2], torch.ones(2))
    if loader is PlacementLoadPlanner:
        assert list(target["optim"]["state"]) == [0]


def test_keys_that_are_one_text_are_refused(tmp_path: Path) -> None:
    """A checkpoint has texts: of ``0`` and ``"0"`` one was lost. ``dcp.load`` cannot sort them."""
    state: Any = {0: torch.ones(2), "0": torch.zeros(2)}
    planner = PlacementSavePlanner(flatten_state_dict=False)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert "0 and '0' are keys of one dict" in str(caught.value.failures[0][0])
    dcp.save({"0": torch.ones(2)}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        World(1).load(
            tmp_path,
            lambda rank: dict(state),
            lambda rank: PlacementLoadPlanner(flatten_state_dict=False),
        )
    assert "0 and '0' are keys of one dict" in str(caught.value.failures[0][0])


@pytest.mark.filterwarnings("ignore:The function definition")  # torch's, of the first of them
def test_a_planner_of_the_other_side_and_a_class_are_named(tmp_path: Path) -> None:
    state, saves, kind = {"w": torch.ones(2)}, PlacementSavePlanner(), PlacementLoadPlanner
    dcp.save(state, checkpoint_id=tmp_path, planner=saves, no_dist=True)
    mistakes: list[tuple[Any, Any, str]] = [
        (dcp.save, kind(), "planner= of a save is a load planner"),
        (dcp.load, kind, "planner= is the class of a load planner"),
        (dcp.load, saves, "planner= of a load is a save planner"),
    ]
    for call, planner, message in mistakes:
        with pytest.raises(CheckpointException) as caught:
            call(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        assert message in str(caught.value.failures[0][0])
