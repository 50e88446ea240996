"""What a rank sends beside its keys: rules that matched, lint, the numbering of its rename."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_placements._torch import named_axes
from dcp_placements.bind.lint import lint
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault
from dcp_placements.names.optimizer_state import stateless_parameters
from dcp_placements.names.rename_record import Step
from dcp_placements.names.rename_results import Rename
from dcp_placements.names.renames import numbering
from dcp_placements.names.renumber import Numbered
from dcp_placements.rules.mesh import MeshNumbers
from dcp_placements.rules.patterns import PlacementRules, Rules, compile_pattern, expected_patterns


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank sends beside its keys; the same on most ranks of a pipeline stage.

    Attributes:
        matched: Rules that matched here, with the number of keys.
        patterns: All rules there are, where they are known.
        stateless: Parameters without optimizer state where others have it.
        notes: Warnings of this rank.
        numbered: The numbers of experts and layers that its rename gives.
        renames: What the checkpoint is to keep of its rename.
        axis_sizes: Sizes of the named mesh axes that it knows of.
        target: A checksum of the name of the directory that it writes into; 0 for no name.
        step: The training step that its planner was given; None for none.
    """

    matched: Mapping[str, int] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    stateless: tuple[str, ...] = ()
    notes: tuple[Fault, ...] = ()
    numbered: tuple[Numbered, ...] = ()
    renames: tuple[Step, ...] = ()
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    target: int = 0
    step: int | None = None

    def packed(self) -> bytes:
        """Return it as it travels."""
        return zlib.compress(pickle.dumps(self, protocol=5), 6)

    @staticmethod
    def unpacked(packed: bytes) -> Statement:
        """Return the statement that was packed; an empty one of nothing."""
        found: Statement = pickle.loads(zlib.decompress(packed)) if packed else Statement()
        return found


def statement_of(
    state_dict: Mapping[str, Any],
    placing: Placing,
    *,
    rules: Rules | None,
    rename: Rename | None,
    renames: tuple[Step, ...] = (),
    waived: Mapping[str, str],
    notes: Sequence[Fault] = (),
    target: int = 0,
    step: int | None = None,
) -> tuple[Statement, tuple[int, ...]]:
    """Return what a rank says, and its position along each of the axes named there.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        rules: The user's rules.
        rename: The user's renaming.
        renames: What the checkpoint is to keep of it.
        waived: Patterns of keys whose lint warnings are silenced.
        notes: Other warnings of this rank.
        target: A checksum of the name of the directory that it writes into.
        step: The training step.
    """
    axes = _axes(placing, rules)
    patterns = [compile_pattern(pattern) for pattern in waived]
    findings = lint(placing.placed.values(), renamed=rename is not None, waived=patterns)
    statement = Statement(
        matched=placing.matched,
        patterns=expected_patterns(rules),
        stateless=tuple(stateless_parameters(state_dict)),
        notes=(*notes, *findings),
        numbered=numbering(rename),
        renames=renames,
        axis_sizes={name: size for name, (_, size) in axes.items()},
        target=target,
        step=step,
    )
    return statement, tuple([position for position, _ in axes.values()])


def _axes(placing: Placing, rules: Rules | None) -> dict[str, tuple[int, int]]:
    """Return ``{name: (position, size)}`` of every named axis that tensors and rules name."""
    axes: dict[str, tuple[int, int]] = {}
    for mesh in rules.meshes if isinstance(rules, PlacementRules) else ():
        axes.update(named_axes(mesh))
    number_of = MeshNumbers()
    meshes = [placed.mesh for placed in placing.placed.values() if placed.mesh is not None]
    for mesh in {number_of(mesh): mesh for mesh in meshes}.values():
        axes.update(named_axes(mesh))
    for binding in dict.fromkeys([placed.binding for placed in placing.placed.values()]):
        for axis in binding.axes:
            if axis.name is not None:
                axes[axis.name] = (axis.position, axis.size)
    return axes
