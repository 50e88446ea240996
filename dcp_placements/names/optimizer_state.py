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
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from dcp_placements.errors import Fault

Shape = tuple[int, ...]
Dims = tuple[int | None, ...]
"""For each dim of a state the dim of its parameter that it follows; None of one that is reduced."""


def followed_dims(state: Shape, parameter: Shape) -> tuple[Dims, ...]:
    """Return the ways in which optimizer state of a shape can follow its parameter, dim by dim.

    A dim of size 1 where the parameter's has another size is reduced. A state of one dim less, as a
    factored moment, lacks one that fits.

    >>> followed_dims((4, 3), (4, 3)), followed_dims((4, 1), (4, 3)), followed_dims((3,), (4, 3))
    (((0, 1),), ((0, None),), ((1,),))
    >>> followed_dims((4,), (4, 4)), followed_dims((3, 3), (4, 3))
    (((0,), (1,)), ())

    Args:
        state: Its shape, in elements.
        parameter: That of its parameter; both of the same rank, or both of the whole.

    Returns:
        None for a scalar and for any other shape, which follows no layout; several where more than
        one dim may be the one that a factored moment lacks.
    """
    if not state:
        return ()
    if len(state) == len(parameter):
        pairs = list(enumerate(zip(state, parameter, strict=True)))
        if any(size not in (1, whole) for _, (size, whole) in pairs):
            return ()
        return (tuple([dim if size == whole else None for dim, (size, whole) in pairs]),)
    if len(state) + 1 != len(parameter):
        return ()
    dims = range(len(parameter))
    kept = [tuple([dim for dim in dims if dim != lost]) for lost in reversed(dims)]
    return tuple([one for one in kept if state == tuple([parameter[dim] for dim in one])])


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


class State(NamedTuple):
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
            self._states[parent] = self._state(parent, self._parameters)
        return self._states[parent]

    def keys_of(self, parameter: str) -> list[str]:
        """Return the keys of the tensors that an optimizer may call ``parameter``."""
        return [key for key in _ending_in(self._parameters, parameter) if key in self._values]

    # What is searched; not needed where no key has ``state`` in it.

    @cached_property
    def _values(self) -> dict[str, Any]:
        return {fqn: value for held in reversed(self._held) for fqn, value in held.items()}

    @cached_property
    def _possible(self) -> list[str]:
        """Keys that may be state, sorted."""
        return sorted([fqn for fqn in self._values if "state." in fqn and _POSSIBLE.search(fqn)])

    @cached_property
    def _groups(self) -> dict[str, set[str]]:
        groups = parameter_groups(self._values)
        return {head: set(map(str, names)) for head, names in groups.items()}

    @cached_property
    def _parameters(self) -> list[str]:
        """Names of tensors that may have state, reversed: those with one ending are adjacent."""
        tensors = {fqn for fqn, value in self._values.items() if _is_tensor(value)}
        parameters = {*self._names, *tensors.difference(self._possible)}
        others = tensors.intersection(self._possible)
        # A key that is not state of these is a parameter: of a model under a key ``state``.
        first = _reversed(parameters)
        parents = {fqn.rpartition(".")[0] for fqn in others}
        states = {parent for parent in parents if self._state(parent, first)}
        parameters.update(fqn for fqn in others if fqn.rpartition(".")[0] not in states)
        return _reversed(parameters)

    def _state(self, parent: str, parameters: list[str]) -> State | None:
        """Return the parameter of a key of optimizer state without its last component."""
        for match in _STATE.finditer(parent):
            named = self._groups.get(parent[: match.start()])
            runs = list(accumulate(parent[match.end() :].split("."), "{}.{}".format))[::-1]
            for run in runs:
                group = parent[: match.end()] + run
                keys = _ending_in(parameters, run)
                if (named and run in named) or (keys and self._can_be_of(group, keys)):
                    return State(run, group)
            if named is not None and not named:
                return State(runs[0], parent)
        return None

    def _can_be_of(self, group: str, keys: list[str]) -> bool:
        """Whether the state in a group can be that of one of some parameters."""
        members = [self._values[fqn] for fqn in _below(self._possible, group)]
        tensors = [value for value in members if _is_tensor(value) and _shape(value) != ()]
        step = f"{group}.step"
        if not tensors or (step in self._values and not _shape(self._values[step])):
            return True
        parameters = [self._values.get(key, UNSEEN) for key in keys]
        return any(_may_be_of(one, other) for other in parameters for one in tensors)


def _reversed(names: Iterable[str]) -> list[str]:
    return sorted([f".{name}"[::-1] for name in names])


def _ending_in(reversed_names: list[str], parameter: str) -> list[str]:
    """Return the names that equal this one or end in it."""
    return [name[-2::-1] for name in _below(reversed_names, parameter[::-1])]


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


Groups = dict[str, dict[str | int, str]]
"""By the head of an optimizer, with its dot: the parameters in its groups, and the key that names
each."""


def parameter_groups(values: Mapping[str, Any]) -> Groups:
    """Return the parameters in parameter groups.

    >>> parameter_groups({"optim.param_groups.0.params": ["w"], "optim.param_groups.b.lr": 0.1})
    {'optim.': {'w': 'optim.param_groups.0.params', 'b': 'optim.param_groups.b.lr'}}
    """
    groups: Groups = {}
    for fqn, value in values.items():
        match = _GROUPS.search(fqn) if "param_groups" in fqn else None
        if match is None:
            continue
        named = groups.setdefault(fqn[: match.start()], {})
        name, _, last = match[1].rpartition(".")
        if name and not name.isdigit():
            named[name] = fqn
        elif last == "params" and isinstance(value, list):
            named.update({one: fqn for one in value if isinstance(one, str | int)})
    return groups


def stateless_parameters(state_dict: Mapping[str, Any], groups: Groups) -> list[str]:
    """Return parameters of an optimizer that have no state while others have some.

    Optimizers like Adam create the state of a parameter at its first step, so a parameter that
    never had a gradient has none.
    """
    named = [str(name) for names in groups.values() for name in names]
    states = OptimizerStates(state_dict)
    with_state = {state.parameter for fqn in state_dict if (state := states.of(fqn)) is not None}
    return [name for name in dict.fromkeys(named) if name not in with_state] if with_state else []


class ParameterNames(list[str]):
    """The parameters that a parameter group lists, by the checkpoint's names.

    Ranks list other parameters in one group, so these lists are not compared: a save stores those
    of all ranks as one list, and a load leaves a rank's own as it is. Pickled it is a list.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([*self],)


def named_lists(
    state_dict: Mapping[str, Any], fqns_of: Callable[[str], tuple[str, ...]] | None
) -> tuple[dict[str, ParameterNames], list[Fault]]:
    """Return the lists of parameters in parameter groups under the checkpoint's names.

    A name becomes what its optimizer state becomes, whose keys it is part of.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        fqns_of: What a rename makes of a key; None for no rename.

    Returns:
        The lists by key, and a fault for each whose names the rename does not take.
    """
    lists: dict[str, dict[str, None]] = {}
    faults = []
    for head, named in parameter_groups(state_dict).items():
        state = f"{head}state."
        for name, fqn in named.items():
            if not isinstance(name, str) or not _LIST.fullmatch(fqn, len(head)):
                continue
            new: tuple[str, ...] = (name,)
            if fqns_of is not None:
                try:
                    new = fqns_of(f"{state}{name}")
                    if not all(one.startswith(state) for one in new):
                        new = fqns_of(name)
                except Exception as error:  # whatever a function of the user's raises
                    headline = f"rename= does not take {name!r}, which it lists: {error!r}"
                    faults.append(Fault(fqn, headline, (FLATTEN,)))
            lists.setdefault(fqn, {}).update(dict.fromkeys([o.removeprefix(state) for o in new]))
    return {fqn: ParameterNames(names) for fqn, names in lists.items()}, faults


def is_by_position(fqn: str) -> bool:
    """Whether a key is an option of a parameter group that has a number for its name.

    >>> is_by_position("optim.param_groups.0.lr"), is_by_position("optim.param_groups.0.weight.lr")
    (True, False)
    """
    return _BY_POSITION.search(fqn) is not None


def unnamed_faults(state_dict: Mapping[str, Any], groups: Groups) -> list[Fault]:
    """Return the faults of optimizer state that has the positions of its parameters."""
    found: dict[str, None] = {}
    for head, named in groups.items():
        if any(isinstance(name, int) for name in named):
            position = re.compile(rf"{re.escape(head)}state\.\d+(?=\.)")
            if match := next(filter(None, map(position.match, state_dict)), None):
                found[match[0]] = None
    headline = "names its parameter by its position in the optimizer"
    return [Fault(fqn, headline, (FLATTEN,)) for fqn in found]


_STATE = re.compile(r"(?<![^.])state\.")
_POSSIBLE = re.compile(r"(?<![^.])state\.[^.]+\.")
_GROUPS = re.compile(r"(?<![^.])param_groups(?:\.|$)(.*)", re.DOTALL)
_BY_POSITION = re.compile(r"(?<![^.])param_groups\.\d+\.[^.]+\Z")
_LIST = re.compile(r"param_groups\.(?:\d+\.)?params")

FLATTEN = (
    "way out:     torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, "
    "optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)): its keys are the "
    "parameters' names"
)
