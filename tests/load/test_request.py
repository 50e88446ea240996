"""What a rank asks of a checkpoint: many tensors at once are judged as each is alone."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
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

from dcp_placements import (
    CheckpointPlacement,
    PlacementLoadPlanner,
    PlacementRules,
    Replace,
    Split,
    Stack,
    Transpose,
    Unstack,
)
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


class Casting(FakeDTensor):
    def to_local(self) -> torch.Tensor:
        return super().to_local().to(torch.float32)


def look_alike(*shape: int, casts: bool = True) -> FakeDTensor:
    mesh, kind = FakeMesh((1,), ("dp",), rank=0), Casting if casts else FakeDTensor
    dtype = torch.bfloat16 if casts else torch.float32
    return kind(torch.zeros(shape, dtype=dtype), mesh, [Replicate()], shape)


def test_a_look_alike_that_makes_a_copy_each_time_is_refused(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(5, 3)}, checkpoint_id=tmp_path, no_dist=True)
    state = {"weight": look_alike(5, 3)}
    text = refusal(lambda: dcp.load(state, checkpoint_id=tmp_path, planner=PlacementLoadPlanner()))
    assert "weight: to_local() of this Casting makes a copy" in text


RESHAPED: dict[str, tuple[Any, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "rows": (Stack("e.{}", total=2), {"e.w": (2, 4, 3)}, {"e.0.w": (4, 3), "e.1.w": (4, 3)}),
    "several": (Replace("e.*", "e"), {"e.w": (4, 3)}, {"e.0.w": (4, 3), "e.1.w": (4, 3)}),
    "a stack": (Unstack("e.{}"), {"e.0.w": (4, 3), "e.1.w": (4, 3)}, {"e.w": (2, 4, 3)}),
    "parts": (Split("ab", ("a", "b")), {"a.w": (4, 3), "b.w": (4, 3)}, {"ab.w": (8, 3)}),
    "transposed": (Transpose("w"), {"w": (4, 3)}, {"w": (3, 4)}),
}
"""A rename, the shapes of the checkpoint, and those of this rank."""


@pytest.mark.parametrize("case", RESHAPED)
def test_a_look_alike_that_makes_a_copy_is_refused_among_others_and_renamed(
    case: str, tmp_path: Path
) -> None:
    rename, stored, own = RESHAPED[case]
    saved = {key: torch.arange(1.0, 1 + prod(shape)).view(shape) for key, shape in stored.items()}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)

    def load(casting: str = "") -> dict[str, Any]:
        state = {key: look_alike(*shape, casts=key == casting) for key, shape in own.items()}
        planner = PlacementLoadPlanner(rename=rename)
        dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        return state

    assert all(value.to_local().all() for value in load().values())
    for key in own:
        assert "to_local() of this Casting makes a copy" in refusal(partial(load, key))
