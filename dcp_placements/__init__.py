"""Planners for torch.distributed.checkpoint that put every shard at its true global place.

The user declares a mesh and placements per parameter; from these the ``SavePlanner`` and the
``LoadPlanner`` compute the offsets of every local tensor in the whole one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_placements.bind.annotate import annotate
    from dcp_placements.errors import PlacementError
    from dcp_placements.installation import installed
    from dcp_placements.load.planner import PlacementLoadPlanner
    from dcp_placements.names.renames import (
        Renames,
        Renumber,
        Replace,
        Split,
        Stack,
        Unstack,
        contiguous,
    )
    from dcp_placements.names.target import Parts, Row, Rows
    from dcp_placements.placements import Placements
    from dcp_placements.report import LoadReport, SaveReport
    from dcp_placements.rules.mesh import MeshCoordinate
    from dcp_placements.rules.patterns import PlacementRules
    from dcp_placements.rules.placement import CheckpointPlacement, FusedShard, IndexShard
    from dcp_placements.save.check import check
    from dcp_placements.save.planner import PlacementSavePlanner
    from dcp_placements.storage.reader import PlacementFileSystemReader
    from dcp_placements.storage.writer import PlacementFileSystemWriter
    from dcp_placements.transfer.plan import transfer_plan
    from dcp_placements.transfer.world import TransferWorld

__version__ = "0.2.0"
"""That of pyproject.toml, which a save would have to search for among all installed packages."""

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
    "TransferWorld",
    "Unstack",
    "annotate",
    "check",
    "contiguous",
    "installed",
    "transfer_plan",
]

# Names are imported on first access, so that the layout algebra and a mesh need no torch.
_HOMES = {
    "CheckpointPlacement": "rules.placement",
    "FusedShard": "rules.placement",
    "IndexShard": "rules.placement",
    "LoadReport": "report",
    "MeshCoordinate": "rules.mesh",
    "Parts": "names.target",
    "PlacementError": "errors",
    "PlacementFileSystemReader": "storage.reader",
    "PlacementFileSystemWriter": "storage.writer",
    "PlacementLoadPlanner": "load.planner",
    "PlacementRules": "rules.patterns",
    "PlacementSavePlanner": "save.planner",
    "Placements": "placements",
    "Renames": "names.renames",
    "Renumber": "names.renames",
    "Replace": "names.renames",
    "Row": "names.target",
    "Rows": "names.target",
    "SaveReport": "report",
    "Split": "names.renames",
    "Stack": "names.renames",
    "TransferWorld": "transfer.world",
    "Unstack": "names.renames",
    "annotate": "bind.annotate",
    "check": "save.check",
    "contiguous": "names.renames",
    "installed": "installation",
    "transfer_plan": "transfer.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
