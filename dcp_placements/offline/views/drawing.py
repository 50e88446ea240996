"""Pictures of checkpoints."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dcp_placements.errors import CannotLook, format_names
from dcp_placements.offline.checkpoint import Checkpoint, StoredTensor
from dcp_placements.offline.views.picture import Piece, bytes_figure, tensor_figure
from dcp_placements.storage.metadata.save_ids import writer_of


def draw(path: str | os.PathLike[str] | Checkpoint, fqn: str | None = None) -> Any:
    """Return a picture: of one tensor's chunks, or of the bytes that each rank wrote.

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
        return bytes_figure(_name(checkpoint), _bytes_by_writer(checkpoint))
    tensor = _tensor(checkpoint, fqn)
    pieces = [
        Piece(chunk.box, "no file" if chunk.file is None else _writer(chunk.file))
        for chunk in tensor.chunks
    ]
    return tensor_figure(fqn, tensor.shape, str(tensor.dtype).removeprefix("torch."), pieces)


def _tensor(checkpoint: Checkpoint, fqn: str) -> StoredTensor:
    tensor = checkpoint.tensors.get(fqn)
    if tensor is None:
        alike = get_close_matches(fqn, list(checkpoint.tensors), 3, 0.4)
        known = alike or list(checkpoint.tensors)
        raise CannotLook(
            f"{checkpoint.path}: no tensor {fqn}\n    there are:   {format_names(known, 3)}"
        )
    return tensor


def _bytes_by_writer(checkpoint: Checkpoint) -> dict[int | str, dict[str, int]]:
    found: dict[int | str, dict[str, int]] = {}
    for tensor in checkpoint.tensors.values():
        for chunk in tensor.chunks:
            if chunk.file is not None:
                files = found.setdefault(_writer(chunk.file), {})
                files[chunk.file] = files.get(chunk.file, 0) + chunk.nbytes
    for held in checkpoint.objects.values():
        if held.file is not None:
            files = found.setdefault(_writer(held.file), {})
            files[held.file] = files.get(held.file, 0) + held.nbytes
    return found


def _writer(file: str) -> int | str:
    rank = writer_of(file)
    return file if rank is None else rank


def _name(checkpoint: Checkpoint) -> str:
    return Path(checkpoint.path).name or checkpoint.path
