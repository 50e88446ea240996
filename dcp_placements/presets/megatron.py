"""What Megatron Core and Megatron Lite share: the two meshes of a world, and what cannot run.

Facts: the order of ranks is ``tp-cp-ep-dp-pp`` (``megatron/core/parallel_state.py``,
``initialize_model_parallel`` and ``RankGenerator``), the fastest first; dense ranks count by TP and
CP, expert ranks by ETP and EP, and both have the pipeline outermost.
"""

from __future__ import annotations

from dcp_placements.errors import PlacementError
from dcp_placements.presets.preset import axis_sizes
from dcp_placements.rules.mesh import Mesh, MeshCoordinate, format_mesh

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")

REFUSED = {
    "ddp": {},
    "fsdp2": {
        "pp": "torch FSDP2 in Megatron runs with one pipeline stage (training/arguments.py)",
        "ep": "torch FSDP2 in Megatron runs without expert parallelism (training/arguments.py)",
    },
    "megatron_fsdp": {
        "pp": "Megatron-FSDP v2 has no pipeline (distributed/fsdp/mcore_fsdp_adapter.py), and v1 "
        "numbers the layers of its stages itself, so that they would be numbered twice",
    },
    "megatron_fsdp_v2": dict.fromkeys(
        ("pp", "tp", "cp"),
        "Megatron-FSDP v2 shards over data parallelism and EP alone "
        "(distributed/fsdp/mcore_fsdp_adapter.py)",
    ),
}
"""What each data-parallel wrapper refuses, by mesh axis, and where it does."""


def megatron_meshes(
    rank: int,
    world_size: int,
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
) -> tuple[MeshCoordinate, MeshCoordinate]:
    """Return the dense mesh [PP, DP, CP, TP] and the expert mesh [PP, EDP, EP, ETP] of one rank.

    >>> dense, expert = megatron_meshes(5, 8, tp=2, pp=2, ep=2, etp=1)
    >>> dense
    MeshCoordinate(('pp', 'dp', 'cp', 'tp'), (2, 2, 1, 2), (1, 0, 0, 1))
    >>> expert
    MeshCoordinate(('pp', 'edp', 'ep', 'etp'), (2, 2, 2, 1), (1, 0, 1, 0))

    Args:
        rank: The global rank.
        world_size: Ranks in all.
        tp: Tensor parallelism of what is no expert.
        cp: Context parallelism: replicas.
        pp: Pipeline stages.
        ep: Expert parallelism.
        etp: Tensor parallelism of an expert; None: as ``tp``, which is Megatron's default.

    Raises:
        PlacementError: A rank beyond the world, or sizes whose product does not divide it.
    """
    if not 0 <= rank < world_size:
        raise PlacementError(f"there is no rank {rank} in a world of {world_size} ranks")
    etp = tp if etp is None else etp
    for what, sizes in (
        ("tp x cp x pp", (tp, cp, pp)),
        ("etp x ep x pp", (etp, ep, pp)),
    ):
        product = sizes[0] * sizes[1] * sizes[2]
        if min(sizes) < 1 or world_size % product:
            raise PlacementError(
                f"a world of {world_size} ranks cannot be cut by {what} = "
                f"{' x '.join(map(str, sizes))}: the product must divide it"
            )
    dense = (pp, world_size // (tp * cp * pp), cp, tp)
    expert = (pp, world_size // (etp * ep * pp), ep, etp)
    return (
        MeshCoordinate(DENSE, dense, _position(rank, dense)),
        MeshCoordinate(EXPERT, expert, _position(rank, expert)),
    )


def check_meshes(dense: Mesh, expert: Mesh | None, data_parallel: str) -> None:
    """Check that the meshes are of one world, and that such a job can run.

    Raises:
        PlacementError: Missing axes, meshes of different worlds or stages, an unknown wrapper, or a
            combination that Megatron refuses, with its reason.
    """
    sizes = axis_sizes(dense, *DENSE)
    sizes |= {} if expert is None else axis_sizes(expert, *EXPERT)
    if data_parallel not in REFUSED:
        raise PlacementError(
            f"data_parallel={data_parallel!r} is none of {', '.join(map(repr, REFUSED))}"
        )
    if expert is not None and (
        _ranks(dense) != _ranks(expert) or _place(dense, "pp") != _place(expert, "pp")
    ):
        raise PlacementError(
            f"the dense mesh {format_mesh(dense)} and the expert mesh {format_mesh(expert)} must "
            "be of the same ranks, with the same pipeline stages"
        )
    wrong = [axis for axis in REFUSED[data_parallel] if sizes.get(axis, 1) > 1]
    if wrong:
        raise PlacementError(
            "\n    ".join(
                (
                    f"data_parallel={data_parallel!r} cannot be combined with "
                    + " and ".join(f"{axis}={sizes[axis]}" for axis in wrong),
                    *dict.fromkeys(
                        f"reason:      {REFUSED[data_parallel][axis]}" for axis in wrong
                    ),
                    "way out:     "
                    + " and ".join(f"{axis}=1" for axis in wrong)
                    + ', or data_parallel="ddp"',
                )
            )
        )


def without_axis(mesh: Mesh, name: str) -> MeshCoordinate:
    """Return ``mesh`` as this rank sees it, one axis left out.

    Ranks that differ along it hold tensors of other names, so that a rule says nothing of it.
    """
    names, sizes, at = mesh.mesh_dim_names or (), tuple(mesh.shape), coordinate(mesh)
    kept = [axis for axis, found in enumerate(names) if found != name]
    return MeshCoordinate(
        [names[axis] for axis in kept],
        [sizes[axis] for axis in kept],
        [at[axis] for axis in kept],
    )


def coordinate(mesh: Mesh) -> tuple[int, ...]:
    """Return this rank's position along every axis of ``mesh``.

    Raises:
        PlacementError: A rank that is no part of it.
    """
    found = mesh.get_coordinate()
    if found is None:
        raise PlacementError(
            f"this rank is no part of mesh {format_mesh(mesh)}: each rank makes its own preset, of "
            "meshes that it is in"
        )
    return tuple(found)


def position(mesh: Mesh, name: str) -> int:
    """Return this rank's position along one axis of ``mesh``."""
    return coordinate(mesh)[(mesh.mesh_dim_names or ()).index(name)]


def _position(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        found.append(rank % size)
        rank //= size
    return tuple(reversed(found))


def _ranks(mesh: Mesh) -> int:
    product = 1
    for size in mesh.shape:
        product *= int(size)
    return product


def _place(mesh: Mesh, name: str) -> tuple[int, int]:
    return axis_sizes(mesh, name)[name], position(mesh, name)
