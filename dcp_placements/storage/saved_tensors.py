"""Reads a record that is not plain (other strides, conjugated, transformed) by ``torch.load``.

``torch.load`` takes as much memory as a record asks for: compressed entries expand, a global may
be called with a size, and a tensor of stride 0 has more elements than bytes. Such a record is
refused before ``torch.load`` sees it. ``torch.save`` writes none of these.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections import OrderedDict
from pickle import Unpickler
from typing import Any

import torch

from dcp_placements.storage.tensor_record import RECORD_OPCODES

PICKLE_NBYTES = 64 << 10
"""No more than this is said of one tensor. It bounds how deep tuples nest."""

_OPCODES = RECORD_OPCODES | {"EMPTY_DICT", "SETITEM", "SETITEMS", "BINGET", "NONE"}


def load_saved_tensor(stream: Any) -> torch.Tensor:
    """Return the tensor of a seekable stream that ``torch.save`` wrote.

    Raises:
        ValueError: It is not one tensor in stored entries, or not of the stream's size.
        Exception: Whatever else a broken record makes ``torch.load`` raise.
    """
    nbytes = check_stored(stream)
    if not nbytes:
        raise ValueError("it is no zip file of torch.save")
    _check_pickle(stream)
    loaded = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(loaded, torch.Tensor):
        raise ValueError(f"it holds a {type(loaded).__name__}, and no tensor")
    if loaded.layout != torch.strided or not loaded.is_cpu:
        raise ValueError(f"it holds a tensor of {loaded.layout} on {loaded.device}")
    if loaded.numel() * loaded.element_size() > nbytes:
        raise ValueError(f"it holds a {tuple(loaded.shape)} tensor in {nbytes} bytes")
    return loaded


def check_stored(stream: Any) -> int:
    """Return the length of a zip file; 0 where it is none. The stream stands at its begin then.

    Raises:
        ValueError: An entry is compressed, or the entries are more bytes than the file.
    """
    nbytes = int(stream.seek(0, io.SEEK_END))
    stream.seek(0)
    if not zipfile.is_zipfile(stream):
        stream.seek(0)
        return 0
    with zipfile.ZipFile(stream) as file:
        entries = file.infolist()
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError("it has a compressed entry, and torch.save writes none")
    if sum(entry.file_size for entry in entries) > nbytes:
        raise ValueError("its entries overlap or are longer than the file")
    stream.seek(0)
    return nbytes


def _check_pickle(stream: Any) -> None:
    """Refuse a record whose pickle is of more than one tensor of the bytes beside it."""
    with zipfile.ZipFile(stream) as file:
        entries = {entry.filename: entry for entry in file.infolist()}
        names = [name for name in entries if name.rpartition("/")[2] == "data.pkl"]
        if len(names) != 1 or entries[names[0]].file_size > PICKLE_NBYTES:
            raise ValueError("it has no pickle of one tensor")
        pickled = file.read(names[0])
    stream.seek(0)
    unknown = {op.name for op, _, _ in pickletools.genops(pickled)} - _OPCODES
    if unknown:
        raise ValueError(f"its pickle has {min(unknown)}, which no tensor needs")
    prefix = names[0].rpartition("/")[0]
    sizes = {name: entry.file_size for name, entry in entries.items()}
    try:
        made = _Checker(pickled, sizes, prefix).load()
    except TypeError as error:
        raise ValueError(f"its pickle calls what no tensor needs: {error}") from error
    if made is not _TENSOR:
        raise ValueError("it holds no tensor")


_TENSOR = object()
"""Stands for what a pickle rebuilds."""


class _Checker(Unpickler):
    """Goes through a pickle of a tensor, and makes nothing of it."""

    def __init__(self, pickled: bytes, sizes: dict[str, int], prefix: str) -> None:
        super().__init__(io.BytesIO(pickled))
        self._sizes = sizes
        self._prefix = prefix

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name.startswith("_rebuild_"):
            return _rebuilt
        if module in ("torch", "torch.storage") and name != "Tensor":
            # A dtype, a storage type, a scheme: named, never called.
            return name
        raise ValueError(f"its pickle names {module}.{name}, which no tensor needs")

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, _, count = pid
        held = self._sizes.get(f"{self._prefix}/data/{key}", 0)
        if kind != "storage" or not isinstance(count, int) or not 0 <= count <= held:
            raise ValueError(f"its storage {key!r} has {held} bytes, where {count} are named")
        if storage != "UntypedStorage" and count * _itemsize(storage) > held:
            raise ValueError(f"its storage {key!r} has {held} bytes for {count} elements")
        return None


def _rebuilt(*_: Any) -> object:
    return _TENSOR


def _itemsize(storage: str) -> int:
    """Return the bytes of one element, by the name of a storage type."""
    return _ITEMSIZES[storage.removesuffix("Storage")]


_ITEMSIZES = {
    **dict.fromkeys(("Bool", "Byte", "Char", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("BFloat16", "Half", "Short"), 2),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
