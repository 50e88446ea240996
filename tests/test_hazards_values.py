"""Rows of ``hazards.md`` that ask what a thing is: by its value, never by where it lies in memory.

Rules made anew for every tensor, keys of any text, lazy views, and two views of one storage.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, assert_holds, assert_same, blank, load, save
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
)
from dcp_placements.keys import packed_keys, unpacked_keys
from dcp_placements.mesh import MeshNumbers
from dcp_placements.placing import place
from dcp_placements.table import Table, table_id
from fakes import FakeMesh, World

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


def test_m32_equal_answers_put_tensors_in_one_group() -> None:
    """Thousands of tensors have a few bindings, whatever objects the rules answer with."""
    state = {f"w.{at}": torch.zeros(2, 2) for at in range(20)}
    placed = place(state, made_anew(1), 1).placed
    assert len({placed[fqn].binding for fqn in state}) == 2
    assert placed["w.0"].binding is placed["w.18"].binding
    assert placed["w.1"].binding is placed["w.19"].binding


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


def test_m32_meshes_sliced_anew_are_one_mesh() -> None:
    number = MeshNumbers()
    meshes = [FakeMesh((2, 2), ("ep", "fsdp"), rank=rank) for rank in (1, 1, 2)]
    told = [number(mesh) for mesh in meshes]
    assert told == [0, 0, 1]
    assert number(meshes[0]["fsdp"]) == number(meshes[1]["fsdp"]) == 2
    for rank in range(8):  # more than it knows at once
        number(FakeMesh((8,), ("dp",), rank=rank))
    assert [number(mesh) for mesh in meshes] == told


# M37: keys of any text.

ODD_KEYS = (
    *("a\nb", "c", "a", "b\nc", "\n", "a\n", "", "w.\0", "a\rb", "a\u2028b", "é.ü", "名.重み"),
    *("cut \udc80 off", "w.007", "w.12345678901234567890", "0", ".", "w..x", "x" * 5000),
)


def odd(key: str) -> torch.Tensor:
    """Return what a key holds in these tests."""
    return arange(2, 3, start=100 * (1 + ODD_KEYS.index(key)))


@pytest.mark.parametrize(
    "split",
    [
        [("a\nb", "c"), ("a", "b\nc")],
        [("\n", "a"), ("", "a\n")],
        [ODD_KEYS[:6], ODD_KEYS[6:]],
        [ODD_KEYS, ODD_KEYS],
    ],
    ids=["joined-alike", "empty-parts", "halves", "replicas"],
)
@pytest.mark.parametrize("digests", ["sampled", "full", "off"])
def test_m37_ranks_keep_keys_with_line_breaks_apart(
    tmp_path: Path, split: list[tuple[str, ...]], digests: str
) -> None:
    """What joins keys must not make two ranks' keys one list."""
    world = World(2)

    def state(rank: int) -> dict[str, Any]:
        return {key: odd(key) for key in split[rank]}

    save(world, tmp_path, state, digests=digests)
    assert_holds(tmp_path, {key: odd(key) for key in {*split[0], *split[1]}})
    verify = "digests" if digests == "full" else "off"
    loaded, _ = load(world, tmp_path, lambda rank: blank(state(rank)), verify=verify)
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


@pytest.mark.parametrize("keys", [(), *((key,) for key in ODD_KEYS), ODD_KEYS, ODD_KEYS * 3])
def test_m37_packed_keys_come_back(keys: tuple[str, ...]) -> None:
    assert unpacked_keys(packed_keys(keys)) == list(keys)


def test_m37_tables_of_other_keys_have_other_names() -> None:
    def named(*keys: str) -> bytes:
        return table_id(Table(fqns=list(keys), class_of=[0] * len(keys)).packed())

    lists = [("a\nb", "c"), ("a", "b\nc"), ("a", "b", "c"), ("a\nb\nc",), ("",), ("", "")]
    lists += [("a\0b",), ("a", "\0b"), ("\n",), ("\udc80",), ("?",)]
    assert len({named(*keys) for keys in lists}) == len(lists)
