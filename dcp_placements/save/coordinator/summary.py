"""The report on a save: what refuses it, what is only warned of."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence

from dcp_placements._torch import world_size
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault, format_faults, format_names, format_ranks, raise_faults
from dcp_placements.report import SaveReport, key_report
from dcp_placements.rules.patterns import why_unmatched
from dcp_placements.save.coordinator.global_plan import WorldPlan
from dcp_placements.save.key_table import OBJECT
from dcp_placements.save.local_plan import Holding
from dcp_placements.save.rank_notes import Statement

logger = logging.getLogger(__name__)


def judged(
    world_plan: WorldPlan,
    statements: Sequence[Statement],
    waived: Mapping[str, str],
    *,
    strict: bool,
) -> SaveReport:
    """Return the report on a save by all ranks; refuse what cannot be saved, and warn of notes.

    Args:
        world_plan: The plan of all ranks.
        statements: What each of them says.
        waived: Patterns whose lint warnings were silenced, with the reason.
        strict: Whether replicas that differ refuse the save.

    Raises:
        PlacementError: All faults.
    """
    faults = list(world_plan.faults)
    # Notes of several ranks with one text stand once.
    notes = [*world_plan.notes, *dict.fromkeys(note for one in statements for note in one.notes)]
    if world_plan.uncompared:
        notes.append(_uncompared(world_plan.uncompared))
    (faults if strict else notes).extend(world_plan.conflicts)
    ranks, world = len(statements), world_size()
    report = summarise(world_plan, statements, waived)
    # A rank that plans alone cannot see what the patterns match on others.
    alone = ranks == 1 and world > 1
    if report.unmatched and not alone:
        # Listed with the faults, too: a mistake in a pattern is their likely cause.
        (faults or notes).append(_unmatched(report.unmatched, world_plan))
    raise_faults("the ranks' plans do not make a checkpoint", faults)
    if 1 < ranks < world:
        notes.append(_too_few(ranks, world))
    report.warnings = tuple(map(str, notes))
    if notes:
        warnings.warn(format_faults("look at this save", notes, "note"), stacklevel=2)
    if alone:
        # Asked for (use_collectives=False, no_dist=True): logged, no warning.
        logger.info("%s", _alone(world))
        report.warnings += (str(_alone(world)),)
    return report


def summarise(
    world_plan: WorldPlan, statements: Sequence[Statement], waived: Mapping[str, str]
) -> SaveReport:
    """Return what all ranks together are about to save.

    Args:
        world_plan: The plan of all ranks.
        statements: What each of them says.
        waived: Patterns whose lint warnings were silenced, with the reason.
    """
    rules: dict[str, int] = {}
    for statement in statements:
        for rule, count in statement.matched.items():
            rules[rule] = max(rules.get(rule, 0), count)
    patterns = dict.fromkeys(pattern for one in statements for pattern in one.patterns)
    return SaveReport(
        ranks=len(statements),
        keys=world_plan.keys,
        objects=tuple(world_plan.objects),
        rules=rules,
        unmatched=tuple(pattern for pattern in patterns if repr(pattern) not in rules),
        partial_keys=world_plan.partial,
        stateless=tuple(dict.fromkeys(name for one in statements for name in one.stateless)),
        waived=dict(waived),
    )


def summarise_rank(holding: Holding, placing: Placing, waived: Mapping[str, str]) -> SaveReport:
    """Return what one rank holds, for a rank that sees no plan but its own."""
    report = SaveReport(ranks=1, rules=dict(placing.matched), waived=dict(waived))
    objects = []
    for held in holding.keys:
        group = holding.tables[held.table].groups[held.group]
        if group.kind == OBJECT:
            objects.append(held.fqn)
            continue
        boxes = set(holding.boxes[held.table][held.group])
        numel = sum(box.numel for box in boxes)
        report.keys[held.fqn] = key_report(group.shape, group.dtype, len(boxes), numel, numel)
    report.objects = tuple(objects)
    return report


def _uncompared(keys: int) -> Fault:
    return Fault(
        "this save",
        f"replicas of {keys} keys are not compared",
        (
            "reason:      in a world of this size digests are folded, and the ranks that hold "
            "these keys hold other keys beside them",
            "way out:     dcp_placements.check(state_dict, rules) compares key by key",
        ),
    )


def _unmatched(patterns: Sequence[str], world_plan: WorldPlan) -> Fault:
    keys = [*world_plan.keys, *world_plan.objects]
    details = [f"the keys are {format_names(keys, 4)}"] if keys else []
    for pattern in patterns:
        if reason := why_unmatched(pattern, keys):
            of = f"for {pattern!r}, " if len(patterns) > 1 else ""
            details.append(f"likely:      {of}{reason}")
    return Fault(
        ", ".join(map(repr, patterns)),
        "no key on any rank matches",
        (*details, "way out:     correct the pattern, or drop it"),
    )


def _alone(world: int) -> Fault:
    return Fault(
        "this save",
        f"planned by 1 of {world} ranks, by itself",
        (
            "reason:      with use_collectives=False, no_dist=True or a group of one nobody sees "
            "what the others hold: replicas are not compared, and what is missing is not found",
        ),
    )


def directory_notes(ranks: Sequence[int], statements: Sequence[Statement]) -> list[Fault]:
    """Return that ranks write into directories of different names, if they do."""
    groups: dict[int, list[int]] = {}
    for rank, statement in zip(ranks, statements, strict=True):
        groups.setdefault(statement.target, []).append(rank)
    if len(groups) < 2:
        return []
    shown = "; ".join(map(format_ranks, list(groups.values())[:4]))
    more = "; ..." if len(groups) > 4 else ""
    return [
        Fault(
            "this save",
            f"the ranks write into {len(groups)} different directories: {shown}{more}",
            (
                "reason:      .metadata is written into one of them only, and a load looks for "
                "all files beside it",
                "likely:      the name has the rank or a time of day in it",
                "way out:     choose the name on one rank, and broadcast it to the others",
            ),
        )
    ]


def step_faults(ranks: Sequence[int], statements: Sequence[Statement]) -> list[Fault]:
    """Return that the ranks save different training steps, if they do."""
    groups: dict[int, list[int]] = {}
    for rank, statement in zip(ranks, statements, strict=True):
        if statement.step is not None:
            groups.setdefault(statement.step, []).append(rank)
    if len(groups) < 2:
        return []
    shown = [f"{step} on {format_ranks(of_step)}" for step, of_step in sorted(groups.items())]
    more = "; ..." if len(shown) > 4 else ""
    return [
        Fault(
            "this save",
            f"the ranks save {len(groups)} different steps: {'; '.join(shown[:4])}{more}",
            (
                "reason:      tensors of different training steps make no checkpoint",
                "way out:     set planner.step to the same number on all ranks before each save",
            ),
        )
    ]


def _too_few(ranks: int, world: int) -> Fault:
    return Fault(
        "this save",
        f"{ranks} of {world} ranks take part",
        (
            "reason:      what only the others hold is not saved; and if they save into the same "
            "directory, their files take the place of these",
            "way out:     save with all ranks, or give every group a directory of its own",
        ),
    )
