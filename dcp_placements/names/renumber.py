"""Renames of one name to another: local numbers of experts and layers become global ones.

A pipeline stage calls its first layer 0, as an expert-parallel rank does its first expert.
``Renumber`` maps these numbers to the global ones; ``Replace`` maps or drops components.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dcp_placements.errors import PlacementError
from dcp_placements.names.numbers import NUMBER, compile_with_number
from dcp_placements.names.rename_results import Parts, Renamed, RenameError, Row, Rows
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
    """The numbers that a ``Renumber`` gives, for the check over all ranks.

    Attributes:
        pattern: Where the number stands in the checkpoint's keys.
        total: How many there are.
        ranges: Numbers that no other rank has a part of, as ``(selector, start, stop)``.
    """

    pattern: str
    total: int
    ranges: tuple[tuple[str, int, int], ...]


class ReadyRename(ABC):
    """The base of all renames of this package."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, key: str) -> Renamed: ...

    def matches(self, key: str) -> bool:
        """Whether its pattern is in a key."""
        return self(key) != key

    def table(self, keys: Iterable[str]) -> str:
        """Return ``local key -> key in the checkpoint`` for the keys that change, one per line."""
        changed = [(key, _format_name(new)) for key in keys if (new := self(key)) != key]
        width = max((len(key) for key, _ in changed), default=0)
        return "\n".join(f"{key:{width}} -> {new}" for key, new in changed)


@dataclass(frozen=True, slots=True)
class Renumber(ReadyRename):
    """Renames a local number in a key to the number that it has in the whole.

    >>> rename = Renumber("experts.{}", [6, 1], total=8)
    >>> rename("layers.3.mlp.experts.0.w1.weight")
    'layers.3.mlp.experts.6.w1.weight'
    >>> rename("optim.state.layers.3.mlp.experts.1.w1.weight.exp_avg")
    'optim.state.layers.3.mlp.experts.1.w1.weight.exp_avg'
    >>> print(rename)
    experts.{}: 0 -> 6, 1 -> 1 (of 8)

    A second placeholder of the pattern selects the numbers: a different expert map per layer, or
    the layers of each chunk of an interleaved pipeline stage.

    >>> rename = Renumber("model{chunk}.layers.{}", {0: [0, 1], 1: [4, 5]}, total=8)
    >>> rename("model1.layers.0.mlp.weight")
    'model1.layers.4.mlp.weight'

    Args:
        pattern: Dotted components as in ``PlacementRules``, with ``{}`` for the number (a component
            or a part of one, ``weight{}``) and at most one ``{name}`` that selects among ``ids``.
        ids: This rank's numbers in the whole, in local order; any order, and the same number on
            several ranks for replicas. A ``range`` (as ``contiguous`` returns) declares that no
            other range has a part of it. A mapping from the text of ``{name}`` to the numbers, if
            the pattern has one.
        total: How many there are on all ranks together: a save is refused if any is missing.
            None if some are left out on purpose.

    Raises:
        PlacementError: A pattern without ``{}``, or numbers outside ``0 .. total - 1``.
    """

    pattern: str
    ids: Ids | Mapping[int | str, Ids] = field(hash=False)
    total: int | None
    _by: str | None = field(init=False, repr=False, compare=False)
    _maps: dict[str, dict[str, str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pattern, total = self.pattern, self.total
        placeholders = re.findall(r"\{(\w*)\}", pattern)
        selectors = [name for name in placeholders if name]
        if placeholders.count("") != 1 or len(selectors) > 1:
            raise PlacementError(
                f"pattern {pattern!r} must have one {{}} where the number stands, and at most one "
                "{name} beside it, as in 'layers.{layer}.experts.{}'"
            )
        if bool(selectors) != isinstance(self.ids, Mapping):
            wanted = "needs ids by what {name} stands for" if selectors else "needs ids as a list"
            raise PlacementError(f"pattern {pattern!r} {wanted}, not {self.ids!r}")
        ids = self.ids if isinstance(self.ids, Mapping) else {"": self.ids}
        ids = {key: each if isinstance(each, range) else tuple(each) for key, each in ids.items()}
        for number in [number for each in ids.values() for number in each]:
            if number < 0 or (total is not None and number >= total):
                among = "0 and up" if total is None else f"0 .. {total - 1}"
                raise PlacementError(f"number {number} of {pattern!r} is not among {among}")
        maps = {
            str(selector): {str(local): str(number) for local, number in enumerate(each)}
            for selector, each in ids.items()
        }
        object.__setattr__(self, "ids", ids if selectors else ids[""])
        object.__setattr__(self, "_by", selectors[0] if selectors else None)
        object.__setattr__(self, "_maps", maps)
        compile_with_number(pattern, self._by)

    def __call__(self, key: str) -> str:
        match = compile_with_number(self.pattern, self._by).search("." + key)
        if match is None:
            return key
        selector = match["by"] if self._by else ""
        number = self._maps.get(selector, {}).get(match[NUMBER])
        if number is None:
            raise self._unknown(selector, match[NUMBER])
        start, stop = match.span(NUMBER)
        return f"{key[: start - 1]}{number}{key[stop - 1 :]}"

    def matches(self, key: str) -> bool:
        """Whether its pattern is in a key, which may have the same number in the whole."""
        return compile_with_number(self.pattern, self._by).search("." + key) is not None

    def _unknown(self, selector: str, local: str) -> RenameError:
        if selector not in self._maps:
            return RenameError(
                f"{self.pattern} has no ids where {{{self._by}}} is {selector}",
                f"it has them for {', '.join(self._maps)}",
                "way out:     give ids for it, an empty list where this rank has none",
            )
        numbers = self._maps[selector]
        return RenameError(
            f"local number {local} of {self.pattern} is none of the {len(numbers)} of this rank",
            f"ids:         {_format_map(numbers) or 'none'}"
            + ("" if self.total is None else f" (of {self.total})"),
            "likely:      ids= of another rank, or of a model with fewer of them",
            "way out:     one id for every local number, in local order",
        )

    @property
    def numbered(self) -> tuple[Numbered, ...]:
        """The numbers that all ranks are checked for."""
        if self.total is None:
            return ()
        by = self.ids.items() if isinstance(self.ids, Mapping) else [("", self.ids)]
        ranges = [
            (str(selector), ids.start, ids.stop)
            for selector, ids in by
            if isinstance(ids, range) and ids.step == 1 and len(ids)
        ]
        return (Numbered(self.pattern, self.total, tuple(ranges)),)

    def numbers(self, pattern: str) -> dict[str, set[int]]:
        """Return this rank's numbers by the text of ``{name}`` in ``pattern``.

        All of them under ``""`` if ``pattern`` (its own, after a ``Replace``) has no ``{name}``.
        """
        if not isinstance(self.ids, Mapping):
            return {"": set(self.ids)}
        if f"{{{self._by}}}" not in pattern:
            return {"": {number for ids in self.ids.values() for number in ids}}
        return {str(selector): set(ids) for selector, ids in self.ids.items()}

    def __str__(self) -> str:
        of = "" if self.total is None else f" (of {self.total})"
        if self._by is None:
            return f"{self.pattern}: {_format_map(self._maps['']) or 'none'}{of}"
        return "\n".join(
            f"{self.pattern.replace(f'{{{self._by}}}', selector)}: {_format_map(numbers) or 'none'}"
            f"{of}"
            for selector, numbers in self._maps.items()
        )


@dataclass(frozen=True, slots=True)
class Replace(ReadyRename):
    """Renames a run of components, or drops it: a prefix that only a pipeline stage has.

    >>> Replace("model_pp*", "model")("model_pp3.layers.0.weight")
    'model.layers.0.weight'
    >>> Replace("module", "")("module.layers.0.weight")
    'layers.0.weight'

    Args:
        pattern: Dotted components as in ``PlacementRules``; the first run that matches is replaced.
        by: The components to put there; empty for none.
    """

    pattern: str
    by: str

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)

    def __call__(self, key: str) -> str:
        match = compile_pattern(self.pattern).search("." + key)
        return key if match is None else replace_run(key, match, self.by)

    def __str__(self) -> str:
        return f"{self.pattern} -> {self.by or 'dropped'}"


def replace_run(key: str, match: re.Match[str], by: str) -> str:
    """Return a key with other components, or none, for the run matched in ``"." + key``."""
    start, stop = match.span()
    return ".".join([part for part in (key[: max(start - 1, 0)], by, key[stop:]) if part])


def _format_name(name: object) -> str:
    if isinstance(name, Row):
        rows = " of ".join([f"row {row.index} of {row.total}" for row in name.rows])
        return f"{name.fqn}, {rows}"
    return name.fqn if isinstance(name, Rows | Parts) else str(name)


def _format_map(numbers: Mapping[str, str]) -> str:
    runs: list[list[int]] = []
    for local, number in ((int(a), int(b)) for a, b in numbers.items()):
        if runs and number == runs[-1][2] + runs[-1][1] - runs[-1][0] + 1:
            runs[-1][1] = local
        else:
            runs.append([local, local, number])
    texts = [
        f"{a} -> {number}" if a == b else f"{a}-{b} -> {number}-{number + b - a}"
        for a, b, number in runs
    ]
    return ", ".join(texts)
