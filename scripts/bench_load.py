"""scripts/bench load [--ranks N] [--only real simulated] [--json FILE]

What a load of the same topology costs a file system: data files that a rank opens, calls and bytes
that it reads, and what that costs the save, bytes that a rank writes. Prints a table of real runs
under torchrun with gloo, and one of a simulated world. Exit status 1 when a goal is missed.

    fsdp    16 tensors [2048, 1024] Shard(0), 64 replicated norms, 80 step scalars
    hsdp    the same over (replicate 2, shard): every part is on two ranks
    norms   one tensor [2048, 1024] Shard(0), 500 replicated tensors of 4 KB

    w1      DeepSeek-V3 with AdamW moments and steps, 4,100 tensors, FSDP and EP 64
    w4      Llama-70B with AdamW moments and steps, 2,892 tensors, HSDP with 8 copies

Sides are torch's default planners and file system storage ("stock"), the same with
dedup_save_to_lowest_rank ("lowest"), ours with our storage ("ours"), and, in real runs, with
exchange=True ("exchange"). Reads are those of the system (/proc/self/io) while data files are read.
In the simulated world stock plans a few layers (its files are as many as there are replicated
tensors, up to one per rank); ours plans all tensors, through the planners' own hooks.

With --json a file of machine, options, seconds, missed (goals) and cases: by name the sides, each
with opens (the largest rank), written (largest rank over mean), and of real runs reads, read_bytes
(largest rank), read_balance (over mean), needed_bytes, all_read_bytes (all ranks), unique_bytes,
small_reads, small_ratio.
"""

from __future__ import annotations

import argparse
import os
import pickle
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
from bench_common import begin, finish, in_child, launch, parser_of, show, three, write_measured
from bench_planning import Options, held_chunks, make_plans, read_plans
from bench_workloads import WORKLOADS, Memory, StockPlans, Workload, real_state_dict
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.table.table import OBJECT

CASES = ("fsdp", "hsdp", "norms")
SIMULATED = {"w1": "w1-steps", "w4": "w4-steps"}
COPIES = {"fsdp": 1, "hsdp": 2, "norms": 1, "w1": 1, "w4": 8}

Side = tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]

SIDES: dict[str, Side] = {
    "stock": (DefaultSavePlanner, DefaultLoadPlanner, dcp.FileSystemWriter, dcp.FileSystemReader),
    "lowest": (
        lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        DefaultLoadPlanner,
        dcp.FileSystemWriter,
        dcp.FileSystemReader,
    ),
    "ours": (
        PlacementSavePlanner,
        PlacementLoadPlanner,
        PlacementFileSystemWriter,
        PlacementFileSystemReader,
    ),
    "exchange": (
        PlacementSavePlanner,
        lambda: PlacementLoadPlanner(exchange=True),
        PlacementFileSystemWriter,
        PlacementFileSystemReader,
    ),
}


class Watched:
    """Counts what a reader's ``read_data`` does: files opened, calls, bytes."""

    def __init__(self, directory: Path) -> None:
        self.opens = self.reads = self.nbytes = 0
        self._below = str(directory)
        self._looks = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._looks and event == "open" and isinstance(args[0], str):
            self.opens += args[0].startswith(self._below)

    def watch(self, reader: Any) -> Any:
        """Return the reader; what it reads from now on is counted."""
        inner = reader.read_data
        self.opens = self.reads = self.nbytes = 0

        def read_data(*args: Any, **kwargs: Any) -> Any:
            reads, nbytes = _read_calls()
            self._looks = True
            try:
                return inner(*args, **kwargs)
            finally:
                self._looks = False
                after, more = _read_calls()
                # The second look at /proc is a read itself.
                self.reads, self.nbytes = after - reads - 1, more - nbytes

        reader.read_data = read_data
        return reader


def _read_calls() -> tuple[int, int]:
    handle = os.open("/proc/self/io", os.O_RDONLY)
    fields = dict(line.split(b": ") for line in os.read(handle, 4096).splitlines())
    os.close(handle)
    return int(fields[b"syscr"]), int(fields[b"rchar"])


def state_dict(case: str, *, tiny: bool, fill: bool) -> dict[str, Any]:
    """Return this rank's state dict."""
    world = dist.get_world_size()
    replicas = 2 if case == "hsdp" else 1
    mesh = init_device_mesh(
        "cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )
    rows = 64 if tiny else 2048
    made: dict[str, Any] = {}
    for i in range(1 if case == "norms" else 16):
        local = torch.full((rows // mesh.size(1), 1024), float(i) if fill else -1.0)
        local += mesh.get_local_rank("shard") if fill else 0
        placements = [Replicate(), Shard(0)]
        made[f"layers.{i}.weight"] = DTensor.from_local(local, mesh, placements, run_check=False)
    for i in range(500 if case == "norms" else 64):
        norm = torch.full((1024,), float(i) if fill else -1.0)
        placements = [Replicate(), Replicate()]
        made[f"norms.{i}"] = (
            norm if case == "norms" else DTensor.from_local(norm, mesh, placements, run_check=False)
        )
    for i in range(0 if case == "norms" else 80):
        made[f"steps.{i}"] = torch.tensor(7.0 if fill else 0.0)
    return made


def _local(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.to_local() if isinstance(value, DTensor) else value
    return found


def real(case: str, side: str, directory: Path, watched: Watched, *, tiny: bool) -> dict[str, Any]:
    """Save and load once; return what it cost, on all ranks alike."""
    path = directory / f"{case}-{side}"
    save_planner, load_planner, writer, reader = SIDES[side]
    saved = state_dict(case, tiny=tiny, fill=True)
    wanted = state_dict(case, tiny=tiny, fill=False)
    dcp.save(saved, storage_writer=writer(path), planner=save_planner())
    dcp.load(wanted, storage_reader=watched.watch(reader(path)), planner=load_planner())
    for key, value in saved.items():
        if not torch.equal(_local(value), _local(wanted[key])):
            raise SystemExit(f"bench: {key} came back different")
    rank = dist.get_rank()
    written = sum(file.stat().st_size for file in path.glob(f"__{rank}_*"))
    needed = sum(_local(value).nbytes for value in saved.values())
    big = sum(_local(value).nbytes for key, value in saved.items() if "weight" in key)
    small = sum(_local(value).nbytes for key, value in saved.items() if "norm" in key)
    mine = (watched.opens, written, watched.reads, watched.nbytes, needed)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, mine)
    opens, writes, reads, nbytes, needs = zip(*rows, strict=True)
    found = {
        "opens": max(opens),
        "written": max(writes) / statistics.mean(writes),
        "reads": max(reads),
        "read_bytes": max(nbytes),
        "needed_bytes": max(needs),
        "all_read_bytes": sum(nbytes),
        "read_balance": max(nbytes) / statistics.mean(nbytes),
        "unique_bytes": big * dist.get_world_size() // COPIES[case] + small,
        # On the rank that reads most: what is beside the one large tensor.
        "small_reads": None,
        "small_ratio": None,
    }
    if case == "norms":
        found["small_reads"] = (max(reads) - 2) / 500
        found["small_ratio"] = (max(nbytes) - big) / small
    return found


def work(args: argparse.Namespace) -> None:
    """Be one process of torchrun."""
    begin()
    directory = Path(args.worker)
    watched = Watched(directory)
    cases = {
        case: {side: real(case, side, directory, watched, tiny=args.tiny) for side in SIDES}
        for case in CASES
    }
    finish(directory, cases)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the processes measured."""
    with tempfile.TemporaryDirectory(prefix="bench-load-") as directory:
        return launch(__file__, directory, args.nproc, *(["--tiny"] if args.tiny else []))


def simulated_stock(workload: Workload, *, lowest: bool) -> dict[str, Any]:
    """Return what torch's planners come to."""
    maker = StockPlans(workload)
    plans = [maker.plan(rank) for rank in range(workload.ranks)]
    owner: dict[Any, int] = {}
    written = []
    for rank, plan in enumerate(dedup_save_plans(plans, save_to_lowest_rank=lowest)):
        written.append(sum(_nbytes(item) for item in plan.items))
        owner.update((item.index, rank) for item in plan.items)
    opened = [len({owner[item.index] for item in plan.items if _nbytes(item)}) for plan in plans]
    return _summary(opened, written, workload)


def _nbytes(item: Any) -> int:
    return int(item.tensor_data.chunk.sizes.numel()) * 4


def simulated_ours(workload: Workload, path: Path) -> dict[str, Any]:
    """Return what ours come to, for the plans of all ranks in a file."""
    planner = PlacementSavePlanner()
    dist.is_initialized = lambda: True
    dist.get_rank = lambda group=None: 0
    dist.get_world_size = lambda group=None: workload.ranks
    planner.set_up_planner(real_state_dict(workload, 0, Memory()), None, True)
    planner.create_local_plan()
    plans = [pickle.loads(data) for data in read_plans([path])]
    sent = [plan.planner_data for plan in plans]
    central, _ = planner.create_global_plan(plans)
    owner: dict[tuple[str, Any], int] = {}
    written = [0] * workload.ranks
    wants: list[list[tuple[str, Any]]] = []
    for rank, chunks in enumerate(held_chunks(sent, central)):
        wants.append([])
        for (fqn, group, box), is_owned in chunks:
            if group.kind == OBJECT or not box.numel:
                continue
            part = fqn, box.offsets
            if is_owned:
                owner[part] = rank
                written[rank] += box.numel * group.itemsize
            else:
                wants[rank].append(part)
    opened = [
        bool(written[rank]) + len({owner[part] for part in parts})
        for rank, parts in enumerate(wants)
    ]
    return _summary(opened, written, workload)


def _summary(opened: list[int], written: list[int], workload: Workload) -> dict[str, Any]:
    return {
        "opens": max(opened),
        "all_opens": sum(opened),
        "written": max(written) / statistics.mean(written),
        "tensors": workload.tensors,
    }


def simulate(args: argparse.Namespace) -> dict[str, Any]:
    """Return the cases of the simulated world."""
    options = Options("sampled", {}, 8, 60, False, False)
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-load-") as directory:
        path = Path(directory) / "plans"
        for case, name in SIMULATED.items():
            print(f"bench: {case}", file=sys.stderr, flush=True)
            part = WORKLOADS[name](args.ranks, True)
            whole = part if args.tiny else WORKLOADS[name](args.ranks, False)
            in_child(make_plans, whole, True, range(args.ranks), path, options)
            sides = {
                "stock": in_child(_stock, part, False),
                "lowest": in_child(_stock, part, True),
                "ours": in_child(simulated_ours, whole, path),
            }
            replicated = whole.items() // 4
            sides["stock"]["whole_opens"] = min(COPIES[case] + replicated, args.ranks)
            cases[case] = sides
    return cases


def _stock(workload: Workload, lowest: bool) -> dict[str, Any]:
    return simulated_stock(workload, lowest=lowest)


def missed(cases: dict[str, Any], *, tiny: bool) -> list[str]:
    """Return the goals that are not met."""
    found = []
    for case, sides in cases.items():
        ours = sides["ours"]
        allowed = 2 if COPIES[case] == 1 else 1 + COPIES[case]
        # Where what all ranks share is much of the whole, they share in writing it.
        if not tiny and case != "norms" and ours["opens"] > allowed:
            found.append(f"{case}: {ours['opens']} files opened, more than {allowed}")
        if not tiny and case != "norms" and ours["written"] > 1.05:
            found.append(f"{case}: {ours['written']:.3f} of the mean written, more than 1.05")
        if case == "norms" and (ours["small_reads"] > 1 or ours["small_ratio"] > 1.5):
            cost = f"{ours['small_reads']:.2f} reads, {ours['small_ratio']:.2f} of the bytes"
            found.append(f"norms: {cost} per small tensor, more than 1 and 1.5")
        exchange = sides.get("exchange")
        if exchange is not None and not tiny:
            ratio = exchange["all_read_bytes"] / exchange["unique_bytes"]
            if ratio > 1.02 or exchange["read_balance"] > 1.05:
                cost = f"{ratio:.2f} of the bytes, {exchange['read_balance']:.2f} of the mean"
                found.append(f"{case}: {cost} read with exchange=True, more than 1.02 and 1.05")
    return found


def show_real(cases: dict[str, Any], nproc: int) -> None:
    """Print the table of real runs."""
    rows = []
    for case, sides in cases.items():
        for side, cost in sides.items():
            ratio = cost["read_bytes"] / cost["needed_bytes"]
            row = [f"{case} {side}", f"{cost['opens']:.0f}", f"{cost['written']:.2f}"]
            row += [three(cost["reads"]), f"{ratio:.2f}x"]
            row += [f"{cost['all_read_bytes'] / cost['unique_bytes']:.2f}x"]
            row += [f"{cost['read_balance']:.2f}"]
            row += [three(cost["small_reads"])]
            row += ["-" if cost["small_ratio"] is None else f"{cost['small_ratio']:.2f}x"]
            rows.append(row)
    show(
        f"{nproc} processes: same topology, largest rank",
        (
            *("", "opens", "written/mean", "reads", "bytes/needed", "all/unique", "read/mean"),
            *("reads/small", "bytes/small"),
        ),
        rows,
    )


def show_simulated(cases: dict[str, Any], ranks: int) -> None:
    """Print the table of the simulated world."""
    rows = []
    for case, sides in cases.items():
        for side, cost in sides.items():
            whole = cost.get("whole_opens")
            row = [f"{case} {side}", f"{cost['tensors']:,}", f"{cost['opens']:,}"]
            row += ["-" if whole is None else f"~{whole:,}"]
            row += [f"{cost['all_opens']:,}", f"{cost['written']:.3f}"]
            rows.append(row)
    show(
        f"{ranks:,} ranks, simulated: same topology, largest rank",
        ("", "tensors", "opens", "of all tensors", "opens of all ranks", "written/mean"),
        rows,
    )


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("load", __doc__, "next to no data, 2 ranks; 8 simulated")
    parser.add_argument("--ranks", type=int, default=1024, help="of the simulated world (1024)")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument(
        "--only", nargs="+", choices=("real", "simulated"), default=["real", "simulated"]
    )
    args = parser.parse_args()
    if args.tiny:
        args.ranks, args.nproc = 8, 2
    return args


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    start = time.perf_counter()
    cases: dict[str, Any] = {}
    if "real" in args.only:
        cases |= (found := measure(args))
        show_real(found, args.nproc)
    if "simulated" in args.only:
        cases |= (found := simulate(args))
        show_simulated(found, args.ranks)
    goals = missed(cases, tiny=args.tiny)
    for goal in goals:
        print(f"missed: {goal}")
    write_measured(args, start, missed=goals, cases=cases)
    return 1 if goals else 0


if __name__ == "__main__":
    sys.exit(main())
