"""What a cast does to the numbers, held against the cast itself."""

from __future__ import annotations

import itertools

import pytest
import torch

from dcp_placements.load.casting import cast_kind

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
