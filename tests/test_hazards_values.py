"""Rows of ``hazards.md`` that ask what a thing is: by its value, never by where it lies in memory.

Rules made anew for every tensor, keys of any text, lazy views, and two views of one storage.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import (
    arange,
    assert_holds,
    assert_same,
    blank,
    load,
    refused_save,
    same_bits,
    save,
    without_warning,
)
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementRules,
)
from dcp_placements.testing import FakeMesh, World

WORLD = World(4)


# M32: rules that make their answers anew.


def made_anew(rank: int) -> Any:
    """Return rules that make a mesh and a placement for every question."""

    def rules(fqn: str, tensor: Any) -> CheckpointPlacement:
        mesh = FakeMesh((2, 2), ("ep", "fsdp"), rank=rank)
        return CheckpointPlacement(mesh, {"ep": Shard(int(fqn.rpartition(".")[2]) % 2)})

    return rules


def test_m32_rules_that_make_a_placement_per_call_place_every_tensor(tmp_path: Path) -> None:
    """All local parts have one shape, and every other one is cut along the other dim."""
    wholes = {f"w.{at}": arange(*((2, 4) if at % 2 else (4, 2)), start=8 * at) for at in range(200)}

    def state(rank: int) -> dict[str, Any]:
        return {
            fqn: whole.chunk(2, dim=at % 2)[rank // 2].clone()
            for at, (fqn, whole) in enumerate(wholes.items())
        }

    save(WORLD, tmp_path, state, made_anew)
    assert_holds(tmp_path, wholes)
    loaded, _ = load(WORLD, tmp_path, lambda rank: blank(state(rank)), made_anew)
    for rank, found in enumerate(loaded):
        assert_same(found, state(rank))


def test_m32_placements_are_equal_by_what_they_say() -> None:
    def made(rank: int = 1, dim: int = 0, shape: tuple[int, ...] | None = (4, 4)) -> Any:
        mesh = FakeMesh((2, 2), ("ep", "fsdp"), rank=rank)
        return CheckpointPlacement(mesh, {"ep": Shard(dim)}, global_shape=shape)

    assert made() == made()
    assert len({made(), made(), pickle.loads(pickle.dumps(made()))}) == 1
    # Other ranks of one mesh hold other parts.
    assert len({made(), made(rank=3), made(dim=1), made(shape=None)}) == 4
    others = torch.tensor([4, 1, 6, 7])
    elsewhere = FakeMesh((2, 2), ("ep", "fsdp"), rank=1, ranks=others)
    assert made() != CheckpointPlacement(elsewhere, {"ep": Shard(0)}, global_shape=(4, 4))


# M37: keys of any text.

UNUSUAL_KEYS = (
    *("a\nb", "c", "a", "b\nc", "\n", "a\n", "", "w.\0", "a\rb", "a\u2028b", "é.ü", "名.重み"),
    *("cut \udc80 off", "w.007", "w.12345678901234567890", "0", ".", "w..x", "x" * 5000),
)


def value_of(key: str) -> torch.Tensor:
    """Return what a key holds in these tests."""
    return arange(2, 3, start=100 * (1 + UNUSUAL_KEYS.index(key)))


@pytest.mark.parametrize(
    "split",
    [
        [("a\nb", "c"), ("a", "b\nc")],
        [("\n", "a"), ("", "a\n")],
        [UNUSUAL_KEYS[:6], UNUSUAL_KEYS[6:]],
        [UNUSUAL_KEYS, UNUSUAL_KEYS],
    ],
    ids=["joined-alike", "empty-parts", "halves", "replicas"],
)
@pytest.mark.filterwarnings("ignore:look at this load")  # replicas that were not compared
@pytest.mark.parametrize("digests", ["sampled", "full", "off"])
def test_m37_ranks_keep_keys_with_line_breaks_apart(
    tmp_path: Path, split: list[tuple[str, ...]], digests: str
) -> None:
    """What joins keys must not make two ranks' keys one list."""
    world = World(2)

    def state(rank: int) -> dict[str, Any]:
        return {key: value_of(key) for key in split[rank]}

    save(world, tmp_path, state, digests=digests)
    assert_holds(tmp_path, {key: value_of(key) for key in {*split[0], *split[1]}})
    loaded, _ = load(world, tmp_path, lambda rank: blank(state(rank)))
    for rank, found in enumerate(loaded):
        assert_same(found, state(rank))


def test_m37_objects_under_odd_keys_are_kept(tmp_path: Path) -> None:
    world = World(2)
    keys = [("a\nb", "c"), ("a", "b\nc")]

    def state(rank: int) -> dict[str, Any]:
        return {key: [key, 1.5] for key in keys[rank]}

    save(world, tmp_path, state)
    loaded, _ = load(world, tmp_path, lambda rank: dict.fromkeys(keys[rank], 0))
    assert loaded == [state(0), state(1)]


# M42: several views of one storage.


def one_rule_each(rank: int) -> PlacementRules:
    """Return rules that cut ``w`` by rows and ``v`` by columns."""
    mesh = FakeMesh((2, 2), ("ep", "fsdp"), rank=rank)
    rows, columns = (CheckpointPlacement(mesh, {"ep": Shard(dim)}) for dim in (0, 1))
    return PlacementRules({"w": rows, "v": columns})


@pytest.mark.parametrize("order", [("w", "v"), ("v", "w")])
def test_m42_a_tensor_and_its_transpose_take_a_rule_each(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    whole = arange(6, 3)

    def state(rank: int) -> dict[str, Any]:
        part = whole.chunk(2)[rank // 2].clone()
        views = {"w": part, "v": part.t()}
        return {name: views[name] for name in order}

    with without_warning():
        save(WORLD, tmp_path, state, one_rule_each)
    assert_holds(tmp_path, {"w": whole, "v": whole.t().contiguous()})

    templates = [blank(state(rank)) for rank in range(4)]
    loaded, _ = load(WORLD, tmp_path, lambda rank: templates[rank], one_rule_each)
    for rank, found in enumerate(loaded):
        assert_same(found, state(rank))


@pytest.mark.parametrize(
    "view",
    [
        lambda part: part,
        lambda part: part.view(3, 3),
        lambda part: part.t().t(),
        lambda part: part.detach(),
        lambda part: part.as_strided((3, 3), (3, 1)),
    ],
)
def test_m42_one_view_under_two_names_that_lie_differently_is_refused(
    tmp_path: Path, view: Any
) -> None:
    def state(rank: int) -> dict[str, Any]:
        part = arange(3, 3, start=9 * (rank // 2))
        return {"w": part, "v": view(part)}

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state, one_rule_each)
    refusal.says(
        "in one storage with", "lie differently", "w is:", "v is:", "name both in the rules"
    )


# M41: views that are conjugated or negated when they are read.


def complex_whole(n: int, start: int) -> torch.Tensor:
    """Return an ``(n, 3)`` tensor whose parts all differ and none of which is 0."""
    real = arange(n, 3, start=start)
    return torch.complex(real, -2 * real - 1)


LAZY: dict[str, Any] = {
    "conj": lambda n, start: complex_whole(n, start).conj(),
    "conj of a transpose": lambda n, start: complex_whole(3, start).t().conj(),
    "conj of a slice": lambda n, start: complex_whole(n + 1, start).conj()[1:],
    "neg": lambda n, start: complex_whole(n, start).conj().imag,
    "neg of a contiguous one": lambda n, start: torch._neg_view(arange(n, 3, start=start)),
    "neg of a conj": lambda n, start: torch._neg_view(complex_whole(n, start).conj()),
    "conj scalar": lambda n, start: complex_whole(1, start)[0, 0].conj(),
    "neg scalar": lambda n, start: torch._neg_view(torch.tensor(float(start))),
}
"""Lazy views, by how they come about: of ``n`` rows and a first value."""


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own with the values of a lazy view."""
    return tensor.resolve_conj().resolve_neg().clone()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of a lazy view, which is other values."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return (torch._neg_view(tensor) if tensor.is_neg() else tensor).clone()


@pytest.mark.parametrize("digests", ["sampled", "full"])
@pytest.mark.parametrize("rows", [2, 3000], ids=["small", "large"])
@pytest.mark.parametrize("kind", LAZY)
def test_m41_a_lazy_view_is_a_replica_of_its_values_and_not_of_its_memory(
    tmp_path: Path, kind: str, rows: int, digests: str
) -> None:
    world = World(2)
    view = LAZY[kind](rows, 1)
    assert view.is_conj() or view.is_neg()
    assert not torch.equal(raw(view), resolved(view))

    def state(rank: int) -> dict[str, Any]:
        return {"w": LAZY[kind](rows, 1) if rank else resolved(view), "v": LAZY[kind](rows, 1)}

    with without_warning():
        save(world, tmp_path, state, digests=digests)
    assert_holds(tmp_path, {"w": resolved(view), "v": resolved(view)})

    templates = [
        {key: LAZY[kind](rows, 70) if rank else blank(resolved(view)) for key in ("w", "v")}
        for rank in range(2)
    ]
    loaded, _ = load(world, tmp_path, lambda rank: templates[rank])
    for found in loaded:
        for tensor in found.values():
            assert same_bits(resolved(tensor), resolved(view))
    assert loaded[1]["w"].is_conj() or loaded[1]["w"].is_neg()
    with refused_save(tmp_path / "memory") as refusal:
        memory = [{"w": raw(view)}, {"w": view}]
        save(world, tmp_path / "memory", memory.__getitem__, digests=digests)
    refusal.says("w: 2 different contents on 2 ranks")
