"""The options of the planners on which ranks must agree, and why they may differ in the others."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner
from dcp_placements.table.must_agree import MUST_AGREE
from dcp_placements.testing import World

FIELDS = {"digests": "digests", "step": "step", "whole": "has_whole"}
"""The options that are a row of ``MUST_AGREE``, and its field."""

MAY_DIFFER = {
    "rules": "tensors are compared by their boxes, however they were declared",
    "rename": "names are compared; what it numbers is the row ``numberings``",
    "waive": "each warning is waived on the rank that gives it",
    "optional": "a rank leaves its own tensors as they are",
    "cast": "it concerns the dtypes of the rank's own tensors",
    "exchange": "each rank sends its process group, and only ranks with one group exchange",
    "on_conflict": "a rank decides about its own copies, the coordinator about those of several",
    "copies": "the coordinator decides",
    "flatten_state_dict": "other keys would result, and keys are compared",
    "flatten_sharded_tensors": "other keys would result, and keys are compared",
    "allow_partial_load": "a rank leaves its own tensors as they are",
    "dedup_replicated_tensors": "it has no effect, as in torch",
    "dedup_save_to_lowest_rank": "the coordinator decides",
    "enable_plan_caching": "it has no effect",
}


def test_each_option_is_a_row_or_has_a_reason() -> None:
    options = {
        name
        for planner in (PlacementSavePlanner, PlacementLoadPlanner)
        for name in inspect.signature(planner).parameters
    }
    assert options == set(FIELDS) | set(MAY_DIFFER)
    assert not set(FIELDS) & set(MAY_DIFFER)
    assert set(FIELDS.values()) <= {row.field for row in MUST_AGREE}


OTHER = {
    "digests": ("sampled", "full"),
    "step": (7, 8),
    "whole": (None, {"w": torch.empty(2, device="meta")}),
}


@pytest.mark.parametrize("option", FIELDS)
def test_ranks_that_differ_in_such_an_option_are_refused(option: str, tmp_path: Path) -> None:
    first, second = OTHER[option]

    def planner(rank: int) -> PlacementSavePlanner:
        return PlacementSavePlanner(**{option: second if rank == 1 else first})

    with pytest.raises(
        CheckpointException, match=r"ranks? 0, 2.*rank 1|rank 1.*ranks? 0, 2"
    ) as raised:
        World(3).save(tmp_path, lambda rank: {"w": torch.ones(2)}, planner)
    assert "way out" in str(raised.value)
