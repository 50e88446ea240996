"""The tensors that a rank has of a checkpoint, from its rename alone: steps undone, the last first.

A checkpoint with ``experts.w`` of shape ``(4, 6, 3)``, and a rank whose rename is ``Renumber(
"experts.{}", [2, 3], total=4)``, then ``Stack("experts.{}", 4)``::

    checkpoint               experts.w    (4, 6, 3)
    before the Stack         experts.0.w  ... experts.3.w, each (6, 3)
    before the Renumber      experts.0.w, experts.1.w, which are 2 and 3 of the whole

The names of a real rank's tensors before a ``Replace`` do not matter to a load. So the steps that
are undone have the checkpoint's names, and no ``Replace`` is among them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from dcp_placements.names.rename_results import (
    Parts,
    Row,
    Rows,
    Transposed,
    inserted,
    removed,
    replaced,
    swapped,
)
from dcp_placements.names.renames import (
    FUNCTION,
    Renames,
    Renumber,
    Replace,
    Split,
    Stack,
    Transpose,
    Unstack,
    number_in,
    steps,
)
from dcp_placements.offline.rehearsals.tensor_names import Whole

Wholes = Mapping[str, Whole]
Steps = tuple[Renames, ...]


def checkpoint_steps(rename: Any) -> Steps:
    """Return the steps of a rename as they would be without any ``Replace``.

    The pattern of a step is renamed by the later ``Replace`` steps, as a key is.

    Returns:
        No step where one is a function of the user's: a rank's keys do not follow from a function,
        so the rank has all.
    """
    all_steps = steps(rename)
    if any(step.kind == FUNCTION for step in all_steps):
        return ()
    kept: list[Renames] = []
    for number, step in enumerate(all_steps):
        operation = step.rename
        if isinstance(operation, Replace):
            continue
        later = [other.rename for other in all_steps[number:] if isinstance(other.rename, Replace)]
        pattern = _replaced(step.pattern, later)
        ids = operation.ids if isinstance(operation, Renumber) else ()
        if isinstance(ids, Mapping) and re.search(r"\{\w+\}", pattern) is None:
            # A Replace has taken the selector out of the keys.
            operation = Renumber(pattern, sorted({*chain(*ids.values())}), operation.total)
        operation = replace(operation, pattern=pattern)
        if isinstance(operation, Split):
            operation = replace(
                operation, names=[_replaced(name, later) for name in operation.names]
            )
        kept.append(Renames(operation, optional=step.declared is None))
    return tuple(kept)


def _replaced(text: str, steps: Sequence[Replace]) -> str:
    """Return a pattern, or a name, renamed by steps as a key is."""
    for step in steps:
        text = step(text)
    return text


class LocalKeys:
    """The tensors of ranks under their own keys; ranks with equal last steps share the work.

    Args:
        stored: The checkpoint's tensors and objects.
    """

    def __init__(self, stored: Wholes) -> None:
        self._stored = stored
        self._before: dict[tuple[Steps, tuple[Stack, ...]], Wholes] = {}
        self._numbered: dict[Any, _Numbered] = {}

    def before(self, steps: Steps, stacks: tuple[Stack, ...] = ()) -> Wholes:
        """Return the tensors and objects that a rank has before these steps of its rename.

        Args:
            steps: The last steps of the rename.
            stacks: The ``Stack`` steps before them.
        """
        if not steps:
            return self._stored
        if (steps, stacks) not in self._before:
            first, *rest = steps
            (step,) = first.steps
            earlier = (*stacks, step) if isinstance(step, Stack) else stacks
            after = self.before(tuple(rest), earlier)
            if isinstance(step, Renumber):
                key = step.pattern, tuple(rest), stacks
                if key not in self._numbered:
                    others = [later for later in rest if not isinstance(later.steps[0], Renumber)]
                    stored = self.before(tuple(others), stacks)
                    self._numbered[key] = _Numbered(step.pattern, after, stored)
                wholes = self._numbered[key].held(step)
            elif isinstance(step, Stack):
                wholes = dict(_rows(step, after))
            elif isinstance(step, Unstack):
                wholes = _unstacked(step, after)
            elif isinstance(step, Transpose):
                later = [of.steps[0] for of in rest]
                unstacks = [other for other in later if isinstance(other, Unstack)]
                wholes = {
                    key: _transposed(whole, _dims_of_rows(key, whole, stacks, unstacks))
                    if isinstance(step(key), Transposed)
                    else whole
                    for key, whole in after.items()
                }
            else:
                assert isinstance(step, Split), "checkpoint_steps leaves no other"
                wholes = _fused(step, after)
            self._before[steps, stacks] = wholes
        return self._before[steps, stacks]


class _Numbered:
    """Keys by the number that a ``Renumber`` gives, with its selector.

    Args:
        pattern: The pattern of the step.
        wholes: Tensors that a rank has after the step, without those that later steps leave out.
        stored: Tensors that all ranks together have after the step.
    """

    def __init__(self, pattern: str, wholes: Wholes, stored: Wholes) -> None:
        numbers = [number_in(pattern, key) for key in stored]
        self._stored = {
            (numbered.by, numbered.number) for numbered in numbers if numbered is not None
        }
        self._others: dict[str, Whole] = {}
        self._members: dict[str, dict[int, dict[str, Whole]]] = {}
        for key, whole in wholes.items():
            numbered = number_in(pattern, key)
            if numbered is None:
                self._others[key] = whole
                continue
            by_number = self._members.setdefault(numbered.by, {})
            by_number.setdefault(numbered.number, {})[f"{numbered.head}\0{numbered.tail}"] = whole

    def held(self, step: Renumber) -> dict[str, Whole]:
        """Return the keys of a rank under its own numbers.

        A number that the checkpoint does not have gets the keys of another number.
        """
        held = dict(self._others)
        for selector, numbers in step.by_selector.items():
            members = self._members.get(selector, {})
            any_number = next(iter(members.values()), {})
            for local, number in enumerate(numbers):
                others = {} if (selector, number) in self._stored else any_number
                for form, whole in members.get(number, others).items():
                    held[form.replace("\0", str(local))] = whole
        return held


def _rows(step: Stack, wholes: Wholes) -> Iterator[tuple[str, Whole]]:
    """Yield the rows of stacks, and all other keys as they are."""
    numbered = Unstack(step.pattern)
    for key, whole in wholes.items():
        name = numbered(key)
        if not isinstance(name, Rows):
            yield key, whole
            continue
        if whole.shape:
            ndim = len(whole.shape)
            dim = min(max(step.dim, -ndim), ndim - 1) % ndim
            whole = whole._replace(shape=removed(whole.shape, dim))
        for number in range(step.total):
            yield name.fqn.replace("{}", str(number)), whole


def _unstacked(step: Unstack, wholes: Wholes) -> dict[str, Whole]:
    """Return the stacks of rows that the checkpoint has one by one, and all other keys."""
    stacked = Stack(step.pattern, sys.maxsize)
    stacked_by_key: dict[str, Whole] = {}
    rows: dict[str, int] = {}
    for key, whole in wholes.items():
        name = stacked(key)
        if isinstance(name, Row):
            stacked_by_key.setdefault(name.fqn, whole)
            rows[name.fqn] = max(rows.get(name.fqn, 0), name.index + 1)
        else:
            stacked_by_key[key] = whole
    for key, count in rows.items():
        if shape := stacked_by_key[key].shape:
            ndim = len(shape) + 1
            dim = min(max(step.dim, -ndim), ndim - 1) % ndim
            stacked_by_key[key] = stacked_by_key[key]._replace(shape=inserted(shape, dim, count))
    return stacked_by_key


def _transposed(whole: Whole, rows: Collection[int]) -> Whole:
    """Return a tensor with the last two of its dims swapped, not counting those of rows."""
    shape = list(whole.shape)
    others = [dim for dim in range(len(shape)) if dim not in rows]
    for dim, origin in zip(others, swapped(others), strict=True):
        shape[dim] = whole.shape[origin]
    return whole._replace(shape=tuple(shape))


def _dims_of_rows(
    key: str, whole: Whole, stacks: Sequence[Stack], unstacks: Sequence[Unstack]
) -> set[int]:
    """Return the dims of a tensor that rows of earlier stacks, or of later ones, lie along."""
    dims = list(range(len(whole.shape)))
    before = [Unstack(step.pattern, dim=step.dim) for step in reversed(stacks)]
    for step in (*before, *unstacks):
        if isinstance(step(key), Rows) and -len(dims) <= step.dim < len(dims):
            dims.pop(step.dim)
    return set(range(len(whole.shape))).difference(dims)


def _fused(step: Split, wholes: Wholes) -> dict[str, Whole]:
    """Return the fused tensors whose parts the checkpoint has, and all other keys."""
    fused_by_key: dict[str, Whole] = {}
    for key, whole in wholes.items():
        fused = _fused_key(step, key)
        name = None if fused is None else step(fused)
        if fused is None or not isinstance(name, Parts) or not wholes.keys() >= set(name.fqns):
            fused_by_key[key] = whole
        elif fused not in fused_by_key:
            shape = whole.shape
            if shape and -len(shape) <= step.dim < len(shape):
                dim = step.dim % len(shape)
                of_parts = [wholes[fqn].shape for fqn in name.fqns]
                size = sum(part[dim] for part in of_parts if len(part) > dim)
                whole = whole._replace(shape=replaced(shape, dim, size))
            fused_by_key[fused] = whole
    return fused_by_key


def _fused_key(step: Split, key: str) -> str | None:
    """Return the key of the tensor that a key is a part of; None where it is no part."""
    for index, part in enumerate(step.names):
        fused = Replace(part, step.pattern)(key)
        name = step(fused)
        if isinstance(name, Parts) and name.fqns[index] == key:
            return fused
    return None
