"""Tied weights: one memory with two names here, and one name, or two, in the checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import FILL, arange, assert_holds, read_whole, refusal, without_warning
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    Placements,
    Renames,
    Renumber,
    Replace,
    Stack,
    Transpose,
)
from dcp_placements.names.rename_results import Rename
from dcp_placements.testing import FakeDTensor, World

VOCAB, HIDDEN = 5, 3


class Model(nn.Module):
    """An embedding, a norm, and a head that is the embedding."""

    def __init__(self, *, tie: bool = True, head_first: bool = False) -> None:
        super().__init__()
        for name in ("head", "embed") if head_first else ("embed", "head"):
            layer = (
                nn.Embedding(VOCAB, HIDDEN) if name == "embed" else nn.Linear(HIDDEN, VOCAB, False)
            )
            self.add_module(name, layer)
        self.norm = nn.LayerNorm(HIDDEN)
        if tie:
            self.head.weight = self.embed.weight


def trained(
    steps: int = 2, *, flat: bool = False, tie: bool = True, head_first: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Return the state dict of a model and its AdamW after some steps."""
    torch.manual_seed(seed)
    model = Model(tie=tie, head_first=head_first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + number + step)
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": moments}


def load(state: dict[str, Any], path: Path, placements: Placements, **options: Any) -> Any:
    planner = placements.load_planner(**options)
    World(1).load(path, lambda rank: state, lambda rank: planner)
    return planner.report


def as_on_the_hub(path: Path) -> torch.Tensor:
    """Save an embedding by torch's own planner, without a head, as tied models on the Hub are."""
    embed = arange(VOCAB, HIDDEN)
    dcp.save({"embed.weight": embed}, checkpoint_id=path, no_dist=True)
    return embed


def test_a_tied_head_that_the_file_lacks_is_loaded_with_its_embedding(tmp_path: Path) -> None:
    embed = as_on_the_hub(tmp_path)
    own = torch.full((VOCAB, HIDDEN), -1.0)
    with without_warning():
        report = load({"embed.weight": own, "head.weight": own}, tmp_path, Placements(None))
    assert torch.equal(own, embed)
    assert (report.tied, report.missing) == ({"head.weight": "embed.weight"}, ())
    assert "tied:      1: head.weight to embed.weight" in str(report)


def test_a_tied_head_may_stand_in_the_file_in_place_of_the_embedding(tmp_path: Path) -> None:
    dcp.save({"head.weight": arange(VOCAB, HIDDEN)}, checkpoint_id=tmp_path, no_dist=True)
    own = torch.full((VOCAB, HIDDEN), -1.0)
    report = load({"embed.weight": own, "head.weight": own.detach()}, tmp_path, Placements(None))
    assert torch.equal(own, arange(VOCAB, HIDDEN))
    assert report.tied == {"embed.weight": "head.weight"}


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_tied_dtensors_are_loaded_where_a_rank_has_no_row_of_them(
    tmp_path: Path, size: int
) -> None:
    embed = as_on_the_hub(tmp_path)

    def state(rank: int) -> dict[str, Any]:
        mesh = World(size).mesh(rank, fsdp=size)
        own = FakeDTensor.distribute(torch.full((VOCAB, HIDDEN), -1.0), mesh, [Shard(0)])
        local = own.to_local()
        twin = FakeDTensor(local.detach(), mesh, own.placements, own.shape)
        return {"embed.weight": own, "head.weight": twin}

    with without_warning():
        states = World(size).load(tmp_path, state, lambda rank: Placements(None).load_planner())
    for rank, loaded in enumerate(states):
        pieces = embed.chunk(size)
        piece = pieces[rank] if rank < len(pieces) else embed[:0]
        assert torch.equal(loaded["head.weight"].to_local(), piece)


@pytest.mark.parametrize(
    "head",
    [
        lambda own: own.clone(),
        lambda own: own[:, :2],
        lambda own: own.t(),
        lambda own: own.detach().to(torch.bfloat16),
    ],
    ids=["untied", "a part", "transposed", "of another dtype"],
)
def test_what_is_not_the_same_tensor_is_still_missing(tmp_path: Path, head: Any) -> None:
    as_on_the_hub(tmp_path)
    own = torch.full((VOCAB, HIDDEN), -1.0)
    state = {"embed.weight": own, "head.weight": head(own)}
    text = refusal(lambda: load(state, tmp_path, Placements(None)))
    assert "head.weight: the checkpoint lacks this key" in text
    assert torch.equal(own, torch.full((VOCAB, HIDDEN), -1.0))


def test_an_untied_head_that_is_missing_is_told_of_the_embedding_of_its_shape(
    tmp_path: Path,
) -> None:
    as_on_the_hub(tmp_path)
    blank = torch.zeros(VOCAB, HIDDEN)
    state = {"embed.weight": blank, "head.weight": blank.clone()}
    text = refusal(lambda: load(state, tmp_path, Placements(None)))
    assert 'rename=Replace("head", "embed")' in text


def test_a_head_that_the_checkpoint_has_under_another_prefix_is_not_called_tied(
    tmp_path: Path,
) -> None:
    saved = {"embed.weight": arange(VOCAB, HIDDEN), "head.weight": arange(VOCAB, HIDDEN) + 1}
    dcp.save({"model": saved}, checkpoint_id=tmp_path, no_dist=True)
    state = {key: torch.zeros(VOCAB, HIDDEN) for key in saved}
    text = refusal(lambda: load(state, tmp_path, Placements(None)))
    assert "it has:      model.embed.weight" in text
    assert "Replace" not in text
    # An optimizer's state of a head is none of these: the weight itself is not in the file.
    state = {"embed.weight": torch.zeros(VOCAB, HIDDEN), "head.weight": torch.zeros(VOCAB, HIDDEN)}
    moments = {"state": {"head.weight": {"exp_avg": arange(VOCAB, HIDDEN)}}, "param_groups": []}
    saved = {"embed.weight": arange(VOCAB, HIDDEN), "optim": moments}
    dcp.save(saved, checkpoint_id=tmp_path / "moments", no_dist=True)
    text = refusal(lambda: load(state, tmp_path / "moments", Placements(None)))
    assert 'rename=Replace("head", "embed")' in text


def test_the_whole_model_may_have_both_names_of_a_tied_weight(tmp_path: Path) -> None:
    as_on_the_hub(tmp_path)
    own = torch.zeros(VOCAB, HIDDEN)
    whole = {"embed.weight": (VOCAB, HIDDEN), "head.weight": (VOCAB, HIDDEN)}
    report = load(
        {"embed.weight": own, "head.weight": own}, tmp_path, Placements(None, whole=whole)
    )
    assert report.whole == "2 keys"
    wrong = {"embed.weight": (VOCAB, HIDDEN), "head.weight": (HIDDEN, VOCAB)}
    state = {"embed.weight": own, "head.weight": own}
    text = refusal(lambda: load(state, tmp_path, Placements(None, whole=wrong)))
    assert "head.weight" in text


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_the_state_of_a_tied_weight_is_found_under_its_other_name(
    tmp_path: Path, flat: bool
) -> None:
    saved = trained(flat=flat)
    World(1).save(tmp_path, lambda rank: saved, lambda rank: Placements(None).save_planner())
    state = trained(0, flat=flat, head_first=True, seed=1)
    with without_warning():
        report = load(state, tmp_path, Placements(None))
    old, new = saved["optim"], state["optim"]
    for name in ("exp_avg", "exp_avg_sq", "step"):
        if flat:
            pair = old[f"state.embed.weight.{name}"], new[f"state.head.weight.{name}"]
        else:
            pair = old["state"]["embed.weight"][name], new["state"]["head.weight"][name]
        assert torch.equal(*pair)
    assert report.tied == {"optim.state.head.weight": "optim.state.embed.weight"}
    if not flat:
        assert state["optim"]["param_groups"][0]["params"][0] == "head.weight"


TIED = Replace("head", "embed")


def on_stages(whole: dict[str, Any], rank: int, *, stages: int) -> dict[str, Any]:
    """Return what a rank has of a model with tied weights: apart with two stages, tied with one."""
    names = ["embed.weight", "head.weight", "norm.weight", "norm.bias"]
    if stages == 2:
        names = names[:1] if rank == 0 else names[1:]
    weights: dict[str, Any] = {}
    states: dict[str, Any] = {}
    tied: torch.Tensor | None = None
    for name in names:
        of = name.replace("head", "embed")
        value = whole["model"][of].clone()
        if of == "embed.weight":
            value = tied = value if tied is None else tied
        weights[name] = value
        if name == "embed.weight" or "embed.weight" not in names or of == name:
            held = whole["optim"]["state"][of]
            states[name] = {key: entry.clone() for key, entry in held.items()}
    group = {"lr": 0.1, "params": [*states]}
    return {"model": weights, "optim": {"state": states, "param_groups": [group]}}


@pytest.mark.parametrize("loading", [1, 2])
@pytest.mark.parametrize("saving", [1, 2])
def test_one_name_for_both_serves_one_stage_and_two(
    tmp_path: Path, saving: int, loading: int
) -> None:
    whole = trained()
    placements = Placements(None, rename=TIED)

    def blank(rank: int) -> dict[str, Any]:
        nothing = {
            "model": {k: torch.full_like(v, FILL) for k, v in whole["model"].items()},
            "optim": {
                "state": {
                    name: {k: torch.full_like(v, FILL) for k, v in held.items()}
                    for name, held in whole["optim"]["state"].items()
                }
            },
        }
        return on_stages(nothing, rank, stages=loading)

    with without_warning():
        World(saving).save(
            tmp_path,
            lambda rank: on_stages(whole, rank, stages=saving),
            lambda rank: placements.save_planner(),
        )
        states = World(loading).load(tmp_path, blank, lambda rank: placements.load_planner())
    stored = {f"model.{k}": v for k, v in whole["model"].items() if k != "head.weight"}
    stored |= {
        f"optim.state.{name}.{k}": v
        for name, held in whole["optim"]["state"].items()
        for k, v in held.items()
    }
    assert_holds(tmp_path, stored)
    for rank, state in enumerate(states):
        expected = on_stages(whole, rank, stages=loading)
        assert state["model"].keys() == expected["model"].keys()
        for name, value in expected["model"].items():
            assert torch.equal(state["model"][name], value)
        assert state["optim"]["state"].keys() == expected["optim"]["state"].keys()
        for name, held in expected["optim"]["state"].items():
            for key, value in held.items():
                assert torch.equal(state["optim"]["state"][name][key], value), (name, key)


def test_one_name_for_two_memories_is_refused_at_a_save(tmp_path: Path) -> None:
    state = trained(tie=False)
    planner = Placements(None, rename=TIED).save_planner()
    text = refusal(lambda: World(1).save(tmp_path, lambda rank: state, lambda rank: planner))
    assert "model.embed.weight" in text
    assert "model.head.weight" in text
    assert not list(tmp_path.rglob("*.distcp"))


def test_copies_of_a_tied_weight_are_known_for_what_they_are(tmp_path: Path) -> None:
    """As ``BlockingAsyncStager`` makes them, and a moving average by ``clone``."""
    state = {name: value.clone() for name, value in trained()["model"].items()}
    planner = Placements(None, rename=TIED).save_planner()
    text = refusal(lambda: World(1).save(tmp_path, lambda rank: state, lambda rank: planner))
    assert "copies of one tensor" in text
    assert "DefaultStager" in text


def test_one_name_for_tied_dtensors_under_a_rule(tmp_path: Path) -> None:
    """Vocabulary over tp, FSDP inside it; the head is the embedding."""
    whole = arange(8, HIDDEN)

    def state(rank: int, value: torch.Tensor) -> dict[str, Any]:
        mesh = World(4).mesh(rank, tp=2, fsdp=2)
        half = value.chunk(2)[rank // 2].clone()
        own = FakeDTensor.distribute(half, mesh["fsdp"], [Shard(0)])
        twin = FakeDTensor(own.to_local().detach(), own.device_mesh, own.placements, own.shape)
        return {"embed": own, "layers.0.w": torch.ones(2), "head": twin}

    def placements(rank: int) -> Placements:
        mesh = World(4).mesh(rank, tp=2, fsdp=2)
        rules = {"embed": CheckpointPlacement(mesh, {"tp": Shard(0)})}
        rename = Renames(Renumber("layers.{}", [0], total=1), Replace("head", "embed"))
        return Placements(rules, rename=rename)

    World(4).save(
        tmp_path, lambda rank: state(rank, whole), lambda rank: placements(rank).save_planner()
    )
    assert_holds(tmp_path, {"embed": whole, "layers.0.w": torch.ones(2)})
    states = World(4).load(
        tmp_path,
        lambda rank: state(rank, torch.zeros(8, HIDDEN)),
        lambda rank: placements(rank).load_planner(),
    )
    for rank, loaded in enumerate(states):
        piece = whole.chunk(2)[rank // 2].chunk(2)[rank % 2]
        assert torch.equal(loaded["head"].to_local(), piece)


@pytest.mark.parametrize("head_first", [False, True])
def test_state_follows_a_tied_dtensor_by_any_of_its_names(tmp_path: Path, head_first: bool) -> None:
    """The state is plain, so that the parameter alone says how FSDP cuts it."""
    whole, moment = arange(5, HIDDEN), arange(5, HIDDEN, start=100)

    def state(rank: int, factor: int) -> dict[str, Any]:
        own = FakeDTensor.distribute(whole * factor, World(2).mesh(rank, fsdp=2), [Shard(0)])
        names = ("head", "embed") if head_first else ("embed", "head")
        held = {"exp_avg": moment.split(3)[rank] * factor}
        groups = [{"lr": 0.1, "params": ["embed"]}]
        optim = {"state": {"embed": held}, "param_groups": groups}
        return {"model": dict.fromkeys(names, own), "optim": optim}

    placements, blank = Placements(None, rename=TIED), [state(rank, 0) for rank in range(2)]
    World(2).save(tmp_path, lambda rank: state(rank, 1), lambda rank: placements.save_planner())
    assert_holds(tmp_path, {"model.embed": whole, "optim.state.embed.exp_avg": moment})
    World(2).load(tmp_path, blank.__getitem__, lambda rank: placements.load_planner())
    for rank in range(2):
        held = blank[rank]["optim"]["state"]["embed"]["exp_avg"]
        assert torch.equal(held, moment.split(3)[rank])


@pytest.mark.parametrize("steps", [0, 3])
def test_a_parameter_that_the_saved_optimizer_did_not_have_is_named_with_the_cause(
    tmp_path: Path, steps: int
) -> None:
    saved = trained()
    World(1).save(tmp_path, lambda rank: saved, lambda rank: Placements(None).save_planner())
    state = trained(steps, tie=False, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(state, tmp_path, Placements(None))
    (text,) = [str(warning.message) for warning in caught]
    assert "the optimizer that was saved did not have them" in text
    assert "head.weight" in text
    assert 'Replace("lm_head", "embed_tokens")' in text
    assert not state["optim"]["state"]["head.weight"]["exp_avg"].any()
    assert torch.equal(
        state["optim"]["state"]["norm.bias"]["exp_avg"],
        saved["optim"]["state"]["norm.bias"]["exp_avg"],
    )
    with without_warning():
        load(trained(0, tie=False), tmp_path, Placements(None), optional=["state.head"])


def test_a_rename_gives_an_untied_head_the_state_of_the_embedding(tmp_path: Path) -> None:
    saved = trained()
    World(1).save(tmp_path, lambda rank: saved, lambda rank: Placements(None).save_planner())
    state = trained(3, tie=False, seed=1)
    with without_warning():
        report = load(state, tmp_path, Placements(None, rename=TIED))
    for name in ("embed.weight", "head.weight"):
        assert torch.equal(state["model"][name], saved["model"]["embed.weight"])
        held = state["optim"]["state"][name]["exp_avg"]
        assert torch.equal(held, saved["optim"]["state"]["embed.weight"]["exp_avg"])
    assert report.several["model.embed.weight"] == ("model.embed.weight", "model.head.weight")


def of_flat_adam(**moments: torch.Tensor) -> dict[str, Any]:
    """Return flattened optimizer state of parameters, by the first component of their names."""
    state: dict[str, Any] = {}
    for name, moment in moments.items():
        state[f"state.{name}.w.exp_avg"] = moment
        state[f"state.{name}.w.step"] = torch.tensor(3.0)
        state[f"param_groups.{name}.w.lr"] = 0.1
    return state


def saved_head_first(path: Path, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Save tied weights whose state has the name of the head; return the weight and its moment."""
    weight, moment = arange(*shape), arange(*shape) + 100
    state = {"model": {"embed.w": weight, "head.w": weight}, "optim": of_flat_adam(head=moment)}
    World(1).save(path, lambda rank: state, lambda rank: Placements(None).save_planner())
    return weight, moment


@pytest.mark.parametrize("shape", [(4, 3), (4, 4)])
def test_state_of_the_other_name_is_transposed_as_its_weight(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    weight, moment = saved_head_first(tmp_path, shape)
    own, own_moment = torch.full((2, *shape[::-1]), -1.0)
    state = {"model": {"embed.w": own, "head.w": own}, "optim": of_flat_adam(embed=own_moment)}
    rename = Renames(Transpose("embed.w"), Transpose("head.w"))
    load(state, tmp_path, Placements(None, rename=rename, waive={"w": "another model"}))
    assert torch.equal(own, weight.T)
    assert torch.equal(own_moment, moment.T)


def test_state_of_the_other_name_fills_all_keys_that_a_rename_gives_its_name(
    tmp_path: Path,
) -> None:
    weight, moment = saved_head_first(tmp_path, (4, 3))
    own, copy, own_moment, copy_moment = torch.full((4, 4, 3), -1.0)
    state = {
        "model": {"embed.w": own, "head.w": own, "copy.w": copy},
        "optim": of_flat_adam(embed=own_moment, copy=copy_moment),
    }
    load(state, tmp_path, Placements(None, rename=Replace("copy", "embed")))
    for held, wanted in ((own, weight), (copy, weight), (own_moment, moment)):
        assert torch.equal(held, wanted)
    assert torch.equal(copy_moment, moment)


@pytest.mark.parametrize(
    ("keys", "rename"),
    [
        (("head.w", "copy.w"), Replace("copy", "head")),
        (("copy.w", "head.w"), Replace("copy", "head")),
        (("rows.0.w", "rows.1.w"), Stack("rows.{}", total=2)),
    ],
)
@pytest.mark.parametrize("tied", [0, 1])
def test_a_key_of_several_tensors_is_missing_where_one_of_them_is_tied(
    tmp_path: Path, keys: tuple[str, str], rename: Rename, tied: int
) -> None:
    """The first alone, or the second, has the memory of the embedding, which is read."""
    dcp.save({"embed.w": arange(4, 3)}, checkpoint_id=tmp_path, no_dist=True)
    own, other = torch.full((2, 4, 3), -1.0)
    state = {"embed.w": own, keys[tied]: own, keys[1 - tied]: other}
    text = refusal(lambda: load(state, tmp_path, Placements(None, rename=rename)))
    assert "the checkpoint lacks this key" in text


@pytest.mark.parametrize(
    ("shape", "rename"),
    [((4, 3), Replace("rows.*", "rows")), ((2, 4, 3), Stack("rows.{}", total=2))],
)
@pytest.mark.parametrize("tied", [0, 1])
def test_a_key_is_tied_to_any_of_several_tensors_that_are_read(
    tmp_path: Path, shape: tuple[int, ...], rename: Rename, tied: int
) -> None:
    whole = arange(*shape, start=1)
    dcp.save({"rows.w": whole}, checkpoint_id=tmp_path, no_dist=True)
    rows = [torch.zeros(4, 3), torch.zeros(4, 3)]
    state = {"rows.0.w": rows[0], "rows.1.w": rows[1], "head.w": rows[tied]}
    load(state, tmp_path, Placements(None, rename=rename))
    for row, tensor in enumerate(rows):
        assert torch.equal(tensor, whole[row] if len(shape) == 3 else whole), row
    state["head.w"] = torch.zeros(4, 3)
    text = refusal(lambda: load(state, tmp_path, Placements(None, rename=rename)))
    assert "head.w: the checkpoint lacks this key" in text


def test_random_ties_are_filled_from_whichever_name_is_there(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)

    def drawn(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator))

    for number in range(120):
        count = 1 + drawn(5)
        wholes = [torch.randn(2 + drawn(2), 2, generator=generator) for _ in range(count)]
        names = {f"w{at}": drawn(count) for at in range(count + drawn(6))}
        stored = {name: wholes[of] for name, of in names.items() if drawn(3)}
        path = tmp_path / str(number)
        dcp.save({**stored, "x": torch.ones(1)}, checkpoint_id=path, no_dist=True)
        memory = [torch.full_like(whole, FILL) for whole in wholes]
        state = {name: memory[of].detach() for name, of in names.items()}
        lost = {name for name, of in names.items() if of not in {names[key] for key in stored}}
        state["x"] = torch.zeros(1)
        if lost:
            text = refusal(lambda: load(state, path, Placements(None)))  # noqa: B023
            assert all(name in text for name in lost)
            continue
        report = load(state, path, Placements(None))
        for name, of in names.items():
            assert torch.equal(state[name], wholes[of])
        assert {*report.tied} == names.keys() - stored.keys()
        assert read_whole(path).keys() == {*stored, "x"}
