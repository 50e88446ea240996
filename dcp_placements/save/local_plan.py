"""What a rank sends to the coordinator: its tables and boxes, and what it says beside them."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dcp_placements._torch import named_axes
from dcp_placements.bind.placed import Placed, Placing
from dcp_placements.errors import Fault
from dcp_placements.names.renames import Step
from dcp_placements.rules.mesh import mesh_axes, mesh_state
from dcp_placements.rules.patterns import PlacementRules, Rules
from dcp_placements.rules.unmatched import Matches
from dcp_placements.save.digests import SentDigests


class LocalPlan(NamedTuple):
    """All that one rank sends to the coordinator.

    Ep rank 1 of two, of a rule that shards ``experts.w1`` of shape ``(4, 3)``::

        LocalPlan(1, (b"... the packed table ...",), b"... [[2, 0], [2, 3]], packed ...", (1,))

    Attributes:
        rank: Its global rank.
        tables: Its tables, packed.
        boxes: The boxes that it holds of each group of each table in turn, packed.
        coordinate: Its position along each of ``Statement.axis_sizes``, in that order.
        digests: Of what it holds.
        statement: A packed ``Statement``.
        faults: Why the rank cannot save, packed; it has nothing else then.
    """

    rank: int
    tables: tuple[bytes, ...] = ()
    boxes: bytes = b""
    coordinate: tuple[int, ...] = ()
    digests: SentDigests = SentDigests()
    statement: bytes = b""
    faults: bytes = b""


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank sends beside its keys; the same on most ranks of a pipeline stage.

    Attributes:
        matched: Rules that matched here, with the number of keys.
        declared: What is declared by pattern, and whether a key here matches.
        stateless: Parameters without optimizer state where others have it.
        notes: Warnings of this rank.
        renames: What the checkpoint is to keep of its rename.
        axis_sizes: Sizes of the named mesh axes that it knows of.
        digest_kind: ``"sampled"``, ``"full"`` or ``"off"``.
        world: Number of ranks, which decides of which groups there are digests.
        directory: That it writes into; empty for none.
        step: The training step that its planner was given; None for none.
    """

    matched: Mapping[str, int] = field(default_factory=dict)
    declared: Matches = field(default_factory=dict)
    stateless: tuple[str, ...] = ()
    notes: tuple[Fault, ...] = ()
    renames: tuple[Step, ...] = ()
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    digest_kind: str = "off"
    world: int = 1
    directory: str = ""
    step: int | None = None

    def packed(self) -> bytes:
        """Return it as it travels."""
        return zlib.compress(pickle.dumps(self, protocol=5), 6)

    @staticmethod
    def unpacked(packed: bytes) -> Statement:
        """Return the statement that was packed."""
        statement: Statement = pickle.loads(zlib.decompress(packed))
        return statement


def named_axes_of(placing: Placing, rules: Rules | None) -> dict[str, tuple[int, int]]:
    """Return ``{name: (position, size)}`` of every named axis that tensors and rules name."""
    axes: dict[str, tuple[int, int]] = {}
    for mesh in rules.meshes if isinstance(rules, PlacementRules) else ():
        axes.update(named_axes(mesh))
    places = dict.fromkeys([placed.place for placed in placing.placed.values()])
    of_places = [axis for place in places for axis in place.axes]
    for mesh in {mesh_state(axis.mesh): axis.mesh for axis in of_places}.values():
        axes.update(named_axes(mesh))
    axes.update({axis.name: (axis.position, axis.size) for axis in of_places if axis.name})
    return axes


def left_to_others(placed: Iterable[Placed]) -> set[str]:
    """Return the keys of this rank's tensors that another rank writes, by their axes alone.

    It holds where all ranks save: in a process group that lacks some, the first rank along an axis
    may be one of those.

    A DTensor is on all ranks of its own mesh, so the first along the axes that do not cut it
    writes. Of other axes, those of a rule or of the mesh that its own was sliced from, nothing is
    known: along ``pp`` and ``ep`` other ranks may have other keys.
    """
    left = set()
    for tensor in placed:
        own = () if tensor.mesh is None else mesh_axes(tensor.mesh) or ()
        if any(
            axis.position
            for axis in tensor.place.replicating
            if any(axis.is_same(other) for other in own)
        ):
            left.add(tensor.fqn)
    return left
