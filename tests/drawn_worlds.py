"""Draws models and worlds: what ``random_worlds`` can say, as far as it can be saved and loaded."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import FlatShard, FusedShard, RaggedShard
from tests.random_worlds import (
    Cutting,
    Detour,
    Family,
    Hold,
    Ids,
    Level,
    Mesh,
    Pair,
    Picks,
    Side,
    Tile,
)

# Of the meshes of each side: an axis of one name has to mean the same on both.
AXES = (("abcd", "wxyz"), ("efgh", "stuv"))
MAX_RANKS = 16
MAX_NUMEL = 1500
DTYPES = (
    *(torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)
ODD_NAMES = ("w w", "größe/µ", "a[0]", "it's", "50%", "{}", "a*b", "-", "#!~", "x\\y", "'", "é:=;,")
PREFIXES = (("model", "optim"), ("model", "optim"), ("app.model", "app.optim"), ("", "opt"))


class Draw(random.Random):
    """Draws what a world is made of."""

    def chance(self, percent: int) -> bool:
        return self.randrange(100) < percent

    def some(self, count: int, *, at_least: int = 1) -> tuple[int, ...]:
        """Return some of ``range(count)``, in order."""
        number = self.randint(min(at_least, count), count)
        return tuple(sorted(self.sample(range(count), number)))


def draw_pair(seed: int, *, renamed: bool = False, optimizers: bool = False) -> Pair:
    """Return the worlds of a seed.

    Args:
        seed: Of all that is drawn.
        renamed: Whether every family has rows by name, and names that two steps or more make the
            checkpoint's. Then a load is oftener the save's world, with axes of other sizes.
        optimizers: Whether the state is that of any of torch's optimizers.
    """
    draw = Draw(seed)
    families = tuple(
        draw_family(draw, number, renamed=renamed) for number in range(draw.randint(1, 3))
    )
    if optimizers:
        families = tuple(with_state(draw, family) for family in families)
    objects: list[tuple[str, Any]] = [("train.step", 7), ("train.rng", b"\0\1"), ("epochs", [1, 2])]
    prefixes = draw.choice(PREFIXES)
    some = tuple(draw.sample(objects, draw.randint(0, 3)))
    save = draw_side(draw, families, AXES[0], saves=True, renamed=renamed)
    load = draw_side(draw, families, AXES[1], saves=False, renamed=renamed)
    more = Draw(f"more {seed}")
    save = with_more(more, families, save, saves=True)
    load = with_more(more, families, load, saves=False)
    if draw.chance(30 if renamed else 10):
        load = replace(load, meshes=save.meshes, holds=save.holds)
        if renamed and draw.chance(60):
            load = resized(draw, load)
    holds = zip(save.holds, load.holds, strict=True)
    families = tuple(
        _in_one_form(*each) for each in zip(families, *zip(*holds, strict=True), strict=True)
    )
    return Pair(seed, prefixes, families, some, save, load)


def _in_one_form(family: Family, *holds: Hold) -> Family:
    """Return a family without the scalars and objects that would be of several tensors.

    A step is that of a tensor, or a row of a stack of steps. A rate is an object, which no
    rename stacks, unstacks or splits.
    """
    is_split = family.split and not all(hold.parts for hold in holds)
    as_tensor = [{hold.ids[at] is None for hold in holds} for at in range(len(family.levels))]
    both = list(zip(family.levels, as_tensor, strict=True))
    has_step = not is_split and not any(
        len(each) > 1 or (True in each and not level.stacked) for level, each in both
    )
    has_rate = has_step and not any(False in each and level.stacked for level, each in both)
    if not has_step:
        family = replace(family, step=None, scalars=())
    return replace(family, has_rate=has_rate)


def with_state(draw: Draw, family: Family) -> Family:
    """Return a family with the state that an optimizer of torch has of one row."""
    # Moments that have size 1 have elements also where a parameter has none.
    row = tuple(max(size, 1) for size in family.row)
    suitable = [
        name
        for name in ("Adafactor", "Adafactor", "Adafactor", *OPTIMIZERS)
        if not (name == "Adafactor" and family.parts) and not (name == "Muon" and len(row) != 2)
    ]
    parameter = torch.nn.Parameter(torch.zeros(row))
    optimizer = OPTIMIZERS[draw.choice(suitable)]([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shapes = {name: value.shape for name, value in optimizer.state[parameter].items()}
    moments = [name for name, shape in shapes.items() if shape] if row else []
    scalars = [name for name, shape in shapes.items() if not shape]
    # Numbers of a stack of stacks are not read into one for all rows.
    scalars *= sum(level.stacked for level in family.levels) < 2
    return replace(
        family,
        row=row,
        moments=tuple(moments),
        step=None,
        scalars=tuple((name, draw.randrange(999) / 8) for name in scalars),
        reduced=tuple(
            (moment, dim)
            for moment in moments
            for dim, size in enumerate(shapes[moment])
            if size != row[dim]
        ),
    )


OPTIMIZERS: dict[str, Any] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "Muon": torch.optim.Muon,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": partial(torch.optim.SGD, momentum=0.9),
}


def resized(draw: Draw, side: Side) -> Side:
    """Return a side of the same declarations where axes have other sizes, 1 among them.

    Axes by whose positions ranks have rows, chunks or the family at all keep their size, as those
    of a dim whose parts have sizes do, and a side of two meshes is left as it is.
    """
    if len(side.meshes) > 1:
        return side
    (mesh,) = side.meshes
    fixed: set[str] = set()
    for hold in side.holds:
        fixed |= {ids.axis for ids in hold.ids if ids is not None and ids.axis is not None}
        fixed |= {hold.stage[0]} if hold.stage else set()
        for cutting in (*hold.cuts, *hold.ranges):
            fixed |= {*cutting.tile_axes, *(a for a, p in cutting.rule if isinstance(p, Picks))}
            # Sizes of parts and pieces add up to what the axes before leave.
            summed = {
                p.dim
                for _, p in cutting.rule
                if isinstance(p, RaggedShard)
                or isinstance(getattr(p, "parts", 0), tuple)
                # Copies are on so many of the ranks.
                or getattr(p, "copies", None)
            }
            is_range = any(isinstance(p, FlatShard) for _, p in cutting.rule)
            fixed |= {
                a
                for a, p in (*cutting.rule, *cutting.own)
                if is_range or getattr(p, "dim", -1) in summed
            }
    sizes = list(mesh.sizes)
    for at, name in enumerate(mesh.names):
        if name not in fixed:
            rest = prod(sizes) // sizes[at]
            sizes[at] = draw.randint(1, max(1, min(4, MAX_RANKS // rest)))
    ranks = draw.sample(range(prod(sizes)), prod(sizes))
    holds = tuple(
        replace(hold, cuts=tuple(replace(cutting, given=True) for cutting in hold.cuts))
        for hold in side.holds
    )
    return replace(side, meshes=(Mesh(mesh.names, tuple(sizes), tuple(ranks)),), holds=holds)


def draw_family(draw: Draw, number: int, *, renamed: bool) -> Family:
    row = tuple(
        draw.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 12)[not draw.chance(20) :])
        for _ in range(draw.choice((1, 1, 2, 2, 3) if renamed else (0, 1, 1, 2, 2, 2, 3)))
    )
    levels: list[Level] = []
    count = draw.choice((1, 1, 2) if renamed else (0, 0, 0, 0, 1, 1, 1, 2))
    for word in draw.sample(("layers", "experts"), count * bool(row)):
        dim = 0 if draw.chance(60) else draw.randint(0, len(row) + len(levels))
        joined = not levels and draw.chance(20) and not (renamed and count == 1)
        levels.append(Level(word, draw.randint(1, 5), dim, draw.chance(50), joined))
    parts: tuple[int, ...] = ()
    groups = part_dim = 0
    if row and not any(level.stacked for level in levels) and draw.chance(25):
        parts = tuple(draw.randint(1, 3) for _ in range(draw.randint(1, 3)))
        groups, part_dim = draw.randint(1, 2), draw.randrange(len(row))
        joined_dim = sum(parts) * groups * draw.randint(1, 2)
        row = (*row[:part_dim], joined_dim, *row[part_dim + 1 :])
    while prod(row) * prod(level.total for level in levels) > MAX_NUMEL:
        at = max(set(range(len(row))) - ({part_dim} if parts else set()), key=lambda dim: row[dim])
        row = (*row[:at], row[at] // 2, *row[at + 1 :])
    unusual = not levels and not parts and draw.chance(20)
    # Steps of a stack of stacks are not read into one for all rows.
    has_step = draw.chance(40) and sum(level.stacked for level in levels) < 2
    return Family(
        f"m{number}{draw.choice(ODD_NAMES) if unusual else ''}",
        row,
        draw.choice(DTYPES),
        tuple(levels),
        parts,
        part_dim,
        groups,
        bool(parts) and draw.chance(70),
        ("exp_avg", "exp_avg_sq")[: draw.choice((0, 0, 1, 2))] if row else (),
        float(draw.randrange(99)) if has_step else None,
    )


def draw_side(
    draw: Draw,
    families: tuple[Family, ...],
    names: tuple[str, str],
    *,
    saves: bool,
    renamed: bool,
) -> Side:
    meshes = draw_meshes(draw, names)
    holds = tuple(draw_hold(draw, family, meshes, renamed=renamed) for family in families)
    options: dict[str, Any] = {"torch": draw.chance(50)}
    if saves:
        options["digests"] = draw.choice(("off", "sampled", "full"))
        options["thread_count"] = draw.choice((1, 1, 2))
        options["single_file_per_rank"] = draw.chance(80)
        options["dedup_save_to_lowest_rank"] = draw.chance(15)
    return Side(
        meshes,
        holds,
        draw.choice(("patterns", "patterns", "callable", "new")),
        draw.choice(("flat", "top", "deep", "mixed")),
        draw.chance(15),
        tuple(options.items()),
    )


def with_more(draw: Draw, families: tuple[Family, ...], side: Side, *, saves: bool) -> Side:
    """Return a side, some of whose families have further names, are transposed, or have ranges."""
    holds = []
    for family, hold in zip(families, side.holds, strict=True):
        levels = list(zip(family.levels, hold.ids, strict=True))
        has_rows = any(level.stacked and ids is not None for level, ids in levels)
        is_unstacked = any(not level.stacked and ids is None for level, ids in levels)
        is_listed = any(cutting.kind == "listed" for cutting in hold.cuts)
        if not has_rows and not is_listed and draw.chance(20):
            tied = saves or draw.chance(40)
            hold = replace(hold, more_names=draw.randint(1, 2), tied=tied)
        if not is_listed and _may_turn(family, hold) and draw.chance(30):
            hold = replace(hold, turned=draw.choice(("first", "early", "middle", "last")))
        elif (
            family.moments
            and not (has_rows or is_unstacked or family.reduced)
            and (hold.parts or not family.split)
            and draw.chance(30)
        ):
            used = {ids.axis for ids in hold.ids if ids is not None} | {*(hold.stage or ())[:1]}
            mesh = side.meshes[hold.mesh]
            free = [name for name in mesh.names if name not in used]
            shapes = unit_shapes(family, [*hold.ids], by_parts=hold.parts)
            ranges = tuple(draw_ranges(draw, shape, mesh, free) for shape in shapes if free)
            hold = replace(hold, ranges=ranges)
        holds.append(hold)
    return replace(side, holds=tuple(holds))


def _may_turn(family: Family, hold: Hold) -> bool:
    """Whether the ranks may have what a family is cut into with its last two dims swapped.

    A range has no dims. A moment of another shape than its parameter's would have rows where that
    has columns. A dim that the rule cuts in parts is none that the DTensor cuts with strides.
    """
    cuts = [placement for cutting in hold.cuts for _, placement in cutting.rule]
    is_strided = any(
        cutting.repeated and any(type(placement) is _StridedShard for _, placement in cutting.own)
        for cutting in hold.cuts
    )
    is_range = any(isinstance(placement, FlatShard) for placement in cuts)
    return not (family.reduced or is_strided or is_range or "{}" in family.name)


def draw_ranges(draw: Draw, shape: tuple[int, ...], mesh: Mesh, free: list[str]) -> Cutting:
    """Return how ranks cut moments in ranges, as an optimizer that is sharded alone has them."""
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    *outside, last = free[: draw.randint(1, len(free))]
    left: list[int | None] = list(shape)
    rule: list[tuple[str, Any]] = []
    for name in outside:
        before = list(left)
        placement, _ = draw_placement(draw, left, sizes[name], set(), may_pick=False)
        if None in left:  # ranks would have other numbers of elements
            left = before
        else:
            rule.append((name, placement))
    total = prod(size for size in left if size is not None)
    rule.append((last, FlatShard(drawn_sizes(draw, sizes[last], total))))
    memory = draw.choice(("own", "view"))
    return Cutting(tuple(rule), mesh=draw.choice(("whole", "sub", "coordinate")), memory=memory)


def draw_meshes(draw: Draw, axes: tuple[str, str]) -> tuple[Mesh, ...]:
    """Return one mesh or two over the same ranks, permuted in each."""
    most = draw.choice((1, 2, 4, 4, 6, 8, MAX_RANKS))
    meshes: list[Mesh] = []
    for names in axes[: draw.choice((1, 1, 2))]:
        sizes: list[int] = []
        if meshes:  # another factorisation of as many ranks
            rest = len(meshes[0].ranks)
            while rest > 1 and len(sizes) < 3:
                sizes.append(draw.choice([n for n in range(1, rest + 1) if rest % n == 0]))
                rest //= sizes[-1]
            sizes.append(rest)
        else:
            for _ in range(draw.randint(1, 4)):
                sizes.append(draw.randint(1, min(4, most // prod(sizes))))
        draw.shuffle(sizes)
        ranks = list(range(prod(sizes)))
        if draw.chance(60):
            draw.shuffle(ranks)
        order = draw.sample(names, len(sizes))
        meshes.append(Mesh(tuple(order), tuple(sizes), tuple(ranks)))
    return tuple(meshes)


def draw_hold(draw: Draw, family: Family, meshes: tuple[Mesh, ...], *, renamed: bool) -> Hold:
    at = draw.randrange(len(meshes))
    mesh = meshes[at]
    free = list(mesh.names)

    def axis(percent: int) -> str | None:
        return free.pop(draw.randrange(len(free))) if free and draw.chance(percent) else None

    stacked = {level.word for level in family.levels if level.stacked}
    by_name = [level.word for level in family.levels if not level.stacked]
    as_tensor = stacked if draw.chance(50) else set()
    unstacked = stacked <= as_tensor and bool(by_name) and draw.chance(45)
    if unstacked:
        as_tensor = as_tensor | {draw.choice(by_name)}
    ids: list[Ids | None] = [None] * len(family.levels)
    for number in reversed(range(len(family.levels))):
        level = family.levels[number]
        if level.word in as_tensor:
            continue
        on = axis(70)
        outside = family.levels[number + 1 :]
        by_outside = bool(outside) and ids[number + 1] is not None and draw.chance(40)
        size = 1 if on is None else mesh.sizes[mesh.names.index(on)]
        renumbered = draw.chance(90 if renamed else 70)
        maps = [
            draw_rows(draw, size, level.total, ranges=draw.chance(50))
            for _ in range(outside[0].total if by_outside else 1)
        ]
        rows = tuple(zip(*maps, strict=True))
        twice = renamed and renumbered and draw.chance(15)
        ids[number] = Ids(on, rows, renumbered, draw.chance(85), twice)
    stage = None
    if (on := axis(15)) is not None:
        stage = (on, draw.some(mesh.sizes[mesh.names.index(on)]))
    by_parts = bool(family.parts) and family.split and draw.chance(40)
    left = [name for name in mesh.names if name in free]
    # The rows that padding adds would have no name.
    may_pad = not unstacked and (by_parts or not family.split)
    # A tensor that lists its chunks is neither stacked nor divided by names.
    may_list = (
        may_pad
        and not family.reduced
        and not any(
            level.stacked and on is not None for level, on in zip(family.levels, ids, strict=True)
        )
    )
    cuts = tuple(
        draw_listed(draw, shape, mesh, left)
        if may_list and draw.chance(25)
        else draw_cutting(draw, shape, mesh, left, may_pad=may_pad, may_flatten=may_list)
        for shape in unit_shapes(family, ids, by_parts=by_parts)
    )
    if renamed:
        detours = draw_detours(draw, family)
    else:
        where = draw.choice(("", "", "first", "last")) if family.name.isalnum() else ""
        detours = (Detour(family.name, where == "last", "replace"),) * bool(where)
    follows = all(c.kind in ("plain", "listed") for c in cuts) and draw.chance(40)
    redundant = draw.chance(30)
    return Hold(at, tuple(ids), by_parts, cuts, stage, detours, follows, redundant)


def draw_detours(draw: Draw, family: Family) -> tuple[Detour, ...]:
    """Return components that the ranks spell otherwise: two or more, where there are as many."""
    words = [family.name, *(level.word for level in family.levels if not level.joined)]
    count = min(draw.choice((2, 2, 3)), len(words))
    hows = ("replace", "replace", "rank", "any", "function")
    return tuple(
        Detour(word, draw.chance(50), draw.choice(hows)) for word in draw.sample(words, count)
    )


def unit_shapes(family: Family, ids: list[Ids | None], *, by_parts: bool) -> list[tuple[int, ...]]:
    """Return the whole shapes of what is a tensor of its own on the ranks: one, or one per part."""
    named = {level.word for level, on in zip(family.levels, ids, strict=True) if on is not None}
    sizes = dict(zip(family.labels, family.shape, strict=True))
    labels = [label for label in family.labels if label not in named]
    if not by_parts:
        return [tuple(sizes[label] for label in labels)]
    dim = f"r{family.part_dim}"
    unit = sizes[dim] // sum(family.parts)
    shapes = []
    for part in family.parts:
        sizes[dim] = part * unit
        shapes.append(tuple(sizes[label] for label in labels))
    return shapes


def draw_rows(
    draw: Draw, positions: int, total: int, *, ranges: bool, repeats: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Return which rows each position has; together they have all."""
    if ranges:
        edges = [0, *sorted(draw.randint(0, total) for _ in range(positions - 1)), total]
        return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges))
    rows = [draw.sample(range(total), draw.randint(0, total)) for _ in range(positions)]
    for row in set(range(total)) - {row for held in rows for row in held}:
        held = draw.choice(rows)
        held.insert(draw.randint(0, len(held)), row)
    if repeats and (held := draw.choice(rows)):
        held.append(draw.choice(held))
    return tuple(map(tuple, rows))


def draw_listed(draw: Draw, shape: tuple[int, ...], mesh: Mesh, free: list[str]) -> Cutting:
    """Return how ranks list chunks of a tensor: those of a rule, or any tiles of it."""
    if not shape or draw.chance(50):
        cutting = draw_cutting(draw, shape, mesh, free, may_pad=True, kind="plain")
        # By themselves adjacent rows are one box, whichever are copies.
        has_copies = any(getattr(placement, "copies", None) for _, placement in cutting.rule)
        declared = has_copies or (bool(shape) and draw.chance(40))
        return replace(cutting, kind="listed", declared=declared)
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    held: list[list[Tile]] = [[] for _ in range(prod(sizes[name] for name in free))]
    ends = [0] * len(held)
    along = draw.randrange(len(shape))
    for offsets, box in draw_tiles(draw, (0,) * len(shape), shape):
        copies = draw.choice((1, 1, 1, 2, len(held)))
        for position in draw.sample(range(len(held)), min(copies, len(held))):
            local = [draw.choice((0, 0, 1)) for _ in box]
            local[along] += ends[position]
            ends[position] = local[along] + box[along]
            held[position].append(Tile(offsets, box, tuple(local)))
    for tiles in held:
        draw.shuffle(tiles)
    memory = draw.choice(("own", "view", "transposed", "parameter"))
    return Cutting(
        kind="listed", tiles=tuple(map(tuple, held)), tile_axes=tuple(free), memory=memory
    )


def draw_tiles(
    draw: Draw, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and sizes of boxes that tile one, seldom as a product of intervals."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not dims or draw.chance(15 if prod(sizes) > 4 else 60):
        return [(offsets, sizes)]
    dim = draw.choice(dims)
    at = draw.randint(1, sizes[dim] - 1)
    after = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
    first, second = ((*sizes[:dim], n, *sizes[dim + 1 :]) for n in (at, sizes[dim] - at))
    if draw.chance(40):
        return [(offsets, first), *draw_tiles(draw, after, second)]
    return [*draw_tiles(draw, offsets, first), *draw_tiles(draw, after, second)]


def draw_cutting(
    draw: Draw,
    shape: tuple[int, ...],
    mesh: Mesh,
    free: list[str],
    *,
    may_pad: bool,
    may_flatten: bool = False,
    kind: str = "",
) -> Cutting:
    """Return how ranks cut a tensor over some of the axes ``free``, in mesh order."""
    drawn = draw.choice(("plain", "plain", "plain", "fake", "fake", "real")) if free else "plain"
    kind = kind or drawn
    memory = draw.choice(("own", "own", "view", "transposed", "parameter"))
    roles = {
        name: draw.choice(("rule", "rule", "none") if kind == "plain" else ROLES) for name in free
    }
    if kind != "plain" and not {"own", "copy"} & set(roles.values()):
        roles[draw.choice(free)] = "own"
    if not shape:
        own = [(name, Replicate()) for name in free if kind != "plain" and roles[name] != "none"]
        return Cutting((), tuple(own), kind=kind if own else "plain", memory=memory)
    padded = shape
    if may_pad and draw.chance(15):
        padded = tuple(size + draw.choice((0, 0, 1, 4)) for size in shape)
    left: list[int | None] = list(padded)
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    rule: list[tuple[str, Any]] = []
    derivable = padded == shape
    for name in [name for name in free if roles[name] in ("rule", "fused")]:
        cut = {placement.dim for _, placement in rule}
        placement, even = draw_placement(draw, left, sizes[name], cut, may_pick=padded == shape)
        derivable &= even
        rule.append((name, placement))
    last = max([free.index(name) for name, _ in rule], default=-1)
    if (
        kind == "plain"
        and may_flatten
        and None not in left
        and draw.chance(25)
        and free[last + 1 :]
    ):
        name = draw.choice(free[last + 1 :])
        total = prod(size for size in left if size is not None)
        rule.append((name, FlatShard(drawn_sizes(draw, sizes[name], total))))
        derivable = False
    own = []
    for name in [name for name in free if roles[name] in ("own", "copy")]:
        if roles[name] == "copy":
            own.append((name, Replicate()))
            continue
        dim = draw.randrange(len(shape))
        strided = draw.chance(25)
        own.append(
            (name, _StridedShard(dim, split_factor=draw.randint(2, 4)) if strided else Shard(dim))
        )
    also = tuple(
        name for name, placement in own if type(placement) is not Replicate and draw.chance(15)
    )
    strided_dims = {p.dim for _, p in own if type(p) is _StridedShard}
    repeated = (
        ()
        if kind == "plain"
        else tuple(
            name
            for name, placement in rule
            if draw.chance(40)
            and not getattr(placement, "copies", None)  # the shape of such a DTensor is no product
            and (
                type(placement) not in (FusedShard, RaggedShard)
                or placement.dim not in strided_dims
            )
        )
    )
    unnamed = bool(own) and not also and not repeated and draw.chance(10)
    return Cutting(
        tuple(rule),
        tuple(own),
        also,
        repeated,
        kind,
        None if padded == shape else padded,
        not derivable or draw.chance(40),
        draw.choice(("whole", "sub", "coordinate", "subcoordinate")),
        unnamed,
        memory,
    )


def draw_copies(draw: Draw, dim: int, size: int, total: int) -> tuple[int, FusedShard] | None:
    """Return the rows of a rank, and parts of which some are on several; None where none fits.

    Each rank has as many rows, so that what cuts these further cuts copies into equal boxes.
    """
    divisors = [count for count in range(1, size + 1) if size % count == 0]
    for _ in range(8):
        copies = tuple(draw.choice(divisors) for _ in range(draw.randint(1, 3)))
        shards = [size // count for count in copies]
        is_number = draw.chance(40) and total % len(copies) == 0
        parts = [count * draw.randint(1, 3) for count in shards[1:]]
        parts = [total - sum(parts), *parts]
        if is_number:
            parts = [total // len(copies)] * len(copies)
        pairs = [*zip(parts, shards, strict=True)]
        if parts[0] > 0 and not any(part % count for part, count in pairs):
            fused = FusedShard(dim, len(parts) if is_number else tuple(parts), copies=copies)
            return sum(part // count for part, count in pairs), fused
    return None


def drawn_sizes(draw: Draw, count: int, total: int) -> tuple[int, ...]:
    """Return the sizes of so many parts of a total, some of them 0."""
    ends = [0, *sorted(draw.randint(0, total) for _ in range(count - 1)), total]
    return tuple(b - a for a, b in itertools.pairwise(ends))


ROLES = ("rule", "rule", "none", "own", "own", "copy")


def draw_placement(
    draw: Draw, left: list[int | None], size: int, cut: set[int], *, may_pick: bool
) -> tuple[Any, bool]:
    """Return one placement of a rule, and whether it leaves equal parts; update what is left."""
    dim = draw.randrange(len(left))
    total = left[dim]
    kinds = ["shard"] * 4 + ["strided", "parts"]
    if total:
        kinds += ["sizes"]
    if total is not None:
        kinds += ["pieces", "pieces"]
    if total and size > 1:
        kinds += ["copies", "copies"]
    if total is not None and may_pick and dim not in cut:  # its rows are those of the whole
        kinds += ["picks"]
    kind = draw.choice(kinds)
    parts: Any = 1
    placement: Any = Shard(dim)
    if kind == "picks":
        left[dim] = None
        assert total is not None
        rows = draw_rows(draw, size, total, ranges=draw.chance(30), repeats=draw.chance(20))
        return Picks(dim, rows), False
    if kind == "pieces":
        left[dim] = None
        assert total is not None
        # The sizes say the dim of the whole.
        return RaggedShard(dim, drawn_sizes(draw, size, total)), True
    if kind == "copies" and (drawn := draw_copies(draw, dim, size, total or 0)) is not None:
        left[dim], placement = drawn
        # The sizes say the dim of the whole; a number of parts does not.
        return placement, isinstance(placement.parts, tuple)
    if kind == "strided":
        parts = draw.randint(2, 4)
        placement = _StridedShard(dim, split_factor=parts)
    elif kind == "parts":
        parts = draw.randint(1, 4)
        placement = FusedShard(dim, parts)
    elif kind == "sizes":
        edges = sorted({*(draw.randint(1, total) for _ in range(draw.randint(0, 3))), total})
        parts = tuple(b - a for a, b in itertools.pairwise([0, *edges]))
        placement = FusedShard(dim, parts)
    if total is None:
        return placement, False
    even = (
        all(part % size == 0 for part in parts)
        if isinstance(parts, tuple)
        else total % (size * parts) == 0
    )
    left[dim] = total // size if even else None
    return placement, even
