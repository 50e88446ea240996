"""Quantized files imported as numbers, against the published formulas computed on the whole."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from dcp_placements import PlacementError, Split, Stack
from dcp_placements.convert import dequantize
from dcp_placements.offline import (
    CannotLook,
    diff,
    export_safetensors,
    import_checkpoint,
    open_source,
)
from tests.offline_scenes import save_hugging_face

E4M3, E5M2, F4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def spread(scale: torch.Tensor, shape: tuple[int, ...], blocks: tuple[int, ...]) -> torch.Tensor:
    """Return a scale for each element of a whole tensor, by repetition."""
    scale = scale.float()
    for dim, (size, block) in enumerate(zip(shape, blocks, strict=True)):
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scale


def floats(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of packed float4, byte by byte."""
    rows = codes.view(torch.uint8).reshape(-1, codes.shape[-1]).tolist()
    values = [[FP4[half] for byte in row for half in (byte & 15, byte >> 4)] for row in rows]
    return torch.tensor(values).reshape(*codes.shape[:-1], -1)


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random elements, or scales, of a dtype."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.int8, torch.uint8):
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, generator=generator).to(dtype)
    return (torch.rand(shape, generator=generator) * 3 + 0.01).to(dtype)


def powers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return bytes of exponents for scales near 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(120, 134, shape, generator=generator).to(torch.uint8)


def imported(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: Any = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Return what torch's own planner reads of an import of these tensors."""
    source = tmp_path / "files"
    source.mkdir(exist_ok=True)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, source / "model.safetensors"
    )
    if config is not None:
        (source / "config.json").write_text(json.dumps({"quantization_config": config}))
    import_checkpoint(source, tmp_path / "out", **{"dequantize": torch.float32, **options})
    metadata = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    state = {k: torch.zeros(m.size, dtype=m.properties.dtype) for k, m in metadata.items()}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    return state


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
SHAPES = [(160, 130), (128, 128), (1, 300), (257, 129), (130, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_block_scaled_float8(
    tmp_path: Path, shape: tuple[int, int], scale_dtype: torch.dtype
) -> None:
    elements = (torch.randn(shape) * 50).to(E4M3)
    grid = -(-shape[0] // 128), -(-shape[1] // 128)
    scale = (
        powers(grid, 1).view(scale_dtype)
        if scale_dtype.itemsize == 1
        else some(grid, scale_dtype, 1)
    )
    files = {"a.weight": elements, "a.weight_scale_inv": scale, "norm": torch.ones(3)}
    expected = elements.float() * spread(scale, shape, (128, 128))
    state = imported(tmp_path, files, FP8)
    assert torch.equal(state["a.weight"], expected)
    assert state.keys() == {"a.weight", "norm"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_are_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    elements, scale = (torch.randn(40, 24) * 50).to(E4M3), some((5, 2), torch.float32, 3)
    config = {"quant_method": "fp8", "weight_block_size": [8, 16]}
    files = {"w": elements, "w_scale_inv": scale}
    state = imported(tmp_path, files, config, dequantize=dtype)
    assert torch.equal(state["w"], (elements.float() * spread(scale, (40, 24), (8, 16))).to(dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8])
@pytest.mark.parametrize(
    ("name", "scale_shape"),
    [
        ("weight_scale", ()),
        ("weight_scale", (1,)),
        ("weight_scale", (6,)),
        ("weight_scale", (6, 1)),
        ("weight_scale", (1, 10)),
        ("weight_scale_inv", ()),
        ("scale", (6, 1)),
        ("qscale_weight", ()),
    ],
)
def test_per_tensor_and_per_channel(
    tmp_path: Path, dtype: torch.dtype, name: str, scale_shape: tuple[int, ...]
) -> None:
    elements, scale = some((6, 10), dtype, 2), some(scale_shape, torch.float32, 4)
    state = imported(tmp_path, {"q.weight": elements, f"q.{name}": scale})
    by_row = scale[:, None] if scale_shape == (6,) else scale
    assert torch.equal(state["q.weight"], elements.float() * by_row)


@pytest.mark.parametrize(
    ("scale_shape", "by"),
    [((3,), (3, 1, 1)), ((3, 4), (3, 4, 1)), ((3, 1, 5), (3, 1, 5)), ((3, 1, 1), (3, 1, 1))],
)
def test_stacked_experts(tmp_path: Path, scale_shape: tuple[int, ...], by: tuple[int, ...]) -> None:
    elements, scale = some((3, 4, 5), E4M3, 2), some(scale_shape, torch.float32, 4)
    state = imported(tmp_path, {"experts.up": elements, "experts.up_scale": scale})
    assert torch.equal(state["experts.up"], elements.float() * scale.reshape(by))


def test_zero_points_are_subtracted(tmp_path: Path) -> None:
    elements, scale = some((6, 10), torch.int8, 2), some((6, 1), torch.float32, 4)
    zeros = some((6, 1), torch.int8, 5)
    files = {"q.weight": elements, "q.weight_scale": scale, "q.weight_zero_point": zeros}
    state = imported(tmp_path, files)
    assert torch.equal(state["q.weight"], (elements.float() - zeros.float()) * scale)
    assert state.keys() == {"q.weight"}


def test_compressed_tensors_groups_and_blocks(tmp_path: Path) -> None:
    weights = [
        {"strategy": "block", "block_structure": [4, 8]},
        {"strategy": "group", "group_size": 5},
    ]
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {f"group_{n}": {"weights": each} for n, each in enumerate(weights)},
    }
    elements, scale, groups = (
        some((6, 10), E4M3, 2),
        some((2, 2), torch.float32, 4),
        some((6, 2), torch.float32, 4),
    )
    files = {
        "q.weight": elements,
        "q.weight_scale": scale,
        "k.weight": elements.clone(),
        "k.weight_scale": groups,
        "k.input_scale": torch.ones(1),
    }
    state = imported(tmp_path, files, config)
    assert torch.equal(state["q.weight"], elements.float() * spread(scale, (6, 10), (4, 8)))
    assert torch.equal(state["k.weight"], elements.float() * spread(groups, (6, 10), (1, 5)))
    assert state.keys() == {"q.weight", "k.weight"}


def test_model_opts_scales_with_ones_between(tmp_path: Path) -> None:
    elements, scale = some((160, 130), E4M3, 2), some((2, 1, 2, 1), torch.float32, 4)
    files = {"q.weight": elements, "q.weight_scale": scale}
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    state = imported(tmp_path, files, config)
    expected = elements.float() * spread(scale.reshape(2, 2), (160, 130), (128, 128))
    assert torch.equal(state["q.weight"], expected)


def test_mxfp4_as_gpt_oss_publishes_it(tmp_path: Path) -> None:
    blocks, scales = some((2, 6, 3, 16), torch.uint8, 2), powers((2, 6, 3), 3)
    files = {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales}
    files["experts.gate_up_proj_bias"] = torch.ones(2, 6, dtype=torch.bfloat16)
    state = imported(tmp_path, files, {"quant_method": "mxfp4"})
    expected = floats(blocks) * (2.0 ** (scales.float() - 127))[..., None]
    assert torch.equal(state["experts.gate_up_proj"], expected.reshape(2, 6, 96))
    assert state.keys() == {"experts.gate_up_proj", "experts.gate_up_proj_bias"}


def test_the_ends_of_exponents(tmp_path: Path) -> None:
    blocks = torch.full((1, 3, 16), 0x22, dtype=torch.uint8)  # ones
    files = {"w_blocks": blocks, "w_scales": torch.tensor([[0, 254, 255]], dtype=torch.uint8)}
    state = imported(tmp_path, files)
    assert state["w"][0, 0].item() == 2.0**-127
    assert state["w"][0, 32].item() == 2.0**127
    assert state["w"][0, 64:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, F4])
@pytest.mark.parametrize("published", ["modelopt", "compressed-tensors"])
def test_nvfp4(tmp_path: Path, dtype: torch.dtype, published: str) -> None:
    codes, scales = some((5, 24), torch.uint8, 2), some((5, 3), E4M3, 3)
    whole = torch.tensor(0.0123)
    of_blocks = scales.float() * whole
    files = {"q.weight_scale": scales, "q.input_scale": torch.tensor(0.5)}
    if published == "modelopt":
        files |= {"q.weight": codes.view(dtype), "q.weight_scale_2": whole}
    else:
        whole = torch.tensor([437.5])
        of_blocks = scales.float() / whole
        files |= {"q.weight_packed": codes.view(dtype), "q.weight_global_scale": whole}
    source = tmp_path / "files"
    source.mkdir()
    if dtype == F4:  # torch's own dtype of two in a byte, written by ours
        dcp.save(files, checkpoint_id=tmp_path / "saved", no_dist=True)
        source.rmdir()
        export_safetensors(tmp_path / "saved", source)
    else:
        save_file(files, source / "model.safetensors")
    import_checkpoint(source, tmp_path / "out", dequantize=torch.float32)
    state = {"q.weight": torch.zeros(5, 48)}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(state["q.weight"], floats(codes) * spread(of_blocks, (5, 48), (1, 16)))


def test_mxfp8(tmp_path: Path) -> None:
    elements, scales = some((5, 70), E4M3, 2), powers((5, 3), 3)
    state = imported(tmp_path, {"q.weight": elements, "q.weight_scale": scales})
    expected = elements.float() * spread(2.0 ** (scales.float() - 127), (5, 70), (1, 32))
    assert torch.equal(state["q.weight"], expected)


def test_random_schemes_read_box_by_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 weights of random scheme and shape, computed a few elements at a time."""
    monkeypatch.setattr(dequantize, "BLOCK_NUMEL", 7)
    rng = random.Random(5)
    files: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for number in range(60):
        key = f"layers.{number}.w.weight"
        rows, columns = rng.randint(1, 12), rng.randint(1, 12)
        lead = tuple(rng.choice([(), (), (2,)]))
        shape = (*lead, rows, columns)
        scheme = rng.choice(["block", "tensor", "channel", "mxfp4", "nvfp4", "gpt-oss"])
        if scheme in ("block", "tensor", "channel"):
            blocks = {
                "block": (*[1] * len(lead), 4, 6),
                "tensor": shape,
                "channel": (*[1] * len(lead), 1, columns),
            }[scheme]
            grid = tuple(-(-n // b) for n, b in zip(shape, blocks, strict=True))
            elements = some(shape, rng.choice([E4M3, torch.int8]), number)
            scale = some(grid, torch.float32, number)
            files |= {key: elements, f"{key}_scale_inv": scale}
            expected[key] = elements.float() * spread(scale, shape, blocks)
            continue
        size, groups = 16 if scheme == "nvfp4" else 32, rng.randint(1, 3)
        codes = some((*lead, rows, groups * size // 2), torch.uint8, number)
        values = floats(codes)
        blocks = (*[1] * (len(lead) + 1), size)
        if scheme == "nvfp4":
            scale, whole = some((*lead, rows, groups), E4M3, number), torch.tensor([0.37])
            files |= {f"{key}_scale": scale, f"{key}_scale_2": whole, key: codes}
            expected[key] = values * spread(scale.float() * whole, tuple(values.shape), blocks)
        else:
            scale = powers((*lead, rows, groups), number)
            grouped = codes.reshape(*lead, rows, groups, 16) if scheme == "gpt-oss" else codes
            ending = "_blocks" if scheme == "gpt-oss" else "_packed"
            files |= {f"{key}{ending}": grouped, f"{key}_scale": scale}
            of_blocks = 2.0 ** (scale.float() - 127)
            expected[key] = values * spread(of_blocks, tuple(values.shape), blocks)
    state = imported(tmp_path, files, {"quant_method": "fp8", "weight_block_size": [4, 6]})
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def test_a_rename_takes_the_names_of_the_numbers(tmp_path: Path) -> None:
    files, whole = {}, []
    for expert in range(3):
        blocks, scales = some((4, 2, 16), torch.uint8, expert), powers((4, 2), expert)
        files |= {f"e.{expert}.up_blocks": blocks, f"e.{expert}.up_scales": scales}
        whole.append(
            floats(blocks).reshape(4, 64) * spread(2.0 ** (scales.float() - 127), (4, 64), (1, 32))
        )
    state = imported(tmp_path, files, rename=Stack("e.{}", total=3))
    assert torch.equal(state["e.up"], torch.stack(whole))


def test_parts_that_end_between_two_elements_of_a_byte(tmp_path: Path) -> None:
    codes, scale = some((4, 16), torch.uint8, 1), powers((4, 1), 2)
    files = {"qkv_packed": codes, "qkv_scale": scale}
    rename = Split("qkv", ("q", "k"), dim=1, sizes=(5, 27))
    state = imported(tmp_path, files, rename=rename)
    whole = floats(codes) * 2.0 ** (scale.float() - 127)
    assert torch.equal(state["q"], whole[:, :5])
    assert torch.equal(state["k"], whole[:, 5:])


def test_the_report_names_what_became_of_everything(tmp_path: Path) -> None:
    source = tmp_path / "files"
    tensors = {
        "a.weight": torch.zeros(160, 130, dtype=E4M3),
        "a.weight_scale_inv": torch.ones(2, 2),
        "a.k_scale": torch.ones(()),
        "a.input_zero_point": torch.ones(1, dtype=torch.int8),
        "norm": torch.ones(3),
        "mask": torch.ones(3, dtype=torch.uint8),
    }
    save_hugging_face(source, tensors)
    (source / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    report = import_checkpoint(source, tmp_path / "out", dequantize=torch.bfloat16)
    assert report.keys == ("a.weight", "mask", "norm")
    assert report.accounted == {"scales, multiplied in": 16}
    beside = {each.what: each.nbytes for each in report.beside}
    assert beside == {"a.k_scale": 4, "a.input_zero_point": 1}
    assert "1 tensor, float8_e4m3fn in blocks of 128 x 128" in str(report)
    again = import_checkpoint(source, tmp_path / "again", dequantize=torch.bfloat16)
    assert again.keys == report.keys
    assert diff(tmp_path / "out", tmp_path / "again").same


def refused(tmp_path: Path, tensors: dict[str, torch.Tensor], config: Any = None) -> str:
    """Return the refusal of an import, which writes nothing."""
    with pytest.raises(PlacementError) as error:
        imported(tmp_path, tensors, config)
    assert not (tmp_path / "out").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'pack-quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ'"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"q": {"quant_algo": "W4A8"}}},
            "'W4A8'",
        ),
        ({"bits": 4, "group_size": 64}, "MLX"),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": 1}}},
            "transform_config",
        ),
    ],
)
def test_an_unknown_scheme_is_refused_by_its_name(
    tmp_path: Path, config: dict[str, Any], names: str
) -> None:
    assert names in refused(tmp_path, {"w": torch.ones(3)}, config)


QUANTIZED = {"q.weight": torch.zeros(6, 10, dtype=E4M3)}


@pytest.mark.parametrize(
    ("tensors", "texts"),
    [
        ({"q.qweight": torch.ones(3, 4).int(), "q.scales": torch.ones(4)}, ["q.qweight", "GPTQ"]),
        (
            {"q.weight": torch.zeros(3, 4).char(), "q.SCB": torch.ones(3)},
            ["q.weight", "bitsandbytes"],
        ),
        (
            {"q.weight": torch.zeros(9, 1).byte(), "q.weight.absmax": torch.ones(3)},
            ["bitsandbytes"],
        ),
        (
            {"q.weight_packed": torch.zeros(3, 4).int(), "q.weight_scale": torch.ones(3, 1)},
            ["q.weight_packed", "pack-quantized"],
        ),
        ({**QUANTIZED}, ["q.weight", "no scales"]),
        (
            {**QUANTIZED, "q.weight_scale": torch.ones(2, 3)},
            ["(6, 10)", "(2, 3)", "weight_block_size"],
        ),
        ({**QUANTIZED, "q.weight_scale": torch.ones(10)}, ["(6, 10)", "(10,)"]),
        ({**QUANTIZED, "q.weight_scale": torch.ones(6, 1).int()}, ["int32"]),
        (
            {**QUANTIZED, "q.weight_scale": torch.ones(1), "q.pre_quant_scale": torch.ones(10)},
            ["q.pre_quant_scale", "AWQ"],
        ),
        (
            {**QUANTIZED, "q.weight_scale": torch.ones(1), "q.weight_scale_3": torch.ones(1)},
            ["q.weight_scale_3"],
        ),
        (
            {
                "e.up": torch.zeros(2, 3, 8).byte(),
                "e.up_weight_scale": torch.ones(2, 3, 1).to(E4M3),
            },
            ["e.up_weight_scale"],
        ),
        (
            {"w_blocks": torch.zeros(2, 3, 16).byte(), "w_scales": torch.zeros(2, 2).byte()},
            ["(2, 3)", "(2, 2)"],
        ),
        (
            {"w_blocks": torch.zeros(2, 3, 16).byte(), "w_scales": torch.zeros(2, 3)},
            ["w_blocks", "float32"],
        ),
        (
            {"q.weight": torch.zeros(2, 16).byte(), "q.weight_scale": torch.ones(2, 2).to(E4M3)},
            ["NVFP4", "scale of the whole"],
        ),
        ({"w": torch.ones(3)}, ["none of the 1 tensors is quantized"]),
        (
            {
                "w_blocks": torch.zeros(2, 1, 16).byte(),
                "w_scales": torch.zeros(2, 1).byte(),
                "w": torch.ones(1),
            },
            ["would be w"],
        ),
        (
            {
                "w_blocks": torch.zeros(2, 1, 16).byte(),
                "w_packed": torch.zeros(2, 16).byte(),
                "w_scales": torch.zeros(2, 1).byte(),
            },
            ["would be w, which w_"],
        ),
        (
            {
                "q.weight": torch.zeros(2, 16).byte(),
                "q.weight_scale": torch.zeros(2, 1).byte(),
                "q.weight_zero_point": torch.zeros(2, 1).char(),
            },
            ["q.weight: is MXFP4", "q.weight_zero_point"],
        ),
        (
            {"q.weight": torch.ones(2, 64).char(), "q.weight_scale": torch.zeros(2, 2).byte()},
            ["MXINT8", "2**-6"],
        ),
        (
            {**QUANTIZED, "q.weight_scale": torch.ones(1), "k.weight": torch.ones(2, 3).char()},
            ["k.weight: has elements of int8, and no scales"],
        ),
        (
            {**QUANTIZED, "q.weight_scale": torch.ones(1), "k.weight_zero_point": torch.ones(2)},
            ["k.weight_zero_point"],
        ),
        (
            {"q.weight": torch.ones(2, 3, dtype=torch.uint32), "q.scales": torch.ones(2, 1)},
            ["q.scales"],
        ),
    ],
)
def test_what_has_no_rule_is_refused_by_its_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], texts: list[str]
) -> None:
    message = refused(tmp_path, tensors)
    for text in texts:
        assert text in message


def test_scales_that_do_not_fit_are_one_fault(tmp_path: Path) -> None:
    message = refused(tmp_path, {**QUANTIZED, "q.weight_scale": torch.ones(3, 1)})
    assert "(1 fault)" in message
    assert "no scales beside it" not in message


def test_zero_points_that_config_json_promises_are_not_taken_for_0(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}
    files = {"q.weight": torch.ones(2, 3).char(), "q.weight_scale": torch.ones(2, 1)}
    assert '"symmetric": false' in refused(tmp_path, files, config)
    files["q.weight_zero_point"] = torch.ones(2, 1).char()
    assert not imported(tmp_path, files, config)["q.weight"].any()


def test_sizes_that_config_json_has_wrong_are_refused(tmp_path: Path) -> None:
    files = {"q.weight": torch.zeros(160, 130, dtype=E4M3), "q.weight_scale_inv": torch.ones(3, 3)}
    message = refused(tmp_path, files, FP8)
    assert "128 x 128: (2, 2)" in message
    files["q.weight_scale_inv"] = torch.ones(2, 1)
    assert "(2, 1)" in refused(tmp_path, files, FP8)


@pytest.mark.parametrize("sizes", [[128], [0, 128], "128", [128.0, 128.0], {"a": 1}])
def test_a_config_json_that_cannot_be_read_is_refused(tmp_path: Path, sizes: Any) -> None:
    config = {"quant_method": "fp8", "weight_block_size": sizes}
    with pytest.raises(CannotLook, match=r"config\.json"):
        imported(tmp_path, {**QUANTIZED, "q.weight_scale": torch.ones(1)}, config)


@pytest.mark.parametrize("kind", ["a link out", "a link to nothing", "a directory", "a fifo"])
def test_a_config_json_that_may_not_be_opened_is_not_passed_over(tmp_path: Path, kind: str) -> None:
    """It says which formula the weights need."""
    source = tmp_path / "source"
    source.mkdir()
    save_file({"q.weight": torch.zeros(4, 4, dtype=E4M3)}, source / "model.safetensors")
    (tmp_path / "elsewhere").write_text(json.dumps({"quantization_config": {"bits": 4}}))
    config = source / "config.json"
    match kind:
        case "a directory":
            config.mkdir()
        case "a fifo":
            os.mkfifo(config)
        case _:
            config.symlink_to(tmp_path / ("elsewhere" if kind == "a link out" else "nothing"))
    with pytest.raises(
        CannotLook, match=r"config\.json: no quantization_config can be read from it"
    ):
        import_checkpoint(source, tmp_path / "out", dequantize=torch.bfloat16)


def test_numbers_that_float16_does_not_hold_are_refused(tmp_path: Path) -> None:
    files = {"q.weight": torch.full((6, 10), 448.0).to(E4M3), "q.weight_scale": torch.tensor(1e3)}
    with pytest.raises(PlacementError, match="float16 ends at 65504"):
        imported(tmp_path, files, dequantize=torch.float16)


def test_other_dtypes_and_formats_are_refused(tmp_path: Path) -> None:
    for dtype in (torch.int8, E4M3):
        with pytest.raises(PlacementError, match="dequantize"):
            imported(tmp_path, QUANTIZED, dequantize=dtype)
    torch.save({"w": torch.ones(3)}, tmp_path / "m_0.pt")
    source = open_source(tmp_path, files="m_{rank}.pt")
    with pytest.raises(PlacementError, match="dequantize="):
        import_checkpoint(source, tmp_path / "out", dequantize=torch.bfloat16)
