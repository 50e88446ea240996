"""Results as text (ranges of numbers, tables) and as the JSON of ``--json``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from math import isfinite
from typing import Any

from dcp_placements.layout.sharding import Box
from dcp_placements.short_text import (
    format_name,
    format_names,
    format_numbers,
)

Progress = Callable[[int, int], None]
"""``(done, total)``, in bytes where nothing else is stated."""

MAX_VALUE = 60
"""Characters of an object's value that are shown."""


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges; ``-`` for none.

    >>> ranges([3, 0, 1, 2]), ranges([])
    ('0-3', '-')
    """
    listed = list(numbers)
    return format_numbers(listed) if listed else "-"


def short(names: Sequence[str], limit: int = 3) -> str:
    """Return some names; ``-`` for none."""
    return format_names(names, limit) if names else "-"


def brief(value: object) -> str:
    """Return a value as text of up to ``MAX_VALUE`` characters."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def format_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = ""
) -> list[str]:
    """Return the lines of a table: its headings, then its rows.

    Args:
        columns: Headings.
        rows: Texts, one for each column.
        right: Headings of the columns of numbers, separated by spaces.

    >>> for line in format_table(("key", "bytes"), [("layers.0", "8")], right="bytes"):
    ...     print(line)
    key       bytes
    layers.0      8
    """
    cells = [list(columns), *[[format_name(cell) for cell in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            text.rjust(size) if heading in right.split() else text.ljust(size)
            for text, size, heading in zip(row, widths, columns, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def to_json(result: Any) -> Any:
    """Return a result as dicts, lists and scalars, under the names that the guide of cli lists.

    A dataclass or named tuple becomes a dict of its fields, but those that its ``repr`` leaves out,
    and of its properties: a verdict that follows from the fields. ``nbytes`` becomes ``bytes``. A
    field ``box`` gives ``offsets`` and ``sizes`` to the dict it is in. Floats that are not finite
    become strings.

    Args:
        result: Result of a function of ``dcp_placements.offline``, or a value in it.
    """
    if isinstance(result, Box):
        return {"offsets": list(result.offsets), "sizes": list(result.sizes)}
    kind: Any = type(result)
    if names := _shown(kind):
        values: dict[str, Any] = {}
        for name in names:
            value = to_json(getattr(result, name))
            is_box = name == "box" and value is not None
            values |= value if is_box else {name.replace("nbytes", "bytes"): value}
        return values
    if isinstance(result, Mapping):
        return {key: to_json(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [to_json(value) for value in result]
    if isinstance(result, float) and not isfinite(result):
        return str(result)
    return result


@lru_cache
def _shown(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields and properties of a class that a document has."""
    if is_dataclass(kind):
        names = [field.name for field in fields(kind) if field.repr]
    else:
        names = list(getattr(kind, "_fields", ()))
    if not names:
        return ()
    properties = [name for name, value in vars(kind).items() if isinstance(value, property)]
    return (*names, *properties)
