"""Random models and random worlds that hold them, as plain values that print what they are.

A *family* is one tensor with up to two dims of rows (experts, layers) and perhaps parts (gate and
up), and says which of these the checkpoint tells apart by name. A *side* is a world of ranks, and
how it holds each family: which rows and parts are tensors of their own there, and how each of these
is cut. Two sides of one model are drawn independently of each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Level:
    """Rows of a family, distinguished by a number.

    Attributes:
        word: What stands before the number.
        total: How many rows.
        dim: The dim of the stacked tensor that they lie along.
        stacked: Whether they are one tensor in the checkpoint.
        joined: Whether the number is part of the last component, as in ``weight3``.
    """

    word: str
    total: int
    dim: int
    stacked: bool
    joined: bool = False


@dataclass(frozen=True)
class Family:
    """A parameter, its optimizer state, and in which form the checkpoint has them.

    Attributes:
        name: The first component of its names.
        row: Shape of one row, its parts in one.
        dtype: Of the parameter.
        levels: From the inside out.
        parts: Sizes of its parts in proportion to each other; none of one that is no fused tensor.
        part_dim: The dim of a row that the parts lie along.
        groups: How often the parts follow each other.
        split: Whether the checkpoint has the parts by name.
        moments: Names of its optimizer state tensors.
        step: Its optimizer step; None for none.
        has_rate: Whether it may have a learning rate of its own, which is an object.
        scalars: Further numbers of its optimizer state, by name.
        reduced: Of moments that have size 1 along a dim of a row: which one.
    """

    name: str
    row: tuple[int, ...]
    dtype: torch.dtype
    levels: tuple[Level, ...] = ()
    parts: tuple[int, ...] = ()
    part_dim: int = 0
    groups: int = 1
    split: bool = False
    moments: tuple[str, ...] = ()
    step: float | None = None
    has_rate: bool = True
    scalars: tuple[tuple[str, float], ...] = ()
    reduced: tuple[tuple[str, int], ...] = ()

    @property
    def numbers(self) -> dict[str, float]:
        """Its scalars, the step among them."""
        return {**({} if self.step is None else {"step": self.step}), **dict(self.scalars)}

    @property
    def optimized(self) -> bool:
        """Whether the optimizer has state of it."""
        return bool(self.moments or self.numbers)

    @property
    def labels(self) -> tuple[str, ...]:
        """What each dim of the whole family in one tensor is: ``r0`` of a row, or a level."""
        labels = [f"r{dim}" for dim in range(len(self.row))]
        for level in self.levels:
            labels.insert(level.dim, level.word)
        return tuple(labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole family in one tensor."""
        return self.shape_of("")

    def shape_of(self, state: str) -> tuple[int, ...]:
        """Return the shape of a moment of the whole family in one tensor."""
        sizes = {f"r{dim}": size for dim, size in enumerate(self.row)}
        sizes |= {f"r{dim}": 1 for moment, dim in self.reduced if moment == state}
        sizes |= {level.word: level.total for level in self.levels}
        return tuple(sizes[label] for label in self.labels)


@dataclass(frozen=True)
class Picks:
    """Rows of a dim on each position of an axis: an ``IndexShard`` on every rank."""

    dim: int
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Tile:
    """A box of a whole tensor, and where a rank has it.

    Attributes:
        offsets: In the whole.
        sizes: Of both.
        local_offsets: In the rank's tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


@dataclass(frozen=True)
class Cutting:
    """How ranks cut one tensor.

    Attributes:
        rule: ``(axis, placement)`` of what the rule says, in mesh order.
        own: The same of what the DTensor says and does after the rule.
        also: Axes of ``own`` that the rule names too.
        repeated: Axes of ``rule`` that the DTensor has, too, as ``Shard`` or ``Replicate``.
        kind: ``"plain"``, ``"fake"``, ``"real"``, or ``"listed"``: a tensor with the attributes of
            torch's ``CheckpointableTensor``.
        padded: The shape that was cut, where it is larger.
        given: Whether the rule says the global shape.
        mesh: What the rule takes for its mesh: ``"whole"``, ``"sub"`` of the axes that it names,
            or ``"coordinate"`` and ``"subcoordinate"``, which know no ranks.
        unnamed: Whether the DTensor's mesh has no names.
        memory: ``"own"``, a ``"view"``, ``"transposed"`` or a ``"parameter"``.
        tiles: Of a listed tensor that no rule describes: its boxes by position on ``tile_axes``.
        tile_axes: Axes whose positions, in C order, have the tiles.
        declared: Whether the rule speaks; of a listed tensor it need not.
    """

    rule: tuple[tuple[str, Any], ...] = ()
    own: tuple[tuple[str, Any], ...] = ()
    also: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    kind: str = "plain"
    padded: tuple[int, ...] | None = None
    given: bool = True
    mesh: str = "whole"
    unnamed: bool = False
    memory: str = "own"
    tiles: tuple[tuple[Tile, ...], ...] = ()
    tile_axes: tuple[str, ...] = ()
    declared: bool = True


@dataclass(frozen=True)
class Ids:
    """Which rows each position of an axis holds, as tensors of their own.

    Attributes:
        axis: None: all ranks hold the same.
        rows: By position, and there by the number on the level outside, or one for all of them.
        renumbered: Whether ranks count them from 0.
        total: Whether the rename says how many there are.
        twice: Whether two steps number them: the first one backwards, within the rank.
    """

    axis: str | None
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    renumbered: bool
    total: bool = True
    twice: bool = False

    @property
    def disjoint(self) -> bool:
        """Whether the positions share no row, and each has a range of them."""
        for mine in zip(*self.rows, strict=True):
            held = [number for numbers in mine for number in numbers]
            if held != list(range(len(held))):
                return False
        return True


@dataclass(frozen=True)
class Detour:
    """A component that the ranks spell otherwise, and the step that makes it the checkpoint's.

    Attributes:
        word: The checkpoint's: the name of the family, or the word of a level.
        last: Whether the step comes after those that number, stack and split, whose patterns then
            have the component of the ranks.
        how: ``"replace"``; ``"rank"`` and ``"any"``: a ``Replace`` where each rank spells it in its
            own way, with a pattern for that rank or for any; ``"function"``: a user's function.
    """

    word: str
    last: bool
    how: str


@dataclass(frozen=True)
class Hold:
    """How the ranks of a side hold a family.

    Attributes:
        mesh: Which of the side's meshes.
        ids: One per level; None where its rows are one tensor on the ranks.
        parts: Whether its parts are tensors of their own on the ranks.
        cuts: One, or one per part.
        stage: An axis, and the positions on it that have the family at all.
        detours: Components that the ranks spell otherwise.
        follows: Whether no rule speaks for the moments, which are plain.
        redundant: Whether the rule says of a stack that an axis shards its rows, as names do.
        turned: Where the ``Transpose`` stands among the steps, of tensors that the ranks have with
            their last two dims swapped: ``"first"``, ``"early"``, ``"middle"`` or ``"last"``.
        more_names: How many further names each tensor has, all of which the checkpoint has as one.
        tied: Whether these are names of the same memory, and of the parameter alone. Otherwise each
            is a tensor of its own, with state of its own, which only a load can have.
        ranges: How the ranks cut the moments, one per part: in ranges of the flattened tensor, by
            a rule of their own; empty where they are cut as the parameter.
    """

    mesh: int
    ids: tuple[Ids | None, ...]
    parts: bool
    cuts: tuple[Cutting, ...]
    stage: tuple[str, tuple[int, ...]] | None = None
    detours: tuple[Detour, ...] = ()
    follows: bool = False
    redundant: bool = False
    turned: str = ""
    more_names: int = 0
    tied: bool = False
    ranges: tuple[Cutting, ...] = ()

    def turn(self, family: Family) -> tuple[int, ...]:
        """Return which dim of the checkpoint's orientation each dim of a rank's tensor is.

        The two dims that change places are the last ones of what is one tensor on both sides of
        the rename.
        """
        levels = list(zip(family.levels, self.ids, strict=True))
        named = {level.word for level, ids in levels if ids is not None}
        rows = named | {level.word for level, _ in levels if not level.stacked}
        labels = [label for label in family.labels if label not in named]
        dims = list(range(len(labels)))
        inner = [dim for dim in dims if labels[dim] not in rows]
        if self.turned and len(inner) > 1:
            first, second = inner[-2:]
            dims[first], dims[second] = second, first
        return tuple(dims)


@dataclass(frozen=True)
class Mesh:
    """Axes over all ranks of a side, and the ranks in C order of the coordinates."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Side:
    """A world and what it saves or loads.

    Attributes:
        meshes: Over the same ranks.
        holds: One per family.
        rules: ``"patterns"``, ``"callable"``, or ``"new"``: one that makes new objects per call.
        nesting: How the state dict is nested: ``"flat"``, ``"top"``, ``"deep"`` or ``"mixed"``.
        wrapped: Whether the rename is a function that the library knows nothing of.
        options: Of planner and storage.
    """

    meshes: tuple[Mesh, ...]
    holds: tuple[Hold, ...]
    rules: str = "patterns"
    nesting: str = "flat"
    wrapped: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.meshes[0].ranks)


@dataclass(frozen=True)
class Pair:
    """A model, the world that saves it, and the one that loads it."""

    seed: int
    prefixes: tuple[str, str]
    families: tuple[Family, ...]
    objects: tuple[tuple[str, Any], ...]
    save: Side
    load: Side

    @property
    def flat(self) -> bool:
        """Whether the optimizer has a rate per parameter, as torch flattens it; or one for all."""
        return all(family.has_rate for family in self.families if family.optimized)
