"""Which keys of a load have one memory, as a model that ties its embedding and its head has.

If the checkpoint has different tensors under the two keys, the one that is read last would stay, so
a load compares what it reads under all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from dcp_placements.bind.tensor_memory import data_pointer, extent, share_memory


def tied_keys(destinations: Sequence[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """Return the keys that overlap in memory, each with all that it overlaps, also over others.

    >>> w, b = torch.ones(4), torch.ones(2)
    >>> tied_keys([("embed", w), ("head", w), ("bias", b)])
    {'embed': ('embed', 'head'), 'head': ('embed', 'head')}

    Args:
        destinations: The tensors that are read into, and their keys; a key may have several.
    """
    tensors = [tensor for _, tensor in destinations]
    # Of tensors that have no memory, or none that can be seen, the start is 0.
    starts = np.array([data_pointer(tensor) for tensor in tensors], np.int64)
    nbytes = np.zeros(len(tensors), np.int64)
    for number in np.flatnonzero(starts).tolist():
        tensor = tensors[number]
        nbytes[number] = tensor.nbytes if tensor.is_contiguous() else extent(tensor)
    held = np.flatnonzero(nbytes)
    held = held[starts[held].argsort(kind="stable")]
    ends = np.maximum.accumulate((starts + nbytes)[held])
    cuts = (0, *np.flatnonzero(starts[held][1:] >= ends[:-1]) + 1, len(held))
    tied: dict[str, tuple[str, ...]] = {}
    for begin, end in pairwise(cuts):
        if end - begin < 2:
            continue
        run = held[begin:end].tolist()
        views = [tensors[at] for at in run]
        # The extent of a column of a matrix has other columns, too.
        if all(view.is_contiguous() for view in views) or share_memory(views):
            keys = tuple(dict.fromkeys([destinations[at][0] for at in sorted(run)]))
            tied.update(dict.fromkeys(keys, keys))
    return tied
