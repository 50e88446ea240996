"""The numbers of all ranks together: what is missing is reported."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    MeshCoordinate,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Replace,
    Stack,
    Unstack,
    contiguous,
)
from dcp_placements.names.rename_results import Rename
from dcp_placements.presets import hub
from dcp_placements.testing import World, real_dtensor
from tests.storage_scenes import save_no_dist


def experts(count: int, *, layers: Sequence[int] = (3, 4), state: int = 99) -> dict[str, Any]:
    """Return so many local experts, with optimizer state of the first ``state``."""
    held: dict[str, Any] = {}
    for layer in layers:
        for i in range(count):
            name = f"layers.{layer}.mlp.experts.{i}.w1"
            held[f"model.{name}"] = torch.ones(2)
            held[f"optim.param_groups.{name}.lr"] = 0.1
            if i < state:
                held[f"optim.state.{name}.exp_avg"] = torch.ones(2)
    return held


def refusal(
    size: int,
    held: Callable[[int], dict[str, Any]],
    rename: Callable[[int], Rename],
    **options: Any,
) -> str:
    with pytest.raises(CheckpointException) as refused:
        World(size).check(held, lambda rank: PlacementSavePlanner(rename=rename(rank), **options))
    return str(refused.value.failures[0][0])


def test_numbers_that_no_rank_has_are_listed_with_those_that_there_are() -> None:
    message = refusal(
        2,
        lambda rank: experts(3),
        lambda rank: Renumber("experts.{}", [[0, 1, 2], [5, 6, 7]][rank], total=9),
    )
    assert "experts.{}: no rank holds 3-4, 8 of 0-8" in message
    assert "model.layers.3-4.mlp.experts.{}" in message
    assert "held are:    0-2, 5-7" in message
    assert "total=None" in message


def test_one_wrong_layer_of_a_map_by_layer_is_found() -> None:
    def rename(rank: int) -> Renumber:
        by_layer = {3: [2 * rank, 2 * rank + 1], 4: [0, 1]}
        return Renumber("layers.{layer}.mlp.experts.{}", by_layer, total=4)

    message = refusal(2, lambda rank: experts(2), rename)
    assert "layers.4.mlp.experts.{}: no rank holds 2-3 of 0-3" in message
    assert "model.layers.3" not in message


def test_a_stage_that_is_not_there_is_found_behind_its_dropped_prefix() -> None:
    def rename(rank: int) -> Renames:
        return Renames(
            Renumber("model_pp*.layers.{}", contiguous([2, 2, 2], at=rank), total=6),
            Replace("model_pp*", "model"),
        )

    message = refusal(
        2,
        lambda rank: {f"model_pp{rank}.layers.{i}.w": torch.ones(2) for i in range(2)},
        rename,
    )
    assert "model.layers.{}: no rank holds 4-5 of 0-5" in message


def test_ranks_that_do_not_agree_on_the_total_are_told() -> None:
    message = refusal(
        2,
        lambda rank: experts(2),
        lambda rank: Renumber("experts.{}", contiguous([2, 2], rank), total=4 + rank),
    )
    assert "experts.{}: the ranks do not agree on total=: 4 on rank 0; 5 on rank 1" in message


def test_ranks_of_a_load_have_to_agree_on_the_total(tmp_path: Path) -> None:
    def rename(rank: int, more: int = 0) -> Rename:
        return Renumber("experts.{}", contiguous([2, 2], rank), total=4 + more)

    world = World(2)
    world.save(tmp_path, lambda rank: experts(2), lambda r: PlacementSavePlanner(rename=rename(r)))
    with pytest.raises(CheckpointException) as refused:
        world.load(
            tmp_path,
            lambda rank: experts(2),
            # Without the waiver, rank 1 alone is refused: its total is not that of the save.
            lambda rank: PlacementLoadPlanner(
                rename=rename(rank, rank), waive={"experts": "another model"}
            ),
        )
    message = str(refused.value.failures[0][0])
    assert "experts.{}: the ranks do not agree on total=: 4 on rank 0; 5 on rank 1" in message


def stage(rank: int, *, first: int = 2) -> dict[str, Any]:
    return {f"pp{rank}.layers.{i}.w": torch.ones(2) for i in range(first if rank == 0 else 1)}


def numbered_stage(*later: Rename, before: Sequence[Rename] = ()) -> Callable[[int], Rename]:
    """Return renames of two stages, of two layers each, with other steps before and after."""

    def rename(rank: int) -> Renames:
        number = Renumber("layers.{}", contiguous([2, 2], at=rank), total=4)
        return Renames(*before, number, *later)

    return rename


def own_prefix(rank: int) -> Renames:
    number = Renumber("pp*.layers.{}", contiguous([2, 2], at=rank), total=4)
    return Renames(number, Replace(f"pp{rank}", "model"))


LATER_STEPS: dict[str, Callable[[int], Rename]] = {
    "a Replace by the name of the rank": own_prefix,
    "a Replace of any": numbered_stage(Replace("pp*", "model")),
    "a Replace of the component of the pattern": numbered_stage(
        Replace("pp*", "model"), Replace("layers", "blocks"), Replace("blocks", "layers")
    ),
    "a Replace before it": numbered_stage(before=[Replace("pp*", "model")]),
    "a function after it": numbered_stage(lambda key: "model" + key[3:]),
    "a function by a regular expression": numbered_stage(
        lambda key: re.sub(r"^pp\d+\.layers\.(\d+)", r"model.layers.\1", key)
    ),
    "a function around it": lambda rank: lambda key: own_prefix(rank)(key),
}


@pytest.mark.parametrize("rename", LATER_STEPS.values(), ids=LATER_STEPS)
def test_m119_a_missing_layer_is_found_whatever_later_steps_do(
    rename: Callable[[int], Rename],
) -> None:
    message = refusal(2, stage, rename)
    assert "model.layers.{}: no rank holds 3 of 0-3" in message
    assert "held are:    0-2" in message


def test_m119_a_step_that_takes_the_number_away_is_refused_by_name() -> None:
    def without_number(key: str) -> str:
        return "model.layers." + "ab"[int(key.split(".")[2]) % 2]

    for step, told in (
        (Replace("layers.*", "layer"), "is replaced by '"),
        (without_number, "without_number makes 'model.layers.a' of it"),
    ):
        message = refusal(1, lambda rank: stage(rank, first=1), numbered_stage(step))
        assert (
            "a later step of the rename takes away number 0, which Renumber('layers.{}'" in message
        )
        assert told in message


def test_m118_another_list_that_ends_alike_is_refused_with_the_longer_pattern() -> None:
    def held(rank: int) -> dict[str, Any]:
        of_model = {f"model.layers.{i}.w": torch.ones(2) for i in range(2)}
        return of_model | ({"mtp.layers.0.w": torch.ones(2)} if rank else {})

    def rename(pattern: str) -> Callable[[int], Rename]:
        return lambda rank: Renumber(pattern, contiguous([2, 2], at=rank), total=4)

    message = refusal(2, held, rename("layers.{}"))
    assert "mtp.layers.{}: no rank holds 0-1, 3 of 0-3" in message
    assert "it is another list than model.layers.{}, which is whole" in message
    assert "or:          Renumber('model.layers.{}', ...)" in message
    assert "\nmodel.layers" not in message
    planner = World(2).check(
        held, lambda rank: PlacementSavePlanner(rename=rename("model.layers.{}")(rank))
    )
    assert "mtp.layers.0.w" in planner.report.keys  # type: ignore[attr-defined]


def test_m118_statistics_of_one_layer_are_another_list_and_can_be_waived() -> None:
    def held(rank: int) -> dict[str, Any]:
        layers = {f"model.layers.{i}.w": torch.ones(2) for i in range(2)}
        return layers | ({"stats.layers.1.tokens": torch.ones(2)} if rank else {})

    def rename(rank: int) -> Renumber:
        return Renumber("layers.{}", contiguous([2, 2], at=rank), total=4)

    assert "stats.layers.{}: no rank holds 0-2 of 0-3" in refusal(2, held, rename)
    planner = World(2).check(
        held, lambda rank: PlacementSavePlanner(rename=rename(rank), waive={"stats": "one layer"})
    )
    assert planner.report.warnings == ()  # type: ignore[attr-defined]


def experts_of_modules(experts: Sequence[int]) -> dict[str, Any]:
    """Return experts that are ``nn.Sequential``, whose modules have numbers, too."""
    return {
        f"layers.{layer}.experts.{i}.{module}.weight": torch.ones(2)
        for layer in range(2)
        for i in range(len(experts))
        for module in (0, 2)
    }


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("numbered", ["experts.{}", "layers.{layer}.experts.{}"])
def test_m140_numbers_of_modules_inside_an_expert_are_no_numbers_of_experts(
    stacked: bool, numbered: str
) -> None:
    def rename(rank: int) -> Rename:
        ids: Any = contiguous([4, 4], at=rank)
        if "layer}" in numbered:
            ids = {0: ids, 1: ids[::-1]}
        number = Renumber(numbered, ids, total=8)
        return Renames(number, Stack("experts.{}", 8)) if stacked else number

    planner = World(2).check(
        lambda rank: experts_of_modules(range(4)),
        lambda rank: PlacementSavePlanner(rename=rename(rank)),
    )
    report = planner.report  # type: ignore[attr-defined]
    assert report.warnings == ()
    assert len(report.keys) == (4 if stacked else 32)


def test_a_row_that_no_rank_has_is_missed_under_an_unstack() -> None:
    """Rank 1, which has rows 2 and 3, does not hold this key."""
    mesh = MeshCoordinate(("ep",), (2,), (0,))
    message = refusal(
        2,
        lambda rank: {"norm": torch.ones(2)} | ({} if rank else {"e.w": torch.ones(2, 3)}),
        lambda rank: Unstack("e.{}"),
        rules=PlacementRules({"e.w": CheckpointPlacement(mesh, {"ep": Shard(0)})}),
    )
    assert "e.{}: no rank holds 2-3 of 0-3" in message


def test_two_lists_that_one_rename_numbers_are_each_whole() -> None:
    """Layers and, in each, experts; under two patterns, and with another number of experts."""

    def held(rank: int) -> dict[str, Any]:
        return {
            f"model.layers.{i}.{name}.{e}.w": torch.ones(2)
            for i in range(2)
            for name, count in (("experts", 2), ("shared", 1))
            for e in range(count)
        }

    def rename(rank: int) -> Renames:
        layers = Renumber("layers.{}", contiguous([2, 2], at=rank // 2), total=4)
        experts = Renumber("experts.{}", contiguous([2, 2], at=rank % 2), total=4)
        return Renames(experts, layers, Replace("shared", "always"))

    planner = World(4).check(held, lambda rank: PlacementSavePlanner(rename=rename(rank)))
    report = planner.report  # type: ignore[attr-defined]
    assert report.warnings == ()
    assert len(report.keys) == 4 * (4 + 1)


@pytest.mark.parametrize(
    ("size", "held", "rename"),
    [
        pytest.param(
            4,
            lambda rank: experts(2),
            lambda rank: Renumber("experts.{}", contiguous([2, 2], rank % 2), total=4),
            id="replicas of a range",
        ),
        pytest.param(
            3,
            lambda rank: experts(2),
            lambda rank: Renumber("experts.{}", [[0, 1], [1, 2], [2, 0]][rank], total=3),
            id="repeats in lists",
        ),
        pytest.param(
            2,
            lambda rank: experts(2, state=1),
            lambda rank: Renumber("experts.{}", contiguous([2, 2], rank), total=4),
            id="experts that were never stepped",
        ),
        pytest.param(
            2,
            lambda rank: experts(2 - rank),
            lambda rank: Renumber("experts.{}", [[0, 1], [5]][rank], total=None),
            id="some left out on purpose",
        ),
    ],
)
def test_what_is_right_passes_without_a_word(size: int, held: Any, rename: Any) -> None:
    planner = World(size).check(held, lambda rank: PlacementSavePlanner(rename=rename(rank)))
    assert isinstance(planner, PlacementSavePlanner)
    assert planner.report.warnings == ()


@pytest.mark.parametrize("wrong", [False, True])
def test_dtensors_that_are_cut_by_fsdp_alone_count_by_key(wrong: bool) -> None:
    world = World(4)

    def held(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        return {
            f"experts.{i}.w1": real_dtensor(torch.ones(1, 2), mesh["fsdp"], [Shard(0)], (2, 2))
            for i in range(2)
        }

    def rename(rank: int) -> Renumber:
        ep = 0 if wrong else rank // 2
        return Renumber("experts.{}", contiguous([2, 2], ep), total=4)

    if wrong:
        assert "experts.{}: no rank holds 2-3 of 0-3" in refusal(4, held, rename)
    else:
        planner = world.check(held, lambda rank: PlacementSavePlanner(rename=rename(rank)))
        report = planner.report  # type: ignore[attr-defined]
        assert sorted(report.keys) == [f"experts.{i}.w1" for i in range(4)]


def test_a_key_of_another_dtype_on_one_rank_is_not_taken_for_missing() -> None:
    world = World(4)

    def held(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        kind = torch.float64 if rank == 3 else torch.float32
        part = torch.ones(1, 2, dtype=kind)
        return {"experts.0.w1": real_dtensor(part, mesh["fsdp"], [Shard(0)], (2, 2))}

    message = refusal(4, held, lambda rank: Renumber("experts.{}", [rank // 2], total=2))
    assert "experts.1.w1: the ranks do not agree on its dtype" in message
    assert "torch.float32 on rank 2; torch.float64 on rank 3" in message
    assert "no rank holds" not in message


def test_a_rank_that_saves_by_itself_does_not_see_the_rest(tmp_path: Path) -> None:
    for rank in range(2):
        rename = Renumber("experts.{}", contiguous([2, 2], rank), total=4)
        planner = PlacementSavePlanner(rename=rename)
        with warnings.catch_warnings(action="ignore"):
            save_no_dist(World(2), rank, tmp_path / f"{rank}", experts(2), planner)
        stored = dcp.FileSystemReader(tmp_path / f"{rank}").read_metadata().state_dict_metadata
        numbers = {key.split("experts.")[1].split(".")[0] for key in stored}
        assert numbers == {f"{2 * rank}", f"{2 * rank + 1}"}


def adapters(rank: int) -> dict[str, Any]:
    """Return adapters of layers 2 and 3 of a model of 6 layers, of which each rank holds two."""
    return {f"layers.{i}.lora.weight": torch.ones(2) for i in range(2)} if rank == 1 else {}


def layers_of(rank: int) -> Renumber:
    return Renumber("layers.{}", contiguous([2, 2, 2], at=rank), total=6)


def test_m80_a_save_of_some_layers_adapters_is_waived_by_pattern(tmp_path: Path) -> None:
    message = refusal(3, adapters, layers_of)
    assert "layers.{}: no rank holds 0-1, 4-5 of 0-5" in message
    assert "waive={pattern: reason} for this save" in message
    planners = World(3).save(
        tmp_path,
        adapters,
        lambda rank: PlacementSavePlanner(rename=layers_of(rank), waive={"lora": "adapters alone"}),
    )
    report = planners[0].report  # type: ignore[attr-defined]
    assert sorted(report.keys) == ["layers.2.lora.weight", "layers.3.lora.weight"]
    assert report.waived == {"lora": "adapters alone"}
    assert report.warnings == ()


def test_m80_a_waiver_of_other_keys_does_not_excuse_a_family_that_lacks_numbers() -> None:
    def held(rank: int) -> dict[str, Any]:
        return {"norm": torch.ones(3), **adapters(rank)}

    message = refusal(3, held, layers_of, waive={"norm": "fine"})
    assert "no rank holds 0-1, 4-5 of 0-5" in message


NESTED: dict[str, Callable[[Rename, Rename], Rename]] = {
    "flat": Renames,
    "the last": lambda one, other: Renames(one, Renames(other)),
    "the first": lambda one, other: Renames(Renames(one), other),
    "all": lambda one, other: Renames(Renames(one, Renames(other))),
}


@pytest.mark.parametrize("nested", NESTED.values(), ids=NESTED)
def test_m76_numbers_of_nested_renames_are_checked_as_those_of_flat_ones(
    nested: Callable[[Rename, Rename], Rename],
) -> None:
    rename = nested(Renumber("layers.{}", [0, 1], total=4), Replace("layers", "blocks"))
    held = {f"layers.{i}.w": torch.ones(2) for i in range(2)}
    message = refusal(2, lambda rank: held, lambda rank: rename)
    assert "blocks.{}: no rank holds 2-3 of 0-3" in message


@pytest.mark.parametrize("tensor", ["gate_up_proj", "down_proj"])
def test_a_row_that_no_rank_holds_is_found_under_the_hub_s_names(tensor: str) -> None:
    rows, key = ([0, 1], [1, 2]), f"layers.0.mlp.experts.{tensor}"

    def planner(rank: int) -> PlacementSavePlanner:
        mesh = MeshCoordinate(["ep"], [2], [rank])
        listed = {"ep": IndexShard(0, rows[rank])}
        rule = CheckpointPlacement(mesh, listed, global_shape=(4, 6, 2))
        return PlacementSavePlanner(PlacementRules({key: rule}), rename=hub.qwen3_moe)

    whole = torch.arange(48.0).reshape(4, 6, 2)
    with pytest.raises(CheckpointException) as refused:
        World(2).check(lambda rank: {key: whole[rows[rank]]}, planner)
    assert "layers.0.mlp.experts.{}" in str(refused.value.failures[0][0])
    assert "no rank holds 3 of 0-3" in str(refused.value.failures[0][0])
