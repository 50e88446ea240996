"""Safetensors files: their headers, read without trusting them, in DCP's terms; and written.

The safetensors library reads files of this machine, and writes tensors that are in memory. It lacks
what stands here, and the tests compare all of it with the library:

- Headers with the positions of bytes, by which boxes of any format are planned and read in one way,
  and of files at URLs or cut short, which the library opens not at all.
- Slices, which ``BoxReader`` reads. ``safe_open`` takes 0.6 of the time of a whole tensor in the
  page cache, 0.75 of rows, 0.2 of columns, and as long where a disk decides; it would be a second
  way to read, for files of this machine alone.
- Files written as a stream. ``save_file`` needs all tensors of a file in memory, 5 GB by default,
  and a path: an export runs in a bounded memory, continues after an interruption, and goes to URLs.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements.errors import CannotLook
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.directory import MARKER, local_path
from dcp_placements.short_text import format_name, format_names
from dcp_placements.storage.index import index_of_locations
from dcp_placements.storage.metadata_file import with_columns
from dcp_placements.storage.store import Store
from dcp_placements.storage.torch_metadata import (
    LARGEST,
    ChunkList,
    StoredLocation,
    build_entries,
    counts,
)

RENAMED = "dcp_placements.renamed"
"""The note in an export's files: names before its rename, by some of those after it."""

_HEADER_LIMIT_NBYTES = 100 << 20
"""The limit of the safetensors library."""

NAMED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
}
"""The format's dtypes by their names in files."""

_FOUR_BITS = "F4"
"""Two elements are in a byte; the files count elements, and torch counts bytes."""

_DTYPE_NAMES = {dtype: name for name, dtype in NAMED_DTYPES.items()}

_WHOLE = {"model", "consolidated", "adapter_model"}
"""Names, without numbers, of files that hold a whole model or a whole adapter."""

_NUMBERING = re.compile(r"^shard-\d+-|-\d+-of-\d+$")
_FILE_NUMBER = re.compile(r"-(\d+)-of-(\d+)$")


_UNSOUND = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What JSON of another form raises."""


class _Header(NamedTuple):
    """One tensor of one file."""

    file: str
    dtype: torch.dtype
    # Its box in the whole tensor: at the origin, unless torch's ``HuggingFaceStorageWriter`` cut it
    # and recorded the offsets
    box: Box
    is_placed: bool  # whether the file has these offsets
    start: int  # offset of its bytes in the file
    nbytes: int  # number of its bytes


def read_safetensors_metadata(
    directory: Store, files: Sequence[str]
) -> tuple[Metadata, dict[str, str]]:
    """Return safetensors files as metadata in columns, and the keys that are missing.

    Args:
        directory: The files' directory.
        files: Names of all safetensors files in it. Where there is an index, only the files that
            it names count: others may be copies (consolidated and sharded) of the same tensors.

    Returns:
        The metadata; and file by key, for keys that the index names and the file lacks.

    Raises:
        CannotLook: The index or a header is broken, files disagree about a tensor, or the export to
            the directory has not finished. There are several indices; or, without one, the files of
            a whole model or adapter beside files of other names, or only some files of a model.
            Files are those of ranks, each with a part of every tensor. A file is a link out of the
            directory or to nothing, or no plain file. There is no tensor.
    """
    index = _read_index(directory)
    if index is None:
        _check_one_model(directory, files)
    else:
        _check_none_left_out(directory, files, set(index.values()))

    def entries_in(file: str) -> dict[str, _Header]:
        size = directory.size(file)
        if size is None and file in files:
            raise _not_opened(directory, file)
        if size is None:
            return {}
        with directory.open(file) as stream:
            return _read_header(stream, directory, file, size)

    entries_of: dict[str, list[_Header]] = {}
    named = files if index is None else sorted(set(index.values()))
    for in_file in directory.ahead(entries_in, named):
        for fqn, entry in in_file.items():
            entries_of.setdefault(fqn, []).append(entry)
    tensors: dict[str, Any] = {}
    locations = []
    for fqn, entries in sorted(entries_of.items()):
        tensors[fqn] = _tensor(directory, fqn, entries)
        for entry in entries:
            location = entry.box.offsets, entry.file, entry.start, entry.nbytes
            locations.append(StoredLocation(fqn, *location))
    held = {(fqn, entry.file) for fqn, entries in entries_of.items() for entry in entries}
    absent = {fqn: file for fqn, file in (index or {}).items() if (fqn, file) not in held}
    if not tensors and not absent:
        raise CannotLook(f"{directory.path}: no tensor in {format_names(files, 4)}")
    rows = index_of_locations(locations, build_entries(tensors))
    return with_columns(Metadata({}), rows), absent


def _tensor(directory: Store, fqn: str, entries: Sequence[_Header]) -> TensorStorageMetadata:
    """Return the metadata of a tensor that files have whole or in chunks."""
    if len(entries) > 1:
        _check_parts(directory, fqn, entries)
    boxes, dtype = [entry.box for entry in entries], entries[0].dtype
    ends = [[a + b for a, b in zip(*box, strict=True)] for box in boxes]
    shape = torch.Size(map(max, zip(*ends, strict=True)))
    if prod(shape) * dtype.itemsize >= LARGEST:
        files = format_names([entry.file for entry in entries])
        what = f"{tuple(shape)} of {dtype} by its parts in {files}"
        raise CannotLook(f"{directory.path}: {format_name(fqn)} is larger than any tensor: {what}")
    chunks: Any = ChunkList(boxes)
    return TensorStorageMetadata(TensorProperties(dtype), shape, chunks)


def _check_parts(directory: Store, fqn: str, entries: Sequence[_Header]) -> None:
    """Refuse files that disagree about a tensor, or of which none says which part of it it has."""
    name, files = format_name(fqn), format_names([entry.file for entry in entries])
    if len({(entry.dtype, len(entry.box.sizes)) for entry in entries}) > 1:
        raise CannotLook(
            f"{directory.path}: {name} differs in dtype or dims between its files: {files}"
        )
    if sum([not entry.is_placed for entry in entries]) > 1:
        raise CannotLook(
            f"{directory.path}: {len(entries)} files have {name}, and none says which part of it: "
            f"{files}\n{_OF_RANKS}"
        )


def _read_index(directory: Store) -> dict[str, str] | None:
    """Return the index: file by key; None where there is no index."""
    names = [name for name in directory.names() if name.endswith(".safetensors.index.json")]
    if not names:
        return None
    if len(names) > 1:
        raise CannotLook(
            f"{directory.path}: {len(names)} indices of safetensors files: "
            f"{format_names(names)}\n"
            "    likely:      several models, or one in several dtypes\n"
            "    way out:     move all of them but one out of the directory; of the files, only "
            "those that it names are read"
        )
    try:
        with directory.open(names[0]) as stream:
            files = dict(json.loads(stream.read())["weight_map"])
        if not all(type(k) is str and type(v) is str and "/" not in v for k, v in files.items()):
            raise ValueError("keys or files that are no plain names")
    except (OSError, *_UNSOUND) as error:
        raise CannotLook(
            f"{directory.path}/{names[0]}: this is no index of safetensors files: "
            f"{format_name(error)}"
        ) from error
    return files


def _check_one_model(directory: Store, files: Sequence[str]) -> None:
    """Refuse files without an index that are unfinished, several models, or a part of one."""
    if any(name.startswith(MARKER) for name in directory.names()):
        raise CannotLook(
            f"{directory.path}: the export to this directory has not finished\n"
            "    way out:     wait for it, or export again with the same arguments: it continues"
        )
    kinds: dict[str, list[str]] = {}
    numbers_of: dict[tuple[str, int], set[int]] = {}
    for file in files:
        name = file.removesuffix(".safetensors")
        model = _NUMBERING.sub("", name)
        kinds.setdefault(model, []).append(file)
        if match := _FILE_NUMBER.search(name):
            numbers_of.setdefault((model, int(match[2])), set()).add(int(match[1]))
    if len(kinds) > 1 and not kinds.keys().isdisjoint(_WHOLE):
        raise CannotLook(
            f"{directory.path}: safetensors files of {len(kinds)} kinds, and no index: "
            f"{format_names([names[0] for names in kinds.values()])}\n"
            "    likely:      a model twice, or a model and an adapter; nothing says which is "
            "meant\n"
            "    way out:     give a directory with the files of one of them"
        )
    for (name, most), numbers in numbers_of.items():
        if len(numbers) < most:
            raise CannotLook(
                f"{directory.path}: {len(numbers)} of {most} parts of {format_name(name)}, and no "
                "index\n"
                "    likely:      a download or a copy that was cut off\n"
                "    way out:     fetch the other parts, too"
            )


def _check_none_left_out(directory: Store, files: Sequence[str], named: set[str]) -> None:
    """Refuse an index that names some of several files which differ in a number alone."""
    kinds = {_without_numbers(file) for file in named}
    left_out = []
    for file in files:
        if file in named or _without_numbers(file) not in kinds:
            continue
        if (size := directory.size(file)) is None:
            continue
        with directory.open(file) as stream:
            if _read_header(stream, directory, file, size):
                left_out.append(file)
    if left_out:
        raise CannotLook(
            f"{directory.path}: the index names {format_names(sorted(named), 2)}, and leaves out "
            f"{format_names(left_out, 4)}\n{_OF_RANKS}"
        )


_OF_RANKS = (
    "    likely:      files of the ranks of an engine, each with its part of every tensor\n"
    "    way out:     the model's own files, from before it was cut; where some of the files are "
    "left of an older save, a directory without them"
)


def _without_numbers(file: str) -> str:
    """Return a file's name without its numbers, but for the count of parts.

    >>> _without_numbers("model-TP-003.safetensors"), _without_numbers("m-00001-of-00003.bin")
    ('model-TP-{}.safetensors', 'm-{}-of-00003.bin')
    """
    return re.sub(r"(?<!-of-)(?<!\d)\d+", "{}", file)


def _not_opened(directory: Store, file: str) -> CannotLook:
    """Return the error of a file that is in the directory and may not be opened."""
    why = directory.why_barred(file)
    if why is None:
        path = local_path(directory, file)
        is_link = path is not None and path.is_symlink() and not path.exists()
        why = "it is a link to what is not there" if is_link else "it is no plain file"
    return CannotLook(
        f"{directory.path}/{format_name(file)}: {why}\n"
        "    way out:     fetch the file into the directory: cp -L copies what links lead to, and "
        "huggingface-cli download --local-dir writes no links"
    )


def _read_header(stream: IO[bytes], directory: Store, file: str, size: int) -> dict[str, _Header]:
    """Return the tensors of a safetensors file, by name.

    Raises:
        CannotLook: Its header is not sound.
    """
    try:
        header, base = _header(stream, size)
        sharding = (header.pop("__metadata__", None) or {}).get("DCP_SHARDING_INFO", "{}")
        offsets = {fqn: entry["saved_offsets"] for fqn, entry in json.loads(sharding).items()}
        entries = {f: _entry(file, entry, offsets.get(f), base) for f, entry in header.items()}
        _check_ranges(entries, base, size)
        return entries
    except (struct.error, *_UNSOUND) as error:
        raise CannotLook(
            f"{directory.path}/{file}: this is no sound safetensors file\n"
            f"    found:       {format_name(error)}"
        ) from error


def _header(stream: IO[bytes], size: int) -> tuple[Any, int]:
    """Return the header of a file, and the offset of its elements."""
    (length,) = struct.unpack("<Q", stream.read(8))
    if not 2 <= length <= min(_HEADER_LIMIT_NBYTES, max(size - 8, 0)):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    return json.loads(stream.read(length)), 8 + length


def renamed_by_export(directory: Store, file: str) -> dict[str, str]:
    """Map names in an exported file to the names before the export's rename, as it notes them.

    Args:
        directory: Store of the file.
        file: Name of the file, whose header is sound.
    """
    try:
        with directory.open(file) as stream:
            header, _ = _header(stream, directory.size(file) or 0)
        names = json.loads(header["__metadata__"][RENAMED])
        return {str(name): str(before) for name, before in names.items()}
    except (struct.error, *_UNSOUND):  # most files do not
        return {}


def _entry(file: str, entry: Any, saved_offsets: Any, base: int) -> _Header:
    shape = counts(entry["shape"])
    start, stop = counts(entry["data_offsets"])
    if entry["dtype"] not in NAMED_DTYPES:
        raise ValueError("a dtype that the format has not")
    dtype = NAMED_DTYPES[entry["dtype"]]
    if entry["dtype"] == _FOUR_BITS:
        if not shape or shape[-1] % 2:
            raise ValueError(f"a {shape} tensor of {_FOUR_BITS}, which no whole bytes hold")
        shape = (*shape[:-1], shape[-1] // 2)
    if stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{stop - start} bytes of a {shape} tensor of {entry['dtype']}")
    offsets = (0,) * len(shape) if saved_offsets is None else counts(saved_offsets)
    if len(offsets) != len(shape):
        raise ValueError(f"{len(offsets)} offsets of a tensor of {len(shape)} dims")
    if any(offset + size >= LARGEST for offset, size in zip(offsets, shape, strict=True)):
        raise ValueError("a part of a tensor that is larger than any")
    is_placed = saved_offsets is not None
    return _Header(file, dtype, Box(offsets, shape), is_placed, base + start, stop - start)


def _check_ranges(entries: Mapping[str, _Header], base: int, size: int) -> None:
    """Refuse tensors that share bytes, and bytes of no tensor, as the safetensors library does.

    A file that ends too early is left to whoever reads its tensors.
    """
    end = base
    for fqn, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            raise ValueError(f"{fqn} begins at byte {entry.start}; those before it end at {end}")
        end += entry.nbytes
    if end < size:
        raise ValueError(f"{size - end} bytes after the last tensor, which belong to none")


def write_header(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], notes: Mapping[str, str]
) -> bytes:
    """Return the header of a safetensors file; the elements follow in the order given.

    Args:
        tensors: Name, dtype and shape of each. Those with the largest elements come first, so that
            every tensor is aligned to its element size.
        notes: Free text by name, for the header's ``__metadata__``.
    """
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    offset = 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * dtype.itemsize
        if _DTYPE_NAMES[dtype] == _FOUR_BITS:
            shape = (*shape[:-1], 2 * shape[-1])
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
