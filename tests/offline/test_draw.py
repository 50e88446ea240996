"""Pictures, looked at by their pixels and by what stands in them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_placements.layout.sharding import Box, Cut, Kind, Sharding
from dcp_placements.offline import draw, save_figure
from dcp_placements.offline.picture import (
    FEW,
    DrawnTensor,
    WrittenBox,
    bytes_figure,
    tensors_figure,
)
from tests.offline_scenes import Run, save_hugging_face, save_sharded, wholes

pytest.importorskip("matplotlib")


def pieces(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[WrittenBox]:
    """Return the pieces of a tensor that is cut into ``sizes`` along its first dims."""
    sharding = Sharding(shape, tuple(Cut(dim, None, size) for dim, size in enumerate(sizes)))
    return [
        WrittenBox(chunk.box, f"rank {rank}")
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
        WrittenBox(Box((0, 0), (10, 20)), "rank 0"),
        WrittenBox(Box((20, 0), (20, 20)), "rank 1"),
    ]
    made.append(WrittenBox(Box((30, 0), (10, 20)), "rank 2"))
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
        ((), [WrittenBox(Box((), ()), "rank 0")]),
        ((0, 3), [WrittenBox(Box((0, 0), (0, 3)), "rank 0")]),
        ((5,), []),
        ((10, 4), [WrittenBox(Box((6, 0), (6, 4)), "rank 1")]),
        ((6, 4), [WrittenBox(Box((0, 0), (6, 4)), "model-00001-of-00002.safetensors")]),
    ],
)
def test_odd_tensors_are_drawn(tmp_path: Path, shape: Any, made: list[WrittenBox]) -> None:
    save_figure(tensor_figure("of." * 60 + "w", shape, "int8", made), tmp_path / "w.png")
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_per_rank() -> None:
    figure = bytes_figure(
        "step-1", {"rank 0": {"__0_0.distcp": 3 << 20}, "rank 1": {"a": 1 << 20, "b": 1 << 20}}
    )
    drawn = texts(figure)
    assert {"step-1", "rank 0", "rank 1", "3.0 MiB", "2.0 MiB in 2 files"} <= set(drawn)
    assert any("5.0 MiB in 3 files" in text and "1.20 times the mean" in text for text in drawn)
    assert [bar.get_width() for bar in figure.axes[0].patches] == [3 << 20, 2 << 20]
    many = bytes_figure("step-1", {f"rank {r}": {f"__{r}_0.distcp": 5 + r} for r in range(256)})
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
    # Written out by hand: tp cuts columns and comes first, the rank is dp * 2 + tp.
    made = [
        WrittenBox(Box((20 * dp, 30 * tp), (20, 30)), f"rank {dp * 2 + tp}")
        for dp, tp in product(range(2), range(2))
    ]
    drawn = texts(tensor_figure("w", (40, 60), "int8", made, cuts))
    assert {f"rank {dp * 2 + tp}  tp={tp} dp={dp}" for dp in (0, 1) for tp in (0, 1)} <= {*drawn}
    assert any("Shard(1) over 'tp' of size 2, then Shard(0) over 'dp'" in text for text in drawn)
    others = [*made[:3], WrittenBox(Box((20, 30), (19, 30)), "rank 3")]  # of no such cut
    drawn = texts(tensor_figure("w", (40, 60), "int8", others, cuts))
    assert {f"rank {rank}" for rank in range(4)} <= {*drawn}
    assert "rank 0" in texts(tensor_figure("w", (40, 60), "int8", made))


def test_parts_of_a_fused_tensor_have_borders_and_numbers() -> None:
    cut = Cut(0, "tp", 2, Kind.FUSED, (20, 10, 10))
    starts = {0: (0, 10), 1: (10, 10), 2: (20, 5), 3: (25, 5), 4: (30, 5), 5: (35, 5)}
    made = [WrittenBox(Box((a, 0), (n, 6)), f"rank {k % 2}") for k, (a, n) in starts.items()]
    figure = tensor_figure("wqkv", (40, 6), "int8", made, (cut,))
    parts = {text for text in texts(figure) if text.startswith("part")}
    assert parts == {"part 0", "part 1", "part 2"}
    assert "rank 1  tp=1" in texts(figure)
    borders = [line.get_ydata()[0] for line in figure.axes[0].lines]
    assert borders == [20, 30]


def test_several_tensors_are_in_one_picture(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "step-1")
    keys = ["layers.1.attention", "layers.0.experts.w1", "layers.0.norm"]
    svg = tmp_path / "three.svg"
    assert run("draw", tmp_path / "step-1", *keys, "-o", svg, "--json").json["fqns"] == keys
    figure = draw(tmp_path / "step-1", *keys)
    assert [axes.get_title(loc="left").split("\n")[0] for axes in figure.axes] == keys
    assert "rank 3  ep=1 fsdp=1" in texts(figure)
    assert "12 tensors at most" in run.fails("draw", tmp_path / "step-1", *keys * 5, "-o", svg)
