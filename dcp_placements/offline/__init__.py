"""Work on checkpoint directories: no process group, no model code, no GPU.

Results are dataclasses. Nothing that a checkpoint's pickles name is executed.
"""

from importlib import import_module
from typing import Any

# Imported on first use: `convert` stands above this folder.
_MODULES = {
    "CannotLook": "dcp_placements.errors",
    "Checkpoint": "dcp_placements.offline.checkpoint",
    "check_picture_name": "dcp_placements.offline.picture",
    "diagnose": "dcp_placements.offline.doctor",
    "diff": "dcp_placements.offline.difference",
    "draw": "dcp_placements.offline.picture",
    "draw_rehearsal": "dcp_placements.offline.rehearsals.reading_picture",
    "export_safetensors": "dcp_placements.convert.conversion",
    "import_checkpoint": "dcp_placements.convert.conversion",
    "inspect": "dcp_placements.offline.inspection",
    "inspect_tensor": "dcp_placements.offline.inspection",
    "megatron_layout": "dcp_placements.offline.sources.megatron_directory",
    "rehearse": "dcp_placements.offline.rehearsals.rehearsal",
    "open_pair": "dcp_placements.offline.sources.opening",
    "open_source": "dcp_placements.offline.sources.opening",
    "reshard": "dcp_placements.convert.conversion",
    "save_figure": "dcp_placements.offline.picture",
    "shapes": "dcp_placements.offline.inspection",
    "stock_metadata": "dcp_placements.offline.rewriting",
    "to_json": "dcp_placements.offline.texts",
    "verify": "dcp_placements.offline.verification",
}


__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
