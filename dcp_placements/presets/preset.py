"""Shared by the presets: from a placement per parameter to rules with few patterns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from dcp_placements.errors import PlacementError
from dcp_placements.rules.mesh_axes import Mesh, format_mesh
from dcp_placements.rules.patterns import PlacementRules
from dcp_placements.rules.placement import CheckpointPlacement


def axis_sizes(mesh: Mesh, *names: str) -> dict[str, int]:
    """Return the sizes of the named axes of ``mesh``.

    Raises:
        PlacementError: A mesh without one of them.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    missing = [name for name in names if name not in sizes]
    if missing:
        raise PlacementError(
            f"mesh {format_mesh(mesh)} has no axis {', '.join(map(repr, missing))}: this preset "
            f"needs {', '.join(map(repr, names))}"
        )
    return {name: int(sizes[name]) for name in names}


def starred(fqn: str) -> str:
    """Return an FQN with its numbers as ``*``: those of layers and of experts.

    >>> starred("decoder.layers.3.mlp.experts.linear_fc1.weight12")
    'decoder.layers.*.mlp.experts.linear_fc1.weight*'
    """
    return re.sub(r"(?<=\.)(weight|bias|)\d+(?=\.|$)", r"\1*", "." + fqn)[1:]


def rules_of(placements: Mapping[str, CheckpointPlacement | None]) -> PlacementRules:
    """Return rules with few patterns that give each FQN its placement.

    FQNs that differ only in numbers share a pattern, that of their most common placement. FQNs with
    another placement get a pattern of their own, above it, and so do FQNs that another pattern
    would match. A longer pattern comes before a shorter one, which may be its end.
    """
    # One object for equal placements.
    shared: dict[CheckpointPlacement | None, CheckpointPlacement | None] = {}
    placements = {fqn: shared.setdefault(kind, kind) for fqn, kind in placements.items()}
    by_pattern: dict[str, list[CheckpointPlacement | None]] = {}
    for fqn, placement in placements.items():
        by_pattern.setdefault(starred(fqn), []).append(placement)
    common = {pattern: Counter(kinds).most_common(1)[0][0] for pattern, kinds in by_pattern.items()}
    patterns: dict[str, CheckpointPlacement | None] = {}
    patterns |= {pattern: kind for pattern, kind in common.items() if kind is not None}
    while True:
        longest_first = sorted(patterns, key=lambda p: (-p.count("."), p.count("*")))
        rules = PlacementRules({pattern: patterns[pattern] for pattern in longest_first})
        wrong = [fqn for fqn, kind in placements.items() if rules(fqn) is not kind]
        if not wrong:
            return rules
        for fqn in wrong:
            pattern = starred(fqn)
            # One pattern for all FQNs that differ in numbers, if they have one placement.
            own = fqn if pattern in patterns or common[pattern] is not placements[fqn] else pattern
            patterns[own] = placements[fqn]
