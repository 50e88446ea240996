"""Keys come back as they were, and thousands of a model's take few bytes."""

from __future__ import annotations

import pickle
import zlib

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import examples

from dcp_placements.keys import packed_keys, unpacked_keys
from dcp_placements.layout import Sharding
from dcp_placements.table import LayoutClass, Look, Table, path_counts, unpacked

WORDS = st.sampled_from(
    ["layers", "experts", "w", "b1", "1b", "0", "00", "7", "10", "007", "é", ""]
)
KEYS = st.lists(WORDS, max_size=5).map(".".join)


@given(st.one_of(st.lists(KEYS, max_size=30), st.lists(st.text(max_size=8), max_size=8)))
@example([""])
@example(["", ""])
@example(["1"])
@example(["a\nb", "c"])
@example(["12345678901234567890"])
@example(["²", "٣"])
@examples(200)
def test_any_keys_come_back(keys: list[str]) -> None:
    assert unpacked_keys(pickle.loads(pickle.dumps(packed_keys(keys)))) == keys


@pytest.mark.parametrize("name", ["step", "exp_avg"])
def test_the_keys_of_a_large_model_travel_in_few_bytes(name: str) -> None:
    parts = [f"part{i}.weight" for i in range(17)]
    keys = [f"state.model.layers.{i}.mlp.{part}.{name}" for i in range(61) for part in parts]
    sent = zlib.compress(pickle.dumps(packed_keys(keys)))
    assert len(keys) == 1037
    assert len(sent) < 400


PATH = st.lists(st.one_of(st.integers(0, 20), KEYS.filter(bool)), min_size=1, max_size=5)


@given(st.lists(PATH.map(tuple), max_size=20, unique_by=lambda path: ".".join(map(str, path))))
@examples(100)
def test_a_table_comes_back_and_knows_where_its_keys_stand(
    paths: list[tuple[str | int, ...]],
) -> None:
    table = Table([LayoutClass(Sharding(()), (), plain=True)], [Look(torch.float32)])
    counts = list(dict.fromkeys(map(path_counts, paths)))
    for path in paths:
        table.fqns.append(".".join(map(str, path)))
        table.class_of.append(0)
        table.look_of.append(0)
        table.rule_of.append(-1)
        table.path_of.append(counts.index(path_counts(path)))
    table.paths = counts
    sent = unpacked(table.compressed())
    assert sent == table
    assert sent.paths_of_keys() == dict(zip(table.fqns, paths, strict=True))
