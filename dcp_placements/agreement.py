"""Do all ranks tell one story: the coordinator's checks, before anything is dropped or written.

Per key: one kind, one shape, one dtype; boxes that tile the whole; and the same content wherever
two ranks claim the same box. The size of a box is part of its identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from dcp_placements.errors import Fault, format_names, format_ranks
from dcp_placements.interop import SavePlan, WriteItem, WriteItemType
from dcp_placements.layout import Box
from dcp_placements.optimizer_state import possible_parameters
from dcp_placements.tiling import format_box, overlaps, tiles, uncovered


@dataclass(frozen=True, slots=True)
class Witness:
    """What is known of the rank behind a plan.

    Attributes:
        rank: Its global rank.
        digests: One per plan item; None where there is no evidence. Empty for none at all.
        positions: Where it stands along the named mesh axes.
        sizes: The sizes of those axes.
        rules_of: The rule that spoke, by key.
        replicated: Named axes along which a key is declared equal, by key.
        row_maps: The rows that an ``IndexShard`` names here, by key.
    """

    rank: int
    digests: Sequence[bytes | None] = ()
    positions: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    rules_of: Mapping[str, str] = field(default_factory=dict)
    replicated: Mapping[str, frozenset[str]] = field(default_factory=dict)
    row_maps: Mapping[str, Sequence[int]] = field(default_factory=dict)


Claim = tuple[int, bytes | None]
"""Who claims a box: the plan's index, and the digest of what that rank holds."""


@dataclass(slots=True)
class Claims:
    """All that the ranks say of one key.

    Attributes:
        kinds: Plans by kind, ``"tensor"`` or ``"object"``.
        sizes: Plans by the shape of the whole tensor.
        dtypes: Plans by dtype.
        boxes: Who claims which box.
        objects: Who holds the object, for a key that is no tensor.
    """

    kinds: dict[str, list[int]] = field(default_factory=dict)
    sizes: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    dtypes: dict[torch.dtype, list[int]] = field(default_factory=dict)
    boxes: dict[Box, list[Claim]] = field(default_factory=dict)
    objects: list[Claim] = field(default_factory=list)

    @property
    def plans(self) -> list[int]:
        """The plans that have the key."""
        return sorted({index for indices in self.kinds.values() for index in indices})


@dataclass(slots=True)
class Agreement:
    """What the checks found.

    Attributes:
        claims: By key.
        faults: What cannot be saved.
        conflicts: Replicas that differ; faults too, unless the user takes them as warnings.
        notes: What is saved but ought to be known.
    """

    claims: dict[str, Claims]
    faults: list[Fault] = field(default_factory=list)
    conflicts: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)


def examine(
    plans: Sequence[SavePlan], witnesses: Sequence[Witness], *, complete: bool = True
) -> Agreement:
    """Check all plans against each other.

    Args:
        plans: One per rank, as the ranks made them, nothing dropped yet.
        witnesses: One per rank.
        complete: Whether these plans are all there are, so that together they must hold every
            element.
    """
    agreement = Agreement(_collect(plans, witnesses))
    checker = _Checker(witnesses, complete)
    for fqn, claims in agreement.claims.items():
        if len(claims.kinds) > 1:
            agreement.faults.append(checker.kind_fault(fqn, claims))
        elif "object" in claims.kinds:
            agreement.notes.extend(checker.object_notes(fqn, claims))
        elif len(claims.sizes) > 1 or len(claims.dtypes) > 1:
            agreement.faults.append(checker.disagreement_fault(fqn, claims))
        else:
            agreement.faults.extend(checker.tiling_faults(fqn, claims))
            agreement.conflicts.extend(checker.content_faults(fqn, claims))
    return agreement


def _collect(plans: Sequence[SavePlan], witnesses: Sequence[Witness]) -> dict[str, Claims]:
    found: dict[str, Claims] = {}
    for index, (plan, told) in enumerate(zip(plans, witnesses, strict=True)):
        digests: Sequence[bytes | None] = told.digests or [None] * len(plan.items)
        for item, digest in zip(plan.items, digests, strict=True):
            claims = found.get(item.index.fqn)
            if claims is None:
                claims = found[item.index.fqn] = Claims()
            if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                _note(claims.kinds, "object", index)
                claims.objects.append((index, digest))
                continue
            data = item.tensor_data
            _note(claims.kinds, "tensor", index)
            _note(claims.sizes, data.size, index)
            _note(claims.dtypes, data.properties.dtype, index)
            box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            claims.boxes.setdefault(box, []).append((index, digest))
    return found


def _note(found: dict[Any, list[int]], value: Any, index: int) -> None:
    known = found.setdefault(value, [])
    if not known or known[-1] != index:
        known.append(index)


class _Checker:
    def __init__(self, witnesses: Sequence[Witness], complete: bool) -> None:
        self.witnesses = witnesses
        self.complete = complete
        self._tiled: dict[tuple[tuple[int, ...], frozenset[Box]], bool] = {}

    def kind_fault(self, fqn: str, claims: Claims) -> Fault:
        return Fault(
            fqn,
            f"is a tensor on {self._ranks(claims.kinds['tensor'])}, but another object on "
            f"{self._ranks(claims.kinds['object'])}",
            ("way out:     give the object a key of its own, or make it a tensor everywhere",),
        )

    def disagreement_fault(self, fqn: str, claims: Claims) -> Fault:
        details = []
        if len(claims.sizes) > 1:
            sizes = {tuple(size): plans for size, plans in claims.sizes.items()}
            told = "; ".join(f"{size} on {self._ranks(plans)}" for size, plans in sizes.items())
            headline = f"the ranks do not agree on the shape of the whole tensor: {told}"
            details += self._shape_details(fqn, sizes, claims)
        else:
            told = "; ".join(
                f"{dtype} on {self._ranks(plans)}" for dtype, plans in claims.dtypes.items()
            )
            headline = f"the ranks do not agree on its dtype: {told}"
            details.append("way out:     cast it to one dtype on all ranks before saving")
        return Fault(fqn, headline, (*details, *self._rule_lines(fqn, claims.plans)))

    def _shape_details(
        self, fqn: str, sizes: dict[tuple[int, ...], list[int]], claims: Claims
    ) -> list[str]:
        details = []
        if len({len(size) for size in sizes}) == 1:
            largest = tuple(max(size[d] for size in sizes) for d in range(len(next(iter(sizes)))))
            holes = uncovered(Box((0,) * len(largest), largest), list(claims.boxes))
            if holes:
                told = ", ".join(format_box(hole, largest) for hole in holes)
                details.append(f"nobody holds {told} of {largest}")
        if any(self.witnesses[plan].rules_of.get(fqn) for plan in claims.plans):
            return [
                *details,
                "likely:      a rule without global_shape= over shards of unequal size: each rank "
                "takes its own size times the axis for the whole",
                "way out:     global_shape= in the rule; where torch.chunk would cut otherwise, "
                "IndexShard(dim, rows), too",
            ]
        details += [
            "likely:      DTensor.from_local() of uneven shards without shape= and stride=, so "
            "that each rank infers a whole of its own; or one name for different tensors on "
            "different ranks (pipeline stages, local expert indices)",
            "way out:     pass shape= and stride= to from_local(); give different tensors "
            "different names (rename=)",
        ]
        return details

    def tiling_faults(self, fqn: str, claims: Claims) -> Iterable[Fault]:
        size = tuple(next(iter(claims.sizes)))
        whole = Box((0,) * len(size), size)
        boxes = [box for box in claims.boxes if box.numel]
        key = (size, frozenset(boxes))
        if key not in self._tiled:
            self._tiled[key] = whole.numel == 0 or tiles(whole, boxes)
        if self._tiled[key]:
            return
        crossing = overlaps(boxes)
        if crossing:
            yield self._overlap_fault(fqn, claims, size, crossing)
        beyond = [
            box for box in boxes if any(o + s > n for o, s, n in zip(*box, size, strict=True))
        ]
        if beyond:
            yield Fault(
                fqn,
                f"{format_box(beyond[0])} lies beyond the whole tensor of shape {size}",
                (f"claimed by   {self._claimants(claims, beyond[0])}",),
            )
        if self.complete and not crossing and not beyond:
            yield self._hole_fault(fqn, claims, whole, boxes)

    def _overlap_fault(
        self,
        fqn: str,
        claims: Claims,
        size: tuple[int, ...],
        crossing: Sequence[tuple[Box, Box]],
    ) -> Fault:
        told = [
            f"{format_box(box, size)} by {self._claimants(claims, box)}"
            for box in dict.fromkeys(box for pair in crossing[:2] for box in pair)
        ]
        return Fault(
            fqn,
            f"ranks claim parts of {size} that overlap without being the same",
            (
                *(f"claimed:     {line}" for line in told),
                "likely:      the same name is sharded on some ranks and whole, or cut otherwise, "
                "on others",
                "way out:     one placement for this name on all ranks, or a name of its own for "
                "each tensor",
                *self._rule_lines(fqn, claims.plans),
            ),
        )

    def _hole_fault(self, fqn: str, claims: Claims, whole: Box, boxes: Sequence[Box]) -> Fault:
        holes = uncovered(whole, boxes)
        held = sum(box.numel for box in boxes)
        having = claims.plans
        details = [
            "missing:     "
            + ", ".join(format_box(hole, whole.sizes) for hole in holes[:4])
            + f" ({prod(whole.sizes) - held} of {whole.numel} elements)",
        ]
        neighbours = self._neighbours(claims, holes[0])
        if neighbours:
            details.append(f"beside it:   {neighbours}")
        lacking = sorted(set(range(len(self.witnesses))) - set(having))
        if lacking:
            details.append(f"the key is on {self._ranks(having)} and not on {self._ranks(lacking)}")
        if held and whole.numel % held == 0:
            factor = whole.numel // held
            axes = [name for name, size in self._axis_sizes().items() if size == factor]
            # Of several, those along which the ranks that lack the key stand elsewhere.
            axes = [name for name in axes if self._apart(name, having, lacking)] or axes
            told = f", the size of axis {' or '.join(map(repr, axes))}" if axes else ""
            details.append(f"likely:      {factor} times too little is held{told}")
        if any(fqn in self.witnesses[plan].row_maps for plan in having):
            if possible_parameters(fqn):
                details += [
                    "likely:      these rows were never stepped, and have no optimizer state; none "
                    "is made up for them",
                    "way out:     a rename= that stacks the parameters and leaves their state a "
                    "tensor per row, as in lambda key: key if '.state.' in key else stack(key)",
                    "             or, if they have state: no rank's IndexShard or rename= names "
                    "these rows",
                ]
            else:
                details.append(
                    "way out:     no rank's IndexShard or rename= names these rows: every row must "
                    "be on one of them"
                )
        else:
            details.append(
                "way out:     save with all ranks that hold a part and with the key on each of "
                "them; where the tensor is not sharded over that axis, drop the axis from its rule"
            )
        return Fault(
            fqn,
            f"nobody holds all of the {whole.sizes} tensor",
            (*details, *self._rule_lines(fqn, having)),
        )

    def _neighbours(self, claims: Claims, hole: Box) -> str:
        grown = Box(
            tuple(offset - 1 for offset in hole.offsets), tuple(size + 2 for size in hole.sizes)
        )
        touching = [
            (box, claim)
            for box, claim in claims.boxes.items()
            if box.numel
            and all(a < b + n and b < a + m for a, m, b, n in zip(*grown, *box, strict=True))
        ]
        return "; ".join(
            f"{format_box(box, None)} of {self._ranks(index for index, _ in claim)}"
            for box, claim in touching[:2]
        )

    def content_faults(self, fqn: str, claims: Claims) -> Iterable[Fault]:
        differing = [(box, told) for box, told in claims.boxes.items() if len(_by_digest(told)) > 1]
        if not differing:
            return
        size = tuple(next(iter(claims.sizes)))
        box, told = differing[0]
        groups = _by_digest(told)
        others = len(differing) - 1
        more = f" (and {others} more place{'s' if others > 1 else ''})" if others else ""
        place = (f"place:       {format_box(box, size)} of {size}{more}",)
        differs, agrees = self._along(groups)
        details = [
            f"content {letter}:   {self._ranks(plans)}{self._positions(plans, differs)}"
            for letter, plans in zip("ABCDEFGH", groups.values(), strict=False)
        ]
        if len(groups) > 8:
            details.append(f"... {len(groups)} different contents in all")
        details += self._content_advice(fqn, size, differs, agrees, claims.plans)
        yield Fault(
            fqn,
            f"{len(groups)} different contents on {len(told)} ranks that claim to be replicas",
            (*details, *self._rule_lines(fqn, claims.plans)),
            place,
        )

    def _content_advice(
        self,
        fqn: str,
        size: tuple[int, ...],
        differs: Sequence[str],
        agrees: Sequence[str],
        plans: Sequence[int],
    ) -> Iterable[str]:
        """Yield where copies differ, the likely cause and the way out."""
        if differs:
            tail = f", agrees along {_quoted(agrees)}" if agrees else ""
            yield f"the copies:  differs along {_quoted(differs)}{tail}"
        declared = self.witnesses[plans[0]].replicated.get(fqn, frozenset())
        renamed = any(part.isdigit() for part in fqn.split("."))
        if not size:
            yield "likely:      a number that each rank counts for itself, under one name"
            yield "way out:     a name per rank (the rank in its key), or one number for all ranks"
        elif differs and declared.issuperset(differs):
            along = _quoted(differs)
            yield (
                f"likely:      replicas that have drifted apart, declared equal along {along}; or "
                f"it is sharded over {along}: it needs a rule with Shard on that axis"
            )
        elif differs:
            yield (
                f"likely:      it is sharded over {_quoted(differs)}: it needs a rule with Shard "
                "on that axis; if these are meant to be replicas, they have drifted apart"
            )
        else:
            renamed = True
            yield (
                "likely:      different tensors under one name: it needs a rule that says how it "
                "is sharded, or a name per rank; if these are meant to be replicas, they have "
                "drifted apart"
            )
        if size:
            yield (
                "way out:     PlacementRules({pattern: CheckpointPlacement(mesh, {axis: "
                "Shard(dim)})})"
            )
            if renamed:
                yield (
                    "             rename= where the name counts from 0 on every rank (experts, "
                    "layers)"
                )
        yield '             on_conflict="warn" saves one of the copies anyway'

    def object_notes(self, fqn: str, claims: Claims) -> Iterable[Fault]:
        groups = _by_digest(claims.objects)
        if len(groups) > 1:
            yield object_note(
                fqn, [[self.witnesses[plan].rank for plan in plans] for plans in groups.values()]
            )

    def _along(self, groups: dict[bytes, list[int]]) -> tuple[list[str], list[str]]:
        """Return the axes that tell the contents apart, and those along which copies agree."""
        content = {plan: digest for digest, plans in groups.items() for plan in plans}
        names = set.intersection(*(set(self.witnesses[plan].positions) for plan in content))
        differs, agrees = [], []
        seen_whole: set[str] = set()
        for name in sorted(names):
            at: dict[int, set[bytes]] = {}
            for plan, digest in content.items():
                at.setdefault(self.witnesses[plan].positions[name], set()).add(digest)
            if len(at) < 2:
                continue
            if all(len(digests) == 1 for digests in at.values()):
                differs.append(name)
                seen_whole |= {name} if len(at) == self._axis_sizes()[name] else set()
            elif any(
                len({self.witnesses[plan].positions[name] for plan in plans}) > 1
                for plans in groups.values()
            ):
                agrees.append(name)
        # An axis of which only some positions are seen may tell them apart by chance.
        return [name for name in differs if name in seen_whole] or differs, agrees

    def _positions(self, plans: Sequence[int], names: Sequence[str]) -> str:
        """Return where ranks stand along axes on which they all stand at one position."""
        told = [f"{name}={self.witnesses[plans[0]].positions[name]}" for name in names]
        return f" ({', '.join(told)})" if told else ""

    def _axis_sizes(self) -> dict[str, int]:
        return {name: size for told in self.witnesses for name, size in told.sizes.items()}

    def _apart(self, name: str, some: Sequence[int], others: Sequence[int]) -> bool:
        """Whether two sets of plans stand at different positions of an axis."""
        at = [
            {self.witnesses[plan].positions.get(name) for plan in plans} for plans in (some, others)
        ]
        return bool(at[1]) and not at[0] & at[1]

    def _claimants(self, claims: Claims, box: Box) -> str:
        return self._ranks(index for index, _ in claims.boxes[box])

    def _ranks(self, plans: Iterable[int]) -> str:
        return format_ranks(self.witnesses[plan].rank for plan in plans)

    def _rule_lines(self, fqn: str, plans: Iterable[int]) -> list[str]:
        rules = {self.witnesses[plan].rules_of.get(fqn) for plan in plans}
        told = sorted(rule or "no rule" for rule in rules)
        return [f"by rule:     {', '.join(told)}"]


def _by_digest(claims: Sequence[Claim]) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    if len(claims) > 1:
        for index, digest in claims:
            if digest is not None:
                found.setdefault(digest, []).append(index)
    return found


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def object_note(fqn: str, groups: Sequence[Sequence[int]]) -> Fault:
    """Return the note on an object that differs between groups of ranks."""
    told = "; ".join(format_ranks(ranks) for ranks in groups[:4])
    more = f" and {len(groups) - 4} more groups" if len(groups) > 4 else ""
    return Fault(
        fqn,
        f"this object differs between {told}{more}; one of them is kept",
        ("way out:     to keep one per rank, put the rank in its key (f'rng.{rank}')",),
    )


def objects_note(names: Sequence[str], ranks: Sequence[int]) -> Fault:
    """Return the note on objects of which some, it is not known which, differ."""
    return Fault(
        names[0],
        f"this object, or others, differ between {format_ranks(ranks)}; one of each is kept",
        (
            f"it is one or more of {len(names)} keys: {format_names(names)}",
            "way out:     to keep one per rank, put the rank in its key (f'rng.{rank}')",
        ),
    )


def nbytes_of(item: WriteItem) -> int:
    """Return the bytes of a write item's chunk; 0 for an object."""
    if item.tensor_data is None:
        return 0
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
