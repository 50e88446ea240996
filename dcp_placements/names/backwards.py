"""A rename backwards: from the names of files to the keys that the rename gives these names.

Every step proposes keys that it may have had, by its text. The rename itself decides: a key counts
if the rename gives it the name. So a wrong proposal is dropped, and two right ones are a fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from dcp_placements.errors import Fault
from dcp_placements.names.rename_results import Parts, Rows
from dcp_placements.names.renames import Renames
from dcp_placements.names.renumber import Replace
from dcp_placements.names.stacks import Split, Unstack

AnyRename = Callable[[str], object]
Original = str | Rows | Parts
"""What a rename answers for a tensor that is one, or several, of those that it names."""


def one_way_step(rename: AnyRename) -> object | None:
    """Return the first step of a rename that does not tell which keys it had; None if all do."""
    for step in _steps(rename):
        if isinstance(step, Unstack):
            continue
        names = _new_names(step)
        stars = getattr(step, "pattern", "").count("*")
        if not names or not all(names) or (stars and (stars > 1 or not _in_all("{}", names))):
            return step
    return None


def original_keys(
    rename: AnyRename, names: Collection[str]
) -> tuple[dict[str, Original], list[Fault]]:
    """Return the keys to which a rename gives ``names``, with its answers, and the faults.

    Args:
        rename: Of steps that are no ``one_way_step``.
        names: What it gives.
    """
    steps = _steps(rename)
    found: dict[str, dict[str, Original]] = {name: {} for name in names}
    templates: dict[str, list[str]] = {}
    for name in names:
        for number in re.finditer(r"\d+", name):
            template = f"{name[: number.start()]}{{}}{name[number.end() :]}"
            templates.setdefault(template, []).append(name)
    for template, members in templates.items():
        for key, answer in _renamed(rename, _proposed(steps, template)).items():
            if not isinstance(answer, str) and template in answer.fqns:
                for name in members:
                    found[name][key] = answer
    for name, keys in found.items():
        if keys:
            continue
        answers = _renamed(rename, _proposed(steps, name))
        keys |= {
            key: answer
            for key, answer in answers.items()
            if name in ((answer,) if isinstance(answer, str) else answer.fqns)
        }
        if len(keys) > 1:  # a name that the rename leaves as it is could be its own result, too
            keys.pop(name, None)
    faults = []
    originals: dict[str, Original] = {}
    for name, keys in found.items():
        originals |= keys
        if len(keys) != 1:
            of = " and ".join(sorted(keys)[:2]) or "no key"
            faults.append(Fault(name, f"rename= gives {of} this name, so it has no key backwards"))
    return originals, faults


def _steps(rename: AnyRename) -> Sequence[AnyRename]:
    return rename.steps if isinstance(rename, Renames) else (rename,)


def _new_names(step: AnyRename) -> Sequence[str]:
    if isinstance(step, Replace):
        return (step.by,)
    return step.names if isinstance(step, Split) else ()


def _in_all(text: str, names: Sequence[str]) -> bool:
    return all(text in name for name in names)


def _proposed(steps: Sequence[AnyRename], name: str) -> set[str]:
    """Return the keys that the steps may have renamed to ``name``, itself among them."""
    keys = {name}
    for step in reversed(steps):
        keys |= {before for key in keys for before in _before(step, key)}
    return keys


def _before(step: AnyRename, name: str) -> Iterator[str]:
    if isinstance(step, Unstack):
        # The number goes with its dot where it is a component.
        yield re.sub(r"(^|\.)\{\}(?=\.|$)", "", name, count=1).removeprefix(".")
        yield name.replace("{}", "", 1)
        return
    pattern = getattr(step, "pattern", "").replace("*", "{}")
    for new in _new_names(step):
        for run in re.finditer(rf"(?<=\.){re.escape(new)}(?=\.|$)", "." + name):
            yield f"{name[: run.start() - 1]}{pattern}{name[run.end() - 1 :]}"


def _renamed(rename: AnyRename, keys: Collection[str]) -> Mapping[str, Original]:
    """Return the answers of a rename; none for keys that it refuses."""
    answers: dict[str, Original] = {}
    for key in sorted(key for key in keys if "{}" not in key):
        try:
            answer = rename(key)
        except (LookupError, ValueError):  # a RenameError is one
            continue
        if isinstance(answer, Original):
            answers[key] = answer
    return answers
