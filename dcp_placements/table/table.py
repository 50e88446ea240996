"""What a rank has: keys in groups that lie alike, and of each group the boxes that it holds.

This is the one form of it, whatever a tensor is: a plain shard, strided, fused, padded, rows of an
``IndexShard``, a stack of experts, a tensor that names its own chunks. The same shards can be
replicas of those of another rank only where both hold the same box of the same key, so groups and
boxes are all that is compared.
"""

from __future__ import annotations

import json
import pickle
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from itertools import accumulate, chain, islice
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dcp_placements._torch import default_write_items, has_hooks
from dcp_placements.bind.placed import Placed
from dcp_placements.layout.boxes import Ints
from dcp_placements.layout.sharding import Box, Chunk, Cuts, Sharding
from dcp_placements.names.flat import Path
from dcp_placements.storage.metadata.record import cut_of_plain, plain_cut

T = TypeVar("T")

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

        Group("shard", (4, 3), torch.float32, "strided", False, ("ep",),
              (Cut(0, "ep", 2),), None, True, 2)

    Attributes:
        kind: ``OBJECT``, ``PLAIN`` or ``SHARD``.
        shape: Of the whole tensor; empty for an object.
        dtype: None for an object.
        layout: The tensor's ``torch.layout`` by name, without ``torch.``.
        requires_grad: As the tensor says.
        axis_names: One per mesh axis that a rule or a DTensor names.
        cuts: How it is cut, in the order in which the cuts apply.
        padded_shape: The shape that is cut, where it is larger than the whole tensor.
        is_exact: Whether the cuts, and the rows that ranks list, determine what each rank holds.
            Not for parts of a fused tensor that other cuts go through.
        parts: Number of different parts that the cuts make; None where they do not determine it.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    layout: str = "strided"
    requires_grad: bool = False
    axis_names: tuple[str | None, ...] = ()
    cuts: Cuts = ()
    padded_shape: tuple[int, ...] | None = None
    is_exact: bool = True
    parts: int | None = 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element; 0 for an object."""
        return 0 if self.dtype is None else self.dtype.itemsize

    @property
    def equal_along(self) -> frozenset[str]:
        """Names of the axes along which the tensor is declared to be replicated."""
        named = {name for name in self.axis_names if name is not None}
        return frozenset(named - {cut.axis for cut in self.cuts})


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


@dataclass
class Table:
    """Some keys of a rank, by group.

    Nothing in it depends on the position of the rank, so both ep ranks send the same bytes::

        Table([group], [2], ["experts\\tw1", "experts\\tw2"], ["experts.*"], [0, 0])

    Attributes:
        groups: The groups.
        sizes: Number of keys of each group.
        lines: By key, those of a group one after the other, the parts of its path in the nested
            dict as one line (see ``line_of``).
        rules: The names of the rules that matched; None for no rule.
        rule_of: By key, position in ``rules``.
    """

    groups: list[Group]
    sizes: list[int]
    lines: list[str]
    rules: list[str | None]
    rule_of: list[int]

    @cached_property
    def fqns(self) -> list[str]:
        """The keys."""
        text = "\n".join(self.lines)
        if "\v" in text:
            return [".".join(map(str, _path_of(line))) for line in self.lines]
        return text.replace("\t", ".").split("\n") if self.lines else []

    @cached_property
    def starts(self) -> list[int]:
        """The position of each group's first key in ``fqns``, and the number of all keys."""
        return list(accumulate(self.sizes, initial=0))

    def keys(self, group: int) -> list[str]:
        """Return the keys of a group."""
        return self.fqns[self.starts[group] : self.starts[group + 1]]

    def rule(self, position: int) -> str | None:
        """Return the name of the rule that matched the key at a position of ``fqns``."""
        return self.rules[self.rule_of[position]]

    def paths(self) -> dict[str, Path]:
        """Return where each key stands in the nested state dict."""
        return dict(zip(self.fqns, map(_path_of, self.lines), strict=True))

    def packed(self) -> bytes:
        """Return the table as it travels; equal tables give equal bytes."""
        groups = [
            (*group[:2], str(group.dtype), *group[3:6], [*map(plain_cut, group.cuts)], *group[7:])
            for group in self.groups
        ]
        columns = packed_ints(self.sizes), packed_ints(self.rule_of)
        buffer = BytesIO()
        pickler = pickle.Pickler(buffer, protocol=5)
        # References are not memoised: whether two equal values are one object differs by rank.
        pickler.fast = True
        pickler.dump((groups, *_packed_lines(self.lines), self.rules, *columns))
        return zlib.compress(buffer.getvalue(), 6)

    @staticmethod
    def unpacked(packed: bytes) -> Table:
        """Return the table that was packed."""
        groups, *lines, rules, sizes, rule_of = pickle.loads(zlib.decompress(packed))
        numbers = [unpacked_ints(column).tolist() for column in (sizes, rule_of)]
        return Table([*map(_group, groups)], numbers[0], _lines(*lines), rules, numbers[1])


def _group(plain: tuple[Any, ...]) -> Group:
    kind, shape, dtype, layout, requires_grad, names, cuts, *rest = plain
    dtype = None if dtype == "None" else getattr(torch, dtype.removeprefix("torch."))
    cuts = tuple([cut_of_plain(*cut) for cut in cuts])
    return Group(kind, shape, dtype, layout, requires_grad, names, cuts, *rest)


def line_of(path: Path) -> str:
    """Return a path as one line: parts with tabs between them, any other path as JSON.

    >>> line_of(("optim", "layers.0.w", "step")), line_of(("groups", 0))
    ('optim\\tlayers.0.w\\tstep', '\\x0b["groups", 0]')
    """
    try:
        line = "\t".join(path)  # type: ignore[arg-type]
    except TypeError:  # an index of a list
        line = "\v"
    is_plain = line.count("\t") == len(path) - 1 and not any(char in line for char in "\0\n\v")
    return line if is_plain else f"\v{json.dumps(path)}"


_PLAIN_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,17})(?![0-9])")


def _packed_lines(lines: Sequence[str]) -> tuple[str, bytes, bytes]:
    """Return lines as they travel: without numbers few differ, and the numbers count up."""
    parts = _PLAIN_NUMBER.split("\n".join(lines))
    forms, form_of = _numbered("\0".join(parts[::2]).split("\n"))
    numbers = [int(number) for number in parts[1::2]]
    return "\n".join(forms), packed_ints(form_of), packed_ints(numbers)


def _lines(forms: str, form_of: bytes, numbers: bytes) -> list[str]:
    """Return the lines that were packed.

    >>> _lines(*_packed_lines(["layers.0.w", "layers.10.w", "007%"]))
    ['layers.0.w', 'layers.10.w', '007%']
    """
    values = iter(unpacked_ints(numbers).tolist())
    made = [
        (form.replace("%", "%%").replace("\0", "%d"), form.count("\0"))
        for form in forms.split("\n")
    ]
    return [
        form % tuple(islice(values, count))
        for form, count in map(made.__getitem__, unpacked_ints(form_of).tolist())
    ]


def _path_of(line: str) -> Path:
    return tuple(json.loads(line[1:]) if line[:1] == "\v" else line.split("\t"))


@dataclass(slots=True)
class Holding:
    """What one rank has.

    Attributes:
        tables: Its tables.
        groups: The keys of each group of each table in turn.
        fqns: All keys, in the order of the state dict.
    """

    tables: list[Table] = field(default_factory=list)
    groups: list[Held] = field(default_factory=list)
    fqns: list[str] = field(default_factory=list)

    @property
    def boxes(self) -> list[HeldBoxes]:
        """The boxes of each group."""
        return [held.boxes for held in self.groups]


def holding_of(
    state_dict: Mapping[str, Any],
    placed: Mapping[str, Placed],
    paths: Mapping[str, Path],
    without: Collection[str] = (),
) -> Holding:
    """Return what a rank has of a flat state dict.

    Keys that other ranks need not have stand in tables apart, so that the other tables are equal on
    more ranks: by the mesh axes of their tensors, and by the head of the nested dict.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placed: Its tensors' places.
        paths: By key, where it stands in the nested dict; empty where it was not flattened.
        without: Keys that it has no part of, or leaves to other ranks.
    """
    fqns = [fqn for fqn in state_dict if fqn not in without]
    # Of each table, the groups.
    tables: dict[Any, dict[tuple[Group, HeldBoxes], Held]] = {}
    # The group of a key, by all that determines it.
    groups: dict[Any, Held] = {}
    for fqn in fqns:
        path = paths.get(fqn, ())
        head = path[0] if len(path) > 1 else fqn.partition(".")[0]
        value = placed.get(fqn)
        source: tuple[Any, ...]
        if value is None:
            value = state_dict[fqn]
            source = head, _source_of_group(fqn, value)
        else:
            source = head, value.place, value.has_own_key, _LOOK(value.tensor)
        held = groups.get(source)
        if held is None:
            group, boxes = group_of(fqn, value)
            has_own_key = type(value) is Placed and value.has_own_key
            table = tables.setdefault((head, has_own_key, group.kind, group.axis_names), {})
            held = groups[source] = table.setdefault((group, boxes), Held(group, boxes))
        held.fqns.append(fqn)
        held.values.append(value)
    by_table = [list(table.values()) for table in tables.values()]
    made = []
    for members in by_table:
        values = [value for held in members for value in held.values]
        rules = [value.rule if type(value) is Placed else None for value in values]
        made.append(table_of(members, rules, paths))
    return Holding(made, list(chain.from_iterable(by_table)), fqns)


_LOOK = attrgetter("dtype", "layout", "requires_grad")


def table_of(
    groups: Sequence[Held], rules: Sequence[str | None], paths: Mapping[str, Path]
) -> Table:
    """Return the table of some groups.

    Args:
        groups: The groups.
        rules: By key of all groups in turn, the name of its rule; None for no rule.
        paths: By key, where it stands in the nested dict.
    """
    fqns = [fqn for held in groups for fqn in held.fqns]
    lines = [line_of(paths.get(fqn, (fqn,))) for fqn in fqns]
    declared, sizes = [held.group for held in groups], [len(held.fqns) for held in groups]
    return Table(declared, sizes, lines, *_numbered(rules))


def _numbered(values: Iterable[T]) -> tuple[list[T], list[int]]:
    """Return the different values, and the number of each value among them."""
    numbers: dict[T, int] = {}
    number_of = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), number_of


def _source_of_group(fqn: str, value: Any) -> Any:
    """Return a value that determines the group of a key without a place."""
    if has_hooks(value):
        return fqn
    if isinstance(value, torch.Tensor):
        return value.shape, _LOOK(value)
    return None


def group_of(fqn: str, value: Any) -> tuple[Group, HeldBoxes]:
    """Return what a key has in common with others, and the boxes that this rank holds of it.

    Args:
        fqn: The key.
        value: Its ``Placed``, or the state dict's value where it has no place.
    """
    if type(value) is Placed:
        place = value.place
        sharding, names = place.sharding, tuple([axis.name for axis in place.axes])
        group = declared_group(sharding, names, *_look_of(value.tensor), is_exact=place.is_exact)
        return group, tuple([chunk.box for chunk in held_chunks(value)])
    if has_hooks(value):
        return _of_own_chunks(fqn, value)
    if not isinstance(value, torch.Tensor):
        return Group(OBJECT), _OBJECT_BOXES
    shape = tuple(value.shape)
    return Group(PLAIN, shape, *_look_of(value)), (Box.whole(shape),)


def declared_group(
    sharding: Sharding,
    axis_names: tuple[str | None, ...],
    dtype: torch.dtype,
    layout: str = "strided",
    requires_grad: bool = False,
    *,
    is_exact: bool = True,
) -> Group:
    """Return the group of tensors cut by a sharding, without what depends on the rank."""
    parts = None
    if is_exact and sharding.is_uniform:
        parts = prod([cut.size for cut in sharding.cuts])
    cuts = sharding.cuts
    look = dtype, layout, requires_grad
    padded = sharding.padded_shape
    return Group(SHARD, sharding.global_shape, *look, axis_names, cuts, padded, is_exact, parts)


def _look_of(tensor: Any) -> tuple[torch.dtype, str, bool]:
    """Return dtype, layout and ``requires_grad`` of a tensor, or of torch's record of them."""
    return tensor.dtype, str(tensor.layout).removeprefix("torch."), tensor.requires_grad


def _of_own_chunks(fqn: str, value: Any) -> tuple[Group, HeldBoxes]:
    items = default_write_items(fqn, value)
    data = [item.tensor_data for item in items if item.tensor_data is not None]
    if not data:
        return Group(OBJECT), _OBJECT_BOXES
    boxes = dict.fromkeys(Box(tuple(o.chunk.offsets), tuple(o.chunk.sizes)) for o in data)
    return Group(SHARD, tuple(data[0].size), *_look_of(data[0].properties)), tuple(boxes)


def held_chunks(placed: Placed) -> tuple[Chunk, ...]:
    """Return the chunks that a tensor is written as.

    A tensor without elements keeps its key by one empty chunk; of a row that a rank holds twice
    the first is written.
    """
    if 0 in placed.global_shape:
        origin = (0,) * len(placed.global_shape)
        return (Chunk(origin, origin, placed.global_shape),)
    chunks = placed.chunks
    if len(chunks) > 1:
        by_offsets = {chunk.offsets: chunk for chunk in reversed(chunks)}
        if len(by_offsets) < len(chunks):
            return tuple(reversed(by_offsets.values()))
    return chunks


def packed_boxes(held: Sequence[HeldBoxes]) -> bytes:
    """Return the boxes of each group as they travel: how many of each, then all numbers."""
    boxes = chain.from_iterable(held)
    numbers = [number for box in boxes for part in box for number in part]
    return packed_ints([*map(len, held), *numbers])


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
