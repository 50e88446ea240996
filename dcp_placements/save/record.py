"""What a checkpoint keeps of its save: paths, cuts, renames, rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dcp_placements.layout.sharding import Cuts
from dcp_placements.names.flat import Path
from dcp_placements.save.local_plan import Statement
from dcp_placements.storage.metadata.record import packed_record
from dcp_placements.table.world import World


def paths_of_keys(world: World) -> dict[str, Path]:
    """Return where each key stands in the nested state dict."""
    return {fqn: path for table in world.tables for fqn, path in table.paths().items()}


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
    statements: Sequence[Statement],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return how a checkpoint was saved, beside its identity: plain values only.

    Keys: ``axes`` (sizes by name), ``rules`` (rule by FQN), ``options``.
    """
    rules: dict[str, str] = {}
    for table in world.tables:
        for at, fqn in enumerate(table.fqns):
            if (rule := table.rule(at)) is not None:
                rules[fqn] = rule
    return {
        "axes": {
            name: size for statement in statements for name, size in statement.axis_sizes.items()
        },
        "rules": rules,
        "options": dict(options),
    }
