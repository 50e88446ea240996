"""Which rule speaks: patterns over whole components, the first match wins."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    MeshCoordinate,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.bind.place import place
from dcp_placements.rules.patterns import compile_pattern, rule_name, unmatched_faults
from dcp_placements.testing import World

MESH = MeshCoordinate(("ep",), (2,), (0,))
ROWS = CheckpointPlacement(MESH, {"ep": Shard(0)})
COLUMNS = CheckpointPlacement(MESH, {"ep": Shard(1)})


def matches(pattern: str, fqn: str) -> bool:
    return PlacementRules({pattern: None}).pattern_of(fqn) is not None


@pytest.mark.parametrize(
    ("pattern", "fqn", "matching"),
    [
        # A pattern is matched against any run of whole components.
        ("experts.w1", "experts.w1", True),
        ("experts.w1", "layers.0.experts.w1", True),
        ("experts.w1", "model.layers.0.experts.w1", True),
        ("experts.w1", "optim.state.layers.0.experts.w1.exp_avg", True),
        ("experts.w1", "layers.0.shared_experts.w1", False),
        ("experts.w1", "layers.0.experts.w11", False),
        ("experts.w1", "layers.0.experts.w", False),
        ("experts.w1", "layers.0.experts.0.w1", False),
        ("experts.w1", "layers.0.expertsXw1", False),
        ("experts.w1", "w1.experts", False),
        ("head", "head.weight", True),
        ("head", "hc_head.weight", False),
        ("head", "header.weight", False),
        ("0", "layers.0.w", True),
        ("0", "layers.10.w", False),
        # * stands for one component, or a part of one.
        ("layers.*.w1", "layers.3.w1", True),
        ("layers.*.w1", "layers.3.experts.w1", False),
        ("layers.*.w1", "layers.w1", False),
        ("weight*", "experts.weight", True),
        ("weight*", "experts.weight13", True),
        ("weight*", "experts.0.weight13.exp_avg", True),
        ("weight*", "experts.my_weight", False),
        ("weight*", "weight.bias", True),
        ("*_proj", "mlp.gate_up_proj", True),
        ("*_proj", "mlp.gate_up_projection", False),
        ("w*.b", "w1.x.b", False),
        ("*", "anything", True),
        ("hc_head.*", "hc_head.weight", True),
        ("hc_head.*", "hc_head", False),
        # ** stands for any number of components, none among them.
        ("layers.**.w1", "layers.w1", True),
        ("layers.**.w1", "layers.3.experts.w1", True),
        ("layers.**.w1", "layers.3.experts.w2", False),
        ("layers.**.w1", "my_layers.3.w1", False),
        ("**.w1", "w1", True),
        ("model.**", "model.layers.0.w", True),
        ("model.**", "ema_model.layers.0.w", False),
        # What means something in a regular expression means itself.
        ("w+", "w+", True),
        ("w+", "ww", False),
        ("w[0]", "w[0].x", True),
        ("a(b", "a(b", True),
    ],
)
def test_patterns_match_whole_components(pattern: str, fqn: str, matching: bool) -> None:
    assert matches(pattern, fqn) is matching


def test_first_match_wins() -> None:
    rules = PlacementRules({"hc_head.*": None, "head": ROWS, "**": COLUMNS})
    assert rules("model.hc_head.weight") is None
    assert rules.pattern_of("model.hc_head.weight") == "hc_head.*"
    assert rules("model.head.weight") is ROWS
    assert rules("model.norm.weight") is COLUMNS
    assert rules.patterns == ("hc_head.*", "head", "**")
    assert repr(rules) == (
        "PlacementRules({'hc_head.*': None, 'head': [Shard(0)] on mesh (ep=2), "
        "'**': [Shard(1)] on mesh (ep=2)})"
    )


def test_compiled_patterns_are_searched_in_the_key() -> None:
    rules = PlacementRules({re.compile(r"experts\.\d+\.w[13]"): ROWS, "experts": COLUMNS})
    assert rules("shared_experts.0.w3") is ROWS
    assert rules("experts.0.w2") is COLUMNS
    assert rules.pattern_of("experts.11.w1") == r"re:experts\.\d+\.w[13]"
    # ^ is where the key begins.
    assert PlacementRules({re.compile("^w"): ROWS})("w1") is ROWS
    assert PlacementRules({re.compile("^w"): ROWS})("layers.w1") is None
    assert PlacementRules({re.compile("(?i)EXPERTS"): ROWS})("layers.experts") is ROWS


@pytest.mark.parametrize("pattern", ["", ".", "a..b", ".w", "w."])
def test_empty_components_are_refused(pattern: str) -> None:
    with pytest.raises(PlacementError) as refused:
        PlacementRules({pattern: ROWS})
    assert repr(pattern) in str(refused.value)
    assert "empty component" in str(refused.value)
    with pytest.raises(PlacementError, match="empty component"):
        compile_pattern(pattern)


def test_a_regular_expression_as_text_is_told_of_compile() -> None:
    with pytest.raises(PlacementError, match=r"(?s)empty component.*re\.compile"):
        PlacementRules({".*experts": None})
    with pytest.raises(PlacementError) as refused:
        PlacementRules({"layers.*..w1": None})
    assert "compile" not in str(refused.value)


def test_a_wildcard_that_matches_no_key_is_not_called_a_regular_expression() -> None:
    names = ["'layers.*.w1'", "rename=Renumber('experts.{}')", r"'re:w\d$'"]
    assert "compile" not in str(unmatched_faults(names, ["w"]))
    assert "compile" in str(unmatched_faults([r"'layers\d.w1'"], ["w"]))


def test_a_value_that_is_no_placement_is_refused() -> None:
    with pytest.raises(PlacementError) as refused:
        PlacementRules({"experts.w1": Shard(0)})  # type: ignore[dict-item]
    assert "'experts.w1'" in str(refused.value)
    assert "no CheckpointPlacement" in str(refused.value)


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"takes a mapping .* not list"):
        PlacementRules([("experts.w1", None)])  # type: ignore[arg-type]


def test_rules_travel_and_say_the_same() -> None:
    rules = PlacementRules({"hc_head.*": None, re.compile("head"): ROWS, "**": COLUMNS})
    keys = ["hc_head.w", "head.w", "x.y"]
    said = [rules(key) for key in keys]
    copy = pickle.loads(pickle.dumps(rules))
    assert [copy(key) for key in keys] == said
    assert copy.patterns == rules.patterns


def test_rules_are_named_in_messages_by_their_pattern_or_function() -> None:
    def by_layer(fqn: str, tensor: Any) -> CheckpointPlacement | None:
        return ROWS

    rules = PlacementRules({"experts": ROWS})
    assert rule_name(rules, "layers.experts.w") == "'experts'"
    assert rule_name(rules, "norm") is None
    assert rule_name(None, "norm") is None
    assert (rule_name(by_layer, "norm") or "").endswith("by_layer()")


def test_scalars_and_objects_are_never_asked_about() -> None:
    asked = []

    def rules(fqn: str, tensor: Any) -> CheckpointPlacement | None:
        asked.append((fqn, tuple(tensor.shape)))
        return None

    state_dict = {
        "w": torch.zeros(4, 3),
        "step": torch.tensor(3.0),
        "lr": 0.1,
        "name": "adam",
        "empty": torch.zeros(0, 3),
        "betas": (0.9, 0.999),
        "nothing": None,
    }
    placing = place(state_dict, rules)
    assert asked == [("w", (4, 3)), ("empty", (0, 3))]
    assert not placing.placed
    assert not placing.faults


def test_patterns_for_several_models_may_match_nothing() -> None:
    def unmatched(rules: PlacementRules) -> tuple[str, ...]:
        travelled = pickle.loads(pickle.dumps(rules))
        planner = World(1).check(
            lambda rank: {"w": torch.ones(2)}, lambda rank: PlacementSavePlanner(travelled)
        )
        assert isinstance(planner, PlacementSavePlanner)
        return planner.report.unmatched

    table: dict[Any, None] = {"nothing.such": None}
    assert unmatched(PlacementRules(table, optional=True)) == ()
    with pytest.warns(UserWarning, match=r"nothing\.such"):
        assert unmatched(PlacementRules(table)) == ("'nothing.such'",)


class ByDim(PlacementRules):
    """Rules by pattern, of tensors of two dims alone."""

    def __call__(self, fqn: str, tensor: Any = None) -> CheckpointPlacement | None:
        return super().__call__(fqn) if tensor.dim() == 2 else None


def test_a_subclass_answers_in_its_own_way(tmp_path: Path) -> None:
    """The second tensor matches the pattern, and the subclass leaves it a replica."""
    world, weight, scale = World(2), torch.arange(12.0).reshape(4, 3), torch.ones(2)

    def rules(rank: int) -> PlacementRules:
        placement = CheckpointPlacement(world.mesh(rank, ep=2), {"ep": Shard(0)})
        return ByDim({"experts": placement})

    def state_dict(rank: int) -> dict[str, Any]:
        return {"experts.w": weight.chunk(2)[rank].clone(), "experts.scale": scale.clone()}

    world.save(tmp_path, state_dict, lambda rank: PlacementSavePlanner(rules(rank)))
    found = {"experts.w": torch.zeros(4, 3), "experts.scale": torch.zeros(2)}
    dcp.load(found, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    assert torch.equal(found["experts.w"], weight)
    assert torch.equal(found["experts.scale"], scale)
    loaded = world.load(
        tmp_path,
        lambda rank: {key: torch.zeros_like(value) for key, value in state_dict(rank).items()},
        lambda rank: PlacementLoadPlanner(rules(rank)),
    )
    for rank in range(2):
        assert torch.equal(loaded[rank]["experts.w"], weight.chunk(2)[rank])
        assert torch.equal(loaded[rank]["experts.scale"], scale)
