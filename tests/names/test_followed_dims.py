"""Which dims of its parameter optimizer state follows, by the two shapes."""

from __future__ import annotations

import pytest

from dcp_placements.names.optimizer_state import followed_dims


@pytest.mark.parametrize(
    ("state", "parameter", "ways"),
    [
        ((8, 6), (8, 6), {(0, 1)}),
        ((8, 1), (8, 6), {(0, None)}),
        ((1, 6), (8, 6), {(None, 1)}),
        ((1, 1), (8, 6), {(None, None)}),
        ((4, 5, 1), (4, 5, 6), {(0, 1, None)}),
        ((4, 1, 3, 2), (4, 5, 3, 2), {(0, None, 2, 3)}),
        ((1, 6), (1, 6), {(0, 1)}),
        # A rank without rows has size 0, of which a mean is taken all the same.
        ((1, 6), (0, 6), {(None, 1)}),
        ((0, 1), (0, 6), {(0, None)}),
        ((8,), (8, 6), {(0,)}),
        ((6,), (8, 6), {(1,)}),
        ((4, 6), (4, 5, 6), {(0, 2)}),
        ((6,), (6, 6), {(0,), (1,)}),
        ((4, 6), (4, 6, 6), {(0, 1), (0, 2)}),
        ((2, 2), (2, 2, 2), {(0, 1), (0, 2), (1, 2)}),
        # A scalar, a preconditioner, blocks, a matrix of a vector: they follow nothing.
        ((), (8,), set()),
        ((8, 8), (8, 6), set()),
        ((16,), (8, 6), set()),
        ((48, 1), (48,), set()),
        ((6,), (6, 6, 6), set()),
    ],
)
def test_dims_that_state_follows(
    state: tuple[int, ...], parameter: tuple[int, ...], ways: set[tuple[int | None, ...]]
) -> None:
    assert set(followed_dims(state, parameter)) == ways
