"""Is a load declared as its checkpoint was saved, and do all ranks together ask for all of it?

A wrong rename, a forgotten placement or the rows of another rank find every key and the right
shapes. What one rank sees of that it compares with the record of the save. What only all ranks
together show the coordinator finds, in the same tables as those of a save: boxes that no rank asks
for, while all that some rank asks for is asked for by another one, too. Listed rows are boxes; and
keys that differ in a number, as ``experts.{}``, are a tensor of one dim with an element for each.

Two ep ranks that both forgot their rename ask for ``experts.0.w`` and ``experts.1.w`` of four::

    asked      {(0, 1): [0, 1]}    numbers, and the ranks that ask for them
    repeated   (0, 1)
    missing    (2, 3)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, product
from typing import NamedTuple

from dcp_placements._torch import Metadata, TensorStorageMetadata, world_size
from dcp_placements.bind.lint import lint
from dcp_placements.errors import Fault, format_ranks
from dcp_placements.layout.boxes import as_boxes, format_box, uncovered
from dcp_placements.layout.sharding import Box, Kind
from dcp_placements.load.cuts import compare_cuts
from dcp_placements.load.policy import Policy
from dcp_placements.load.request import Request
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.names.renames import NUMBER, number_finder, numbering, recorded
from dcp_placements.names.target import Rename
from dcp_placements.storage.index.stored_entries import entries_at
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.record import SavedRename, SaveRecord, record_of
from dcp_placements.table.cover import cover_of, repeated
from dcp_placements.table.table import PLAIN, Group, Holding, holding_of, packed_boxes
from dcp_placements.table.world import Piece, World

_DIGITS = re.compile(r"\d+")

_MAX_PARTS = 4
"""Parts that a message lists."""

_NUMBERING = ("Renumber", "Unstack", "function")
"""Renames that leave a number in the checkpoint's keys."""


class Asked(NamedTuple):
    """What a rank asks for, as it is sent to the coordinator.

    Attributes:
        tables: Its tables, packed.
        boxes: The boxes of each group of each table in turn, packed.
        renames: The renames in force on the rank.
    """

    tables: tuple[bytes, ...] = ()
    boxes: bytes = b""
    renames: tuple[SavedRename, ...] = ()

    @staticmethod
    def of(holding: Holding, renames: tuple[SavedRename, ...]) -> Asked:
        """Return what is sent of what a rank asks for."""
        tables = tuple([table.packed() for table in holding.tables])
        return Asked(tables, packed_boxes(holding.boxes), renames)


@dataclass(slots=True)
class LoadChecks:
    """What one rank finds.

    Attributes:
        record: The checkpoint's; None where it has none.
        faults: Declarations that differ from those of the save.
        notes: Declarations that are probably wrong.
        asked: What the rank asks for.
        compared: The result of the comparison, as text.
    """

    record: SaveRecord | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)
    asked: Asked = field(default_factory=Asked)
    compared: str = "no record"


def check_load(request: Request, metadata: Metadata, rename: Rename | None) -> LoadChecks:
    """Compare the load of one rank with the save.

    Args:
        request: What the rank reads.
        metadata: The checkpoint's.
        rename: The user's renaming.
    """
    state_dict, policy = request.state_dict, request.policy
    checks = LoadChecks(record_of(stored(metadata), metadata.state_dict_metadata))
    placed = request.placing.placed
    checks.notes = [*lint(placed.values(), renamed=rename is not None, waived=policy.waived)]
    if checks.record is not None:
        found = compare_cuts(checks.record, request.groups, policy)
        checks.faults, checks.compared = found
        checks.faults += rename_faults(checks.record, state_dict, rename, policy)
    if world_size() > 1:
        tensors = {
            fqn
            for group in request.groups
            if isinstance(group.entry, TensorStorageMetadata)
            for fqn in group.fqns
        }
        tensors -= policy.excused(tensors) | request.collapsed.keys()
        holding = holding_of(state_dict, placed, {}, state_dict.keys() - tensors)
        checks.asked = Asked.of(holding, renames_of(rename))
    return checks


def rename_faults(
    record: SaveRecord, fqns: Iterable[str], rename: Rename | None, policy: Policy
) -> list[Fault]:
    """Return the totals of a rename that differ from those of the save.

    Args:
        record: The checkpoint's.
        fqns: The checkpoint's keys that the rank asks for.
        rename: The rank's renaming.
        policy: What is accepted.
    """
    saved = {step.pattern: step for step in record.renames if step.kind == "Renumber"}
    faults = []
    for pattern, total, _ in numbering(rename):
        step = saved.get(pattern) or _same_number(pattern, saved, fqns)
        if step is None or step.total in (None, total) or policy.waives(pattern):
            continue
        finder = number_finder(pattern)
        if any(policy.excuses(fqn) for fqn in fqns if finder.search(f".{fqn}")):
            continue
        faults.append(
            Fault(
                pattern,
                f"this load has total={total} of it, but it was saved as one of {step.total}",
                (
                    f"saved with:  rename={step}",
                    f"this load:   rename=Renumber({pattern!r}, total={total})",
                    "likely:      the rename= of another model, whose numbers mean other tensors",
                    "way out:     the total= of the save; optional=[pattern] or "
                    "waive={pattern: reason} where this model has another number on purpose",
                ),
            )
        )
    return faults


def _same_number(
    pattern: str, saved: Mapping[str, SavedRename], fqns: Iterable[str]
) -> SavedRename | None:
    """Return the rename of the save that finds the same number of a key by another pattern."""
    finder = number_finder(pattern)
    for fqn in fqns if saved else ():
        if match := finder.search(f".{fqn}"):
            for other, step in saved.items():
                found = number_finder(other).search(f".{fqn}")
                if found is not None and found.span(NUMBER) == match.span(NUMBER):
                    return step
    return None


def renames_of(rename: Rename | None) -> tuple[SavedRename, ...]:
    """Return the renames that are in force on a rank."""
    return tuple([SavedRename(*step) for step in recorded(rename)])


class Families:
    """The families of numbers that renames give.

    A family is a key up to the component with the number, which ``{}`` stands for.

    Args:
        renames: The renames that were in force.
        stored: The checkpoint's keys, by which optimizer state is recognized.
    """

    def __init__(self, renames: Iterable[SavedRename], stored: Iterable[str]) -> None:
        self._states = OptimizerStates(dict.fromkeys(stored, UNSEEN))
        self._finders: list[tuple[re.Pattern[str], SavedRename]] = [
            (number_finder(step.pattern), step)
            for step in dict.fromkeys(renames)
            if step.kind in _NUMBERING and step.pattern.count("{}") == 1
        ]

    def numbers(self, fqns: Iterable[str]) -> dict[str, set[int]]:
        """Return the numbers that keys have of each family.

        Optimizer state has none: that of a parameter may be missing.
        """
        found: dict[str, set[int]] = {}
        for fqn in fqns if self._finders else ():
            for family, number, _ in self._of(fqn):
                found.setdefault(family, set()).add(number)
        return found

    def _of(self, fqn: str) -> Iterator[tuple[str, int, SavedRename]]:
        for finder, step in self._finders:
            match = finder.search("." + fqn)
            if match is None:
                continue
            if self._states.of(fqn) is not None:
                return
            start, stop = match.span(NUMBER)
            tail = fqn[stop - 1 :].partition(".")[0]
            yield f"{fqn[: start - 1]}{{}}{tail}", int(match[NUMBER]), step

    def step_of(self, family: str) -> SavedRename | None:
        """Return the rename that gave a family its numbers."""
        steps = (step for name, _, step in self._of(family.replace("{}", "0")) if name == family)
        return next(steps, None)


class _Load(NamedTuple):
    """What all ranks ask for.

    Attributes:
        world: Their tables and boxes.
        ranks: Their ranks, in the order of the world.
        renames: By position in the world, the renames in force there.
        record: The checkpoint's; None where it has none.
        stored: The checkpoint's keys that are tensors.
        policy: What is accepted.
    """

    world: World
    ranks: Sequence[int]
    renames: Sequence[Sequence[SavedRename]]
    record: SaveRecord | None
    stored: Sequence[str]
    policy: Policy

    def renames_on(self, positions: Iterable[int]) -> str:
        """Return the renames that are in force on some ranks, as text."""
        here = dict.fromkeys(str(one) for at in positions for one in self.renames[at])
        return ", ".join(here)


def asked_faults(
    asked: Mapping[int, Asked],
    record: SaveRecord | None,
    metadata: Metadata,
    policy: Policy,
    *,
    complete: bool,
) -> list[Fault]:
    """Return the parts of wholes that several ranks ask for while no rank asks for others.

    Args:
        asked: By rank.
        record: The checkpoint's; None where it has none.
        metadata: The checkpoint's.
        policy: What is accepted.
        complete: Whether all ranks take part. Of some ranks only local numbers are refused.
    """
    sent = [one for one in asked.values() if one.tables]
    ranks = [rank for rank, one in asked.items() if one.tables]
    renames = [one.renames for one in sent]
    fqns = _tensors(metadata)
    load = _Load(World(sent), ranks, renames, record, fqns, policy)
    saved = () if record is None else record.renames
    if not complete:
        return _local_number_faults(load, Families(saved, metadata.state_dict_metadata))
    here = [step for steps in renames for step in steps]
    families = Families([*saved, *here], metadata.state_dict_metadata)
    faults = _number_faults(load, families)
    # A rank that sent nothing may ask for what the others leave out.
    if len(sent) >= world_size():
        states = OptimizerStates(dict.fromkeys(metadata.state_dict_metadata, UNSEEN))
        for piece in load.world.pieces:
            faults += _box_faults(load, piece, states)
    return faults


def _tensors(metadata: Metadata) -> list[str]:
    entries = entries_at(metadata.state_dict_metadata, metadata.state_dict_metadata)
    is_tensor = [isinstance(entry, TensorStorageMetadata) for entry in entries]
    return list(compress(metadata.state_dict_metadata, is_tensor))


def _asked_numbers(
    load: _Load, families: Families
) -> Iterator[tuple[str, list[int], dict[frozenset[int], list[int]]]]:
    """Yield each family that is asked for: its numbers in the checkpoint, and the ranks by those
    that they ask for.
    """
    by_table = [families.numbers(table.fqns) for table in load.world.tables]
    parts: dict[str, dict[frozenset[int], list[int]]] = {}
    for cohort in load.world.cohorts:
        mine: dict[str, set[int]] = {}
        for table in cohort.tables:
            for family, numbers in by_table[table].items():
                mine.setdefault(family, set()).update(numbers)
        for family, numbers in mine.items():
            of_family = parts.setdefault(family, {})
            of_family.setdefault(frozenset(numbers), []).extend(cohort.ranks.tolist())
    if parts:
        stored = families.numbers(load.stored)
        for family, asked in parts.items():
            yield family, sorted(stored[family]), asked


def _number_faults(load: _Load, families: Families) -> list[Fault]:
    faults = []
    for family, whole, parts in _asked_numbers(load, families):
        missing = set(whole).difference(*parts)
        twice = repeated(parts) if missing else []
        if not twice or _is_excused(load, family):
            continue
        here = load.renames_on(rank for ranks in parts.values() for rank in ranks)
        likely = "rename= of this load gives some ranks the numbers of another rank"
        if not here:
            likely = (
                "rename= was forgotten in this load, so that every rank asks by its local numbers"
            )
        step = families.step_of(family)
        is_recorded = load.record is not None and step in load.record.renames
        faults.append(
            _gap_fault(
                load,
                family,
                {part: format_numbers(part) for part in parts},
                parts,
                twice,
                format_numbers(missing),
                of="it",
                saved=(f"saved with:  rename={step}",) if is_recorded else (),
                loaded=f"rename={here}" if here else "no rename=",
                likely=likely,
                way_out=f"{'the rename= of the save' if is_recorded else 'rename='} in "
                "PlacementLoadPlanner, on each rank with its own numbers",
            )
        )
    return faults


def _is_excused(load: _Load, family: str) -> bool:
    """Whether a key of a family may be missing, or is waived."""
    head, _, tail = family.partition("{}")
    member = re.compile(rf"{re.escape(head)}\d+{re.escape(tail)}(\.|$)")
    return any(load.policy.excuses(fqn) for fqn in load.stored if member.match(fqn))


def _local_number_faults(load: _Load, families: Families) -> list[Fault]:
    """Return the families of which ranks that load alone ask for the first numbers only."""
    faults = []
    for family, whole, parts in _asked_numbers(load, families):
        for numbers, ranks in parts.items():
            local = [at for at in ranks if not any(s.kind in _NUMBERING for s in load.renames[at])]
            rest = set(whole) - numbers
            if not local or not rest or numbers != set(range(len(numbers))):
                continue
            if _is_excused(load, family):
                continue
            faults.append(
                Fault(
                    family,
                    f"asked for {format_numbers(numbers)} of it, and not for "
                    f"{format_numbers(rest)}, by a load without the other ranks",
                    (
                        f"saved with:  rename={families.step_of(family)}",
                        "this load:   no rename= that gives numbers",
                        "likely:      rename= was forgotten in this load, so that every rank asks "
                        "by its local numbers",
                        "way out:     the rename= of the save in PlacementLoadPlanner; "
                        "waive={pattern: reason} where these are the numbers of the checkpoint",
                    ),
                    ranks=tuple([load.ranks[at] for at in local]),
                )
            )
    return faults


def _box_faults(load: _Load, piece: Piece, states: OptimizerStates) -> list[Fault]:
    """Return the keys of a piece of which several ranks ask for the same boxes, none for others."""
    group = next((one.group for one in piece.sources if one.group.kind != PLAIN), None)
    shapes = {source.group.shape for source in piece.sources}
    if group is None or len(shapes) > 1 or 0 in group.shape:  # of shapes there is another fault
        return []
    cover, shape = cover_of(piece.ranks, piece.boxes), group.shape
    if not cover.has_replicas or cover.is_whole(shape):
        return []
    parts = cover.parts()
    twice = repeated(parts)
    missing = uncovered(Box.whole(shape), cover.boxes, 1 << 10) if twice else []
    dims = _listed_dims(group)
    # Rows of optimizer state may be left out, since that of a row's parameter may be missing.
    fqns = [fqn for fqn in piece.fqns if not dims or states.of(fqn) is None]
    if not missing or not fqns:
        return []
    boxes = as_boxes(cover.boxes)
    held = {part: [boxes[at] for at in sorted(part)] for part in parts}
    gone = _rows(missing, dims)
    if dims and not gone & _rows(held[twice[0]], dims):
        return _row_faults(load, piece, fqns, group, held, parts, twice, gone)
    here = load.renames_on(rank for ranks in parts.values() for rank in ranks)
    source = f"rename={here}, or the mesh of a rule," if here else "the mesh of a rule"
    loaded = ", then ".join(map(str, group.cuts)) + (f"; rename={here}" if here else "")
    found = []
    for fqn in fqns:
        cuts = load.record.cuts(fqn) if load.record is not None else ()
        found.append(
            _gap_fault(
                load,
                fqn,
                {part: _format(of, shape) for part, of in held.items()},
                parts,
                twice,
                _format(missing, shape),
                of=str(shape),
                saved=(f"saved:       {', then '.join(map(str, cuts))}",) if cuts else (),
                loaded=loaded,
                likely=f"{source} has the position of a rank along a wrong axis, for example "
                "along one that shards these tensors already (edp in place of ep)",
                way_out="the position along the axis whose ranks hold different numbers, as in "
                "the save: at= of contiguous(), the mesh of the rule",
            )
        )
    return found


def _row_faults(
    load: _Load,
    piece: Piece,
    fqns: Sequence[str],
    group: Group,
    held: Mapping[frozenset[int], Sequence[Box]],
    parts: Mapping[frozenset[int], Sequence[int]],
    twice: Sequence[frozenset[int]],
    missing: set[tuple[int, ...]],
) -> list[Fault]:
    """Return the same where ranks list their rows: a fault that counts rows."""
    dims = _listed_dims(group)
    of = f"dim {dims[0]}" if len(dims) == 1 else f"dims {' and '.join(map(str, dims))}"
    texts = {part: _format_rows(_rows(boxes, dims)) for part, boxes in held.items()}
    here = load.renames_on(rank for ranks in parts.values() for rank in ranks)
    source = piece.sources[0]
    table = load.world.tables[source.table]
    rule = table.rule(table.starts[source.number] + source.positions[0])
    listed_by_rule = any(cut.kind is Kind.LISTED and cut.axis is not None for cut in group.cuts)
    if listed_by_rule:
        loaded = f"IndexShard of {of} by rule {rule}"
        likely = "IndexShard in the rules of this load gives some ranks the rows of another rank"
        way_out = "IndexShard with each rank's own rows in the rules of this load"
    else:
        loaded = f"rename={here}"
        likely = "rename= of this load gives some ranks the numbers of another rank"
        way_out = "rename= in PlacementLoadPlanner with each rank's own numbers"
        if "Renumber(" not in here:
            likely = (
                "rename= of this load stacks by local numbers: Renumber before the Stack was "
                "forgotten"
            )
            way_out += ": a Renumber before the Stack"
    found = []
    for fqn in fqns:
        saved: tuple[str, ...] = ()
        if load.record is not None and not listed_by_rule and load.record.renames:
            saved = (f"saved with:  rename={', '.join(map(str, load.record.renames))}",)
        elif load.record is not None and load.record.cuts(fqn):
            saved = (f"saved:       {', then '.join(map(str, load.record.cuts(fqn)))}",)
        found.append(
            _gap_fault(
                load,
                fqn,
                texts,
                parts,
                twice,
                _format_rows(missing),
                of=of,
                noun="rows ",
                saved=saved,
                loaded=loaded,
                likely=likely,
                way_out=way_out,
            )
        )
    return found


def _gap_fault(
    load: _Load,
    name: str,
    texts: Mapping[frozenset[int], str],
    parts: Mapping[frozenset[int], Sequence[int]],
    twice: Sequence[frozenset[int]],
    missing: str,
    *,
    of: str,
    noun: str = "",
    saved: Sequence[str],
    loaded: str,
    likely: str,
    way_out: str,
) -> Fault:
    """Return the fault of a key, or of a family of keys.

    Args:
        load: What all ranks ask for.
        name: The key or family.
        texts: Each part as text.
        parts: The ranks that ask for each part.
        twice: The parts that another rank asks for, too.
        missing: What no rank asks for, as text.
        of: What it is a part of.
        noun: What is counted, with a blank.
        saved: How it was saved, as lines.
        loaded: How this load declares it.
        likely: The likely cause.
        way_out: What to declare instead.
    """
    by_text: dict[str, list[int]] = {}
    for part, positions in sorted(parts.items(), key=lambda part: min(part[1])):
        by_text.setdefault(texts[part], []).extend(load.ranks[at] for at in positions)
    asked = [f"{text} by {format_ranks(ranks)}" for text, ranks in by_text.items()]
    more = f" and {len(asked) - _MAX_PARTS} other parts" if len(asked) > _MAX_PARTS else ""
    first = min(twice, key=lambda part: min(parts[part]))
    return Fault(
        name,
        f"several ranks ask for {noun}{texts[first]} of {of}, and none for {noun}{missing}",
        (
            *saved,
            f"this load:   {loaded}",
            f"asked for:   {'; '.join(asked[:_MAX_PARTS])}{more}",
            f"likely:      {likely}",
            f"way out:     {way_out}; optional=[pattern] or waive={{pattern: reason}} where the "
            "rest is left out on purpose",
        ),
    )


def _listed_dims(group: Group) -> tuple[int, ...]:
    return tuple(sorted({cut.dim for cut in group.cuts if cut.kind is Kind.LISTED}))


def _rows(boxes: Iterable[Box], dims: Sequence[int]) -> set[tuple[int, ...]]:
    """Return which rows boxes have along some dims."""
    found: set[tuple[int, ...]] = set()
    for box in boxes if dims else ():
        spans = [range(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for dim in dims]
        found.update(product(*spans))
    return found


def _format_rows(rows: Iterable[tuple[int, ...]]) -> str:
    """Return rows as short text; those of several dims as tuples.

    >>> _format_rows({(0,), (1,), (3,)}), _format_rows({(0, 1), (1, 1)})
    ('0-1, 3', '(0, 1), (1, 1)')
    """
    ordered = sorted(rows)
    if ordered and len(ordered[0]) == 1:
        return format_numbers([row[0] for row in ordered])
    hidden = len(ordered) - 6
    return ", ".join(map(str, ordered[:6])) + (f" and {hidden} more" if hidden > 0 else "")


def _format(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    text = ", ".join(format_box(box, shape) for box in boxes[:_MAX_PARTS])
    return text + (" and others" if len(boxes) > _MAX_PARTS else "")


def format_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as short text.

    >>> format_numbers([0, 1, 2, 5])
    '0-2, 5'
    """
    return format_ranks(numbers).partition(" ")[2]


def unstacked_faults(
    totals: Mapping[str, int], stored: Iterable[str], policy: Policy
) -> list[Fault]:
    """Return the families of which a load asks for the first numbers only, row by row of a stack.

    Args:
        totals: The number of rows of each tensor that is unstacked, by their key with ``{}``.
        stored: The checkpoint's keys.
        policy: What is accepted.
    """
    if not totals:
        return []
    states = OptimizerStates(dict.fromkeys(stored, UNSEEN))
    beyond: dict[tuple[str, int], set[int]] = {}
    for fqn in stored:
        for match in _DIGITS.finditer(fqn):
            head, tail = fqn[: match.start()], fqn[match.end() :]
            total = totals.get(f"{head}{{}}{tail}")
            if total is None or states.of(fqn) is not None or policy.excuses(fqn):
                continue
            if (number := int(match[0])) >= total:
                family = f"{head}{{}}{tail.partition('.')[0]}"
                beyond.setdefault((family, total), set()).add(number)
    return [
        Fault(
            family,
            f"this load asks for {format_numbers(range(total))} of it, and not for "
            f"{format_numbers(numbers)}, which the checkpoint has, too",
            (
                f"this load:   a stacked tensor of {total} rows, which rename= unstacks",
                "likely:      a model with fewer of them than the one that was saved",
                "way out:     the model of the save; optional=[pattern] or "
                "waive={pattern: reason} where this model has fewer on purpose",
            ),
        )
        for (family, total), numbers in beyond.items()
    ]
