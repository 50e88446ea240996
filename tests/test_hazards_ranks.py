"""Rows of ``hazards.md`` and the main job on four real gloo ranks, with real FSDP2 and AdamW.

One launch of ``tests/ranks/hazard_worker.py`` runs all scenarios and writes what each rank saw;
the tests assert on that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import tail, torchrun

pytestmark = pytest.mark.dist

WORKER = Path(__file__).parent / "ranks" / "hazard_worker.py"
RANKS = range(4)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank saw, by scenario."""
    out = tmp_path_factory.mktemp("ranks")
    # Sets are in another order in each rank: forks would have one hash seed.
    done = torchrun(WORKER, out, ranks=len(RANKS))
    assert done.returncode == 0, tail(done)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in RANKS]


class Seen:
    """One scenario on all ranks."""

    def __init__(self, outcomes: list[dict[str, Any]], name: str) -> None:
        self.ranks = [outcome[name] for outcome in outcomes]
        for rank, outcome in enumerate(self.ranks):
            assert "failed" not in outcome, f"rank {rank}: {outcome['traceback']}"

    def all(self, key: str) -> Any:
        """Return what every rank saw, which is the same on all of them."""
        values = [outcome[key] for outcome in self.ranks]
        assert all(value == values[0] for value in values), values
        return values[0]

    def each(self, key: str) -> list[Any]:
        """Return what each rank saw."""
        return [outcome[key] for outcome in self.ranks]

    def quiet(self) -> bool:
        """Whether no rank was warned of anything."""
        return all(not outcome["warnings"] for outcome in self.ranks)


def assert_says(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, f"{part!r} is not in:\n{text}"


def refusal(seen: Seen, key: str = "refused") -> str:
    """Return the text that the coordinator refused with; other ranks have its first line."""
    (text, *others) = [texts["0"] for texts in seen.each(key) if list(texts) == ["0"]]
    assert len(others) == len(RANKS) - 1, seen.each(key)
    assert set(others) == {f"{text.splitlines()[0]}; rank 0 has the whole message"}
    return str(text)


@pytest.mark.parametrize("writer", ["torch", "ours"])
@pytest.mark.parametrize("how", ["", "_in_a_group", "_in_a_thread"])
def test_m17_a_save_without_collectives_is_refused_on_every_rank(
    outcomes: list[dict[str, Any]], writer: str, how: str
) -> None:
    seen = Seen(outcomes, "m17")
    for rank, texts in enumerate(seen.each(f"{writer}{how}")):
        assert list(texts) == [str(rank)]
        assert_says(texts[str(rank)], "use_collectives=False", "way out:", "drop it")
    assert seen.all("files") == []


def test_m17_metadata_of_single_ranks_are_refused_by_name(outcomes: list[dict[str, Any]]) -> None:
    seen = Seen(outcomes, "m17")
    assert "__3.metadata" in seen.all("torch_files")
    # Torch's reader gives each rank its own.
    for rank, texts in enumerate(seen.each("by_our_planner")):
        assert_says(texts["0"], "ranks 0-3 cannot be loaded from this checkpoint")
        parts = ("w: nobody stored [", "of (8, 3)", f"on:          rank {rank}", "collectives")
        assert_says(seen.ranks[0]["by_our_planner"]["0"], *parts)
    for texts in seen.each("by_our_reader"):
        assert_says(*texts.values(), "metadata is None", "__0.metadata", "its own part alone")
    assert seen.all("untouched")
    assert seen.all("by_torch") == []


def test_m18_a_save_by_some_of_the_ranks_is_warned_of(outcomes: list[dict[str, Any]]) -> None:
    texts = Seen(outcomes, "m18").each("texts")
    for coordinator in (0, 2):
        (text,) = texts[coordinator]
        assert_says(text, "2 of 4 ranks", "directory", "way out:")
    assert texts[1] == texts[3] == []


def test_sets_that_are_equal_on_all_ranks_pass(outcomes: list[dict[str, Any]]) -> None:
    seen = Seen(outcomes, "equal_sets")
    assert len(set(seen.each("seed"))) > 1, "the ranks' hash seeds should differ"
    assert seen.all("texts") == []
    assert seen.all("equal") == seen.all("keys")


def test_the_main_job_is_whole_in_the_file(outcomes: list[dict[str, Any]]) -> None:
    seen = Seen(outcomes, "main_job")
    assert seen.quiet()
    assert seen.all("texts") == []
    assert seen.all("differing") == []
    assert seen.all("experts") == [8, 3, 5]
    names = seen.all("names")
    assert "optim.state.experts.w2.exp_avg_sq" in names
    assert "optim.state.dense.bias.step" in names
    unique, whole = seen.ranks[0]["nbytes"]
    assert unique == whole > 0


def test_the_main_job_comes_back_bit_for_bit_and_trains_on(outcomes: list[dict[str, Any]]) -> None:
    seen = Seen(outcomes, "main_job_comes_back")
    assert seen.quiet()
    assert seen.all("texts") == []
    assert seen.all("differing") == []
    assert seen.all("compared") == 25
    assert seen.all("differing_after_a_step") == []


@pytest.mark.parametrize("scenario", ["reshard_to_ep4", "reshard_to_ep1"])
def test_the_main_job_loads_into_another_topology(
    outcomes: list[dict[str, Any]], scenario: str
) -> None:
    seen = Seen(outcomes, scenario)
    assert seen.quiet()
    assert seen.all("texts") == []
    assert seen.all("shape") == [2, 3, 5]
    assert seen.all("differing") == []
    assert seen.all("compared") == 25


def test_m22_the_save_report_lists_a_parameter_that_never_stepped(
    outcomes: list[dict[str, Any]],
) -> None:
    (name,) = Seen(outcomes, "main_job").ranks[0]["stateless"]
    assert name.endswith("unused")


@pytest.mark.parametrize("scenario", ["main_job_comes_back", "reshard_to_ep4", "reshard_to_ep1"])
def test_m22_the_load_report_lists_a_parameter_without_state(
    outcomes: list[dict[str, Any]], scenario: str
) -> None:
    (name,) = Seen(outcomes, scenario).all("stateless")
    assert name.endswith("unused")


def test_forgotten_rules_are_refused_at_save_and_at_load(outcomes: list[dict[str, Any]]) -> None:
    seen = Seen(outcomes, "rules_forgotten")
    assert_says(refusal(seen), "model.experts.w1", "optim.state.experts.w2.exp_avg_sq", "'ep'")
    assert "dense" not in refusal(seen)
    assert seen.all("files") == []
    at_load = refusal(seen, "refused_at_load")
    assert_says(at_load, "model.experts.w1", "(8, 3, 5)", "(4, 3, 5)", "2 times", "axis of size 2")
    assert seen.all("changed") == []


@pytest.mark.parametrize("how", ["thread", "process"])
def test_async_saves_hold_the_state_of_the_call(outcomes: list[dict[str, Any]], how: str) -> None:
    seen = Seen(outcomes, f"async_save_in_a_{how}")
    assert seen.quiet()
    assert seen.all("differing") == [[], []]
    assert seen.all("compared") == 24


def test_an_async_save_that_is_refused_says_so_where_its_result_is_asked_for(
    outcomes: list[dict[str, Any]],
) -> None:
    seen = Seen(outcomes, "async_save_refused")
    assert_says(refusal(seen), "layers.w: 4 different contents on 4 ranks")
    assert seen.all("files") == []
    # M109: said at once, where nobody asks for it; by one rank.
    logged = seen.each("logged")
    assert_says(logged[0], "this save is refused", "layers.w: 4 different contents")
    assert set(logged[1:]) == {""}
