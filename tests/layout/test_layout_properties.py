"""Laws of layouts: at every coordinate of any mesh they say what plain slicing gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    Case,
    arange,
    cases,
    coordinates,
    count,
    examples,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import CheckpointPlacement, FusedShard, RaggedShard
from dcp_placements.bind.rule_and_dtensor import Place, SharedPlaces
from dcp_placements.layout.sharding import Chunk, Cut, Kind, Sharding
from dcp_placements.testing import FakeMesh, cut


def layout_of(case: Case, coordinate: Sequence[int]) -> tuple[tuple[int, ...], tuple[Chunk, ...]]:
    """Return local shape and chunks, by cuts as a reader of the docstrings would make them."""
    cuts, positions = [], []
    for placement, size, at in zip(case.placements, case.sizes, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, FusedShard):
            cuts.append(Cut(placement.dim, None, size, Kind.FUSED, placement.parts))
        elif isinstance(placement, RaggedShard):
            cuts.append(Cut(placement.dim, None, size, Kind.RAGGED, placement.sizes))
        elif isinstance(placement, Shard):
            cuts.append(Cut(placement.dim, None, size))
        else:
            cuts.append(Cut(placement.dim, None, size, Kind.STRIDED, placement.split_factor))
        positions.append(at)
    sharding = Sharding(case.shape, tuple(cuts))
    return sharding.shard(positions)


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


def bound(
    part: torch.Tensor,
    mesh: FakeMesh,
    own_names: tuple[str, ...],
    own_placements: tuple[Any, ...],
    local: torch.Tensor,
    placement: CheckpointPlacement | None,
) -> Place:
    own_mesh = mesh[own_names] if own_names else None
    return SharedPlaces().bind((local, own_mesh, own_placements, part.shape), placement)


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
