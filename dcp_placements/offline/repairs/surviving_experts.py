"""What an EP-unaware save left of the experts: which survived, and from which rank.

Experts of one name on several ep ranks look like replicas if nothing says otherwise. DCP keeps one
of each chunk and balances the writers, so the survivors of a layer come from several ep ranks. A
file's name tells which rank wrote a chunk, and that rank's place in the mesh which experts it held.

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
from dcp_placements.offline.declared import MeshAxes, mesh_at
from dcp_placements.offline.experts import (
    ExpertFamily,
    ExpertPart,
    expert_families,
    expert_key,
    recorded_experts,
)

EP = "ep"
"""The axis along which ranks hold different experts."""

WHOLE, OVERWRITTEN, UNCLEAR = "whole", "overwritten", "unclear"

_ROUTER = re.compile(r"(^|\.)(gate|router)(\.|$)|score_correction_bias|expert_bias")


@dataclass(frozen=True, slots=True)
class Survivor:
    """One expert of a tensor, as the checkpoint has it."""

    row: int  # its number in the checkpoint, which is its number on the rank that wrote it
    ranks: tuple[int, ...]  # the ranks that wrote its chunks
    expert: int | None  # its number in the model; None if the mesh is not given, or if it is torn
    torn: bool  # whether its chunks are of different experts, or some are missing


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of a layer's experts."""

    JSON: ClassVar[str] = "layer state=is_state stored experts verdict reason survivors"

    fqn: str  # its key, with ``{}`` for the expert if each has a key of its own
    layer: str  # the layer's experts: the same for weights and optimizer state
    is_state: bool  # whether it is optimizer state
    stored: int  # the number of experts that the checkpoint has of it
    experts: int | None  # the number of experts that the model has; None if that is not known
    # ``"whole"``; ``"overwritten"``: experts of several ranks were taken for replicas;
    # ``"unclear"``
    verdict: str
    # Why it is unclear; of a whole tensor, what the checkpoint records of its save
    reason: str = ""
    survivors: tuple[Survivor, ...] = ()  # the experts in the checkpoint, if it is overwritten

    @property
    def kept(self) -> tuple[int, ...]:
        """The experts that survived, by their numbers in the model."""
        return tuple(sorted(s.expert for s in self.survivors if s.expert is not None))


@dataclass(frozen=True, slots=True)
class ExpertLoss:
    """What is left of a layer's experts, over all of their tensors."""

    JSON: ClassVar[str] = "experts kept weights_only lost"

    layer: str  # as in ``ExpertTensor``
    experts: int  # the number of experts that the model has
    kept: tuple[int, ...]  # experts with all weights and all optimizer state
    weights_only: tuple[int, ...]  # experts with all weights, but not all optimizer state
    lost: tuple[int, ...]  # the others


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What an EP-unaware save did to a checkpoint."""

    JSON: ClassVar[str] = "path healthy axes tensors layers sound"

    path: str  # the checkpoint
    axes: Mapping[str, int] | None  # the mesh that was given; None if it was not needed
    tensors: Mapping[str, ExpertTensor]  # the tensors of experts, by key
    # The losses by layer, if the mesh is given and a tensor of the layer is overwritten
    layers: Mapping[str, ExpertLoss]
    sound: tuple[str, ...]  # keys that have nothing to do with experts, or whose experts are whole

    @property
    def healthy(self) -> bool:
        """Whether all experts are there."""
        return all(tensor.verdict == WHOLE for tensor in self.tensors.values())

    def of(self, verdict: str) -> tuple[ExpertTensor, ...]:
        """Return the tensors with a verdict."""
        return tuple(tensor for tensor in self.tensors.values() if tensor.verdict == verdict)


def diagnose(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    experts_per_layer: int | None = None,
    axes: MeshAxes | None = None,
) -> Diagnosis:
    """Return what an EP-unaware save left of the experts; no data is read.

    Args:
        path: The checkpoint.
        experts_per_layer: The number of experts in a layer of the model. By default it is the
            number stored, for tensors that the checkpoint records as cut or numbered over ep;
            for others it is taken from the routers' shapes, layer by layer, or from the mesh.
        axes: The mesh of the ranks that saved: sizes by axis name, in rank order; one is ``ep``.
            Each ep rank is assumed to have held a contiguous run of the experts. Ignored if the
            checkpoint records how all of its experts were saved.

    Raises:
        CannotLook: There is no checkpoint; or ``axes`` has no ``ep`` or fewer ranks than wrote, or
            ranks of such a mesh cannot have written these files.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    families = _families(checkpoint)
    states = OptimizerStates({**checkpoint.tensors, **checkpoint.objects})
    recorded = recorded_experts(checkpoint, families, axis=EP)
    if families and len(recorded) == len(families):
        axes = None
    if axes is not None:
        _check_axes(checkpoint, axes)
    routers = _routers(checkpoint, families, states)
    tensors = {}
    for fqn, family in families.items():
        layer = _layer(family.layer)
        experts = experts_per_layer
        if experts is None:
            experts = family.stored if fqn in recorded else routers.get(layer)
        if experts is None and axes is not None:
            experts = family.stored * axes[EP]
        is_state = any(_is_state(key, states) for key in family.keys)
        verdict, reason, survivors = _examine(family, experts, axes)
        if verdict == WHOLE:
            reason = recorded.get(fqn, "")
        tensors[fqn] = ExpertTensor(
            fqn, layer, is_state, family.stored, experts, verdict, reason, survivors
        )
    return Diagnosis(
        checkpoint.path,
        axes,
        tensors,
        {} if axes is None else _losses(tensors),
        _sound(checkpoint, families, tensors),
    )


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


def _is_state(fqn: str, states: OptimizerStates) -> bool:
    return states.of(fqn) is not None or fqn.startswith("optim")


def _routers(
    checkpoint: Checkpoint, families: Mapping[str, ExpertFamily], states: OptimizerStates
) -> dict[str, int]:
    """Return the number of experts by layer, from the routers' shapes."""
    layers = {_layer(family.layer) for family in families.values()}
    counts: dict[str, set[int]] = {}
    for fqn, tensor in checkpoint.tensors.items():
        if not tensor.shape or not _ROUTER.search(fqn) or expert_key(fqn) or _is_state(fqn, states):
            continue
        for layer in layers:
            parent = layer.rpartition(".")[0]
            if parent and f".{parent}." in f".{fqn}":
                counts.setdefault(layer, set()).add(tensor.shape[0])
    return {layer: shapes.pop() for layer, shapes in counts.items() if len(shapes) == 1}


def _sound(
    checkpoint: Checkpoint,
    families: Mapping[str, ExpertFamily],
    tensors: Mapping[str, ExpertTensor],
) -> tuple[str, ...]:
    damaged = [(fqn, f) for fqn, f in families.items() if tensors[fqn].verdict != WHOLE]
    affected = {key for _, family in damaged for key in family.keys}
    numbered = {tensors[fqn].layer for fqn, family in damaged if family.dim is None}
    for fqn in checkpoint.objects:
        # Hyperparameters, under a rank's own numbers of experts.
        key = expert_key(fqn)
        if key is not None and key.index is not None and _layer(key.layer) in numbered:
            affected.add(fqn)
    return tuple(k for k in (*checkpoint.tensors, *checkpoint.objects) if k not in affected)


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


def _check_order(family: ExpertFamily, axes: MeshAxes) -> None:
    """Refuse a mesh whose ranks cannot have written these chunks.

    A DTensor is one box on each rank, and an EP-unaware save has the same boxes on every ep rank.
    If there are as many boxes as positions beside ep, each position has one box of its own.
    """
    beside = prod(size for name, size in axes.items() if name != EP)
    for tensor in family.members.values():
        if len(tensor.boxes) != beside:
            continue
        first: dict[tuple[int, ...], int] = {}
        for writer in [chunk.writer for chunk in tensor.chunks if chunk.writer is not None]:
            coordinate = _coordinate(axes, writer)
            del coordinate[EP]
            position = tuple(coordinate.values())
            if position in first:
                raise CannotLook(
                    f"{tensor.fqn}: ranks {first[position]} and {writer} wrote different parts of "
                    f"it, but in the mesh {dict(axes)} they differ along {EP} alone and hold the "
                    "same part\n    way out:     the axes in rank order, the last one fastest"
                )
            first[position] = writer


def _coordinate(axes: MeshAxes, rank: int) -> dict[str, int]:
    """Return a rank's position along each axis, by name."""
    return dict(zip(axes, mesh_at(axes, rank).get_coordinate(), strict=True))


def _examine(
    family: ExpertFamily, experts: int | None, axes: MeshAxes | None
) -> tuple[str, str, tuple[Survivor, ...]]:
    """Return the verdict on a tensor, why it is unclear, and the survivors."""
    if reason := _unclear(family, experts, axes):
        return UNCLEAR, reason, ()
    if family.stored == experts:
        return WHOLE, "", ()
    if axes is not None:
        _check_order(family, axes)
    return OVERWRITTEN, "", tuple(_survivor(p, family.stored, axes) for p in family.parts())


def _unclear(family: ExpertFamily, experts: int | None, axes: MeshAxes | None) -> str:
    """Return why nothing can be concluded; empty if the counts fit."""
    stored = family.stored
    if experts is None:
        return "how many experts the model has is not known"
    if family.experts != list(range(stored)):
        return "the experts that are stored are not numbered from 0 without gaps"
    if stored == experts:
        return ""
    if not stored or stored > experts or experts % stored:
        return f"{experts} experts are not a multiple of the {stored} stored"
    if axes is not None and axes[EP] != experts // stored:
        ranks = experts // stored
        return f"{experts} experts in parts of {stored} make {ranks} ep ranks, not {axes[EP]}"
    return ""


def _survivor(part: ExpertPart, stored: int, axes: MeshAxes | None) -> Survivor:
    writers = {chunk.writer for chunk, _ in part.pieces}
    ranks = tuple(sorted(writer for writer in writers if writer is not None))
    is_complete = part.is_tiled and None not in writers
    if axes is None:
        return Survivor(part.row, ranks, None, torn=not is_complete)
    positions = {_coordinate(axes, rank)[EP] for rank in ranks}
    if not is_complete or len(positions) != 1:
        return Survivor(part.row, ranks, None, torn=True)
    return Survivor(part.row, ranks, positions.pop() * stored + part.row, torn=False)


def _losses(tensors: Mapping[str, ExpertTensor]) -> dict[str, ExpertLoss]:
    by_layer: dict[str, list[ExpertTensor]] = {}
    for tensor in tensors.values():
        by_layer.setdefault(tensor.layer, []).append(tensor)
    losses = {}
    for layer, members in by_layer.items():
        experts = members[0].experts
        if experts is None or any(tensor.experts != experts for tensor in members):
            continue
        if all(tensor.verdict != OVERWRITTEN for tensor in members):
            continue
        survived = {False: set(range(experts)), True: set(range(experts))}
        for tensor in members:
            if tensor.verdict != WHOLE:
                survived[tensor.is_state].intersection_update(tensor.kept)
        weights, states = survived[False], survived[True]
        losses[layer] = ExpertLoss(
            layer,
            experts,
            tuple(sorted(weights & states)),
            tuple(sorted(weights - states)),
            tuple(sorted(set(range(experts)) - weights)),
        )
    return losses
