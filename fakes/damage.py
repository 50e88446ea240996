"""Ways in which checkpoint directories break, each one a function.

They work on the files of ``dcp.save`` with torch's own classes and Python's zip reader, and use no
code of the library. Each returns the names of the files it changed.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)


def flip_bit(path: str | Path, fqn: str, *, chunk: int = 0) -> str:
    """Flip one bit in the middle of the elements of a chunk; sizes and headers stay as they are."""
    file, start, nbytes = _elements(Path(path), fqn, chunk)
    with open(file, "r+b") as stream:
        stream.seek(start + nbytes // 2)
        (value,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([value ^ 0x10]))
    return file.name


def truncate(path: str | Path, fqn: str, *, chunk: int = 0) -> str:
    """Cut a file off within the elements of a chunk."""
    file, start, nbytes = _elements(Path(path), fqn, chunk)
    os.truncate(file, start + nbytes // 2)
    return file.name


def remove_file(path: str | Path, fqn: str, *, chunk: int = 0) -> str:
    """Remove the file that holds a chunk."""
    file, _, _ = _elements(Path(path), fqn, chunk)
    file.unlink()
    return file.name


def drop_chunk(path: str | Path, fqn: str, *, chunk: int = 0) -> str:
    """Leave a chunk out of the metadata, as a rank's lost plan does."""
    metadata = _read(Path(path))
    chunks = _chunks(metadata, fqn)
    dropped = chunks[chunk]
    kept = [other for other in chunks if other is not dropped]
    _give_chunks(metadata, fqn, kept)
    del metadata.storage_data[MetadataIndex(fqn, dropped.offsets)]
    return _write(Path(path), metadata)


def overlap_chunk(path: str | Path, fqn: str, *, chunk: int = 0) -> str:
    """Make a chunk one row longer than it is, into its neighbour or out of the tensor."""
    metadata = _read(Path(path))
    chunks = list(_chunks(metadata, fqn))
    old = chunks[chunk]
    grown = torch.Size([old.sizes[0] + 1, *old.sizes[1:]])
    chunks[chunk] = ChunkStorageMetadata(old.offsets, grown)
    _give_chunks(metadata, fqn, chunks)
    return _write(Path(path), metadata)


def half_overwrite(path: str | Path, later: str | Path, files: Sequence[str] = ()) -> list[str]:
    """Put data files of a later save in the place of this one's, and not its metadata.

    A save into the same directory that is killed half-way leaves such files. A file takes the place
    of the same rank's file, whatever the names; the names of replaced files are returned.

    Args:
        path: The checkpoint to damage.
        later: Another save of the same tensors.
        files: Names of the files to take; every second file by default.
    """
    names = list(files) or sorted(file.name for file in Path(later).glob("*.distcp"))[1::2]
    replaced = []
    for name in names:
        _, _, rank, *_, number = name.split("_")
        (file,) = {*Path(path).glob(f"__{rank}_{number}"), *Path(path).glob(f"__{rank}_*_{number}")}
        shutil.copyfile(Path(later) / name, file)
        replaced.append(file.name)
    return replaced


def foreign_pickle(path: str | Path, marker: str | Path) -> str:
    """Replace the metadata by a pickle that makes the directory ``marker`` when it is loaded."""
    (Path(path) / ".metadata").write_bytes(pickle.dumps(_Foreign(str(marker))))
    return ".metadata"


class _Foreign:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def _elements(path: Path, fqn: str, chunk: int) -> tuple[Path, int, int]:
    """Return the file of a chunk, and the offset and length of its elements in bytes."""
    metadata = _read(path)
    offsets = _chunks(metadata, fqn)[chunk].offsets
    info = metadata.storage_data[MetadataIndex(fqn, offsets)]
    file = path / info.relative_path
    with open(file, "rb") as stream:
        stream.seek(info.offset)
        record = stream.read(info.length)
    with zipfile.ZipFile(io.BytesIO(record)) as zipped:
        (entry,) = [e for e in zipped.infolist() if e.filename.endswith("/data/0")]
    lengths = record[entry.header_offset + 26 : entry.header_offset + 30]
    names = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return file, info.offset + entry.header_offset + 30 + names, entry.file_size


def _read(path: Path) -> Metadata:
    with open(path / ".metadata", "rb") as stream:
        metadata: Metadata = pickle.load(stream)
    return metadata


def _write(path: Path, metadata: Metadata) -> str:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return ".metadata"


def _chunks(metadata: Metadata, fqn: str) -> list[ChunkStorageMetadata]:
    entry = metadata.state_dict_metadata[fqn]
    assert isinstance(entry, TensorStorageMetadata)
    return entry.chunks


def _give_chunks(metadata: Metadata, fqn: str, chunks: list[ChunkStorageMetadata]) -> None:
    # Tensors with equal cuts may share one list.
    entry = metadata.state_dict_metadata[fqn]
    assert isinstance(entry, TensorStorageMetadata)
    metadata.state_dict_metadata[fqn] = TensorStorageMetadata(entry.properties, entry.size, chunks)
