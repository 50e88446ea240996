"""The metadata of a checkpoint in which every rank wrote its own.

``dcp.save(..., use_collectives=False)`` writes no ``.metadata`` but one ``__<rank>.metadata`` per
rank, with that rank's chunks only. Merged, they are the metadata of the whole checkpoint.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements._torch import StorageInfo
from dcp_placements.errors import (
    Fault,
    NoCheckpoint,
    PlacementError,
    format_count,
    format_error,
    format_faults,
    format_names,
    format_ranks,
    raise_faults,
)
from dcp_placements.layout.boxes import (
    as_array,
    as_boxes,
    format_box,
    format_boxes,
    overlaps,
    tile,
    uncovered,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.storage.index.blocks import Opener
from dcp_placements.storage.index.storage_table import StorageTable
from dcp_placements.storage.metadata.file import read_metadata
from dcp_placements.storage.metadata.record import (
    REPLACED,
    RESERVED_KEY,
    merged_provenance,
    merged_record,
    stored,
    stored_digest,
)
from dcp_placements.storage.metadata.save_ids import id_records
from dcp_placements.storage.metadata.table import place_of, rows_of_places
from dcp_placements.storage.remote import is_url

MAX_LISTED = 200
"""Directories beside a path that a message is derived from."""

_WAY_OUT = "the directory of a checkpoint, in which .metadata is"


def no_checkpoint(path: str | os.PathLike[str]) -> NoCheckpoint:
    """Return the error of a load from a path without ``.metadata``, or ranks' own metadata.

    Args:
        path: Of a local file system, or a URL, at which nothing more is read for the message.
    """
    folder = Path(path)
    if is_url(str(path)):
        return NoCheckpoint(f"{path}: there is no .metadata\n    way out:     {_WAY_OUT}")
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = format_names(names, 4) or "an empty directory"
    if not folder.is_dir():
        found = "a file, and no directory" if folder.exists() else "no such directory"
    lines = [f"{path}: no complete checkpoint, as there is no .metadata", f"found:       {found}"]
    if any(name.startswith(".metadata.") or name.endswith(".distcp") for name in names):
        lines.append("likely:      a save that was cut off, as .metadata comes last")
    return NoCheckpoint("\n    ".join([*lines, _way_out(folder, names)]))


def unreadable(path: str | os.PathLike[str], error: Exception) -> PlacementError:
    """Return the error of a load from metadata that cannot be read.

    Args:
        path: Of the file.
        error: What reading it raised.
    """
    file, nbytes = Path(path), ""
    if file.is_file():
        nbytes = f", in {format_count(file.stat().st_size, 'byte')}"
    return PlacementError(
        f"{path}: this is no metadata of DCP's that can be read\n"
        f"    found:       {type(error).__name__}: {format_error(error)}{nbytes}\n"
        "    likely:      the file was damaged or cut short: a copy in part, a full disk\n"
        f"    {_way_out(file.parent, [])}"
    )


def _way_out(folder: Path, names: Sequence[str]) -> str:
    """Return which complete checkpoint to load: one inside, or the newest one beside."""
    inside = [name for name in names[:MAX_LISTED] if _completed(folder / name)]
    if inside:
        return f"way out:     one of the checkpoints inside: {format_names(inside, 4)}"
    beside = sorted(os.listdir(folder.parent))[-MAX_LISTED:] if folder.parent.is_dir() else []
    complete = {at: name for name in beside if (at := _completed(folder.parent / name))}
    complete = {at: name for at, name in complete.items() if name != folder.name}
    if complete:
        return f"way out:     the newest complete one beside it: {complete[max(complete)]}"
    return f"way out:     {_WAY_OUT}"


def _completed(folder: Path) -> int:
    """Return when a checkpoint was completed, in ns; 0 for what is none."""
    try:
        metadata = (folder / ".metadata").stat()
    except OSError:
        return 0
    return metadata.st_mtime_ns if metadata.st_size else 0


def merge_rank_metadata(
    parts: Sequence[tuple[int, Metadata]], *, whole: bool = False, absent: Sequence[int] = ()
) -> Metadata:
    """Return the metadata of the checkpoint whose ranks each wrote their own.

    Of a chunk that several ranks wrote the lowest rank's is kept. Their digests are compared; where
    there are none to compare, and where objects differ, there is one warning.

    Args:
        parts: ``(rank, metadata)``, by rank.
        whole: Whether the chunks of every tensor have to cover it.
        absent: Ranks whose metadata are missing, of which there is a warning.

    Raises:
        PlacementError: Ranks contradict each other, chunks overlap, or (``whole``) leave holes;
            all of them in one error.
    """
    merger = _Merger()
    for rank, metadata in parts:
        merger.add(rank, metadata)
    ranks = [rank for rank, _ in parts]
    merger.settle(ranks, whole=whole, absent=absent)
    first = parts[0][1]
    return Metadata(
        merger.stored,
        planner_data=_merged_data([metadata for _, metadata in parts], merger.stored),
        storage_data=StorageTable(
            rows_of_places(place_of(at.fqn, at.offset, info) for at, info in merger.places.items())
        ),
        storage_meta=first.storage_meta,
        version=first.version,
    )


def saves_before(opener: Opener) -> int:
    """Return how many saves of a rank, made alone, metadata that it is going to replace end.

    Args:
        opener: Opens the older metadata of this rank; nothing in them is executed.
    """
    with suppress(Exception):  # of any type, by what is in the file
        return int((stored(read_metadata(opener, restricted=True)) or {}).get(REPLACED, 0)) + 1
    return 1


class _Merger:
    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}
        self.places: dict[MetadataIndex, StorageInfo] = {}
        self.faults: list[Fault] = []
        self._first: dict[str, int] = {}
        self._boxes: dict[str, dict[Box, int]] = {}
        self._provenance: dict[int, Mapping[str, Any]] = {}
        self._unlike: dict[str, list[tuple[Box, int, int]]] = {}
        self._kept: dict[str, set[int]] = {}
        self._uncompared: dict[str, set[int]] = {}
        self._objects: dict[str, int] = {}

    def add(self, rank: int, metadata: Metadata) -> None:
        """Add the metadata of one rank."""
        data: Mapping[MetadataIndex, StorageInfo] = metadata.storage_data
        self._provenance[rank] = stored(metadata) or {}
        for record in id_records(data).values():
            self.places[record.index] = data[record.index]
        for fqn, entry in metadata.state_dict_metadata.items():
            if fqn not in self.stored:
                self._first[fqn] = rank
                self.stored[fqn] = entry
                if isinstance(entry, TensorStorageMetadata):
                    self.stored[fqn] = replace(entry, chunks=[])
            elif not _agree(self.stored[fqn], entry):
                self._contradiction(fqn, rank, entry)
                continue
            if isinstance(entry, TensorStorageMetadata):
                self._add_chunks(fqn, rank, entry, data)
            elif (index := MetadataIndex(fqn)) in data:
                if index in self.places:
                    self._compare(index, None, self._objects[fqn], rank)
                else:
                    self._objects[fqn] = rank
                    self.places[index] = data[index]

    def _add_chunks(
        self,
        fqn: str,
        rank: int,
        tensor: TensorStorageMetadata,
        data: Mapping[MetadataIndex, StorageInfo],
    ) -> None:
        boxes = self._boxes.setdefault(fqn, {})
        for chunk in tensor.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            # An empty chunk can stand where another rank's real one begins. Of a tensor without
            # elements one is kept.
            empty = not box.numel and (tensor.size.numel() or boxes)
            index = MetadataIndex(fqn, chunk.offsets)
            if box.numel and box in boxes and index in data:
                self._compare(index, box, boxes[box], rank)
            if empty or box in boxes or index not in data:
                continue
            boxes[box] = rank
            if index not in self.places:
                self.places[index] = data[index]
                self.stored[fqn].chunks.append(ChunkStorageMetadata(chunk.offsets, chunk.sizes))

    def _compare(self, index: MetadataIndex, box: Box | None, first: int, other: int) -> None:
        """Compare the digests of what two ranks wrote of one chunk, or (no box) of one object."""
        provenance = [self._provenance[rank] for rank in (first, other)]
        one, two = [stored_digest(of, index.fqn, index.offset) for of in provenance]
        if one is None or two is None or len(one) != len(two):
            self._uncompared.setdefault(index.fqn, {first}).add(other)
        elif one == two:
            return
        elif box is None or any(
            of.get("options", {}).get("on_conflict") == "warn" for of in provenance
        ):
            self._kept.setdefault(index.fqn, {first}).add(other)
        else:
            self._unlike.setdefault(index.fqn, []).append((box, first, other))

    def settle(self, ranks: Sequence[int], *, whole: bool, absent: Sequence[int]) -> None:
        """Check that the parts make a checkpoint.

        Raises:
            PlacementError: They do not; all faults in one error.
        """
        for fqn, boxes in self._boxes.items():
            extent = tuple(self.stored[fqn].size)
            array = as_array(boxes, len(extent))
            if tile(Box.whole(extent), array):
                continue
            pairs = overlaps(array, limit=1)
            holes = uncovered(Box.whole(extent), array)
            if pairs:
                self._overlap(fqn, extent, *as_boxes(array[list(pairs[0])]))
            elif whole and holes:
                self._hole(fqn, extent, holes, ranks)
        for fqn, unlike in self._unlike.items():
            self._conflict(fqn, unlike)
        self._check_steps()
        raise_faults("the ranks' metadata do not make a checkpoint", self.faults)
        notes = [*self._notes(absent)]
        if notes:
            warnings.warn(format_faults("look at this checkpoint", notes, "note"), stacklevel=4)

    def _notes(self, absent: Sequence[int]) -> Iterator[Fault]:
        """Yield what is taken without proof: parts of one save, the lowest rank's contents."""
        if absent:
            yield Fault(
                "this checkpoint",
                f"has no metadata of {format_ranks(absent)}: what no other rank stored is missing",
                (
                    "likely:      it was killed before its save ended, or files were not copied",
                    "way out:     bring __<rank>.metadata of all ranks into one directory, or load "
                    "an older checkpoint",
                ),
            )
        without = [rank for rank, of in self._provenance.items() if of and "step" not in of]
        before: dict[int, list[int]] = {}
        for rank, of in self._provenance.items():
            before.setdefault(int(of.get(REPLACED, 0)), []).append(rank)
        if len(before) > 1 or 0 < len(without) < len(self._provenance):
            parts = [f"{format_ranks(without)} stored no step"] if without else []
            if len(before) > 1:
                parts += [
                    f"{format_ranks(ranks)} saved here {format_count(times + 1, 'time')}"
                    for times, ranks in sorted(before.items())
                ]
            yield Fault(
                "this checkpoint",
                f"may be of several saves: {', '.join(parts)}",
                (
                    "reason:      where the last save was cut off, a part of the one before it is "
                    "still there, and is taken for a part of this checkpoint",
                    "way out:     load an older checkpoint, unless the last save is known to have "
                    "ended on all ranks; save into a directory of its own, with "
                    "PlacementSavePlanner(step=...)",
                ),
            )
        for fqn, ranks in self._kept.items():
            yield Fault(
                fqn,
                f"{format_ranks(ranks)} stored different contents; rank {min(ranks)}'s are kept",
                ("way out:     give what each rank needs for itself a key of its own",),
            )
        for fqn, ranks in self._uncompared.items():
            yield Fault(
                fqn,
                f"stored by {format_ranks(ranks)} and not compared; rank {min(ranks)}'s is kept",
                (
                    'because:     a rank stored no such digest of it: digests="off", or another '
                    "value than the others; another planner; or contents that cannot be read",
                    "way out:     save with PlacementSavePlanner(); where each rank has contents "
                    "of its own, with rules, or a key for each",
                ),
            )

    def _conflict(self, fqn: str, unlike: Sequence[tuple[Box, int, int]]) -> None:
        box, first, other = unlike[0]
        extent = tuple(self.stored[fqn].size)
        more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
        self.faults.append(
            Fault(
                fqn,
                f"ranks {first} and {other} stored different contents as {format_box(box, extent)} "
                f"of {extent}{more}",
                (
                    "likely:      it needs a rule that says how it is sharded; or replicas that "
                    "have drifted apart",
                    'way out:     save with rules; on_conflict="warn" keeps the lowest rank\'s; '
                    "of files that are there, move the __<rank>.metadata of ranks away whose "
                    "copies are not wanted",
                ),
            )
        )

    def _check_steps(self) -> None:
        steps: dict[Any, list[int]] = {}
        for rank, provenance in self._provenance.items():
            if provenance.get("step") is not None:
                steps.setdefault(provenance["step"], []).append(rank)
        if len(steps) > 1:
            parts = "; ".join(f"step {step} by {format_ranks(r)}" for step, r in steps.items())
            self.faults.append(
                Fault(
                    "this checkpoint",
                    f"its parts are of several saves: {parts}",
                    (
                        "likely:      a later save into the same directory was cut off",
                        "way out:     load an older checkpoint; this one is not sound",
                    ),
                )
            )

    def _contradiction(self, fqn: str, rank: int, entry: Any) -> None:
        self.faults.append(
            Fault(
                fqn,
                f"rank {self._first[fqn]} stored {_described(self.stored[fqn])}, rank {rank} "
                f"{_described(entry)}",
                ("way out:     save with rules, so that all ranks mean the same tensor by a key",),
            )
        )

    def _overlap(self, fqn: str, shape: tuple[int, ...], one: Box, other: Box) -> None:
        boxes = self._boxes[fqn]
        self.faults.append(
            Fault(
                fqn,
                f"rank {boxes[one]} stored {format_box(one, shape)} of {shape}, rank "
                f"{boxes[other]} {format_box(other, shape)}, which overlaps it",
                (
                    "likely:      an older save of more ranks into the same directory left its "
                    "__<rank>.metadata files behind",
                    "way out:     move the files of ranks that the last save did not have away",
                ),
            )
        )

    def _hole(
        self, fqn: str, shape: tuple[int, ...], holes: Sequence[Box], ranks: Sequence[int]
    ) -> None:
        self.faults.append(
            Fault(
                fqn,
                f"no rank stored {format_boxes(holes, shape)}",
                (
                    f"there are:   the metadata of {format_ranks(ranks)}",
                    "likely:      a rank's __<rank>.metadata is missing, because it failed or "
                    "wrote to another disk",
                    "way out:     bring the files of all ranks into one directory",
                ),
            )
        )


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, TensorStorageMetadata) and isinstance(other, TensorStorageMetadata):
        return one.size == other.size and one.properties.dtype == other.properties.dtype
    return type(one) is type(other)


def _described(stored: Any) -> str:
    if isinstance(stored, BytesStorageMetadata):
        return "an object"
    return f"a {tuple(stored.size)} {stored.properties.dtype} tensor"


def _merged_data(parts: Sequence[Metadata], keys: Collection[str]) -> Any:
    """Return the planners' data of all ranks in one; where they differ, the lowest rank's."""
    data = [part.planner_data for part in parts if isinstance(part.planner_data, Mapping)]
    if not data:
        return parts[0].planner_data
    merged = {key: value for one in reversed(data) for key, value in one.items()}
    own = [one[RESERVED_KEY] for one in data if RESERVED_KEY in one]
    if own:
        merged[RESERVED_KEY] = merged_provenance(own) | merged_record(parts, keys)
    return merged
