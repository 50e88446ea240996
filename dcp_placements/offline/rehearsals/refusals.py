"""Why ranks would be refused: declarations that do not fit, and elements that nobody stored.

The declarations are compared with those of the save by the functions of a load. No rank has keys of
its own here: by its rename it requests the checkpoint's keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple

from dcp_placements._torch import Metadata, TensorStorageMetadata
from dcp_placements.bind.binding import BindError, Own
from dcp_placements.bind.lint import lint
from dcp_placements.bind.placed import Placed
from dcp_placements.bind.rule_and_dtensor import bind
from dcp_placements.errors import Fault, format_names
from dcp_placements.layout.boxes import format_box
from dcp_placements.layout.sharding import Box, Pick
from dcp_placements.load.compare import Asked, asked_faults, rename_faults, renames_of
from dcp_placements.load.cuts import differences, shape_mismatch
from dcp_placements.load.policy import Policy, compiled
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.names.renames import held_numbers
from dcp_placements.offline.rehearsals.costs import Need, Part, RankPart
from dcp_placements.offline.views.cutting import layout_at, whole_sharding
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.record import record_of
from dcp_placements.table.table import PLAIN, SHARD, Group, Held, Holding, table_of


class _Request(NamedTuple):
    """What one rank requests."""

    key: Any  # equal for ranks with equal keys, renames and policies
    fqns: Sequence[str]
    rename: Any
    policy: Policy
    lists: Sequence[RankPart]  # what it holds by rows that a rule lists


class Refusals:
    """The faults and notes of all ranks."""

    def __init__(self, metadata: Metadata, axes: Mapping[str, int]) -> None:
        self._axes = axes
        self._metadata = metadata
        self._record = record_of(stored(metadata), metadata.state_dict_metadata)
        self._ranks: dict[Fault, list[int]] = {}
        self._notes: dict[Fault, None] = {}
        # By all that decides them, since most ranks and parts share theirs.
        self._cut_faults: dict[Any, list[Fault]] = {}
        self._shape_faults: dict[Any, tuple[str, tuple[str, ...]] | None] = {}
        self._rename_faults: dict[Any, list[Fault]] = {}
        self._fqns: dict[Any, list[str]] = {}
        self._asked: dict[Any, Asked] = {}
        self._requests: dict[int, _Request] = {}
        self._states = OptimizerStates(dict.fromkeys(metadata.state_dict_metadata, UNSEEN))

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
        asked = {rank: self._asked_by(request) for rank, request in self._requests.items()}
        policy = next(iter(self._requests.values())).policy if self._requests else Policy()
        faults += asked_faults(asked, self._record, self._metadata, policy, complete=True)
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
        key = (held.key, along, rule, part.key)
        if key not in self._shape_faults:
            self._shape_faults[key] = None
            local = layout_at(sharding, placement, self._axes, [], coordinate).local_shape
            try:
                place = bind(Own(local), local, placement)
            except BindError as error:
                self._shape_faults[key] = error.headline, (*error.details, f"by rule:     {rule}")
            else:
                assert place is not None
                whole = place.global_shape
                if whole != shape:
                    needs = f"{local} on a rank makes {whole}"
                    headline, details = shape_mismatch(shape, whole, needs, rule)
                    way = f"             global_shape={shape} in the rule, where parts are uneven"
                    self._shape_faults[key] = headline, (*details, way)
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
        policy = Policy(waived=compiled(waive))
        # Renames that state which keys a rank has are equal if their texts are.
        same = rank if held_numbers(rename) is None else (repr(rename), tuple(waive))
        if same not in self._fqns:
            fqns = self._fqns[same] = [fqn for part in parts for fqn in part.fqns]
            of_rename = (
                () if self._record is None else rename_faults(self._record, fqns, rename, policy)
            )
            self._rename_faults[same] = list(of_rename)
        lists = [one for one in held if any(isinstance(cut, Pick) for cut in one.sharding.cuts)]
        self._requests[rank] = _Request(same, self._fqns[same], rename, policy, lists)
        faults = list(self._rename_faults[same])
        for one in held:
            key = (one.key, one.part.key, one.rule, tuple(waive))
            if key not in self._cut_faults:
                self._cut_faults[key] = self._differing_cuts(one, policy)
            faults += self._cut_faults[key]
        for fault in faults:
            self.add(rank, fault.fqn, fault.headline, *fault.details)

    def _differing_cuts(self, held: RankPart, policy: Policy) -> list[Fault]:
        """Return the axes that cut keys in another way than in the save."""
        if self._record is None or not held.sharding.cuts:
            return []
        loaded = held.declared_cuts()
        groups: dict[int, list[str]] = {}
        for fqn in held.part.fqns:
            if group := self._record.group_of.get(fqn, 0):
                groups.setdefault(group, []).append(fqn)
        shape = held.sharding.global_shape
        return [
            difference.fault(fqn, held.rule)
            for group, members in groups.items()
            for difference in differences(self._record.groups[group], loaded, shape)
            for fqn in members
            if not policy.waives(fqn)
        ]

    def _asked_by(self, request: _Request) -> Asked:
        """Return what a rank asks for."""
        if not request.lists and request.key in self._asked:
            return self._asked[request.key]
        entries = self._metadata.state_dict_metadata
        wanted = dict.fromkeys(request.fqns)
        for fqn in request.policy.excused(request.fqns):
            del wanted[fqn]
        groups: list[Held] = []
        rules: list[str | None] = []
        for one in request.lists:
            mine = [f for f in one.part.fqns if f in wanted and self._states.of(f) is None]
            group = Group(SHARD, one.sharding.global_shape, cuts=one.declared_cuts())
            boxes = tuple([chunk.box for chunk in one.layout.chunks()])
            groups.append(Held(group, boxes, mine))
            rules += [one.rule] * len(mine)
            for fqn in mine:
                del wanted[fqn]
        others: dict[tuple[int, ...], list[str]] = {}
        for fqn in wanted:
            if isinstance(entry := entries.get(fqn), TensorStorageMetadata):
                others.setdefault(tuple(entry.size), []).append(fqn)
        for shape, fqns in others.items():
            groups.append(Held(Group(PLAIN, shape), (Box.whole(shape),), fqns))
            rules += [None] * len(fqns)
        holding = Holding([table_of(groups, rules, {})], groups)
        asked = Asked.of(holding, renames_of(request.rename))
        if not request.lists:
            self._asked[request.key] = asked
        return asked
