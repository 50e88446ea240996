"""The bits of elements, by which tensors are equal: a NaN is itself, and 0.0 is not -0.0.

>>> same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
True
>>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
False
"""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit: also NaNs, and -0.0 is not 0.0."""
    same_kind = (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
    return same_kind and torch.equal(element_bits(tensor), element_bits(other))


def element_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a contiguous tensor's elements as integers, two for a complex128."""
    # A tensor of one element may have any stride.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    kind = _INTEGERS.get(tensor.itemsize)
    return flat.view(torch.int64 if kind is None else kind)
