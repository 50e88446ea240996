"""Which bytes of a stored chunk a slice of it is.

A chunk is one run of bytes in its file, in C order. A slice of it is a number of equal *segments*
at regular distances, each as long as possible while it includes few other bytes. Integers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

Gap = Callable[[int], int]
"""Maps the length of a run of wanted bytes to the largest gap that is read along with it."""


def no_gap(run_nbytes: int) -> int:
    """Read the wanted bytes only."""
    return 0


@dataclass(frozen=True, slots=True)
class Segments:
    """The reads that a slice takes.

    Attributes:
        start: Where the first segment begins, in bytes from the chunk's first.
        nbytes: Length of each segment.
        counts: Segments along each leading dim.
        steps: Bytes from one segment to the next, along each leading dim.
        strides: Strides in elements, dim by dim, of the slice in segments laid one after another.
        exact: Whether segments hold nothing but the slice.
    """

    start: int
    nbytes: int
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    strides: tuple[int, ...]
    exact: bool

    @property
    def total_nbytes(self) -> int:
        """Bytes of all segments."""
        return self.nbytes * prod(self.counts)

    @property
    def distance(self) -> int:
        """Bytes from one segment to the next, where there is a next; 0 where there is one only."""
        return next(
            (s for n, s in zip(self.counts[::-1], self.steps[::-1], strict=True) if n > 1), 0
        )

    def positions(self, chunk: int = 0) -> Iterator[int]:
        """Yield where each segment begins, in the slice's C order.

        Args:
            chunk: Where the chunk itself begins.
        """
        first = chunk + self.start
        if not self.counts:
            yield first
            return
        ranges = [range(0, n * step, step) for n, step in zip(self.counts, self.steps, strict=True)]
        last = ranges.pop()
        for steps in product(*ranges):
            at = first + sum(steps)
            yield from range(at, at + last.stop, last.step)


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements.

    >>> c_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def segments(
    shape: Sequence[int],
    *,
    offsets: Sequence[int],
    lengths: Sequence[int],
    itemsize: int,
    gap: Gap = no_gap,
) -> Segments:
    """Return the reads of a non-empty slice of a contiguous chunk.

    >>> rows = segments((8, 4), offsets=(2, 0), lengths=(3, 4), itemsize=2)
    >>> rows.start, rows.nbytes, rows.counts
    (16, 24, ())
    >>> columns = segments((8, 4), offsets=(0, 1), lengths=(3, 2), itemsize=2)
    >>> columns.nbytes, list(columns.positions())
    (4, [2, 10, 18])

    Args:
        shape: Of the chunk.
        offsets: Where the slice begins in the chunk.
        lengths: Its sizes; none of them 0.
        itemsize: Bytes of an element.
        gap: How many bytes between two runs are read along with them.
    """
    strides = c_strides(shape)
    start = sum(offset * step for offset, step in zip(offsets, strides, strict=True)) * itemsize
    level = len(shape)
    nbytes = itemsize
    for dim in reversed(range(len(shape))):
        step = strides[dim] * itemsize
        if lengths[dim] > 1 and step - nbytes > gap(nbytes):
            break
        nbytes += (lengths[dim] - 1) * step
        level = dim
    counts = tuple(lengths[:level])
    outer = [step * (nbytes // itemsize) for step in c_strides(counts)]
    return Segments(
        start=start,
        nbytes=nbytes,
        counts=counts,
        steps=tuple(step * itemsize for step in strides[:level]),
        strides=(*outer, *strides[level:]),
        exact=nbytes == prod(lengths[level:]) * itemsize,
    )


def halves(
    offsets: Sequence[int], lengths: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return a slice in two, cut along its first dim that is longer than 1.

    >>> halves((0, 5), (1, 3))
    [((0, 5), (1, 1)), ((0, 6), (1, 2))]
    """
    dim = next(dim for dim, length in enumerate(lengths) if length > 1)
    half = lengths[dim] // 2
    first = (*lengths[:dim], half, *lengths[dim + 1 :])
    second = (*lengths[:dim], lengths[dim] - half, *lengths[dim + 1 :])
    moved = (*offsets[:dim], offsets[dim] + half, *offsets[dim + 1 :])
    return [(tuple(offsets), first), (moved, second)]
