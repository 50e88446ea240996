"""A file of ``torch.save`` with a whole state dict: where the elements of each tensor are in it.

Nothing in the file is executed: its pickle gives dicts and lists, and stubs for all other objects.
Elements are read in place, as those of DCP's records are.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO, Any, NamedTuple

import torch

from dcp_placements.errors import CannotLook, fault_error
from dcp_placements.names.flat import Path, value_at
from dcp_placements.short_text import format_error
from dcp_placements.storage.file_reads import ByteRange, CountedFile, c_strides, is_damage
from dcp_placements.storage.record_head import (
    BEHIND,
    SIZES_FOLLOW,
    RecordHead,
    Storage,
    TorchUnpickler,
    entry_start,
    strided_tensor,
)
from dcp_placements.storage.record_reads import DAMAGED, IS_DAMAGED
from dcp_placements.storage.safe_pickle import GlobalStandIn, Stub, check_unfolded, most_elements
from dcp_placements.storage.torch_load import BROKEN, load_plain, saved_pickle

_OTHER = (
    "likely:      the file is of another save; or the tensor has a class of its own (quantized, "
    "float8), whose elements cannot be read in place",
    "way out:     the files of one save; such a tensor in the topology that saved it, without a "
    "resharder",
)
_OBJECTS = (
    "likely:      with restricted=True, objects in the file that name more than plain values",
    "way out:     torch.serialization.add_safe_globals for what you trust; or leave this key out",
)


class SavedChunk(NamedTuple):
    """A chunk of a checkpoint's tensor, as a strided view of a tensor in a file.

    The second column of a ``(4, 3)`` tensor has sizes ``(4,)``, start 1 and steps ``(3,)``.

    Attributes:
        path: Path of the tensor in the saved value.
        shape: Shape of the tensor in the file.
        dtype: Dtype of the tensor; None for an object.
        sizes: Sizes of the chunk.
        start: First element of the chunk in the tensor, in C order.
        steps: Distance between neighbours along each dim of the chunk, in elements of C order.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    sizes: tuple[int, ...]
    start: int
    steps: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the chunk is the whole tensor, with its elements in order."""
        return not self.start and (self.sizes, self.steps) == (self.shape, c_strides(self.shape))


Records = dict[tuple[str, str, tuple[int, ...]], RecordHead]
"""Records of chunks, by key, file and offsets in the whole tensor."""


class SavedFile:
    """One file, opened.

    Args:
        name: Name of the file, for messages.
        stream: Stream of the file's bytes.

    Attributes:
        file: The open file, which counts the bytes that are read.

    Raises:
        CannotLook: The service that has the file does not answer, or refuses.
        PlacementError: The file is not a whole file of ``torch.save``.
    """

    def __init__(self, name: str, stream: IO[bytes]) -> None:
        self.name = name
        self._stream = stream
        # Only a buffered file is known to be a plain one.
        is_raw = isinstance(stream, io.FileIO)
        self.file = CountedFile(io.BufferedReader(stream) if is_raw else stream)
        self._part = ByteRange(self.file, 0, self.file.size)
        self._loaded: dict[bool, Any] = {}  # by whether it is restricted
        try:
            data, self._entries = saved_pickle(self._part.stream())
            self._tree: Any = TorchUnpickler(data, self._entries).load()
            check_unfolded([self._tree], most_elements(data))
        except Exception as error:  # a broken pickle can raise anything
            # zipfile takes an error of the service for one of the file.
            reason = error if isinstance(error, OSError) else error.__context__
            if isinstance(reason, OSError) and not is_damage(reason):
                raise CannotLook(f"{name}: it cannot be read: {reason}") from error
            headline = f"cannot be read: {format_error(error)}"
            raise fault_error(IS_DAMAGED, name, headline, *DAMAGED) from error
        self._has_crcs = any(entry.CRC for entry in self._entries.values())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def tensor(self, path: Path) -> RecordHead | None:
        """Return the tensor at a path; None for any other value."""
        try:
            return saved_tensor(value_at(self._tree, path))[0]
        except (LookupError, TypeError):
            return None

    def crc(self, path: Path) -> int | None:
        """Return the CRC-32 of a tensor's elements in C order; None if it is unknown."""
        tensor = self.tensor(path)
        if tensor is None or not tensor.is_contiguous or not self._has_crcs:
            return None
        entry = self._entries.get(tensor.storage)
        return entry.CRC if entry is not None and entry.file_size == tensor.nbytes else None

    def record(self, fqn: str, chunk: SavedChunk) -> tuple[int, int, RecordHead]:
        """Return where a chunk is: its first byte, its size in bytes, and its record.

        Raises:
            PlacementError: The file has another tensor at the path, or none, or ends too early.
        """
        assert chunk.dtype is not None, "a tensor's"
        if 0 in chunk.sizes:
            return 0, 0, RecordHead(chunk.dtype, chunk.sizes, c_strides(chunk.sizes))
        tensor = self.tensor(chunk.path)
        if tensor is None or (tensor.shape, tensor.dtype) != (chunk.shape, chunk.dtype):
            there = "no plain tensor" if tensor is None else f"{tensor.shape} {tensor.dtype}"
            where = f"{self.name} has {there} at {'.'.join(map(str, chunk.path))!r}"
            headline = f"{where}, where {chunk.shape} {chunk.dtype} was saved"
            raise fault_error("the checkpoint is not what it says", fqn, headline, *_OTHER)
        elements = _chunk_of(tensor, chunk)
        entry, nbytes = self._entries.get(elements.storage), elements.span_nbytes
        if entry is None or elements.start + nbytes > entry.file_size:
            raise fault_error(IS_DAMAGED, fqn, f"{self.name} ends before its elements do", *DAMAGED)
        try:
            start = entry_start(self._part.read_into, entry) + elements.start
        except BROKEN as error:
            headline = f"{self.name}: {format_error(error)}"
            raise fault_error(IS_DAMAGED, fqn, headline, *DAMAGED) from error
        is_all = nbytes == entry.file_size and elements.in_order()[0].is_contiguous
        has_crc = is_all and self._has_crcs and bool(entry.flag_bits & SIZES_FOLLOW)
        record = replace(elements, start=0, has_crc=has_crc, storage="")
        return start, nbytes + BEHIND * has_crc, record

    def mapped(self, tensor: RecordHead, file: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor in a mapping of the file, which is its storage.

        Raises:
            Exception: The tensor exceeds its storage, or the file is broken; of any type.
        """
        entry = self._entries[tensor.storage]
        if tensor.nbytes and tensor.start + tensor.span_nbytes > entry.file_size:
            raise ValueError(f"{tensor.shape} elements are beyond the end of their storage")
        start = entry_start(self._part.read_into, entry) + tensor.start
        offset, rest = divmod(start, tensor.dtype.itemsize)
        if rest:
            raise ValueError(f"its elements begin at byte {start}, and are not aligned")
        view = file, offset, tensor.shape, tensor.strides
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(*view)

    def object(self, fqn: str, path: Path, *, restricted: bool) -> Any:
        """Return the object at a path, as ``torch.load`` returns it.

        No elements of tensors are read, unless an object of the file contains tensors.

        Args:
            fqn: Key of the object, for messages.
            path: Path of the object.
            restricted: Whether a pickle that names more than plain values is refused.

        Raises:
            PlacementError: ``torch.load`` refuses the file.
        """
        try:
            if restricted not in self._loaded:
                stream: Any = self._part.stream()
                device = "cpu" if _has_storage(self.state(lambda *_: None)) else "meta"
                self._loaded[restricted] = (
                    load_plain(stream, device)
                    if restricted
                    else torch.load(stream, map_location=device, weights_only=False)
                )
            return value_at(self._loaded[restricted], path)
        except Exception as error:  # of any type, by what is in the pickle
            headline = f"this object of {self.name} cannot be loaded: {format_error(error)}"
            raise fault_error("objects cannot be loaded", fqn, headline, *_OBJECTS) from error

    def state(self, as_value: Callable[[Path, RecordHead, Stub | None], Any]) -> Any:
        """Return the saved value, with a value of the caller's in place of each tensor.

        Args:
            as_value: Called with a tensor's path, the tensor, and the DTensor whose local tensor it
                is, if any.
        """

        def converted(value: Any, path: Path) -> Any:
            if type(value) is Stub and value.contents is not None and value.by != _DEQUE:
                value = value.contents
            if isinstance(value, Mapping):
                return {key: converted(inner, (*path, key)) for key, inner in value.items()}
            if isinstance(value, list):
                return [converted(inner, (*path, index)) for index, inner in enumerate(value)]
            tensor, dtensor = saved_tensor(value)
            return value if tensor is None else as_value(path, tensor, dtensor)

        return converted(self._tree, ())


def _has_storage(value: Any) -> bool:
    """Whether a value contains elements in the file, also in the arguments of stubs."""
    todo, seen = [value], set()
    while todo:
        inner = todo.pop()
        if isinstance(inner, Storage):
            return True
        if isinstance(inner, dict):
            todo += inner.values()
        elif isinstance(inner, list | tuple):
            todo += inner
        elif isinstance(inner, Stub) and inner not in seen:
            seen.add(inner)
            todo += inner.args, inner.state, inner.contents
    return False


_DEQUE = "collections.deque"
"""The only class that a pickle fills like a list and whose elements have no index in a path."""

_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")


def saved_tensor(value: Any) -> tuple[RecordHead | None, Stub | None]:
    """Return the plain tensor inside a parameter or DTensor, and the DTensor.

    A DTensor is a call with four arguments: the function that creates the tensor, the class, the
    function's arguments, and the attributes.
    """
    if type(value) is Stub and value.by in _PARAMETERS:
        return saved_tensor(value.args[0])
    if type(value) is Stub and value.by == "torch._tensor._rebuild_from_type_v2":
        make, kind, args, state = value.args
        name, fields = getattr(kind, "name", ""), state[-1] if type(state) is tuple else state
        if name.endswith(".DTensor") and type(fields) is dict:
            # Its local tensor is the one tensor among its attributes.
            inner = [saved_tensor(field)[0] for field in fields.values()]
            return next(filter(None, inner), None), value
        if isinstance(make, GlobalStandIn) and name in (
            "torch.Tensor",
            "torch.nn.parameter.Parameter",
        ):
            return saved_tensor(Stub(make.name, args))  # one with attributes
    return strided_tensor(value), None


def _chunk_of(tensor: RecordHead, chunk: SavedChunk) -> RecordHead:
    """Return where a chunk of a tensor is in the storage of the tensor.

    The second column of a ``(4, 3)`` tensor of float32 begins at element 1 in C order, with steps
    of 3. If the tensor was saved transposed, the column begins at byte 16 of the storage, with
    steps of 1 element.
    """
    offset, start = 0, chunk.start
    strides: dict[int, int] = {}
    dims = zip(tensor.shape, c_strides(tensor.shape), tensor.strides, strict=True)
    for size, step, stride in dims:
        index, start = divmod(start, step)
        offset += index * stride
        if size > 1:
            strides[step] = stride
    steps = tuple([strides.get(step, 0) for step in chunk.steps])
    start = tensor.start + offset * tensor.dtype.itemsize
    return replace(tensor, shape=chunk.sizes, strides=steps, start=start)
