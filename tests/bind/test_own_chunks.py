"""Tensors with the attributes of torch's ``CheckpointableTensor``, under every torch.

The truth is plain slicing of the whole, and the whole as torch's default planner reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import read_whole
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Stack,
    Unstack,
)
from dcp_placements.testing import World

WHOLE = torch.arange(8 * 6).reshape(8, 6).float()

Place = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Global offsets, local offsets and sizes of a chunk."""


def listed(tensor: torch.Tensor, *places: Place, shape: tuple[int, ...] = (8, 6)) -> torch.Tensor:
    annotated: Any = tensor
    annotated.global_shape = shape
    annotated.global_offsets = tuple(place[0] for place in places)
    annotated.local_offsets = tuple(place[1] for place in places)
    annotated.local_sizes = tuple(place[2] for place in places)
    return tensor


def rows(start: int, stop: int, whole: torch.Tensor = WHOLE) -> torch.Tensor:
    """Return these rows, which say where they lie."""
    count = stop - start
    part = whole[start:stop].clone()
    return listed(part, ((start, 0), (0, 0), (count, 6)))


def save(path: Path, *ranks: dict[str, Any], **options: Any) -> None:
    World(len(ranks)).save(
        path, lambda rank: ranks[rank], lambda rank: PlacementSavePlanner(**options)
    )


def refusal(path: Path, *ranks: dict[str, Any], **options: Any) -> str:
    with pytest.raises(dcp.CheckpointException) as caught:
        save(path, *ranks, **options)
    assert not list(path.iterdir())
    return str(caught.value)


def test_holes_overlaps_and_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    assert "w" in refusal(tmp_path, {"w": rows(0, 3)}, {"w": rows(4, 8)})
    assert "w" in refusal(tmp_path, {"w": rows(0, 5)}, {"w": rows(4, 8)})
    changed = rows(4, 8)
    changed[1, 1] += 1
    text = refusal(tmp_path, {"w": rows(0, 4)}, {"w": rows(4, 8)}, {"w": changed})
    assert "w: " in text
    assert "1 and 2" in text or "1, 2" in text or ("rank 1" in text and "rank 2" in text)


def placement(rank: int, *entries: Any) -> CheckpointPlacement:
    mesh = World(4).mesh(rank, ep=2, dp=2)
    return CheckpointPlacement(mesh, entries, global_shape=(8, 6))


def test_a_rule_has_to_say_the_same(tmp_path: Path) -> None:
    ranks = [{"w": rows(4 * (rank // 2), 4 * (rank // 2) + 4)} for rank in range(4)]

    def by(*entries: Any) -> Any:
        return lambda rank: PlacementSavePlanner(lambda fqn, _: placement(rank, *entries))

    World(4).save(tmp_path, ranks.__getitem__, by(Shard(0), Replicate()))
    assert torch.equal(read_whole(tmp_path)["w"], WHOLE)
    with pytest.raises(dcp.CheckpointException) as caught:
        World(4).save(tmp_path / "other", ranks.__getitem__, by(Replicate(), Shard(0)))
    text = str(caught.value)
    assert "w: lists chunks of its own that are not those of its rule" in text
    assert "by itself:   [0:4, :] of (8, 6)" in text
    assert "declared:    [4:8, :] of (8, 6)" in text
    # A rule that shards nothing leaves the tensor what it says itself.
    World(4).save(tmp_path, ranks.__getitem__, by(Replicate(), Replicate()))
    assert torch.equal(read_whole(tmp_path)["w"], WHOLE)


def test_a_rule_that_cuts_over_one_rank_leaves_the_tensor_what_it_lists(tmp_path: Path) -> None:
    def rules(rank: int) -> PlacementRules:
        mesh = World(2).mesh(rank, ep=1, tp=2)
        return PlacementRules({"w": CheckpointPlacement(mesh, {"ep": Shard(0)})})

    ranks = [{"w": rows(0, 4)}, {"w": rows(4, 8)}]
    World(2).save(tmp_path, ranks.__getitem__, lambda rank: PlacementSavePlanner(rules(rank)))
    assert torch.equal(read_whole(tmp_path)["w"], WHOLE)


def test_a_rule_of_another_whole_shape_is_refused(tmp_path: Path) -> None:
    placement = CheckpointPlacement(
        World(1).mesh(0, tp=1), {}, global_shape=(7, 6), padded_shape=(8, 6)
    )
    text = refusal(tmp_path, {"w": rows(0, 8)}, rules=PlacementRules({"w": placement}))
    assert "lists chunks of its own that are not those of its rule" in text


def test_lists_of_a_rule_that_repeat_or_overlap_are_refused(tmp_path: Path) -> None:
    top, middle = ((0, 0), (0, 0), (2, 6)), ((1, 0), (1, 0), (2, 6))
    refusals = {"not those of its rule": [top, top], "for two places": [top, middle]}
    for text, places in refusals.items():
        tensor = listed(WHOLE[:4].clone(), *places)
        with pytest.raises(dcp.CheckpointException, match=text):
            World(2).save(
                tmp_path,
                lambda rank, tensor=tensor: {"w": tensor if not rank else rows(4, 8)},
                lambda rank: PlacementSavePlanner(
                    PlacementRules(
                        {"w": CheckpointPlacement(World(2).mesh(rank, ep=2), {"ep": Shard(0)})}
                    )
                ),
            )


def test_state_that_names_a_listed_parameter_by_number_is_refused(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        weight = rows(4 * rank, 4 * rank + 4)
        moments = {"exp_avg": torch.zeros(4, 6), "step": torch.tensor(1.0)}
        groups = [{"params": [0], "lr": 0.1}]
        return {"model": {"w": weight}, "optim": {"state": {0: moments}, "param_groups": groups}}

    text = refusal(tmp_path, state(0), state(1))
    assert "optim.state.0: names its parameter by its position" in text
    save(tmp_path / "model", *({"model": state(rank)["model"]} for rank in range(2)))
    with pytest.raises(dcp.CheckpointException, match="names its parameter by its position"):
        World(2).load(tmp_path / "model", state, lambda rank: PlacementLoadPlanner())


@pytest.mark.parametrize(
    ("places", "text"),
    [
        (
            [((6, 0), (0, 0), (4, 6))],
            "lists a chunk outside the whole tensor of shape (8, 6)",
        ),
        (
            [((0, 0), (2, 0), (4, 6))],
            "lists a chunk outside the local tensor of shape (4, 6)",
        ),
        ([((0,), (0,), (4,))], "lists a chunk of other dims than global_shape=(8, 6)"),
        (
            [(("a", 0), (0, 0), (4, 6))],
            "has global_offsets=(('a', 0),), which is no list",
        ),
        (
            [((0.5, 0), (0, 0), (4, 6))],
            "has global_offsets=((0.5, 0),), which is no list",
        ),
        (
            [((0, 0), (0, 0), (4, 6)), ((0, 0), (2, 0), (2, 6))],
            "lists two chunks that overlap: at offsets (0, 0) one of sizes (4, 6) and one of",
        ),
        (
            [((0, 0), (0, 0), (2, 6)), ((2, 0), (0, 0), (2, 6))],
            "lists elements of the local tensor for two places: [0:2, 0:6] and [0:2, 0:6]",
        ),
        (
            [((0, 0), (0, 0), (2, 6)), ((2, 0), (1, 0), (2, 6))],
            "lists elements of the local tensor for two places: [0:2, 0:6] and [1:3, 0:6]",
        ),
    ],
)
def test_attributes_that_do_not_fit_are_refused(
    tmp_path: Path, places: list[Any], text: str
) -> None:
    found = refusal(tmp_path, {"w": listed(WHOLE[:4].clone(), *places)})
    assert f"w: {text}" in found


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((), "lists 1 global_offsets, 1 local_offsets, 0 local_sizes"),
        (8, "w: has local_sizes=8, which is no list"),
    ],
)
def test_lists_that_do_not_go_together_are_refused(tmp_path: Path, sizes: Any, text: str) -> None:
    tensor: Any = rows(0, 8)
    tensor.local_sizes = sizes
    assert text in refusal(tmp_path, {"w": tensor})


def test_a_view_that_lost_the_attributes_is_named(tmp_path: Path) -> None:
    tensor = rows(0, 4)
    for state in ({"w": tensor, "view": tensor[:]}, {"view": tensor[:], "w": tensor}):
        text = refusal(tmp_path, state)
        assert "view: it is in one storage with w" in text
        assert "w is:  [0:4, :] of (8, 6)" in text


def test_a_tensor_with_some_of_the_attributes_is_a_plain_tensor(tmp_path: Path) -> None:
    tensor: Any = WHOLE.clone()
    tensor.global_shape = (80, 6)
    save(tmp_path, {"w": tensor})
    assert torch.equal(read_whole(tmp_path)["w"], WHOLE)


def test_what_lists_its_chunks_is_neither_stacked_nor_unstacked(tmp_path: Path) -> None:
    stacked = {f"experts.{n}.w": rows(0, 8) for n in range(2)}
    assert "names its chunks itself" in refusal(
        tmp_path, stacked, rename=Stack("experts.{}.w", total=2)
    )
    whole = {"experts.w": rows(0, 8)}
    assert "names its chunks itself" in refusal(tmp_path, whole, rename=Unstack("experts.{}.w"))


TOP, BOTTOM = ((0, 0), (0, 0), (3, 6)), ((3, 0), (3, 0), (1, 6))


@pytest.mark.parametrize(
    ("places", "is_equal"),
    [
        ([BOTTOM, TOP], True),
        ([TOP, ((3, 0), (3, 0), (1, 2)), ((3, 2), (3, 2), (1, 4))], True),
        ([TOP], False),
        ([((0, 0), (1, 0), (3, 6)), ((3, 0), (0, 0), (1, 6))], False),
        ([((1, 0), (0, 0), (4, 6))], False),
        ([], False),
    ],
)
def test_elements_are_compared_with_a_rule_and_not_boxes(
    tmp_path: Path, places: list[Place], is_equal: bool
) -> None:
    rules = [PlacementRules({"w": placement(rank, Shard(0), Replicate())}) for rank in range(4)]
    ranks = [{"w": rows(4 * (rank // 2), 4 * (rank // 2) + 4)} for rank in range(4)]
    ranks[0] = {"w": listed(WHOLE[:4].clone(), *places)}

    def saves() -> None:
        World(4).save(tmp_path, ranks.__getitem__, lambda rank: PlacementSavePlanner(rules[rank]))

    if is_equal:
        saves()
        assert torch.equal(read_whole(tmp_path)["w"], WHOLE)
        return
    with pytest.raises(dcp.CheckpointException, match="not those of its rule"):
        saves()


def test_a_rule_whose_parts_have_copies_agrees_with_adjacent_rows_in_one_chunk(
    tmp_path: Path,
) -> None:
    def state(rank: int) -> dict[str, Any]:
        first, second = WHOLE.split([4, 4])
        local = torch.cat([first.chunk(2)[rank], second])
        places: list[Place] = [((2 * rank, 0), (0, 0), (2, 6)), ((4, 0), (2, 0), (4, 6))]
        return {"w": listed(local, *([((2, 0), (0, 0), (6, 6))] if rank else places))}

    def planner(rank: int) -> PlacementSavePlanner:
        by = {"tp": FusedShard(0, (4, 4), copies=(1, 2))}
        return PlacementSavePlanner(
            PlacementRules({"w": CheckpointPlacement(World(2).mesh(rank, tp=2), by)})
        )

    World(2).save(tmp_path, state, planner)
    assert torch.equal(read_whole(tmp_path)["w"], WHOLE)
