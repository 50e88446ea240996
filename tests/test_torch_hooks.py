"""Values that name their chunks by torch's hooks, and ``ShardedTensor``: as with torch's planners.

The truth is plain slicing of the whole, and the whole as torch's default planner reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hazard_scenes import read_whole
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint import ChunkStorageMetadata, WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner, Replace
from dcp_placements.testing import World

WHOLE = torch.arange(7 * 3).reshape(7, 3).float()


pytestmark = pytest.mark.filterwarnings(
    "ignore:Please use DTensor instead:FutureWarning",
    "ignore:`_get_pg_default_device` will be deprecated",
    "ignore:Multiple backends are registered",
)


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(*bounds: int, whole: torch.Tensor = WHOLE) -> ShardedTensor:
    """Return a tensor of which this rank holds the rows between bounds, one shard each."""
    shards = []
    for start, stop in pairwise(bounds):
        shards.append(Shard.from_tensor_and_offsets(whole[start:stop].clone(), [start, 0], rank=0))
    return ShardedTensor._init_from_local_shards(shards, *whole.shape)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("bounds", [(0, 7), (0, 3, 7), (0, 1, 5, 7)])
@pytest.mark.parametrize("nested", [False, True])
def test_a_sharded_tensor_is_loaded_whatever_shards_this_rank_has(
    tmp_path: Path, bounds: tuple[int, ...], nested: bool
) -> None:
    dcp.save({"w": sharded(0, 2, 7), "plain": WHOLE}, checkpoint_id=tmp_path)
    target = sharded(*bounds, whole=torch.zeros(7, 3))
    state: dict[str, Any] = {"w": target, "plain": torch.zeros(7, 3)}
    flat = {"flatten_state_dict": nested}
    dcp.load(state, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(**flat))
    rows = [shard.tensor for shard in target.local_shards()]
    assert torch.equal(torch.cat(rows), WHOLE)
    assert torch.equal(state["plain"], WHOLE)


@pytest.mark.usefixtures("one_rank_group")
def test_a_sharded_tensor_in_several_shards_is_saved_and_beside_tensors_on_meta_loaded(
    tmp_path: Path,
) -> None:
    dcp.save(
        {"model": {"w": sharded(0, 2, 7), "b": WHOLE[0].clone()}},
        checkpoint_id=tmp_path,
        planner=PlacementSavePlanner(),
    )
    assert torch.equal(read_whole(tmp_path)["model.w"], WHOLE)
    target = sharded(0, 4, 7, whole=torch.zeros(7, 3))
    state = {"model": {"w": target, "b": torch.empty(3, device="meta")}}
    dcp.load(state, checkpoint_id=tmp_path, planner=PlacementLoadPlanner())
    assert torch.equal(torch.cat([one.tensor for one in target.local_shards()]), WHOLE)
    assert torch.equal(state["model"]["b"], WHOLE[0])


def wrapped(*bounds: int, whole: torch.Tensor = WHOLE) -> DTensor:
    """Return a DTensor whose local tensor is a list of shards; of one bound the list is empty."""
    shards = [whole[a:b].clone() for a, b in pairwise(bounds)]
    local: Any = LocalShardsWrapper(shards, [(start, 0) for start in bounds[:-1]])
    mesh = init_device_mesh("cpu", (1,))
    stride = whole.stride()
    return DTensor.from_local(local, mesh, [Replicate()], shape=whole.shape, stride=stride)


@pytest.mark.usefixtures("one_rank_group")
def test_a_dtensor_of_local_shards_is_saved_and_loaded_and_of_none_left_alone(
    tmp_path: Path,
) -> None:
    state = {"w": wrapped(0, 2, 7), "none": wrapped(0), "plain": WHOLE}
    dcp.save(state, checkpoint_id=tmp_path, planner=PlacementSavePlanner())
    assert read_whole(tmp_path).keys() == {"w", "plain"}
    assert torch.equal(read_whole(tmp_path)["w"], WHOLE)
    target = wrapped(0, 4, 5, 7, whole=torch.zeros(7, 3))
    state = {"w": target, "none": wrapped(0), "plain": torch.zeros(7, 3)}
    dcp.load(state, checkpoint_id=tmp_path, planner=PlacementLoadPlanner())
    rows = target._local_tensor.local_shards()  # type: ignore[attr-defined]
    assert torch.equal(torch.cat(rows), WHOLE)


class Rows(torch.Tensor):
    """Some rows of a whole, by torch's hooks; perhaps none."""

    start: int
    rows: torch.Tensor | None

    @staticmethod
    def of(start: int = 0, rows: torch.Tensor | None = None) -> Rows:
        """Return what is these rows of the whole, or none of them."""
        value: Any = torch.Tensor._make_wrapper_subclass(Rows, WHOLE.shape, dtype=WHOLE.dtype)
        value.start, value.rows = start, rows
        return value  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a value with hooks has no elements of its own")

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        if self.rows is None:
            return []
        return [ChunkStorageMetadata(torch.Size((self.start, 0)), self.rows.shape)]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(WHOLE.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, WHOLE.shape),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        assert self.rows is not None
        return self.rows


def held(*bounds: int, whole: torch.Tensor = WHOLE) -> Any:
    """Return what each rank has of the whole: its rows between bounds, or none of it."""
    pairs = pairwise(bounds)
    return [Rows.of(a, whole[a:b].clone()) if b > a else Rows.of() for a, b in pairs]


@pytest.mark.parametrize("bounds", [(0, 4, 7, 7), (0, 0, 4, 7), (0, 4, 4, 7), (0, 7, 7, 7)])
def test_a_rank_may_have_no_chunk_of_a_value_with_hooks(
    tmp_path: Path, bounds: tuple[int, ...]
) -> None:
    ranks = held(*bounds)
    bias = WHOLE[0].clone()
    World(3).save(
        tmp_path, lambda rank: {"m.w": ranks[rank], "m.b": bias}, lambda _: PlacementSavePlanner()
    )
    assert read_whole(tmp_path).keys() == {"m.w", "m.b"}
    assert torch.equal(read_whole(tmp_path)["m.w"], WHOLE)
    for other in [(0, 4, 4, 7), (0, 7, 7, 7), (0, 0, 0, 7)]:
        targets = held(*other, whole=torch.zeros(7, 3))
        World(3).load(
            tmp_path,
            lambda rank, targets=targets: {"m.w": targets[rank], "m.b": torch.zeros(3)},
            lambda _: PlacementLoadPlanner(),
        )
        rows = [one.rows for one in targets if one.rows is not None]
        assert torch.equal(torch.cat(rows), WHOLE)


def test_a_value_with_hooks_and_no_chunk_is_renamed_and_saved_by_nobody(tmp_path: Path) -> None:
    state = {"m.w": Rows.of(), "m.b": WHOLE}
    rename = Replace("m", "model")
    World(2).save(tmp_path, lambda _: state, lambda _: PlacementSavePlanner(rename=rename))
    assert read_whole(tmp_path).keys() == {"model.b"}
    World(2).load(tmp_path, lambda _: state, lambda _: PlacementLoadPlanner(rename=rename))


def test_a_hole_between_values_with_hooks_is_refused(tmp_path: Path) -> None:
    ranks = [*held(0, 4), *held(5, 7), Rows.of()]
    with pytest.raises(dcp.CheckpointException, match=r"m\.w: nobody holds all of the \(7, 3\)"):
        World(3).save(tmp_path, lambda rank: {"m.w": ranks[rank]}, lambda _: PlacementSavePlanner())
