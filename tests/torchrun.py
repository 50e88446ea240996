"""Programs started on several ranks of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

_FORKED = Path(__file__).parent / "ranks" / "forked.py"
# What a rank, or a run with fixed hashes, would hand down.
_LEFT_OUT = ("PYTHONHASHSEED", "RANK", "WORLD_SIZE")


def torchrun(
    program: Path, *arguments: str | Path, ranks: int = 4, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Return what a program printed that torchrun started on some ranks, and its exit code."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return _run([*launcher, str(program), *map(str, arguments)], cwd)


def forked(
    program: Path,
    *arguments: str | Path,
    ranks: int = 4,
    cwd: Path | None = None,
    modules: str = "",
) -> subprocess.CompletedProcess[str]:
    """Return what ``torchrun`` does; the ranks share what they import, and their hash seed.

    ``modules``, joined by commas, are imported once beside those at the program's top.
    """
    return _run([str(_FORKED), str(ranks), modules, str(program), *map(str, arguments)], cwd)


def _run(command: list[str], cwd: Path | None) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [kept.get("PYTHONPATH")])]
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    # Torch 2.10's gloo says there that its ranks are connected.
    if "[Gloo]" in done.stdout:
        lines = done.stdout.splitlines(keepends=True)
        # Mostly before a program prints; texts of two ranks may leave an empty line.
        said = "".join(line for line in lines if "peer ranks" not in line)
        done.stdout = said.lstrip("\n")
    return done


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of all that was printed."""
    return (done.stdout + done.stderr)[-8000:]
