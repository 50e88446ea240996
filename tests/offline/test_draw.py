"""Pictures, looked at by their pixels and by what stands in them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, PlacementRules, PlacementSavePlanner
from dcp_placements.layout.sharding import Box, Cut, Kind, Sharding
from dcp_placements.offline import draw, draw_rehearsal, rehearse, save_figure
from dcp_placements.offline.picture import (
    FEW,
    Bar,
    DrawnBox,
    DrawnTensor,
    bytes_figure,
    coordinates_of,
    tensors_figure,
)
from dcp_placements.testing import FakeDTensor, World
from tests.offline_scenes import Run, rules_by_ep, save_hugging_face, save_sharded, wholes
from tests.storage_scenes import data_file

pytest.importorskip("matplotlib")


def pieces(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[DrawnBox]:
    """Return the pieces of a tensor that is cut into ``sizes`` along its first dims."""
    sharding = Sharding(shape, tuple(Cut(dim, None, size) for dim, size in enumerate(sizes)))
    return [
        DrawnBox(chunk.box, f"rank {rank}")
        for rank, positions in enumerate(sharding.positions())
        for chunk in sharding.shard(positions)[1]
    ]


def tensor_figure(*tensor: Any) -> Any:
    """Return the picture of one tensor."""
    return tensors_figure("step-1", [DrawnTensor(*tensor)])


def texts(figure: Any) -> list[str]:
    """Return all texts of a figure."""
    import matplotlib.text

    return [found.get_text() for found in figure.findobj(matplotlib.text.Text)]


def colors_at(figure: Any, points: list[tuple[float, float]]) -> list[str]:
    """Return the colours of a figure's only axes at (down, across), seen in the rendered image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = np.asarray(canvas.buffer_rgba())
    (axes,) = figure.axes
    found = []
    for down, across in points:
        x, y = axes.transData.transform((across, down))
        red, green, blue, _ = image[image.shape[0] - 1 - round(y), round(x)]
        found.append(f"#{red:02x}{green:02x}{blue:02x}")
    return found


def test_each_element_has_the_colour_of_its_writer() -> None:
    made = pieces((40, 60), (2, 2))
    figure = tensor_figure("w", (40, 60), "float32", made)
    # Beside the labels, which stand in the middle of each chunk.
    points = [(row, column) for row, column in product((5, 15, 25, 35), (4, 26, 34, 56))]
    wanted = [FEW[(row >= 20) * 2 + (column >= 30)] for row, column in points]
    assert colors_at(figure, points) == wanted


def test_a_hole_is_white_and_grey_and_an_overlap_red() -> None:
    made = [
        DrawnBox(Box((0, 0), (10, 20)), "rank 0"),
        DrawnBox(Box((20, 0), (20, 20)), "rank 1"),
    ]
    made.append(DrawnBox(Box((30, 0), (10, 20)), "rank 2"))
    figure = tensor_figure("w", (40, 20), "float32", made)
    drawn = texts(figure)
    assert "hole: nobody stored it" in drawn
    assert "stored more than once" in drawn
    hole = colors_at(figure, [(row, column) for row in range(12, 19) for column in range(1, 20)])
    assert set(hole) & {"#ffffff"}
    assert not set(hole) & set(FEW)
    double = colors_at(figure, [(35, column / 20) for column in range(20, 380)])
    assert {"#b3261e"} <= set(double)


@pytest.mark.parametrize(
    ("shape", "made"),
    [
        ((), [DrawnBox(Box((), ()), "rank 0")]),
        ((0, 3), [DrawnBox(Box((0, 0), (0, 3)), "rank 0")]),
        ((5,), []),
        ((10, 4), [DrawnBox(Box((6, 0), (6, 4)), "rank 1")]),
        ((6, 4), [DrawnBox(Box((0, 0), (6, 4)), "model-00001-of-00002.safetensors")]),
    ],
)
def test_odd_tensors_are_drawn(tmp_path: Path, shape: Any, made: list[DrawnBox]) -> None:
    save_figure(tensor_figure("of." * 60 + "w", shape, "int8", made), tmp_path / "w.png")
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_per_rank() -> None:
    bars = [Bar("rank 1", 2 << 20, 2), Bar("rank 0", 3 << 20, 1)]
    figure = bytes_figure("step-1", bars, "5.0 MiB in 3 files")
    drawn = texts(figure)
    assert {"step-1", "rank 0", "rank 1", "3.0 MiB", "2.0 MiB in 2 files"} <= set(drawn)
    assert any("5.0 MiB in 3 files" in text and "1.20 times the mean" in text for text in drawn)
    assert [bar.get_width() for bar in figure.axes[0].patches] == [3 << 20, 2 << 20]
    many = bytes_figure("step-1", [Bar(f"rank {r}", 5 + r, 1) for r in range(256)], "")
    assert len(many.axes[0].patches) == 256


def test_a_picture_of_a_checkpoint(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "step-1")
    png = tmp_path / "w1.png"
    ran = run("draw", tmp_path / "step-1", "layers.0.experts.w1", "-o", png)
    assert (ran.code, ran.out) == (0, f"{png}: written\n")
    assert png.read_bytes().startswith(b"\x89PNG")
    svg = tmp_path / "all.svg"
    assert run("draw", tmp_path / "step-1", "-o", svg, "--json").json["written"] == str(svg)
    first = svg.read_text()
    assert "rank 3" in first
    assert run("draw", tmp_path / "step-1", "-o", svg).code == 0
    assert svg.read_text() == first
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "w1.png", "all.svg"}
    drawn = texts(draw(tmp_path / "step-1", "layers.0.experts.w1"))
    assert {f"rank {rank}" for rank in range(4)} <= {text[:6] for text in drawn}


def test_what_cannot_be_drawn_is_exit_2(tmp_path: Path, run: Run) -> None:
    save_hugging_face(tmp_path / "hf", wholes())
    assert run("draw", tmp_path / "hf", "-o", tmp_path / "hf.png").code == 0
    kept = (tmp_path / "hf.png").read_bytes()
    for arguments, message in (
        ((tmp_path / "hf", "layers.0.expert.w1", "-o", tmp_path / "hf.png"), "layers.0.experts.w1"),
        ((tmp_path / "hf", "-o", tmp_path / "hf.gif"), ".png or .svg"),
        ((tmp_path / "none", "-o", tmp_path / "hf.png"), "no such path"),
    ):
        assert message in run.fails("draw", *arguments)
    assert (tmp_path / "hf.png").read_bytes() == kept


def test_ranks_have_the_coordinates_of_the_recorded_cuts() -> None:
    cuts = Cut(1, "tp", 2), Cut(0, "dp", 2)
    # Written out by hand: tp cuts columns and comes first.
    places = {(tp, dp): Box((20 * dp, 30 * tp), (20, 30)) for tp, dp in product(range(2), range(2))}
    expected = {box: (f"tp={tp} dp={dp}",) for (tp, dp), box in places.items()}
    assert coordinates_of((40, 60), cuts, list(places.values())) == expected
    others = [*list(places.values())[:3], Box((20, 30), (19, 30))]  # of no such cut
    assert coordinates_of((40, 60), cuts, others) == {}
    assert coordinates_of((40, 60), (), list(places.values())) == {}


def test_a_box_of_several_ranks_has_the_coordinates_of_all() -> None:
    # Two KV heads on four ranks: the head of ranks 0 and 1, and of 2 and 3.
    cut = Cut(0, "tp", 4, Kind.FUSED, (8, 4), copies=(1, 2))
    boxes = [Box((2 * rank, 0), (2, 3)) for rank in range(4)]
    heads = [Box((8 + 2 * head, 0), (2, 3)) for head in range(2)]
    along = coordinates_of((12, 3), (cut,), [*boxes, *heads])
    assert [along[box] for box in boxes] == [(f"tp={rank}",) for rank in range(4)]
    assert [along[box] for box in heads] == [("tp=0-1",), ("tp=2-3",)]


def test_parts_of_a_fused_tensor_have_borders_and_numbers() -> None:
    cut = Cut(0, "tp", 2, Kind.FUSED, (20, 10, 10))
    starts = {0: (0, 10), 1: (10, 10), 2: (20, 5), 3: (25, 5), 4: (30, 5), 5: (35, 5)}
    made = [DrawnBox(Box((a, 0), (n, 6)), f"rank {k % 2}") for k, (a, n) in starts.items()]
    figure = tensor_figure("w", (40, 6), "int8", made, (), (cut,))
    parts = {text for text in texts(figure) if text.startswith("part")}
    assert parts == {"part 0", "part 1", "part 2"}
    borders = [line.get_ydata()[0] for line in figure.axes[0].lines]
    assert borders == [20, 30]
    named = texts(tensor_figure("attn.wqkv", (40, 6), "int8", made, (), (cut,)))
    assert {"Q", "K", "V"} <= {*named}


def test_several_tensors_are_in_one_picture(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "step-1")
    keys = ["layers.1.attention", "layers.0.experts.w1", "layers.0.norm"]
    svg = tmp_path / "three.svg"
    assert run("draw", tmp_path / "step-1", *keys, "-o", svg, "--json").json["fqns"] == keys
    figure = draw(tmp_path / "step-1", *keys)
    assert [axes.get_title(loc="left").split("\n")[0] for axes in figure.axes] == keys
    assert "rank 3 · ep=1 fsdp=1" in texts(figure)
    assert "12 tensors at most" in run.fails("draw", tmp_path / "step-1", *keys * 5, "-o", svg)


def labels_of(figure: Any) -> list[str]:
    """Return the labels of boxes, one line each."""
    (axes,) = figure.axes
    return [" ".join(text.get_text().replace("·", " ").split()) for text in axes.texts]


def test_each_read_has_its_ranks_and_its_file(tmp_path: Path) -> None:
    save_sharded(tmp_path / "step-1")  # four ranks have two experts each
    files = [data_file(tmp_path / "step-1", rank).name for rank in range(4)]
    for ep, ranks_of_expert in ((2, [0, 0, 1, 1]), (4, [0, 1, 2, 3])):
        found = rehearse(tmp_path / "step-1", rules_by_ep, {"ep": ep}, fqn="experts.w1")
        labels = labels_of(draw_rehearsal(tmp_path / "step-1", found))
        assert labels == [
            f"rank {rank} {file} ep={rank}"
            for rank, file in zip(ranks_of_expert, files, strict=True)
        ]


def test_a_read_of_several_ranks_has_all_of_them(tmp_path: Path) -> None:
    save_sharded(tmp_path / "step-1")
    found = rehearse(tmp_path / "step-1", rules_by_ep, {"edp": 2, "ep": 2}, fqn="experts.w1")
    figure = draw_rehearsal(tmp_path / "step-1", found)
    first, *_, last = labels_of(figure)
    assert (first, last) == (
        f"ranks 0, 2 {data_file(tmp_path / 'step-1', 0).name} ep=0",
        f"ranks 1, 3 {data_file(tmp_path / 'step-1', 3).name} ep=1",
    )
    drawn = texts(figure)
    assert any("2 boxes of 4 ranks, in 4 files; a rank opens 2" in text for text in drawn)
    assert any("step-1, read by edp=2, ep=2" in text for text in drawn)


def save_cut(path: Path, shape: tuple[int, int], dim: int, ranks: int) -> None:
    """Save a tensor ``w`` of which each rank has a shard along a dim."""
    world, whole = World(ranks), torch.arange(float(prod(shape))).reshape(shape)

    def state_dict(rank: int) -> dict[str, Any]:
        return {"w": FakeDTensor.distribute(whole, world.mesh(rank, tp=ranks), [Shard(dim)])}

    world.save(path, state_dict, lambda rank: PlacementSavePlanner())


def rows_along(axis: str) -> Callable[[Any], PlacementRules]:
    """Return the rules of ranks that have rows of ``w`` along an axis."""
    return lambda mesh: PlacementRules({"w": CheckpointPlacement(mesh, {axis: Shard(0)})})


def test_each_element_has_the_colour_of_the_rank_that_reads_it(tmp_path: Path) -> None:
    save_cut(tmp_path, (36, 24), dim=1, ranks=3)
    found = rehearse(tmp_path, rows_along("dp"), {"dp": 4}, fqn="w")
    points = [(row, column) for row in (1, 8, 10, 17, 19, 26, 28, 35) for column in (1, 9, 23)]
    expected = [FEW[row // 9] for row, _ in points]  # nine rows each
    assert colors_at(draw_rehearsal(tmp_path, found), points) == expected


def test_rehearse_draws(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "step-1")
    svg = tmp_path / "reads.svg"
    arguments = ("rehearse", tmp_path / "step-1", "--rules", "tests.offline_scenes:rules_by_ep")
    ran = run(*arguments, "--mesh", "ep=4", "--fqn", "experts.**", "--draw", svg)
    assert (ran.code, ran.out.splitlines()[-1]) == (0, f"{svg}: written")
    assert all(f"rank {rank}" in svg.read_text() for rank in range(4))
    document = run(*arguments, "--mesh", "ep=4", "--draw", svg, "--json").json
    assert document["loads"]
    assert "read in all" in svg.read_text()
    assert ".png or .svg" in run.fails(*arguments, "--mesh", "ep=4", "--draw", tmp_path / "a.gif")


def test_many_reads_are_outlined_by_file_and_ranks_named_by_their_axes(tmp_path: Path) -> None:
    save_cut(tmp_path, (80, 4), dim=0, ranks=2)
    rules = rows_along("ep")
    many = rehearse(tmp_path, rules, {"ep": 40}, fqn="w")
    files = [data_file(tmp_path, rank).name for rank in range(2)]
    assert labels_of(draw_rehearsal(tmp_path, many)) == files
    few = rehearse(tmp_path, rules, {"dp": 32, "ep": 4}, fqn="w")
    assert labels_of(draw_rehearsal(tmp_path, few)) == [
        f"32 ranks, ep={ep} {files[ep // 2]}" for ep in range(4)
    ]
