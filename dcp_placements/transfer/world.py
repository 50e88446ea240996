"""What a user declares of a world that does not run: for a transfer, a rehearsal, a rewriting."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from dcp_placements.errors import CannotLook, PlacementError, format_names
from dcp_placements.rules.mesh import MeshCoordinate, mesh_at
from dcp_placements.rules.patterns import PlacementRules, Rules, compile_pattern

MeshAxes = dict[str, int]
"""Axis name to size, the outermost first."""

Fsdp = Sequence[str] | Mapping[str, Sequence[str]]
"""Axes over which FSDP cuts dim 0: of every tensor, or by pattern of its key."""

EVERY = "**"
"""The pattern of all keys."""


@dataclass(frozen=True, eq=False)
class TransferWorld:
    """One side of a ``transfer_plan``: its mesh, rules, shapes and names.

    Args:
        axes: The mesh: ranks by axis name, the last axis fastest in rank order.
        rules: Called with each rank's place in the mesh. Returns ``Placements``, or what
            ``Placements`` takes as rules. There are no DTensors, so the rules have to cover every
            axis that cuts a tensor but ``fsdp``; a rank holds all of a tensor without a rule. From
            the ``Renumber`` of its ``rename`` follows which experts and layers a rank holds.
            ``Stack``, ``Unstack`` and ``Split`` after it give the names by which the two worlds
            are matched.
        tensors: The whole tensors, by the keys of this world with global numbers: anything with a
            ``shape`` in elements and a ``dtype``, such as meta tensors. None, for a target: what
            the source's tensors become by their renames.
        fsdp: Axes over which FSDP cuts dim 0 of every tensor (of one dim or more), inside what
            the rules cut, as one flattened axis without the axes that a tensor's rule cuts over.
            Or such axes by pattern, as in ``PlacementRules``: ``{"experts": ["edp"], "**": ["edp",
            "ep"]}``; the first pattern that matches counts.
        ranks: The global rank at each place of the mesh; by default from 0 up. A rank of both
            worlds is one process, which copies what it already has. For two jobs without a common
            process, give the second other ranks.
        hosts: The host of each place of the mesh, or the number of consecutive ranks per host. If
            both worlds have hosts, a replica on the receiver's host is preferred.
        absent: Called with each rank's place in the mesh. Returns patterns, as in
            ``PlacementRules``, of keys that the rank has no part of and whose names have no
            number: the embedding on all pipeline stages but the first.

    Raises:
        PlacementError: A number of ranks or hosts that is not that of the mesh, or a rank twice.
    """

    axes: Mapping[str, int]
    rules: Callable[[MeshCoordinate], Any]
    tensors: Mapping[str, Any] | None = None
    fsdp: Fsdp = ()
    ranks: Sequence[int] | None = None
    hosts: Sequence[Hashable] | int | None = None
    absent: Callable[[MeshCoordinate], Sequence[str]] | None = None

    def __post_init__(self) -> None:
        size = prod(self.axes.values())
        for name in ("ranks", "hosts"):
            values = getattr(self, name)
            if values is not None and not isinstance(values, int) and len(values) != size:
                raise PlacementError(
                    f"{name}= has {len(values)} entries, but the mesh {dict(self.axes)} has {size} "
                    "places\n    way out:     one entry per place, the last axis fastest"
                )
        if isinstance(self.hosts, int) and self.hosts < 1:
            raise PlacementError(f"hosts={self.hosts} is no number of ranks per host")
        ranks = self.global_ranks
        if len(set(ranks)) != size or min(ranks) < 0:
            raise PlacementError("ranks= must be different numbers from 0 up, one per place")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.axes.values())

    @property
    def global_ranks(self) -> list[int]:
        """The global rank at each place of the mesh."""
        return list(range(self.size)) if self.ranks is None else list(self.ranks)

    @property
    def host_names(self) -> list[Hashable] | None:
        """The host at each place of the mesh; None if it is unknown."""
        if isinstance(self.hosts, int):
            return [rank // self.hosts for rank in self.global_ranks]
        return None if self.hosts is None else list(self.hosts)

    def rules_at(self, rank: int) -> tuple[Rules, Callable[[str], Any] | None, Mapping[str, str]]:
        """Return the rules, the rename and the waivers of a global rank.

        Raises:
            CannotLook: The rules cannot be had.
        """
        return rules_at(self.rules, dict(self.axes), self.global_ranks.index(rank))


def rules_at(
    function: Callable[..., Any], axes: MeshAxes, rank: int
) -> tuple[Rules, Callable[[str], Any] | None, Mapping[str, str]]:
    """Return one rank's rules, its rename if it has one, and its waivers.

    Args:
        function: ``mesh -> rules``: called with a ``MeshCoordinate`` of the rank. It returns
            ``Placements``, or what ``Placements`` takes as rules.
        axes: The mesh; ranks count in C order, the last axis fastest.
        rank: From 0.

    Raises:
        CannotLook: The function fails, or returns something else.
    """
    from dcp_placements.placements import Placements  # imports torch

    mesh = mesh_at(axes, rank)
    name = getattr(function, "__qualname__", function)
    try:
        rules = function(mesh)
    except PlacementError as error:
        # Such as an axis that the given mesh does not have.
        raise CannotLook(str(error)) from error
    except Exception as error:
        raise CannotLook(f"{name} fails for {mesh}: {type(error).__name__}: {error}") from error
    if not (isinstance(rules, Placements | Mapping) or callable(rules)):
        raise CannotLook(
            f"{name} returns {rules!r}, which are no rules\n"
            "    way out:     a function mesh -> Placements, or mesh -> PlacementRules"
        )
    try:
        placements = rules if isinstance(rules, Placements) else Placements(rules)
    except PlacementError as error:
        raise CannotLook(f"{name} returns rules that cannot be used: {error}") from error
    bound = PlacementRules({}) if placements.rules is None else placements.rules
    return bound, placements.rename, placements.waive


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether a key matches a pattern of ``PlacementRules``.

    Raises:
        CannotLook: The pattern has an empty component.
    """
    try:
        compiled = compile_pattern(pattern)
    except PlacementError as error:
        raise CannotLook(str(error)) from error
    return lambda fqn: fqn == pattern or compiled.search("." + fqn) is not None


def format_mesh_axes(axes: Mapping[str, int]) -> str:
    """Return axes as text: ``ep=8, edp=2``."""
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def matching_keys(pattern: str | None, keys: Iterable[str]) -> set[str]:
    """Return the keys that match a pattern of ``PlacementRules``; all of them for None.

    Raises:
        CannotLook: No key matches the pattern, or the pattern has an empty component.
    """
    if pattern is None:
        return set(keys)
    matches = matcher(pattern)
    matching = {key for key in keys if matches(key)}
    if not matching:
        there = format_names(sorted(keys), 3) or "none"
        raise CannotLook(f"no key matches {pattern!r}\n    there are:   {there}")
    return matching
