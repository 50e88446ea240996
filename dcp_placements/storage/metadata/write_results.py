"""What a rank wrote, as a sequence of torch's results that is small to send."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, overload

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_placements._torch import StorageInfo
from dcp_placements.storage.metadata.table import Rows, place_of, rows_of_places


class WriteResults(Sequence[WriteResult]):
    """What one rank wrote: a sequence of torch's ``WriteResult``, in columns.

    Args:
        held: One row per item; or these as ``Rows.packed`` returns them, until they are used.
    """

    def __init__(self, held: Rows | tuple[bytes, bytes]) -> None:
        self._held = held

    def unpacked(self) -> Rows:
        """Return the rows, without keeping them."""
        return self._held if isinstance(self._held, Rows) else Rows.unpacked(*self._held)

    @cached_property
    def rows(self) -> Rows:
        """The rows."""
        return self.unpacked()

    def __reduce__(self) -> tuple[Any, ...]:
        held = self._held
        return WriteResults, (held.packed() if isinstance(held, Rows) else held,)

    def __len__(self) -> int:
        return len(self.rows.rows)

    @overload
    def __getitem__(self, index: int) -> WriteResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[WriteResult]: ...
    def __getitem__(self, index: int | slice) -> WriteResult | list[WriteResult]:
        if isinstance(index, slice):
            return [self._result(row) for row in self.rows.rows[index]]
        return self._result(self.rows.rows[index])

    def _result(self, row: Any) -> WriteResult:
        rows, start, length = self.rows, int(row["start"]), int(row["length"])
        index = MetadataIndex(rows.fqns[row["fqn"]], rows.offsets[row["offset"]])
        steps = rows.transforms[row["transforms"]]
        transforms = None if steps is None else list(steps)
        info = StorageInfo(rows.paths[row["path"]], start, length, transforms)
        return WriteResult(index, length, info)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def rows_written(results: Sequence[WriteResult]) -> Rows:
    """Return the rows of a rank's results, whatever storage writer they are from."""
    if isinstance(results, WriteResults):
        return results.unpacked()
    return rows_of_places(place_of(r.index.fqn, r.index.offset, r.storage_data) for r in results)
