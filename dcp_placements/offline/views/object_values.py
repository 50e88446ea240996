"""Values of small objects: numbers, strings and containers of them; nothing is called."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from dcp_placements.offline.checkpoint import Checkpoint, StoredObject
from dcp_placements.storage.checked_load import saved_pickle
from dcp_placements.storage.safe_pickle import DTYPES, ORDERED_DICT, SafeUnpickler

MAX_NBYTES = 1 << 16
"""The longest record that is read."""

MAX_OBJECTS = 32
"""Objects whose values are read: at a URL each takes a request."""


MAX_DEPTH = 8
MAX_ELEMENTS = 1000


class _PlainUnpickler(SafeUnpickler):
    subject = "a plain value"
    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {
        **ORDERED_DICT,
        **{name: str(dtype) for name, dtype in DTYPES.items()},
    }


def plain_values(checkpoint: Checkpoint, objects: Iterable[StoredObject]) -> dict[str, Any]:
    """Return the values of the first small objects, by key.

    Objects that are large or broken, and those that hold other values, are left out.
    """
    values = {}
    small = [stored for stored in objects if stored.nbytes <= MAX_NBYTES]
    for stored in small[:MAX_OBJECTS]:
        try:
            record = checkpoint.read_record(stored, MAX_NBYTES)
            data, _ = saved_pickle(io.BytesIO(record or b""))
            value = _PlainUnpickler(data).load()
        except Exception:
            # A broken or hostile record can raise anything; verify reports it.
            continue
        if _is_small(value):
            values[stored.fqn] = value
    return values


def _is_small(value: Any) -> bool:
    """Whether a value is short to print; a file can refer to one list again and again."""
    count = 0
    todo = [(value, 0)]
    while todo:
        inner, depth = todo.pop()
        count += 1
        if count > MAX_ELEMENTS or depth > MAX_DEPTH:
            return False
        if isinstance(inner, Mapping):
            if not all(isinstance(key, str | int) for key in inner):
                return False  # JSON has no other keys
            todo += [(item, depth + 1) for item in inner.values()]
        elif isinstance(inner, list | tuple | set | frozenset):
            todo += [(item, depth + 1) for item in inner]
    return True
