"""The files of a Megatron-LM run: their names, which rank writes which, and what is in them.

Names, writers and rank order follow Megatron-LM's ``training/checkpointing.py`` and
``core/parallel_state.py``.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from dcp_placements.errors import CannotLook, format_names
from dcp_placements.formats.megatron.torch_files import UnreadableFile, load_torch_file
from dcp_placements.offline.directory import Directory

WEIGHTS = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
DISTRIBUTED = "distrib_optim.pt"

EMBEDDING = "embedding.word_embeddings.weight"

_RANK_DIRECTORY = re.compile(r"mp_rank_(\d{2,})((?:_\d{3,})*)")
_CHUNK = re.compile(r"model\d*")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of a run; None where they are not known.

    Attributes:
        tp: Tensor-parallel.
        pp: Pipeline-parallel.
        ep: Expert-parallel.
        etp: Tensor-parallel, of the experts.
        cp: Context-parallel.
    """

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    cp: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """Where the rank that wrote a file stands along each axis."""

    tp: int
    pp: int = 0
    ep: int = 0
    etp: int = 0


@dataclass(frozen=True, slots=True)
class Contents:
    """What the insides of the files tell, by rank directory.

    Attributes:
        args: The run's arguments.
        keys: Of the weights.
        iterations: When it was written.
        optimizers: Directories whose file has optimizer state.
        distributed: Those with a file of a distributed optimizer.
        unreadable: Why a file cannot be read.
    """

    args: dict[str, argparse.Namespace] = field(default_factory=dict)
    keys: dict[str, frozenset[str]] = field(default_factory=dict)
    iterations: dict[str, int] = field(default_factory=dict)
    optimizers: set[str] = field(default_factory=set)
    distributed: set[str] = field(default_factory=set)
    unreadable: dict[str, str] = field(default_factory=dict)


ARGUMENTS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
}
"""What the run's arguments call each size."""


def find_iteration(given: str | os.PathLike[str]) -> Path:
    """Return the directory of the iteration that a Megatron run would load from ``given``.

    Raises:
        CannotLook: There is none, or several and no tracker file to choose by.
    """
    path = Directory(given).local("")
    if path is None:
        raise CannotLook(
            f"{given}: Megatron's files are mapped into memory\n"
            "    way out:     copy them to a disk of this machine"
        )
    tracker = path / TRACKER
    found = sorted(
        entry.name
        for entry in path.iterdir()
        if entry.is_dir() and re.fullmatch(r"iter_\d{7,}|release", entry.name)
    )
    if tracker.is_file():
        told = tracker.read_text(errors="replace").strip()
        name = f"iter_{int(told):07d}" if told.isdecimal() else told
        if name not in found:
            raise CannotLook(
                f"{path}: {TRACKER} says {told!r}, but there is no {name}\n"
                f"    found:       {format_names(found) or 'no iteration'}\n"
                "    way out:     give the directory of one iteration"
            )
        return path / name
    if len(found) > 1:
        raise CannotLook(
            f"{path}: several iterations, and no {TRACKER} to choose by\n"
            f"    found:       {format_names(found)}\n"
            "    way out:     give the directory of one iteration"
        )
    return path / found[0] if found else path


def writers(sizes: Sizes, *, early: bool = False) -> list[Coordinate]:
    """Return who writes the files of a run, in rank order, a file once.

    Ranks count in the order ``tp-cp-ep-dp-pp``, the experts' in ``etp-ep-dp-pp``. Those write that
    are first of their data-parallel or of their expert-data-parallel group; the set is no grid
    where the experts' tensor-parallel size is another one.

    Args:
        sizes: All but ``cp`` and ``etp`` are to be known.
        early: As Megatron-Core 0.12 to 0.18 wrote: the first of expert-data-parallel groups alone.
    """
    tp, pp, ep = sizes.tp or 1, sizes.pp or 1, sizes.ep or 1
    etp = sizes.etp or tp
    ranks = etp * ep if early else max(tp * (sizes.cp or 1), etp * ep)
    found: dict[tuple[int, int, int], Coordinate] = {}
    for stage in range(pp):
        for rank in range(ranks):
            at = Coordinate(rank % tp, stage, rank // etp % ep, rank % etp)
            found.setdefault((at.tp, at.pp, at.ep), at)
    return list(found.values())


def rank_fields(name: str) -> tuple[int, ...] | None:
    """Return the numbers in the name of a rank's directory; None for another name."""
    found = _RANK_DIRECTORY.fullmatch(name)
    if found is None:
        return None
    fields = tuple(map(int, [found[1], *found[2].split("_")[1:]]))
    return fields if len(fields) <= 3 else None


def directory_name(at: Coordinate, sizes: Sizes) -> str:
    """Return the name of the directory that the rank at a coordinate writes to."""
    name = f"mp_rank_{at.tp:02d}"
    name += f"_{at.pp:03d}" if (sizes.pp or 1) > 1 else ""
    return name + (f"_{at.ep:03d}" if (sizes.ep or 1) > 1 else "")


class RankFiles:
    """The files of the rank directories, mapped when asked for; the last few stay so for a while.

    What has been read of a mapped file counts as this process's memory until it is let go.

    Args:
        folder: The iteration's directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = lru_cache(_STAY_OPEN)(lambda name: load_torch_file(folder / name / WEIGHTS))
        self._nbytes = 0

    def open(self, name: str, nbytes: int = 0) -> Mapping[str, Any]:
        """Return what the file of a rank directory holds.

        Args:
            name: The directory.
            nbytes: How much of it is going to be read.

        Raises:
            CannotLook: It cannot be read, or is refused.
        """
        self._nbytes += nbytes
        if self._nbytes > _STAY_NBYTES:
            self._open.cache_clear()
            self._nbytes = nbytes
        held: Mapping[str, Any] = self._open(name)
        return held


_STAY_OPEN = 4
_STAY_NBYTES = 256 << 20


def look_inside(folder: Path, ranks: Iterable[str]) -> Contents:
    """Return what the files of the rank directories hold; tensors are not read.

    Raises:
        RefusedFile: One asks for more than tensors, plain values and the classes of a training run.
    """
    found = Contents()
    for name in ranks:
        if (folder / name / DISTRIBUTED).is_file():
            found.distributed.add(name)
        file = folder / name / WEIGHTS
        if not file.is_file():
            found.unreadable[name] = "incomplete: there is no such file"
            continue
        try:
            held = load_torch_file(file)
        except UnreadableFile as error:
            found.unreadable[name] = f"incomplete: {error.reason}"
            continue
        if not isinstance(held, dict):
            found.unreadable[name] = f"holds a {type(held).__name__}, not a dict"
            continue
        if isinstance(held.get("args"), argparse.Namespace):
            found.args[name] = held["args"]
        if isinstance(held.get("iteration"), int):
            found.iterations[name] = held["iteration"]
        if "optimizer" in held:
            found.optimizers.add(name)
        found.keys[name] = frozenset(str(key) for _, chunk in model_chunks(held) for key in chunk)
    return found


def model_chunks(held: Mapping[Any, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return ``(number, weights)`` of a file's model chunks: ``model``, or ``model0`` and up."""
    found = []
    for name, value in held.items():
        number = chunk_number(name, value)
        if number is not None:
            found.append((number, value))
    return sorted(found, key=lambda chunk: chunk[0])


def chunk_number(name: Any, value: Any) -> int | None:
    """Return which model chunk an entry of a file is; None for what is none."""
    if isinstance(value, dict) and isinstance(name, str) and _CHUNK.fullmatch(name):
        return int(name.removeprefix("model") or 0)
    return None


def format_sizes(sizes: Sizes) -> str:
    """Return the sizes that are known as text: ``TP 2 PP 1 EP 4``."""
    told = [
        f"{axis.upper()} {size}" for axis in ARGUMENTS if (size := getattr(sizes, axis)) is not None
    ]
    return " ".join(told)
