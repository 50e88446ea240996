"""Boxes of any number of dims as rectangles of a drawing. Integers only.

The two dims that are cut into most steps are drawn, the later one across. Each step of a further
cut dim has a panel of its own. A single dim with many steps is drawn in lines, as text is. Dims
that no box cuts are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from dcp_placements.layout.boxes import common, format_box
from dcp_placements.layout.sharding import Box, Interval

MAX_STEPS_IN_A_COLUMN = 24
"""One dim that is cut into more is drawn in lines."""

STEPS_IN_A_LINE = 16

MAX_PANELS = 16


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle in a panel: its start (down, across) and its extent."""

    y: int
    x: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture, of a tensor or a box of it.

    Attributes:
        title: The box as text; empty for the whole tensor.
        box: What it shows.
    """

    title: str
    box: Box


@dataclass(frozen=True, slots=True)
class Projection:
    """The mapping from boxes of a tensor to rectangles."""

    shape: tuple[int, ...]  # of the tensor, enlarged to contain boxes beyond its end
    across: int | None  # the dim that is drawn across; None for a scalar
    down: int | None  # the dim that is drawn downwards; None for none
    lines: tuple[int, ...]  # the starts of the lines along ``across``, and its end
    edges: dict[int, tuple[int, ...]]  # by dim, where boxes begin and end
    panels: tuple[Panel, ...]  # the pictures
    undrawn: int  # the number of panels beyond these

    @property
    def width(self) -> int:
        """Extent across, of the longest line."""
        return max(stop - start for start, stop in pairwise(self.lines))

    @property
    def height(self) -> int:
        """Extent downwards."""
        if len(self.lines) > 2:
            return len(self.lines) - 1
        return 1 if self.down is None else self.shape[self.down]

    def rectangles(self, panel: Panel, box: Box) -> Iterator[Rectangle]:
        """Yield the rectangles of a panel that show ``box``."""
        shown = common(panel.box, box)
        if shown is None:
            return
        if self.across is None:
            yield Rectangle(0, 0, 1, 1)
            return
        start, size = shown.offsets[self.across], shown.sizes[self.across]
        if len(self.lines) > 2:
            for number, (low, high) in enumerate(pairwise(self.lines)):
                a, b = max(start, low), min(start + size, high)
                if a < b:
                    yield Rectangle(number, a - low, 1, b - a)
        elif self.down is None:
            yield Rectangle(0, start, 1, size)
        else:
            yield Rectangle(shown.offsets[self.down], start, shown.sizes[self.down], size)


def project(shape: Sequence[int], boxes: Sequence[Box]) -> Projection:
    """Return how to draw ``boxes`` of a tensor of ``shape``."""
    ndim = len(shape)
    ends = [max((b.offsets[d] + b.sizes[d] for b in boxes), default=0) for d in range(ndim)]
    # An empty tensor is drawn as one of a single element, with nothing in it.
    extent = tuple(max(size, end, 1) for size, end in zip(shape, ends, strict=True))
    whole = Box.whole(extent)
    edges = {dim: _edges(extent[dim], boxes, dim) for dim in range(ndim)}
    cut = [dim for dim in range(ndim) if len(edges[dim]) > 2]
    drawn = sorted(cut, key=lambda dim: -len(edges[dim]))[:2]
    if len(drawn) == 1 and len(edges[drawn[0]]) - 1 > MAX_STEPS_IN_A_COLUMN:
        dim = drawn[0]
        lines = (*edges[dim][:-1:STEPS_IN_A_LINE], extent[dim])
        return Projection(extent, dim, None, lines, edges, (Panel("", whole),), 0)
    # Beside a single cut dim, draw the dim after it, or else before it.
    drawn += sorted((d for d in range(ndim) if d not in drawn), key=_nearest(drawn))[
        : 2 - len(drawn)
    ]
    down, across = [None, None, *sorted(drawn)][-2:]
    panels, undrawn = _panels(extent, edges, [dim for dim in cut if dim not in drawn])
    lines = (0, 1) if across is None else (0, extent[across])
    return Projection(extent, across, down, lines, edges, panels, undrawn)


def _edges(size: int, boxes: Sequence[Box], dim: int) -> tuple[int, ...]:
    edges = {0, size}
    for box in boxes:
        edges |= {box.offsets[dim], box.offsets[dim] + box.sizes[dim]}
    return tuple(sorted(edges))


def _nearest(drawn: Sequence[int]) -> Callable[[int], tuple[int, int]]:
    first = drawn[0] if drawn else 0
    return lambda dim: (abs(dim - first), -dim)


def _panels(
    shape: tuple[int, ...], edges: dict[int, tuple[int, ...]], dims: Sequence[int]
) -> tuple[tuple[Panel, ...], int]:
    steps: list[list[Interval]] = [
        list(pairwise(edges[dim])) if dim in dims else [(0, size)] for dim, size in enumerate(shape)
    ]
    count = 1
    for step in steps:
        count *= len(step)
    panels: list[Panel] = []
    for chosen in product(*steps):
        if len(panels) == MAX_PANELS:
            break
        box = Box(tuple(a for a, _ in chosen), tuple(b - a for a, b in chosen))
        panels.append(Panel(format_box(box, shape) if dims else "", box))
    return tuple(panels), count - len(panels)
