"""What a storage writer cannot write: refused by name, before anything is written.

Torch has dtypes that are names alone: ``torch.save`` knows none of ``int4``, and torch's writer
asks ``torch.iinfo`` for the size of an element, which does not know ``bits8``. For example::

    Held(group of torch.bits8, fqns=["codes"])  ->  Fault("codes", "is a tensor of torch.bits8 ...")

Torch's ``HuggingFaceStorageWriter`` knows a tensor by its name, and an object not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.checkpoint import WriteItem

from dcp_placements.errors import Fault
from dcp_placements.short_text import format_names
from dcp_placements.table.table import Held


def _dtypes(names: Iterable[str]) -> frozenset[torch.dtype]:
    """Return those dtypes that this version of torch has."""
    return frozenset(getattr(torch, name) for name in names if hasattr(torch, name))


_NAMES_ALONE = _dtypes(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8))
"""Dtypes that ``torch.save`` does not recognize."""

_BITS = _dtypes(f"bits{bits}" for bits in ("1x8", "2x4", "4x2", "8", "16"))
"""Dtypes that torch's writer does not write, and ``PlacementFileSystemWriter`` does."""

UNWRITTEN = _NAMES_ALONE | _BITS
"""Dtypes that some writer does not write."""

_BYTES = "save its bytes, tensor.view(torch.uint8), and load them into such a view"


def unwritten(groups: Iterable[Held], *, is_ours: bool) -> Iterator[Fault]:
    """Yield the tensors that cannot be written, those of one dtype and shape together.

    Args:
        groups: What a rank has.
        is_ours: Whether the writer is ``PlacementFileSystemWriter``.
    """
    for held in groups:
        dtype = held.group.dtype
        if dtype in _NAMES_ALONE:
            reason, out = "torch.save does not write", _BYTES
        elif dtype in _BITS and not is_ours:
            reason = "torch's FileSystemWriter does not write"
            out = f"storage_writer=PlacementFileSystemWriter(path); or {_BYTES}"
        else:
            continue
        yield Fault(
            format_names(held.fqns, 3),
            f"holds elements of {dtype}, which {reason}",
            (f"way out:     {out}",),
        )


def not_by_name(items: Sequence[WriteItem], *, is_alone: bool) -> Iterator[Fault]:
    """Yield what torch's ``HuggingFaceStorageWriter`` does not write as it is.

    Args:
        items: What a rank writes.
        is_alone: Whether no other rank takes part in the save: what others write is not known
            where a rank has to refuse it before any has written.
    """
    counts = Counter(item.index.fqn for item in items)
    reasons = {
        item.index.fqn: "is an object"
        if item.tensor_data is None
        else f"is written in {counts[item.index.fqn]} chunks"
        for item in items
        if item.tensor_data is None or counts[item.index.fqn] > 1
    }
    if not is_alone:
        reasons = {"this save": "is of several ranks, which may write chunks of one tensor"}
    for fqn, reason in reasons.items():
        yield Fault(
            fqn,
            f"{reason}, and HuggingFaceStorageWriter knows one tensor of a name",
            (
                "way out:     save with FileSystemWriter or PlacementFileSystemWriter, and "
                "dcp-placements export",
            ),
        )
