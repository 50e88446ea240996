"""Digests within a budget: what is folded, and what is seen where two ranks differ."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from dcp_placements.layout.sharding import Cut, Sharding
from dcp_placements.save.digest_folding import (
    Digests,
    Slots,
    may_have_replicas,
)
from dcp_placements.table.table import declared_group


def numbered(count: int) -> list[str]:
    return [f"layers.{i}.w" for i in range(count)]


def mixed(rng: random.Random, count: int, share: float) -> list[str]:
    """Return keys of which some have a number of their own component."""
    return [f"layers.{i}.w" if rng.random() < share else f"w{i}" for i in range(count)]


def digests(keys: int, boxes: int = 1) -> Digests:
    numbers = np.random.default_rng(keys).integers(1, 1 << 63, (keys, boxes), np.uint64)
    return numbers


def differ(slots: Slots, one: Digests, two: Digests) -> list[int]:
    """Return the slots in which two ranks differ."""
    unlike = (slots.vector(one) != slots.vector(two)).any(axis=1)
    return list(np.flatnonzero(unlike).tolist())


def test_keys_without_a_number_are_never_folded() -> None:
    fqns = mixed(random.Random(1), 400, 0.8)
    slots = Slots(fqns, True)
    assert slots.own == [at for at, fqn in enumerate(fqns) if fqn.startswith("w")]
    assert slots.folded == [at for at, fqn in enumerate(fqns) if fqn.startswith("layers")]
    assert slots.count == len(slots.own) + 1
    one = digests(400)
    two = one.copy()
    two[slots.own[17]] += np.uint64(1)
    assert len(slots.vector(one)) == slots.count
    assert differ(slots, one, two) == [17]


def test_whatever_differs_is_seen() -> None:
    rng = random.Random(2)
    for _ in range(200):
        count = rng.randint(1, 600)
        slots = Slots(mixed(rng, count, 0.9), True)
        one = digests(count, rng.choice([1, 3]))
        two = one.copy()
        other = set(rng.sample(range(count), min(count, rng.randint(0, 4))))
        for at in other:
            two[at, rng.randrange(one.shape[1])] += np.uint64(rng.randint(1, 1 << 40))
        expected = {slots.own.index(at) for at in other if at in slots.own}
        if other & set(slots.folded):
            expected.add(len(slots.own))
        assert set(differ(slots, one, two)) == expected


def test_exchanged_digests_are_seen() -> None:
    slots = Slots(numbered(600), True)
    one = digests(600)
    two = one.copy()
    two[[3, 259]] = one[[259, 3]]
    assert differ(slots, one, two) == [0]


def test_a_digest_that_there_is_not_differs_from_one_that_there_is() -> None:
    slots = Slots(numbered(100), True)
    one = digests(100)
    two = one.copy()
    two[40] = 0
    assert differ(slots, one, two) == [0]


def test_what_has_no_replicas_needs_no_digests() -> None:
    def group(parts: int) -> Any:
        return declared_group(Sharding((8, 8), (parts,), (Cut(0, 0),)), ("x",), torch.float32)

    assert not may_have_replicas(group(8), 8)
    assert may_have_replicas(group(8), 16)
    assert may_have_replicas(group(1), 1)
