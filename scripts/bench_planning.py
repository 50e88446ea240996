"""The work that ``scripts/bench plan`` measures: plans of all ranks, the coordinator, single ranks.

Prints nothing but profiles, where they are asked for. ``scripts/bench_plan.py`` calls
``make_plans``, ``coordinate`` and ``as_ranks``, each in a process of its own, which leave plans and
metadata to one another in files.
"""

from __future__ import annotations

import cProfile
import dataclasses
import gc
import hashlib
import pickle
import pstats
import statistics
import struct
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_common import PeakMemory
from bench_workloads import (
    EXPERTS,
    MOMENTS,
    Axes,
    Column,
    Lay,
    Memory,
    StockPlans,
    Workload,
    real_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner
from dcp_placements.layout.boxes import as_boxes
from dcp_placements.layout.sharding import Box
from dcp_placements.save.local_plan import LocalPlan
from dcp_placements.table import digests
from dcp_placements.table.table import Group, Held, Table, packed_ints, unpacked_ints


@dataclass(frozen=True)
class Options:
    """The options of all children.

    Attributes:
        digests: As the planner's option.
        planner: Further options of ``PlacementSavePlanner``.
        samples: Ranks to take a rank's own times of.
        load_seconds: No further rank is sampled for load plans after these.
        profile: Whether to print where the time goes.
        whole_plans: Whether no plan is derived from another one.
    """

    digests: str
    planner: dict[str, Any]
    samples: int
    load_seconds: float
    profile: bool
    whole_plans: bool

    def save_planner(self, **other: Any) -> PlacementSavePlanner:
        """Return a planner of ours."""
        return PlacementSavePlanner(**{"digests": self.digests, **self.planner, **other})


class _World:
    """What torch.distributed says of this process, to be any rank of a world without others."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1

    def enter(self, size: int) -> None:
        """Be part of a world of ``size`` ranks from now on."""
        self.size = size
        dist.is_initialized = lambda: True
        dist.get_rank = lambda group=None: self.rank
        dist.get_world_size = lambda group=None: self.size


def fake_digests() -> None:
    """Let digests come from nowhere, where the plans of thousands of ranks are made.

    As many and as large as real ones; equal on all ranks. What real ones cost is in the times of
    single ranks.
    """

    def made(tensors: Sequence[torch.Tensor]) -> list[bytes | None]:
        return [
            struct.pack("<Q", index * 0x9E3779B97F4A7C15 % 2**64) for index in range(len(tensors))
        ]

    vars(digests)["sampled_digests"] = made


def profiled(wanted: bool, title: str, work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns; print where its time went if that is wanted."""
    if not wanted:
        return work()
    profile = cProfile.Profile()
    value = profile.runcall(work)
    print(f"\n--- profile: {title}")
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(18)
    sys.stdout.flush()
    return value


def make_plans(
    workload: Workload, ours: bool, ranks: Sequence[int], path: Path, options: Options
) -> float:
    """Write the pickled local plans of some ranks to a file; return the median seconds of one."""
    taken = []
    with open(path, "wb") as file:
        for rank, plan in _ours(workload, ranks, options) if ours else _stock(workload, ranks):
            start = time.perf_counter()
            data = pickle.dumps(plan())
            taken.append(time.perf_counter() - start)
            file.write(struct.pack("<QQ", rank, len(data)))
            file.write(data)
    return statistics.median(taken)


def _ours(
    workload: Workload, ranks: Sequence[int], options: Options
) -> Iterable[tuple[int, Callable[[], Any]]]:
    world = _World()
    world.enter(workload.ranks)
    fake_digests()
    memory = Memory()
    by_column: dict[int, list[int]] = {}
    for rank in ranks:
        by_column.setdefault(rank % workload.columns, []).append(rank)
    for column, members in by_column.items():
        whole = _Moving(workload, column, memory, world, options)
        # Of a strided shard torch's function tells no offsets; few ranks have one.
        if options.whole_plans or workload.ranks <= EXPERTS:
            yield from ((rank, partial(whole.plan, rank)) for rank in members)
            continue
        derived = _Derived(workload, column, whole)
        yield from ((rank, partial(derived.plan, rank)) for rank in members)
        derived.check(members[-1])


class _Moving:
    """One planner that stands on one rank after the other."""

    def __init__(
        self, workload: Workload, column: int, memory: Memory, world: _World, options: Options
    ) -> None:
        self._world = world
        self._fakes = Column(workload, column, memory)
        self._planner = options.save_planner()
        self._planner.set_up_planner(self._fakes.state_dict, None, column == 0)

    def plan(self, rank: int) -> Any:
        """Return the local plan of a rank."""
        self._world.rank = rank
        self._fakes.move(rank)
        return self._planner.create_local_plan()


class _Derived:
    """Plans of ranks with the keys of one rank, from whole plans of a few of them.

    Ranks that hold something of the same groups send the same tables. What else a rank sends, its
    boxes and where it stands, follows from how the tensors lie. Hundreds of times faster than
    planning.
    """

    def __init__(self, workload: Workload, column: int, whole: _Moving) -> None:
        self._whole = whole
        self._lay_of: dict[str, Lay | None] = {}
        for parameter in workload.held(column):
            self._lay_of[f"model.{parameter.fqn}"] = parameter.lay
            self._lay_of |= {
                f"optim.state.{parameter.fqn}.{name}": parameter.lay for name in MOMENTS
            }
        self._lays = list(dict.fromkeys(filter(None, self._lay_of.values())))
        # By what a rank has an empty part of: a whole plan, and how each of its groups lies.
        self._templates: dict[tuple[bool, ...], tuple[Any, list[Lay | None], list[Axes]]] = {}

    def plan(self, rank: int) -> Any:
        """Return the local plan of a rank."""
        boxes = {lay: lay.local(rank) for lay in self._lays}
        is_empty = tuple([0 in sizes for sizes, _ in boxes.values()])
        if is_empty not in self._templates:
            self._templates[is_empty] = self._template(rank)
        template, lays, axes = self._templates[is_empty]
        numbers: list[int] = []
        for lay in lays:
            sizes, offsets = boxes[lay] if lay is not None else ((), ())
            numbers += () if 0 in sizes else (*offsets, *sizes)
        sent = template.planner_data
        made = sent._replace(
            rank=rank,
            sent=sent.sent._replace(boxes=packed_ints(numbers)),
            coordinate=tuple([at for one in axes for at in one.coordinate(rank)]),
        )
        return dataclasses.replace(template, planner_data=made)

    def check(self, rank: int) -> None:
        """Compare the plan of a rank with the whole plan that it makes."""
        if self.plan(rank).planner_data != self._whole.plan(rank).planner_data:
            raise SystemExit(
                "bench: plans are not what is derived; run with --whole-plans to make all of them"
            )

    def _template(self, rank: int) -> tuple[Any, list[Lay | None], list[Axes]]:
        plan = self._whole.plan(rank)
        sent = plan.planner_data
        tables = map(Table.unpacked, sent.sent.tables)
        lays = [self._lay_of.get(keys[0]) for table in tables for keys in table.keys]
        named = {lay.axes.axis_names: lay.axes for lay in self._lays}
        axes: list[Axes] = []
        names = [*pickle.loads(zlib.decompress(sent.statement)).axis_sizes]
        while names:
            found = max(
                (names_of for names_of in named if [*names_of] == names[: len(names_of)]), key=len
            )
            axes.append(named[found])
            del names[: len(found)]
        return plan, lays, axes


def _stock(workload: Workload, ranks: Sequence[int]) -> Iterable[tuple[int, Callable[[], Any]]]:
    plans = StockPlans(workload)
    for rank in ranks:
        yield rank, partial(plans.plan, rank)


def read_plans(paths: Iterable[Path]) -> list[bytes]:
    """Return the pickled plans of all ranks, in their order."""
    found: dict[int, bytes] = {}
    for path in paths:
        with open(path, "rb") as file:
            while head := file.read(16):
                rank, length = struct.unpack("<QQ", head)
                found[rank] = file.read(length)
    return [found[rank] for rank in sorted(found)]


def coordinate(
    workload: Workload,
    ours: bool,
    paths: Sequence[Path],
    results: Path,
    part: set[str],
    options: Options,
) -> dict[str, Any]:
    """Plan for all ranks; leave the metadata and the plans of some ranks in a directory.

    Returns:
        The entry of the table, and ``boxes``: a hash of what the keys in ``part`` consist of.
    """
    world = _World()
    world.enter(workload.ranks)
    planner: Any = options.save_planner() if ours else DefaultSavePlanner()
    planner.set_up_planner(real_state_dict(workload, 0, Memory()), None, True)
    if ours:
        fake_digests()
        planner.create_local_plan()
    writer = FileSystemWriter(results)
    gc.collect()
    memory = PeakMemory()
    gathered = read_plans(paths)
    clock = [time.process_time()]
    plans = [pickle.loads(data) for data in gathered]
    clock.append(time.process_time())
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        title = f"create_global_plan, {workload.name}, {workload.ranks} ranks"
        profile = options.profile and ours
        central, metadata = profiled(profile, title, lambda: planner.create_global_plan(plans))
    clock.append(time.process_time())
    central = writer.prepare_global_plan(central)
    clock.append(time.process_time())
    scattered = [pickle.dumps(plan) for plan in central]
    clock.append(time.process_time())
    unpickle_s, plan_s, _, pickle_s = (b - a for a, b in pairwise(clock))
    growth = memory.growth_bytes()
    if ours:
        with open(results / "metadata", "wb") as file:
            pickle.dump(metadata, file)
        for rank in sample_ranks(workload.ranks, options.samples):
            (results / f"plan{rank}").write_bytes(scattered[rank])
    return {
        "workload": workload.name,
        "ranks": workload.ranks,
        "side": "ours" if ours else "stock",
        "kind": "measured",
        "tensors": workload.tensors,
        "planned_tensors": workload.tensors,
        "cpu_s": unpickle_s + plan_s + pickle_s,
        "unpickle_s": unpickle_s,
        "plan_s": plan_s,
        "pickle_s": pickle_s,
        "gathered_bytes": sum(map(len, gathered)),
        "digest_bytes": sum(len(plan.planner_data.digests) for plan in plans) if ours else 0,
        "largest_gathered_bytes": max(map(len, gathered)),
        "scattered_bytes": sum(map(len, scattered)),
        "rss_bytes": growth,
        "metadata_bytes": len(pickle.dumps(metadata.state_dict_metadata)),
        "warnings": sorted({str(note.message) for note in noted}),
        "boxes": boxes_hash(metadata, part),
    }


HeldChunk = tuple[str, Group, Box]
"""Of a chunk its key, the group of that, and its box."""


def held_chunks(
    sent: Iterable[LocalPlan], planned: Iterable[Any]
) -> Iterator[list[tuple[HeldChunk, int]]]:
    """Yield of each rank the chunks that it holds, and whether it writes them.

    Args:
        sent: By rank, what it sent.
        planned: By rank, the coordinator's plan.
    """
    unpacked = cache(Table.unpacked)
    for plan, planned_of in zip(sent, planned, strict=True):
        numbers, at = unpacked_ints(plan.sent.boxes), 0
        counts = iter(unpacked_ints(plan.sent.counts).tolist())
        held: list[Held] = []
        for table in map(unpacked, plan.sent.tables):
            for group, keys in zip(table.groups, table.keys, strict=True):
                count, ndim = next(counts), len(group.shape)
                boxes = numbers[at : at + count * 2 * ndim].reshape(count, 2, ndim)
                at += boxes.size
                held.append(Held(group, tuple(as_boxes(boxes)), keys))
        chunks = [(key, one.group, box) for one in held for key in one.fqns for box in one.boxes]
        bits = np.frombuffer(planned_of.planner_data.written, np.uint8)
        yield list(zip(chunks, np.unpackbits(bits, count=len(chunks)).tolist(), strict=True))


def written_chunks(sent: Iterable[LocalPlan], planned: Iterable[Any]) -> Iterator[list[HeldChunk]]:
    """Yield of each rank the chunks that it writes; arguments are those of ``held_chunks``."""
    for chunks in held_chunks(sent, planned):
        yield [chunk for chunk, is_written in chunks if is_written]


def boxes_hash(metadata: Metadata, part: set[str]) -> str:
    """Return a hash of the boxes with elements that the keys in ``part`` consist of."""
    digest = hashlib.sha256()
    for fqn in sorted(part):
        kept = metadata.state_dict_metadata.get(fqn)
        expected: Any = None
        if isinstance(kept, TensorStorageMetadata):
            boxes = {(tuple(c.offsets), tuple(c.sizes)) for c in kept.chunks}
            expected = tuple(kept.size), sorted(box for box in boxes if 0 not in box[1])
        digest.update(repr((fqn, expected)).encode())
    return digest.hexdigest()


def sample_ranks(ranks: int, count: int) -> list[int]:
    """Return some ranks, spread over all.

    >>> sample_ranks(256, 3)
    [0, 127, 255]
    """
    return sorted({(ranks - 1) * i // max(count - 1, 1) for i in range(count)})


def cpu_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU milliseconds of a call and what it returned."""
    start = time.process_time()
    value = work()
    return (time.process_time() - start) * 1e3, value


def as_ranks(
    make: Callable[[int, bool], Workload],
    workload: Workload,
    part_only: bool,
    results: Path,
    options: Options,
) -> tuple[dict[str, Any], list[str]]:
    """Return the times of single ranks, ours and stock alternating, and what differs."""
    part = make(workload.ranks, True).fqns()
    world = _World()
    world.enter(workload.ranks)
    memory = Memory()
    times: dict[str, dict[str, list[float]]] = {"ours": {}, "stock": {}}
    faults: list[str] = []

    def note(side: str, what: str, value: float) -> None:
        times[side].setdefault(what, []).append(value)

    def save(side: str, rank: int, state_dict: dict[str, Any], **options_of: Any) -> Any:
        planner: Any = (
            options.save_planner(**options_of) if side == "ours" else DefaultSavePlanner()
        )
        suffix = "_off" if options_of else ""
        flatten, _ = cpu_ms(lambda: planner.set_up_planner(state_dict, None, rank == 0))
        local, plan = cpu_ms(planner.create_local_plan)
        note(side, f"local{suffix}_ms", local)
        if options_of:
            return None
        note(side, "flatten_ms", flatten)
        note(side, "local_bytes", len(pickle.dumps(plan)))
        if side == "ours":
            sent = (results / f"plan{rank}").read_bytes()
            note(side, "finish_ms", cpu_ms(lambda: planner.finish_plan(pickle.loads(sent)))[0])
        else:
            note(side, "finish_ms", cpu_ms(lambda: planner.finish_plan(plan))[0])
        return plan

    chosen = sample_ranks(workload.ranks, options.samples)
    closed = StockPlans(workload)
    for turn, rank in enumerate(chosen):
        world.rank = rank
        state_dict = real_state_dict(workload, rank, memory)
        gc.collect()
        sides = ("ours", "stock") if turn % 2 else ("stock", "ours")
        for side in sides:
            plan = save(side, rank, state_dict)
            if side == "stock" and plan != closed.plan(rank):
                faults.append(f"{workload.name}: the stock plan of rank {rank} is not as assumed")
        save("ours", rank, state_dict, digests="off")
    if options.profile:
        planner = options.save_planner()
        planner.set_up_planner(state_dict, None, False)
        profiled(True, f"create_local_plan, {workload.name}", planner.create_local_plan)
    stored = (results / "metadata").read_bytes()
    kept = pickle.loads(stored).state_dict_metadata
    some = pickle.dumps(Metadata({fqn: expected for fqn, expected in kept.items() if fqn in part}))
    del kept
    for what, ranks in (("load", workload.ranks), ("reshard", max(workload.ranks // 2, 1))):
        world.size = ranks
        targets = {"ours": make(ranks, part_only), "stock": make(ranks, True)}
        factor = targets["ours"].items() / targets["stock"].items()
        start = time.perf_counter()
        for turn, rank in enumerate(sample_ranks(ranks, options.samples)):
            if time.perf_counter() - start > options.load_seconds:
                break
            world.rank = rank
            found = {}
            for side in ("ours", "stock") if turn % 2 else ("stock", "ours"):
                state_dict = real_state_dict(targets[side], rank, memory)
                loads: Any = PlacementLoadPlanner() if side == "ours" else DefaultLoadPlanner()
                # Read for every load, so that nothing is known of it beforehand.
                metadata = pickle.loads(stored if side == "ours" else some)
                gc.collect()
                flatten, _ = cpu_ms(partial(loads.set_up_planner, state_dict, metadata, False))
                title = f"{what} plan, {workload.name}, {workload.ranks} ranks"
                profile = options.profile and turn == 0 and side == "ours"
                local, plan = cpu_ms(partial(profiled, profile, title, loads.create_local_plan))
                sent = pickle.dumps(plan)
                # The coordinator's answer, without what it compares with other ranks.
                (answer,) = loads.create_global_plan([pickle.loads(sent)])
                received = pickle.loads(pickle.dumps(answer))
                # Ours makes its items here.
                finish, final = cpu_ms(partial(loads.finish_plan, received))
                scale = 1.0 if side == "ours" else factor
                note(side, f"{what}_ms", (local + finish) * scale)
                note(side, f"{what}_flatten_ms", flatten * scale)
                note(side, f"{what}_bytes", len(sent) * scale)
                found[side] = {
                    (i.dest_index.fqn, tuple(i.dest_offsets), tuple(i.lengths))
                    for i in final.items
                    if i.dest_index.fqn in part and i.lengths.numel()
                }
            if found["ours"] != found["stock"]:
                faults.append(f"{workload.name}: {what} plans of rank {rank} differ")
    medians = {
        side: {name: statistics.median(values) for name, values in found.items()}
        for side, found in times.items()
    }
    return {"workload": workload.name, "ranks": workload.ranks, **medians}, faults
