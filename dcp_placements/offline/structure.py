"""Faults that the metadata and the sizes of files prove: holes, overlaps, missing files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from dcp_placements.errors import format_names, format_ranks
from dcp_placements.layout.boxes import (
    as_array,
    as_boxes,
    format_box,
    format_boxes,
    overlaps,
    tile,
    uncovered,
    unique,
    within,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.checkpoint import (
    TORCH_CHECKPOINTING,
    Checkpoint,
    ChunkBoxes,
    StoredRecord,
    StoredTensor,
    check_count,
    reading,
)
from dcp_placements.storage.metadata_file import read_stock_pickle
from dcp_placements.storage.provenance import OWN_PREFIX
from dcp_placements.storage.save_ids import ID_NBYTES, files_of_two_ranks, id_fault, id_in_name

MAX_BOXES = 4
"""Boxes that a message lists."""


@dataclass(frozen=True, slots=True)
class CheckpointFault:
    """One thing wrong with a checkpoint."""

    kind: str  # what it is, in one word that stays; the guide of cli lists them
    tensors: tuple[str, ...]  # keys that it is about, sorted
    files: tuple[str, ...]  # files that it is about, sorted
    message: str  # the numbers in the files against those declared


def records_by_file(checkpoint: Checkpoint) -> dict[str, list[StoredRecord]]:
    """Return the records of every file, copies too, in file order; files sorted by name.

    Raises:
        CannotLook: There are too many.
    """
    check_count(checkpoint.path, len(checkpoint.rows))
    by_file: dict[str, list[StoredRecord]] = defaultdict(list)
    for record in checkpoint.records():
        assert record.file is not None, "records have a place"
        by_file[record.file].append(record)
    for records in by_file.values():
        records.sort(key=attrgetter("start", "nbytes"))
    return dict(sorted(by_file.items()))


def record_name(checkpoint: Checkpoint, record: StoredRecord) -> str:
    """Return the key of a record, with the box where that is a part of the tensor."""
    if record.box is None or checkpoint.tensors[record.fqn].count == 1:
        return record.fqn
    return f"{record.fqn} {format_box(record.box, checkpoint.tensors[record.fqn].shape)}"


def structural_faults(checkpoint: Checkpoint) -> list[CheckpointFault]:
    """Return all that the metadata, the sizes of files and the ids of saves prove to be wrong."""
    faults = metadata_faults(checkpoint)
    for file, records in records_by_file(checkpoint).items():
        faults += file_faults(checkpoint, file, records)
    return faults


def metadata_faults(checkpoint: Checkpoint) -> list[CheckpointFault]:
    """Return what the metadata prove to be wrong, and files of another save."""
    check_count(checkpoint.path, len(checkpoint.rows))
    return [*_tiling_faults(checkpoint), *_place_faults(checkpoint), *_id_faults(checkpoint)]


def stock_faults(checkpoint: Checkpoint) -> Iterator[CheckpointFault]:
    """Yield a fault if torch's readers find chunks elsewhere than the index has them.

    Raises:
        CannotLook: The pickle before the index is refused, or cannot be read.
    """
    directory, rows = checkpoint.directory, checkpoint.rows
    if ".metadata" not in directory.names():
        return
    with reading(directory, ".metadata"):
        stock = read_stock_pickle(directory.opener(".metadata"))
    if stock is None:
        return
    torchs: Any = stock.storage_data
    keys = {*rows.fqns, *torchs.fqns}
    fqns = sorted(fqn for fqn in keys if {*rows.rows_of(fqn)} != {*torchs.rows_of(fqn)})
    if fqns:
        message = (
            "torch reads .metadata without its index, and looks for chunks in other places than "
            f"the index has: {format_names(fqns, 4)}; merge-metadata --rewrite writes both anew"
        )
        yield CheckpointFault("stock_metadata", tuple(fqns), (".metadata",), message)


def _tiling_faults(checkpoint: Checkpoint) -> Iterator[CheckpointFault]:
    """Yield holes, overlaps, and chunks out of bounds: one fault for tensors that are cut alike."""
    groups: dict[tuple[tuple[int, ...], ChunkBoxes], list[StoredTensor]] = {}
    for tensor in checkpoint.tensors.values():
        groups.setdefault((tensor.shape, tensor.cut), []).append(tensor)
    for tensors in groups.values():
        for kind, message in box_faults(tensors[0].whole, tensors[0].boxes):
            names = tuple(sorted([tensor.fqn for tensor in tensors]))
            yield CheckpointFault(kind, names, (), message)


def box_faults(whole: Box, boxes: Iterable[Box]) -> Iterator[tuple[str, str]]:
    """Yield ``(kind, message)`` of the holes and overlaps of boxes that should tile a tensor."""
    shape = whole.sizes
    filled = [box for box in boxes if box.numel]
    array = as_array(filled, len(shape))
    if tile(whole, array):
        return
    first, number = unique(array)
    different = array[first]
    outside = as_boxes(different[~within(whole, different)])
    if outside:
        names = format_names([format_box(box) for box in outside], MAX_BOXES)
        yield "out_of_bounds", f"{names} of a {shape} tensor"
    twice = as_boxes(different[np.bincount(number, minlength=len(first)) > 1])
    if twice:
        yield "overlap", f"{format_boxes(twice, shape)} is there more than once"
    pairs = overlaps(different, limit=MAX_BOXES)
    if pairs:
        text = "; ".join(
            " and ".join(format_box(box, shape) for box in as_boxes(different[list(pair)]))
            for pair in pairs
        )
        yield "overlap", f"chunks of {shape} overlap: {text}"
    holes = uncovered(whole, different, limit=2 * MAX_BOXES)
    if holes:
        yield "hole", f"no chunk holds {format_boxes(holes, shape)}"


def _place_faults(checkpoint: Checkpoint) -> Iterator[CheckpointFault]:
    """Yield chunks without a place, places without a chunk, and keys of an index without either."""
    for alike in checkpoint.alike:
        fqns = tuple(sorted([checkpoint.rows.fqns[key] for key in alike.keys]))
        offsets = set(alike.offsets)
        unplaced = [box for offset, box in alike.boxes.items() if offset not in offsets]
        if unplaced:
            shape = checkpoint.tensors[fqns[0]].shape if fqns[0] in checkpoint.tensors else ()
            boxes = [box for box in unplaced if box is not None]
            what = format_boxes(boxes, shape) if boxes else "this object"
            yield CheckpointFault("unplaced", fqns, (), f"the metadata name no file for {what}")
        for fqn in fqns if offsets - alike.boxes.keys() else ():
            if fqn.startswith(OWN_PREFIX) and not alike.boxes:
                continue  # a record of this package's own, such as that of a save's id
            for offset, (file, *_) in checkpoint.places_of(fqn).items():
                if offset not in alike.boxes:
                    at = "" if offset is None else f" at {offset}"
                    message = f"{file} has a chunk{at} that the tensor's metadata do not list"
                    yield CheckpointFault("unclaimed", (fqn,), (file,), message)
    if absent := checkpoint.absent_ranks:
        message = f"no metadata of {format_ranks(absent)}: what no other rank stored is missing"
        ends = sorted({f"__{absent[0]}.metadata", f"__{absent[-1]}.metadata"})
        yield CheckpointFault("missing_file", (), tuple(ends), message)
    for file in sorted(set(checkpoint.absent.values())):
        names = tuple(sorted(fqn for fqn, name in checkpoint.absent.items() if name == file))
        if checkpoint.directory.size(file) is None:
            yield CheckpointFault("missing_file", names, (file,), "the file is not there")
        else:
            message = "the index names this file for them, and the file lacks them"
            yield CheckpointFault("unplaced", names, (file,), message)


def _id_faults(checkpoint: Checkpoint) -> Iterator[CheckpointFault]:
    """Yield files that another save wrote, by the id that each begins with, and damaged places."""
    for damage in files_of_two_ranks(checkpoint.id_places):
        yield CheckpointFault("shared_bytes", (), (damage.fqn,), f"it {damage.headline}")
    for file, record in checkpoint.id_records.items():
        if checkpoint.directory.size(file) is None:
            continue
        if record.transforms:
            continue  # transforms are undone by extensions, which are not at hand here
        try:
            with checkpoint.directory.open(file) as stream:
                stream.seek(record.start)
                fault = id_fault(record, stream.read(min(record.length, ID_NBYTES)))
        except OSError:
            continue  # its other records cannot be read either, which is a fault of its own
        if fault is not None:
            yield CheckpointFault("mixed_generations", (), (file,), f"it {fault.headline}")


def files_without_id(checkpoint: Checkpoint) -> list[str]:
    """Return the files that have no id of the save that wrote them, sorted."""
    own = checkpoint.id_records
    return [file for file in checkpoint.files if file not in own and id_in_name(file) is None]


def file_faults(
    checkpoint: Checkpoint, file: str, records: Sequence[StoredRecord]
) -> Iterator[CheckpointFault]:
    """Yield that a file is missing or too short, and which of its records share bytes."""
    size = checkpoint.directory.size(file)
    if size is None:
        why = checkpoint.directory.why_barred(file) or "the file is not there"
        yield CheckpointFault("missing_file", fqns_of(records), (file,), why)
        return
    beyond = [record for record in records if record.end > size]
    if beyond:
        message = (
            f"{size} bytes, and {max(record.end for record in beyond)} are needed: "
            f"{len(beyond)} of {len(records)} records end beyond its end"
        )
        yield CheckpointFault("truncated_file", fqns_of(beyond), (file,), message)
    # Two keys may share one whole record; that they share a part of one is a fault.
    reached, end = records[0], records[0].end  # the record before that reaches farthest
    for record in records:
        # Parts of a rank's tensor may lie within each other, as columns do.
        if reached.start < record.start < end and checkpoint.format != TORCH_CHECKPOINTING:
            names = (record_name(checkpoint, one) for one in (reached, record))
            message = f"bytes {record.start}-{end} belong to {' and to '.join(names)}"
            yield CheckpointFault("shared_bytes", fqns_of([reached, record]), (file,), message)
        if record.end > end:
            reached, end = record, record.end


def fqns_of(records: Iterable[StoredRecord]) -> tuple[str, ...]:
    """Return the keys of what records hold, sorted."""
    return tuple(sorted({record.fqn for record in records}))
