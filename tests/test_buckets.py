"""Digests in buckets: of bounded size, and what differs is among the suspects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from dcp_placements.buckets import OBJECT_ROWS, folded, is_folded, suspects, told_of


def digests(count: int, other: set[int] = frozenset()) -> list[bytes]:  # type: ignore[assignment]
    return [(i * 7919 + (i in other) * 104729 + 1).to_bytes(8, "little") for i in range(count)]


@given(st.integers(1, 300), st.sampled_from([1, 3]), st.data())
@examples(200)
def test_what_differs_is_suspected(count: int, rows: int, data: st.DataObject) -> None:
    other = data.draw(st.sets(st.integers(0, count - 1), max_size=4))
    one, two = folded(digests(count), rows), folded(digests(count, other), rows)
    assert len(one) <= 16 * 8 * rows
    assert is_folded(one, count) == (count > 16 * rows)
    found = suspects([one, two, one], count)
    assert other <= set(found)
    assert bool(found) == bool(other)
    for position in other:
        assert told_of(one, position, count) != told_of(two, position, count)


@pytest.mark.parametrize("at", [0, 15, 16, 255, 256, 4095])
def test_one_of_thousands_of_objects_is_told_alone(at: int) -> None:
    one = folded(digests(4096), OBJECT_ROWS)
    two = folded(digests(4096, {at}), OBJECT_ROWS)
    assert suspects([one, two], 4096) == [at]


def test_exchanged_digests_are_seen() -> None:
    told = digests(64)
    exchanged = [told[32], *told[1:32], told[0], *told[33:]]
    assert {0, 32} <= set(suspects([folded(told), folded(exchanged)], 64))
