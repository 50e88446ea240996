"""What was damaged after it was written is refused by a load, with its place; nothing else is."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import Shard

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.offline import verify
from dcp_placements.storage.file_reads import range_in_memory
from dcp_placements.storage.record import Record, RecordCheck, SoundRecords
from dcp_placements.storage.record_head import parse_record
from dcp_placements.testing import FakeDTensor, World
from tests.storage_scenes import (
    all_kinds,
    blank,
    same,
    stock_metadata,
)

WRITERS: dict[str, Any] = {"torch": dcp.FileSystemWriter, "ours": PlacementFileSystemWriter}
PLANNERS: dict[str, Any] = {"torch": DefaultLoadPlanner, "ours": PlacementLoadPlanner}
by_writer = pytest.mark.parametrize("writer", WRITERS)
by_planner = pytest.mark.parametrize("planner", PLANNERS)

STATE: dict[str, Any] = {
    "large": torch.arange(1_500_000, dtype=torch.float32).reshape(1500, 1000),
    "middle": torch.arange(30_000, dtype=torch.float32) + 0.5,
    **{f"small.{at}": torch.arange(100, dtype=torch.int16) + 1000 * at for at in range(9)},
    "scalar": torch.tensor(1234.5, dtype=torch.float64),
    "half": torch.arange(40_000).to(torch.bfloat16),
    "complex": torch.arange(900).to(torch.complex64).reshape(30, 30) * (1 + 2j),
}


@contextmanager
def without_checksums() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


@contextmanager
def flipped(path: Path, key: str, at: float) -> Iterator[tuple[str, int]]:
    """Flip a bit of a tensor's elements meanwhile; yield the file, and where the elements begin."""
    (info,) = [i for index, i in stock_metadata(path).storage_data.items() if index.fqn == key]
    file = path / info.relative_path
    sound = file.read_bytes()
    data = bytearray(sound)
    raw = STATE[key].reshape(-1).view(torch.uint8).numpy().tobytes()
    start = data.index(raw, info.offset, info.offset + info.length)
    data[start + int(at * (len(raw) - 1))] ^= 4
    file.write_bytes(data)
    yield file.name, start
    file.write_bytes(sound)


def load(path: Path, state: dict[str, Any], planner: Any, **options: Any) -> dict[str, Any]:
    reader = PlacementFileSystemReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=planner(), no_dist=True)
    return state


@pytest.mark.parametrize(
    ("writer", "planner", "threads"),
    [("torch", "torch", 1), ("torch", "ours", 3), ("ours", "torch", 3), ("ours", "ours", 1)],
)
def test_m20_flipped_elements_are_refused_with_key_file_and_byte(
    tmp_path: Path, writer: str, planner: str, threads: int
) -> None:
    dcp.save(dict(STATE), storage_writer=WRITERS[writer](tmp_path), planner=DefaultSavePlanner())
    for key in ("large", "middle", "small.4", "scalar", "half", "complex"):
        for at in (0.0, 0.5, 1.0):
            with flipped(tmp_path, key, at) as (name, start):
                with pytest.raises(CheckpointException) as refused:
                    load(tmp_path, blank(STATE), PLANNERS[planner], thread_count=threads)
                loaded = load(tmp_path, blank(STATE), PLANNERS[planner], check_crc=False)
            message = str(refused.value)
            assert f"{key}: its elements at byte {start} of {name} are not what was" in message
            assert re.search(r"CRC-32 is [0-9a-f]{8}, where [0-9a-f]{8} was written", message)
            assert "way out:" in message
            assert not same(loaded[key], STATE[key])
    loaded = load(tmp_path, blank(STATE), PLANNERS[planner], thread_count=threads)
    assert all(same(loaded[key], STATE[key]) for key in STATE)


@by_writer
def test_targets_that_are_not_contiguous_or_of_another_dtype_are_compared_too(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcp_placements.storage.record.BUFFER_NBYTES", 10_000)
    dcp.save({"large": STATE["large"]}, storage_writer=WRITERS[writer](tmp_path))
    for target in (torch.zeros(1000, 1500).t(), torch.zeros(1500, 1000, dtype=torch.float64)):
        load(tmp_path, {"large": target}, PlacementLoadPlanner)
        assert torch.equal(target, STATE["large"].to(target.dtype))
        with (
            flipped(tmp_path, "large", 0.7),
            pytest.raises(CheckpointException, match="large: its elements at byte "),
        ):
            load(tmp_path, {"large": target}, PlacementLoadPlanner)


def test_elements_in_another_order_and_objects_are_compared_too(tmp_path: Path) -> None:
    """Torch's writer keeps the order of a transposed tensor."""
    turned = torch.arange(600.0).reshape(20, 30).t()
    saved = {"turned": turned, "note": "as it was"}
    dcp.save(dict(saved), storage_writer=dcp.FileSystemWriter(tmp_path))
    (file,) = tmp_path.glob("*.distcp")
    sound = file.read_bytes()
    for found, message in (
        (turned.t().numpy().tobytes(), f"turned: its elements at byte .* of {file.name} are not"),
        (b"as it was", f"note: the record .* of {file.name} is not"),
    ):
        data = bytearray(sound)
        data[data.index(found) + 3] ^= 2
        file.write_bytes(data)
        with pytest.raises(CheckpointException, match=message):
            load(tmp_path, blank(saved), DefaultLoadPlanner)
    file.write_bytes(sound)
    loaded = load(tmp_path, blank(saved), DefaultLoadPlanner)
    assert all(same(loaded[key], saved[key]) for key in saved)


@by_planner
@by_writer
def test_sound_records_of_every_kind_raise_no_alarm(
    tmp_path: Path, writer: str, planner: str
) -> None:
    saved = all_kinds()
    dcp.save(dict(saved), storage_writer=WRITERS[writer](tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed")
        loaded = load(tmp_path, blank(saved), PLANNERS[planner])
    assert [key for key in saved if not same(saved[key], loaded[key])] == []
    assert verify(tmp_path, contents=True).sound


def test_slices_are_read_and_not_compared(tmp_path: Path) -> None:
    world_path = tmp_path
    dcp.save({"large": STATE["large"]}, storage_writer=PlacementFileSystemWriter(world_path))
    world = World(2)

    def half(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, fsdp=2)
        return {"large": FakeDTensor.distribute(torch.zeros(1500, 1000), mesh, [Shard(0)])}

    with flipped(tmp_path, "large", 0.9):
        loaded = world.load(
            tmp_path,
            half,
            lambda rank: PlacementLoadPlanner(),
            lambda rank: PlacementFileSystemReader(tmp_path),
        )
    assert torch.equal(loaded[0]["large"].to_local(), STATE["large"][:750])


@by_planner
@by_writer
def test_records_without_checksums_are_warned_of_once(
    tmp_path: Path, writer: str, planner: str
) -> None:
    saved = {**STATE, "turned": STATE["complex"].t(), "note": "x"}
    with without_checksums():
        dcp.save(dict(saved), storage_writer=dcp.FileSystemWriter(tmp_path))
    loaded, made = blank(saved), PLANNERS[planner]()
    with pytest.warns(UserWarning, match="records on rank 0 read without a comparison") as heard:
        dcp.load(loaded, storage_reader=PlacementFileSystemReader(tmp_path), planner=made)
    (text,) = [str(one.message) for one in heard if "comparison" in str(one.message)]
    assert f"{len(saved)} records" in text
    assert all(same(loaded[key], saved[key]) for key in saved)
    if planner == "ours":
        assert made.report.unchecked == len(saved)
        assert "unchecked:" in str(made.report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed")
        load(tmp_path, loaded, PLANNERS[planner], check_crc=False)
    found = verify(tmp_path, contents=True)
    assert found.sound
    assert any(f"{len(saved)} records have no checksums" in note for note in found.notes)


def test_damage_at_a_url_is_refused(tmp_path: Path) -> None:
    url = "memory://checksums/step"
    files = fsspec.filesystem("memory")
    planner = PlacementSavePlanner()
    dcp.save(dict(STATE), storage_writer=PlacementFileSystemWriter(url), planner=planner)
    loaded = load(url, blank(STATE), PlacementLoadPlanner)  # type: ignore[arg-type]
    assert all(same(loaded[key], STATE[key]) for key in STATE)
    (name,) = files.glob("/checksums/step/*.distcp")
    data = bytearray(files.cat(name))
    for key in ("large", "middle", "small.3"):
        at = data.index(STATE[key].numpy().tobytes())
        data[at + 20] ^= 1
        files.pipe(name, bytes(data))
        with pytest.raises(CheckpointException, match=f"{key}: its elements at byte {at} of "):
            load(url, blank(STATE), PlacementLoadPlanner)  # type: ignore[arg-type]
        data[at + 20] ^= 1
    files.rm("/checksums", recursive=True)


@pytest.mark.parametrize("kind", ["plain", "transposed"])
@by_writer
def test_damage_of_what_surrounds_the_elements_never_moves_them(
    tmp_path: Path, writer: str, kind: str
) -> None:
    """A bit of the headers of a record: the right elements, or a refusal that names the key."""
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    state = {"w": whole if kind == "plain" else whole.T}
    storage = WRITERS[writer](tmp_path, sync_files=False)
    dcp.save(state, storage_writer=storage, no_dist=True)
    (path,) = tmp_path.glob("*.distcp")
    sound = path.read_bytes()
    elements = sound.find(whole.numpy().tobytes())
    header = sound.rfind(b"PK\x03\x04", 0, elements)
    entries = sound.find(b"PK\x01\x02", elements)
    places = [*range(header, elements), *range(entries, min(entries + 92, len(sound)))]
    for at in places:
        for bit in {(at * 3) % 8, 4}:
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << bit]) + sound[at + 1 :])
            blank = {"w": torch.zeros(3, 4) if kind == "plain" else torch.zeros(4, 3)}
            reader = PlacementFileSystemReader(tmp_path)
            text = ""
            try:
                dcp.load(blank, storage_reader=reader, no_dist=True)
            except CheckpointException as error:
                text = str(error)
            if text:
                assert "w: " in text, (at, bit, text)
                assert path.name in text, (at, bit, text)
            else:
                assert torch.equal(blank["w"], state["w"]), (at, bit)


def test_a_record_like_a_sound_one_is_checked_as_by_itself() -> None:
    """Each bit of one byte at a time, so that each part of the record is damaged."""

    def saved(first: float) -> bytes:
        held = io.BytesIO()
        torch.save(torch.arange(12.0) + first, held)
        return held.getvalue()

    def check(data: bytes, *sound: SoundRecords) -> tuple[RecordCheck, int]:
        counts: list[int] = []
        record = Record(range_in_memory(data), parse_record(data, len(data)))
        return record.check(counts.append, *sound), sum(counts)

    before, second, sound = saved(0), saved(7), SoundRecords()
    assert check(before, sound) == check(before) == check(second, sound) == check(second)
    assert check(second)[0] == RecordCheck()
    for place in range(len(second)):
        data = bytearray(second)
        data[place] ^= 1 << place % 8
        like, alone = check(bytes(data), sound)[0], check(bytes(data))[0]
        assert like.differing == alone.differing, place
        # Torch's text of a broken directory has bytes of anywhere.
        assert (like.broken is None) == (alone.broken is None), place


def test_an_entry_that_became_a_directory_is_refused_every_time() -> None:
    """Torch's reader takes its name from memory that nothing was written to."""
    held = io.BytesIO()
    torch.save(torch.arange(6.0), held)
    data = bytearray(held.getvalue())
    place = data.index(b"PK\x01\x02") + 38  # the external attributes of the first entry
    data[place] ^= 0x10
    for _ in range(100):
        check = Record(range_in_memory(bytes(data))).check()
        assert check.broken is not None
        assert "archive/data.pkl is marked as a directory" in check.broken


def test_a_damaged_directory_is_a_problem_of_the_record_and_no_error_of_the_disk() -> None:
    held = io.BytesIO()
    torch.save(torch.arange(6.0).reshape(2, 3).t(), held)
    sound = held.getvalue()
    assert Record(range_in_memory(sound)).check() == RecordCheck()
    for at in range(len(sound) - 98, len(sound)):
        for bit in range(8):
            data = sound[:at] + bytes([sound[at] ^ 1 << bit]) + sound[at + 1 :]
            check = Record(range_in_memory(data)).check()
            assert check.has_crc
            assert check.problem is None or check.problem
