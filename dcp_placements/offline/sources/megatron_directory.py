"""The layout of a Megatron-LM checkpoint directory: which ranks wrote files, and which are missing.

A legacy file is in ``mp_rank_TT``, followed by the pipeline coordinate if there are several stages
and by the expert coordinate if experts are spread over ranks. So the second of two numbers in a
name may be either, and the name does not say which. These decide, in this order: the run's
arguments inside the files; a set of files that is not a grid; which weights are in which file; the
expert-parallel size that the caller gives.

The layout is how a loader addresses ranks, not how many numbers the names have. With expert
parallelism that is (tp, pp, ep), also where a name omits the only pipeline stage: ``3D``, for an
EP-aware loader. ``1D`` and ``2D`` are without expert parallelism.

Names, writers and rank order follow Megatron-LM's ``training/checkpointing.py`` and
``core/parallel_state.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dcp_placements.errors import CannotLook
from dcp_placements.offline.directory import existing_directory
from dcp_placements.offline.sources.mapped_files import UnreadableFile, load_torch_file
from dcp_placements.offline.sources.rank_tensors import local_directory
from dcp_placements.offline.texts import Progress
from dcp_placements.short_text import format_name, format_names
from dcp_placements.storage.safe_pickle import Stub
from dcp_placements.storage.store import Store

WEIGHTS = "model_optim_rng.pt"
EMBEDDING = "embedding.word_embeddings.weight"

_TRACKER = "latest_checkpointed_iteration.txt"
_RANK_DIRECTORY = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_CHUNK = re.compile(r"model(\d*)")

_ARGUMENTS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
}
"""The run's argument for each size."""

_OPTIONS = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "ep": "--expert-parallel-size",
}

_FIELDS = {"tp": "mp_rank_TT", "pp": "PPP", "ep": "EEE", None: "XXX"}

_MOST_WRITERS = 1 << 16
"""More ranks than any run has that write files of their own."""

Axes = tuple[str | None, ...]
"""The axis of each number in the directories' names; None if it is not known."""

_AXES: dict[int, Axes] = {1: ("tp",), 2: ("tp", None), 3: ("tp", "pp", "ep")}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of a run."""

    tp: int = 1  # tensor-parallel
    pp: int = 1  # pipeline-parallel
    ep: int = 1  # expert-parallel
    etp: int | None = None  # tensor-parallel size of the experts; None if unknown
    cp: int | None = None  # context-parallel; None if unknown

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in _ARGUMENTS}
        return " ".join(f"{axis.upper()} {size}" for axis, size in sizes.items() if size)


class Coordinate(NamedTuple):
    """The position along each axis of the rank that wrote a file."""

    tp: int
    pp: int
    ep: int
    etp: int


@dataclass(frozen=True)
class RankFile:
    """A rank's directory and its file, whose tensors are mapped."""

    directory: str  # its name
    numbers: tuple[int, ...]  # numbers in the name
    contents: Mapping[Any, Any] = field(default_factory=dict, repr=False)
    problem: str = ""  # why the file cannot be used; empty if it can
    # Name, CRC-32 and size of everything in the zip file; empty if it is none
    checksums: tuple[tuple[str, int, int], ...] = ()

    @property
    def args(self) -> argparse.Namespace:
        """The run's arguments; without any where the file holds none."""
        args, named = self.contents.get("args"), argparse.Namespace()
        if isinstance(args, Stub) and args.by == "argparse.Namespace":
            vars(named).update(args.fields)
        return named

    @cached_property
    def chunks(self) -> dict[int, dict[str, Any]]:
        """The weights of its model chunks by number: ``model``, or ``model0`` and up."""
        numbers = {name: chunk_number(name, value) for name, value in self.contents.items()}
        return {n: self.contents[name] for name, n in numbers.items() if n is not None}

    @cached_property
    def keys(self) -> frozenset[str]:
        """Names of the weights."""
        return frozenset(str(key) for chunk in self.chunks.values() for key in chunk)


def chunk_number(name: Any, value: Any) -> int | None:
    """Return the number of the model chunk that an entry of a file is; None for another entry."""
    if isinstance(value, dict) and isinstance(name, str) and (match := _CHUNK.fullmatch(name)):
        return int(match[1] or 0)
    return None


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """The layout of a Megatron checkpoint directory."""

    path: Path = field(repr=False)  # the directory of the iteration
    # How ranks are addressed: ``"1D"`` (tp), ``"2D"`` (tp, pp), ``"3D"`` (tp, pp, ep: wherever
    # there is expert parallelism), or ``"ambiguous"``
    layout: str
    fields: int  # count of numbers in a name, 1 to 3; an axis of size 1 may have none
    # ``"pp"`` or ``"ep"`` if a name has two fields and it is known; else None
    second_field: str | None = field(repr=False)
    reason: str  # evidence for the layout, or what would settle it
    pattern: str  # the path of a rank's file, below ``path``'s parent, for the given sizes
    loader: str | None  # ``"non-EP"`` or ``"EP-aware"``; None if ambiguous
    # Parallel sizes of the run; without meaning if ambiguous
    sizes: Sizes = field(repr=False)
    mismatches: tuple[str, ...]  # contradictions and missing files
    files: tuple[str, ...]  # the files present, below ``path``
    ranks: tuple[RankFile, ...] = field(repr=False)
    # The position of each directory's writer; empty if ambiguous
    coordinates: Mapping[str, Coordinate] = field(default_factory=dict, repr=False)

    @property
    def fits(self) -> bool:
        """Whether nothing is missing, contradictory or ambiguous."""
        return not self.mismatches and self.layout != "ambiguous"

    def __str__(self) -> str:
        lines = [
            f"{self.path}: mp_rank_* files",
            f"    layout:    {self.layout}",
            f"    fields:    {self.fields}",
            f"    reason:    {self.reason}",
            f"    pattern:   {self.pattern}",
            f"    loader:    {self.loader or 'unknown'}",
            f"    files:     {len(self.files)}: {format_names(self.files, 4)}",
        ]
        lines += [f"    mismatch:  {line}" for line in self.mismatches]
        return "\n".join(map(format_name, lines))


def megatron_layout(
    path: str | os.PathLike[str],
    *,
    expert_parallel_size: int | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    expert_tensor_parallel_size: int | None = None,
    progress: Progress = lambda done, total: None,
) -> MegatronLayout:
    """Return the layout of a Megatron checkpoint directory, checked against the sizes of a run.

    The expert-parallel size decides, never the pipeline-parallel size: if it is given, names must
    have an expert coordinate; if only others are given, they must have none. Without any of them,
    the files decide.

    Args:
        path: The directory of one iteration, or the one that contains them all.
        expert_parallel_size: Size in the run that is to load it.
        tensor_parallel_size: Size in the run that is to load it.
        pipeline_parallel_size: Size in the run that is to load it.
        expert_tensor_parallel_size: Size in the run that wrote it, if the files do not say it.
        progress: Called with the number of files read, and of all.

    Raises:
        CannotLook: There are no ``mp_rank_*`` files, but a DCP checkpoint (``torch_dist``) or
            others; or a file needs more than tensors, plain values and the classes of a training
            run. Then nothing in it is executed.
    """
    directory = find_iteration(path)
    folder = local_directory(directory)
    asked = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "ep": expert_parallel_size}
    given = {axis: size for axis, size in asked.items() if size is not None}
    ranks = []
    directories = rank_directories(directory)
    for name, numbers in directories.items():
        ranks.append(_read(directory, name, numbers))
        progress(len(ranks), len(directories))
    count = max(len(rank.numbers) for rank in ranks)
    named = [rank for rank in ranks if len(rank.numbers) == count]
    stored, mismatches = _stored_sizes(ranks)
    axes, reason = _resolve_axes(named, stored, given)
    sizes, etp = stored or _named_sizes(named, axes), expert_tensor_parallel_size
    sizes = replace(sizes, etp=sizes.etp or etp)
    has_experts = "ep" in axes or sizes.ep > 1
    layout = "3D" if has_experts else "ambiguous" if None in axes else f"{count}D"
    if has_experts and count < 3:
        omitted = ", and names leave out a pipeline of one stage" if "ep" in axes else ""
        reason += (
            f"; 3D, though names have {count} field{'s' * (count > 1)}: with EP, ranks are "
            f"addressed by (tp, pp, ep){omitted}"
        )
    coordinates: dict[str, Coordinate] = {}
    mismatches = [*_file_mismatches(ranks), *mismatches]
    if layout != "ambiguous" and len(named) == len(ranks):
        expected = _writers(sizes)
        present = {rank.directory for rank in ranks}
        mismatches += _set_mismatches(present, sizes)
        coordinates = {name: expected[name] for name in expected if name in present}
        mismatches += _rank_mismatches(ranks, sizes, coordinates)
    mismatches += _given_mismatches(given, sizes, axes)
    if etp not in (None, sizes.etp):
        mismatches.append(f"--expert-tensor-parallel-size {etp}, but on disk {sizes.etp}")
    is_expert_loader = given["ep"] > 1 if "ep" in given else has_experts
    return MegatronLayout(
        path=folder,
        layout=layout,
        fields=count,
        second_field=axes[1] if count == 2 else None,
        reason=reason,
        pattern=f"{folder.name}/{_asked_form(given, axes)}/{WEIGHTS}",
        loader=None if layout == "ambiguous" else "EP-aware" if is_expert_loader else "non-EP",
        sizes=sizes,
        mismatches=tuple(mismatches),
        files=tuple(file for name in directories for file in files_of(directory, name)),
        ranks=tuple(ranks),
        coordinates=coordinates,
    )


def find_iteration(given: str | os.PathLike[str]) -> Store:
    """Return the directory of the iteration that a Megatron run would load from ``given``.

    Raises:
        CannotLook: There is none, or several and no tracker file to choose by; or it is a link out
            of ``given``.
        OSError: The tracker file cannot be opened.
    """
    directory = existing_directory(given)
    path = local_directory(directory)
    iterations = [
        name
        for name in directory.names()
        if re.fullmatch(r"iter_\d{7,}|release", name) and (path / name).is_dir()
    ]
    if directory.entry(_TRACKER) is not None:
        with directory.open(_TRACKER) as stream:
            latest = stream.read(100).decode(errors="replace").strip()
        name = f"iter_{int(latest):07d}" if latest.isdecimal() else latest
        if name in iterations:
            return _iteration(directory, name)
        problem = f"{_TRACKER} says {latest!r}, but there is no {name}"
    elif len(iterations) > 1:
        problem = f"several iterations, and no {_TRACKER} to choose by"
    else:
        return _iteration(directory, iterations[0]) if iterations else directory
    raise CannotLook(
        f"{path}: {problem}\n"
        f"    found:       {format_names(iterations) or 'no iteration'}\n"
        "    way out:     give the directory of one iteration"
    )


def _iteration(directory: Store, name: str) -> Store:
    """Return the directory of an iteration.

    Raises:
        CannotLook: It is a link out of the directory of all.
    """
    why = directory.why_barred(name)
    if why is not None:
        raise CannotLook(f"{directory.path}/{name}: {why}")
    return existing_directory(local_directory(directory) / name)


def files_of(directory: Store, name: str) -> list[str]:
    """Return the files in the directory of a rank; none where it is a file, or a link out."""
    entry = directory.entry(name)
    if entry is None or entry.nbytes is not None or directory.why_barred(name) is not None:
        return []
    return [f"{name}/{file}" for file in sorted(os.listdir(local_directory(directory) / name))]


def rank_directories(directory: Store) -> dict[str, tuple[int, ...]]:
    """Return the directories of ranks with the numbers in their names.

    Raises:
        CannotLook: There are none.
    """
    folder, names = directory.path, directory.names()
    matches = {name: match for name in names if (match := _RANK_DIRECTORY.fullmatch(name))}
    if matches:
        return {
            n: tuple(int(number) for number in m.groups() if number) for n, m in matches.items()
        }
    if ".metadata" in names:
        raise CannotLook(
            f"{folder}: this is a DCP checkpoint (torch_dist, torch_dcp or fsdp_dtensor), of whole "
            "tensors for any layout\n"
            "    way out:     inspect and verify read it; load it as it is, with "
            "rename=Stack('decoder.layers.{}', total=layers) where all layers are one tensor"
        )
    raise CannotLook(
        f"{folder}: no Megatron checkpoint in it\n"
        f"    found:       {format_names(names, 6) or 'nothing'}\n"
        "    way out:     give a directory with mp_rank_* directories"
    )


def _read(directory: Store, name: str, numbers: tuple[int, ...]) -> RankFile:
    """Return a rank's file; tensors are not read.

    Raises:
        RefusedFile: It needs more than tensors, plain values and the classes of a training run.
    """
    file = f"{name}/{WEIGHTS}"
    if directory.entry(file) is None:
        return RankFile(name, numbers, problem="incomplete: there is no such file")
    try:
        contents = load_torch_file(directory, file)
        if not isinstance(contents, dict):
            problem = f"holds a {type(contents).__name__}, not a dict"
            return RankFile(name, numbers, problem=problem)
        with directory.open(file) as stream, zipfile.ZipFile(stream) as zipped:
            checksums = tuple(
                (entry.filename, entry.CRC, entry.file_size) for entry in zipped.infolist()
            )
    except UnreadableFile as error:
        problem = str(error).splitlines()[0].replace(f"{directory.path}/{file}: ", "incomplete: ")
        return RankFile(name, numbers, problem=problem)
    return RankFile(name, numbers, contents, checksums=checksums)


def _writers(sizes: Sizes) -> dict[str, Coordinate]:
    """Return the directories that a run writes, in rank order, and which rank writes each.

    Ranks count in the order ``tp-cp-ep-dp-pp``, those of experts in ``etp-ep-dp-pp``. The first
    rank of each data-parallel and of each expert-data-parallel group writes. The directories are
    not a grid where the experts have a tensor-parallel size of their own, which is ``tp`` if it is
    unknown.

    Raises:
        CannotLook: They are more than any run has.
    """
    etp = sizes.etp or sizes.tp
    ranks = max(sizes.tp * (sizes.cp or 1), etp * sizes.ep)
    _check_count(ranks * sizes.pp)
    by_directory: dict[str, Coordinate] = {}
    for stage in range(sizes.pp):
        for rank in range(ranks):
            coordinate = Coordinate(rank % sizes.tp, stage, rank // etp % sizes.ep, rank % etp)
            name = f"mp_rank_{coordinate.tp:02d}"
            name += f"_{coordinate.pp:03d}" if sizes.pp > 1 else ""
            name += f"_{coordinate.ep:03d}" if sizes.ep > 1 else ""
            by_directory.setdefault(name, coordinate)
    return by_directory


def _check_count(count: int) -> None:
    """Refuse more ranks than can be listed one by one; a name or an argument may be any number."""
    if count > _MOST_WRITERS:
        raise CannotLook(
            "names of directories, or args inside the files, say that more ranks wrote files than "
            f"any run has ({_MOST_WRITERS:,})\n"
            "    likely:      the files are damaged, or are not from where they seem"
        )


# The axes of the numbers in names, and the sizes of the run


def _stored_sizes(ranks: Sequence[RankFile]) -> tuple[Sizes | None, list[str]]:
    """Return the sizes in the arguments inside the files, if any, and how the files differ."""
    stored: list[tuple[Sizes, str]] = []
    for rank in ranks:
        args = {axis: getattr(rank.args, argument, None) for axis, argument in _ARGUMENTS.items()}
        sizes = {axis: size for axis, size in args.items() if isinstance(size, int)}
        if "tp" in sizes and "pp" in sizes:
            # Megatron before expert parallelism has no argument for it.
            sizes = {"ep": 1, "etp": sizes["tp"], "cp": 1} | {a: s for a, s in sizes.items() if s}
            stored.append((Sizes(**sizes), rank.directory))
    differing = differences(stored)
    mismatch = [f"the args inside the files are of several runs: {differing}"] if differing else []
    return stored[0][0] if stored else None, mismatch


def _resolve_axes(
    ranks: Sequence[RankFile], stored: Sizes | None, given: Mapping[str, int]
) -> tuple[Axes, str]:
    """Return the axis of each number in the names, and how it is known."""
    count = len(ranks[0].numbers)
    wanted = 1 if stored is None or stored.ep == 1 else 3 if stored.pp > 1 else 2
    if wanted not in (1, count):
        return _AXES[count], (
            f"args inside the files say {stored}: names of such a run have {wanted} fields"
        )
    if count == 1:
        return _AXES[1], "TP only: names have no field beside the tensor coordinate"
    if count == 3:
        return _AXES[3], "TP+PP+EP: names have a pipeline and an expert coordinate"
    second, reason = _resolve_second(ranks, stored, given)
    return ("tp", second), f"TP+{second.upper()}: {reason}" if second else reason


def _resolve_second(
    ranks: Sequence[RankFile], stored: Sizes | None, given: Mapping[str, int]
) -> tuple[str | None, str]:
    """Return the axis of the second of two numbers, None if it is not known, and the reason."""
    if stored is not None and (stored.pp > 1) != (stored.ep > 1):
        return "ep" if stored.ep > 1 else "pp", f"args inside the files say {stored}"
    tp, others = _extents(ranks)
    etp = _expert_tensor_size(ranks)
    if etp is not None:
        return "ep", (
            f"the {len(ranks)} files are no grid of {tp} x {others}, but just those that experts "
            f"over {others} ranks with expert-tensor-parallel size {etp} make"
        )
    with_keys = [rank for rank in ranks if rank.keys]
    first = [EMBEDDING in rank.keys for rank in with_keys if rank.numbers[1] == 0]
    rest = [EMBEDDING in rank.keys for rank in with_keys if rank.numbers[1] > 0]
    if first and rest and all(first):
        if len({rank.keys for rank in with_keys}) == 1:
            return "ep", "every file has the same weights, the word embedding among them"
        if not all(rest):
            return "pp", "the word embedding is not in the files of all second fields"
    if "ep" in given:
        return "ep" if given["ep"] > 1 else "pp", f"by --expert-parallel-size {given['ep']}"
    if given:
        return "pp", (
            "sizes are given without --expert-parallel-size, and nothing in the files says "
            "otherwise"
        )
    return None, (
        "TP+PP or TP+EP: names of two fields are of either kind, and neither args nor weights in "
        "the files show which; --expert-parallel-size N (1 for none) settles it"
    )


def _extents(ranks: Sequence[RankFile]) -> list[int]:
    """Return how many values each number in the names has, from 0 up."""
    counts = [1 + max(numbers) for numbers in zip(*(rank.numbers for rank in ranks), strict=True)]
    _check_count(prod(counts))
    return counts


def _expert_tensor_size(ranks: Sequence[RankFile]) -> int | None:
    """Return the experts' tensor-parallel size that makes just these files, if they are no grid."""
    tp, *_, ep = _extents(ranks)
    present = {(rank.numbers[0], rank.numbers[-1]) for rank in ranks}
    for etp in range(1, tp if len(present) < tp * ep else 1):
        expected = _writers(Sizes(tp=tp, ep=ep, etp=etp)) if tp % etp == 0 else {}
        if present == {(coordinate.tp, coordinate.ep) for coordinate in expected.values()}:
            return etp
    return None


def _named_sizes(ranks: Sequence[RankFile], axes: Axes) -> Sizes:
    """Return the sizes that the names show."""
    counts = dict(zip(axes, _extents(ranks), strict=True))
    etp = _expert_tensor_size(ranks) if "ep" in axes else None
    return Sizes(counts["tp"], counts.get("pp", 1), counts.get("ep", 1), etp)


def _form(axes: Axes) -> str:
    return "_".join(_FIELDS[axis] for axis in axes)


def _asked_form(given: Mapping[str, int], axes: Axes) -> str:
    """Return the form of a directory's name for the given sizes, else the form on disk."""
    if given:
        has_pp = given["pp"] > 1 if "pp" in given else "pp" in axes
        axes = ("tp", *(["pp"] if has_pp else []), *(["ep"] if given.get("ep", 1) > 1 else []))
    return _form(axes)


# What is contradictory or missing


def _by(values: Iterable[tuple[T, str]]) -> dict[T, list[str]]:
    """Map each value to the names that have it."""
    by: dict[T, list[str]] = {}
    for value, name in values:
        by.setdefault(value, []).append(name)
    return by


def differences(values: Iterable[tuple[Any, str]]) -> str:
    """Return what files differ in: ``10 in mp_rank_00; 20 in mp_rank_01``; empty if in nothing."""
    by = _by(values)
    texts = [f"{value} in {format_names(names)}" for value, names in by.items()]
    return "; ".join(texts) if len(texts) > 1 else ""


def _file_mismatches(ranks: Sequence[RankFile]) -> Iterator[str]:
    """Yield files that are unreadable, or of different runs by their names or iterations."""
    forms = {len(rank.numbers) for rank in ranks}
    if len(forms) > 1:
        names = " and ".join(_form(_AXES[count]) for count in sorted(forms))
        yield f"names with different numbers of fields, {names}: left over from another run?"
    for rank in ranks:
        if rank.problem:
            yield f"{rank.directory}/{WEIGHTS}: {rank.problem}"
    for same in _by((r.checksums, r.directory) for r in ranks if r.keys).values():
        if len(same) > 1:
            yield f"{format_names(same)}: files of the same contents: copied over one another?"
    iterations = [(rank.contents.get("iteration"), rank.directory) for rank in ranks]
    differing = differences(pair for pair in iterations if isinstance(pair[0], int))
    if differing:
        yield f"the files are of several iterations: {differing}"


def _set_mismatches(present: set[str], sizes: Sizes) -> Iterator[str]:
    """Yield directories that a run of these sizes would write and did not, and others."""
    if sizes.etp and sizes.tp % sizes.etp:
        yield (
            f"expert-tensor-parallel size {sizes.etp} does not divide tensor-parallel size "
            f"{sizes.tp}: ranks with other expert shards write one file, and some are lost or torn"
        )
        return
    expected = _writers(sizes)
    if unknown := sorted(present - expected.keys()):
        yield f"{format_names(unknown)}: no file of a run with {sizes}"
    if missing := [name for name in expected if name not in present]:
        why = ""
        if sizes.tp > sizes.ep * (sizes.etp or sizes.tp):
            why = "; Megatron-Core 0.12 to 0.18 does not write all where TP > EP x ETP"
        yield (
            f"incomplete: {len(expected) - len(missing)} of {len(expected)} directories, no "
            f"{format_names(missing)}{why}"
        )


def _rank_mismatches(
    ranks: Sequence[RankFile], sizes: Sizes, coordinates: Mapping[str, Coordinate]
) -> Iterator[str]:
    """Yield files of ranks that do not write under these names, by the run's arguments.

    Ranks ascend in the order of the coordinates. Releases differ in the place of ep among the ranks
    of context parallelism, so with that tp and stages are compared. Megatron's own converters write
    all files as one rank.
    """
    stored = {rank.directory: getattr(rank.args, "rank", None) for rank in ranks}
    numbers = {name: number for name, number in stored.items() if isinstance(number, int)}
    if len(set(numbers.values())) < len(stored):
        return
    has_cp = (sizes.cp or 1) > 1
    for name, coordinate in coordinates.items() if has_cp else ():
        if (tp := numbers[name] % sizes.tp) != coordinate.tp:  # which is innermost in all releases
            yield (
                f"{name}/{WEIGHTS}: written by rank {numbers[name]}, which has TP {tp}: "
                "renamed, or copied over another file?"
            )
    comparable = _by(
        ((coordinate.tp, coordinate.ep) if has_cp else None, name)
        for name, coordinate in coordinates.items()
    )
    for names in comparable.values():
        by_rank = sorted(names, key=lambda name: numbers[name])
        if moved := [name for name, other in zip(names, by_rank, strict=True) if name != other]:
            yield (
                f"{format_names(moved)}: written by ranks {[numbers[name] for name in moved]}, of "
                "other coordinates: renamed, or copied over one another?"
            )


def _given_mismatches(given: Mapping[str, int], sizes: Sizes, axes: Axes) -> Iterator[str]:
    """Yield sizes that are asked for, and that the files do not have."""
    for axis, size in given.items():
        if size != getattr(sizes, axis):
            yield f"{_OPTIONS[axis]} {size}, but on disk {getattr(sizes, axis)}"
    if given.get("ep", 1) > 1 and "ep" not in axes and len(axes) != 2:
        yield (
            f"--expert-parallel-size {given['ep']} needs an expert coordinate in the names, and "
            "there is none"
        )
    if given and "ep" not in given and "ep" in axes:
        yield (
            f"the names have an expert coordinate (EP {sizes.ep}), and no --expert-parallel-size "
            "is given: a non-EP loader would take experts for pipeline stages"
        )
