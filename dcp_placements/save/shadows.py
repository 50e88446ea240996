"""Copies of replicated tensors in the files of the ranks that would otherwise read elsewhere.

A shadow is never the only copy: it stands beside the canonical one, where only
``PlacementFileSystemReader`` looks. Keys that lie alike and that a rank holds but does not write
are a *pack*, written in a row as one record. Which keys a pack has is stored once, whatever the
number of ranks; the record's place in a file stands in ``storage_data``, under the pack's name, the
writer's number and the chunk's offsets. ``state_dict_metadata`` knows nothing of it, so that
readers which load all that there is find the canonical tensors alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from dcp_placements._torch import MetadataIndex, TensorWriteData, WriteItem, WriteItemType
from dcp_placements.errors import PlacementError
from dcp_placements.layout.sharding import Box
from dcp_placements.rules.patterns import compile_pattern
from dcp_placements.save.coordinator.cohorts import Cohorts
from dcp_placements.save.coordinator.contents import differing_objects
from dcp_placements.save.coordinator.pieces import Piece
from dcp_placements.save.items import Assignment, chunk_metadata, tensor_properties
from dcp_placements.save.key_table import OBJECT, Group
from dcp_placements.save.local_plan import Boxes, Holding, unpacked_boxes
from dcp_placements.storage.metadata.shadow_records import PACK_NBYTES, PREFIX

Wanted = int | tuple[str, ...]
"""A budget in bytes, or patterns."""


@dataclass(frozen=True, slots=True)
class Shadowing:
    """Which shadows the ranks write.

    Attributes:
        wanted: The bytes that a rank may write more, or patterns.
        unlike: Keys of objects that are not the same on all ranks; None where digests are off.
    """

    wanted: Wanted
    unlike: frozenset[str] | None


def check_shadows(option: Any) -> Wanted | None:
    """Return what ``shadows=`` asks for; None for nothing.

    Raises:
        PlacementError: It is neither ``"off"``, nor a budget, nor patterns.
    """
    if isinstance(option, str):
        if re.fullmatch(r"[\d.]+\s*[KMGT]?(i?B)?", option, re.IGNORECASE):
            raise PlacementError(
                f"shadows={option!r} is a pattern of keys, not a size\n"
                "    way out:     the number of bytes, as shadows=4 * 2**20"
            )
        option = None if option == "off" else (option,)
    if option is None or (isinstance(option, int) and not isinstance(option, bool) and option >= 0):
        return option or None
    if isinstance(option, Iterable):
        patterns = tuple(option)
        if patterns and all(isinstance(pattern, str) for pattern in patterns):
            for pattern in patterns:
                compile_pattern(pattern)
            return patterns
    raise PlacementError(
        f"shadows={option!r}: give 'off', the bytes that a rank may write more, or patterns of keys"
    )


@dataclass(frozen=True, slots=True)
class Pack:
    """Keys of one group of which a rank writes shadows in a row.

    Attributes:
        key: What it is called in ``storage_data``.
        group: What the keys have in common.
        fqns: The keys.
        boxes: The boxes that the rank holds of each and does not write.
    """

    key: str
    group: Group
    fqns: tuple[str, ...]
    boxes: Boxes


Candidate = tuple[int, str, Group, Boxes]
"""Bytes, key, what it has in common with others, and the boxes that others write."""


def packs_of(holding: Holding, assignment: Assignment) -> list[Pack]:
    """Return the packs that a rank writes."""
    shadowing = assignment.shadows
    if shadowing is None:
        return []
    candidates: list[Candidate] = []
    is_written = iter(assignment.is_written(holding))
    for held in holding.groups:
        group = held.group
        for fqn in held.fqns:
            others = tuple([box for box in held.boxes if not next(is_written)])
            nbytes = sum(box.numel for box in others) * group.itemsize
            if group.kind == OBJECT:
                wanted = shadowing.unlike is not None and fqn not in shadowing.unlike
            else:
                wanted = nbytes > 0 and group.layout == "strided"
            if others and wanted:
                candidates.append((nbytes, fqn, group, others))
    alike: dict[tuple[Group, Boxes], list[str]] = {}
    for _, fqn, group, boxes in _chosen(candidates, shadowing.wanted):
        alike.setdefault((Group(*group[:5]), boxes), []).append(fqn)
    packs = []
    for (group, boxes), fqns in alike.items():
        nbytes = max(box.numel for box in boxes) * group.itemsize
        many = max(PACK_NBYTES // nbytes, 1) if nbytes else len(fqns)
        fqns.sort()
        for start in range(0, len(fqns), many):
            some = tuple(fqns[start : start + many])
            key = f"{PREFIX}{xxhash.xxh3_64_hexdigest(repr((group.kind, some)).encode())}"
            packs.append(Pack(key, group, some, boxes))
    return packs


def _chosen(found: list[Candidate], wanted: Wanted) -> list[Candidate]:
    if not isinstance(wanted, int):
        patterns = [compile_pattern(pattern) for pattern in wanted]
        return [one for one in found if any(p.search(f".{one[1]}") for p in patterns)]
    found.sort(key=lambda one: one[:2])
    total = 0
    for number, one in enumerate(found):
        total += one[0]
        if total > wanted:
            return found[:number]
    return found


def pack_items(packs: Sequence[Pack], place: int) -> list[WriteItem]:
    """Return the shadows that one rank writes; ``place`` is its number in the names of files."""
    items = []
    for pack in packs:
        for box in pack.boxes:
            index = MetadataIndex(pack.key, torch.Size((place, *box.offsets)))
            if pack.group.kind == OBJECT:
                items.append(WriteItem(index, WriteItemType.BYTE_IO))
                continue
            sizes = (len(pack.fqns), *box.sizes)
            chunk = chunk_metadata(Box.whole(sizes))
            data = TensorWriteData(chunk, tensor_properties(pack.group), torch.Size(sizes))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return items


def unlike_objects(pieces: Sequence[Piece], digest_kind: str) -> frozenset[str] | None:
    """Return the keys of objects that differ by rank, or may; None where digests are off."""
    if digest_kind == "off":
        return None
    found: set[str] = set()
    for piece in pieces:
        if piece.group.kind == OBJECT:
            found.update(differing_objects(piece))
    return frozenset(found)


def all_packs(cohorts: Cohorts, assignments: Sequence[Assignment]) -> dict[str, tuple[str, ...]]:
    """Return the keys of every pack that is written."""
    found: dict[str, tuple[str, ...]] = {}
    seen: set[Any] = set()
    for plan, assignment in zip(cohorts.plans, assignments, strict=True):
        groups = [group for table in cohorts.tables_of(plan) for group in table.groups]
        # Packs are a function of these values: where its boxes begin does not matter, but for
        # which of them are the same.
        same: dict[Box, int] = {}
        sizes = tuple(
            [
                tuple([(same.setdefault(box, len(same)), box.sizes) for box in boxes])
                for boxes in unpacked_boxes(plan.boxes, groups)
            ]
        )
        key = plan.tables, sizes, assignment.runs, assignment.pieces
        if key not in seen:
            seen.add(key)
            for pack in packs_of(cohorts.holding(plan), assignment):
                found[pack.key] = pack.fqns
    return found
