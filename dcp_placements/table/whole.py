"""The unsharded model as the specification: its keys and shapes, against what all ranks have.

A wrong dim, a wrong factor, a lost layer or row: each makes a tensor that the model does not have.
The tables of the ranks are all that the comparison needs. A router of shape (16, 6) that two tp
ranks hold whole, declared ``Shard(0)`` over ``tp``::

    WholeModel({"": ModelKeys({"router": (16, 6)})}, is_flat=True)
    table       model.router: (32, 6), cut by Shard(0) over 'tp' of size 2
    fault       model.router: is (32, 6), where the whole model has (16, 6)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from dcp_placements._torch import is_dtensor_like
from dcp_placements.errors import Fault, PlacementError
from dcp_placements.layout.boxes import Shape
from dcp_placements.layout.sharding import format_cuts
from dcp_placements.names.optimizer_state import OptimizerStates, followed_dims
from dcp_placements.pages import WHOLE_PAGE
from dcp_placements.rules.patterns import matches_any
from dcp_placements.short_text import (
    folded_names,
    format_count,
    format_name,
    format_names,
)
from dcp_placements.table.table import OBJECT, Group
from dcp_placements.table.world import World

PROPOSE = "propose_placements(whole, state_dict, mesh) prints a declaration that fits"

MAX_DIFFERENCES = 3
"""Kinds of differences that the note on a level shows."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_AVERAGES = frozenset({"ema", "swa", "avg", "average", "averaged", "shadow"})
_OPTIMIZERS = frozenset({"optim", "optimizer", "optimizers"})


@dataclass(frozen=True)
class ModelKeys:
    """The keys of one unsharded model, and the shape of each.

    Attributes:
        shapes: The shape of each key.
        dtypes: The dtypes of the keys whose dtype is compared.
        names: All names of a tensor that has several, by each of them: one is enough.
    """

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def of(model: Any) -> ModelKeys:
        """Return the keys of a module or of a mapping to shapes, as ``WholeModel.of`` takes them.

        Raises:
            PlacementError: It is something else, has no keys, or is sharded itself.
        """
        values: Any = model
        if isinstance(model, torch.nn.Module):
            state = model.state_dict(keep_vars=True)
            # Extra states may be objects.
            values = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        if not isinstance(values, Mapping):
            raise PlacementError(
                f"whole= is a {type(model).__name__}: give {{key: shape}} of the unsharded model, "
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
        return ModelKeys(shapes, dtypes, {key: keys for keys in tied for key in keys})

    @property
    def heads(self) -> set[str]:
        """The first components of the keys: ``{"embed", "layers"}``."""
        return {key.partition(".")[0] for key in self.shapes}


@dataclass(frozen=True)
class WholeModel:
    """The value of ``whole=``: the unsharded model, or the model of each level.

    *By level*, ``{"model": {"w": (4, 3)}, "ema": {"w": (4, 3)}}``: the keys under ``model.`` in the
    checkpoint are those of the first model, the keys under ``ema.`` those of the second. Any
    difference is refused. Another level with keys of these models is named in a warning. A load may
    leave out a whole level; a save may not.

    *Flat*, ``{"w": (4, 3)}``: the model's keys may stand under a level of the checkpoint's keys,
    such as ``model.w``, or under several. Each level that has a key of the model is compared:

    - A level that only lacks keys is refused, whatever it lacks.
    - A level with other keys or other shapes is refused, unless another level equals the model:
      then it is another model, such as the larger teacher of a student, and is named in a warning
      with the differences.
    - An average of the weights may have other dtypes, and is named in a warning with the keys that
      it lacks and the shapes that differ. The name of its level has the word ``ema``, ``swa``,
      ``avg``, ``average``, ``averaged`` or ``shadow``: ``model_ema``, not ``emanet``. The same is
      true of what an optimizer keeps by the model's keys (``optimizer.master``), which may lack
      some.

    In both forms a tensor of floating-point numbers is named in a warning if it is under no level
    and is not the state of a parameter there.

    Optimizer state (``optim.state.w.exp_avg``) follows its parameter dim by dim: a dim may be
    reduced to size 1, and a factored moment lacks one. Three kinds do not follow it and are not
    compared: a single element; a matrix of equal sizes (a preconditioner); and uncut state with
    another number of dims (blocks of 8-bit state).

    Attributes:
        models: The model of each level, whose name ends in its dot; the flat form has one, at the
            empty level.
        is_flat: Whether it is the flat form.
    """

    models: Mapping[str, ModelKeys]
    is_flat: bool = False

    @staticmethod
    def of(whole: Any) -> WholeModel:
        """Return the ``WholeModel`` of a user's ``whole=``.

        >>> WholeModel.of({"w": torch.empty(4, 3, device="meta"), "b": (4,)}).models[""].shapes
        {'w': (4, 3), 'b': (4,)}
        >>> list(WholeModel.of({"model": {"w": (4, 3)}, "ema": {"w": (4, 3)}}).models)
        ['model.', 'ema.']

        Args:
            whole: A mapping from keys to shapes, tensors (whose shapes count), or pairs of shape
                and dtype; or a module, which is best made on ``meta``. Or a mapping from levels of
                the state dict to these.

        Raises:
            PlacementError: It is something else, has no keys, or is sharded itself; or it has keys
                beside levels.
        """
        if isinstance(whole, WholeModel):
            return whole
        values = whole if isinstance(whole, Mapping) else {}
        kinds = Mapping, torch.nn.Module
        levels = [level for level, model in values.items() if isinstance(model, kinds)]
        if not levels:
            return WholeModel({"": ModelKeys.of(whole)}, is_flat=True)
        for key in values:
            if key not in levels or not isinstance(key, str):
                raise PlacementError(
                    f"whole=: {levels[0]!r:.80} is a level with keys of its own, and {key!r:.80} "
                    "is no name of one\n"
                    '    way out:     {"model": {key: shape}, "ema": {key: shape}}'
                )
        return WholeModel({f"{key}." if key else "": ModelKeys.of(values[key]) for key in levels})

    def model_at(self, level: str) -> ModelKeys | None:
        """Return the model of a level; None where none is declared."""
        return self.models.get("" if self.is_flat else level)

    def keys_under(self, fqns: Iterable[str]) -> Iterator[str]:
        """Yield the keys of all models at their levels; in the flat form at those of ``fqns``, too.

        >>> [*WholeModel.of({"w": ()}).keys_under(["model.a", "model.b"])]
        ['w', 'model.w']
        """
        heads = dict.fromkeys([f"{fqn.partition('.')[0]}." for fqn in fqns if self.is_flat])
        for level, model in self.models.items():
            for head in ("", *heads):
                yield from [head + level + key for key in model.shapes]

    def main_level(self, fqns: Sequence[str]) -> str | None:
        """Return the level with most keys, averages last; None where no key is under any."""
        levels = Levels(self, fqns)
        counts = Counter([levels.of(fqn) for fqn in fqns])
        names = [name for name in levels.names if self.model_at(name) and counts[name]]
        return max(
            names, key=lambda name: (not is_beside_weights(name), counts[name]), default=None
        )


class Levels:
    """The levels of a nested state dict, each with its dot, and the level of each key.

    A level is declared, or has a key of a model. An inner level counts only if no key of the outer
    model begins like it: in a surplus layer, the model's ``norm`` seems to be under ``layers.7.``.

    >>> levels = Levels(WholeModel.of({"w": (), "b": ()}), ["step", "ema.w", "model.w", "model.b"])
    >>> levels.names, levels.of("model.v"), levels.of("step")
    (['ema.', 'model.'], 'model.', None)

    Args:
        whole: The models.
        fqns: The keys of a checkpoint without those of optimizer state.

    Attributes:
        names: The levels, declared ones first.
    """

    def __init__(self, whole: WholeModel, fqns: Iterable[str]) -> None:
        models = whole.models
        keys = {key for model in models.values() for key in model.shapes}
        heads = {head for model in models.values() for head in model.heads}
        declared = [] if whole.is_flat else list(models)
        self._heads = models[""].heads if "" in models else heads
        self._names = set(declared)
        levels = dict.fromkeys([_level_above_key(fqn, keys) for fqn in fqns])
        for level in sorted([name for name in levels if name is not None], key=len):
            outer = self.of(level)
            inner = level[len(outer or "") :].partition(".")[0]
            if outer is None or (outer not in declared and inner not in heads):
                self._names.add(level)
        names = dict.fromkeys([*declared, *levels])
        self.names = [level for level in names if level is not None and level in self._names]

    def of(self, fqn: str) -> str | None:
        """Return the innermost level that a key is under; None where it is under none.

        The empty level has the keys that begin like a key of the model.
        """
        end = len(fqn)
        while (end := fqn.rfind(".", 0, end)) >= 0:
            if fqn[: end + 1] in self._names:
                return fqn[: end + 1]
        return "" if "" in self._names and fqn.partition(".")[0] in self._heads else None


def is_beside_weights(level: str, words: frozenset[str] = _AVERAGES | _OPTIMIZERS) -> bool:
    """Whether the name of a level says that it is an average of weights, or an optimizer's.

    >>> [*map(is_beside_weights, ["model_ema.", "modelEMA.", "emanet.", "swarm."])]
    [True, True, False, False]

    Args:
        level: The name of the level.
        words: The words of such names.
    """
    return not words.isdisjoint([word.lower() for word in _WORD.findall(level)])


def _level_above_key(fqn: str, keys: Container[str]) -> str | None:
    """Return the text before a model's key in a key; None where the key ends in none of them."""
    start = 0
    while fqn[start:] not in keys:
        start = fqn.find(".", start) + 1
        if not start:
            return None
    return fqn[:start]


def _shape_and_dtype(key: Any, value: Any) -> tuple[Shape, torch.dtype | None]:
    """Return the shape of a value of ``whole=``, and its dtype if that is compared.

    Raises:
        PlacementError: The value has no shape.
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


@dataclass
class LevelCompared:
    """The differences of a level from its model, without those that are excused.

    Attributes:
        name: The name of the level, with its dot.
        model: The model of the level; None where it has keys of a model, but no model is declared.
        fqns: The keys under the level.
        faults: The faults of keys that some rank has.
        missing: The keys that no rank has, with their shapes in the model.
        lacking: Number of keys that no rank has, excused ones included.
        is_seen: Whether any key equals the model's.
        is_other: Whether the level may be something else than its model.
    """

    name: str
    model: ModelKeys | None
    fqns: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    missing: dict[str, Shape] = field(default_factory=dict)
    lacking: int = 0
    is_seen: bool = False
    is_other: bool = False

    @property
    def is_the_model(self) -> bool:
        """Whether the level equals its model, as far as it is compared."""
        return self.is_seen and not self.missing and not self.faults

    def all_faults(self) -> list[Fault]:
        """Return the faults of all keys, missing ones included."""
        return self.faults + [_missing_fault(fqn, shape) for fqn, shape in self.missing.items()]

    def note(self, why: str) -> Fault:
        """Return a note that the level is not its model, with a reason."""
        fqns_of = {f"no rank has {format_count(len(self.missing), 'key')} of it": [*self.missing]}
        fqns_of = {headline: fqns for headline, fqns in fqns_of.items() if fqns}
        for fault in self.faults:
            fqns_of.setdefault(fault.headline, []).append(fault.fqn)
        differs = [
            f"differs:     {format_names(folded_names(fqns), 2)}: {headline}"
            for headline, fqns in list(fqns_of.items())[:MAX_DIFFERENCES]
        ]
        return _level_note(self.name, f"is not the whole model: {why}", *differs)


def compare_with_whole(
    whole: WholeModel,
    world: World,
    states: OptimizerStates,
    excused: Sequence[re.Pattern[str]] = (),
    *,
    complete: bool = True,
    may_lack_levels: bool = False,
) -> WholeComparison:
    """Compare the keys and shapes of all ranks together with the whole model.

    ``WholeModel`` says what is compared with what.

    Args:
        whole: The model, or the models.
        world: The tables of the ranks: what they have, or ask for.
        states: The optimizer states among the keys.
        excused: Patterns of keys that are not compared.
        complete: Whether these are all ranks, so that what none of them has is missing.
        may_lack_levels: Whether a level of which no rank has any key is left out on purpose.
    """
    comparison = WholeComparison(whole, world, states, excused)
    comparison.compare_keys()
    comparison.find_missing(complete=complete, may_lack_levels=may_lack_levels)
    if not comparison.counts and whole.is_flat:
        comparison.faults.append(_no_common_key(whole))
        return comparison
    comparison.judge_levels()
    comparison.compare_states()
    comparison.note_beside()
    return comparison


class WholeComparison:
    """The comparison of all ranks with the whole model, level by level.

    Args:
        whole: The model, or the models.
        world: The tables of the ranks.
        states: The optimizer states among the keys.
        excused: Patterns of keys that are not compared.

    Attributes:
        levels: The levels by name.
        faults: The faults of keys, missing ones included.
        notes: Notes on levels that are not their models or not compared, and on tensors under no
            level.
        not_compared: Tensors that are not compared.
    """

    def __init__(
        self,
        whole: WholeModel,
        world: World,
        states: OptimizerStates,
        excused: Sequence[re.Pattern[str]],
    ) -> None:
        self._whole, self._world, self._excused = whole, world, excused
        self._pieces = {
            fqn: (piece, position)
            for piece in world.pieces
            for position, fqn in enumerate(piece.fqns)
        }
        keys = {key for model in whole.models.values() for key in model.shapes}
        self._parameter_of = {
            fqn: state.parameter
            for fqn, (piece, _) in self._pieces.items()
            if piece.group.kind != OBJECT
            and (state := states.of(fqn)) is not None
            and _level_above_key(state.parameter, keys) is not None
        }
        levels = Levels(whole, [fqn for fqn in self._pieces if fqn not in self._parameter_of])
        self._level_of = levels.of
        self.levels = {name: LevelCompared(name, whole.model_at(name)) for name in levels.names}
        self.faults: list[Fault] = []
        self.notes: list[Fault] = []
        self.not_compared: list[str] = []
        self._beside: list[str] = []

    @property
    def counts(self) -> dict[str, int]:
        """The number of keys that were compared, by level."""
        return {
            level.name: count
            for level in self.levels.values()
            if level.model is not None and (count := len(level.model.shapes) - level.lacking)
        }

    @property
    def text(self) -> str:
        """The number of keys that were compared, and the tensors that were not."""
        counts = [
            format_count(count, "key") + (f" under {name!r}" if name else "")
            for name, count in self.counts.items()
        ]
        text = ", ".join(counts) or "no key"
        if names := self.not_compared:
            text += f"; {format_count(len(names), 'tensor')} not compared"
            text += f" ({format_names(folded_names(names), 2)})"
        return text

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the whole model by the ranks' keys.

        They are those of all keys under levels, missing ones included, and for optimizer state that
        of its parameter.
        """
        shapes = {
            level.name + key: shape
            for level in self.levels.values()
            if level.model is not None
            for key, shape in level.model.shapes.items()
        }
        for fqn, parameter in self._parameter_of.items():
            if of_parameter := self._shapes_of(parameter):
                shapes.setdefault(fqn, of_parameter[0])
        return shapes

    def _is_excused(self, fqn: str) -> bool:
        return matches_any(self._excused, fqn)

    def _faults(self, fqn: str, headline: str, likely: str) -> list[Fault]:
        """Return the fault of a key; none where it is excused."""
        if self._is_excused(fqn):
            return []
        piece, position = self._pieces[fqn]
        declared = f"{format_cuts(piece.group.cuts)}; by rule {self._world.rules(piece, position)}"
        details = (f"declared:    {declared}", likely, _PROPOSED_OUT, WHOLE_PAGE)
        return [Fault(fqn, headline, details)]

    def compare_keys(self) -> None:
        """Compare the keys under levels, without optimizer state."""
        for fqn, (piece, _) in self._pieces.items():
            name, group = self._level_of(fqn), piece.group
            level = None if name is None else self.levels[name]
            model, key = None if level is None else level.model, fqn[len(name or "") :]
            is_key = model is not None and key in model.shapes
            if is_key:
                self._parameter_of.pop(fqn, None)  # of a module named ``state``
            elif fqn in self._parameter_of:
                continue
            if level is None:
                self._beside += [fqn] if group.shape else []
                continue
            level.fqns.append(fqn)
            if model is None:
                self.not_compared.append(fqn)
            elif is_key:
                may_cast = self._whole.is_flat and is_beside_weights(level.name)
                headline = _unlike(model, key, group, may_cast=may_cast)
                level.faults += self._faults(fqn, headline, _OTHER_SHAPE) if headline else []
                level.is_seen = level.is_seen or not (headline or self._is_excused(fqn))
            elif group.kind != OBJECT:
                level.faults += self._faults(fqn, "the whole model has no such key", _UNKNOWN)

    def find_missing(self, *, complete: bool, may_lack_levels: bool) -> None:
        """Find the keys that no rank has."""
        for prefix, level in self.levels.items():
            model = ModelKeys({}) if level.model is None else level.model
            is_expected = complete and (bool(level.fqns) or not may_lack_levels)
            for key, shape in model.shapes.items():
                names = model.names.get(key, (key,))
                if any(prefix + name in self._pieces for name in names):
                    continue
                level.lacking += 1
                if is_expected and not self._is_excused(prefix + key):
                    level.missing[prefix + key] = shape

    def judge_levels(self) -> None:
        """Add the faults of keys, and notes on levels that may be something else."""
        weights = [level for level in self.levels.values() if not is_beside_weights(level.name)]
        exact = next((level.name for level in weights if level.is_the_model), None)
        for level in self.levels.values():
            if level.model is None:
                if not all(map(self._is_excused, level.fqns)):
                    count = format_count(len(level.fqns), "key")
                    headline = f"is no level of whole=, and not compared: {count}, as the model's"
                    self.notes.append(_level_note(level.name, headline))
            elif self._whole.is_flat and is_beside_weights(level.name) and weights:
                if is_beside_weights(level.name, _OPTIMIZERS):
                    level.missing.clear()
                if level.faults or level.missing:
                    self.notes.append(level.note("an average may be of other weights"))
            elif self._whole.is_flat and level.faults and exact is not None:
                self.notes.append(level.note(f"it is taken for another one, since {exact!r} is"))
            else:
                self.faults += level.all_faults()
                continue
            level.is_other = True

    def compare_states(self) -> None:
        """Compare optimizer state with its parameters."""
        for fqn, parameter in self._parameter_of.items():
            group = self._pieces[fqn][0].group
            shapes = self._shapes_of(parameter)
            if not shapes:
                self._beside += [fqn] if group.shape else []
            elif headline := _unlike_parameter(group, shapes):
                self.faults += self._faults(fqn, headline, _OTHER_SHAPE)

    def _shapes_of(self, parameter: str) -> list[Shape]:
        """Return the shapes that a parameter has, by its name with or without a level."""
        shapes: dict[Shape, None] = {}
        for prefix, level in self.levels.items():
            for name in (parameter, parameter.removeprefix(prefix)):
                if level.model is not None and name in level.model.shapes:
                    shapes[level.model.shapes[name]] = None
                if level.is_other and prefix + name in self._pieces:
                    shapes[self._pieces[prefix + name][0].group.shape] = None
        return list(shapes)

    def note_beside(self) -> None:
        """Add a note on floating-point tensors that are compared with nothing."""
        self.not_compared += self._beside
        names = [
            fqn
            for fqn in self._beside
            if (dtype := self._pieces[fqn][0].group.dtype) is not None
            and dtype.is_floating_point
            and not self._is_excused(fqn)
        ]
        if not names:
            return
        headline = "under no level of whole=, and state of no parameter there: not compared"
        details = (
            "likely:      names that rename= does not make the whole model's; or what is beside it",
            'way out:     whole={"model": ..., level: {key: shape}} has it compared; '
            "waive={pattern: reason} where it is right",
        )
        self.notes.append(Fault(format_names(folded_names(names), 3), headline, details))


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
_PROPOSED_OUT = f"way out:     {PROPOSE}; waive={{pattern: reason}} where it is right"


def _unlike(model: ModelKeys, key: str, group: Group, *, may_cast: bool) -> str:
    """Return the difference of a key from the model's as text; empty if there is none."""
    shape, dtype = model.shapes[key], model.dtypes.get(key, group.dtype)
    if group.kind == OBJECT:
        return f"is an object, where the whole model has a {shape} tensor"
    if group.shape != shape:
        return f"is {group.shape}, where the whole model has {shape}"
    if group.dtype == dtype or may_cast:
        return ""
    return f"is of {group.dtype}, where the whole model has {dtype}"


def _unlike_parameter(group: Group, shapes: Sequence[Shape]) -> str:
    """Return why optimizer state does not fit its parameter as text; empty if it does.

    Args:
        group: The group of the state.
        shapes: The shapes that its parameter may have.
    """
    shape, ndims = group.shape, {len(of_parameter) for of_parameter in shapes}
    follows = any(followed_dims(shape, of_parameter) for of_parameter in shapes)
    is_square = len(shape) > 1 and len(set(shape)) == 1  # a preconditioner
    is_cut = any(cut.size > 1 for cut in group.cuts)
    if follows or prod(shape) == 1 or is_square or (len(shape) not in ndims and not is_cut):
        return ""
    return f"is {shape}, where its parameter has {shapes[0]} in the whole model"


def _level_note(level: str, headline: str, *details: str) -> Fault:
    name = level.rstrip(".")
    way_out = (
        f'way out:     whole={{"{name}": {{key: shape}}, ...}} says what each level is; '
        "waive={pattern: reason} where it is right"
    )
    return Fault(name or "keys under no level", headline, (*details, way_out))


def _no_common_key(whole: WholeModel) -> Fault:
    keys = [level + key for level, model in whole.models.items() for key in model.shapes]
    details = (
        f"whole model: {format_count(len(keys), 'key')}, as {keys[0]}",
        "likely:      names that rename= does not make those of the whole model; or a state dict "
        "without weights, as of adapters alone",
        "way out:     whole= with the keys of what is saved, or a Placements without whole=",
    )
    return Fault("this state dict", "has no key of whole=", details)


def _missing_fault(fqn: str, shape: Shape) -> Fault:
    details = (
        "likely:      a layer or an expert that no rank has; or names that several ranks give "
        "to different tensors, as experts that each rank counts from 0",
        f"way out:     {PROPOSE}; waive={{pattern: reason}} where they are left out on purpose",
    )
    headline = "no rank has this key of the whole model"
    return Fault(fqn, headline, details, (f"whole model: {shape}",))
