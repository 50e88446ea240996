"""The trainer of README.md in an empty folder: resumed anywhere, it ends with the same bits."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_placements import MeshCoordinate, Placements, Renumber, contiguous
from dcp_placements.offline import rehearse
from tests.torchrun import forked

README = Path(__file__).parent.parent / "README.md"
(TRAINER,) = re.findall(r"```python trainer.py\n(.*?)```\n", README.read_text(), re.DOTALL)

STEPS = 6


def train(folder: Path, *, ranks: int, ep: int) -> list[str]:
    """Run the trainer up to the last step, from what is in ``folder``; return each step's line."""
    (folder / "trainer.py").write_text(TRAINER)
    done = forked(folder / "trainer.py", str(ep), str(STEPS), ranks=ranks, cwd=folder)
    # Judged by what is printed and saved: gloo's threads sometimes abort a process that is done.
    assert f"step {STEPS}:" in done.stdout, done.stderr
    # Gloo of torch 2.10 prints between them, from several processes.
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


def whole_tensors(path: Path) -> dict[str, Any]:
    """Return every weight and moment, as torch's default planner reads them in one process."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    whole = {
        fqn: torch.full(tensor.size, 7.0).to(tensor.properties.dtype)
        for fqn, tensor in stored.items()
        if isinstance(tensor, TensorStorageMetadata)
        and fqn.startswith(("model.", "optim.", "ema."))
    }
    dcp.load(whole, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    return whole


def placements(mesh: MeshCoordinate) -> Placements:
    """Return what the trainer declares on a rank of ``(edp, ep)``."""
    ep, at = mesh.size(1), mesh.get_local_rank("ep")
    return Placements({}, rename=Renumber("experts.{}", contiguous([8 // ep] * ep, at), total=8))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    lines = train(folder, ranks=4, ep=2)
    assert [line.split(":")[0] for line in lines] == [f"step {at + 1}" for at in range(STEPS)]
    return folder


def test_it_is_short() -> None:
    assert len(TRAINER.splitlines()) < 150


@pytest.mark.dist
def test_its_experts_differ_and_were_trained(uninterrupted: Path) -> None:
    first = whole_tensors(uninterrupted / "checkpoints" / "2")
    last = whole_tensors(uninterrupted / "checkpoints" / str(STEPS))
    experts = [last[f"model.1.experts.{number}.w1"] for number in range(8)]
    assert {expert.shape for expert in experts} == {(16, 24)}
    assert len({expert.sum().item() for expert in experts}) == 8
    assert not torch.equal(experts[7], first["model.1.experts.7.w1"])
    assert not torch.equal(experts[7], last["ema.1.experts.7.w1"])
    # 39 weights, with an average, two moments and a step of each.
    assert sum(fqn.startswith("model.") for fqn in last) == 39
    assert len(last) == 5 * 39


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "ep"), [(4, 4), (2, 2)])
def test_resumed_it_ends_as_the_run_that_was_not_interrupted(
    uninterrupted: Path, ranks: int, ep: int, tmp_path: Path
) -> None:
    shutil.copytree(uninterrupted / "checkpoints" / "2", tmp_path / "checkpoints" / "2")
    fsdp = {"experts": ["edp"], "**": ["edp", "ep"]}
    mesh = {"edp": ranks // ep, "ep": ep}
    found = rehearse(tmp_path / "checkpoints" / "2", placements, mesh, fsdp=fsdp)
    assert found.loads, found.faults
    sizes = sum(one.wanted_nbytes for one in found.ranks)
    # Of each step, 4 bytes, that every rank reads which has the parameter.
    again = 4 * (7 * (ranks - 1) + 32 * (ranks // ep - 1))
    assert sizes - again == found.unique_nbytes, "every element is one rank's"
    lines = train(tmp_path, ranks=ranks, ep=ep)
    assert lines[0].startswith("step 3:")
    expected = whole_tensors(uninterrupted / "checkpoints" / str(STEPS))
    resumed = whole_tensors(tmp_path / "checkpoints" / str(STEPS))
    assert resumed.keys() == expected.keys()
    for fqn, tensor in expected.items():
        assert torch.equal(resumed[fqn], tensor), fqn
