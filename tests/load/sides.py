"""Ranks that save and load: what they hold of true tensors, and how they declare it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from hazard_scenes import Caught, assert_same, blank, refused, without_warning

from dcp_placements import (
    CheckpointPlacement,
    LoadReport,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World

Held = Callable[[FakeMesh], dict[str, Any]]


@dataclass(frozen=True)
class Side:
    """Ranks that save or load.

    Attributes:
        axes: Of their mesh.
        held: What a rank holds of the true tensors.
        placements: What the rule says, by axis; a function of the mesh where ranks differ.
        key: The pattern of the rule.
        shapes: Of the rule.
        mesh: The mesh of the rule, as a function of that of the ranks, where it is another one.
        rename: Of the planners; a function of the mesh where ranks differ.
    """

    axes: dict[str, int]
    held: Held
    placements: Any = None
    key: str = "w"
    shapes: dict[str, Any] = field(default_factory=dict)
    mesh: Callable[[FakeMesh], Any] | None = None
    rename: Any = None

    @property
    def world(self) -> World:
        return World(prod(self.axes.values()))

    def state(self, rank: int) -> dict[str, Any]:
        return self.held(self.world.mesh(rank, **self.axes))

    def rules(self, rank: int) -> PlacementRules | None:
        mesh = self.world.mesh(rank, **self.axes)
        placements = self.placements(mesh) if callable(self.placements) else self.placements
        if placements is None:
            return None
        of_rule = mesh if self.mesh is None else self.mesh(mesh)
        return PlacementRules({self.key: CheckpointPlacement(of_rule, placements, **self.shapes)})

    def planner(self, make: Any, rank: int, **options: Any) -> Any:
        rename = self.rename
        if isinstance(rename, FunctionType):
            rename = rename(self.world.mesh(rank, **self.axes))
        return make(self.rules(rank), rename=rename, **options)

    def saves(self, path: Path) -> None:
        with without_warning():
            self.world.save(path, self.state, lambda rank: self.planner(PlacementSavePlanner, rank))

    def loads(self, path: Path, states: Any = None, **options: Any) -> list[LoadReport]:
        states = states or [blank(self.state(rank)) for rank in range(self.world.size)]
        planners = [
            self.planner(PlacementLoadPlanner, rank, **options) for rank in range(self.world.size)
        ]
        self.world.load(path, states.__getitem__, planners.__getitem__)
        return [planner.report for planner in planners]

    def loads_right(self, path: Path, **options: Any) -> list[LoadReport]:
        """Assert that every rank finds the part of the true tensors that is its own."""
        states = [blank(self.state(rank)) for rank in range(self.world.size)]
        with without_warning():
            reports = self.loads(path, states, **options)
        for rank, found in enumerate(states):
            assert_same(found, self.state(rank))
        return reports

    def is_refused(self, path: Path, *facts: str) -> Caught:
        """Assert that a load is refused, and reads nothing."""
        states = [blank(self.state(rank)) for rank in range(self.world.size)]
        with refused() as refusal:
            self.loads(path, states)
        refusal.says(*facts)
        assert_same(dict(enumerate(states)), blank(dict(enumerate(states))))
        return refusal


def at(mesh: FakeMesh, axis: str) -> int:
    return int(mesh[axis].get_coordinate()[0])


def rows(whole: torch.Tensor, *axes: str, dim: int = 0, key: str = "w") -> Held:
    """Return a tensor that these axes cut plainly, one after the other."""

    def held(mesh: FakeMesh) -> dict[str, Any]:
        local = whole
        for axis in axes:
            local = local.chunk(mesh[axis].size(), dim)[at(mesh, axis)]
        return {key: local.clone()}

    return held


def parts_of(parts: Any, axis: str, dim: int = 0) -> Held:
    """Return several tensors in one, of each of which the axis has a piece."""

    def held(mesh: FakeMesh) -> dict[str, Any]:
        pieces = [part.chunk(mesh[axis].size(), dim)[at(mesh, axis)] for part in parts]
        return {"w": torch.cat(pieces, dim)}

    return held


def dtensor(held: Held, whole: torch.Tensor, *placements: Any, over: str | None = None) -> Held:
    """Return what a DTensor has that says that its mesh, or one axis of it, cuts it so."""

    def of(mesh: FakeMesh) -> dict[str, Any]:
        own = mesh if over is None else mesh[over]
        return {k: FakeDTensor(t, own, placements, whole.shape) for k, t in held(mesh).items()}

    return of


def distributed(*placements: Any, over: str | None = None, **wholes: torch.Tensor) -> Held:
    """Return DTensors of whole tensors."""

    def held(mesh: FakeMesh) -> dict[str, Any]:
        own = mesh if over is None else mesh[over]
        return {k: FakeDTensor.distribute(t, own, placements) for k, t in wholes.items()}

    return held
