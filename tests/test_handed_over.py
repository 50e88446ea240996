"""A refused save hands over a declaration: taken from its message and run, it saves the truth."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

import dcp_placements
from dcp_placements import (
    CheckpointPlacement,
    PlacementRules,
    Placements,
    PlacementSavePlanner,
    Renames,
    Renumber,
    contiguous,
)
from dcp_placements.advice.block import ADDED_BEGINS, ENDS, block_in
from dcp_placements.testing import FakeDTensor, World

Whole = dict[str, torch.Tensor]
Positions = dict[str, int]
State = Callable[[int], dict[str, Any]]
Cut = Callable[[str, torch.Tensor, Positions], tuple[str, torch.Tensor] | None]
"""From a key of the model, its whole tensor and a rank's position, the rank's key and part."""


def filled(shapes: Mapping[str, tuple[int, ...]]) -> Whole:
    """Return whole tensors, each element another number; a norm has ones."""
    whole, start = {}, 1
    for key, shape in shapes.items():
        numel = torch.Size(shape).numel()
        whole[key] = torch.arange(start, start + numel, dtype=torch.float64).view(shape)
        start += numel
        if key.endswith("norm.weight"):
            whole[key] = torch.ones(shape, dtype=torch.float64)
    return whole


def job(
    whole: Whole,
    cut: Cut,
    world: World,
    wrap: Callable[[str, torch.Tensor, int], Any] | None = None,
) -> State:
    """Return what each rank has: its weights, and a moment of each."""

    def state(rank: int) -> dict[str, Any]:
        at: Positions = {}
        for axes in world.meshes:
            at |= dict(zip(axes, world.mesh(rank, **axes).get_coordinate() or (), strict=True))
        weights: dict[str, Any] = {}
        moments: dict[str, Any] = {}
        for key, value in whole.items():
            part = cut(key, value, at)
            if part is not None:
                name, local = part
                made = (lambda each, name=name: wrap(name, each, rank)) if wrap else torch.clone
                weights[name] = made(local.contiguous())
                moments[name] = {"step": torch.tensor(1.0), "exp_avg": made(2 * local.contiguous())}
        optim = {"state": moments, "param_groups": [{"params": [*weights], "lr": 0.1}]}
        return {"model": weights, "optim": optim, "step": 7}

    return state


def refusal(path: Path, world: World, state: State, **options: Any) -> str:
    """Return the message of a save without rules, which is refused."""
    with pytest.raises(dcp.CheckpointException) as refused:
        world.save(path / "refused", state, lambda rank: PlacementSavePlanner(**options))
    assert not list((path / "refused").glob(".metadata"))
    return str(refused.value.failures[0][0])


class Meshes:
    """The meshes of a program, as ``run`` gives them to a declaration."""

    def __init__(self, world: World, rank: int) -> None:
        self.meshes = [world.mesh(rank, **axes) for axes in world.meshes]

    def __getitem__(self, names: str | tuple[str, ...]) -> Any:
        wanted = {names} if isinstance(names, str) else {*names}
        (mesh,) = [each for each in self.meshes if wanted <= {*(each.mesh_dim_names or ())}]
        return mesh[names]


def declared(text: str, world: World, rank: int) -> Placements:
    """Return what a block declares on a rank."""
    names: dict[str, Any] = {}
    with world._as(rank):
        exec(text, names)
        placements: Placements = names["placements"](Meshes(world, rank))
    return placements


def assert_saves(path: Path, whole: Whole, state: State, text: str, world: World) -> None:
    """Save by a block; compare what torch reads alone with the whole tensors."""
    planners = world.save(path, state, lambda rank: declared(text, world, rank).save_planner())
    assert not planners[0].report.warnings  # type: ignore[attr-defined]
    for head, tail, factor in (("model.", "", 1), ("optim.state.", ".exp_avg", 2)):
        loaded = {f"{head}{k}{tail}": torch.full_like(v, -1) for k, v in whole.items()}
        dcp.load(loaded, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
        for key, value in whole.items():
            assert torch.equal(loaded[f"{head}{key}{tail}"], factor * value), key

    # A resume under the same declaration is bit for bit.
    def blank(rank: int) -> dict[str, Any]:
        return _mapped(state(rank), lambda one: torch.zeros_like(one))

    resumed = world.load(path, blank, lambda rank: declared(text, world, rank).load_planner())
    for rank in range(world.size):
        for key, value in state(rank)["model"].items():
            assert torch.equal(_local(resumed[rank]["model"][key]), _local(value)), key


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, FakeDTensor) else value


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    if isinstance(value, FakeDTensor):
        return FakeDTensor(
            change(value.to_local()), value.device_mesh, value.placements, value.shape
        )
    return change(value) if isinstance(value, torch.Tensor) else value


def hand_over(
    path: Path, full: Whole, cut: Cut, world: World, wrap: Any = None, **options: Any
) -> str:
    state = job(full, cut, world, wrap)
    text = refusal(path, world, state, **options)
    block = block_in(text)
    assert block, text
    assert "CheckpointPlacement(mesh, {axis: Shard(dim)})" not in text
    assert_saves(path / "saved", full, state, block, world)
    return block


def chunk(value: torch.Tensor, ranks: int, at: int, dim: int = 0) -> torch.Tensor:
    return value.chunk(ranks, dim)[at]


def layers(count: int, **tensors: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    names = {name.replace("__", "."): shape for name, shape in tensors.items()}
    return {f"layers.{n}.{name}": shape for n in range(count) for name, shape in names.items()}


MOE = {
    "embed.weight": (11, 6),
    **layers(
        3,
        norm__weight=(6,),
        attn__q_proj__weight=(8, 6),
        moe__router__weight=(4, 6),
        moe__experts__w1=(4, 10, 6),
        moe__experts__w2=(4, 6, 10),
    ),
}


def test_packed_experts_cut_by_hand(tmp_path: Path) -> None:
    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        return key, chunk(value, 2, at["ep"]) if "experts" in key else value

    block = hand_over(tmp_path, filled(MOE), cut, World(4, {"ep": 2, "edp": 2}))
    rule = 'CheckpointPlacement(meshes["ep"], {"ep": Shard(0)}),'
    assert f'"layers.*.moe.experts.w1": {rule}' in block
    assert block.count("CheckpointPlacement(meshes") == 2


def test_packed_experts_whose_ranks_have_uneven_counts(tmp_path: Path) -> None:
    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        return key, value.split([1, 3])[at["ep"]] if "experts" in key else value

    block = hand_over(tmp_path, filled(MOE), cut, World(2, {"ep": 2}))
    assert 'CheckpointPlacement(meshes["ep"], {"ep": RaggedShard(0, (1, 3))}),' in block


def test_uneven_experts_under_fsdp(tmp_path: Path) -> None:
    world = World(4, {"ep": 2, "edp": 2})

    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        return key, value.split([3, 1])[at["ep"]] if "experts" in key else value

    def wrap(key: str, value: torch.Tensor, rank: int) -> Any:
        mesh = world.mesh(rank, ep=2, edp=2)["edp"]
        part = (*value.chunk(2), value[:0])[mesh.get_local_rank()]
        return FakeDTensor(part.clone(), mesh, [Shard(0)], value.shape)

    block = hand_over(tmp_path, filled(MOE), cut, world, wrap)
    assert 'CheckpointPlacement(meshes["ep"], {"ep": RaggedShard(0, (3, 1))}),' in block


def test_joined_halves_that_ranks_have_unevenly(tmp_path: Path) -> None:
    """Gate and up of five rows each, in chunks of three and two; w3 has parts of any sizes."""
    shapes = layers(2, norm__weight=(6,), mlp__gate_up_proj__weight=(10, 6), mlp__w3__weight=(9, 6))

    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        if "gate_up" in key:
            return key, torch.cat([half.chunk(2)[at["tp"]] for half in value.chunk(2)])
        return key, value.split([2, 7])[at["tp"]] if "w3" in key else value

    block = hand_over(tmp_path, filled(shapes), cut, World(2, {"tp": 2}))
    assert '{"tp": FusedShard(0, 2)}, global_shape=(10, 6)),' in block
    assert '{"tp": RaggedShard(0, (2, 7))}),' in block


def test_joined_halves_of_any_sizes_are_left_open(tmp_path: Path) -> None:
    shapes = layers(2, norm__weight=(6,), mlp__gate_up_proj__weight=(10, 6))

    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        if "gate_up" in key:
            value = torch.cat([half.split([1, 4])[at["tp"]] for half in value.chunk(2)])
        return key, value

    world = World(2, {"tp": 2})
    assert not block_in(refusal(tmp_path, world, job(filled(shapes), cut, world)))


def test_a_module_list_of_experts_numbered_from_0_on_each_rank(tmp_path: Path) -> None:
    whole = filled(
        {
            "embed.weight": (11, 6),
            **layers(2, norm__weight=(6,), router=(4, 6)),
            **{f"layers.{n}.experts.{e}.w1.weight": (3, 6) for n in range(2) for e in range(5)},
        }
    )

    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor] | None:
        if "experts" not in key:
            return key, value
        _, layer, _, expert, *rest = key.split(".")
        first, last = ((0, 3), (3, 5))[at["ep"]]
        if not first <= int(expert) < last:
            return None
        return ".".join(["layers", layer, "experts", str(int(expert) - first), *rest]), value

    block = hand_over(tmp_path, whole, cut, World(4, {"edp": 2, "ep": 2}))
    ids = 'contiguous([3, 2], at=meshes["ep"].get_local_rank())'
    assert f'Renumber("layers.*.experts.{{}}", {ids}, total=5),' in block
    assert "# layers.*.experts.{}: taken as contiguous along ep;" in block
    assert "CheckpointPlacement" not in block


DENSE = {
    "embed.weight": (64, 12),
    **layers(
        2,
        norm__weight=(12,),
        attn__qkv_proj__weight=(16, 12),
        attn__qkv_proj__bias=(16,),
        attn__o_proj__weight=(12, 8),
        attn__o_proj__bias=(12,),
        mlp__gate_up_proj__weight=(20, 12),
        mlp__down_proj__weight=(12, 10),
    ),
    "lm_head.weight": (64, 12),
}


def fused(value: torch.Tensor, parts: list[int], ranks: int, at: int, dim: int = 0) -> torch.Tensor:
    return torch.cat([part.chunk(ranks, dim)[at] for part in value.split(parts, dim)], dim)


def tensor_parallel(key: str, value: torch.Tensor, ranks: int, at: int) -> torch.Tensor:
    if "qkv_proj" in key:
        return fused(value, [8, 4, 4], ranks, at)
    if "gate_up_proj" in key:
        return fused(value, [10, 10], ranks, at)
    if key.endswith(("o_proj.weight", "down_proj.weight")):
        return chunk(value, ranks, at, 1)
    return chunk(value, ranks, at) if key in ("embed.weight", "lm_head.weight") else value


def test_tensor_parallel_weights_cut_by_hand(tmp_path: Path) -> None:
    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        return key, tensor_parallel(key, value, 2, at["tp"])

    whole = filled(DENSE)
    for n in range(2):
        whole[f"layers.{n}.attn.qkv_proj.bias"].zero_()
    block = hand_over(tmp_path, whole, cut, World(4, {"dp": 2, "tp": 2}))
    of = 'CheckpointPlacement(meshes["tp"], '
    assert f'"layers.*.attn.qkv_proj.weight": {of}{{"tp": FusedShard(0, (8, 4, 4))}}),' in block
    assert f'"layers.*.mlp.gate_up_proj.weight": {of}{{"tp": FusedShard(0, 2)}}),' in block
    assert f'"layers.*.mlp.down_proj.weight": {of}{{"tp": Shard(1)}}),' in block
    assert f'"lm_head.weight": {of}{{"tp": Shard(0)}}),' in block
    assert "add global_shape=(ROWS, 12), padded_shape=(64, 12); ROWS without it" in block
    assert "qkv_proj.bias: its elements are all equal: cut as its weight is" in block


def test_a_padded_vocabulary_is_declared_by_the_whole_model(tmp_path: Path) -> None:
    whole = filled({**DENSE, "embed.weight": (61, 12), "lm_head.weight": (61, 12)})

    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        if value.shape == (61, 12):
            value = torch.cat([value, torch.zeros(3, 12, dtype=value.dtype)])
        return key, tensor_parallel(key, value, 2, at["tp"])

    shapes = {key: tuple(value.shape) for key, value in whole.items()}
    block = hand_over(tmp_path, whole, cut, World(2, {"tp": 2}), whole=shapes)
    assert '{"tp": Shard(0)}, global_shape=(61, 12), padded_shape=(64, 12)),' in block
    assert "ROWS" not in block


def test_experts_over_ep_and_all_weights_over_tp(tmp_path: Path) -> None:
    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        if "experts" in key:
            value = chunk(value, 2, at["ep"])
            return key, chunk(value, 2, at["tp"], 2 if key.endswith("w2") else 1)
        if "q_proj" in key:
            return key, chunk(value, 2, at["tp"])
        return key, value

    block = hand_over(tmp_path, filled(MOE), cut, World(8, {"dp": 2, "ep": 2, "tp": 2}))
    of = 'CheckpointPlacement(meshes["ep", "tp"], '
    assert f'"layers.*.moe.experts.w1": {of}{{"ep": Shard(0), "tp": Shard(1)}}),' in block
    assert f'"layers.*.moe.experts.w2": {of}{{"ep": Shard(0), "tp": Shard(2)}}),' in block


def test_axes_of_two_meshes_are_reached_one_by_one(tmp_path: Path) -> None:
    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        if "experts" in key:
            value = chunk(value, 2, at["ep"])
            return key, chunk(value, 2, at["tp"], 2 if key.endswith("w2") else 1)
        return key, value

    world = World(4, {"dp_shard": 2, "tp": 2}, {"ep": 2, "etp": 2})
    block = hand_over(tmp_path, filled(MOE), cut, world)
    assert 'meshes["ep", "etp"]' in block
    world = World(4, {"dp_shard": 2, "tp": 2}, {"ep": 2, "edp": 2})
    block = hand_over(tmp_path / "apart", filled(MOE), cut, world)
    places = 'meshes["ep"].get_local_rank(), meshes["tp"].get_local_rank()'
    assert f'MeshCoordinate(["ep", "tp"], [2, 2], [{places}])' in block


def test_experts_beside_fsdp_over_edp(tmp_path: Path) -> None:
    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        return key, chunk(value, 2, at["ep"]) if "experts" in key else value

    world = World(4, {"ep": 2, "edp": 2}, {"fsdp": 4})

    def wrap(key: str, value: torch.Tensor, rank: int) -> Any:
        axes = {"ep": 2, "edp": 2} if "experts" in key else {"fsdp": 4}
        mesh = world.mesh(rank, **axes)
        mesh = mesh["edp"] if "experts" in key else mesh
        return FakeDTensor.distribute(value, mesh, [Shard(0)])

    block = hand_over(tmp_path, filled(MOE), cut, world, wrap)
    rule = 'CheckpointPlacement(meshes["ep"], {"ep": Shard(0)}),'
    assert f'"layers.*.moe.experts.w1": {rule}' in block
    assert block.count("CheckpointPlacement(meshes") == 2


def test_pipeline_stages_that_number_their_layers_from_0(tmp_path: Path) -> None:
    whole = filled({"embed.weight": (11, 6), **layers(5, attn=(4, 6), mlp=(6, 4)), "head": (11, 6)})

    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor] | None:
        if not key.startswith("layers"):
            return (key, value) if at["pp"] == (key == "head") else None
        _, layer, *rest = key.split(".")
        first, last = ((0, 3), (3, 5))[at["pp"]]
        if not first <= int(layer) < last:
            return None
        return ".".join(["layers", str(int(layer) - first), *rest]), value

    block = hand_over(tmp_path, whole, cut, World(4, {"pp": 2, "dp": 2}))
    ids = 'contiguous([3, 2], at=meshes["pp"].get_local_rank())'
    assert f'Renumber("layers.{{}}", {ids}, total=5),' in block
    assert "CheckpointPlacement" not in block


def test_random_numbers_of_each_rank_get_a_name_per_rank(tmp_path: Path) -> None:
    world = World(2, {"ep": 2})

    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        return key, chunk(value, 2, at["ep"]) if "experts" in key else value

    whole = filled(MOE)
    plain = job(whole, cut, world)

    def state(rank: int) -> dict[str, Any]:
        return {**plain(rank), "train": {"rng_state": torch.full((5,), rank, dtype=torch.uint8)}}

    block = block_in(refusal(tmp_path, world, state))
    name = '"train.rng_state", f"train.rng_state.rank{dist.get_rank()}"'
    assert f"Replace({name})," in block
    assert_saves(tmp_path / "saved", whole, state, block, world)
    loaded = {f"train.rng_state.rank{rank}": torch.zeros(5, dtype=torch.uint8) for rank in (0, 1)}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert [value.tolist() for value in loaded.values()] == [[0] * 5, [1] * 5]


@pytest.mark.parametrize("axis", ["dp", "ep", "tp"])
def test_copies_that_drifted_are_named_first_and_get_no_rule(axis: str, tmp_path: Path) -> None:
    world = World(4, {axis: 2, "other": 2})
    whole = filled({"embed": (4, 6), **layers(6, norm__weight=(6,), q=(8, 6), k=(8, 6))})

    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        return key, value + at[axis]

    text = refusal(tmp_path, world, job(whole, cut, world))
    assert not block_in(text)
    assert f"replicas along {axis!r} have drifted apart" in text


def test_what_no_axis_explains_gets_no_block(tmp_path: Path) -> None:
    """A tensor of each rank's own beside experts: rules for these alone would not pass."""
    world = World(4, {"ep": 2, "edp": 2})

    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        return key, chunk(value, 2, at["ep"]) if "experts" in key else value

    plain = job(filled(MOE), cut, world)

    def state(rank: int) -> dict[str, Any]:
        return {**plain(rank), "loss_scale": torch.full((3,), float(rank))}

    text = refusal(tmp_path, world, state)
    assert not block_in(text)
    assert "CheckpointPlacement(mesh, {axis: Shard(dim)})" in text
    assert "loss_scale: 4 different contents on 4 ranks" in text


def test_without_meshes_of_the_program_contents_show_the_axis(tmp_path: Path) -> None:
    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        return key, chunk(value, 2, at["ep"]) if "experts" in key else value

    state = job(filled(MOE), cut, World(4, {"ep": 2, "edp": 2}))
    block = block_in(refusal(tmp_path, World(4), state))
    assert "# ep: 2 ranks, 2 apart; no DeviceMesh has it, contents show it" in block
    mesh = 'MeshCoordinate(["ep"], [2], [dist.get_rank() // 2 % 2])'
    assert f'"layers.*.moe.experts.w1": CheckpointPlacement({mesh}, {{"ep": Shard(0)}}),' in block
    assert_saves(tmp_path / "saved", filled(MOE), state, block, World(4))


def test_optimizer_state_by_position_has_to_be_named_first(tmp_path: Path) -> None:
    world = World(2, {"ep": 2})

    def state(rank: int) -> dict[str, Any]:
        experts = torch.arange(12.0).view(4, 3).chunk(2)[rank].contiguous()
        optim = {"state": {0: {"exp_avg": experts}}, "param_groups": [{"params": [0]}]}
        return {"model": {"experts.w1": experts}, "optim": optim}

    text = refusal(tmp_path, world, state)
    assert not block_in(text)
    assert text.count("flatten_optimizer_state_dict=True") == 1


def test_a_dim_that_names_alone_tell_stands_beside_the_other_one(tmp_path: Path) -> None:
    """Each rank has (6, 6) of a weight of (12, 6): nothing but its name says which dim is cut."""
    whole = filled({"norm.weight": (6,), "fc1.weight": (12, 6), "fc2.weight": (6, 12)})

    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        dim = {"fc1.weight": 0, "fc2.weight": 1}.get(key)
        return key, value if dim is None else chunk(value, 2, at["tp"], dim)

    block = hand_over(tmp_path, whole, cut, World(2, {"tp": 2}))
    of = 'CheckpointPlacement(meshes["tp"], '
    assert f'            "fc1.weight": {of}{{"tp": Shard(0)}}),' in block
    assert f'#     "fc1.weight": {of}{{"tp": Shard(1)}}),' in block
    assert f'            "fc2.weight": {of}{{"tp": Shard(1)}}),' in block
    assert f'#     "fc2.weight": {of}{{"tp": Shard(0)}}),' in block


def test_a_refusal_names_two_axes_that_tell_contents_together(tmp_path: Path) -> None:
    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        if "experts" in key:
            value = chunk(chunk(value, 2, at["ep"]), 2, at["etp"], 1)
        return key, value

    world = World(8, {"ep": 2, "edp": 2, "etp": 2})
    text = refusal(tmp_path, world, job(filled(MOE), cut, world))
    assert "differs along 'ep' and 'etp' together, agrees along 'edp'" in text
    assert "content A:   ranks 0, 2 (ep=0, etp=0)" in text
    assert "content D:   ranks 5, 7 (ep=1, etp=1)" in text
    assert "over 'ep' and 'etp':" in text
    assert block_in(text)


def added(text: str) -> tuple[str, str]:
    """Return the lines of rules and of renames that a refusal says to add."""
    lines = text[text.index(ADDED_BEGINS) : text.index(ENDS)]
    rules, _, renames = lines.partition("#     renames, behind yours in Renames(...):")
    return rules, renames


def test_what_is_missing_is_added_to_a_declaration(tmp_path: Path) -> None:
    """The declaration has a rule for one of two tensors of experts, and numbers layers."""
    world = World(4, {"pp": 2, "ep": 2})
    whole = filled({key: shape for key, shape in MOE.items() if key.startswith("layers.")})
    whole |= filled({f"layers.3{key[8:]}": MOE[key] for key in MOE if key.startswith("layers.0")})

    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor] | None:
        _, layer, *rest = key.split(".")
        if int(layer) // 2 != at["pp"]:
            return None
        value = chunk(value, 2, at["ep"]) if "experts" in key else value
        return ".".join(["layers", str(int(layer) % 2), *rest]), value

    def own(rank: int, more: str = "", renames: str = "") -> Placements:
        meshes = Meshes(world, rank)
        names = {name: getattr(dcp_placements, name) for name in dcp_placements.__all__}
        names |= {"Shard": Shard, "meshes": meshes}
        first = eval(f"{{{more}\n}}", names)
        ids = contiguous([2, 2], at=meshes["pp"].get_local_rank())
        steps = [Renumber("layers.{}", ids, total=4), *eval(f"[{renames}\n]", names)]
        rule = CheckpointPlacement(meshes["ep"], {"ep": Shard(0)})
        return Placements({**first, "w1": rule}, rename=Renames(*steps))

    state = job(whole, cut, world)
    with pytest.raises(dcp.CheckpointException) as refused:
        world.save(tmp_path / "refused", state, lambda rank: own(rank).save_planner())
    text = str(refused.value.failures[0][0])
    assert "experts.w2" in text
    assert not block_in(text)
    rules, renames = added(text)
    assert renames == ""
    line = '"layers.*.moe.experts.w2": CheckpointPlacement(meshes["ep"], {"ep": Shard(0)}),'
    assert rules.count("CheckpointPlacement") == 1
    assert line in rules
    path = tmp_path / "saved"
    world.save(path, state, lambda rank: own(rank, rules).save_planner())
    read = {f"model.{key}": torch.zeros_like(value) for key, value in whole.items()}
    dcp.load(read, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    for key, value in whole.items():
        assert torch.equal(read[f"model.{key}"], value), key


def test_a_rename_is_added_behind_those_there_are(tmp_path: Path) -> None:
    world = World(2, {"ep": 2})
    whole = filled({f"layers.0.experts.{e}.w1.weight": (3, 6) for e in range(4)})

    def state(rank: int) -> dict[str, Any]:
        local = [f"net.layers.0.experts.{n}.w1.weight" for n in range(2)]
        values = [*whole.values()][2 * rank : 2 * rank + 2]
        return dict(zip(local, values, strict=True))

    def rename(key: str) -> str:
        return key.removeprefix("net.")

    text = refusal(tmp_path, world, state, rename=rename)
    rules, renames = added(text)
    ids = 'contiguous([2, 2], at=meshes["ep"].get_local_rank())'
    assert f'Renumber("layers.*.experts.{{}}", {ids}, total=4),' in renames
    assert "CheckpointPlacement" not in rules

    def planner(rank: int) -> PlacementSavePlanner:
        ids = contiguous([2, 2], at=rank)
        step = Renumber("layers.*.experts.{}", ids, total=4)
        return PlacementSavePlanner(rename=lambda key: step(rename(key)))

    world.save(tmp_path / "saved", state, planner)
    read = {key: torch.zeros_like(value) for key, value in whole.items()}
    dcp.load(read, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert all(torch.equal(read[key], value) for key, value in whole.items())


def test_nothing_is_added_to_a_rule_that_is_wrong(tmp_path: Path) -> None:
    def cut(key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor]:
        return key, chunk(value, 2, at["ep"]) if "experts" in key else value

    world = World(4, {"ep": 2, "edp": 2})

    def planner(rank: int) -> PlacementSavePlanner:
        mesh = Meshes(world, rank)["ep", "edp"]
        wrong = CheckpointPlacement(mesh, {"edp": Shard(0)})
        return PlacementSavePlanner(PlacementRules({"w1": wrong}))

    with pytest.raises(dcp.CheckpointException) as refused:
        world.save(tmp_path, job(filled(MOE), cut, world), planner)
    assert ADDED_BEGINS not in str(refused.value.failures[0][0])


def test_copies_that_have_drifted_show_no_axis_without_a_mesh(tmp_path: Path) -> None:
    """Tensor parallelism cuts no norm."""
    whole = filled({"embed.weight": (8, 6), "norm.weight": (6,), "fc1.weight": (12, 6)})

    def state(drifted: str) -> State:
        def of_rank(rank: int) -> dict[str, Any]:
            return {key: v + rank * bool(re.search(drifted, key)) for key, v in whole.items()}

        return of_rank

    for ranks in (2, 4, 6):
        world = World(ranks)
        assert not block_in(refusal(tmp_path, world, state("")))
        assert block_in(refusal(tmp_path, world, state("embed|fc1")))
