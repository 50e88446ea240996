"""``installed`` under frameworks as they are: accelerate and Lightning, expert parallel 2, FSDP2 2.

Their functions pass torch's default planners, or none. Saved and loaded in new processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.torchrun import tail, torchrun

WORKER = Path(__file__).parent / "ranks" / "frameworks_worker.py"
FRAMEWORKS = ("accelerate", "lightning")
EXPERT = "experts.weight/"

Held = dict[str, torch.Tensor]


def save_and_load(out: Path, framework: str, *options: str) -> list[tuple[Held, Held]]:
    """Return, rank by rank, what was held at the save and after the load."""
    pytest.importorskip(framework)
    for act in ("save", "load"):
        done = torchrun(WORKER, out, framework, act, *options)
        assert done.returncode == 0, tail(done)
    return [
        (torch.load(out / f"held_{rank}.pt"), torch.load(out / f"loaded_{rank}.pt"))
        for rank in range(4)
    ]


def different(saved: Held, loaded: Held) -> set[str]:
    assert saved.keys() == loaded.keys()
    return {name for name in saved if not torch.equal(saved[name], loaded[name])}


@pytest.mark.dist
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_weight_and_moment_is_back(tmp_path: Path, framework: str) -> None:
    ranks = save_and_load(tmp_path, framework)
    for saved, loaded in ranks:
        assert {f"experts.weight/{kind}" for kind in ("weight", "exp_avg", "step")} <= saved.keys()
        assert different(saved, loaded) == set()
    # What is compared differs by expert-parallel rank: nobody could have the other's.
    assert not torch.equal(ranks[0][0][EXPERT + "weight"], ranks[2][0][EXPERT + "weight"])


@pytest.mark.dist
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_it_half_of_the_experts_are_lost(tmp_path: Path, framework: str) -> None:
    ranks = save_and_load(tmp_path, framework, "stock")
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    lost = [different(saved, loaded) for saved, loaded in ranks]
    assert sum(EXPERT + kind in names for names in lost for kind in kinds) == 6
    assert not any(name.startswith("dense") for names in lost for name in names)
