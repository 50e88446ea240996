"""One declaration for both sides: the rules and names by which a job saves and loads.

``DeclaredWorld`` has those of all ranks of a job that does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.load.planner import PlacementLoadPlanner
from dcp_placements.names.rename_results import Rename
from dcp_placements.rules.mesh_axes import MeshAxes, MeshCoordinate, mesh_at
from dcp_placements.rules.patterns import PlacementRules, Rules, RuleTable, check_declaration
from dcp_placements.save.planner import PlacementSavePlanner
from dcp_placements.table.whole import WholeModel


@dataclass(frozen=True, slots=True, init=False)
class Placements:
    """What a rank's tensors are in the checkpoint, declared once for saves and loads.

    Both planners get the same rules and the same ``rename``, so that a load cannot lack what the
    save had. Each call returns a new planner.

    >>> placements = Placements({"experts": None})
    >>> placements.save_planner(digests="full").rules is placements.load_planner().rules
    True

    Attributes:
        rules: The rules of both planners; a mapping has become ``PlacementRules``.
        rename: This rank's key to the checkpoint's; None where the two are equal.
        waive: ``{pattern: reason}``: keys that both planners accept though they would warn of, or
            refuse, their cuts.
        whole: The keys and shapes of the unsharded model; None where it is not given.
    """

    rules: Rules | None
    rename: Rename | None
    waive: Mapping[str, str]
    whole: WholeModel | None

    def __init__(
        self,
        rules: Rules | RuleTable | None,
        *,
        rename: Rename | None = None,
        waive: Mapping[str, str] | None = None,
        whole: Any = None,
    ) -> None:
        """Check and keep the declaration.

        Args:
            rules: ``PlacementRules``, the mapping ``{pattern: CheckpointPlacement or None}`` that
                it takes, or any ``(fqn, tensor) -> CheckpointPlacement or None``. None: every
                tensor keeps its own mesh and placements.
            rename: As for ``PlacementSavePlanner``.
            waive: As for the planners, each of which takes more.
            whole: The unsharded model: ``{key: shape}`` by the checkpoint's keys, or the model
                made under ``torch.device("meta")``; of several models in one state dict each by its
                level, ``{"model": ..., "ema": ...}``. Every save and load is compared with it: a
                key that it has and no rank, one that it lacks, or another whole shape is refused.
                Without levels the keys may stand under any, such as ``model.``; one that may be
                another model is named in a warning (``table.whole.WholeModel`` has the rules). A
                value may be a shape, a tensor, whose shape counts, or a pair of shape and dtype.

        Raises:
            PlacementError: Rules or a rename that cannot be called, a waiver without a reason, or
                ``whole=`` of another kind.
        """
        resolved = PlacementRules(rules) if isinstance(rules, Mapping) else rules
        waivers = check_declaration(resolved, rename, waive)
        # The instance is frozen for everybody else.
        object.__setattr__(self, "rules", resolved)
        object.__setattr__(self, "rename", rename)
        object.__setattr__(self, "waive", waivers)
        compared = None if whole is None else WholeModel.of(whole)
        object.__setattr__(self, "whole", compared)

    def save_planner(
        self, *, waive: Mapping[str, str] | None = None, **options: Any
    ) -> PlacementSavePlanner:
        """Return a planner for ``dcp.save``.

        Args:
            waive: Adds to the waivers declared here.
            options: Other options of ``PlacementSavePlanner``, without ``rules`` and ``rename``.
        """
        waivers = {**self.waive, **check_declaration(None, None, waive)}
        options = {"whole": self.whole, **options}
        return PlacementSavePlanner(self.rules, rename=self.rename, waive=waivers, **options)

    def load_planner(
        self, *, waive: Mapping[str, str] | None = None, **options: Any
    ) -> PlacementLoadPlanner:
        """Return a planner for ``dcp.load``.

        Args:
            waive: Adds to the waivers declared here.
            options: Other options of ``PlacementLoadPlanner``, without ``rules`` and ``rename``.
        """
        waivers = {**self.waive, **check_declaration(None, None, waive)}
        options = {"whole": self.whole, **options}
        return PlacementLoadPlanner(self.rules, rename=self.rename, waive=waivers, **options)

    def resharder(
        self,
        *,
        source: Callable[[MeshCoordinate], Any] | None = None,
        axes: MeshAxes | None = None,
        **options: Any,
    ) -> Any:
        """Return a ``Resharder`` for an ``ItemSpec`` of ``torch_checkpointing``.

        Args:
            source: The rules of each rank of the world that saved checkpoints without this
                package, as for ``rehearse``: they declare what its DTensors do not.
            axes: The mesh of that world: sizes by axis name, the last axis fastest in rank order.
            options: ``restricted=True`` refuses files whose objects name more than plain values;
                ``check_crc=False`` compares no checksums; ``on_conflict="warn"`` reads one of
                several copies that differ. The others are of ``PlacementLoadPlanner``.

        Raises:
            ImportError: The engine is not installed.
            PlacementError: One of ``source`` and ``axes`` without the other, or an unknown
                option.
        """
        from dcp_placements.engines.resharder import PlacementResharder

        world = None
        if source is not None or axes is not None:
            if not callable(source) or axes is None:
                raise PlacementError(
                    f"source={source!r} and axes={axes!r} are given together, as the world that "
                    "saved: a function mesh -> Placements, and its mesh, as {'ep': 2, 'fsdp': 2}"
                )
            world = DeclaredWorld(axes, source)
        return PlacementResharder(self, source=world, **options)


MOST_RANKS = 1 << 18
"""The most ranks of a job that does not run: each of them is asked for what it declares."""


@dataclass(frozen=True, eq=False)
class DeclaredWorld:
    """The ranks of a job that does not run: their mesh, and what each of them declares.

    For two ep ranks ``DeclaredWorld({"ep": 2}, rules)``, where ``rules(mesh)`` returns the
    ``Placements`` of the rank at ``mesh.get_coordinate()``.

    Attributes:
        axes: The mesh: sizes by axis name, the last axis fastest in rank order.
        rules: Function of a rank's coordinate in the mesh. It returns ``Placements``, or what
            ``Placements`` takes as rules.

    Raises:
        CannotLook: There are more than ``MOST_RANKS``.
    """

    axes: MeshAxes
    rules: Callable[[MeshCoordinate], Any]

    def __post_init__(self) -> None:
        if self.size > MOST_RANKS:
            size = f"{self.size:,}" if self.size < 10**15 else "more than 10^15"
            raise CannotLook(
                f"a mesh of {len(self.axes)} axes with {size} ranks, and each of at most "
                f"{MOST_RANKS:,} is asked for its rules"
            )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.axes.values())

    def placements(self, rank: int) -> Placements:
        """Return the declaration of a rank.

        Raises:
            CannotLook: The function fails, or returns something else.
        """
        mesh = mesh_at(self.axes, rank)
        name = getattr(self.rules, "__qualname__", self.rules)
        try:
            declared = self.rules(mesh)
        except PlacementError as error:
            # Such as an axis that the given mesh does not have.
            raise CannotLook(str(error)) from error
        except Exception as error:
            raise CannotLook(f"{name} fails for {mesh}: {type(error).__name__}: {error}") from error
        if not (isinstance(declared, Placements | Mapping) or callable(declared)):
            raise CannotLook(
                f"{name} returns {declared!r}, which are no rules\n"
                "    way out:     a function mesh -> Placements, or mesh -> PlacementRules"
            )
        try:
            return declared if isinstance(declared, Placements) else Placements(declared)
        except PlacementError as error:
            raise CannotLook(f"{name} returns rules that cannot be used: {error}") from error
