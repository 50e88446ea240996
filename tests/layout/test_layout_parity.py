"""The same local shape and offset as torch's own function, wherever a shard is one box.

torch names the first offset only, and for an empty shard the end of the dim; what we know beyond
that is held against plain slicing in test_layout_properties.py.
"""

from __future__ import annotations

from hypothesis import given
from strategies import Case, cases, coordinates, examples
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

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


def assert_parity(case: Case) -> None:
    """Compare all coordinates."""
    sharding = sharding_of(case)
    for coordinate in coordinates(case.sizes):
        at = positions(case, coordinate)
        shape, offset = torch_says(case, coordinate)
        local_shape, chunks = sharding.shard(at)
        assert local_shape == shape
        if len(chunks) == 1:
            assert (chunks[0].offsets, chunks[0].sizes) == (offset, shape)
        else:
            # Several boxes: torch can name the first row of each dim only.
            assert not chunks or chunks[0].offsets == offset
            assert bool(chunks) == (0 not in shape)


@given(cases(max_axes=3, max_ranks=32, fused=False, strided=False))
@examples(25)
def test_sharded_and_replicated_axes_agree_with_torch(case: Case) -> None:
    assert_parity(case)


@given(cases(max_axes=3, max_ranks=16, fused=False))
@examples(25)
def test_strided_axes_agree_with_torch(case: Case) -> None:
    assert_parity(case)
