"""``draw``: a picture of one tensor, or of a whole checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dcp_placements.errors import CannotLook, format_count, format_names, format_nbytes
from dcp_placements.offline.checkpoint import Checkpoint, StoredChunk, StoredObject, StoredTensor
from dcp_placements.offline.views.picture import (
    DARK,
    FEW,
    Writer,
    add_title,
    new_figure,
    writer_label,
    writer_order,
)
from dcp_placements.offline.views.tensor_picture import Piece, tensor_figure
from dcp_placements.storage.metadata.save_ids import writer_of

MAX_NAMED = 32
"""Up to so many writers have a label each."""

MAX_HEIGHT = 9.0
"""In inches."""


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
    if fqn is None:
        name = Path(checkpoint.path).name or checkpoint.path
        return bytes_figure(name, _bytes_by_writer(checkpoint))
    tensor = _tensor_of(checkpoint, fqn)
    pieces = [Piece(chunk.box, _writer(chunk.file)) for chunk in tensor.chunks]
    return tensor_figure(fqn, tensor.shape, tensor.dtype_name, pieces)


def _tensor_of(checkpoint: Checkpoint, fqn: str) -> StoredTensor:
    """Return a tensor of a checkpoint.

    Raises:
        CannotLook: It has none of that name; near names are in the message.
    """
    if fqn in checkpoint.tensors:
        return checkpoint.tensors[fqn]
    if fqn in checkpoint.objects:
        raise CannotLook(f"{fqn} is an object and no tensor")
    near = [key for key in checkpoint.tensors if key.endswith("." + fqn)]
    near = near or get_close_matches(fqn, list(checkpoint.tensors), 4)
    hint = (
        f"likely:      {format_names(near, 4)}" if near else "way out:     inspect lists its keys"
    )
    raise CannotLook(f"{checkpoint.path}: no tensor {fqn}\n    {hint}")


def bytes_figure(title: str, nbytes: Mapping[Writer, Mapping[str, int]]) -> Any:
    """Return the picture of a whole checkpoint: a bar of the bytes that each rank wrote.

    Args:
        title: The checkpoint's name.
        nbytes: By writer and file, in bytes.
    """
    writers = sorted(nbytes, key=writer_order)
    totals = [sum(nbytes[writer].values()) for writer in writers]
    longest, mean = max(totals, default=0), sum(totals) / max(len(totals), 1)
    figure = new_figure(min(1.3 + 0.3 * max(len(writers), 2), MAX_HEIGHT))
    axes = figure.subplots()
    exponent = min(max(longest.bit_length() - 1, 0) // 10, 3)
    unit, scale = ("B", "KiB", "MiB", "GiB")[exponent], 1 << 10 * exponent
    for position, writer in enumerate(writers):
        start = 0
        # Two shades that alternate by file.
        for number, (_, length) in enumerate(sorted(nbytes[writer].items())):
            edge = {"edgecolor": "white", "linewidth": 0.8 if len(writers) <= 64 else 0.0}
            axes.barh(
                position, length / scale, 0.78, start / scale, color=FEW[2 * (number % 2)], **edge
            )
            start += length
        if len(writers) <= MAX_NAMED:
            files = len(nbytes[writer])
            note = format_nbytes(start) + (f" in {files} files" if files > 1 else "")
            at = (start + longest * 0.01) / scale
            axes.text(at, position, note, va="center", fontsize=8, color=DARK)
    axes.axvline(mean / scale, color=DARK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlim(0, longest * 1.2 / scale or 1)
    axes.set_xlabel(f"{unit}; dashed: the mean", fontsize=9)
    axes.set_ylim(len(writers) - 0.4, -0.6)
    step = -(-len(writers) // MAX_NAMED) or 1
    axes.set_yticks(range(0, len(writers), step), [writer_label(w) for w in writers[::step]])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    names = {name for by_file in nbytes.values() for name in by_file}
    facts = [f"{format_nbytes(sum(totals))} in {format_count(len(names), 'file')}"]
    if mean:
        facts.append(f"the largest writer has {longest / mean:.2f} times the mean")
    add_title(figure, title, facts)
    return figure


def _bytes_by_writer(checkpoint: Checkpoint) -> dict[Writer, Counter[str]]:
    records: list[StoredChunk | StoredObject] = list(checkpoint.objects.values())
    for tensor in checkpoint.tensors.values():
        records += tensor.chunks
    nbytes: dict[Writer, Counter[str]] = {}
    for record in records:
        if record.file is not None:
            nbytes.setdefault(_writer(record.file), Counter())[record.file] += record.nbytes
    return nbytes


def _writer(file: str | None) -> Writer:
    if file is None:
        return "no file"
    rank = writer_of(file)
    return file if rank is None else rank
