"""Which keys are optimizer state, of which parameter, and which of its dims a state follows.

Optimizer state is what ``param_groups`` names, in both of torch's forms: nested, where the list
``<head>.param_groups.<number>.params`` has the parameters, and flattened, where the key
``<head>.param_groups.<parameter>.<option>`` has one of them. State is ``<head>.state.<parameter>.``
and a name. A model may have a module ``state`` as well: without parameter groups of the same head,
or where they do not name the parameter, a key is no state.

Two ep ranks with an expert of (4, 3) each, trained by torch's Adafactor::

    optim.param_groups.0.params    ["experts.w"]
    optim.state.experts.w.step     State("optim.", "experts.w", "step")
    optim.state.experts.w.row_var  (4, 1): dim 0 follows dim 0 of the weight, dim 1 is reduced
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from dcp_placements.errors import Fault
from dcp_placements.layout.boxes import Shape
from dcp_placements.pages import OPTIMIZERS_PAGE

Dims = tuple[int | None, ...]
"""For each dim of a state, the dim of its parameter that it follows; None for a reduced dim."""


def followed_dims(state: Shape, parameter: Shape) -> tuple[Dims, ...]:
    """Return the ways in which optimizer state of a shape can follow its parameter, dim by dim.

    A dim of size 1 is reduced where the parameter's dim has another size. A state with one dim
    less, as a factored moment, lacks one of the parameter's dims.

    >>> followed_dims((4, 3), (4, 3)), followed_dims((4, 1), (4, 3)), followed_dims((3,), (4, 3))
    (((0, 1),), ((0, None),), ((1,),))
    >>> followed_dims((4,), (4, 4)), followed_dims((3, 3), (4, 3))
    (((0,), (1,)), ())

    Args:
        state: The shape of the state, in elements.
        parameter: The shape of its parameter; both are local shapes, or both whole ones.

    Returns:
        Empty for a scalar and for any other shape, which follows no layout; several ways where more
        than one dim may be the one that a factored moment lacks.
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
    return tuple([way for way in kept if state == tuple([parameter[dim] for dim in way])])


class State(NamedTuple):
    """A key of optimizer state, in its components.

    Attributes:
        head: The key of its optimizer, with a dot; empty where the state has no level above it.
        parameter: The name of its parameter in the optimizer.
        name: The name of the state, as ``exp_avg``.
    """

    head: str
    parameter: str
    name: str

    @property
    def owner(self) -> tuple[str, str]:
        """The parameter, of this optimizer."""
        return self.head, self.parameter

    @property
    def key(self) -> str:
        """The whole key."""
        return f"{self.head}state.{self.parameter}.{self.name}"


ParameterGroups = dict[str, dict[str | int, str]]
"""The parameters in the parameter groups of each optimizer, and the key that names each; by the
head of the optimizer, with its dot."""


def parameter_groups_in(values: Mapping[str, Any]) -> ParameterGroups:
    """Return the parameters in parameter groups.

    >>> parameter_groups_in({"optim.param_groups.0.params": ["w"], "optim.param_groups.b.lr": 0.1})
    {'optim.': {'w': 'optim.param_groups.0.params', 'b': 'optim.param_groups.b.lr'}}

    A numbered group has a list of parameters. Where a head has no list, a number is that of a
    group, unless other parameters have names. Options may be dicts: no parameter's name is that of
    another one, a dot and more.

    Args:
        values: A flat state dict, or the metadata of a checkpoint, which does not have the lists.
    """
    listed: dict[str, set[str]] = {}
    options: dict[str, dict[str, str]] = {}
    parameter_groups: ParameterGroups = {}
    for fqn, value in values.items():
        match = _GROUPS.search(fqn) if "param_groups" in fqn else None
        if match is None:
            continue
        head = fqn[: match.start()]
        named = parameter_groups.setdefault(head, {})
        name, _, last = match[1].rpartition(".")
        if last == "params" and (not name or name.isdigit()):
            listed.setdefault(head, set()).add(name)
            if isinstance(value, list):
                named.update(dict.fromkeys([n for n in value if isinstance(n, str | int)], fqn))
        elif name:
            options.setdefault(head, {})[name] = fqn
    for head, fqns in options.items():
        numbers = listed.get(head)
        if numbers is None:
            numbers = set(fqns) if all(map(str.isdigit, fqns)) else set()
        for name, fqn in fqns.items():
            components = name.split(".")
            shorter = [".".join(components[:end]) for end in range(1, len(components))]
            if components[0] not in numbers and not any(map(fqns.__contains__, shorter)):
                parameter_groups[head][name] = fqn
    return parameter_groups


def option_key(parameter_groups: ParameterGroups, state: State, option: str) -> str | None:
    """Return the key of an option of a parameter's group; None for a parameter without a group.

    >>> names = {"w": "optim.param_groups.0.params", "b": "optim.param_groups.b.lr"}
    >>> option_key({"optim.": names}, State("optim.", "w", "step"), "lr")
    'optim.param_groups.0.lr'
    >>> option_key({"optim.": names}, State("optim.", "b", "step"), "betas")
    'optim.param_groups.b.betas'
    """
    named = {str(name): key for name, key in parameter_groups.get(state.head, {}).items()}
    key = named.get(state.parameter)
    if key is None:  # a row of a stack
        forms = {_form(name): key for name, key in named.items() if "{}" in name}
        key = forms.get(_form(state.parameter))
    return None if key is None else f"{key.rpartition('.')[0]}.{option}"


class OptimizerStates:
    """Which keys are optimizer state, by the parameter groups among some keys.

    >>> states = OptimizerStates({"optim.param_groups.0.params": ["w"], "state.norm.weight": 1})
    >>> states.of("optim.state.w.exp_avg")
    State(head='optim.', parameter='w', name='exp_avg')
    >>> states.of("state.norm.weight")

    Where the groups of a head name no parameter, as in metadata of the nested form, all but the
    last component of a key is the parameter.

    Args:
        held: Flat state dicts, or the metadata of a checkpoint: values by key. The parameters of a
            head are those of the first that names any.
    """

    def __init__(self, *held: Mapping[str, Any]) -> None:
        self._names: dict[str, set[str]] = {}
        for parameter_groups in map(parameter_groups_in, held):
            for head, named in parameter_groups.items():
                if not self._names.get(head):
                    self._names[head] = set(map(str, named))
        # Unstacked rows have ``{}`` for their number.
        self._forms = {
            head: {_form(name) for name in names if "{}" in name}
            for head, names in self._names.items()
        }
        self._parents: dict[str, State | None] = {}

    def of(self, fqn: str) -> State | None:
        """Return a key of optimizer state in its components; None for any other key."""
        parent, _, last = fqn.rpartition(".")
        if not self._names or "state." not in parent:
            return None
        if parent not in self._parents:
            self._parents[parent] = self._of(parent)
        state = self._parents[parent]
        return state and state._replace(name=f"{state.name}{last}")

    def _of(self, parent: str) -> State | None:
        """Return the state of a key without its last component, which its name lacks, too."""
        for match in _STATE.finditer(parent):
            head, rest = parent[: match.start()], parent[match.end() :]
            if head not in self._names:
                continue
            if not self._names[head]:
                return State(head, rest, "")
            parameter = rest
            while parameter:
                if parameter in self._names[head] or _form(parameter) in self._forms[head]:
                    return State(head, parameter, f"{rest}."[len(parameter) + 1 :])
                parameter = parameter.rpartition(".")[0]
        return None

    def weights_of(
        self, parameters: Iterable[tuple[str, str]], keys: Iterable[str]
    ) -> dict[tuple[str, str], list[str]]:
        """Return the keys of the tensors that parameters of optimizers may be.

        A parameter ``w`` is the tensor ``model.w``, not ``model.block.w``, where the level
        ``model`` has more of the names that the optimizer has. Of several such levels, as a model
        and its average, those count that share most components with the key of the optimizer.

        Args:
            parameters: Head and name of each parameter.
            keys: The keys of the tensors.
        """
        wanted = dict.fromkeys(parameters)
        names: dict[str, set[str]] = {}
        for head, name in wanted:
            names.setdefault(head, set(self._names.get(head, ()))).add(name)
        all_names = set[str]().union(*names.values())
        keys_of: dict[str, list[tuple[str, str]]] = {}
        names_at: dict[str, set[str]] = {}
        for key in keys if all_names else ():
            if self.of(key) is None:
                end = key
                while end:
                    if end in all_names:
                        level = key[: len(key) - len(end)]
                        keys_of.setdefault(end, []).append((level, key))
                        names_at.setdefault(level, set()).add(end)
                    end = end.partition(".")[2]

        @cache
        def likeness(head: str, level: str) -> tuple[int, int]:
            shared = set(level.split(".")[:-1]).intersection(head.split(".")[:-1])
            return len(names_at[level] & names[head]), len(shared)

        tensors: dict[tuple[str, str], list[str]] = {}
        for head, name in wanted:
            ranked = [(likeness(head, level), key) for level, key in keys_of.get(name, ())]
            best = max([like for like, _ in ranked], default=None)
            tensors[head, name] = [key for like, key in ranked if like == best]
        return tensors


def states_among(keys: Iterable[str], lists: Mapping[str, Sequence[str]]) -> OptimizerStates:
    """Return which of some keys are optimizer state.

    >>> states_among(["optim.state.w.GG.0"], {"optim.param_groups.0.params": ["w"]}).of(
    ...     "optim.state.w.GG.0"
    ... )
    State(head='optim.', parameter='w', name='GG.0')

    Args:
        keys: Keys of tensors and objects.
        lists: The parameters that each parameter group lists, by its key.
    """
    return OptimizerStates({**dict.fromkeys(keys), **{key: [*of] for key, of in lists.items()}})


def _form(name: str) -> str:
    """Return a name with the same text for every number, and for ``{}``."""
    return _NUMBER.sub("#", name)


def stateless_parameters(
    keys: Iterable[str], states: OptimizerStates, parameter_groups: ParameterGroups
) -> list[str]:
    """Return parameters of an optimizer that have no state while others have some.

    Optimizers like Adam create the state of a parameter at its first step, so a parameter that
    never had a gradient has none.

    Args:
        keys: The keys of a state dict.
        states: The optimizer state among them.
        parameter_groups: The parameters in its parameter groups.
    """
    named = [str(name) for names in parameter_groups.values() for name in names]
    with_state = {state.parameter for fqn in keys if (state := states.of(fqn)) is not None}
    forms = set(map(_form, with_state))
    return [
        name
        for name in (dict.fromkeys(named) if with_state else ())
        if name not in with_state and not ("{}" in name and _form(name) in forms)
    ]


class ParameterNames(list[str]):
    """The parameters that a parameter group lists, by the checkpoint's names.

    Ranks list other parameters in one group, so these lists are not compared: a save stores those
    of all ranks as one list, and a load leaves a rank's own as it is. It is pickled as a list.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([*self],)

    def numbered(self, totals: Mapping[str, int]) -> ParameterNames:
        """Return the names of rows in place of each that has ``{}`` for their number.

        Args:
            totals: The number of rows by key with ``{}``, of parameters and of their state.
        """
        names: list[str] = []
        for name in self:
            # The shortest key is that of this name, and not of one that ends in it.
            own = min([key for key in totals if f".{name}." in f".{key}."], key=len, default=None)
            rows = (
                [name] if own is None else [name.replace("{}", str(n)) for n in range(totals[own])]
            )
            names += rows
        return ParameterNames(names)


def named_lists(
    state_dict: Mapping[str, Any], fqns_of: Callable[[str], tuple[str, ...]] | None
) -> tuple[dict[str, ParameterNames], list[Fault]]:
    """Return the lists of parameters in parameter groups under the checkpoint's names.

    A name is renamed as the keys of its optimizer state are, which contain it.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        fqns_of: Returns the keys that a rename makes of a key; None for no rename.

    Returns:
        The lists by key, and a fault for each whose names the rename does not take.
    """
    lists: dict[str, dict[str, None]] = {}
    faults = []
    for head, named in parameter_groups_in(state_dict).items():
        state = f"{head}state."
        # A parameter group may have no parameter on this rank, and some on others.
        lists |= {
            fqn: {}
            for fqn, value in state_dict.items()
            if fqn.startswith(head)
            and _LIST.fullmatch(fqn, len(head))
            and isinstance(value, list)
            and not value
        }
        for name, fqn in named.items():
            if not isinstance(name, str) or not _LIST.fullmatch(fqn, len(head)):
                continue
            new: tuple[str, ...] = (name,)
            if fqns_of is not None:
                try:
                    new = fqns_of(f"{state}{name}")
                    if not all(fqn_of.startswith(state) for fqn_of in new):
                        new = fqns_of(name)
                except Exception as error:  # the user's function may raise any
                    headline = f"rename= does not take {name!r}, which it lists: {error!r}"
                    faults.append(Fault(fqn, headline, (FLATTEN,)))
            lists.setdefault(fqn, {}).update(dict.fromkeys([o.removeprefix(state) for o in new]))
    return {fqn: ParameterNames(names) for fqn, names in lists.items()}, faults


def is_by_position(fqn: str, lists: Collection[str]) -> bool:
    """Whether a key is an option of a parameter group that has a number for its name.

    >>> lists = ["optim.param_groups.0.params"]
    >>> is_by_position("optim.param_groups.0.schedule.lr", lists)
    True
    >>> is_by_position("optim.param_groups.1.lr", lists)  # of a parameter called 1
    False

    Args:
        fqn: The key.
        lists: Keys, among them those of the lists of parameters; each numbered group has one.
    """
    match = _BY_POSITION.match(fqn)
    return match is not None and f"{match[0]}params" in lists


def unnamed_faults(state_dict: Mapping[str, Any], parameter_groups: ParameterGroups) -> list[Fault]:
    """Return a fault for each optimizer whose state names parameters by position."""
    by_position: dict[str, None] = {}
    for head, named in parameter_groups.items():
        if any(isinstance(name, int) for name in named):
            position = re.compile(rf"{re.escape(head)}state\.\d+(?=\.)")
            if match := next(filter(None, map(position.match, state_dict)), None):
                by_position[match[0]] = None
    headline = "names its parameter by its position in the optimizer"
    return [Fault(fqn, headline, (FLATTEN, OPTIMIZERS_PAGE)) for fqn in by_position]


_NUMBER = re.compile(r"\d+|\{\}")
_STATE = re.compile(r"(?<![^.])state\.")
_GROUPS = re.compile(r"(?<![^.])param_groups(?:\.|$)(.*)", re.DOTALL)
_BY_POSITION = re.compile(r"(?:.*?\.)??param_groups\.\d+\.", re.DOTALL)
_LIST = re.compile(r"param_groups\.(?:\d+\.)?params")

FLATTEN = (
    "way out:     torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, "
    "optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)): its keys are the "
    "parameters' names"
)
