"""``draw``: a picture of one tensor's chunks, or of the bytes that each rank wrote.

matplotlib (the extra ``plot``) is imported only when a picture is asked for. No window and no
global state of matplotlib is used: a figure is returned, to be saved or examined.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dcp_placements.errors import CannotLook
from dcp_placements.layout.boxes import as_array, as_boxes, intersect, overlaps, uncovered
from dcp_placements.layout.sharding import Box
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

_HOLE: Any = {"facecolor": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.8}
_HELD_TWICE: Any = {"facecolor": "none", "edgecolor": RED, "hatch": "xx", "zorder": 2.5}
_LABEL: Any = {"fontsize": 8, "color": DARK, "va": "center"}


class WrittenBox(NamedTuple):
    """A stored chunk: its box in the tensor, and who wrote it."""

    box: Box
    writer: str  # ``rank 3``; the file's name if it does not tell the rank


def draw(
    path: AnySource,
    fqn: str | None = None,
    *,
    storage_options: StorageOptions = None,
) -> Any:
    """Return a picture of one tensor's chunks, or of the bytes that each rank wrote.

    Args:
        path: The checkpoint.
        fqn: The tensor's key; None for the whole checkpoint.
        storage_options: Options that fsspec passes to the file system of a URL.

    Returns:
        A ``matplotlib.figure.Figure``; ``save_figure`` writes it.

    Raises:
        CannotLook: There is no checkpoint, or no such tensor in it, or no matplotlib.
    """
    checkpoint = open_source(path, storage_options=storage_options)
    if fqn is not None:
        tensor = checkpoint.tensor(fqn)
        writers = map(_writer, tensor.chunks)
        chunks = list(map(WrittenBox, tensor.boxes, writers))
        return tensor_figure(fqn, tensor.shape, tensor.dtype_name, chunks)
    nbytes: dict[str, Counter[str]] = {}
    for record in checkpoint.records():
        nbytes.setdefault(_writer(record), Counter())[str(record.file)] += record.nbytes
    return bytes_figure(Path(checkpoint.path).name or checkpoint.path, nbytes)


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
    figure, axes = _new_figure(height, title, facts)
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


def tensor_figure(fqn: str, shape: Sequence[int], dtype: str, chunks: Sequence[WrittenBox]) -> Any:
    """Return the picture of one tensor: its chunks, coloured by the ranks that wrote them.

    The two dims with the most edges of chunks are drawn, the later one across, at the first index
    of all other dims. Holes are hatched grey; elements that are stored twice are hatched red.
    """
    boxes = [chunk.box for chunk in chunks if chunk.box.numel]
    array = as_array(boxes, len(shape))
    holes = uncovered(Box.whole(tuple(shape)), array, MAX_FLAWS)
    first, other = np.array(overlaps(array, MAX_FLAWS), np.int64).reshape(-1, 2).T
    doubles = list(dict.fromkeys(as_boxes(intersect(array[first], array[other]))))
    # By dim, the edges of boxes; an empty tensor is drawn as a tensor of one element.
    edges = [
        sorted({0, max(size, 1), *starts, *map(add, starts, sizes)})
        for size, starts, sizes in zip(shape, *array.T.swapaxes(0, 1).tolist(), strict=True)
    ]
    down, across = _drawn_dims([len(along) for along in edges])
    hidden = [dim for dim in range(len(shape)) if dim not in (down, across)]

    def rectangle(box: Box) -> tuple[int, int, int, int] | None:
        """Return ``(across, down, width, height)`` of a box; None where it is not drawn."""
        if not box.numel or any(box.offsets[dim] for dim in hidden):
            return None
        x, width = (0, 1) if across is None else (box.offsets[across], box.sizes[across])
        y, height = (0, 1) if down is None else (box.offsets[down], box.sizes[down])
        return x, y, width, height

    colors = _colors([chunk.writer for chunk in chunks])
    facts = [
        f"{tuple(shape)} {dtype}",
        f"{format_count(len(chunks), 'chunk')} of {format_count(len(colors), 'writer')}",
        *[f"dim {dim}: the first part" for dim in hidden if len(edges[dim]) > 2],
    ]
    height = 1.0 if down is None else min(max(2.8, 0.135 * len(edges[down]) + 0.5), MAX_HEIGHT)
    figure, axes = _new_figure(1.2 + height, fqn, facts)
    from matplotlib.patches import Patch, Rectangle

    shown = [(chunk, area) for chunk in chunks if (area := rectangle(chunk.box))]
    is_labelled = len(shown) <= MAX_LABELS
    around: Any = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1.5}
    for chunk, (x, y, wide, high) in shown:
        style: Any = {"facecolor": colors[chunk.writer], "linewidth": 1.2 if is_labelled else 0.2}
        axes.add_patch(Rectangle((x, y), wide, high, edgecolor="white", **style))
        if is_labelled:
            label = format_name(chunk.writer)
            axes.text(x + wide / 2, y + high / 2, label, ha="center", bbox=around, **_LABEL)
    handles = []
    for flaws, style, what in (
        (holes, _HOLE, "hole: nobody stored it"),
        (doubles, _HELD_TWICE, "stored more than once"),
    ):
        for x, y, wide, high in filter(None, map(rectangle, flaws)):
            axes.add_patch(Rectangle((x, y), wide, high, **style))
        handles += [Patch(**style, label=what)] if flaws else []
    writers = [] if is_labelled else list(colors)
    if len(writers) > len(FEW):
        writers = [writers[(len(writers) - 1) * i // 4] for i in range(5)]
    handles += [Patch(facecolor=colors[writer], label=format_name(writer)) for writer in writers]
    if handles:
        placement = {"loc": "outside lower center", "ncols": 5}
        figure.legend(handles=handles, fontsize=8, frameon=False, **placement)
    axes.set_xlim(0, 1 if across is None else edges[across][-1])
    axes.set_ylim(1 if down is None else edges[down][-1], 0)
    for axis, drawn in ((axes.xaxis, across), (axes.yaxis, down)):
        ticks = [] if drawn is None else edges[drawn]
        axis.set_ticks(ticks[:: -(-len(ticks) // 12) or 1])
        axis.set_label_text("" if drawn is None else f"dim {drawn} (of {shape[drawn]})")
    return figure


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


def _new_figure(height: float, title: str, facts: Sequence[str]) -> tuple[Any, Any]:
    """Return a figure with a title and a line of facts, and its axes.

    Raises:
        CannotLook: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CannotLook('pictures need matplotlib: pip install "dcp-placements[plot]"') from None
    figure: Any = Figure(figsize=(8.0, height), dpi=150, layout="constrained")
    style: Any = {"color": DARK, "parse_math": False}  # names may have two dollar signs
    figure.suptitle(format_name(title), x=0.01, ha="left", size=10, weight="bold", **style)
    axes = figure.subplots()
    axes.set_title("    ".join(facts), loc="left", fontsize=9, **style)
    axes.set_frame_on(False)
    axes.tick_params(length=2, labelsize=8, color=GREY)
    return figure, axes


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
