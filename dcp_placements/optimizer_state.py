"""Which parameter an optimizer state key speaks of.

Every form that torch produces ends in ``state.<parameter>.<name>``, nested or flattened, whatever
stands before it; hyperparameters stand in ``param_groups.<parameter>.<name>`` or, nested, in
``param_groups.<number>``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dcp_placements.errors import Fault, PlacementError


def parameters_of(fqn: str) -> list[str]:
    """Return the parameters that an optimizer state key may speak of.

    >>> parameters_of("optim.state.layers.0.w.exp_avg")
    ['layers.0.w']
    >>> parameters_of("model.layers.0.w")
    []

    A parameter with a ``state`` of its own in its name makes several candidates, longest first.
    """
    if "state." not in fqn:
        return []
    parts = fqn.split(".")[:-1]
    starts = [i + 1 for i, part in enumerate(parts) if part == "state"]
    return [".".join(parts[start:]) for start in starts if start < len(parts)]


def states_of_parameters(fqns: Iterable[str]) -> dict[str, list[str]]:
    """Return the state keys of each parameter that has any: ``{key without its name: keys}``."""
    found: dict[str, list[str]] = {}
    for fqn in fqns:
        if parameters_of(fqn):
            found.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    return found


def stateless_parameters(state_dict: Mapping[str, Any]) -> list[str]:
    """Return parameters that an optimizer knows of and has no state for, where others have some.

    Adam and its kin make the state of a parameter at its first step, so a parameter that never
    had a gradient has none.
    """
    if not any("param_groups" in fqn for fqn in state_dict):
        return []
    known: dict[str, None] = {}
    with_state: set[str] = set()
    for fqn, value in state_dict.items():
        with_state.update(parameters_of(fqn))
        parts = fqn.split(".")
        if "param_groups" not in parts:
            continue
        rest = parts[parts.index("param_groups") + 1 :]
        if len(rest) == 2 and rest[0].isdigit():
            if rest[1] == "params" and isinstance(value, list):
                known.update(dict.fromkeys(name for name in value if isinstance(name, str)))
        elif len(rest) > 1:
            known[".".join(rest[:-1])] = None
    return [name for name in known if name not in with_state] if with_state else []


def counted_state(state_dict: Mapping[str, Any]) -> list[str]:
    """Return the state keys that know their parameter by its number in ``optimizer.state_dict()``.

    ``state.0.exp_avg`` is one, unless the state dict has a parameter that is called ``0``.
    """
    found = [fqn for fqn in state_dict if "state." in fqn and _COUNTED.search(fqn) is not None]
    if not found:
        return []
    parameters = {fqn.rpartition(".")[2] for fqn in state_dict if not parameters_of(fqn)}
    return [fqn for fqn in found if fqn.split(".")[-2] not in parameters]


def counted_fault(fqn: str, why: str) -> Fault:
    """Return the fault that a state key knows its parameter by a number, and why that matters."""
    return Fault(
        fqn.rpartition(".")[0],
        f"this optimizer state knows its parameter by a number, which does not tell where it "
        f"belongs: {why}",
        FLATTEN,
    )


def listed_faults(state_dict: Mapping[str, Any], rename: Callable[[str], Any]) -> list[Fault]:
    """Return the parameter groups that list parameters by names which ``rename`` changes."""
    return [
        Fault(
            fqn,
            "it lists parameters by this rank's names, which rename= changes: another rank would "
            "not find its own in it",
            FLATTEN,
        )
        for fqn, value in state_dict.items()
        if fqn.endswith(".params")
        and isinstance(value, list)
        and "param_groups." in fqn
        and any(isinstance(name, str) and _changes(rename, name) for name in value)
    ]


def _changes(rename: Callable[[str], Any], name: str) -> bool:
    try:
        return bool(rename(name) != name)
    except PlacementError:
        return True


_COUNTED = re.compile(r"(?:^|\.)state\.\d+\.[^.]+$")

FLATTEN = (
    "likely:      optimizer.state_dict(), or an optimizer state dict that is not flattened",
    "way out:     torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, "
    "optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)): its keys are the "
    "parameters' names",
)
