"""scripts/bench reshard [--nbytes N] [--rounds N] [--directory DIR] [--json FILE]

Saves tensors sharded by rows over 4 ranks, and rewrites the checkpoint for other worlds: for 8 and
for 3 ranks by rows, for 4 by columns, and for the ranks that saved. Between these it times cp of
the checkpoint's files. Every copy and every file written is on disk (fsync) before its time stops.
Each run is in a forked process.

Prints the median seconds, their share of cp's, and the peak memory of the process, in all and above
where it began. With --json a file of machine, options, copy_seconds and worlds: by name seconds,
of_copy, peak_bytes and growth_bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_common import PeakMemory, in_child, machine, peak_bytes, write_json
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    MeshCoordinate,
    PlacementFileSystemWriter,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.errors import format_nbytes
from dcp_placements.offline import reshard
from dcp_placements.testing import FakeDTensor, World

TENSORS, COLUMNS = 32, 4096


def save(path: Path, nbytes: int) -> None:
    """Save about ``nbytes`` from 4 ranks, one rank's tensors in memory at a time."""
    rows = max(nbytes // TENSORS // COLUMNS // 4 // 24 * 24, 24)
    world = World(4)
    local = torch.arange(rows // 4 * COLUMNS, dtype=torch.int32).view(rows // 4, COLUMNS)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, fsdp=4)
        whole = (rows, COLUMNS)
        return {
            f"layers.{n}.weight": FakeDTensor(local, mesh, [Shard(0)], whole)
            for n in range(TENSORS)
        }

    world.save(
        path,
        state_dict,
        lambda rank: PlacementSavePlanner(),
        lambda rank: PlacementFileSystemWriter(path),
    )


def by(dim: int) -> Callable[[MeshCoordinate], PlacementRules]:
    """Return rules that cut every weight on ``dim`` over ``tp``."""
    return lambda mesh: PlacementRules({"weight": CheckpointPlacement(mesh, {"tp": Shard(dim)})})


def copy(source: Path, target: Path) -> float:
    """Return the seconds that cp takes, until all is on disk."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in target.iterdir():
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def run(source: Path, target: Path, ranks: int, dim: int) -> tuple[float, int, int]:
    """Rewrite a checkpoint; return the seconds, and the peak memory, in all and as a growth."""
    memory = PeakMemory()
    started = time.perf_counter()
    reshard(source, target, by(dim), {"tp": ranks})
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds, peak_bytes(), memory.growth_bytes()


WORLDS = {
    "8 ranks, rows": (8, 0),
    "3 ranks, rows": (3, 0),
    "4 ranks, columns": (4, 1),
    "4 ranks, as saved": (4, 0),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nbytes", type=int, default=4 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where to write; by default the temporary directory")
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true", help="16 MiB, one round")
    options = parser.parse_args()
    if options.tiny:
        options.nbytes, options.rounds = 16 << 20, 1
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as temporary:
        root = Path(temporary)
        in_child(save, root / "ckpt", options.nbytes)
        nbytes = sum(file.stat().st_size for file in (root / "ckpt").iterdir())
        # Here once, so that no child has anything left to import.
        save(root / "floor", 0)
        run(root / "floor", root / "out", 4, 1)
        copies: list[float] = []
        runs: dict[str, list[tuple[float, int, int]]] = {name: [] for name in WORLDS}
        for _ in range(options.rounds):
            for name, (ranks, dim) in WORLDS.items():
                copies.append(copy(root / "ckpt", root / "copy"))
                runs[name].append(in_child(run, root / "ckpt", root / "out", ranks, dim))
    copy_s = median(copies)
    print(f"{format_nbytes(nbytes)}; cp: {copy_s:.2f} s ({min(copies):.2f} to {max(copies):.2f})")
    print(f"{'':24}{'seconds':>8}{'written':>14}{'of cp':>8}{'peak':>12}{'growth':>12}")
    worlds = {}
    for name, measured in runs.items():
        seconds = median(one[0] for one in measured)
        peak, growth = (max(one[at] for one in measured) for at in (1, 2))
        worlds[name] = {
            "seconds": seconds,
            "of_copy": seconds / copy_s,
            "peak_bytes": peak,
            "growth_bytes": growth,
        }
        print(
            f"{name:24}{seconds:>8.2f}{format_nbytes(int(nbytes / seconds)) + '/s':>14}"
            f"{seconds / copy_s:>7.2f}x{format_nbytes(peak):>12}{format_nbytes(growth):>12}"
        )
    report = {
        "machine": machine(),
        "options": {"nbytes": options.nbytes, "rounds": options.rounds},
        "copy_seconds": copies,
        "worlds": worlds,
    }
    write_json(options.json, report)


if __name__ == "__main__":
    sys.exit(main())
