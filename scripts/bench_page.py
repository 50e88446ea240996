"""scripts/bench page [BENCH ...] [--tiny] [--page FILE]
scripts/bench page restart --show FILE ...

Runs the benches one after the other and writes what each prints into scripts/README.md, below its
command, with the machine and the commit. All take an hour and a half, of which "restart" takes one;
name some to renew only those. Exit status 1 when a bench failed; what it printed before stays as it
was.

The worlds of "restart" may be measured one by one, each with --json: with --show the page gets the
tables of these files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_common import commit, machine

SCRIPTS = Path(__file__).parent
COMMANDS = {
    "plan": "--workloads w1 w4 w3-own --ranks 256 2048",
    "io": "",
    "load": "",
    "restart": "--workloads w1 w2 --ranks 64 1024 4096 16384",
    "exchange": "",
    "digests": "",
    "transfer": "",
}
"""The options of each bench."""


def printed(bench: str, options: Sequence[str]) -> list[str] | None:
    """Return the lines that a bench prints; None if it failed."""
    command = [sys.executable, str(SCRIPTS / f"bench_{bench}.py"), *options]
    # With a width of its own, so that no line is folded.
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        env=os.environ | {"COLUMNS": "200"},
        cwd=tempfile.gettempdir(),
        text=True,
        check=False,
    )
    if done.returncode:
        return None
    return [line.rstrip() for line in done.stdout.strip("\n").splitlines()]


def provenance(bench: str, options: str, commit_: str, about: Mapping[str, Any]) -> list[str]:
    """Return the lines above a table: command, commit and machine."""
    return [
        f"`{' '.join(['scripts/bench', bench, *options.split()])}`, commit {commit_},",
        f"{about['cores']} cores, {about['memory_gb']} GB, load {about['load_average']}, "
        f"torch {about['torch']}:",
    ]


def block(bench: str, above: Sequence[str], lines: Sequence[str]) -> str:
    """Return what the page has of one bench."""
    marks = f"<!-- bench {bench} -->", f"<!-- end of bench {bench} -->"
    return "\n".join([marks[0], *above, "", "```text", *lines, "```", marks[1]])


def measured(bench: str, options: str) -> str | None:
    """Return the block of one bench; None if it failed."""
    lines = printed(bench, options.split())
    if lines is None:
        return None
    return block(bench, provenance(bench, options, commit(), machine()), lines)


def shown(files: Sequence[Path]) -> str | None:
    """Return the block of "restart" from reports that earlier runs wrote; None of faults."""
    lines = printed("restart", ["--show", *[str(file.resolve()) for file in files]])
    if lines is None:
        return None
    above = []
    for file in files:
        report = json.loads(file.read_text())
        of = report["options"]
        worlds = (
            f"--workloads {' '.join(of['workloads'])} --ranks {' '.join(map(str, of['ranks']))}"
        )
        above += provenance("restart", worlds, report["commit"], report["machine"])
    return block("restart", above, lines)


def main() -> int:
    """Run the benches and write the page."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benches", nargs="*", choices=[*COMMANDS, []], metavar="BENCH")
    parser.add_argument("--tiny", action="store_true", help="the smallest configuration of each")
    parser.add_argument("--page", type=Path, default=SCRIPTS / "README.md", metavar="FILE")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    if args.show and args.benches != ["restart"]:
        parser.error("--show is for the bench restart alone")
    failed = False
    for bench in args.benches or COMMANDS:
        options = "--tiny" if args.tiny else COMMANDS[bench]
        new = shown(args.show) if args.show else measured(bench, options)
        if new is None:
            print(f"bench page: {bench} failed", file=sys.stderr)
            failed = True
            continue
        text = args.page.read_text()
        marks = re.compile(rf"<!-- bench {bench} -->.*?<!-- end of bench {bench} -->", re.DOTALL)
        assert marks.search(text), f"{args.page} has no marks for {bench}"
        args.page.write_text(marks.sub(lambda _, new=new: new, text))
    return failed


if __name__ == "__main__":
    sys.exit(main())
