"""Planning copies no tensor data: of a save and of a load, for each kind of shard and of rename.

A mode of torch sees what operators allocate, and ``tracemalloc`` what Python and NumPy do.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_holds, without_warning
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcp_placements import (
    FlatShard,
    FusedShard,
    IndexShard,
    PlacementLoadPlanner,
    PlacementSavePlanner,
    RaggedShard,
    Renames,
    Renumber,
    Replace,
    Stack,
    Transpose,
)
from dcp_placements.testing import FakeMesh
from tests.load.sides import Side, at, dtensor

ROWS, COLUMNS, RANKS = 4096, 1024, 4
WHOLE = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
SIZES = (1500, 0, 2000, 596)
RANGES = (1_400_001, 0, 1_800_000, ROWS * COLUMNS - 3_200_001)
PARTS = (2048, 1024, 1024)
SHAPE = {"global_shape": (ROWS, COLUMNS)}
DP = {"dp": RANKS}
FEW = 1 << 20
"""Bytes: each shard with elements has more."""


class Allocations(TorchDispatchMode):
    """Counts the bytes of new memory that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if tensor.device.type == "cpu" and memory_of(tensor) not in given:
                self.nbytes += tensor.untyped_storage().nbytes()
        return result


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def copying_nothing() -> Iterator[None]:
    """Assert that what runs inside makes no memory of the size of a tensor."""
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with Allocations() as allocated:
            yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if started:
            tracemalloc.stop()
    assert allocated.nbytes < FEW, f"operators have made {allocated.nbytes:,} bytes"
    assert peak - before < FEW, f"Python has made {peak - before:,} bytes"


class Saving(PlacementSavePlanner):
    """A planner that may copy nothing until data are written."""

    memories: set[int]

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        self.memories = memories_in(state_dict)
        with copying_nothing():
            super().set_up_planner(state_dict, *args, **kwargs)

    def create_local_plan(self) -> Any:
        with copying_nothing():
            return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        with copying_nothing():
            return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        with copying_nothing():
            plan = super().finish_plan(new_plan)
            items = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
            written = [self.resolve_data(item) for item in items]
        assert {memory_of(t) for t in written if isinstance(t, torch.Tensor)} <= self.memories
        return plan


class Loading(PlacementLoadPlanner):
    """A planner that may copy nothing until data are read."""

    memories: set[int]

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        self.memories = memories_in(state_dict)
        with copying_nothing():
            super().set_up_planner(state_dict, *args, **kwargs)

    def create_local_plan(self) -> Any:
        with copying_nothing():
            return super().create_local_plan()

    def create_global_plan(self, global_plan: Any) -> Any:
        with copying_nothing():
            return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: Any) -> Any:
        with copying_nothing():
            plan = super().finish_plan(new_plan)
            items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
            filled = [self.resolve_tensor(item) for item in items]
        assert {memory_of(tensor) for tensor in filled} <= self.memories
        return plan


def locals_in(state_dict: Any) -> list[torch.Tensor]:
    values = tree_leaves(state_dict)
    return tensors_in([v.to_local() if hasattr(v, "to_local") else v for v in values])


def memories_in(state_dict: Any) -> set[int]:
    return {memory_of(tensor) for tensor in locals_in(state_dict)}


def listed(mesh: FakeMesh) -> tuple[int, ...]:
    """Return whole rows that a rank has, in an order of its own."""
    return tuple(range(at(mesh, "dp"), 64, RANKS))[::-1]


def heads(mesh: FakeMesh) -> torch.Tensor:
    q, *others = WHOLE.split(PARTS)
    held = [part.chunk(2)[at(mesh, "dp") // 2] for part in others]
    return torch.cat([q.chunk(RANKS)[at(mesh, "dp")], *held])


def of(held: Any) -> Any:
    return lambda mesh: {"w": held(mesh).clone()}


def pieces(mesh: FakeMesh) -> dict[str, Any]:
    return {"w": WHOLE.split(SIZES)[at(mesh, "dp")].clone()}


def experts(mesh: FakeMesh) -> dict[str, Any]:
    return {f"w.{n}": part.clone() for n, part in enumerate(quarter(mesh).chunk(2))}


def quarter(mesh: FakeMesh) -> torch.Tensor:
    return WHOLE.chunk(RANKS)[at(mesh, "dp")]


def moments(mesh: FakeMesh) -> dict[str, Any]:
    held = WHOLE.reshape(-1).split(RANGES)[at(mesh, "dp")]
    group = [{"params": ["w"], "lr": 0.1}]
    return {"optim": {"state": {"w": {"exp_avg": held.clone()}}, "param_groups": group}}


WIDE = torch.arange(8 * ROWS * 128, dtype=torch.float32).view(8, ROWS, 128)
FLAT = {"dp": FlatShard(RANGES)}
SIDES: dict[str, tuple[Side, dict[str, torch.Tensor]]] = {
    "RaggedShard": (
        Side(DP, pieces, {"dp": RaggedShard(0, SIZES)}),
        {"w": WHOLE},
    ),
    "RaggedShard of a DTensor": (
        Side(DP, dtensor(pieces, WHOLE, Shard(0)), {"dp": RaggedShard(0, SIZES)}),
        {"w": WHOLE},
    ),
    "FlatShard": (
        Side(DP, of(lambda m: WHOLE.reshape(-1).split(RANGES)[at(m, "dp")]), FLAT, shapes=SHAPE),
        {"w": WHOLE},
    ),
    "FlatShard of state": (
        Side(DP, moments, FLAT, shapes=SHAPE),
        {"optim.state.w.exp_avg": WHOLE},
    ),
    "FusedShard with copies": (
        Side(DP, of(heads), {"dp": FusedShard(0, PARTS, copies=(1, 2, 2))}),
        {"w": WHOLE},
    ),
    "IndexShard": (
        Side(
            DP,
            of(lambda m: WHOLE.view(64, -1)[list(listed(m))]),
            lambda m: {"dp": IndexShard(0, listed(m))},
            shapes={"global_shape": (64, ROWS * COLUMNS // 64)},
        ),
        {"w": WHOLE.view(64, -1)},
    ),
    "Transpose": (
        Side(
            DP,
            of(lambda m: WIDE.chunk(RANKS)[at(m, "dp")].mT.contiguous()),
            {"dp": Shard(0)},
            rename=Transpose("w"),
        ),
        {"w": WIDE},
    ),
    "Stack": (
        Side(
            DP,
            experts,
            rename=lambda m: Renames(
                Renumber("w.{}", [2 * at(m, "dp"), 2 * at(m, "dp") + 1], total=8),
                Stack("w.{}", total=8),
            ),
        ),
        {"w": torch.stack(WHOLE.chunk(8))},
    ),
}


@pytest.mark.parametrize("name", SIDES)
def test_no_data_are_copied_while_a_save_and_a_load_are_planned(tmp_path: Path, name: str) -> None:
    side, wholes = SIDES[name]
    with without_warning():
        with Allocations():  # modules are imported by the first run
            side.saves(tmp_path)
            side.loads(tmp_path)
        side.world.save(tmp_path, side.state, lambda rank: side.planner(Saving, rank))
        states = [side.state(rank) for rank in range(RANKS)]
        for tensor in locals_in(states):
            tensor.fill_(-1)
        side.world.load(tmp_path, states.__getitem__, lambda rank: side.planner(Loading, rank))
    expected = [side.state(rank) for rank in range(RANKS)]
    for found, wanted in zip(locals_in(states), locals_in(expected), strict=True):
        assert torch.equal(found, wanted)
    read = {key: torch.zeros_like(whole) for key, whole in wholes.items()}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(read[key], whole) for key, whole in wholes.items())


def test_several_names_of_one_tensor_are_planned_without_a_copy(tmp_path: Path) -> None:
    dcp.save({"mlp.w": WHOLE}, checkpoint_id=tmp_path, no_dist=True)
    assert_holds(tmp_path, {"mlp.w": WHOLE})
    state = {f"experts.{n}.w": torch.zeros_like(WHOLE) for n in range(3)}
    planner = Loading(rename=Replace("experts.*", "mlp"))
    dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert all(torch.equal(value, WHOLE) for value in state.values())


@pytest.mark.parametrize(
    "copy", [torch.Tensor.clone, lambda whole: whole.t().contiguous(), lambda w: w.numpy().copy()]
)
def test_a_copy_would_be_seen(copy: Any) -> None:
    with pytest.raises(AssertionError, match=r"ha(s|ve) made"), copying_nothing():
        copy(WHOLE)
