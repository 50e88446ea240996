"""Results as the plain values that ``--json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Any

from dcp_placements.layout.sharding import Box


def to_json(result: Any) -> Any:
    """Return a result as dicts, lists and scalars, under the names that the guide of cli lists.

    A dataclass becomes a dict of its fields, or of what its ``JSON`` lists: attributes separated
    by spaces, each as ``attribute``, ``key=attribute``, or ``key?=attribute``, which is left out
    where it is None. ``nbytes`` becomes ``bytes``. A field ``box`` gives ``offsets`` and ``sizes``
    to the dict it is in. Floats that are not finite become strings.

    Args:
        result: What a function of ``dcp_placements.offline`` returns, or a part of it.
    """
    if is_dataclass(result):
        values: dict[str, Any] = {}
        for key, attribute, is_optional in _names(result.__class__):
            value = to_json(getattr(result, attribute))
            if key == "box":
                values |= value
            elif value is not None or not is_optional:
                values[key] = value
        return values
    if isinstance(result, Box):
        return {"offsets": list(result.offsets), "sizes": list(result.sizes)}
    if isinstance(result, Mapping):
        return {key: to_json(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [to_json(value) for value in result]
    if isinstance(result, float) and not isfinite(result):
        return str(result)
    return result


@cache
def _names(kind: type[Any]) -> tuple[tuple[str, str, bool], ...]:
    """Return ``(key, attribute, whether None leaves it out)`` of each entry of a class."""
    listed = getattr(kind, "JSON", None)
    names = listed.split() if listed else [field.name for field in fields(kind)]
    entries = []
    for name in names:
        key, _, attribute = name.partition("=")
        bare = key.removesuffix("?")
        entries.append((bare.replace("nbytes", "bytes"), attribute or bare, key != bare))
    return tuple(entries)
