"""The keys of a rank and how each of them is declared: the part of a plan that ranks share.

Keys of one shape, dtype and declaration that lie alike on a rank are a *group*. Nothing in a key
table depends on the position of the rank, so all ranks that hold the same keys send the same
bytes, and the coordinator unpacks each different table once. Which boxes of a group a rank holds
travels beside the table (``local_plan``).
"""

from __future__ import annotations

import pickle
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from typing import Any, NamedTuple

import torch

from dcp_placements.layout.sharding import Pick, Sharding
from dcp_placements.names.keys import Path
from dcp_placements.save.key_packing import (
    packed_column,
    packed_keys,
    unpacked_column,
    unpacked_keys,
)

_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")

OBJECT = "object"
"""A value that is no tensor."""
PLAIN = "plain"
"""A plain tensor that no rule matches."""
SHARD = "shard"
"""A tensor that is declared, by a rule, its DTensor or its own chunks."""

ROWS = 0
"""Stands for ``parts`` in a declared cut whose rows every rank lists itself."""


class DeclaredCut(NamedTuple):
    """One cut as it was declared.

    Attributes:
        dim: Tensor dim, from 0.
        axis: Position in ``Declaration.axis_names``; -1 where names alone identify the rows.
        parts: As in ``layout.Cut``; ``ROWS`` where each rank lists its rows.
        interleaved: As in ``layout.Cut``.
        strided: As in ``layout.Cut``.
    """

    dim: int
    axis: int
    parts: int | tuple[int, ...]
    interleaved: bool = False
    strided: bool = False


class Declaration(NamedTuple):
    """How tensors are declared to lie, the same for every rank.

    Attributes:
        axis_names: One per mesh axis that a rule or a DTensor names.
        axis_sizes: Ranks along each.
        cuts: In the order in which they apply.
        padded_shape: The shape that is cut, where it is larger than the whole tensor.
        is_exact: Whether the cuts, and the rows that ranks list, determine what each rank holds.
            Not for parts of a fused tensor that other cuts go through.
    """

    axis_names: tuple[str | None, ...] = ()
    axis_sizes: tuple[int, ...] = ()
    cuts: tuple[DeclaredCut, ...] = ()
    padded_shape: tuple[int, ...] | None = None
    is_exact: bool = True

    @property
    def parts(self) -> int | None:
        """Number of different parts that it makes; None where the cuts do not tell."""
        if not self.is_exact or any(cut.parts == ROWS for cut in self.cuts):
            return None
        count = 1
        for axis in {cut.axis for cut in self.cuts}:
            count *= self.axis_sizes[axis]
        return count

    @property
    def equal_along(self) -> frozenset[str]:
        """Names of the axes along which the tensor is declared to be replicated."""
        cut = {cut.axis for cut in self.cuts}
        named = enumerate(self.axis_names)
        return frozenset(name for i, name in named if name is not None and i not in cut)


def declaration_of(
    sharding: Sharding, axis_names: tuple[str | None, ...], *, is_exact: bool = True
) -> Declaration:
    """Return what a sharding declares, without what depends on the rank."""
    cuts = tuple(
        DeclaredCut(cut.dim, cut.axis, ROWS)
        if isinstance(cut, Pick)
        else DeclaredCut(*[getattr(cut, name) for name in DeclaredCut._fields])
        for cut in sharding.cuts
    )
    return Declaration(axis_names, sharding.axis_sizes, cuts, sharding.padded_shape, is_exact)


class Group(NamedTuple):
    """What the keys of a group have in common.

    Attributes:
        kind: ``OBJECT``, ``PLAIN`` or ``SHARD``.
        shape: Of the whole tensor; empty for an object.
        dtype: None for an object.
        layout: The tensor's ``torch.layout`` by name, without ``torch.``.
        requires_grad: As the tensor says.
        declared: How it is cut.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    layout: str = "strided"
    requires_grad: bool = False
    declared: Declaration = Declaration()

    @property
    def itemsize(self) -> int:
        """Bytes of an element; 0 for an object."""
        return 0 if self.dtype is None else self.dtype.itemsize


@dataclass
class KeyTable:
    """Some keys of a rank, by group.

    Attributes:
        groups: The groups.
        fqns: The keys, those of a group one after the other.
        sizes: Number of keys of each group.
        rules: What the rules that spoke are called.
        rule_of: By key, position in ``rules``; -1 where none spoke.
        paths: How keys are made of path parts: for each part the number of dotted components, -1
            for a list index.
        path_of: By key, position in ``paths``.
    """

    groups: list[Group] = field(default_factory=list)
    fqns: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    rule_of: list[int] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    path_of: list[int] = field(default_factory=list)

    @cached_property
    def starts(self) -> list[int]:
        """The position of each group's first key in ``fqns``, and the number of all keys."""
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + size)
        return starts

    @cached_property
    def numbered(self) -> list[bool]:
        """For each key, whether one of its components is a number."""
        return [_NUMBER.search(fqn) is not None for fqn in self.fqns]

    def numbered_of(self, group: int) -> list[bool]:
        """Return ``numbered`` of the keys of a group."""
        return self.numbered[self.starts[group] : self.starts[group + 1]]

    def keys(self, group: int) -> list[str]:
        """Return the keys of a group."""
        return self.fqns[self.starts[group] : self.starts[group + 1]]

    def rule(self, entry: int) -> str | None:
        """Return what the rule is called that spoke for a key."""
        at = self.rule_of[entry]
        return None if at < 0 else self.rules[at]

    def paths_of_keys(self) -> dict[str, Path]:
        """Return where each key stands in the nested state dict."""
        splits = [_splitter(counts) for counts in self.paths]
        return {fqn: splits[at](fqn) for fqn, at in zip(self.fqns, self.path_of, strict=True)}

    def packed(self) -> bytes:
        """Return the table as it travels; equal tables give equal bytes."""
        groups = [(*g[:2], str(g.dtype), *g[3:5], *map(_plain, g.declared)) for g in self.groups]
        columns = map(packed_column, (self.sizes, self.rule_of, self.path_of))
        buffer = BytesIO()
        pickler = pickle.Pickler(buffer, protocol=5)
        # References are not memoised: whether two equal values are one object differs by rank.
        pickler.fast = True
        pickler.dump((groups, packed_keys(self.fqns), self.rules, self.paths, *columns))
        return zlib.compress(buffer.getvalue(), 6)


def unpacked_table(packed: bytes) -> KeyTable:
    """Return the table that was packed."""
    groups, keys, rules, paths, sizes, rule_of, path_of = pickle.loads(zlib.decompress(packed))
    return KeyTable(
        [_group(*values) for values in groups],
        unpacked_keys(keys),
        unpacked_column(sizes),
        rules,
        unpacked_column(rule_of),
        paths,
        unpacked_column(path_of),
    )


def _group(
    kind: str,
    shape: tuple[int, ...],
    dtype: str,
    layout: str,
    requires_grad: bool,
    names: tuple[str | None, ...],
    sizes: tuple[int, ...],
    cuts: tuple[tuple[Any, ...], ...],
    padded: tuple[int, ...] | None,
    is_exact: bool,
) -> Group:
    declared = Declaration(names, sizes, tuple(DeclaredCut(*cut) for cut in cuts), padded, is_exact)
    found = None if dtype == "None" else getattr(torch, dtype.removeprefix("torch."))
    return Group(kind, shape, found, layout, requires_grad, declared)


def _plain(value: Any) -> Any:
    """Return cuts as plain tuples; all else as it is."""
    if isinstance(value, tuple) and value and isinstance(value[0], DeclaredCut):
        return tuple([tuple(cut) for cut in value])
    return value


def path_counts(path: Path) -> tuple[int, ...]:
    """Return how a path's parts make its key.

    >>> path_counts(("optim", "layers.0.w", 3))
    (1, 3, -1)
    """
    return tuple([-1 if isinstance(part, int) else part.count(".") + 1 for part in path])


def _splitter(counts: tuple[int, ...]) -> Callable[[str], Path]:
    """Return what takes a key apart into path parts of so many components."""

    def split(fqn: str) -> Path:
        components = fqn.split(".")
        path: list[str | int] = []
        position = 0
        for count in counts:
            part = ".".join(components[position : position + abs(count)])
            path.append(int(part) if count < 0 else part)
            position += abs(count)
        return tuple(path)

    return split
