"""Dtypes and other properties of stored tensors, as files name them; torch is not needed."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Dtype(str):
    """A dtype by its name, as torch prints it: ``torch.float32``.

    Attributes:
        itemsize: Bytes of an element.
    """

    itemsize: int

    @property
    def name(self) -> str:
        """Its name in torch."""
        return self.removeprefix("torch.")

    @property
    def torch(self) -> torch.dtype:
        """Torch's own object."""
        return _torch_dtype(self.name)

    def __repr__(self) -> str:
        return str(self)


@cache
def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_of(dtype: torch.dtype) -> Dtype:
    """Return torch's dtype by its name."""
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name) or _dtypes(dtype.itemsize, name)[name]


def _dtypes(itemsize: int, names: str) -> dict[str, Dtype]:
    dtypes = {name: Dtype(f"torch.{name}") for name in names.split()}
    for dtype in dtypes.values():
        dtype.itemsize = itemsize
    return dtypes


DTYPES = {
    **_dtypes(1, "bool int8 uint8 qint8 quint8 quint4x2 quint2x4 bits8 bits4x2 bits2x4 bits1x8"),
    **_dtypes(1, "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"),
    **_dtypes(1, "float4_e2m1fn_x2 int1 int2 int3 int4 int5 int6 int7"),
    **_dtypes(1, "uint1 uint2 uint3 uint4 uint5 uint6 uint7"),
    **_dtypes(2, "float16 bfloat16 int16 uint16 bits16"),
    **_dtypes(4, "float32 int32 uint32 qint32 complex32"),
    **_dtypes(8, "float64 int64 uint64 complex64"),
    **_dtypes(16, "complex128"),
}
"""Torch's dtypes by their names."""

STRIDED = "torch.strided"
LAYOUTS = {
    *(STRIDED, "torch.sparse_coo", "torch.sparse_csr", "torch.sparse_csc", "torch.sparse_bsr"),
    *("torch.sparse_bsc", "torch.jagged", "torch._mkldnn"),
}
"""Torch's layouts by their names."""


class MemoryFormat(Enum):
    """How torch numbers memory formats in metadata."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


class Properties(NamedTuple):
    """What torch's ``TensorProperties`` says of a stored tensor, in every torch."""

    dtype: Dtype
    layout: str = STRIDED
    requires_grad: bool = False
    memory_format: MemoryFormat = MemoryFormat.TORCH_CONTIGUOUS_FORMAT
    pin_memory: bool = False
