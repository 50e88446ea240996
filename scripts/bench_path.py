"""scripts/bench path [--names]

Counts what one expert passes on its way through a save and a load: a DTensor over ``fsdp``, a rule
over ``ep``, four simulated ranks, torch's own storage, after a warm-up. Printed for each: how many
modules and functions of dcp_placements run on any rank, and with --names which. Who follows that
tensor reads so many.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.distributed.tensor import Shard

import dcp_placements
from dcp_placements import CheckpointPlacement, Placements
from dcp_placements.testing import FakeDTensor, World

PACKAGE = str(Path(dcp_placements.__file__).parent)
FAKES = str(Path(sys.modules[World.__module__].__file__ or "").parent)


def passed(work: Callable[[], Any]) -> Counter[CodeType]:
    """Return how often each function of the package is called meanwhile."""
    calls: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code, file = frame.f_code, frame.f_code.co_filename
        is_ours = file.startswith(PACKAGE) and not file.startswith(FAKES)
        if event == "call" and is_ours and code.co_name[:1] != "<":  # no comprehensions
            calls[code] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench path")
    parser.add_argument("--names", action="store_true", help="list the functions")
    args = parser.parse_args()
    world = World(4)

    def state(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        local = torch.full((1, 3), float(rank))
        return {"layers.0.experts.w1": FakeDTensor(local, mesh["fsdp"], [Shard(0)], (2, 3))}

    def placements(rank: int) -> Placements:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        return Placements({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})

    with tempfile.TemporaryDirectory() as directory:

        def save() -> None:
            world.save(directory, state, lambda rank: placements(rank).save_planner())

        def load() -> None:
            world.load(directory, state, lambda rank: placements(rank).load_planner())

        for work in (save, load):
            work()
            calls = passed(work)
            files = Counter(code.co_filename for code in calls)
            print(f"{work.__name__}: {len(files)} modules, {len(calls)} functions")
            for file in sorted(files) if args.names else ():
                of_file = (code for code in calls if code.co_filename == file)
                names = sorted(code.co_qualname for code in of_file)
                print(f"  {file.removeprefix(PACKAGE + '/')}: {', '.join(names)}")


if __name__ == "__main__":
    main()
