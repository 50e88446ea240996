"""The report on plans that were found to agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from dcp_placements.agreement import Agreement
from dcp_placements.evidence import Evidence
from dcp_placements.report import KeyReport, SaveReport


def summarise(
    agreement: Agreement, evidence: Sequence[Evidence], waived: Mapping[str, str]
) -> SaveReport:
    """Return what all ranks together are about to save."""
    report = SaveReport(ranks=len(evidence), waived=dict(waived))
    objects = []
    partial = {}
    for fqn, claims in agreement.claims.items():
        plans = claims.plans
        if len(plans) < len(evidence):
            partial[fqn] = tuple(evidence[plan].rank for plan in plans)
        if "object" in claims.kinds:
            objects.append(fqn)
            continue
        shape = tuple(next(iter(claims.sizes)))
        dtype = next(iter(claims.dtypes))
        whole = prod(shape) * dtype.itemsize
        held = sum(box.numel * len(told) for box, told in claims.boxes.items()) * dtype.itemsize
        report.keys[fqn] = KeyReport(
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            chunks=len(claims.boxes),
            unique_nbytes=sum(box.numel for box in claims.boxes) * dtype.itemsize,
            whole_nbytes=whole,
            copies=held / whole if whole else 1.0,
        )
    report.objects = tuple(objects)
    report.partial_keys = partial
    rules: dict[str, int] = {}
    for told in evidence:
        for rule, count in told.matched.items():
            rules[rule] = max(rules.get(rule, 0), count)
    report.rules = rules
    patterns = dict.fromkeys(pattern for told in evidence for pattern in told.patterns)
    report.unmatched = tuple(pattern for pattern in patterns if repr(pattern) not in rules)
    report.stateless = tuple(dict.fromkeys(name for told in evidence for name in told.stateless))
    return report
