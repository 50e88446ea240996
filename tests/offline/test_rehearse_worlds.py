"""``rehearse`` against real loads of random worlds: the verdict is that of the load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FlatShard,
    FusedShard,
    MeshCoordinate,
    PlacementLoadPlanner,
    Placements,
)
from dcp_placements.offline import rehearse
from dcp_placements.testing import FakeDTensor, FakeMesh, World
from tests.differential import wholes
from tests.drawn_worlds import Draw, draw_pair
from tests.random_ranks import Rank
from tests.random_worlds import Cutting, Pair, Side
from tests.test_differential import save, save_planners

WORLDS = [*range(12), 391, 820272, 3000584, 5000276]
"""In 391 and 3000584 a rank has no expert at all of one of its layers, which are stacked in the
latter. In 820272 and 5000276 ranks have one ``step`` for layers that the checkpoint has one by one,
each with steps of stacked experts."""


def declared_alone(side: Side) -> Side:
    """Return a side whose ranks have what their rules and renames say.

    They have nothing of DTensors, and no further names of their tensors.
    """
    plain = {"own": (), "also": (), "repeated": (), "kind": "plain", "tiles": (), "tile_axes": ()}
    holds = []
    for hold in side.holds:
        cuts = tuple(replace(cut, **plain, declared=True, unnamed=False) for cut in hold.cuts)
        ids = tuple(ids and replace(ids, renumbered=True) for ids in hold.ids)
        holds.append(replace(hold, stage=None, ids=ids, cuts=cuts, more_names=0))
    return replace(side, holds=tuple(holds), wrapped=False)


def otherwise(draw: Draw, cut: Cutting, ndim: int) -> Cutting:
    """Return a cut by the same axes in another way, as a mistake in the rules makes it."""
    rule = tuple(
        (axis, draw.choice((Shard(draw.randrange(ndim)), FusedShard(draw.randrange(ndim), 2))))
        if draw.chance(70)
        else (axis, placement)
        for axis, placement in cut.rule
    )
    return replace(cut, rule=rule, given=True)


def drawn_load(seed: int) -> tuple[Pair, list[int]]:
    """Return a pair, and whose place each rank takes: most are right, some repeat another's."""
    draw, pair = Draw(seed), draw_pair(seed)
    load = pair.load
    if draw.chance(50):  # axes of one name are compared
        load = replace(load, meshes=pair.save.meshes, holds=pair.save.holds)
    load = declared_alone(load)
    if draw.chance(40):
        holds = []
        for family, hold in zip(pair.families, load.holds, strict=True):
            ndim = len(family.shape) - sum(ids is not None for ids in hold.ids)
            cuts = tuple(otherwise(draw, cut, ndim) if ndim else cut for cut in hold.cuts)
            holds.append(replace(hold, cuts=cuts))
        load = replace(load, holds=tuple(holds))
    places = list(range(load.size))
    if draw.chance(60):
        few = draw.sample(places, draw.randint(1, len(places)))
        places = [draw.choice(few) for _ in places]
    return replace(pair, load=load), places


def loads(pair: Pair, places: list[int], path: Path, fsdp: int) -> bool:
    """Whether the ranks really load, each cut over ``fsdp`` ranks."""
    whole = wholes(pair)
    ranks = [Rank(pair, pair.load, place) for place in places for _ in range(fsdp)]
    states = []
    for number, rank in enumerate(ranks):
        values = list(rank.values(whole))
        group = torch.arange(fsdp) + number // fsdp * fsdp
        mesh = FakeMesh((fsdp,), ("fsdp",), rank=number, ranks=group)
        for one in values if fsdp > 1 else ():
            if one.value.dim():
                one.value = FakeDTensor.distribute(one.value.detach().clone(), mesh, [Shard(0)])
        states.append(rank.state_dict(values, blank=True))
    planners = [PlacementLoadPlanner(rank.rules(), rename=rank.rename()) for rank in ranks]
    try:
        World(len(ranks)).load(path, states.__getitem__, planners.__getitem__)
    except CheckpointException:
        return False
    return True


def verdicts(seed: int, path: Path, fsdp: int = 1) -> tuple[bool, bool]:
    """Return whether a world loads, and whether a rehearsal says so."""
    pair, places = drawn_load(seed)
    save(pair, wholes(pair), path, save_planners(pair))

    def declared(mesh: MeshCoordinate) -> Placements:
        rank = Rank(pair, pair.load, places[mesh.get_coordinate()[0]])
        return Placements(rank.rules(), rename=rank.rename())

    axes = {"rank": len(places), "fsdp": fsdp}
    rehearsal = rehearse(path, declared, axes, fsdp=["fsdp"] if fsdp > 1 else [])
    return loads(pair, places, path, fsdp), rehearsal.loads


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("worlds", "fsdp"), [(WORLDS, 1), (range(24, 30), 2)])
def test_m91_the_verdict_of_any_random_world_is_that_of_its_load(
    worlds: Sequence[int], fsdp: int, tmp_path: Path
) -> None:
    seen = Counter[bool]()
    for seed in worlds:
        really, rehearsed = verdicts(seed, tmp_path / str(seed), fsdp)
        assert rehearsed == really, f"world {seed}"
        seen[really] += 1
    assert min(seen[True], seen[False]) > 1, seen


def test_ranges_beside_replicas_are_rehearsed(tmp_path: Path) -> None:
    """Ranks with ranges of one size are planned once; the boxes of the others follow."""
    stored = {"w": torch.arange(24.0).reshape(6, 4), "b": torch.ones(4)}
    dcp.save(stored, checkpoint_id=tmp_path, no_dist=True)

    def declared(mesh: MeshCoordinate) -> Placements:
        ranges = FlatShard((5, 7, 7, 5))
        return Placements({"w": CheckpointPlacement(mesh, {"dp": ranges}, global_shape=(6, 4))})

    rehearsal = rehearse(tmp_path, declared, {"dp": 4})
    assert rehearsal.loads, rehearsal
    assert [rank.memory_nbytes for rank in rehearsal.ranks] == [4 * n + 16 for n in (5, 7, 7, 5)]
