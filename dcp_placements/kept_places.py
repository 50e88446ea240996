"""The places of a rank's last save, for a save of tensors that lie the same.

A binding is a function of the key, the tensor's shapes, mesh and placements, and of what the rules
say. Every one of these is looked at again, tensor by tensor; what is kept is the work that follows
from them. Rules are asked again unless they are ``PlacementRules``, which cannot change; a callable
may change its mind. The tensors themselves are not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_placements.interop import DTensor, dtensor_facts, has_hooks, is_dtensor_like
from dcp_placements.naming import Path
from dcp_placements.offer import Offering
from dcp_placements.placing import Placed, Placing
from dcp_placements.rules import PlacementRules, Rules

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class KeptPlaces:
    """What one rank's last save came to, without its tensors.

    Attributes:
        rules: The rules that were asked.
        rank: The rank.
        paths: Where the keys stand in the nested state dict.
        keys: In state dict order.
        seen: By key, all that its place was worked out from.
        meshes: Those whose identity is in ``seen``: while they are here, no other takes it.
        places: By key, what ``Placed`` is made of beside the tensor; None for what has no place.
        absent: As in ``Placing``.
        matched: As in ``Placing``.
        offering: What was offered; it names tables and keys, no tensors.
    """

    rules: PlacementRules | None
    rank: int
    paths: Mapping[str, Path] | None
    keys: list[str]
    seen: list[tuple[Any, ...]]
    meshes: list[Any]
    places: list[tuple[Any, ...] | None]
    absent: set[str] = field(default_factory=set)
    matched: dict[str, int] = field(default_factory=dict)
    offering: Offering = field(default_factory=Offering)

    def again(
        self,
        state_dict: Mapping[str, Any],
        rules: Rules | None,
        rank: int,
        paths: Mapping[str, Path] | None,
    ) -> Placing | None:
        """Return the places of a state dict that lies as the last one did; None if any differs."""
        if rules is not self.rules or rank != self.rank or list(state_dict) != self.keys:
            return None
        if paths != self.paths:
            return None
        placed: dict[str, Placed] = {}
        rows = zip(state_dict.items(), self.seen, self.places, strict=True)
        for (fqn, value), seen, place in rows:
            tensor, now = _look(value)
            if now != seen:
                return None
            if place is not None:
                placed[fqn] = Placed(fqn, tensor, *place)
        return Placing(placed, set(self.absent), [], dict(self.matched))


def kept_places(
    state_dict: Mapping[str, Any],
    rules: Rules | None,
    rank: int,
    paths: Mapping[str, Path] | None,
    placing: Placing,
    offering: Offering,
) -> KeptPlaces | None:
    """Return what can be kept of a save's places; None where the next one has to look anew."""
    if rules is not None and type(rules) is not PlacementRules:
        return None
    if placing.faults or offering.loose.items:
        return None
    seen, places, meshes = [], [], {}
    for fqn, value in state_dict.items():
        _, now = _look(value)
        if now is None:
            return None
        seen.append(now)
        if is_dtensor_like(value):
            meshes[id(value.device_mesh)] = value.device_mesh
        found = placing.placed.get(fqn)
        if found is not None and type(found) is not Placed:
            return None
        places.append(
            None if found is None else (found.binding, found.chunks, found.rule, found.mesh)
        )
    return KeptPlaces(
        rules,
        rank,
        paths,
        list(state_dict),
        seen,
        list(meshes.values()),
        places,
        set(placing.absent),
        dict(placing.matched),
        offering,
    )


def _look(value: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """Return a value's local tensor and all that its place depends on; None for no such thing."""
    kind = type(value)
    if kind is DTensor or (kind not in _PLAIN_TENSORS and is_dtensor_like(value)):
        local, mesh, placements, whole = dtensor_facts(value)
        if type(local) is not torch.Tensor:
            return local, None
        cut = kind, id(mesh), placements, whole
        return local, (*cut, local.shape, local.dtype, local.requires_grad, local.layout)
    if isinstance(value, torch.Tensor):
        if kind not in _PLAIN_TENSORS or has_hooks(value):
            return value, None
        return value, (kind, value.shape, value.dtype, value.requires_grad, value.layout)
    return None, None if has_hooks(value) else (kind,)
