"""``TensorProperties`` of any torch, read and written by any other: their fields differ."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch

from dcp_placements._torch import MemoryFormat as TorchMemoryFormat
from dcp_placements._torch import TensorProperties, layout_named
from dcp_placements.storage.metadata.properties import STRIDED, MemoryFormat, Properties, dtype_of

PORTABLE_PROPERTIES = len(Properties._fields)
"""The fields of ``TensorProperties`` in a pickle that every torch reads."""

_PROPERTIES = len(fields(TensorProperties))
"""Those of this torch; 2.15 added ``strides``, which no reader uses."""


class _PickledProperties(TensorProperties):
    def __setstate__(self, state: Any) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        self.__setstate__(state[:_PROPERTIES])


PICKLED_PROPERTIES = {(TensorProperties.__module__, "TensorProperties"): _PickledProperties}
"""By module and name: what ``pickle`` makes of ``TensorProperties`` of any torch."""


def portable_state(instance: TensorProperties) -> tuple[Any, ...]:
    """Return the state of ``instance`` to pickle, in the form that every torch reads."""
    state: tuple[Any, ...] = instance.__getstate__()
    return state[:PORTABLE_PROPERTIES]


def plain_properties(instance: TensorProperties) -> Properties:
    """Return properties without torch's objects."""
    held = instance.dtype, instance.layout, instance.requires_grad, instance.memory_format
    return _plain(*held, instance.pin_memory)


@lru_cache(maxsize=1 << 10)
def _plain(
    dtype: torch.dtype, layout: torch.layout, grad: bool, form: torch.memory_format, pinned: bool
) -> Properties:
    encoded = portable_state(TensorProperties(dtype, layout, grad, form, pinned))[3]
    return Properties(dtype_of(dtype), str(layout), grad, MemoryFormat(encoded.value), pinned)


def torch_properties(properties: Properties) -> TensorProperties:
    """Return properties as torch's object."""
    dtype, name, grad, form, pinned = properties
    # Torch searches all its names for the layouts, at the first call.
    layout = torch.strided if name == STRIDED else layout_named(name)
    state = dtype.torch, layout, grad, TorchMemoryFormat(form.value), pinned
    instance: TensorProperties = object.__new__(_PickledProperties)
    instance.__setstate__(state)
    return instance


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
