"""What a rank has: keys in groups that lie alike, and of each group the boxes that it holds.

This is the one form of it, whatever a tensor is: a plain shard, strided, fused, padded, rows of an
``IndexShard``, a stack of experts, a tensor that names its own chunks. The same shards can be
replicas of those of another rank only where both hold the same box of the same key, so groups and
boxes are all that is compared.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain, islice, zip_longest
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_placements._torch import default_write_items, has_hooks
from dcp_placements.bind.one_tensor import Placed
from dcp_placements.layout.boxes import Ints
from dcp_placements.layout.sharding import Box, Chunk, Cuts, Kind
from dcp_placements.names.flat import Path

HeldBoxes = tuple[Box, ...]

OBJECT = "object"
"""A value that is no tensor."""
PLAIN = "plain"
"""A plain tensor that no rule matches."""
SHARD = "shard"
"""A tensor that is declared, by a rule, its DTensor or its own chunks."""

_OBJECT_BOXES = (Box((), ()),)
"""An object is held as one box without dims, as a scalar is."""


class Group(NamedTuple):
    """What keys that lie alike have in common; the same for every rank.

    Of ``experts.w1``, a DTensor of shape ``(2, 3)`` on each of two ep ranks, declared as
    ``{"ep": Shard(0)}``::

        Group("shard", (4, 3), torch.float32, torch.strided, False, ("ep",),
              (Cut(0, "ep", 2),), None, 2)

    Attributes:
        kind: ``OBJECT``, ``PLAIN`` or ``SHARD``.
        shape: Of the whole tensor; empty for an object.
        dtype: None for an object.
        layout: As the tensor says.
        requires_grad: As the tensor says.
        axis_names: One per mesh axis that a rule or a DTensor names.
        cuts: How it is cut, in the order in which the cuts apply.
        padded_shape: The shape that is cut, where it is larger than the whole tensor.
        shards: Number of different shards that the cuts make; None where they do not determine it.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    axis_names: tuple[str | None, ...] = ()
    cuts: Cuts = ()
    padded_shape: tuple[int, ...] | None = None
    shards: int | None = 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element; 0 for an object."""
        return 0 if self.dtype is None else self.dtype.itemsize


@dataclass(slots=True)
class Held:
    """The keys of one group, as a rank holds them.

    Ep rank 1 of two holds the other half of each expert weight::

        Held(group, (Box((2, 0), (2, 3)),), ["experts.w1", "experts.w2"], [...])

    Attributes:
        group: What they have in common.
        boxes: The boxes that the rank holds of each.
        fqns: The keys.
        values: By key, its ``Placed``, or the state dict's value where it has no place.
    """

    group: Group
    boxes: HeldBoxes
    fqns: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def data(self) -> list[torch.Tensor | None]:
        """Return the tensors that are written, key by key and box by box: views, no copies.

        None of what has no such: an object, a chunk of a tensor that names its own.
        """
        data: list[torch.Tensor | None] = []
        for value in self.values:
            if type(value) is Placed:
                data += map(value.view, held_chunks(value))
            elif self.group.kind == PLAIN:
                data.append(value)
            else:
                data += [None] * len(self.boxes)
        return data


Form = tuple[tuple[int, ...], str | None]
"""What is said of many keys alike: ``((1, 2), "'w1'")`` of ``model`` / ``layers.0``. Of each part
of the path in the nested dict, the number of components of the key; 0 for an index of a list, and
none where the state dict was not flattened. Then the name of the rule that matched, if any."""


@dataclass(slots=True)
class Table:
    """Some keys of a rank, by group.

    Nothing in it depends on the position of the rank, so both ep ranks send the same bytes::

        Table([group], [["experts.w1", "experts.w2"]], [((2,), None)], [0, 0])

    Attributes:
        groups: The groups.
        keys: By group, its keys.
        forms: The different forms.
        form_of: By key of all groups in turn, position in ``forms``.
    """

    groups: list[Group]
    keys: list[list[str]]
    forms: list[Form]
    form_of: list[int]

    @staticmethod
    def unpacked(packed: bytes) -> Table:
        """Return the table that ``packed_table`` packed.

        >>> held = Held(Group(PLAIN), (), ["layers.0.w", "layers.10.w", "007%"], [None] * 3)
        >>> Table.unpacked(packed_table([held], {})).keys
        [['layers.0.w', 'layers.10.w', '007%']]
        """
        groups, sizes, columns, forms, form_of = pickle.loads(zlib.decompress(packed))
        components = zip(*columns, strict=True)
        fqns = iter([".".join([one for one in each if one is not None]) for each in components])
        keys = [list(islice(fqns, size)) for size in sizes]
        return Table(groups, keys, forms, unpacked_ints(form_of).tolist())

    def paths(self) -> dict[str, Path]:
        """Return where each key stands in the nested state dict."""
        paths: dict[str, Path] = {}
        for fqn, number in zip(chain.from_iterable(self.keys), self.form_of, strict=True):
            parts, (lengths, _) = iter(fqn.split(".")), self.forms[number]
            paths[fqn] = tuple(
                [".".join(islice(parts, n)) if n else int(next(parts)) for n in lengths]
            ) or (fqn,)
        return paths

    def rule(self, group: int, position: int) -> str | None:
        """Return the name of the rule that matched the key at a position of a group."""
        return self.forms[self.form_of[sum(map(len, self.keys[:group])) + position]][1]


class Sent(NamedTuple):
    """What a rank sends of its holding, packed.

    Attributes:
        tables: Its tables.
        counts: Of each group of each table in turn, the number of boxes.
        boxes: The numbers of all these boxes.
    """

    tables: tuple[bytes, ...] = ()
    counts: bytes = b"B"  # packed, and none
    boxes: bytes = b"B"


@dataclass(slots=True)
class Holding:
    """What one rank has.

    Attributes:
        groups: The keys of each group of each table in turn.
        fqns: All keys, in the order of the state dict.
        sent: What other ranks get of it.
    """

    groups: list[Held] = field(default_factory=list)
    fqns: list[str] = field(default_factory=list)
    sent: Sent = field(default_factory=Sent)


def holding_of(
    state_dict: Mapping[str, Any],
    placed: Mapping[str, Placed],
    paths: Mapping[str, Path],
    without: Collection[str] = (),
) -> Holding:
    """Return what a rank has of a flat state dict, with what other ranks get of it.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placed: Its tensors' places.
        paths: By key, where it stands in the nested dict; empty where it was not flattened.
        without: Keys that it has no part of, or leaves to other ranks.
    """
    if without:
        state_dict = {fqn: value for fqn, value in state_dict.items() if fqn not in without}
    return as_holding(tables_of(state_dict, placed, paths), paths, list(state_dict))


def tables_of(
    state_dict: Mapping[str, Any],
    placed: Mapping[str, Placed],
    paths: Mapping[str, Path] = MappingProxyType({}),
) -> list[list[Held]]:
    """Return the keys of a flat state dict in tables, and the groups of each.

    Keys that other ranks need not have stand in tables apart, so that the other tables are equal on
    more ranks: by the mesh axes of their tensors, or where they have none, by the head of the
    nested dict.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placed: Its tensors' places.
        paths: By key, where it stands in the nested dict; empty where it was not flattened.
    """
    # Of each table, the groups.
    by_table: dict[Any, dict[tuple[Group, HeldBoxes], Held]] = {}
    # The group of a key, by all that determines it.
    by_traits: dict[Any, Held] = {}
    for fqn, value in state_dict.items():
        head: str | None = None
        traits: Any = None
        if (own := placed.get(fqn)) is not None:
            value, traits = own, (own.place, own.has_own_key, _LOOK(own.tensor))
        else:
            # Layers that are levels of the dict have one table.
            path = paths.get(fqn, ())
            head = str(path[0]) if len(path) > 1 else fqn.partition(".")[0]
            head = head.rstrip("0123456789")
            if has_hooks(value):
                traits = fqn
            elif isinstance(value, torch.Tensor):
                traits = value.shape, _LOOK(value)
        held = by_traits.get((head, traits))
        if held is None:
            group, boxes = group_of(fqn, value)
            has_own_key = type(value) is Placed and value.has_own_key
            of_head = None if group.kind == SHARD else head
            table = by_table.setdefault((of_head, has_own_key, group.kind, group.axis_names), {})
            held = by_traits[head, traits] = table.setdefault((group, boxes), Held(group, boxes))
        held.fqns.append(fqn)
        held.values.append(value)
    return [list(table.values()) for table in by_table.values()]


def as_holding(
    tables: list[list[Held]], paths: Mapping[str, Path], fqns: list[str] | None = None
) -> Holding:
    """Return what a rank has of some tables, with what other ranks get of it."""
    groups = list(chain.from_iterable(tables))
    numbers = [number for held in groups for box in held.boxes for part in box for number in part]
    sent = Sent(
        tuple([packed_table(members, paths) for members in tables]),
        packed_ints([len(held.boxes) for held in groups]),
        packed_ints(numbers),
    )
    return Holding(groups, fqns or [], sent)


_LOOK = attrgetter("dtype", "layout", "requires_grad")


def group_of(fqn: str, value: Any) -> tuple[Group, HeldBoxes]:
    """Return what a key has in common with others, and the boxes that this rank holds of it.

    Args:
        fqn: The key.
        value: Its ``Placed``, or the state dict's value where it has no place.
    """
    if type(value) is Placed:
        sharding = value.place.sharding
        names = tuple([axis.name for axis in value.place.axes])
        shards = None
        if value.place.is_exact and not any(
            c.kind is Kind.LISTED or c.dim < 0 for c in sharding.cuts
        ):
            shards = prod([cut.size for cut in sharding.cuts])
        look = *_LOOK(value.tensor), names, sharding.cuts, sharding.padded_shape, shards
        boxes = tuple([Box(chunk.offsets, chunk.sizes) for chunk in held_chunks(value)])
        return Group(SHARD, sharding.global_shape, *look), boxes
    if has_hooks(value):
        data = [item.tensor_data for item in default_write_items(fqn, value)]
        chunks = [
            (one, Box(tuple(one.chunk.offsets), tuple(one.chunk.sizes))) for one in data if one
        ]
        if chunks:
            first = chunks[0][0]
            group = Group(SHARD, tuple(first.size), *_LOOK(first.properties))
            return group, tuple(dict.fromkeys([box for _, box in chunks]))
    elif isinstance(value, torch.Tensor):
        shape = tuple(value.shape)
        return Group(PLAIN, shape, *_LOOK(value)), (Box.whole(shape),)
    return Group(OBJECT), _OBJECT_BOXES


def held_chunks(placed: Placed) -> tuple[Chunk, ...]:
    """Return the chunks that a tensor is written as.

    A tensor without elements keeps its key by one empty chunk; of a row that a rank holds twice
    the first is written.
    """
    shape, chunks = placed.place.sharding.global_shape, placed.place.chunks
    if 0 in shape:
        origin = (0,) * len(shape)
        return (Chunk(origin, origin, shape),)
    if len(chunks) > 1:
        by_offsets = {chunk.offsets: chunk for chunk in reversed(chunks)}
        if len(by_offsets) < len(chunks):
            return tuple(reversed(by_offsets.values()))
    return chunks


def packed_table(groups: Sequence[Held], paths: Mapping[str, Path]) -> bytes:
    """Return the table of some groups as it travels; equal tables give equal bytes.

    The keys are columns, one for each component, which repeat themselves.

    Args:
        groups: The groups.
        paths: By key, where it stands in the nested dict.
    """
    fqns = [fqn for held in groups for fqn in held.fqns]
    columns = list(map(list, zip_longest(*[fqn.split(".") for fqn in fqns])))
    forms: dict[Form, int] = {}
    form_of: list[int] = []
    for fqn, value in zip(fqns, chain.from_iterable([one.values for one in groups]), strict=True):
        parts: tuple[int, ...] = ()
        if fqn in paths:
            parts = tuple([one.count(".") + 1 if type(one) is str else 0 for one in paths[fqn]])
        form = parts, getattr(value, "rule", None)
        form_of.append(forms.setdefault(form, len(forms)))
    declared, sizes = [held.group for held in groups], [len(held.fqns) for held in groups]
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    # References are not memoised: whether two equal values are one object differs by rank.
    pickler.fast = True
    pickler.dump((declared, sizes, columns, list(forms), packed_ints(form_of)))
    return zlib.compress(buffer.getvalue(), 9)


def packed_ints(values: Sequence[int] | Ints) -> bytes:
    """Return integers, none of them negative, in as few bytes each as they all fit into.

    >>> packed_ints([3, 1]), packed_ints([70000])
    (b'B\\x03\\x01', b'Ip\\x11\\x01\\x00')
    """
    array = np.asarray(values, np.int64)
    kind = np.min_scalar_type(int(array.max(initial=0)))
    packed = kind.char.encode() + array.astype(kind).tobytes()
    # Long rows mostly repeat themselves.
    return packed if len(packed) <= _SHORT_NBYTES else b"z" + zlib.compress(packed, 1)


def unpacked_ints(packed: bytes) -> Ints:
    """Return the integers that were packed."""
    if packed[:1] == b"z":
        packed = zlib.decompress(packed[1:])
    return np.frombuffer(packed[1:], packed[:1].decode()).astype(np.int64)


_SHORT_NBYTES = 128
