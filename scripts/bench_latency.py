"""Load time from a URL with 1 and more threads, with latency in every request."""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
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


def main() -> None:
    """Save once, load with each number of threads, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--elements", type=int, default=500_000, help="float32, in each file")
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    saved = {f"w{n}": torch.arange(float(options.elements)) for n in range(options.files)}
    writer = PlacementFileSystemWriter(URL, single_file_per_rank=False)
    dcp.save(saved, storage_writer=writer, no_dist=True)
    for name in ("info", "cat_file"):
        delay(name, options.latency_ms / 1000)
    print("threads  seconds  files")
    for threads in options.threads:
        taken = []
        for _ in range(options.repeats):
            read = {key: torch.zeros_like(value) for key, value in saved.items()}
            reader = PlacementFileSystemReader(URL, thread_count=threads)
            start = time.perf_counter()
            dcp.load(read, storage_reader=reader, no_dist=True)
            taken.append(time.perf_counter() - start)
            assert all(torch.equal(saved[key], read[key]) for key in saved)
        print(f"{threads:7}  {min(taken):7.2f}  {reader.opens:5}")


if __name__ == "__main__":
    main()
