"""The one proof: the boxes that several hold make wholes, and equal boxes have equal contents.

Its callers are a save of all ranks, ranks' files that are put together, the items of an engine and
a world that is rehearsed. Each brings what its holders have as the tables of a ``World``, and the
contents of equal boxes as numbers. The result is values: the caller names the holders.

Two ep ranks that both call their halves of ``experts.w1``, of shape ``(4, 3)``, the first half::

    Broken(piece, Flaw("hole", [], [Box((2, 0), (2, 3))]))    nobody has the second half
    Compared(piece, [0], [[0x91f3], [0x5c1e]])                and the first one differs
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from dcp_placements.layout.boxes import Flaw, Ints, apart, flaws, tile
from dcp_placements.layout.sharding import Box, declared_sizes, sizes_differ
from dcp_placements.table.digests import Digests, differing, may_have_replicas
from dcp_placements.table.table import OBJECT, Group
from dcp_placements.table.world import Piece, World

Contents = Callable[[Piece], Digests]
"""Returns a number for the content of each row and key of a piece: equal for equal contents, 0 for
an unknown one."""


class Unlike(NamedTuple):
    """The holders of a piece do not agree on what its keys are.

    Attributes:
        piece: The piece.
        what: The first of ``ASPECTS`` that differs.
        holders: The holders of each of its values.
    """

    piece: Piece
    what: str
    holders: Mapping[Hashable, Ints]


class Broken(NamedTuple):
    """The boxes of a piece do not make the whole.

    Attributes:
        piece: The piece.
        flaw: Why; the numbers are positions in its cover.
    """

    piece: Piece
    flaw: Flaw


class Doubled(NamedTuple):
    """A piece has equal boxes, though its cuts make a shard for each holder.

    Attributes:
        piece: The piece.
        box: The position in its cover of the box that most hold.
    """

    piece: Piece
    box: int


class Compared(NamedTuple):
    """A piece has equal boxes, whose contents were compared.

    Attributes:
        piece: The piece.
        positions: The keys of which two holders have different contents in one box; mostly none.
        contents: The contents of these keys, by row and key.
    """

    piece: Piece
    positions: list[int]
    contents: Digests


Finding = Unlike | Broken | Doubled | Compared

ASPECTS: dict[str, Callable[[Group], Hashable]] = {
    "kind": lambda group: "another object" if group.kind == OBJECT else "a tensor",
    "sizes": lambda group: declared_sizes(group.cuts),
    "shape": lambda group: group.shape,
    "dtype": lambda group: group.dtype,
    "layout": lambda group: group.layout,
}
"""What all holders of a key must agree on; None is that of a holder that says nothing of it."""


def prove(
    world: World,
    contents: Contents | None = None,
    *,
    complete: bool = True,
    size: int | None = None,
) -> Iterator[Finding]:
    """Yield piece by piece what was compared, and what keeps the boxes from making wholes.

    Contents are compared only where boxes are equal and make the whole.

    Args:
        world: The tables of all holders.
        contents: The contents of equal boxes; None where they are not compared.
        complete: Whether these are all holders, so that what none of them has is missing.
        size: Number of holders, given where contents are known only of groups that
            ``may_have_replicas`` among so many.
    """
    for piece in world.pieces:
        groups = [source.group for source in piece.sources]
        traits = {
            (group.kind == OBJECT, group.shape, group.dtype, group.layout) for group in groups
        }
        cuts = {group.cuts for group in groups}
        if len(traits) > 1 or (len(cuts) > 1 and sizes_differ(cuts)):
            yield _unlike(world, piece)
            continue
        cover, shape = piece.cover, piece.group.shape
        is_sound = tile if complete else apart
        if not is_sound(Box.whole(shape), cover.boxes):
            flaw = next(flaws(Box.whole(shape), cover.boxes), None)
            if flaw is not None and (complete or flaw.kind != "hole"):
                yield Broken(piece, flaw)
        if not cover.has_replicas:
            continue
        may_have = [size is None or may_have_replicas(group, size) for group in groups]
        if 0 not in shape and not all(may_have):
            yield Doubled(piece, int(np.diff(cover.starts).argmax()))
            continue
        if contents is not None:
            of_piece = contents(piece)
            positions = differing(of_piece, cover)
            yield Compared(piece, positions, of_piece[:, positions])


def _unlike(world: World, piece: Piece) -> Unlike:
    """Return the first aspect on which the holders of a piece do not agree."""
    agrees_on_sizes = not sizes_differ(source.group.cuts for source in piece.sources)
    for what, aspect in ASPECTS.items():
        if what == "sizes" and agrees_on_sizes:
            continue
        holders: dict[Hashable, list[Ints]] = {}
        for source in piece.sources:
            value = aspect(source.group)
            if value is not None:
                holders.setdefault(value, []).append(world.members[source.table])
        if len(holders) > 1:
            return Unlike(piece, what, {value: np.concatenate(of) for value, of in holders.items()})
    raise AssertionError("the holders agree on all of it")
