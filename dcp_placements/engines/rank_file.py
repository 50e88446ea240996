"""A rank's file of an item, as ``torch.save`` wrote it: where each tensor's elements are.

Nothing in it is executed: of its pickle dicts and lists are made, and of all else what stands for
it. Elements are read in place, as those of a record of DCP.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from math import prod
from typing import IO, Any, NamedTuple

import torch

from dcp_placements._torch import LOCAL_TENSOR
from dcp_placements.errors import Fault, format_error, raise_faults
from dcp_placements.names.flat import Path, value_at
from dcp_placements.storage.checked_load import load_plain, saved_entries
from dcp_placements.storage.file_reads import CountedFile, Part, c_strides
from dcp_placements.storage.record_reads import DAMAGED, IS_DAMAGED, ChunkReader, Wanted
from dcp_placements.storage.safe_pickle import Call
from dcp_placements.storage.tensor_record import (
    BEHIND,
    Made,
    Storage,
    StridedTensor,
    TensorRecord,
    TorchUnpickler,
    entry_start,
    is_contiguous,
    strided_tensor,
)

_SIZES_FOLLOW = 8
"""The flag of an entry of a zip file whose checksum stands behind its bytes."""


class Location(NamedTuple):
    """A chunk in a rank's file: a part of the tensor at a path.

    Attributes:
        file: Its name.
        path: Of the tensor, in the item.
        shape: Of the tensor, which is the rank's local one.
        dtype: Likewise.
        sizes: Of the chunk.
        start: Where it begins in the tensor, in elements of C order.
        steps: From one element of the chunk to the next along each of its dims, likewise.
    """

    file: str
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    sizes: tuple[int, ...]
    start: int
    steps: tuple[int, ...]


Records = dict[tuple[str, str, int], TensorRecord]
"""By key, file and first byte: how a chunk lies there."""


class RecordsReader(ChunkReader):
    """Reads chunks of which is known how they lie.

    Args:
        planner: As of ``ChunkReader``.
        stored: Likewise.
        records: How they lie.
        check_crc: As of ``ChunkReader``.
    """

    def __init__(
        self, planner: Any, stored: Mapping[str, Any], records: Records, *, check_crc: bool
    ) -> None:
        super().__init__(planner, stored, lambda item, steps, stream: stream, check_crc=check_crc)
        self._records = records

    def tensor_record(self, one: Wanted, part: Part) -> TensorRecord | None:
        return self._records[one.item.storage_index.fqn, one.file, one.start]


class _Tree(TorchUnpickler):
    """Makes dicts and lists; what stands for another object keeps its state among its arguments."""

    def call(self, called: Any, args: Any) -> Any:
        made = super().call(called, args)
        return {} if made.by == "collections.OrderedDict" and not args else made

    def fill(self, instance: Any, state: Any, *, once: bool = True) -> Any:
        if type(instance) is Made:
            instance.args = (*instance.args, state)
        return instance

    def set_items(self, held: Any, items: tuple[Any, ...]) -> Any:
        super().set_items(held, items)
        return self.fill(held, items)


class RankFile:
    """One file, opened.

    Args:
        name: Of the file, for messages.
        stream: Of its bytes.

    Attributes:
        file: Its bytes; it counts those that are read.
        tree: What is in it.

    Raises:
        PlacementError: It is no whole file of ``torch.save``.
    """

    def __init__(self, name: str, stream: IO[bytes]) -> None:
        self.name = name
        # Only a buffered file is known to be a plain one.
        self.file = CountedFile(
            io.BufferedReader(stream) if isinstance(stream, io.FileIO) else stream
        )
        self._part = Part(self.file, 0, self.file.size)
        self._loaded: dict[str, Any] = {}
        self._stream = stream
        try:
            data, self._entries = saved_entries(self._part.stream())
            sizes = {key: entry.file_size for key, entry in self._entries.items()}
            self.tree: Any = _Tree(data, sizes).load()
        except Exception as error:  # a broken pickle can raise anything
            headline = f"cannot be read: {format_error(error)}"
            raise_faults(IS_DAMAGED, [Fault(name, headline, DAMAGED)])
        self._has_crcs = any(entry.CRC for entry in self._entries.values())

    def tensor(self, path: Path) -> StridedTensor | None:
        """Return the tensor at a path; None of anything else."""
        try:
            return _saved_tensor(value_at(self.tree, path))[0]
        except (LookupError, TypeError):
            return None

    def crc(self, path: Path) -> int | None:
        """Return the CRC-32 of a tensor; None where its elements are not all that it is of."""
        tensor = self.tensor(path)
        if tensor is None or not self._has_crcs:
            return None
        nbytes, entry = prod(tensor.shape) * tensor.dtype.itemsize, self._entries.get(tensor.key)
        return entry.CRC if entry is not None and entry.file_size == nbytes else None

    def record(self, fqn: str, at: Location) -> tuple[int, int, TensorRecord]:
        """Return where a chunk is: its first byte, its bytes, and how it lies in them.

        Raises:
            PlacementError: The file has another tensor at the path, or none.
        """
        if 0 in at.sizes:
            assert at.dtype is not None
            return 0, 0, TensorRecord(at.dtype, at.sizes, 0)
        tensor = self.tensor(at.path)
        if tensor is None or (tensor.shape, tensor.dtype) != (at.shape, at.dtype):
            there = "no plain tensor" if tensor is None else f"{tensor.shape} {tensor.dtype}"
            where = ".".join(map(str, at.path))
            headline = (
                f"{self.name} has {there} at {where!r}, where a {at.shape} {at.dtype} was saved"
            )
            raise_faults("the checkpoint is not what it says", [Fault(fqn, headline, _OTHER)])
            raise AssertionError
        offset, strides = _in_storage(tensor, at)
        sizes, itemsize = at.sizes, tensor.dtype.itemsize
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        entry = self._entries.get(tensor.key)
        if entry is None or (offset + span) * itemsize > entry.file_size:
            headline = f"{self.name} ends before its elements do"
            raise_faults(IS_DAMAGED, [Fault(fqn, headline, DAMAGED)])
            raise AssertionError
        start = entry_start(self._part.read_into, entry) + offset * itemsize
        nbytes, is_plain = span * itemsize, is_contiguous(sizes, strides)
        is_whole = is_plain and nbytes == entry.file_size
        has_crc = is_whole and self._has_crcs and bool(entry.flag_bits & _SIZES_FOLLOW)
        record = TensorRecord(tensor.dtype, sizes, 0, has_crc, None if is_plain else strides)
        return start, nbytes + BEHIND * has_crc, record

    def object(self, fqn: str, path: Path, *, restricted: bool) -> Any:
        """Return the object at a path, as ``torch.load`` makes it.

        Args:
            fqn: Of the object, for messages.
            path: Of the object.
            restricted: Whether a pickle that names more than plain values is refused.

        Raises:
            PlacementError: ``torch.load`` refuses the file.
        """
        try:
            # Elements are read only where an object has some.
            device = "cpu" if _has_storage(value_at(self.tree, path)) else "meta"
            if device not in self._loaded:
                stream: Any = self._part.stream()
                if restricted:
                    self._loaded[device] = load_plain(stream, device)
                else:
                    self._loaded[device] = torch.load(
                        stream, map_location=device, weights_only=False
                    )
            return value_at(self._loaded[device], path)
        except Exception as error:  # of any type, by what is in the pickle
            headline = f"this object of {self.name} cannot be loaded: {format_error(error)}"
            raise_faults("objects cannot be loaded", [Fault(fqn, headline, _OBJECTS)])
            raise

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def state(self, as_value: Callable[[Path, StridedTensor, bool], Any]) -> Any:
        """Return what is in it, with a value of the caller's for each tensor.

        Args:
            as_value: Called with a tensor's path, with the tensor, and whether a DTensor is around.
        """

        def made(value: Any, path: Path) -> Any:
            if isinstance(value, Mapping):
                return {key: made(inner, (*path, key)) for key, inner in value.items()}
            if isinstance(value, list):
                return [made(inner, (*path, at)) for at, inner in enumerate(value)]
            tensor, is_dtensor = _saved_tensor(value)
            return value if tensor is None else as_value(path, tensor, is_dtensor)

        return made(self.tree, ())


_OTHER = (
    "likely:      the file is of another save, or was written again; or the tensor has a class of "
    "its own (quantized, float8), whose elements cannot be read in place",
    "way out:     the files of one save; a tensor with a class of its own in the topology that "
    "saved it, without a resharder",
)


_OBJECTS = (
    "likely:      with restricted=True, objects in the file that name more than plain values",
    "way out:     torch.serialization.add_safe_globals for what you trust; or leave this key out",
)


def _saved_tensor(value: Any) -> tuple[StridedTensor | None, bool]:
    """Return the plain tensor that a parameter or a DTensor has inside, and if it is a DTensor."""
    if type(value) is not Made:
        return None, False
    if value.by == "torch._utils._rebuild_parameter":
        return _saved_tensor(value.args[0])
    if value.by == "torch._tensor._rebuild_from_type_v2" and len(value.args) == 4:
        made_by, kind, args, state = value.args
        fields = state[-1] if isinstance(state, tuple) else state
        name = kind.name if type(kind) is Call else ""
        if name.endswith(".DTensor") and isinstance(fields, dict):
            return _saved_tensor(fields.get(LOCAL_TENSOR))[0], True
        if name in ("torch.Tensor", "torch.nn.parameter.Parameter"):  # with attributes
            return _saved_tensor(Made(made_by.name, args))
    return strided_tensor(value), False


def _has_storage(value: Any) -> bool:
    """Whether an object has elements of a tensor in it."""
    todo, known = [value], 0
    while todo and known < 1 << 20:
        value, known = todo.pop(), known + 1
        if type(value) is Storage:
            return True
        if isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif type(value) is Made:
            todo += value.args
    return bool(todo)


def _in_storage(tensor: StridedTensor, at: Location) -> tuple[int, tuple[int, ...]]:
    """Return where a chunk begins in the storage of its tensor, and its strides there.

    Of the second column of a ``(4, 3)`` tensor that was saved transposed, from element 1 of C order
    by steps of 3: from element 4 of the storage, by steps of 1.
    """
    offset, start = tensor.offset, at.start
    strides: dict[int, int] = {}
    for size, step, stride in zip(
        tensor.shape, c_strides(tensor.shape), tensor.strides, strict=True
    ):
        index, start = divmod(start, step)
        offset += index * stride
        if size > 1:
            strides[step] = stride
    return offset, tuple([strides.get(step, 0) for step in at.steps])
