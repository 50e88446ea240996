"""VeOmni: its own map from FQN to spec, for the raw state of a model.

Facts: VeOmni ``veomni/distributed/parallel_plan.py``. ``ParallelPlan.apply`` cuts experts over a
mesh axis (``para_name``, ``"ep"``) by ``placement`` and sets ``model._fqn2spec_info``: a
``SpecInfo`` per FQN, aliases included. FSDP2 then cuts the rest, on dim 1 by default and on dim 0
for some optimizers; ``para_fsdp_mesh`` has the axes of both (``ep_replicate`` in front for HSDP).

A raw parameter describes FSDP alone. VeOmni's own save restores ``ep`` into the DTensor
(``veomni/checkpoint/dcp_checkpointer.py``), with FSDP left of it: if both cut one dim, the DTensor
declares FSDP first, and the file is block-transposed (experts 0 1 4 5 2 3 6 7). No rule can repair
such a DTensor, so it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dcp_placements.declaration import Placements
from dcp_placements.errors import CannotPlace, PlacementError
from dcp_placements.presets.preset import axis_sizes, rules_of
from dcp_placements.rules.mesh_axes import Mesh
from dcp_placements.rules.patterns import PlacementRules
from dcp_placements.rules.placement import CheckpointPlacement, kind_of, shard_dim


def veomni(model_or_specs: nn.Module | Mapping[str, Any], mesh: Mesh | None = None) -> Placements:
    """Return the placements of the raw state of a VeOmni model.

    The state dict has the model's parameters as FSDP2 holds them, ``model.<fqn>``, before
    ``restore_extra_parallel_dim``.

    Args:
        model_or_specs: The model after ``ParallelPlan.apply``, or its ``_fqn2spec_info``.
        mesh: The mesh with the axis of each spec's ``para_name``; None: each spec's own.

    Raises:
        PlacementError: The model has no specs, or no mesh has the axis of a spec.
    """
    specs = model_or_specs
    if isinstance(specs, nn.Module):
        specs = getattr(specs, "_fqn2spec_info", None) or {}
    if not specs:
        raise PlacementError(
            "the model has no _fqn2spec_info\n"
            "    likely:      ParallelPlan.apply has not run, or this is a wrapper of the model\n"
            "    way out:     the model itself, or its map of FQN to SpecInfo"
        )
    placements: dict[str, CheckpointPlacement | None] = {}
    for fqn, spec in specs.items():
        own = spec.para_fsdp_mesh if mesh is None else mesh
        if own is None or not kind_of(spec.placement):
            placements[fqn] = None
            continue
        axis_sizes(own, spec.para_name)
        placements[fqn] = CheckpointPlacement(own, {spec.para_name: spec.placement})
    return Placements(RawState(rules_of(placements)))


class RawState:
    """Rules that refuse a DTensor in which FSDP and another axis cut one dim.

    Args:
        rules: The placement of each FQN over its own axis.
    """

    def __init__(self, rules: PlacementRules) -> None:
        self.rules = rules

    def __call__(self, fqn: str, tensor: Any) -> CheckpointPlacement | None:
        """Return the placement of ``fqn``; refuse a tensor whose ``ep`` is restored."""
        placement = self.rules(fqn)
        own = getattr(tensor, "placements", ())
        if placement is None or not own:
            return placement
        names = placement.mesh.mesh_dim_names or ()
        ruled = {n for n, e in zip(names, placement.placements, strict=True) if kind_of(e)}
        cuts = [
            (name, shard_dim(entry, len(tensor.shape)))
            for name, entry in zip(tensor.device_mesh.mesh_dim_names or (), own, strict=False)
            if kind_of(entry)
        ]
        dims = [dim for _, dim in cuts]
        if len(set(dims)) < len(dims) and ruled & {name for name, _ in cuts}:
            raise CannotPlace(
                f"holds a DTensor whose dim {max(dims, key=dims.count)} is cut by "
                + " and by ".join(repr(name) for name, _ in cuts),
                "likely:      restore_extra_parallel_dim has run: it puts FSDP before "
                f"{', '.join(map(repr, sorted(ruled)))}, and the order of the rows is lost",
                "way out:     save the raw state: model.state_dict() as FSDP2 gives it",
            )
        return placement
