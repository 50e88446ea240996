"""Several renames, one after the other.

All renames of the package are small values that can be pickled. They find their pattern anywhere
in a key, so that optimizer state is renamed with its parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcp_placements.names.rename_results import Parts, Rename, Renamed, RenameError, Row
from dcp_placements.names.renumber import Numbered, ReadyRename, Renumber, Replace


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
    """

    steps: tuple[Rename, ...]

    def __init__(self, *steps: Rename) -> None:
        object.__setattr__(self, "steps", steps)

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
        """Return the key alone: for a row the key of its stack, for rows the one with ``{}``."""
        renamed = self(key)
        return renamed if isinstance(renamed, str) else renamed.fqn

    @property
    def numbered(self) -> tuple[Numbered, ...]:
        """The numbers that all ranks are checked for, by the names that the last step leaves."""
        return tuple(
            replace(one, pattern=self.pattern_after(at, one.pattern))
            for at, step in enumerate(self.steps)
            for one in numbering(step)
        )

    def pattern_after(self, at: int, pattern: str) -> str:
        """Return the pattern of step ``at`` in the checkpoint's keys: as later steps replace it."""
        for later in self.steps[at + 1 :]:
            if isinstance(later, Replace):
                pattern = later(pattern)
        return pattern

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


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


def numbering(rename: object) -> tuple[Numbered, ...]:
    """Return the numbers that a rename gives; nothing for any other function."""
    return rename.numbered if isinstance(rename, Renumber | Renames) else ()
