"""Programs started on several ranks of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent

# What a rank, or a run with fixed hashes, would hand down.
_LEFT_OUT = ("PYTHONHASHSEED", "RANK", "WORLD_SIZE")


def torchrun(
    program: Path,
    *arguments: str | Path,
    ranks: int = 4,
    timeout: int = 280,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Return what a program on some ranks came to, ``stdout`` and ``stderr`` apart.

    Args:
        program: It finds the package and ``tests`` on its path.
        arguments: Its own.
        ranks: Processes.
        timeout: In seconds.
        environment: More variables.
    """
    kept = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(program), *map(str, arguments)]
    return subprocess.run(
        command,
        env=kept | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of all that was printed."""
    return (done.stdout + done.stderr)[-8000:]
