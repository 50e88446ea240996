"""The reports on a save and on a load: plain numbers and names that print well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from dcp_placements.short_text import (
    format_count,
    format_names,
    format_nbytes,
)

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""A local shape, and that of the whole tensor."""


@dataclass(frozen=True, slots=True)
class KeyReport:
    """One tensor of the checkpoint.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The dtype's torch name without ``torch.``.
        chunks: Distinct boxes that it is stored as.
        unique_nbytes: Bytes of those boxes, each counted once.
        whole_nbytes: Bytes of the whole tensor; equal to ``unique_nbytes`` in a sound save.
        held_nbytes: Bytes that the ranks hold of it, replicas included.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: int
    unique_nbytes: int
    whole_nbytes: int
    held_nbytes: int


@dataclass(slots=True)
class SaveReport:
    """What a save plans to write.

    The coordinator's report covers all ranks. Every other rank sees only its own plan: ``ranks`` is
    1, and the numbers are those of this rank, replicas included.

    Attributes:
        ranks: Number of ranks that the report covers.
        keys: One entry per tensor.
        objects: Keys that are not tensors.
        rules: Rules that matched, with the number of keys on the rank where each matched most.
        shapes: The (local shape, whole shape) pairs of each rule where the two differ:
            ``{"experts": (((2, 6), (4, 6)),)}``.
        unmatched: Patterns that matched no key on any rank: those of rules, and those of renames
            with their step, such as ``rename=Replace('module')``.
        partial_keys: Keys that only some ranks have, with those ranks. Not a fault: pipeline
            stages and per-rank experts have such keys.
        stateless: Parameters without optimizer state, where others have it.
        waived: Patterns whose lint warnings are waived, with the reason given.
        whole: What was compared with the unsharded model, as text; empty without ``whole=``.
        warnings: What does not refuse the save but may be wrong; each is also issued as a warning.
        planned: Whether a plan was made; if not, the numbers mean nothing.
    """

    ranks: int = 1
    keys: dict[str, KeyReport] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    rules: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[Shapes, ...]] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    partial_keys: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stateless: tuple[str, ...] = ()
    waived: Mapping[str, str] = field(default_factory=dict)
    whole: str = ""
    warnings: tuple[str, ...] = ()
    planned: bool = True

    @property
    def unique_nbytes(self) -> int:
        """Bytes that will be written: every element once."""
        return sum(key.unique_nbytes for key in self.keys.values())

    @property
    def whole_nbytes(self) -> int:
        """Bytes of all the whole tensors."""
        return sum(key.whole_nbytes for key in self.keys.values())

    @property
    def replica_nbytes(self) -> int:
        """Bytes that the ranks hold beyond the first copy, and that are not written."""
        return sum(key.held_nbytes - key.unique_nbytes for key in self.keys.values())

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes, and the sums of bytes, as plain values for ``json.dumps``."""
        sums = ("unique_nbytes", "whole_nbytes", "replica_nbytes")
        return {**_plain(self), **{name: getattr(self, name) for name in sums}}

    def __str__(self) -> str:
        if not self.planned:
            return "save: not planned yet"
        whole, held = format_nbytes(self.whole_nbytes), format_nbytes(self.replica_nbytes)
        rows = [
            ("unique", f"{format_nbytes(self.unique_nbytes)} of {whole} in the whole tensors"),
            ("replicas", f"{held} held beyond that"),
            *[("rule", self._rule_text(rule, count)) for rule, count in self.rules.items()],
            *([("whole", f"as the whole model: {self.whole}")] if self.whole else []),
            *_named("partial", tuple(self.partial_keys)),
            *_named("stateless", self.stateless),
        ]
        opening = (
            f"save of {format_count(len(self.keys), 'tensor')} and "
            f"{format_count(len(self.objects), 'object')} from {format_count(self.ranks, 'rank')}"
        )
        return _format(opening, rows, self)

    def _rule_text(self, rule: str, count: int) -> str:
        shapes = [f"{local} -> {whole}" for local, whole in self.shapes.get(rule, ())]
        more = [f"{len(shapes) - 2} more"] if len(shapes) > 2 else []
        pairs = f", {', '.join([*shapes[:2], *more])}" if shapes else ""
        return f"{rule} for {format_count(count, 'key')}{pairs}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a load read and received.

    Attributes:
        opens: Data files opened.
        storage_nbytes: Bytes read from them.
        exchanged_nbytes: Bytes received from the ranks that read them.
    """

    opens: int = 0
    storage_nbytes: int = 0
    exchanged_nbytes: int = 0

    def __str__(self) -> str:
        text = f"{format_nbytes(self.storage_nbytes)} of {format_count(self.opens, 'file')}"
        if self.exchanged_nbytes:
            text += f", {format_nbytes(self.exchanged_nbytes)} from other ranks"
        return text


@dataclass(slots=True)
class LoadReport:
    """What a load plans to read on this rank.

    Attributes:
        wanted_nbytes: Bytes of the destination tensors, without padding.
        read_nbytes: Bytes of the parts of stored chunks that fill them.
        items: Number of read items.
        missing: Keys that the checkpoint lacks; their values are left unchanged.
        stateless: Parameters that are read and have no optimizer state in the checkpoint; their
            state is reset to its initial values when the load ends.
        tied: Keys that the checkpoint lacks, and this rank fills all the same: their memory is that
            of another key, which is read. By key, the checkpoint's key.
        several: Keys of the checkpoint that fill several of this rank's keys, and these.
        unread: Keys of the checkpoint that this rank does not request; other ranks may
            (pipeline stages, experts).
        unasked: Tensors of the checkpoint that no rank requests; on the coordinator only.
        alone: With an exchange, the tensors that this rank read entirely by itself.
        padded: Keys with padding, and the number of padding elements, which are left unchanged.
        casts: Keys whose dtype changes, as ``"float32 -> bfloat16"``.
        unchecked: Records that were read whole and have no checksum to compare, as
            ``PlacementFileSystemReader`` counts them.
        traffic: What this rank read and received, as ``PlacementFileSystemReader`` counts it.
        whole: As in ``SaveReport``; on the coordinator only.
        compared: Whether this load is declared as the save was, with the number of keys that
            both shard; ``"no record"`` if the checkpoint has no record of its save.
        waived: Patterns of keys whose differences are waived, with the reason given.
        unmatched: As in ``SaveReport``; on the coordinator only.
        warnings: What does not refuse the load but may be wrong.
        planned: Whether a plan was made; if not, the numbers mean nothing.
    """

    wanted_nbytes: int = 0
    read_nbytes: int = 0
    items: int = 0
    missing: tuple[str, ...] = ()
    stateless: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    several: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    padded: Mapping[str, int] = field(default_factory=dict)
    casts: Mapping[str, str] = field(default_factory=dict)
    unchecked: int = 0
    traffic: Traffic = Traffic()
    whole: str = ""
    compared: str = "no record"
    waived: Mapping[str, str] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    planned: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes as plain values for ``json.dumps``."""
        described: dict[str, Any] = _plain(self)
        return described

    def __str__(self) -> str:
        if not self.planned:
            return "load: not planned yet"
        kept = format_count(sum(self.padded.values()), "element")
        by_cast: dict[str, list[str]] = {}
        for key, cast in sorted(self.casts.items()):
            by_cast.setdefault(cast, []).append(key)
        rows = [
            *_named("missing", self.missing),
            *_named("stateless", self.stateless),
            *_named("tied", [f"{key} to {other}" for key, other in self.tied.items()]),
            *_named("several", [f"{len(keys)} by {key}" for key, keys in self.several.items()]),
            *_named("not asked", self.unread),
            *_named("no rank", self.unasked),
            *_named("padded", tuple(self.padded), f"; {kept} of padding kept"),
            *_named("alone", self.alone),
            *[row for cast, keys in by_cast.items() for row in _named("cast", keys, f": {cast}")],
            *([("whole", f"as the whole model: {self.whole}")] if self.whole else []),
            ("compared", self.compared),
        ]
        if self.unchecked:
            rows.append(("unchecked", f"{format_count(self.unchecked, 'record')}, no checksums"))
        if self.traffic != Traffic():
            rows.append(("moved", str(self.traffic)))
        opening = (
            f"load of {format_count(self.items, 'item')}: {format_nbytes(self.read_nbytes)} read "
            f"for {format_nbytes(self.wanted_nbytes)} wanted"
        )
        return _format(opening, rows, self)


def _plain(value: Any) -> Any:
    """Return dataclasses, mappings and tuples as dicts and lists."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(held) for key, held in value.items()}
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def _named(label: str, names: Sequence[str], what: str = "") -> list[tuple[str, str]]:
    return [(label, f"{len(names)}: {format_names(names, 4)}{what}")] if names else []


def _format(opening: str, rows: Sequence[tuple[str, str]], report: SaveReport | LoadReport) -> str:
    """Return the text of a report: an opening line, then labelled rows, waivers and warnings."""
    rows = [*rows, *_named("unmatched", report.unmatched)]
    rows += [("waived", f"{name}: {reason}") for name, reason in report.waived.items()]
    rows += [("warning", warning.splitlines()[0]) for warning in report.warnings]
    return "\n".join([opening, *[f"    {label + ':':<11}{text}" for label, text in rows]])
