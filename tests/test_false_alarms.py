"""What looks suspicious and is right: it must save, load and say nothing.

People switch off validators that cry wolf. Every scene below is saved and loaded by simulated
ranks with every warning turned into an error, with the rules that a user would write and, where
the ranks hold replicas by chance, without any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import (
    arange,
    assert_holds,
    assert_same,
    blank,
    load,
    refused_save,
    save,
    without_warning,
)
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementRules,
    Placements,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World

WORLD = World(4)

Build = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Scene:
    """A state dict that must pass.

    Attributes:
        name: What it is.
        state: What each rank holds.
        ep: Patterns of what is sharded on dim 0 over ``ep`` of the mesh (ep=2, fsdp=2).
        whole: The whole tensors of the checkpoint, with the rules.
        bare: The whole tensors without rules; None where the ranks then contradict each other.
        stateless: Parameters that the save reports to have no optimizer state.
    """

    name: str
    state: Build
    ep: tuple[str, ...] = ()
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    bare: dict[str, torch.Tensor] | None = None
    stateless: tuple[str, ...] = ()

    def rules(self, rank: int) -> PlacementRules:
        placement = CheckpointPlacement(WORLD.mesh(rank, ep=2, fsdp=2), {"ep": Shard(0)})
        return PlacementRules(dict.fromkeys(self.ep, placement) or {"**": None})

    def __str__(self) -> str:
        return self.name


def mesh(rank: int) -> FakeMesh:
    return WORLD.mesh(rank, ep=2, fsdp=2)


def expert_part(whole: torch.Tensor) -> Callable[[int], FakeDTensor]:
    """What an ep group holds of stacked experts, as FSDP2 has it: a DTensor over fsdp alone."""

    def on(rank: int) -> FakeDTensor:
        part = whole.chunk(2)[mesh(rank).get_coordinate()[0]]
        return FakeDTensor.distribute(part, mesh(rank)["fsdp"], [Shard(0)])

    return on


def stacked(part: torch.Tensor) -> torch.Tensor:
    """Return a whole of which both ep groups hold ``part``."""
    return torch.cat([part, part])


def adam(**states: Any) -> dict[str, Any]:
    return {"state": {name: dict(state) for name, state in states.items()}}


def ones(rank: int) -> dict[str, Any]:
    return {
        "norm": torch.ones(6),
        "experts": {"w1": expert_part(torch.ones(8, 3))(rank)},
        "big": torch.ones(300, 40),
    }


def zero_moments(rank: int) -> dict[str, Any]:
    weight = {"experts.w1": expert_part(arange(8, 3))(rank)}
    zeros = {
        "step": torch.tensor(0.0),
        "exp_avg": expert_part(torch.zeros(8, 3))(rank),
        "exp_avg_sq": expert_part(torch.zeros(8, 3))(rank),
    }
    return {"model": weight, "optim": adam(**{"experts.w1": zeros})}


def identical_experts(rank: int) -> dict[str, Any]:
    part = arange(4, 3)
    return {"experts": {"w1": FakeDTensor.distribute(part, mesh(rank)["fsdp"], [Shard(0)])}}


def replicated_buffers(rank: int) -> dict[str, Any]:
    return {
        "inv_freq": arange(6),
        "bias": FakeDTensor.distribute(arange(4), mesh(rank), [Replicate(), Replicate()]),
        "mask": torch.eye(3, dtype=torch.bool),
        "tokens_per_expert": torch.zeros(8, dtype=torch.int64),
        "count": torch.tensor(12),
        "scale": arange(3, dtype=torch.bfloat16),
        "half": arange(3, dtype=torch.float16),
        "fp8": arange(4).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j, 3j]),
        "transposed": arange(3, 4).t(),
        "every_other": arange(8)[::2],
        "expanded": arange(1, 3).expand(4, 3),
    }


def tied_weights(rank: int) -> dict[str, Any]:
    part = expert_part(arange(8, 3))(rank)
    norm = arange(5)
    return {
        "embed.weight": part,
        "head.weight": part,
        "norm_a": norm,
        "norm_b": norm,
    }


def zero_elements(rank: int) -> dict[str, Any]:
    return {
        "nothing": torch.zeros(0),
        "no_rows": torch.zeros(0, 3),
        "no_columns": FakeDTensor.distribute(torch.zeros(4, 0), mesh(rank), [Shard(0)] * 2),
        "experts": {"w1": expert_part(torch.zeros(8, 0))(rank)},
        "empty_here_and_there": FakeDTensor.distribute(arange(1, 3), mesh(rank), [Shard(0)] * 2),
        "norm": arange(2),
    }


def frozen_lora(rank: int) -> dict[str, Any]:
    base = torch.nn.Parameter(arange(8, 4), requires_grad=False)
    a, b = torch.nn.Parameter(arange(2, 4)), torch.nn.Parameter(torch.zeros(8, 2))
    states = {
        name: {"step": torch.tensor(3.0), "exp_avg": arange(*p.shape, start=5)}
        for name, p in (("q.lora_A", a), ("q.lora_B", b))
    }
    return {
        "model": {"q.base": base, "q.lora_A": a, "q.lora_B": b},
        "optim": {
            **adam(**states),
            "param_groups": [{"lr": 0.1, "params": ["q.lora_A", "q.lora_B"]}],
        },
    }


def before_any_step(rank: int) -> dict[str, Any]:
    return {
        "model": {"experts.w1": expert_part(arange(8, 3))(rank), "norm": arange(3)},
        "optim": {
            "state": {},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["experts.w1", "norm"]}],
        },
        "train": {"step": 0, "best_loss": None},
    }


BUFFERS = {
    key: value.to_local() if isinstance(value, FakeDTensor) else value
    for key, value in replicated_buffers(0).items()
}

SCENES = [
    Scene(
        "all ones",
        ones,
        ("experts.w1",),
        {"norm": torch.ones(6), "experts.w1": torch.ones(8, 3), "big": torch.ones(300, 40)},
        {"norm": torch.ones(6), "experts.w1": torch.ones(4, 3), "big": torch.ones(300, 40)},
    ),
    Scene(
        "zero-initialised moments",
        zero_moments,
        ("experts.w1",),
        {
            "model.experts.w1": arange(8, 3),
            "optim.state.experts.w1.step": torch.tensor(0.0),
            "optim.state.experts.w1.exp_avg": torch.zeros(8, 3),
            "optim.state.experts.w1.exp_avg_sq": torch.zeros(8, 3),
        },
    ),
    Scene(
        "identical experts at initialisation",
        identical_experts,
        ("experts.w1",),
        {"experts.w1": stacked(arange(4, 3))},
        {"experts.w1": arange(4, 3)},
    ),
    Scene("replicated buffers", replicated_buffers, (), BUFFERS, BUFFERS),
    Scene(
        "tied weights under one rule",
        tied_weights,
        ("*.weight",),
        {
            "embed.weight": arange(8, 3),
            "head.weight": arange(8, 3),
            "norm_a": arange(5),
            "norm_b": arange(5),
        },
    ),
    Scene(
        "parameters without elements",
        zero_elements,
        ("experts.w1",),
        {
            "nothing": torch.zeros(0),
            "no_rows": torch.zeros(0, 3),
            "no_columns": torch.zeros(4, 0),
            "experts.w1": torch.zeros(8, 0),
            "empty_here_and_there": arange(1, 3),
            "norm": arange(2),
        },
        {
            "nothing": torch.zeros(0),
            "no_rows": torch.zeros(0, 3),
            "no_columns": torch.zeros(4, 0),
            "experts.w1": torch.zeros(4, 0),
            "empty_here_and_there": arange(1, 3),
            "norm": arange(2),
        },
    ),
    Scene(
        "frozen LoRA bases without state",
        frozen_lora,
        (),
        (
            LORA := {
                "model.q.base": arange(8, 4),
                "model.q.lora_A": arange(2, 4),
                "model.q.lora_B": torch.zeros(8, 2),
                "optim.state.q.lora_A.step": torch.tensor(3.0),
                "optim.state.q.lora_A.exp_avg": arange(2, 4, start=5),
                "optim.state.q.lora_B.step": torch.tensor(3.0),
                "optim.state.q.lora_B.exp_avg": arange(8, 2, start=5),
            }
        ),
        LORA,
    ),
    Scene(
        "a first save before any step",
        before_any_step,
        ("experts.w1",),
        {"model.experts.w1": arange(8, 3), "model.norm": arange(3)},
    ),
]


def assert_passes(
    path: Path, scene: Scene, rules: Any, whole: dict[str, torch.Tensor], digests: str
) -> None:
    """Assert that a scene saves, reads back whole and loads, all without a word."""
    with without_warning():
        saved = save(WORLD, path, scene.state, rules, digests=digests)
        assert_holds(path, whole)
        loaded, reports = load(WORLD, path, lambda rank: blank(scene.state(rank)), rules)
    assert saved.warnings == ()
    assert saved.unique_nbytes == saved.whole_nbytes
    assert saved.stateless == scene.stateless
    for rank in range(4):
        assert_same(loaded[rank], scene.state(rank))
        assert reports[rank].warnings == ()
        assert reports[rank].missing == reports[rank].stateless == ()


@pytest.mark.parametrize("digests", ["sampled", "full"])
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_passes_with_the_rules_of_its_user(tmp_path: Path, scene: Scene, digests: str) -> None:
    assert_passes(tmp_path, scene, scene.rules, scene.whole, digests)


@pytest.mark.parametrize("digests", ["sampled", "full"])
@pytest.mark.parametrize("scene", [s for s in SCENES if s.bare is not None], ids=str)
def test_passes_without_rules(tmp_path: Path, scene: Scene, digests: str) -> None:
    assert scene.bare is not None
    assert_passes(tmp_path, scene, None, scene.bare, digests)


def test_no_scene_without_rules_is_left_out_unseen(tmp_path: Path) -> None:
    """A scene has no ``bare`` only because its ranks differ: then a save is refused."""
    for number, scene in enumerate(scene for scene in SCENES if scene.bare is None):
        with refused_save(tmp_path / str(number)) as refusal:
            save(WORLD, tmp_path / str(number), scene.state)
        refusal.says("different contents")


# Objects that are equal on all ranks, however they came about.


@dataclass
class Progress:
    """A trainer's own object."""

    step: int
    losses: list[float]
    note: str


def built_one_way() -> dict[str, Any]:
    shared = [1.5, 2.5]
    name = "adamw"
    return {
        "tuple_of_dict": ({"lr": 0.3, "eps": 1e-8},),
        "progress": Progress(3, shared, name),
        "same_list_twice": (shared, shared),
        "same_text_twice": (name, name, {name: name}),
        "float": 0.1 + 0.2,
        "nan": float("nan"),
        "none": None,
        "bytes": b"\x00\x01" * 40,
        "list": [1, "a", None, 2.5],
        "big": 10**30,
        "dtype": torch.bfloat16,
        "rng": torch.arange(5056, dtype=torch.int64).to(torch.uint8),
    }


def built_another_way() -> dict[str, Any]:
    """Equal to the above, with no object shared and no text interned."""

    def text() -> str:
        return "".join(["ada", "mw"])

    losses = [3 / 2, 5 / 2]
    return {
        "tuple_of_dict": (dict([("lr", 0.3), ("eps", 1 / 10**8)]),),
        "progress": Progress(1 + 2, list(losses), text()),
        "same_list_twice": (list(losses), [*losses]),
        "same_text_twice": (text(), text(), {text(): text()}),
        "float": 0.30000000000000004,
        "nan": float("nan"),
        "none": None,
        "bytes": bytes([0, 1] * 40),
        "list": [1, "".join(["a"]), None, 5 / 2],
        "big": 10**15 * 10**15,
        "dtype": torch.zeros(1, dtype=torch.bfloat16).dtype,
        "rng": torch.cat([torch.arange(2000), torch.arange(2000, 5056)]).to(torch.uint8),
    }


@pytest.mark.parametrize("key", sorted(built_one_way()))
@pytest.mark.parametrize("ruled", [False, True], ids=["no-rules", "rules"])
def test_equal_objects_built_in_different_ways_pass(tmp_path: Path, key: str, ruled: bool) -> None:
    def state(rank: int) -> dict[str, Any]:
        built = built_another_way() if rank % 2 else built_one_way()
        return {"train": {key: built[key]}, "norm": arange(3)}

    rules = (lambda rank: PlacementRules({"**": None})) if ruled else None
    with without_warning():
        report = save(WORLD, tmp_path, state, rules)
        loaded, _ = load(WORLD, tmp_path, lambda rank: blank(state(rank)), rules)
    assert report.warnings == ()
    for rank in range(4):
        found, wanted = loaded[rank]["train"][key], built_one_way()[key]
        if isinstance(wanted, torch.Tensor):
            assert torch.equal(found, wanted)
        else:
            assert found == wanted or (found != found and wanted != wanted)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (({"lr": 0.1, "eps": 1e-8},), ({"eps": 1e-8, "lr": 0.1},)),
        (({"nested": {"a": 1, "b": 2}},), ({"nested": {"b": 2, "a": 1}},)),
        ((set(range(0, 64, 8)),), (set(reversed(range(0, 64, 8))),)),
        (frozenset([8, 0, 16]), frozenset([16, 0, 8])),
    ],
    ids=["dict", "nested-dict", "set", "frozenset"],
)
def test_equal_objects_in_another_order_pass(tmp_path: Path, one: Any, other: Any) -> None:
    assert one == other
    with without_warning():
        report = save(WORLD, tmp_path, lambda rank: {"seen": other if rank % 2 else one})
    assert report.warnings == ()


@pytest.mark.parametrize("shape", [(7, 9), (60, 50)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("digests", ["sampled", "full"])
def test_replicas_in_another_memory_layout_pass(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype, digests: str
) -> None:
    whole = (arange(*shape) % 7).to(dtype)

    def state(rank: int) -> dict[str, Any]:
        padded = torch.cat([whole, whole], 1)[:, : shape[1]]
        return {"w": [whole, whole.t().contiguous().t(), padded, whole.clone()][rank]}

    with without_warning():
        save(WORLD, tmp_path, state, digests=digests)
    assert_holds(tmp_path, {"w": whole})


@pytest.mark.parametrize("plain_rank", [0, 3])
def test_a_plain_tensor_here_and_a_replicated_dtensor_there_pass(
    tmp_path: Path, plain_rank: int
) -> None:
    def state(rank: int) -> dict[str, Any]:
        if rank == plain_rank:
            return {"w": arange(4, 2)}
        others = torch.tensor([other for other in range(4) if other != plain_rank])
        mesh = FakeMesh((3,), ("dp",), rank=rank, ranks=others)
        return {"w": FakeDTensor.distribute(arange(4, 2), mesh, [Replicate()])}

    with without_warning():
        save(WORLD, tmp_path, state)
    assert_holds(tmp_path, {"w": arange(4, 2)})


def test_keys_in_another_order_on_another_rank_pass(tmp_path: Path) -> None:
    whole = {"a": arange(3), "b": arange(4, start=9), "c.d": arange(2)}

    def state(rank: int) -> dict[str, Any]:
        names = list(whole)[rank % 3 :] + list(whole)[: rank % 3]
        return {"model": {name: whole[name] for name in names}, "lr": 0.5}

    with without_warning():
        report = save(WORLD, tmp_path, state)
        loaded, _ = load(WORLD, tmp_path, lambda rank: blank(state(rank)))
    assert report.warnings == ()
    assert_holds(tmp_path, {f"model.{name}": tensor for name, tensor in whole.items()})
    for rank in range(4):
        assert_same(loaded[rank], state(rank))


def test_a_rank_without_experts_whose_fsdp_leaves_no_columns_either(tmp_path: Path) -> None:
    """FSDP2 with ``Shard(1)`` makes ``(0, 0, 6)`` of a parameter of shape ``(0, 8, 6)``."""
    whole = arange(5, 8, 6)

    def state(rank: int, content: torch.Tensor) -> dict[str, Any]:
        local = content[2 * rank : 2 * rank + 2]
        mesh = WORLD.mesh(rank, fsdp=1, ep=4)["fsdp"]
        if len(local):
            return {"experts.w": FakeDTensor.distribute(local, mesh, [Shard(1)])}
        return {"experts.w": FakeDTensor(torch.zeros(0, 0, 6), mesh, [Shard(1)], (0, 8, 6))}

    def placements(rank: int) -> Placements:
        mesh = WORLD.mesh(rank, fsdp=1, ep=4)
        rule = CheckpointPlacement(mesh, {"ep": Shard(0)}, global_shape=(5, 8, 6))
        return Placements({"experts": rule})

    loaded = [state(rank, torch.zeros_like(whole)) for rank in range(4)]
    with without_warning():
        WORLD.save(
            tmp_path, lambda rank: state(rank, whole), lambda rank: placements(rank).save_planner()
        )
        WORLD.load(tmp_path, loaded.__getitem__, lambda rank: placements(rank).load_planner())
    for rank in range(3):
        assert torch.equal(loaded[rank]["experts.w"].to_local(), whole[2 * rank : 2 * rank + 2])
    read = {"experts.w": torch.zeros_like(whole)}
    dcp.load(read, checkpoint_id=tmp_path)
    assert torch.equal(read["experts.w"], whole)
