"""What all ranks of a save hold, as a proposal asks for it: by key, position by position.

The coordinator of a save has the tables, boxes and digests of all ranks, and where each rank is
along the axes of the program's meshes. Two ep ranks that both call other experts ``experts.w1``::

    axes      {"ep": NamedAxis(2, (0, 1))}
    held      experts.w1: at {"ep": 0} TensorFacts((2, 3), ..., digest=0x91f3)
                          at {"ep": 1} TensorFacts((2, 3), ..., digest=0x5c1e)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_placements.layout.boxes import Ints, Shape
from dcp_placements.names.flat import Path
from dcp_placements.names.optimizer_state import OptimizerStates, states_among
from dcp_placements.rules.named_axes import NamedAxes
from dcp_placements.table.digests import Digests, constant_digests
from dcp_placements.table.table import OBJECT
from dcp_placements.table.world import NO_RULE, Piece, World

AxisPositions = Mapping[str, int]
"""Where a rank is along each named axis."""


class TensorFacts(NamedTuple):
    """One tensor on one rank.

    Attributes:
        shape: Over its own mesh; a plain tensor's own.
        part: Which part of that shape the rank holds.
        own_axes: The axes over which its DTensor shards it.
        digest: Of its elements on this rank; None where they are all equal, as in a new moment.
    """

    shape: Shape
    part: Hashable = ()
    own_axes: frozenset[str | None] = frozenset()
    digest: Hashable = None


OnRanks = Sequence[tuple[int, TensorFacts]]
"""One tensor on all ranks that hold it, each by its place among the plans."""


class _Rows(NamedTuple):
    """A piece, rank by rank.

    Attributes:
        piece: The piece.
        digests: By row and key.
        rows: By rank, the rows.
        shapes: By rank, the shape of the keys over their own mesh.
        parts: By rank, the boxes that it holds.
        constants: Digests of parts whose elements are all equal.
    """

    piece: Piece
    digests: Digests
    rows: dict[int, list[int]]
    shapes: dict[int, Shape]
    parts: dict[int, Hashable]
    constants: frozenset[int]


@dataclass
class FactsOfRanks:
    """What all ranks hold.

    Attributes:
        world: Their tables and boxes.
        digests: By cell.
        named: The axes of the program.
        ranks: The global ranks, in the order of the plans.
        lists: The parameters that each parameter group lists, by its key.
        kind: What the digests are: ``"sampled"`` or ``"full"``.
    """

    world: World
    digests: Digests
    named: NamedAxes
    ranks: Sequence[int]
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)
    kind: str = "sampled"

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes by name."""
        return self.named.sizes

    @cached_property
    def positions(self) -> list[AxisPositions]:
        """By rank, where it is along each axis."""
        axes = self.named.axes.items()
        places = range(len(self.ranks))
        return [{name: axis.positions[place] for name, axis in axes} for place in places]

    @cached_property
    def tensors(self) -> dict[str, tuple[int, int]]:
        """By key of a tensor, its piece and its position there."""
        return {
            fqn: (number, column)
            for number, piece in enumerate(self.world.pieces)
            if piece.group.kind != OBJECT
            for column, fqn in enumerate(piece.fqns)
        }

    @cached_property
    def keys_by_ranks(self) -> list[tuple[tuple[str, ...], list[int]]]:
        """The keys of tensors that some ranks have, and these ranks."""
        return [
            (
                tuple(
                    [
                        fqn
                        for table in cohort.tables
                        for group, fqns in zip(
                            self.world.tables[table].groups,
                            self.world.tables[table].keys,
                            strict=True,
                        )
                        if group.kind != OBJECT
                        for fqn in fqns
                    ]
                ),
                cohort.ranks.tolist(),
            )
            for cohort in self.world.cohorts
        ]

    @cached_property
    def states(self) -> OptimizerStates:
        """Which keys are optimizer state."""
        return states_among(chain(*[piece.fqns for piece in self.world.pieces]), self.lists)

    @cached_property
    def paths(self) -> dict[str, Path]:
        """Where keys stand in the nested state dict."""
        return {fqn: path for table in self.world.tables for fqn, path in table.paths().items()}

    def names(self, level: str | None = None) -> dict[str, str]:
        """Return the key of each parameter by its name, which stands in its optimizer state, too.

        Of a parameter that is not there its largest state stands for it.

        Args:
            level: That of the parameters, with its dot; None where it is not known.
        """
        owners = {key: state.owner for key in self.tensors if (state := self.states.of(key))}
        weights = self.states.weights_of(dict.fromkeys(owners.values()), self.tensors)
        name_of = {key: name for (_, name), keys in weights.items() for key in keys}
        names: dict[str, str] = {}
        for key in self.tensors:
            if key in owners:
                continue
            if level is not None:
                if key.startswith(level):
                    names[key.removeprefix(level)] = key
                continue
            path, name = self.paths.get(key, ()), name_of.get(key, key)
            is_model = len(path) == 2 and "." in str(path[1]) and "." not in str(path[0])
            if name == key and is_model and not str(path[1]).partition(".")[0].isdigit():
                name = str(path[1])
            names.setdefault(name, key)
        for key, (_, name) in owners.items() if level is None else ():
            is_alone = not weights.get(owners[key]) and len(self.shape_of(key)) > 0
            if is_alone and (name not in names or self._is_larger(key, names[name], owners)):
                names[name] = key
        return names

    def _is_larger(self, key: str, other: str, owners: Mapping[str, Any]) -> bool:
        shapes = self.shape_of(key), self.shape_of(other)
        return other in owners and prod(shapes[0]) > prod(shapes[1])

    def is_ruled(self, key: str) -> bool:
        """Whether a rule cuts a tensor."""
        number, column = self.tensors[key]
        return self.world.rules(self.world.pieces[number], column) != NO_RULE

    def shape_of(self, key: str) -> Shape:
        """Return the shape of a tensor over its own mesh, on the first rank that holds it."""
        return self.world.pieces[self.tensors[key][0]].group.shape

    def dtype_of(self, key: str) -> torch.dtype | None:
        """Return the dtype of a tensor on the first rank that holds it."""
        return self.world.pieces[self.tensors[key][0]].group.dtype

    def held(self, key: str) -> OnRanks:
        """Return a tensor on all ranks that hold it."""
        number, column = self.tensors[key]
        rows = self.rows_of(number)
        group = rows.piece.group
        own = frozenset([cut.axis for cut in group.cuts if cut.size > 1])
        held: list[tuple[int, TensorFacts]] = []
        for rank, of_rank in rows.rows.items():
            digests = tuple(rows.digests[of_rank, column].tolist())
            unknown = all(digest == 0 or digest in rows.constants for digest in digests)
            digest = None if unknown else digests
            facts = TensorFacts(rows.shapes[rank], rows.parts[rank], own, digest)
            held.append((rank, facts))
        return held

    def rows_of(self, number: int) -> _Rows:
        """Return a piece, rank by rank."""
        if number not in self._rows:
            piece = self.world.pieces[number]
            ranks, row = piece.ranks.tolist(), 0
            rows: dict[int, list[int]] = {}
            shapes: dict[int, Shape] = {}
            constants: set[int] = set()
            for source in piece.sources:
                for rank in source.ranks.tolist():
                    rows.setdefault(rank, []).append(row)
                    row += 1
                for rank in self.world.members[source.table].tolist():
                    rows.setdefault(rank, [])  # of an empty shard there is no box
                    shapes[rank] = source.group.shape
            of_piece = piece.take(self.digests)
            boxes = piece.boxes.tolist() if len(piece.boxes) else [()] * len(ranks)
            for sizes in {tuple(box[1]) for box in boxes if box}:
                dtype = piece.group.dtype
                if dtype is not None:
                    constants |= constant_digests(sizes, dtype, self.kind, of_piece.itemsize)
            parts: dict[int, Hashable] = {
                rank: tuple([str(boxes[row]) for row in of_rank]) for rank, of_rank in rows.items()
            }
            if len({*shapes.values()}) > 1:
                # Each rank holds that part of its own tensor which its place along the axes says.
                cutting = {cut.axis for cut in piece.group.cuts if cut.size > 1}
                if cutting <= self.named.axes.keys():
                    axes = sorted(filter(None, cutting))
                    parts = {r: tuple([self.positions[r][axis] for axis in axes]) for r in rows}
            of_ranks = _Rows(piece, of_piece, rows, shapes, parts, frozenset(constants))
            self._rows[number] = of_ranks
        return self._rows[number]

    @cached_property
    def _rows(self) -> dict[int, _Rows]:
        return {}

    def differs_within(self, key: str, axes: Iterable[str]) -> bool:
        """Return whether ranks at one position along some axes hold other contents in one box.

        Args:
            key: That of a tensor.
            axes: The axes along which other parts are declared.
        """
        number, column = self.tensors[key]
        rows = self.rows_of(number)
        piece, digests = rows.piece, rows.digests[:, column]
        groups = [np.asarray(self.named.axes[name].positions)[piece.ranks] for name in axes]
        boxes: Ints = piece.cover.box_of if len(piece.boxes) else np.zeros_like(piece.ranks)
        seen = digests != 0
        if len(np.unique(digests[seen])) < 2:
            return False
        places = np.stack([*groups, boxes])[:, seen]
        both = np.concatenate([places, digests[seen].astype(np.uint64)[None].view(np.int64)])
        return len(np.unique(both, axis=1).T) > len(np.unique(places, axis=1).T)


def differing_axes(
    held: Sequence[OnRanks], named: NamedAxes, axes: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Return the axes along which contents differ, and those along which all are equal.

    Ranks are compared that differ in their position along one axis alone.

    Args:
        held: Tensors, as ranks hold them.
        named: All axes.
        axes: Those that are asked about.
    """
    differ, equal = set(), set()
    for axis in axes:
        contents: dict[Any, set[Any]] = {}
        count = 0
        for number, shards in enumerate(held):
            for rank, shard in shards:
                if shard.digest is not None:
                    place = number, named.line(axis, rank), shard.part, shard.shape
                    contents.setdefault(place, set()).add(shard.digest)
                    count += 1
        if any(len(digests) > 1 for digests in contents.values()):
            differ.add(axis)
        elif count > len(contents):
            equal.add(axis)
    return differ, equal
