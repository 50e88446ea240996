"""A state dict that torch's own planners place right: ``CheckpointableTensor`` attributes by rules.

torch 2.14 and newer store a plain tensor with ``global_shape``, ``global_offsets``,
``local_offsets`` and ``local_sizes`` at its place in the whole tensor. The rules know these
numbers, so that a framework that takes no planner can be given a state dict instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcp_placements._torch import (
    HAS_CHECKPOINTABLE_TENSOR,
    flatten_state_dict,
    global_rank,
    set_element,
)
from dcp_placements.bind.one_tensor import Placed
from dcp_placements.bind.state_dict import place
from dcp_placements.errors import Fault, PlacementError, raise_faults
from dcp_placements.names.flat import checkpoint_path, rename_keys
from dcp_placements.names.stacks_and_parts import Rename
from dcp_placements.rules.patterns import PlacementRules, Rules, RuleTable, check_declaration


def annotate(
    state_dict: Mapping[str, Any],
    rules: Rules | RuleTable | None,
    *,
    rename: Rename | None = None,
) -> dict[str, Any]:
    """Return a state dict for torch's own planners, with every tensor's place set on it.

    ``dcp.save(annotate(state_dict, rules))`` writes the whole tensors, without a planner of this
    package, under torch 2.14 or newer. Tensors are views of the same memory: a ``dcp.load`` into
    the result fills the model. A DTensor becomes its local tensor.

    Stock planners do not compare replicas, check only the number of elements and not that chunks
    tile the tensor, and record nothing of how a checkpoint was cut. A rename that stacks, unstacks
    or splits tensors, and rows that a rank holds several times, need our planners.

    Args:
        state_dict: Of one rank, nested or flat; not changed. Without models and optimizers
            themselves, whose tensors ``dcp.save`` asks for later.
        rules: As for ``PlacementSavePlanner``, or the mapping that ``PlacementRules`` are made of.
        rename: This rank's key to the checkpoint's key, a string for a string.

    Returns:
        A new nested dict. Tensors that neither a rule nor a DTensor speaks for, and all other
        values, are those of ``state_dict``. Without the keys whose mesh this rank is no part of.

    Raises:
        PlacementError: A torch whose planners would ignore the attributes; tensors and rules that
            do not fit; a rename that gives anything but names; a model in place of its tensors.
    """
    if not HAS_CHECKPOINTABLE_TENSOR:
        raise PlacementError(
            f"annotate() needs torch 2.14 or newer, and this is torch {torch.__version__}: its "
            "planners would ignore the annotations and take shards for replicas\n"
            "    way out:     pass planner=PlacementSavePlanner(rules); or "
            "installed(Placements(rules)) where a framework takes no planner"
        )
    rules = PlacementRules(rules) if isinstance(rules, Mapping) else rules
    check_declaration(rules, rename)
    flat, paths, reshaped, _, unnamed = rename_keys(*flatten_state_dict(dict(state_dict)), rename)
    raise_faults("keys could not be renamed", unnamed)
    placing = place(flat, rules, rename=rename)
    faults = placing.faults
    others = () if reshaped is None else (*reshaped.rows, *reshaped.wholes)
    unable = dict.fromkeys(others, "is made of other tensors")
    for key, one in placing.placed.items():
        if len({chunk.offsets for chunk in one.place.chunks}) < len(one.place.chunks):
            unable[key] = "this rank holds some of its rows several times"
    way_out = "way out:     Placements(rules, rename=...) and its planners; stock planners cannot"
    faults += [Fault(key, headline, (way_out,)) for key, headline in unable.items()]
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            headline = f"is a {type(value).__name__}, whose state dict dcp.save makes, unannotated"
            way_out = f"way out:     its tensors: annotate({{{key!r}: value.state_dict()}}, rules)"
            faults.append(Fault(key, headline, (way_out,)))
    raise_faults(f"rank {global_rank()} cannot be annotated", faults)
    annotated: dict[str, Any] = {}
    for key, value in flat.items():
        if key not in placing.absent:
            placed = placing.placed.get(key)
            leaf = value if placed is None else _annotated(placed)
            set_element(annotated, checkpoint_path(key, paths[key]), leaf)
    return annotated


def _annotated(placed: Placed) -> torch.Tensor:
    """Return a view of the local tensor that says where it lies."""
    tensor: Any = placed.tensor.detach()
    shape, chunks = placed.place.sharding.global_shape, placed.place.chunks
    if 0 in shape:
        return placed.tensor.new_empty(shape)
    tensor.global_shape = shape
    tensor.global_offsets = tuple(chunk.offsets for chunk in chunks)
    tensor.local_offsets = tuple(chunk.local_offsets for chunk in chunks)
    tensor.local_sizes = tuple(chunk.sizes for chunk in chunks)
    annotated: torch.Tensor = tensor
    return annotated
