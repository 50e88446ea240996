"""``copies=``: replicated tensors in the file of every rank that holds them."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.offline import verify
from dcp_placements.testing import World
from tests.differential import wholes
from tests.drawn_worlds import draw_pair
from tests.storage_scenes import assert_index_agrees
from tests.test_differential import assert_torch_reads, load, save, save_planners

WHOLE = {
    "experts": torch.arange(12.0).reshape(4, 3),
    "norm": torch.arange(3.0) + 100,
    "embed": torch.arange(600.0).reshape(200, 3) + 1000,
}
SIZE = 2


def held(rank: int) -> dict[str, Any]:
    return {**WHOLE, "experts": WHOLE["experts"].chunk(SIZE)[rank].clone(), "step": 3}


def blank() -> dict[str, Any]:
    return {key: torch.full_like(whole, -1) for key, whole in WHOLE.items()} | {"step": 0}


def rules(world: World, rank: int) -> Any:
    mesh = world.mesh(rank, ep=SIZE)
    return PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})


def save_copies(path: Path, copies: Any, make: Any = PlacementFileSystemWriter) -> None:
    world = World(SIZE)
    world.save(
        path,
        held,
        lambda rank: PlacementSavePlanner(rules(world, rank), copies=copies),
        lambda rank: make(path),
    )


def written_by(path: Path, fqn: str) -> list[int]:
    """Return the ranks that wrote a key, by the names of the files in the index."""
    index = PlacementFileSystemReader(path).read_metadata().storage_data
    return [int(row.path.split("_")[2]) for row in index.rows_of(fqn, copies=True)]


def the_file(path: Path, rank: int) -> Path:
    (file,) = path.glob(f"__{rank}_*.distcp")
    return file


def load_on(path: Path, rank: int, keys: Any = (*WHOLE, "step")) -> dict[str, Any]:
    """Return what one of the ranks of a world loads, in which all load the same."""
    return World(SIZE).load(
        path,
        lambda rank: {key: blank()[key] for key in keys},
        lambda rank: PlacementLoadPlanner(),
        lambda rank: PlacementFileSystemReader(path),
    )[rank]


def assert_whole(state: dict[str, Any]) -> None:
    for key, whole in WHOLE.items():
        assert torch.equal(state[key], whole), key
    assert state["step"] == 3


@pytest.mark.parametrize(
    ("copies", "copied"),
    [
        ("off", []),
        (0, []),
        (11, []),
        (12, ["norm"]),
        (2411, ["norm"]),
        (2412, ["norm", "embed"]),
        (["embed"], ["embed"]),
        (["norm"], ["norm"]),
    ],
)
def test_each_holder_writes_what_is_to_be_copied(
    copies: Any, copied: list[str], tmp_path: Path
) -> None:
    save_copies(tmp_path, copies)
    for fqn in ("norm", "embed"):
        assert (written_by(tmp_path, fqn) == [0, 1]) == (fqn in copied)
    assert written_by(tmp_path, "experts") == [0, 1]
    state = blank()
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert_whole(state)
    assert_index_agrees(tmp_path)
    for rank in range(SIZE):
        assert_whole(load_on(tmp_path, rank))
    assert verify(tmp_path, contents=True).faults == ()


def test_each_rank_reads_its_own_file(tmp_path: Path) -> None:
    save_copies(tmp_path, 1 << 20)
    readers = [PlacementFileSystemReader(tmp_path) for _ in range(SIZE)]
    opened: list[set[str]] = [set(), set()]
    for rank, reader in enumerate(readers):
        real = reader.store.open
        reader.store.open = lambda name, *a, real=real, rank=rank, **k: (  # type: ignore[method-assign]
            opened[rank].add(name) or real(name, *a, **k)
        )
    World(SIZE).load(
        tmp_path,
        lambda rank: {key: torch.zeros_like(WHOLE[key]) for key in ("norm", "embed")},
        lambda rank: PlacementLoadPlanner(),
        lambda rank: readers[rank],
    )
    names = [{name for name in opened[rank] if name != ".metadata"} for rank in range(SIZE)]
    assert names == [{the_file(tmp_path, rank).name} for rank in range(SIZE)]


@pytest.mark.parametrize("harm", ["flip", "remove"])
@pytest.mark.parametrize("rank", range(SIZE))
def test_a_damaged_copy_is_found_and_the_other_one_named(
    harm: str, rank: int, tmp_path: Path
) -> None:
    save_copies(tmp_path, 1 << 20)
    file, other = the_file(tmp_path, rank), the_file(tmp_path, 1 - rank)
    if harm == "flip":
        elements = WHOLE["embed"].numpy().tobytes()
        content = file.read_bytes()
        assert content.count(elements) == 1
        file.write_bytes(content.replace(elements, elements[:-1] + b"\xff"))
    else:
        file.unlink()
    with pytest.raises(dcp.CheckpointException) as caught:
        load_on(tmp_path, rank, ("norm", "embed"))
    assert list(caught.value.failures) == [rank]
    message = str(caught.value.failures[rank][0])
    assert re.search(rf"a copy: +byte \d+ of {other.name}", message), message
    faults = verify(tmp_path, contents=True).faults
    assert {name for fault in faults for name in fault.files} == {file.name}


def test_an_overwrite_removes_all_copies(tmp_path: Path) -> None:
    save_copies(tmp_path, 1 << 20)
    before = set(tmp_path.glob("*.distcp"))
    save_copies(tmp_path, "off")
    assert len(before) == SIZE
    assert before.isdisjoint(tmp_path.glob("*.distcp"))


def test_copies_survive_a_rewrite_of_the_metadata(tmp_path: Path, run: Any) -> None:
    save_copies(tmp_path, 1 << 20)
    assert run("stock-metadata", tmp_path).code == 0
    assert written_by(tmp_path, "embed") == [0, 1]
    assert_whole(load_on(tmp_path, 1))


def test_a_pattern_without_a_replicated_tensor_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no replicated tensor matches experts"):
        save_copies(tmp_path, ["norm", "experts"])
    assert written_by(tmp_path, "norm") == [0, 1]


def test_what_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        save_copies(tmp_path, 1, dcp.FileSystemWriter)
    for rank in range(SIZE):
        assert "copies= needs PlacementFileSystemWriter" in str(caught.value.failures[rank][0])
    assert not list(tmp_path.glob("*.distcp"))
    for options in ({"copies": "norm"}, {"copies": True}, {"copies": 1, "on_conflict": "warn"}):
        with pytest.raises(PlacementError, match="copies="):
            PlacementSavePlanner(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_random_worlds_with_copies_are_read_by_all(seed: int, tmp_path: Path) -> None:
    pair = draw_pair(seed)
    pair = replace(
        pair, save=replace(pair.save, options=(*dict(pair.save.options, torch=False).items(),))
    )
    whole, planners = wholes(pair), save_planners(pair)
    copies = random.Random(seed).choice([64, 4096, 1 << 30])
    for planner in planners:
        planner.copies = copies
    save(pair, whole, tmp_path, planners)
    assert_torch_reads(pair, whole, tmp_path)
    load(pair, whole, tmp_path)
    assert verify(tmp_path, contents=True).faults == ()
