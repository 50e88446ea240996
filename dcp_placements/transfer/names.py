"""The names by which the tensors of two worlds are matched.

A rank's rename has two parts. ``Renumber`` and ``Replace`` make its keys those of its world, with
global numbers, and determine which of them the rank holds. From the first ``Stack``, ``Unstack`` or
``Split`` on, the steps are equal on all ranks: they make the *common* tensors of both worlds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dcp_placements.errors import CannotPlace, Fault, PlacementError
from dcp_placements.names.renames import Renames, Renumber, Replace, Split, Stack, Unstack, steps
from dcp_placements.names.stacks_and_parts import Rename, Row, Target, renamed_boxes, row_target

Shape = tuple[int, ...]

MAX_NBYTES = 2**63 - 1
"""Offsets and counts are 64-bit integers, as torch's are."""


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of a world under its names."""

    key: str  # its key in the world
    shape: Shape  # its whole shape, in elements
    dtype: torch.dtype  # of its elements
    rule_name: str  # the key that the world's rules see
    rule_shape: Shape  # the shape that the world's rules cut: that of the stack for one of its rows
    rule_dims: tuple[int, ...]  # for each dim of ``shape`` that of ``rule_shape``
    targets: tuple[Target, ...]  # the common tensors that it is, or is a part of

    def probe(self) -> torch.Tensor:
        """Return a tensor without data for rules that are a function."""
        return torch.empty(self.rule_shape, dtype=self.dtype, device="meta")


def split_rename(rename: object) -> tuple[Renames, Renames]:
    """Return the steps that lead to the keys of the world, and those to the common keys.

    Raises:
        PlacementError: A function of the user's among the first: which keys a rank holds does not
            follow from it.
    """
    found = steps(rename)
    first = [isinstance(step.rename, Stack | Unstack | Split) for step in found]
    at = first.index(True) if any(first) else len(found)
    for step in found[:at]:
        if not isinstance(step.rename, Renumber | Replace):
            raise PlacementError(
                f"the rename of a rank's Placements has the step {step.rename!r}: which keys the "
                "rank holds does not follow from it\n"
                "    way out:     Renumber and Replace; or rename= of transfer_plan, for names "
                "that differ between the worlds and not between ranks"
            )
    whole = [Renames(step.rename, optional=step.declared is None) for step in found]
    return Renames(*whole[:at]), Renames(*whole[at:])


def named_tensors(
    tensors: Mapping[str, Any], world: Renames, more: Rename | None, faults: list[Fault]
) -> list[Named]:
    """Return the tensors of a world under their names.

    Args:
        tensors: By key: anything with ``shape`` and ``dtype``.
        world: The steps from the keys of the world to the keys that its rules see.
        more: A further step to the common keys, or None.
        faults: Takes in the tensors that have no name, or do not fit it.
    """
    whole = world if more is None else Renames(*world.steps, more)
    found = []
    for key, tensor in tensors.items():
        shape = tuple(int(size) for size in tensor.shape)
        if prod(shape) * tensor.dtype.itemsize > MAX_NBYTES:
            headline = f"a tensor of shape {shape} has more than {MAX_NBYTES:,} bytes"
            faults.append(Fault(key, headline, ("likely:      a wrong shape in tensors=",)))
            continue
        try:
            seen = world(key)
            rule_shape: Shape = shape
            rule_dims = tuple(range(len(shape)))
            if isinstance(seen, Row):
                stack = row_target(seen, shape)
                rule_shape = stack.shape
                rule_dims = tuple(d for d, origin in enumerate(stack.dims) if origin is not None)
            rule_name = seen if isinstance(seen, str) else getattr(seen, "stacked", seen.fqn)
            targets = tuple(renamed_boxes(whole(key), shape))
        except CannotPlace as error:
            faults.append(error.fault(key))
            continue
        found.append(Named(key, shape, tensor.dtype, rule_name, rule_shape, rule_dims, targets))
    return found
