"""scripts/bench safetensors [--nbytes N] [--rounds N] [--json FILE]

Compares this package's reading and writing of safetensors files with the safetensors library, on
local files: headers (of --headers tensors in 16 files), whole tensors, slices of columns, an export
of a DCP checkpoint, and an import of a safetensors file. The library needs whole files in memory to
export or import: torch's default planner loads or saves them.

Each case runs by the package and by the library in turn, --rounds times, each time in a forked
process. Prints the medians of the seconds and of the growth of memory, and the median ratio
of the seconds.
With --json a file of machine, options, seconds and cases: by name and side seconds and peak_bytes,
and the ratio.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from bench_common import PeakMemory, in_child, show, three, write_measured
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dcp_placements.layout.sharding import Box
from dcp_placements.offline import Checkpoint, export_safetensors, import_safetensors
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.storage.safetensors_files import read_header

TENSORS, FILES = 16, 16


def headers_ours(root: Path) -> None:
    for file in sorted((root / "headers").iterdir()):
        with open(file, "rb") as stream:
            read_header(stream, file.name, file.stat().st_size)


def headers_library(root: Path) -> None:
    for file in sorted((root / "headers").iterdir()):
        with safe_open(file, "pt") as stream:
            for name in stream.keys():  # noqa: SIM118  it is no dict
                part = stream.get_slice(name)
                part.get_shape(), part.get_dtype()


def whole_ours(root: Path) -> None:
    checkpoint = Checkpoint(root / "hf")
    with BoxReader(checkpoint) as reader:
        for tensor in checkpoint.tensors.values():
            reader.read(tensor, Box((0, 0), tensor.shape))


def whole_library(root: Path) -> None:
    with safe_open(root / "hf" / "model.safetensors", "pt") as stream:
        for name in stream.keys():  # noqa: SIM118
            stream.get_tensor(name).clone()


def columns_ours(root: Path) -> None:
    checkpoint = Checkpoint(root / "hf")
    with BoxReader(checkpoint) as reader:
        for tensor in checkpoint.tensors.values():
            rows, columns = tensor.shape
            reader.read(tensor, Box((0, columns // 4), (rows, columns // 2)))


def columns_library(root: Path) -> None:
    with safe_open(root / "hf" / "model.safetensors", "pt") as stream:
        for name in stream.keys():  # noqa: SIM118
            columns = stream.get_slice(name).get_shape()[1]
            stream.get_slice(name)[:, columns // 4 : columns // 4 + columns // 2].clone()


def export_ours(root: Path) -> None:
    export_safetensors(root / "dcp", root / "out", max_shard_size=1 << 60)


def export_library(root: Path) -> None:
    tensors = dcp.FileSystemReader(root / "dcp").read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size) for key, entry in tensors.items() if "weight" in key}
    dcp.load(state, checkpoint_id=root / "dcp", no_dist=True)
    (root / "out").mkdir()
    save_file(state, root / "out" / "model.safetensors", {"format": "pt"})


def import_ours(root: Path) -> None:
    import_safetensors(root / "hf", root / "out")


def import_library(root: Path) -> None:
    state = load_file(root / "hf" / "model.safetensors")
    dcp.save(state, checkpoint_id=root / "out", no_dist=True)


CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "headers": (headers_ours, headers_library),
    "whole tensors": (whole_ours, whole_library),
    "half of the columns": (columns_ours, columns_library),
    "export": (export_ours, export_library),
    "import": (import_ours, import_library),
}


def measured(work: Callable[[Path], None], root: Path) -> tuple[float, int]:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    memory = PeakMemory()
    started = time.perf_counter()
    work(root)
    return time.perf_counter() - started, memory.growth_bytes()


def write_files(root: Path, nbytes: int, headers: int) -> None:
    rows = max(nbytes // TENSORS // 4 // 1024, 4)
    state = {f"layers.{n}.weight": torch.full((rows, 1024), float(n)) for n in range(TENSORS)}
    (root / "hf").mkdir()
    save_file(state, root / "hf" / "model.safetensors")
    dcp.save(state, checkpoint_id=root / "dcp", no_dist=True)
    (root / "headers").mkdir()
    for file in range(FILES):
        names = [f"model.layers.{file}.mlp.experts.{n}.weight" for n in range(headers // FILES)]
        save_file({name: torch.ones(1) for name in names}, root / "headers" / f"{file}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nbytes", type=int, default=1 << 30)
    parser.add_argument("--headers", type=int, default=64_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true", help="16 MiB, 160 headers, one round")
    options = parser.parse_args()
    if options.tiny:
        options.nbytes, options.headers, options.rounds = 16 << 20, 160, 1
    start = time.perf_counter()
    cases: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        root = Path(temporary)
        in_child(write_files, root, options.nbytes, options.headers)
        for name, sides in CASES.items():
            runs: list[list[tuple[float, int]]] = [[], []]
            for _ in range(options.rounds):
                for side, work in enumerate(sides):
                    runs[side].append(in_child(measured, work, root))
                    shutil.rmtree(root / "out", ignore_errors=True)
            found: dict[str, Any] = {
                side: {
                    "seconds": statistics.median(seconds for seconds, _ in of),
                    "peak_bytes": statistics.median(peak for _, peak in of),
                }
                for side, of in zip(("ours", "library"), runs, strict=True)
            }
            ratios = [ours[0] / library[0] for ours, library in zip(*runs, strict=True)]
            found["ratio"] = statistics.median(ratios)
            cases[name] = found
            row = [three(found[side]["seconds"]) for side in ("ours", "library")]
            row += [three(found[side]["peak_bytes"] / 2**20) for side in ("ours", "library")]
            rows.append([name, *row, three(found["ratio"])])
    head = ["", "ours s", "library s", "ours MiB", "library MiB", "ours/library"]
    show(f"{options.nbytes / 2**20:.0f} MiB; {options.rounds} rounds", head, rows)
    write_measured(options, start, cases=cases)


if __name__ == "__main__":
    main()
