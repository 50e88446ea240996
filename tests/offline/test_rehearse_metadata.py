"""The metadata that a rehearsal announces, against those of a real save by the same ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from dcp_placements import PlacementFileSystemWriter, PlacementSavePlanner
from dcp_placements.cli.commands import rehearsing
from dcp_placements.offline import rehearse
from dcp_placements.offline.rehearsals import saved_metadata
from dcp_placements.offline.rehearsals.saved_metadata import SavedMetadata
from dcp_placements.testing import FakeDTensor, World, cut
from tests.offline_scenes import Run, rules_by_ep
from tests.storage_scenes import pickle_nbytes

AXES = {"edp": 4, "ep": 4}


def save(path: Path, *, stock_metadata: bool) -> list[int]:
    """Save experts over ep and edp, norms over edp; return the bytes that each rank sent."""
    world = World(16)
    sent: list[int] = []

    class Writer(PlacementFileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            sent.append(len(pickle.dumps(written.value())))
            return written

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, **AXES)
        made: dict[str, Any] = {"bias": torch.ones(3, 5)}
        for layer in range(80):
            experts = torch.full((8, 13, 3), float(layer))
            part = cut(experts, [Shard(0)], (4,), mesh["ep"].get_coordinate())
            for name in ("w1", "exp_avg.w1"):
                fqn = f"layers.{layer}.experts.{name}"
                made[fqn] = FakeDTensor.distribute(part, mesh["edp"], [Shard(0)])
            norm = torch.full((11,), float(layer))
            made[f"layers.{layer}.norm"] = FakeDTensor.distribute(norm, mesh["edp"], [Shard(0)])
        made["bias"] = FakeDTensor.distribute(made["bias"], mesh["edp"], [Shard(0)])
        return made

    world.save(
        path,
        state_dict,
        lambda rank: PlacementSavePlanner(rules_by_ep(world.mesh(rank, **AXES)), digests="off"),
        lambda rank: Writer(path, stock_metadata=stock_metadata),
    )
    return sent


def test_sizes_are_those_of_a_real_save(tmp_path: Path) -> None:
    sent = save(tmp_path / "stock", stock_metadata=True)
    save(tmp_path / "index", stock_metadata=False)
    data = (tmp_path / "stock" / ".metadata").read_bytes()
    stock_nbytes = pickle_nbytes(data)
    index_nbytes = (tmp_path / "index" / ".metadata").stat().st_size
    for name in ("stock", "index"):
        found = rehearse(tmp_path / name, rules_by_ep, AXES, fsdp=["edp"])
        assert found.loads
        saved = found.metadata
        # Two experts are cut over four ranks: half of the ranks have none.
        assert saved.rows == sum(
            len(entry.chunks) for entry in pickle.loads(data).state_dict_metadata.values()
        )
        assert saved.stock_nbytes == pytest.approx(stock_nbytes, rel=0.03)
        # A save writes small tensors by group, so that starts in its files are less regular.
        assert saved.index_nbytes == pytest.approx(index_nbytes, rel=0.3)
        assert saved.sent_nbytes == pytest.approx(max(sent), rel=0.3)
        assert saved.index_nbytes <= saved.read_nbytes < saved.index_nbytes + 4096
        assert not saved.is_large


def test_rows_are_52_bytes_and_the_index_grows_little(tmp_path: Path) -> None:
    save(tmp_path, stock_metadata=True)
    small, large = (
        rehearse(tmp_path, rules_by_ep, {"edp": edp, "ep": 8}, fsdp=["edp"]).metadata
        for edp in (1, 11)
    )
    rows = large.rows - small.rows
    assert rows > 80 * 10
    assert 52 * rows < large.stock_nbytes - small.stock_nbytes < 56 * rows
    assert large.index_nbytes < 2 * small.index_nbytes


def test_command_names_the_option_of_the_writer_beyond_a_limit(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "ckpt", stock_metadata=True)
    monkeypatch.chdir(tmp_path)
    Path("some_rules.py").write_text("from tests.offline_scenes import rules_by_ep as rules\n")
    given = ("rehearse", "ckpt", "--rules", "some_rules:rules", "--mesh", "edp=4,ep=4")
    given = (*given, "--fsdp", "edp")
    assert "metadata:" not in run(*given).out
    monkeypatch.setattr(rehearsing, "MIN_METADATA_NBYTES", 1)
    assert "stock and" in run(*given).out
    assert "stock_metadata=False" not in run(*given).out
    monkeypatch.setattr(saved_metadata, "STOCK_LIMIT_NBYTES", 1)
    ran = run(*given)
    assert (ran.code, ran.err) == (0, "")
    assert "PlacementFileSystemWriter(stock_metadata=False)" in ran.out
    assert max(map(len, ran.out.splitlines())) < 120
    sizes = run(*given, "--json").json["metadata"]
    names = [name.replace("nbytes", "bytes") for name in SavedMetadata.__dataclass_fields__]
    assert list(sizes) == names
