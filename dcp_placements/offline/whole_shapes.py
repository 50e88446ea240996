"""The shapes of a checkpoint's tensors, for ``whole=`` of ``Placements`` and ``check``."""

from __future__ import annotations

import os

from dcp_placements.errors import CannotLook, format_names
from dcp_placements.offline.assembly import assembled
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.declared import Rename


def shapes(
    path: str | os.PathLike[str] | Checkpoint, rename: Rename | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every tensor of a checkpoint; only metadata and headers are read.

    Args:
        path: A checkpoint of any format, such as a directory of safetensors from the Hub.
        rename: From its keys to those of the model, where they differ: to a name, or to the
            ``Row``, ``Rows`` or ``Parts`` of a ``Stack``, an ``Unstack`` or a ``Split``.

    Raises:
        CannotLook: It is no checkpoint, cannot be read, or lacks files; or ``rename`` has no name
            for a key, gives one name twice, or makes a stack of which rows are missing.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    if checkpoint.absent or checkpoint.absent_ranks:
        lost = sorted(set(checkpoint.absent.values()))
        lost += [f"the metadata of rank {rank}" for rank in checkpoint.absent_ranks]
        raise CannotLook(f"{checkpoint.path}: it is not whole: {format_names(lost)} missing")
    made = assembled(checkpoint.path, checkpoint.tensors, rename)
    return {fqn: tensor.shape for fqn, tensor in made.items()}
