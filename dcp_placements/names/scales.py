"""Which key has the scales of a quantized tensor, by the names that published files have.

The elements of a quantized tensor mean nothing without its scales. The files keep these under a
name of their own::

    weight, weight_scale_inv             DeepSeek-V3: float8 in blocks of 128 x 128
    weight, weight_scale                 compressed-tensors, FBGEMM, ModelOpt: float8, int8
    gate_up_proj_blocks, ..._scales      gpt-oss: two values of 4 bits in a byte
    weight_packed, weight_scale          compressed-tensors: 4 bits
    weight, SCB    weight, weight.absmax bitsandbytes: int8, 4 bits
    weight, qscale_weight                Mistral's own files
    weight, scale                        DeepSeek's own code
    weight._data, weight._scale          quanto
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch

_ELEMENTS = ("_blocks", "_packed", "_qdata", "._data")
"""What ends the name of the elements, where their tensor's name has none of its own."""

_BEHIND = ("_scale_inv", "_scale", "_scales", "._scale", ".absmax")
_BEHIND_X = (".weight_scale_inv", ".weight_scale")
_BESIDE = (".scale", ".scales", ".SCB", ".qscale_weight")


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
    if dtype.itemsize > 1 or dtype == torch.bool:
        return None
    return next((key for key in _possible_scales(fqn) if key in keys), None)


def _possible_scales(fqn: str) -> Iterator[str]:
    stem = fqn
    for ending in _ELEMENTS:
        stem = stem.removesuffix(ending)
    yield from [stem + ending for ending in (*_BEHIND, *_BEHIND_X)]
    parent, _, last = fqn.rpartition(".")
    if last in ("weight", "qweight"):
        yield from [parent + ending for ending in _BESIDE]
