"""Optimizer state of tied weights, which the checkpoint may have under another of their names.

An optimizer has a tied weight once, under the name that its model lists first. Where that is
another name than in the model that was saved, the state is under the name that the weight has here,
too. ``embed.w`` and ``head.w`` are one memory; the model that was saved listed its head first::

    asked for    optim.state.embed.w.exp_avg    which the checkpoint lacks
    stored       optim.state.head.w.exp_avg
    TiedStates({"optim.state.embed.w.": "optim.state.head.w."})
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_placements.bind.rule_and_dtensor import is_tensor
from dcp_placements.bind.tensor_memory import memory_key
from dcp_placements.names.flat import RenamedValue, Reshaped
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.names.rename_results import Rename, Renamed, texts_of, with_texts


@dataclass(frozen=True)
class TiedStates:
    """A rename of the state of tied weights to the names that the checkpoint has.

    Attributes:
        heads: The beginning of each key that is renamed, with its dot, and what is put in its
            place.
        first: The user's rename, which comes first.
    """

    heads: Mapping[str, str]
    first: Rename | None = field(default=None)

    def __call__(self, key: str) -> Renamed:
        return self._answer(key if self.first is None else self.first(key))

    def _answer(self, name: Renamed) -> Renamed:
        """Return the answer of the user's rename with the checkpoint's names."""
        return with_texts(name, [*map(self.renamed, texts_of(name))])

    @property
    def names(self) -> dict[str, str]:
        """The state that is renamed, and its names in the checkpoint, without the last dot."""
        return {own[:-1]: other[:-1] for own, other in self.heads.items() if "state." in own}

    def renamed(self, fqn: str) -> str:
        """Return the checkpoint's name of a key that the user's rename has gone over."""
        for head, stored_head in self.heads.items():
            if f"{fqn}.".startswith(head):
                return f"{stored_head}{fqn[len(head) :]}".removesuffix(".")
        return fqn

    def reshaped(self, own: Reshaped) -> Reshaped:
        """Return the values that the user's rename turns into other tensors, under these names."""

        def all_of(values: Sequence[RenamedValue[Any]]) -> list[RenamedValue[Any]]:
            return [of._replace(name=self._answer(of.name)) for of in values]

        rows, several = (
            {self.renamed(fqn): all_of(values) for fqn, values in values_of.items()}
            for values_of in (own.rows, own.several)
        )
        wholes = {self.renamed(fqn): all_of([value])[0] for fqn, value in own.wholes.items()}
        return Reshaped(rows, wholes, several)


def tied_states(
    state_dict: Mapping[str, Any], stored: Mapping[str, Any], rename: Rename | None
) -> TiedStates | None:
    """Return the rename of optimizer state that is stored under another name of its weight.

    None of the state may be stored under the name that is asked for, nor may the state dict ask for
    the other name as well.

    Args:
        state_dict: Flat, with the checkpoint's names.
        stored: What the checkpoint has of each of its keys.
        rename: The user's rename.
    """
    states = OptimizerStates(state_dict, stored)
    names_of: dict[Hashable, list[str]] = {}
    owners: dict[tuple[str, str], None] = {}
    for fqn, value in state_dict.items():
        if (state := states.of(fqn)) is not None:
            owners[state.owner] = None
        elif is_tensor(value):
            names_of.setdefault(memory_key(value), []).append(fqn)
    names_of_tied = {
        fqn: names
        for memory, names in names_of.items()
        if memory is not None and len(names) > 1
        for fqn in names
    }
    if not names_of_tied:
        return None
    tensors = [fqn for names in names_of.values() for fqn in names]
    heads: dict[str, str] = {}
    for (head, parameter), weights in states.weights_of(owners, tensors).items():
        own = f"{head}state.{parameter}."
        for weight in weights:
            level = weight.removesuffix(parameter)
            names = [fqn for fqn in names_of_tied.get(weight, ()) if fqn.startswith(level)]
            for name in [fqn.removeprefix(level) for fqn in names if fqn != weight]:
                other = f"{head}state.{name}."
                if not _has(stored, own) and _has(stored, other) and not _has(state_dict, other):
                    heads[own] = other
                    heads[f"{head}param_groups.{parameter}."] = f"{head}param_groups.{name}."
    return TiedStates(heads, rename) if heads else None


def _has(keys: Iterable[str], head: str) -> bool:
    """Whether any key begins so."""
    return any(key.startswith(head) for key in keys)
