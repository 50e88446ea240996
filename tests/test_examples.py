"""The examples of ``scripts/examples``: each runs, and prints what it says."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "scripts" / "examples"
TORCHRUN = "transformers_moe.py"
PRINTED = {
    "megatron_core.py": "experts 0-3: True\nvocabulary without its padding: True\n",
    "megatron_lite.py": "layer 3 of stage 1, gate over up: True\n"
    "its expert 3, local number 1 on ep 1: True\n",
    "torchtitan.py": "whole in the file: True\nthe same chunks as with torch's planner: True\n",
    TORCHRUN: "logits equal: True\n",
    "veomni.py": "experts in the file: 0 1 2 3 4 5 6 7\n",
}


def test_every_example_is_short_and_run_here() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert [file.name for file in files] == sorted(PRINTED)
    for file in files:
        assert len(file.read_text().splitlines()) < 80, file.name


@pytest.mark.parametrize("name", [name for name in PRINTED if name != TORCHRUN])
def test_it_prints_what_it_says(name: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert printed.getvalue() == PRINTED[name]


@pytest.mark.dist
def test_the_one_for_real_ranks_prints_what_it_says(tmp_path: Path) -> None:
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    root = EXAMPLES.parent.parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLES / TORCHRUN)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    # Judged by what is printed: gloo's threads sometimes abort a process that is done.
    assert done.stdout == PRINTED[TORCHRUN], done.stderr
