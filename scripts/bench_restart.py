"""scripts/bench restart [--workloads W ...] [--ranks N ...] [--rows N] [--json FILE]

What follows the planning of a save, and what precedes the reads of a load, in worlds of 256 to
16,384 ranks: the write results that ranks send, ``.metadata`` as the coordinator writes it, and how
a rank that loads comes from there to the places of what it reads. Prints a table of saves and one
of loads. Exit status 1 when a load is planned other than by torch's own reader.

    w1      DeepSeek-V3 with AdamW moments, 3,075 tensors, FSDP and EP 64
    w2      the same with one tensor per expert, 136,185 tensors

All ranks' plans are made through the planners' own hooks and planned by one coordinator. No data
are written: a record has the bytes of its elements and a constant. Write results are pickled and
unpickled, as torch's collectives do. The coordinator and each rank that loads run in processes of
their own. Times are CPU seconds.

Where all ranks have more than --rows chunks in all, a few layers are planned, and what is shown is
multiplied up to all of them ("x 20"). Torch's ``finish`` and ``read_metadata`` run on the results
of the first ranks alone, up to --stock-rows chunks, and are multiplied up ("stock").

With --json a file of machine, options, seconds, faults and entries, one per workload and ranks:
    workload, ranks, tensors, chunks (of all tensors), factor (by which the rest was multiplied)
    ours, stock   gathered_bytes (of all ranks), rank_bytes (of the largest result), join_s
                  (unpickled, joined and written), metadata_bytes, write_rss_bytes
    ours.same, ours.resharded, stock.same: read_s, read_bytes, read_rss_bytes; of ours also
                  plan_s and look_up_s, of a rank in the middle of the world
"""

from __future__ import annotations

import argparse
import gc
import pickle
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_common import PeakMemory, in_child, show, three, write_measured
from bench_planning import Options, cpu_ms, make_plans, read_plans
from bench_workloads import WORKLOADS, Memory, Workload, real_state_dict
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.metadata.table import RowsBuilder
from dcp_placements.storage.metadata.write_results import WriteResults

RECORD_NBYTES = 1200
"""What a record has besides its elements."""


def be(rank: int, ranks: int) -> None:
    """Make torch.distributed report this process as one rank of a world."""
    dist.is_initialized = lambda: True
    dist.get_rank = lambda group=None: rank
    dist.get_world_size = lambda group=None: ranks
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def save(workload: Workload, plans: Path, path: Path, stock_rows: int) -> dict[str, Any]:
    """Be the coordinator of a save; return the costs of both sides."""
    be(0, workload.ranks)
    planner = PlacementSavePlanner()
    writer = PlacementFileSystemWriter(path / "ours")
    planner.set_up_planner(real_state_dict(workload, 0, Memory()), writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    planner.create_local_plan()
    local = [pickle.loads(data) for data in read_plans([plans])]
    central, metadata = planner.create_global_plan(local)
    central = writer.prepare_global_plan(central)
    order = {fqn: number for number, fqn in enumerate(metadata.state_dict_metadata)}
    sent, stock = [], []
    chunks = rows = 0
    for plan in central:
        made = written(plan, order)
        chunks += len(made)
        sent.append(pickle.dumps(made))
        if rows < stock_rows:
            rows += len(made)
            stock.append(pickle.dumps([_plain(result) for result in made]))
        plan.items._made = None
    costs = {"chunks": chunks, "ours": _finish(writer, metadata, sent, 1.0)}
    stock_writer = FileSystemWriter(path / "stock")
    stock_writer.set_up_storage_writer(True)
    kept = Metadata(metadata.state_dict_metadata, planner_data=metadata.planner_data)
    costs["stock"] = _finish(stock_writer, kept, stock, chunks / rows)
    return costs


def written(plan: Any, order: dict[str, int]) -> WriteResults:
    """Return what a rank reports that wrote its plan into one file, in the order of its keys."""
    builder, start = RowsBuilder(), 0
    name = f"{plan.storage_data.prefix}0.distcp"
    for item in sorted(plan.items, key=lambda item: order[item.index.fqn]):
        data = item.tensor_data
        length = int(data.chunk.sizes.numel()) * 4 + RECORD_NBYTES
        builder.add(item.index, path=name, start=start, length=length)
        start += length
    return WriteResults(builder.rows(), plan.items.outline)


def _plain(result: WriteResult) -> WriteResult:
    index, info = result.index, result.storage_data
    return WriteResult(
        MetadataIndex(index.fqn, torch.Size(index.offset)),
        result.size_in_bytes,
        _StorageInfo(info.relative_path, info.offset, info.length),
    )


def _finish(writer: Any, metadata: Metadata, sent: list[bytes], factor: float) -> dict[str, Any]:
    """Return what the coordinator has to do, multiplied by ``factor``."""
    Path(writer.path).mkdir(parents=True, exist_ok=True)
    gc.collect()
    memory = PeakMemory()

    def finish() -> None:
        writer.finish(metadata, [pickle.loads(data) for data in sent])

    spent, _ = cpu_ms(finish)
    rss = memory.growth_bytes()
    return {
        "gathered_bytes": sum(map(len, sent)) * factor,
        "rank_bytes": max(map(len, sent)),
        "join_s": spent / 1e3 * factor,
        "metadata_bytes": (Path(writer.path) / ".metadata").stat().st_size * factor,
        "write_rss_bytes": rss * factor,
    }


def load(workload: Workload, path: Path, *, ours: bool) -> dict[str, Any]:
    """Be one rank of a load; return what it spends before it reads data."""
    rank = workload.ranks // 2
    be(rank, workload.ranks)
    state_dict = real_state_dict(workload, rank, Memory())
    reader: Any = (PlacementFileSystemReader if ours else FileSystemReader)(path)
    gc.collect()
    memory, before = PeakMemory(), _read_bytes()
    spent, metadata = cpu_ms(reader.read_metadata)
    costs = {"read_s": spent / 1e3}
    if ours:
        planner = PlacementLoadPlanner()
        planner.set_up_planner(state_dict, metadata, False)
        planned, plan = cpu_ms(lambda: planner.finish_plan(planner.create_local_plan()))

        def look_up() -> list[Any]:
            reader.set_up_storage_reader(metadata, False, rank=rank)
            with quiet_gc():
                return reader._copies.sources(plan.items)

        found, places = cpu_ms(look_up)
        costs |= {"plan_s": planned / 1e3, "look_up_s": found / 1e3}
        costs["places"] = {
            (item.storage_index.fqn, tuple(item.storage_index.offset or ())): tuple(
                (info.relative_path, info.offset, info.length)
            )
            for item, (info, _) in zip(plan.items, places, strict=True)
        }
    costs["read_bytes"] = _read_bytes() - before
    costs["read_rss_bytes"] = memory.growth_bytes()
    return costs


def _read_bytes() -> int:
    with open("/proc/self/io", "rb") as file:
        return int(file.readline().split()[1])


def misplaced(path: Path, places: dict[Any, Any]) -> int:
    """Return how many places are other than in the metadata that torch reads."""
    stored = FileSystemReader(path).read_metadata().storage_data
    offsets = {(index.fqn, tuple(index.offset or ())): info for index, info in stored.items()}
    return sum(
        (info := offsets.get(key)) is None
        or (info.relative_path, info.offset, info.length) != place
        for key, place in places.items()
    )


def measure(args: argparse.Namespace, name: str, ranks: int) -> tuple[dict[str, Any], list[str]]:
    """Return the entry of one world, and its faults."""
    whole = WORKLOADS[name](ranks, False)
    is_part = args.tiny or whole.items() * ranks > args.rows
    workload = WORKLOADS[name](ranks, True) if is_part else whole
    # Ranks of one column have as many items as those of any other.
    factor = whole.items() / workload.items()
    entry: dict[str, Any] = {"workload": name, "ranks": ranks, "tensors": whole.tensors}
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-restart-") as directory:
        path = Path(directory)
        options = Options("sampled", {}, 1, 0, False, False)
        in_child(make_plans, workload, True, range(ranks), path / "plans", options)
        costs = in_child(save, workload, path / "plans", path, args.stock_rows)
        share = costs["stock"]["metadata_bytes"] / (path / "stock/.metadata").stat().st_size
        half = WORKLOADS[name](max(ranks // 2, 1), is_part)
        for kind, target in (("same", workload), ("resharded", half)):
            cost = in_child(_load, target, path / "ours", True)
            places = cost.pop("places")
            if costs["chunks"] <= args.stock_rows * 4:
                wrong = in_child(misplaced, path / "ours", places)
                if wrong:
                    faults.append(f"{name}, {ranks} ranks, {kind}: {wrong} places differ")
            costs["ours"][kind] = {what: value * factor for what, value in cost.items()}
        cost = in_child(_load, workload, path / "stock", False)
        costs["stock"]["same"] = {what: value * share * factor for what, value in cost.items()}
    for side in ("ours", "stock"):
        for what, value in costs[side].items():
            if not isinstance(value, dict):
                costs[side][what] = value * factor
    entry |= {"factor": factor, **costs, "chunks": costs["chunks"] * factor}
    return entry, faults


def _load(workload: Workload, path: Path, ours: bool) -> dict[str, Any]:
    return load(workload, path, ours=ours)


def show_entries(entries: list[dict[str, Any]]) -> None:
    """Print both tables."""
    saves, loads = [], []
    for entry in entries:
        of_part = f" x {entry['factor']:.0f}" if entry["factor"] != 1 else ""
        world = f"{entry['workload']} {entry['ranks']:,}"
        for side in ("ours", "stock"):
            cost = entry[side]
            saves.append(
                [
                    f"{world} {side}{of_part}",
                    f"{entry['chunks']:,.0f}",
                    three(cost["rank_bytes"] / 1e3),
                    three(cost["gathered_bytes"] / 1e6),
                    three(cost["join_s"]),
                    three(cost["metadata_bytes"] / 1e6),
                    three(cost["write_rss_bytes"] / 1e6),
                ]
            )
            for kind in ("same", "resharded"):
                if kind in cost:
                    part = cost[kind]
                    loads.append(
                        [
                            f"{world} {kind} {side}{of_part}",
                            three(part["read_bytes"] / 1e6),
                            three(part["read_s"]),
                            three(part.get("plan_s")),
                            three(part.get("look_up_s")),
                            three(part["read_rss_bytes"] / 1e6),
                        ]
                    )
    show(
        "Save: the coordinator after the data are written",
        ("", "chunks", "KB a rank", "gathered MB", "join and write s", ".metadata MB", "memory MB"),
        saves,
    )
    show(
        "Load: one rank before it reads data",
        ("", "read MB", "read_metadata s", "plan s", "look up s", "memory MB"),
        loads,
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench restart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["w1", "w2"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[256, 1024, 4096, 16384])
    parser.add_argument("--rows", type=int, default=3_200_000, help="planned in full (3,200,000)")
    parser.add_argument("--stock-rows", type=int, default=200_000, help="of stock (200,000)")
    parser.add_argument("--tiny", action="store_true", help="a few layers of w1 on 8 ranks")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.tiny:
        args.workloads, args.ranks = ["w1"], [8]
    start = time.perf_counter()
    entries, faults = [], []
    for name in args.workloads:
        for ranks in args.ranks:
            print(f"bench: {name}, {ranks:,} ranks", file=sys.stderr, flush=True)
            entry, found = measure(args, name, ranks)
            entries.append(entry)
            faults += found
            # A world of thousands of ranks takes minutes.
            write_measured(args, start, faults=faults, entries=entries)
    show_entries(entries)
    for fault in faults:
        print(f"fault: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
