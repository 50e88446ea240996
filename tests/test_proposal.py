"""A proposal, pasted: whole models cut by plain slicing are saved as those slices say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_placements import PlacementError, Placements, propose_placements
from dcp_placements.advice.block import Proposal
from dcp_placements.advice.proposal import plain_plan
from dcp_placements.advice.proposal import proposed as proposed_to_all
from dcp_placements.table.whole import WholeModel
from dcp_placements.testing import FakeDTensor, World

Whole = dict[str, torch.Tensor]
Cut = Callable[[str, torch.Tensor, dict[str, int]], tuple[str, torch.Tensor] | None]
"""From a key of the model, its whole tensor and a rank's position, the rank's key and part."""


def filled(shapes: Mapping[str, tuple[int, ...]]) -> Whole:
    """Return whole tensors, each element another number."""
    whole, start = {}, 1
    for key, shape in shapes.items():
        numel = torch.Size(shape).numel()
        whole[key] = torch.arange(start, start + numel, dtype=torch.float64).view(shape)
        start += numel
    return whole


def proposed(
    whole: Whole, state: Callable[[int], dict[str, Any]], **axes: int
) -> tuple[list[Proposal], Any]:
    """Return what is proposed to each rank of a world, and the world."""
    shapes = {key: tuple(value.shape) for key, value in whole.items()}
    size = torch.Size(axes.values()).numel()
    world = World(size)
    model = WholeModel.of(shapes)
    plans, proposals = [], []
    for rank in range(size):
        with world._as(rank):
            plans.append(plain_plan(state(rank), [world.mesh(rank, **axes)]))
    with world._as(0):
        proposal = proposed_to_all(plans, model, [world.mesh(0, **axes)])
    for rank in range(size):
        rules, rename = proposal.on(world.mesh(rank, **axes))
        placements = Placements(rules, rename=rename, whole=model)
        proposals.append(replace(proposal, placements=placements))
    return proposals, world


def assert_saves(
    path: Path,
    whole: Whole,
    state: Callable[[int], dict[str, Any]],
    proposals: list[Proposal],
    world: Any,
    **axes: int,
) -> str:
    """Save by the text as it is printed; compare with the whole tensors; return the text."""
    texts = {str(one) for one in proposals}
    assert len(texts) == 1
    (text,) = texts

    def pasted(rank: int) -> Placements:
        shapes = {key: tuple(value.shape) for key, value in whole.items()}
        names: dict[str, Any] = {}
        exec(text, names)
        declared: Placements = names["placements"](world.mesh(rank, **axes))
        placements = Placements(declared.rules, rename=declared.rename, whole=shapes)
        assert str(placements.rules) == str(proposals[rank].placements.rules)
        assert placements.rename == proposals[rank].placements.rename
        return placements

    planners = world.save(path, state, lambda rank: pasted(rank).save_planner())
    assert planners[0].report.whole.startswith(f"{len(whole)} keys")
    assert not planners[0].report.warnings
    for level in ("model", "optim.state"):
        tail = "" if level == "model" else ".exp_avg"
        loaded = {f"{level}.{k}{tail}": torch.full_like(v, -1) for k, v in whole.items()}
        dcp.load(loaded, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
        for key, value in whole.items():
            expected = value if level == "model" else 2 * value
            assert torch.equal(loaded[f"{level}.{key}{tail}"], expected), key
    return text


def job(whole: Whole, cut: Cut, **axes: int) -> Callable[[int], dict[str, Any]]:
    """Return what each rank has: its weights, and a moment of each."""

    def state(rank: int) -> dict[str, Any]:
        mesh = World(torch.Size(axes.values()).numel()).mesh(rank, **axes)
        at = dict(zip(axes, mesh.get_coordinate() or (), strict=True))
        weights: dict[str, Any] = {}
        for key, value in whole.items():
            part = cut(key, value, at)
            if part is not None:
                weights[part[0]] = part[1].clone()
        moments = {
            key: {"step": torch.tensor(1.0), "exp_avg": 2 * value} for key, value in weights.items()
        }
        optim = {"state": moments, "param_groups": [{"params": [*weights]}]}
        return {"model": weights, "optim": optim, "step": 7}

    return state


def try_out(path: Path, whole: Whole, cut: Cut, **axes: int) -> tuple[str, Proposal]:
    state = job(whole, cut, **axes)
    proposals, world = proposed(whole, state, **axes)
    return assert_saves(path, whole, state, proposals, world, **axes), proposals[0]


def chunk(value: torch.Tensor, ranks: int, at: int, dim: int) -> torch.Tensor:
    return value.chunk(ranks, dim)[at]


def fused(value: torch.Tensor, parts: Any, ranks: int, at: int, dim: int) -> torch.Tensor:
    return torch.cat([part.chunk(ranks, dim)[at] for part in value.split(parts, dim)], dim)


# Models


HF = {
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "deepseek_v3": dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
}


def hugging_face(name: str) -> Whole:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        name,
        vocab_size=48,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        **HF[name],
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert any("experts.gate_up_proj" in key for key in shapes)
    return filled(shapes)


def by_ep(key: str, value: torch.Tensor, at: dict[str, int]) -> tuple[str, torch.Tensor]:
    if ".experts." in key:
        return key, chunk(value, 4 if "ep4" in at else 2, at["ep"], 0)
    return key, value


TP_ROWS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")


def tp_part(key: str, value: torch.Tensor, ranks: int, at: int) -> torch.Tensor:
    """Return a tensor parallel part of an attention or a head."""
    if key.endswith((*TP_ROWS, "lm_head.weight", "embed_tokens.weight")):
        return chunk(value, ranks, at, 0)
    return chunk(value, ranks, at, 1) if key.endswith("o_proj.weight") else value


def expert_part(key: str, value: torch.Tensor, ranks: int, at: int) -> torch.Tensor:
    """Return a tensor parallel part of stacked experts: of gate and up each its own."""
    if key.endswith("experts.gate_up_proj"):
        return fused(value, value.shape[1] // 2, ranks, at, 1)
    return chunk(value, ranks, at, 2) if key.endswith("experts.down_proj") else value


@pytest.mark.parametrize("name", HF)
def test_stacked_experts_over_ep(name: str, tmp_path: Path) -> None:
    text, proposal = try_out(tmp_path, hugging_face(name), by_ep, ep=2)
    assert 'experts.down_proj": CheckpointPlacement(meshes["ep"], {"ep": Shard(0)}),' in text
    assert all(".experts." in one for one in proposal.placements.rules.patterns)  # type: ignore[union-attr]
    assert not proposal.undecided


@pytest.mark.parametrize("name", HF)
def test_tensor_parallel_attention_heads_and_experts(name: str, tmp_path: Path) -> None:
    def cut(key: str, value: torch.Tensor, at: dict[str, int]) -> tuple[str, torch.Tensor]:
        return key, expert_part(key, tp_part(key, value, 2, at["tp"]), 2, at["tp"])

    text, proposal = try_out(tmp_path, hugging_face(name), cut, tp=2)
    assert 'CheckpointPlacement(meshes["tp"], {"tp": FusedShard(1, 2)})' in text
    (said,) = [why for why in proposal.undecided.values() if "by its name" in why]
    assert 'fit CheckpointPlacement(meshes["tp"], {"tp": Shard(1)}) as well' in said


@pytest.mark.parametrize("name", HF)
def test_experts_over_ep_and_their_parts_over_tp(name: str, tmp_path: Path) -> None:
    def cut(key: str, value: torch.Tensor, at: dict[str, int]) -> tuple[str, torch.Tensor]:
        if ".experts." in key:
            value = chunk(value, 4, at["ep"], 0)
            return key, expert_part(key, value, 2, at["tp"])
        return key, tp_part(key, value, 2, at["tp"])

    text, _ = try_out(tmp_path, hugging_face(name), cut, ep=4, tp=2)
    experts = 'CheckpointPlacement(meshes["ep", "tp"], {"ep": Shard(0), "tp": FusedShard(1, 2)})'
    assert f'gate_up_proj": {experts}' in text


@pytest.mark.parametrize("name", HF)
def test_experts_over_ep_and_all_under_fsdp(name: str, tmp_path: Path) -> None:
    whole, axes = hugging_face(name), {"ep": 2, "fsdp": 2}
    plain = job(whole, by_ep, **axes)

    def state(rank: int) -> dict[str, Any]:
        mesh = World(4).mesh(rank, **axes)["fsdp"]

        def sharded(value: torch.Tensor) -> Any:
            return FakeDTensor.distribute(value, mesh, [Shard(0)]) if value.dim() else value

        values = plain(rank)
        weights = {key: sharded(value) for key, value in values["model"].items()}
        moments = {
            key: {name: sharded(one) for name, one in state.items()}
            for key, state in values["optim"]["state"].items()
        }
        optim = {"state": moments, "param_groups": [{"params": [*weights]}]}
        return {"model": weights, "optim": optim}

    proposals, world = proposed(whole, state, **axes)
    text = assert_saves(tmp_path, whole, state, proposals, world, **axes)
    assert 'experts.down_proj": CheckpointPlacement(meshes["ep"], {"ep": Shard(0)}),' in text
    assert not proposals[0].undecided


# Hand-written models


def test_a_module_list_of_experts_numbered_from_0(tmp_path: Path) -> None:
    whole = filled(
        {
            "embed": (10, 6),
            **{f"layers.{n}.router": (4, 6) for n in range(3)},
            **{f"layers.{n}.experts.{e}.w1": (3, 6) for n in range(3) for e in range(8)},
        }
    )

    def cut(key: str, value: torch.Tensor, at: dict[str, int]) -> tuple[str, torch.Tensor] | None:
        if "experts" not in key:
            return key, value
        _, layer, _, expert, name = key.split(".")
        if int(expert) // 2 != at["ep"]:
            return None
        return f"layers.{layer}.experts.{int(expert) % 2}.{name}", chunk(value, 2, at["tp"], 1)

    text, proposal = try_out(tmp_path, whole, cut, ep=4, tp=2)
    ids = 'contiguous([2, 2, 2, 2], at=meshes["ep"].get_local_rank())'
    assert f'Renumber("layers.*.experts.{{}}", {ids}, total=8),' in text
    assert '"layers.*.experts.*.w1": CheckpointPlacement(meshes["tp"], {"tp": Shard(1)}),' in text
    assert list(proposal.undecided) == ["layers.*.experts.{}"]
    assert "# layers.*.experts.{}: taken as contiguous along ep;" in text
    # Along two axes of one size, either may number them.
    few = {
        key: value for key, value in whole.items() if ".experts." not in key or key[17] in "0123"
    }
    proposals, _ = proposed(few, job(few, cut, ep=2, tp=2), ep=2, tp=2)
    assert list(proposals[0].undecided) == ["layers.*.experts.{}"]
    numberings = {
        axis: 'Renumber("layers.*.experts.{}", '
        f'contiguous([2, 2], at=meshes["{axis}"].get_local_rank()), total=4)'
        for axis in ("ep", "tp")
    }
    assert f"            {numberings['ep']}," in str(proposals[0])
    assert f"#     rename={numberings['tp']}" in str(proposals[0])


def test_pipeline_stages_that_count_their_layers_from_0(tmp_path: Path) -> None:
    whole = filled(
        {
            "embed": (10, 6),
            **{f"layers.{n}.w": (4, 6) for n in range(5)},
            **{f"layers.{n}.experts.{e}.w1": (3, 6) for n in range(5) for e in range(4)},
            "head": (10, 6),
        }
    )

    def cut(key: str, value: torch.Tensor, at: dict[str, int]) -> tuple[str, torch.Tensor] | None:
        first, last = ((0, 3), (3, 5))[at["pp"]]
        if not key.startswith("layers"):
            return (key, value) if at["pp"] == (key == "head") else None
        _, layer, *rest = key.split(".")
        if not first <= int(layer) < last:
            return None
        if rest[0] == "experts":
            if int(rest[1]) // 2 != at["ep"]:
                return None
            rest[1] = str(int(rest[1]) % 2)
        return ".".join(["layers", str(int(layer) - first), *rest]), value

    text, _ = try_out(tmp_path, whole, cut, pp=2, ep=2)
    assert 'contiguous([3, 2], at=meshes["pp"].get_local_rank()), total=5)' in text
    assert 'contiguous([2, 2], at=meshes["ep"].get_local_rank()), total=4)' in text
    assert "rename=Renames(" in text


def test_a_padded_vocabulary(tmp_path: Path) -> None:
    whole = filled(
        {
            "embed.weight": (61, 16),
            **{f"blocks.{n}.attn.out.weight": (16, 24) for n in range(2)},
            **{f"blocks.{n}.norm.weight": (16,) for n in range(2)},
            "head.weight": (61, 16),
        }
    )

    def cut(key: str, value: torch.Tensor, at: dict[str, int]) -> tuple[str, torch.Tensor]:
        if key in ("embed.weight", "head.weight"):
            value = torch.cat([value, torch.zeros(3, 16, dtype=value.dtype)])
            return key, chunk(value, 2, at["tp"], 0)
        return key, chunk(value, 2, at["tp"], 1) if "out" in key else value

    text, proposal = try_out(tmp_path, whole, cut, tp=2)
    shapes = "global_shape=(61, 16), padded_shape=(64, 16)"
    assert f'{{"tp": Shard(0)}}, {shapes})' in text
    assert not proposal.undecided


def test_what_stays_open_is_said_with_the_choices_in_order() -> None:
    """Experts of two axes of one size, whose dims fit both ways; and copies that drifted."""
    whole = filled({"experts": (4, 6), "norm": (3,), "lost": (2,), "other": (7,)})

    def state(rank: int) -> dict[str, Any]:
        ep, tp = divmod(rank, 2)
        part = chunk(chunk(whole["experts"], 2, ep, 0), 2, tp, 1).clone()
        return {"experts": part, "norm": whole["norm"] + ep, "other": torch.zeros(3)}

    proposals, _ = proposed(whole, state, ep=2, tp=2)
    text, undecided = str(proposals[0]), proposals[0].undecided
    assert undecided.keys() == {"experts", "norm", "lost", "other"}
    of = '"experts": CheckpointPlacement(meshes["ep", "tp"], '
    assert f'            {of}{{"ep": Shard(0), "tp": Shard(1)}}),' in text
    assert f'#     {of}{{"ep": Shard(1), "tp": Shard(0)}}),' in text
    assert undecided["norm"].startswith("the contents differ along ep, and no placement shards")
    assert undecided["lost"] == "no rank has this key"
    assert undecided["other"] == "no Shard over ep 2 x tp 2 makes (7,) of the parts (3,)"
    assert proposals[0].rules.keys() == {"experts"}
    assert proposals[0].unsolved.keys() == {"norm", "lost", "other"}


def test_contents_decide_between_axes_of_one_size() -> None:
    whole = filled({"w": (4, 6), "zeros": (4, 6)})

    def state(rank: int) -> dict[str, Any]:
        return {"w": chunk(whole["w"], 2, rank % 2, 0).clone(), "zeros": torch.zeros(2, 6)}

    proposals, _ = proposed(whole, state, dp=2, tp=2)
    assert '"w": CheckpointPlacement(meshes["tp"], {"tp": Shard(0)}),' in str(proposals[0])
    assert list(proposals[0].undecided) == ["zeros"]


def test_a_pattern_that_matches_another_key_too_stands_behind_that() -> None:
    whole = filled({"head": (4, 6), "blocks.0.head": (4, 6)})

    def state(rank: int) -> dict[str, Any]:
        inner = {"0": {"head": whole["blocks.0.head"]}}
        return {"head": chunk(whole["head"], 2, rank, 0), "blocks": inner}

    proposals, _ = proposed(whole, state, tp=2)
    rules = proposals[0].placements.rules
    assert rules is not None
    assert rules("blocks.0.head", None) is None
    assert rules("head", None) is not None


def test_a_pattern_of_one_key_stands_behind_the_keys_that_end_as_it_does() -> None:
    """Layer 3 alone is cut; ``blocks.1.layers.3.w`` is not, as no other of its kind."""
    shapes = {f"layers.{n}.w": (4, 6) for n in range(4)}
    whole = filled({**shapes, **{f"blocks.{b}.{key}": (4, 6) for b in range(2) for key in shapes}})

    def cut(key: str, value: torch.Tensor, at: dict[str, int]) -> tuple[str, torch.Tensor]:
        return key, chunk(value, 2, at["tp"], 0) if key == "layers.3.w" else value

    (first, _), _ = proposed(whole, job(whole, cut, tp=2), tp=2)
    rules = first.placements.rules
    assert rules is not None
    assert [key for key in whole if rules(key, None)] == ["layers.3.w"]


def test_one_process_and_what_is_refused() -> None:
    mesh = World(1).mesh(0, ep=1)
    proposal = propose_placements({"w": (2,)}, {"model": {"w": torch.ones(2)}}, mesh)
    assert not proposal.undecided
    assert "return Placements(\n        {},\n    )" in str(proposal)
    with pytest.raises(PlacementError, match="no rank has a key of whole="):
        propose_placements({"w": (2,)}, {"v": torch.ones(2)}, mesh)
    with pytest.raises(PlacementError, match="no axis names"):
        propose_placements({"w": (2,)}, {"w": torch.ones(2)}, None)


def test_the_order_of_axes_along_one_dim_is_said_to_be_open() -> None:
    whole = filled({"w": (8, 3), "norm": (5,)})

    def state(rank: int) -> dict[str, Any]:
        dp, tp = divmod(rank, 2)
        part = whole["w"].chunk(2)[tp].chunk(2)[dp]  # FSDP cuts what tp has left
        return {"model": {"w": part.contiguous(), "norm": whole["norm"]}}

    proposals, _ = proposed(whole, state, dp=2, tp=2)
    assert proposals[0].undecided.keys() == {"w"}
    assert "shapes fit tp first as well" in str(proposals[0])


@pytest.mark.parametrize(("rows", "parts"), [([4, 4, 4], "3"), ([4, 2, 2], "(4, 2, 2)")])
def test_joined_q_k_v_have_the_sizes_that_what_comes_after_shows(
    rows: list[int], parts: str
) -> None:
    whole = filled({"attn.Wqkv.weight": (sum(rows), 4), "attn.out_proj.weight": (4, 4)})

    def cut(key: str, value: torch.Tensor, at: dict[str, int]) -> tuple[str, torch.Tensor]:
        return key, fused(value, rows, 2, at["tp"], 0) if "Wqkv" in key else value.chunk(2, 1)[
            at["tp"]
        ]

    (first, _), _ = proposed(whole, job(whole, cut, tp=2), tp=2)
    rule = f'CheckpointPlacement(meshes["tp"], {{"tp": FusedShard(0, {parts})}})'
    assert f'"attn.Wqkv.weight": {rule},' in str(first)
    del whole["attn.out_proj.weight"]
    (first, _), _ = proposed(whole, job(whole, cut, tp=2), tp=2)
    assert not first.rules
    sizes = "(rows of Q, rows of K, rows of V)"
    assert f"FusedShard(0, {sizes}) over tp" in first.undecided["attn.Wqkv.weight"]


@pytest.mark.parametrize("name", ["kv_proj.weight", "attn.wkv"])
def test_names_that_may_join_tensors_are_said_to_be_open(name: str) -> None:
    whole = filled({f"layers.0.{name}": (8, 3), "embed": (5, 3)})

    def cut(key: str, value: torch.Tensor, at: dict[str, int]) -> tuple[str, torch.Tensor]:
        return key, fused(value, 2, 2, at["tp"], 0) if name in key else value

    (first, _), _ = proposed(whole, job(whole, cut, tp=2), tp=2)
    assert first.undecided == {
        f"layers.*.{name}": "taken as one tensor by its shape; FusedShard where it joins several"
    }
    assert "FusedShard where it joins several" in str(first)


def test_numbers_that_no_pattern_tells_from_those_before_them_are_left_open() -> None:
    """In ``model.0.2.w`` the pattern ``*.{}`` finds 0, behind any component."""
    whole = filled({f"{layer}.{expert}.w": (4, 3) for layer in range(2) for expert in range(4)})

    def cut(key: str, value: torch.Tensor, at: dict[str, int]) -> tuple[str, torch.Tensor] | None:
        layer, expert, name = key.split(".")
        mine = int(expert) // 2 == at["ep"]
        return (f"{layer}.{int(expert) % 2}.{name}", value) if mine else None

    (first, _), _ = proposed(whole, job(whole, cut, ep=2), ep=2)
    assert not first.numberings
    assert first.undecided == {
        "*.{}": "the ranks count it from 0, and this pattern finds another number in "
        "0.0.w and 3 more: rename= has to be a function"
    }


def test_patterns_that_begin_or_end_with_a_number_do_not_take_keys_of_others(
    tmp_path: Path,
) -> None:
    """``*.b`` matches ``model.b``, and ``w.*`` optimizer state: ``optim.state.norm.w.exp_avg``."""
    split = {f"{n}.b": (4, 3) for n in range(3)} | {f"w.{n}": (6, 2) for n in range(2)}
    whole = filled({**split, "b": (4, 3), "norm.w": (6, 2), "1.2.deep": (4,), "deep": (4,)})

    def cut(key: str, value: torch.Tensor, at: dict[str, int]) -> tuple[str, torch.Tensor]:
        return key, chunk(value, 2, at["tp"], 0) if key in split or key == "1.2.deep" else value

    text, proposal = try_out(tmp_path, whole, cut, tp=2)
    assert not proposal.undecided
    assert '"0.b": CheckpointPlacement(meshes["tp"], {"tp": Shard(0)}),' in text
