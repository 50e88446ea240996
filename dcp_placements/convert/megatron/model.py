"""The model that the files of a Megatron-LM run make: its layers, experts and vocabulary.

A file numbers its layers from 0 in each model chunk and its experts from 0 on its expert-parallel
rank, holds one shard of a padded vocabulary, and does not say if ``linear_fc1`` joins gate and up.
The sizes of the whole model are derived here, and compared with the run's arguments. No tensor is
read.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcp_placements.convert.megatron.files import (
    WEIGHTS,
    Coordinate,
    Sizes,
    model_chunks,
)
from dcp_placements.errors import Fault, format_names, raise_faults
from dcp_placements.names.renames import Renames, Renumber, contiguous
from dcp_placements.presets.megatron_core import NUMBERED_EXPERTS, VOCABULARY
from dcp_placements.presets.megatron_core_names import megatron_core_names
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.rules.patterns import PlacementRules

_LAYER = re.compile(r"(?:^|\.)(decoder|encoder)\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.|linear_fc[12]\.(?:weight|bias)(\d+)$)")
_FC1 = re.compile(r"linear_fc1\.(weight\d*)$")

ByFile = dict[Any, list[str]]
"""Values, each with the files that have it."""


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """The facts about a model that its weights' layouts depend on."""

    sizes: Sizes  # of the run
    layers: Mapping[str, int]  # number of layers by block (``decoder``, ``encoder``)
    # The number of the first layer of ``(block, stage, chunk)``
    first_layer: Mapping[tuple[str, int, int], int]
    experts: int  # number of experts of an MoE layer; 0 for none
    gated: bool  # whether ``linear_fc1`` joins gate and up
    tied: bool  # whether the output layer is the word embedding
    # Rows without and with padding, and hidden size; None if no row is dropped
    vocabulary: tuple[int, int, int] | None
    notes: tuple[str, ...]  # what to check by hand

    def rename(self, at: Coordinate, chunk: int) -> Renames:
        """Return the rename from the names in a model chunk of one file to those of the whole."""
        steps = [
            Renumber(f"{block}.layers.{{}}", range(first, self.layers[block]), self.layers[block])
            for (block, stage, number), first in self.first_layer.items()
            if (stage, number) == (at.pp, chunk)
        ]
        if self.experts:
            ep = self.sizes.ep
            mine = contiguous([self.experts // ep] * ep, at=at.ep)
            steps += [Renumber(pattern, mine, self.experts) for pattern in NUMBERED_EXPERTS]
        return Renames(*steps)

    def rules(self, at: Coordinate) -> PlacementRules:
        """Return the rules for the tensors of one file."""
        tp = self.sizes.tp
        return megatron_core_names(
            MeshCoordinate(("tp",), (tp,), (at.tp,)),
            MeshCoordinate(("etp",), (self.sizes.etp or tp,), (at.etp,)),
            gated=self.gated,
            vocabulary=self.vocabulary,
        )


def learn_model(
    contents: Mapping[str, Mapping[str, Any]],
    coordinates: Mapping[str, Coordinate],
    sizes: Sizes,
    args: argparse.Namespace,
    vocab_size: int | None,
) -> MegatronModel:
    """Return the model that the files make.

    Raises:
        PlacementError: Files or arguments that contradict each other, all at once.
    """
    reader = _ModelReader(sizes, args)
    for name, at in coordinates.items():
        reader.read(name, at, contents[name])
    first_layer, layers = reader.number_layers()
    model = MegatronModel(
        sizes,
        layers,
        first_layer,
        reader.count_experts(),
        reader.is_gated(),
        getattr(args, "untie_embeddings_and_output_weights", None) is False,
        reader.vocabulary(vocab_size),
        tuple(reader.notes),
    )
    raise_faults("the files do not make one model", reader.faults)
    return model


class _ModelReader:
    """Collects facts from the files of all ranks, and compares them with the run's arguments."""

    def __init__(self, sizes: Sizes, args: argparse.Namespace) -> None:
        self.sizes = sizes
        self.args = args
        self.layer_counts: dict[tuple[str, int, int], ByFile] = {}
        self.local_experts: ByFile = {}
        self.gated_keys: dict[bool, str] = {}
        self.vocabulary_shapes: ByFile = {}
        self.faults: list[Fault] = []
        self.notes: list[str] = []

    def fault(self, where: str, headline: str, *details: str) -> None:
        self.faults.append(Fault(where, headline, details))

    def check_equal(self, where: str, headline: str, values: ByFile) -> None:
        if len(values) > 1:
            files = "; ".join(
                f"{value} in {format_names(names)}" for value, names in values.items()
            )
            self.fault(where, f"{headline}: {files}")

    def declared(self, argument: str) -> int | None:
        """Return an argument of the run, if it is a number."""
        value = getattr(self.args, argument, None)
        return value if isinstance(value, int) else None

    def read(self, name: str, at: Coordinate, contents: Mapping[str, Any]) -> None:
        """Collect the facts of one file."""
        # Megatron takes a file without a version for one of version 0.
        version = contents.get("checkpoint_version", 0)
        if not isinstance(version, int | float) or version < 2.0:
            held = "is of" if "checkpoint_version" in contents else "names none, so it is of"
            self.fault(
                f"{name}/{WEIGHTS}",
                f"{held} checkpoint version {version}, which orders query, key and value otherwise",
                "way out:     load it in Megatron, which reorders them, and save it again; or put "
                "checkpoint_version 3.0 into files that another tool wrote in today's order",
            )
        chunks = model_chunks(contents)
        if not any(chunk for _, chunk in chunks):
            self.fault(f"{name}/{WEIGHTS}", "has no model in it")
        for number, chunk in chunks:
            layers: dict[str, set[int]] = {}
            experts = []
            for key, value in chunk.items():
                if match := _LAYER.search(key):
                    layers.setdefault(match[1], set()).add(int(match[2]))
                if match := _EXPERT.search(key):
                    experts.append(int(match[1] or match[2]))
                if key in VOCABULARY and isinstance(value, torch.Tensor) and value.dim() == 2:
                    self.vocabulary_shapes.setdefault(tuple(value.shape), []).append(name)
            for block, numbers in layers.items():
                if numbers != set(range(len(numbers))):
                    self.fault(f"{name}: {block}.layers", "are not numbered from 0 up")
                by_file = self.layer_counts.setdefault((block, at.pp, number), {})
                by_file.setdefault(len(numbers), []).append(name)
            if experts:
                self.local_experts.setdefault(1 + max(experts), []).append(name)
            self.gated_keys.update({gated: key for key, gated in _gated_keys(chunk)})

    def number_layers(self) -> tuple[dict[tuple[str, int, int], int], dict[str, int]]:
        """Return the first layer of each ``(block, stage, chunk)``, and each block's layers."""
        for (block, stage, chunk), counts in self.layer_counts.items():
            headline = f"stage {stage}, chunk {chunk} has different numbers"
            self.check_equal(f"{block}.layers", headline, counts)
        first: dict[tuple[str, int, int], int] = {}
        layers: dict[str, int] = {}
        # Chunk 0 of all stages comes first, then chunk 1 of all stages.
        for key in sorted(self.layer_counts, key=lambda key: (key[0], key[2], key[1])):
            first[key] = layers.get(key[0], 0)
            layers[key[0]] = first[key] + max(self.layer_counts[key])
        declared = self.declared("num_layers")
        if declared is not None and layers.get("decoder", declared) != declared:
            differ = f"{layers['decoder']} in all stages together, where args say {declared}"
            self.fault("decoder.layers", differ)
        return first, layers

    def count_experts(self) -> int:
        """Return the number of experts of an MoE layer."""
        counts = self.local_experts
        self.check_equal("experts", "differ in number from file to file", counts)
        if not counts:
            return 0
        experts = int(max(counts)) * self.sizes.ep
        declared = self.declared("num_experts")
        if declared is not None and declared != experts:
            self.fault(
                "experts",
                f"{max(counts)} in a file, {experts} over EP {self.sizes.ep}, where args say "
                f"{declared}",
            )
        if self.sizes.etp is None and self.sizes.tp > 1:
            self.fault(
                "experts",
                "may be cut or replicated over TP: nothing in the files says which",
                "way out:     expert_tensor_parallel_size= (--expert-tensor-parallel-size)",
            )
        return experts

    def is_gated(self) -> bool:
        """Return whether ``linear_fc1`` joins gate and up."""
        keys = self.gated_keys
        if len(keys) > 1:
            self.fault("linear_fc1", f"is gate and up in {keys[True]}, one tensor in {keys[False]}")
        declared = getattr(self.args, "swiglu", None)
        gated = next(iter(keys), bool(declared))
        if declared is True and not gated:
            self.fault("linear_fc1", "has as many rows as linear_fc2 columns, and args say swiglu")
        return gated

    def vocabulary(self, vocab_size: int | None) -> tuple[int, int, int] | None:
        """Return rows without and with padding, and hidden size; None if no row is dropped."""
        shapes = self.vocabulary_shapes
        self.check_equal("embedding", "differs in shape from file to file", shapes)
        if len(shapes) != 1:
            return None
        ((local, hidden),) = shapes
        padded = local * self.sizes.tp
        declared = self.declared("padded_vocab_size")
        if declared is not None and declared != padded:
            self.fault("embedding", f"{padded} rows over all ranks, where args say {declared}")
        if vocab_size is None:
            vocab_size = self.declared("vocab_size")
            is_null = getattr(self.args, "tokenizer_type", None) == "NullTokenizer"
            if is_null and vocab_size is not None:
                # This tokenizer's size lacks the end-of-document token, which is the last one.
                vocab_size = min(padded, vocab_size + 1)
        if vocab_size is None:
            self.notes.append(
                f"all {padded} rows of the vocabulary are kept, padding included: neither args nor "
                "vocab_size= (--vocab-size) says how many are words"
            )
        elif not 1 <= vocab_size <= padded:
            self.fault("embedding", f"vocab_size {vocab_size}, but it has {padded} rows")
        elif vocab_size < padded:
            return vocab_size, padded, hidden
        return None


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
