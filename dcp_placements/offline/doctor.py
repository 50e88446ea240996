"""``doctor``: expert tensors of which fewer experts are stored than the model has.

Experts of one name on several ep ranks look like replicas if nothing says otherwise. DCP keeps one
of each chunk, so that 4 of 8 experts are stored where 2 ep ranks saved.

A checkpoint of ``PlacementSavePlanner`` records how it was cut and renamed. Experts that were cut
over ep, or numbered by a rename, are whole whatever the mesh was.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from dcp_placements.errors import CannotLook, format_ranks
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.experts import (
    ExpertFamily,
    expert_families,
    expert_key,
    recorded_experts,
)
from dcp_placements.transfer.world import MeshAxes

EP = "ep"
"""The axis along which ranks hold different experts."""

WHOLE, OVERWRITTEN, UNCLEAR = "whole", "overwritten", "unclear"

_ROUTER = re.compile(r"(^|\.)(gate|router)(\.|$)|score_correction_bias|expert_bias")


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of a layer's experts."""

    JSON: ClassVar[str] = "stored experts verdict reason"

    fqn: str  # its key, with ``{}`` for the expert if each has a key of its own
    stored: int  # the number of experts that the checkpoint has of it
    experts: int | None  # the number of experts that the model has; None if that is not known
    # ``"whole"``; ``"overwritten"``: experts of several ranks were taken for replicas;
    # ``"unclear"``
    verdict: str
    # Why it is unclear; of a whole tensor, what the checkpoint records of its save
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Whether a checkpoint has all experts of the model."""

    JSON: ClassVar[str] = "path healthy tensors unchecked"

    path: str  # the checkpoint
    tensors: Mapping[str, ExpertTensor]  # the tensors of experts, by key
    unchecked: tuple[str, ...]  # all other keys

    @property
    def healthy(self) -> bool:
        """Whether all experts are there."""
        return all(tensor.verdict == WHOLE for tensor in self.tensors.values())


def diagnose(
    path: str | os.PathLike[str],
    *,
    experts_per_layer: int | None = None,
    axes: MeshAxes | None = None,
) -> Diagnosis:
    """Return of which tensors fewer experts are stored than the model has; no data is read.

    Args:
        path: The checkpoint.
        experts_per_layer: The number of experts in a layer of the model. By default it is the
            number stored, for tensors that the checkpoint records as cut or numbered over ep;
            for others it is taken from the routers' shapes, layer by layer, or from the mesh.
        axes: The mesh of the ranks that saved: sizes by axis name; one is ``ep``. It is used where
            nothing else gives the number of experts: each ep rank held as many as are stored.
            Ignored if the checkpoint records how all of its experts were saved.

    Raises:
        CannotLook: There is no checkpoint; or ``axes`` has no ``ep``, or fewer ranks than wrote.
    """
    checkpoint = Checkpoint(path)
    families = _families(checkpoint)
    recorded = recorded_experts(checkpoint, families, axis=EP)
    if axes is not None and len(recorded) < len(families):
        _check_axes(checkpoint, axes)
    routers = _routers(checkpoint, families)
    tensors = {}
    for fqn, family in families.items():
        experts = experts_per_layer
        if experts is None:
            experts = family.stored if fqn in recorded else routers.get(_layer(family.layer))
        if experts is None and axes is not None:
            experts = family.stored * axes[EP]
        verdict, reason = _verdict(family, experts)
        if verdict == WHOLE:
            reason = recorded.get(fqn, "")
        tensors[fqn] = ExpertTensor(fqn, family.stored, experts, verdict, reason)
    keys = (*checkpoint.tensors, *checkpoint.objects)
    checked = {key for family in families.values() for key in family.keys}
    return Diagnosis(checkpoint.path, tensors, tuple(key for key in keys if key not in checked))


def _families(checkpoint: Checkpoint) -> dict[str, ExpertFamily]:
    """Return the expert tensors, sorted by key.

    The only dim of a stacked tensor may be anything. It is one of experts if larger tensors of the
    layer have as many.
    """
    families = expert_families(checkpoint.tensors.values())

    def is_certain(family: ExpertFamily) -> bool:
        return family.dim is None or len(family.members[0].shape) > family.dim + 1

    counts = {
        (_layer(family.layer), family.stored)
        for family in families.values()
        if family.dim is not None and is_certain(family)
    }
    return {
        fqn: family
        for fqn, family in sorted(families.items())
        if is_certain(family) or (_layer(family.layer), family.stored) in counts
    }


def _layer(layer: str) -> str:
    """Return the part that the keys of a layer's weights and of their optimizer state share.

    >>> _layer("optim.state.layers.0.mlp.experts")
    'layers.0.mlp.experts'
    """
    parts = layer.split(".")
    numbered = [position for position, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbered[0] - 1 :] if numbered and numbered[0] else parts[-1:])


def _routers(checkpoint: Checkpoint, families: Mapping[str, ExpertFamily]) -> dict[str, int]:
    """Return the number of experts by layer, from the routers' shapes."""
    states = OptimizerStates({**checkpoint.tensors, **checkpoint.objects})
    layers = {_layer(family.layer) for family in families.values()}
    counts: dict[str, set[int]] = {}
    for fqn, tensor in checkpoint.tensors.items():
        if not tensor.shape or not _ROUTER.search(fqn) or expert_key(fqn):
            continue
        if states.of(fqn) is not None or fqn.startswith("optim"):
            continue
        for layer in layers:
            parent = layer.rpartition(".")[0]
            if parent and f".{parent}." in f".{fqn}":
                counts.setdefault(layer, set()).add(tensor.shape[0])
    return {layer: shapes.pop() for layer, shapes in counts.items() if len(shapes) == 1}


def _check_axes(checkpoint: Checkpoint, axes: MeshAxes) -> None:
    if EP not in axes:
        raise CannotLook(f"the mesh {axes} has no axis {EP}, along which ranks hold other experts")
    ranks = prod(axes.values())
    writers = {rank for tensor in checkpoint.tensors.values() for rank in tensor.ranks}
    beyond = [rank for rank in writers if rank >= ranks]
    if beyond:
        raise CannotLook(
            f"the mesh {axes} has {ranks} ranks, but {format_ranks(beyond)} wrote a part of the "
            "checkpoint\n    way out:     the mesh of all ranks that saved"
        )


def _verdict(family: ExpertFamily, experts: int | None) -> tuple[str, str]:
    """Return the verdict on a tensor, and why it is unclear."""
    stored = family.stored
    if experts is None:
        return UNCLEAR, "how many experts the model has is not known"
    if family.experts != list(range(stored)):
        return UNCLEAR, "the experts that are stored are not numbered from 0 without gaps"
    if stored == experts:
        return WHOLE, ""
    if not stored or stored > experts or experts % stored:
        return UNCLEAR, f"{experts} experts are not a multiple of the {stored} stored"
    return OVERWRITTEN, ""
