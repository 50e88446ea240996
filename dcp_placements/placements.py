"""One declaration for both sides: the rules and names by which a job saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_placements.load.planner import PlacementLoadPlanner
from dcp_placements.names.stacks_and_parts import Rename
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
        rules: As for the planners; a mapping has become ``PlacementRules``.
        rename: This rank's key to the checkpoint's; None where the two are equal.
        waive: ``{pattern: reason}`` of keys that both planners accept although they would warn of,
            or refuse, their name and kind of cut.
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
                made under ``torch.device("meta")``. Every save and load is compared with it: a
                key that it has and no rank, one that it lacks, or another whole shape is refused.
                The keys may stand under a level of the state dict, such as ``model.``; what is
                beside it is left alone. A value may be a shape, a tensor, whose shape counts, or a
                pair of shape and dtype.

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
            options: Of ``PlacementSavePlanner``, but for ``rules`` and ``rename``.
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
            options: Of ``PlacementLoadPlanner``, but for ``rules`` and ``rename``.
        """
        waivers = {**self.waive, **check_declaration(None, None, waive)}
        options = {"whole": self.whole, **options}
        return PlacementLoadPlanner(self.rules, rename=self.rename, waive=waivers, **options)

    def resharder(self, *, source: Any = None, **options: Any) -> Any:
        """Return a ``Resharder`` for an ``ItemSpec`` of ``torch_checkpointing``.

        Args:
            source: The world that saved checkpoints without this package, as
                ``TransferWorld(axes, rules)``: what its DTensors do not say, its rules do.
            options: ``restricted=True`` refuses files whose objects name more than plain values;
                ``check_crc=False`` compares no checksums; ``on_conflict="warn"`` reads one of
                several copies that differ. The others are of ``PlacementLoadPlanner``.

        Raises:
            ImportError: The engine is not installed.
        """
        from dcp_placements.engines.resharder import PlacementResharder

        return PlacementResharder(self, source=source, **options)
