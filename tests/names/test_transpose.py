"""``Transpose``: the checkpoint has the last two dims of a tensor swapped."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FlatShard,
    FusedShard,
    PlacementError,
    Placements,
    Renames,
    Renumber,
    Replace,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from dcp_placements.offline import diff, export_safetensors, import_checkpoint, rehearse
from dcp_placements.presets import hub
from dcp_placements.testing import FakeDTensor, World, cut
from tests.hazard_scenes import read_whole
from tests.strategies import arange


def dtensor(whole: torch.Tensor, mesh: Any, placements: list[Any]) -> Any:
    return FakeDTensor.distribute(whole.clone(), mesh, placements)


def test_rules_speak_of_the_checkpoint_and_the_dtensor_of_the_tensor(tmp_path: Path) -> None:
    """The trainer keeps (E, in, out), with fsdp on "in"; the checkpoint has (E, out, in)."""
    whole = arange((4, 6, 10))  # as the checkpoint has it
    mine = whole.transpose(1, 2)
    world = World(8)

    def declaration(rank: int) -> Placements:
        mesh = world.mesh(rank, ep=2, tp=2, fsdp=2)
        by = CheckpointPlacement(mesh, {"ep": Shard(0), "tp": Shard(1)})
        return Placements({"experts": by}, rename=Transpose("experts.w"))

    def part(rank: int, whole: torch.Tensor) -> torch.Tensor:
        ep, tp = rank // 4, rank // 2 % 2
        return whole.chunk(2, 0)[ep].chunk(2, 2)[tp]

    def state_dict(rank: int, full: torch.Tensor = mine) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, tp=2, fsdp=2)["fsdp"]
        return {"experts.w": dtensor(part(rank, full), mesh, [Shard(1)])}

    world.save(tmp_path, state_dict, lambda rank: declaration(rank).save_planner())
    assert torch.equal(read_whole(tmp_path)["experts.w"], whole)
    loaded = world.load(
        tmp_path,
        lambda rank: state_dict(rank, torch.zeros_like(mine)),
        lambda rank: declaration(rank).load_planner(),
    )
    for rank in range(8):
        expected = part(rank, mine).chunk(2, 1)[rank % 2]
        assert torch.equal(loaded[rank]["experts.w"].to_local(), expected)


SHAPES = [(4, 6), (5, 3), (2, 4, 6), (3, 5, 7), (1, 8), (6,)]


def save_and_load(rng: random.Random, path: Path, number: int) -> None:
    """Save and load a random transposed tensor in a random world, against plain slicing."""
    tp, fsdp = rng.choice([(1, 1), (2, 1), (2, 2), (3, 2), (1, 3)])
    world = World(tp * fsdp)
    shape = rng.choice(SHAPES)
    ndim = len(shape)
    whole = arange(shape) + number  # as this model has it
    stored = whole.transpose(-1, -2).contiguous() if ndim > 1 else whole
    tp_dim, own_dim = rng.randrange(ndim), rng.randrange(ndim)
    stored_dim = {ndim - 1: ndim - 2, ndim - 2: ndim - 1}.get(tp_dim, tp_dim) if ndim > 1 else 0
    shard = Shard(rng.choice([stored_dim, stored_dim - ndim]))
    is_even = shape[tp_dim] % tp == 0
    global_shape = None if is_even and rng.random() < 0.5 else tuple(stored.shape)

    def declaration(rank: int) -> Placements:
        mesh = world.mesh(rank, tp=tp, fsdp=fsdp)
        by = CheckpointPlacement(mesh, {"tp": shard}, global_shape=global_shape)
        return Placements({"w": by}, rename=Transpose("w"))

    def state_dict(rank: int, full: torch.Tensor = whole) -> dict[str, Any]:
        local = cut(full, [Shard(tp_dim)], [tp], [rank // fsdp])
        mesh = world.mesh(rank, tp=tp, fsdp=fsdp)["fsdp"]
        return {"w": dtensor(local, mesh, [Shard(own_dim)])}

    world.save(path, state_dict, lambda rank: declaration(rank).save_planner())
    assert torch.equal(read_whole(path)["w"], stored), (number, shape, tp, fsdp)
    loaded = world.load(
        path,
        lambda rank: state_dict(rank, torch.zeros_like(whole)),
        lambda rank: declaration(rank).load_planner(),
    )
    for rank in range(world.size):
        expected = state_dict(rank)["w"].to_local()
        assert torch.equal(loaded[rank]["w"].to_local(), expected), (number, rank)


def test_random_worlds_hold_the_transposed_whole(tmp_path: Path) -> None:
    rng = random.Random(11)
    for number in range(60):
        save_and_load(rng, tmp_path / str(number), number)


# A layer of this model: experts of (in, out) = (6, 8), gate before up along "out".
EXPERTS, IN, OUT = 4, 6, 8
GATE = arange((EXPERTS, OUT // 2, IN))  # as the checkpoint has them
UP = GATE + 1000
FUSED = torch.cat([GATE, UP], 1).transpose(1, 2).contiguous()  # (E, in, gate|up)

RENAMES: dict[str, Renames] = {
    "transpose, unstack, split": Renames(
        Transpose("e.gate_up"), Unstack("e.{}.gate_up"), Split("gate_up", ("gate", "up"))
    ),
    "unstack, transpose, split": Renames(
        Unstack("e.{}.gate_up"), Transpose("e.*.gate_up"), Split("gate_up", ("gate", "up"))
    ),
    "unstack, split, transpose": Renames(
        Unstack("e.{}.gate_up"),
        Split("gate_up", ("gate", "up"), dim=1),
        Transpose("e.*.*"),
    ),
}


@pytest.mark.parametrize("name", RENAMES)
@pytest.mark.parametrize("fsdp_dim", [1, 2])
def test_experts_that_are_fused_stacked_and_transposed(
    tmp_path: Path, name: str, fsdp_dim: int
) -> None:
    rename = RENAMES[name]
    world = World(4)

    def declaration(rank: int) -> Placements:
        by = CheckpointPlacement(world.mesh(rank, ep=2, fsdp=2), {"ep": Shard(0)})
        return Placements({"e": by}, rename=rename)

    def state_dict(rank: int, full: torch.Tensor = FUSED) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)["fsdp"]
        return {"e.gate_up": dtensor(full.chunk(2)[rank // 2], mesh, [Shard(fsdp_dim)])}

    world.save(tmp_path / "a", state_dict, lambda rank: declaration(rank).save_planner())
    stored = read_whole(tmp_path / "a")
    for expert in range(EXPERTS):
        assert torch.equal(stored[f"e.{expert}.gate"], GATE[expert])
        assert torch.equal(stored[f"e.{expert}.up"], UP[expert])
    loaded = world.load(
        tmp_path / "a",
        lambda rank: state_dict(rank, torch.zeros_like(FUSED)),
        lambda rank: declaration(rank).load_planner(),
    )
    for rank in range(4):
        expected = state_dict(rank)["e.gate_up"].to_local()
        assert torch.equal(loaded[rank]["e.gate_up"].to_local(), expected)
    # The same rename offline, of the whole: the same tensors.
    dcp.save({"e.gate_up": FUSED}, checkpoint_id=tmp_path / "whole", no_dist=True)
    export_safetensors(tmp_path / "whole", tmp_path / "hf", rename=rename)
    assert diff(tmp_path / "a", tmp_path / "hf").same
    assert diff(tmp_path / "whole", tmp_path / "a", rename=rename).same


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_rows_of_a_stack_are_transposed(tmp_path: Path, order: str, dim: int) -> None:
    world = World(2)
    rows = [arange((3, 5)) + 100 * n for n in range(4)]

    def rename(rank: int) -> Renames:
        steps = [Renumber("e.{}", range(2 * rank, 2 * rank + 2), 4)]
        turn = Transpose("e.*.w") if order == "before" else Transpose("e.w")
        stack = Stack("e.{}", total=4, dim=dim)
        return Renames(*steps, *([turn, stack] if order == "before" else [stack, turn]))

    def state_dict(rank: int, factor: int = 1) -> dict[str, Any]:
        return {f"e.{n}.w": rows[2 * rank + n] * factor for n in range(2)}

    def declaration(rank: int) -> Placements:
        mesh = world.mesh(rank, ep=2)
        return Placements(
            {"e.w": CheckpointPlacement(mesh, {"ep": Shard(dim)})}, rename=rename(rank)
        )

    world.save(tmp_path, state_dict, lambda rank: declaration(rank).save_planner())
    assert torch.equal(read_whole(tmp_path)["e.w"], torch.stack([row.T for row in rows], dim))
    loaded = world.load(
        tmp_path, lambda rank: state_dict(rank, 0), lambda rank: declaration(rank).load_planner()
    )
    for rank in range(2):
        for n in range(2):
            assert torch.equal(loaded[rank][f"e.{n}.w"], rows[2 * rank + n])


def test_two_of_them_are_none(tmp_path: Path) -> None:
    rename = Renames(Transpose("w"), Replace("w", "v"), Transpose("v"))
    assert rename("w") == "v"


def test_fused_rows_of_the_rule_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    world = World(2)
    gate, up = arange((4, 3)), arange((4, 3)) + 100
    whole = torch.cat([gate, up])  # (gate|up, in), and this model has (in, gate|up)

    def state_dict(rank: int) -> dict[str, Any]:
        return {"w": torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]).T.contiguous()}

    def planner(rank: int) -> Any:
        by = CheckpointPlacement(world.mesh(rank, tp=2), {"tp": FusedShard(0, 2)})
        return Placements({"w": by}, rename=Transpose("w")).save_planner()

    world.save(tmp_path, state_dict, planner)
    assert torch.equal(read_whole(tmp_path)["w"], whole)


def optimizer(moment: torch.Tensor, **others: torch.Tensor) -> dict[str, Any]:
    state = {"exp_avg": moment, "step": torch.tensor(3.0), **others}
    return {"state": {"w": state}, "param_groups": [{"params": ["w"], "lr": 0.1}]}


def saved(tmp_path: Path, state: Any, rename: Any) -> None:
    planner = Placements({}, rename=rename).save_planner()
    dcp.save(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)


@pytest.mark.parametrize("with_model", [True, False])
def test_moments_follow_their_parameter(tmp_path: Path, with_model: bool) -> None:
    moment = arange((3, 5)) + 50
    state: dict[str, Any] = {"optim": optimizer(moment)}
    if with_model:
        state["model"] = {"w": arange((3, 5))}
    saved(tmp_path, state, Transpose("w"))
    stored = read_whole(tmp_path)
    assert torch.equal(stored["optim.state.w.exp_avg"], moment.T)
    assert stored["optim.state.w.step"] == 3
    # A model of the checkpoint's orientation loads them without the step, and nothing is amiss.
    target: dict[str, Any] = {"optim": optimizer(torch.zeros(5, 3), step=torch.tensor(0.0))}
    if with_model:
        target["model"] = {"w": torch.zeros(5, 3)}
    planner = Placements({}).load_planner()
    dcp.load(target, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert torch.equal(target["optim"]["state"]["w"]["exp_avg"], moment.T)
    if with_model:
        assert torch.equal(target["model"]["w"], arange((3, 5)).T)


def test_sharded_moments_are_transposed_without_their_parameter(tmp_path: Path) -> None:
    """The shape of an absent parameter is that of the whole, and a shard has another one."""
    world, moment = World(2), arange((3, 5)) + 50

    def state(rank: int, full: torch.Tensor = moment) -> dict[str, Any]:
        return {"optim": optimizer(dtensor(full, world.mesh(rank, fsdp=2), [Shard(0)]))}

    turn = Placements({}, rename=Transpose("w"))
    world.save(tmp_path, state, lambda rank: turn.save_planner())
    assert torch.equal(read_whole(tmp_path)["optim.state.w.exp_avg"], moment.T)
    blank = [state(rank, torch.zeros(3, 5)) for rank in range(2)]
    world.load(tmp_path, blank.__getitem__, lambda rank: turn.load_planner())
    for rank in range(2):
        own = blank[rank]["optim"]["state"]["w"]["exp_avg"].to_local()
        assert torch.equal(own, moment.split(2)[rank])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("exp_avg_sq_row", (3,)),
        ("exp_avg_sq_col", (5,)),
        ("row_var", (3, 1)),
        ("col_var", (1, 5)),
        ("absmax", (4,)),
    ],
)
@pytest.mark.parametrize("with_model", [True, False])
def test_factored_state_of_a_transposed_parameter_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], with_model: bool
) -> None:
    state: dict[str, Any] = {"optim": optimizer(arange((3, 5)), **{name: torch.ones(shape)})}
    if with_model:
        state["model"] = {"w": arange((3, 5))}
    if name == "absmax" and not with_model:
        return  # its parameter's shape is not known
    with pytest.raises(CheckpointException, match=rf"optim\.state\.w\.{name}") as refused:
        saved(tmp_path, state, Transpose("w"))
    assert str(shape) in str(refused.value)
    assert "(3, 5)" in str(refused.value)


@pytest.mark.parametrize("dim", [None, 1])
def test_a_moment_that_its_own_rule_cuts_is_transposed_as_its_parameter(
    tmp_path: Path, dim: int | None
) -> None:
    """The parameter is whole on both ranks, or cut on the other dim; its moment on its rows."""
    weight, moment = arange((4, 6)), arange((4, 6)) + 50

    def held(rank: int) -> dict[str, Any]:
        own = weight if dim is None else weight.chunk(2, dim)[rank].clone()
        return {"model": {"w": own}, "optim": optimizer(moment.chunk(2)[rank].clone())}

    def placements(rank: int) -> Placements:
        mesh = World(2).mesh(rank, dp=2)
        by_rows = CheckpointPlacement(mesh, {"dp": Shard(1)}, global_shape=(6, 4))
        rules = {"state.w": by_rows}
        if dim is not None:  # of the checkpoint, which has them the other way round
            rules["model.w"] = CheckpointPlacement(mesh, {"dp": Shard(1 - dim)})
        return Placements(rules, rename=Transpose("w"))

    World(2).save(tmp_path, held, lambda rank: placements(rank).save_planner())
    stored = read_whole(tmp_path)
    assert torch.equal(stored["model.w"], weight.T)
    assert torch.equal(stored["optim.state.w.exp_avg"], moment.T)


def test_a_pattern_of_the_parameter_alone_is_refused(tmp_path: Path) -> None:
    state = {"model": {"w": arange((3, 5))}, "optim": optimizer(arange((3, 5)))}
    with pytest.raises(CheckpointException, match=r"optim\.state\.w\.exp_avg") as refused:
        saved(tmp_path, state, Transpose("model.w"))
    assert "without the levels" in str(refused.value)


def test_the_parts_that_it_does_not_match_are_named(tmp_path: Path) -> None:
    rename = Renames(Split("qk", ("q", "k")), Transpose("q"))
    with pytest.raises(CheckpointException, match="not k"):
        saved(tmp_path, {"qk": arange((4, 3))}, rename)


def test_a_step_that_matches_nothing_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"Transpose\('v'\)"):
        saved(tmp_path, {"w": arange((4, 3))}, Transpose("v"))


def test_rules_that_are_a_function_see_the_checkpoints_shape(tmp_path: Path) -> None:
    shapes = []

    def rules(fqn: str, tensor: Any) -> None:
        shapes.append(tuple(tensor.shape))

    planner = Placements(rules, rename=Transpose("w")).save_planner()
    dcp.save({"w": arange((2, 4, 3))}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert shapes == [(2, 3, 4)]


def test_objects_scalars_and_biases_stay(tmp_path: Path) -> None:
    state = {"w.weight": arange((4, 3)), "w.bias": arange((4,)), "w.scale": torch.tensor(2.0)}
    state["w.extra"] = {"a": 1}  # type: ignore[assignment]
    saved(tmp_path, state, Transpose("w"))
    stored = read_whole(tmp_path)
    assert torch.equal(stored["w.weight"], arange((4, 3)).T)
    assert torch.equal(stored["w.bias"], arange((4,)))
    target = {"w.weight": torch.zeros(4, 3), "w.bias": torch.zeros(4), "w.scale": torch.zeros(())}
    planner = Placements({}, rename=Transpose("w")).load_planner()
    dcp.load(target, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert torch.equal(target["w.weight"], arange((4, 3)))


def test_views_share_the_parameters_memory(tmp_path: Path) -> None:
    weight = torch.zeros(3, 5)
    saved(tmp_path, {"w": arange((3, 5))}, Transpose("w"))
    planner = Placements({}, rename=Transpose("w")).load_planner()
    pointer = weight.data_ptr()
    dcp.load({"w": weight}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert weight.data_ptr() == pointer
    assert torch.equal(weight, arange((3, 5)))


def test_replicas_are_compared_whatever_their_memory_is_like(tmp_path: Path) -> None:
    """A copy that is contiguous as the checkpoint has it, and one that is as the model has it."""
    whole, world = arange((300, 500)), World(2)

    def state_dict(rank: int, other: float = 0) -> dict[str, Any]:
        local = whole.clone() if rank else whole.T.contiguous().T
        return {"w": dtensor(local + rank * other, world.mesh(rank, dp=2), [Replicate()])}

    def planner(rank: int) -> Any:
        by = CheckpointPlacement(world.mesh(rank, dp=2), {})
        return Placements({"w": by}, rename=Transpose("w")).save_planner()

    world.save(tmp_path / "a", state_dict, planner)
    assert torch.equal(read_whole(tmp_path / "a")["w"], whole.T)
    with pytest.raises((CheckpointException, PlacementError), match="w"):
        world.save(tmp_path / "b", lambda rank: state_dict(rank, 1), planner)


def test_an_import_turns_files_and_a_rehearsal_agrees(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    hf.mkdir()
    files = {
        "mlp.experts.gate_up_proj": arange((4, 6, 8)),
        "mlp.experts.gate_up_proj_bias": arange((4, 6)),
    }
    save_file(files, hf / "model.safetensors")
    import_checkpoint(hf, tmp_path / "turned", rename=hub.gpt_oss)
    stored = read_whole(tmp_path / "turned")
    assert torch.equal(stored["mlp.experts.gate_up_proj"], arange((4, 6, 8)).transpose(1, 2))
    assert torch.equal(stored["mlp.experts.gate_up_proj_bias"], arange((4, 6)))
    assert diff(hf, tmp_path / "turned", rename=hub.gpt_oss).same
    assert not diff(hf, tmp_path / "turned").same

    def rules(mesh: Any) -> Placements:
        by = CheckpointPlacement(mesh, {"ep": Shard(0), "tp": Shard(1)})
        waive = {"gate_up_proj*": "gate and up alternate row by row"}
        return Placements({"gate_up_proj*": by}, rename=hub.gpt_oss, waive=waive)

    rehearsal = rehearse(hf, rules, {"ep": 2, "tp": 2})
    assert rehearsal.loads, rehearsal
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        return {
            "mlp.experts.gate_up_proj": torch.zeros(2, 8, 3),
            "mlp.experts.gate_up_proj_bias": torch.zeros(2, 3),
        }

    def reader(rank: int) -> Any:
        return dcp.HuggingFaceStorageReader(str(hf))

    loaded = world.load(
        hf, state_dict, lambda rank: rules(world.mesh(rank, ep=2, tp=2)).load_planner(), reader
    )
    for rank in range(4):
        ep, tp = divmod(rank, 2)
        expected = arange((4, 6, 8)).chunk(2)[ep].chunk(2, 1)[tp].transpose(1, 2)
        assert torch.equal(loaded[rank]["mlp.experts.gate_up_proj"], expected)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_rehearsal_of_stacked_and_transposed_rows_is_that_of_a_real_load(
    tmp_path: Path, order: str, dim: int
) -> None:
    """Square experts beside others, and a bias, which has no two dims of its own."""
    whole = {"e.w": arange((5, 3)), "e.square": arange((4, 4)), "e.bias": arange((6,))}
    stacked = {
        key: torch.stack([value + n for n in range(4)], min(dim, value.ndim))
        for key, value in whole.items()
    }
    dcp.save(stacked, checkpoint_id=tmp_path, no_dist=True)

    def declaration(mesh: Any) -> Placements:
        ep = mesh.get_coordinate()[0]
        turn = Transpose("e.*.*") if order == "before" else Transpose("e.*")
        stacks = (Stack("e.{}.bias", 4, dim=min(dim, 1)), Stack("e.{}", 4, dim=dim))
        number = Renumber("e.{}", range(2 * ep, 2 * ep + 2), 4)
        steps = (number, turn, *stacks) if order == "before" else (number, *stacks, turn)
        return Placements({}, rename=Renames(*steps))

    rehearsal = rehearse(tmp_path, declaration, {"ep": 2, "fsdp": 2}, fsdp=["fsdp"])
    assert rehearsal.loads, rehearsal
    world = World(4)

    def state_dict(rank: int, fill: bool = False) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)["fsdp"]
        held = {}
        for n in range(2):
            for key, value in whole.items():
                mine = (
                    (value + 2 * (rank // 2) + n).T
                    if value.ndim > 1
                    else value + 2 * (rank // 2) + n
                )
                name = key.replace("e.", f"e.{n}.")
                held[name] = dtensor(mine if fill else torch.zeros_like(mine), mesh, [Shard(0)])
        return held

    loaded = world.load(
        tmp_path,
        state_dict,
        lambda rank: declaration(world.mesh(rank, ep=2, fsdp=2)).load_planner(),
    )
    for rank in range(4):
        for key, value in state_dict(rank, fill=True).items():
            assert torch.equal(loaded[rank][key].to_local(), value.to_local()), (rank, key)
    nbytes = [sum(value.to_local().nbytes for value in state.values()) for state in loaded]
    assert [rank.memory_nbytes for rank in rehearsal.ranks] == nbytes


def test_a_range_of_a_flattened_tensor_is_refused(tmp_path: Path) -> None:
    world = World(2)

    def planner(rank: int) -> Any:
        by = CheckpointPlacement(
            world.mesh(rank, dp=2), {"dp": FlatShard((7, 8))}, global_shape=(5, 3)
        )
        return Placements({"w": by}, rename=Transpose("w")).save_planner()

    with pytest.raises((CheckpointException, PlacementError), match="rename= transposes it"):
        world.save(tmp_path, lambda rank: {"w": torch.ones(7 + rank)}, planner)


@pytest.mark.parametrize("dims", [(-2, -1), (0, 1)], ids=str)
@pytest.mark.parametrize("is_other", [False, True])
def test_a_split_before_a_turn_is_one_behind_it(
    is_other: bool, dims: tuple[int, int], tmp_path: Path
) -> None:
    """Its dim is another of the last two; other parts are another split all the same."""
    whole, world = arange((6, 4)), World(1)
    before = Renames(Transpose("w.qk"), Split("w.qk", ("w.q", "w.k"), dim=dims[0]))
    sizes = (2, 1) if is_other else None
    split = Split("w.qk", ("w.q", "w.k"), dim=dims[1], sizes=sizes)
    behind = Renames(split, Transpose("w.*"))

    def loaded() -> Any:
        blank = {"w.qk": torch.zeros_like(whole.t()).contiguous()}
        return world.load(
            tmp_path,
            lambda rank: blank,
            lambda rank: Placements({}, rename=behind).load_planner(),
        )[0]["w.qk"]

    world.save(
        tmp_path,
        lambda rank: {"w.qk": whole.t().contiguous()},
        lambda rank: Placements({}, rename=before).save_planner(),
    )
    assert torch.equal(read_whole(tmp_path)["w.q"], whole[:3])
    if is_other:
        with pytest.raises(CheckpointException):
            loaded()
    else:
        assert torch.equal(loaded(), whole.t())


SQUARE = {"a.w": arange((4, 4)), "b.w": arange((2, 3, 3)), "a.bias": arange((4,))}


@pytest.mark.parametrize(
    ("save", "load", "names"),
    [
        (Transpose("*.w"), None, "the save transposes it, and this load does not"),
        (Transpose("*.w"), Transpose("b.w"), "a.w: the save transposes it"),
        (None, Transpose("a.w"), "a.w: this load transposes it, and the save does not"),
    ],
)
def test_square_tensors_that_one_side_alone_transposes_are_named(
    tmp_path: Path, save: Any, load: Any, names: str
) -> None:
    """No shape shows whether the model is another one, or the rename was forgotten."""
    saved(tmp_path, SQUARE, save)
    for waive in ({}, {"*.w": "a model of the other orientation"}):
        state = {key: torch.zeros_like(value) for key, value in SQUARE.items()}
        planner = Placements({}, rename=load, waive=waive).load_planner()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        texts = [str(warning.message) for warning in caught]
        assert any(names in text for text in texts) == (not waive), texts


def test_one_tensor_that_is_not_square_shows_the_orientation_of_the_model(tmp_path: Path) -> None:
    state = SQUARE | {"c.w": arange((4, 5))}
    saved(tmp_path, state, Transpose("*.w"))
    other = {key: torch.zeros_like(v.mT if v.ndim > 1 else v) for key, v in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(
            other, checkpoint_id=tmp_path, planner=Placements(None).load_planner(), no_dist=True
        )
    assert all(torch.equal(v, state[k].mT if v.ndim > 1 else state[k]) for k, v in other.items())


@pytest.mark.parametrize("stored", ["ours", "stock"])
def test_a_load_as_saved_and_one_of_other_files_is_silent(tmp_path: Path, stored: str) -> None:
    if stored == "ours":
        saved(tmp_path, SQUARE, Transpose("*.w"))
    else:
        dcp.save(SQUARE, checkpoint_id=tmp_path, no_dist=True)
    state = {key: torch.zeros_like(value) for key, value in SQUARE.items()}
    planner = Placements({}, rename=Transpose("*.w")).load_planner()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)


def test_several_names_of_one_tensor_are_all_transposed_or_none_is(tmp_path: Path) -> None:
    """Upcycling: experts of (in, out) from one layer of (out, in)."""
    stored = arange((5, 3))
    dcp.save({"mlp.w": stored}, checkpoint_id=tmp_path, no_dist=True)
    state = {f"experts.{n}.w": torch.zeros(3, 5) for n in range(3)}
    rename = Renames(Replace("experts.*", "mlp"), Transpose("mlp.w"))
    planner = Placements({}, rename=rename).load_planner()
    dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert all(torch.equal(value, stored.T) for value in state.values())
    # One of them is kept the other way round, and what fills both has one orientation.
    mixed = {"experts.0.w": torch.zeros(3, 5), "experts.1.w": torch.zeros(5, 3)}
    rename = Renames(Transpose("experts.0.w"), Replace("experts.*", "mlp"))
    planner = Placements({}, rename=rename).load_planner()
    with pytest.raises(CheckpointException) as refused:
        dcp.load(mixed, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert "to experts.0.w, transposed, and to experts.1.w" in str(refused.value)
    assert not mixed["experts.0.w"].any()


@pytest.mark.parametrize("seed", range(60))
def test_several_cut_and_transposed_tensors_are_filled_with_one(tmp_path: Path, seed: int) -> None:
    """With their moments; each rank has a part by a rule and by its DTensor."""
    rng = random.Random(seed)
    tp, fsdp = rng.choice([(1, 1), (2, 1), (1, 3), (2, 2)])
    world, shape = World(tp * fsdp), rng.choice([(4, 6), (6, 5), (2, 4, 7), (8, 1)])
    tp_dim, own_dim = rng.randrange(len(shape)), rng.randrange(len(shape))
    stored_dim = {len(shape) - 1: len(shape) - 2, len(shape) - 2: len(shape) - 1}.get(
        tp_dim, tp_dim
    )
    whole, moment = arange(shape), arange(shape) + 500
    groups = [{"lr": 0.1, "params": ["mlp.w"]}]
    stock = {
        "model": {"mlp.w": whole.mT},
        "optim": {"state": {"mlp.w": {"exp_avg": moment.mT}}, "param_groups": groups},
    }
    dcp.save(stock, checkpoint_id=tmp_path, no_dist=True)
    names = [f"experts.{number}.w" for number in range(rng.randint(1, 3))]

    def placements(rank: int) -> Placements:
        mesh = world.mesh(rank, tp=tp, fsdp=fsdp)
        by = CheckpointPlacement(
            mesh, {"tp": Shard(stored_dim)}, global_shape=tuple(whole.mT.shape)
        )
        return Placements(
            {"w": by}, rename=Renames(Replace("experts.*", "mlp"), Transpose("mlp.w"))
        )

    def state(rank: int, *, blank: bool) -> dict[str, Any]:
        def part(full: torch.Tensor) -> Any:
            local = cut(full, [Shard(tp_dim)], [tp], [rank // fsdp])
            mesh = world.mesh(rank, tp=tp, fsdp=fsdp)["fsdp"]
            return dtensor(local * 0 - 1 if blank else local, mesh, [Shard(own_dim)])

        moments = {name: {"exp_avg": part(moment)} for name in names}
        optim = {"state": moments, "param_groups": [{"lr": 0.1, "params": names}]}
        return {"model": {name: part(whole) for name in names}, "optim": optim}

    loaded = world.load(
        tmp_path,
        lambda rank: state(rank, blank=True),
        lambda rank: placements(rank).load_planner(),
    )
    for rank, of_rank in enumerate(loaded):
        expected = state(rank, blank=False)
        for name in names:
            for found, true in (
                (of_rank["model"][name], expected["model"][name]),
                (
                    of_rank["optim"]["state"][name]["exp_avg"],
                    expected["optim"]["state"][name]["exp_avg"],
                ),
            ):
                assert torch.equal(found.to_local(), true.to_local()), (rank, name)


def test_a_pattern_that_meets_only_one_dim_says_which_keys(tmp_path: Path) -> None:
    """The weights have another name here."""
    state = {"model.proj.bias": torch.ones(5), "model.proj.kernel": torch.ones(5, 3)}
    dcp.save({**state, "model.lr": torch.ones(())}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    with pytest.raises(PlacementError) as refused:
        export_safetensors(
            tmp_path / "ckpt",
            tmp_path / "out",
            rename=Renames(Transpose("proj.bias"), Transpose("lr"), Transpose("nothing")),
        )
    text = str(refused.value)
    assert "changes none of the 3 tensors: Transpose swaps two dims" in text
    assert "Transpose(pattern='proj.bias') meets model.proj.bias (5,)" in text
    assert "Transpose(pattern='lr') meets model.lr ()" in text
    assert "'nothing'" not in text
