"""Which ranks hold which box, and whether the boxes make the whole: against counted elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import SMALL_SHAPES, boxes_in, count, examples, tilings

from dcp_placements.layout.boxes import apart, tile
from dcp_placements.layout.sharding import Box
from dcp_placements.table.world import Cover, cover_of

Row = tuple[int, ...]


def cover(rows: list[tuple[int, Row]], shape: tuple[int, ...]) -> Cover:
    return judged(rows, shape)[0]


def judged(
    rows: list[tuple[int, Row]], shape: tuple[int, ...], *, complete: bool = True
) -> tuple[Cover, bool]:
    boxes = np.array([row for _, row in rows], np.int64).reshape(len(rows), 2, len(shape))
    found = cover_of(np.array([rank for rank, _ in rows], np.int64), boxes)
    return found, (tile if complete else apart)(Box.whole(shape), found.boxes)


@given(SMALL_SHAPES, st.data())
@examples(200)
def test_boxes_of_all_kinds_are_judged_as_elements_are(shape: Row, data: st.DataObject) -> None:
    """A tiling, one with a hole, one with an overlap, any boxes; some of them on two ranks."""
    kind = data.draw(st.sampled_from(["tiling", "hole", "overlap", "any"]))
    boxes = data.draw(boxes_in(shape) if kind == "any" else tilings(shape))
    if kind == "hole":
        boxes = boxes[1:]
    elif kind == "overlap":
        boxes = sorted({*boxes, *data.draw(boxes_in(shape))})
    ranks = st.lists(st.integers(0, 8), min_size=1, max_size=2)
    rows = [(rank, (*box.offsets, *box.sizes)) for box in boxes for rank in data.draw(ranks)]
    rows = data.draw(st.permutations(rows))
    held = count(shape, boxes)
    assert judged(rows, shape)[1] == bool((held == 1).all())
    assert judged(rows, shape, complete=False)[1] == bool((held <= 1).all())


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
