"""Which keys have the scales of a quantized tensor, by the names that published files have.

The elements of a quantized tensor mean nothing without its scales. The files keep these under a
name of their own::

    weight, weight_scale_inv             DeepSeek-V3: float8 in blocks of 128 x 128
    weight, weight_scale                 compressed-tensors, FBGEMM, ModelOpt: float8, int8
    weight, weight_scale, weight_scale_2 ModelOpt's NVFP4: two values of 4 bits in a byte
    weight_packed, weight_scale, weight_global_scale    compressed-tensors' NVFP4
    gate_up_proj_blocks, ..._scales      gpt-oss: two values of 4 bits in a byte
    weight, SCB    weight, weight.absmax bitsandbytes: int8, 4 bits
    weight, qscale_weight                Mistral's own files
    weight, scale                        DeepSeek's own code
    weight._data, weight._scale          quanto
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

import torch

PACKED = ("_blocks", "_packed", "_qdata", "._data")
"""What ends the name of the elements, where their tensor's name has none of its own."""

_BEHIND = ("_scale_inv", "_scales_inv", "_scale", "_scales", "._scale", ".absmax")
_BEHIND_X = (".weight_scale_inv", ".weight_scale")
_BESIDE = (".scale", ".scales", ".SCB", ".qscale_weight")

RULED = ("_scale_inv", "_scales_inv", "_scale", "_scales", ".scale", ".qscale_weight")
"""The endings of scales that elements are multiplied by, in schemes with a formula."""

ACTIVATIONS = (
    *(".input_scale", ".activation_scale", ".output_scale", ".input_global_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".qscale_act", ".input_scale_ub"),
    *(".input_zero_point", ".output_zero_point", ".k_zero_point", ".v_zero_point"),
)
"""The endings of scales, and of their zero points, by which a quantized model quantizes its inputs,
not its weights."""

_HINTS = {
    ".SCB": "bitsandbytes' int8",
    ".absmax": "bitsandbytes' 4 bits",
    ".quant_map": "bitsandbytes' 4 bits",
    ".nested_absmax": "bitsandbytes' 4 bits",
    ".nested_quant_map": "bitsandbytes' 4 bits",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ or AWQ",
    "_g_idx": "GPTQ or AWQ",
    ".pre_quant_scale": "AWQ or SmoothQuant",
    "._scale": "quanto",
    "._data": "quanto",
    "_qdata": "torchao",
    "_codebooks": "AQLM",
}


class Scales(NamedTuple):
    """The keys of a quantized tensor's scales.

    ModelOpt's NVFP4::

        Scales("q.weight", "q.weight_scale", "_scale", "q.weight_scale_2", False, None)

    Attributes:
        weight: The key that the tensor has where it is not quantized.
        scale: The key of the scales.
        ending: What their key has in place of the ending of the tensor's.
        whole_scale: The key of a scale of the whole tensor, beside those of blocks.
        is_divided: Whether the scales are divided by that one.
        zero_point: The key of the elements that stand for 0, which are subtracted.
    """

    weight: str
    scale: str
    ending: str
    whole_scale: str | None = None
    is_divided: bool = False
    zero_point: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """All of these keys."""
        return tuple([key for key in (self.scale, self.whole_scale, self.zero_point) if key])


def scale_of(fqn: str, dtype: torch.dtype, keys: Container[str]) -> str | None:
    """Return the key of the scales of a tensor; None where it is not quantized, by the keys.

    >>> scale_of("0.weight", torch.float8_e4m3fn, {"0.weight", "0.weight_scale_inv"})
    '0.weight_scale_inv'
    >>> scale_of("0.weight", torch.bfloat16, {"0.weight", "0.weight_scale_inv"})

    Args:
        fqn: The key of the tensor.
        dtype: The dtype of the tensor; quantized elements have 8 bits or less.
        keys: The keys of all stored values.
    """
    scales = scales_of(fqn, dtype, keys)
    return None if scales is None else scales.scale


def scales_of(fqn: str, dtype: torch.dtype, keys: Container[str]) -> Scales | None:
    """Return the keys of the scales of a tensor, as ``scale_of``.

    >>> scales_of("0.w_blocks", torch.uint8, {"0.w_blocks", "0.w_scales"})
    Scales(weight='0.w', scale='0.w_scales', ending='_scales', whole_scale=None, is_divided=False, \
zero_point=None)
    """
    if dtype.itemsize > 1 or dtype == torch.bool:
        return None
    weight = _stem(fqn)
    for head, ending in _possible_scales(fqn):
        if head + ending not in keys:
            continue
        wholes = {f"{weight}_scale_2": False, f"{weight}_global_scale": True}
        whole = next((key for key in wholes if key in keys), None)
        zero = f"{weight}_zero_point"
        zero_point = zero if zero in keys else None
        is_divided = whole is not None and wholes[whole]
        return Scales(weight, head + ending, ending, whole, is_divided, zero_point)
    return None


def hints_of(key: str, dtype: torch.dtype) -> str | None:
    """Return the scheme that only it has such a key of; None for any other key.

    >>> hints_of("layers.0.q_proj.qweight", torch.int32)
    'GPTQ or AWQ'
    """
    if key.endswith("_packed") and dtype.itemsize > 1:
        return "compressed-tensors' pack-quantized"
    if ".quant_state." in key:
        return "bitsandbytes' 4 bits"
    return next((scheme for ending, scheme in _HINTS.items() if key.endswith(ending)), None)


def _stem(fqn: str) -> str:
    for ending in PACKED:
        fqn = fqn.removesuffix(ending)
    return fqn


def _possible_scales(fqn: str) -> Iterator[tuple[str, str]]:
    """Yield the keys that scales of a tensor may have, each in two parts: head and ending."""
    stem = _stem(fqn)
    yield from [(stem, ending) for ending in (*_BEHIND, *_BEHIND_X)]
    parent, _, last = fqn.rpartition(".")
    if last in ("weight", "qweight"):
        yield from [(parent, ending) for ending in _BESIDE]
