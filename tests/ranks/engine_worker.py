"""The ranks of a trainer that saves and loads with ``torch_checkpointing``.

    engine_worker.py OUT ACT:KIND:AXES[:CHECKPOINT] ...

``save`` writes ``truth()`` as the mesh of AXES (``ep=2,fsdp=2``) cuts it; ``load`` fills the same
model, and finds the keys that are not what plain slicing cuts from the truth. ``OUT/<rank>.json``
has what each rank saw. KIND is the resharder: ``ours``, ``theirs``, ``source`` (ours, for what
theirs saved by ep=2, fsdp=2), or ours with a mistake.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scenes import heard, leave, refusal, same
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch_checkpointing import metadata_manager
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    PlacementRules,
    Placements,
    Renumber,
)

EXPERTS = 4


def gathered(manager: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Gather metadata on the CPU, where the engine names "cuda"."""
    parts: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(parts, data, group=process_group)
    return dict(enumerate(parts))


metadata_manager.DefaultMetadataManager._all_gather_pickled_data = gathered


def number(*shape: int, start: int = 0) -> torch.Tensor:
    return (torch.arange(int(torch.Size(shape).numel())) + start).reshape(shape).float()


def truth() -> dict[str, torch.Tensor]:
    """Return the whole model."""
    whole = {
        "experts.w1": number(EXPERTS, 6, 3, start=100),
        "experts.w2": number(EXPERTS, 5, start=1000),
        "router": number(5, 3, start=2000),
        "gate_up": number(16, 3, start=3000),
        "vocabulary": number(7, 2, start=4000),
        "norm": number(3, start=5000),
        "scale": torch.tensor(7.5),
    }
    for one in range(EXPERTS):
        whole[f"layers.0.experts.{one}.v"] = number(3, 2, start=6000 + 10 * one)
    return whole


def piece(whole: torch.Tensor, dim: int, of: int, at: int) -> torch.Tensor:
    """Return what the rank at a position of an axis has of a dim, by plain slicing."""
    size = -(-whole.shape[dim] // of)
    return whole[(slice(None),) * dim + (slice(at * size, (at + 1) * size),)].contiguous()


def locals_of(axes: dict[str, int], at: dict[str, int]) -> dict[str, torch.Tensor]:
    """Return what a rank holds, by plain slicing; experts by this rank's own numbers."""
    whole, ep, fsdp = truth(), (axes["ep"], at["ep"]), (axes["fsdp"], at["fsdp"])
    found = {
        "experts.w1": piece(piece(whole["experts.w1"], 0, *ep), 0, *fsdp),
        "experts.w2": piece(piece(whole["experts.w2"], 0, *ep), 1, *fsdp),
        "router": piece(whole["router"], 0, *fsdp),
        "norm": whole["norm"],
        "scale": whole["scale"],
    }
    gate, up = whole["gate_up"].split(8)
    found["gate_up"] = torch.cat([piece(gate, 0, *ep), piece(up, 0, *ep)])
    padded = torch.cat([whole["vocabulary"], torch.full((1, 2), -1.0)])
    found["vocabulary"] = piece(padded, 0, *ep)
    count = EXPERTS // axes["ep"]
    for one in range(count):
        expert = whole[f"layers.0.experts.{at['ep'] * count + one}.v"]
        found[f"layers.0.experts.{one}.v"] = piece(expert, 0, *fsdp)
    return found


def tensors(
    mesh: DeviceMesh, axes: dict[str, int], at: dict[str, int], *, empty: bool
) -> dict[str, Any]:
    """Return the rank's model: DTensors over FSDP alone, as FSDP2 makes them of local experts."""
    own = mesh["rep", "fsdp"] if "rep" in axes else mesh["fsdp"]
    replicated = [Replicate()] if "rep" in axes else []
    state: dict[str, Any] = {}
    whole = truth()
    for key, local in locals_of(axes, at).items():
        value = torch.full_like(local, -1.0) if empty else local.clone()
        dim = {"experts.w1": 0, "experts.w2": 1, "router": 0}.get(key, 0 if ".v" in key else None)
        if dim is None:
            state[key] = value
            continue
        of_key = whole.get(key, whole["layers.0.experts.0.v"])
        shape = list(of_key.shape)
        shape[0] //= axes["ep"] if key.startswith("experts.") else 1
        size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
        placements = [*replicated, Shard(dim)]
        state[key] = DTensor.from_local(
            value, own, placements, run_check=False, shape=size, stride=stride
        )
    return state


def placements_of(mesh: Any, axes: dict[str, int], position: int, kind: str = "") -> Placements:
    ep = {"ep": Shard(0)}
    rules = {
        "experts.w1": CheckpointPlacement(mesh, ep),
        "experts.w2": CheckpointPlacement(mesh, ep),
        "gate_up": CheckpointPlacement(mesh, {"ep": FusedShard(0, 2)}),
        "vocabulary": CheckpointPlacement(mesh, ep, global_shape=(7, 2), padded_shape=(8, 2)),
    }
    if kind == "no_rule":
        del rules["experts.w1"]
    if kind == "other_rule":
        rules["gate_up"] = CheckpointPlacement(mesh, ep)
    count = EXPERTS // axes["ep"]
    numbers = range(position * count, (position + 1) * count)
    rename = Renumber("layers.0.experts.{}", numbers, total=EXPERTS)
    return Placements(PlacementRules(rules), rename=None if kind == "no_rename" else rename)


def saved_by(mesh: Any) -> Placements:
    """Return what each rank of ep=2, fsdp=2 declares."""
    axes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    return placements_of(mesh, axes, mesh.get_coordinate()[0])


def payload(state: dict[str, Any], *, empty: bool) -> dict[str, Any]:
    """Return the items that are saved: the model, and a nested optimizer that follows it."""
    moments = {
        key: {"exp_avg": value.clone() if empty else value * 2, "step": torch.tensor(3.0)}
        for key, value in state.items()
        if key != "scale"
    }
    groups = [{"lr": 0.0 if empty else 0.5, "betas": (0.9, 0.95), "params": list(moments)}]
    return {"model": state, "optimizer": {"state": moments, "param_groups": groups}}


def local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def wrong(found: dict[str, Any], axes: dict[str, int], at: dict[str, int]) -> list[str]:
    """Return the keys that are not what plain slicing gives."""
    keys = []
    for key, expected in locals_of(axes, at).items():
        held = {f"model.{key}": (found["model"][key], 1)}
        if key != "scale":
            held[f"optimizer.{key}"] = (found["optimizer"]["state"][key]["exp_avg"], 2)
        for name, (value, factor) in held.items():
            one, other = local(value).clone(), expected * factor
            if key == "vocabulary":  # its last row is padding, which keeps what it has
                kept = min(7 - at["ep"] * len(other), len(other))
                one, other = one[:kept], other[:kept]
            if not same(one, other):
                keys.append(name)
    if found["optimizer"]["param_groups"][0]["lr"] != 0.5:
        keys.append("lr")
    return keys


def read_nbytes() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar:")[1].split()[0])


def run(out: Path, act: str, kind: str, spec: str, checkpoint: str = "") -> dict[str, Any]:
    """Save or load; return what this rank saw."""
    axes = {name: int(size) for name, size in (one.split("=") for one in spec.split(","))}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    at = dict(zip(axes, mesh.get_coordinate() or (), strict=True))
    declared = placements_of(mesh, axes, at["ep"], kind)
    resharder: Any = DefaultResharder()
    if kind.startswith("source"):
        ranks = {"ep": 4 if kind == "source_of_8" else 2, "fsdp": 2}
        resharder = declared.resharder(source=saved_by, axes=ranks)
    elif kind != "theirs":
        resharder = declared.resharder(restricted=kind == "restricted")
    config = CheckpointManager.Config.with_sync_save()
    # The scratch directories of tests may be where O_DIRECT is not.
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    config.items = dict.fromkeys(("model", "optimizer"), ItemSpec(resharder=resharder))
    manager = config.build()
    state = tensors(mesh, axes, at, empty=act == "load")
    items = payload(state, empty=act == "load")
    path, facts = str(out / (checkpoint or kind)), {}
    if act == "save":
        if kind == "conflict":
            local(state["router"]).add_(float(at["ep"]))
        if kind == "bad_shape" and dist.get_rank() == 1:
            state["vocabulary"] = torch.zeros(3, 2)
        if kind == "in_tuple":
            state["pair"] = (state["router"], "text")
        facts["refused"] = refusal(lambda: manager.save(path, items))
    else:
        started, before = time.perf_counter(), read_nbytes()
        facts["refused"] = refusal(lambda: manager.load(path, into=items))
        facts["nbytes"] = read_nbytes() - before
        facts["seconds"] = time.perf_counter() - started
        facts["wrong"] = wrong(items, axes, at)
    dist.barrier()
    manager.close()
    return facts


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    found = {}
    for scenario in sys.argv[2:]:
        with heard() as texts:
            found[scenario] = run(out, *scenario.split(":"))
        found[scenario]["warnings"] = texts
        (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
