"""What a load may do to a dtype.

``copy_`` casts whatever it is given, so a float checkpoint loaded into an int template becomes its
integer part without a word. A load that changes what a number means is refused; one that only
loses digits is the user's choice.
"""

from __future__ import annotations

import torch

CASTS = ("error", "warn", "allow")


def cast_kind(stored: torch.dtype, wanted: torch.dtype) -> str:
    """Return ``"same"``, ``"widening"``, ``"narrowing"`` or ``"wrong"``.

    >>> cast_kind(torch.float32, torch.bfloat16), cast_kind(torch.bfloat16, torch.float32)
    ('narrowing', 'widening')
    >>> cast_kind(torch.float32, torch.int32), cast_kind(torch.int32, torch.float32)
    ('wrong', 'narrowing')
    """
    if stored == wanted:
        return "same"
    if _rank(stored) > _rank(wanted):
        return "wrong"
    return "widening" if _fits(stored, wanted) else "narrowing"


def _rank(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1


def _fits(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether every value of ``stored`` has an exact one in ``wanted``."""
    if _rank(stored) == 0:
        return True
    if _rank(stored) == 1 and _rank(wanted) == 1:
        one, other = torch.iinfo(stored), torch.iinfo(wanted)
        return other.min <= one.min and one.max <= other.max
    if _rank(stored) == 1:
        # eps is the distance from 1 to the next value, so integers are exact up to 2 / eps.
        return torch.iinfo(stored).max <= 2 / torch.finfo(wanted).eps
    low, high = torch.finfo(stored), torch.finfo(wanted)
    return high.max >= low.max and high.eps <= low.eps
