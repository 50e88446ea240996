"""The table of optimizers: each row is what the optimizer keeps, and where the planners put it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, assert_same, blank, without_warning
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, PlacementRules, Placements
from dcp_placements.testing import World
from tests.test_readme import PACKAGE, read_table

TABLE = read_table("Rules", PACKAGE / "rules" / "README.md", 1)
SIZES = {"M": 8, "N": 12, "R": 4, "1": 1}


def states_in(row: list[str], sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of each state that a row names."""
    named = re.findall(r"`([\w.]+) \(([^)]*)\)`", row[1])
    return {name: tuple(sizes[size.strip()] for size in shape.split(",")) for name, shape in named}


@pytest.mark.parametrize(
    "row", [row for row in TABLE if "torch.optim" in row[0]], ids=lambda r: r[0]
)
def test_the_optimizers_of_torch_keep_what_the_table_says(row: list[str]) -> None:
    kind = getattr(torch.optim, row[0].strip("`").rpartition(".")[2])
    weight = torch.nn.Parameter(torch.randn(SIZES["M"], SIZES["N"]))
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = optimizer.state[weight]
    tensors = {
        name: tuple(value.shape) for name, value in held.items() if getattr(value, "ndim", 0)
    }
    assert tensors == states_in(row, SIZES)


def placements(rank: int, size: int, row: list[str]) -> Placements:
    mesh = World(size).mesh(rank, ep=size)
    rules: dict[str, Any] = dict.fromkeys(re.findall(r'"(\w+)": None', row[2]))
    rules["w"] = CheckpointPlacement(mesh, {"ep": Shard(0)})
    return Placements(PlacementRules(rules, optional=True))


# The other world of sizes has shards (4, 4), as ``Q (N, R)`` is whole.
@pytest.mark.parametrize("sizes", [SIZES, {"M": 8, "N": 4, "R": 4, "1": 1}], ids=["", "by chance"])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: re.sub(r"\W+", " ", row[0]))
def test_each_state_is_stored_whole_and_loaded_elsewhere(
    tmp_path: Path, row: list[str], sizes: dict[str, int]
) -> None:
    shapes = states_in(row, sizes)
    if sizes is not SIZES and "refused" in row[2]:
        pytest.skip("its dims are one another's, which is refused")
    wholes = {
        name: arange(*shape, start=1000 * n) for n, (name, shape) in enumerate(shapes.items())
    }

    def part(name: str, rank: int, size: int) -> torch.Tensor:
        """Return the rows of the parameter that a state has; all of one that has none."""
        first = row[1].partition(f"`{name} (")[2][0]
        is_ruled = name.partition(".")[0] in re.findall(r'"(\w+)": None', row[2])
        follows = first == "M" and not is_ruled
        return wholes[name].chunk(size)[rank].clone() if follows else wholes[name].clone()

    def state(rank: int, size: int) -> dict[str, Any]:
        held: dict[str, Any] = {"step": torch.tensor(3.0)}
        for name in wholes:
            head, _, rest = name.partition(".")
            value = part(name, rank, size)
            if rest:
                held.setdefault(head, {})[rest] = value
            else:
                held[name] = value
        weight = arange(sizes["M"], sizes["N"], start=9000).chunk(size)[rank].clone()
        groups = [{"lr": 0.1, "params": ["w"]}]
        return {"model": {"w": weight}, "optim": {"state": {"w": held}, "param_groups": groups}}

    with without_warning():
        World(2).save(
            tmp_path,
            lambda rank: state(rank, 2),
            lambda rank: placements(rank, 2, row).save_planner(),
        )
        read = {f"optim.state.w.{name}": torch.zeros_like(value) for name, value in wholes.items()}
        dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
        loaded = [blank(state(rank, 4)) for rank in range(4)]
        for rank, held in enumerate(loaded):
            held["optim"]["param_groups"] = state(rank, 4)["optim"]["param_groups"]
        World(4).load(
            tmp_path, loaded.__getitem__, lambda rank: placements(rank, 4, row).load_planner()
        )
    for name, value in wholes.items():
        assert torch.equal(read[f"optim.state.w.{name}"], value), name
    for rank in range(4):
        assert_same(loaded[rank], state(rank, 4))
