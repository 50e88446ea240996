"""Which experts a checkpoint records as cut or numbered over the ranks that held them."""

from __future__ import annotations

from collections.abc import Mapping

from dcp_placements.names.numbers import NUMBER, number_finder
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.experts import ExpertFamily
from dcp_placements.storage.metadata.record import ROWS

_ANY_EXPERT = "123456789"


def recorded_experts(
    checkpoint: Checkpoint, families: Mapping[str, ExpertFamily], *, axis: str
) -> dict[str, str]:
    """Return how each expert tensor was saved, as far as the checkpoint records it.

    A stacked tensor counts if its dim of experts was cut over ``axis``, by a recorded rule, or into
    rows that ranks list. Another cut of that dim proves nothing: FSDP makes one without a rule.
    Tensors with a key per expert count if a rename numbered the experts.

    Args:
        checkpoint: The checkpoint.
        families: The expert tensors, by key.
        axis: The name of the axis along which ranks hold different experts.

    Returns:
        By key, as text; without the tensors of which nothing is recorded.
    """
    record = checkpoint.record
    if record is None:
        return {}
    rules = (checkpoint.provenance or {}).get("rules", {})
    result = {}
    for fqn, family in families.items():
        if family.dim is None:
            key = "." + fqn.replace("{}", _ANY_EXPERT)
            for step in record.renames:
                if "{}" in step.pattern:
                    match = number_finder(step.pattern).search(key)
                    if match is not None and match[NUMBER] == _ANY_EXPERT:
                        result[fqn] = str(step)
            continue
        for cut in record.cuts(fqn):
            if cut.dim == family.dim and (cut.axis == axis or cut.kind == ROWS or fqn in rules):
                result.setdefault(fqn, str(cut))
    return result
