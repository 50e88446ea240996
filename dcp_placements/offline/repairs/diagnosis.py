"""What an EP-unaware save left of the experts: which survived, and from which rank.

Experts of one name on several ep ranks pass for replicas where nothing says otherwise. DCP keeps
one of each chunk, and spreads the work: the survivors of a layer come from several ep ranks. The
files' names tell which rank wrote a chunk, and a rank's place in the mesh which experts it had.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from dcp_placements.errors import CannotLook, format_ranks
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import tiles
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.offline.checkpoint import Checkpoint, StoredChunk, StoredTensor
from dcp_placements.offline.declared import MeshAxes, mesh_at
from dcp_placements.offline.experts import expert_key

EP = "ep"
"""The axis along which ranks hold different experts."""

WHOLE, OVERWRITTEN, UNCLEAR = "whole", "overwritten", "unclear"

_ROUTER = re.compile(r"(^|\.)(gate|router)(\.|$)|score_correction_bias|expert_bias")
_GROUPED = re.compile(r"(?<=weight)\d+$|(?<=bias)\d+$")


@dataclass(frozen=True, slots=True)
class Survivor:
    """One expert of a tensor, as far as the checkpoint has it.

    Attributes:
        row: Its number on the rank that wrote it, and in the checkpoint.
        ranks: Who wrote its chunks.
        expert: Its number in the model; None where the mesh is not known, and where its chunks are
            of different experts, or some are missing.
        torn: Whether its chunks are of different experts, or some are missing.
    """

    row: int
    ranks: tuple[int, ...]
    expert: int | None
    torn: bool


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of a layer's experts.

    Attributes:
        fqn: Its key; ``{}`` stands for the expert where each has a key of its own.
        layer: The layer's experts: the same for weights and optimizer state.
        is_state: Whether it is optimizer state.
        stored: Experts that the checkpoint has of it.
        experts: Experts that the model has; None where nobody knows.
        verdict: ``"whole"``; ``"overwritten"``: other ranks' experts passed for replicas of these;
            ``"unclear"``.
        reason: Why it is unclear.
        survivors: What there is; nothing where it is whole or unclear.
    """

    JSON: ClassVar[str] = "layer state=is_state stored experts verdict reason survivors"

    fqn: str
    layer: str
    is_state: bool
    stored: int
    experts: int | None
    verdict: str
    reason: str = ""
    survivors: tuple[Survivor, ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """The experts that survived, by their numbers in the model."""
        return tuple(sorted(s.expert for s in self.survivors if s.expert is not None))


@dataclass(frozen=True, slots=True)
class ExpertLoss:
    """What is left of a layer's experts, over all of their tensors.

    Attributes:
        layer: As in ``ExpertTensor``.
        experts: How many the model has.
        kept: Those of which all weights and all optimizer state survived.
        weights_only: Those of which all weights survived, but not all optimizer state.
        lost: The others.
    """

    JSON: ClassVar[str] = "experts kept weights_only lost"

    layer: str
    experts: int
    kept: tuple[int, ...]
    weights_only: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What an EP-unaware save did to a checkpoint.

    Attributes:
        path: The checkpoint.
        axes: The mesh that it was saved from, where that is known.
        tensors: Of experts, by key.
        layers: By layer, where a tensor of it is overwritten and the mesh is known.
        sound: Keys that have nothing to do with experts, or whose experts are whole.
    """

    JSON: ClassVar[str] = "path healthy axes tensors layers sound"

    path: str
    axes: Mapping[str, int] | None
    tensors: Mapping[str, ExpertTensor]
    layers: Mapping[str, ExpertLoss]
    sound: tuple[str, ...]

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
        experts_per_layer: How many experts a layer of the model has. Without it, it is taken from
            the routers' shapes, layer by layer, or from the mesh.
        axes: The mesh of the ranks that saved: sizes by axis name, in rank order; one is ``ep``.
            Each ep rank is taken to have had a contiguous run of the experts.

    Raises:
        CannotLook: There is no checkpoint; or ``axes`` has no ``ep`` or fewer ranks than wrote, or
            they wrote what in such a mesh they cannot have had.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    if axes is not None:
        _check_axes(checkpoint, axes)
    families = expert_families(checkpoint)
    routers = _routers(checkpoint, families)
    tensors = {}
    for fqn, family in families.items():
        experts = experts_per_layer or routers.get(family.layer)
        if experts is None and axes is not None:
            experts = family.stored * axes[EP]
        tensors[fqn] = _examined(fqn, family, experts, axes)
        if axes is not None and tensors[fqn].verdict == OVERWRITTEN:
            _check_order(family, axes)
    among = set()
    numbered = set()
    for fqn, family in families.items():
        if tensors[fqn].verdict != WHOLE:
            among.update(family.keys)
            if family.dim is None:
                numbered.add(family.layer)
    for fqn in checkpoint.objects:
        # Hyperparameters, by a rank's own numbers of experts.
        key = expert_key(fqn)
        if key is not None and key.index is not None and _layer(fqn) in numbered:
            among.add(fqn)
    return Diagnosis(
        checkpoint.path,
        axes,
        tensors,
        {} if axes is None else _losses(tensors),
        tuple(key for key in (*checkpoint.tensors, *checkpoint.objects) if key not in among),
    )


@dataclass(frozen=True, slots=True)
class Family:
    """A tensor of experts: one stacked tensor, or one per expert.

    Attributes:
        layer: As in ``ExpertTensor``.
        is_state: Whether it is optimizer state.
        dim: Where the experts are stacked; None where each has its own tensor.
        members: The stacked tensor under 0; otherwise the tensors by their numbers.
    """

    layer: str
    is_state: bool
    dim: int | None
    members: Mapping[int, StoredTensor]

    @property
    def stored(self) -> int:
        """Experts that are stored."""
        return len(self.members) if self.dim is None else self.members[0].shape[self.dim]

    @property
    def keys(self) -> list[str]:
        """Of the tensors."""
        return [tensor.fqn for tensor in self.members.values()]

    def parts(self) -> Iterator[Part]:
        """Yield each expert's place."""
        for first, tensor in self.members.items():
            chunks = tensor.chunks
            for row, cover in enumerate(_covers(tensor.boxes, tensor.shape, self.dim), first):
                yield Part(row, tensor, [(chunks[at], box) for at, box in cover.pieces], cover.full)


class Part(NamedTuple):
    """Where an expert of a family is stored.

    Attributes:
        row: Its number there.
        tensor: The tensor that it is in, or is.
        pieces: The chunks that have a part of it, and what part.
        full: Whether they are all of it, each element once.
    """

    row: int
    tensor: StoredTensor
    pieces: list[tuple[StoredChunk, Box]]
    full: bool


class _Cover(NamedTuple):
    pieces: tuple[tuple[int, Box], ...]
    full: bool


# Most tensors of a model are cut as others are.
@lru_cache(maxsize=64)
def _covers(boxes: tuple[Box, ...], shape: tuple[int, ...], dim: int | None) -> tuple[_Cover, ...]:
    """Return how chunks cover each row of a dim; the whole for None."""
    whole = Box((0,) * len(shape), shape)
    real = [(at, box) for at, box in enumerate(boxes) if box.numel]
    if dim is None:
        return (_Cover(tuple(real), tiles(whole, [box for _, box in real])),)
    rows: list[list[tuple[int, Box]]] = [[] for _ in range(shape[dim])]
    for at, box in real:
        start = box.offsets[dim]
        # A chunk beyond the tensor's end is for others to find.
        for row in range(start, min(start + box.sizes[dim], len(rows))):
            rows[row].append((at, _at(box, dim, row)))
    return tuple(
        _Cover(tuple(pieces), tiles(_at(whole, dim, row), [box for _, box in pieces]))
        for row, pieces in enumerate(rows)
    )


def _at(box: Box, dim: int, row: int) -> Box:
    """Return what of a box is one row of a dim."""
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = row, 1
    return Box(tuple(offsets), tuple(sizes))


def expert_families(checkpoint: Checkpoint) -> dict[str, Family]:
    """Return the tensors of experts, by key; ``{}`` in it where each expert has a key."""
    stacked: dict[str, Family] = {}
    alone: dict[str, dict[int, StoredTensor]] = {}
    states = _states_of(checkpoint)
    for fqn, tensor in checkpoint.tensors.items():
        key = expert_key(fqn)
        if key is None:
            continue
        template, number = expert_template(fqn, is_state=_is_state(fqn, states))
        if number is not None:
            alone.setdefault(template, {})[number] = tensor
        elif len(tensor.shape) > key.dim:
            stacked[fqn] = Family(_layer(fqn), _is_state(fqn, states), key.dim, {0: tensor})
    # One dim may be anything; it is of experts where the layer's larger tensors have as many.
    counts = {
        (f.layer, f.stored) for f in stacked.values() if len(f.members[0].shape) > (f.dim or 0) + 1
    }
    stacked = {
        fqn: family
        for fqn, family in stacked.items()
        if len(family.members[0].shape) > (family.dim or 0) + 1
        or (family.layer, family.stored) in counts
    }

    def is_state(members: Mapping[int, StoredTensor]) -> bool:
        return any(_is_state(member.fqn, states) for member in members.values())

    found = {
        fqn: Family(_layer(fqn), is_state(members), None, dict(sorted(members.items())))
        for fqn, members in alone.items()
    }
    return dict(sorted({**stacked, **found}.items()))


def expert_template(fqn: str, *, is_state: bool = False) -> tuple[str, int | None]:
    """Return a key with ``{}`` for the expert, and which one; None where they are stacked.

    The key of optimizer state has a name of its own behind that of its parameter.

    >>> expert_template("layers.0.experts.3.w1"), expert_template("layers.0.experts.fc1.weight3")
    (('layers.0.experts.{}.w1', 3), ('layers.0.experts.fc1.weight{}', 3))
    >>> expert_template("layers.0.experts.w1")
    ('layers.0.experts.{}.w1', None)
    """
    key = expert_key(fqn)
    assert key is not None
    if key.index is not None:
        return f"{key.layer}.{{}}.{key.name}", key.index
    # Megatron's grouped linear layers.
    head, _, tail = key.name.rpartition(".") if is_state else (key.name, "", "")
    grouped = _GROUPED.search(head)
    if grouped:
        end = f".{tail}" if tail else ""
        return f"{key.layer}.{head[: grouped.start()]}{{}}{end}", int(grouped[0])
    return f"{key.layer}.{{}}.{key.name}", None


def _states_of(checkpoint: Checkpoint) -> OptimizerStates:
    return OptimizerStates({**checkpoint.tensors, **checkpoint.objects})


def _is_state(fqn: str, states: OptimizerStates) -> bool:
    return states.of(fqn) is not None or fqn.startswith("optim")


def _layer(fqn: str) -> str:
    """Return what a layer's weights and their optimizer state have in common."""
    key = expert_key(fqn)
    assert key is not None
    parts = key.layer.split(".")
    numbered = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbered[0] - 1 :] if numbered and numbered[0] else parts[-1:])


def _routers(checkpoint: Checkpoint, families: Mapping[str, Family]) -> dict[str, int]:
    """Return experts by layer, as the routers' shapes say."""
    parents = {family.layer.rpartition(".")[0]: family.layer for family in families.values()}
    found: dict[str, set[int]] = {}
    states = _states_of(checkpoint)
    for fqn, tensor in checkpoint.tensors.items():
        if not tensor.shape or _is_state(fqn, states) or not _ROUTER.search(fqn) or expert_key(fqn):
            continue
        for parent, layer in parents.items():
            if parent and f".{parent}." in f".{fqn}":
                found.setdefault(layer, set()).add(tensor.shape[0])
    return {layer: counts.pop() for layer, counts in found.items() if len(counts) == 1}


def _check_axes(checkpoint: Checkpoint, axes: MeshAxes) -> None:
    if EP not in axes:
        raise CannotLook(f"the mesh {axes} has no axis {EP}, along which ranks hold other experts")
    ranks = 1
    for size in axes.values():
        ranks *= size
    writers = {rank for tensor in checkpoint.tensors.values() for rank in tensor.ranks}
    beyond = sorted(rank for rank in writers if rank >= ranks)
    if beyond:
        raise CannotLook(
            f"the mesh {axes} has {ranks} ranks, but {format_ranks(beyond)} wrote a part of the "
            "checkpoint\n    way out:     the mesh of all ranks that saved"
        )


def _check_order(family: Family, axes: MeshAxes) -> None:
    """Refuse a mesh whose ranks cannot have written what they did.

    A DTensor is one box on each rank, and an EP-unaware save has the same boxes on every ep rank.
    Where there are as many boxes as positions beside ep, each of those has one of its own.
    """
    names = list(axes)
    beside = 1
    for name, size in axes.items():
        beside *= 1 if name == EP else size
    for tensor in family.members.values():
        if len(tensor.boxes) != beside:
            continue
        first: dict[tuple[int, ...], int] = {}
        for chunk in tensor.chunks:
            if chunk.writer is None:
                continue
            at = mesh_at(axes, chunk.writer).get_coordinate()
            position = tuple(at[i] for i, name in enumerate(names) if name != EP)
            if position in first:
                raise CannotLook(
                    f"{tensor.fqn}: ranks {first[position]} and {chunk.writer} wrote different "
                    f"parts of it, but in the mesh {dict(axes)} they differ along {EP} alone and "
                    "hold the same part\n    way out:     the axes in rank order, the last one "
                    "fastest"
                )
            first[position] = chunk.writer


def _examined(fqn: str, family: Family, experts: int | None, axes: MeshAxes | None) -> ExpertTensor:
    def told(verdict: str, reason: str = "", survivors: Sequence[Survivor] = ()) -> ExpertTensor:
        known = (fqn, family.layer, family.is_state, family.stored, experts)
        return ExpertTensor(*known, verdict, reason, tuple(survivors))

    stored = family.stored
    if experts is None:
        return told(UNCLEAR, "how many experts the model has is not known")
    numbers = list(range(stored)) if family.dim is not None else list(family.members)
    if stored == experts and numbers == list(range(stored)):
        return told(WHOLE)
    if numbers != list(range(stored)):
        return told(UNCLEAR, "the experts that are stored are not numbered from 0 without gaps")
    if stored > experts or experts % stored:
        return told(UNCLEAR, f"{experts} experts are not so many times the {stored} stored")
    factor = experts // stored
    if axes is not None and axes[EP] != factor:
        reason = f"{experts} experts in parts of {stored} make {factor} ep ranks, not {axes[EP]}"
        return told(UNCLEAR, reason)
    return told(
        OVERWRITTEN,
        survivors=[_survivor(part, stored, axes) for part in family.parts()],
    )


def _survivor(part: Part, stored: int, axes: MeshAxes | None) -> Survivor:
    row = part.row
    writers = [chunk.writer for chunk, _ in part.pieces]
    ranks = sorted({writer for writer in writers if writer is not None})
    complete = part.full and None not in writers
    if axes is None:
        return Survivor(row, tuple(ranks), None, torn=not complete)
    positions = {_position(rank, axes) for rank in ranks}
    if not complete or len(positions) != 1:
        return Survivor(row, tuple(ranks), None, torn=True)
    return Survivor(row, tuple(ranks), positions.pop() * stored + row, torn=False)


def _position(rank: int, axes: MeshAxes) -> int:
    return mesh_at(axes, rank).get_coordinate()[list(axes).index(EP)]


def _losses(tensors: Mapping[str, ExpertTensor]) -> dict[str, ExpertLoss]:
    layers: dict[str, list[ExpertTensor]] = {}
    for tensor in tensors.values():
        layers.setdefault(tensor.layer, []).append(tensor)
    found = {}
    for layer, members in layers.items():
        counts = {tensor.experts for tensor in members}
        experts = counts.pop()
        if counts or experts is None or all(t.verdict != OVERWRITTEN for t in members):
            continue
        everything = range(experts)
        weights, state = (
            set(everything).intersection(
                *(
                    everything if tensor.verdict == WHOLE else tensor.kept
                    for tensor in members
                    if tensor.is_state is is_state
                )
            )
            for is_state in (False, True)
        )
        found[layer] = ExpertLoss(
            layer,
            experts,
            tuple(sorted(weights & state)),
            tuple(sorted(weights - state)),
            tuple(sorted(set(everything) - weights)),
        )
    return found
