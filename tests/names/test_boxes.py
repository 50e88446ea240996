"""What a rename means for boxes, against plain slicing, stacking and concatenating."""

from __future__ import annotations

import pytest

from dcp_placements import Parts, Row, Rows
from dcp_placements.errors import CannotPlace
from dcp_placements.layout.sharding import Box
from dcp_placements.names.rename_results import Target, renamed_boxes


def test_a_name_is_the_whole_tensor() -> None:
    whole = Box((0, 0), (2, 3))
    assert renamed_boxes("b", (2, 3)) == [Target("b", (2, 3), (0, 1), ((whole, whole),))]


def test_a_scalar_goes_to_every_row_and_part_and_is_stacked_on_the_dim_that_there_is() -> None:
    parts = renamed_boxes(Parts(("a.{}.q", "a.{}.k"), "a.qk", 1, (1, 1), rows=0), (), rows=2)
    assert [part.fqn for part in parts] == ["a.0.q", "a.0.k", "a.1.q", "a.1.k"]
    assert {part.shape for part in parts} == {()}
    (target,) = renamed_boxes(Row("step", 2, 4, dim=1), ())
    assert (target.shape, target.boxes[0][1]) == ((4,), Box((2,), (1,)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (Row("w", 0, 2, dim=3), r"cannot stack rows of shape \(4, 6\) on dim 3"),
        (Rows("w.{}", "w", 2), r"cannot be unstacked on dim 2: its shape is \(4, 6\)"),
        (Parts(("a",), "w", 2, (1,)), r"cannot be split: there is no dim 2, the shape is \(4, 6\)"),
        (Parts(("a", "b", "c"), "w", 0, (1, 1, 1)), "cannot be split: 4 on dim 0 cannot be cut"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(name: Row | Rows | Parts, text: str) -> None:
    with pytest.raises(CannotPlace, match=text):
        renamed_boxes(name, (4, 6))
