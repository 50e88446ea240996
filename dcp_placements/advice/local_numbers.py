"""Names that each rank counts from 0: experts, and the layers of pipeline stages.

Two ep ranks that hold two experts each of four call both of them ``experts.0`` and ``experts.1``.
Their contents differ along ep, so they are other experts; the declaration gives them their numbers
in the whole::

    head          "experts."
    numbers       {0, 1} on ep rank 0, {0, 1} on ep rank 1
    numbering     Numbered("experts.{}", "ep", (2, 2))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dcp_placements.advice.block import Numbered
from dcp_placements.advice.facts import FactsOfRanks, OnRanks, differing_axes
from dcp_placements.names.known_names import DATA_AXIS, EXPERT_AXIS, NAMES_EXPERT, TENSOR_AXIS
from dcp_placements.short_text import numbers_in, without_numbers

UNNAMED_AXIS = re.compile(r"^cut\d+$")
"""Axes that contents alone show, and that are like none with a usual name."""
PIPELINE_AXIS = re.compile(r"^(?:pp|pipe(?:line)?(?:_.*)?|stages?)$")

_OF_ANY_NAME = 3
_NEVER = 9
_IS_EQUAL = 10


NumberRows = Mapping[str, set[int]]
"""The numbers behind each name up to them, with the numbers that this has itself."""


def rows_by_head(names: Iterable[str]) -> dict[str, dict[str, set[int]]]:
    """Return the numbers in names, by the name up to them, with and without ``{}`` for its own.

    >>> rows_by_head(["layers.1.experts.0.w", "layers.1.experts.1.w"])["layers.{}.experts."]
    {'layers.1.experts.': {0, 1}}
    """
    rows: dict[str, dict[str, set[int]]] = {}
    for name in names:
        for head, number, _ in numbers_in(name):
            of_head = rows.setdefault(without_numbers(head), {})
            of_head.setdefault(head, set()).add(number)
    return rows


def numbers_of(rows: NumberRows) -> set[int]:
    """Return the numbers of all rows."""
    return set[int]().union(*rows.values())


def pattern_of_number(head: str) -> str:
    """Return the pattern of the number behind a head.

    >>> pattern_of_number("layers.{}.experts.")
    'layers.*.experts.{}'
    """
    return f"{head.replace('{}', '*')}{{}}"


class Continued(NamedTuple):
    """How numbers that ranks count from 0 may continue.

    Attributes:
        likely: The likeliest axis first.
        why_not: Why none is proposed, where contents show that ranks count other tensors; else
            empty.
        shared: A tensor-parallel axis along which all contents behind the head differ, as those of
            shards do, and of tensors that each rank counts for itself.
    """

    likely: Sequence[Numbered] = ()
    why_not: str = ""
    shared: Numbered | None = None


def continued_numbers(
    facts: FactsOfRanks,
    head: str,
    of_ranks: Mapping[int, NumberRows],
    total: int | None,
    tensors: Mapping[str, OnRanks],
) -> Continued:
    """Return how numbers that ranks count from 0 may continue.

    Args:
        facts: What all ranks hold.
        head: The names up to the numbers.
        of_ranks: By rank, its numbers behind the head.
        total: How many there are in the unsharded model; None where it is not known.
        tensors: By name, what ranks hold of it.
    """
    numbers_by_rank = {rank: numbers_of(rows) for rank, rows in of_ranks.items()}
    if not all(numbers == set(range(len(numbers))) for numbers in numbers_by_rank.values()):
        return Continued()
    under: list[OnRanks] = []
    outside: list[OnRanks] = []
    for name, held in tensors.items():
        (under if head in rows_by_head([name]) else outside).append(held)
    ranked: list[tuple[int, Numbered]] = []
    uneven: list[str] = []
    shared: Numbered | None = None
    for axis, named in facts.named.axes.items():
        counts: dict[int, set[int]] = {}
        # A pipeline stage may have no such numbers at all.
        lines = {
            facts.named.line(axis, rank) for rank, numbers in numbers_by_rank.items() if numbers
        }
        for rank, numbers in numbers_by_rank.items():
            if facts.named.line(axis, rank) in lines:
                counts.setdefault(named.positions[rank], set()).add(len(numbers))
        differ, _ = differing_axes(under, facts.named, [axis])
        # Names of one list are all other tensors, or all the same.
        is_apart = bool(differ) and not any(
            differing_axes([held], facts.named, [axis])[1] for held in under
        )
        penalty = _penalty(facts, head, axis, outside)
        is_even = len(counts) == named.size and all(len(each) == 1 for each in counts.values())
        if not is_even or not _has_equal_rows(facts, axis, of_ranks):
            if is_apart and penalty is not None and penalty < _OF_ANY_NAME:
                uneven.append(axis)
            continue
        row = tuple([counts[position].pop() for position in range(named.size)])
        if (total is not None and sum(row) != total) or sum(map(bool, row)) < 2:
            continue
        numbered = Numbered(pattern_of_number(head), axis, row)
        if total is None and (penalty is None or not is_apart):
            is_list = "{}" in head or NAMES_EXPERT.search(head) is not None
            if is_apart and is_list and TENSOR_AXIS.match(axis):
                shared = shared or numbered
            continue
        weight = (_NEVER if penalty is None else penalty) + (0 if differ else _IS_EQUAL)
        ranked.append((weight, numbered))
    ranked.sort(key=lambda pair: pair[0])
    # Where contents differ along one axis alone, that one has the numbers.
    likely = [numbered for weight, numbered in ranked if weight < _IS_EQUAL]
    likely = likely or [numbered for _, numbered in ranked]
    why_not = ""
    if uneven and not likely:
        why_not = (
            f"each rank along {uneven[0]} counts tensors of its own from 0, and not as many in "
            "each place: one Renumber per place, with the total= of that"
        )
    return Continued(likely, why_not, None if likely else shared)


def _has_equal_rows(facts: FactsOfRanks, axis: str, of_ranks: Mapping[int, NumberRows]) -> bool:
    """Whether each rank has as many numbers in each row, and those along an axis the same rows.

    Args:
        facts: What all ranks hold.
        axis: The axis.
        of_ranks: By rank, its numbers in each row.
    """
    rows_of_line: dict[Any, set[frozenset[str]]] = {}
    for rank, rows in of_ranks.items():
        if len(set(map(len, rows.values()))) > 1:
            return False
        if rows:
            line = facts.named.line(axis, rank)
            rows_of_line.setdefault(line, set()).add(frozenset(rows))
    return all(len(several) == 1 for several in rows_of_line.values())


def _penalty(facts: FactsOfRanks, head: str, axis: str, outside: Sequence[OnRanks]) -> int | None:
    """Return how unlikely numbers behind a head continue along an axis, by names; None for never.

    Args:
        facts: What all ranks hold.
        head: The names up to the numbers.
        axis: The axis.
        outside: The tensors that have no such number.
    """
    is_expert = NAMES_EXPERT.search(head) is not None
    is_first = "{}" not in head
    if PIPELINE_AXIS.match(axis):
        return 0 if is_first and not is_expert else None
    if is_expert:
        if EXPERT_AXIS.match(axis):
            return 0
        return None if TENSOR_AXIS.match(axis) else 2
    differ, equal = differing_axes(outside, facts.named, [axis])
    if EXPERT_AXIS.match(axis):
        return 1 if equal else None
    if TENSOR_AXIS.match(axis) or DATA_AXIS.match(axis) or UNNAMED_AXIS.match(axis):
        return None
    return _OF_ANY_NAME if is_first and not differ else None


def with_global_numbers(
    facts: FactsOfRanks, head: str, numbered: Numbered, tensors: Mapping[str, OnRanks]
) -> dict[str, OnRanks]:
    """Return tensors by the names that they have in the whole.

    Args:
        facts: What all ranks hold.
        head: The names up to the numbers.
        numbered: How these continue.
        tensors: By name, what ranks hold of it.
    """
    starts = [sum(numbered.counts[:position]) for position in range(len(numbered.counts))]
    positions = facts.named.axes[numbered.axis].positions
    renamed: dict[str, list[Any]] = {}
    for name, held in tensors.items():
        split = [each for each in numbers_in(name) if without_numbers(each[0]) == head]
        if not split:
            renamed.setdefault(name, []).extend(held)
            continue
        ((before, number, behind), *_) = split
        for rank, tensor in held:
            new_name = f"{before}{number + starts[positions[rank]]}{behind}"
            renamed.setdefault(new_name, []).append((rank, tensor))
    return dict(renamed)
