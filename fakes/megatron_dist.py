"""A ``torch_dist`` checkpoint as Megatron-LM writes it, from the same whole tensors."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard

from .megatron import MegatronModel, Wholes, modules_of
from .reference import cut
from .tensor import real_dtensor
from .world import World


def write_torch_dist(
    path: str | Path,
    model: MegatronModel,
    *,
    tp: int = 1,
) -> Path:
    """Write a checkpoint in Megatron's ``torch_dist`` format.

    Args:
        path: The directory.
        model: The model to save; without dense layers before the layers with experts, so that all
            layers make one tensor.
        tp: Number of ranks over which the last dim of each weight is cut.
    """
    root = Path(path)
    whole = _dist_keys(model.truth())
    world = World(tp)

    def held(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, tp=tp)
        state: dict[str, Any] = {
            key: real_dtensor(
                cut(value, [Shard(value.dim() - 1)], (tp,), (rank,)),
                mesh,
                [Shard(value.dim() - 1)],
                value.shape,
            )
            for key, value in whole.items()
        }
        if rank == 0:
            state["rng_state/shard_0.0_1.1"] = {"random_rng_state": (3, (1, 2))}
        return state

    world.save(root, held, lambda rank: DefaultSavePlanner(flatten_state_dict=False))
    (root / "metadata.json").write_text('{"sharded_backend": "torch_dist", "version": 1}')
    torch.save({"iteration": 10}, root / "common.pt")
    # ``.metadata`` is of a class of Megatron's own.
    with open(root / ".metadata", "rb") as stream:
        metadata = pickle.load(stream)
    name = "megatron.core.dist_checkpointing.strategies.torch"
    metadata.__class__ = MCoreMetadata
    with modules_of(name, MCoreMetadata=MCoreMetadata), open(root / ".metadata", "wb") as out:
        pickle.dump(metadata, out)
    return root


class MCoreMetadata(Metadata):
    """Megatron's own class of metadata; written under Megatron's name."""


def _dist_keys(weights: Wholes) -> Wholes:
    """Return the whole weights under the keys of ``torch_dist``."""
    stacked: Wholes = {}
    stacks: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    for key, weight in weights.items():
        name = re.sub(
            r"\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$", r".experts.experts.\2.\1", key
        )
        numbers = tuple(map(int, re.findall(r"(?<=\.)\d+(?=\.)", name)))
        stacks.setdefault(re.sub(r"\.\d+(?=\.)", "", name), {})[numbers] = weight
    for name, rows in stacks.items():
        stacked[name] = _stacked(rows)
    return stacked


def _stacked(rows: Mapping[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    if list(rows) == [()]:
        return rows[()]
    firsts = sorted({numbers[0] for numbers in rows})
    assert firsts == list(range(len(firsts)))
    return torch.stack(
        [_stacked({n[1:]: w for n, w in rows.items() if n[0] == first}) for first in firsts]
    )
