"""The requests of all ranks of a world that does not run, as its load planner makes them.

Each rank's state dict is derived from the checkpoint and from the declaration, with tensors on
``meta``. Ranks with equal declarations and equal local shapes are planned once, by the load planner
itself. They differ in their boxes, which are computed for all of them together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import Shard

from dcp_placements._torch import rehearsed
from dcp_placements.bind.following_state import States, states_of
from dcp_placements.bind.rank_shard import RankShard
from dcp_placements.bind.reshape import row_axes
from dcp_placements.bind.rule_and_dtensor import Place, declared_place
from dcp_placements.declaration import DeclaredWorld
from dcp_placements.errors import (
    CannotPlace,
    Fault,
    PlacementError,
)
from dcp_placements.layout.boxes import Boxes, as_array, as_boxes
from dcp_placements.layout.sharding import Box, Kind
from dcp_placements.load.all_asked import AllAsked
from dcp_placements.load.missing import Policy
from dcp_placements.load.planner import PlacementLoadPlanner
from dcp_placements.names.flat import RenamedValue, Reshaped
from dcp_placements.names.optimizer_state import Dims, followed_dims
from dcp_placements.names.recorded_numbers import Family, Numbering
from dcp_placements.names.rename_results import Row, Target, texts_of
from dcp_placements.names.renames import Renames, Step, recorded
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.rehearsals.fsdp_axes import Fsdp, FsdpAxes
from dcp_placements.offline.rehearsals.local_keys import LocalKeys, Steps, checkpoint_steps
from dcp_placements.offline.rehearsals.tensor_names import Named, Whole, named_tensors
from dcp_placements.offline.verification import tiling_faults
from dcp_placements.rules.mesh_axes import MeshAxes, MeshCoordinate
from dcp_placements.rules.patterns import (
    PlacementRules,
    Rules,
    asked,
    compile_pattern,
    matched_nowhere,
    rule_name,
)
from dcp_placements.rules.placement import CheckpointPlacement, is_flat
from dcp_placements.storage.provenance import record_of
from dcp_placements.table.must_agree import disagreements
from dcp_placements.table.statement import Stated, Statement, stated
from dcp_placements.table.table import Sent, holding_of, packed_ints
from dcp_placements.table.whole import WholeModel, compare_with_whole
from dcp_placements.table.world import Piece, World


class EqualTensors(NamedTuple):
    """Tensors with equal cuts on every rank of some ranks with equal renames and rules."""

    tensors: list[Named]
    rule_key: str  # the key that the rules are asked about: optimizer state's is its parameter's
    row_dim: int | None  # the dim whose rows are tensors in the checkpoint
    is_damaged: bool  # whether chunks of some of them are missing in the checkpoint
    asked: Named  # the tensor of ``rule_key``
    # For optimizer state, the dims of its parameter that it follows, empty if it follows none; None
    # for other tensors
    dims: Dims | None

    def placement(self, rules: Rules) -> CheckpointPlacement | None:
        """Return the placement by the rules of a rank."""
        placement = asked(rules, self.rule_key, self.asked.probe())
        if placement is None or self.dims is None:
            return placement
        ndim = len(self.asked.rule_shape)
        if not self.dims or (is_flat(placement) and self.dims != tuple(range(ndim))):
            return None  # a replica
        return placement.of_dims(self.dims, ndim)


class Keys(NamedTuple):
    """The keys of ranks with equal renames and rules."""

    kinds: list[EqualTensors]
    objects: list[str]
    faults: list[Fault]  # faults of keys that have no name in the checkpoint


class Cutting(NamedTuple):
    """The local tensors of a kind on one rank."""

    signature: Hashable  # equal for ranks that are planned together
    place: Place  # place of each in the whole tensor, before it is stacked, unstacked or split
    local_shape: tuple[int, ...]  # shape of the local tensor
    mesh: MeshCoordinate | None  # the axis of FSDP, flattened; None without one
    shape: tuple[int, ...]  # shape of its DTensor over ``mesh``


class _Declaration(NamedTuple):
    """What ranks with equal patterns, renames and waivers declare."""

    steps: Steps
    waive: dict[str, str]
    rules: dict[int, Rules]  # by rank


class Refused(NamedTuple):
    """The reason why one rank cannot have the tensors of a kind."""

    headline: str
    details: tuple[str, ...]

    @property
    def signature(self) -> Hashable:
        """Equal for ranks that are refused for the same reason."""
        return self


@dataclass
class Lot:
    """Ranks that are planned together.

    Attributes:
        keys: Keys of the ranks.
        held: Boxes of the checkpoint's tensors that the first rank holds.
        asked: Boxes that the first rank asks for.
        objects: The checkpoint's objects that the ranks read.
        memory: Bytes of the local tensors of each rank, padding included.
        statement: Statement of the ranks; None where their keys cannot be renamed.
        rules: Rules of the first rank.
        rename: Rename of the ranks, without ``Replace``.
        waive: Patterns of keys whose differences are accepted.
        cuttings: By rank, one entry for each kind.
    """

    keys: Keys
    rules: Rules
    rename: Renames | None
    waive: dict[str, str]
    cuttings: dict[int, list[Cutting | Refused]] = field(default_factory=dict)
    held: Sent = field(default_factory=Sent)
    asked: Sent = field(default_factory=Sent)
    objects: list[str] = field(default_factory=list)
    memory: int = 0
    statement: Statement | None = None

    @property
    def ranks(self) -> list[int]:
        """The ranks."""
        return list(self.cuttings)

    @cached_property
    def targets(self) -> dict[str, list[tuple[int, Target]]]:
        """By key of the checkpoint, each kind that it is made of, by number, and the target."""
        targets: dict[str, list[tuple[int, Target]]] = {}
        for number, kind in enumerate(self.keys.kinds):
            for tensor in kind.tensors:
                for target in tensor.targets:
                    targets.setdefault(target.fqn, []).append((number, target))
        return targets


class RehearsedWorld:
    """A load of a checkpoint on all ranks of a world.

    Args:
        checkpoint: The checkpoint.
        function: Argument ``rules`` of ``rehearse``.
        axes: The mesh.
        fsdp: Argument of ``rehearse``: axes over which FSDP cuts dim 0.
        expected: The keys to include; None for all.
        progress: Called with the number of ranks planned, and of all.

    Attributes:
        checkpoint: The checkpoint.
        axes: The mesh.
        renames: The renames in force, as a checkpoint keeps them.
        lots: The ranks, those that are planned together in one lot.
        table: The boxes that all ranks hold.

    Raises:
        CannotLook: An axis in ``fsdp`` is unknown; the function fails, or returns no rules.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        function: Callable[[MeshCoordinate], Any],
        axes: MeshAxes,
        fsdp: Fsdp,
        expected: set[str] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.checkpoint, self.axes = checkpoint, dict(axes)
        self._declared = DeclaredWorld(self.axes, function)
        self._fsdp = FsdpAxes(fsdp, axes)
        wholes = {
            fqn: Whole(tensor.shape, tensor.dtype) for fqn, tensor in checkpoint.tensors.items()
        }
        wholes |= {fqn: Whole((), None) for fqn in checkpoint.objects}
        stored = {f: whole for f, whole in wholes.items() if expected is None or f in expected}
        self._local = LocalKeys(stored)
        self._damaged = {fqn for fault in tiling_faults(checkpoint) for fqn in fault.tensors}
        self._faults: dict[Fault, list[int]] = {}
        self._notes: dict[Fault, None] = {}
        self._wholes: list[WholeModel | None] = []  # by rank
        self.renames: dict[Step, None] = {}
        self.lots: list[Lot] = []
        done = 0
        for lot in self._unplanned():
            self.lots += self._planned(lot)
            done += len(lot.cuttings)
            progress(done, self.size)
        held = {rank: sent for lot in self.lots for rank, sent in _sent(lot, lot.held).items()}
        self.table = World([held[rank] for rank in range(self.size)])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.axes.values())

    def numberings(self) -> dict[Family, Numbering]:
        """Return the lists of keys to which the renames give numbers."""
        statements = [lot.statement for lot in self.lots if lot.statement is not None]
        return {
            key: value for statement in statements for key, value in statement.numberings.items()
        }

    def own_names(self, keys: Collection[str], stored: Set[str]) -> dict[str, str]:
        """Return the keys that are some rank's own names, each with the checkpoint's key.

        Args:
            keys: Keys that the checkpoint does not have.
            stored: The checkpoint's keys.
        """
        own: dict[str, str] = {}
        for lot in self.lots if keys else ():
            rename = self._declared.placements(lot.ranks[0]).rename
            if rename is None:
                continue
            for key in keys:
                # A user's own function may raise anything for a name that is not its own.
                with suppress(Exception):
                    target, *_ = texts_of(rename(key))
                    if target in stored:
                        own.setdefault(key, target)
        return own

    def unmatched(self) -> tuple[str, ...]:
        """Return the declared patterns that match no key on any rank."""
        statements = [lot.statement for lot in self.lots if lot.statement is not None]
        if len(statements) < len(self.lots):
            return ()
        matches = [patterns for each in statements for patterns in (each.matched, each.declared)]
        kinds = [kind for lot in self.lots for kind in lot.keys.kinds]
        names = {tensor.rule_name for kind in kinds for tensor in kind.tensors}
        return matched_nowhere([*matches, self._fsdp.matches(names)])

    def faults(self) -> tuple[Fault, ...]:
        """Return the faults of the load, sorted by key: of single ranks, else of all together."""
        faults = [
            replace(fault, ranks=tuple(sorted(set(ranks)))) for fault, ranks in self._faults.items()
        ]
        faults = faults or self._judged[0]
        return tuple(sorted(faults, key=lambda fault: astuple(fault)[:2]))

    def notes(self) -> tuple[Fault, ...]:
        """Return the notes of the load, sorted by key."""
        notes = [*self._notes, *([] if self._faults else self._judged[1])]
        return tuple(sorted(notes, key=lambda note: (note.fqn, note.headline)))

    @cached_property
    def _judged(self) -> tuple[list[Fault], list[Fault]]:
        """The faults and notes of all ranks together, where no rank is refused by itself."""
        keys, whole = self.checkpoint.metadata.state_dict_metadata, self._wholes[0]
        numberings = {
            rank: lot.statement.numberings
            for lot in self.lots
            if lot.statement is not None
            for rank in lot.ranks
        }
        given = [
            Stated(
                Statement(has_whole=model is not None, numberings=numberings.get(rank, {})), [rank]
            )
            for rank, model in enumerate(self._wholes)
        ]
        disagreement, _ = disagreements(given, "this load")
        if disagreement:
            return disagreement, []
        policy = Policy(waived=[*map(compile_pattern, self.lots[0].waive)])
        sent = {
            rank: of_rank for lot in self.lots for rank, of_rank in _sent(lot, lot.asked).items()
        }
        different = [Stated(lot.statement, lot.ranks) for lot in self.lots if lot.statement]
        of_ranks = [sent[rank] for rank in range(self.size)]
        record = record_of(self.checkpoint.provenance, keys)
        with rehearsed(0, self.size):
            asked = AllAsked(
                range(self.size), of_ranks, different, record, keys, policy, complete=True
            )
            faults = asked.faults() if self.size > 1 else []
        if whole is None:
            return faults, []
        compared = compare_with_whole(
            whole, asked.world, asked.states, policy.waived, may_lack_levels=True
        )
        return faults + compared.faults, compared.notes

    def add_fault(self, fault: Fault, ranks: Iterable[int]) -> None:
        """Add a fault of some ranks."""
        self._faults.setdefault(fault, []).extend(ranks)

    def _unplanned(self) -> list[Lot]:
        """Return lots of ranks whose plans are equal but for their boxes."""
        declarations: dict[Hashable, _Declaration] = {}
        for rank in range(self.size):
            declared = self._declared.placements(rank)
            rules = PlacementRules({}) if declared.rules is None else declared.rules
            waive = declared.waive
            self._wholes.append(declared.whole)
            self.renames.update(dict.fromkeys(recorded(declared.rename)))
            steps = checkpoint_steps(declared.rename)
            patterns = (
                rules.patterns if isinstance(rules, PlacementRules) and rules.is_table else rank
            )
            key = patterns, steps, tuple(waive.items())
            declared_by = declarations.setdefault(key, _Declaration(steps, dict(waive), {}))
            declared_by.rules[rank] = rules
        lots: dict[Hashable, Lot] = {}
        for steps, waive, ranks in declarations.values():
            first = next(iter(ranks.values()))
            keys = self._keys_of(first, steps)
            by_kind = [self._cuttings(kind, ranks) for kind in keys.kinds]
            rules_key: Hashable = getattr(first, "patterns", None)
            if rules_key is None:
                rules_key = tuple(
                    [tuple([tensor.key for tensor in kind.tensors]) for kind in keys.kinds]
                )
            for rank, rules in ranks.items():
                cuttings = [of_rank[rank] for of_rank in by_kind]
                signatures = tuple([cutting.signature for cutting in cuttings])
                lot_key = rules_key, steps, tuple(waive.items()), signatures
                if lot_key not in lots:
                    lots[lot_key] = Lot(keys, rules, Renames(*steps) if steps else None, waive)
                lots[lot_key].cuttings[rank] = cuttings
        return list(lots.values())

    def _keys_of(self, rules: Rules, steps: Steps) -> Keys:
        """Return the keys of a rank, tensors with equal cuts together."""
        wholes = self._local.before(steps)
        faults: list[Fault] = []
        named = named_tensors(wholes, Renames(*steps), faults)
        objects = [key for key, whole in wholes.items() if whole.dtype is None]
        by_name = {tensor.rule_name: tensor for tensor in named}
        parameters = _states(named, objects).parameters
        kinds: dict[Hashable, EqualTensors] = {}
        for tensor in named:
            rule_key, label, dims = tensor.rule_name, _rule_label(rules, tensor), None
            # State follows its parameter, unless a rule matches it alone. Where its parameter may
            # be one of several tensors, these have to be cut equally.
            candidates = {
                (other.rule_shape, _rule_label(rules, other), self._fsdp.of(other.rule_name)): other
                for other in map(by_name.__getitem__, parameters.get(rule_key, ()))
            }
            if len(candidates) == 1:
                (((shape, of_parameter, _), parameter),) = candidates.items()
                if label in (None, of_parameter):
                    rule_key, label = parameter.rule_name, of_parameter
                    ways = followed_dims(tensor.rule_shape, shape)
                    dims = ways[0] if ways else ()
            target_dims = tensor.targets[0].dims if tensor.targets else ()
            row_dims = sorted(set(range(len(tensor.shape))) - set(target_dims))
            is_damaged = any(target.fqn in self._damaged for target in tensor.targets)
            form = (
                tensor.shape,
                tensor.dtype,
                tensor.rule_shape,
                tensor.rule_dims,
                tensor.row and tensor.row.axes,
                self._fsdp.of(rule_key),
            )
            row_dim = row_dims[0] if row_dims else None
            kind = EqualTensors([], rule_key, row_dim, is_damaged, by_name[rule_key], dims)
            kinds.setdefault((form, tuple(row_dims), label, is_damaged, dims), kind).tensors.append(
                tensor
            )
        return Keys(list(kinds.values()), objects, faults)

    def _cuttings(
        self, kind: EqualTensors, ranks: Mapping[int, Rules]
    ) -> dict[int, Cutting | Refused]:
        """Return the cutting of the tensors of a kind on each of some ranks."""
        tensor, fsdp = kind.tensors[0], self._fsdp.of(kind.rule_key)
        has_rows = kind.dims is None or 0 in kind.dims
        cuttings: dict[int, Cutting | Refused] = {}
        for rank, rules in ranks.items():
            placement, mesh = None, None
            try:
                if tensor.shape:
                    placement = kind.placement(rules)
                    mesh = self._fsdp.mesh(fsdp, rank, placement) if has_rows else None
                cuttings[rank] = _cutting(kind, placement, mesh)
            except CannotPlace as error:
                fault = error.fault(kind.rule_key, rule_name(rules, kind.rule_key))
                cuttings[rank] = Refused(fault.headline, fault.details)
            except PlacementError as error:  # a function of the user's raises another error
                cuttings[rank] = Refused(str(error), ())
        return cuttings

    def _planned(self, lot: Lot) -> list[Lot]:
        """Plan the first rank of a lot; every rank by itself where the others do not follow it."""
        rank, cuttings = next(iter(lot.cuttings.items()))
        for fault in lot.keys.faults:
            self.add_fault(fault, lot.ranks)
        state: dict[str, Any] = dict.fromkeys(lot.keys.objects)
        for kind, cutting in zip(lot.keys.kinds, cuttings, strict=True):
            if isinstance(cutting, Refused):
                for tensor in kind.tensors:
                    self.add_fault(Fault(tensor.rule_name, *cutting), lot.ranks)
                continue
            nbytes = prod(cutting.local_shape) * kind.tensors[0].dtype.itemsize
            lot.memory += nbytes * len(kind.tensors)
            state.update({tensor.key: _value(tensor.dtype, cutting) for tensor in kind.tensors})
        metadata = self.checkpoint.metadata
        whole = self._wholes[rank]
        planner = PlacementLoadPlanner(lot.rules, rename=lot.rename, waive=lot.waive, whole=whole)
        with rehearsed(rank, self.size), warnings.catch_warnings(action="ignore"):
            load = planner.begin(state, {}, metadata)
            message = planner.create_local_plan().planner_data
        for fault in load.refusal:
            self.add_fault(fault, lot.ranks)
        if not message.statement:  # its keys cannot be renamed
            return [lot]
        ((lot.statement, _),) = stated([(rank, message.statement)]).values()
        lot.asked = message.sent or Sent()
        self._notes.update(dict.fromkeys(lot.statement.notes))
        placing = load.request.asked.placing
        lot.objects = [fqn for fqn in load.state_dict if fqn in self.checkpoint.objects]
        without = {*self.checkpoint.objects, *placing.absent}
        lot.held = holding_of(load.state_dict, placing.placed, {}, without).packed()
        if len(lot.cuttings) > 1 and not self._follow(lot):
            return [
                planned
                for rank, of_rank in lot.cuttings.items()
                for planned in self._planned(replace(lot, cuttings={rank: of_rank}, memory=0))
            ]
        return [lot]

    def _follow(self, lot: Lot) -> bool:
        """Whether the boxes computed for the first rank equal those that were planned."""
        return all(
            (of_ranks := _boxes(lot, piece)) is None
            or set(as_boxes(of_ranks[0])) == {box for box in as_boxes(piece.boxes) if box.numel}
            for piece in World([lot.held]).pieces
        )


def _states(named: Sequence[Named], objects: Iterable[str]) -> States:
    """Return which tensors of a rank are optimizer state, as its load planner has it."""
    values: dict[str, Any] = dict.fromkeys(objects)
    paths: dict[str, tuple[str, ...]] = {}
    rows: dict[str, list[RenamedValue[Row]]] = {}
    for tensor in named:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if tensor.row is None:
            values[tensor.rule_name], paths[tensor.rule_name] = value, (tensor.key,)
        else:
            row = RenamedValue(tensor.row, tensor.key, value, None)
            rows.setdefault(tensor.rule_name, []).append(row)
    return states_of(values, paths, Reshaped(rows=rows), {})


def _boxes(lot: Lot, piece: Piece) -> list[Boxes] | None:
    """Return the boxes of a piece on each rank of a lot; None where all ranks hold the whole."""
    shape, targets = piece.group.shape, lot.targets[piece.fqns[0]]
    if not piece.group.cuts or 0 in shape:
        return None
    boxes = []
    for cuttings in lot.cuttings.values():
        held: set[Box] = set()  # a row that a rank lists twice counts once
        for number, target in targets:
            cutting = cuttings[number]
            assert isinstance(cutting, Cutting), "it is planned"
            chunks = cutting.place.chunks
            # A range of the flattened tensor has no dims, and no rename moves it.
            is_range = any(cut.kind is Kind.FLAT for cut in cutting.place.sharding.cuts)
            held |= {chunk.box for chunk in (chunks if is_range else target.chunks(chunks))}
        boxes.append(as_array(sorted(held), len(shape)))
    return boxes


def _sent(lot: Lot, first: Sent) -> dict[int, Sent]:
    """Return what each rank of a lot sends, where the first rank sends ``first``."""
    if len(lot.cuttings) == 1 or not first.tables:
        return dict.fromkeys(lot.cuttings, first)
    by_piece = [(piece.boxes, _boxes(lot, piece)) for piece in World([first]).pieces]
    sent = {}
    for index, rank in enumerate(lot.cuttings):
        boxes = [same if of_ranks is None else of_ranks[index] for same, of_ranks in by_piece]
        numbers = np.concatenate([array.reshape(-1) for array in boxes])
        counts = packed_ints([len(array) for array in boxes])
        sent[rank] = first._replace(counts=counts, boxes=packed_ints(numbers))
    return sent


def _cutting(
    kind: EqualTensors, placement: CheckpointPlacement | None, mesh: MeshCoordinate | None
) -> Cutting:
    """Return the cutting of the tensors of a kind on a rank.

    Args:
        kind: The kind.
        placement: Placement of the rank's rule.
        mesh: The axis of FSDP, seen from the rank; None without one.

    Raises:
        CannotPlace: The rule does not fit the tensors.
    """
    tensor, own = kind.tensors[0], () if mesh is None else (Shard(0),)
    ruled = placement
    if placement is not None and tensor.row is not None:
        row_axes(placement, tensor.row, tensor.shape)  # refuses a rule that does not fit the stack
    if placement is not None and tensor.rule_dims != tuple(range(len(tensor.rule_shape))):
        ruled = placement.of_dims(tensor.rule_dims, len(tensor.rule_shape))
    place, local_shape = declared_place(tensor.shape, ruled, mesh, own, is_whole=True)
    sharding, positions, shape = place.sharding, place.positions, local_shape
    if mesh is not None:  # its cut is the last, and of dim 0
        unsharded = replace(sharding, cuts=sharding.cuts[:-1]).dim_at(0, positions[:-1])
        shape = (sum([stop - start for start, stop in unsharded]), *local_shape[1:])
    rows = None if kind.row_dim is None else sharding.dim_at(kind.row_dim, positions)
    own_chunks = positions if kind.is_damaged else None
    signature = _cut_signature(placement), local_shape, shape, rows, own_chunks
    return Cutting(signature, place, local_shape, mesh, shape)


def _cut_signature(placement: CheckpointPlacement | None) -> Hashable:
    """Return what two ranks' placements have in common if they cut equally."""
    if placement is None:
        return None
    mesh = placement.mesh
    shapes = placement.global_shape, placement.padded_shape
    return placement.placements, tuple(mesh.shape), mesh.mesh_dim_names, shapes


def _rule_label(rules: Rules, tensor: Named) -> Hashable:
    """Return a label that tensors of one shape share if a rank's rules cut them equally.

    It is None where no rule matches.
    """
    if not tensor.shape:
        return None
    if isinstance(rules, PlacementRules) and rules.is_table:
        return rules.pattern_of(tensor.rule_name)
    try:
        placement = asked(rules, tensor.rule_name, tensor.probe())
    except CannotPlace:  # said where each rank's cutting is made
        return CannotPlace
    coordinate = None if placement is None else placement.mesh.get_coordinate()
    position = None if coordinate is None else tuple(coordinate)
    return placement and (_cut_signature(placement), position)


def _value(dtype: torch.dtype, cutting: Cutting) -> Any:
    """Return the value of a tensor in a rank's state dict."""
    local = torch.empty(cutting.local_shape, dtype=dtype, device="meta")
    if cutting.mesh is None:
        return local
    return RankShard(local, cutting.mesh, (Shard(0),), torch.Size(cutting.shape))
