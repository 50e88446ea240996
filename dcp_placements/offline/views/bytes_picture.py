"""The picture of a whole checkpoint: the bytes that each rank wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcp_placements.errors import format_nbytes
from dcp_placements.offline.views.picture import (
    DARK,
    FEW,
    Writer,
    add_title,
    new_figure,
    plural,
    writer_label,
    writer_order,
)

MAX_NAMED = 32
"""Up to so many writers have a horizontal bar with a label each."""


def bytes_figure(title: str, nbytes: Mapping[Writer, Mapping[str, int]]) -> Any:
    """Return the picture of a whole checkpoint: the bytes that each rank wrote, file by file.

    Args:
        title: The checkpoint's name.
        nbytes: By writer and file, in bytes.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        CannotLook: There is no matplotlib.
    """
    writers = sorted(nbytes, key=writer_order)
    totals = [sum(nbytes[writer].values()) for writer in writers]
    is_horizontal = len(writers) <= MAX_NAMED
    figure = new_figure(1.3 + 0.3 * max(len(writers), 2) if is_horizontal else 4.2)
    axes = figure.subplots()
    unit, scale = _unit(max(totals, default=0))
    mean = sum(totals) / max(len(totals), 1)
    _draw_bars(axes, [nbytes[writer] for writer in writers], scale, is_horizontal=is_horizontal)
    draw_line = axes.axvline if is_horizontal else axes.axhline
    draw_line(mean / scale, color=DARK, linewidth=0.9, linestyle=(0, (4, 3)))
    label = f"{unit}; dashed: the mean"
    if is_horizontal:
        notes = [
            format_nbytes(total) + (f" in {files} files" if files > 1 else "")
            for total, files in zip(totals, [len(nbytes[w]) for w in writers], strict=True)
        ]
        _label_each(axes, writers, [total / scale for total in totals], notes)
        axes.set_xlabel(label, fontsize=9)
    else:
        step = max(len(writers) // 16, 1)
        axes.set_xticks(range(0, len(writers), step), [str(w) for w in writers[::step]])
        axes.set_xlim(-0.7, len(writers) - 0.3)
        axes.set_xlabel("writer rank", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
    axes.tick_params(length=0, labelsize=8)
    for side in ("top", "right", "left" if is_horizontal else "bottom"):
        axes.spines[side].set_visible(False)
    files = {name for by_file in nbytes.values() for name in by_file}
    facts = [f"{format_nbytes(sum(totals))} in {plural(len(files), 'file')}"]
    if mean:
        facts.append(f"the largest writer has {max(totals) / mean:.2f} times the mean")
    add_title(figure, title, facts)
    return figure


def _draw_bars(
    axes: Any, bars: Sequence[Mapping[str, int]], scale: int, *, is_horizontal: bool
) -> None:
    """Draw a bar per writer, in two shades that alternate by file."""
    for position, by_file in enumerate(bars):
        start = 0
        for number, (_, nbytes) in enumerate(sorted(by_file.items())):
            style: dict[str, Any] = {"color": FEW[0] if number % 2 == 0 else FEW[2]}
            style |= {"edgecolor": "white", "linewidth": 0.8 if len(bars) <= 64 else 0.0}
            if is_horizontal:
                axes.barh(position, nbytes / scale, height=0.78, left=start / scale, **style)
            else:
                axes.bar(position, nbytes / scale, width=1.0, bottom=start / scale, **style)
            start += nbytes


def _label_each(
    axes: Any, writers: Sequence[Writer], lengths: Sequence[float], notes: Sequence[str]
) -> None:
    longest = max(lengths, default=0)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    style: dict[str, Any] = {"va": "center", "fontsize": 8, "color": DARK, "bbox": background}
    for position, (length, note) in enumerate(zip(lengths, notes, strict=True)):
        axes.text(length + longest * 0.01, position, note, **style)
    axes.set_xlim(0, longest * 1.2 or 1)
    axes.set_ylim(len(writers) - 0.4, -0.6)
    axes.set_yticks(range(len(writers)), [writer_label(writer) for writer in writers])


def _unit(nbytes: int) -> tuple[str, int]:
    for name, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return name, scale
    return "B", 1
