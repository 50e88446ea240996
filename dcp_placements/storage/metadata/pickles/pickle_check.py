"""Whether a stock pickle is the one that its index describes, without running it.

Our readers look at the index alone; ``pickle.load`` runs the pickle. So a file of unknown origin is
compared: the small beginning is read by the restricted reader, and the rest is written again from
the index and has to be the same bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable

from dcp_placements.storage.index.blocks import Opener
from dcp_placements.storage.index.entries import Entries
from dcp_placements.storage.index.row_index import RowIndex
from dcp_placements.storage.metadata.pickles.metadata_pickle import (
    MetadataUnpickler,
    PlainMetadata,
)
from dcp_placements.storage.metadata.pickles.stock_body import (
    MARKER_NBYTES,
    NAMES,
    PROTOCOL,
    Body,
    Memo,
    memo_of,
    refusing_pickle,
    values_end,
)
from dcp_placements.storage.restricted_pickle import StandIn, refusal

_ROW_NBYTES = 45
"""The shortest record of a row."""


def check_stock_pickle(
    opener: Opener,
    entries: Entries,
    index: RowIndex,
    *,
    values: bytes,
    digest: bytes,
    nbytes: int,
    head: int,
) -> None:
    """Check the pickle of a ``.metadata`` file with an index.

    Args:
        opener: Opens the file.
        entries: Of the index.
        index: The rows.
        values: In the index, the pickle of what is neither key nor row.
        digest: Of the index.
        nbytes: Of the pickle, by the index.
        head: Bytes of the pickle between its marker and what is written from the index.

    Raises:
        RefusedGlobal: It names something else than DCP's own classes.
        pickle.UnpicklingError: It is not the pickle of this index.
    """
    with opener() as stream:
        start = stream.read(MARKER_NBYTES + head)
        if not head:
            refusing = refusing_pickle(digest)
            if nbytes != len(refusing) or start + stream.read(nbytes - len(start)) != refusing:
                raise _unlike()
            return
        if len(index) * _ROW_NBYTES > nbytes:
            raise _unlike()
        memo = _memo(start[MARKER_NBYTES:], entries, index)
        # The values are the beginning of the head, and then another end.
        end = values_end(memo)
        same = start[MARKER_NBYTES:][: len(values) - len(PROTOCOL) - len(end)]
        if PROTOCOL + same + end != values:
            raise _unlike()
        reached = len(start)
        for piece in Body(memo, entries, index).pieces():
            if stream.read(len(piece)) != piece:
                raise _unlike()
            reached += len(piece)
        if reached != nbytes:
            raise _unlike()


def _memo(head: bytes, entries: Entries, index: RowIndex) -> Memo:
    """Return the numbers in the memo of the values that the rest of a pickle refers to."""
    unpickler = MetadataUnpickler(head + b".")
    value = unpickler.load()
    if type(value) is not PlainMetadata or unpickler.stack:
        raise _unlike()
    held = list(unpickler.memo.items())
    classes = {value.name: number for number, value in held[::-1] if type(value) is StandIn}
    # Paths of files and transforms are the last values, whatever the metadata has beside them.
    numbers: dict[Hashable, int] = {value: at for at, value in held if type(value) is str}
    lists = [(at, value) for at, value in held if type(value) is list]
    numbers.update((tuple(v), at) for at, v in lists if all(type(one) is str for one in v))
    # Names and keys are the first ones.
    first = {value: at for at, value in held[::-1] if type(value) is str}
    try:
        numbers.update((text, first[text]) for text in (*NAMES, *index.fqns))
        return memo_of(numbers, classes, max(unpickler.memo, default=-1) + 1, entries, index)
    except (KeyError, ValueError) as error:
        raise _unlike() from error


def _unlike() -> pickle.UnpicklingError:
    return refusal("its pickle is not the one that its index describes")
