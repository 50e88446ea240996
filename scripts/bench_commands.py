"""scripts/bench commands [--tiny] [--json FILE]

Saves a checkpoint of small tensors under the keys of a mixture of experts with one tensor per
expert and AdamW, in one process. Then runs the help, the version, inspect and verify, each in a
process of its own. Prints the CPU seconds and the wall seconds of each process and the lines that
it prints; the last row is a process that imports torch and nothing else.

With --json a file of machine, options and commands: by name cpu_s, wall_s and lines.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from bench_common import machine, write_json

from dcp_placements import PlacementFileSystemWriter, PlacementSavePlanner


def save(path: Path, layers: int, experts: int) -> int:
    """Save the checkpoint; return the number of its keys."""
    tensor = torch.zeros(2, 2)
    parameters = [f"layers.{n}.{name}" for n in range(layers) for name in ("norm", "wq", "wo")]
    parameters += [
        f"layers.{n}.experts.{e}.{name}"
        for n in range(3, layers)
        for e in range(experts)
        for name in ("w1", "w2", "w3")
    ]
    state_dict: dict[str, Any] = dict.fromkeys(parameters, tensor)
    for parameter in parameters:
        for state in ("exp_avg", "exp_avg_sq"):
            state_dict[f"optim.state.{parameter}.{state}"] = tensor
    state_dict["step"] = 1000
    writer = PlacementFileSystemWriter(path)
    dcp.save(state_dict, storage_writer=writer, planner=PlacementSavePlanner(), no_dist=True)
    return len(state_dict)


def measure(command: list[str]) -> dict[str, Any]:
    """Return what one process costs."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu_s, "wall_s": wall_s, "lines": len(done.stdout.splitlines())}


def main() -> None:
    """Parse the options, measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="4 layers of 2 experts.")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as root:
        path = Path(root) / "step"
        keys = save(path, *((4, 2) if options.tiny else (61, 256)))
        print(f"{keys:,} keys, .metadata of {(path / '.metadata').stat().st_size:,} bytes")
        program = [sys.executable, "-m", "dcp_placements"]
        results = {
            "--help": measure([*program, "--help"]),
            "--version": measure([*program, "--version"]),
            "inspect": measure([*program, "inspect", str(path)]),
            "verify": measure([*program, "verify", str(path)]),
            "import torch": measure([sys.executable, "-c", "import torch"]),
        }
    print(f"{'command':<14} {'CPU s':>6} {'wall s':>7} {'lines':>6}")
    for name, result in results.items():
        print(f"{name:<14} {result['cpu_s']:>6.2f} {result['wall_s']:>7.2f} {result['lines']:>6}")
    shown = {"tiny": options.tiny, "keys": keys}
    write_json(options.json, {"machine": machine(), "options": shown, "commands": results})


if __name__ == "__main__":
    main()
