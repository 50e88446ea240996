"""The reports on a save and on a load: plain numbers and names that print well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from dcp_placements.errors import format_names, format_nbytes


@dataclass(frozen=True, slots=True)
class KeyReport:
    """One tensor of the checkpoint.

    Attributes:
        shape: Of the whole tensor.
        dtype: Its torch name without ``torch.``.
        chunks: Distinct boxes that it is stored as.
        unique_nbytes: Bytes of those boxes, each counted once.
        whole_nbytes: Bytes of the whole tensor; equal to ``unique_nbytes`` in a sound save.
        copies: Bytes that the ranks hold of it, as a multiple of the whole.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: int
    unique_nbytes: int
    whole_nbytes: int
    copies: float


def key_report(
    shape: tuple[int, ...], dtype: Any, chunks: int, unique: int, held: int
) -> KeyReport:
    """Return the report on one tensor.

    Args:
        shape: Of the whole tensor.
        dtype: Its torch dtype.
        chunks: Distinct boxes.
        unique: Elements in those boxes.
        held: Elements that the ranks hold, replicas included.
    """
    whole = prod(shape)
    return KeyReport(
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        chunks=chunks,
        unique_nbytes=unique * dtype.itemsize,
        whole_nbytes=whole * dtype.itemsize,
        copies=held / whole if whole else 1.0,
    )


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
        unmatched: Patterns of rules that matched no key on any rank; with their step, as
            ``rename=Replace('module')``, those of renames.
        partial_keys: Keys that only some ranks have, with those ranks. Not a fault: pipeline
            stages and per-rank experts have such keys.
        stateless: Parameters without optimizer state, where others have it.
        waived: Patterns whose lint warnings are waived, with the reason given.
        warnings: What does not refuse the save but may be wrong; each is also issued as a warning.
        planned: Whether a plan was made; if not, the numbers mean nothing.
    """

    ranks: int = 1
    keys: dict[str, KeyReport] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    rules: Mapping[str, int] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    partial_keys: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stateless: tuple[str, ...] = ()
    waived: Mapping[str, str] = field(default_factory=dict)
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
        held = sum(round(key.copies * key.whole_nbytes) for key in self.keys.values())
        return max(held - self.unique_nbytes, 0)

    def __str__(self) -> str:
        if not self.planned:
            return "save: not planned yet"
        lines = [
            f"save of {_count(len(self.keys), 'tensor')} and {_count(len(self.objects), 'object')} "
            f"from {_count(self.ranks, 'rank')}",
            f"    unique:    {format_nbytes(self.unique_nbytes)} of "
            f"{format_nbytes(self.whole_nbytes)} in the whole tensors",
            f"    replicas:  {format_nbytes(self.replica_nbytes)} held beyond that",
        ]
        lines += [
            f"    rule:      {rule} for {_count(count, 'key')}"
            for rule, count in self.rules.items()
        ]
        if self.unmatched:
            lines.append(f"    unmatched: {format_names(self.unmatched)}")
        if self.partial_keys:
            lines.append(
                f"    partial:   {_count(len(self.partial_keys), 'key')} on some ranks only"
            )
        if self.stateless:
            lines.append(f"    stateless: no optimizer state for {format_names(self.stateless)}")
        lines += [f"    waived:    {name}: {reason}" for name, reason in self.waived.items()]
        lines += [f"    warning:   {warning.splitlines()[0]}" for warning in self.warnings]
        return "\n".join(lines)


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
        text = f"{format_nbytes(self.storage_nbytes)} of {_count(self.opens, 'file')}"
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
        stateless: Parameters that are read, without any optimizer state in the checkpoint; theirs
            is reset to 0 when the load ends.
        unread: Keys of the checkpoint that this rank does not request; other ranks may
            (pipeline stages, experts).
        padded: Keys with padding, and the number of padding elements, which are left unchanged.
        casts: Keys whose dtype changes, as ``"float32 -> bfloat16"``.
        unchecked: Records that were read whole and have no checksum to compare, as
            ``PlacementFileSystemReader`` counts them.
        traffic: What this rank read and received, as ``PlacementFileSystemReader`` counts it.
        all_traffic: The same for all ranks, a file counted once per rank that opens it. Only
            after an exchange; other loads do not send it.
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
    unread: tuple[str, ...] = ()
    padded: Mapping[str, int] = field(default_factory=dict)
    casts: Mapping[str, str] = field(default_factory=dict)
    unchecked: int = 0
    traffic: Traffic = Traffic()
    all_traffic: Traffic | None = None
    compared: str = "no record"
    waived: Mapping[str, str] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    planned: bool = True

    def __str__(self) -> str:
        if not self.planned:
            return "load: not planned yet"
        lines = [
            f"load of {_count(self.items, 'item')}: {format_nbytes(self.read_nbytes)} read for "
            f"{format_nbytes(self.wanted_nbytes)} wanted"
        ]
        for name, keys in (
            ("missing", self.missing),
            ("stateless", self.stateless),
            ("not asked", self.unread),
            ("padded", tuple(self.padded)),
        ):
            if keys:
                lines.append(f"    {name + ':':<12}{len(keys)}: {format_names(keys, 4)}")
                if name == "padded":
                    kept = sum(self.padded.values())
                    lines[-1] += f"; {_count(kept, 'element')} of padding kept"
        for cast in sorted(set(self.casts.values())):
            names = [key for key, of_key in self.casts.items() if of_key == cast]
            lines.append(f"    {'cast:':<12}{cast} for {len(names)}: {format_names(names, 4)}")
        lines.append(f"    {'compared:':<12}{self.compared}")
        if self.unmatched:
            lines.append(f"    {'unmatched:':<12}{format_names(self.unmatched)}")
        lines += [f"    {'waived:':<12}{name}: {reason}" for name, reason in self.waived.items()]
        if self.unchecked:
            lines.append(f"    {'unchecked:':<12}{_count(self.unchecked, 'record')}, no checksums")
        if self.traffic != Traffic():
            lines.append(f"    {'moved:':<12}{self.traffic}")
        if self.all_traffic is not None:
            lines.append(f"    {'all ranks:':<12}{self.all_traffic}")
        lines += [f"    {'warning:':<12}{warning.splitlines()[0]}" for warning in self.warnings]
        return "\n".join(lines)

    @property
    def line(self) -> str:
        """The report in one line, as it is logged."""
        return (
            f"{self.items} items, {format_nbytes(self.read_nbytes)}; {len(self.missing)} missing, "
            f"{len(self.stateless)} without optimizer state, "
            f"{len(self.unread)} not asked for by this rank, "
            f"{len(self.casts)} cast"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
