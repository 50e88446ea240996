"""Files that ranks of random worlds saved by themselves, as a checkpoint: the whole tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hazard_scenes import assert_holds

from dcp_placements import MeshCoordinate, Placements
from dcp_placements.offline import import_checkpoint, open_source, verify
from tests.differential import checkpoint, wholes
from tests.drawn_worlds import draw_pair
from tests.offline.test_rehearse_worlds import declared_alone
from tests.random_ranks import Rank


@pytest.mark.parametrize("seed", range(16))
def test_files_of_the_ranks_of_any_random_world_are_put_together(seed: int, tmp_path: Path) -> None:
    pair = draw_pair(seed)
    side, whole = declared_alone(pair.save), wholes(pair)
    pair = replace(pair, save=side)
    (tmp_path / "ranks").mkdir()
    for at in range(side.size):
        rank = Rank(pair, side, at)
        state = rank.state_dict(list(rank.values(whole)), blank=False)
        torch.save(state, tmp_path / "ranks" / f"shard_rank_{at}.pt")

    def declared(mesh: MeshCoordinate) -> Placements:
        rank = Rank(pair, side, mesh.get_coordinate()[0])
        return Placements(rank.rules(), rename=rank.rename())

    source = open_source(tmp_path / "ranks", rules=declared, axes={"rank": side.size})
    held = checkpoint(pair, whole)
    expected = {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
    assert source.tensors.keys() == expected.keys()
    assert verify(source, contents=True).sound
    import_checkpoint(source, tmp_path / "out")
    assert_holds(tmp_path / "out", expected)
