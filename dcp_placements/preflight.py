"""The pre-flight: all that a save would check, and no byte written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, LoadPlanner, SavePlan, SavePlanner

from dcp_placements._torch import DistWrapper, state_dicts_of_statefuls, world_size
from dcp_placements.errors import PlacementError
from dcp_placements.proposal import RankFacts, axis_names, decide, rank_facts
from dcp_placements.report import SaveReport
from dcp_placements.rules.patterns import PlacementRules
from dcp_placements.save.planner import PlacementSavePlanner


def check(
    state_dict: dict[str, Any],
    rules: Any,
    process_group: dist.ProcessGroup | None = None,
    *,
    whole: Any = None,
    **options: Any,
) -> SaveReport:
    """Return what a save of ``state_dict`` would come to, or refuse as it would.

    To be called on all ranks, at step 0 and whenever the rules are new. One gather of the plans
    and one answer; no data moves but the digests.

    Args:
        state_dict: As for ``dcp.save``.
        rules: ``Placements``, or rules as for ``PlacementSavePlanner``.
        process_group: As for ``dcp.save``.
        whole: The unsharded model, as for ``Placements``, in place of that of ``rules``.
        options: Further options of ``PlacementSavePlanner``; with ``Placements``, of its
            ``save_planner``.

    Returns:
        The report on all ranks together, the same on each of them.

    Raises:
        PlacementError: All that a save would refuse, on all ranks, with rules to paste where
            ``whole=`` is known and the rules have a mesh; no state dict, or no rules.
    """
    _check_arguments(state_dict, rules)
    if whole is not None:
        options["whole"] = whole
    of_declaration = getattr(rules, "save_planner", None)
    planner: PlacementSavePlanner = (of_declaration or partial(PlacementSavePlanner, rules))(
        **options
    )
    planner._exact = True
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0
    plain = state_dicts_of_statefuls(state_dict)
    meshes = planner.rules.meshes if isinstance(planner.rules, PlacementRules) else []
    mesh = max(filter(axis_names, meshes), key=lambda one: len(one.shape), default=None)

    def on_rank() -> tuple[SavePlan, RankFacts | None]:
        planner.set_up_planner(plain, is_coordinator=rank == 0)
        plan = planner.create_local_plan()
        is_known = mesh is not None and planner.whole is not None
        return plan, rank_facts(plain, mesh) if is_known else None

    def on_coordinator(sent: list[tuple[SavePlan, RankFacts | None]]) -> SaveReport:
        try:
            planner.create_global_plan([plan for plan, _ in sent])
        except PlacementError as refusal:
            facts = [one for _, one in sent if one is not None]
            if planner.whole is None or mesh is None or len(facts) < len(sent):
                raise
            sizes = dict(zip(axis_names(mesh), mesh.shape, strict=True))
            try:
                decision = decide(planner.whole, facts, sizes)
            except PlacementError:
                raise refusal from None
            raise PlacementError(f"{refusal}\n\n{_FITS}\n\n{decision}") from None
        return planner.report

    try:
        group = DistWrapper(process_group, world_size() > 1, 0)
        return group.all_reduce("check", on_rank, on_coordinator)
    except CheckpointException as failed:
        raise _one_error(failed) from None


_FITS = "this fits the shapes, the names and the contents of all ranks; read it before you use it:"


def _check_arguments(state_dict: Any, rules: Any) -> None:
    """Refuse what is no state dict, or a planner in the place of rules."""
    kind = type(state_dict).__name__
    if hasattr(state_dict, "save_planner"):
        raise PlacementError(f"state_dict= is a {kind}: check(state_dict, placements)")
    if not isinstance(state_dict, Mapping):
        way_out = "model.state_dict()" if hasattr(state_dict, "state_dict") else "{key: value}"
        raise PlacementError(f"state_dict= is a {kind}: pass {way_out}")
    if isinstance(rules, SavePlanner | LoadPlanner):
        raise PlacementError(
            f"rules= is a {type(rules).__name__}\n"
            "    way out:     check(state_dict, placements), with the Placements that made it"
        )


def _one_error(failed: CheckpointException) -> Exception:
    """Return the coordinator's refusal, or the error of the first rank that failed."""
    errors = [failed.failures[rank][0] for rank in sorted(failed.failures)]
    error = next((one for one in errors if isinstance(one, PlacementError)), errors[0])
    return error if isinstance(error, Exception) else RuntimeError(str(failed))
