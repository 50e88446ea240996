"""Results as the plain values that ``--json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from dcp_placements.layout.sharding import Box


def to_json(result: Any) -> Any:
    """Return a result as dicts, lists and scalars, under the names that the guide of cli lists.

    A dataclass becomes a dict of its fields, and any class with ``JSON`` of what that lists:
    attributes separated by spaces, each as ``attribute`` or ``key=attribute``. ``nbytes`` becomes
    ``bytes``. A field ``box`` gives ``offsets`` and ``sizes`` to the dict it is in. Floats that are
    not finite become strings.

    Args:
        result: What a function of ``dcp_placements.offline`` returns, or a part of it.
    """
    listed = getattr(result, "JSON", "")
    if listed or is_dataclass(result):
        values: dict[str, Any] = {}
        listed = listed or " ".join([one.name for one in fields(result)])
        for name in listed.split():
            key, _, attribute = name.partition("=")
            value = to_json(getattr(result, attribute or key))
            values |= value if key == "box" else {key.replace("nbytes", "bytes"): value}
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
