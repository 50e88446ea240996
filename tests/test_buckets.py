"""Digests in buckets: of bounded size, and what differs is among the suspects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from dcp_placements.buckets import OBJECT_ROWS, folding


def digests(count: int, other: set[int] = frozenset()) -> list[bytes]:  # type: ignore[assignment]
    return [(i * 7919 + (i in other) * 104729 + 1).to_bytes(8, "little") for i in range(count)]


def numbered(count: int) -> list[str]:
    return [f"layers.{i}.w" for i in range(count)]


@given(st.integers(1, 300), st.integers(0, 20), st.sampled_from([1, 3]), st.data())
@examples(200)
def test_what_differs_is_suspected(count: int, plain: int, rows: int, data: st.DataObject) -> None:
    names = data.draw(st.permutations([*numbered(count), *["head"] * plain]))
    other = data.draw(st.sets(st.integers(0, len(names) - 1), max_size=4))
    places = folding(names, rows=rows)
    one, two = places.folded(digests(len(names))), places.folded(digests(len(names), other))
    assert len(one) <= (16 * rows + plain) * 8
    suspects = places.suspects([one, two, one])
    assert other <= set(suspects)
    assert bool(suspects) == bool(other)
    for position, name in enumerate(names):
        assert places.is_alone(position) == (name == "head" or count <= 16 * rows)
        differs = places.told_of(one, position) != places.told_of(two, position)
        assert differs if position in other else not (differs and places.is_alone(position))


@pytest.mark.parametrize("at", [0, 15, 16, 255, 256, 4095])
def test_one_of_thousands_of_objects_is_told_alone(at: int) -> None:
    places = folding(numbered(4096), rows=OBJECT_ROWS)
    one, two = places.folded(digests(4096)), places.folded(digests(4096, {at}))
    assert places.suspects([one, two]) == [at]


def test_exchanged_digests_are_seen() -> None:
    told = digests(64)
    exchanged = [told[32], *told[1:32], told[0], *told[33:]]
    places = folding(numbered(64))
    assert {0, 32} <= set(places.suspects([places.folded(told), places.folded(exchanged)]))
