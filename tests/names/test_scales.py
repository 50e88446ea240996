"""Which key has the scales of a quantized tensor."""

from __future__ import annotations

import pytest
import torch

from dcp_placements.names.scales import scale_of

FP8, INT8, UINT8 = torch.float8_e4m3fn, torch.int8, torch.uint8


@pytest.mark.parametrize(
    ("fqn", "dtype", "scale"),
    [
        (
            "model.layers.0.mlp.down_proj.weight",
            FP8,
            "model.layers.0.mlp.down_proj.weight_scale_inv",
        ),
        ("q.weight", torch.float8_e5m2, "q.weight_scale"),
        ("q.weight", INT8, "q.weight_scale"),
        ("experts.gate_up_proj", FP8, "experts.gate_up_proj_scale_inv"),
        ("experts.gate_up_proj_blocks", UINT8, "experts.gate_up_proj_scales"),
        ("q.weight_packed", UINT8, "q.weight_scale"),
        ("q.weight", INT8, "q.SCB"),
        ("q.weight", UINT8, "q.weight.absmax"),
        ("q.weight", FP8, "q.qscale_weight"),
        ("q.weight", FP8, "q.scale"),
        ("q.weight._data", INT8, "q.weight._scale"),
        ("q", INT8, "q.weight_scale"),
    ],
)
def test_the_scales_of_published_forms_are_found(fqn: str, dtype: torch.dtype, scale: str) -> None:
    assert scale_of(fqn, dtype, {fqn, scale, "other.weight_scale"}) == scale
    assert scale_of(fqn, dtype, {fqn, "other.weight_scale"}) is None
    for plain in (torch.bfloat16, torch.float32, torch.int32, torch.bool):
        assert scale_of(fqn, plain, {fqn, scale}) is None


@pytest.mark.parametrize(
    ("fqn", "other"),
    [
        ("norm.mask", "norm.scale"),
        ("q.weight", "q.input_scale"),
        ("q.weight", "p.weight_scale"),
        ("q.bias", "q.weight_scale"),
        ("logit_scale", "logit"),
    ],
)
def test_what_is_beside_a_tensor_of_bytes_by_chance_is_no_scale(fqn: str, other: str) -> None:
    assert scale_of(fqn, UINT8, {fqn, other}) is None
