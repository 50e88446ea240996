"""Writes a tensor as ``torch.save`` does, from the file of an earlier one with its dtype and shape.

``torch.save`` takes 100 us and more, however small the tensor, which dominates a checkpoint of many
small tensors. The files of two tensors of one dtype and shape differ only in the elements and a few
checksums.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any

import torch

from dcp_placements.storage.tensor_record import DESCRIPTOR, local_header

_U64 = (1 << 64) - 1


class Stamp:
    """Writes tensors of one dtype and shape as ``torch.save`` would, byte for byte.

    Only the elements, a few checksums and an id derived from these differ between two such files.
    The constructor writes the file that it was given and compares, so that a stamp is never used
    with a torch whose files differ.

    Args:
        saved: The file of one such tensor, by ``torch.save``.
        data: The bytes of that tensor's storage; not empty.

    Attributes:
        start: Where the elements begin.

    Raises:
        ValueError: This torch writes another format.
    """

    start: int

    def __init__(self, saved: bytes, data: bytes) -> None:
        try:
            self._cut(saved, len(data))
        except (KeyError, struct.error, zipfile.BadZipFile) as error:
            raise ValueError("torch.save writes another kind of file") from error
        if b"".join(self.parts(data)) != saved:
            raise ValueError("torch.save writes other bytes than this class would")

    def parts(self, data: bytes) -> list[bytes]:
        """Return the file of a tensor with these bytes, in parts."""
        crc = zlib.crc32(data)
        data_crc = struct.pack("<I", crc)
        combined = _combine(self._before, crc)
        for other in self._after:
            combined = _combine(combined, other)
        name = b"%020d" % combined
        name_crc = struct.pack("<I", zlib.crc32(name, self._name_crc))
        head, after_data, after_crc, after_name, after_name_crc, after_dir, rest = self._fixed
        return [
            *(head, data, after_data, data_crc, after_crc, name, after_name, name_crc),
            *(after_name_crc, data_crc, after_dir, name_crc, rest),
        ]

    def _cut(self, saved: bytes, nbytes: int) -> None:
        """Locate the bytes that differ from file to file."""
        with zipfile.ZipFile(io.BytesIO(saved)) as file:
            entries = file.infolist()
            directory = file.start_dir
        starts: dict[str, int] = {}
        crc_at: dict[str, int] = {}
        for entry in entries:
            last = entry.filename.partition("/")[2]
            starts[last] = entry.header_offset + local_header(saved, entry.header_offset).nbytes
            crc_at[last] = directory + 16
            directory += 46 + sum(struct.unpack_from("<HHH", saved, directory + 28))
        order = [entry.filename.partition("/")[2] for entry in entries]
        if "data/0" not in order[:-1] or order[-1] != ".data/serialization_id":
            raise ValueError("torch.save writes other entries than this class would")
        at = order.index("data/0")
        data, name = starts["data/0"], starts[order[-1]]
        # The id is 20 digits of the entries' names, then 20 of their contents.
        middle, end = name + 20, name + 40
        self.start = data
        crc = data + nbytes + len(DESCRIPTOR)
        spots = [
            (data, data + nbytes),
            (crc, crc + 4),
            (middle, end),
            (end + 4, end + 8),
            (crc_at["data/0"], crc_at["data/0"] + 4),
            (crc_at[order[-1]], crc_at[order[-1]] + 4),
        ]
        fixed = []
        position = 0
        for start, stop in spots:
            fixed.append(saved[position:start])
            position = stop
        self._fixed = (*fixed, saved[position:])
        crcs = [entry.CRC for entry in entries]
        self._before = 0
        for value in crcs[:at]:
            self._before = _combine(self._before, value)
        self._after = crcs[at + 1 : -1]
        self._name_crc = zlib.crc32(saved[name:middle])


def _combine(seed: int, value: int) -> int:
    """Return torch's running hash of checksums (``c10::hash_combine``)."""
    return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _U64)


class TensorSaver:
    """Writes the files of tensors; of small ones with equal dtype and shape by ``Stamp``.

    Args:
        small_nbytes: The largest small tensor; checksums of larger ones cost more than is saved.
    """

    def __init__(self, small_nbytes: int = 32 * 1024) -> None:
        self.small_nbytes = small_nbytes
        self._stamps: dict[Any, Stamp | None] = {}

    def save(self, tensor: torch.Tensor, stream: Any) -> int | None:
        """Write what ``torch.save(tensor, stream)`` writes.

        Returns:
            Where the elements begin, in C order; None where that is unknown.
        """
        if not self._is_small_and_plain(tensor):
            torch.save(tensor, stream)
            return None
        key = (tensor.dtype, tensor.shape, tensor.stride())
        data = _storage_bytes(tensor)
        if key not in self._stamps:
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            saved = buffer.getvalue()
            try:
                self._stamps[key] = Stamp(saved, data)
            except ValueError:
                self._stamps[key] = None
            stream.write(saved)
        elif (stamp := self._stamps[key]) is None:
            torch.save(tensor, stream)
        else:
            stream.write(b"".join(stamp.parts(data)))
        stamp = self._stamps[key]
        return None if stamp is None or not tensor.is_contiguous() else stamp.start

    def _is_small_and_plain(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and tensor.is_cpu
            and not tensor.requires_grad
            and not (tensor.is_nested or tensor.is_quantized)
            and not (tensor.is_conj() or tensor.is_neg())
            and 0 < tensor.nbytes <= self.small_nbytes
            and tensor.storage_offset() == 0
            and tensor.untyped_storage().nbytes() == tensor.nbytes
            and not tensor.__dict__
        )


def _storage_bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return flat.numpy().tobytes()
