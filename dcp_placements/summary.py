"""The report on a save that all ranks agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dcp_placements.evidence import Offer
from dcp_placements.report import SaveReport
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
