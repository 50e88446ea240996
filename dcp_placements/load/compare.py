"""Is a load declared as its checkpoint was saved? One rank against the record of the save.

A forgotten placement, or that of another axis, finds every key and the right shapes. The record has
the cuts of each key by the names of axes. Only axes that both sides declare on one dim are compared
with it, in a canonical form, since several declarations mean one layout.

A rule that cuts by ``edp`` what the save cut by ``ep``, where both have two ranks::

    saved     {"ep": Cut(0, "ep", 2)}
    loaded    {"edp": Cut(0, "edp", 2)}
    fault     experts.w1: this load cuts it by 'ep' and 'edp' in another way than the save did
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dcp_placements import __version__
from dcp_placements.bind.rule_and_dtensor import Placed
from dcp_placements.errors import CannotPlace, Fault
from dcp_placements.layout.cuts_compared import canonical, cuts_of_part, declared, differences
from dcp_placements.layout.sharding import Cut, Cuts, Kind, format_cuts
from dcp_placements.load.missing import Asked
from dcp_placements.load.rename_differences import (
    rename_faults,
    total_faults,
    turned_notes,
    unstacked_faults,
)
from dcp_placements.load.request import Request
from dcp_placements.names.recorded_numbers import Numberings
from dcp_placements.names.rename_results import Rename
from dcp_placements.names.renames import Step, recorded
from dcp_placements.pages import COMPARISON_PAGE
from dcp_placements.short_text import folded_names, format_names
from dcp_placements.storage.provenance import (
    DIFFERED,
    DOUBTS,
    UNCOMPARED,
    SaveRecord,
    doubts_of,
    provenance_of,
)

_SHOWN_KEYS = 4
"""Names that a message lists."""


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
    faults = [*unstacked_faults(asked)] if asked.placing.totals else []
    if record is None:
        return faults, "no record"
    compared = waived = 0
    for group in request.groups:
        if group.placed is None:
            continue
        loaded, rule = group.placed.place.sharding.cuts, group.placed.rule
        # Most keys with equal places were saved with equal cuts, which are compared once.
        by_cuts: dict[int, list[str]] = {}
        for fqn in group.fqns:
            by_cuts.setdefault(record.cuts_index[fqn], []).append(fqn)
        for number, fqns in by_cuts.items():
            saved = record.distinct_cuts[number]
            if not saved or not loaded:
                continue
            compared += len(fqns)
            try:
                differing = [] if saved == loaded else [*_differences(saved, group.placed, record)]
            except CannotPlace as error:  # a kind of cut that cannot be compared
                faults += [error.fault(fqn, rule) for fqn in fqns if not policy.waives(fqn)]
                continue
            refused = [fqn for fqn in fqns if differing and not policy.waives(fqn)]
            waived += len(fqns) - len(refused) if differing else 0
            faults += [_cut_fault(fqn, rule, cuts) for fqn in refused for cuts in differing]
    if rename is not None:
        faults += rename_faults(record, recorded(rename), asked)
        faults += total_faults(record, given, asked)
    text = "declared as saved"
    if compared:
        text += f": {compared - waived:,} of {compared:,} keys"
    return faults, text + (", the others waived" if waived else "")


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


def _differences(saved: Cuts, placed: Placed, record: SaveRecord) -> Iterator[_Difference]:
    """Yield the cuts that a load declares in another way than the save did."""
    loaded, shape = placed.place.sharding.cuts, placed.place.sharding.global_shape
    ruled = {cut.axis for cut in loaded if cut.by_rule}
    dims = {cut.dim for cut in saved} & {cut.dim for cut in loaded}
    # Ranges of the flattened tensor follow each other in the order of the ranks, whatever sizes
    # they have: what other cuts leave is all that can differ.
    for dim in sorted([dim for dim in dims if dim is not None]):
        before, now = ([cut for cut in cuts if cut.dim == dim] for cuts in (saved, loaded))
        if 0 in shape or any(cut.kind is Kind.LISTED for cut in (*before, *now)):
            continue
        # A negative dim is that of the rows of which a tensor is one: their number is not known.
        size = shape[dim] if dim >= 0 else sys.maxsize
        wholes = {cut.of for cut in (*before, *now)}
        before, now = canonical(before), canonical(now)
        if len(wholes) == 1:
            (of,) = wholes
            size = size if of is None else size // of.sizes[of.number] * sum(of.sizes)
            yield from _dim_differences(before, now, size)
            continue
        # One side has the fused tensor, and the other a part of it.
        first, second = (cuts_of_part(cuts, size) for cuts in (before, now))
        # FSDP cuts a fused tensor and its parts each plainly; where a rule does so, one is wrong.
        unlike = {cut.axis for cut in (*before[len(first) :], *now[len(second) :]) if cut.size > 1}
        cut_before, cut_now = ({cut.axis: cut for cut in cuts} for cuts in (before, now))
        for axis in [cut.axis for cut in before if cut.axis in unlike & cut_now.keys() & ruled]:
            way_out = "the fused tensor by FusedShard, so that each part is cut as a tensor is"
            yield _Difference((str(axis),), str(cut_before[axis]), str(cut_now[axis]), way_out)
        yield from _dim_differences(first, second, size)
    by_save = declared(saved)
    yield from _swapped_dims(by_save, declared(loaded))
    if placed.rule is not None:
        # An axis that the save declared on the same dim is not new, also where it had one rank.
        of_dims = {(cut.axis, cut.dim) for cut in loaded}
        new = ruled - {axis for axis, cut in by_save.items() if (axis, cut.dim) in of_dims}
        yield from _differences_by_rule(_cutting(saved), _cutting(loaded), placed, new, record)


def _swapped_dims(saved: Mapping[str, Cut], loaded: Mapping[str, Cut]) -> Iterator[_Difference]:
    """Yield the axes that cut other dims than in the save, where a rule declares one of them.

    Where one axis alone cuts another dim the shape of the local tensor proves the declaration: a
    checkpoint is loaded into another topology.
    """
    axes = [
        axis
        for axis in sorted(saved.keys() & loaded.keys())
        if saved[axis].dim != loaded[axis].dim
        and not any(side[axis].dim is None or side[axis].is_of_rows for side in (saved, loaded))
    ]
    if len(axes) > 1 and any(side[axis].by_rule for side in (saved, loaded) for axis in axes):
        before, now = (format_cuts([side[axis] for axis in axes]) for side in (saved, loaded))
        cut_nothing = all(saved[axis].size == 1 for axis in axes)
        way_out = "these axes on the dims of the save"
        yield _Difference(axes, before, now, way_out, cut_nothing=cut_nothing)


def _differences_by_rule(
    saved: Mapping[str, Cut],
    loaded: Mapping[str, Cut],
    placed: Placed,
    new: Container[str | None],
    record: SaveRecord,
) -> Iterator[_Difference]:
    """Yield cuts by other axes that shapes cannot show, of a tensor that a rule declares.

    Where an axis has another size, the shape of the local tensor proves the rule: a checkpoint is
    loaded into another topology. A DTensor's own cuts are right.

    Args:
        saved: The cuts of the save, by axis.
        loaded: The cuts of the load, by axis.
        placed: The tensor.
        new: The axes that a rule of the load declares, and the save not on the same dim.
        record: How the checkpoint was saved.
    """
    # Names number the rows of a stack, and a stack may be one tensor in another model.
    is_stacked = any(step.kind == "Stack" for step in record.renames)
    sizes = {axis.name: axis.size for axis in placed.place.axes}
    for axis, cut in saved.items():
        if cut.kind is Kind.LISTED and axis in loaded:
            plain = cut._replace(kind=Kind.PLAIN, by_rule=loaded[axis].by_rule)
            now = loaded[axis]
            if now.kind is Kind.RAGGED:
                now = now._replace(kind=Kind.PLAIN, parts=1)
            if now == plain and not is_stacked:
                # The rows of which a tensor is one are a dim of the stack, not of the tensor.
                dim = "dim" if cut.is_of_rows else cut.dim
                rows = f"IndexShard({dim}, this rank's rows)"
                way_out = f'{{"{axis}": {rows}}} in the rules of this load'
                yield _Difference((axis,), str(cut), str(loaded[axis]), way_out)
        elif axis not in loaded and sizes.get(axis) == cut.size:
            # The mesh of this load has the axis of the save, too. Its ranks ask for the same; the
            # ranks along another axis, which cut nothing in the save, ask for the shards.
            for name, other in loaded.items():
                is_same_dim = other.dim == cut.dim or (other.is_of_rows and cut.is_of_rows)
                is_other = name in new and name not in saved
                if is_other and is_same_dim and other.size == cut.size:
                    way_out = f'the tensor cut by "{axis}" in the rules of this load'
                    yield _Difference((axis, name), str(cut), str(other), way_out)


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
            if before[0].kind is Kind.RAGGED:  # these sizes are those of the save's ranks
                plain = before[0]._replace(kind=Kind.PLAIN, parts=1).placement
                placement = f'{{"{axes[0]}": {plain}}}, or RaggedShard with the sizes of its ranks,'
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


_SAVE_IS_WRONG = (
    "or:          the save declared it wrongly: its file is right in that topology alone; "
    "load it there as it was saved, and save it again by the right rule"
)


_HOW_TO_TELL = (
    "to tell:     FusedShard is right where a rank has a share of each part, as in a layer that "
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
    """Return the fault of a key that a load cuts in another way than the save did."""
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
            COMPARISON_PAGE,
        ),
    )


def notes_of_save(request: Request, steps: Sequence[Step]) -> list[Fault]:
    """Return notes of what the save let pass, transposed, or recorded in a way not known here.

    Args:
        request: What the rank asks for, with what it reads.
        steps: The steps of the rename of this load.
    """
    asked, notes = request.asked, list[Fault]()
    provenance, record = provenance_of(asked.metadata) or {}, asked.record
    if DOUBTS in provenance:
        notes += _doubt_notes(request, provenance)
    if record is None:
        return notes
    if any(step.kind == "Transpose" for step in (*steps, *record.renames)):
        tensors = [group for group in request.groups if group.reads is not None]
        shapes = {fqn: group.entry.size for group in tensors for fqn in group.fqns}
        notes += turned_notes(steps, shapes, asked.policy, record)
    if record.unknown:
        notes += _unknown_notes(asked, record, provenance)
    return notes


def _doubt_notes(request: Request, provenance: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a note for each key that the rank reads, and of which the save let replicas pass."""
    asked = request.asked
    read = {fqn for group in request.groups for fqn in group.fqns if not asked.policy.waives(fqn)}
    for reason, fqns in doubts_of(provenance, asked.stored).items():
        for fqn in sorted(read & fqns):
            yield Fault(fqn, *_DOUBTED[reason])


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


def _unknown_notes(asked: Asked, record: SaveRecord, provenance: Mapping[str, Any]) -> list[Fault]:
    """Return a note of the keys that this rank asks for, and whose recorded cuts are not known."""
    by_cause: dict[str, list[str]] = {}
    for fqn in asked.state_dict:
        number = record.cuts_index.get(fqn, 0)
        if number in record.unknown and not asked.policy.waives(fqn):
            by_cause.setdefault(record.unknown[number], []).append(fqn)
    versions = provenance.get("versions", {})
    return [
        Fault(
            format_names(folded_names(fqns), _SHOWN_KEYS),
            "the save cut it in a way that is not known here, so it is not compared with the save",
            (
                f"the record:  {cause:.200}",
                f"likely:      a save of a later version: {versions!s:.200}, this is {__version__}",
                "way out:     that version; or waive={pattern: reason}",
            ),
        )
        for cause, fqns in by_cause.items()
    ]
