"""scripts/bench engines [--rounds N] [--directory DIR]

Loads a checkpoint of torch_checkpointing on 4 gloo ranks: 16 tensors of experts, DTensors over fsdp
that say nothing of ep, saved by ep 2 x fsdp 2. Three sides in turn: the engine's own resharder
("own"), ours ("ours"), and ours for the checkpoint that the engine's own saved ("source"). Into the
same topology, and into ep 4. For each the wall seconds of the slowest rank (median of the rounds),
its bytes read over those of its tensors, and how many tensors of all ranks are wrong.

With --json a file of machine, options, seconds and cases: by target and side the seconds, the ratio
of bytes, and wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_common import begin, finish, launch, parser_of, show, three, write_measured
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch_checkpointing import metadata_manager
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from dcp_placements import CheckpointPlacement, Placements

SAVED = {"ep": 2, "fsdp": 2}
TARGETS = {"same": SAVED, "ep 4": {"ep": 4, "fsdp": 1}}
SIDES = ("own", "ours", "source")
EXPERTS, TENSORS = 8, 16


def _gathered(manager: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Gather metadata on the CPU, where the engine names "cuda"."""
    parts: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(parts, data, group=process_group)
    return dict(enumerate(parts))


def declared(mesh: Any) -> Placements:
    """Return what a rank of a mesh declares."""
    return Placements({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})


def model(mesh: DeviceMesh, width: int, *, fill: bool) -> dict[str, Any]:
    """Return a rank's tensors: DTensors of its ep rank's experts over fsdp."""
    ep, fsdp = mesh.get_coordinate() or (0, 0)
    experts, rows = EXPERTS // mesh.size(0), 64 // mesh.size(1)
    whole = torch.arange(EXPERTS * 64.0).reshape(EXPERTS, 64, 1)
    local = whole[ep * experts : (ep + 1) * experts, fsdp * rows : (fsdp + 1) * rows]
    found = {}
    for number in range(TENSORS):
        value = (local + number).repeat(1, 1, width) if fill else torch.zeros(experts, rows, width)
        shape, stride = torch.Size((experts, 64, width)), (64 * width, width, 1)
        found[f"layers.{number}.experts"] = DTensor.from_local(
            value, mesh["fsdp"], [Shard(1)], run_check=False, shape=shape, stride=stride
        )
    return found


def _manager(resharder: Any) -> Any:
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    config.items = {"model": ItemSpec(resharder=resharder)}
    return config.build()


def _read_nbytes() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def work(args: argparse.Namespace) -> None:
    """Be one process of torchrun."""
    begin()
    metadata_manager.DefaultMetadataManager._all_gather_pickled_data = _gathered
    found: dict[str, dict[str, Any]] = {}
    for target, axes in [("", SAVED), *TARGETS.items()]:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        ours = declared(mesh)
        resharders = {
            "own": DefaultResharder(),
            "ours": ours.resharder(),
            "source": ours.resharder(source=declared, axes=SAVED),
        }
        expected = model(mesh, args.width, fill=True)
        if not target:
            for side in ("own", "ours"):
                manager = _manager(resharders[side])
                manager.save(f"{args.worker}/{side}", {"model": expected})
                manager.close()
            continue
        needed = sum(one.to_local().nbytes for one in expected.values())
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        read, wrong = {}, {}
        for _ in range(args.rounds):
            for side in SIDES:
                into = model(mesh, args.width, fill=False)
                manager = _manager(resharders[side])
                dist.barrier()
                began, before = time.perf_counter(), _read_nbytes()
                manager.load(
                    f"{args.worker}/{'ours' if side == 'ours' else 'own'}", into={"model": into}
                )
                own = time.perf_counter() - began, (_read_nbytes() - before) / needed
                differing = sum(
                    not torch.equal(one.to_local(), expected[key].to_local())
                    for key, one in into.items()
                )
                manager.close()
                rows: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(rows, (*own, differing))
                seconds[side].append(max(row[0] for row in rows))
                read[side], wrong[side] = max(row[1] for row in rows), sum(row[2] for row in rows)
        found[target] = {
            side: {"seconds": statistics.median(each), "read": read[side], "wrong": wrong[side]}
            for side, each in seconds.items()
        }
    finish(Path(args.worker), found)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("engines", __doc__, "next to no data, 1 round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=8192, help="elements of a row")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.width = 1, 64
    return args


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    start = time.perf_counter()
    options = ["--rounds", str(args.rounds), "--width", str(args.width)]
    with tempfile.TemporaryDirectory(prefix="bench-engines-", dir=args.directory) as directory:
        cases = launch(__file__, directory, 4, *options)
    rows = [
        (f"{target}, {side}", three(one["seconds"]), f"{one['read']:.4f}", str(one["wrong"]))
        for target, sides in cases.items()
        for side, one in sides.items()
    ]
    nbytes = TENSORS * EXPERTS * 64 * args.width * 4
    title = f"loads of {nbytes / 1e6:,.0f} MB saved by ep 2 x fsdp 2, 4 processes, slowest rank"
    show(title, ("into, resharder", "seconds", "read / needed", "wrong tensors"), rows)
    write_measured(args, start, cases=cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
