"""Keys that several tables have, and what the coordinator makes of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from dcp_placements._torch import WriteItemType
from dcp_placements.layout.sharding import Box
from dcp_placements.save.coordinator.cohorts import Cohorts
from dcp_placements.save.coordinator.global_plan import Coordinator
from dcp_placements.save.coordinator.pieces import pieces_of
from dcp_placements.save.items import assigned_items
from dcp_placements.save.key_table import OBJECT, PLAIN, Group, KeyTable
from dcp_placements.save.local_plan import LocalPlan, packed_boxes

WIDE = Group(PLAIN, (4, 1 << 16), torch.float32)
SHORT = Group(PLAIN, (3,), torch.float32)
THING = Group(OBJECT)


def table(groups: dict[Group, str]) -> KeyTable:
    """Return a table whose keys are words."""
    keys = [words.split() for words in groups.values()]
    fqns = [fqn for some in keys for fqn in some]
    sizes = [len(some) for some in keys]
    count = len(fqns)
    return KeyTable(list(groups), fqns, sizes, [None], [0] * count, [(1,)], [0] * count)


def plan(rank: int, *tables: KeyTable) -> LocalPlan:
    """Return the plan of a rank that has all that its tables name, whole."""
    boxes = [(Box((0,) * len(g.shape), g.shape),) for one in tables for g in one.groups]
    return LocalPlan(rank, tuple([one.packed() for one in tables]), packed_boxes(boxes))


def coordinator(*plans: LocalPlan) -> Coordinator:
    return Coordinator(plans, world=len(plans), complete=True)


def pieces(*tables: KeyTable) -> list[tuple[list[str], list[tuple[int, int]]]]:
    """Return the keys of each piece, and the table and group that has them."""
    cohorts = Cohorts([plan(rank, one) for rank, one in enumerate(tables)], len(tables))
    found = []
    for piece in pieces_of(cohorts).all:
        places = []
        for source in piece.sources:
            one = cohorts.tables[source.table]
            number = one.groups.index(source.group)
            assert [one.keys(number)[at] for at in source.positions] == piece.fqns
            places.append((source.table, number))
        found.append((piece.fqns, places))
    return found


def written(made: Coordinator, lowest_rank: bool = False) -> list[list[str]]:
    """Return the keys that each rank writes."""
    assignments = made.plan(lowest_rank=lowest_rank)
    assert not made.faults
    return [
        [item.index.fqn for item in assigned_items(made.cohorts.holding(one), assignment)]
        for one, assignment in zip(made.plans, assignments, strict=True)
    ]


def test_groups_of_tables_that_share_nothing_are_pieces() -> None:
    found = pieces(table({WIDE: "a b", SHORT: "c"}), table({WIDE: "d"}))
    assert found == [(["a", "b"], [(0, 0)]), (["c"], [(0, 1)]), (["d"], [(1, 0)])]


def test_keys_that_several_tables_have_are_pieces_of_their_own() -> None:
    found = pieces(table({WIDE: "a head b tied"}), table({WIDE: "head c tied", SHORT: "d"}))
    assert found == [
        (["a", "b"], [(0, 0)]),
        (["head", "tied"], [(0, 0), (1, 0)]),
        (["c"], [(1, 0)]),
        (["d"], [(1, 1)]),
    ]


def test_keys_of_one_group_here_and_of_several_there_are_apart() -> None:
    found = pieces(table({WIDE: "a b c"}), table({WIDE: "a c", SHORT: "b"}))
    assert [keys for keys, _ in found] == [["a", "c"], ["b"]]


def test_keys_in_another_order_are_pieces_one_by_one() -> None:
    """Runs speak of positions."""
    found = pieces(table({WIDE: "a b c own"}), table({WIDE: "b a c"}))
    assert [keys for keys, _ in found] == [["a"], ["b"], ["c"], ["own"]]
    assert found[0][1] == [(0, 0), (1, 0)]


def test_equal_tables_are_unpacked_once() -> None:
    one = table({WIDE: "a b", SHORT: "c"})
    cohorts = Cohorts([plan(rank, one) for rank in range(5)], 5)
    assert cohorts.tables == [one]
    assert cohorts.members[0].tolist() == list(range(5))
    assert len(cohorts.cohorts) == 1


@pytest.mark.parametrize("lowest_rank", [False, True])
def test_each_key_is_written_once_whatever_tables_share(lowest_rank: bool) -> None:
    rng = random.Random(lowest_rank)
    words = [f"k{i}" for i in range(12)]
    kinds = {word: rng.choice([WIDE, SHORT, THING]) for word in words}
    for _ in range(150):
        tables = []
        for _ in range(rng.randint(1, 3)):
            mine = rng.sample(words, rng.randint(1, len(words)))
            cuts = [*sorted(rng.sample(range(len(mine) + 1), 1)), len(mine)]
            # A rank has each key in one table only.
            tables.append(
                [
                    table(
                        {
                            group: " ".join(w for w in some if kinds[w] is group)
                            for group in dict.fromkeys(kinds[w] for w in some)
                        }
                    )
                    for some in (mine[: cuts[0]], mine[cuts[0] :])
                    if some
                ]
            )
        plans = [plan(rank, *rng.choice(tables)) for rank in range(rng.randint(1, 6))]
        made = coordinator(*plans)
        having = {fqn for one in plans for t in made.cohorts.tables_of(one) for fqn in t.fqns}
        found = written(made, lowest_rank)
        assert Counter(fqn for keys in found for fqn in keys) == Counter(having)
        assert set(made.metadata) == having
        for fqn in having:
            ranks = [
                one.rank for one in plans if any(fqn in t.fqns for t in made.cohorts.tables_of(one))
            ]
            expected = made.partial.get(fqn, tuple(range(len(plans))))
            assert expected == tuple(ranks)
            (writer,) = [rank for rank, keys in enumerate(found) if fqn in keys]
            assert writer in ranks
            if lowest_rank or kinds[fqn] is THING:
                assert writer == ranks[0]


def test_a_key_of_another_shape_in_another_table_is_refused_alone() -> None:
    made = coordinator(plan(0, table({WIDE: "a b c"})), plan(1, table({WIDE: "a", SHORT: "b"})))
    made.check()
    (fault,) = made.faults
    assert fault.fqn == "b"
    assert "the ranks do not agree on the shape of the whole tensor" in str(fault)


def test_a_tensor_here_and_an_object_there_is_refused() -> None:
    made = coordinator(plan(0, table({WIDE: "a"})), plan(1, table({THING: "a"})))
    made.check()
    (fault,) = made.faults
    assert "is a tensor on rank 0, but another object on rank 1" in str(fault)


def test_objects_are_written_as_objects() -> None:
    made = coordinator(plan(0, table({THING: "lr", WIDE: "w"})), plan(1, table({THING: "lr"})))
    one, two = (
        assigned_items(made.cohorts.holding(plan), assignment)
        for plan, assignment in zip(made.plans, made.plan(), strict=True)
    )
    kinds = {item.index.fqn: item.type for item in one}
    assert kinds == {"lr": WriteItemType.BYTE_IO, "w": WriteItemType.TENSOR}
    assert two == []
