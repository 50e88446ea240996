"""Planners of frameworks under ``installed``: each rebuilt as small as its real class allows.

The truth is the whole tensor, by plain slicing; what was saved is read by torch in one process.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import read_whole
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    _EmptyStateDictLoadPlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementLoadPlanner,
    Placements,
    PlacementSavePlanner,
    installed,
)
from dcp_placements.adoption import calls_super, ours_of
from dcp_placements.installation import Serving
from dcp_placements.testing import World, cut

EXPERTS = torch.arange(12 * 3.0).reshape(12, 3)
DENSE = torch.arange(5.0)


def placements(world: World, rank: int) -> Placements:
    mesh = world.mesh(rank, ep=world.size)
    return Placements({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})


def served(world: World, kind: str, theirs: Callable[[], Any]) -> Callable[[int], Any]:
    """Return the planner that a rank's call gets in place of a framework's, under ``strict``."""
    return lambda rank: Serving(lambda: placements(world, rank), strict=True).planner(
        kind, theirs()
    )


def part(world: World, rank: int) -> torch.Tensor:
    return cut(EXPERTS, [Shard(0)], (world.size,), (rank,))


def state(world: World, rank: int) -> dict[str, Any]:
    experts = part(world, rank)
    return {"model": {"experts.w1": experts, "dense": DENSE.clone()}, "step": 3}


def empty(world: World, rank: int) -> dict[str, Any]:
    experts = torch.zeros_like(part(world, rank))
    return {"model": {"experts.w1": experts, "dense": torch.zeros(5)}, "step": 0}


def saved(path: Path, theirs: Callable[[], Any], size: int = 2) -> list[Any]:
    """Save by a framework's planner on some ranks; compare the file with the truth."""
    world = World(size)
    planners = world.save(path, lambda rank: state(world, rank), served(world, "save", theirs))
    whole = read_whole(path)
    assert torch.equal(whole["model.experts.w1"], EXPERTS)
    assert torch.equal(whole["model.dense"], DENSE)
    return planners


def loaded(path: Path, theirs: Callable[[], Any], size: int = 3) -> None:
    """Load by a framework's planner on another number of ranks, and compare with the truth."""
    world = World(size)
    found = world.load(path, lambda rank: empty(world, rank), served(world, "load", theirs))
    for rank in range(size):
        assert torch.equal(found[rank]["model"]["experts.w1"], part(world, rank))
        assert torch.equal(found[rank]["model"]["dense"], DENSE)
        assert found[rank]["step"] == 3


class CachesPlans(DefaultSavePlanner):
    """As NeMo AutoModel's: options alone, and a name of its own in the cache of plans."""

    def __init__(self, namespace: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = f"{namespace}:model"


class ModelMustBeThere(DefaultLoadPlanner):
    """As VeOmni's: optimizer state may be missing, and no key of the model."""

    def __init__(self, strict_model: bool = True) -> None:
        super().__init__(allow_partial_load=True)
        self.strict_model = strict_model

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        paths = self.mappings.items()
        self.missing = [key for key, path in paths if path[0] == "model" and key not in stored]
        if self.strict_model and self.missing:
            raise RuntimeError(f"the checkpoint has no {self.missing}")
        return plan


class ShapesAndFloat8(DefaultLoadPlanner):
    """As Megatron's ``MCoreLoadPlanner``: shapes compared before, tensors swapped while reading."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        self._swapped: tuple[ReadItem, torch.Tensor] | None = None

    @contextmanager
    def _compared(self) -> Iterator[None]:
        assert self.metadata is not None
        for key, shape in self.shapes.items():
            assert tuple(self.metadata.state_dict_metadata[key].size) == shape
        yield

    def create_local_plan(self) -> LoadPlan:
        with self._compared():
            local_plan = super().create_local_plan()
        return local_plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = super().resolve_tensor(read_item)
        self._swapped = (read_item, target)
        return torch.empty_like(target)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert self._swapped is not None
        item, target = self._swapped
        assert item is read_item
        self._swapped = None
        return super().commit_tensor(read_item, target.copy_(tensor))


class Suffixed(DefaultSavePlanner):
    """As in Composer's tests, and torch's documentation: other names in the file."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        state_dict = {f"saved_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(
            state_dict=state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator
        )


class Packed(DefaultSavePlanner):
    """As Megatron's ``MCoreSavePlanner``: it makes its write items itself."""

    def create_local_plan(self) -> SavePlan:
        self.plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        return self.plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


def test_a_planner_with_options_of_its_own_saves_all_experts(tmp_path: Path) -> None:
    planners = saved(tmp_path, lambda: CachesPlans("run-1"))
    for planner in planners:
        assert isinstance(planner, CachesPlans)
        assert isinstance(planner, PlacementSavePlanner)
        assert type(planner).__name__ == "CachesPlans"
        assert planner._cached_plans_key == "run-1:model"
    assert "12, 3" in str(ours_of(planners[0]).report)
    loaded(tmp_path, DefaultLoadPlanner)


def test_stock_would_have_lost_half_of_them(tmp_path: Path) -> None:
    world = World(2)
    world.save(tmp_path, lambda rank: state(world, rank), lambda rank: DefaultSavePlanner())
    assert read_whole(tmp_path)["model.experts.w1"].shape == (6, 3)


def test_a_check_of_theirs_holds_and_reads_what_torchs_planner_has(tmp_path: Path) -> None:
    saved(tmp_path, DefaultSavePlanner)
    loaded(tmp_path, ModelMustBeThere)
    theirs = ModelMustBeThere(strict_model=False)
    world = World(1)

    def with_more(rank: int) -> dict[str, Any]:
        more = empty(world, rank)
        more["model"]["bias"] = torch.ones(2)
        return more

    found = world.load(tmp_path, with_more, served(world, "load", lambda: theirs))
    assert torch.equal(found[0]["model"]["experts.w1"], EXPERTS)
    assert found[0]["model"]["bias"].tolist() == [1, 1]
    assert theirs.missing == ["model.bias"]  # on the framework's own instance
    theirs.strict_model = True
    with pytest.raises(CheckpointException, match=r"the checkpoint has no \['model\.bias'\]"):
        world.load(tmp_path, with_more, served(world, "load", lambda: theirs))


def test_tensors_that_they_swap_while_reading_arrive(tmp_path: Path) -> None:
    saved(tmp_path, DefaultSavePlanner)
    loaded(tmp_path, lambda: ShapesAndFloat8({"model.experts.w1": (12, 3)}))
    with pytest.raises(CheckpointException, match="AssertionError"):
        loaded(tmp_path, lambda: ShapesAndFloat8({"model.experts.w1": (12, 4)}))


def test_keys_that_they_rename_have_the_rules_of_their_new_names(tmp_path: Path) -> None:
    world = World(2)
    world.save(tmp_path, lambda rank: state(world, rank), served(world, "save", Suffixed))
    assert torch.equal(read_whole(tmp_path)["saved_model.experts.w1"], EXPERTS)


@pytest.mark.parametrize("call", ["save", "load"])
def test_the_real_calls_of_torch_are_served(tmp_path: Path, call: str) -> None:
    """In one process, where ``installed`` is what a framework's own call meets."""
    theirs: Any = CachesPlans("x") if call == "save" else ModelMustBeThere(False)
    with installed(Placements({"model.w": None}, rename=None), strict=True):
        if call == "save":
            dcp.save({"model": {"w": DENSE}}, checkpoint_id=tmp_path, planner=theirs)
            dcp.save({"model": {"w": DENSE + 1}}, checkpoint_id=tmp_path, planner=theirs)
            assert torch.equal(read_whole(tmp_path)["model.w"], DENSE + 1)
            # As torch's planner would have them there.
            assert theirs.mappings == {"model.w": ("model", "w")}
            assert "model.w" in theirs.metadata.state_dict_metadata
        else:
            dcp.save({"model": {"w": DENSE}}, checkpoint_id=tmp_path)
            target = {"model": {"w": torch.zeros(5), "v": torch.ones(1)}}
            dcp.load(target, checkpoint_id=tmp_path, planner=theirs)
            assert torch.equal(target["model"]["w"], DENSE)
            assert theirs.missing == ["model.v"]
            assert theirs.original_state_dict["model"]["w"] is target["model"]["w"]


class Clashing(DefaultSavePlanner):
    """Names of its own that our planner has for other things."""

    copies = 7
    report = "none of ours"

    def __init__(self) -> None:
        super().__init__()
        self.rules = ["no rule"]
        self.rename = "v2"
        self.step = "three"
        self._save = {"a": 1}

    def _agree(self) -> str:
        return self.rename

    def create_local_plan(self) -> SavePlan:
        assert (self.rules, self.rename, self.step) == (["no rule"], "v2", "three")
        assert (self._save, self._agree(), self.copies) == ({"a": 1}, "v2", 7)
        self.whole, self.digests = "wholly", 5
        self.report = "still none"
        return super().create_local_plan()


class ClashingLoad(DefaultLoadPlanner):
    """The same of a load."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = self.rename = self.cast = self._load = self._policy = self.begin = 0

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.report = self.exchange = "theirs"
        return super().finish_plan(new_plan)


def test_attributes_of_theirs_may_have_the_names_of_ours(tmp_path: Path) -> None:
    planners = saved(tmp_path, Clashing)
    theirs = planners[0]
    assert (theirs.whole, theirs.digests, theirs.report) == ("wholly", 5, "still none")
    assert ours_of(theirs).digests == "sampled"
    assert "12, 3" in str(ours_of(theirs).report)
    loaded(tmp_path, ClashingLoad)


class ChangesOptions(DefaultLoadPlanner):
    """Sets an option of torch's where it plans."""

    def create_local_plan(self) -> LoadPlan:
        self.allow_partial_load = True
        return super().create_local_plan()


def test_options_that_they_set_while_planning_count(tmp_path: Path) -> None:
    saved(tmp_path, DefaultSavePlanner)
    world, theirs = World(1), ChangesOptions()

    def with_more(rank: int) -> dict[str, Any]:
        return {**empty(world, rank), "new": torch.ones(2)}

    found = world.load(tmp_path, with_more, served(world, "load", lambda: theirs))
    assert found[0]["new"].tolist() == [1, 1]
    assert theirs.allow_partial_load


def test_options_of_installed_do_not_stay_on_the_frameworks_instance(tmp_path: Path) -> None:
    theirs = ShapesAndFloat8({})
    dcp.save({"w": DENSE}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(5), "new": torch.ones(2)}
    with installed(Placements(None), load={"allow_partial_load": True}, strict=True):
        dcp.load(target, checkpoint_id=tmp_path, planner=theirs)
    assert torch.equal(target["w"], DENSE)
    assert not theirs.allow_partial_load


class OtherValues(DefaultSavePlanner):
    """Gives other tensors than the state dict has, by each of the hooks for one item."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        return value + 1 if isinstance(value, torch.Tensor) else value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        return data * 2 if isinstance(data, torch.Tensor) else data

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data + 3 if isinstance(data, torch.Tensor) else data


class OtherTargets(DefaultLoadPlanner):
    """The same of a load."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        self.seen.append(f"lookup {index.fqn}")
        return super().lookup_tensor(index)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        self.seen.append(f"transform {read_item.dest_index.fqn}")
        moved: torch.Tensor = super().transform_tensor(read_item, tensor)
        return moved

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.seen.append(f"bytes {read_item.dest_index.fqn}")
        super().load_bytes(read_item, value)


def test_what_they_make_of_each_item_is_written_and_read(tmp_path: Path) -> None:
    world = World(2)
    world.save(tmp_path, lambda rank: state(world, rank), served(world, "save", OtherValues))
    assert torch.equal(read_whole(tmp_path)["model.experts.w1"], (EXPERTS + 1) * 2 + 3)
    planners = []

    def kept(rank: int) -> Any:
        planners.append(served(world, "load", OtherTargets)(rank))
        return planners[-1]

    found = world.load(tmp_path, lambda rank: empty(world, rank), kept)
    for rank in range(2):
        expected = (part(world, rank) + 1) * 2 + 3
        assert torch.equal(found[rank]["model"]["experts.w1"], expected)
        seen = {*planners[rank].seen}
        assert {"lookup model.experts.w1", "transform model.experts.w1", "bytes step"} <= seen


class Casts(DefaultSavePlanner):
    """Writes another dtype than the metadata say."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        return data.half() if isinstance(data, torch.Tensor) else data


def test_data_of_another_dtype_than_the_metadata_s_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"torch\.float16 of shape \(6, 3\)"):
        saved(tmp_path, Casts)
    assert not (tmp_path / ".metadata").exists()


class Sometimes(DefaultLoadPlanner):
    """As a planner of Composer's tests: one branch sets the planner up by itself."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if "model" not in state_dict:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata


def test_a_branch_without_super_is_refused_when_it_was_taken(tmp_path: Path) -> None:
    saved(tmp_path, DefaultSavePlanner)
    with pytest.raises(CheckpointException, match=r"Sometimes\.set_up_planner\(\) returned"):
        loaded(tmp_path, Sometimes)


class ByName(DefaultSavePlanner):
    """Calls torch's class by name, which is no call of ours."""

    def create_local_plan(self) -> SavePlan:
        return DefaultSavePlanner.create_local_plan(self)


class Deeper(CachesPlans):
    """Overrides a hook two classes below torch's."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        super().__str__()
        return new_plan


class Inner(DefaultSavePlanner):
    """Overrides what ours does not call."""

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return super()._dedup_save_plans(all_plans)


class Slotted(DefaultSavePlanner):
    """Keeps its attributes elsewhere."""

    __slots__ = ("limit",)


class Alone(SavePlanner):
    """No planner of torch's below it."""

    def _hook(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    set_up_planner = create_local_plan = create_global_plan = finish_plan = resolve_data = _hook


class WholeFile(_EmptyStateDictLoadPlanner):
    """Takes what the file has."""


class Sized(DefaultLoadPlanner):
    """As torch's planner for Hugging Face files: reads without comparing sizes."""

    def create_local_plan(self) -> LoadPlan:
        return create_default_local_load_plan(self.state_dict, self.metadata, True)


class Padded(DefaultLoadPlanner):
    """As Megatron's, where the padding of a vocabulary may have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.allow_shape_mismatch_sharded_tensors = {"embedding": DENSE}


LEFT_ALONE = [
    (Packed(), r"create_local_plan\(\) without super\(\).*transform_object\(\) without super"),
    (ByName(), r"ByName.*\n.*overrides create_local_plan\(\) without super"),
    (Deeper("x"), r"Deeper.*\n.*overrides finish_plan\(\) without super"),
    (Inner(), r"overrides _dedup_save_plans\(\), which planners of this package do not call"),
    (Slotted(), "__slots__"),
    (Alone(), "derives from no DefaultSavePlanner"),
    (WholeFile(), "whatever keys the checkpoint has"),
    (Sized(), r"Sized.*\n.*overrides create_local_plan\(\) without super"),
]


@pytest.mark.parametrize(("theirs", "text"), LEFT_ALONE, ids=lambda value: type(value).__name__)
def test_what_cannot_be_adopted_is_named_with_the_hook(theirs: Any, text: str) -> None:
    kind = "load" if isinstance(theirs, DefaultLoadPlanner) else "save"
    with pytest.warns(UserWarning, match=text):
        assert Serving(lambda: Placements(None)).planner(kind, theirs) is theirs
    with pytest.raises(PlacementError, match=text):
        Serving(lambda: Placements(None), strict=True).planner(kind, theirs)


@pytest.mark.filterwarnings("error")
def test_a_load_whose_padding_may_differ_is_named_where_something_is_declared() -> None:
    """Under the alarm it is right as it is: its tensors say where they are."""
    theirs, text = Padded(), "lets shapes differ from the checkpoint's"
    assert Serving(lambda: Placements(None)).planner("load", theirs) is theirs
    with pytest.warns(UserWarning, match=text):
        assert Serving(lambda: Placements({"w": None})).planner("load", theirs) is theirs
    with pytest.raises(PlacementError, match=text):
        Serving(lambda: Placements(None), strict=True).planner("load", theirs)


def test_a_hook_on_the_instance_is_named() -> None:
    theirs: Any = CachesPlans("x")
    theirs.resolve_data = lambda item: item
    with pytest.raises(PlacementError, match=r"has resolve_data\(\) on the instance"):
        Serving(lambda: Placements(None), strict=True).planner("save", theirs)


def test_a_call_of_super_is_seen_in_any_form() -> None:
    def wrapper(function: Any) -> Any:
        return lambda self, plan: function(self, plan)

    class Forms(DefaultSavePlanner):
        def plain(self) -> Any:
            return super().finish_plan  # type: ignore[safe-super]

        def named(self, new_plan: SavePlan) -> SavePlan:
            return super(Forms, self).finish_plan(replace(new_plan, usable=True))  # noqa: UP008

        @torch.no_grad()
        def wrapped(self, new_plan: SavePlan) -> SavePlan:
            return super().finish_plan(new_plan)

        def within(self, new_plan: SavePlan) -> Any:
            def later() -> SavePlan:
                return super(Forms, self).finish_plan(new_plan)

            return later()

        @wrapper
        def hidden(self, new_plan: SavePlan) -> SavePlan:
            return super().finish_plan(new_plan)

        def other(self, new_plan: SavePlan) -> SavePlan:
            super().__init__()
            return self.finish_plan(new_plan)

    hooks = vars(Forms)
    seen = [name for name in hooks if calls_super(hooks[name], "finish_plan")]
    assert seen == ["plain", "named", "wrapped", "within"]


class TwoBases:
    """A mixin of a framework, with a hook, beside torch's planner."""

    def finish_plan(self, new_plan: Any) -> Any:
        self.finished = True
        return super().finish_plan(new_plan)  # type: ignore[misc]


class Mixed(TwoBases, DefaultSavePlanner):
    """Gets a hook from a class that derives from none of torch's."""


def test_a_hook_of_a_mixin_is_called(tmp_path: Path) -> None:
    assert all(planner.finished for planner in saved(tmp_path, Mixed))


def test_an_adopted_planner_is_sent_to_another_process(tmp_path: Path) -> None:
    """As ``async_save`` in a process does, NeMo AutoModel's way to save."""
    world = World(2)

    def sent(rank: int) -> Any:
        return pickle.loads(pickle.dumps(served(world, "save", OtherValues)(rank)))

    planners = world.save(tmp_path, lambda rank: state(world, rank), sent)
    assert torch.equal(read_whole(tmp_path)["model.experts.w1"], (EXPERTS + 1) * 2 + 3)
    assert isinstance(planners[0], OtherValues)
    again = pickle.loads(pickle.dumps(served(world, "load", ModelMustBeThere)(0)))
    assert isinstance(again, PlacementLoadPlanner)
