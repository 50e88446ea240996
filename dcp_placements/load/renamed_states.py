"""Optimizer state that a load would reset, though the checkpoint has it under another name.

A load resets the state of a parameter that the checkpoint has no state of, as of one that was never
stepped. Where the checkpoint has state of the same optimizer that no rank asks for, or state of the
same parameter in another optimizer, that is the missing state, and the load is refused.

Two ranks whose model has a wrapper that the saved one did not have, and that rename weights alone::

    resets    {("optim.", "_orig_mod.w"): [0, 1]}    and the ranks that reset it
    unasked   ["optim.state.w.exp_avg"]
    fault     optim.state: '_orig_mod', the name of a wrapper, is in one of them alone
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dcp_placements.errors import Fault
from dcp_placements.load.all_asked import AllAsked
from dcp_placements.short_text import format_names, format_ranks, near_names

_SHOWN_NAMES = 4
"""Names that a message lists."""

Resets = Mapping[tuple[str, str], Sequence[int]]
"""By head and parameter of optimizer state that is reset, the ranks that do so."""


def renamed_states(asked: AllAsked, unasked: Sequence[str]) -> Iterator[Fault]:
    """Yield the optimizers of which ranks reset state, and that have some under other names.

    State that no rank asks for may be that of a layer which no rank has. It has lost its parameter
    where the checkpoint has no weight of that name, or where the ranks do read the weight.

    Args:
        asked: What all ranks ask for, and which of them reset state.
        unasked: The tensors of the checkpoint that no rank asks for.
    """
    rest, states = set(unasked), asked.states
    resets: dict[tuple[str, str], list[int]] = {}
    for statement, ranks in asked.different:
        for owner in statement.reset:
            resets.setdefault(owner, []).extend(ranks)
    heads = {head for head, _ in resets}
    reset_names = {name for _, name in resets}
    near = [
        (fqn, state)
        for fqn in asked.tensors
        if (state := states.of(fqn)) is not None
        and (state.head in heads or state.parameter in reset_names)
    ]
    names_of = {state.owner: _beginnings(state.parameter) for _, state in near}
    owners = {(head, name) for (head, _), names in names_of.items() for name in names}
    weights = states.weights_of(owners, [fqn for fqn in asked.tensors if states.of(fqn) is None])
    weights_of = {
        owner: next(filter(None, [weights[owner[0], name] for name in names]), [])
        for owner, names in names_of.items()
    }
    for head in sorted({state.head for _, state in near}):
        of_head = [(fqn, state.owner) for fqn, state in near if state.head == head]
        # Without its weights, an optimizer's state is all asked for, or has other names; where
        # some ranks load alone it may be that of the others.
        is_alone = all(rest.issuperset(weights_of[owner]) for _, owner in of_head)
        if is_alone and not asked.complete and any(fqn not in rest for fqn, _ in of_head):
            continue
        lost = dict.fromkeys(
            owner[1]
            for fqn, owner in of_head
            if fqn in rest
            and not asked.policy.excuses(fqn)
            and (is_alone or not weights_of[owner] or not rest.issuperset(weights_of[owner]))
        )
        reset = {
            owner: ranks for owner, ranks in resets.items() if owner[0] == head or owner[1] in lost
        }
        if lost and reset:
            yield _renamed_fault(head, reset, list(lost))


def _beginnings(parameter: str) -> list[str]:
    """Return what may be the parameter of nested state, the longest name first.

    >>> _beginnings("w.momenta.row")
    ['w.momenta.row', 'w.momenta', 'w']
    """
    words = parameter.split(".")
    return [".".join(words[:end]) for end in range(len(words), 0, -1)]


def _renamed_fault(head: str, resets: Resets, lost: Sequence[str]) -> Fault:
    """Return the fault of an optimizer that has state under other names than are asked for.

    Args:
        head: Its key, with a dot.
        resets: The state that is reset.
        lost: The parameters whose state no rank asks for.
    """
    (other, asked), ranks = next(iter(resets.items()))
    stored = next(iter(near_names(asked, lost)), lost[0])
    longer, shorter = sorted((asked.split("."), stored.split(".")), key=len, reverse=True)
    wrappers = [word for word in longer if [other for other in longer if other != word] == shorter]
    numbers = [
        word
        for position, word in enumerate(longer)
        if word.isdigit() and longer[:position] + longer[position + 1 :] == shorter
    ]
    likely, out = _OTHER_NAMES
    if other != head:
        likely, out = _MOVED_PARAMETERS
    elif numbers:
        likely, out = _STACKED_WEIGHTS
    elif wrappers:
        likely = f"likely:      {wrappers[0]!r}, the name of a wrapper, is in one of them alone"
        out = f'way out:     rename=Replace("{wrappers[0]}", "") in this load'
        if len(asked) < len(stored):
            out = (
                f"way out:     a rename= that puts {wrappers[0]!r} into this rank's keys of "
                "optimizer state; or a state dict from get_optimizer_state_dict, which leaves it "
                "out, for both the save and the load"
            )
    of_resets = [f"{of}state.{name}" for of, name in resets]
    of_lost = [f"{head}state.{name}" for name in lost]
    return Fault(
        f"{head}state",
        "the checkpoint has optimizer state that no rank asks for, and lacks what they ask for: "
        "it would be reset",
        (
            f"asked for:   {format_names(of_resets, _SHOWN_NAMES)}, first by {format_ranks(ranks)}",
            f"there are:   {format_names(of_lost, _SHOWN_NAMES)}",
            likely,
            f"{out}; waive={{pattern: reason}}, of the keys that are there, where they are of "
            "other parameters",
        ),
    )


_OTHER_NAMES = (
    "likely:      a rename= that changes the names of weights, and not those of their state",
    "way out:     a rename= under which the keys of state become those that are there",
)
_MOVED_PARAMETERS = (
    "likely:      another optimizer has these parameters in this load than in the save",
    "way out:     the optimizers of the save",
)
_STACKED_WEIGHTS = (
    "likely:      one of the two stacked weights and their state, and the other the weights alone",
    'way out:     a pattern that both match, without the level, as Stack("experts.{}")',
)
