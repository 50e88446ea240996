"""What all ranks ask for together: do several ask for the same, and none for the rest of a whole?

A wrong rename, or the rows of another rank, find every key and the right shapes. Only all ranks
together show the mistake: boxes that no rank asks for, while all that some rank asks for is asked
for by another one, too. The coordinator looks for them in the same tables as those of a save.
Listed rows are boxes; and the keys that a rename numbered, as ``experts.{}``, are a tensor of one
dim with an element for each.

Two ep ranks that both forgot their rename ask for ``experts.0.w`` and ``experts.1.w`` of four::

    asked      {(0, 1): [0, 1]}    numbers, and the ranks that ask for them
    repeated   (0, 1)
    missing    (2, 3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from torch.distributed.checkpoint import TensorStorageMetadata

from dcp_placements._torch import global_rank
from dcp_placements.errors import Fault
from dcp_placements.layout.boxes import Boxes, as_array, format_box, tile, uncovered
from dcp_placements.layout.sharding import Box, declared_sizes, format_cuts, sizes_differ
from dcp_placements.load.missing import ON_PURPOSE, Asked, Policy
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.names.recorded_numbers import Family, Numberings, numbers_of
from dcp_placements.names.renames import FUNCTION, Step
from dcp_placements.short_text import (
    folded_names,
    format_count,
    format_names,
    format_numbers,
    format_ranks,
    numbers_in,
)
from dcp_placements.storage.provenance import SaveRecord
from dcp_placements.table.families import held_numbers
from dcp_placements.table.statement import Stated, Statement
from dcp_placements.table.table import PLAIN, Group, Sent
from dcp_placements.table.world import Piece, World, repeated

_SHOWN_ITEMS = 4
"""Selections, boxes and keys that a message lists."""

_MAX_HOLES = 1 << 10
"""Boxes that no rank asks for that are looked for, per key."""

Selections = Mapping[frozenset[int], Sequence[int]]
"""What ranks select of one whole, as numbers of a family or positions in a cover; for each such
selection, the positions of the ranks that ask for it."""


@dataclass
class AllAsked:
    """What all ranks ask for.

    Attributes:
        ranks: The numbers of the ranks; none where this rank loads alone.
        sent: By rank, the tables and boxes of what it asks for.
        different: The different statements of these ranks.
        record: The checkpoint's; None where it has none.
        stored: The checkpoint's metadata by key.
        policy: What is accepted.
        complete: Whether all ranks take part. Of some ranks only local numbers are refused.
    """

    ranks: Sequence[int]
    sent: Sequence[Sent]
    different: Sequence[Stated]
    record: SaveRecord | None
    stored: Mapping[str, Any]
    policy: Policy
    complete: bool

    @cached_property
    def world(self) -> World:
        """The tables of all ranks, which most loads without a declaration do not need."""
        return World(self.sent)

    @cached_property
    def _statements(self) -> list[Statement]:
        """By position, what the rank states."""
        of_ranks = {rank: statement for statement, ranks in self.different for rank in ranks}
        return [of_ranks[rank] for rank in self.ranks]

    @cached_property
    def states(self) -> OptimizerStates:
        """Which keys of the checkpoint are optimizer state."""
        return OptimizerStates(self.stored)

    @cached_property
    def tensors(self) -> list[str]:
        """The keys of the checkpoint's tensors."""
        return _tensors(self.stored)

    def faults(self) -> list[Fault]:
        """Return what several ranks ask for, of wholes of which no rank asks for the rest."""
        saved = () if self.record is None else self.record.renames
        statements = [statement for statement, _ in self.different]
        if not saved and not any(statement.declares for statement in statements):
            return []
        numberings = {} if self.record is None else dict(self.record.numberings)
        for statement in statements if self.complete else ():
            for family, numbering in statement.numberings.items():
                numberings.setdefault(family, numbering)
        faults = self._number_faults(numberings) if numberings else []
        functions = [step for step in saved if step.kind == FUNCTION]
        loaded = chain.from_iterable([statement.renames for statement in statements])
        if self.complete and functions and all(step.kind != FUNCTION for step in loaded):
            faults += self._function_faults(functions[0])
        if self.complete:
            for piece in self.world.pieces:
                faults += self._box_faults(piece)
        return faults

    def unasked(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Return the tensors of the checkpoint that no rank asks for.

        A level that has an entry for each rank, as ``{"rng": {str(rank): ...}}``, is left out: its
        other entries are those of the ranks of a larger world.

        Args:
            state_dict: This rank's.
        """
        keys_of = [
            (
                [self.ranks[position] for position in cohort.ranks],
                {fqn for table in cohort.tables for fqn in chain(*self.world.tables[table].keys)},
            )
            for cohort in self.world.cohorts
        ] or [([*self.ranks] or [global_rank()], set(state_dict))]
        asked = set(state_dict)
        # By level, whether each rank asks for the entry with its own number alone.
        per_rank: dict[str, bool] = {}
        for ranks, fqns in keys_of:
            asked |= fqns
            for level, entry in map(_level, fqns):
                is_own = [entry] == [str(rank) for rank in ranks]
                per_rank[level] = per_rank.get(level, True) and is_own
        return [
            fqn
            for fqn in self.tensors
            if fqn not in asked
            and not (per_rank.get(_level(fqn)[0]) and _level(fqn)[1].isdecimal())
        ]

    def _renames_on(self, selections: Selections) -> str:
        """Return the renames that are in force on the ranks with some selections, as text."""
        positions = chain.from_iterable(selections.values())
        steps = [step for position in positions for step in self._statements[position].renames]
        return "rename=" + ", ".join(dict.fromkeys(map(str, steps))) if steps else ""

    def _fault(
        self,
        name: str,
        selections: Selections,
        twice: Sequence[frozenset[int]],
        text: Callable[[frozenset[int]], str],
        details: Sequence[str],
        *,
        whole: str,
        missing: str,
    ) -> Fault:
        """Return the fault of a key, or of a family of keys.

        Args:
            name: The key or family.
            selections: What the ranks ask for.
            twice: The selections that another rank asks for, too.
            text: Returns a selection as text.
            details: How it was saved and is loaded, and the likely cause.
            whole: The whole as text.
            missing: What of the whole no rank asks for, as text.
        """
        by_text: dict[str, list[int]] = {}
        for selection, positions in sorted(selections.items(), key=lambda item: min(item[1])):
            ranks = [self.ranks[position] for position in positions]
            by_text.setdefault(text(selection), []).extend(ranks)
        asked = [f"{what} by {format_ranks(ranks)}" for what, ranks in by_text.items()]
        more = f" and {len(asked) - _SHOWN_ITEMS} other parts" if len(asked) > _SHOWN_ITEMS else ""
        first = text(min(twice, key=lambda selection: min(selections[selection])))
        asks, none = ("several ranks ask", "none") if self.complete else ("this load asks", "not")
        return Fault(
            name,
            f"{asks} for {first} of {whole}, and {none} for {missing}",
            (
                f"asked for:   {'; '.join(asked[:_SHOWN_ITEMS])}{more}",
                *details,
                "way out:     rename=, rows and meshes as in the save, on each rank its own; "
                + ON_PURPOSE,
            ),
        )

    def _number_faults(self, numberings: Numberings) -> list[Fault]:
        """Return the families of which ranks ask for the same numbers, and none for others.

        Ranks that load alone are refused where they ask for the first numbers, without a rename
        that gives them.
        """
        stored = numbers_of(self.tensors, numberings)
        excused = numbers_of(filter(self.policy.excuses, self.tensors), numberings)
        families = [family for family in numberings if stored[family] and not excused[family]]
        faults: list[Fault] = []
        for family, selections in held_numbers(self.world, families).items():
            missing = stored[family].difference(*selections)
            if not missing:
                faults += self._unnumbered(family, stored[family], selections)
                continue
            twice = repeated(selections)
            if not self.complete:
                selections = {
                    numbers: positions
                    for numbers, positions in selections.items()
                    if numbers == set(range(len(numbers)))
                    and not any(self._numbers(position, family) for position in positions)
                }
                twice = list(selections)
            if not twice:
                continue
            renames = self._renames_on(selections)
            likely = (
                "rename= was forgotten in this load, so that every rank asks by its local numbers"
            )
            if renames and self.complete:
                likely = "rename= of this load gives some ranks the numbers of another rank"
            saved = None if self.record is None else self.record.numberings.get(family)
            details = [] if saved is None else [f"saved with:  rename={saved.step}"]
            details += [f"this load:   {renames or 'no rename='}", f"likely:      {likely}"]
            rest = format_numbers(sorted(missing))
            faults.append(
                self._fault(
                    *(str(family), selections, twice, format_numbers, details),
                    whole="it",
                    missing=rest,
                )
            )
        return faults

    def _function_faults(self, function: Step) -> Iterator[Fault]:
        """Yield the levels that a function named at the save, and that ranks ask for in part.

        Which numbers the function gave is not recorded. Ranks that ask for the same keys, while no
        rank asks for others of that level, probably ask by their local names.

        Args:
            function: The step of the save.
        """
        asked: set[str] = set()
        several: dict[str, list[str]] = {}
        for piece in self.world.pieces:
            asked.update(piece.fqns)
            if len(piece.ranks) > 1 and piece.cover.has_replicas:
                for fqn in piece.fqns:
                    several.setdefault(_level(fqn)[0], []).append(fqn)
        unasked: dict[str, list[str]] = {}
        for fqn in self.tensors:
            is_state = self.states.of(fqn) is not None
            if fqn not in asked and not is_state and not self.policy.excuses(fqn):
                unasked.setdefault(_level(fqn)[0], []).append(fqn)
        renames = self._renames_on({frozenset(): range(len(self.ranks))})
        for level in several.keys() & unasked.keys():
            first, rest = (format_names(folded_names(of[level]), 2) for of in (several, unasked))
            yield Fault(
                level,
                f"several ranks ask for {first}, and none for {rest}",
                (
                    f"saved with:  rename={function}",
                    f"this load:   {renames or 'no rename='}",
                    "likely:      that function was forgotten in this load, so that every rank "
                    "asks by its local names",
                    f"way out:     the rename= of the save, on each rank its own; {ON_PURPOSE}",
                ),
            )

    def _numbers(self, position: int, family: Family) -> bool:
        """Whether the rename of a rank gives the numbers of a family; a function may."""
        statement = self._statements[position]
        has_function = any(step.kind == FUNCTION for step in statement.renames)
        return has_function or family in statement.numberings

    def _unnumbered(
        self, family: Family, stored: Set[int], selections: Selections
    ) -> Iterator[Fault]:
        """Yield the fault of ranks without the rename by which others ask for their numbers.

        Where all ranks together ask for all numbers, the others are replicas of the right rank.
        """
        numbered = {
            position
            for positions in selections.values()
            for position in positions
            if self._numbers(position, family)
        }
        others = [
            numbers
            for numbers, positions in selections.items()
            if not numbered.isdisjoint(positions)
        ]
        for numbers, positions in selections.items():
            without = [self.ranks[position] for position in positions if position not in numbered]
            is_local = numbers == set(range(len(numbers))) and numbers != stored
            if without and is_local and any(numbers <= other for other in others):
                details = (
                    f"other ranks: {self._renames_on(selections)}",
                    "likely:      rename= was forgotten on these ranks, which ask by local numbers",
                    f"way out:     rename= on each rank its own; {ON_PURPOSE}",
                )
                headline = f"no rename= of {format_ranks(without)} numbers it, as others do"
                yield Fault(str(family), headline, details)

    def _padding_faults(self, piece: Piece, group: Group) -> list[Fault]:
        """Return the keys of a piece of which all ranks have padding alone."""
        headline = (
            f"every rank has padding alone of it, so that none asks for any part of {group.shape}"
        )
        padded = f"this load:   {format_cuts(group.cuts)}; padded to {group.padded_shape}"
        out = f"way out:     the mesh of the save, or this rank's position in it; {ON_PURPOSE}"
        fqns = [fqn for fqn in piece.fqns if not self.policy.excuses(fqn)]
        return [Fault(fqn, headline, (padded, out)) for fqn in fqns]

    def _size_faults(self, piece: Piece) -> list[Fault]:
        """Return the keys of a piece of whose shards ranks declare different sizes."""
        if not sizes_differ(source.group.cuts for source in piece.sources):
            return []
        ranks_of: dict[str, list[int]] = {}
        for source in piece.sources:
            if (text := declared_sizes(source.group.cuts)) is not None:
                ranks_of.setdefault(text, []).extend(self.world.members[source.table].tolist())
        shown = [
            f"{text} on {format_ranks([self.ranks[position] for position in positions])}"
            for text, positions in ranks_of.items()
        ]
        headline = f"the ranks do not agree on the sizes of its shards: {'; '.join(shown[:4])}"
        way_out = "way out:     the same sizes= on all ranks, one per rank of the axis"
        fqns = [fqn for fqn in piece.fqns if not self.policy.excuses(fqn)]
        return [Fault(fqn, headline, (way_out,)) for fqn in fqns]

    def _box_faults(self, piece: Piece) -> list[Fault]:
        """Return the keys of a piece of which ranks ask for the same boxes, and none for others.

        Unlike a save, which ``table.prove`` proves, a load may leave boxes out, read rows twice and
        read into other dtypes on other ranks: a hole is a fault only where ranks ask for the same.
        """
        groups = [source.group for source in piece.sources]
        group = next((group for group in groups if group.kind != PLAIN), None)
        # Of shapes that differ there is another fault.
        if group is None or len({group.shape for group in groups}) > 1:
            return []
        if len({group.cuts for group in groups}) > 1 and (faults := self._size_faults(piece)):
            return faults
        if not len(piece.ranks) and group.padded_shape is not None:
            return self._padding_faults(piece, group)
        cover = piece.cover
        if not cover.has_replicas:
            return []
        whole = Box.whole(group.shape)
        if tile(whole, cover.boxes):
            return []
        selections = cover.ranks_by_boxes()
        twice = repeated(selections)
        if not twice or not uncovered(whole, cover.boxes, 1):
            return []
        return self._repeated_boxes(piece, group, selections, twice)

    def _repeated_boxes(
        self,
        piece: Piece,
        group: Group,
        selections: Selections,
        twice: Sequence[frozenset[int]],
    ) -> list[Fault]:
        """Return the faults of a piece of which several ranks ask for the same boxes.

        Args:
            piece: The piece, of which no rank asks for some boxes.
            group: How ranks declare it.
            selections: What the ranks ask for, as positions in its cover.
            twice: The selections that another rank asks for, too.
        """
        cover, whole = piece.cover, Box.whole(group.shape)

        def text_without(boxes: Boxes) -> str:
            """Return the boxes of the whole that no given box covers, as text."""
            rest = uncovered(whole, boxes, _MAX_HOLES)
            shown = ", ".join(format_box(box, whole.sizes) for box in rest[:_SHOWN_ITEMS])
            return shown + (" and others" if len(rest) > _SHOWN_ITEMS else "")

        def text_of(selection: frozenset[int]) -> str:
            """Return a selection as text; neighbours become one box.

            Of ``[0:1]`` and ``[1:2]`` of four rows the rest is ``[2:4]``, whose rest is ``[0:2]``.
            """
            rest = uncovered(whole, cover.boxes[sorted(selection)], _MAX_HOLES)
            return text_without(as_array(rest, len(whole.sizes)))

        loaded = "; ".join(filter(None, [format_cuts(group.cuts), self._renames_on(selections)]))
        likely = (
            "IndexShard, rename= or the mesh of a rule gives some ranks the rows or the position "
            "of another rank, as along a wrong axis (edp in place of ep)"
        )
        missing = text_without(cover.boxes)
        faults = []
        for fqn in piece.fqns:
            if self.policy.excuses(fqn):
                continue
            saved = self.record.cuts(fqn) if self.record is not None else ()
            details = [f"saved:       {format_cuts(saved)}"] if saved else []
            details += [f"this load:   {loaded}", f"likely:      {likely}"]
            faults.append(
                self._fault(
                    *(fqn, selections, twice, text_of, details),
                    whole=str(group.shape),
                    missing=missing,
                )
            )
        return faults


def _level(fqn: str) -> tuple[str, str]:
    """Return the level of a nested state dict that a key stands under, and its entry there.

    >>> _level("rng.3.offset")
    ('rng', '3')
    """
    level, _, rest = fqn.partition(".")
    return level, rest.partition(".")[0]


def _tensors(stored: Mapping[str, Any]) -> list[str]:
    """Return the keys of a checkpoint's tensors."""
    return [fqn for fqn, entry in stored.items() if isinstance(entry, TensorStorageMetadata)]


def unasked_notes(fqns: Sequence[str], asked: Asked) -> list[Fault]:
    """Return a note for each level of which no rank asks for some keys, probably by mistake.

    It is a mistake where a load asks for none of a level that it names, as ``"optim": {}``; or for
    the first numbers of a family alone, as a model with fewer layers does. A load of weights alone
    does not name the optimizer, and somebody who chooses keys by their names chooses others.

    Args:
        fqns: The tensors that no rank asks for.
        asked: What this rank asks for.
    """
    policy, stored, rest, levels = asked.policy, asked.stored, set(fqns), asked.nested
    # Of objects no rank knows what others ask for; an empty dict asks for none on any.
    empty = {level for level, value in levels.items() if isinstance(value, dict) and not value}
    objects = [fqn for fqn in asked.unread if _level(fqn)[0] in empty and fqn not in rest]
    used = {_level(fqn)[0] for fqn in _tensors(stored) if fqn not in rest}
    by_level: dict[str, list[str]] = {}
    for fqn in (*fqns, *objects) if not policy.partial else ():
        level, _ = _level(fqn)
        firsts = [f"{head}0{tail}" for head, number, tail in numbers_in(fqn) if number]
        is_cut_off = any(first in stored and first not in rest for first in firsts)
        is_empty = level in levels and level not in used
        if (is_cut_off or is_empty) and not policy.excuses(fqn):
            by_level.setdefault(level, []).append(fqn)
    return [
        Fault(
            level,
            f"the checkpoint has {format_count(len(of_level), 'key')} of it that no rank asks "
            f"for: {format_names(folded_names(of_level), _SHOWN_ITEMS)}",
            (
                "likely:      an empty dict under this key, as of an optimizer before its first "
                "step; a model with fewer layers than were saved; or rename= was forgotten",
                "way out:     ask for them; waive={pattern: reason} where they are left out on "
                "purpose",
            ),
        )
        for level, of_level in by_level.items()
    ]
