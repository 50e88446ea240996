"""scripts/bench page [BENCH ...] [--tiny] [--page FILE]

Runs the benches one after the other and writes what each prints into scripts/README.md, below its
command, with the machine and the commit. All take some 40 minutes; name some to renew only those.
Exit status 1 when a bench failed; what it printed before stays as it was.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_common import machine

SCRIPTS = Path(__file__).parent
COMMANDS = {
    "plan": "--workloads w1 w4 w3-own --ranks 256 2048",
    "io": "",
    "load": "",
    "restart": "--workloads w1 w2 --ranks 64 1024",
    "exchange": "",
    "digests": "",
    "offline": "",
    "commands": "",
    "export": "",
    "reshard": "",
    "latency": "",
    "safetensors": "",
    "transfer": "",
}
"""The options of each bench."""


def commit() -> str:
    """Return the commit that is measured, with a mark where files differ from it."""
    command = ["git", "describe", "--always", "--dirty=, with changes"]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def measured(bench: str, options: str) -> str | None:
    """Return the block of one bench; None if it failed."""
    command = [sys.executable, str(SCRIPTS / f"bench_{bench}.py"), *options.split()]
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
    about = machine()
    lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
    return "\n".join(
        [
            f"<!-- bench {bench} -->",
            f"`{' '.join(['scripts/bench', bench, *options.split()])}`, commit {commit()},",
            f"{about['cores']} cores, {about['memory_gb']} GB, load {about['load_average']}, "
            f"torch {about['torch']}:",
            "",
            "```text",
            *lines,
            "```",
            f"<!-- end of bench {bench} -->",
        ]
    )


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
    args = parser.parse_args()
    failed = False
    for bench in args.benches or COMMANDS:
        block = measured(bench, "--tiny" if args.tiny else COMMANDS[bench])
        if block is None:
            print(f"bench page: {bench} failed", file=sys.stderr)
            failed = True
            continue
        text = args.page.read_text()
        marks = re.compile(rf"<!-- bench {bench} -->.*?<!-- end of bench {bench} -->", re.DOTALL)
        assert marks.search(text), f"{args.page} has no marks for {bench}"
        args.page.write_text(marks.sub(lambda _, block=block: block, text))
    return failed


if __name__ == "__main__":
    sys.exit(main())
