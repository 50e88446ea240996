"""torch.distributed.checkpoint that puts every shard where it belongs.

A ``SavePlanner``/``LoadPlanner`` pair: the user names, per parameter, the checkpoint's mesh and
placements; the planners put every shard at its true place in the whole tensor.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_placements.declaration import Placements
    from dcp_placements.errors import PlacementError
    from dcp_placements.load_planner import PlacementLoadPlanner
    from dcp_placements.mesh import MeshCoordinate
    from dcp_placements.naming import Parts, Row, Rows
    from dcp_placements.placement import CheckpointPlacement, FusedShard, IndexShard
    from dcp_placements.preflight import check
    from dcp_placements.renaming import (
        Renames,
        Renumber,
        Replace,
        Split,
        Stack,
        Unstack,
        contiguous,
    )
    from dcp_placements.report import LoadReport, SaveReport
    from dcp_placements.rules import PlacementRules
    from dcp_placements.save.planner import PlacementSavePlanner
    from dcp_placements.storage_reader import PlacementFileSystemReader
    from dcp_placements.storage_writer import PlacementFileSystemWriter

__all__ = [
    "CheckpointPlacement",
    "FusedShard",
    "IndexShard",
    "LoadReport",
    "MeshCoordinate",
    "Parts",
    "PlacementError",
    "PlacementFileSystemReader",
    "PlacementFileSystemWriter",
    "PlacementLoadPlanner",
    "PlacementRules",
    "PlacementSavePlanner",
    "Placements",
    "Renames",
    "Renumber",
    "Replace",
    "Row",
    "Rows",
    "SaveReport",
    "Split",
    "Stack",
    "Unstack",
    "check",
    "contiguous",
]

# Names are fetched when asked for, so that the layout algebra and a mesh can be had without torch.
_HOMES = {
    "CheckpointPlacement": "placement",
    "FusedShard": "placement",
    "IndexShard": "placement",
    "LoadReport": "report",
    "MeshCoordinate": "mesh",
    "Parts": "naming",
    "PlacementError": "errors",
    "PlacementFileSystemReader": "storage_reader",
    "PlacementFileSystemWriter": "storage_writer",
    "PlacementLoadPlanner": "load_planner",
    "PlacementRules": "rules",
    "PlacementSavePlanner": "save.planner",
    "Placements": "declaration",
    "Renames": "renaming",
    "Renumber": "renaming",
    "Replace": "renaming",
    "Row": "naming",
    "Rows": "naming",
    "SaveReport": "report",
    "Split": "renaming",
    "Stack": "renaming",
    "Unstack": "renaming",
    "check": "preflight",
    "contiguous": "renaming",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
