"""Does a load rename its keys as the save did? The renames of one rank against those recorded.

Another ``Stack`` or ``Split`` than that of the save, or another total of a ``Renumber``, finds keys
of the right shapes, with rows or experts of others. So each step is compared with that of the save
by its pattern, and each list of keys by its total.

A load that numbers eight experts of which the save had four::

    saved     Numbering(4, "Renumber('experts.{}', total=4)")
    loaded    Numbering(8, "Renumber('experts.{}', total=8)")
    fault     experts.{}: this load numbers 8 of it, and the save numbered 4
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, takewhile

from dcp_placements.errors import Fault
from dcp_placements.load.missing import ON_PURPOSE, Asked, Policy
from dcp_placements.names.recorded_numbers import Numberings, numbers_of
from dcp_placements.names.rename_results import Rename
from dcp_placements.names.renames import FUNCTION, Step, recorded
from dcp_placements.rules.patterns import compile_pattern
from dcp_placements.short_text import format_count, format_numbers
from dcp_placements.storage.provenance import SaveRecord


def rename_faults(record: SaveRecord, renames: Iterable[Step], asked: Asked) -> Iterator[Fault]:
    """Yield the steps that stack, unstack or split in another way than the save did."""
    renames = [*renames]
    is_turned = any(step.kind == "Transpose" for step in (*record.renames, *renames))
    for step in renames:
        same = (step.kind, step.pattern)
        saved = [of for of in record.renames if of.shaping and (of.kind, of.pattern) == same]
        if not step.shaping or not saved or step.shaping in [of.shaping for of in saved]:
            continue
        # A negative dim counts from the end, of a number of dims that is not known here.
        signs = {tuple([dim < 0 for dim in of.shaping[:1]]) for of in (step, *saved)}
        if is_turned and any(_is_turned_split(step, of) for of in saved):
            continue
        if len(signs) == 1 and not asked.policy.waives(step.pattern):
            yield Fault(
                step.pattern,
                f"this load has another {step.kind} of it than the save had",
                (
                    f"saved with:  rename={saved[0]}",
                    f"this load:   rename={step}",
                    "way out:     the rename= of the save; waive={pattern: reason} where this "
                    "model is another one on purpose",
                ),
            )


def _is_turned_split(step: Step, saved: Step) -> bool:
    """Whether two steps split alike but for which of the last two dims: a Transpose swaps these.

    ``Transpose("w"), Split("w", ..., dim=-2)`` is ``Split("w", ..., dim=-1), Transpose(...)``.
    """
    (dim, *rest), (saved_dim, *saved_rest) = step.shaping, saved.shaping
    return step.kind == "Split" and abs(dim - saved_dim) == 1 and rest == saved_rest


def total_faults(record: SaveRecord, given: Numberings, asked: Asked) -> Iterator[Fault]:
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


def turned_notes(
    renames: Sequence[Step],
    shapes: Mapping[str, Sequence[int]],
    policy: Policy,
    record: SaveRecord,
) -> Iterator[Fault]:
    """Yield a note where only one of the save and this load transposes, and no shape shows which.

    A model of the other orientation needs that, and so does the model of the save where its rename
    was forgotten. Of ``(4, 3)`` one of both does not fit; of ``(4, 4)`` both do.

    Args:
        renames: The steps of this load.
        shapes: The shapes of what is read, by key.
        policy: What is accepted.
        record: How the checkpoint was saved.
    """
    of_save = record.renames
    if any(step.kind == FUNCTION for step in (*renames, *of_save)):
        return
    saved, loaded = (
        {fqn for fqn in shapes if sum(map(bool, (of.search(f".{fqn}") for of in patterns))) % 2}
        for patterns in (
            [compile_pattern(step.pattern) for step in steps if step.kind == "Transpose"]
            for steps in (of_save, renames)
        )
    )
    differing = [fqn for fqn in sorted(saved ^ loaded) if len(shapes[fqn]) > 1]
    if any(shapes[fqn][-1] != shapes[fqn][-2] for fqn in differing):
        return  # a model of the other orientation would not have these shapes
    turned = [fqn for fqn in differing if not policy.excuses(fqn)]
    if turned:
        turns, leaves = "the save", "this load"
        if turned[0] in loaded:
            turns, leaves = leaves, turns
        more = f", as {format_count(len(turned) - 1, 'other key')}" if turned[1:] else ""
        yield Fault(
            turned[0],
            f"{turns} transposes it, and {leaves} does not{more}",
            (
                f"shape:       {tuple(shapes[turned[0]])}, which it has either way",
                f"likely:      {leaves} lacks the Transpose; or this model keeps its weights "
                "otherwise than that of the save, which is right",
                "way out:     rename= of the save; waive={pattern: reason} where this model is "
                "another one on purpose",
            ),
        )


def unstacked_faults(asked: Asked) -> Iterator[Fault]:
    """Yield the families of which a load asks for the first numbers only, as rows of a stack."""
    for key, total in asked.placing.totals.items():
        head, _, tail = key.partition("{}")
        names = takewhile(asked.stored.__contains__, (f"{head}{n}{tail}" for n in count(total)))
        beyond = [fqn for fqn in names if not asked.policy.excuses(fqn)]
        if not beyond or asked.states.of(beyond[0]) is not None:
            continue
        numbers = format_numbers(range(total, total + len(beyond)))
        yield Fault(
            f"{head}{{}}{tail.partition('.')[0]}",
            f"this load asks for {format_numbers(range(total))} of it, and not for {numbers}, "
            "which the checkpoint has, too",
            (
                f"this load:   a stacked tensor of {total} rows, which rename= unstacks",
                f"way out:     the model of the save; {ON_PURPOSE}",
            ),
        )


def unnumbered_rows(asked: Asked, rename: Rename | None) -> Iterator[Fault]:
    """Yield the tensors whose rows a rank that loads alone numbers from 0, unlike the save.

    Every rank has rows of these local numbers; the save gave them their numbers in the whole model.
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
                        f"way out:     rename= as in the save; {ON_PURPOSE}",
                    ),
                )
