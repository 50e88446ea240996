"""Which stored chunks fill a destination, held against a search through all of them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SMALL_SHAPES, arange, boxes_in, count, examples, tilings
from torch.distributed.checkpoint import ChunkStorageMetadata, ReadItem, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_placements.layout.boxes import Index, as_array, common
from dcp_placements.layout.sharding import Box
from dcp_placements.load.reads import pieces_of, read_items, reads_of


def found_items(
    fqn: str, metadata: TensorStorageMetadata, destinations: list[Box]
) -> tuple[list[ReadItem], list[Box]]:
    reads, holes = reads_of(metadata, destinations)
    return read_items([(fqn, reads)]), holes


def stored(shape: tuple[int, ...], boxes: list[Box]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes]
    properties = TensorProperties(dtype=torch.float32)
    return TensorStorageMetadata(properties, torch.Size(shape), chunks)


def slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


@given(SMALL_SHAPES, st.data())
@examples(100)
def test_meeting_finds_what_looking_at_all_finds(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = data.draw(tilings(shape))
    chunks = Index(as_array(boxes, len(shape)))
    for wanted in data.draw(boxes_in(shape)):
        expected = {
            (index, shared)
            for index, box in enumerate(boxes)
            if (shared := common(box, wanted)) is not None
        }
        meeting = pieces_of(wanted, chunks)
        assert all(boxes[index] == box for index, box, _ in meeting)
        found = [(index, shared) for index, _, shared in meeting]
        assert set(found) == expected
        assert len(found) == len(expected)


@given(SMALL_SHAPES, st.data())
@examples(100)
def test_reading_the_items_fills_every_destination(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Copy as a storage reader does; every destination element is read exactly once."""
    boxes = data.draw(tilings(shape))
    destinations = data.draw(boxes_in(shape))
    items, holes = found_items("w", stored(shape, boxes), destinations)
    assert holes == []
    whole = arange(shape)
    filled = [torch.full(box.sizes, -1.0) for box in destinations]
    copied = [torch.zeros(box.sizes) for box in destinations]
    for item in items:
        assert item.type == LoadItemType.TENSOR
        assert item.dest_index.fqn == item.storage_index.fqn == "w"
        assert item.dest_index.index is not None
        assert item.storage_index.index is not None
        source = boxes[item.storage_index.index]
        assert item.storage_index.offset == torch.Size(source.offsets)
        assert item.dest_index.offset == torch.Size(destinations[item.dest_index.index].offsets)
        held = whole[slices(source.offsets, source.sizes)]
        part = held[slices(tuple(item.storage_offsets), tuple(item.lengths))]
        at = slices(tuple(item.dest_offsets), tuple(item.lengths))
        filled[item.dest_index.index][at] = part
        copied[item.dest_index.index][at] += 1
    for box, tensor, copies in zip(destinations, filled, copied, strict=True):
        assert torch.equal(tensor, whole[slices(box.offsets, box.sizes)])
        assert bool((copies == 1).all())


@given(SMALL_SHAPES, st.data())
@examples(100)
def test_holes_are_what_no_stored_chunk_holds(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = data.draw(tilings(shape))
    kept = [box for box in boxes if data.draw(st.booleans())]
    (wanted, *_) = data.draw(boxes_in(shape, max_count=3)) or [Box((0,) * len(shape), shape)]
    _, holes = found_items("w", stored(shape, kept), [wanted])
    missing = (count(shape, [wanted]) == 1) & (count(shape, kept) == 0)
    assert torch.equal(count(shape, holes).bool(), missing)


def test_an_empty_destination_reads_nothing_though_its_box_is_stored() -> None:
    boxes = [Box((0, 0), (4, 3)), Box((4, 0), (0, 3))]
    assert found_items("w", stored((4, 3), boxes), [boxes[1]]) == ([], [])


def test_a_scalar_is_read_whole() -> None:
    items, holes = found_items("s", stored((), [Box((), ())]), [Box((), ())])
    assert holes == []
    assert len(items) == 1
    assert items[0].lengths == torch.Size(())
    assert found_items("s", stored((), []), [Box((), ())])[1] == [Box((), ())]
