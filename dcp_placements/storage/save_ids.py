"""Which save wrote a file.

A save that is interrupted while it writes over an older checkpoint leaves files of two saves under
the older ``.metadata``. So every file identifies its save: ``PlacementFileSystemWriter`` puts the
id of the save into file names; to the files of any other writer the planner adds a record of the
id, which is listed only in ``storage_data``, where stock readers ignore it. Comparing ids does not
read the contents.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import ReadItem, WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from dcp_placements._torch import StorageInfo
from dcp_placements.errors import Fault
from dcp_placements.items import object_read
from dcp_placements.pages import KILLED_PAGE
from dcp_placements.short_text import format_ranks
from dcp_placements.storage.provenance import RESERVED_KEY
from dcp_placements.storage.torch_metadata import StoredLocation

ID_PREFIX = "dcp_placements.save."
"""The prefix of keys of id records in ``storage_data``; the id follows."""

RECORDS = 4
"""Id records of a rank. Torch's writer deals objects out over the files of its threads in turn, so
up to this many files of a rank have one."""

_RECORD = re.compile(rb"dcp_placements save ([0-9a-f]{32})\n")
ID_NBYTES = 256
"""The largest size of an id record."""

_NAME = re.compile(r"__(\d+)(?:_([0-9a-f]{8}))?_\d+\.distcp\Z")
_NAMED_PREFIX = re.compile(r"__\d+_([0-9a-f]{8})_")

MIXED = "the checkpoint is a mixture of two saves"

LIKELY_CUT_OFF = (
    "likely:      a later save into the same directory was cut off before it wrote .metadata"
)
WAY_OUT = "way out:     load another checkpoint; this one is not sound"


def writer_of(file: str) -> int | None:
    """Return the rank that wrote a file, by its name; None if the name does not say it.

    >>> [writer_of(name) for name in ("__3_0.distcp", "__3_5e0f1a2b_0.distcp", "a.safetensors")]
    [3, 3, None]
    """
    match = _NAME.search(file)
    return int(match[1]) if match else None


def is_data_file(name: str) -> bool:
    """Whether a name is that of a data file in a checkpoint's own directory.

    >>> [is_data_file(name) for name in ("__3_0.distcp", "../__3_0.distcp", "train.py")]
    [True, False, False]
    """
    return _NAME.match(name) is not None


def id_in_name(file: str) -> str | None:
    """Return the beginning of the save's id in a file's name; None if the name has none.

    >>> id_in_name("__3_5e0f1a2b_0.distcp"), id_in_name("__3_0.distcp")
    ('5e0f1a2b', None)
    """
    match = _NAME.search(file)
    return match[2] if match else None


def name_with_id(prefix: str, save_id: bytes) -> str:
    """Return a prefix of file names, followed by the beginning of a save's id.

    >>> name_with_id("__3_", bytes.fromhex("5e0f1a2b" * 4))
    '__3_5e0f1a2b_'
    """
    return f"{prefix}{save_id.hex()[:8]}_"


def is_named(storage_data: Any) -> bool:
    """Whether the files of a writer will have the id in their names."""
    prefix = getattr(storage_data, "prefix", None)
    return isinstance(prefix, str) and _NAMED_PREFIX.fullmatch(prefix) is not None


def reserved_faults(fqns: Iterable[str]) -> list[Fault]:
    """Return a fault for each key of a state dict that this package reserves."""
    ours = [fqn for fqn in fqns if fqn.startswith(RESERVED_KEY)]
    headline, way_out = "this package has this key for itself", "way out:     another key"
    return [
        Fault(fqn, headline, (way_out,))
        for fqn in ours
        if fqn == RESERVED_KEY or fqn.startswith(ID_PREFIX)
    ]


def id_items(save_id: bytes, rank: int) -> list[WriteItem]:
    """Return the write items of a rank's id records, which come before all other items."""
    key = ID_PREFIX + save_id.hex()
    return [
        WriteItem(MetadataIndex(key, torch.Size((rank, number))), WriteItemType.BYTE_IO)
        for number in range(RECORDS)
    ]


def id_data(index: MetadataIndex) -> io.BytesIO | None:
    """Return the contents of an id record; None for the index of another record."""
    if not index.fqn.startswith(ID_PREFIX):
        return None
    return io.BytesIO(f"dcp_placements save {index.fqn[len(ID_PREFIX) :]}\n".encode())


def id_records(
    data: Mapping[MetadataIndex, StorageInfo],
) -> tuple[dict[str, StoredLocation], list[Fault]]:
    """Return the first id record of each file, and faults of files with those of several ranks.

    Each rank writes its own files. In torch's pickle all locations of a rank may share one text for
    its file, so that a single flipped bit gives all of them the file of another rank.

    Args:
        data: The checkpoint's ``storage_data``.
    """
    with_prefix = getattr(data, "with_prefix", None)  # an index need not search all rows
    if with_prefix is not None:
        locations = list(with_prefix(ID_PREFIX))
    else:
        own = [item for item in data.items() if item[0].fqn.startswith(ID_PREFIX)]
        locations = [StoredLocation.of(*item) for item in own]
    records: dict[str, StoredLocation] = {}
    ranks: dict[str, set[int]] = {}
    for location in locations:
        records.setdefault(location.path, location)
        if location.offset:
            ranks.setdefault(location.path, set()).add(location.offset[0])
    faults = []
    for file, some in sorted(ranks.items()):
        if len(some) > 1:
            headline = f"is named as the file of {format_ranks(some)}, where each writes its own"
            faults.append(Fault(file, headline, ("likely:      .metadata is damaged", WAY_OUT)))
    return records, faults


def id_item(record: StoredLocation) -> ReadItem:
    """Return the read item of an id record."""
    return object_read(MetadataIndex(record.fqn, record.offset))


def id_fault(record: StoredLocation, data: bytes) -> Fault | None:
    """Return a fault saying that another save wrote a file; None if that of ``.metadata`` did.

    Args:
        record: Location of the id record, as ``.metadata`` has it.
        data: The bytes at this location, at most ``ID_NBYTES``.
    """
    save_id, match = record.fqn[len(ID_PREFIX) :], _RECORD.fullmatch(data)
    other = match[1].decode() if match else None
    if other == save_id:
        return None
    if other is None:
        headline = f"has no save id where .metadata says that save {save_id} put its own"
    else:
        headline = f"was written by save {other}, and .metadata is that of save {save_id}"
    return Fault(record.path, headline, (LIKELY_CUT_OFF, WAY_OUT, KILLED_PAGE))


def ids_to_check(
    files: Iterable[str], records: Mapping[str, StoredLocation]
) -> list[StoredLocation]:
    """Return the id records to check for files.

    For a file without an id record these are in the other files of the rank that wrote it.
    """
    if not records:
        return []
    own = set(files)
    writers = {writer_of(file) for file in own.difference(records)} - {None}
    speakers = [file for file in records if file in own or (writers and writer_of(file) in writers)]
    return [records[file] for file in sorted(speakers)]


def missing_file(file: str) -> Fault:
    """Return the fault of a missing file."""
    likely = LIKELY_CUT_OFF
    if id_in_name(file) is not None:
        # Another save has other names, so nothing has taken its place.
        likely = (
            "likely:      the checkpoint was copied in part; or a later save into the same "
            "directory has taken its place since its .metadata was read"
        )
    return Fault(
        file, "the file is not there", (likely, "way out:     load it again, or another checkpoint")
    )
