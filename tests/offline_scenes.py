"""Checkpoints to look at, and the command line run on them."""

from __future__ import annotations

import json
import os
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemWriter,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.cli import main
from dcp_placements.testing import FakeDTensor, World, cut
from tests.storage_scenes import stock_metadata
from tests.strategies import arange


def wholes() -> dict[str, torch.Tensor]:
    """Return whole tensors: stacked experts, dense weights, one scalar."""
    return {
        "layers.0.experts.w1": arange((8, 5, 3)),
        "layers.0.experts.w2": arange((8, 3, 5)) + 1000,
        "layers.0.norm": arange((7,)).to(torch.bfloat16),
        "layers.1.attention": arange((6, 10)) + 2000,
        "scale": torch.tensor(3.5),
    }


def save_sharded(
    path: Path,
    *,
    lean: bool = True,
    digests: Any = "full",
    step: int = 1,
    add: float = 0.0,
    ep: int = 2,
    stock_metadata: bool = True,
) -> dict[str, torch.Tensor]:
    """Save from ``ep`` x 2 ranks: experts over ep and then fsdp, dense weights over fsdp."""
    whole = {fqn: tensor + add for fqn, tensor in wholes().items()}
    world = World(2 * ep)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=ep, fsdp=2)
        made: dict[str, Any] = {"step": step}
        for fqn, tensor in whole.items():
            local = tensor
            if "experts" in fqn:
                local = cut(tensor, [Shard(0)], (ep,), mesh["ep"].get_coordinate())
            made[fqn] = (
                FakeDTensor.distribute(local, mesh["fsdp"], [Shard(0)]) if local.ndim else local
            )
        return made

    def planner(rank: int) -> PlacementSavePlanner:
        mesh = world.mesh(rank, ep=ep, fsdp=2)
        return PlacementSavePlanner(rules_by_ep(mesh), digests=digests, step=step)

    def writer(rank: int) -> Any:
        if not lean:
            return dcp.FileSystemWriter(path)
        return PlacementFileSystemWriter(path, stock_metadata=stock_metadata)

    world.save(path, state_dict, planner, writer)
    return whole


def saving_over(source: Path) -> Callable[[int, int], None]:
    """Return a progress callback that saves over a checkpoint once, after a quarter of the work."""
    times: list[int] = []

    def overwrite(done: int, total: int) -> None:
        if not times and done > total // 4:
            times.append(done)
            save_sharded(source, lean=False, add=1000.0, step=2)

    return overwrite


def save_hugging_face(path: Path, tensors: dict[str, torch.Tensor], files: int = 2) -> None:
    """Save as a Hugging Face directory of several files and an index."""
    path.mkdir(parents=True, exist_ok=True)
    index = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {
            k: v.contiguous() for i, (k, v) in enumerate(tensors.items()) if i % files == number
        }
        save_file(part, path / name)
        index.update(dict.fromkeys(part, name))
    document = {"metadata": {}, "weight_map": index}
    (path / "model.safetensors.index.json").write_text(json.dumps(document))


def overwriting(folder: Path, pattern: str) -> Callable[[int, int], None]:
    """Return a ``progress`` that writes the end of each matching file again, when some is read."""
    waiting = sorted(folder.rglob(pattern))
    assert waiting

    def progress(done: int, total: int) -> None:
        while waiting and done > total // 4:
            file = waiting.pop()
            before = file.stat()
            with file.open("r+b") as stream:
                stream.seek(-16, os.SEEK_END)
                end = stream.read()
                stream.seek(-16, os.SEEK_END)
                stream.write(end)
            # Clocks of file systems are coarse.
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))

    return progress


def rules_by_ep(mesh: Any) -> PlacementRules:
    """Return rules that cut experts over ``ep``."""
    return PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})


@dataclass(frozen=True)
class Ran:
    """One run of the command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What was printed, as JSON."""
        return json.loads(self.out)


class Run:
    """Runs the command line in this process; unexpected errors raise."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: Any) -> Ran:
        self.capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        printed = self.capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    def fails(self, *arguments: Any) -> str:
        """Return the error of a command that could not look, and says nothing else."""
        ran = self(*arguments)
        assert (ran.code, ran.out) == (2, ""), ran
        return ran.err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs the command line."""
    monkeypatch.setenv("DCP_PLACEMENTS_DEBUG", "1")
    return Run(capsys)


def save_torch_dist(path: Path) -> dict[str, torch.Tensor]:
    """Save what Megatron's ``torch_dist`` leaves: stacked layers, ShardedObjects, common state."""
    tensors = {
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": arange((2, 4, 3, 5)),
        "decoder.layers.self_attention.linear_qkv.weight": arange((2, 6, 3)),
        "embedding.word_embeddings.weight": arange((8, 3)),
    }
    objects = {f"rng_state/shard_{rank}_2": ("cuda", rank) for rank in range(2)}
    dcp.save({**tensors, **objects}, checkpoint_id=path)
    torch.save({"iteration": 10, "args": ("any", "thing")}, path / "common.pt")
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(config))
    # Megatron's metadata are of a class of its own.
    name = "megatron.core.dist_checkpointing.strategies.torch"
    module = types.ModuleType(name)

    @dataclass
    class MCoreMetadata(Metadata):
        mcore_data: dict[str, Any] | None = None

    MCoreMetadata.__module__, MCoreMetadata.__qualname__ = name, "MCoreMetadata"
    module.MCoreMetadata = MCoreMetadata  # type: ignore[attr-defined]
    metadata = stock_metadata(path)
    own = MCoreMetadata(**vars(metadata), mcore_data={"embedding": {"flattened": None}})
    names = [".".join(name.split(".")[: n + 1]) for n in range(name.count(".") + 1)]
    with mock.patch.dict(sys.modules, {**{n: types.ModuleType(n) for n in names}, name: module}):
        (path / ".metadata").write_bytes(pickle.dumps(own))
    return tensors
