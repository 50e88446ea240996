"""A checkpoint of what an EP-unaware save left: ordinary DCP, with nothing in it that is wrong.

Whatever is sound is copied, record by record. Of the experts those go in that survived in all of
their weights, each under a key of its own, with its number in the model; what is left out is listed
in ``rescue.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from dcp_placements._torch import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.as_json import to_json
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint, StoredTensor
from dcp_placements.offline.output import Output, new_file, write_file
from dcp_placements.offline.repairs.diagnosis import (
    OVERWRITTEN,
    UNCLEAR,
    Diagnosis,
    Family,
    expert_families,
    expert_template,
)
from dcp_placements.storage.metadata.file import write_metadata
from dcp_placements.storage.metadata.table import RowsBuilder, StorageTable

COPY_NBYTES = 8 << 20
LIST = "rescue.json"
"""The file that lists what is not in the rescued checkpoint."""


@dataclass(frozen=True, slots=True)
class Rescue:
    """What was written.

    Attributes:
        path: The new checkpoint.
        copied: Keys that are there as they were.
        experts: New keys of experts that survived, and the old key of each.
        left_out: Old keys that are not there as such.
        lost: By layer, experts of which the weights are not there.
        without_state: By layer, experts that are there without their optimizer state.
        nbytes: Bytes of data files written.
    """

    path: str
    copied: tuple[str, ...]
    experts: Mapping[str, str]
    left_out: tuple[str, ...]
    lost: Mapping[str, tuple[int, ...]]
    without_state: Mapping[str, tuple[int, ...]]
    nbytes: int


def rescue(
    checkpoint: Checkpoint,
    diagnosis: Diagnosis,
    out: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rescue:
    """Write what is sound to a new checkpoint; nothing is overwritten.

    Args:
        checkpoint: What was diagnosed.
        diagnosis: Of it.
        out: A directory that is not there yet.
        progress: Called with bytes written so far, and in all.

    Raises:
        CannotLook: ``out`` is there or being written, or the checkpoint is not DCP's.
        PlacementError: There is nothing to rescue from, or a file of the checkpoint is damaged.
    """
    target = Path(out)
    if checkpoint.format == SAFETENSORS:
        raise CannotLook(f"{checkpoint.path}: only a DCP checkpoint can be rescued")
    if diagnosis.healthy:
        what = "all experts are there" if diagnosis.tensors else "no key names experts"
        raise PlacementError(f"{checkpoint.path}: {what}, so nothing is to be rescued")
    unclear = diagnosis.of(UNCLEAR)
    if unclear:
        raise PlacementError(
            f"{unclear[0].fqn}: it is not clear what there is of its experts: {unclear[0].reason}\n"
            "    way out:     --experts-per-layer and --mesh of the run that saved"
        )
    with Output(target) as output, output.directory() as folder:
        return _Writer(checkpoint, diagnosis, folder, progress).write(target)


@dataclass(frozen=True, slots=True)
class _Record:
    """One record of the new checkpoint.

    Attributes:
        index: What it is about.
        file: Where it comes from, and what the new file is called.
        start: Where it is there.
        nbytes: Its length there.
        transforms: What it went through.
        slice_of: The tensor and the box of it that it is; None to copy it as it is.
    """

    index: MetadataIndex
    file: str
    start: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    slice_of: tuple[StoredTensor, Box, tuple[int, ...]] | None = None


class _Writer:
    def __init__(
        self,
        checkpoint: Checkpoint,
        diagnosis: Diagnosis,
        folder: Path,
        progress: Callable[[int, int], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._diagnosis = diagnosis
        self._folder = folder
        self._progress = progress
        self._families = expert_families(checkpoint)
        self._stored: dict[str, Any] = {}
        self._paths: dict[str, Any] = {}
        data = checkpoint.metadata.planner_data
        self._old_paths: Mapping[str, Any] = data if isinstance(data, Mapping) else {}

    def write(self, target: Path) -> Rescue:
        """Write all files; return what they are, as if they were at ``target``."""
        records = list(self._copies())
        experts: dict[str, str] = {}
        for fqn, known in self._diagnosis.tensors.items():
            if known.verdict == OVERWRITTEN:
                for new, old, made in self._experts(fqn, self._families[fqn]):
                    experts[new] = old
                    records += made
        nbytes = self._write_files(records)
        losses = self._diagnosis.layers.values()
        found = Rescue(
            str(target),
            self._diagnosis.sound,
            experts,
            tuple(
                key
                for fqn, known in self._diagnosis.tensors.items()
                if known.verdict == OVERWRITTEN
                for key in self._families[fqn].keys
            ),
            {loss.layer: loss.lost for loss in losses} or self._all_lost(),
            {loss.layer: loss.weights_only for loss in losses if loss.weights_only},
            nbytes,
        )
        told = {"rescued_from": self._checkpoint.path, **to_json(found)}
        write_file(self._folder / LIST, (json.dumps(told, indent=2) + "\n").encode())
        return found

    def _all_lost(self) -> dict[str, tuple[int, ...]]:
        """Return every expert of the overwritten layers: without a mesh none has a number."""
        overwritten = self._diagnosis.of(OVERWRITTEN)
        return {tensor.layer: tuple(range(tensor.experts or 0)) for tensor in overwritten}

    def _copies(self) -> Iterator[_Record]:
        for fqn in self._diagnosis.sound:
            if fqn in self._old_paths:
                self._paths[fqn] = self._old_paths[fqn]
            self._stored[fqn] = self._checkpoint.metadata.state_dict_metadata[fqn]
            if fqn in self._checkpoint.objects:
                held = self._checkpoint.objects[fqn]
                if held.file is not None:
                    yield _Record(MetadataIndex(fqn), held.file, held.start, held.nbytes)
                continue
            for chunk in self._checkpoint.tensors[fqn].chunks:
                if chunk.file is not None:
                    index = MetadataIndex(fqn, torch.Size(chunk.box.offsets))
                    place = (chunk.file, chunk.start, chunk.nbytes, chunk.transforms)
                    yield _Record(index, *place)

    def _experts(self, fqn: str, family: Family) -> Iterator[tuple[str, str, list[_Record]]]:
        """Yield ``(new key, old key, records)`` of the experts that are rescued."""
        known = self._diagnosis.tensors[fqn]
        loss = self._diagnosis.layers.get(known.layer)
        if loss is None:
            return
        wanted = {*loss.kept} if known.is_state else {*loss.kept, *loss.weights_only}
        for survivor, part in zip(known.survivors, family.parts(), strict=True):
            if survivor.expert not in wanted:
                continue
            tensor = part.tensor
            template, _ = expert_template(tensor.fqn, is_state=known.is_state)
            new = template.replace("{}", str(survivor.expert))
            chunks, records = [], []
            for chunk, shared in part.pieces:
                assert chunk.file is not None
                offsets, sizes = (_without(values, family.dim) for values in shared)
                index = MetadataIndex(new, torch.Size(offsets))
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                sliced = None if family.dim is None else (tensor, shared, sizes)
                place = (chunk.file, chunk.start, chunk.nbytes, chunk.transforms)
                records.append(_Record(index, *place, slice_of=sliced))
            properties = TensorProperties(tensor.dtype)
            shape = torch.Size(_without(tensor.shape, family.dim))
            self._stored[new] = TensorStorageMetadata(properties, shape, chunks)
            if tensor.fqn in self._old_paths:
                self._paths[new] = _path(self._old_paths[tensor.fqn], new)
            yield new, tensor.fqn, records

    def _write_files(self, records: Sequence[_Record]) -> int:
        """Write the data files, and ``.metadata`` last; return bytes of data."""
        by_file: dict[str, list[_Record]] = {}
        for record in records:
            by_file.setdefault(record.file, []).append(record)
        total = sum(record.nbytes for record in records if record.slice_of is None)
        total += sum(
            r.slice_of[1].numel * r.slice_of[0].dtype.itemsize for r in records if r.slice_of
        )
        rows = RowsBuilder()
        done = 0
        with ExitStack() as stack:
            reader = stack.enter_context(BoxReader(self._checkpoint))
            for file, members in sorted(by_file.items()):
                members.sort(key=lambda record: (record.start, record.index.fqn))
                path = self._folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                with new_file(path) as stream:
                    for record in members:
                        start = stream.tell()
                        transforms = None
                        if record.slice_of is None:
                            self._copy(record, stream)
                            transforms = record.transforms or None
                        else:
                            tensor, box, sizes = record.slice_of
                            torch.save(reader.read(tensor, box).reshape(sizes), stream)
                        nbytes = stream.tell() - start
                        rows.add(
                            record.index,
                            path=file,
                            start=start,
                            length=nbytes,
                            transforms=transforms,
                        )
                        done += nbytes
                        self._progress(done, max(total, done))
        metadata = Metadata(self._stored, planner_data=self._paths)
        with new_file(self._folder / ".metadata") as stream:
            write_metadata(metadata, StorageTable(rows.rows()), stream)
        return done

    def _copy(self, record: _Record, stream: IO[bytes]) -> None:
        left = record.nbytes
        try:
            with self._checkpoint.directory.open(record.file) as source:
                source.seek(record.start)
                while left:
                    part = source.read(min(left, COPY_NBYTES))
                    if not part:
                        raise EOFError(f"it ends {left} bytes too early")
                    stream.write(part)
                    left -= len(part)
        except (OSError, EOFError) as error:
            raise PlacementError(
                f"{record.index.fqn}: {record.file} cannot be read: {error}"
            ) from error


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
