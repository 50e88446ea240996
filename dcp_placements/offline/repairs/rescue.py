"""A checkpoint of what an EP-unaware save left: ordinary DCP, with nothing in it that is wrong.

Sound keys are copied, record by record. Experts that have all of their weights are written under a
key of their own, with their number in the model. ``rescue.json`` lists what is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

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
from dcp_placements.offline.checkpoint import (
    SAFETENSORS,
    Checkpoint,
    StoredChunk,
    StoredObject,
    StoredTensor,
)
from dcp_placements.offline.experts import ExpertFamily, expert_families, expert_key
from dcp_placements.offline.remote_output import AnyFolder, output_at
from dcp_placements.offline.repairs.surviving_experts import (
    OVERWRITTEN,
    UNCLEAR,
    Diagnosis,
    ExpertTensor,
)
from dcp_placements.storage.index.storage_table import StorageTable
from dcp_placements.storage.metadata.file import write_metadata
from dcp_placements.storage.metadata.table import Rows, RowsBuilder

COPY_NBYTES = 8 << 20
LIST = "rescue.json"
"""The file that lists what is not in the rescued checkpoint."""


@dataclass(frozen=True, slots=True)
class Rescue:
    """What was written.

    Attributes:
        path: The new checkpoint.
        copied: Keys that are copied unchanged.
        experts: New keys of experts that survived, and the old key of each.
        left_out: Old keys that the new checkpoint does not have.
        lost: By layer, experts without their weights.
        without_state: By layer, experts with weights but without optimizer state.
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
        checkpoint: The checkpoint that was diagnosed.
        diagnosis: Its diagnosis.
        out: A directory or URL where nothing is yet.
        progress: Called with the bytes written so far, and in all.

    Raises:
        CannotLook: ``out`` exists or is being written, or the checkpoint is not DCP's; or the
            checkpoint was overwritten while it was read, and nothing is written then.
        PlacementError: There is nothing to rescue, or a file of the checkpoint is damaged.
    """
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
    families = expert_families(checkpoint.tensors.values())
    overwritten = diagnosis.of(OVERWRITTEN)
    losses = diagnosis.layers.values()
    # Without a mesh no expert has a number in the model, so all are lost.
    all_lost = {tensor.layer: tuple(range(tensor.experts or 0)) for tensor in overwritten}
    keys = [_copied_key(checkpoint, fqn) for fqn in diagnosis.sound]
    experts = [
        key
        for tensor in overwritten
        for key in _expert_keys(diagnosis, tensor, families[tensor.fqn])
    ]
    keys += experts
    versions = checkpoint.directory.versions(checkpoint.files)
    files = sorted({record.source.file or "" for key in keys for record in key.records})
    names = [*files, LIST, ".metadata"]
    with (
        output_at(out, source=checkpoint.path) as output,
        output.directory(names) as folder,
    ):
        rows = _write_data(checkpoint, folder, keys, progress)
        checkpoint.directory.check_versions(versions)
        result = Rescue(
            str(output.path),
            diagnosis.sound,
            {key.fqn: key.old for key in experts},
            tuple(key for tensor in overwritten for key in families[tensor.fqn].keys),
            {loss.layer: loss.lost for loss in losses} or all_lost,
            {loss.layer: loss.weights_only for loss in losses if loss.weights_only},
            int(rows.rows["length"].sum()),
        )
        document = {"rescued_from": checkpoint.path, **to_json(result)}
        folder.write(LIST, (json.dumps(document, indent=2) + "\n").encode())
        _write_metadata(checkpoint, folder, keys, rows)
    return result


class _Slice(NamedTuple):
    """A part of a stored tensor, and the shape that it gets."""

    tensor: StoredTensor
    box: Box
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.tensor.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Record:
    """One record of the new checkpoint.

    Attributes:
        index: Its key and offsets.
        source: The old record, whose file gives the new file its name.
        part: The elements to write; None to copy the old record.
    """

    index: MetadataIndex
    source: StoredChunk | StoredObject
    part: _Slice | None = None

    @property
    def nbytes(self) -> int:
        return self.source.nbytes if self.part is None else self.part.nbytes

    @property
    def transforms(self) -> tuple[str, ...] | None:
        if self.part is not None or isinstance(self.source, StoredObject):
            return None
        return self.source.transforms or None


class _Key(NamedTuple):
    """One key of the new checkpoint.

    Attributes:
        fqn: The key.
        old: Its key in the old checkpoint.
        stored: Its metadata.
        records: Its records that have a file.
    """

    fqn: str
    old: str
    stored: Any
    records: list[_Record]


def _copied_key(checkpoint: Checkpoint, fqn: str) -> _Key:
    stored = checkpoint.metadata.state_dict_metadata[fqn]
    if fqn in checkpoint.objects:
        records = [_Record(MetadataIndex(fqn), checkpoint.objects[fqn])]
    else:
        records = [
            _Record(MetadataIndex(fqn, torch.Size(chunk.box.offsets)), chunk)
            for chunk in checkpoint.tensors[fqn].chunks
        ]
    return _Key(fqn, fqn, stored, [r for r in records if r.source.file is not None])


def _expert_keys(
    diagnosis: Diagnosis, diagnosed: ExpertTensor, family: ExpertFamily
) -> Iterator[_Key]:
    """Yield a key for each expert of a tensor that is rescued."""
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
        chunks, records = [], []
        for chunk, shared in part.pieces:
            offsets, sizes = (_without(values, family.dim) for values in shared)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            index = MetadataIndex(fqn, torch.Size(offsets))
            sliced = None if family.dim is None else _Slice(tensor, shared, sizes)
            records.append(_Record(index, chunk, sliced))
        shape = torch.Size(_without(tensor.shape, family.dim))
        stored = TensorStorageMetadata(TensorProperties(tensor.dtype), shape, chunks)
        yield _Key(fqn, tensor.fqn, stored, records)


def _write_data(
    checkpoint: Checkpoint,
    folder: AnyFolder,
    keys: Sequence[_Key],
    progress: Callable[[int, int], None],
) -> Rows:
    """Write the data files; return the place of every record."""
    by_file: dict[str, list[_Record]] = {}
    for record in [record for key in keys for record in key.records]:
        by_file.setdefault(record.source.file or "", []).append(record)
    total = sum(record.nbytes for records in by_file.values() for record in records)
    rows = RowsBuilder()
    done = 0
    with BoxReader(checkpoint) as reader:
        for name, records in sorted(by_file.items()):
            records.sort(key=lambda record: (record.source.start, record.index.fqn))
            with folder.file(name) as stream:
                for record in records:
                    start = stream.tell()
                    _write_record(record, reader, checkpoint, stream)
                    length = stream.tell() - start
                    rows.add(
                        record.index,
                        path=name,
                        start=start,
                        length=length,
                        transforms=record.transforms,
                    )
                    done += length
                    progress(done, max(total, done))
    return rows.rows()


def _write_metadata(
    checkpoint: Checkpoint, folder: AnyFolder, keys: Sequence[_Key], rows: Rows
) -> None:
    """Write ``.metadata``, which completes the checkpoint."""
    metadata = Metadata(
        {key.fqn: key.stored for key in keys},
        planner_data=_paths(checkpoint, keys),
        storage_data=StorageTable(rows),
    )
    with folder.file(".metadata") as stream:
        write_metadata(metadata, stream)


def _write_record(
    record: _Record, reader: BoxReader, checkpoint: Checkpoint, stream: IO[bytes]
) -> None:
    part, source = record.part, record.source
    if part is not None:
        torch.save(reader.read(part.tensor, part.box).reshape(part.sizes), stream)
        return
    remaining = source.nbytes
    try:
        opened = checkpoint.directory.open(source.file or "")
    except OSError as error:
        raise _unread(record, str(error)) from error
    with opened as file:
        file.seek(source.start)
        while remaining:
            try:
                data = file.read(min(remaining, COPY_NBYTES))
            except OSError as error:
                raise _unread(record, str(error)) from error
            if not data:
                raise _unread(record, f"it ends {remaining} bytes too early")
            stream.write(data)
            remaining -= len(data)


def _unread(record: _Record, reason: str) -> PlacementError:
    return PlacementError(f"{record.index.fqn}: {record.source.file} cannot be read: {reason}")


def _paths(checkpoint: Checkpoint, keys: Sequence[_Key]) -> dict[str, Any]:
    """Return where each key stands in the nested state dict, if the old checkpoint records it."""
    data = checkpoint.metadata.planner_data
    old: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
    return {
        key.fqn: old[key.old] if key.fqn == key.old else _path(old[key.old], key.fqn)
        for key in keys
        if key.old in old
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
