"""Under ``torch.set_default_device`` results are the same: our own buffers are on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import PlacementFileSystemReader, PlacementFileSystemWriter
from dcp_placements.offline import diff, export_safetensors, reshard, verify

WHOLE = torch.arange(30_000.0).reshape(300, 100)


@pytest.fixture
def on_meta() -> Iterator[None]:
    """The device on which a tensor that is made without one is empty."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.fixture
def saved(tmp_path: Path, on_meta: None) -> Path:
    writer = PlacementFileSystemWriter(tmp_path / "saved")
    dcp.save({"w": WHOLE}, storage_writer=writer, no_dist=True)
    return tmp_path / "saved"


def test_a_save_is_loaded(saved: Path) -> None:
    for reader in (dcp.FileSystemReader(saved), PlacementFileSystemReader(saved)):
        target = torch.zeros(300, 100, device="cpu")
        dcp.load({"w": target}, storage_reader=reader, no_dist=True)
        assert torch.equal(target, WHOLE)


def test_commands_read_and_write_elements(saved: Path, tmp_path: Path) -> None:
    assert verify(saved, contents=True).sound
    reshard(saved, tmp_path / "resharded", lambda mesh: {}, {"dp": 1})
    assert not diff(saved, tmp_path / "resharded").differences
    export_safetensors(saved, tmp_path / "hub")
    safetensors = pytest.importorskip("safetensors.torch")
    exported = safetensors.load_file(tmp_path / "hub" / "model.safetensors", device="cpu")
    assert torch.equal(exported["w"], WHOLE)
