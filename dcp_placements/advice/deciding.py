"""From what all ranks hold to the declaration that fits: renames, rules, and what stays open.

Ranks that hold one box of a tensor with other contents hold other shards of it, or other tensors of
one name. First come names that ranks count from 0, then the axes and dims of each tensor, then the
patterns; at last each key whose contents differ has to be explained by them. Two ep ranks hold
experts of shape (2, 3) of (4, 3), and equal norms::

    experts   differs along ep                  {"experts": Fitting((("ep", Shard(0)),))}
    norm      is equal on all ranks             no rule
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from torch.distributed.tensor import Shard

from dcp_placements.advice.block import Fitting, MeshNames, Proposal
from dcp_placements.advice.cut_dims import (
    DimFinder,
    KindOfTensor,
    is_block_norm,
)
from dcp_placements.advice.facts import FactsOfRanks, OnRanks
from dcp_placements.advice.local_numbers import (
    PIPELINE_AXIS,
    Continued,
    NumberRows,
    continued_numbers,
    numbers_of,
    pattern_of_number,
    rows_by_head,
    with_global_numbers,
)
from dcp_placements.errors import PlacementError
from dcp_placements.layout.boxes import Shape
from dcp_placements.names.known_names import EXPERT_AXIS, NAMES_EXPERT, TENSOR_AXIS
from dcp_placements.names.optimizer_state import followed_dims
from dcp_placements.names.renames import Renames, number_in
from dcp_placements.rules.patterns import PlacementRules, compile_pattern, matches_any
from dcp_placements.short_text import format_names, numbers_in, without_numbers
from dcp_placements.table.whole import ModelKeys, WholeModel

OF_EACH_RANK = re.compile(r"(?:^|[._])(?:\w*rng\w*|\w*random\w*|seeds?|generators?)(?:[._]|$)")
"""Keys of random numbers, of which each rank has its own."""

_BEFORE = "_._."
"""A prefix that stands for any levels above a key in a state dict, such as ``optim.state.``."""

_MOST_CELLS = 400_000
"""Keys times ranks that are looked at; of a larger world some keys of each pattern."""

_MOST_CHOICES = 3

Options = dict[str, tuple[Fitting, Sequence[str]]]
"""By pattern, the placement and the names."""


def decide(
    facts: FactsOfRanks,
    whole: WholeModel | None = None,
    *,
    drifted: Collection[str] = (),
    strides: Mapping[str, int] | None = None,
) -> Proposal:
    """Return the declaration that fits.

    Args:
        facts: What all ranks hold.
        whole: The unsharded model; None where it is not known.
        drifted: Keys whose replicas have drifted apart, which no rule explains.
        strides: By name, how far ranks are apart along an axis that no mesh has.

    Raises:
        PlacementError: No rank has a key of the model.
    """
    return _Decision(facts, whole, frozenset(drifted), strides or {}).proposal()


@dataclass
class _Decision:
    """A proposal, and what it is made of.

    Attributes:
        facts: What all ranks hold.
        whole: The unsharded model; None where it is not known.
        drifted: Keys whose replicas have drifted apart.
        strides: By name, how far ranks are apart along an axis that no mesh has.
        result: The proposal so far.
    """

    facts: FactsOfRanks
    whole: WholeModel | None
    drifted: frozenset[str]
    strides: Mapping[str, int]
    result: Proposal = field(default_factory=Proposal)

    @cached_property
    def level(self) -> str | None:
        """The level of the model in the keys; None without ``whole=``."""
        if self.whole is None:
            return None
        keys = list(self.facts.tensors)
        level = self.whole.main_level(keys)
        if level is None:
            expected = [key for of_level in self.whole.models.values() for key in of_level.shapes]
            text = f"whole= has {format_names(expected, 3)}, the ranks {format_names(keys, 3)}"
            raise PlacementError(f"no rank has a key of whole=\n    found:       {text}")
        return level

    @cached_property
    def model(self) -> ModelKeys | None:
        """The unsharded model; None where it is not known."""
        return None if self.whole is None else self.whole.model_at(self.level or "")

    @cached_property
    def keys(self) -> dict[str, str]:
        """The key of each parameter by its name."""
        return self.facts.names(self.level)

    def proposal(self) -> Proposal:
        """Return the proposal."""
        self.result.names = MeshNames(self.facts.named.meshes, self.facts.sizes, self.strides)
        tensors = self._numbered(self._sample())
        kinds = self._kinds(tensors)
        finder = DimFinder(self.facts, self.result.names, kinds)
        by_name: dict[str, list[KindOfTensor]] = {}
        for kind in kinds:
            by_name.setdefault(kind.name, []).append(kind)
        options: Options = {}
        for name, of_name in by_name.items():
            choices: dict[tuple[Fitting, str], list[str]] = {}
            for kind in of_name:
                if all(map(self._is_ruled, kind.names)):
                    continue  # its rule stays
                choices.setdefault(self._choice(kind, finder), []).extend(kind.names)
            for (fitting, why), members in choices.items():
                patterns = {_starred(name): members}
                if len(choices) > 1:
                    patterns = {member: [member] for member in members}
                for pattern, names in patterns.items():
                    options[pattern] = fitting, names
                    if why:
                        self.result.undecided[pattern] = why
        if self.model is None:
            self._cut_zero_biases(by_name, options)
            kind_of = {name: kind for kind in kinds for name in kind.names}
            self._note_constants(kind_of, options)
            self._note_vectors(kind_of, options)
        self.result.rules = _rules(options)
        self._name_by_rank()
        self._list_unexplained()
        return self.result

    def _sample(self) -> dict[str, OnRanks]:
        """Return parameters by name; of a large world some of each pattern."""
        by_pattern: dict[str, list[str]] = {}
        for name in self.keys:
            by_pattern.setdefault(without_numbers(name), []).append(name)
        cells = len(self.facts.positions) * max(len(by_pattern), 1)
        most = max(_MOST_CELLS // cells, 4)
        names = [name for names in by_pattern.values() for name in names[:: -(-len(names) // most)]]
        return {name: self.facts.held(self.keys[name]) for name in names}

    def _numbered(self, tensors: dict[str, OnRanks]) -> dict[str, OnRanks]:
        """Return tensors by their names in the whole, where ranks count their own from 0."""
        by_key = {key: name for name, key in self.keys.items()}
        rows_of = [
            (rows_by_head([by_key[key] for key in keys if key in by_key]), ranks)
            for keys, ranks in self.facts.keys_by_ranks
        ]
        totals = None if self.model is None else rows_by_head(self.model.shapes)
        heads = dict.fromkeys(head for rows, _ in rows_of for head in rows)
        for head in heads if totals is None else totals:
            of_ranks: dict[int, NumberRows] = {
                rank: rows.get(head, {}) for rows, ranks in rows_of for rank in ranks
            }
            union, total = set[int]().union(*map(numbers_of, of_ranks.values())), None
            if totals is not None:
                numbers = numbers_of(totals[head])
                total = len(numbers)
                if not union or len(union) >= total or numbers != set(range(total)):
                    continue
            continued = continued_numbers(self.facts, head, of_ranks, total, tensors)
            likely, pattern = continued.likely, pattern_of_number(head)
            if likely and self._finds_no_other(head):
                self.result.numberings.append(likely[0])
                self.result.undecided[pattern] = self._open_of_numbers(head, continued)
                tensors = with_global_numbers(self.facts, head, likely[0], tensors)
            elif total is not None or continued.why_not:
                why = continued.why_not or f"the ranks have {len(union)} of its {total} numbers"
                self.result.undecided.setdefault(pattern, why)
                self.result.unsolved[pattern] = None
            elif continued.shared is not None:
                self.result.undecided[pattern] = (
                    f"taken as the same tensors on all ranks, cut along {continued.shared.axis}; "
                    "where each rank counts others from 0, no rules for them, and\n"
                    f"    rename={continued.shared.text(self.result.names)}"
                )
        return tensors

    def _open_of_numbers(self, head: str, continued: Continued) -> str:
        """Return what else fits than the likeliest numbers."""
        first, *others = continued.likely
        texts = [
            f"taken as contiguous along {first.axis}; names and shapes fit other orders, too, such "
            "as round robin or interleaved stages"
        ]
        usual = EXPERT_AXIS if NAMES_EXPERT.search(head) else PIPELINE_AXIS
        if self.model is None and not usual.match(first.axis):
            texts.append(
                f"or these are the same tensors on all ranks, cut along {first.axis}: rules for "
                "them, and no Renumber"
            )
        if self.model is None and head.count("{}") > 1:
            texts.append("or the number before it is the one that each rank counts from 0")
        if others:
            texts.append("and each of these")
        choices = [f"    rename={each.text(self.result.names)}" for each in others]
        return "\n".join(["; ".join(texts), *choices])

    def _finds_no_other(self, head: str) -> bool:
        """Whether the pattern of a number finds no other number; else that is noted."""
        pattern = pattern_of_number(head)
        others = [
            name
            for name in self.keys
            if (number := number_in(pattern, f"{_BEFORE}{name}"))
            and without_numbers(number.head) != f"{_BEFORE}{head}"
        ]
        if others:
            self.result.undecided[pattern] = (
                "the ranks count it from 0, and this pattern finds another number in "
                f"{format_names(others, 1)}: rename= has to be a function"
            )
            self.result.unsolved[pattern] = None
        return not others

    def _kinds(self, tensors: Mapping[str, OnRanks]) -> list[KindOfTensor]:
        """Return the tensors by kind; tensors whose number is not known are left out."""
        model = self.model
        for name in () if model is None or len(tensors) < len(self.keys) else model.shapes:
            is_named_so = model is None or model.names.get(name, (name,))[0] == name
            if name not in tensors and is_named_so and not self._is_unnumbered(name):
                pattern = _starred(without_numbers(name))
                self.result.undecided[pattern] = "no rank has this key"
                self.result.unsolved[pattern] = None
        kinds: dict[Any, list[str]] = {}
        for name, held in tensors.items():
            if self._is_unnumbered(name):
                continue
            shape = None if model is None else model.shapes.get(name)
            if model is not None and not self._is_in_model(name, model):
                continue
            shards = tuple([(rank, tensor.shape, tensor.part) for rank, tensor in held])
            kinds.setdefault((without_numbers(name), shape, shards), []).append(name)
        return [
            KindOfTensor(name, shape, names, [tensors[member] for member in names])
            for (name, shape, _), names in kinds.items()
        ]

    def _is_in_model(self, name: str, model: ModelKeys) -> bool:
        """Whether the unsharded model has a tensor, with its dtype; else that is noted."""
        key = self.keys.get(name)
        dtype = None if key is None else self.facts.dtype_of(key)
        if name in model.shapes and model.dtypes.get(name, dtype) == dtype:
            return True
        if name.partition(".")[0] in model.heads:
            pattern = _starred(without_numbers(name))
            why = "is of another dtype in" if name in model.shapes else "is not in"
            self.result.undecided[pattern] = f"{why} the whole model"
            self.result.unsolved[pattern] = None
        return False

    def _is_ruled(self, name: str) -> bool:
        """Whether a rule of the declaration cuts a tensor."""
        key = self.keys.get(name)
        return key is not None and self.facts.is_ruled(key)

    def _is_unnumbered(self, name: str) -> bool:
        heads = [pattern_of_number(without_numbers(head)) for head, *_ in numbers_in(name)]
        return any(head in self.result.unsolved for head in heads)

    def _choice(self, kind: KindOfTensor, finder: DimFinder) -> tuple[Fitting, str]:
        """Return the placement of a kind, and what is open."""
        pattern = _starred(kind.name)
        fittings, why = finder.fittings(kind)
        is_drifted = not self.drifted.isdisjoint([self.keys.get(name, "") for name in kind.names])
        if fittings and fittings[0].placements and is_drifted:
            fittings, why = [], "its copies have drifted apart"
        named: Fitting | None = None
        if fittings:
            named, note = finder.by_name(kind, fittings[0])
            why = note or why
        if named is None:
            self.result.unsolved[pattern] = None
            return Fitting(), why
        self.result.granted.update(dict.fromkeys(finder.granted(kind, named)))
        others = fittings[1 : _MOST_CHOICES + 1]
        if others:
            fit = "contents" if self.model is None else "shapes and contents"
            why = why or f"the likeliest; {fit} fit each of these as well"
            texts = [fitting.text(self.result.names) for fitting in others]
            why = "\n".join([why, *[f'    "{pattern}": {text},' for text in texts]])
        return named, why

    def _cut_zero_biases(
        self, by_name: Mapping[str, Sequence[KindOfTensor]], options: Options
    ) -> None:
        """Cut biases that are all zeros as the rows of their weights are cut.

        Args:
            by_name: The kinds by name.
            options: The placements; takes in those of biases.
        """
        for name, kinds in by_name.items():
            weight = f"{name.removesuffix('bias')}weight"
            pattern, of_weight = _starred(name), options.get(_starred(weight))
            if not name.endswith(".bias") or of_weight is None or pattern not in options:
                continue
            fitting = of_weight[0]
            rows = {kind.local_shape[:1] for kind in by_name[weight]}
            shards = [tensor for kind in kinds for held in kind.held for _, tensor in held]
            is_zero = all(tensor.digest is None and tensor.shape in rows for tensor in shards)
            cuts = tuple([(axis, entry) for axis, entry in fitting.placements if not entry.dim])
            is_even = fitting.whole is None and len(cuts) == 1 and TENSOR_AXIS.match(cuts[0][0])
            if is_zero and is_even and not options[pattern][0].placements:
                options[pattern] = Fitting(cuts), options[pattern][1]
                self.result.undecided[pattern] = "its elements are all equal: cut as its weight is"

    def _note_vectors(self, kind_of: Mapping[str, KindOfTensor], options: Options) -> None:
        """Note vectors that may be no shards; a bias is one where the rows of its weight are cut.

        Args:
            kind_of: The kinds by the names of their tensors.
            options: The placements.
        """
        for pattern, (fitting, names) in options.items():
            cuts = dict(fitting.placements)
            if not cuts or kind_of[names[0]].ndim != 1 or pattern in self.result.undecided:
                continue
            weight = options.get(f"{pattern.removesuffix('bias')}weight")
            rows = [] if weight is None else [axis for axis, e in weight[0].placements if not e.dim]
            if not (pattern.endswith(".bias") and cuts.keys() == {*rows}):
                self.result.undecided[pattern] = (
                    "a shard by its contents; where it is a counter that each rank keeps, or a "
                    "copy that has drifted, this rule is wrong"
                )

    def _note_constants(self, kind_of: Mapping[str, KindOfTensor], options: Options) -> None:
        """Note tensors whose elements are all equal where others are cut.

        Args:
            kind_of: The kinds by the names of their tensors.
            options: The placements.
        """
        cut = [pattern for pattern, (fitting, _) in options.items() if fitting.placements]
        for pattern, (fitting, names) in options.items() if cut else ():
            ndim = kind_of[names[0]].ndim
            is_open = not fitting.placements and pattern not in self.result.undecided
            if not is_open or not ndim or is_block_norm(pattern):
                continue
            shards = [tensor for name in names for held in kind_of[name].held for _, tensor in held]
            # What one rank alone holds has no digest, either.
            is_shared = len({tensor.part for tensor in shards}) < len(kind_of[names[0]].held[0])
            if not is_shared or any(tensor.digest is not None for tensor in shards):
                continue
            weight = options.get(f"{pattern.removesuffix('bias')}weight")
            is_bias = pattern.endswith(".bias") and weight is not None
            if is_bias and weight and all(entry.dim for _, entry in weight[0].placements):
                continue  # the rows of its weight are whole
            beside = max(cut, key=lambda other: _components_shared(other, pattern))
            placements = options[beside][0].placements
            choice = [(axis, Shard(entry.dim)) for axis, entry in placements if entry.dim < ndim]
            other = Fitting(tuple(choice) or ((placements[0][0], Shard(0)),))
            self.result.undecided[pattern] = (
                f"its elements are all equal, so nothing shows whether it is cut as {beside} is; "
                f'then\n    "{pattern}": {other.text(self.result.names)},'
            )

    def _name_by_rank(self) -> None:
        """Give a name per rank to random numbers of each rank's own."""
        for key in self.keys.values():
            if not OF_EACH_RANK.search(key) or not self.facts.differs_within(key, ()):
                continue
            for pattern in [*self.result.unsolved, *self.result.rules]:
                if compile_pattern(pattern.replace("{}", "*")).search(f".{key}"):
                    self.result.unsolved.pop(pattern, None)
                    self.result.undecided.pop(pattern, None)
                    self.result.rules.pop(pattern, None)
            self.result.own_names.append(key)

    def _list_unexplained(self) -> None:
        """List each key whose contents differ where its rule and renames make it one tensor."""
        table = PlacementRules(dict.fromkeys(self.result.rules))
        names = {key: name for name, key in self.keys.items()}
        for key in self.facts.tensors:
            is_own = key in self.result.own_names
            if not is_own and self.facts.differs_within(key, self._axes_of(key, table)):
                pattern = _starred(without_numbers(names.get(key, key)))
                self.result.unsolved[pattern] = None

    def _axes_of(self, key: str, table: PlacementRules) -> list[str]:
        """Return the axes along which ranks hold other shards or tensors of a key, as proposed.

        Args:
            key: The key.
            table: Tells the pattern of a name.
        """
        numberings = self.result.numberings
        axes = [numbered.axis for numbered in numberings if number_in(numbered.pattern, key)]
        piece = self.facts.world.pieces[self.facts.tensors[key][0]]
        position = self.facts.positions[int(piece.ranks[0])]
        steps = [numbered.renumber(position[numbered.axis]) for numbered in numberings]
        pattern = table.pattern_of(Renames(*steps).name(key))
        shape: Shape = piece.group.shape
        if pattern is None or not shape or self.facts.is_ruled(key):
            return axes
        cuts = self.result.rules[pattern].placements
        state = self.facts.states.of(key)
        owner = None if state is None else self.keys.get(state.parameter)
        if owner is not None and owner != key:
            ways = followed_dims(shape, self.facts.shape_of(owner))
            followed = ways[0] if len(ways) == 1 else ()
            cuts = tuple([(axis, entry) for axis, entry in cuts if entry.dim in followed])
        return [*axes, *[axis for axis, _ in cuts if axis not in axes]]


def _starred(name: str) -> str:
    """Return the pattern of a name that has ``{}`` for its numbers."""
    return name.replace("{}", "*")


def _components_shared(name: str, other: str) -> int:
    """Return how many components two names begin with together."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])


def _rules(options: Mapping[str, tuple[Fitting, Sequence[str]]]) -> dict[str, Fitting]:
    """Return the options by pattern in an order in which each key meets its own pattern first.

    A pattern matches keys that have more components, too, as ``head`` matches ``blocks.0.head``.
    Patterns that shard nothing are left out where no other pattern matches their keys.

    Args:
        options: By pattern, the placement and the keys.
    """
    ordered = sorted(options, key=lambda pattern: (-pattern.count("."), pattern.count("*")))
    table = PlacementRules(dict.fromkeys(ordered))
    of_key = {
        name: pattern
        for pattern, (_, keys) in options.items()
        for key in keys
        for name in (key, f"{_BEFORE}{key}", f"{_BEFORE}{key}._")
    }
    others = [(pattern, table.pattern_of(name) or "") for name, pattern in of_key.items()]
    wrong = {first for pattern, first in others if options[first][0] != options[pattern][0]}
    if starred := [pattern for pattern in wrong if "*" in pattern]:
        # ``*.w`` matches ``model.w``: its keys one by one do not.
        apart = {
            key: (options[pattern][0], [key]) for pattern in starred for key in options[pattern][1]
        }
        return _rules(
            {pattern: of for pattern, of in options.items() if pattern not in starred} | apart
        )
    sharding = [compile_pattern(pattern) for pattern in ordered if options[pattern][0].placements]
    met = {of_key[name] for name in of_key if matches_any(sharding, name)}
    return {
        pattern: options[pattern][0]
        for pattern in ordered
        if options[pattern][0].placements or pattern in met
    }
