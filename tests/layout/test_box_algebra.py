"""The algebra of boxes against painted arrays."""

from __future__ import annotations

import random

import pytest
from strategies import count

from dcp_placements.layout.boxes import (
    Index,
    apart,
    as_array,
    as_boxes,
    common,
    format_box,
    format_boxes,
    intersect,
    overlaps,
    tile,
    uncovered,
    unique,
    within,
)
from dcp_placements.layout.sharding import Box

Shape = tuple[int, ...]


def drawn(seed: int) -> tuple[Shape, list[Box]]:
    """Return a shape, and boxes in it: any, or the parts of a division, perhaps without one."""
    draw = random.Random(seed)
    shape = tuple(draw.randint(0, 5) for _ in range(draw.randint(0, 3)))

    def parts(offsets: Shape, sizes: Shape) -> list[Box]:
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if not dims or draw.random() < 0.3:
            return [Box(offsets, sizes)]
        dim = draw.choice(dims)
        at = draw.randint(1, sizes[dim] - 1)
        after = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        first, second = ((*sizes[:dim], n, *sizes[dim + 1 :]) for n in (at, sizes[dim] - at))
        return parts(offsets, first) + parts(after, second)

    if draw.random() < 0.5:
        boxes = parts((0,) * len(shape), shape)
        draw.shuffle(boxes)
        return shape, boxes[: len(boxes) - (draw.random() < 0.3)]
    boxes = []
    for _ in range(draw.randint(0, 8)):
        offsets = tuple(draw.randint(0, size) for size in shape)
        sizes = tuple(draw.randint(0, n - o) for n, o in zip(shape, offsets, strict=True))
        boxes.append(Box(offsets, sizes))
    return shape, boxes


def share(one: Box, other: Box) -> bool:
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))


def test_boxes_against_painted_arrays() -> None:
    for seed in range(400):
        shape, boxes = drawn(seed)
        whole, array = Box((0,) * len(shape), shape), as_array(boxes, len(shape))
        painted = count(shape, boxes)
        assert as_boxes(array) == boxes
        assert tile(whole, array) == bool((painted == 1).all()), seed
        assert apart(whole, array) == bool((painted <= 1).all()), seed
        holes = uncovered(whole, array, 1000)
        assert (count(shape, holes) == (painted == 0)).all(), seed
        meet = [
            (i, j)
            for i, one in enumerate(boxes)
            for j, other in enumerate(boxes)
            if share(one, other)
        ]
        assert (
            list(zip(*(part.tolist() for part in Index(array).meeting(array)), strict=True)) == meet
        )
        assert overlaps(array, 1000) == [(i, j) for i, j in meet if i < j]
        for i, one in enumerate(boxes):
            for j, other in enumerate(boxes):
                assert (common(one, other) is not None) == ((i, j) in meet)
        for i, j in meet:
            assert [common(boxes[i], boxes[j])] == as_boxes(intersect(array[[i]], array[[j]]))
            shared = as_boxes(intersect(array[[i]], array[[j]]))
            both = count(shape, [boxes[i], boxes[j]]) == 2
            assert (count(shape, shared) == both).all()
        for box in (whole, *boxes):
            sharing = [(at, one, common(one, box)) for at, one in enumerate(boxes)]
            expected = [piece for piece in sharing if piece[2] is not None]
            if box in boxes and expected:
                expected = [(boxes.index(box), box, box)]
            assert Index(array).overlaps(box) == expected, seed
        first, number = unique(array)
        assert [boxes[at] for at in first] == sorted(set(boxes))
        assert [boxes[first[at]] for at in number] == boxes


def test_a_box_beyond_the_whole_is_not_within_it() -> None:
    assert within(
        Box((1,), (3,)), as_array([Box((0,), (2,)), Box((2,), (2,)), Box((3,), (2,))], 1)
    ).tolist() == [False, True, False]
    assert not apart(Box((0,), (4,)), as_array([Box((3,), (2,))], 1))
    assert not tile(Box((2,), (2,)), as_array([Box((1,), (2,))], 1))


@pytest.mark.parametrize(
    ("box", "whole", "text"),
    [
        (Box((4, 0), (2, 8)), (16, 8), "[4:6, :]"),
        (Box((4, 0), (2, 8)), None, "[4:6, 0:8]"),
        (Box((), ()), (), "[]"),
        (Box((0,), (3,)), (4,), "[0:3]"),
    ],
)
def test_boxes_are_told_as_index_ranges(box: Box, whole: Shape | None, text: str) -> None:
    assert format_box(box, whole) == text


@pytest.mark.parametrize(
    ("holes", "text"),
    [(1, "[0:1, :] of (9, 2)"), (6, "[0:1, :], [1:2, :], [2:3, :], [3:4, :] and 2 more of (9, 2)")],
)
def test_many_boxes_are_folded(holes: int, text: str) -> None:
    assert format_boxes([Box((row, 0), (1, 2)) for row in range(holes)], (9, 2)) == text
