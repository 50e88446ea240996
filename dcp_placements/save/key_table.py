"""The keys of a rank and how each of them is declared: the part of a plan that ranks share.

Keys of one shape, dtype and declaration that lie alike on a rank are a *group*. Nothing in a key
table depends on the position of the rank, so all ranks that hold the same keys send the same
bytes, and the coordinator unpacks each different table once. Which boxes of a group a rank holds
travels beside the table (``local_plan``).
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import BytesIO
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from dcp_placements.layout.sharding import Pick, Sharding
from dcp_placements.names.flat import Path
from dcp_placements.save.packing import (
    numbered,
    packed_ints,
    packed_keys,
    unpacked_ints,
    unpacked_keys,
)
from dcp_placements.storage.metadata.record import Cuts, SavedCut, cuts_of

_RAW = -zlib.MAX_WBITS

# What most tables contain; most frequent last, as zlib wants it.
_COMMON = (
    b"embed_tokens.weight0norm.weight0lm_head.weight0tp0pp0dp0edp0ep0fsdp0plain0objectN"
    b"0.bias0.self_attn.q_proj.k_proj.v_proj.o_proj.weight\n0.input_layernorm.weight\n"
    b"0.post_attention_layernorm.weight\n0.mlp.gate_proj.weight\n0.mlp.up_proj.weight\n"
    b"0.mlp.down_proj.weight\n0.mlp.experts.0.w2.weight\n0.mlp.shared_experts.w1.weight\n"
    b"\noptim.state.model.layers.0.weight.step\noptim.state.model.layers.0.weight.exp_avg\n"
    b"optim.state.model.layers.0.weight.exp_avg_sq\nmodel.layers.0"
    b"\x8c\x05shard\x94\x8c\x0etorch.bfloat16\x8c\x07strided\x89)N\x88K\x01t"
    b"\x8c\x05shard\x8c\rtorch.float32\x8c\x07strided\x89\x8c\x04fsdp\x85"
    b"K\x00\x8c\x05plainK\x01\x89t\x85N\x88Nt"
)

OBJECT = "object"
"""A value that is no tensor."""
PLAIN = "plain"
"""A plain tensor that no rule matches."""
SHARD = "shard"
"""A tensor that is declared, by a rule, its DTensor or its own chunks."""


class Group(NamedTuple):
    """What the keys of a group have in common; the same for every rank.

    Attributes:
        kind: ``OBJECT``, ``PLAIN`` or ``SHARD``.
        shape: Of the whole tensor; empty for an object.
        dtype: None for an object.
        layout: The tensor's ``torch.layout`` by name, without ``torch.``.
        requires_grad: As the tensor says.
        axis_names: One per mesh axis that a rule or a DTensor names.
        cuts: How it is cut, in the order in which the cuts apply.
        padded_shape: The shape that is cut, where it is larger than the whole tensor.
        is_exact: Whether the cuts, and the rows that ranks list, determine what each rank holds.
            Not for parts of a fused tensor that other cuts go through.
        parts: Number of different parts that the cuts make; None where they do not determine it.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    layout: str = "strided"
    requires_grad: bool = False
    axis_names: tuple[str | None, ...] = ()
    cuts: Cuts = ()
    padded_shape: tuple[int, ...] | None = None
    is_exact: bool = True
    parts: int | None = 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element; 0 for an object."""
        return 0 if self.dtype is None else self.dtype.itemsize

    @property
    def equal_along(self) -> frozenset[str]:
        """Names of the axes along which the tensor is declared to be replicated."""
        named = {name for name in self.axis_names if name is not None}
        return frozenset(named - {cut.axis for cut in self.cuts})


def declared_group(
    sharding: Sharding,
    axis_names: tuple[str | None, ...],
    dtype: torch.dtype,
    layout: str = "strided",
    requires_grad: bool = False,
    *,
    is_exact: bool = True,
) -> Group:
    """Return the group of tensors cut by a sharding, without what depends on the rank."""
    parts = None
    if is_exact and not any(isinstance(cut, Pick) for cut in sharding.cuts):
        parts = prod([sharding.axis_sizes[axis] for axis in {cut.axis for cut in sharding.cuts}])
    cuts = cuts_of(sharding, axis_names)
    look = dtype, layout, requires_grad
    padded = sharding.padded_shape
    return Group(SHARD, sharding.global_shape, *look, axis_names, cuts, padded, is_exact, parts)


@dataclass
class KeyTable:
    """Some keys of a rank, by group.

    Attributes:
        groups: The groups.
        fqns: The keys, those of a group one after the other.
        sizes: Number of keys of each group.
        rules: The names of the rules that matched; None for no rule.
        rule_of: By key, position in ``rules``.
        paths: How keys are made of path parts: for each part the number of dotted components, -1
            for a list index.
        path_of: By key, position in ``paths``.
    """

    groups: list[Group] = field(default_factory=list)
    fqns: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    rules: list[str | None] = field(default_factory=list)
    rule_of: list[int] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    path_of: list[int] = field(default_factory=list)

    @cached_property
    def starts(self) -> list[int]:
        """The position of each group's first key in ``fqns``, and the number of all keys."""
        return list(accumulate(self.sizes, initial=0))

    def keys(self, group: int) -> list[str]:
        """Return the keys of a group."""
        return self.fqns[self.starts[group] : self.starts[group + 1]]

    def paths_of_keys(self) -> dict[str, Path]:
        """Return where each key stands in the nested state dict."""
        split = [_splitter(counts) for counts in self.paths]
        return {fqn: split[at](fqn) for fqn, at in zip(self.fqns, self.path_of, strict=True)}

    def packed(self) -> bytes:
        """Return the table as it travels; equal tables give equal bytes."""
        groups = [
            group._replace(
                dtype=str(group.dtype),  # type: ignore[arg-type]
                cuts=tuple([cut.values for cut in group.cuts]),  # type: ignore[misc]
            )
            for group in self.groups
        ]
        columns = [
            packed_ints(column, compress=False)
            for column in (self.sizes, self.rule_of, self.path_of)
        ]
        buffer = BytesIO()
        pickler = pickle.Pickler(buffer, protocol=5)
        # References are not memoised: whether two equal values are one object differs by rank.
        pickler.fast = True
        plain = [*map(tuple, groups)]
        pickler.dump((plain, packed_keys(self.fqns), self.rules, self.paths, *columns))
        deflate = zlib.compressobj(9, wbits=_RAW, zdict=_COMMON)
        return deflate.compress(buffer.getvalue()) + deflate.flush()


def unpacked_table(packed: bytes) -> KeyTable:
    """Return the table that was packed."""
    inflated = zlib.decompressobj(_RAW, zdict=_COMMON).decompress(packed)
    plain, keys, rules, paths, *columns = pickle.loads(inflated)
    groups = []
    for values in plain:
        group = Group(*values)
        name = str(group.dtype).removeprefix("torch.")
        dtype = None if name == "None" else getattr(torch, name)
        cuts = tuple([SavedCut.of(*cut) for cut in group.cuts])
        groups.append(group._replace(dtype=dtype, cuts=cuts))
    sizes, rule_of, path_of = [unpacked_ints(column).tolist() for column in columns]
    return KeyTable(groups, unpacked_keys(keys), sizes, rules, rule_of, paths, path_of)


def path_counts(paths: Iterable[Path]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the different ways in which the parts of paths make keys, and that of each path.

    >>> path_counts([("optim", "layers.0.w", 3), ("optim", "layers.1.w", 3)])
    ([(1, 3, -1)], [0, 0])
    """
    # First by all parts but the last: there are few of those.
    heads, head_of = numbered([(path[:-1], _components(path[-1])) for path in paths])
    counts, counts_of = numbered([(*map(_components, parts), last) for parts, last in heads])
    return counts, [counts_of[at] for at in head_of]


def _components(part: str | int) -> int:
    return -1 if isinstance(part, int) else part.count(".") + 1


def _splitter(counts: tuple[int, ...]) -> Callable[[str], Path]:
    """Return what splits a key into a path whose parts have so many components."""
    long = [at for at, count in enumerate(counts) if count != 1]
    if len(long) > 1 or -1 in counts:
        return partial(_split_one_by_one, counts)
    # One part with dots among others without, as torch's state dicts have them.
    first = long[0] if long else 0
    last = len(counts) - 1 - first
    if not last:
        return lambda fqn: tuple(fqn.split(".", first))

    def around(fqn: str) -> Path:
        *head, rest = fqn.split(".", first)
        return (*head, *rest.rsplit(".", last))

    return around


def _split_one_by_one(counts: tuple[int, ...], fqn: str) -> Path:
    components = fqn.split(".")
    path: list[str | int] = []
    position = 0
    for count in counts:
        part = ".".join(components[position : position + abs(count)])
        path.append(int(part) if count < 0 else part)
        position += abs(count)
    return tuple(path)
