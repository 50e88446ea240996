"""What a checkpoint keeps of how it was saved: complete and small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hazard_scenes import arange, save
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    PlacementRules,
)
from dcp_placements.storage.provenance import SaveRecord, record_of, stored
from dcp_placements.testing import FakeDTensor, World

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
    record = record_of(stored(metadata), metadata.state_dict_metadata)
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


def test_nothing_is_kept_of_a_key_that_ranks_declare_in_several_ways(tmp_path: Path) -> None:
    """Two ranks say ``tp``, two say ``etp``; the boxes are the same."""

    def other(rank: int) -> PlacementRules:
        name = "tp" if rank < 2 else "etp"
        mesh = World(2).mesh(rank % 2, **{name: 2})
        return PlacementRules({"w": CheckpointPlacement(mesh, {name: Shard(0)})})

    save(WORLD, tmp_path, lambda rank: {"w": arange(4, 2).chunk(2)[rank % 2].clone()}, other)
    assert saved_record(tmp_path).cuts("w") == ()
