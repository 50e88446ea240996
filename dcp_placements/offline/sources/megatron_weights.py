"""Megatron-LM's files as a checkpoint: each file's placements, from names alone.

A ``mp_rank_*`` file is one rank's state dict, as any other rank's file. Facts that Megatron does
not write beside it follow from the files of all ranks: layers are numbered from 0 in each model
chunk and experts from 0 on each expert-parallel rank, which is a rename; a weight's name says how
tensor parallelism cuts it, which is a rule; the vocabulary is padded; and rows against columns tell
whether ``linear_fc1`` joins gate and up. The run's arguments inside the files must say the same.

Facts of the rules: Megatron-LM ``megatron/core/``. ``linear_qkv`` is ordered by query group, and
its rows are cut plainly, even through a group (``transformer/attention.py``); ``linear_fc1`` is
gate over up on each rank (``transformer/mlp.py``); norms, routers, and biases of weights that are
cut by row are replicated; experts are cut by expert tensor parallelism
(``transformer/moe/experts.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import Shard

from dcp_placements.errors import (
    Fault,
    PlacementError,
    raise_faults,
)
from dcp_placements.names.known_names import EXTRA_STATE
from dcp_placements.names.renames import Renames, Renumber, contiguous
from dcp_placements.offline.checkpoint import WholeTensors
from dcp_placements.offline.sources.mapped_files import nbytes_in
from dcp_placements.offline.sources.megatron_directory import (
    EMBEDDING,
    WEIGHTS,
    Coordinate,
    MegatronLayout,
    RankFile,
    chunk_number,
    differences,
    files_of,
    find_iteration,
    megatron_layout,
    rank_directories,
)
from dcp_placements.offline.sources.rank_tensors import RankTensors
from dcp_placements.presets.megatron_core import NUMBERED_EXPERTS, VOCABULARY
from dcp_placements.rules.mesh_axes import MeshCoordinate
from dcp_placements.rules.patterns import PlacementRules
from dcp_placements.rules.placement import CheckpointPlacement, FusedShard
from dcp_placements.storage.safe_pickle import Stub

_OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"(?:^|\.)(decoder|encoder)\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.|linear_fc[12]\.(?:weight|bias)(\d+)$)")
_FC1 = re.compile(r"linear_fc1\.(weight\d*)$")

_COLUMN = ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "eh_proj")
_REPLICATED = (
    *("*norm.weight", "*norm.bias", "*layer_norm_weight", "*layer_norm_bias"),
    *("router.weight", "router.bias", "router.expert_bias", "shared_experts.gate_weight"),
    *("linear_q_down_proj.weight", "linear_kv_down_proj.weight"),
    *("position_embeddings.weight", "tokentype_embeddings.weight"),
)

_OF_THE_RUN = "of the run, not of the model"
_OPTIMIZER = (
    "only weights are imported: load optimizer state in Megatron, and save it as torch_dist"
)


def megatron_weights(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel_size: int | None = None,
) -> WholeTensors:
    """Return the model's whole tensors of ``mp_rank_*`` files.

    Keys are Megatron's own, with layers and experts numbered over all ranks; gate is before up, and
    the padding rows of the vocabulary are left out. Layers are counted over the stages in the order
    of their chunks; a tied output layer is stored once, as the word embedding. Optimizer state is
    left out.

    Args:
        path: The directory of one iteration, or of all with the tracker file.
        vocab_size: Rows of the vocabulary without padding; by default from the run's arguments,
            and all rows if they do not say.
        expert_parallel_size: Argument of ``megatron_layout``; needed if the directory is ambiguous.
        expert_tensor_parallel_size: Tensor-parallel size of the experts, if the files hold no
            arguments.

    Raises:
        CannotLook: There are no such files, or one cannot be read or is refused.
        PlacementError: Files are missing or contradict each other, a weight has no rule, or parts
            do not make whole tensors; all faults at once.
    """
    directory = find_iteration(path)
    files = [f"{name}/{WEIGHTS}" for name in rank_directories(directory)]
    tensors = RankTensors(directory, files)
    layout = megatron_layout(
        directory.path,
        expert_parallel_size=expert_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
    )
    if layout.layout == "ambiguous":
        raise PlacementError(f"{layout.path}: {layout.reason}")
    mismatches = [Fault("checkpoint", line) for line in layout.mismatches]
    raise_faults(f"{layout.path} cannot be imported as it is", mismatches)
    model = _Model(layout, vocab_size)
    tensors.notes += [f"layout: {layout.reason}", *model.notes]
    nbytes = 0
    for file in layout.ranks:
        nbytes += nbytes_in(file.contents)
        _add(tensors, model, file)
        for other in files_of(directory, file.directory):
            name = os.path.basename(other)
            if name != WEIGHTS:
                is_optimizer = name == "distrib_optim.pt"
                why = _OPTIMIZER if is_optimizer else "another file, which is not read"
                size = directory.size(other) or 0
                nbytes += size
                tensors.leave_out(name, why, size)
    if not tensors.faults and tensors.nbytes != nbytes:
        of = f"of which {tensors.nbytes} are accounted for"
        raise PlacementError(f"{layout.path}: {nbytes} bytes, {of}")
    return tensors.whole()


def _add(tensors: RankTensors, model: _Model, file: RankFile) -> None:
    """Place the weights of one file, and leave out its other contents."""
    coordinate = model.layout.coordinates[file.directory]
    rules, name = model.rules(coordinate), f"{file.directory}/{WEIGHTS}"
    for top, value in file.contents.items():
        number = chunk_number(top, value)
        if number is None:
            why = _OPTIMIZER if top == "optimizer" else _OF_THE_RUN
            tensors.leave_out(str(top), why, nbytes_in(value))
            continue
        rename, weights = model.rename(coordinate, number), {}
        for key, weight in value.items():
            if key.endswith(EXTRA_STATE) or weight is None:
                why = "private state of Transformer Engine, one per rank"
                tensors.leave_out(EXTRA_STATE, why, nbytes_in(weight))
            elif type(weight) is not torch.Tensor:
                kind = weight.by if isinstance(weight, Stub) else type(weight).__name__
                headline = f"{file.directory} has a {kind} there, not a plain tensor"
                way_out = "way out:     save it in Megatron with plain weights (no fp8 parameters)"
                tensors.faults.append(Fault(key, headline, (way_out,)))
            elif weight.dim() and model.is_cut(key) and rules.find(rename.name(key)) is None:
                headline = "no rule of the preset says whether parallelism cuts it"
                shape = f"found:       a tensor of {tuple(weight.shape)} in {file.directory}"
                tensors.faults.append(Fault(rename.name(key), headline, (shape,)))
            elif model.is_tied and key == _OUTPUT:
                tensors.add(name, {EMBEDDING: weight}, rules)
            else:
                weights[key] = weight
        tensors.add(name, weights, rules, rename)


class _Model:
    """What the files of all ranks say of the model, compared with the run's arguments.

    Args:
        layout: Which rank wrote which file.
        vocab_size: Argument of ``megatron_weights``.

    Attributes:
        first_layer: The number of the first layer of ``(block, stage, chunk)``.
        layers: Number of layers by block (``decoder``, ``encoder``).
        experts: Number of experts of an MoE layer; 0 for none.
        is_gated: Whether ``linear_fc1`` joins gate and up.
        vocabulary: Rows without and with padding, and hidden size; None if no row is dropped.
        notes: What to check by hand.

    Raises:
        PlacementError: Files or arguments contradict each other; all faults at once.
    """

    def __init__(self, layout: MegatronLayout, vocab_size: int | None) -> None:
        self.layout, self.sizes = layout, layout.sizes
        self.first_layer: dict[tuple[str, int, int], int] = {}
        self.layers: dict[str, int] = {}
        self.experts = 0
        self.vocabulary: tuple[int, int, int] | None = None
        self.notes: list[str] = []
        self._args = layout.ranks[0].args
        self._faults: list[Fault] = []
        layers: dict[tuple[str, int, int], list[tuple[int, str]]] = {}
        experts: list[tuple[int, str]] = []
        gated: dict[bool, str] = {}
        shapes: list[tuple[tuple[int, ...], str]] = []
        for file in layout.ranks:
            name, stage = file.directory, layout.coordinates[file.directory].pp
            self._check_version(file)
            for number, chunk in file.chunks.items():
                for block, count in self._layers(chunk, name).items():
                    layers.setdefault((block, stage, number), []).append((count, name))
                numbers = [int(m[1] or m[2]) for key in chunk if (m := _EXPERT.search(key))]
                experts += [(1 + max(numbers), name)] if numbers else []
                gated.update({joined: key for key, joined in _gated_keys(chunk)})
                held = [chunk[key] for key in VOCABULARY if key in chunk]
                shapes += [(tuple(t.shape), name) for t in held if getattr(t, "ndim", 0) == 2]
        self._number_layers(layers)
        self._count_experts(experts)
        self.is_gated = self._joins_gate_and_up(gated)
        self._set_vocabulary(shapes, vocab_size)
        raise_faults("the files do not make one model", self._faults)

    @property
    def is_tied(self) -> bool:
        """Whether the output layer is the word embedding."""
        return getattr(self._args, "untie_embeddings_and_output_weights", None) is False

    def is_cut(self, key: str) -> bool:
        """Whether parallelism may cut a tensor, so that it needs a rule."""
        return self.sizes.tp > 1 or (self.sizes.ep > 1 and ".experts." in key)

    def rename(self, coordinate: Coordinate, chunk: int) -> Renames:
        """Return the rename from the names in a model chunk of one file to those of the whole."""
        steps = [
            Renumber(f"{block}.layers.{{}}", range(first, self.layers[block]), self.layers[block])
            for (block, stage, number), first in self.first_layer.items()
            if (stage, number) == (coordinate.pp, chunk)
        ]
        if self.experts:
            ep = self.sizes.ep
            mine = contiguous([self.experts // ep] * ep, at=coordinate.ep)
            steps += [Renumber(pattern, mine, self.experts) for pattern in NUMBERED_EXPERTS]
        return Renames(*steps)

    def rules(self, coordinate: Coordinate) -> PlacementRules:
        """Return the rules for the tensors of one file; a replicated tensor's is None."""
        tp = MeshCoordinate(("tp",), (self.sizes.tp,), (coordinate.tp,))
        etp = MeshCoordinate(("etp",), (self.sizes.etp or self.sizes.tp,), (coordinate.etp,))
        fc1 = [FusedShard(0, 2) if self.is_gated else Shard(0)]
        column, row = CheckpointPlacement(tp, [Shard(0)]), CheckpointPlacement(tp, [Shard(1)])
        rules: dict[Any, CheckpointPlacement | None] = {}
        for expert in ("experts.linear_{}*", "experts.local_experts.*.linear_{}"):
            for kind in ("weight", "bias"):
                rules[expert.format(f"fc1.{kind}")] = CheckpointPlacement(etp, fc1)
            rules[expert.format("fc2.weight")] = CheckpointPlacement(etp, [Shard(1)])
            rules[expert.format("fc2.bias")] = None
        rules |= dict.fromkeys(_REPLICATED)
        for name in VOCABULARY:
            rules[name] = column
            if self.vocabulary is not None:
                words, padded, hidden = self.vocabulary
                tail = () if name.endswith("bias") else (hidden,)
                shapes = {"global_shape": (words, *tail), "padded_shape": (padded, *tail)}
                rules[name] = CheckpointPlacement(tp, [Shard(0)], **shapes)
        for kind in ("weight", "bias"):
            rules |= {f"{name}.{kind}": column for name in _COLUMN}
            rules[f"linear_fc1.{kind}"] = CheckpointPlacement(tp, fc1)
        for name in ("linear_proj", "linear_fc2"):
            rules |= {f"{name}.weight": row, f"{name}.bias": None}
        return PlacementRules(rules)

    def _fault(self, where: str, headline: str, *details: str) -> None:
        self._faults.append(Fault(where, headline, details))

    def _check_equal(self, where: str, headline: str, values: list[tuple[Any, str]]) -> None:
        if differing := differences(values):
            self._fault(where, f"{headline}: {differing}")

    def _check_declared(self, where: str, value: int, headline: str, argument: str) -> None:
        declared = getattr(self._args, argument, None)
        if isinstance(declared, int) and declared != value:
            self._fault(where, f"{headline}, where args say {declared}")

    def _check_version(self, file: RankFile) -> None:
        # Megatron takes a file without a version for one of version 0.
        version = file.contents.get("checkpoint_version", 0)
        if not isinstance(version, int | float) or version < 2.0:
            held = "is of" if "checkpoint_version" in file.contents else "names none, so it is of"
            self._fault(
                f"{file.directory}/{WEIGHTS}",
                f"{held} checkpoint version {version}, which orders query, key and value otherwise",
                "way out:     load it in Megatron, which reorders them, and save it again; or put "
                "checkpoint_version 3.0 into files that another tool wrote in today's order",
            )
        if not file.keys:
            self._fault(f"{file.directory}/{WEIGHTS}", "has no model in it")

    def _layers(self, chunk: Mapping[str, Any], name: str) -> dict[str, int]:
        """Return the number of layers of each block in a model chunk."""
        numbers: dict[str, set[int]] = {}
        for key in chunk:
            if match := _LAYER.search(key):
                numbers.setdefault(match[1], set()).add(int(match[2]))
        for block, held in numbers.items():
            if held != set(range(len(held))):
                self._fault(f"{name}: {block}.layers", "are not numbered from 0 up")
        return {block: len(held) for block, held in numbers.items()}

    def _number_layers(self, counts_of: dict[tuple[str, int, int], list[tuple[int, str]]]) -> None:
        # Chunk 0 of all stages comes first, then chunk 1 of all stages.
        for block, stage, chunk in sorted(counts_of, key=lambda key: (key[0], key[2], key[1])):
            counts = counts_of[block, stage, chunk]
            headline = f"stage {stage}, chunk {chunk} has different numbers"
            self._check_equal(f"{block}.layers", headline, counts)
            first = self.first_layer[block, stage, chunk] = self.layers.get(block, 0)
            self.layers[block] = first + max(counts)[0]
        if layers := self.layers.get("decoder"):
            headline = f"{layers} in all stages together"
            self._check_declared("decoder.layers", layers, headline, "num_layers")

    def _count_experts(self, counts: list[tuple[int, str]]) -> None:
        if not counts:
            return
        self._check_equal("experts", "differ in number from file to file", counts)
        most, ep = max(counts)[0], self.sizes.ep
        self.experts = most * ep
        headline = f"{most} in a file, {self.experts} over EP {ep}"
        self._check_declared("experts", self.experts, headline, "num_experts")
        if self.sizes.etp is None and self.sizes.tp > 1:
            self._fault(
                "experts",
                "may be cut or replicated over TP: nothing in the files says which",
                "way out:     expert_tensor_parallel_size= (--expert-tensor-parallel-size)",
            )

    def _joins_gate_and_up(self, keys: dict[bool, str]) -> bool:
        declared = getattr(self._args, "swiglu", None)
        if len(keys) > 1:
            headline = f"is gate and up in {keys[True]}, one tensor in {keys[False]}"
            self._fault("linear_fc1", headline)
        elif declared is True and False in keys:
            headline = "has as many rows as linear_fc2 columns, and args say swiglu"
            self._fault("linear_fc1", headline)
        return next(iter(keys), bool(declared))

    def _set_vocabulary(
        self, shapes: list[tuple[tuple[int, ...], str]], vocab_size: int | None
    ) -> None:
        self._check_equal("embedding", "differs in shape from file to file", shapes)
        if not shapes:
            return
        (local, hidden), _ = shapes[0]
        padded = local * self.sizes.tp
        headline = f"{padded} rows over all ranks"
        self._check_declared("embedding", padded, headline, "padded_vocab_size")
        if vocab_size is None:
            vocab_size = getattr(self._args, "vocab_size", None)
            is_null = getattr(self._args, "tokenizer_type", None) == "NullTokenizer"
            if is_null and isinstance(vocab_size, int):
                # This tokenizer's size lacks the end-of-document token, which is the last one.
                vocab_size = min(padded, vocab_size + 1)
        if not isinstance(vocab_size, int):
            self.notes.append(
                f"all {padded} rows of the vocabulary are kept, padding included: neither args nor "
                "vocab_size= (--vocab-size) says how many are words"
            )
        elif not 1 <= vocab_size <= padded:
            self._fault("embedding", f"vocab_size {vocab_size}, but it has {padded} rows")
        elif vocab_size < padded:
            self.vocabulary = vocab_size, padded, hidden


def _gated_keys(chunk: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield ``(key, whether it joins gate and up)`` of ``linear_fc1`` weights, by their rows."""
    for key, value in chunk.items():
        match = _FC1.search(key)
        if match is None or not isinstance(value, torch.Tensor):
            continue
        second = chunk.get(f"{key[: match.start()]}linear_fc2.{match[1]}")
        if isinstance(second, torch.Tensor) and second.dim() == value.dim() == 2:
            if len(value) == 2 * second.shape[1]:
                yield key, True
            elif len(value) == second.shape[1]:
                yield key, False
