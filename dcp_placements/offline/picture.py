"""``draw``: a picture of tensors' chunks, or of the bytes that each rank wrote.

matplotlib (the extra ``plot``) is imported only when a picture is asked for. No window and no
global state of matplotlib is used: a figure is returned, to be saved or examined.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import add
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np

from dcp_placements.errors import CannotLook, CannotPlace
from dcp_placements.layout.boxes import as_array, as_boxes, intersect, overlaps, uncovered
from dcp_placements.layout.sharding import Box, Cuts, Kind, Sharding, part_sizes
from dcp_placements.offline.checkpoint import AnySource, StoredRecord
from dcp_placements.offline.sources.opening import open_source
from dcp_placements.short_text import (
    format_count,
    format_name,
    format_nbytes,
    natural_key,
)
from dcp_placements.storage.remote import local_or_url
from dcp_placements.storage.store import StorageOptions, open_store

FEW = ("#2f6db3", "#d9771f", "#86b3e0", "#f4bd85", "#4f8a5b", "#a8cfa6", "#77629e", "#c5b8dc")
"""Colours of up to eight writers; those of more writers are steps along ``RAMP``."""

RAMP = ("#1f4e85", "#86b3e0", "#e9eef2", "#f4bd85", "#b35a0c")
DARK, GREY, RED = "#222222", "#8a8f94", "#b3261e"

MAX_HEIGHT = 9.0
"""In inches."""

MAX_LABELS = 32
"""Most writers or chunks that have a label each; more have a legend."""

MAX_FLAWS = 500

MAX_DRAWN = 12
"""Most tensors in one picture."""

MOST_SHARDS = 1 << 12
"""Most shards, each part of a fused tensor on its own, whose coordinates are worked out."""

_CUT_WIDTH, _LETTER, _LINE = (
    120,
    0.075,
    0.16,
)  # in letters; width and height of a label's, in inches

_HOLE: Any = {"facecolor": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.8}
_HELD_TWICE: Any = {"facecolor": "none", "edgecolor": RED, "hatch": "xx", "zorder": 2.5}
_LABEL: Any = {"fontsize": 8, "color": DARK, "va": "center"}
_PLAIN_TEXT: Any = {"color": DARK, "parse_math": False}  # names may have two dollar signs
_TITLE: Any = {"loc": "left", "fontsize": 9, **_PLAIN_TEXT}


class WrittenBox(NamedTuple):
    """A stored chunk: its box in the tensor, and who wrote it."""

    box: Box
    writer: str  # ``rank 3``; the file's name if it does not tell the rank


class DrawnTensor(NamedTuple):
    """A tensor of a picture."""

    fqn: str  # its key
    shape: tuple[int, ...]  # shape of the whole tensor
    dtype: str  # its torch name without ``torch.``
    chunks: Sequence[WrittenBox]
    cuts: Cuts = ()  # how the save cut it; empty where nothing is recorded


def draw(
    path: AnySource,
    *fqns: str,
    storage_options: StorageOptions = None,
) -> Any:
    """Return a picture of some tensors' chunks, or of the bytes that each rank wrote.

    Args:
        path: The checkpoint.
        fqns: Keys of tensors, ``MAX_DRAWN`` at most; none for the whole checkpoint.
        storage_options: Options that fsspec passes to the file system of a URL.

    Returns:
        A ``matplotlib.figure.Figure``; ``save_figure`` writes it.

    Raises:
        CannotLook: There is no checkpoint, or no such tensor in it, or no matplotlib; or there are
            too many keys.
    """
    if len(fqns) > MAX_DRAWN:
        raise CannotLook(f"{len(fqns)} keys: a picture has {MAX_DRAWN} tensors at most")
    checkpoint = open_source(path, storage_options=storage_options)
    name = Path(checkpoint.path).name or checkpoint.path
    if fqns:
        drawn = []
        for fqn in dict.fromkeys(fqns):
            tensor = checkpoint.tensor(fqn)
            chunks = list(map(WrittenBox, tensor.boxes, map(_writer, tensor.chunks)))
            cuts = () if checkpoint.record is None else checkpoint.record.cuts(fqn)
            drawn.append(DrawnTensor(fqn, tensor.shape, tensor.dtype_name, chunks, cuts))
        return tensors_figure(name, drawn)
    nbytes: dict[str, Counter[str]] = {}
    for record in checkpoint.records():
        nbytes.setdefault(_writer(record), Counter())[str(record.file)] += record.nbytes
    return bytes_figure(name, nbytes)


def _writer(record: StoredRecord) -> str:
    return record.file or "no file" if record.rank is None else f"rank {record.rank}"


def bytes_figure(title: str, nbytes: Mapping[str, Mapping[str, int]]) -> Any:
    """Return the picture of a whole checkpoint: a bar of the bytes that each rank wrote.

    Args:
        title: The checkpoint's name.
        nbytes: Bytes by writer and file.
    """
    writers = sorted(nbytes, key=natural_key)
    totals = [sum(nbytes[writer].values()) for writer in writers]
    longest, mean = max(totals, default=0), sum(totals) / max(len(totals), 1)
    files = len({name for by_file in nbytes.values() for name in by_file})
    facts = [f"{format_nbytes(sum(totals))} in {format_count(files, 'file')}"]
    if mean:
        facts.append(f"the largest writer has {longest / mean:.2f} times the mean (dashed)")
    height = min(1.1 + 0.3 * max(len(writers), 2), MAX_HEIGHT)
    figure, (axes,) = _new_figure([height], title)
    axes.set_title("    ".join(facts), **_TITLE)
    axes.barh(range(len(writers)), totals, 0.78, color=FEW[0])
    for row, writer in enumerate(writers if len(writers) <= MAX_LABELS else ()):
        several = f" in {len(nbytes[writer])} files" if len(nbytes[writer]) > 1 else ""
        label = format_nbytes(totals[row]) + several
        axes.text(totals[row] + longest * 0.01, row, label, **_LABEL)
    axes.axvline(mean, color=DARK, linewidth=0.9, linestyle="--")
    axes.set_xlim(0, longest * 1.2 or 1)
    axes.set_xticks([])
    axes.set_ylim(len(writers) - 0.4, -0.6)
    step = -(-len(writers) // MAX_LABELS) or 1
    axes.set_yticks(range(0, len(writers), step), [*map(format_name, writers[::step])])
    return figure


def tensors_figure(title: str, tensors: Sequence[DrawnTensor]) -> Any:
    """Return the picture of some tensors: their chunks, coloured by the ranks that wrote them.

    Of each, the two dims with the most edges of chunks are drawn, the later one across, at the
    first index of all other dims. Holes are hatched grey; elements that are stored twice are
    hatched red. Ranks that the record of the save tells apart have their coordinates beside them.

    Args:
        title: The checkpoint's name, above several tensors.
        tensors: The tensors, one below the other; one at least.
    """
    colors = _colors([chunk.writer for tensor in tensors for chunk in tensor.chunks])
    drawings = [_Drawing(tensor) for tensor in tensors]
    heights = [1.2 + drawing.height for drawing in drawings]
    figure, rows = _new_figure(heights, tensors[0].fqn if len(tensors) == 1 else title)
    legend: dict[str, Any] = {}
    is_labelled = True
    for drawing, axes in zip(drawings, rows, strict=True):
        above = [] if len(tensors) == 1 else [format_name(drawing.tensor.fqn)]
        axes.set_title("\n".join([*above, *drawing.facts]), **_TITLE)
        legend |= drawing.draw_on(axes, colors)
        is_labelled &= drawing.is_labelled
    from matplotlib.patches import Patch

    writers = [] if is_labelled else list(colors)
    if len(writers) > len(FEW):
        writers = [writers[(len(writers) - 1) * i // 4] for i in range(5)]
    handles = [Patch(**style, label=what) for what, style in legend.items()]
    handles += [Patch(facecolor=colors[writer], label=format_name(writer)) for writer in writers]
    if handles:
        placement = {"loc": "outside lower center", "ncols": 5}
        figure.legend(handles=handles, fontsize=8, frameon=False, **placement)
    return figure


class _Drawing:
    """One tensor of a picture.

    Attributes:
        tensor: The tensor.
        facts: Lines above it.
        height: Of its chunks, in inches.
        is_labelled: Whether each chunk has a label.
    """

    def __init__(self, tensor: DrawnTensor) -> None:
        shape, chunks = tensor.shape, tensor.chunks
        self.tensor, self._parts = tensor, _part_edges(tensor)
        self._array = as_array([chunk.box for chunk in chunks if chunk.box.numel], len(shape))
        starts_and_sizes = self._array.T.swapaxes(0, 1).tolist()
        # By dim, the edges of boxes; an empty tensor is drawn as a tensor of one element.
        self._edges = [
            sorted({0, max(size, 1), *starts, *map(add, starts, sizes), *self._parts.get(dim, ())})
            for dim, (size, starts, sizes) in enumerate(zip(shape, *starts_and_sizes, strict=True))
        ]
        self._down, self._across = _drawn_dims([len(along) for along in self._edges])
        drawn = self._down, self._across
        self._hidden = [dim for dim in range(len(shape)) if dim not in drawn]
        shown = [(chunk, area) for chunk in chunks if (area := self._rectangle(chunk.box))]
        self._shown, self.is_labelled = shown, len(shown) <= MAX_LABELS
        facts = [
            f"{tuple(shape)} {tensor.dtype}",
            f"{format_count(len(chunks), 'chunk')} of "
            f"{format_count(len({chunk.writer for chunk in chunks}), 'writer')}",
            *[f"dim {dim}: the first part" for dim in self._hidden if len(self._edges[dim]) > 2],
        ]
        self.facts = ["    ".join(facts)]
        if tensor.cuts:
            cuts = f"cut: {', then '.join(map(str, tensor.cuts))}"
            self.facts.append(format_name(shorten(cuts, _CUT_WIDTH, placeholder=" ...")))
        rows = 0 if self._down is None else len(self._edges[self._down])
        self.height = min(max(2.8, 0.135 * rows + 0.5), MAX_HEIGHT) if rows else 1.0

    def _rectangle(self, box: Box) -> tuple[int, int, int, int] | None:
        """Return ``(across, down, width, height)`` of a box; None where it is not drawn."""
        if not box.numel or any(box.offsets[dim] for dim in self._hidden):
            return None
        across, down = self._across, self._down
        x, width = (0, 1) if across is None else (box.offsets[across], box.sizes[across])
        y, height = (0, 1) if down is None else (box.offsets[down], box.sizes[down])
        return x, y, width, height

    def draw_on(self, axes: Any, colors: Mapping[str, str]) -> dict[str, Any]:
        """Draw it; return the styles of flaws that it has, by their meaning.

        Args:
            axes: Where to draw.
            colors: Colours by writer.
        """
        from matplotlib.patches import Rectangle

        ends = [1 if dim is None else self._edges[dim][-1] for dim in (self._across, self._down)]
        coordinates = _coordinates(self.tensor) if self.is_labelled else {}
        around: Any = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1.5}
        for chunk, (x, y, wide, high) in self._shown:
            style: Any = {
                "facecolor": colors[chunk.writer],
                "linewidth": 1.2 if self.is_labelled else 0.2,
            }
            axes.add_patch(Rectangle((x, y), wide, high, edgecolor="white", **style))
            if self.is_labelled:
                room = 7.0 * wide / ends[0], self.height * high / ends[1]
                label = _label(format_name(chunk.writer), coordinates.get(chunk.box, ""), room)
                place = x + wide / 2, y + high / 2, label
                axes.text(*place, ha="center", bbox=around, **_LABEL, parse_math=False)
        legend: dict[str, Any] = {}
        array = self._array
        holes = uncovered(Box.whole(self.tensor.shape), array, MAX_FLAWS)
        first, other = np.array(overlaps(array, MAX_FLAWS), np.int64).reshape(-1, 2).T
        doubles = list(dict.fromkeys(as_boxes(intersect(array[first], array[other]))))
        for flaws, style, what in (
            (holes, _HOLE, "hole: nobody stored it"),
            (doubles, _HELD_TWICE, "stored more than once"),
        ):
            for x, y, wide, high in filter(None, map(self._rectangle, flaws)):
                axes.add_patch(Rectangle((x, y), wide, high, **style))
            legend |= {what: style} if flaws else {}
        axes.set_xlim(0, ends[0])
        axes.set_ylim(ends[1], 0)
        for axis, drawn in ((axes.xaxis, self._across), (axes.yaxis, self._down)):
            ticks = [] if drawn is None else self._edges[drawn]
            axis.set_ticks(ticks[:: -(-len(ticks) // 12) or 1])
            name = "" if drawn is None else f"dim {drawn} (of {self.tensor.shape[drawn]})"
            axis.set_label_text(name)
        for dim, line, beside in (
            (self._across, axes.axvline, axes.secondary_xaxis),
            (self._down, axes.axhline, axes.secondary_yaxis),
        ):
            edges = [] if dim is None else self._parts.get(dim, [])
            for edge in edges[1:-1]:
                line(edge, color=DARK, linewidth=1.6, linestyle="--", zorder=2.2)
            if edges:
                names = beside("top" if dim == self._across else "right", frame_on=False)
                middles = [(start + stop) / 2 for start, stop in pairwise(edges)]
                labels = [f"part {number}" for number in range(len(middles))]
                names.set_ticks(middles, labels)
                names.tick_params(length=0, labelsize=8)
        return legend


def _label(writer: str, coordinate: str, room: tuple[float, float]) -> str:
    """Return a chunk's label: with the coordinate beside or below the writer where there is room.

    >>> _label("rank 5", "ep=1 tp=0", (2.0, 0.2)), _label("rank 5", "ep=1 tp=0", (0.5, 0.2))
    ('rank 5  ep=1 tp=0', 'rank 5')

    Args:
        writer: Who wrote it.
        coordinate: The coordinate; empty where it is unknown.
        room: Width and height, in inches.
    """
    for label in (f"{writer}  {coordinate}", f"{writer}\n{coordinate}"):
        lines = label.split("\n")
        if max(map(len, lines)) * _LETTER < room[0] and len(lines) * _LINE < room[1]:
            return label if coordinate else writer
    return writer


def _part_edges(tensor: DrawnTensor) -> dict[int, list[int]]:
    """Return by dim the edges of the parts of a fused tensor, if the record of the save has them.

    The record has no padding: parts of a padded dim are not drawn.
    """
    edges: dict[int, list[int]] = {}
    cut_before = set()
    for cut in tensor.cuts:
        dim, first = cut.dim, cut.dim not in cut_before
        cut_before.add(dim)
        if dim is None or not 0 <= dim < len(tensor.shape) or cut.kind is not Kind.FUSED:
            continue
        count = cut.parts if isinstance(cut.parts, int) else len(cut.parts)
        if first and cut.of is None and count <= MAX_LABELS:
            try:
                edges[dim] = [0, *accumulate(part_sizes(cut.parts, tensor.shape[dim]))]
            except CannotPlace:
                continue
    return edges


def _coordinates(tensor: DrawnTensor) -> dict[Box, str]:
    """Return by box where its ranks are along the axes of the recorded cuts.

    Empty where the record does not tell it: of rows that ranks list, of ranges, of padded tensors,
    whose chunks are others. A box that several coordinates have has none.

    >>> from dcp_placements.layout.sharding import Cut
    >>> halves = [WrittenBox(Box((start, 0), (2, 3)), f"rank {start // 2}") for start in (0, 2)]
    >>> list(_coordinates(DrawnTensor("w", (4, 3), "int8", halves, (Cut(0, "ep", 2),))).values())
    ['ep=0', 'ep=1']
    """
    cuts = tensor.cuts
    counts = [cut.parts if isinstance(cut.parts, int) else len(cut.parts) for cut in cuts]
    is_told = all(
        cut.axis is not None
        and cut.of is None
        and cut.dim is not None
        and 0 <= cut.dim < len(tensor.shape)
        and cut.kind not in (Kind.LISTED, Kind.FLAT)
        for cut in cuts
    )
    shards = prod(cut.size * count for cut, count in zip(cuts, counts, strict=True))
    if not cuts or not is_told or shards > MOST_SHARDS:
        return {}
    sharding = Sharding(tensor.shape, cuts)
    held: dict[Box, list[tuple[int, ...]]] = {}
    try:
        for positions in sharding.positions():
            for chunk in sharding.shard(positions)[1]:
                held.setdefault(chunk.box, []).append(positions)
    except CannotPlace:
        return {}
    if not held.keys() >= {chunk.box for chunk in tensor.chunks if chunk.box.numel}:
        return {}
    return {
        box: " ".join(
            f"{cut.axis}={position}" for cut, position in zip(cuts, of_box[0], strict=True)
        )
        for box, of_box in held.items()
        if len(of_box) == 1
    }


def _drawn_dims(counts: Sequence[int]) -> tuple[int | None, int | None]:
    """Return the dims that are drawn down and across; None where a tensor lacks one.

    The dim with the most edges is drawn, and of the others the one with the most edges, the nearest
    to it and then the last among equals.

    >>> _drawn_dims([2, 5, 3]), _drawn_dims([2]), _drawn_dims([])
    ((1, 2), (None, 0), (None, None))

    Args:
        counts: Number of edges of chunks along each dim.
    """
    ranked = sorted(range(len(counts)), key=lambda dim: -counts[dim])
    others = sorted(ranked[1:], key=lambda dim: (-counts[dim], abs(dim - ranked[0]), -dim))
    down, across = [None, None, *sorted([*ranked[:1], *others[:1]])][-2:]
    return down, across


def _colors(writers: Sequence[str]) -> dict[str, str]:
    """Return a colour for each different writer, in their order."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    ordered = sorted(set(writers), key=natural_key)
    if len(ordered) <= len(FEW):
        return dict(zip(ordered, FEW, strict=False))
    ramp, last = LinearSegmentedColormap.from_list("writers", RAMP), len(ordered) - 1
    return {writer: to_hex(ramp(position / last)) for position, writer in enumerate(ordered)}


def _new_figure(heights: Sequence[float], title: str) -> tuple[Any, list[Any]]:
    """Return a figure with a title, and its axes, one below the other.

    Args:
        heights: Height of each, in inches.
        title: The text above all.

    Raises:
        CannotLook: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CannotLook('pictures need matplotlib: pip install "dcp-placements[plot]"') from None
    figure: Any = Figure(figsize=(8.0, sum(heights)), dpi=150, layout="constrained")
    figure.suptitle(format_name(title), x=0.01, ha="left", size=10, weight="bold", **_PLAIN_TEXT)
    rows = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for axes in rows:
        axes.set_frame_on(False)
        axes.tick_params(length=2, labelsize=8, color=GREY)
    return figure, list(rows)


def save_figure(
    figure: Any,
    path: str | os.PathLike[str],
    *,
    storage_options: StorageOptions = None,
) -> None:
    """Write a figure to a ``.png`` or ``.svg`` file; an existing one is replaced.

    Args:
        figure: What ``draw`` returns.
        path: Path or URL of the file.
        storage_options: Options that fsspec passes to the file system of a URL.

    Raises:
        CannotLook: Another suffix, or another process is writing the file.
    """
    import matplotlib

    kind = check_picture_name(path)
    # The same bytes from the same input, and text as text.
    reproducible: Any = {"svg.hashsalt": "dcp_placements", "svg.fonttype": "none"}
    notes = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    folder, name = os.path.split(os.fspath(local_or_url(path)))
    store = open_store(folder or ".", storage_options)
    with store.replace(name) as stream, matplotlib.rc_context(reproducible):
        figure.savefig(stream, format=kind, facecolor="white", metadata=notes)
    store.sync()


def check_picture_name(path: str | os.PathLike[str]) -> str:
    """Return ``"png"`` or ``"svg"``, the suffix of ``path``, a picture's name.

    Raises:
        CannotLook: Another suffix.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise CannotLook(f"{path}: a picture's name ends in .png or .svg")
    return kind
