"""scripts/bench offline [--nbytes N] [--memory SIZE] [--json FILE]

Saves the same tensors twice, cut by rows from 4 ranks and by columns from 2, and as one safetensors
file besides; then runs inspect, verify --digests, diff of the two and diff with the safetensors
file, each in a process of its own with --memory. Prints seconds, the bytes of data that were read
per second, and the memory of each process at its highest, over that of one that only inspects a
checkpoint of one element.

With --json a file of machine, options, floor_bytes and commands: by name seconds and peak_bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from bench_common import machine, write_json
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

from dcp_placements import PlacementFileSystemWriter, PlacementSavePlanner
from dcp_placements.errors import format_nbytes
from dcp_placements.testing import FakeDTensor, World

TENSORS = 8


def save_all(root: Path, nbytes: int) -> None:
    """Save the tensors in three ways, and one element alone."""
    rows = max(nbytes // TENSORS // 4 // 4096, 4)
    whole = {
        f"layers.{n}.weight": torch.arange(rows * 4096, dtype=torch.int32)
        .add_(n)
        .view(torch.float32)
        .nan_to_num_()
        .view(rows, 4096)
        for n in range(TENSORS)
    }
    for name, ranks, dim in (("rows", 4, 0), ("columns", 2, 1)):
        world = World(ranks)

        def state_dict(rank: int, world: World = world, dim: int = dim) -> dict[str, Any]:
            mesh = world.mesh(rank, fsdp=world.size)
            return {
                key: FakeDTensor.distribute(tensor, mesh, [Shard(dim)])
                for key, tensor in whole.items()
            }

        world.save(
            root / name,
            state_dict,
            lambda rank: PlacementSavePlanner(digests="full"),
            lambda rank, name=name: PlacementFileSystemWriter(root / name),
        )
    (root / "hf").mkdir()
    save_file(whole, root / "hf" / "model.safetensors")
    dcp.save({"w": torch.ones(1)}, checkpoint_id=root / "floor", no_dist=True)


CHILD = """
import sys
from pathlib import Path
from dcp_placements.cli import main
code = main(sys.argv[2:])
line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
Path(sys.argv[1]).write_text(line.split()[1])
sys.exit(code)
"""


def run(root: Path, *arguments: str) -> tuple[float, int]:
    """Run the command line; return seconds, and the bytes of memory at its highest."""
    peak = root / "peak"
    command = [sys.executable, "-c", CHILD, str(peak), *arguments]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{arguments}: exit code {done.returncode}\n{done.stdout}")
    return seconds, int(peak.read_text()) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nbytes", type=int, default=2 << 30)
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true", help="64 MiB with --memory 8MiB")
    options = parser.parse_args()
    if options.tiny:
        options.nbytes, options.memory = 64 << 20, "8MiB"
    told: dict[str, Any] = {
        "machine": machine(),
        "options": {"nbytes": options.nbytes, "memory": options.memory},
        "commands": {},
    }
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        root = Path(temporary)
        save_all(root, options.nbytes)
        _, floor = run(root, "inspect", str(root / "floor"))
        told["floor_bytes"] = floor
        print(f"{format_nbytes(options.nbytes)} in {TENSORS} tensors, --memory {options.memory}")
        print(f"{'':28}{'seconds':>8}{'read':>14}{'peak':>12}{'over floor':>12}")
        limit = ("--memory", options.memory)
        for name, arguments, copies in (
            ("inspect", ("inspect", "rows"), 0),
            ("verify --digests", ("verify", "rows", "--digests", *limit), 1),
            ("diff rows columns", ("diff", "rows", "columns", *limit), 2),
            ("diff columns hf", ("diff", "columns", "hf", *limit), 2),
        ):
            given = [str(root / a) if (root / a).exists() else a for a in arguments]
            seconds, peak = run(root, *given)
            told["commands"][name] = {"seconds": seconds, "peak_bytes": peak}
            rate = f"{format_nbytes(int(copies * options.nbytes / seconds))}/s" if copies else "-"
            print(
                f"{name:28}{seconds:>8.1f}{rate:>14}{format_nbytes(peak):>12}"
                f"{format_nbytes(max(peak - floor, 0)):>12}"
            )
    write_json(options.json, told)


if __name__ == "__main__":
    main()
