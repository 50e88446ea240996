"""A second save takes the places of the first only where nothing that they depend on has changed.

The truth is what a planner says that has seen no save before.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementRules,
    PlacementSavePlanner,
    save_planner,
)
from fakes import FakeDTensor, World

WORLD = World(4)
RANK = 1
MESH = WORLD.mesh(RANK, dp=2, tp=2)
ROWS = (Replicate(), Shard(0))
OTHER_MESH = WORLD.mesh(RANK, dp=4, tp=1)


def sharded(
    *shape: int,
    mesh: Any = MESH,
    placements: Any = ROWS,
    dtype: torch.dtype = torch.float32,
) -> Any:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    return FakeDTensor.distribute(whole, mesh, list(placements))


def model() -> dict[str, Any]:
    return {
        "layers": {"0.w": sharded(8, 3), "1.w": sharded(8, 3), "norm": torch.ones(3)},
        "expert": torch.ones(2, 3),
        "step": 4,
        "flags": [1, torch.zeros(())],
    }


def with_(path: str, value: Any) -> dict[str, Any]:
    made = model()
    part = made["layers"] if path.startswith("layers/") else made
    part[path.removeprefix("layers/")] = value
    return made


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in model().items() if k != key}


def aliased(of: str) -> dict[str, Any]:
    made = model()
    made["expert"] = made["tied"] = torch.ones(2, 3)
    return made if of == "both" else made | {"tied": torch.ones(2, 3)}


class Places:
    """Counts how often places are worked out from the beginning."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        place = save_planner.place

        def counted(*told: Any) -> Any:
            self.count += 1
            return place(*told)

        monkeypatch.setattr(save_planner, "place", counted)


def planned(planner: PlacementSavePlanner, state_dict: dict[str, Any], rank: int = RANK) -> Any:
    """Return all that a rank says, and where the data is that it would write."""
    with WORLD._as(rank):
        planner.set_up_planner(state_dict, is_coordinator=False)
        plan = planner.create_local_plan()
        offer = plan.planner_data
        data = [
            found.data_ptr()
            if isinstance(found, torch.Tensor) and found.layout is torch.strided
            else str(found)
            for found in (planner.lookup_object(item.index) for item in plan.items)
        ]
        told = [(one.table_id, one.coordinates, one.digests, one.packed) for one in offer.tables]
        return told, offer.positions, offer.sizes, offer.loose, list(plan.items), data


def expert_rules(dim: int = 0) -> PlacementRules:
    return PlacementRules({"expert": CheckpointPlacement(MESH, [Replicate(), Shard(dim)])})


RULES = expert_rules()

CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "name": lambda: without("expert") | {"expert2": torch.ones(2, 3)},
    "one more": lambda: model() | {"late": torch.ones(2)},
    "one less": lambda: without("step"),
    "order": lambda: {"step": 4} | without("step"),
    "dtype": lambda: with_("layers/1.w", sharded(8, 3, dtype=torch.bfloat16)),
    "dtype of a plain tensor": lambda: with_("expert", torch.ones(2, 3, dtype=torch.float16)),
    "shape": lambda: with_("layers/1.w", sharded(16, 3)),
    "shape of a plain tensor": lambda: with_("layers/norm", torch.ones(4)),
    "requires_grad": lambda: with_("layers/norm", torch.ones(3).requires_grad_()),
    "placements": lambda: with_(
        "layers/1.w", sharded(8, 3, placements=(Shard(0), Shard(0)), mesh=MESH)
    ),
    "strided": lambda: with_(
        "layers/1.w", sharded(8, 3, placements=(Replicate(), _StridedShard(0, split_factor=2)))
    ),
    "mesh": lambda: with_("layers/1.w", sharded(8, 3, mesh=OTHER_MESH)),
    "a tensor where an object was": lambda: model() | {"step": torch.tensor(4)},
    "an object where a tensor was": lambda: model() | {"expert": 3},
    "a plain tensor where a DTensor was": lambda: with_("layers/1.w", torch.ones(8, 3)),
    "nesting": lambda: (
        {k: v for k, v in model().items() if k != "layers"}
        | {f"layers.{k}": v for k, v in model()["layers"].items()}
    ),
    "layout": lambda: with_("layers/norm", torch.ones(3).to_sparse()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = PlacementSavePlanner(RULES, enable_plan_caching=True)
    changed = CHANGES[change]()
    planned(planner, model())
    places = Places(monkeypatch)
    assert planned(planner, changed) == planned(PlacementSavePlanner(RULES), changed)
    assert places.count == 2


def test_no_change_takes_the_places_and_the_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = PlacementSavePlanner(RULES, enable_plan_caching=True)
    planned(planner, model())
    places = Places(monkeypatch)
    for _ in range(2):
        again = model()
        assert planned(planner, again) == planned(PlacementSavePlanner(RULES), again)
    assert places.count == 2, "those of the planners that have seen nothing"


def test_other_rules_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = PlacementSavePlanner(RULES, enable_plan_caching=True)
    planned(planner, model())
    planner.rules = expert_rules(1)
    assert planned(planner, (again := model())) == planned(
        PlacementSavePlanner(expert_rules(1)), again
    )
    planner.rules = None
    assert planned(planner, again) == planned(PlacementSavePlanner(), again)


def test_a_callable_may_change_its_mind() -> None:
    dims = [0]

    def rules(fqn: str, tensor: Any) -> CheckpointPlacement | None:
        if fqn != "expert":
            return None
        return CheckpointPlacement(MESH, [Replicate(), Shard(dims[0])])

    planner = PlacementSavePlanner(rules, enable_plan_caching=True)
    for dims[0] in (0, 1, 0):
        state_dict = model()
        assert planned(planner, state_dict) == planned(PlacementSavePlanner(rules), state_dict)


def test_a_subclass_of_the_rules_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(PlacementRules):
        pass

    planner = PlacementSavePlanner(Mine({"expert": None}), enable_plan_caching=True)
    places = Places(monkeypatch)
    planned(planner, model())
    planned(planner, model())
    assert places.count == 2


def test_another_rank_is_seen() -> None:
    planner = PlacementSavePlanner(enable_plan_caching=True)
    planned(planner, {"w": torch.ones(3)})
    mesh = WORLD.mesh(2, dp=2, tp=2)
    state_dict = {"w": sharded(8, 3, mesh=mesh)}
    assert planned(planner, state_dict, 2) == planned(PlacementSavePlanner(), state_dict, 2)


def test_tensors_that_share_a_storage_from_now_on_are_seen() -> None:
    planner = PlacementSavePlanner(RULES, enable_plan_caching=True)
    planned(planner, aliased("none"))
    with pytest.raises(PlacementError, match="in one storage with expert"):
        planned(planner, aliased("both"))


def test_a_tensor_that_was_resized_in_place_is_seen() -> None:
    planner = PlacementSavePlanner(enable_plan_caching=True)
    state_dict = {"w": torch.ones(4, 3)}
    planned(planner, state_dict)
    state_dict["w"].data = torch.ones(5, 3)
    assert planned(planner, state_dict) == planned(PlacementSavePlanner(), state_dict)


def test_the_tensors_of_the_last_save_are_not_held() -> None:
    planner = PlacementSavePlanner(enable_plan_caching=True)
    tensor = torch.ones(3)
    planned(planner, {"w": tensor})
    known = weakref.ref(tensor)
    del tensor
    planner.set_up_planner({"w": torch.ones(3)}, is_coordinator=False)
    gc.collect()
    assert known() is None


def test_a_refused_save_leaves_nothing_behind() -> None:
    def rules(rank: int) -> PlacementRules:
        return PlacementRules(
            {"w": CheckpointPlacement(WORLD.mesh(rank, tp=4), [Shard(0)], global_shape=(8, 3))}
        )

    planner = PlacementSavePlanner(rules(RANK), enable_plan_caching=True)
    for rows, refused in ((2, False), (3, True), (3, True), (2, False)):
        state_dict = {"w": torch.ones(rows, 3)}
        if refused:
            with pytest.raises((PlacementError, CheckpointException), match="was declared"):
                planned(planner, state_dict)
        else:
            fresh = PlacementSavePlanner(planner.rules)
            assert planned(planner, state_dict) == planned(fresh, state_dict)
