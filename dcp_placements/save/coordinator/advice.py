"""The likely cause and the way out, where copies differ or rows are missing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dcp_placements.bind.lint import NUMBERED_EXPERT
from dcp_placements.layout.sharding import Kind
from dcp_placements.names.optimizer_state import possible_parameters
from dcp_placements.table.table import Group

_WITH_WORD = re.compile(rf"\w*{NUMBERED_EXPERT.pattern}")

_RANDOM_STATE = re.compile(r"(?i)(\.|_|^)(rng|random|seed)(s?_?states?)?(_|\.|$)")


def renumber_of(fqn: str) -> str | None:
    """Return the ``Renumber`` for a key with the number of an expert; None for any other key.

    >>> renumber_of("layers.3.experts.0.w1")
    'rename=Renumber("experts.{}", this rank\\'s experts, total=)'
    >>> renumber_of("layers.3.experts.w1")
    """
    match = _WITH_WORD.search(fqn)
    if match is None:
        return None
    pattern = re.sub(r"\d+$", "{}", match.group().rstrip("."))
    return f'rename=Renumber("{pattern}", this rank\'s experts, total=)'


def content_advice(
    fqn: str, group: Group, differs: Sequence[str], agrees: Sequence[str]
) -> Iterator[str]:
    """Yield where copies differ, the likely cause and the way out.

    Args:
        fqn: Their key.
        group: Its group.
        differs: The axes along which the copies differ.
        agrees: Those along which they agree.
    """
    if differs:
        tail = f", agrees along {quoted(agrees)}" if agrees else ""
        yield f"the copies:  differs along {quoted(differs)}{tail}"
    along = quoted(differs, " or ")
    drifted = "if these are meant to be replicas, they have drifted apart"
    which = "that axis" if len(differs) == 1 else "one of these axes"
    needs = f"it is sharded over {along}: it needs a rule with Shard on {which}"
    shard = "PlacementRules({pattern: CheckpointPlacement(mesh, {axis: Shard(dim)})})"
    counted = "rename= where the name counts from 0 on every rank (experts, layers)"
    renumber = renumber_of(fqn)
    ways = [shard]
    if not group.shape or _RANDOM_STATE.search(fqn):
        yield "likely:      a number or random state of each rank's own, under one name"
        ways = ["a name per rank (f'rng.{rank}'), or one value for all ranks"]
    elif renumber is not None:
        yield (
            "likely:      different experts under one name: every rank counts its own from 0; or "
            + (f"{needs}; {drifted}" if differs else drifted)
        )
        ways = [renumber, f"{shard} where ranks hold parts of one expert"]
    elif any(cut.kind is Kind.LISTED for cut in group.cuts):
        yield (
            "likely:      ranks list the rows of one another: a Stack has local numbers, which "
            f"every rank counts from 0, or IndexShard has another rank's rows; or {drifted}"
        )
        ways = [
            "a Renumber before the Stack: rename=Renames(Renumber(pattern, this rank's numbers, "
            "total=), Stack(...)); or IndexShard with each rank's own rows"
        ]
    elif differs and group.equal_along.issuperset(differs):
        equal = f"declared equal along {quoted(differs)}"
        yield f"likely:      replicas that have drifted apart, {equal}; or {needs}"
    elif differs:
        yield f"likely:      {needs}; {drifted}"
    else:
        yield (
            "likely:      different tensors under one name: it needs a rule that says how it is "
            f"sharded, or a name per rank; {drifted}"
        )
    if ways == [shard]:
        if not differs or any(part.isdigit() for part in fqn.split(".")):
            ways.append(counted)
        if group.dtype is not None and not group.dtype.is_floating_point:
            ways.append("a name per rank (f'rng.{rank}') where each has its own state")
    ways.append('on_conflict="warn" saves one of the copies anyway')
    for way, head in zip(ways, ["way out:     ", *["             "] * len(ways)], strict=False):
        yield head + way


def hole_advice(fqn: str, listed: bool) -> list[str]:
    """Return the likely cause and the way out of elements that nobody holds.

    Args:
        fqn: The key.
        listed: Whether ranks list their rows.
    """
    if not listed:
        return [
            "way out:     save with all ranks that hold a part and with the key on each of "
            "them; where the tensor is not sharded over that axis, drop the axis from its rule"
        ]
    if not possible_parameters(fqn):
        return [
            "way out:     no rank's IndexShard or rename= names these rows: every row must "
            "be on one of them; a Stack of local numbers needs a Renumber before it"
        ]
    return [
        "likely:      these rows were never stepped, and have no optimizer state; none "
        "is made up for them; or a Stack has local numbers, without a Renumber before it",
        "way out:     a rename= that stacks the parameters and leaves their state a "
        "tensor per row, as in lambda key: key if '.state.' in key else stack(key)",
        "             or, if they have state: no rank's IndexShard or rename= names these rows",
    ]


def quoted(names: Sequence[str], separator: str = ", ") -> str:
    """Return names in quotes."""
    return separator.join(f"'{name}'" for name in names)
