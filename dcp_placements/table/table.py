"""What a rank has: keys in groups of one layout, and the boxes of each group that it holds.

Every tensor has this form: a plain shard, strided, fused, padded, rows of an ``IndexShard``, a
stack of experts, a tensor that names its own chunks. Two ranks hold replicas only where both hold
the same box of the same key, so groups and boxes are all that is compared.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import chain, groupby, islice, zip_longest
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_placements._torch import default_write_items, has_hooks
from dcp_placements.bind.rule_and_dtensor import Placed
from dcp_placements.layout.boxes import Ints
from dcp_placements.layout.sharding import Box, Chunk, Cuts, Kind
from dcp_placements.names.flat import Path

HeldBoxes = tuple[Box, ...]

OBJECT = "object"
"""A value that is not a tensor."""
PLAIN = "plain"
"""A plain tensor that no rule matches."""
SHARD = "shard"
"""A tensor that is declared, by a rule, its DTensor or its own chunks."""

_OBJECT_BOXES = (Box((), ()),)
"""An object is held as one box without dims, as a scalar is."""


class Group(NamedTuple):
    """The shape, dtype, declaration and layout of keys that share them; equal on every rank.

    The group of ``experts.w1``, a DTensor of shape ``(2, 3)`` on each of two ep ranks, declared as
    ``{"ep": Shard(0)}``::

        Group("shard", (4, 3), torch.float32, torch.strided, False, ("ep",),
              (Cut(0, "ep", 2),), None, 2)

    Attributes:
        kind: ``OBJECT``, ``PLAIN`` or ``SHARD``.
        shape: The shape of the whole tensor; empty for an object.
        dtype: The tensor's dtype; None for an object.
        layout: The tensor's ``layout``, such as ``torch.strided``.
        requires_grad: The tensor's ``requires_grad``.
        axis_names: The names of the mesh axes of its rule and its DTensor.
        cuts: The cuts, in the order in which they apply.
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
        group: The group.
        boxes: The boxes that the rank holds of each key.
        fqns: The keys.
        values: The ``Placed`` of each key, or the state dict's value if it has no place.
        table: The number of the table that they are sent in.
    """

    group: Group
    boxes: HeldBoxes
    fqns: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    table: int = 0

    def data(self) -> list[torch.Tensor | None]:
        """Return the tensors that are written, key by key and box by box: views, no copies.

        None stands for an object, and for a chunk of a tensor that names its own chunks.
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
"""What many keys share beside their group: ``((1, 2), "'w1'")`` for ``model`` / ``layers.0``. First
the number of components of the key in each step of its path in the nested dict; 0 for an index of a
list, and none where the state dict was not flattened. Then the name of the rule that matches."""


@dataclass(slots=True)
class Table:
    """Some keys of a rank, by group.

    Nothing in it depends on the position of the rank, so both ep ranks send the same bytes::

        Table([group], [["experts.w1", "experts.w2"]], [((2,), None)], [0, 0])

    Attributes:
        groups: The groups.
        keys: The keys of each group.
        forms: The different forms.
        form_of: The position in ``forms`` of each key, group after group.
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
        fqns = iter(
            [".".join([text for text in texts if text is not None]) for texts in components]
        )
        keys = [list(islice(fqns, size)) for size in sizes]
        return Table(groups, keys, forms, unpacked_ints(form_of).tolist())

    def paths(self) -> dict[str, Path]:
        """Return the path of each key in the nested state dict."""
        paths: dict[str, Path] = {}
        for fqn, number in zip(chain.from_iterable(self.keys), self.form_of, strict=True):
            components, (lengths, _) = iter(fqn.split(".")), self.forms[number]
            paths[fqn] = tuple(
                [".".join(islice(components, n)) if n else int(next(components)) for n in lengths]
            ) or (fqn,)
        return paths

    def rule(self, group: int, position: int) -> str | None:
        """Return the name of the rule that matched the key at a position of a group."""
        return self.forms[self.form_of[sum(map(len, self.keys[:group])) + position]][1]


class Sent(NamedTuple):
    """What a rank sends of its holding, packed.

    Attributes:
        tables: The packed tables.
        counts: The number of boxes of each group, table after table.
        boxes: The offsets and sizes of all these boxes.
    """

    tables: tuple[bytes, ...] = ()
    counts: bytes = b"B"  # no integers, packed
    boxes: bytes = b"B"


@dataclass(slots=True)
class Holding:
    """What one rank has.

    Attributes:
        groups: The groups, table after table, with their keys.
        paths: The path of each key in the nested dict, which is sent with it; empty where other
            ranks do not need the paths.
        fqns: All keys, in the order of the state dict.
    """

    groups: list[Held] = field(default_factory=list)
    paths: Mapping[str, Path] = field(default_factory=dict)
    fqns: list[str] = field(default_factory=list)

    def packed(self) -> Sent:
        """Return what is sent to other ranks."""
        boxes = [box for held in self.groups for box in held.boxes]
        return Sent(
            tuple(
                [
                    packed_table(list(groups), self.paths)
                    for _, groups in groupby(self.groups, attrgetter("table"))
                ]
            ),
            packed_ints([len(held.boxes) for held in self.groups]),
            packed_ints([number for box in boxes for row in box for number in row]),
        )

    def without(self, fqns: Collection[str]) -> Holding:
        """Return the holding without some keys."""
        groups: list[Held] = []
        for held in self.groups:
            pairs = zip(held.fqns, held.values, strict=True)
            if left := [pair for pair in pairs if pair[0] not in fqns]:
                keys, values = map(list, zip(*left, strict=True))
                groups.append(replace(held, fqns=keys, values=values))
        return Holding(groups, self.paths, [fqn for fqn in self.fqns if fqn not in fqns])


def holding_of(
    state_dict: Mapping[str, Any],
    placed: Mapping[str, Placed],
    paths: Mapping[str, Path] = MappingProxyType({}),
    without: Collection[str] = (),
) -> Holding:
    """Return the holding of a flat state dict.

    Keys that other ranks may not have get tables of their own, so that more ranks have equal
    tables: one table per set of mesh axes, or for values without axes, per head of the nested dict.

    Args:
        state_dict: A flat state dict with the checkpoint's keys.
        placed: The placed tensors, by key.
        paths: The path of each key in the nested dict; empty where it was not flattened.
        without: Keys of which the rank has nothing, or which it leaves to other ranks.
    """
    if without:
        state_dict = {fqn: value for fqn, value in state_dict.items() if fqn not in without}
    tables: dict[Any, int] = {}
    groups: dict[tuple[int, Group, HeldBoxes], Held] = {}
    # The group of a key, by all that determines it.
    by_traits: dict[Any, Held] = {}
    for fqn, value in state_dict.items():
        head: str | None = None
        traits: Any = None
        if (tensor := placed.get(fqn)) is not None:
            value, traits = tensor, (tensor.place, tensor.has_own_key, _PROPERTIES(tensor.tensor))
        else:
            # Layers that are levels of the dict have one table.
            path = paths.get(fqn, ())
            head = str(path[0]) if len(path) > 1 else fqn.partition(".")[0]
            head = head.rstrip("0123456789")
            if has_hooks(value):
                traits = fqn
            elif isinstance(value, torch.Tensor):
                traits = value.shape, _PROPERTIES(value)
        held = by_traits.get((head, traits))
        if held is None:
            group, boxes = group_of(fqn, value)
            has_own_key = type(value) is Placed and value.has_own_key
            of_head = None if group.kind == SHARD else head
            of_table = of_head, has_own_key, group.kind, group.axis_names
            table = tables.setdefault(of_table, len(tables))
            new = Held(group, boxes, table=table)
            held = by_traits[head, traits] = groups.setdefault((table, group, boxes), new)
        held.fqns.append(fqn)
        held.values.append(value)
    ordered = sorted(groups.values(), key=attrgetter("table"))
    return Holding(ordered, paths, list(state_dict))


_PROPERTIES = attrgetter("dtype", "layout", "requires_grad")


def group_of(fqn: str, value: Any) -> tuple[Group, HeldBoxes]:
    """Return the group of a key, and the boxes that this rank holds of it.

    Args:
        fqn: The key.
        value: The ``Placed`` of the key, or the state dict's value if it has no place.
    """
    if type(value) is Placed:
        sharding = value.place.sharding
        names = tuple([axis.name for axis in value.place.axes])
        shards = None
        if value.place.is_exact and not any(
            cut.kind is Kind.LISTED or cut.is_of_rows or cut.copies for cut in sharding.cuts
        ):
            shards = prod([cut.size for cut in sharding.cuts])
        rest = *_PROPERTIES(value.tensor), names, sharding.cuts, sharding.padded_shape, shards
        boxes = tuple([Box(chunk.offsets, chunk.sizes) for chunk in held_chunks(value)])
        return Group(SHARD, sharding.global_shape, *rest), boxes
    if has_hooks(value):
        data = [item.tensor_data for item in default_write_items(fqn, value)]
        chunks = [
            (write, Box(tuple(write.chunk.offsets), tuple(write.chunk.sizes)))
            for write in data
            if write
        ]
        if chunks:
            first = chunks[0][0]
            group = Group(SHARD, tuple(first.size), *_PROPERTIES(first.properties))
            return group, tuple(dict.fromkeys([box for _, box in chunks]))
    elif isinstance(value, torch.Tensor):
        shape = tuple(value.shape)
        return Group(PLAIN, shape, *_PROPERTIES(value)), (Box.whole(shape),)
    return Group(OBJECT), _OBJECT_BOXES


def held_chunks(placed: Placed) -> tuple[Chunk, ...]:
    """Return the chunks that a tensor is written as.

    A tensor without elements keeps its key by one empty chunk. A row that a rank holds twice is
    written once, the first of them.
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
    """Return the table of some groups as bytes; equal tables give equal bytes.

    The keys are packed as columns, one for each component, since these repeat themselves.

    Args:
        groups: The groups.
        paths: The path of each key in the nested dict.
    """
    fqns = [fqn for held in groups for fqn in held.fqns]
    columns = list(map(list, zip_longest(*[fqn.split(".") for fqn in fqns])))
    forms: dict[Form, int] = {}
    form_of: list[int] = []
    for fqn, value in zip(fqns, chain.from_iterable([held.values for held in groups]), strict=True):
        lengths: tuple[int, ...] = ()
        if fqn in paths:
            lengths = tuple(
                [step.count(".") + 1 if type(step) is str else 0 for step in paths[fqn]]
            )
        form = lengths, getattr(value, "rule", None)
        form_of.append(forms.setdefault(form, len(forms)))
    declared, sizes = [held.group for held in groups], [len(held.fqns) for held in groups]
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    # References are not memoised: whether two equal values are one object differs by rank.
    pickler.fast = True
    pickler.dump((declared, sizes, columns, list(forms), packed_ints(form_of)))
    return zlib.compress(buffer.getvalue(), 9)


def packed_ints(values: Sequence[int] | Ints) -> bytes:
    """Pack nonnegative integers in the narrowest type that all of them fit into.

    >>> packed_ints([3, 1]), packed_ints([70000])
    (b'B\\x03\\x01', b'Ip\\x11\\x01\\x00')
    """
    array = np.asarray(values, np.int64)
    kind = np.min_scalar_type(int(array.max(initial=0)))
    packed = kind.char.encode() + array.astype(kind).tobytes()
    # Long rows mostly repeat themselves.
    return packed if len(packed) <= _SHORT_NBYTES else b"z" + zlib.compress(packed, 1)


def unpacked_ints(packed: bytes) -> Ints:
    """Return the integers that ``packed_ints`` packed."""
    if packed[:1] == b"z":
        packed = zlib.decompress(packed[1:])
    return np.frombuffer(packed[1:], packed[:1].decode()).astype(np.int64)


_SHORT_NBYTES = 128
