"""A state dict flat, under the checkpoint's keys, and the paths of its values.

A rank may have a local name for a tensor (the third of *its* experts). ``rename`` maps it to the
global name; rules, plans, messages and the file use only that one. ``{"model": {"experts.0.w":
w}}`` becomes ``{"model.experts.3.w": w}``, with the path ``("model", "experts.0.w")``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from dcp_placements.errors import (
    CannotPlace,
    Fault,
    raise_faults,
    raised_line,
)
from dcp_placements.names.recorded_numbers import NumberedKey
from dcp_placements.names.rename_results import (
    OfWhole,
    Parts,
    Rename,
    Renamed,
    Row,
    Rows,
    Transposed,
    texts_of,
)
from dcp_placements.names.renames import apply, steps
from dcp_placements.rules.patterns import Matches

Path = tuple[str | int, ...]


Name = TypeVar("Name", bound=str | Row | Rows | Parts | Transposed, covariant=True)


class RenamedValue(NamedTuple, Generic[Name]):
    """A value of this rank that the rename turns into another tensor, several, or one of several.

    Attributes:
        name: The answer of the rename.
        key: This rank's key.
        value: The value.
        path: Its path in the nested dict.
    """

    name: Name
    key: str
    value: Any
    path: Path | None


@dataclass(slots=True)
class Reshaped:
    """The values of this rank that a rename turns into other tensors, by the name in rules.

    Attributes:
        rows: The values that become rows of a stack, by the stack's key in the checkpoint.
        wholes: The value that becomes one tensor per row, or per part, or is transposed, by its
            name in rules.
        several: Where several values have one name in the checkpoint, all of them, by their name
            in rules. A load fills each.
    """

    rows: dict[str, list[RenamedValue[Row]]] = field(default_factory=dict)
    wholes: dict[str, RenamedValue[OfWhole]] = field(default_factory=dict)
    several: dict[str, list[RenamedValue[str | OfWhole]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.wholes or self.several)


def check_texts(state_dict: Mapping[Any, Any]) -> None:
    """Refuse keys with the same text, such as ``0`` and ``"0"``: a checkpoint's keys are texts.

    Raises:
        PlacementError: There are such keys.
    """
    keys = {str(key): key for key in state_dict}
    twice = [key for key in state_dict if keys[str(key)] is not key]
    raise_faults(
        "the state dict has keys that are one in a checkpoint",
        [
            Fault(
                str(key),
                f"{key!r} and {keys[str(key)]!r} are keys of one dict",
                ("way out:     another name for one of them",),
            )
            for key in twice
        ],
    )


def put_at(values: Any, path: Path, value: Any) -> None:
    """Replace the value at a path of a nested dict that was flattened.

    A path has the texts of keys. Where a dict has no such key, the key with that text is meant;
    torch would add a second key beside it.

    >>> state = {"state": {0: {"step": 1}}}
    >>> put_at(state, ("state", "0", "step"), 5)
    >>> state
    {'state': {0: {'step': 5}}}
    """
    for text in path[:-1]:
        values = values[_own_key(values, text)]
    values[_own_key(values, path[-1])] = value


def value_at(values: Any, path: Sequence[str | int]) -> Any:
    """Return the value at a path of a nested dict that was flattened.

    Raises:
        LookupError: There is none.
    """
    for text in path:
        values = values[_own_key(values, text)]
    return values


def _own_key(values: Any, text: str | int) -> Any:
    if not isinstance(values, Mapping) or text in values:
        return text
    number = int(text) if str(text).isdecimal() else text
    if number in values and str(number) == text:
        return number
    return next((key for key in values if str(key) == text), text)


class RenamedKeys(NamedTuple):
    """A rank's flat state dict under the checkpoint's keys.

    Attributes:
        state_dict: The values by key.
        mappings: The path of each key in the nested dict.
        reshaped: The values that become other tensors; None where there are none.
        matches: Whether each step of the rename matches a key.
        numbered: The keys in which the rename gave a number; for a row the key of its stack, for
            the rows of a tensor the key with ``{}``.
        faults: A fault where two keys of this rank become one, or the rename has no name for one.
    """

    state_dict: dict[str, Any]
    mappings: dict[str, Path]
    reshaped: Reshaped | None
    matches: Matches
    numbered: list[NumberedKey]
    faults: list[Fault]


def rename_keys(
    state_dict: dict[str, Any],
    mappings: dict[str, Path],
    rename: Rename | None,
    *,
    may_share: bool = False,
) -> RenamedKeys:
    """Return the flat state dict and its paths under the checkpoint's keys, and the matching steps.

    Values that become rows of a stack are there once, under the key of the stack; a value that
    becomes rows or parts is there under the name of the whole. The rules are asked about these
    names.

    Args:
        state_dict: Flat, with this rank's keys.
        mappings: The path of each key in the nested dict.
        rename: Maps this rank's key to the checkpoint's; None changes nothing.
        may_share: Whether several values may get one name, of which the first is in the state dict
            and all are in ``reshaped.several``; otherwise this is a fault.
    """
    if rename is None:
        return RenamedKeys(state_dict, mappings, None, {}, [], [])
    its_steps = steps(rename)
    matches = {step.declared: False for step in its_steps if step.declared is not None}
    renamed: dict[str, Any] = {}
    answers: dict[str, Renamed] = {}  # those for the keys of ``renamed``
    paths: dict[str, Path] = {}
    reshaped = Reshaped()
    key_of: dict[str, str] = {}  # by name in the checkpoint or in rules, the key that has it
    numbered: list[NumberedKey] = []
    faults: list[Fault] = []
    for key, value in state_dict.items():
        path = mappings.get(key)
        try:
            new = apply(its_steps, key, matches)
            texts = texts_of(new)
        except CannotPlace as error:
            faults.append(error.fault(key))
            continue
        except Exception as error:
            headline = f"the rename fails: {type(error).__name__}: {error}"
            way_out = "way out:     a name for every key"
            faults.append(Fault(key, headline, (raised_line(error), way_out)))
            continue
        if isinstance(new, Transposed) and not getattr(value, "shape", ()):
            new = new.fqn  # a scalar or an object
        numbered += [fqn for fqn in texts if isinstance(fqn, NumberedKey)]
        name = str(new if isinstance(new, str) else new.fqn)
        label = new.stacked if isinstance(new, OfWhole) else name
        if isinstance(new, Row) and name in reshaped.rows:
            first = reshaped.rows[name][0]
            if (first.name.axes, first.name.transposed) != (new.axes, new.transposed):
                headline = (
                    f"rename() stacks {first.key} as one of {first.name.whole_text()}, and {key} "
                    f"as one of {new.whole_text()}"
                )
                faults.append(Fault(name, headline))
            reshaped.rows[name].append(RenamedValue(new, key, value, path))
            continue
        if (other := key_of.get(name, key_of.get(label))) is not None:
            if may_share and not isinstance(new, Row) and answers.get(label) == new:
                earlier = RenamedValue(new, other, renamed[label], paths.get(label))
                same = reshaped.several.setdefault(label, [earlier])
                same.append(RenamedValue(new, key, value, path))
            elif may_share and Transposed in {type(new), type(answers.get(label))}:
                turned, other = (key, other) if isinstance(new, Transposed) else (other, key)
                headline = f"rename() gives this one name to {turned}, transposed, and to {other}"
                way_out = "way out:     a Transpose that all keys of one name match, or none does"
                faults.append(Fault(name, headline, (way_out,)))
            else:
                faults.append(shared_name_fault(name, other, key))
            continue
        key_of[name] = key_of[label] = key
        renamed[label], answers[label] = value, new
        if isinstance(new, Row):
            reshaped.rows[name] = [RenamedValue(new, key, value, path)]
        elif isinstance(new, OfWhole):
            reshaped.wholes[label] = RenamedValue(new, key, value, path)
        if path is not None:
            paths[label] = path
    return RenamedKeys(renamed, paths, reshaped or None, matches, numbered, faults)


def shared_name_fault(name: str, first: str, other: str, *, are_copies: bool = False) -> Fault:
    """Return the fault of two keys of a rank that a rename gives one name.

    Args:
        name: The name in the checkpoint.
        first: One key.
        other: The other one.
        are_copies: Whether both are tensors with the same contents.
    """
    headline = f"rename() gives this one name to both {first} and {other}"
    if are_copies:
        return Fault(
            name,
            headline,
            (
                "likely:      copies of one tensor, as of a tied weight: by BlockingAsyncStager, "
                "which copies each name, or by clone()",
                "reason:      two memories may differ at the next save; one memory may have one "
                "name",
                "way out:     DefaultStager, which keeps them one; or leave one of both out",
            ),
        )
    return Fault(
        name,
        headline,
        (
            "way out:     map every key of a rank to a key of its own; one name is right for tied "
            "weights, which are one memory, and in a load, where each key is filled",
        ),
    )


def checkpoint_path(key: str, path: Path) -> Path:
    """Return the path of ``key`` in the nested dict that a reader of the checkpoint rebuilds.

    >>> checkpoint_path("model.layers.4.w", ("model", "layers.0.w"))
    ('model', 'layers.4.w')

    Components of the path that the rename did not change stay components.
    """
    if ".".join(map(str, path)) == key:
        return path
    start, stop, rest = 0, len(path), key
    while start < stop - 1 and rest.startswith(f"{path[start]}."):
        rest = rest.removeprefix(f"{path[start]}.")
        start += 1
    while stop > start + 1 and rest.endswith(f".{path[stop - 1]}"):
        rest = rest.removesuffix(f".{path[stop - 1]}")
        stop -= 1
    return (*path[:start], rest, *path[stop:])
