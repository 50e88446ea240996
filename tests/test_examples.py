"""The examples of ``scripts/examples``: each runs, and prints what it says."""

from __future__ import annotations

import contextlib
import io
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.torchrun import forked

EXAMPLES = Path(__file__).parent.parent / "scripts" / "examples"
TORCHRUN = {"transformers_moe.py": 2}
"""Examples for real ranks, and how many."""

PRINTED = {
    "megatron_core.py": "experts 0-3: True\nvocabulary without its padding: True\n",
    "megatron_lite.py": "layer 3 of stage 1, gate over up: True\n"
    "its expert 3, local number 1 on ep 1: True\n",
    "torchtitan.py": "whole in the file: True\nthe same chunks as with torch's planner: True\n",
    "transformers_moe.py": "logits equal: True\n",
    "veomni.py": "experts in the file: 0 1 2 3 4 5 6 7\n",
}


def test_every_example_is_short_and_run_here() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert [file.name for file in files] == sorted(PRINTED)
    for file in files:
        assert len(file.read_text().splitlines()) < 80, file.name


@pytest.mark.parametrize("name", [name for name in PRINTED if name not in TORCHRUN])
def test_it_prints_what_it_says(name: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert printed.getvalue() == PRINTED[name]


@pytest.mark.dist
@pytest.mark.parametrize("name", TORCHRUN)
def test_those_for_real_ranks_print_what_they_say(name: str, tmp_path: Path) -> None:
    if name == "transformers_moe.py" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    late = "transformers.models.qwen3_moe.modeling_qwen3_moe" if "transformers" in name else ""
    done = forked(EXAMPLES / name, ranks=TORCHRUN[name], cwd=tmp_path, modules=late)
    # Judged by what is printed: gloo's threads sometimes abort a process that is done.
    assert done.stdout == PRINTED[name], done.stderr
