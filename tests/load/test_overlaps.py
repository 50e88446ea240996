"""Keys of one memory: a load leaves none of them with the contents of another.

The files are written by torch's default planner, and compared with whole tensors that the test
slices itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, LoadPlan
from torch.distributed.tensor import Replicate, Shard
from torch.futures import Future

from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemReader,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Stack,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World
from tests.hazard_scenes import arange

State = dict[str, Any]


class ReadsAtOnce(FileSystemReader):
    """Begins all reads before it ends the first, as readers with threads may.

    Args:
        path: The checkpoint.
        wholes: Its contents.
        written: The order in which tensors are filled.
        ended: The order in which the planner learns of it.
    """

    def __init__(
        self, path: Path, wholes: State, *, written: Sequence[int], ended: Sequence[int]
    ) -> None:
        super().__init__(path)
        self.wholes, self.written, self.ended = wholes, written, ended

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        targets = [planner.resolve_tensor(item).detach() for item in plan.items]
        for at in self.written:
            targets[at].copy_(self.wholes[plan.items[at].storage_index.fqn])
        for at in self.ended:
            planner.commit_tensor(plan.items[at], targets[at])
        done: Future[None] = Future()
        done.set_result(None)
        return done


WHOLES = {"embed.weight": arange(12, 5), "head.weight": 1000 - arange(12, 5)}
EQUAL = {"embed.weight": arange(12, 5), "head.weight": arange(12, 5)}


def stored(path: Path, wholes: State) -> Path:
    dcp.save(dict(wholes), checkpoint_id=path, planner=dcp.DefaultSavePlanner(), no_dist=True)
    return path


def stored_in_parts(path: Path, wholes: State, parts: dict[str, int]) -> Path:
    """Save each key in as many row blocks as ``parts`` says, one per rank, with DTensors."""
    world = World(4)

    def state_dict(rank: int) -> State:
        state = {}
        for name, whole in wholes.items():
            placement = Shard(0) if parts[name] > 1 else Replicate()
            mesh = FakeMesh((4,), ("dp",), rank=rank)
            state[name] = FakeDTensor.distribute(whole, mesh, [placement])
        return state

    world.save(path, state_dict, lambda rank: PlacementSavePlanner())
    return path


def refused(path: Path, state: State, reader: Any = None) -> str:
    with pytest.raises(CheckpointException) as caught:
        dcp.load(
            state,
            storage_reader=reader or PlacementFileSystemReader(path),
            planner=PlacementLoadPlanner(),
        )
    return str(caught.value.failures[0][0])


READERS: dict[str, Callable[[Path], Any]] = {
    "torch's": FileSystemReader,
    "ours": PlacementFileSystemReader,
    "ours, 4 threads": lambda path: PlacementFileSystemReader(path, thread_count=4),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    "order", [("embed.weight", "head.weight"), ("head.weight", "embed.weight")]
)
def test_one_tensor_under_two_keys_of_different_contents_is_refused(
    reader: Callable[[Path], Any], order: tuple[str, str], tmp_path: Path
) -> None:
    stored(tmp_path, WHOLES)
    tied = torch.zeros(12, 5)
    text = refused(tmp_path, dict.fromkeys(order, tied), reader(tmp_path))
    assert "embed.weight" in text
    assert "head.weight" in text
    assert "has one memory for them, but the checkpoint has different contents" in text
    assert "way out:" in text


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_equal_contents_are_loaded_into_one_memory(
    reader: Callable[[Path], Any], tmp_path: Path
) -> None:
    stored(tmp_path, EQUAL)
    weight = torch.nn.Parameter(torch.zeros(12, 5))
    state = {"embed.weight": weight, "head.weight": weight}
    dcp.load(state, storage_reader=reader(tmp_path), planner=PlacementLoadPlanner())
    assert torch.equal(weight.detach(), arange(12, 5))


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
@pytest.mark.parametrize("parts", [(1, 4), (4, 1), (4, 4)], ids=str)
def test_keys_that_were_sharded_differently(
    equal: bool, parts: tuple[int, int], tmp_path: Path
) -> None:
    wholes = EQUAL if equal else WHOLES
    stored_in_parts(tmp_path, wholes, dict(zip(wholes, parts, strict=True)))
    tied = [torch.zeros(6, 5) for _ in range(2)]

    def state_dict(rank: int) -> State:
        mesh = FakeMesh((2,), ("tp",), rank=rank)
        return {name: FakeDTensor(tied[rank], mesh, [Shard(0)], (12, 5)) for name in wholes}

    def load() -> None:
        World(2).load(
            tmp_path,
            state_dict,
            lambda rank: PlacementLoadPlanner(),
            lambda rank: PlacementFileSystemReader(tmp_path),
        )

    if equal:
        load()
        assert [torch.equal(tied[rank], arange(12, 5).chunk(2)[rank]) for rank in range(2)]
        return
    with pytest.raises(CheckpointException) as caught:
        load()
    for rank in range(2):
        text = str(caught.value.failures[rank][0])
        assert "embed.weight, head.weight" in text or "head.weight, embed.weight" in text
        assert "this rank has one memory" in text


def test_views_that_overlap_in_part(tmp_path: Path) -> None:
    joined = arange(12, 5)
    stored(tmp_path, {"qkv": joined, "q": joined[:4], "w": joined[2:].t()})
    memory = torch.zeros(12, 5)
    state = {"qkv": memory, "q": memory[:4], "w": memory[2:].t()}
    dcp.load(state, checkpoint_id=tmp_path, planner=PlacementLoadPlanner())
    assert torch.equal(memory, joined)
    stored(tmp_path / "other", {"qkv": joined, "q": -joined[:4], "w": joined[2:].t()})
    text = refused(tmp_path / "other", state, FileSystemReader(tmp_path / "other"))
    assert "qkv" in text
    assert "q," in text + ","


def test_neighbours_in_one_storage_are_loaded(tmp_path: Path) -> None:
    wholes = {"left": arange(6, 2), "right": -arange(6, 3), "below": arange(2, 5) + 50}
    stored(tmp_path, wholes)
    memory = torch.zeros(8, 5)
    state = {"left": memory[:6, :2], "right": memory[:6, 2:], "below": memory[6:]}
    dcp.load(state, checkpoint_id=tmp_path, planner=PlacementLoadPlanner())
    assert all(torch.equal(state[name], whole) for name, whole in wholes.items())


def test_contents_are_compared_as_they_are_loaded(tmp_path: Path) -> None:
    whole = arange(12, 5)
    stored(tmp_path, {"embed.weight": whole, "head.weight": whole.double()})
    tied = torch.zeros(12, 5, dtype=torch.bfloat16)
    planner = PlacementLoadPlanner(cast="allow")
    dcp.load(dict.fromkeys(WHOLES, tied), checkpoint_id=tmp_path, planner=planner)
    assert torch.equal(tied, whole.bfloat16())


@pytest.mark.parametrize("written", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("ended", [(0, 1), (1, 0)], ids=str)
def test_reads_at_once_are_compared_as_well(
    written: tuple[int, int], ended: tuple[int, int], tmp_path: Path
) -> None:
    stored(tmp_path / "different", WHOLES)
    stored(tmp_path / "equal", EQUAL)
    tied = torch.zeros(12, 5)
    reader = ReadsAtOnce(tmp_path / "different", WHOLES, written=written, ended=ended)
    text = refused(tmp_path / "different", dict.fromkeys(WHOLES, tied), reader)
    assert "different contents" in text
    tied.zero_()
    reader = ReadsAtOnce(tmp_path / "equal", EQUAL, written=written, ended=ended)
    state = dict.fromkeys(EQUAL, tied)
    dcp.load(state, storage_reader=reader, planner=PlacementLoadPlanner())
    assert torch.equal(tied, arange(12, 5))


def test_rows_of_a_stack_in_one_memory(tmp_path: Path) -> None:
    stored(tmp_path / "different", {"experts.w": arange(2, 3)})
    stored(tmp_path / "equal", {"experts.w": torch.ones(2, 3)})
    row = torch.zeros(3)
    state = {"experts.0.w": row, "experts.1.w": row}
    planner = PlacementLoadPlanner(rename=Stack("experts.{}", 2))
    with pytest.raises(CheckpointException, match="one memory for several rows of it"):
        dcp.load(state, checkpoint_id=tmp_path / "different", planner=planner)
    dcp.load(state, checkpoint_id=tmp_path / "equal", planner=planner)
    assert torch.equal(row, torch.ones(3))


SELF_OVERLAPPING = {
    "expand": lambda: torch.zeros(3).expand(4, 3),
    "expand of columns": lambda: torch.zeros(4, 1).expand(4, 3),
    "unfold": lambda: torch.zeros(6).unfold(0, 3, 1),
    "as_strided": lambda: torch.zeros(9).as_strided((4, 3), (2, 1)),
    "interleaved": lambda: torch.zeros(13).as_strided((4, 3), (2, 3)),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("kind", SELF_OVERLAPPING)
def test_m70_a_destination_that_overlaps_itself_is_refused_by_name(
    kind: str, reader: Callable[[Path], Any], tmp_path: Path
) -> None:
    view = SELF_OVERLAPPING[kind]()
    stored(tmp_path, {"w": arange(*view.shape) + 1, "b": arange(2) + 1})
    state = {"w": view, "b": torch.zeros(2)}
    text = refused(tmp_path, state, reader(tmp_path))
    assert "w: several elements of this (4, 3) tensor are one memory" in text
    assert "way out:" in text
    assert not state["w"].any()
    assert not state["b"].any()


def test_m70_a_local_tensor_that_overlaps_itself_is_refused_on_its_rank(tmp_path: Path) -> None:
    stored(tmp_path, {"w": arange(8, 3)})
    world = World(2)

    def state(rank: int) -> State:
        return {"w": torch.zeros(4, 3) if rank else torch.zeros(3).expand(4, 3)}

    def planner(rank: int) -> PlacementLoadPlanner:
        placement = CheckpointPlacement(world.mesh(rank, tp=2), {"tp": Shard(0)})
        return PlacementLoadPlanner(PlacementRules({"w": placement}))

    with pytest.raises(CheckpointException) as caught:
        world.load(tmp_path, state, planner)
    text = " ".join(str(error) for error, _ in caught.value.failures.values())
    assert "several elements of this (4, 3) tensor are one memory" in text
    assert "rank 0" in text


@pytest.mark.parametrize("kind", SELF_OVERLAPPING)
def test_m70_a_tensor_that_overlaps_itself_is_saved_as_what_it_shows(
    kind: str, tmp_path: Path
) -> None:
    view = SELF_OVERLAPPING[kind]()
    memory = torch.arange(float(view.untyped_storage().nbytes() // view.itemsize))
    view.untyped_storage().copy_(memory.untyped_storage())
    dcp.save({"w": view}, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    found = {"w": torch.full(view.shape, -1.0)}
    dcp.load(found, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    assert torch.equal(found["w"], view.contiguous())


APART = {
    "contiguous": lambda: torch.zeros(4, 3),
    "transposed": lambda: torch.zeros(3, 4).t(),
    "columns": lambda: torch.zeros(4, 7)[:, 2:5],
    "every other row": lambda: torch.zeros(8, 3)[::2],
    "every other column, transposed": lambda: torch.zeros(6, 4)[::2].t(),
    "size 1 with stride 0": lambda: torch.zeros(12).as_strided((4, 3), (3, 1)).unsqueeze(1),
    "size 1, expanded": lambda: torch.zeros(1).expand(1, 1),
    "no elements, expanded": lambda: torch.zeros(0, 1).expand(0, 5),
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "interleaved, never equal": lambda: torch.zeros(6).as_strided((2, 2), (2, 3)),
    "size 1 with any stride": lambda: torch.zeros(12).as_strided((4, 1, 3), (3, 2, 1)),
    "scalar": lambda: torch.zeros(()),
}


@pytest.mark.parametrize("kind", APART)
def test_m70_views_whose_elements_lie_apart_are_loaded(kind: str, tmp_path: Path) -> None:
    view = APART[kind]()
    whole = arange(*view.shape) + 1
    stored(tmp_path, {"w": whole})
    dcp.load({"w": view}, checkpoint_id=tmp_path, planner=PlacementLoadPlanner())
    assert torch.equal(view, whole)
