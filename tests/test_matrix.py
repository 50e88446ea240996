"""Whole models from any topology to any other: a share of the pairs, and the table of the guide.

Each test saves under one topology, reads the file by torch's default planner in one process,
compares with the whole tensors, and loads under others, compared with plain slicing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrix import by_source, pairs, run, table
from topologies import MODEL, Ranks, Topology, save_and_check
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement

GUIDE = Path(__file__).parent.parent / "dcp_placements" / "layout" / "DESIGN.md"
TARGETS = by_source(pairs())
SHARE = 9
"""One in so many sources is run here, and all of them by ``scripts/matrix``."""


@pytest.mark.parametrize("source", list(TARGETS)[::SHARE], ids=str)
def test_saved_under_one_topology_and_loaded_under_others(source: Topology) -> None:
    assert list(run(source, TARGETS[source])) == TARGETS[source]


def test_the_table_of_the_guide_has_all_pairs() -> None:
    assert table(dict.fromkeys(pairs(), True)) in GUIDE.read_text(), "scripts/matrix writes it anew"


@pytest.mark.filterwarnings("ignore:look at this save")
def test_a_fused_dim_that_is_declared_as_plain_is_seen_in_the_file(tmp_path: Path) -> None:
    """The comparison can fail: sizes alone do not show it."""

    class Plain(Ranks):
        def rules(self, rank: int) -> Any:
            known = super().rules(rank)
            plain = CheckpointPlacement(self.mesh(rank, MODEL["embed.weight"]), {"tp": Shard(0)})
            return lambda fqn, tensor: plain if "mlp.gate_up" in fqn else known(fqn, tensor)

    with pytest.raises(AssertionError, match=r"layers\.0\.mlp\.gate_up\.weight in the file"):
        save_and_check(tmp_path, Plain(Topology(tp=2)))
