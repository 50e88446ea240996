"""python scripts/figures.py

Draws the pictures of README.md into ``scripts/figures/``; prints each file's name. Needs the extra
``plot``. Every box comes from the library's own layouts, so a picture shows what a save does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, PlacementRules
from dcp_placements.bind.place import place
from dcp_placements.layout.sharding import Box
from dcp_placements.testing import FakeDTensor, World, cut

FIGURES = Path(__file__).parent / "figures"

EXPERTS, HIDDEN = 10, 6
"""Ten experts: five per ep rank, which fsdp cuts into three and two."""
FQN = "experts.w1"
WORLD = World(4)
COLORS = {(0, 0): "#2f6db3", (0, 1): "#86b3e0", (1, 0): "#d9771f", (1, 1): "#f4bd85"}
"""By position along (ep, fsdp)."""


def held(rank: int) -> FakeDTensor:
    """Return what a rank holds: its ep part of the experts, wrapped by FSDP over its sub-mesh."""
    mesh = WORLD.mesh(rank, fsdp=2, ep=2)
    position = mesh["ep"].get_coordinate()
    assert position is not None
    part = cut(torch.empty(EXPERTS, HIDDEN), [Shard(0)], (2,), position)
    return FakeDTensor.distribute(part, mesh["fsdp"], [Shard(0)])


def boxes(rank: int, *, with_rule: bool) -> list[Box]:
    """Return where the rank's tensor lies in the checkpoint's, with or without a rule."""
    placement = CheckpointPlacement(WORLD.mesh(rank, fsdp=2, ep=2), {"ep": Shard(0)})
    rules = PlacementRules({FQN: placement}) if with_rule else None
    placing = place({FQN: held(rank)}, rules)
    assert not placing.faults
    return [chunk.box for chunk in placing.placed[FQN].place.chunks]


def draw_boxes(axes: Any, *, with_rule: bool) -> None:
    """Draw the boxes of all ranks; those of one place as cards on top of one another."""
    from matplotlib.patches import Rectangle

    seen: dict[Box, int] = {}
    for rank in range(WORLD.size):
        fsdp, ep = WORLD.mesh(rank, fsdp=2, ep=2).get_coordinate() or [0, 0]
        for box in boxes(rank, with_rule=with_rule):
            below = seen[box] = seen.get(box, -1) + 1
            (row, column), (rows, columns) = box
            x, y = column + 1.5 * below, row + 0.3 * below
            style = {"facecolor": COLORS[ep, fsdp], "edgecolor": "white", "linewidth": 1.5}
            axes.add_patch(Rectangle((x, y), columns, rows, zorder=-below, **style))
            text = {"color": "white" if fsdp == 0 else "#222222", "fontsize": 9}
            if below:
                place = {"x": x + columns - 0.75, "y": y + rows / 2}
                axes.text(**place, s=f"rank {rank}", ha="center", va="center", **text)
            else:
                label = f"rank {rank}   ep={ep} fsdp={fsdp}"
                place = {"x": x + columns / 2, "y": y + rows / 2}
                axes.text(**place, s=label, ha="center", va="center", **text)


def draw() -> Any:
    """Return the picture of one tensor cut by ep and fsdp."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # The same bytes from the same input, and text as text.
    matplotlib.rcParams |= {"svg.hashsalt": FQN, "svg.fonttype": "none"}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.6, 3.5), layout="constrained")
    draw_boxes(left, with_rule=False)
    draw_boxes(right, with_rule=True)
    left.set_title("its own DTensor: fsdp alone", fontsize=10)
    right.set_title('with {"ep": Shard(0)}: ep first, fsdp inside', fontsize=10)
    for axes, rows in ((left, EXPERTS // 2), (right, EXPERTS)):
        axes.set_xlim(-0.05, HIDDEN + 1.6)
        axes.set_ylim(EXPERTS + 0.6, -0.05)
        axes.set_yticks(range(rows + 1))
        axes.set_xticks([0, HIDDEN], ["0", "H"])
        axes.tick_params(length=0, labelsize=8)
        axes.set_frame_on(False)
        axes.set_ylabel("expert in the checkpoint", fontsize=8)
    note = "Two ranks claim each box:\nDCP keeps one and drops the other"
    left.text(0, EXPERTS - 2.6, note, fontsize=9, va="center")
    return figure


def main() -> int:
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / "ep_fsdp.svg"
    draw().savefig(path, facecolor="white", metadata={"Date": None, "Creator": None})
    print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
