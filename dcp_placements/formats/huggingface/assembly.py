"""Tensors assembled from boxes of stored ones: renamed, split, unstacked, stacked.

The boxes of every rename (``renamed_boxes``) become blocks: which box of the new tensor is which
box of which stored one. Nothing is read for that, so every fault is reported before anything is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from dcp_placements.errors import Fault, format_names
from dcp_placements.layout.byte_ranges import c_strides
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import intersection
from dcp_placements.names.backwards import Original
from dcp_placements.names.boxes import Target, renamed_boxes, whole_shape
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.names.rename_results import Parts, Renamed, RenameError, Row, Rows
from dcp_placements.names.renamed_keys import format_axes
from dcp_placements.offline.box_reads import BoxReader, is_run, pieces
from dcp_placements.offline.checkpoint import StoredTensor

Rename = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a tensor, and the box of a stored tensor that has its elements.

    Attributes:
        box: The box in the tensor.
        source: The stored tensor.
        at: The box in the stored tensor.
        dims: For each dim of the tensor the source's, ascending; None for one that the source
            lacks. The source's other dims have one element in ``at``.
    """

    box: Box
    source: StoredTensor
    at: Box
    dims: tuple[int | None, ...]

    def source_box(self, piece: Box) -> Box:
        """Return the box of the source for a piece of ``box``."""
        offsets, sizes = list(self.at.offsets), [1] * len(self.at.sizes)
        for dim, origin in enumerate(self.dims):
            if origin is not None:
                offsets[origin] += piece.offsets[dim] - self.box.offsets[dim]
                sizes[origin] = piece.sizes[dim]
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class AssembledTensor:
    """A tensor to write.

    Attributes:
        fqn: Its key.
        shape: Its whole shape.
        dtype: Its dtype.
        blocks: The blocks that tile it.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> Box:
        """All of it."""
        return Box((0,) * len(self.shape), self.shape)

    def read(self, reader: BoxReader, piece: Box) -> torch.Tensor:
        """Return the elements of a piece, contiguous.

        Raises:
            PlacementError: As ``BoxReader.read``.
        """
        into: torch.Tensor | None = None
        for block in self.blocks:
            shared = intersection(block.box, piece)
            if shared is None:
                continue
            read = reader.read(block.source, block.source_box(shared))
            elements = read.reshape(shared.sizes).to(self.dtype)
            if shared == piece:
                return elements.contiguous()
            if into is None:
                into = torch.empty(piece.sizes, dtype=self.dtype, device="cpu")
            spans = zip(shared.offsets, piece.offsets, shared.sizes, strict=True)
            into[tuple(slice(a - b, a - b + n) for a, b, n in spans)] = elements
        return torch.empty(piece.sizes, dtype=self.dtype, device="cpu") if into is None else into

    def slabs(self, reader: BoxReader, limit_nbytes: int) -> Iterator[torch.Tensor]:
        """Yield its elements in C order, piece by piece; reading takes three times that memory."""
        wide = max((block.source.dtype.itemsize for block in self.blocks), default=1)
        wide = max(wide, self.dtype.itemsize)
        for piece in pieces(self.whole, max(limit_nbytes // wide, 1)):
            yield self.read(reader, piece)

    def runs(self, reader: BoxReader) -> list[tuple[str, int, int]] | None:
        """Return ``(file, start, bytes)`` of the runs in files that hold the elements in C order.

        None if there are no such runs, if the dtypes differ, or if the runs are too short.
        """
        runs: list[tuple[int, str, int, int]] = []
        for block in self.blocks:
            if block.source.dtype != self.dtype or not is_run(block.box.sizes, self.shape):
                return None
            start = _offset(block.box.offsets, self.shape) * self.dtype.itemsize
            read = reader.runs(block.source, block.at)
            if read is None:
                return None
            runs += [(start + at, *run) for at, *run in read]  # type: ignore[misc]
        runs.sort()
        if len(runs) * SHORT_NBYTES > self.nbytes and len(runs) > 1:
            return None
        return [(file, start, nbytes) for _, file, start, nbytes in runs]


SHORT_NBYTES = 64 << 10
"""Runs shorter than this on average are read and assembled in memory."""


def _offset(offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return sum(a * b for a, b in zip(offsets, c_strides(shape), strict=True))


def assemble(
    tensors: Mapping[str, StoredTensor], rename: Rename | None
) -> tuple[list[AssembledTensor], list[Fault]]:
    """Return the tensors that a rename makes of stored ones, in their order, and its faults.

    Args:
        tensors: By the names that are renamed.
        rename: Name to name, or to a ``Row``, ``Rows`` or ``Parts``; None changes nothing. A name
            without an answer (a ``LookupError`` or ``ValueError``, None, or "") is a fault.
    """
    return _Assembler(rename).assemble(tensors)


def assemble_backwards(
    tensors: Mapping[str, StoredTensor], originals: Mapping[str, Original]
) -> tuple[list[AssembledTensor], list[Fault]]:
    """Return the tensors of which a rename makes the stored ones, and the faults.

    Args:
        tensors: By the names that the rename gives.
        originals: By the keys of the tensors to make, what the rename answers (``original_keys``).
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    faults: list[Fault] = []
    assembled: list[AssembledTensor] = []
    used: set[str] = set()
    for key, answer in originals.items():
        try:
            shape = whole_shape(answer, shapes)
            targets = renamed_boxes(answer, shape)
        except RenameError as error:
            faults.append(Fault(key, error.headline, error.details))
            continue
        used.update(target.fqn for target in targets)
        sources = [tensors[target.fqn] for target in targets]
        kinds = {(source.dtype, source.shape): source.fqn for source in reversed(sources)}
        dtype = sources[0].dtype
        if any(source.dtype != dtype for source in sources) or any(
            shapes[target.fqn] != target.shape for target in targets
        ):
            details = [f"{name}: {kind}, {shape}" for (kind, shape), name in kinds.items()][-4:]
            headline = "tensors of different dtypes or shapes cannot be joined"
            faults.append(Fault(key, headline, tuple(reversed(details))))
            continue
        blocks = [
            Block(box, source, at, _inverted(target.dims, len(shape)))
            for target, source in zip(targets, sources, strict=True)
            for box, at in target.boxes
        ]
        assembled.append(AssembledTensor(key, shape, dtype, tuple(blocks)))
    for name in tensors if not faults else ():
        if name not in used:
            faults.append(Fault(name, "a row or a part before it is missing"))
    return assembled, faults


def _inverted(origins: tuple[int | None, ...], ndim: int) -> tuple[int | None, ...]:
    """Return for each of ``ndim`` source dims the dim of the target that it becomes."""
    of_source = {origin: dim for dim, origin in enumerate(origins) if origin is not None}
    return tuple([of_source.get(dim) for dim in range(ndim)])


Entry = tuple[str, StoredTensor, Renamed, Target]
"""A tensor's name and itself, the answer of the rename, and one target of it."""


class _Assembler:
    def __init__(self, rename: Rename | None) -> None:
        self.rename = rename
        self.entries: dict[str, list[Entry]] = {}
        self.rows: dict[str, int] = {}
        self.states = OptimizerStates()
        self.faults: list[Fault] = []

    def assemble(
        self, tensors: Mapping[str, StoredTensor]
    ) -> tuple[list[AssembledTensor], list[Fault]]:
        self.states = OptimizerStates(tensors)
        answers: list[tuple[str, StoredTensor, Renamed]] = []
        for name, tensor in tensors.items():
            answer = self._answer(name)
            if answer is not None:
                answers.append((name, tensor, answer))
        # Scalars of optimizer state come last: they need the number of rows of their parameter.
        answers.sort(key=lambda one: isinstance(one[2], Rows | Parts) and not one[1].shape)
        for name, tensor, answer in answers:
            for target in self._targets(name, tensor, answer):
                self._add((name, tensor, answer, target))
        place = {name: at for at, name in enumerate(tensors)}
        ordered = sorted(self.entries, key=lambda fqn: place[self.entries[fqn][0][0]])
        assembled = [self._assembled(fqn) for fqn in ordered]
        return [tensor for tensor in assembled if tensor is not None], self.faults

    def _answer(self, name: str) -> Renamed | None:
        """Return the answer of the rename; None, with a fault, if it has none."""
        try:
            new = name if self.rename is None else self.rename(name)
        except RenameError as error:
            self._fault(name, error.headline, *error.details)
            return None
        except (LookupError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            if isinstance(new, Row | Rows | Parts) or (isinstance(new, str) and new):
                return new
            reason = f"it returned {new!r}"
        self._fault(name, f"rename= has no name for it: {reason}", NAMELESS)
        return None

    def _targets(self, name: str, tensor: StoredTensor, answer: Renamed) -> list[Target]:
        state = self.states.of(name)
        parameter = name if state is None else state.parameter
        try:
            targets = renamed_boxes(answer, tensor.shape, rows=self.rows.get(parameter, 1))
        except RenameError as error:
            self._fault(name, error.headline, *error.details)
            return []
        if isinstance(answer, Rows | Parts) and tensor.shape:
            self.rows[parameter] = len(targets) // len(answer.fqns)
        return targets

    def _add(self, entry: Entry) -> None:
        name, _, answer, target = entry
        entries = self.entries.setdefault(target.fqn, [])
        if entries and not (isinstance(answer, Row) and isinstance(entries[0][2], Row)):
            first = entries[0][0]
            both = f"to both {first} and {name}" if first != name else f"to several parts of {name}"
            self._fault(target.fqn, f"rename= gives this one name {both}")
            return
        entries.append(entry)

    def _assembled(self, fqn: str) -> AssembledTensor | None:
        """Return a tensor of all its entries; None, with a fault, if its rows do not make it."""
        entries = self.entries[fqn]
        kinds = {
            (answer.axes if isinstance(answer, Row) else (), tensor.dtype, tensor.shape)
            for _, tensor, answer, _ in entries
        }
        if len(kinds) > 1:
            details = [
                f"{name}: {tensor.dtype}, {tensor.shape}, of {format_axes(answer.axes)}"
                for name, tensor, answer, _ in entries[:4]
                if isinstance(answer, Row)
            ]
            headline = "rows of different dtypes, shapes or totals cannot be stacked"
            self._fault(fqn, headline, *details)
            return None
        names: dict[tuple[int, ...], str] = {}
        for name, _, answer, _ in entries:
            if isinstance(answer, Row):
                if answer.indices in names:
                    row = " within ".join(map(str, answer.indices))
                    self._fault(fqn, f"both {names[answer.indices]} and {name} are row {row} of it")
                names[answer.indices] = name
        ((axes, dtype, _),) = kinds
        rows = product(*[range(total) for total, _ in axes]) if axes else ()
        missing = [" within ".join(map(str, row)) for row in rows if row not in names]
        if missing:
            count = prod([total for total, _ in axes])
            self._fault(fqn, f"of {count} rows these are missing: {format_names(missing)}")
            return None
        blocks = [
            Block(box, tensor, at, target.dims)
            for _, tensor, _, target in entries
            for at, box in target.boxes
        ]
        return AssembledTensor(fqn, entries[0][3].shape, dtype, tuple(blocks))

    def _fault(self, fqn: str, headline: str, *details: str) -> None:
        self.faults.append(Fault(fqn, headline, details))


NAMELESS = "way out:     a name for every key; exclude= of an export leaves keys out"
