"""Trainers that know nothing of the package: the alarm, the block that it prints, a right file.

No line of a trainer changes. The block is taken out of the message by a parser, and stands in a
file as it is. The truth is the unsharded model, trained in this process by the same steps: AdamW
works element by element, so that a cut model has the same elements.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements.advice.block import block_in
from tests.torchrun import ROOT, forked, tail

RUN = ROOT / "dcp_placements" / "run.py"

TRAINER = '''
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LAYERS, EXPERTS, HIDDEN, FFN, VOCABULARY = 2, 4, 6, 8, 13


def drawn(name, *shape):
    seed = int.from_bytes(name.encode(), "big") % 100_003
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_of(kind):
    """Return the unsharded model."""
    shapes = {"embed.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        head = f"layers.{layer}."
        shapes[f"{head}norm.weight"] = (HIDDEN,)
        if kind == "packed":
            shapes[f"{head}mlp.router.weight"] = (EXPERTS, HIDDEN)
            shapes[f"{head}mlp.experts.w1"] = (EXPERTS, HIDDEN, FFN)
            shapes[f"{head}mlp.experts.w2"] = (EXPERTS, FFN, HIDDEN)
        elif kind == "listed":
            shapes[f"{head}mlp.router.weight"] = (EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                shapes[f"{head}mlp.experts.{expert}.w1.weight"] = (FFN, HIDDEN)
        else:
            shapes[f"{head}mlp.gate_up_proj.weight"] = (2 * FFN, HIDDEN)
            shapes[f"{head}mlp.down_proj.weight"] = (HIDDEN, FFN)
    return {name: drawn(name, *shape) for name, shape in shapes.items()}


def cut_of(kind, name, tensor, ranks, position):
    """Return what a rank has of a tensor of the unsharded model, and its name there."""
    parts = name.split(".")
    if kind == "packed" and "experts" in parts:
        tensor = tensor.chunk(ranks)[position]
    if kind == "listed" and "experts" in parts:
        at = parts.index("experts") + 1
        owner, parts[at] = divmod(int(parts[at]), EXPERTS // ranks)
        if owner != position:
            return None, None
    if kind == "tp":
        if "embed" in parts:
            rows = -(-len(tensor) // ranks) * ranks
            tensor = torch.cat([tensor, torch.zeros(rows - len(tensor), tensor.shape[1])])
            tensor = tensor.chunk(ranks)[position]
        elif "gate_up_proj" in parts:
            tensor = torch.cat([part.chunk(ranks)[position] for part in tensor.chunk(2)])
        elif "down_proj" in parts:
            tensor = tensor.chunk(ranks, 1)[position]
    return ".".join(map(str, parts)), tensor.clone()


def built(weights):
    model = nn.Module()
    for name, tensor in weights.items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(tensor))
    return model


def trained(model):
    """Return the optimizer after a step with gradients that come from the weights themselves."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return optimizer


def main():
    kind, phase, ranks = sys.argv[1], sys.argv[2], 2
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    names = {"tp": ("dp", "tp"), "hsdp": ("dp", "fsdp")}.get(kind, ("edp", "ep"))
    mesh = init_device_mesh("cpu", (world // ranks, ranks), mesh_dim_names=names)
    position = mesh.get_local_rank(names[1])
    weights = {}
    for name, tensor in whole_of(kind).items():
        local, part = cut_of(kind, name, tensor, ranks, position)
        if local is not None:
            weights[local] = part
    if phase == "resume":
        weights = {name: torch.full_like(part, 7) for name, part in weights.items()}
    model = built(weights)
    if kind == "hsdp":
        fully_shard(model, mesh=mesh)
    optimizer = trained(model)
    if phase == "save":
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
        dcp.save(state, checkpoint_id="saved")
    else:
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
        dcp.load(state, checkpoint_id="saved")
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        assert_is_resumed(kind, model, optimizer, ranks, position)
    sys.stdout.write(f"{phase.upper()}D\\n")
    dist.barrier()
    dist.destroy_process_group()


def assert_is_resumed(kind, model, optimizer, ranks, position):
    whole = built(whole_of(kind))
    other = trained(whole)
    moments = {n: other.state[p] for n, p in whole.named_parameters()}
    own = dict(model.named_parameters())
    for name, parameter in whole.named_parameters():
        local, part = cut_of(kind, name, parameter.detach(), ranks, position)
        if local is None:
            continue
        held = own[local]
        pairs = [(held, part)]
        for moment in ("exp_avg", "exp_avg_sq"):
            cut = cut_of(kind, name, moments[name][moment], ranks, position)[1]
            pairs.append((optimizer.state[held][moment], cut))
        for value, expected in pairs:
            value = value.full_tensor() if isinstance(value, DTensor) else value
            rows = min(len(value), VOCABULARY - position * len(value)) if "embed" in name else None
            assert torch.equal(value[:rows], expected[:rows]), (name, value, expected)


if __name__ == "__main__":
    main()
'''


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(*arguments: str, ranks: int = 4) -> subprocess.CompletedProcess[str]:
    """Return what some ranks print that run a program so."""
    return forked(RUN, *arguments, ranks=ranks, cwd=Path.cwd(), modules="torch._dynamo,torch.optim")


def trainer_module() -> dict[str, Any]:
    """Return the names of the trainer, for the truth alone."""
    names: dict[str, Any] = {"__name__": "trainer"}
    exec(TRAINER, names)
    return names


def assert_file_is_whole(kind: str) -> None:
    """Assert that torch reads the unsharded model and its moments in one process."""
    names = trainer_module()
    whole = names["built"](names["whole_of"](kind))
    optimizer = names["trained"](whole)
    expected = {f"model.{name}": value.detach() for name, value in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            expected[f"optim.state.{name}.{moment}"] = optimizer.state[parameter][moment]
    if kind == "tp":  # without whole= nothing tells that a row is padding: it is stored, too
        for key in [key for key in expected if "embed" in key]:
            expected[key] = torch.cat([expected[key], torch.zeros(1, 6)])
    state = {key: torch.full_like(value, 7) for key, value in expected.items()}
    dcp.load(state, checkpoint_id="saved", no_dist=True)
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["packed", "listed", "tp"])
def test_a_trainer_with_the_bug_is_handed_its_declaration(trainer: Path, kind: str) -> None:
    alarm = ran("train.py", kind, "save")
    assert alarm.returncode != 0
    assert "SAVED" not in alarm.stdout
    block = block_in(re.sub(r"^\[rank0\]: ", "", alarm.stderr, flags=re.MULTILINE))
    assert block, tail(alarm)
    (trainer / "ours.py").write_text(block)
    declared = ("--placements", "ours.py:placements", "train.py", kind)
    saved = ran(*declared, "save")
    assert saved.stdout.count("SAVED") == 4, block + tail(saved)
    assert_file_is_whole(kind)
    resumed = ran(*declared, "resume", ranks=2)
    assert resumed.stdout.count("RESUMED") == 2, block + tail(resumed)


@pytest.mark.dist
def test_a_trainer_that_is_right_hears_nothing(trainer: Path) -> None:
    saved = ran("train.py", "hsdp", "save")
    assert (saved.stdout.count("SAVED"), saved.stderr) == (4, ""), tail(saved)
    assert_file_is_whole("hsdp")
    resumed = ran("train.py", "hsdp", "resume", ranks=2)
    assert (resumed.stdout.count("RESUMED"), resumed.stderr) == (2, ""), tail(resumed)
