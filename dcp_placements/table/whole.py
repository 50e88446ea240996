"""The unsharded model as the specification: its keys and shapes, against what all ranks have.

A wrong dim, a factor too many, a layer or a row that is lost: each makes a tensor that the model
does not have. What all ranks have is in their tables, so the comparison needs nothing more from a
rank. A router of shape (16, 6) that two tp ranks hold whole, declared ``Shard(0)`` over ``tp``::

    WholeModel({"router": (16, 6)})
    table       router: (32, 6), cut by Shard(0) over 'tp' of size 2
    fault       model.router: is (32, 6), where the whole model has (16, 6)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_placements._torch import is_dtensor_like
from dcp_placements.errors import (
    Fault,
    PlacementError,
    folded,
    format_count,
    format_name,
    format_names,
    numbers_in,
)
from dcp_placements.layout.sharding import format_cuts
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.rules.patterns import matches_any
from dcp_placements.table.table import OBJECT, Group
from dcp_placements.table.world import Piece, World

Shape = tuple[int, ...]

_AVERAGE = re.compile(r"(?:^|[._])(?:ema|swa|avg|average|averaged|shadow)", re.I)
_BESIDE_WEIGHTS = re.compile(rf"{_AVERAGE.pattern}|(?:^|[._])optim", re.I)
"""Levels whose keys are those of the weights, too."""

PROPOSE = "propose_placements(whole, state_dict, mesh) prints a declaration that fits"


@dataclass(frozen=True)
class WholeModel:
    """The keys of the unsharded model, and the shape of each.

    Attributes:
        shapes: By key.
        dtypes: By key, where they are compared.
        names: By key of a tensor that has several names, all of them: one is enough.
    """

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def of(whole: Any) -> WholeModel | None:
        """Return what a user gives as ``whole=``.

        >>> WholeModel.of({"w": torch.empty(4, 3, device="meta"), "b": (4,)}).shapes
        {'w': (4, 3), 'b': (4,)}

        Args:
            whole: A mapping from keys to shapes, tensors (whose shapes count), or pairs of shape
                and dtype; or a module, which is best made on ``meta``. None: nothing is compared.

        Raises:
            PlacementError: It is something else, has no keys, or is sharded itself.
        """
        if whole is None or isinstance(whole, WholeModel):
            return whole
        values: Any = whole
        if isinstance(whole, torch.nn.Module):
            state = whole.state_dict(keep_vars=True)
            # Extra states may be objects.
            values = {key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
        if not isinstance(values, Mapping):
            raise PlacementError(
                f"whole= is a {type(whole).__name__}: give {{key: shape}} of the unsharded model, "
                "or the model itself, made under torch.device('meta')"
            )
        if not values:
            raise PlacementError("whole= has no keys")
        shapes: dict[str, Shape] = {}
        dtypes: dict[str, torch.dtype] = {}
        keys_of: dict[torch.Tensor, list[str]] = {}
        for key, value in values.items():
            shape, dtype = _shape_and_dtype(key, value)
            shapes[key] = shape
            if dtype is not None:
                dtypes[key] = dtype
            if isinstance(value, torch.Tensor):
                keys_of.setdefault(value, []).append(key)
        tied = [tuple(keys) for keys in keys_of.values() if len(keys) > 1]
        return WholeModel(shapes, dtypes, {key: keys for keys in tied for key in keys})

    def levels(self, fqns: Sequence[str]) -> list[str]:
        """Return the levels of a nested state dict, with their dots, under which the keys stand.

        >>> WholeModel({"w": (), "b": ()}).levels(["step", "ema.w", "ema.b", "model.w"])
        ['model.']

        Args:
            fqns: All keys of a checkpoint.

        Returns:
            Those with at least half as many of the model's keys as the fullest, without those named
            as a moving average or as optimizer state, if there are others. The empty level is that
            of keys which stand in none.
        """
        counts = Counter([level for level in map(self.level_of, fqns) if level is not None])
        weights = {one: n for one, n in counts.items() if not _BESIDE_WEIGHTS.search(one)} or counts
        most = max(weights.values(), default=0)
        return [level for level, count in weights.items() if 2 * count >= most]

    def level_of(self, fqn: str) -> str | None:
        """Return the level under which a key is one of the model's; None where it is none."""
        at = 0
        while fqn[at:] not in self.shapes:
            at = fqn.find(".", at) + 1
            if not at:
                return None
        return fqn[:at]


def _shape_and_dtype(key: Any, value: Any) -> tuple[Shape, torch.dtype | None]:
    """Return the shape of a value of ``whole=``, and its dtype where it is to be compared.

    Raises:
        PlacementError: It has none.
    """
    if is_dtensor_like(value):
        raise PlacementError(
            f"whole=: {format_name(key)} is a {type(value).__name__}, of a model that is sharded "
            "already\n    way out:     the shapes before that, as of the model made under "
            "torch.device('meta')"
        )
    dtype = None
    if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], torch.dtype):
        value, dtype = value
    shape = getattr(value, "shape", value)
    is_shape = isinstance(shape, tuple | list) and all(type(size) is int for size in shape)
    if not is_shape or not isinstance(key, str):
        raise PlacementError(
            f"whole=: {key!r:.80} has the value {value!r:.40}, which is no shape\n"
            "    way out:     {key: shape}, {key: tensor} or {key: (shape, dtype)}"
        )
    return tuple(shape), dtype


def compare_with_whole(
    whole: WholeModel,
    world: World,
    excused: Sequence[re.Pattern[str]] = (),
    *,
    complete: bool = True,
) -> tuple[list[Fault], list[Fault], str]:
    """Return where all ranks together have something else than the whole model, and the result.

    Args:
        whole: The model.
        world: What the ranks have, or ask for.
        excused: Patterns of keys that are not compared.
        complete: Whether these are all ranks, so that what none of them has is missing.

    Returns:
        The faults; a note for each tensor of an average whose shape is not the weight's; and how
        many keys were compared, and which tensors were not: an average of the weights, or state
        that names its parameter by a number.
    """
    groups = {fqn: (piece, at) for piece in world.pieces for at, fqn in enumerate(piece.fqns)}
    levels = whole.levels(list(groups))
    if not levels:
        details = (
            f"whole model: {format_count(len(whole.shapes), 'key')}, as {next(iter(whole.shapes))}",
            "likely:      names that rename= does not make those of the whole model; or a state "
            "dict without weights, as of adapters alone",
            "way out:     whole= with the keys of what is saved, or a Placements without whole=",
        )
        return [Fault("this state dict", "has no key of whole=", details)], [], "no key"
    states = _states(whole, groups, levels)
    faults: list[Fault] = []
    texts = []
    for level in levels:
        compared = _Compared(whole, world, groups, level, excused)
        faults += [*compared.shape_faults(), *compared.unknown_faults()]
        if level == levels[0]:
            faults += compared.state_faults(states)
        if complete:
            faults += compared.missing_faults()
        count = format_count(len(whole.shapes) - len(compared.missing), "key")
        texts.append(count + (f" under {level!r}" if level else ""))
    beside = [
        fqn
        for fqn, (piece, _) in groups.items()
        if piece.group.shape
        and fqn not in states
        and not any(fqn[len(one) :] in whole.shapes for one in levels if fqn.startswith(one))
    ]
    if beside:
        texts[-1] += f"; {format_count(len(beside), 'tensor')} not compared"
        texts[-1] += f" ({format_names(folded(beside), 2)})"
    noted = [fqn for fqn in beside if not matches_any(excused, fqn)]
    notes = [note for fqn in noted for note in _average_notes(whole, fqn, groups[fqn][0].group)]
    return faults, notes, ", ".join(texts)


def _average_notes(whole: WholeModel, fqn: str, group: Group) -> Iterator[Fault]:
    """Yield a note where a tensor of an average, which is not compared, is no weight's shape."""
    level = whole.level_of(fqn)
    if level is None or not _AVERAGE.search(level):
        return
    shape, found = whole.shapes[fqn[len(level) :]], group.shape
    if found != shape and len(found) == len(shape):
        yield Fault(
            fqn,
            f"is {found}, where the weight of its name has {shape} in the whole model",
            (
                f"declared:    {format_cuts(group.cuts)}",
                f"way out:     the rule of the weight; whole= with its keys ({level}...) as well, "
                "to have averages compared; waive={pattern: reason} where it is right",
            ),
        )


def _states(
    whole: WholeModel, groups: Mapping[str, tuple[Piece, int]], levels: Sequence[str]
) -> dict[str, str]:
    """Return the keys of optimizer state, with the model's key of the parameter of each."""
    states = OptimizerStates(dict.fromkeys(groups, UNSEEN))
    found = {}
    for fqn, (piece, _) in groups.items():
        state = None if piece.group.kind == OBJECT else states.of(fqn)
        names = [state.parameter.removeprefix(level) for level in levels] if state else []
        if parameter := next((name for name in names if name in whole.shapes), None):
            found[fqn] = parameter
    return found


class _Compared:
    """What the ranks have beside the whole model.

    Attributes:
        missing: Keys of the whole model that no rank has, by any of their names.
    """

    def __init__(
        self,
        whole: WholeModel,
        world: World,
        groups: Mapping[str, tuple[Piece, int]],
        level: str,
        excused: Sequence[re.Pattern[str]],
    ) -> None:
        self._whole, self._world, self._groups, self._level = whole, world, groups, level
        self._excused = excused
        self._held = {key: groups[level + key] for key in whole.shapes if level + key in groups}
        self.missing = [
            key
            for key in whole.shapes
            if not any(one in self._held for one in whole.names.get(key, (key,)))
            and not self._is_excused(level + key)
        ]
        self._families = {_family(key) for key in self.missing}

    def _is_excused(self, fqn: str) -> bool:
        return matches_any(self._excused, fqn)

    def shape_faults(self) -> Iterator[Fault]:
        """Yield keys whose whole tensors are not those of the model."""
        for key, (piece, at) in self._held.items():
            group, shape, dtype = piece.group, self._whole.shapes[key], self._whole.dtypes.get(key)
            fqn = self._level + key
            if self._is_excused(fqn):
                continue
            if group.kind == OBJECT:
                headline = f"is an object, where the whole model has a {shape} tensor"
                yield self._fault(fqn, headline, piece, at)
            elif group.shape != shape:
                headline = f"is {group.shape}, where the whole model has {shape}"
                yield self._fault(fqn, headline, piece, at, *self._causes(key, group, shape))
            elif dtype is not None and group.dtype != dtype:
                headline = f"is of {group.dtype}, where the whole model has {dtype}"
                yield self._fault(fqn, headline, piece, at)

    def unknown_faults(self) -> Iterator[Fault]:
        """Yield tensors among those of the model that it does not have."""
        heads = {key.partition(".")[0] for key in self._whole.shapes}
        for fqn, (piece, at) in self._groups.items():
            key = fqn.removeprefix(self._level)
            if not fqn.startswith(self._level) or key in self._whole.shapes:
                continue
            is_beside = not self._level and key.partition(".")[0] not in heads
            if is_beside or piece.group.kind == OBJECT or self._is_excused(fqn):
                continue
            likely = (
                "likely:      a name that rename= does not make the model's; or a model with more "
                "layers or experts"
            )
            headline, place = "the whole model has no such key", f"shape:       {piece.group.shape}"
            yield self._fault(fqn, headline, piece, at, likely, place=(place,))

    def missing_faults(self) -> Iterator[Fault]:
        """Yield keys of the model that no rank has."""
        details = (
            "likely:      a layer or an expert that no rank has; or names that several ranks give "
            "to different tensors, as experts that each rank counts from 0",
            f"way out:     {PROPOSE}; waive={{pattern: reason}} where they are left out on purpose",
        )
        for key in self.missing:
            headline, shape = "no rank has this key of the whole model", self._whole.shapes[key]
            yield Fault(self._level + key, headline, details, (f"whole model: {shape}",))

    def state_faults(self, states: Mapping[str, str]) -> Iterator[Fault]:
        """Yield optimizer state of another shape than its parameter.

        State of fewer dims, as the rows and columns of a factored moment, is not compared.
        """
        for fqn, parameter in states.items():
            piece, at = self._groups[fqn]
            shape, found = self._whole.shapes[parameter], piece.group.shape
            if found == shape or len(found) != len(shape):
                continue
            if found == (1,) or self._is_excused(fqn):
                continue
            headline = f"is {found}, where its parameter has {shape} in the whole model"
            causes = self._causes(parameter, piece.group, shape)
            yield self._fault(fqn, headline, piece, at, *causes)

    def _fault(
        self,
        fqn: str,
        headline: str,
        piece: Piece,
        at: int,
        *causes: str,
        place: tuple[str, ...] = (),
    ) -> Fault:
        """Return the fault of a key, with how it is declared."""
        details = (
            *causes,
            f"declared:    {format_cuts(piece.group.cuts)}; by rule {self._world.rules(piece, at)}",
            f"way out:     {PROPOSE}; waive={{pattern: reason}} where it is right",
        )
        return Fault(fqn, headline, details, place)

    def _causes(self, key: str, group: Group, shape: Shape) -> Iterator[str]:
        """Yield what makes a tensor of this shape of one of the model's."""
        found = group.shape
        if len(found) != len(shape):
            yield f"found:       {len(found)} dims, where the model has {len(shape)}"
            return
        differing = [dim for dim in range(len(shape)) if found[dim] != shape[dim]]
        longer = [dim for dim in differing if found[dim] > shape[dim]]
        if len(differing) == 2 and len(longer) == 1:
            (dim,) = longer
            (other,) = set(differing) - {dim}
            if found[dim] * found[other] == shape[dim] * shape[other]:
                yield f"likely:      cut along dim {other}, and declared along dim {dim}"
                return
        for dim in differing:
            yield f"likely:      {_cause(dim, group, shape)}"
        if longer and group.cuts and _family(key) in self._families:
            component = re.search(r"([^.]+\.)\d+(?!.*\.\d+(?:\.|$))", key)
            pattern = f"{component[1]}{{}}" if component else "experts.{}"
            yield (
                "or:          ranks that each count their own from 0, joined by a rule: "
                f'rename=Renumber("{pattern}", ids, total=), and no Shard over that axis'
            )


def _family(key: str) -> str:
    """Return a key without its last number.

    >>> _family("layers.0.experts.3.w1")
    'layers.0.experts.{}.w1'
    """
    found = [f"{head}{{}}{tail}" for head, _, tail in numbers_in(key)]
    return found[-1] if found else key


def _cause(dim: int, group: Group, shape: Shape) -> str:
    """Return what makes one dim longer or shorter than the model's."""
    cuts, have, want = group.cuts, group.shape[dim], shape[dim]
    if want and have % want == 0:
        factor = have // want
        cut = next((one for one in cuts if one.dim == dim and one.size == factor), None)
        declared = "declared Shard" if cut is None else f"declared {cut}"
        return (
            f"dim {dim} is {_times(factor)} as long: a tensor that every rank of an axis holds "
            f"whole, {declared}?"
        )
    if have and want % have == 0:
        factor = want // have
        return (
            f"dim {dim} is 1/{factor} as long: cut by an axis of size {factor} that no rule or "
            "DTensor declares?"
        )
    if have > want:
        return (
            f"dim {dim} has {have - want} more: padding, which is stored? global_shape={shape}, "
            f"padded_shape={group.padded_shape or group.shape}"
        )
    return (
        f"dim {dim} lacks {want - have}: global_shape={shape} in the rule, where uneven parts or "
        "padding make another"
    )


def _times(factor: int) -> str:
    return "twice" if factor == 2 else f"{factor} times"
