"""Megatron-LM's ``torch_dist`` checkpoints under the names of the model.

They are DCP checkpoints of whole tensors already, with gate before up. But layers of one form are
one tensor with a first axis, ``decoder.layers.mlp...`` of ``[layers, ...]``, and so are experts, on
the axis behind it; other releases write a key for each, and gate and up (``_w``, ``_v``) apart.
Facts: Megatron-LM ``core/transformer/transformer_block.py``, ``core/transformer/moe/experts.py``,
``core/transformer/mlp.py``, ``core/optimizer``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from dcp_placements.formats.megatron.plan import ImportPlan
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.checkpoint import Checkpoint, StoredTensor
from dcp_placements.offline.chunk_writer import Piece, Target
from dcp_placements.presets.megatron_core import VOCABULARY

_STACKED_LAYERS = re.compile(r"(?<=\.layers\.)(?!\d+\.)")
_STACKED_EXPERTS = re.compile(r"\.experts\.experts\.(linear_fc[12]\.(?:weight|bias))$")
_SINGLE_EXPERT = re.compile(r"\.experts\.experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
_HALF = re.compile(r"(?<=linear_fc1\.)(weight|bias)_([wv])$")
_STATE = re.compile(r"^optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|step)\.(.+)$")


@dataclass(frozen=True, slots=True)
class Naming:
    """The model's name for a stored key."""

    form: str  # the name, ``{}`` for each number of a stacked axis
    axes: int  # how many first axes are numbers
    # 0 or 1 for the first or second half of the model's tensor, gate or up; None for a whole one
    half: int | None = None


def naming_of(key: str) -> Naming:
    """Return the model's name for a key of a ``torch_dist`` checkpoint.

    >>> naming_of("decoder.layers.mlp.experts.experts.linear_fc1.weight").form
    'decoder.layers.{}.mlp.experts.linear_fc1.weight{}'
    >>> naming_of("optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc2.weight").form
    'optimizer.state.decoder.layers.3.mlp.linear_fc2.weight.exp_avg'
    """
    tail, half = "", None
    form = key.replace("{", "{{").replace("}", "}}")
    if match := _STATE.match(form):
        form, tail = match[2], f".{match[1]}"
    if match := _HALF.search(form):
        half = "wv".index(match[2])
        form = form[: match.end(1)]
    form, layers = _STACKED_LAYERS.subn("{}.", form, count=1)
    form, experts = _STACKED_EXPERTS.subn(r".experts.\1{}", form)
    form = _SINGLE_EXPERT.sub(r".experts.\2\1", form)
    return Naming(f"optimizer.state.{form}{tail}" if tail else form, layers + experts, half)


def plan_dist(
    plan: ImportPlan, checkpoint: Checkpoint, reader: BoxReader, vocab_size: int | None
) -> None:
    """Add the tensors of a checkpoint to a plan; nothing is read yet.

    Args:
        plan: The plan; what cannot be put together is a fault in it.
        checkpoint: The source.
        reader: Reads its boxes; must stay open until all is written.
        vocab_size: Rows of the vocabulary without padding; None keeps them all.
    """
    for key, tensor in checkpoint.tensors.items():
        naming = naming_of(key)
        shape = list(tensor.shape[naming.axes :])
        if len(tensor.shape) < naming.axes or (naming.half is not None and not shape):
            plan.fault(key, f"has shape {tensor.shape}, with no axis to take apart")
            continue
        if naming.half is not None:
            shape[0] *= 2
        if vocab_size is not None and shape and _is_vocabulary(naming.form):
            shape[0] = min(shape[0], vocab_size)
        target = Target(tuple(shape), tensor.dtype)
        for chunk in tensor.chunks:
            plan.padding += chunk.box.numel * tensor.dtype.itemsize
            for fqn, source, box in _parts(naming, chunk.box, target.shape):
                nbytes = box.numel * tensor.dtype.itemsize
                plan.padding -= nbytes
                read = _read(reader, tensor, source, box)
                piece = Piece(fqn, box, chunk.file, nbytes, read)
                if plan.declare(fqn, target, key) and not plan.add(piece):
                    plan.fault(fqn, f"{key} and another key hold the same part of it")
    plan.check_whole()


def _is_vocabulary(form: str) -> bool:
    return f"{form.removeprefix('optimizer.state.')}.".startswith(
        tuple(f"{name}." for name in VOCABULARY)
    )


def _parts(naming: Naming, chunk: Box, shape: tuple[int, ...]) -> Iterator[tuple[str, Box, Box]]:
    """Yield ``(model's name, box of the stored tensor, box of the model's)`` for a stored chunk.

    Rows beyond the model's shape are in no box.
    """
    axes = naming.axes
    offsets, sizes = list(chunk.offsets[axes:]), list(chunk.sizes[axes:])
    start = list(offsets)
    if sizes:
        sizes[0] = min(sizes[0], max(shape[0] - offsets[0], 0))
    if naming.half:
        start[0] += shape[0] // 2
    numbers = [
        range(first, first + count)
        for first, count in zip(chunk.offsets[:axes], chunk.sizes[:axes], strict=True)
    ]
    box = Box(tuple(start), tuple(sizes))
    for at in product(*numbers) if box.numel else ():
        source = Box((*at, *offsets), (*(1 for _ in at), *sizes))
        yield naming.form.format(*at), source, box


def _read(
    reader: BoxReader, tensor: StoredTensor, source: Box, box: Box
) -> Callable[[], torch.Tensor]:
    return lambda: reader.read(tensor, source).reshape(box.sizes)
