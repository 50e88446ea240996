"""Tensors assembled from boxes of stored ones: renamed, split, unstacked, stacked.

The boxes of every rename (``renamed_boxes``) become blocks: which box of the new tensor is which
box of which stored one. Nothing is read for that, so every fault is reported before anything is
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import itemgetter
from typing import NamedTuple

import torch

from dcp_placements.errors import (
    CannotLook,
    CannotPlace,
    Fault,
    format_faults,
)
from dcp_placements.layout.boxes import common
from dcp_placements.layout.sharding import Box
from dcp_placements.names.rename_results import (
    OfWhole,
    Parts,
    Rename,
    Renamed,
    Row,
    Rows,
    Target,
    moved_box,
    renamed_boxes,
)
from dcp_placements.names.renames import check_braces
from dcp_placements.offline.box_reads import BoxReader, Stretch, is_contiguous, position
from dcp_placements.offline.checkpoint import SourceTensor, StoredTensor
from dcp_placements.short_text import format_names


class ComputedTensor(SourceTensor):
    """A tensor that is computed from stored ones: it stands where a stored one may."""

    __slots__ = ()

    def read(self, reader: BoxReader, box: Box) -> torch.Tensor:
        """Return the elements of a box.

        Raises:
            PlacementError: As ``BoxReader.read``.
        """
        raise NotImplementedError


AnyTensor = StoredTensor | ComputedTensor


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """A box of a tensor, and the box of a stored tensor that has its elements."""

    box: Box  # the box in the tensor
    source: AnyTensor  # the stored tensor, or a computed one
    stored_box: Box  # the box in the stored tensor
    # For each dim of the stored tensor, that of the tensor; None for a dim that the tensor lacks,
    # along which ``stored_box`` has size 1
    dims: tuple[int | None, ...]

    @property
    def is_turned(self) -> bool:
        """Whether the tensor has dims of the stored one in another order."""
        kept = [dim for dim in self.dims if dim is not None]
        return kept != sorted(kept)

    def turned(self, elements: torch.Tensor) -> torch.Tensor:
        """Return elements of the stored tensor, with their dims in the order of the tensor's."""
        if not self.is_turned:
            return elements
        # A dim that the tensor lacks has size 1, and may stand anywhere.
        return elements.permute(sorted(range(len(self.dims)), key=lambda dim: self.dims[dim] or 0))

    def source_box(self, inner: Box) -> Box:
        """Return the box of the stored tensor for a box inside ``box``."""
        return moved_box(inner, self.box, self.stored_box, self.dims)


@dataclass(frozen=True, slots=True)
class AssembledTensor(SourceTensor):
    """A tensor to write."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[SourceBlock, ...]  # the blocks that tile it

    def read(self, reader: BoxReader, box: Box) -> torch.Tensor:
        """Return the elements of a box, contiguous.

        Raises:
            PlacementError: As ``BoxReader.read``.
        """
        into: torch.Tensor | None = None
        for block in self.blocks:
            shared = common(block.box, box)
            if shared is None:
                continue
            source, of_source = block.source, block.source_box(shared)
            if isinstance(source, ComputedTensor):
                read = source.read(reader, of_source)
            else:
                read = reader.read(source, of_source)
            elements = block.turned(read).reshape(shared.sizes).to(self.dtype)
            if shared == box:
                return elements.contiguous()
            if into is None:
                into = torch.empty(box.sizes, dtype=self.dtype, device="cpu")
            spans = zip(shared.offsets, box.offsets, shared.sizes, strict=True)
            into[tuple(slice(a - b, a - b + n) for a, b, n in spans)] = elements
        return torch.empty(box.sizes, dtype=self.dtype, device="cpu") if into is None else into

    def stretches(self, reader: BoxReader, box: Box) -> list[Stretch] | None:
        """Return the stretches of file bytes that are the elements of a box, in C order.

        None if there are no such stretches, if dtypes differ, or if the stretches are too short.
        """
        stretches: list[tuple[int, Stretch]] = []  # each with its start in the box
        for block in self.blocks:
            shared = common(block.box, box)
            if shared is None:
                continue
            source = block.source
            if source.dtype != self.dtype or not is_contiguous(shared.sizes, box.sizes):
                return None
            if isinstance(source, ComputedTensor) or block.is_turned:
                return None  # no file has its elements in this order
            if source.count > 1 and box.numel * self.dtype.itemsize < SHORT_NBYTES:
                return None  # its stretches are too short
            offsets = [a - b for a, b in zip(shared.offsets, box.offsets, strict=True)]
            start = position(offsets, box.sizes) * self.dtype.itemsize
            read = reader.stretches(source, block.source_box(shared))
            if read is None:
                return None
            stretches += [(start + stretch.start, stretch) for stretch in read]
        if len(stretches) > 1 and len(stretches) * SHORT_NBYTES > box.numel * self.dtype.itemsize:
            return None
        return [stretch for _, stretch in sorted(stretches, key=itemgetter(0))]


SHORT_NBYTES = 64 << 10
"""Stretches shorter than this on average are read and assembled in memory."""


class _Answered(NamedTuple):
    """A stored tensor, and the answer of the rename for its name."""

    name: str
    tensor: AnyTensor
    answer: Renamed

    def is_split_scalar(self) -> bool:
        """Whether it is a 0-d tensor that becomes one tensor per row or part."""
        return isinstance(self.answer, Rows | Parts) and not self.tensor.shape


class _TensorEntry(NamedTuple):
    """A stored tensor, the answer of the rename for its name, and one of its targets."""

    name: str
    tensor: AnyTensor
    answer: Renamed
    target: Target


def assemble(
    tensors: Mapping[str, AnyTensor], rename: Rename | None
) -> tuple[dict[str, AssembledTensor], list[Fault]]:
    """Return the tensors that a rename makes of stored ones, by their new names, and its faults.

    Args:
        tensors: Stored or computed tensors, by the names that are renamed.
        rename: Name to name, or to a ``Row``, ``Rows`` or ``Parts``; None changes nothing. A name
            without an answer (a ``LookupError`` or ``ValueError``, None, or "") is a fault.
    """
    if rename is None:
        return {fqn: _as_it_is(fqn, tensor) for fqn, tensor in tensors.items()}, []
    faults: list[Fault] = []
    answers: list[_Answered] = []
    for name, tensor in tensors.items():
        answer = _answer(rename, name)
        if isinstance(answer, Fault):
            faults.append(answer)
        else:
            answers.append(_Answered(name, tensor, answer))
    # Scalars of optimizer state come last: they have as many rows as the state beside them.
    answers.sort(key=_Answered.is_split_scalar)
    rows: dict[str, int] = {}
    entries: dict[str, list[_TensorEntry]] = {}
    for name, tensor, answer in answers:
        parent = name.rpartition(".")[0]
        try:
            targets = renamed_boxes(answer, tensor.shape, rows=rows.get(parent, 1))
        except CannotPlace as error:
            faults.append(error.fault(name))
            continue
        if isinstance(answer, Rows | Parts) and tensor.shape:
            rows[parent] = len(targets) // len(answer.fqns)
        for target in targets:
            if "{}" in target.fqn and "{}" not in name:
                headline = f"rename= makes {target.fqn} of it, and it is no stack of numbered rows"
                likely = "likely:      it has the name that the rename gives already: no rename"
                faults.append(Fault(name, headline, (likely,)))
                continue
            same = entries.setdefault(target.fqn, [])
            if same and not (isinstance(answer, Row) and isinstance(same[0].answer, Row)):
                first = same[0].name
                of = f"both {first} and {name}" if first != name else f"several parts of {name}"
                faults.append(Fault(target.fqn, f"rename= gives this one name to {of}"))
            else:
                same.append(_TensorEntry(name, tensor, answer, target))
    position = {name: index for index, name in enumerate(tensors)}
    ordered = sorted(entries, key=lambda fqn: position[entries[fqn][0].name])
    joined = {fqn: _joined(fqn, entries[fqn], faults) for fqn in ordered}
    return {fqn: tensor for fqn, tensor in joined.items() if tensor is not None}, faults


def assembled(
    path: str, tensors: Mapping[str, StoredTensor], rename: Rename | None
) -> dict[str, AssembledTensor]:
    """Return the tensors that a rename makes of a checkpoint's, by their new keys.

    Raises:
        CannotLook: The rename does not fit some tensor; every fault is in the message.
    """
    renamed, faults = assemble(tensors, rename)
    if faults:
        raise CannotLook(format_faults(f"{path}: cannot be renamed", faults))
    return renamed


def _as_it_is(fqn: str, tensor: AnyTensor) -> AssembledTensor:
    block = SourceBlock(tensor.whole, tensor, tensor.whole, tuple(range(len(tensor.shape))))
    return AssembledTensor(fqn, tensor.shape, tensor.dtype, (block,))


def _answer(rename: Rename, name: str) -> Renamed | Fault:
    """Return the answer of a rename, or the fault that it has none."""
    try:
        new = rename(name)
        check_braces(name, new)
    except CannotPlace as error:
        return error.fault(name)
    except (LookupError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        if isinstance(new, Row | OfWhole) or (isinstance(new, str) and new):
            return new
        reason = f"it returned {new!r}"
    way_out = "way out:     a name for every key; exclude= of an export leaves keys out"
    return Fault(name, f"rename= has no name for it: {reason}", (way_out,))


def _joined(fqn: str, entries: list[_TensorEntry], faults: list[Fault]) -> AssembledTensor | None:
    """Return the tensor that entries make; None, and a fault, if their rows do not make it."""
    stacked = [(e.name, e.tensor, e.answer) for e in entries if isinstance(e.answer, Row)]
    kinds = {
        (
            e.answer.axes if isinstance(e.answer, Row) else (),
            isinstance(e.answer, Row) and e.answer.transposed,
            e.tensor.dtype,
            e.tensor.shape,
        )
        for e in entries
    }
    if len(kinds) > 1:
        details = [
            f"{name}: {tensor.dtype}, {tensor.shape}, of {row.whole_text()}"
            for name, tensor, row in stacked[:4]
        ]
        headline = "rows of different dtypes, shapes or totals cannot be stacked"
        faults.append(Fault(fqn, headline, tuple(details)))
        return None
    names: dict[tuple[int, ...], str] = {}
    for name, _, row in stacked:
        if row.indices in names:
            which = " within ".join(map(str, row.indices))
            headline = f"both {names[row.indices]} and {name} are row {which} of it"
            faults.append(Fault(fqn, headline))
        names[row.indices] = name
    ((axes, _, dtype, _),) = kinds
    rows = product(*[range(total) for total, _ in axes]) if axes else ()
    missing = [" within ".join(map(str, row)) for row in rows if row not in names]
    if missing:
        count = prod([total for total, _ in axes])
        headline = f"of {count} rows these are missing: {format_names(missing)}"
        faults.append(Fault(fqn, headline))
        return None
    blocks = []
    for e in entries:
        of_target = {origin: dim for dim, origin in enumerate(e.target.dims)}
        dims = tuple([of_target.get(dim) for dim in range(len(e.tensor.shape))])
        blocks += [SourceBlock(box, e.tensor, source, dims) for source, box in e.target.boxes]
    return AssembledTensor(fqn, entries[0].target.shape, dtype, tuple(blocks))
