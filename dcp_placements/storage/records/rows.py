"""Many small tensors of one kind as rows of bytes, and back.

Torch copies into a list of tensors by a call of 2 us for each; ``readinto`` takes a tenth of it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from ctypes import c_char
from typing import Any

import numpy as np
import torch

from dcp_placements.storage.tensor_record import TensorRecord

Array = np.ndarray[Any, Any]


def rows_of(tensors: Sequence[torch.Tensor]) -> Array:
    """Return the bytes of tensors of one dtype and shape, a row for each."""
    with torch.no_grad():
        stacked = torch.stack(list(tensors))
    rows: Array = stacked.view(-1).view(torch.uint8).numpy().reshape(len(tensors), -1)
    return rows


def values_of(records: Array, tensor: TensorRecord) -> torch.Tensor:
    """Return the elements of records that begin alike.

    Args:
        records: One in each row of bytes.
        tensor: Where the elements of each are.
    """
    rows = np.ascontiguousarray(records[:, tensor.start : tensor.start + tensor.nbytes])
    return torch.from_numpy(rows).view(-1).view(tensor.dtype).view(-1, *tensor.shape)


def fill_each(targets: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    """Copy ``values[0]`` into the first target, ``values[1]`` into the second, and so on.

    Args:
        targets: One or more, of the sizes of a value.
        values: Contiguous, in host memory.
    """
    if _are_alike(targets):
        elements = values.to(targets[0].dtype).view(-1).view(torch.uint8)
        stream, memory = io.BytesIO(elements.numpy().data), c_char * targets[0].nbytes
        for target in targets:
            stream.readinto(memory.from_address(target.data_ptr()))
        return
    with torch.no_grad():
        for target, value in zip(targets, values.unbind(), strict=True):
            target.detach().copy_(value)


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of tensors of one shape is elements of one dtype, in C order."""
    first = tensors[0]
    return (
        set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}
        and {tensor.layout for tensor in tensors} == {torch.strided}
        and all([tensor.is_cpu for tensor in tensors])
        and {tensor.dtype for tensor in tensors} == {first.dtype}
        and not (first.is_quantized or any(map(torch.Tensor.is_neg, tensors)))
        and not (first.is_complex() and any(map(torch.Tensor.is_conj, tensors)))
        and all(map(torch.Tensor.is_contiguous, tensors))
    )
