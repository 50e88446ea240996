"""``TensorProperties`` of any torch, read and written by any other: their fields differ."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

PORTABLE_PROPERTIES = 5
"""The fields of ``TensorProperties`` in a pickle that every torch reads."""

PROPERTIES = len(fields(TensorProperties))
"""Those of this torch; 2.15 added ``strides``, which no reader uses."""


class _PickledProperties(TensorProperties):
    def __setstate__(self, state: Any) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        self.__setstate__(state[:PROPERTIES])


PICKLED_PROPERTIES = {(TensorProperties.__module__, "TensorProperties"): _PickledProperties}
"""By module and name: what ``pickle`` makes of ``TensorProperties`` of any torch."""


def portable_state(instance: TensorProperties) -> tuple[Any, ...]:
    """Return the state of ``instance`` to pickle, in the form that every torch reads."""
    state: tuple[Any, ...] = instance.__getstate__()
    return state[:PORTABLE_PROPERTIES]


def properties_of(
    dtype: torch.dtype, layout: torch.layout, requires_grad: bool, shape: tuple[int, ...]
) -> TensorProperties:
    """Return the properties of a whole tensor.

    Strides, where torch has them, are those of C order; its own planner has those of the part that
    the first rank holds.
    """
    properties = TensorProperties(dtype, layout, requires_grad)
    if PROPERTIES > PORTABLE_PROPERTIES:
        vars(properties)["strides"] = torch.empty(shape, device="meta").stride()
    return properties
