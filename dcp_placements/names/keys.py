"""This rank's keys as the checkpoint's keys, and back.

A rank may have a local name for a tensor (the third of *its* experts). ``rename`` maps it to the
global name; rules, plans, messages and the file use only that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dcp_placements.errors import Fault, PlacementError, raise_faults

Path = tuple[str | int, ...]


class RenameError(PlacementError):
    """Why a key has no name in the checkpoint; becomes a ``Fault`` with the key."""

    def __init__(self, headline: str, *details: str) -> None:
        super().__init__("\n    ".join((headline, *details)))
        self.headline = headline
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return RenameError, (self.headline, *self.details)


@dataclass(frozen=True, slots=True)
class Row:
    """The answer of a rename for a tensor that is one row of a stacked one in the checkpoint.

    For example a parameter of one expert, if the checkpoint has one tensor ``[experts, ...]``.

    Attributes:
        fqn: The checkpoint's key, one for all rows.
        index: Which row it is.
        total: How many rows there are.
        dim: The dim of the stacked tensor that the rows lie along; its other dims are those of
            the row.
        within: The rows that the stack itself is, from the inside out: its layer, for example, if
            the checkpoint has one tensor ``[layers, experts, ...]``. Their ``fqn`` is not used.

    Raises:
        PlacementError: An index that is not among the rows.
    """

    fqn: str
    index: int
    total: int
    dim: int = 0
    within: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.total:
            raise RenameError(f"rename() gave row {self.index} of {self.total} for it")

    @property
    def rows(self) -> tuple[Row, ...]:
        """Itself and what it is within, from the inside out."""
        return (self, *self.within)

    @property
    def axes(self) -> tuple[tuple[int, int], ...]:
        """``(total, dim)`` of each of ``rows``: equal for all rows of one stack."""
        return tuple([(row.total, row.dim) for row in self.rows])

    @property
    def indices(self) -> tuple[int, ...]:
        """``index`` of each of ``rows``: another one for each row of a stack."""
        return tuple([row.index for row in self.rows])


@dataclass(frozen=True, slots=True)
class Rows:
    """The answer of a rename for a stacked tensor that is one tensor per row in the checkpoint.

    Attributes:
        fqn: The checkpoint's keys, ``{}`` for the number of the row.
        stacked: The name of the whole tensor in rules and messages.
        dim: The dim of the stacked tensor that the rows lie along.
    """

    fqn: str
    stacked: str
    dim: int = 0

    @property
    def fqns(self) -> tuple[str, ...]:
        """The checkpoint's keys of one row."""
        return (self.fqn,)


@dataclass(frozen=True, slots=True)
class Parts:
    """The answer of a rename for a fused tensor that is one tensor per part in the checkpoint.

    Attributes:
        fqns: The checkpoint's keys, in the order of the parts; ``{}`` for the number where the
            rows of a stack are fused.
        whole: The name of the fused tensor in rules and messages.
        dim: The dim of it, or of each row, that the parts lie along.
        sizes: The sizes of the parts relative to each other.
        groups: How many times the sequence of parts repeats.
        rows: The dim that the rows of a stack lie along; None if it is not a stack.
    """

    fqns: tuple[str, ...]
    whole: str
    dim: int
    sizes: tuple[int, ...]
    groups: int = 1
    rows: int | None = None

    @property
    def fqn(self) -> str:
        """All keys of one fused tensor, as one text."""
        return " + ".join(self.fqns)

    @property
    def stacked(self) -> str:
        """The name of the fused tensor in rules and messages."""
        return self.whole

    def spans(self, length: int) -> list[list[tuple[int, int]]]:
        """Return ``(start, stop)`` of every run of each part in a dim of ``length``.

        >>> Parts(("q", "k"), "qk", 0, (2, 1), groups=2).spans(6)
        [[(0, 2), (3, 5)], [(2, 3), (5, 6)]]

        Raises:
            ValueError: The parts do not fit it.
        """
        unit, rest = divmod(length, sum(self.sizes) * self.groups)
        if rest:
            raise ValueError(
                f"{length} on dim {self.dim} cannot be cut into {self.groups} x {self.sizes}"
            )
        spans: list[list[tuple[int, int]]] = [[] for _ in self.sizes]
        at = 0
        for _ in range(self.groups):
            for part, size in zip(spans, self.sizes, strict=True):
                part.append((at, at + size * unit))
                at += size * unit
        return spans


Renamed = str | Row | Rows | Parts
Rename = Callable[[str], Renamed]


class StackedRow(NamedTuple):
    """A value of this rank that is a row of one of the checkpoint's.

    Attributes:
        row: The answer of the rename.
        key: This rank's key.
        value: The value.
        path: Its path in the nested dict.
    """

    row: Row
    key: str
    value: Any
    path: Path | None


@dataclass(slots=True)
class Stacked:
    """Values of this rank that are rows of one of the checkpoint's; all have the same ``axes``."""

    rows: list[StackedRow]


@dataclass(slots=True)
class Unstacked:
    """A value of this rank that is one per row in the checkpoint.

    Attributes:
        name: The answer of the rename.
        value: The value.
        path: Its path in the nested dict.
    """

    name: Rows | Parts
    value: Any
    path: Path | None


def rename_keys(
    state_dict: dict[str, Any], mappings: dict[str, Path], rename: Rename | None
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the flat state dict and its paths under the checkpoint's keys.

    A ``Row``, ``Rows`` or ``Parts`` becomes a ``Stacked`` or ``Unstacked`` value, for ``unfold``.

    Args:
        state_dict: Flat, with this rank's keys.
        mappings: The path of each key in the nested dict.
        rename: Maps this rank's key to the checkpoint's; None changes nothing.

    Raises:
        PlacementError: Two keys of this rank become one, or ``rename`` has no name for one.
    """
    if rename is None:
        return state_dict, mappings
    renamed: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    source: dict[str, str] = {}
    faults = []
    for key, value in state_dict.items():
        try:
            new = rename(key)
        except RenameError as error:
            faults.append(Fault(key, error.headline, error.details))
            continue
        path = mappings.get(key)
        name = new if isinstance(new, str) else getattr(new, "fqn", None)
        if name is None or not isinstance(new, str | Row | Rows | Parts):
            faults.append(
                Fault(key, f"rename() gave {new!r} for it, which is no string, Row, Rows or Parts")
            )
        elif isinstance(new, Row) and _add_row(renamed, new, (key, value, path), source, faults):
            source.setdefault(name, key)
        elif name in source:
            faults.append(
                Fault(
                    name,
                    f"rename() gives this one name to both {source[name]} and {key}",
                    ("way out:     map every key of a rank to a key of its own",),
                )
            )
        else:
            source[name] = key
            renamed[name] = Unstacked(new, value, path) if isinstance(new, Rows | Parts) else value
        if name is not None and path is not None:
            paths.setdefault(name, path)
    raise_faults("keys could not be renamed", faults)
    return renamed, paths


def _add_row(
    renamed: dict[str, Any],
    row: Row,
    held: tuple[str, Any, Path | None],
    source: dict[str, str],
    faults: list[Fault],
) -> bool:
    """Add a row to its stack; whether its key is that of a stack."""
    stack = renamed.get(row.fqn)
    if stack is None and row.fqn not in source:
        stack = renamed[row.fqn] = Stacked([])
    if not isinstance(stack, Stacked):
        return False
    stack.rows.append(StackedRow(row, *held))
    first = stack.rows[0]
    if first.row.axes != row.axes:
        faults.append(
            Fault(
                row.fqn,
                f"rename() stacks {first.key} as one of {format_axes(first.row.axes)}, and "
                f"{held[0]} as one of {format_axes(row.axes)}",
            )
        )
    return True


def format_axes(axes: tuple[tuple[int, int], ...]) -> str:
    """Return ``Row.axes`` as short text."""
    return " within ".join([f"{total} rows on dim {dim}" for total, dim in axes])


def checkpoint_path(key: str, path: Path) -> Path:
    """Return the path of ``key`` in the nested dict that a reader of the checkpoint rebuilds.

    >>> checkpoint_path("model.layers.4.w", ("model", "layers.0.w"))
    ('model', 'layers.4.w')

    Components of the path that the rename did not change stay components.
    """
    if ".".join(map(str, path)) == key:
        return path
    head: list[str | int] = []
    rest = key
    for part in path[:-1]:
        if not rest.startswith(f"{part}."):
            break
        head.append(part)
        rest = rest[len(str(part)) + 1 :]
    tail: list[str | int] = []
    for part in reversed(path[len(head) + 1 :]):
        if not rest.endswith(f".{part}"):
            break
        tail.insert(0, part)
        rest = rest[: -len(str(part)) - 1]
    return (*head, rest, *tail)
