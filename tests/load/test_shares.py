"""Who reads what: every row once, evenly, alike on all ranks; and what the coordinator grants."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_placements.load.exchange import broadcast
from dcp_placements.load.exchange.broadcast import batches
from dcp_placements.load.exchange.shares import (
    Claim,
    Claims,
    Destination,
    shares,
    verdicts,
)

MIB = 1 << 20


@st.composite
def destinations(draw: st.DrawFn) -> tuple[list[Destination], int]:
    members = draw(st.integers(2, 6))
    writer = st.none() | st.integers(0, members - 1)
    boxes = []
    for _ in range(draw(st.integers(1, 30))):
        rows = draw(st.integers(1, 300))
        row_nbytes = draw(st.sampled_from([2, 24, 4096, 40 << 10]))
        boxes.append(Destination(rows * row_nbytes, rows, draw(writer)))
    return boxes, members


@given(destinations())
def test_every_row_is_read_once(case: tuple[list[Destination], int]) -> None:
    boxes, members = case
    for box, split in zip(boxes, shares(boxes, members), strict=True):
        rows = [row for share in split for row in range(share.start, share.stop)]
        assert sorted(rows) == list(range(box.rows))
        assert all(0 <= share.member < members for share in split)


@given(destinations())
def test_what_is_large_is_read_evenly(case: tuple[list[Destination], int]) -> None:
    boxes, members = case
    # 20 MiB per member in boxes that can be split are enough for 5 %, whatever else there is.
    boxes = [*boxes, *[Destination(members * 5 * MIB, 1280, None)] * 4]
    load = [0] * members
    for box, split in zip(boxes, shares(boxes, members), strict=True):
        for share in split:
            load[share.member] += box.nbytes // box.rows * (share.stop - share.start)
    assert max(load) - min(load) <= 0.05 * (sum(load) / members)


def grid(*sizes: int) -> list[Claims]:
    """Return the claims of a whole world that is one replica set of these axes."""
    sent = []
    for position, at in enumerate(product(*map(range, sizes))):
        lines = tuple(hash((axis, at[:axis], at[axis + 1 :])) for axis in range(len(sizes)))
        claim = Claim(7, lines, sizes, at)
        sent.append(Claims(1, prod(sizes), position, (claim,), hooked=True))
    return sent


def changed(sent: list[Claims], rank: int, **changes: Any) -> list[Claims]:
    """Return the claims with one rank's changed."""
    claim = sent[rank].claims[0]._replace(**changes)
    return [*sent[:rank], replace(sent[rank], claims=(claim,)), *sent[rank + 1 :]]


def granted(sent: list[Any]) -> list[tuple[int, ...]]:
    return [verdict.numbers for verdict in verdicts(sent)]


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 3, 2)])
def test_a_whole_grid_that_agrees_is_granted(sizes: tuple[int, ...]) -> None:
    assert granted(list(grid(*sizes))) == [(0,)] * prod(sizes)
    assert all(verdict.active for verdict in verdicts(grid(*sizes)))


@pytest.mark.parametrize(
    "changes", [{"content": 8}, {"sizes": (2, 1)}, {"coordinate": (0, 0)}, {"lines": (5, 6)}]
)
def test_one_rank_that_differs_keeps_all_from_it(changes: dict[str, Any]) -> None:
    sent = verdicts(changed(grid(2, 2), 3, **changes))
    assert [verdict.numbers for verdict in sent] == [(-1,)] * 4
    assert not any(verdict.active or verdict.why for verdict in sent)


def test_sets_are_numbered_alike_on_all_ranks() -> None:
    """Two sets of two: each goes by its own number, and one that fails leaves the other be."""
    sent = []
    for rank in range(4):
        line = rank // 2
        good = Claim(line, (10 + line,), (2,), (rank % 2,))
        other = Claim(rank, (20 + rank % 2,), (2,), (line,))
        sent.append(Claims(1, 4, rank, (other, good), hooked=True))
    assert granted(sent) == [(-1, 0), (-1, 0), (-1, 1), (-1, 1)]


@pytest.mark.parametrize(
    ("rank", "other", "why"),
    [
        (2, None, "the planner of rank 2 was not given exchange=True"),
        (1, {"hooked": False}, "the storage reader does not call"),
        (1, {"group": 2}, "another process group"),
        (1, {"position": 3}, "another process group"),
        (0, {"size": 8}, "another process group"),
    ],
)
def test_what_keeps_all_from_it_is_said(rank: int, other: dict[str, Any] | None, why: str) -> None:
    sent: list[Any] = list(grid(4))
    sent[rank] = None if other is None else replace(sent[rank], **other)
    found = verdicts(sent)
    assert len(found) == 4
    assert all(not verdict.active and why in verdict.why for verdict in found)


def test_batches_are_alike_whatever_the_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "BATCH_NBYTES", 1000)
    shapes = [(3, 4), (), (50, 20), (1, 1, 700), (5,), (2, 3, 100)]
    rows = [torch.zeros(shape) for shape in shapes]
    columns = [torch.zeros(shape[::-1]).permute(tuple(range(len(shape)))[::-1]) for shape in shapes]
    found = [[tuple(t.shape) for t in batch] for batch in batches(rows)]
    assert found == [[tuple(t.shape) for t in batch] for batch in batches(columns)]
    assert sum(prod(shape) for batch in found for shape in batch) == sum(map(prod, shapes))
    for batch in batches(columns):
        assert sum(-(-t.nbytes // 16) * 16 for t in batch[:-1]) + batch[-1].nbytes <= 1000
