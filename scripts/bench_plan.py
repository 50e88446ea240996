"""scripts/bench plan [--workloads W ...] [--ranks N ...] [--full] [--json FILE] [--plot FILE]

Plans saves and loads of 256 to 16,384 ranks in one process at a time, with PlacementSavePlanner and
PlacementLoadPlanner and with torch's default pair, and prints three tables: the coordinator (CPU
seconds, bytes gathered and scattered, memory), a rank (local save plan, finish, load plan), and how
the CPU time of the coordinator grows with the ranks. Exit status 1 when the two pairs did not plan
the same boxes.

Each rank's plan is made through the planner's own hooks, pickled, unpickled on the coordinator,
planned there, and what is scattered is pickled again, as torch's collectives do; a network there is
none. For thousands of ranks the planner makes the plans of a few, and those of the others follow
from them and from how the tensors lie (compared with the real one for a rank in each run;
--whole-plans does without). The coordinator runs in a process of its own that has planned
for rank 0 and nothing else. All times are CPU seconds.

Stock plans are made in closed form (and compared with the real thing for some ranks) and for a part
of the tensors; what is shown is multiplied up to all of them ("scaled"). Stock runs for as many
ranks as fit --stock-seconds; beyond that the numbers follow the exponent measured so far, and
are marked "~".

With --json a file of
    machine, options, seconds
    coordinator   one entry per workload, ranks and side ("ours", "stock"): kind ("measured",
                  "scaled", "extrapolated"), tensors, planned_tensors, cpu_s (the sum of unpickle_s,
                  plan_s and pickle_s), gathered_bytes, scattered_bytes, rss_bytes (peak above the
                  start), metadata_bytes (state_dict_metadata, pickled), warnings; of ours also
                  digest_bytes (part of gathered_bytes)
    rank          one entry per workload and ranks, per side medians over some ranks in ms:
                  local_ms, flatten_ms, local_off_ms (digests="off"), finish_ms, load_ms
                  and reshard_ms (with the items made), local_bytes, load_bytes
    exponents     by workload and side, of cpu_s in the ranks
    faults        what the two pairs planned differently
"""

from __future__ import annotations

import argparse
import ast
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_common import Child, in_child, show, three, write_measured
from bench_planning import Options, as_ranks, coordinate, make_plans
from bench_workloads import WORKLOADS, Workload

DEFAULT_WORKLOADS = ("w1", "w2", "w3", "w3-thin", "w3-own", "w4")
DEFAULT_RANKS = {
    "w1": (256, 1024, 4096, 16384),
    "w2": (256, 1024),
    # Every tensor is a class of its own here.
    "w3-own": (256,),
}
OTHER_RANKS = (256, 1024, 4096)
STOCK_SHARES = {"w1": 3, "w2": 2}
"""Of --stock-seconds; 1 for all others."""
FULL_RANKS = (256, 512, 1024, 2048, 4096, 8192, 16384)
FULL_RANKS_OF = {
    "w1-steps": (1024, 4096),
    # Its metadata has a chunk list per tensor: 16,384 ranks would take about 10 GB.
    "w3-own": (256, 512, 1024),
}


class Bench:
    """One run."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args = args
        self.directory = directory
        self.options = Options(
            args.digests,
            {
                name: ast.literal_eval(value)
                for name, value in (o.split("=", 1) for o in args.option)
            },
            args.samples,
            args.load_seconds,
            args.profile,
            args.whole_plans,
        )
        self.stock_left = float(args.stock_seconds)
        self.ours_left = float(args.ours_seconds)
        self.coordinator: list[dict[str, Any]] = []
        self.ranks: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.skipped: list[str] = []

    def run(self) -> None:
        """Measure everything that there is time for."""
        for index, name in enumerate(self.args.workloads):
            shares = [STOCK_SHARES.get(other, 1) for other in self.args.workloads[index:]]
            stock_budget = self.stock_left * shares[0] / sum(shares)
            stock_cost: list[tuple[int, float]] = []
            for ranks in self.args.ranks_of[name]:
                whole = WORKLOADS[name](ranks, self.args.tiny)
                part = (
                    whole
                    if self.args.stock_whole or self.args.tiny
                    else WORKLOADS[name](ranks, True)
                )
                keys = part.fqns()
                spent, ours = self._ours(whole, keys, self.ours_left)
                self.ours_left -= spent
                expected = _predicted(stock_cost, ranks)
                stock = None
                if expected < stock_budget:
                    spent, stock = self._stock(whole, part, keys)
                    stock_cost.append((ranks, spent))
                    stock_budget -= spent
                    self.stock_left -= spent
                if ours and stock and ours["boxes"] != stock["boxes"]:
                    self.faults.append(f"{name}, {ranks} ranks: the boxes are not those of stock")
        self._extrapolate()

    def _ours(
        self, workload: Workload, part: set[str], budget: float
    ) -> tuple[float, dict[str, Any] | None]:
        start = time.perf_counter()
        plans = self.directory / "plans"
        members = sorted(range(workload.ranks), key=lambda rank: (rank % workload.columns, rank))
        probe = in_child(make_plans, workload, True, members[:3], plans, self.options)
        expected = probe * workload.ranks / self.args.jobs
        if expected > budget:
            self.skipped.append(
                f"{workload.name} at {workload.ranks} ranks: making all plans would take "
                f"{expected:.0f} s of the {budget:.0f} s left (--ours-seconds)"
            )
            return time.perf_counter() - start, None
        share = -(-len(members) // self.args.jobs)
        children, paths = [], []
        for at in range(0, len(members), share):
            paths.append(self.directory / f"plans{at}")
            some = members[at : at + share]
            children.append(Child(make_plans, workload, True, some, paths[-1], self.options))
        for child in children:
            child.result()
        spent = time.perf_counter() - start
        results = self.directory / "results"
        results.mkdir(exist_ok=True)
        entry = in_child(coordinate, workload, True, paths, results, part, self.options)
        for path in paths:
            path.unlink()
        self.coordinator.append(entry)
        if self.options.samples:
            make = WORKLOADS[workload.name]
            rank, faults = in_child(as_ranks, make, workload, self.args.tiny, results, self.options)
            self.ranks.append(rank)
            self.faults += faults
        self._say(
            f"{workload.name}, {workload.ranks} ranks: plans {spent:.0f} s, all "
            f"{time.perf_counter() - start:.0f} s"
        )
        return spent, entry

    def _stock(
        self, whole: Workload, part: Workload, keys: set[str]
    ) -> tuple[float, dict[str, Any]]:
        start = time.perf_counter()
        path = self.directory / "plans"
        in_child(make_plans, part, False, range(part.ranks), path, self.options)
        entry = in_child(coordinate, part, False, [path], self.directory, keys, self.options)
        path.unlink()
        factor = whole.items() / part.items()
        if factor != 1:
            entry["kind"] = "scaled"
            entry["tensors"] = whole.tensors
            for name in _SCALED:
                entry[name] *= factor
        self.coordinator.append(entry)
        return time.perf_counter() - start, entry

    def _extrapolate(self) -> None:
        for name in self.args.workloads:
            measured = [
                entry
                for entry in self.coordinator
                if entry["workload"] == name and entry["side"] == "stock"
            ]
            if len(measured) < 2:
                continue
            known = {entry["ranks"] for entry in measured}
            for ranks in self.args.ranks_of[name]:
                if ranks in known:
                    continue
                entry = {**measured[-1], "ranks": ranks, "kind": "extrapolated", "boxes": None}
                for what in _SCALED:
                    grown = (ranks / measured[-1]["ranks"]) ** (exponent(measured, what) or 1.0)
                    entry[what] = measured[-1][what] * grown
                self.coordinator.append(entry)

    def _say(self, text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)


_SCALED = (
    "cpu_s",
    "unpickle_s",
    "plan_s",
    "pickle_s",
    "gathered_bytes",
    "largest_gathered_bytes",
    "scattered_bytes",
    "rss_bytes",
    "metadata_bytes",
)


def _predicted(costs: Sequence[tuple[int, float]], ranks: int) -> float:
    """Return the seconds that stock is going to take; 0 where nothing is known."""
    if not costs:
        return 0.0
    known, cost = costs[-1]
    return cost * math.pow(ranks / known, 1.45)


def exponent(entries: Sequence[dict[str, Any]], what: str) -> float | None:
    """Return the slope of ``what`` over the ranks, both logarithmic, by least squares."""
    points = [(math.log(e["ranks"]), math.log(e[what])) for e in entries if e[what] > 0]
    if len({x for x, _ in points}) < 2:
        return None
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    slope: float = above / sum((x - mean_x) ** 2 for x, _ in points)
    return slope


def _ratio(ours: float | None, stock: float | None) -> str:
    if not ours or not stock:
        return "-"
    return f"{three(stock / ours)}x"


def show_all(bench: Bench) -> None:
    """Print the tables."""
    by_cell = {(e["workload"], e["ranks"], e["side"]): e for e in bench.coordinator}
    marks = {"measured": "", "scaled": "", "extrapolated": "~"}
    rows: list[Sequence[str]] = []
    for name in bench.args.workloads:
        for ranks in bench.args.ranks_of[name]:
            ours = by_cell.get((name, ranks, "ours"), {})
            stock = by_cell.get((name, ranks, "stock"), {})
            if not ours and not stock:
                continue
            mark = marks[stock.get("kind", "measured")]

            def cell(what: str, unit: float, side: dict[str, Any], mark: str = "") -> str:
                return mark + three(side[what] / unit) if side else "-"

            rows.append(
                (
                    name,
                    f"{ranks:,}",
                    f"{(ours or stock)['tensors']:,}",
                    cell("cpu_s", 1, ours),
                    cell("cpu_s", 1, stock, mark),
                    _ratio(ours.get("cpu_s"), stock.get("cpu_s")),
                    cell("gathered_bytes", ranks, ours),
                    cell("digest_bytes", ranks, ours),
                    cell("gathered_bytes", ranks, stock, mark),
                    cell("scattered_bytes", ranks, ours),
                    cell("scattered_bytes", ranks, stock, mark),
                    cell("rss_bytes", 1e6, ours),
                    cell("rss_bytes", 1e6, stock, mark),
                    cell("metadata_bytes", 1e6, ours),
                    cell("metadata_bytes", 1e6, stock, mark),
                )
            )
    show(
        "Coordinator: unpickle, plan, pickle (CPU). Sent: mean bytes per rank. "
        "Stock scaled from a part of the tensors; ~ extrapolated.",
        (
            "workload",
            "ranks",
            "tensors",
            "ours s",
            "stock s",
            "ratio",
            "up B ours",
            "digests",
            "stock",
            "down B ours",
            "stock",
            "RSS MB ours",
            "stock",
            "metadata MB ours",
            "stock",
        ),
        rows,
    )
    rows = []
    for entry in bench.ranks:
        ours, stock = entry["ours"], entry["stock"]

        def pair(what: str, ours: Any = ours, stock: Any = stock) -> tuple[str, str, str]:
            return three(ours[what]), three(stock[what]), _ratio(ours[what], stock[what])

        rows.append(
            (
                entry["workload"],
                f"{entry['ranks']:,}",
                *pair("local_ms"),
                three(ours["local_off_ms"]),
                three(ours["finish_ms"]),
                *pair("load_ms"),
                *pair("reshard_ms"),
                three(ours["load_bytes"]),
                three(stock["load_bytes"]),
            )
        )
    show(
        "A rank: medians in CPU ms (flattening left out, as both do it alike). Stock load plans "
        "scaled.",
        (
            "workload",
            "ranks",
            "save plan ours",
            "stock",
            "ratio",
            "digests off",
            "finish",
            "load plan ours",
            "stock",
            "ratio",
            "resharded ours",
            "stock",
            "ratio",
            "load plan B ours",
            "stock",
        ),
        rows,
    )
    rows = [
        (name, *(three(found[side]) for side in ("ours", "stock")))
        for name, found in exponents(bench).items()
    ]
    show("Growth: CPU of the coordinator ~ ranks^e", ("workload", "ours", "stock"), rows)


def exponents(bench: Bench) -> dict[str, dict[str, float | None]]:
    """Return the measured growth, by workload and side."""
    found: dict[str, dict[str, float | None]] = {}
    for name in bench.args.workloads:
        found[name] = {}
        for side in ("ours", "stock"):
            entries = [
                e
                for e in bench.coordinator
                if (e["workload"], e["side"]) == (name, side) and e["kind"] != "extrapolated"
            ]
            found[name][side] = exponent(entries, "cpu_s")
    return found


def plot(bench: Bench, path: str) -> None:
    """Draw the coordinator's CPU time over the ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5.5))
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for name, color in zip(bench.args.workloads, colors, strict=False):
        for side, style in (("ours", "-"), ("stock", "--")):
            entries = sorted(
                (e for e in bench.coordinator if (e["workload"], e["side"]) == (name, side)),
                key=lambda e: e["ranks"],
            )
            if not entries:
                continue
            ranks, seconds = [e["ranks"] for e in entries], [e["cpu_s"] for e in entries]
            label = f"{name}, {'dcp_placements' if side == 'ours' else 'stock'}"
            axes.plot(ranks, seconds, style, color=color, label=label)
            for entry in entries:
                hollow = entry["kind"] == "extrapolated"
                axes.plot(
                    entry["ranks"],
                    entry["cpu_s"],
                    "o",
                    color=color,
                    markerfacecolor="white" if hollow else color,
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({e["ranks"] for e in bench.coordinator})
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_xlabel("ranks")
    axes.set_ylabel("CPU seconds of the coordinator")
    axes.set_title("Planning one save (hollow: extrapolated)")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="default: all of W1-W4")
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        help="default: 256 to 4096, w1 to 16384",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="256 to 16,384 ranks, all that the README shows; takes up to two hours",
    )
    parser.add_argument("--tiny", action="store_true", help="a few layers of w4 on 4 and 8 ranks")
    parser.add_argument("--stock-seconds", type=float, help="for stock (120; 1200 with --full)")
    parser.add_argument("--ours-seconds", type=float, help="for ours (150; 3600 with --full)")
    parser.add_argument("--stock-whole", action="store_true", help="no part: all tensors for stock")
    parser.add_argument("--load-seconds", type=float, help="for load plans of a cell (1.5; 20)")
    parser.add_argument("--digests", choices=("sampled", "off"), default="sampled")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option of PlacementSavePlanner, a Python literal",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=3,
        help="ranks to time on their own (3; 0: the coordinator alone)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes that make plans (2)")
    parser.add_argument(
        "--whole-plans", action="store_true", help="make every rank's plan from all its tensors"
    )
    parser.add_argument("--profile", action="store_true", help="print where the time of ours goes")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="needs matplotlib (the extra 'plot')")
    args = parser.parse_args(argv)
    if args.tiny:
        args.workloads = args.workloads or ["w4"]
        args.ranks = args.ranks or [4, 8]
        args.samples, args.jobs = 2, 1
    more = ("w1-steps",) if args.full else ()
    args.workloads = list(args.workloads or DEFAULT_WORKLOADS + more)
    args.ranks_of = {
        name: sorted(
            args.ranks
            or (
                FULL_RANKS_OF.get(name, FULL_RANKS)
                if args.full
                else DEFAULT_RANKS.get(name, OTHER_RANKS)
            )
        )
        for name in args.workloads
    }
    for name, short, long in (
        ("stock_seconds", 120, 1200),
        ("ours_seconds", 150, 3600),
        ("load_seconds", 1.5, 20),
    ):
        if getattr(args, name) is None:
            setattr(args, name, long if args.full else short)
    cells = [(name, ranks) for name, found in args.ranks_of.items() for ranks in found]
    if any(ranks > 64 and ranks % EP_OF.get(name, 1) for name, ranks in cells):
        parser.error("--ranks beyond 64 must be multiples of 64")
    return args


EP_OF = {"w1": 64, "w1-steps": 64, "w2": 64, "w4": 8}


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    # What torch's import left is no garbage: children need not look through it again and again.
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as directory:
        bench = Bench(args, Path(directory))
        bench.run()
    show_all(bench)
    for line in bench.skipped:
        print(f"skipped: {line}")
    for entry in bench.coordinator:
        for note in entry["warnings"]:
            print(f"warning: {entry['workload']}, {entry['ranks']} ranks, {entry['side']}: {note}")
    for fault in bench.faults:
        print(f"fault: {fault}")
    write_measured(
        args,
        start,
        coordinator=bench.coordinator,
        rank=bench.ranks,
        exponents=exponents(bench),
        faults=bench.faults,
    )
    if args.plot:
        plot(bench, args.plot)
    return 1 if bench.faults else 0


if __name__ == "__main__":
    sys.exit(main())
