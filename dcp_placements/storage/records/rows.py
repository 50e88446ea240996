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

from dcp_placements.layout.byte_ranges import c_strides
from dcp_placements.storage.tensor_record import TensorRecord

Array = np.ndarray[Any, Any]


def are_alike(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    """Whether the memory of tensors is elements of one dtype and these sizes, in C order."""
    shape, strides = torch.Size(sizes), c_strides(tuple(sizes))
    first = tensors[0]
    return (
        set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}
        and {tensor.layout for tensor in tensors} == {torch.strided}
        and all([tensor.is_cpu for tensor in tensors])
        and {tensor.dtype for tensor in tensors} == {first.dtype}
        and not (first.is_quantized or any(map(torch.Tensor.is_neg, tensors)))
        and not (first.is_complex() and any(map(torch.Tensor.is_conj, tensors)))
        and all([tensor.shape == shape for tensor in tensors])
        and all([tensor.stride() == strides for tensor in tensors])
    )


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
    return torch.from_numpy(rows).view(-1).view(tensor.dtype.torch).view(-1, *tensor.shape)


def fill_each(targets: Sequence[torch.Tensor], values: torch.Tensor) -> bool:
    """Copy ``values[0]`` into the first target, ``values[1]`` into the second, and so on.

    Args:
        targets: One or more.
        values: Contiguous, in host memory.

    Returns:
        Whether all targets have the sizes of values; otherwise nothing is copied.
    """
    sizes = values.shape[1:]
    if are_alike(targets, sizes):
        elements = values.to(targets[0].dtype).view(-1).view(torch.uint8)
        stream, memory = io.BytesIO(elements.numpy().data), c_char * targets[0].nbytes
        for target in targets:
            stream.readinto(memory.from_address(target.data_ptr()))
        return True
    if not all([target.shape == sizes for target in targets]):
        return False
    with torch.no_grad():
        for target, value in zip(targets, values.unbind(), strict=True):
            target.detach().copy_(value)
    return True
