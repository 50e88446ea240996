"""The index packed for a file: its parts in blocks, and a directory of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dcp_placements.storage.index.blocks import BlockWriter
from dcp_placements.storage.index.columns import ColumnWriter, Ints
from dcp_placements.storage.index.entries import Entries
from dcp_placements.storage.index.row_index import TEMPLATE, Places, RowIndex
from dcp_placements.storage.metadata.chunk_list import ChunkList

_BLOCK_ROWS = 1 << 12
"""Small parts of one kind share a block of at most so many rows, or chunks."""

Finished = tuple[list[bytes], Callable[[int], bytes], bytes]


def packed_index(values: bytes, entries: Entries, index: RowIndex) -> Finished:
    """Return an index as ``BlockWriter.finish`` does.

    Args:
        values: The pickle of what is neither key nor row.
        entries: The entries of the keys; the first keys of the index are theirs.
        index: The rows.
    """
    blocks, directory = BlockWriter(), ColumnWriter()
    kinds: tuple[tuple[Sequence[Any], Callable[..., None], Sequence[tuple[int, ...]]], ...] = (
        (index.templates, _pack_templates, [(len(template),) for template in index.templates]),
        (index.places, _pack_places, [_sizes(one.offsets, one.writers) for one in index.places]),
        (entries.lists, _pack_lists, [chunks.offsets.shape for chunks in entries.lists]),
    )
    for parts, pack, sizes in kinds:
        counts = _shared_blocks(sizes)
        start = 0
        for count in counts:
            columns = ColumnWriter()
            pack(columns, parts[start : start + count])
            blocks.add(columns.packed())
            start += count
        directory.ints(np.array(sizes, np.int64).T)
        directory.ints(counts)
    shared, keys = ColumnWriter(), ColumnWriter()
    _pack_shared(shared, entries, index)
    keys.texts(index.fqns)
    keys.ints(entries.form_of)
    keys.ints(index.pairs)
    for data in (shared.packed(), keys.packed(), values):
        blocks.add(data)
    directory.ints([one.listed for one in index.places])
    counts_of_all = len(entries.fqns), index.pairs.shape[1], len(index.writers.templates)
    directory.ints([*counts_of_all, 0])  # no reader uses the last one
    return blocks.finish(directory.packed())


def _shared_blocks(sizes: Sequence[tuple[int, ...]]) -> list[int]:
    """Return by block the number of parts that share it, of parts of these sizes."""
    counts: list[int] = []
    filled = 0
    for rows, *_ in sizes:
        if not counts or (filled and filled + rows > _BLOCK_ROWS):
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += rows
    return counts


def _sizes(offsets: Ints | None, writers: Ints) -> tuple[int, int]:
    return len(writers), -1 if offsets is None else offsets.shape[1]


def _pack_templates(columns: ColumnWriter, templates: Sequence[np.ndarray]) -> None:
    joined = np.concatenate(templates)
    for name in TEMPLATE.names or ():
        columns.ints(joined[name])


def _pack_places(columns: ColumnWriter, places: Sequence[Places]) -> None:
    columns.ints(np.concatenate([one.writers for one in places]))
    columns.ints(np.concatenate([one.ordinals for one in places]))
    own = [one.offsets for one in places if one.offsets is not None and one.listed < 0]
    columns.ints(_joined(own))


def _pack_lists(columns: ColumnWriter, lists: Sequence[ChunkList]) -> None:
    columns.ints(_joined([chunks.offsets for chunks in lists]))
    columns.ints(_joined([chunks.sizes for chunks in lists]))


def _joined(tables: Sequence[Ints]) -> Ints:
    """Return the columns of all tables, one after another."""
    return np.concatenate([np.zeros(0, np.int64), *[table.T.ravel() for table in tables]])


def _pack_shared(columns: ColumnWriter, entries: Entries, index: RowIndex) -> None:
    """Pack what is small, and needed to make sense of the rest."""
    columns.ints(np.array(entries.forms, np.int64).reshape(-1, 3).T)
    columns.ints([len(shape) for shape in entries.shapes])
    columns.ints([size for shape in entries.shapes for size in shape])
    writers = index.writers
    columns.ints(writers.templates)
    columns.ints(writers.naming_of)
    columns.ints(writers.numbers)
    columns.ints([len(naming) for naming in writers.namings])
    parts = [part for naming in writers.namings for part in naming]
    columns.ints([behind is not None for _, behind in parts])
    columns.texts(before for before, _ in parts)
    columns.texts(behind or "" for _, behind in parts)
    columns.ints([-1 if steps is None else len(steps) for steps in index.transforms])
    columns.texts(step for steps in index.transforms for step in steps or ())
