"""What a rank sends beside its keys: rules that matched, lint, the numbering of its rename."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from dcp_placements._torch import named_axes
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault
from dcp_placements.names.renames import Numbered, Recorded
from dcp_placements.rules.matches import Matches
from dcp_placements.rules.mesh import MeshNumbers
from dcp_placements.rules.patterns import PlacementRules, Rules


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank sends beside its keys; the same on most ranks of a pipeline stage.

    Attributes:
        matched: Rules that matched here, with the number of keys.
        declared: What is declared by pattern, and whether a key here matches.
        stateless: Parameters without optimizer state where others have it.
        notes: Warnings of this rank.
        numbered: The numbers of experts and layers that its rename gives.
        renames: What the checkpoint is to keep of its rename.
        axis_sizes: Sizes of the named mesh axes that it knows of.
        target: A checksum of the name of the directory that it writes into; 0 for no name.
        step: The training step that its planner was given; None for none.
    """

    matched: Mapping[str, int] = field(default_factory=dict)
    declared: Matches = field(default_factory=dict)
    stateless: tuple[str, ...] = ()
    notes: tuple[Fault, ...] = ()
    numbered: tuple[Numbered, ...] = ()
    renames: tuple[Recorded, ...] = ()
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    target: int = 0
    step: int | None = None

    def packed(self) -> bytes:
        """Return it as it travels."""
        return zlib.compress(pickle.dumps(self, protocol=5), 6)

    @staticmethod
    def unpacked(packed: bytes) -> Statement:
        """Return the statement that was packed; an empty one of nothing."""
        found: Statement = pickle.loads(zlib.decompress(packed)) if packed else Statement()
        return found


def named_axes_of(placing: Placing, rules: Rules | None) -> dict[str, tuple[int, int]]:
    """Return ``{name: (position, size)}`` of every named axis that tensors and rules name."""
    axes: dict[str, tuple[int, int]] = {}
    for mesh in rules.meshes if isinstance(rules, PlacementRules) else ():
        axes.update(named_axes(mesh))
    number_of = MeshNumbers()
    recent = None
    meshes, places = {}, {}
    for placed in placing.placed.values():
        if placed.mesh is not recent and placed.mesh is not None:
            recent = placed.mesh
            meshes[number_of(recent)] = recent
        places[placed.place] = placed.place
    for mesh in meshes.values():
        axes.update(named_axes(mesh))
    for place in places.values():
        for axis in place.axes:
            if axis.name is not None:
                axes[axis.name] = (axis.position, axis.size)
    return axes
