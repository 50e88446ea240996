"""scripts/bench export [--nbytes N] [--memory SIZE] [--json FILE]

Saves a model of experts and dense weights from ep 2 x fsdp 2 in bfloat16, and exports it three
times: unchanged, with the experts unstacked and split for the hub, and as float32. Between the
exports it times plain copies of the checkpoint's files. Every copy and every export is on disk
(fsync) before its time stops. Each export runs in a forked process with --memory.

Prints seconds, bytes written per second, the share of a plain copy's time, the peak growth of each
process's memory, and how much more that is than for an export of one element. With --json a file of
machine, options, floor_bytes, copy_seconds and exports: by name seconds, of_copy and peak_bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from bench_common import in_child, machine, write_json
from bench_offline import run, run_here
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemWriter,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.errors import format_nbytes
from dcp_placements.testing import FakeDTensor, World

LAYERS, EXPERTS, HIDDEN = 4, 8, 1024


def save(path: Path, nbytes: int) -> None:
    """Save about ``nbytes``: three quarters in experts."""
    width = max(nbytes * 3 // 4 // (LAYERS * EXPERTS * 3 * HIDDEN * 2) // 8 * 8, 8)
    dense = max(nbytes // 4 // (LAYERS * HIDDEN * 2) // 8 * 8, 8)
    torch.manual_seed(0)
    row = torch.randn(1 << 20).to(torch.bfloat16)

    def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16)
        flat = made.view(-1)
        for start in range(0, len(flat), len(row)):
            flat[start : start + len(row)] = row[: len(flat) - start]
        flat[0] = seed
        return made

    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        shapes = {}
        for n in range(LAYERS):
            shapes[f"layers.{n}.mlp.experts.gate_up_proj"] = (EXPERTS // 2, 2 * width, HIDDEN)
            shapes[f"layers.{n}.mlp.experts.down_proj"] = (EXPERTS // 2, HIDDEN, width)
            shapes[f"layers.{n}.dense.weight"] = (dense, HIDDEN)
        made = {}
        for seed, (name, shape) in enumerate(shapes.items()):
            half = seed + 100 * mesh["ep"].get_coordinate()[0] * ("experts" in name)
            made[name] = FakeDTensor.distribute(random(shape, half), mesh["fsdp"], [Shard(0)])
        return {"model": made}

    def planner(rank: int) -> PlacementSavePlanner:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        rules = {"mlp.experts": CheckpointPlacement(mesh, {"ep": Shard(0)})}
        return PlacementSavePlanner(PlacementRules(rules))

    world.save(path, state_dict, planner, lambda rank: PlacementFileSystemWriter(path))


def copy(source: Path, target: Path) -> float:
    """Return the seconds that a plain copy of all files takes, until it is on disk."""
    started = time.perf_counter()
    target.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, target / file.name)
        with open(target / file.name, "rb") as stream:
            os.fsync(stream.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nbytes", type=int, default=4 << 30)
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true", help="16 MiB with --memory 8MiB")
    options = parser.parse_args()
    if options.tiny:
        options.nbytes, options.memory = 16 << 20, "8MiB"
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        root = Path(temporary)
        in_child(save, root / "ckpt", options.nbytes)
        dcp.save({"w": torch.ones(1)}, checkpoint_id=root / "floor", no_dist=True)
        smallest = ("export", str(root / "floor"), str(root / "out"), "--to", "hf")
        # Here once, so that no child has anything left to import.
        run_here(*smallest)
        shutil.rmtree(root / "out")
        _, floor = run(*smallest)
        shutil.rmtree(root / "out")
        nbytes = sum(file.stat().st_size for file in (root / "ckpt").iterdir())
        copies = [copy(root / "ckpt", root / "copy")]
        exports: dict[str, Any] = {}
        hub = ("--rename", "dcp_placements.presets.hub:qwen3_moe")
        for name, arguments in (
            ("unchanged", ()),
            ("for the hub", hub),
            ("for the hub, float32", (*hub, "--dtype", "float32")),
        ):
            command = ("export", str(root / "ckpt"), str(root / "out"), "--to", "hf")
            seconds, peak = run(*command, "--memory", options.memory, *arguments)
            written = sum(file.stat().st_size for file in (root / "out").iterdir())
            shutil.rmtree(root / "out")
            exports[name] = {"seconds": seconds, "peak_bytes": peak}
            exports[name]["written_bytes"] = written
            copies.append(copy(root / "ckpt", root / "copy"))
        copy_s = sorted(copies)[len(copies) // 2]
        print(f"{format_nbytes(nbytes)}, --memory {options.memory}; copies: ", end="")
        print(", ".join(f"{seconds:.1f} s" for seconds in copies))
        print(
            f"{'':28}{'seconds':>8}{'written':>14}{'of a copy':>12}{'peak':>12}{'over floor':>12}"
        )
        for name, found in exports.items():
            found["of_copy"] = found["seconds"] / copy_s
            rate = f"{format_nbytes(int(found['written_bytes'] / found['seconds']))}/s"
            print(
                f"{name:28}{found['seconds']:>8.1f}{rate:>14}{found['of_copy']:>11.2f}x"
                f"{format_nbytes(found['peak_bytes']):>12}"
                f"{format_nbytes(max(found['peak_bytes'] - floor, 0)):>12}"
            )
    report = {
        "machine": machine(),
        "options": {"nbytes": options.nbytes, "memory": options.memory},
        "floor_bytes": floor,
        "copy_seconds": copies,
        "exports": exports,
    }
    write_json(options.json, report)


if __name__ == "__main__":
    sys.exit(main())
