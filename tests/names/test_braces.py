"""Keys with a literal ``{}``, which stands for a number in patterns and in names of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_same, read_whole, refusal

from dcp_placements import (
    PlacementError,
    PlacementLoadPlanner,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Replace,
    Row,
    Rows,
    Split,
    Stack,
    Unstack,
)
from dcp_placements.convert.conversion import export_safetensors

TOUCHING: dict[str, tuple[str, Any]] = {
    "Split": ("m{}.gate_up", Split("gate_up", ("gate", "up"))),
    "Split of braces": ("m{}.w", Split("m{}", ("a", "b"))),
    "Unstack": ("m{}.experts.w", Unstack("experts.{}")),
    "Unstack, then Split": (
        "m{}.gate_up",
        Renames(Unstack("gate_up.{}"), Split("gate_up.*", ("gate.{}", "up.{}"))),
    ),
    "Stack": ("m{}.experts.0.w", Stack("experts.{}", 1)),
    "Renumber": ("m{}.experts.0.w", Renumber("experts.{}", [0], 1)),
    "Renumber behind": ("experts.0.w{}", Renumber("experts.{}", [0], None)),
    "Renumber, then Replace": (
        "m{}.experts.0.w",
        Renames(Renumber("experts.{}", [0], 1), Replace("experts", "e")),
    ),
    "a function of rows": ("m{}.w", lambda key: Rows(f"{key}.{{}}", key)),
    "a function of a row": ("m{}.w", lambda key: Row(key, 0, 1)),
}


@pytest.mark.parametrize("name", TOUCHING)
def test_m155_a_rename_that_would_touch_braces_refuses_the_key(name: str, tmp_path: Path) -> None:
    key, rename = TOUCHING[name]
    held = {key: torch.arange(8.0).reshape(4, 2), "other": torch.ones(2)}

    def save() -> None:
        planner = PlacementSavePlanner(rename=rename)
        dcp.save(dict(held), checkpoint_id=tmp_path / "new", planner=planner, no_dist=True)

    if "function" in name:
        held.pop("other")
    expected = f"{key}: has {{}} in its name"
    assert expected in refusal(save)
    assert not list(tmp_path.glob("new/*"))
    dcp.save(dict(held), checkpoint_id=tmp_path / "old", no_dist=True)
    planner = PlacementLoadPlanner(rename=rename)
    loaded = {one: torch.zeros_like(value) for one, value in held.items()}
    assert expected in refusal(
        lambda: dcp.load(loaded, checkpoint_id=tmp_path / "old", planner=planner, no_dist=True)
    )
    assert not any(value.any() for value in loaded.values())
    with pytest.raises(PlacementError, match=r"has \{\} in its name"):
        export_safetensors(tmp_path / "old", tmp_path / "out", rename=rename)


BESIDE: dict[str, Any] = {
    "none": None,
    "Renumber": Renumber("experts.{}", [1, 0], 2),
    "Stack": Stack("experts.{}", 2),
    "Unstack": Unstack("stacked.{}.w"),
    "Split": Split("fused", ("a", "b")),
    "Replace": Replace("m{}", "n{}"),
    "Replace of a part": Replace("a{}b", "c"),
    "a function": lambda key: f"model.{key}",
    "all": Renames(
        Renumber("experts.{}", [1, 0], 2),
        Stack("experts.{}", 2),
        Unstack("stacked.{}.w"),
        Split("fused", ("a", "b")),
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_m155_keys_with_braces_that_no_rename_touches_are_saved_and_loaded(
    name: str, tmp_path: Path
) -> None:
    plain = {"m{}.w": 1.0, "{}": 2.0, "a{}b.{}.c": 3.0, "{0}.w": 4.0, "}{": 5.0, "m0.w": 6.0}
    held = {key: torch.full((3,), value) for key, value in plain.items()} | {
        "experts.0.w": torch.full((2,), 7.0),
        "experts.1.w": torch.full((2,), 8.0),
        "stacked.w": torch.arange(6.0).reshape(3, 2),
        "fused": torch.arange(4.0),
    }
    planner = PlacementSavePlanner(rename=BESIDE[name])
    dcp.save(dict(held), checkpoint_id=tmp_path, planner=planner, no_dist=True)
    read = read_whole(tmp_path)
    for key in plain if name in {"none", "Renumber", "Stack", "Unstack", "Split", "all"} else ():
        assert torch.equal(read[key], held[key]), key
    loaded = {key: torch.full_like(value, -1) for key, value in held.items()}
    loader = PlacementLoadPlanner(rename=BESIDE[name])
    dcp.load(loaded, checkpoint_id=tmp_path, planner=loader, no_dist=True)
    assert_same(loaded, held)
