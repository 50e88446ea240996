"""Every refusal says where, what was found against what was declared, and the way out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Partial, Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renumber,
    SaveReport,
    Stack,
)
from dcp_placements.errors import MAX_SENT, Fault, format_faults, raise_faults
from dcp_placements.testing import FakeDTensor, FakeMesh, World

Ranked = Callable[[int], Any]


def refusals(run: Callable[[], Any]) -> dict[int, str]:
    """Return what each rank was refused with."""
    with pytest.raises(CheckpointException) as refused:
        run()
    found = {}
    for rank, (error, _) in refused.value.failures.items():
        assert isinstance(error, PlacementError), error
        found[rank] = str(error)
    return found


def refused_saves(path: Path, world: World, state_dict: Ranked, rules: Ranked) -> dict[int, str]:
    """Return what each rank was refused with; nothing may have been written."""
    before = sorted(path.iterdir())
    messages = refusals(
        lambda: world.save(path, state_dict, lambda rank: PlacementSavePlanner(rules(rank)))
    )
    assert sorted(path.iterdir()) == before
    return messages


def refused_loads(path: Path, world: World, state_dict: Ranked, rules: Ranked) -> dict[int, str]:
    return refusals(
        lambda: world.load(path, state_dict, lambda rank: PlacementLoadPlanner(rules(rank)))
    )


def assert_says(text: str, *words: str) -> None:
    for each in words:
        assert each in text, f"{each!r} is not in:\n{text}"


def ruled(
    world: World,
    pattern: str,
    placements: dict[str, Any],
    global_shape: tuple[int, ...] | None = None,
    **axes: int,
) -> Ranked:
    """Return each rank's rules: one pattern, over the mesh of ``axes``."""
    return lambda rank: PlacementRules(
        {
            pattern: CheckpointPlacement(
                world.mesh(rank, **axes), placements, global_shape=global_shape
            )
        }
    )


def no_rules(rank: int) -> None:
    return None


# What one rank sees of its own.


def test_a_local_shape_that_does_not_fit_names_every_factor(tmp_path: Path) -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, edp=2)
        return {
            "layers.0.experts.w1": FakeDTensor(torch.zeros(3, 5), mesh["edp"], [Shard(0)], (7, 5))
        }

    rules = ruled(world, "experts.*", {"ep": Shard(0)}, ep=2, edp=2)
    messages = refused_saves(tmp_path, world, state_dict, rules)
    # Of 7 rows the first edp rank should have 4, the second has its 3.
    assert messages[0].startswith("ranks 0, 2 cannot be placed in the checkpoint (1 fault)")
    assert_says(
        messages[0],
        "layers.0.experts.w1: holds a (3, 5) tensor where (4, 5) was declared",
        "declared:    [Shard(0), Replicate()] on mesh (ep=2, edp=2)",
        "the tensor:  DTensor of shape (7, 5), [Shard(0)] on mesh (edp=2)",
        "coordinate:  (ep=0, edp=0) on rank 0",
        "whole tensor (14, 5), cut by ep (x2) on dim 0, then edp (x2) on dim 0",
        "by rule:     'experts.*'",
        "way out:",
    )


def test_a_global_shape_that_does_not_fit_is_named(tmp_path: Path) -> None:
    world = World(2)
    rules = ruled(world, "w", {"ep": Shard(0)}, (10, 3), ep=2)
    messages = refused_saves(tmp_path, world, lambda rank: {"w": torch.zeros(4, 3)}, rules)
    assert_says(
        messages[0],
        "w: holds a (4, 3) tensor where (5, 3) was declared",
        "global_shape (10, 3)",
        "plain tensor of shape (4, 3)",
        "correct global_shape=",
    )


def test_a_global_shape_of_other_dims_is_refused(tmp_path: Path) -> None:
    world = World(2)
    rules = ruled(world, "w", {"ep": Shard(0)}, (8,), ep=2)
    messages = refused_saves(tmp_path, world, lambda rank: {"w": torch.zeros(4, 3)}, rules)
    assert_says(messages[0], "w: the tensor has 2 dims", "global_shape=(8,)", "has 1")


def test_dim_out_of_range_of_one_tensor_names_it_and_the_rule(tmp_path: Path) -> None:
    world = World(2)
    rules = ruled(world, "experts.*", {"ep": Shard(1)}, ep=2)
    messages = refused_saves(
        tmp_path,
        world,
        lambda rank: {"experts.w": torch.zeros(4, 3), "experts.bias": torch.zeros(4)},
        rules,
    )
    assert_says(
        messages[0],
        "experts.bias: holds a tensor of 1 dim, but Shard(1) over axis ep names dim 1",
        "way out:     a more specific pattern above this rule",
        "by rule:     'experts.*'",
    )
    assert "experts.w:" not in messages[0]


def test_the_same_axis_on_two_dims_is_refused(tmp_path: Path) -> None:
    world = World(2)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, fsdp=2)
        return {"w": FakeDTensor.distribute(torch.zeros(4, 6), mesh, [Shard(0)])}

    rules = ruled(world, "w", {"fsdp": Shard(1)}, fsdp=2)
    messages = refused_saves(tmp_path, world, state_dict, rules)
    assert_says(messages[0], "w: has axis fsdp sharded on dim 0 by its own DTensor, but on dim 1")
    assert_says(
        messages[0], "way out:     the DTensor speaks for that axis; leave it out of the rule"
    )


def test_listed_rows_over_an_axis_that_the_tensor_shards_are_refused(tmp_path: Path) -> None:
    world = World(2)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2)
        return {"w": FakeDTensor.distribute(torch.zeros(4, 6), mesh, [Shard(0)])}

    rules = ruled(world, "w", {"ep": IndexShard(0, (0, 1))}, (4, 6), ep=2)
    messages = refused_saves(tmp_path, world, state_dict, rules)
    assert_says(messages[0], "w: has axis ep sharded by its own DTensor on dim 0", "IndexShard(0")


def test_one_axis_of_two_sizes_is_refused_with_both(tmp_path: Path) -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = FakeMesh((2, 2), ("other", "fsdp"), rank=rank)["fsdp"]
        return {"w": FakeDTensor.distribute(torch.zeros(4, 6), mesh, [Shard(0)])}

    rules = ruled(world, "w", {"fsdp": Replicate()}, fsdp=4)
    messages = refused_saves(tmp_path, world, state_dict, rules)
    assert_says(messages[0], "w: has axis fsdp of size 2 in the tensor's own mesh", "size 4")


def test_one_axis_in_two_places_is_refused_with_both(tmp_path: Path) -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, fsdp=2, ep=2)["fsdp"]
        return {"w": FakeDTensor.distribute(torch.zeros(4, 6), mesh, [Shard(0)])}

    swapped = ruled(world, "w", {"ep": Shard(0)}, ep=2, fsdp=2)
    messages = refused_saves(tmp_path, world, state_dict, swapped)
    assert_says(
        messages[0],
        "w: the rank is at 0 of axis fsdp in the tensor's own mesh, but at 1 in the rule's",
    )
    assert_says(messages[0], "w: the rank is at 1 of axis fsdp", "at 0 in the rule's")


def test_a_partial_sum_is_refused_with_the_way_out(tmp_path: Path) -> None:
    world = World(2)

    def state_dict(rank: int) -> dict[str, Any]:
        return {"w": FakeDTensor(torch.zeros(3), world.mesh(rank, tp=2), [Partial()], (3,))}

    messages = refused_saves(tmp_path, world, state_dict, no_rules)
    assert_says(messages[0], "w: holds a partial sum over axis tp", "redistribute")


def test_a_mesh_that_the_rank_is_not_part_of_is_refused(tmp_path: Path) -> None:
    world = World(3)

    def rules(rank: int) -> PlacementRules:
        mesh = FakeMesh((2,), ("ep",), rank=rank)
        return PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})

    messages = refused_saves(tmp_path, world, lambda rank: {"experts.w": torch.zeros(2)}, rules)
    assert messages[0].startswith("rank 2 cannot be placed in the checkpoint (1 fault)")
    assert_says(
        messages[0],
        "experts.w: the rank is not part of the rule's mesh (ep=2)",
        "way out:",
        "by rule:     'experts'",
    )


def test_parts_that_do_not_add_up_name_the_numbers(tmp_path: Path) -> None:
    world = World(2)
    rules = ruled(world, "qkv", {"tp": FusedShard(0, (8, 2, 2))}, tp=2)
    messages = refused_saves(tmp_path, world, lambda rank: {"qkv": torch.zeros(5, 3)}, rules)
    assert_says(messages[0], "qkv: parts (8, 2, 2) add up to 12, but 10 rows are being cut")
    assert_says(messages[0], "declared:    [FusedShard(0, (8, 2, 2))]", "coordinate:  (tp=0)")


def test_rules_that_give_no_placement_are_refused_by_name(tmp_path: Path) -> None:
    world = World(1)

    def my_rules(fqn: str, tensor: Any) -> Any:
        return Shard(0)

    messages = refused_saves(
        tmp_path, world, lambda rank: {"w": torch.zeros(3)}, lambda rank: my_rules
    )
    assert_says(messages[0], "w: was given Shard(dim=0) by the rules", "my_rules()", "way out:")


@pytest.mark.parametrize(
    "order", [("embed.weight", "head.weight"), ("head.weight", "embed.weight")]
)
def test_two_names_of_one_storage_of_which_one_matches_are_refused(
    order: tuple[str, str], tmp_path: Path
) -> None:
    world = World(2)

    def state_dict(rank: int) -> dict[str, Any]:
        tied = torch.zeros(3, 4)
        return dict.fromkeys(order, tied)

    rules = ruled(world, "embed", {"tp": Shard(0)}, tp=2)
    messages = refused_saves(tmp_path, world, state_dict, rules)
    assert_says(
        messages[0],
        "head.weight: it is in one storage with embed.weight",
        "embed.weight: rule 'embed', part of a (6, 4) tensor over (tp=2)",
        "head.weight: no rule",
        "rule 'embed' speaks for embed.weight and misses head.weight",
        "way out:     name both in the rules",
    )


def test_two_names_of_one_storage_that_lie_alike_are_saved(tmp_path: Path) -> None:
    world = World(2)
    whole = torch.arange(24.0).reshape(6, 4)

    def state_dict(rank: int) -> dict[str, Any]:
        tied = whole.chunk(2)[rank].clone()
        return {"embed.weight": tied, "head.weight": tied}

    rules = ruled(world, "weight", {"tp": Shard(0)}, tp=2)
    world.save(tmp_path, state_dict, lambda rank: PlacementSavePlanner(rules(rank)))
    read = {"embed.weight": torch.zeros(6, 4), "head.weight": torch.zeros(6, 4)}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(tensor, whole) for tensor in read.values())


def test_all_faults_of_all_ranks_are_told_at_once_sorted_by_name(tmp_path: Path) -> None:
    world = World(2)
    mesh_of = world.mesh

    def state_dict(rank: int) -> dict[str, Any]:
        return {
            "z.bias": torch.zeros(3),
            "a.w": FakeDTensor(torch.zeros(3), mesh_of(rank, tp=2), [Partial()], (3,)),
            "m.w": FakeDTensor(torch.zeros(3, 1), mesh_of(rank, tp=2), [Shard(0)], (9, 1)),
            "fine": torch.zeros(2),
        }

    rules = ruled(world, "z", {"tp": Shard(1)}, tp=2)
    messages = refused_saves(tmp_path, world, state_dict, rules)
    assert set(messages) == {0}
    text = messages[0]
    assert text.startswith("ranks 0-1 cannot be placed in the checkpoint (4 faults)\n")
    entries = [line.split(": ")[0] for line in text.splitlines() if line[0] != " "]
    assert entries[1:] == ["a.w", "m.w", "m.w", "z.bias"]
    assert_says(
        text, "m.w: holds a (3, 1) tensor where (5, 1) was declared\n    on:          rank 0"
    )
    assert_says(
        text, "m.w: holds a (3, 1) tensor where (4, 1) was declared\n    on:          rank 1"
    )
    assert text.count("on: ") == 2, "what both ranks have names no ranks again"


# What only all ranks together show.


def test_experts_taken_for_replicas_name_the_axis_that_is_to_be_sharded(tmp_path: Path) -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, edp=2)
        mine = torch.arange(12.0).reshape(4, 3) + 100 * (mesh.get_coordinate() or (0,))[0]
        return {"layers.0.w1": mine}

    rules = ruled(world, "layers.0.w1", {}, ep=2, edp=2)
    message = refused_saves(tmp_path, world, state_dict, rules)[0]
    assert_says(
        message,
        "layers.0.w1: 2 different contents on 4 ranks that claim to be replicas",
        "[:, :] of (4, 3)",
        "ranks 0-1",
        "ranks 2-3",
        "differs along 'ep', agrees along 'edp'",
        "it is sharded over 'ep': it needs a rule with Shard on that axis",
        "way out:     PlacementRules({pattern: CheckpointPlacement(mesh, {axis: Shard(dim)})})",
        "by rule:     'layers.0.w1'",
    )


def test_shapes_that_differ_between_ranks_name_the_ranks(tmp_path: Path) -> None:
    world = World(3)
    message = refused_saves(
        tmp_path, world, lambda rank: {"w": torch.zeros(4 if rank < 2 else 5, 3)}, no_rules
    )[0]
    assert_says(message, "w: ", "(4, 3) on ranks 0-1", "(5, 3) on rank 2", "way out:", "no rule")


def test_a_rule_that_one_rank_lacks_is_told_as_that(tmp_path: Path) -> None:
    world = World(2)

    def rules(rank: int) -> PlacementRules:
        by_ep = CheckpointPlacement(world.mesh(rank, ep=2), {"ep": Shard(0)})
        return PlacementRules({"w": by_ep} if rank == 0 else {})

    message = refused_saves(tmp_path, world, lambda rank: {"w": torch.arange(6.0)}, rules)[0]
    assert_says(message, "(12,) on rank 0", "(6,) on rank 1", "the ranks have different rules")
    assert "global_shape=" not in message


def test_a_random_state_of_each_rank_under_one_key_is_told_to_take_the_rank_into_it(
    tmp_path: Path,
) -> None:
    message = refused_saves(
        tmp_path,
        World(2),
        lambda rank: {"rng": torch.arange(9, dtype=torch.uint8) + rank},
        no_rules,
    )[0]
    assert_says(
        message,
        "rng: 2 different contents",
        "likely:      a number or random state",
        "a name per rank (f'rng.{rank}')",
    )
    assert "PlacementRules" not in message


def test_dtypes_that_differ_between_ranks_name_the_ranks(tmp_path: Path) -> None:
    world = World(2)
    dtypes = (torch.float32, torch.bfloat16)
    message = refused_saves(
        tmp_path, world, lambda rank: {"w": torch.zeros(4, dtype=dtypes[rank])}, no_rules
    )[0]
    assert_says(message, "w: ", "float32 on rank 0", "bfloat16 on rank 1", "way out:     cast it")


def test_a_tensor_here_and_an_object_there_is_refused(tmp_path: Path) -> None:
    world = World(2)
    message = refused_saves(
        tmp_path, world, lambda rank: {"w": torch.zeros(2) if rank else 3}, no_rules
    )[0]
    assert_says(message, "w: is a tensor on rank 1, but another object on rank 0", "way out:")


def test_parts_that_overlap_name_the_boxes_and_ranks(tmp_path: Path) -> None:
    world = World(2)
    whole = torch.arange(12.0).reshape(6, 2)

    def rules(rank: int) -> PlacementRules | None:
        return ruled(world, "w", {"tp": Shard(0)}, tp=2)(rank) if rank else None

    message = refused_saves(
        tmp_path, world, lambda rank: {"w": whole[3:].clone() if rank else whole.clone()}, rules
    )[0]
    assert_says(
        message, "w: ", "(6, 2)", "overlap", "[:, :] by rank 0", "[3:6, :] by rank 1", "way out:"
    )


def test_elements_that_nobody_holds_name_the_hole_and_who_lacks_the_key(tmp_path: Path) -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        return {"other": torch.ones(2)} | ({"w": torch.ones(2, 3) * rank} if rank != 2 else {})

    rules = ruled(world, "w", {"ep": Shard(0)}, ep=4)
    message = refused_saves(tmp_path, world, state_dict, rules)[0]
    assert_says(
        message,
        "w: nobody holds all of the (8, 3) tensor",
        "[4:6, :] (6 of 24 elements)",
        "ranks 0-1, 3",
        "rank 2",
        "way out:",
        "by rule:     'w'",
    )


def test_what_is_wrong_over_all_ranks_is_told_at_once_sorted_by_name(tmp_path: Path) -> None:
    world = World(2)

    def state_dict(rank: int) -> dict[str, Any]:
        return {
            "z": torch.zeros(3 + rank),
            "k": torch.zeros(2) if rank else "text",
            "a": torch.full((2,), float(rank)),
        }

    messages = refused_saves(tmp_path, world, state_dict, no_rules)
    assert set(messages) == {0}
    assert "(3 faults)" in messages[0]
    assert [line[0] for line in messages[0].splitlines() if line[1:3] == ": "] == ["a", "k", "z"]


# What a checkpoint and a rank have against each other.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(
        {
            "experts.w1": torch.arange(24.0).reshape(8, 3),
            "norm": torch.arange(5.0),
            "note": "text",
        },
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    return tmp_path


def test_a_load_that_lacks_a_rule_names_both_shapes_and_the_factor(saved: Path) -> None:
    world = World(2)
    messages = refused_loads(saved, world, lambda rank: {"experts.w1": torch.zeros(4, 3)}, no_rules)
    assert set(messages) == {0}
    assert_says(
        messages[0],
        "experts.w1: the checkpoint holds a (8, 3) tensor, but (4, 3) is needed",
        "dim 0",
        "2 times",
        "axis of size 2",
        "way out:",
    )


def test_keys_that_the_checkpoint_lacks_are_named_with_those_like_it(saved: Path) -> None:
    world = World(1)
    message = refused_loads(
        saved,
        world,
        lambda rank: {"normal": torch.zeros(5), "elsewhere.b": torch.zeros(1)},
        no_rules,
    )[0]
    assert_says(
        message, "elsewhere.b: the checkpoint lacks this key", "normal: the checkpoint lacks"
    )
    assert_says(message, "norm", "rename=", "optional=[pattern]", "(2 faults)")


def test_ranks_that_read_different_checkpoints_are_refused(tmp_path: Path) -> None:
    """Every rank's load is right by itself; together they would be a mixture of two steps."""
    world = World(3)
    names = ("a", "b")
    for step, name in enumerate(names):
        world.save(
            tmp_path / name,
            lambda rank, step=step: {"w": torch.full((3,), float(step))},
            lambda rank, step=step: PlacementSavePlanner(step=step),
        )

    def load(reader: Ranked) -> dict[int, str]:
        return refusals(
            lambda: world.load(
                tmp_path,
                lambda rank: {"w": torch.zeros(3)},
                lambda rank: PlacementLoadPlanner(),
                reader,
            )
        )

    message = load(lambda rank: dcp.FileSystemReader(tmp_path / names[rank == 2]))[0]
    assert_says(
        message,
        "the ranks read different checkpoints",
        "(step 0) by ranks 0-1",
        "(step 1) by rank 2",
        "choose the directory on one rank",
    )
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "stock")
    message = load(lambda rank: dcp.FileSystemReader(tmp_path / ("a", "a", "stock")[rank]))[0]
    assert_says(message, "(step 0) by ranks 0-1", "one without a save id by rank 2")


def test_parts_that_ranks_saved_alone_are_not_taken_for_different_checkpoints(
    tmp_path: Path,
) -> None:
    world = World(2)
    world.save(
        tmp_path,
        lambda rank: {f"w{rank}": torch.ones(3)},
        lambda rank: PlacementSavePlanner(),
        use_collectives=False,
    )

    class OwnMetadata(dcp.FileSystemReader):
        """Reads what a rank wrote, as torch does where there is no global metadata."""

        def __init__(self, rank: int) -> None:
            super().__init__(tmp_path)
            self.own = rank

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return super().read_metadata(rank=self.own)

    loaded = world.load(
        tmp_path,
        lambda rank: {f"w{rank}": torch.zeros(3)},
        lambda rank: PlacementLoadPlanner(),
        OwnMetadata,
    )
    assert loaded[1]["w1"].tolist() == [1, 1, 1]


def test_objects_and_tensors_are_not_taken_for_each_other(saved: Path) -> None:
    world = World(1)
    rules = ruled(world, "note", {"tp": Replicate()}, tp=1)
    message = refused_loads(saved, world, lambda rank: {"note": torch.zeros(2)}, rules)[0]
    assert_says(
        message, "note: the checkpoint holds an object, but the state dict a tensor", "way out:"
    )
    message = refused_loads(saved, world, lambda rank: {"norm": "text"}, no_rules)[0]
    assert_says(
        message, "norm: the checkpoint holds a (5,) tensor, but the state dict a str", "way out:"
    )


def test_a_refused_load_leaves_every_tensor_as_it_was(saved: Path) -> None:
    world = World(2)
    held = [
        {"experts.w1": torch.full((4, 3), 7.0), "norm": torch.full((5,), 7.0)} for _ in range(2)
    ]
    messages = refused_loads(saved, world, held.__getitem__, no_rules)
    assert all("norm" not in text for text in messages.values())
    assert all(bool((tensor == 7).all()) for state in held for tensor in state.values())


def test_faults_of_placing_and_reading_come_in_one_error(saved: Path) -> None:
    world = World(2)
    rules = ruled(world, "norm", {"tp": Shard(1)}, tp=2)
    messages = refused_loads(
        saved, world, lambda rank: {"norm": torch.zeros(5), "absent": torch.zeros(1)}, rules
    )
    assert_says(messages[0], "absent: the checkpoint lacks", "norm: holds a tensor of 1 dim")


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("layers.3.mlp.experts.0.w1", "experts.{}"),
        ("layers.3.mlp.local_experts.0.fc1.weight", "local_experts.{}"),
        ("layers.3.mlp.experts.linear_fc1.weight0", "experts.linear_fc1.weight{}"),
    ],
)
def test_experts_that_are_numbered_from_0_are_to_be_renamed_before_they_are_sharded(
    tmp_path: Path, key: str, pattern: str
) -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        return {key: torch.full((3, 2), 1.0 + rank // 2)}

    rules = ruled(world, "other", {"ep": Shard(0)}, ep=2, edp=2)
    text = refused_saves(tmp_path, world, state_dict, rules)[0]
    assert_says(
        text,
        "likely:      different experts under one name: every rank counts its own from 0",
        f'way out:     rename=Renumber("{pattern}", this rank\'s experts, total=)\n',
    )
    assert text.index("rename=Renumber") < text.index("Shard(dim)")
    assert Renumber(pattern, [5], total=8)(key) != key, "the pattern fits the key"


def test_a_stack_of_local_numbers_needs_a_renumber_before_it(tmp_path: Path) -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        return {f"layers.0.experts.{n}.w1": torch.full((3, 2), 10.0 * rank + n) for n in range(2)}

    def planner(rank: int) -> PlacementSavePlanner:
        return PlacementSavePlanner(rename=Stack("experts.{}", 2))

    messages = refusals(lambda: world.save(tmp_path, state_dict, planner))
    assert_says(
        messages[0],
        "layers.0.experts.w1: 4 different contents on 4 ranks that claim to be replicas",
        "a Stack has local numbers, which every rank counts from 0",
        "way out:     a Renumber before the Stack: rename=Renames(Renumber(",
    )
    assert "Shard(dim)" not in messages[0]


def test_copies_that_either_of_two_axes_tells_apart_name_both(tmp_path: Path) -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        return {"w": torch.full((3, 2), 1.0 + rank)} if rank in (0, 3) else {}

    rules = ruled(world, "w", {}, ep=2, tp=2)
    messages = refused_saves(tmp_path, world, state_dict, rules)
    assert_says(
        messages[0],
        "differs along 'ep', 'tp'",
        "it is sharded over 'ep' or 'tp': it needs a rule with Shard on one of these axes",
    )


# What several ranks are refused for.


def test_a_fault_of_several_ranks_stands_once_with_its_ranks(saved: Path) -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        held = {"absent": torch.zeros(1), "norm": torch.zeros(5 if rank < 2 else 6)}
        return held | ({f"late.{rank}.w": torch.zeros(2)} if rank % 2 else {})

    messages = refused_loads(saved, world, state_dict, no_rules)
    assert set(messages) == {0}, "one rank speaks for all"
    text = messages[0]
    assert text.startswith("ranks 0-3 cannot be loaded from this checkpoint (4 faults)\n")
    assert text.count("the checkpoint lacks this key") == 1
    assert text.count("way out:") == 2
    assert_says(
        text,
        "absent, late.1.w, late.3.w: the checkpoint lacks this key",
        "on:          ranks 0-3, some of the keys on fewer",
        "norm: the checkpoint holds a (5,) tensor, but (6,) is needed",
        "on:          ranks 2-3",
    )


def test_names_that_cannot_be_renamed_stand_once_with_their_ranks(saved: Path) -> None:
    world = World(4)

    def planner(rank: int) -> PlacementLoadPlanner:
        return PlacementLoadPlanner(rename=Renumber("experts.{}", [rank], total=4))

    def state_dict(rank: int) -> dict[str, Any]:
        held = {"norm": torch.zeros(5)}
        return held | ({"experts.1.w": torch.zeros(2)} if rank > 1 else {})

    messages = refusals(lambda: world.load(saved, state_dict, planner))
    assert set(messages) == {0}
    assert messages[0].startswith("ranks 2-3 cannot be loaded from this checkpoint (2 faults)\n")
    assert_says(messages[0], "experts.1.w: local number 1 of experts.{}", "0 -> 2 (of 4)")


def test_a_refusal_is_not_lost_where_the_coordinator_has_another_planner(saved: Path) -> None:
    world = World(2)

    def planner(rank: int) -> Any:
        return PlacementLoadPlanner() if rank else dcp.DefaultLoadPlanner()

    messages = refusals(
        lambda: world.load(saved, lambda rank: {"absent": torch.zeros(1)} if rank else {}, planner)
    )
    assert_says(messages[1], "rank 1 cannot be loaded from this checkpoint (1 fault)", "absent: ")


def test_what_many_ranks_send_is_bounded(saved: Path) -> None:
    world = World(2)
    keys = MAX_SENT + 500

    def state_dict(rank: int) -> dict[str, Any]:
        return {f"absent.{rank}.{at:05}": torch.zeros(1) for at in range(keys)}

    text = refused_loads(saved, world, state_dict, no_rules)[0]
    first = (
        f"ranks 0-1 cannot be loaded from this checkpoint; the first {MAX_SENT:,} faults of each"
    )
    assert text.startswith(f"{first} rank ({2 * MAX_SENT} faults)\n")
    assert len(text.splitlines()) < 200


# What passes with a warning.


def saving(
    path: Path, world: World, state_dict: Ranked, rules: Ranked
) -> tuple[SaveReport, list[str]]:
    """Save; return the coordinator's report and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planners = world.save(path, state_dict, lambda rank: PlacementSavePlanner(rules(rank)))
    assert isinstance(planners[0], PlacementSavePlanner)
    messages = [
        str(each.message) for each in caught if "existing checkpoint" not in str(each.message)
    ]
    return planners[0].report, messages


def test_a_pattern_that_matches_nothing_anywhere_is_warned_about_and_reported(
    tmp_path: Path,
) -> None:
    world = World(2)
    rules = PlacementRules({"expert.w1": None, "norm": None})
    report, messages = saving(
        tmp_path, world, lambda rank: {"norm": torch.ones(3)}, lambda rank: rules
    )
    assert report.unmatched == ("expert.w1",)
    assert len(messages) == 1
    assert_says(messages[0], "'expert.w1'", "no key on any rank matches", "norm", "way out:")
    assert "unmatched" in str(report)


@pytest.mark.parametrize(("first", "other"), [("full", "sampled"), ("sampled", "off")])
def test_ranks_that_do_not_agree_on_digests_are_refused(
    tmp_path: Path, first: str, other: str
) -> None:
    with pytest.raises(CheckpointException) as refused:
        World(3).save(
            tmp_path,
            lambda rank: {"w": torch.ones(3)},
            lambda rank: PlacementSavePlanner(digests=other if rank == 2 else first),
        )
    text = str(refused.value.failures[0][0])
    assert_says(text, "this save: the ranks do not agree on digests=:", "rank 2", "ranks 0-1")
    assert_says(
        text, repr(first), repr(other), "way out:     give every rank's PlacementSavePlanner"
    )
    assert not (tmp_path / ".metadata").exists()


def test_a_rules_function_that_fails_is_named_with_key_and_rank(tmp_path: Path) -> None:
    def by_name(fqn: str, tensor: torch.Tensor) -> CheckpointPlacement | None:
        return {"norm": None}[fqn]  # type: ignore[return-value]

    world = World(2)
    with pytest.raises(CheckpointException) as refused:
        world.save(
            tmp_path,
            lambda rank: {"norm" if not rank else "head": torch.ones(3)},
            lambda rank: PlacementSavePlanner(by_name),
        )
    error = refused.value.failures[1][0]
    assert_says(
        str(error),
        "head: the rules fail on rank 1: KeyError: 'head'",
        "raised:      ",
        "test_messages.py:",
        "in by_name",
        "by_name()",
        "way out:     a CheckpointPlacement for this tensor, or None",
    )
    assert isinstance(error, PlacementError)
    assert isinstance(error.__cause__, KeyError)


@pytest.mark.parametrize("parts", [(4, 4), (7, 9)])
def test_wrong_parts_get_advice_on_parts(tmp_path: Path, parts: tuple[int, ...]) -> None:
    world = World(2)
    with pytest.raises(CheckpointException) as refused:
        world.save(
            tmp_path,
            lambda rank: {"gate_up": torch.ones(8, 3)},
            lambda rank: PlacementSavePlanner(
                PlacementRules(
                    {
                        "gate_up": CheckpointPlacement(
                            world.mesh(rank, tp=2), {"tp": FusedShard(0, parts)}
                        )
                    }
                )
            ),
        )
    text = str(refused.value.failures[0][0])
    assert_says(
        text,
        "way out:     parts= of FusedShard: the number of equal tensors in the dim, or the rows of "
        "each, over all ranks together; global_shape= where ranks hold unequal rows",
    )
    assert "IndexShard" not in text


def test_a_pattern_that_matches_on_one_rank_only_is_no_warning(tmp_path: Path) -> None:
    """Pipeline stages share one set of rules."""
    world = World(2)
    rules = PlacementRules({"embed": None, "head": None})
    names = ("embed", "head")
    report, messages = saving(
        tmp_path, world, lambda rank: {names[rank]: torch.ones(3)}, lambda rank: rules
    )
    assert report.unmatched == ()
    assert messages == []
    assert set(report.partial_keys) == {"embed", "head"}
    assert report.partial_keys["head"] == (1,)


def test_a_pattern_behind_a_more_general_one_never_speaks_and_is_warned_about(
    tmp_path: Path,
) -> None:
    world = World(1)
    rules = PlacementRules({"head": None, "hc_head.weight": None, "model.head.weight": None})
    report, messages = saving(
        tmp_path,
        world,
        lambda rank: {"model.head.weight": torch.ones(3), "hc_head.weight": torch.ones(2)},
        lambda rank: rules,
    )
    assert report.unmatched == ("model.head.weight",)
    assert len(messages) == 1


def test_axes_that_need_more_ranks_than_there_are_name_their_sizes(tmp_path: Path) -> None:
    """A rule for ep over all ranks, beside a DTensor over half of them."""
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)["fsdp"]
        return {"experts.w": FakeDTensor.distribute(torch.ones(8, 3), mesh, [Shard(0)])}

    def rules(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, ep=4)
        return PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})

    message = refused_saves(tmp_path, world, state_dict, rules)[0]
    assert_says(message, "nobody holds all of the (32, 3) tensor")
    assert_says(message, "'ep' of size 4 and 'fsdp' of size 2 need 8 ranks, and there are 4: two")


def test_an_object_that_differs_names_the_rank_whose_copy_is_kept(tmp_path: Path) -> None:
    world = World(4)
    with pytest.warns(UserWarning, match="step: this object differs"):
        planners = world.save(
            tmp_path,
            lambda rank: {"w": torch.ones(3), **({"step": 6 + rank} if rank else {})},
            lambda rank: PlacementSavePlanner(),
        )
    (warning,) = planners[0].report.warnings
    assert_says(warning, "rank 1; rank 2; rank 3; that of rank 1 is kept", "make it equal on all")
    read = {"step": 0}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert read["step"] == 7


def test_ranks_that_write_into_different_directories_are_warned_about(tmp_path: Path) -> None:
    """A name with the time of day in it differs between ranks now and then."""
    with pytest.warns(UserWarning, match="different directories") as caught:
        planners = World(3).save(
            tmp_path,
            lambda rank: {"w": torch.ones(3), f"w{rank}": torch.ones(3)},
            lambda rank: PlacementSavePlanner(),
            lambda rank: dcp.FileSystemWriter(tmp_path / ("at-59", "at-59", "at-60")[rank]),
        )
    (warning,) = planners[0].report.warnings
    assert warning in str(caught[0].message)
    assert_says(warning, "2 different directories: ranks 0-1; rank 2", "choose the name on one")


@pytest.mark.parametrize(
    ("patterns", "likely"),
    [
        (["expert"], "'expert' is no component of any key; 'experts' is"),
        (["module.layers.*.experts"], "'layers.*.experts' would match"),
        ([r"layers\\.\\d+\\.experts"], "compile it: re.compile(...)"),
        (["layers", "experts"], "a pattern above it takes the keys"),
        (["attention"], None),
    ],
)
def test_a_pattern_that_matches_nothing_is_told_why(
    tmp_path: Path, patterns: list[str], likely: str | None
) -> None:
    with pytest.warns(UserWarning, match="no key on any rank matches") as caught:
        World(1).save(
            tmp_path,
            lambda rank: {"layers.0.experts.w1": torch.ones(3)},
            lambda rank: PlacementSavePlanner(PlacementRules(dict.fromkeys(patterns))),
        )
    message = str(caught[0].message)
    assert ("likely:" in message) == (likely is not None)
    assert (likely or "") in message


def test_a_rule_that_shards_another_dim_on_some_ranks_is_told_as_that(tmp_path: Path) -> None:
    world = World(2)

    def rules(rank: int) -> PlacementRules:
        return PlacementRules({"w": CheckpointPlacement(world.mesh(rank, ep=2), [Shard(rank)])})

    message = refused_saves(tmp_path, world, lambda rank: {"w": torch.ones(4, 3)}, rules)[0]
    assert_says(message, "the ranks have different rules")
    assert "global_shape=" not in message


def test_a_wrong_global_shape_over_a_dtensor_is_told_as_that(tmp_path: Path) -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)["fsdp"]
        return {"w": FakeDTensor.distribute(torch.ones(4, 3), mesh, [Shard(0)])}

    rules = ruled(world, "w", {"ep": Shard(0)}, (10, 3), ep=2, fsdp=2)
    message = refused_saves(tmp_path, world, state_dict, rules)[0]
    assert_says(message, "likely:      a wrong global_shape=", "correct global_shape=")


def test_a_rank_with_another_planner_is_refused_by_its_position(tmp_path: Path) -> None:
    def save(stock: int) -> str:
        with pytest.raises(CheckpointException) as refused:
            World(2).save(
                tmp_path,
                lambda rank: {"w": torch.ones(3)},
                lambda rank: dcp.DefaultSavePlanner() if rank == stock else PlacementSavePlanner(),
            )
        return str(refused.value.failures[0][0])

    assert_says(save(1), "1 of 2 ranks planned it with another planner", "position 1")
    assert_says(save(0), "the coordinator uses another planner")


def test_objects_that_differ_between_ranks_are_warned_about(tmp_path: Path) -> None:
    world = World(3)
    _, messages = saving(tmp_path, world, lambda rank: {"rng": f"state of {rank > 0}"}, no_rules)
    assert len(messages) == 1
    assert_says(messages[0], "rng: this object differs", "rank 0", "ranks 1-2", "way out:")


def test_a_sound_save_says_nothing_and_reports_what_it_wrote(tmp_path: Path) -> None:
    world = World(4)
    whole = torch.arange(48.0).reshape(8, 6)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, dp=2)
        part = whole.chunk(2)[(mesh.get_coordinate() or (0,))[0]]
        return {"experts": {"w1": part.clone()}, "step": 3}

    rules = ruled(world, "experts.w1", {"ep": Shard(0)}, ep=2, dp=2)
    report, messages = saving(tmp_path, world, state_dict, rules)
    assert messages == []
    assert report.ranks == 4
    assert report.unique_nbytes == report.whole_nbytes == whole.nbytes
    assert report.replica_nbytes == whole.nbytes
    assert report.objects == ("step",)
    assert report.rules == {"'experts.w1'": 1}
    entry = report.keys["experts.w1"]
    assert (entry.shape, entry.dtype, entry.chunks, entry.copies) == ((8, 6), "float32", 2, 2.0)
    assert_says(str(report), "1 tensor and 1 object from 4 ranks", "'experts.w1'")


# The form of the text.


def test_faults_are_sorted_counted_and_indented() -> None:
    faults = [
        Fault("b.w", "is wrong", ("found:  1", "way out: 2")),
        Fault("a.w", "is worse"),
        Fault("b.w", "is wrong", ("found:  1", "way out: 2")),
    ]
    assert format_faults("this cannot be", faults) == (
        "this cannot be (2 faults)\na.w: is worse\nb.w: is wrong\n    found:  1\n    way out: 2"
    )
    assert format_faults("look", faults[:1], "note").startswith("look (1 note)\nb.w: is wrong")


def test_keys_with_one_fault_are_told_together() -> None:
    faults = [
        Fault(f"layers.{i}.w", "is wrong", ("way out: 2",), (f"place: {i}",)) for i in range(3)
    ]
    assert format_faults("no", faults) == (
        "no (3 faults)\n"
        "layers.0.w, layers.1.w, layers.2.w: is wrong\n"
        "    place: 0 (of layers.0.w)\n"
        "    way out: 2"
    )


def test_a_thousand_faults_stay_readable() -> None:
    same = [Fault(f"w{i:04}", "is wrong") for i in range(1000)]
    different = [Fault(f"v{i:04}", f"is wrong by {i}") for i in range(1000)]
    for faults in (same, different):
        text = format_faults("no", faults)
        assert "(1000 faults)" in text
        assert len(text) < 5000
        assert "more" in text


def test_nothing_is_raised_where_nothing_is_wrong() -> None:
    raise_faults("no", [])
    with pytest.raises(PlacementError, match=r"no \(1 fault\)\nw: is wrong"):
        raise_faults("no", iter([Fault("w", "is wrong")]))
    assert issubclass(PlacementError, ValueError)


def test_a_pattern_with_a_slip_is_told_of_with_what_it_leads_to(tmp_path: Path) -> None:
    """The refusal is about replicas; its cause is the pattern, which so far was only warned of."""
    world = World(2)

    def rules(rank: int) -> PlacementRules:
        return PlacementRules({"expert": CheckpointPlacement(world.mesh(rank, ep=2), [Shard(0)])})

    with pytest.raises(CheckpointException) as caught:
        world.save(
            tmp_path,
            lambda rank: {"experts.w1": torch.full((4, 3), float(rank))},
            lambda rank: PlacementSavePlanner(rules(rank)),
        )
    message = str(caught.value.failures[0][0])
    assert "'expert': no key on any rank matches" in message
    assert "experts.w1: 2 different contents" in message
    assert "rank 1 (ep=1)" in message
    assert "differs along 'ep'" in message
