"""What a rank states beside its keys, in a save or a load, and what all ranks must agree on.

Most ranks state the same, so each different statement is unpacked once, and stands with its ranks.
Three ranks of a save, of which one was given another training step::

    stated   [Stated(Statement(step=7), [0, 2]), Stated(Statement(step=8), [1])]
    fault    this save: the ranks save different steps: 7 on ranks 0, 2; 8 on rank 1
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from dcp_placements.errors import Fault, raise_faults
from dcp_placements.names.recorded_numbers import Numberings
from dcp_placements.names.renames import Step
from dcp_placements.report import Shapes
from dcp_placements.rules.patterns import Matches

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank states beside its keys; the same on most ranks of a pipeline stage.

    All ranks must agree on the fields that ``MUST_AGREE`` names. A save and a load each fill the
    fields that they have; the others keep their defaults on all ranks.

    Attributes:
        matched: The number of keys that each rule matches on this rank.
        declared: The other patterns, of renames and waivers, and whether a key of this rank
            matches.
        renames: The renames in force.
        numberings: The lists of keys to which the renames give numbers.
        notes: Warnings of this rank.
        world: Number of ranks, which decides which groups have digests.
        has_whole: Whether its planner was given the unsharded model.
        digests: ``"sampled"``, ``"full"`` or ``"off"``, in a save.
        step: The training step of a save; None for none.
        directory: The directory that a save writes into; empty for none.
        shapes: The shapes that this rank saves, as in ``SaveReport``.
        checkpoint: The id of the save whose checkpoint a load reads; empty if it has none.
        declares: Whether a load has rules or renames. DTensors alone are complete over their
            meshes.
        reset: The optimizers and names of the parameters whose state a load resets.
        stateless: Parameters without optimizer state where others have it.
        unequal: Keys of which the rank has copies that differ and are saved anyway.
        lists: The parameters that each parameter group lists, by the group's key.
        axis_sizes: The sizes of the named mesh axes of this rank.
    """

    matched: Matches = field(default_factory=dict)
    declared: Matches = field(default_factory=dict)
    renames: tuple[Step, ...] = ()
    numberings: Numberings = field(default_factory=dict)
    notes: tuple[Fault, ...] = ()
    world: int = 1
    has_whole: bool = False
    digests: str = "off"
    step: int | None = None
    directory: str = ""
    checkpoint: str = ""
    declares: bool = False
    reset: tuple[tuple[str, str], ...] = ()
    shapes: Mapping[str, tuple[Shapes, ...]] = field(default_factory=dict)
    stateless: tuple[str, ...] = ()
    unequal: tuple[str, ...] = ()
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    axis_sizes: Mapping[str, int] = field(default_factory=dict)

    def packed(self) -> bytes:
        """Return the statement as bytes to be sent."""
        return zlib.compress(pickle.dumps(self, protocol=5), 6)


class Stated(NamedTuple):
    """A statement, and the ranks that sent it.

    Attributes:
        statement: The statement.
        ranks: The ranks, in the order of the plans.
    """

    statement: Statement
    ranks: list[int]


def stated(sent: Iterable[tuple[int, bytes]]) -> dict[bytes, Stated]:
    """Return the different statements by their packed form.

    Args:
        sent: Each rank, and its packed statement.
    """
    different: dict[bytes, Stated] = {}
    for rank, packed in sent:
        if packed not in different:
            different[packed] = Stated(pickle.loads(zlib.decompress(packed)), [])
        different[packed].ranks.append(rank)
    return different


def listed_parameters(different: Iterable[Stated]) -> dict[str, list[str]]:
    """Return the parameters that each parameter group lists on any rank, by the group's key.

    Args:
        different: The different statements of a save.
    """
    lists: dict[str, dict[str, None]] = {}
    for statement, _ in different:
        for fqn, names in statement.lists.items():
            lists.setdefault(fqn, {}).update(dict.fromkeys(names))
    return {fqn: [*names] for fqn, names in lists.items()}


def messages_of(what: str, plans: Sequence[Any], kind: type[T]) -> list[T]:
    """Return what the ranks sent with their plans.

    That all ranks used a planner of this package is no row of ``MUST_AGREE``: another planner sends
    no statement.

    Args:
        what: ``"save"`` or ``"load"``.
        plans: The plans of all ranks.
        kind: The class of what a planner of this package sends.

    Raises:
        PlacementError: Another planner made some of the plans.
    """
    sent = [plan.planner_data for plan in plans]
    ours = [isinstance(message, kind) for message in sent]
    if not all(ours):
        fault = Fault(
            f"this {what}",
            f"{ours.count(False)} of {len(ours)} ranks planned it with another planner, the first "
            f"at position {ours.index(False)}",
            ("way out:     the same planner on every rank; installed() on every rank",),
        )
        raise_faults(f"the ranks do not {what} together", [fault])
    return sent
