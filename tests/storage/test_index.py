"""The index of ``.metadata``: what torch reads of the pickle before it, damage, and mixtures."""

from __future__ import annotations

import copy
import io
import pickle
import random
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dcp_placements import (
    PlacementError,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.offline import CannotLook, inspect, open_source, verify
from dcp_placements.storage import writer
from dcp_placements.storage.columns import IndexDamage
from dcp_placements.storage.index import (
    MOST_NUMBERS,
    RowIndex,
    archive_in,
    paths_of,
    unpacked_archive,
    unpacked_index,
)
from dcp_placements.storage.metadata_file import read_metadata, write_metadata
from dcp_placements.storage.metadata_pickler import MARKER_NBYTES
from dcp_placements.storage.metadata_unpickler import load_metadata_pickle
from dcp_placements.testing import World
from tests.offline_scenes import Run
from tests.storage_scenes import (
    assert_index_agrees,
    load,
    pickle_nbytes,
    same,
    sharded,
    wholes,
)
from tests.versions import passes_on_errors

SENTENCE = "this checkpoint has no stock metadata: run `dcp-placements stock-metadata PATH`"


def save(path: Path, *, ranks: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    """Save with a world of several ranks, each an object of its own."""
    world, whole = World(ranks), wholes(5, (13, 7))
    world.save(
        path,
        lambda rank: sharded(world, rank, whole, 0) | {f"object{rank}": rank, "lr": 0.1},
        lambda rank: PlacementSavePlanner(),
        lambda rank: PlacementFileSystemWriter(path, **options),
    )
    return whole


def read(path: Path, *, restricted: bool = True) -> Any:
    return PlacementFileSystemReader(path, restricted=restricted).read_metadata()


def edit(path: Path, at: int, data: bytes) -> None:
    held = bytearray((path / ".metadata").read_bytes())
    held[at : at + len(data)] = data
    (path / ".metadata").write_bytes(held)


@pytest.mark.parametrize("seed", range(12))
def test_any_rows_are_those_of_the_pickle(tmp_path: Path, seed: int) -> None:
    """Rows of several files and keys, some twice, of other dims and of no tensor."""
    draw = random.Random(seed)
    rows: list[tuple[MetadataIndex, _StorageInfo]] = []
    for number in range(draw.choice([0, 1, 7, 60])):
        # Also keys that are words of the pickle.
        keys = ["offset", "fqn", "storage_data", "\N{SNOWMAN}", "", "key5"]
        key = draw.choice(keys)
        dims = [None, 0, 1, 2, 3, 2][keys.index(key)]
        offset = None if dims is None else [draw.choice([0, 1, 1 << 40]) for _ in range(dims)]
        file = draw.choice(
            ["__0_0.distcp", "__1_0.distcp", "__01_0.distcp", "a/\N{SNOWMAN}", "x7y7"]
        )
        steps = draw.choice([None, None, [], ["zstd"], ["a", "b"]])
        start = number + draw.choice([0, (1 << 31) - 60, 1 << 31, 1 << 40])
        info = _StorageInfo(file, start, draw.randrange(1 << 34), steps)
        rows.append((MetadataIndex(key, offset), info))
    expected = dict(rows)
    written = io.BytesIO()
    write_metadata(Metadata({}, storage_data=expected), written)
    assert pickle.loads(written.getvalue()).storage_data == expected
    for restricted in (False, True):
        table: Any = read_metadata(lambda: io.BytesIO(written.getvalue()), restricted=restricted)
        table = table.storage_data
        assert isinstance(table, RowIndex)
        for held in (table, pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
            assert dict(held) == expected
            assert len(held) == len(expected)
        assert paths_of(table) == {info.relative_path for info in expected.values()}


@pytest.mark.parametrize("stock_metadata", [True, False], ids=["stock", "index"])
def test_any_planner_data_come_back(tmp_path: Path, stock_metadata: bool) -> None:
    """Keys that are words of the pickle, paths that are none, and a value that has itself."""
    keys = ["offset", "planner_data", "__0_0.distcp", "w"]
    dcp.save({key: torch.ones(3) for key in keys}, checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / ".metadata"
    metadata = read(tmp_path, restricted=False)
    shared: list[Any] = ["shared"]
    shared.append(shared)
    for planner_data in (
        {key: (key,) for key in keys} | {"other": ("a", 1, "a"), "number": 2, 3: ("b",)},
        {"w": ("w", shared), "offset": (shared,), "x": (True, None)},
        ("no", "dict"),
        None,
    ):
        metadata.planner_data = planner_data
        with open(file, "wb") as stream:
            write_metadata(metadata, stream, stock_metadata=stock_metadata)
        found = [read(tmp_path, restricted=False)]
        if stock_metadata:
            found.append(pickle.loads(file.read_bytes()))
        for one in found:
            assert repr(one.planner_data) == repr(planner_data)
            stored = metadata.state_dict_metadata
            # Torch 2.15 notes the strides that a tensor had; they are not kept.
            assert {
                key: (entry.size, [*entry.chunks]) for key, entry in one.state_dict_metadata.items()
            } == {key: (entry.size, entry.chunks) for key, entry in stored.items()}
        if stock_metadata:
            assert found[1].storage_data == dict(metadata.storage_data)
            if isinstance(planner_data, dict) and "x" in planner_data:
                with pytest.raises(CannotLook, match="makes far more of itself than its size"):
                    open_source(tmp_path)
            else:
                open_source(tmp_path)


@passes_on_errors
def test_without_stock_metadata_our_reader_loads_and_plain_dcp_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "full")
    whole = save(tmp_path / "lean", stock_metadata=False)
    full, lean = read(tmp_path / "full"), read(tmp_path / "lean")
    assert lean.state_dict_metadata == full.state_dict_metadata
    assert [i.length for i in lean.storage_data.values()] == [
        i.length for i in full.storage_data.values()
    ]
    assert_resharded_load(tmp_path / "lean", whole)
    with pytest.raises(CheckpointException, match="run `dcp-placements stock-metadata PATH`"):
        dcp.load({"lr": 0.0}, checkpoint_id=tmp_path / "lean", no_dist=True)
    assert "." not in SENTENCE
    code = f"import pickle; pickle.load(open({str(tmp_path / 'lean/.metadata')!r}, 'rb'))"
    # Without this package on the path.
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert f"No module named '{SENTENCE}'" in ran.stderr
    assert len(inspect(tmp_path / "lean").tensors) == 5


@pytest.mark.parametrize("part", ["block", "directory", "trailer", "cut"])
def test_of_a_damaged_index_the_pickle_serves_with_a_note(tmp_path: Path, part: str) -> None:
    whole = save(tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    end = pickle_nbytes(data)
    at = {"block": end + 20, "directory": len(data) - 90, "trailer": len(data) - 60, "cut": 0}[part]
    if part == "cut":
        (tmp_path / ".metadata").write_bytes(data[: end + 5])
    else:
        edit(tmp_path, at, bytes([data[at] ^ 1]))
    with pytest.warns(UserWarning, match=r"metadata cannot be used: .*is read in its place"):
        metadata = read(tmp_path)
    assert (
        dict(metadata.storage_data) == dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    )
    into = {key: torch.zeros_like(value) for key, value in whole.items()}
    load(tmp_path, into, PlacementFileSystemReader(tmp_path))
    assert all(same(into[key], value) for key, value in whole.items())


def assert_resharded_load(path: Path, whole: dict[str, torch.Tensor]) -> None:
    world = World(2)
    loaded = world.load(
        path,
        lambda rank: sharded(world, rank, whole, 1, empty=True),
        lambda rank: PlacementLoadPlanner(),
        lambda rank: PlacementFileSystemReader(path),
    )
    for rank, state in enumerate(loaded):
        for key, value in sharded(world, rank, whole, 1).items():
            assert same(state[key].to_local(), value.to_local())


def test_a_new_index_is_made_of_the_pickle(tmp_path: Path, run: Run) -> None:
    save(tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    edit(tmp_path, len(data) - 90, bytes([data[-90] ^ 1]))
    with pytest.warns(UserWarning, match="stock-metadata PATH"):
        read(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        ran = run("stock-metadata", tmp_path)
    assert ran.code == 0
    assert "cannot be used" in ran.err
    assert_index_agrees(tmp_path)
    written = pickle.loads((tmp_path / ".metadata").read_bytes())
    written.storage_meta.checkpoint_id = tmp_path  # a text: what it is a path of is not made
    assert written == pickle.loads(data)


@pytest.mark.parametrize("contents", [[], ["--contents"]])
@pytest.mark.parametrize("lost", [1, 60, None])
def test_an_index_that_was_cut_off_is_a_fault(
    tmp_path: Path, run: Run, lost: int | None, contents: list[str]
) -> None:
    save(tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(data[: pickle_nbytes(data) if lost is None else -lost])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        ran = run("verify", tmp_path, "--json", *contents)
        assert run("stock-metadata", tmp_path).code == 0
    assert ran.code == 1
    (fault,) = ran.json["faults"]
    assert (fault["kind"], fault["files"]) == ("index", [".metadata"])
    assert "its index cannot be used: it is missing" in fault["message"]
    assert run("verify", tmp_path, *contents).code == 0


def with_index_of(path: Path, version: bytes) -> bytes:
    """Let an index end as one of another version; return the file."""
    data = (path / ".metadata").read_bytes()[:-1] + version
    (path / ".metadata").write_bytes(data)
    return data


@pytest.mark.parametrize("version", ["8", "12"])
def test_an_index_of_a_later_version_is_no_damage_and_is_not_written_over(
    tmp_path: Path, run: Run, version: str
) -> None:
    whole = save(tmp_path)
    data = with_index_of(tmp_path, version.encode())
    named = f"it is of version {version}, and this release reads 7"
    with pytest.warns(UserWarning, match=rf"{named}(.*\n)+.*a newer dcp-placements"):
        read(tmp_path)
    into = {key: torch.zeros_like(value) for key, value in whole.items()}
    load(tmp_path, into, PlacementFileSystemReader(tmp_path))
    assert all(same(into[key], value) for key, value in whole.items())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        ran = run("verify", tmp_path, "--contents")
        refused = run.fails("stock-metadata", tmp_path)
    assert ran.code == 0
    assert named in ran.err
    assert f"version {version}, and this release writes 7" in refused
    assert (tmp_path / ".metadata").read_bytes() == data


def test_an_index_of_an_older_version_is_written_anew(tmp_path: Path, run: Run) -> None:
    save(tmp_path)
    with_index_of(tmp_path, b"6")
    with pytest.warns(UserWarning, match=r"it is of version 6(.*\n)+.*stock-metadata PATH"):
        read(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run("stock-metadata", tmp_path).code == 0
    assert_index_agrees(tmp_path)


def test_without_stock_metadata_an_index_of_another_version_needs_that_version(
    tmp_path: Path,
) -> None:
    save(tmp_path, stock_metadata=False)
    with_index_of(tmp_path, b"8")
    with pytest.raises(PlacementError, match=r"of version 8(.*\n)+.*a newer dcp-placements"):
        read(tmp_path)


def test_without_stock_metadata_a_damaged_index_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, stock_metadata=False)
    data = (tmp_path / ".metadata").read_bytes()
    edit(tmp_path, len(data) - 90, bytes([data[-90] ^ 1]))
    with pytest.raises(PlacementError, match="stock_metadata=False"):
        read(tmp_path)
    with pytest.raises(CannotLook, match="cannot be used: it is not what was written") as refused:
        open_source(tmp_path)
    lines = str(refused.value).splitlines()
    assert lines[1].startswith("    why:")
    assert lines[2].startswith("    way out:")


def test_an_index_of_another_save_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b", ranks=4)
    one, other = ((tmp_path / name / ".metadata").read_bytes() for name in "ab")
    glued = one[: pickle_nbytes(one)] + other[pickle_nbytes(other) :]
    (tmp_path / "a/.metadata").write_bytes(glued)
    with pytest.raises(PlacementError, match="not that of the metadata before it"):
        read(tmp_path / "a")


@pytest.mark.parametrize("where", ["head", "rows", "end"])
def test_of_a_pickle_that_is_not_the_one_of_its_index_nothing_is_executed(
    tmp_path: Path, where: str
) -> None:
    """Our readers do not run it, but whoever loads the checkpoint with torch would."""
    save(tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    end = pickle_nbytes(data)
    evil = b"cos\ngetcwd\n0"
    at = {"head": MARKER_NBYTES + 2, "rows": end // 2, "end": end - 3 - len(evil)}[where]
    edit(tmp_path, at, evil)
    with pytest.raises(CannotLook, match=r"asks for|is broken|does not use|it changes|no metadata"):
        verify(tmp_path, contents=True)
    assert len(inspect(tmp_path).tensors) == 5
    assert len(read(tmp_path).storage_data) == 19


def test_of_every_flipped_byte_comes_the_same_or_an_error(tmp_path: Path) -> None:
    save(tmp_path, ranks=2, stock_metadata=False)
    data = (tmp_path / ".metadata").read_bytes()
    expected = dict(read(tmp_path).storage_data)
    for at in range(0, len(data), max(len(data) // 150, 1)):
        edit(tmp_path, 0, data)
        edit(tmp_path, at, bytes([data[at] ^ 0x41]))
        try:
            metadata = read(tmp_path)
        except (PlacementError, pickle.UnpicklingError, ValueError):
            continue
        assert dict(metadata.storage_data) == expected


def test_places_of_chunks_before_the_first_are_damage(tmp_path: Path) -> None:
    save(tmp_path)
    rows = read(tmp_path).storage_data
    rows.locations.chunk[:3] -= 2
    with pytest.raises(IndexDamage, match="a number out of"):
        rows.check()


COLUMNS = {"keys": 2, "writers": 2, "rows": 7, "classes": 2, "places": 3, "forms": 1} | {
    "lists": 2,
    "boxes": 1,
}
TEXTS = {"values": np.zeros(0, np.uint8), "names": np.frombuffer(b"{}", np.uint8)}


def archive(**other: Any) -> bytes:
    """Return an archive of columns of 0 whose members are an index's but for some."""
    stream = io.BytesIO()
    tables = {name: np.zeros((count, 9), np.int8) for name, count in COLUMNS.items()}
    np.savez_compressed(stream, **{**TEXTS, **tables, **other})
    return stream.getvalue()


def test_members_that_no_index_has_are_not_unpacked() -> None:
    assert unpacked_archive(archive())["places"].tolist() == [[0] * 9] * 3
    with pytest.raises(IndexDamage, match=r"members .*more, .*where an index has others"):
        unpacked_archive(archive(more=np.zeros(3)))


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (np.zeros((2, 9), np.int8), "3 columns"),
        (np.zeros(9, np.int8), "3 columns"),
        (np.zeros((3, 3, 3), np.int8), "3 columns"),
        (np.zeros((3, 9)), "not of its kind"),
        (np.zeros((3, 9), np.uint64), "not of its kind"),
        (np.zeros((3, 9), "S5"), "not of its kind"),
        (np.zeros((3, MOST_NUMBERS // 3), np.int8), "and at most 134,217,728 are read"),
    ],
    ids=["one fewer", "one dim", "three dims", "floats", "unsigned", "texts", "too many"],
)
def test_a_member_that_is_no_table_of_its_columns_is_damage(table: Any, text: str) -> None:
    with pytest.raises(IndexDamage, match=text):
        unpacked_archive(archive(places=table))


def header(shape: tuple[int, ...], kind: str) -> bytes:
    """Return an array that has nothing but its header."""
    stream = io.BytesIO()
    described = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, described)  # type: ignore[no-untyped-call]
    return stream.getvalue()


@pytest.mark.parametrize(
    ("member", "content", "text"),
    [
        ("names", b"[" + b"[]," * (17 << 20) + b"[]]", "inflates to far more than its file"),
        ("names", b'["' + bytes(52 << 20) + b'"]', "inflates to far more than its file"),
        ("lists", header((2, 1 << 40), "|i1"), "and at most 134,217,728 are read"),
        ("values", header((1 << 40,), "|u1"), "another size than its header"),
        ("boxes", np.zeros((1, 40), "S100000"), "not of its kind"),
    ],
    ids=["lists", "long", "header", "text", "texts"],
)
def test_members_that_are_far_larger_than_the_file_are_not_inflated(
    member: str, content: Any, text: str
) -> None:
    if isinstance(content, bytes) and member == "names":
        content = np.frombuffer(content, np.uint8)
    data = archive(**({} if isinstance(content, bytes) else {member: content}))
    if isinstance(content, bytes):
        stream = io.BytesIO()
        with ZipFile(io.BytesIO(data)) as old, ZipFile(stream, "w") as new:
            for name in old.namelist():
                new.writestr(name, content if name == f"{member}.npy" else old.read(name))
        data = stream.getvalue()
    del content
    tracemalloc.start()
    try:
        with pytest.raises(IndexDamage, match=text):
            unpacked_archive(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def more_lists(members: dict[str, Any]) -> None:
    members["lists"] = np.zeros((2, 1 << 24), np.int64)


def chunks_without_numbers(members: dict[str, Any]) -> None:
    members["lists"] = np.append(members["lists"], [[1 << 40], [0]], axis=1)


def more_classes(members: dict[str, Any]) -> None:
    members["classes"] = np.ones((2, 1 << 20), np.int64)


def a_key_twice(members: dict[str, Any]) -> None:
    for column in members["names"]["keys"]:
        column[1] = column[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda members: None, None),
        (more_lists, "more forms, classes or lists"),
        (more_classes, "more forms, classes or lists"),
        (chunks_without_numbers, "chunks or more, and places for"),
        (a_key_twice, "a key that it has twice"),
    ],
)
def test_counts_of_an_index_are_bound_to_those_of_its_keys_and_places(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], text: str | None
) -> None:
    save(tmp_path)
    archived = archive_in(io.BytesIO((tmp_path / ".metadata").read_bytes()))
    assert archived is not None
    members = unpacked_archive(archived[0])
    _, forms = load_metadata_pickle(io.BytesIO(members["values"]))
    change(members)
    tracemalloc.start()
    try:
        with nullcontext() if text is None else pytest.raises(IndexDamage, match=text):
            unpacked_index(members, forms)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("planner", "what"), [(None, "w: it"), (PlacementSavePlanner(), "its id")])
def test_an_extension_that_is_not_there_is_named_with_its_key(
    tmp_path: Path, planner: Any, what: str
) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, planner=planner)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["nowhere"]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    reader = PlacementFileSystemReader(tmp_path)
    with pytest.raises(CheckpointException) as refused:
        dcp.load({"w": torch.zeros(3)}, storage_reader=reader)
    error = refused.value.failures[0][0]
    assert isinstance(error, PlacementError)
    assert f"{what} cannot be decoded: Unknown extension name='nowhere'" in str(error)


@passes_on_errors
def test_above_a_number_of_chunks_stock_metadata_are_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(writer, "MOST_STOCK_ROWS", 18)
    with pytest.warns(UserWarning, match=r"19 chunks: what plain DCP reads is left out"):
        whole = save(tmp_path / "auto")
    with pytest.raises(CheckpointException, match="run `dcp-placements stock-metadata PATH`"):
        dcp.load({"lr": 0.0}, checkpoint_id=tmp_path / "auto", no_dist=True)
    assert_resharded_load(tmp_path / "auto", whole)
    assert run("stock-metadata", tmp_path / "auto").code == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "always", stock_metadata=True)
        save(tmp_path / "never", stock_metadata=False)
        monkeypatch.setattr(writer, "MOST_STOCK_ROWS", 19)
        save(tmp_path / "few")
    for name in ("auto", "always", "few"):
        assert_index_agrees(tmp_path / name)
