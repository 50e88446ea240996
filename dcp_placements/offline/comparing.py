"""Whether two tensors are the same, piece by piece.

Without tolerances elements are the same if their bits are: a NaN is the same as itself, and 0.0 is
not -0.0. With tolerances, near numbers are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

STEP = 1 << 20
"""Pieces that differ are compared in steps of this many elements, which take 30 bytes each."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Tally:
    """The differences of the pieces compared so far."""

    differing: int = 0  # elements that differ
    # The largest absolute difference of two numbers; None if no two numbers differ
    max_abs: float | None = None
    nans: int = 0  # differing elements where one value is NaN, or both with other bits
    # The first differing element in C order: its index, and both values
    first: tuple[tuple[int, ...], Any, Any] | None = None

    def add(
        self,
        one: torch.Tensor,
        other: torch.Tensor,
        offsets: tuple[int, ...],
        *,
        rtol: float,
        atol: float,
    ) -> None:
        """Compare two pieces.

        Args:
            one: A contiguous piece.
            other: The same piece of the other tensor.
            offsets: Where the pieces begin in the whole tensors.
            rtol: Relative to the other's absolute value.
            atol: Absolute.
        """
        same_dtype = one.dtype == other.dtype
        if same_bits(one, other):
            return
        shape = one.shape
        flat, flat_other = one.reshape(-1), other.reshape(-1)
        for start in range(0, flat.numel(), STEP):
            a, b = flat[start : start + STEP], flat_other[start : start + STEP]
            differs = _differs(a, b, same_dtype=same_dtype)
            if not differs.any():
                continue
            positions = differs.nonzero().reshape(-1)
            gap, numbers, other_numbers = _gap(a[positions], b[positions])
            if rtol or atol:
                # An infinite number is near to nothing but itself.
                near = gap.isfinite() & (gap <= atol + rtol * other_numbers.abs())
                near |= numbers.isinf() & (numbers == other_numbers)
                near |= numbers.isnan() & other_numbers.isnan()
                positions, gap = positions[~near], gap[~near]
                if not len(positions):
                    continue
            self.differing += len(positions)
            gaps = gap[~gap.isnan()]
            self.nans += len(gap) - len(gaps)
            if len(gaps):
                self.max_abs = max(float(gaps.max()), self.max_abs or 0.0)
            first = int(positions[0])
            local = (
                torch.unravel_index(torch.tensor(start + first, device="cpu"), shape)
                if shape
                else ()
            )
            index = tuple(int(i) + o for i, o in zip(local, offsets, strict=True))
            if self.first is None or index < self.first[0]:
                self.first = index, _value(a[first]), _value(b[first])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit: also NaNs, and -0.0 is not 0.0."""
    same_kind = (one.shape, one.dtype) == (other.shape, other.dtype)
    return same_kind and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a contiguous tensor's elements as integers; two of a complex128."""
    flat = tensor.reshape(-1)
    kind = _INTEGERS.get(tensor.itemsize)
    return flat.view(torch.int64 if kind is None else kind)


def _differs(a: torch.Tensor, b: torch.Tensor, *, same_dtype: bool) -> torch.Tensor:
    if same_dtype:
        differs = _bits(a) != _bits(b)
        return differs if len(differs) == len(a) else differs.reshape(len(a), -1).any(1)
    wide, wide_other = _wide(a), _wide(b)
    return (wide != wide_other) & ~(wide.isnan() & wide_other.isnan())


def _gap(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the absolute differences as float64, and both operands in the dtype for them."""
    wide, other = _wide(a), _wide(b)
    gap = (wide - other).abs()
    if a.dtype == b.dtype and a.dtype in (torch.int64, torch.uint64):
        # float64 rounds neighbours beyond 2**53; int64 overflows if they are far apart.
        exact = (a.view(torch.int64) - b.view(torch.int64)).abs().double()
        gap = torch.where(gap < 2.0**62, exact, gap)
    return gap, wide, other


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _value(element: torch.Tensor) -> Any:
    value = element.item()
    # JSON has none of these, and NaN equals nothing.
    if isinstance(value, complex) or (isinstance(value, float) and not isfinite(value)):
        return str(value)
    return value
