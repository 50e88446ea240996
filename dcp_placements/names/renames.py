"""Several renames, one after the other.

All renames of the package are small values that can be pickled. They find their pattern anywhere
in a key, so that optimizer state is renamed with its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeGuard

from dcp_placements.names.rename_results import Parts, Rename, Renamed, RenameError, Row
from dcp_placements.names.renumber import Numbered, ReadyRename, Renumber, Replace
from dcp_placements.rules.matches import Declared


@dataclass(frozen=True, slots=True, init=False)
class Renames(ReadyRename):
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
            key. Steps after a ``Stack``, an ``Unstack`` or a ``Split`` rename the keys that it
            makes.
        optional: Do not warn of steps that match nothing: for the names of a family of models,
            each of which has some of them.

    Attributes:
        flat: The steps, with those of a ``Renames`` among them one by one.
    """

    steps: tuple[Rename, ...]
    optional: bool
    flat: tuple[Rename, ...] = field(repr=False, compare=False)

    def __init__(self, *steps: Rename, optional: bool = False) -> None:
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "optional", optional)
        object.__setattr__(self, "flat", tuple(chain.from_iterable(map(steps_of, steps))))

    def __call__(self, key: str) -> Renamed:
        name: Renamed = key
        for step in self.flat:
            name = _renamed(step, name)
        return name

    def name(self, key: str) -> str:
        """Return the key alone: for a row the key of its stack, for rows the one with ``{}``."""
        renamed = self(key)
        return renamed if isinstance(renamed, str) else renamed.fqn

    @property
    def numbered(self) -> tuple[Numbered, ...]:
        """The numbers that all ranks are checked for, by the names that the last step leaves."""
        return tuple(
            replace(one, pattern=self.pattern_after(at, one.pattern))
            for at, step in enumerate(self.flat)
            for one in numbering(step)
        )

    def pattern_after(self, at: int, pattern: str) -> str:
        """Return the pattern of step ``at`` of ``flat`` in the checkpoint's keys.

        Later steps may replace it.
        """
        for later in self.flat[at + 1 :]:
            if isinstance(later, Replace):
                pattern = later(pattern)
        return pattern

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


def _renamed(step: Rename, name: Renamed) -> Renamed:
    """Return what a step makes of the name that the steps before it gave."""
    if isinstance(name, str):
        return step(name)
    if isinstance(name, Row):
        return _row_of(name, step(name.fqn), step)
    if isinstance(name, Parts):
        fqns = [_one_name(step, fqn) for fqn in name.fqns]
        return replace(name, fqns=tuple(fqns), whole=_whole_name(step, name.whole))
    if isinstance(parts := step(name.fqn), Parts):
        return replace(parts, whole=name.stacked, rows=name.dim)
    return replace(name, fqn=_one_name(step, name.fqn), stacked=_whole_name(step, name.stacked))


def _row_of(row: Row, renamed: Renamed, step: Rename) -> Row:
    """Return a row of a stack that a later step renames, or makes a row itself."""
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
    """Return the name of the whole tensor for the rules, which do not name its rows or parts."""
    renamed = step(name)
    return renamed if isinstance(renamed, str) else name


def steps_of(rename: Any) -> Iterator[Any]:
    """Yield the steps of a rename, those of its ``Renames`` one by one; none for None.

    A subclass of ``Renames`` may do more than its steps if it has a call of its own: it is one.
    """
    if _is_its_steps(rename):
        for step in rename.steps:
            yield from steps_of(step)
    elif rename is not None:
        yield rename


def _is_its_steps(rename: Any) -> TypeGuard[Renames]:
    return isinstance(rename, Renames) and type(rename).__call__ is Renames.__call__


class Renaming:
    """Renames keys, and notes which steps of the rename match one, as the steps before leave it.

    >>> renaming = Renaming(
    ...     Renames(Replace("module", ""), Renumber("expert.{}", [0, 1], total=2))
    ... )
    >>> renaming("module.w")
    'w'
    >>> {str(step): is_matched for step, is_matched in renaming.matches.items()}
    {"rename=Replace('module')": True, "rename=Renumber('expert.{}')": False}

    Args:
        rename: The rename.

    Attributes:
        matches: Whether each step matches a key. Functions of the user's, which may leave every key
            as it is, and the steps of ``Renames(..., optional=True)`` are left out.
    """

    def __init__(self, rename: Rename) -> None:
        self.matches = {declared_step(step): False for step in expected_steps(rename)}
        self._waiting = set(self.matches)
        self._steps: list[tuple[Any, Declared]] = [
            (step, declared_step(step)) for step in steps_of(rename)
        ]

    def __call__(self, key: str) -> Renamed:
        name: Renamed = key
        for step, declared in self._steps:
            if declared in self._waiting and any(map(step.matches, _fqns(name))):
                self._waiting.remove(declared)
                self.matches[declared] = True
            name = _renamed(step, name)
        return name


def expected_steps(rename: Any) -> Iterator[ReadyRename]:
    """Yield the steps that should match a key on some rank."""
    if _is_its_steps(rename):
        for step in () if rename.optional else rename.steps:
            yield from expected_steps(step)
    elif isinstance(rename, ReadyRename) and not isinstance(rename, Renames):
        yield rename


def declared_step(step: Any) -> Declared:
    """Return a step as what it declares: its pattern."""
    return Declared(getattr(step, "pattern", ""), type(step).__name__)


def _fqns(name: Renamed) -> tuple[str, ...]:
    if isinstance(name, str):
        return (name,)
    return (name.fqn,) if isinstance(name, Row) else name.fqns


def numbering(rename: object) -> tuple[Numbered, ...]:
    """Return the numbers that a rename gives; nothing for any other function."""
    return rename.numbered if isinstance(rename, Renumber | Renames) else ()
