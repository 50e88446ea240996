"""``installed``: frameworks that pass no planner save and load by the Placements of the context."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from dcp_placements import (
    MeshCoordinate,
    PlacementError,
    PlacementLoadPlanner,
    Placements,
    PlacementSavePlanner,
    installed,
)

NAMES = ("_save_state_dict", "_ThreadBasedAsyncCheckpointExecutor")
PLACEMENTS = Placements(None)
STATE = {"model": {"w": torch.arange(6.0)}, "step": 3}


class Writer(dcp.FileSystemWriter):
    """Keeps the planner that it is given."""

    planner: Any = None

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.planner = planner
        return super().write_data(plan, planner)


class Reader(dcp.FileSystemReader):
    """Keeps the planner that it is given."""

    planner: Any = None

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.planner = planner
        return super().read_data(plan, planner)


class TheirSavePlanner(DefaultSavePlanner):
    """A framework's own."""


class TheirLoadPlanner(DefaultLoadPlanner):
    """A framework's own."""


def seams() -> list[Any]:
    found = [getattr(state_dict_saver, name) for name in NAMES]
    return [*found, state_dict_loader._load_state_dict]


def test_a_save_and_a_load_without_planner_use_ours(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    target = {"model": {"w": torch.zeros(6)}, "step": 0}
    with installed(PLACEMENTS):
        save(STATE, storage_writer=writer)
        dcp.load(target, storage_reader=reader)
    assert type(writer.planner) is PlacementSavePlanner
    assert type(reader.planner) is PlacementLoadPlanner
    assert target["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert target["step"] == 3


def test_rules_and_rename_of_the_placements_apply(tmp_path: Path) -> None:
    placements = Placements({"renamed.w": None}, rename=lambda key: key.replace("model", "renamed"))
    with installed(placements):
        dcp.save({"model": {"w": torch.arange(6.0)}}, checkpoint_id=tmp_path)
    plain = {"renamed.w": torch.zeros(6)}
    dcp.load(plain, checkpoint_id=tmp_path)
    assert plain["renamed.w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_deprecated_save_state_dict_is_served_too(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    with installed(PLACEMENTS), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dcp.save_state_dict(STATE, writer, None, 0, True, DefaultSavePlanner())
    assert type(writer.planner) is PlacementSavePlanner


def test_options_of_torchs_default_planners_are_carried_over(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    theirs = DefaultSavePlanner(flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
    target = {"model": {"w": torch.zeros(6)}, "new": torch.ones(2)}
    with installed(PLACEMENTS):
        dcp.save(STATE, storage_writer=writer, planner=theirs)
        dcp.load(target, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert (writer.planner.flatten_sharded_tensors, writer.planner.flatten_state_dict) == (
        False,
        True,
    )
    assert writer.planner.dedup_save_to_lowest_rank
    assert reader.planner.allow_partial_load
    assert target["new"].tolist() == [1, 1]


def test_m82_options_of_installed_reach_every_save_and_load(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    target = {"model": {"w": torch.zeros(6)}, "new": torch.ones(2)}
    options = {
        "save": {"on_conflict": "warn", "waive": {"w": "drifts"}},
        "load": {"allow_partial_load": True, "cast": "allow"},
    }
    with installed(PLACEMENTS, **options):
        dcp.save(STATE, storage_writer=writer)
        dcp.load(target, storage_reader=reader, planner=DefaultLoadPlanner())
    assert (writer.planner.on_conflict, writer.planner.waive) == ("warn", {"w": "drifts"})
    assert reader.planner.allow_partial_load
    assert target["new"].tolist() == [1, 1]
    assert target["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(PlacementError, match=r"installed\(save=.*'digest'"):
        installed(PLACEMENTS, save={"digest": "full"})
    with pytest.raises(PlacementError, match="on_conflict='never'"):
        installed(PLACEMENTS, save={"on_conflict": "never"})


@pytest.mark.parametrize("other", [Placements({"w": None}), Placements(None)])
def test_m83_another_declaration_of_another_thread_is_refused(other: Placements) -> None:
    """A thread of a framework uses the one that there is; a second one would change it."""
    refused: list[str] = []

    def enter() -> None:
        try:
            with installed(other):
                refused.append("entered")
        except PlacementError as error:
            refused.append(str(error))

    with installed(PLACEMENTS):
        with installed(other):  # of one thread they nest
            pass
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert (refused == ["entered"]) == (other == PLACEMENTS)
    assert refused == ["entered"] or "another thread is inside installed()" in refused[0]
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert refused[1] == "entered"


@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_frameworks_own_planner_is_left_alone_and_named(tmp_path: Path, kind: str) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path)
    writer, reader = Writer(tmp_path), Reader(tmp_path)

    def call() -> Any:
        if kind == "save":
            dcp.save(STATE, storage_writer=writer, planner=TheirSavePlanner())
            return writer.planner
        target = {"model": {"w": torch.zeros(6)}, "step": 0}
        dcp.load(target, storage_reader=reader, planner=TheirLoadPlanner())
        return reader.planner

    name = "TheirSavePlanner" if kind == "save" else "TheirLoadPlanner"
    with installed(PLACEMENTS), pytest.warns(UserWarning, match=name):
        assert type(call()).__name__ == name
    with installed(PLACEMENTS, strict=True), pytest.raises(PlacementError, match=name):
        call()


def test_a_planner_of_ours_that_is_passed_serves_as_it_is(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    ours = PlacementSavePlanner(digests="full")
    with installed(PLACEMENTS, strict=True):
        dcp.save(STATE, storage_writer=writer, planner=ours)
    assert writer.planner is ours


def test_a_planner_that_was_left_alone_before_is_named_and_refused_again(
    tmp_path: Path,
) -> None:
    theirs, ours = TheirSavePlanner(), PlacementSavePlanner()
    with installed(PLACEMENTS):
        for _ in range(2):
            dcp.save(STATE, checkpoint_id=tmp_path, planner=ours)
            with pytest.warns(UserWarning, match="TheirSavePlanner"):
                dcp.save(STATE, checkpoint_id=tmp_path, planner=theirs)
            with pytest.warns(UserWarning, match="TheirSavePlanner"):
                async_save(STATE, checkpoint_id=tmp_path, planner=theirs).result()
    with installed(PLACEMENTS, strict=True), pytest.raises(PlacementError, match="TheirSave"):
        dcp.save(STATE, checkpoint_id=tmp_path, planner=theirs)


def test_a_planner_that_has_no_hash_is_left_alone(tmp_path: Path) -> None:
    @dataclass
    class WithoutHash(DefaultSavePlanner):
        def __post_init__(self) -> None:
            super().__init__()

    with installed(PLACEMENTS), pytest.warns(UserWarning, match="WithoutHash"):
        dcp.save(STATE, checkpoint_id=tmp_path / "a", planner=WithoutHash())


def test_an_async_save_that_plans_after_the_context_is_ours(tmp_path: Path) -> None:
    left = threading.Event()

    class Late(Writer):
        """Waits, as the disk may, until the context is left."""

        def storage_meta(self) -> Any:
            assert left.wait(20)
            return super().storage_meta()

    writer = Late(tmp_path)
    with installed(PLACEMENTS):
        future = async_save(STATE, storage_writer=writer)
    left.set()
    future.result()
    assert type(writer.planner) is PlacementSavePlanner


def test_an_async_save_called_before_the_context_keeps_its_planner(tmp_path: Path) -> None:
    entered = threading.Event()

    class Late(Writer):
        """Begins, as a busy thread may, when the context is entered."""

        def reset(self, *args: Any, **kwargs: Any) -> None:
            assert entered.wait(20)
            super().reset(*args, **kwargs)

    writer = Late(tmp_path)
    future = async_save(STATE, storage_writer=writer)
    with installed(PLACEMENTS):
        entered.set()
        future.result()
    assert type(writer.planner) is DefaultSavePlanner


def test_what_was_there_is_restored_nested_reentered_and_after_errors(tmp_path: Path) -> None:
    before = seams()
    inner = Placements(None, rename=lambda key: f"inner.{key}")
    with installed(PLACEMENTS):
        assert seams() != before
        with installed(inner):
            dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "inner")
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "outer")
    assert seams() == before
    twice = installed(PLACEMENTS)
    with twice, installed(inner):
        with twice:
            dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "again")
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "left")
    assert seams() == before
    with pytest.raises(RuntimeError, match="its own"), installed(PLACEMENTS):
        raise RuntimeError("its own")
    assert seams() == before
    written = {"inner": "inner.w", "outer": "w", "again": "w", "left": "inner.w"}
    for place, key in written.items():
        metadata = dcp.FileSystemReader(tmp_path / place).read_metadata()
        assert list(metadata.state_dict_metadata) == [key]


def test_what_somebody_else_put_over_ours_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dict_saver, NAMES[0], getattr(state_dict_saver, NAMES[0]))
    calls = []
    with installed(PLACEMENTS):
        ours = getattr(state_dict_saver, NAMES[0])

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return ours(*args, **kwargs)

        setattr(state_dict_saver, NAMES[0], theirs)
    assert getattr(state_dict_saver, NAMES[0]) is theirs
    writer = Writer(tmp_path)
    dcp.save(STATE, storage_writer=writer)
    assert type(writer.planner) is DefaultSavePlanner
    assert calls == [1]


def test_rules_that_are_no_placements_are_refused() -> None:
    rules: Any = {"w": MeshCoordinate}
    with pytest.raises(PlacementError, match="Placements"), installed(rules):
        pass
