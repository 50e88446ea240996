"""This rank's keys as the checkpoint's keys, and back.

A rank may know a tensor by a local name (the third of *its* experts). ``rename`` maps it to the
name that holds for the whole; rules, plans, messages and the file know that one only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp_placements.errors import Fault, PlacementError, raise_faults

Rename = Callable[[str], str]
Path = tuple[str | int, ...]


class RenameError(PlacementError):
    """Why a key has no name in the checkpoint; becomes a ``Fault`` with the key."""

    def __init__(self, headline: str, *details: str) -> None:
        super().__init__("\n    ".join((headline, *details)))
        self.headline = headline
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return RenameError, (self.headline, *self.details)


def rename_keys(
    state_dict: dict[str, Any], mappings: dict[str, Path], rename: Rename | None
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the flat state dict and its paths under the checkpoint's keys.

    Args:
        state_dict: Flat, with this rank's keys.
        mappings: Where each key stands in the nested dict.
        rename: This rank's key to the checkpoint's; None changes nothing.

    Raises:
        PlacementError: Two keys of this rank become one, or ``rename`` has no name for one.
    """
    if rename is None:
        return state_dict, mappings
    source: dict[str, str] = {}
    faults = []
    for key in state_dict:
        try:
            new = rename(key)
        except RenameError as error:
            faults.append(Fault(key, error.headline, error.details))
            continue
        if not isinstance(new, str):
            faults.append(Fault(key, f"rename() gave {new!r} for it, which is no string"))
        elif new in source:
            faults.append(
                Fault(
                    new,
                    f"rename() gives this one name to both {source[new]} and {key}",
                    ("way out:     map every key of a rank to a key of its own",),
                )
            )
        else:
            source[new] = key
    raise_faults("keys could not be renamed", faults)
    renamed = {new: state_dict[key] for new, key in source.items()}
    return renamed, {new: mappings[key] for new, key in source.items() if key in mappings}


def checkpoint_path(key: str, path: Path) -> Path:
    """Return where ``key`` stands in the nested dict that a reader of the checkpoint rebuilds.

    >>> checkpoint_path("model.layers.4.w", ("model", "layers.0.w"))
    ('model', 'layers.4.w')

    Parts of the path that the renaming left alone stay parts of their own.
    """
    if ".".join(map(str, path)) == key:
        return path
    head: list[str | int] = []
    rest = key
    for part in path[:-1]:
        if not rest.startswith(f"{part}."):
            break
        head.append(part)
        rest = rest[len(str(part)) + 1 :]
    tail: list[str | int] = []
    for part in reversed(path[len(head) + 1 :]):
        if not rest.endswith(f".{part}"):
            break
        tail.insert(0, part)
        rest = rest[: -len(str(part)) - 1]
    return (*head, rest, *tail)
