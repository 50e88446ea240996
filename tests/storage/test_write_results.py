"""Ranks confirm what they wrote; the coordinator works the rows out from the plan that it made."""

from __future__ import annotations

import dataclasses
import pickle
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemWriter,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.storage.metadata.table import RowsBuilder
from dcp_placements.storage.metadata.write_results import Confirmation, Outline, WriteResults
from dcp_placements.testing import World

SAVE_ID = uuid.UUID(int=0x5E0F1A2B << 96)


class InStateDictOrder(PlacementSavePlanner):
    """A planner whose ranks send all rows."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        return dataclasses.replace(plan, items=list(plan.items))


class InFileOrder(PlacementSavePlanner):
    """A planner whose ranks send all rows, in the order of a single file."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        # As the writer does: objects come first.
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        return dataclasses.replace(plan, items=[*objects, *tensors])


def state(world: World, rank: int) -> dict[str, Any]:
    """Return a rank's part: sharded, replicated and uneven tensors, objects, its own keys."""
    coordinate = world.mesh(rank, dp=2, ep=world.size // 2).get_coordinate()
    assert coordinate is not None
    values: dict[str, Any] = {"lr": 0.1, "names": ["a"] * 50, "step": torch.tensor(3.0)}
    for layer in range(12):
        values[f"layers.{layer}.experts.w"] = torch.full((3, 4), float(coordinate[1] * 100 + layer))
        values[f"layers.{layer}.norm"] = torch.arange(5.0) + layer
        values[f"layers.{layer}.gate"] = torch.arange(6.0).reshape(2, 3).T + layer
    values[f"own.{rank}"] = torch.full((2,), float(rank))
    return values


def is_confirmation(results: Any) -> bool:
    """Whether results are sent without rows."""
    return isinstance(pickle.loads(pickle.dumps(results))._sent, Confirmation)


def save(path: Path, kind: type[PlacementSavePlanner], size: int, **options: Any) -> list[Any]:
    """Save; return what the ranks sent after writing."""
    world = World(size)
    sent: list[Any] = []

    class Writer(PlacementFileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            sent.append(written.value())
            return written

    def planner(rank: int) -> PlacementSavePlanner:
        mesh = world.mesh(rank, dp=2, ep=size // 2)
        rules = {"experts.w": CheckpointPlacement(mesh, [Replicate(), Shard(0)])}
        return kind(PlacementRules(rules))

    threads = options.get("threads", 1)
    world.save(
        path,
        lambda rank: state(world, rank),
        planner,
        lambda rank: Writer(
            path, thread_count=threads, single_file_per_rank="files" not in options
        ),
    )
    return sent


@pytest.mark.parametrize("options", [{}, {"files": "many"}])
@pytest.mark.parametrize("size", [2, 4])
def test_metadata_are_those_of_rows_that_were_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: SAVE_ID)
    # One directory for both, because its name stands in .metadata.
    path = tmp_path / "now"
    confirmed = save(path, PlacementSavePlanner, size, **options)
    path.rename(tmp_path / "a")
    kind = InStateDictOrder if "files" in options else InFileOrder
    in_full = save(path, kind, size, **options)
    path.rename(tmp_path / "b")
    assert [is_confirmation(result) for result in confirmed] == [True] * size
    assert not any(map(is_confirmation, in_full))
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert len(dcp.FileSystemReader(tmp_path / "a").read_metadata().storage_data) > 30


def test_what_threads_wrote_into_several_files_is_confirmed(tmp_path: Path) -> None:
    [one, other] = save(tmp_path, PlacementSavePlanner, 2, threads=3)
    assert len(one.rows.paths) == 3
    stored = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    for result in [*one, *other]:
        assert stored[result.index] == result.storage_data


def test_a_confirmation_of_thousands_of_tensors_is_small() -> None:
    builder, fqns, start = RowsBuilder(), [], 0
    for layer in range(100):
        for number in range(30):
            fqns.append((number, f"layers.{layer}.part{number}.weight"))
            index = dcp.metadata.MetadataIndex(fqns[-1][1], torch.Size((4096 * number, 0)))
            builder.add(index, path="__12_5e0f1a2b_0.distcp", start=start, length=900 + number)
            start += 900 + number
    fqns.sort(key=lambda entry: entry[0])
    slots = torch.tensor([number for number, _ in fqns]).numpy().tobytes()
    offsets = tuple((4096 * number, 0) for number in range(30))
    outline = Outline(tuple(fqn for _, fqn in fqns), slots, offsets)
    results = WriteResults(builder.rows(), lambda: outline)
    sent = pickle.dumps(results)
    assert len(sent) < 1024
    arrived = pickle.loads(sent)
    with pytest.raises(RuntimeError, match="rank's plan"):
        len(arrived)
    arrived.outline = lambda: outline
    assert arrived.rows.rows.tolist() == results.rows.rows.tolist()
    assert arrived == results


@pytest.mark.parametrize("moved", [None, 2])
def test_one_chunk_of_each_key_in_order_is_confirmed_at_its_offset(moved: int | None) -> None:
    offsets, slots = ((0, 0), (4, 0), None), [0, 1, 1, 0, 2]
    outline = Outline(tuple("abcde"), torch.tensor(slots).numpy().tobytes(), offsets)
    builder = RowsBuilder()
    for at, (fqn, slot) in enumerate(zip("abcde", slots, strict=True)):
        offset = offsets[0 if at == moved else slot]
        index = dcp.metadata.MetadataIndex(fqn, None if offset is None else torch.Size(offset))
        builder.add(index, path="__0_0.distcp", start=100 * at, length=100)
    results = WriteResults(builder.rows(), lambda: outline)
    assert is_confirmation(results) == (moved is None)
    arrived = pickle.loads(pickle.dumps(results))
    arrived.outline = lambda: outline
    found = [(one.index.fqn, one.index.offset, one.storage_data.offset) for one in arrived]
    expected = [offsets[0 if at == moved else slot] for at, slot in enumerate(slots)]
    assert found == [(fqn, expected[at], 100 * at) for at, fqn in enumerate("abcde")]


def test_rows_that_are_not_those_of_the_plan_are_sent(tmp_path: Path) -> None:
    [one, _] = save(tmp_path, PlacementSavePlanner, 2)
    builder = RowsBuilder()
    for result in list(one)[1:]:
        info = result.storage_data
        builder.add(result.index, path=info.relative_path, start=info.offset, length=info.length)
    fewer = WriteResults(builder.rows(), one.outline)
    assert pickle.loads(pickle.dumps(fewer)) == list(one)[1:]


def test_a_writer_with_a_finish_of_its_own_gets_all_rows(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(PlacementFileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            seen.extend(result.size_in_bytes for rank in results for result in rank)
            super().finish(metadata, results)

    world = World(2)
    world.save(
        tmp_path,
        lambda rank: {"w": torch.ones(3), f"own.{rank}": torch.zeros(2)},
        lambda rank: PlacementSavePlanner(),
        lambda rank: Counting(tmp_path),
    )
    assert len(seen) == 3
    assert all(seen)


def test_a_writer_that_planned_can_be_pickled() -> None:
    writer = PlacementFileSystemWriter("/nowhere")
    writer._plans = [lambda: 0]
    assert pickle.loads(pickle.dumps(writer))._plans == ()
