"""Safetensors files described in DCP's terms."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import count, islice
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements.errors import CannotLook, format_name, format_names
from dcp_placements.offline.directory import MARKER, Directory
from dcp_placements.offline.safetensors_files import Entry, read_header
from dcp_placements.storage.checks import LARGEST
from dcp_placements.storage.index import index_of_rows
from dcp_placements.storage.metadata_file import with_columns
from dcp_placements.storage.torch_metadata import ChunkList, build_entries
from dcp_placements.storage.written import Rows, StoredPlace

WHOLE = {"model", "consolidated", "adapter_model"}
"""How files are named that hold a whole model, or a whole adapter, without their numbers."""

_NUMBERING = re.compile(r"^shard-\d+-|-\d+-of-\d+$")
_PART = re.compile(r"-(\d+)-of-(\d+)$")


def read_safetensors_metadata(
    directory: Directory, files: Sequence[str]
) -> tuple[Metadata, dict[str, str]]:
    """Return safetensors files as metadata in columns, and the keys that are not there.

    Args:
        directory: The files' directory.
        files: Names of all safetensors files in it. Where there is an index, only the files that
            it names count: others may be copies (consolidated and sharded) of the same tensors.

    Returns:
        The metadata; and file by key, for keys that the index names and the file lacks.

    Raises:
        CannotLook: The index or a header is broken, files disagree about a tensor, or the export to
            the directory has not finished. There are several indices; or, without one, the files of
            a whole model or adapter beside files of other names, or some parts of a model. A file
            leads out of the directory, nowhere, or is no plain file. There is no tensor.
    """
    index = _read_index(directory)
    if index is None and any(name.startswith(MARKER) for name in directory.names()):
        raise CannotLook(
            f"{directory.path}: the export to this directory has not finished\n"
            "    way out:     wait for it, or export again with the same arguments: it continues"
        )
    if index is None:
        _check_one_model(directory, files)
        _check_parts(directory, files)
    entries_of: dict[str, list[tuple[str, Entry]]] = {}
    for file in files if index is None else sorted(set(index.values())):
        size = directory.size(file)
        if size is None and file in files:
            raise _not_opened(directory, file)
        if size is None:
            continue
        with directory.open(file) as stream:
            for fqn, entry in read_header(stream, f"{directory.path}/{file}", size).items():
                entries_of.setdefault(fqn, []).append((file, entry))
    tensors: dict[str, Any] = {}
    places = []
    for fqn, entries in sorted(entries_of.items()):
        if len({(entry.dtype, len(entry.box.sizes)) for _, entry in entries}) > 1:
            raise CannotLook(
                f"{directory.path}: {format_name(fqn)} differs in dtype or dims between its files: "
                + format_names([file for file, _ in entries])
            )
        boxes = [entry.box for _, entry in entries]
        ends = zip(*(map(sum, zip(*box, strict=True)) for box in boxes), strict=True)
        shape, dtype = torch.Size(map(max, ends)), entries[0][1].dtype
        if prod(shape) * dtype.itemsize >= LARGEST:
            raise CannotLook(
                f"{directory.path}: {format_name(fqn)} is larger than any tensor: {tuple(shape)} "
                f"of {dtype} by its parts in {format_names([file for file, _ in entries])}"
            )
        chunks: Any = ChunkList(boxes)
        tensors[fqn] = TensorStorageMetadata(TensorProperties(dtype), shape, chunks)
        for file, entry in entries:
            offsets = entry.box.offsets
            places.append(StoredPlace(fqn, offsets, file, entry.start, entry.nbytes))
    absent = {
        fqn: file
        for fqn, file in (index or {}).items()
        if file not in [name for name, _ in entries_of.get(fqn, ())]
    }
    if not tensors and not absent:
        raise CannotLook(f"{directory.path}: no tensor in {format_names(files, 4)}")
    rows = index_of_rows(Rows.of(places), build_entries(tensors))
    return with_columns(Metadata({}), rows), absent


def _read_index(directory: Directory) -> dict[str, str] | None:
    """Return file by key, as the index has it; None where there is no index."""
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
    except (*(OSError, ValueError, KeyError, TypeError, AttributeError), RecursionError) as error:
        raise CannotLook(
            f"{directory.path}/{names[0]}: this is no index of safetensors files: "
            f"{format_name(error)}"
        ) from error
    return files


def _check_one_model(directory: Directory, files: Sequence[str]) -> None:
    """Refuse the files of a whole model beside files of other names."""
    kinds: dict[str, list[str]] = {}
    for file in files:
        kinds.setdefault(_NUMBERING.sub("", file.removesuffix(".safetensors")), []).append(file)
    if len(kinds) > 1 and not kinds.keys().isdisjoint(WHOLE):
        raise CannotLook(
            f"{directory.path}: safetensors files of {len(kinds)} kinds, and no index: "
            f"{format_names([names[0] for names in kinds.values()])}\n"
            "    likely:      a model twice, or a model and an adapter; nothing says which is "
            "meant\n"
            "    way out:     give a directory with the files of one of them"
        )


def _check_parts(directory: Directory, files: Sequence[str]) -> None:
    """Refuse files of which the names say that there are more."""
    parts: dict[tuple[str, int], set[int]] = {}
    for file in files:
        name = file.removesuffix(".safetensors")
        if part := _PART.search(name):
            model = _NUMBERING.sub("", name), int(part[2])
            parts.setdefault(model, set()).add(int(part[1]))
    for (name, most), numbers in parts.items():
        if len(numbers) < most:
            first = 0 if 0 in numbers else 1
            lacking = (number for number in count(first) if number not in numbers)
            named = islice(lacking, min(most - len(numbers), 4))
            raise CannotLook(
                f"{directory.path}: {len(numbers)} of {most} parts of {format_name(name)}, and no "
                "index\n"
                f"    missing:     {', '.join(map(str, named))}"
                f"{' and more' if most - len(numbers) > 4 else ''}\n"
                "    likely:      a download or a copy that was cut off\n"
                "    way out:     fetch the other parts, too"
            )


def _not_opened(directory: Directory, file: str) -> CannotLook:
    """Return the error of a file that is in the directory and may not be opened."""
    why = directory.why_barred(file)
    if why is None:
        path = directory.local(file)
        is_link = path is not None and path.is_symlink() and not path.exists()
        why = "it is a link to what is not there" if is_link else "it is no plain file"
    return CannotLook(
        f"{directory.path}/{format_name(file)}: {why}\n"
        "    way out:     fetch the file into the directory: cp -L copies what links lead to, and "
        "huggingface-cli download --local-dir writes no links"
    )
