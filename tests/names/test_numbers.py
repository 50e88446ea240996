"""The numbers that a rename gives: where they are after any steps, and which lists they are of."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Sequence

import pytest

from dcp_placements import (
    Parts,
    PlacementError,
    Renames,
    Renumber,
    Replace,
    Row,
    Split,
    Stack,
    Unstack,
)
from dcp_placements.names.recorded_numbers import Family, families, numbers_given, numbers_of
from dcp_placements.names.rename_results import Rename, Rows

WORDS = ("model", "pp1", "layers", "experts", "w", "weight", "module", "blocks")


def texts_of(key: str) -> list[str]:
    return [key[one.start : one.stop] for one in numbers_given(key)]


def drawn_replace(rng: random.Random) -> Replace:
    """Return one that names no number: of words, or with a ``*`` beside a letter."""
    pattern = ".".join(
        rng.choice((word, f"{word[0]}*")) for word in rng.sample(WORDS, rng.choice((1, 1, 2)))
    )
    return Replace(pattern, rng.choice(("", "net", "a.b", rng.choice(WORDS))))


@pytest.mark.parametrize("seed", range(300))
def test_numbers_are_where_they_were_put_whatever_replaces_the_text_around_them(seed: int) -> None:
    """The truth: ids that occur nowhere else in the key, looked for in the plain result."""
    rng = random.Random(seed)
    heads = rng.sample(WORDS, 3)
    key = f"{heads[0]}.layers.1.{heads[1]}.experts.0.{heads[2]}"
    given = [Renumber("layers.{}", [70, 71], None), Renumber("experts.{}", [90], None)]
    steps: list[Rename] = [*given, *(drawn_replace(rng) for _ in range(rng.randrange(4)))]
    function = rng.choice((None, lambda key: f"saved.{key}", lambda key: key.replace("e", "oo")))
    if function is not None:
        steps.insert(rng.randrange(2, len(steps) + 1), function)
    plain = key
    for step in steps:
        plain = str(step(str(plain)))
    new = Renames(*steps)(key)
    assert new == plain
    assert texts_of(new) == [text for text in ("71", "90") if text in plain]
    wanted = {
        Family(plain[: plain.index(text)], plain[plain.index(text) + 2 :].partition(".")[0])
        for text in ("71", "90")
        if text in plain
    }
    assert {family._replace(tail="") for family in families([new])} == {
        family._replace(tail="") for family in wanted
    }


@pytest.mark.parametrize(
    ("rename", "key", "family"),
    [
        (Renumber("layers.{}", [3], 4), "layers.0.w", ("layers.", "")),
        (Renumber("{}", [3], 4), "0.w", ("", "")),
        (Renumber("w{}", [3], 4), "experts.w0", ("experts.w", "")),
        (
            Renumber("experts.*.weight{}", [3], 4),
            "experts.fc1.weight0.exp",
            ("experts.fc1.weight", ""),
        ),
        (Renumber("expert{}_up", [3], 4), "mlp.expert0_up.w", ("mlp.expert", "_up")),
        (Renumber("experts.{}.w*", [3], 4), "experts.0.w1.x", ("experts.", ".w1")),
        (
            Renames(Renumber("experts.{}.w*", [3], 4), Replace("w1", "gate")),
            "experts.0.w1",
            ("experts.", ".gate"),
        ),
        (
            Renames(Renumber("layers.{}", [1], 2), Renumber("layers.{}", [0, 3], 4)),
            "layers.0.w",
            ("layers.", ""),
        ),
    ],
)
def test_a_family_is_the_list_that_the_pattern_found(
    rename: Rename, key: str, family: tuple[str, str]
) -> None:
    new = rename(key)
    assert isinstance(new, str)
    ((found, numbering),) = families([new]).items()
    assert (found, numbering.total) == (Family(*family), 4)
    assert numbers_of([new, "other.3"], [found]) == {found: {3}}


def test_a_stack_takes_its_number_and_leaves_the_others() -> None:
    steps = Renumber("layers.{}", [5], 8), Renumber("experts.{}", [2], 4), Stack("experts.{}", 4)
    row = Renames(*steps)("layers.0.experts.0.w")
    assert isinstance(row, Row)
    assert (row.fqn, row.index, texts_of(row.fqn)) == ("layers.5.experts.w", 2, ["5"])


@pytest.mark.parametrize("pattern", ["experts.{}", "{}.w", "w{}"])
def test_rows_have_the_place_of_their_number(pattern: str) -> None:
    rows = Renames(Unstack(pattern), Replace("w", "weight"))(
        pattern.replace(".{}", "").replace("{}.", "").replace("{}", "")
    )
    if isinstance(rows, Rows):
        assert texts_of(rows.fqn) == ["{}"]
        (family,) = families([], {rows.fqn: 4})
        assert str(family) == rows.fqn[: len(str(family))]


def test_a_key_with_numbers_is_its_text() -> None:
    new = Renumber("layers.{}", [3], 4)("layers.0.w")
    assert {new: 1} == {"layers.3.w": 1}
    again = pickle.loads(pickle.dumps(new))
    assert (again, numbers_given(again)) == (new, numbers_given(new))


def test_a_function_that_numbers_again_is_refused_where_the_list_must_be_whole() -> None:
    def shifted(key: str) -> str:
        head, number, tail = key.split(".")
        return f"{head}.{int(number) + 1}.{tail}"

    for total, refused in ((4, True), (None, False)):
        rename = Renames(Renumber("layers.{}", [1, 2], total), shifted)
        if refused:
            with pytest.raises(PlacementError, match=r"takes away number 1, which Renumber"):
                rename("layers.0.w")
        else:
            assert rename("layers.0.w") == "layers.2.w"


def numbers_by_hand(fqns: Sequence[str], family: Family) -> set[int]:
    found = set()
    for fqn in fqns:
        for number in range(20):
            start = f"{family.head}{number}{family.tail}"
            if fqn == start or fqn.startswith(f"{start}."):
                found.add(number)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_numbers_of_lists_are_those_that_counting_finds(seed: int) -> None:
    rng = random.Random(seed)
    fqns = [
        ".".join(str(rng.choice((*WORDS[:3], "w1", rng.randrange(12)))) for _ in range(5))
        for _ in range(200)
    ]
    wanted = [Family("layers.", ""), Family("layers.1.", ""), Family("w", ""), Family("", ".w1")]
    assert numbers_of(fqns, wanted) == {one: numbers_by_hand(fqns, one) for one in wanted}


@pytest.mark.parametrize("totals", [(8, None), (None, 8), (8, 4), (4, 8)])
def test_a_list_of_several_steps_is_as_long_as_the_longest_says(
    totals: tuple[int | None, int | None],
) -> None:
    first, second = (Renumber(f"c{i}.layers.{{}}", [2 * i], totals[i]) for i in range(2))
    rename = Renames(first, second, Replace("c*", "model"))
    names = [rename(f"c{i}.layers.0.w") for i in range(2)]
    assert names == ["model.layers.0.w", "model.layers.2.w"]
    for order in (names, names[::-1]):
        assert [one.total for one in families(order).values()] == [8]  # type: ignore[arg-type]


def of_digits(key: str) -> str:
    return re.sub(r"experts\.(\d+)\.w", r"experts.\1.gate", key)


@pytest.mark.parametrize(
    ("step", "fqns"),
    [
        (Replace("experts.*.w", "block.{}.gate"), ["layers.0.block.{}.gate"]),
        (
            Split("experts.*.w", ["block.{}.gate", "{}.up"]),
            ["layers.0.block.{}.gate", "layers.0.{}.up"],
        ),
        (lambda key: key.replace("experts.{}", "block.{}"), ["layers.0.block.{}.w"]),
        (of_digits, ["layers.0.experts.{}.w"]),
    ],
    ids=["a Replace", "a Split", "a function of rows", "a function of digits"],
)
def test_rows_keep_their_number_where_a_step_puts_other_text_around_it(
    step: Rename, fqns: list[str]
) -> None:
    rows = Renames(Unstack("experts.{}"), step)("layers.0.experts.w")
    assert isinstance(rows, Rows | Parts)
    names = rows.fqns
    assert [*names] == fqns
    assert [texts_of(name) for name in names] == [["{}"] for _ in names]
    found = families([], dict.fromkeys(names, 4))
    assert [family.head for family in found] == [name[: name.index("{}")] for name in fqns]
    rows_held = [name.replace("{}", "3") for name in names]
    assert [*numbers_of(rows_held, found).values()] == [{3}] * len(found)


@pytest.mark.parametrize(
    "step",
    [Replace("experts.*", "expert"), lambda key: key.replace("experts.{}", "expert")],
    ids=["a Replace", "a function"],
)
def test_a_step_that_loses_the_number_of_rows_is_refused(step: Rename) -> None:
    with pytest.raises(PlacementError, match=r"takes away number {}, which Unstack\('experts.{}'"):
        Renames(Unstack("experts.{}"), step)("layers.0.experts.w")


def stacks(key: str) -> Rename:
    layer, expert = re.findall(r"\d+", key)
    return Row(f"layers.{layer}.experts.w", int(expert), 2)


def stacks_layers(key: str) -> Rename:
    layer, expert = re.findall(r"\d+", key)
    return Row(f"layers.experts.{expert}.w", int(layer), 4)


def looks_up(key: str) -> Rename:
    layer, expert = re.findall(r"\d+", key)
    names = [f"layers.{number}.experts.w" for number in range(4)]
    return Row(names[int(layer)], int(expert), 2)


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        (stacks, [["3"]]),
        (looks_up, [["3"]]),
        (stacks_layers, [[]]),
        (lambda key: Rows(key.replace(".0.", ".{}."), key), [["3"]]),
        (lambda key: Parts((f"{key}.gate", f"up.{key}"), key, 0, (1, 1)), [["3"], ["3"]]),
    ],
    ids=["rows", "rows by a table", "rows of layers", "tensors of rows", "parts"],
)
def test_m119_what_a_function_stacks_or_splits_keeps_numbers(
    function: Rename, texts: list[list[str]]
) -> None:
    both = Renames(Renumber("layers.{}", [2, 3], total=4), function)
    new = both("layers.1.experts.0.w")
    assert not isinstance(new, str)
    assert [texts_of(text) for text in ((new.fqn,) if isinstance(new, Row) else new.fqns)] == texts


@pytest.mark.parametrize(
    "function",
    [
        lambda key: Row("layers.w", int(re.findall(r"\d+", key)[1]), 2),
        lambda key: Parts(("gate", key), key, 0, (1, 1)),
    ],
    ids=["a row of experts", "one of two parts"],
)
def test_m119_a_function_that_loses_a_number_is_refused_whatever_it_returns(
    function: Rename,
) -> None:
    with pytest.raises(PlacementError, match="takes away number 3"):
        Renames(Renumber("layers.{}", [2, 3], total=4), function)("layers.1.experts.0.w")
