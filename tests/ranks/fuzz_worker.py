"""A program: commands on damaged files, in one process; prints what went wrong."""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import sys
import time
from pathlib import Path

from dcp_placements.cli import main

VALUES = (b"\x00", b"\xff", b"[", b"{", b'"', b"9", b"r", b"\x85", b"\x1b", b"\n", b"e", b"-")


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return data with a few bytes changed, dropped, repeated or put in."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(len(made) + 1)
        how = rng.randrange(6)
        if how == 0 and made:
            made[at % len(made)] = rng.randrange(256)
        elif how == 1:
            del made[at : at + rng.choice((1, 4, 100))]
        elif how == 2:
            made[at:at] = rng.choice(VALUES) * rng.choice((1, 8, 5000))
        elif how == 3:
            made[at:at] = made[at : at + rng.choice((1, 16, 300))]
        elif how == 4:
            made[at : at + 8] = rng.choice((b"\xff" * 8, b"\x00" * 8, b"\x00" * 5 + b"\x7f"))
        else:
            del made[at:]
    return bytes(made)


def peak_nbytes() -> int:
    """Return the most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(file: Path, commands: list[str], seconds: float, seed: int) -> tuple[int, list[str]]:
    """Return how many damages there were, and what went wrong."""
    whole = file.read_bytes()
    rng = random.Random(seed)
    faults = []
    rounds = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = damaged(whole, rng)
        file.write_bytes(data)
        command = rng.choice(commands)
        out, err = io.StringIO(), io.StringIO()
        code: object
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main([command, str(file.parent)])
            except BaseException as error:
                code = f"{type(error).__name__}: {error}"
        printed = err.getvalue() + out.getvalue()
        if (
            code not in (0, 1, 2)
            or "Traceback" in printed
            or "MemoryError" in printed
            or "\x1b" in printed
        ):
            faults.append(f"{file.name} {command} round {rounds}: {code} {printed[:300]}")
        rounds += 1
    file.write_bytes(whole)
    return rounds, faults


if __name__ == "__main__":
    seconds = float(sys.argv[1])
    jobs = json.loads(sys.argv[2])
    # The first run imports what the commands need.
    for path, commands in jobs:
        with contextlib.redirect_stdout(io.StringIO()):
            for command in commands:
                main([command, str(Path(path).parent)])
    before = peak_nbytes()
    resource.setrlimit(resource.RLIMIT_AS, (before + (8 << 30), before + (8 << 30)))
    rounds, faults = 0, []
    for number, (path, commands) in enumerate(jobs):
        done, found = fuzz(Path(path), commands, seconds / len(jobs), number)
        rounds += done
        faults += found
    print(json.dumps({"rounds": rounds, "faults": faults, "grown": peak_nbytes() - before}))
