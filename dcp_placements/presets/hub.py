"""Names on the Hugging Face hub of models whose module has its experts stacked and fused.

Facts: transformers 5.23, ``conversion_mapping.py``: what ``from_pretrained`` joins (``Concatenate``
on dim 1 of ``MergeModulelist`` on dim 0), inverted. Module: ``mlp.experts.gate_up_proj``
``(E, 2F, H)``, gate first, and ``mlp.experts.down_proj`` ``(E, H, F)``. Hub: a matrix per expert.

Each of these is a ``rename`` from the model's names to the hub's: for ``export_safetensors``, and
for the planners of a model that reads or writes files with the hub's names. Rules still match the
module's names.
"""

from __future__ import annotations

from dcp_placements.names.renames import Renames, Replace, Split, Transpose, Unstack


def _experts(block: str, gate: str, up: str, down: str) -> Renames:
    return Renames(
        Unstack("mlp.experts.{}.gate_up_proj"),
        Split(
            "mlp.experts.*.gate_up_proj",
            (f"{block}.experts.{{}}.{gate}.weight", f"{block}.experts.{{}}.{up}.weight"),
        ),
        Unstack("mlp.experts.{}.down_proj"),
        Replace("mlp.experts.*.down_proj", f"{block}.experts.{{}}.{down}.weight"),
        Replace("mlp.gate", f"{block}.gate"),
        optional=True,
    )


mixtral = _experts("block_sparse_moe", "w1", "w3", "w2")
"""Mixtral: ``block_sparse_moe.experts.N.w1`` (gate), ``w3`` (up), ``w2`` (down)."""

qwen3_moe = _experts("mlp", "gate_proj", "up_proj", "down_proj")
"""Qwen3-MoE: ``mlp.experts.N.gate_proj``, ``up_proj``, ``down_proj``."""

deepseek_v3 = qwen3_moe
"""DeepSeek-V3: as Qwen3-MoE; its shared experts are plain tensors with the hub's names."""

gpt_oss = Renames(
    Transpose("mlp.experts.gate_up_proj"), Transpose("mlp.experts.down_proj"), optional=True
)
"""gpt-oss: ``mlp.experts.gate_up_proj`` ``(E, H, 2F)`` here, ``(E, 2F, H)`` in the files of 4 bits,
and so in their import with ``dequantize=``. Gate and up alternate row by row in both."""
