"""The text of what refuses a save: ranks that do not agree, holes, overlaps, conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from dcp_placements.errors import Fault, format_names, format_ranks
from dcp_placements.layout.boxes import (
    as_array,
    as_boxes,
    common,
    format_box,
    format_boxes,
    overlaps,
    uncovered,
    within,
)
from dcp_placements.layout.sharding import Box, Kind
from dcp_placements.save.coordinator.advice import content_advice, hole_advice, renumber_of
from dcp_placements.save.coordinator.contents import Contents
from dcp_placements.save.digest_folding import Digests
from dcp_placements.save.local_plan import LocalPlan, Statement
from dcp_placements.table.table import OBJECT, Group
from dcp_placements.table.world import Piece, World

Ranks = list[int]
"""Positions of local plans."""


@dataclass(slots=True)
class Claims:
    """What the ranks claim of the keys of a piece.

    Attributes:
        groups: The ranks that have them in each group.
        boxes: The ranks that hold each box.
    """

    groups: dict[Group, Ranks] = field(default_factory=dict)
    boxes: dict[Box, Ranks] = field(default_factory=dict)

    @property
    def ranks(self) -> Ranks:
        """The ranks that have the keys."""
        return sorted({rank for ranks in self.groups.values() for rank in ranks})

    def by(self, attribute: str) -> dict[Any, Ranks]:
        """Return the ranks by one attribute of their groups."""
        ranks_by: dict[Any, Ranks] = {}
        for group, ranks in self.groups.items():
            ranks_by.setdefault(getattr(group, attribute), []).extend(ranks)
        return {value: sorted(ranks) for value, ranks in ranks_by.items()}


class Faults:
    """Puts what is wrong with a piece into words: the work is that of a piece, not of a key.

    Args:
        world: What the ranks hold.
        contents: Their digests.
        plans: Their plans.
        statements: What they say beside them.
        size: Number of ranks that there are.
    """

    def __init__(
        self,
        world: World,
        contents: Contents,
        plans: Sequence[LocalPlan],
        statements: Sequence[Statement],
        size: int,
    ) -> None:
        self.world = world
        self.contents = contents
        self.plans = plans
        self.statements = statements
        self.size = size

    def _claims(self, piece: Piece) -> Claims:
        claims = Claims()
        for source in piece.sources:
            members = self.world.members[source.table].tolist()
            claims.groups.setdefault(source.group, []).extend(members)
        # Rows by rows: tables may disagree on the number of dims.
        for rows in piece.rows:
            for rank, box in zip(rows.ranks.tolist(), as_boxes(rows.boxes), strict=True):
                claims.boxes.setdefault(box, []).append(rank)
        return claims

    def _by_rules(self, piece: Piece) -> dict[tuple[str, ...], list[str]]:
        """Return the keys of a piece by the names of the rules that match them on the ranks."""
        columns = []
        for source in piece.sources:
            table = self.world.tables[source.table]
            start = table.starts[source.number]
            columns.append([table.rule(start + at) or _NO_RULE for at in source.positions])
        keys: dict[tuple[str, ...], list[str]] = {}
        for fqn, rules in zip(piece.fqns, zip(*columns, strict=True), strict=True):
            keys.setdefault(tuple(sorted(set(rules))), []).append(fqn)
        return keys

    def disagreement(self, piece: Piece) -> list[Fault]:
        """Return that tables say different things of the keys of a piece, if they do."""
        groups = [source.group for source in piece.sources]
        if len({(g.kind == OBJECT, g.shape, g.dtype) for g in groups}) == 1:
            return []
        claims, found = self._claims(piece), []
        for rules, fqns in self._by_rules(piece).items():
            headline, details = self._disagreement(claims, rules)
            found += [Fault(fqn, headline, details) for fqn in fqns]
        return found

    def tiling(self, piece: Piece, *, complete: bool) -> list[Fault]:
        """Return why the boxes of a piece do not make the whole of its tensors.

        Args:
            piece: The piece.
            complete: Whether the plans are all there are.
        """
        claims, shape = self._claims(piece), piece.group.shape
        boxes = [box for box in claims.boxes if box.numel]
        array = as_array(boxes, len(shape))
        crossing = [(boxes[one], boxes[other]) for one, other in overlaps(array)]
        beyond = as_boxes(array[~within(Box.whole(shape), array)])
        texts: list[tuple[str, tuple[str, ...]]] = []
        if crossing:
            texts.append(self._overlap(claims, shape, crossing))
        hole = None
        if complete and not crossing and not beyond:
            hole = self._hole(claims, Box.whole(shape), boxes, piece.group)
        listed = any(cut.kind is Kind.LISTED for group in claims.groups for cut in group.cuts)
        found = []
        for rules, fqns in self._by_rules(piece).items():
            line = _rule_line(rules)
            for fqn in fqns:
                found += [Fault(fqn, text, (*details, line)) for text, details in texts]
                if beyond:
                    text = f"{format_box(beyond[0])} lies beyond the whole tensor of shape {shape}"
                    by = (f"claimed by   {self._claimants(claims, beyond[0])}",)
                    found.append(Fault(fqn, text, by))
                if hole is not None:
                    text = f"nobody holds all of the {shape} tensor"
                    advice = hole_advice(fqn, listed)
                    found.append(Fault(fqn, text, (*hole, *advice, line)))
        return found

    def conflicts(self, piece: Piece, positions: Sequence[int]) -> list[Fault]:
        """Return that ranks hold one box of keys with different contents.

        Args:
            piece: The piece.
            positions: Of the keys that differ.
        """
        rules_of = {fqn: rules for rules, fqns in self._by_rules(piece).items() for fqn in fqns}
        # Most keys that differ do so between the same ranks.
        known: dict[bytes, _Conflict] = {}
        found = []
        for position, column in zip(positions, self.contents.own(piece, positions).T, strict=True):
            kinds = np.unique(column, return_inverse=True)[1]
            key = kinds.tobytes() + (column == 0).tobytes()
            if key not in known:
                known[key] = self._conflict(piece, column)
            fqn, one = piece.fqns[position], known[key]
            advice = content_advice(fqn, piece.group, one.differs, one.agrees)
            details = (*one.details, *advice, _rule_line(rules_of[fqn]))
            found.append(Fault(fqn, one.headline, details, (one.place,)))
        return found

    def _conflict(self, piece: Piece, digests: Digests) -> _Conflict:
        cover, shape = piece.cover, piece.group.shape
        ordered = digests[cover.order].tolist()
        ranks = cover.ranks[cover.order].tolist()
        differing = []
        for box, (start, stop) in enumerate(pairwise(cover.starts.tolist())):
            groups = _ranks_by(ordered[start:stop], ranks[start:stop])
            if len(groups) > 1:
                differing.append((box, groups))
        box, groups = differing[0]
        count = len({rank for members in groups.values() for rank in members})
        others = len(differing) - 1
        more = f" (and {others} more place{'s' if others > 1 else ''})" if others else ""
        differs, agrees = self._along(groups)
        details = [
            f"content {letter}:   {self._ranks(members)}{self._positions(members, differs)}"
            for letter, members in zip("ABCDEFGH", groups.values(), strict=False)
        ]
        if len(groups) > 8:
            details.append(f"... {len(groups)} different contents in all")
        (text,) = as_boxes(cover.boxes[[box]])
        return _Conflict(
            f"{len(groups)} different contents on {count} ranks that claim to be replicas",
            f"place:       {format_box(text, shape)} of {shape}{more}",
            details,
            differs,
            agrees,
        )

    def suspicion(self, fqns: Sequence[str], plans: Sequence[int]) -> Fault:
        """Return that one or more keys of a group have different contents on some ranks."""
        return Fault(
            fqns[0],
            f"this key, or others of its group, have different contents on {self._ranks(plans)}, "
            "which claim to be replicas",
            (
                *_one_or_more(fqns),
                f"likely:      {_lacking(fqns[0])} is missing; or the replicas have drifted apart",
                "way out:     dcp_placements.check(state_dict, rules) compares key by key",
                'by rule:     on_conflict="warn" saves one of the copies anyway',
            ),
        )

    def undigested(self, fqn: str, plans: Sequence[int]) -> Fault:
        """Return that the contents of a key cannot be read on some ranks."""
        return Fault(
            fqn,
            f"is not compared between {self._ranks(plans)} and the other ranks that hold it",
            (
                "reason:      there it is sparse, or of a class whose parts cannot be read: one "
                "copy is kept, whatever the others hold",
                "way out:     make sure that its copies are equal, or store its plain tensors",
            ),
        )

    def same_coordinate(self, piece: Piece, box: int) -> Fault:
        """Return that ranks hold equal boxes though the mesh has a part for each of them."""
        cover = piece.cover
        rules = next(iter(self._by_rules(piece)))
        return Fault(
            piece.fqns[0],
            f"{self._ranks(cover.holders(box).tolist())} hold the same part, "
            f"{format_boxes(as_boxes(cover.boxes[[box]]), piece.group.shape)}, though its mesh "
            "has a part for every rank",
            (
                "likely:      these ranks give the mesh of one another: get_coordinate() is the "
                "same on them",
                "way out:     on every rank the mesh as that rank sees it",
                _rule_line(rules),
            ),
        )

    def object_note(self, piece: Piece, position: int) -> Fault:
        """Return that an object differs between ranks."""
        digests = self.contents.own(piece, [position])[:, 0].tolist()
        groups = _ranks_by(digests, piece.ranks.tolist())
        holders = "; ".join(self._ranks(ranks) for ranks in list(groups.values())[:4])
        more = f" and {len(groups) - 4} more groups" if len(groups) > 4 else ""
        kept = self._ranks([int(piece.ranks.min())])
        return _object_fault([piece.fqns[position]], holders + more, kept)

    def object_suspicion(self, fqns: Sequence[str], plans: Sequence[int]) -> Fault:
        """Return that one or more of some objects differ between ranks."""
        return _object_fault(fqns, self._ranks(plans), "the lowest rank")

    def _disagreement(self, claims: Claims, rules: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        kinds: dict[bool, Ranks] = {}
        for kind, ranks in claims.by("kind").items():
            kinds.setdefault(kind == OBJECT, []).extend(ranks)
        if len(kinds) > 1:
            headline = (
                f"is a tensor on {self._ranks(kinds[False])}, but another object on "
                f"{self._ranks(kinds[True])}"
            )
            way_out = (
                "way out:     give the object a key of its own, or make it a tensor everywhere"
            )
            return headline, (way_out,)
        shapes, dtypes = claims.by("shape"), claims.by("dtype")
        if len(shapes) > 1:
            text = "; ".join(f"{shape} on {self._ranks(by)}" for shape, by in shapes.items())
            headline = f"the ranks do not agree on the shape of the whole tensor: {text}"
            details = self._shape_details(claims, rules, list(shapes))
        else:
            text = "; ".join(f"{dtype} on {self._ranks(by)}" for dtype, by in dtypes.items())
            headline = f"the ranks do not agree on its dtype: {text}"
            details = ["way out:     cast it to one dtype on all ranks before saving"]
        return headline, (*details, _rule_line(rules))

    def _shape_details(
        self, claims: Claims, rules: tuple[str, ...], shapes: Sequence[tuple[int, ...]]
    ) -> list[str]:
        has_rule = rules != (_NO_RULE,)
        unlike_dims = sum(len(set(sizes)) > 1 for sizes in zip(*shapes, strict=False))
        if len(rules) > 1 or (has_rule and unlike_dims > 1):
            advice = [
                "likely:      the ranks have different rules for it",
                "way out:     the same rules on every rank",
            ]
        elif has_rule:
            advice = [
                "likely:      a rule without global_shape= over shards of unequal size: each rank "
                "takes its own size times the axis for the whole",
                "way out:     global_shape= in the rule; where torch.chunk would cut otherwise, "
                "IndexShard(dim, rows), too",
            ]
        else:
            advice = [
                "likely:      DTensor.from_local() of uneven shards without shape= and stride=, so "
                "that each rank infers a whole of its own; or one name for different tensors on "
                "different ranks (pipeline stages, local expert indices)",
                "way out:     pass shape= and stride= to from_local(); give different tensors "
                "different names (rename=)",
            ]
        if len({len(shape) for shape in shapes}) == 1:
            largest = tuple(map(max, zip(*shapes, strict=True)))
            holes = uncovered(Box.whole(largest), as_array(claims.boxes, len(largest)))
            if holes:
                advice.insert(0, f"nobody holds {format_boxes(holes, largest)}")
        return advice

    def _overlap(
        self, claims: Claims, shape: tuple[int, ...], crossing: Sequence[tuple[Box, Box]]
    ) -> tuple[str, tuple[str, ...]]:
        claimed = [
            f"{format_box(box, shape)} by {self._claimants(claims, box)}"
            for box in dict.fromkeys(box for pair in crossing[:2] for box in pair)
        ]
        return (
            f"ranks claim parts of {shape} that overlap without being the same",
            (
                *(f"claimed:     {line}" for line in claimed),
                "likely:      the same name is sharded on some ranks and whole, or cut otherwise, "
                "on others",
                "way out:     one placement for this name on all ranks, or a name of its own for "
                "each tensor",
            ),
        )

    def _hole(self, claims: Claims, whole: Box, boxes: Sequence[Box], group: Group) -> list[str]:
        holes = uncovered(whole, as_array(boxes, len(whole.sizes)))
        held = sum(box.numel for box in boxes)
        having = claims.ranks
        details = [
            "missing:     "
            + ", ".join(format_box(hole, whole.sizes) for hole in holes[:4])
            + f" ({whole.numel - held} of {whole.numel} elements)",
        ]
        neighbours = self._neighbours(claims, holes[0])
        if neighbours:
            details.append(f"beside it:   {neighbours}")
        lacking = sorted(set(range(len(self.plans))) - set(having))
        if lacking:
            details.append(f"the key is on {self._ranks(having)} and not on {self._ranks(lacking)}")
        likely = None if lacking else self._too_few_ranks(group)
        if likely is not None:
            details.append(likely)
        elif held and whole.numel % held == 0:
            factor = whole.numel // held
            axes = [name for name, size in self._axis_sizes().items() if size == factor]
            # Of several, those along which the ranks that lack the key stand elsewhere.
            axes = [name for name in axes if self._apart(name, having, lacking)] or axes
            text = f", the size of axis {' or '.join(map(repr, axes))}" if axes else ""
            details.append(f"likely:      {factor} times too little is held{text}")
        return details

    def _too_few_ranks(self, group: Group) -> str | None:
        """Return that the cuts make more parts than there are ranks; None where they do not."""
        ranks, world = len(self.plans), self.size
        axes = {cut.axis: cut.size for cut in group.cuts if cut.axis is not None}
        if prod(axes.values()) <= ranks:
            return None
        sizes = " and ".join(f"{name!r} of size {size}" for name, size in axes.items())
        parts = f"likely:      {sizes} need {prod(axes.values())} ranks"
        if ranks < world:
            return f"{parts}, and {ranks} of {world} take part in this save"
        return f"{parts}, and there are {world}: two meshes whose axes are not independent"

    def _neighbours(self, claims: Claims, hole: Box) -> str:
        grown = Box(tuple([o - 1 for o in hole.offsets]), tuple([n + 2 for n in hole.sizes]))
        touching = [(box, held) for box, held in claims.boxes.items() if common(grown, box)]
        return "; ".join(
            f"{format_box(box, None)} of {self._ranks(held)}" for box, held in touching[:2]
        )

    def _along(self, groups: dict[int, Ranks]) -> tuple[list[str], list[str]]:
        """Return the axes that tell the contents apart, and those along which copies agree."""
        content = {plan: digest for digest, plans in groups.items() for plan in plans}
        names = set.intersection(*(set(self._coordinate(plan)) for plan in content))
        differs, agrees = [], []
        seen_whole: set[str] = set()
        for name in sorted(names):
            at: dict[int, set[int]] = {}
            for plan, digest in content.items():
                at.setdefault(self._coordinate(plan)[name], set()).add(digest)
            if len(at) < 2:
                continue
            if all(len(digests) == 1 for digests in at.values()):
                differs.append(name)
                seen_whole |= {name} if len(at) == self._axis_sizes()[name] else set()
            elif any(
                len({self._coordinate(plan)[name] for plan in plans}) > 1
                for plans in groups.values()
            ):
                agrees.append(name)
        # An axis of which only some positions are seen may tell them apart by chance.
        return [name for name in differs if name in seen_whole] or differs, agrees

    def _positions(self, plans: Sequence[int], names: Sequence[str]) -> str:
        """Return where ranks stand along axes on which they all stand at one position."""
        positions = [f"{name}={self._coordinate(plans[0])[name]}" for name in names]
        return f" ({', '.join(positions)})" if positions else ""

    def _coordinate(self, plan: int) -> dict[str, int]:
        names = self.statements[plan].axis_sizes
        return dict(zip(names, self.plans[plan].coordinate, strict=True))

    def _axis_sizes(self) -> dict[str, int]:
        return dict(size for one in self.statements for size in one.axis_sizes.items())

    def _apart(self, name: str, some: Sequence[int], others: Sequence[int]) -> bool:
        """Whether two sets of plans stand at different positions of an axis."""
        at = [{self._coordinate(plan).get(name) for plan in plans} for plans in (some, others)]
        return bool(at[1]) and not at[0] & at[1]

    def _claimants(self, claims: Claims, box: Box) -> str:
        return self._ranks(claims.boxes[box])

    def _ranks(self, plans: Iterable[int]) -> str:
        return format_ranks(self.plans[plan].rank for plan in plans)


class _Conflict(NamedTuple):
    """What is said of keys with different contents."""

    headline: str
    place: str
    details: list[str]
    differs: list[str]
    agrees: list[str]


_NO_RULE = "no rule"


def _rule_line(rules: Sequence[str]) -> str:
    return f"by rule:     {', '.join(rules)}"


def _ranks_by(digests: Sequence[int], ranks: Sequence[int]) -> dict[int, Ranks]:
    """Return the ranks by the digest of what they hold, where several hold something."""
    ranks_by: dict[int, Ranks] = {}
    for digest, rank in zip(digests, ranks, strict=True) if len(ranks) > 1 else ():
        if digest:
            ranks_by.setdefault(digest, []).append(rank)
    return ranks_by


def _lacking(fqn: str) -> str:
    shard = "a rule with Shard on an axis"
    renumber = renumber_of(fqn)
    return shard if renumber is None else f"{renumber}, or {shard},"


def _object_fault(fqns: Sequence[str], ranks: str, kept: str) -> Fault:
    which = (
        f"this object differs between {ranks}; that of {kept} is kept"
        if len(fqns) == 1
        else f"this object, or others, differ between {ranks}; those of {kept} are kept"
    )
    advice = (
        "likely:      a state of each rank's own (random numbers, a position in the data); or a "
        "step or schedule that should be equal, and is not",
        "way out:     to keep one per rank, put the rank in its key (f'rng.{rank}'); otherwise "
        "make it equal on all ranks before the save",
    )
    return Fault(fqns[0], which, (*_one_or_more(fqns), *advice))


def _one_or_more(fqns: Sequence[str]) -> Iterable[str]:
    """Yield the keys among which some differ; nothing where there is no doubt which."""
    if len(fqns) > 1:
        yield f"it is one or more of {len(fqns)} keys: {format_names(fqns)}"
