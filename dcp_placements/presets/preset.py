"""What every preset returns, and what they share: the table that a model's own facts come to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dcp_placements.errors import PlacementError
from dcp_placements.mesh import Mesh, format_mesh
from dcp_placements.naming import Rename
from dcp_placements.placement import CheckpointPlacement
from dcp_placements.rules import PlacementRules, Rules, compile_pattern


@dataclass(frozen=True, slots=True)
class Preset:
    """What the planners take, for one framework and one rank.

    ``PlacementSavePlanner(preset.rules, rename=preset.rename, waive=preset.waive)`` and
    ``PlacementLoadPlanner(preset.rules, rename=preset.rename)``.

    Attributes:
        rules: The rules; they see the checkpoint's keys.
        rename: This rank's key to the checkpoint's; None where the two are equal.
        waive: ``{pattern: reason}`` of lint warnings that do not hold for this framework.
    """

    rules: Rules
    rename: Rename | None = None
    waive: Mapping[str, str] = field(default_factory=dict)


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
    others keep one of their own, above it. A longer name is asked before a shorter one that is a
    part of it.
    """
    groups: dict[str, dict[str, CheckpointPlacement | None]] = {}
    for fqn, placement in placements.items():
        groups.setdefault(starred(fqn), {})[fqn] = placement
    patterns: dict[str, CheckpointPlacement | None] = {}
    for pattern, members in groups.items():
        kinds = list(members.values())
        # Compared by identity: the presets share one object per kind of placement.
        common = max(kinds, key=lambda kind: sum(other is kind for other in kinds))
        patterns.update({fqn: kind for fqn, kind in members.items() if kind is not common})
        patterns[pattern] = common
    ordered = sorted(patterns, key=lambda pattern: (-pattern.count("."), pattern.count("*")))
    kept: dict[str | re.Pattern[str], CheckpointPlacement | None] = {}
    for at, pattern in enumerate(ordered):
        later = ordered[at + 1 :]
        # A name that no placement speaks for stands in the table only where a pattern below it
        # would catch it.
        if patterns[pattern] is not None or any(
            patterns[other] is not None and compile_pattern(other).search(f".{pattern}")
            for other in later
        ):
            kept[pattern] = patterns[pattern]
    return PlacementRules(kept)
