"""A checkpoint of what an EP-unaware save left: ordinary DCP, with nothing in it that is wrong.

Sound keys are copied, chunk by chunk. Experts that have all of their weights are written under a
key of their own, with their number in the model. ``rescue.json`` lists what is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.as_json import to_json
from dcp_placements.offline.box_reads import BoxReader, pieces
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint, StoredObject, StoredTensor
from dcp_placements.offline.chunk_writer import Piece, Target, write_chunks
from dcp_placements.offline.declared import Progress
from dcp_placements.offline.experts import ExpertFamily, expert_families, expert_key
from dcp_placements.offline.remote_output import output_at
from dcp_placements.offline.repairs.surviving_experts import (
    OVERWRITTEN,
    UNCLEAR,
    Diagnosis,
    ExpertTensor,
)

PIECE_NBYTES = 256 << 20
"""Larger chunks are copied as several."""

LIST = "rescue.json"
"""The file that lists what is not in the rescued checkpoint."""


@dataclass(frozen=True, slots=True)
class Rescue:
    """What was written."""

    path: str  # the new checkpoint
    copied: tuple[str, ...]  # keys that are copied unchanged
    experts: Mapping[str, str]  # new keys of experts that survived, and the old key of each
    left_out: tuple[str, ...]  # old keys that the new checkpoint does not have
    lost: Mapping[str, tuple[int, ...]]  # by layer, experts without their weights
    # By layer, experts with weights but without optimizer state
    without_state: Mapping[str, tuple[int, ...]]
    nbytes: int  # bytes of the tensors and objects written


def rescue(
    checkpoint: Checkpoint,
    diagnosis: Diagnosis,
    out: str | os.PathLike[str],
    *,
    progress: Progress = lambda done, total: None,
) -> Rescue:
    """Write what is sound to a new checkpoint; nothing is overwritten.

    Args:
        checkpoint: The checkpoint that was diagnosed.
        diagnosis: Its diagnosis.
        out: A directory or URL where nothing is yet.
        progress: Called with the bytes written so far, and in all.

    Raises:
        CannotLook: ``out`` exists or is being written, or the checkpoint is not DCP's; or the
            checkpoint was overwritten while it was read, and nothing is written then.
        PlacementError: There is nothing to rescue, or a file of the checkpoint is damaged.
    """
    _check_rescuable(checkpoint, diagnosis)
    families = expert_families(checkpoint.tensors.values())
    overwritten = diagnosis.of(OVERWRITTEN)
    losses = diagnosis.layers.values()
    # Without a mesh no expert has a number in the model, so all are lost.
    all_lost = {tensor.layer: tuple(range(tensor.experts or 0)) for tensor in overwritten}
    check = partial(
        checkpoint.directory.check_versions, checkpoint.directory.versions(checkpoint.files)
    )
    with output_at(out, source=checkpoint.path) as output, BoxReader(checkpoint) as reader:
        copied = [piece for fqn in diagnosis.sound for piece in _copied(checkpoint, reader, fqn)]
        experts = [
            expert
            for diagnosed in overwritten
            for expert in _experts(diagnosis, diagnosed, families[diagnosed.fqn], reader)
        ]
        copied += [piece for expert in experts for piece in expert.pieces]
        result = Rescue(
            str(output.path),
            diagnosis.sound,
            {expert.fqn: expert.old for expert in experts},
            tuple(key for tensor in overwritten for key in families[tensor.fqn].keys),
            {loss.layer: loss.lost for loss in losses} or all_lost,
            {loss.layer: loss.weights_only for loss in losses if loss.weights_only},
            sum(piece.nbytes for piece in copied),
        )
        document = {"rescued_from": checkpoint.path, **to_json(result)}
        old_keys = {**{fqn: fqn for fqn in diagnosis.sound}, **result.experts}
        sound = [checkpoint.tensors[fqn] for fqn in diagnosis.sound if fqn in checkpoint.tensors]
        write_chunks(
            output,
            {tensor.fqn: Target(tensor.shape, tensor.dtype) for tensor in sound}
            | {expert.fqn: expert.target for expert in experts},
            sorted(copied, key=lambda piece: str(piece.file)),
            progress,
            check,
            paths=_paths(checkpoint, old_keys),
            beside={LIST: (json.dumps(document, indent=2) + "\n").encode()},
        )
    return result


def _check_rescuable(checkpoint: Checkpoint, diagnosis: Diagnosis) -> None:
    if checkpoint.format == SAFETENSORS:
        raise CannotLook(f"{checkpoint.path}: only a DCP checkpoint can be rescued")
    if diagnosis.healthy:
        reason = "all experts are there" if diagnosis.tensors else "no key names experts"
        raise PlacementError(f"{checkpoint.path}: {reason}, so nothing is to be rescued")
    unclear = diagnosis.of(UNCLEAR)
    if unclear:
        raise PlacementError(
            f"{unclear[0].fqn}: it is not clear which experts it holds: {unclear[0].reason}\n"
            "    way out:     --experts-per-layer and --mesh of the run that saved"
        )


def _copied(checkpoint: Checkpoint, reader: BoxReader, fqn: str) -> Iterator[Piece]:
    """Yield what is copied of a key; chunks without a place in a file are not."""
    tensor = checkpoint.tensors.get(fqn)
    if tensor is None:
        stored = checkpoint.objects[fqn]
        if stored.file is not None:
            record = partial(_object, checkpoint, stored)
            yield Piece(fqn, None, stored.file, stored.nbytes, record)
        return
    itemsize = tensor.dtype.itemsize
    for chunk in tensor.chunks:
        if chunk.file is not None:
            for box in pieces(chunk.box, max(PIECE_NBYTES // itemsize, 1)):
                read = partial(reader.read, tensor, box)
                yield Piece(fqn, box, chunk.file, box.numel * itemsize, read)


def _object(checkpoint: Checkpoint, stored: StoredObject) -> bytes:
    data = checkpoint.read_object(stored)
    if missing := stored.nbytes - len(data):
        reason = f"it ends {missing} bytes too early"
        raise PlacementError(f"{stored.fqn}: {stored.file} cannot be read: {reason}")
    return data


class _Expert(NamedTuple):
    """A tensor of one expert in the new checkpoint, and its key in the old one."""

    fqn: str
    old: str
    target: Target
    pieces: list[Piece]


def _experts(
    diagnosis: Diagnosis, diagnosed: ExpertTensor, family: ExpertFamily, reader: BoxReader
) -> Iterator[_Expert]:
    """Yield each expert of a tensor that is rescued."""
    loss = diagnosis.layers.get(diagnosed.layer)
    if loss is None:
        return
    rescued = {*loss.kept} if diagnosed.is_state else {*loss.kept, *loss.weights_only}
    for survivor, part in zip(diagnosed.survivors, family.parts(), strict=True):
        if survivor.expert is None or survivor.expert not in rescued:
            continue
        tensor = part.tensor
        key = expert_key(tensor.fqn)
        assert key is not None
        fqn = key.of_expert(survivor.expert)
        parts = []
        for chunk, shared in part.pieces:
            box = Box(*(_without(values, family.dim) for values in shared))
            read = partial(_reshaped, reader, tensor, shared, box.sizes)
            parts.append(Piece(fqn, box, chunk.file, box.numel * tensor.dtype.itemsize, read))
        target = Target(_without(tensor.shape, family.dim), tensor.dtype)
        yield _Expert(fqn, tensor.fqn, target, parts)


def _reshaped(
    reader: BoxReader, tensor: StoredTensor, box: Box, sizes: tuple[int, ...]
) -> torch.Tensor:
    return reader.read(tensor, box).reshape(sizes)


def _paths(checkpoint: Checkpoint, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return where each key stands in the nested state dict, if the old checkpoint records it."""
    data = checkpoint.metadata.planner_data
    paths: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
    return {
        new: paths[old] if new == old else _path(paths[old], new)
        for new, old in keys.items()
        if old in paths
    }


def _without(values: Sequence[int], dim: int | None) -> tuple[int, ...]:
    return tuple(value for at, value in enumerate(values) if at != dim)


def _path(path: Sequence[Any], new: str) -> tuple[Any, ...]:
    """Return where a new key stands in the nested state dict, made from the old key's place.

    >>> _path(("state", "experts.w1", "exp_avg"), "state.experts.3.w1.exp_avg")
    ('state', 'experts.3.w1', 'exp_avg')
    """
    parts = [str(part) for part in path]
    before = after = 0
    while new.startswith(".".join(parts[: before + 1]) + "."):
        before += 1
    while after + before + 1 < len(parts) and new.endswith("." + ".".join(parts[-after - 1 :])):
        after += 1
    head, tail = ".".join(parts[:before]), ".".join(parts[len(parts) - after :])
    middle = new[len(head) + 1 if head else 0 : len(new) - len(tail) - 1 if tail else len(new)]
    return (*path[:before], middle, *path[len(path) - after :])
