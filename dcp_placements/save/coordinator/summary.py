"""The report on a save: what refuses it, what is only warned of."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping

from dcp_placements._torch import is_in_group, world_size
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault, format_faults, format_nbytes, raise_faults
from dcp_placements.report import SaveReport, key_report
from dcp_placements.rules.matches import matched_nowhere, names_of, unmatched_faults
from dcp_placements.save.coordinator.global_plan import Coordinator
from dcp_placements.table.table import OBJECT, Holding

logger = logging.getLogger(__name__)


def judged(
    coordinator: Coordinator,
    waived: Mapping[str, str],
    *,
    strict: bool,
    merged_later: bool = False,
    in_group: int | None = None,
) -> SaveReport:
    """Return the report on a save by all ranks; refuse what cannot be saved, and warn of notes.

    Args:
        coordinator: It has planned.
        waived: Patterns whose lint warnings were silenced, with the reason.
        strict: Whether replicas that differ refuse the save.
        merged_later: Whether the writer gave this rank file names of its own, as without
            collectives: each rank then writes its own metadata, to be merged.

    Raises:
        PlacementError: All faults.
    """
    faults = list(coordinator.faults)
    # Notes of several ranks with one text stand once.
    of_ranks = dict.fromkeys(note for one in coordinator.statements for note in one.notes)
    notes = [*coordinator.notes, *of_ranks]
    if coordinator.uncompared:
        notes.append(_uncompared(coordinator.uncompared))
    (faults if strict else notes).extend(coordinator.conflicts)
    ranks, world = len(coordinator.plans), world_size()
    report = summarise(coordinator, waived)
    # A rank that plans alone cannot see what the patterns match on others.
    declared = [one.declared for one in coordinator.statements]
    unmatched = matched_nowhere(declared) if coordinator.complete else ()
    report.unmatched = names_of(unmatched)
    if unmatched:
        # Listed with the faults, too: a mistake in a pattern is their likely cause.
        fqns = [fqn for table in coordinator.world.tables for fqn in table.fqns]
        (faults or notes).extend(unmatched_faults(unmatched, list(dict.fromkeys(fqns))))
    raise_faults("the ranks' plans do not make a checkpoint", faults)
    if 1 < ranks < world:
        notes.append(_too_few(ranks, world))
    if not coordinator.complete and not merged_later:
        notes += _by_itself(coordinator.plans[0].rank, world, report)
    if in_group is not None:
        notes.append(_in_group(coordinator.plans[0].rank, world, in_group))
    notes += _without_group(world)
    report.warnings = tuple(map(str, notes))
    if notes:
        warnings.warn(format_faults("look at this save", notes, "note"), stacklevel=2)
    if not coordinator.complete:
        # Asked for (use_collectives=False, no_dist=True): logged, no warning.
        logger.info("%s", _alone(world))
        report.warnings += (str(_alone(world)),)
    return report


def summarise(coordinator: Coordinator, waived: Mapping[str, str]) -> SaveReport:
    """Return what all ranks together are about to save."""
    rules: dict[str, int] = {}
    statements = coordinator.statements
    for statement in statements:
        for rule, count in statement.matched.items():
            rules[rule] = max(rules.get(rule, 0), count)
    return SaveReport(
        ranks=len(coordinator.plans),
        keys=coordinator.keys,
        objects=tuple(coordinator.objects),
        rules=rules,
        partial_keys=coordinator.partial,
        stateless=tuple(dict.fromkeys(name for one in statements for name in one.stateless)),
        waived=dict(waived),
    )


def summarise_rank(holding: Holding, placing: Placing, waived: Mapping[str, str]) -> SaveReport:
    """Return what one rank holds, for a rank that sees no plan but its own."""
    report = SaveReport(ranks=1, rules=dict(placing.matched), waived=dict(waived))
    key_of = {}
    for held in holding.groups:
        if held.group.kind != OBJECT:
            boxes = set(held.boxes)
            numel = sum(box.numel for box in boxes)
            of_group = key_report(held.group.shape, held.group.dtype, len(boxes), numel, numel)
            key_of.update(dict.fromkeys(held.fqns, of_group))
    report.keys = {fqn: key_of[fqn] for fqn in holding.fqns if fqn in key_of}
    report.objects = tuple([fqn for fqn in holding.fqns if fqn not in key_of])
    return report


def _uncompared(keys: int) -> Fault:
    return Fault(
        "this save",
        f"replicas of {keys} keys are not compared",
        (
            "reason:      in a world of this size digests are folded, and the ranks that hold "
            "these keys hold other keys beside them",
            "way out:     dcp_placements.check(state_dict, rules) compares key by key",
        ),
    )


def _alone(world: int) -> Fault:
    return Fault(
        "this save",
        f"planned by 1 of {world} ranks, by itself",
        (
            "reason:      with use_collectives=False, no_dist=True or a group of one nobody sees "
            "what the others hold: replicas are not compared, and what is missing is not found",
        ),
    )


def _by_itself(rank: int, world: int, report: SaveReport) -> Iterator[Fault]:
    """Yield that a rank saves alone what others hold, too, or where others write."""
    lacking = [fqn for fqn, key in report.keys.items() if key.unique_nbytes < key.whole_nbytes]
    details = []
    if lacking:
        key = report.keys[lacking[0]]
        details.append(
            f"missing:     parts of {len(lacking)} of {len(report.keys)} tensors, as of "
            f"{lacking[0]}: {format_nbytes(key.unique_nbytes)} of "
            f"{format_nbytes(key.whole_nbytes)} are saved"
        )
    # Rank 0 alone with whole tensors is a complete checkpoint.
    if lacking or rank:
        yield Fault(
            "this save",
            f"rank {rank} of {world} ranks saves by itself",
            (
                *details,
                "reason:      the checkpoint has what this rank holds; other ranks that save into "
                "the same directory overwrite its files and its .metadata",
                "likely:      no_dist=True, or a process group of one rank",
                "way out:     dcp.save on all ranks, without no_dist=True; or "
                "use_collectives=False; or a directory per rank",
            ),
        )


def _without_group(world: int) -> Iterator[Fault]:
    """Yield that a launcher started several processes, and this one does not know of the others."""
    started = os.environ.get("WORLD_SIZE", "")
    if world == 1 and started.isdigit() and int(started) > 1 and not is_in_group():
        yield Fault(
            "this save",
            f"one process saves by itself, but the launcher started {started} (WORLD_SIZE)",
            (
                "reason:      without a process group each process is rank 0 of 1, and they "
                "overwrite each other's files",
                "way out:     torch.distributed.init_process_group() before the save",
            ),
        )


def _in_group(rank: int, world: int, in_group: int) -> Fault:
    return Fault(
        "this save",
        f"rank {rank} of {world} ranks saves as rank {in_group} of a process group",
        (
            "reason:      what only ranks outside of the group hold is not saved; another group "
            "that saves into the same directory overwrites the files of this one",
            "way out:     save with all ranks, or give every group a directory of its own",
        ),
    )


def _too_few(ranks: int, world: int) -> Fault:
    return Fault(
        "this save",
        f"{ranks} of {world} ranks take part",
        (
            "reason:      what only the others hold is not saved; and if they save into the same "
            "directory, their files take the place of these",
            "way out:     save with all ranks, or give every group a directory of its own",
        ),
    )
