"""The comparison of a load's declarations with those of the save, without a load.

The functions are those of a load. No rank has keys of its own here: by its rename it requests the
checkpoint's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_placements._torch import Metadata
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Layout, Pick, Sharding
from dcp_placements.load.comparison.asked import Asked, Asking, Form
from dcp_placements.load.comparison.checks import (
    asked_faults,
    excused_families,
    rename_faults,
    renames_as_text,
    tensor_positions,
)
from dcp_placements.load.comparison.cuts import differences
from dcp_placements.load.policy import Policy, compiled
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.rules.placement import CheckpointPlacement
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.record import Cuts, cuts_of, record_of


class RehearsedRecord:
    """The declarations of all ranks, compared with the record of the save.

    Args:
        metadata: The checkpoint's.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._record = record_of(stored(metadata), metadata.state_dict_metadata)
        self._positions = tensor_positions(metadata)
        self._states = OptimizerStates(dict.fromkeys(metadata.state_dict_metadata, UNSEEN))
        self._fqns: dict[Any, list[str]] = {}
        self._faults: dict[Any, list[Fault]] = {}
        self._asked: dict[Any, Asked] = {}
        self._ranks: dict[int, _RankKeys] = {}

    def cut_faults(
        self,
        fqns: Sequence[str],
        sharding: Sharding,
        placement: CheckpointPlacement | None,
        own: Sequence[str],
        rule: str | None,
        waive: Mapping[str, str],
    ) -> list[Fault]:
        """Return the axes that cut keys in another way than in the save.

        Args:
            fqns: Keys that are cut alike.
            sharding: How they are cut.
            placement: By the rule; None without a rule.
            own: The axes of FSDP, flattened into the last axis of ``sharding``.
            rule: The rule's name.
            waive: Patterns of keys whose differences are accepted.
        """
        if self._record is None or not sharding.cuts:
            return []
        loaded = declared_cuts(sharding, placement, own)
        policy = Policy(waived=compiled(waive))
        groups: dict[int, list[str]] = {}
        for fqn in fqns:
            if group := self._record.group_of.get(fqn, 0):
                groups.setdefault(group, []).append(fqn)
        return [
            difference.fault(fqn, rule)
            for group, members in groups.items()
            for difference in differences(self._record.groups[group], loaded, sharding.global_shape)
            for fqn in members
            if not policy.waives(fqn)
        ]

    def rename_faults(
        self, rank: int, fqns: Iterable[str], rename: Any, waive: Mapping[str, str], key: Any
    ) -> list[Fault]:
        """Return the totals of renames that differ from the save's, and keep a rank's request.

        Args:
            rank: The rank.
            fqns: Keys of its tensors.
            rename: Its rename.
            waive: Patterns of keys whose differences are accepted.
            key: Equal for ranks with equal arguments.
        """
        policy = Policy(waived=compiled(waive))
        if key not in self._faults:
            self._fqns[key] = list(fqns)
            self._faults[key] = []
            if self._record is not None:
                self._faults[key] = rename_faults(self._record, self._fqns[key], rename, policy)
        self._ranks[rank] = _RankKeys(key, self._fqns[key], rename, policy)
        return self._faults[key]

    def asking_faults(self) -> list[Fault]:
        """Return the faults that only the keys and rows of all ranks together show."""
        asked = {rank: self._asked_by(keys) for rank, keys in self._ranks.items()}
        return asked_faults(asked, self._record, self._metadata, complete=True)

    def list_rows(
        self,
        rank: int,
        fqns: Sequence[str],
        sharding: Sharding,
        layout: Layout,
        placement: CheckpointPlacement | None,
        own: Sequence[str],
        rule: str | None,
    ) -> None:
        """Keep the rows that a rank requests of keys that are cut alike; nothing without rows.

        Args:
            rank: The rank, of which ``rename_faults`` was called before.
            fqns: The keys.
            sharding: How they are cut.
            layout: Where the rank's local tensors lie.
            placement: By the rule; None without a rule.
            own: The axes of FSDP, flattened into the last axis of ``sharding``.
            rule: The rule's name.
        """
        if any(isinstance(cut, Pick) for cut in sharding.cuts):
            form = Form.of(sharding, declared_cuts(sharding, placement, own), rule)
            self._ranks[rank].lists.append((fqns, form, layout))

    def _asked_by(self, keys: _RankKeys) -> Asked:
        """Return what a rank asks for."""
        if not keys.lists and keys.key in self._asked:
            return self._asked[keys.key]
        excused = keys.policy.excused(keys.fqns)
        asking = Asking(self._positions)
        listed: set[str] = set()
        for fqns, form, layout in keys.lists:
            mine = [f for f in fqns if f not in excused and self._states.of(f) is None]
            positions = [self._positions[fqn] for fqn in mine if fqn in self._positions]
            asking.group(form, layout.chunks()).extend(positions)
            listed.update(mine)
        others = [fqn for fqn in keys.fqns if fqn in self._positions and fqn not in listed]
        asking.others.extend([self._positions[fqn] for fqn in others])
        families = excused_families(self._record, self._metadata, excused)
        asked = asking.packed(families, renames_as_text(keys.rename))
        if not keys.lists:
            self._asked[keys.key] = asked
        return asked


@dataclass(frozen=True, slots=True)
class _RankKeys:
    """What one rank requests.

    Attributes:
        key: Equal for ranks with equal keys, renames and policies.
        fqns: The keys of its tensors.
        rename: Its rename.
        policy: What is accepted.
        lists: Keys whose rows it lists, their form, and where the local tensors lie.
    """

    key: Any
    fqns: Sequence[str]
    rename: Any
    policy: Policy
    lists: list[tuple[Sequence[str], Form, Layout]] = field(default_factory=list)


def declared_cuts(
    sharding: Sharding, placement: CheckpointPlacement | None, own: Sequence[str]
) -> Cuts:
    """Return the cuts of tensors as a save in that world would record them.

    Args:
        sharding: How they are cut.
        placement: By the rule; None without a rule.
        own: The axes of FSDP, flattened into the last axis of ``sharding``.
    """
    names: list[str | None] = []
    if placement is not None:
        names += placement.mesh.mesh_dim_names or [None] * len(placement.mesh.shape)
    # Several axes flattened into one have no name that a save could have recorded.
    names.append(own[0] if len(own) == 1 else None)
    return cuts_of(sharding, names)
