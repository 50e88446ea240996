"""Which ranks hold which box, and whether the boxes make the whole: against an array of bools."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from dcp_placements.layout.boxes import Ints
from dcp_placements.table.cover import Cover, cover_of

Row = tuple[int, ...]


def cover(rows: list[tuple[int, Row]], shape: tuple[int, ...]) -> Cover:
    return judged(rows, shape)[0]


def judged(
    rows: list[tuple[int, Row]], shape: tuple[int, ...], *, complete: bool = True
) -> tuple[Cover, bool]:
    boxes = np.array([row for _, row in rows], np.int64).reshape(len(rows), 2, len(shape))
    found = cover_of(np.array([rank for rank, _ in rows], np.int64), boxes)
    return found, found.is_whole(shape) if complete else found.is_apart(shape)


def counts(shape: tuple[int, ...], boxes: set[Row]) -> Ints:
    """Return how many of the boxes hold each element."""
    ndim = len(shape)
    count = np.zeros(shape, np.int64)
    for row in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(row[:ndim], row[ndim:], strict=True))] += 1
    return count


def split(rng: random.Random, size: int) -> list[tuple[int, int]]:
    ends = sorted(rng.sample(range(1, size), rng.randint(0, min(size - 1, 3)))) if size else []
    return [(a, b - a) for a, b in itertools.pairwise([0, *ends, size])]


def grid(rng: random.Random, shape: tuple[int, ...]) -> list[Row]:
    cells = itertools.product(*[split(rng, size) for size in shape])
    return [(*(o for o, _ in cell), *(n for _, n in cell)) for cell in cells]


def bricks(rng: random.Random, shape: tuple[int, ...]) -> list[Row]:
    """Return a tiling that is no grid: each box of a grid is cut anew."""
    made = []
    for row in grid(rng, shape):
        offsets, sizes = row[: len(shape)], row[len(shape) :]
        for cell in grid(rng, sizes):
            inner = zip(offsets, cell, strict=False)
            made.append((*(a + b for a, b in inner), *cell[len(shape) :]))
    return made


def drawn(rng: random.Random) -> tuple[tuple[int, ...], list[Row]]:
    """Return a shape and some boxes of it: a tiling, one with a hole, with an overlap, any."""
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
    boxes = rng.choice([grid, bricks])(rng, shape)
    how = rng.randrange(4)
    if how == 1:
        boxes.remove(rng.choice(boxes))
    elif how == 2:
        boxes.append(rng.choice(grid(rng, shape)))
    elif how == 3:
        boxes = [rng.choice(grid(rng, shape)) for _ in range(rng.randint(1, 5))]
    return shape, boxes


def test_boxes_of_all_kinds_are_judged_as_elements_are() -> None:
    rng = random.Random(1)
    seen = set()
    for _ in range(1500):
        shape, boxes = drawn(rng)
        rows = [(rng.randrange(9), row) for row in boxes for _ in range(rng.randint(1, 2))]
        rng.shuffle(rows)
        count = counts(shape, set(boxes))
        whole, apart = bool((count == 1).all()), bool((count <= 1).all())
        assert judged(rows, shape)[1] == whole, (shape, boxes)
        assert judged(rows, shape, complete=False)[1] == apart, (shape, boxes)
        seen.add((whole, apart))
    assert seen == {(True, True), (False, True), (False, False)}


@pytest.mark.parametrize("shape", [(1 << 40, 1 << 30), (1 << 31, 1 << 31, 3)])
def test_shapes_beyond_64_bits_are_told_apart(shape: tuple[int, ...]) -> None:
    """More elements than an integer counts: offsets do not wrap to one another."""
    ndim = len(shape)
    rows = []
    for rank in range(4):
        offsets = (rank * (shape[0] // 4), *[0] * (ndim - 1))
        rows.append((rank, (*offsets, shape[0] // 4, *shape[1:])))
    found = cover(rows, shape)
    assert len(found.boxes) == 4
    assert not found.has_replicas


def test_a_box_beyond_the_whole_is_refused() -> None:
    assert not judged([(0, (0, 3)), (1, (3, 2))], (4,))[1]
    assert not judged([(0, (2, 3))], (4,), complete=False)[1]
