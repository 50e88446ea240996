"""``inspect``: what is in a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dcp_placements.layout.sharding import Cuts
from dcp_placements.offline.checkpoint import Checkpoint, StoredTensor, ranks_of
from dcp_placements.offline.declared import matching_keys
from dcp_placements.offline.experts import ExpertLayer, find_experts
from dcp_placements.offline.texts import Family, families
from dcp_placements.offline.views.object_values import plain_values
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.metadata.record import SaveRecord
from dcp_placements.storage.metadata.save_ids import writer_of

SHOWN_PROVENANCE = ("save_id", "step", "world_size", "versions")
"""The other keys have an entry for each tensor."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # its torch name without ``torch.``
    chunks: int  # number of boxes that it is stored as
    files: tuple[str, ...]  # names of the files that hold any of it
    ranks: tuple[int, ...]  # ranks that wrote any of it, as far as the files' names tell
    nbytes: int  # bytes of the whole tensor's elements


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One key that is no tensor."""

    files: tuple[str, ...]  # the name of its file; none if the metadata names none
    nbytes: int  # length of its record
    # What it is, if it is small and plain: numbers, strings and containers of them; else None
    value: Any = None


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors whose keys differ in numbers alone, with one shape and dtype."""

    name: str  # their keys as one name, with ranges of numbers
    tensors: int  # how many they are
    shape: tuple[int, ...]  # of each whole tensor
    dtype: str  # its torch name without ``torch.``
    chunks: int  # of all of them
    ranks: tuple[int, ...]  # ranks that wrote any of them, as far as the files' names show
    nbytes: int  # bytes of all their elements


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file."""

    nbytes: int | None  # its size; None if it is missing
    rank: int | None  # the rank that wrote it, if its name tells
    data: bool  # whether it holds tensors or objects


@dataclass(frozen=True, slots=True)
class CutsInfo:
    """Tensors that were cut alike when they were saved."""

    cuts: tuple[str, ...]  # the cut of each axis as text, in the order in which they apply
    keys: tuple[str, ...]  # the tensors


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is in a checkpoint."""

    JSON: ClassVar[str] = (
        "path format groups tensors objects files totals "
        "provenance cuts renames experts?=experts_by_layer"
    )

    path: str  # where it is
    format: str  # ``"dcp"``, ``"torch_dist"`` (Megatron) or ``"safetensors"``
    tensors: Mapping[str, TensorInfo]  # by key
    objects: Mapping[str, ObjectInfo]  # by key
    files: Mapping[str, FileInfo]  # by name; those that hold data, and the others beside them
    # Its record of the save (``save_id``, ``step``, ``world_size``, ``axes``, ``versions``,
    # ``options``); None if it has none
    provenance: Mapping[str, Any] | None
    experts: tuple[ExpertLayer, ...] | None = None  # layer by layer, if asked for
    cuts: tuple[CutsInfo, ...] = ()  # the cuts of the save, if the checkpoint records them
    renames: tuple[str, ...] = ()  # the renames of the save, if the checkpoint records them

    @property
    def chunks(self) -> int:
        """Number of chunks of all tensors."""
        return sum(tensor.chunks for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors' elements."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that wrote any tensor."""
        return _ranks(self.tensors.values())

    @property
    def groups(self) -> tuple[TensorGroup, ...]:
        """The tensors by groups of numbered keys, in natural order."""
        with quiet_gc():
            kinds = {fqn: (tensor.shape, tensor.dtype) for fqn, tensor in self.tensors.items()}
            return tuple(
                [_group(one, [self.tensors[fqn] for fqn in one.keys]) for one in families(kinds)]
            )

    @property
    def totals(self) -> dict[str, Any]:
        """Counts over the whole checkpoint."""
        return {
            "tensors": len(self.tensors),
            "objects": len(self.objects),
            "chunks": self.chunks,
            "bytes": self.nbytes,
            "ranks": self.ranks,
        }

    @property
    def experts_by_layer(self) -> dict[str, ExpertLayer] | None:
        """``experts`` by layer."""
        return None if self.experts is None else {layer.layer: layer for layer in self.experts}


def inspect(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    fqn: str | None = None,
    experts: bool = False,
) -> Inspection:
    """Return what is in a checkpoint, by its metadata and the values of its small objects.

    Args:
        path: The checkpoint.
        fqn: A pattern, as in ``PlacementRules``: only the keys that match it are listed.
        experts: Whether to list the experts of each layer.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; or no key matches ``fqn``.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    with quiet_gc():
        return _inspected(checkpoint, fqn, experts)


def _inspected(checkpoint: Checkpoint, fqn: str | None, experts: bool) -> Inspection:
    record = checkpoint.record
    provenance = checkpoint.provenance or {}
    keys = matching_keys(fqn, [*checkpoint.tensors, *checkpoint.objects])
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name in keys}
    objects = {name: stored for name, stored in checkpoint.objects.items() if name in keys}
    values = plain_values(checkpoint, objects.values())
    shown = {key: provenance[key] for key in SHOWN_PROVENANCE if key in provenance}
    return Inspection(
        path=checkpoint.path,
        format=checkpoint.format,
        tensors=_tensor_infos(tensors),
        objects={
            name: ObjectInfo((stored.file,) if stored.file else (), stored.nbytes, values.get(name))
            for name, stored in objects.items()
        },
        files={
            name: FileInfo(size, writer_of(name), name in checkpoint.files)
            for name, size in sorted({**checkpoint.files, **checkpoint.other_files}.items())
        },
        provenance=shown if provenance else None,
        experts=find_experts(tensors.values()) if experts else None,
        cuts=() if record is None else _cuts(record, tensors),
        renames=() if record is None else tuple(map(str, record.renames)),
    )


def _tensor_infos(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorInfo]:
    """Return what is shown of each tensor; tensors that differ in their keys alone share it."""
    alike: dict[Hashable, TensorInfo] = {}
    infos = {}
    for fqn, tensor in tensors.items():
        files = tensor.files
        kind = tensor.shape, tensor.dtype, tensor.count, files
        info = alike.get(kind)
        if info is None:
            info = alike[kind] = TensorInfo(
                tensor.shape,
                tensor.dtype_name,
                tensor.count,
                files,
                ranks_of(files),
                tensor.nbytes,
            )
        infos[fqn] = info
    return infos


def _ranks(tensors: Iterable[TensorInfo]) -> tuple[int, ...]:
    """Return the ranks that wrote any of some tensors, sorted."""
    ranks: set[int] = set()
    last: tuple[int, ...] = ()
    for tensor in tensors:
        # Tensors that are alike share one tuple, which may have thousands of ranks.
        if tensor.ranks is not last:
            last = tensor.ranks
            ranks.update(last)
    return tuple(sorted(ranks))


def _group(family: Family, tensors: Sequence[TensorInfo]) -> TensorGroup:
    return TensorGroup(
        name=family.name,
        tensors=len(tensors),
        shape=tensors[0].shape,
        dtype=tensors[0].dtype,
        chunks=sum(tensor.chunks for tensor in tensors),
        ranks=_ranks(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
    )


def _cuts(record: SaveRecord, fqns: Iterable[str]) -> tuple[CutsInfo, ...]:
    keys: dict[Cuts, list[str]] = {}
    for fqn in fqns:
        if cuts := record.cuts(fqn):
            keys.setdefault(cuts, []).append(fqn)
    return tuple(CutsInfo(tuple(map(str, cuts)), tuple(fqns)) for cuts, fqns in keys.items())
