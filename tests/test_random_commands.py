"""Random worlds against plain slicing: copies that differ, and commands on files."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Shard

from dcp_placements import (
    MeshCoordinate,
    Placements,
    PlacementSavePlanner,
    Renames,
    Transpose,
)
from dcp_placements.offline import (
    diff,
    export_safetensors,
    import_checkpoint,
    reshard,
    stock_metadata,
    verify,
)
from dcp_placements.table import digests
from dcp_placements.testing import World
from tests.differential import (
    bits,
    checkpoint,
    opposite,
    same_bits,
    wholes,
)
from tests.drawn_worlds import draw_pair
from tests.random_ranks import Rank, Value
from tests.random_worlds import Pair, Side
from tests.test_differential import assert_torch_reads, load, save, save_planners

ALTERED = range(300, 310)
LACKING = range(600, 630)
"""The worlds of each test."""


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):
        yield


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers; complex128 has none of its size."""
    return tensor if tensor.dtype is torch.complex128 else bits(tensor)


# Copies that differ


def alter(values: list[list[Value]], draw: random.Random) -> tuple[Value, int, int] | None:
    """Change one element that one rank holds; return where, its number, and its holders."""
    # Each memory once, whichever names a rank has for it.
    held = [*{id(value.value): value for each in values for value in each}.values()]
    held = [value for value in held if value.numbers is not None]
    held = [value for value in held if (value.numbers >= 0).any()]
    if not held:
        return None
    value = draw.choice(held)
    assert value.numbers is not None
    at = draw.choice((value.numbers.reshape(-1) >= 0).nonzero().reshape(-1).tolist())
    number = int(value.numbers.reshape(-1)[at])
    index = torch.unravel_index(torch.tensor(at), value.numbers.shape) if value.local.dim() else ()
    local = value.local.detach()
    raw(local)[index] = raw(opposite(local.clone()))[index]
    of_it = [each for each in held if each.of == value.of]
    return value, number, sum(int((each.numbers == number).sum()) for each in of_it)


@pytest.mark.parametrize("budget", [8, 1 << 24], ids=["two bytes", "whole"])
def test_a_copy_that_differs_in_one_element_refuses_the_save(
    budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "WORLD_BUDGET_NBYTES", budget)
    seen = Counter[bool]()
    for seed in ALTERED:
        pair = draw_pair(seed)
        whole = wholes(pair)
        ranks = [Rank(pair, pair.save, rank) for rank in range(pair.save.size)]
        values = [list(rank.values(whole)) for rank in ranks]
        altered = alter(values, random.Random(seed))
        if altered is None:
            continue
        value, number, holders = altered
        planners = [
            PlacementSavePlanner(rank.rules(), rename=rank.rename(), digests="full")
            for rank in ranks
        ]
        world, path = World(len(ranks)), tmp_path / str(seed)
        states = [r.state_dict(v, blank=False) for r, v in zip(ranks, values, strict=True)]
        seen[holders > 1] += 1
        if holders > 1:
            with pytest.raises(CheckpointException, match="differ"):
                world.save(path, states.__getitem__, planners.__getitem__)
            assert not (path / ".metadata").exists(), f"world {seed}, {value.key}"
        else:
            world.save(path, states.__getitem__, planners.__getitem__)
            assert value.of is not None
            changed = whole | {value.of: whole[value.of].clone()}
            flat = raw(changed[value.of]).view(-1)
            flat[number] = raw(opposite(whole[value.of])).reshape(-1)[number]
            assert_torch_reads(pair, changed, path)
    assert min(seen[True], seen[False]) > 3


# Elements that nobody holds


def test_a_save_without_elements_that_one_rank_alone_holds_is_refused(tmp_path: Path) -> None:
    """A rank without one of its weights; of those that are one tensor each in the file."""
    seen = Counter[bool]()
    for seed in LACKING:
        draw, pair = random.Random(seed), draw_pair(seed)
        whole = wholes(pair)
        ranks = [Rank(pair, pair.save, rank) for rank in range(pair.save.size)]
        values = [list(rank.values(whole)) for rank in ranks]
        single = {f.name for f in pair.families if not f.levels and not f.parts}
        held = [
            (each, value)
            for each in values
            for value in each
            if value.of is not None and value.of[0] in single and value.of[1] == ""
        ]
        if not held:
            continue
        each, value = draw.choice(held)
        # Its optimizer state goes with it.
        each[:] = [other for other in each if f"{value.of[0]}.weight" not in other.key]

        def numbers(of_all: list[Value]) -> set[int]:
            found = [v.numbers for v in of_all if v.numbers is not None]
            return {number for one in found for number in one.reshape(-1).tolist() if number >= 0}

        rest = [other for _, other in held if other.of == value.of]
        rest = [other for other in rest if other.value is not value.value]
        if not rest:
            continue  # the key is nowhere: the checkpoint does not have it
        lacks = numbers([value]) - numbers(rest)
        seen[bool(lacks)] += 1
        world, path = World(len(ranks)), tmp_path / str(seed)
        states = [r.state_dict(v, blank=False) for r, v in zip(ranks, values, strict=True)]
        planners = [PlacementSavePlanner(rank.rules(), rename=rank.rename()) for rank in ranks]
        if lacks:
            with pytest.raises(CheckpointException) as refused:
                world.save(path, states.__getitem__, planners.__getitem__)
            message = str(refused.value)
            assert value.key.split(".")[-1] in message, message
            assert not (path / ".metadata").exists(), f"world {seed}, {value.key}"
        else:
            world.save(path, states.__getitem__, planners.__getitem__)
            assert_torch_reads(pair, whole, path)
    assert min(seen[True], seen[False]) > 3, seen


# Commands


def with_shapes(side: Side) -> Side:
    """Return a side whose rules say the shape: without ranks no DTensor has that of a shard.

    Nor is there a DTensor to say that an axis which the rule names cuts with strides.
    """
    holds = []
    for hold in side.holds:
        cuts = []
        for cutting in hold.cuts:
            plain = {axis for axis, placement in cutting.own if type(placement) is Shard}
            also = tuple(axis for axis in cutting.also if axis in plain)
            cuts.append(replace(cutting, given=True, also=also))
        holds.append(replace(hold, cuts=tuple(cuts)))
    return replace(side, holds=tuple(holds))


@pytest.mark.worlds(8)
def test_commands_keep_every_bit(seeds: range, tmp_path: Path) -> None:
    """An export turns some of the tensors, and the import turns them back."""
    for seed in seeds:
        pair, root = draw_pair(seed), tmp_path / str(seed)
        # A new checkpoint has no digests, which a load of the pair would ask for.
        options = {**dict(pair.save.options), "digests": "sampled"}
        pair = replace(pair, save=replace(pair.save, options=tuple(options.items())))
        whole = wholes(pair)
        save(pair, whole, root / "saved", save_planners(pair))
        stock_metadata(root / "saved")
        assert_torch_reads(pair, whole, root / "saved")

        def declared(mesh: MeshCoordinate, pair: Pair = pair) -> Placements:
            rank = Rank(pair, with_shapes(pair.load), *mesh.get_coordinate())
            return Placements(rank.rules(), rename=rank.rename())

        if not any(level.stacked for family in pair.families for level in family.levels):
            reshard(root / "saved", root / "resharded", declared, {"rank": pair.load.size})
            assert_torch_reads(pair, whole, root / "resharded")
            load(pair, whole, root / "resharded")
            assert verify(root / "resharded", contents=True).sound
            assert diff(root / "saved", root / "resharded").same
        expected = checkpoint(pair, whole)
        tensors = {key: one for key, one in expected.items() if isinstance(one, torch.Tensor)}
        if any(tensor.dtype is torch.complex128 for tensor in tensors.values()):
            continue  # safetensors files have no such dtype
        draw = random.Random(seed)
        # A step that changes no tensor is refused.
        has_dims = {
            part for key, tensor in tensors.items() if tensor.dim() > 1 for part in key.split(".")
        }
        names = [
            family.name
            for family in pair.families
            if family.name in has_dims and "{}" not in family.name
        ]
        names = [name for name in names if draw.random() < 0.4]
        rename = Renames(*map(Transpose, names)) if names else None
        export_safetensors(root / "saved", root / "hf", prefix="", optimizer=True, rename=rename)
        exported = load_file(root / "hf" / "model.safetensors")
        assert exported.keys() == tensors.keys()
        for key, tensor in tensors.items():
            is_turned = tensor.dim() > 1 and not {*names}.isdisjoint(key.split("."))
            assert same_bits(exported[key], tensor.mT if is_turned else tensor), key
        import_checkpoint(root / "hf", root / "imported", rename=rename)
        read = {key: opposite(tensor) for key, tensor in tensors.items()}
        dcp.load(read, checkpoint_id=root / "imported", no_dist=True)
        assert all(same_bits(read[key], tensor) for key, tensor in tensors.items())
