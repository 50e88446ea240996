"""python scripts/ep_smoke.py [--case NAME] [--nproc N] [--planner P] [--device D] [--report FILE]

Trains a small MoE transformer in real processes, saves it with torch.distributed.checkpoint, loads
it in new processes and compares every local tensor bit for bit, moments and steps included. Prints
a table with one row per case, check and rank, and writes the same to ``smoke-report.json``; exit
status 0 when all is as it should be, 1 when not, 2 when no case could run.

Each case trains under torchrun, saves (some in a thread or a process, training on meanwhile), and
trains on; a second torchrun starts from other weights, loads (``save_load``: the tensors against
those saved) and trains on (``continue``: against those that the first run ended with). As an oracle
that shares no code with the planners, rank 0 reads the checkpoint with torch's default planner in
one process, and compares it with whole tensors that it put together itself from what every rank
held.

The same runs with torch's default planners show what the declaration is for: they must lose tensors
without a word, or else the smoke proves nothing. Cases of one world size share their processes,
since starting torch takes longer than all the training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

PLANNERS = ("placements", "stock")


@dataclass(frozen=True)
class Case:
    """Sizes of the mesh axes, and how it saves: ``now``, or in a ``thread`` or ``process``."""

    pp: int = 1
    hsdp: int = 1
    edp: int = 1
    ep: int = 1
    tp: int = 1
    how: str = "now"

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.pp, self.hsdp, self.edp, self.ep, self.tp

    @property
    def ranks(self) -> int:
        return prod(self.sizes)


CASES = {
    "ep2": Case(ep=2),
    "ep2-thread": Case(ep=2, how="thread"),
    "ep2-process": Case(ep=2, how="process"),
    "pp2": Case(pp=2),
    "ep4": Case(ep=4),
    "ep2xedp2": Case(ep=2, edp=2),
    "tp2xep2": Case(tp=2, ep=2),
    "hsdp2xedp2xep2": Case(hsdp=2, edp=2, ep=2),
}


SHOWN = ("ep2", "ep4", "ep2xedp2")
"""What stock planners are run with, too."""


def torchrun(phase: str, jobs: list[str], ranks: int, work: Path, device: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, "--worker", f"--phase={phase}"]
    command += [f"--jobs={','.join(jobs)}", f"--work={work}", f"--device={device}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)


def collect(name: str, kind: str, case: Case, work: Path) -> Iterator[dict[str, Any]]:
    """The report's entries of one case under one planner: `save_load`, then `continue`."""
    folder = work / f"{name}-{kind}"
    phases: dict[str, list[dict[str, Any]]] = {}
    for phase in ("save", "load"):
        files = [folder / f"{phase}-{rank}.json" for rank in range(case.ranks)]
        phases[phase] = [
            json.loads(file.read_text()) if file.exists() else {"error": f"no {phase}: cut short"}
            for file in files
        ]
    errors = {
        f"{phase}, rank {rank}": result["error"]
        for phase, results in phases.items()
        for rank, result in enumerate(results)
        if "error" in result
    }
    results = phases["save"] + phases["load"]
    warned = sorted({warning for result in results for warning in result.get("warnings", ())})
    # Where experts are lost there is nothing to continue from.
    lossy = kind == "stock" and case.ep > 1
    for check in ("save_load",) if lossy else ("save_load", "continue"):
        ranks = [{"rank": r, **x.get(check, {})} for r, x in enumerate(phases["load"])]
        entry: dict[str, Any] = {"case": name, "planner": kind, "check": check}
        entry |= {"mesh": asdict(case), "errors": errors}
        entry |= {"warnings": warned, "ranks": ranks}
        if check == "save_load":
            entry |= {"losses": phases["save"][-1].get("losses")}
            entry |= {"oracle": phases["save"][0].get("oracle")}
        entry["verdict"] = verdict(entry)
        yield entry


def differs(comparison: dict[str, Any]) -> bool:
    names = ("unequal", "missing_keys", "unexpected_keys", "shape_mismatches")
    return any(comparison[name] for name in names) or not comparison["tensors_compared"]


def verdict(entry: dict[str, Any]) -> str:
    """`equal`, `lost`, `warned` (all is equal, yet our planners cried wolf), or `error`."""
    if entry["errors"]:
        return "error"
    compared = [*entry["ranks"], *([entry["oracle"]] if "oracle" in entry else [])]
    if any(map(differs, compared)) or any(
        rank["loaded_step"] != rank["saved_step"] for rank in entry["ranks"]
    ):
        return "lost"
    return "warned" if entry["warnings"] and entry["planner"] == "placements" else "equal"


def expected(entry: dict[str, Any]) -> str:
    # Stock planners know nothing of ep; pipeline stages have keys of their own, and lose nothing.
    return "lost" if entry["planner"] == "stock" and entry["mesh"]["ep"] > 1 else "equal"


def rows(entries: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    columns = "planner case check rank step tensors unequal max_delta missing shapes file verdict"
    yield tuple(columns.split())
    for entry in entries:
        for rank in entry["ranks"]:
            cells = [entry["planner"], entry["case"], entry["check"], str(rank["rank"])]
            if "max_delta" in rank:
                counts = (len(rank[n]) for n in ("unequal", "missing_keys", "shape_mismatches"))
                unequal, missing, shapes = map(str, counts)
                cells += [str(rank["loaded_step"]), str(rank["tensors_compared"]), unequal]
                cells += [f"{rank['max_delta']:.3g}", missing, shapes]
            else:
                cells += ["-"] * 6
            oracle = entry.get("oracle") if rank["rank"] == 0 else None
            if oracle:
                bad = sum(len(oracle[n]) for n in ("unequal", "missing_keys", "shape_mismatches"))
                whole = oracle["tensors_compared"] + len(oracle["missing_keys"])
                cells.append(f"{whole - bad} of {whole} right")
            else:
                cells.append("")
            yield (*cells, entry["verdict"])


def show(entries: list[dict[str, Any]]) -> None:
    head, *body = rows(entries)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
        for row in (head, *body):
            print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*head, box=None, pad_edge=False)
    colors = {"equal": "green", "lost": "yellow", "warned": "red", "error": "red"}
    for row in body:
        table.add_row(*row[:-1], f"[{colors[row[-1]]}]{row[-1]}[/]")
    # Where the output is no terminal rich assumes 80 columns, and would fold the cells.
    console = Console()
    Console(width=max(console.width, 130)).print(table)


def resolve_cases(args: argparse.Namespace) -> dict[str, Case]:
    """The cases that can run here; says which cannot."""
    devices = None
    if args.device == "cuda":
        import torch

        devices = torch.cuda.device_count()
    chosen = {}
    for name in args.case or CASES:
        case = CASES[name]
        if args.nproc:
            # Ranks beyond those that a case needs widen its FSDP axis.
            case = replace(case, edp=case.edp * args.nproc // case.ranks)
        if args.nproc and case.ranks != args.nproc:
            print(f"{name}: left out, {args.nproc} ranks are no multiple of {CASES[name].ranks}")
        elif devices is not None and case.ranks > devices and case.pp > 1:
            # Ranks that share a device talk through gloo, which sends none of its tensors to one.
            print(f"{name}: left out, {case.ranks} ranks but {devices} CUDA devices")
        else:
            chosen[name] = case
    return chosen


def drive(args: argparse.Namespace, work: Path) -> int:
    start = time.monotonic()
    cases = resolve_cases(args)
    if not cases:
        return 2
    jobs = [
        (name, kind, case)
        for kind in args.planner or PLANNERS
        for name, case in cases.items()
        # Stock planners lose something with ep alone; what more they lose is run on request only.
        if kind == "placements" or name in SHOWN or args.planner
    ]
    for ranks in sorted({case.ranks for _, _, case in jobs}):
        batch = []
        for name, kind, case in jobs:
            if case.ranks == ranks:
                (work / f"{name}-{kind}").mkdir()
                sizes = "x".join(map(str, case.sizes))
                batch.append(f"{name}:{kind}:{sizes}:{case.how}")
        for phase in ("save", "load"):
            torchrun(phase, batch, ranks, work, args.device)
    entries = [entry for name, kind, case in jobs for entry in collect(name, kind, case, work)]
    passed = all(entry["verdict"] == expected(entry) for entry in entries)
    report = {
        "overall": "smoke_pass" if passed else "smoke_fail",
        "device": args.device,
        "seconds": round(time.monotonic() - start, 1),
        "cases": entries,
    }
    Path(args.report).write_text(json.dumps(report, indent=2) + "\n")

    show(entries)
    for entry in entries:
        if entry["verdict"] != expected(entry):
            wanted = f"{entry['verdict']}, expected {expected(entry)}"
            print(f"{entry['planner']} {entry['case']} {entry['check']}: {wanted}")
            for warning in entry["warnings"]:
                print(f"    warned: {warning}")
    print(f"{report['overall']} in {report['seconds']} s; details in {args.report}")
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=CASES, help="repeatable; default: all")
    parser.add_argument("--nproc", type=int, help="ranks; those a case does not need widen edp")
    parser.add_argument("--planner", action="append", choices=PLANNERS, help="default: both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--report", default="smoke-report.json", help="default: %(default)s")
    for internal in ("--phase", "--jobs", "--work"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        # Only here: the driver itself has no use for torch, which takes seconds to import.
        from ep_smoke_worker import run_rank

        run_rank(args.phase, args.jobs.split(","), Path(args.work), args.device)
        return 0
    with tempfile.TemporaryDirectory(prefix="ep-smoke-") as work:
        return drive(args, Path(work))


if __name__ == "__main__":
    sys.exit(main())
