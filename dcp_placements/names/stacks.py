"""Renames that change the tensors: a stack of many, the rows of one, the parts of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dcp_placements.errors import PlacementError
from dcp_placements.names.numbers import (
    NUMBER,
    check_one_number,
    compile_with_number,
    compile_without_number,
    is_component,
)
from dcp_placements.names.rename_results import Parts, Renamed, RenameError, Row, Rows
from dcp_placements.names.renumber import ReadyRename, replace_run
from dcp_placements.rules.patterns import compile_pattern


@dataclass(frozen=True, slots=True)
class Stack(ReadyRename):
    """Stores tensors whose names differ by a number as one tensor, with one dim more.

    >>> Stack("experts.{}.w*", total=8)("layers.0.experts.5.w1.weight")
    Row(fqn='layers.0.experts.w1.weight', index=5, total=8, dim=0, within=())

    The numbers are global: ``Renumber`` comes first. Scalars (``step``) become a tensor
    ``[total]``; objects (``lr``) must be equal and are stored once.

    A ``Stack`` after another stacks the result of that one: a stack of experts, then of layers, is
    a tensor ``[layers, experts, ...]``. A rank may hold different experts of each layer.

    Args:
        pattern: Dotted components as in ``PlacementRules``, with ``{}`` for the number.
        total: How many rows there are.
        dim: The dim of the stacked tensor that they lie along.

    Raises:
        PlacementError: A pattern without ``{}``.
    """

    pattern: str
    total: int
    dim: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_one_number(self.pattern)

    def __call__(self, key: str) -> Renamed:
        dotted = "." + key
        match = compile_with_number(self.pattern, None).search(dotted)
        if match is None:
            return key
        start, stop = match.span(NUMBER)
        number = int(match[NUMBER])
        if number >= self.total:
            raise RenameError(
                f"number {number} of {self.pattern} is beyond the {self.total} rows of the stack",
                "way out:     total= of the whole model",
            )
        if dotted[start - 1] == "." and dotted[stop : stop + 1] in ("", "."):
            start -= 1  # a component of its own goes with its dot
        name = dotted[:start] + dotted[stop:]
        return Row(name.removeprefix("."), number, self.total, self.dim)

    def __str__(self) -> str:
        return f"{self.pattern} -> one tensor of {self.total} rows on dim {self.dim}"


@dataclass(frozen=True, slots=True)
class Unstack(ReadyRename):
    """Stores the rows of a tensor as tensors of their own, with a number in their names.

    >>> Unstack("experts.{}.w*")("layers.0.experts.w1.weight")
    Rows(fqn='layers.0.experts.{}.w1.weight', stacked='layers.0.experts.w1.weight', dim=0)

    The rules name the stacked tensor, by its key on this rank. A scalar or an object of its
    optimizer state goes to every row.

    Args:
        pattern: Dotted components as in ``PlacementRules``, with ``{}`` at the position of the
            number; this rank's keys match the pattern without it.
        dim: The dim of the stacked tensor that the rows lie along.

    Raises:
        PlacementError: A pattern without ``{}``.
    """

    pattern: str
    dim: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_one_number(self.pattern)

    def __call__(self, key: str) -> Renamed:
        dotted = "." + key
        match = compile_without_number(self.pattern).search(dotted)
        if match is None:
            return key
        at = match.start(NUMBER)
        name = f"{dotted[:at]}{'.' if is_component(self.pattern) else ''}{{}}{dotted[at:]}"
        return Rows(name.removeprefix("."), key, self.dim)

    def __str__(self) -> str:
        return f"rows of dim {self.dim} -> {self.pattern}"


@dataclass(frozen=True, slots=True, init=False)
class Split(ReadyRename):
    """Stores the parts of a fused tensor as tensors of their own.

    >>> Split("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))("layers.0.mlp.gate_up_proj")
    Parts(fqns=('layers.0.mlp.gate_proj', 'layers.0.mlp.up_proj'), \
whole='layers.0.mlp.gate_up_proj', dim=0, sizes=(1, 1), groups=1, rows=None)

    After an ``Unstack`` it splits every row. The rules name the fused tensor. A scalar or an object
    of its optimizer state goes to every part.

    Args:
        pattern: Dotted components as in ``PlacementRules``; the first run that matches is replaced.
        names: The components to put there, one per part.
        dim: The dim that the parts lie along; after an ``Unstack`` a dim of each row.
        sizes: The sizes of the parts relative to each other, such as the heads of q, k and v. By
            default they are equal.
        groups: How many times the sequence of parts repeats along the dim: query groups that each
            have their own q, k and v.

    Raises:
        PlacementError: No names, another number of sizes, or sizes or groups below 1.
    """

    pattern: str
    names: tuple[str, ...]
    dim: int
    sizes: tuple[int, ...]
    groups: int

    def __init__(
        self,
        pattern: str,
        names: Sequence[str],
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        groups: int = 1,
    ) -> None:
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "names", tuple(names))
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "sizes", (1,) * len(names) if sizes is None else tuple(sizes))
        object.__setattr__(self, "groups", groups)
        if not self.names or len(self.sizes) != len(self.names) or min(*self.sizes, groups) < 1:
            raise PlacementError(
                f"parts of {pattern!r} need a name and a size from 1 on each: {self.names}, "
                f"sizes {self.sizes}, {groups} groups"
            )
        compile_pattern(pattern)

    def __call__(self, key: str) -> Renamed:
        match = compile_pattern(self.pattern).search("." + key)
        if match is None:
            return key
        fqns = [replace_run(key, match, name) for name in self.names]
        return Parts(tuple(fqns), key, self.dim, self.sizes, self.groups)

    def __str__(self) -> str:
        return f"{self.pattern} -> {' + '.join(self.names)} of dim {self.dim}"
