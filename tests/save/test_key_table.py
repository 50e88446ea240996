"""Keys and tables come back as they were; equal ones are equal bytes, and few of them."""

from __future__ import annotations

import copy
import pickle
import random
import zlib
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import examples

from dcp_placements.layout.sharding import Cut, Pick, Sharding
from dcp_placements.save.digest_folding import has_number
from dcp_placements.save.key_table import (
    OBJECT,
    PLAIN,
    SHARD,
    Group,
    KeyTable,
    declared_group,
    path_counts,
    unpacked_table,
)
from dcp_placements.save.packing import (
    packed_ints,
    packed_keys,
    unpacked_ints,
    unpacked_keys,
    unpacked_rows,
)
from dcp_placements.storage.metadata.record import SavedCut

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
@example(["50%d.7", "50%d.9", "%s.0", "w", "50%d.8"])
@examples(80)
def test_any_keys_come_back(keys: list[str]) -> None:
    assert unpacked_keys(pickle.loads(pickle.dumps(packed_keys(keys)))) == keys


@pytest.mark.parametrize("name", ["step", "exp_avg"])
def test_the_keys_of_a_large_model_travel_in_few_bytes(name: str) -> None:
    parts = [f"part{i}.weight" for i in range(17)]
    keys = [f"state.model.layers.{i}.mlp.{part}.{name}" for i in range(61) for part in parts]
    sent = zlib.compress(pickle.dumps(packed_keys(keys)))
    assert len(keys) == 1037
    assert len(sent) < 400


def table(groups: dict[Group, list[str]], rules: list[str | None] | None = None) -> KeyTable:
    """Return a table of keys that no rule names, or each of them the next one."""
    fqns = [fqn for keys in groups.values() for fqn in keys]
    rules = rules or [None]
    rule_of = [i % len(rules) for i in range(len(fqns))]
    sizes = [len(keys) for keys in groups.values()]
    return KeyTable(list(groups), fqns, sizes, rules, rule_of, [(1,)], [0] * len(fqns))


GROUPS = [
    Group(OBJECT),
    Group(PLAIN, (), torch.float32),
    Group(PLAIN, (4, 0), torch.bool, requires_grad=True),
    Group(PLAIN, (3,), torch.float64, layout="sparse_coo"),
    Group(SHARD, (8, 6), torch.bfloat16, axis_names=("tp", None)),
    Group(
        SHARD,
        (8, 6),
        torch.float8_e4m3fn,
        "strided",
        True,
        ("ep", "fsdp"),
        (
            SavedCut("ep", 2, 0, "rows"),
            SavedCut("fsdp", 4, 1, "fused", (2, 4), True),
            SavedCut(None, 1, 0, "rows"),
        ),
        (8, 8),
        parts=None,
    ),
    declared_group(Sharding((1 << 40, 6), (2,), (Cut(0, 0, 4, strided=True),)), ("x",), torch.int8),
]


def test_a_table_of_all_kinds_of_groups_comes_back() -> None:
    found = table({group: [f"g{i}.{j}.w" for j in range(i)] for i, group in enumerate(GROUPS)})
    sent = unpacked_table(found.packed())
    assert sent == found
    assert sent.packed() == found.packed()
    assert all(isinstance(cut, SavedCut) for g in sent.groups for cut in g.cuts)
    for number, group in enumerate(GROUPS):
        assert sent.keys(number) == [f"g{number}.{j}.w" for j in range(number)]
        assert sent.groups[number].itemsize == (group.dtype.itemsize if group.dtype else 0)


def test_an_empty_table_comes_back() -> None:
    assert unpacked_table(KeyTable().packed()) == KeyTable()


def anew(value: Any) -> Any:
    """Return an equal value none of whose parts is the same object twice."""
    if isinstance(value, tuple):
        made = [anew(part) for part in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return str(value.encode(), "utf-8") if isinstance(value, str) else copy.copy(value)


def test_equal_tables_are_equal_bytes_whatever_objects_they_are_made_of() -> None:
    cuts = (Cut(0, 0), Cut(0, 1))
    some = {
        declared_group(Sharding((i, 7000), (2, 4), cuts), ("ep", "fsdp"), torch.float32): [
            f"layers.{i}.w"
        ]
        for i in range(9)
    }
    one = table(some, ["'layers'", "'layers.*'"])
    other = table({anew(group): anew(tuple(keys)) for group, keys in some.items()})  # type: ignore[misc]
    other.rules, other.rule_of = [anew(rule) for rule in one.rules], list(one.rule_of)
    assert other == one
    assert other.groups[0].cuts is not other.groups[1].cuts
    assert other.packed() == one.packed()
    assert pickle.loads(pickle.dumps(one)).packed() == one.packed()
    assert unpacked_table(one.packed()).packed() == one.packed()


ODD_KEYS = (
    *("a\nb", "c", "a", "b\nc", "\n", "a\n", "", "w.\0", "a\rb", "a\u2028b", "é.ü", "名.重み"),
    *("cut \udc80 off", "w.007", "w.12345678901234567890", "0", ".", "w..x", "x" * 5000),
)


@pytest.mark.parametrize("keys", [(), *((key,) for key in ODD_KEYS), ODD_KEYS])
def test_m37_a_table_of_any_keys_comes_back(keys: tuple[str, ...]) -> None:
    assert unpacked_keys(packed_keys(keys)) == list(keys)
    found = table({GROUPS[1]: list(keys)})
    assert unpacked_table(found.packed()) == found


def test_m37_tables_of_other_keys_are_other_bytes() -> None:
    lists = [("a\nb", "c"), ("a", "b\nc"), ("a", "b", "c"), ("a\nb\nc",), ("",), ("", ""), ()]
    lists += [("a\0b",), ("a", "\0b"), ("\n",), ("\udc80",), ("?",), ("c", "a\nb")]
    assert len({table({GROUPS[1]: list(keys)}).packed() for keys in lists}) == len(lists)


def test_what_a_group_is_changes_the_bytes() -> None:
    assert len({table({group: ["w"]}).packed() for group in GROUPS}) == len(GROUPS)
    assert table({GROUPS[1]: ["w"]}, ["'w'"]).packed() != table({GROUPS[1]: ["w"]}).packed()


@pytest.mark.parametrize(
    ("key", "has"),
    [
        *(("layers.0.w", True), ("0", True), ("0.w", True), ("w.12", True), ("a.007.b", True)),
        *(("embed", False), ("w12", False), ("a.1b.c", False), ("", False), ("a..b", False)),
        ("head.weight", False),
    ],
)
def test_a_number_is_a_component_by_itself(key: str, has: bool) -> None:
    assert has_number(key) == has


PATH = st.lists(st.one_of(st.integers(0, 20), KEYS.filter(bool)), min_size=1, max_size=5)


@given(st.lists(PATH.map(tuple), max_size=20, unique_by=lambda path: ".".join(map(str, path))))
@examples(50)
def test_a_table_knows_where_its_keys_stand(paths: list[tuple[str | int, ...]]) -> None:
    fqns, rule_of = [".".join(map(str, path)) for path in paths], [0] * len(paths)
    forms, form_of = path_counts(paths)
    assert len(set(forms)) == len(forms)
    found = KeyTable([Group(PLAIN)], fqns, [len(paths)], [None], rule_of, forms, form_of)
    sent = unpacked_table(found.packed())
    assert sent == found
    assert sent.paths_of_keys() == dict(zip(found.fqns, paths, strict=True))


def test_a_declaration_is_what_ranks_have_in_common() -> None:
    """Rows that a rank lists are not in it; where nobody lists any, it is the whole sharding."""
    cuts = (Cut(0, 1), Cut(1, 0, (2, 4), True))
    sharding = Sharding((8, 6), (2, 4, 2), cuts, (8, 8))
    group = declared_group(sharding, ("ep", "fsdp", "dp"), torch.int8)
    assert group.parts == 8
    assert group.equal_along == {"dp"}
    made = [
        declared_group(Sharding((8, 6), (2, 4), cuts), ("ep", "fsdp"), torch.int8)
        for cuts in [(Pick(0, rows), Cut(0, 1)) for rows in [(0, 1), (5, 2, 2)]]
    ]
    assert made[0] == made[1]
    assert made[0].parts is None
    assert made[0].equal_along == frozenset()


@pytest.mark.parametrize("largest", [0, 1, 255, (1 << 32) - 1, 1 << 32, (1 << 62)])
@pytest.mark.parametrize("count", [0, 1, 100, 2000])
def test_integers_come_back(largest: int, count: int) -> None:
    rng = random.Random(count)
    values = [rng.randint(0, largest) for _ in range(count)]
    assert unpacked_ints(packed_ints(values)).tolist() == values


def test_boxes_that_repeat_themselves_travel_in_few_bytes() -> None:
    assert len(packed_ints([128, 0, 512, 4096] * 1000)) < 200


def test_rows_of_integers_are_unpacked_as_each_of_them_is():
    rows = [
        [1, 2, 3],
        [4, 5, 600],
        [7, 8, 9],
        [],
        list(range(1000)),
        list(range(1000)),
        [2**40, 0, 1],
    ]
    packed = [packed_ints(row) for row in rows]
    assert packed[4][:1] != packed[1][:1]
    unpacked: dict[int, list[int]] = {}
    for positions, table in unpacked_rows(packed):
        unpacked.update(zip(positions, table.tolist(), strict=True))
    assert [unpacked[at] for at in range(len(rows))] == rows
