"""``draw``: a picture of tensors' boxes by rank, or of bytes by rank.

A stored tensor is drawn by the ranks that wrote its chunks; ``rehearsals/reading_picture.py`` draws
one by the ranks that read it. Two ranks' halves of an expert weight::

    DrawnBox(Box((0, 0), (2, 3)), "rank 0", ("ep=0",))
    DrawnBox(Box((2, 0), (2, 3)), "rank 1", ("ep=1",))

matplotlib (the extra ``plot``) is imported only when a picture is asked for. No window and no
global state of matplotlib is used: a figure is returned, to be saved or examined.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
from dcp_placements.names.known_names import parts_by_name
from dcp_placements.offline.checkpoint import AnySource, Checkpoint, StoredRecord, StoredTensor
from dcp_placements.offline.output import replaced_file
from dcp_placements.offline.sources.opening import open_source
from dcp_placements.short_text import (
    format_count,
    format_name,
    format_nbytes,
    format_numbers,
    natural_key,
)
from dcp_placements.storage.remote import local_or_url
from dcp_placements.storage.store import StorageOptions, open_store

FEW = ("#2f6db3", "#d9771f", "#86b3e0", "#f4bd85", "#4f8a5b", "#a8cfa6", "#77629e", "#c5b8dc")
"""Colours of up to eight ranks; those of more are steps along ``RAMP``."""

RAMP = ("#1f4e85", "#86b3e0", "#e9eef2", "#f4bd85", "#b35a0c")
DARK, GREY, RED = "#222222", "#8a8f94", "#b3261e"

MAX_HEIGHT = 9.0
"""In inches."""

MAX_LABELS = 32
"""Most ranks or boxes that have a label each; more have a legend."""

MAX_FLAWS = 500

MAX_DRAWN = 12
"""Most tensors in one picture."""

MOST_SHARDS = 1 << 12
"""Most shards, each part of a fused tensor on its own, whose coordinates are worked out."""

_CUT_WIDTH = 120
"""Characters of a line about cuts."""

_LETTER, _LINE, _LEAST = 0.075, 0.16, 0.08
"""Width and height of a letter of a label, and the least height of a labelled box, in inches."""

_HOLE: Any = {"facecolor": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.8}
_HELD_TWICE: Any = {"facecolor": "none", "edgecolor": RED, "hatch": "xx", "zorder": 2.5}
_READ_TWICE: Any = {"facecolor": "none", "edgecolor": DARK, "hatch": "..", "zorder": 2.5}
_OUTLINE: Any = {"facecolor": "none", "edgecolor": DARK, "linewidth": 1.0, "zorder": 2.4}
_LABEL: Any = {"fontsize": 8, "color": DARK, "va": "center"}
_PLAIN_TEXT: Any = {"color": DARK, "parse_math": False}  # names may have two dollar signs
_TITLE: Any = {"loc": "left", "fontsize": 9, **_PLAIN_TEXT}


class DrawnBox(NamedTuple):
    """A box of a tensor, and whose it is."""

    box: Box
    ranks: str  # the ranks that wrote or read it, ``rank 3``; or a file's name, if it tells no rank
    notes: tuple[str, ...] = ()  # more of its label, where there is room; the most useful first


class DrawnTensor(NamedTuple):
    """A tensor of a picture."""

    fqn: str  # its key
    shape: tuple[int, ...]  # shape of the whole tensor
    dtype: str  # its torch name without ``torch.``
    boxes: Sequence[DrawnBox]
    facts: Sequence[str] = ()  # what stands above it, beside its shape and dtype
    cuts: Cuts = ()  # how the save cut it; empty where nothing is recorded
    outlined: Sequence[DrawnBox] = ()  # labelled in place of ``boxes``, where those are too many


class Meanings(NamedTuple):
    """What the legend says of a box that nobody has, and of one that is there more than once."""

    hole: str
    double: str
    is_fault: bool  # whether the latter is one


class Bar(NamedTuple):
    """Bytes of a rank."""

    rank: str  # ``rank 3``, or a file's name
    nbytes: int  # length of the bar
    files: int  # number of files that hold them


STORED = Meanings("hole: nobody stored it", "stored more than once", is_fault=True)


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
    check_count(fqns)
    checkpoint = open_source(path, storage_options=storage_options)
    name = Path(checkpoint.path).name or checkpoint.path
    if fqns:
        tensors = map(checkpoint.tensor, dict.fromkeys(fqns))
        return tensors_figure(name, [_stored(checkpoint, tensor) for tensor in tensors])
    nbytes: dict[str, Counter[str]] = {}
    for record in checkpoint.records():
        nbytes.setdefault(_writer(record), Counter())[str(record.file)] += record.nbytes
    files = len({name for of_writer in nbytes.values() for name in of_writer})
    bars = [Bar(writer, of.total(), len(of)) for writer, of in nbytes.items()]
    total = format_nbytes(sum(bar.nbytes for bar in bars))
    return bytes_figure(name, bars, f"{total} in {format_count(files, 'file')}")


def check_count(fqns: Collection[str]) -> None:
    """Check that a picture can have some tensors.

    Raises:
        CannotLook: They are too many.
    """
    if len(fqns) > MAX_DRAWN:
        raise CannotLook(f"{len(fqns)} keys: a picture has {MAX_DRAWN} tensors at most")


def _stored(checkpoint: Checkpoint, tensor: StoredTensor) -> DrawnTensor:
    """Return a stored tensor with the writers of its chunks."""
    cuts = () if checkpoint.record is None else checkpoint.record.cuts(tensor.fqn)
    coordinates = coordinates_of(tensor.shape, cuts, tensor.boxes)
    boxes = [
        DrawnBox(box, _writer(chunk), coordinates.get(box, ()))
        for box, chunk in zip(tensor.boxes, tensor.chunks, strict=True)
    ]
    writers = format_count(len({box.ranks for box in boxes}), "writer")
    facts = [f"{format_count(tensor.count, 'chunk')} of {writers}"]
    if cuts:
        facts.append(format_cuts_line("cut", cuts))
    return DrawnTensor(tensor.fqn, tensor.shape, tensor.dtype_name, boxes, facts, cuts)


def format_cuts_line(label: str, cuts: Cuts) -> str:
    """Return the line of a picture that has the cuts of a save."""
    text = f"{label}: {', then '.join(map(str, cuts))}"
    return format_name(shorten(text, _CUT_WIDTH, placeholder=" ..."))


def _writer(record: StoredRecord) -> str:
    return record.file or "no file" if record.rank is None else f"rank {record.rank}"


def bytes_figure(title: str, bars: Sequence[Bar], fact: str) -> Any:
    """Return the picture of a whole checkpoint: a bar of the bytes of each rank.

    Args:
        title: The checkpoint's name.
        bars: The bytes of each rank.
        fact: What the line above the bars begins with.
    """
    bars = sorted(bars, key=lambda bar: natural_key(bar.rank))
    totals = [bar.nbytes for bar in bars]
    longest, mean = max(totals, default=0), sum(totals) / max(len(totals), 1)
    facts = [fact]
    if mean:
        facts.append(f"the longest bar has {longest / mean:.2f} times the mean (dashed)")
    height = min(1.1 + 0.3 * max(len(bars), 2), MAX_HEIGHT)
    figure, (axes,) = _new_figure([height], title)
    axes.set_title("; ".join(facts), **_TITLE)
    axes.barh(range(len(bars)), totals, 0.78 if len(bars) <= MAX_LABELS else 1.0, color=FEW[0])
    for row, bar in enumerate(bars if len(bars) <= MAX_LABELS else ()):
        several = f" in {bar.files} files" if bar.files > 1 else ""
        axes.text(bar.nbytes + longest * 0.01, row, format_nbytes(bar.nbytes) + several, **_LABEL)
    axes.axvline(mean, color=DARK, linewidth=0.9, linestyle="--")
    axes.set_xlim(0, longest * 1.2 or 1)
    axes.set_xticks([])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    step = -(-len(bars) // MAX_LABELS) or 1
    axes.set_yticks(range(0, len(bars), step), [format_name(bar.rank) for bar in bars[::step]])
    return figure


def tensors_figure(title: str, tensors: Sequence[DrawnTensor], meanings: Meanings = STORED) -> Any:
    """Return the picture of some tensors: their boxes, coloured by the ranks whose they are.

    Of each, the two dims with the most edges of boxes are drawn, the later one across, at the
    first index of all other dims. Holes are hatched grey; elements of two boxes are hatched, too.

    Args:
        title: The checkpoint's name, above several tensors.
        tensors: The tensors, one below the other; one at least.
        meanings: What the legend says of the hatched boxes.
    """
    colors = _colors([box.ranks for tensor in tensors for box in tensor.boxes])
    drawings = [_Drawing(tensor, meanings) for tensor in tensors]
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
        meanings: What the legend says of its flaws.
        facts: Lines above it.
        height: Of its chunks, in inches.
        is_labelled: Whether each chunk has a label.
    """

    def __init__(self, tensor: DrawnTensor, meanings: Meanings) -> None:
        shape, boxes = tensor.shape, dict.fromkeys(tensor.boxes)
        self.tensor, self.meanings, self._parts = tensor, meanings, _part_edges(tensor)
        self._array = as_array([drawn.box for drawn in tensor.boxes if drawn.box.numel], len(shape))
        starts_and_sizes = self._array.T.swapaxes(0, 1).tolist()
        # By dim, the edges of boxes; an empty tensor is drawn as a tensor of one element.
        self._edges = [
            sorted({0, max(size, 1), *starts, *map(add, starts, sizes), *self._parts.get(dim, ())})
            for dim, (size, starts, sizes) in enumerate(zip(shape, *starts_and_sizes, strict=True))
        ]
        self._down, self._across = _drawn_dims([len(along) for along in self._edges])
        drawn = self._down, self._across
        self._hidden = [dim for dim in range(len(shape)) if dim not in drawn]
        shown = [(drawn, area) for drawn in boxes if (area := self._rectangle(drawn.box))]
        self._shown, self.is_labelled = shown, len(shown) <= MAX_LABELS
        hidden = [f"dim {dim}: the first part" for dim in self._hidden if len(self._edges[dim]) > 2]
        first, *others = *tensor.facts, ""
        facts = [f"{tuple(shape)} {tensor.dtype}", first, *hidden]
        self.facts = ["; ".join(filter(None, facts)), *filter(None, others)]
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
        for drawn, (x, y, wide, high) in self._shown:
            style: Any = {
                "facecolor": colors[drawn.ranks],
                "linewidth": 1.2 if self.is_labelled else 0.2,
            }
            axes.add_patch(Rectangle((x, y), wide, high, edgecolor="white", **style))
            if self.is_labelled:
                self._write(axes, drawn, (x, y, wide, high), ends)
        outlined = [] if self.is_labelled else list(dict.fromkeys(self.tensor.outlined))
        for drawn in outlined if len(outlined) <= MAX_LABELS else ():
            if area := self._rectangle(drawn.box):
                axes.add_patch(Rectangle(area[:2], *area[2:], **_OUTLINE))
                self._write(axes, drawn, area, ends)
        legend: dict[str, Any] = {}
        array = self._array
        holes = uncovered(Box.whole(self.tensor.shape), array, MAX_FLAWS)
        first, other = np.array(overlaps(array, MAX_FLAWS), np.int64).reshape(-1, 2).T
        doubles = list(dict.fromkeys(as_boxes(intersect(array[first], array[other]))))
        twice = _HELD_TWICE if self.meanings.is_fault else _READ_TWICE
        for flaws, style, what in (
            (holes, _HOLE, self.meanings.hole),
            (doubles, twice, self.meanings.double),
        ):
            for x, y, wide, high in filter(None, map(self._rectangle, flaws)):
                axes.add_patch(Rectangle((x, y), wide, high, **style))
            legend |= {what: style} if flaws else {}
        axes.set_xlim(0, ends[0])
        axes.set_ylim(ends[1], 0)
        for axis, dim in ((axes.xaxis, self._across), (axes.yaxis, self._down)):
            ticks = [] if dim is None else self._edges[dim]
            axis.set_ticks(ticks[:: -(-len(ticks) // 12) or 1])
            name = "" if dim is None else f"dim {dim} (of {self.tensor.shape[dim]})"
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
                names_of_parts = parts_by_name(self.tensor.fqn, len(middles))
                labels = names_of_parts or [f"part {number}" for number in range(len(middles))]
                names.set_ticks(middles, labels)
                names.tick_params(length=0, labelsize=8)
        return legend

    def _write(
        self, axes: Any, drawn: DrawnBox, area: tuple[int, int, int, int], ends: Sequence[int]
    ) -> None:
        """Write the label of a box, if there is room.

        Args:
            axes: Where to write.
            drawn: The box.
            area: Its rectangle: across, down, width and height, in elements.
            ends: Width and height of the whole, in elements.
        """
        x, y, wide, high = area
        width, height = 7.0 * wide / ends[0], self.height * high / ends[1]
        if height < _LEAST:
            return
        label = _label([*map(format_name, (drawn.ranks, *drawn.notes))], (width, height))
        is_low = height < _LINE
        around = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7}
        style = _LABEL | ({"fontsize": 6} if is_low else {})
        box = around | {"pad": 0.3 if is_low else 1.5}
        place = x + wide / 2, y + high / 2, label
        axes.text(*place, ha="center", bbox=box, **style, parse_math=False, zorder=3)


def _label(lines: Sequence[str], room: tuple[float, float]) -> str:
    """Return the label of a box: as many of its lines as there is room for, the first at least.

    >>> _label(["rank 5", "ep=1 tp=0"], (2.0, 0.2)), _label(["rank 5", "ep=1 tp=0"], (0.5, 0.2))
    ('rank 5 · ep=1 tp=0', 'rank 5')

    Args:
        lines: The lines; side by side where they fit.
        room: Width and height, in inches.
    """
    for count in range(len(lines), 1, -1):
        for separator in (" · ", "\n"):
            label = separator.join(lines[:count])
            placed = label.split("\n")
            if max(map(len, placed)) * _LETTER < room[0] and len(placed) * _LINE < room[1]:
                return label
    return lines[0]


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


def coordinates_of(
    shape: tuple[int, ...], cuts: Cuts, boxes: Sequence[Box]
) -> dict[Box, tuple[str, ...]]:
    """Return by box where the ranks that hold it are along the axes of the recorded cuts.

    Empty where the record does not tell it: of rows that ranks list, of ranges, of padded tensors,
    whose chunks are others.

    >>> from dcp_placements.layout.sharding import Cut
    >>> halves = [Box((start, 0), (2, 3)) for start in (0, 2)]
    >>> list(coordinates_of((4, 3), (Cut(0, "ep", 2),), halves).values())
    [('ep=0',), ('ep=1',)]

    Args:
        shape: Shape of the whole tensor.
        cuts: How the save cut it.
        boxes: Its chunks.
    """
    counts = [cut.parts if isinstance(cut.parts, int) else len(cut.parts) for cut in cuts]
    is_told = all(
        cut.axis is not None
        and cut.of is None
        and cut.dim is not None
        and 0 <= cut.dim < len(shape)
        and cut.kind not in (Kind.LISTED, Kind.FLAT)
        for cut in cuts
    )
    shards = prod(cut.size * count for cut, count in zip(cuts, counts, strict=True))
    if not cuts or not is_told or shards > MOST_SHARDS:
        return {}
    sharding = Sharding(shape, cuts)
    held: dict[Box, list[tuple[int, ...]]] = {}
    try:
        for positions in sharding.positions():
            for chunk in sharding.shard(positions)[1]:
                held.setdefault(chunk.box, []).append(positions)
    except CannotPlace:
        return {}
    if not held.keys() >= {box for box in boxes if box.numel}:
        return {}
    axes = [str(cut.axis) for cut in cuts]
    return {box: (_along(axes, positions),) for box, positions in held.items()}


def _along(axes: Sequence[str], positions: Sequence[tuple[int, ...]]) -> str:
    """Return where ranks are along axes, by all of their positions.

    >>> _along(["ep", "tp"], [(0, 1)]), _along(["ep", "tp"], [(0, 2), (0, 3)])
    ('ep=0 tp=1', 'ep=0 tp=2-3')
    """
    along = [sorted(set(numbers)) for numbers in zip(*positions, strict=True)]
    if prod(map(len, along)) == len(positions):
        texts = [format_numbers(numbers).replace(", ", ",") for numbers in along]
        return " ".join(f"{axis}={text}" for axis, text in zip(axes, texts, strict=True))
    return f"{_along(axes, positions[:1])} and {len(positions) - 1} more"


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
    """Return a colour for each different text, in their natural order."""
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
    with replaced_file(store, name) as stream, matplotlib.rc_context(reproducible):
        figure.savefig(stream, format=kind, facecolor="white", metadata=notes)


def check_picture_name(path: str | os.PathLike[str]) -> str:
    """Return ``"png"`` or ``"svg"``, the suffix of ``path``, a picture's name.

    Raises:
        CannotLook: Another suffix.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise CannotLook(f"{path}: a picture's name ends in .png or .svg")
    return kind
