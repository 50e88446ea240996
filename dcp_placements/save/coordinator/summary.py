"""The report on a save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dcp_placements.bind.placed import Placing
from dcp_placements.report import SaveReport, key_report
from dcp_placements.save.coordinator.global_plan import WorldPlan
from dcp_placements.save.key_table import OBJECT
from dcp_placements.save.local_plan import Holding
from dcp_placements.save.statement import Statement


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
