"""The files of a Megatron-LM run: their names, which rank writes which, and what is in them.

Names, writers and rank order follow Megatron-LM's ``training/checkpointing.py`` and
``core/parallel_state.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_placements.convert.rank_files import local_directory
from dcp_placements.convert.torch_files import UnreadableFile, load_torch_file
from dcp_placements.errors import CannotLook, format_names

WEIGHTS = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
TRACKER_LENGTH = 100
"""The characters of it that are read."""

DISTRIBUTED = "distrib_optim.pt"

EMBEDDING = "embedding.word_embeddings.weight"

MOST_WRITERS = 1 << 16
"""More ranks than any run has that write files of their own."""

_RANK_DIRECTORY = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_CHUNK = re.compile(r"model(\d*)")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of a run."""

    tp: int = 1  # tensor-parallel
    pp: int = 1  # pipeline-parallel
    ep: int = 1  # expert-parallel
    etp: int | None = None  # tensor-parallel size of the experts; None if unknown
    cp: int | None = None  # context-parallel; None if unknown

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in ARGUMENTS}
        return " ".join(f"{axis.upper()} {size}" for axis, size in sizes.items() if size)


ARGUMENTS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
}
"""The run's argument for each size."""


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """The position along each axis of the rank that wrote a file."""

    tp: int
    pp: int = 0
    ep: int = 0
    etp: int = 0


@dataclass(frozen=True, slots=True)
class RankFile:
    """A rank's directory and what its file contains, without the tensors."""

    directory: str  # its name
    fields: tuple[int, ...]  # the numbers in the name
    problem: str = ""  # why the file cannot be used; empty if it can
    args: argparse.Namespace | None = None  # the run's arguments
    keys: frozenset[str] = frozenset()  # names of the weights
    iteration: int | None = None  # when the file was written
    # Name, CRC-32 and size of everything in the zip file; empty if it is none
    checksums: tuple[tuple[str, int, int], ...] = ()


def find_iteration(given: str | os.PathLike[str]) -> Path:
    """Return the directory of the iteration that a Megatron run would load from ``given``.

    Raises:
        CannotLook: There is none, or several and no tracker file to choose by.
    """
    path = local_directory(given)
    tracker = path / TRACKER
    iterations = sorted(
        entry.name
        for entry in path.iterdir()
        if entry.is_dir() and re.fullmatch(r"iter_\d{7,}|release", entry.name)
    )
    if tracker.is_file():
        with tracker.open(errors="replace") as stream:
            latest = stream.read(TRACKER_LENGTH).strip()
        name = f"iter_{int(latest):07d}" if latest.isdecimal() else latest
        if name in iterations:
            return path / name
        problem = f"{TRACKER} says {latest!r}, but there is no {name}"
    elif len(iterations) > 1:
        problem = f"several iterations, and no {TRACKER} to choose by"
    else:
        return path / iterations[0] if iterations else path
    raise CannotLook(
        f"{path}: {problem}\n"
        f"    found:       {format_names(iterations) or 'no iteration'}\n"
        "    way out:     give the directory of one iteration"
    )


def writers(sizes: Sizes, *, early: bool = False) -> dict[str, Coordinate]:
    """Return the directories that a run writes, in rank order, and which rank writes each.

    Ranks count in the order ``tp-cp-ep-dp-pp``, those of experts in ``etp-ep-dp-pp``. The first
    rank of each data-parallel and of each expert-data-parallel group writes. The directories are
    not a grid where the experts have a tensor-parallel size of their own.

    Args:
        sizes: Of the run; ``etp`` defaults to ``tp`` and ``cp`` to 1.
        early: As Megatron-Core 0.12 to 0.18: only the first of each expert-data-parallel group.

    Raises:
        CannotLook: They are more than any run has.
    """
    etp = sizes.etp or sizes.tp
    ranks = etp * sizes.ep if early else max(sizes.tp * (sizes.cp or 1), etp * sizes.ep)
    check_writers(ranks * sizes.pp)
    by_directory: dict[str, Coordinate] = {}
    for stage in range(sizes.pp):
        for rank in range(ranks):
            at = Coordinate(rank % sizes.tp, stage, rank // etp % sizes.ep, rank % etp)
            name = f"mp_rank_{at.tp:02d}"
            name += f"_{at.pp:03d}" if sizes.pp > 1 else ""
            name += f"_{at.ep:03d}" if sizes.ep > 1 else ""
            by_directory.setdefault(name, at)
    return by_directory


def check_writers(count: int) -> None:
    """Refuse more ranks than can be listed one by one; a name or an argument may be any number.

    Raises:
        CannotLook: There are more.
    """
    if count > MOST_WRITERS:
        raise CannotLook(
            "names of directories, or args inside the files, say that more ranks wrote files than "
            f"any run has ({MOST_WRITERS:,})\n"
            "    likely:      the files are damaged, or are not from where they seem"
        )


def rank_fields(name: str) -> tuple[int, ...] | None:
    """Return the numbers in the name of a rank's directory; None for another name."""
    match = _RANK_DIRECTORY.fullmatch(name)
    return None if match is None else tuple(int(number) for number in match.groups() if number)


def scan_rank_file(folder: Path, name: str, fields: tuple[int, ...]) -> RankFile:
    """Return what the file of a rank directory contains; tensors are not read.

    Raises:
        RefusedFile: It needs more than tensors, plain values and the classes of a training run.
    """
    file = folder / name / WEIGHTS
    if not file.is_file():
        return RankFile(name, fields, problem="incomplete: there is no such file")
    try:
        contents = load_torch_file(file)
    except UnreadableFile as error:
        return RankFile(name, fields, problem=f"incomplete: {error.reason}")
    if not isinstance(contents, dict):
        problem = f"holds a {type(contents).__name__}, not a dict"
        return RankFile(name, fields, problem=problem)
    args, iteration = contents.get("args"), contents.get("iteration")
    return RankFile(
        name,
        fields,
        args=args if isinstance(args, argparse.Namespace) else None,
        keys=frozenset(str(key) for _, chunk in model_chunks(contents) for key in chunk),
        iteration=iteration if isinstance(iteration, int) else None,
        checksums=_checksums(file),
    )


def _checksums(file: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, CRC-32 and size of everything in a zip file, by its directory alone."""
    try:
        with zipfile.ZipFile(file) as zipped:
            return tuple((one.filename, one.CRC, one.file_size) for one in zipped.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return ()  # torch reads older files, too


def model_chunks(contents: Mapping[Any, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return ``(number, weights)`` of a file's model chunks: ``model``, or ``model0`` and up."""
    numbers = {name: chunk_number(name, value) for name, value in contents.items()}
    chunks = [(at, contents[name]) for name, at in numbers.items() if at is not None]
    return sorted(chunks, key=lambda chunk: chunk[0])


def chunk_number(name: Any, value: Any) -> int | None:
    """Return the number of the model chunk that an entry of a file is; None for another entry."""
    if isinstance(value, dict) and isinstance(name, str) and (match := _CHUNK.fullmatch(name)):
        return int(match[1] or 0)
    return None
