"""The shapes of a checkpoint's tensors, and declarations proved by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import PlacementError, Placements, Renames, Replace, Stack, Unstack, check
from dcp_placements.offline import CannotLook, shapes
from tests.offline_scenes import save_hugging_face, wholes

HUB = {
    "transformer.embed": torch.zeros(7, 3),
    **{f"transformer.experts.{i}.w": torch.zeros(5, 3) for i in range(4)},
}
STACKED = Renames(Replace("transformer", ""), Stack("experts.{}.w", 4))
MODEL = {"embed": (7, 3), "experts.w": (4, 5, 3)}


def test_a_checkpoint_has_the_shapes_of_what_was_saved(tmp_path: Path) -> None:
    expected = {key: tuple(tensor.shape) for key, tensor in wholes().items()}
    dcp.save({**wholes(), "step": 1}, checkpoint_id=tmp_path / "dcp")
    save_hugging_face(tmp_path / "hf", wholes())
    assert shapes(tmp_path / "dcp") == shapes(tmp_path / "hf") == expected


def test_a_declaration_is_proved_by_safetensors_under_other_names(tmp_path: Path) -> None:
    save_hugging_face(tmp_path, HUB)
    whole = shapes(tmp_path, STACKED)
    assert whole == MODEL
    state = {key: torch.zeros(shape) for key, shape in MODEL.items()}
    assert "2 keys" in check(state, None, whole=whole).whole
    assert "2 keys" in check(state, Placements({}, whole=whole)).whole
    for wrong in {**state, "experts.w": torch.zeros(4, 3, 5)}, {"embed": state["embed"]}:
        with pytest.raises(PlacementError, match=r"experts\.w"):
            check(wrong, None, whole=whole)


def test_a_stack_becomes_its_rows(tmp_path: Path) -> None:
    dcp.save({"experts.w": torch.zeros(4, 5, 3)}, checkpoint_id=tmp_path)
    rows = shapes(tmp_path, Renames(Unstack("experts.{}.w")))
    assert rows == {f"experts.{i}.w": (5, 3) for i in range(4)}


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    save_hugging_face(tmp_path, HUB)
    with pytest.raises(CannotLook, match="of 5 rows these are missing: 4"):
        shapes(tmp_path, Stack("experts.{}.w", 5))
    with pytest.raises(CannotLook, match="rename= gives this one name to both"):
        shapes(tmp_path, lambda key: "x")
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["transformer.head"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(document))
    with pytest.raises(CannotLook, match=r"00002\.safetensors missing"):
        shapes(tmp_path)
