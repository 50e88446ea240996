"""The items that an engine saved, as a checkpoint: its keys, who has which boxes, and the proof.

What ranks describe of their paths is brought into the tables of a save, and proved by its
coordinator: boxes that make the whole, equal boxes with equal contents, one shape and dtype. Where
a checkpoint was saved without this package, its files describe what is in them, and the placements
of its world where that is.

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
from operator import attrgetter
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint import Metadata

from dcp_placements._torch import rehearsed
from dcp_placements.engines.described import KeyAtPath, RankKeys, rank_keys
from dcp_placements.errors import (
    CannotLook,
    CannotPlace,
    Fault,
    PlacementError,
    fault_error,
    raise_faults,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.names.flat import Path
from dcp_placements.names.recorded_numbers import Family, Numbering
from dcp_placements.names.renames import Step
from dcp_placements.save.coordinator import Coordinator
from dcp_placements.save.local_plan import LocalPlan
from dcp_placements.short_text import format_error, format_name, format_names
from dcp_placements.storage.file_reads import ByteRange
from dcp_placements.storage.index import index_of_locations
from dcp_placements.storage.metadata_file import with_columns
from dcp_placements.storage.provenance import (
    DOUBTS,
    RESERVED_KEY,
    numberings_of_plain,
    rename_of_plain,
)
from dcp_placements.storage.record_head import RecordHead
from dcp_placements.storage.safe_pickle import (
    SafeUnpickler,
    Stub,
    check_unfolded,
    most_elements,
)
from dcp_placements.storage.saved_dtensor import check_rank, rank_shard
from dcp_placements.storage.state_dict_file import Records, SavedChunk, SavedFile
from dcp_placements.storage.torch_metadata import StoredLocation, build_entries
from dcp_placements.storage.wrong_path import ENGINE_METADATA
from dcp_placements.table.digests import (
    DIGEST_NBYTES,
    digest_of_bytes,
    may_have_replicas,
    sampled_digests,
)
from dcp_placements.table.proof_faults import copies_fault
from dcp_placements.table.statement import Statement
from dcp_placements.table.table import OBJECT, Held, Holding

VERSION = 1
"""The version of the plain values of this package."""
OURS = "dcp_placements"
"""The type, in the engine's metadata, of what this package describes."""

_ENGINES = "DTensorShardingMetadata"
_ENGINE_VERSION = "2.0"
_SERIALIZATION = "TorchSerialization"

_NO_SOURCE = (
    "\n    note:        it was saved by the engine's own resharder: what DTensors do not say, "
    "source= and axes= of that world do (--rules and --mesh, or --source-rules and "
    "--source-mesh)"
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
"""The files of ranks that have a chunk or an object, and where in them, by key and offsets; an
object has no offsets."""

ChunkRecords = dict[tuple[str, SavedChunk], tuple[int, int, RecordHead]]
"""What ``SavedFile.record`` returns, by file and chunk of a tensor."""


class Described(NamedTuple):
    """What this package's metadata describe of a rank's file.

    Attributes:
        item_key: The key of its item.
        rank: The rank that wrote it.
        paths: All paths that they describe, as text.
    """

    item_key: str
    rank: int
    paths: Container[tuple[str, ...]]

    def check(self, file: SavedFile) -> None:
        """Refuse the file if it has tensors that they do not describe, or DTensors of another rank.

        Args:
            file: The file, opened.

        Raises:
            PlacementError: It has some.
        """
        faults: list[Fault] = []

        def value(own: Path, tensor: RecordHead, dtensor: Stub | None) -> None:
            key = _key(self.item_key, own)
            if tuple(map(str, own)) not in self.paths and 0 not in tensor.shape:
                headline = f"is in {file.name}, and not in {ENGINE_METADATA}"
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
        metadata: Metadata as DCP's, without places.
        places: The places.
        left_out: The keys that are left out.
        described: What this package's metadata describe of each file.
        chunk_records: The records of chunks, for the offline tools.
    """

    metadata: Metadata
    places: PlacesOfItems
    left_out: list[str]
    described: dict[str, Described]
    chunk_records: ChunkRecords


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
        path: The path of the checkpoint, for messages.
        items: The engine's metadata of each item.
        open_file: Opens a file of the checkpoint.
        source: The world that saved it, a ``DeclaredWorld``, where it was saved without this
            package; None where its DTensors describe all of it.
        rank: The rank that loads: its own copies are the places, then those of low ranks. None:
            the places are all copies, and the keys of objects are left out.
        waive: Patterns of keys whose numbers need not be complete.
        strict: Whether equal boxes with different contents are refused.

    Raises:
        PlacementError: What the ranks have does not make a checkpoint, or metadata cannot be used.
    """
    ranks: dict[int, dict[str, RankKeys]] = {}
    files: dict[str, dict[int, str]] = {}
    described: dict[str, Described] = {}
    chunk_records: ChunkRecords | None = {} if rank is None else None
    note = ""
    try:
        for item_key, item in items.items():
            layouts = {int(number): of for number, of in item["rank_to_layout_info"].items()}
            own = {
                number: _file_of(path, item_key, number, layouts[number])
                for number in sorted(layouts)
            }
            if _is_ours(path, item_key, item):
                note = _BY_FILES.format(item_key)
                by_rank = _described(item)
                for number, keys in by_rank.items():
                    paths = {tuple(map(str, own_path)) for own_path in keys.paths}
                    described[own[number]] = Described(item_key, number, paths)
                if chunk_records is not None:
                    by_rank = _compared(by_rank, own, described, open_file, chunk_records)
            else:
                by_rank = _from_files(path, item_key, item, own, open_file, source, chunk_records)
                note = _NO_SOURCE if source is None else _BY_SOURCE
            files[item_key] = own
            for number in own:
                ranks.setdefault(number, {})[item_key] = by_rank.get(number, RankKeys())
        left_out = _without_objects(ranks) if rank is None else []
        of_ranks = [tuple(by_item.values()) for by_item in ranks.values()]
        metadata = _proved(path, of_ranks, waive, strict, note)
    except (PlacementError, OSError, Warning):
        raise
    except Exception as error:  # of any type, by what is in the metadata
        headline = f"its metadata are broken: {format_error(error)}"
        likely = "likely:      the file was damaged or cut short"
        raise _refused(path, ENGINE_METADATA, headline, likely) from error
    places: PlacesOfItems = {}
    done: set[RankKeys] = set()
    for number in sorted(ranks, key=lambda other: (other != rank, other)):
        for item_key, keys in ranks[number].items():
            if keys in done and rank is not None:
                continue
            done.add(keys)
            file = files[item_key][number]
            for key in keys.all:
                for box, chunk in zip(key.boxes, key.chunks, strict=True):
                    offsets = None if key.group.kind == OBJECT else box.offsets
                    places.setdefault((key.fqn, offsets), []).append((file, chunk))
    return SavedItems(metadata, places, left_out, described, chunk_records or {})


def _without_objects(ranks: Mapping[int, Mapping[str, RankKeys]]) -> list[str]:
    """Remove the objects from what ranks have; return their keys.

    Args:
        ranks: What each rank has, by item.
    """
    left_out: dict[str, None] = {}
    for keys in {keys: None for by_item in ranks.values() for keys in by_item.values()}:
        left_out |= {key.fqn: None for key in keys.all if key.group.kind == OBJECT}
        for own, of_path in keys.paths.items():
            keys.paths[own] = [key for key in of_path if key.fqn not in left_out]
    return list(left_out)


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
            ENGINE_METADATA, "version", headline, "way out:     load it, and save it again"
        )
    items: dict[str, dict[str, Any]] = stored["metadata"]
    return items


def read_engine(
    path: str, items: Mapping[str, Mapping[str, Any]], open_file: Open, source: Any = None
) -> tuple[Metadata, Records, list[str]]:
    """Return the tensors of all items, with the places of all their copies, for the offline tools.

    Third are the keys of objects, which stay in the files.

    Args:
        path: The path of the checkpoint.
        items: As in ``saved_items``.
        open_file: Opens a file of the checkpoint.
        source: As in ``saved_items``.

    Raises:
        PlacementError: As ``saved_items``; or a file is damaged.
    """
    metadata, places, left_out, _, chunk_records = saved_items(
        path, items, open_file, source=source
    )
    # The level of an item, which an export leaves out of its names.
    metadata.planner_data |= {
        fqn: (item_key, fqn.removeprefix(f"{item_key}."))
        for fqn, _ in places
        for item_key in items
        if fqn.startswith(f"{item_key}.")
    }
    rows, records = [], {}
    for (fqn, of_tensor), copies in places.items():
        offsets = of_tensor or ()
        for name, chunk in copies:
            start, nbytes, records[fqn, name, offsets] = chunk_records[name, chunk]
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


def _descriptions(item: Mapping[str, Any]) -> Iterator[tuple[Path, str, Any, Sequence[int]]]:
    """Yield path, type, values and ranks of what an item's metadata describe, in order of paths."""
    for text, groups in sorted(item["nested_path_to_metadata"].items()):
        for group in groups:
            typed = group["sharding_metadata"]
            yield tuple(json.loads(text)), typed["type"], typed["data"], group["ranks"]


def _is_ours(path: str, item_key: str, item: Mapping[str, Any]) -> bool:
    """Whether this package described an item.

    Raises:
        PlacementError: A newer version did, or another resharder than the engine's.
    """
    kinds = {kind for _, kind, _, _ in _descriptions(item)}
    ours = [values for _, kind, values, _ in _descriptions(item) if kind == OURS]
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


def _described(item: Mapping[str, Any]) -> dict[int, RankKeys]:
    """Return by rank what this package described of an item; ranks with the same share it."""
    descriptions = list(_descriptions(item))
    of_ranks: dict[int, list[int]] = {}
    for number, (_, _, _, ranks) in enumerate(descriptions):
        for rank in ranks:
            of_ranks.setdefault(int(rank), []).append(number)
    by_numbers: dict[tuple[int, ...], RankKeys] = {}
    for numbers in dict.fromkeys(map(tuple, of_ranks.values())):
        by_numbers[numbers] = keys = RankKeys()
        for own, _, values, _ in [descriptions[number] for number in numbers]:
            keys.paths[own] = [
                KeyAtPath.of_plain(own, plain, digests)
                for plain, digests in zip(values["parts"], values["digests"], strict=True)
            ]
            keys.renames = tuple([rename_of_plain(*step) for step in values["renames"]])
            keys.numberings = numberings_of_plain(values["numbers"])
    return {rank: by_numbers[tuple(numbers)] for rank, numbers in of_ranks.items()}


def _compared(
    ranks: Mapping[int, RankKeys],
    files: Mapping[int, str],
    described: Mapping[str, Described],
    open_file: Open,
    chunk_records: ChunkRecords,
) -> dict[int, RankKeys]:
    """Return what this package described, with digests of what is in the files.

    The engine's metadata have the digests of the first save of a manager.
    """
    crcs: dict[tuple[int, Path], int | None] = {}
    compared: dict[int, RankKeys] = {}
    for rank, keys in ranks.items():
        with closing(opened(files[rank], open_file, rank)) as file:
            described[files[rank]].check(file)
            crcs |= {(rank, own): file.crc(own) for own in keys.paths}
            chunk_records |= _records_of(file, keys)
        compared[rank] = RankKeys(dict(keys.paths), keys.renames, keys.numberings)
    _add_digests(compared, crcs, files, open_file)
    return compared


def _from_files(
    path: str,
    item_key: str,
    item: Mapping[str, Any],
    files: Mapping[int, str],
    open_file: Open,
    source: Any,
    chunk_records: ChunkRecords | None,
) -> dict[int, RankKeys]:
    """Return what is in the files of an item, placed as the placements of its world say."""
    if source is not None and source.size != len(files):
        headline = f"was saved by {len(files)} ranks, and axes= is a mesh of {source.size}"
        way_out = f"way out:     the mesh that saved it; axes= is {dict(source.axes)}"
        raise _refused(path, item_key, headline, way_out)
    crcs: dict[tuple[int, Path], int | None] = {}
    ranks: dict[int, RankKeys] = {}
    for rank, name in files.items():
        with closing(opened(name, open_file, rank)) as file, rehearsed(rank, len(files)):
            state, outside, faults = _state_of(file, item_key, rank)
            declared = None if source is None else source.placements(rank)
            rules, rename = declared and declared.rules, declared and declared.rename
            try:
                keys = rank_keys(item_key, state, rules, rename, has_contents=False)
            except (ValueError, RecursionError) as error:
                headline = f"the keys of rank {rank} cannot be flattened: {format_error(error)}"
                raise _refused(path, name, headline, _FLAT) from error
            raise_faults(f"{path}: what rank {rank} saved cannot be placed", faults or keys.faults)
            for own in outside:
                del keys.paths[own]
            crcs |= {(rank, own): file.crc(own) for own in keys.paths}
            if chunk_records is not None:
                chunk_records |= _records_of(file, keys)
            ranks[rank] = keys
    _add_digests(ranks, crcs, files, open_file)
    return ranks


def _records_of(file: SavedFile, keys: RankKeys) -> ChunkRecords:
    """Return the records of the chunks of a rank's tensors in its file."""
    return {
        (file.name, chunk): file.record(key.fqn, chunk)
        for key in keys.all
        for chunk in key.chunks
        if chunk.dtype is not None
    }


def _state_of(file: SavedFile, item_key: str, rank: int) -> tuple[Any, list[Path], list[Fault]]:
    """Return what a rank saved, with ``meta`` tensors; what is on meshes of others; faults."""
    outside: list[Path] = []
    faults: list[Fault] = []

    def value(own: Path, tensor: RecordHead, dtensor: Stub | None) -> Any:
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
    ranks: Mapping[int, RankKeys],
    crcs: Mapping[tuple[int, Path], int | None],
    files: Mapping[int, str],
    open_file: Open,
) -> None:
    """Give a digest to each box of which there are copies, by what the files have of it.

    The digest is the CRC-32 of the record where every copy is a whole record with one; else the
    copies are read.
    """
    held: dict[tuple[str, Box], list[tuple[int, SavedChunk]]] = {}
    for rank, keys in ranks.items():
        for key in keys.all:
            for box, chunk in zip(key.boxes, key.chunks, strict=True):
                if chunk.dtype is not None and 0 not in chunk.sizes:
                    held.setdefault((key.fqn, box), []).append((rank, chunk))
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
    for rank, keys in ranks.items():
        for own, of_path in keys.paths.items():
            keys.paths[own] = [
                key._replace(
                    digests=tuple([digests.get((rank, chunk), b"") for chunk in key.chunks])
                )
                for key in of_path
            ]


def opened(name: str, open_file: Open, rank: int | None = None) -> SavedFile:
    """Return a rank's file, opened.

    Raises:
        CannotLook: It may not be opened.
        PlacementError: It is missing, or no whole file of ``torch.save``.
    """
    try:
        stream = open_file(name)
    except FileNotFoundError:
        whose = "" if rank is None else f" of rank {rank}"
        way_out = "way out:     the files of all ranks, of one save"
        headline = f"this file{whose} is missing"
        raise fault_error("the checkpoint is not complete", name, headline, way_out) from None
    except PermissionError as error:
        where = format_name(error.filename or name)
        raise CannotLook(f"{where}: cannot be opened: {error.strerror}") from error
    try:
        return SavedFile(name, stream)
    except BaseException:
        stream.close()
        raise


def _proved(
    path: str,
    ranks: Sequence[tuple[RankKeys, ...]],
    waive: Mapping[str, str] | None,
    strict: bool,
    note: str,
) -> Metadata:
    """Return the metadata of the checkpoint that what the ranks have, item by item, makes.

    The proof is the save's, by ``Coordinator.prove``; the copies that one rank has of a box, which
    a save compares while it plans, are compared here.
    """
    sent: dict[tuple[RankKeys, ...], LocalPlan] = {}
    faults: dict[Fault, None] = {}
    for of_rank in dict.fromkeys(ranks):
        sent[of_rank], of_plan = _local_plan(of_rank, len(ranks), strict=strict)
        faults |= dict.fromkeys(of_plan)
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
    entries = coordinator.metadata([])
    provenance = {"save_id": "", "world_size": size, **coordinator.record(entries)}
    provenance.pop(DOUBTS, None)  # this load has warned of them
    return Metadata(entries, planner_data={RESERVED_KEY: provenance}, storage_data={})


def _local_plan(
    of_rank: Sequence[RankKeys], size: int, *, strict: bool
) -> tuple[LocalPlan, list[Fault]]:
    """Return what a rank of a save would send, without its number; and the faults of the rank.

    Args:
        of_rank: What the rank has of each item.
        size: Number of ranks.
        strict: Whether copies that differ are faults.
    """
    faults: list[Fault] = []
    digest_of: dict[str, dict[Box, bytes]] = {}
    first: dict[str, tuple[int, KeyAtPath]] = {}
    renames: dict[Step, None] = {}
    numberings: dict[Family, Numbering] = {}
    for number, keys in enumerate(of_rank):
        renames |= dict.fromkeys(keys.renames)
        numberings |= keys.numberings
        for key in keys.all:
            if first.setdefault(key.fqn, (number, key))[0] != number:
                faults.append(Fault(key.fqn, "two items have this key", _TWO_ITEMS))
            of_boxes = digest_of.setdefault(key.fqn, {})
            for box, digest in zip(key.boxes, key.digests, strict=True):
                if of_boxes.setdefault(box, digest) != digest and strict:
                    faults.append(copies_fault(key.fqn, box, key.group.shape, 2))
    tables: dict[Any, int] = {}
    groups: dict[Any, Held] = {}
    for fqn, (_, key) in first.items():
        table = tables.setdefault((key.group.kind, key.group.axis_names), len(tables))
        layout = key.group, tuple(digest_of[fqn])
        held = groups.setdefault(layout, Held(*layout, table=table))
        held.fqns.append(fqn)
        held.values.append(key)  # which has the name of its rule
    holding = Holding(sorted(groups.values(), key=attrgetter("table")))
    digests = [
        digest_of[fqn][box].ljust(DIGEST_NBYTES, b"\0")
        for held in holding.groups
        if may_have_replicas(held.group, size)
        for fqn in held.fqns
        for box in held.boxes
    ]
    statement = Statement(
        renames=tuple(renames), numberings=numberings, digests="sampled", world=size
    )
    plan = LocalPlan(0, holding.packed(), digests=b"".join(digests), statement=statement.packed())
    return plan, faults
