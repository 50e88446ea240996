"""Which topologies are saved and loaded against each other, and the table of what came of it."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path
from random import Random

from topologies import AXES, Ranks, Topology, all_topologies, load_and_check, save_and_check

Pair = tuple[Topology, Topology]
"""Saved under the first, loaded under the second."""

SINGLE = (
    Topology(),
    *(Topology(**{axis: 2}) for axis in ("tp", "pp", "cp", "fsdp", "hsdp")),
    # Experts are cut over ranks that hold the rest as replicas, or cut it in other ways.
    Topology(ep=2, hsdp=2),
    Topology(etp=2, tp=2),
    Topology(fsdp=2, hsdp=2),
)
"""One kind of parallelism at a time, as far as it can stand alone: all against all."""

SMALL = 4
"""Ranks up to which every legal topology is saved and loaded in every run."""


def pairs(*, every: bool = False) -> list[Pair]:
    """Return what is saved and loaded: all of the single ones into all, and the rings."""
    return list(dict.fromkeys([*itertools.product(SINGLE, SINGLE), *rings(every=every)]))


@cache
def rings(*, every: bool = False) -> tuple[Pair, ...]:
    """Return pairs in which each small or covering topology is a source once and a target once.

    Of topologies with more ranks those are taken that show every two sizes of every two axes; with
    ``every`` all of them.
    """
    legal, _ = all_topologies()
    small = [known for known in legal if known.ranks <= SMALL]
    large = [known for known in legal if known.ranks > SMALL]
    found: list[Pair] = []
    for ring in (small, large if every else covering(large)):
        Random(0).shuffle(ring)
        found += zip(ring, ring[1:] + ring[:1], strict=True)
    return tuple(found)


def covering(topologies: Sequence[Topology]) -> list[Topology]:
    """Return a few that show any two sizes of any two axes that ``topologies`` show; greedily."""
    shown = {
        known: set(itertools.combinations(enumerate(astuple(known)), 2)) for known in topologies
    }
    left = set().union(*shown.values())
    chosen = []
    while left:
        # The smallest of those that show most.
        best = max(topologies, key=lambda known: (len(shown[known] & left), -known.ranks))
        chosen.append(best)
        left -= shown[best]
    return chosen


def by_source(chosen: Iterable[Pair]) -> dict[Topology, list[Topology]]:
    """Return the targets of each source."""
    found: dict[Topology, list[Topology]] = {}
    for source, target in chosen:
        found.setdefault(source, []).append(target)
    return found


def run(source: Topology, targets: Iterable[Topology]) -> Iterator[Topology]:
    """Save, read the whole by stock torch, and load; yield each target that came out right.

    Raises:
        AssertionError: A bit that is not as it was.
        CheckpointException: A refusal.
    """
    with tempfile.TemporaryDirectory() as name:
        save_and_check(Path(name), ranks_of(source))
        for target in targets:
            load_and_check(Path(name), ranks_of(target))
            yield target


def ranks_of(topology: Topology) -> Ranks:
    """Return the ranks; DTensors that tell all for one half of the topologies, FSDP for the other.

    Up to 4 ranks have DTensors of torch's own.
    """
    whole = sum(size.bit_length() for size in astuple(topology)) % 2 == 1
    return Ranks(topology, whole=whole, real=topology.ranks <= 4)


LABELS = {"one rank": None} | {axis.upper(): axis for axis in AXES}


def table(outcomes: Mapping[Pair, bool]) -> str:
    """Return the outcomes as Markdown: where two axes meet, the pairs that have both."""

    def has(topology: Topology, axis: str | None) -> bool:
        return axis in topology.axes if axis else not topology.axes

    def cell(row: str | None, column: str | None) -> str:
        met = [ok for (a, b), ok in outcomes.items() if has(a, row) and has(b, column)]
        if not met:
            return ""
        return f"✓ {len(met)}" if all(met) else f"✗ {met.count(False)} of {len(met)}"

    topologies = {topology for pair in outcomes for topology in pair}
    lines = [
        f"{len(outcomes)} pairs of {len(topologies)} topologies, on up to "
        f"{max(topology.ranks for topology in topologies)} ranks:",
        "",
        "| saved with \\ loaded with | " + " | ".join(LABELS) + " |",
        "| --- |" + " --- |" * len(LABELS),
    ]
    for label, row in LABELS.items():
        cells = " | ".join(cell(row, column) for column in LABELS.values())
        lines.append(f"| {label} | {cells} |")
    return "\n".join(lines)
