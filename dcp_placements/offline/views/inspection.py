"""What is in a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.declared import matching_keys
from dcp_placements.offline.experts import ExpertLayer, find_experts
from dcp_placements.storage.metadata.record import Cuts, SaveRecord, record_of
from dcp_placements.storage.metadata.save_ids import writer_of

TOLD_OF_MAKING = ("save_id", "step", "world_size", "axes", "versions", "options")
"""Keys of the provenance that are told; rules and digests are one entry for each tensor."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor.

    Attributes:
        shape: Of the whole tensor.
        dtype: Its torch name without ``torch.``.
        chunks: Boxes that it is stored as.
        files: Names of the files that hold any of it.
        ranks: Ranks that wrote any of it, where the files' names say so.
        nbytes: Bytes of the whole tensor's elements.
        rule: The rule that spoke for it when it was saved, where that is stored.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: int
    files: tuple[str, ...]
    ranks: tuple[int, ...]
    nbytes: int
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One key that is no tensor.

    Attributes:
        file: Name of its file; None where the metadata says no place.
        nbytes: Its length there.
    """

    JSON: ClassVar[str] = "files nbytes"

    file: str | None
    nbytes: int

    @property
    def files(self) -> tuple[str, ...]:
        """``file``, as tensors have their files."""
        return () if self.file is None else (self.file,)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file.

    Attributes:
        nbytes: Its size; None where it is missing.
        rank: The rank that wrote it, where its name says so.
        data: Whether it holds tensors or objects.
    """

    nbytes: int | None
    rank: int | None
    data: bool


@dataclass(frozen=True, slots=True)
class ShadowInfo:
    """Copies beside the canonical tensors and objects (``shadows=``).

    Attributes:
        keys: Tensors and objects that have copies.
        copies: Records of them in all files; a record has those of several keys.
        nbytes: Length of the records.
    """

    keys: int
    copies: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CutsInfo:
    """One way in which tensors were cut when they were saved.

    Attributes:
        cuts: By axes, in the order in which they apply; each in words.
        keys: The tensors.
    """

    cuts: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is in a checkpoint.

    Attributes:
        path: Where it is.
        format: ``"dcp"``, ``"torch_dist"`` (Megatron) or ``"safetensors"``.
        tensors: By key.
        objects: By key.
        files: By name; those that hold data, and the others beside them.
        provenance: What it says of its own making (``save_id``, ``step``, ``world_size``,
            ``axes``, ``versions``, ``options``); None where it says nothing.
        digests: Chunks and objects of which a digest is stored.
        experts: Layer by layer, where that was asked for.
        shadows: What has copies; None where nothing has.
        cuts: How tensors were cut when they were saved, as far as the checkpoint says.
        renames: The renames that were in force then.
    """

    JSON: ClassVar[str] = (
        "path format tensors objects files totals "
        "provenance shadows cuts renames experts?=experts_by_layer"
    )

    path: str
    format: str
    tensors: Mapping[str, TensorInfo]
    objects: Mapping[str, ObjectInfo]
    files: Mapping[str, FileInfo]
    provenance: Mapping[str, Any] | None
    digests: int
    experts: tuple[ExpertLayer, ...] | None = None
    shadows: ShadowInfo | None = None
    cuts: tuple[CutsInfo, ...] = ()
    renames: tuple[str, ...] = ()

    @property
    def chunks(self) -> int:
        """Of all tensors."""
        return sum(tensor.chunks for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors' elements."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that wrote any tensor."""
        return tuple(sorted({rank for tensor in self.tensors.values() for rank in tensor.ranks}))

    @property
    def totals(self) -> dict[str, Any]:
        """Of the whole checkpoint."""
        return {
            "tensors": len(self.tensors),
            "objects": len(self.objects),
            "chunks": self.chunks,
            "bytes": self.nbytes,
            "digests": self.digests,
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
    """Return what is in a checkpoint, as its metadata say; no data is read.

    Args:
        path: The checkpoint.
        fqn: A pattern, as in ``PlacementRules``: only the keys that match it are told.
        experts: Whether to list the experts of each layer.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; or no key matches ``fqn``.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    record = record_of(checkpoint.metadata)
    told = checkpoint.provenance or {}
    rules: Mapping[str, str] = told.get("rules") or {}
    keys = matching_keys(fqn, [*checkpoint.tensors, *checkpoint.objects])
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name in keys}
    objects = [name for name in checkpoint.objects if name in keys]
    return Inspection(
        path=checkpoint.path,
        format=checkpoint.format,
        tensors={
            name: TensorInfo(
                tensor.shape,
                str(tensor.dtype).removeprefix("torch."),
                len(tensor.boxes),
                tensor.files,
                tensor.ranks,
                tensor.nbytes,
                rules.get(name),
            )
            for name, tensor in tensors.items()
        },
        objects={
            name: ObjectInfo(checkpoint.objects[name].file, checkpoint.objects[name].nbytes)
            for name in objects
        },
        files={
            name: FileInfo(size, writer_of(name), name in checkpoint.files)
            for name, size in sorted({**checkpoint.files, **checkpoint.other_files}.items())
        },
        provenance={key: told[key] for key in TOLD_OF_MAKING if key in told} if told else None,
        digests=sum(len(known) for known in (told.get("digests") or {}).values()),
        experts=find_experts(tensors.values()) if experts else None,
        shadows=_shadows(checkpoint),
        cuts=() if record is None else _cuts(record, tensors),
        renames=() if record is None else tuple(map(str, record.renames)),
    )


def _cuts(record: SaveRecord, fqns: Iterable[str]) -> tuple[CutsInfo, ...]:
    keys: dict[Cuts, list[str]] = {}
    for fqn in fqns:
        if cuts := record.cuts(fqn):
            keys.setdefault(cuts, []).append(fqn)
    return tuple(CutsInfo(tuple(map(str, cuts)), tuple(held)) for cuts, held in keys.items())


def _shadows(checkpoint: Checkpoint) -> ShadowInfo | None:
    packs = checkpoint.shadows.values()
    records = [chunk for pack in packs for chunk in pack.copies]
    if not records:
        return None
    keys = {fqn for pack in packs for fqn in pack.fqns}
    return ShadowInfo(len(keys), len(records), sum(chunk.nbytes for chunk in records))
