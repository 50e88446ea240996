"""Why a checkpoint lacks keys: another prefix, or the optimizer state in another form.

Such a difference concerns thousands of keys at once, so tables of name tails find it, in time
linear in the number of keys, and every key gets the same text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

BY_POSITION = re.compile(r"(?:^|\.)(?:param_groups|state)\.\d+\.[^.]+$")
BY_NAME = re.compile(r"(?:^|\.)param_groups\.(?!\d+\.[^.]+$).+\.[^.]+$")
LONGEST_PREFIX = 3


def other_names(missing: Sequence[str], unread: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return details for keys that a checkpoint lacks: their names there.

    Args:
        missing: The keys that the checkpoint lacks.
        unread: The checkpoint's keys that the load does not ask for.

    Returns:
        Details by key, for keys whose prefix differs and for optimizer state in another form;
        equal for equal causes. Keys without an explanation are left out.
    """
    details: dict[str, tuple[str, ...]] = dict.fromkeys(_of_other_form(missing, unread), _FORM)
    tails: dict[str, str] = {}
    for key in unread:
        for prefix, tail in _splits(key):
            if tail not in tails or len(prefix) < len(tails[tail]):
                tails[tail] = prefix
    prefixes: dict[str, tuple[str, str]] = {}
    for fqn in missing:
        if fqn not in details:
            for prefix, tail in _splits(fqn):
                if tail in tails:
                    prefixes[fqn] = prefix, tails[tail]
                    break
    count = Counter(prefixes.values())
    for fqn, pair in prefixes.items():
        if count[pair] > 1:
            details[fqn] = _prefix_details(*pair)
    return details


_FORM: tuple[str, ...] = (
    "likely:      one side has an optimizer state dict that is flattened (by the parameters' "
    "names), the other has not (by position)",
    "way out:     StateDictOptions(flatten_optimizer_state_dict=True) in get_state_dict and "
    "set_state_dict, at the save and at the load",
)


def _of_other_form(missing: Sequence[str], unread: Sequence[str]) -> Iterator[str]:
    """Yield keys of optimizer state by position where the checkpoint has it by name, and back."""
    for asked, stored in ((BY_POSITION, BY_NAME), (BY_NAME, BY_POSITION)):
        if any(stored.search(key) for key in unread):
            yield from filter(asked.search, missing)


def _splits(key: str) -> Iterable[tuple[str, str]]:
    """Yield (prefix, tail) pairs, the shortest prefix first; a tail has two components or more."""
    yield "", key
    at = -1
    for _ in range(LONGEST_PREFIX):
        at = key.find(".", at + 1)
        if at < 0 or key.find(".", at + 1) < 0:
            return
        yield key[:at], key[at + 1 :]


def _prefix_details(asked: str, stored: str) -> tuple[str, ...]:
    if not stored:
        there = f"the same name without the prefix {asked!r}"
    elif not asked:
        there = f"the same name with the prefix {stored!r}"
    else:
        there = f"the same name with {stored!r} in place of {asked!r}"
    return (
        f"it has:      {there}",
        "likely:      the state dict is nested otherwise than at the save, "
        "as in dcp.save({'model': ...})",
    )
