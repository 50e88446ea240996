"""``Placements.resharder()``: the ``Resharder`` of ``torch_checkpointing``, for an ``ItemSpec``.

The engine asks each rank what its tensors are, gathers that into ``metadata.pkl``, and saves each
rank's item as it is. A load plans as one of DCP: the same requests, proof of cover, comparison with
the record of the save, and messages. It reads the slices that this rank needs.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import ReadItem
from torch_checkpointing.distributed_metadata import ShardingMetadata
from torch_checkpointing.resharding import Resharder
from torch_checkpointing.storage.base_storage import ReadArgs

from dcp_placements._torch import global_rank
from dcp_placements.engines.described import RankKeys, is_optimizer, rank_keys
from dcp_placements.engines.saved_items import OURS, VERSION, opened, saved_items
from dcp_placements.errors import (
    Fault,
    PlacementError,
    fault_error,
    format_faults,
    packed_faults,
    raise_faults_of_ranks,
    unpacked_faults,
)
from dcp_placements.load.planner import PlacementLoadPlanner
from dcp_placements.names.flat import Path
from dcp_placements.save.coordinator import NOT_PLACED
from dcp_placements.storage.provenance import plain_of_numberings, plain_of_rename
from dcp_placements.storage.record_reads import ChunkReader, RecordRead
from dcp_placements.storage.state_dict_file import SavedChunk, SavedFile
from dcp_placements.storage.store import LocalStore
from dcp_placements.table.table import OBJECT


@dataclass(frozen=True, eq=False)
class PlacementMetadata(ShardingMetadata, type_name=OURS):  # type: ignore[call-arg]
    """The keys of the checkpoint at a path of an item, on one rank, as plain values.

    Attributes:
        values: The plain values; those of a file are as it has them, also of newer versions.
        digests: The digests of the contents, which differ from save to save.
        refused: Why the rank cannot save, packed. All ranks raise it after the engine's gather,
            when each turns what it gathered into plain values.
        notes: What is likely wrong in what the rank saves, packed; rank 0 warns of it then.
        rank: The number of the rank.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    digests: tuple[tuple[bytes, ...], ...] = field(default=(), compare=False)
    refused: bytes = b""
    notes: bytes = field(default=b"", compare=False)
    rank: int = field(default=0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values.

        Raises:
            PlacementError: The rank cannot save.
        """
        self.check()
        if self.notes and not global_rank():
            notes = unpacked_faults(self.notes)
            warnings.warn(format_faults("look at this save", notes, "note"), stacklevel=2)
        return {"version": VERSION, "digests": self.digests, **self.values}

    def check(self) -> None:
        """Refuse what the rank refuses.

        Raises:
            PlacementError: It does.
        """
        if self.refused:
            raise_faults_of_ranks(NOT_PLACED, {self.rank: self.refused})

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> PlacementMetadata:
        """Return the metadata of plain values."""
        return cls(dict(d))

    @property
    def equivalent_ranks(self) -> None:
        """None: each rank describes what it has."""
        return None

    def __eq__(self, other: object) -> bool:
        """Whether another rank has the same.

        Raises:
            PlacementError: It is compared with metadata of the engine's own resharder, which would
                silently load nothing.
        """
        if not isinstance(other, ShardingMetadata):
            return NotImplemented
        if not isinstance(other, PlacementMetadata):
            raise PlacementError(
                "the checkpoint was saved with Placements.resharder(), and is loaded with another "
                f"resharder, which describes a tensor by {type(other).__name__}\n"
                "    way out:     ItemSpec(resharder=placements.resharder()), also at the load"
            )
        return (self.values, self.refused) == (other.values, other.refused)

    def __hash__(self) -> int:
        return hash(repr(self.values))


class PlacementResharder(Resharder):
    """A resharder that places every shard as the planners of a ``Placements`` do.

    Args:
        placements: The declaration.
        source: The world that saved the checkpoints without this package, a ``DeclaredWorld``.
        restricted: Whether files whose objects name more than plain values are refused, and files
            outside of the checkpoint's directory.
        check_crc: Whether records that are read whole are compared with their CRC-32.
        on_conflict: ``"error"``, or ``"warn"`` to read one of several copies that differ.
        options: Options of ``PlacementLoadPlanner``.
    """

    def __init__(
        self,
        placements: Any,
        *,
        source: Any = None,
        restricted: bool = False,
        check_crc: bool = True,
        on_conflict: str = "error",
        **options: Any,
    ) -> None:
        if on_conflict not in ("error", "warn"):
            raise PlacementError(f"on_conflict={on_conflict!r}: choose error or warn")
        placements.load_planner(**options)  # which refuses those that it does not have
        if options.get("exchange"):
            raise PlacementError("exchange=: not here, as each rank of this engine loads by itself")
        self._placements, self._source, self._options = placements, source, options
        self._waive = options.get("waive", placements.waive)
        self._restricted, self._check_crc = restricted, check_crc
        self._strict = on_conflict == "error"

    def extract_sharding_metadata(
        self, item_key: str, item_value: Any
    ) -> dict[Path, PlacementMetadata]:
        """Return what each path of an item is on this rank. Called on every rank.

        What cannot be placed is refused by all ranks together.
        """
        try:
            declared = self._placements
            whole = None if is_optimizer(item_value) else declared.whole
            keys = rank_keys(
                *(item_key, item_value, declared.rules, declared.rename),
                whole=whole,
                waive=self._waive,
            )
        except Exception as error:  # raised here, the other ranks would wait for this one
            first, *rest = str(error).splitlines() or [""]
            headline = f"cannot be planned: {type(error).__name__}: {first}"
            fault = Fault(item_key, headline, tuple(map(str.strip, rest)))
            keys = RankKeys(faults=[fault])
        if keys.faults:
            refused = packed_faults(keys.faults)
            return {(): PlacementMetadata(refused=refused, rank=global_rank())}
        metadata = {}
        notes = packed_faults(keys.notes) if keys.notes else b""
        for path, of_path in keys.paths.items():
            plain = tuple([key.plain() for key in of_path])
            digests = tuple([key.digests for key in of_path])
            values = {
                "parts": plain,
                "renames": tuple(map(plain_of_rename, keys.renames)),
                "numbers": plain_of_numberings(keys.numberings),
            }
            metadata[path] = PlacementMetadata(values, digests, notes=notes)
            notes = b""  # the first path has the notes of all
        return metadata

    def should_reshard(self, source_metadata: Any, target_metadata: Any) -> bool:
        """Whether metadata.pkl describes an item: then each load is planned, and proved.

        Raises:
            PlacementError: It does not, and the item has tensors; or objects, under ``restricted``.
        """
        if source_metadata is not None:
            return True
        described = list((target_metadata or {}).values())
        if described and (self._restricted or any(map(_has_tensors, described))):
            fqns = [part["fqn"] for each in described for part in each.values.get("parts", ())]
            of_item = next(iter(fqns), "this item")
            raise PlacementError(
                f"metadata.pkl has nothing of {of_item}, or is not there, so that no load of it "
                "can be proved\n"
                "    likely:      the key of the item is another one; or the directory is none of "
                "torch_checkpointing (dcp.load reads one with .metadata); or it was saved without "
                "a resharder, or by a manager with synchronous saves (0.1.1), which writes "
                "metadata.pkl with its first save alone\n"
                "    way out:     dcp-placements import --files with --rules and --mesh; or an "
                "ItemSpec without a resharder, in the topology that saved it"
            )
        return False  # the engine reads it as it is

    def load(
        self,
        source_path: PurePath,
        item_key: str,
        target_metadata: Mapping[Path, Any],
        source_metadata: Any,
        target: Any,
        storage: Any,
    ) -> list[Path]:
        """Fill an item in place; return the paths that may be missing, and are.

        Called on every rank.

        Raises:
            PlacementError: It cannot be filled, or would be filled wrongly.
        """
        options = dict(self._options)
        if is_optimizer(target):
            options["whole"] = None
        planner = self._placements.load_planner(**options)

        def open_file(name: str) -> IO[bytes]:
            if self._restricted:
                _check_inside(source_path, name)
            arguments = ReadArgs(pre_read_full_file=False)
            stream: IO[bytes] = storage.stream_read(source_path / name, arguments)
            return stream

        metadata, places, _, described, _ = saved_items(
            str(source_path),
            {item_key: source_metadata.to_dict()},
            open_file,
            source=self._source,
            rank=global_rank(),
            waive=self._waive,
            strict=self._strict,
        )
        planner.set_up_planner({item_key: target}, metadata, is_coordinator=True)
        (plan,) = planner.create_global_plan([planner.create_local_plan()])
        for own in (target_metadata or {}).values():
            own.check()  # which refuses what no load of DCP does
        items = planner.finish_plan(plan).items
        by_file: dict[str, list[tuple[ReadItem, SavedChunk]]] = {}
        for item in items:
            offset = item.storage_index.offset
            offsets = None if offset is None else tuple(offset)
            name, chunk = places[item.storage_index.fqn, offsets][0]
            by_file.setdefault(name, []).append((item, chunk))
        for name, wanted in sorted(by_file.items()):
            with closing(opened(name, open_file)) as file:
                if name in described:
                    described[name].check(file)
                self._read(planner, metadata, file, wanted)
        missing = planner.report.missing
        return [tuple(planner.mappings[fqn][1:]) for fqn in missing]

    def _read(
        self,
        planner: PlacementLoadPlanner,
        metadata: Any,
        file: SavedFile,
        wanted: list[tuple[ReadItem, SavedChunk]],
    ) -> None:
        """Read what is wanted of one file."""
        tensors: list[RecordRead] = []
        for item, chunk in wanted:
            fqn = item.storage_index.fqn
            if chunk.dtype is None:
                buffer = io.BytesIO()
                torch.save(file.object(fqn, chunk.path, restricted=self._restricted), buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
                continue
            start, nbytes, record = file.record(fqn, chunk)
            tensors.append(RecordRead(item, file.name, start, nbytes, record=record))
        tensors.sort(key=lambda read: read.start)
        stored = metadata.state_dict_metadata
        ChunkReader(planner, stored, check_crc=self._check_crc).read(file.file, tensors)


def _check_inside(path: PurePath, name: str) -> None:
    """Refuse a file outside of the checkpoint, by its name or by a link.

    Raises:
        PlacementError: It is outside.
    """
    why = LocalStore(str(path), restricted=True).why_barred(name)
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        why = "its name in metadata.pkl leads out of the directory"
    if why is not None:
        headline = f"is not opened with restricted=True: {why}"
        raise fault_error("a file of the checkpoint is refused", name, headline)


def _has_tensors(metadata: PlacementMetadata) -> bool:
    """Whether a path may have tensors; the load tells why a rank is refused."""
    kinds = {part["kind"] for part in metadata.values.get("parts", ())}
    return bool(metadata.refused) or kinds != {OBJECT}
