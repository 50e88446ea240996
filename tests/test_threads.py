"""Saves and loads at the same time, in threads of one process."""

from __future__ import annotations

import gc
import os
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import refusal

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.items import quiet_gc


def state(number: int) -> dict[str, torch.Tensor]:
    """Return small tensors and large ones, equal for no two numbers."""
    return {f"l{n}": torch.full((200, 3 + 200 * (n % 2)), number + n / 8) for n in range(8)}


def with_object(number: int) -> dict[str, Any]:
    return {**state(number), "step": number}


def in_two_threads(work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(work, number) for number in range(2)]:
            result.result()


class InTurn:
    """Two threads, of which the second begins when the first is at a step, and both meet later."""

    def __init__(self) -> None:
        self.first_is_there = Event()
        self.second_is_done = Event()
        self.both = Barrier(2, timeout=60)

    def meeting(self, kind: type, method: str, number: int) -> type:
        """Return a storage class that waits for that of the other thread before a step."""

        def step(storage: Any, *args: Any, **kwargs: Any) -> Any:
            if number == 0:
                self.first_is_there.set()
            self.both.wait()
            return getattr(kind, method)(storage, *args, **kwargs)

        return type(kind.__name__, (kind,), {method: step})

    def overtaken(self, kind: type, method: str) -> type:
        """Return a storage class that waits at a step until the other thread is done."""

        def step(storage: Any, *args: Any, **kwargs: Any) -> Any:
            self.first_is_there.set()
            assert self.second_is_done.wait(60)
            return getattr(kind, method)(storage, *args, **kwargs)

        return type(kind.__name__, (kind,), {method: step})

    def run(self, work: Callable[[int], None]) -> None:
        def second(number: int) -> None:
            if number == 1:
                assert self.first_is_there.wait(60)
            try:
                work(number)
            finally:
                if number == 1:
                    self.second_is_done.set()

        in_two_threads(second)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (dcp.FileSystemWriter, {}),
        (dcp.FileSystemWriter, {"thread_count": 2}),
        (PlacementFileSystemWriter, {}),
        (PlacementFileSystemWriter, {"thread_count": 3}),
    ],
)
def test_one_planner_writes_two_saves_at_a_time(
    tmp_path: Path, kind: type, options: dict[str, Any]
) -> None:
    """As ``async_save`` does, where the one before has not ended."""
    planner, threads = PlacementSavePlanner(), InTurn()

    def save(number: int) -> None:
        writer: Any = threads.meeting(kind, "write_data", number)
        storage = writer(tmp_path / str(number), **options)
        dcp.save(with_object(number), storage_writer=storage, planner=planner, no_dist=True)

    threads.run(save)
    for number in range(2):
        assert_saved(tmp_path / str(number), number)
    assert len(planner.report.keys) == 8


def assert_saved(path: Path, number: int) -> None:
    read: dict[str, Any] = {key: torch.zeros_like(value) for key, value in state(number).items()}
    read["step"] = -1
    dcp.load(read, checkpoint_id=path, no_dist=True)
    assert read.pop("step") == number
    assert [key for key in read if not torch.equal(read[key], state(number)[key])] == []


@pytest.mark.parametrize(
    "step", ["set_up_storage_writer", "prepare_local_plan", "prepare_global_plan"]
)
def test_a_save_whose_planner_another_thread_sets_up_while_it_plans_is_refused(
    tmp_path: Path, step: str
) -> None:
    planner, threads = PlacementSavePlanner(), InTurn()
    refused: list[str] = []

    def save(number: int) -> None:
        kind: Any = dcp.FileSystemWriter
        writer = threads.overtaken(kind, step) if number == 0 else kind
        storage, state_dict = writer(tmp_path / str(number)), with_object(number)
        call = partial(dcp.save, state_dict, storage_writer=storage, planner=planner, no_dist=True)
        refused.extend([refusal(call)] if number == 0 else [])
        if number == 1:
            call()

    threads.run(save)
    assert "another thread" in refused[0]
    assert "a planner for each thread" in refused[0]
    assert not (tmp_path / "0" / ".metadata").exists()
    assert_saved(tmp_path / "1", 1)


def test_a_hook_that_looks_up_tensors_of_an_earlier_save_is_refused(tmp_path: Path) -> None:
    """``lookup_object`` is given an index alone, which both saves have."""

    class Looks(PlacementSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            return super().lookup_object(index)

    planner = Looks()

    class Again(dcp.FileSystemWriter):
        def write_data(self, *args: Any) -> Any:
            dcp.save(state(1), checkpoint_id=tmp_path / "1", planner=planner, no_dist=True)
            return super().write_data(*args)

    writer = Again(tmp_path / "0")
    text = refusal(lambda: dcp.save(state(0), storage_writer=writer, planner=planner, no_dist=True))
    assert "set up again before a save " in text
    assert "lookup_object() of a subclass" in text
    read = {key: torch.zeros_like(value) for key, value in state(1).items()}
    dcp.load(read, checkpoint_id=tmp_path / "1", no_dist=True)
    assert [key for key in read if not torch.equal(read[key], state(1)[key])] == []


def test_a_hook_that_looks_up_memory_of_an_earlier_load_is_refused(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path, no_dist=True)

    class Looks(PlacementLoadPlanner):
        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return super().lookup_tensor(index)

    planner, later = Looks(), state(0)

    class Again(dcp.FileSystemReader):
        def read_data(self, *args: Any) -> Any:
            dcp.load(later, checkpoint_id=tmp_path, planner=planner, no_dist=True)
            return super().read_data(*args)

    first = state(0)
    text = refusal(
        lambda: dcp.load(first, storage_reader=Again(tmp_path), planner=planner, no_dist=True)
    )
    assert "set up again before a load " in text
    assert "lookup_tensor() of a subclass" in text
    assert [key for key in later if not torch.equal(later[key], state(1)[key])] == []
    assert [key for key in first if not torch.equal(first[key], state(0)[key])] == []


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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (dcp.FileSystemReader, {}),
        (PlacementFileSystemReader, {}),
        (PlacementFileSystemReader, {"thread_count": 3}),
    ],
)
def test_one_planner_reads_two_loads_at_a_time(
    tmp_path: Path, kind: type, options: dict[str, Any]
) -> None:
    planner, threads = PlacementLoadPlanner(), InTurn()
    for number in range(2):
        dcp.save(state(number), checkpoint_id=tmp_path / str(number), no_dist=True)

    def load(number: int) -> None:
        read = {key: torch.zeros_like(value) for key, value in state(number).items()}
        reader: Any = threads.meeting(kind, "read_data", number)
        storage = reader(tmp_path / str(number), **options)
        dcp.load(read, storage_reader=storage, planner=planner, no_dist=True)
        assert [key for key in read if not torch.equal(read[key], state(number)[key])] == []

    threads.run(load)


@pytest.mark.parametrize(
    "step", ["set_up_storage_reader", "prepare_local_plan", "prepare_global_plan"]
)
def test_a_load_whose_planner_another_thread_sets_up_while_it_plans_is_refused(
    tmp_path: Path, step: str
) -> None:
    planner, threads = PlacementLoadPlanner(), InTurn()
    dcp.save(state(2), checkpoint_id=tmp_path, no_dist=True)
    read = [state(0), state(1)]
    refused: list[str] = []

    def load(number: int) -> None:
        kind: Any = dcp.FileSystemReader
        reader = threads.overtaken(kind, step) if number == 0 else kind
        storage = reader(tmp_path)
        call = partial(dcp.load, read[number], storage_reader=storage, planner=planner)
        refused.extend([refusal(partial(call, no_dist=True))] if number == 0 else [])
        if number == 1:
            call(no_dist=True)

    threads.run(load)
    assert "another thread" in refused[0]
    for number, expected in ((0, state(0)), (1, state(2))):
        assert [key for key in expected if not torch.equal(read[number][key], expected[key])] == []


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
