"""What a Megatron-LM checkpoint directory is: which ranks its files are of, and are all there.

A legacy file stands in ``mp_rank_TT``, followed by the pipeline coordinate where there are several
stages and by the expert coordinate where experts are spread over ranks. So a name of two fields is
of either kind, and names alone do not tell which. What does, in this order: the run's arguments
inside the files; a set of files that is no grid; which weights which file has; the expert-parallel
size that is asked for.

The layout is what a loader has to address ranks by, and not what the names spell out. With expert
parallelism that is (tp, pp, ep), also where a name leaves the single pipeline stage out: ``3D``,
for an EP-aware loader. ``1D`` and ``2D`` are without expert parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dcp_placements.errors import CannotLook, format_name, format_names
from dcp_placements.formats.megatron.files import (
    ARGUMENTS,
    DISTRIBUTED,
    EMBEDDING,
    WEIGHTS,
    Contents,
    Coordinate,
    Sizes,
    directory_name,
    find_iteration,
    format_sizes,
    look_inside,
    rank_fields,
    writers,
)

NON_EP = "non-EP"
EP_AWARE = "EP-aware"


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """What was found in a Megatron checkpoint directory.

    Attributes:
        path: The directory of the iteration.
        format: ``"torch"`` (``mp_rank_*``), ``"torch_dist"``, or
            ``"torch_dcp or fsdp_dtensor"``, which files do not tell apart.
        layout: What ranks of ``mp_rank_*`` files are addressed by: ``"1D"`` (tp), ``"2D"``
            (tp, pp), ``"3D"`` (tp, pp, ep: wherever there is expert parallelism), or
            ``"ambiguous"``; None for the other formats.
        fields: How many numbers a name has, 1 to 3: one that is left out is of an axis of size 1.
            None for the other formats.
        second_field: ``"pp"`` or ``"ep"`` where a name has two fields and it is known; else None.
        reason: How that is known, or what would settle it.
        pattern: The path of a rank's file, below ``path``'s parent; what the arguments ask for.
        loader: ``"non-EP"``, ``"EP-aware"`` or ``"any DCP reader"``; None where ambiguous.
        sizes: As far as known.
        mismatches: What does not fit together, or is not there.
        files: What was found, below ``path``.
        coordinates: Of each directory, where its writer stands; empty where ambiguous.
    """

    path: Path
    format: str
    layout: str | None
    fields: int | None
    second_field: str | None
    reason: str
    pattern: str
    loader: str | None
    sizes: Sizes
    mismatches: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    coordinates: Mapping[str, Coordinate] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether nothing is missing, contradictory or open."""
        return not self.mismatches and self.layout != "ambiguous"

    def as_json(self) -> dict[str, Any]:
        """Return what the command prints with ``--json``."""
        return {
            "layout": self.layout,
            "fields": self.fields,
            "reason": self.reason,
            "pattern": self.pattern,
            "loader": self.loader,
            "mismatches": list(self.mismatches),
            "files": list(self.files),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.format}",
            f"    layout:    {self.layout or 'none: ranks are in no name'}",
            *([] if self.fields is None else [f"    fields:    {self.fields}"]),
            f"    reason:    {self.reason}",
            f"    pattern:   {self.pattern}",
            f"    loader:    {self.loader or 'not to be told'}",
            f"    files:     {len(self.files)}: {format_names(self.files, 4)}",
        ]
        lines += [f"    mismatch:  {told}" for told in self.mismatches]
        return "\n".join(map(format_name, lines))


def megatron_layout(
    path: str | os.PathLike[str],
    *,
    expert_parallel_size: int | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
) -> MegatronLayout:
    """Return what a Megatron checkpoint directory is, checked against what a run would ask of it.

    The expert-parallel size decides, never the pipeline-parallel size: where it is given, names
    must have an expert coordinate; where others are given without it, they must have none. Without
    any of them, the files decide.

    Args:
        path: The directory of one iteration, or the one that holds them all.
        expert_parallel_size: Of the run that is to load it.
        tensor_parallel_size: Likewise.
        pipeline_parallel_size: Likewise.

    Raises:
        CannotLook: No Megatron checkpoint there; or a file asks for more than tensors, plain values
            and the classes of a training run. Nothing of it is run then.
    """
    folder = find_iteration(path)
    given = Sizes(tp=tensor_parallel_size, pp=pipeline_parallel_size, ep=expert_parallel_size)
    names = sorted(entry.name for entry in folder.iterdir())
    ranks = {name: found for name in names if (found := rank_fields(name)) is not None}
    if "metadata.json" in names or (".metadata" in names and not ranks):
        return _dcp_layout(folder, names)
    if not ranks:
        raise CannotLook(
            f"{folder}: no Megatron checkpoint in it\n"
            f"    found:       {format_names(names, 6) or 'nothing'}\n"
            "    way out:     give a directory with mp_rank_* directories, or with .metadata"
        )
    return _legacy_layout(folder, ranks, given)


def _dcp_layout(folder: Path, names: Sequence[str]) -> MegatronLayout:
    is_dist = "metadata.json" in names
    mismatches = []
    if ".metadata" not in names:
        mismatches.append("incomplete: no .metadata, which is written last")
    if not any(name.endswith(".distcp") for name in names):
        mismatches.append("incomplete: no .distcp files")
    return MegatronLayout(
        path=folder,
        format="torch_dist" if is_dist else "torch_dcp or fsdp_dtensor",
        layout=None,
        fields=None,
        second_field=None,
        reason=(
            "metadata.json makes it torch_dist: a DCP checkpoint of whole tensors, for any layout"
            if is_dist
            else ".metadata alone makes it torch_dcp or fsdp_dtensor, both plain DCP, which no "
            "file tells apart (Megatron goes by --use-megatron-fsdp)"
        ),
        pattern=f"{folder.name}/__<rank>_<i>.distcp",
        loader="any DCP reader",
        sizes=Sizes(),
        mismatches=tuple(mismatches),
        files=tuple(name for name in names if (folder / name).is_file()),
    )


def _legacy_layout(
    folder: Path, ranks: Mapping[str, tuple[int, ...]], given: Sizes
) -> MegatronLayout:
    mismatches: list[str] = []
    files = tuple(
        f"{name}/{entry.name}" for name in ranks for entry in sorted((folder / name).iterdir())
    )
    counts = sorted({len(fields) for fields in ranks.values()})
    if len(counts) > 1:
        forms = " and ".join(_name(_FORMS[count]) for count in counts)
        mismatches.append(
            f"names with different numbers of fields, {forms}: left over from another run?"
        )
    contents = look_inside(folder, ranks)
    mismatches += [f"{name}/{WEIGHTS}: {why}" for name, why in contents.unreadable.items()]
    by_iteration: dict[int, list[str]] = {}
    for name, iteration in contents.iterations.items():
        by_iteration.setdefault(iteration, []).append(name)
    if len(by_iteration) > 1:
        told_of = "; ".join(f"{i} in {format_names(n)}" for i, n in by_iteration.items())
        mismatches.append(f"the files are of several iterations: {told_of}")
    count = counts[-1]
    told = _sizes_told(contents, mismatches)
    named = {name: fields for name, fields in ranks.items() if len(fields) == count}
    second, reason = _settle(named, count, told, contents, given)
    sizes = _sizes(named, second, count, told)
    has_experts = count == 3 or second == "ep" or (sizes.ep or 1) > 1
    layout = "3D" if has_experts else "ambiguous" if count == 2 and second is None else f"{count}D"
    if has_experts and count < 3:
        reason += (
            f"; 3D, though names have {count} field{'s' * (count > 1)}: with EP, ranks are "
            "addressed by (tp, pp, ep)"
            + (", and names leave out a pipeline of one stage" if second == "ep" else "")
        )
    coordinates: dict[str, Coordinate] = {}
    if layout != "ambiguous" and len(counts) == 1:
        coordinates = _check_set(ranks, sizes, told, mismatches)
    elif layout == "ambiguous":
        missing = [name for name in _grid(named) if name not in ranks]
        if missing:
            mismatches.append(
                f"incomplete: {format_names(missing)} would make a grid of the {len(ranks)} "
                "directories that are there"
            )
    _check_given(given, sizes, count, second, mismatches)
    _check_optimizer(ranks, sizes, contents, mismatches)
    if contents.distributed:
        reason += f"; {DISTRIBUTED}: with the state of a distributed optimizer"
    expert = has_experts if given.ep is None else given.ep > 1
    return MegatronLayout(
        path=folder,
        format="torch",
        layout=layout,
        fields=count,
        second_field=second if count == 2 else None,
        reason=reason,
        pattern=f"{folder.name}/{_pattern(given, count, second)}/{WEIGHTS}",
        loader=None if layout == "ambiguous" else EP_AWARE if expert else NON_EP,
        mismatches=tuple(mismatches),
        files=files,
        sizes=sizes,
        coordinates=coordinates,
    )


_FORMS = {1: (), 2: ("XXX",), 3: ("PPP", "EEE")}


def _name(fields: Sequence[str]) -> str:
    return "_".join(["mp_rank_TT", *fields])


def _pattern(given: Sizes, count: int, second: str | None) -> str:
    """Return the form of a directory's name that the sizes given ask for, else the one found."""
    has_ep = (given.ep or 1) > 1
    if given == Sizes():
        if count == 2:
            return _name(["XXX" if second is None else "PPP" if second == "pp" else "EEE"])
        return _name(_FORMS[count])
    has_pp = given.pp > 1 if given.pp is not None else count == 3 or second == "pp"
    return _name([*(["PPP"] if has_pp else []), *(["EEE"] if has_ep else [])])


def _sizes_told(contents: Contents, mismatches: list[str]) -> Sizes | None:
    """Return the sizes that the arguments inside the files say, or None."""
    told: dict[Sizes, list[str]] = {}
    for name, args in contents.args.items():
        found = {axis: getattr(args, argument, None) for axis, argument in ARGUMENTS.items()}
        sizes = Sizes(**{k: v if isinstance(v, int) else None for k, v in found.items()})
        if sizes.tp is not None and sizes.pp is not None:
            # Megatron before expert parallelism has no argument for it.
            ep = sizes.ep or 1
            sizes = replace(sizes, ep=ep, etp=sizes.etp or sizes.tp, cp=sizes.cp or 1)
            told.setdefault(sizes, []).append(name)
    if len(told) > 1:
        forms = "; ".join(f"{format_sizes(s)} in {format_names(n)}" for s, n in told.items())
        mismatches.append(f"the args inside the files are of several runs: {forms}")
    return next(iter(told)) if told else None


def _settle(
    ranks: Mapping[str, tuple[int, ...]],
    count: int,
    told: Sizes | None,
    contents: Contents,
    given: Sizes,
) -> tuple[str | None, str]:
    """Return ``("pp", "ep" or None, how it is known)`` for the second field of a name."""
    if told is not None and (told.ep or 1) > 1:
        wanted = 3 if (told.pp or 1) > 1 else 2
        if wanted != count:
            return None, (
                f"args inside the files say {format_sizes(told)}: names of such a run have "
                f"{wanted} fields"
            )
    if count == 1:
        return None, "TP only: names have no field beside the tensor coordinate"
    if count == 3:
        return None, "TP+PP+EP: names have a pipeline and an expert coordinate"
    if told is not None and ((told.pp or 1) > 1) != ((told.ep or 1) > 1):
        second = "ep" if (told.ep or 1) > 1 else "pp"
        return second, f"TP+{second.upper()}: args inside the files say {format_sizes(told)}"
    found = {(fields[0], fields[1]) for fields in ranks.values()}
    tp = 1 + max(fields[0] for fields in found)
    others = 1 + max(fields[1] for fields in found)
    if found != {(a, b) for a in range(tp) for b in range(others)}:
        etp = _diagonal(found, tp, others)
        if etp is not None:
            return "ep", (
                f"TP+EP: the {len(found)} files are no grid of {tp} x {others}, but just those "
                f"that experts over {others} ranks with expert-tensor-parallel size {etp} make"
            )
    by_keys = _settle_by_keys(ranks, contents)
    if by_keys is not None:
        return by_keys
    if given.ep is not None:
        second = "ep" if given.ep > 1 else "pp"
        return second, f"TP+{second.upper()}: by --expert-parallel-size {given.ep}"
    if given != Sizes():
        return "pp", (
            "TP+PP: sizes are given without --expert-parallel-size, and nothing in the files says "
            "otherwise"
        )
    return None, (
        "TP+PP or TP+EP: names of two fields are of either kind, and neither args nor weights in "
        "the files tell which; --expert-parallel-size N (1 for none) settles it"
    )


def _diagonal(found: set[tuple[int, int]], tp: int, ep: int) -> int | None:
    """Return the experts' tensor-parallel size that makes just these files, or None."""
    for etp in range(1, tp):
        if tp % etp == 0:
            made = writers(Sizes(tp=tp, pp=1, ep=ep, etp=etp))
            if found == {(at.tp, at.ep) for at in made}:
                return etp
    return None


def _settle_by_keys(
    ranks: Mapping[str, tuple[int, ...]], contents: Contents
) -> tuple[str, str] | None:
    held = [
        (fields[1], found) for name, fields in ranks.items() if (found := contents.keys.get(name))
    ]
    first = [EMBEDDING in found for at, found in held if at == 0]
    others = [EMBEDDING in found for at, found in held if at > 0]
    if not first or not others or not all(first):
        return None
    if len({found for _, found in held}) == 1:
        return "ep", "TP+EP: every file has the same weights, the word embedding among them"
    if not all(others):
        return "pp", "TP+PP: the word embedding is not in the files of all second fields"
    return None


def _sizes(
    ranks: Mapping[str, tuple[int, ...]], second: str | None, count: int, told: Sizes | None
) -> Sizes:
    """Return the sizes that the files are of, as far as known."""
    if told is not None:
        return told
    most = [1 + max(fields[at] for fields in ranks.values()) for at in range(count)]
    if count == 1:
        return Sizes(tp=most[0], pp=1, ep=1)
    if count == 3:
        sizes = Sizes(tp=most[0], pp=most[1], ep=most[2])
        found = {(fields[0], fields[2]) for fields in ranks.values()}
    elif second == "pp":
        return Sizes(tp=most[0], pp=most[1], ep=1)
    elif second == "ep":
        sizes = Sizes(tp=most[0], pp=1, ep=most[1])
        found = {(fields[0], fields[1]) for fields in ranks.values()}
    else:
        return Sizes(tp=most[0])
    return replace(sizes, etp=_diagonal(found, most[0], most[-1]))


def _check_set(
    ranks: Mapping[str, tuple[int, ...]],
    sizes: Sizes,
    told: Sizes | None,
    mismatches: list[str],
) -> dict[str, Coordinate]:
    """Return where each directory's writer stands; note what is missing or too much."""
    if told is not None and sizes.etp and sizes.tp and sizes.tp % sizes.etp:
        mismatches.append(
            f"expert-tensor-parallel size {sizes.etp} does not divide tensor-parallel size "
            f"{sizes.tp}: ranks with other expert shards write one file, and some are lost or torn"
        )
        return {}
    expected = {directory_name(at, sizes): at for at in writers(sizes)}
    missing = [name for name in expected if name not in ranks]
    unknown = [name for name in ranks if name not in expected]
    if unknown:
        mismatches.append(f"{format_names(unknown)}: no file of a run with {format_sizes(sizes)}")
    if missing:
        line = (
            f"incomplete: {len(expected) - len(missing)} of {len(expected)} directories, no "
            f"{format_names(missing)}"
        )
        early = {directory_name(at, sizes) for at in writers(sizes, early=True)}
        if early < set(expected) and early == set(ranks):
            line += (
                "; Megatron-Core 0.12 to 0.18 writes no others where TP > EP x ETP, and what "
                "these hold is lost"
            )
        mismatches.append(line)
    return {name: expected[name] for name in ranks if name in expected}


def _grid(ranks: Mapping[str, tuple[int, ...]]) -> list[str]:
    tp = 1 + max(fields[0] for fields in ranks.values())
    others = 1 + max(fields[1] for fields in ranks.values())
    return [f"mp_rank_{a:02d}_{b:03d}" for a in range(tp) for b in range(others)]


def _check_given(
    given: Sizes, sizes: Sizes, count: int, second: str | None, mismatches: list[str]
) -> None:
    named = (
        ("--tensor-parallel-size", given.tp, sizes.tp),
        ("--pipeline-parallel-size", given.pp, sizes.pp),
        ("--expert-parallel-size", given.ep, sizes.ep),
    )
    for option, wanted, found in named:
        if wanted is not None and found is not None and wanted != found:
            mismatches.append(f"{option} {wanted}, but on disk {found}")
    has_expert = count == 3 or second == "ep"
    if given.ep is not None and given.ep > 1 and not has_expert and count != 2:
        mismatches.append(
            f"--expert-parallel-size {given.ep} needs an expert coordinate in the names, and there "
            "is none"
        )
    if given.ep is None and given != Sizes() and has_expert:
        mismatches.append(
            f"the names have an expert coordinate (EP {sizes.ep}), and no --expert-parallel-size "
            "is given: a non-EP loader would take experts for pipeline stages"
        )


def _check_optimizer(
    ranks: Mapping[str, tuple[int, ...]], sizes: Sizes, contents: Contents, mismatches: list[str]
) -> None:
    """Note where the state of a distributed optimizer is said to stand beside a file and does not.

    With expert parallelism not every file has some.
    """
    without = [name for name in ranks if name not in contents.distributed]
    if not without or (contents.distributed and sizes.ep != 1):
        return
    said = any(
        getattr(args, "use_distributed_optimizer", False) and name in contents.optimizers
        for name, args in contents.args.items()
    )
    if contents.distributed or said:
        mismatches.append(
            f"incomplete: no {DISTRIBUTED} in {format_names(without)}: the state of the "
            "distributed optimizer"
        )
