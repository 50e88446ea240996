"""What the command line takes of memory is bounded by --memory and not by the checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from dcp_placements import PlacementSavePlanner
from dcp_placements.testing import World
from tests.storage_scenes import sharded

NBYTES = 192 << 20
MEMORY = 8 << 20

BUFFERS = 48 << 20
"""Two readers have buffers of up to 20 MiB each."""

PROGRAM = """
import sys
from pathlib import Path
from dcp_placements.cli import main

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

root, memory = sys.argv[1:]
limit = ["--memory", memory]
main(["verify", f"{root}/small", "--contents"])
main(["diff", f"{root}/small", f"{root}/small"])
floor = peak()
for command in (
    ["verify", f"{root}/rows", "--contents", *limit],
    ["diff", f"{root}/rows", f"{root}/columns", *limit],
    ["diff", f"{root}/columns", f"{root}/hf", *limit],
):
    if main(command):
        sys.exit(f"{command} failed")
print("grown by", peak() - floor)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    whole = {"w": torch.arange(NBYTES // 4, dtype=torch.int32).view(-1, 4096)}
    for name, dim in (("rows", 0), ("columns", 1)):
        world = World(3)
        world.save(
            tmp_path / name,
            lambda rank, world=world, dim=dim: sharded(world, rank, whole, dim),
            lambda rank: PlacementSavePlanner(),
        )
    (tmp_path / "hf").mkdir()
    save_file(whole, tmp_path / "hf" / "model.safetensors")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "small")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(MEMORY)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    grown = int(done.stdout.split()[-1])
    assert grown < MEMORY + BUFFERS < NBYTES // 3, f"{grown:,} bytes"
