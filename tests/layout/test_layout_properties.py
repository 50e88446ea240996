"""Laws of layouts: at every coordinate of any mesh they say what plain slicing gives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    NAMES,
    Case,
    arange,
    cases,
    coordinates,
    count,
    examples,
    mesh_sizes,
    placements_over,
    shapes,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import CheckpointPlacement, FusedShard, IndexShard, MeshCoordinate
from dcp_placements.bind.one_tensor import Place, bind
from dcp_placements.layout.sharding import Chunk, Cut, Kind, Sharding
from dcp_placements.testing import FakeMesh, cut


def layout_of(
    case: Case, coordinate: Sequence[int], logical_shape: tuple[int, ...] | None = None
) -> tuple[tuple[int, ...], tuple[Chunk, ...]]:
    """Return local shape and chunks, by cuts as a reader of the docstrings would make them."""
    cuts, positions = [], []
    for placement, size, at in zip(case.placements, case.sizes, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, FusedShard):
            cuts.append(Cut(placement.dim, None, size, Kind.FUSED, placement.parts))
        elif isinstance(placement, Shard):
            cuts.append(Cut(placement.dim, None, size))
        else:
            cuts.append(Cut(placement.dim, None, size, Kind.STRIDED, placement.split_factor))
        positions.append(at)
    padded = None if logical_shape is None else case.shape
    sharding = Sharding(logical_shape or case.shape, tuple(cuts), padded)
    return sharding.local_shape(positions), sharding.chunks(positions)


def slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


def assembled(
    whole: torch.Tensor, local_shape: Sequence[int], chunks: tuple[Chunk, ...]
) -> torch.Tensor:
    """Return a local tensor filled chunk by chunk; -1 where no chunk reaches."""
    local = torch.full(tuple(local_shape), -1, dtype=whole.dtype)
    for chunk in chunks:
        local[slices(chunk.local_offsets, chunk.sizes)] = whole[slices(*chunk.box)]
    return local


@given(cases())
@examples(50)
def test_chunks_put_every_element_where_slicing_finds_it(case: Case) -> None:
    whole = arange(case.shape)
    for coordinate in coordinates(case.sizes):
        shape, chunks = layout_of(case, coordinate)
        expected = cut(whole, case.placements, case.sizes, coordinate)
        local = assembled(whole, shape, chunks)
        assert local.shape == expected.shape
        assert torch.equal(local, expected)
        filled = torch.zeros(shape, dtype=torch.long)
        for chunk in chunks:
            assert 0 not in chunk.sizes
            filled[slices(chunk.local_offsets, chunk.sizes)] += 1
        assert bool((filled == 1).all())
        assert bool((count(case.shape, [chunk.box for chunk in chunks]) <= 1).all())


@given(cases())
@examples(50)
def test_distinct_chunks_of_all_coordinates_tile_the_whole(case: Case) -> None:
    boxes = {
        chunk.box
        for coordinate in coordinates(case.sizes)
        for chunk in layout_of(case, coordinate)[1]
    }
    assert bool((count(case.shape, sorted(boxes)) == 1).all())


@given(cases(max_axes=3, max_ranks=16), st.data())
@examples(30)
def test_axes_of_size_one_change_nothing(case: Case, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(case.sizes)))
    dim = data.draw(st.integers(0, len(case.shape) - 1))
    sizes = (*case.sizes[:position], 1, *case.sizes[position:])
    placements = (*case.placements[:position], Shard(dim), *case.placements[position:])
    with_axis = Case(case.shape, sizes, placements)
    for coordinate in coordinates(case.sizes):
        longer = (*coordinate[:position], 0, *coordinate[position:])
        assert layout_of(with_axis, longer) == layout_of(case, coordinate)


@given(shapes(), st.data())
@examples(30)
def test_listed_rows_are_those_that_index_select_gives(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """``IndexShard`` says something else on every rank; then the rank's own FSDP cuts those."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    rows = st.lists(st.integers(0, shape[dim] - 1), max_size=8) if shape[dim] else st.just([])
    fsdp, fsdp_dim = data.draw(st.integers(1, 3)), data.draw(st.integers(0, len(shape) - 1))
    whole = arange(shape)
    for listed in (data.draw(rows) for _ in range(data.draw(st.integers(1, 4)))):
        placements = (IndexShard(dim, tuple(listed)), Shard(fsdp_dim))
        cuts = Cut(dim, "ep", 4, Kind.LISTED), Cut(fsdp_dim, "fsdp", fsdp)
        sharding = Sharding(shape, cuts)
        for position in range(fsdp):
            at = [tuple(listed), position]
            expected = cut(whole, placements, (4, fsdp), (0, position))
            local = assembled(whole, sharding.local_shape(at), sharding.chunks(at))
            assert local.shape == expected.shape
            assert torch.equal(local, expected)


@given(cases(max_axes=3, max_ranks=32), st.data())
@examples(40)
def test_padding_is_in_no_chunk(case: Case, data: st.DataObject) -> None:
    """The padded shape is what is cut; the rows beyond the real one stay out of the chunks."""
    logical = tuple(data.draw(st.integers(0, size)) for size in case.shape)
    padded = torch.full(case.shape, -1.0)
    inside = tuple(slice(0, size) for size in logical)
    padded[inside] = arange(logical)
    whole = padded[inside]
    boxes = set()
    for coordinate in coordinates(case.sizes):
        shape, chunks = layout_of(case, coordinate, logical)
        expected = cut(padded, case.placements, case.sizes, coordinate)
        assert torch.equal(assembled(whole, shape, chunks), expected)
        boxes |= {chunk.box for chunk in chunks}
    assert bool((count(logical, sorted(boxes)) == 1).all())


def bound(
    part: torch.Tensor,
    mesh: FakeMesh,
    own_names: tuple[str, ...],
    own_placements: tuple[Any, ...],
    local: torch.Tensor,
    placement: CheckpointPlacement | None,
) -> Place:
    own_mesh = mesh[own_names] if own_names else None
    place = bind(tuple(part.shape), tuple(local.shape), placement, own_mesh, own_placements)
    assert place is not None
    return place


@given(st.data())
@examples(50)
def test_rule_cuts_first_then_the_tensor_s_own_placements(data: st.DataObject) -> None:
    """Whatever position the tensor's own axes have in the checkpoint's mesh."""
    sizes = data.draw(mesh_sizes(max_ranks=32))
    names = NAMES[: len(sizes)]
    own_names = tuple(name for name in names if data.draw(st.booleans()))
    own_sizes = tuple(sizes[names.index(name)] for name in own_names)
    shape = data.draw(shapes())
    rule_names = tuple(name for name in names if name not in own_names)
    rule_sizes = tuple(sizes[names.index(name)] for name in rule_names)
    even = data.draw(st.booleans())
    rule = data.draw(placements_over(shape, rule_sizes, even=even))
    own = data.draw(placements_over((0,) * len(shape), own_sizes, fused=False))
    # An axis that the tensor itself shards may stand in the rule, too, and counts once.
    twice = {
        name: Shard(placement.dim)
        for name, placement in zip(own_names, own, strict=True)
        if isinstance(placement, Shard) and data.draw(st.booleans())
    }
    given_shape = None if even and data.draw(st.booleans()) else shape
    whole = arange(shape)
    world = FakeMesh(sizes, names, rank=0).size()
    for rank in range(world):
        mesh = FakeMesh(sizes, names, rank=rank)
        coordinate = dict(zip(names, mesh.get_coordinate() or (), strict=True))
        part = cut(whole, rule, rule_sizes, [coordinate[name] for name in rule_names])
        local = cut(part, own, own_sizes, [coordinate[name] for name in own_names])
        placement = CheckpointPlacement(
            mesh, {**dict(zip(rule_names, rule, strict=True)), **twice}, global_shape=given_shape
        )
        place = bound(part, mesh, own_names, own, local, placement)
        assert place.sharding.global_shape == shape
        assert torch.equal(assembled(whole, local.shape, place.chunks), local)


@given(cases(max_axes=3, max_ranks=32, fused=False))
@examples(30)
def test_without_a_rule_the_tensor_s_own_placements_speak(case: Case) -> None:
    names = NAMES[: len(case.sizes)]
    whole = arange(case.shape)
    for rank in range(FakeMesh(case.sizes, names, rank=0).size()):
        mesh = FakeMesh(case.sizes, names, rank=rank)
        local = cut(whole, case.placements, case.sizes, mesh.get_coordinate() or ())
        place = bound(whole, mesh, names, case.placements, local, None)
        assert place.sharding.global_shape == case.shape
        assert torch.equal(assembled(whole, local.shape, place.chunks), local)


@given(cases(max_axes=3, max_ranks=16))
@examples(20)
def test_a_mesh_is_seen_alike_by_coordinate_and_by_rank(case: Case) -> None:
    """``MeshCoordinate`` gives what a mesh on that rank gives."""
    names = NAMES[: len(case.sizes)]
    whole = arange(case.shape)
    for rank, coordinate in enumerate(itertools.product(*map(range, case.sizes))):
        local = cut(whole, case.placements, case.sizes, coordinate)
        places = []
        for mesh in (
            FakeMesh(case.sizes, names, rank=rank),
            MeshCoordinate(names, case.sizes, coordinate),
        ):
            placement = CheckpointPlacement(mesh, case.placements, global_shape=case.shape)
            place = bind(tuple(local.shape), tuple(local.shape), placement)
            assert place is not None
            places.append(place.chunks)
        assert places[0] == places[1] == layout_of(case, coordinate)[1]


@given(st.data())
@examples(30)
def test_fused_rule_makes_the_tensor_s_own_cut_of_that_axis_more_exact(data: st.DataObject) -> None:
    """A DTensor over tp says ``Shard``; that what it cuts is gate|up only the rule knows.

    FSDP2 writes its own cut of the tp part as ``_StridedShard`` with tp's size, left of tp.
    """
    tp, fsdp, columns = (data.draw(st.integers(1, n)) for n in (4, 3, 3))
    each = [tp * data.draw(st.integers(1, 3)) for _ in range(data.draw(st.integers(1, 3)))]
    whole = arange((sum(each), columns))
    fused = FusedShard(0, tuple(each))
    own = (_StridedShard(0, split_factor=tp), Shard(0))
    for rank in range(fsdp * tp):
        mesh = FakeMesh((fsdp, tp), ("fsdp", "tp"), rank=rank)
        at_fsdp, at_tp = mesh.get_coordinate() or ()
        local = cut(cut(whole, [fused], [tp], [at_tp]), [Shard(0)], [fsdp], [at_fsdp])
        placement = CheckpointPlacement(mesh, {"tp": fused})
        place = bound(whole, mesh, ("fsdp", "tp"), own, local, placement)
        assert place.sharding.global_shape == tuple(whole.shape)
        assert torch.equal(assembled(whole, local.shape, place.chunks), local)
