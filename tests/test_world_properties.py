"""Laws of whole saves and loads, for random worlds of ranks in one process.

Every save is read back by torch's default planner in one process, and compared with the whole
tensor; every load with plain slicing. Save-then-load with our own planners alone would let two
errors cancel.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from strategies import NAMES, arange, examples, mesh_sizes, placements_over
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut, real_dtensor

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float16)


@dataclass(frozen=True)
class Held:
    """How the ranks of one world hold one tensor.

    Attributes:
        kind: ``"plain"``, ``"fake"`` or ``"real"``: the class that holds the local tensor.
        own_names: Axes of the tensor's own mesh; none for a plain tensor.
        own: One placement per axis of those.
        rule: One placement per other axis.
        twice: Own axes that the rule names, too.
        given_shape: Whether the rule says the global shape; else it is worked out.
        memory: How the local tensor lies: ``"own"`` memory, a ``"view"`` into a larger buffer as
            FSDP makes, or ``"transposed"``.
    """

    kind: str
    own_names: tuple[str, ...]
    own: tuple[Any, ...]
    rule: dict[str, Any]
    twice: dict[str, Any]
    given_shape: bool
    memory: str = "own"


@dataclass(frozen=True)
class Topology:
    """A mesh of all ranks of a world, and how they hold each tensor."""

    sizes: tuple[int, ...]
    held: dict[str, Held]
    names: tuple[str, ...]

    @property
    def world(self) -> World:
        return World(self.mesh(0).size())

    def mesh(self, rank: int) -> FakeMesh:
        return FakeMesh(self.sizes, self.names, rank=rank)

    def rules(self, rank: int, shapes: dict[str, tuple[int, ...]]) -> PlacementRules:
        return PlacementRules(
            {
                key: CheckpointPlacement(
                    self.mesh(rank),
                    {**held.rule, **held.twice},
                    global_shape=shapes[key] if held.given_shape else None,
                )
                for key, held in self.held.items()
            }
        )

    def part_and_local(
        self, whole: torch.Tensor, key: str, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank's model-parallel part of ``whole``, and its local tensor."""
        held = self.held[key]
        sizes = dict(zip(self.names, self.sizes, strict=True))
        at = dict(zip(self.names, self.mesh(rank).get_coordinate() or (), strict=True))
        part = cut(whole, [*held.rule.values()], *_on(held.rule, sizes, at))
        return part, _in_memory(cut(part, held.own, *_on(held.own_names, sizes, at)), held.memory)

    def template(self, whole: torch.Tensor, key: str, rank: int) -> torch.Tensor:
        """Return a local tensor of the rank that has nothing of ``whole`` yet."""
        return self.part_and_local(torch.full_like(whole, 77), key, rank)[1]

    def value(self, whole: torch.Tensor, key: str, rank: int, local: torch.Tensor) -> Any:
        """Return what the rank's state dict holds: ``local``, wrapped as the tensor is."""
        held = self.held[key]
        if held.kind == "plain":
            return local
        mesh = self.mesh(rank)[held.own_names]
        part, _ = self.part_and_local(whole, key, rank)
        wrap = FakeDTensor if held.kind == "fake" else real_dtensor
        return wrap(local, mesh, held.own, part.shape)


def _in_memory(local: torch.Tensor, memory: str) -> torch.Tensor:
    if memory == "view":
        buffer = local.new_zeros(local.numel() + 5)
        return buffer[3 : 3 + local.numel()].view(local.shape).copy_(local)
    if memory == "transposed":
        return local.transpose(0, -1).contiguous().transpose(0, -1)
    return local


def _on(names: Any, sizes: dict[str, int], at: dict[str, int]) -> tuple[list[int], list[int]]:
    return [sizes[name] for name in names], [at[name] for name in names]


@st.composite
def topologies(
    draw: st.DrawFn, shapes: dict[str, tuple[int, ...]], *, max_ranks: int = 8
) -> Topology:
    """Draw a world, and for each tensor which axes the rule and which the tensor speak for."""
    sizes = draw(mesh_sizes(max_axes=3, max_ranks=max_ranks))
    names = NAMES[: len(sizes)]
    size_of = dict(zip(names, sizes, strict=True))
    held = {}
    for key, shape in shapes.items():
        own_names = tuple(name for name in names if draw(st.booleans()))
        rule_names = tuple(name for name in names if name not in own_names)
        even = draw(st.booleans())
        own = draw(
            placements_over(
                (0,) * len(shape), tuple(size_of[name] for name in own_names), fused=False
            )
        )
        rule = tuple(
            _from_the_end(placement, len(shape)) if draw(st.booleans()) else placement
            for placement in draw(
                placements_over(shape, tuple(size_of[name] for name in rule_names), even=even)
            )
        )
        twice = {
            name: placement
            for name, placement in zip(own_names, own, strict=True)
            if isinstance(placement, Shard) and draw(st.booleans())
        }
        held[key] = Held(
            kind=draw(st.sampled_from(("fake", "real"))) if own_names else "plain",
            own_names=own_names,
            own=own,
            rule=dict(zip(rule_names, rule, strict=True)),
            twice=twice,
            given_shape=not even or draw(st.booleans()),
            memory=draw(st.sampled_from(("own", "view", "transposed"))),
        )
    return Topology(sizes, held, names)


def _from_the_end(placement: Any, ndim: int) -> Any:
    """Return the same placement with its dim counted from the end."""
    if isinstance(placement, Shard):
        return Shard(placement.dim - ndim)
    if isinstance(placement, FusedShard):
        return replace(placement, dim=placement.dim - ndim)
    return placement


@st.composite
def wholes(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Draw a few whole tensors with one key each; uneven, empty and size-1 dims among them."""
    found = {}
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
        # Every tensor has contents of its own, so that one in another's place is seen.
        contents = arange(shape, torch.int64) + 100 * index
        found[f"layers.{index}.w"] = contents.to(draw(st.sampled_from(DTYPES)))
    return found


def shapes_of(whole: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in whole.items()}


@contextmanager
def checkpoint_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def save(
    path: Path,
    whole: dict[str, torch.Tensor],
    topology: Topology,
    locals_of: dict[int, dict[str, torch.Tensor]] | None = None,
) -> list[PlacementSavePlanner]:
    """Save ``whole`` from the ranks of ``topology``; note their local tensors in ``locals_of``."""

    def state_dict(rank: int) -> dict[str, Any]:
        held = {key: topology.part_and_local(whole[key], key, rank)[1] for key in whole}
        if locals_of is not None:
            locals_of[rank] = held
        return {key: topology.value(whole[key], key, rank, held[key]) for key in whole}

    planners = topology.world.save(
        path,
        state_dict,
        lambda rank: PlacementSavePlanner(topology.rules(rank, shapes_of(whole))),
        lambda rank: FileSystemWriter(path, sync_files=False),
    )
    return [planner for planner in planners if isinstance(planner, PlacementSavePlanner)]


def read_by_torch(path: Path, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    read = {key: torch.full_like(tensor, 77) for key, tensor in whole.items()}
    dcp.load(read, checkpoint_id=path, no_dist=True)
    return read


def assert_written_once(
    path: Path, whole: dict[str, torch.Tensor], planners: Sequence[PlacementSavePlanner]
) -> None:
    """Count every element in the metadata, and every chunk in the files and in the plans."""
    metadata = FileSystemReader(path).read_metadata()
    stored = metadata.state_dict_metadata
    assert set(stored) == set(whole)
    for key, tensor in whole.items():
        entry = stored[key]
        assert isinstance(entry, TensorStorageMetadata)
        assert tuple(entry.size) == tuple(tensor.shape)
        assert entry.properties.dtype == tensor.dtype
        count = torch.zeros(tensor.shape, dtype=torch.long)
        for chunk in entry.chunks:
            count[slices(chunk.offsets, chunk.sizes)] += 1
        assert bool((count == 1).all())
    chunks = Counter((key, chunk.offsets) for key in whole for chunk in stored[key].chunks)
    places = Counter(
        (index.fqn, index.offset) for index in metadata.storage_data if index.fqn in stored
    )
    written = Counter(
        (item.index.fqn, item.index.offset)
        for planner in planners
        for item in planner.plan.items
        if item.index.fqn in stored
    )
    assert chunks == places == written
    files = Counter((info.relative_path, info.offset) for info in metadata.storage_data.values())
    assert all(count == 1 for count in files.values())


def slices(offsets: Any, sizes: Any) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


@given(st.data())
@examples(25)
def test_what_any_world_saves_torch_reads_back_whole(data: st.DataObject) -> None:
    whole = data.draw(wholes())
    topology = data.draw(topologies(shapes_of(whole)))
    with checkpoint_directory() as path:
        save(path, whole, topology)
        read = read_by_torch(path, whole)
    for key, tensor in whole.items():
        assert torch.equal(read[key], tensor), key


@given(st.data())
@examples(15)
def test_every_element_is_written_exactly_once(data: st.DataObject) -> None:
    whole = data.draw(wholes())
    topology = data.draw(topologies(shapes_of(whole)))
    with checkpoint_directory() as path:
        planners = save(path, whole, topology)
        assert_written_once(path, whole, planners)
    report = planners[0].report
    assert report.unique_nbytes == report.whole_nbytes == sum(t.nbytes for t in whole.values())


@given(st.data())
@examples(25)
def test_any_world_loads_what_any_other_saved(data: st.DataObject) -> None:
    whole = data.draw(wholes())
    saved = data.draw(topologies(shapes_of(whole)))
    loading = data.draw(topologies(shapes_of(whole)))
    locals_of: dict[int, dict[str, torch.Tensor]] = {}

    def template(rank: int) -> dict[str, Any]:
        held = {key: loading.template(tensor, key, rank) for key, tensor in whole.items()}
        locals_of[rank] = held
        return {key: loading.value(tensor, key, rank, held[key]) for key, tensor in whole.items()}

    with checkpoint_directory() as path:
        save(path, whole, saved)
        loading.world.load(
            path,
            template,
            # One axis name may stand for two ways of cutting here.
            lambda rank: PlacementLoadPlanner(
                loading.rules(rank, shapes_of(whole)), waive=dict.fromkeys(whole, "other axes")
            ),
        )
    assert len(locals_of) == loading.world.size
    for rank, held in locals_of.items():
        for key, tensor in whole.items():
            expected = loading.part_and_local(tensor, key, rank)[1]
            assert torch.equal(held[key], expected), (key, rank)


@given(st.data())
@examples(15)
def test_any_world_loads_what_one_process_saved_with_torch(data: st.DataObject) -> None:
    whole = data.draw(wholes())
    loading = data.draw(topologies(shapes_of(whole)))
    locals_of = {
        rank: {key: loading.template(tensor, key, rank) for key, tensor in whole.items()}
        for rank in range(loading.world.size)
    }

    with checkpoint_directory() as path:
        dcp.save(dict(whole), checkpoint_id=path, no_dist=True)
        loading.world.load(
            path,
            lambda rank: {
                key: loading.value(tensor, key, rank, locals_of[rank][key])
                for key, tensor in whole.items()
            },
            lambda rank: PlacementLoadPlanner(loading.rules(rank, shapes_of(whole))),
        )
    for rank, held in locals_of.items():
        for key, tensor in whole.items():
            assert torch.equal(held[key], loading.part_and_local(tensor, key, rank)[1])


@given(st.data())
@examples(15)
def test_write_items_are_views_of_the_local_tensors(data: st.DataObject) -> None:
    whole = data.draw(wholes())
    topology = data.draw(topologies(shapes_of(whole)))
    locals_of: dict[int, dict[str, torch.Tensor]] = {}
    with checkpoint_directory() as path:
        planners = save(path, whole, topology, locals_of)
    seen = 0
    for rank, planner in enumerate(planners):
        for item in planner.plan.items:
            if item.index.fqn not in whole:
                continue  # the record of the save's id
            written = planner.resolve_data(item)
            assert isinstance(written, torch.Tensor)
            assert item.tensor_data is not None
            assert written.shape == item.tensor_data.chunk.sizes
            expected = whole[item.index.fqn][
                slices(item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)
            ]
            assert torch.equal(written, expected)
            if written.numel():
                local = locals_of[rank][item.index.fqn]
                assert written.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            seen += 1
    assert seen >= len(whole)


@given(st.data())
@examples(15)
def test_loads_land_in_the_storage_that_the_tensors_had(data: st.DataObject) -> None:
    whole = data.draw(wholes())
    loading = data.draw(topologies(shapes_of(whole)))
    before: dict[int, dict[str, Any]] = {}

    def template(rank: int) -> dict[str, Any]:
        before[rank] = {
            key: loading.value(tensor, key, rank, loading.template(tensor, key, rank))
            for key, tensor in whole.items()
        }
        pointers[rank] = {key: _local(value).data_ptr() for key, value in before[rank].items()}
        return dict(before[rank])

    pointers: dict[int, dict[str, int]] = {}
    with checkpoint_directory() as path:
        dcp.save(dict(whole), checkpoint_id=path, no_dist=True)
        after = loading.world.load(
            path,
            template,
            lambda rank: PlacementLoadPlanner(loading.rules(rank, shapes_of(whole))),
        )
    for rank, loaded in enumerate(after):
        for key, tensor in whole.items():
            assert loaded[key] is before[rank][key]
            assert _local(loaded[key]).data_ptr() == pointers[rank][key]
            assert torch.equal(_local(loaded[key]), loading.part_and_local(tensor, key, rank)[1])


def _local(value: Any) -> torch.Tensor:
    return value if type(value) is torch.Tensor else value.to_local()


@given(st.data())
@examples(15)
def test_padding_is_not_stored_and_keeps_what_it_has(data: st.DataObject) -> None:
    """A padded vocabulary over tp, and FSDP inside."""
    tp, fsdp = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    padded_rows = rows + data.draw(st.integers(0, 5))
    whole = arange((rows, columns))
    padded = torch.cat([whole, torch.full((padded_rows - rows, columns), -1.0)])
    world = World(tp * fsdp)

    def held(rank: int, source: torch.Tensor) -> FakeDTensor:
        mesh = world.mesh(rank, tp=tp, fsdp=fsdp)
        part = cut(source, [Shard(0)], [tp], (mesh.get_coordinate() or ())[:1])
        return FakeDTensor.distribute(part, mesh["fsdp"], [Shard(0)])

    def rules(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, tp=tp, fsdp=fsdp)
        return PlacementRules(
            {
                "embedding": CheckpointPlacement(
                    mesh,
                    {"tp": Shard(0)},
                    global_shape=whole.shape,
                    padded_shape=padded.shape,
                )
            }
        )

    empty = torch.full_like(padded, -2)
    with checkpoint_directory() as path:
        world.save(
            path,
            lambda rank: {"embedding": held(rank, padded)},
            lambda rank: PlacementSavePlanner(rules(rank)),
        )
        assert torch.equal(read_by_torch(path, {"embedding": whole})["embedding"], whole)
        loaded = world.load(
            path,
            lambda rank: {"embedding": held(rank, empty)},
            lambda rank: PlacementLoadPlanner(rules(rank)),
        )
    expected = torch.cat([whole, empty[rows:]])
    for rank in range(world.size):
        found = loaded[rank]["embedding"].to_local()
        assert torch.equal(found, held(rank, expected).to_local())


@given(st.data())
@examples(15)
def test_rows_of_an_expert_map_are_saved_once_and_found_again(data: st.DataObject) -> None:
    """Any rows on any rank, in any order, some of them more than once: together they hold all."""
    experts, ranks = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    whole = arange((experts, 3, 2))
    world = World(ranks)

    def maps() -> list[list[int]]:
        rows = st.lists(st.integers(0, experts - 1), max_size=experts)
        drawn = [data.draw(rows) for _ in range(ranks)]
        missing = set(range(experts)) - {row for each in drawn for row in each}
        drawn[data.draw(st.integers(0, ranks - 1))] += data.draw(st.permutations(sorted(missing)))
        return drawn

    def rules(rank: int, rows: list[list[int]]) -> PlacementRules:
        placement = CheckpointPlacement(
            world.mesh(rank, ep=ranks),
            {"ep": IndexShard(0, tuple(rows[rank]))},
            global_shape=whole.shape,
        )
        return PlacementRules({"experts": placement})

    saved, wanted = maps(), maps()
    with checkpoint_directory() as path:
        planners = [PlacementSavePlanner(rules(rank, saved)) for rank in range(ranks)]
        world.save(path, lambda rank: {"experts": whole[saved[rank]]}, planners.__getitem__)
        assert_written_once(path, {"experts": whole}, planners)
        assert torch.equal(read_by_torch(path, {"experts": whole})["experts"], whole)
        loaded = world.load(
            path,
            lambda rank: {"experts": torch.full((len(wanted[rank]), 3, 2), 77.0)},
            lambda rank: PlacementLoadPlanner(rules(rank, wanted)),
        )
    for rank in range(ranks):
        assert torch.equal(loaded[rank]["experts"], whole[wanted[rank]])


def test_a_chain_of_worlds_ends_with_the_bits_it_began_with(tmp_path: Path) -> None:
    """ep2 x fsdp2 -> ep4 -> fsdp4 -> fsdp2 x ep2, moments along."""
    keys = ("model.experts.w1", "optim.state.experts.w1.exp_avg")
    whole = {key: arange((8, 5, 3)) + 1000 * index for index, key in enumerate(keys)}
    own = Held("real", ("fsdp",), (Shard(1),), {"ep": Shard(0)}, {}, given_shape=False)
    plain = replace(own, kind="plain", own_names=(), own=())
    current = whole
    for step, (axes, held) in enumerate(
        [
            ({"ep": 2, "fsdp": 2}, own),
            ({"ep": 4}, plain),
            ({"fsdp": 4, "ep": 1}, own),
            ({"fsdp": 2, "ep": 2}, own),
        ]
    ):
        topology = Topology(tuple(axes.values()), dict.fromkeys(keys, held), names=tuple(axes))
        save(tmp_path / str(step), current, topology)
        current = read_by_torch(tmp_path / str(step), whole)
        for key, tensor in whole.items():
            assert torch.equal(current[key], tensor), (step, key)


def test_an_axis_without_a_name_is_known_by_its_ranks(tmp_path: Path) -> None:
    """FSDP over a mesh without names; the rule names the same ranks, and the axis counts once."""
    whole = arange((7, 3))
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        return {"w": FakeDTensor.distribute(whole, FakeMesh((4,), rank=rank), [Shard(0)])}

    def rules(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, fsdp=4)
        return PlacementRules({"w": CheckpointPlacement(mesh, {"fsdp": Shard(0)})})

    world.save(tmp_path, state_dict, lambda rank: PlacementSavePlanner(rules(rank)))
    assert torch.equal(read_by_torch(tmp_path, {"w": whole})["w"], whole)


def test_axes_of_two_meshes_without_names_are_known_by_their_ranks(tmp_path: Path) -> None:
    whole = arange((8, 5))
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
    assert torch.equal(read_by_torch(tmp_path, {"w": whole})["w"], whole)


@pytest.mark.parametrize("ruled", [False, True])
def test_ranks_outside_a_tensor_s_mesh_hold_nothing_of_it(ruled: bool, tmp_path: Path) -> None:
    """A DTensor over ranks 1 and 2 of four, and the key on all of them."""
    whole = arange((5, 3))
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
    assert torch.equal(read_by_torch(tmp_path, {"w": whole})["w"], whole)
    loaded = world.load(
        tmp_path,
        lambda rank: state_dict(rank, torch.zeros(5, 3)),
        lambda rank: PlacementLoadPlanner(rules(rank)),
    )
    assert [loaded[rank]["w"].to_local().numel() for rank in range(4)] == [0, 9, 6, 0]
    for rank in range(4):
        assert torch.equal(loaded[rank]["w"].to_local(), state_dict(rank, whole)["w"].to_local())


def test_parameters_with_gradients_and_scalar_dtensors_take_part(tmp_path: Path) -> None:
    whole = arange((4, 3))
    world = World(2)

    def state_dict(rank: int, source: torch.Tensor) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2)
        step = real_dtensor(source.sum(), mesh, [Replicate()], ())
        return {"w": torch.nn.Parameter(source.chunk(2)[rank].clone()), "step": step}

    def rules(rank: int) -> PlacementRules:
        placement = CheckpointPlacement(world.mesh(rank, ep=2), {"ep": Shard(0)})
        return PlacementRules({"**": placement})

    world.save(
        tmp_path,
        lambda rank: state_dict(rank, whole),
        lambda rank: PlacementSavePlanner(rules(rank)),
    )
    read = read_by_torch(tmp_path, {"w": whole, "step": whole.sum()})
    assert torch.equal(read["w"], whole)
    assert float(read["step"]) == 66
    loaded = world.load(
        tmp_path,
        lambda rank: state_dict(rank, torch.zeros(4, 3)),
        lambda rank: PlacementLoadPlanner(rules(rank)),
    )
    for rank in range(2):
        assert torch.equal(loaded[rank]["w"], whole.chunk(2)[rank])
        assert loaded[rank]["w"].requires_grad
        assert float(loaded[rank]["step"].to_local()) == 66
