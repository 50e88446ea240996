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
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Size
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
from dcp_placements.storage.metadata_file import Opener, read_metadata
from dcp_placements.storage.provenance import (
    REPLACED,
    RESERVED_KEY,
    merged_provenance,
    stored,
    stored_digest,
)
from dcp_placements.storage.remote import is_url
from dcp_placements.storage.save_ids import id_records

MAX_LISTED = 200
"""Directories beside a path that a message is derived from."""

_WAY_OUT = "the directory of a checkpoint, in which .metadata is"
_COMPLETE = "way out:     bring the files of all ranks together, or load an older checkpoint"
_ONE_MEANING = "way out:     save with rules, so that all ranks mean the same tensor by a key"
_DIGESTS = (
    "way out:     save with PlacementSavePlanner() and digests, and what a rank has for itself "
    "under a key of its own"
)
_CONFLICT = (
    'way out:     save with rules; on_conflict="warn" keeps the lowest rank\'s; or move the '
    "__<rank>.metadata of ranks away whose copies are not wanted"
)
_OLDER_RANKS = (
    "way out:     move __<rank>.metadata of ranks away that the last save did not have: those "
    "of an older save of more ranks stay"
)
_SAVES = (
    "way out:     load an older checkpoint, unless the last save is known to have ended on all "
    "ranks; save each step into a directory of its own"
)


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
    if "metadata.pkl" in names:
        lines.append("likely:      torch_checkpointing saved it: Placements.resharder() loads it")
        return NoCheckpoint("\n    ".join([*lines, "or:          dcp-placements import PATH OUT"]))
    return NoCheckpoint("\n    ".join([*lines, _way_out(folder)]))


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
        "    likely:      the file was damaged or cut short (a copy in part, a full disk), or is "
        "not from where it seems\n"
        f"    {_way_out(file.parent)}"
    )


def _way_out(folder: Path) -> str:
    """Return which complete checkpoint to load: one inside, or the newest one beside."""
    if inside := [name for _, name in _completed(folder)]:
        return f"way out:     one of the checkpoints inside: {format_names(sorted(inside), 4)}"
    if beside := [name for _, name in _completed(folder.parent) if name != folder.name]:
        return f"way out:     the newest complete one beside it: {beside[-1]}"
    return f"way out:     {_WAY_OUT}"


def _completed(folder: Path) -> list[tuple[int, str]]:
    """Return when the checkpoints in a directory were completed, and their names, oldest first."""
    with suppress(OSError):
        files = sorted(folder.glob("*/.metadata"))[-MAX_LISTED:]
        complete = [file for file in files if file.stat().st_size]
        return sorted((file.stat().st_mtime_ns, file.parent.name) for file in complete)
    return []


def merge_rank_metadata(
    parts: Sequence[tuple[int, Metadata]], *, whole: bool = False, absent: Sequence[int] = ()
) -> Metadata:
    """Return the metadata of the checkpoint whose ranks each wrote their own.

    Of a chunk that several ranks wrote the lowest rank's is kept. Their digests are compared. There
    is one warning of what is taken without proof: where there are no digests, where objects differ,
    and where parts may be of several saves.

    Args:
        parts: ``(rank, metadata)``, by rank.
        whole: Whether the chunks of every tensor have to cover it.
        absent: Ranks whose metadata are missing, of which there is a warning.

    Raises:
        PlacementError: Ranks contradict each other, chunks overlap, or (``whole``) leave holes;
            all of them in one error.
    """
    provenance = {rank: stored(part) or {} for rank, part in parts}
    data: dict[int, Mapping[MetadataIndex, StorageInfo]]
    data = {rank: part.storage_data for rank, part in parts}
    faults, notes = _of_several_saves(provenance)
    if absent:
        text = f"has no metadata of {format_ranks(absent)}: what no other rank stored is missing"
        notes.append(Fault("this checkpoint", text, (_COMPLETE,)))
    entries: dict[str, dict[int, Any]] = {}
    places: dict[MetadataIndex, StorageInfo] = {}
    for rank, part in parts:
        for one in id_records(data[rank])[0].values():
            places[MetadataIndex(one.fqn, one.offset)] = one.info()
        for fqn, entry in part.state_dict_metadata.items():
            entries.setdefault(fqn, {})[rank] = entry
    merged = {}
    for fqn, held in entries.items():
        first, entry = next(iter(held.items()))
        copies: dict[Box | None, list[int]] = {}
        for rank, other in held.items():
            if (kind := _kind(other)) != _kind(entry):
                text = f"rank {first} stored {_kind(entry)}, rank {rank} {kind}"
                faults.append(Fault(fqn, text, (_ONE_MEANING,)))
                continue
            for box in _boxes(other):
                if MetadataIndex(fqn, box and box.offsets) in data[rank]:
                    copies.setdefault(box, []).append(rank)
        # An empty chunk can stand where another rank's real one begins. Of a tensor without
        # elements one is kept.
        full = {box: ranks for box, ranks in copies.items() if box is None or box.numel}
        copies = full or dict(islice(copies.items(), 1))
        for box, ranks in copies.items():
            index = MetadataIndex(fqn, box and box.offsets)
            places.setdefault(index, data[ranks[0]][index])
            unlike, alike = _compared(index, box, entry, ranks, provenance)
            faults += unlike
            notes += alike
        merged[fqn] = entry
        if isinstance(entry, TensorStorageMetadata):
            firsts = {box: ranks[0] for box, ranks in copies.items() if box is not None}
            merged[fqn] = replace(
                entry, chunks=[ChunkStorageMetadata(*map(Size, box)) for box in firsts]
            )
            faults += _tiling_faults(fqn, tuple(entry.size), firsts, list(data) if whole else ())
    raise_faults("the ranks' metadata do not make a checkpoint", faults)
    if notes:
        warnings.warn(format_faults("look at this checkpoint", notes, "note"), stacklevel=3)
    lowest = parts[0][1]
    return Metadata(
        merged,
        planner_data=_merged_data([part for _, part in parts], merged),
        storage_data=places,
        storage_meta=lowest.storage_meta,
        version=lowest.version,
    )


def saves_before(opener: Opener) -> int:
    """Return how many saves of a rank, made alone, metadata that it is going to replace end.

    Args:
        opener: Opens the older metadata of this rank; nothing in them is executed.
    """
    with suppress(Exception):  # of any type, by what is in the file
        return int((stored(read_metadata(opener, restricted=True)) or {}).get(REPLACED, 0)) + 1
    return 1


def _kind(entry: Any) -> str:
    if isinstance(entry, BytesStorageMetadata):
        return "an object"
    return f"a {tuple(entry.size)} {entry.properties.dtype} tensor"


def _boxes(entry: Any) -> list[Box | None]:
    """Return the boxes of a tensor's chunks; of an object, None."""
    if isinstance(entry, BytesStorageMetadata):
        return [None]
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]


def _compared(
    index: MetadataIndex,
    box: Box | None,
    entry: Any,
    ranks: Sequence[int],
    provenance: Mapping[int, Mapping[str, Any]],
) -> tuple[list[Fault], list[Fault]]:
    """Return faults and notes of a chunk, or an object (no box), that several ranks stored."""
    if len(ranks) == 1 or (box is not None and not box.numel):
        return [], []
    faults, notes, first = [], [], ranks[0]
    digests = [stored_digest(provenance[rank], index.fqn, index.offset) or b"" for rank in ranks]
    others = list(zip(ranks, digests, strict=True))[1:]
    lacking = [rank for rank, one in others if not one or len(one) != len(digests[0])]
    unlike = [rank for rank, one in others if rank not in lacking and one != digests[0]]
    if lacking:
        text = f"stored by {format_ranks([first, *lacking])} and not compared; "
        notes.append(Fault(index.fqn, f"{text}rank {first}'s is kept", (_DIGESTS,)))
    options = [provenance[rank].get("options", {}) for rank in (first, *unlike)]
    if unlike and (box is None or any(one.get("on_conflict") == "warn" for one in options)):
        text = f"{format_ranks([first, *unlike])} stored different contents; "
        notes.append(Fault(index.fqn, f"{text}rank {first}'s are kept", (_DIGESTS,)))
    elif unlike and box is not None:
        text = f"ranks {first} and {unlike[0]} stored different contents as "
        text += format_boxes([box], entry.size)
        faults.append(Fault(index.fqn, text, (_CONFLICT,)))
    return faults, notes


def _tiling_faults(
    fqn: str, shape: tuple[int, ...], holders: Mapping[Box, int], present: Sequence[int]
) -> Iterator[Fault]:
    """Yield a fault of a tensor whose chunks overlap, or leave a hole where ranks are ``present``.

    Args:
        fqn: Its key.
        shape: Its shape.
        holders: The rank whose chunk is kept, by box.
        present: The ranks that should have stored all of it.
    """
    array = as_array(holders, len(shape))
    if tile(Box.whole(shape), array):
        return
    if pairs := overlaps(array, limit=1):
        one, other = as_boxes(array[list(pairs[0])])
        text = f"rank {holders[one]} stored {format_box(one, shape)} of {shape}, rank "
        text += f"{holders[other]} {format_box(other, shape)}, which overlaps it"
        yield Fault(fqn, text, (_OLDER_RANKS,))
    elif present and (holes := uncovered(Box.whole(shape), array)):
        text = f"no rank stored {format_boxes(holes, shape)}; there are the metadata of "
        yield Fault(fqn, text + format_ranks(present), (_COMPLETE,))


def _of_several_saves(
    provenance: Mapping[int, Mapping[str, Any]],
) -> tuple[list[Fault], list[Fault]]:
    """Return the fault, or the note, of parts that are, or may be, of several saves.

    Ranks that save alone share no id. Parts of one save have one step, and each rank has saved here
    as often as the others: one that was stopped in the last save has saved here once less.
    """
    saves: dict[tuple[Any, int], list[int]] = {}
    for rank, of in provenance.items():
        if of:
            saves.setdefault((of.get("step"), int(of.get(REPLACED, 0))), []).append(rank)
    if len(saves) < 2:
        return [], []
    listed = "; ".join(
        f"{'no step' if step is None else f'step {step}'} by {format_ranks(ranks)}, in "
        f"{format_count(times + 1, 'save')} here"
        for (step, times), ranks in saves.items()
    )
    are = len({step for step, _ in saves} - {None}) > 1
    text = f"its parts {'are' if are else 'may be'} of several saves: {listed}"
    fault = Fault("this checkpoint", text, (_SAVES,))
    return ([fault], []) if are else ([], [fault])


def _merged_data(parts: Sequence[Metadata], keys: Collection[str]) -> Any:
    """Return the planners' data of all ranks in one; where they differ, the lowest rank's."""
    data = [part.planner_data for part in parts if isinstance(part.planner_data, Mapping)]
    if not data:
        return parts[0].planner_data
    merged = {key: value for one in reversed(data) for key, value in one.items()}
    if RESERVED_KEY in merged:
        merged[RESERVED_KEY] = merged_provenance(parts, keys)
    return merged
