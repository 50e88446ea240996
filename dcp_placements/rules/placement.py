"""The declaration of one tensor: the checkpoint mesh, and one placement per axis.

``Shard``, ``Replicate`` and ``_StridedShard`` are torch's own; the two placements that torch does
not have are defined here. Torch's are recognised by the names of their classes, so that a
declaration needs no process group and no import of torch.distributed. A class of another library
may hold other rows than its attributes say, so ``kind_of`` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from dcp_placements.errors import PlacementError
from dcp_placements.layout.sharding import Cut, Kind, Position
from dcp_placements.rules.mesh import Mesh, format_mesh, mesh_state


@dataclass(frozen=True, slots=True)
class FusedShard:
    """A shard of a dim that joins several logical tensors, each of them split on its own.

    gate|up under tensor parallelism is ``FusedShard(0, 2)``: every rank holds its rows of gate,
    then its rows of up; Q|K|V with grouped-query attention ``FusedShard(0, (4096, 1024, 1024))``.
    Parts that alternate row by row (g0 u0 g1 u1 ...) are a plain ``Shard``.

    Attributes:
        dim: The tensor dim, negative from the end.
        parts: Number of logical tensors (split as by ``torch.chunk``), or their sizes in rows,
            which must add up to the size of the dim that is split.

    Raises:
        PlacementError: No part, or a part without rows.
    """

    dim: int
    parts: int | tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, int):
            object.__setattr__(self, "parts", tuple(int(part) for part in self.parts))
        sizes = (self.parts,) if isinstance(self.parts, int) else self.parts
        if not sizes or min(sizes) < 1:
            raise PlacementError(f"FusedShard needs at least one part of one row, not {self.parts}")


@dataclass(frozen=True, slots=True)
class IndexShard:
    """This rank holds just these rows of a dim, in this order (expert maps, EPLB).

    Any count per rank, repeats across ranks allowed; the checkpoint placement needs
    ``global_shape``, because one rank does not have the rows of the others.

    Attributes:
        dim: The tensor dim, negative from the end.
        indices: Global rows, one per local row.

    Raises:
        PlacementError: A negative index.
    """

    dim: int
    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", tuple(int(index) for index in self.indices))
        if self.indices and min(self.indices) < 0:
            raise PlacementError(f"IndexShard takes rows from 0 up, not {min(self.indices)}")


@dataclass(frozen=True, eq=False)
class CheckpointPlacement:
    """The place of a tensor in the checkpoint: a mesh, and one placement per axis of it.

    ``CheckpointPlacement(mesh, {"ep": Shard(0)})`` declares that the tensor of this rank is its
    ``ep`` part of the checkpoint's tensor, and that the other axes of ``mesh`` hold replicas unless
    the tensor's own DTensor shards them. Two of the same content are equal.

    Args:
        mesh: A ``DeviceMesh``, or anything with ``shape``, ``mesh_dim_names``,
            ``get_coordinate()``.
        placements: One per mesh axis, in mesh order; or ``{axis name: placement}``, the others
            replicated.
        global_shape: The shape of the checkpoint's tensor, where it is not the product of the
            local shape and the axes that shard it (unequal experts per rank, padding).
        padded_shape: The shape that was split, where it is larger (a padded vocabulary). Rows
            beyond ``global_shape`` are not stored, and keep what they have on load.

    Raises:
        PlacementError: An unknown axis, a wrong count, a dim out of range, a value that is not a
            placement, an ``IndexShard`` without ``global_shape``, or shapes that contradict each
            other.
    """

    mesh: Mesh
    placements: tuple[Any, ...]
    _: KW_ONLY
    global_shape: tuple[int, ...] | None = None
    padded_shape: tuple[int, ...] | None = None

    def __init__(
        self,
        mesh: Mesh,
        placements: Sequence[Any] | Mapping[str, Any],
        *,
        global_shape: Sequence[int] | None = None,
        padded_shape: Sequence[int] | None = None,
    ) -> None:
        checked = _one_per_axis(mesh, placements)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", checked)
        object.__setattr__(self, "global_shape", _shape("global_shape", global_shape))
        object.__setattr__(self, "padded_shape", _shape("padded_shape", padded_shape))
        self._check_shapes()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, CheckpointPlacement):
            return NotImplemented
        if self._content() != other._content():
            return False
        return self.mesh is other.mesh or mesh_state(self.mesh) == mesh_state(other.mesh)

    def __hash__(self) -> int:
        return hash((tuple(self.mesh.shape), self._content()))

    def _content(self) -> tuple[Any, ...]:
        return self.placements, self.global_shape, self.padded_shape

    def _check_shapes(self) -> None:
        if self.padded_shape is not None:
            logical = self.global_shape
            if logical is None:
                raise PlacementError(
                    f"padded_shape={self.padded_shape} needs global_shape too: the shape without "
                    "the padding, which is what the checkpoint stores"
                )
            if len(logical) != len(self.padded_shape) or any(
                padded < size for padded, size in zip(self.padded_shape, logical, strict=False)
            ):
                raise PlacementError(
                    f"padded_shape={self.padded_shape} must have the dims of "
                    f"global_shape={logical} and be nowhere smaller"
                )
        for placement in self.placements:
            if isinstance(placement, IndexShard) and self.global_shape is None:
                raise PlacementError(
                    f"{placement} needs global_shape=: how many rows there are in all is not to be "
                    "seen from the rows of one rank"
                )
            if self.global_shape is not None and shards(placement):
                shard_dim(placement, len(self.global_shape))

    def of_rows(self, dims: Sequence[int], ndim: int) -> CheckpointPlacement:
        """Return the placement of each row of a tensor: axes that shard ``dims`` replicate it.

        Args:
            dims: Those that the rows lie along, from 0.
            ndim: Dims of the tensor.
        """
        kept = [dim for dim in range(ndim) if dim not in dims]
        placements = []
        for entry in self.placements:
            if shards(entry) and -ndim <= entry.dim < ndim:
                dim = shard_dim(entry, ndim)
                entry = _REPLICATED if dim in dims else _moved(entry, kept.index(dim))
            placements.append(entry)
        shapes = [
            None if shape is None else [shape[dim] for dim in kept]
            for shape in (self.global_shape, self.padded_shape)
        ]
        return CheckpointPlacement(
            self.mesh, placements, global_shape=shapes[0], padded_shape=shapes[1]
        )

    def format(self) -> str:
        """Return the placements and the mesh as short text."""
        return format_placements(self.placements) + f" on mesh {format_mesh(self.mesh)}"


_SPLITTING = {
    ("dcp_placements", "FusedShard"): Kind.FUSED,
    ("dcp_placements", "IndexShard"): Kind.LISTED,
    ("torch", "Shard"): Kind.PLAIN,
    ("torch", "_StridedShard"): Kind.STRIDED,
}


def kind_of(placement: Any) -> Kind | None:
    """Return how a placement splits its dim; None of one that splits none.

    Raises:
        PlacementError: No placement, or one of another library: also a subclass of torch's, which
            may hold other rows than its base class.
    """
    cls = type(placement)
    kind = _SPLITTING.get((cls.__module__.partition(".")[0], cls.__name__))
    if kind is not None:
        return kind
    if isinstance(placement, type) or not hasattr(placement, "is_replicate"):
        raise PlacementError(
            f"{placement!r} is no placement: use Shard(dim), Replicate(), FusedShard or IndexShard"
        )
    if placement.is_replicate() or placement.is_partial():
        return None
    raise PlacementError(
        f"{placement!r} is a {cls.__module__}.{cls.__qualname__}: which rows its ranks hold is not "
        "known\n"
        "    way out:     Shard, _StridedShard or FusedShard where the rows are the same; "
        "IndexShard with global_shape= lists the rows of this rank"
    )


def shards(placement: Any) -> bool:
    """Whether ``placement`` splits a dim at all.

    Raises:
        PlacementError: As ``kind_of``.
    """
    return kind_of(placement) is not None


def shard_dim(placement: Any, ndim: int) -> int:
    """Return the dim that a sharding ``placement`` splits, counted from 0.

    Raises:
        PlacementError: A dim that a tensor of ``ndim`` dims does not have.
    """
    dim = int(placement.dim)
    if not -ndim <= dim < ndim:
        raise PlacementError(
            f"{format_placement(placement)} names dim {dim}, but the tensor has {ndim} "
            f"{'dim' if ndim == 1 else 'dims'}"
        )
    return dim % ndim


def _moved(placement: Any, dim: int) -> Any:
    """Return a sharding placement that splits another dim."""
    options = {Kind.FUSED: "parts", Kind.STRIDED: "split_factor", Kind.LISTED: "indices"}
    option = options.get(kind_of(placement) or Kind.PLAIN)
    return type(placement)(dim, **({option: getattr(placement, option)} if option else {}))


def cut_of(placement: Any, ndim: int, axis: str | None, size: int) -> Cut:
    """Return how a placement that splits a dim cuts it.

    >>> cut_of(FusedShard(-2, 2), 2, "tp", 4)
    Cut(dim=0, axis='tp', size=4, kind=<Kind.FUSED: 'fused'>, parts=2)

    Args:
        placement: The placement.
        ndim: Dims of the tensor.
        axis: Name of its mesh axis.
        size: Ranks along it.

    Raises:
        PlacementError: A dim that a tensor of ``ndim`` dims does not have; as ``kind_of``.
    """
    dim = shard_dim(placement, ndim)
    match kind_of(placement):
        case Kind.PLAIN:
            return Cut(dim, axis, size)
        case Kind.FUSED:
            return Cut(dim, axis, size, Kind.FUSED, placement.parts)
        case Kind.STRIDED:
            return strided_cut(Cut(dim, axis, size), int(placement.split_factor))
        case Kind.LISTED:
            return Cut(dim, axis, size, Kind.LISTED)
        case None:
            raise PlacementError(f"{format_placement(placement)} splits no dim")


def position_of(placement: Any, position: int) -> Position:
    """Return where a rank stands in the cut of a placement: its position, or the rows it lists."""
    return placement.indices if kind_of(placement) is Kind.LISTED else position


def strided_cut(cut: Cut, split_factor: int) -> Cut:
    """Return ``cut`` as that of a ``_StridedShard``, which is a plain one where its factor is 1."""
    kind = Kind.PLAIN if split_factor == 1 else Kind.STRIDED
    return cut._replace(kind=kind, parts=split_factor)


def format_placement(placement: Any) -> str:
    """Return one placement as its user would write it."""
    match kind_of(placement):
        case Kind.PLAIN:
            return f"Shard({placement.dim})"
        case Kind.FUSED:
            return f"FusedShard({placement.dim}, {placement.parts})"
        case Kind.STRIDED:
            return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
        case Kind.LISTED:
            rows = ", ".join(map(str, placement.indices[:8]))
            more = f", ... ({len(placement.indices)} rows)" if len(placement.indices) > 8 else ""
            return f"IndexShard({placement.dim}, [{rows}{more}])"
        case None:
            return "Replicate()" if placement.is_replicate() else repr(placement)


def format_placements(placements: Sequence[Any]) -> str:
    """Return placements as a bracketed list."""
    return "[" + ", ".join(map(format_placement, placements)) + "]"


def _one_per_axis(mesh: Mesh, placements: Sequence[Any] | Mapping[str, Any]) -> tuple[Any, ...]:
    if not hasattr(mesh, "mesh_dim_names"):
        raise PlacementError(
            f"{type(mesh).__name__} is no mesh\n"
            "    way out:     a DeviceMesh, or MeshCoordinate(names, sizes, coordinate) without a "
            "process group"
        )
    ndim = len(tuple(mesh.shape))
    names = mesh.mesh_dim_names
    if not isinstance(placements, Iterable):
        raise PlacementError(
            f"{placements!r} does not say to which axis of mesh {format_mesh(mesh)} it belongs\n"
            '    way out:     {"axis": placement}, or a placement per axis in mesh order'
        )
    if isinstance(placements, Mapping):
        if names is None:
            raise PlacementError(
                f"placements by axis name need a mesh with axis names, but mesh "
                f"{format_mesh(mesh)} has none: give mesh_dim_names=, or one placement per axis"
            )
        unknown = sorted(set(placements) - set(names))
        if unknown:
            raise PlacementError(
                f"no axis {', '.join(map(repr, unknown))} in mesh {format_mesh(mesh)}: "
                f"its axes are {', '.join(map(repr, names))}"
            )
        ordered = tuple(placements.get(name, _REPLICATED) for name in names)
    else:
        ordered = tuple(placements)
        if len(ordered) != ndim:
            raise PlacementError(
                f"mesh {format_mesh(mesh)} has {ndim} axes and needs as many placements, but got "
                f"{len(ordered)}: {ordered}"
            )
    for placement in ordered:
        if kind_of(placement) is None and placement.is_partial():
            raise PlacementError(
                f"{placement!r} cannot be checkpointed: reduce the tensor first (redistribute to "
                "Replicate or Shard)"
            )
    return ordered


@dataclass(frozen=True, slots=True)
class _Replicated:
    """The placement of axes that a mapping leaves out; has the methods of ``Replicate``."""

    def is_replicate(self) -> bool:
        return True

    def is_partial(self) -> bool:
        return False

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def __repr__(self) -> str:
        return "Replicate()"


_REPLICATED = _Replicated()


def _shape(name: str, shape: Sequence[int] | None) -> tuple[int, ...] | None:
    if shape is None:
        return None
    if not isinstance(shape, Iterable):
        raise PlacementError(f"{name}={shape!r} must be a shape, such as ({shape!r}, 3)")
    checked = tuple(int(size) for size in shape)
    if any(size < 0 for size in checked):
        raise PlacementError(f"{name}={checked} has a negative size")
    return checked
