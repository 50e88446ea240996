"""Load time from a URL with several threads against one, with latency in every request.

The checkpoint is in this process (``memory://``): the network costs the latency, and nothing else.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from bench_common import show, three, write_measured
from fsspec.implementations.memory import MemoryFileSystem

from dcp_placements import PlacementFileSystemReader, PlacementFileSystemWriter

URL = "memory://latency"


def delay(name: str, seconds: float) -> None:
    """Make requests of one kind slower."""
    real = getattr(MemoryFileSystem, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **kwargs)

    setattr(MemoryFileSystem, name, late)


def measure(saved: dict[str, torch.Tensor], threads: int, repeats: int) -> dict[str, Any]:
    """Return what a load costs, the fastest of several."""
    taken = []
    for _ in range(repeats):
        read = {key: torch.zeros_like(value) for key, value in saved.items()}
        reader = PlacementFileSystemReader(URL, thread_count=threads)
        start = time.perf_counter()
        dcp.load(read, storage_reader=reader, no_dist=True)
        taken.append(time.perf_counter() - start)
        assert all(torch.equal(saved[key], read[key]) for key in saved)
    return {"threads": threads, "load_s": min(taken), "opens": reader.opens, "reads": reader.reads}


def main() -> None:
    """Save once, load with each number of threads, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--elements", type=int, default=500_000, help="float32, in each file")
    parser.add_argument("--latency-ms", type=float, default=20, help="of each request")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="4 small files, once")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    args = parser.parse_args()
    if args.tiny:
        args.files, args.elements, args.repeats = 4, 1000, 1
    begun = time.perf_counter()
    warnings.simplefilter("ignore")
    saved = {f"w{n}": torch.arange(float(args.elements)) for n in range(args.files)}
    writer = PlacementFileSystemWriter(URL, single_file_per_rank=False)
    dcp.save(saved, storage_writer=writer, no_dist=True)
    for name in ("info", "cat_file"):
        delay(name, args.latency_ms / 1000)
    loads = [measure(saved, threads, args.repeats) for threads in args.threads]
    for load in loads:
        load["speedup"] = loads[0]["load_s"] / load["load_s"]
    show(
        f"Loads of {args.files} files of {args.elements * 4 / 1e6:.3g} MB, "
        f"{args.latency_ms:g} ms per request",
        ["threads", "seconds", f"against {loads[0]['threads']}", "files", "reads"],
        [
            [
                str(load["threads"]),
                three(load["load_s"]),
                f"{load['speedup']:.1f}x",
                str(load["opens"]),
                str(load["reads"]),
            ]
            for load in loads
        ],
    )
    write_measured(args, begun, loads=loads)


if __name__ == "__main__":
    main()
