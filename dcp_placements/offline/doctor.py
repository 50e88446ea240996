"""``doctor``: whether a checkpoint has all experts of the model, or all of the model.

Experts of one name on several ep ranks look like replicas if nothing says otherwise. DCP keeps one
of each chunk, so that 4 of 8 experts are stored where 2 ep ranks saved.

A checkpoint of ``PlacementSavePlanner`` records how it was cut and renamed. Experts that were cut
over ep, or numbered by a rename, are whole whatever the mesh was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from dcp_placements.errors import CannotLook, Fault
from dcp_placements.layout.sharding import Kind
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.offline.checkpoint import AnySource, Checkpoint, ranks_of
from dcp_placements.offline.lost_tensors import LostTensor, compared_with_whole, lines_of
from dcp_placements.offline.sources.opening import open_source
from dcp_placements.offline.texts import ranges, short
from dcp_placements.offline.whole_shapes import ModelSource, whole_of
from dcp_placements.rules.mesh_axes import MeshAxes
from dcp_placements.short_text import (
    folded_keys,
    format_count,
    format_ranks,
)
from dcp_placements.storage.store import StorageOptions

EP = "ep"
"""The axis along which ranks hold different experts."""

WHOLE, OVERWRITTEN, UNCLEAR = "whole", "overwritten", "unclear"

WERE_OVERWRITTEN = (
    "likely:      the save took the experts of other ep ranks for replicas",
    "way out:     they are nowhere in this checkpoint; save with rules from where they still are",
)

_KEY = re.compile(
    r"^(?P<layer>(?:.*\.)?(?!shared_)\w*experts(?:_list)?)(?:\.(?P<index>\d+))?\.(?P<name>.+)$"
)
# Megatron's grouped linear layers have one weight per expert.
_GROUPED = re.compile(r"^(?P<head>.*(?:weight|bias))(?P<index>\d+)(?P<state>\.[^.]+)?$")
_LAYER_AXIS = re.compile(r"(^|\.)layers\.(?!\d)")
_ROUTER = re.compile(r"(^|\.)(gate|router)(\.|$)|score_correction_bias|expert_bias")


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of a layer's experts."""

    # Its key, with ``{}`` for the expert if each has a key of its own
    fqn: str = field(repr=False)
    layer: str = field(repr=False)  # the key up to the experts
    stored: int  # the number of experts that the checkpoint has of it
    experts: int | None  # the number of experts that the model has; None if that is not known
    # ``"whole"``; ``"overwritten"``: experts of several ranks were taken for replicas;
    # ``"unclear"``
    verdict: str
    reason: str  # the source of the number of experts; or why it is unclear


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Whether a checkpoint has all experts of the model."""

    path: str  # the checkpoint
    tensors: Mapping[str, ExpertTensor]  # the tensors of experts, by key; none with ``whole``
    unchecked: tuple[str, ...]  # all other keys; empty where the whole model is given
    compared: str = ""  # the number of keys that were compared with the whole model
    lost: tuple[LostTensor, ...] = ()  # tensors that differ from the whole model
    notes: tuple[str, ...] = ()  # tensors that were not compared with it, and why

    @property
    def healthy(self) -> bool:
        """Whether all experts are there, and all of the whole model where it is given."""
        is_whole = all(tensor.verdict == WHOLE for tensor in self.tensors.values())
        return is_whole and not self.lost

    def findings(self) -> list[tuple[str, Fault]]:
        """Return what is found of experts: a verdict, with the layers' names and the numbers."""
        layers_of: dict[tuple[str, str], dict[str, None]] = {}
        for tensor in self.tensors.values():
            finding = f"{tensor.stored} of {tensor.experts} experts stored"
            if tensor.experts is None:
                finding = f"{format_count(tensor.stored, 'expert')} stored"
            where = layers_of.setdefault((tensor.verdict, f"{finding}; {tensor.reason}"), {})
            where[tensor.layer] = None
        return [
            (verdict, Fault(short([folded.name for folded in folded_keys(list(layers))]), finding))
            for (verdict, finding), layers in layers_of.items()
        ]

    def __str__(self) -> str:
        lines, findings = [], self.findings()
        for verdict, fault in findings:
            lines.append(f"{fault.fqn}: {'unclear: ' * (verdict == UNCLEAR)}{fault.headline}")
        verdicts = {verdict for verdict, _ in findings}
        if UNCLEAR in verdicts:
            lines.append("    way out:     --experts-per-layer, or --mesh of the run that saved")
        if OVERWRITTEN in verdicts:
            lines += [f"    {detail}" for detail in WERE_OVERWRITTEN]
        if not findings and not self.compared:
            lines.append("no key names experts")
        if self.compared:
            lines += [*lines_of(self.lost), *self.notes]
            verdict = "differs from" if self.lost else "is"
            lines.append(f"{verdict} the whole model; compared: {self.compared}")
        elif self.unchecked or self.tensors:
            other = format_count(len(self.unchecked), "other key")
            lines.append(f"not checked: {other}, and the other dims of experts")
            lines.append(
                "    way out:     --whole MODEL compares all keys and shapes with the model"
            )
        return "\n".join(lines)


def diagnose(
    path: AnySource,
    *,
    experts_per_layer: int | None = None,
    axes: MeshAxes | None = None,
    whole: ModelSource | None = None,
    storage_options: StorageOptions = None,
) -> Diagnosis:
    """Return the expert tensors, and whether all experts are stored; no data is read.

    Args:
        path: The checkpoint.
        experts_per_layer: The number of experts in a layer of the model. By default it is the
            number stored, for tensors that the checkpoint records as cut or numbered over ep;
            for other tensors it is taken from the routers' shapes, layer by layer, or from the
            mesh.
        axes: The mesh of the ranks that saved: sizes by axis name, ``ep`` among them. It is used if
            nothing else gives the number of experts: each ep rank held as many as are stored.
            Ignored if the checkpoint records how all of its experts were saved.
        whole: The unsharded model, which every key and shape is compared with, as ``whole_of``
            takes it: a directory of a Hugging Face model, or what ``whole=`` of the planners takes.
        storage_options: Options that fsspec passes to the file system of a URL.

    Raises:
        CannotLook: There is no checkpoint; or ``axes`` has no ``ep``, or fewer ranks than wrote; or
            ``whole`` says no shapes.
    """
    checkpoint = open_source(path, storage_options=storage_options)
    if whole is not None:  # the model decides, whatever names say
        compared = compared_with_whole(checkpoint, whole_of(whole, storage_options))
        return Diagnosis(checkpoint.path, {}, (), compared.text, compared.lost, compared.notes)
    by_key = _stored_experts(checkpoint)
    recorded = {
        fqn: cut
        for fqn, experts_of in by_key.items()
        if (cut := _recorded(checkpoint, fqn, experts_of))
    }
    routers = _routers(checkpoint, {_layer(experts_of.layer) for experts_of in by_key.values()})
    if axes is not None and len(recorded) < len(by_key):
        beyond = [rank for rank in ranks_of(tuple(checkpoint.files)) if rank >= prod(axes.values())]
        if EP not in axes:
            raise CannotLook(f"the mesh {axes} has no axis {EP}, of ranks with different experts")
        if beyond:
            raise CannotLook(
                f"the mesh {axes} has {prod(axes.values())} ranks, but {format_ranks(beyond)} "
                "wrote a part of the checkpoint\n    way out:     the mesh of all ranks that saved"
            )
    tensors = {}
    for fqn, experts_of in by_key.items():
        stored = len(experts_of.keys) if experts_of.dim is None else experts_of.stacked
        experts, reason = experts_per_layer, f"--experts-per-layer says {experts_per_layer}"
        if experts is None and fqn in recorded:
            experts, reason = stored, f"saved as {recorded[fqn]}"
        if experts is None:
            experts = routers.get(_layer(experts_of.layer))
            reason = f"the router says {experts}"
        if experts is None and axes is not None:
            experts = stored * axes[EP]
            reason = f"--mesh says {experts}"
        numbers = sorted(experts_of.keys) if experts_of.dim is None else []
        verdict = WHOLE if stored == experts else OVERWRITTEN
        if experts is None:
            verdict, reason = UNCLEAR, "how many experts the model has is not known"
        elif numbers != list(range(len(numbers))):
            gaps = ranges(numbers)
            verdict, reason = UNCLEAR, f"they are not numbered from 0 without gaps: {gaps}"
        elif stored != experts and (not stored or experts % stored):
            reason = f"{experts} experts are not a multiple of the {stored} stored"
            verdict = UNCLEAR
        tensors[fqn] = ExpertTensor(fqn, experts_of.layer, stored, experts, verdict, reason)
    checked = {key for experts_of in by_key.values() for key in experts_of.keys.values()}
    keys = (*checkpoint.tensors, *checkpoint.objects)
    return Diagnosis(checkpoint.path, tensors, tuple(key for key in keys if key not in checked))


class _StoredExperts(NamedTuple):
    """A tensor of all experts of a layer: stacked, or a tensor per expert.

    Attributes:
        layer: The key up to the experts, which identifies the layer.
        keys: Keys of its tensors, by expert; a stacked tensor has the one key ``{0: key}``.
        dim: The dim along which experts are stacked; None if each has its own tensor.
        stacked: Number of experts that are stacked.
    """

    layer: str
    keys: dict[int, str]
    dim: int | None = None
    stacked: int = 0


def _stored_experts(checkpoint: Checkpoint) -> dict[str, _StoredExperts]:
    """Return the experts' tensors by key, with ``{}`` for the expert if each has a key.

    A stacked tensor of one dim counts if larger tensors of the layer have as many experts.
    """
    by_key: dict[str, _StoredExperts] = {}
    counts: set[tuple[str, int]] = set()
    one_dim: list[_StoredExperts] = []
    for fqn, tensor in checkpoint.tensors.items():
        key = split_expert_key(fqn)
        if key is None:
            continue
        layer, index, template = key
        # Megatron also stacks layers (``decoder.layers.mlp.experts...``, without a number): experts
        # are the second dim there.
        dim = 1 if _LAYER_AXIS.search(fqn) else 0
        if index is not None:
            by_key.setdefault(template, _StoredExperts(layer, {})).keys[index] = fqn
        elif len(tensor.shape) > dim:
            stored = _StoredExperts(layer, {0: fqn}, dim, tensor.shape[dim])
            if len(tensor.shape) > dim + 1:
                by_key[fqn] = stored
                counts.add((_layer(layer), stored.stacked))
            else:
                one_dim.append(stored)
    for stored in one_dim:
        if (_layer(stored.layer), stored.stacked) in counts:
            by_key[stored.keys[0]] = stored
    return dict(sorted(by_key.items()))


def split_expert_key(fqn: str) -> tuple[str, int | None, str] | None:
    """Return layer, expert, and the key with ``{}`` for it; None for the key of anything else.

    >>> split_expert_key("layers.0.mlp.experts.3.w1.weight")
    ('layers.0.mlp.experts', 3, 'layers.0.mlp.experts.{}.w1.weight')
    >>> split_expert_key("layers.0.experts.linear_fc1.weight3.exp_avg")
    ('layers.0.experts', 3, 'layers.0.experts.linear_fc1.weight{}.exp_avg')
    >>> split_expert_key("layers.0.shared_experts.w1") is None
    True
    """
    match = _KEY.match(fqn)
    if match is None:
        return None
    layer, index, name = match["layer"], match["index"], match["name"]
    if index is not None:
        return layer, int(index), f"{layer}.{{}}.{name}"
    if grouped := _GROUPED.match(name):
        template = f"{layer}.{grouped['head']}{{}}{grouped['state'] or ''}"
        return layer, int(grouped["index"]), template
    return layer, None, fqn


def _layer(layer: str) -> str:
    """Return the part that the keys of a layer's weights and of their optimizer state share.

    >>> _layer("optim.state.layers.0.mlp.experts")
    'layers.0.mlp.experts'
    """
    names = layer.split(".")
    numbered = [position for position, name in enumerate(names) if name.isdigit()]
    return ".".join(names[numbered[0] - 1 :] if numbered and numbered[0] else names[-1:])


def _routers(checkpoint: Checkpoint, layers: set[str]) -> dict[str, int]:
    """Return the number of experts by layer, from the routers' shapes."""
    states = OptimizerStates({**checkpoint.tensors, **checkpoint.objects})
    counts: dict[str, set[int]] = {}
    for fqn, tensor in checkpoint.tensors.items():
        if not tensor.shape or not _ROUTER.search(fqn) or split_expert_key(fqn):
            continue
        if states.of(fqn) is not None or fqn.startswith("optim"):
            continue
        for layer in layers:
            parent = layer.rpartition(".")[0]
            if parent and f".{parent}." in f".{fqn}":
                counts.setdefault(layer, set()).add(tensor.shape[0])
    return {layer: shapes.pop() for layer, shapes in counts.items() if len(shapes) == 1}


def _recorded(checkpoint: Checkpoint, fqn: str, experts: _StoredExperts) -> str | None:
    """Return how an expert tensor was saved; None where the checkpoint does not record it.

    A stacked tensor counts if its dim of experts was cut over ep, or into rows that ranks list.
    Another cut of that dim proves nothing: FSDP makes one without a rule. Tensors with a key per
    expert count if a rename numbered the experts.
    """
    record = checkpoint.record
    if record is None:
        return None
    if experts.dim is not None:
        for cut in record.cuts(fqn):
            if cut.dim == experts.dim and (cut.axis == EP or cut.kind is Kind.LISTED):
                return str(cut)
        return None
    for family, numbering in record.numberings.items():
        if f"{fqn}.".startswith(f"{family}."):
            return numbering.step
    return None
