"""The same local shape and offset as torch's own function, wherever a shard is one box.

torch names the first offset only, and for an empty shard the end of the dim; what we know beyond
that is held against plain slicing in test_layout_properties.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Case, cases, coordinates, examples
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements.layout.sharding import Cut, Kind, Sharding


def sharding_of(case: Case) -> Sharding:
    cuts = [
        Cut(placement.dim, None, size, Kind.STRIDED, getattr(placement, "split_factor", 1))
        for size, placement in zip(case.sizes, case.placements, strict=True)
        if not isinstance(placement, Replicate)
    ]
    return Sharding(case.shape, tuple(cuts))


def positions(case: Case, coordinate: tuple[int, ...]) -> list[int]:
    pairs = zip(coordinate, case.placements, strict=True)
    return [at for at, placement in pairs if not isinstance(placement, Replicate)]


def torch_says(case: Case, coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape, offset = _compute_local_shape_and_global_offset(
        case.shape, case.sizes, list(coordinate), case.placements
    )
    return tuple(shape), tuple(offset)


def assert_parity(case: Case) -> int:
    """Compare all coordinates; return how many of them hold one box."""
    compared = 0
    sharding = sharding_of(case)
    for coordinate in coordinates(case.sizes):
        at = positions(case, coordinate)
        shape, offset = torch_says(case, coordinate)
        assert sharding.local_shape(at) == shape
        chunks = sharding.chunks(at)
        if len(chunks) == 1:
            assert (chunks[0].offsets, chunks[0].sizes) == (offset, shape)
            compared += 1
        else:
            # Several boxes: torch can name the first row of each dim only.
            assert not chunks or chunks[0].offsets == offset
            assert bool(chunks) == (0 not in shape)
    return compared


@given(cases(max_axes=3, max_ranks=32, fused=False, strided=False))
@examples(25)
def test_sharded_and_replicated_axes_agree_with_torch(case: Case) -> None:
    assert_parity(case)


@given(cases(max_axes=3, max_ranks=16, fused=False))
@examples(25)
def test_strided_axes_agree_with_torch(case: Case) -> None:
    assert_parity(case)


@given(st.integers(0, 13), st.integers(1, 4), st.integers(1, 4))
@examples(25)
def test_fsdp_beside_tp_on_one_dim_is_one_box_as_torch_says(size: int, fsdp: int, tp: int) -> None:
    """``_StridedShard`` with tp's size, then ``Shard``: what FSDP2 writes for a tp parameter."""
    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    case = Case((size * tp * fsdp, 3), (fsdp, tp), placements)
    assert assert_parity(case) == (fsdp * tp if size else 0)


@pytest.mark.parametrize(
    ("shape", "sizes", "placements"),
    [
        ((5, 3), (2, 2), (Shard(0), Shard(0))),
        ((5, 3), (2, 2), (Shard(0), Shard(1))),
        ((5, 3), (2, 2), (Replicate(), Shard(1))),
        ((1, 7), (4,), (Shard(0),)),
        ((8, 3), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        ((7, 5, 3), (3, 2, 2), (Shard(2), Shard(0), Shard(1))),
    ],
)
def test_known_shards_are_one_box_on_every_rank_that_holds_any(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    case = Case(shape, sizes, placements)
    holding = sum(0 not in torch_says(case, each)[0] for each in coordinates(sizes))
    assert assert_parity(case) == holding > 0
