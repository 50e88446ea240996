"""What a rename answers for a key, and what the answer means for boxes.

An answer (a name, a ``Row``, ``Rows``, ``Parts`` or ``Transposed``) and the shape of the tensor
give the targets: the checkpoint's tensors and, for each, pairs of equal boxes. Expert 2 of 8, of
shape ``(4, 3)``, as ``Row("experts.w", 2, 8)`` has one target ``experts.w`` of shape ``(8, 4, 3)``,
where its ``[0:4, 0:3]`` is ``[2:3, 0:4, 0:3]``. Integers only. The planners use the targets for the
chunks of a rank, the command line for whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

from dcp_placements.errors import CannotPlace
from dcp_placements.layout.boxes import Shape, common
from dcp_placements.layout.sharding import Box, Chunk

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """The answer of a rename for a tensor that is one row of a stacked one in the checkpoint.

    For example a parameter of one expert, if the checkpoint has one tensor ``[experts, ...]``.

    Attributes:
        fqn: The checkpoint's key, one for all rows.
        index: The index of the row.
        total: The count of rows.
        dim: The dim of the stacked tensor that the rows lie along; its other dims are those of
            the row.
        within: The rows of larger stacks that the stack itself is, from the inside out: its layer,
            for example, if the checkpoint has one tensor ``[layers, experts, ...]``. Their ``fqn``
            is not used.
        transposed: Whether the last two dims of the row are swapped.

    Raises:
        CannotPlace: ``index`` is not among the rows; a ``PlacementError``.
    """

    fqn: str
    index: int
    total: int
    dim: int = 0
    within: tuple[Row, ...] = ()
    transposed: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.total:
            raise CannotPlace(f"rename() gave row {self.index} of {self.total} for it")

    @property
    def rows(self) -> tuple[Row, ...]:
        """This row, then those of ``within``, from the inside out."""
        return (self, *self.within)

    @property
    def axes(self) -> tuple[tuple[int, int], ...]:
        """``(total, dim)`` of each of ``rows``: equal for all rows of one stack."""
        return tuple([(row.total, row.dim) for row in self.rows])

    @property
    def form(self) -> tuple[Any, ...]:
        """All but the name: of tensors with equal places, rows of one form have equal places."""
        return self.axes, self.indices, self.transposed

    def whole_text(self) -> str:
        """Return the count of rows and the dim of each of ``rows``, as text."""
        text = " within ".join([f"{total} rows on dim {dim}" for total, dim in self.axes])
        return f"{text}, transposed" if self.transposed else text

    @property
    def indices(self) -> tuple[int, ...]:
        """``index`` of each of ``rows``: different for each row of a stack."""
        return tuple([row.index for row in self.rows])


@dataclass(frozen=True, slots=True)
class Rows:
    """The answer of a rename for a stacked tensor that is one tensor per row in the checkpoint.

    Attributes:
        fqn: The checkpoint's keys, with ``{}`` for the number of the row.
        stacked: The name of the whole tensor in rules and messages.
        dim: The dim of the stacked tensor that the rows lie along.
        transposed: Whether the last two dims of each row are swapped.
    """

    fqn: str
    stacked: str
    dim: int = 0
    transposed: bool = field(default=False, repr=False)

    @property
    def fqns(self) -> tuple[str, ...]:
        """The checkpoint's keys of one row."""
        return (self.fqn,)

    @property
    def form(self) -> tuple[Any, ...]:
        """All but the names, as of a ``Row``."""
        return "rows", self.dim, self.transposed


@dataclass(frozen=True, slots=True)
class Parts:
    """The answer of a rename for a fused tensor that is one tensor per part in the checkpoint.

    Attributes:
        fqns: The checkpoint's keys, in the order of the parts; ``{}`` for the number where the
            rows of a stack are fused.
        whole: The name of the fused tensor in rules and messages.
        dim: The dim of the fused tensor, or of each row, that the parts lie along.
        sizes: The sizes of the parts relative to each other.
        groups: The number of times that the sequence of parts repeats.
        rows: The dim that the rows of a stack lie along; None if it is not a stack.
        transposed: Whether the last two dims of each part are swapped.
        dim_after: Whether ``dim`` is a dim of the fused tensor after its last two are swapped.
    """

    fqns: tuple[str, ...]
    whole: str
    dim: int
    sizes: tuple[int, ...]
    groups: int = 1
    rows: int | None = None
    transposed: bool = field(default=False, repr=False)
    dim_after: bool = field(default=False, repr=False)

    @property
    def fqn(self) -> str:
        """All keys of one fused tensor, as one text."""
        return " + ".join(self.fqns)

    @property
    def form(self) -> tuple[Any, ...]:
        """All but the names, as of a ``Row``."""
        parts = self.dim, self.sizes, self.groups, self.rows
        return "parts", *parts, self.transposed, self.dim_after

    @property
    def stacked(self) -> str:
        """The name of the fused tensor in rules and messages."""
        return self.whole


@dataclass(frozen=True, slots=True)
class Transposed:
    """The answer of a rename for a tensor whose last two dims the checkpoint has swapped.

    A tensor of fewer dims is the same in the checkpoint.

    Attributes:
        fqn: The checkpoint's key.
    """

    fqn: str
    dim: None = None
    transposed: bool = True

    @property
    def fqns(self) -> tuple[str, ...]:
        """The checkpoint's key, as the only one."""
        return (self.fqn,)

    @property
    def form(self) -> tuple[Any, ...]:
        """All but the name, as of a ``Row``."""
        return ("transposed",)

    @property
    def stacked(self) -> str:
        """The name of the tensor in rules and messages."""
        return self.fqn


OfWhole = Rows | Parts | Transposed
"""The answers for a tensor that is no row of another one."""

Renamed = str | Row | OfWhole
Rename = Callable[[str], Renamed]


def texts_of(name: Renamed) -> tuple[str, ...]:
    """Return the checkpoint's keys in an answer, ``{}`` for the number of each row of a tensor.

    >>> texts_of(Row("experts.w", 2, 8)), texts_of(Parts(("gate", "up"), "gate_up", 0, (1, 1)))
    (('experts.w',), ('gate', 'up'))
    """
    match name:
        case str():
            return (name,)
        case Row():
            return (name.fqn,)
        case Rows() | Parts() | Transposed():
            return name.fqns
        case _:
            raise CannotPlace(f"rename() gave {name!r}, which is no key, Row, Rows or Parts")


def with_texts(name: Renamed, texts: Sequence[str]) -> Renamed:
    """Return an answer with other keys, as many as ``texts_of`` returns."""
    match name:
        case str():
            return texts[0]
        case Row() | Rows() | Transposed():
            return replace(name, fqn=texts[0])
        case Parts():
            return replace(name, fqns=tuple(texts))


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that a rename makes of a source tensor, or adds the source tensor to.

    Attributes:
        fqn: The key of the target.
        shape: Its whole shape, in elements.
        dims: For each of its dims, the dim of the source; None for a dim of a stack, where the
            source has one index. A dim of the source that is not there has one index, too.
        boxes: Pairs ``(source box, target box)`` of equal elements, each in its own coordinates.
    """

    fqn: str
    shape: Shape
    dims: tuple[int | None, ...]
    boxes: tuple[tuple[Box, Box], ...]

    def chunks(self, chunks: Iterable[Chunk], row: int = 0) -> tuple[Chunk, ...]:
        """Return the chunks of the source as chunks of this tensor.

        Args:
            chunks: The chunks of the source that a rank holds. The local tensor of the results is
                a view of the source's, with the dims of this tensor.
            row: The index of that local tensor among ``Placed.rows``.
        """
        moved = []
        for chunk, (source, target) in product(chunks, self.boxes):
            shared = common(chunk.box, source)
            if shared is None:
                continue
            starts = zip(chunk.local_offsets, shared.offsets, chunk.offsets, strict=True)
            inside = [local + first - start for local, first, start in starts]
            local_offsets = tuple([0 if dim is None else inside[dim] for dim in self.dims])
            box = moved_box(shared, source, target, self.dims)
            moved.append(Chunk(local_offsets, *box, row))
        return tuple(moved)

    def of_row(self, number: int, dim: int) -> Target:
        """Return the same target where the source is one row of a tensor with one dim more.

        Args:
            number: The index of the row, which replaces ``{}`` in the key.
            dim: The dim of the larger tensor that the rows lie along.
        """
        boxes = [
            (Box(inserted(source.offsets, dim, number), inserted(source.sizes, dim, 1)), target)
            for source, target in self.boxes
        ]
        dims = [None if origin is None else origin + (origin >= dim) for origin in self.dims]
        fqn = self.fqn.replace("{}", str(number))
        return Target(fqn, self.shape, tuple(dims), tuple(boxes))


def moved_box(box: Box, source: Box, target: Box, dims: Sequence[int | None]) -> Box:
    """Return where a part of one box is in another box of the same elements.

    Rows 1 and 2 of expert 2 of 8, each of shape ``(4, 3)``, in the stack of them:

    >>> moved_box(Box((1, 0), (2, 3)), Box((0, 0), (4, 3)), Box((2, 0, 0), (1, 4, 3)), (None, 0, 1))
    Box(offsets=(2, 1, 0), sizes=(1, 2, 3))

    Args:
        box: The part, in the coordinates of ``source``.
        source: A box of one tensor.
        target: The box of another tensor that has the same elements.
        dims: For each dim of the target, the dim of the source; None where the source lacks it,
            and the target has one index.
    """
    offsets, sizes = list(target.offsets), [1] * len(dims)
    for dim, origin in enumerate(dims):
        if origin is not None:
            offsets[dim] += box.offsets[origin] - source.offsets[origin]
            sizes[dim] = box.sizes[origin]
    return Box(tuple(offsets), tuple(sizes))


def renamed_boxes(name: Renamed, shape: Shape, *, rows: int = 1) -> list[Target]:
    """Return what a tensor becomes under the name that a rename gives it.

    >>> (target,) = renamed_boxes(Row("experts.w", 2, 8), (4, 3))
    >>> target.shape, target.dims, target.boxes[0][1]
    ((8, 4, 3), (None, 0, 1), Box(offsets=(2, 0, 0), sizes=(1, 4, 3)))
    >>> q, k = renamed_boxes(Parts(("q", "k"), "qk", 0, (2, 1), groups=2), (6,))
    >>> [(source.offsets, target.offsets) for source, target in q.boxes]
    [((0,), (0,)), ((3,), (2,))]

    Args:
        name: The answer of the rename.
        shape: The whole shape of the tensor, in elements.
        rows: For a scalar, how many rows its parameter has. Any other shape has its own number.

    Returns:
        One target for a name or a ``Row``; for ``Rows`` and ``Parts`` one per row and part, rows
        outermost. The boxes tile the source and, except for a ``Row``, each target.

    Raises:
        CannotPlace: The tensor does not have the dims of ``name``, or the parts do not fit it.
    """
    if isinstance(name, str):
        return [_equal_target(name, shape)]
    if isinstance(name, Row):
        return [row_target(name, shape)]
    if isinstance(name, Transposed):
        return part_targets(name, shape)
    dim = row_dim(name, shape)
    if not shape:
        numbers = range(1 if dim is None else rows)
        names = [fqn.replace("{}", str(number)) for number in numbers for fqn in name.fqns]
        return [_equal_target(fqn, ()) for fqn in names]
    if dim is None:
        return part_targets(name, shape)
    targets = part_targets(name, removed(shape, dim))
    return [target.of_row(number, dim) for number in range(shape[dim]) for target in targets]


def row_target(row: Row, shape: Shape) -> Target:
    """Return the stack that a tensor is a row of, and the box of that row.

    Raises:
        CannotPlace: The stack does not have the dim that its rows lie along.
    """
    rows = dict(zip(stack_dims(row, shape), row.rows, strict=True))
    order = range(len(shape))
    sources = iter(swapped(order) if row.transposed else order)
    origins = [None if dim in rows else next(sources) for dim in range(len(shape) + len(rows))]
    whole = Box.whole(shape)
    box = Box(
        tuple([rows[d].index if d in rows else 0 for d in range(len(origins))]),
        tuple([1 if origin is None else shape[origin] for origin in origins]),
    )
    stack = tuple([rows[d].total if d in rows else size for d, size in enumerate(box.sizes)])
    return Target(row.fqn, stack, tuple(origins), ((whole, box),))


def stack_dims(row: Row, shape: Shape) -> tuple[int, ...]:
    """Return the dims of a stack of tensors of ``shape`` that each of ``row.rows`` lies along.

    A scalar lacks the dims of its parameter: its rows lie along the nearest dim that exists.

    >>> stack_dims(Row("w", 0, 8, within=(Row("w", 0, 4),)), (2, 3))
    (1, 0)

    Raises:
        CannotPlace: The stack does not have the dim that its rows lie along.
    """
    dims: list[int] = []
    for inner_row in row.rows:
        ndim = len(shape) + len(dims) + 1
        dim = inner_row.dim if shape else min(max(inner_row.dim, -ndim), ndim - 1)
        if not -ndim <= dim < ndim:
            raise CannotPlace(f"cannot stack rows of shape {shape} on dim {dim}")
        dims = [*[inner + (inner >= dim % ndim) for inner in dims], dim % ndim]
    return tuple(dims)


def dims_of_row(row: Row, shape: Shape) -> tuple[int, ...]:
    """Return, for each dim of a row of ``shape``, the dim of the stack.

    >>> dims_of_row(Row("w", 0, 8, dim=1), (4, 3))
    (0, 2)

    Raises:
        CannotPlace: The stack does not have the dim that its rows lie along.
    """
    lacking = stack_dims(row, shape)
    dims = tuple([dim for dim in range(len(shape) + len(lacking)) if dim not in lacking])
    return swapped(dims) if row.transposed else dims


def rule_dims(name: OfWhole, shape: Shape) -> tuple[int, ...]:
    """Return, for each dim of a tensor of ``shape``, the dim that its rules have for it.

    Rules see a tensor with its dims as in the checkpoint. The dim that rows lie along stays.

    >>> rule_dims(Transposed("w"), (4, 3)), rule_dims(Rows("w.{}", "w", transposed=True), (8, 4, 3))
    ((1, 0), (0, 2, 1))
    """
    dims = tuple(range(len(shape)))
    if not name.transposed:
        return dims
    rows = None if isinstance(name, Transposed) else row_dim(name, shape)
    return swapped(dims) if rows is None else inserted(swapped(removed(dims, rows)), rows, rows)


def row_dim(name: OfWhole, shape: Shape) -> int | None:
    """Return the dim that the rows of a tensor lie along, from 0; None where it has no rows.

    Raises:
        CannotPlace: The tensor does not have that dim.
    """
    dim = name.rows if isinstance(name, Parts) else name.dim
    if dim is None or not shape:
        return None if dim is None else 0
    if not -len(shape) <= dim < len(shape):
        raise CannotPlace(f"cannot be unstacked on dim {dim}: its shape is {shape}")
    return dim % len(shape)


def part_targets(name: OfWhole, shape: Shape) -> list[Target]:
    """Return the targets of one row, or of a tensor that has no rows; ``{}`` stays in the keys.

    The sizes are relative. With ``Parts(("q", "k"), "qk", 0, sizes=(2, 1), groups=2)`` and 12 rows,
    a unit is 2 rows and a group is 6 rows::

        source   [0:4] q   [4:6] k   [6:10] q   [10:12] k
        q        [0:4]               [4:8]
        k                  [0:2]                [2:4]

    Args:
        name: The answer of the rename.
        shape: The whole shape of the row.

    Raises:
        CannotPlace: The parts do not fit ``shape``.
    """
    targets = [_equal_target(fqn, shape) for fqn in name.fqns]
    if isinstance(name, Parts):
        targets = _fused_targets(name, shape)
    return [_transposed(target) for target in targets] if name.transposed else targets


def _fused_targets(name: Parts, shape: Shape) -> list[Target]:
    """Return the parts of a row, or of a tensor that has no rows, with its dims as they are."""
    if not -len(shape) <= name.dim < len(shape):
        raise CannotPlace(f"cannot be split: there is no dim {name.dim}, the shape is {shape}")
    dims = tuple(range(len(shape)))
    dim = (swapped(dims) if name.dim_after else dims)[name.dim]
    unit, rest = divmod(shape[dim], sum(name.sizes) * name.groups)
    if rest:
        raise CannotPlace(
            f"cannot be split: {shape[dim]} on dim {name.dim} cannot be cut into {name.groups} x "
            f"{name.sizes}"
        )
    origin, group_rows = (0,) * len(shape), sum(name.sizes) * unit
    targets = []
    first = 0  # the part's start in each group
    for fqn, relative in zip(name.fqns, name.sizes, strict=True):
        rows = relative * unit
        sizes = replaced(shape, dim, rows)
        boxes = [
            (
                Box(replaced(origin, dim, group * group_rows + first), sizes),
                Box(replaced(origin, dim, group * rows), sizes),
            )
            for group in range(name.groups)
        ]
        part_shape = replaced(shape, dim, rows * name.groups)
        targets.append(Target(fqn, part_shape, tuple(range(len(shape))), tuple(boxes)))
        first += rows
    return targets


def _equal_target(fqn: str, shape: Shape) -> Target:
    whole = Box.whole(shape)
    return Target(fqn, shape, tuple(range(len(shape))), ((whole, whole),))


def _transposed(target: Target) -> Target:
    """Return the same target with its last two dims swapped."""
    boxes = [
        (source, Box(swapped(box.offsets), swapped(box.sizes))) for source, box in target.boxes
    ]
    return Target(target.fqn, swapped(target.shape), swapped(target.dims), tuple(boxes))


def swapped(values: Sequence[T]) -> tuple[T, ...]:
    """Return one value per dim with the last two exchanged, where there are two.

    >>> swapped((8, 4, 3)), swapped((4,))
    ((8, 3, 4), (4,))
    """
    if len(values) < 2:
        return tuple(values)
    return (*values[:-2], values[-1], values[-2])


def inserted(values: Sequence[T], dim: int, value: T) -> tuple[T, ...]:
    """Return one value per dim with one more, which comes to stand at ``dim``."""
    return (*values[:dim], value, *values[dim:])


def replaced(values: Sequence[T], dim: int, value: T) -> tuple[T, ...]:
    """Return one value per dim with another one at ``dim``."""
    return (*values[:dim], value, *values[dim + 1 :])


def removed(values: Sequence[T], dim: int) -> tuple[T, ...]:
    """Return one value per dim without the one at ``dim``."""
    return (*values[:dim], *values[dim + 1 :])
