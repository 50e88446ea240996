"""scripts/bench exchange [--rounds N] [--nproc N] [--json FILE]

Loads data that several ranks need, under torchrun with gloo, and prints a table: bytes read from
data files by all ranks over the bytes of the whole tensors, how far apart the ranks are, bytes that
came from other ranks, and wall seconds of the whole load.

    hsdp      16 tensors [4096, 2048], two replicas of shards on dim 0
    experts   16 tensors [8, 1024, 1024] over ep, two replicas along edp
    plain     16 tensors [1024, 2048] and 64 of [1024], that every rank has whole

Sides are torch's default planners and file system storage ("stock"), ours with our storage
("ours"), and the same with exchange=True ("exchange"). Stock cannot place experts without a
DTensor, so it is given DTensors there. Files are dropped from the page cache before each
load. Bytes are those that the system counts while data files are read; where there is an exchange,
those that the reader counts. Exit status 1 when a goal is missed: unique bytes within 1 %, ranks
within 5 % of each other.

With --json a file of machine, options, seconds, missed (goals) and cases: by name unique_bytes and
sides, each with all_read_bytes, read_bytes (of each rank), exchanged_bytes (all ranks), load_s
(median of the rounds, the slowest rank), load_ratio (to stock, median of the rounds' ratios).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench_common import begin, finish, launch, parser_of, show, three, write_measured
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)

CASES = ("hsdp", "experts", "plain")
SIDES = ("stock", "ours", "exchange")


class Case:
    """One case on one rank: what it saves, and how each side loads it."""

    def __init__(self, name: str, *, tiny: bool) -> None:
        self.name = name
        half = dist.get_world_size() // 2
        names = ("ep", "edp") if name == "experts" else ("replicate", "shard")
        sizes = (half, 2) if name == "experts" else (2, half)
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        self.part = self.mesh.get_local_rank(names[0] if name == "experts" else "shard")
        small = 8 if tiny else 1
        shapes: list[tuple[int, ...]] = [(4096 // small, 2048)] * 16
        if name == "experts":
            shapes = [(8, 1024 // small, 1024)] * 16
        if name == "plain":
            self.part = 0
            shapes = [(1024 // small, 2048)] * 16 + [(1024,)] * 64
        self.shapes = {f"layers.{i}.w": shape for i, shape in enumerate(shapes)}
        self.parts = 1 if name == "plain" else half
        self.rules = (
            PlacementRules({"w": CheckpointPlacement(self.mesh, {"ep": Shard(0)})})
            if name == "experts"
            else None
        )
        self.unique_nbytes = 4 * sum(torch.Size(shape).numel() for shape in shapes)

    def held(self, fill: bool) -> dict[str, torch.Tensor]:
        """Return this rank's parts."""
        found = {}
        for i, (key, (rows, *rest)) in enumerate(self.shapes.items()):
            value = 100.0 * i + self.part if fill else -1.0
            part = torch.full((rows // self.parts, *rest), value)
            if fill:
                part[0] += 0.5
            found[key] = part
        return found

    def state_dict(self, held: dict[str, torch.Tensor], side: str) -> dict[str, Any]:
        """Return the state dict of a side, of these parts."""
        if self.name == "plain" or (self.name == "experts" and side != "stock"):
            return dict(held)
        placements = [Replicate(), Shard(0)]
        if self.name == "experts":
            placements.reverse()
        return {
            key: DTensor.from_local(part, self.mesh, placements, run_check=False)
            for key, part in held.items()
        }

    def load(self, path: Path, side: str) -> dict[str, float]:
        """Load once, and check what came."""
        held = self.held(fill=False)
        state_dict = self.state_dict(held, side)
        reader: Any = (
            dcp.FileSystemReader(path) if side == "stock" else PlacementFileSystemReader(path)
        )
        counted = Counted(reader)
        planner: Any = DefaultLoadPlanner()
        if side != "stock":
            planner = PlacementLoadPlanner(self.rules, exchange=side == "exchange")
        _forget_pages(path)
        start = time.perf_counter()
        dcp.load(state_dict, storage_reader=reader, planner=planner)
        dist.barrier()
        seconds = time.perf_counter() - start
        for key, part in self.held(fill=True).items():
            if not torch.equal(part, held[key]):
                raise SystemExit(f"bench: {key} came back different")
        exchanged = planner.report.traffic.exchanged_nbytes if side == "exchange" else 0
        nbytes = reader.bytes_read if side == "exchange" else counted.nbytes
        return {"s": seconds, "read": nbytes, "exchanged": exchanged}


class Counted:
    """Counts the bytes that this process reads in a reader's ``read_data``."""

    def __init__(self, reader: Any) -> None:
        self.nbytes = 0
        self._inner: Callable[..., Any] = reader.read_data
        reader.read_data = self._read_data

    def _read_data(self, *args: Any) -> Any:
        before = _read_nbytes()
        try:
            return self._inner(*args)
        finally:
            self.nbytes = _read_nbytes() - before


def _read_nbytes() -> int:
    with open("/proc/self/io") as file:
        return int(next(file).split()[1])


def _forget_pages(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for file in path.iterdir():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
    dist.barrier()


def measured(name: str, directory: Path, rounds: int, *, tiny: bool) -> dict[str, Any]:
    """Return the entry of a case; alike on all ranks."""
    case = Case(name, tiny=tiny)
    path = directory / name
    dcp.save(
        case.state_dict(case.held(fill=True), "ours"),
        storage_writer=PlacementFileSystemWriter(path),
        planner=PlacementSavePlanner(case.rules),
    )
    rows: dict[str, list[list[dict[str, float]]]] = {side: [] for side in SIDES}
    for turn in range(rounds):
        for side in SIDES if turn % 2 else SIDES[::-1]:
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, case.load(path, side))
            rows[side].append(ranks)
    seconds = {side: [max(r["s"] for r in ranks) for ranks in rows[side]] for side in SIDES}
    sides = {}
    for side in SIDES:
        last = rows[side][-1]
        ratios = [a / b for a, b in zip(seconds[side], seconds["stock"], strict=True)]
        sides[side] = {
            "all_read_bytes": sum(rank["read"] for rank in last),
            "read_bytes": [rank["read"] for rank in last],
            "exchanged_bytes": sum(rank["exchanged"] for rank in last),
            "load_s": statistics.median(seconds[side]),
            "load_ratio": statistics.median(ratios),
        }
    return {"unique_bytes": case.unique_nbytes, "sides": sides}


def work(args: argparse.Namespace) -> None:
    """Be one process of torchrun."""
    begin()
    directory = Path(args.worker)
    cases = {name: measured(name, directory, args.rounds, tiny=args.tiny) for name in CASES}
    finish(directory, cases)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the processes measured."""
    options = ["--rounds", str(args.rounds), *(["--tiny"] if args.tiny else [])]
    with tempfile.TemporaryDirectory(prefix="bench-exchange-", dir=args.directory) as directory:
        return launch(__file__, directory, args.nproc, *options)


def spread(side: dict[str, Any]) -> float:
    """Return how far apart the ranks are, as a share of their mean."""
    read = side["read_bytes"]
    return float((max(read) - min(read)) / statistics.mean(read))


def missed(cases: dict[str, Any]) -> list[str]:
    """Return the goals that are not met."""
    found = []
    for name, case in cases.items():
        side = case["sides"]["exchange"]
        ratio = side["all_read_bytes"] / case["unique_bytes"]
        if ratio > 1.01:
            found.append(f"{name}: {ratio:.3f} of the unique bytes read, more than 1.01")
        if spread(side) > 0.05:
            found.append(f"{name}: ranks {spread(side):.3f} apart, more than 0.05")
    return found


def show_cases(cases: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table."""
    rows = []
    for name, case in cases.items():
        for which, side in case["sides"].items():
            row = [f"{name} {which}", f"{side['all_read_bytes'] / case['unique_bytes']:.3f}x"]
            row += [f"{100 * spread(side):.1f} %", three(side["exchanged_bytes"] / 1e6)]
            row += [three(side["load_s"]), f"{side['load_ratio']:.2f}x"]
            rows.append(row)
    show(
        f"{args.nproc} processes, {args.rounds} rounds",
        ("", "read/unique", "ranks apart", "exchanged MB", "load s", "ratio"),
        rows,
    )


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("exchange", __doc__, "an eighth of the data, 2 ranks, 1 round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--directory", help="where to write (a temporary one)")
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.nproc = 1, 2
    return args


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    start = time.perf_counter()
    cases = measure(args)
    show_cases(cases, args)
    goals = missed(cases)
    for goal in goals:
        print(f"missed: {goal}")
    write_measured(args, start, missed=goals, cases=cases)
    return 1 if goals else 0


if __name__ == "__main__":
    sys.exit(main())
