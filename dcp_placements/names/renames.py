"""Renames: what maps this rank's keys to the checkpoint's, and how others see its steps.

A pipeline stage calls its first layer 0, as an expert-parallel rank does its first expert; two
``ep`` ranks of three and five experts both have an ``experts.0``. ``Renumber`` makes ``experts.3``
of the second one's, ``Replace`` maps or drops components, ``Stack``, ``Unstack`` and ``Split`` make
one tensor of many or many of one, ``Transpose`` swaps two dims, and ``Renames`` applies several of
them. All are small values that can be pickled. They find their pattern anywhere in a key, so that
optimizer state is renamed with its parameter.

All other code sees a rename as its ``steps``. ``Renames(Renumber("pp*.layers.{}", [2, 3], 4),
Replace("pp*", "model"))`` has two, which begin with ``("Renumber", "pp*.layers.{}", 4, ...)`` and
``("Replace", "pp* -> model", None, ...)``. The pattern of a step is matched against the keys that
the steps before it make. The numbers that the steps give are recorded in the key
(``names/recorded_numbers.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

from dcp_placements.errors import CannotPlace, PlacementError
from dcp_placements.names.recorded_numbers import (
    Number,
    Numbering,
    carried,
    numbers_given,
    spliced,
    with_number,
    without_number,
)
from dcp_placements.names.rename_results import (
    Parts,
    Rename,
    Renamed,
    Row,
    Rows,
    Transposed,
    texts_of,
)
from dcp_placements.rules.patterns import compile_pattern
from dcp_placements.rules.placement import row_numbers

Ids = Sequence[int]

FUNCTION = "function"
"""The kind of a step that is a function of the user's."""

_SELECTOR = re.compile(r"\{\w+\}")


class NumberIn(NamedTuple):
    """A number that a pattern finds in a key, which is ``head``, the digits, ``tail``.

    >>> number_in("layers.{layer}.experts.{}", "layers.3.experts.1.w")
    NumberIn(head='layers.3.experts.', number=1, tail='.w', by='3', end=18)
    """

    head: str
    number: int
    tail: str
    by: str  # what ``{name}`` stands for; empty for a pattern without
    end: int  # the position in the key after the text that the pattern matches


def number_in(pattern: str, key: str) -> NumberIn | None:
    """Return the number that ``{}`` of a pattern stands for in a key; None without a match."""
    match = _number_finder(pattern).search("." + key)
    if match is None:
        return None
    start, stop = match.span("number")
    by = match.groupdict().get("by", "")
    return NumberIn(key[: start - 1], int(match["number"]), key[stop - 1 :], by, match.end() - 1)


@lru_cache(maxsize=1 << 10)
def _number_finder(pattern: str) -> re.Pattern[str]:
    # The placeholders pass through compile_pattern as characters that it leaves alone.
    plain = _SELECTOR.sub("\1", pattern.replace("{}", "\0"), count=1)
    # Beside a * of the same component the number is all of the digits.
    regex = compile_pattern(plain).pattern.replace("\0", r"(?<!\d)(?P<number>\d+)(?!\d)")
    return re.compile(regex.replace("\1", "(?P<by>[^.]+)"))


def contiguous(counts: Sequence[int], at: int) -> range:
    """Return the numbers of one part where the parts follow each other.

    >>> contiguous([3, 5, 2], at=1)
    range(3, 8)

    Args:
        counts: The count of each part, in order: per ``ep`` rank, per pipeline stage, or for
            interleaved stages per chunk: ``contiguous(counts, at=chunk * stages + stage)``.
        at: The index of the part.

    Raises:
        PlacementError: There is no such part.
    """
    if isinstance(counts, int):
        raise PlacementError(
            f"counts={counts!r}: how many each part has, as [2, 2, 2, 2] for 8 over 4 ranks"
        )
    if not 0 <= at < len(counts):
        raise PlacementError(f"there is no part {at} of {len(counts)}: counts are {list(counts)}")
    start = sum(counts[:at])
    return range(start, start + counts[at])


def _selectors(pattern: str, most: int = 0) -> list[str]:
    """Return the names in braces of a pattern; refuse more than ``most``, and not one ``{}``."""
    placeholders = re.findall(r"\{(\w*)\}", pattern)
    selectors = [name for name in placeholders if name]
    if placeholders.count("") != 1 or len(selectors) > most:
        beside = ", and at most one {name} beside it, as in 'layers.{layer}.experts.{}'"
        raise PlacementError(
            f"pattern {pattern!r} must have one {{}} where the number stands"
            + (beside if most else ", as in 'experts.{}'")
        )
    compile_pattern(pattern)
    return selectors


@dataclass(frozen=True, slots=True)
class Renumber:
    """Renames a local number in a key to the number that it has in the whole.

    >>> rename = Renumber("experts.{}", [6, 1], total=8)
    >>> rename("layers.3.mlp.experts.0.w1.weight")
    'layers.3.mlp.experts.6.w1.weight'
    >>> rename("optim.state.layers.3.mlp.experts.1.w1.weight.exp_avg")
    'optim.state.layers.3.mlp.experts.1.w1.weight.exp_avg'

    A second placeholder of the pattern selects the numbers: a different expert map per layer, or
    the layers of each chunk of an interleaved pipeline stage.

    >>> rename = Renumber("model{chunk}.layers.{}", {0: [0, 1], 1: [4, 5]}, total=8)
    >>> rename("model1.layers.0.mlp.weight")
    'model1.layers.4.mlp.weight'

    Args:
        pattern: Dotted components as in ``PlacementRules``, with ``{}`` for the number (a component
            or a part of one, ``weight{}``) and at most one ``{name}`` that selects among ``ids``.
        ids: This rank's numbers in the whole, one per local number; in any order, and the same
            number on several ranks for replicas. If the pattern has a ``{name}``, a mapping from
            its text to the numbers.
        total: The count of numbers on all ranks together: a save is refused if any is missing.
            None if some are left out on purpose.

    Raises:
        PlacementError: The pattern has no ``{}``, or the ids are no ordered whole numbers of
            ``0 .. total - 1``.
    """

    pattern: str
    ids: Ids | Mapping[int | str, Ids] = field(hash=False)
    total: int | None
    by_selector: dict[str, Ids] = field(init=False, repr=False, compare=False)
    numbering: Numbering = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pattern, total, ids = self.pattern, self.total, self.ids
        selectors = _selectors(pattern, most=1)
        if bool(selectors) != isinstance(ids, Mapping):
            wanted = "needs ids by what {name} stands for" if selectors else "needs ids as a list"
            raise PlacementError(f"pattern {pattern!r} {wanted}, not {ids!r}")
        if any(
            isinstance(numbers, int)
            for numbers in (ids.values() if isinstance(ids, Mapping) else [ids])
        ):
            raise PlacementError(
                f"pattern {pattern!r}: ids={ids!r} is one number: give this rank's numbers, as "
                "contiguous(counts, at=rank)"
            )
        by = {
            str(selector): numbers if isinstance(numbers, range) else row_numbers("ids", numbers)
            for selector, numbers in (ids.items() if isinstance(ids, Mapping) else [("", ids)])
        }
        for number in chain(*by.values()):
            if number < 0 or (total is not None and number >= total):
                among = "0 and up" if total is None else f"0 .. {total - 1}"
                raise PlacementError(f"number {number} of {pattern!r} is not among {among}")
        object.__setattr__(self, "ids", by if selectors else by[""])
        object.__setattr__(self, "by_selector", by)
        object.__setattr__(self, "numbering", Numbering(total, str(steps(self)[0])))

    def __call__(self, key: str) -> str:
        local = number_in(self.pattern, key)
        if local is None:
            return key
        ids = self.by_selector.get(local.by)
        if ids is None:
            raise CannotPlace(
                f"{self.pattern} has no ids for {local.by}, only for {', '.join(self.by_selector)}",
                "way out:     give ids for it, an empty list where this rank has none",
            )
        if local.number >= len(ids):
            raise CannotPlace(
                f"{self.pattern} has {len(ids)} ids on this rank, none for local number {len(ids)} "
                "and up",
                "likely:      the counts of contiguous() are not those that the ranks hold",
                "way out:     one id for every local number, in local order",
            )
        start, stop = len(local.head), len(key) - len(local.tail)
        number = Number(start, stop, local.end, self.numbering)
        return with_number(key, number, str(ids[local.number]))


@dataclass(frozen=True, slots=True)
class Replace:
    """Renames consecutive components, or drops them: a prefix that only a pipeline stage has.

    >>> Replace("model_pp*", "model")("model_pp3.layers.0.weight")
    'model.layers.0.weight'
    >>> Replace("module", "")("module.layers.0.weight")
    'layers.0.weight'

    Args:
        pattern: Dotted components as in ``PlacementRules``; the first match is replaced.
        by: The components in their place; empty for none.
    """

    pattern: str
    by: str

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)

    def __call__(self, key: str) -> str:
        match = compile_pattern(self.pattern).search("." + key)
        return key if match is None else _replaced(key, match, self.by)


def _replaced(key: str, match: re.Match[str], by: str) -> str:
    """Return a key with other components, or none, for those matched in ``"." + key``."""
    start, stop = max(match.start() - 1, 0), min(match.end(), len(key))
    before, after = key[:start], key[stop:]
    dots = "." if before and (by or after) else "", "." if by and after else ""
    return spliced(key, start, stop, by.join(dots))


@dataclass(frozen=True, slots=True)
class Stack:
    """Stores tensors whose names differ by a number as one tensor, with one dim more.

    >>> Stack("experts.{}.w*", total=8)("layers.0.experts.5.w1.weight")
    Row(fqn='layers.0.experts.w1.weight', index=5, total=8, dim=0, within=())

    The numbers are global: ``Renumber`` comes first. Scalars (``step``) become a tensor
    ``[total]``; objects are refused.

    A ``Stack`` after another stacks the result of that one: a stack of experts, then of layers, is
    a tensor ``[layers, experts, ...]``. A rank may hold different experts of each layer.

    Args:
        pattern: Dotted components as in ``PlacementRules``, with ``{}`` for the number.
        total: The count of rows.
        dim: The dim of the stacked tensor that they lie along.

    Raises:
        PlacementError: The pattern has no ``{}``.
    """

    pattern: str
    total: int
    dim: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _selectors(self.pattern)

    def __call__(self, key: str) -> Renamed:
        row = number_in(self.pattern, key)
        if row is None:
            return key
        if row.number >= self.total:
            raise CannotPlace(
                f"number {row.number} of {self.pattern} is beyond the {self.total} rows of the "
                "stack",
                "way out:     total= of the whole model",
            )
        start, stop = len(row.head), len(key) - len(row.tail)
        key = without_number(key, start)
        if key[:start][-1:] in ("", ".") and key[stop:][:1] in ("", "."):
            # A component of its own goes with its dot.
            start, stop = (start - 1, stop) if start else (start, stop + 1)
        return Row(spliced(key, start, stop, ""), row.number, self.total, self.dim)


@dataclass(frozen=True, slots=True)
class Unstack:
    """Stores the rows of a tensor as tensors of their own, with a number in their names.

    >>> Unstack("experts.{}.w*")("layers.0.experts.w1.weight")
    Rows(fqn='layers.0.experts.{}.w1.weight', stacked='layers.0.experts.w1.weight', dim=0)

    The rules name the stacked tensor, by its key on this rank. A scalar or an object has no rows,
    and is refused.

    Args:
        pattern: Dotted components as in ``PlacementRules``, with ``{}`` at the position of the
            number; this rank's keys match the pattern without it.
        dim: The dim of the stacked tensor that the rows lie along.

    Raises:
        PlacementError: The pattern has no ``{}``.
    """

    pattern: str
    dim: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _selectors(self.pattern)

    def __call__(self, key: str) -> Renamed:
        dotted = "." + key
        match = _number_absent(self.pattern).search(dotted)
        if match is None:
            return key
        position, end = max(match.start("number") - 1, 0), match.end() - 1
        text = "{}"
        if "{}" in self.pattern.split("."):
            text = "{}." if match.start("number") == 0 else ".{}"
        start = position + text.index("{")
        numbering = Numbering(None, str(steps(self)[0]))
        number = Number(start, start + 2, max(end + len(text), start + 2), numbering)
        fqn = with_number(spliced(key, position, position, text), number, "{}")
        return Rows(fqn, key, self.dim)


@dataclass(frozen=True, slots=True)
class Split:
    """Stores the parts of a fused tensor as tensors of their own.

    >>> Split("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))("layers.0.mlp.gate_up_proj")
    Parts(fqns=('layers.0.mlp.gate_proj', 'layers.0.mlp.up_proj'), \
whole='layers.0.mlp.gate_up_proj', dim=0, sizes=(1, 1), groups=1, rows=None)

    After an ``Unstack`` it splits every row. The rules name the fused tensor. A scalar or an object
    has no parts, and is refused.

    Args:
        pattern: Dotted components as in ``PlacementRules``; the first match is replaced.
        names: The components in their place, one text per part.
        dim: The dim that the parts lie along; after an ``Unstack`` a dim of each row.
        sizes: The sizes of the parts relative to each other, such as the heads of q, k and v. By
            default they are equal.
        groups: The number of times that the sequence of parts repeats along the dim: query groups
            that each have their own q, k and v.

    Raises:
        PlacementError: There are no names, the counts of names and sizes differ, or a size or
            ``groups`` is below 1.
    """

    pattern: str
    names: Sequence[str]
    _: KW_ONLY
    dim: int = 0
    sizes: Sequence[int] = ()
    groups: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "sizes", tuple(self.sizes or [1] * len(self.names)))
        names, sizes = self.names, self.sizes
        if not names or len(sizes) != len(names) or min(*sizes, self.groups) < 1:
            raise PlacementError(
                f"parts of {self.pattern!r} need a name and a size from 1 on each: {names}, "
                f"sizes {sizes}, {self.groups} groups"
            )
        compile_pattern(self.pattern)

    def __call__(self, key: str) -> Renamed:
        match = compile_pattern(self.pattern).search("." + key)
        if match is None:
            return key
        fqns = [_replaced(key, match, name) for name in self.names]
        return Parts(tuple(fqns), key, self.dim, tuple(self.sizes), self.groups)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Stores a tensor with its last two dims swapped.

    >>> Transpose("experts.*_proj")("layers.0.mlp.experts.down_proj")
    Transposed(fqn='layers.0.mlp.experts.down_proj', dim=None, transposed=True)

    Tensors of fewer dims, and objects, are stored as they are. The rules see the tensor with its
    dims as in the checkpoint; the placements of its own DTensor stay as they are. The dim that the
    rows of a ``Stack`` or an ``Unstack`` lie along is none of the two, so that the order of these
    steps does not matter. The dim of a ``Split`` is one of the tensor as that step receives it.

    Args:
        pattern: Dotted components as in ``PlacementRules``. Optimizer state has to match it as its
            parameter does.
    """

    pattern: str

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)

    def __call__(self, key: str) -> Renamed:
        return key if compile_pattern(self.pattern).search("." + key) is None else Transposed(key)


@lru_cache(maxsize=1 << 10)
def _number_absent(pattern: str) -> re.Pattern[str]:
    """Return a regex with the position of the missing number as the empty group ``number``."""
    # A component of its own comes with its dot.
    regex = compile_pattern(pattern.replace("{}", "\0")).pattern
    absent = "\\.\0" if "{}" in pattern.split(".") else "\0"
    return re.compile(regex.replace(absent, "(?P<number>)"))


class Step(NamedTuple):
    """A step of a rename, as other code sees it, and as a checkpoint keeps it.

    Attributes:
        kind: The name of its class; ``FUNCTION`` for any function of a key.
        pattern: Its own pattern, matched against the keys that earlier steps make. For a
            ``Replace`` pattern and replacement, for a function its name.
        total: The count of numbers; None where the step has none.
        shaping: How it changes the shapes of tensors: ``(dim,)`` for rows; ``(dim, names, sizes,
            groups)`` for parts; empty where shapes stay, and in records of older saves.
        rename: The step itself; None in a record.
        declared: The name of its pattern in messages, which should match a key on some rank; None
            for a function, which may leave every key as it is, and in
            ``Renames(..., optional=True)``.
    """

    kind: str
    pattern: str
    total: int | None
    shaping: tuple[Any, ...] = ()
    rename: Any = None
    declared: str | None = None

    def __str__(self) -> str:
        of = "" if self.total is None else f", total={self.total}"
        if self.shaping:
            dim, *parts = self.shaping
            of += f", dim={dim}" if dim else ""
            of += f", {parts[0]}, sizes={parts[1]}, groups={parts[2]}" if parts else ""
        return f"{self.kind}({self.pattern!r}{of})"


@dataclass(frozen=True, slots=True, init=False)
class Renames:
    """Renames by several functions, one after the other.

    >>> rename = Renames(
    ...     Renumber("model_pp1.layers.{}", [2, 3], total=4), Replace("model_pp*", "model")
    ... )
    >>> rename("model_pp1.layers.0.weight")
    'model.layers.2.weight'

    Args:
        renames: ``Renumber``, ``Replace``, ``Stack``, ``Unstack``, ``Split``, ``Transpose``, or
            any function of a key. Steps after a ``Stack``, an ``Unstack`` or a ``Split`` rename the
            keys that it makes.
        optional: Whether steps may match nothing without a warning: for renames that serve several
            models, each of which has some of the names.

    Attributes:
        steps: The renames, as they were given.
        flat: The steps as others see them, with those of a ``Renames`` among them one by one.
    """

    steps: tuple[Rename, ...]
    optional: bool
    flat: tuple[Step, ...] = field(repr=False, compare=False)

    def __init__(self, *renames: Rename, optional: bool = False) -> None:
        object.__setattr__(self, "steps", renames)
        object.__setattr__(self, "optional", optional)
        flat: list[Step] = []
        for step in chain.from_iterable(map(steps, renames)):
            flat.append(step._replace(declared=None) if optional else step)
        object.__setattr__(self, "flat", tuple(flat))

    def __call__(self, key: str) -> Renamed:
        return apply(self.flat, key, {})

    def name(self, key: str) -> str:
        """Return the key alone: for a row the key of its stack, for rows the one with ``{}``."""
        name = self(key)
        return name if isinstance(name, str) else name.fqn


def steps(rename: Any) -> tuple[Step, ...]:
    """Return the steps of a rename, nested ones one by one; none for None."""
    if rename is None:
        return ()
    kind = type(rename).__name__
    if isinstance(rename, Renames) and type(rename).__call__ is Renames.__call__:
        return rename.flat
    # A subclass of ``Renames`` with a call of its own may do more than its steps.
    if not isinstance(rename, Renumber | Replace | Stack | Unstack | Split | Transpose):
        return (Step(FUNCTION, getattr(rename, "__qualname__", kind), None, rename=rename),)
    pattern: str = rename.pattern
    shaping: tuple[Any, ...] = ()
    if isinstance(rename, Replace):
        pattern = f"{pattern} -> {rename.by or 'dropped'}"
    elif isinstance(rename, Split):
        factor = math.gcd(*rename.sizes)
        sizes = tuple([size // factor for size in rename.sizes])
        shaping = rename.dim, rename.names, sizes, rename.groups
    elif isinstance(rename, Stack | Unstack):
        shaping = (rename.dim,)
    total = getattr(rename, "total", None)
    return (Step(kind, pattern, total, shaping, rename, f"rename={kind}({rename.pattern!r})"),)


def apply(steps: Iterable[Step], key: str, matches: dict[str, bool]) -> Renamed:
    """Return the answer of steps for a key, applied one after the other.

    >>> both = Renames(Replace("module", ""), Renumber("expert.{}", [0, 1], total=2)).flat
    >>> matches = {str(step.declared): False for step in both}
    >>> apply(both, "module.w", matches), matches
    ('w', {"rename=Replace('module')": True, "rename=Renumber('expert.{}')": False})

    Args:
        steps: The steps.
        key: A key of this rank.
        matches: Whether each pattern that the steps declare has matched a key so far; updated with
            this key.
    """
    name: Renamed = key
    for step in steps:
        if step.declared is not None and not matches.get(step.declared, True):
            matches[step.declared] = any(_matches(step.rename, fqn) for fqn in texts_of(name))
        rename = partial(carried, step.rename) if step.kind == FUNCTION else step.rename
        name = _renamed(rename, name)
    check_braces(key, name)
    return name


def check_braces(key: str, name: Renamed) -> None:
    """Refuse a key with ``{}`` that a rename numbers, stacks or splits: ``{}`` is a number there.

    Raises:
        CannotPlace: It is such a key.
    """
    if "{}" in key and not (isinstance(name, str) and not numbers_given(name)):
        raise CannotPlace(
            "has {} in its name, where a rename that numbers, stacks or splits has a number",
            "way out:     another name for it on all ranks; or a rename that leaves this key alone",
        )


def _renamed(step: Rename, name: Renamed) -> Renamed:
    """Return a step's answer for the name that the steps before it gave, with its numbers."""
    if isinstance(name, str):
        return step(name)
    if isinstance(name, Parts):
        answers = [step(fqn) for fqn in name.fqns]
        if any(isinstance(answer, Transposed) for answer in answers):
            return _transposed_parts(step, name, answers)
        fqns = [
            _one_name(answer, fqn, step) for answer, fqn in zip(answers, name.fqns, strict=True)
        ]
        return replace(name, fqns=tuple(fqns), whole=_whole_name(step, name.whole))
    new = step(name.fqn)
    if isinstance(name, Transposed):
        return _of_transposed(new)
    if isinstance(new, Transposed):
        return replace(name, fqn=new.fqn, transposed=not name.transposed)
    if isinstance(name, Row) and isinstance(new, Row):
        return replace(name, fqn=new.fqn, within=(*name.within, *new.rows))
    if isinstance(name, Rows) and isinstance(new, Parts):
        parts = replace(new, whole=name.stacked, rows=name.dim)
        return replace(parts, transposed=True, dim_after=True) if name.transposed else parts
    fqn = _one_name(new, name.fqn, step)
    if isinstance(name, Row):
        return replace(name, fqn=fqn)
    return replace(name, fqn=fqn, stacked=_whole_name(step, name.stacked))


def _of_transposed(new: Renamed) -> Renamed:
    """Return a step's answer for the name of a tensor that was transposed before."""
    match new:
        case str():
            return Transposed(new)
        case Transposed():
            return new.fqn  # twice
        case Row() | Rows():
            return replace(new, transposed=not new.transposed)
        case Parts():
            return replace(new, transposed=not new.transposed, dim_after=not new.dim_after)


def _transposed_parts(step: Rename, name: Parts, answers: Sequence[Renamed]) -> Parts:
    """Return the parts of a tensor that a step transposes, each of them.

    Raises:
        CannotPlace: It transposes some of them.
    """
    others = [fqn for fqn, of in zip(name.fqns, answers, strict=True) if isinstance(of, str)]
    if others:
        raise CannotPlace(
            f"{step!r} would transpose some of the parts of {name.whole}, and not "
            f"{', '.join(others)}",
            "way out:     a pattern that all of the parts match; or a Transpose before the Split",
        )
    return replace(name, transposed=not name.transposed)


def _one_name(new: Renamed, name: str, step: Rename) -> str:
    if not isinstance(new, str):
        raise CannotPlace(
            f"{step!r} would stack or unstack {name}, which already is stacked or unstacked"
        )
    return new


def _whole_name(step: Rename, name: str) -> str:
    """Return the name of the whole tensor for the rules, which do not name its rows or parts."""
    new = step(name)
    return new if isinstance(new, str) else name


def _matches(step: Rename, key: str) -> bool:
    """Whether the pattern of a step matches a key; a ``Renumber`` may leave such a key as it is."""
    if isinstance(step, Renumber):
        return number_in(step.pattern, key) is not None
    return step(key) != key


def recorded(rename: Any) -> tuple[Step, ...]:
    """Return the steps of a rename that a checkpoint keeps, each once."""
    return tuple(dict.fromkeys([Step(*step[:4]) for step in steps(rename)]))
