"""Exact cover, holes and overlaps, held against a count of every element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SMALL_SHAPES, boxes_in, count, examples, tilings

from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import (
    contains,
    format_box,
    intersection,
    is_grid,
    overlaps,
    tiles,
    uncovered,
)


def whole_of(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


@given(SMALL_SHAPES, st.data())
@examples(50)
def test_boxes_tile_when_every_element_is_in_exactly_one(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = data.draw(boxes_in(shape))
    assert tiles(whole_of(shape), boxes) is bool((count(shape, boxes) == 1).all())


@given(SMALL_SHAPES, st.data())
@examples(50)
def test_cut_boxes_tile_and_lose_that_with_any_of_them(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = data.draw(tilings(shape))
    whole = whole_of(shape)
    assert tiles(whole, boxes)
    assert uncovered(whole, boxes) == []
    assert overlaps(boxes) == []
    lost = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    assert not tiles(whole, boxes)
    assert not is_grid(whole, boxes)
    holes = uncovered(whole, boxes, limit=1000)
    assert torch.equal(count(shape, holes), count(shape, [lost]))


@given(SMALL_SHAPES, st.data())
@examples(50)
def test_holes_are_the_elements_in_no_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = data.draw(boxes_in(shape))
    holes = uncovered(whole_of(shape), boxes, limit=1000)
    assert torch.equal(count(shape, holes), (count(shape, boxes) == 0).long())


@given(SMALL_SHAPES, st.data())
@examples(50)
def test_overlaps_are_the_pairs_that_share_elements(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = data.draw(boxes_in(shape))
    expected = {
        frozenset((one, other))
        for i, one in enumerate(boxes)
        for other in boxes[i + 1 :]
        if bool((count(shape, [one, other]) > 1).any())
    }
    found = overlaps(boxes, limit=1000)
    assert {frozenset(pair) for pair in found} == expected
    assert len(found) == len(expected)
    assert len(overlaps(boxes, limit=1)) == min(1, len(expected))


@given(SMALL_SHAPES, st.data())
@examples(50)
def test_intersection_is_what_both_count(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = data.draw(boxes_in(shape, max_count=2))
    if len(boxes) < 2:
        boxes = [whole_of(shape), whole_of(shape)]
    one, other = boxes
    shared = intersection(one, other)
    both = (count(shape, [one]) * count(shape, [other])).bool()
    assert torch.equal(count(shape, [shared] if shared else []).bool(), both)
    assert shared is None or (contains(one, shared) and contains(other, shared))
    assert contains(one, other) is torch.equal(count(shape, [other]).bool(), both)


def test_a_scalar_is_tiled_by_one_box() -> None:
    whole = Box((), ())
    assert tiles(whole, [whole])
    assert not tiles(whole, [])
    assert uncovered(whole, []) == [whole]
    assert uncovered(whole, [whole]) == []


@pytest.mark.parametrize(
    ("box", "whole", "expected"),
    [
        (Box((4, 0), (2, 8)), (16, 8), "[4:6, :]"),
        (Box((4, 0), (2, 8)), None, "[4:6, 0:8]"),
        (Box((), ()), (), "[]"),
        (Box((0,), (3,)), (4,), "[0:3]"),
    ],
)
def test_boxes_are_told_as_index_ranges(
    box: Box, whole: tuple[int, ...] | None, expected: str
) -> None:
    assert format_box(box, whole) == expected
