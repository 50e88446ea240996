"""Declarations that fit the shapes and are still likely wrong.

Each finding is a warning with its reason. It is silenced by pattern, with a reason of the user's
own that the report keeps, and never for all keys at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dcp_placements.bind.placed import Placed
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Cut, Kind
from dcp_placements.rules.mesh import Axis

# Projections that join several in one tensor; Megatron's linear_qkv and Megatron Lite's qkv.linear
# are not among them, since they are laid out per query group and may be cut plainly.
FUSED_NAME = re.compile(
    r"(?:^|\.)(?:gate_up(?:_proj)?|qkv(?!\.linear)(?:_proj)?|query_key_value|linear_fc1|in_proj"
    r"|c_attn|wqkv|W_pack|w13)(?:_weight|_bias)?(?:\.|$)"
)
EXPERT_NAME = re.compile(r"(?:^|\.)(?:local_|routed_|inner_)?experts(?:\.|$)")
# One tensor per expert: distinct by its number, if names are renamed to global ones.
NUMBERED_EXPERT = re.compile(r"experts\.(?:\d+|[\w.]*(?:weight|bias)\d+)(?:\.|$)")
# Parameters of which every expert-parallel rank has a copy.
COPIED_NAME = re.compile(
    r"(?:^|\.)(?:router|gate|(?:self_)?att(?:n|ention)|(?:\w+_)?(?:layer)?norm\d*)(?:\.|$)"
)
TENSOR_AXIS = re.compile(r"^(?:e?tp|tensor(?:_.*)?|model_parallel)$")
EXPERT_AXIS = re.compile(r"^(?:ep|expert(?:_parallel|_model_parallel)?)$")
DATA_AXIS = re.compile(r"^(?:.*fsdp.*|e?dp(?:_.*)?|data(?:_.*)?)$")


def lint(
    placed: Iterable[Placed],
    *,
    renamed: bool = False,
    waived: Sequence[re.Pattern[str]] = (),
) -> Iterator[Fault]:
    """Yield a finding for each tensor whose declaration is likely wrong.

    Args:
        placed: The tensors of one ``Placing``, with the checkpoint's keys.
        renamed: Whether they differ from the rank's own, so that a number in them is global.
        waived: Patterns of keys without findings.
    """
    judged: dict[Any, list[tuple[str, tuple[str, ...]]]] = {}
    # Most tensors have a layout that is right under any name: they need no search.
    doubtful: dict[Any, tuple[bool, bool]] = {}
    latest: tuple[Any, tuple[bool, bool]] = None, (False, False)
    for tensor in placed:
        place = tensor.place
        if place not in doubtful:
            # Layouts of many shapes are cut in a few ways.
            cuts = place.sharding.cuts, place.axes, len(place.global_shape)
            if cuts != latest[0]:  # to hash them is slow
                if cuts not in doubtful:
                    other = any(_findings(tensor, fused=True, expert=True))
                    doubtful[cuts] = other, any(_expert_cuts(tensor))
                latest = cuts, doubtful[cuts]
            doubtful[place] = latest[1]
        is_doubtful, copied = doubtful[place]
        if copied:
            copied = "expert" not in tensor.fqn and COPIED_NAME.search(tensor.fqn) is not None
        if not (is_doubtful or copied):
            continue
        if any(pattern.search(f".{tensor.fqn}") for pattern in waived):
            continue
        fused = FUSED_NAME.search(tensor.fqn) is not None
        expert = EXPERT_NAME.search(tensor.fqn) is not None
        expert = expert and not (renamed and NUMBERED_EXPERT.search(tensor.fqn))
        numbered = expert and NUMBERED_EXPERT.search(tensor.fqn) is not None
        key = (place, tensor.rule, fused, expert, numbered, copied)
        if key not in judged:
            judged[key] = list(_findings(tensor, fused, expert, numbered))
            if copied and tensor.rule is not None:
                judged[key] += _copied_findings(tensor)
        for headline, details in judged[key]:
            yield Fault(tensor.fqn, headline, details)


def _findings(
    placed: Placed, fused: bool, expert: bool, numbered: bool = False
) -> Iterator[tuple[str, tuple[str, ...]]]:
    cuts = _cuts(placed)
    rule = f"by rule:     {placed.rule or 'no rule, its own DTensor'}"
    yield from _wrong_order(cuts, rule)
    if fused:
        for cut, axis in cuts:
            if cut.kind is Kind.PLAIN and _named(axis, TENSOR_AXIS):
                yield (
                    f"its name says several tensors in one, but {axis.name!r} cuts it plainly",
                    (
                        f"found:       Shard({cut.dim}) over {axis.name!r} of size {axis.size}",
                        "reason:      a rank that holds [its gate; its up] has two pieces of the "
                        "whole; taken as one, the rows come out permuted in another topology",
                        f"way out:     FusedShard({cut.dim}, 2), or the sizes of the parts; or "
                        "waive={pattern: reason} where the plain cut is right, as with parts "
                        "that alternate row by row",
                        rule,
                    ),
                )
    if expert:
        yield from _expert_findings(placed, cuts, numbered, rule)


def _cuts(placed: Placed) -> list[tuple[Cut, Axis]]:
    place = placed.place
    return [
        (cut, place.axes[cut.axis])
        for cut in place.sharding.cuts
        if isinstance(cut, Cut) and place.axes[cut.axis].size > 1
    ]


def _expert_cuts(placed: Placed) -> list[tuple[Cut, Axis]]:
    return [(cut, axis) for cut, axis in _cuts(placed) if _named(axis, EXPERT_AXIS)]


def _copied_findings(placed: Placed) -> Iterator[tuple[str, tuple[str, ...]]]:
    for cut, axis in _expert_cuts(placed):
        yield (
            f"its name is not that of experts, but {axis.name!r} cuts it",
            (
                f"found:       Shard({cut.dim}) over {axis.name!r} of size {axis.size}, which "
                f"makes a {placed.global_shape} tensor",
                "reason:      expert-parallel ranks have equal copies of routers, attention and "
                "norms; as parts, the copies become one tensor that is too large",
                "likely:      a pattern that matches more than the experts",
                "way out:     a pattern such as 'experts'; or waive={pattern: reason} where the "
                "ranks hold different parts",
                f"by rule:     {placed.rule}",
            ),
        )


def _expert_findings(
    placed: Placed, cuts: list[tuple[Cut, Axis]], numbered: bool, rule: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
    place = placed.place
    # A Pick without an axis is a stack: the names of its rows are distinct.
    if any(cut.axis < 0 for cut in place.sharding.cuts):
        return
    shape = placed.global_shape
    for cut, axis in cuts:
        if len(shape) == 3 and cut.dim and _named(axis, EXPERT_AXIS) and not numbered:
            yield (
                f"{axis.name!r} cuts dim {cut.dim}, and stacked experts lie along dim 0",
                (
                    f"found:       Shard({cut.dim}) over {axis.name!r} of size {axis.size}, of a "
                    f"{shape} tensor",
                    "reason:      expert-parallel ranks hold whole experts; joined along another "
                    "dim, parts of different experts become one",
                    f'way out:     {{"{axis.name}": Shard(0)}}; or waive={{pattern: reason}} where '
                    f"dim {cut.dim} numbers the experts",
                    rule,
                ),
            )
    sharded = {place.axes[cut.axis].name for cut in place.sharding.cuts}
    for axis in place.axes:
        if axis.size > 1 and _named(axis, EXPERT_AXIS) and axis.name not in sharded:
            shard = f'{{"{axis.name}": Shard(0)}}'
            way_out = (
                'rename=Renumber("experts.{}", this rank\'s experts, total=) where the number in '
                f"the name is local; {shard} for a part of each"
                if numbered
                else shard
            )
            yield (
                f"its name says expert, but it is declared equal along {axis.name!r}",
                (
                    f"found:       Replicate() over {axis.name!r} of size {axis.size}",
                    "reason:      expert-parallel ranks hold different experts; as replicas "
                    "all but one of them would be dropped",
                    f"way out:     {way_out}; or waive={{pattern: reason}} where they are equal",
                    rule,
                ),
            )


def _wrong_order(cuts: list[tuple[Cut, Axis]], rule: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for position, (cut, axis) in enumerate(cuts):
        for other, inner in cuts[position + 1 :]:
            if (
                cut.dim == other.dim
                and cut.kind is other.kind is Kind.PLAIN
                and _named(axis, DATA_AXIS)
                and (_named(inner, TENSOR_AXIS) or _named(inner, EXPERT_AXIS))
            ):
                yield (
                    f"is declared as cut by {axis.name!r} first and by {inner.name!r} inside that",
                    (
                        f"found:       Shard({cut.dim}) over {axis.name!r} left of "
                        f"Shard({other.dim}) over {inner.name!r}",
                        f"reason:      FSDP cuts what {inner.name!r} has left, so {inner.name!r} "
                        "comes first; with the order reversed the rows come out permuted in "
                        "another topology",
                        f"way out:     _StridedShard({cut.dim}, split_factor={inner.size}) over "
                        f"{axis.name!r}; or waive={{pattern: reason}} where the order is right",
                        rule,
                    ),
                )


def _named(axis: Axis, pattern: re.Pattern[str]) -> bool:
    return axis.name is not None and pattern.match(axis.name) is not None
