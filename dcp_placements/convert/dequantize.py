"""Quantized weights as numbers: which scheme a tensor has, and its formula, block by block.

The files of a quantized model have the elements of a weight in 8 or 4 bits, and scales beside them.
A weight is its elements times its scales. Every scheme that has a rule here is one formula::

    weight[i, j] = (elements[i, j] - zero_point[i // bi, j // bj]) * scale[i // bi, j // bj]

It is computed in float32 and rounded once to the dtype that is asked for. The schemes differ in the
sizes ``(bi, bj)`` of the blocks that share a scale, and in how elements and scales are stored:

====================================  ===========================  ==============================
published as                          elements                     blocks
====================================  ===========================  ==============================
DeepSeek-V3, Qwen3-FP8                float8                       of ``weight_block_size``
compressed-tensors, ModelOpt, FBGEMM  float8, int8                 the whole, a row, or of
                                                                   ``block_structure``
MXFP8 (OCP MX 1.0)                    float8                       (1, 32), scale 2**(byte - 127)
MXFP4 (OCP MX 1.0), gpt-oss           two float4 in a byte, the    (1, 32), scale 2**(byte - 127)
                                      first in the low four bits
NVFP4, ModelOpt                       as MXFP4                     (1, 16), float8 scale times
                                                                   ``weight_scale_2``
NVFP4, compressed-tensors             as MXFP4                     (1, 16), float8 scale divided
                                                                   by ``weight_global_scale``
====================================  ===========================  ==============================

Sources: DeepSeek-V3's ``inference/kernel.py`` (``weight_dequant``); transformers'
``integrations/finegrained_fp8.py`` and ``mxfp4.py``; compressed-tensors' ``quantization/lifecycle``
and ``compressors``; ModelOpt's ``torch/quantization/qtensor``; the OCP Microscaling Formats (MX)
specification 1.0, sections 5 and 6: E2M1 has the values below, and the scale 255 of E8M0 is NaN.

A (160, 130) weight of DeepSeek-V3 has (2, 2) scales: those of its rows 128 to 159 are of a block
that is not whole. Of a box of it that is wanted, only the elements and the scales are read that it
needs, ``BLOCK_NUMEL`` elements at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod

import torch

from dcp_placements.convert.quantization_config import Declared, declared_of
from dcp_placements.errors import CannotPlace, Fault, fault_error, raise_faults
from dcp_placements.layout.sharding import Box
from dcp_placements.names.scales import (
    ACTIVATIONS,
    PACKED,
    RULED,
    Scales,
    hints_of,
    scales_of,
)
from dcp_placements.offline.assembly import ComputedTensor
from dcp_placements.offline.box_reads import BoxReader, sub_boxes
from dcp_placements.offline.checkpoint import Checkpoint, LeftOut, StoredTensor
from dcp_placements.short_text import format_count

BLOCK_NUMEL = 1 << 20
"""Elements that are computed at a time; each takes some 20 bytes meanwhile."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes 0 to 7 of four bits; 8 to 15 are the same, negative."""

_FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
_FLOAT4 = torch.float4_e2m1fn_x2
_TWO_IN_A_BYTE = (torch.uint8, _FLOAT4)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""Scales of which a byte is an exponent of two, with 127 for 1."""

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Expanded:
    """Scales, or zero points, on a grid: each counts for a block of a weight.

    Args:
        stored: The tensor.
        blocks: The sizes of a block, in elements of the weight, one per dim.
        shape: The shape of the weight.
    """

    def __init__(self, stored: StoredTensor, blocks: Sequence[int], shape: Sequence[int]) -> None:
        self._stored = stored
        self._blocks = tuple(blocks)
        grid = grid_of(shape, blocks)
        dims = iter([dim for dim, size in enumerate(grid) if size != 1])
        self._dims = [None if size == 1 else next(dims) for size in stored.shape]
        self._ndim = len(grid)

    def __str__(self) -> str:
        return f"{self._stored.fqn} of {self._blocks}"

    def read(self, reader: BoxReader, box: Box) -> torch.Tensor:
        """Return the values of a box of the weight, in float32; a size of 1 broadcasts.

        Args:
            reader: Reader of the checkpoint.
            box: The box, in elements of the weight.
        """
        firsts = [start // block for start, block in zip(box.offsets, self._blocks, strict=True)]
        spans = zip(box.offsets, box.sizes, self._blocks, strict=True)
        counts = [
            -(-(start + size) // block) - start // block if size else 0
            for start, size, block in spans
        ]
        offsets = tuple([0 if dim is None else firsts[dim] for dim in self._dims])
        sizes = tuple([1 if dim is None else counts[dim] for dim in self._dims])
        read = as_floats(reader.read(self._stored, Box(offsets, sizes)))
        stored_dims = {dim for dim in self._dims if dim is not None}
        values = read.reshape([counts[d] if d in stored_dims else 1 for d in range(self._ndim)])
        for dim, count in enumerate(counts):
            if count > 1:
                start, size = box.offsets[dim], box.sizes[dim]
                numbers = torch.arange(start, start + size) // self._blocks[dim] - firsts[dim]
                values = values.index_select(dim, numbers)
        return values


def grid_of(shape: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
    """Return how many blocks a tensor has along each dim; the last may be a part of one.

    >>> grid_of((160, 130), (128, 128)), grid_of((160, 130), (1, 130))
    ((2, 2), (160, 1))
    """
    return tuple([-(-size // block) for size, block in zip(shape, blocks, strict=True)])


def as_floats(values: torch.Tensor) -> torch.Tensor:
    """Return scales or zero points in float32; a byte of an exponent is that power of two.

    >>> as_floats(torch.tensor([126, 127, 130], dtype=torch.uint8))
    tensor([0.5000, 1.0000, 8.0000])
    """
    if values.dtype == torch.uint8:
        values = values.view(torch.float8_e8m0fnu)
    return values.to(torch.float32)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of bytes of two float4 each, along the last dim, the low bits first.

    >>> unpacked(torch.tensor([[0x21, 0xF0]], dtype=torch.uint8))
    tensor([[ 0.5000,  1.0000,  0.0000, -6.0000]])
    """
    codes = codes.view(torch.uint8)
    values = torch.tensor([*E2M1, *[-value for value in E2M1]], dtype=torch.float32, device="cpu")
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1)
    return values[pairs.to(torch.int32)].flatten(-2)


@dataclass(frozen=True, slots=True, eq=False)
class DequantizedTensor(ComputedTensor):
    """A quantized weight as numbers: any box of it is computed as it is read.

    DeepSeek-V3's ``q_proj.weight`` of (160, 130), with (2, 2) scales::

        DequantizedTensor("q_proj.weight", (160, 130), torch.bfloat16, elements=<float8_e4m3fn>,
                          kind="float8_e4m3fn in blocks of 128 x 128",
                          scale=Expanded(q_proj.weight_scale_inv of (128, 128)))
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: StoredTensor  # the stored elements
    kind: str  # the scheme, for reports
    scale: Expanded
    zero_point: Expanded | None = None
    # A scale of the whole weight, and whether the scales of blocks are divided by it
    whole_scale: StoredTensor | None = None
    is_divided: bool = False

    @property
    def origin(self) -> str:
        """The formula with its tensors, as text."""
        whole = "" if self.whole_scale is None else f"{self.whole_scale.fqn} {self.is_divided}"
        return f"{self.elements.fqn} {self.kind} {self.scale} {self.zero_point} {whole}"

    def read(self, reader: BoxReader, box: Box) -> torch.Tensor:
        """Return the numbers of a box.

        Raises:
            PlacementError: As ``BoxReader.read``; or a number is too large for the dtype.
        """
        into = torch.empty(box.sizes, dtype=self.dtype, device="cpu")
        for small in sub_boxes(box, BLOCK_NUMEL):
            if not small.numel:
                continue
            spans = zip(small.offsets, box.offsets, small.sizes, strict=True)
            view = into[tuple([slice(a - b, a - b + n) for a, b, n in spans])]
            numbers = self._numbers(reader, small)
            view.copy_(numbers)
            # Of the dtypes, float16 alone has no room for what float32 has.
            if self.dtype == torch.float16 and bool(view.isinf().any() > numbers.isinf().any()):
                most = numbers[numbers.isfinite()].abs().max().item()
                headline = f"has values up to {most:g}, and float16 ends at 65504"
                way_out = "way out:     dequantize=torch.bfloat16"
                raise fault_error("the files cannot be imported", self.fqn, headline, way_out)
        return into

    def _numbers(self, reader: BoxReader, box: Box) -> torch.Tensor:
        """Return the numbers of a box in float32."""
        scale = self.scale.read(reader, box)
        if self.whole_scale is not None:
            whole = reader.read(self.whole_scale, self.whole_scale.whole).reshape(()).float()
            scale = scale / whole if self.is_divided else scale * whole
        numbers = self._elements(reader, box)
        if self.zero_point is not None:
            numbers = numbers - self.zero_point.read(reader, box)
        return numbers * scale

    def _elements(self, reader: BoxReader, box: Box) -> torch.Tensor:
        """Return the elements of a box in float32."""
        stored = self.elements
        if stored.shape == self.shape:
            return reader.read(stored, box).to(torch.float32)
        # Packed along the last dim, which may be stored in groups: two elements in a byte.
        start, size = box.offsets[-1], box.sizes[-1]
        group = stored.shape[-1] if len(stored.shape) > len(self.shape) else 1
        first, end = start // 2 // group, -(-(start + size) // (2 * group))
        tail = ((0, group),) if group > 1 or len(stored.shape) > len(self.shape) else ()
        spans = [*zip(box.offsets[:-1], box.sizes[:-1], strict=True), (first, end - first), *tail]
        offsets, sizes = zip(*spans, strict=True)
        codes = reader.read(stored, Box(tuple(offsets), tuple(sizes)))
        values = unpacked(codes.reshape(*box.sizes[:-1], -1))
        return values.narrow(-1, start - 2 * first * group, size)


@dataclass(frozen=True, slots=True)
class Dequantized:
    """The tensors of a checkpoint, with quantized ones as numbers.

    Attributes:
        tensors: By key; scales are not among them.
        notes: What was found, for the report.
        accounted: Bytes of scales.
        left_out: Scales of activations.
    """

    tensors: dict[str, StoredTensor | ComputedTensor]
    notes: tuple[str, ...] = ()
    accounted: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()


OPENING = "the quantized tensors cannot be made numbers"

_OTHER_FILES = (
    "way out:     a model of the Hub that is not quantized, or in one of: block-scaled, per-tensor "
    "and per-channel float8 and int8, MXFP8, MXFP4, NVFP4; or import without dequantize=, which "
    "writes elements and scales as they are"
)


def dequantized(source: Checkpoint, dtype: torch.dtype) -> Dequantized:
    """Return the tensors of safetensors files, with quantized weights as numbers of a dtype.

    Tensors that are not quantized stay as they are.

    Args:
        source: The files, with ``config.json`` beside them where it says the sizes of blocks.
        dtype: The dtype of the numbers.

    Raises:
        CannotLook: ``config.json`` cannot be read.
        PlacementError: A scheme or a scale has no rule here; a scale does not fit its tensor; an
            8-bit float has no scale; nothing is quantized.
    """
    declared = declared_of(source.directory)
    faults = [Fault("config.json", headline, (_OTHER_FILES,)) for headline in declared.unknown]
    raise_faults(OPENING, faults)
    results: dict[str, StoredTensor | ComputedTensor] = {}
    explained: set[str] = set()  # the keys of scales, and of elements that are refused
    quantized: dict[str, DequantizedTensor] = {}
    elements_of: dict[str, str] = {}  # by weight, the key of its elements
    for key, tensor in source.tensors.items():
        scales = scales_of(key, tensor.dtype, source.tensors)
        if scales is None:
            continue
        explained.update(scales.keys)
        try:
            weight = _weight(tensor, scales, source.tensors, declared, dtype)
        except CannotPlace as error:
            explained.add(key)
            faults.append(error.fault(key))
            continue
        if weight.fqn in source.tensors and weight.fqn != key:
            faults.append(Fault(key, f"would be {weight.fqn}, which the files have, too"))
        if (first := elements_of.setdefault(weight.fqn, key)) != key:
            faults.append(Fault(key, f"would be {weight.fqn}, which {first} is, too"))
        quantized[key] = weight
    coarse = [key for key, tensor in source.tensors.items() if _is_coarse(key, tensor.dtype)]
    parents = {key.rpartition(".")[0] for key in coarse}
    # The last components by which a model calls its quantized tensors, as "weight".
    endings = {key.rpartition(".")[2] for key in (*quantized, *elements_of)}
    activations = []
    for key, tensor in source.tensors.items():
        if key in explained:
            continue
        if key in quantized:
            results[quantized[key].fqn] = quantized[key]
        elif _is_of_activations(key, tensor):
            activations.append(LeftOut(key, "scales of activations", 1, tensor.nbytes))
        elif headline := _unruled(key, tensor, parents, endings):
            faults.append(Fault(key, headline, (_OTHER_FILES,)))
        else:
            results[key] = tensor
    if not quantized and not faults:
        names = f"none of the {len(source.tensors)} tensors is quantized"
        faults = [Fault("dequantize=", names, ("way out:     leave it out",))]
    raise_faults(OPENING, faults)
    kinds: dict[str, int] = {}
    for weight in quantized.values():
        kinds[weight.kind] = kinds.get(weight.kind, 0) + 1
    notes = [f"made {dtype}: {format_count(n, 'tensor')}, {kind}" for kind, n in kinds.items()]
    nbytes = sum(source.tensors[key].nbytes for key in explained)
    accounted = {"scales, multiplied in": nbytes}
    return Dequantized(results, tuple(notes), accounted, tuple(activations))


def _is_coarse(key: str, dtype: torch.dtype) -> bool:
    """Whether a tensor may have quantized elements: of 8 bits, or several in one integer."""
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    is_weight = key.rpartition(".")[2] in ("weight", "qweight") or key.endswith(PACKED)
    return (dtype.itemsize == 1 and dtype != torch.bool) or (is_integer and is_weight)


def _is_of_activations(key: str, tensor: StoredTensor) -> bool:
    return key.endswith(ACTIVATIONS) and prod(tensor.shape) == 1


def _unruled(key: str, tensor: StoredTensor, parents: set[str], endings: set[str]) -> str | None:
    """Return why a tensor that is no weight with a rule cannot be kept; None if it can.

    Args:
        key: Its key.
        tensor: The tensor.
        parents: The modules that have tensors of quantized elements.
        endings: The last components of the keys of quantized tensors.
    """
    if hint := hints_of(key, tensor.dtype):
        return f"is of {hint}, for which there is no formula here"
    last = key.rpartition(".")[2]
    if "scale" in last and key.rpartition(".")[0] in parents:
        return "is a scale beside quantized elements, and no formula here uses it"
    if last.endswith(("zero_point", "zero_points")):
        return "is a zero point, and no tensor beside it has scales"
    is_small = tensor.dtype in (torch.int8, torch.uint8)
    is_named = last in endings or last.endswith(PACKED)
    if tensor.dtype in (*_FLOAT8, _FLOAT4, torch.float8_e8m0fnu) or (is_small and is_named):
        return f"has elements of {tensor.dtype_name}, and no scales beside it"
    return None


def _weight(
    elements: StoredTensor,
    scales: Scales,
    tensors: Mapping[str, StoredTensor],
    declared: Declared,
    dtype: torch.dtype,
) -> DequantizedTensor:
    """Return a quantized weight, by its elements and scales.

    Raises:
        CannotPlace: There is no rule for it, or the scales do not fit the elements.
    """
    scale, kind = tensors[scales.scale], elements.dtype_name
    ending = scales.ending
    if ending not in RULED:
        hint = hints_of(scales.scale, scale.dtype) or f"a scheme with scales named {ending}"
        raise CannotPlace(f"is of {hint}, for which there is no formula here", _OTHER_FILES)
    fits = scale.dtype in (*_SCALE_DTYPES, *_EXPONENTS, torch.float8_e4m3fn)
    if not fits:
        raise CannotPlace(
            f"has scales of {scale.dtype_name}, for which there is no rule", _OTHER_FILES
        )
    whole = scales.whole_scale
    whole_scale = None if whole is None else tensors[whole]
    if whole_scale is not None and prod(whole_scale.shape) != 1:
        headline = f"has a scale of the whole, {whole}, of shape {whole_scale.shape}"
        raise CannotPlace(headline, _OTHER_FILES)
    if elements.dtype in _TWO_IN_A_BYTE:
        shape, blocks = _packed_blocks(elements, scale)
        kind = "NVFP4" if scale.dtype == torch.float8_e4m3fn else "MXFP4"
        if (kind == "NVFP4") != (whole_scale is not None):
            headline = "NVFP4 has a scale of the whole beside those of blocks, and MXFP4 has none"
            keys = ", ".join(scales.keys)
            raise CannotPlace(f"{headline}: found {keys}", _OTHER_FILES)
        if scales.zero_point is not None:
            headline = f"is {kind}, which has no zero points, and there is {scales.zero_point}"
            raise CannotPlace(headline, _OTHER_FILES)
    else:
        if scale.dtype == torch.float8_e4m3fn or whole_scale is not None:
            raise CannotPlace(
                f"has {elements.dtype_name} elements and scales of scales", _OTHER_FILES
            )
        if elements.dtype == torch.int8 and scale.dtype in _EXPONENTS:
            raise CannotPlace(
                "has int8 elements and scales that are exponents: those of MXINT8 are 2**-6 times "
                "that, others are not, and the files do not say which",
                _OTHER_FILES,
            )
        if scales.zero_point is None and declared.has_zero_points:
            raise CannotPlace(
                'has no zero points, and config.json says "symmetric": false', _OTHER_FILES
            )
        shape, blocks = elements.shape, _blocks(elements, scale, declared)
        kind += _block_text(shape, blocks)
    zeros = None if scales.zero_point is None else tensors[scales.zero_point]
    if zeros is not None and (zeros.shape != scale.shape or zeros.dtype not in _ZERO_DTYPES):
        headline = f"has zero points {zeros.shape} of {zeros.dtype_name}, and scales {scale.shape}"
        raise CannotPlace(headline, _OTHER_FILES)
    return DequantizedTensor(
        scales.weight,
        shape,
        dtype,
        elements,
        kind,
        Expanded(scale, blocks, shape),
        None if zeros is None else Expanded(zeros, blocks, shape),
        whole_scale,
        scales.is_divided,
    )


_ZERO_DTYPES = (torch.int8, *_FLOAT8, *_SCALE_DTYPES)


def _packed_blocks(
    elements: StoredTensor, scale: StoredTensor
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a weight of four bits, and the sizes of its blocks.

    gpt-oss stores groups of 16 bytes in a dim of their own.

    Raises:
        CannotPlace: The scales are of no format of four bits.
    """
    if scale.dtype == torch.float8_e4m3fn:
        size = 16
    elif scale.dtype in _EXPONENTS:
        size = 32
    else:
        headline = f"has bytes of two elements each, and scales of {scale.dtype_name}"
        raise CannotPlace(f"{headline}; NVFP4 has float8 scales, MXFP4 bytes", _OTHER_FILES)
    if not elements.shape:
        raise CannotPlace("is a scalar of four bits", _OTHER_FILES)
    rows, last = elements.shape[:-1], elements.shape[-1]
    shape = (*rows, 2 * last)
    if len(elements.shape) == len(scale.shape) + 1 and 2 * last == size:
        shape = (*rows[:-1], rows[-1] * size)
    grid = (*shape[:-1], -(-shape[-1] // size))
    if scale.shape != grid or shape[-1] % size:
        raise CannotPlace(
            f"has elements {elements.shape} and scales {scale.shape}: "
            f"blocks of {size} of {shape} have scales {grid}",
            _OTHER_FILES,
        )
    return shape, (*[1] * (len(shape) - 1), size)


def _blocks(elements: StoredTensor, scale: StoredTensor, declared: Declared) -> tuple[int, ...]:
    """Return the sizes of the blocks that share a scale, by the shapes and what config.json says.

    Raises:
        CannotPlace: No rule gives scales of this shape, or several rules do.
    """
    shape, sizes = elements.shape, scale.shape
    whole = tuple([max(size, 1) for size in shape])
    if prod(sizes) == 1:
        return whole
    if len(sizes) < len(shape) and sizes == shape[: len(sizes)]:
        return (*[1] * len(sizes), *whole[len(sizes) :])  # per row, or per expert
    candidates: dict[tuple[int, ...], None] = {}
    for declared_sizes in [*declared.blocks, *([(1, 32)] if scale.dtype in _EXPONENTS else [])]:
        if len(shape) >= 2:
            candidates[(*[1] * (len(shape) - 2), *declared_sizes)] = None
    grids = {blocks: grid_of(shape, blocks) for blocks in candidates}
    # ModelOpt has exported (n, 1, k, 1) scales of n x k blocks.
    fitting = [blocks for blocks, grid in grids.items() if sizes in (grid, _spaced(grid))]
    if len(fitting) == 1:
        return fitting[0]
    pairs = list(zip(sizes, shape, strict=False))
    if not fitting and len(sizes) == len(shape) and all(n in (1, size) for n, size in pairs):
        return tuple([size if n == 1 else 1 for n, size in zip(sizes, whole, strict=True)])
    texts = [f"{_by(blocks)}: {grid}" for blocks, grid in grids.items()]
    raise CannotPlace(
        f"has elements {shape} and scales {sizes}, and "
        + ("several sizes of blocks fit" if fitting else "no sizes of blocks fit"),
        f"blocks:      {'; '.join(texts)}" if texts else "config.json:  no weight_block_size",
        'way out:     config.json of the model beside the files, with {"quantization_config": '
        '{"quant_method": "fp8", "weight_block_size": [128, 128]}}, or the sizes that they have',
    )


def _spaced(grid: Sequence[int]) -> tuple[int, ...]:
    """Return sizes with a 1 behind each."""
    return tuple(chain.from_iterable([(size, 1) for size in grid]))


def _block_text(shape: Sequence[int], blocks: Sequence[int]) -> str:
    """Return the sizes of blocks as text for a report.

    >>> _block_text((160, 130), (160, 130)), _block_text((160, 130), (1, 130))
    (', a scale per tensor', ', a scale per channel')
    >>> _block_text((160, 130), (128, 128))
    ' in blocks of 128 x 128'
    """
    grid = grid_of(shape, blocks)
    if prod(grid) == 1:
        return ", a scale per tensor"
    pairs = list(zip(shape, blocks, strict=True))
    if all(block in (1, size) for size, block in pairs):
        return ", a scale per channel"
    return f" in blocks of {_by(blocks[-2:])}"


def _by(blocks: Sequence[int]) -> str:
    return " x ".join(map(str, blocks))
