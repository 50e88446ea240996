"""Writes records of tensors, from that which ``torch.save`` wrote of one of their dtype and shape.

``torch.save`` takes 100 us and more, however small the tensor, which dominates a checkpoint of many
small tensors, and its CRC-32 is a quarter of the time of writing a large one. So the records of
small tensors are made many at a time, and large ones pass through the processor's cache once, for
the checksum and for the system call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch

from dcp_placements.errors import PlacementError
from dcp_placements.storage.records.fast_zlib import crc32
from dcp_placements.storage.records.rows import rows_of
from dcp_placements.storage.records.template import BLOCK_NBYTES, Template

T = TypeVar("T")
Kind = tuple[torch.dtype, torch.Size, tuple[int, ...]]
"""Dtype, shape and strides."""

SMALL_NBYTES = 32 << 10
"""Tensors up to this are small: their files are made together."""

BATCH_NBYTES = 1 << 20
"""So many bytes of small tensors are gathered at a time."""


def save_tensors(tensors: Sequence[torch.Tensor], stream: Any) -> int:
    """Write a record of each tensor, which ``torch.load`` reads.

    Args:
        tensors: One, or several that ``batches`` yields together.
        stream: Open for writing.

    Returns:
        The length of the file of each.
    """
    first = tensors[0]
    kind = _kind_of(first)
    template = None if kind is None else _template_of(kind)
    if template is None:
        before = stream.tell()
        for tensor in tensors:
            torch.save(tensor, stream)
        return int(stream.tell() - before) // len(tensors)
    if first.is_contiguous() and first.nbytes <= SMALL_NBYTES:
        template.write(rows_of(tensors), stream)
    else:
        for tensor in tensors:
            _write_large(template, _storage_bytes(tensor), stream)
    return template.length


@lru_cache(maxsize=1024)
def _template_of(kind: Kind) -> Template | None:
    """Return the template of a kind; None where this torch writes in another way."""
    try:
        return Template(*kind)
    except ValueError:
        return None


def batches(
    tensors: Iterable[tuple[torch.Tensor, T]],
) -> Iterator[tuple[list[torch.Tensor], list[T]]]:
    """Yield tensors that ``save_tensors`` takes together, and what comes with each."""
    held: list[torch.Tensor] = []
    beside: list[T] = []
    nbytes, kind = 0, None
    for tensor, item in tensors:
        next_kind = _kind_of(tensor)
        if held and (next_kind is None or next_kind != kind or nbytes >= BATCH_NBYTES):
            yield held, beside
            held, beside, nbytes = [], [], 0
        held.append(tensor)
        beside.append(item)
        nbytes += tensor.nbytes
        kind = next_kind
    if held:
        yield held, beside


def _write_large(template: Template, data: memoryview, stream: Any) -> None:
    stream.write(template.head)
    checksum = 0
    for start in range(0, data.nbytes, BLOCK_NBYTES):
        block = data[start : start + BLOCK_NBYTES]
        checksum = crc32(block, checksum)
        stream.write(block)
    stream.write(template.tail(checksum))


def _kind_of(tensor: torch.Tensor) -> Kind | None:
    """Return the kind of a tensor; None of one that is not plain, or is empty."""
    is_plain = (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.is_cpu
        and not tensor.requires_grad
        and not (tensor.is_nested or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.storage_offset() == 0
        and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
        and not tensor.__dict__
    )
    return (tensor.dtype, tensor.shape, tensor.stride()) if is_plain else None


def _storage_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's storage, no copy."""
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    return flat.numpy().data


@contextmanager
def errors_of(path: Any) -> Iterator[None]:
    """Raise the system's error for a file that is being written, with the file's name.

    ``torch.save`` closes its zip file when a write fails, which fails as well, over positions that
    do not fit; the reason is what that error came after.
    """
    try:
        yield
    except PlacementError:
        raise  # of what is read
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__cause__ or reason.__context__
        if reason is None or reason.filename is not None or (reason is error and not error.errno):
            raise
        if reason.errno is None:
            raise reason from error
        raise OSError(reason.errno, os.strerror(reason.errno), os.fspath(path)) from error
