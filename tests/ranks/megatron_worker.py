"""Models of Megatron Core itself, built on the CPU for every rank of a world in turn.

    python tests/ranks/megatron_worker.py OUT

Megatron cuts the weights: its initialisation makes the whole weight and keeps this rank's part, and
here the whole is filled with its element numbers. What a rank holds thus says where it belongs,
whatever the preset believes. Writes ``OUT/seen.json``; ``test_presets_megatron_core.py`` reads it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hazard_scenes import read_whole
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_placements import Placements
from dcp_placements.offline import import_checkpoint
from dcp_placements.presets import megatron_core, megatron_meshes
from dcp_placements.testing import World

VOCAB, HIDDEN, EXPERTS = 64, 16, 4
WORLDS: dict[str, dict[str, Any]] = {
    "one": {"world": 1},
    "tp2_pp2_ep2": {"world": 8, "tp": 2, "pp": 2, "ep": 2, "etp": 1},
    "tp4_ep2_etp2": {"world": 8, "tp": 4, "ep": 2, "etp": 2},
    "pp2_vpp2": {"world": 4, "pp": 2, "vpp": 2, "ep": 2, "etp": 1},
}


@torch.no_grad()
def element_numbers(weight: torch.Tensor) -> None:
    weight.copy_(torch.arange(weight.numel()).reshape(weight.shape))


def built(rank: int, *, world: int, vpp: int | None = None, **sizes: int) -> list[Any]:
    """Return the chunks of one rank's model."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    tp, pp, ep = (sizes.get(axis, 1) for axis in ("tp", "pp", "ep"))
    etp = sizes.get("etp", tp)
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    config = TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=24,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=12,
        moe_layer_freq=[0, 1, 1, 1],
        moe_shared_expert_intermediate_size=20,
        moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        init_method=element_numbers,
        output_layer_init_method=element_numbers,
        embedding_init_method=element_numbers,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    chunks = []
    for at in range(vpp or 1):
        stage = {"ignore_virtual": False, "vp_stage": at if vpp else None}
        spec = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization="RMSNorm",
            vp_stage=at if vpp else None,
        )
        chunks.append(
            GPTModel(
                config,
                spec,
                vocab_size=VOCAB,
                max_sequence_length=32,
                pre_process=parallel_state.is_pipeline_first_stage(**stage),
                post_process=parallel_state.is_pipeline_last_stage(**stage),
                share_embeddings_and_output_weights=False,
                position_embedding_type="rope",
                vp_stage=at if vpp else None,
            )
        )
    for chunk in chunks:
        for name, tensor in chunk.state_dict().items():
            if isinstance(tensor, torch.Tensor):
                tensor += offset(global_name(chunk, name))
    return chunks


def global_name(chunk: Any, name: str) -> str:
    """Return a name by what Megatron knows of this rank, and not by what the preset says."""
    layer = re.match(r"decoder\.layers\.(\d+)", name)
    if layer is not None:
        number = chunk.decoder.layers[int(layer[1])].layer_number - 1
        name = f"decoder.layers.{number}{name[layer.end() :]}"
    first = parallel_state.get_expert_model_parallel_rank() * (
        EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    )
    return re.sub(r"(?<=local_experts\.)\d+", lambda found: str(first + int(found[0])), name)


def offset(name: str) -> int:
    return zlib.crc32(name.encode()) % 1000 * 1000


class Model:
    """What all ranks of one world hold."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self.world = World(sizes["world"])
        self.held, self.presets, self.same_ranks = [], [], True
        for rank in range(self.world.size):
            chunks = built(rank, **sizes)
            by_axis = {k: v for k, v in sizes.items() if k not in ("world", "vpp")}
            dense, expert = megatron_meshes(rank, self.world.size, **by_axis)
            self.same_ranks &= dense.get_coordinate() == (
                parallel_state.get_pipeline_model_parallel_rank(),
                parallel_state.get_data_parallel_rank(),
                parallel_state.get_context_parallel_rank(),
                parallel_state.get_tensor_model_parallel_rank(),
            )
            self.same_ranks &= expert.get_coordinate() == (
                parallel_state.get_pipeline_model_parallel_rank(),
                parallel_state.get_expert_data_parallel_rank(),
                parallel_state.get_expert_model_parallel_rank(),
                parallel_state.get_expert_tensor_parallel_rank(),
            )
            self.presets.append(
                megatron_core(chunks if len(chunks) > 1 else chunks[0], dense, expert)
            )
            names = ["model"] if len(chunks) == 1 else [f"model{at}" for at in range(len(chunks))]
            self.held.append(
                {
                    name: {k: v for k, v in chunk.state_dict().items() if v is not None}
                    for name, chunk in zip(names, chunks, strict=True)
                }
            )
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    def preset(self, rank: int) -> Placements:
        return self.presets[rank]


def copied(state_dict: Any, fill: float | None = None) -> Any:
    if isinstance(state_dict, dict):
        return {key: copied(value, fill) for key, value in state_dict.items()}
    return state_dict.clone() if fill is None else torch.full_like(state_dict, fill)


def differing(found: Any, wanted: Any, name: str = "") -> list[str]:
    if isinstance(wanted, dict):
        return [d for key in wanted for d in differing(found[key], wanted[key], f"{name}.{key}")]
    return [] if torch.equal(found, wanted) else [name]


def seen(models: dict[str, Model], saved: str, loaded: str, out: Path) -> dict[str, Any]:
    before, after = models[saved], models[loaded]
    path = out / f"{saved}-{loaded}"

    planner = before.world.save(
        path, lambda rank: before.held[rank], lambda rank: before.preset(rank).save_planner()
    )[0]
    # The model that no parallelism has cut, as Megatron itself filled it.
    truth = {f"model.{k}": v for k, v in models["one"].held[0]["model"].items()}
    whole = read_whole(path)
    found = after.world.load(
        path,
        lambda rank: copied(after.held[rank], -1.0),
        lambda rank: after.preset(rank).load_planner(),
    )
    return {
        "warnings": planner.report.warnings,
        "tensors": len(whole),
        "keys": sorted(whole.keys() ^ truth.keys()),
        "in_file": [k for k in truth if k in whole and not torch.equal(whole[k], truth[k])],
        "after_load": [
            f"rank {rank}{d}"
            for rank in range(after.world.size)
            for d in differing(found[rank], after.held[rank])
        ],
        "same_ranks": before.same_ranks and after.same_ranks,
    }


def imported(models: dict[str, Model], saved: str, out: Path) -> dict[str, Any]:
    """Return what becomes of the files that the ranks would write in Megatron's legacy format."""
    sizes = {"tp": 1, "pp": 1, "ep": 1, "etp": 1, **WORLDS[saved]}
    args = argparse.Namespace(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=sizes["etp"],
        num_layers=4,
        num_experts=EXPERTS,
        vocab_size=VOCAB,
        swiglu=True,
        untie_embeddings_and_output_weights=True,
    )
    folder = out / f"{saved}-files"
    by_axis = {axis: sizes[axis] for axis in ("tp", "pp", "ep", "etp")}
    for rank, held in enumerate(models[saved].held):
        dense, expert = megatron_meshes(rank, sizes["world"], **by_axis)
        (pp, dp, _, tp), (_, edp, ep, _) = dense.get_coordinate(), expert.get_coordinate()
        if dp and edp:
            continue
        name = f"mp_rank_{tp:02d}"
        name += f"_{pp:03d}" if sizes["pp"] > 1 else ""
        file = folder / (name + (f"_{ep:03d}" if sizes["ep"] > 1 else "")) / "model_optim_rng.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"args": args, "checkpoint_version": 3.0, **held}, file)
    import_checkpoint(folder, out / f"{saved}-imported")
    truth = models["one"].held[0]["model"]
    whole = read_whole(out / f"{saved}-imported")
    return {
        "files": sorted(entry.name for entry in folder.iterdir()),
        "keys": sorted(whole.keys() ^ truth.keys()),
        "differing": [k for k in truth if k in whole and not torch.equal(whole[k], truth[k])],
    }


def main(out: Path) -> None:
    models = {name: Model(sizes) for name, sizes in WORLDS.items()}
    pairs = [
        ("tp2_pp2_ep2", "tp4_ep2_etp2"),
        ("tp4_ep2_etp2", "pp2_vpp2"),
        ("pp2_vpp2", "tp2_pp2_ep2"),
    ]
    results = {"-".join(pair): seen(models, *pair, out) for pair in pairs}
    results |= {f"{name} imported": imported(models, name, out) for name in WORLDS}
    (out / "seen.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
