"""Who reads what of a set: every row once, evenly, alike on all ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_placements.layout.sharding import Box
from dcp_placements.load import exchange
from dcp_placements.load.exchange import Target, batches, shares

MIB = 1 << 20


@st.composite
def targets(draw: st.DrawFn) -> tuple[list[Target], list[int]]:
    ranks = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=6)))
    found = []
    for number in range(draw(st.integers(1, 30))):
        sizes = draw(st.integers(1, 300)), draw(st.sampled_from([1, 6, 1024, 10 << 10]))
        found.append(Target(f"t{number}", Box((0, 0), sizes), 0, 4))
    return found, ranks


@given(targets(), st.integers(0, 50))
def test_every_row_is_read_once(case: tuple[list[Target], list[int]], turn: int) -> None:
    found, ranks = case
    rows: dict[int, list[int]] = {}
    for one in shares(found, ranks, turn):
        assert one.rank in ranks
        rows.setdefault(one.target, []).extend(range(one.start, one.stop))
    assert all(rows[at] == list(range(target.rows)) for at, target in enumerate(found))


@given(targets())
def test_what_is_large_is_read_evenly(case: tuple[list[Target], list[int]]) -> None:
    found, ranks = case
    # 20 MiB per rank in boxes that can be split are enough for 5 %, whatever else there is.
    sizes = 1280, len(ranks) * 1024
    found = [*found, *[Target(f"large{n}", Box((0, 0), sizes), 0, 4) for n in range(4)]]
    load = dict.fromkeys(ranks, 0)
    for one in shares(found, ranks):
        target = found[one.target]
        load[one.rank] += target.nbytes // target.rows * (one.stop - one.start)
    assert max(load.values()) - min(load.values()) <= 0.05 * sum(load.values()) / len(ranks)


def test_a_set_of_few_bytes_is_read_by_one_rank_in_turn() -> None:
    found = [Target(f"t{n}", Box((0,), (9,)), 0, 4) for n in range(5)]
    assert {one.rank for one in shares(found, [3, 5, 8], 1)} == {5}


def test_batches_hold_every_element_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BATCH_NBYTES", 64)
    tensors = [torch.arange(40.0).reshape(8, 5), torch.arange(3.0), torch.tensor(7.0)]
    tensors.append(torch.arange(12.0).reshape(3, 4).t())
    found = [*batches(tensors)]
    assert all(sum(tensor.nbytes for tensor in batch) <= 64 for batch in found)
    values = torch.cat([tensor.reshape(-1) for batch in found for tensor in batch])
    assert torch.equal(values, torch.cat([tensor.reshape(-1) for tensor in tensors]))
