"""The picture of one tensor: its chunks, coloured by the ranks that wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dcp_placements.errors import format_count
from dcp_placements.layout.boxes import as_array, as_boxes, intersect, overlaps, uncovered
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.projection import Panel, Projection, project
from dcp_placements.offline.views.picture import (
    DARK,
    FEW,
    GREY,
    RED,
    WIDTH,
    Style,
    Writer,
    add_title,
    new_figure,
    writer_colors,
    writer_label,
)

SMALLEST_LABEL = 5.0
"""In points; smaller labels are left out."""

MAX_LONG_LABELS = 64
"""Up to so many chunks are labelled "rank 3"; more have the number alone."""

MAX_FLAWS = 500

_HOLE: Style = {"facecolor": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.8}
_DOUBLE: Style = {
    "facecolor": "none",
    "edgecolor": RED,
    "hatch": "xx",
    "linewidth": 1.4,
    "zorder": 2.5,
}
_END: Style = {"facecolor": "none", "edgecolor": DARK, "linewidth": 1.6, "zorder": 4}


class Piece(NamedTuple):
    """A stored chunk: its box in the tensor, and who wrote it."""

    box: Box
    writer: Writer


def tensor_figure(fqn: str, shape: Sequence[int], dtype: str, pieces: Sequence[Piece]) -> Any:
    """Return the picture of one tensor: its chunks, coloured by the ranks that wrote them.

    Holes are hatched grey; elements that are stored twice are outlined and hatched red.
    """
    whole = Box.whole(tuple(shape))
    boxes = [piece.box for piece in pieces]
    holes = uncovered(whole, as_array(boxes, len(shape)), MAX_FLAWS)
    projection = project(shape, [box for box in (*boxes, *holes, whole) if box.numel])
    # A chunk beyond the tensor's end has the end drawn.
    ends = [whole] if 0 not in shape and projection.shape != whole.sizes else []
    outlines = (
        (holes, _HOLE, "hole: nobody stored it"),
        (_doubles(boxes), _DOUBLE, "stored more than once"),
        (ends, _END, "the tensor"),
    )
    rows, columns = _grid(len(projection.panels))
    height = _height(projection)
    figure = new_figure(1.2 + rows * height)
    colors = writer_colors([piece.writer for piece in pieces])
    size = ((WIDTH - 1.0) / columns, height)
    many_axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    unlabelled: set[Writer] = set()
    for panel, axes in zip(projection.panels, many_axes, strict=False):
        unlabelled |= _paint(axes, projection, panel, pieces, colors, size)
        for outlined, style, _ in outlines:
            _outline(axes, projection, panel, outlined, style)
        _set_scales(axes, projection, panel, size)
        _label_dims(axes, projection, shape)
    for axes in many_axes[len(projection.panels) :]:
        axes.set_axis_off()
    if 0 in shape:
        figure.text(0.5, 0.5, "no elements", ha="center", va="center", fontsize=9, color=GREY)
    chunks, writers = format_count(len(pieces), "chunk"), format_count(len(colors), "writer")
    facts = [f"{tuple(shape)} {dtype}", f"{chunks} of {writers}", *_uncut(projection)]
    if _are_numbered(pieces) and len(unlabelled) < len(colors):
        facts.append("numbers: writer ranks")
    if projection.undrawn:
        facts.append(f"{projection.undrawn} more panels are not drawn")
    add_title(figure, fqn, facts)
    legend = [(style, text) for outlined, style, text in outlines if outlined]
    _add_legend(figure, legend, colors if unlabelled else {})
    return figure


def _doubles(boxes: Sequence[Box]) -> list[Box]:
    """Return what two boxes have in common, equal boxes included."""
    array = as_array(boxes, len(boxes[0].sizes) if boxes else 0)
    one, other = np.array(overlaps(array, MAX_FLAWS), np.int64).reshape(-1, 2).T
    return list(dict.fromkeys(as_boxes(intersect(array[one], array[other]))))


def _are_numbered(pieces: Sequence[Piece]) -> bool:
    return sum(piece.box.numel > 0 for piece in pieces) > MAX_LONG_LABELS


def _grid(panels: int) -> tuple[int, int]:
    columns = 1 if panels == 1 else 2 if panels <= 4 else 4
    return -(-panels // columns), columns


def _height(projection: Projection) -> float:
    """Return the height of a panel, in inches: enough to distinguish its rows."""
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
    colors: Mapping[Writer, str],
    size: tuple[float, float],
) -> set[Writer]:
    """Paint the chunks, and return the writers whose labels do not fit."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    per_x, per_y = size[0] / projection.width, size[1] / projection.height
    are_numbered = _are_numbered(pieces)
    patches, faces = [], []
    unlabelled = set()
    for piece in pieces:
        color = colors[piece.writer]
        label = str(piece.writer) if are_numbered else writer_label(piece.writer)
        for r in projection.rectangles(panel, piece.box):
            patches.append(Rectangle((r.x, r.y), r.width, r.height))
            faces.append(color)
            points = _points(label, r.width * per_x, r.height * per_y)
            if points < SMALLEST_LABEL:
                unlabelled.add(piece.writer)
            else:
                middle = (r.x + r.width / 2, r.y + r.height / 2)
                ink = "white" if _is_dark(color) else DARK
                style = {"ha": "center", "va": "center", "fontsize": points, "zorder": 3}
                axes.text(*middle, label, color=ink, **style)
    line = 1.2 if len(patches) <= 64 else 0.7 if len(patches) <= 400 else 0.2
    axes.add_collection(
        PatchCollection(patches, facecolors=faces, edgecolors="white", linewidths=line)
    )
    return unlabelled


def _points(label: str, width: float, height: float) -> float:
    """Return the size, in points, in which a label fits into so many inches."""
    # A letter is some 0.6 of its size wide; a line takes 1.3 of it.
    return min(9.0, width * 72 * 0.9 / (0.6 * len(label)), height * 72 / 1.3)


def _is_dark(color: str) -> bool:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _outline(
    axes: Any, projection: Projection, panel: Panel, boxes: Sequence[Box], style: Style
) -> None:
    from matplotlib.patches import Rectangle

    for box in boxes:
        for r in projection.rectangles(panel, box):
            axes.add_patch(Rectangle((r.x, r.y), r.width, r.height, **style))


def _set_scales(axes: Any, projection: Projection, panel: Panel, size: tuple[float, float]) -> None:
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
        axes.xaxis.set_major_locator(_ticks(edges, size[0] / (0.09 * digits + 0.12)))
        if projection.down is None:
            axes.set_yticks([])
        else:
            steps = projection.edges[projection.down]
            axes.yaxis.set_major_locator(_ticks(steps, size[1] / 0.17))


def _ticks(edges: Sequence[int], room: float) -> Any:
    """Return a locator of those edges whose labels fit, if ``room`` labels would."""
    from matplotlib.ticker import FixedLocator

    return FixedLocator(edges, nbins=max(int(room), 2))


def _label_dims(axes: Any, projection: Projection, shape: Sequence[int]) -> None:
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


def _uncut(projection: Projection) -> list[str]:
    """Return the fact that some dims are not drawn, because no box cuts them."""
    drawn = {projection.across, projection.down}
    uncut = [d for d, edges in projection.edges.items() if d not in drawn and len(edges) == 2]
    if not uncut:
        return []
    noun = "dim" if len(uncut) == 1 else "dims"
    return [f"{noun} {', '.join(map(str, uncut))} not cut"]


def _add_legend(
    figure: Any, outlines: Sequence[tuple[Style, str]], colors: Mapping[Writer, str]
) -> None:
    """Explain hatches and outlines, and the colours of writers."""
    from matplotlib.patches import Patch

    handles = [Patch(**style, label=text) for style, text in outlines]
    writers = list(colors)
    if len(writers) > len(FEW):
        writers = [writers[(len(writers) - 1) * i // 4] for i in range(5)]
    handles += [Patch(facecolor=colors[writer], label=writer_label(writer)) for writer in writers]
    if handles:
        place = {"loc": "outside lower center", "ncols": 5}
        figure.legend(handles=handles, fontsize=8, frameon=False, **place)
