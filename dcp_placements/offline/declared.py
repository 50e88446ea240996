"""Rules, renames, meshes and patterns as the arguments of commands."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from dcp_placements.errors import CannotLook, format_names
from dcp_placements.transfer.world import MeshAxes, matcher

Rename = Callable[[str], Any]

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
    if function is None:
        raise CannotLook(f"{spec}: {module_name} has no function {path}")
    if not callable(function):
        raise CannotLook(f"{spec} is of type {type(function).__name__}, no function")
    return function  # type: ignore[no-any-return]


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
