"""scripts/bench restart [--workloads W ...] [--ranks N ...] [--check-rows N] [--json FILE]
scripts/bench restart --show FILE ...

What follows the planning of a save, and what precedes the reads of a load, in worlds of 256 to
16,384 ranks: the write results that ranks send, ``.metadata`` as the coordinator writes it, and how
a rank that loads comes from there to the places of what it reads. Prints a table of saves and one
of loads. Exit status 1 when a rank finds other places than were written.

    w1      DeepSeek-V3 with AdamW moments, 3,075 tensors, FSDP and EP 64
    w2      the same with one tensor per expert, 136,185 tensors

Every rank has two keys of its own besides: a tensor data.<rank>, and an object rng.<rank> whose
bytes differ by rank. All ranks' plans are made through the planners' own hooks and planned by one
coordinator. No data
are written: a record has the bytes of its elements and a constant. Write results are pickled and
unpickled, as torch's collectives do. The coordinator and each rank that loads run in processes of
their own. Times are CPU seconds, memory is what a process takes besides.

Every world is saved twice: with stock metadata ("ours"), and with the index alone ("index").
Torch's ``finish``, ``read_metadata`` and default planner run on the results of the first ranks, up
to --stock-rows chunks, and are multiplied up to all chunks ("stock", "x 20").

What a rank finds is compared with what the writers report; in worlds of up to --check-rows chunks
also with what torch's reader finds in the stock metadata.

With --json a file of machine, options, seconds, faults and entries, one per workload and ranks:
    workload, ranks, tensors, chunks (of all tensors), factor (by which stock was multiplied)
    ours, index, stock   gathered_bytes (of all ranks), rank_bytes (of the largest result), join_s
                  (unpickled, joined and written), metadata_bytes, write_rss_bytes
    ours.same, ours.resharded, index.same, index.resharded, stock.same: read_s, read_bytes, plan_s,
                  look_up_s and read_rss_bytes, of a rank in the middle of the world (stock: rank 0)
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_common import PeakMemory, in_child, show, three, write_measured
from bench_planning import HeldChunk, Options, cpu_ms, make_plans, read_plans, written_chunks
from bench_workloads import WORKLOADS, Memory, Workload, real_state_dict
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.items import quiet_gc
from dcp_placements.layout.sharding import Box
from dcp_placements.save.coordinator import tensor_properties
from dcp_placements.storage.index import locations_of
from dcp_placements.storage.save_ids import writer_of
from dcp_placements.storage.torch_metadata import StoredLocation
from dcp_placements.storage.write_results import WriteResults

RECORD_NBYTES = 1200
"""What a record has besides its elements."""

DATA_POSITIONS = 8
"""Elements of a tensor that each rank has for itself: ``data.<rank>``."""

Place = tuple[str, int, int]
"""File, start and length of a record."""

Places = dict[tuple[str, tuple[int, ...] | None], Place]
"""By key and offset; None of an object."""

SIDES = {"ours": True, "index": False}
"""Whether stock metadata are written."""


def be(rank: int, ranks: int) -> None:
    """Make torch.distributed report this process as one rank of a world."""
    dist.is_initialized = lambda: True
    dist.get_rank = lambda group=None: rank
    dist.get_world_size = lambda group=None: ranks
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


class Written:
    """What all ranks write, each one file in the order of its keys, and what they report of it.

    Args:
        chunks: Of each rank, the keys and boxes that it writes.
        files: By rank, the name of its file.
        order: The keys, in the order in which they are written.

    Attributes:
        sent: By rank, its pickled write results.
        chunks: Of all ranks.
    """

    def __init__(
        self, chunks: Iterable[Iterable[HeldChunk]], files: Sequence[str], order: Iterable[str]
    ) -> None:
        position = {fqn: number for number, fqn in enumerate(order)}
        self.sent: list[bytes] = []
        self.chunks = 0
        for rank, (of_rank, file) in enumerate(zip(chunks, files, strict=True)):
            chunks_held = list(of_rank)
            whole = {fqn for fqn, group, box in chunks_held if box.sizes == group.shape}
            # As the writer does: cut chunks, then whole tensors, then objects.
            held = sorted(chunks_held, key=lambda chunk: (chunk[0] in whole, position[chunk[0]]))
            records = [(fqn, box.offsets, box.numel * 4) for fqn, _, box in held]
            records.append((f"data.{rank}", (0,), 8 * DATA_POSITIONS))
            records.append((f"rng.{rank}", None, 5000 + 7919 * rank % 64))
            whole |= {f"data.{rank}", f"rng.{rank}"}
            self.sent.append(pickle.dumps(_sent(records, file, whole)))
            self.chunks += len(records)

    def results(self, rank: int) -> list[WriteResult]:
        """Return what torch's writer would report on a rank."""
        return list(pickle.loads(self.sent[rank]))

    def places(self, rank: int) -> Places:
        """Return where a rank wrote its chunks."""
        return {
            (result.index.fqn, result.index.offset): place_of(result.storage_data)
            for result in self.results(rank)
        }


def _sent(records: Iterable[tuple[str, Any, int]], file: str, whole: set[str]) -> WriteResults:
    """Return what a rank sends of the records in its file."""
    places, start = [], 0
    for fqn, offset, nbytes in records:
        places.append(StoredLocation(fqn, offset, file, start, nbytes + RECORD_NBYTES))
        start += nbytes + RECORD_NBYTES
    return WriteResults.of(places, whole)


def _own_keys(rank: int) -> dict[str, Any]:
    """Return what one rank alone has of a state dict."""
    return {"data": {str(rank): torch.zeros(DATA_POSITIONS)}, "rng": {str(rank): b""}}


def _add_own_keys(metadata: Metadata, ranks: int) -> None:
    """Add the keys that one rank alone has to what the coordinator says."""
    chunk = ChunkStorageMetadata(*map(torch.Size, Box((0,), (DATA_POSITIONS,))))
    for rank in range(ranks):
        kind = TensorProperties(torch.float32)
        data = TensorStorageMetadata(kind, torch.Size((DATA_POSITIONS,)), [chunk])
        metadata.state_dict_metadata |= {
            f"data.{rank}": data,
            f"rng.{rank}": BytesStorageMetadata(),
        }
        metadata.planner_data |= {f"{n}.{rank}": (n, str(rank)) for n in ("data", "rng")}


def save(workload: Workload, plans: Path, path: Path, stock_rows: int) -> dict[str, Any]:
    """Be the coordinator of a save; return the costs of all sides, and leave what was written."""
    be(0, workload.ranks)
    planner = PlacementSavePlanner()
    # Names of files are the planner's, so both sides have the same.
    writers = {
        side: PlacementFileSystemWriter(path / side, stock_metadata=stock_metadata)
        for side, stock_metadata in SIDES.items()
    }
    state_dict = real_state_dict(workload, 0, Memory())
    planner.set_up_planner(state_dict, writers["ours"].storage_meta(), True)
    planner.create_local_plan()
    local = [pickle.loads(data) for data in read_plans([plans])]
    sent_plans = [plan.planner_data for plan in local]
    central, metadata = planner.create_global_plan(local)
    _add_own_keys(metadata, workload.ranks)
    for writer in writers.values():
        writer.set_up_storage_writer(True)
        planned = writer.prepare_global_plan(central)
    files = [f"{plan.storage_data.prefix}0.distcp" for plan in planned]
    written = Written(written_chunks(sent_plans, planned), files, metadata.state_dict_metadata)
    costs: dict[str, Any] = {"chunks": written.chunks}
    for side, writer in writers.items():
        costs[side] = in_child(_finish, writer, metadata, written.sent, 1.0)
    entries: dict[str, Any] = {}
    sent, rows = [], 0
    for rank, chunks in enumerate(written_chunks(sent_plans, planned)):
        results = written.results(rank)
        if rows and rows + len(results) > stock_rows:
            break
        sent.append(pickle.dumps(results))
        rows += len(results)
        for fqn, group, box in chunks:
            if fqn not in entries:
                properties, size = tensor_properties(group), torch.Size(group.shape)
                entries[fqn] = TensorStorageMetadata(properties, size, [])
            entries[fqn].chunks.append(ChunkStorageMetadata(*map(torch.Size, box)))
        for own in (f"data.{rank}", f"rng.{rank}"):
            entries[own] = metadata.state_dict_metadata[own]
    costs["factor"] = written.chunks / rows
    stock_writer = FileSystemWriter(path / "stock")
    stock_writer.set_up_storage_writer(True)
    kept = Metadata(entries, planner_data=metadata.planner_data)
    costs["stock"] = in_child(_finish, stock_writer, kept, sent, costs["factor"])
    with open(path / "written", "wb") as file:
        pickle.dump(written, file)
    return costs


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


def load(workload: Workload, path: Path) -> dict[str, Any]:
    """Be one rank of a load; return what it spends before it reads data, and the places."""
    rank = workload.ranks // 2
    be(rank, workload.ranks)
    state_dict = real_state_dict(workload, rank, Memory()) | _own_keys(rank)
    reader, planner = PlacementFileSystemReader(path), PlacementLoadPlanner()
    gc.collect()
    memory, before = PeakMemory(), _read_bytes()
    read, metadata = cpu_ms(reader.read_metadata)
    planner.set_up_planner(state_dict, metadata, False)
    planned, local = cpu_ms(planner.create_local_plan)
    # The coordinator's answer, without what it compares with other ranks.
    (answer,) = planner.create_global_plan([pickle.loads(pickle.dumps(local))])
    finished, plan = cpu_ms(lambda: planner.finish_plan(answer))

    def look_up() -> list[Any]:
        reader.set_up_storage_reader(metadata, False, rank=rank)
        with quiet_gc():
            return locations_of(plan.items, reader.storage_data)

    looked_up, found = cpu_ms(look_up)
    costs = _load_costs(read, planned + finished, looked_up, memory, before)
    places = {
        (item.storage_index.fqn, item.storage_index.offset): place_of(place.info())
        for item, place in zip(plan.items, found, strict=True)
    }
    return costs | {"places": places}


def load_stock(workload: Workload, path: Path, factor: float) -> dict[str, Any]:
    """Be the first rank of a load with torch's reader and planner.

    Args:
        workload: What is loaded.
        path: The metadata of some ranks' chunks.
        factor: All chunks by those.
    """
    be(0, workload.ranks)
    state_dict = real_state_dict(workload, 0, Memory())
    reader, planner = FileSystemReader(path), DefaultLoadPlanner(allow_partial_load=True)
    gc.collect()
    memory, before = PeakMemory(), _read_bytes()
    read, metadata = cpu_ms(reader.read_metadata)
    planner.set_up_planner(state_dict, metadata, False)
    planned, plan = cpu_ms(lambda: planner.finish_plan(planner.create_local_plan()))
    reader.set_up_storage_reader(metadata, False)
    looked_up, _ = cpu_ms(lambda: [reader.storage_data[item.storage_index] for item in plan.items])
    costs = _load_costs(read, planned, looked_up, memory, before)
    # A look-up is one per item, however many chunks there are.
    return {k: value if k == "look_up_s" else value * factor for k, value in costs.items()}


def _load_costs(
    read: float, planned: float, looked_up: float, memory: PeakMemory, before: int
) -> dict[str, float]:
    return {
        "read_s": read / 1e3,
        "plan_s": planned / 1e3,
        "look_up_s": looked_up / 1e3,
        "read_bytes": _read_bytes() - before,
        "read_rss_bytes": memory.growth_bytes(),
    }


def _read_bytes() -> int:
    with open("/proc/self/io", "rb") as file:
        return int(file.readline().split()[1])


def place_of(info: Any) -> Place:
    """Return a place out of torch's object."""
    return info.relative_path, info.offset, info.length


def misplaced(path: Path, places: Mapping[Any, Place], *, by_torch: bool) -> int:
    """Return how many places are other than what the writers report, or torch's reader finds."""
    if by_torch:
        stored = FileSystemReader(path / "ours").read_metadata().storage_data
        expected: Places = {
            (index.fqn, index.offset): place_of(info) for index, info in stored.items()
        }
    else:
        with open(path / "written", "rb") as file:
            written: Written = pickle.load(file)
        expected = {}
        for rank in {writer_of(place[0]) for place in places.values()}:
            expected.update(written.places(rank))
    return sum(expected.get(key) != place for key, place in places.items())


def measure(args: argparse.Namespace, name: str, ranks: int) -> tuple[dict[str, Any], list[str]]:
    """Return the entry of one world, and its faults."""
    workload = WORKLOADS[name](ranks, args.tiny)
    half = WORKLOADS[name](max(ranks // 2, 1), args.tiny)
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-restart-") as directory:
        path = Path(directory)
        options = Options("sampled", {}, 1, 0, False, False)
        in_child(make_plans, workload, True, range(ranks), path / "plans", options)
        costs = in_child(save, workload, path / "plans", path, args.stock_rows)
        for side in SIDES:
            for kind, target in (("same", workload), ("resharded", half)):
                cost = in_child(load, target, path / side)
                places = cost.pop("places")
                for by_torch in (False, True):
                    if by_torch and costs["chunks"] > args.check_rows:
                        continue
                    wrong = in_child(_misplaced, path, places, by_torch)
                    if wrong or not places:
                        by = "torch" if by_torch else "the writers"
                        what = f"{wrong} of {len(places)} places are other than by {by}"
                        faults.append(f"{name}, {ranks} ranks, {side}, {kind}: {what}")
                costs[side][kind] = cost
        stock = in_child(load_stock, workload, path / "stock", costs["factor"])
        costs["stock"]["same"] = stock
    return {"workload": name, "ranks": ranks, "tensors": workload.tensors, **costs}, faults


def _misplaced(path: Path, places: Mapping[Any, Place], by_torch: bool) -> int:
    return misplaced(path, places, by_torch=by_torch)


def show_reports(reports: Sequence[dict[str, Any]]) -> int:
    """Print both tables, and the faults; return the exit status."""
    saves, loads = [], []
    entries = [entry for report in reports for entry in report["entries"]]
    for entry in sorted(entries, key=lambda entry: (entry["workload"], entry["ranks"])):
        for side in (*SIDES, "stock"):
            world = f"{entry['workload']} {entry['ranks']:,} {side}"
            if side == "stock" and entry["factor"] != 1:
                world += f" x {entry['factor']:.0f}"
            cost = entry[side]
            saves.append(
                [
                    world,
                    f"{entry['chunks']:,}",
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
                            f"{world}, {kind}",
                            three(part["read_bytes"] / 1e6),
                            *[three(part[what]) for what in ("read_s", "plan_s", "look_up_s")],
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
    faults = [fault for report in reports for fault in report["faults"]]
    for fault in faults:
        print(f"fault: {fault}")
    return 1 if faults else 0


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench restart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["w1", "w2"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[256, 1024, 4096, 16384])
    parser.add_argument(
        "--check-rows", type=int, default=800_000, help="compared with torch's reader (800,000)"
    )
    parser.add_argument("--stock-rows", type=int, default=200_000, help="of stock (200,000)")
    parser.add_argument("--tiny", action="store_true", help="a few layers of w1 on 8 ranks")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--show", nargs="+", type=Path, metavar="FILE", help="measure nothing: print --json files"
    )
    args = parser.parse_args()
    if args.show:
        return show_reports([json.loads(file.read_text()) for file in args.show])
    if args.tiny:
        args.workloads, args.ranks, args.stock_rows = ["w1"], [8], 500
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
    return show_reports([{"entries": entries, "faults": faults}])


if __name__ == "__main__":
    sys.exit(main())
