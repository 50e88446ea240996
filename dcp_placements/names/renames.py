"""Ready-made renames: this rank's numbers of experts and layers as the numbers of the whole.

A pipeline stage calls its first layer 0, as an expert-parallel rank does its first expert.
``Renumber`` says which ones they are; ``Renames`` chains several. All are small values that can be
pickled, and they find their pattern anywhere in a key, so that optimizer state is renamed with its
parameter.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dcp_placements.errors import PlacementError
from dcp_placements.names.keys import Parts, Rename, Renamed, RenameError, Row, Rows
from dcp_placements.rules.patterns import compile_pattern

Ids = Sequence[int]


def contiguous(counts: Sequence[int], at: int) -> range:
    """Return the numbers of one part where the parts follow each other.

    >>> contiguous([3, 5, 2], at=1)
    range(3, 8)

    Args:
        counts: How many each part has, in order: per ``ep`` rank, per pipeline stage, or for
            interleaved stages per chunk: ``contiguous(counts, at=chunk * stages + stage)``.
        at: Which part.

    Raises:
        PlacementError: No such part.
    """
    if not 0 <= at < len(counts):
        raise PlacementError(f"there is no part {at} of {len(counts)}: counts are {list(counts)}")
    start = sum(counts[:at])
    return range(start, start + counts[at])


@dataclass(frozen=True, slots=True)
class Numbered:
    """What a ``Renumber`` says of the checkpoint's keys, for the check of all ranks together.

    Attributes:
        pattern: Where the number stands in the checkpoint's keys.
        total: How many there are.
        ranges: Numbers that this rank has to itself, as ``(selector, start, stop)``.
    """

    pattern: str
    total: int
    ranges: tuple[tuple[str, int, int], ...]


class _Rename(ABC):
    """What all ready-made renames have in common."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, key: str) -> Renamed: ...

    def table(self, keys: Iterable[str]) -> str:
        """Return ``local key -> key in the checkpoint`` for the keys that change, one per line."""
        changed = [(key, _told(new)) for key in keys if (new := self(key)) != key]
        width = max((len(key) for key, _ in changed), default=0)
        return "\n".join(f"{key:{width}} -> {new}" for key, new in changed)


class Renumber(_Rename):
    """Renames a local number in a key to the number that it has in the whole.

    >>> rename = Renumber("experts.{}", [6, 1], total=8)
    >>> rename("layers.3.mlp.experts.0.w1.weight")
    'layers.3.mlp.experts.6.w1.weight'
    >>> rename("optim.state.layers.3.mlp.experts.1.w1.weight.exp_avg")
    'optim.state.layers.3.mlp.experts.1.w1.weight.exp_avg'
    >>> print(rename)
    experts.{}: 0 -> 6, 1 -> 1 (of 8)

    A pattern with a second placeholder takes the numbers by what stands there: another expert map
    per layer, or the layers of each chunk of an interleaved pipeline stage.

    >>> rename = Renumber("model{chunk}.layers.{}", {0: [0, 1], 1: [4, 5]}, total=8)
    >>> rename("model1.layers.0.mlp.weight")
    'model1.layers.4.mlp.weight'

    Args:
        pattern: Dotted components as in ``PlacementRules``, with ``{}`` for the number (a component
            or a part of one, ``weight{}``) and at most one ``{name}`` that selects among ``ids``.
        ids: This rank's numbers in the whole, in local order; any order, and the same number on
            several ranks for replicas. A ``range`` (as ``contiguous`` gives) says that no other
            range has a part of it. By what ``{name}`` stands for, where the pattern has one.
        total: How many there are on all ranks together: a save is refused where any is missing.
            None where some are left out on purpose.

    Raises:
        PlacementError: A pattern without ``{}``, or numbers outside ``0 .. total - 1``.
    """

    __slots__ = ("_by", "_maps", "_regex", "ids", "pattern", "total")

    def __init__(self, pattern: str, ids: Ids | Mapping[int | str, Ids], total: int | None) -> None:
        placeholders = re.findall(r"\{(\w*)\}", pattern)
        selectors = [name for name in placeholders if name]
        if placeholders.count("") != 1 or len(selectors) > 1:
            raise PlacementError(
                f"pattern {pattern!r} must have one {{}} where the number stands, and at most one "
                "{name} beside it, as in 'layers.{layer}.experts.{}'"
            )
        if bool(selectors) != isinstance(ids, Mapping):
            wanted = "needs ids by what {name} stands for" if selectors else "needs ids as a list"
            raise PlacementError(f"pattern {pattern!r} {wanted}, not {ids!r}")
        self.pattern = pattern
        self.ids = ids
        self.total = total
        self._by = selectors[0] if selectors else None
        self._regex = _with_numbers(pattern, self._by)
        by = {str(k): v for k, v in ids.items()} if isinstance(ids, Mapping) else {"": ids}
        for known in by.values():
            for number in known:
                if number < 0 or (total is not None and number >= total):
                    among = "0 and up" if total is None else f"0 .. {total - 1}"
                    raise PlacementError(f"number {number} of {pattern!r} is not among {among}")
        self._maps = {
            selector: {str(local): str(number) for local, number in enumerate(known)}
            for selector, known in by.items()
        }

    def __call__(self, key: str) -> str:
        found = self._regex.search("." + key)
        if found is None:
            return key
        selector = found["by"] if self._by else ""
        known = self._maps.get(selector)
        number = None if known is None else known.get(found[NUMBER])
        if number is None:
            raise self._unknown(selector, found[NUMBER])
        start, stop = found.span(NUMBER)
        return f"{key[: start - 1]}{number}{key[stop - 1 :]}"

    def _unknown(self, selector: str, local: str) -> RenameError:
        if selector not in self._maps:
            return RenameError(
                f"{self.pattern} has no ids where {{{self._by}}} is {selector}",
                f"it has them for {', '.join(self._maps)}",
                "way out:     give ids for it, an empty list where this rank has none",
            )
        known = self._maps[selector]
        return RenameError(
            f"local number {local} of {self.pattern} is none of the {len(known)} of this rank",
            f"ids:         {_format_map(known) or 'none'}"
            + ("" if self.total is None else f" (of {self.total})"),
            "likely:      ids= of another rank, or of a model with fewer of them",
            "way out:     one id for every local number, in local order",
        )

    @property
    def numbered(self) -> tuple[Numbered, ...]:
        """What all ranks together are checked for."""
        if self.total is None:
            return ()
        by = self.ids.items() if isinstance(self.ids, Mapping) else [("", self.ids)]
        ranges = [
            (str(selector), known.start, known.stop)
            for selector, known in by
            if isinstance(known, range) and known.step == 1 and len(known)
        ]
        return (Numbered(self.pattern, self.total, tuple(ranges)),)

    def numbers(self, pattern: str) -> dict[str, set[int]]:
        """Return this rank's numbers by what stands in ``pattern`` for ``{name}``.

        Where ``pattern`` (its own, after a ``Replace``) has no such part: all, under ``""``.
        """
        if not isinstance(self.ids, Mapping):
            return {"": set(self.ids)}
        if f"{{{self._by}}}" not in pattern:
            return {"": {number for known in self.ids.values() for number in known}}
        return {str(selector): set(known) for selector, known in self.ids.items()}

    def __str__(self) -> str:
        of = "" if self.total is None else f" (of {self.total})"
        if self._by is None:
            return f"{self.pattern}: {_format_map(self._maps['']) or 'none'}{of}"
        return "\n".join(
            f"{self.pattern.replace(f'{{{self._by}}}', selector)}: {_format_map(known) or 'none'}"
            f"{of}"
            for selector, known in self._maps.items()
        )

    def __repr__(self) -> str:
        return f"Renumber({self.pattern!r}, {self.ids!r}, total={self.total})"

    def __reduce__(self) -> tuple[object, ...]:
        return Renumber, (self.pattern, self.ids, self.total)


class Replace(_Rename):
    """Renames a run of components, or drops it: a stage's prefix that the whole does not have.

    >>> Replace("model_pp*", "model")("model_pp3.layers.0.weight")
    'model.layers.0.weight'
    >>> Replace("module", "")("module.layers.0.weight")
    'layers.0.weight'

    Args:
        pattern: Dotted components as in ``PlacementRules``; the first run that matches is replaced.
        by: The components to put there; empty for none.
    """

    __slots__ = ("_regex", "by", "pattern")

    def __init__(self, pattern: str, by: str) -> None:
        self.pattern = pattern
        self.by = by
        self._regex = compile_pattern(pattern)

    def __call__(self, key: str) -> str:
        found = self._regex.search("." + key)
        if found is None:
            return key
        return _replaced(key, found, self.by)

    def __str__(self) -> str:
        return f"{self.pattern} -> {self.by or 'dropped'}"

    def __repr__(self) -> str:
        return f"Replace({self.pattern!r}, {self.by!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Replace, (self.pattern, self.by)


class Stack(_Rename):
    """Stores tensors that differ by a number in their names as one, with a dim more.

    >>> Stack("experts.{}.w*", total=8)("layers.0.experts.5.w1.weight")
    Row(fqn='layers.0.experts.w1.weight', index=5, total=8, dim=0, within=())

    The numbers are those of the whole: ``Renumber`` comes first. Scalars (``step``) become a tensor
    ``[total]``; objects (``lr``) must be equal and are stored once.

    A ``Stack`` behind another stacks what that one makes: that of the experts, then that of the
    layers gives a tensor ``[layers, experts, ...]``. A rank may have other experts of each layer.

    Args:
        pattern: Dotted components as in ``PlacementRules``, with ``{}`` for the number.
        total: How many rows there are.
        dim: The dim of the stacked tensor that they lie along.

    Raises:
        PlacementError: A pattern without ``{}``.
    """

    __slots__ = ("_regex", "dim", "pattern", "total")

    def __init__(self, pattern: str, total: int, *, dim: int = 0) -> None:
        _check_number(pattern)
        self.pattern = pattern
        self.total = total
        self.dim = dim
        self._regex = _with_numbers(pattern, None)

    def __call__(self, key: str) -> Renamed:
        dotted = "." + key
        found = self._regex.search(dotted)
        if found is None:
            return key
        start, stop = found.span(NUMBER)
        number = int(found[NUMBER])
        if number >= self.total:
            raise RenameError(
                f"number {number} of {self.pattern} is beyond the {self.total} rows of the stack",
                "way out:     total= of the whole model",
            )
        if dotted[start - 1] == "." and dotted[stop : stop + 1] in ("", "."):
            start -= 1  # a component of its own goes with its dot
        name = dotted[:start] + dotted[stop:]
        return Row(name.removeprefix("."), number, self.total, self.dim)

    def __str__(self) -> str:
        return f"{self.pattern} -> one tensor of {self.total} rows on dim {self.dim}"

    def __repr__(self) -> str:
        return f"Stack({self.pattern!r}, {self.total}, dim={self.dim})"

    def __reduce__(self) -> tuple[object, ...]:
        return _make_stack, (self.pattern, self.total, self.dim)


def _make_stack(pattern: str, total: int, dim: int) -> Stack:
    return Stack(pattern, total, dim=dim)


class Unstack(_Rename):
    """Stores the rows of a tensor as tensors of their own, with a number in their names.

    >>> Unstack("experts.{}.w*")("layers.0.experts.w1.weight")
    Rows(fqn='layers.0.experts.{}.w1.weight', stacked='layers.0.experts.w1.weight', dim=0)

    The rules speak of the stacked tensor, by the name that it has here. A scalar or an object of
    its optimizer state goes to every row.

    Args:
        pattern: Dotted components as in ``PlacementRules``, with ``{}`` where the number is to
            stand; without it, it is found in this rank's keys.
        dim: The dim of the stacked tensor that the rows lie along.

    Raises:
        PlacementError: A pattern without ``{}``.
    """

    __slots__ = ("_own", "_regex", "dim", "pattern")

    def __init__(self, pattern: str, *, dim: int = 0) -> None:
        _check_number(pattern)
        self.pattern = pattern
        self.dim = dim
        # A component of its own comes with its dot; both are where the empty group stands.
        self._own = "{}" in pattern.split(".")
        regex = compile_pattern(pattern.replace("{}", "\0")).pattern
        regex = regex.replace("\\.\0" if self._own else "\0", f"(?P<{NUMBER}>)")
        self._regex = re.compile(regex)

    def __call__(self, key: str) -> Renamed:
        dotted = "." + key
        found = self._regex.search(dotted)
        if found is None:
            return key
        at = found.start(NUMBER)
        name = f"{dotted[:at]}{'.' if self._own else ''}{{}}{dotted[at:]}"
        return Rows(name.removeprefix("."), key, self.dim)

    def __str__(self) -> str:
        return f"rows of dim {self.dim} -> {self.pattern}"

    def __repr__(self) -> str:
        return f"Unstack({self.pattern!r}, dim={self.dim})"

    def __reduce__(self) -> tuple[object, ...]:
        return _make_unstack, (self.pattern, self.dim)


def _make_unstack(pattern: str, dim: int) -> Unstack:
    return Unstack(pattern, dim=dim)


class Split(_Rename):
    """Stores the parts of a fused tensor as tensors of their own.

    >>> Split("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))("layers.0.mlp.gate_up_proj")
    Parts(fqns=('layers.0.mlp.gate_proj', 'layers.0.mlp.up_proj'), \
whole='layers.0.mlp.gate_up_proj', dim=0, sizes=(1, 1), groups=1, rows=None)

    Behind an ``Unstack`` it splits every row. The rules speak of the fused tensor. A scalar or an
    object of its optimizer state goes to every part.

    Args:
        pattern: Dotted components as in ``PlacementRules``; the first run that matches is replaced.
        names: The components to put there, one per part.
        dim: The dim that the parts lie along; behind an ``Unstack`` that of a row.
        sizes: Of the parts, in proportion to each other: heads of q, k and v, say. By default they
            are equal.
        groups: How often the parts follow each other along the dim: query groups that each have
            their own q, k and v.

    Raises:
        PlacementError: No names, or not as many sizes, or sizes or groups that count nothing.
    """

    __slots__ = ("_regex", "dim", "groups", "names", "pattern", "sizes")

    def __init__(
        self,
        pattern: str,
        names: Sequence[str],
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        groups: int = 1,
    ) -> None:
        self.pattern = pattern
        self.names = tuple(names)
        self.dim = dim
        self.sizes = (1,) * len(self.names) if sizes is None else tuple(sizes)
        self.groups = groups
        if not self.names or len(self.sizes) != len(self.names) or min(*self.sizes, groups) < 1:
            raise PlacementError(
                f"parts of {pattern!r} need a name and a size from 1 on each: {self.names}, "
                f"sizes {self.sizes}, {groups} groups"
            )
        self._regex = compile_pattern(pattern)

    def __call__(self, key: str) -> Renamed:
        found = self._regex.search("." + key)
        if found is None:
            return key
        fqns = [_replaced(key, found, name) for name in self.names]
        return Parts(tuple(fqns), key, self.dim, self.sizes, self.groups)

    def __str__(self) -> str:
        return f"{self.pattern} -> {' + '.join(self.names)} of dim {self.dim}"

    def __repr__(self) -> str:
        told = f"dim={self.dim}, sizes={self.sizes}, groups={self.groups}"
        return f"Split({self.pattern!r}, {self.names}, {told})"

    def __reduce__(self) -> tuple[object, ...]:
        return _make_split, (self.pattern, self.names, self.dim, self.sizes, self.groups)


def _make_split(
    pattern: str, names: tuple[str, ...], dim: int, sizes: tuple[int, ...], groups: int
) -> Split:
    return Split(pattern, names, dim=dim, sizes=sizes, groups=groups)


class Renames(_Rename):
    """Renames by several functions, one after the other.

    >>> rename = Renames(
    ...     Renumber("model_pp1.layers.{}", [2, 3], total=4), Replace("model_pp*", "model")
    ... )
    >>> rename("model_pp1.layers.0.weight")
    'model.layers.2.weight'
    >>> print(rename)
    model_pp1.layers.{}: 0-1 -> 2-3 (of 4)
    model_pp* -> model

    Args:
        steps: ``Renumber``, ``Replace``, ``Stack``, ``Unstack``, ``Split``, or any function of a
            key. What stands behind a ``Stack``, an ``Unstack`` or a ``Split`` renames the keys that
            it makes.
    """

    __slots__ = ("steps",)

    def __init__(self, *steps: Rename) -> None:
        self.steps = steps

    def __call__(self, key: str) -> Renamed:
        name: Renamed = key
        for step in self.steps:
            if isinstance(name, str):
                name = step(name)
            elif isinstance(name, Row):
                name = _row_of(name, step(name.fqn), step)
            elif isinstance(name, Parts):
                fqns = [_one_name(step, fqn) for fqn in name.fqns]
                name = replace(name, fqns=tuple(fqns), whole=_whole_name(step, name.whole))
            elif isinstance(parts := step(name.fqn), Parts):
                name = replace(parts, whole=name.stacked, rows=name.dim)
            else:
                name = replace(
                    name, fqn=_one_name(step, name.fqn), stacked=_whole_name(step, name.stacked)
                )
        return name

    def name(self, key: str) -> str:
        """Return the key alone: of a row that of its stack, of rows the one with ``{}`` in it."""
        renamed = self(key)
        return renamed if isinstance(renamed, str) else renamed.fqn

    @property
    def numbered(self) -> tuple[Numbered, ...]:
        """What all ranks together are checked for, by the names that the last step leaves."""
        found = []
        for at, step in enumerate(self.steps):
            for known in numbering(step):
                pattern = known.pattern
                for later in self.steps[at + 1 :]:
                    if isinstance(later, Replace):
                        pattern = later(pattern)
                found.append(replace(known, pattern=pattern))
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))

    def __repr__(self) -> str:
        return f"Renames({', '.join(map(repr, self.steps))})"

    def __reduce__(self) -> tuple[object, ...]:
        return Renames, self.steps


NUMBER = "number"


def _row_of(row: Row, renamed: Renamed, step: Rename) -> Row:
    """Return a row of a stack that is called otherwise, or is a row itself."""
    if isinstance(renamed, Row):
        return replace(row, fqn=renamed.fqn, within=(*row.within, *renamed.rows))
    return replace(row, fqn=_as_name(renamed, row.fqn, step))


def _one_name(step: Rename, name: str) -> str:
    return _as_name(step(name), name, step)


def _as_name(renamed: Renamed, name: str, step: Rename) -> str:
    if not isinstance(renamed, str):
        raise RenameError(
            f"{step!r} would stack or unstack {name}, which already is stacked or unstacked"
        )
    return renamed


def _whole_name(step: Rename, name: str) -> str:
    """Return what rules call a tensor; they speak of none of its rows or parts."""
    renamed = step(name)
    return renamed if isinstance(renamed, str) else name


def _check_number(pattern: str) -> None:
    if re.findall(r"\{(\w*)\}", pattern) != [""]:
        raise PlacementError(
            f"pattern {pattern!r} must have one {{}} where the number stands, as in 'experts.{{}}'"
        )


def _replaced(key: str, found: re.Match[str], by: str) -> str:
    """Return a key with other components, or none, for the run found in ``"." + key``."""
    start, stop = found.span()
    return ".".join([part for part in (key[: max(start - 1, 0)], by, key[stop:]) if part])


def _told(name: object) -> str:
    if isinstance(name, Row):
        rows = " of ".join([f"row {row.index} of {row.total}" for row in name.rows])
        return f"{name.fqn}, {rows}"
    return name.fqn if isinstance(name, Rows | Parts) else str(name)


def numbering(rename: object) -> tuple[Numbered, ...]:
    """Return what a rename says of numbers; nothing for a function that is none of the above."""
    return rename.numbered if isinstance(rename, Renumber | Renames) else ()


FUNCTION = "function"

Step = tuple[str, str, int | None]
"""The class of a rename, its pattern in the checkpoint's keys, and how many numbers there are."""


def renames_in_force(
    rename: object, local: Collection[str], renamed: Collection[str]
) -> tuple[Step, ...]:
    """Return what a checkpoint is to keep of a rename.

    Of a function that is none of the above it is where its numbers stand, as far as the keys of
    this rank show.

    Args:
        rename: The rename.
        local: This rank's keys.
        renamed: The same as the checkpoint's.
    """
    if rename is None:
        return ()
    found: dict[Step, None] = {}
    steps = rename.steps if isinstance(rename, Renames) else (rename,)
    for at, step in enumerate(steps):
        if isinstance(step, Renumber | Stack | Unstack | Split):
            pattern = step.pattern
            for later in steps[at + 1 :]:
                if isinstance(later, Replace):
                    pattern = later(pattern)
            total = step.total if isinstance(step, Renumber | Stack) else None
            found[type(step).__name__, pattern, total] = None
        elif isinstance(step, Replace):
            found[type(step).__name__, str(step), None] = None
        else:
            patterns: set[str] = set()
            if len(local) == len(renamed):
                for one, other in zip(local, renamed, strict=True):
                    if one != other:
                        patterns.update(_renumbered(one, other))
            name = getattr(step, "__qualname__", type(step).__name__)
            for pattern in sorted(patterns) or [name]:
                found[FUNCTION, pattern, None] = None
    return tuple(found)


def _renumbered(local: str, renamed: str) -> Iterator[str]:
    """Yield a pattern for each number that differs between two names of one tensor.

    >>> list(_renumbered("experts.0.w1", "model.experts.4.w1"))
    ['experts.{}']
    """
    one, other = _DIGITS.split(local), _DIGITS.split(renamed)
    # From the end, as long as the text is the same: a prefix may have been put before it.
    for at in range(1, min(len(one), len(other)) - 1, 2):
        component = one[-at - 2].rpartition(".")[2]
        if one[-at] != other[-at] or component != other[-at - 2].rpartition(".")[2]:
            return
        if one[-at - 1] != other[-at - 1]:
            head = "".join(other[: -at - 1])
            before, _, stem = head.rpartition(".")
            pattern = f"{stem}{{}}{other[-at].partition('.')[0]}"
            yield f"{before.rpartition('.')[2]}.{pattern}" if before and not stem else pattern


_DIGITS = re.compile(r"(\d+)")


def holder(rename: object) -> Callable[[str], bool] | None:
    """Return whether a rank has a key of the checkpoint, as far as the numbers in it say.

    >>> holds = holder(Renumber("experts.{}", [6, 1], total=8))
    >>> holds("layers.3.experts.6.w1"), holds("layers.3.experts.0.w1"), holds("norm.weight")
    (True, False, True)

    Returns:
        None for a rename that is none of the above: nobody knows what keys it makes.
    """
    steps = rename.steps if isinstance(rename, Renames) else (rename,)
    known: list[tuple[re.Pattern[str], dict[str, set[int]]]] = []
    for at, step in enumerate(steps):
        if isinstance(step, Renumber):
            pattern = step.pattern
            for later in steps[at + 1 :]:
                if isinstance(later, Replace):
                    pattern = later(pattern)
            known.append((number_finder(pattern), step.numbers(pattern)))
        elif not isinstance(step, Replace):
            return None

    def holds(key: str) -> bool:
        for finder, numbers in known:
            found = finder.search("." + key)
            if found is not None:
                selector = found["by"] if "by" in finder.groupindex else ""
                if int(found[NUMBER]) not in numbers.get(selector, ()):
                    return False
        return True

    return holds


def number_finder(pattern: str) -> re.Pattern[str]:
    """Return what finds the number of ``pattern`` in ``"." + key``, as its group ``NUMBER``."""
    named = re.findall(r"\{(\w+)\}", pattern)
    return _with_numbers(pattern, named[0] if named else None)


def _with_numbers(pattern: str, selector: str | None) -> re.Pattern[str]:
    # The placeholders pass through compile_pattern as characters that it leaves alone.
    plain = pattern.replace("{}", "\0")
    if selector is not None:
        plain = plain.replace(f"{{{selector}}}", "\1")
    regex = compile_pattern(plain).pattern
    # Beside a * of the same component the number is all of the digits.
    regex = regex.replace("\0", rf"(?<!\d)(?P<{NUMBER}>\d+)(?!\d)")
    return re.compile(regex.replace("\1", "(?P<by>[^.]+)"))


def _format_map(known: Mapping[str, str]) -> str:
    runs: list[list[int]] = []
    for local, number in ((int(a), int(b)) for a, b in known.items()):
        if runs and number == runs[-1][2] + runs[-1][1] - runs[-1][0] + 1:
            runs[-1][1] = local
        else:
            runs.append([local, local, number])
    told = [
        f"{a} -> {number}" if a == b else f"{a}-{b} -> {number}-{number + b - a}"
        for a, b, number in runs
    ]
    return ", ".join(told)
