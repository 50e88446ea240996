"""Safetensors files as a source: a file's header describes its tensors, and their bytes follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Self

from dcp_placements.offline.checkpoint import (
    Checkpoint,
    FileFinding,
    RecordChecks,
    SourceOptions,
    StoredRecord,
    StoredTensor,
)
from dcp_placements.offline.safetensors_files import read_safetensors_metadata, renamed_by_export
from dcp_placements.storage.file_reads import ByteRange, c_strides
from dcp_placements.storage.record_head import RecordHead
from dcp_placements.storage.store import Store


class Safetensors(Checkpoint):
    """A directory of safetensors files, with or without an index, as the Hub has them."""

    subject: ClassVar[str] = "safetensors files"
    format = "safetensors"
    is_of_hub: ClassVar[bool] = True
    unproved: ClassVar[str] = "safetensors files have no checksums: nothing proves their contents"

    @classmethod
    def is_in(cls, names: Sequence[str]) -> bool:
        """Whether there are such files."""
        return any(name.endswith(".safetensors") for name in names)

    @classmethod
    def of(cls, directory: Store, options: SourceOptions) -> Self:
        """Return the tensors of all files, or of those that the index names."""
        files = [name for name in directory.names() if name.endswith(".safetensors")]
        metadata, absent = read_safetensors_metadata(directory, files)
        return cls(directory, metadata, absent=absent)

    def head(self, tensor: StoredTensor, chunk: StoredRecord) -> RecordHead | None:
        """Return the record of a chunk: its elements in C order, without a head."""
        assert chunk.box is not None, "a tensor's"
        return RecordHead(tensor.dtype, chunk.box.sizes, c_strides(chunk.box.sizes))

    def verify_record(
        self, checks: RecordChecks, byte_range: ByteRange, record: StoredRecord
    ) -> Iterator[FileFinding]:
        """Yield nothing: only the header describes these bytes, and the metadata are the header."""
        checks.advance(record.nbytes)
        return iter(())

    def names_before_export(self) -> Mapping[str, str]:
        """Map names in the files to those before the rename of the export that wrote them."""
        return renamed_by_export(self.directory, next(iter(self.files)))
