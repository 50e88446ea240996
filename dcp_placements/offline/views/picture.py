"""Pictures of a checkpoint: one tensor's chunks, or the bytes that each rank wrote.

Needs matplotlib (the extra ``plot``), and only when a picture is asked for. No window and no global
state of matplotlib: what is returned is a figure, to be saved or looked into.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_placements.errors import CannotLook, format_name, format_nbytes
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import intersection, overlaps, uncovered
from dcp_placements.offline.output import Output
from dcp_placements.offline.projection import Panel, Projection, project

FEW = ("#2f6db3", "#d9771f", "#86b3e0", "#f4bd85", "#4f8a5b", "#a8cfa6", "#77629e", "#c5b8dc")
"""Colours of up to eight writers; of more they are steps from the first to the second."""

Style = dict[str, Any]

RAMP = ("#1f4e85", "#86b3e0", "#e9eef2", "#f4bd85", "#b35a0c")
DARK, GREY, RED = "#222222", "#8a8f94", "#b3261e"
WIDTH = 8.0
SMALLEST_LABEL = 5.0
NAMED = 64
"""Chunks that are labelled "rank 3"; where there are more, the number must do."""

MAX_FLAWS = 500


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored chunk.

    Attributes:
        box: Where it lies in the tensor.
        writer: The rank that wrote it; a file's name where no rank is known.
    """

    box: Box
    writer: int | str


def tensor_figure(fqn: str, shape: Sequence[int], dtype: str, pieces: Sequence[Piece]) -> Any:
    """Return the picture of one tensor: its chunks, coloured by who wrote them.

    What nobody stored is hatched grey, what is stored twice is outlined and hatched red.

    Args:
        fqn: Its key, for the title.
        shape: Of the tensor.
        dtype: Its name, for the title.
        pieces: What is stored of it.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        CannotLook: There is no matplotlib.
    """
    figure_class = _figure_class()
    whole = Box((0,) * len(shape), tuple(shape))
    boxes = [piece.box for piece in pieces]
    real = [piece for piece in pieces if piece.box.numel]
    holes = uncovered(whole, boxes, MAX_FLAWS)
    doubles = _doubles(boxes)
    projection = project(shape, [box for box in (*boxes, *holes, whole) if box.numel])
    rows, columns = _grid(len(projection.panels))
    height = _height(projection)
    figure = figure_class(figsize=(WIDTH, 1.2 + rows * height), dpi=150, layout="constrained")
    colors = _colors([piece.writer for piece in pieces])
    many_axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    size = ((WIDTH - 1.0) / columns, height)
    numbers = len(real) > NAMED
    beyond = 0 not in shape and projection.shape != tuple(shape)
    unnamed: set[int | str] = set()
    for panel, axes in zip(projection.panels, many_axes, strict=False):
        unnamed |= _paint(axes, projection, panel, real, colors, size, numbers=numbers)
        _paint_flaws(axes, projection, panel, holes, doubles)
        if beyond:
            _outline(axes, projection, panel, shape)
        _scales(axes, projection, panel, size)
        _tell_dims(axes, projection, shape)
    for axes in many_axes[len(projection.panels) :]:
        axes.set_axis_off()
    counted = f"{len(pieces)} chunk{'s' if len(pieces) != 1 else ''}"
    writers = f"{len(colors)} writer{'s' if len(colors) != 1 else ''}"
    told = [f"{tuple(shape)} {dtype}", f"{counted} of {writers}"]
    told += [f"{_omitted(projection)} not cut"] if _omitted(projection) else []
    told += ["numbers: writer ranks"] if numbers and len(unnamed) < len(colors) else []
    told += [f"{projection.undrawn} more panels are not drawn"] if projection.undrawn else []
    if 0 in shape:
        figure.text(0.5, 0.5, "no elements", ha="center", va="center", fontsize=9, color=GREY)
    _title(figure, fqn, told)
    flaws = ((holes, _HOLE, "hole: nobody stored it"), (doubles, _DOUBLE, "stored more than once"))
    _key(
        figure,
        [(style, text) for there, style, text in (*flaws, (beyond, _END, "the tensor")) if there],
        colors if unnamed else {},
    )
    return figure


def bytes_figure(title: str, nbytes: Mapping[int | str, Mapping[str, int]]) -> Any:
    """Return the picture of a whole checkpoint: the bytes that each rank wrote, file by file.

    Args:
        title: What to call it.
        nbytes: By writer (a rank, or a file's name where no rank is known) and file, in bytes.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        CannotLook: There is no matplotlib.
    """
    figure_class = _figure_class()
    writers = sorted(nbytes, key=_writer_order)
    totals = [sum(nbytes[writer].values()) for writer in writers]
    unit, scale = _unit(max(totals, default=0))
    lying = len(writers) <= 32
    height = 1.3 + 0.3 * max(len(writers), 2) if lying else 4.2
    figure = figure_class(figsize=(WIDTH, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    draw = axes.barh if lying else axes.bar
    thick = "height" if lying else "width"
    at = "left" if lying else "bottom"
    for position, writer in enumerate(writers):
        reached = 0
        for number, (_, count) in enumerate(sorted(nbytes[writer].items())):
            style = {thick: 0.78 if lying else 1.0, "color": FEW[0] if number % 2 == 0 else FEW[2]}
            style |= {"edgecolor": "white", "linewidth": 0.8 if len(writers) <= 64 else 0.0}
            draw(position, count / scale, **style, **{at: reached / scale})
            reached += count
    mean = sum(totals) / max(len(totals), 1)
    line = axes.axvline if lying else axes.axhline
    line(mean / scale, color=DARK, linewidth=0.9, linestyle=(0, (4, 3)))
    near = max(totals, default=0) / scale
    if lying:
        for position, (writer, total) in enumerate(zip(writers, totals, strict=True)):
            files = len(nbytes[writer])
            note = format_nbytes(total) + (f" in {files} files" if files > 1 else "")
            place = (total / scale + near * 0.01, position)
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            axes.text(*place, note, va="center", fontsize=8, color=DARK, bbox=behind)
        axes.set_xlim(0, near * 1.2 or 1)
        axes.set_ylim(len(writers) - 0.4, -0.6)
        axes.set_yticks(range(len(writers)), [_writer_name(writer) for writer in writers])
        axes.set_xlabel(f"{unit}; dashed: the mean", fontsize=9)
    else:
        step = max(len(writers) // 16, 1)
        axes.set_xticks(range(0, len(writers), step), [str(w) for w in writers[::step]])
        axes.set_xlim(-0.7, len(writers) - 0.3)
        axes.set_xlabel("writer rank", fontsize=9)
        axes.set_ylabel(f"{unit}; dashed: the mean", fontsize=9)
    axes.tick_params(length=0, labelsize=8)
    for side in ("top", "right", "left" if lying else "bottom"):
        axes.spines[side].set_visible(False)
    files = len({name for written in nbytes.values() for name in written})
    told = [f"{format_nbytes(sum(totals))} in {files} file{'s' if files != 1 else ''}"]
    if mean:
        told.append(f"the largest writer has {max(totals) / mean:.2f} times the mean")
    _title(figure, title, told)
    return figure


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure to a ``.png`` or ``.svg`` file; one that is there is replaced.

    Raises:
        CannotLook: Another ending, or another process is writing it.
    """
    import matplotlib

    target = Path(path)
    kind = check_picture_name(target)
    # The same bytes from the same input, and text as text.
    steady: Any = {"svg.hashsalt": "dcp_placements", "svg.fonttype": "none"}
    notes = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with (
        Output(target, replace=True) as output,
        output.file() as stream,
        matplotlib.rc_context(steady),
    ):
        figure.savefig(stream, format=kind, facecolor="white", metadata=notes)


def check_picture_name(path: str | os.PathLike[str]) -> str:
    """Return ``"png"`` or ``"svg"``, by a file's ending.

    Raises:
        CannotLook: Another ending.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise CannotLook(f"{path}: a picture's name ends in .png or .svg")
    return kind


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CannotLook('pictures need matplotlib: pip install "dcp-placements[plot]"') from None
    return Figure


def _doubles(boxes: Sequence[Box]) -> list[Box]:
    """Return what two boxes have in common, equal boxes included."""
    counts: dict[Box, int] = {}
    for box in boxes:
        if box.numel:
            counts[box] = counts.get(box, 0) + 1
    shared = [box for box, count in counts.items() if count > 1]
    pairs = overlaps(list(counts), MAX_FLAWS)
    return shared + [box for box in (intersection(*pair) for pair in pairs) if box is not None]


def _grid(panels: int) -> tuple[int, int]:
    columns = 1 if panels == 1 else 2 if panels <= 4 else 4
    return -(-panels // columns), columns


def _height(projection: Projection) -> float:
    """Return the height of a panel, in inches: as much as its rows need to be told apart."""
    if len(projection.lines) > 2:
        return 0.5 + 0.34 * projection.height
    if projection.down is None:
        return 1.0
    steps = len(projection.edges[projection.down]) - 1
    least = 2.2 if len(projection.panels) > 4 else 2.8
    return min(max(least, 0.135 * steps + 0.6), 9.0 if len(projection.panels) == 1 else 4.0)


def _paint(
    axes: Any,
    projection: Projection,
    panel: Panel,
    pieces: Sequence[Piece],
    colors: Mapping[int | str, str],
    size: tuple[float, float],
    *,
    numbers: bool,
) -> set[int | str]:
    """Paint the chunks, and return the writers that there was no room to name."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    per_x, per_y = size[0] / projection.width, size[1] / projection.height
    patches, faces = [], []
    unnamed = set()
    for piece in pieces:
        color = colors[piece.writer]
        for r in projection.rectangles(panel, piece.box):
            patches.append(Rectangle((r.x, r.y), r.width, r.height))
            faces.append(color)
            label = str(piece.writer) if numbers else _writer_name(piece.writer)
            points = _points(label, r.width * per_x, r.height * per_y)
            if points < SMALLEST_LABEL:
                unnamed.add(piece.writer)
            else:
                place = (r.x + r.width / 2, r.y + r.height / 2)
                ink = "white" if _is_dark(color) else DARK
                style = {"ha": "center", "va": "center", "fontsize": points, "zorder": 3}
                axes.text(*place, label, color=ink, **style)
    line = 1.2 if len(patches) <= 64 else 0.7 if len(patches) <= 400 else 0.2
    axes.add_collection(
        PatchCollection(patches, facecolors=faces, edgecolors="white", linewidths=line)
    )
    return unnamed


def _points(label: str, width: float, height: float) -> float:
    """Return the size, in points, in which a label fits into so many inches."""
    # A letter is some 0.6 of its size wide; a line takes 1.3 of it.
    return min(9.0, width * 72 * 0.9 / (0.6 * len(label)), height * 72 / 1.3)


def _paint_flaws(
    axes: Any, projection: Projection, panel: Panel, holes: Sequence[Box], doubles: Sequence[Box]
) -> None:
    from matplotlib.patches import Rectangle

    for boxes, style in ((holes, _HOLE), (doubles, _DOUBLE)):
        for box in boxes:
            for r in projection.rectangles(panel, box):
                axes.add_patch(Rectangle((r.x, r.y), r.width, r.height, **style))


_HOLE: Style = {"facecolor": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.8}
_DOUBLE: Style = {
    "facecolor": "none",
    "edgecolor": RED,
    "hatch": "xx",
    "linewidth": 1.4,
    "zorder": 2.5,
}
_END: Style = {"facecolor": "none", "edgecolor": DARK, "linewidth": 1.6, "zorder": 4}


def _outline(axes: Any, projection: Projection, panel: Panel, shape: Sequence[int]) -> None:
    """Draw where the tensor ends."""
    from matplotlib.patches import Rectangle

    for r in projection.rectangles(panel, Box((0,) * len(shape), tuple(shape))):
        axes.add_patch(Rectangle((r.x, r.y), r.width, r.height, **_END))


def _scales(
    axes: Any,
    projection: Projection,
    panel: Panel,
    size: tuple[float, float],
) -> None:
    axes.set_xlim(0, projection.width)
    axes.set_ylim(projection.height, 0)
    axes.set_frame_on(False)
    axes.tick_params(length=2, width=0.6, labelsize=8, color=GREY)
    if panel.title:
        axes.set_title(panel.title, fontsize=9, color=DARK)
    if projection.across is None:
        axes.set_xticks([])
        axes.set_yticks([])
    elif len(projection.lines) > 2:
        axes.set_xticks([])
        starts = projection.lines[:-1]
        axes.set_yticks([n + 0.5 for n in range(len(starts))], [str(start) for start in starts])
    else:
        edges = projection.edges[projection.across]
        digits = len(str(edges[-1]))
        axes.set_xticks(_thinned(edges, size[0] / (0.09 * digits + 0.12)))
        if projection.down is None:
            axes.set_yticks([])
        else:
            axes.set_yticks(_thinned(projection.edges[projection.down], size[1] / 0.17))


def _thinned(edges: Sequence[int], room: float) -> list[int]:
    """Return those of ``edges`` that can be told beside each other, the first and last among them.

    Args:
        edges: Ascending.
        room: How many would fit.
    """
    least = (edges[-1] - edges[0]) / max(room, 1)
    step = max(1, -(-(len(edges) - 1) // max(int(room), 1)))
    kept = [edges[0]]
    for edge in edges[step:-1:step]:
        if edge - kept[-1] >= least and edges[-1] - edge >= least:
            kept.append(edge)
    return [*kept, edges[-1]]


def _tell_dims(axes: Any, projection: Projection, shape: Sequence[int]) -> None:
    if projection.across is None:
        return
    across = f"dim {projection.across} (of {shape[projection.across]})"
    down = ""
    if len(projection.lines) > 2:
        across, down = f"{across}, in lines", "the line begins at"
    elif projection.down is not None:
        down = f"dim {projection.down} (of {shape[projection.down]})"
    axes.set_xlabel(across, fontsize=9, color=DARK)
    axes.set_ylabel(down, fontsize=9, color=DARK)
    axes.label_outer()


def _omitted(projection: Projection) -> str:
    """Return the dims that are not drawn, because no box cuts them."""
    drawn = {projection.across, projection.down}
    dims = [d for d in range(len(projection.shape)) if d not in drawn]
    told = [str(d) for d in dims if len(projection.edges[d]) == 2]
    return ("dim " if len(told) == 1 else "dims ") + ", ".join(told) if told else ""


def _title(figure: Any, title: str, told: Sequence[str]) -> None:
    height = figure.get_size_inches()[1]
    title = format_name(title)
    style: Style = {"x": 0.12 / WIDTH, "ha": "left", "va": "top", "color": DARK}
    style["parse_math"] = False  # names may have two dollar signs
    points = min(11.0, (WIDTH - 0.2) * 72 / (0.68 * max(len(title), 1)))
    figure.text(y=1 - 0.1 / height, s=title, fontsize=points, fontweight="bold", **style)
    figure.text(y=1 - 0.32 / height, s="    ".join(told), fontsize=9, **style)
    pads = {"w_pad": 0.12, "h_pad": 0.1}
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.5 / height), **pads)


def _key(figure: Any, flaws: Sequence[tuple[Style, str]], colors: Mapping[int | str, str]) -> None:
    """Tell what hatches and outlines mean, and the colours of writers."""
    from matplotlib.patches import Patch

    known = [Patch(**style, label=text) for style, text in flaws]
    every = list(colors)
    if len(every) > len(FEW):
        every = [every[(len(every) - 1) * i // 4] for i in range(5)]
    known += [Patch(facecolor=colors[writer], label=_writer_name(writer)) for writer in every]
    if known:
        place = {"loc": "outside lower center", "ncols": 5}
        figure.legend(handles=known, fontsize=8, frameon=False, **place)


def _colors(writers: Sequence[int | str]) -> dict[int | str, str]:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    ordered = sorted(set(writers), key=_writer_order)
    if len(ordered) <= len(FEW):
        return dict(zip(ordered, FEW, strict=False))
    ramp = LinearSegmentedColormap.from_list("writers", RAMP)
    last = len(ordered) - 1
    return {writer: to_hex(ramp(at / last)) for at, writer in enumerate(ordered)}


def _is_dark(color: str) -> bool:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _writer_name(writer: int | str) -> str:
    return f"rank {writer}" if isinstance(writer, int) else format_name(writer)


def _writer_order(writer: int | str) -> tuple[bool, int, str]:
    return (False, writer, "") if isinstance(writer, int) else (True, 0, writer)


def _unit(nbytes: int) -> tuple[str, int]:
    for name, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return name, scale
    return "B", 1
