"""What a user declares by pattern and no key matches is named, decided over all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, refused, warned, without_warning
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Replace,
    SaveReport,
    Split,
    Stack,
    Unstack,
)
from dcp_placements.testing import World

WORLD = World(2)
NOWHERE = "no key on any rank matches"


def experts(rank: int) -> dict[str, Any]:
    """Two of four experts by local number, and a norm; the same names on both ranks."""
    own = {f"experts.{i}.w": arange(2, 3, start=100 * rank + 10 * i) for i in range(2)}
    return {**own, "norm": torch.ones(3)}


def stages(rank: int) -> dict[str, Any]:
    """The embedding on the first stage, the head on the last, a layer on each."""
    return {("embed", "head")[rank]: torch.ones(2), "layers.0.w": arange(3, start=rank)}


def save(
    path: Path, state: Any, world: World = WORLD, rename: Any = None, **options: Any
) -> SaveReport:
    """Save; ``rename`` is called with each rank. Return the report on the whole save."""
    planners = world.save(
        path,
        state,
        lambda rank: PlacementSavePlanner(rename=rename and rename(rank), **options),
    )
    assert isinstance(planners[0], PlacementSavePlanner)
    return planners[0].report


def load(
    path: Path, state: Any, rules: Any = None, *, rename: Any = None, **options: Any
) -> list[dict[str, Any]]:
    """Load; ``rules`` and ``rename`` are called with each rank."""
    return WORLD.load(
        path,
        state,
        lambda rank: PlacementLoadPlanner(
            rules and rules(rank), rename=rename and rename(rank), **options
        ),
    )


def numbers(rank: int) -> Renumber:
    return Renumber("experts.{}", range(2 * rank, 2 * rank + 2), 4)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Renumber("expert.{}", [0, 1], None), "rename=Renumber('expert.{}')"),
        (Renumber("expert{at}.layers.{}", {"": [0]}, 2), "rename=Renumber('expert{at}.layers.{}')"),
        (Replace("module", ""), "rename=Replace('module')"),
        (Stack("expert.{}", 4), "rename=Stack('expert.{}')"),
        (Unstack("stacked.{}"), "rename=Unstack('stacked.{}')"),
        (Split("gate_up", ("gate", "up")), "rename=Split('gate_up')"),
    ],
)
def test_a_rename_that_matches_nothing_is_named(tmp_path: Path, step: Any, text: str) -> None:
    def rename(rank: int) -> Renames:
        return Renames(numbers(rank), step)

    with warned() as of_save:
        report = save(tmp_path, experts, rename=rename)
    assert f"{text}: {NOWHERE}" in of_save[0]
    assert report.unmatched == (text,)
    with warned() as of_load:
        load(tmp_path, experts, rename=rename)
    assert f"{text}: {NOWHERE}" in of_load[0]


def test_the_likely_cause_of_a_misspelt_rename_is_named(tmp_path: Path) -> None:
    rename = Renumber("expert.{}", [0, 1], None)
    with refused() as refusal:
        save(tmp_path, experts, rename=lambda rank: rename)
    refusal.says(
        "2 different contents on 2 ranks",
        f"rename=Renumber('expert.{{}}'): {NOWHERE}",
        "likely:      'expert' is no component of any key; 'experts' is",
        "optional=True of rules and Renames",
    )


@pytest.mark.parametrize(
    "rename",
    [
        # The numbers of rank 0 stay, and it is the only one that has the embedding.
        lambda rank: Renames(
            Renumber("layers.{}", range(rank, rank + 1), 2), Replace("embed", "e")
        ),
        # The last stage has another step than the first.
        lambda rank: Replace(("embed", "head")[rank], "ends"),
        # A function may leave every key as it is.
        lambda rank: Renames(Renumber("layers.{}", [rank], 2), lambda key: key),
        lambda rank: Renames(
            Renumber("layers.{}", [rank], 2), Renames(Replace("module", ""), optional=True)
        ),
    ],
)
def test_a_rename_that_matches_on_some_rank_is_quiet(
    tmp_path: Path, rename: Callable[[int], Any]
) -> None:
    def state(rank: int) -> dict[str, Any]:
        if isinstance(rename(0), Renames):
            return stages(rank)
        return {("embed", "head")[rank]: torch.ones(2)}

    with without_warning():
        report = save(tmp_path, state, rename=rename)
        load(tmp_path, state, rename=rename)
    assert report.unmatched == ()


def test_a_rank_that_saves_by_itself_does_not_judge_a_rename(tmp_path: Path) -> None:
    with warned() as texts, WORLD._as(1):
        planner = PlacementSavePlanner(rename=Replace("module", ""))
        planner.set_up_planner({"w": torch.ones(2)}, is_coordinator=True)
        planner.create_global_plan([planner.create_local_plan()])
    assert planner.report.unmatched == ()
    assert not any(NOWHERE in text for text in texts)


def test_optional_patterns_may_name_no_key(tmp_path: Path) -> None:
    """One declaration serves models with and without the keys."""
    with without_warning():
        report = save(tmp_path, experts, rename=numbers)
        loaded = load(tmp_path, lambda rank: {"norm": torch.zeros(3)}, optional=["rng.*"])
    assert report.unmatched == ()
    assert torch.equal(loaded[1]["norm"], torch.ones(3))


def test_a_load_that_lacks_keys_names_what_matches_nothing(tmp_path: Path) -> None:
    """A misspelt step leaves the keys as they are; the checkpoint has them under other names."""
    save(tmp_path, lambda rank: {"layers.w": torch.ones(4)}, World(1))

    def rules(rank: int) -> PlacementRules:
        placement = CheckpointPlacement(WORLD.mesh(rank, tp=2), {"tp": Shard(0)})
        return PlacementRules({"layers": placement})

    with refused() as refusal:
        load(
            tmp_path,
            lambda rank: {"module.layers.w": torch.zeros(2)},
            rules,
            rename=lambda rank: Replace("modul", ""),
        )
    refusal.says("module.layers.w", "the checkpoint lacks", f"rename=Replace('modul'): {NOWHERE}")


def test_a_rule_for_a_scalar_or_an_object_applies_to_nothing(tmp_path: Path) -> None:
    rules = PlacementRules({"step": None, "w": None})
    with warned() as texts:
        WORLD.save(
            tmp_path,
            lambda rank: {"w": torch.ones(2), "step": 3, "o.step": torch.tensor(3)},
            lambda rank: PlacementSavePlanner(rules),
        )
    assert f"'step': {NOWHERE}" in texts[0]


def test_a_waiver_that_names_nothing_on_any_rank_is_named(tmp_path: Path) -> None:
    with warned() as texts:
        save(tmp_path / "a", experts, rename=numbers, waive={"nrm": "mine", "norm": "mine"})
    (text,) = texts
    assert f"waive={{'nrm': ...}}: {NOWHERE}" in text
    assert "'norm' is" in text
    with warned() as texts:
        load(tmp_path / "a", experts, rename=numbers, waive={"experts.7.*": "frozen"})
    assert any(f"waive={{'experts.7.*': ...}}: {NOWHERE}" in text for text in texts)


def test_a_waiver_that_nothing_needs_is_no_mistake(tmp_path: Path) -> None:
    """Not one of a key of another rank, of ``whole=``, of a rename, or of what is not loaded."""
    waive = {"embed": "only on the first", "head": "only on the last", "layers.*": "both"}
    whole = {"embed": (2,), "head": (2,), "layers.0.w": (3,), "missing.w": (3,)}
    same = {"layers.0.w": arange(3), "embed": torch.ones(2), "head": torch.ones(2)}
    with without_warning():
        save(tmp_path / "a", lambda _: same, waive=waive)
        load(tmp_path / "a", lambda _: {"head": torch.zeros(2)}, waive=waive)
        save(
            tmp_path / "b", lambda _: same, whole=whole, waive={**waive, "missing.w": "never made"}
        )

    def numbered(rank: int) -> Any:
        return Renumber("experts.{}", [2 * rank, 2 * rank + 1], total=8)

    with without_warning():
        save(tmp_path / "c", experts, rename=numbered, waive={"experts.*": "the others are frozen"})
        load(tmp_path / "c", experts, rename=numbered, waive={"experts.{}": "the others"})
