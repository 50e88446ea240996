"""The layout of a Megatron-LM checkpoint directory: which ranks wrote files, and which are missing.

A legacy file is in ``mp_rank_TT``, followed by the pipeline coordinate if there are several stages
and by the expert coordinate if experts are spread over ranks. So the second of two numbers in a
name is one or the other, and the name does not say which. These decide, in this order: the run's
arguments inside the files; a set of files that is not a grid; which weights are in which file; the
expert-parallel size that the caller gives.

The layout is how a loader addresses ranks, not how many numbers the names have. With expert
parallelism that is (tp, pp, ep), also where a name omits the only pipeline stage: ``3D``, for an
EP-aware loader. ``1D`` and ``2D`` are without expert parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from dcp_placements.convert.megatron.axes import (
    AXES,
    Axes,
    asked_form,
    name_form,
    named_sizes,
    resolve_axes,
    stored_sizes,
)
from dcp_placements.convert.megatron.files import (
    WEIGHTS,
    Coordinate,
    RankFile,
    Sizes,
    find_iteration,
    rank_fields,
    scan_rank_file,
    writers,
)
from dcp_placements.errors import CannotLook, format_name, format_names
from dcp_placements.offline.declared import Progress

NON_EP = "non-EP"
EP_AWARE = "EP-aware"

_OPTIONS = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "ep": "--expert-parallel-size",
}


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """The layout of a Megatron checkpoint directory."""

    JSON: ClassVar[str] = "layout fields reason pattern loader mismatches files"

    path: Path  # the directory of the iteration
    # How ranks are addressed: ``"1D"`` (tp), ``"2D"`` (tp, pp), ``"3D"`` (tp, pp, ep: wherever
    # there is expert parallelism), or ``"ambiguous"``
    layout: str
    fields: int  # how many numbers a name has, 1 to 3; an axis of size 1 may have none
    # ``"pp"`` or ``"ep"`` if a name has two fields and it is known; else None
    second_field: str | None
    reason: str  # how that is known, or what would settle it
    pattern: str  # the path of a rank's file, below ``path``'s parent, for the given sizes
    loader: str | None  # ``"non-EP"`` or ``"EP-aware"``; None if ambiguous
    sizes: Sizes  # of the run; without meaning if ambiguous
    mismatches: tuple[str, ...] = ()  # what is contradictory or missing
    files: tuple[str, ...] = ()  # the files present, below ``path``
    # The position of each directory's writer; empty if ambiguous
    coordinates: Mapping[str, Coordinate] = field(default_factory=dict)

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
    progress: Progress = lambda done, total: None,
) -> MegatronLayout:
    """Return the layout of a Megatron checkpoint directory, checked against the sizes of a run.

    The expert-parallel size decides, never the pipeline-parallel size: if it is given, names must
    have an expert coordinate; if only others are given, they must have none. Without any of them,
    the files decide.

    Args:
        path: The directory of one iteration, or the one that contains them all.
        expert_parallel_size: Of the run that is to load it.
        tensor_parallel_size: Likewise.
        pipeline_parallel_size: Likewise.
        progress: Called with the number of files read, and of all.

    Raises:
        CannotLook: There are no ``mp_rank_*`` files, but a DCP checkpoint (``torch_dist``) or
            others; or a file needs more than tensors, plain values and the classes of a training
            run. Then nothing in it is executed.
    """
    folder = find_iteration(path)
    sizes = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "ep": expert_parallel_size}
    given = {axis: size for axis, size in sizes.items() if size is not None}
    names = sorted(entry.name for entry in folder.iterdir())
    fields = {name: numbers for name in names if (numbers := rank_fields(name)) is not None}
    if not fields and ".metadata" in names:
        raise CannotLook(
            f"{folder}: this is a DCP checkpoint (torch_dist, torch_dcp or fsdp_dtensor), of whole "
            "tensors for any layout\n"
            "    way out:     inspect and verify read it; load it as it is, with "
            "rename=Stack('decoder.layers.{}', total=layers) where all layers are one tensor"
        )
    if not fields:
        raise CannotLook(
            f"{folder}: no Megatron checkpoint in it\n"
            f"    found:       {format_names(names, 6) or 'nothing'}\n"
            "    way out:     give a directory with mp_rank_* directories"
        )
    ranks = []
    for name, numbers in fields.items():
        ranks.append(scan_rank_file(folder, name, numbers))
        progress(len(ranks), len(fields))
    return _layout_of(folder, ranks, given)


def _layout_of(folder: Path, ranks: Sequence[RankFile], given: Mapping[str, int]) -> MegatronLayout:
    count = max(len(rank.fields) for rank in ranks)
    named = [rank for rank in ranks if len(rank.fields) == count]
    stored, mismatches = stored_sizes(ranks)
    axes, reason = resolve_axes(named, stored, given)
    sizes = stored or named_sizes(named, axes)
    has_experts = "ep" in axes or sizes.ep > 1
    layout = "3D" if has_experts else "ambiguous" if None in axes else f"{count}D"
    if has_experts and count < 3:
        reason += (
            f"; 3D, though names have {count} field{'s' * (count > 1)}: with EP, ranks are "
            "addressed by (tp, pp, ep)"
            + (", and names leave out a pipeline of one stage" if "ep" in axes else "")
        )
    coordinates: dict[str, Coordinate] = {}
    mismatches = [*_file_mismatches(ranks), *mismatches]
    if layout != "ambiguous" and len(named) == len(ranks):
        expected = writers(sizes)
        mismatches += _set_mismatches(ranks, sizes)
        coordinates = {r.directory: expected[r.directory] for r in ranks if r.directory in expected}
        mismatches += _rank_mismatches(ranks, sizes, coordinates)
    mismatches += _given_mismatches(given, sizes, axes)
    is_expert_loader = given["ep"] > 1 if "ep" in given else has_experts
    return MegatronLayout(
        path=folder,
        layout=layout,
        fields=count,
        second_field=axes[1] if count == 2 else None,
        reason=reason,
        pattern=f"{folder.name}/{asked_form(given, axes)}/{WEIGHTS}",
        loader=None if layout == "ambiguous" else EP_AWARE if is_expert_loader else NON_EP,
        mismatches=tuple(mismatches),
        files=tuple(
            f"{rank.directory}/{entry.name}"
            for rank in ranks
            for entry in sorted((folder / rank.directory).iterdir())
        ),
        sizes=sizes,
        coordinates=coordinates,
    )


def _file_mismatches(ranks: Sequence[RankFile]) -> list[str]:
    """Return files that are unreadable, or of different runs by their names or iterations."""
    mismatches = []
    forms = {len(rank.fields) for rank in ranks}
    if len(forms) > 1:
        names = " and ".join(name_form(AXES[count]) for count in sorted(forms))
        mismatches.append(
            f"names with different numbers of fields, {names}: left over from another run?"
        )
    mismatches += [f"{r.directory}/{WEIGHTS}: {r.problem}" for r in ranks if r.problem]
    by_checksums: dict[tuple[tuple[str, int, int], ...], list[str]] = {}
    for rank in ranks:
        if rank.checksums and rank.keys:
            by_checksums.setdefault(rank.checksums, []).append(rank.directory)
    mismatches += [
        f"{format_names(names)}: files of the same contents: copied over one another?"
        for names in by_checksums.values()
        if len(names) > 1
    ]
    by_iteration: dict[int, list[str]] = {}
    for rank in ranks:
        if rank.iteration is not None:
            by_iteration.setdefault(rank.iteration, []).append(rank.directory)
    if len(by_iteration) > 1:
        iterations = "; ".join(f"{at} in {format_names(n)}" for at, n in by_iteration.items())
        mismatches.append(f"the files are of several iterations: {iterations}")
    return mismatches


def _rank_mismatches(
    ranks: Sequence[RankFile], sizes: Sizes, coordinates: Mapping[str, Coordinate]
) -> list[str]:
    """Return files of ranks that do not write under these names, by the run's arguments.

    Megatron's own converters write all files as one rank.
    """
    stored = {rank.directory: getattr(rank.args, "rank", None) for rank in ranks}
    numbers = {name: number for name, number in stored.items() if isinstance(number, int)}
    if len(set(numbers.values())) < len(stored):
        return []
    mismatches = []
    for name, at in coordinates.items():
        found = {"tp": numbers[name] % sizes.tp}
        if (sizes.cp or 1) == 1:  # releases differ in the place of ep among these ranks
            found["ep"] = numbers[name] // (sizes.etp or sizes.tp) % sizes.ep
        wrong = [f"{axis.upper()} {n}" for axis, n in found.items() if n != getattr(at, axis)]
        if wrong:
            mismatches.append(
                f"{name}/{WEIGHTS}: written by rank {numbers[name]}, which has "
                f"{' and '.join(wrong)}: renamed, or copied over another file?"
            )
    # Whatever the order of the axes, of two ranks that differ in pp alone the first has the lower.
    stages: dict[tuple[int, int], list[str]] = {}
    for name, at in sorted(coordinates.items(), key=lambda one: one[1].pp):
        stages.setdefault((at.tp, at.ep), []).append(name)
    for names in stages.values():
        by_rank = sorted(names, key=lambda name: numbers[name])
        moved = [name for name, other in zip(names, by_rank, strict=True) if name != other]
        if moved:
            mismatches.append(
                f"{format_names(moved)}: written by ranks {[numbers[name] for name in moved]}, of "
                "other pipeline stages: renamed, or copied over one another?"
            )
    return mismatches


def _set_mismatches(ranks: Sequence[RankFile], sizes: Sizes) -> list[str]:
    """Return directories that a run of these sizes would write and did not, and others."""
    if sizes.etp and sizes.tp % sizes.etp:
        return [
            f"expert-tensor-parallel size {sizes.etp} does not divide tensor-parallel size "
            f"{sizes.tp}: ranks with other expert shards write one file, and some are lost or torn"
        ]
    expected, present = writers(sizes), {rank.directory for rank in ranks}
    missing = [name for name in expected if name not in present]
    mismatches = []
    if unknown := [rank.directory for rank in ranks if rank.directory not in expected]:
        mismatches.append(f"{format_names(unknown)}: no file of a run with {sizes}")
    if missing:
        line = (
            f"incomplete: {len(expected) - len(missing)} of {len(expected)} directories, no "
            f"{format_names(missing)}"
        )
        if present == set(writers(sizes, early=True)) < set(expected):
            line += (
                "; Megatron-Core 0.12 to 0.18 writes no others where TP > EP x ETP, and what "
                "these hold is lost"
            )
        mismatches.append(line)
    return mismatches


def _given_mismatches(given: Mapping[str, int], sizes: Sizes, axes: Axes) -> list[str]:
    mismatches = [
        f"{_OPTIONS[axis]} {size}, but on disk {getattr(sizes, axis)}"
        for axis, size in given.items()
        if size != getattr(sizes, axis)
    ]
    if given.get("ep", 1) > 1 and "ep" not in axes and len(axes) != 2:
        mismatches.append(
            f"--expert-parallel-size {given['ep']} needs an expert coordinate in the names, and "
            "there is none"
        )
    if given and "ep" not in given and "ep" in axes:
        mismatches.append(
            f"the names have an expert coordinate (EP {sizes.ep}), and no --expert-parallel-size "
            "is given: a non-EP loader would take experts for pipeline stages"
        )
    return mismatches
