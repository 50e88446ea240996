"""Whether two tensors hold the same, piece by piece.

The same means the same bits, so that a NaN is the same as itself and 0.0 is not -0.0; or, where
tolerances are given, numbers that are near.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import Any

import torch

STEP = 1 << 20
"""What differs is looked at in steps of this many elements: it takes some 30 bytes for each."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Tally:
    """What differs so far.

    Attributes:
        differing: Elements that differ.
        max_abs: The largest absolute difference of two numbers; None where there are none.
        nans: Elements that differ where one is NaN, or both are with other bits.
        first: The first of them in C order of the whole: index, and both values.
    """

    differing: int = 0
    max_abs: float | None = None
    nans: int = 0
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
            offsets: Where it begins in the whole.
            rtol: Of the other's absolute value.
            atol: In the tensors' own units.
        """
        alike = one.dtype == other.dtype
        if alike and torch.equal(_bits(one), _bits(other)):
            return
        shape = one.shape
        flat, flat_other = one.reshape(-1), other.reshape(-1)
        for start in range(0, flat.numel(), STEP):
            a, b = flat[start : start + STEP], flat_other[start : start + STEP]
            differs = _differs(a, b, alike=alike)
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
            known = gap[~gap.isnan()]
            self.nans += len(gap) - len(known)
            if len(known):
                self.max_abs = max(float(known.max()), self.max_abs or 0.0)
            at = int(positions[0])
            local = torch.unravel_index(torch.tensor(start + at), shape) if shape else ()
            index = tuple(int(i) + o for i, o in zip(local, offsets, strict=True))
            if self.first is None or index < self.first[0]:
                self.first = index, _value(a[at]), _value(b[at])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit: also NaNs, and -0.0 is not 0.0."""
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a contiguous tensor's elements as integers; two of a complex128."""
    flat = tensor.reshape(-1)
    kind = _INTEGERS.get(tensor.itemsize)
    return flat.view(torch.int64 if kind is None else kind)


def _differs(a: torch.Tensor, b: torch.Tensor, *, alike: bool) -> torch.Tensor:
    if alike:
        differs = _bits(a) != _bits(b)
        return differs if len(differs) == len(a) else differs.reshape(len(a), -1).any(1)
    wide, wide_other = _wide(a), _wide(b)
    return (wide != wide_other) & ~(wide.isnan() & wide_other.isnan())


def _gap(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the absolute differences as float64, and both sides as wide as needed for them."""
    wide, other = _wide(a), _wide(b)
    gap = (wide - other).abs()
    if a.dtype == b.dtype and a.dtype in (torch.int64, torch.uint64):
        # Beyond 2**53 float64 does not tell neighbours apart; far from each other int64 overflows.
        exact = (a.view(torch.int64) - b.view(torch.int64)).abs().double()
        gap = torch.where(gap < 2.0**62, exact, gap)
    return gap, wide, other


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _value(element: torch.Tensor) -> Any:
    value = element.item()
    # Neither JSON nor a comparison can do with these.
    if isinstance(value, complex) or (isinstance(value, float) and (isnan(value) or _inf(value))):
        return str(value)
    return value


def _inf(value: float) -> bool:
    return value in (float("inf"), float("-inf"))
