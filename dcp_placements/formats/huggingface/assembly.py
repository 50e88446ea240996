"""Tensors of one checkpoint made of boxes of another's: renamed, split, unstacked, stacked.

What a rename says of every key becomes a list of blocks: which box of the made tensor is which box
of which stored one. Nothing is read for that, so all that can be wrong is told before anything is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from dcp_placements.errors import Fault, format_names
from dcp_placements.layout.byte_ranges import c_strides
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import intersection
from dcp_placements.names.keys import Parts, RenameError, Row, Rows
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.offline.box_reads import BoxReader, is_run, pieces
from dcp_placements.offline.checkpoint import StoredTensor

Rename = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a tensor, and the elements that belong there.

    Attributes:
        box: In the tensor.
        source: Where its elements are.
        at: Which of them.
        dims: For each dim of the tensor the source's, ascending; None for one that the source
            lacks. The source's other dims have one element in ``at``.
    """

    box: Box
    source: StoredTensor
    at: Box
    dims: tuple[int | None, ...]

    def source_box(self, piece: Box) -> Box:
        """Return which box of the source belongs into a piece of ``box``."""
        offsets, sizes = list(self.at.offsets), [1] * len(self.at.sizes)
        for dim, origin in enumerate(self.dims):
            if origin is not None:
                offsets[origin] += piece.offsets[dim] - self.box.offsets[dim]
                sizes[origin] = piece.sizes[dim]
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor to be made.

    Attributes:
        fqn: Its key.
        shape: Whole.
        dtype: Its elements'.
        blocks: They tile it.
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
            found = read.reshape(shared.sizes).to(self.dtype)
            if shared == piece:
                return found.contiguous()
            if into is None:
                into = torch.empty(piece.sizes, dtype=self.dtype)
            spans = zip(shared.offsets, piece.offsets, shared.sizes, strict=True)
            into[tuple(slice(a - b, a - b + n) for a, b, n in spans)] = found
        return torch.empty(piece.sizes, dtype=self.dtype) if into is None else into

    def slabs(self, reader: BoxReader, limit_nbytes: int) -> Iterator[torch.Tensor]:
        """Yield its elements in C order, piece by piece; what is read takes three times that."""
        wide = max((block.source.dtype.itemsize for block in self.blocks), default=1)
        wide = max(wide, self.dtype.itemsize)
        for piece in pieces(self.whole, max(limit_nbytes // wide, 1)):
            yield self.read(reader, piece)

    def runs(self, reader: BoxReader) -> list[tuple[str, int, int]] | None:
        """Return ``(file, start, bytes)`` in whose order the elements stand in files already.

        None where they do not, or are of another dtype, or in runs too short to be worth it.
        """
        found: list[tuple[int, str, int, int]] = []
        for block in self.blocks:
            if block.source.dtype != self.dtype or not is_run(block.box.sizes, self.shape):
                return None
            start = _offset(block.box.offsets, self.shape) * self.dtype.itemsize
            read = reader.runs(block.source, block.at)
            if read is None:
                return None
            found += [(start + at, *run) for at, *run in read]  # type: ignore[misc]
        found.sort()
        if len(found) * SHORT_NBYTES > self.nbytes and len(found) > 1:
            return None
        return [(file, start, nbytes) for _, file, start, nbytes in found]


SHORT_NBYTES = 64 << 10
"""Runs shorter than this on average are read and put together in memory."""


def _offset(offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return sum(a * b for a, b in zip(offsets, c_strides(shape), strict=True))


def assemble(
    tensors: Mapping[str, StoredTensor], rename: Rename | None
) -> tuple[list[Made], list[Fault]]:
    """Return the tensors that renamed ones make, in their order, and what is wrong with the names.

    Args:
        tensors: By the names that ``rename`` is asked about.
        rename: Name to name, or to a ``Row``, ``Rows`` or ``Parts``; None changes nothing. A name
            without an answer (an exception of its own, None, or an empty one) is a fault.
    """
    return _Assembler(rename).assemble(tensors)


class _Assembler:
    def __init__(self, rename: Rename | None) -> None:
        self.rename = rename
        self.made: dict[str, Made] = {}
        self.origin: dict[str, str] = {}
        self.stacks: dict[str, list[tuple[Row, str, StoredTensor]]] = {}
        self.rows: dict[str, int] = {}
        self.states = OptimizerStates()
        self.faults: list[Fault] = []

    def assemble(self, tensors: Mapping[str, StoredTensor]) -> tuple[list[Made], list[Fault]]:
        several: list[tuple[str, StoredTensor, Rows | Parts]] = []
        self.states = OptimizerStates(tensors)
        for name, tensor in tensors.items():
            try:
                new = name if self.rename is None else self.rename(name)
            except RenameError as error:
                self.faults.append(Fault(name, error.headline, error.details))
                continue
            except (LookupError, ValueError) as error:
                self._nameless(name, f"{type(error).__name__}: {error}")
                continue
            if isinstance(new, Row) and new.within:
                self._fault(
                    new.fqn,
                    f"{name} is a row of a row: rows are stacked along one dim here",
                    "way out:     one Stack per key, in rename=",
                )
            elif isinstance(new, Row):
                if new.fqn not in self.stacks:
                    self._add(name, Made(new.fqn, (), tensor.dtype, ()))
                self.stacks.setdefault(new.fqn, []).append((new, name, tensor))
            elif isinstance(new, Rows | Parts):
                several.append((name, tensor, new))
            elif isinstance(new, str) and new:
                block = Block(tensor.whole, tensor, tensor.whole, tuple(range(len(tensor.shape))))
                self._add(name, Made(new, tensor.shape, tensor.dtype, (block,)))
            else:
                self._nameless(name, f"it gave {new!r}")
        # Scalars of optimizer state ask how many rows their parameter has.
        for name, tensor, told in sorted(several, key=lambda one: not one[1].shape):
            self._take_apart(name, tensor, told)
        for fqn, rows in self.stacks.items():
            self._stack(fqn, rows)
        return sorted(self.made.values(), key=self._place(tensors)), self.faults

    def _take_apart(self, name: str, tensor: StoredTensor, told: Rows | Parts) -> None:
        """Make a tensor per row, per part, or per part of each row."""
        row_dim = told.dim if isinstance(told, Rows) else told.rows
        fqns = (told.fqn,) if isinstance(told, Rows) else told.fqns
        shape = tensor.shape
        state = self.states.of(name)
        run = name if state is None else state.parameter
        if not shape:
            count = self.rows.get(run, 1)
            block = Block(tensor.whole, tensor, tensor.whole, ())
            for number in range(count):
                for fqn in fqns:
                    at = fqn.replace("{}", str(number))
                    self._add(name, Made(at, (), tensor.dtype, (block,)))
            return
        if row_dim is not None and not -len(shape) <= row_dim < len(shape):
            self._fault(name, f"cannot be unstacked on dim {row_dim}: its shape is {shape}")
            return
        rest = list(range(len(shape)))
        if row_dim is not None:
            rest.pop(row_dim)
        count = 1 if row_dim is None else shape[row_dim]
        self.rows[run] = count
        part_dim, spans = None, [[(0, 0)]]
        if isinstance(told, Parts):
            try:
                part_dim = rest[told.dim]
                spans = told.spans(shape[part_dim])
            except (IndexError, ValueError) as error:
                self._fault(name, f"cannot be split: its shape is {shape}", str(error))
                return
        for number in range(count):
            for fqn, runs_of_part in zip(fqns, spans, strict=True):
                at = fqn.replace("{}", str(number))
                blocks = []
                made = list(shape)
                if part_dim is not None:
                    made[part_dim] = sum(stop - start for start, stop in runs_of_part)
                filled = 0
                for start, stop in runs_of_part:
                    offsets, sizes, place = [0] * len(shape), list(shape), [0] * len(shape)
                    if row_dim is not None:
                        offsets[row_dim], sizes[row_dim] = number, 1
                    if part_dim is not None:
                        offsets[part_dim], sizes[part_dim] = start, stop - start
                        place[part_dim] = filled
                        filled += stop - start
                    blocks.append(
                        Block(
                            Box(_picked(place, rest), _picked(sizes, rest)),
                            tensor,
                            Box(tuple(offsets), tuple(sizes)),
                            tuple(rest),
                        )
                    )
                self._add(name, Made(at, _picked(made, rest), tensor.dtype, tuple(blocks)))

    def _stack(self, fqn: str, rows: list[tuple[Row, str, StoredTensor]]) -> None:
        """Make one tensor of its rows."""
        kinds = {(row.total, row.dim, tensor.dtype, tensor.shape) for row, _, tensor in rows}
        if len(kinds) > 1:
            told = [f"{name}: {t.dtype}, {t.shape}, of {row.total}" for row, name, t in rows[:4]]
            self._fault(fqn, "rows of different dtypes, shapes or totals cannot be stacked", *told)
            return
        ((total, dim, dtype, shape),) = kinds
        if not -len(shape) - 1 <= dim <= len(shape):
            self._fault(fqn, f"rows of shape {shape} cannot be stacked on dim {dim}")
            return
        dim %= len(shape) + 1
        names: dict[int, str] = {}
        blocks = []
        for row, name, tensor in rows:
            if row.index in names:
                self._fault(fqn, f"both {names[row.index]} and {name} are row {row.index} of it")
            names[row.index] = name
            dims = list(range(len(shape)))
            box = Box(
                (*(0,) * dim, row.index, *(0,) * (len(shape) - dim)),
                (*shape[:dim], 1, *shape[dim:]),
            )
            blocks.append(Block(box, tensor, tensor.whole, (*dims[:dim], None, *dims[dim:])))
        missing = [str(number) for number in range(total) if number not in names]
        if missing:
            self._fault(fqn, f"of {total} rows these are missing: {format_names(missing)}")
            return
        made = (*shape[:dim], total, *shape[dim:])
        self.made[fqn] = Made(fqn, made, dtype, tuple(blocks))

    def _add(self, name: str, made: Made) -> None:
        known = self.origin.setdefault(made.fqn, name)
        if made.fqn in self.made:
            both = f"to both {known} and {name}" if known != name else f"to several parts of {name}"
            self._fault(made.fqn, f"rename= gives this one name {both}")
            return
        self.made[made.fqn] = made

    def _place(self, tensors: Mapping[str, StoredTensor]) -> Callable[[Made], int]:
        order = {name: place for place, name in enumerate(tensors)}
        return lambda made: order[self.origin[made.fqn]]

    def _nameless(self, name: str, told: str) -> None:
        self._fault(name, f"rename= has no name for it: {told}", *_NAMELESS)

    def _fault(self, fqn: str, headline: str, *details: str) -> None:
        self.faults.append(Fault(fqn, headline, details))


_NAMELESS = ("way out:     a name for every key; exclude= of an export leaves keys out",)


def _picked(values: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    return tuple([values[dim] for dim in dims])
