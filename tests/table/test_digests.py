"""Digests within a budget: what is folded, and what is seen where two ranks differ."""

from __future__ import annotations

import random

import numpy as np
import torch

from dcp_placements.table.digests import Digests, folded, has_number, may_have_replicas
from dcp_placements.table.table import SHARD, Group


def mixed(rng: random.Random, count: int, share: float) -> list[str]:
    """Return keys of which some have a number of their own component."""
    return [f"layers.{i}.w" if rng.random() < share else f"w{i}" for i in range(count)]


def random_digests(keys: int, boxes: int = 1) -> Digests:
    numbers = np.random.default_rng(keys).integers(1, 1 << 63, (keys, boxes), np.uint64)
    return numbers


def differ(fqns: list[str], one: Digests, two: Digests) -> list[int]:
    """Return the rows in which the folded digests of two ranks differ."""
    unlike = (folded(one, fqns) != folded(two, fqns)).any(axis=1)
    return list(np.flatnonzero(unlike).tolist())


def test_whatever_differs_is_seen() -> None:
    rng = random.Random(2)
    for _ in range(200):
        count = rng.randint(1, 600)
        fqns = mixed(rng, count, 0.9)
        own = [at for at, fqn in enumerate(fqns) if not has_number(fqn)]
        one = random_digests(count, rng.choice([1, 3]))
        two = one.copy()
        other = set(rng.sample(range(count), min(count, rng.randint(0, 4))))
        for at in other:
            two[at, rng.randrange(one.shape[1])] += np.uint64(rng.randint(1, 1 << 40))
        expected = {own.index(at) if at in own else len(own) for at in other}
        assert set(differ(fqns, one, two)) == expected


def test_a_digest_that_there_is_not_differs_from_one_that_there_is() -> None:
    fqns = [f"layers.{i}.w" for i in range(100)]
    one = random_digests(100)
    two = one.copy()
    two[40] = 0
    assert differ(fqns, one, two) == [0]


def test_what_has_no_replicas_needs_no_digests() -> None:
    def group(parts: int) -> Group:
        return Group(SHARD, (8, 8), torch.float32, parts=parts)

    assert not may_have_replicas(group(8), 8)
    assert may_have_replicas(group(8), 16)
    assert may_have_replicas(group(1), 1)
