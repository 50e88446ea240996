"""What a load may do to a dtype.

``copy_`` casts silently, so a float checkpoint loaded into an int tensor becomes its integer part.
A load that changes what a number means is refused; one that only loses digits is the user's choice.
"""

from __future__ import annotations

import torch

from dcp_placements.errors import Fault, raise_faults
from dcp_placements.table.digests import quantizer

CASTS = ("error", "warn", "allow")


def cast_kind(stored: torch.dtype, needed: torch.dtype) -> str:
    """Return ``"same"``, ``"widening"``, ``"narrowing"`` or ``"wrong"``.

    >>> cast_kind(torch.float32, torch.bfloat16), cast_kind(torch.bfloat16, torch.float32)
    ('narrowing', 'widening')
    >>> cast_kind(torch.float32, torch.int32), cast_kind(torch.int32, torch.float32)
    ('wrong', 'narrowing')
    """
    if stored == needed:
        return "same"
    # Never from complex to real, from float to int, nor from a number to bool.
    if not torch.can_cast(stored, needed):
        return "wrong"
    if stored == torch.bool:
        return "widening"
    if stored.is_floating_point or stored.is_complex:
        low, high = torch.finfo(stored), torch.finfo(needed)
        fits = high.max >= low.max and high.eps <= low.eps
    elif needed.is_floating_point or needed.is_complex:
        # eps is the distance from 1 to the next value, so integers are exact up to 2 / eps.
        fits = torch.iinfo(stored).max <= 2 / torch.finfo(needed).eps
    else:
        one, other = torch.iinfo(stored), torch.iinfo(needed)
        fits = other.min <= one.min and one.max <= other.max
    return "widening" if fits else "narrowing"


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


def quantized_fault(fqn: str, stored: torch.dtype, needed: torch.dtype, scale: str) -> Fault:
    """Return the refusal of quantized elements that would be read without their scales.

    Args:
        fqn: The key.
        stored: The dtype of the elements.
        needed: That of the tensor to fill.
        scale: The key of the scales.
    """
    return Fault(
        fqn,
        f"is quantized: loading {format_cast(stored, needed)} leaves out its scales",
        (
            "way out:     torch's QuantizedHuggingFaceStorageReader multiplies by them; with it "
            "waive={pattern: reason}; or read both into tensors of their own dtypes",
        ),
        (f"its scales:  {scale}",),
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
