"""The whole model as the specification: what it does not have is refused, before any byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementRules,
    Placements,
    PlacementSavePlanner,
    Renumber,
    check,
    contiguous,
)
from dcp_placements.advice.block import block_in
from dcp_placements.table.whole import Levels, WholeModel
from dcp_placements.testing import FakeDTensor, World

WORLD = World(4)
EXPERTS, HIDDEN, VOCAB = 4, 6, 61

WHOLE: dict[str, Any] = {
    "embed": (VOCAB, HIDDEN),
    **{
        f"layers.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in {
            "router": (EXPERTS, HIDDEN),
            "down": (HIDDEN, 2 * HIDDEN),
            "norm": (HIDDEN,),
            **{f"experts.{expert}.w1": (3, HIDDEN) for expert in range(EXPERTS)},
        }.items()
    },
}


def values(key: str) -> torch.Tensor:
    """Return the whole tensor of a key: of each other values."""
    number = list(WHOLE).index(key)
    shape = WHOLE[key]
    return torch.arange(1000.0 * number, 1000 * number + torch.Size(shape).numel()).view(shape)


def padded(whole: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([whole, torch.zeros(rows - len(whole), *whole.shape[1:])])


class Job:
    """Ranks of ep 2 x tp 2: experts by ep, renumbered from 0; ``down`` and the embedding by tp."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def mesh(self, rank: int) -> Any:
        return WORLD.mesh(rank, ep=2, tp=2)

    def weights(self, rank: int) -> dict[str, torch.Tensor]:
        ep, tp = divmod(rank, 2)
        local = {}
        for key in WHOLE:
            value = values(key)
            if key == "embed":
                value = padded(value, 64).chunk(2)[tp]
            elif key.endswith("down"):
                value = value.chunk(2, 1)[tp]
            elif "experts" in key:
                _, layer, _, expert, name = key.split(".")
                if int(expert) // 2 != ep:
                    continue
                key = f"layers.{layer}.experts.{int(expert) % 2}.{name}"
            local[key] = value.contiguous()
        return local

    def state(self, rank: int) -> dict[str, Any]:
        weights = self.weights(rank)
        moments = {
            name: {"step": torch.tensor(3.0), "exp_avg": value + 1}
            for name, value in weights.items()
        }
        state = {
            "model": weights,
            "optim": {"state": moments, "param_groups": [{"params": [*moments]}]},
            "step": 3,
        }
        edit: Callable[[dict[str, Any]], Any] = self.changes.get("edit", lambda state: None)
        edit(state)
        return state

    def placements(self, rank: int, **options: Any) -> Placements:
        mesh = self.mesh(rank)
        ids = range(2 * (rank // 2), 2 * (rank // 2) + 2)
        rules: dict[str, Any] = {
            "down": CheckpointPlacement(mesh, {"tp": Shard(1)}),
            "embed": CheckpointPlacement(
                mesh,
                {"tp": Shard(0)},
                global_shape=(VOCAB, HIDDEN),
                padded_shape=(64, HIDDEN),
            ),
        }
        rename = Renumber("experts.{}", ids, total=EXPERTS)
        given = {"rename": rename, "whole": WHOLE, **self.changes.get("options", {}), **options}
        first = self.changes.get("rules", lambda mesh: {})(mesh)
        return Placements({**first, **rules, **first}, **given)

    def save(self, path: Path) -> Any:
        planners = [self.placements(rank).save_planner() for rank in range(WORLD.size)]
        WORLD.save(path, self.state, planners.__getitem__)
        return planners[0].report

    def refused(self, path: Path) -> str:
        with pytest.raises(CheckpointException) as refused:
            self.save(path)
        assert not list(path.glob("*"))
        return str(refused.value.failures[0][0])


def test_a_right_declaration_passes_and_the_report_names_the_level(tmp_path: Path) -> None:
    report = Job().save(tmp_path)
    assert report.whole == f"{len(WHOLE)} keys under 'model.'"
    assert "as the whole model: 15 keys" in str(report)
    assert not report.warnings


def test_it_is_compared_without_a_level_and_under_several() -> None:
    weights = {key: values(key) for key in WHOLE}
    for state in (
        weights,
        {"app": {"model": weights}, "epoch": 1},
        {"model": weights, "ema": {key: value.half() for key, value in weights.items()}},
        {"step": torch.tensor(1.0), **weights},
    ):
        assert check(state, None, whole=WHOLE).whole.startswith(f"{len(WHOLE)} keys")
    named = {f"{level}.{key}": shape for level in ("model", "ema") for key, shape in WHOLE.items()}
    with pytest.raises(PlacementError, match=r"ema\.embed: is \(3,\), where the whole model has"):
        check({"model": weights, "ema": {"embed": torch.zeros(3)}}, None, whole=named)


def test_an_average_of_another_shape_is_warned_of() -> None:
    weights = {key: values(key) for key in WHOLE}
    average = {**weights, "embed": torch.zeros(2 * len(weights["embed"]), 6)}
    with pytest.warns(
        UserWarning, match=r"ema\.embed: is \(122, 6\), where the whole model has \(61, 6\)"
    ):
        check({"model": weights, "ema": average}, None, whole=WHOLE)
    waived = check(
        {"model": weights, "ema": average}, None, whole=WHOLE, waive={"ema": "of two models"}
    )
    assert not waived.warnings


def test_state_that_names_its_parameter_by_a_number_is_not_compared_and_said() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    with pytest.warns(UserWarning, match=r"optim\.state\.0-1\.exp_avg.*: under no level of whole="):
        report = check(state, None, whole={"weight": (2, 3), "bias": (2,)})
    assert report.whole.endswith(
        "; 4 tensors not compared (optim.state.0-1.exp_avg, optim.state.0-1.exp_avg_sq)"
    )


@pytest.mark.parametrize(
    "beside", ["ema", "model_ema", "optimizer.state.exp_avg"], ids=["ema", "model_ema", "moments"]
)
def test_the_weights_are_compared_where_their_average_or_moments_stand_before(beside: str) -> None:
    weights = {key: values(key) for key in WHOLE}
    less = {key: value for key, value in weights.items() if "layers.1.norm" not in key}

    def flat(of_average: dict[str, Any], of_model: dict[str, Any]) -> dict[str, Any]:
        first = {f"{beside}.{key}": value for key, value in of_average.items()}
        return first | {f"model.{key}": value for key, value in of_model.items()}

    if beside.startswith("optimizer"):  # which need not have all
        compared = check(flat(less, weights), None, whole=WHOLE).whole
    else:
        with pytest.warns(UserWarning, match=rf"{beside}\.layers\.1\.norm: no rank has 1 key"):
            compared = check(flat(less, weights), None, whole=WHOLE).whole
    assert compared == f"14 keys under '{beside}.', 15 keys under 'model.'"
    with pytest.raises(PlacementError, match=r"model\.layers\.1\.norm: no rank has this key"):
        check(flat(weights, less), None, whole=WHOLE)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        # M103: experts of a ModuleList, numbered from 0 on each rank, glued together by a rule.
        (
            {
                "options": {"rename": None},
                "rules": lambda mesh: {"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})},
            },
            ["is (6, 6), where the whole model has (3, 6)", "rename=Renumber"],
        ),
        # M104: a replicated router declared as sharded.
        (
            {"rules": lambda mesh: {"router": CheckpointPlacement(mesh, {"tp": Shard(0)})}},
            ["is (8, 6), where the whole model has (4, 6)", "by rule 'router'"],
        ),
        # M104: the wrong dim.
        (
            {"rules": lambda mesh: {"down": CheckpointPlacement(mesh, {"tp": Shard(0)})}},
            ["is (12, 6), where the whole model has (6, 12)", "Shard(0)"],
        ),
        # M104: a rule that matches too much.
        (
            {"rules": lambda mesh: {"layers.*": CheckpointPlacement(mesh, {"tp": Shard(0)})}},
            ["norm: is (12,), where the whole model has (6,)", "by rule 'layers.*'"],
        ),
        # M105: a row of the vocabulary taken for padding.
        (
            {
                "rules": lambda mesh: {
                    "model.embed": CheckpointPlacement(
                        mesh, {"tp": Shard(0)}, global_shape=(60, 6), padded_shape=(64, 6)
                    )
                }
            },
            ["is (60, 6), where the whole model has (61, 6)", "padded_shape="],
        ),
        # M106: padding forgotten.
        (
            {
                "rules": lambda mesh: {
                    "model.embed": CheckpointPlacement(mesh, {"tp": Shard(0)}),
                }
            },
            ["is (64, 6), where the whole model has (61, 6)", "padded_shape="],
        ),
        # A rule forgotten: here the copies differ as well.
        (
            {"rules": lambda mesh: {"down": None}},
            ["is (6, 6), where the whole model has (6, 12)", "by rule no rule"],
        ),
    ],
)
def test_another_whole_shape_is_refused(
    tmp_path: Path, changes: dict[str, Any], texts: list[str]
) -> None:
    message = Job(**changes).refused(tmp_path)
    for text in texts:
        assert text in message
    assert "propose_placements(" in message


def test_a_missing_layer_and_an_unknown_key_are_refused(tmp_path: Path) -> None:
    def edit(state: dict[str, Any]) -> None:
        for part in (state["model"], state["optim"]["state"]):
            for key in [key for key in part if key.startswith("layers.1.")]:
                del part[key]
        state["model"]["layers.7.norm"] = torch.zeros(HIDDEN)

    message = Job(edit=edit).refused(tmp_path)
    assert "model.layers.1.down" in message
    assert "no rank has this key of the whole model" in message
    assert "model.layers.7.norm: the whole model has no such key" in message


def test_state_of_another_shape_than_its_parameter_is_refused(tmp_path: Path) -> None:
    def edit(state: dict[str, Any]) -> None:
        moments = state["optim"]["state"]
        moments["layers.0.norm"]["exp_avg"] = torch.zeros(HIDDEN - 1)
        # Factored, and a scalar kept as one element.
        moments["layers.0.router"]["row"] = torch.zeros(EXPERTS)
        moments["layers.1.norm"]["step"] = torch.zeros(1)

    message = Job(edit=edit).refused(tmp_path)
    assert "optim.state.layers.0.norm.exp_avg: is (5,), where its parameter has (6,)" in message
    assert "(1 fault)" in message


@pytest.mark.parametrize(
    ("shape", "cut_by", "is_right"),
    [
        ((8, 1), None, True),  # torch's Adafactor
        ((1, 6), None, True),
        ((8,), None, True),  # Adafactor of transformers
        ((6,), None, True),
        ((1, 1), None, True),
        ((8, 8), None, True),  # a preconditioner
        ((3, 5), None, False),
        ((9,), None, True),  # scales of blocks
        ((4,), Shard(0), True),  # makes (8,)
        ((8,), Shard(0), False),  # makes (16,)
        ((8, 1), Shard(0), False),  # makes (16, 1)
        ((4, 6), Shard(0), True),
        ((8, 6), Shard(0), False),
    ],
)
def test_m117_state_follows_its_parameter_dim_by_dim(
    tmp_path: Path, shape: tuple[int, ...], cut_by: Any, is_right: bool
) -> None:
    world = World(2)

    def planner(rank: int) -> PlacementSavePlanner:
        placement = CheckpointPlacement(world.mesh(rank, ep=2), {"ep": cut_by or Replicate()})
        rules = PlacementRules({"row": placement})
        return PlacementSavePlanner(rules, whole={"w": (8, 6)})

    def state(rank: int) -> dict[str, Any]:
        optim = {"state": {"w": {"row": torch.zeros(shape)}}, "param_groups": [{"params": ["w"]}]}
        return {"model": {"w": torch.ones(8, 6)}, "optim": optim}

    if is_right:
        world.save(tmp_path, state, planner)
        return
    with pytest.raises(
        CheckpointException, match=r"optim\.state\.w\.row: is .* parameter has \(8, 6"
    ):
        world.save(tmp_path, state, planner)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adafactor,
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.Rprop,
        torch.optim.ASGD,
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_m117_optimizers_of_torch_pass(optimizer: Any, steps: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 3, 2), nn.LayerNorm(5)
            self.lin, self.scale = nn.Linear(5, 4), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = self.conv(x).flatten()[:5]
            out: torch.Tensor = self.lin(self.norm(features)) * self.scale
            return out

    model = Model()
    optim = optimizer(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(1, 1, 4, 4)).sum().backward()
        optim.step()
    with torch.device("meta"):
        whole = Model()
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        state = get_optimizer_state_dict(model, optim, options=options)
        report = check({"model": model.state_dict(), "optim": state}, None, whole=whole)
        assert report.whole == "7 keys under 'model.'"
        assert not report.warnings


@pytest.mark.parametrize("of_expert", [(4, 5, 1), (4, 1, 6), (4, 5), (4, 6), (4, 1, 1), (4,)])
def test_m117_state_of_stacked_experts_is_reduced_in_any_dim(of_expert: tuple[int, ...]) -> None:
    state = {
        "model.w": torch.ones(4, 5, 6),
        "optim.state.w.second": torch.zeros(of_expert),
        "optim.param_groups.w.lr": 0.1,
    }
    check(state, None, whole={"w": (4, 5, 6)})


@pytest.mark.parametrize("blocks", [2, 3])
def test_m126_scales_of_blocks_that_do_not_divide_the_shard_are_refused(
    tmp_path: Path, blocks: int
) -> None:
    """Rows of one scale are on two tp ranks: each has a scale, and the whole has one too few."""
    rows, block = 2 * (8 * blocks + 4), 8
    weight = torch.arange(float(rows)).view(rows, 1).expand(rows, 3)
    scales = torch.stack([part.abs().amax() for part in weight.split(block)])[:, None]
    whole = {"w": tuple(weight.shape), "w_scale_inv": tuple(scales.shape)}
    world = World(2)

    def state(rank: int) -> dict[str, Any]:
        part = weight.chunk(2)[rank]
        own = torch.stack([piece.abs().amax() for piece in part.split(block)])[:, None]
        return {"w": part.contiguous(), "w_scale_inv": own}

    def planner(rank: int) -> PlacementSavePlanner:
        placement = CheckpointPlacement(world.mesh(rank, tp=2), {"tp": Shard(0)})
        return PlacementSavePlanner(PlacementRules({"w*": placement}), whole=whole)

    with pytest.raises(
        CheckpointException, match=rf"w_scale_inv: is \({len(scales) + 1}, 1\), where"
    ):
        world.save(tmp_path, state, planner)


def test_waived_keys_are_not_compared(tmp_path: Path) -> None:
    def edit(state: dict[str, Any]) -> None:
        del state["model"]["layers.1.norm"]
        state["model"]["layers.0.norm"] = torch.zeros(2)
        state["model"]["adapter"] = torch.zeros(2)

    waive = {"model.layers.*.norm": "left out", "adapter": "beside the model"}
    Job(edit=edit, options={"waive": waive}).save(tmp_path)


def test_names_none_of_which_are_the_models_are_refused() -> None:
    with pytest.raises(PlacementError, match="has no key of whole="):
        check({"net.w": torch.zeros(2)}, None, whole={"embed": (2,)})


def test_a_dtype_is_compared_where_it_is_given() -> None:
    state = {"w": torch.zeros(2)}
    check(state, None, whole={"w": torch.zeros(2, dtype=torch.bfloat16, device="meta")})
    with pytest.raises(PlacementError, match=r"w: is of torch\.float32, where the whole model has"):
        check(state, None, whole={"w": ((2,), torch.bfloat16)})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_of_tied_weights_one_name_is_enough_and_other_buffers_count_for_nothing() -> None:
    with torch.device("meta"):
        whole = Tied()
    state = Tied().state_dict()
    assert set(state) == {"embed.weight", "head.weight"}
    check(state, None, whole=whole)
    del state["head.weight"]
    check({"model": state}, None, whole=whole)
    with pytest.raises(PlacementError, match="no rank has this key"):
        check({"model": state}, None, whole={key: (5, 3) for key in Tied().state_dict()})


@pytest.mark.parametrize(
    ("whole", "text"),
    [
        (3, "whole= is a int"),
        ({}, "whole= has no keys"),
        ({"w": "large"}, "'w' has the value 'large', which is no shape"),
        ({1: (2,)}, "1 has the value"),
        ({"w": None}, "which is no shape"),
    ],
)
def test_what_is_no_model_is_named(whole: Any, text: str) -> None:
    with pytest.raises(PlacementError, match=text):
        Placements({}, whole=whole)


def test_a_model_that_is_sharded_already_is_refused() -> None:
    sharded = FakeDTensor(torch.zeros(1, 3), WORLD.mesh(0, fsdp=4), [Shard(0)], (4, 3))
    with pytest.raises(PlacementError, match="of a model that is sharded already"):
        WholeModel.of({"w": sharded})


def test_levels_are_those_that_have_a_key_and_inner_ones_by_chance_are_none() -> None:
    def levels(whole: dict[str, Any], *fqns: str) -> list[str]:
        return Levels(WholeModel.of(whole), fqns).names

    numbered = {"w": (), "0.w": (), "1.w": ()}
    assert levels(numbered, "w", "0.w", "1.w") == [""]
    assert levels(numbered, "ema.w", "model.w", "model.0.w") == ["ema.", "model."]
    assert levels(numbered, "ema.w", "ema.0.w", "model.0.w", "step") == ["ema.", "model."]
    assert levels(numbered, "step") == []
    layers = {"norm": (), "layers.0.norm": ()}
    assert levels(layers, "model.layers.7.norm", "model.norm") == ["model."]
    assert levels(layers, "layers.7.norm", "norm", "ema.norm") == ["", "ema."]
    assert levels(layers, "model.norm", "model.ema.norm") == ["model.", "model.ema."]
    by_level = {"model": layers, "model.ema": layers}
    assert levels(by_level, "model.ema.norm", "teacher.norm") == [
        "model.",
        "model.ema.",
        "teacher.",
    ]


def test_weights_are_compared_at_save_and_load_whatever_their_average_has(tmp_path: Path) -> None:
    """``dcp.load`` sorts the keys: the average comes first there."""
    placements = Placements(None, whole={f"layers.{n}.w": (2,) for n in range(4)})

    def layers(count: int) -> dict[str, torch.Tensor]:
        return {f"layers.{n}.w": torch.arange(2.0) + n for n in range(count)}

    def state(weights: int, average: int) -> dict[str, Any]:
        return {"model": layers(weights), "ema": layers(average), "step": 1}

    planner = placements.save_planner()
    dcp.save(state(4, 4), checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert planner.report.whole == "4 keys under 'model.', 4 keys under 'ema.'"
    for few in (state(3, 4), state(1, 4)):
        with pytest.raises(PlacementError, match="no rank has this key"):
            check(few, placements)
        with pytest.raises(CheckpointException, match="no rank has this key"):
            dcp.load(few, checkpoint_id=tmp_path, planner=placements.load_planner(), no_dist=True)
    with pytest.warns(UserWarning, match=r"ema\.layers\.3\.w: no rank has 1 key of it"):
        check(state(4, 3), placements)
    assert not check(state(4, 3), placements, waive={"ema": "of three layers"}).warnings
    # Where its level is named, it is refused.
    model = {f"layers.{n}.w": (2,) for n in range(4)}
    names = {f"{level}.{key}": (2,) for level in ("model", "ema") for key in model}
    for whole in (names, {"model": model, "ema": model}):
        with pytest.raises(PlacementError, match=r"ema\.layers\.3\.w: no rank has this key"):
            check(state(4, 3), None, whole=whole)


def test_two_models_beside_each_other_are_both_compared() -> None:
    weights = {f"layers.{n}.w": torch.zeros(2) for n in range(4)}
    whole = {key: (2,) for key in weights}
    both = {"teacher": weights, "student": dict(weights)}
    report = check(both, None, whole=whole)
    assert report.whole == "4 keys under 'teacher.', 4 keys under 'student.'"
    del both["student"]["layers.3.w"]
    with pytest.raises(PlacementError, match=r"student\.layers\.3\.w: no rank has this key"):
        check(both, None, whole=whole)


LAYERS = {f"layers.{n}.w": (2,) for n in range(10)}


def layers(*numbers: int, size: int = 2) -> dict[str, torch.Tensor]:
    return {f"layers.{n}.w": torch.arange(float(size)) + n for n in numbers}


@pytest.mark.parametrize("beside", ["teacher", "ema", "swarm", "emanet", "other.model"])
@pytest.mark.parametrize("left", [range(4), range(1), range(9), range(6, 10)])
def test_m124_a_level_that_lost_most_is_refused_beside_a_complete_one(
    tmp_path: Path, beside: str, left: range
) -> None:
    """At save and at load, whichever stands first."""
    placements = Placements(None, whole=LAYERS)
    lost = {"model": layers(*left), beside: layers(*range(10))}
    for state in (lost, dict(reversed(lost.items()))):
        with pytest.raises(PlacementError, match="no rank has this key of the whole model") as no:
            check(state, placements)
        assert "model.layers." in str(no.value)
        assert f"{beside}.layers" not in str(no.value)
    dcp.save(lost, checkpoint_id=tmp_path, no_dist=True)
    planner = placements.load_planner()
    with pytest.raises(CheckpointException, match="no rank has this key"):
        dcp.load(lost, checkpoint_id=tmp_path, planner=planner, no_dist=True)


@pytest.mark.parametrize("name", ["swarm", "emanet", "shadowless", "averages_of", "optimal"])
def test_m124_names_that_only_begin_like_an_average_are_compared(name: str) -> None:
    state = {"model": layers(*range(10)), name: layers(*range(9))}
    with pytest.raises(PlacementError, match=rf"{name}\.layers\.9\.w: no rank has this key"):
        check(state, None, whole=LAYERS)


@pytest.mark.parametrize("name", ["ema", "model_ema", "modelEMA", "EMAModel", "ema_0", "swa.model"])
def test_m124_an_average_that_lacks_keys_is_named_in_a_warning(name: str) -> None:
    state = {"model": layers(*range(10)), **{f"{name}.{k}": v for k, v in layers(0, 1).items()}}
    with pytest.warns(UserWarning, match=rf"{name}: is not the whole model: an average"):
        check(state, None, whole=LAYERS)


@pytest.mark.parametrize(
    "teacher",
    [layers(*range(12)), layers(*range(10), size=5), layers(*range(20), size=5), layers(3, 70)],
    ids=["more layers", "wider", "both", "some of other numbers"],
)
def test_m124_the_teacher_of_a_student_is_named_in_a_warning_or_declared(
    tmp_path: Path, teacher: dict[str, torch.Tensor]
) -> None:
    state = {"teacher": teacher, "student": layers(*range(10))}
    with pytest.warns(UserWarning, match=r"teacher: is not the whole model: .* 'student\.' is"):
        check(state, None, whole=LAYERS)
    assert not check(state, None, whole=LAYERS, waive={"teacher": "is larger"}).warnings
    of_teacher = {key: value.shape for key, value in teacher.items()}
    whole = {"student": LAYERS, "teacher": of_teacher}
    report = check(state, None, whole=whole)
    assert report.whole == f"10 keys under 'student.', {len(teacher)} keys under 'teacher.'"
    # A load of the student alone is no loss; a save without the teacher is.
    placements = Placements(None, whole=whole)
    dcp.save(state, checkpoint_id=tmp_path, planner=placements.save_planner(), no_dist=True)
    alone, planner = {"student": layers(*range(10))}, placements.load_planner()
    dcp.load(alone, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert planner.report.whole == "10 keys under 'student.'"
    with pytest.raises(PlacementError, match=r"teacher\.layers.*no rank has this key"):
        check(alone, placements)
    with pytest.raises(PlacementError, match=r"student\.layers\.9\.w: no rank has this key"):
        check({**state, "student": layers(*range(9))}, placements)


def test_m124_without_a_level_that_is_the_model_all_differences_are_refused() -> None:
    state = {"a": layers(*range(10), size=4), "b": layers(*range(11))}
    with pytest.raises(PlacementError, match=r"a\.layers\.0-9\.w: is \(4,\)") as refused:
        check(state, None, whole=LAYERS)
    assert "b.layers.10.w: the whole model has no such key" in str(refused.value)


def test_m124_what_stands_under_no_level_is_named_in_a_warning() -> None:
    """The weights under names that are not the model's, beside a teacher that is right."""
    state = {"model": {"blocks.0.w": torch.ones(2)}, "teacher": layers(*range(10)), "step": 3}
    with pytest.warns(UserWarning, match=r"model\.blocks\.0\.w: under no level of whole="):
        check(state, None, whole=LAYERS)
    state["model"] = {"seed": torch.ones(4, dtype=torch.uint8), "loss": torch.tensor(3.0)}
    assert not check(state, None, whole=LAYERS).warnings


def test_m124_a_level_that_is_not_declared_is_named_in_a_warning() -> None:
    state = {"model": layers(*range(10)), "ema": layers(*range(10)), "head": torch.ones(3)}
    with pytest.warns(UserWarning, match="ema: is no level of whole=") as warned:
        check(state, None, whole={"model": LAYERS})
    text = str(warned[0].message)
    assert "head: under no level of whole=" in text
    waive = {"ema": "not compared", "head": "beside it"}
    assert not check(state, None, whole={"model": LAYERS}, waive=waive).warnings
    for whole in ({"model": LAYERS, "w": (3,)}, {"model": LAYERS, 3: LAYERS}):
        with pytest.raises(PlacementError, match="is no name of one"):
            WholeModel.of(whole)
    with pytest.raises(PlacementError, match="has no keys"):
        WholeModel.of({"model": {}})


def test_by_level_a_level_is_a_module_or_shapes_with_dtypes_and_may_be_none() -> None:
    with torch.device("meta"):
        tied = Tied()
    state = {"model": Tied().state_dict(), **layers(*range(10))}
    report = check(state, None, whole={"model": tied, "": LAYERS})
    assert report.whole == "2 keys under 'model.', 10 keys"
    typed = {key: (shape, torch.bfloat16) for key, shape in LAYERS.items()}
    with pytest.raises(PlacementError, match=r"is of torch\.float32, where the whole model has"):
        check(state, None, whole={"model": tied, "": typed})


def test_a_load_is_compared_too(tmp_path: Path) -> None:
    Job().save(tmp_path)
    Job(options={"whole": None}).save(tmp_path / "again")
    for path in (tmp_path, tmp_path / "again"):
        job = Job()
        targets = [zeros_like(job.state(rank)) for rank in range(WORLD.size)]
        planners = [job.placements(rank).load_planner() for rank in range(WORLD.size)]
        WORLD.load(path, targets.__getitem__, planners.__getitem__)
        assert planners[0].report.whole == f"{len(WHOLE)} keys under 'model.'"
        for rank, target in enumerate(targets):
            for key, value in job.state(rank)["model"].items():
                assert torch.equal(target["model"][key], value) or key == "embed"


def zeros_like(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: zeros_like(value)
        if isinstance(value, Mapping)
        else (torch.zeros_like(value) if isinstance(value, torch.Tensor) else value)
        for key, value in state.items()
    }


def test_check_gives_rules_to_paste() -> None:
    """Of one process: a forgotten ``Renumber`` and a rule too many need more ranks."""
    mesh = World(1).mesh(0, tp=1)
    state = {"model": {"w": torch.arange(6.0).view(2, 3), "v": torch.arange(3.0)}}
    rules = {
        "w": CheckpointPlacement(mesh, {"tp": Shard(0)}, global_shape=(1, 3), padded_shape=(2, 3))
    }
    placements = Placements(rules, whole={"w": (2, 3), "v": (3,)})
    with pytest.raises(PlacementError) as refused:
        check(state, placements)
    assert "model.w: is (1, 3), where the whole model has (2, 3)" in str(refused.value)
    names: dict[str, Any] = {}
    exec(block_in(str(refused.value)), names)
    whole = {"w": (2, 3), "v": (3,)}
    assert check(state, names["placements"](mesh), whole=whole).whole == "2 keys under 'model.'"


def test_m103_glued_experts_are_warned_of_without_the_whole_model(tmp_path: Path) -> None:
    changes = {
        "options": {"rename": None, "whole": None},
        "rules": lambda mesh: {"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})},
    }
    with pytest.warns(UserWarning, match=r"its name says one expert, but a rule cuts it") as texts:
        Job(**changes).save(tmp_path)
    (text,) = [str(one.message) for one in texts if "one expert" in str(one.message)]
    assert "model.layers.0-1.experts.0-1.w1, optim.state.layers.0-1.experts.0-1.w1.exp_avg" in text
    assert 'Renumber("experts.{}"' in text


@pytest.mark.parametrize("ids", ["by global rank", "round robin", "right"])
def test_m107_experts_that_are_numbered_twice_are_refused(tmp_path: Path, ids: str) -> None:
    """Four experts on (edp 2, ep 2): rank 2 has those of rank 0. A wrong order has right sizes."""
    world, whole = World(4), {f"experts.{at}.w": (3,) for at in range(4)}
    held = [[0, 1], [2, 3], [0, 1], [2, 3]]

    def planner(rank: int) -> PlacementSavePlanner:
        mine = {
            "by global rank": list(contiguous([2] * 4, rank)),
            "round robin": [rank % 2, rank % 2 + 2],
            "right": held[rank],
        }[ids]
        total = 8 if ids == "by global rank" else 4
        rename = Renumber("experts.{}", mine, total=total)
        return PlacementSavePlanner(rename=rename, whole=whole)

    def state(rank: int) -> dict[str, Any]:
        names = [f"experts.{at}.w" for at in range(2)]
        return {n: torch.full((3,), float(e)) for n, e in zip(names, held[rank], strict=True)}

    if ids == "by global rank":
        with pytest.raises(CheckpointException, match=r"experts\.4-7\.w: the whole model has no"):
            world.save(tmp_path, state, planner)
        return
    world.save(tmp_path, state, planner)
    stored = {key: torch.zeros(3) for key in whole}
    dcp.load(stored, checkpoint_id=tmp_path, no_dist=True)
    found = [int(value[0]) for value in stored.values()]
    # The limit: whose expert a number is, sizes do not show.
    assert found == ([0, 1, 2, 3] if ids == "right" else [0, 2, 1, 3])
