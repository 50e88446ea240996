"""Checkpoint files as Megatron-LM writes them, cut from whole tensors by plain slicing.

``MegatronModel.wholes()`` is the truth: every weight of a GPT or MoE model in Megatron-Core's
names, with layers and experts numbered over all ranks, and gate before up. ``write_legacy`` cuts it
for every rank and writes ``iter_*/mp_rank_*/model_optim_rng.pt`` for the ranks that write in
Megatron. Names, shapes, writers and the other entries of a file follow Megatron-LM's
``training/checkpointing.py``, ``core/parallel_state.py`` and ``core/optimizer/optimizer.py``.
"""

from __future__ import annotations

import argparse
import enum
import io
import math
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

Wholes = dict[str, torch.Tensor]

STEPS = 1_000_000
"""Steps of the fake optimizer."""


@dataclass(frozen=True)
class MegatronModel:
    """A small model in Megatron-Core's names.

    Attributes:
        layers: Transformer layers.
        dense_layers: Number of first layers without experts.
        hidden: Hidden size.
        heads: Attention heads.
        query_groups: Groups of heads that share a key and a value.
        head_dim: Size of a head.
        ffn: Width of the dense MLP.
        experts: Experts of an MoE layer; 0 makes every layer dense.
        moe_ffn: Width of an expert.
        shared_ffn: Width of the shared expert; 0 for none.
        vocab: Words.
        padded_vocab: Rows of the embedding; None for ``vocab``.
        tied: Whether the output layer is the word embedding.
        gated: Whether ``linear_fc1`` joins gate and up.
        bias: Whether linear layers have biases.
        grouped: Experts as ``TEGroupedMLP`` (``weight{i}``), not ``SequentialMLP``.
        dtype: Dtype of the weights.
    """

    layers: int = 4
    dense_layers: int = 1
    hidden: int = 8
    heads: int = 8
    query_groups: int = 4
    head_dim: int = 3
    ffn: int = 12
    experts: int = 4
    moe_ffn: int = 4
    shared_ffn: int = 8
    vocab: int = 24
    padded_vocab: int | None = None
    tied: bool = False
    gated: bool = True
    bias: bool = False
    grouped: bool = True
    dtype: torch.dtype = torch.bfloat16

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight, in the order in which a model has them."""
        rows = self.vocab if self.padded_vocab is None else self.padded_vocab
        shapes: dict[str, tuple[int, ...]] = {
            "embedding.word_embeddings.weight": (rows, self.hidden)
        }
        for number in range(self.layers):
            layer = f"decoder.layers.{number}"
            shapes.update(self._attention(f"{layer}.self_attention"))
            if not self.experts or number < self.dense_layers:
                shapes[f"{layer}.mlp.linear_fc1.layer_norm_weight"] = (self.hidden,)
                shapes.update(self._mlp(f"{layer}.mlp", self.ffn, "weight", "bias"))
                continue
            shapes[f"{layer}.pre_mlp_layernorm.weight"] = (self.hidden,)
            shapes[f"{layer}.mlp.router.weight"] = (self.experts, self.hidden)
            for expert in range(self.experts):
                mlp = f"{layer}.mlp.experts"
                if self.grouped:
                    shapes.update(self._mlp(mlp, self.moe_ffn, f"weight{expert}", f"bias{expert}"))
                else:
                    mlp += f".local_experts.{expert}"
                    shapes.update(self._mlp(mlp, self.moe_ffn, "weight", "bias"))
            if self.shared_ffn:
                mlp = f"{layer}.mlp.shared_experts"
                shapes.update(self._mlp(mlp, self.shared_ffn, "weight", "bias"))
        shapes["decoder.final_layernorm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["output_layer.weight"] = (rows, self.hidden)
        return shapes

    def wholes(self, seed: int = 0) -> Wholes:
        """Return every weight whole, in float32, padding rows of the vocabulary included."""
        generator = torch.Generator().manual_seed(seed)
        return {
            key: torch.randn(shape, generator=generator) for key, shape in self.shapes().items()
        }

    def truth(self, seed: int = 0) -> Wholes:
        """Return what a checkpoint of the whole model holds: no padding, the model's dtype."""
        return {
            key: (whole[: self.vocab] if is_vocabulary(key) else whole).to(self.dtype)
            for key, whole in self.wholes(seed).items()
        }

    def _attention(self, name: str) -> dict[str, tuple[int, ...]]:
        width = (self.heads + 2 * self.query_groups) * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.linear_proj.weight": (self.hidden, self.heads * self.head_dim)
        }
        if self.bias:
            shapes[f"{name}.linear_proj.bias"] = (self.hidden,)
        shapes[f"{name}.linear_qkv.layer_norm_weight"] = (self.hidden,)
        shapes[f"{name}.linear_qkv.weight"] = (width, self.hidden)
        if self.bias:
            shapes[f"{name}.linear_qkv.bias"] = (width,)
        shapes[f"{name}.q_layernorm.weight"] = (self.head_dim,)
        return shapes

    def _mlp(self, name: str, ffn: int, weight: str, bias: str) -> dict[str, tuple[int, ...]]:
        rows = 2 * ffn if self.gated else ffn
        shapes: dict[str, tuple[int, ...]] = {f"{name}.linear_fc1.{weight}": (rows, self.hidden)}
        if self.bias:
            shapes[f"{name}.linear_fc1.{bias}"] = (rows,)
        shapes[f"{name}.linear_fc2.{weight}"] = (self.hidden, ffn)
        if self.bias:
            shapes[f"{name}.linear_fc2.{bias}"] = (self.hidden,)
        return shapes


@dataclass(frozen=True)
class MegatronRun:
    """The parallel sizes of a run.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        ep: Expert-parallel size.
        etp: Tensor-parallel size of the experts; None for ``tp``.
        cp: Context-parallel size.
        vpp: Model chunks of each pipeline stage; None without interleaving.
        early_writers: Only the ranks of expert-data-parallel rank 0 write, as in Megatron-Core 0.12
            to 0.18.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    vpp: int | None = None
    early_writers: bool = False

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage, at the smallest data-parallel size."""
        return math.lcm(self.tp * self.cp, self.expert_tp * self.ep)

    def writers(self) -> Iterator[RankOf]:
        """Yield the ranks that write a file, in rank order: ``tp-cp-ep-dp-pp``, ``tp`` fastest."""
        for pp in range(self.pp):
            for rank in range(self.stage_ranks):
                first_of_dp = rank // (self.tp * self.cp) == 0
                first_of_expert_dp = rank // (self.expert_tp * self.ep) == 0
                if first_of_expert_dp or (first_of_dp and not self.early_writers):
                    yield RankOf(
                        tp=rank % self.tp,
                        pp=pp,
                        ep=rank // self.expert_tp % self.ep,
                        etp=rank % self.expert_tp,
                        number=pp * self.stage_ranks + rank,
                    )

    def directory(self, rank: RankOf) -> str:
        """Return the name of a rank's directory."""
        name = f"mp_rank_{rank.tp:02d}"
        name += f"_{rank.pp:03d}" if self.pp > 1 else ""
        return name + (f"_{rank.ep:03d}" if self.ep > 1 else "")


@dataclass(frozen=True)
class RankOf:
    """A rank: its position along each axis, and its number among all ranks."""

    tp: int
    pp: int
    ep: int
    etp: int
    number: int


def write_legacy(
    path: str | Path,
    model: MegatronModel,
    run: MegatronRun,
    *,
    seed: int = 0,
    iteration: int = 10,
    args: bool = True,
    optimizer: str | None = None,
) -> Path:
    """Write a checkpoint in Megatron's legacy ``torch`` format; return its iteration directory.

    Args:
        path: The directory of all iterations.
        model: The model to save.
        run: The parallel sizes.
        seed: Seed of the weights.
        iteration: Number of the iteration.
        args: Whether the files hold the run's arguments.
        optimizer: ``"float16"`` (weights in float32 and moments in the file), ``"distributed"``
            (moments flat in a file beside it), or None.
    """
    root = Path(path)
    folder = root / f"iter_{iteration:07d}"
    wholes = model.wholes(seed)
    for rank in run.writers():
        chunks = [local_weights(wholes, model, run, rank, chunk) for chunk in range(run.vpp or 1)]
        held: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": iteration}
        if args:
            held["args"] = namespace(model, run, rank, optimizer)
        for number, chunk in enumerate(chunks):
            name = "model" if run.vpp is None else f"model{number}"
            held[name] = _with_extra_state({k: w.to(model.dtype) for k, w in chunk.items()})
        file = folder / run.directory(rank) / "model_optim_rng.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        if optimizer == "float16":
            weights = [weight for chunk in chunks for weight in chunk.values()]
            state = {index: {"exp_avg": weight + 1} for index, weight in enumerate(weights)}
            parameter_groups = [{"step": STEPS, "lr": 1e-4, "params": [*state]}]
            held["optimizer"] = {
                "optimizer": {"state": state, "param_groups": parameter_groups},
                "grad_scaler": {"scale": torch.ones(1)},
                "fp32_from_fp16_params": [weights],
            }
        elif optimizer == "distributed":
            held["optimizer"] = {"optimizer": {"param_groups": [{"step": STEPS, "lr": 1e-4}]}}
            flat = {"buckets_coalesced": True, 0: {"exp_avg": torch.zeros(7)}}
            torch.save(flat, file.parent / "distrib_optim.pt")
        held["opt_param_scheduler"] = {"max_lr": 1e-4, "num_steps": STEPS}
        held["rng_state"] = [
            {"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.ones(8)}
        ]
        with modules_of("megatron.core.transformer.enums", AttnBackend=AttnBackend):
            torch.save(held, file)
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def local_weights(
    wholes: Mapping[str, torch.Tensor],
    model: MegatronModel,
    run: MegatronRun,
    rank: RankOf,
    chunk: int = 0,
) -> Wholes:
    """Return what a rank's model chunk holds, under the rank's own names.

    Layers are counted from 0 in each chunk, experts from 0 on each expert-parallel rank. With tied
    embeddings the last stage of several holds the word embedding as its output layer, too.
    """
    chunks = run.vpp or 1
    per_chunk = model.layers // (run.pp * chunks)
    first_layer = (chunk * run.pp + rank.pp) * per_chunk
    per_rank = model.experts // run.ep
    is_first = rank.pp == 0 and chunk == 0
    is_last = rank.pp == run.pp - 1 and chunk == chunks - 1
    local: Wholes = {}
    for key, whole in wholes.items():
        layer = re.search(r"(?<=layers\.)\d+", key)
        expert = re.search(r"(?<=local_experts\.)\d+|(?<=\.weight)\d+$|(?<=\.bias)\d+$", key)
        name = key
        # The expert's number first: the layer's, before it, keeps its position in the text.
        if expert is not None:
            number = int(expert[0]) - rank.ep * per_rank
            if not 0 <= number < per_rank:
                continue
            name = name[: expert.start()] + str(number) + name[expert.end() :]
        if layer is not None:
            number = int(layer[0]) - first_layer
            if not 0 <= number < per_chunk:
                continue
            name = name[: layer.start()] + str(number) + name[layer.end() :]
        elif key.startswith("embedding"):
            if not is_first:
                continue
        elif not is_last:
            continue
        local[name] = cut_for(key, whole, model, run, rank)
    if model.tied and is_last and not is_first:
        embedding = "embedding.word_embeddings.weight"
        local["output_layer.weight"] = cut_for(embedding, wholes[embedding], model, run, rank)
    return local


def cut_for(
    key: str, whole: torch.Tensor, model: MegatronModel, run: MegatronRun, rank: RankOf
) -> torch.Tensor:
    """Return a rank's part of one whole weight."""
    of_expert = ".mlp.experts." in key
    size, position = (run.expert_tp, rank.etp) if of_expert else (run.tp, rank.tp)
    linear, _, kind = key.rpartition(".")
    is_bias = kind.startswith("bias")
    if "layer_norm" in kind or kind == "layernorm":
        return whole.clone()
    if linear.endswith("linear_fc1") and model.gated:
        gate, up = whole[: len(whole) // 2], whole[len(whole) // 2 :]
        rows = len(gate) // size
        return torch.cat(
            [
                gate[position * rows : (position + 1) * rows],
                up[position * rows : (position + 1) * rows],
            ]
        )
    if linear.endswith(("linear_fc1", "linear_qkv")) or is_vocabulary(key):
        rows = len(whole) // size
        assert rows * size == len(whole), f"{key}: {len(whole)} rows over {size} ranks"
        return whole[position * rows : (position + 1) * rows].clone()
    if linear.endswith(("linear_fc2", "linear_proj")) and not is_bias:
        columns = whole.shape[1] // size
        assert columns * size == whole.shape[1]
        return whole[:, position * columns : (position + 1) * columns].clone()
    return whole.clone()


def is_vocabulary(key: str) -> bool:
    """Whether a weight has a row per word."""
    return key in ("embedding.word_embeddings.weight", "output_layer.weight")


def namespace(
    model: MegatronModel, run: MegatronRun, rank: RankOf, optimizer: str | None = None
) -> argparse.Namespace:
    """Return the run's arguments as Megatron keeps them in each file."""
    rows = model.vocab if model.padded_vocab is None else model.padded_vocab
    return argparse.Namespace(
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        virtual_pipeline_model_parallel_size=run.vpp,
        expert_model_parallel_size=run.ep,
        expert_tensor_parallel_size=run.expert_tp,
        context_parallel_size=run.cp,
        world_size=run.pp * run.stage_ranks,
        rank=rank.number,
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        num_experts=model.experts or None,
        swiglu=model.gated,
        vocab_size=model.vocab,
        padded_vocab_size=rows,
        untie_embeddings_and_output_weights=not model.tied,
        use_distributed_optimizer=optimizer == "distributed",
        optimizer="adam",
        params_dtype=model.dtype,
        attention_backend=AttnBackend.auto,
    )


def _with_extra_state(weights: Wholes) -> dict[str, Any]:
    """Return the weights with the blobs that Transformer Engine puts beside them."""
    held: dict[str, Any] = {}
    for key, weight in weights.items():
        held[key] = weight
        linear = key.rpartition(".")[0]
        if ".linear_" in linear:
            # Older releases write a stream, newer ones a tensor.
            blob = io.BytesIO(b"scales") if linear.endswith("fc1") else torch.empty(0)
            held.setdefault(f"{linear}._extra_state", blob)
    return held


class AttnBackend(enum.Enum):
    """One of Megatron's enumerations in ``args``; written under Megatron's name."""

    flash = 1
    auto = 5


@contextmanager
def modules_of(name: str, **classes: type) -> Iterator[None]:
    """Let pickles name classes of a module of Megatron's, which no reader here can import."""
    levels = name.split(".")
    modules = {".".join(levels[:end]): types.ModuleType(name) for end in range(1, len(levels) + 1)}
    vars(modules[name]).update(classes)
    with mock.patch.dict(sys.modules, modules), ExitStack() as stack:
        for each in classes.values():
            stack.enter_context(mock.patch.object(each, "__module__", name))
        yield


def padded(model: MegatronModel, multiple: int) -> MegatronModel:
    """Return the model with its vocabulary padded to a multiple, as Megatron pads it for TP."""
    return replace(model, padded_vocab=-(-model.vocab // multiple) * multiple)
