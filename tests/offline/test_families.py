"""Keys as families: no key is lost, and every combination of a family's numbers is a key."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dcp_placements.offline.views.families import families, natural_key, whole_branches

COMPONENT = st.sampled_from(["layers", "experts", "w1", "weight0", "bias12", "0", "1", "2", "10"])
KEYS = st.sets(st.lists(COMPONENT, min_size=1, max_size=4).map(".".join), max_size=30)


@given(KEYS)
def test_families_have_every_key_once(keys: set[str]) -> None:
    found = families(keys)
    assert Counter(key for family in found for key in family.keys) == Counter(keys)
    for family in found:
        assert list(family.keys) == sorted(family.keys, key=natural_key)
        if len(family.keys) == 1:
            assert family.name == family.keys[0]


@given(KEYS, st.integers(0, 30))
def test_branches_are_whole(keys: set[str], number: int) -> None:
    some = sorted(keys)[:number]
    found = whole_branches(some, keys)
    assert Counter(key for branch in found.values() for key in branch) == Counter(some)
    for name, members in found.items():
        if name.endswith(".*"):
            below = {key for key in keys if key.startswith(name[:-1])}
            assert below == set(members)
            assert len(members) > 1
        else:
            assert members == [name]
