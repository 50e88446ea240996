"""scripts/bench digests [--cases big small] [--rounds N] [--seconds S] [--json FILE]

Saves with digests="off", "sampled" and "full" in turn, in one process and into one directory, and
prints a table: whole dcp.save, its part that makes the local plan (where digests are made), and
what sampled and full cost in percent of a whole save without digests.

Writing varies by more from save to save than digests take, so there are three ratios: of the whole
save (median of the ratios within a round), and the CPU time that digests add to the local plan,
over the wall time and over the CPU time of a whole save without. The last is the finest, and the
most that a save of nothing but CPU time would lose.

With --json a file of machine, options, seconds and cases: by name the nbytes, tensors, rounds and
per kind ("off", "sampled", "full") save_s, save_cpu_s, plan_cpu_s (medians), whole_percent,
added_percent and added_cpu_percent.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from bench_common import show, three, write_measured

from dcp_placements import PlacementSavePlanner

KINDS = ("off", "sampled", "full")


class TimedPlanner(PlacementSavePlanner):
    """Adds up what making the local plan takes."""

    plan_cpu_s = 0.0

    def create_local_plan(self) -> Any:
        start = time.process_time()
        plan = super().create_local_plan()
        self.plan_cpu_s += time.process_time() - start
        return plan


def state_dict_of(case: str, tiny: bool) -> dict[str, Any]:
    """Return 1 GB in 64 tensors, or 5,000 small ones."""
    count, shape = {"big": (64, (2048, 2048)), "small": (5000, (32, 32))}[case]
    if tiny:
        count, shape = {"big": (4, (256, 256)), "small": (50, (32, 32))}[case]
    return {"model": {f"layers.{i}.weight": torch.rand(shape) for i in range(count)}}


def save(state_dict: dict[str, Any], directory: Path, kind: str) -> tuple[float, float, float]:
    """Return the wall and CPU seconds of a save, and the CPU seconds of its local plan."""
    planner = TimedPlanner(digests=kind)
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    dcp.save(state_dict, checkpoint_id=directory, planner=planner, no_dist=True)
    return time.perf_counter() - wall, time.process_time() - cpu, planner.plan_cpu_s


def measure(case: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return the entry of a case."""
    state_dict = state_dict_of(case, args.tiny)
    tensors = list(state_dict["model"].values())
    taken: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    save(state_dict, directory / "c", "full")
    start = time.perf_counter()
    for turn in range(args.rounds):
        for shift in range(3):
            kind = KINDS[(turn + shift) % 3]
            # A new directory each time: overwriting is not what is measured.
            shutil.rmtree(directory / "c")
            taken[kind].append(save(state_dict, directory / "c", kind))
        if time.perf_counter() - start > args.seconds:
            break
    shutil.rmtree(directory / "c")
    medians = {
        kind: [statistics.median(column) for column in zip(*rows, strict=True)]
        for kind, rows in taken.items()
    }
    kinds = {}
    for kind, (save_s, save_cpu_s, plan_cpu_s) in medians.items():
        ratios = [a[0] / b[0] for a, b in zip(taken[kind], taken["off"], strict=True)]
        kinds[kind] = {
            "save_s": save_s,
            "save_cpu_s": save_cpu_s,
            "plan_cpu_s": plan_cpu_s,
            "whole_percent": (statistics.median(ratios) - 1) * 100,
            "added_percent": (plan_cpu_s - medians["off"][2]) / medians["off"][0] * 100,
            "added_cpu_percent": (plan_cpu_s - medians["off"][2]) / medians["off"][1] * 100,
        }
    return {
        "nbytes": sum(tensor.nbytes for tensor in tensors),
        "tensors": len(tensors),
        "rounds": len(taken["off"]),
        **kinds,
    }


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench digests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", choices=("big", "small"), default=["big", "small"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=60, help="a case ends after these (60)")
    parser.add_argument("--directory", help="where to write (a temporary one)")
    parser.add_argument("--tiny", action="store_true", help="next to no data, 2 rounds")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.tiny:
        args.rounds = 2
    return args


def main() -> int:
    args = parse()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    start = time.perf_counter()
    cases = {}
    with tempfile.TemporaryDirectory(prefix="bench-digests-", dir=args.directory) as directory:
        for case in args.cases:
            print(f"bench: {case}", file=sys.stderr, flush=True)
            cases[case] = measure(case, args, Path(directory))
    rows = []
    for case, entry in cases.items():
        what = f"{case}: {entry['tensors']:,} tensors, {entry['nbytes'] / 1e6:,.0f} MB"
        for kind in KINDS:
            of_kind = entry[kind]
            names = ("whole_percent", "added_percent", "added_cpu_percent")
            percents = [f"{of_kind[name]:+.2f} %" for name in names]
            rows.append(
                (
                    what,
                    kind,
                    three(of_kind["save_s"] * 1e3),
                    three(of_kind["save_cpu_s"] * 1e3),
                    three(of_kind["plan_cpu_s"] * 1e3),
                    *(percents if kind != "off" else ("",) * 3),
                )
            )
            what = ""
    show(
        f"Digests: medians of up to {args.rounds} saves, in turn",
        (
            *("state dict", "digests", "save ms", "its CPU ms", "plan CPU ms"),
            *("whole save", "added/wall", "added/CPU"),
        ),
        rows,
    )
    write_measured(args, start, cases=cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
