"""A declaration as a block of Python: a function that a file can hold as it stands.

``python -m dcp_placements.run --placements FILE.py:placements`` calls it with the program's meshes.
A ``DeviceMesh`` with all these axes does as well: ``placements(mesh)``. Of two ep ranks that both
call other experts ``experts.w1``::

    Proposal(rules={"experts.w1": Fitting((("ep", Shard(0)),))})

    def placements(meshes):
        return Placements(
            {
                "experts.w1": CheckpointPlacement(meshes["ep"], {"ep": Shard(0)}),
            },
        )
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dcp_placements._torch import global_rank
from dcp_placements.layout.boxes import Shape
from dcp_placements.names.renames import Renames, Renumber, Replace, contiguous
from dcp_placements.rules.mesh_axes import MeshCoordinate
from dcp_placements.rules.patterns import RuleTable
from dcp_placements.rules.placement import (
    CheckpointPlacement,
    FusedShard,
    RaggedShard,
    format_placement,
)
from dcp_placements.short_text import shortened

BEGINS = "# A declaration that fits the shapes, names and contents of all ranks: read it first."
ENDS = "# The end of the declaration."

ADDED_BEGINS = (
    "# Add this to your declaration: it fits the shapes, names and contents of all ranks: "
    "read it first."
)

_IMPORTED = (
    "CheckpointPlacement",
    "FusedShard",
    "MeshCoordinate",
    "Placements",
    "RaggedShard",
    "Renames",
    "Renumber",
    "Replace",
    "contiguous",
)
_WIDTH = 100
_MOST_COMMENT = 400
_INDENT = " " * 12


def block_in(text: str) -> str:
    """Return the block of Python in a message; empty where it has none.

    >>> block_in(f"ep.w: ...\\n\\n{BEGINS}\\nimport torch\\n{ENDS}\\nTraceback").splitlines()[1:-1]
    ['import torch']
    """
    start = text.find(BEGINS)
    stop = text.find(ENDS, start)
    return "" if start < 0 or stop < 0 else f"{text[start:stop]}{ENDS}\n"


def has_declaration(text: str) -> bool:
    """Whether a message has a block of Python, or lines to add to a declaration."""
    return bool(block_in(text)) or ADDED_BEGINS in text


class MeshNames(NamedTuple):
    """How a declaration reaches axes: ``MeshNames((("ep", "tp"),), {"ep": 2, "tp": 2})``.

    Attributes:
        meshes: The axis names of each mesh.
        sizes: Those of the axes.
        strides: By name, how far ranks are apart along an axis that no ``DeviceMesh`` has.
    """

    meshes: tuple[tuple[str, ...], ...] = ()
    sizes: Mapping[str, int] = {}
    strides: Mapping[str, int] = {}

    def ordered(self, axes: Sequence[str]) -> tuple[tuple[str, ...], bool]:
        """Return axes in the order of the mesh that has all of them, and whether one has."""
        for names in self.meshes:
            if set(axes) <= set(names):
                return tuple([name for name in names if name in axes]), True
        return tuple(axes), len(axes) == 1

    def _sliced(self, axes: Sequence[str]) -> tuple[tuple[str, ...], bool]:
        """Return axes in order, and whether a ``DeviceMesh`` can be sliced to all of them."""
        names, is_one_mesh = self.ordered(axes)
        return names, is_one_mesh and self.strides.keys().isdisjoint(names)

    def text(self, axes: Sequence[str]) -> str:
        """Return the mesh of some axes, as Python."""
        names, is_sliced = self._sliced(axes)
        if is_sliced:
            return f"meshes[{', '.join(map(_quoted, names))}]"
        quoted, sizes = map(_quoted, names), [str(self.sizes[name]) for name in names]
        places = map(self.position_text, names)
        return f"MeshCoordinate([{', '.join(quoted)}], [{', '.join(sizes)}], [{', '.join(places)}])"

    def position_text(self, axis: str) -> str:
        """Return where this rank is along an axis, as Python."""
        if axis not in self.strides:
            return f"meshes[{_quoted(axis)}].get_local_rank()"
        stride = f" // {self.strides[axis]}" if self.strides[axis] > 1 else ""
        return f"dist.get_rank(){stride} % {self.sizes[axis]}"

    def position(self, meshes: Any, axis: str) -> int:
        """Return where this rank is along an axis.

        Args:
            meshes: Has a mesh by the name of an axis.
            axis: Its name.
        """
        if axis not in self.strides:
            return int(meshes[axis].get_local_rank())
        return global_rank() // self.strides[axis] % self.sizes[axis]

    def on(self, meshes: Any, axes: Sequence[str]) -> Any:
        """Return the mesh of some axes.

        Args:
            meshes: Has a mesh by the name of an axis, and by a tuple of several.
            axes: Their names.
        """
        names, is_sliced = self._sliced(axes)
        if is_sliced:
            return meshes[names[0] if len(names) == 1 else names]
        places = [self.position(meshes, name) for name in names]
        return MeshCoordinate(names, [self.sizes[name] for name in names], places)


class Fitting(NamedTuple):
    """One way to place a tensor: ``Fitting((("ep", Shard(0)),))``.

    Attributes:
        placements: By axis that shards it.
        whole: Its shape, where the placements do not make it of the parts.
        padded: The shape that is cut, where that is larger.
    """

    placements: tuple[tuple[str, Any], ...] = ()
    whole: Shape | None = None
    padded: Shape | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard it."""
        return tuple([axis for axis, _ in self.placements])

    def text(self, names: MeshNames) -> str:
        """Return it as Python."""
        if not self.placements:
            return "None"
        by_axis = dict(self.placements)
        axes = []
        for axis in names.ordered(self.axes)[0]:
            entry = by_axis[axis]
            match entry:
                case RaggedShard():
                    text = f"RaggedShard({entry.dim}, {entry.sizes})"
                case FusedShard():
                    text = f"FusedShard({entry.dim}, {entry.parts})"
                case _:
                    text = format_placement(entry)
            axes.append(f"{_quoted(axis)}: {text}")
        shapes = {"global_shape": self.whole, "padded_shape": self.padded}
        given = "".join([f", {name}={shape}" for name, shape in shapes.items() if shape])
        return f"CheckpointPlacement({names.text(self.axes)}, {{{', '.join(axes)}}}{given})"

    def on(self, names: MeshNames, meshes: Any) -> CheckpointPlacement | None:
        """Return it on meshes; None where nothing shards it."""
        if not self.placements:
            return None
        return CheckpointPlacement(
            names.on(meshes, self.axes),
            dict(self.placements),
            global_shape=self.whole,
            padded_shape=self.padded,
        )


class Numbered(NamedTuple):
    """Names that each rank along an axis counts from 0: ``Numbered("experts.{}", "ep", (2, 2))``.

    Attributes:
        pattern: Where the number stands.
        axis: Along which the ranks have parts of them.
        counts: How many each position of the axis has.
    """

    pattern: str
    axis: str
    counts: tuple[int, ...]

    def text(self, names: MeshNames) -> str:
        """Return it as Python."""
        ids = _numbers_text(self.counts, names.position_text(self.axis))
        return f"Renumber({_quoted(self.pattern)}, {ids}, total={sum(self.counts)})"

    def on(self, names: MeshNames, meshes: Any) -> Renumber:
        """Return it on meshes."""
        return self.renumber(names.position(meshes, self.axis))

    def renumber(self, position: int) -> Renumber:
        """Return it at a position along its axis."""
        ids = contiguous(self.counts, at=position)
        return Renumber(self.pattern, ids, total=sum(self.counts))


@dataclass
class Proposal:
    """A declaration that fits the shapes, names and contents of all ranks.

    ``print`` of it is Python to paste: a function ``placements(meshes)``.

    Attributes:
        rules: By pattern, in the order in which they have to stand.
        numberings: Renames.
        own_names: Keys of a state of each rank's own, which get its number.
        undecided: By pattern of keys, why they have no rule, or what else would fit: one option a
            line.
        unsolved: Patterns of keys for which nothing fits.
        granted: What no fact shows and all of it takes for granted.
        names: How the axes are reached.
        placements: The same as an object, on this rank; only of ``propose_placements``.
    """

    rules: dict[str, Fitting] = field(default_factory=dict)
    numberings: list[Numbered] = field(default_factory=list)
    own_names: list[str] = field(default_factory=list)
    undecided: dict[str, str] = field(default_factory=dict)
    unsolved: dict[str, None] = field(default_factory=dict)
    granted: dict[str, None] = field(default_factory=dict)
    names: MeshNames = field(default_factory=MeshNames)
    placements: Any = field(default=None, repr=False, compare=False)

    def on(self, meshes: Any) -> tuple[RuleTable, Renames | None]:
        """Return the rules and renames of this rank.

        Args:
            meshes: Has a mesh by the name of an axis, and by a tuple of several.
        """
        rules: RuleTable = {
            pattern: fitting.on(self.names, meshes) for pattern, fitting in self.rules.items()
        }
        renames: list[Any] = [numbered.on(self.names, meshes) for numbered in self.numberings]
        renames += [Replace(key, f"{key}.rank{global_rank()}") for key in self.own_names]
        return rules, Renames(*renames) if renames else None

    def additions(self) -> str:
        """Return the rules and renames as lines to add to a declaration that there is."""
        rules, renames = self._lines()
        lines = [ADDED_BEGINS, *self._granted_lines()]
        if self.rules:
            lines += ["#     rules, in front of yours:", *rules]
        if renames:
            lines += ["#     renames, behind yours in Renames(...):", *renames]
        return "\n".join([*lines, ENDS])

    def __str__(self) -> str:
        rules, renames = self._lines()
        lines = ["        {", *rules, "        },"] if rules else ["        {},"]
        if renames:
            lines += ["        rename=Renames(", *renames, "        ),"]
        body = [
            "def placements(meshes):",
            *self._apart(),
            "    return Placements(",
            *lines,
            "    )",
        ]
        text = "\n".join(body)
        code = "\n".join([line for line in text.split("\n") if line.strip()[:1] != "#"])
        imports = ["import torch.distributed as dist"] if "dist.get_rank()" in code else []
        if re.search(r"\bShard\(", code):
            imports.append("from torch.distributed.tensor import Shard")
        used = [name for name in _IMPORTED if re.search(rf"\b{name}\(", code)]
        ours = f"from dcp_placements import {', '.join(used)}"
        if len(ours) > _WIDTH:
            ours = "\n".join(["from dcp_placements import (", *[f"    {n}," for n in used], ")"])
        imported = "\n".join(imports) + ("\n\n" if imports else "") + ours
        head = "\n".join([BEGINS, *self._granted_lines()])
        return f"{head}\n{imported}\n\n\n{text}\n{ENDS}"

    def _granted_lines(self) -> list[str]:
        """Return what is taken for granted, as comments."""
        if not self.granted:
            return []
        text = f"Taken for granted: {'; '.join(self.granted)}."
        return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="#     ")

    def _apart(self) -> list[str]:
        """Return comments on the axes that no mesh has."""
        return [
            f"    # {name}: {self.names.sizes[name]} ranks, {stride} apart; no DeviceMesh has it, "
            "contents show it"
            for name, stride in self.names.strides.items()
        ]

    def _lines(self) -> tuple[list[str], list[str]]:
        """Return the lines of the rules, and those of the renames."""
        rules: list[str] = []
        for pattern, fitting in self.rules.items():
            rules += self._comment(pattern)
            rules.append(f"{_INDENT}{_quoted(pattern)}: {fitting.text(self.names)},")
        numbered = [numbering.pattern for numbering in self.numberings]
        for pattern in self.undecided:
            if pattern not in self.rules and pattern not in numbered:
                rules += self._comment(pattern)
        renames: list[str] = []
        for numbering in self.numberings:
            text = numbering.text(self.names)
            renames += [*self._comment(numbering.pattern), f"{_INDENT}{text},"]
        for key in self.own_names:
            renames.append(
                f"{_INDENT}# a state of each rank's own; a load on more ranks: optional="
            )
            renames.append(
                f'{_INDENT}Replace({_quoted(key)}, f"{_in_f(key)}.rank{{dist.get_rank()}}"),'
            )
        return rules, renames

    def _comment(self, pattern: str) -> list[str]:
        """Return what is open of a pattern, as comments."""
        if pattern not in self.undecided:
            return []
        lines = f"{pattern}: {self.undecided[pattern]}".split("\n")
        return [f"{_INDENT}# {shortened(line, _MOST_COMMENT)}" for line in lines]


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _in_f(key: str) -> str:
    return _quoted(key)[1:-1].replace("{", "{{").replace("}", "}}")


def _numbers_text(counts: Sequence[int], position: str) -> str:
    """Return the numbers of this rank, of as many as each position of an axis has, as Python."""
    listed = str(list(counts))
    if len(counts) > 8 and len(set(counts)) == 1:
        listed = f"[{counts[0]}] * {len(counts)}"
    return f"contiguous({listed}, at={position})"
