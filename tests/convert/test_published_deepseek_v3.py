"""DeepSeek-V3's published form, rebuilt small: imported as numbers, loaded into ep 2 x fsdp 2.

The files have float8 weights in blocks of 128 x 128, ``weight_scale_inv``, ``config.json`` and an
index. Of the ``ODD`` sizes none is a multiple of 128, so that the last blocks are not whole;
transformers (5.23) divides each matrix into as many equal blocks as it has scales, which is right
for multiples of 128 alone.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, Placements
from dcp_placements.offline import import_checkpoint
from dcp_placements.presets import hub
from dcp_placements.testing import FakeDTensor, World
from tests.offline_scenes import save_hugging_face

BLOCK, EXPERTS = 128, 4


class Sizes(NamedTuple):
    hidden: int
    dense: int
    width: int  # of an expert


ODD, EVEN = Sizes(160, 144, 136), Sizes(256, 384, 128)
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    },
}
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the published tensors, without scales."""
    hidden, dense, width = sizes
    attention = {
        "q_a_proj.weight": (24, hidden),
        "q_a_layernorm.weight": (24,),
        "q_b_proj.weight": (48, 24),
        "kv_a_proj_with_mqa.weight": (24, hidden),
        "kv_a_layernorm.weight": (16,),
        "kv_b_proj.weight": (64, 16),
        "o_proj.weight": (hidden, 32),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (64, hidden),
        "model.layers.1.mlp.gate.weight": (EXPERTS, hidden),
        "model.layers.1.mlp.gate.e_score_correction_bias": (EXPERTS,),
    }
    for layer in range(2):
        head = f"model.layers.{layer}"
        shapes |= {f"{head}.self_attn.{name}": shape for name, shape in attention.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{head}.{norm}.weight"] = (hidden,)
    matrices = {"model.layers.0.mlp": dense, "model.layers.1.mlp.shared_experts": width}
    matrices |= {f"model.layers.1.mlp.experts.{n}": width for n in range(EXPERTS)}
    for head, rows in matrices.items():
        shapes |= {f"{head}.{part}_proj.weight": (rows, hidden) for part in ("gate", "up")}
        shapes[f"{head}.down_proj.weight"] = (hidden, rows)
    return shapes


def by_blocks(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a scale for each element of a matrix."""
    rows, columns = shape
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def publish(path: Path, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Write the files, and return their numbers by the formula, in bfloat16."""
    generator = torch.Generator().manual_seed(7)
    files: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for key, shape in shapes(sizes).items():
        value = torch.randn(shape, generator=generator) / (1 if len(shape) == 1 else 12)
        if not key.endswith("_proj.weight") and "_proj_with_mqa" not in key:
            is_bias = key.endswith("e_score_correction_bias")
            files[key] = numbers[key] = value if is_bias else value.bfloat16()
            continue
        grid = tuple(-(-size // BLOCK) for size in shape)
        scale = torch.rand(grid, generator=generator) / 1000 + 1e-4
        elements = (value / by_blocks(scale, shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
        files |= {key: elements, f"{key}_scale_inv": scale}
        numbers[key] = (elements.float() * by_blocks(scale, shape)).bfloat16()
    save_hugging_face(path, files, files=3)
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size")
    of_sizes = dict(zip(names, sizes, strict=True))
    (path / "config.json").write_text(json.dumps({**CONFIG, **of_sizes}))
    return numbers


def stacked(numbers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the experts as the module of transformers has them."""
    rows: dict[str, list[torch.Tensor]] = {GATE_UP: [], DOWN: []}
    for expert in range(EXPERTS):
        head = f"model.layers.1.mlp.experts.{expert}"
        gate, up, down = (numbers[f"{head}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        rows[GATE_UP].append(torch.cat([gate, up]))
        rows[DOWN].append(down)
    return {key: torch.stack(each) for key, each in rows.items()}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("deepseek")
    numbers = publish(path / "files", ODD)
    import_checkpoint(path / "files", path / "imported", dequantize=torch.bfloat16)
    return path, numbers


Published = tuple[Path, dict[str, torch.Tensor]]


def test_torchs_own_planner_reads_the_numbers_of_the_formula(published: Published) -> None:
    path, numbers = published
    state = {key: torch.zeros_like(value) for key, value in numbers.items()}
    dcp.load(state, checkpoint_id=path / "imported", no_dist=True)
    for key, value in numbers.items():
        assert torch.equal(state[key], value), key
    metadata = dcp.FileSystemReader(path / "imported").read_metadata().state_dict_metadata
    assert metadata.keys() == numbers.keys()


def test_ranks_of_ep_2_and_fsdp_2_hold_the_numbers_of_the_formula(published: Published) -> None:
    path, numbers = published
    whole = {**numbers, **stacked(numbers)}
    plain = [key for key in numbers if ".experts." not in key]
    world = World(4)

    def declaration(rank: int) -> Any:
        by = CheckpointPlacement(world.mesh(rank, ep=2, fsdp=2), {"ep": Shard(0)})
        return Placements({"mlp.experts": by}, rename=hub.deepseek_v3).load_planner()

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)["fsdp"]
        state = {}
        for key in (GATE_UP, DOWN):  # two of four experts, their rows cut by FSDP
            local = torch.zeros_like(whole[key][:2])
            state[key] = FakeDTensor.distribute(local, mesh, [Shard(1)])
        for key in plain:
            state[key] = FakeDTensor.distribute(torch.zeros_like(whole[key]), mesh, [Shard(0)])
        return state

    loaded = world.load(path / "imported", state_dict, declaration)
    for rank in range(4):
        ep, fsdp = divmod(rank, 2)
        for key in (GATE_UP, DOWN):
            part = whole[key][2 * ep : 2 * ep + 2].chunk(2, 1)[fsdp]
            assert torch.equal(loaded[rank][key].to_local(), part), (rank, key)
        for key in plain:
            assert torch.equal(loaded[rank][key].to_local(), whole[key].chunk(2)[fsdp]), key


def test_a_model_of_transformers_computes_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    publish(tmp_path / "files", EVEN)
    import_checkpoint(tmp_path / "files", tmp_path / "imported", dequantize=torch.bfloat16)
    tokens = torch.arange(12).reshape(2, 6)
    quantization = transformers.FineGrainedFP8Config(dequantize=True)
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "files", quantization_config=quantization, dtype=torch.bfloat16
    ).eval()
    model = copy.deepcopy(expected)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    state = model.state_dict()  # the parameters themselves
    planner = Placements({}, rename=hub.deepseek_v3).load_planner()
    dcp.load(state, checkpoint_id=tmp_path / "imported", planner=planner, no_dist=True)
    for key, value in expected.state_dict().items():
        assert torch.equal(value, state[key]), key
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
