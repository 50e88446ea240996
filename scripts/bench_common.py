"""What the benches share: children to measure in, memory, tables. Prints nothing by itself."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist


class Child:
    """Calls a function in a forked process, so that caches and memory start as clean as here."""

    def __init__(self, work: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(sender, work, args))
        self._process.start()
        sender.close()

    def result(self) -> Any:
        """Wait for it; return what the function returned, or raise what went wrong."""
        try:
            ok, value = self._receiver.recv()
        except EOFError:
            self._process.join()
            raise SystemExit(
                f"bench: a child ended with exit code {self._process.exitcode}; out of memory?"
            ) from None
        self._process.join()
        if not ok:
            raise SystemExit(f"bench: a child failed\n{value}")
        return value


def _run(sender: Any, work: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        sent = True, work(*args)
    except BaseException:
        sent = False, traceback.format_exc()
    sender.send(sent)
    sender.close()


def in_child(work: Callable[..., Any], *args: Any) -> Any:
    """Return what ``work(*args)`` returns in a forked process."""
    return Child(work, *args).result()


def rss_bytes() -> int:
    """Return the memory of this process that is resident now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """How far the resident memory of this process rises above where it was at the start."""

    def __init__(self) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._before = rss_bytes()

    def growth_bytes(self) -> int:
        """Return the rise up to now."""
        return max(peak_bytes() - self._before, 0)


def peak_bytes() -> int:
    """Return the most memory of this process that was resident at once."""
    with suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    return {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column stands left, all others right."""
    print(f"\n{title}")
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        for row in (head, *rows):
            cells = [
                cell.rjust(width) if index else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells).rstrip())
        return
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    Console(width=max(console.width, 200), highlight=False, markup=False).print(table)


def three(value: float | None) -> str:
    """Return a number with about three digits.

    >>> three(0.01234), three(1234.5), three(None)
    ('0.0123', '1,234', '-')
    """
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2
    scaled = abs(value)
    while scaled < 10 and digits < 6:
        scaled *= 10
        digits += 1
    return f"{value:.{max(digits - 1, 0)}f}"


def commit() -> str:
    """Return the commit that is measured, with a mark where files differ from it."""
    command = ["git", "describe", "--always", "--dirty=, with changes"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def write_measured(args: argparse.Namespace, start: float, **found: Any) -> None:
    """Write what a bench found to ``--json`` if that is given, below what and how it measured.

    Args:
        args: The options, ``json`` among them.
        start: When it began, by ``time.perf_counter``.
        found: The rest of the document.
    """
    if not args.json:
        return
    options = {key: value for key, value in vars(args).items() if key != "worker"}
    seconds = time.perf_counter() - start
    about = {"machine": machine(), "commit": commit(), "options": options, "seconds": seconds}
    Path(args.json).write_text(json.dumps({**about, **found}, indent=1) + "\n")


def parser_of(name: str, doc: str | None, tiny: str) -> argparse.ArgumentParser:
    """Return the parser of a bench that starts processes of itself.

    Args:
        name: Of the bench.
        doc: Its page.
        tiny: What ``--tiny`` does.
    """
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tiny", action="store_true", help=tiny)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def launch(program: str, directory: str, nproc: int, *options: str) -> dict[str, Any]:
    """Return what the processes of torchrun measured, case by case.

    Args:
        program: The bench; it is given ``--worker directory``, and ends by ``finish``.
        directory: Where it writes.
        nproc: Processes.
        options: Its others.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(nproc), program, "--worker", directory, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=False, stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(f"bench: torchrun ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads((Path(directory) / _CASES).read_text())
    return found


def begin() -> None:
    """Begin as one process of torchrun."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")


def finish(directory: Path, cases: dict[str, Any]) -> NoReturn:
    """End as one process of torchrun, and leave what rank 0 measured for ``launch``.

    Now and then a gloo thread of torch aborts a process whose program is done: what would run at
    exit is left out.
    """
    if dist.get_rank() == 0:
        (directory / _CASES).write_text(json.dumps(cases))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


_CASES = "cases.json"
