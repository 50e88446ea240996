"""Copies beside the canonical tensors: who writes them, who reads them, and who sees nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    PlacementError,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
    offline,
)
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.shadow_records import PREFIX
from dcp_placements.testing import FakeDTensor, FakeMesh, World
from tests.storage_scenes import data_file
from tests.strategies import arange, examples

WORLD = World(4)
OBJECTS = {"lr": 0.5, "betas": (0.9, 0.95), "name": "adamw"}


def wholes(names: int = 6) -> dict[str, torch.Tensor]:
    """Sharded weights, replicated norms of two shapes, scalars."""
    made = {f"layers.{i}.weight": arange((16, 8)) + i for i in range(names)}
    made |= {f"layers.{i}.norm": arange((40,)) - i for i in range(names)}
    made |= {f"layers.{i}.q_norm": arange((5, 3)) * i for i in range(names)}
    return made | {f"layers.{i}.step": torch.tensor(float(i)) for i in range(names)}


def placements(fqn: str, mesh: FakeMesh) -> list[Any]:
    if fqn.endswith("weight"):
        return [Replicate(), Shard(0)] if mesh.ndim == 2 else [Shard(0)]
    return [Replicate()] * mesh.ndim


def state_of(world: World, rank: int, axes: dict[str, int], *, fill: bool = True) -> dict[str, Any]:
    mesh = world.mesh(rank, **axes)
    made: dict[str, Any] = {}
    for fqn, whole in wholes().items():
        expected = whole if fill else torch.full_like(whole, -1)
        if fqn.endswith("step"):
            made[fqn] = expected.clone()
        else:
            made[fqn] = FakeDTensor.distribute(expected.clone(), mesh, placements(fqn, mesh))
    return made | (dict(OBJECTS) if fill else dict.fromkeys(OBJECTS))


def save(
    path: Path, axes: dict[str, int], *, writer: Any = PlacementFileSystemWriter, **options: Any
) -> list[Any]:
    world = World(torch.Size(axes.values()).numel())
    return world.save(
        path,
        lambda rank: state_of(world, rank, axes),
        lambda rank: PlacementSavePlanner(**options),
        lambda rank: writer(path),
    )


def load_and_check(
    path: Path, axes: dict[str, int], reader: Any = PlacementFileSystemReader, **options: Any
) -> list[Any]:
    """Load on all ranks, against plain slicing; return the readers."""
    world = World(torch.Size(axes.values()).numel())
    readers = [reader(path) for _ in range(world.size)]
    planners = [PlacementLoadPlanner(**options) for _ in range(world.size)]
    loaded = world.load(
        path,
        lambda rank: state_of(world, rank, axes, fill=False),
        planners.__getitem__,
        readers.__getitem__,
    )
    for rank, state in enumerate(loaded):
        for fqn, wanted in state_of(world, rank, axes).items():
            found = state[fqn]
            if isinstance(wanted, FakeDTensor):
                found, wanted = found.to_local(), wanted.to_local()
            assert (
                torch.equal(found, wanted)
                if isinstance(wanted, torch.Tensor)
                else (found == wanted)
            ), (rank, fqn)
    return [planners, readers]


TOPOLOGIES: list[dict[str, int]] = [
    {"fsdp": 4},
    {"fsdp": 3},
    {"replicate": 2, "fsdp": 2},
    {"replicate": 3, "fsdp": 1},
    {"fsdp": 1},
]


@pytest.mark.parametrize("axes", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("digests", ["sampled", "full"])
@pytest.mark.parametrize("stock_writer", [False, True])
@pytest.mark.filterwarnings("ignore:look at this load")
def test_with_shadows_a_rank_opens_its_own_file_alone(
    axes: dict[str, int], digests: str, stock_writer: bool, tmp_path: Path
) -> None:
    writer = dcp.FileSystemWriter if stock_writer else PlacementFileSystemWriter
    save(tmp_path, axes, shadows=1 << 20, digests=digests, writer=writer)
    verify = "digests" if digests == "full" else "off"
    _, readers = load_and_check(tmp_path, axes, verify=verify)
    assert [reader.opens for reader in readers] == [1] * len(readers)
    # Readers that know nothing of it, and another topology, find the tensors as ever.
    load_and_check(tmp_path, axes, FileSystemReader, verify=verify)
    other = TOPOLOGIES[TOPOLOGIES.index(axes) - 1]
    load_and_check(tmp_path, other, verify=verify)
    found = {fqn: torch.zeros_like(whole) for fqn, whole in wholes().items()}
    dcp.load(found, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    assert all(torch.equal(found[fqn], whole) for fqn, whole in wholes().items())
    result = offline.verify(tmp_path, contents=True, digests=digests == "full")
    assert result.sound, result.faults


def test_without_shadows_two_files_are_opened(tmp_path: Path) -> None:
    save(tmp_path, {"fsdp": 4})
    _, readers = load_and_check(tmp_path, {"fsdp": 4})
    assert [reader.opens for reader in readers] == [1, 2, 2, 2]


def test_what_loads_everything_finds_the_canonical_tensors_alone(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", {"fsdp": 4}, shadows=1 << 20)
    dcp_to_torch_save(tmp_path / "ckpt", tmp_path / "all.pt")
    everything = torch.load(tmp_path / "all.pt", weights_only=False)
    assert everything.keys() == {*wholes(), *OBJECTS}
    assert all(torch.equal(everything[fqn], whole) for fqn, whole in wholes().items())


def test_patterns_say_which_keys_have_shadows(tmp_path: Path) -> None:
    save(tmp_path, {"fsdp": 4}, shadows=["*.norm", "lr"])
    expected = PlacementFileSystemReader(tmp_path).read_metadata().planner_data["dcp_placements"]
    names = {fqn for fqns in expected["shadows"].values() for fqn in fqns}
    assert names == {f"layers.{i}.norm" for i in range(6)} | {"lr"}
    load_and_check(tmp_path, {"fsdp": 4})


@pytest.mark.parametrize("budget", [1, 24, 384, 385, 1344, 5000])
def test_a_budget_takes_the_smallest_first(budget: int, tmp_path: Path) -> None:
    save(tmp_path, {"fsdp": 4}, shadows=budget, digests="off")
    expected = PlacementFileSystemReader(tmp_path).read_metadata().planner_data["dcp_placements"]
    names = [fqn for fqns in expected["shadows"].values() for fqn in fqns]
    sizes = sorted(whole.nbytes for fqn, whole in wholes().items() if not fqn.endswith("weight"))
    used = sorted(wholes()[fqn].nbytes for fqn in names)
    assert used == sizes[: len(used)]
    assert sum(used) <= budget
    assert len(used) == len(sizes) or sum(used) + sizes[len(used)] > budget
    load_and_check(tmp_path, {"fsdp": 4})


def test_metadata_grow_by_ranks_and_not_by_ranks_times_tensors(tmp_path: Path) -> None:
    sizes = {}
    for shadows in ("off", 1 << 20):
        path = tmp_path / str(shadows)
        world = World(16)
        world.save(
            path,
            lambda rank: {f"layers.{i}.norm": torch.ones(4) for i in range(500)},
            lambda rank: PlacementSavePlanner(shadows=shadows),  # noqa: B023
            lambda rank: PlacementFileSystemWriter(path),  # noqa: B023
        )
        sizes[shadows] = (path / ".metadata").stat().st_size
        metadata = PlacementFileSystemReader(path).read_metadata()
        copies = [index for index in metadata.storage_data if index.fqn.startswith(PREFIX)]
        assert len(copies) == (0 if shadows == "off" else 15)
        assert not any(fqn.startswith(PREFIX) for fqn in metadata.state_dict_metadata)
    # A row of stock metadata has 50 bytes and more, and there are 500 * 15 copies.
    assert sizes[1 << 20] - sizes["off"] < 3 * 500 * 15


def test_objects_that_differ_by_rank_have_no_shadow(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"rng": rank, "lr": 0.1, "w": torch.ones(3)}

    with pytest.warns(UserWarning, match="rng"):
        WORLD.save(
            tmp_path,
            state,
            lambda rank: PlacementSavePlanner(shadows=1000),
            lambda rank: PlacementFileSystemWriter(tmp_path),
        )
    message = PlacementFileSystemReader(tmp_path).read_metadata().planner_data["dcp_placements"]
    assert {fqn for fqns in message["shadows"].values() for fqn in fqns} == {"lr", "w"}
    loaded = WORLD.load(
        tmp_path,
        lambda rank: {"rng": None, "lr": None, "w": torch.zeros(3)},
        lambda rank: PlacementLoadPlanner(),
        lambda rank: PlacementFileSystemReader(tmp_path),
    )
    assert [state["rng"] for state in loaded] == [0] * 4
    assert [state["lr"] for state in loaded] == [0.1] * 4


def test_large_objects_stay_where_they_are(tmp_path: Path) -> None:
    blob = bytes(range(256)) * 8192
    WORLD.save(
        tmp_path,
        lambda rank: {"blob": blob, "w": torch.ones(3)},
        lambda rank: PlacementSavePlanner(shadows=1000),
        lambda rank: PlacementFileSystemWriter(tmp_path),
    )
    readers = [PlacementFileSystemReader(tmp_path) for _ in range(4)]
    loaded = WORLD.load(
        tmp_path,
        lambda rank: {"blob": None, "w": torch.zeros(3)},
        lambda rank: PlacementLoadPlanner(),
        readers.__getitem__,
    )
    assert all(state["blob"] == blob for state in loaded)
    assert data_file(tmp_path, 1).stat().st_size < 1 << 16
    assert offline.verify(tmp_path, contents=True).sound


def test_ranks_that_were_not_there_take_copies_each_of_another_rank(tmp_path: Path) -> None:
    save(tmp_path, {"fsdp": 4}, shadows=1 << 20)
    world = World(8)
    readers = [PlacementFileSystemReader(tmp_path) for _ in range(8)]
    paths: list[set[str]] = []

    def watched(rank: int) -> PlacementFileSystemReader:
        reader = readers[rank]
        made = reader.fs.create_stream

        def create_stream(path: Any, mode: str) -> Any:
            paths[rank].add(Path(path).name)
            return made(path, mode)

        paths.append(set())
        reader.fs.create_stream = create_stream  # type: ignore[method-assign, assignment]
        return reader

    names = [fqn for fqn in wholes() if fqn.endswith("norm")]
    loaded = world.load(
        tmp_path,
        lambda rank: {fqn: torch.zeros_like(wholes()[fqn]) for fqn in names},
        lambda rank: PlacementLoadPlanner(),
        watched,
    )
    for state in loaded:
        assert all(torch.equal(state[fqn], wholes()[fqn]) for fqn in names)
    assert [p - {".metadata"} for p in paths] == [
        {data_file(tmp_path, r % 4).name} for r in range(8)
    ]


def drifted(path: Path, kind: str) -> str:
    """Change one shadow of rank 2, of a norm or of an object; return its key."""
    metadata = PlacementFileSystemReader(path).read_metadata()
    packs = metadata.planner_data["dcp_placements"]["shadows"]
    fqn = "layers.3.norm" if kind == "tensor" else "name"
    key = next(key for key, fqns in packs.items() if fqn in fqns)
    index = next(i for i in metadata.storage_data if i.fqn == key and i.offset[0] == 2)
    info = metadata.storage_data[index]
    file = path / info.relative_path
    record = file.read_bytes()[info.offset : info.offset + info.length]
    wanted = wholes()[fqn].numpy().tobytes() if kind == "tensor" else b"adamw"
    data = bytearray(file.read_bytes())
    data[info.offset + record.index(wanted) + 2] ^= 1
    file.write_bytes(data)
    return fqn


@pytest.mark.parametrize("kind", ["tensor", "object"])
def test_a_shadow_that_is_not_what_was_saved_is_an_error(kind: str, tmp_path: Path) -> None:
    save(tmp_path, {"fsdp": 4}, shadows=1 << 20, digests="full")
    fqn = drifted(tmp_path, kind)
    with pytest.raises(CheckpointException) as refused:
        load_and_check(tmp_path, {"fsdp": 4}, verify="digests")
    assert list(refused.value.failures) == [2]
    assert fqn in str(refused.value.failures[2][0])
    result = offline.verify(tmp_path, digests=True)
    assert not result.sound
    assert all(data_file(tmp_path, 2).name in fault.files for fault in result.faults)
    # Who does not read it does not mind.
    load_and_check(tmp_path, {"fsdp": 4}, FileSystemReader, verify="digests")


def test_a_file_that_ends_in_a_shadow_is_told_of(tmp_path: Path) -> None:
    save(tmp_path, {"fsdp": 4}, shadows=1 << 20)
    file = data_file(tmp_path, 3)
    file.write_bytes(file.read_bytes()[:-100])
    assert {fault.kind for fault in offline.verify(tmp_path).faults} >= {"truncated_file"}
    with pytest.raises(CheckpointException, match="ends before it"):
        load_and_check(tmp_path, {"fsdp": 4})


def test_inspect_tells_of_shadows_apart_and_diff_does_not_see_them(tmp_path: Path) -> None:
    save(tmp_path / "with", {"fsdp": 4}, shadows=1 << 20)
    save(tmp_path / "without", {"fsdp": 4})
    result = offline.inspect(tmp_path / "with")
    assert set(result.tensors) == set(wholes())
    assert set(result.objects) == set(OBJECTS)
    assert result.shadows is not None
    assert result.shadows.keys == 6 * 3 + 3
    assert result.shadows.copies == 3 * 4
    assert offline.to_json(result)["shadows"] == {
        "keys": result.shadows.keys,
        "copies": result.shadows.copies,
        "bytes": result.shadows.nbytes,
    }
    assert offline.inspect(tmp_path / "without").shadows is None
    assert offline.diff(tmp_path / "with", tmp_path / "without").same


def test_a_plan_that_is_reused_keeps_its_shadows(tmp_path: Path) -> None:
    made = [PlacementSavePlanner(shadows=1 << 20, enable_plan_caching=True) for _ in range(4)]
    for step in range(3):
        path = tmp_path / str(step)
        WORLD.save(
            path,
            lambda rank: state_of(WORLD, rank, {"fsdp": 4}) | {"seed": 1},
            made.__getitem__,
            lambda rank: PlacementFileSystemWriter(path),  # noqa: B023
        )
        _, readers = load_and_check(path, {"fsdp": 4})
        assert [reader.opens for reader in readers] == [1] * 4
    assert pickle.loads(pickle.dumps(made[0])).shadows == 1 << 20


def test_objects_that_came_to_differ_lose_their_shadow_under_a_reused_plan(tmp_path: Path) -> None:
    made = [PlacementSavePlanner(shadows=1 << 20, enable_plan_caching=True) for _ in range(4)]
    for step in range(2):
        path = tmp_path / str(step)

        def state(rank: int) -> dict[str, Any]:
            return {"w": torch.ones(3), "rng": rank * step}  # noqa: B023

        with pytest.warns(UserWarning, match="rng") if step else nothing():
            WORLD.save(
                path,
                state,
                made.__getitem__,
                lambda rank: PlacementFileSystemWriter(path),  # noqa: B023
            )
        message = PlacementFileSystemReader(path).read_metadata().planner_data["dcp_placements"]
        names = {fqn for fqns in message["shadows"].values() for fqn in fqns}
        assert names == ({"w"} if step else {"w", "rng"})


class nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...


@pytest.mark.parametrize("wrong", [-1, "", [], [1], 1.5, True])
def test_other_options_are_refused(wrong: Any) -> None:
    with pytest.raises(PlacementError):
        PlacementSavePlanner(shadows=wrong)


def test_copies_of_replicas_that_differ_are_not_asked_for() -> None:
    with pytest.raises(PlacementError, match="on_conflict"):
        PlacementSavePlanner(shadows=5, on_conflict="warn")


def test_files_by_name_cannot_hold_shadows(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    with pytest.raises(CheckpointException, match="shadows="):
        World(2).save(
            tmp_path,
            lambda rank: {"w": torch.ones(3)},
            lambda rank: PlacementSavePlanner(shadows=5),
            lambda rank: writer,
        )


dims = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@settings(examples(12), suppress_health_check=list(HealthCheck))
@given(
    shapes=st.lists(dims, min_size=1, max_size=6),
    grid=st.sampled_from([(2, 2), (1, 4), (4, 1), (2, 3)]),
    kinds=st.lists(st.sampled_from(["whole", "rows", "columns"]), min_size=6, max_size=6),
    budget=st.sampled_from([0, 40, 200, 1 << 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_any_tensors_come_back_by_whichever_copy(
    shapes: list[list[int]],
    grid: tuple[int, int],
    kinds: list[str],
    budget: int,
    dtype: torch.dtype,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("any")
    world = World(grid[0] * grid[1])
    expected = {f"t{i}": arange(tuple(shape)).to(dtype) + i for i, shape in enumerate(shapes)}

    def state(rank: int, fill: bool = True) -> dict[str, Any]:
        mesh = world.mesh(rank, replicate=grid[0], fsdp=grid[1])
        made = {}
        for (fqn, whole), kind in zip(expected.items(), kinds, strict=False):
            cuts = {"whole": Replicate(), "rows": Shard(0), "columns": Shard(whole.dim() - 1)}
            tensor = whole.clone() if fill else torch.zeros_like(whole)
            made[fqn] = FakeDTensor.distribute(tensor, mesh, [Replicate(), cuts[kind]])
        return made

    world.save(
        path,
        state,
        lambda rank: PlacementSavePlanner(shadows=budget, digests="full"),
        lambda rank: PlacementFileSystemWriter(path),
    )
    readers = [PlacementFileSystemReader(path) for _ in range(world.size)]
    make: Callable[[int], PlacementLoadPlanner] = lambda rank: PlacementLoadPlanner(  # noqa: E731
        verify="digests"
    )
    loaded = world.load(path, lambda rank: state(rank, False), make, readers.__getitem__)
    for rank in range(world.size):
        for fqn, wanted in state(rank).items():
            assert torch.equal(loaded[rank][fqn].to_local(), wanted.to_local())
    if budget == 1 << 20:
        assert max(reader.opens for reader in readers) <= 1
    found = {fqn: torch.zeros_like(whole) for fqn, whole in expected.items()}
    dcp.load(found, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    assert all(torch.equal(found[fqn], whole) for fqn, whole in expected.items())
    assert offline.verify(path, digests=True).sound


def test_packs_are_known_though_other_ranks_hold_the_same_keys_at_one_place(
    tmp_path: Path,
) -> None:
    """Keys cut along different axes are one pack where their boxes are the same, elsewhere two."""
    world = World(8)
    whole = arange((8, 4))

    def state(rank: int, fill: bool = True) -> dict[str, Any]:
        mesh = world.mesh(rank, a=2, b=2, c=2)
        expected = whole if fill else torch.zeros_like(whole)
        made = {}
        for axis, name in enumerate("abc"):
            cuts: list[Any] = [Replicate()] * 3
            cuts[axis] = Shard(0)
            made[f"m.{name}"] = FakeDTensor.distribute(expected.clone(), mesh, cuts)
        return made

    world.save(
        tmp_path,
        state,
        lambda rank: PlacementSavePlanner(shadows=1 << 20),
        lambda rank: PlacementFileSystemWriter(tmp_path),
    )
    readers = [PlacementFileSystemReader(tmp_path) for _ in range(world.size)]
    loaded = world.load(
        tmp_path,
        lambda rank: state(rank, False),
        lambda rank: PlacementLoadPlanner(),
        readers.__getitem__,
    )
    for rank in range(world.size):
        for fqn, wanted in state(rank).items():
            assert torch.equal(loaded[rank][fqn].to_local(), wanted.to_local())
    metadata = FileSystemReader(tmp_path).read_metadata()
    written = {index.fqn for index in metadata.storage_data if index.fqn.startswith(PREFIX)}
    assert written
    assert written == set(stored(metadata)["shadows"])
    assert max(reader.opens for reader in readers) == 1
