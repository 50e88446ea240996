"""Rules and renames for known frameworks, as thin tables of their conventions.

Each function returns the ``Placements`` of one rank. torchtitan and NeMo AutoModel need none: their
DTensors are complete.
"""

from dcp_placements.presets.megatron import megatron_meshes
from dcp_placements.presets.megatron_core import megatron_core
from dcp_placements.presets.megatron_lite import megatron_lite
from dcp_placements.presets.transformers import transformers
from dcp_placements.presets.veomni import veomni

__all__ = [
    "megatron_core",
    "megatron_lite",
    "megatron_meshes",
    "transformers",
    "veomni",
]
