"""Which placement a key takes: patterns over FQNs, the first match wins.

A pattern is dotted components matched against any consecutive whole components of the key. So one
pattern names a parameter and everything that is keyed by it: ``experts.w1`` matches
``layers.0.experts.w1``, ``model.layers.0.experts.w1`` and
``optim.state.layers.0.experts.w1.exp_avg``, and never ``shared_experts.w1``.

A pattern with a typing error declares nothing, so one that matches no key on any rank is reported,
named as in messages: ``'experts'`` of the rules, ``rename=Replace('module')`` of a rename,
``waive={'experts': ...}`` of the waivers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from dcp_placements.errors import (
    CannotPlace,
    Fault,
    PlacementError,
    raised_line,
)
from dcp_placements.rules.placement import CheckpointPlacement
from dcp_placements.short_text import format_names, near_names

Rules = Callable[[str, Any], CheckpointPlacement | None]
"""What the planners take: ``(fqn, tensor) -> CheckpointPlacement or None``."""

RuleTable = Mapping[str | re.Pattern[str], CheckpointPlacement | None]
"""The argument of ``PlacementRules``."""

Matches = Mapping[str, int]
"""How many keys of a rank each pattern matches, by the pattern's name in messages; for a step of a
rename only whether it matches any."""


EVERY = "**"
"""The pattern of all keys."""


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
        optional: Whether patterns may match nothing without a warning: for a table that serves
            several models, each of which has some of the names.

    Attributes:
        patterns: The patterns, in the order in which they are tried.
        declared: The names of the patterns in messages; empty where they are optional.
        meshes: The meshes that the rules name, each once.
        is_table: Whether the patterns decide; false for a subclass that answers in its own way.

    Raises:
        PlacementError: ``rules`` is no mapping, a pattern is empty, or a value is no
            ``CheckpointPlacement``.
    """

    is_table = True

    def __init_subclass__(cls) -> None:
        cls.is_table = cls.__call__ is PlacementRules.__call__

    def __init__(self, rules: RuleTable, *, optional: bool = False) -> None:
        if not isinstance(rules, Mapping):
            raise PlacementError(
                "PlacementRules takes a mapping {pattern: CheckpointPlacement or None}, "
                f"not {type(rules).__name__}"
            )
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
        self.patterns = tuple([pattern for pattern, _, _ in self._rules])
        self.declared = () if optional else tuple(map(repr, self.patterns))
        given = [placement for _, _, placement in self._rules if placement is not None]
        self.meshes = list({placement.mesh_state: placement.mesh for placement in given}.values())
        self._matches: dict[str, tuple[str, CheckpointPlacement | None] | None] = {}

    def __call__(self, fqn: str, tensor: Any = None) -> CheckpointPlacement | None:
        """Return the placement of ``fqn``, or None if no rule matches or its rule is None."""
        match = self.find(fqn)
        return None if match is None else match[1]

    def find(self, fqn: str) -> tuple[str, CheckpointPlacement | None] | None:
        """Return the first pattern that matches ``fqn`` and its placement, or None."""
        if fqn not in self._matches:
            matching = (
                (name, placement)
                for name, regex, placement in self._rules
                if regex.search(fqn if name.startswith("re:") else "." + fqn)
            )
            self._matches[fqn] = next(matching, None)
        return self._matches[fqn]

    def pattern_of(self, fqn: str) -> str | None:
        """Return the first pattern that matches ``fqn``, or None."""
        match = self.find(fqn)
        return None if match is None else match[0]

    def __repr__(self) -> str:
        return f"PlacementRules({{{str(self).replace(chr(10), ', ')}}})"

    def __str__(self) -> str:
        return "\n".join(
            f"{pattern!r}: {'None' if placement is None else placement.format()}"
            for pattern, _, placement in self._rules
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_matches": {}}


_IN_REGEXES = re.compile(r"^[^:]*(?:[\\+()\[\]|^$?]|(?<![^'])\.\*)")
"""What no name of a parameter has, in a pattern that is no ``re:``."""
_COMPILED = "likely:      a regular expression: give it as re.compile(r'...')"


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
        PlacementError: The pattern or a component is empty, or it is no text.
    """
    if not isinstance(pattern, str):
        raise PlacementError(f"a pattern of keys is a str, not {pattern!r}")
    components = pattern.split(".")
    if not all(components):
        raise PlacementError(
            f"pattern {pattern!r} has an empty component: write dotted names such as 'experts.w1'"
            + (f"\n    {_COMPILED}" if _IN_REGEXES.search(pattern) else "")
        )
    regexes = {"**": r"(?:\.[^.]+)*", "*": r"\.[^.]+"}
    texts = [regexes.get(c) or r"\." + re.escape(c).replace(r"\*", "[^.]*") for c in components]
    return re.compile("".join(texts) + r"(?=\.|$)")


def matches_any(patterns: Iterable[re.Pattern[str]], fqn: str) -> bool:
    """Whether a key matches any of some patterns, which ``compile_pattern`` returned."""
    return any(pattern.search(f".{fqn}") for pattern in patterns)


def check_declaration(
    rules: Any, rename: Any, waive: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the waivers; refuse rules, a rename or waivers that cannot be used.

    Raises:
        PlacementError: Rules or a rename cannot be called; a waiver has no reason, or is for every
            key.
    """
    if rules is not None and (isinstance(rules, type) or not callable(rules)):
        kind = f"the class {rules.__name__}" if isinstance(rules, type) else type(rules).__name__
        raise PlacementError(
            f"rules= is {kind}: give PlacementRules({{pattern: placement}}), a function "
            "(fqn, tensor) that returns one, or None; Placements(...) makes planners itself, by "
            "save_planner() and load_planner()"
        )
    if rename is not None and (isinstance(rename, type) or not callable(rename)):
        raise PlacementError(
            f"rename={rename!r} is no function of a key\n"
            '    way out:     Renumber("experts.{}", ids, total=8), Renames(...), or another '
            "callable key -> key"
        )
    if waive is not None and not isinstance(waive, Mapping):
        raise PlacementError(
            f"waive= must be {{pattern: reason}}, not {type(waive).__name__}: the reason is kept"
        )
    for pattern, reason in (waive or {}).items():
        compile_pattern(pattern)
        if not reason or not pattern.strip("*."):
            raise PlacementError(
                f"waive={{{pattern!r}: {reason!r}}} needs a reason, which is kept, and a pattern "
                "that names some keys, not all"
            )
    return dict(waive or {})


def waiver_matches(waive: Iterable[str], names: Iterable[str]) -> Matches:
    """Map each waiver, named as in messages, to whether it names any of some keys or patterns.

    >>> waiver_matches(["lm_head", "typo"], ["model.lm_head.weight"])
    {"waive={'lm_head': ...}": True, "waive={'typo': ...}": False}
    """
    patterns = {pattern: compile_pattern(pattern) for pattern in waive}
    dotted = [f".{name}" for name in names]
    return {
        f"waive={{{pattern!r}: ...}}": any(map(regex.search, dotted))
        for pattern, regex in patterns.items()
    }


def asked(
    rules: Rules,
    fqn: str,
    tensor: Any,
    *,
    rank: int | None = None,
) -> CheckpointPlacement | None:
    """Return the placement that rules give to a tensor.

    Args:
        rules: The user's rules.
        fqn: The tensor's key.
        tensor: The tensor, or a meta tensor of its shape and dtype.
        rank: The rank that messages name; None where no rank asks.

    Raises:
        PlacementError: The user's function raises an error, which is its cause.
        CannotPlace: The function returns something else.
    """
    try:
        placement = rules(fqn, tensor)
    except CannotPlace:  # rules refuse a tensor by it
        raise
    except Exception as error:
        on = "" if rank is None else f" on rank {rank}"
        raise PlacementError(
            f"{fqn}: the rules fail{on}: {type(error).__name__}: {error}\n"
            f"    {raised_line(error)}\n"
            f"    by rule:     {rule_name(rules, fqn)}\n"
            "    way out:     a CheckpointPlacement for this tensor, or None where it keeps its "
            "own mesh and placements"
        ) from error
    if placement is None or isinstance(placement, CheckpointPlacement):
        return placement
    raise CannotPlace(
        f"was given {placement!r} by the rules, which is no CheckpointPlacement",
        "way out:     return a CheckpointPlacement, or None to keep the tensor's own",
    )


def rule_name(rules: Rules | None, fqn: str) -> str | None:
    """Return the name for messages of the rule that matches ``fqn``, or None."""
    if rules is None:
        return None
    if isinstance(rules, PlacementRules) and rules.is_table:
        pattern = rules.pattern_of(fqn)
        return None if pattern is None else repr(pattern)
    return getattr(rules, "__qualname__", type(rules).__name__) + "()"


def matched_nowhere(of_ranks: Iterable[Matches]) -> tuple[str, ...]:
    """Return the names of the patterns that match no key on any rank."""
    of_ranks = list(of_ranks)
    names = dict.fromkeys(name for matches in of_ranks for name in matches)
    return tuple([name for name in names if not any(matches.get(name) for matches in of_ranks)])


def unmatched_faults(unmatched: Sequence[str], keys: Sequence[str]) -> list[Fault]:
    """Return the fault, or the note, on patterns that match nothing.

    Args:
        unmatched: Their names in messages; without any there is no fault.
        keys: The keys of all ranks.
    """
    if not unmatched:
        return []
    details = [f"the keys are {format_names(keys, 4)}"] if keys else []
    components = {component for key in keys for component in key.split(".")}
    # From rename=Replace('module') and waive={'module': ...} the pattern alone.
    declared = " ".join(re.findall(r"'([^']*)'", " ".join(unmatched)))
    for word in dict.fromkeys(re.findall(r"\w+", declared)):
        if word not in components and (near := near_names(word, components)):
            details.append(f"likely:      {word!r} is no component of any key; {near[0]!r} is")
    if any(name.startswith("'") and _IN_REGEXES.search(name) for name in unmatched):
        details.append(_COMPILED)
    way_out = "correct the pattern, or drop it; optional=True of rules and Renames allows it"
    details.append(f"way out:     {way_out}")
    headline = "no key on any rank matches"
    return [Fault(", ".join(unmatched), headline, tuple(details), is_of_declaration=True)]
