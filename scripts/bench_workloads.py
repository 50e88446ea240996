"""The state dicts that ``scripts/bench plan`` plans for, as seen from any rank.

Prints nothing; imported by ``scripts/bench_plan.py``. No process group and next to no memory:
all local tensors are views of one buffer that is never written to, each at an address of its own.

======= =============================================================== ======= ==============
name    what                                                            tensors
======= =============================================================== ======= ==============
w1      DeepSeek-V3 with AdamW moments, expert stacks [256, h, f]         3,075 EP 64 x FSDP
w2      the same, one tensor per expert                                 136,185 EP 64 x FSDP
w3      1,024 tensors [8192, 28672]                                       1,024 FSDP
w3-thin 1,024 tensors [1024, 1]                                           1,024 FSDP
w3-own  1,024 tensors [8192 + i, 28672], no two of one shape              1,024 FSDP
w4      Llama-70B with AdamW moments                                      2,169 HSDP, 8 copies
======= =============================================================== ======= ==============
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements.testing import FakeDTensor, FakeMesh

MOMENTS = ("exp_avg", "exp_avg_sq")
EP = 64
EXPERTS = 256
DTYPE = torch.float32


@dataclass(frozen=True)
class Axes:
    """A mesh of all ranks in C order, or the part of one that a rank is in.

    Attributes:
        names: Of the axes.
        sizes: Ranks along each axis of the mesh of all ranks.
        kept: The axes of the part; None for the whole mesh.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    kept: int | None = None

    def position(self, rank: int) -> tuple[int, ...]:
        """Return where a rank stands in the mesh of all ranks."""
        found = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            found.append(place)
        return tuple(reversed(found))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return where a rank stands in its mesh."""
        position = self.position(rank)
        return position if self.kept is None else (position[self.kept],)

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each axis of a rank's mesh."""
        return self.sizes if self.kept is None else (self.sizes[self.kept],)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of a rank's mesh."""
        return self.names if self.kept is None else (self.names[self.kept],)

    def ranks(self, rank: int) -> torch.Tensor:
        """Return the ranks of the mesh that ``rank`` is in."""
        whole = torch.arange(prod(self.sizes)).reshape(self.sizes)
        if self.kept is None:
            return whole
        position = self.position(rank)
        index = tuple(
            slice(None) if axis == self.kept else place for axis, place in enumerate(position)
        )
        return whole[index]


@dataclass(frozen=True)
class Lay:
    """How a tensor lies: its shape, the mesh, one placement per axis."""

    shape: tuple[int, ...]
    axes: Axes
    placements: tuple[Any, ...]

    def local(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return ``(sizes, offsets)`` of a rank's box, by torch's own function."""
        return _compute_local_shape_and_global_offset(
            self.shape, self.axes.shape, list(self.axes.coordinate(rank)), self.placements
        )


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        fqn: Its name.
        lay: How it lies.
        column: The position along ``ep`` of the ranks that have it; None where all have.
    """

    fqn: str
    lay: Lay
    column: int | None = None


@dataclass(frozen=True)
class Workload:
    """A state dict over many ranks.

    Attributes:
        name: As in the table above.
        ranks: The size of the world.
        parameters: Of all ranks.
        moments: Whether AdamW's two moments come with each parameter.
        steps: Whether a ``step`` scalar does.
        columns: Ranks along ``ep`` whose keys differ; rank ``r`` is in column ``r % columns``.
    """

    name: str
    ranks: int
    parameters: tuple[Parameter, ...]
    moments: bool = True
    steps: bool = False
    columns: int = 1

    @property
    def tensors(self) -> int:
        """Tensors in all, of all ranks."""
        return len(self.parameters) * ((3 if self.moments else 1) + self.steps)

    def held(self, rank: int) -> list[Parameter]:
        """Return the parameters of one rank."""
        column = rank % self.columns
        return [p for p in self.parameters if p.column is None or p.column == column]

    def items(self, rank: int = 0) -> int:
        """Return the tensors of one rank."""
        return len(self.held(rank)) * ((3 if self.moments else 1) + self.steps)

    def fqns(self) -> set[str]:
        """Return the keys of the checkpoint."""
        found = set()
        for parameter in self.parameters:
            found.add(f"model.{parameter.fqn}")
            if self.moments:
                found.update(f"optim.state.{parameter.fqn}.{name}" for name in MOMENTS)
            if self.steps:
                found.add(f"optim.state.{parameter.fqn}.step")
        return found


def deepseek(ranks: int, *, stacked: bool, layers: Sequence[int], whole: bool) -> list[Parameter]:
    """Return the parameters of DeepSeek-V3; ``whole`` with embedding, head and last norm."""
    fsdp = Axes(("fsdp",), (ranks,))
    ep = min(EP, ranks)
    grid = Axes(("edp", "ep"), (ranks // ep, ep))
    mine = Axes(grid.names, grid.sizes, kept=0)
    hidden, expert = 7168, 2048

    def dense(*shape: int) -> Lay:
        return Lay(shape, fsdp, (Shard(0),))

    def stack(*shape: int) -> Lay:
        # torchtitan's rule: FSDP cuts the experts themselves as long as there are enough of them.
        if ranks <= EXPERTS:
            own: Any = _StridedShard(0, split_factor=ep)
        else:
            own = Shard(1)
        return Lay((EXPERTS, *shape), grid, (own, Shard(0)))

    attention = {
        "self_attn.q_a_proj.weight": dense(1536, hidden),
        "self_attn.q_a_layernorm.weight": dense(1536),
        "self_attn.q_b_proj.weight": dense(24576, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": dense(576, hidden),
        "self_attn.kv_a_layernorm.weight": dense(512),
        "self_attn.kv_b_proj.weight": dense(32768, 512),
        "self_attn.o_proj.weight": dense(hidden, 16384),
        "input_layernorm.weight": dense(hidden),
        "post_attention_layernorm.weight": dense(hidden),
    }
    feed_forward = {
        "mlp.gate_proj.weight": dense(18432, hidden),
        "mlp.up_proj.weight": dense(18432, hidden),
        "mlp.down_proj.weight": dense(hidden, 18432),
    }
    moe = {
        "mlp.gate.weight": dense(EXPERTS, hidden),
        "mlp.gate.e_score_correction_bias": dense(EXPERTS),
        "mlp.shared_experts.gate_proj.weight": dense(expert, hidden),
        "mlp.shared_experts.up_proj.weight": dense(expert, hidden),
        "mlp.shared_experts.down_proj.weight": dense(hidden, expert),
    }
    stacks = {
        "mlp.experts.w1": stack(expert, hidden),
        "mlp.experts.w2": stack(hidden, expert),
        "mlp.experts.w3": stack(expert, hidden),
    }
    up = Lay((expert, hidden), mine, (Shard(0),))
    down = Lay((hidden, expert), mine, (Shard(0),))
    found = []
    for layer in layers:
        at = f"model.layers.{layer}"
        parts = {**attention, **(feed_forward if layer < 3 else moe)}
        if layer >= 3 and stacked:
            parts.update(stacks)
        found += [Parameter(f"{at}.{name}", lay) for name, lay in parts.items()]
        if layer >= 3 and not stacked:
            for index in range(EXPERTS):
                column = index * ep // EXPERTS
                found += [
                    Parameter(f"{at}.mlp.experts.{index}.{name}.weight", lay, column)
                    for name, lay in (("gate_proj", up), ("up_proj", up), ("down_proj", down))
                ]
    if whole:
        found += [
            Parameter("model.embed_tokens.weight", dense(129280, hidden)),
            Parameter("model.norm.weight", dense(hidden)),
            Parameter("lm_head.weight", dense(129280, hidden)),
        ]
    return found


def llama(ranks: int, *, layers: Sequence[int], whole: bool) -> list[Parameter]:
    """Return the parameters of Llama-70B, HSDP with 8 replicas."""
    copies = min(8, ranks)
    grid = Axes(("replicate", "shard"), (copies, ranks // copies))

    def dense(*shape: int) -> Lay:
        return Lay(shape, grid, (Replicate(), Shard(0)))

    layer_parts = {
        "self_attn.q_proj.weight": dense(8192, 8192),
        "self_attn.k_proj.weight": dense(1024, 8192),
        "self_attn.v_proj.weight": dense(1024, 8192),
        "self_attn.o_proj.weight": dense(8192, 8192),
        "mlp.gate_proj.weight": dense(28672, 8192),
        "mlp.up_proj.weight": dense(28672, 8192),
        "mlp.down_proj.weight": dense(8192, 28672),
        "input_layernorm.weight": dense(8192),
        "post_attention_layernorm.weight": dense(8192),
    }
    found = [
        Parameter(f"model.layers.{layer}.{name}", lay)
        for layer in layers
        for name, lay in layer_parts.items()
    ]
    if whole:
        found += [
            Parameter("model.embed_tokens.weight", dense(128256, 8192)),
            Parameter("model.norm.weight", dense(8192)),
            Parameter("lm_head.weight", dense(128256, 8192)),
        ]
    return found


def equal_tensors(ranks: int, count: int, shape: tuple[int, int], grow: int = 0) -> list[Parameter]:
    """Return ``count`` FSDP tensors of one shape, or with ``grow`` of as many shapes."""
    fsdp = Axes(("fsdp",), (ranks,))
    return [
        Parameter(f"layers.{i}.weight", Lay((shape[0] + i * grow, shape[1]), fsdp, (Shard(0),)))
        for i in range(count)
    ]


def _w1(ranks: int, part: bool, steps: bool = False) -> Workload:
    layers = range(2, 5) if part else range(61)
    parameters = deepseek(ranks, stacked=True, layers=layers, whole=not part)
    name = "w1-steps" if steps else "w1"
    return Workload(name, ranks, tuple(parameters), steps=steps)


def _w2(ranks: int, part: bool) -> Workload:
    layers = range(2, 4) if part else range(61)
    parameters = deepseek(ranks, stacked=False, layers=layers, whole=not part)
    return Workload("w2", ranks, tuple(parameters), columns=min(EP, ranks))


def _w3(name: str, shape: tuple[int, int], grow: int = 0) -> Callable[[int, bool], Workload]:
    def make(ranks: int, part: bool) -> Workload:
        parameters = equal_tensors(ranks, 32 if part else 1024, shape, grow)
        return Workload(name, ranks, tuple(parameters), moments=False)

    return make


def _w4(ranks: int, part: bool, steps: bool = False) -> Workload:
    parameters = llama(ranks, layers=range(4 if part else 80), whole=not part)
    return Workload("w4-steps" if steps else "w4", ranks, tuple(parameters), steps=steps)


WORKLOADS: dict[str, Callable[[int, bool], Workload]] = {
    "w1": _w1,
    "w2": _w2,
    "w3": _w3("w3", (8192, 28672)),
    "w3-thin": _w3("w3-thin", (1024, 1)),
    "w3-own": _w3("w3-own", (8192, 28672), 1),
    "w4": _w4,
    "w1-steps": lambda ranks, part: _w1(ranks, part, steps=True),
    "w4-steps": lambda ranks, part: _w4(ranks, part, steps=True),
}
"""By name, ``make(ranks, part)``; ``part`` gives a few layers or tensors, for the slow side."""


class Memory:
    """Local tensors that take no memory: views of zeros that nobody writes to."""

    _NBYTES = 1 << 40
    _MAP_NORESERVE = 0x4000  # which mmap names from Python 3.13 on

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | self._MAP_NORESERVE
        self._buffer = torch.frombuffer(mmap.mmap(-1, self._NBYTES, flags=flags), dtype=DTYPE)

    def tensor(self, sizes: tuple[int, ...], start: int) -> torch.Tensor:
        """Return a contiguous tensor whose first element is at ``start``."""
        strides = [1] * len(sizes)
        for dim in range(len(sizes) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * max(sizes[dim + 1], 1)
        return torch.as_strided(self._buffer, sizes, strides, start)


def _nested(workload: Workload, rank: int, value: Callable[[Lay], Any]) -> dict[str, Any]:
    model: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for parameter in workload.held(rank):
        model[parameter.fqn] = value(parameter.lay)
        if workload.moments:
            state[parameter.fqn] = {name: value(parameter.lay) for name in MOMENTS}
        if workload.steps:
            state.setdefault(parameter.fqn, {})["step"] = torch.zeros((), dtype=DTYPE)
    return {"model": model, "optim": {"state": state}} if state else {"model": model}


def real_state_dict(workload: Workload, rank: int, memory: Memory) -> dict[str, Any]:
    """Return a rank's state dict of torch's own DTensors, each an object with its own memory."""
    meshes: dict[Axes, DeviceMesh] = {}
    known: dict[Lay, tuple[DTensorSpec, tuple[int, ...]]] = {}
    start = 0

    def value(lay: Lay) -> DTensor:
        nonlocal start
        if lay not in known:
            if lay.axes not in meshes:
                meshes[lay.axes] = DeviceMesh(
                    "cpu",
                    lay.axes.ranks(rank),
                    mesh_dim_names=lay.axes.axis_names,
                    _init_backend=False,
                    _rank=rank,
                )
            stride = torch.empty(lay.shape, device="meta").stride()
            meta = TensorMeta(torch.Size(lay.shape), stride, DTYPE)
            sizes = lay.local(rank)[0]
            known[lay] = DTensorSpec(meshes[lay.axes], lay.placements, meta), tuple(sizes)
        spec, sizes = known[lay]
        # A spec of its own for each, as from_local() makes them; the constructor is 30 times
        # faster.
        own = DTensorSpec(spec.mesh, spec.placements, spec.tensor_meta)
        local = memory.tensor(sizes, start)
        start += local.numel()
        return DTensor(local, own, requires_grad=False)

    return _nested(workload, rank, value)


_APART = 16
"""Elements between the addresses of tensors that need not have a memory of their own."""


class Column:
    """The state dict of any rank of one column of ``ep``, made once and moved from rank to rank.

    Tensors that lie alike are one object here, so that a move costs a handful of assignments. Not
    for measuring a rank's own time: for getting the plans of thousands of ranks.
    """

    def __init__(self, workload: Workload, column: int, memory: Memory) -> None:
        self.workload = workload
        self._memory = memory
        self._fakes: dict[Lay, FakeDTensor] = {}
        self.state_dict = _nested(workload, column, lambda lay: self._fake(lay, column))

    def move(self, rank: int) -> None:
        """Make the state dict that of ``rank``."""
        meshes: dict[Axes, FakeMesh] = {}
        for index, (lay, fake) in enumerate(self._fakes.items()):
            if lay.axes not in meshes:
                meshes[lay.axes] = _fake_mesh(lay.axes, rank)
            fake.device_mesh = meshes[lay.axes]
            fake._local = self._memory.tensor(tuple(lay.local(rank)[0]), index * _APART)

    def _fake(self, lay: Lay, rank: int) -> FakeDTensor:
        if lay not in self._fakes:
            local = self._memory.tensor(tuple(lay.local(rank)[0]), len(self._fakes) * _APART)
            mesh = _fake_mesh(lay.axes, rank)
            self._fakes[lay] = FakeDTensor(local, mesh, lay.placements, lay.shape)
        return self._fakes[lay]


class _PlacedMesh(FakeMesh):
    """A ``FakeMesh`` that need not search for its rank."""

    place: tuple[int, ...]

    def get_coordinate(self) -> list[int] | None:
        return list(self.place)


_MESHES: dict[tuple[Axes, tuple[int, ...] | None], torch.Tensor] = {}


def _fake_mesh(axes: Axes, rank: int) -> FakeMesh:
    others = None
    if axes.kept is not None:
        position = axes.position(rank)
        others = tuple(place for axis, place in enumerate(position) if axis != axes.kept)
    if (axes, others) not in _MESHES:
        _MESHES[axes, others] = axes.ranks(rank)
    ranks = _MESHES[axes, others]
    mesh = _PlacedMesh(axes.shape, axes.axis_names, rank=rank, ranks=ranks)
    mesh.place = axes.coordinate(rank)
    return mesh


class StockPlans:
    """Makes the plans of the default planner without any tensor.

    Nothing is shared between items that the real plan does not share; ``scripts/bench_plan.py``
    compares the two for some ranks in each run.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._paths: dict[int, dict[str, tuple[str, ...]]] = {}
        self._lays: dict[int, list[Lay | None]] = {}

    def plan(self, rank: int) -> SavePlan:
        """Return the plan of a rank."""
        column = rank % self.workload.columns
        if column not in self._paths:
            self._paths[column], self._lays[column] = self._keys(column)
        boxes: dict[Lay | None, tuple[tuple[int, ...], tuple[int, ...]]] = {None: ((), ())}
        shards: dict[tuple[int, ...], torch.Tensor] = {}
        items = []
        for fqn, lay in zip(self._paths[column], self._lays[column], strict=True):
            if lay is not None and lay not in boxes:
                boxes[lay] = lay.local(rank)
            sizes, offsets = boxes[lay]
            start = torch.Size(offsets)
            if sizes not in shards:
                shards[sizes] = torch.empty(sizes, dtype=DTYPE, device="meta")
            data = TensorWriteData(
                ChunkStorageMetadata(offsets=start, sizes=torch.Size(sizes)),
                TensorProperties.create_from_tensor(shards[sizes]),
                torch.Size(() if lay is None else lay.shape),
            )
            kind = WriteItemType.TENSOR if lay is None else WriteItemType.SHARD
            items.append(WriteItem(MetadataIndex(fqn, start), kind, tensor_data=data))
        return SavePlan(items, planner_data=self._paths[column])

    def _keys(self, column: int) -> tuple[dict[str, tuple[str, ...]], list[Lay | None]]:
        paths: dict[str, tuple[str, ...]] = {}
        lays: list[Lay | None] = []
        held = self.workload.held(column)
        for parameter in held:
            paths[f"model.{parameter.fqn}"] = ("model", parameter.fqn)
            lays.append(parameter.lay)
        for parameter in held:
            names: dict[str, Lay | None] = {}
            if self.workload.moments:
                names = dict.fromkeys(MOMENTS, parameter.lay)
            if self.workload.steps:
                names["step"] = None
            for name, lay in names.items():
                paths[f"optim.state.{parameter.fqn}.{name}"] = (
                    "optim",
                    "state",
                    parameter.fqn,
                    name,
                )
                lays.append(lay)
        return paths, lays
