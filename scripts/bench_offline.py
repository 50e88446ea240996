"""scripts/bench offline [--nbytes N] [--memory SIZE] [--json FILE]

Saves the same tensors sharded by rows over 4 ranks, sharded by columns over 2, and as one
safetensors file. Then runs inspect, verify --digests, diff of the two, and diff with the
safetensors file, each in a forked process with --memory. Prints the seconds, the bytes of data read
per second, the peak growth of each process's memory, and how much more that is than for an inspect
of a checkpoint of one element.

With --json a file of machine, options, floor_bytes and commands: by name seconds and peak_bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from bench_common import PeakMemory, in_child, machine, write_json
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

from dcp_placements import PlacementFileSystemWriter, PlacementSavePlanner, cli
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


def run(*arguments: str) -> tuple[float, int]:
    """Run the command line in a child; return its seconds and the growth of its memory."""
    return in_child(run_here, *arguments)


def run_here(*arguments: str) -> tuple[float, int]:
    """Run the command line in this process; return its seconds and the growth of its memory."""
    memory = PeakMemory()
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.main(list(arguments))
    if code:
        raise RuntimeError(f"{arguments}: exit code {code}\n{printed.getvalue()}")
    return time.perf_counter() - started, memory.growth_bytes()


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
    report: dict[str, Any] = {
        "machine": machine(),
        "options": {"nbytes": options.nbytes, "memory": options.memory},
        "commands": {},
    }
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        root = Path(temporary)
        in_child(save_all, root, options.nbytes)
        # Here once, so that no child has anything left to import.
        run_here("inspect", str(root / "floor"))
        _, floor = run("inspect", str(root / "floor"))
        report["floor_bytes"] = floor
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
            seconds, peak = run(*given)
            report["commands"][name] = {"seconds": seconds, "peak_bytes": peak}
            rate = f"{format_nbytes(int(copies * options.nbytes / seconds))}/s" if copies else "-"
            print(
                f"{name:28}{seconds:>8.1f}{rate:>14}{format_nbytes(peak):>12}"
                f"{format_nbytes(max(peak - floor, 0)):>12}"
            )
    write_json(options.json, report)


if __name__ == "__main__":
    main()
