"""What results say: ranges of numbers, tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from shutil import get_terminal_size

from dcp_placements.errors import format_name, format_names, format_numbers

MIN_FOLDED = 5
"""The first column of a table is folded to no less."""


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


def format_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: str = "",
    width: int | None = None,
) -> list[str]:
    """Return the lines of a table: its headings, then its rows.

    Args:
        columns: Headings.
        rows: Texts, one for each column.
        right: Headings of the columns of numbers, separated by spaces.
        width: Where a line would be longer, the first column is folded; by default where stdout is
            a terminal, to its width.

    >>> for line in format_table(("key", "bytes"), [("layers.0", "8")], right="bytes", width=12):
    ...     print(line)
    key    bytes
    layer      8
    s.0
    """
    cells = [list(columns), *[[format_name(cell) for cell in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is None and sys.stdout.isatty():
        width = get_terminal_size().columns
    if width is not None:
        rest = sum(widths[1:]) + 2 * len(widths[1:])
        widths[0] = max(min(widths[0], width - rest), MIN_FOLDED)
    lines = []
    for first, *others in cells:
        folds = [first[at : at + widths[0]] for at in range(0, max(len(first), 1), widths[0])]
        for fold, texts in zip_longest(folds, [others], fillvalue=None):
            padded = [
                text.rjust(size) if heading in right.split() else text.ljust(size)
                for text, size, heading in zip(texts or (), widths[1:], columns[1:], strict=False)
            ]
            lines.append("  ".join([(fold or "").ljust(widths[0]), *padded]).rstrip())
    return lines
