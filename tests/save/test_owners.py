"""How a replica group divides what it holds: every key once, level by bytes, few writers."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from dcp_placements.save.coordinator.owners import BALANCE, SMALL_NBYTES, divide

KIB = 1 << 10
MIB = 1 << 20


def taken(pieces: list[tuple[int, int]], divided: list[list[int]], ranks: int) -> list[int]:
    """Return the bytes that each rank takes, having checked that every key has one writer."""
    load = [0] * ranks
    for (count, nbytes), cuts in zip(pieces, divided, strict=True):
        assert cuts[0] == 0
        assert cuts[-1] == count
        assert len(cuts) - 1 <= ranks
        assert cuts == sorted(cuts)
        for rank, (start, stop) in enumerate(pairwise(cuts)):
            load[rank] += (stop - start) * nbytes
    return load


def drawn(rng: random.Random, most: int) -> list[tuple[int, int]]:
    return [(rng.randint(1, 40), rng.randint(0, most)) for _ in range(rng.randint(1, 20))]


def test_every_key_is_written_once_whatever_is_held() -> None:
    rng = random.Random(1)
    for _ in range(500):
        ranks = rng.randint(1, 12)
        pieces = drawn(rng, rng.choice([0, 8, 3 * MIB]))
        held = [rng.choice([0, rng.randint(0, 9 * MIB)]) for _ in range(ranks)]
        load = taken(pieces, divide(pieces, held, rng.randint(0, 30 * MIB)), ranks)
        assert sum(load) == sum(count * nbytes for count, nbytes in pieces)


def test_ranks_that_hold_as_much_write_as_much() -> None:
    """Within a key: none is divided."""
    rng = random.Random(2)
    for _ in range(300):
        ranks = rng.randint(1, 16)
        pieces = drawn(rng, 64 * KIB)
        total = sum(count * nbytes for count, nbytes in pieces)
        load = taken(pieces, divide(pieces, [0] * ranks, BALANCE * total / ranks), ranks)
        largest = max(nbytes for _, nbytes in pieces)
        assert max(load) <= BALANCE * total / ranks + largest


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_many_keys_of_a_model_are_level_within_a_tenth(ranks: int) -> None:
    pieces = [(61, 4 * KIB), (61, 512 * KIB), (122, 300 * KIB), (61 * ranks, 2 * MIB)]
    total = sum(count * nbytes for count, nbytes in pieces)
    load = taken(pieces, divide(pieces, [0] * ranks, BALANCE * total / ranks), ranks)
    assert max(load) <= 1.1 * total / ranks


def test_what_ranks_write_already_is_levelled() -> None:
    rng = random.Random(3)
    for _ in range(200):
        ranks = rng.randint(2, 8)
        held = [rng.randint(0, 20 * MIB) for _ in range(ranks)]
        pieces = [(rng.randint(200, 400), 256 * KIB)]
        mean = (sum(held) + pieces[0][0] * pieces[0][1]) / ranks
        load = taken(pieces, divide(pieces, held, max(BALANCE * mean, *held)), ranks)
        highest = max(have + more for have, more in zip(held, load, strict=True))
        assert highest <= max(1.1 * mean, *held)


def test_what_is_little_in_all_stays_with_the_lowest_rank() -> None:
    pieces = [(100, 256), (7, 4 * KIB), (1, 0)]
    load = taken(pieces, divide(pieces, [0] * 8, SMALL_NBYTES), 8)
    assert load[1:] == [0] * 7


def test_no_more_of_the_lowest_ranks_write_than_are_needed() -> None:
    pieces = [(40, MIB)]
    for ranks in (1, 2, 3, 5, 40):
        load = taken(pieces, divide(pieces, [0] * 64, 40 * MIB / ranks), 64)
        assert [nbytes > 0 for nbytes in load] == [True] * ranks + [False] * (64 - ranks)


def test_a_rank_that_writes_enough_is_passed_over() -> None:
    load = taken([(10, MIB)], divide([(10, MIB)], [50 * MIB, 0, 0], 50 * MIB), 3)
    assert load == [0, 10 * MIB, 0]


def test_keys_without_bytes_go_to_the_lowest_rank() -> None:
    assert divide([(5, 0)], [0, 0, 0], 0)[0][:2] == [0, 5]
    assert divide([(0, 8), (5, 0)], [0], 100) == [[0, 0], [0, 5]]


def test_a_key_that_is_too_large_by_itself_does_not_scatter_the_others() -> None:
    pieces, held = [(30, 2 * MIB), (1, 64 * MIB)], [80 * MIB] * 8
    load = taken(pieces, divide(pieces, held, 100 * MIB), 8)
    assert load == [60 * MIB, 64 * MIB, *[0] * 6]
