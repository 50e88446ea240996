"""Keys that the checkpoint lacks: which a load accepts, what refuses the others, what is reset.

A parameter that was never stepped before the save has no optimizer state in the checkpoint. What
the state dict has of it is of another history than the weights, or of the dummy step by which torch
makes a state dict: neither a moment nor a step count may stay. All optimizer state that is not read
becomes what it is before a first step, once all that is read has been read; a load that fails has
reset nothing.

A rank asks for ``w`` and its moments, ``new`` and ``rng.3``, of which the checkpoint has ``w``::

    Missing(
        kept=("rng.3",),                        # optional=["rng.*"]
        resets={"exp_avg.w": Reset("w")},       # no state of w at all
        faults=[Fault("new", "the checkpoint lacks this key ...")],
    )
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from dcp_placements._torch import PLAIN_TYPES, ShardedTensor, has_hooks, is_dtensor_like
from dcp_placements.bind.rule_and_dtensor import Placing
from dcp_placements.errors import Fault
from dcp_placements.load.state_at_birth import Reset, reset_of
from dcp_placements.names.known_names import NAMES_EMBEDDING, NAMES_HEAD, WRAPPERS
from dcp_placements.names.optimizer_state import FLATTEN, OptimizerStates, parameter_groups_in
from dcp_placements.names.rename_results import Row
from dcp_placements.pages import TIED_PAGE
from dcp_placements.rules.patterns import matches_any
from dcp_placements.short_text import (
    folded_names,
    format_names,
    near_names,
)
from dcp_placements.storage.provenance import SaveRecord

ON_PURPOSE = "optional=[pattern] or waive={pattern: reason} where the rest is left out on purpose"
"""The way out where a load asks for a part of what was saved."""


@dataclass(frozen=True)
class Policy:
    """What a load accepts.

    Attributes:
        partial: Any key may be missing, as long as one is there; but no part of the optimizer
            state of a parameter while another part is there.
        cast: ``"error"``, ``"warn"`` or ``"allow"``, for what loses precision.
        optional: Patterns of keys that may be missing.
        waived: Patterns of keys whose differences from the save are accepted.
    """

    partial: bool = False
    cast: str = "warn"
    optional: Sequence[re.Pattern[str]] = ()
    waived: Sequence[re.Pattern[str]] = ()

    def is_optional(self, fqn: str) -> bool:
        """Whether a key may be missing by name."""
        return matches_any(self.optional, fqn)

    def waives(self, fqn: str) -> bool:
        """Whether a waiver names a key."""
        return matches_any(self.waived, fqn)

    def excuses(self, fqn: str) -> bool:
        """Whether a key is waived, or may be missing by name."""
        return self.waives(fqn) or self.is_optional(fqn)


@dataclass(frozen=True, eq=False)
class Asked:
    """What a rank asks for, and what the checkpoint has.

    Attributes:
        state_dict: The values to fill, flat, by the checkpoint's keys. A number that the checkpoint
            has as a tensor is a tensor without dims.
        placing: The places of its tensors.
        metadata: The checkpoint's.
        stored: What it has of each of its keys.
        record: How it was saved; None where it has no record of that.
        unread: Its keys that this rank does not ask for.
        policy: What is accepted.
        nested: The user's state dict, before it was made flat.
        tied: Keys that the checkpoint lacks, of tensors whose memory is read under another key: by
            key, that one.
    """

    state_dict: dict[str, Any]
    placing: Placing
    metadata: Metadata
    stored: Mapping[str, Any]
    record: SaveRecord | None
    unread: tuple[str, ...]
    policy: Policy
    nested: Mapping[str, Any]
    tied: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def states(self) -> OptimizerStates:
        """Which keys are optimizer state."""
        return OptimizerStates(self.state_dict, self.stored)

    def is_filled(self, fqn: str) -> bool:
        """Whether the checkpoint has what fills a key, by this name or that of a tied weight."""
        return fqn in self.stored or fqn in self.tied

    def tensors(self, fqn: str) -> Sequence[torch.Tensor]:
        """Return the tensors of this rank that a value consists of."""
        if (placed := self.placing.placed.get(fqn)) is not None:
            return placed.tensors
        value = self.state_dict[fqn]
        if type(value) not in PLAIN_TYPES and isinstance(value, ShardedTensor):
            return [shard.tensor for shard in value.local_shards()]
        return [value] if isinstance(value, torch.Tensor) else []

    def weights_beside(self, fqn: str, weight: str) -> Sequence[torch.Tensor]:
        """Return the weight of each tensor of optimizer state; none where these are not known.

        The rows of a stack go by their numbers, as the state of some may be absent. Other tensors
        of one key are filled alike.
        """
        tensors, weights = self.tensors(fqn), self.tensors(weight)
        states, sources = (self.placing.sources.get(key, ()) for key in (fqn, weight))
        by_row = {
            of.name.indices: tensor
            for of, tensor in zip(sources, weights, strict=False)
            if isinstance(of.name, Row)
        }
        if by_row:
            rows = [of.name.indices for of in states if isinstance(of.name, Row)]
            return [by_row[row] for row in rows] if by_row.keys() >= {*rows} else ()
        if len(weights) == 1 or (sources and self.is_filled(weight)):
            return list(weights[:1]) * len(tensors)
        return () if sources else weights


@dataclass(frozen=True)
class Missing:
    """What becomes of the keys that the checkpoint lacks.

    Attributes:
        kept: The keys whose values stay as they are.
        resets: What optimizer state is reset to once all is read, by key.
        stateless: The parameters that are read, and whose state is reset.
        unexcused: The optimizers and names of the parameters in it that no pattern excuses.
        faults: Why keys may not be missing.
        notes: What is accepted with a warning.
    """

    kept: tuple[str, ...] = ()
    resets: Mapping[str, Reset] = field(default_factory=dict)
    stateless: tuple[str, ...] = ()
    unexcused: tuple[tuple[str, str], ...] = ()
    faults: Sequence[Fault] = ()
    notes: Sequence[Fault] = ()


def settle_missing(asked: Asked, missing: Sequence[str], *, reads_some: bool) -> Missing:
    """Return which missing keys a load accepts, and what becomes of them.

    Args:
        asked: What the rank asks for.
        missing: The keys that the checkpoint lacks.
        reads_some: Whether the rank reads any other key.
    """
    states, policy, state_dict = asked.states, asked.policy, asked.state_dict
    keys_of: dict[tuple[str, str], dict[str, str]] = {}
    for fqn in state_dict:
        if (state := states.of(fqn)) is not None:
            keys_of.setdefault(state.owner, {})[fqn] = state.name
    weights = states.weights_of(
        keys_of, [fqn for fqn, value in state_dict.items() if is_read_as_tensor(value)]
    )
    saved = parameter_groups_in(asked.stored)
    resets: dict[str, Reset] = {}
    stateless: dict[str, None] = {}
    unexcused: dict[tuple[str, str], None] = {}
    faults: list[Fault] = []
    kept: list[str] = []
    unknown: list[str] = []
    unborn: list[str] = []
    for fqn in missing:
        state = states.of(fqn)
        if state is None:
            (kept if policy.is_optional(fqn) or policy.partial else unknown).append(fqn)
            continue
        keys, parameters = keys_of[state.owner], weights[state.owner]
        is_part = any(key in asked.stored for key in keys)
        stays = bool(parameters) and not any(map(asked.is_filled, parameters))
        is_left = policy.is_optional(fqn) or stays
        if is_part and not policy.is_optional(fqn):
            faults.append(_part_of_state(fqn, [*keys], asked.stored))
        elif not is_left and not policy.partial and state.head not in saved:
            unknown.append(fqn)
        else:
            names, groups = set(keys.values()), asked.placing.parameter_groups
            value = state_dict[fqn]
            tensors, beside = asked.tensors, asked.weights_beside
            reset = reset_of(state, names, value, state_dict, groups, parameters, tensors, beside)
            if reset is not None:
                resets[fqn] = replace(reset, stays_if_stepped=stays)
                stateless |= {} if stays else {state.parameter: None}
                unexcused |= {} if stays or policy.excuses(fqn) else {state.owner: None}
            elif not is_left:
                unborn.append(fqn)
            if is_left:
                kept.append(fqn)
    faults += [*_unknown_keys(asked, unknown), *map(_unborn_fault, unborn)]
    notes: list[Fault] = []
    if kept and reads_some:
        stay = [fqn for fqn in kept if fqn not in resets]
        notes = _no_tensor(asked) or [*_namesakes(asked, stay), *_left_weights(asked, kept)]
    elif kept and not faults:
        faults.append(_nothing_read(asked, kept))
    return Missing(tuple(kept), resets, tuple(stateless), tuple(unexcused), faults, notes)


def _nothing_read(asked: Asked, kept: Sequence[str]) -> Fault:
    """Return the fault of a load that would read no key; all are among ``kept``."""
    count = len(asked.state_dict)
    headline = f"none of the {count} keys is in the checkpoint: nothing would be loaded"
    return Fault("state dict", headline, _prefix_details(kept, list(asked.stored)))


def _unborn_fault(fqn: str) -> Fault:
    return Fault(
        fqn,
        "the checkpoint has no optimizer state of this parameter, and what this state is before a "
        "first step is not known",
        (
            "reason:      what the state dict has here is of another history than the weights, or "
            "of a step that torch makes for a state dict",
            "way out:     optional=[pattern] keeps what the state dict has, as where the optimizer "
            "is new and has not stepped; or leave the key out, and let the optimizer make it",
        ),
    )


def _left_weights(asked: Asked, kept: Sequence[str]) -> list[Fault]:
    """Return the note that weights which ``optional=`` allows to be missing keep their values.

    It is on purpose where it is declared twice, by a partial load or a waiver as well; and where a
    level of the nested state dict is left as a whole, as that of an average.
    """
    policy, levels = asked.policy, asked.nested

    def level_of(fqn: str) -> str:
        first = str(asked.placing.mappings.get(fqn, (fqn,))[0])
        return first if isinstance(levels.get(first), Mapping) else ""

    def weights(fqns: Iterable[str]) -> list[str]:
        return [
            fqn for fqn in fqns if is_weight(asked.state_dict[fqn]) and asked.states.of(fqn) is None
        ]

    left = weights([fqn for fqn in kept if policy.is_optional(fqn) and not policy.waives(fqn)])
    if left and not policy.partial:
        read = set(map(level_of, weights(filter(asked.stored.__contains__, asked.state_dict))))
        left = [fqn for fqn in left if level_of(fqn) in read]
    if not left or policy.partial:
        return []
    return [
        Fault(
            format_names(folded_names(left), 6),
            "not in the checkpoint: left as it was, as optional= allows",
            (
                "likely:      new weights; or a head that the checkpoint ties to its embedding, "
                "with random numbers here",
                "way out:     waive={pattern: reason} where they are new on purpose; "
                'rename=Replace("lm_head", "embed_tokens") where the one was tied to the other',
            ),
        )
    ]


def _no_tensor(asked: Asked) -> list[Fault]:
    """Return the note that none of the model's tensors is read; optimizer state does not count."""
    tensors = [
        fqn
        for fqn, value in asked.state_dict.items()
        if is_read_as_tensor(value)
        and len(value.shape)
        and fqn not in asked.placing.absent
        and asked.states.of(fqn) is None
    ]
    policy = asked.policy
    on_purpose = policy.partial and all(map(policy.is_optional, tensors))  # declared twice
    if not tensors or on_purpose or any(fqn in asked.stored for fqn in tensors):
        return []
    stored = [
        fqn
        for fqn, entry in asked.stored.items()
        if isinstance(entry, TensorStorageMetadata) and asked.states.of(fqn) is None
    ]
    headline = (
        f"asks for {len(tensors)} tensors of the model, and none of them is in the checkpoint: "
        "they keep their values"
    )
    return [Fault("state dict", headline, _prefix_details(tensors, stored))]


def _namesakes(asked: Asked, kept: Sequence[str]) -> list[Fault]:
    """Return the note of unread keys that the checkpoint has but for one component of their names.

    Args:
        asked: What the rank asks for.
        kept: The keys that the checkpoint lacks, and that keep their values.
    """
    policy, stored_names = asked.policy, {}
    unread = {fqn for fqn in asked.unread if isinstance(asked.stored[fqn], TensorStorageMetadata)}
    longer = {name: fqn for fqn in unread for name in _without_one(fqn)}
    for fqn in kept if unread else ():
        is_on_purpose = policy.partial and policy.is_optional(fqn)  # declared twice
        shorter = (name for name in _without_one(fqn) if name in unread)
        stored_name = longer.get(fqn) or next(shorter, None)
        if stored_name is not None and not (is_on_purpose or policy.waives(fqn)):
            stored_names[fqn] = stored_name
    if not stored_names:
        return []
    return [
        Fault(
            format_names(folded_names(list(stored_names)), 3),
            "not in the checkpoint, which has it under a name with another component: it keeps its "
            "value",
            (
                f"there are:   {format_names(folded_names(list(stored_names.values())), 3)}",
                "likely:      a wrapper's name (_orig_mod, module) that one side has and the other "
                "has not",
                'way out:     rename=Replace("_orig_mod", ""), or the other way round; '
                "waive={pattern: reason} where they are other tensors",
            ),
        )
    ]


def _without_one(fqn: str) -> list[str]:
    """Return a key without each of its components that is no number; the last one stays.

    >>> _without_one("model._orig_mod.layers.0.w")
    ['_orig_mod.layers.0.w', 'model.layers.0.w', 'model._orig_mod.0.w']
    """
    components = fqn.split(".")
    left_out = dict.fromkeys(components[:-1][:_MOST_COMPONENTS])
    return [_without(name, fqn) for name in left_out if not name.isdigit()]


def _part_of_state(fqn: str, keys: Sequence[str], stored: Mapping[str, Any]) -> Fault:
    names = {key: key.rpartition(".")[2] for key in keys}
    return Fault(
        fqn,
        "the checkpoint lacks this state of a parameter whose other state it has",
        (
            f"there are:   {', '.join(names[key] for key in keys if key in stored)}",
            f"missing:     {', '.join(names[key] for key in keys if key not in stored)}",
            "way out:     load with the optimizer that was saved; optional=[pattern] where this "
            "one may be missing",
        ),
    )


MAX_COMPARED_NAMES = 10
"""Comparing names with all keys is slow, and a few examples show what is wrong."""

_MOST_COMPONENTS = 50
"""Components of a key that are left out one by one."""


def _unknown_keys(asked: Asked, missing: Sequence[str]) -> Iterator[Fault]:
    """Yield the fault of each key, with the names that the checkpoint may have for it."""
    if missing and not asked.stored:
        yield Fault(
            "checkpoint",
            f"has no tensor and no object, but the state dict asks for {format_names(missing, 1)}",
            (
                "way out:     the directory that dcp.save wrote, with the storage reader of its "
                "format; dcp-placements inspect shows what is in it",
            ),
        )
        return
    optioned = {key.rpartition(".")[0] for key in asked.stored if "param_groups." in key}
    # The head of each optimizer, and whether its parameter groups have numbers (nested form).
    heads = {
        (head, group.isdigit())
        for head, _, group in [owner.partition("param_groups.") for owner in optioned]
    }
    without = {
        _without(word, key): word for key in asked.unread for word in WRAPPERS if word in key
    }
    weights = [key for key in asked.unread if asked.states.of(key) is None]
    for count, fqn in enumerate(missing):
        # Of keys with one text, which may be thousands, the first is shown.
        unread = asked.unread if asked.states.of(fqn) else weights
        names = _similar_names(fqn, unread) if count < MAX_COMPARED_NAMES else []
        similar = (f"it has:      {format_names(names, 4)}",) if names else ()
        details: tuple[str, ...] = ()
        page: tuple[str, ...] = ()
        owner = fqn.rpartition(".")[0]
        head, is_option, group = owner.partition("param_groups.")
        if is_option and (head, group.isdigit()) in heads:
            details = _OTHER_OPTIMIZER
            if owner not in optioned:
                details = _MORE_GROUPS if group.isdigit() else _NEW_PARAMETER
        elif is_option or ".state." in f".{fqn}":
            details = (_STATE_NOTE,)
        elif wrapped := _wrapper(fqn, asked.stored, without):
            details = wrapped
        elif NAMES_HEAD.search(fqn):
            details = _tied_head(asked, fqn)
            page = (TIED_PAGE,) if details else ()
        headline = "the checkpoint lacks this key (torch: Missing key in checkpoint)"
        yield Fault(fqn, headline, (*details, _LACKING, *page), similar)


def _wrapper(fqn: str, stored: Container[str], without: Mapping[str, str]) -> tuple[str, ...]:
    """Return the likely cause that one side wraps modules, and the other does not.

    Args:
        fqn: The key that is missing.
        stored: All keys of the checkpoint.
        without: The wrapper of keys that the rank does not ask for, by their names without it.
    """
    for word in WRAPPERS:
        if word in fqn and (shorter := _without(word, fqn)) != fqn and shorter in stored:
            return (
                f"likely:      {word!r} is the name of a wrapper, which the save did not have",
                f'way out:     rename=Replace("{word}", "") in this load',
            )
    if fqn not in without:
        return ()
    return (
        f"likely:      {without[fqn]!r} is the name of a wrapper, which this model does not have",
        f"way out:     load into the wrapped model; or a rename= that puts {without[fqn]!r} into "
        "this rank's keys",
    )


def _without(word: str, fqn: str) -> str:
    """Return a key without a component."""
    return ".".join([component for component in fqn.split(".") if component != word])


def _tied_head(asked: Asked, fqn: str) -> tuple[str, ...]:
    """Return the likely cause that a head is missing: its checkpoint ties it to the embedding.

    Empty where the checkpoint has a head, which is this one under another name.
    """
    placed, value = asked.placing.placed.get(fqn), asked.state_dict[fqn]
    if not is_weight(value):
        return ()
    shape = tuple(value.shape) if placed is None else placed.place.sharding.global_shape
    same_shape = [
        key
        for key, entry in asked.stored.items()
        if isinstance(entry, TensorStorageMetadata)
        and tuple(entry.size) == shape
        and asked.states.of(key) is None
    ]
    embeddings = [key for key in same_shape if NAMES_EMBEDDING.search(key)]
    heads = [key for key in same_shape if NAMES_HEAD.search(key) and key in asked.unread]
    if heads or len(embeddings) != 1:
        return ()
    own, other = fqn.split("."), embeddings[0].split(".")
    while own[1:] and other[1:] and own[0] == other[0]:
        own, other = own[1:], other[1:]
    while own[1:] and other[1:] and own[-1] == other[-1]:
        own, other = own[:-1], other[:-1]
    rename = f'Replace("{".".join(own)}", "{".".join(other)}")'
    return (
        f"likely:      saved with one weight for both, as {embeddings[0]}; here they are two",
        f"way out:     rename={rename} reads that one into both; or tie them before the load",
    )


_STATE_NOTE = (
    "note:        of optimizer state, that of some parameters may be missing, but not of all; it "
    "is known by param_groups. Both sides need the same "
    "flatten_optimizer_state_dict= in get_state_dict"
)
_NEW_PARAMETER = (
    "likely:      the optimizer that was saved had no such parameter: it was frozen or tied then, "
    "or is of an adapter",
    'way out:     optional=["param_groups.<parameter>"], whose state begins anew; '
    'rename=Replace("lm_head", "embed_tokens") where the one was tied to the other',
)
_MORE_GROUPS = (
    "likely:      the optimizer that was saved had fewer parameter groups; their options are read "
    "by the numbers of the groups",
    FLATTEN,
    'or:          optional=["param_groups.<number>"] keeps the options of a group that is new',
)
_OTHER_OPTIMIZER = (
    "likely:      saved by another optimizer, which has no such option",
    'way out:     optional=["param_groups"] keeps the options of this one',
)
_LACKING = (
    "way out:     rename= where the checkpoint has it under another name; optional=[pattern] where "
    "it may be missing"
)


def _similar_names(fqn: str, stored: Sequence[str]) -> list[str]:
    """Return the keys that are this one with another prefix, or else are spelled similarly.

    >>> _similar_names("w.norm", ["model.w.norm", "ema.w.norm", "model.v.norm"])
    ['model.w.norm', 'ema.w.norm']
    """
    components = fqn.split(".")
    for start in range(min(max(len(components) - 1, 1), _MOST_COMPONENTS)):
        tail = "." + ".".join(components[start:])
        if names := [key for key in stored if f".{key}".endswith(tail)]:
            return names
    return near_names(fqn, stored, 2)


def _prefix_details(asked: Sequence[str], stored: Sequence[str]) -> tuple[str, ...]:
    return (
        f"it asks for: {format_names(asked, 3)}",
        f"there are:   {format_names(stored, 3) or 'no tensors'}",
        "likely:      a prefix that one side has and the other has not",
        "way out:     make the names equal, with rename= if need be; optional=[pattern] for what "
        "may be missing",
    )


def is_read_as_tensor(value: Any) -> bool:
    """Whether a value of a state dict is read as a tensor."""
    return isinstance(value, torch.Tensor) or has_hooks(value) or is_dtensor_like(value)


def is_weight(value: Any) -> bool:
    """Whether a value may be a weight: a tensor of fractions, with dims."""
    dtype = getattr(value, "dtype", None)
    return (
        is_read_as_tensor(value)
        and len(value.shape) > 0
        and bool(dtype and dtype.is_floating_point)
    )
