"""Keys as families: no key is lost, and every combination of a family's numbers is a key."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dcp_placements.offline.views.families import families, natural_key, whole_branches

COMPONENT = st.sampled_from(["layers", "experts", "w1", "weight0", "bias12", "0", "1", "2", "10"])
KEYS = st.sets(st.lists(COMPONENT, min_size=1, max_size=4).map(".".join), max_size=30)


def names(*keys: str) -> list[str]:
    return [family.name for family in families(keys)]


def test_numbers_of_layers_and_experts_become_ranges() -> None:
    keys = [f"layers.{n}.experts.{e}.w{w}" for n in range(12) for e in range(3) for w in (1, 2)]
    assert names(*keys) == ["layers.0-11.experts.0-2.w1", "layers.0-11.experts.0-2.w2"]
    assert names("fc1.weight0", "fc1.weight1", "fc2.weight1") == ["fc1.weight0-1", "fc2.weight1"]


def test_gaps_are_visible() -> None:
    assert names("h.0.w", "h.1.w", "h.3.w") == ["h.0-1,3.w"]
    assert names("h.0.e.0", "h.0.e.1", "h.1.e.0") == ["h.0.e.0-1", "h.1.e.0"]


def test_numbers_sort_as_numbers() -> None:
    assert names("h.10.a", "h.2.b", "embed") == ["embed", "h.2.b", "h.10.a"]


def test_numbers_with_leading_zeros_are_names() -> None:
    assert names("h.01", "h.1") == ["h.01", "h.1"]


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
