"""``draw``: a picture of one tensor's chunks, or of the bytes that each rank wrote.

matplotlib (the extra ``plot``) is imported only when a picture is asked for. No window and no
global state of matplotlib is used: a figure is returned, to be saved or examined.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dcp_placements.errors import CannotLook, format_count, format_name, format_nbytes
from dcp_placements.layout.boxes import as_array, as_boxes, intersect, overlaps, uncovered
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.output import replaced_file
from dcp_placements.storage.save_ids import writer_of

FEW = ("#2f6db3", "#d9771f", "#86b3e0", "#f4bd85", "#4f8a5b", "#a8cfa6", "#77629e", "#c5b8dc")
"""Colours of up to eight writers; those of more writers are steps along ``RAMP``."""

RAMP = ("#1f4e85", "#86b3e0", "#e9eef2", "#f4bd85", "#b35a0c")
DARK, GREY, RED = "#222222", "#8a8f94", "#b3261e"
WIDTH, MAX_HEIGHT = 8.0, 9.0
"""In inches."""

MAX_LABELS = 32
"""Up to so many writers or chunks have a label each; more have a legend."""

MAX_FLAWS = 500

_HOLE = {"facecolor": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.8}
_DOUBLE = {"facecolor": "none", "edgecolor": RED, "hatch": "xx", "linewidth": 1.4, "zorder": 2.5}
_END = {"facecolor": "none", "edgecolor": DARK, "linewidth": 1.6, "zorder": 4}

Writer = int | str
"""The rank that wrote a file; the file's name if it does not tell the rank."""


class Piece(NamedTuple):
    """A stored chunk: its box in the tensor, and who wrote it."""

    box: Box
    writer: Writer


def draw(path: str | os.PathLike[str] | Checkpoint, fqn: str | None = None) -> Any:
    """Return a picture of one tensor's chunks, or of the bytes that each rank wrote.

    Args:
        path: The checkpoint.
        fqn: The tensor's key; None for the whole checkpoint.

    Returns:
        A ``matplotlib.figure.Figure``; ``save_figure`` writes it.

    Raises:
        CannotLook: There is no checkpoint, or no such tensor in it, or no matplotlib.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    if fqn is not None:
        tensor = checkpoint.tensor(fqn)
        places = zip(tensor.boxes, tensor.chunks, strict=True)
        pieces = [Piece(box, _writer(chunk.file)) for box, chunk in places]
        return tensor_figure(fqn, tensor.shape, tensor.dtype_name, pieces)
    nbytes: dict[Writer, Counter[str]] = {}
    for record in checkpoint.records():
        if record.file is not None:
            of_writer = nbytes.setdefault(_writer(record.file), Counter())
            of_writer[record.file] += record.nbytes
    return bytes_figure(Path(checkpoint.path).name or checkpoint.path, nbytes)


def bytes_figure(title: str, nbytes: Mapping[Writer, Mapping[str, int]]) -> Any:
    """Return the picture of a whole checkpoint: a bar of the bytes that each rank wrote.

    Args:
        title: The checkpoint's name.
        nbytes: By writer and file, in bytes.
    """
    writers = sorted(nbytes, key=_order)
    totals = [sum(nbytes[writer].values()) for writer in writers]
    longest, mean = max(totals, default=0), sum(totals) / max(len(totals), 1)
    figure = _new_figure(min(1.3 + 0.3 * max(len(writers), 2), MAX_HEIGHT))
    axes = figure.subplots()
    exponent = min(max(longest.bit_length() - 1, 0) // 10, 3)
    unit, scale = ("B", "KiB", "MiB", "GiB")[exponent], 1 << 10 * exponent
    axes.barh(range(len(writers)), [total / scale for total in totals], 0.78, color=FEW[0])
    for position, writer in enumerate(writers if len(writers) <= MAX_LABELS else ()):
        files = len(nbytes[writer])
        note = format_nbytes(totals[position]) + (f" in {files} files" if files > 1 else "")
        end = (totals[position] + longest * 0.01) / scale
        axes.text(end, position, note, va="center", fontsize=8, color=DARK)
    axes.axvline(mean / scale, color=DARK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlim(0, longest * 1.2 / scale or 1)
    axes.set_xlabel(f"{unit}; dashed: the mean", fontsize=9)
    axes.set_ylim(len(writers) - 0.4, -0.6)
    step = -(-len(writers) // MAX_LABELS) or 1
    axes.set_yticks(range(0, len(writers), step), [_label(w) for w in writers[::step]])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    files = len({name for by_file in nbytes.values() for name in by_file})
    facts = [f"{format_nbytes(sum(totals))} in {format_count(files, 'file')}"]
    if mean:
        facts.append(f"the largest writer has {longest / mean:.2f} times the mean")
    _add_title(figure, title, facts)
    return figure


class _View:
    """The two dims that are cut into most steps, the later one across, as ranges of a drawing.

    Beside a single cut dim, the dim after it is drawn, or else the one before it. Of a further
    dim that is cut, the first step is drawn.

    Args:
        shape: Of the tensor.
        boxes: Of all that is drawn.

    Attributes:
        down: The dim that is drawn downwards; None for none.
        across: The dim that is drawn across; None of a scalar.
        edges: By dim, where boxes begin and end.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        # An empty tensor is drawn as one of a single element, with nothing in it.
        self.edges = [sorted({0, max(size, 1)}) for size in shape]
        for dim, edges in enumerate(self.edges):
            ends = {box.offsets[dim] + box.sizes[dim] for box in boxes}
            edges[:] = sorted({*edges, *ends, *[box.offsets[dim] for box in boxes]})
        by_steps = sorted(range(len(shape)), key=lambda dim: -len(self.edges[dim]))
        first = by_steps[0] if by_steps else 0
        rest = sorted(by_steps[1:], key=lambda dim: (-len(self.edges[dim]), abs(dim - first), -dim))
        drawn = sorted([*by_steps[:1], *rest[:1]])
        self.down, self.across = [None, None, *drawn][-2:]
        self.hidden = [dim for dim in range(len(shape)) if dim not in drawn]

    def facts(self) -> list[str]:
        """Return what is said of the dims that are not drawn."""
        uncut = [str(dim) for dim in self.hidden if len(self.edges[dim]) == 2]
        cut = [str(dim) for dim in self.hidden if len(self.edges[dim]) > 2]
        facts = [f"dim{'s' * (len(uncut) > 1)} {', '.join(uncut)} not cut"] if uncut else []
        return [*facts, *[f"of dim {dim} the first part" for dim in cut]]

    def rectangle(self, box: Box) -> tuple[int, int, int, int] | None:
        """Return ``(across, down, width, height)`` of a box; None of one that is not drawn."""
        if not box.numel or any(box.offsets[dim] for dim in self.hidden):
            return None
        (x, width), (y, height) = (
            (0, 1) if dim is None else (box.offsets[dim], box.sizes[dim])
            for dim in (self.across, self.down)
        )
        return x, y, width, height

    def extent(self, dim: int | None) -> int:
        """Return where a drawn dim ends."""
        return 1 if dim is None else self.edges[dim][-1]


def tensor_figure(fqn: str, shape: Sequence[int], dtype: str, pieces: Sequence[Piece]) -> Any:
    """Return the picture of one tensor: its chunks, coloured by the ranks that wrote them.

    Holes are hatched grey; elements that are stored twice are outlined and hatched red.
    """
    whole, boxes = Box.whole(tuple(shape)), [piece.box for piece in pieces]
    array = as_array(boxes, len(shape))
    holes = uncovered(whole, array, MAX_FLAWS)
    one, other = np.array(overlaps(array, MAX_FLAWS), np.int64).reshape(-1, 2).T
    doubles = list(dict.fromkeys(as_boxes(intersect(array[one], array[other]))))
    view = _View(shape, [box for box in (*boxes, *holes) if box.numel])
    # A chunk beyond the tensor's end has the end drawn.
    is_beyond = any(edges[-1] > max(size, 1) for edges, size in zip(view.edges, shape, strict=True))
    outlines = (
        (holes, _HOLE, "hole: nobody stored it"),
        (doubles, _DOUBLE, "stored more than once"),
        ([whole] if is_beyond else [], _END, "the tensor"),
    )
    steps = 0 if view.down is None else len(view.edges[view.down]) - 1
    height = 1.0 if view.down is None else min(max(2.8, 0.135 * steps + 0.6), MAX_HEIGHT)
    figure = _new_figure(1.2 + height)
    axes = figure.subplots()
    colors = _colors([piece.writer for piece in pieces])
    _paint(axes, view, pieces, colors)
    for outlined, style, _ in outlines:
        for rectangle in filter(None, map(view.rectangle, outlined)):
            axes.add_patch(_patch(rectangle, style))
    _set_scales(axes, view, shape)
    if 0 in shape:
        figure.text(0.5, 0.5, "no elements", ha="center", va="center", fontsize=9, color=GREY)
    chunks, writers = format_count(len(pieces), "chunk"), format_count(len(colors), "writer")
    facts = [f"{tuple(shape)} {dtype}", f"{chunks} of {writers}", *view.facts()]
    _add_title(figure, fqn, facts)
    _add_legend(
        figure,
        [(style, text) for outlined, style, text in outlines if outlined],
        colors if len(pieces) > MAX_LABELS else {},
    )
    return figure


def _paint(axes: Any, view: _View, pieces: Sequence[Piece], colors: Mapping[Writer, str]) -> None:
    """Paint the chunks; where they are few, name their writers."""
    from matplotlib.collections import PatchCollection

    shown = [(piece, place) for piece in pieces if (place := view.rectangle(piece.box))]
    patches = [_patch(place, {}) for _, place in shown]
    faces = [colors[piece.writer] for piece, _ in shown]
    line = 1.2 if len(patches) <= MAX_LABELS else 0.2
    axes.add_collection(
        PatchCollection(patches, facecolors=faces, edgecolors="white", linewidths=line)
    )
    for piece, (x, y, width, height) in shown if len(shown) <= MAX_LABELS else ():
        text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": DARK}
        text["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1.5}
        axes.text(x + width / 2, y + height / 2, _label(piece.writer), **text)


def _patch(rectangle: tuple[int, int, int, int], style: Mapping[str, Any]) -> Any:
    from matplotlib.patches import Rectangle

    x, y, width, height = rectangle
    return Rectangle((x, y), width, height, **style)


def _set_scales(axes: Any, view: _View, shape: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator

    axes.set_xlim(0, view.extent(view.across))
    axes.set_ylim(view.extent(view.down), 0)
    axes.set_frame_on(False)
    axes.tick_params(length=2, width=0.6, labelsize=8, color=GREY)
    for axis, dim in ((axes.xaxis, view.across), (axes.yaxis, view.down)):
        if dim is None:
            axis.set_ticks([])
            continue
        axis.set_major_locator(FixedLocator(view.edges[dim], nbins=12))
        axis.set_label_text(f"dim {dim} (of {shape[dim]})", fontsize=9, color=DARK)


def _add_legend(
    figure: Any, outlines: Sequence[tuple[Any, str]], colors: Mapping[Writer, str]
) -> None:
    """Explain hatches and outlines, and the colours of writers."""
    from matplotlib.patches import Patch

    handles = [Patch(**style, label=text) for style, text in outlines]
    writers = list(colors)
    if len(writers) > len(FEW):
        writers = [writers[(len(writers) - 1) * i // 4] for i in range(5)]
    handles += [Patch(facecolor=colors[writer], label=_label(writer)) for writer in writers]
    if handles:
        place = {"loc": "outside lower center", "ncols": 5}
        figure.legend(handles=handles, fontsize=8, frameon=False, **place)


def _new_figure(height: float) -> Any:
    """Return an empty ``matplotlib.figure.Figure``.

    Raises:
        CannotLook: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CannotLook('pictures need matplotlib: pip install "dcp-placements[plot]"') from None
    return Figure(figsize=(WIDTH, height), dpi=150, layout="constrained")


def _add_title(figure: Any, title: str, facts: Sequence[str]) -> None:
    """Write the title of a figure, and a line of facts below it."""
    height = figure.get_size_inches()[1]
    title = format_name(title)
    style: dict[str, Any] = {"x": 0.12 / WIDTH, "ha": "left", "va": "top", "color": DARK}
    style["parse_math"] = False  # names may have two dollar signs
    points = min(11.0, (WIDTH - 0.2) * 72 / (0.68 * max(len(title), 1)))
    figure.text(y=1 - 0.1 / height, s=title, fontsize=points, fontweight="bold", **style)
    figure.text(y=1 - 0.32 / height, s="    ".join(facts), fontsize=9, **style)
    pads = {"w_pad": 0.12, "h_pad": 0.1}
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.5 / height), **pads)


def _colors(writers: Sequence[Writer]) -> dict[Writer, str]:
    """Return a colour for each different writer, in their order."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    ordered = sorted(set(writers), key=_order)
    if len(ordered) <= len(FEW):
        return dict(zip(ordered, FEW, strict=False))
    ramp = LinearSegmentedColormap.from_list("writers", RAMP)
    last = len(ordered) - 1
    return {writer: to_hex(ramp(position / last)) for position, writer in enumerate(ordered)}


def _writer(file: str | None) -> Writer:
    if file is None:
        return "no file"
    rank = writer_of(file)
    return file if rank is None else rank


def _label(writer: Writer) -> str:
    return f"rank {writer}" if isinstance(writer, int) else format_name(writer)


def _order(writer: Writer) -> tuple[bool, int, str]:
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
        replaced_file(path) as stream,
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
