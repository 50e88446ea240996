"""The text of what refuses a save: ranks that do not agree, holes, overlaps, conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

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
from dcp_placements.save.coordinator.claims import Claims, Plans, claims_of, plans_by_digest
from dcp_placements.save.coordinator.cohorts import Cohorts
from dcp_placements.save.coordinator.pieces import Piece
from dcp_placements.save.key_table import OBJECT, Group
from dcp_placements.save.local_plan import LocalPlan
from dcp_placements.save.rank_notes import Statement


class Faults:
    """Puts what is wrong with a piece into words."""

    def __init__(self, cohorts: Cohorts, statements: Sequence[Statement], complete: bool) -> None:
        self.cohorts = cohorts
        self.plans: Sequence[LocalPlan] = cohorts.plans
        self.statements = statements
        self.complete = complete

    def disagreement(self, piece: Piece) -> list[Fault]:
        """Return that tables say different things of the keys of a piece, if they do."""
        groups = [source.group for source in piece.sources]
        if len({(g.kind == OBJECT, g.shape, g.dtype) for g in groups}) == 1:
            return []
        return [
            self._disagreement(claims_of(self.cohorts, piece, at)) for at in range(len(piece.fqns))
        ]

    def tiling(self, piece: Piece) -> list[Fault]:
        """Return why the boxes of a piece do not make the whole of its tensors."""
        claims = claims_of(self.cohorts, piece, 0)
        shape = piece.group.shape
        whole = Box.whole(shape)
        boxes = [box for box in claims.boxes if box.numel]
        array = as_array(boxes, len(shape))
        crossing = [(boxes[one], boxes[other]) for one, other in overlaps(array)]
        beyond = as_boxes(array[~within(whole, array)])
        found = []
        for fqn in piece.fqns:
            claims.fqn = fqn
            if crossing:
                found.append(self._overlap(claims, shape, crossing))
            if beyond:
                found.append(
                    Fault(
                        fqn,
                        f"{format_box(beyond[0])} lies beyond the whole tensor of shape {shape}",
                        (f"claimed by   {self._claimants(claims, beyond[0])}",),
                    )
                )
            if self.complete and not crossing and not beyond:
                found.append(self._hole(claims, whole, boxes, piece.group))
        return found

    def conflict(self, piece: Piece, position: int) -> Fault:
        """Return that ranks hold one box of a key with different contents."""
        claims = claims_of(self.cohorts, piece, position)
        differing = [
            (box, found)
            for box, held in claims.boxes.items()
            if len(found := plans_by_digest(held)) > 1
        ]
        box, groups = differing[0]
        shape, others = piece.group.shape, len(differing) - 1
        count = len({plan for plans in groups.values() for plan in plans})
        more = f" (and {others} more place{'s' if others > 1 else ''})" if others else ""
        differs, agrees = self._along(groups)
        details = [
            f"content {letter}:   {self._ranks(plans)}{self._positions(plans, differs)}"
            for letter, plans in zip("ABCDEFGH", groups.values(), strict=False)
        ]
        if len(groups) > 8:
            details.append(f"... {len(groups)} different contents in all")
        details += content_advice(claims.fqn, piece.group, differs, agrees)
        headline = f"{len(groups)} different contents on {count} ranks that claim to be replicas"
        return Fault(
            claims.fqn,
            headline,
            (*details, *self._rule_lines(claims)),
            (f"place:       {format_box(box, shape)} of {shape}{more}",),
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
        claims, cover = claims_of(self.cohorts, piece, 0), piece.cover
        return Fault(
            piece.fqns[0],
            f"{self._ranks(cover.holders(box).tolist())} hold the same part, "
            f"{format_boxes(as_boxes(cover.boxes[[box]]), piece.group.shape)}, though its mesh "
            "has a part for every rank",
            (
                "likely:      these ranks give the mesh of one another: get_coordinate() is the "
                "same on them",
                "way out:     on every rank the mesh as that rank sees it",
                *self._rule_lines(claims),
            ),
        )

    def object_note(self, piece: Piece, position: int) -> Fault:
        """Return that an object differs between ranks."""
        claims = claims_of(self.cohorts, piece, position)
        groups = plans_by_digest([one for held in claims.boxes.values() for one in held])
        holders = "; ".join(self._ranks(plans) for plans in list(groups.values())[:4])
        more = f" and {len(groups) - 4} more groups" if len(groups) > 4 else ""
        return _object_fault([claims.fqn], holders + more, self._ranks([min(claims.plans)]))

    def object_suspicion(self, fqns: Sequence[str], plans: Sequence[int]) -> Fault:
        """Return that one or more of some objects differ between ranks."""
        return _object_fault(fqns, self._ranks(plans), "the lowest rank")

    def _disagreement(self, claims: Claims) -> Fault:
        kinds: dict[bool, Plans] = {}
        for kind, plans in claims.by("kind").items():
            kinds.setdefault(kind == OBJECT, []).extend(plans)
        if len(kinds) > 1:
            return Fault(
                claims.fqn,
                f"is a tensor on {self._ranks(kinds[False])}, but another object on "
                f"{self._ranks(kinds[True])}",
                ("way out:     give the object a key of its own, or make it a tensor everywhere",),
            )
        shapes, dtypes = claims.by("shape"), claims.by("dtype")
        if len(shapes) > 1:
            text = "; ".join(f"{shape} on {self._ranks(plans)}" for shape, plans in shapes.items())
            headline = f"the ranks do not agree on the shape of the whole tensor: {text}"
            details = self._shape_details(claims, list(shapes))
        else:
            text = "; ".join(f"{dtype} on {self._ranks(plans)}" for dtype, plans in dtypes.items())
            headline = f"the ranks do not agree on its dtype: {text}"
            details = ["way out:     cast it to one dtype on all ranks before saving"]
        return Fault(claims.fqn, headline, (*details, *self._rule_lines(claims)))

    def _shape_details(self, claims: Claims, shapes: Sequence[tuple[int, ...]]) -> list[str]:
        rules = self._rules_of(claims)
        unlike_dims = sum(len(set(sizes)) > 1 for sizes in zip(*shapes, strict=False))
        if len(rules) > 1 or (any(rules) and unlike_dims > 1):
            advice = [
                "likely:      the ranks have different rules for it",
                "way out:     the same rules on every rank",
            ]
        elif any(rules):
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
    ) -> Fault:
        claimed = [
            f"{format_box(box, shape)} by {self._claimants(claims, box)}"
            for box in dict.fromkeys(box for pair in crossing[:2] for box in pair)
        ]
        return Fault(
            claims.fqn,
            f"ranks claim parts of {shape} that overlap without being the same",
            (
                *(f"claimed:     {line}" for line in claimed),
                "likely:      the same name is sharded on some ranks and whole, or cut otherwise, "
                "on others",
                "way out:     one placement for this name on all ranks, or a name of its own for "
                "each tensor",
                *self._rule_lines(claims),
            ),
        )

    def _hole(self, claims: Claims, whole: Box, boxes: Sequence[Box], group: Group) -> Fault:
        holes = uncovered(whole, as_array(boxes, len(whole.sizes)))
        held = sum(box.numel for box in boxes)
        having = claims.plans
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
        listed = any(cut.kind is Kind.LISTED for group in claims.groups for cut in group.cuts)
        details += hole_advice(claims.fqn, listed)
        return Fault(
            claims.fqn,
            f"nobody holds all of the {whole.sizes} tensor",
            (*details, *self._rule_lines(claims)),
        )

    def _too_few_ranks(self, group: Group) -> str | None:
        """Return that the cuts make more parts than there are ranks; None where they do not."""
        ranks, world = len(self.plans), self.cohorts.world
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
            f"{format_box(box, None)} of {self._ranks(plan for plan, _ in held)}"
            for box, held in touching[:2]
        )

    def _along(self, groups: dict[int, Plans]) -> tuple[list[str], list[str]]:
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
        return self._ranks(plan for plan, _ in claims.boxes[box])

    def _ranks(self, plans: Iterable[int]) -> str:
        return format_ranks(self.plans[plan].rank for plan in plans)

    def _rules_of(self, claims: Claims) -> set[str | None]:
        tables = [table for table in self.cohorts.tables if claims.fqn in table.fqns]
        return {table.rules[table.rule_of[table.fqns.index(claims.fqn)]] for table in tables}

    def _rule_lines(self, claims: Claims) -> list[str]:
        rules = sorted(rule or "no rule" for rule in self._rules_of(claims))
        return [f"by rule:     {', '.join(rules)}"]


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
