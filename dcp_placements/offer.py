"""What a rank offers to write: its tables and coordinates, and the evidence that goes with them."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash

from dcp_placements.binding import Binding
from dcp_placements.buckets import OBJECT_ROWS, folding
from dcp_placements.digests import (
    FULL_NBYTES,
    full_digest,
    object_digest,
    sampled_digests,
)
from dcp_placements.errors import Fault
from dcp_placements.evidence import (
    DIGEST_NBYTES,
    Answer,
    Loose,
    Offer,
    PickedOffer,
    Story,
    TableOffer,
    Tables,
    packed_ints,
    unpacked_ints,
)
from dcp_placements.interop import (
    MetadataIndex,
    WriteItem,
    WriteItemType,
    default_write_items,
    has_hooks,
    known_world_size,
    named_axes,
)
from dcp_placements.items import (
    PickedItems,
    TableItems,
    placed_items,
    written_chunks,
    written_data,
)
from dcp_placements.layout import Pick, Sharding
from dcp_placements.lint import unwaived
from dcp_placements.mesh import MeshNumbers
from dcp_placements.naming import Path, Rename
from dcp_placements.optimizer_state import stateless_parameters
from dcp_placements.ownership import owned_entries
from dcp_placements.picked import RowLists, picked_rows, unpacked_rows
from dcp_placements.placing import Placed, Placing
from dcp_placements.renaming import Step, numbering
from dcp_placements.rules import PlacementRules, Rules, expected_patterns
from dcp_placements.table import (
    OBJECT,
    LayoutClass,
    Look,
    Table,
    path_counts,
    table_id,
)

EXACT_WORLD = 512
"""Up to so many ranks every replicated item has a digest of its own, and every rank sends its
tables; in larger worlds digests are folded into buckets, and a mesh's table is sent once."""

PICKED = -1
"""Stands for a table's position where its rows are picked."""

_OBJECT_KIND = (OBJECT, 0, -1)

Objects = dict[str, io.BytesIO]
"""Objects as a file will hold them, by key."""


@dataclass(slots=True)
class RankTable:
    """One table of this rank, and where the rank stands in it.

    Attributes:
        table: The keys, classes and so on.
        first: Whether this is the first rank of the mesh that the table is about; None for a table
            that is about no mesh.
        coordinates: The position along the axes of each class, class after class.
        rows: Of a table of picked rows, those that this rank has.
    """

    table: Table
    first: bool | None
    coordinates: list[int] = field(default_factory=list)
    rows: RowLists = field(default_factory=RowLists)
    _name: bytes | None = None
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    _kinds: dict[Any, tuple[int, int, int]] = field(default_factory=dict)
    _classes: dict[Any, int] = field(default_factory=dict)
    _standings: dict[Any, int] = field(default_factory=dict)
    _looks: dict[Any, int] = field(default_factory=dict)
    _rules: dict[str, int] = field(default_factory=dict)
    _paths: dict[tuple[int, ...], int] = field(default_factory=dict)
    _lists: dict[tuple[int, ...], int] = field(default_factory=dict)
    _list_of: dict[Binding, int] = field(default_factory=dict)

    @property
    def name(self) -> bytes:
        """What names the table, once it is complete."""
        if self._name is None:
            self._name = table_id(self.table.packed())
        return self._name

    def add(
        self,
        fqn: str,
        tensor: torch.Tensor | None,
        placed: Placed | None,
        path: Path | None,
    ) -> None:
        """Take in one key: a placed tensor, a plain one, or (no tensor) an object."""
        known = _OBJECT_KIND
        if tensor is not None:
            if placed is None:
                key: Any = tensor.shape
                rule = None
            else:
                key = placed.binding
                rule = placed.rule
            kind = (key, tensor.dtype, tensor.layout, tensor.requires_grad, rule)
            found = self._kinds.get(kind)
            if found is None:
                found = self._kinds[kind] = self._kind(key, tensor, placed, rule)
            known = found
        counts = path_counts((fqn,) if path is None else path)
        at = self._paths.get(counts)
        if at is None:
            at = _position(self._paths, counts, self.table.paths)
        self._rows.append((fqn, *known, at))
        if self._list_of:
            assert placed is not None
            self.rows.list_of.append(self._list_of[placed.binding])

    def finish(self) -> None:
        """Make the table's columns, once all keys are in."""
        table = self.table
        columns = [list(column) for column in zip(*self._rows, strict=True)]
        if columns:
            table.fqns, table.class_of, table.look_of, table.rule_of, table.path_of = columns

    def _kind(
        self, key: Any, tensor: torch.Tensor, placed: Placed | None, rule: str | None
    ) -> tuple[int, int, int]:
        look = Look(tensor.dtype, tensor.layout, tensor.requires_grad)
        return (
            self._class(key, placed),
            _position(self._looks, look, self.table.looks),
            -1 if rule is None else _position(self._rules, rule, self.table.rules),
        )

    def _class(self, key: Any, placed: Placed | None) -> int:
        coordinate: tuple[int, ...] = ()
        if key in self._classes:
            return self._classes[key]
        if placed is None:
            known = LayoutClass(Sharding(tuple(key)), (), plain=True)
        else:
            names = tuple(axis.name for axis in placed.binding.axes)
            sharding = placed.binding.sharding
            picked = picked_rows(placed.binding)
            if picked is None:
                known = LayoutClass(sharding, names)
            else:
                others = tuple(cut for cut in sharding.cuts if cut.dim != picked[0])
                known = LayoutClass(replace(sharding, cuts=others), names, rows=picked[0])
                self._list_of[key] = _position(self._lists, picked[1], self.rows.lists)
            coordinate = placed.binding.coordinate
        found = self._standings.get((known, coordinate))
        if found is None:
            self.table.classes.append(known)
            self.coordinates.extend(coordinate)
            found = self._standings[known, coordinate] = len(self.table.classes) - 1
        self._classes[key] = found
        return found


@dataclass(slots=True)
class Offering:
    """What this rank offers, as it keeps it for itself.

    Attributes:
        tables: Its tables.
        picked: The table of tensors whose rows it names.
        loose: Items that no table holds.
        order: The keys in state dict order: ``(table, entry)``, or the loose items themselves.
    """

    tables: list[RankTable] = field(default_factory=list)
    picked: RankTable | None = None
    loose: Loose = field(default_factory=Loose)
    order: list[tuple[int, int] | list[WriteItem]] = field(default_factory=list)

    @property
    def all_tables(self) -> list[RankTable]:
        """Its tables, and that of picked rows."""
        return self.tables if self.picked is None else [*self.tables, self.picked]

    def items(self) -> list[WriteItem]:
        """Return all items, replicas included, in state dict order."""
        makers = self._makers()
        made: list[WriteItem] = []
        for entry in self.order:
            made += entry if isinstance(entry, list) else makers[entry[0]].of(entry[1])
        return made

    def _makers(self) -> dict[int, TableItems | PickedItems]:
        makers: dict[int, TableItems | PickedItems] = {
            at: TableItems(known.table, known.coordinates) for at, known in enumerate(self.tables)
        }
        if self.picked is not None:
            known = self.picked
            makers[PICKED] = PickedItems(known.table, known.coordinates, known.rows)
        return makers

    def owned_items(self, answer: Answer) -> list[WriteItem]:
        """Return the items that are this rank's own to write, in state dict order."""
        owned = [
            set(owned_entries(kept.table, *told))
            for kept, told in zip(self.tables, answer.by_table(), strict=True)
        ]
        tables = {at: kept.table for at, kept in enumerate(self.tables)}
        makers = self._makers()
        rows = None
        if self.picked is not None:
            tables[PICKED] = self.picked.table
            rows = _owned_rows(tables[PICKED], self.picked.coordinates, answer)
        extra = set(answer.extra)
        extra_keys = {fqn for fqn, _ in extra}
        loose = {self.loose.items[at].index for at in answer.loose}
        made: list[WriteItem] = []
        for entry in self.order:
            if isinstance(entry, list):
                made += [item for item in entry if item.index in loose]
                continue
            if entry[0] == PICKED:
                made += [] if rows is None else rows.of(entry[1])
            elif entry[1] in owned[entry[0]]:
                made += makers[entry[0]].of(entry[1])
                continue
            if extra_keys and tables[entry[0]].fqns[entry[1]] in extra_keys:
                made += [item for item in makers[entry[0]].of(entry[1]) if place_of(item) in extra]
        return made


def owned_items(tables: Tables, offer: Offer, answer: Answer) -> list[WriteItem]:
    """Return the items that are a rank's own to write, seen from the coordinator."""
    extra = set(answer.extra)
    extra_keys = dict.fromkeys(key for key, _ in answer.extra)
    made: list[WriteItem] = []
    for told, share in zip(offer.tables, answer.by_table(), strict=True):
        table = tables[told.table_id]
        maker = TableItems(table, unpacked_ints(told.coordinates).tolist())
        for entry in owned_entries(table, *share):
            made += maker.of(entry)
        made += _extra_items(table, maker, extra_keys, extra)
    if offer.picked is not None:
        table = tables[offer.picked.table.table_id]
        coordinates = unpacked_ints(offer.picked.table.coordinates).tolist()
        rows = _owned_rows(table, coordinates, answer)
        if rows is not None:
            for entry in range(len(table.fqns)):
                made += rows.of(entry)
        everything = PickedItems(table, coordinates, unpacked_rows(offer.picked.rows))
        made += _extra_items(table, everything, extra_keys, extra)
    if offer.loose is not None:
        made += [offer.loose.items[at] for at in answer.loose]
    return made


def _owned_rows(table: Table, coordinates: Sequence[int], answer: Answer) -> PickedItems | None:
    if not answer.picked:
        return None
    return PickedItems(table, coordinates, unpacked_rows(answer.picked))


def _extra_items(
    table: Table,
    maker: TableItems | PickedItems,
    keys: Iterable[str],
    places: Collection[tuple[str, tuple[int, ...] | None]],
) -> list[WriteItem]:
    made: list[WriteItem] = []
    for fqn in keys:
        if fqn in table.fqns:
            items = maker.of(table.fqns.index(fqn))
            made += [item for item in items if place_of(item) in places]
    return made


def place_of(item: WriteItem) -> tuple[str, tuple[int, ...] | None]:
    """Return what an answer calls an item: its key and offset."""
    offset = item.index.offset
    return item.index.fqn, None if offset is None else tuple(offset)


def offering_of(
    state_dict: Mapping[str, Any], placing: Placing, paths: Mapping[str, Path] | None
) -> Offering:
    """Return what a rank's flat state dict has to offer.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        paths: Where the keys stand in the nested dict; None where it was not flattened.
    """
    offering = Offering()
    by_mesh: dict[Any, int] = {}
    # A mesh may be sliced anew for every module: meshes are told apart by what they are.
    number_of = MeshNumbers()
    what: dict[int, Any] = {}
    picks: dict[Binding, bool] = {}
    for fqn, value in state_dict.items():
        if fqn in placing.absent:
            continue
        placed = placing.placed.get(fqn)
        path = None if paths is None else paths.get(fqn)
        if placed is not None and _is_picked(placed, picks):
            if offering.picked is None:
                offering.picked = RankTable(Table(), None)
            offering.picked.add(fqn, placed.tensor, placed, path)
            offering.order.append((PICKED, len(offering.picked.rows.list_of) - 1))
            continue
        if _is_loose(value, placed):
            items = default_write_items(fqn, value) if placed is None else placed_items(placed)
            offering.order.append(items)
            offering.loose.items += items
            if path is not None:
                offering.loose.paths[fqn] = path
            if placed is not None:
                _note_picks(offering.loose, placed)
            continue
        mesh = None if placed is None else placed.mesh
        key: Any = None
        if placed is not None and placed.has_own_key:
            key = "rows"  # apart, so that the other ranks' tables are like this one's
        elif mesh is not None:
            number = number_of(mesh)
            key = what.get(number)
            if key is None:
                key = what[number] = _mesh_content(mesh)
        if key not in by_mesh:
            by_mesh[key] = len(offering.tables)
            first = None if mesh is None else not any(mesh.get_coordinate())
            offering.tables.append(RankTable(Table(), first))
        position = by_mesh[key]
        known = offering.tables[position]
        tensor = placed.tensor if placed is not None else value
        known.add(fqn, tensor if isinstance(tensor, torch.Tensor) else None, placed, path)
        offering.order.append((position, len(known._rows) - 1))
    for known in offering.tables:
        known.finish()
    if offering.picked is not None:
        offering.picked.finish()
    return offering


def make_offer(
    offering: Offering,
    *,
    rank: int,
    state_dict: Mapping[str, Any],
    placing: Placing,
    rules: Rules | None,
    rename: Rename | None,
    renames: tuple[Step, ...] = (),
    waived: Mapping[str, str],
    exact: bool,
    notes: Sequence[Fault] = (),
) -> Offer:
    """Return what this rank sends to the coordinator, digests left to ``add_digests``.

    Args:
        offering: What it has to offer.
        rank: Its global rank.
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        rules: The user's rules.
        rename: The user's renaming.
        renames: What the checkpoint is to keep of it.
        waived: Patterns of keys whose lints are silenced.
        exact: Whether every rank sends its tables, whatever the size of the world.
        notes: What this rank lets pass though it ought to be known.
    """
    tables = [_table_offer(kept, exact=exact) for kept in offering.tables]
    picked = None
    if offering.picked is not None:
        told = _table_offer(offering.picked, exact=exact)
        picked = PickedOffer(told, offering.picked.rows.packed())
    # Where no mesh is, or this is its first rank, nobody else may be counted on.
    tells = exact or any(kept.first is not False for kept in offering.tables)
    tells = tells or picked is not None or bool(notes)
    axes = _axes(placing, rules)
    story = None
    if tells:
        story = Story(
            matched=placing.matched,
            patterns=expected_patterns(rules),
            stateless=tuple(stateless_parameters(state_dict)),
            notes=(
                *notes,
                *unwaived(placing.placed.values(), waived, renamed=rename is not None),
            ),
            numbered=numbering(rename),
            renames=renames,
        )
    if story == Story():
        story = None
    return Offer(
        rank=rank,
        tables=tables,
        positions={name: position for name, (position, _) in axes.items()},
        sizes={name: size for name, (_, size) in axes.items()},
        picked=picked,
        loose=offering.loose if offering.loose.items else None,
        story=story,
    )


def _table_offer(kept: RankTable, *, exact: bool) -> TableOffer:
    packed = kept.table.compressed() if exact or kept.first is not False else None
    return TableOffer(kept.name, packed_ints(kept.coordinates), packed=packed)


def add_digests(
    offer: Offer,
    offering: Offering,
    kind: str,
    *,
    state_dict: Mapping[str, Any],
    placing: Placing,
    lookup: Callable[[MetadataIndex], Any],
    exact: bool,
) -> Objects:
    """Put digests of what this rank holds into its offer; return the objects as files hold them.

    Only items that may have replicas need one: a class whose parts are as many as there are ranks
    has none. In a large world the digests of a class, and of objects, are folded into buckets.

    Args:
        offer: Where the digests go.
        offering: What this rank has to offer.
        kind: ``"sampled"``, ``"full"`` or ``"off"``; only full ones are worth storing.
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        lookup: Gives the data of a loose item: a tensor, a view, or an object.
        exact: Whether every item keeps a digest of its own.
    """
    offer.digests = kind
    if kind == "off":
        return {}
    full = kind == "full"
    world = known_world_size()
    objects: Objects = {}
    wanted: list[torch.Tensor] = []
    # Which of them a class of a table has, and digests of objects.
    places: dict[tuple[int, int], list[int]] = {}
    found: dict[tuple[int, int], list[bytes]] = {}
    stored: list[list[bytes | int]] = []
    for position, kept in enumerate(offering.tables):
        table = kept.table
        stored.append([])
        unique = {index for index, known in enumerate(table.classes) if known.cells == world}
        if not full and len(unique) == len(table.classes) and OBJECT not in table.class_of:
            continue
        for entry, index in enumerate(table.class_of):
            if index in unique and not full:
                continue
            if index == OBJECT:
                data = state_dict[table.fqns[entry]]
                found.setdefault((position, OBJECT), []).append(_known(object_digest(data)))
                if full:
                    stored[position].append(_object_bytes(table.fqns[entry], data, objects))
                continue
            known = places.get((position, index))
            if known is None:
                known = places[position, index] = []
            placed = placing.placed.get(table.fqns[entry])
            if placed is None:
                pieces = [state_dict[table.fqns[entry]]]
            else:
                pieces = _pieces(placed)
            numbers = range(len(wanted), len(wanted) + len(pieces))
            known += numbers
            wanted += pieces
            if full:
                stored[position] += numbers
    made = [full_digest(t) for t in wanted] if full else sampled_digests(wanted)
    for slot, indices in places.items():
        found[slot] = [_known(made[i]) if full else made[i] or _NO_DIGEST for i in indices]
    offer.bucketed = not exact
    for (position, index), digests in found.items():
        blob = b"".join(digests)
        if not exact:
            table = offering.tables[position].table
            names = [table.fqns[entry] for entry in table.entries_of(index)]
            rows = OBJECT_ROWS if index == OBJECT else 1
            blob = folding(names, len(digests) // len(names), rows).folded(digests)
        offer.tables[position].digests[index] = blob
    if full:
        for position, told in enumerate(stored):
            offer.tables[position].stored_digests = b"".join(
                [
                    one if isinstance(one, bytes) else (made[one] or bytes(FULL_NBYTES))
                    for one in told
                ]
            )
    if offering.picked is not None and offer.picked is not None:
        _picked_digests(offer.picked.table, offering.picked.table, placing, full=full)
    _loose_digests(offering.loose, lookup, full, objects)
    return objects


def _picked_digests(told: TableOffer, table: Table, placing: Placing, *, full: bool) -> None:
    """Put digests of all rows into an offer, item by item in a large world, too.

    Ranks have other rows in common than a whole table: nothing that is folded could be compared.
    """
    pieces = [piece for fqn in table.fqns for piece in _pieces(placing.placed[fqn])]
    made = [full_digest(t) for t in pieces] if full else sampled_digests(pieces)
    told.digests = {0: b"".join(map(_known, made))}
    if full:
        told.stored_digests = b"".join([digest or bytes(FULL_NBYTES) for digest in made])


def _pieces(placed: Placed) -> list[torch.Tensor]:
    """Return what is written of one placed tensor, piece by piece: views."""
    if len(placed.chunks) == 1 and placed.chunks[0].sizes == placed.tensor.shape:
        return [placed.tensor]
    return [written_data(placed, chunk) for chunk in written_chunks(placed)]


def _is_picked(placed: Placed, known: dict[Binding, bool]) -> bool:
    """Whether all but the rows is alike on all ranks; ``known`` by binding."""
    binding = placed.binding
    if binding.is_uniform or not binding.is_exact:
        return False
    found = known.get(binding)
    if found is None:
        found = known[binding] = picked_rows(binding) is not None
    return found


def _mesh_content(mesh: Any) -> Any:
    """Return what makes a mesh another one: names, sizes, ranks, and where this rank stands."""
    ranks = getattr(mesh, "mesh", None)
    known = None if ranks is None else ranks.numpy().tobytes()
    return mesh.mesh_dim_names, tuple(mesh.shape), tuple(mesh.get_coordinate()), known


def _is_loose(value: Any, placed: Placed | None) -> bool:
    if placed is None:
        return has_hooks(value)
    return not placed.binding.is_uniform


def _note_picks(loose: Loose, placed: Placed) -> None:
    if placed.rule is not None:
        loose.rules_of[placed.fqn] = placed.rule
    picks = [cut for cut in placed.binding.sharding.cuts if isinstance(cut, Pick)]
    if picks:  # of several dims no one list tells which rows they are
        one_dim = len({cut.dim for cut in picks}) == 1
        loose.row_maps[placed.fqn] = picks[-1].indices if one_dim else ()


def _position(known: dict[Any, int], value: Any, values: list[Any]) -> int:
    found = known.get(value)
    if found is None:
        found = known[value] = len(values)
        values.append(value)
    return found


_NO_DIGEST = bytes(DIGEST_NBYTES)


def _known(digest: bytes | None) -> bytes:
    return _NO_DIGEST if digest is None else digest[:DIGEST_NBYTES]


def _object_bytes(fqn: str, data: Any, objects: Objects) -> bytes:
    buffer = objects[fqn] = io.BytesIO()
    torch.save(data, buffer)
    return xxhash.xxh3_128_digest(buffer.getbuffer())


def _loose_digests(
    loose: Loose, lookup: Callable[[MetadataIndex], Any], full: bool, objects: Objects
) -> None:
    for item in loose.items:
        data = lookup(item.index)
        if item.type == WriteItemType.BYTE_IO:
            loose.digests.append(object_digest(data))
            if full:
                loose.stored_digests.append(_object_bytes(item.index.fqn, data, objects))
        elif isinstance(data, torch.Tensor):
            loose.digests.append(full_digest(data) if full else sampled_digests([data])[0])
            if full:
                loose.stored_digests.append(loose.digests[-1])
        else:
            loose.digests.append(None)
            if full:
                loose.stored_digests.append(None)
    loose.digests = [None if d is None else d[:DIGEST_NBYTES] for d in loose.digests]


def _axes(placing: Placing, rules: Rules | None) -> dict[str, tuple[int, int]]:
    """Return ``{name: (position, size)}`` of every named axis that tensors and rules tell of."""
    number_of = MeshNumbers()
    meshes: dict[int, Any] = {}
    for placed in placing.placed.values():
        if placed.mesh is not None:
            meshes.setdefault(number_of(placed.mesh), placed.mesh)
    axes: dict[str, tuple[int, int]] = {}
    for mesh in rules.meshes if isinstance(rules, PlacementRules) else ():
        axes.update(named_axes(mesh))
    for mesh in meshes.values():
        axes.update(named_axes(mesh))
    for binding in dict.fromkeys([placed.binding for placed in placing.placed.values()]):
        for axis in binding.axes:
            if axis.name is not None:
                axes[axis.name] = (axis.position, axis.size)
    return axes
