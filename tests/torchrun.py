"""Programs started in processes of their own, on several ranks or on none."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer

ROOT = Path(__file__).parent.parent

SECONDS = 280  # that a program may take

_FORKED = Path(__file__).parent / "ranks" / "forked.py"
_WARM = Path(__file__).parent / "ranks" / "warm.py"
# What a rank, or a run with fixed hashes, would hand down.
_LEFT_OUT = ("PYTHONHASHSEED", "RANK", "WORLD_SIZE")


def torchrun(
    program: Path, *arguments: str | Path, ranks: int = 4, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Return what a program printed that torchrun started on some ranks, and its exit code."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, str(program), *map(str, arguments)],
        cwd=cwd,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    done.stdout = _without_gloo(done.stdout)
    return done


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
    return python(_FORKED, str(ranks), modules, program, *arguments, cwd=cwd)


def python(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Return what ``python FILE ...`` or ``python -m MODULE ...`` prints, and its exit code.

    The process is forked from one that has imported torch: ``tests/ranks/warm.py``.
    """
    words = list(map(str, arguments))
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {
            "arguments": words,
            "cwd": str(cwd or Path.cwd()),
            "environment": _environment(),
            "stdout": str(out),
            "stderr": str(err),
        }
        code = _warm_process().run(request)
        texts = (_without_gloo(path.read_text(errors="replace")) for path in (out, err))
        return subprocess.CompletedProcess(words, code, *texts)


class _Warm:
    """The process that programs are forked from."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_WARM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            text=True,
        )

    def run(self, request: dict[str, object]) -> int:
        """Run a program to its end, and return its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        child = int(self.process.stdout.readline())
        ended = Timer(SECONDS, os.killpg, (child, signal.SIGKILL))
        ended.start()
        try:
            return int(self.process.stdout.readline())
        finally:
            ended.cancel()

    def end(self) -> None:
        """Let it leave its loop, and wait for it."""
        self.process.communicate()


@cache
def _warm_process() -> _Warm:
    warm = _Warm()
    atexit.register(warm.end)
    return warm


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}


def _without_gloo(text: str) -> str:
    """Leave out what torch 2.10's gloo says: that its ranks are connected."""
    if "[Gloo]" not in text:
        return text
    # Mostly before a program prints; texts of two ranks may leave an empty line.
    lines = (line for line in text.splitlines(keepends=True) if "peer ranks" not in line)
    return "".join(lines).lstrip("\n")


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of all that was printed."""
    return (done.stdout + done.stderr)[-8000:]
