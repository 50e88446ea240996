"""Tensors that are not a plain piece of memory: compared, loaded and refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, refused, save, warned, without_warning
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
    Replace,
    Split,
    Stack,
    Unstack,
)
from dcp_placements.offline import verify
from dcp_placements.testing import FakeDTensor, World, real_dtensor

WORLD = World(2)

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:TypedStorage")


class Scaled(torch.Tensor):
    """As torchao's float8: bytes and a scale, and no memory of its own."""

    data_: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, note: Any = None) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.data_, made.scale, made.note = data, scale, note
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], self.note

    @staticmethod
    def __tensor_unflatten__(inner: Any, note: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["data_"], inner["scale"], note)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            (one,) = args
            return Scaled(func(one.data_), func(one.scale), one.note)
        raise NotImplementedError(f"Scaled has no {func}")


def scaled(scale: float, note: Any = None) -> Scaled:
    return Scaled(arange(4, 3).to(torch.float8_e4m3fn), torch.tensor(scale), note)


def two(first: float, second: float) -> TwoTensor:
    return TwoTensor(torch.full((4, 3), first), torch.full((4, 3), second))


def quantized(scale: float, times: float = 1) -> torch.Tensor:
    return torch.quantize_per_tensor(arange(4, 3) * scale * times, scale, 0, torch.qint8)


def replica(tensor: torch.Tensor, rank: int) -> FakeDTensor:
    return FakeDTensor(tensor, WORLD.mesh(rank, dp=2), (Replicate(),), tuple(tensor.shape))


def sharded(whole: torch.Tensor, rank: int) -> Any:
    mesh = WORLD.mesh(rank, dp=2)
    return real_dtensor(whole.chunk(2)[rank].clone(), mesh, [Shard(0)], whole.shape)


def saved(path: Path, make: Callable[[int], Any], **options: Any) -> None:
    save(WORLD, path, lambda rank: {"b": torch.ones(2), "w": make(rank)}, **options)


UNLIKE: dict[str, Callable[[int], Any]] = {
    "one of two tensors": lambda rank: two(1, 2 + rank),
    "scale": lambda rank: scaled(1.0 + rank),
    "what is beside them": lambda rank: scaled(1.0, ("e4m3", rank)),
    "scale of a quantized tensor": lambda rank: quantized(0.5 + rank),
    "in a DTensor": lambda rank: replica(two(1, 2 + rank), rank),
    "one in another": lambda rank: TwoTensor(two(1, 2), two(1, 2 + rank)),
}


@pytest.mark.parametrize("digests", ["sampled", "full"])
@pytest.mark.parametrize("make", UNLIKE.values(), ids=UNLIKE)
def test_m66_m68_replicas_that_are_made_of_others_are_compared_by_those(
    tmp_path: Path, make: Callable[[int], Any], digests: str
) -> None:
    with refused() as refusal:
        saved(tmp_path, make, digests=digests)
    refusal.says("w: 2 different contents on 2 ranks")
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize("digests", ["sampled", "full"])
@pytest.mark.parametrize("make", UNLIKE.values(), ids=UNLIKE)
def test_m66_m68_equal_replicas_are_no_conflict(
    tmp_path: Path, make: Callable[[int], Any], digests: str
) -> None:
    def state(rank: int) -> dict[str, Any]:
        same = make(0)
        return {"w": replica(same.to_local(), rank) if isinstance(same, FakeDTensor) else same}

    with without_warning():
        save(WORLD, tmp_path, state, digests=digests)


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: arange(4, 3),
        lambda rank: torch.nn.Parameter(arange(4, 3)),
        lambda rank: arange(4, 3).as_subclass(Plain),
        lambda rank: AsyncCollectiveTensor(arange(4, 3)),
        lambda rank: sharded(arange(4, 3), rank),
    ],
    ids=["tensor", "parameter", "subclass with memory", "collective", "dtensor"],
)
def test_m66_usual_tensors_are_quiet(tmp_path: Path, make: Callable[[int], Any]) -> None:
    with without_warning():
        saved(tmp_path, make)


class Plain(torch.Tensor):
    """A subclass with memory of its own."""


def test_m66_a_collective_that_two_ranks_wait_for_is_compared(tmp_path: Path) -> None:
    with refused() as refusal:
        saved(tmp_path, lambda rank: AsyncCollectiveTensor(arange(4, 3) + rank))
    refusal.says("w: 2 different contents on 2 ranks")


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: scaled(1.0, note=lambda: None),
        lambda rank: torch.eye(3).to_sparse(),
    ],
    ids=["it cannot be pickled", "sparse"],
)
def test_m66_what_cannot_be_compared_is_named(tmp_path: Path, make: Callable[[int], Any]) -> None:
    planners = [PlacementSavePlanner() for _ in range(2)]
    with warned() as texts:
        WORLD.check(lambda rank: {"b": torch.ones(2), "w": make(rank)}, lambda rank: planners[rank])
    (text,) = texts
    assert "w: is not compared between ranks 0-1" in text
    assert "b: " not in text


@pytest.mark.parametrize("name", ["Split", "Unstack"])
def test_m66_a_part_of_one_is_right_or_refused_by_name(tmp_path: Path, name: str) -> None:
    rename: Any = Split("w", ["gate", "up"]) if name == "Split" else Unstack("w.{}")
    saved(tmp_path, lambda rank: two(1, 2), rename=rename)
    with refused() as refusal:
        saved(tmp_path / "unlike", lambda rank: two(1, 2 + rank), rename=rename)
    refusal.says("different contents on 2 ranks")


def test_m69_meta_tensors_are_refused_while_planning(tmp_path: Path) -> None:
    with refused() as refusal:
        saved(tmp_path, lambda rank: torch.empty(4, 3, device="meta"))
    refusal.says("w: is a meta tensor", "ranks 0-1")
    assert not list(tmp_path.iterdir())


def test_m69_a_meta_tensor_on_one_rank_is_refused_with_the_rank(tmp_path: Path) -> None:
    def make(rank: int) -> Any:
        local = arange(4, 3) if rank == 0 else torch.empty(4, 3, device="meta")
        return replica(local, rank)

    with refused() as refusal:
        saved(tmp_path, make)
    refusal.says("rank 1 ", "w: is a meta tensor")
    assert not list(tmp_path.iterdir())


# At load.


@pytest.fixture
def allowed() -> Iterator[None]:
    with torch.serialization.safe_globals([TwoTensor, Scaled]):
        yield


READERS: dict[str, Callable[[Path], Any]] = {
    "torch": FileSystemReader,
    "ours": PlacementFileSystemReader,
}


def filled(path: Path, make: Callable[[int], Any], reader: str) -> list[Any]:
    states = [{"w": make(rank)} for rank in range(2)]
    WORLD.load(
        path,
        lambda rank: states[rank],
        lambda rank: PlacementLoadPlanner(allow_partial_load=True),
        lambda rank: READERS[reader](path),
    )
    return [state["w"] for state in states]


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("reader", READERS)
def test_m67_an_allowed_subclass_is_loaded_as_torch_loads_it(tmp_path: Path, reader: str) -> None:
    saved(tmp_path, lambda rank: two(1, 2))
    for read in filled(tmp_path, lambda rank: two(8, 9), reader):
        assert torch.equal(read.a, torch.full((4, 3), 1.0))
        assert torch.equal(read.b, torch.full((4, 3), 2.0))
    found = verify(tmp_path, contents=True)
    assert found.faults == ()


def test_m67_a_type_that_is_not_allowed_is_named(tmp_path: Path) -> None:
    saved(tmp_path, lambda rank: two(1, 2))
    with refused() as refusal:
        filled(tmp_path, lambda rank: two(8, 9), "ours")
    refusal.says("w: is of a type that torch.load does not allow", "TwoTensor", "add_safe_globals")
    assert "damaged" not in str(refusal)
    found = verify(tmp_path, contents=True)
    assert found.faults == ()
    assert "of types that torch.load was not told to allow" in "".join(found.notes)


def test_m67_a_record_that_asks_for_another_function_is_still_refused(tmp_path: Path) -> None:
    saved(tmp_path, lambda rank: two(1, 2))
    with torch.serialization.safe_globals([Plain]), refused() as refusal:
        filled(tmp_path, lambda rank: two(8, 9), "ours")
    refusal.says("TwoTensor")


@pytest.mark.parametrize("reader", READERS)
def test_m68_a_load_into_another_scale_is_refused_by_name(tmp_path: Path, reader: str) -> None:
    saved(tmp_path, lambda rank: quantized(0.5))
    for read in filled(tmp_path, lambda rank: quantized(0.5, 0), reader):
        assert torch.equal(read.dequantize(), quantized(0.5).dequantize())
    with refused() as refusal:
        filled(tmp_path, lambda rank: quantized(0.25), reader)
    refusal.says("w: is quantized otherwise in the checkpoint", "0.5", "0.25")


def test_m68_a_subclass_around_dtensors_is_refused_by_name(tmp_path: Path) -> None:
    def around(rank: int) -> Any:
        return TwoTensor(sharded(arange(4, 3), rank), sharded(arange(4, 3), rank))

    with refused() as refusal:
        saved(tmp_path / "nothing", around)
    refusal.says("w: is a TwoTensor around DTensors")
    saved(tmp_path / "there", lambda rank: arange(4, 3))
    with refused() as refusal:
        filled(tmp_path / "there", around, "torch")
    refusal.says("w: is a TwoTensor around DTensors")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_is_not_left_as_it_was(
    tmp_path: Path, layout: torch.layout, reader: str
) -> None:
    """Torch's reader copies what it read into a view, which has no elements in common with it."""
    one = World(1)

    def fill(path: Path, target: torch.Tensor) -> None:
        one.load(
            path,
            lambda rank: {"a": torch.zeros(3, 3), "w": target},
            lambda rank: PlacementLoadPlanner(),
            lambda rank: READERS[reader](path),
        )

    for name, value in (("dense", torch.eye(3)), ("sparse", torch.eye(3).to_sparse(layout=layout))):
        one.save(
            tmp_path / name,
            lambda rank, value=value: {"a": torch.eye(3), "w": value},
            lambda rank: PlacementSavePlanner(),
            lambda rank, name=name: PlacementFileSystemWriter(tmp_path / name),
        )
        with refused() as refusal:
            fill(tmp_path / name, torch.zeros(3, 3).to_sparse(layout=layout))
        refusal.says(f"w: is a {layout} tensor here", "to_dense()")
    with refused() as refusal:
        fill(tmp_path / "sparse", torch.zeros(3, 3))
    refusal.says(f"w: the checkpoint holds a {layout} tensor")


def test_a_tensor_that_is_sparse_on_one_rank_alone_is_refused(tmp_path: Path) -> None:
    """The rank that writes it decides what the file has, and metadata have one layout for all."""
    with refused() as refusal:
        saved(tmp_path, lambda rank: torch.eye(3).to_sparse() if rank else torch.eye(3))
    refusal.says(
        "w: the ranks do not agree on its layout: torch.strided on rank 0; torch.sparse_coo on "
        "rank 1"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["stack", "several"])
def test_a_tensor_that_is_sparse_beside_its_rows_or_copies_is_refused(
    tmp_path: Path, kind: str
) -> None:
    one, dense = World(1), torch.eye(3)
    rename: Any = Stack("rows.{}", 2) if kind == "stack" else Replace("rows.*", "w")
    state = {"rows.0": dense.clone(), "rows.1": dense.to_sparse()}
    stored = {"rows": torch.stack([dense, dense])} if kind == "stack" else {"w": dense}
    one.save(tmp_path, lambda rank: stored, lambda rank: PlacementSavePlanner())
    with refused() as refusal:
        one.load(tmp_path, lambda rank: state, lambda rank: PlacementLoadPlanner(rename=rename))
    refusal.says("rows.0: torch.float32, torch.strided", "rows.1: torch.float32, torch.sparse_coo")
    with refused() as refusal:
        one.save(
            tmp_path / "new", lambda rank: state, lambda rank: PlacementSavePlanner(rename=rename)
        )
    refusal.says("rows" if kind == "stack" else "w")
