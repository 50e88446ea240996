"""Renames that turn some tensors and leave others of the same layout: each has a place of its own.

Layers have equal tensors, so places are kept by layout. What a rename makes of a tensor belongs to
that: the transposed and the plain one of two square weights have one layout.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    Placements,
    Renames,
    Replace,
    Row,
    Rows,
    Stack,
    Transpose,
    Unstack,
)
from dcp_placements.names.rename_results import Parts, Transposed
from dcp_placements.testing import FakeDTensor, World
from tests.hazard_scenes import read_whole

NAMES = ("w1", "w2", "w3")
NO_FORM = {"fqn", "fqns", "whole", "stacked", "within"}


@pytest.mark.parametrize(
    "answer",
    [
        Row("w", 1, 3),
        Row("w", 1, 3, 0, (Row("", 0, 2),)),
        Rows("w.{}", "w"),
        Parts(("q", "k"), "qk", 0, (1, 1)),
        Transposed("w"),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_the_form_of_an_answer_is_all_but_its_names(answer: Any) -> None:
    """The key under which a place is kept lacks no field that decides it."""
    other = {"index": 2, "total": 7, "dim": 1, "transposed": True, "sizes": (2, 1), "groups": 2}
    other |= {"rows": 0, "dim_after": True}
    fields = {field.name for field in dataclasses.fields(answer)} - NO_FORM
    if isinstance(answer, Transposed):
        fields -= {"dim", "transposed"}  # constant
    for name in fields:
        changed = dataclasses.replace(answer, **{name: other[name]})
        assert changed.form != answer.form, name
    if isinstance(answer, Row) and answer.within:
        changed = dataclasses.replace(answer, within=(Row("", 1, 2),))
        assert changed.form != answer.form
    renamed = {name: "other" for name in ("fqn", "stacked") if hasattr(answer, name)}
    if not isinstance(answer, Parts | Transposed):
        renamed = {name: renamed[name] for name in renamed if name != "stacked" or name in fields}
        assert dataclasses.replace(answer, fqn="other").form == answer.form


def steps_of(
    rng: random.Random, turned: list[str], count: int | None, *, is_apart: bool
) -> list[Any]:
    """Return steps that turn tensors, and stack or unstack them, in one of the two orders.

    Args:
        rng: Draws the order.
        turned: The tensors whose last two dims the checkpoint has swapped.
        count: The number of experts, where ranks have a tensor for each.
        is_apart: Whether the checkpoint has.
    """
    shape: list[Any] = []
    if count is not None and not is_apart:
        shape = [Stack("experts.{}", count)]
    if count is None and is_apart:
        shape = [Unstack("experts.{}")]
    is_turned_first = rng.random() < 0.5
    has_numbers = (count is not None) if is_turned_first else is_apart
    turns = [
        Transpose(f"experts.*.{name}" if has_numbers else f"experts.{name}") for name in turned
    ]
    return [*turns, *shape] if is_turned_first else [*shape, *turns]


def assert_chain(rng: random.Random, path: Path) -> None:
    """Save and load experts of three weights, some of them turned, stacked or apart."""
    tp, fsdp = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)])
    world = World(tp * fsdp)
    count, size = rng.choice([2, 3]), rng.choice([4, 8])
    turned = [name for name in NAMES if rng.random() < 0.5]
    is_list, is_apart = rng.random() < 0.5, rng.random() < 0.5
    tp_dim, own_dim, by_rule = rng.randrange(2), rng.randrange(2), rng.random() < 0.5
    # The checkpoint's orientation; all of one shape.
    wholes = {
        name: torch.arange(count * size * size).view(count, size, size) + 1000 * number
        for number, name in enumerate(NAMES)
    }
    order = rng.sample(NAMES, len(NAMES))

    def state_dict(rank: int, *, is_blank: bool = False) -> dict[str, Any]:
        mesh = world.mesh(rank, tp=tp, fsdp=fsdp)
        state: dict[str, Any] = {}
        for name in order:
            whole = wholes[name] * (0 if is_blank else 1)
            if by_rule:
                whole = whole.chunk(tp, 1 + tp_dim)[mesh["tp"].get_local_rank()]
            own = whole.transpose(1, 2) if name in turned else whole
            rows = {f".{number}": row for number, row in enumerate(own)} if is_list else {"": own}
            for number, row in rows.items():
                shards = [Shard(row.ndim - 2 + own_dim)]
                made = FakeDTensor.distribute(row.clone(), mesh["fsdp"], shards)
                state[f"experts{number}.{name}"] = made
        return state

    steps = steps_of(rng, turned, count if is_list else None, is_apart=is_apart)

    def declaration(rank: int) -> Placements:
        mesh, is_one = world.mesh(rank, tp=tp, fsdp=fsdp), not is_list or not is_apart
        by = CheckpointPlacement(mesh, {"tp": Shard(tp_dim + is_one)})
        rename = Renames(*steps) if steps else None
        return Placements({"experts": by} if by_rule else {}, rename=rename)

    world.save(path, state_dict, lambda rank: declaration(rank).save_planner())
    stored = read_whole(path)
    for name, whole in wholes.items():
        if is_apart:
            for number, row in enumerate(whole):
                assert torch.equal(stored[f"experts.{number}.{name}"], row), (name, number)
        else:
            assert torch.equal(stored[f"experts.{name}"], whole), name
    loaded = world.load(
        path,
        lambda rank: state_dict(rank, is_blank=True),
        lambda rank: declaration(rank).load_planner(),
    )
    for rank in range(world.size):
        for key, value in state_dict(rank).items():
            assert torch.equal(loaded[rank][key].to_local(), value.to_local()), key


@pytest.mark.parametrize("start", range(0, 60, 10))
def test_equal_layouts_that_are_turned_and_not(start: int, tmp_path: Path) -> None:
    for seed in range(start, start + 10):
        try:
            assert_chain(random.Random(seed), tmp_path / str(seed))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize(
    "step", [Transpose("embed.w"), Unstack("embed.{}.w")], ids=["turn", "rows"]
)
def test_one_name_for_several_keys_whatever_a_rename_makes_of_them(
    step: Any, tmp_path: Path
) -> None:
    """Tied weights of a save, and keys of a load that one tensor fills."""
    world, whole = World(1), torch.arange(6.0).view(2, 3)
    rename = Renames(Replace("head", "embed"), step)
    world.save(
        tmp_path,
        lambda rank: {"embed.w": whole, "head.w": whole},
        lambda rank: Placements({}, rename=rename).save_planner(),
    )
    stored = read_whole(tmp_path)
    if isinstance(step, Transpose):
        assert torch.equal(stored["embed.w"], whole.t())
    else:
        assert torch.equal(torch.stack([stored[f"embed.{row}.w"] for row in range(2)]), whole)
    blank = {"embed.w": torch.zeros(2, 3), "head.w": torch.zeros(2, 3)}
    loaded = world.load(
        tmp_path, lambda rank: blank, lambda rank: Placements({}, rename=rename).load_planner()
    )
    assert torch.equal(loaded[0]["embed.w"], whole)
    assert torch.equal(loaded[0]["head.w"], whole)
