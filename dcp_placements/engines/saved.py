"""The items that an engine saved, as a checkpoint: its keys, who has which boxes, and the proof.

What ranks say of their paths is brought into the tables of a save, and proved as a save is: boxes
that make the whole, equal boxes with equal contents, one shape and dtype. Of a checkpoint that was
saved without this package, the files say what is in them, and the placements of its world where.

``metadata.pkl`` of the engine, version 2.0, in plain values::

    {"metadata": {"model": {
         "nested_path_to_metadata": {'["experts.w"]': [
             {"sharding_metadata": {"type": ..., "data": {...}}, "ranks": (0, 1)}]},
         "rank_to_layout_info": {0: None, 1: None}}},
     "world_size": 2, "version": "2.0"}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing
from math import prod
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint import Metadata

from dcp_placements._torch import rehearsed
from dcp_placements.engines.described import PartOfPath, RankParts, rank_parts
from dcp_placements.errors import (
    CannotPlace,
    Fault,
    PlacementError,
    fault_error,
    raise_faults,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.names.flat import Path
from dcp_placements.names.numbers import Family, Numbering
from dcp_placements.names.renames import Step
from dcp_placements.save.coordinator import Coordinator, LocalPlan
from dcp_placements.save.messages import copies_fault
from dcp_placements.short_text import format_error, format_names
from dcp_placements.storage.file_reads import ByteRange
from dcp_placements.storage.index import index_of_locations
from dcp_placements.storage.metadata_file import with_columns
from dcp_placements.storage.provenance import (
    DOUBTS,
    RESERVED_KEY,
    numberings_of_plain,
    rename_of_plain,
)
from dcp_placements.storage.safe_pickle import (
    SafeUnpickler,
    Stub,
    check_unfolded,
    most_elements,
)
from dcp_placements.storage.saved_dtensor import check_rank, rank_shard
from dcp_placements.storage.saved_file import Records, SavedChunk, SavedFile
from dcp_placements.storage.tensor_record import TensorRecord
from dcp_placements.storage.torch_metadata import StoredLocation, build_entries
from dcp_placements.table.digests import (
    DIGEST_NBYTES,
    digest_of_bytes,
    may_have_replicas,
    sampled_digests,
)
from dcp_placements.table.statement import Statement
from dcp_placements.table.table import OBJECT, Held, as_holding

METADATA_FILE = "metadata.pkl"
VERSION = 1
"""Of the plain values of this package."""
OURS = "dcp_placements"
"""The type, in the engine's metadata, of what this package says of a path."""

_ENGINES = "DTensorShardingMetadata"
_ENGINE_VERSION = "2.0"
_SERIALIZATION = "TorchSerialization"

_NO_SOURCE = (
    "\n    note:        it was saved by the engine's own resharder: what DTensors do not say, "
    "source= and axes= of that world do (--rules and --mesh of import, export)"
)

_BY_SOURCE = "\n    note:        its ranks are placed by the rules and the rename of source="

_BY_FILES = (
    "\n    note:        if the save declared it wrongly: the files have every rank's bytes, and "
    "import --files '{}_{{rank}}.pt' with --rules and --mesh reads them as it should have been"
)

_FLAT = "likely:      two keys are one text when they are joined by dots"

_FIRST_SAVE = (
    "likely:      it was made after the first save of its manager, which describes its items once; "
    "or the file is of another save",
    "way out:     a new manager when tensors are new; this one is read by import --files",
)

_TWO_ITEMS = (
    "likely:      the name of one item is the beginning of a key of the other",
    "way out:     read the items one by one; name them otherwise in the next save",
)

Open = Callable[[str], IO[bytes]]
"""Opens a file of the checkpoint."""

PlacesOfItems = dict[tuple[str, tuple[int, ...] | None], list[tuple[str, SavedChunk]]]
"""By key and offsets, which an object has not: the files of ranks that have it, and where there."""

Lies = dict[tuple[str, SavedChunk], tuple[int, int, TensorRecord]]
"""By file and chunk of a tensor, what ``SavedFile.record`` returns."""


class Described(NamedTuple):
    """What this package's metadata say of a rank's file.

    Attributes:
        item_key: Of its item.
        rank: That wrote it.
        paths: Of all that they describe, as text.
    """

    item_key: str
    rank: int
    paths: Container[tuple[str, ...]]

    def check(self, file: SavedFile) -> None:
        """Refuse the file if it has tensors that they do not describe, or DTensors of another rank.

        Raises:
            PlacementError: It has.
        """
        faults: list[Fault] = []

        def value(own: Path, tensor: TensorRecord, dtensor: Stub | None) -> None:
            key = _key(self.item_key, own)
            if tuple(map(str, own)) not in self.paths and 0 not in tensor.shape:
                headline = f"is in {file.name}, and not in {METADATA_FILE}"
                faults.append(Fault(key, headline, _FIRST_SAVE))
            try:
                if dtensor is not None:
                    check_rank(dtensor, self.rank)
            except CannotPlace as error:
                faults.append(error.fault(key))

        file.state(value)
        raise_faults("the checkpoint is not what it says", faults)


class SavedItems(NamedTuple):
    """Items as a checkpoint.

    Attributes:
        metadata: Of DCP's, without places.
        places: The places.
        left_out: The keys that are left out.
        described: By file, what this package's metadata say of it.
        lies: How the chunks lie, for the offline tools.
    """

    metadata: Metadata
    places: PlacesOfItems
    left_out: list[str]
    described: dict[str, Described]
    lies: Lies


class EngineUnpickler(SafeUnpickler):
    """Reads ``metadata.pkl``, which has plain values alone."""

    subject = "the metadata of torch_checkpointing"


def saved_items(
    path: str,
    items: Mapping[str, Mapping[str, Any]],
    open_file: Open,
    *,
    source: Any = None,
    rank: int | None = None,
    waive: Mapping[str, str] | None = None,
    strict: bool = True,
) -> SavedItems:
    """Return items as a checkpoint.

    Args:
        path: Of the checkpoint, for messages.
        items: By item, its part of the engine's metadata.
        open_file: Opens a file of it.
        source: The world that saved it, a ``DeclaredWorld``, where it was saved without this
            package; None: what its DTensors say is all.
        rank: That loads: its own copies are the places, then those of low ranks. None: the
            places are all copies, and the keys of objects are left out.
        waive: Patterns of keys whose numbers need not be complete.
        strict: Whether equal boxes with different contents are refused.

    Raises:
        PlacementError: The ranks' parts do not make a checkpoint, or metadata cannot be used.
    """
    ranks: dict[int, dict[str, RankParts]] = {}
    files: dict[str, dict[int, str]] = {}
    described: dict[str, Described] = {}
    lies: Lies | None = {} if rank is None else None
    note = ""
    try:
        for item_key, item in items.items():
            layouts = {int(one): layout for one, layout in item["rank_to_layout_info"].items()}
            own = {one: _file_of(path, item_key, one, layouts[one]) for one in sorted(layouts)}
            if _is_ours(path, item_key, item):
                note = _BY_FILES.format(item_key)
                found = _described(item)
                described |= {
                    own[one]: Described(item_key, one, {tuple(map(str, at)) for at in parts.paths})
                    for one, parts in found.items()
                }
                if lies is not None:
                    found = _compared(found, own, described, open_file, lies)
            else:
                found = _from_files(path, item_key, item, own, open_file, source, lies)
                note = _NO_SOURCE if source is None else _BY_SOURCE
            files[item_key] = own
            for one in own:
                ranks.setdefault(one, {})[item_key] = found.get(one, RankParts())
        left_out: dict[str, None] = {}
        for parts in {one: None for by_item in ranks.values() for one in by_item.values()}:
            if rank is None:
                left_out |= {one.fqn: None for one in parts.all if one.group.kind == OBJECT}
            for at, of_path in parts.paths.items():
                parts.paths[at] = [one for one in of_path if one.fqn not in left_out]
        of_ranks = [tuple(by_item.values()) for by_item in ranks.values()]
        metadata = _proved(path, of_ranks, waive, strict, note)
    except (PlacementError, OSError, Warning):
        raise
    except Exception as error:  # of any type, by what is in the metadata
        headline = f"its metadata are broken: {format_error(error)}"
        likely = "likely:      the file was damaged or cut short"
        raise _refused(path, METADATA_FILE, headline, likely) from error
    places: PlacesOfItems = {}
    done: set[RankParts] = set()
    for one in sorted(ranks, key=lambda other: (other != rank, other)):
        for item_key, parts in ranks[one].items():
            if parts in done and rank is not None:
                continue
            done.add(parts)
            file = files[item_key][one]
            for part in parts.all:
                for box, chunk in zip(part.boxes, part.chunks, strict=True):
                    offsets = None if part.group.kind == OBJECT else box.offsets
                    places.setdefault((part.fqn, offsets), []).append((file, chunk))
    return SavedItems(metadata, places, list(left_out), described, lies or {})


def engine_items(stream: IO[bytes]) -> dict[str, dict[str, Any]]:
    """Return what ``metadata.pkl`` has of each item; nothing of it is executed.

    Raises:
        pickle.UnpicklingError: It is refused.
        PlacementError: It is of another version.
    """
    data = stream.read()
    stored = EngineUnpickler(data).load()
    check_unfolded([stored], most_elements(data))
    if stored["version"] != _ENGINE_VERSION:
        headline = f"is of version {stored['version']}, where {_ENGINE_VERSION} is read"
        raise _refused(
            METADATA_FILE, "version", headline, "way out:     load it, and save it again"
        )
    items: dict[str, dict[str, Any]] = stored["metadata"]
    return items


def read_engine(
    path: str, items: Mapping[str, Mapping[str, Any]], open_file: Open, source: Any = None
) -> tuple[Metadata, Records, list[str]]:
    """Return the tensors of all items, with the places of all their copies, for the offline tools.

    The keys of objects, which it leaves in the files, are third.

    Args:
        path: Of the checkpoint.
        items: As of ``saved_items``.
        open_file: Opens a file of it.
        source: As of ``saved_items``.

    Raises:
        PlacementError: As ``saved_items``; or a file is damaged.
    """
    metadata, places, left_out, _, lies = saved_items(path, items, open_file, source=source)
    # The level of an item, which an export leaves out of its names.
    metadata.planner_data |= {
        fqn: (item_key, fqn.removeprefix(f"{item_key}."))
        for fqn, _ in places
        for item_key in items
        if fqn.startswith(f"{item_key}.")
    }
    rows, records = [], {}
    for (fqn, at), copies in places.items():
        offsets = at or ()
        for name, chunk in copies:
            start, nbytes, records[fqn, name, offsets] = lies[name, chunk]
            rows.append(StoredLocation(fqn, offsets, name, start, nbytes))
    entries = build_entries(metadata.state_dict_metadata)
    metadata = with_columns(metadata, index_of_locations(rows, entries, copies=True))
    return metadata, records, left_out


def _refused(path: str, name: str, headline: str, *details: str) -> PlacementError:
    return fault_error(f"{path} cannot be read", name, headline, *details)


def _file_of(path: str, item_key: str, rank: int, layout: Mapping[str, Any] | None) -> str:
    if layout is None:
        return f"{item_key}_{rank}.pt"
    kind = layout["serialization_format"]["type"]
    if kind != _SERIALIZATION:
        headline = f"is saved by {kind}, and {_SERIALIZATION} is read"
        raise _refused(path, item_key, headline, "way out:     ItemSpec(layout=None) for this item")
    return str(layout["file_path"])


def _groups(item: Mapping[str, Any]) -> Iterator[tuple[Path, str, Any, Sequence[int]]]:
    """Yield path, type, values and ranks of what an item's metadata say, in order of paths."""
    for text, groups in sorted(item["nested_path_to_metadata"].items()):
        for group in groups:
            typed = group["sharding_metadata"]
            yield tuple(json.loads(text)), typed["type"], typed["data"], group["ranks"]


def _is_ours(path: str, item_key: str, item: Mapping[str, Any]) -> bool:
    """Whether this package described an item.

    Raises:
        PlacementError: A newer version did, or another resharder than the engine's.
    """
    kinds = {kind for _, kind, _, _ in _groups(item)}
    ours = [values for _, kind, values, _ in _groups(item) if kind == OURS]
    newest = max([values["version"] for values in ours], default=VERSION)
    if newest > VERSION:
        headline = f"its metadata are of version {newest}, and this release reads {VERSION}"
        raise _refused(path, item_key, headline, "way out:     a newer dcp-placements")
    if kinds != {OURS} and not kinds <= {_ENGINES}:
        headline = f"is described by {format_names(sorted(kinds))}, where {OURS} or {_ENGINES} is"
        raise _refused(
            path, item_key, f"{headline} read", "way out:     the resharder that saved it"
        )
    return bool(ours)


def _described(item: Mapping[str, Any]) -> dict[int, RankParts]:
    """Return what this package said of the paths of an item; ranks that said the same share it."""
    groups = list(_groups(item))
    said: dict[int, list[int]] = {}
    for number, (_, _, _, of_ranks) in enumerate(groups):
        for rank in of_ranks:
            said.setdefault(int(rank), []).append(number)
    made: dict[tuple[int, ...], RankParts] = {}
    for numbers in dict.fromkeys(map(tuple, said.values())):
        made[numbers] = parts = RankParts()
        for own, _, values, _ in [groups[number] for number in numbers]:
            parts.paths[own] = [
                PartOfPath.of_plain(own, part, digests)
                for part, digests in zip(values["parts"], values["digests"], strict=True)
            ]
            parts.renames = tuple([rename_of_plain(*step) for step in values["renames"]])
            parts.numberings = numberings_of_plain(values["numbers"])
    return {rank: made[tuple(numbers)] for rank, numbers in said.items()}


def _compared(
    said: Mapping[int, RankParts],
    files: Mapping[int, str],
    described: Mapping[str, Described],
    open_file: Open,
    lies: Lies,
) -> dict[int, RankParts]:
    """Return what this package said, with digests of what is in the files.

    The engine's metadata have those of the first save of a manager.
    """
    crcs: dict[tuple[int, Path], int | None] = {}
    found: dict[int, RankParts] = {}
    for rank, parts in said.items():
        with closing(opened(files[rank], open_file, rank)) as file:
            described[files[rank]].check(file)
            crcs |= {(rank, own): file.crc(own) for own in parts.paths}
            lies |= _lies_in(file, parts)
        found[rank] = RankParts(dict(parts.paths), parts.renames, parts.numberings)
    _add_digests(found, crcs, files, open_file)
    return found


def _from_files(
    path: str,
    item_key: str,
    item: Mapping[str, Any],
    files: Mapping[int, str],
    open_file: Open,
    source: Any,
    lies: Lies | None,
) -> dict[int, RankParts]:
    """Return what is in the files of an item, placed as the placements of its world say."""
    if source is not None and source.size != len(files):
        headline = f"was saved by {len(files)} ranks, and axes= is a mesh of {source.size}"
        way_out = f"way out:     the mesh that saved it; axes= is {dict(source.axes)}"
        raise _refused(path, item_key, headline, way_out)
    crcs: dict[tuple[int, Path], int | None] = {}
    found: dict[int, RankParts] = {}
    for rank, name in files.items():
        with closing(opened(name, open_file, rank)) as file, rehearsed(rank, len(files)):
            state, outside, faults = _state_of(file, item_key, rank)
            declared = None if source is None else source.placements(rank)
            rules, rename = declared and declared.rules, declared and declared.rename
            try:
                parts = rank_parts(item_key, state, rules, rename, has_contents=False)
            except (ValueError, RecursionError) as error:
                headline = f"the keys of rank {rank} cannot be flattened: {format_error(error)}"
                raise _refused(path, name, headline, _FLAT) from error
            raise_faults(f"{path}: what rank {rank} saved cannot be placed", faults or parts.faults)
            for own in outside:
                del parts.paths[own]
            crcs |= {(rank, own): file.crc(own) for own in parts.paths}
            if lies is not None:
                lies |= _lies_in(file, parts)
            found[rank] = parts
    _add_digests(found, crcs, files, open_file)
    return found


def _lies_in(file: SavedFile, parts: RankParts) -> Lies:
    """Return how the chunks of a rank's tensors lie in its file."""
    return {
        (file.name, chunk): file.record(part.fqn, chunk)
        for part in parts.all
        for chunk in part.chunks
        if chunk.dtype is not None
    }


def _state_of(file: SavedFile, item_key: str, rank: int) -> tuple[Any, list[Path], list[Fault]]:
    """Return what a rank saved, with ``meta`` tensors; what is on meshes of others; faults."""
    outside: list[Path] = []
    faults: list[Fault] = []

    def value(own: Path, tensor: TensorRecord, dtensor: Stub | None) -> Any:
        local = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if dtensor is None:
            return local
        try:
            shard = rank_shard(local, dtensor, rank)
        except CannotPlace as error:
            faults.append(error.fault(_key(item_key, own)))
            return local
        if shard is None:
            outside.append(own)
        return shard

    return file.state(value), outside, faults


def _key(item_key: str, path: Path) -> str:
    return ".".join(map(str, (item_key, *path)))


def _add_digests(
    found: Mapping[int, RankParts],
    crcs: Mapping[tuple[int, Path], int | None],
    files: Mapping[int, str],
    open_file: Open,
) -> None:
    """Give a digest to each box of which there are copies, by what the files have of it.

    That is the CRC-32 of the file where it is one of the chunk in all copies, else it is read.
    """
    held: dict[tuple[str, Box], list[tuple[int, SavedChunk]]] = {}
    for rank, parts in found.items():
        for part in parts.all:
            for box, chunk in zip(part.boxes, part.chunks, strict=True):
                if chunk.dtype is not None and 0 not in chunk.sizes:
                    held.setdefault((part.fqn, box), []).append((rank, chunk))
    digests: dict[tuple[int, SavedChunk], bytes] = {}
    unread: dict[int, dict[SavedChunk, str]] = {}
    for (fqn, _), copies in held.items():
        sums = [crcs[rank, chunk.path] if chunk.is_whole else None for rank, chunk in copies]
        for (rank, chunk), crc in zip(copies, sums, strict=True) if len(copies) > 1 else ():
            if crc is None or None in sums:
                unread.setdefault(rank, {})[chunk] = fqn
            else:
                digests[rank, chunk] = (crc + 1).to_bytes(DIGEST_NBYTES, "little")  # 0 is none
    for rank, chunks in unread.items():
        with closing(opened(files[rank], open_file, rank)) as file:
            for chunk, fqn in chunks.items():
                start, nbytes, record = file.record(fqn, chunk)
                read = ByteRange(file.file, start, nbytes).read
                if record.is_contiguous:
                    size = prod(record.shape), record.dtype.itemsize
                    digests[rank, chunk] = digest_of_bytes(read, *size)
                    continue
                span = bytearray(read(0, record.span_nbytes))  # not the checksum behind them
                elements = torch.frombuffer(span, dtype=record.dtype)
                (digest,) = sampled_digests([elements.as_strided(record.shape, record.strides)])
                digests[rank, chunk] = digest or b""
    for rank, parts in found.items():
        for own, of_path in parts.paths.items():
            parts.paths[own] = [
                part._replace(digests=tuple([digests.get((rank, one), b"") for one in part.chunks]))
                for part in of_path
            ]


def opened(name: str, open_file: Open, rank: int | None = None) -> SavedFile:
    """Return a rank's file, opened.

    Raises:
        PlacementError: It is missing, or no whole file of ``torch.save``.
    """
    try:
        stream = open_file(name)
    except FileNotFoundError:
        whose = "" if rank is None else f" of rank {rank}"
        way_out = "way out:     the files of all ranks, of one save"
        headline = f"this file{whose} is missing"
        raise fault_error("the checkpoint is not complete", name, headline, way_out) from None
    try:
        return SavedFile(name, stream)
    except BaseException:
        stream.close()
        raise


def _proved(
    path: str,
    ranks: Sequence[tuple[RankParts, ...]],
    waive: Mapping[str, str] | None,
    strict: bool,
    note: str,
) -> Metadata:
    """Return the metadata of the checkpoint that the parts of ranks, item by item, make."""
    sent: dict[tuple[RankParts, ...], LocalPlan] = {}
    faults: dict[Fault, None] = {}
    for of_rank in dict.fromkeys(ranks):
        tables: dict[Any, dict[Any, Held]] = {}
        chunks: dict[str, dict[Box, bytes]] = {}
        first: dict[str, tuple[int, PartOfPath]] = {}
        renames: dict[Step, None] = {}
        numberings: dict[Family, Numbering] = {}
        for number, parts in enumerate(of_rank):
            renames |= dict.fromkeys(parts.renames)
            numberings |= parts.numberings
            for part in parts.all:
                if first.setdefault(part.fqn, (number, part))[0] != number:
                    faults[Fault(part.fqn, "two items have this key", _TWO_ITEMS)] = None
                of_key = chunks.setdefault(part.fqn, {})
                for box, digest in zip(part.boxes, part.digests, strict=True):
                    if of_key.setdefault(box, digest) != digest and strict:
                        faults[copies_fault(part.fqn, box, part.group.shape, 2)] = None
        for fqn, (_, part) in first.items():
            table = tables.setdefault((part.group.kind, part.group.axis_names), {})
            key = part.group, tuple(chunks[fqn])
            held = table.setdefault(key, Held(*key))
            held.fqns.append(fqn)
            held.values.append(part)  # which has the name of its rule
        holding = as_holding([list(table.values()) for table in tables.values()], {})
        digests = [
            chunks[fqn][box].ljust(DIGEST_NBYTES, b"\0")
            for held in holding.groups
            if may_have_replicas(held.group, len(ranks))
            for fqn in held.fqns
            for box in held.boxes
        ]
        statement = Statement(
            renames=tuple(renames),
            numberings=numberings,
            digests="sampled",
            world=len(ranks),
        )
        sent[of_rank] = LocalPlan(
            0, holding.sent, digests=b"".join(digests), statement=statement.packed()
        )
    raise_faults(path, faults)
    plans = [sent[of_rank]._replace(rank=rank) for rank, of_rank in enumerate(ranks)]
    size, waived = len(plans), waive or {}
    coordinator = Coordinator(plans, size=size, waived=waived, strict=strict)
    try:
        coordinator.prove()
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}{note}") from None
    if not strict:
        coordinator.finish_report()  # warns of its notes
    keys = coordinator.metadata([])
    provenance = {"save_id": "", "world_size": size, **coordinator.record(keys)}
    provenance.pop(DOUBTS, None)  # this load has told them
    return Metadata(keys, planner_data={RESERVED_KEY: provenance}, storage_data={})
