"""Megatron-LM's ``torch_dist`` checkpoints with a key per layer and expert.

They are DCP checkpoints of whole tensors already, gate before up. But layers that are alike are one
tensor with a first axis, ``decoder.layers.mlp...`` of ``[layers, ...]``, and so are experts behind
it; other releases write a key for each, and gate and up (``_w``, ``_v``) apart. Here all become the
keys of the model. Facts: Megatron-LM ``core/transformer/transformer_block.py``,
``core/transformer/moe/experts.py``, ``core/transformer/mlp.py``, ``core/optimizer``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from dcp_placements.errors import Fault, raise_faults
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import tiles
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.checkpoint import Checkpoint, StoredChunk, StoredTensor
from dcp_placements.offline.chunk_writer import Piece, Target
from dcp_placements.presets.megatron_core import VOCABULARY

_STACKED_LAYERS = re.compile(r"(?<=\.layers\.)(?!\d+\.)")
_STACKED_EXPERTS = re.compile(r"\.experts\.experts\.(linear_fc[12]\.(?:weight|bias))$")
_SINGLE_EXPERT = re.compile(r"\.experts\.experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
_HALF = re.compile(r"(?<=linear_fc1\.)(weight|bias)_([wv])$")
_STATE = re.compile(r"^optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|step)\.(.+)$")


@dataclass(frozen=True, slots=True)
class Naming:
    """How a stored key becomes the model's.

    Attributes:
        form: The key, ``{}`` for each number of a stacked axis.
        axes: How many first axes are numbers.
        half: 0 or 1 for a tensor that is half of the model's, gate or up; None for a whole one.
    """

    form: str
    axes: int
    half: int | None = None


def naming_of(key: str) -> Naming:
    """Return what a key of a ``torch_dist`` checkpoint is in the model.

    >>> naming_of("decoder.layers.mlp.experts.experts.linear_fc1.weight").form
    'decoder.layers.{}.mlp.experts.linear_fc1.weight{}'
    >>> naming_of("optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc2.weight").form
    'optimizer.state.decoder.layers.3.mlp.linear_fc2.weight.exp_avg'
    """
    tail = ""
    form = key.replace("{", "{{").replace("}", "}}")
    if found := _STATE.match(form):
        form, tail = found[2], f".{found[1]}"
    half = None
    if found := _HALF.search(form):
        half = "wv".index(found[2])
        form = form[: found.end(1)]
    form, layers = _STACKED_LAYERS.subn("{}.", form, count=1)
    form, experts = _STACKED_EXPERTS.subn(r".experts.\1{}", form)
    form = _SINGLE_EXPERT.sub(r".experts.\2\1", form)
    return Naming(f"optimizer.state.{form}{tail}" if tail else form, layers + experts, half)


@dataclass(slots=True)
class DistImport:
    """What a ``torch_dist`` checkpoint comes to under the model's keys.

    Attributes:
        targets: The model's tensors.
        files: What is written, by the file that it is read from.
        nbytes: Of the targets.
        padding: Bytes of vocabulary rows that are left out.
    """

    targets: dict[str, Target]
    files: list[list[Piece]]
    nbytes: int
    padding: int


def plan_dist(checkpoint: Checkpoint, reader: BoxReader, vocab_size: int | None) -> DistImport:
    """Return what is to be written of a checkpoint; nothing is read yet.

    Args:
        checkpoint: The source.
        reader: Of its boxes; to stay open until all is written.
        vocab_size: Rows of the vocabulary without padding; None keeps them all.

    Raises:
        PlacementError: Keys that come together wrongly, or chunks that leave holes.
    """
    made = DistImport({}, [], 0, 0)
    faults = []
    by_file: dict[str, list[Piece]] = {}
    boxes: dict[str, list[Box]] = {}
    for key, tensor in checkpoint.tensors.items():
        naming = naming_of(key)
        shape = list(tensor.shape[naming.axes :])
        if len(tensor.shape) < naming.axes or (naming.half is not None and not shape):
            faults.append(Fault(key, f"has shape {tensor.shape}, with no axis to take apart"))
            continue
        rows = shape[0] if shape else 0
        if naming.half is not None:
            shape[0] *= 2
        if vocab_size is not None and shape and _is_words(naming):
            shape[0] = min(rows, vocab_size)
        target = Target(tuple(shape), tensor.dtype)
        for chunk in tensor.chunks:
            for piece, spare in _pieces(naming, tensor, chunk, target, rows, reader.read):
                made.padding += spare
                if piece is None:
                    continue
                known = made.targets.setdefault(piece.fqn, target)
                if known != target:
                    faults.append(Fault(key, f"is {target}, and another key of it {known}"))
                by_file.setdefault(chunk.file or "", []).append(piece)
                boxes.setdefault(piece.fqn, []).append(piece.box)
    for fqn, target in made.targets.items():
        if not tiles(Box((0,) * len(target.shape), target.shape), boxes[fqn]):
            faults.append(
                Fault(fqn, "is not whole", ("way out:     look at it with dcp-placements verify",))
            )
        made.nbytes += torch.Size(target.shape).numel() * target.dtype.itemsize
    raise_faults(f"{checkpoint.path} cannot be put together", faults)
    made.files = list(by_file.values())
    return made


def _is_words(naming: Naming) -> bool:
    form = naming.form.removeprefix("optimizer.state.")
    return any(form == name or form.startswith(f"{name}.") for name in VOCABULARY)


def _pieces(
    naming: Naming,
    tensor: StoredTensor,
    chunk: StoredChunk,
    target: Target,
    rows: int,
    read: Callable[[StoredTensor, Box], torch.Tensor],
) -> Iterator[tuple[Piece | None, int]]:
    """Yield what one stored chunk comes to, and the bytes of it that are left out."""
    offsets, sizes = chunk.box
    axes = naming.axes
    inner, extent = list(offsets[axes:]), list(sizes[axes:])
    spare = 0
    if inner and naming.half is None and inner[0] + extent[0] > target.shape[0]:
        kept = max(target.shape[0] - inner[0], 0)
        spare = (extent[0] - kept) * torch.Size(extent[1:]).numel() * target.dtype.itemsize
        extent[0] = kept
    numbers = [
        range(start, start + size) for start, size in zip(offsets, sizes[:axes], strict=False)
    ]
    for at in product(*numbers):
        source = Box((*at, *inner), (*(1 for _ in at), *extent))
        if not source.numel:
            yield None, spare
            continue
        place = list(inner)
        if naming.half is not None:
            place[0] += naming.half * rows
        box = Box(tuple(place), tuple(extent))

        def elements(source: Box = source, box: Box = box) -> torch.Tensor:
            return read(tensor, source).reshape(box.sizes)

        yield Piece(naming.form.format(*at), box, elements), spare
