"""Digests within a budget: what is folded, and what is suspected where two ranks differ."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from dcp_placements.layout.sharding import Cut, Sharding
from dcp_placements.save.digest_folding import (
    BUCKETS,
    BUDGET_NBYTES,
    ROWS_OF_BUCKETS,
    Digests,
    Slots,
    buckets_needed,
    budget,
    may_have_replicas,
)
from dcp_placements.save.key_table import KeyTable, declared_group
from dcp_placements.storage.hashing import SAMPLED_NBYTES


def digests(keys: int, boxes: int = 1) -> Digests:
    numbers = np.random.default_rng(keys).integers(1, 1 << 63, (keys, boxes), np.uint64)
    return numbers


def suspects(slots: Slots, one: Digests, two: Digests) -> list[int]:
    """Return the keys that a coordinator suspects when two ranks tell of these digests."""
    differing = (slots.vector(one) != slots.vector(two)).any(axis=1)
    return slots.suspects(np.flatnonzero(differing).tolist())


def table(keys: int, *, parts: int = 4, numbered: bool = True) -> KeyTable:
    group = declared_group(Sharding((8, 8), (parts,), (Cut(0, 0),)), ("x",), torch.float32)
    fqns = [f"layers.{i}.w" if numbered else f"w{i}" for i in range(keys)]
    return KeyTable([group], fqns, [keys], [None], [0] * keys, [(1,)], [0] * keys)


def test_without_buckets_every_key_has_a_digest_of_its_own() -> None:
    slots = Slots([True] * 300 + [False] * 3, 0)
    assert (slots.own, slots.folded, slots.count) == (list(range(303)), [], 303)
    expected = digests(303, 2)
    assert (slots.vector(expected) == expected).all()


@pytest.mark.parametrize("buckets", BUCKETS)
def test_few_keys_are_not_folded_into_as_many_buckets(buckets: int) -> None:
    most = buckets * ROWS_OF_BUCKETS
    assert Slots([True] * most, buckets).folded == []
    assert Slots([True] * (most + 1), buckets).folded == list(range(most + 1))


@pytest.mark.parametrize("buckets", BUCKETS)
def test_keys_without_a_number_are_never_folded(buckets: int) -> None:
    rng = random.Random(buckets)
    numbered = [rng.random() < 0.8 for _ in range(400)]
    slots = Slots(numbered, buckets)
    assert slots.own == [at for at, has in enumerate(numbered) if not has]
    assert slots.folded == [at for at, has in enumerate(numbered) if has]
    assert slots.count == len(slots.own) + ROWS_OF_BUCKETS * buckets
    one = digests(400)
    two = one.copy()
    two[slots.own[17]] += np.uint64(1)
    assert len(slots.vector(one)) == slots.count
    assert suspects(slots, one, two) == [slots.own[17]]


@pytest.mark.parametrize("count", [33, 64, 100, 256])
def test_one_of_up_to_256_keys_is_told_alone(count: int) -> None:
    slots = Slots([True] * count, BUCKETS[0])
    assert slots.folded
    one = digests(count)
    for at in range(count):
        two = one.copy()
        two[at] ^= np.uint64(1 << at % 60)
        assert suspects(slots, one, two) == [at]


@pytest.mark.parametrize("buckets", BUCKETS)
def test_what_differs_is_suspected(buckets: int) -> None:
    rng = random.Random(buckets)
    for _ in range(100):
        count = rng.randint(1, 600)
        slots = Slots([rng.random() < 0.9 for _ in range(count)], buckets)
        one = digests(count, rng.choice([1, 3]))
        two = one.copy()
        other = set(rng.sample(range(count), min(count, rng.randint(0, 4))))
        for at in other:
            two[at, rng.randrange(one.shape[1])] += np.uint64(rng.randint(1, 1 << 40))
        found = set(suspects(slots, one, two))
        assert other <= found
        assert bool(other) == bool(found)


def test_exchanged_digests_are_seen() -> None:
    """Keys of one bucket in both rows."""
    slots = Slots([True] * 600, 16)
    one = digests(600)
    two = one.copy()
    two[[3, 259]] = one[[259, 3]]
    assert {3, 259} <= set(suspects(slots, one, two))


def test_a_digest_that_there_is_not_differs_from_one_that_there_is() -> None:
    slots = Slots([True] * 100, 4)
    one = digests(100)
    two = one.copy()
    two[40] = 0
    assert 40 in suspects(slots, one, two)


def test_the_budget_is_shared_by_the_ranks_of_a_small_world_and_bounded_below() -> None:
    assert budget(8) == 2 << 20
    assert budget(8) > budget(1024) > budget(100_000) == BUDGET_NBYTES
    for world in (1, 7, 512, 4096):
        assert budget(world) * world <= 16 << 20


@pytest.mark.parametrize(("keys", "buckets"), [(1, 0), (512, 0), (513, 16), (100_000, 16)], ids=str)
def test_what_fits_is_not_folded(keys: int, buckets: int) -> None:
    assert buckets_needed([table(keys)], [[1]], 100_000) == buckets
    assert buckets_needed([table(keys)], [[1]], 8) == 0


def test_the_more_groups_the_fewer_buckets_and_the_vector_stays_within_the_budget() -> None:
    seen = []
    for tables in (1, 15, 16, 60, 100, 200):
        found = [table(200)] * tables
        buckets = buckets_needed(found, [[1]] * tables, 100_000)
        seen.append(buckets)
        count = sum(Slots(t.numbered, buckets).count for t in found)
        assert count * SAMPLED_NBYTES <= BUDGET_NBYTES
    assert seen[:2] == [0, 16]
    assert seen[1:] == sorted(seen[1:], reverse=True)
    assert set(seen[1:]) == set(BUCKETS)


def test_several_boxes_count_as_often_and_none_as_one() -> None:
    assert buckets_needed([table(300)], [[1]], 100_000) == 0
    assert buckets_needed([table(300)], [[2]], 100_000) == 16
    assert buckets_needed([table(600)], [[0]], 100_000) == 16


def test_what_has_no_replicas_needs_no_digests() -> None:
    assert buckets_needed([table(100_000, parts=100_000)], [[1]], 100_000) == 0
    (group,) = table(1, parts=8).groups
    assert not may_have_replicas(group, 8)
    assert may_have_replicas(group, 16)
    (alone,) = table(1, parts=1).groups
    assert may_have_replicas(alone, 1)
