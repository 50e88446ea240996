"""What a rename means for boxes, against plain slicing, stacking and concatenating."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_placements import Parts, Row, Rows
from dcp_placements.errors import CannotPlace
from dcp_placements.layout.boxes import as_array, tile
from dcp_placements.layout.sharding import Box, Cut, Sharding
from dcp_placements.names.stacks_and_parts import Target, renamed_boxes
from tests.strategies import arange, examples


def sliced(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(at, at + n) for at, n in zip(*box, strict=True))]


def filled(target: Target, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return the target's tensor, its boxes copied one by one."""
    whole = torch.full(target.shape, -1, dtype=source.dtype) if into is None else into
    for taken, put in target.boxes:
        sliced(whole, put).copy_(sliced(source, taken).reshape(put.sizes))
    return whole


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@examples(100)
@given(shape=shapes, dims=st.tuples(st.integers(-2, 1), st.integers(-2, 1)), within=st.booleans())
def test_rows_are_stacked_as_torch_does(
    shape: tuple[int, ...], dims: tuple[int, int], within: bool
) -> None:
    layers, experts = (2 if within else 1), 3
    sources = arange((layers, experts, *shape)) + 1
    whole = None
    for layer, expert in itertools.product(range(layers), range(experts)):
        row = Row("w", expert, experts, dims[0])
        if within:
            row = replace(row, within=(Row("w", layer, layers, dims[1]),))
        (target,) = renamed_boxes(row, shape)
        whole = filled(target, sources[layer, expert], whole)
    stacks = [torch.stack(list(held), dims[0]) for held in sources]
    assert whole is not None
    assert torch.equal(whole, torch.stack(stacks, dims[1]) if within else stacks[0])


@st.composite
def fused(draw: st.DrawFn) -> tuple[tuple[int, ...], Rows | Parts]:
    shape = list(draw(shapes))
    rows = draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    ndim = len(shape) - (rows is not None)
    if ndim == 0 or (rows is not None and draw(st.booleans())):
        return tuple(shape), Rows("a.{}", "a", 0 if rows is None else rows)
    dim, groups = draw(st.integers(-ndim, ndim - 1)), draw(st.integers(1, 3))
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    rest = [d for d in range(len(shape)) if rows is None or d != rows % len(shape)]
    shape[rest[dim]] = sum(sizes) * groups * draw(st.integers(0, 2))
    fqns = tuple(f"{n}.{{}}" for n in range(len(sizes)))
    return tuple(shape), Parts(fqns, "a", dim, sizes, groups, rows)


def parts_by_slicing(whole: torch.Tensor, name: Rows | Parts) -> list[torch.Tensor]:
    at = name.dim if isinstance(name, Rows) else name.rows
    rows = [whole] if at is None else list(whole.unbind(at))
    if isinstance(name, Rows):
        return rows
    found = []
    for row in rows:
        unit = row.shape[name.dim] // (sum(name.sizes) * name.groups)
        runs = row.split([size * unit for size in name.sizes * name.groups], name.dim)
        count = len(name.sizes)
        found += [torch.cat(runs[part::count], name.dim) for part in range(count)]
    return found


@examples(150)
@given(case=fused())
def test_rows_and_parts_are_those_of_slicing_and_tile_the_source(
    case: tuple[tuple[int, ...], Rows | Parts],
) -> None:
    shape, name = case
    whole = arange(shape)
    targets = renamed_boxes(name, shape)
    wanted = parts_by_slicing(whole, name)
    assert len(targets) == len(wanted)
    for target, part in zip(targets, wanted, strict=True):
        assert torch.equal(filled(target, whole), part)
    if whole.numel():
        boxes = [source for target in targets for source, _ in target.boxes]
        assert tile(Box((0,) * len(shape), shape), as_array(boxes, len(shape)))


@examples(100)
@given(case=fused(), ranks=st.integers(1, 3), data=st.data())
def test_chunks_of_a_rank_are_moved_with_the_boxes(
    case: tuple[tuple[int, ...], Rows | Parts], ranks: int, data: st.DataObject
) -> None:
    shape, name = case
    whole = arange(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    sharding = Sharding(shape, (Cut(dim, "ep", ranks),))
    for target in renamed_boxes(name, shape):
        tensor = torch.full(target.shape, -1, dtype=whole.dtype)
        for rank in range(ranks):
            for chunk in target.chunks(sharding.chunks([rank])):
                assert all(size > 0 for size in chunk.sizes)
                ((source, put),) = (
                    pair
                    for pair in target.boxes
                    if all(
                        a <= b and b + n <= a + m
                        for a, m, b, n in zip(*pair[1], *chunk.box, strict=True)
                    )
                )
                offsets = list(source.offsets)
                sizes = [1] * len(shape)
                for at, origin in enumerate(target.dims):
                    assert origin is not None
                    offsets[origin] += chunk.offsets[at] - put.offsets[at]
                    sizes[origin] = chunk.sizes[at]
                held = sliced(whole, Box(tuple(offsets), tuple(sizes)))
                sliced(tensor, chunk.box).copy_(held.reshape(chunk.sizes))
        assert torch.equal(tensor, filled(target, whole))


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
