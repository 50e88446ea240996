"""Small digests of contents: evidence that claimed replicas differ.

Ranks that claim the same box of the same key must hold the same bytes. A digest of each item
travels with the plan, and the coordinator compares before it drops one. Different digests prove a
conflict; equal ones prove nothing, so nothing is ever inferred from them.

The hash is XXH3 (the xxhash package), the fastest maintained one: memory speed on one core. It
guards against accidental collisions, not against forged data.
"""

from __future__ import annotations

import ctypes
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
import xxhash

SAMPLE_BLOCKS = 16
SAMPLE_BLOCK_NBYTES = 256
SAMPLE_NBYTES = SAMPLE_BLOCKS * SAMPLE_BLOCK_NBYTES
"""A sampled digest sees all of a tensor up to this size, and so many bytes of a larger one, in
blocks spread evenly from its first element to its last."""

_SLAB_NBYTES = 8 << 20

SAMPLED_NBYTES = 8


def sampled_digests(tensors: Sequence[torch.Tensor]) -> list[bytes | None]:
    """Return a digest of 8 bytes per tensor, over sampled elements in C order.

    Tensors in host memory are read in place. Those on a device are sampled there and come over in
    one transfer per device. A tensor that is made of others (a wrapper subclass, a quantized one)
    has the digest of those. One that cannot be read (meta, sparse) gives None: no evidence.
    """
    digests: list[bytes | None] = [None] * len(tensors)
    on_device: dict[torch.device, list[int]] = {}
    chars: dict[int, type[ctypes.Array[ctypes.c_char]]] = {}
    for index, tensor in enumerate(tensors):
        # The common case in place: for thousands of small tensors another call takes time.
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if plain and tensor.is_cpu and tensor.is_contiguous():
            nbytes = tensor.nbytes
            if 0 < nbytes <= SAMPLE_NBYTES and not (tensor.is_quantized or _is_lazy(tensor)):
                kind = chars.get(nbytes)
                if kind is None:
                    kind = chars[nbytes] = ctypes.c_char * nbytes
                digests[index] = xxhash.xxh3_64_digest(kind.from_address(tensor.data_ptr()))
                continue
        if _is_made_of_others(tensor):
            digests[index] = _digest_of_parts(tensor)
            continue
        if not _readable(tensor):
            continue
        if tensor.is_cpu:
            digests[index] = _sampled_on_host(tensor)
        else:
            on_device.setdefault(tensor.device, []).append(index)
    for indices in on_device.values():
        samples = [_sample(tensors[index]) for index in indices]
        lengths = [sample.numel() for sample in samples]
        host = torch.cat(samples).cpu()
        for index, piece in zip(indices, host.split(lengths), strict=True):
            digests[index] = _digest_64(piece)
    return digests


def full_digest(tensor: torch.Tensor) -> bytes | None:
    """Return a digest of 16 bytes over all bytes of ``tensor`` in C order; None if unreadable."""
    hasher = xxhash.xxh3_128()
    if _is_made_of_others(tensor):
        made = _parts(tensor)
        digests = [full_digest(part) for part in made[0]] if made is not None else [None]
        if made is None or None in digests:
            return None
        hasher.update(b"".join([made[1], *[digest or b"" for digest in digests]]))
        return hasher.digest()
    if not _readable(tensor):
        return None
    for slab in _slabs(_resolved(tensor.detach())):
        hasher.update(_memory(slab))
    return hasher.digest()


def object_digest(value: Any) -> bytes | None:
    """Return a digest of 8 bytes of a pickled object; None if it cannot be pickled so.

    Equal objects have equal digests: the order of dicts and sets does not count, nor whether two
    equal values inside are one object, nor how tensors and arrays lie in memory. Objects that refer
    to themselves are pickled as usual.
    """
    for pickler in (_OrderlessPickler, pickle.Pickler):
        buffer = BytesIO()
        try:
            pickler(buffer).dump(value)
        except (RecursionError, ValueError):  # it refers to itself
            continue
        except Exception:  # whatever an object's own pickling raises: no evidence, not a fault
            return None
        return xxhash.xxh3_64_digest(buffer.getvalue())
    return None


class _OrderlessPickler(pickle.Pickler):
    """Pickles equal objects to equal bytes: no references, containers and arrays by content."""

    def __init__(self, buffer: BytesIO) -> None:
        super().__init__(buffer)
        self.fast = True

    def persistent_id(self, value: Any) -> Any:
        if type(value) is dict:
            return "dict", _orderless(value.items())
        if type(value) in (set, frozenset):
            return type(value).__name__, sorted(map(_pickled, value))
        if isinstance(value, torch.Tensor) and (digest := full_digest(value)) is not None:
            return "tensor", type(value), str(value.dtype), tuple(value.shape), digest
        if type(value) is np.ndarray:
            contents = tuple(value.flat) if value.dtype.hasobject else value.tobytes()
            return "array", value.dtype, value.shape, contents
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return how a dict of another class is made; the order counts in an ``OrderedDict``."""
        if not isinstance(value, dict) or isinstance(value, OrderedDict):
            return NotImplemented
        reduced: Any = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        make, arguments, *rest = reduced
        state, listed, items = [*rest, None, None, None][:3]
        return make, arguments, (state, listed, None if items is None else _orderless(items))


def _orderless(items: Iterable[tuple[Any, Any]]) -> list[tuple[bytes, bytes]]:
    return sorted((_pickled(key), _pickled(value)) for key, value in items)


def _pickled(value: Any) -> bytes:
    buffer = BytesIO()
    _OrderlessPickler(buffer).dump(value)
    return buffer.getvalue()


def _is_made_of_others(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__") or tensor.is_quantized


def _parts(tensor: torch.Tensor) -> tuple[list[torch.Tensor], bytes] | None:
    """Return the tensors that a tensor is made of, and a digest of what else it is made of.

    None where that cannot be pickled.
    """
    wait = getattr(tensor, "wait", None)
    if wait is not None:  # the result of a collective that may still be under way
        return [wait()], b""
    rest: Any
    if tensor.is_quantized:
        parts, rest = [tensor.int_repr()], quantizer(tensor)
    else:
        names, rest = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = [getattr(tensor, name) for name in names]
    digest = object_digest(rest)
    return None if digest is None else (parts, digest)


def quantizer(tensor: torch.Tensor) -> dict[str, Any]:
    """Return as plain values what gives the integers of a quantized tensor their meaning."""
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {
            "scheme": str(scheme),
            "scale": tensor.q_scale(),
            "zero_point": tensor.q_zero_point(),
        }
    return {
        "scheme": str(scheme),
        "axis": tensor.q_per_channel_axis(),
        "scales": tensor.q_per_channel_scales().tolist(),
        "zero_points": tensor.q_per_channel_zero_points().tolist(),
    }


def _digest_of_parts(tensor: torch.Tensor) -> bytes | None:
    """Return a digest of 8 bytes of a tensor that is made of others."""
    made = _parts(tensor)
    if made is None:
        return None
    parts = sampled_digests(made[0])
    if None in parts:
        return None
    return xxhash.xxh3_64_digest(b"".join([made[1], *[part or b"" for part in parts]]))


def _readable(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return True
    try:
        # Of the storage: a view of a wrapper subclass has a pointer that is its offset alone.
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # wrapper subclasses have no memory of their own
        return False


def _sampled_on_host(tensor: torch.Tensor) -> bytes:
    if not tensor.is_contiguous() or _is_lazy(tensor):
        return _digest_64(_sample(tensor))
    nbytes = tensor.nbytes
    pointer = tensor.data_ptr()
    if nbytes <= SAMPLE_NBYTES:
        return xxhash.xxh3_64_digest(ctypes.string_at(pointer, nbytes))
    itemsize = tensor.itemsize
    block = (SAMPLE_BLOCK_NBYTES // itemsize) * itemsize
    starts = _block_starts(tensor.numel(), itemsize)
    # All blocks but the last are evenly spaced: one strided view of the memory.
    memory = (ctypes.c_char * nbytes).from_address(pointer)
    spaced = np.ndarray(
        (SAMPLE_BLOCKS - 1, block), np.uint8, memoryview(memory), 0, (starts[1] * itemsize, 1)
    ).tobytes()
    return xxhash.xxh3_64_digest(spaced + ctypes.string_at(pointer + starts[-1] * itemsize, block))


def _block_starts(numel: int, itemsize: int) -> list[int]:
    """Return where the blocks begin, in elements: evenly spaced, and one at the very end."""
    last = numel - SAMPLE_BLOCK_NBYTES // itemsize
    step = last // (SAMPLE_BLOCKS - 1)
    return [*range(0, (SAMPLE_BLOCKS - 1) * step, step), last]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sampled elements as bytes on the tensor's device; the same as on the host."""
    tensor = tensor.detach()
    if tensor.nbytes <= SAMPLE_NBYTES:
        # Of one element any stride counts as contiguous; a view of bytes needs stride 1.
        flat = _resolved(tensor).reshape(-1).contiguous()
        return flat.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    block = SAMPLE_BLOCK_NBYTES // tensor.itemsize
    starts = torch.tensor(_block_starts(tensor.numel(), tensor.itemsize), device=tensor.device)
    flat = (starts[:, None] + torch.arange(block, device=tensor.device)).reshape(-1)
    if tensor.is_contiguous():
        sampled = tensor.view(-1)[flat]
    else:
        sampled = tensor[torch.unravel_index(flat, tensor.shape)]
    return _resolved(sampled).view(torch.uint8)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether what is in memory is conjugated or negated when it is read."""
    return tensor.is_neg() or tensor.is_conj()


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory is its values."""
    return tensor.resolve_conj().resolve_neg()


def _slabs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield contiguous host tensors that follow one another in C order, a few MiB at a time."""
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        yield tensor
        return
    if tensor.dim() == 0 or tensor.nbytes <= _SLAB_NBYTES:
        yield tensor.contiguous().cpu()
        return
    row_nbytes = max(tensor.nbytes // max(tensor.shape[0], 1), 1)
    if row_nbytes > _SLAB_NBYTES:
        for row in tensor.unbind(0):
            yield from _slabs(row)
        return
    for slab in tensor.split(max(_SLAB_NBYTES // row_nbytes, 1)):
        yield slab.contiguous().cpu()


def _digest_64(tensor: torch.Tensor) -> bytes:
    # The tensor stays alive while its memory is read: a view of the memory alone would not hold it.
    return xxhash.xxh3_64_digest(_memory(tensor))


def _memory(tensor: torch.Tensor) -> Any:
    """Return the bytes of a contiguous host tensor, in place; valid while the tensor lives."""
    if tensor.numel() == 0:
        return b""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
