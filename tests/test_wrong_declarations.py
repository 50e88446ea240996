"""Random wrong declarations: what they save is the truth, or they are refused, or warned of.

A true declaration is one that a refused save handed over (``test_random_trainers``). A mistake is
made in its text: another dim, another axis, a rule or a rename that is left out, other numbers.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import PlacementError
from dcp_placements.advice.block import block_in
from dcp_placements.testing import World
from tests.test_handed_over import State, Whole, assert_saves, declared, job, refusal
from tests.test_random_trainers import Trainer


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]


def _arguments(tree: ast.AST, name: str) -> list[ast.keyword]:
    keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    return [keyword for keyword in keywords if keyword.arg == name]


def _number(node: ast.expr) -> int:
    assert isinstance(node, ast.Constant)
    return int(node.value)  # type: ignore[arg-type]


def other_dim(tree: ast.AST, draw: random.Random) -> bool:
    if calls := _calls(tree, "Shard"):
        call = draw.choice(calls)
        call.args[0] = ast.Constant(1 - _number(call.args[0]) % 2)
    return bool(calls)


def plain_in_place_of_fused(tree: ast.AST, draw: random.Random) -> bool:
    if calls := _calls(tree, "FusedShard"):
        call = draw.choice(calls)
        call.func, call.args[1:] = ast.Name("Shard"), []
    return bool(calls)


def parts_in_another_order(tree: ast.AST, draw: random.Random) -> bool:
    fused = _calls(tree, "FusedShard")
    sizes = [call.args[1] for call in fused if isinstance(call.args[1], ast.Tuple)]
    sizes = [each for each in sizes if len({_number(size) for size in each.elts}) > 1]
    if sizes:
        chosen = draw.choice(sizes)
        chosen.elts.insert(0, chosen.elts.pop())
    return bool(sizes)


def replicated(tree: ast.AST, draw: random.Random) -> bool:
    if calls := _calls(tree, "CheckpointPlacement"):
        placements = draw.choice(calls).args[1]
        assert isinstance(placements, ast.Dict)
        placements.values[0] = ast.parse("Replicate()", mode="eval").body
    return bool(calls)


def without_a_rule(tree: ast.AST, draw: random.Random) -> bool:
    if calls := _calls(tree, "Placements"):
        rules = calls[0].args[0] if calls[0].args else None
        if isinstance(rules, ast.Dict) and rules.keys:
            index = draw.randrange(len(rules.keys))
            del rules.keys[index], rules.values[index]
            return True
    return False


def without_a_rename(tree: ast.AST, draw: random.Random) -> bool:
    for call in _calls(tree, "Renames"):
        if len(call.args) > 1:
            del call.args[draw.randrange(len(call.args))]
            return True
    for call in _calls(tree, "Placements"):
        if _arguments(call, "rename"):
            call.keywords = [keyword for keyword in call.keywords if keyword.arg != "rename"]
            return True
    return False


def other_total(tree: ast.AST, draw: random.Random) -> bool:
    if totals := _arguments(tree, "total"):
        total = draw.choice(totals)
        total.value = ast.Constant(_number(total.value) + draw.choice([-1, 1, 2]))
    return bool(totals)


def first_numbers_on_all_ranks(tree: ast.AST, draw: random.Random) -> bool:
    if positions := _arguments(tree, "at"):
        draw.choice(positions).value = ast.Constant(0)
    return bool(positions)


MISTAKES = (
    other_dim,
    plain_in_place_of_fused,
    parts_in_another_order,
    replicated,
    without_a_rule,
    without_a_rename,
    other_total,
    first_numbers_on_all_ranks,
)


def mistaken(block: str, draw: random.Random) -> tuple[str, str]:
    """Return a block with a mistake, and the name of the mistake; the block if it has no place."""
    for mistake in draw.sample(MISTAKES, len(MISTAKES)):
        tree = ast.parse(f"from torch.distributed.tensor import Replicate, Shard\n{block}")
        if mistake(tree, draw):
            return ast.unparse(ast.fix_missing_locations(tree)), mistake.__name__
    return block, "none"


def is_true(path: Path, whole: Whole) -> bool:
    """Return whether torch reads the whole tensors, and twice them as their moments."""
    loaded: dict[str, torch.Tensor] = {}
    for head, tail in (("model.", ""), ("optim.state.", ".exp_avg")):
        loaded |= {f"{head}{k}{tail}": torch.full_like(v, -1) for k, v in whole.items()}
    try:
        dcp.load(loaded, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    except Exception:  # other keys or shapes
        return False
    return all(
        torch.equal(loaded[f"model.{key}"], value)
        and torch.equal(loaded[f"optim.state.{key}.exp_avg"], 2 * value)
        for key, value in whole.items()
    )


def outcome(path: Path, trainer: Trainer, state: State, world: World, text: str) -> str:
    """Return what becomes of a save by a declaration that has a mistake; ``whole=`` is given."""

    def planner(rank: int) -> Any:
        return declared(text, world, rank).save_planner(whole=trainer.shapes)

    try:
        planners = world.save(path / "wrong", state, planner)
    except (dcp.CheckpointException, PlacementError) as error:
        failures = getattr(error, "failures", {0: (error, None)})
        message = str(next(iter(failures.values()))[0])
        block = block_in(message)
        if not block:
            return "refused"
        assert_saves(path / "right", trainer.whole, state, block, world)
        return "refused, with a block that is right"
    if is_true(path / "wrong", trainer.whole):
        return "true"
    return "warned" if planners[0].report.warnings else "silent"  # type: ignore[attr-defined]


@pytest.mark.worlds(20)
def test_a_wrong_declaration_is_refused_or_warned_of(seeds: range, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        trainer = Trainer(seed, padded=False)
        world = World(torch.Size(trainer.axes.values()).numel(), trainer.axes)
        state = job(trainer.whole, trainer.cut, world)
        block = block_in(refusal(tmp_path, world, state, whole=trainer.shapes))
        text, mistake = mistaken(block, random.Random(seed))
        became = outcome(tmp_path / str(seed), trainer, state, world, text)
        counts[f"{became}: {mistake}"] += 1
    print(*sorted(counts.items()), sep="\n")
    silent = [name for name in counts if name.startswith("silent")]
    # Parts that have one size in another order are in the rule alone: nothing else knows them.
    assert set(silent) <= {"silent: parts_in_another_order"}
