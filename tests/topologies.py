"""A small model with all that is hard to place, and the topologies that cut it.

The model is a dict of whole tensors and how they are cut, in the words of a trainer; what a rank
holds of them is plain slicing (``dcp_placements.testing.cut``). ``Ranks`` are the ranks of one
topology: their state dicts under their own, local names, their rules, and their renames.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from hazard_scenes import FILL, read_whole, same_bits
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    LoadReport,
    PlacementFileSystemReader,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut, real_dtensor

MAX_RANKS = 32
LAYERS, VOCAB, HIDDEN = 4, 19, 6


# Topologies


@dataclass(frozen=True)
class Topology:
    """Ranks along each kind of parallelism.

    The ranks of a pipeline stage are factorised twice, as Megatron and torchtitan do it: the dense
    mesh is ``(pp, hsdp, fsdp, cp, tp)``, that of the experts ``(pp, edp, efsdp, ep, etp)``. ``cp``
    and ``hsdp`` hold replicas. What experts do not need for ``ep`` and ``etp`` shards them once
    more where the dense part is sharded (``efsdp``), and replicates them where it is not (``edp``).
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    fsdp: int = 1
    hsdp: int = 1

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.hsdp * self.fsdp * self.cp * self.tp

    @property
    def ranks(self) -> int:
        return self.pp * self.stage

    @property
    def illegal(self) -> str | None:
        """Why no trainer can run it; None where one can."""
        if self.ranks > MAX_RANKS:
            return f"more than {MAX_RANKS} ranks"
        if self.stage % (self.ep * self.etp):
            return "ep x etp does not divide the ranks of a stage"
        if self.pp > LAYERS:
            return "a stage without a layer"
        return None

    @property
    def dense(self) -> dict[str, int]:
        """Axes of the dense mesh."""
        names = ("pp", "hsdp", "fsdp", "cp", "tp")
        return {name: getattr(self, name) for name in names}

    @property
    def experts(self) -> dict[str, int]:
        """Axes of the experts' mesh, over the same ranks."""
        rest = self.stage // (self.ep * self.etp)
        # Replicas stay whole as long as the other ranks of a stage are enough for the experts.
        efsdp = 1 if self.fsdp == 1 else max(1, rest // self.hsdp)
        sizes = {"pp": self.pp, "edp": rest // efsdp, "efsdp": efsdp}
        return sizes | {"ep": self.ep, "etp": self.etp}

    @property
    def axes(self) -> tuple[str, ...]:
        """The kinds of parallelism that it has."""
        return tuple(axis.name for axis in fields(self) if getattr(self, axis.name) > 1)

    def __str__(self) -> str:
        return "x".join(f"{name}{getattr(self, name)}" for name in self.axes) or "one"


AXES = tuple(axis.name for axis in fields(Topology))


@cache
def all_topologies() -> tuple[tuple[Topology, ...], dict[str, int]]:
    """Return the legal ones, each axis in {1, 2, 4}, smallest first; and why the others are not."""
    legal, illegal = [], dict[str, int]()
    for sizes in product((1, 2, 4), repeat=len(AXES)):
        topology = Topology(*sizes)
        if (reason := topology.illegal) is None:
            legal.append(topology)
        else:
            illegal[reason] = illegal.get(reason, 0) + 1
    return tuple(sorted(legal, key=lambda known: known.ranks)), illegal


# The model


@dataclass(frozen=True)
class Weight:
    """One parameter or buffer of the model, whole, and how trainers cut it.

    Attributes:
        shape: Of the whole tensor.
        cuts: What the axes of model parallelism do to it, in the order of their mesh.
        fsdp: The dim that FSDP cuts of what is left; None: FSDP has no part in it.
        experts: Whether it lies on the experts' mesh.
        dtype: Of the whole tensor.
        pattern: What a user's rule calls it, where that is not its name.
        buffer: Whether it has no optimizer state.
    """

    shape: tuple[int, ...]
    cuts: Mapping[str, Any] = field(default_factory=dict)
    fsdp: int | None = 0
    experts: bool = False
    dtype: torch.dtype = torch.float32
    pattern: str | None = None
    buffer: bool = False

    def padded(self, topology: Topology) -> tuple[int, ...]:
        """Shape that is cut: a vocabulary is padded to a multiple that depends on ``tp``."""
        if self.shape[0] != VOCAB:
            return self.shape
        multiple = 4 * topology.tp
        return (-(-VOCAB // multiple) * multiple, *self.shape[1:])


def _block(layer: int) -> dict[str, Weight]:
    """Every layer has attention; query heads are more than key and value heads."""
    qkv = FusedShard(0, (12, 4, 4))
    weights = {
        "norm.weight": Weight((HIDDEN,)),
        "attention.qkv.weight": Weight((20, HIDDEN), {"tp": qkv}, dtype=torch.bfloat16),
        "attention.qkv.bias": Weight((20,), {"tp": qkv}),
        "attention.o_proj.weight": Weight((HIDDEN, 12), {"tp": Shard(1)}),
    }
    return {f"layers.{layer}.{name}": weight for name, weight in weights.items()}


def _dense() -> dict[str, Weight]:
    return {
        "layers.0.mlp.gate_up.weight": Weight((24, HIDDEN), {"tp": FusedShard(0, 2)}),
        "layers.0.mlp.down.weight": Weight((HIDDEN, 12), {"tp": Shard(1)}),
    }


def _stacked() -> dict[str, Weight]:
    """Eight experts in one tensor; the router has as many rows, and is replicated."""
    gate_up = {"ep": Shard(0), "etp": FusedShard(1, 2)}
    down = {"ep": Shard(0), "etp": Shard(2)}
    return {
        "layers.1.router.weight": Weight((8, HIDDEN)),
        "layers.1.router.expert_bias": Weight((8,), fsdp=None, dtype=torch.int64, buffer=True),
        "layers.1.experts.gate_up": Weight(
            (8, 16, HIDDEN), gate_up, experts=True, dtype=torch.bfloat16
        ),
        "layers.1.experts.down": Weight((8, HIDDEN, 8), down, experts=True),
    }


def _stacked_unevenly() -> dict[str, Weight]:
    """Five experts, hidden first; FSDP cuts another dim than ``ep``."""
    up = {"ep": Shard(0), "etp": Shard(2)}
    bias = {"ep": Shard(0), "etp": Shard(1)}
    down = {"ep": Shard(0), "etp": Shard(1)}
    return {
        "layers.2.router.weight": Weight((5, HIDDEN)),
        "layers.2.experts.up": Weight((5, HIDDEN, 12), up, 1, experts=True),
        "layers.2.experts.up_bias": Weight((5, 12), bias, 1, experts=True),
        "layers.2.experts.down": Weight((5, 6, HIDDEN), down, 2, experts=True),
    }


def _modules() -> dict[str, Weight]:
    """Six experts, one module each, numbered locally on the ranks; each has a buffer of its own."""
    found = {}
    for expert in range(6):
        fc1 = Weight(
            (8, HIDDEN),
            {"etp": FusedShard(0, 2)},
            experts=True,
            pattern="layers.3.experts.*.fc1.weight",
        )
        scale = Weight((3,), fsdp=None, experts=True, buffer=True)
        found[f"layers.3.experts.{expert}.fc1.weight"] = fc1
        found[f"layers.3.experts.{expert}.scale"] = scale
    return found


EMBEDDINGS = ("embed.weight", "head.weight")
MODEL: dict[str, Weight] = {
    "embed.weight": Weight((VOCAB, HIDDEN), {"tp": Shard(0)}),
    **{name: weight for layer in range(LAYERS) for name, weight in _block(layer).items()},
    **_dense(),
    **_stacked(),
    **_stacked_unevenly(),
    **_modules(),
    "norm.weight": Weight((HIDDEN,)),
    "head.weight": Weight((VOCAB, HIDDEN), {"tp": Shard(0)}),
}
MODULES = 6
"""Experts that are modules of their own."""

MOMENTS = ("exp_avg", "exp_avg_sq")
OBJECTS = {
    "train.step": 7,
    "train.rng": b"\x00\x01\x02",
    "train.dataloader.epoch": 1,
    "train.dataloader.position": [3, 14],
}
GROUPS = "optim.param_groups.0.params"
"""The parameters of a rank."""


@cache
def wholes(*, tied: bool = False) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint by its key, whole: weights, moments and steps.

    Each has contents of its own, drawn from its key; of ``tied`` embeddings both keys have one.
    """
    found = {}
    for name, weight in MODEL.items():
        source = EMBEDDINGS[0] if tied and name in EMBEDDINGS else name
        found[f"model.{name}"] = _drawn(f"model.{source}", weight.shape, weight.dtype)
        if not weight.buffer and not (tied and name == EMBEDDINGS[1]):
            for moment in MOMENTS:
                key = f"optim.state.{name}.{moment}"
                found[key] = _drawn(key, weight.shape, torch.float32)
            found[f"optim.state.{name}.step"] = torch.tensor(float(zlib.crc32(name.encode()) % 999))
    return found


def _drawn(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    if dtype is torch.int64:
        return torch.randint(10**6, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


# The ranks of a topology


class Ranks:
    """What each rank of a topology holds, and what it tells the planners.

    Args:
        topology: How the ranks share the model.
        whole: Whether DTensors tell of model parallelism too, wherever torch's placements can (as
            those of torchtitan do); else of FSDP alone, and rules tell the rest.
        real: Whether they are torch's own DTensors.
        tied: Whether embedding and head are one weight.
    """

    def __init__(
        self, topology: Topology, *, whole: bool = False, real: bool = False, tied: bool = False
    ) -> None:
        self.topology, self.whole, self.real, self.tied = topology, whole, real, tied
        self.world = World(topology.ranks)
        self.wholes = wholes(tied=tied)
        self._meshes: dict[Any, FakeMesh] = {}
        self._at: dict[tuple[int, bool], dict[str, int]] = {}

    def mesh(self, rank: int, weight: Weight, *names: str) -> FakeMesh:
        """Return the mesh that a weight lies on, or its sub-mesh over ``names``."""
        key = (rank, weight.experts, names)
        if key not in self._meshes:
            topology = self.topology
            axes = topology.experts if weight.experts else topology.dense
            mesh = self.world.mesh(rank, **axes)
            self._meshes[key] = mesh[names] if names else mesh
        return self._meshes[key]

    def at(self, rank: int, weight: Weight) -> dict[str, int]:
        """Return the rank's position along the axes of the weight's mesh."""
        key = (rank, weight.experts)
        if key not in self._at:
            mesh = self.mesh(rank, weight)
            names, position = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
            self._at[key] = dict(zip(names, position, strict=True))
        return self._at[key]

    def layers(self, rank: int) -> range:
        """Return the layers of the rank's pipeline stage."""
        each = LAYERS // self.topology.pp
        stage = rank // self.topology.stage
        return range(stage * each, (stage + 1) * each)

    def modules(self, rank: int) -> range:
        """Return the experts that are modules of their own, of this rank: ``torch.chunk`` ones."""
        position = self.at(rank, MODEL["layers.3.experts.0.scale"])["ep"]
        each = -(-MODULES // self.topology.ep)
        return range(min(position * each, MODULES), min((position + 1) * each, MODULES))

    def holds(self, rank: int, name: str) -> bool:
        """Whether the rank has a weight under this (global) name, or one of its moments."""
        layers, last = self.layers(rank), LAYERS - 1
        if found := re.search(r"layers\.(\d+)\.", name):
            expert = re.search(r"experts\.(\d+)\.", name)
            return int(found[1]) in layers and (
                expert is None or int(expert[1]) in self.modules(rank)
            )
        return (0 if "embed" in name else last) in layers

    def rename(self, rank: int) -> Renames:
        """Return what maps the rank's names to the checkpoint's: layers and experts from 0 up."""
        return Renames(
            Renumber("layers.{}", self.layers(rank), total=LAYERS),
            Renumber("experts.{}", self.modules(rank), total=MODULES),
        )

    def local_name(self, rank: int, key: str) -> str:
        """Return the rank's own name of a key of the checkpoint."""
        layer, module = self.layers(rank).start, self.modules(rank).start
        key = re.sub(r"(?<=layers\.)\d+", lambda found: str(int(found[0]) - layer), key)
        return re.sub(r"(?<=experts\.)\d+", lambda found: str(int(found[0]) - module), key)

    def rules(self, rank: int) -> PlacementRules:
        """Return the rules that a user of this topology writes: model parallelism alone."""
        known = {}
        for name, weight in MODEL.items():
            if weight.cuts and (weight.pattern or name) not in known:
                padded = weight.padded(self.topology)
                known[weight.pattern or name] = CheckpointPlacement(
                    self.mesh(rank, weight),
                    weight.cuts,
                    global_shape=weight.shape,
                    padded_shape=padded if padded != weight.shape else None,
                )
        return PlacementRules(known)

    def state_dict(
        self, rank: int, *, blank: bool = False, pad: float = -1.0
    ) -> dict[str, dict[str, Any]]:
        """Return what the rank saves, or a template that it loads into.

        Args:
            rank: The rank.
            blank: Whether it holds nothing of the checkpoint yet.
            pad: What the rows beyond the vocabulary hold.
        """
        state: dict[str, dict[str, Any]] = {"model": {}, "optim": {}, "train": {}}
        for name, weight in MODEL.items():
            if not self.holds(rank, name):
                continue
            own = self.local_name(rank, name)
            if self.tied and name == EMBEDDINGS[1] and EMBEDDINGS[0] in state["model"]:
                state["model"][name] = state["model"][EMBEDDINGS[0]]
            else:
                state["model"][own] = self._value(rank, weight, f"model.{name}", blank, pad)
            for moment in MOMENTS:
                if (key := f"optim.state.{name}.{moment}") in self.wholes:
                    value = self._value(rank, weight, key, blank, pad)
                    state["optim"][f"state.{own}.{moment}"] = value
            if (key := f"optim.state.{name}.step") in self.wholes:
                step = torch.tensor(float(FILL)) if blank else self.wholes[key].clone()
                state["optim"][f"state.{own}.step"] = step
                state["optim"].setdefault(GROUPS.removeprefix("optim."), []).append(own)
        for key, value in OBJECTS.items():
            state["train"][key.removeprefix("train.")] = None if blank else value
        return state

    def expected(self, rank: int, *, pad: float) -> dict[str, torch.Tensor]:
        """Return the rank's local tensors by its own keys, cut of the whole ones."""
        return {
            self.local_name(rank, key): whole
            if not whole.dim()
            else self._local(rank, _weight_of(key), whole, pad)
            for key, whole in self.wholes.items()
            if self.holds(rank, key)
        }

    def _value(self, rank: int, weight: Weight, key: str, blank: bool, pad: float) -> Any:
        whole = self.wholes[key]
        local = self._local(rank, weight, torch.full_like(whole, FILL) if blank else whole, pad)
        names, placements = self._own(weight)
        if not names:
            return local
        shape = list(weight.padded(self.topology))
        at, axes = self.at(rank, weight), self._axes(weight)
        beside = {axis: cut for axis, cut in weight.cuts.items() if axis not in names}
        if beside:
            part = _rows(
                weight.padded(self.topology),
                tuple(beside.items()),
                tuple(axes[axis] for axis in beside),
                tuple(at[axis] for axis in beside),
            )
            shape = list(part.shape)
        wrap = real_dtensor if self.real else FakeDTensor
        return wrap(local, self.mesh(rank, weight, *names), placements, shape)

    def _axes(self, weight: Weight) -> dict[str, int]:
        return self.topology.experts if weight.experts else self.topology.dense

    def _own(self, weight: Weight) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return axes and placements of the weight's own DTensor; none for a plain tensor."""
        axes = self._axes(weight)
        replicas, fsdp = ("edp", "efsdp") if weight.experts else ("hsdp", "fsdp")
        names: list[str] = []
        placements: list[Any] = []
        described = self._by_dtensor(weight) if self.whole else {}
        sharded = weight.fsdp is not None and axes[fsdp] > 1
        if sharded and axes[replicas] > 1:
            names, placements = [replicas], [Replicate()]
        if sharded:
            # FSDP cuts what the axes on its right have left, which come first in the mesh order.
            inside = prod(axes[axis] for axis, cut in described.items() if cut.dim == weight.fsdp)
            names.append(fsdp)
            placements.append(
                Shard(weight.fsdp)
                if inside == 1
                else _StridedShard(weight.fsdp, split_factor=inside)
            )
        return (*names, *described), (*placements, *described.values())

    def _by_dtensor(self, weight: Weight) -> dict[str, Any]:
        """Return the cuts of model parallelism that torch's own placements can describe."""
        axes, shape = self._axes(weight), weight.padded(self.topology)
        described = {}
        for axis, placement in weight.cuts.items():
            if axes[axis] == 1:
                continue
            parts = getattr(placement, "parts", 1)
            each = parts if isinstance(parts, tuple) else (shape[placement.dim] // parts,) * parts
            if any(size % axes[axis] for size in each):
                return {}
            # The DTensor states that a fused dim is sharded; the rule states how.
            described[axis] = Shard(placement.dim)
        return described

    def _local(self, rank: int, weight: Weight, whole: torch.Tensor, pad: float) -> torch.Tensor:
        axes, at = self._axes(weight), self.at(rank, weight)
        cuts = dict(weight.cuts)
        if weight.fsdp is not None:
            cuts["efsdp" if weight.experts else "fsdp"] = Shard(weight.fsdp)
        padded = weight.padded(self.topology)
        rows = _rows(
            padded,
            tuple(cuts.items()),
            tuple(axes[axis] for axis in cuts),
            tuple(at[axis] for axis in cuts),
        )
        if padded != weight.shape:
            more = whole.new_full((padded[0] - VOCAB, *padded[1:]), pad)
            whole = torch.cat([whole, more])
        return whole.reshape(-1)[rows]


def _weight_of(key: str) -> Weight:
    name = key.removeprefix("model.").removeprefix("optim.state.")
    for moment in (*MOMENTS, "step"):
        name = name.removesuffix(f".{moment}")
    return MODEL[name]


@cache
def _rows(
    shape: tuple[int, ...],
    cuts: tuple[tuple[str, Any], ...],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> torch.Tensor:
    """Return which elements of a whole tensor one coordinate holds, by plain slicing."""
    numbers = torch.arange(prod(shape)).reshape(shape)
    return cut(numbers, [placement for _, placement in cuts], sizes, coordinate)


# A save, a load, and what they are compared with


def save_and_check(path: Path, ranks: Ranks) -> None:
    """Save on all ranks; assert that stock torch reads the whole tensors, each stored once."""
    planners = [
        PlacementSavePlanner(ranks.rules(rank), rename=ranks.rename(rank))
        for rank in range(ranks.world.size)
    ]
    ranks.world.save(
        path,
        # What is in the padding is no matter: it differs from rank to rank here.
        lambda rank: ranks.state_dict(rank, pad=-1.0 - rank),
        planners.__getitem__,
        lambda rank: FileSystemWriter(path, sync_files=False),
    )
    truth, report = ranks.wholes, planners[0].report
    assert report.unique_nbytes == report.whole_nbytes == sum(t.nbytes for t in truth.values())
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    assert stored.keys() - {GROUPS} == truth.keys() | OBJECTS.keys()
    read = read_whole(path)
    for key, tensor in truth.items():
        assert same_bits(read[key], tensor), f"{key} in the file of {ranks.topology}"


def load_and_check(path: Path, ranks: Ranks) -> list[LoadReport]:
    """Load on all ranks; assert that each holds its part of the whole tensors."""
    planners = [
        PlacementLoadPlanner(ranks.rules(rank), rename=ranks.rename(rank))
        for rank in range(ranks.world.size)
    ]
    # For torch's reader each rank opens and unpickles every chunk, which takes most of the time.
    reader = FileSystemReader if ranks.world.size == 1 else PlacementFileSystemReader
    loaded = ranks.world.load(
        path,
        lambda rank: ranks.state_dict(rank, blank=True, pad=-5.0),
        planners.__getitem__,
        lambda rank: reader(path),
    )
    for rank, state in enumerate(loaded):
        found = {
            f"{part}.{key}": value.to_local() if hasattr(value, "to_local") else value
            for part, values in state.items()
            for key, value in values.items()
        }
        expected = ranks.expected(rank, pad=-5.0)
        assert found.keys() - {GROUPS} == expected.keys() | OBJECTS.keys()
        for key, tensor in expected.items():
            assert same_bits(found[key], tensor), f"{key} on rank {rank} of {ranks.topology}"
        for key, value in OBJECTS.items():
            assert found[key] == value, f"{key} on rank {rank} of {ranks.topology}"
    return [planner.report for planner in planners]
