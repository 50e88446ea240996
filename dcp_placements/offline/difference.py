"""The differences between two checkpoints, by content, whatever their layouts and formats.

Without tolerances elements are the same if their bits are: a NaN is the same as itself, and 0.0 is
not -0.0. With tolerances, near numbers are the same.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from operator import itemgetter
from typing import Any

import torch

from dcp_placements.errors import (
    CannotLook,
    CannotPlace,
    PlacementError,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.names.rename_results import Rename
from dcp_placements.names.scales import scale_of
from dcp_placements.offline.assembly import AssembledTensor, assembled
from dcp_placements.offline.box_reads import BoxReader, sub_boxes
from dcp_placements.offline.checkpoint import (
    AnySource,
    Checkpoint,
    StoredRecord,
    StoredTensor,
)
from dcp_placements.offline.directory import check_damage
from dcp_placements.offline.element_bits import element_bits, same_bits
from dcp_placements.offline.key_patterns import matching_keys
from dcp_placements.offline.model_keys import model_tensors
from dcp_placements.offline.sources.opening import open_source
from dcp_placements.offline.texts import Progress, brief
from dcp_placements.offline.verification import VERIFIED_NBYTES, box_faults
from dcp_placements.short_text import (
    folded_keys,
    format_count,
    format_name,
    format_names,
    format_nbytes,
)
from dcp_placements.storage.store import StorageOptions
from dcp_placements.storage.torch_load import load_plain

MAX_FAMILIES = 15
"""Families of keys that are shown by default: two lines each."""

COMPARED_NBYTES = 32 << 20

OBJECT_NBYTES = 1 << 20
"""An object up to this size is read whatever ``memory`` says."""


STEP_ELEMENTS = 1 << 20
"""Boxes that differ are compared in steps of this many elements, which take 30 bytes each."""


@dataclass(frozen=True, slots=True)
class FirstElement:
    """An element that differs."""

    index: tuple[int, ...]  # its index in the whole tensor
    a: Any  # its value in the first checkpoint, as JSON has it
    b: Any  # its value in the second


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One difference."""

    # ``missing`` (only in the first), ``extra`` (only in the second), ``shape``, ``dtype``,
    # ``values``, ``object``, ``incomplete`` (holes or overlaps), ``unreadable``
    kind: str
    fqn: str  # the key in the second checkpoint
    message: str  # text of the difference
    elements: int = 0  # elements of the tensor; 0 if none were compared
    differing: int = 0  # elements that differ
    max_abs: float | None = None  # the largest absolute difference; None if no two numbers differ
    nans: int = 0  # differing elements where one value is NaN, or both with other bits
    first: FirstElement | None = None  # the first differing element in C order


@dataclass(frozen=True, slots=True)
class DifferenceFamily:
    """Differences of one kind, of keys that differ in numbers alone."""

    name: str  # the keys as one name, with ranges of numbers
    kind: str  # kind of the differences
    keys: int  # number of keys
    first: TensorDifference  # the first difference


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs between two checkpoints."""

    a: str  # the path of the first
    b: str  # the path of the second
    differences: tuple[TensorDifference, ...]  # sorted by key
    notes: tuple[str, ...]  # contents that were not compared
    compared: Mapping[str, int]  # ``tensors``, element by element, and their ``bytes`` in the first

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int = MAX_FAMILIES) -> str:
        """Return the verdict, the differences by family of keys, and the notes.

        Args:
            most: The most families to show.
        """
        result = "same" if self.same else format_count(len(self.differences), "difference")
        kinds = Counter(difference.kind for difference in self.differences)
        if len(kinds) > 1:
            result += ": " + ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
        tensors, nbytes = format_count(self.compared["tensors"], "tensor"), self.compared["bytes"]
        lines = [f"{result} ({tensors}, {format_nbytes(nbytes)} compared)"]
        families = self.families
        for folded in families[:most]:
            number = f" ({folded.keys:,})" if folded.keys > 1 else ""
            first = f"{folded.first.fqn}: " if folded.keys > 1 else ""
            lines += [f"{folded.name}: {folded.kind}{number}"]
            lines += [f"    {first}{folded.first.message}"]
        if rest := sum(folded.keys for folded in families[most:]):
            lines.append(f"... and {format_count(rest, 'more difference')}; --all")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(map(format_name, lines))

    @property
    def families(self) -> tuple[DifferenceFamily, ...]:
        """The differences by kind and family of keys, in natural order within a kind."""
        by_kind: dict[str, dict[str, TensorDifference]] = {}
        for difference in self.differences:
            by_kind.setdefault(difference.kind, {})[difference.fqn] = difference
        return tuple(
            DifferenceFamily(folded.name, kind, len(folded.keys), of_key[folded.keys[0]])
            for kind, of_key in by_kind.items()
            for folded in folded_keys(list(of_key))
        )

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def diff(
    a: AnySource,
    b: AnySource,
    *,
    fqn: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    rename: Rename | None = None,
    prefix: str | None = None,
    memory: int = VERIFIED_NBYTES,
    storage_options: StorageOptions = None,
    progress: Progress = lambda done, total: None,
) -> Diff:
    """Return the differences between two checkpoints.

    Without tolerances elements are equal if their bits are; with them, if
    ``|a - b| <= atol + rtol * |b|``, or if both are NaN. Tensors of two dtypes always differ, and
    are compared as float64.

    If only the second has safetensors files, it is taken for an export of the first: the first's
    weights are compared under the model's own names, its optimizer state only if the second has
    any.

    Args:
        a: A checkpoint.
        b: Another checkpoint, of any layout and format.
        fqn: A pattern, as in ``PlacementRules``: only the second's keys that match are compared.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        rename: Map from the first's keys to the second's, as for an export: to a name, or to a
            ``Row``, ``Rows`` or ``Parts``.
        prefix: Prefix of the model's names in the first, as for an export.
        memory: Bytes that data may take.
        storage_options: Options that fsspec passes to the file system of a URL.
        progress: Called as tensors are compared.

    Raises:
        CannotLook: A path is no checkpoint, or a file cannot be read; ``rename`` does not fit some
            tensor of the first; or no key matches ``fqn``.
    """
    first = open_source(a, storage_options=storage_options)
    second = open_source(b, storage_options=storage_options)
    notes: list[str] = []
    stored: Mapping[str, StoredTensor] = first.tensors
    if second.is_of_hub and not first.is_of_hub:
        stored = _exported(first, second, prefix, notes)
    tensors = assembled(first.path, stored, rename)
    objects = {_renamed(rename, key): record for key, record in first.objects.items()}
    absent = {_renamed(rename, key): file for key, file in first.absent.items()}
    of_second = second.tensors, second.objects, second.absent
    there: list[Mapping[str, Any]] = [tensors, objects, absent, *of_second]
    keys = sorted(matching_keys(fqn, set().union(*there)))
    bare = [side.subject for side in (first, second) if not side.holds_objects]
    if bare:
        skipped = {*objects, *second.objects}.intersection(keys)
        keys = [key for key in keys if key not in skipped]
        if skipped:
            count = len(skipped)
            notes.append(f"{count} objects not compared: of {bare[0]} tensors only are read")
    with BoxReader(first) as reader, BoxReader(second) as other_reader:
        total = sum(tensors[key].nbytes for key in keys if key in tensors)
        both = (first, second), (reader, other_reader)
        comparison = _TensorComparison(*both, rtol, atol, memory, progress, total)
        differences: list[TensorDifference] = []
        compared = 0
        for key in keys:
            tensor, other = tensors.get(key), second.tensors.get(key)
            record, other_record = objects.get(key), second.objects.get(key)
            difference = None
            if lost := sorted({held[key] for held in (absent, second.absent) if key in held}):
                message = f"the index names {format_names(lost)} for it, where it is not"
                difference = TensorDifference("unreadable", key, message)
            elif tensor is not None and other is not None:
                difference = comparison.of_tensors(key, tensor, other)
                compared += 1
                comparison.nbytes += tensor.nbytes
            elif record is not None and other_record is not None:
                difference = comparison.of_objects(key, record, other_record)
            else:
                sides = _kind(tensor, record), _kind(other, other_record)
                difference = _one_sided(key, *sides)
            differences += [] if difference is None else [difference]
    alone = {*tensors}.symmetric_difference(second.tensors).intersection(keys)
    notes += _prefix_notes(alone.intersection(tensors), alone.difference(tensors))
    done = {"tensors": compared, "bytes": comparison.nbytes}
    return Diff(first.path, second.path, tuple(differences), tuple(notes), done)


def _exported(
    first: Checkpoint, second: Checkpoint, prefix: str | None, notes: list[str]
) -> dict[str, StoredTensor]:
    """Return the tensors that an export of the first has, by their names before its rename."""
    of_second = model_tensors(second.tensors, second.tensors, None)
    held = {**first.tensors, **first.objects}
    classified = model_tensors(first.tensors, held, first.metadata.planner_data, prefix)
    tensors = {**classified.model, **(classified.states if of_second.states else {})}
    kept = {tensor.fqn for tensor in tensors.values()}
    if rest := [fqn for fqn in first.tensors if fqn not in kept]:
        names = format_names([folded.name for folded in folded_keys(rest)], 4)
        notes.append(f"not compared, as an export leaves them out: {names}")
    return tensors


def _prefix_notes(of_first: Set[str], of_second: Set[str]) -> Iterator[str]:
    """Yield a note where a prefix makes most keys of one side those of the other.

    Args:
        of_first: Keys that the first side alone has.
        of_second: Keys that the second side alone has.
    """
    sides = (
        ("first", of_first, "second", of_second, "key.removeprefix({0!r})"),
        ("second", of_second, "first", of_first, "{0!r} + key"),
    )
    for longer, keys, shorter, others, expression in sides:
        counts: Counter[str] = Counter()
        for key in keys:
            parts = key.split(".")
            rests = ((".".join(parts[n:]), n) for n in range(1, len(parts)))
            counts.update(".".join(parts[:n]) + "." for rest, n in rests if rest in others)
        prefix, count = max(counts.items(), key=itemgetter(1), default=("", 0))
        if 2 * count > len(others):
            yield (
                f"{format_count(count, 'tensor')} of the {longer} begin with {prefix!r}, and the "
                f"{shorter} has them without: rename=lambda key: {expression.format(prefix)} "
                "compares them"
            )


def _kind(tensor: AssembledTensor | StoredTensor | None, stored: StoredRecord | None) -> str | None:
    """Return a text for what a checkpoint has under a key; None if it has nothing."""
    if tensor is not None:
        return f"a {tensor.shape} {tensor.dtype_name} tensor"
    return None if stored is None else "an object"


def _renamed(rename: Rename | None, key: str) -> str:
    """Return the new name of an object: its key where the rename has no name for it."""
    try:
        name = key if rename is None else rename(key)
    except (LookupError, ValueError, CannotPlace):
        return key
    return name if isinstance(name, str) and name else key


@dataclass(slots=True, eq=False)
class _TensorComparison:
    """Compares what two checkpoints have under one key, tensors box by box within the memory."""

    checkpoints: tuple[Checkpoint, Checkpoint]
    readers: tuple[BoxReader, BoxReader]
    rtol: float
    atol: float
    memory: int
    progress: Progress
    total: int  # bytes of the tensors to compare
    nbytes: int = 0  # bytes of the tensors compared so far
    box_messages: dict[Any, str] = field(default_factory=dict)

    def of_tensors(self, key: str, a: AssembledTensor, b: StoredTensor) -> TensorDifference | None:
        """Return what differs between two tensors."""
        if a.shape != b.shape:
            message = f"{a.shape} in the first, {b.shape} in the second"
            return TensorDifference("shape", key, message)
        for side, tensor in [*[("first", source) for source in _sources(a)], ("second", b)]:
            if message := self._box_message(tensor):
                return TensorDifference("incomplete", key, f"in the {side} {message}")
        if message := self._quantized_message(a, b):
            return TensorDifference("dtype", key, message)
        if message := _numberless_message(a, b):
            return TensorDifference("dtype", key, message)
        tally = Tally()
        done = self.nbytes
        try:
            for box in self._boxes(a, b):
                elements, other = a.read(self.readers[0], box), self.readers[1].read(b, box)
                tally.add(elements, other, box.offsets, rtol=self.rtol, atol=self.atol)
                done += elements.nbytes
                self.progress(done, self.total)
        except CannotLook:
            raise
        except PlacementError as error:
            # verify shows the whole message.
            headline = str(error).splitlines()[:2][-1]
            return TensorDifference("unreadable", key, headline.partition(": ")[2])
        return _difference(key, a, b, tally) if a.dtype != b.dtype or tally.differing else None

    def _boxes(self, a: AssembledTensor, b: StoredTensor) -> Iterator[Box]:
        """Yield boxes that tile the whole, chunk by chunk of the first, to read files in order."""
        box_nbytes = max(min(COMPARED_NBYTES, self.memory // 8), 1)
        limit = max(box_nbytes // max(a.dtype.itemsize, b.dtype.itemsize), 1)
        boxes: Sequence[Box] = (a.whole,)
        if a.whole.numel > limit:
            source = _sources(a)[0]
            is_as_stored = len(a.blocks) == 1 and a.blocks[0].box == a.blocks[0].stored_box
            boxes = source.boxes if is_as_stored else [block.box for block in a.blocks]
        for box in boxes:
            yield from sub_boxes(box, limit)

    def _quantized_message(self, a: AssembledTensor, b: StoredTensor) -> str:
        """Return why numbers and quantized elements are not compared; empty where they are."""
        sides = ("first", _sources(a), b.dtype), ("second", [b], a.dtype)
        for (side, tensors, other), checkpoint in zip(sides, self.checkpoints, strict=True):
            for tensor in tensors if other.is_floating_point and other.itemsize > 1 else ():
                if scale := scale_of(tensor.fqn, tensor.dtype, checkpoint.tensors):
                    dtypes = f"{a.dtype_name} in the first, {b.dtype_name} in the second"
                    return (
                        f"{dtypes}: not compared, the {side} is quantized, its scales are {scale}"
                    )
        return ""

    def _box_message(self, tensor: StoredTensor) -> str:
        """Return a text of the holes and overlaps of a tensor; empty for none."""
        key = tensor.shape, tensor.cut
        if key not in self.box_messages:
            faults = box_faults(tensor.whole, tensor.boxes)
            self.box_messages[key] = "; ".join(message for _, message in faults)
        return self.box_messages[key]

    def of_objects(self, key: str, *stored: StoredRecord) -> TensorDifference | None:
        """Return whether two objects differ. Nothing that their pickles name is called."""
        most = max(self.memory // 4, OBJECT_NBYTES)
        try:
            record, other = map(_record, self.checkpoints, stored, [most, most])
        except CannotLook:
            raise
        except Exception as error:
            # Extensions undo the transforms of streams, and can raise anything.
            return TensorDifference("unreadable", key, str(error))
        if record is None or other is None:
            return TensorDifference(
                "object", key, "not compared: it takes more than a quarter of --memory"
            )
        if record == other:
            return None
        try:
            values = load_plain(io.BytesIO(record), "cpu"), load_plain(io.BytesIO(other), "cpu")
        except Exception:
            # Its type depends on what is in the pickle.
            message = "other bytes; not unpickled, because torch.load takes it for unsafe"
            return TensorDifference("object", key, message)
        same = _equal(*values)
        return None if same else TensorDifference("object", key, " and ".join(map(brief, values)))


def _record(checkpoint: Checkpoint, stored: StoredRecord, most: int) -> bytes | None:
    try:
        return checkpoint.read_record(stored, most)
    except OSError as error:
        if not stored.transforms:
            check_damage(checkpoint.directory, str(stored.file), error)
        raise


def _sources(tensor: AssembledTensor) -> list[StoredTensor]:
    """Return the stored tensors that a tensor is assembled from."""
    sources = [block.source for block in tensor.blocks]
    stored = [source for source in sources if isinstance(source, StoredTensor)]
    return list({source.fqn: source for source in stored}.values())


def _one_sided(key: str, first: str | None, second: str | None) -> TensorDifference:
    if second is None:
        return TensorDifference("missing", key, f"{first} in the first, not in the second")
    if first is None:
        return TensorDifference("extra", key, f"{second} in the second, not in the first")
    return TensorDifference("object", key, f"{first} in the first, {second} in the second")


def _difference(key: str, a: AssembledTensor, b: StoredTensor, tally: Tally) -> TensorDifference:
    kind = "values" if a.dtype == b.dtype else "dtype"
    elements = a.whole.numel
    facts = []
    if kind == "dtype":
        facts.append(f"{a.dtype_name} in the first, {b.dtype_name} in the second")
    if tally.first is not None:
        fact = f"{tally.differing:,} of {elements:,} elements differ"
        if tally.max_abs is not None:
            fact += f", by {tally.max_abs:.6g} at most"
        if tally.nans:
            fact += f", {tally.nans:,} by NaN"
        first = tally.first
        facts.append(f"{fact}; the first at {first.index}: {first.a} and {first.b}")
    else:
        facts.append("the values are the same")
    numbers = (elements, tally.differing, tally.max_abs, tally.nans, tally.first)
    return TensorDifference(kind, key, "; ".join(facts), *numbers)


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_equal(value[k], other[k]) for k in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_equal, value, other))
    return bool(value == other)


@dataclass(slots=True)
class Tally:
    """The differences of the boxes compared so far."""

    differing: int = 0  # elements that differ
    # The largest absolute difference of two numbers; None if no two numbers differ
    max_abs: float | None = None
    nans: int = 0  # differing elements where one value is NaN, or both with other bits
    first: FirstElement | None = None  # the first differing element in C order

    def add(
        self,
        tensor: torch.Tensor,
        other: torch.Tensor,
        offsets: tuple[int, ...],
        *,
        rtol: float,
        atol: float,
    ) -> None:
        """Compare one box of two tensors.

        Args:
            tensor: The elements of the box, contiguous.
            other: The elements of the same box of the other tensor.
            offsets: Offsets of the box in the whole tensors.
            rtol: Tolerance relative to the absolute value in ``other``.
            atol: Absolute tolerance.
        """
        same_dtype = tensor.dtype == other.dtype
        if same_bits(tensor, other):
            return
        shape = tensor.shape
        is_number = has_numbers(tensor.dtype) and has_numbers(other.dtype)
        if is_number:
            flat, flat_other = tensor.reshape(-1), other.reshape(-1)
        else:
            flat, flat_other, same_dtype = element_bits(tensor), element_bits(other), True
        for start in range(0, flat.numel(), STEP_ELEMENTS):
            a, b = flat[start : start + STEP_ELEMENTS], flat_other[start : start + STEP_ELEMENTS]
            differs = _differs(a, b, same_dtype=same_dtype)
            if not differs.any():
                continue
            positions = differs.nonzero().reshape(-1)
            gap, numbers, other_numbers = _gap(a[positions], b[positions])
            if not is_number:
                gap = gap[:0]
            elif rtol or atol:
                # An infinite number is near to nothing but itself.
                near = gap.isfinite() & (gap <= atol + rtol * other_numbers.abs())
                near |= numbers.isinf() & (numbers == other_numbers)
                near |= numbers.isnan() & other_numbers.isnan()
                positions, gap = positions[~near], gap[~near]
                if not len(positions):
                    continue
            self.differing += len(positions)
            gaps = gap[~gap.isnan()]
            self.nans += len(gap) - len(gaps)
            if len(gaps):
                self.max_abs = max(float(gaps.max()), self.max_abs or 0.0)
            first = int(positions[0])
            local = (
                torch.unravel_index(torch.tensor(start + first, device="cpu"), shape)
                if shape
                else ()
            )
            index = tuple(int(i) + o for i, o in zip(local, offsets, strict=True))
            if self.first is None or index < self.first.index:
                value = _value if is_number else _hexadecimal
                self.first = FirstElement(index, value(a[first]), value(b[first]))


@cache
def has_numbers(dtype: torch.dtype) -> bool:
    """Whether torch converts elements to numbers; it does not where they pack several (float4)."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype).to(wide)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _numberless_message(a: AssembledTensor, b: StoredTensor) -> str:
    """Return why elements cannot be compared; empty where they can, as bits or as numbers."""
    kinds = {tensor.dtype for tensor in (a, b) if not has_numbers(tensor.dtype)}
    if not kinds or a.dtype.itemsize == b.dtype.itemsize:
        return ""
    dtypes = f"{a.dtype_name} in the first, {b.dtype_name} in the second"
    return f"{dtypes}: not compared, torch makes no numbers of {kinds.pop()}"


def _hexadecimal(element: torch.Tensor) -> str:
    return f"0x{int(element.item()) & (1 << 8 * element.itemsize) - 1:0{2 * element.itemsize}x}"


def _differs(a: torch.Tensor, b: torch.Tensor, *, same_dtype: bool) -> torch.Tensor:
    if same_dtype:
        differs = element_bits(a) != element_bits(b)
        return differs if len(differs) == len(a) else differs.reshape(len(a), -1).any(1)
    wide, wide_other = _wide(a), _wide(b)
    return (wide != wide_other) & ~(wide.isnan() & wide_other.isnan())


def _gap(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the absolute differences as float64, and both operands in the dtype for them."""
    wide, other = _wide(a), _wide(b)
    gap = (wide - other).abs()
    if a.dtype == b.dtype and a.dtype in (torch.int64, torch.uint64):
        # float64 rounds neighbours beyond 2**53; int64 overflows if they are far apart.
        exact = (a.view(torch.int64) - b.view(torch.int64)).abs().double()
        gap = torch.where(gap < 2.0**62, exact, gap)
    return gap, wide, other


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _value(element: torch.Tensor) -> Any:
    value = element.item()
    # JSON has none of these, and NaN equals nothing.
    if isinstance(value, complex) or (isinstance(value, float) and not isfinite(value)):
        return str(value)
    return value
