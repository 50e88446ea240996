"""Files that ``torch.save`` wrote, checked before ``torch.load(weights_only=True)`` reads them.

``torch.load`` does not execute them, but takes as much memory and time as a file asks for:
compressed entries expand, a pickle may call a global with a size or nest its keys, and a tensor of
stride 0 has more elements than bytes. ``torch.save`` writes only the last of these.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
import zlib
from typing import Any

import torch

from dcp_placements._torch import components, is_made_of_others
from dcp_placements.short_text import format_name
from dcp_placements.storage.process_limits import limited_time
from dcp_placements.storage.record_head import LOCAL, TorchUnpickler
from dcp_placements.storage.safe_pickle import (
    MAX_NAME_CHARS,
    RefusedGlobal,
    Stub,
    check_unfolded,
    describe,
    most_elements,
)

_END = struct.Struct("<4s12xIH")
_END64 = struct.Struct("<4s44xQ")
_END64_LOCATOR = struct.Struct("<4s4xQ4x")
_ENDS_NBYTES = _END64.size + _END64_LOCATOR.size + _END.size
"""A zip file ends with these three, or with the last of them alone."""

BROKEN = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(EOFError, NotImplementedError, RuntimeError, ValueError),
)
"""Errors of the standard library for zip files with damaged headers."""


def load_saved_tensor(stream: Any) -> torch.Tensor:
    """Return the tensor of a seekable stream that ``torch.save`` wrote.

    Raises:
        RefusedGlobal: The value has a type that ``torch.load`` does not allow.
        ValueError: The value is not one tensor in stored entries, or is larger than the stream.
        Exception: A broken record makes ``torch.load`` raise another error.
    """
    nbytes = int(stream.seek(0, io.SEEK_END))
    with limited_time(nbytes):
        return _tensor_of(stream, nbytes)


def _tensor_of(stream: Any, nbytes: int) -> torch.Tensor:
    """Return the tensor of a stream of ``nbytes``."""
    described = TorchUnpickler(*saved_pickle(stream)).load()
    if type(described) is not Stub:
        raise ValueError(f"it holds {describe(described)}, and no tensor")
    if described.by.partition(".")[0] in {"__builtin__", *sys.stdlib_module_names}:
        shown = format_name(described.by[:MAX_NAME_CHARS])
        raise ValueError(f"it begins with {shown}, which makes no tensor")
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    if refused:
        raise RefusedGlobal(min(refused), "a saved tensor")
    stream.seek(0)
    loaded = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(loaded, torch.Tensor):
        raise ValueError(f"it holds a {type(loaded).__name__}, and no tensor")
    if loaded.layout != torch.strided or not loaded.is_cpu:
        raise ValueError(f"it holds a tensor of {loaded.layout} on {loaded.device}")
    if _elements_nbytes(loaded) > nbytes:
        raise ValueError(f"it holds a {tuple(loaded.shape)} tensor in {nbytes} bytes")
    return loaded


def _elements_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of a wrapper of tensors, as of codes, of theirs."""
    if not is_made_of_others(tensor):
        return tensor.numel() * tensor.element_size()
    return sum(map(_elements_nbytes, components(tensor)))


def load_plain(stream: Any, device: str | None = None) -> Any:
    """Return the value of a seekable stream that ``torch.save`` wrote, without calling its names.

    Args:
        stream: The file.
        device: Device of its tensors; None for the device that each was saved on.

    Raises:
        ValueError: The file is no zip file of stored entries.
        pickle.UnpicklingError: ``torch.load(weights_only=True)`` refuses the file, or would take
            far more memory or time than in proportion to its size.
        Exception: A broken file makes ``torch.load`` raise another error.
    """
    data, storages = saved_pickle(stream)
    TorchUnpickler(data, storages).load()
    with limited_time(int(stream.seek(0, io.SEEK_END))):
        stream.seek(0)
        loaded = torch.load(stream, map_location=device, weights_only=True)
    check_unfolded([loaded], most_elements(data))
    return loaded


def saved_pickle(stream: Any) -> tuple[bytes, dict[str, zipfile.ZipInfo]]:
    """Return the pickle in a file that ``torch.save`` wrote, and the entries of its storages.

    Raises:
        ValueError: The file is no zip file of stored entries with one pickle.
    """
    file = stored_zip(stream)
    if file is None:
        raise ValueError("it is no zip file of torch.save")
    entries = {entry.filename: entry for entry in file.infolist()}
    names = [name for name in entries if name.rpartition("/")[2] == "data.pkl"]
    if len(names) != 1:
        raise ValueError("it has no pickle, or several")
    if not any(entry.CRC for entry in entries.values()):
        del entries[names[0]].CRC  # no checksum was written, and zipfile would compare it
    data = file.read(names[0])
    stream.seek(0)
    prefix = f"{names[0].rpartition('/')[0]}/data/"
    return data, {
        name[len(prefix) :]: entry for name, entry in entries.items() if name.startswith(prefix)
    }


def stored_zip(stream: Any) -> zipfile.ZipFile | None:
    """Return a stream as a zip file that ``torch.load`` and ``zipfile`` read alike.

    They could choose different entries if names differ at most in case, or if there are several
    directories. The stream is left at its beginning.

    Returns:
        None if the stream does not begin like a zip file: ``torch.load`` reads it in its older
        format.

    Raises:
        zipfile.BadZipFile: The file is broken, or could be read in two ways.
        ValueError: An entry is compressed, or the entries are more bytes than the file.
    """
    nbytes = int(stream.seek(0, io.SEEK_END))
    stream.seek(0)
    is_zip = stream.read(len(LOCAL)) == LOCAL
    stream.seek(0)
    if not is_zip:
        return None
    file = zipfile.ZipFile(stream)
    entries = file.infolist()
    if _directory_start(stream, nbytes) != file.start_dir:
        raise zipfile.BadZipFile("its directory is not where its end says")
    if len({entry.filename.lower() for entry in entries}) != len(entries):
        raise zipfile.BadZipFile("two of its entries have one name")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError("it has a compressed entry, and torch.save writes none")
    if sum(entry.file_size for entry in entries) > nbytes:
        raise ValueError("its entries overlap or are longer than the file")
    stream.seek(0)
    return file


def _directory_start(stream: Any, nbytes: int) -> int | None:
    """Return the start of the directory by the last bytes of a zip file; None for other ends."""
    stream.seek(max(nbytes - _ENDS_NBYTES, 0))
    ends = stream.read(_ENDS_NBYTES)
    mark, start, comment_nbytes = _END.unpack(ends[-_END.size :])
    if mark != b"PK\x05\x06" or comment_nbytes:
        return None
    locator = ends[-_END.size - _END64_LOCATOR.size : -_END.size]
    if not locator.startswith(b"PK\x06\x07"):
        return int(start)
    _, end64 = _END64_LOCATOR.unpack(locator)
    mark, start = _END64.unpack_from(ends)
    return int(start) if end64 == nbytes - _ENDS_NBYTES and mark == b"PK\x06\x06" else None
