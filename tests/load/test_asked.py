"""What ranks send of the boxes that they ask for, held against plain counting of elements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import SMALL_SHAPES, boxes_in, count, examples, tilings

from dcp_placements.layout.sharding import Box, Chunk
from dcp_placements.load.comparison.asked import AllAsked, Asked, Asking, Form
from dcp_placements.load.comparison.boxes import box_faults

KEYS = ["a", "b", "c", "d"]
POSITIONS = {key: position for position, key in enumerate(KEYS)}


def chunks(boxes: list[Box]) -> list[Chunk]:
    return [Chunk(box.offsets, *box) for box in boxes]


def sent(shape: tuple[int, ...], boxes_of: dict[str, list[Box] | None]) -> Asked:
    """Return what a rank sends that asks for these boxes of keys, and for all of others (None)."""
    asking = Asking(POSITIONS)
    for key, boxes in boxes_of.items():
        group = asking.others
        if boxes is not None:
            group = asking.group(Form(shape, "cut"), chunks(boxes))
        group.append(POSITIONS[key])
    return asking.packed((), ())


@given(SMALL_SHAPES, st.data())
@examples(150)
def test_a_key_is_refused_when_ranks_ask_for_one_part_and_leave_another(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Ranks draw from a few lists of boxes: parts of a tiling, and boxes that overlap."""
    tiling = data.draw(tilings(shape))
    lists: list[list[Box] | None] = [tiling[at::2] for at in range(2)] + [tiling, [], None]
    lists += [[box] for box in tiling] + [data.draw(boxes_in(shape))]
    asked = [
        {
            key: data.draw(st.sampled_from(lists))
            for key in data.draw(st.sets(st.sampled_from(KEYS)))
        }
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    together = AllAsked.of({rank: sent(shape, boxes_of) for rank, boxes_of in enumerate(asked)})
    expected = set()
    for key in KEYS:
        parts = [boxes_of[key] for boxes_of in asked if key in boxes_of]
        if None in parts:
            continue
        held = [frozenset(part) for part in parts if part]
        covered = count(shape, [box for part in held for box in part])
        if len(set(held)) < len(held) and not bool(covered.all()):
            expected.add(key)
    faults = box_faults(together, None, KEYS, {})
    assert {fault.fqn for fault in faults} == expected


@given(SMALL_SHAPES, st.data())
@examples(50)
def test_ranks_and_boxes_arrive_as_they_were_sent(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    ranks = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True))
    asked = {
        rank: {key: data.draw(boxes_in(shape)) for key in data.draw(st.sets(st.sampled_from(KEYS)))}
        for rank in ranks
    }
    together = AllAsked.of({rank: sent(shape, {**boxes}) for rank, boxes in asked.items()})
    arrived: dict[int, dict[str, list[Box]]] = {rank: {} for rank in ranks}
    for positions, askers in together.parts:
        for one in askers:
            for rank, boxes in zip(one.ranks, one.boxes.tolist(), strict=True):
                ndim = len(one.form.shape)
                held = [Box(tuple(row[:ndim]), tuple(row[ndim:])) for row in boxes]
                arrived[rank].update(dict.fromkeys([KEYS[at] for at in positions], held))
    assert arrived == asked
    for one in together.requests:
        for rank in one.ranks:
            assert {KEYS[at] for at in one.positions} == asked[rank].keys()


def test_sizes_beyond_32_bits_arrive() -> None:
    shape = (1 << 40, 3)
    half = Box((1 << 39, 0), (1 << 39, 3))
    faults = box_faults(
        AllAsked.of({rank: sent(shape, {"a": [half]}) for rank in range(2)}), None, KEYS, {}
    )
    (fault,) = faults
    assert fault.headline == (
        f"several ranks ask for [{1 << 39}:{1 << 40}, :] of {shape}, and none for [0:{1 << 39}, :]"
    )
