"""Tensors of meshes that this rank is no part of, as those of other pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard

from dcp_placements.bind.place import place
from dcp_placements.testing import FakeDTensor, FakeMesh


class Counted(str):
    """A key that counts how often it is compared with another one."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__ne__(self, other)

    __hash__ = str.__hash__


def stages(tensors: int, period: int) -> dict[str, Any]:
    """Return tensors of two stages, of which rank 0 is in the first; every ``period``-th is its."""
    meshes = [
        FakeMesh((2,), ("fsdp",), rank=0, ranks=torch.tensor(one)) for one in ([0, 1], [2, 3])
    ]
    return {
        Counted(f"layers.{at}.w"): FakeDTensor(
            torch.zeros(0 if at % period else 2, 2), meshes[bool(at % period)], [Shard(0)], (4, 2)
        )
        for at in range(tensors)
    }


def comparisons(tensors: int, period: int) -> int:
    state = stages(tensors, period)
    Counted.compared = 0
    placing = place(state, None)
    mine = [key for at, key in enumerate(state) if not at % period]
    assert list(placing.placed) == mine
    assert placing.absent == state.keys() - set(mine)
    assert not placing.faults
    return Counted.compared


def test_m155_tensors_of_other_stages_cost_as_much_each_however_many_there_are() -> None:
    for period in (2, 3, 7):
        few, many = comparisons(50, period), comparisons(400, period)
        assert many <= 16 * (few + 50), period
