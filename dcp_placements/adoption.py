"""A framework's own planner, served: one object of a class of theirs and of ours.

Some frameworks derive from torch's planners, for a check or an option of their own. The adopted
planner is of their class first, so that their hooks are the ones that torch calls; where a hook
calls ``super()``, it reaches our planner in place of torch's::

    class Theirs(DefaultLoadPlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()    # PlacementLoadPlanner's
            self.missing = [...]                  # seen on the framework's instance, too
            return plan

    adopt(theirs, ours)                           # Theirs, AdoptedLoad, PlacementLoadPlanner, ...

Ours is an object beside it, with attributes of its own, so that a framework may call its attributes
as it likes: ``rules``, ``step``, ``_load``. The adopted planner has the very ``__dict__`` of the
framework's instance.

A hook that makes everything by itself, or calls torch's class by name, would leave ours out. It is
known by its bytecode (``obstacle``), and where only some of its branches call ``super()``, when it
has returned.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from types import CodeType, FunctionType, new_class
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, WriteItem
from torch.distributed.checkpoint.planner import WriteItemType

from dcp_placements._torch import WholeFileLoadPlanner
from dcp_placements.errors import PlacementError
from dcp_placements.load.planner import PlacementLoadPlanner
from dcp_placements.save.planner import PlacementSavePlanner
from dcp_placements.storage.record_writes import check_data

PLANNING = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan")
"""The hooks that torch calls once in a save or load, each of which has to reach ours."""

ITEM_HOOKS = ("lookup_object", "transform_object", "lookup_tensor", "transform_tensor")
"""The hooks that our planner calls itself, for an item."""

MAY_DIFFER = "allow_shape_mismatch_sharded_tensors"
"""Where Megatron's load planner has the tensors of which the checkpoint may have fewer rows."""

BOND = "_dcp_placements_bond"
"""The attribute of an adopted planner that is its ``Bond``; in a slot, not in its ``__dict__``."""


@dataclass
class Bond:
    """What an adopted planner is made of.

    Attributes:
        theirs: The framework's instance.
        ours: The planner that ``super()`` reaches.
        reached: How often each hook of ours was called.
    """

    theirs: Any
    ours: Any
    reached: dict[str, int]


def bond_of(planner: Any) -> Bond:
    """Return the bond of an adopted planner."""
    bond: Bond = getattr(planner, BOND)
    return bond


def ours_of(planner: Any) -> Any:
    """Return the planner of this package that serves: of an adopted planner, the one beside it."""
    return bond_of(planner).ours if isinstance(planner, AdoptedSave | AdoptedLoad) else planner


def _passed_on(hook: Callable[..., Any], planned: tuple[str, ...]) -> Callable[..., Any]:
    """Return a hook that calls that of ours, and keeps what torch's planner would keep."""
    name = hook.__name__

    @functools.wraps(hook)
    def passed_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        bond = bond_of(self)
        result = hook(bond.ours, *args, **kwargs)
        if name in PLANNING:
            bond.reached[name] = bond.reached.get(name, 0) + 1
            values = {each: getattr(bond.ours, each) for each in planned}
            vars(self).update({each: kept for each, kept in values.items() if kept is not None})
        return result

    return passed_on


def _torchs_attribute(name: str) -> property:
    """Return an attribute that torch's planners have: ours has it, and theirs is told of it."""

    def put(planner: Any, value: Any) -> None:
        setattr(bond_of(planner).ours, name, value)
        vars(planner)[name] = value

    return property(lambda planner: getattr(bond_of(planner).ours, name), put)


class _OursUnlessTheirs:
    """A name of our class, where neither their class nor their instance has it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, planner: Any, kind: type) -> Any:
        return self if planner is None else getattr(bond_of(planner).ours, self._name)


def _bridge(
    name: str,
    ours: type,
    torchs: type,
    *,
    hooks: tuple[str, ...],
    options: tuple[str, ...],
    planned: tuple[str, ...],
) -> Any:
    """Return the class between theirs and ours: whatever ``super()`` calls goes to the bond's ours.

    Args:
        name: The name of the class.
        ours: Our planner's class.
        torchs: The class of torch that both derive from.
        hooks: The hooks that our planner has or inherits, besides ``PLANNING``.
        options: The attributes of torch's planner that are its options.
        planned: Those that are what it plans.
    """
    attributes = (*options, *planned)
    own = {each for each in dir(ours) if not hasattr(torchs, each) and each not in attributes}
    return type(
        name,
        (ours,),
        {
            "__module__": __name__,
            "__getattr__": lambda planner, each: getattr(bond_of(planner).ours, each),
            **{each: _OursUnlessTheirs(each) for each in own},
            **{each: _torchs_attribute(each) for each in attributes},
            **{each: _passed_on(getattr(ours, each), planned) for each in (*PLANNING, *hooks)},
        },
    )


_FLATTENING = ("flatten_state_dict", "flatten_sharded_tensors")
_DATA_HOOKS = ("resolve_data", "lookup_object", "transform_object")

AdoptedSave = _bridge(
    "AdoptedSave",
    PlacementSavePlanner,
    DefaultSavePlanner,
    hooks=_DATA_HOOKS,
    options=(*_FLATTENING, "dedup_save_to_lowest_rank"),
    planned=(
        "state_dict",
        "mappings",
        "plan",
        "global_plan",
        "metadata",
        "is_coordinator",
    ),
)
AdoptedLoad = _bridge(
    "AdoptedLoad",
    PlacementLoadPlanner,
    DefaultLoadPlanner,
    hooks=(
        "load_bytes",
        "resolve_tensor",
        "commit_tensor",
        "lookup_tensor",
        "transform_tensor",
        "finish_reads",
    ),
    options=(*_FLATTENING, "allow_partial_load"),
    planned=(
        "state_dict",
        "original_state_dict",
        "mappings",
        "metadata",
        "is_coordinator",
    ),
)


def adopt(theirs: Any, ours: Any) -> Any:
    """Return a planner of their class and of ours; of a planner that has no ``obstacle``.

    Args:
        theirs: The framework's. What hooks set on the adopted planner is seen on it.
        ours: A planner of this package for this save or load alone, with the options of theirs.
    """
    kind: Any = type(theirs)
    planner = object.__new__(_adopted_class(kind))
    object.__setattr__(planner, "__dict__", vars(theirs))
    object.__setattr__(planner, BOND, Bond(theirs, ours, {}))
    # Ours calls these itself, and has to get what their class makes of them.
    for hook in ITEM_HOOKS:
        if any(hook in vars(each) for each in _their_classes(kind)):
            setattr(ours, hook, getattr(planner, hook))
    return planner


def obstacle(planner: Any, torchs: type) -> str:
    """Return why a planner cannot be adopted, in words that follow its name; empty if it can.

    Args:
        planner: The framework's.
        torchs: ``DefaultSavePlanner`` in a save, ``DefaultLoadPlanner`` in a load.
    """
    kind: Any = type(planner)
    if not issubclass(kind, torchs):
        return f"derives from no {torchs.__name__}"
    if issubclass(kind, WholeFileLoadPlanner):
        return "loads whole tensors under whatever keys the checkpoint has, on one rank"
    if getattr(planner, MAY_DIFFER, None):
        return f"lets shapes differ from the checkpoint's ({MAY_DIFFER})"
    if any("__slots__" in vars(each) and vars(each)["__slots__"] for each in _their_classes(kind)):
        return "keeps attributes in __slots__"
    bridge: Any = AdoptedSave if torchs is DefaultSavePlanner else AdoptedLoad
    called = {name for name in dir(bridge) if isinstance(vars(bridge).get(name), FunctionType)}
    reasons = [f"has {name}() on the instance" for name in sorted(called & vars(planner).keys())]
    for each in _their_classes(kind):
        for name, value in vars(each).items():
            if name.startswith("__") or not callable(getattr(torchs, name, None)):
                continue
            if name not in called:
                reasons.append(f"overrides {name}(), which planners of this package do not call")
            elif not calls_super(value, name):
                where = "" if each is kind else f" of {each.__qualname__}"
                reasons.append(f"overrides {name}(){where} without super().{name}()")
    if not reasons:
        try:
            _adopted_class(kind)
        except TypeError as error:
            return f"takes no further base class: {error}"
    return ", and ".join(reasons)


def _their_classes(kind: type) -> list[type]:
    """Return a class and its bases as far as those of torch."""
    torchs = (DefaultSavePlanner, DefaultLoadPlanner)
    return list(takewhile(lambda each: each not in torchs, kind.__mro__))


_LOADS_A_NAME = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")


def calls_super(hook: Any, name: str) -> bool:
    """Whether a function calls ``super().name``, or ``super(Class, self).name``, anywhere.

    What cannot be looked into, such as a wrapper that does not name what it wraps, does not.
    """
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    if not isinstance(function, FunctionType):
        return False
    for code in _codes(function.__code__):
        after_super = False
        for step in dis.get_instructions(code):
            if step.argval == "super" and step.opname in _LOADS_A_NAME:
                after_super = True
            elif step.opname.startswith(("STORE_", "RETURN_", "POP_TOP")):
                after_super = False  # another statement
            elif after_super and step.argval == name:
                return True
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of those that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _reaching_ours(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a hook of theirs that is refused if it returns without having called ours."""

    @functools.wraps(hook)
    def reaching_ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        reached = bond_of(self).reached
        before = reached.get(name, 0)
        result = hook(self, *args, **kwargs)
        if reached.get(name, 0) == before:
            kind = type(bond_of(self).theirs)
            raise PlacementError(
                f"{kind.__module__}.{kind.__qualname__}.{name}() returned without having called "
                f"super().{name}()\n"
                "    likely:      a branch, or an error that it handles, which goes without\n"
                "    way out:     call it in every branch; or save and load without installed()"
            )
        return result

    return reaching_ours


def _checked(resolve_data: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``resolve_data`` of theirs whose tensors are compared with what the metadata say."""

    @functools.wraps(resolve_data)
    def checked(self: Any, write_item: WriteItem) -> Any:
        data = resolve_data(self, write_item)
        if write_item.type != WriteItemType.BYTE_IO:
            check_data(data, write_item)
        return data

    return checked


def _reduced(planner: Any, _protocol: int) -> tuple[Any, ...]:
    """Pickle an adopted planner as the two that it is made of, for ``async_save`` in a process."""
    bond = bond_of(planner)
    ours = copy.copy(bond.ours)
    for hook in ITEM_HOOKS:
        vars(ours).pop(hook, None)
    return adopt, (bond.theirs, ours)


@functools.cache
def _adopted_class(kind: Any) -> Any:
    """Return the class of their class and of ours; always the same, as some register theirs."""
    bridge: Any = AdoptedSave if issubclass(kind, DefaultSavePlanner) else AdoptedLoad
    overridden = {name for each in _their_classes(kind) for name in vars(each)}
    namespace: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__slots__": (BOND,),
        "__reduce_ex__": _reduced,
    }
    for name in overridden & {*PLANNING}:
        namespace[name] = _reaching_ours(getattr(kind, name), name)
    if overridden & {*_DATA_HOOKS}:
        source = kind if "resolve_data" in overridden else bridge
        namespace["resolve_data"] = _checked(source.resolve_data)
    return new_class(kind.__name__, (kind, bridge), exec_body=lambda body: body.update(namespace))
