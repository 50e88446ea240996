"""A save over an older checkpoint that is killed while ``.metadata`` is written: old or new."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementSavePlanner,
)
from dcp_placements.storage import writer
from dcp_placements.storage.index import paths_of
from dcp_placements.testing import World
from tests.storage_scenes import assert_index_agrees, blank, load, same, sharded, wholes

SECOND_HALF = 6
"""A step at which a part of ``.metadata`` is written."""


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
        *paths_of(PlacementFileSystemReader(path).read_metadata().storage_data),
    }
    # What a killed save left does not hinder the next one, which removes what is under a temporary
    # name.
    cut_off = tmp_path / "killed-7"
    assert len(list(cut_off.glob(".metadata.*"))) == 1
    (cut_off / ".metadata.tmp").write_bytes(b"of torch's writer")
    (cut_off / ".metadata.old.tmp").write_bytes(b"of somebody else")
    save(cut_off, 3, new, stock=True)
    assert_index_agrees(cut_off)
    assert [path.name for path in cut_off.glob(".metadata.*")] == [".metadata.old.tmp"]


def test_of_two_saves_at_once_each_puts_its_own_metadata_in_place(tmp_path: Path) -> None:
    """One is killed half through its ``.metadata``, when the other has written all of its own."""
    path, others = tmp_path / "ckpt", {"other": torch.ones(4)}
    whole = wholes(3, (13, 7))
    save(path, 2, wholes(5, (13, 7)), stock=True)
    replace, killed = os.replace, []

    def replaced(*names: Any) -> None:
        if not killed:
            killed.append(True)
            process = multiprocessing.get_context("fork").Process(
                target=save_and_be_killed,
                args=(SECOND_HALF, path, 2, others),
                kwargs={"stock": True},
            )
            process.start()
            process.join()
            assert process.exitcode == -signal.SIGKILL
            assert len(list(path.glob(".metadata.*"))) == 2
        replace(*names)

    with mock.patch.object(os, "replace", replaced):
        save(path, 2, whole, stock=True)
    assert_index_agrees(path)
    for reader in (PlacementFileSystemReader(path), dcp.FileSystemReader(path)):
        into = load(path, blank(whole), reader)
        assert all(same(into[key], value) for key, value in whole.items())
    save(path, 2, whole, stock=True)
    assert not list(path.glob(".metadata.*"))


def test_what_another_save_is_writing_is_not_removed(tmp_path: Path) -> None:
    """A save removes what has not changed since it began."""
    path, whole = tmp_path / "ckpt", wholes(3, (13, 7))
    save(path, 2, whole, stock=True)
    dead, alive = path / ".metadata.00000000.tmp", path / ".metadata.11111111.tmp"
    dead.write_bytes(b"x")
    alive.write_bytes(b"x")
    write = writer.write_metadata

    def written(*given: Any, **named: Any) -> None:
        alive.write_bytes(b"xy")
        write(*given, **named)

    with mock.patch.object(writer, "write_metadata", written):
        save(path, 2, whole, stock=True)
    assert list(path.glob(".metadata.*")) == [alive]


def test_a_full_disk_leaves_no_unfinished_metadata(tmp_path: Path) -> None:
    path, whole = tmp_path / "ckpt", wholes(3, (13, 7))
    save(path, 2, whole, stock=True)

    def full(metadata: Any, stream: Any, **named: Any) -> None:
        stream.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        mock.patch.object(writer, "write_metadata", full),
        pytest.raises(dcp.api.CheckpointException, match="No space left"),
    ):
        save(path, 2, {"other": torch.ones(4)}, stock=True)
    assert not list(path.glob(".metadata.*"))
    assert_index_agrees(path)
