"""Assembled tensors as a DCP checkpoint: records, their index, and the record of the save."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import IO, Any

import torch
from torch.distributed.checkpoint import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements._torch import CURRENT_DCP_VERSION
from dcp_placements.convert.elements import Elements
from dcp_placements.convert.layout import Layout
from dcp_placements.convert.sources import Source
from dcp_placements.errors import Fault, PlacementError, raise_faults
from dcp_placements.layout.sharding import Cuts
from dcp_placements.offline.assembly import AssembledTensor
from dcp_placements.offline.checkpoint import StoredRecord
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.checked_load import zip_problem
from dcp_placements.storage.file_reads import write_all
from dcp_placements.storage.index import StorageTable, index_of_rows
from dcp_placements.storage.metadata_file import write_metadata
from dcp_placements.storage.provenance import RESERVED_KEY, identity, packed_record
from dcp_placements.storage.records import Template
from dcp_placements.storage.save_ids import named
from dcp_placements.storage.torch_metadata import StoredEntries, entries_of
from dcp_placements.storage.written import Rows, StoredPlace


class DcpOut:
    """Writes one file for each rank of a layout, objects into the first.

    Args:
        source: Has the objects, which are copied record by record with their transforms, and the
            facts that the new checkpoint keeps.
        tensors: By key, in the order of the new checkpoint.
        layout: Which file has which of their boxes.

    Attributes:
        files: Bytes by file; named when the output's identity is known.
        last: The file that completes the output.
    """

    last = ".metadata"

    def __init__(
        self, source: Source, tensors: Mapping[str, AssembledTensor], layout: Layout
    ) -> None:
        self._source = source
        self._tensors = tensors
        self._layout = layout
        self._save_id = b""
        self._rank_of: dict[str, int] = {}
        self.files: dict[str, int] = {}

    def text(self) -> Iterator[str]:
        """Yield what decides the bytes of the files, beside the tensors."""
        declared = self._layout.declared
        yield f"{declared.world_size} {sorted(declared.cuts.items())} {list(declared.renames)}"
        for rank in self._layout.ranks:
            for fqn, box in self._layout.boxes(rank):
                yield f"{rank} {fqn} {box}"

    def begin(self, identity: str) -> None:
        """Name the files."""
        self._save_id = bytes.fromhex(identity)[:16]
        for rank in self._layout.ranks:
            name = f"{named(f'__{rank}_', self._save_id)}0.distcp"
            self._rank_of[name] = rank
            self.files[name] = sum(place.length for place in self._places(name))

    def write(self, name: str, stream: IO[bytes], elements: Elements) -> None:
        """Write one data file."""
        rank = self._rank_of[name]
        for stored in self._objects(rank):
            self._copy(stored, stream)
            elements.advance(stored.nbytes)
        for fqn, box in self._layout.boxes(rank):
            tensor = self._tensors[fqn]
            write = partial(write_all, stream)
            if not box.numel:
                record = _empty_record(tensor.dtype, box.sizes)
                write(memoryview(record))
                elements.advance(len(record))
                continue
            template = _template_of(tensor.dtype, box.sizes)
            template.write_blocks(elements.of(tensor, box), write)
            elements.advance(template.length - box.numel * tensor.dtype.itemsize)

    def finish(self, stream: IO[bytes]) -> None:
        """Write ``.metadata``."""
        places = [place for name in self.files for place in self._places(name)]
        with quiet_gc():
            metadata = self._metadata()
            entries = entries_of(metadata.state_dict_metadata)
            stored: Any = StoredEntries(entries)
            metadata.state_dict_metadata = stored
            metadata.storage_data = StorageTable(index_of_rows(Rows.of(places), entries))
            write_metadata(metadata, stream)

    def _objects(self, rank: int) -> Sequence[StoredRecord]:
        return list(self._source.objects.values()) if rank == self._layout.ranks[0] else []

    def _places(self, name: str) -> Iterator[StoredPlace]:
        """Yield the place of every record of a file, in file order."""
        start, rank = 0, self._rank_of[name]
        for held in self._objects(rank):
            steps = held.transforms or None
            yield StoredPlace(held.fqn, None, name, start, held.nbytes, steps)
            start += held.nbytes
        for fqn, box in self._layout.boxes(rank):
            dtype = self._tensors[fqn].dtype
            if box.numel:
                length = _template_of(dtype, box.sizes).length
            else:
                length = len(_empty_record(dtype, box.sizes))
            yield StoredPlace(fqn, torch.Size(box.offsets), name, start, length, None)
            start += length

    def _copy(self, stored: StoredRecord, stream: IO[bytes]) -> None:
        """Copy the record of an object, compared with its CRC-32 if nothing transformed it."""
        assert stored.file is not None, "the source was checked"
        file: Any = self._source.directory.open(stored.file)
        with file:
            file.seek(stored.start)
            record = file.read(stored.nbytes)
        problem = None
        if len(record) < stored.nbytes:
            problem = f"{stored.file} ends {stored.nbytes - len(record)} bytes too early"
        elif not stored.transforms:
            problem, _ = zip_problem(io.BytesIO(record))
        if problem is not None:
            headline = f"its record in {stored.file} is not what was written: {problem}"
            raise_faults("the checkpoint is damaged", [Fault(stored.fqn, headline)])
        write_all(stream, memoryview(record))

    def _metadata(self) -> Metadata:
        """Return the metadata of the new checkpoint, without places."""
        checkpoint = self._source.checkpoint
        old = {} if checkpoint is None else checkpoint.metadata.state_dict_metadata
        properties: dict[torch.dtype, TensorProperties] = {}
        stored: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in self._source.objects}
        for fqn, tensor in self._tensors.items():
            held: Any = old.get(fqn)
            kept = held.properties if isinstance(held, TensorStorageMetadata) else None
            if kept is None or kept.dtype != tensor.dtype:
                kept = properties.setdefault(tensor.dtype, TensorProperties(tensor.dtype))
            chunks: Any = self._layout.chunks(fqn)
            stored[fqn] = TensorStorageMetadata(kept, torch.Size(tensor.shape), chunks)
        order = {fqn: at for at, fqn in enumerate(old)}
        ordered = {f: stored[f] for f in sorted(stored, key=lambda f: order.get(f, len(order)))}
        paths = None if checkpoint is None else checkpoint.metadata.planner_data
        data: dict[Any, Any] = {fqn: (fqn,) for fqn in ordered}
        if isinstance(paths, Mapping):
            data |= {key: path for key, path in paths.items() if key in ordered}
        data[RESERVED_KEY] = self._provenance(ordered)
        metadata = Metadata(ordered, planner_data=data)
        metadata.version = CURRENT_DCP_VERSION
        return metadata

    def _provenance(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of this save."""
        checkpoint, declared = self._source.checkpoint, self._layout.declared
        old: Mapping[str, Any] = {}
        renames: dict[Any, None] = {}
        if checkpoint is not None:
            old = checkpoint.provenance or {}
            # Those of the source still describe the keys.
            renames = {} if checkpoint.record is None else dict.fromkeys(checkpoint.record.renames)
        provenance = identity(self._save_id, world_size=declared.world_size, step=old.get("step"))
        numbers: dict[Cuts, int] = {(): 0}
        group_of = {
            fqn: numbers.setdefault(cuts, len(numbers)) for fqn, cuts in declared.cuts.items()
        }
        renames |= declared.renames
        provenance |= packed_record(list(numbers), group_of, keys, renames)
        if "save_id" in old:
            provenance["resharded_from"] = old["save_id"]
        return provenance


@lru_cache(maxsize=1 << 12)
def _template_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Template:
    """Return the template of chunks with elements.

    Raises:
        PlacementError: This torch writes another format.
    """
    try:
        return Template(dtype, shape)
    except ValueError as error:
        raise PlacementError(f"torch {torch.__version__}: {error}") from error


@lru_cache(maxsize=1 << 12)
def _empty_record(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the record of a chunk without elements."""
    buffer = io.BytesIO()
    torch.save(torch.empty(shape, dtype=dtype, device="cpu"), buffer)
    return buffer.getvalue()
