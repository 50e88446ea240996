"""Digests of tensors and objects: what a rank sends of them, and how all ranks' are compared.

Two ranks that claim the same box of the same key must hold the same bytes. A rank sends one digest
for each key and box, group by group. Two ep ranks that both hold all of ``experts.w1`` and
``experts.w2``, and differ in the second::

    [[0x91f3, 0x27a0],      # rank 0: the digest of each key of the group
     [0x91f3, 0x5c1e]]      # rank 1

Different digests prove a conflict; equal ones prove nothing, so nothing is inferred from them. The
hash is XXH3 (the xxhash package), at memory speed on one core. It guards against accidental
collisions, not against forged data. In a large world fewer bytes of each digest are sent, at least
two: a wrong declaration shows in all keys that it declares.
"""

from __future__ import annotations

import ctypes
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import islice, product
from math import prod
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements._torch import components, is_made_of_others
from dcp_placements.bind.rule_and_dtensor import Placed
from dcp_placements.layout.boxes import Array, Bools
from dcp_placements.layout.sharding import Chunk
from dcp_placements.names.optimizer_state import ParameterNames
from dcp_placements.table.table import OBJECT, Group, Held, Holding
from dcp_placements.table.world import Cohort, Cover, World

Digests = Array
"""Unsigned integers of one width; 0 where there is no digest."""

ContentOf = Callable[[MetadataIndex], Any]
"""Returns the data of a tensor that names its own chunks."""

WIDTHS = (8, 4, 2)
"""Bytes that may be sent of a digest."""

DIGEST_NBYTES = WIDTHS[0]

WORLD_BUDGET_NBYTES = 64 << 20
"""Bytes that the digests of all ranks may take together; two bytes of each are sent in any case."""


def may_have_replicas(group: Group, world: int) -> bool:
    """Whether another rank may hold the same box: not where the cuts make a shard for each rank."""
    return group.shards != world or world == 1


def digests_of(
    holding: Holding, kind: str, *, world: int, lookup: ContentOf
) -> tuple[bytes, tuple[str, ...]]:
    """Return the digests of a holding, packed.

    Args:
        holding: What the rank holds.
        kind: ``"sampled"``, ``"full"`` or ``"off"``.
        world: Number of ranks.
        lookup: Returns the data of a tensor that names its own chunks.

    Returns:
        The digests by key and box of each group that may have replicas, all of one width; and the
        keys of tensors without a digest, since their contents cannot be read.
    """
    groups = [held for held in holding.groups if may_have_replicas(held.group, world)]
    if kind == "off" or not groups:
        return b"", ()
    count = sum(len(held.fqns) * len(held.boxes) for held in groups)
    fitting = [width for width in WIDTHS if width * count * world <= WORLD_BUDGET_NBYTES]
    width = (fitting or WIDTHS[-1:])[0]
    undigested: dict[str, None] = {}
    digests: list[bytes] = []
    for fqn, digest in _each_digest(groups, kind, lookup):
        if digest is None:
            undigested[fqn] = None
        digests.append(bytes(WIDTHS[0]) if digest is None else digest[: WIDTHS[0]])
    packed = _narrowed(np.frombuffer(b"".join(digests), "<u8"), width).tobytes()
    return packed, tuple(undigested)


def differing_repeats(placed: Iterable[Placed], kind: str) -> Iterator[tuple[Placed, list[Chunk]]]:
    """Yield the boxes that this rank holds several times, with different contents.

    Redundant experts and an ``IndexShard`` with repeats have such boxes. One of the copies is
    written, so they are compared like those of two ranks.

    Args:
        placed: This rank's tensors.
        kind: ``"sampled"``, ``"full"`` or ``"off"``.
    """
    for tensor in placed if kind != "off" else ():
        by_box: dict[Any, list[Chunk]] = {}
        for chunk in tensor.place.chunks if 0 not in tensor.place.sharding.global_shape else ():
            by_box.setdefault(chunk.box, []).append(chunk)
        for copies in by_box.values():
            views = list(map(tensor.view, copies if len(copies) > 1 else ()))
            if len({*_DIGESTS[kind](views)} - {None}) > 1:
                yield tensor, copies


def _each_digest(
    groups: Sequence[Held], kind: str, lookup: ContentOf
) -> Iterator[tuple[str, bytes | None]]:
    """Yield key and digest, by group, key and box."""
    tensors: list[torch.Tensor] = []
    for held in groups:
        if held.group.kind != OBJECT:
            cells = product(held.fqns, held.boxes)
            tensors += [
                lookup(MetadataIndex(fqn, torch.Size(box.offsets))) if data is None else data
                for (fqn, box), data in zip(cells, held.data(), strict=True)
            ]
    digests = iter(_DIGESTS[kind](tensors))
    for held in groups:
        if held.group.kind == OBJECT:
            for fqn, value in zip(held.fqns, held.values, strict=True):
                yield fqn, object_digest(value)
        else:
            for fqn in held.fqns:
                for digest in islice(digests, len(held.boxes)):
                    yield fqn, digest


def _narrowed(digests: Digests, width: int) -> Digests:
    """Return the lowest bytes of digests; 1 where these are 0 and the digest is not."""
    narrow = digests.astype(f"<u{width}")
    narrow[(narrow == 0) & (digests != 0)] = 1
    return narrow


def digests_by_cell(world: World, sent: Sequence[bytes], size: int) -> Digests:
    """Return the digest of each cell of a ``World``; 0 where none was sent.

    Args:
        world: What the ranks hold.
        sent: The packed digests of each rank.
        size: Number of ranks in all.
    """
    of_cohorts: list[tuple[Cohort, Bools, Digests]] = []
    for cohort in world.cohorts:
        has_digest = [np.zeros(0, bool)]
        for table, number, count in cohort.groups:
            group, fqns = world.tables[table].groups[number], world.tables[table].keys[number]
            has_digest.append(np.full(len(fqns) * count, may_have_replicas(group, size)))
        is_sent = np.concatenate(has_digest)
        # The ranks of a cohort have equal tables, and so equal widths.
        members = [sent[rank] for rank in cohort.ranks.tolist()]
        if members[0]:
            width = len(members[0]) // int(is_sent.sum())
            of_ranks = np.frombuffer(b"".join(members), f"<u{width}").reshape(len(members), -1)
            of_cohorts.append((cohort, is_sent, of_ranks))
    width = min([of_ranks.itemsize for _, _, of_ranks in of_cohorts], default=1)
    digests = np.zeros(world.count, f"<u{width}")
    for cohort, is_sent, of_ranks in of_cohorts:
        digests[cohort.cells].reshape(len(of_ranks), -1)[:, is_sent] = _narrowed(of_ranks, width)
    return digests


def differing(digests: Digests, cover: Cover) -> list[int]:
    """Return the positions of the keys of which two rows of one box have different contents.

    Args:
        digests: The digest of each row and key of a piece.
        cover: The cover of the piece.
    """
    return np.flatnonzero(_differing(digests, cover).any(axis=0)).tolist()


def _differing(digests: Digests, cover: Cover) -> Bools:
    """Return by box and key whether two of its rows have different digests."""
    starts = cover.starts[:-1]
    first_of_row = cover.order[starts][cover.box_of]
    if (digests == digests[first_of_row]).all():
        # Nearly always, and several times faster than what follows.
        return np.zeros((len(starts), digests.shape[1]), bool)
    ordered = digests[cover.order]
    highest = np.maximum.reduceat(ordered, starts)
    ordered[ordered == 0] = np.iinfo(digests.dtype).max
    return np.asarray(np.minimum.reduceat(ordered, starts) < highest, bool)


SAMPLE_BLOCKS = 16
SAMPLE_BLOCK_NBYTES = 256
SAMPLE_NBYTES = SAMPLE_BLOCKS * SAMPLE_BLOCK_NBYTES
"""Bytes of a tensor that a sampled digest covers: all of a tensor up to this size; of a larger one
blocks that are spread evenly from its first element to its last."""

_SLAB_NBYTES = 8 << 20


def sampled_digests(tensors: Sequence[torch.Tensor]) -> list[bytes | None]:
    """Return a digest of 8 bytes per tensor, over sampled elements in C order.

    Tensors in host memory are read in place. Those on a device are sampled there and copied in one
    transfer per device. A tensor that is made of others (a wrapper subclass, a quantized one) has
    their digest. A tensor that cannot be read (meta, sparse) has None: no evidence.
    """
    digests: list[bytes | None] = [None] * len(tensors)
    on_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if _has_components(tensor):
            digests[index] = _digest_of_components(
                tensor, lambda inner: sampled_digests([inner])[0]
            )
        elif not _readable(tensor):
            continue
        elif tensor.is_cpu:
            digests[index] = _sampled_on_host(tensor)
        else:
            on_device.setdefault(tensor.device, []).append(index)
    for indices in on_device.values():
        samples = [_sample(tensors[index]) for index in indices]
        host = torch.cat(samples).cpu().split([sample.numel() for sample in samples])
        for index, sample in zip(indices, host, strict=True):
            digests[index] = _digest_64(sample)
    return digests


def full_digest(tensor: torch.Tensor) -> bytes | None:
    """Return a digest of 16 bytes over all bytes of ``tensor`` in C order; None if unreadable."""
    if _has_components(tensor):
        return _digest_of_components(tensor, full_digest)
    if not _readable(tensor):
        return None
    hasher = xxhash.xxh3_128()
    for slab in _slabs(_resolved(tensor.detach())):
        hasher.update(_memory(slab))
    return hasher.digest()


_DIGESTS: dict[str, Callable[[Sequence[torch.Tensor]], list[bytes | None]]] = {
    "sampled": sampled_digests,
    "full": lambda tensors: list(map(full_digest, tensors)),
}


def digests_of_varied(tensors: Sequence[torch.Tensor]) -> list[bytes | None]:
    """Return the sampled digest of each tensor; None where its elements are all equal.

    None also where that is not known: of a tensor that is made of others, or cannot be read.
    """
    numbers = [
        number
        for number, tensor in enumerate(tensors)
        if not _has_components(tensor) and _readable(tensor)
    ]
    plain = [tensors[number] for number in numbers]
    constants = [
        tensor.detach()[(slice(0, 1),) * tensor.dim()].expand(tensor.shape) for tensor in plain
    ]
    digests = sampled_digests([*plain, *constants])
    varied: list[bytes | None] = [None] * len(tensors)
    of_plain = zip(numbers, digests, digests[len(plain) :], strict=False)
    for number, digest, constant in of_plain:
        if digest != constant:
            varied[number] = digest
    return varied


def constant_digests(
    shape: Sequence[int], dtype: torch.dtype, kind: str, width: int
) -> frozenset[int]:
    """Return the digests, as they are sent, of tensors all of whose elements are 0, or are 1.

    None where they would take long: of full digests of large tensors.

    Args:
        shape: That of the tensors.
        dtype: Theirs.
        kind: ``"sampled"`` or ``"full"``.
        width: The bytes that are sent of each digest.
    """
    if kind not in _DIGESTS or (kind == "full" and prod(shape) > _SLAB_NBYTES):
        return frozenset()
    values = [torch.zeros((), dtype=torch.uint8), torch.ones((), dtype=torch.uint8)]
    tensors = [value.to(dtype).expand(tuple(shape)) for value in values]
    digests = [digest[: WIDTHS[0]] for digest in _DIGESTS[kind](tensors) if digest is not None]
    return frozenset(_narrowed(np.frombuffer(b"".join(digests), "<u8"), width).tolist())


def object_digest(
    value: Any, of_tensor: Callable[[torch.Tensor], bytes | None] = full_digest
) -> bytes | None:
    """Return a digest of 8 bytes of an object; None if it cannot be pickled.

    Equal objects have equal digests: the order of dicts and sets does not count, nor whether two
    equal values inside are one object, nor the strides of tensors and arrays. Objects that refer to
    themselves are pickled as usual.

    Args:
        value: The object.
        of_tensor: Returns the digest of a tensor in it; a tensor without one is pickled.
    """
    if isinstance(value, ParameterNames):
        value = None  # ranks list other parameters, and none of the lists is wrong
    try:
        return xxhash.xxh3_64_digest(_orderless(value, of_tensor))
    except (RecursionError, ValueError):  # it refers to itself
        try:
            return xxhash.xxh3_64_digest(pickle.dumps(value))
        except Exception:
            return None
    except Exception:  # whatever an object's own pickling raises: no evidence, not a fault
        return None


def _orderless(value: Any, of_tensor: Callable[[torch.Tensor], bytes | None]) -> bytes:
    """Pickle an object without references, and containers and arrays by their contents."""

    def sorted_all(values: Iterable[Any]) -> list[bytes]:
        return sorted([_orderless(value, of_tensor) for value in values])

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            kind = type(value)
            if isinstance(value, dict) and kind is not OrderedDict:
                # The rest is the state that a subclass has beside its items.
                rest = () if kind is dict else value.__reduce_ex__(2)[:3]
                return kind.__qualname__, rest, sorted_all(value.items())
            if kind in (set, frozenset):
                return kind.__name__, sorted_all(value)
            if isinstance(value, torch.Tensor) and (digest := of_tensor(value)) is not None:
                return "tensor", kind, str(value.dtype), tuple(value.shape), digest
            if kind is np.ndarray:
                contents = tuple(value.flat) if value.dtype.hasobject else value.tobytes()
                return "array", value.dtype, value.shape, contents
            return None

    buffer = BytesIO()
    pickler = Pickler(buffer)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()


def _has_components(tensor: torch.Tensor) -> bool:
    return is_made_of_others(tensor) or tensor.is_quantized


def _digest_of_components(
    tensor: torch.Tensor, digest: Callable[[torch.Tensor], bytes | None]
) -> bytes | None:
    """Return a digest of the tensors that a tensor is made of; None where one of them has none."""
    wait = getattr(tensor, "wait", None)
    if wait is not None:  # the result of a collective that may still be under way
        return digest(wait())
    rest: Any
    if tensor.is_quantized:
        parts, rest = [tensor.int_repr()], quantizer(tensor)
    else:
        parts, rest = components(tensor), tensor.__tensor_flatten__()[1]  # type: ignore[attr-defined]
    digests = list(map(digest, parts))
    return None if None in digests else object_digest((digests, rest), digest)


def quantizer(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the scheme, scales and zero points of a quantized tensor as plain values."""
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


def _readable(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return True
    try:
        # The storage is asked, since the pointer of a wrapper subclass's view is only its offset.
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # wrapper subclasses have no memory of their own
        return False


def _sampled_on_host(tensor: torch.Tensor) -> bytes:
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        return _digest_64(_sample(tensor))
    memory = _memory(tensor)
    if tensor.nbytes > SAMPLE_NBYTES:
        view = memoryview(memory)
        return digest_of_bytes(
            lambda start, nbytes: view[start : start + nbytes], tensor.numel(), tensor.itemsize
        )
    return xxhash.xxh3_64_digest(memory)


def digest_of_bytes(read: Callable[[int, int], Any], numel: int, itemsize: int) -> bytes:
    """Return the sampled digest of elements in C order, reading the samples only.

    Args:
        read: Returns bytes, given the position of the first and their number.
        numel: The number of elements.
        itemsize: Bytes of each.
    """
    if numel * itemsize <= SAMPLE_NBYTES:
        return xxhash.xxh3_64_digest(read(0, numel * itemsize))
    starts, block = _blocks(numel, itemsize)
    blocks = [read(start * itemsize, block * itemsize) for start in starts]
    return xxhash.xxh3_64_digest(b"".join(blocks))


def _blocks(numel: int, itemsize: int) -> tuple[list[int], int]:
    """Return the starts of the sampled blocks and the size of a block, both in elements.

    The blocks are evenly spaced; one is at the very end.
    """
    block = SAMPLE_BLOCK_NBYTES // itemsize
    last = numel - block
    step = last // (SAMPLE_BLOCKS - 1)
    return [*range(0, (SAMPLE_BLOCKS - 1) * step, step), last], block


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sampled elements as bytes on the tensor's device; the same as on the host."""
    tensor = tensor.detach()
    if tensor.itemsize == 1 and tensor.dtype is not torch.bool:
        tensor = tensor.view(torch.uint8)  # torch cannot index float4
    if tensor.nbytes > SAMPLE_NBYTES:
        starts, block = _blocks(tensor.numel(), tensor.itemsize)
        if tensor.is_contiguous():
            # Indices would have to be copied to the device, which takes longer than all the rest.
            even = tensor.as_strided((len(starts) - 1, block), (starts[1], 1))
            tensor = torch.cat([even, tensor.view(-1)[None, starts[-1] :]])
        else:
            first = torch.tensor(starts, device=tensor.device)[:, None]
            positions = (first + torch.arange(block, device=tensor.device)).reshape(-1)
            tensor = tensor[torch.unravel_index(positions, tensor.shape)]
    # A tensor of one element is contiguous with any stride; a view of bytes needs stride 1.
    flat = _resolved(tensor).reshape(-1).contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is neither conjugated nor negated lazily."""
    return tensor.resolve_conj().resolve_neg()


def _slabs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield contiguous host tensors that follow one another in C order, a few MiB at a time."""
    is_in_place = tensor.is_contiguous() and tensor.is_cpu
    if is_in_place or tensor.nbytes <= _SLAB_NBYTES:
        yield tensor.contiguous().cpu()
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    for half in tensor.split(-(-tensor.shape[dim] // 2), dim):
        yield from _slabs(half)


def _digest_64(tensor: torch.Tensor) -> bytes:
    # The tensor stays alive while its memory is read: a view of the memory alone would not hold it.
    return xxhash.xxh3_64_digest(_memory(tensor))


def _memory(tensor: torch.Tensor) -> Any:
    """Return the bytes of a contiguous host tensor, in place; valid while the tensor lives."""
    if tensor.numel() == 0:
        return b""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
