"""The picture of a transfer, looked at by its cells and by what stands in it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, MeshCoordinate, TransferWorld, transfer_plan
from dcp_placements.transfer.picture import transfer_figure

pytest.importorskip("matplotlib")


def rows(mesh: MeshCoordinate) -> dict[str, CheckpointPlacement]:
    return {"w": CheckpointPlacement(mesh, {"tp": Shard(0)})}


def world(ranks: int, first: int = 0, hosts: int | None = None) -> TransferWorld:
    tensors = {"w": torch.empty(256, 4, device="meta")}
    numbers = range(first, first + ranks)
    return TransferWorld({"tp": ranks}, rows, tensors, ranks=numbers, hosts=hosts)


def test_cells_are_the_bytes_from_rank_to_rank() -> None:
    figure = transfer_figure(transfer_plan(world(2), world(4)))
    axes = figure.axes[0]
    cells = axes.images[0].get_array().filled(0)
    assert cells.tolist() == [[1024, 1024, 0, 0], [0, 0, 1024, 1024]]
    assert [text.get_text() for text in axes.texts] == ["1.0 KiB"] * 4
    # Of rank 0 alone some is there already.
    assert [patch.get_xy() for patch in axes.patches] == [(-0.5, -0.5)]
    assert axes.get_xlabel() == "to rank"


def test_many_ranks_are_drawn_by_host() -> None:
    figure = transfer_figure(transfer_plan(world(128, 0, 64), world(4, 128, 64)))
    axes = figure.axes[0]
    assert axes.images[0].get_array().filled(0).tolist() == [[1024, 1024, 0, 0], [0, 0, 1024, 1024]]
    assert axes.get_ylabel() == "from host"
    assert axes.get_xlabel() == "to rank"
