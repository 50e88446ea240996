"""Which keys are optimizer state, and of which parameter.

Every form that torch produces is ``<head>.state.<parameter>.<name>``, nested or flattened, with
hyperparameters in ``<head>.param_groups.<parameter>.<name>`` or, nested, in
``<head>.param_groups.<number>``. But a model may have the key ``state`` as well, or a module of
that name, so the word alone proves nothing: a key is optimizer state if its parameter is among the
keys, or if there are parameter groups of the same head.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dcp_placements.errors import Fault, PlacementError
from dcp_placements.names.renames import number_finder


def possible_parameters(fqn: str) -> list[str]:
    """Return the parameters that a key may belong to if it is optimizer state.

    >>> possible_parameters("optim.state.layers.0.w.exp_avg")
    ['layers.0.w']
    >>> possible_parameters("model.layers.0.w")
    []

    A parameter with a ``state`` of its own in its name makes several candidates, longest first.
    """
    if "state." not in fqn:
        return []
    parts = fqn.split(".")[:-1]
    starts = [i + 1 for i, part in enumerate(parts) if part == "state"]
    return [".".join(parts[start:]) for start in starts if start < len(parts)]


@dataclass(frozen=True, slots=True)
class State:
    """The parameter of an optimizer state key.

    Attributes:
        parameter: Its name in the optimizer.
        group: The common prefix of the keys of its state, up to and with the parameter.
    """

    parameter: str
    group: str


class Unseen:
    """A tensor of unknown shape."""


UNSEEN = Unseen()


class OptimizerStates:
    """Which keys are optimizer state, by the other keys.

    ``<head>.state.<parameter>.<name>`` is state if a tensor's key is ``<parameter>`` or ends in
    it, and the group can be state of that tensor: it has a tensor of as many dims (of the same
    shape, if both are whole or both are local), or a ``step``, or nothing with dims. Without such a
    tensor (an optimizer that is saved alone), it is state if there is ``<head>.param_groups`` that
    names the parameter or names none.

    >>> held = {"model.w": UNSEEN, "optim.state.w.exp_avg": UNSEEN}
    >>> OptimizerStates(held).of("optim.state.w.exp_avg")
    State(parameter='w', group='optim.state.w')
    >>> OptimizerStates({"state.model.0.w": UNSEEN}).of("state.model.0.w")

    Args:
        held: Flat state dicts, or the metadata of a checkpoint: values by key.
        names: Further names of parameters, such as this rank's own if keys are renamed.
    """

    def __init__(self, *held: Mapping[str, Any], names: Iterable[str] = ()) -> None:
        self._held = held
        self._names = names
        self._states: dict[str, State | None] = {}
        self._groups: dict[str, _Named] = {}
        self._possible: list[str] = []
        # Names of possible parameters, reversed and sorted: names with one ending are adjacent.
        self._reversed: list[str] | None = None

    def of(self, fqn: str) -> State | None:
        """Return the parameter that a key is optimizer state of; None if it is not state."""
        parent = fqn.rpartition(".")[0]
        if "state." not in parent:
            return None
        if self._reversed is None:
            self._learn()
        if parent not in self._states:
            self._states[parent] = self._resolved(parent)
        return self._states[parent]

    def keys_of(self, parameter: str) -> list[str]:
        """Return the keys of the tensors that an optimizer may call ``parameter``."""
        if self._reversed is None:
            self._learn()
        names = dict.fromkeys(self._ending_in(parameter))
        return [key for key in names if self._values(key)]

    def is_positional(self, fqn: str) -> bool:
        """Whether a key names its parameter by its position, as ``optimizer.state_dict()`` does.

        Parameter groups that list numbers show it; without groups, a ``step`` of a parameter that
        is not there.
        """
        match = _POSITION.search(fqn)
        if match is None:
            return False
        if self._reversed is None:
            self._learn()
        named = self._groups.get(fqn[: match.start()])
        if named is not None and not named.is_empty:
            return match[1] in named.numbers
        return not self._ending_in(match[1]) and _has_step(self._members(fqn.rpartition(".")[0]))

    def named_parameters(self) -> list[str]:
        """Return the parameters that parameter groups name."""
        if self._reversed is None:
            self._learn()
        return list(dict.fromkeys(name for named in self._groups.values() for name in named.names))

    def _learn(self) -> None:
        names = self._reversed = [name[::-1] for name in self._names]
        possible = []
        for held in self._held:
            for fqn, value in held.items():
                if "param_groups" in fqn:
                    self._note_group(fqn, value)
                if "state." in fqn and _POSSIBLE.search(fqn) is not None:
                    possible.append(fqn)
                elif _is_tensor(value):
                    names.append(fqn[::-1])
        names.sort()
        self._possible = sorted(set(possible))
        # A key that is not state of these is a parameter: of a model under a key ``state``.
        more = [fqn for fqn in self._possible if self.of(fqn) is None]
        if more:
            names += [fqn[::-1] for fqn in more if any(map(_is_tensor, self._values(fqn)))]
            names.sort()
            self._states.clear()

    def _note_group(self, fqn: str, value: Any) -> None:
        match = _GROUPS.search(fqn)
        if match is None:
            return
        head = fqn[: match.start()]
        named = self._groups.get(head)
        if named is None:
            named = self._groups[head] = _Named()
        name, _, last = match[1].rpartition(".")
        if name.isdigit():
            if last == "params":
                named.add(value)
        elif name:
            named.names[name] = None
        elif isinstance(value, list):
            for group in value:
                named.add(group.get("params") if isinstance(group, dict) else None)

    def _resolved(self, parent: str) -> State | None:
        for match in _STATE.finditer(parent):
            named = self._groups.get(parent[: max(match.start() - 1, 0)])
            if named is not None and not named.is_empty:
                for run in _runs(parent[match.end() :]):
                    if named.has(run):
                        return State(run, parent[: match.end()] + run)
            for run in _runs(parent[match.end() :]):
                if self._has_parameter(run, parent[: match.end()] + run):
                    return State(run, parent[: match.end()] + run)
            if named is not None and named.is_empty:
                return State(parent[match.end() :], parent)
        return None

    def _has_parameter(self, parameter: str, group: str) -> bool:
        """Whether there is such a parameter that can have the state in its group."""
        keys = self._ending_in(parameter)
        if not keys:
            return False
        members = self._members(group)
        tensors = [value for _, value in members if _is_tensor(value) and _shape(value) != ()]
        if not tensors or _has_step(members):
            return True
        return any(
            _may_be_of(tensor, of)
            for key in keys
            for of in self._values(key) or [UNSEEN]
            for tensor in tensors
        )

    def _ending_in(self, parameter: str) -> list[str]:
        """Return the names of possible parameters that equal this one or end in it."""
        assert self._reversed is not None
        wanted = parameter[::-1]
        at = bisect_left(self._reversed, wanted)
        is_there = at < len(self._reversed) and self._reversed[at] == wanted
        names = [parameter] if is_there else []
        wanted += "."
        at = bisect_left(self._reversed, wanted, at)
        while at < len(self._reversed) and self._reversed[at].startswith(wanted):
            names.append(self._reversed[at][::-1])
            at += 1
        return names

    def _members(self, group: str) -> list[tuple[str, Any]]:
        """Return the keys of a group, without its name, and their values."""
        start = group + "."
        members = []
        at = bisect_left(self._possible, start)
        while at < len(self._possible) and self._possible[at].startswith(start):
            fqn = self._possible[at]
            members += [(fqn.removeprefix(start), value) for value in self._values(fqn)]
            at += 1
        return members

    def _values(self, fqn: str) -> list[Any]:
        return [held[fqn] for held in self._held if fqn in held]


class _Named:
    """The parameters that the parameter groups of one optimizer list."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.numbers: set[str] = set()

    def add(self, params: Any) -> None:
        for param in params if isinstance(params, list) else ():
            if isinstance(param, str):
                self.names[param] = None
            elif isinstance(param, int):
                self.numbers.add(str(param))

    def has(self, name: str) -> bool:
        return name in self.names or name in self.numbers

    @property
    def is_empty(self) -> bool:
        return not self.names and not self.numbers


def _runs(name: str) -> Iterator[str]:
    """Yield a name, then the name without its last component, and so on."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or the metadata of one."""
    return value is UNSEEN or hasattr(value, "shape") or hasattr(value, "chunks")


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor or of its metadata; None if unknown."""
    shape = getattr(value, "shape", None)
    if shape is None and hasattr(value, "chunks"):
        shape = value.size
    return None if shape is None else tuple(shape)


def _has_step(members: Iterable[tuple[str, Any]]) -> bool:
    return any(name == "step" and not _shape(value) for name, value in members)


def _may_be_of(tensor: Any, parameter: Any) -> bool:
    """Whether a tensor can be state of a parameter, by its shape."""
    one, other = _shape(tensor), _shape(parameter)
    if one is None or other is None:
        return True
    if _seen_as(tensor) == _seen_as(parameter):
        return one == other
    return len(one) == len(other)


def _seen_as(value: Any) -> tuple[bool, bool]:
    """Return the attributes by which two shapes are comparable: both whole, or both local."""
    return hasattr(value, "chunks"), hasattr(value, "placements")


def stateless_parameters(state_dict: Mapping[str, Any]) -> list[str]:
    """Return parameters of an optimizer that have no state while others have some.

    Optimizers like Adam create the state of a parameter at its first step, so a parameter that
    never had a gradient has none.
    """
    if "param_groups" not in "\n".join(state_dict):
        return []
    states = OptimizerStates(state_dict)
    with_state = {state.parameter for fqn in state_dict if (state := states.of(fqn)) is not None}
    named = states.named_parameters()
    return [name for name in named if name not in with_state] if with_state else []


def positional_faults(state_dict: Mapping[str, Any]) -> list[Fault]:
    """Return the fault of optimizer state that names its parameters by their positions."""
    # One search for all keys: most state dicts have no such key.
    if not re.search(r"state\.\d", "\n".join(state_dict)):
        return []
    states = OptimizerStates(state_dict)
    first = next(filter(states.is_positional, state_dict), None)
    if first is None:
        return []
    headline = "names its parameter by its position in the optimizer, which places it nowhere"
    return [Fault(first.rpartition(".")[0], headline, FLATTEN)]


def listed_faults(state_dict: Mapping[str, Any], rename: Callable[[str], Any]) -> list[Fault]:
    """Return the parameter groups that list parameters by names which ``rename`` changes."""
    headline = (
        "it lists parameters by this rank's names, which rename= changes: another rank would not "
        "find its own in it"
    )
    return [
        Fault(fqn, headline, FLATTEN)
        for fqn, names in _listed(state_dict)
        if any(isinstance(name, str) and _changes(rename, name) for name in names)
    ]


def listed_notes(state_dict: Mapping[str, Any], patterns: Iterable[str]) -> list[Fault]:
    """Return the parameter groups that list parameters with a number of this topology.

    Args:
        state_dict: Of one rank, with the checkpoint's keys.
        patterns: Of the numbers, as of ``Renumber``.
    """
    finders = [number_finder(pattern) for pattern in patterns]
    headline = "it lists parameters by names with a number that is another one in another topology"
    reason = "reason:      only a load with the same numbers on each rank has them"
    return [
        Fault(fqn, headline, (reason, *FLATTEN))
        for fqn, names in _listed(state_dict)
        if any(one.search(f".{name}") for one in finders for name in names)
    ]


def _listed(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the keys of parameter groups that list parameters, and the lists."""
    for fqn, value in state_dict.items():
        if fqn.endswith(".params") and isinstance(value, list) and "param_groups." in fqn:
            yield fqn, value


def _changes(rename: Callable[[str], Any], name: str) -> bool:
    try:
        return bool(rename(name) != name)
    except PlacementError:
        return True


_STATE = re.compile(r"(?<![^.])state\.")
_POSSIBLE = re.compile(r"(?:\.|^)state\.[^.]+\.")
_GROUPS = re.compile(r"(?:\.|^)param_groups(?:\.|$)(.*)", re.DOTALL)
_POSITION = re.compile(r"(?:^|\.)state\.(\d+)\.[^.]+$")

FLATTEN = (
    "likely:      optimizer.state_dict(), or an optimizer state dict that is not flattened",
    "way out:     torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, "
    "optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)): its keys are the "
    "parameters' names",
)
