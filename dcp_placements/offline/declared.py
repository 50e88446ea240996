"""Rules, renames, meshes and patterns as the arguments of commands."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from dcp_placements.errors import CannotLook, PlacementError, format_names
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.rules.patterns import PlacementRules, Rules, compile_pattern

Rename = Callable[[str], Any]
MeshAxes = dict[str, int]
"""Axis name to size, the outermost first."""

Progress = Callable[[int, int], None]
"""``(done, total)``, in bytes where nothing else is stated."""


def resolve(spec: str) -> Callable[..., Any]:
    """Return the function that ``MODULE:FUNC`` names; the working directory is searched first.

    Raises:
        CannotLook: There is no such module or function, or importing it fails.
    """
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise CannotLook(f"{spec!r} names no function: write MODULE:FUNC, as in my_rules:rules")
    if module_name.endswith(".py") or "/" in module_name:
        file = Path(module_name).with_suffix("")
        raise CannotLook(
            f"{spec!r} names a file, not a module\n"
            f"    way out:     {file.name}:{path}, in the directory {file.parent}, or with that in "
            "PYTHONPATH"
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Any = import_module(module_name)
    except Exception as error:
        # A user's module can raise anything while it is imported.
        raise CannotLook(
            f"{spec}: module {module_name} cannot be imported: {type(error).__name__}: {error}\n"
            f"    looked in:   {here} and the installed packages"
        ) from error
    for name in path.split("."):
        function = getattr(function, name, None)
    if not callable(function):
        raise CannotLook(f"{spec}: {module_name} has no function {path}")
    return function  # type: ignore[no-any-return]


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
    placements = rules if isinstance(rules, Placements) else Placements(rules)
    bound = PlacementRules({}) if placements.rules is None else placements.rules
    return bound, placements.rename, placements.waive


def parse_mesh(text: str) -> MeshAxes:
    """Return the axes of ``"ep=8,edp=2"``.

    >>> parse_mesh("ep=8,edp=2")
    {'ep': 8, 'edp': 2}

    Raises:
        CannotLook: It is not of that form, or names an axis twice.
    """
    axes: MeshAxes = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([1-9]\d*)\s*", part)
        if match is None or match[1] in axes:
            why = f"{part.strip()!r} is not axis=size with a size of 1 and more"
            if match is not None:
                why = f"it names axis {match[1]!r} twice"
            raise CannotLook(f"{text!r} is no mesh, {why}: write for instance ep=8,edp=2")
        axes[match[1]] = int(match[2])
    return axes


def format_mesh_axes(axes: Mapping[str, int]) -> str:
    """Return axes as text: ``ep=8, edp=2``."""
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def mesh_at(axes: MeshAxes, rank: int) -> MeshCoordinate:
    """Return the mesh seen from a rank; the last axis is the fastest.

    >>> mesh_at({"ep": 4, "edp": 2}, 3).get_coordinate()
    (1, 1)
    """
    coordinate: list[int] = []
    for size in reversed(axes.values()):
        rank, position = divmod(rank, size)
        coordinate.append(position)
    if rank:
        raise CannotLook(f"the mesh {axes} has no rank that high")
    return MeshCoordinate(tuple(axes), tuple(axes.values()), tuple(reversed(coordinate)))


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
