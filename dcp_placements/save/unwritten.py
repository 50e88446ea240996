"""Tensors whose dtype a writer cannot write: refused by name, before anything is written.

Torch has dtypes that are names alone: ``torch.save`` knows none of ``int4``, and torch's writer
asks ``torch.iinfo`` for the size of an element, which does not know ``bits8``. For example::

    Held(group of torch.bits8, fqns=["codes"])  ->  Fault("codes", "is a tensor of torch.bits8 ...")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

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
