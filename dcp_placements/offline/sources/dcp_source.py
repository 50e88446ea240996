"""DCP's checkpoints as a source: ``.metadata`` describes them, and each record is a file itself.

Of two ep ranks ``.metadata`` has two chunks of a key, each with its place::

    experts.w1 (4, 3): [0:2, :] at byte 0 of __0_0.distcp; [2:4, :] at byte 0 of __1_0.distcp
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Any, ClassVar, Self

from torch.distributed.checkpoint import Metadata

from dcp_placements.errors import CannotLook, Fault
from dcp_placements.offline.checkpoint import (
    Checkpoint,
    CheckpointFault,
    FileFinding,
    RecordChecks,
    SourceOptions,
    StoredRecord,
    StoredTensor,
    reading,
)
from dcp_placements.offline.directory import check_damage, opened_ahead
from dcp_placements.short_text import format_names
from dcp_placements.storage.file_reads import ByteRange
from dcp_placements.storage.index import OtherVersion
from dcp_placements.storage.metadata_file import UnusedIndex, read_metadata, read_stock_pickle
from dcp_placements.storage.record_head import RecordHead
from dcp_placements.storage.save_ids import ID_NBYTES, id_fault, id_in_name, id_records
from dcp_placements.storage.store import Store
from dcp_placements.storage.torch_metadata import StoredLocation, differing_keys

METADATA = ".metadata"

TORCH_DIST = "torch_dist"
"""Megatron's name for its checkpoints of DCP."""

AFTER_S = 1.0
"""A data file that is younger than ``.metadata`` by more than this is noted."""


class Dcp(Checkpoint):
    """A checkpoint of DCP's, whatever planner and writer saved it; Megatron's ``torch_dist``, too.

    Args:
        directory: The files.

    Attributes:
        newer: Features of its metadata that plain torch of this version, under this Python, cannot
            read.
        unused_indexes: Why torch's pickle is read instead of the index of ``.metadata``; empty if
            the index is used, and without one.
    """

    subject: ClassVar[str] = "a DCP checkpoint"
    is_beside_others: ClassVar[bool] = True
    is_dcp: ClassVar[bool] = True
    holds_objects: ClassVar[bool] = True

    def __init__(self, directory: Store) -> None:
        self._version = _version(directory)  # before anything is read
        self.newer: set[str] = set()
        self.unused_indexes: list[UnusedIndex] = []
        is_megatrons = is_torch_dist(directory)
        metadata = read_dcp(directory, METADATA, newer=self.newer, unused=self.unused_indexes)
        super().__init__(directory, metadata)
        self.format = TORCH_DIST if is_megatrons else "dcp"
        if is_megatrons:
            self.why_not_resharded = "Megatron's torch_dist has state beside its tensors"

    @classmethod
    def is_in(cls, names: Sequence[str]) -> bool:
        """Whether there is ``.metadata``; trainers leave other files beside it."""
        return METADATA in names

    @classmethod
    def of(cls, directory: Store, options: SourceOptions) -> Self:
        """Return the checkpoint in a directory."""
        return cls(directory)

    def head(self, tensor: StoredTensor, chunk: StoredRecord) -> RecordHead | None:
        """Return None: the record itself says what it is."""
        return None

    def verify_record(
        self, checks: RecordChecks, byte_range: ByteRange, record: StoredRecord
    ) -> Iterator[FileFinding]:
        """Yield the faults of a file of ``torch.save`` of its own."""
        return checks.saved(byte_range, record)

    @cached_property
    def id_records(self) -> tuple[dict[str, StoredLocation], list[Fault]]:
        """The records of save ids, as ``save_ids.id_records`` returns them."""
        return id_records(self.rows)

    def own_faults(self) -> Iterator[CheckpointFault]:
        """Yield files that another save wrote, by the id that each begins with; damaged places."""
        records, damages = self.id_records
        for damage in damages:
            yield CheckpointFault("shared_bytes", (), (damage.fqn,), f"it {damage.headline}")
        # Transforms are undone by extensions, which are not at hand here.
        plain = {
            file: record
            for file, record in records.items()
            if not record.transforms and self.directory.size(file) is not None
        }
        with opened_ahead(self.directory, plain) as opened:
            for (file, record), held in zip(plain.items(), opened, strict=True):
                try:
                    if isinstance(held, OSError):
                        raise held
                    with held.stream as stream:
                        stream.seek(record.start)
                        fault = id_fault(record, stream.read(min(record.length, ID_NBYTES)))
                except OSError as error:
                    check_damage(self.directory, file, error)
                    continue  # its other records cannot be read either, a fault of its own
                if fault is not None:
                    message = f"it {fault.headline}"
                    yield CheckpointFault("mixed_generations", (), (file,), message)

    def description_faults(self, *, contents: bool) -> Iterator[CheckpointFault]:
        """Yield what is wrong with ``.metadata`` itself: its index; with contents, torch's pickle.

        Raises:
            CannotLook: The pickle before the index is refused, or cannot be read.
        """
        for damage in self.unused_indexes:
            if isinstance(damage, OtherVersion):
                continue  # which is no damage; a warning says it
            message = (
                f"its index cannot be used: {damage}; torch's pickle in it is read in its place, "
                "and stock-metadata writes both anew"
            )
            yield CheckpointFault("index", (), (METADATA,), message)
        if contents:
            yield from self._stock_faults()

    def _stock_faults(self) -> Iterator[CheckpointFault]:
        """Yield where the pickle that torch's readers read differs from the index."""
        with reading(self.directory, METADATA):
            stock = read_stock_pickle(self.directory.opener(METADATA))
            if stock is None:
                return
            facts = [
                name
                for name in ("planner_data", "version")
                if getattr(stock, name, None) != getattr(self.metadata, name, None)
            ]
        rows: Any = self.rows
        torchs: Any = stock.storage_data
        unlike = differing_keys(rows.entries, torchs.entries)
        keys = {*rows.fqns, *torchs.fqns} - unlike
        moved = {fqn for fqn in keys if {*rows.rows_of(fqn)} != {*torchs.rows_of(fqn)}}
        if unlike:
            yield _stock_fault("other shapes, dtypes or chunks", unlike)
        if moved:
            yield _stock_fault("chunks in other places", moved)
        if facts:
            yield _stock_fault(f"another {' and another '.join(facts)}", ())

    def signs(self) -> Iterator[str]:
        """Yield what torch cannot read, files without an id, and files younger than ``.metadata``.

        None of it proves damage: a copy of a checkpoint has it as well.
        """
        if self.newer:
            yield (
                f"plain torch {version('torch')} cannot read .metadata here: it has "
                f"{' and '.join(sorted(self.newer))}. PlacementFileSystemReader reads it; "
                f"dcp-placements stock-metadata {self.path} writes it as every torch reads it"
            )
        own, _ = self.id_records
        without = [file for file in self.files if file not in own and id_in_name(file) is None]
        if 0 < len(without) < len(self.files):
            yield (
                f"no id of a save in {format_names(without, 4)}: where another save wrote one of "
                "them and not the rank's other files, nothing can tell"
            )
        written = self._written(METADATA)
        younger = [
            file
            for file in without
            if written is not None
            and self.files[file] is not None
            and (self._written(file) or 0) > written + AFTER_S
        ]
        if younger:
            yield (
                f"written after .metadata, which is written last: {format_names(younger, 4)}. A "
                "copy looks like that, and so does a later save that was cut off"
            )

    def _written(self, name: str) -> float | None:
        """Return when a file of this machine was written; None for a URL and a missing file."""
        entry = self.directory.entry(name) if self.directory.is_local else None
        return None if entry is None else entry.written

    def changed_files(self) -> list[str]:
        """Return ``.metadata`` if a save has replaced it since it was read."""
        return [METADATA] if _version(self.directory) != self._version else []


def _version(directory: Store) -> str | None:
    """Return the version of ``.metadata``, which each write of it changes; None without one."""
    try:
        return directory.version(METADATA)
    except FileNotFoundError:
        return None


def _stock_fault(what: str, fqns: Iterable[str]) -> CheckpointFault:
    names = tuple(sorted(fqns))
    message = (
        f"torch reads .metadata without its index, and finds {what} than the index has"
        f"{': ' if names else ''}{format_names(names, 4)}; stock-metadata writes both anew"
    )
    return CheckpointFault("stock_metadata", names, (METADATA,), message)


def is_torch_dist(directory: Store) -> bool:
    """Whether Megatron's ``metadata.json`` beside ``.metadata`` names the backend torch_dist."""
    try:
        with directory.open("metadata.json") as stream:
            content = json.loads(stream.read(1 << 20))
    except OSError as error:
        if isinstance(error, FileNotFoundError) or directory.why_barred("metadata.json"):
            return False
        raise CannotLook(f"{directory.path}/metadata.json: it cannot be read: {error}") from error
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("sharded_backend") == TORCH_DIST


def read_dcp(
    directory: Store,
    name: str,
    *,
    newer: set[str] | None = None,
    unused: list[UnusedIndex] | None = None,
) -> Metadata:
    """Return the metadata in a file, with entries and rows in columns; nothing is executed.

    Args:
        directory: Store of the checkpoint.
        name: Name of the file.
        newer: Argument of ``read_metadata``.
        unused: Argument of ``read_metadata``.

    Raises:
        CannotLook: It is refused, or cannot be read.
    """
    with reading(directory, name):
        return read_metadata(directory.opener(name), restricted=True, newer=newer, unused=unused)
