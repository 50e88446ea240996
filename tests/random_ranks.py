"""What each rank of a random world holds, and what it tells the planners."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FlatShard,
    FusedShard,
    IndexShard,
    MeshCoordinate,
    PlacementRules,
    RaggedShard,
    Renames,
    Renumber,
    Replace,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, cut, real_dtensor
from dcp_placements.testing.reference import numbered
from tests.differential import (
    Rows,
    Wholes,
    elements,
    groups_of,
    in_memory,
    key_of,
    middles,
    name_of,
    units,
)
from tests.listed_tensors import annotate, tiled, tiles_of
from tests.random_worlds import Cutting, Family, Hold, Ids, Level, Pair, Picks, Side


@dataclass
class Value:
    """A tensor of a rank: its key there, what the dict holds, and which elements of what it is.

    Attributes:
        key: On the rank.
        value: What the state dict holds.
        local: Its elements.
        of: Family and state; None for an optimizer step.
        numbers: Of the elements, in the whole.
        padding: What is where there is no number.
        family: Of which.
        row: The numbers by level that its name in the checkpoint has.
        ambiguous: Whether it is a moment of size 1 where its parameter has one row of several, and
            nothing but their shapes says how it is cut.
    """

    key: str
    value: Any
    local: torch.Tensor
    of: tuple[str, str] | None
    numbers: torch.Tensor | None
    padding: int
    family: str = ""
    row: Mapping[str, int] = field(default_factory=dict)
    ambiguous: bool = False


@dataclass(frozen=True)
class Respelled:
    """A user's function that spells a component otherwise: a rename that the library cannot see."""

    component: str
    by: str

    def __call__(self, key: str) -> str:
        return ".".join([self.by if c == self.component else c for c in key.split(".")])


class Rank:
    """What one rank of a side holds, and what it tells the planners."""

    def __init__(self, pair: Pair, side: Side, rank: int) -> None:
        self.pair, self.side, self.rank = pair, side, rank
        self.families = list(zip(pair.families, side.holds, strict=True))

    def mesh(self, hold: Hold) -> FakeMesh:
        of = self.side.meshes[hold.mesh]
        return FakeMesh(of.sizes, of.names, rank=self.rank, ranks=torch.tensor(of.ranks))

    def position(self, hold: Hold, axis: str) -> int:
        at = self.mesh(hold).get_coordinate() or []
        return at[self.side.meshes[hold.mesh].names.index(axis)]

    def ids(self, hold: Hold, ids: Ids) -> tuple[tuple[int, ...], ...]:
        """Return its rows of a level, by the number on the level outside or for all of them."""
        return ids.rows[0 if ids.axis is None else self.position(hold, ids.axis)]

    def words(self, family: Family, hold: Hold, more: int = 0) -> dict[str, str]:
        """Return the components that this rank spells otherwise, by the checkpoint's.

        Args:
            family: Of which.
            hold: How the ranks hold it.
            more: Which of the further names; 0 for none of them.
        """
        spelled = {}
        for detour in hold.detours:
            of = "" if detour.word == family.name else f"_{family.name}"
            head = f"pp{self.rank}" if detour.how in ("rank", "any") else "ranks"
            spelled[detour.word] = f"{head}_{detour.word}{of}"
        if more:
            spelled[family.name] = f"more{more}_{spelled.get(family.name, family.name)}"
        return spelled

    def rows(self, family: Family, hold: Hold) -> Rows:
        found: Rows = {}
        for at, (level, ids) in enumerate(zip(family.levels, hold.ids, strict=True)):
            if ids is not None:
                mine = self.ids(hold, ids)
                outside = family.levels[at + 1].word if len(mine) > 1 else None
                found[level.word] = lambda row, mine=mine, outside=outside: mine[
                    row[outside] if outside else 0
                ]
        return found

    def values(self, whole: Wholes, *, step: float | None = None) -> Iterator[Value]:
        """Yield its tensors, cut of ``whole``."""
        for family, hold in self.families:
            if hold.stage and self.position(hold, hold.stage[0]) not in hold.stage[1]:
                continue
            rows, mesh = self.rows(family, hold), self.mesh(hold)
            names = middles(family, by_parts=hold.parts)
            for row, at, states in units(family, rows, by_parts=hold.parts):
                own = dict(row)
                for level, ids in zip(family.levels, hold.ids, strict=True):
                    if ids is not None and ids.renumbered:
                        own[level.word] = list(rows[level.word](row)).index(row[level.word])
                for more in range(1 if hold.tied else hold.more_names + 1):
                    words = self.words(family, hold, more)
                    name = name_of(family, own, names[at], words)
                    for state, part_of_it in states.items():
                        cutting = reduced(hold.cuts[at], states[""].shape, part_of_it.shape)
                        if state and hold.ranges:
                            cutting = hold.ranges[at]
                        held = _Held(part_of_it, cutting, mesh, hold.turn(family))
                        key = key_of(self.pair, name, state)
                        padding = zlib.crc32(key.encode()) + self.rank
                        value = held.value(key, whole, (family.name, state), padding)
                        if cutting.kind == "listed" and not (state and hold.follows):
                            annotate(value.value, held.whole_shape, held.chunks)
                        if not state:
                            left = held.shape
                        ambiguous = any(
                            part_of_it.shape[dim] != size and left[dim] == 1
                            for dim, size in enumerate(states[""].shape)
                        )
                        value = replace(value, family=family.name, row=row, ambiguous=ambiguous)
                        yield value
                        for other in range(1, hold.more_names + 1) if hold.tied else ():
                            if not state:
                                words = self.words(family, hold, other)
                                yield replace(value, key=self._key(family, own, names[at], words))
                    for scalar, number in family.numbers.items():
                        tensor = torch.tensor(number if step is None else step)
                        key = key_of(self.pair, name, scalar)
                        yield Value(key, tensor, tensor, None, None, 0, family.name, row)

    def _key(
        self, family: Family, numbers: Mapping[str, Any], middle: str, words: Mapping[str, str]
    ) -> str:
        return key_of(self.pair, name_of(family, numbers, middle, words), "")

    def state_dict(self, values: list[Value], *, blank: bool) -> dict[str, Any]:
        """Return tensors and objects, nested as the side has them."""
        state: dict[str, Any] = {}
        for key, value in self.objects(values).items():
            # The parameters of a group are those of this rank, also before a load.
            put(state, self.path(key), None if blank and not key.endswith(".params") else value)
        for value in values:
            put(state, self.path(value.key), value.value)
        return state

    def objects(self, values: list[Value]) -> dict[str, Any]:
        state = f"{self.pair.prefixes[1]}.state."
        named = [v.key.rpartition(".")[0] for v in values if v.of is None or v.of[1]]
        names = [name.removeprefix(state) for name in dict.fromkeys(named)]
        return {**dict(self.pair.objects), **groups_of(self.pair, names)}

    def path(self, key: str) -> list[str]:
        """Return where a key stands in the side's nested dict."""
        names = key.split(".")
        inside = {"flat": 0, "top": 1, "deep": len(names) - 1}.get(self.side.nesting)
        if inside is None:
            inside = zlib.crc32(key.encode()) % len(names)
        inside = min(inside, len(names) - 1)
        return [*names[:inside], ".".join(names[inside:])]

    # What it tells the planners

    def rename(self) -> Any:
        steps = [step for family, hold in self.families for step in self._steps(family, hold)]
        if not steps:
            return None
        # A pattern of one rank may match nothing there.
        own = any(d.how == "rank" for _, hold in self.families for d in hold.detours)
        rename = Renames(*steps, optional=own) if len(steps) > 1 or own else steps[0]
        return (lambda key: rename(key)) if self.side.wrapped else rename

    def _steps(self, family: Family, hold: Hold) -> Iterator[Any]:
        words, late = self.words(family, hold), []
        for detour in hold.detours:
            if detour.how == "any":
                words[detour.word] = words[detour.word].replace(f"pp{self.rank}_", "pp*_", 1)
        yield from _shared(family, hold, words, self.words(family, hold))
        yield from _transpose(family, hold, "first", words)
        for detour in hold.detours:
            function = detour.how == "function"
            step = (Respelled if function else Replace)(words[detour.word], detour.word)
            if detour.last:
                late.append(step)
            else:
                del words[detour.word]
                yield step
        yield from _transpose(family, hold, "early", words)
        levels = list(zip(family.levels, hold.ids, strict=True))
        for at, (level, ids) in reversed(list(enumerate(levels))):
            if ids is None or not ids.renumbered:
                continue
            numbers = [_range(mine, ids.disjoint) for mine in self.ids(hold, ids)]
            pattern, total = _pattern(family, level, words), level.total if ids.total else None
            if len(numbers) > 1:
                outside = family.levels[at + 1].word
                pattern = _pattern(family, level, words, outside)
            orders = [numbers]
            if ids.twice:
                orders = [
                    [[*range(len(mine))][::-1] for mine in numbers],
                    [m[::-1] for m in numbers],
                ]
            for order in orders:
                given = order[0] if len(order) == 1 else dict(enumerate(order))
                yield Renumber(pattern, given, total if order is orders[-1] else None)
        labels = _labels(family, hold)
        for level, ids in levels:
            if ids is not None and level.stacked:
                labels = [label for label in family.labels if label in (*labels, level.word)]
                pattern = _pattern(family, level, words)
                yield Stack(pattern, level.total, dim=labels.index(level.word))
        for level, ids in levels:
            if ids is None and not level.stacked:
                yield Unstack(_pattern(family, level, words), dim=labels.index(level.word))
                labels.remove(level.word)
        yield from _transpose(family, hold, "middle", words)
        if family.split and not hold.parts:
            yield _split(family, hold, labels)
        yield from late
        yield from _transpose(family, hold, "last", {})

    def rules(self) -> Any:
        """Return the side's rules, as patterns or as a callable; None where none speaks."""
        known = [rule for family, hold in self.families for rule in self._rules(family, hold)]
        if not known:
            return None
        if self.side.rules == "patterns":
            return PlacementRules(
                {regex if follows else name: make() for name, regex, follows, make in known}
            )
        ready = [(regex, make, make()) for _, regex, _, make in known]

        def rules(fqn: str, tensor: Any) -> CheckpointPlacement | None:
            for regex, make, placement in ready:
                if regex.search(fqn):
                    return make() if self.side.rules == "new" else placement
            return None

        return rules

    def _rules(self, family: Family, hold: Hold) -> Iterator[tuple[Any, ...]]:
        """Yield pattern, regular expression, whether moments follow, and what makes a placement."""
        named = {
            level.word: "*"
            for level, ids in zip(family.levels, hold.ids, strict=True)
            if ids is not None and not level.stacked
        }
        labels = [label for label in family.labels if label not in named]
        inner = _labels(family, hold)
        sizes = dict(zip(family.labels, family.shape, strict=True))
        along = {
            ids.axis: Shard(labels.index(level.word))
            for level, ids in zip(family.levels, hold.ids, strict=True)
            if ids is not None and ids.axis is not None and level.stacked and hold.redundant
        }
        # A rule for the moments alone stands above that of the parameter.
        cuts = [(*each, True) for each in enumerate(hold.ranges)]
        cuts += [(*each, False) for each in enumerate(hold.cuts)]
        for at, cutting, of_state in cuts:
            if not (cutting.rule or cutting.also or cutting.padded or along):
                continue
            if not cutting.declared:
                continue
            middle = middles(family, by_parts=hold.parts)[at]
            name = name_of(family, named, middle)
            number = name_of(family, dict.fromkeys(named, "\0"), middle)
            exact = re.escape(key_of(self.pair, number, "") if hold.follows else number)
            start = "^" if hold.follows else r"(?:^|\.)"
            if of_state:
                start, exact, name = r"\.state\.", re.escape(number), f"state.{name}"
            regex = re.compile(start + exact.replace(re.escape("\0"), r"\d+") + r"(?=\.|$)")
            if family.parts:
                dim = f"r{family.part_dim}"
                unit = family.row[family.part_dim] // sum(family.parts)
                sizes[dim] = family.parts[at] * unit if hold.parts else family.row[family.part_dim]
            padded = None
            if cutting.padded is not None:
                around = {**sizes, **dict(zip(inner, cutting.padded, strict=True))}
                padded = [around[label] for label in labels]
            given = cutting.given or padded or along
            shape = [sizes[label] for label in labels] if given else None
            moved = [labels.index(label) for label in inner]

            def make(
                cutting: Cutting = cutting,
                moved: list[int] = moved,
                shape: Any = shape,
                padded: Any = padded,
            ) -> CheckpointPlacement:
                turn = hold.turn(family)
                return self._placement(hold, cutting, moved, turn, along, shape, padded)

            yield name, regex, hold.follows and not of_state, make

    def _placement(
        self,
        hold: Hold,
        cutting: Cutting,
        moved: list[int],
        turn: Sequence[int],
        along: dict[str, Any],
        shape: Any,
        padded: Any,
    ) -> CheckpointPlacement:
        mesh: Any = self.mesh(hold)
        declared = along | {
            axis: _moved(_at(placement, self.position(hold, axis)), moved)
            for axis, placement in cutting.rule
        }
        also = {axis: p.dim for axis, p in cutting.own if axis in cutting.also}
        declared |= {axis: Shard(moved[turn[dim]]) for axis, dim in also.items()}
        if cutting.mesh.startswith("sub"):
            names = [name for name in mesh.mesh_dim_names if name in declared]
            mesh = mesh[names or mesh.mesh_dim_names]
        if cutting.mesh.endswith("coordinate"):
            mesh = MeshCoordinate(mesh.mesh_dim_names, mesh.shape, mesh.get_coordinate())
        return CheckpointPlacement(mesh, declared, global_shape=shape, padded_shape=padded)


def reduced(cutting: Cutting, shape: Sequence[int], state: Sequence[int]) -> Cutting:
    """Return how ranks cut optimizer state of a parameter: nothing where it alone has size 1."""
    dims = {dim for dim, size in enumerate(state) if size != shape[dim]}
    if not dims:
        return cutting
    rule = tuple((axis, placement) for axis, placement in cutting.rule if placement.dim not in dims)
    own = tuple(
        (axis, Replicate() if getattr(placement, "dim", None) in dims else placement)
        for axis, placement in cutting.own
    )
    lost = [axis for axis, placement in cutting.rule if placement.dim in dims]
    padded = cutting.padded and tuple(
        1 if dim in dims else size for dim, size in enumerate(cutting.padded)
    )
    return replace(
        cutting,
        rule=rule,
        own=own + tuple((axis, Replicate()) for axis in cutting.repeated if axis in lost),
        repeated=tuple(axis for axis in cutting.repeated if axis not in lost),
        padded=padded,
    )


class _Held:
    """One tensor of its own on a rank: which elements of the whole it is, and how it is wrapped."""

    def __init__(
        self, part_of_it: torch.Tensor, cutting: Cutting, mesh: FakeMesh, turn: Sequence[int]
    ) -> None:
        self.cutting = cutting
        self.whole_shape = part_of_it.shape
        names = mesh.mesh_dim_names or ()
        sizes = dict(zip(names, mesh.shape, strict=True))
        at = dict(zip(names, mesh.get_coordinate() or [], strict=True))

        def cut_by(whole: torch.Tensor, cuts: tuple[tuple[str, Any], ...]) -> torch.Tensor:
            placements = [_at(placement, at[axis]) for axis, placement in cuts]
            axes = [axis for axis, _ in cuts]
            return cut(whole, placements, [sizes[a] for a in axes], [at[a] for a in axes])

        where = numbered(part_of_it.shape, cutting.padded)
        if cutting.tiles:
            position = 0
            for axis in cutting.tile_axes:
                position = position * sizes[axis] + at[axis]
            self.chunks = cutting.tiles[position]
            where = tiled(where, self.chunks)
            self.shape = list(where.shape)
        else:
            where = cut_by(where, cutting.rule)
            if where.dim() == len(turn):  # a range of the flattened tensor has no dims to swap
                where = where.permute(tuple(turn))
            self.shape = list(where.shape)
            where = cut_by(where, cutting.own)
            rows = {p.dim for _, p in cutting.rule if isinstance(p, Picks)}
            if cutting.kind == "listed":
                self.chunks = tiles_of(where, part_of_it.shape, rows)
        self.numbers = torch.cat([part_of_it.reshape(-1), torch.tensor([-1])])[where]
        own = dict(cutting.own)
        factors = [1] * len(self.shape)
        for axis, placement in cutting.rule:
            if axis in cutting.repeated:
                own[axis] = Replicate()
                if isinstance(placement, FusedShard | RaggedShard):
                    dim = turn.index(placement.dim)
                    own[axis] = Shard(dim)
                    factors[dim] *= sizes[axis]
                if isinstance(placement, RaggedShard):
                    self.shape[dim] = sum(placement.sizes)
                    factors[dim] //= sizes[axis]
        self.shape = [n * factor for n, factor in zip(self.shape, factors, strict=True)]
        axes = [name for name in names if name in own]
        self.placements = [own[name] for name in axes]
        if cutting.kind in ("fake", "real"):
            self.mesh = mesh[axes]
            if cutting.unnamed:
                self.mesh = FakeMesh(self.mesh.shape, rank=mesh.rank, ranks=self.mesh.mesh)

    def value(self, key: str, whole: Wholes, of: tuple[str, str], padding: int) -> Value:
        local = elements(whole[of], self.numbers, padding)
        memory, kind = self.cutting.memory, self.cutting.kind
        is_dtensor = kind in ("fake", "real")
        if is_dtensor and memory == "parameter":
            memory = "own"
        local = in_memory(local, memory)
        value: Any = local
        if is_dtensor:
            wrap = real_dtensor if kind == "real" else FakeDTensor
            value = wrap(local, self.mesh, self.placements, self.shape)
        return Value(key, value, local, of, self.numbers, padding)


def put(state: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        state = state.setdefault(name, {})
    state[path[-1]] = value


def get(state: dict[str, Any], path: list[str]) -> Any:
    found: Any = state
    for name in path:
        found = found[name]
    return found


def _labels(family: Family, hold: Hold) -> list[str]:
    """Return what the dims are of a tensor of its own on the ranks."""
    named = {level.word for level, ids in zip(family.levels, hold.ids, strict=True) if ids}
    return [label for label in family.labels if label not in named]


def _pattern(
    family: Family, level: Level, words: Mapping[str, str], outside: str | None = None
) -> str:
    """Return what finds the number of a level, by that of the level outside if it is given."""
    start = f"{words.get(family.name, family.name)}.**"
    if outside is not None:
        # Between a number and the next one there may be what joined parts are called together.
        start += f".{words.get(outside, outside)}.{{{outside}}}.**"
    if level.joined:
        return f"{start}.weight{{}}"
    return f"{start}.{words.get(level.word, level.word)}.{{}}"


def _shared(
    family: Family, hold: Hold, words: Mapping[str, str], own: Mapping[str, str]
) -> Iterator[Replace]:
    """Yield what makes one of the further names: of any rank's, this rank's own."""
    if hold.more_names:
        pattern = f"more*_{words.get(family.name, family.name)}"
        yield Replace(pattern, own.get(family.name, family.name))


def _transpose(
    family: Family, hold: Hold, where: str, words: Mapping[str, str]
) -> Iterator[Transpose]:
    """Yield the step that swaps the dims of a family, where it stands here."""
    if hold.turned == where:
        yield Transpose(words.get(family.name, family.name))


def _split(family: Family, hold: Hold, labels: list[str]) -> Split:
    """Return what makes the parts of a family, whose dims are these in the checkpoint."""
    if hold.turned == "last":
        labels = [*labels[:-2], *labels[:-3:-1]]
    names, dim = middles(family, by_parts=True), labels.index(f"r{family.part_dim}")
    (fused,) = middles(family, by_parts=False)
    return Split(fused, names, dim=dim, sizes=family.parts, groups=family.groups)


def _range(numbers: tuple[int, ...], disjoint: bool) -> Any:
    """Return numbers as ``contiguous`` gives them, where no position shares any."""
    return range(numbers[0], numbers[-1] + 1) if disjoint and numbers else list(numbers)


def _at(placement: Any, position: int) -> Any:
    """Return what a placement is on one position of its axis."""
    if isinstance(placement, Picks):
        return IndexShard(placement.dim, placement.rows[position])
    return placement


def _moved(placement: Any, moved: list[int]) -> Any:
    """Return a placement of the same dim where the tensor has more dims."""
    if isinstance(placement, FusedShard | IndexShard | RaggedShard):
        return replace(placement, dim=moved[placement.dim])
    if isinstance(placement, FlatShard):
        return placement
    if hasattr(placement, "split_factor"):
        return type(placement)(moved[placement.dim], split_factor=placement.split_factor)
    return Shard(moved[placement.dim])
