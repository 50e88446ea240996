"""Small tensors, which are read with their neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner
from dcp_placements.storage.reader import PlacementFileSystemReader
from dcp_placements.storage.writer import PlacementFileSystemWriter
from dcp_placements.testing import World
from tests.storage_scenes import blank, load, same
from tests.strategies import examples


def norms(count: int = 500, numel: int = 1024) -> dict[str, Any]:
    return {f"norm{n}": torch.randn(numel) for n in range(count)}


def written(path: Path, saved: dict[str, Any]) -> None:
    dcp.save(saved, storage_writer=PlacementFileSystemWriter(path))


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


@pytest.mark.parametrize("numel", [64, 1024, 8000])
def test_neighbours_come_in_one_call(numel: int, tmp_path: Path) -> None:
    saved = norms(40, numel)
    written(tmp_path, saved)
    reader = PlacementFileSystemReader(tmp_path)
    loaded = load(tmp_path, blank(saved), reader)
    assert all(same(saved[key], loaded[key]) for key in saved)
    assert reader.reads == 1


@examples(40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([(300,), (17, 31), (64, 8), (512, 1), (2, 0), ()]),
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
            st.sampled_from(["plain", "turned", "part", "grad"]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_any_small_tensors_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    expected: list[tuple[tuple[int, ...], torch.dtype, str]],
) -> None:
    saved: dict[str, Any] = {}
    for number, (shape, dtype, kind) in enumerate(expected):
        tensor = (torch.randn(shape) * 100).to(dtype)
        if kind == "turned" and len(shape) == 2:
            tensor = (torch.randn(shape[::-1]) * 100).to(dtype).t()
        elif kind == "part":
            tensor = torch.stack([tensor, tensor])[1]
        elif kind == "grad" and dtype.is_floating_point:
            tensor = torch.nn.Parameter(tensor)
        saved[f"t{number}"] = tensor
    path = tmp_path_factory.mktemp("small")
    written(path, saved)
    loaded = load(path, blank(saved), PlacementFileSystemReader(path))
    assert all(same(saved[key], loaded[key]) for key in saved)


def test_small_tensors_that_are_alike_are_delivered_together(tmp_path: Path) -> None:
    """Whole, cast, transposed, in slices; between them others of another shape and length."""
    saved: dict[str, torch.Tensor] = {}
    for at in range(40):
        saved[f"plain.{at:02}"] = torch.arange(12.0).reshape(3, 4) + 100 * at
    saved["ints"] = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    saved["empty"] = torch.zeros(0, 4)
    saved["empty.2"] = torch.zeros(0, 4)
    saved["scalar"], saved["scalar.2"] = torch.tensor(7.0), torch.tensor(8.0)
    dcp.save(saved, storage_writer=PlacementFileSystemWriter(tmp_path))
    loaded = {key: torch.full_like(value, -1) for key, value in saved.items()}
    loaded["plain.03"] = torch.full((3, 4), -1, dtype=torch.float64)
    loaded["plain.05"] = torch.full((4, 3), -1.0).t()
    loaded["plain.07"] = torch.full((6, 8), -1.0)[::2, ::2]
    reader = PlacementFileSystemReader(tmp_path)
    dcp.load(loaded, storage_reader=reader, planner=DefaultLoadPlanner())
    for key, value in saved.items():
        assert torch.equal(loaded[key].to(value.dtype), value), key
    assert reader.reads < 10
