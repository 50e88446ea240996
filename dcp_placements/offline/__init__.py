"""Work on checkpoint directories: no process group, no model code, no GPU.

What the command line prints, as dataclasses. Nothing that a checkpoint's pickles name is executed.
"""

from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.diagnosis import diagnose
from dcp_placements.offline.difference import diff
from dcp_placements.offline.directory import CannotLook
from dcp_placements.offline.drawing import draw
from dcp_placements.offline.explanation import explain
from dcp_placements.offline.export import export_safetensors, export_torch
from dcp_placements.offline.inspection import inspect
from dcp_placements.offline.megatron_import import import_megatron
from dcp_placements.offline.megatron_layout import megatron_layout
from dcp_placements.offline.merging import merge_metadata
from dcp_placements.offline.picture import check_picture_name, save_figure
from dcp_placements.offline.rehearsal import rehearse
from dcp_placements.offline.rescue import rescue
from dcp_placements.offline.safetensors_import import import_safetensors
from dcp_placements.offline.verification import verify

__all__ = [
    "CannotLook",
    "Checkpoint",
    "check_picture_name",
    "diagnose",
    "diff",
    "draw",
    "explain",
    "export_safetensors",
    "export_torch",
    "import_megatron",
    "import_safetensors",
    "inspect",
    "megatron_layout",
    "merge_metadata",
    "rehearse",
    "rescue",
    "save_figure",
    "verify",
]
