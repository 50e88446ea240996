"""scripts/bench io [--cases big small reshard] [--sides SIDE ...] [--directory DIR ...]

Saves and loads real tensors under torchrun with gloo, by torch's default planners and by ours in
turn (and with our storage writer and reader; "alarm" is torch's under python -m dcp_placements.run,
without a declaration), on a memory file system and on the disk, and prints a table per case: wall
seconds of a whole save and a whole load with their parts, the share of raw, the ratio to stock, CPU
seconds of all ranks together, peak memory, bytes and opened files of a rank. Raw is each rank
writing the same bytes with one write() per tensor, and reading them into its tensors with one
read() each. With --device cuda all tensors but those of raw are on GPUs, which ranks may share.

    big       40 tensors [4096, 2048], Shard(0): 1.34 GB
    small     4,000 tensors [8, 32], Shard(0)
    reshard   the big ones, loaded as Shard(1)

All processes start together and the slowest counts. Files are synced after each write and dropped
from the page cache before each read. Shares and ratios are medians of those within a round; the
order of the sides changes from round to round. A side that has taken --seconds in a case is left
out of its later rounds: stock takes seconds for thousands of small tensors.

With --json a file of machine, options, seconds and directories: by name the cases, by name the
nbytes, tensors and sides ("stock", "ours", "ours+storage" and "raw"), each with its rounds and the
medians of save_s, save_plan_s, save_write_s, save_finish_s, load_s, load_plan_s, load_read_s,
save_cpu_s, load_cpu_s (all ranks), save_rss_bytes, load_rss_bytes (peak above the start, the
largest rank), save_bytes, load_bytes, save_opens, load_opens (the largest rank), save_of_raw,
load_of_raw (raw's seconds / the side's) and, with stock among the sides, save_ratio, load_ratio (to
stock's seconds); 0 where a side has no such part.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench_common import PeakMemory, begin, finish, launch, parser_of, show, three, write_measured
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    Placements,
    PlacementSavePlanner,
    installed,
)

SIDES = ("stock", "alarm", "ours", "ours+storage")
CASES = ("big", "small", "reshard")
SHAPES = {"big": (40, (4096, 2048)), "small": (4000, (8, 32)), "reshard": (40, (4096, 2048))}
TINY_SHAPES = {"big": (4, (64, 32)), "small": (40, (8, 32)), "reshard": (4, (64, 32))}


class Opened:
    """Counts the files below a directory that this process opens."""

    def __init__(self, directory: Path) -> None:
        self.count = 0
        self._below = str(directory)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and args[0].startswith(self._below):
            self.count += 1


def _io_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read and written, by its system calls."""
    found = {}
    with open("/proc/self/io") as file:
        for line in file:
            name, _, value = line.partition(":")
            found[name] = int(value)
    return found["rchar"], found["wchar"]


class Timed:
    """Notes when one method of a storage writer or reader begins and ends."""

    def __init__(self, storage: Any, method: str) -> None:
        self.began = self.ended = 0.0
        self._inner = getattr(storage, method)
        setattr(storage, method, self._call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.began = time.perf_counter()
        result = self._inner(*args, **kwargs)
        result.wait()
        self.ended = time.perf_counter()
        return result


class Worker:
    """One process of a run."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args = args
        self.directory = directory
        self.opened = Opened(directory)
        if args.device == "cuda":
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        world = (dist.get_world_size(),)
        self.mesh = init_device_mesh(args.device, world, mesh_dim_names=("fsdp",))
        all_sides: dict[str, tuple[Callable[[], Any], ...]] = {
            "stock": (
                DefaultSavePlanner,
                DefaultLoadPlanner,
                lambda: dcp.FileSystemWriter(self.path),
                lambda: dcp.FileSystemReader(self.path),
            ),
            # What `python -m dcp_placements.run` makes of them, without --placements.
            "alarm": (
                DefaultSavePlanner,
                DefaultLoadPlanner,
                lambda: dcp.FileSystemWriter(self.path),
                lambda: dcp.FileSystemReader(self.path),
            ),
            "ours": (
                PlacementSavePlanner,
                PlacementLoadPlanner,
                lambda: dcp.FileSystemWriter(self.path),
                lambda: dcp.FileSystemReader(self.path),
            ),
            "ours+storage": (
                PlacementSavePlanner,
                PlacementLoadPlanner,
                lambda: PlacementFileSystemWriter(self.path),
                lambda: PlacementFileSystemReader(self.path),
            ),
        }
        self.sides = {name: all_sides[name] for name in args.sides}

    @property
    def path(self) -> Path:
        """Of the checkpoint."""
        return self.directory / "checkpoint"

    def run(self, case: str) -> dict[str, Any]:
        """Return the entry of a case; complete on rank 0."""
        count, shape = (TINY_SHAPES if self.args.tiny else SHAPES)[case]
        saved = _state_dict(self.mesh, count, shape, 0, fill=True)
        target = _state_dict(self.mesh, count, shape, int(case == "reshard"), fill=False)
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in (*self.sides, "raw")}
        self._once(self.args.sides[-1], saved, target, case, check=True)
        spent = dict.fromkeys(self.sides, 0.0)
        for turn in range(self.args.rounds):
            names = [name for name in self.sides if spent[name] < self.args.seconds]
            for name in names if turn % 2 else names[::-1]:
                start = time.perf_counter()
                taken[name].append(self._once(name, saved, target, case, check=turn == 0))
                spent[name] += self._largest(time.perf_counter() - start)
            if names:
                taken["raw"].append(self._raw(saved, target))
        nbytes = sum(t.numel() * t.element_size() for t in saved["model"].values())
        sides = {}
        for name, rows in taken.items():
            sides[name] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            sides[name]["rounds"] = len(rows)
            for what in ("save", "load"):
                seconds = [row[f"{what}_s"] for row in rows]
                raw = [row[f"{what}_s"] for row in taken["raw"]]
                # Every side is in the first rounds.
                shares = [a / b for a, b in zip(raw, seconds, strict=False)]
                sides[name][f"{what}_of_raw"] = statistics.median(shares)
                if "stock" in taken:
                    stock = [row[f"{what}_s"] for row in taken["stock"]]
                    ratios = [a / b for a, b in zip(seconds, stock, strict=False)]
                    sides[name][f"{what}_ratio"] = statistics.median(ratios)
        return {
            "nbytes": nbytes,
            "tensors": count,
            "sides": sides,
        }

    def _once(
        self, side: str, saved: dict[str, Any], target: dict[str, Any], case: str, *, check: bool
    ) -> dict[str, float]:
        save_planner, load_planner, make_writer, make_reader = self.sides[side]
        found: dict[str, float] = {}

        def save() -> tuple[float, float]:
            writer = make_writer()
            timed = Timed(writer, "write_data")
            dcp.save(saved, storage_writer=writer, planner=save_planner())
            return timed.began, timed.ended

        def load() -> tuple[float, float]:
            reader = make_reader()
            timed = Timed(reader, "read_data")
            dcp.load(target, storage_reader=reader, planner=load_planner())
            return timed.began, timed.ended

        with installed(Placements(None)) if side == "alarm" else nullcontext():
            found.update(self._measured("save", "write", save))
            for tensor in target["model"].values():
                tensor._local_tensor.fill_(-1)
            self._forget_pages(self.path)
            found.update(self._measured("load", "read", load))
        if check:
            _compare(saved, target, case)
        self._remove()
        return found

    def _raw(self, saved: dict[str, Any], target: dict[str, Any]) -> dict[str, float]:
        """Write and read what a rank has in one file of its own."""
        sources = _memory(saved)
        targets = _memory(target)
        path = self.path / f"raw{dist.get_rank()}"

        def save() -> tuple[float, float]:
            began = time.perf_counter()
            with open(path, "wb", buffering=1 << 20) as file:
                for memory in sources:
                    file.write(memory)
                file.flush()
                os.fsync(file.fileno())
            return began, time.perf_counter()

        def load() -> tuple[float, float]:
            began = time.perf_counter()
            with open(path, "rb", buffering=0) as file:
                for memory in targets:
                    file.readinto(memory)
            return began, time.perf_counter()

        self.path.mkdir(exist_ok=True)
        found = self._measured("save", "write", save)
        self._forget_pages(self.path)
        found.update(self._measured("load", "read", load))
        self._remove()
        return found

    def _measured(
        self, what: str, part: str, work: Callable[[], tuple[float, float]]
    ) -> dict[str, float]:
        gc.collect()
        dist.barrier()
        opened = self.opened.count
        read, written = _io_bytes()
        memory = PeakMemory()
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        began, ended = work()
        if self.args.device == "cuda":
            torch.cuda.synchronize()
        mine, cpu = time.perf_counter(), time.process_time() - cpu
        dist.barrier()
        stop = time.perf_counter()
        growth = memory.growth_bytes()
        read_after, written_after = _io_bytes()
        nbytes = written_after - written if what == "save" else read_after - read
        found = {
            f"{what}_s": stop - start,
            f"{what}_plan_s": began - start,
            f"{what}_{part}_s": ended - began,
            f"{what}_finish_s": mine - ended,
            f"{what}_rss_bytes": float(growth),
            f"{what}_bytes": float(nbytes),
            f"{what}_opens": float(self.opened.count - opened),
        }
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, (found, cpu))
        largest = {key: max(row[key] for row, _ in rows) for key in found}
        return {**largest, f"{what}_cpu_s": sum(cpu for _, cpu in rows)}

    def _forget_pages(self, path: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for file in path.iterdir():
                handle = os.open(file, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
        dist.barrier()

    def _remove(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.path)
        dist.barrier()

    def _largest(self, seconds: float) -> float:
        """Return the seconds of the slowest rank."""
        largest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)


def _state_dict(
    mesh: DeviceMesh, count: int, shape: tuple[int, int], dim: int, *, fill: bool
) -> dict[str, Any]:
    local = list(shape)
    local[dim] //= mesh.size()
    torch.manual_seed(dist.get_rank())
    model = {}
    for index in range(count):
        make = torch.rand if fill else torch.zeros
        tensor = make(local, device=mesh.device_type)
        model[f"layers.{index}.weight"] = DTensor.from_local(
            tensor,
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )
    return {"model": model}


def _memory(state_dict: dict[str, Any]) -> list[memoryview]:
    """Return the bytes of each tensor of a rank."""
    return [
        memoryview(tensor._local_tensor.cpu().numpy()).cast("B")
        for tensor in state_dict["model"].values()
    ]


def _compare(saved: dict[str, Any], target: dict[str, Any], case: str) -> None:
    """Stop the run when a load did not bring back what was saved."""
    names = list(saved["model"])[:: max(len(saved["model"]) // 8, 1)]
    for name in names:
        wanted = saved["model"][name]
        if case == "reshard":
            wanted = wanted.redistribute(placements=[Shard(1)])
        if not torch.equal(wanted.to_local(), target["model"][name].to_local()):
            raise SystemExit(f"bench: {name} came back different")


def work(args: argparse.Namespace) -> None:
    """Be one process of torchrun."""
    begin()
    worker = Worker(args, Path(args.worker))
    cases = {}
    for case in args.cases:
        if dist.get_rank() == 0:
            print(f"bench: {case}", file=sys.stderr, flush=True)
        cases[case] = worker.run(case)
    finish(Path(args.worker), cases)


def measure(args: argparse.Namespace, where: str) -> dict[str, Any]:
    """Return what the processes measured in a directory."""
    options = ["--cases", *args.cases, "--sides", *args.sides, "--rounds", str(args.rounds)]
    options += ["--device", args.device, "--seconds", str(args.seconds)]
    options += ["--tiny"] if args.tiny else []
    with tempfile.TemporaryDirectory(prefix="bench-io-", dir=where) as directory:
        return launch(__file__, directory, args.nproc, *options)


def show_case(case: str, entry: dict[str, Any], nproc: int, where: str) -> None:
    """Print the table of a case."""
    rows = []
    for name, side in entry["sides"].items():
        row = [name, str(side["rounds"])]
        for what, part in (("save", "write"), ("load", "read")):
            ratio = side.get(f"{what}_ratio")
            row += [three(side[f"{what}_s"]), f"{side[f'{what}_of_raw']:.2f}"]
            row += ["-" if ratio is None else f"{ratio:.2f}x", three(side[f"{what}_cpu_s"])]
            row += [three(side[f"{what}_{key}_s"]) for key in ("plan", part, "finish")]
            row += [
                three(side[f"{what}_rss_bytes"] / 1e6),
                three(side[f"{what}_bytes"] / 1e6),
                f"{side[f'{what}_opens']:.0f}",
            ]
        rows.append(row)
    ratios = ("of raw", "to stock", "CPU s")
    parts = ("plan", "write", "finish", "RSS MB", "MB", "opens")
    show(
        f"{case} in {where}: {entry['tensors']:,} tensors, {entry['nbytes'] / 1e6:,.0f} MB, "
        f"{nproc} processes; wall seconds, largest rank",
        ("", "rounds", "save s", *ratios, *parts, "load s", *ratios, "plan", "read", *parts[2:]),
        rows,
    )


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("io", __doc__, "next to no data, 2 processes, 1 round")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=15, help="a side is in no more rounds of a case then (15)"
    )
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="stock takes the longest"
    )
    parser.add_argument(
        "--directory",
        nargs="+",
        default=[path for path in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(path)],
        help="where to write, in turn (the memory file system, and where temporary files are)",
    )
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
    directories = {}
    for where in args.directory:
        directories[where] = measure(args, where)
        for case, entry in directories[where].items():
            show_case(case, entry, args.nproc, where)
    write_measured(args, start, directories=directories)
    return 0


if __name__ == "__main__":
    sys.exit(main())
