"""What is read whole is compared with the CRC-32 that its record has.

A record is a zip file: behind the bytes of each entry stands their CRC-32, also in files of torch's
writer. So damage after a save is found by the load, wherever the planner puts the elements.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.distributed.checkpoint import ReadItem

from dcp_placements.errors import Fault, raise_faults
from dcp_placements.storage.file_reads import Part
from dcp_placements.storage.records.fast_zlib import crc32
from dcp_placements.storage.tensor_record import DESCRIPTOR, LOCAL, TensorRecord

Array = np.ndarray[Any, Any]

_BEHIND = struct.Struct("<4sI")

BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)
"""What the standard library raises of zip files whose headers are damaged."""

_DETAILS = (
    "likely:      the file was damaged after it was written: by a disk, a copy, a transfer",
    "way out:     copy the file again, or load an older checkpoint; dcp-placements verify "
    "--contents lists all that is damaged",
    "             PlacementFileSystemReader(check_crc=False) reads it as it is",
)


def behind_elements(part: Part, tensor: TensorRecord) -> bytes:
    """Return what is behind the elements of a record: a mark, and their CRC-32."""
    behind = bytearray(_BEHIND.size)
    part.read_into(memoryview(behind), tensor.start + tensor.nbytes)
    return bytes(behind)


def expected_behind(checksum: int) -> bytes:
    """Return what is behind elements with this CRC-32."""
    return _BEHIND.pack(DESCRIPTOR, checksum)


class Checksums:
    """Compares records with their checksums.

    Attributes:
        unchecked: Records that were read whole and have none.
    """

    def __init__(self) -> None:
        self.unchecked = 0

    def check(
        self,
        item: ReadItem,
        tensor: TensorRecord,
        checksum: int,
        part: Part,
        place: tuple[str, int],
    ) -> None:
        """Compare the checksum of elements that were read with that behind them.

        Args:
            item: What was read.
            tensor: Where its elements are in the record.
            checksum: Theirs.
            part: The record.
            place: The file, and where the record begins there.

        Raises:
            PlacementError: They differ.
        """
        behind = behind_elements(part, tensor)
        if behind != expected_behind(checksum):
            raise_faults(
                "the checkpoint is damaged", [_fault(item, tensor, place, checksum, behind)]
            )

    def check_alike(
        self,
        items: Sequence[ReadItem],
        tensor: TensorRecord,
        rows: Array,
        places: Sequence[tuple[str, int]],
    ) -> None:
        """Compare the elements of records that begin alike.

        Args:
            items: What is read, of each.
            tensor: Where the elements are in each.
            rows: The records, one in each row of bytes.
            places: The file, and where each record begins there.

        Raises:
            PlacementError: Some differ.
        """
        if not tensor.has_crc:
            self.unchecked += len(rows)
            return
        end = tensor.start + tensor.nbytes
        found = np.empty((len(rows), _BEHIND.size), np.uint8)
        found[:, :4] = np.frombuffer(DESCRIPTOR, np.uint8)
        sums = np.array(list(map(crc32, rows[:, tensor.start : end])), "<u4")
        found[:, 4:] = sums.view(np.uint8).reshape(-1, 4)
        behind = rows[:, end : end + _BEHIND.size]
        damaged = np.flatnonzero((found != behind).any(axis=1)).tolist()
        raise_faults(
            "the checkpoint is damaged",
            [
                _fault(items[at], tensor, places[at], int(sums[at]), behind[at].tobytes())
                for at in damaged
            ],
        )

    def check_zip(self, item: ReadItem, stream: Any, place: tuple[str, int]) -> None:
        """Compare all entries of a record; leave its stream at the beginning.

        Args:
            item: What is read.
            stream: The record, seekable.
            place: The file, and where the record begins there.

        Raises:
            PlacementError: An entry has another checksum.
        """
        stream.seek(0)
        problem = self._zip_problem(stream) if stream.read(len(LOCAL)) == LOCAL else None
        stream.seek(0)
        if problem is not None:
            path, start = place
            text = f"the record at byte {start} of {path} is not what was written: {problem}"
            fault = Fault(item.storage_index.fqn, text, _DETAILS)
            raise_faults("the checkpoint is damaged", [fault])

    def _zip_problem(self, stream: Any) -> str | None:
        """Return what is wrong with a record; None where all of it is as it was written."""
        try:
            file = zipfile.ZipFile(stream)
            has_crc = any(entry.CRC for entry in file.infolist())
            for entry in file.infolist():
                # torch.load goes by the header before an entry, which this compares.
                file.open(entry).close()
            damaged = file.testzip() if has_crc else None
        except BROKEN as error:
            return f"{type(error).__name__}: {error}".removesuffix(": ")
        self.unchecked += not has_crc
        return None if damaged is None else f"{damaged.partition('/')[2]} has another CRC-32"


def _fault(
    item: ReadItem,
    tensor: TensorRecord,
    place: tuple[str, int],
    checksum: int,
    behind: bytes,
) -> Fault:
    path, start = place
    mark, stored = _BEHIND.unpack(behind)
    wanted = f"{stored:08x} was written" if mark == DESCRIPTOR else "no checksum follows any more"
    return Fault(
        item.storage_index.fqn,
        f"its elements at byte {start + tensor.start} of {path} are not what was written: their "
        f"CRC-32 is {checksum:08x}, where {wanted}",
        _DETAILS,
    )
