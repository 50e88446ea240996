"""What is hard about whole models, each by itself: axes, padding, tied names, replicas.

``test_matrix`` runs them all together through every topology.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, assert_holds
from topologies import (
    EMBEDDINGS,
    HIDDEN,
    MOMENTS,
    VOCAB,
    Ranks,
    Topology,
    load_and_check,
    save_and_check,
)
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut, real_dtensor

# Axes


def test_an_axis_without_a_name_is_known_by_its_ranks(tmp_path: Path) -> None:
    """FSDP over a mesh without names; the rule names the same ranks, and the axis counts once."""
    whole = arange(7, 3)
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        return {"w": FakeDTensor.distribute(whole, FakeMesh((4,), rank=rank), [Shard(0)])}

    def rules(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, fsdp=4)
        return PlacementRules({"w": CheckpointPlacement(mesh, {"fsdp": Shard(0)})})

    world.save(tmp_path, state_dict, lambda rank: PlacementSavePlanner(rules(rank)))
    assert_holds(tmp_path, {"w": whole})


def test_axes_of_two_meshes_without_names_are_known_by_their_ranks(tmp_path: Path) -> None:
    whole = arange(8, 5)
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = FakeMesh((2, 2), rank=rank)
        fsdp = FakeMesh((2,), rank=rank, ranks=mesh.mesh[(mesh.get_coordinate() or [])[0]])
        part = cut(whole, [Shard(0)], [2], (mesh.get_coordinate() or [])[:1])
        return {"w": FakeDTensor.distribute(part, fsdp, [Shard(1)])}

    def rules(rank: int) -> PlacementRules:
        mesh = FakeMesh((2, 2), rank=rank)
        return PlacementRules({"w": CheckpointPlacement(mesh, [Shard(0), Shard(1)])})

    world.save(tmp_path, state_dict, lambda rank: PlacementSavePlanner(rules(rank)))
    assert_holds(tmp_path, {"w": whole})


@pytest.mark.parametrize("ruled", [False, True])
def test_ranks_outside_a_tensor_s_mesh_hold_nothing_of_it(ruled: bool, tmp_path: Path) -> None:
    """A DTensor over ranks 1 and 2 of four, and the key on all of them."""
    whole = arange(5, 3)
    world = World(4)

    def mesh_of(rank: int) -> FakeMesh:
        return FakeMesh((2,), ("tp",), rank=rank, ranks=torch.tensor([1, 2]))

    def state_dict(rank: int, source: torch.Tensor) -> dict[str, Any]:
        local = FakeDTensor.distribute(source, mesh_of(rank), [Shard(0)]).to_local()
        return {"w": real_dtensor(local, mesh_of(rank), [Shard(0)], whole.shape)}

    def rules(rank: int) -> PlacementRules | None:
        placement = CheckpointPlacement(mesh_of(rank), {"tp": Shard(0)})
        return PlacementRules({"w": placement}) if ruled else None

    world.save(
        tmp_path,
        lambda rank: state_dict(rank, whole),
        lambda rank: PlacementSavePlanner(rules(rank)),
    )
    assert_holds(tmp_path, {"w": whole})
    loaded = world.load(
        tmp_path,
        lambda rank: state_dict(rank, torch.zeros(5, 3)),
        lambda rank: PlacementLoadPlanner(rules(rank)),
    )
    assert [loaded[rank]["w"].to_local().numel() for rank in range(4)] == [0, 9, 6, 0]
    for rank in range(4):
        assert torch.equal(loaded[rank]["w"].to_local(), state_dict(rank, whole)["w"].to_local())


# Padding


@pytest.mark.parametrize(("source", "target"), [(2, 4), (4, 1)])
def test_padding_that_depends_on_tp_is_kept_on_load_and_counted(
    source: int, target: int, tmp_path: Path
) -> None:
    """19 rows: 24 under tp 2, 32 under tp 4. ``load_and_check`` compares the padding, too."""
    save_and_check(tmp_path, Ranks(Topology(tp=source)))
    padded = -(-VOCAB // (4 * target)) * 4 * target
    reports = load_and_check(tmp_path, Ranks(Topology(tp=target)))
    tensors = 2 * (1 + len(MOMENTS))
    kept = Counter[str]()
    for rank, report in enumerate(reports):
        kept.update(report.padded)
        beyond = min(max((rank + 1) * padded // target - VOCAB, 0), padded // target)
        assert sum(report.padded.values()) == beyond * HIDDEN * tensors
        if beyond:
            line = f"{beyond * HIDDEN * tensors} elements of padding kept"
            assert line in str(report)
    assert len(kept) == tensors
    assert set(kept.values()) == {(padded - VOCAB) * HIDDEN}


# Tied weights


@pytest.mark.parametrize(
    "source",
    [Topology(tp=2), Topology(pp=4), Topology(fsdp=2, hsdp=2)],
    ids=str,
)
def test_tied_names_are_both_in_the_file_and_both_load(source: Topology, tmp_path: Path) -> None:
    """In one storage, and on two pipeline stages each in its own."""
    ranks = Ranks(source, tied=True)
    assert torch.equal(*(ranks.wholes[f"model.{name}"] for name in EMBEDDINGS))
    save_and_check(tmp_path, ranks)
    for target in (Topology(tp=2), Topology(pp=2), Topology(fsdp=2, tp=2)):
        load_and_check(tmp_path, Ranks(target, tied=True))
