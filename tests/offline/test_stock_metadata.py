"""``stock-metadata``: of an index alone, and of a ``.metadata`` that is there already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementSavePlanner,
)
from dcp_placements.offline import (
    CannotLook,
    checkpoint,
    diff,
    inspect,
    rewriting,
    stock_metadata,
    verify,
)
from dcp_placements.storage import metadata_file
from dcp_placements.storage.index import build_index
from dcp_placements.storage.metadata_file import write_metadata
from dcp_placements.storage.metadata_pickler import stock_pickle
from dcp_placements.storage.torch_metadata import ChunkList, StoredLocation, build_entries
from dcp_placements.storage.write_results import WriteResults
from dcp_placements.testing import World
from tests.offline_scenes import Run
from tests.storage_scenes import blank, load, same, sharded, wholes
from tests.versions import passes_on_errors


def save(path: Path, *, stock_metadata: bool = False, **options: Any) -> dict[str, Any]:
    """Save with a world of three ranks; return the whole."""
    world, whole = World(3), wholes(4, (13, 7))
    rest = {"norm": torch.arange(5.0), "step": torch.tensor(3), "lr": 0.1}
    world.save(
        path,
        lambda rank: sharded(world, rank, whole, 0) | rest,
        lambda rank: PlacementSavePlanner(),
        lambda rank: PlacementFileSystemWriter(path, stock_metadata=stock_metadata),
        **options,
    )
    return whole | rest


def assert_torch_loads(path: Path, saved: dict[str, Any]) -> None:
    """By one process, and cut in another way by a world of two."""
    loaded = load(path, blank(saved), dcp.FileSystemReader(path))
    assert all(same(saved[key], loaded[key]) for key in saved)
    world, key = World(2), "layers.0.weight"
    halves = world.load(
        path,
        lambda rank: sharded(world, rank, {key: saved[key]}, 1, empty=True),
        lambda rank: DefaultLoadPlanner(),
    )
    assert torch.equal(torch.cat([half[key].to_local() for half in halves], dim=1), saved[key])


@passes_on_errors
def test_torch_refuses_before_and_loads_after(tmp_path: Path, run: Run) -> None:
    saved = save(tmp_path)
    data = {file.name: file.read_bytes() for file in tmp_path.glob("*.distcp")}
    with pytest.raises(CheckpointException, match="dcp-placements stock-metadata PATH"):
        load(tmp_path, blank(saved), dcp.FileSystemReader(tmp_path))
    ran = run("stock-metadata", tmp_path)
    assert (ran.code, ran.err) == (0, "")
    assert_torch_loads(tmp_path, saved)
    loaded = load(tmp_path, blank(saved), PlacementFileSystemReader(tmp_path))
    assert all(same(saved[key], loaded[key]) for key in saved)
    assert {file.name: file.read_bytes() for file in tmp_path.glob("*.distcp")} == data
    assert verify(tmp_path).sound
    before = (tmp_path / ".metadata").read_bytes()
    stock_metadata(tmp_path)
    assert (tmp_path / ".metadata").read_bytes() == before


def test_the_rows_are_those_of_a_save_with_stock_metadata(tmp_path: Path) -> None:
    save(tmp_path / "stock", stock_metadata=True)
    save(tmp_path / "index", stock_metadata=False)
    written = stock_metadata(tmp_path / "index")
    tables = []
    for name in ("stock", "index"):
        metadata = pickle.loads((tmp_path / name / ".metadata").read_bytes())
        places = {
            (index.fqn, index.offset): (info.relative_path.split("_")[2], info.offset, info.length)
            for index, info in metadata.storage_data.items()
        }
        tables.append((metadata.state_dict_metadata, places))
    assert tables[0] == tables[1]
    assert len(written.storage_data) == len(tables[0][1])
    assert diff(tmp_path / "stock", tmp_path / "index").same


def save_one(path: Path, value: float) -> None:
    """Save one tensor of one rank."""
    World(1).save(
        path,
        lambda rank: {"w": torch.full((4,), value)},
        lambda rank: PlacementSavePlanner(),
        lambda rank: PlacementFileSystemWriter(path),
    )


def test_metadata_that_a_save_wrote_meanwhile_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save ends when ``.metadata`` is read, and the new one is being written."""
    save_one(tmp_path, 0.0)

    def finish(metadata: Any, stream: Any) -> None:
        save_one(tmp_path, 1.0)
        files.update({path.name: path.read_bytes() for path in tmp_path.glob("*metadata")})
        write_metadata(metadata, stream)

    files: dict[str, bytes] = {}
    monkeypatch.setattr(rewriting, "write_metadata", finish)
    with pytest.raises(CannotLook, match="overwritten while it was read") as refused:
        stock_metadata(tmp_path)
    assert "found:       .metadata: other contents" in str(refused.value)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*metadata")} == files
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("*.lock"))
    monkeypatch.undo()
    stock_metadata(tmp_path)
    read = {"w": torch.full((4,), 7.0)}
    dcp.load(read, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(), no_dist=True)
    assert read["w"].tolist() == [1.0] * 4


def test_a_directory_without_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotLook, match="no complete checkpoint"):
        stock_metadata(tmp_path)
    assert not list(tmp_path.iterdir())


def _killed_in_the_middle(path: Path) -> None:
    def pieces(*args: Any) -> Iterator[bytes | bytearray]:
        written = stock_pickle(*args)
        yield from (next(written), next(written))
        os._exit(9)

    vars(metadata_file)["stock_pickle"] = pieces
    stock_metadata(path)


def test_killed_in_the_middle_it_leaves_the_index_and_can_be_repeated(tmp_path: Path) -> None:
    saved = save(tmp_path)
    before = (tmp_path / ".metadata").read_bytes()
    process = multiprocessing.get_context("fork").Process(
        target=_killed_in_the_middle, args=(tmp_path,)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    assert (tmp_path / ".metadata").read_bytes() == before
    loaded = load(tmp_path, blank(saved), PlacementFileSystemReader(tmp_path))
    assert all(same(saved[key], loaded[key]) for key in saved)
    stock_metadata(tmp_path)
    assert_torch_loads(tmp_path, saved)


def test_a_damaged_index_is_refused_and_left(tmp_path: Path) -> None:
    save(tmp_path)
    data = bytearray((tmp_path / ".metadata").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CannotLook, match=r"the index of \.metadata cannot be used"):
        stock_metadata(tmp_path)
    assert (tmp_path / ".metadata").read_bytes() == data
    assert not list(tmp_path.glob("*.partial"))


def save_index(path: Path, *, ranks: int, keys: int) -> None:
    """Write an index of one row of every rank for each key."""
    fqns = [f"layers.{number}.weight" for number in range(keys)]
    offsets = np.stack([np.arange(ranks), np.zeros(ranks, np.int64)], axis=1)
    chunks: Any = ChunkList(np.stack([offsets, np.tile([1, 4], (ranks, 1))], 1))
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((ranks, 4)), chunks)
    places = [
        StoredLocation(fqn, (0, 0), "__0_0.distcp", 1216 * number, 1216)
        for number, fqn in enumerate(fqns)
    ]
    template = WriteResults.of(places).template
    written = [
        WriteResults(template, np.array([rank, 0]), (f"__{rank}_0.distcp",), [])
        for rank in range(ranks)
    ]
    entries = build_entries(dict.fromkeys(fqns, entry))
    table = build_index(written, entries)
    with open(path / ".metadata", "wb") as file:
        write_metadata(Metadata(entries.stored(), storage_data=table), file, stock_metadata=False)


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """One row of 2,048 ranks for each of 1,000 keys: 107 MB of stock metadata."""
    ranks, keys = 2048, 1000
    save_index(tmp_path, ranks=ranks, keys=keys)
    tracemalloc.start()
    try:
        stock_metadata(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = (tmp_path / ".metadata").stat().st_size
    assert size > 52 * ranks * keys
    assert peak < size / 2


def test_inspect_makes_no_object_of_a_row(tmp_path: Path) -> None:
    """Some KB can claim any number of rows."""
    save_index(tmp_path, ranks=1 << 12, keys=1 << 11)
    assert (tmp_path / ".metadata").stat().st_size < 1 << 16
    tracemalloc.start()
    try:
        found = inspect(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(found.tensors), found.totals["chunks"]) == (1 << 11, 1 << 23)
    assert found.tensors["layers.7.weight"].files == tuple(
        sorted(f"__{rank}_0.distcp" for rank in range(1 << 12))
    )
    assert peak < 4 << 23


@pytest.mark.parametrize("command", [stock_metadata, verify])
def test_more_rows_than_can_be_handled_one_by_one_are_refused(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MOST_ROWS", 1 << 10)
    save_index(tmp_path, ranks=1 << 5, keys=1 << 6)
    before = (tmp_path / ".metadata").read_bytes()
    with pytest.raises(CannotLook, match="2,048 chunks, and at most 1,024 are handled"):
        command(tmp_path)
    assert (tmp_path / ".metadata").read_bytes() == before
