"""``draw``: a picture of one tensor, or of a whole checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dcp_placements.errors import CannotLook, format_names
from dcp_placements.offline.checkpoint import Checkpoint, StoredChunk, StoredObject
from dcp_placements.offline.views.bytes_picture import bytes_figure
from dcp_placements.offline.views.picture import Writer
from dcp_placements.offline.views.tensor_picture import Piece, tensor_figure
from dcp_placements.storage.metadata.save_ids import writer_of


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
    tensor = checkpoint.tensors.get(fqn)
    if tensor is None:
        keys = list(checkpoint.tensors)
        near = get_close_matches(fqn, keys, 3, 0.4) or keys
        raise CannotLook(
            f"{checkpoint.path}: no tensor {fqn}\n    there are:   {format_names(near, 3)}"
        )
    pieces = [Piece(chunk.box, _writer(chunk.file)) for chunk in tensor.chunks]
    return tensor_figure(fqn, tensor.shape, str(tensor.dtype).removeprefix("torch."), pieces)


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
