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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from dcp_placements._torch import world_size
from dcp_placements.bind.checks import lint
from dcp_placements.errors import Fault, format_ranks
from dcp_placements.layout.boxes import as_array, format_box, uncovered
from dcp_placements.layout.sharding import Box, Kind
from dcp_placements.load.cuts import differences, differences_by_rule, format_cuts
from dcp_placements.load.missing import Policy
from dcp_placements.load.reads import Request
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.names.renames import Step, number_in, recorded
from dcp_placements.names.target import Rename
from dcp_placements.rules.patterns import Rules
from dcp_placements.storage.index.stored_entries import entries_at
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.record import SaveRecord, record_of
from dcp_placements.table.cover import cover_of, repeated
from dcp_placements.table.families import Families, format_numbers
from dcp_placements.table.table import PLAIN, Sent, holding_of
from dcp_placements.table.world import Piece, World

_DIGITS = re.compile(r"\d+")

_MAX_PARTS = 4
"""Parts that a message lists."""

_MAX_HOLES = 1 << 10
"""Boxes that no rank asks for that are looked for, per key."""

_NUMBERING = ("Renumber", "Unstack", "function")
"""Renames that leave a number in the checkpoint's keys."""

_ON_PURPOSE = "optional=[pattern] or waive={pattern: reason} where the rest is left out on purpose"


class Asked(NamedTuple):
    """What a rank asks for, as it is sent to the coordinator.

    Attributes:
        sent: The tables and boxes of what it asks for.
        renames: The renames in force on the rank.
    """

    sent: Sent = Sent()
    renames: tuple[Step, ...] = ()


@dataclass(slots=True)
class LoadChecks:
    """What one rank finds.

    Attributes:
        record: The checkpoint's; None where it has none.
        faults: Declarations that differ from those of the save.
        notes: Declarations that are probably wrong.
        asked: What the rank asks for; None where nothing that all ranks show can be wrong.
        compared: The result of the comparison, as text.
    """

    record: SaveRecord | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)
    asked: Asked | None = None
    compared: str = "no record"


def check_load(
    request: Request, metadata: Metadata, rules: Rules | None, rename: Rename | None
) -> LoadChecks:
    """Compare the load of one rank with the save.

    Args:
        request: What the rank reads.
        metadata: The checkpoint's.
        rules: The user's.
        rename: The user's renaming.
    """
    state_dict, policy = request.state_dict, request.policy
    checks = LoadChecks(record_of(stored(metadata), metadata.state_dict_metadata))
    placed = request.placing.placed
    renames = () if rename is None else recorded(rename)
    checks.notes = [*lint(placed.values(), renamed=rename is not None, waived=policy.waived)]
    if checks.record is not None:
        checks.faults, checks.compared = compare_cuts(checks.record, request)
        checks.faults += _total_faults(checks.record, state_dict, renames, policy)
        checks.faults += _shaping_faults(checks.record, renames, policy)
    # DTensors alone are complete over their meshes.
    renamed = rename is not None or bool(checks.record and checks.record.renames)
    if world_size() > 1 and (renamed or rules is not None):
        tensors = {
            fqn
            for group in request.groups
            if isinstance(group.entry, TensorStorageMetadata)
            for fqn in group.fqns
        }
        tensors -= policy.excused(tensors) | request.collapsed.keys()
        holding = holding_of(state_dict, placed, {}, state_dict.keys() - tensors)
        checks.asked = Asked(holding.sent, renames)
    return checks


def compare_cuts(record: SaveRecord, request: Request) -> tuple[list[Fault], str]:
    """Return the keys that axes shard in another way than the save had it, and the result as text.

    Args:
        record: The checkpoint's.
        request: What the rank reads.
    """
    faults: list[Fault] = []
    compared = waived = 0
    for group in request.groups:
        if group.placed is None:
            continue
        sharding, rule = group.placed.place.sharding, group.placed.rule
        # Of equal places most keys were cut alike, too.
        members: dict[int, list[str]] = {}
        for fqn in group.fqns:
            members.setdefault(record.group_of[fqn], []).append(fqn)
        for number, fqns in members.items():
            saved, loaded = record.groups[number], sharding.cuts
            if not saved or not loaded:
                continue
            compared += len(fqns)
            found = [*differences(saved, loaded, sharding.global_shape)]
            if rule is not None:
                found += differences_by_rule(saved, group.placed, record)
            refused = [fqn for fqn in fqns if found and not request.policy.waives(fqn)]
            waived += len(fqns) - len(refused) if found else 0
            faults += [one.fault(fqn, rule) for fqn in refused for one in found]
    count = compared - waived
    text = "declared as saved"
    if compared:
        text += f": {count} key{'' if count == 1 else 's'}"
    return faults, text + (f"; {waived} differ, waived" if waived else "")


def _shaping_faults(record: SaveRecord, renames: Iterable[Step], policy: Policy) -> Iterator[Fault]:
    """Yield the steps that stack, unstack or split by the pattern of the save in another way."""
    for step in renames:
        alike = [s for s in record.renames if s.shaping and s[:2] == step[:2]]
        # A negative dim counts from the end, of a number of dims that is not known here.
        known = all((one.shaping[0] < 0) == (step.shaping[0] < 0) for one in alike)
        is_as_saved = step.shaping in [one.shaping for one in alike]
        if alike and known and not is_as_saved and not policy.waives(step.pattern):
            yield _rename_fault(
                f"this load has another {step.kind} of it than the save had", alike[0], step
            )


def _total_faults(
    record: SaveRecord, fqns: Iterable[str], renames: Iterable[Step], policy: Policy
) -> Iterator[Fault]:
    """Yield the steps that have another number of layers or experts than the save had."""
    saved = {step.pattern: step for step in record.renames if step.kind == "Renumber"}
    for one in renames:
        pattern, total = one.pattern, one.total
        if one.kind != "Renumber" or total is None or policy.waives(pattern):
            continue
        step = saved.get(pattern) or _same_number(pattern, saved, fqns)
        if step is None or step.total in (None, total):
            continue
        if not any(policy.excuses(fqn) for fqn in fqns if number_in(pattern, fqn)):
            headline = f"this load has total={total} of it, but it was saved as one of {step.total}"
            yield _rename_fault(headline, step, one)


def _rename_fault(headline: str, saved: Step, loaded: Step) -> Fault:
    return Fault(
        loaded.pattern,
        headline,
        (
            f"saved with:  rename={saved}",
            f"this load:   rename={loaded}",
            "way out:     the rename= of the save; waive={pattern: reason} where this model is "
            "another one on purpose",
        ),
    )


def _same_number(pattern: str, saved: Mapping[str, Step], fqns: Iterable[str]) -> Step | None:
    """Return the rename of the save that finds the same number of a key by another pattern."""
    for fqn in fqns if saved else ():
        if number := number_in(pattern, fqn):
            for other, step in saved.items():
                found = number_in(other, fqn)
                if found is not None and found.head == number.head:
                    return step
    return None


class _Load(NamedTuple):
    """What all ranks ask for.

    Attributes:
        world: Their tables and boxes.
        ranks: Their ranks, in the order of the world.
        renames: By position in the world, the renames in force there.
        record: The checkpoint's; None where it has none.
        policy: What is accepted.
        complete: Whether all ranks take part.
    """

    world: World
    ranks: Sequence[int]
    renames: Sequence[Sequence[Step]]
    record: SaveRecord | None
    policy: Policy
    complete: bool

    def renames_on(self, parts: Mapping[frozenset[int], Sequence[int]]) -> str:
        """Return the renames that are in force on the ranks with some parts, as text."""
        steps = [one for ranks in parts.values() for at in ranks for one in self.renames[at]]
        return "rename=" + ", ".join(dict.fromkeys(map(str, steps))) if steps else ""

    def fault(
        self,
        name: str,
        parts: Mapping[frozenset[int], Sequence[int]],
        twice: Sequence[frozenset[int]],
        missing: str,
        text: Callable[[frozenset[int]], str],
        *,
        of: str,
        saved: str,
        loaded: str,
        likely: str,
    ) -> Fault:
        """Return the fault of a key, or of a family of keys.

        Args:
            name: The key or family.
            parts: The ranks that ask for each part.
            twice: The parts that another rank asks for, too.
            missing: What no rank asks for, as text.
            text: Returns a part as text.
            of: What it is a part of.
            saved: How it was saved, as a line; empty where that is not recorded.
            loaded: How this load declares it.
            likely: The likely cause.
        """
        by_text: dict[str, list[int]] = {}
        for part, positions in sorted(parts.items(), key=lambda part: min(part[1])):
            by_text.setdefault(text(part), []).extend(self.ranks[at] for at in positions)
        asked = [f"{text} by {format_ranks(ranks)}" for text, ranks in by_text.items()]
        more = f" and {len(asked) - _MAX_PARTS} other parts" if len(asked) > _MAX_PARTS else ""
        first = text(min(twice, key=lambda part: min(parts[part])))
        asks, none = ("several ranks ask", "none") if self.complete else ("this load asks", "not")
        return Fault(
            name,
            f"{asks} for {first} of {of}, and {none} for {missing}",
            (
                *([saved] if saved else []),
                f"this load:   {loaded}",
                f"asked for:   {'; '.join(asked[:_MAX_PARTS])}{more}",
                f"likely:      {likely}",
                "way out:     rename=, rows and meshes as in the save, on each rank its own; "
                + _ON_PURPOSE,
            ),
        )


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
        asked: By rank; without those that do not compare.
        record: The checkpoint's; None where it has none.
        metadata: The checkpoint's.
        policy: What is accepted.
        complete: Whether all ranks take part. Of some ranks only local numbers
            are refused.
    """
    if complete and len(asked) < world_size():
        return []  # a rank that does not compare may ask for what the others leave out
    sent = [one for one in asked.values() if one.sent.tables]
    ranks = [rank for rank, one in asked.items() if one.sent.tables]
    renames = [one.renames for one in sent]
    load = _Load(World([one.sent for one in sent]), ranks, renames, record, policy, complete)
    faults = _number_faults(load, metadata)
    # A rank that sent nothing may ask for what the others leave out.
    if complete and len(sent) >= world_size():
        states = OptimizerStates(dict.fromkeys(metadata.state_dict_metadata, UNSEEN))
        for piece in load.world.pieces:
            faults += _box_faults(load, piece, states)
    return faults


def _number_faults(load: _Load, metadata: Metadata) -> list[Fault]:
    """Return the families of which ranks ask for the same numbers, and none for others.

    Ranks that load alone are refused where they ask for the first numbers, without a rename.
    """
    saved = () if load.record is None else load.record.renames
    here = [step for steps in load.renames for step in steps] if load.complete else []
    steps: dict[str, Step] = {}
    for step in (*saved, *here):
        if step.kind in _NUMBERING and step.pattern.count("{}") == 1:
            steps.setdefault(step.pattern, step)
    families = Families(steps, metadata.state_dict_metadata)
    asked_for = families.of(load.world)
    entries = entries_at(metadata.state_dict_metadata, metadata.state_dict_metadata)
    stored = zip(metadata.state_dict_metadata, entries, strict=True)
    tensors = [fqn for fqn, entry in stored if isinstance(entry, TensorStorageMetadata)]
    numbers = families.numbers(tensors) if asked_for else {}
    faults = []
    for family in asked_for:
        missing = numbers[family.name, family.pattern].difference(family.numbers)
        parts = family.parts(load.world) if missing else {}
        wrong = repeated(parts)
        if not load.complete:
            parts = {
                part: ranks
                for part, ranks in parts.items()
                if part == set(range(len(part)))
                and not any(s.kind in _NUMBERING for at in ranks for s in load.renames[at])
            }
            wrong = list(parts)
        if not wrong or any(map(load.policy.excuses, family.members(tensors))):
            continue
        renames, step = load.renames_on(parts), steps[family.pattern]
        faults.append(
            load.fault(
                family.name,
                parts,
                wrong,
                format_numbers(missing),
                format_numbers,
                of="it",
                saved=f"saved with:  rename={step}" if step in saved else "",
                loaded=renames or "no rename=",
                likely="rename= of this load gives some ranks the numbers of another rank"
                if renames and load.complete
                else "rename= was forgotten in this load, so that every rank asks by its local "
                "numbers",
            )
        )
    return faults


def _box_faults(load: _Load, piece: Piece, states: OptimizerStates) -> list[Fault]:
    """Return the keys of a piece of which several ranks ask for the same boxes, none for others."""
    groups = [source.group for source in piece.sources]
    group = next((one for one in groups if one.kind != PLAIN), None)
    if group is None or len({one.shape for one in groups}) > 1:  # of shapes there is another fault
        return []
    cover, whole = cover_of(piece.ranks, piece.boxes), Box.whole(group.shape)
    if not cover.has_replicas or cover.is_whole(group.shape):
        return []
    parts = cover.parts()
    twice = repeated(parts)
    missing = uncovered(whole, cover.boxes, _MAX_HOLES) if twice else []
    if not missing:
        return []

    def text(part: frozenset[int]) -> str:
        # What is left of the rest: rows side by side are one box.
        rest = uncovered(whole, cover.boxes[sorted(part)], _MAX_HOLES)
        return _format(uncovered(whole, as_array(rest, len(group.shape)), _MAX_HOLES), whole)

    # Rows of optimizer state may be left out, since that of a row's parameter may be missing.
    is_listed = any(cut.kind is Kind.LISTED and cut.dim >= 0 for cut in group.cuts)
    faults = []
    for fqn in piece.fqns:
        if is_listed and states.of(fqn) is not None:
            continue
        cuts = load.record.cuts(fqn) if load.record is not None else ()
        loaded = [format_cuts(group.cuts), load.renames_on(parts)]
        faults.append(
            load.fault(
                fqn,
                parts,
                twice,
                _format(missing, whole),
                text,
                of=str(group.shape),
                saved=f"saved:       {format_cuts(cuts)}" if cuts else "",
                loaded="; ".join(filter(None, loaded)),
                likely="IndexShard, rename= or the mesh of a rule gives some ranks the rows or the "
                "position of another rank, as along a wrong axis (edp in place of ep)",
            )
        )
    return faults


def _format(boxes: Sequence[Box], whole: Box) -> str:
    text = ", ".join(format_box(box, whole.sizes) for box in boxes[:_MAX_PARTS])
    return text + (" and others" if len(boxes) > _MAX_PARTS else "")


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
                f"way out:     the model of the save; {_ON_PURPOSE}",
            ),
        )
        for (family, total), numbers in beyond.items()
    ]
