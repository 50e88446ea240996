"""Which tensors of a training checkpoint are the model's weights, and their own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dcp_placements.names.optimizer_state import OptimizerStates


class ModelTensors(NamedTuple):
    """The model's tensors and optimizer state of a checkpoint ``{"model": ..., "optim": ...}``::

    ModelTensors("model", {"w": ...}, {"optim.state.w.exp_avg": ...})
    """

    prefix: str  # the prefix of the model's names in the checkpoint; may be empty
    model: dict[str, Any]  # tensors by the model's own names; other prefixes are left out
    states: dict[str, Any]  # optimizer state, by the checkpoint's keys


def model_tensors(
    tensors: Mapping[str, Any],
    held: Mapping[str, Any],
    planner_data: Any,
    prefix: str | None = None,
) -> ModelTensors:
    """Return the model's tensors, by the model's own names, and its optimizer state.

    Args:
        tensors: Tensors by key.
        held: All tensors and objects of the checkpoint, by key.
        planner_data: ``planner_data`` of its metadata: the path of each key in the saved state
            dict, if it says so.
        prefix: The prefix of the model's names. By default the saved state dict's: ``model`` for
            ``{"model": model.state_dict(), "rng": ...}``.
    """
    of_optimizer = OptimizerStates(held)
    states = {
        fqn: tensor
        for fqn, tensor in tensors.items()
        if of_optimizer.of(fqn) is not None or ".param_groups." in f".{fqn}."
    }
    model = [fqn for fqn in tensors if fqn not in states]
    head = _saved_prefix(planner_data, model) if prefix is None else prefix.rstrip(".")
    start = f"{head}." if head else ""
    own = {fqn.removeprefix(start): tensors[fqn] for fqn in model if fqn.startswith(start)}
    return ModelTensors(head, own, states)


def _saved_prefix(planner_data: Any, fqns: Sequence[str]) -> str:
    """Return the keys below which the model was in the saved state dict; may be empty.

    A ``model`` that is a dict is the model, whatever tensors are beside it.
    """
    parents = set()
    for fqn in fqns:
        path = planner_data.get(fqn) if isinstance(planner_data, dict) else None
        if not isinstance(path, tuple | list) or ".".join(map(str, path)) != fqn:
            return ""
        parents.add(tuple(map(str, path[:-1])))
    models = {parent[: parent.index("model") + 1] for parent in parents if "model" in parent}
    if len(models) == 1:
        (model,) = models
        parents = {parent for parent in parents if parent[: len(model)] == model}
        if len(parents) > 1:
            return ".".join(model)
    return ".".join(parents.pop()) if len(parents) == 1 else ""
