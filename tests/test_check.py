"""check() on real ranks: one message, rules to paste, and what shapes alone do not show."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from dcp_placements import PlacementError
from dcp_placements.errors import NoCheckpoint
from tests.torchrun import forked, tail

PROGRAM = """
import warnings
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from dcp_placements import CheckpointPlacement, PlacementError, Placements, check

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
ep, tp = mesh.get_coordinate()
rank = dist.get_rank()
router, zeros = torch.arange(12.0).view(3, 4), torch.zeros(3, 4)
experts = torch.arange(32.0).view(4, 8)
state = {
    "model": {
        "router": router,
        "zeros": zeros,
        "w": experts.chunk(2, 1)[tp],
        "experts.0": experts.chunk(2)[tp] + 0 * ep,  # equal along ep, as before the first step
    }
}
shard = CheckpointPlacement(mesh, {"tp": Shard(0)})
rules = {
    "router": shard,
    "zeros": shard,
    "w": CheckpointPlacement(mesh, {"tp": Shard(1)}),
    "experts": CheckpointPlacement(mesh, {"ep": Shard(1), "tp": Shard(0)}),
}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    report = check(state, Placements(rules, waive={"experts": "as declared"}))
if rank == 0:
    print("WARNED", [str(one.message).replace("\\n", "|") for one in caught])
    print("REPORTED", len(report.warnings))
dist.barrier()

whole = {"router": (3, 4), "zeros": (3, 4), "w": (4, 8), "experts.0": (4, 8)}
del rules["experts"], rules["zeros"], state["model"]["zeros"], whole["zeros"]
try:
    check(state, Placements(rules, whole=whole))
except PlacementError as error:
    Path(f"check{rank}").write_text(str(error))
try:
    dcp.save(state, checkpoint_id="no", planner=Placements(rules, whole=whole).save_planner())
except BaseException as failed:
    Path(f"save{rank}").write_text(str(failed.failures[0][0]))
dist.destroy_process_group()
"""


@pytest.mark.dist
def test_equal_parts_and_a_refusal_on_real_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = forked(tmp_path / "program.py", ranks=4, cwd=tmp_path)
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    # M104: equal parts of what is no expert's, and not those that are all zeros.
    assert lines["WARNED"].count("its parts along 'tp' are bit for bit equal") == 1, tail(done)
    assert "model.router: its parts along 'tp'" in lines["WARNED"]
    assert lines["REPORTED"] == "1"
    said = {file: (tmp_path / file).read_text() for file in ("check0", "save0")}
    assert all("model.router: is (6, 4), where the whole" in text for text in said.values())
    assert 'CheckpointPlacement(meshes["tp"], {"tp": Shard(1)}),' in said["check0"]
    for step in ("check", "save"):
        for rank in range(1, 4):
            (line,) = (tmp_path / f"{step}{rank}").read_text().splitlines()
            assert line.endswith("rank 0 has the whole message")
    assert not list((tmp_path / "no").glob("*"))


def test_an_error_that_is_sent_is_whole_on_the_rank_that_has_it() -> None:
    error = pickle.loads(pickle.dumps(PlacementError("first\n    second")))
    assert type(error) is PlacementError
    assert str(error) == "first\n    second"
    assert isinstance(pickle.loads(pickle.dumps(NoCheckpoint("none"))), FileNotFoundError)
