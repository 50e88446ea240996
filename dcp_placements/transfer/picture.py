"""The picture of a transfer: bytes by rank, or host, that sends and that receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dcp_placements.errors import format_count, format_nbytes
from dcp_placements.offline.declared import format_mesh_axes
from dcp_placements.offline.views.picture import (
    DARK,
    FEW,
    GREY,
    WIDTH,
    Style,
    add_title,
    new_figure,
)
from dcp_placements.storage.metadata.table import Array
from dcp_placements.transfer.plan import TransferPlan
from dcp_placements.transfer.world import TransferWorld

MAX_NAMED = 64
"""Worlds of more ranks are drawn by host, if they have hosts."""

MAX_LABELS = 16
"""Up to so many rows and columns, each cell has its bytes as text."""


def transfer_figure(plan: TransferPlan) -> Any:
    """Return the picture of a plan: a row per rank that sends, a column per rank that receives.

    Cells where a rank copies what it already has are outlined. A world of more than 64 ranks that
    has ``hosts`` has a row or column per host.

    Args:
        plan: The plan.

    Returns:
        A ``matplotlib.figure.Figure``; ``offline.save_figure`` writes it.

    Raises:
        CannotLook: There is no matplotlib.
    """
    rows, row_of = _lines(plan.source)
    columns, column_of = _lines(plan.target)
    height = 1.6 + min(max((WIDTH - 2.2) * len(rows) / len(columns), 0.8), 8.0)
    figure = new_figure(height)
    axes = figure.subplots()
    pairs = plan.pairs()
    nbytes = np.zeros((len(rows), len(columns)), np.int64)
    np.add.at(nbytes, (row_of[pairs.source_rank], column_of[pairs.target_rank]), pairs.nbytes)
    _draw_matrix(figure, axes, nbytes)
    is_copy = pairs.source_rank == pairs.target_rank
    copied = pairs.source_rank[is_copy]
    if max(len(rows), len(columns)) <= MAX_NAMED:
        cells = np.stack([row_of[copied], column_of[copied]], 1)
        _outline(axes, np.unique(cells, axis=0).tolist())
    for axis, lines, name in ((axes.yaxis, rows, "from"), (axes.xaxis, columns, "to")):
        step = -(-len(lines) // 32)
        axis.set_ticks(range(0, len(lines), step), lines[::step])
        by_host = len(lines) < (plan.source if name == "from" else plan.target).size
        axis.set_label_text(f"{name} {'host' if by_host else 'rank'}", fontsize=9)
    axes.tick_params(length=0, labelsize=8)
    axes.tick_params(axis="x", labelrotation=90 if len(columns) > MAX_LABELS else 0)
    copied_nbytes = int(pairs.nbytes[is_copy].sum())
    sent_nbytes = int(pairs.nbytes.sum()) - copied_nbytes
    facts = [f"{format_nbytes(sent_nbytes)} sent, in {format_count(int((~is_copy).sum()), 'pair')}"]
    if copied_nbytes:
        facts.append(f"{format_nbytes(copied_nbytes)} copied within a rank (outlined)")
    add_title(
        figure,
        f"{format_mesh_axes(plan.source.axes)} to {format_mesh_axes(plan.target.axes)}",
        facts,
    )
    return figure


def _lines(world: TransferWorld) -> tuple[list[str], Array]:
    """Return the labels of rows or columns, and the row of each global rank."""
    ranks = world.global_ranks
    hosts = world.host_names
    line_of = np.zeros(1 + max(ranks), np.int64)
    if hosts is None or len(ranks) <= MAX_NAMED:
        ordered = sorted(ranks)
        line_of[ordered] = np.arange(len(ordered))
        return [str(rank) for rank in ordered], line_of
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    line_of[ranks] = [numbers[host] for host in hosts]
    return [str(host) for host in numbers], line_of


def _draw_matrix(figure: Any, axes: Any, nbytes: Array) -> None:
    """Draw the cells, darker for more bytes; cells without any stay white."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import FuncFormatter

    shades = LinearSegmentedColormap.from_list("bytes", ("#e9eef2", FEW[2], FEW[0]))
    shown = np.ma.masked_equal(nbytes, 0)
    image = axes.imshow(shown, cmap=shades, vmin=0, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.formatter = FuncFormatter(lambda value, _: format_nbytes(int(value)))
    bar.ax.tick_params(length=0, labelsize=8)
    bar.outline.set_visible(False)
    for side in axes.spines.values():
        side.set_color(GREY)
    if max(nbytes.shape) > MAX_LABELS:
        return
    most = nbytes.max(initial=0)
    for row, column in np.argwhere(nbytes).tolist():
        value = int(nbytes[row, column])
        color = "white" if value > 0.7 * most else DARK
        style: Style = {"ha": "center", "va": "center", "fontsize": 7, "color": color}
        axes.text(column, row, format_nbytes(value), **style)


def _outline(axes: Any, cells: Sequence[Sequence[int]]) -> None:
    from matplotlib.patches import Rectangle

    for row, column in cells:
        style: Style = {"facecolor": "none", "edgecolor": FEW[1], "linewidth": 1.4}
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **style))
