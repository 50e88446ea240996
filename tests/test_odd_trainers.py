"""Trainers that a declaration can be wrong about: no block is wrong without a word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import PlacementSavePlanner
from dcp_placements.advice.block import block_in
from dcp_placements.testing import World
from tests.odd_trainers import GRANTED, NONE, ODD, OPEN, RIGHT, Odd, drawn_lists
from tests.test_handed_over import declared, job, refusal


def outcome(path: Path, odd: Odd, *, is_known: bool) -> tuple[str, str]:
    """Return what is handed over, and the block."""
    world = World(torch.Size(odd.meshes[0].values()).numel(), *odd.meshes)
    whole = odd.whole()
    state = job(whole, lambda key, value, at: odd.cut(key, value, at), world)
    options = {"whole": odd.shapes} if is_known else {}
    block = block_in(refusal(path, world, state, **options))
    if not block:
        return NONE, ""

    def planner(rank: int) -> PlacementSavePlanner:
        made: PlacementSavePlanner = declared(block, world, rank).save_planner()
        return made

    world.save(path / "saved", state, planner)
    stored = dcp.FileSystemReader(path / "saved").read_metadata().state_dict_metadata
    wrong = [key for key in whole if not _is_right(path / "saved", stored, key, whole[key])]
    if not wrong:
        return RIGHT, block
    noted = [_regex(pattern) for pattern in re.findall(r"^ +# ([^\s:]+): ", block, re.MULTILINE)]
    if all(any(regex.search(key) for regex in noted) for key in wrong):
        return OPEN, block
    return GRANTED if "# Taken for granted: " in block else "wrong", block


def _is_right(path: Path, stored: object, key: str, value: torch.Tensor) -> bool:
    name = f"model.{key}"
    size = getattr(stored.get(name), "size", None) if isinstance(stored, dict) else None
    if size != value.shape:
        return False
    read = {name: torch.zeros_like(value)}
    dcp.load(read, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    return torch.equal(read[name], value)


def _regex(pattern: str) -> re.Pattern[str]:
    """Return what finds the keys of a pattern, and of a number in names all that have it."""
    escaped = re.escape(pattern).replace(r"\*", r"\d+").replace(r"\{\}", r"\d+")
    return re.compile(escaped if "{}" in pattern else f"^{escaped}$")


@pytest.mark.filterwarnings("ignore:look at this save")
@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "whole"])
@pytest.mark.parametrize("name", ODD)
def test_no_block_is_wrong_without_a_word(name: str, is_known: bool, tmp_path: Path) -> None:
    odd = ODD[name]
    result, block = outcome(tmp_path, odd, is_known=is_known)
    assert result == odd.expected[is_known], block


@pytest.mark.worlds(10)
@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "whole"])
def test_numbers_are_continued_rightly_or_not_at_all(
    is_known: bool, seeds: range, tmp_path: Path
) -> None:
    for seed in seeds:
        odd, is_even = drawn_lists(seed)
        result, block = outcome(tmp_path / str(seed), odd, is_known=is_known)
        assert result in ([RIGHT] if is_even else [RIGHT, NONE]), (seed, block)
