"""Saves and loads at the same time, in threads of one process."""

from __future__ import annotations

import gc
import os
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, current_thread, main_thread
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.planning import Runs, quiet_gc


def state(number: int) -> dict[str, torch.Tensor]:
    """Return small tensors and large ones, equal for no two numbers."""
    return {f"l{n}": torch.full((200, 3 + 200 * (n % 2)), number + n / 8) for n in range(8)}


def with_object(number: int) -> dict[str, Any]:
    return {**state(number), "step": number}


def in_two_threads(work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(work, number) for number in range(2)]:
            result.result()


class Overtaken(Runs[Any]):
    """Another thread begins a run as soon as one thread has made it known."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "latest" and current_thread() is main_thread():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self.begin).result()


def test_a_thread_plans_its_own_run_though_another_begins_one_meanwhile() -> None:
    runs = Overtaken(object)
    run = runs.begin()
    assert run is runs.current() is not runs.latest


def meeting(kind: type, method: str) -> type:
    """Return a storage class that waits for that of the other thread before a step."""
    barrier = Barrier(2, timeout=60)

    def step(self: Any, *args: Any) -> Any:
        barrier.wait()
        return getattr(kind, method)(self, *args)

    return type(kind.__name__, (kind,), {method: step})


@pytest.mark.parametrize("step", ["prepare_local_plan", "prepare_global_plan", "write_data"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (dcp.FileSystemWriter, {}),
        (dcp.FileSystemWriter, {"thread_count": 2}),
        (PlacementFileSystemWriter, {}),
        (PlacementFileSystemWriter, {"thread_count": 3}),
    ],
)
def test_one_planner_saves_twice_at_a_time(
    tmp_path: Path, kind: type, options: dict[str, Any], step: str
) -> None:
    """As ``async_save`` does, where the one before has not ended."""
    planner = PlacementSavePlanner()
    writer: Any = meeting(kind, step)

    def save(number: int) -> None:
        storage = writer(tmp_path / str(number), **options)
        dcp.save(state(number), storage_writer=storage, planner=planner, no_dist=True)

    in_two_threads(save)
    for number in range(2):
        read = {key: torch.zeros_like(value) for key, value in state(number).items()}
        dcp.load(read, checkpoint_id=tmp_path / str(number), no_dist=True)
        assert [key for key in read if not torch.equal(read[key], state(number)[key])] == []
    # This thread has no save of its own: the report is that of the latest.
    assert len(planner.report.keys) == 8


def test_m77_a_writer_s_own_threads_write_the_save_that_they_belong_to(tmp_path: Path) -> None:
    """The first save writes in threads that begin when the second has been planned."""
    planner = PlacementSavePlanner()
    planned, written = Event(), Event()

    class First(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            planned.set()
            assert written.wait(60)
            return super().write_data(plan, OnlyInThreads(planner))

    class OnlyInThreads:
        """Has the data resolved by a thread that has planned nothing, as any of several may be."""

        def __init__(self, planner: Any) -> None:
            self.planner = planner

        def resolve_data(self, item: Any) -> Any:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self.planner.resolve_data, item).result()

    def save(number: int) -> None:
        if number == 0:
            storage: Any = First(tmp_path / "0", thread_count=2)
        else:
            assert planned.wait(60)
            storage = dcp.FileSystemWriter(tmp_path / "1", thread_count=2)
        dcp.save(with_object(number), storage_writer=storage, planner=planner, no_dist=True)
        written.set()

    in_two_threads(save)
    for number in range(2):
        read = {key: torch.zeros_like(value) for key, value in state(number).items()}
        read["step"] = -1
        dcp.load(read, checkpoint_id=tmp_path / str(number), no_dist=True)
        assert read.pop("step") == number
        assert [key for key in read if not torch.equal(read[key], state(number)[key])] == []


def test_a_plan_that_is_sent_has_no_tensors_and_a_planner_no_save(tmp_path: Path) -> None:
    sent = []

    class Looking(PlacementFileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            sent.append(len(pickle.dumps(plan)))
            copy = pickle.loads(pickle.dumps(plan))
            assert [item.index for item in copy.items] == [item.index for item in plan.items]
            sent.append(len(pickle.dumps(planner)))
            return super().write_data(plan, planner)

    for number in (1, 100):
        tensors = {f"l{n}": torch.ones(number, 256) for n in range(3)}
        dcp.save(
            tensors,
            storage_writer=Looking(tmp_path / str(number)),
            planner=PlacementSavePlanner(),
            no_dist=True,
        )
    assert abs(sent[0] - sent[2]) < 64
    assert max(sent) < 4096


@pytest.mark.parametrize("step", ["prepare_local_plan", "prepare_global_plan", "read_data"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (dcp.FileSystemReader, {}),
        (PlacementFileSystemReader, {}),
        (PlacementFileSystemReader, {"thread_count": 3}),
    ],
)
def test_one_planner_loads_twice_at_a_time(
    tmp_path: Path, kind: type, options: dict[str, Any], step: str
) -> None:
    planner = PlacementLoadPlanner()
    reader: Any = meeting(kind, step)
    for number in range(2):
        dcp.save(state(number), checkpoint_id=tmp_path / str(number), no_dist=True)

    def load(number: int) -> None:
        read = {key: torch.zeros_like(value) for key, value in state(number).items()}
        storage = reader(tmp_path / str(number), **options)
        dcp.load(read, storage_reader=storage, planner=planner, no_dist=True)
        assert [key for key in read if not torch.equal(read[key], state(number)[key])] == []

    in_two_threads(load)


def test_a_save_that_replaces_one_that_ended_meanwhile_warns(tmp_path: Path) -> None:
    """As ranks that all save with ``no_dist=True`` into one directory."""

    class Other(PlacementFileSystemWriter):
        def write_data(self, *args: Any) -> Any:
            dcp.save(state(1), storage_writer=PlacementFileSystemWriter(tmp_path), no_dist=True)
            return super().write_data(*args)

    with pytest.warns(UserWarning, match="another save into this directory ended .* is lost"):
        dcp.save(state(0), storage_writer=Other(tmp_path), no_dist=True)
    # A later save over a complete checkpoint is none of these.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.save(state(2), storage_writer=PlacementFileSystemWriter(tmp_path), no_dist=True)
    assert not [one for one in caught if "another save" in str(one.message)]


def test_the_garbage_collector_stays_off_until_the_last_thread_leaves_and_then_is_on() -> None:
    assert gc.isenabled()
    first, second = quiet_gc(), quiet_gc()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_process_forked_during_a_save_has_a_garbage_collector() -> None:
    """As a worker of a data loader has, which begins while ``async_save`` plans."""
    reader, writer = os.pipe()
    with quiet_gc():
        child = os.fork()
        if not child:
            before = gc.isenabled()
            with quiet_gc():
                inside = gc.isenabled()
            os.write(writer, bytes([before, inside, gc.isenabled()]))
            os._exit(0)
        assert not gc.isenabled()
    os.waitpid(child, 0)
    assert os.read(reader, 3) == bytes([True, False, True])
    os.close(reader)
    os.close(writer)
    assert gc.isenabled()
