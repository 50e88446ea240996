"""What a cast does to the numbers, held against the cast itself."""

from __future__ import annotations

import itertools

import pytest
import torch

from dcp_placements.load.casting import CASTS, cast_kind

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize(
    ("stored", "wanted", "kind"),
    [
        (torch.float32, torch.float32, "same"),
        (torch.float32, torch.bfloat16, "narrowing"),
        (torch.bfloat16, torch.float32, "widening"),
        (torch.float16, torch.bfloat16, "narrowing"),
        (torch.bfloat16, torch.float16, "narrowing"),
        (torch.float8_e4m3fn, torch.bfloat16, "widening"),
        (torch.float32, torch.float8_e4m3fn, "narrowing"),
        (torch.float8_e4m3fn, torch.float8_e5m2, "narrowing"),
        (torch.float32, torch.int32, "wrong"),
        (torch.bfloat16, torch.int64, "wrong"),
        (torch.float32, torch.bool, "wrong"),
        (torch.int32, torch.bool, "wrong"),
        (torch.complex64, torch.float32, "wrong"),
        (torch.int32, torch.int64, "widening"),
        (torch.int64, torch.int32, "narrowing"),
        (torch.int8, torch.uint8, "narrowing"),
        (torch.uint8, torch.int8, "narrowing"),
        (torch.uint8, torch.int16, "widening"),
        (torch.int32, torch.float32, "narrowing"),
        (torch.int32, torch.float64, "widening"),
        (torch.int64, torch.float64, "narrowing"),
        (torch.int16, torch.float32, "widening"),
        (torch.uint8, torch.bfloat16, "widening"),
        (torch.int16, torch.bfloat16, "narrowing"),
        (torch.bool, torch.float32, "widening"),
        (torch.bool, torch.int8, "widening"),
        (torch.float32, torch.complex64, "widening"),
        (torch.float64, torch.complex64, "narrowing"),
    ],
)
def test_kind_of_a_cast(stored: torch.dtype, wanted: torch.dtype, kind: str) -> None:
    assert cast_kind(stored, wanted) == kind


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


def test_the_choices_are_these() -> None:
    assert CASTS == ("error", "warn", "allow")
