"""Dtypes that torch's writers do not write are refused by name, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import refused

from dcp_placements import PlacementFileSystemWriter, PlacementLoadPlanner, PlacementSavePlanner

CODES = torch.arange(4, dtype=torch.uint8)


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("dtype", [torch.int4, torch.uint4, torch.bits8], ids=str)
def test_m148_a_dtype_that_is_not_written_is_named(
    dtype: torch.dtype, is_ours: bool, tmp_path: Path
) -> None:
    kind = PlacementFileSystemWriter if is_ours else dcp.FileSystemWriter
    path = tmp_path / "a"
    state = {"w": torch.ones(2), "codes": CODES.view(dtype)}

    def save() -> None:
        planner = PlacementSavePlanner()
        dcp.save(state, storage_writer=kind(path), planner=planner, no_dist=True)

    if is_ours and dtype == torch.bits8:
        save()
        read = {"codes": torch.zeros_like(CODES).view(dtype)}
        dcp.load(read, checkpoint_id=path, planner=PlacementLoadPlanner(), no_dist=True)
        assert torch.equal(read["codes"].view(torch.uint8), CODES)
        return
    with refused() as refusal:
        save()
    refusal.says("codes", str(dtype), "tensor.view(torch.uint8)")
    assert not path.exists() or not list(path.glob("*.distcp"))
    if dtype == torch.bits8:
        refusal.says("storage_writer=PlacementFileSystemWriter(path)")
    state["codes"] = state["codes"].view(torch.uint8)
    save()
    bytes_of = {"codes": torch.zeros_like(CODES)}
    dcp.load(bytes_of, checkpoint_id=path, planner=PlacementLoadPlanner(), no_dist=True)
    assert torch.equal(bytes_of["codes"], CODES)
