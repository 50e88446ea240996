"""A proposed declaration: what the shapes, names and contents of all ranks leave possible.

The unsharded model gives the size of each tensor, and the mesh the number of ranks along each axis.
Few placements over the axes that a tensor's DTensor does not shard make the shards that the ranks
hold. Where several do, replicas have to be equal, so an axis along which the contents differ
shards. Two ep ranks hold experts of shape (2, 3) of (4, 3), and equal norms::

    shapes      experts: [None over ep] makes (4, 3), [Shard(0)] makes (2, 3): Shard(0) fits
                norm:    [None over ep] makes (3,): no rule
    proposal    {"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})}

A proposal is not a declaration: it lists what shapes and contents leave open, and applies nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.tensor import Shard

from dcp_placements._torch import DistWrapper, facts_of, state_dicts_of_statefuls, world_size
from dcp_placements.bind.lint import GATE_UP, QKV
from dcp_placements.errors import PlacementError
from dcp_placements.layout.boxes import Shape
from dcp_placements.layout.sharding import Sharding
from dcp_placements.names.renames import Renames, Renumber, contiguous, number_in
from dcp_placements.placements import Placements
from dcp_placements.rules.mesh import Mesh, mesh_axes
from dcp_placements.rules.patterns import (
    PlacementRules,
    RuleTable,
    compile_pattern,
    matches_any,
)
from dcp_placements.rules.placement import CheckpointPlacement, FusedShard, cut_of, format_placement
from dcp_placements.short_text import (
    format_names,
    numbers_in,
    without_numbers,
)
from dcp_placements.table.digests import sampled_digests
from dcp_placements.table.whole import ModelKeys, WholeModel

_JOINED = re.compile(r"(?:^|[._])(?:w?kv(?:_proj)?(?=\.|$)|w\d_?w\d)")
"""Names of tensors that join others along a dim, perhaps: shapes and contents fit a plain shard."""

_BEFORE = "_._."
"""A prefix that stands for any levels above a key in a state dict, such as ``optim.state.``."""


class Fitting(NamedTuple):
    """One way to place a tensor: ``Fitting((("ep", Shard(0)),))``.

    Attributes:
        placements: Pairs of an axis that shards it, and its placement.
        whole: Its whole shape, where the placements and the shards do not give it.
        padded: The shape that is cut, where that is larger.
    """

    placements: tuple[tuple[str, Any], ...] = ()
    whole: Shape | None = None
    padded: Shape | None = None

    def __str__(self) -> str:
        if not self.placements:
            return "None"
        axes = ", ".join(
            f'"{axis}": {format_placement(placement)}' for axis, placement in self.placements
        )
        shapes = {"global_shape": self.whole, "padded_shape": self.padded}
        given = "".join([f", {name}={shape}" for name, shape in shapes.items() if shape])
        return f"CheckpointPlacement(mesh, {{{axes}}}{given})"

    def on(self, mesh: Mesh) -> CheckpointPlacement | None:
        """Return it on a mesh; None where nothing shards it."""
        if not self.placements:
            return None
        return CheckpointPlacement(
            mesh, dict(self.placements), global_shape=self.whole, padded_shape=self.padded
        )


class Numbered(NamedTuple):
    """Names that each rank along an axis counts from 0: ``Numbered("experts.{}", "ep", (2, 2))``.

    Attributes:
        pattern: Pattern of the names, ``{}`` for the number.
        axis: Axis along which the ranks divide them.
        counts: Number of names at each position of the axis.
    """

    pattern: str
    axis: str
    counts: tuple[int, ...]

    def __str__(self) -> str:
        ids = f'contiguous({list(self.counts)}, at=mesh.get_local_rank("{self.axis}"))'
        return f'Renumber("{self.pattern}", {ids}, total={sum(self.counts)})'

    def on(self, mesh: Any) -> Renumber:
        """Return it on a mesh."""
        ids = contiguous(self.counts, at=mesh.get_local_rank(self.axis))
        return Renumber(self.pattern, ids, total=sum(self.counts))


@dataclass
class Proposal:
    """A declaration that fits the shapes, names and contents of all ranks.

    ``print`` of it is Python to paste, in terms of ``mesh`` and ``whole``.

    Attributes:
        placements: The proposal as ``Placements`` on this rank. Undecided keys have no rule in it,
            unless ``undecided`` says which one was chosen.
        rules: Placements by pattern, in the order in which rules are matched.
        numberings: Renames.
        undecided: By pattern of keys, why they have no rule, or what else would fit: one option a
            line.
    """

    placements: Placements = field(init=False, repr=False, compare=False)
    rules: dict[str, Fitting] = field(default_factory=dict)
    numberings: list[Numbered] = field(default_factory=list)
    undecided: dict[str, str] = field(default_factory=dict)

    def on(self, mesh: Any, whole: WholeModel) -> Proposal:
        """Return it with its ``placements`` on a mesh."""
        rules: RuleTable = {pattern: fitting.on(mesh) for pattern, fitting in self.rules.items()}
        renames = [numbered.on(mesh) for numbered in self.numberings]
        proposal = replace(self)
        rename = Renames(*renames) if renames else None
        proposal.placements = Placements(rules, rename=rename, whole=whole)
        return proposal

    def __str__(self) -> str:
        rules = [
            f"        {_quoted(pattern)}: {fitting}," for pattern, fitting in self.rules.items()
        ]
        for pattern, why in self.undecided.items():
            rules += [f"        # {line}" for line in f"{pattern}: {why}".split("\n")]
        renames = [f"        {numbered}," for numbered in self.numberings]
        if renames:
            renames = ["    rename=Renames(", *renames, "    ),"]
        lines = ["placements = Placements(", "    {", *rules, "    },", *renames]
        text = "\n".join([*lines, "    whole=whole,", ")"])
        used = ", ".join([name for name in _IMPORTED if f"{name}(" in text])
        imports = f"from torch.distributed.tensor import Shard\n\nfrom dcp_placements import {used}"
        return f"{imports}\n\n{text}"


_IMPORTED = ["CheckpointPlacement", "FusedShard", "Placements", "Renames", "Renumber", "contiguous"]


def _quoted(pattern: str) -> str:
    return json.dumps(pattern, ensure_ascii=False)


def propose_placements(
    whole: Any,
    state_dict: dict[str, Any],
    mesh: Any,
    process_group: dist.ProcessGroup | None = None,
) -> Proposal:
    """Return the declaration that fits what the ranks hold of the unsharded model.

    Call it on all ranks, with weights that differ as those of a real model do, and best after
    a step. The coordinator gets shapes and digests of all ranks, some 100 bytes for each tensor and
    rank; no data moves. Nothing is applied: read what it prints, and paste it.

    Args:
        whole: The unsharded model, as for ``Placements``.
        state_dict: The state dict, as for ``dcp.save``.
        mesh: The mesh whose axes shard tensors beside their DTensors, with axis names.
        process_group: The process group, as for ``dcp.save``.

    Returns:
        The proposal; its text is the same on all ranks.

    Raises:
        PlacementError: A mesh without names, or a state dict with no key of the model.
    """
    model = WholeModel.of(whole)
    names = axis_names(mesh)
    if not names:
        raise PlacementError("mesh= has no axis names: init_device_mesh(..., mesh_dim_names=(...))")
    plain = state_dicts_of_statefuls(state_dict)

    def decided(facts: list[RankFacts]) -> Proposal:
        return decide(model, facts, dict(zip(names, mesh.shape, strict=True)))

    try:
        ranks = DistWrapper(process_group, world_size() > 1, 0)
        proposal = ranks.all_reduce("propose", lambda: rank_facts(plain, mesh), decided)
    except CheckpointException as failed:
        raise one_error(failed) from None
    return proposal.on(mesh, model)


def one_error(failed: CheckpointException) -> Exception:
    """Return the coordinator's refusal, or the error of the first rank that failed."""
    errors = [failed.failures[rank][0] for rank in sorted(failed.failures)]
    error = next((failure for failure in errors if isinstance(failure, PlacementError)), errors[0])
    return error if isinstance(error, Exception) else RuntimeError(str(failed))


def axis_names(mesh: Any) -> tuple[str, ...]:
    """Return the names of the axes of a mesh; none where it has no names, or is no mesh."""
    return tuple(getattr(mesh, "mesh_dim_names", None) or ())


class TensorFacts(NamedTuple):
    """One tensor on one rank.

    Attributes:
        shape: The shape of its DTensor, or of a plain tensor.
        own: The axes over which its DTensor shards it, and this rank's position along each.
        digest: Digest of its elements on this rank; None where they are all equal, as in a new
            moment.
    """

    shape: Shape
    own: tuple[tuple[str | None, int], ...]
    digest: bytes | None


class LocalTensor(NamedTuple):
    """A tensor of one key on a rank, and the rank's position along each axis of the mesh."""

    position: dict[str, int]
    tensor: TensorFacts


class RankFacts(NamedTuple):
    """What a rank holds: its position along each axis of the mesh, and its tensors by key."""

    position: dict[str, int]
    tensors: dict[str, TensorFacts]


def rank_facts(state_dict: dict[str, Any], mesh: Any) -> RankFacts:
    """Return what this rank holds of a state dict."""
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    planner.set_up_planner(state_dict)
    tensors: dict[str, TensorFacts] = {}
    locals_: dict[str, torch.Tensor] = {}
    for fqn, value in planner.state_dict.items():
        if not hasattr(value, "shape") or not isinstance(fqn, str):
            continue
        local, own_mesh, placements, shape = facts_of(value)
        axes = () if own_mesh is None else mesh_axes(own_mesh) or ()
        own = [
            (axis.name, axis.position)
            for axis, placement in zip(axes, placements, strict=False)
            if axis.size > 1 and not placement.is_replicate()
        ]
        tensors[fqn] = TensorFacts(tuple(shape), tuple(own), None)
        locals_[fqn] = local
    for fqn, digest in contents_of(locals_).items():
        tensors[fqn] = tensors[fqn]._replace(digest=digest)
    coordinate = mesh.get_coordinate()
    position = {} if coordinate is None else dict(zip(mesh.mesh_dim_names, coordinate, strict=True))
    return RankFacts(position, tensors)


def contents_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes | None]:
    """Return digests of local tensors; None for a tensor whose elements are all equal."""
    values = [tensor.detach() for tensor in tensors.values()]
    digests = dict(zip(tensors, sampled_digests(values), strict=True))
    for fqn, local in zip(tensors, values, strict=True):
        if not local.numel() or bool((local == local[(0,) * local.dim()]).all()):
            digests[fqn] = None
    return digests


def decide(whole: WholeModel, facts: Sequence[RankFacts], sizes: Mapping[str, int]) -> Proposal:
    """Return the declaration that fits.

    Args:
        whole: The unsharded model.
        facts: Facts of the ranks of the mesh.
        sizes: The axes of the mesh.

    Raises:
        PlacementError: No rank has a key of the model.
    """
    keys = list(dict.fromkeys(fqn for rank in facts for fqn in rank.tensors))
    level = whole.main_level(keys)
    model = None if level is None else whole.model_at(level)
    if level is None or model is None:
        expected = [key for of_level in whole.models.values() for key in of_level.shapes]
        text = f"whole= has {format_names(expected, 3)}, the ranks {format_names(keys, 3)}"
        raise PlacementError(f"no rank has a key of whole=\n    found:       {text}")
    ranks = [
        RankFacts(
            rank.position,
            {
                fqn.removeprefix(level): tensor
                for fqn, tensor in rank.tensors.items()
                if fqn.startswith(level)
            },
        )
        for rank in facts
        if rank.position or not sizes
    ]
    axes = {name: size for name, size in sizes.items() if size > 1}
    decision = Proposal()
    ranks, unnumbered = _renumbered(model, ranks, axes, decision)
    # By name without numbers, the keys with equal shapes on all ranks.
    kinds: dict[str, dict[Any, list[str]]] = {}
    held: dict[str, list[LocalTensor]] = {}
    for key, shape in model.shapes.items():
        if any(without_numbers(head) in unnumbered for head, *_ in numbers_in(key)):
            continue
        held[key] = _held(key, ranks)
        if not held[key] and model.names.get(key, (key,))[0] != key:
            continue
        shapes = tuple([(tensor.shape, tuple(position.items())) for position, tensor in held[key]])
        kinds.setdefault(without_numbers(key), {}).setdefault((shape, shapes), []).append(key)
    options: dict[str, tuple[Fitting, list[str]]] = {}
    for name, of_name in kinds.items():
        choices: dict[tuple[Fitting, str], list[str]] = {}
        for (shape, _), members in of_name.items():
            choice = _chosen(_starred(name), shape, [held[key] for key in members], axes)
            choices.setdefault(choice, []).extend(members)
        for (option, why), members in choices.items():
            by_pattern = (
                {_starred(name): members} if len(choices) == 1 else {m: [m] for m in members}
            )
            for pattern, keys in by_pattern.items():
                options[pattern] = option, keys
                if why:
                    decision.undecided[pattern] = why
    decision.rules = _rules(options)
    return decision


def _held(key: str, ranks: Sequence[RankFacts]) -> list[LocalTensor]:
    """Return the tensors of one key on the ranks that have it."""
    return [LocalTensor(rank.position, rank.tensors[key]) for rank in ranks if key in rank.tensors]


def _starred(name: str) -> str:
    """Return the pattern of a name that has ``{}`` for its numbers."""
    return name.replace("{}", "*")


def _rules(
    options: Mapping[str, tuple[Fitting, Sequence[str]]],
) -> dict[str, Fitting]:
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


def _chosen(
    pattern: str,
    shape: Shape,
    held: Sequence[Sequence[LocalTensor]],
    axes: Mapping[str, int],
) -> tuple[Fitting, str]:
    """Return the placement of keys with equal shapes on all ranks, and what is open.

    Args:
        pattern: Pattern of the keys.
        shape: Shape of the whole tensors.
        held: By key, the tensors of the ranks.
        axes: Axes of the mesh with more than one rank.
    """
    if not held[0]:
        return Fitting(), "no rank has this key"
    fitting, why = _fitting(shape, held, axes)
    if len(fitting) != 1:
        return Fitting(), "\n".join(
            [why, *[f"    {_quoted(pattern)}: {option}," for option in fitting]]
        )
    (option,) = fitting
    placements = dict(option.placements)
    if not placements:
        return option, why
    for axis, placement in option.placements:
        if len(shape) == 3 and not placement.dim:  # stacked experts
            continue
        if GATE_UP.search(pattern) and shape[placement.dim] % 2 == 0:
            placements[axis] = FusedShard(placement.dim, 2)
        elif QKV.search(pattern):
            sizes = "(rows of Q, rows of K, rows of V)"
            return Fitting(), (
                f"its name says Q, K and V in one: FusedShard({placement.dim}, {sizes}) over {axis}"
            )
    named = option._replace(placements=tuple(placements.items()))
    if named != option:
        return named, f"taken by its name; the shapes fit {option} as well"
    if _JOINED.search(pattern) and not why:
        why = "taken as one tensor by its shape; FusedShard where it joins several"
    return option, why


def _fitting(
    shape: Shape,
    held: Sequence[Sequence[LocalTensor]],
    axes: Mapping[str, int],
) -> tuple[list[Fitting], str]:
    """Return the placements that make the shards of keys with equal shapes, and what is open.

    Args:
        shape: Shape of the whole tensors.
        held: By key, the tensors of the ranks.
        axes: Axes of the mesh with more than one rank.
    """
    shards = held[0]
    own = {name for _, tensor in shards for name, _ in tensor.own}
    free = {name: size for name, size in axes.items() if name not in own}
    if any(len(tensor.shape) != len(shape) for _, tensor in shards):
        return [], f"the ranks hold {shards[0].tensor.shape}, the whole model has {shape}"
    differ, equal = along(held, free)
    fitting: list[Fitting] = []
    for dims in product([None, *range(len(shape))], repeat=len(free)):
        placements = tuple(
            [(name, Shard(dim)) for name, dim in zip(free, dims, strict=True) if dim is not None]
        )
        option = _option(shape, shards, placements, free)
        if option is not None:
            fitting.append(option)
    if not fitting:
        shapes = ", ".join(sorted({str(tensor.shape) for _, tensor in shards}))
        text = " x ".join(f"{name} {size}" for name, size in free.items()) or "no axis"
        return [], f"no Shard over {text} makes {shape} of the parts {shapes}"
    sharding: list[set[str]] = [{name for name, _ in option.placements} for option in fitting]
    sound = [option for option, axes_of in zip(fitting, sharding, strict=True) if differ <= axes_of]
    if not sound:
        names = ", ".join(sorted(differ))
        return [], (
            f"the contents differ along {names}, and no placement shards that: a name that each "
            "rank counts for itself, or copies that drifted"
        )
    if len(sound) > 1:
        # Shards of one tensor that are equal would be a coincidence.
        likely = [option for option in sound if not equal & {name for name, _ in option.placements}]
        sound = likely or sound
    if len(sound) > 1:
        return sound, "shapes and contents fit each of these"
    (choice,) = sound
    cut_dims = [placement.dim for _, placement in choice.placements]
    together = [axis for axis, placement in choice.placements if cut_dims.count(placement.dim) > 1]
    if not together:
        return sound, ""
    return sound, (
        f"taken in the order of the mesh, {together[0]} first; shapes fit {together[-1]} first as "
        "well, which is a _StridedShard over the axes left of it"
    )


def _option(
    shape: Shape,
    shards: Sequence[LocalTensor],
    placements: tuple[tuple[str, Any], ...],
    sizes: Mapping[str, int],
) -> Fitting | None:
    """Return the placements with the shapes that they need; None where they do not fit."""
    cuts = tuple(
        [cut_of(placement, len(shape), name, sizes[name]) for name, placement in placements]
    )
    first = shards[0].tensor.shape
    joined = list(first)
    for cut in cuts:
        joined[cut.dim] *= cut.size

    def fits(sharding: Sharding) -> bool:
        return all(
            sharding.shard([position[name] for name, _ in placements])[0] == tensor.shape
            for position, tensor in shards
        )

    if fits(Sharding(shape, cuts)):
        return Fitting(placements, None if tuple(joined) == shape else shape)
    is_padded = all(padded >= size for padded, size in zip(joined, shape, strict=True))
    cut_dims = {cut.dim for cut in cuts}
    only_cut = all(joined[d] == shape[d] or d in cut_dims for d in range(len(shape)))
    # Each rank has rows beside padding.
    is_held = all(shape[dim] > joined[dim] - first[dim] for dim in cut_dims)
    if is_padded and only_cut and is_held and fits(Sharding(shape, cuts, tuple(joined))):
        return Fitting(placements, shape, tuple(joined))
    return None


def along(held: Sequence[Sequence[LocalTensor]], axes: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the axes along which contents differ, and those along which all are equal.

    Ranks are compared that differ in their position along one axis alone.
    """
    differ, equal = set(), set()
    for axis in axes:
        contents: dict[Any, set[bytes]] = {}
        count = 0
        for number, shards in enumerate(held):
            for position, tensor in shards:
                if tensor.digest is not None:
                    rest = tuple([(name, position[name]) for name in position if name != axis])
                    peers = number, rest, tensor.own, tensor.shape
                    contents.setdefault(peers, set()).add(tensor.digest)
                    count += 1
        if any(len(digests) > 1 for digests in contents.values()):
            differ.add(axis)
        elif count > len(contents):
            equal.add(axis)
    return differ, equal


def _renumbered(
    model: ModelKeys, ranks: list[RankFacts], axes: Mapping[str, int], decision: Proposal
) -> tuple[list[RankFacts], set[str]]:
    """Return the ranks with the model's numbers in their keys, and the keys that lack them.

    Args:
        model: The unsharded model.
        ranks: Facts of the ranks, by the model's keys that they have.
        axes: Axes of the mesh with more than one rank.
        decision: Receives the renames, and what is open.

    Returns:
        The ranks; and, for numbers that stay local, the keys up to them, with ``{}`` for other
        numbers.
    """
    unnumbered = set()
    for head, numbers in _numbers(model.shapes).items():
        of_ranks = [_numbers(rank.tensors).get(head, set()) for rank in ranks]
        union, total = set().union(*of_ranks), len(numbers)
        if not union or len(union) >= total or numbers != set(range(total)):
            continue
        pattern = f"{_starred(head)}{{}}"
        fitting = _numberings(pattern, ranks, of_ranks, axes, total)
        others = [
            key
            for key in dict.fromkeys(key for rank in ranks for key in rank.tensors)
            if (numbered := number_in(pattern, f"{_BEFORE}{key}"))
            and without_numbers(numbered.head) != f"{_BEFORE}{head}"
        ]
        if others:
            unnumbered.add(head)
            decision.undecided[pattern] = (
                f"the ranks have {len(union)} of its {total} numbers, and this pattern finds "
                f"another number in {format_names(others, 1)}: rename= has to be a function"
            )
            continue
        named = {key for rank in ranks for key in rank.tensors if head in _numbers([key])}
        held = [_held(key, ranks) for key in named]
        differ, _ = along(held, axes)
        fitting = [option for option in fitting if option.axis in differ] or fitting
        if len(fitting) == 1:
            (choice,) = fitting
            decision.numberings.append(choice)
            decision.undecided[pattern] = (
                f"taken as contiguous along {choice.axis}; names and shapes fit other orders, too, "
                "such as round robin or interleaved stages"
            )
            starts = [sum(choice.counts[: rank.position[choice.axis]]) for rank in ranks]
            ranks = [_with_numbers(*each, head) for each in zip(ranks, starts, strict=True)]
            continue
        unnumbered.add(head)
        why = f"the ranks have {len(union)} of its {total} numbers"
        why += ", and each of these fits" if fitting else ""
        choices = [f"    rename={option}" for option in fitting]
        decision.undecided[pattern] = "\n".join([why, *choices])
    return ranks, unnumbered


def _numbers(keys: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers in keys, by the key up to the number, with ``{}`` for numbers in that."""
    by_head: dict[str, set[int]] = {}
    for key in keys:
        for head, number, _ in numbers_in(key):
            by_head.setdefault(without_numbers(head), set()).add(number)
    return by_head


def _numberings(
    pattern: str,
    ranks: Sequence[RankFacts],
    of_ranks: Sequence[set[int]],
    axes: Mapping[str, int],
    total: int,
) -> list[Numbered]:
    """Return the axes along which numbers that each rank counts from 0 add up to all."""
    numberings = []
    is_local = all(numbers == set(range(len(numbers))) for numbers in of_ranks)
    for axis, size in axes.items() if is_local else ():
        counts: dict[int, set[int]] = {}
        for rank, numbers in zip(ranks, of_ranks, strict=True):
            counts.setdefault(rank.position[axis], set()).add(len(numbers))
        if all(len(each) == 1 for each in counts.values()) and len(counts) == size:
            row = tuple([counts[position].pop() for position in range(size)])
            if sum(row) == total:
                numberings.append(Numbered(pattern, axis, row))
    return numberings


def _with_numbers(rank: RankFacts, first: int, head: str) -> RankFacts:
    """Return a rank with its numbers behind ``head`` counted from ``first``."""
    tensors = {}
    for key, tensor in rank.tensors.items():
        for before, number, tail in numbers_in(key):
            if without_numbers(before) == head:
                key = f"{before}{number + first}{tail}"
                break
        tensors[key] = tensor
    return RankFacts(rank.position, tensors)
