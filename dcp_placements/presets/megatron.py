"""Shared by Megatron Core and Megatron Lite: the two meshes of a world, and unsupported sizes.

Facts: the order of ranks is ``tp-cp-ep-dp-pp`` (``megatron/core/parallel_state.py``,
``initialize_model_parallel`` and ``RankGenerator``), the fastest first; dense ranks count by TP and
CP, expert ranks by ETP and EP, and both have the pipeline outermost.
"""

from __future__ import annotations

from math import prod

from dcp_placements.errors import PlacementError
from dcp_placements.names.renames import contiguous
from dcp_placements.presets.preset import axis_sizes
from dcp_placements.rules.mesh_axes import Mesh, MeshCoordinate, format_mesh, mesh_at

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")

NOT_KNOWN = {
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
"""Axes that each data-parallel wrapper does not support, and the reason."""


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
    MeshCoordinate(names=('pp', 'dp', 'cp', 'tp'), sizes=(2, 2, 1, 2), coordinate=(1, 0, 0, 1))
    >>> expert
    MeshCoordinate(names=('pp', 'edp', 'ep', 'etp'), sizes=(2, 2, 2, 1), coordinate=(1, 0, 1, 0))

    Args:
        rank: The global rank.
        world_size: Ranks in all.
        tp: Tensor parallelism outside the experts.
        cp: Context parallelism: replicas.
        pp: Pipeline stages.
        ep: Expert parallelism.
        etp: Tensor parallelism of an expert; None for ``tp``, which is Megatron's default.

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
        if min(sizes) < 1 or world_size % prod(sizes):
            raise PlacementError(
                f"a world of {world_size} ranks cannot be cut by {what} = "
                f"{' x '.join(map(str, sizes))}: the product must divide it"
            )
    dense = {"pp": pp, "dp": world_size // (tp * cp * pp), "cp": cp, "tp": tp}
    expert = {"pp": pp, "edp": world_size // (etp * ep * pp), "ep": ep, "etp": etp}
    return mesh_at(dense, rank), mesh_at(expert, rank)


def check_meshes(dense: Mesh, expert: Mesh | None, data_parallel: str) -> None:
    """Check that the meshes are of one world, and that Megatron supports such a job.

    Raises:
        PlacementError: Missing axes, meshes of different worlds or stages, an unknown wrapper, or a
            combination that Megatron refuses, with its reason.
    """
    sizes = axis_sizes(dense, *DENSE)
    sizes |= {} if expert is None else axis_sizes(expert, *EXPERT)
    if data_parallel not in NOT_KNOWN:
        raise PlacementError(
            f"data_parallel={data_parallel!r} is none of {', '.join(map(repr, NOT_KNOWN))}"
        )
    if expert is not None and (
        prod(dense.shape) != prod(expert.shape)
        or axis_sizes(dense, "pp") != axis_sizes(expert, "pp")
        or _seen(dense).get_local_rank("pp") != _seen(expert).get_local_rank("pp")
    ):
        raise PlacementError(
            f"the dense mesh {format_mesh(dense)} and the expert mesh {format_mesh(expert)} must "
            "be of the same ranks, with the same pipeline stages"
        )
    wrong = [axis for axis in NOT_KNOWN[data_parallel] if sizes.get(axis, 1) > 1]
    if wrong:
        combination = " and ".join(f"{axis}={sizes[axis]}" for axis in wrong)
        reasons = dict.fromkeys(f"reason:      {NOT_KNOWN[data_parallel][axis]}" for axis in wrong)
        without = " and ".join(f"{axis}=1" for axis in wrong)
        raise PlacementError(
            "\n    ".join(
                (
                    f"data_parallel={data_parallel!r} cannot be combined with {combination}",
                    *reasons,
                    f'way out:     {without}, or data_parallel="ddp"',
                )
            )
        )


def without_axis(mesh: Mesh, name: str) -> MeshCoordinate:
    """Return ``mesh`` as this rank sees it, without one axis.

    Ranks that differ along the axis hold tensors with different names, so no rule concerns it.
    """
    seen = _seen(mesh)
    return seen[[axis for axis in seen.names if axis != name]]


def expert_numbers(expert_mesh: Mesh, experts: int) -> range:
    """Return the numbers of this rank's experts; ``ep`` must divide ``experts``."""
    ep = axis_sizes(expert_mesh, "ep")["ep"]
    return contiguous([experts // ep] * ep, at=_seen(expert_mesh).get_local_rank("ep"))


def _seen(mesh: Mesh) -> MeshCoordinate:
    """Return a mesh as this rank sees it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlacementError(
            f"this rank is not in mesh {format_mesh(mesh)}: each rank makes its own preset, of "
            "meshes that it is in"
        )
    return MeshCoordinate(mesh.mesh_dim_names or (), mesh.shape, coordinate)
