"""Which placement a key takes: patterns over FQNs, the first match wins.

A pattern is dotted components matched against any run of whole components of the key. So one
pattern names a parameter and everything that is keyed by it: ``experts.w1`` matches
``layers.0.experts.w1``, ``model.layers.0.experts.w1`` and
``optim.state.layers.0.experts.w1.exp_avg``, and never ``shared_experts.w1``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from traceback import extract_tb
from typing import Any

from dcp_placements.errors import PlacementError
from dcp_placements.rules.mesh import mesh_state
from dcp_placements.rules.placement import CheckpointPlacement

Rules = Callable[[str, Any], CheckpointPlacement | None]
"""What the planners take: ``(fqn, tensor) -> CheckpointPlacement or None``."""

RuleTable = Mapping[str | re.Pattern[str], CheckpointPlacement | None]
"""What ``PlacementRules`` are made of."""


class PlacementRules:
    """Placements by pattern.

    >>> rules = PlacementRules({"hc_head.*": None, "head.weight": None})
    >>> rules.pattern_of("model.hc_head.weight")
    'hc_head.*'

    Args:
        rules: ``{pattern: CheckpointPlacement or None}`` in the order in which they are tried;
            with None the tensor keeps its own mesh and placements. ``*`` matches one component or
            a part of one (``weight*``), ``**`` any number of components. A compiled ``re.Pattern``
            is searched in the key instead.
        optional: Do not warn of patterns that match nothing: for the table of a family of models,
            each of which has some of the names.

    Raises:
        PlacementError: Not a mapping, an empty pattern, or a value that is not a
            ``CheckpointPlacement``.
    """

    def __init__(self, rules: RuleTable, *, optional: bool = False) -> None:
        if not isinstance(rules, Mapping):
            raise PlacementError(
                "PlacementRules takes a mapping {pattern: CheckpointPlacement or None}, "
                f"not {type(rules).__name__}"
            )
        self.optional = optional
        self._rules: list[tuple[str, re.Pattern[str], CheckpointPlacement | None]] = []
        for pattern, placement in rules.items():
            if placement is not None and not isinstance(placement, CheckpointPlacement):
                raise PlacementError(
                    f"rule {pattern!r} gives {placement!r}, which is no CheckpointPlacement "
                    "(None keeps the tensor's own mesh and placements)"
                )
            if isinstance(pattern, re.Pattern):
                self._rules.append((f"re:{pattern.pattern}", pattern, placement))
            else:
                self._rules.append((pattern, compile_pattern(pattern), placement))
        self._found: dict[str, tuple[str, CheckpointPlacement | None] | None] = {}

    def __call__(self, fqn: str, tensor: Any = None) -> CheckpointPlacement | None:
        """Return the placement of ``fqn``, or None if no rule matches or its rule is None."""
        found = self.find(fqn)
        return None if found is None else found[1]

    def find(self, fqn: str) -> tuple[str, CheckpointPlacement | None] | None:
        """Return the first pattern that matches ``fqn`` and its placement, or None."""
        if fqn not in self._found:
            matching = (
                (name, placement)
                for name, regex, placement in self._rules
                if regex.search(fqn if name.startswith("re:") else "." + fqn)
            )
            self._found[fqn] = next(matching, None)
        return self._found[fqn]

    def pattern_of(self, fqn: str) -> str | None:
        """Return the first pattern that matches ``fqn``, or None."""
        found = self.find(fqn)
        return None if found is None else found[0]

    @property
    def meshes(self) -> list[Any]:
        """The meshes that the rules name, each once."""
        placements = [placement for _, _, placement in self._rules if placement is not None]
        meshes = {mesh_state(placement.mesh): placement.mesh for placement in placements}
        return list(meshes.values())

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns, in the order in which they are tried."""
        return tuple(pattern for pattern, _, _ in self._rules)

    def __repr__(self) -> str:
        return f"PlacementRules({{{', '.join(self._lines())}}})"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        return [
            f"{pattern!r}: {'None' if placement is None else placement.format()}"
            for pattern, _, placement in self._rules
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"optional": self.optional, "_rules": self._rules, "_found": {}}


@lru_cache(maxsize=1 << 12)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a dotted pattern, to be searched in ``"." + key``.

    >>> bool(compile_pattern("layers.*.w1").search(".model.layers.3.w1.weight"))
    True
    >>> bool(compile_pattern("experts").search(".model.shared_experts.w1"))
    False
    >>> bool(compile_pattern("layers.**.w1").search(".layers.w1"))
    True

    Raises:
        PlacementError: An empty pattern or component, or no text.
    """
    if not isinstance(pattern, str):
        raise PlacementError(f"a pattern of keys is a str, not {pattern!r}")
    components = pattern.split(".")
    if not all(components):
        raise PlacementError(
            f"pattern {pattern!r} has an empty component: write dotted names such as 'experts.w1'"
        )
    return re.compile("".join(map(_component, components)) + r"(?=\.|$)")


def _component(component: str) -> str:
    if component == "**":
        return r"(?:\.[^.]+)*"
    if component == "*":
        return r"\.[^.]+"
    return r"\." + re.escape(component).replace(r"\*", "[^.]*")


def why_unmatched(pattern: str, keys: Sequence[str]) -> str | None:
    """Return why ``pattern``, as ``PlacementRules`` name it, probably took no key; None: no idea.

    >>> why_unmatched("expert.w1", ["layers.0.experts.w1"])
    "'expert' is no component of any key; 'experts' is"
    """
    if pattern.startswith("re:"):
        return None
    dotted = ["." + key for key in keys]
    if any(compile_pattern(pattern).search(key) for key in dotted):
        return (
            "a pattern above it takes the keys that it matches, as the first match wins; or they "
            "are scalars or no tensors, to which no rule applies"
        )
    if re.search(r"[\\^$+()|\[\]]", pattern):
        return "a regular expression as a string; compile it: re.compile(...)"
    components = pattern.split(".")
    known = {component for key in keys for component in key.split(".")}
    for component in components:
        if "*" not in component and component not in known:
            near = get_close_matches(component, known, 1)
            if near:
                return f"{component!r} is no component of any key; {near[0]!r} is"
    for start in range(1, len(components)):
        shorter = ".".join(components[start:])
        if shorter.strip("*.") and any(compile_pattern(shorter).search(key) for key in dotted):
            prefix = ".".join(components[:start])
            return f"the prefix {prefix!r} is not in the keys; {shorter!r} would match"
    return None


def asked(
    rules: Rules,
    fqn: str,
    tensor: Any,
    *,
    rank: int | None = None,
    refusals: tuple[type[Exception], ...] = (),
) -> CheckpointPlacement | None:
    """Return the placement that rules give to a tensor.

    Args:
        rules: The user's.
        fqn: The tensor's key.
        tensor: It, or one like it.
        rank: For messages; None where no rank asks.
        refusals: Errors by which rules refuse a tensor; they are raised as they are.

    Raises:
        PlacementError: The function of the user's raises an error, which is its cause.
    """
    try:
        return rules(fqn, tensor)
    except refusals:
        raise
    except Exception as error:
        at = extract_tb(error.__traceback__)[-1]
        on = "" if rank is None else f" on rank {rank}"
        raise PlacementError(
            f"{fqn}: the rules fail{on}: {type(error).__name__}: {error}\n"
            f"    raised:      {at.filename}:{at.lineno}, in {at.name}\n"
            f"    by rule:     {rule_name(rules, fqn)}\n"
            "    way out:     a CheckpointPlacement for this tensor, or None where it keeps its "
            "own mesh and placements"
        ) from error


def rule_name(rules: Rules | None, fqn: str) -> str | None:
    """Return the name for messages of the rule that matches ``fqn``, or None."""
    if rules is None:
        return None
    if isinstance(rules, PlacementRules):
        pattern = rules.pattern_of(fqn)
        return None if pattern is None else repr(pattern)
    return getattr(rules, "__qualname__", type(rules).__name__) + "()"
