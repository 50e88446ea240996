"""One tensor per layer and expert on the ranks, one ``[layers, experts, ...]`` for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_same, refusal
from safetensors.torch import load_file

from dcp_placements import (
    PlacementError,
    PlacementLoadPlanner,
    PlacementSavePlanner,
    Renames,
    Row,
    Stack,
)
from dcp_placements.convert.conversion import export_safetensors
from dcp_placements.testing import World


def matrix(layer: int, expert: int) -> torch.Tensor:
    start = 1000.0 * layer + 100.0 * expert
    return torch.arange(start, start + 20).reshape(5, 4)


def test_a_row_that_nobody_holds_is_refused_on_save_and_missed_on_load(tmp_path: Path) -> None:
    rename = Renames(Stack("e.{}", 3), Stack("l.{}", 2))
    held = {f"l.{i}.e.{j}.w": matrix(i, j) for i in range(2) for j in range(3)}
    lacking = {key: value for key, value in held.items() if key != "l.1.e.1.w"}
    message = refusal(
        lambda: World(1).save(
            tmp_path / "a", lambda _: lacking, lambda _: PlacementSavePlanner(rename=rename)
        )
    )
    assert "l.e.w: nobody holds" in message
    assert "[1:2, 1:2, " in message
    dcp.save({"l.e.w": torch.zeros(2, 2, 5, 4)}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert "l.e.w" in refusal(
        lambda: World(1).load(
            tmp_path / "b", lambda _: held, lambda _: PlacementLoadPlanner(rename=rename)
        )
    )


def test_names_tell_both_rows_and_keys_must_have_both(tmp_path: Path) -> None:
    rename = Renames(Stack("experts.{}", 8), Stack("layers.{}", 4))
    row = rename("layers.3.experts.5.w")
    assert row == Row("layers.experts.w", 5, 8, within=(Row("layers.experts.w", 3, 4),))
    held = {"layers.0.experts.1.w": torch.zeros(2), "layers.0.experts.w": torch.zeros(2)}
    text = refusal(
        lambda: dcp.save(
            held, checkpoint_id=tmp_path, planner=PlacementSavePlanner(rename=rename), no_dist=True
        )
    )
    assert "one of 8 rows on dim 0 within 4 rows on dim 0, and" in text


@pytest.mark.parametrize("dims", [(0, 0), (1, 2), (2, 0)])
def test_the_export_stacks_rows_of_rows_as_the_planner_does(
    tmp_path: Path, dims: tuple[int, int]
) -> None:
    rename = Renames(Stack("e.{}", 3, dim=dims[0]), Stack("l.{}", 2, dim=dims[1]))
    held = {f"l.{i}.e.{j}.w": matrix(i, j) for i in range(2) for j in range(3)}
    dcp.save(dict(held), checkpoint_id=tmp_path / "rows", no_dist=True)
    planner = PlacementSavePlanner(rename=rename)
    dcp.save(dict(held), checkpoint_id=tmp_path / "stacked", planner=planner, no_dist=True)
    for name, options in (("rows", {"rename": rename}), ("stacked", {})):
        export_safetensors(tmp_path / name, tmp_path / f"{name}.out", **options)
    exported, stacked = (
        load_file(tmp_path / f"{name}.out" / "model.safetensors") for name in ("rows", "stacked")
    )
    assert_same(exported, stacked)
    by_layer = [torch.stack([matrix(i, j) for j in range(3)], dims[0]) for i in range(2)]
    assert_same(exported, {"l.e.w": torch.stack(by_layer, dims[1])})
    more = Renames(Stack("e.{}", 4), Stack("l.{}", 2))
    with pytest.raises(PlacementError, match="of 8 rows these are missing: 3 within 0, 3 within 1"):
        export_safetensors(tmp_path / "rows", tmp_path / "more", rename=more)
