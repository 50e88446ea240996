"""Keys that the checkpoint lacks: which a load accepts, and what refuses the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch

from dcp_placements._torch import TensorStorageMetadata, has_hooks, is_dtensor_like
from dcp_placements.errors import Fault, format_names
from dcp_placements.load.policy import Policy
from dcp_placements.names.optimizer_state import OptimizerStates, possible_parameters

MAX_COMPARED_NAMES = 10
MAX_COMPARED_KEYS = 5000
"""Comparing one name with so many keys is slow, and a few examples show what is wrong."""


@dataclass(slots=True)
class MissingKeys:
    """The keys of one rank that the checkpoint lacks.

    Attributes:
        state_dict: Flat, with the checkpoint's keys.
        stored: The checkpoint's metadata by key.
        absent: Keys of meshes that the rank is no part of.
        states: Which keys are optimizer state.
        policy: What is accepted.
        kept: The keys that are accepted; their values stay as they are.
        stateless: By key that is optimizer state, the parameter, where the checkpoint has no state
            of that parameter at all.
        reset: Those of them that are reset: their parameters are read. State must not outlive the
            weights that it belongs to, but weights that stay keep theirs.
        faults: What refuses the load.
        notes: What is accepted with a warning.
    """

    state_dict: Mapping[str, Any]
    stored: Mapping[str, Any]
    absent: AbstractSet[str]
    states: OptimizerStates
    policy: Policy
    kept: list[str] = field(default_factory=list)
    stateless: dict[str, str] = field(default_factory=dict)
    reset: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)

    def settle(self, missing: Sequence[str], *, matched: int, refused: bool) -> None:
        """Accept or refuse every missing key.

        Args:
            missing: The keys.
            matched: The number of keys that the checkpoint has.
            refused: Whether the load is refused for other reasons.
        """
        groups: dict[str, list[str]] = {}
        for fqn in self.state_dict:
            state = self.states.of(fqn)
            if state is not None:
                groups.setdefault(state.group, []).append(fqn)
        without_state = _without_state(groups, missing)
        stays = self._parameters_that_stay(groups[group][0] for group in without_state)
        lacking: list[str] = []
        for fqn in missing:
            state = self.states.of(fqn)
            keys = [] if state is None else groups[state.group]
            partly_stored = any(key in self.stored for key in keys)
            if state is not None and state.group in without_state:
                self.stateless[fqn] = state.parameter
                if self.policy.is_optional(fqn) or state.parameter in stays:
                    self.kept.append(fqn)
                else:
                    self.reset[fqn] = state.parameter
            elif self.policy.is_optional(fqn) or (self.policy.partial and not partly_stored):
                self.kept.append(fqn)
            elif partly_stored:
                self._refuse_part_of_state(fqn, keys)
            else:
                lacking.append(fqn)
        if lacking:
            self._refuse_all(lacking)
        if self.kept and not matched and not refused and not self.faults:
            self._fault(
                "state dict",
                f"none of the {len(self.state_dict)} keys is in the checkpoint: nothing would be "
                "loaded",
                f"it asks for: {format_names(self.kept, 3)}",
                f"there are:   {format_names(list(self.stored), 3)}",
                "likely:      a prefix that one side has and the other has not",
                "way out:     make the names equal, with rename= if need be",
            )
        elif self.kept:
            self._note_no_tensor()

    def _parameters_that_stay(self, fqns: Iterable[str]) -> set[str]:
        """Return the parameters of optimizer state keys that are asked for, and not stored.

        An optimizer that is loaded alone asks for no parameter: none stays.
        """
        stay = set()
        for fqn in fqns:
            state = self.states.of(fqn)
            assert state is not None
            asked = [key for key in self.states.keys_of(state.parameter) if key in self.state_dict]
            # Of a parameter ``w``, ``model.w`` is a key, and ``model.block.w`` that of another one.
            depth = min((key.count(".") for key in asked), default=0)
            of_it = [key for key in asked if key.count(".") == depth]
            if of_it and not any(key in self.stored for key in of_it):
                stay.add(state.parameter)
        return stay

    def _note_no_tensor(self) -> None:
        """Note that of the model's tensors, optimizer state left out, none is read."""
        tensors = [
            fqn
            for fqn, value in self.state_dict.items()
            if is_tensor(value)
            and len(value.shape)
            and fqn not in self.absent
            and self.states.of(fqn) is None
        ]
        if not tensors or any(fqn in self.stored for fqn in tensors):
            return
        all_optional = all(map(self.policy.is_optional, tensors))
        if all_optional and self.policy.partial:
            return  # two declarations of the user say so
        there = [
            fqn
            for fqn, stored in self.stored.items()
            if isinstance(stored, TensorStorageMetadata)
            and stored.size
            and self.states.of(fqn) is None
        ]
        self.notes.append(
            Fault(
                "state dict",
                f"asks for {len(tensors)} tensors of the model, and none of them is in the "
                "checkpoint: they keep their values",
                (
                    f"it asks for: {format_names(tensors, 3)}",
                    f"there are:   {format_names(there, 3) or 'none of one dim or more'}",
                    "likely:      a prefix that one side has and the other has not; the keys that "
                    "match are scalars, objects or optimizer state",
                    "way out:     make the names equal, with rename= if need be; "
                    + (
                        "optional=[pattern] that matches fewer keys"
                        if all_optional
                        else "optional=[pattern] for what may be missing"
                    ),
                ),
            )
        )

    def _refuse_part_of_state(self, fqn: str, keys: Sequence[str]) -> None:
        names = {key: key.rpartition(".")[2] for key in keys}
        self._fault(
            fqn,
            "the checkpoint lacks this state of a parameter whose other state it has",
            f"there are:   {', '.join(names[key] for key in keys if key in self.stored)}",
            f"missing:     {', '.join(names[key] for key in keys if key not in self.stored)}",
            "way out:     load with the optimizer that was saved; optional=[pattern] where this "
            "one may be missing",
        )

    def _refuse_all(self, missing: Sequence[str]) -> None:
        """Refuse keys, each with the name that the checkpoint likely has for it."""
        if not self.stored:
            self._fault(
                "checkpoint",
                "has no tensor and no object, but the state dict asks for "
                f"{format_names(missing, 1)}",
                "likely:      another path, or the storage reader of another format "
                "(HuggingFaceStorageReader reads *.safetensors alone)",
                "way out:     the directory that dcp.save wrote, with the reader that fits; "
                "dcp-placements inspect shows what is in it",
            )
            return
        unread = [key for key in self.stored if key not in self.state_dict]
        others = _other_names(missing, unread)
        for at, fqn in enumerate(missing):
            details = list(others.get(fqn, ()))
            if not details and at < MAX_COMPARED_NAMES and len(unread) < MAX_COMPARED_KEYS:
                close = get_close_matches(fqn, unread, 2, 0.6)
                details = [f"it has:      {', '.join(close)}"] if close else []
            self._refuse(fqn, details)

    def _refuse(self, fqn: str, details: list[str]) -> None:
        if self.states.of(fqn) is not None:
            details.append(
                "note:        it has no state of any parameter that this rank asks for; the state "
                "of some may be missing, of all it may not"
            )
        elif possible_parameters(fqn):
            details.append(
                "note:        it is not taken for optimizer state, of which some may be missing: "
                "neither its parameter nor param_groups that name it are there"
            )
        if not any(line.startswith("way out:") for line in details):
            details.append(
                "way out:     rename= where the checkpoint has it under another name; "
                "optional=[pattern] where it may be missing"
            )
        self._fault(
            fqn,
            "the checkpoint lacks this key (torch: Missing key in checkpoint)",
            *details,
        )

    def _fault(self, fqn: str, headline: str, *details: str) -> None:
        self.faults.append(Fault(fqn, headline, details))


_BY_POSITION = re.compile(r"(?:^|\.)(?:param_groups|state)\.\d+\.[^.]+$")
_BY_NAME = re.compile(r"(?:^|\.)param_groups\.(?!\d+\.[^.]+$).+\.[^.]+$")
_OTHER_FORM = (
    "likely:      one side has an optimizer state dict that is flattened (by the parameters' "
    "names), the other has not (by position)",
    "way out:     StateDictOptions(flatten_optimizer_state_dict=True) in get_state_dict and "
    "set_state_dict, at the save and at the load",
)
_LONGEST_PREFIX = 3


def _other_names(missing: Sequence[str], unread: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return details for missing keys that the checkpoint has with another prefix or form.

    Such a difference concerns thousands of keys, which get the same text; a table of name tails
    finds it in time linear in their number.
    """
    details: dict[str, tuple[str, ...]] = {}
    for asked, stored in ((_BY_POSITION, _BY_NAME), (_BY_NAME, _BY_POSITION)):
        if any(map(stored.search, unread)):
            details.update(dict.fromkeys(filter(asked.search, missing), _OTHER_FORM))
    prefix_of: dict[str, str] = {}
    for key in unread:
        for prefix, tail in _splits(key):
            prefix_of[tail] = min(prefix_of.get(tail, prefix), prefix, key=len)
    pairs: dict[str, tuple[str, str]] = {}
    for fqn in missing:
        found = ((prefix, prefix_of[tail]) for prefix, tail in _splits(fqn) if tail in prefix_of)
        if fqn not in details and (pair := next(found, None)):
            pairs[fqn] = pair
    count = Counter(pairs.values())
    details.update({fqn: _prefix_details(*pair) for fqn, pair in pairs.items() if count[pair] > 1})
    return details


def _splits(key: str) -> Iterator[tuple[str, str]]:
    """Yield (prefix, tail) pairs, the shortest prefix first; a tail has two components or more."""
    parts = key.split(".")
    for at in range(max(1, min(len(parts) - 1, _LONGEST_PREFIX + 1))):
        yield ".".join(parts[:at]), ".".join(parts[at:])


def _prefix_details(asked: str, stored: str) -> tuple[str, ...]:
    there = f"with {stored!r} in place of {asked!r}"
    if not stored or not asked:
        there = f"with the prefix {stored!r}" if stored else f"without the prefix {asked!r}"
    return (
        f"it has:      the same name {there}",
        "likely:      the state dict is nested otherwise than at the save, "
        "as in dcp.save({'model': ...})",
    )


def _without_state(groups: Mapping[str, Sequence[str]], missing: Sequence[str]) -> set[str]:
    """Return the groups of optimizer state of which the checkpoint has none, if it has any."""
    lacking = set(missing)
    without = {group for group, keys in groups.items() if lacking.issuperset(keys)}
    return without if len(without) < len(groups) else set()


def is_tensor(value: Any) -> bool:
    """Whether a value of a state dict is read as a tensor."""
    return isinstance(value, torch.Tensor) or has_hooks(value) or is_dtensor_like(value)


def lacking_rows(stateless: Iterable[str], shared: Mapping[str, str]) -> list[Fault]:
    """Return the scalars that stand for rows of which the checkpoint has only some.

    Args:
        stateless: Optimizer state keys of parameters of which the checkpoint has no state.
        shared: By key, the name of the scalar that stands for several keys.
    """
    lacking: dict[str, list[str]] = {}
    for fqn in stateless:
        if fqn in shared:
            lacking.setdefault(shared[fqn], []).append(fqn)
    rows = Counter(shared.values())
    return [
        Fault(
            name,
            f"the checkpoint has optimizer state of {rows[name] - len(keys)} rows, and none "
            f"of {len(keys)}, but here one {name.rpartition('.')[2]} stands for all of them",
            (
                f"missing:     {format_names(keys, 4)}",
                "likely:      these rows were never stepped",
                "way out:     load it into one tensor per row; or leave this state out",
            ),
        )
        for name, keys in lacking.items()
        if len(keys) < rows[name]
    ]
