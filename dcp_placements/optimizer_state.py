"""Which parameter an optimizer state key speaks of.

Every form that torch produces ends in ``state.<parameter>.<name>``, nested or flattened, whatever
stands before it; hyperparameters stand in ``param_groups.<parameter>.<name>`` or, nested, in
``param_groups.<number>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


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
