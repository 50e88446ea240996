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
from typing import Any

from dcp_placements.advice.block import Numbered
from dcp_placements.advice.facts import FactsOfRanks, OnRanks, differing_axes
from dcp_placements.names.known_names import DATA_AXIS, EXPERT_AXIS, TENSOR_AXIS
from dcp_placements.short_text import numbers_in, without_numbers

PIPELINE_AXIS = re.compile(r"^(?:pp|pipe(?:line)?(?:_.*)?|stages?)$")
NAME_OF_EXPERTS = re.compile(r"(?<!shared_)expert(?!_bias)")

_NEVER = 9
_IS_EQUAL = 10


def numbers_by_head(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers in names, by the name up to them, with ``{}`` for others in that.

    >>> numbers_by_head(["layers.0.w", "layers.1.w"])
    {'layers.': {0, 1}}
    """
    numbers: dict[str, set[int]] = {}
    for name in names:
        for head, number, _ in numbers_in(name):
            numbers.setdefault(without_numbers(head), set()).add(number)
    return numbers


def pattern_of_number(head: str) -> str:
    """Return the pattern of the number behind a head.

    >>> pattern_of_number("layers.{}.experts.")
    'layers.*.experts.{}'
    """
    return f"{head.replace('{}', '*')}{{}}"


def likely_numberings(
    facts: FactsOfRanks,
    head: str,
    of_ranks: Mapping[int, set[int]],
    total: int | None,
    tensors: Mapping[str, OnRanks],
) -> list[Numbered]:
    """Return how numbers that ranks count from 0 may continue, the likeliest axis first.

    Args:
        facts: What all ranks hold.
        head: The names up to the numbers.
        of_ranks: By rank, its numbers behind the head.
        total: How many there are in the unsharded model; None where it is not known.
        tensors: By name, what ranks hold of it.
    """
    if not all(numbers == set(range(len(numbers))) for numbers in of_ranks.values()):
        return []
    under: list[OnRanks] = []
    outside: list[OnRanks] = []
    for name, held in tensors.items():
        (under if head in numbers_by_head([name]) else outside).append(held)
    ranked: list[tuple[int, Numbered]] = []
    for axis, named in facts.named.axes.items():
        counts: dict[int, set[int]] = {}
        for rank, numbers in of_ranks.items():
            counts.setdefault(named.positions[rank], set()).add(len(numbers))
        if len(counts) < named.size or any(len(several) > 1 for several in counts.values()):
            continue
        row = tuple([counts[position].pop() for position in range(named.size)])
        if (total is not None and sum(row) != total) or sum(map(bool, row)) < 2:
            continue
        differ, _ = differing_axes(under, facts.named, [axis])
        penalty = _penalty(facts, head, axis, outside)
        if total is None:
            # Names of one list are all other tensors, or all the same.
            is_mixed = any(differing_axes([held], facts.named, [axis])[1] for held in under)
            if penalty is None or not differ or is_mixed:
                continue
        weight = (_NEVER if penalty is None else penalty) + (0 if differ else _IS_EQUAL)
        ranked.append((weight, Numbered(pattern_of_number(head), axis, row)))
    ranked.sort(key=lambda pair: pair[0])
    # Where contents differ along one axis alone, that one has the numbers.
    likely = [numbered for weight, numbered in ranked if weight < _IS_EQUAL]
    return likely or [numbered for _, numbered in ranked]


def _penalty(facts: FactsOfRanks, head: str, axis: str, outside: Sequence[OnRanks]) -> int | None:
    """Return how unlikely numbers behind a head continue along an axis, by names; None for never.

    Args:
        facts: What all ranks hold.
        head: The names up to the numbers.
        axis: The axis.
        outside: The tensors that have no such number.
    """
    is_expert = NAME_OF_EXPERTS.search(head) is not None
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
    if TENSOR_AXIS.match(axis) or DATA_AXIS.match(axis):
        return None
    return 3 if is_first and not differ else None


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
