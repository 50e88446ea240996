"""The declaration of one tensor: the checkpoint mesh, and one placement per axis.

``Shard``, ``Replicate`` and ``_StridedShard`` are torch's own; the placements that torch does
not have are defined here. Torch's are recognised by the names of their classes, so that a
declaration needs no process group and no import of torch. A class of another library may hold
other rows than its attributes say, so ``kind_of`` refuses it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any

from dcp_placements.errors import CannotPlace, PlacementError
from dcp_placements.layout.sharding import (
    Cut,
    Kind,
    check_sizes,
    format_sizes,
    not_last,
    unknown_kind,
)
from dcp_placements.rules.mesh_axes import Mesh, format_mesh, mesh_state


def row_numbers(name: str, values: Any, what: str = "numbers of rows") -> tuple[int, ...]:
    """Return the numbers of rows that are the value of an argument, in their order.

    Args:
        name: The argument.
        values: Its value.
        what: What the numbers are, for the message.

    Raises:
        PlacementError: They are no integers, or have no order, as the elements of a set.
    """
    try:
        given = list(values)
        numbers = tuple(map(int, given))
        if isinstance(values, Set) or [*numbers] != given:
            raise ValueError
    except (OverflowError, TypeError, ValueError):
        text = f"{name}={values!r:.80} must be {what}, in their order"
        raise PlacementError(text) from None
    return numbers


@dataclass(frozen=True, slots=True)
class FusedShard:
    """A shard of a dim that joins several logical tensors, each of them split on its own.

    gate|up under tensor parallelism is ``FusedShard(0, 2)``: every rank holds its rows of gate,
    then its rows of up. Q|K|V with grouped-query attention is
    ``FusedShard(0, (4096, 1024, 1024))``.
    Parts that alternate row by row (g0 u0 g1 u1 ...) are a plain ``Shard``.

    With fewer KV heads than ranks, each shard of K and of V is on several neighbours: 2 KV heads on
    8 ranks are ``FusedShard(0, (4096, 256, 256), copies=(1, 4, 4))``.

    Attributes:
        dim: The tensor dim; negative counts from the end.
        parts: Number of logical tensors (split as by ``torch.chunk``), or their sizes in rows,
            which must add up to the size of the dim that is split.
        copies: For each part, the number of neighbouring ranks that have each of its shards, a
            divisor of the ranks along the axis; None where each rank has a shard of its own.

    Raises:
        PlacementError: There is no part, or a part has no rows; the copies are not one count per
            part.
    """

    dim: int
    parts: int | tuple[int, ...]
    copies: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.parts, Integral):
            object.__setattr__(self, "parts", int(self.parts))
        else:
            object.__setattr__(self, "parts", row_numbers("parts", self.parts))
        sizes = (self.parts,) if isinstance(self.parts, int) else self.parts
        if not sizes or min(sizes) < 1:
            raise PlacementError(f"FusedShard needs at least one part of one row, not {self.parts}")
        if self.copies is None:
            return
        object.__setattr__(self, "copies", row_numbers("copies", self.copies, "counts of ranks"))
        count = self.parts if isinstance(self.parts, int) else len(self.parts)
        if len(self.copies) != count or min(self.copies) < 1:
            raise PlacementError(
                f"copies={self.copies} of FusedShard must be a count of ranks from 1 up for each "
                f"of its {count} parts"
            )


@dataclass(frozen=True, slots=True)
class RaggedShard:
    """Contiguous shards of any sizes, one per rank of the axis.

    Ten rows of which the first of four ranks has five, and the third none, are
    ``RaggedShard(0, (5, 3, 0, 2))``; a tensor of the first rank alone is
    ``RaggedShard(0, (10, 0, 0, 0))``. All ranks declare the same sizes. Where the tensor's own
    DTensor shards the axis on the same dim, the sizes count: they are more exact.

    Attributes:
        dim: The tensor dim; negative counts from the end.
        sizes: Rows of each rank along the axis, in their order, which must add up to the size of
            the dim that is split. They say it of a plain tensor, so that ``global_shape`` is not
            needed for it.

    Raises:
        PlacementError: There is no size, or a size is negative.
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", row_numbers("sizes", self.sizes))
        if not self.sizes or min(self.sizes) < 0:
            raise PlacementError(
                f"RaggedShard needs a size from 0 up for each rank of its axis, not {self.sizes}"
            )


@dataclass(frozen=True, slots=True)
class FlatShard:
    """A range of the elements of the flattened tensor, of any size, one per rank of the axis.

    ZeRO, FSDP1 and Megatron's distributed optimizer divide tensors so. The local tensor has one
    dim. Where the first of three ranks has elements 0 to 4 of a ``(4, 3)`` tensor in C order, the
    second has 5 to 11 and the third none, all ranks declare ``FlatShard((5, 7, 0))`` with
    ``global_shape=(4, 3)``. What axes left of this one in the mesh leave of the tensor is
    flattened, so tp, ep and pp stand left of it, and it is the last cut.

    Attributes:
        sizes: Elements of each rank along the axis, in their order, which must add up to those of
            what is flattened.

    Raises:
        PlacementError: There is no size, or a size is negative.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", row_numbers("sizes", self.sizes, "counts of elements"))
        if not self.sizes or min(self.sizes) < 0:
            raise PlacementError(
                "FlatShard needs a count of elements from 0 up for each rank of its axis, not "
                f"{format_sizes(self.sizes)}"
            )


@dataclass(frozen=True, slots=True)
class IndexShard:
    """This rank holds just these rows of a dim, in this order (expert maps, EPLB).

    Ranks may list any number of rows, and several ranks the same row. The checkpoint placement
    needs ``global_shape``, because one rank does not have the rows of the others. Each row is a
    chunk: contiguous shards are a ``RaggedShard``.

    Attributes:
        dim: The tensor dim; negative counts from the end.
        indices: Global row numbers, one per local row.

    Raises:
        PlacementError: An index is negative.
    """

    dim: int
    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", row_numbers("indices", self.indices))
        if self.indices and min(self.indices) < 0:
            raise PlacementError(f"IndexShard takes rows from 0 up, not {min(self.indices)}")


@dataclass(frozen=True)
class CheckpointPlacement:
    """The place of a tensor in the checkpoint: a mesh, and one placement per axis of it.

    ``CheckpointPlacement(mesh, {"ep": Shard(0)})`` declares that the tensor of this rank is its
    ``ep`` part of the checkpoint's tensor, and that the other axes of ``mesh`` hold replicas unless
    the tensor's own DTensor shards them. Placements of equal content are equal.

    Args:
        mesh: A ``DeviceMesh``, or any object with ``shape``, ``mesh_dim_names`` and
            ``get_coordinate()``.
        placements: One placement per mesh axis, in mesh order; or ``{axis name: placement}``, in
            which case the other axes hold replicas.
        global_shape: The shape of the checkpoint's tensor, where it is not the product of the
            local shape and the axes that shard it (unequal experts per rank, padding).
        padded_shape: The shape that was split, where it is larger (a padded vocabulary). Rows
            beyond ``global_shape`` are not stored, and keep what they have on load.
        absent: Names of axes in ``placements`` that the mesh of this topology may lack, as ``ep``
            where there is one expert-parallel rank; nothing is sharded over one that it lacks, and
            its placement is not compared with that of the save, as that of an axis of size 1 is.

    Raises:
        PlacementError: An axis is unknown and not among ``absent``, the count of placements is
            wrong, a dim is out of range, a value is no placement, an ``IndexShard`` or a
            ``FlatShard`` lacks ``global_shape``, a ``RaggedShard`` or ``FlatShard`` has not a size
            per rank, an axis right of a ``FlatShard`` cuts, or the shapes contradict each other.
    """

    mesh: Mesh = field(compare=False)
    placements: tuple[Any, ...]
    global_shape: tuple[int, ...] | None
    padded_shape: tuple[int, ...] | None
    mesh_state: Hashable = field(repr=False, hash=False)

    def __init__(
        self,
        mesh: Mesh,
        placements: Sequence[Any] | Mapping[str, Any],
        *,
        global_shape: Sequence[int] | None = None,
        padded_shape: Sequence[int] | None = None,
        absent: Iterable[str] = (),
    ) -> None:
        if absent:
            placements = _without_absent(mesh, placements, absent)
        whole = None if global_shape is None else _shape("global_shape", global_shape)
        padded = None if padded_shape is None else _shape("padded_shape", padded_shape)
        if padded is not None and whole is None:
            raise PlacementError(f"padded_shape={padded} needs global_shape=, without the padding")
        if padded and whole:
            same_dims = len(whole) == len(padded)
            if not same_dims or any(n < size for n, size in zip(padded, whole, strict=True)):
                raise PlacementError(
                    f"padded_shape={padded} must have the dims of global_shape={whole} and be "
                    "nowhere smaller"
                )
        checked = _one_per_axis(mesh, placements)
        for entry in checked:
            if whole is None and isinstance(entry, IndexShard | FlatShard):
                what = "a range of it does not have the dims"
                if isinstance(entry, IndexShard):
                    what = "one rank does not have the rows of the others"
                raise PlacementError(
                    f"{format_placement(entry)} needs global_shape=, the shape of the whole "
                    f"tensor: {what}"
                )
            if whole is not None and kind_of(entry):
                shard_dim(entry, len(whole))
        values = (mesh, checked, whole, padded, mesh_state(mesh))
        for attribute, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, attribute.name, value)

    def __eq__(self, other: object) -> bool:
        if type(other) is not CheckpointPlacement:
            return NotImplemented
        # In some versions of torch a _StridedShard equals the Shard of its dim.
        if [*map(type, self.placements)] != [*map(type, other.placements)]:
            return False
        names = [attribute.name for attribute in fields(self) if attribute.compare]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def of_dims(self, origins: Sequence[int | None], ndim: int) -> CheckpointPlacement:
        """Return the placement of a tensor that follows this one dim by dim.

        Args:
            origins: For each dim of the tensor, the dim of this one that it follows; None for a dim
                of size 1.
            ndim: Number of dims of this one.
        """
        if tuple(origins) == tuple(range(ndim)):
            return self
        shapes = [
            shape and tuple([1 if dim is None else shape[dim] for dim in origins])
            for shape in (self.global_shape, self.padded_shape)
        ]
        placements = moved_placements(self.placements, origins, ndim)
        return CheckpointPlacement(
            self.mesh, placements, global_shape=shapes[0], padded_shape=shapes[1]
        )

    def format(self) -> str:
        """Return the placements and the mesh as short text."""
        return format_placements(self.placements) + f" on mesh {format_mesh(self.mesh)}"


_SPLITTING = {
    ("dcp_placements", "FlatShard"): Kind.FLAT,
    ("dcp_placements", "FusedShard"): Kind.FUSED,
    ("dcp_placements", "IndexShard"): Kind.LISTED,
    ("dcp_placements", "RaggedShard"): Kind.RAGGED,
    ("torch", "Shard"): Kind.PLAIN,
    ("torch", "_StridedShard"): Kind.STRIDED,
}


def kind_of(placement: Any) -> Kind | None:
    """Return how a placement splits its dim; None for one that splits none.

    Raises:
        PlacementError: The value is no placement, or one of another library, also a subclass of
            torch's: it may hold other rows than its base class.
    """
    cls = type(placement)
    kind = _SPLITTING.get((cls.__module__.partition(".")[0], cls.__name__))
    if kind is not None:
        return kind
    if isinstance(placement, type) or not hasattr(placement, "is_replicate"):
        raise PlacementError(
            f"{placement!r} is no placement: use Shard(dim), Replicate(), FusedShard, RaggedShard, "
            "FlatShard or IndexShard"
        )
    if placement.is_replicate() or placement.is_partial():
        return None
    raise PlacementError(
        f"{placement!r} is a {cls.__module__}.{cls.__qualname__}: which rows its ranks hold is not "
        "known\n"
        "    way out:     Shard, _StridedShard, FusedShard or RaggedShard where the rows are the "
        "same; IndexShard with global_shape= lists the rows of this rank"
    )


def is_flat(placement: CheckpointPlacement | None) -> bool:
    """Whether a local tensor of this placement is a range of the flattened tensor."""
    entries = () if placement is None else placement.placements
    return any(kind_of(entry) is Kind.FLAT for entry in entries)


def shard_dim(placement: Any, ndim: int) -> int | None:
    """Return the dim that a sharding ``placement`` splits, counted from 0; None for a flat one.

    Raises:
        PlacementError: A tensor of ``ndim`` dims does not have the dim.
    """
    return cut_of(placement, ndim, None, 1).dim


def cut_of(placement: Any, ndim: int, axis: str | None, size: int) -> Cut:
    """Return how a placement that splits a dim cuts it.

    >>> cut_of(FusedShard(-2, 2), 2, "tp", 4)[:5]
    (0, 'tp', 4, <Kind.FUSED: 'fused'>, 2)

    Args:
        placement: The placement.
        ndim: Number of dims of the tensor.
        axis: Name of its mesh axis.
        size: Number of ranks along it.

    Raises:
        CannotPlace: A tensor of ``ndim`` dims does not have the dim.
        PlacementError: As ``kind_of``.
    """
    kind = kind_of(placement)
    if kind is Kind.FLAT:
        return Cut(None, axis, size, kind, placement.sizes)
    if kind is None or not -ndim <= placement.dim < ndim:
        over = "" if axis is None else f" over axis {axis}"
        raise CannotPlace(
            f"{format_placement(placement)}{over} names dim {getattr(placement, 'dim', None)} of a "
            f"tensor of {ndim} {'dim' if ndim == 1 else 'dims'}",
            f"way out:     a dim below {ndim}; or, where the pattern matches too much, a more "
            "specific one above it",
        )
    cut = Cut(int(placement.dim) % ndim, axis, size, kind)
    match kind:
        case Kind.PLAIN | Kind.LISTED:
            return cut
        case Kind.FUSED:
            return cut._replace(parts=placement.parts, copies=placement.copies or ())
        case Kind.RAGGED:
            return cut._replace(parts=placement.sizes)
        case Kind.STRIDED:
            return cut._replace(parts=int(placement.split_factor))
        case _:
            raise unknown_kind(kind)


def moved_placements(
    placements: Sequence[Any], origins: Sequence[int | None], ndim: int
) -> tuple[Any, ...]:
    """Return the placements of a tensor each of whose dims is a dim of another one, or is new.

    An axis that shards a dim which the tensor lacks holds replicas of it. A range of the flattened
    tensor is that of no other one: callers ask ``is_flat`` first.

    >>> moved_placements([FusedShard(1, 2)], [None, 1, 0], 2)
    (FusedShard(dim=1, parts=2, copies=None),)

    Args:
        placements: The placements of the other tensor.
        origins: For each dim of the tensor, the dim of the other one; None for a new dim.
        ndim: Number of dims of the other tensor.

    Raises:
        CannotPlace: A placement is a ``FlatShard``.
    """
    from torch.distributed.tensor import Replicate  # others that declare need no torch

    moved = []
    for entry in placements:
        kind, dim = kind_of(entry), None
        if kind is not None:
            origin = shard_dim(entry, ndim)
            dim = origins.index(origin) if origin in origins else None
        match kind:
            case None:
                moved.append(entry)
            case Kind.FLAT:
                raise CannotPlace(
                    f"{format_placement(entry)} is a range of the flattened tensor, which has none "
                    "of its dims"
                )
            case _ if dim is None:
                moved.append(Replicate())
            case Kind.PLAIN:
                moved.append(type(entry)(dim))
            case Kind.STRIDED:
                moved.append(type(entry)(dim, split_factor=entry.split_factor))
            case Kind.FUSED | Kind.RAGGED | Kind.LISTED:
                moved.append(replace(entry, dim=dim))
            case _:
                raise unknown_kind(kind)
    return tuple(moved)


def format_placement(placement: Any) -> str:
    """Return a placement as its user would write it."""
    kind = kind_of(placement)
    match kind:
        case None:
            return repr(placement) if placement.is_partial() else "Replicate()"
        case Kind.PLAIN:
            option = ""
        case Kind.FUSED:
            parts = placement.parts
            option = f", {parts if isinstance(parts, int) else _format_sizes(parts, 'parts')}"
            option += "" if placement.copies is None else f", copies={placement.copies}"
        case Kind.RAGGED:
            option = f", {_format_sizes(placement.sizes, 'sizes')}"
        case Kind.FLAT:
            return f"FlatShard({_format_sizes(placement.sizes, 'sizes')})"
        case Kind.STRIDED:
            option = f", split_factor={placement.split_factor}"
        case Kind.LISTED:
            rows, count = ", ".join(map(str, placement.indices[:8])), len(placement.indices)
            option = f", [{rows}{'' if count <= 8 else f', ... ({count} rows)'}]"
        case _:
            raise unknown_kind(kind)
    return f"{type(placement).__name__}({placement.dim}{option})"


def _format_sizes(sizes: tuple[int, ...], noun: str) -> str:
    """Return a tuple as text, the first eight of many sizes."""
    if len(sizes) <= 8:
        return str(sizes)
    return f"({', '.join(map(str, sizes[:8]))}, ... ({len(sizes)} {noun}))"


def format_placements(placements: Sequence[Any]) -> str:
    """Return placements as a bracketed list."""
    return "[" + ", ".join(map(format_placement, placements)) + "]"


def _without_absent(
    mesh: Mesh, placements: Sequence[Any] | Mapping[str, Any], absent: Iterable[str]
) -> Mapping[str, Any]:
    """Return the placements without those of the axes that may be absent, and are.

    Raises:
        PlacementError: The placements have no axis names, or lack an axis of ``absent``.
    """
    names = {absent} if isinstance(absent, str) else set(absent)
    if not isinstance(placements, Mapping) or not names <= placements.keys():
        raise PlacementError(
            f"absent={sorted(names)} names axes of placements= that the mesh may lack, but got "
            f"{placements!r}\n"
            '    way out:     CheckpointPlacement(mesh, {"ep": Shard(0)}, absent=("ep",))'
        )
    lacking = names.difference(getattr(mesh, "mesh_dim_names", None) or ())
    for name in lacking:
        kind_of(placements[name])
    return {name: entry for name, entry in placements.items() if name not in lacking}


def _one_per_axis(mesh: Mesh, placements: Sequence[Any] | Mapping[str, Any]) -> tuple[Any, ...]:
    if not hasattr(mesh, "mesh_dim_names"):
        raise PlacementError(
            f"{type(mesh).__name__} is no mesh\n"
            "    way out:     a DeviceMesh, or MeshCoordinate(names, sizes, coordinate) without a "
            "process group"
        )
    sizes, names = tuple(mesh.shape), mesh.mesh_dim_names
    if not isinstance(placements, Iterable):
        raise PlacementError(
            f"{placements!r} does not say to which axis of mesh {format_mesh(mesh)} it belongs\n"
            '    way out:     {"axis": placement}, or a placement per axis in mesh order'
        )
    if isinstance(placements, Mapping):
        if names is None:
            raise PlacementError(
                f"mesh {format_mesh(mesh)} has no axis names: give it mesh_dim_names=, or one "
                "placement per axis"
            )
        if unknown := sorted(set(placements) - set(names)):
            raise PlacementError(
                f"no axis {', '.join(map(repr, unknown))} in mesh {format_mesh(mesh)}: "
                f"its axes are {', '.join(map(repr, names))}\n"
                "    way out:     one of these, or the mesh that has it; "
                f"absent={tuple(unknown)} for an axis that a topology may lack"
            )
        if len(placements) < len(names):
            from torch.distributed.tensor import Replicate  # others that declare need no torch

            placements = {**dict.fromkeys(names, Replicate()), **placements}
        given = [placements[name] for name in names]
    else:
        given = list(placements)
    if len(given) != len(sizes):
        raise PlacementError(
            f"mesh {format_mesh(mesh)} has {len(sizes)} axes and needs as many placements, but got "
            f"{len(given)}: {given}"
        )
    flat: str | None = None
    for number, placement in enumerate(given):
        axis = None if names is None else names[number]
        over = f" over {'an axis' if axis is None else repr(axis)}"
        if flat is not None and kind_of(placement):
            raise not_last(flat, format_placement(placement) + over)
        if kind_of(placement) in (Kind.RAGGED, Kind.FLAT):
            check_sizes(placement.sizes, axis, sizes[number], type(placement).__name__)
        if kind_of(placement) is Kind.FLAT:
            flat = format_placement(placement) + over
        if kind_of(placement) is None and placement.is_partial():
            raise PlacementError(
                f"{placement!r} cannot be checkpointed: reduce the tensor first (redistribute to "
                "Replicate or Shard)"
            )
    return tuple(given)


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(shape, Iterable) or any(size < 0 for size in shape):
        raise PlacementError(f"{name}={shape!r} must be a shape: one size per dim, from 0")
    return tuple([int(size) for size in shape])
