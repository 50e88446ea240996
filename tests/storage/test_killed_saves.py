"""A save over an older checkpoint that is killed while ``.metadata`` is written: old or new."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementSavePlanner,
)
from dcp_placements.storage import writer
from dcp_placements.testing import World
from tests.storage_scenes import assert_index_agrees, blank, load, same, sharded, wholes


def save(path: Path, ranks: int, whole: dict[str, torch.Tensor], *, stock: bool) -> None:
    world = World(ranks)
    world.save(
        path,
        lambda rank: sharded(world, rank, whole, 0),
        lambda rank: PlacementSavePlanner(),
        lambda rank: PlacementFileSystemWriter(path, stock_metadata=stock),
    )


def save_and_be_killed(at: int, *arguments: Any, **options: Any) -> None:
    """Save, and end this process as the system would, at one of the steps of the coordinator."""
    passed = 0

    def step() -> None:
        nonlocal passed
        if passed == at:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    def with_steps(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            step()
            result = function(*given, **named)
            step()
            return result

        return call

    class Stream:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def write(self, data: bytes) -> None:
            # A part of what is written arrives.
            self._stream.write(data[: len(data) // 2])
            self._stream.flush()
            step()
            self._stream.write(data[len(data) // 2 :])

    write = writer.write_metadata
    vars(writer)["write_metadata"] = lambda metadata, stream, **named: write(
        metadata, Stream(stream), **named
    )
    for name in ("fsync", "replace", "remove", "unlink"):
        setattr(os, name, with_steps(getattr(os, name)))
    save(*arguments, **options)


def killed_at_every_step(path: Path, *arguments: Any, **options: Any) -> Iterator[Path]:
    """Yield, for each step, the copy of a checkpoint over which a save was killed there."""
    for at in range(1000):
        copy = path.with_name(f"killed-{at}")
        shutil.copytree(path, copy)
        process = multiprocessing.get_context("fork").Process(
            target=save_and_be_killed, args=(at, copy, *arguments), kwargs=options
        )
        process.start()
        process.join()
        yield copy
        if process.exitcode == 0:
            return
        assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("stock", [True, False])
def test_killed_at_any_step_the_checkpoint_is_the_old_or_the_new_one(
    tmp_path: Path, stock: bool
) -> None:
    """Of other ranks and keys, so that no row of one is a row of the other."""
    old, new = wholes(3, (13, 7)), {key: value + 100 for key, value in wholes(5, (13, 7)).items()}
    save(tmp_path / "ckpt", 2, old, stock=True)
    outcomes = []
    for path in killed_at_every_step(tmp_path / "ckpt", 3, new, stock=stock):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            count = len(PlacementFileSystemReader(path).read_metadata().state_dict_metadata)
            saved = {len(old): old, len(new): new}[count]
            into = load(path, blank(saved), PlacementFileSystemReader(path))
            assert all(same(into[key], value) for key, value in saved.items())
            if saved is old or stock:
                assert_index_agrees(path)
                into = load(path, blank(saved), dcp.FileSystemReader(path))
                assert all(same(into[key], value) for key, value in saved.items())
        outcomes.append(saved is new)
    assert len(outcomes) > 12
    assert outcomes == sorted(outcomes)
    assert outcomes[0] is False
    # The older files are removed when the new metadata are in place.
    assert outcomes.count(True) > 2 * 2
    assert {path.name for path in (tmp_path / f"killed-{len(outcomes) - 1}").iterdir()} == {
        ".metadata",
        *PlacementFileSystemReader(path).read_metadata().storage_data.paths(),
    }
    # What a killed save left does not hinder the next one.
    save(tmp_path / "killed-7", 3, new, stock=True)
    assert_index_agrees(tmp_path / "killed-7")
