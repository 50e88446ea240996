"""The names of a rank's tensors: its own, those that its rules see, and the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from dcp_placements.errors import CannotPlace, Fault
from dcp_placements.layout.boxes import Shape
from dcp_placements.names.rename_results import (
    OfWhole,
    Row,
    Target,
    dims_of_row,
    renamed_boxes,
    row_target,
    rule_dims,
)
from dcp_placements.names.renames import Renames

MAX_NBYTES = 2**63 - 1
"""Offsets and counts are 64-bit integers, as torch's are."""


class Whole(NamedTuple):
    """A whole tensor without data, or an object, which has no dtype."""

    shape: Shape
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Named:
    """A whole tensor under its names. Expert 1 of 4 in a stack, whose rank calls it expert 0::

    Named("experts.0.w", (6, 3), torch.float32, "experts.w", (4, 6, 3), (1, 2), Row(...),
          (Target(...),))
    """

    key: str  # the key that a rank has
    shape: Shape  # its whole shape, in elements
    dtype: torch.dtype  # dtype of its elements
    rule_name: str  # the key that the rules see
    rule_shape: Shape  # the shape that the rules cut: for a row of a stack, the stack's
    rule_dims: Shape  # for each of its dims, that of the shape that the rules cut
    row: Row | None  # the row of a stack that it becomes, if it does
    targets: tuple[Target, ...]  # the checkpoint's tensors that it is, or is a part of

    def probe(self) -> torch.Tensor:
        """Return a tensor without data for rules that are a function."""
        return torch.empty(self.rule_shape, dtype=self.dtype, device="meta")


def named_tensors(wholes: Mapping[str, Whole], rename: Renames, faults: list[Fault]) -> list[Named]:
    """Return tensors under their names; objects have none.

    Args:
        wholes: Tensors and objects by the rank's keys.
        rename: Map from these keys to the checkpoint's.
        faults: Receives faults of tensors that have no name, or do not fit it.
    """
    named = []
    for key, (shape, dtype) in wholes.items():
        if dtype is None:
            continue
        if prod(shape) * dtype.itemsize > MAX_NBYTES:
            headline = f"a tensor of shape {shape} has more than {MAX_NBYTES:,} bytes"
            faults.append(Fault(key, headline, ("likely:      a wrong shape in the metadata",)))
            continue
        try:
            name = rename(key)
            row = name if isinstance(name, Row) else None
            rule_shape, dims = shape, tuple(range(len(shape)))
            if row is not None:
                rule_shape, dims = row_target(row, shape).shape, dims_of_row(row, shape)
            elif isinstance(name, OfWhole):
                dims = rule_dims(name, shape)
                rule_shape = tuple([shape[dim] for dim in dims])
            rule_name = name if isinstance(name, str) else getattr(name, "stacked", name.fqn)
            targets = tuple(renamed_boxes(name, shape))
        except CannotPlace as error:
            faults.append(error.fault(key))
            continue
        named.append(Named(key, shape, dtype, rule_name, rule_shape, dims, row, targets))
    return named
