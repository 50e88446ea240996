"""Messages and warnings are short, whatever names, lists and texts they are about."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import load, refusal, save, warned
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Replicate

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    PlacementError,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    Renumber,
)
from dcp_placements.errors import (
    MAX_TEXT,
    Fault,
    fault_error,
    format_faults,
)
from dcp_placements.offline.output import LocalOutput
from dcp_placements.short_text import (
    folded_names,
    natural_key,
    near_names,
    numbers_in,
    shortened,
)
from dcp_placements.storage.store import LocalStore
from dcp_placements.testing import World

WORLD = World(2)
LONG = 100_000


@pytest.mark.parametrize(
    "placement",
    [
        lambda: CheckpointPlacement(mesh(), [IndexShard(0, range(51_200))]),
        lambda: CheckpointPlacement(
            mesh(), [FusedShard(3, tuple(range(1, 51_200)))], global_shape=(4,)
        ),
        lambda: CheckpointPlacement(mesh(), [Replicate()] * 51_200),
        lambda: CheckpointPlacement(mesh(), {"e" * LONG: Replicate()}),
        lambda: Renumber("experts.{}" * 51_200, [0], total=8),
        lambda: IndexShard(0, [-1] * 51_200),
    ],
)
def test_a_declaration_that_is_refused_is_told_in_short(placement: Callable[[], Any]) -> None:
    with pytest.raises(PlacementError) as caught:
        placement()
    assert len(str(caught.value)) < 5_000


def mesh() -> Any:
    return WORLD.mesh(0, ep=2)


@pytest.mark.parametrize("letter", ["w", "1", ".0", "a.", "\x1b"])
def test_many_missing_keys_with_long_names_are_told_in_short(tmp_path: Path, letter: str) -> None:
    tail = (letter * LONG)[:LONG].strip(".")
    stored = {f"k{at}.{tail}x": torch.ones(1) for at in range(10)}
    save(World(1), tmp_path, lambda _: stored)
    wanted = {f"m{at}.{tail}y": torch.ones(1) for at in range(50)}
    text = refusal(lambda: load(World(1), tmp_path, lambda _: wanted))
    assert len(text) <= MAX_TEXT + 200
    assert "more characters" in text
    assert "\x1b" not in text


def test_a_warning_of_long_names_is_short(tmp_path: Path) -> None:
    keys = {f"experts.{at}.{'w' * LONG}": torch.arange(3.0) for at in range(20)}
    with warned() as texts:
        save(
            WORLD,
            tmp_path,
            lambda rank: {key: value + rank for key, value in keys.items()},
            on_conflict="warn",
        )
    assert max(map(len, texts)) < MAX_TEXT


def test_any_fault_is_bounded_in_its_lines_and_their_lengths() -> None:
    faults = [
        Fault(f"{at}" * LONG, f"h{at}" * LONG, tuple([f"d{at}" * LONG] * 1000)) for at in range(50)
    ]
    assert len(format_faults("o", faults)) <= MAX_TEXT + 200
    short = str(Fault("w", "is odd", tuple([f"line {at}" for at in range(100)])))
    assert "line 0" in short
    assert "line 99" in short
    assert len(short.splitlines()) < 50
    assert len(str(fault_error("o", "w", "h" * LONG))) < 5000
    assert len(str(PlacementError("x" * 10 * MAX_TEXT))) < MAX_TEXT + 200


def test_numbers_of_thousands_of_digits_are_texts() -> None:
    key = f"layers.{'1' * 5000}.w"
    assert [*numbers_in(key)] == []
    assert folded_names([key, "layers.1.w"]) == ["layers.1.w", key]
    assert natural_key(key) > natural_key("layers.2.w")
    assert near_names(key, [key, "w"]) == []


def test_what_is_shortened_keeps_its_ends() -> None:
    text = shortened("a" * LONG + "z" * LONG, 100)
    assert text.startswith("a" * 50)
    assert text.endswith("z" * 50)
    assert "199,900 more characters" in text
    assert shortened("a" * 100, 100) == "a" * 100


class Named:
    """Pickled as a call of a global whose name is that of a hostile file."""

    def __init__(self, name: str) -> None:
        self.name = name

    def pickled(self) -> bytes:
        return b"\x80\x02c" + self.name.encode() + b"\nx\n)R."


ESCAPE = "\x1b[2K\x1b[1Aos"


def whole_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_what_an_untrusted_object_says_is_escaped_in_all_that_is_printed(tmp_path: Path) -> None:
    dcp.save({"a": 1, "w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    file = next(tmp_path.glob("*.distcp"))
    metadata: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    buffer = io.BytesIO()
    torch.save(0, buffer)
    hostile = Named(ESCAPE).pickled()
    place = next(one for index, one in metadata.storage_data.items() if index.fqn == "a")
    data = bytearray(file.read_bytes())
    data[place.offset : place.offset + place.length] = hostile.ljust(place.length, b".")
    file.write_bytes(data)
    reader = PlacementFileSystemReader(tmp_path, restricted=True, check_crc=False)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"a": 0}, storage_reader=reader, no_dist=True)
    failure, _ = caught.value.failures[0]
    assert isinstance(failure, PlacementError)
    assert "\x1b" not in whole_traceback(failure)


@pytest.mark.parametrize("cut", [None, 40])
def test_what_untrusted_metadata_say_is_escaped_in_all_that_is_printed(
    tmp_path: Path, cut: int | None
) -> None:
    (tmp_path / ".metadata").write_bytes(Named(ESCAPE).pickled()[:cut])
    reader = PlacementFileSystemReader(tmp_path, restricted=True)
    with pytest.raises(PlacementError) as caught:
        reader.read_metadata()
    assert "\x1b" not in whole_traceback(caught.value)


def test_a_metadata_file_that_cannot_get_its_name_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    (path / ".metadata").mkdir(parents=True)
    with pytest.raises(dcp.CheckpointException):
        dcp.save({"w": torch.ones(2)}, storage_writer=PlacementFileSystemWriter(path), no_dist=True)
    assert [one.name for one in path.iterdir() if "tmp" in one.name] == []


def test_a_directory_that_is_removed_meanwhile_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "out", os.fsync

    def removing(descriptor: int) -> None:
        fsync(descriptor)
        if ".metadata" in os.readlink(f"/proc/self/fd/{descriptor}"):
            shutil.rmtree(path)

    monkeypatch.setattr(os, "fsync", removing)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"w": torch.ones(2)}, storage_writer=PlacementFileSystemWriter(path), no_dist=True)
    text = str(caught.value.failures[0][0])
    assert f"{path}: the directory was removed while this save wrote into it" in text
    assert "another save" not in text


@pytest.mark.parametrize("length", [200, 245, 250, 255])
def test_an_output_may_have_any_name_that_the_file_system_takes(
    tmp_path: Path, length: int
) -> None:
    name = "é" * (length // 4) + "n" * (length - length // 4 * 2)
    assert len(os.fsencode(name)) == length
    for _ in range(2):
        with (
            LocalOutput(tmp_path / name) as output,
            output.directory(["f" * length], "id"),
            output.file("f" * length) as stream,
        ):
            stream.write(b"1")
        assert (tmp_path / name / ("f" * length)).read_bytes() == b"1"
        (tmp_path / name / ("f" * length)).unlink()
        (tmp_path / name).rmdir()
    with LocalStore(tmp_path).replace(name) as stream:
        stream.write(b"2")
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_a_name_that_no_file_may_have_is_refused_by_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="name too long"), LocalOutput(tmp_path / ("n" * 256)):
        pass


def test_a_relative_path_is_what_it_was_when_the_writer_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    state = {"w": torch.arange(3.0)}
    monkeypatch.chdir(tmp_path)
    writer = PlacementFileSystemWriter("first")
    again = PlacementFileSystemWriter(tmp_path / "unused")
    again.reset("second")
    reader, other = PlacementFileSystemReader("first"), PlacementFileSystemReader("x")
    other.reset("second")
    monkeypatch.chdir(tmp_path / "elsewhere")
    dcp.save(state, storage_writer=writer, no_dist=True)
    # As in the thread of async_save, which gives the path that the user gave once more.
    dcp.save(state, storage_writer=again, checkpoint_id="second", no_dist=True)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "first" / ".metadata").is_file()
    assert (tmp_path / "second" / ".metadata").is_file()
    for one, given in ((reader, None), (other, "second")):
        loaded = {"w": torch.zeros(3)}
        dcp.load(loaded, storage_reader=one, checkpoint_id=given, no_dist=True)
        assert torch.equal(loaded["w"], state["w"])
