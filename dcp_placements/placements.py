"""One declaration for both sides: the rules and names by which a job saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_placements.load.planner import PlacementLoadPlanner
from dcp_placements.names.stacks_and_parts import Rename
from dcp_placements.rules.patterns import PlacementRules, Rules, RuleTable, check_declaration
from dcp_placements.save.planner import PlacementSavePlanner


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
    """

    rules: Rules | None
    rename: Rename | None
    waive: Mapping[str, str]

    def __init__(
        self,
        rules: Rules | RuleTable | None,
        *,
        rename: Rename | None = None,
        waive: Mapping[str, str] | None = None,
    ) -> None:
        """Check and keep the declaration.

        Args:
            rules: ``PlacementRules``, the mapping ``{pattern: CheckpointPlacement or None}`` that
                it takes, or any ``(fqn, tensor) -> CheckpointPlacement or None``. None: every
                tensor keeps its own mesh and placements.
            rename: As for ``PlacementSavePlanner``.
            waive: As for the planners, each of which takes more.

        Raises:
            PlacementError: Rules or a rename that cannot be called, or a waiver without a reason.
        """
        resolved = PlacementRules(rules) if isinstance(rules, Mapping) else rules
        waivers = check_declaration(resolved, rename, waive)
        # The instance is frozen for everybody else.
        object.__setattr__(self, "rules", resolved)
        object.__setattr__(self, "rename", rename)
        object.__setattr__(self, "waive", waivers)

    def save_planner(
        self, *, waive: Mapping[str, str] | None = None, **options: Any
    ) -> PlacementSavePlanner:
        """Return a planner for ``dcp.save``.

        Args:
            waive: Adds to the waivers declared here.
            options: Of ``PlacementSavePlanner``, but for ``rules`` and ``rename``.
        """
        waivers = {**self.waive, **check_declaration(None, None, waive)}
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
        return PlacementLoadPlanner(self.rules, rename=self.rename, waive=waivers, **options)
