"""One of four gloo ranks: models of transformers, their experts cut over ep by hand, with FSDP2.

    OMP_NUM_THREADS=1 python tests/ranks/forked.py 4 tests/ranks/transformers_worker.py OUT

Saves from ep 2 x fsdp 2, loads into ep 4 and into ep 1 x fsdp 4. After that rank 0, alone and with
torch's default planner, loads a whole model and compares it; so it does with an export and
``from_pretrained``, and all ranks load what ``save_pretrained`` writes. Writes ``OUT/<rank>.json``,
which ``test_presets_transformers.py`` reads.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
import zlib
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # configurations are made here; nothing is to be fetched

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hazard_scenes import read_whole
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from dcp_placements import Placements, presets
from dcp_placements.offline import export_safetensors
from dcp_placements.presets import hub
from dcp_placements.testing import World

SIZES: dict[str, Any] = {
    "vocab_size": 66,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
CONFIGS = {
    "mixtral": MixtralConfig(**SIZES, intermediate_size=12, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, intermediate_size=20, moe_intermediate_size=12, num_experts=4, head_dim=4
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        **MLA,
        intermediate_size=20,
        moe_intermediate_size=12,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}
TOKENS = torch.arange(24).reshape(2, 12)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def model_of(name: str, seed: int) -> Any:
    """Return a model with random weights and buffers, the same on each rank."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], experts_implementation="eager")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 0.1)
    return model.eval()


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def random_like(whole: torch.Tensor, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(whole.shape, generator=generator)


class Job:
    """A model on four ranks: experts cut over ep and then by FSDP2, the rest by FSDP2 over all."""

    def __init__(self, model: Any, ep: int) -> None:
        self.mesh = init_device_mesh("cpu", (ep, 4 // ep), mesh_dim_names=("ep", "fsdp"))
        self.model = model
        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                for name, whole in list(module.named_parameters(recurse=False)):
                    part = whole.detach().chunk(ep)[self.mesh.get_local_rank("ep")].clone()
                    setattr(module, name, nn.Parameter(part))
                module.num_experts //= ep
                fully_shard(module, mesh=self.mesh["fsdp"])
        for layer in model.model.layers:
            fully_shard(layer, mesh=self.everybody())
        fully_shard(model, mesh=self.everybody())
        self.optimizer = torch.optim.AdamW(model.parameters())

    def everybody(self) -> DeviceMesh:
        return init_device_mesh("cpu", (4,), mesh_dim_names=("all",))

    def part(self, whole: torch.Tensor, name: str, like: Any) -> torch.Tensor:
        """Return this rank's part of a whole tensor, cut by torch.chunk and by torch's DTensor."""
        if is_expert(name):
            whole = whole.chunk(self.mesh["ep"].size())[self.mesh.get_local_rank("ep")]
        if not isinstance(like, DTensor):
            return whole
        return distribute_tensor(
            whole, like.device_mesh, like.placements, src_data_rank=None
        ).to_local()

    def set_moments(self, wholes: dict[str, torch.Tensor]) -> None:
        """Give AdamW moments that are parts of known whole tensors."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.param_groups[0]["lr"] = 0.0
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                whole = random_like(wholes[name], f"{name}.{moment}")
                state = self.optimizer.state[parameter][moment]
                state.to_local().copy_(self.part(whole, name, parameter))

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
        }

    def differing(self, wholes: dict[str, torch.Tensor]) -> list[str]:
        """Return the names whose local tensors are not their part of the whole."""
        wrong = []
        optim = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        for name, value in self.model.state_dict().items():
            found = value.to_local() if isinstance(value, DTensor) else value
            if not torch.equal(found, self.part(wholes[name], name, value)):
                wrong.append(name)
        for name, parameter in self.model.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                whole = random_like(wholes[name], f"{name}.{moment}")
                found = optim[f"state.{name}.{moment}"].to_local()
                if not torch.equal(found, self.part(whole, name, parameter)):
                    wrong.append(f"{name}.{moment}")
        return wrong


def run(name: str, path: Path) -> dict[str, Any]:
    """Save one model from ep 2 x fsdp 2, and load it into the other topologies."""
    wholes = {k: v.clone() for k, v in model_of(name, 0).state_dict().items()}
    job = Job(model_of(name, 0), ep=2)
    job.set_moments(wholes)
    preset = presets.transformers(job.model, job.mesh)
    planner = preset.save_planner()
    dcp.save(job.state_dict(), checkpoint_id=path, planner=planner)
    results: dict[str, Any] = {"patterns": preset.rules.patterns}
    results["report"] = planner.report.warnings
    for ep in (4, 1):
        other = Job(model_of(name, 1), ep=ep)
        other.set_moments({k: v + 1 for k, v in wholes.items()})
        for parameter in other.model.parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                other.optimizer.state[parameter][moment].to_local().fill_(-1)
        preset = presets.transformers(other.model, other.mesh)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=path, planner=preset.load_planner())
        set_optimizer_state_dict(other.model, other.optimizer, state["optim"], options=FLAT)
        results[f"differing_ep{ep}"] = other.differing(wholes)
    results["differing_hub"] = from_hub(name, path, wholes)
    return results


def from_hub(name: str, path: Path, wholes: dict[str, torch.Tensor]) -> list[str]:
    """Load what ``save_pretrained`` writes, a matrix per expert, into ep 2 x fsdp 2."""
    files = path.with_name(f"{name}-pretrained")
    if dist.get_rank() == 0:
        model_of(name, 0).save_pretrained(files)
    dist.barrier()
    job = Job(model_of(name, 1), ep=2)
    job.set_moments(wholes)
    state = get_model_state_dict(job.model)
    preset = presets.transformers(job.model, job.mesh)
    planner = Placements(preset.rules, rename=getattr(hub, name)).load_planner()
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(files)), planner=planner)
    return job.differing(wholes)


def alone(name: str, path: Path) -> dict[str, Any]:
    """Load a whole model in this process, with torch's default planner and nothing of ours."""
    wanted, loaded = model_of(name, 0), model_of(name, 1)
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=path)
    loaded.load_state_dict(state["model"])
    whole = read_whole(path)
    moments = {k for k in whole if k.endswith(".exp_avg")}
    parameters = dict(wanted.named_parameters())
    files = path.with_name(f"{name}-exported")
    export_safetensors(path, files, rename=getattr(hub, name), max_shard_size=4096)
    CONFIGS[name].save_pretrained(files)
    exported, info = AutoModelForCausalLM.from_pretrained(
        files, experts_implementation="eager", output_loading_info=True
    )
    with safe_open(path.with_name(f"{name}-pretrained") / "model.safetensors", "pt") as theirs:
        hub_names = set(theirs.keys())
    index = json.loads((files / "model.safetensors.index.json").read_text())
    with torch.no_grad():
        logits, other = wanted(TOKENS).logits, loaded(TOKENS).logits
        from_export = exported.eval()(TOKENS).logits
        unequal = model_of(name, 1)(TOKENS).logits
    return {
        "unequal": [
            k for k, v in wanted.state_dict().items() if not torch.equal(v, state["model"][k])
        ],
        "keys": sorted(
            {k for k in whole if k.startswith("model.")}
            ^ {f"model.{k}" for k in wanted.state_dict()}
        ),
        "moments": len(moments) - len(parameters),
        "unequal_moments": [
            k
            for k, v in parameters.items()
            if not torch.equal(whole[f"optim.state.{k}.exp_avg"], random_like(v, f"{k}.exp_avg"))
        ],
        "forward_equal": torch.equal(logits, other),
        "exported_equal": torch.equal(logits, from_export),
        "exported_info": sorted(map(str, [k for kind in info.values() for k in kind])),
        "exported_names": sorted(hub_names ^ set(index["weight_map"])),
        "forward_says_something": not torch.equal(logits, unequal),
    }


def on_mesh(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """Return the same shard as a DTensor over ``mesh`` itself."""
    return DTensor.from_local(
        tensor.to_local(),
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def tensor_parallel(name: str, out: Path) -> dict[str, Any]:
    """Save weights that transformers itself has cut over tp, as its DTensors and as plain ones."""
    wholes = {f"model.{k}": v.clone() for k, v in model_of(name, 0).state_dict().items()}
    results = {}
    for kind in ("dtensor", "plain"):
        held, made = [], []
        for rank in range(2):
            mesh = DeviceMesh(
                "cpu", torch.arange(2), mesh_dim_names=("tp",), _init_backend=False, _rank=rank
            )
            model = model_of(name, 0)
            plan = model._expand_parallel_plan(dict(model.tp_plan))
            apply_tensor_parallelism(model, mesh, plan)
            # torch takes equal meshes for one, also where another rank's was made first.
            state = {
                k: on_mesh(v, mesh) if isinstance(v, DTensor) else v
                for k, v in model.state_dict().items()
            }
            if kind == "plain":
                state = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()}
            held.append({"model": dict(state)})
            made.append(presets.transformers(model, mesh))
        path = out / f"{name}-tp-{kind}"
        savers = [preset.save_planner() for preset in made]
        planners = World(2).save(path, held.__getitem__, savers.__getitem__)
        found = read_whole(path)
        results[kind] = {
            "keys": sorted(found.keys() ^ wholes.keys()),
            "unequal": [k for k, v in wholes.items() if not torch.equal(found[k], v)],
            "report": planners[0].report.warnings,
        }
    return results


def main() -> None:
    out = Path(sys.argv[1])
    results: dict[str, Any] = {}
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for name in CONFIGS:
                results[name] = run(name, out / name)
            dist.barrier()
            dist.destroy_process_group()
            if rank == 0:
                for name in CONFIGS:
                    results[name]["alone"] = alone(name, out / name)
                    results[name]["tp"] = tensor_parallel(name, out)
        except BaseException:
            results["failed"] = traceback.format_exc()
    results["warnings"] = sorted(
        {str(w.message) for w in caught if "look at this" in str(w.message)}
    )
    (out / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
