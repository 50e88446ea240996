"""Digests of all ranks: what is sent of them, and what is compared where some send less."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from dcp_placements.table import digests
from dcp_placements.table.digests import (
    WIDTHS,
    differing,
    digests_by_cell,
    digests_of,
    may_have_replicas,
)
from dcp_placements.table.table import SHARD, Group, Holding, holding_of
from dcp_placements.table.world import World


def test_what_has_no_replicas_needs_no_digests() -> None:
    def group(shards: int) -> Group:
        return Group(SHARD, (8, 8), torch.float32, shards=shards)

    assert not may_have_replicas(group(8), 8)
    assert may_have_replicas(group(8), 16)
    assert may_have_replicas(group(1), 1)


def sent(holding: Holding, width: int) -> bytes:
    count = len(holding.fqns)
    with mock.patch.object(digests, "WORLD_BUDGET_NBYTES", 2 * width * count):
        packed, undigested = digests_of(holding, "sampled", world=2, lookup=lambda index: None)
    assert len(packed) == width * count
    assert not undigested
    return packed


@pytest.mark.parametrize("widths", [(one, other) for one in WIDTHS for other in WIDTHS])
def test_each_key_is_compared_by_the_bytes_that_all_ranks_sent(widths: tuple[int, int]) -> None:
    """Of two ranks with other keys beside, in another order, one may send less of each digest."""
    values = [{f"w.{i}": torch.full((2,), float(i)) for i in range(400)} for _ in range(2)]
    values[1] |= {"w.7": torch.ones(2) * 3.5, "w.300": torch.ones(2) * 4.5, "own.0": torch.ones(3)}
    values[1] = dict(reversed(values[1].items()))
    holdings = [holding_of(one, {}, {}) for one in values]
    world = World([one.packed() for one in holdings])
    digests = digests_by_cell(world, list(map(sent, holdings, widths)), 2)
    named = []
    for piece in world.pieces:
        of_piece = piece.take(digests)
        assert of_piece.shape == (len(piece.ranks), len(piece.fqns))
        named += [piece.fqns[at] for at in differing(of_piece, piece.cover)]
    assert named == ["w.7", "w.300"]
