"""What a cast does to the numbers, held against the cast itself."""

from __future__ import annotations

import itertools

import pytest
import torch

from dcp_placements.load.casting import VALUES, cast_kind

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.mark.parametrize(("stored", "wanted"), list(itertools.permutations((*FLOATS, *INTS), 2)))
def test_widening_gives_every_value_back(stored: torch.dtype, wanted: torch.dtype) -> None:
    """There and back again: the extremes, the finest steps and many values between."""
    if stored.is_floating_point:
        info = torch.finfo(stored)
        edges = [info.max, info.min, 1 + info.eps, 1 - info.eps / 2, 2 / 3]
        values = torch.tensor([*edges, *range(-100, 100)], dtype=torch.float64).to(stored)
    else:
        limits = torch.iinfo(stored)
        edges = [limits.max, limits.min, limits.max - 1, limits.max // 2 + 1]
        values = torch.tensor([*edges, *range(100)], dtype=torch.int64).to(stored)
    kind = cast_kind(stored, wanted)
    if kind == "widening":
        assert torch.equal(values.to(wanted).to(stored), values)
    else:
        assert kind == (
            "wrong" if stored.is_floating_point > wanted.is_floating_point else "narrowing"
        )


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Return every value of a dtype of one byte or two."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype)


SMALL = [dtype for dtype in VALUES if dtype.itemsize < 3]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("stored", SMALL, ids=str)
def test_m125_what_widens_is_what_keeps_every_value_of_a_small_dtype(stored: torch.dtype) -> None:
    values = all_values(stored)
    as_double = values.to(torch.float64)
    assert len(set(as_double.tolist())) > 1
    for wanted in VALUES:
        if wanted == stored:
            continue
        cast = values.to(wanted).to(torch.complex128)
        keeps = (cast.real == as_double) | (cast.real.isnan() & as_double.isnan())
        kind = cast_kind(stored, wanted)
        assert (kind == "widening") == (bool(keeps.all()) and torch.can_cast(stored, wanted)), (
            wanted
        )


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("stored", [d for d in VALUES if d.itemsize > 2], ids=str)
def test_m125_what_widens_keeps_the_extremes_of_a_large_dtype(stored: torch.dtype) -> None:
    if stored.is_floating_point or stored.is_complex:
        info = torch.finfo(stored)
        tiny = info.smallest_normal * info.eps
        edges = [info.max, info.min, tiny, -tiny, 1 + info.eps, float("inf"), float("nan"), 2 / 3]
        values = torch.tensor(edges, dtype=torch.float64).to(stored)
    else:
        limits = torch.iinfo(stored)
        values = torch.tensor([limits.max, limits.min, limits.max - 1], dtype=stored)
    for wanted in VALUES:
        kind = cast_kind(stored, wanted)
        if wanted == stored or not torch.can_cast(stored, wanted):
            assert kind in ("same", "wrong")
        else:  # Python compares numbers of different types exactly
            pairs = zip(values.tolist(), values.to(wanted).tolist(), strict=True)
            keeps = all(one == other or (one != one and other != other) for one, other in pairs)
            assert (kind == "widening") == keeps, wanted


@pytest.mark.parametrize(
    "dtype",
    [torch.float4_e2m1fn_x2, torch.qint8, torch.quint8, torch.bits8, torch.uint4, torch.int1],
)
def test_m125_elements_that_are_no_numbers_are_never_cast(dtype: torch.dtype) -> None:
    for other in (torch.float32, torch.uint8, torch.float8_e4m3fn):
        assert cast_kind(dtype, other) == cast_kind(other, dtype) == "wrong"
    assert cast_kind(dtype, dtype) == "same"
