"""Which keys are optimizer state, and of which parameter.

Every form that torch produces is ``<head>.state.<parameter>.<name>``, nested or flattened, with
hyperparameters in ``<head>.param_groups.<parameter>.<name>`` or, nested, in
``<head>.param_groups.<number>.<name>``, of which ``params`` lists the parameters. But a model may
have the key ``state`` as well, or a module of that name, so the word alone proves nothing: a key is
optimizer state if its parameter is among the keys, or if there are parameter groups of the same
head.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from dcp_placements.errors import Fault, PlacementError
from dcp_placements.names.renames import number_finder

UNSEEN: Any = object()
"""A tensor of unknown shape."""


def possible_parameters(fqn: str) -> list[str]:
    """Return the parameters that a key may belong to if it is optimizer state.

    >>> possible_parameters("optim.state.layers.0.w.exp_avg")
    ['layers.0.w']
    >>> possible_parameters("model.layers.0.w")
    []

    A parameter with a ``state`` of its own in its name makes several candidates, longest first.
    """
    parent = fqn.rpartition(".")[0]
    return [parent[match.end() :] for match in _STATE.finditer(parent)]


@dataclass(frozen=True, slots=True)
class State:
    """The parameter of an optimizer state key.

    Attributes:
        parameter: Its name in the optimizer.
        group: The common prefix of the keys of its state, up to and with the parameter.
    """

    parameter: str
    group: str


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

    def of(self, fqn: str) -> State | None:
        """Return the parameter that a key is optimizer state of; None if it is not state."""
        parent = fqn.rpartition(".")[0]
        if "state." not in parent:
            return None
        if parent not in self._states:
            self._states[parent] = self._keys.state(parent)
        return self._states[parent]

    def keys_of(self, parameter: str) -> list[str]:
        """Return the keys of the tensors that an optimizer may call ``parameter``."""
        return [key for key in self._keys.ending_in(parameter) if key in self._keys.values]

    @cached_property
    def _keys(self) -> _Keys:
        """The keys as they are searched; not needed where no key has ``state`` in it."""
        values: dict[str, Any] = {}
        for held in reversed(self._held):
            values.update(held.items())
        possible = {fqn for fqn in values if "state." in fqn and _POSSIBLE.search(fqn)}
        tensors = {fqn for fqn, value in values.items() if _is_tensor(value)}
        keys = _Keys(values, possible, {*self._names, *(tensors - possible)})
        # A key that is not state of these is a parameter: of a model under a key ``state``.
        parents = {fqn.rpartition(".")[0] for fqn in possible}
        self._states = {parent: keys.state(parent) for parent in parents}
        others = {fqn for fqn in tensors & possible if not self._states[fqn.rpartition(".")[0]]}
        if others:
            self._states.clear()
        return _Keys(values, possible, keys.parameters | others) if others else keys


class _Keys:
    """Keys in the order in which they are searched.

    Args:
        values: All values by key.
        possible: Keys that may be state.
        parameters: Names of tensors that may have state.
    """

    def __init__(self, values: dict[str, Any], possible: set[str], parameters: set[str]) -> None:
        self.values = values
        self.parameters = parameters
        self._possible = sorted(possible)
        # Reversed: names with one ending are adjacent.
        self._reversed = sorted([f".{name}"[::-1] for name in parameters])
        self._groups = named_by_groups(values)

    def state(self, parent: str) -> State | None:
        """Return the parameter of a key of optimizer state without its last component."""
        for match in _STATE.finditer(parent):
            named = self._groups.get(parent[: match.start()])
            runs = list(accumulate(parent[match.end() :].split("."), "{}.{}".format))[::-1]
            for run in runs:
                group = parent[: match.end()] + run
                if (named and run in named) or self._has_state(run, group):
                    return State(run, group)
            if named is not None and not named:
                return State(runs[0], parent)
        return None

    def ending_in(self, parameter: str) -> list[str]:
        """Return the names of possible parameters that equal this one or end in it."""
        return [name[-2::-1] for name in _below(self._reversed, parameter[::-1])]

    def _has_state(self, parameter: str, group: str) -> bool:
        """Whether there is such a parameter that can have the state in its group."""
        keys = self.ending_in(parameter)
        if not keys:
            return False
        members = [self.values[fqn] for fqn in _below(self._possible, group)]
        tensors = [value for value in members if _is_tensor(value) and _shape(value) != ()]
        step = f"{group}.step"
        if not tensors or (step in self.values and not _shape(self.values[step])):
            return True
        return any(
            _may_be_of(tensor, self.values.get(key, UNSEEN)) for key in keys for tensor in tensors
        )


def _below(names: list[str], head: str) -> list[str]:
    """Return the names of a sorted list that begin with ``head.``."""
    # "/" is the character after ".".
    return names[bisect_left(names, f"{head}.") : bisect_left(names, f"{head}/")]


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or the metadata of one."""
    return value is UNSEEN or hasattr(value, "shape") or hasattr(value, "chunks")


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor or of its metadata; None if unknown."""
    shape = getattr(value, "size" if hasattr(value, "chunks") else "shape", None)
    return None if shape is None else tuple(shape)


def _may_be_of(tensor: Any, parameter: Any) -> bool:
    """Whether a tensor can be state of a parameter, by its shape."""
    one, other = _shape(tensor), _shape(parameter)
    if one is None or other is None:
        return True
    # Two shapes are comparable if both are whole, or both local.
    if all(hasattr(tensor, kind) == hasattr(parameter, kind) for kind in ("chunks", "placements")):
        return one == other
    return len(one) == len(other)


def named_by_groups(values: Mapping[str, Any]) -> dict[str, dict[str, None]]:
    """Return the names in parameter groups by the head of their optimizer, with its dot."""
    groups: dict[str, dict[str, None]] = {}
    for fqn, value in values.items():
        match = _GROUPS.search(fqn) if "param_groups" in fqn else None
        if match is None:
            continue
        named = groups.setdefault(fqn[: match.start()], {})
        name, _, last = match[1].rpartition(".")
        if not name.isdigit():
            named |= {name: None} if name else {}
        elif last == "params" and isinstance(value, list):
            named |= dict.fromkeys(map(str, value))
    return groups


def stateless_parameters(state_dict: Mapping[str, Any]) -> list[str]:
    """Return parameters of an optimizer that have no state while others have some.

    Optimizers like Adam create the state of a parameter at its first step, so a parameter that
    never had a gradient has none.
    """
    named = [name for names in named_by_groups(state_dict).values() for name in names]
    if not named:
        return []
    states = OptimizerStates(state_dict)
    with_state = {state.parameter for fqn in state_dict if (state := states.of(fqn)) is not None}
    return [name for name in dict.fromkeys(named) if name not in with_state] if with_state else []


def positional_faults(state_dict: Mapping[str, Any]) -> list[Fault]:
    """Return the fault of optimizer state that names its parameters by their positions."""
    listed: dict[str, set[int]] = {}
    for fqn, names in _listed(state_dict):
        numbers = {name for name in names if isinstance(name, int)}
        listed.setdefault(fqn[: fqn.rindex("param_groups.")], set()).update(numbers)
    for fqn in state_dict if any(listed.values()) else ():
        match = _POSITION.search(fqn)
        if match is not None and int(match[1]) in listed.get(fqn[: match.start()], ()):
            headline = "names its parameter by its position in the optimizer, which places it "
            return [Fault(match.string[: match.end() - 1], f"{headline}nowhere", FLATTEN)]
    return []


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
_POSSIBLE = re.compile(r"(?<![^.])state\.[^.]+\.")
_POSITION = re.compile(r"(?<![^.])state\.(\d+)\.")
_GROUPS = re.compile(r"(?<![^.])param_groups(?:\.|$)(.*)", re.DOTALL)

FLATTEN = (
    "likely:      optimizer.state_dict(), or an optimizer state dict that is not flattened",
    "way out:     torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, "
    "optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)): its keys are the "
    "parameters' names",
)
