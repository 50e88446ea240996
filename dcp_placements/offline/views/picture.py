"""Style, colours and files of all pictures.

matplotlib (the extra ``plot``) is imported only when a picture is asked for. No window and no
global state of matplotlib is used: a figure is returned, to be saved or examined.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcp_placements.errors import CannotLook, format_name
from dcp_placements.offline.remote_output import output_at

FEW = ("#2f6db3", "#d9771f", "#86b3e0", "#f4bd85", "#4f8a5b", "#a8cfa6", "#77629e", "#c5b8dc")
"""Colours of up to eight writers; those of more writers are steps along ``RAMP``."""

RAMP = ("#1f4e85", "#86b3e0", "#e9eef2", "#f4bd85", "#b35a0c")
DARK, GREY, RED = "#222222", "#8a8f94", "#b3261e"
WIDTH = 8.0

Style = dict[str, Any]
Writer = int | str
"""The rank that wrote a file; the file's name if it does not tell the rank."""


def new_figure(height: float) -> Any:
    """Return an empty ``matplotlib.figure.Figure``.

    Raises:
        CannotLook: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CannotLook('pictures need matplotlib: pip install "dcp-placements[plot]"') from None
    return Figure(figsize=(WIDTH, height), dpi=150, layout="constrained")


def add_title(figure: Any, title: str, facts: Sequence[str]) -> None:
    """Write the title of a figure, and a line of facts below it."""
    height = figure.get_size_inches()[1]
    title = format_name(title)
    style: Style = {"x": 0.12 / WIDTH, "ha": "left", "va": "top", "color": DARK}
    style["parse_math"] = False  # names may have two dollar signs
    points = min(11.0, (WIDTH - 0.2) * 72 / (0.68 * max(len(title), 1)))
    figure.text(y=1 - 0.1 / height, s=title, fontsize=points, fontweight="bold", **style)
    figure.text(y=1 - 0.32 / height, s="    ".join(facts), fontsize=9, **style)
    pads = {"w_pad": 0.12, "h_pad": 0.1}
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.5 / height), **pads)


def writer_colors(writers: Sequence[Writer]) -> dict[Writer, str]:
    """Return a colour for each different writer, in their order."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    ordered = sorted(set(writers), key=writer_order)
    if len(ordered) <= len(FEW):
        return dict(zip(ordered, FEW, strict=False))
    ramp = LinearSegmentedColormap.from_list("writers", RAMP)
    last = len(ordered) - 1
    return {writer: to_hex(ramp(position / last)) for position, writer in enumerate(ordered)}


def writer_label(writer: Writer) -> str:
    """Return the label of a writer."""
    return f"rank {writer}" if isinstance(writer, int) else format_name(writer)


def writer_order(writer: Writer) -> tuple[bool, int, str]:
    """Return a sort key: ranks first, then files by name."""
    return (False, writer, "") if isinstance(writer, int) else (True, 0, writer)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure to a ``.png`` or ``.svg`` file; an existing one is replaced.

    Raises:
        CannotLook: Another suffix, or another process is writing the file.
    """
    import matplotlib

    kind = check_picture_name(path)
    # The same bytes from the same input, and text as text.
    reproducible: Any = {"svg.hashsalt": "dcp_placements", "svg.fonttype": "none"}
    notes = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with (
        output_at(path, replace=True) as output,
        output.file() as stream,
        matplotlib.rc_context(reproducible),
    ):
        figure.savefig(stream, format=kind, facecolor="white", metadata=notes)


def check_picture_name(path: str | os.PathLike[str]) -> str:
    """Return ``"png"`` or ``"svg"``, the suffix of a picture's name.

    Raises:
        CannotLook: Another suffix.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise CannotLook(f"{path}: a picture's name ends in .png or .svg")
    return kind
