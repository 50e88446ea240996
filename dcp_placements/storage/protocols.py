"""Interfaces between storage and planners, beyond those of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from dcp_placements._torch import (
    MetadataIndex,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    filled,
)
from dcp_placements.report import LoadReport


@dataclass(frozen=True, slots=True)
class WriteGroup:
    """Small tensors that a rank writes, of one dtype and shape, at one place of their wholes.

    Attributes:
        fqns: Their keys.
        data: What the write items of all of them say of the tensor.
        kind: Of the write items.
        tensors: Their elements, where these are of the chunk's sizes.
    """

    fqns: Sequence[str]
    data: TensorWriteData
    kind: WriteItemType
    tensors: Sequence[torch.Tensor]

    def items(self) -> list[WriteItem]:
        """Return the write items."""
        return [write_item(fqn, self.data, self.kind) for fqn in self.fqns]


def write_item(fqn: str, data: TensorWriteData, kind: WriteItemType) -> WriteItem:
    """Return the item that writes a chunk of a tensor."""
    index = filled(MetadataIndex, {"fqn": fqn, "offset": data.chunk.offsets, "index": None})
    attributes = {"index": index, "type": kind, "bytes_io_data": None, "tensor_data": data}
    return filled(WriteItem, attributes)


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Small tensors that a rank fills, each with one stored chunk, at one place of their wholes.

    Attributes:
        fqns: Their keys.
        first: The read item of the first of them; those of the others differ in the key alone.
        dtype: Of the chunks.
        tensors: What is filled: all elements of each.
    """

    fqns: Sequence[str]
    first: ReadItem
    dtype: torch.dtype
    tensors: Sequence[torch.Tensor]

    def item(self, at: int) -> ReadItem:
        """Return the read item of one of the keys."""
        fqn = {"fqn": self.fqns[at]}
        dest = filled(MetadataIndex, vars(self.first.dest_index) | fqn)
        source = filled(MetadataIndex, vars(self.first.storage_index) | fqn)
        return filled(ReadItem, vars(self.first) | {"dest_index": dest, "storage_index": source})


@runtime_checkable
class RunsByThread(Protocol):
    """A planner that may be in use for another save or load in another thread."""

    def joining(self) -> Callable[[], None]:
        """Return what another thread calls to take part in the save or load of this one."""
        ...


def joining(planner: object) -> Callable[[], None]:
    """Return what another thread calls before it calls a planner for this one."""
    return planner.joining() if isinstance(planner, RunsByThread) else lambda: None


@runtime_checkable
class WantsReader(Protocol):
    """The data sent with a load plan that depends on whether the reader calls ``AfterReads``."""

    def with_reader(self) -> Any:
        """Return the data to send from a rank whose reader does."""
        ...


@runtime_checkable
class AfterReads(Protocol):
    """A load planner with work to do after a rank has read its items.

    Attributes:
        report: Where the reader counts what it moved.
    """

    report: LoadReport

    def finish_reads(self, error: BaseException | None) -> None:
        """Finish, or raise.

        Args:
            error: The error of this rank's reads; None if they succeeded.
        """
        ...
