"""What the presets share: the table of patterns that many FQNs come to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, MeshCoordinate, PlacementError
from dcp_placements.presets import megatron_meshes
from dcp_placements.presets.preset import rules_of

MESH = MeshCoordinate(("tp",), (2,), (0,))
KINDS = [None, *(CheckpointPlacement(MESH, {"tp": Shard(dim)}) for dim in range(3))]

COMPONENTS = st.sampled_from(["layers", "experts", "w", "weight", "weight0", "weight11", "0", "1"])
TOPS = st.sampled_from(["decoder", "embedding", "layers"])
FQNS = st.tuples(TOPS, st.lists(COMPONENTS, max_size=4)).map(lambda t: ".".join((t[0], *t[1])))


@examples(80)
@given(st.dictionaries(FQNS, st.sampled_from(KINDS), min_size=1, max_size=12))
def test_a_table_says_of_each_fqn_what_was_said_of_it(
    placements: dict[str, CheckpointPlacement | None],
) -> None:
    rules = rules_of(placements)
    for fqn, placement in placements.items():
        assert rules(fqn) is placement
        assert rules(f"model.{fqn}") is placement or any(
            f".{other}." in f".{fqn}." for other in placements if other != fqn
        )


def test_layers_that_lie_alike_share_a_pattern() -> None:
    placements = {f"layers.{i}.experts.w.weight{e}": KINDS[1] for i in range(9) for e in range(9)}
    placements |= {f"layers.{i}.norm.weight": None for i in range(9)}
    assert rules_of(placements).patterns == ("layers.*.experts.w.weight*",)
    placements["layers.4.experts.w.weight4"] = KINDS[2]
    assert rules_of(placements).patterns == (
        "layers.4.experts.w.weight4",
        "layers.*.experts.w.weight*",
    )


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_beyond_its_world_is_refused(rank: int) -> None:
    with pytest.raises(PlacementError, match=f"rank {rank} .* 8 ranks"):
        megatron_meshes(rank, 8, tp=2)
