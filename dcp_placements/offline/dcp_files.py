"""DCP metadata of unknown origin: read, checked, or refused in one message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint import Metadata

from dcp_placements.errors import CannotLook, PlacementError, format_error, format_name
from dcp_placements.offline.directory import Directory
from dcp_placements.storage.index import RowIndex
from dcp_placements.storage.metadata_file import read_metadata, read_stock_pickle
from dcp_placements.storage.safe_pickle import RefusedGlobal
from dcp_placements.storage.save_ids import rank_file_rank

TORCH_DIST = "torch_dist"

MOST_ROWS = 1 << 26
"""Chunks of a checkpoint of unknown origin that are handled one by one."""


def is_torch_dist(directory: Directory) -> bool:
    """Whether Megatron's ``metadata.json`` beside ``.metadata`` names the backend torch_dist."""
    try:
        with directory.open("metadata.json") as stream:
            content = json.loads(stream.read(1 << 20))
    except (ValueError, OSError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("sharded_backend") == TORCH_DIST


def read_rank_parts(
    directory: Directory, newer: set[str] | None = None
) -> list[tuple[int, Metadata]]:
    """Return the metadata of every rank of a save without collectives, by rank.

    Raises:
        CannotLook: As ``read_dcp``.
    """
    ranks = sorted((r, n) for n in directory.names() if (r := rank_file_rank(n)) is not None)
    return [(rank, read_dcp(directory, name, newer)) for rank, name in ranks]


def read_dcp(directory: Directory, name: str, newer: set[str] | None = None) -> Metadata:
    """Return the metadata in a file, with entries and rows in columns; nothing is executed.

    Args:
        directory: Of the checkpoint.
        name: Of the file.
        newer: As of ``read_metadata``.

    Raises:
        CannotLook: It is refused, or cannot be read.
    """
    with reading(directory, name):
        return read_metadata(directory.opener(name), restricted=True, newer=newer)


def misplaced_in_stock(directory: Directory, rows: RowIndex) -> list[str]:
    """Return the keys that torch's readers, which read the pickle alone, look for elsewhere.

    Args:
        directory: Of the checkpoint.
        rows: Of the index in its ``.metadata``.

    Raises:
        CannotLook: The pickle before the index is refused, or cannot be read.
    """
    if ".metadata" not in directory.names():
        return []
    with reading(directory, ".metadata"):
        stock = read_stock_pickle(directory.opener(".metadata"))
    if stock is None:
        return []
    torchs = stock.storage_data
    assert isinstance(torchs, RowIndex)
    fqns = {*rows.fqns, *torchs.fqns}
    return sorted(fqn for fqn in fqns if {*rows.rows_of(fqn)} != {*torchs.rows_of(fqn)})


@contextmanager
def reading(directory: Directory, name: str) -> Iterator[None]:
    """Turn every error of the block, which reads metadata, into one message."""
    where = f"{directory.path}/{name}"
    try:
        yield
    except RefusedGlobal as error:
        raise CannotLook(
            f"{where}: refused, {error}\n"
            "    why:         a pickle calls what it names; nothing of it was executed\n"
            "    way out:     a file of unknown origin should not be loaded by anything else either"
        ) from error
    except OSError as error:
        raise CannotLook(f"{where}: cannot be read: {format_name(error)}") from error
    except PlacementError as error:
        # Its lines are those of this package, and nothing of the file's.
        raise CannotLook(f"{where}: {error}") from error
    except Exception as error:
        # A broken or hostile pickle can raise anything.
        raise CannotLook(
            f"{where}: this is no metadata of DCP's that can be read\n"
            f"    found:       {format_error(error)}\n"
            "    likely:      the file was damaged or cut short"
        ) from error


def check_count(path: str, count: int) -> None:
    """Refuse more chunks than can be handled one by one; an index may claim any number.

    Args:
        path: Of the checkpoint, for the message.
        count: How many there are.

    Raises:
        CannotLook: There are more.
    """
    if count > MOST_ROWS:
        raise CannotLook(
            f"{path}: {count:,} chunks, and at most {MOST_ROWS:,} are handled one by one\n"
            "    why:         each takes memory, or space on the disk, and a small index can claim "
            "any number\n"
            "    way out:     PlacementFileSystemReader loads a checkpoint of any size"
        )
