"""What a load may do to a dtype.

``copy_`` casts silently, so a float checkpoint loaded into an int tensor becomes its integer part.
A load that changes what a number means is refused; one that only loses digits is the user's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dcp_placements.errors import Fault, raise_faults
from dcp_placements.pages import QUANTIZED_PAGE
from dcp_placements.short_text import format_names
from dcp_placements.table.digests import quantizer

CASTS = ("error", "warn", "allow")


class Values(NamedTuple):
    """Which values a dtype has; of a complex one its real parts.

    All multiples of ``2**step`` from ``low`` to ``high`` of at most ``digits`` binary digits.

    Attributes:
        digits: Significant binary digits.
        step: Exponent of the smallest positive value.
        low: The smallest value, which is positive where 0 is none.
        high: The largest value.
        has_inf: Whether infinities are among them.
    """

    digits: int
    step: int
    low: float
    high: float
    has_inf: bool = False

    def include(self, other: Values) -> bool:
        """Whether all values of another dtype are among these."""
        return (
            self.digits >= other.digits
            and self.step <= other.step
            and self.low <= other.low
            and self.high >= other.high
            and self.has_inf >= other.has_inf
        )


def _float(digits: int, step: int, high: float, *, has_inf: bool = True) -> Values:
    return Values(digits, step, -high, high, has_inf)


def _int(dtype: torch.dtype) -> Values:
    info = torch.iinfo(dtype)
    return Values(info.max.bit_length(), 0, info.min, info.max)


_HALF = _float(11, -24, 65504)
_SINGLE = _float(24, -149, (2 - 2.0**-23) * 2.0**127)
_DOUBLE = _float(53, -1074, (2 - 2.0**-52) * 2.0**1023)
_INTS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)

VALUES = {
    torch.bool: Values(1, 0, 0, 1),
    **{dtype: _int(dtype) for dtype in _INTS},
    torch.float8_e8m0fnu: Values(1, -127, 2.0**-127, 2.0**127),
    torch.float8_e4m3fn: _float(4, -9, 448, has_inf=False),
    torch.float8_e4m3fnuz: _float(4, -10, 240, has_inf=False),
    torch.float8_e5m2: _float(3, -16, 57344),
    torch.float8_e5m2fnuz: _float(3, -17, 57344, has_inf=False),
    torch.float16: _HALF,
    torch.bfloat16: _float(8, -133, (2 - 2.0**-7) * 2.0**127),
    torch.float32: _SINGLE,
    torch.float64: _DOUBLE,
    torch.complex32: _HALF,
    torch.complex64: _SINGLE,
    torch.complex128: _DOUBLE,
}
"""The dtypes between which a load casts. Those of several numbers per element, quantized ones and
ones of bits are not among them: their elements are no numbers for a cast."""


def cast_kind(stored: torch.dtype, needed: torch.dtype) -> str:
    """Return ``"same"``, ``"widening"``, ``"narrowing"`` or ``"wrong"``.

    What widens is what keeps every value.

    >>> cast_kind(torch.float32, torch.bfloat16), cast_kind(torch.bfloat16, torch.float32)
    ('narrowing', 'widening')
    >>> cast_kind(torch.float32, torch.int32), cast_kind(torch.int32, torch.float32)
    ('wrong', 'narrowing')
    """
    if stored == needed:
        return "same"
    # Never from complex to real, from float to int, nor from a number to bool.
    if not {stored, needed} <= VALUES.keys() or not torch.can_cast(stored, needed):
        return "wrong"
    return "widening" if VALUES[needed].include(VALUES[stored]) else "narrowing"


def format_cast(stored: torch.dtype, needed: torch.dtype) -> str:
    """Return a change of dtype as text.

    >>> format_cast(torch.float32, torch.bfloat16)
    'float32 -> bfloat16'
    """
    return f"{stored} -> {needed}".replace("torch.", "")


def cast_fault(fqn: str, stored: torch.dtype, needed: torch.dtype) -> Fault:
    """Return the refusal of a cast."""
    way_out = f"way out:     load into a {str(stored).removeprefix('torch.')} tensor"
    effect = "changes what the numbers mean"
    if cast_kind(stored, needed) == "narrowing":
        effect, way_out = "loses precision", f'{way_out}, or cast="allow"'
    return Fault(fqn, f"loading {format_cast(stored, needed)} {effect}", (way_out,))


_READ_BY_TORCH = ".weight_scale_inv"
"""The ending of scales that torch's ``QuantizedHuggingFaceStorageReader`` multiplies by. Of the
forms of gpt-oss, its chunks have another count of dims than their tensor."""


def quantized_fault(fqn: str, stored: torch.dtype, needed: torch.dtype, scale: str) -> Fault:
    """Return the refusal of quantized elements that would be read without their scales.

    Args:
        fqn: The key.
        stored: The dtype of the elements.
        needed: That of the tensor to fill.
        scale: The key of the scales.
    """
    way_out = (
        "way out:     dcp-placements import SRC OUT --dequantize bfloat16 makes numbers of the "
        "Hub's files, and a load of OUT reads them; or read both into tensors of their own dtypes"
    )
    if scale.endswith(_READ_BY_TORCH):
        way_out += (
            "; or torch's QuantizedHuggingFaceStorageReader(path), which multiplies by them as it "
            "reads files with an index, and waive={pattern: reason} with it"
        )
    headline = f"is quantized: loading {format_cast(stored, needed)} leaves out its scales"
    return Fault(fqn, headline, (way_out, QUANTIZED_PAGE), (f"its scales:  {scale}",))


def may_have_scales(stored: torch.dtype, needed: torch.dtype) -> bool:
    """Whether a cast is of elements that quantized files have, to numbers without a scale.

    >>> may_have_scales(torch.int8, torch.bfloat16), may_have_scales(torch.float32, torch.float64)
    (True, False)
    """
    has_codes = not (stored.is_floating_point or stored.is_complex) or stored.itemsize == 1
    return has_codes and stored != torch.bool and needed.is_floating_point and needed.itemsize > 1


def unscaled_note(fqns: Sequence[str], cast: str) -> Fault:
    """Return the note on keys of elements that are read as the numbers that they are.

    Args:
        fqns: The keys.
        cast: The change of the first one's dtype.
    """
    return Fault(
        format_names(fqns, 3),
        f"loaded without scales, as the checkpoint has none beside it ({cast})",
        (
            "likely:      plain numbers; or a quantized weight whose scales were left out of the "
            "checkpoint, so that its values are wrong",
            'way out:     waive={pattern: reason}, or cast="allow", for plain numbers; else a '
            "checkpoint with the scales",
        ),
    )


def check_quantizer(fqn: str, target: torch.Tensor, read: torch.Tensor) -> None:
    """Refuse quantized values that were read into a tensor of another scale.

    Args:
        fqn: The key.
        target: The tensor of the state dict.
        read: Another view of its memory, which took the scale of what was read.

    Raises:
        PlacementError: The scales differ: the values would be others.
    """
    stored, own = quantizer(read), quantizer(target)
    if repr(stored) == repr(own):
        return
    fault = Fault(
        fqn,
        "is quantized otherwise in the checkpoint than in this state dict",
        (
            f"saved:       {stored}",
            f"this load:   {own}",
            "way out:     a tensor of the scale and zero point that were saved",
        ),
    )
    raise_faults("the checkpoint does not fit", [fault])
