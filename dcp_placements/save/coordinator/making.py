"""What a checkpoint keeps of its save: paths, cuts, renames, rules, listed rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dcp_placements.layout.sharding import Kind
from dcp_placements.names.flat import Path
from dcp_placements.save.local_plan import LocalPlan, Statement
from dcp_placements.storage.metadata.record import Cuts, packed_record
from dcp_placements.table.table import Group, Table
from dcp_placements.table.world import World


def paths_of_keys(world: World, own: Sequence[Table], paths: Mapping[str, Path]) -> dict[str, Path]:
    """Return where each key stands in the nested state dict.

    Args:
        world: What all ranks hold.
        own: The tables of this rank.
        paths: Of the keys in those.
    """
    paths_of: dict[str, Path] = {}
    for table in world.tables:
        if any(table is one for one in own):
            paths_of.update({fqn: paths.get(fqn) or (fqn,) for fqn in table.fqns})
        else:
            paths_of.update(table.paths())
    return paths_of


def cuts_and_renames(
    world: World, statements: Sequence[Statement], keys: Collection[str]
) -> dict[str, Any]:
    """Return what a checkpoint with these keys is to keep of cuts and renames: plain values."""
    numbers: dict[Cuts, int] = {(): 0}
    group_of: dict[str, int] = {}
    for table in world.tables:
        for number, group in enumerate(table.groups):
            cuts = group.cuts if group.is_exact else ()
            here = numbers.setdefault(cuts, len(numbers))
            of_group = dict.fromkeys(table.keys(number), here)
            # Nothing is kept of a key that ranks declare in several ways.
            for fqn in of_group.keys() & group_of.keys():
                of_group[fqn] = here if group_of[fqn] == here else 0
            group_of.update(of_group)
    renames = dict.fromkeys(step for statement in statements for step in statement.renames)
    return packed_record(list(numbers), group_of, keys, renames)


def making(
    world: World,
    plans: Sequence[LocalPlan],
    statements: Sequence[Statement],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return how a checkpoint was saved, beside its identity: plain values only.

    Keys: ``axes`` (sizes by name), ``rules`` (rule by FQN), ``options``, ``row_maps`` (FQN to rank
    to the rows that it lists as its own).
    """
    rules: dict[str, str] = {}
    for table in world.tables:
        for at, fqn in enumerate(table.fqns):
            if (rule := table.rule(at)) is not None:
                rules[fqn] = rule
    row_maps: dict[str, dict[int, tuple[int, ...]]] = {}
    for at, plan in enumerate(plans):
        tables = world.tables_of(at)
        if any(_listed_dim(group) is not None for table in tables for group in table.groups):
            for held in world.holding(at).groups:
                if (dim := _listed_dim(held.group)) is not None:
                    rows = tuple(dict.fromkeys(box.offsets[dim] for box in held.boxes))
                    for fqn in held.fqns:
                        row_maps.setdefault(fqn, {})[plan.rank] = rows
    return {
        "axes": {
            name: size for statement in statements for name, size in statement.axis_sizes.items()
        },
        "rules": rules,
        "options": dict(options),
        "row_maps": row_maps,
    }


def _listed_dim(group: Group) -> int | None:
    """Return the dim whose rows ranks list; None where there is none, or several."""
    dims = {cut.dim for cut in group.cuts if cut.kind is Kind.LISTED}
    return dims.pop() if len(dims) == 1 else None
