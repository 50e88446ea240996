"""What a rank asks of a checkpoint: many tensors at once are judged as each is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import refusal
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, tilings
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    Metadata,
    ReadItem,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import CheckpointPlacement, PlacementLoadPlanner, PlacementRules
from dcp_placements.bind.place import place
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Box
from dcp_placements.load.missing import Policy
from dcp_placements.load.request import request_of
from dcp_placements.report import LoadReport
from dcp_placements.testing import FakeDTensor, FakeMesh, World

SHAPE = (8, 6)
OTHER_SHAPE = (8, 5)
RANK = 2
# Mostly what makes tensors alike, so that many are in all but one respect.
SIZES = (SHAPE, SHAPE, SHAPE, SHAPE, SHAPE, OTHER_SHAPE, (5, 6))
FORMS = ("shared", "shared", "shared", "equal", "turned", "incomplete")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int32)


def ask(
    state_dict: dict[str, torch.Tensor], stored: dict[str, Any], cast: str
) -> tuple[list[ReadItem], list[Fault], LoadReport]:
    """Return the items, the faults and the report of one request."""
    placement = CheckpointPlacement(World(4).mesh(RANK, ep=4), {"ep": Shard(0)})
    padded = CheckpointPlacement(
        World(4).mesh(RANK, ep=4), {"ep": Shard(0)}, global_shape=(5, 6), padded_shape=SHAPE
    )
    placing = place(state_dict, PlacementRules({"cut": placement, "padded": padded}))
    request = request_of(placing, Metadata(stored), Policy(partial=True, cast=cast))
    items = request.items(None, know_memory=False)
    return items, [*placing.faults, *request.faults], request.report()


@given(st.data())
@examples(50)
def test_tensors_that_lie_alike_are_judged_each_for_itself(data: st.DataObject) -> None:
    """Lists of chunks that are shared, equal, in another order, incomplete or of another cut."""
    cuts = [data.draw(tilings(SHAPE)), [Box((0, 0), SHAPE)]]
    lists = [[chunk(box) for box in cut] for cut in cuts]
    state_dict: dict[str, torch.Tensor] = {}
    stored: dict[str, Any] = {}
    for number in range(data.draw(st.integers(4, 12))):
        kind = data.draw(st.sampled_from(["cut", "cut", "cut", "cut", "whole", "padded"]))
        fqn = f"{number}.{kind}"
        local = SHAPE if kind == "whole" else (2, 6)
        state_dict[fqn] = torch.zeros(local, dtype=data.draw(st.sampled_from(DTYPES)))
        chunks = list_of(data, lists)
        size = data.draw(st.sampled_from(SIZES))
        properties = TensorProperties(dtype=data.draw(st.sampled_from(DTYPES)))
        stored[fqn] = TensorStorageMetadata(properties, torch.Size(size), chunks)
    cast = data.draw(st.sampled_from(["error", "allow"]))
    items, faults, report = ask(state_dict, stored, cast)
    alone = {fqn: ask({fqn: state_dict[fqn]}, stored, cast) for fqn in state_dict}
    assert items == [item for found, _, _ in alone.values() for item in found]
    # An index's place in the list is left out when indices are compared.
    places = [(item.dest_index.index, item.storage_index.index) for item in items]
    assert places == [
        (item.dest_index.index, item.storage_index.index)
        for found, _, _ in alone.values()
        for item in found
    ]
    each = [fault for _, found, _ in alone.values() for fault in found]
    assert sorted(faults, key=str) == sorted(each, key=str)
    reports = [each for _, _, each in alone.values()]
    assert report.items == sum(each.items for each in reports)
    assert report.wanted_nbytes == sum(each.wanted_nbytes for each in reports)
    assert report.read_nbytes == sum(each.read_nbytes for each in reports)
    assert set(report.padded) == {fqn for each in reports for fqn in each.padded}
    assert report.casts == {fqn: stored for each in reports for fqn, stored in each.casts.items()}


def chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def list_of(
    data: st.DataObject, lists: list[list[ChunkStorageMetadata]]
) -> list[ChunkStorageMetadata]:
    chunks = data.draw(st.sampled_from(lists))
    form = data.draw(st.sampled_from(FORMS))
    if form == "shared":
        return chunks
    copies = [ChunkStorageMetadata(one.offsets, one.sizes) for one in chunks]
    if form == "turned":
        copies.reverse()
    if form == "incomplete":
        del copies[data.draw(st.integers(0, len(copies) - 1))]
    return copies


def test_a_look_alike_that_makes_a_copy_each_time_is_refused(tmp_path: Path) -> None:
    class Casting(FakeDTensor):
        def to_local(self) -> torch.Tensor:
            return super().to_local().to(torch.float32)

    dcp.save({"weight": torch.ones(5, 3)}, checkpoint_id=tmp_path, no_dist=True)
    mesh = FakeMesh((1,), ("dp",), rank=0)
    weight = Casting(torch.zeros(5, 3, dtype=torch.bfloat16), mesh, [Replicate()], (5, 3))
    text = refusal(
        lambda: dcp.load({"weight": weight}, checkpoint_id=tmp_path, planner=PlacementLoadPlanner())
    )
    assert "weight: to_local() of this Casting makes a copy" in text
