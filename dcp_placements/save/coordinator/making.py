"""What a checkpoint keeps of its save: cuts and renames, rules, rows that ranks list, digests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dcp_placements.save.coordinator.cohorts import Cohorts
from dcp_placements.save.items import Assignment
from dcp_placements.save.key_table import OBJECT
from dcp_placements.save.local_plan import sent_boxes, sent_holding
from dcp_placements.save.rank_notes import Statement
from dcp_placements.storage.hashing import FULL_NBYTES
from dcp_placements.storage.metadata.provenance import StoredDigests
from dcp_placements.storage.metadata.record import ROWS, Cuts, packed_record


def cuts_and_renames(
    cohorts: Cohorts, statements: Sequence[Statement], keys: Collection[str]
) -> dict[str, Any]:
    """Return what a checkpoint is to keep of its cuts and renames: plain values.

    Args:
        cohorts: All local plans.
        statements: What each rank says.
        keys: The checkpoint's.
    """
    numbers: dict[Cuts, int] = {(): 0}
    group_of: dict[str, int] = {}
    for table in cohorts.tables:
        for number, group in enumerate(table.groups):
            cuts = group.cuts if group.is_exact else ()
            here = numbers.setdefault(cuts, len(numbers))
            for fqn in table.keys(number):
                # Nothing is kept of a key that ranks declare in several ways.
                if group_of.setdefault(fqn, here) != here:
                    group_of[fqn] = 0
    renames = dict.fromkeys(step for statement in statements for step in statement.renames)
    return packed_record(list(numbers), group_of, keys, renames)


def making(
    cohorts: Cohorts, statements: Sequence[Statement], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return how a checkpoint was saved, beside its identity: plain values only.

    Keys: ``axes`` (sizes by name), ``rules`` (rule by FQN), ``options``, ``row_maps`` (FQN to rank
    to the rows that it lists as its own).
    """
    rules: dict[str, str] = {}
    for table in cohorts.tables:
        for fqn, at in zip(table.fqns, table.rule_of, strict=True):
            if (rule := table.rules[at]) is not None:
                rules[fqn] = rule
    row_maps: dict[str, dict[int, tuple[int, ...]]] = {}
    for cohort in cohorts.cohorts:
        tables = [cohorts.tables[table] for table in cohort.tables]
        dims = [[_listed_dim(group.cuts) for group in table.groups] for table in tables]
        if all(dim is None for table_dims in dims for dim in table_dims):
            continue
        for at in cohort.plans.tolist():
            boxes = sent_boxes(cohorts.plans[at], tables)
            for table, held, table_dims in zip(tables, boxes, dims, strict=True):
                for group, dim in enumerate(table_dims):
                    if dim is not None:
                        rows = tuple(dict.fromkeys(box.offsets[dim] for box in held[group]))
                        for fqn in table.keys(group):
                            row_maps.setdefault(fqn, {})[cohorts.plans[at].rank] = rows
    return {
        "axes": {
            name: size for statement in statements for name, size in statement.axis_sizes.items()
        },
        "rules": rules,
        "options": dict(options),
        "row_maps": row_maps,
    }


def _listed_dim(cuts: Sequence[Any]) -> int | None:
    """Return the dim whose rows ranks list; None where there is none, or several."""
    dims = {cut.dim for cut in cuts if cut.kind == ROWS}
    return dims.pop() if len(dims) == 1 else None


def written_digests(cohorts: Cohorts, assignments: Sequence[Assignment]) -> StoredDigests:
    """Return the digests of what is written."""
    found: StoredDigests = {}
    for cohort in cohorts.cohorts:
        tables = [cohorts.tables[table] for table in cohort.tables]
        for at in cohort.plans.tolist():
            stored = cohorts.plans[at].stored_digests
            holding = sent_holding(cohorts.plans[at], tables)
            item = 0
            for held, boxes in assignments[at].by_key(holding):
                is_object = tables[held.table].groups[held.group].kind == OBJECT
                for box, written in boxes:
                    digest = stored[item * FULL_NBYTES : (item + 1) * FULL_NBYTES]
                    if written and any(digest):
                        place = None if is_object else box.offsets
                        found.setdefault(held.fqn, {})[place] = digest
                    item += 1
    return found
