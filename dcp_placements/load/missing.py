"""Keys that the checkpoint lacks: which a load accepts, what refuses the others, what is reset.

A parameter that was never stepped before the save has no optimizer state in the checkpoint. Where
the optimizer of the load has stepped it since (a rollback in the same process), its moments are of
another history than its weights: none of its state may stay, neither a moment nor a step count. It
is 0 once all that is read has been read; a load that fails has reset nothing. Memory that was read
under another key, as that of tied parameters or of one ``step`` for all, keeps what was read.

A rank asks for ``w`` and its moments, ``new`` and ``rng.3``, of which the checkpoint has ``w``::

    kept     ["rng.3"]                     optional=["rng.*"]
    reset    {"exp_avg.w": "w", ...}       no state of w at all
    faults   new: the checkpoint lacks this key
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch.distributed.checkpoint import TensorStorageMetadata

from dcp_placements._torch import ShardedTensor, facts_of, has_hooks, is_dtensor_like
from dcp_placements.bind.binding import Placing
from dcp_placements.errors import Fault, PlacementError, format_names
from dcp_placements.load.tied import overlaps_of
from dcp_placements.names.flat import Path, put_at
from dcp_placements.names.optimizer_state import OptimizerStates, possible_parameters
from dcp_placements.rules.patterns import compile_pattern
from dcp_placements.storage.hashing import full_digest


@dataclass(frozen=True, slots=True)
class Policy:
    """What a load accepts.

    Attributes:
        partial: Any key may be missing, as long as one is there; but no part of the optimizer
            state of a parameter while another part is there.
        cast: ``"error"``, ``"warn"`` or ``"allow"``, for what loses precision.
        optional: Patterns of keys that may be missing.
        waived: Patterns of keys whose differences from the save are right.
    """

    partial: bool = False
    cast: str = "warn"
    optional: tuple[re.Pattern[str], ...] = ()
    waived: tuple[re.Pattern[str], ...] = ()

    def is_optional(self, fqn: str) -> bool:
        """Whether a key may be missing by name."""
        return any(pattern.search(f".{fqn}") for pattern in self.optional)

    def waives(self, fqn: str) -> bool:
        """Whether a waiver names a key."""
        return any(pattern.search(f".{fqn}") for pattern in self.waived)

    def excused(self, fqns: Iterable[str]) -> set[str]:
        """Return the keys that are waived, or may be missing by name."""
        if not self.optional and not self.waived:
            return set()
        return {fqn for fqn in fqns if self.excuses(fqn)}

    def excuses(self, fqn: str) -> bool:
        """Whether a key is waived, or may be missing by name."""
        return self.waives(fqn) or self.is_optional(fqn)


def optional_patterns(optional: str | Iterable[str]) -> tuple[str, ...]:
    """Return the patterns that ``optional=`` gives.

    Raises:
        PlacementError: They are no patterns.
    """
    if not isinstance(optional, Iterable):
        raise PlacementError(f"optional={optional!r}: give patterns of keys")
    patterns = (optional,) if isinstance(optional, str) else tuple(optional)
    compiled(patterns)
    return patterns


def compiled(patterns: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """Return patterns of keys as ``Policy`` has them.

    Raises:
        PlacementError: They are no patterns.
    """
    return tuple([compile_pattern(pattern) for pattern in patterns])


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
                *_prefix_details(self.kept, list(self.stored)),
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
        if self.policy.partial and all(map(self.policy.is_optional, tensors)):
            return  # two declarations of the user say so
        tensors_there = [
            fqn
            for fqn, stored in self.stored.items()
            if isinstance(stored, TensorStorageMetadata) and self.states.of(fqn) is None
        ]
        self.notes.append(
            Fault(
                "state dict",
                f"asks for {len(tensors)} tensors of the model, and none of them is in the "
                "checkpoint: they keep their values",
                _prefix_details(tensors, tensors_there),
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
                "way out:     the directory that dcp.save wrote, with the storage reader of its "
                "format; dcp-placements inspect shows what is in it",
            )
            return
        unread = [key for key in self.stored if key not in self.state_dict]
        other_prefixes = _other_prefixes(missing, unread)
        for at, fqn in enumerate(missing):
            details = [other_prefixes[fqn]] if fqn in other_prefixes else []
            if not details and at < MAX_COMPARED_NAMES and len(unread) < MAX_COMPARED_KEYS:
                close = get_close_matches(fqn, unread, 2, 0.6)
                details = [f"it has:      {', '.join(close)}"] if close else []
            if "param_groups." in fqn or possible_parameters(fqn):
                details.append(
                    "note:        of optimizer state, that of some parameters may be missing, but "
                    "not of all; it is known by its parameter, or by param_groups. Both sides "
                    "need the same flatten_optimizer_state_dict= in get_state_dict"
                )
            self._fault(
                fqn,
                "the checkpoint lacks this key (torch: Missing key in checkpoint)",
                *details,
                "way out:     rename= where the checkpoint has it under another name; "
                "optional=[pattern] where it may be missing",
            )

    def _fault(self, fqn: str, headline: str, *details: str) -> None:
        self.faults.append(Fault(fqn, headline, details))


_LONGEST_PREFIX = 3


def _prefix_details(asked: Sequence[str], stored: Sequence[str]) -> tuple[str, ...]:
    return (
        f"it asks for: {format_names(asked, 3)}",
        f"there are:   {format_names(stored, 3) or 'no tensors'}",
        "likely:      a prefix that one side has and the other has not",
        "way out:     make the names equal, with rename= if need be; optional=[pattern] for what "
        "may be missing",
    )


def _other_prefixes(missing: Sequence[str], unread: Sequence[str]) -> dict[str, str]:
    """Return a detail for each missing key that the checkpoint has with another prefix.

    Such a difference concerns thousands of keys, which get the same text; a table of name tails
    finds it in time linear in their number.
    """
    prefix_of: dict[str, str] = {}
    for key in unread:
        for prefix, tail in _splits(key):
            prefix_of[tail] = min(prefix_of.get(tail, prefix), prefix, key=len)
    pairs: dict[str, tuple[str, str]] = {}
    for fqn in missing:
        found = ((prefix, prefix_of[tail]) for prefix, tail in _splits(fqn) if tail in prefix_of)
        if pair := next(found, None):
            pairs[fqn] = pair
    count = Counter(pairs.values())
    return {
        fqn: f"it has:      the same name with the prefix {stored!r} in place of {asked!r}"
        for fqn, (asked, stored) in pairs.items()
        if count[asked, stored] > 1
    }


def _splits(key: str) -> Iterator[tuple[str, str]]:
    """Yield (prefix, tail) pairs, the shortest prefix first; a tail has two components or more."""
    parts = key.split(".")
    for at in range(max(1, min(len(parts) - 1, _LONGEST_PREFIX + 1))):
        yield ".".join(parts[:at]), ".".join(parts[at:])


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


MAX_PARAMETERS = 6
"""Parameters that a message lists."""


class Resets:
    """The optimizer state keys of one load on one rank that the checkpoint has no values for.

    Args:
        parameters: By key, its parameter, of which the checkpoint has no state at all.
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        read: The keys that are read.
    """

    def __init__(
        self,
        parameters: Mapping[str, str],
        state_dict: Mapping[str, Any],
        placing: Placing,
        read: Iterable[str] = (),
    ) -> None:
        self._parameters = parameters
        self._state_dict = state_dict
        self._placing = placing
        self._read = read
        self._unread = 0
        # Readers may call from several threads.
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def expect(self, items: int) -> None:
        """Take how many items will be read."""
        self._unread = items

    def are_due(self) -> bool:
        """Take in that an item was read; return whether it was the last one."""
        with self._lock:
            self._unread -= 1
            return not self._unread

    def apply(self, state_dict: dict[str, Any], mappings: Mapping[str, Path]) -> list[Fault]:
        """Reset the state, once; return a note if some of it was other than 0.

        Args:
            state_dict: The user's, nested; takes in numbers.
            mappings: Where each key stands in it.
        """
        with self._lock:
            parameters, self._parameters = self._parameters, {}
        if not parameters:
            return []
        named = [(fqn, t) for fqn in (*self._read, *parameters) for t in self._tensors(fqn)]
        groups = overlaps_of(([fqn for fqn, _ in named], [tensor for _, tensor in named])).groups
        shared = {fqn for reset in parameters for fqn in groups.get(reset, ())}
        before = [(fqn, t, t.clone()) for fqn, t in named if fqn in shared]
        used: dict[str, None] = {}
        for fqn, parameter in parameters.items():
            tensors, value = self._tensors(fqn), self._state_dict[fqn]
            for tensor in tensors:
                # A fresh optimizer may have counted a step, and has moments of 0.
                if fqn not in shared and not _is_step(fqn) and bool(tensor.any()):
                    used[parameter] = None
                tensor.zero_()
            if not tensors and isinstance(value, int | float):
                put_at(state_dict, mappings.get(fqn, (fqn,)), type(value)(0))
        for fqn, tensor, values in before:
            if fqn not in parameters:
                tensor.copy_(values)
        for fqn, tensor, values in before:
            if (
                fqn in parameters
                and not _is_step(fqn)
                and full_digest(tensor) != full_digest(values)
            ):
                used[parameters[fqn]] = None
        return [_note(list(used))] if used else []

    def _tensors(self, fqn: str) -> list[torch.Tensor]:
        """Return the tensors of this rank that a value consists of."""
        value = self._state_dict[fqn]
        placed = self._placing.placed.get(fqn)
        if placed is not None:
            return [tensor.detach() for tensor in placed.tensors]
        if isinstance(value, ShardedTensor):
            return [shard.tensor.detach() for shard in value.local_shards()]
        if is_dtensor_like(value):
            return [facts_of(value)[0].detach()]
        return [value.detach()] if isinstance(value, torch.Tensor) else []


def _is_step(fqn: str) -> bool:
    return fqn.rpartition(".")[2] == "step"


def _note(parameters: list[str]) -> Fault:
    count = len(parameters)
    return Fault(
        "optimizer state",
        f"that of {count} parameter{'' if count == 1 else 's'} was reset to 0: the checkpoint has "
        "none",
        (
            f"parameters:  {format_names(parameters, MAX_PARAMETERS)}",
            "likely:      they were stepped for the first time after the checkpoint was saved",
            "reason:      moments and step counts of later steps do not belong to the weights that "
            "were read",
        ),
    )
