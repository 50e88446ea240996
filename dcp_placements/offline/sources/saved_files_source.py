"""Sources whose files ``torch.save`` wrote, many tensors in each: of ranks, Megatron, an engine.

A record is described when its file is opened: a tensor's elements are a strided view of the file.
So tensors may share bytes, and the checksums are those of the whole file::

    model_rank_0.pt: "w" is a (2, 3) tensor of the (4, 3) whole, its elements from byte 256
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

from torch.distributed.checkpoint import Metadata

from dcp_placements.errors import CannotLook
from dcp_placements.offline.checkpoint import (
    Checkpoint,
    FileFinding,
    RecordChecks,
    SourceOptions,
    StoredRecord,
    StoredTensor,
    WholeTensors,
    reading,
)
from dcp_placements.offline.sources.mapped_files import check_contents
from dcp_placements.offline.sources.rank_names import rank_file_names
from dcp_placements.short_text import format_names
from dcp_placements.storage.file_reads import ByteRange
from dcp_placements.storage.record_head import RecordHead
from dcp_placements.storage.state_dict_file import Records
from dcp_placements.storage.store import Store
from dcp_placements.storage.wrong_path import ENGINE_METADATA


class SavedFiles(Checkpoint):
    """Files of ``torch.save``, many tensors in each.

    Args:
        directory: The files.
        metadata: Metadata in DCP's terms.
        records: Where the chunks are in the files.
        given: Further arguments of ``Checkpoint``.
    """

    may_share_bytes: ClassVar[bool] = True  # chunks of a rank's tensor interleave, as columns do

    def __init__(
        self, directory: Store, metadata: Metadata, records: Records, **given: Any
    ) -> None:
        super().__init__(directory, metadata, **given)
        self._records = records

    def head(self, tensor: StoredTensor, chunk: StoredRecord) -> RecordHead | None:
        """Return the record of a chunk, as its file describes it."""
        assert chunk.box is not None, "a tensor's"
        return self._records[tensor.fqn, str(chunk.file), chunk.box.offsets]

    def verify_file(self, checks: RecordChecks, file: ByteRange) -> Iterator[FileFinding]:
        """Yield the parts of a file that do not match their checksums."""
        return checks.checksums(file)

    def verify_record(
        self, checks: RecordChecks, byte_range: ByteRange, record: StoredRecord
    ) -> Iterator[FileFinding]:
        """Yield nothing: a record was compared with the head of its file when that was opened."""
        return iter(())

    def begin_conversion(self) -> None:
        """Compare all files with their checksums, on a disk: tensors share storages in them."""
        super().begin_conversion()
        if self.directory.is_local:
            self.compare(self.files)

    def compare(self, names: Iterable[str]) -> None:
        """Compare files with their checksums.

        Raises:
            UnreadableFile: The contents of one are not what was written.
        """
        for name in names:
            check_contents(self.directory, name)
        self.is_compared = True

    def identity(self) -> Iterator[object]:
        """Yield where the chunks are: rules that no file has a version of decide it."""
        yield from self.records()
        yield from self._records.items()


class RankFiles(SavedFiles):
    """A torch file per rank, of verl or a home-made trainer."""

    subject: ClassVar[str] = "a torch file per rank (files=, --files NAME_{rank}.pt)"
    takes: ClassVar[tuple[str, ...]] = ("files", "rules", "axes")
    format = "rank_files"

    def __init__(self, tensors: WholeTensors) -> None:
        super().__init__(
            tensors.directory,
            tensors.metadata,
            tensors.records,
            notes=tensors.notes,
            left_out=tensors.left_out,
            accounted=tensors.accounted,
            versions=tensors.versions,
        )
        self._of_ranks = tensors.files

    @classmethod
    def is_in(cls, names: Sequence[str]) -> bool:
        """Whether names end in a rank's number."""
        return bool(rank_file_names(names))

    @classmethod
    def of(cls, directory: Store, options: SourceOptions) -> Self:
        """Return the files of all ranks, put together."""
        # Imported here, as it places tensors by rules.
        from dcp_placements.offline.sources.rank_tensors import rank_files

        return cls(
            rank_files(directory, files=options.files, rules=options.rules, axes=options.axes)
        )

    def begin_conversion(self) -> None:
        """Compare the files of all ranks, of which some may hold copies alone."""
        self.compare(self._of_ranks)


class MegatronFiles(RankFiles):
    """Megatron-LM's ``mp_rank_*`` directories, a file per rank in each."""

    subject: ClassVar[str] = "Megatron's mp_rank_* files"
    takes: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "expert_parallel_size",
        "expert_tensor_parallel_size",
    )
    format = "megatron"

    @classmethod
    def is_in(cls, names: Sequence[str]) -> bool:
        """Whether there are directories of ranks, or of iterations."""
        return any(re.match(r"mp_rank_\d|iter_\d{7}$|release$", name) for name in names)

    @classmethod
    def of(cls, directory: Store, options: SourceOptions) -> Self:
        """Return the files of all ranks, put together by Megatron's names."""
        from dcp_placements.offline.sources.megatron_weights import megatron_weights

        return cls(
            megatron_weights(
                directory.path,
                vocab_size=options.vocab_size,
                expert_parallel_size=options.expert_parallel_size,
                expert_tensor_parallel_size=options.expert_tensor_parallel_size,
            )
        )


class EngineItems(SavedFiles):
    """The items that ``torch_checkpointing`` saved."""

    subject: ClassVar[str] = "items of torch_checkpointing"
    takes: ClassVar[tuple[str, ...]] = ("rules", "axes")
    format = "torch_checkpointing"

    @classmethod
    def is_in(cls, names: Sequence[str]) -> bool:
        """Whether there is the engine's metadata."""
        return ENGINE_METADATA in names

    @classmethod
    def of(cls, directory: Store, options: SourceOptions) -> Self:
        """Return all items, placed by what this package described, or by the rules of the save."""
        # Imported here, as it proves parts by what a save is proved by.
        from dcp_placements.declaration import DeclaredWorld
        from dcp_placements.engines.saved_items import engine_items, read_engine

        rules, axes = options.rules, options.axes
        if (rules is None) != (axes is None):
            raise CannotLook(
                "rules= and axes= are given together: what each rank of a mesh declares"
            )
        world = None if rules is None or axes is None else DeclaredWorld(axes, rules)
        with reading(directory, ENGINE_METADATA), directory.open(ENGINE_METADATA) as stream:
            items = engine_items(stream)
        metadata, records, objects = read_engine(directory.path, items, directory.open, world)
        stay = f"objects stay in the files of ranks: {format_names(objects, 4)}"
        return cls(directory, metadata, records, notes=[stay] if objects else [])
