"""Axes that no ``DeviceMesh`` of a program has, by the ranks that hold other contents.

A program may cut its tensors along process groups alone, as Megatron's does. Ranks along such a
group are evenly spaced, so a size and a stride describe it. Four ranks, of which 0 and 1 hold one
half of the experts, and 2 and 3 the other, while 0 and 2 have one half of each other weight::

    experts     A A B B       size 2, stride 2: ep
    weights     C D C D       size 2, stride 1: tp

Where vectors such as those of norms differ, too, copies have drifted apart, and there is no axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

from dcp_placements.advice.facts import FactsOfRanks
from dcp_placements.names.known_names import NAMES_EXPERT
from dcp_placements.rules.named_axes import NamedAxes, NamedAxis
from dcp_placements.short_text import without_numbers

_MOST_COMPARED = 2_000_000
"""HeldContents that are compared: keys times ranks times spacings."""

_KEYS_PER_PATTERN = 4


_TP = "tp"


class Spacing(NamedTuple):
    """Ranks along an axis: ``Spacing(2, 1)`` of [0, 1] and [2, 3].

    Attributes:
        size: Ranks along it.
        stride: From one to the next.
    """

    size: int
    stride: int

    def position(self, rank: int) -> int:
        """Return where a rank is along the axis."""
        return rank // self.stride % self.size


HeldContents = Sequence[tuple[int, Any, Any]]
"""By rank what part of a tensor it holds, and the digest of that."""


def with_unnamed_axes(facts: FactsOfRanks) -> tuple[FactsOfRanks, dict[str, int]]:
    """Return the facts with the axes that contents show, and the strides of these by name.

    Args:
        facts: What all ranks hold.

    Returns:
        No strides where contents show no such axes.
    """
    spacings = dict(_spacings(facts))
    bounds = sorted({bound for size, stride in spacings for bound in (stride, size * stride)})
    if any(larger % smaller for smaller, larger in pairwise(bounds)):
        return facts, {}
    axes: dict[str, NamedAxis] = {}
    strides: dict[str, int] = {}
    for stride, stop in reversed([*pairwise(bounds)]):
        names = {
            name
            for spacing, of_spacing in spacings.items()
            if spacing.stride <= stride and stop <= spacing.size * spacing.stride
            for name in of_spacing
        }
        axis = _axis(Spacing(stop // stride, stride), facts.ranks)
        is_named = any(axis.positions == other.positions for other in facts.named.axes.values())
        if names and not is_named:
            name = _name_of_axis(names, axis, facts, {*facts.named.axes, *axes})
            if name == _TP and any(_is_uncut(each, facts) for each in names):
                return facts, {}  # copies have drifted apart
            axes[name], strides[name] = axis, stride
    named = NamedAxes({**facts.named.axes, **axes}, (*facts.named.meshes, tuple(axes)))
    return FactsOfRanks(
        facts.world, facts.digests, named, facts.ranks, facts.lists, facts.kind
    ), strides


def _axis(spacing: Spacing, ranks: Sequence[int]) -> NamedAxis:
    lines: dict[int, list[int]] = {}
    for rank in ranks:
        first = rank - spacing.position(rank) * spacing.stride
        lines.setdefault(first, []).append(rank)
    line_of = {rank: tuple(line) for line in lines.values() for rank in line}
    positions = tuple(map(spacing.position, ranks))
    return NamedAxis(spacing.size, positions, tuple([line_of[rank] for rank in ranks]))


def _name_of_axis(
    names: Iterable[str], axis: NamedAxis, facts: FactsOfRanks, used: set[str]
) -> str:
    """Return a name for an axis: ep of experts alone, pp of stages with other keys, else tp.

    Args:
        names: The tensors that have other contents along it.
        axis: The axis.
        facts: What all ranks hold.
        used: Names of other axes.
    """
    likely = _TP
    if all(map(NAMES_EXPERT.search, names)):
        likely = "ep"
    elif any(
        len({axis.positions[p] for p in places}) < axis.size for _, places in facts.keys_by_ranks
    ):
        likely = "pp"
    numbered = [f"cut{number}" for number in range(len(used) + 1)]
    return next(name for name in [likely, *numbered] if name not in used)


def _is_uncut(name: str, facts: FactsOfRanks) -> bool:
    """Whether a tensor is a vector that no tensor parallelism cuts, as that of a norm."""
    is_vector = len(facts.shape_of(name)) == 1 and not name.endswith("bias")
    return is_vector and facts.states.of(name) is None


def _spacings(facts: FactsOfRanks) -> Iterator[tuple[Spacing, list[str]]]:
    """Yield the axes along which contents differ, each with the names of the tensors."""
    by_pattern: dict[str, list[str]] = {}
    for name in facts.tensors:
        by_pattern.setdefault(without_numbers(name), []).append(name)
    names_of: dict[HeldContents, list[str]] = {}
    for names in by_pattern.values():
        for name in names[:_KEYS_PER_PATTERN]:
            held = facts.held(name)
            labels: dict[Any, int] = {}
            contents: HeldContents = tuple(
                [
                    (facts.ranks[place], tensor.part, labels.setdefault(tensor.digest, len(labels)))
                    for place, tensor in held
                    if tensor.digest is not None
                ]
            )
            names_of.setdefault(contents, []).append(name)
    count = len(facts.ranks)
    single = [
        Spacing(size, stride)
        for stride in _divisors(count)
        for size in _divisors(count // stride)
        if size > 1
    ]
    # Two where other axes lie between them, along which contents are equal.
    double = [
        (outer, inner)
        for outer, inner in product(single, single)
        if outer.stride % (inner.size * inner.stride) == 0
        if outer.stride > inner.size * inner.stride
    ]
    possible = sorted(
        [*[(each,) for each in single], *double],
        key=lambda several: (prod([each.size for each in several]), len(several), several),
    )
    if sum(map(len, names_of)) * len(possible) > _MOST_COMPARED:
        return
    names_along: dict[Spacing, list[str]] = {}
    for contents, names in names_of.items():
        if _differ(contents):
            several = next((each for each in possible if _explains(each, contents)), ())
            for spacing in several:
                names_along.setdefault(spacing, []).extend(names)
    yield from names_along.items()


def _divisors(count: int) -> list[int]:
    return [divisor for divisor in range(1, count + 1) if count % divisor == 0]


def _differ(contents: HeldContents) -> bool:
    """Whether two ranks hold one part with other contents."""
    digest_of: dict[Any, Any] = {}
    return any(digest_of.setdefault(part, digest) != digest for _, part, digest in contents)


def _explains(several: Sequence[Spacing], contents: HeldContents) -> bool:
    """Whether ranks hold equal contents of one part exactly where they are at one position."""
    by_place: dict[Any, Any] = {}
    for rank, part, digest in contents:
        place = part, *[spacing.position(rank) for spacing in several]
        if by_place.setdefault(place, digest) != digest:
            return False
    return len({(part, digest) for (part, *_), digest in by_place.items()}) == len(by_place)
