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

from dcp_placements.load import exchange
from dcp_placements.load.exchange import batches
from dcp_placements.load.shares import SHARE_NBYTES, Claim, Claims, Wanted, shares, verdicts

MIB = 1 << 20


@st.composite
def wanted_boxes(draw: st.DrawFn) -> tuple[list[Wanted], int]:
    members = draw(st.integers(2, 6))
    near = st.none() | st.integers(0, members - 1)
    boxes = []
    for _ in range(draw(st.integers(1, 30))):
        rows = draw(st.integers(1, 300))
        row_nbytes = draw(st.sampled_from([2, 24, 4096, 40 << 10]))
        boxes.append(Wanted(rows * row_nbytes, rows, draw(near)))
    return boxes, members


@given(wanted_boxes())
def test_every_row_is_read_once(case: tuple[list[Wanted], int]) -> None:
    boxes, members = case
    for box, split in zip(boxes, shares(boxes, members), strict=True):
        rows = [row for share in split for row in range(share.start, share.stop)]
        assert sorted(rows) == list(range(box.rows))
        assert all(0 <= share.member < members for share in split)


@given(wanted_boxes())
def test_what_is_large_is_read_evenly(case: tuple[list[Wanted], int]) -> None:
    boxes, members = case
    # 20 MiB per member in boxes that can be split are enough for 5 %, whatever else there is.
    boxes = [*boxes, *[Wanted(members * 5 * MIB, 1280, None)] * 4]
    load = [0] * members
    for box, split in zip(boxes, shares(boxes, members), strict=True):
        for share in split:
            load[share.member] += box.nbytes // box.rows * (share.stop - share.start)
    assert max(load) - min(load) <= 0.05 * (sum(load) / members)


def test_what_a_member_wrote_it_reads() -> None:
    boxes = [Wanted(3 * MIB, 4, near) for near in (1, 0, 1, 0)]
    assert shares(boxes, 2) == [[(1, 0, 4)], [(0, 0, 4)], [(1, 0, 4)], [(0, 0, 4)]]


def test_what_one_wrote_alone_is_read_by_all() -> None:
    boxes = [Wanted(4 * MIB, 1024, 0)] * 3
    load = [0, 0]
    for split in shares(boxes, 2):
        for share in split:
            load[share.member] += share.stop - share.start
    assert load == pytest.approx([1536, 1536], rel=0.02)


def test_little_is_read_by_one_that_has_it() -> None:
    boxes = [Wanted(SHARE_NBYTES // 8, 16, 5)] * 12
    assert {share.member for split in shares(boxes, 64) for share in split} == {5}


def test_some_is_read_by_few_that_are_spread() -> None:
    boxes = [Wanted(SHARE_NBYTES // 2, 1024, None)] * 8
    assert {share.member for split in shares(boxes, 64) for share in split} == {0, 16, 32, 48}


def grid(*sizes: int, content: int = 7) -> list[Claims]:
    """Return the claims of a whole world that is one replica set of these axes."""
    told = []
    for position, at in enumerate(product(*map(range, sizes))):
        lines = tuple(hash((axis, at[:axis], at[axis + 1 :])) for axis in range(len(sizes)))
        claim = Claim(content, lines, sizes, at)
        told.append(Claims(1, prod(sizes), position, (claim,), hooked=True))
    return told


def changed(told: list[Claims], rank: int, **changes: Any) -> list[Claims]:
    """Return the claims with one rank's changed."""
    claim = told[rank].claims[0]._replace(**changes)
    return [*told[:rank], replace(told[rank], claims=(claim,)), *told[rank + 1 :]]


def granted(told: list[Any]) -> list[tuple[int, ...]]:
    return [verdict.numbers for verdict in verdicts(told)]


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 3, 2)])
def test_a_whole_grid_that_agrees_is_granted(sizes: tuple[int, ...]) -> None:
    assert granted(list(grid(*sizes))) == [(0,)] * prod(sizes)
    assert all(verdict.active for verdict in verdicts(grid(*sizes)))


@pytest.mark.parametrize(
    "changes", [{"content": 8}, {"sizes": (2, 1)}, {"coordinate": (0, 0)}, {"lines": (5, 6)}]
)
def test_one_rank_that_differs_keeps_all_from_it(changes: dict[str, Any]) -> None:
    told = verdicts(changed(grid(2, 2), 3, **changes))
    assert [verdict.numbers for verdict in told] == [(-1,)] * 4
    assert not any(verdict.active or verdict.why for verdict in told)


def test_sets_are_numbered_alike_on_all_ranks() -> None:
    """Two sets of two: each goes by its own number, and one that fails leaves the other be."""
    told = []
    for rank in range(4):
        line = rank // 2
        good = Claim(line, (10 + line,), (2,), (rank % 2,))
        other = Claim(rank, (20 + rank % 2,), (2,), (line,))
        told.append(Claims(1, 4, rank, (other, good), hooked=True))
    assert granted(told) == [(-1, 0), (-1, 0), (-1, 1), (-1, 1)]


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
    told: list[Any] = list(grid(4))
    told[rank] = None if other is None else replace(told[rank], **other)
    found = verdicts(told)
    assert len(found) == 4
    assert all(not verdict.active and why in verdict.why for verdict in found)


def test_one_process_alone_is_told_nothing() -> None:
    assert [(v.active, v.why) for v in verdicts(grid(4)[:1])] == [(False, "")]


def test_batches_are_alike_whatever_the_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BATCH_NBYTES", 1000)
    shapes = [(3, 4), (), (50, 20), (1, 1, 700), (5,), (2, 3, 100)]
    rows = [torch.zeros(shape) for shape in shapes]
    columns = [torch.zeros(shape[::-1]).permute(tuple(range(len(shape)))[::-1]) for shape in shapes]
    found = [[tuple(t.shape) for t in batch] for batch in batches(rows)]
    assert found == [[tuple(t.shape) for t in batch] for batch in batches(columns)]
    assert sum(prod(shape) for batch in found for shape in batch) == sum(map(prod, shapes))
    for batch in batches(columns):
        assert sum(-(-t.nbytes // 16) * 16 for t in batch[:-1]) + batch[-1].nbytes <= 1000
