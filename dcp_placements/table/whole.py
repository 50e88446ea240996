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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
)
from dcp_placements.layout.sharding import format_cuts
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.rules.patterns import matches_any
from dcp_placements.table.table import OBJECT, Group
from dcp_placements.table.world import World

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
    def of(whole: Any) -> WholeModel:
        """Return what a user gives as ``whole=``.

        >>> WholeModel.of({"w": torch.empty(4, 3, device="meta"), "b": (4,)}).shapes
        {'w': (4, 3), 'b': (4,)}

        Args:
            whole: A mapping from keys to shapes, tensors (whose shapes count), or pairs of shape
                and dtype; or a module, which is best made on ``meta``.

        Raises:
            PlacementError: It is something else, has no keys, or is sharded itself.
        """
        if isinstance(whole, WholeModel):
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

    Optimizer state has the shape of its parameter. That of fewer dims, as the rows and columns of a
    factored moment, is not compared, nor is one element.

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
    pieces = {fqn: (piece, at) for piece in world.pieces for at, fqn in enumerate(piece.fqns)}
    levels = whole.levels(list(pieces))
    if not levels:
        details = (
            f"whole model: {format_count(len(whole.shapes), 'key')}, as {next(iter(whole.shapes))}",
            "likely:      names that rename= does not make those of the whole model; or a state "
            "dict without weights, as of adapters alone",
            "way out:     whole= with the keys of what is saved, or a Placements without whole=",
        )
        return [Fault("this state dict", "has no key of whole=", details)], [], "no key"
    missing = {
        level: [
            key
            for key in whole.shapes
            if not any(level + one in pieces for one in whole.names.get(key, (key,)))
            and not matches_any(excused, level + key)
        ]
        for level in levels
    }
    faults: list[Fault] = []
    notes: list[Fault] = []
    beside: list[str] = []
    heads = {key.partition(".")[0] for key in whole.shapes}
    states = OptimizerStates(dict.fromkeys(pieces, UNSEEN))
    for fqn, (piece, at) in pieces.items():
        group, is_tensor = piece.group, piece.group.kind != OBJECT
        under = [level for level in levels if fqn.startswith(level)]
        key = _first_of(whole, [fqn.removeprefix(level) for level in under])
        state = states.of(fqn) if key is None and is_tensor else None
        names = [state.parameter.removeprefix(level) for level in levels] if state else []
        headline, likely = "", _OTHER_SHAPE
        if key is not None:
            headline = _unlike(whole, key, group)
        elif parameter := _first_of(whole, names):
            shape = whole.shapes[parameter]
            if group.shape not in (shape, (1,)) and len(group.shape) == len(shape):
                headline = f"is {group.shape}, where its parameter has {shape} in the whole model"
        elif is_tensor and any(level or fqn.partition(".")[0] in heads for level in under):
            headline, likely = "the whole model has no such key", _UNKNOWN
        elif group.shape:
            beside.append(fqn)
            notes += [] if matches_any(excused, fqn) else _average_notes(whole, fqn, group)
        if headline and not matches_any(excused, fqn):
            declared = f"{format_cuts(group.cuts)}; by rule {world.rules(piece, at)}"
            faults.append(Fault(fqn, headline, (f"declared:    {declared}", likely, _WAY_OUT)))
    texts = []
    for level, keys in missing.items():
        if complete:
            faults += [_missing_fault(level + key, whole.shapes[key]) for key in keys]
        count = format_count(len(whole.shapes) - len(keys), "key")
        texts.append(count + (f" under {level!r}" if level else ""))
    if beside:
        texts[-1] += f"; {format_count(len(beside), 'tensor')} not compared"
        texts[-1] += f" ({format_names(folded(beside), 2)})"
    return faults, notes, ", ".join(texts)


_OTHER_SHAPE = (
    "likely:      a wrong dim or axis; Shard of a tensor that every rank of the axis holds whole; "
    "no rule; padding without global_shape= and padded_shape=; experts that each rank counts from "
    "0, joined by a rule where they need rename=Renumber; or whole= of a "
    "model that is sharded"
)
_UNKNOWN = (
    "likely:      a name that rename= does not make the model's; or a model with more layers or "
    "experts"
)
_WAY_OUT = f"way out:     {PROPOSE}; waive={{pattern: reason}} where it is right"


def _first_of(whole: WholeModel, names: Iterable[str]) -> str | None:
    """Return the first name that is a key of the model."""
    return next((name for name in names if name in whole.shapes), None)


def _unlike(whole: WholeModel, key: str, group: Group) -> str:
    """Return in what a key is not as in the model; empty where it is."""
    shape, dtype = whole.shapes[key], whole.dtypes.get(key, group.dtype)
    if group.kind == OBJECT:
        return f"is an object, where the whole model has a {shape} tensor"
    if group.shape != shape:
        return f"is {group.shape}, where the whole model has {shape}"
    is_other = group.dtype != dtype
    return f"is of {group.dtype}, where the whole model has {dtype}" if is_other else ""


def _missing_fault(fqn: str, shape: Shape) -> Fault:
    details = (
        "likely:      a layer or an expert that no rank has; or names that several ranks give "
        "to different tensors, as experts that each rank counts from 0",
        f"way out:     {PROPOSE}; waive={{pattern: reason}} where they are left out on purpose",
    )
    headline = "no rank has this key of the whole model"
    return Fault(fqn, headline, details, (f"whole model: {shape}",))


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
