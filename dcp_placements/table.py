"""What all ranks of a mesh say alike of their tensors: keys, layout classes, dtypes, paths.

The chunk list of a tensor is a function of its shape, the axes and the placements: its *layout
class*. A model of thousands of tensors has a dozen or two. So a rank's plan is a table of keys and
classes, the same on all ranks of a mesh, and a coordinate; everything else is worked out where it
is needed.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from typing import Any

import torch
import xxhash

from dcp_placements.keys import packed_column, packed_keys, unpacked_column, unpacked_keys
from dcp_placements.layout import Box, Cut, Interval, Layout, Sharding
from dcp_placements.naming import Path

OBJECT = -1
"""Stands for a class where a key is no tensor."""


@dataclass(frozen=True, slots=True)
class LayoutClass:
    """What tensors that are cut alike have in common.

    Attributes:
        sharding: The same object of values for every coordinate; no ``Pick`` in it.
        axis_names: One per axis of ``sharding.axis_sizes``, for messages.
        plain: A tensor that neither a rule nor a DTensor speaks of: torch's ``TENSOR`` items.
        rows: The dim of which every rank says itself what rows it has, one chunk each; no cut of
            ``sharding`` is on it. -1 where there is none.
    """

    sharding: Sharding
    axis_names: tuple[str | None, ...]
    plain: bool = False
    rows: int = -1

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """The axes along which ranks hold different parts; none where there is no element."""
        if 0 in self.sharding.global_shape:
            return ()
        cut = {c.axis for c in self.sharding.cuts if isinstance(c, Cut)}
        return tuple(axis for axis in sorted(cut) if self.sharding.axis_sizes[axis] > 1)

    @property
    def cells(self) -> int:
        """Different parts that there are."""
        count = 1
        for axis in self.cut_axes:
            count *= self.sharding.axis_sizes[axis]
        return count


@dataclass(frozen=True, slots=True)
class Look:
    """The properties that a tensor's metadata keeps."""

    dtype: torch.dtype
    layout: torch.layout = torch.strided
    requires_grad: bool = False


@dataclass(slots=True)
class Table:
    """Keys that live on one mesh, or that are no DTensors, and how they are cut.

    Attributes:
        classes: The layout classes that occur.
        looks: The properties that occur.
        rules: What rules are called; an entry of -1 in ``rule_of`` is no rule.
        paths: How keys are made of path parts: for each part the number of dotted components, -1
            for a list index.
        fqns: The keys, in state dict order; the lists below have one entry for each.
        class_of: Position in ``classes``; ``OBJECT`` for what is no tensor.
        look_of: Position in ``looks``.
        rule_of: Position in ``rules``.
        path_of: Position in ``paths``.
    """

    classes: list[LayoutClass] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    fqns: list[str] = field(default_factory=list)
    class_of: list[int] = field(default_factory=list)
    look_of: list[int] = field(default_factory=list)
    rule_of: list[int] = field(default_factory=list)
    path_of: list[int] = field(default_factory=list)

    def entries_of(self, class_index: int) -> list[int]:
        """Return the positions of the keys of one class."""
        return [i for i, known in enumerate(self.class_of) if known == class_index]

    def paths_of_keys(self) -> dict[str, Path]:
        """Return where each key stands in the nested state dict."""
        splits = [_split_at(counts) for counts in self.paths]
        return {
            fqn: split(fqn)
            for fqn, split in zip(self.fqns, map(splits.__getitem__, self.path_of), strict=True)
        }

    def nbytes(self, entry: int) -> int:
        """Return the bytes of one whole tensor; 0 for an object."""
        index = self.class_of[entry]
        if index == OBJECT:
            return 0
        shape = self.classes[index].sharding.global_shape
        return torch.Size(shape).numel() * self.looks[self.look_of[entry]].dtype.itemsize

    def packed(self) -> bytes:
        """Return the table as bytes; equal tables of one library version give equal bytes."""
        buffer = BytesIO()
        pickler = pickle.Pickler(buffer, protocol=5)
        # References are not memoised: whether two equal values are one object differs by rank.
        pickler.fast = True
        keys: Any = "\n".join(self.fqns)
        if keys.count("\n") != len(self.fqns) - 1:  # one of them has a line break itself
            keys = self.fqns
        pickler.dump((*self._kinds(), keys, *self._columns()))
        return buffer.getvalue()

    def compressed(self) -> bytes:
        """Return the table as it travels: a few hundred bytes for thousands of keys."""
        return zlib.compress(pickle.dumps(self.told(), protocol=5), 9)

    def told(self) -> tuple[Any, ...]:
        """Return the table as plain values that compress well; ``table_of`` makes one of them."""
        columns = map(packed_column, self._columns())
        return (*self._kinds(), packed_keys(self.fqns), *columns)

    def _columns(self) -> tuple[list[int], ...]:
        return self.class_of, self.look_of, self.rule_of, self.path_of

    def _kinds(self) -> tuple[Any, ...]:
        return (
            [_class_state(known) for known in self.classes],
            [(look.dtype, str(look.layout), look.requires_grad) for look in self.looks],
            self.rules,
            self.paths,
        )


def unpacked(data: bytes) -> Table:
    """Return the table that was compressed."""
    return table_of(pickle.loads(zlib.decompress(data)))


def table_of(told: Sequence[Any]) -> Table:
    """Return the table that ``Table.told`` told of."""
    classes, looks, rules, paths, keys, *columns = told
    return Table(
        [_class_of_state(*state) for state in classes],
        [
            Look(dtype, getattr(torch, layout.removeprefix("torch.")), r)
            for dtype, layout, r in looks
        ],
        rules,
        paths,
        unpacked_keys(keys),
        *map(unpacked_column, columns),
    )


def table_id(packed: bytes) -> bytes:
    """Return what names a packed table: 16 bytes of its content."""
    return xxhash.xxh3_128_digest(packed)


def path_counts(path: Path) -> tuple[int, ...]:
    """Return how a path's parts make its key.

    >>> path_counts(("optim", "layers.0.w", 3))
    (1, 3, -1)
    """
    return tuple(map(_counts.__getitem__, path))


class _Counts(dict[str | int, int]):
    """The components of path parts; a model's parts come again and again."""

    def __missing__(self, part: str | int) -> int:
        if len(self) >= _MAX_COUNTS:
            self.clear()
        count = self[part] = -1 if isinstance(part, int) else part.count(".") + 1
        return count


_MAX_COUNTS = 1 << 16
_counts = _Counts()


@lru_cache(maxsize=4096)
def grid(known: LayoutClass) -> tuple[tuple[Interval, ...], ...] | None:
    """Return the cuts of each dim that all coordinates together make; None if they tile it not.

    The chunks of all coordinates are the product of these, because an axis cuts one dim only: so a
    tiling of every dim is a tiling of the whole.
    """
    sharding = known.sharding
    axes = [cut.axis for cut in sharding.cuts]
    if len(set(axes)) < len(axes):
        return None
    dims: list[tuple[Interval, ...]] = []
    for dim, size in enumerate(sharding.global_shape):
        found = sharding.intervals_of(dim)
        if sharding.padded_shape is not None:
            found = [(start, min(stop, size)) for start, stop in found if start < size]
        position_reached = 0
        for start, stop in found:
            if start != position_reached:
                return None
            position_reached = stop
        if position_reached != size:
            return None
        dims.append(tuple(found))
    return tuple(dims)


def _split_at(counts: tuple[int, ...]) -> Callable[[str], Path]:
    """Return what takes a key apart into path parts of so many components."""
    long = [i for i, count in enumerate(counts) if count > 1]
    if min(counts) > 0 and len(long) == 1:
        # One name with dots among others without, as torch's state dicts have them: two splits.
        first, last = long[0], len(counts) - 1 - long[0]

        def around(fqn: str) -> Path:
            *head, rest = fqn.split(".", first)
            return (*head, *rest.rsplit(".", last)) if last else (*head, rest)

        return around

    def one_by_one(fqn: str) -> Path:
        components = fqn.split(".")
        path: list[str | int] = []
        position = 0
        for count in counts:
            stop = position + abs(count)
            part = ".".join(components[position:stop])
            path.append(int(part) if count < 0 else part)
            position = stop
        return tuple(path)

    return one_by_one


def boxes(
    known: LayoutClass, coordinate: Sequence[int], rows: Sequence[int] = ()
) -> tuple[Box, ...]:
    """Return the boxes that one coordinate writes; one empty box of a tensor without elements.

    Args:
        known: The tensor's class.
        coordinate: One int per axis.
        rows: Of dim ``known.rows``, those that are here.
    """
    shape = known.sharding.global_shape
    if 0 in shape:
        return (Box((0,) * len(shape), shape),)
    layout = known.sharding.at(coordinate)
    if known.rows >= 0:
        dims = list(layout.intervals)
        dims[known.rows] = tuple([(row, row + 1) for row in rows])
        layout = Layout(shape, tuple(dims))
    return tuple([chunk.box for chunk in layout.chunks()])


def _class_state(known: LayoutClass) -> tuple[object, ...]:
    s = known.sharding
    cuts = [
        (c.dim, c.axis, c.parts, c.interleaved, c.strided) for c in s.cuts if isinstance(c, Cut)
    ]
    kind = known.axis_names, known.plain, known.rows
    return s.global_shape, s.axis_sizes, cuts, s.padded_shape, *kind


def _class_of_state(
    shape: tuple[int, ...],
    axis_sizes: tuple[int, ...],
    cuts: list[tuple[int, int, int | tuple[int, ...], bool, bool]],
    padded: tuple[int, ...] | None,
    names: tuple[str | None, ...],
    plain: bool,
    rows: int,
) -> LayoutClass:
    sharding = Sharding(shape, axis_sizes, tuple(Cut(*cut) for cut in cuts), padded)
    return LayoutClass(sharding, names, plain, rows)
