"""Loads that exchange what they read, on four real gloo ranks; and what becomes of a lost rank.

One launch of ``tests/ranks/exchange_worker.py`` runs all scenarios and writes what each rank saw.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import forked, tail

pytestmark = pytest.mark.dist

WORKER = Path(__file__).parents[1] / "ranks" / "exchange_worker.py"
RANKS = range(4)
EVEN = ["hsdp", "experts", "odd_parts", "other_topology", "not_alike", "many_small"]

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Return what each rank saw, by scenario."""
    out = tmp_path_factory.mktemp("ranks")
    done = forked(WORKER, out)
    assert done.returncode == 0, tail(done)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in RANKS]


def seen(outcomes: Ranks, name: str) -> Ranks:
    found = [outcome[name] for outcome in outcomes]
    for rank, outcome in enumerate(found):
        assert "failed" not in outcome, f"rank {rank}: {outcome['traceback']}"
    return found


def refusal(outcomes: Ranks, name: str) -> str:
    """Return the text that the first rank was refused with; the others refer to it."""
    found = seen(outcomes, name)
    assert not any(outcome["late"] for outcome in found)
    for outcome in found:
        assert outcome["refused"].keys() == {"0", "1", "2", "3"}
        others = {outcome["refused"][rank].rpartition(": ")[2] for rank in "123"}
        assert others == {"rank 0 has the reasons"}
    text, *others_have = [outcome["refused"]["0"] for outcome in found]
    first, *more = str(text).split("\n")
    short = f"{first}; rank 0 has the whole message" if more else text
    assert set(others_have) == {short}
    return str(text)


def assert_right(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["compared"]
        assert rank["differing"] == []
        assert rank["counted"] == [rank["read"], rank["opens"]]


@pytest.mark.parametrize("name", [*EVEN, "all_ranks_alike", "tied"])
def test_every_tensor_is_the_whole_cut_by_slicing(outcomes: Ranks, name: str) -> None:
    found = seen(outcomes, name)
    assert_right(found)
    assert [text for rank in found for text in rank["warnings"]] == []
    # What another rank reads this one does not.
    assert all(rank["exchanged"] <= rank["wanted"] for rank in found)
    assert any(rank["exchanged"] for rank in found)


@pytest.mark.parametrize("name", [n for n in EVEN if n not in ("odd_parts", "many_small")])
def test_each_byte_is_read_once_and_evenly(outcomes: Ranks, name: str) -> None:
    found = seen(outcomes, name)
    read = [rank["read"] for rank in found]
    assert sum(read) >= found[0]["unique"] - 64 * found[0]["compared"]
    # Of small tensors the bytes between them come along, and objects are read by every rank.
    assert sum(read) <= found[0]["unique"] * (1.05 if name == "hsdp" else 1.01)
    # Each tensor is read by one rank.
    assert max(read) <= sum(read) / len(read) + found[0]["largest"]


def test_the_ranks_that_saved_open_their_own_file_and_the_shared_one(outcomes: Ranks) -> None:
    # Its own file, the end of what its replica wrote, and that of the first rank with the objects.
    assert all(rank["opens"] <= 3 for rank in seen(outcomes, "hsdp"))
    # Two replicas of each expert and of what all share: its own file and those of two writers.
    assert all(rank["opens"] <= 3 for rank in seen(outcomes, "experts"))


def test_rehearse_predicts_what_is_read(outcomes: Ranks) -> None:
    found = seen(outcomes, "experts")
    predicted = sum(rank["predicted"][0] for rank in found)
    assert sum(rank["read"] for rank in found) == pytest.approx(predicted, rel=0.03)
    for rank in found:
        _, plainly, files = rank["predicted"]
        differing, nbytes, opens = rank["plainly"]
        assert differing == []
        assert opens == files
        # Up to the bytes before the elements of each chunk.
        assert plainly <= nbytes <= plainly + 1024 * rank["compared"]


def test_what_one_file_has_of_all_is_read_once(outcomes: Ranks) -> None:
    """Plain tensors, scalars and columns; the object is read by every rank."""
    found = seen(outcomes, "all_ranks_alike")
    assert sum(rank["read"] for rank in found) <= 1.03 * found[0]["unique"]


def test_what_ranks_do_not_want_alike_each_reads(outcomes: Ranks) -> None:
    found = seen(outcomes, "not_alike")
    # Half of "w" came from the other replica, and nothing of "plain".
    assert {rank["exchanged"] for rank in found} == {0, 1400 * 800 * 4 // 2}


def test_a_rank_that_needs_no_tensor_keeps_none_from_the_exchange(outcomes: Ranks) -> None:
    found = seen(outcomes, "one_rank_needs_no_tensor")
    assert_right(found)
    assert found[2]["exchanged"] == 0
    assert sum(rank["exchanged"] for rank in found) == 2 * 900 * 700 * 4
    assert sum(rank["read"] for rank in found) <= 1.03 * found[0]["unique"]


def test_a_reader_without_the_hook_is_told_of_once(outcomes: Ranks) -> None:
    for rank in seen(outcomes, "stock_reader"):
        assert rank["same"]
        assert len(rank["warnings"]) == len(rank["noted"]) == 1
        assert "way out:     storage_reader=PlacementFileSystemReader(path)" in rank["noted"][0]


def test_a_planner_without_it_keeps_all_from_it(outcomes: Ranks) -> None:
    found = seen(outcomes, "not_all_planners")
    assert_right(found)
    assert [rank["exchanged"] for rank in found] == [0] * 4
    assert "the planner of rank 2 was not given exchange=True" in found[0]["warnings"][0]


def test_m79_a_plain_tensor_per_rank_leaves_the_others_to_the_exchange(outcomes: Ranks) -> None:
    found = seen(outcomes, "a_plain_key_per_rank")
    assert_right(found)
    assert sum(rank["exchanged"] for rank in found) == 3 * 1024 * 700 * 4
    assert sum(rank["read"] for rank in found) < 1.05 * (1024 * 700 * 4 + 4 * 700 * 3 * 4)
    assert [rank["alone"] for rank in found] == [[f"rng.{rank}"] for rank in RANKS]


def test_a_load_on_another_process_group(outcomes: Ranks) -> None:
    found = seen(outcomes, "part_of_the_world")
    for name in ("true", "group"):
        assert_right([rank[name] for rank in found])
    assert [rank["true"]["exchanged"] for rank in found] == [0] * 4
    assert [rank["group"]["exchanged"] for rank in found] == [0, 1024 * 700 * 4] * 2
    assert all("of 2 ranks" in rank["warnings"][0] for rank in found)


def test_a_planner_serves_again_and_can_be_pickled(outcomes: Ranks) -> None:
    for rank in seen(outcomes, "one_planner_twice"):
        assert_right(rank["loads"])
        assert len({load["exchanged"] for load in rank["loads"]}) == 1
        assert "from other ranks" in rank["loads"][1]["text"]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("missing_file", "this load: could not read: the checkpoint is not whole"),
        ("short_file", "__2_0.distcp ends before it"),
        ("flipped_byte", "and it is not what was saved"),
        ("untied", ": this rank has one memory for them"),
    ],
)
def test_all_ranks_end_alike_where_one_cannot_read(outcomes: Ranks, name: str, cause: str) -> None:
    text = refusal(outcomes, name)
    assert text.startswith("nothing can be exchanged, since not all ranks could read")
    assert cause.partition(": ")[2] in text
    assert "    on:          rank" in text
    assert name != "untied" or text.count("this rank has one memory") == 1
    # The checkpoint has no state of one parameter.
    assert not any(outcome.get("reset") for outcome in seen(outcomes, name))


@pytest.mark.parametrize("how", ["killed while it sends", "stuck"])
def test_a_lost_rank_is_an_error_on_all_others_in_time(tmp_path: Path, how: str) -> None:
    done = forked(WORKER, tmp_path, "lost", how)
    assert done.returncode == 0, tail(done)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank, each in enumerate(reports):
        text = each["refused"][str(rank)]
        assert text.startswith("the exchange was broken off")
        assert "ranks 0-3 could not exchange what they read" in text
        assert "likely:      a rank was killed" in text
        # The process group's timeout is 4 s.
        assert each["seconds"] < 40
