"""``installed`` under frameworks as they are: accelerate and Lightning, expert parallel 2, FSDP2 2.

Their functions pass torch's default planners, or none. Saved and loaded in new processes. The same
with ``async_save`` in a thread and in a process, which ends after the context is left.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.torchrun import forked, tail

WORKER = Path(__file__).parent / "ranks" / "frameworks_worker.py"
EXPERT = "experts.weight/"
KINDS = ("weight", "exp_avg", "exp_avg_sq")

Held = dict[str, torch.Tensor]


def different(saved: Held, loaded: Held) -> set[str]:
    assert saved.keys() == loaded.keys()
    return {name for name in saved if not torch.equal(saved[name], loaded[name])}


@pytest.mark.dist
@pytest.mark.parametrize("framework", ["accelerate", "lightning", "thread", "process"])
def test_all_weights_and_moments_are_back_and_half_of_the_experts_without_it_are_not(
    tmp_path: Path, framework: str
) -> None:
    if framework in ("accelerate", "lightning"):
        pytest.importorskip(framework)
    modules = "lightning.fabric.strategies" if framework == "lightning" else ""
    for act in ("save", "load"):
        done = forked(WORKER, tmp_path, framework, act, modules=modules)
        assert done.returncode == 0, tail(done)
    lost = []
    for rank in range(4):
        saved = torch.load(tmp_path / f"held_{rank}.pt")
        assert {EXPERT + kind for kind in (*KINDS, "step")} <= saved.keys()
        assert different(saved, torch.load(tmp_path / f"ours_{rank}.pt")) == set()
        lost += sorted(different(saved, torch.load(tmp_path / f"stock_{rank}.pt")))
    assert sorted(lost) == sorted([EXPERT + kind for kind in KINDS for _ in range(2)])
