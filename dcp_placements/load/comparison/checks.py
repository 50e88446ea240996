"""What one rank, and the coordinator, find when they compare a load with the record of the save."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcp_placements._torch import Metadata, TensorStorageMetadata, world_size
from dcp_placements.bind.lint import lint
from dcp_placements.bind.placed import Placing
from dcp_placements.bind.rule_and_dtensor import Binding
from dcp_placements.errors import Fault
from dcp_placements.load.comparison.boxes import box_faults, packed_boxes
from dcp_placements.load.comparison.cuts import Difference, differences
from dcp_placements.load.comparison.numbers import (
    NUMBERING,
    Families,
    local_number_faults,
    number_faults,
    packed_numbers,
    total_faults,
)
from dcp_placements.load.comparison.rows import packed_rows, row_faults
from dcp_placements.load.policy import Policy
from dcp_placements.names.numbers import number_finder
from dcp_placements.names.rename_record import renames_in_force
from dcp_placements.names.rename_results import Rename
from dcp_placements.names.renames import numbering
from dcp_placements.rules.patterns import Rules
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.record import SavedRename, SaveRecord, cuts_of, record_of


@dataclass(frozen=True, slots=True)
class Asked:
    """What a rank asks for of wholes that ranks divide, for the coordinator.

    Attributes:
        numbers: The numbers of families that the save renamed, packed.
        rows: The rows that the rank lists itself, packed.
        boxes: The boxes of sharded keys, packed.
        renames: The renames in force on the rank, as text.
    """

    numbers: bytes = b""
    rows: bytes = b""
    boxes: bytes = b""
    renames: tuple[str, ...] = ()


@dataclass(slots=True)
class LoadChecks:
    """What one rank finds.

    Attributes:
        record: The checkpoint's; None where it has none.
        faults: Declarations that differ from those of the save.
        notes: Declarations that are probably wrong.
        asked: What the rank asks for.
        compared: The result of the comparison, as text.
    """

    record: SaveRecord | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)
    asked: Asked = field(default_factory=Asked)
    compared: str = "no record"


def check_load(
    state_dict: Mapping[str, Any],
    placing: Placing,
    metadata: Metadata,
    *,
    rules: Rules | None,
    rename: Rename | None,
    policy: Policy,
) -> LoadChecks:
    """Compare the load of one rank with the save.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        metadata: The checkpoint's.
        rules: The user's rules.
        rename: The user's renaming.
        policy: What is accepted.
    """
    checks = LoadChecks(record_of(stored(metadata), metadata.state_dict_metadata))
    findings = lint(placing.placed.values(), renamed=rename is not None)
    checks.notes = [note for note in findings if not policy.waives(note.fqn)]
    if checks.record is not None:
        _compare_cuts(checks, checks.record, placing, metadata, policy)
    compare_renames(checks, state_dict, metadata, rename, policy)
    if world_size() > 1:
        keys = tensor_keys(metadata)
        rows = packed_rows(placing, state_dict, keys, policy.excuses)
        boxes = b""
        # DTensors alone are complete over their meshes.
        if rules is not None or rename is not None:
            boxes = packed_boxes(placing, state_dict, list(keys), policy.excuses)
        checks.asked = replace(checks.asked, rows=rows, boxes=boxes)
    return checks


def _compare_cuts(
    checks: LoadChecks,
    record: SaveRecord,
    placing: Placing,
    metadata: Metadata,
    policy: Policy,
) -> None:
    """Add a fault for each key that axes shard in another way than the save had it."""
    by_binding: dict[tuple[int, Binding], tuple[Difference, ...]] = {}
    compared = waived = 0
    for fqn, placed in placing.placed.items():
        group = record.group_of.get(fqn, 0)
        binding = placed.binding
        if not group or not binding.sharding.cuts:
            continue
        found = by_binding.get((group, binding))
        if found is None:
            loaded = cuts_of(binding.sharding, [axis.name for axis in binding.axes])
            shape = binding.global_shape
            found = by_binding[group, binding] = tuple(
                differences(record.groups[group], loaded, shape)
            )
        stored = metadata.state_dict_metadata[fqn] if found else None
        if found and getattr(stored, "size", None) != placed.global_shape:
            continue  # the request refuses it for that
        compared += 1
        if found and policy.waives(fqn):
            waived += 1
        elif found:
            checks.faults += [one.fault(fqn, placed.rule) for one in found]
    checks.compared = "declared as saved"
    if compared:
        count = compared - waived
        checks.compared += f": {count} key{'' if count == 1 else 's'}"
    if waived:
        checks.compared += f"; {waived} differ, waived"


def compare_renames(
    checks: LoadChecks,
    fqns: Collection[str],
    metadata: Metadata,
    rename: Rename | None,
    policy: Policy,
) -> None:
    """Add what a rank asks for, and the faults of totals that differ from the save's.

    Args:
        checks: What the rank finds; takes in both.
        fqns: The checkpoint's keys that it asks for.
        metadata: The checkpoint's.
        rename: The rank's renaming.
        policy: What is accepted.
    """
    renames = tuple([str(SavedRename(*step)) for step in renames_in_force(rename, (), ())])
    checks.asked = Asked(renames=renames)
    record = checks.record
    if record is None:
        return
    families = Families(record.renames, metadata.state_dict_metadata)
    if not families:
        return
    keys = tensor_keys(metadata)
    excused = {family for fqn in fqns if policy.excuses(fqn) for family, *_ in families.of(fqn)}
    numbers = families.numbers(fqn for fqn in fqns if fqn in keys)
    packed = packed_numbers({name: numbers[name] for name in numbers if name not in excused})
    checks.asked = Asked(packed, renames=renames)
    totals = {numbered.pattern: numbered.total for numbered in numbering(rename)}
    for fault in total_faults(totals, record, fqns):
        finder = number_finder(fault.fqn)
        named = (fqn for fqn in fqns if finder.search(f".{fqn}"))
        if not policy.waives(fault.fqn) and not any(map(policy.excuses, named)):
            checks.faults.append(fault)


def asked_faults(
    asked: Mapping[int, Asked], record: SaveRecord | None, metadata: Metadata, *, complete: bool
) -> list[Fault]:
    """Return the parts of wholes that several ranks ask for while no rank asks for others.

    Args:
        asked: By rank.
        record: The checkpoint's; None where it has none.
        metadata: The checkpoint's.
        complete: Whether all ranks take part. Of some ranks only local numbers are refused.
    """
    renames = {rank: one.renames for rank, one in asked.items()}
    numbers = {rank: one.numbers for rank, one in asked.items() if one.numbers}
    rows = {rank: one.rows for rank, one in asked.items() if one.rows}
    if not complete:
        numbers = {rank: one for rank, one in numbers.items() if not _gives_numbers(renames[rank])}
    faults: list[Fault] = []
    if record is not None and len(numbers) > (1 if complete else 0):
        families = Families(record.renames, metadata.state_dict_metadata)
        parts, keys = _ranks_of(numbers), tensor_keys(metadata)
        if complete:
            faults = number_faults(parts, families, keys, renames)
        else:
            faults = local_number_faults(parts, families, keys)
    if not complete:
        return faults
    if len(rows) > 1:
        faults += row_faults(_ranks_of(rows), record, renames)
    boxes = {rank: one.boxes for rank, one in asked.items() if one.boxes}
    # A rank that sent none may ask for what the others leave out.
    if not faults and 1 < world_size() <= len(boxes):
        faults = box_faults(_ranks_of(boxes), record, list(tensor_keys(metadata)), renames)
    return faults


def _gives_numbers(renames: Sequence[str]) -> bool:
    return any(one.startswith(NUMBERING) for one in renames)


def _ranks_of(packed: Mapping[int, bytes]) -> dict[bytes, list[int]]:
    ranks: dict[bytes, list[int]] = {}
    for rank, text in packed.items():
        ranks.setdefault(text, []).append(rank)
    return ranks


def tensor_keys(metadata: Metadata) -> dict[str, None]:
    """Return the checkpoint's keys that are tensors, in its order."""
    stored = metadata.state_dict_metadata.items()
    return {fqn: None for fqn, value in stored if isinstance(value, TensorStorageMetadata)}
