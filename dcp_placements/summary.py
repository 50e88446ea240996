"""The report on a save that all ranks agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dcp_placements.evidence import Offer
from dcp_placements.items import PickedItems
from dcp_placements.layout import Box
from dcp_placements.offer import Offering
from dcp_placements.placing import Placing
from dcp_placements.report import KeyReport, SaveReport, key_report
from dcp_placements.table import OBJECT, Table, boxes
from dcp_placements.world_plan import WorldPlan


def summarise(plan: WorldPlan, offers: Sequence[Offer], waived: Mapping[str, str]) -> SaveReport:
    """Return what all ranks together are about to save."""
    stories = [offer.story for offer in offers if offer.story is not None]
    rules: dict[str, int] = {}
    for story in stories:
        for rule, count in story.matched.items():
            rules[rule] = max(rules.get(rule, 0), count)
    patterns = dict.fromkeys(pattern for story in stories for pattern in story.patterns)
    return SaveReport(
        ranks=len(offers),
        keys=plan.keys,
        objects=tuple(plan.objects),
        rules=rules,
        unmatched=tuple(pattern for pattern in patterns if repr(pattern) not in rules),
        partial_keys=plan.partial,
        stateless=tuple(dict.fromkeys(name for story in stories for name in story.stateless)),
        waived=dict(waived),
    )


def summarise_rank(offering: Offering, placing: Placing, waived: Mapping[str, str]) -> SaveReport:
    """Return what one rank holds, for a rank that sees no plan but its own."""
    report = SaveReport(ranks=1, rules=dict(placing.matched), waived=dict(waived))
    objects = []
    for kept in offering.tables:
        table, start, held = kept.table, 0, []
        for known in table.classes:
            stop = start + len(known.sharding.axis_sizes)
            held.append(boxes(known, kept.coordinates[start:stop]))
            start = stop
        for entry, (fqn, index) in enumerate(zip(table.fqns, table.class_of, strict=True)):
            if index == OBJECT:
                objects.append(fqn)
                continue
            report.keys[fqn] = _held_here(table, entry, held[index])
    if offering.picked is not None:
        kept = offering.picked
        rows = PickedItems(kept.table, kept.coordinates, kept.rows)
        for entry, fqn in enumerate(kept.table.fqns):
            report.keys[fqn] = _held_here(kept.table, entry, rows.boxes(entry))
    report.objects = tuple(objects)
    return report


def _held_here(table: Table, entry: int, held: Sequence[Box]) -> KeyReport:
    dtype = table.looks[table.look_of[entry]].dtype
    shape = table.classes[table.class_of[entry]].sharding.global_shape
    numel = sum(box.numel for box in held)
    return key_report(shape, dtype, len(held), numel, numel)
