"""Two declarations of the cuts of a dim are equal if, and only if, plain slicing by them leaves the
same rows: at every coordinate, whatever the sizes of the axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import accumulate, product
from math import lcm
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from dcp_placements.errors import CannotPlace
from dcp_placements.layout.cuts_compared import (
    Difference,
    canonical,
    cuts_of_part,
    differences,
    same_parts,
)
from dcp_placements.layout.sharding import Cut, FusedPart, Kind, Sharding

AXES = ("a", "b", "c")
PARTS = (2, 4, (1, 3), (3, 1), (2, 1, 1), (1, 1), (2, 2))
Rows = Any
"""Numbers of rows, as an array."""


def cut_plainly(rows: Rows, cut: Cut, size: int, position: int) -> Rows:
    """Return what one position holds of rows that the cut divides; sizes of parts are relative."""
    parts = [1] * cut.parts if isinstance(cut.parts, int) else [*cut.parts]
    pieces = []
    for part, end in zip(parts, accumulate(parts), strict=True):
        ends = [each * len(rows) for each in (end - part, end)]
        assert not any(each % (sum(parts) * size) for each in ends), "the rows do not divide"
        start, stop = (each // sum(parts) for each in ends)
        step = (stop - start) // size
        pieces.append(rows[start + position * step : start + (position + 1) * step])
    return np.concatenate(pieces)


def held(cuts: Sequence[Cut], rows: Rows, sizes: Mapping[str | None, int]) -> list[list[int]]:
    """Return what each coordinate holds of a dim, by slicing; those of axes by name, in order."""
    names = sorted(str(cut.axis) for cut in cuts)
    found = []
    for coordinate in product(*[range(sizes[name]) for name in names]):
        at = dict(zip(names, coordinate, strict=True))
        left = rows
        for cut in cuts:
            left = cut_plainly(left, cut, sizes[cut.axis], at[str(cut.axis)])
        found.append(left.tolist())
    return found


def rows_for(*sides: Sequence[Cut]) -> int:
    """Return a number of rows that some cuts divide, of axes of up to three ranks."""
    parts = [cut.parts for cuts in sides for cut in cuts]
    sums = [part if isinstance(part, int) else sum(part) for part in parts]
    return int((lcm(*sums) * 6) ** len(sides[0]))


def declared_sizes(cuts: Sequence[Cut]) -> dict[str | None, int]:
    return {cut.axis: cut.size for cut in cuts}


@st.composite
def declarations(draw: st.DrawFn, kinds: Sequence[Kind], *, min_size: int = 1) -> list[Cut]:
    """Draw the cuts of one dim, by up to three axes."""
    cuts = []
    for axis in draw(st.permutations(AXES[: draw(st.integers(1, 3))])):
        cut = Cut(0, axis, draw(st.integers(min_size, 3)), draw(st.sampled_from(kinds)))
        if cut.kind is Kind.FUSED:
            cut = cut._replace(parts=draw(st.sampled_from(PARTS)))
        elif cut.kind is Kind.STRIDED:
            cut = cut._replace(parts=draw(st.sampled_from([2, 3, 4])))
        cuts.append(cut)
    return cuts


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[Cut], list[Cut]]:
    """Draw two declarations by the same axes, that are equal, or nearly so.

    All axes cut on one side; on the other some may have size 1, where a rule declares them.
    """
    first = draw(declarations((Kind.PLAIN, Kind.FUSED), min_size=2))
    second = [cut._replace(size=draw(st.integers(1, 3))) for cut in first]
    match draw(st.sampled_from(["size", "order", "kind", "parts", "any"])):
        case "order":
            second = draw(st.permutations(second))
        case "kind":
            at = draw(st.integers(0, len(second) - 1))
            second[at] = second[at]._replace(kind=Kind.PLAIN, parts=1)
        case "parts":
            at = draw(st.integers(0, len(second) - 1))
            parts = draw(st.sampled_from(PARTS))
            second[at] = second[at]._replace(kind=Kind.FUSED, parts=parts)
        case "any":
            drawn = draw(declarations((Kind.PLAIN, Kind.FUSED), min_size=2))
            if {cut.axis for cut in drawn} == {cut.axis for cut in first}:
                second = drawn
    return [cut._replace(by_rule=True) for cut in first], [
        cut._replace(by_rule=True) for cut in second
    ]


@given(pairs())
@examples(40)
def test_equal_declarations_are_those_that_leave_the_same_rows_for_any_sizes(
    pair: tuple[list[Cut], list[Cut]],
) -> None:
    first, second = pair
    rows = np.arange(rows_for(first, second))
    same = all(
        held(first, rows, sizes) == held(second, rows, sizes)
        for sizes in (
            dict(zip([cut.axis for cut in first], each, strict=True))
            for each in product((2, 3), repeat=len(first))
        )
    )
    for one, other in ((first, second), (second, first)):
        assert (not list(differences(one, other, len(rows)))) == same


@given(pairs(), st.data())
@examples(40)
def test_what_cuts_nothing_is_compared_where_a_rule_declares_it(
    pair: tuple[list[Cut], list[Cut]], data: st.DataObject
) -> None:
    first, second = pair
    own = {cut.axis for cut in second if cut.size == 1 and data.draw(st.booleans())}
    said = [cut._replace(by_rule=cut.axis not in own) for cut in second]
    left = [[cut for cut in cuts if cut.axis not in own] for cuts in pair]
    assert list(differences(first, said, 96)) == list(differences(left[0], left[1], 96))
    nowhere = [[cut._replace(size=1) for cut in cuts] for cuts in pair]
    assert not list(differences(nowhere[0], nowhere[1], 96))  # no row depends on them


@given(declarations((Kind.PLAIN, Kind.FUSED, Kind.STRIDED, Kind.STRIDED)))
@examples(40)
def test_the_canonical_form_leaves_the_same_rows(cuts: list[Cut]) -> None:
    ordered = canonical(cuts)
    assert {cut.kind for cut in ordered} <= {Kind.PLAIN, Kind.FUSED}
    assert canonical(ordered) == ordered
    rows = np.arange(rows_for(cuts))
    sizes = declared_sizes(cuts)
    assert held(ordered, rows, sizes) == held(cuts, rows, sizes)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2)])
def test_torchs_strided_shard_stands_after_the_axes_that_it_strides_over(
    sizes: tuple[int, int, int],
) -> None:
    fsdp, ep, tp = sizes
    strided = Cut(0, "fsdp", fsdp, Kind.STRIDED, ep * tp)
    cuts = canonical([strided, Cut(0, "ep", ep), Cut(0, "tp", tp)])
    assert [cut.axis for cut in cuts] == ["ep", "tp", "fsdp"]
    assert {cut.kind for cut in cuts} == {Kind.PLAIN}


@st.composite
def parts_of_fused(draw: st.DrawFn) -> tuple[list[Cut], FusedPart]:
    """Draw the cuts of a tensor that joins several, and which of these one is."""
    sizes = draw(st.sampled_from([(1, 1), (2, 1, 1), (1, 3), (1,)]))
    of = FusedPart(
        draw(st.integers(0, len(sizes) - 1)), sizes, draw(st.sampled_from([1, 1, 2, 4, 6]))
    )
    cuts = draw(declarations((Kind.PLAIN, Kind.FUSED)))
    if draw(st.booleans()):  # as a rule would declare it
        fused = cuts[0]._replace(kind=Kind.FUSED, parts=tuple(sizes) * of.groups)
        cuts[0] = fused if len(sizes) * of.groups > 1 else cuts[0]
    return [cut._replace(of=of) for cut in cuts], of


@given(parts_of_fused())
@examples(40)
def test_the_cuts_of_a_part_leave_what_those_of_the_fused_tensor_leave_of_it(
    drawn: tuple[list[Cut], FusedPart],
) -> None:
    cuts, of = drawn
    unit = sum(of.sizes) * of.groups
    total = lcm(rows_for(cuts), unit)
    span = total // of.groups
    start = span * sum(of.sizes[: of.number]) // sum(of.sizes)
    length = span * of.sizes[of.number] // sum(of.sizes)
    part = [group * span + start + row for group in range(of.groups) for row in range(length)]
    number = {row: at for at, row in enumerate(part)}
    known = cuts_of_part(cuts, len(part))
    fused = cuts[: len(known)]
    sizes = declared_sizes(cuts)
    in_part = [
        [number[row] for row in rows if row in number]
        for rows in held(fused, np.arange(total), sizes)
    ]
    assert held(known, np.arange(len(part)), sizes) == in_part


def test_the_usual_parts_of_a_fused_tensor_are_known() -> None:
    up = FusedPart(1, (1, 1), 1)
    fused = Cut(0, "tp", 2, Kind.FUSED, 2, up)
    assert cuts_of_part([fused], 4) == [Cut(0, "tp", 2)]
    assert cuts_of_part([fused._replace(parts=4)], 4) == [Cut(0, "tp", 2, Kind.FUSED, (2, 2))]
    assert cuts_of_part([Cut(0, "tp", 2, of=up)], 4) == []
    assert cuts_of_part([Cut(0, "tp", 2, of=FusedPart(1, (2, 1, 1), 4))], 4) == [Cut(0, "tp", 2)]
    assert cuts_of_part([Cut(0, "tp", 2)], 4) == [Cut(0, "tp", 2)]


@pytest.mark.parametrize(
    ("one", "other", "size", "expected"),
    [
        ((4, 4, 4), (4, 4, 6), 10, True),  # the last is padded, to what other ranks divide
        ((4, 4, 4), (4, 6, 2), 10, False),
        ((4, 4), (4, 2, 2), 8, False),
        (3, (4, 4, 2), 10, True),  # as torch.chunk
        (3, (4, 3, 3), 10, False),
    ],
)
def test_parts_are_compared_without_padding(
    one: Any, other: Any, size: int, expected: bool
) -> None:
    assert same_parts(one, other, size) == same_parts(other, one, size) == expected


@pytest.mark.parametrize("sizes", [(8, 8), (16, 0), (3, 13)])
@pytest.mark.parametrize("other", [Cut(0, "a", 4), Cut(0, "a", 2, Kind.RAGGED, (0, 16))])
def test_a_ragged_cut_is_a_plain_one_whose_pieces_end_elsewhere(
    sizes: tuple[int, int], other: Cut
) -> None:
    """Rank after rank, both have the rows in their order; a cut of parts has not."""
    cut = Cut(0, "a", 2, Kind.RAGGED, sizes, by_rule=True)
    fused = Cut(0, "a", 2, Kind.FUSED, (8, 8), by_rule=True)
    inside = Cut(0, "b", 2, by_rule=True)
    assert canonical([cut, inside]) == [cut, inside]
    assert not list(differences([cut], [other._replace(by_rule=True)], 16))
    assert list(differences([cut], [fused], 16)) == [Difference((cut,), (fused,))]
    assert list(differences([cut, inside], [inside, cut], 16))
    orders = [
        [Sharding((16,), (each,)).dim_at(0, [n]) for n in range(each.size)]
        for each in (cut, other, fused)
    ]
    in_order = [
        [row for held in of for start, stop in held for row in range(start, stop)]
        == list(range(16))
        for of in orders
    ]
    assert in_order == [True, True, False]


@pytest.mark.parametrize("own", [2, 3, 4])
def test_a_strided_cut_is_one_declaration_before_any_own_cut(own: int) -> None:
    """Canonically it is plain behind an own cut into as many shards as its factor, else fused."""
    rows = np.arange(24)
    strided = Cut(0, "c", 2, Kind.STRIDED, 2, by_rule=True)
    sides = [canonical([strided, Cut(0, "d", size)]) for size in (2, own)]
    assert [cut.kind for cut in sides[0]] == [Kind.PLAIN, Kind.PLAIN]
    of_c = []
    for cuts in sides:
        sizes = declared_sizes(cuts)
        by_c: dict[int, set[int]] = {}
        names = sorted(str(cut.axis) for cut in cuts)
        coordinates = product(*[range(sizes[name]) for name in names])
        for coordinate, of_rank in zip(coordinates, held(cuts, rows, sizes), strict=True):
            by_c.setdefault(coordinate[names.index("c")], set()).update(of_rank)
        of_c.append(by_c)
    assert of_c[0] == of_c[1]
    assert not list(differences(sides[0], sides[1], 24))
    assert not list(differences(sides[1], sides[0], 24))
    other = [Cut(0, "c", 2, Kind.FUSED, 3, by_rule=True)]
    assert list(differences(sides[0], other, 24))
    behind_rules = [cut._replace(by_rule=True) for cut in sides[0]]
    assert list(differences(behind_rules, [other[0]._replace(parts=2)], 24))


def test_a_strided_cut_before_a_ragged_one_is_a_cut_of_parts() -> None:
    ragged = Cut(0, "tp", 2, Kind.RAGGED, (3, 5))
    strided = Cut(0, "fsdp", 2, Kind.STRIDED, 2)
    assert canonical([strided, ragged]) == [strided._replace(kind=Kind.FUSED), ragged]


def test_which_rows_a_ragged_cut_leaves_of_a_part_is_not_known() -> None:
    up = FusedPart(1, (1, 1), 1)
    assert cuts_of_part([Cut(0, "tp", 2, Kind.RAGGED, (3, 5), up)], 4) == []


class NewKind(StrEnum):
    CYCLIC = "cyclic"


NEW: Any = NewKind.CYCLIC


def test_a_kind_that_is_not_known_is_refused() -> None:
    of = FusedPart(0, (1, 1), 1)
    cyclic = Cut(0, "ep", 2, NEW, 4, of)
    for ask in (
        lambda: canonical([cyclic]),
        lambda: cuts_of_part([cyclic], 4),
        lambda: list(differences([cyclic], [Cut(0, "ep", 2, of=of)], 8)),
        lambda: list(differences([Cut(0, "ep", 2, of=of)], [cyclic], 8)),
    ):
        with pytest.raises(CannotPlace, match="kind cyclic"):
            ask()
    for kind in (Kind.STRIDED, Kind.LISTED):
        with pytest.raises(CannotPlace, match="not known"):
            cuts_of_part([Cut(0, "ep", 2, kind, 1, of)], 4)
