"""Which part of a whole each rank asks for, and the gaps that all ranks together leave.

Experts that a rename numbers, and rows that a rank lists, are divided among ranks. A rank that
loads with the numbers or rows of another one reads tensors of the right shape, but the wrong ones.
No rank sees that by itself. The coordinator does: several ranks ask for the same part, and no rank
asks for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_placements.errors import Fault, format_ranks
from dcp_placements.layout.sharding import Intervals

MAX_PARTS = 4
"""Parts that a message lists."""

Bits = npt.NDArray[np.bool_]
"""One per element of the whole."""

Part = tuple[bytes, tuple[Intervals, ...]]
"""Packed bits, and of boxes with these elements the intervals on the other dims: ranks of FSDP or
TP ask for different intervals of the same rows."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Elements that no rank asks for, beside others that several ranks ask for.

    Attributes:
        asked: The ranks by the elements that they ask for.
        repeated: All elements that one rank asks for, and another one, too.
        missing: Elements that no rank asks for.
    """

    asked: Mapping[bytes, Sequence[int]]
    repeated: Bits
    missing: Bits

    @property
    def ranks(self) -> list[int]:
        """All ranks that ask for any element, ascending."""
        return sorted({rank for ranks in self.asked.values() for rank in ranks})

    def fault(
        self,
        name: str,
        text: Callable[[Bits], str],
        *,
        of: str,
        noun: str = "",
        saved: Sequence[str],
        loaded: str,
        likely: str,
        way_out: str,
    ) -> Fault:
        """Return the fault of a key, or of a family of keys.

        Args:
            name: The key or family.
            text: Formats elements.
            of: What they are elements of.
            noun: What they are called in the headline, with a blank.
            saved: How it was saved, as lines.
            loaded: How this load declares it.
            likely: The likely cause.
            way_out: What to declare instead.
        """
        ordered = sorted(self.asked.items(), key=lambda part: min(part[1]))
        parts = [
            f"{text(_unpacked(bits, len(self.missing)))} by {format_ranks(ranks)}"
            for bits, ranks in ordered[:MAX_PARTS]
        ]
        more = f" and {len(ordered) - MAX_PARTS} other parts" if len(ordered) > MAX_PARTS else ""
        return Fault(
            name,
            f"several ranks ask for {noun}{text(self.repeated)} of {of}, and none for "
            f"{noun}{text(self.missing)}",
            (
                *saved,
                f"this load:   {loaded}",
                f"asked for:   {'; '.join(parts)}{more}",
                f"likely:      {likely}",
                f"way out:     {way_out}; optional=[pattern] or waive={{pattern: reason}} where "
                "the rest is left out on purpose",
            ),
        )


def gap_of(parts: Mapping[Part, Sequence[int]], count: int) -> Gap | None:
    """Return the gap that ranks leave; None where they ask for all elements, or repeat none.

    A part is repeated when another rank asks for all of it. Parts that only overlap are those of
    ranks with copies of some experts.

    Args:
        parts: The ranks that ask for each part.
        count: Number of elements of the whole.
    """
    union = np.bitwise_or.reduce([np.frombuffer(bits, np.uint8) for bits, _ in parts])
    missing = ~_unpacked(union.tobytes(), count)
    if not missing.any():
        return None
    holders = np.zeros(count, np.int64)
    for bits, _ in parts:
        holders += _unpacked(bits, count)
    repeated = np.zeros(count, np.bool_)
    for (bits, within), ranks in parts.items():
        part = _unpacked(bits, count)
        if len(ranks) > 1 or (
            part.any()
            and holders[part].min() > 1
            and any(
                other != bits and intervals == within and _unpacked(other, count)[part].all()
                for other, intervals in parts
            )
        ):
            repeated |= part
    if not repeated.any():
        return None
    asked: dict[bytes, list[int]] = {}
    for (bits, _), ranks in parts.items():
        asked.setdefault(bits, []).extend(ranks)
    return Gap(asked, repeated, missing)


def _unpacked(bits: bytes, count: int) -> Bits:
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)
