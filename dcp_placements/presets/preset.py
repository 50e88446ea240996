"""What the presets share: the table that a model's own facts come to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dcp_placements.errors import PlacementError
from dcp_placements.rules.mesh import Mesh, format_mesh
from dcp_placements.rules.patterns import PlacementRules
from dcp_placements.rules.placement import CheckpointPlacement


def axis_sizes(mesh: Mesh, *names: str) -> dict[str, int]:
    """Return the sizes of the named axes of ``mesh``.

    Raises:
        PlacementError: A mesh without one of them.
    """
    found = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    missing = [name for name in names if name not in found]
    if missing:
        raise PlacementError(
            f"mesh {format_mesh(mesh)} has no axis {', '.join(map(repr, missing))}: this preset "
            f"needs {', '.join(map(repr, names))}"
        )
    return {name: int(found[name]) for name in names}


def starred(fqn: str) -> str:
    """Return an FQN with its numbers as ``*``: those of layers and of experts.

    >>> starred("decoder.layers.3.mlp.experts.linear_fc1.weight12")
    'decoder.layers.*.mlp.experts.linear_fc1.weight*'
    """
    return re.sub(r"(?<=\.)(weight|bias|)\d+(?=\.|$)", r"\1*", "." + fqn)[1:]


def rules_of(placements: Mapping[str, CheckpointPlacement | None]) -> PlacementRules:
    """Return rules that say of each FQN what ``placements`` says, in few patterns.

    FQNs that differ in numbers alone share a pattern; those of them that lie differently from the
    others keep one of their own, above it, and so do those that the pattern of others would catch.
    A longer name is asked before a shorter one, which may be a part of it.
    """
    groups: dict[str, list[CheckpointPlacement | None]] = {}
    for fqn, placement in placements.items():
        groups.setdefault(starred(fqn), []).append(placement)
    # Compared by identity: the presets share one object per kind of placement.
    common = {
        pattern: max(kinds, key=lambda kind: sum(other is kind for other in kinds))
        for pattern, kinds in groups.items()
    }
    patterns: dict[str, CheckpointPlacement | None] = {}
    patterns |= {pattern: kind for pattern, kind in common.items() if kind is not None}
    while True:
        rules = PlacementRules({pattern: patterns[pattern] for pattern in _longest_first(patterns)})
        wrong = [fqn for fqn, kind in placements.items() if rules(fqn) is not kind]
        if not wrong:
            return rules
        for fqn in wrong:
            shared = starred(fqn)
            # Once for all of a group, where that will do.
            own = fqn if shared in patterns or common[shared] is not placements[fqn] else shared
            patterns[own] = placements[fqn]


def _longest_first(patterns: Iterable[str]) -> list[str]:
    return sorted(patterns, key=lambda pattern: (-pattern.count("."), pattern.count("*")))
