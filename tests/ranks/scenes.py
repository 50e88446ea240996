"""What the programs of ranks share: scenarios by name, what each rank saw of them, and the end."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from dcp_placements import PlacementError

TORCH_SAYS = (
    "torch.distributed is disabled",
    "Detected an existing checkpoint",
    "TypedStorage is deprecated",  # the writer of torch 2.10
)

Facts = dict[str, Any]


class Scenarios(dict[str, Callable[[Any], Facts]]):
    """The scenarios of a program, by name."""

    def add(self, function: Callable[[Any], Facts]) -> Callable[[Any], Facts]:
        """Register a scenario under its name."""
        self[function.__name__] = function
        return function

    def run(self, names: list[str], out: Path, where: Callable[[str], Any]) -> NoReturn:
        """Run the scenarios of these names, or all; write ``OUT/<rank>.json`` and end.

        An error that a scenario does not expect is part of what the rank saw.
        """
        outcomes: dict[str, Facts] = {}
        for name in names or self:
            started = time.monotonic()
            outcome: Facts = {}
            with heard() as texts:
                try:
                    outcome = self[name](where(name))
                except (Exception, dcp.CheckpointException) as raised:
                    outcome = {"failed": errors_of(raised), "traceback": traceback.format_exc()}
            seconds = round(time.monotonic() - started, 2)
            outcomes[name] = {"warnings": texts, "seconds": seconds} | outcome
            (out / f"{dist.get_rank()}.json").write_text(json.dumps(outcomes, indent=1))
            dist.barrier()
        dist.barrier()
        leave()


def leave() -> NoReturn:
    """End this process, its process group first, with exit code 0.

    Now and then a gloo thread of torch aborts a process whose program is done: what would run at
    exit is left out.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def arange(*shape: int, start: int = 0) -> torch.Tensor:
    numel = int(torch.Size(shape).numel())
    return torch.arange(start, start + numel).reshape(shape).float()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    copies = [t.detach().clone(memory_format=torch.contiguous_format) for t in (one, other)]
    raw = [copy.reshape(-1).view(torch.uint8) for copy in copies]
    return torch.equal(*raw)


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def stock_whole(path: Path) -> dict[str, Any]:
    """Return all tensors of a checkpoint as torch's default planner reads them in one process."""
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    whole = {
        name: torch.full(tuple(entry.size), 77, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if hasattr(entry, "size")
    }
    dcp.load(whole, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    return whole


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return the names whose tensors differ in any bit, and those that one side lacks."""
    names = sorted(found.keys() ^ wanted.keys())
    return names + [
        n for n in sorted(found.keys() & wanted.keys()) if not same(found[n], wanted[n])
    ]


def files(path: Path) -> list[str]:
    dist.barrier()
    found = sorted(file.name for file in path.rglob("*") if file.is_file())
    dist.barrier()
    return found


def errors_of(raised: BaseException) -> dict[str, str]:
    """Return the text of every failing rank; what is no refusal starts with its type."""
    if isinstance(raised, dcp.CheckpointException):
        found = {str(rank): error for rank, (error, _) in raised.failures.items()}
    else:
        found = {str(dist.get_rank()): raised}
    return {
        rank: str(error)
        if isinstance(error, PlacementError)
        else f"{type(error).__name__}: {error}"
        for rank, error in found.items()
    }


def refusal(act: Callable[[], Any]) -> dict[str, str]:
    """Return the texts with which ``act`` is refused, by rank; nothing when it is not."""
    try:
        act()
    except (dcp.CheckpointException, PlacementError) as raised:
        return errors_of(raised)
    return {}


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what the user is warned of; torch's notices are left out."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    for warning in caught:
        text = str(warning.message)
        if warning.category is UserWarning and not text.startswith(TORCH_SAYS):
            texts.append(text)
