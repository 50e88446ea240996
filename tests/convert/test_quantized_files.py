"""M116: quantized files are not read, written or compared as numbers without their scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from dcp_placements import PlacementError, PlacementLoadPlanner, Replace, Stack
from dcp_placements.offline import diff, export_safetensors, import_checkpoint
from dcp_placements.presets import hub
from tests.offline_scenes import save_hugging_face

BLOCK, FP8 = 128, torch.float8_e4m3fn


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(160, 130, generator=torch.Generator().manual_seed(seed)) / 50


def quantized(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in float8, and the scale of each block, as DeepSeek-V3 is published."""
    rows, columns = (-(-size // BLOCK) for size in value.shape)
    scales = torch.zeros(rows, columns)
    elements = torch.zeros(value.shape)
    for row in range(rows):
        for column in range(columns):
            at = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            scales[row, column] = value[at].abs().max() / 448
            elements[at] = value[at] / scales[row, column]
    return elements.to(FP8), scales


@pytest.fixture
def published(tmp_path: Path) -> Path:
    tensors = {"model.norm.weight": torch.ones(3)}
    for expert in range(2):
        for at, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            value = numbers(10 * expert + at)
            key = f"model.layers.0.mlp.experts.{expert}.{name}.weight"
            shape = value.T.contiguous() if name == "down_proj" else value
            tensors[key], tensors[f"{key}_scale_inv"] = quantized(shape)
    save_hugging_face(tmp_path / "files", tensors)
    return tmp_path / "files"


KEY = "model.layers.0.mlp.experts.1.up_proj.weight"


def load(reader: Any, state: dict[str, torch.Tensor], **options: Any) -> None:
    planner = PlacementLoadPlanner(**options)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("cast", ["warn", "allow"])
def test_m116_a_load_into_numbers_is_refused(
    published: Path, dtype: torch.dtype, cast: str
) -> None:
    state = {KEY: torch.zeros(160, 130, dtype=dtype)}
    with pytest.raises(CheckpointException, match=rf"{KEY}_scale_inv") as refused:
        load(HuggingFaceStorageReader(str(published)), state, cast=cast)
    assert "QuantizedHuggingFaceStorageReader" in str(refused.value)
    assert "--dequantize bfloat16" in str(refused.value)
    assert not state[KEY].any()


def test_m116_the_way_out_gives_the_numbers(published: Path) -> None:
    state = {KEY: torch.zeros(160, 130)}
    waive = {"up_proj": "the reader multiplies by the scales"}
    load(QuantizedHuggingFaceStorageReader(str(published)), state, waive=waive)
    torch.testing.assert_close(state[KEY], numbers(11), atol=2e-3, rtol=0.07)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_m116_torchs_reader_and_an_import_give_the_same_numbers(
    published: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (published / "config.json").write_text(json.dumps(config))
    import_checkpoint(published, tmp_path / "numbers", dequantize=dtype)
    read, imported = ({KEY: torch.zeros(160, 130, dtype=dtype)} for _ in range(2))
    waive = {"up_proj": "the reader multiplies by the scales"}
    reader = QuantizedHuggingFaceStorageReader(str(published), target_dtype=dtype)
    load(reader, read, waive=waive)
    load(dcp.FileSystemReader(tmp_path / "numbers"), imported)
    assert torch.equal(read[KEY], imported[KEY])
    assert imported[KEY].any()


@pytest.mark.parametrize(
    ("key", "scale", "shapes"),
    [("q.weight", "q.weight_scale", ((4, 3), ())), ("q_blocks", "q_scales", ((4, 2, 16), (4, 2)))],
)
def test_m116_a_scheme_that_torchs_reader_does_not_read_names_the_import_alone(
    tmp_path: Path, key: str, scale: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    elements, scales = (torch.ones(shape, dtype=torch.uint8) for shape in shapes)
    save_hugging_face(tmp_path, {key: elements, scale: scales})
    with pytest.raises(CheckpointException, match="--dequantize bfloat16") as refused:
        load(HuggingFaceStorageReader(str(tmp_path)), {key: torch.zeros(shapes[0])})
    assert "QuantizedHuggingFaceStorageReader" not in str(refused.value)


def test_m116_of_the_hubs_names_in_a_stacked_model_too(published: Path) -> None:
    state = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 320, 130),
        "model.layers.0.mlp.experts.down_proj": torch.zeros(2, 130, 160),
    }
    reader = HuggingFaceStorageReader(str(published))
    with pytest.raises(CheckpointException, match=r"down_proj\.weight_scale_inv"):
        load(reader, state, rename=hub.deepseek_v3)


def test_m116_both_in_their_own_dtypes_are_read(published: Path) -> None:
    elements, scales = quantized(numbers(11))
    for dtype in (FP8, torch.bfloat16):  # the second to be multiplied in place
        state = {
            KEY: torch.zeros(160, 130, dtype=dtype),
            f"{KEY}_scale_inv": torch.zeros_like(scales),
        }
        load(HuggingFaceStorageReader(str(published)), state)
        assert torch.equal(state[KEY].float(), elements.float())
        assert torch.equal(state[f"{KEY}_scale_inv"], scales)
    alone = {KEY: torch.zeros(160, 130, dtype=FP8)}
    load(HuggingFaceStorageReader(str(published)), alone)
    assert torch.equal(alone[KEY].float(), elements.float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, FP8], ids=str)
def test_m116_elements_without_any_scales_are_warned_of(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = {"a.q.weight": torch.ones(3).to(dtype), "a.k.weight": torch.ones(3).to(dtype)}
    dcp.save({**saved, "a.b": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    name = str(dtype).removeprefix("torch.")

    def loaded(needed: torch.dtype, **options: Any) -> list[str]:
        planner = PlacementLoadPlanner(**options)
        state = {key: torch.zeros(3, dtype=needed) for key in saved}
        dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        assert all(value.tolist() == [1, 1, 1] for value in state.values())
        assert planner.report.casts == (
            {} if needed == dtype else dict.fromkeys(saved, f"{name} -> float32")
        )
        return list(planner.report.warnings)

    for cast in ("warn", "error"):
        with pytest.warns(UserWarning, match="loaded without scales"):
            (text,) = loaded(torch.float32, cast=cast)
        assert f"({name} -> float32)" in text
        assert "a.k.weight" in text
        assert "a.q.weight" in text
    assert not loaded(torch.float32, cast="allow")
    assert not loaded(torch.float32, waive={"a.*": "codes"})
    assert not loaded(dtype)
    exported = export_safetensors(tmp_path, tmp_path / "out", prefix="", dtype=torch.bfloat16)
    (note,) = exported.notes
    assert f"a.k.weight ({name}), a.q.weight ({name})" in note
    assert "a.b" not in note


@pytest.mark.parametrize(
    ("stored", "needed"),
    [
        ({"q.weight": torch.bfloat16, "q.weight_scale": torch.float32}, torch.float32),
        ({"q.weight": torch.int8, "q.weight_scale": torch.float32}, torch.int8),
        ({"q.weight": torch.uint8, "q.weight_scale": torch.float32}, torch.int32),
        ({"q.weight": torch.bool, "q.weight_scale": torch.float32}, torch.float32),
    ],
)
def test_m116_what_is_not_quantized_or_stays_so_is_loaded(
    tmp_path: Path, stored: dict[str, torch.dtype], needed: torch.dtype
) -> None:
    saved = {key: torch.ones(3, dtype=dtype) for key, dtype in stored.items()}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    state = {"q.weight": torch.zeros(3, dtype=needed)}
    dcp.load(state, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True)
    assert state["q.weight"].tolist() == [1, 1, 1]


def without_weights(key: str) -> str:
    return key.replace("up_proj.weight", "up.weight") if key.endswith("weight") else key


def together(key: str) -> str:
    return key.replace("up_proj.weight", "up.weight")


def test_m116_an_import_keeps_both_or_is_refused(published: Path, tmp_path: Path) -> None:
    import_checkpoint(published, tmp_path / "plain")
    assert diff(published, tmp_path / "plain").same
    import_checkpoint(published, tmp_path / "renamed", rename=together)
    import_checkpoint(published, tmp_path / "stacked", rename=Stack("experts.{}", total=2))
    for name, key in (
        ("plain", KEY),
        ("renamed", together(KEY)),
        ("stacked", KEY.replace("experts.1.", "experts.")),
    ):
        shape = (2, 160, 130) if name == "stacked" else (160, 130)
        with pytest.raises(CheckpointException, match="_scale_inv"):
            dcp.load(
                {key: torch.zeros(shape)},
                checkpoint_id=tmp_path / name,
                planner=PlacementLoadPlanner(),
                no_dist=True,
            )
    with pytest.raises(PlacementError, match=r"up_proj\.weight_scale_inv"):
        import_checkpoint(published, tmp_path / "lost", rename=without_weights)
    assert not (tmp_path / "lost").exists()


def test_m116_an_export_keeps_both_or_is_refused(published: Path, tmp_path: Path) -> None:
    import_checkpoint(published, tmp_path / "saved")
    export_safetensors(tmp_path / "saved", tmp_path / "plain")
    assert diff(published, tmp_path / "plain").same
    export_safetensors(tmp_path / "saved", tmp_path / "other", rename=Replace("up_proj", "up"))
    bad: list[dict[str, Any]] = [
        {"dtype": torch.bfloat16},
        {"exclude": ["*.weight_scale_inv"]},
        {"rename": without_weights},
    ]
    for options in bad:
        with pytest.raises(PlacementError, match=r"_proj\.weight_scale_inv"):
            export_safetensors(tmp_path / "saved", tmp_path / "lost", **options)
        assert not (tmp_path / "lost").exists()


def test_m116_diff_does_not_compare_numbers_with_quantized_elements(
    published: Path, tmp_path: Path
) -> None:
    state = {KEY: numbers(11).bfloat16(), "model.norm.weight": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path / "numbers", no_dist=True)
    for one, other, side in (
        (published, tmp_path / "numbers", "first"),
        (tmp_path / "numbers", published, "second"),
    ):
        found = {each.fqn: each for each in diff(one, other, atol=1000).differences}
        assert found[KEY].kind == "dtype"
        assert f"the {side} is quantized, its scales are {KEY}_scale_inv" in found[KEY].message
        assert not found[KEY].differing
    again = diff(published, published, atol=1)
    assert again.same
