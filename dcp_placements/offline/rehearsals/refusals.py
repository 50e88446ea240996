"""Why ranks would be refused: declarations that do not fit, and elements that nobody stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from dcp_placements._torch import Metadata
from dcp_placements.bind.lint import lint
from dcp_placements.bind.placed import Place, Placed
from dcp_placements.bind.rule_and_dtensor import BindError, Own, bind
from dcp_placements.errors import Fault, format_names
from dcp_placements.layout.sharding import Layout, Sharding
from dcp_placements.layout.tiling import format_box
from dcp_placements.load.request import shape_mismatch
from dcp_placements.names.rename_record import holder
from dcp_placements.offline.rehearsals.costs import Need, Part
from dcp_placements.offline.rehearsals.rehearsed_record import RehearsedRecord
from dcp_placements.offline.views.cutting import layout_at, whole_sharding
from dcp_placements.rules.placement import CheckpointPlacement


@dataclass(frozen=True, slots=True)
class RankPart:
    """The tensors of a part, as one rank holds them.

    Attributes:
        part: The tensors.
        placement: By the rank's rule; None without a rule.
        rule: The rule's name; None without a rule.
        key: Of all that decides how the tensors are cut, equal on all ranks that cut them alike.
        own: The axes over which FSDP cuts them.
        sharding: How they are cut.
        layout: Where the rank's local tensors lie.
    """

    part: Part
    placement: CheckpointPlacement | None
    rule: str | None
    key: Any
    own: Sequence[str]
    sharding: Sharding
    layout: Layout


class Refusals:
    """The faults and notes of all ranks.

    Args:
        metadata: The checkpoint's.
        axes: The mesh.
    """

    def __init__(self, metadata: Metadata, axes: Mapping[str, int]) -> None:
        self._axes = axes
        self._record = RehearsedRecord(metadata)
        self._ranks: dict[Fault, list[int]] = {}
        self._notes: dict[Fault, None] = {}
        # By all that decides them, since most ranks and parts share theirs.
        self._cut_faults: dict[Any, list[Fault]] = {}
        self._shape_faults: dict[Any, tuple[str, tuple[str, ...]] | None] = {}

    def add(self, rank: int, fqn: str, headline: str, *details: str) -> None:
        """Add a fault of one rank. Equal faults of several ranks become one that lists them."""
        ranks = self._ranks.setdefault(Fault(fqn, headline, details), [])
        if not ranks or ranks[-1] != rank:
            ranks.append(rank)

    def faults(self) -> tuple[Fault, ...]:
        """Return all faults, sorted by key, those that all ranks show together included."""
        faults = [
            replace(fault, ranks=tuple(ranks))
            for fault, ranks in sorted(self._ranks.items(), key=lambda item: astuple(item[0]))
        ]
        faults += self._record.asking_faults()
        return tuple(sorted(faults, key=lambda fault: (fault.fqn, fault.headline)))

    def notes(self) -> tuple[Fault, ...]:
        """Return what a load would warn about, sorted by key."""
        return tuple(sorted(self._notes, key=lambda note: (note.fqn, note.headline)))

    def check_stored(self, rank: int, part: Part, need: Need) -> None:
        """Check that every element that a rank needs is stored in some file."""
        if need.holes:
            shape = part.tensors.shape
            holes = format_names([format_box(hole, shape) for hole in need.holes], 4)
            for fqn in part.fqns:
                self.add(
                    rank,
                    fqn,
                    f"nobody stored {holes} of {shape}, which is needed",
                    "way out:     load a complete checkpoint",
                )
        for fqn in need.placeless:
            self.add(rank, fqn, "the metadata names no file for a chunk that is needed")

    def check_local_shape(
        self, rank: int, coordinate: Sequence[int], held: RankPart, *, renamed: bool
    ) -> None:
        """Bind the local tensors as a load does: it derives the whole shape from the rule alone."""
        part, placement, rule = held.part, held.placement, held.rule or ""
        if placement is None:
            return
        shape = part.tensors.shape
        sharding = whole_sharding(shape, placement, self._axes, [])
        position = tuple(placement.mesh.get_coordinate() or ())
        along = tuple(position[cut.axis] for cut in sharding.cuts)
        key = (held.key, along, rule, part.members.tobytes())
        if key not in self._shape_faults:
            self._shape_faults[key] = None
            local = layout_at(sharding, placement, self._axes, [], coordinate).local_shape
            try:
                binding = bind(Own(local), local, placement)
            except BindError as error:
                self._shape_faults[key] = error.headline, (*error.details, f"by rule:     {rule}")
            else:
                assert binding is not None
                whole = binding.global_shape
                if whole != shape:
                    needs = f"{local} on a rank makes {whole}"
                    headline, details = shape_mismatch(shape, whole, needs, rule)
                    way = f"             global_shape={shape} in the rule, where parts are uneven"
                    self._shape_faults[key] = headline, (*details, way)
                place = Place(binding, (), 0)
                placed = [Placed(f, part.tensors.example, place, rule) for f in part.fqns]
                self._notes.update(dict.fromkeys(lint(placed, renamed=renamed)))
        fault = self._shape_faults[key]
        if fault is not None:
            for fqn in part.fqns:
                self.add(rank, fqn, fault[0], *fault[1])

    def compare_with_save(
        self,
        rank: int,
        parts: Sequence[Part],
        held: Sequence[RankPart],
        rename: Any,
        waive: Mapping[str, str],
    ) -> None:
        """Compare a rank's declarations with those of the save.

        Args:
            rank: The rank.
            parts: All of its tensors.
            held: Those whose rule fits them.
            rename: Its rename.
            waive: Patterns of keys whose differences are accepted.
        """
        # Renames that state which keys a rank has are equal if their texts are.
        same = rank if holder(rename) is None and rename else (repr(rename), tuple(waive))
        fqns = (fqn for part in parts for fqn in part.fqns)
        faults = list(self._record.rename_faults(rank, fqns, rename, waive, same))
        for one in held:
            members = one.part.fqns
            self._record.list_rows(
                rank, members, one.sharding, one.layout, one.placement, one.own, one.rule
            )
            key = (one.key, one.part.members.tobytes(), one.rule, tuple(waive))
            if key not in self._cut_faults:
                self._cut_faults[key] = self._record.cut_faults(
                    members, one.sharding, one.placement, one.own, one.rule, waive
                )
            faults += self._cut_faults[key]
        for fault in faults:
            self.add(rank, fault.fqn, fault.headline, *fault.details)
