"""``installed`` under frameworks as they are, expert parallel 2, FSDP2 2.

Their functions pass torch's default planners, planners of their own, or none. Saved and loaded in
new processes. The same with ``async_save`` in a thread and in a process, which ends after the
context is left.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.torchrun import forked, tail

WORKER = Path(__file__).parent / "ranks" / "frameworks_worker.py"
# The first one that is installed makes the process group.
MODULES = {
    "accelerate": "accelerate.utils",
    "lightning": "lightning.fabric.strategies",
    "transformers": "transformers.trainer",
    "nemo_automodel": "nemo_automodel.components.checkpoint.checkpointing",
    "torchtitan": "torchtitan.components.checkpointer",
    "llamafactory": "llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2",
    "torchtune": "torchtune.training.checkpointing",
    "olmo_core": "olmo_core.distributed.checkpoint",
    "torchtnt": "torchtnt.framework.callbacks.dcp_saver",
}
EXPERT = "experts.weight/"
KINDS = ("weight", "exp_avg", "exp_avg_sq")

Held = dict[str, torch.Tensor]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the ranks wrote what they held, by framework."""
    out = tmp_path_factory.mktemp("frameworks")
    found = [name for name in MODULES if find_spec(name)]
    modules = ",".join(MODULES[name] for name in found)
    for act in ("save", "load"):
        done = forked(WORKER, out, act, *found, "thread", "process", modules=modules)
        assert done.returncode == 0, tail(done)
    return out


def different(saved: Held, loaded: Held) -> set[str]:
    assert saved.keys() == loaded.keys()
    return {name for name in saved if not torch.equal(saved[name], loaded[name])}


@pytest.mark.parametrize("framework", [*MODULES, "thread", "process"])
def test_all_weights_and_moments_are_back_and_half_of_the_experts_without_it_are_not(
    held: Path, framework: str
) -> None:
    path = held / framework
    if not path.exists():
        pytest.skip(f"{framework} is not installed")
    lost = []
    for rank in range(4):
        saved = torch.load(path / f"held_{rank}.pt")
        assert {EXPERT + kind for kind in (*KINDS, "step")} <= saved.keys()
        assert different(saved, torch.load(path / f"ours_{rank}.pt")) == set()
        lost += sorted(different(saved, torch.load(path / f"stock_{rank}.pt")))
    assert sorted(lost) == sorted([EXPERT + kind for kind in KINDS for _ in range(2)])
