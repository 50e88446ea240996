"""What differs between two checkpoints, by content: whatever their layouts and formats."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.box_reads import BoxReader, pieces
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint, StoredTensor
from dcp_placements.offline.checks.structure import box_faults
from dcp_placements.offline.checks.verification import MEMORY_NBYTES, Progress
from dcp_placements.offline.declared import Rename, matching_keys
from dcp_placements.offline.differences.comparing import Tally
from dcp_placements.storage.tensor_record import check_stored

PIECE_NBYTES = 32 << 20

OBJECT_NBYTES = 1 << 20
"""An object up to this size is read whatever ``memory`` says."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        kind: ``missing`` (in the first alone), ``extra`` (in the second alone), ``shape``,
            ``dtype``, ``values``, ``object``, ``incomplete`` (holes or overlaps), ``unreadable``.
        fqn: The key, as the second checkpoint has it.
        message: What differs.
        elements: Elements of the tensor; 0 where none were compared.
        differing: Elements that differ.
        max_abs: The largest absolute difference; None where no two numbers differ.
        nans: Differing elements where one is NaN, or both with other bits.
        first: Of the first differing element in C order: index, and both values.
    """

    JSON: ClassVar[str] = "kind fqn message elements differing max_abs nans first=first_element"

    kind: str
    fqn: str
    message: str
    elements: int = 0
    differing: int = 0
    max_abs: float | None = None
    nans: int = 0
    first: tuple[tuple[int, ...], Any, Any] | None = None

    @property
    def first_element(self) -> dict[str, Any] | None:
        """``first`` by the names of its parts."""
        if self.first is None:
            return None
        return dict(zip(("index", "a", "b"), self.first, strict=True))


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs between two checkpoints.

    Attributes:
        one: Where the first is.
        other: Where the second is.
        differences: Sorted by key.
        notes: What was not compared.
        tensors: Tensors that were compared, element by element.
        nbytes: Their bytes, as the first holds them.
    """

    JSON: ClassVar[str] = "a=one b=other same differences notes compared"

    one: str
    other: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    tensors: int
    nbytes: int

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def compared(self) -> dict[str, int]:
        """How much was compared."""
        return {"tensors": self.tensors, "bytes": self.nbytes}


def diff(
    one: str | os.PathLike[str] | Checkpoint,
    other: str | os.PathLike[str] | Checkpoint,
    *,
    fqn: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    rename: Rename | None = None,
    memory: int = MEMORY_NBYTES,
    progress: Progress = lambda done, total: None,
) -> Diff:
    """Return what differs between two checkpoints.

    Without tolerances elements are the same if their bits are; with them, if
    ``|a - b| <= atol + rtol * |b|``, or if both are NaN. Tensors of two dtypes differ in any case,
    and are compared as float64.

    Args:
        one: A checkpoint.
        other: Another; of any layout and format.
        fqn: A pattern, as in ``PlacementRules``, of the second's keys: only those are compared.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        rename: From the first's keys to the second's.
        memory: Bytes that data may take.
        progress: Called as tensors are compared.

    Raises:
        CannotLook: One of them is no checkpoint, or cannot be read; or ``rename`` makes one key
            of two; or no key matches ``fqn``.
    """
    left = one if isinstance(one, Checkpoint) else Checkpoint(one)
    right = other if isinstance(other, Checkpoint) else Checkpoint(other)
    names = _renamed([*left.tensors, *left.objects], rename)
    keys = sorted(matching_keys(fqn, {*names, *right.tensors, *right.objects}))
    notes = []
    if SAFETENSORS in (left.format, right.format):
        objects = {key for key in keys if names.get(key) in left.objects or key in right.objects}
        keys = [key for key in keys if key not in objects]
        if objects:
            notes.append(
                f"{len(objects)} objects not compared: safetensors files hold tensors only"
            )
    total = sum(
        left.tensors[name].nbytes for key in keys if (name := names.get(key)) in left.tensors
    )
    done = compared = 0
    found: list[Difference] = []
    with BoxReader(left) as reader, BoxReader(right) as other_reader:
        comparison = _Comparison(reader, other_reader, rtol=rtol, atol=atol, memory=memory)
        for key in keys:
            name = names.get(key, "")
            a, b = left.tensors.get(name), right.tensors.get(key)
            if a is not None and b is not None:
                start = done

                def advance(nbytes: int, start: int = start) -> None:
                    progress(start + nbytes, total)

                found += comparison.tensors(key, a, b, advance)
                done += a.nbytes
                compared += 1
            elif name in left.objects and key in right.objects:
                found += _objects(key, left, name, right, memory)
            else:
                found.append(_one_sided(key, left, name, right))
    return Diff(left.path, right.path, tuple(found), tuple(notes), compared, done)


def _renamed(keys: list[str], rename: Rename | None) -> dict[str, str]:
    """Return the first's keys by the names they have in the second."""
    found: dict[str, str] = {}
    for key in keys:
        name = key if rename is None else rename(key)
        if name in found:
            raise CannotLook(f"rename makes {name!r} of {found[name]!r} and of {key!r}")
        found[name] = key
    return found


def _one_sided(key: str, left: Checkpoint, name: str, right: Checkpoint) -> Difference:
    told = [_kind_of(left, name), _kind_of(right, key)]
    if None not in told:
        return Difference("object", key, f"{told[0]} in the first, {told[1]} in the second")
    if told[1] is None:
        return Difference("missing", key, f"{told[0]} in the first, not in the second")
    return Difference("extra", key, f"{told[1]} in the second, not in the first")


def _kind_of(checkpoint: Checkpoint, fqn: str) -> str | None:
    tensor = checkpoint.tensors.get(fqn)
    if tensor is not None:
        return f"a {tensor.shape} {str(tensor.dtype).removeprefix('torch.')} tensor"
    return "an object" if fqn in checkpoint.objects else None


class _Comparison:
    """Compares tensors of two checkpoints, in pieces that both fit into memory."""

    def __init__(
        self, reader: BoxReader, other: BoxReader, *, rtol: float, atol: float, memory: int
    ) -> None:
        self._readers = reader, other
        self._rtol = rtol
        self._atol = atol
        self._piece_nbytes = max(min(PIECE_NBYTES, memory // 8), 1)
        self._broken: dict[tuple[str, tuple[int, ...], int], str | None] = {}

    def tensors(
        self, key: str, a: StoredTensor, b: StoredTensor, advance: Callable[[int], None]
    ) -> Iterator[Difference]:
        """Yield what differs between two tensors: one difference at most."""
        if a.shape != b.shape:
            yield Difference("shape", key, f"{a.shape} in the first, {b.shape} in the second")
            return
        for which, tensor in (("first", a), ("second", b)):
            broken = self._broken_boxes(which, tensor)
            if broken is not None:
                yield Difference("incomplete", key, f"in the {which} {broken}")
                return
        tally = Tally()
        done = 0
        try:
            for box in self._boxes(a, b):
                one, other = (
                    reader.read(tensor, box)
                    for reader, tensor in zip(self._readers, (a, b), strict=True)
                )
                tally.add(one, other, box.offsets, rtol=self._rtol, atol=self._atol)
                done += one.nbytes
                advance(done)
        except PlacementError as error:
            # What is unreadable is told in full by verify.
            headline = str(error).splitlines()[:2][-1]
            yield Difference("unreadable", key, headline.partition(": ")[2])
            return
        if a.dtype != b.dtype:
            names = [str(tensor.dtype).removeprefix("torch.") for tensor in (a, b)]
            told = f"{names[0]} in the first, {names[1]} in the second"
            yield _difference("dtype", key, a, tally, told)
        elif tally.differing:
            yield _difference("values", key, a, tally, "")

    def _boxes(self, a: StoredTensor, b: StoredTensor) -> Iterator[Box]:
        """Yield pieces of the whole: along the first's chunks, so that files are read in order."""
        limit = max(self._piece_nbytes // max(a.dtype.itemsize, b.dtype.itemsize), 1)
        whole = a.whole
        if whole.numel <= limit:
            yield from pieces(whole, limit)
            return
        for box in a.boxes:
            yield from pieces(box, limit)

    def _broken_boxes(self, which: str, tensor: StoredTensor) -> str | None:
        key = which, tensor.shape, tensor.cut
        if key not in self._broken:
            told = [message for _, message in box_faults(tensor.whole, tensor.boxes)]
            self._broken[key] = "; ".join(told) or None
        return self._broken[key]


def _difference(kind: str, key: str, a: StoredTensor, tally: Tally, told: str) -> Difference:
    elements = a.whole.numel
    parts = [told] if told else []
    if tally.differing:
        part = f"{tally.differing:,} of {elements:,} elements differ"
        if tally.max_abs is not None:
            part += f", by {tally.max_abs:.6g} at most"
        if tally.nans:
            part += f", {tally.nans:,} by NaN"
        assert tally.first is not None
        index, one, other = tally.first
        parts.append(f"{part}; the first at {index}: {one} and {other}")
    elif kind == "dtype":
        parts.append("the values are the same")
    return Difference(
        kind,
        key,
        "; ".join(parts),
        elements,
        tally.differing,
        tally.max_abs,
        tally.nans,
        tally.first,
    )


def _objects(
    key: str, left: Checkpoint, name: str, right: Checkpoint, memory: int
) -> Iterator[Difference]:
    """Yield whether two objects differ. Nothing that they name is executed."""
    places = left.objects[name], right.objects[key]
    if max(place.nbytes for place in places) > max(memory // 4, OBJECT_NBYTES):
        yield Difference("object", key, "not compared: it takes more than a quarter of --memory")
        return
    data = []
    for checkpoint, place in zip((left, right), places, strict=True):
        try:
            if place.file is None:
                raise OSError("the metadata say of no file that it holds it")
            with checkpoint.directory.open(place.file) as stream:
                stream.seek(place.start)
                data.append(stream.read(place.nbytes))
        except OSError as error:
            yield Difference("unreadable", key, str(error))
            return
    if data[0] == data[1]:
        return
    values = []
    for held in data:
        try:
            stream = io.BytesIO(held)
            check_stored(stream)
            values.append(torch.load(stream, map_location="cpu", weights_only=True))
        except Exception:
            # Of any type, by what is in the pickle.
            message = "other bytes; not looked into, because torch.load takes it for unsafe"
            yield Difference("object", key, message)
            return
    if not _equal(*values):
        yield Difference("object", key, f"{_brief(values[0])} and {_brief(values[1])}")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
