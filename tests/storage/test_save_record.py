"""What a checkpoint keeps of how it was saved: complete and small."""

from __future__ import annotations

import pickle
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, load, save
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    PlacementRules,
)
from dcp_placements.layout.sharding import Cut, FusedPart, Kind
from dcp_placements.storage.provenance import (
    SaveRecord,
    cut_of_plain,
    doubts_of,
    packed_doubts,
    packed_record,
    plain_of_cut,
    provenance_of,
    record_of,
)
from dcp_placements.testing import FakeDTensor, World
from tests.offline_scenes import Run

WORLD = World(4)


def rules(rank: int) -> PlacementRules:
    mesh = WORLD.mesh(rank, ep=1, tp=2, fsdp=2)
    return PlacementRules(
        {
            "gate_up": CheckpointPlacement(mesh, {"ep": Shard(0), "tp": FusedShard(1, (2, 2))}),
            "down": CheckpointPlacement(mesh, {"tp": Shard(1)}),
        }
    )


def state(rank: int) -> dict[str, Any]:
    mesh = WORLD.mesh(rank, ep=1, tp=2, fsdp=2)
    own = WORLD.mesh(rank, ep=1, tp=2, fsdp=2)["fsdp"]
    tp = mesh.get_coordinate()[1]
    fused = torch.cat([part.chunk(2, 1)[tp] for part in arange(4, 4).chunk(2, 1)], 1)
    return {
        "gate_up": FakeDTensor.distribute(fused, own, [Shard(0)]),
        "down": arange(4, 4).chunk(2, 1)[tp].clone(),
        "norm": FakeDTensor.distribute(arange(4), own, [Replicate()]),
        "step": 3,
    }


def saved_record(path: Path) -> SaveRecord:
    metadata = FileSystemReader(path).read_metadata()
    record = record_of(provenance_of(metadata), metadata.state_dict_metadata)
    assert record is not None
    return record


def test_every_save_keeps_how_axes_cut_each_key_those_of_size_one_too(tmp_path: Path) -> None:
    save(WORLD, tmp_path, state, rules)
    record = saved_record(tmp_path)
    assert [str(cut) for cut in record.cuts("gate_up")] == [
        "Shard(0) over 'ep' of size 1",
        "FusedShard(1, (2, 2)) over 'tp' of size 2",
        "Shard(0) over 'fsdp' of size 2",
    ]
    assert [str(cut) for cut in record.cuts("down")] == ["Shard(1) over 'tp' of size 2"]
    assert record.cuts("norm") == record.cuts("step") == record.cuts("no such key") == ()
    assert record.renames == ()


def test_the_record_has_the_copies_of_each_part(tmp_path: Path, run: Run) -> None:
    """Two tp ranks have the same rows of K."""

    def qk(rank: int) -> dict[str, Any]:
        q, k = arange(12, 2).split([8, 4])
        return {"qk": torch.cat([q.chunk(4)[rank], k.chunk(2)[rank // 2]])}

    def of_parts(rank: int) -> PlacementRules:
        by = FusedShard(0, (8, 4), copies=(1, 2))
        return PlacementRules({"qk": CheckpointPlacement(WORLD.mesh(rank, tp=4), {"tp": by})})

    save(WORLD, tmp_path, qk, of_parts)
    text = "FusedShard(0, (8, 4), copies=(1, 2)) over 'tp' of size 4"
    assert [str(cut) for cut in saved_record(tmp_path).cuts("qk")] == [text]
    assert f"cut: {text}" in run("inspect", tmp_path, "qk").out


def test_nothing_is_kept_of_a_key_that_ranks_declare_in_several_ways(tmp_path: Path) -> None:
    """Two ranks say ``tp``, two say ``etp``; the boxes are the same."""

    def other(rank: int) -> PlacementRules:
        name = "tp" if rank < 2 else "etp"
        mesh = World(2).mesh(rank % 2, **{name: 2})
        return PlacementRules({"w": CheckpointPlacement(mesh, {name: Shard(0)})})

    save(WORLD, tmp_path, lambda rank: {"w": arange(4, 2).chunk(2)[rank % 2].clone()}, other)
    assert saved_record(tmp_path).cuts("w") == ()


@pytest.mark.parametrize(
    "cut",
    [
        Cut(0, "ep", 3, Kind.RAGGED, (5, 0, 3)),
        Cut(1, None, 1, Kind.RAGGED, (5_000_000,)),
        Cut(0, "tp", 2, Kind.FUSED, (5_000_000,)),
        Cut(0, "tp", 2, Kind.RAGGED, (0, 0), FusedPart(1, (1, 2), 2), by_rule=True),
        Cut(0, "tp", 8, Kind.FUSED, (16, 4, 4), by_rule=True, copies=(1, 2, 8)),
        Cut(1, "tp", 4, Kind.FUSED, 3, copies=(1, 4, 2)),
        Cut(None, "dp", 2, Kind.FLAT),
        Cut(None, "dp", 3, Kind.FLAT, (5, 0, 1 << 40), by_rule=True),
    ],
    ids=str,
)
def test_a_cut_is_the_same_when_it_is_read(cut: Cut) -> None:
    plain = pickle.loads(pickle.dumps(plain_of_cut(cut)))
    assert cut_of_plain(*plain) == cut


IMPOSSIBLE = {
    "no ranks": ("ep", 0, 0, "plain", 1),
    "a dim before the rows": ("ep", 2, -2, "plain", 1),
    "a dim that is text": ("ep", 2, "0", "plain", 1),
    "plain parts": ("ep", 2, 0, "plain", 2),
    "listed parts": ("ep", 2, 0, "rows", (1, 1)),
    "no fused parts": ("ep", 2, 0, "fused", ()),
    "a part without rows": ("ep", 2, 0, "fused", (8, 0)),
    "more parts than there are": ("ep", 2, 0, "fused", 10**9),
    "many parts of rows": ("ep", 2, -1, "fused", 10**9, False, (0, (1, 1), 1)),
    "fewer pieces than ranks": ("ep", 2, 0, "ragged", (8,)),
    "a number of pieces": ("ep", 2, 0, "ragged", 2),
    "a piece of less than no rows": ("ep", 2, 0, "ragged", (9, -1)),
    "a piece that no tensor has": ("ep", 2, 0, "ragged", (8, 1 << 40)),
    "fewer ranges than ranks": ("dp", 2, None, "flat", (8,)),
    "a range of a dim": ("dp", 2, 0, "flat", (4, 4)),
    "a range of less than no elements": ("dp", 2, None, "flat", (9, -1)),
    "a plain cut of no dim": ("dp", 2, None, "plain", 1),
    "copies of some parts": ("tp", 4, 0, "fused", (4, 4), False, None, True, (2,)),
    "copies of no rank": ("tp", 4, 0, "fused", (4, 4), False, None, True, (1, 0)),
    "copies on more ranks than there are": ("tp", 2, 0, "fused", 2, False, None, True, (1, 4)),
    "copies that do not divide the ranks": ("tp", 4, 0, "fused", 2, False, None, True, (1, 3)),
    "copies that are no number": ("tp", 4, 0, "fused", 2, False, None, True, (1, 2.0)),
    "copies of no parts": ("tp", 4, 0, "plain", 1, False, None, True, (2,)),
    "strided sizes": ("ep", 2, 0, "strided", (4, 4)),
    "strided by nothing": ("ep", 2, 0, "strided", 0),
    "a size that no mesh has": ("ep", 1 << 40, 0, "plain", 1),
    "a part beyond the parts": ("ep", 2, 0, "plain", 1, False, (5, (1, 2), 1)),
    "a part before the first": ("ep", 2, 0, "plain", 1, False, (-1, (1, 2), 1)),
    "a part of no parts": ("ep", 2, 0, "plain", 1, False, (0, (), 1)),
    "an empty part": ("ep", 2, 0, "plain", 1, False, (0, (0, 2), 1)),
    "no groups": ("ep", 2, 0, "plain", 1, False, (0, (1, 2), 0)),
    "of one number": ("ep", 2, 0, "plain", 1, False, 3),
    "no cut at all": "ep",
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_key_whose_record_has_a_cut_that_none_makes_is_not_compared(
    tmp_path: Path, run: Run, name: str
) -> None:
    """The other keys are, and no command is led astray by its numbers."""
    path, world = tmp_path / "ckpt", World(2)

    def of(**placements: Any) -> Callable[[int], PlacementRules]:
        return lambda rank: PlacementRules(
            {
                key: CheckpointPlacement(world.mesh(rank, ep=2), {"ep": placement})
                for key, placement in placements.items()
            }
        )

    def half(rank: int) -> dict[str, Any]:
        return {key: arange(8, 2).chunk(2)[rank].clone() for key in ("experts", "v")}

    save(world, path, half, of(experts=Shard(0), v=FusedShard(0, 1)))
    metadata = FileSystemReader(path).read_metadata()
    cuts = metadata.planner_data["dcp_placements"]["cuts"]
    cuts["groups"] = tuple(
        [
            (IMPOSSIBLE[name],) if [cut[3] for cut in group] == ["plain"] else group
            for group in cuts["groups"]
        ]
    )
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    blank = {key: torch.zeros(4, 2) for key in ("experts", "v")}
    with pytest.warns(UserWarning, match="experts: the save cut it in a way that is not known"):
        loaded, _ = load(world, path, lambda rank: blank, of(experts=Shard(0), v=Shard(0)))
    assert all(loaded[1][key].equal(whole) for key, whole in half(1).items())
    with pytest.raises(dcp.CheckpointException, match="v: this load cuts it by 'ep' in another"):
        load(world, path, lambda rank: blank, of(experts=Shard(0), v=FusedShard(0, 2)))
    options = "--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=2"
    assert run("rehearse", path, *options).code == 0
    assert run("reshard", path, tmp_path / "out", *options).code == 0
    assert run("inspect", path, "--keys").code == 0


@pytest.mark.parametrize("keys", [0, 3])
def test_what_is_packed_inflates_to_no_more_than_a_bit_or_a_number_per_key(keys: int) -> None:
    """No key is no limit to ``zlib``."""
    fqns = [f"w{n}" for n in range(keys)]
    bomb = zlib.compress(bytes(64 << 20))
    record = packed_record([()], {}, fqns, (), {})
    kind, _ = record["cuts"]["group_of"]
    forged = {**record, "cuts": record["cuts"] | {"group_of": (kind, bomb)}}
    doubts = {"doubts": {"keys": record["cuts"]["keys"], "differed": bomb}}
    tracemalloc.start()
    try:
        assert record_of({"save_id": "", **forged}, fqns) is None
        assert doubts_of(doubts, fqns) == {}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert record_of({"save_id": "", **record}, fqns) is not None
    assert doubts_of(packed_doubts({"differed": {*fqns}}, fqns), fqns) == (
        {"differed": frozenset(fqns)} if fqns else {}
    )
