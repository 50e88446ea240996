"""Digests: of tensors and objects, what a rank sends of them, their comparison over all ranks.

Two ranks that claim the same box of the same key must hold the same bytes. A rank sends one digest
for each key and box, group by group. Two ep ranks that both hold all of ``experts.w1`` and
``experts.w2``, and differ in the second::

    [[0x91f3, 0x27a0],      # rank 0: by row the digests of the keys of the group
     [0x91f3, 0x5c1e]]      # rank 1

Different digests prove a conflict; equal ones prove nothing, so nothing is inferred from them. The
hash is XXH3 (the xxhash package), at memory speed on one core. It guards against accidental
collisions, not against forged data.

Beyond a budget (``WORLD_BUDGET_NBYTES`` for all ranks) the digests of the keys of a group that have
a number in their name, thousands in a large model, are folded into one per box. What differs is
then known by group. Keys without a number (embeddings, norms, the head) keep theirs, because ranks
that hold otherwise different keys share them.
"""

from __future__ import annotations

import ctypes
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements.bind.one_tensor import Placed
from dcp_placements.layout.boxes import Bools
from dcp_placements.layout.sharding import Chunk
from dcp_placements.names.optimizer_state import ParameterNames
from dcp_placements.storage.provenance import StoredDigests
from dcp_placements.table.table import OBJECT, Group, Held, Holding
from dcp_placements.table.world import Cover, Piece, World, cover_of

Digests = np.ndarray[Any, np.dtype[np.uint64]]
"""0 where there is none."""

Lookup = Callable[[MetadataIndex], Any]
"""Gives the data of a tensor that names its own chunks."""

SAMPLED_NBYTES = 8
"""Of a sampled digest, and of what is sent of a full one."""

WORLD_BUDGET_NBYTES = 64 << 20
"""What the digests of all ranks may take together before a rank folds its own."""

_DIGESTS: Mapping[str, Callable[[Sequence[torch.Tensor]], list[bytes | None]]] = {
    "sampled": lambda tensors: sampled_digests(tensors),
    "full": lambda tensors: list(map(full_digest, tensors)),
}
_NO_DIGEST = bytes(SAMPLED_NBYTES)
_MOST = np.uint64(0xFFFFFFFFFFFFFFFF)
_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")


class SentDigests(NamedTuple):
    """What a rank sends of its contents.

    Attributes:
        packed: For each group that may have replicas, the digests by key and box.
        is_folded: Whether keys with a number have one digest together, the last of the group.
        undigested: Keys of tensors whose contents cannot be read, so that they have no digest.
    """

    packed: bytes = b""
    is_folded: bool = False
    undigested: tuple[str, ...] = ()


def may_have_replicas(group: Group, world: int) -> bool:
    """Whether another rank may hold the same box: not if there are as many parts as ranks."""
    return group.parts != world or world == 1


def has_number(fqn: str) -> bool:
    """Whether one of the components of a key is a number."""
    return _NUMBER.search(fqn) is not None


def folded(digests: Digests, fqns: Sequence[str]) -> Digests:
    """Return digests by key and box with one row, the last, for all keys that have a number."""
    numbered = np.array([has_number(fqn) for fqn in fqns], bool)
    # Multiplied by their places, so that two exchanged tensors do not fold to the same.
    weights = 2 * np.arange(numbered.sum(), dtype=np.uint64) + 1
    together = (digests[numbered] * weights[:, None]).sum(axis=0, dtype=np.uint64)
    return np.concatenate([digests[~numbered], together[None]])


def digests_of(
    holding: Holding, kind: str, *, world: int, lookup: Lookup, exact: bool
) -> SentDigests:
    """Return the digests of what a rank holds.

    Args:
        holding: What the rank holds.
        kind: ``"sampled"``, ``"full"`` or ``"off"``.
        world: Number of ranks.
        lookup: Gives the data of a tensor that names its own chunks.
        exact: Whether every key keeps a digest of its own, however many there are.
    """
    if kind == "off":
        return SentDigests()
    groups = [held for held in holding.groups if may_have_replicas(held.group, world)]
    # A rank that holds nothing of a group counts as the others do, which hold one box.
    count = sum(len(held.fqns) * max(len(held.boxes), 1) for held in groups)
    is_folded = not exact and count * SAMPLED_NBYTES * world > WORLD_BUDGET_NBYTES
    packed = []
    undigested: dict[str, None] = {}
    for held, digests in _by_group(groups, kind, lookup):
        if not held.boxes:
            continue
        if None in digests:
            items = zip(product(held.fqns, held.boxes), digests, strict=True)
            undigested.update(dict.fromkeys(fqn for (fqn, _), one in items if one is None))
        joined = b"".join([(one or _NO_DIGEST)[:SAMPLED_NBYTES] for one in digests])
        vector = np.frombuffer(joined, "<u8").astype(np.uint64).reshape(len(held.fqns), -1)
        packed.append((folded(vector, held.fqns) if is_folded else vector).tobytes())
    return SentDigests(b"".join(packed), is_folded, tuple(undigested))


def digests_by_chunk(holding: Holding, kind: str, lookup: Lookup) -> StoredDigests:
    """Return a digest of each chunk and object, of those that can be read.

    A rank that saves alone stores them, so that they are compared when its metadata are merged with
    those of other ranks. Arguments are those of ``digests_of``.
    """
    found: StoredDigests = {}
    for held, digests in _by_group(holding.groups, kind, lookup):
        for (fqn, box), digest in zip(product(held.fqns, held.boxes), digests, strict=True):
            if digest is not None:
                place = None if held.group.kind == OBJECT else box.offsets
                found.setdefault(fqn, {})[place] = digest
    return found


def differing_repeats(placed: Iterable[Placed], kind: str) -> Iterator[tuple[Placed, list[Chunk]]]:
    """Yield the boxes that this rank holds several times, with different contents.

    Redundant experts, or an ``IndexShard`` with repeats: one of the copies is written, so they are
    compared as those of two ranks are.

    Args:
        placed: This rank's tensors.
        kind: ``"sampled"``, ``"full"`` or ``"off"``.
    """
    for tensor in placed if kind != "off" else ():
        chunks = tensor.chunks
        if len({chunk.offsets for chunk in chunks}) == len(chunks) or 0 in tensor.global_shape:
            continue
        by_box: dict[Any, list[Chunk]] = {}
        for chunk in chunks:
            by_box.setdefault(chunk.box, []).append(chunk)
        for copies in by_box.values():
            views = list(map(tensor.view, copies))
            if len({*_DIGESTS[kind](views)} - {None}) > 1:
                yield tensor, copies


def _by_group(
    groups: Sequence[Held], kind: str, lookup: Lookup
) -> Iterator[tuple[Held, list[bytes | None]]]:
    """Yield groups with the digests of their keys and boxes; all tensors are hashed in one call."""
    tensors: list[torch.Tensor] = []
    for held in groups:
        if held.group.kind != OBJECT:
            places = product(held.fqns, held.boxes)
            tensors += [
                lookup(MetadataIndex(fqn, torch.Size(box.offsets))) if data is None else data
                for (fqn, box), data in zip(places, held.data(), strict=True)
            ]
    digests = iter(_DIGESTS[kind](tensors))
    for held in groups:
        if held.group.kind == OBJECT:
            yield held, list(map(object_digest, held.values))
        else:
            yield held, list(islice(digests, len(held.fqns) * len(held.boxes)))


class Contents:
    """The digests of all ranks, beside the rows of a ``World``.

    Where some ranks have folded theirs, those of the others are folded, too.

    Args:
        world: What the ranks hold; ranks of one cohort have folded, or have not.
        sent: By rank, its digests.
        size: Number of ranks that there are.

    Attributes:
        is_folded: Whether the keys with a number share one digest by group and box.
    """

    def __init__(self, world: World, sent: Sequence[SentDigests], size: int) -> None:
        self.is_folded = any(one.is_folded for one in sent)
        self._world = world
        parts: dict[tuple[int, int], list[Digests]] = {}
        for cohort in world.cohorts if any(one.packed for one in sent) else ():
            members, first = [sent[rank] for rank in cohort.ranks.tolist()], 0
            joined = b"".join([one.packed for one in members])
            digests = np.frombuffer(joined, np.uint64).reshape(len(members), -1)
            for table, number, count in cohort.groups:
                if not count or not may_have_replicas(world.tables[table].groups[number], size):
                    continue
                fqns = world.tables[table].keys[number]
                folds = sum(map(has_number, fqns)) - 1 if members[0].is_folded else 0
                width = len(fqns) - folds
                by_rank = digests[:, first : first + width * count].reshape(-1, width, count)
                mine = by_rank.transpose(0, 2, 1).reshape(-1, width)
                if self.is_folded and not members[0].is_folded:
                    mine = folded(mine.T, fqns).T
                parts.setdefault((table, number), []).append(mine)
                first += width * count
        # By table and group, by row and key of the group the digests; where digests are folded,
        # those of the keys without a number, then the folded one. And the column of each key.
        self._digests = {key: np.concatenate(of_group) for key, of_group in parts.items()}
        self._columns = {
            (table, number): np.cumsum([not (self.is_folded and has_number(fqn)) for fqn in fqns])
            - 1
            for table, number in self._digests
            for fqns in [world.tables[table].keys[number]]
        }

    def compared(self, piece: Piece) -> list[int]:
        """Return positions of the keys of a piece that have digests of their own."""
        is_folded = self.is_folded
        return [at for at, fqn in enumerate(piece.fqns) if not (is_folded and has_number(fqn))]

    def differing(self, piece: Piece) -> tuple[list[int], Digests]:
        """Return the keys of which two ranks hold one box with other contents.

        Returns:
            Their positions in the piece, and their digests by row and key.
        """
        positions = self.compared(piece) if self._digests else []
        parts = [np.zeros((0, len(positions)), np.uint64)]
        for source in piece.sources if positions else ():
            group = source.table, source.number
            if group in self._digests:
                keys = self._columns[group][[source.positions[at] for at in positions]]
                parts.append(self._digests[group][:, keys])
            else:
                parts.append(np.zeros((len(source.ranks), len(positions)), np.uint64))
        digests = np.concatenate(parts)
        differing = _differing(digests, piece.cover).any(axis=0) if positions else positions
        found = np.flatnonzero(differing).tolist()
        return [positions[at] for at in found], digests[:, found]

    def uncompared(self, piece: Piece) -> int:
        """Return how many keys of a piece are folded with other keys on some ranks than on others.

        Where no box is on ranks of two tables, there is nothing to compare between them.
        """
        cover = piece.cover
        if len(piece.sources) < 2 or not cover.has_replicas:
            return 0
        source_of = piece.by_row(range(len(piece.sources)))[cover.order]
        starts = cover.starts[:-1]
        if (np.maximum.reduceat(source_of, starts) == np.minimum.reduceat(source_of, starts)).all():
            return 0
        return len(piece.fqns) - len(self.compared(piece))

    def folded_conflicts(self) -> Iterator[tuple[Group, list[str], list[int]]]:
        """Yield each group whose folded digests differ: its folded keys, and ranks that differ."""
        sources = {(s.table, s.number): s for one in self._world.pieces for s in one.sources}
        for (table, number), digests in self._digests.items():
            source = sources[table, number]
            fqns = list(filter(has_number, self._world.tables[table].keys[number]))
            cover = cover_of(source.ranks, source.boxes)
            differing = _differing(digests[:, -1:], cover)
            if fqns and differing.any():
                yield source.group, fqns, cover.holders(int(differing.argmax())).tolist()


def _differing(digests: Digests, cover: Cover) -> Bools:
    """Return by box and column whether two of its rows have different digests."""
    starts = cover.starts[:-1]
    first_of_row = cover.order[starts][cover.box_of] if len(starts) else starts
    if (digests == digests[first_of_row]).all():
        # Nearly always, and several times faster than what follows.
        return np.zeros((len(starts), digests.shape[1]), bool)
    ordered = digests[cover.order]
    highest = np.maximum.reduceat(ordered, starts)
    lowest = np.minimum.reduceat(np.where(ordered == 0, _MOST, ordered), starts)
    return np.asarray(lowest < highest, bool)


SAMPLE_BLOCKS = 16
SAMPLE_BLOCK_NBYTES = 256
SAMPLE_NBYTES = SAMPLE_BLOCKS * SAMPLE_BLOCK_NBYTES
"""A sampled digest sees all of a tensor up to this size, and so many bytes of a larger one, in
blocks spread evenly from its first element to its last."""

_SLAB_NBYTES = 8 << 20


def sampled_digests(tensors: Sequence[torch.Tensor]) -> list[bytes | None]:
    """Return a digest of 8 bytes per tensor, over sampled elements in C order.

    Tensors in host memory are read in place. Those on a device are sampled there and come over in
    one transfer per device. A tensor that is made of others (a wrapper subclass, a quantized one)
    has the digest of those. One that cannot be read (meta, sparse) gives None: no evidence.
    """
    digests: list[bytes | None] = [None] * len(tensors)
    on_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if _is_made_of_others(tensor):
            parts = _digests_of_parts(tensor, sampled_digests)
            digests[index] = None if parts is None else xxhash.xxh3_64_digest(parts)
        elif not _readable(tensor):
            continue
        elif tensor.is_cpu:
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
    if _is_made_of_others(tensor):
        parts = _digests_of_parts(tensor, lambda parts: list(map(full_digest, parts)))
        return None if parts is None else xxhash.xxh3_128_digest(parts)
    if not _readable(tensor):
        return None
    hasher = xxhash.xxh3_128()
    for slab in _slabs(_resolved(tensor.detach())):
        hasher.update(_memory(slab))
    return hasher.digest()


def object_digest(value: Any) -> bytes | None:
    """Return a digest of 8 bytes of a pickled object; None if it cannot be pickled so.

    Equal objects have equal digests: the order of dicts and sets does not count, nor whether two
    equal values inside are one object, nor how tensors and arrays lie in memory. Objects that refer
    to themselves are pickled as usual.
    """
    if isinstance(value, ParameterNames):
        value = None  # ranks list other parameters, and none of the lists is wrong
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


def _digests_of_parts(
    tensor: torch.Tensor, digests_of: Callable[[list[torch.Tensor]], list[bytes | None]]
) -> bytes | None:
    """Return the digests of all that a tensor is made of; None where one of them has none."""
    made = _parts(tensor)
    if made is None:
        return None
    digests = [made[1], *digests_of(made[0])]
    return None if None in digests else b"".join([digest or b"" for digest in digests])


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
