"""What tests of presets share: a save in one world, read back whole, and loaded in another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from hazard_scenes import assert_same

from dcp_placements import Placements, PlacementSavePlanner
from dcp_placements.testing import World

StateDict = Callable[[int], dict[str, Any]]


def filled(names: Iterable[str], shapes: Callable[[str], tuple[int, ...]]) -> dict[str, Any]:
    """Return a whole tensor per name; no two elements of all of them are equal."""
    whole, start = {}, 0
    for name in names:
        shape = shapes(name)
        numel = torch.Size(shape).numel()
        whole[name] = torch.arange(start, start + numel, dtype=torch.float64).reshape(shape)
        start += numel
    return whole


def save(
    path: Path, world: World, state_dict: StateDict, preset: Callable[[int], Placements]
) -> PlacementSavePlanner:
    """Save in ``world``, without a single warning; return the coordinator's planner."""

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = world.save(path, state_dict, lambda rank: preset(rank).save_planner())[0]
    assert isinstance(first, PlacementSavePlanner)
    assert first.report.warnings == ()
    return first


def load(path: Path, world: World, wanted: StateDict, preset: Callable[[int], Placements]) -> None:
    """Load into tensors of -1 in ``world`` without a warning, and compare with what is right."""

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = world.load(
            path, lambda rank: _emptied(wanted(rank)), lambda rank: preset(rank).load_planner()
        )
    for rank in range(world.size):
        assert_same(_local(found[rank]), _local(wanted(rank)))


def _emptied(state_dict: dict[str, Any]) -> dict[str, Any]:
    for tensor in _local(state_dict).values():
        tensor.fill_(-1)
    return state_dict


def _local(state_dict: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in state_dict.items():
        if isinstance(value, dict):
            found |= _local(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value.to_local() if hasattr(value, "to_local") else value
    return found
