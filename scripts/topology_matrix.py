"""python scripts/topology_matrix.py [--all]

Runs the pairs of ``tests/matrix.py`` in simulated worlds, prints their table and writes it between
the marks in dcp_placements/layout/DESIGN.md. ``--all`` takes every legal topology of up to 32 ranks
(some 1,300 pairs, 20 minutes) and leaves the guide as it is. Exit status 1 when a pair is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "dcp_placements" / "layout" / "DESIGN.md"
BEGIN, END = "<!-- scripts/matrix -->\n", "<!-- end of scripts/matrix -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every legal topology; only printed")
    args = parser.parse_args()

    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from matrix import Pair, by_source, pairs, run, table
    from topologies import all_topologies

    warnings.filterwarnings("error")  # as in the tests: a warning is a false alarm
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    start = time.monotonic()
    outcomes: dict[Pair, bool] = {}
    for source, targets in by_source(pairs(every=args.all)).items():
        outcomes |= dict.fromkeys(((source, target) for target in targets), False)
        try:
            for target in run(source, targets):
                outcomes[source, target] = True
        except BaseException as error:  # torch's CheckpointException is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            print(f"saved under {source}: wrong", file=sys.stderr)
    made = table(outcomes)
    print(made)
    for reason, count in all_topologies()[1].items():
        print(f"left out: {count} topologies, {reason}")
    print(f"{sum(outcomes.values())} of {len(outcomes)} in {time.monotonic() - start:.0f} s")
    if not args.all:
        before, rest = GUIDE.read_text().split(BEGIN)
        after = rest.split(END)[1]
        GUIDE.write_text(f"{before}{BEGIN}{made}\n{END}{after}")
    return 0 if all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
