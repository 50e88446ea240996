"""Is a load declared as its checkpoint was saved: what one rank finds by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_placements._torch import Metadata, TensorStorageMetadata, world_size
from dcp_placements.bind.binding import Binding
from dcp_placements.bind.lint import unwaived
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault
from dcp_placements.load.cut_checks import Difference, differences
from dcp_placements.load.families import Families, packed_numbers, total_faults
from dcp_placements.load.message import tensor_keys
from dcp_placements.load.request import Policy
from dcp_placements.load.row_checks import packed_rows
from dcp_placements.names.keys import Rename
from dcp_placements.names.numbers import number_finder
from dcp_placements.names.rename_record import renames_in_force
from dcp_placements.names.renames import numbering
from dcp_placements.rules.patterns import compile_pattern
from dcp_placements.storage.metadata.record import SavedRename, SaveRecord, cuts_of, record_of

NO_RECORD = "no record"


@dataclass(slots=True)
class LoadChecks:
    """What one rank finds.

    Attributes:
        record: The checkpoint's; None where it has none.
        faults: What is declared otherwise than it was saved.
        notes: What is likely declared wrongly.
        asked: The numbers that this rank asks for, for the coordinator.
        rows: The rows that it lists itself, for the coordinator.
        renames: The renames in force here, as text.
        compared: The result of the comparison, as text.
    """

    record: SaveRecord | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)
    asked: bytes = b""
    rows: bytes = b""
    renames: tuple[str, ...] = ()
    compared: str = NO_RECORD


def check_load(
    state_dict: Mapping[str, Any],
    placing: Placing,
    metadata: Metadata,
    *,
    rename: Rename | None,
    policy: Policy,
    waived: Collection[str],
    rank: int,
) -> LoadChecks:
    """Return how the load of one rank compares with the save.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        metadata: The checkpoint's.
        rename: The user's renaming.
        policy: What is accepted.
        waived: Patterns of keys that are known to be right.
        rank: This process's rank, for messages.
    """
    checks = LoadChecks(record_of(metadata))
    checks.notes = unwaived(placing.placed.values(), waived, renamed=rename is not None)
    excuses = Excuses(waived, policy)
    if world_size() > 1:
        there = tensor_keys(metadata)
        checks.rows = packed_rows(placing, state_dict, there, excuses.name)
    if checks.record is not None:
        _compare_cuts(checks, checks.record, placing, metadata, excuses, rank)
    compare_renames(checks, state_dict, metadata, rename, excuses, f"rank {rank}")
    return checks


class Excuses:
    """Keys that are excused: waived, or named as ones that may be missing."""

    def __init__(self, waived: Collection[str], policy: Policy) -> None:
        self._waived = [compile_pattern(pattern) for pattern in waived]
        self._policy = policy

    def waive(self, fqn: str) -> bool:
        """Whether a waiver names a key."""
        return any(pattern.search(f".{fqn}") for pattern in self._waived)

    def name(self, fqn: str) -> bool:
        """Whether a key is waived, or may be missing."""
        return self.waive(fqn) or self._policy.names(fqn)


def _compare_cuts(
    checks: LoadChecks,
    record: SaveRecord,
    placing: Placing,
    metadata: Metadata,
    excuses: Excuses,
    rank: int,
) -> None:
    """Note the keys that axes cut in another way than the save had it."""
    stored = metadata.state_dict_metadata
    pairs = _Pairs(record)
    compared = waived = 0
    for fqn, placed in placing.placed.items():
        group = record.group_of.get(fqn, 0)
        binding = placed.binding
        if not group or not binding.sharding.cuts:
            continue
        there = stored.get(fqn)
        if not isinstance(there, TensorStorageMetadata) or there.size != binding.global_shape:
            continue
        compared += 1
        found = pairs.differences(group, binding)
        if found and excuses.waive(fqn):
            waived += 1
        elif found:
            checks.faults += [cut_fault(fqn, one, placed.rule, f"rank {rank}") for one in found]
    checks.compared = "declared as saved"
    if compared:
        count = compared - waived
        checks.compared += f": {count} key{'' if count == 1 else 's'}"
    if waived:
        checks.compared += f"; {waived} otherwise, waived"


class _Pairs:
    """What comes of each way of cutting at save and each binding of the load, worked out once."""

    def __init__(self, record: SaveRecord) -> None:
        self._record = record
        # By the save's group the last bindings that were met with it, each with its differences.
        self._compared: dict[int, list[tuple[Binding, tuple[Difference, ...]]]] = {}

    def differences(self, group: int, binding: Binding) -> tuple[Difference, ...]:
        """Return what differs between a group of the save and a binding of the load."""
        compared = self._compared.setdefault(group, [])
        for other, found in compared:
            if other is binding:
                return found
        loaded = cuts_of(binding.sharding, [axis.name for axis in binding.axes])
        found = tuple(differences(self._record.groups[group], loaded, binding.global_shape))
        compared.insert(0, (binding, found))
        del compared[_MAX_COMPARED:]
        return found


_MAX_COMPARED = 32


def cut_fault(fqn: str, found: Difference, rule: str | None, who: str) -> Fault:
    """Return the fault of a key that ``who`` loads cut otherwise than it was saved."""
    axes = " and ".join(map(repr, found.axes))
    return Fault(
        fqn,
        f"{who} loads it cut by {axes} in another way than it was saved",
        (
            f"saved:       {found.saved}",
            f"this load:   {found.loaded}",
            f"by rule:     {rule or 'no rule, its own DTensor'}",
            "reason:      other rows of the whole would come to each rank, or in another order",
            f"way out:     {found.way_out}; or waive={{pattern: reason}} where both are right",
        ),
    )


def compare_renames(
    checks: LoadChecks,
    fqns: Collection[str],
    metadata: Metadata,
    rename: Rename | None,
    excuses: Excuses,
    who: str,
) -> None:
    """Note what a rank asks for of renamed numbers, and totals other than the save's.

    Args:
        checks: What the rank finds; it takes this in.
        fqns: The checkpoint's keys that it asks for.
        metadata: The checkpoint's.
        rename: The rank's renaming.
        excuses: Keys that are excused.
        who: What to call the rank.
    """
    checks.renames = tuple([str(SavedRename(*step)) for step in renames_in_force(rename, (), ())])
    record = checks.record
    if record is None:
        return
    families = Families(record.renames, metadata.state_dict_metadata)
    if not families:
        return
    excused = {family for fqn in fqns if excuses.name(fqn) for family, *_ in families.of(fqn)}
    there = tensor_keys(metadata)
    asked = families.numbers(fqn for fqn in fqns if fqn in there)
    checks.asked = packed_numbers(
        {family: numbers for family, numbers in asked.items() if family not in excused}
    )
    declared = [(numbered.pattern, numbered.total) for numbered in numbering(rename)]
    for fault in total_faults(declared, record, fqns, who):
        finder = number_finder(fault.fqn)
        named = (fqn for fqn in fqns if finder.search(f".{fqn}"))
        if not excuses.waive(fault.fqn) and not any(map(excuses.name, named)):
            checks.faults.append(fault)
