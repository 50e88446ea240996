"""Which rank reads what from which file, as a picture: ``rehearse --draw``.

The box that ranks ask for is divided by the stored chunks that it meets. Two ranks' halves of an
expert weight that one rank wrote are drawn as::

    DrawnBox(Box((0, 0), (2, 3)), "rank 0", ("__0_0.distcp", "ep=0"))
    DrawnBox(Box((2, 0), (2, 3)), "rank 1", ("__0_0.distcp", "ep=1"))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dcp_placements.layout.boxes import as_array, as_boxes, intersect
from dcp_placements.offline.checkpoint import AnySource, StoredTensor
from dcp_placements.offline.picture import (
    Bar,
    DrawnBox,
    DrawnTensor,
    Meanings,
    bytes_figure,
    check_count,
    format_cuts_line,
    tensors_figure,
)
from dcp_placements.offline.rehearsals.rehearsal import AskedBox, Rehearsal
from dcp_placements.offline.sources.opening import open_source
from dcp_placements.rules.mesh_axes import format_mesh_axes
from dcp_placements.short_text import format_count, format_nbytes, format_numbers, format_ranks
from dcp_placements.storage.store import StorageOptions

MAX_RANKS = 24
"""Characters of a list of ranks; a longer one is written by coordinates."""

NO_FILE = "no file"

READ = Meanings("no rank reads it", "read in boxes of two sizes", is_fault=False)


def draw_rehearsal(
    path: AnySource, rehearsal: Rehearsal, *, storage_options: StorageOptions = None
) -> Any:
    """Return a picture of what ranks would read, and from which files.

    Args:
        path: The checkpoint that was rehearsed.
        rehearsal: What ``rehearse`` returned. Where it lists requests (``fqn=``), the boxes of
            these tensors are drawn, each with the ranks that ask for it and its file; else the
            bytes that each rank reads.
        storage_options: Options that fsspec passes to the file system of a URL.

    Returns:
        A ``matplotlib.figure.Figure``; ``save_figure`` writes it.

    Raises:
        CannotLook: There is no checkpoint, or no matplotlib; or there are requests of too many
            tensors.
    """
    checkpoint = open_source(path, storage_options=storage_options)
    name = Path(checkpoint.path).name or checkpoint.path
    title = f"{name}, read by {format_mesh_axes(rehearsal.axes)}"
    title += "" if rehearsal.loads else ": does not load"
    if not rehearsal.requests:
        bars = [Bar(f"rank {r.rank}", r.slices_nbytes, r.files) for r in rehearsal.ranks]
        total = format_nbytes(sum(bar.nbytes for bar in bars))
        return bytes_figure(title, bars, f"{total} read in all")
    of_tensor: dict[str, list[AskedBox]] = {}
    for request in rehearsal.requests:
        of_tensor.setdefault(request.fqn, []).append(request)
    check_count(of_tensor)
    drawn = []
    for fqn, asked in of_tensor.items():
        tensor = checkpoint.tensor(fqn)
        cuts = () if checkpoint.record is None else checkpoint.record.cuts(fqn)
        facts = [*_facts(asked), *([format_cuts_line("saved", cuts)] if cuts else [])]
        if len(of_tensor) == 1:
            facts.append(title)
        boxes = list(_read_boxes(tensor, asked, rehearsal))
        files = [DrawnBox(chunk.box, chunk.file or NO_FILE) for chunk in tensor.chunks if chunk.box]
        drawn.append(DrawnTensor(fqn, tensor.shape, tensor.dtype_name, boxes, facts, cuts, files))
    return tensors_figure(title, drawn, READ)


def _facts(asked: Sequence[AskedBox]) -> Iterator[str]:
    """Yield how many boxes and files there are, and how many files a rank opens."""
    files_of: dict[int, set[str]] = {}
    for request in asked:
        for rank in request.ranks:
            files_of.setdefault(rank, set()).update(request.files)
    counts = [len(files) for files in files_of.values()]
    boxes = "1 box" if len(asked) == 1 else f"{len(asked):,} boxes"
    files = format_count(len(set().union(*files_of.values())), "file")
    opened = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{counts[0]}"
    yield f"{boxes} of {format_count(len(counts), 'rank')}, in {files}; a rank opens {opened}"


def _read_boxes(
    tensor: StoredTensor, asked: Sequence[AskedBox], rehearsal: Rehearsal
) -> Iterator[DrawnBox]:
    """Yield what each box that is asked for shares with each stored chunk."""
    boxes = as_array([request.box for request in asked], len(tensor.shape))
    chunks = tensor.chunks
    pairs = tensor.cut.meeting(boxes)
    shared = as_boxes(intersect(boxes[pairs[0]], tensor.cut.boxes[pairs[1]]))
    for box, chunk, part in zip(*map(np.ndarray.tolist, pairs), shared, strict=True):
        of_box = asked[box].ranks
        ranks, along = format_ranks(of_box), _along(of_box, rehearsal)
        notes: tuple[str, ...] = (chunks[chunk].file or NO_FILE, along)
        if len(ranks) > MAX_RANKS and along:
            ranks, notes = f"{len(of_box):,} ranks, {along}", notes[:1]
        yield DrawnBox(part, ranks, tuple(filter(None, notes)))


def _along(ranks: Sequence[int], rehearsal: Rehearsal) -> str:
    """Return where ranks are along the axes of the mesh; empty where that does not tell them.

    Axes along which they are everywhere are left out: ranks 0, 2, 4 and 6 of (dp=4, tp=2) are at
    ``tp=0``.
    """
    coordinates = np.array([rehearsal.ranks[rank].coordinate for rank in ranks])
    positions = [np.unique(column).tolist() for column in coordinates.T]
    if prod(map(len, positions)) != len(ranks):
        return ""
    sizes = zip(rehearsal.axes.items(), positions, strict=True)
    texts = [
        f"{axis}={format_numbers(held).replace(', ', ',')}"
        for (axis, size), held in sizes
        if len(held) < size
    ]
    return " ".join(texts)
