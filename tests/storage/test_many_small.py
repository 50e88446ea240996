"""Many small tensors of a kind: written and read together, whatever their memory and planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner
from dcp_placements.storage.reader import PlacementFileSystemReader
from dcp_placements.storage.writer import PlacementFileSystemWriter
from dcp_placements.testing import World
from tests.storage_scenes import (
    all_kinds,
    assert_record_of,
    blank,
    data_file,
    same,
    stock_metadata,
)


def many_kinds() -> dict[str, Any]:
    """Return three tensors of each kind that belong together, one behind the other."""
    kinds = all_kinds().items()
    return {
        f"{name}.{at}": value.clone() if at and isinstance(value, torch.Tensor) else value
        for at in range(3)
        for name, value in kinds
    }


def test_files_of_many_kinds_have_torchs_records(tmp_path: Path) -> None:
    saved = many_kinds()
    saved |= {f"view.{at}": torch.arange(60.0)[at * 6 : at * 6 + 6].view(2, 3) for at in range(9)}
    planner = PlacementSavePlanner()
    dcp.save(saved, storage_writer=PlacementFileSystemWriter(tmp_path), planner=planner)
    stored = stock_metadata(tmp_path).storage_data
    assert {index.fqn for index in stored} == set(saved)
    for index, info in stored.items():
        if isinstance(saved[index.fqn], torch.Tensor):
            with open(tmp_path / info.relative_path, "rb") as file:
                file.seek(info.offset)
                assert_record_of(file.read(info.length), saved[index.fqn])
    loaded = blank(saved)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path), planner=DefaultLoadPlanner())
    assert [key for key in saved if not same(saved[key], loaded[key])] == []


def test_a_planner_with_its_own_data_is_asked_for_every_tensor(tmp_path: Path) -> None:
    class Doubled(PlacementSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item) * 2

    class Halved(PlacementLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            tensor /= 2

    saved = {f"w{at}": torch.full((2, 3), at + 1.0) for at in range(20)}
    writer = PlacementFileSystemWriter(tmp_path)
    dcp.save(saved, storage_writer=writer, planner=Doubled())
    for planner, factor in ((PlacementLoadPlanner(), 2), (Halved(), 1)):
        loaded = blank(saved)
        reader = PlacementFileSystemReader(tmp_path)
        dcp.load(loaded, storage_reader=reader, planner=planner)
        assert all(torch.equal(loaded[key], factor * saved[key]) for key in saved)


def inference_zeros(*sizes: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(*sizes)


@pytest.mark.parametrize(
    "blank_one",
    [
        lambda: torch.zeros(2, 3, dtype=torch.bfloat16),
        lambda: torch.zeros(2, 3, dtype=torch.float64),
        lambda: torch.nn.Parameter(torch.zeros(2, 3)),
        lambda: torch._neg_view(torch.zeros(2, 3)),
        lambda: torch._neg_view(torch.zeros(2, 3, dtype=torch.float16)),
        lambda: torch.zeros(2, 3, dtype=torch.complex64).conj().imag,
        lambda: torch.zeros(3, 2).t(),
        lambda: inference_zeros(2, 3),
        lambda: inference_zeros(3, 2).t(),
    ],
)
@pytest.mark.parametrize(("threads", "transposed"), [(1, False), (2, False), (1, True)])
def test_they_fill_what_torch_fills(
    blank_one: Any, threads: int, transposed: bool, tmp_path: Path
) -> None:
    """Many tensors of another dtype, or views that torch copies one by one."""
    saved = {f"w{at:02}": torch.randn(2, 3) for at in range(20)}
    if transposed:
        saved = {key: one.t().contiguous().t() for key, one in saved.items()}
    make = dcp.FileSystemWriter if transposed else PlacementFileSystemWriter  # which keeps orders
    dcp.save(saved, storage_writer=make(tmp_path), planner=PlacementSavePlanner())
    wanted, loaded = ({key: blank_one() for key in saved} for _ in range(2))
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(tmp_path), planner=DefaultLoadPlanner())
    reader = PlacementFileSystemReader(tmp_path, thread_count=threads)
    dcp.load(loaded, storage_reader=reader, planner=PlacementLoadPlanner(cast="allow"))
    for key, value in saved.items():
        if not wanted[key].is_neg():  # which torch forgets across some dtypes
            assert torch.equal(wanted[key], value.to(wanted[key].dtype))
        assert same(loaded[key], value.to(wanted[key].dtype)), key


@pytest.mark.parametrize("damage", [b"x" * 100, None])
def test_a_damaged_or_missing_record_is_named(damage: bytes | None, tmp_path: Path) -> None:
    saved = {f"w{at:02}": torch.full((2, 3), float(at)) for at in range(20)}
    writer = PlacementFileSystemWriter(tmp_path)
    dcp.save(saved, storage_writer=writer, planner=PlacementSavePlanner())
    stored = stock_metadata(tmp_path).storage_data
    [info] = [info for index, info in stored.items() if index.fqn == "w07"]
    with open(data_file(tmp_path, 0), "r+b") as file:
        if damage is None:
            file.truncate(info.offset + 10)
        else:
            file.seek(info.offset)
            file.write(damage)
    with pytest.raises(CheckpointException, match="w07"):
        dcp.load(
            blank(saved),
            storage_reader=PlacementFileSystemReader(tmp_path),
            planner=PlacementLoadPlanner(),
        )


def norms(count: int = 500, numel: int = 1024) -> dict[str, Any]:
    return {f"norm{n}": torch.randn(numel) for n in range(count)}


def test_replicated_small_tensors_are_read_together(tmp_path: Path) -> None:
    saved = norms() | {"step": 3, "lr": 0.1}
    world = World(4)
    world.save(
        tmp_path,
        lambda rank: {k: v.clone() if k.startswith("norm") else v for k, v in saved.items()},
        lambda rank: PlacementSavePlanner(dedup_save_to_lowest_rank=True),
        lambda rank: PlacementFileSystemWriter(tmp_path),
    )
    readers = [PlacementFileSystemReader(tmp_path) for _ in range(4)]
    loaded = world.load(
        tmp_path,
        lambda rank: blank(saved),
        lambda rank: PlacementLoadPlanner(),
        readers.__getitem__,
    )
    for state, reader in zip(loaded, readers, strict=True):
        assert all(same(state[key], saved[key]) for key in saved)
        assert reader.reads <= 10
        assert 500 * 4096 <= reader.bytes_read <= 1.5 * 500 * 4096
        assert reader.opens == 1
