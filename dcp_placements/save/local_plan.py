"""What a rank sends to the coordinator: its tables and boxes, and what it says beside them."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dcp_placements._torch import SavePlan, named_axes
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault
from dcp_placements.names.renames import Numbered, Recorded
from dcp_placements.rules.matches import Matches
from dcp_placements.rules.mesh import MeshNumbers
from dcp_placements.rules.patterns import PlacementRules, Rules


class LocalPlan(NamedTuple):
    """All that one rank sends to the coordinator.

    Attributes:
        rank: Its global rank.
        tables: Its tables, packed.
        boxes: The boxes that it holds of each group of each table in turn, packed.
        coordinate: Its position along each of ``Statement.axis_sizes``, in that order.
        digest_kind: ``"sampled"``, ``"full"`` or ``"off"``.
        digests: The digest vector (see ``digest_folding``); empty for none.
        is_folded: Whether digests are folded.
        undigested: Keys of tensors whose contents cannot be read, so that they have no digest.
        statement: A packed ``Statement``.
        world: Number of ranks, which decides of which groups there are digests.
        faults: Why the rank cannot save, packed; it has nothing else then.
    """

    rank: int
    tables: tuple[bytes, ...]
    boxes: bytes
    coordinate: tuple[int, ...] = ()
    digest_kind: str = "off"
    digests: bytes = b""
    is_folded: bool = False
    undigested: tuple[str, ...] = ()
    statement: bytes = b""
    world: int = 1
    faults: bytes = b""


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


def unlike_worlds(plans: Sequence[LocalPlan], world: int) -> list[Fault]:
    """Return that ranks count other ranks than the coordinator does, if they do.

    The digests of such a rank would be compared with those of other tensors.
    """
    unlike = [plan for plan in plans if plan.world != world]
    if not unlike:
        return []
    return [
        Fault(
            "this save",
            f"there are {unlike[0].world} ranks by torch.distributed here, and {world} on the "
            "coordinator",
            (
                "likely:      the default process group was made anew, or is replaced while these "
                "ranks plan",
                "way out:     one default process group on all ranks, for the whole save",
            ),
            ranks=tuple([plan.rank for plan in unlike]),
        )
    ]


def foreign_plans(plans: Sequence[SavePlan]) -> list[Fault]:
    """Return that other planners made some of the plans, if they did."""
    ours = [isinstance(plan.planner_data, LocalPlan) for plan in plans]
    if all(ours):
        return []
    others = len(ours) - sum(ours)
    return [
        Fault(
            "this save",
            f"{others} of {len(ours)} ranks planned it with another planner, the first at position "
            f"{ours.index(False)}",
            ("way out:     the same planner on every rank; installed() on every rank",),
        )
    ]
