"""What one rank, and the coordinator, find when they compare a load with the record of the save."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from dcp_placements._torch import Metadata, TensorStorageMetadata, world_size
from dcp_placements.bind.binding import Place
from dcp_placements.bind.lint import lint
from dcp_placements.errors import Fault
from dcp_placements.load.comparison.asked import AllAsked, Asked, Asking, Form
from dcp_placements.load.comparison.boxes import box_faults
from dcp_placements.load.comparison.cuts import differences
from dcp_placements.load.comparison.numbers import (
    Families,
    local_number_faults,
    number_faults,
    total_faults,
)
from dcp_placements.load.comparison.rows import row_faults
from dcp_placements.load.policy import Policy
from dcp_placements.load.request import Group, Request
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.names.renames import number_finder, numbering, recorded
from dcp_placements.names.target import Rename
from dcp_placements.rules.patterns import Rules
from dcp_placements.storage.index.stored_entries import entries_at
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.record import Cuts, SavedRename, SaveRecord, cuts_of, record_of


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
    request: Request,
    metadata: Metadata,
    *,
    rules: Rules | None,
    rename: Rename | None,
) -> LoadChecks:
    """Compare the load of one rank with the save.

    Args:
        request: What the rank reads.
        metadata: The checkpoint's.
        rules: The user's rules.
        rename: The user's renaming.
    """
    state_dict, policy = request.state_dict, request.policy
    checks = LoadChecks(record_of(stored(metadata), metadata.state_dict_metadata))
    placed, renamed = request.placing.placed.values(), rename is not None
    checks.notes = [*lint(placed, renamed=renamed, waived=policy.waived)]
    if checks.record is not None:
        _compare_cuts(checks, checks.record, request.groups, policy)
        checks.faults += rename_faults(checks.record, state_dict, rename, policy)
    if world_size() > 1:
        excused = policy.excused(state_dict)
        asking = Asking(tensor_positions(metadata))
        # DTensors alone are complete over their meshes.
        _ask(asking, request.groups, excused, whole=rules is None and rename is None)
        renames = renames_of(rename)
        families = excused_families(checks.record, renames, metadata, excused)
        checks.asked = asking.packed(families, renames)
    return checks


def _compare_cuts(
    checks: LoadChecks, record: SaveRecord, groups: Iterable[Group], policy: Policy
) -> None:
    """Add a fault for each key that axes shard in another way than the save had it."""
    compared = waived = 0
    # Layouts of many shapes are cut in a few ways.
    cuts_by: dict[Any, Cuts] = {}
    latest: Any = None
    loaded: Cuts = ()
    for group in groups:
        if group.placed is None:
            continue
        place = group.placed.place
        key = place.sharding.cuts, place.axes
        if key != latest:  # to hash them is slow
            if key not in cuts_by:
                cuts_by[key] = _cuts_of(place)
            latest, loaded = key, cuts_by[key]
        # Of equal places most keys were cut alike, too.
        numbers = list(map(record.group_of.__getitem__, group.fqns))
        for number in dict.fromkeys(numbers):
            saved = record.groups[number]
            if not saved or not loaded:
                continue
            compared += numbers.count(number)
            differing = tuple(differences(saved, loaded, place.global_shape))
            for fqn, other in zip(group.fqns, numbers, strict=True) if differing else ():
                if other != number:
                    continue
                if policy.waives(fqn):
                    waived += 1
                else:
                    checks.faults += [one.fault(fqn, group.placed.rule) for one in differing]
    checks.compared = "declared as saved"
    if compared:
        count = compared - waived
        checks.compared += f": {count} key{'' if count == 1 else 's'}"
    if waived:
        checks.compared += f"; {waived} differ, waived"


def _cuts_of(place: Place) -> Cuts:
    return cuts_of(place.sharding, [axis.name for axis in place.axes])


def rename_faults(
    record: SaveRecord, fqns: Collection[str], rename: Rename | None, policy: Policy
) -> list[Fault]:
    """Return the totals of a rename that differ from those of the save.

    Args:
        record: The checkpoint's.
        fqns: The checkpoint's keys that the rank asks for.
        rename: The rank's renaming.
        policy: What is accepted.
    """
    faults = []
    totals = {numbered.pattern: numbered.total for numbered in numbering(rename)}
    for fault in total_faults(totals, record, fqns):
        finder = number_finder(fault.fqn)
        named = (fqn for fqn in fqns if finder.search(f".{fqn}"))
        if not policy.waives(fault.fqn) and not any(map(policy.excuses, named)):
            faults.append(fault)
    return faults


def renames_of(rename: Rename | None) -> tuple[SavedRename, ...]:
    """Return the renames that are in force on a rank."""
    return tuple([SavedRename(*step) for step in recorded(rename)])


def excused_families(
    record: SaveRecord | None,
    renames: Iterable[SavedRename],
    metadata: Metadata,
    excused: Collection[str],
) -> list[str]:
    """Return the families of numbers of which some may be left out, by keys that may be."""
    if not excused:
        return []
    families = Families(_declared(record, renames), metadata.state_dict_metadata)
    return sorted({family for fqn in excused for family, *_ in families.of(fqn)})


def _ask(asking: Asking, groups: Iterable[Group], excused: Collection[str], *, whole: bool) -> None:
    """Add what a rank asks for.

    Rows of optimizer state may be left out, since that of a row's parameter may be missing.

    Args:
        asking: Takes in the keys.
        groups: What the rank reads.
        excused: Keys of which parts may be left out.
        whole: Whether ranks ask for no parts of which others may ask for the rest.
    """
    positions, others = asking.positions, asking.others
    states: OptimizerStates | None = None
    for group in groups:
        if not isinstance(group.entry, TensorStorageMetadata):
            continue
        placed = group.placed
        if whole or placed is None or placed.place.is_whole:
            others += map(positions.__getitem__, group.fqns)
            continue
        rule = None if placed.is_stack else placed.rule
        form = Form.of(placed.place.sharding, _cuts_of(placed.place), rule)
        part = asking.group(form, placed.chunks)
        if form.dims:
            states = states or OptimizerStates(dict.fromkeys(positions, UNSEEN))
        for fqn in group.fqns:
            is_state = states is not None and form.dims and states.of(fqn) is not None
            (others if is_state or fqn in excused else part).append(positions[fqn])


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
    together, keys = AllAsked.of(asked), list(tensor_positions(metadata))
    if not complete:
        families = Families(_declared(record), metadata.state_dict_metadata)
        return local_number_faults(together, families, keys, renames)
    here = [step for steps in renames.values() for step in steps]
    families = Families(_declared(record, here), metadata.state_dict_metadata)
    faults = number_faults(together, families, record, keys, renames)
    faults += row_faults(together, record, keys, renames)
    # A rank that sent nothing may ask for what the others leave out.
    if not faults and world_size() <= sum(len(one.ranks) for one in together.requests):
        faults = box_faults(together, record, keys, renames)
    return faults


def _declared(
    record: SaveRecord | None, renames: Iterable[SavedRename] = ()
) -> Iterable[SavedRename]:
    """Return the renames of the save and of a load: either says where keys have numbers."""
    return dict.fromkeys([*(() if record is None else record.renames), *renames])


def tensor_positions(metadata: Metadata) -> dict[str, int]:
    """Return the checkpoint's keys that are tensors, in its order, and the position of each."""
    stored = metadata.state_dict_metadata
    entries = entries_at(stored, stored)
    is_tensor = [isinstance(entry, TensorStorageMetadata) for entry in entries]
    fqns = list(compress(stored, is_tensor))
    return dict(zip(fqns, range(len(fqns)), strict=True))
