"""The axis of each number in the names of Megatron's directories, and the sizes of the run.

A name may have a pipeline or an expert coordinate as its second number, and does not say which. See
``layout`` for what decides, and in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from dcp_placements.convert.megatron.files import (
    ARGUMENTS,
    EMBEDDING,
    RankFile,
    Sizes,
    check_writers,
    writers,
)
from dcp_placements.errors import format_names

Axes = tuple[str | None, ...]
"""The axis of each number in the directories' names; None if it is not known."""

AXES: dict[int, Axes] = {1: ("tp",), 2: ("tp", None), 3: ("tp", "pp", "ep")}
_FIELDS = {"tp": "mp_rank_TT", "pp": "PPP", "ep": "EEE", None: "XXX"}


def name_form(axes: Axes) -> str:
    return "_".join(_FIELDS[axis] for axis in axes)


def asked_form(given: Mapping[str, int], axes: Axes) -> str:
    """Return the form of a directory's name for the given sizes, else the form on disk."""
    if given:
        has_pp = given["pp"] > 1 if "pp" in given else "pp" in axes
        axes = ("tp", *(["pp"] if has_pp else []), *(["ep"] if given.get("ep", 1) > 1 else []))
    return name_form(axes)


def stored_sizes(ranks: Sequence[RankFile]) -> tuple[Sizes | None, list[str]]:
    """Return the sizes in the arguments inside the files, if any, and how the files differ."""
    files: dict[Sizes, list[str]] = {}
    for rank in ranks:
        args = {axis: getattr(rank.args, argument, None) for axis, argument in ARGUMENTS.items()}
        sizes = {axis: size for axis, size in args.items() if isinstance(size, int)}
        if "tp" in sizes and "pp" in sizes:
            # Megatron before expert parallelism has no argument for it.
            sizes = {"ep": 1, "etp": sizes["tp"], "cp": 1} | {a: s for a, s in sizes.items() if s}
            files.setdefault(Sizes(**sizes), []).append(rank.directory)
    if len(files) > 1:
        runs = "; ".join(f"{sizes} in {format_names(names)}" for sizes, names in files.items())
        return next(iter(files)), [f"the args inside the files are of several runs: {runs}"]
    return next(iter(files), None), []


def resolve_axes(
    ranks: Sequence[RankFile], stored: Sizes | None, given: Mapping[str, int]
) -> tuple[Axes, str]:
    """Return the axis of each number in the names, and how it is known."""
    count = len(ranks[0].fields)
    if stored is not None and stored.ep > 1:
        wanted = 3 if stored.pp > 1 else 2
        if wanted != count:
            return AXES[count], (
                f"args inside the files say {stored}: names of such a run have {wanted} fields"
            )
    if count == 1:
        return AXES[1], "TP only: names have no field beside the tensor coordinate"
    if count == 3:
        return AXES[3], "TP+PP+EP: names have a pipeline and an expert coordinate"
    second, reason = _resolve_second(ranks, stored, given)
    return ("tp", second), f"TP+{second.upper()}: {reason}" if second else reason


def _resolve_second(
    ranks: Sequence[RankFile], stored: Sizes | None, given: Mapping[str, int]
) -> tuple[str | None, str]:
    """Return the axis of the second of two numbers, None if it is not known, and the reason."""
    if stored is not None and (stored.pp > 1) != (stored.ep > 1):
        return "ep" if stored.ep > 1 else "pp", f"args inside the files say {stored}"
    tp, others = extents(ranks)
    etp = _expert_tensor_size(ranks)
    if etp is not None:
        return "ep", (
            f"the {len(ranks)} files are no grid of {tp} x {others}, but just those that experts "
            f"over {others} ranks with expert-tensor-parallel size {etp} make"
        )
    with_keys = [rank for rank in ranks if rank.keys]
    first = [EMBEDDING in rank.keys for rank in with_keys if rank.fields[1] == 0]
    rest = [EMBEDDING in rank.keys for rank in with_keys if rank.fields[1] > 0]
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


def extents(ranks: Sequence[RankFile]) -> list[int]:
    """Return how many values each number in the names has, from 0 up.

    Raises:
        CannotLook: They make more ranks than any run has.
    """
    counts = [1 + max(numbers) for numbers in zip(*(rank.fields for rank in ranks), strict=True)]
    check_writers(prod(counts))
    return counts


def _expert_tensor_size(ranks: Sequence[RankFile]) -> int | None:
    """Return the experts' tensor-parallel size that makes just these files, if they are no grid."""
    tp, *_, ep = extents(ranks)
    present = {(rank.fields[0], rank.fields[-1]) for rank in ranks}
    for etp in range(1, tp if len(present) < tp * ep else 1):
        expected = writers(Sizes(tp=tp, ep=ep, etp=etp)) if tp % etp == 0 else {}
        if present == {(at.tp, at.ep) for at in expected.values()}:
            return etp
    return None


def named_sizes(ranks: Sequence[RankFile], axes: Axes) -> Sizes:
    """Return the sizes that the names show."""
    counts = dict(zip(axes, extents(ranks), strict=True))
    etp = _expert_tensor_size(ranks) if "ep" in axes else None
    return Sizes(tp=counts["tp"], pp=counts.get("pp", 1), ep=counts.get("ep", 1), etp=etp)
