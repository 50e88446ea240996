"""The comparison of a load's declarations with those of the save, without a load.

The functions are those of a load. No rank has keys of its own here: by its rename it requests the
checkpoint's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dcp_placements._torch import Metadata
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Layout, Pick, Sharding
from dcp_placements.load.comparison.checks import (
    Asked,
    LoadChecks,
    asked_faults,
    compare_renames,
)
from dcp_placements.load.comparison.cuts import differences
from dcp_placements.load.comparison.rows import ListedRows, pack, rows_of, without_numbers
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
        self._checks: dict[Any, LoadChecks] = {}
        self._asked: dict[int, Asked] = {}
        self._lists: list[tuple[int, Sequence[str], ListedRows | None, Mapping[str, str]]] = []

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
        checks = self._checks.get(key)
        if checks is None:
            checks = self._checks[key] = LoadChecks(self._record)
            keys = list(fqns)
            policy = Policy(waived=compiled(waive))
            compare_renames(checks, keys, self._metadata, rename, policy)
        self._asked[rank] = checks.asked
        return checks.faults

    def asking_faults(self) -> list[Fault]:
        """Return the faults that only the keys and rows of all ranks together show."""
        rows = self._packed_rows()
        asked = {rank: replace(one, rows=rows.get(rank, b"")) for rank, one in self._asked.items()}
        return asked_faults(asked, self._record, self._metadata, complete=True)

    def list_rows(
        self,
        rank: int,
        fqns: Sequence[str],
        sharding: Sharding,
        layout: Layout,
        rule: str | None,
        waive: Mapping[str, str],
    ) -> None:
        """Keep the rows that a rank requests of keys that are cut alike."""
        rows = None
        if any(isinstance(cut, Pick) for cut in sharding.cuts):
            rows = rows_of(sharding, layout, layout.chunks())
        self._lists.append((rank, fqns, None if rows is None else replace(rows, rule=rule), waive))

    def _packed_rows(self) -> dict[int, bytes]:
        """Return the packed rows of every rank; nothing where no rule lists rows."""
        if all(listed is None for _, _, listed, _ in self._lists):
            return {}
        states = OptimizerStates(dict.fromkeys(self._metadata.state_dict_metadata, UNSEEN))
        groups: dict[int, dict[ListedRows, list[str]]] = {}
        others: dict[int, set[bytes]] = {}
        for rank, fqns, listed, waive in self._lists:
            if listed is None:
                others.setdefault(rank, set()).update(without_numbers(fqns))
                continue
            policy = Policy(waived=compiled(waive))
            groups.setdefault(rank, {}).setdefault(listed, []).extend(
                [fqn for fqn in fqns if states.of(fqn) is None and not policy.excuses(fqn)]
            )
        ranks = groups.keys() | others.keys()
        return {rank: pack(groups.get(rank, {}), others.get(rank, ())) for rank in ranks}


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
