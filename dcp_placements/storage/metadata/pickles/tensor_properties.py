"""``TensorProperties`` of any torch, read and written by any other: their fields differ."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from dcp_placements._torch import TensorProperties

PORTABLE_PROPERTIES = 5
"""The fields of ``TensorProperties`` in a pickle that every torch reads."""

_PROPERTIES = len(fields(TensorProperties))
"""Those of this torch; 2.15 added ``strides``, which no reader uses."""


class _PickledProperties(TensorProperties):
    def __setstate__(self, state: Any) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        set_properties(self, state)


PICKLED_PROPERTIES = {(TensorProperties.__module__, "TensorProperties"): _PickledProperties}
"""By module and name: what ``pickle`` makes of ``TensorProperties`` of any torch."""


def set_properties(instance: TensorProperties, state: tuple[Any, ...]) -> None:
    """Fill ``instance`` from the pickled state of any torch, without fields unknown here."""
    instance.__setstate__(state[:_PROPERTIES])


def has_unknown_properties(state: tuple[Any, ...]) -> bool:
    """Whether a pickled state of ``TensorProperties`` is one that this torch cannot read."""
    return len(state) > _PROPERTIES


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
    if _PROPERTIES > PORTABLE_PROPERTIES:
        vars(properties)["strides"] = torch.empty(shape, device="meta").stride()
    return properties
