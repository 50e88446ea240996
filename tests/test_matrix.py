"""Whole models from any topology to any other: the pairs of ``matrix``, and the guide's table.

Each test saves under one topology, reads the file by torch's default planner in one process,
compares with the whole tensors, and loads under others, compared with plain slicing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrix import Pair, by_source, pairs, run, table
from topologies import AXES, MODEL, Ranks, Topology, all_topologies, save_and_check
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement

GUIDE = Path(__file__).parent.parent / "dcp_placements" / "layout" / "README.md"
OUTCOMES: dict[Pair, bool] = {}
TARGETS = by_source(pairs())


@pytest.mark.parametrize("source", TARGETS, ids=str)
def test_saved_under_one_topology_and_loaded_under_others(source: Topology) -> None:
    targets = TARGETS[source]
    OUTCOMES.update(dict.fromkeys(((source, target) for target in targets), False))
    for target in run(source, targets):
        OUTCOMES[source, target] = True


def test_the_table_of_the_readme_is_that_of_this_run() -> None:
    if len(OUTCOMES) < len(pairs()):
        pytest.skip("only a part of the matrix was run")
    assert table(OUTCOMES) in GUIDE.read_text(), "scripts/matrix writes it anew"


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


def test_legal_topologies_and_the_reasons_why_others_are_not() -> None:
    legal, illegal = all_topologies()
    assert len(legal) + sum(illegal.values()) == 3 ** len(AXES)
    assert illegal == {
        "more than 32 ranks": 864,
        "ep x etp does not divide the ranks of a stage": 234,
    }
    for topology in legal:
        dense, experts = topology.dense.values(), topology.experts.values()
        for sizes in (dense, experts):
            ranks = 1
            for size in sizes:
                ranks *= size
            assert ranks == topology.ranks <= 32
    assert Topology(pp=8).illegal == "a stage without a layer"
    # Megatron's own example: experts that are cut where the dense part is replicated.
    assert Topology(hsdp=4, ep=4).illegal is None
    assert Topology(tp=2, ep=4).illegal is not None


def test_every_small_topology_is_a_source_and_a_target() -> None:
    small = {known for known in all_topologies()[0] if known.ranks <= 4}
    chosen = pairs()
    assert small <= {source for source, _ in chosen}
    assert small <= {target for _, target in chosen}
    every = pairs(every=True)
    assert {source for source, _ in every} == set(all_topologies()[0])
    assert {target for _, target in every} == set(all_topologies()[0])
