"""Planners for torch.distributed.checkpoint that put every shard at its true global place.

The user declares a mesh and placements per parameter; from these the ``SavePlanner`` and the
``LoadPlanner`` compute the offsets of every local tensor in the whole one.
"""
# isort: skip_file

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_placements.errors import PlacementError as PlacementError
    from dcp_placements.installation import installed as installed
    from dcp_placements.load.planner import PlacementLoadPlanner as PlacementLoadPlanner
    from dcp_placements.names.renames import (
        Renames as Renames,
        Renumber as Renumber,
        Replace as Replace,
        Split as Split,
        Stack as Stack,
        Transpose as Transpose,
        Unstack as Unstack,
        contiguous as contiguous,
    )
    from dcp_placements.names.rename_results import Parts as Parts, Row as Row, Rows as Rows
    from dcp_placements.declaration import Placements as Placements
    from dcp_placements.preflight import check as check
    from dcp_placements.advice.proposal import propose_placements as propose_placements
    from dcp_placements.report import LoadReport as LoadReport, SaveReport as SaveReport
    from dcp_placements.rules.mesh_axes import MeshCoordinate as MeshCoordinate
    from dcp_placements.rules.patterns import PlacementRules as PlacementRules
    from dcp_placements.rules.placement import (
        CheckpointPlacement as CheckpointPlacement,
        FlatShard as FlatShard,
        FusedShard as FusedShard,
        IndexShard as IndexShard,
        RaggedShard as RaggedShard,
    )
    from dcp_placements.save.planner import PlacementSavePlanner as PlacementSavePlanner
    from dcp_placements.storage.reader import PlacementFileSystemReader as PlacementFileSystemReader
    from dcp_placements.storage.writer import PlacementFileSystemWriter as PlacementFileSystemWriter

__version__ = "0.3.0"
"""That of pyproject.toml, which a save would have to search for among all installed packages."""

# Names are imported on first access, so that the layout algebra and a mesh need no torch.
_NAMES = {
    "errors": "PlacementError",
    "installation": "installed",
    "load.planner": "PlacementLoadPlanner",
    "names.renames": "Renames Renumber Replace Split Stack Transpose Unstack contiguous",
    "names.rename_results": "Parts Row Rows",
    "declaration": "Placements",
    "preflight": "check",
    "advice.proposal": "propose_placements",
    "report": "LoadReport SaveReport",
    "rules.mesh_axes": "MeshCoordinate",
    "rules.patterns": "PlacementRules",
    "rules.placement": "CheckpointPlacement FlatShard FusedShard IndexShard RaggedShard",
    "save.planner": "PlacementSavePlanner",
    "storage.reader": "PlacementFileSystemReader",
    "storage.writer": "PlacementFileSystemWriter",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # what is imported above


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
