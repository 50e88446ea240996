"""Is a load declared as its checkpoint was saved, and do all ranks together ask for all of it?

A wrong rename, a forgotten placement or the rows of another rank find every key and the right
shapes. What one rank sees of that it compares with the record of the save: only axes that both
sides declare on one dim, in a canonical form, since several declarations mean one layout. What only
all ranks together show the coordinator finds, in the same tables as those of a save: boxes that no
rank asks for, while all that some rank asks for is asked for by another one, too. Listed rows are
boxes; and the keys that a rename numbered, as ``experts.{}``, are a tensor of one dim with an
element for each.

Two ep ranks that both forgot their rename ask for ``experts.0.w`` and ``experts.1.w`` of four::

    asked      {(0, 1): [0, 1]}    numbers, and the ranks that ask for them
    repeated   (0, 1)
    missing    (2, 3)
"""

from __future__ import annotations

import sys
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, count, takewhile
from typing import Any, NamedTuple

from torch.distributed.checkpoint import TensorStorageMetadata

from dcp_placements import __version__
from dcp_placements._torch import global_rank
from dcp_placements.bind.one_tensor import Placed
from dcp_placements.errors import CannotPlace, Fault
from dcp_placements.layout.boxes import Boxes, as_array, format_box, tile, uncovered
from dcp_placements.layout.equal_cuts import canonical, cuts_of_part, declared, differences
from dcp_placements.layout.sharding import Box, Cut, Cuts, Kind, format_cuts
from dcp_placements.load.missing import Asked, Policy
from dcp_placements.load.request import Request
from dcp_placements.names.numbers import Family, Numberings, numbers_of
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.names.renames import FUNCTION, Step, recorded
from dcp_placements.names.stacks_and_parts import Rename
from dcp_placements.short_text import (
    folded_names,
    format_count,
    format_names,
    format_numbers,
    format_ranks,
    near_names,
    numbers_in,
)
from dcp_placements.storage.provenance import (
    DIFFERED,
    UNCOMPARED,
    SaveRecord,
    doubts_of,
    stored,
)
from dcp_placements.table.families import HeldNumbers, held_numbers
from dcp_placements.table.statement import Stated, Statement
from dcp_placements.table.table import PLAIN, Group, Sent
from dcp_placements.table.world import Piece, World, repeated

_SHOWN = 4
"""Parts that a message lists."""

_MAX_HOLES = 1 << 10
"""Boxes that no rank asks for that are looked for, per key."""

_ON_PURPOSE = "optional=[pattern] or waive={pattern: reason} where the rest is left out on purpose"


def check_load(
    request: Request, rename: Rename | None, given: Numberings
) -> tuple[list[Fault], str]:
    """Compare the load of one rank with the record of the save.

    Args:
        request: What the rank asks for, with what it reads.
        rename: The user's renaming.
        given: The lists of keys to which it gives numbers.

    Returns:
        Declarations that differ from those of the save, and the result as text.
    """
    asked = request.asked
    record, policy = asked.record, asked.policy
    faults = _unstacked_faults(asked) if asked.placing.totals else []
    if record is None:
        return faults, "no record"
    compared = waived = 0
    for group in request.groups:
        if group.placed is None:
            continue
        loaded, rule = group.placed.place.sharding.cuts, group.placed.rule
        # Of equal places most keys were cut alike, too.
        members: dict[int, list[str]] = {}
        for fqn in group.fqns:
            members.setdefault(record.group_of[fqn], []).append(fqn)
        for number, fqns in members.items():
            saved = record.groups[number]
            if not saved or not loaded:
                continue
            compared += len(fqns)
            try:
                found = [*_differences(saved, group.placed, record)] if saved != loaded else []
            except CannotPlace as error:  # a kind of cut that cannot be compared
                faults += [error.fault(fqn, rule) for fqn in fqns if not policy.waives(fqn)]
                continue
            refused = [fqn for fqn in fqns if found and not policy.waives(fqn)]
            waived += len(fqns) - len(refused) if found else 0
            faults += [_cut_fault(fqn, rule, one) for fqn in refused for one in found]
    if rename is not None:
        faults += _rename_faults(record, recorded(rename), asked)
        faults += _total_faults(record, given, asked)
    text = "declared as saved"
    if compared:
        text += f": {format_count(compared - waived, 'key')}"
    return faults, text + (f"; {waived} differ, waived" if waived else "")


def doubt_notes(request: Request) -> list[Fault]:
    """Return a note for each key that the rank reads whose replicas the save let through."""
    asked = request.asked
    doubts = doubts_of(stored(asked.metadata), asked.stored)
    if not doubts:
        return []
    read = {fqn for group in request.groups for fqn in group.fqns if not asked.policy.waives(fqn)}
    return [
        Fault(fqn, *_DOUBTED[reason])
        for reason, fqns in doubts.items()
        for fqn in sorted(read & fqns)
    ]


_DOUBTED = {
    DIFFERED: (
        "the ranks had different contents of it when it was saved, and those of one are here",
        (
            'reason:      on_conflict="warn" let them through',
            "likely:      a rule was missing in the save, or replicas had drifted apart",
            "way out:     a checkpoint of a save without that warning; waive={pattern: reason} "
            "where any of them will do",
        ),
    ),
    UNCOMPARED: (
        "several ranks had it when it was saved, without a rule, and it was not compared",
        (
            'reason:      digests="off": that of one rank is here, whatever the others had',
            'way out:     digests="sampled" in the next save; waive={pattern: reason} where it '
            "was replicated",
        ),
    ),
}


def unknown_notes(asked: Asked) -> list[Fault]:
    """Return a note of the keys that this rank asks for whose cuts the record has in vain."""
    record = asked.record
    if record is None or not record.unknown:
        return []
    by_cause: dict[str, list[str]] = {}
    for fqn in asked.state_dict:
        number = record.group_of.get(fqn, 0)
        if number in record.unknown and not asked.policy.waives(fqn):
            by_cause.setdefault(record.unknown[number], []).append(fqn)
    versions = (stored(asked.metadata) or {}).get("versions", {})
    return [
        Fault(
            format_names(folded_names(fqns), _SHOWN),
            "the save cut it in a way that is not known here, so it is not compared with the save",
            (
                f"the record:  {cause:.200}",
                f"likely:      a save of a later version: {versions!s:.200}, this is {__version__}",
                "way out:     that version; or waive={pattern: reason}",
            ),
        )
        for cause, fqns in by_cause.items()
    ]


class _Difference(NamedTuple):
    """Cuts that a load declares in another way than the save did.

    Attributes:
        axes: Whose cuts they are.
        saved: As they were saved.
        loaded: As this load has them.
        way_out: What to declare.
        causes: Which of both may be wrong, and how to tell; details of the message.
        cut_nothing: Whether the axes had one rank each in the save.
    """

    axes: Sequence[str]
    saved: str
    loaded: str
    way_out: str
    causes: Sequence[str] = ()
    cut_nothing: bool = False


_SAVE_IS_WRONG = (
    "or:          the save declared it wrongly: its file is right in that topology alone; "
    "load it there as it was saved, and save it again by the right rule"
)


_HOW_TO_TELL = (
    "to tell:     FusedShard is right where a rank has a piece of each part, as in a layer that "
    "chunks its own output; Shard where its rows follow each other in the unsharded model"
)


def _causes(saved: Cuts, loaded: Cuts) -> tuple[str, ...]:
    """Return which of two declarations may be wrong; nothing where both have an effect."""
    count = len(saved)
    saves_whole, loads_whole = (
        sum([cut.size > 1 for cut in cuts]) < count for cuts in (saved, loaded)
    )
    if loads_whole:
        which = (
            "one of:      the rule of the save: it permuted the rows of its file, which is right "
            "in that topology alone",
            "or:          the rule of this load: the file is right, and so is what this load reads "
            "of it",
        )
    elif saves_whole:
        which = (
            "one of:      the rule of the save: its file is right all the same",
            "or:          the rule of this load: its ranks get rows of other ranks",
        )
    else:
        return ()
    return which if count > 1 else (*which, _HOW_TO_TELL)


def _way_out(difference: _Difference) -> tuple[str, ...]:
    """Return what to declare, and which of both declarations may be wrong."""
    if difference.cut_nothing:
        return (
            "reason:      in the save these axes had one rank: whatever it declared, its file is "
            "right",
            "way out:     waive={pattern: reason} where the rule of this load is right; or "
            f"{difference.way_out}, where that one is",
            *difference.causes,
        )
    return (
        f"way out:     {difference.way_out}; or waive={{pattern: reason}} where both are right",
        *(difference.causes or (_SAVE_IS_WRONG,)),
    )


def _cut_fault(fqn: str, rule: str | None, difference: _Difference) -> Fault:
    *axes, last = map(repr, difference.axes)
    return Fault(
        fqn,
        f"this load cuts it by {', '.join(axes)}{' and ' if axes else ''}{last} in another way "
        "than the save did",
        (
            f"saved:       {difference.saved}",
            f"this load:   {difference.loaded}",
            f"by rule:     {rule or 'no rule, its own DTensor'}",
            *_way_out(difference),
        ),
    )


def _differences(saved: Cuts, placed: Placed, record: SaveRecord) -> Iterator[_Difference]:
    """Yield the cuts that a load declares in another way than the save did."""
    loaded, shape = placed.place.sharding.cuts, placed.place.sharding.global_shape
    ruled = {cut.axis for cut in loaded if cut.by_rule}
    for dim in sorted({cut.dim for cut in saved} & {cut.dim for cut in loaded}):
        one, other = ([cut for cut in cuts if cut.dim == dim] for cuts in (saved, loaded))
        if 0 in shape or any(cut.kind is Kind.LISTED for cut in (*one, *other)):
            continue
        # How many rows a tensor is one of is not known.
        size = shape[dim] if dim >= 0 else sys.maxsize
        wholes = {cut.of for cut in (*one, *other)}
        one, other = canonical(one), canonical(other)
        if len(wholes) == 1:
            (of,) = wholes
            size = size if of is None else size // of.sizes[of.number] * sum(of.sizes)
            yield from _dim_differences(one, other, size)
            continue
        first, second = (cuts_of_part(cuts, size) for cuts in (one, other))
        # FSDP cuts a fused tensor and its parts each plainly; of what a rule says, one is wrong.
        unlike = {cut.axis for cut in (*one[len(first) :], *other[len(second) :]) if cut.size > 1}
        was, now = ({cut.axis: cut for cut in cuts} for cuts in (one, other))
        for axis in [cut.axis for cut in one if cut.axis in unlike & now.keys() & ruled]:
            way_out = "the fused tensor by FusedShard, so that each part is cut as a tensor is"
            yield _Difference((str(axis),), str(was[axis]), str(now[axis]), way_out)
        yield from _dim_differences(first, second, size)
    before = declared(saved)
    yield from _swapped_dims(before, declared(loaded))
    if placed.rule is not None:
        # Of an axis that the save declared so, it may have had one rank.
        of_dims = {(cut.axis, cut.dim) for cut in loaded}
        new = ruled - {axis for axis, cut in before.items() if (axis, cut.dim) in of_dims}
        yield from _differences_by_rule(_cutting(saved), _cutting(loaded), placed, new, record)


def _swapped_dims(saved: Mapping[str, Cut], loaded: Mapping[str, Cut]) -> Iterator[_Difference]:
    """Yield the axes that cut other dims than in the save, where a rule declares one of them.

    Where one axis alone cuts another dim the shape of the local tensor proves the declaration: a
    checkpoint is loaded into another topology.
    """
    axes = [
        axis
        for axis in sorted(saved.keys() & loaded.keys())
        if saved[axis].dim != loaded[axis].dim and min(saved[axis].dim, loaded[axis].dim) >= 0
    ]
    if len(axes) > 1 and any(side[axis].by_rule for side in (saved, loaded) for axis in axes):
        before, now = (format_cuts([side[axis] for axis in axes]) for side in (saved, loaded))
        cut_nothing = all(saved[axis].size == 1 for axis in axes)
        way_out = "these axes on the dims of the save"
        yield _Difference(axes, before, now, way_out, cut_nothing=cut_nothing)


def _differences_by_rule(
    one: Mapping[str, Cut],
    other: Mapping[str, Cut],
    placed: Placed,
    new: Container[str | None],
    record: SaveRecord,
) -> Iterator[_Difference]:
    """Yield cuts by other axes that shapes cannot show, of a tensor that a rule declares.

    Where an axis has another size, the shape of the local tensor proves the rule: a checkpoint is
    loaded into another topology. What a DTensor says of itself is so.

    Args:
        one: By axis, the cut of the save.
        other: That of the load.
        placed: The tensor.
        new: The axes for which a rule of the load speaks otherwise than the save, if it did.
        record: How the checkpoint was saved.
    """
    # Rows of a stack are numbered by names, and a stack may be one tensor in another model.
    is_stacked = any(step.kind == "Stack" for step in record.renames)
    here = {axis.name: axis.size for axis in placed.place.axes}
    for axis, cut in one.items():
        if cut.kind is Kind.LISTED and axis in other:
            plain = cut._replace(kind=Kind.PLAIN, by_rule=other[axis].by_rule)
            if other[axis] == plain and not is_stacked:
                # Of a tensor that is a row, the dim of the rows is one of the tensor unstacked.
                dim = cut.dim if cut.dim >= 0 else "dim"
                rows = f"IndexShard({dim}, this rank's rows)"
                way_out = f'{{"{axis}": {rows}}} in the rules of this load'
                yield _Difference((axis,), str(cut), str(other[axis]), way_out)
        elif axis not in other and here.get(axis) == cut.size:
            # The axis of the save is here, too: its ranks ask for the same, and those along an
            # axis that cut nothing then ask for the parts.
            for name, another in other.items():
                is_alike = another.dim == cut.dim or max(another.dim, cut.dim) < 0
                is_other = name in new and name not in one
                if is_other and is_alike and another.size == cut.size:
                    way_out = f'the tensor cut by "{axis}" in the rules of this load'
                    yield _Difference((axis, name), str(cut), str(another), way_out)


def _cutting(cuts: Cuts) -> dict[str, Cut]:
    """Return the cuts by axes of more than one rank, by name."""
    return {cut.axis: cut for cut in cuts if cut.axis is not None and cut.size > 1}


def _dim_differences(
    saved: Sequence[Cut], loaded: Sequence[Cut], size: int
) -> Iterator[_Difference]:
    """Yield the cuts of one dim that a load declares in another way, with what to declare."""
    for before, now in differences(saved, loaded, size):
        axes = [str(cut.axis) for cut in before]
        if len(axes) == 1:
            placement = f'{{"{axes[0]}": {before[0].placement}}}'
            way_out = f"{placement} in the rules of this load, as it was saved"
            if before[0].size != now[0].size:
                way_out += f", where the save was right for any size of {axes[0]!r}"
        else:
            way_out = (
                f"cut by {' before '.join(map(repr, axes))}, as it was saved: the axis that cuts "
                "what the others have left is a _StridedShard where it stands left of them in the "
                "mesh"
            )
        yield _Difference(
            sorted(axes),
            format_cuts(before),
            format_cuts(now),
            way_out,
            _causes(before, now),
            all(cut.size == 1 for cut in before),
        )


def _rename_faults(record: SaveRecord, renames: Iterable[Step], asked: Asked) -> Iterator[Fault]:
    """Yield the steps that stack, unstack or split in another way than the save did."""
    for step in renames:
        of_kind = [one for one in record.renames if one.kind == step.kind and one.shaping]
        alike = [one for one in of_kind if one.pattern == step.pattern]
        if not step.shaping or not alike or step.shaping in [one.shaping for one in alike]:
            continue
        # A negative dim counts from the end, of a number of dims that is not known here.
        signs = {tuple([dim < 0 for dim in one.shaping[:1]]) for one in (step, *alike)}
        if len(signs) == 1 and not asked.policy.waives(step.pattern):
            yield Fault(
                step.pattern,
                f"this load has another {step.kind} of it than the save had",
                (
                    f"saved with:  rename={alike[0]}",
                    f"this load:   rename={step}",
                    "way out:     the rename= of the save; waive={pattern: reason} where this "
                    "model is another one on purpose",
                ),
            )


def _total_faults(record: SaveRecord, given: Numberings, asked: Asked) -> Iterator[Fault]:
    """Yield the lists of keys of which this load numbers more, or fewer, than the save did."""
    differing = {
        family: (saved, numbering)
        for family, numbering in given.items()
        if (saved := record.numberings.get(family)) is not None
        and None not in (saved.total, numbering.total)
        and saved.total != numbering.total
    }
    excused = numbers_of(filter(asked.policy.excuses, asked.state_dict), differing)
    for family, (saved, numbering) in differing.items():
        if not excused[family]:
            yield Fault(
                str(family),
                f"this load numbers {numbering.total} of it, and the save numbered {saved.total}",
                (
                    f"saved with:  rename={saved.step}",
                    f"this load:   rename={numbering.step}",
                    "way out:     the rename= of the save; waive={pattern: reason} where this "
                    "model is another one on purpose",
                ),
            )


def _unstacked_faults(asked: Asked) -> list[Fault]:
    """Return the families of which a load asks for the first numbers only, as rows of a stack."""
    faults = []
    for key, total in asked.placing.totals.items():
        head, _, tail = key.partition("{}")
        names = takewhile(asked.stored.__contains__, (f"{head}{n}{tail}" for n in count(total)))
        beyond = [fqn for fqn in names if not asked.policy.excuses(fqn)]
        if not beyond or asked.states.of(beyond[0]) is not None:
            continue
        numbers = format_numbers(range(total, total + len(beyond)))
        faults.append(
            Fault(
                f"{head}{{}}{tail.partition('.')[0]}",
                f"this load asks for {format_numbers(range(total))} of it, and not for {numbers}, "
                "which the checkpoint has, too",
                (
                    f"this load:   a stacked tensor of {total} rows, which rename= unstacks",
                    f"way out:     the model of the save; {_ON_PURPOSE}",
                ),
            )
        )
    return faults


def unnumbered_rows(asked: Asked, rename: Rename | None) -> Iterator[Fault]:
    """Yield the tensors of which a rank that loads alone stacks its rows from 0, unlike the save.

    Local numbers are rows of every rank, and the save gave them those of the whole model.
    """
    own = recorded(rename)
    numbered = {step.pattern for step in own if step.kind in ("Renumber", FUNCTION)}
    of_save = () if asked.record is None else asked.record.renames
    saved = {step.pattern: step for step in of_save if step.kind == "Renumber" and step.total}
    for step in own:
        if step.kind != "Stack" or step.pattern in numbered or step.pattern not in saved:
            continue
        (dim, *_), name = step.shaping, step.pattern.partition(".{}")[0].rpartition(".")[2]
        for fqn, placed in asked.placing.placed.items():
            rows = {chunk.offsets[dim] for chunk in placed.place.chunks} if placed.rows else set()
            are_first = (
                rows == set(range(len(rows)))
                and 0 < len(rows) < placed.place.sharding.global_shape[dim]
            )
            if are_first and name in fqn.split(".") and not asked.policy.excuses(fqn):
                yield Fault(
                    fqn,
                    f"this load asks for rows {format_numbers(rows)} of it, by its local numbers",
                    (
                        f"saved with:  rename={saved[step.pattern]}",
                        f"this load:   rename={step}",
                        "likely:      the Renumber was forgotten in this load",
                        f"way out:     rename= as in the save; {_ON_PURPOSE}",
                    ),
                )


def _level(fqn: str) -> tuple[str, str]:
    """Return the level of a nested state dict that a key stands under, and its entry there."""
    level, _, rest = fqn.partition(".")
    return level, rest.partition(".")[0]


def unasked_notes(fqns: Sequence[str], asked: Asked) -> list[Fault]:
    """Return a note for each level of which no rank asks for some keys, probably by mistake.

    That is so where it asks for none of a level that it names, as ``"optim": {}``; or for the first
    numbers of a family alone, as a model with fewer layers does. A load of weights alone does not
    name the optimizer, and somebody who picks keys by their names picks others.

    Args:
        fqns: The tensors that no rank asks for.
        asked: What this rank asks for.
    """
    policy, stored, rest, levels = asked.policy, asked.stored, set(fqns), asked.nested
    # Of objects no rank knows what others ask for; an empty dict asks for none on any.
    empty = {level for level, value in levels.items() if isinstance(value, dict) and not value}
    objects = [fqn for fqn in asked.unread if _level(fqn)[0] in empty and fqn not in rest]
    used = {_level(fqn)[0] for fqn in _tensors(stored, stored) if fqn not in rest}
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
            f"for: {format_names(folded_names(of_level), _SHOWN)}",
            (
                "likely:      an empty dict under this key, as of an optimizer before its first "
                "step; a model with fewer layers than were saved; or rename= was forgotten",
                "way out:     ask for them; waive={pattern: reason} where they are left out on "
                "purpose",
            ),
        )
        for level, of_level in by_level.items()
    ]


def _renamed_fault(
    head: str, resets: Mapping[tuple[str, str], Sequence[int]], lost: Sequence[str]
) -> Fault:
    """Return the fault of an optimizer that has state under other names than are asked for.

    Args:
        head: Its key, with a dot.
        resets: Head and parameter of the state that is reset, and the ranks that do so.
        lost: The parameters whose state no rank asks for.
    """
    (other, asked), ranks = next(iter(resets.items()))
    stored = next(iter(near_names(asked, lost)), lost[0])
    longer, shorter = sorted((asked.split("."), stored.split(".")), key=len, reverse=True)
    words = [one for one in longer if [part for part in longer if part != one] == shorter]
    numbers = [
        part
        for at, part in enumerate(longer)
        if part.isdigit() and longer[:at] + longer[at + 1 :] == shorter
    ]
    likely, out = _OTHER_NAMES
    if other != head:
        likely, out = _MOVED_PARAMETERS
    elif numbers:
        likely, out = _STACKED_WEIGHTS
    elif words:
        likely = f"likely:      {words[0]!r}, the name of a wrapper, is in one of them alone"
        out = f'way out:     rename=Replace("{words[0]}", "") in this load'
        if len(asked) < len(stored):
            out = (
                f"way out:     a rename= that puts {words[0]!r} into this rank's keys of optimizer "
                "state; or a state dict from get_optimizer_state_dict, which leaves it out, for "
                "both the save and the load"
            )
    return Fault(
        f"{head}state",
        "the checkpoint has optimizer state that no rank asks for, and lacks what they ask for: "
        "it would be reset",
        (
            f"asked for:   {format_names([f'{of}state.{one}' for of, one in resets], _SHOWN)}, "
            f"first by {format_ranks(ranks)}",
            f"there are:   {format_names([f'{head}state.{one}' for one in lost], _SHOWN)}",
            likely,
            f"{out}; waive={{pattern: reason}}, of the keys that are there, where they are of "
            "other parameters",
        ),
    )


_OTHER_NAMES = (
    "likely:      a rename= that changes the names of weights, and not those of their state",
    "way out:     a rename= under which the keys of state become those that are there",
)
_MOVED_PARAMETERS = (
    "likely:      another optimizer has these parameters in this load than in the save",
    "way out:     the optimizers of the save",
)
_STACKED_WEIGHTS = (
    "likely:      one of the two stacked weights and their state, and the other the weights alone",
    'way out:     a pattern that both match, without the level, as Stack("experts.{}")',
)


def _tensors(stored: Mapping[str, Any], fqns: Collection[str]) -> list[str]:
    """Return those keys of a checkpoint that are tensors."""
    return [fqn for fqn in fqns if isinstance(stored.get(fqn), TensorStorageMetadata)]


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
        of_ranks = {rank: one.statement for one in self.different for rank in one.ranks}
        return [of_ranks[rank] for rank in self.ranks]

    @cached_property
    def states(self) -> OptimizerStates:
        """Which keys of the checkpoint are optimizer state."""
        return OptimizerStates(self.stored)

    def faults(self) -> list[Fault]:
        """Return the parts of wholes that several ranks ask for while no rank asks for others."""
        saved = () if self.record is None else self.record.renames
        statements = [one.statement for one in self.different]
        if not saved and not any(one.declares for one in statements):
            return []
        numberings = {} if self.record is None else dict(self.record.numberings)
        for statement in statements if self.complete else ():
            for family, numbering in statement.numberings.items():
                numberings.setdefault(family, numbering)
        faults = self._number_faults(numberings) if numberings else []
        functions = [step for step in saved if step.kind == FUNCTION]
        here = chain.from_iterable([one.renames for one in statements])
        if self.complete and functions and all(step.kind != FUNCTION for step in here):
            faults += self._function_faults(functions[0])
        if self.complete:
            for piece in self.world.pieces:
                faults += self._box_faults(piece)
        return faults

    def unasked(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Return the tensors of the checkpoint that no rank asks for.

        Those of a level that has an entry for each rank, as ``{"rng": {str(rank): ...}}``, are of
        the ranks of a larger world.

        Args:
            state_dict: This rank's.
        """
        keys_of = [
            (
                [self.ranks[at] for at in cohort.ranks],
                {fqn for at in cohort.tables for fqn in chain(*self.world.tables[at].keys)},
            )
            for cohort in self.world.cohorts
        ] or [([*self.ranks] or [global_rank()], set(state_dict))]
        found = set(state_dict)
        # By level, whether each rank asks for the entry with its own number alone.
        per_rank: dict[str, bool] = {}
        for ranks, fqns in keys_of:
            found |= fqns
            for level, entry in map(_level, fqns):
                is_own = [entry] == [str(rank) for rank in ranks]
                per_rank[level] = per_rank.get(level, True) and is_own
        rest = _tensors(self.stored, [fqn for fqn in self.stored if fqn not in found])
        return [
            fqn for fqn in rest if not (per_rank.get(_level(fqn)[0]) and _level(fqn)[1].isdecimal())
        ]

    def renamed_states(
        self, resets: Mapping[tuple[str, str], Sequence[int]], unasked: Sequence[str]
    ) -> Iterator[Fault]:
        """Yield the optimizers of which ranks reset state, and that have some under other names.

        Or that of the same parameter is in the checkpoint, in another optimizer.

        State that no rank asks for is that of a layer which no rank has. It has lost its parameter
        where the checkpoint has no weight of that name, or where the ranks do read the weight.

        Args:
            resets: Head and parameter of the state that is reset, and the ranks that do so.
            unasked: The tensors of the checkpoint that no rank asks for.
        """
        rest, states = set(unasked), self.states
        heads = {head for head, _ in resets}
        reset_names = {name for _, name in resets}
        tensors = _tensors(self.stored, self.stored)
        of_heads = [
            (fqn, state)
            for fqn in tensors
            if (state := states.of(fqn)) is not None
            and (state.head in heads or state.parameter in reset_names)
        ]
        # Of nested state the name of the parameter is a beginning.
        names = {
            state.owner: [*accumulate(state.parameter.split("."), "{}.{}".format)][::-1]
            for _, state in of_heads
        }
        owners = {(head, name) for (head, _), some in names.items() for name in some}
        weights = states.weights_of(owners, [fqn for fqn in tensors if states.of(fqn) is None])
        keys_of = {
            (head, of): next(filter(None, [weights[head, name] for name in some]), [])
            for (head, of), some in names.items()
        }
        for head in sorted({state.head for _, state in of_heads}):
            mine = [(fqn, state.owner) for fqn, state in of_heads if state.head == head]
            # Without its weights, an optimizer's state is all asked for, or has other names; of
            # some ranks it may be that of others.
            is_alone = all(rest.issuperset(keys_of[owner]) for _, owner in mine)
            if is_alone and not self.complete and any(fqn not in rest for fqn, _ in mine):
                continue
            lost = dict.fromkeys(
                owner[1]
                for fqn, owner in mine
                if fqn in rest
                and not self.policy.excuses(fqn)
                and (is_alone or not keys_of[owner] or not rest.issuperset(keys_of[owner]))
            )
            reset = {
                owner: ranks
                for owner, ranks in resets.items()
                if owner[0] == head or owner[1] in lost
            }
            if lost and reset:
                yield _renamed_fault(head, reset, list(lost))

    def _renames_on(self, parts: Mapping[frozenset[int], Sequence[int]]) -> str:
        """Return the renames that are in force on the ranks with some parts, as text."""
        positions = chain.from_iterable(parts.values())
        steps = [one for at in positions for one in self._statements[at].renames]
        return "rename=" + ", ".join(dict.fromkeys(map(str, steps))) if steps else ""

    def _fault(
        self,
        name: str,
        parts: Mapping[frozenset[int], Sequence[int]],
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
            parts: The ranks that ask for each part.
            twice: The parts that another rank asks for, too.
            text: Returns a part as text.
            details: How it was saved and is loaded, and the likely cause.
            whole: What they are parts of, as text.
            missing: What of that no rank asks for, as text.
        """
        by_text: dict[str, list[int]] = {}
        for part, positions in sorted(parts.items(), key=lambda part: min(part[1])):
            by_text.setdefault(text(part), []).extend(self.ranks[at] for at in positions)
        asked = [f"{text} by {format_ranks(ranks)}" for text, ranks in by_text.items()]
        more = f" and {len(asked) - _SHOWN} other parts" if len(asked) > _SHOWN else ""
        first = text(min(twice, key=lambda part: min(parts[part])))
        asks, none = ("several ranks ask", "none") if self.complete else ("this load asks", "not")
        return Fault(
            name,
            f"{asks} for {first} of {whole}, and {none} for {missing}",
            (
                f"asked for:   {'; '.join(asked[:_SHOWN])}{more}",
                *details,
                "way out:     rename=, rows and meshes as in the save, on each rank its own; "
                + _ON_PURPOSE,
            ),
        )

    def _number_faults(self, numberings: Numberings) -> list[Fault]:
        """Return the families of which ranks ask for the same numbers, and none for others.

        Ranks that load alone are refused where they ask for the first numbers, without a rename
        that gives them.
        """
        tensors = _tensors(self.stored, self.stored)
        stored = numbers_of(tensors, numberings)
        excused = numbers_of(filter(self.policy.excuses, tensors), numberings)
        families = [f for f in numberings if stored[f] and not excused[f]]
        faults = []
        for family, parts in held_numbers(self.world, families).items():
            missing = stored[family].difference(*parts)
            if not missing:
                faults += self._unnumbered(family, stored[family], parts)
                continue
            twice = repeated(parts)
            if not self.complete:
                parts = {
                    part: ranks
                    for part, ranks in parts.items()
                    if part == set(range(len(part)))
                    and not any(self._numbers(at, family) for at in ranks)
                }
                twice = list(parts)
            if not twice:
                continue
            renames = self._renames_on(parts)
            likely = (
                "rename= was forgotten in this load, so that every rank asks by its local numbers"
            )
            if renames and self.complete:
                likely = "rename= of this load gives some ranks the numbers of another rank"
            saved = None if self.record is None else self.record.numberings.get(family)
            details = [] if saved is None else [f"saved with:  rename={saved.step}"]
            details += [f"this load:   {renames or 'no rename='}", f"likely:      {likely}"]
            of = {"whole": "it", "missing": format_numbers(sorted(missing))}
            faults.append(self._fault(str(family), parts, twice, format_numbers, details, **of))
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
        for fqn in _tensors(self.stored, self.stored):
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
                    f"way out:     the rename= of the save, on each rank its own; {_ON_PURPOSE}",
                ),
            )

    def _numbers(self, at: int, family: Family) -> bool:
        """Whether the rename of a rank gives the numbers of a family; a function may."""
        statement = self._statements[at]
        has_function = any(step.kind == FUNCTION for step in statement.renames)
        return has_function or family in statement.numberings

    def _unnumbered(self, family: Family, stored: Set[int], parts: HeldNumbers) -> list[Fault]:
        """Return the fault of ranks without the rename by which others ask for their numbers.

        Where all ranks together ask for all numbers, the others are replicas of the right rank.
        """
        numbered = {at for ranks in parts.values() for at in ranks if self._numbers(at, family)}
        others = [part for part, ranks in parts.items() if not numbered.isdisjoint(ranks)]
        faults = []
        for part, ranks in parts.items():
            without = [self.ranks[at] for at in ranks if at not in numbered]
            is_local = part == set(range(len(part))) and part != stored
            if without and is_local and any(part <= other for other in others):
                details = (
                    f"other ranks: {self._renames_on(parts)}",
                    "likely:      rename= was forgotten on these ranks, which ask by local numbers",
                    f"way out:     rename= on each rank its own; {_ON_PURPOSE}",
                )
                headline = f"no rename= of {format_ranks(without)} numbers it, as others do"
                faults.append(Fault(str(family), headline, details))
        return faults

    def _padding_faults(self, piece: Piece, group: Group) -> list[Fault]:
        """Return the keys of a piece of which all ranks have padding alone."""
        headline = (
            f"every rank has padding alone of it, so that none asks for any part of {group.shape}"
        )
        padded = f"this load:   {format_cuts(group.cuts)}; padded to {group.padded_shape}"
        out = f"way out:     the mesh of the save, or this rank's position in it; {_ON_PURPOSE}"
        fqns = [fqn for fqn in piece.fqns if not self.policy.excuses(fqn)]
        return [Fault(fqn, headline, (padded, out)) for fqn in fqns]

    def _box_faults(self, piece: Piece) -> list[Fault]:
        """Return the keys of a piece of which ranks ask for the same boxes, and none for others."""
        groups = [source.group for source in piece.sources]
        group = next((one for one in groups if one.kind != PLAIN), None)
        # Of shapes that differ there is another fault.
        if group is None or len({one.shape for one in groups}) > 1:
            return []
        if not len(piece.ranks) and group.padded_shape is not None:
            return self._padding_faults(piece, group)
        cover = piece.cover
        if not cover.has_replicas:
            return []
        whole = Box.whole(group.shape)
        if tile(whole, cover.boxes):
            return []
        cuts, fqns = format_cuts(group.cuts), [f for f in piece.fqns if not self.policy.excuses(f)]
        parts = cover.parts()
        twice = repeated(parts)
        if not twice or not uncovered(whole, cover.boxes, 1):
            return []

        def text(boxes: Boxes) -> str:
            """Return all that is not in some boxes, joined where they lie side by side."""
            rest = uncovered(whole, boxes, _MAX_HOLES)
            some = ", ".join(format_box(box, whole.sizes) for box in rest[:_SHOWN])
            return some + (" and others" if len(rest) > _SHOWN else "")

        def part_text(part: frozenset[int]) -> str:
            rest = uncovered(whole, cover.boxes[sorted(part)], _MAX_HOLES)
            return text(as_array(rest, len(group.shape)))

        renames = self._renames_on(parts)
        likely = (
            "IndexShard, rename= or the mesh of a rule gives some ranks the rows or the position "
            "of another rank, as along a wrong axis (edp in place of ep)"
        )
        faults = []
        for fqn in fqns:
            saved = self.record.cuts(fqn) if self.record is not None else ()
            details = [f"saved:       {format_cuts(saved)}"] if saved else []
            details += [f"this load:   {'; '.join(filter(None, [cuts, renames]))}"]
            details += [f"likely:      {likely}"]
            of = {"whole": str(group.shape), "missing": text(cover.boxes)}
            faults.append(self._fault(fqn, parts, twice, part_text, details, **of))
        return faults
