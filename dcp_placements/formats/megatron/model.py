"""What the files of a Megatron-LM run say together of the model: layers, experts, vocabulary.

A file counts its layers from 0 in each model chunk and its experts from 0 on its expert-parallel
rank, holds its share of a padded vocabulary, and does not say what ``linear_fc1`` joins. What holds
for the whole model is put together here, and held against the run's arguments. No tensor is read.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_placements.errors import Fault, format_names, raise_faults
from dcp_placements.formats.megatron.files import (
    WEIGHTS,
    Coordinate,
    RankFiles,
    Sizes,
    model_chunks,
)
from dcp_placements.names.renames import Renames
from dcp_placements.names.renumber import Renumber, contiguous
from dcp_placements.presets.megatron_core import NUMBERED_EXPERTS, VOCABULARY
from dcp_placements.presets.megatron_core_names import megatron_core_names
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.rules.patterns import PlacementRules

_LAYER = re.compile(r"(?:^|\.)(decoder|encoder)\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.|linear_fc[12]\.(?:weight|bias)(\d+)$)")
_FC1 = re.compile(r"linear_fc1\.(weight\d*)$")

ByFile = dict[Any, list[str]]
"""Something that the files say, and which of them."""


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A model, as far as its weights' places depend on it.

    Attributes:
        sizes: Of the run.
        layers: How many, by block (``decoder``, ``encoder``).
        first_layer: The number of the first layer of ``(block, stage, chunk)``.
        experts: Of an MoE layer; 0 for none.
        gated: Whether ``linear_fc1`` joins gate and up.
        tied: Whether the output layer is the word embedding.
        vocabulary: Rows without and with padding, and hidden size; None where none is dropped.
        notes: What to look at.
    """

    sizes: Sizes
    layers: Mapping[str, int]
    first_layer: Mapping[tuple[str, int, int], int]
    experts: int
    gated: bool
    tied: bool
    vocabulary: tuple[int, int, int] | None
    notes: tuple[str, ...]

    def rename(self, at: Coordinate, chunk: int) -> Renames:
        """Return how the names in a model chunk of one file become those of the whole."""
        steps = [
            Renumber(f"{block}.layers.{{}}", range(first, self.layers[block]), self.layers[block])
            for (block, stage, number), first in self.first_layer.items()
            if (stage, number) == (at.pp, chunk)
        ]
        if self.experts:
            ep = self.sizes.ep or 1
            mine = contiguous([self.experts // ep] * ep, at=at.ep)
            steps += [Renumber(pattern, mine, self.experts) for pattern in NUMBERED_EXPERTS]
        return Renames(*steps)

    def rules(self, at: Coordinate) -> PlacementRules:
        """Return where the tensors of one file lie."""
        tp = self.sizes.tp or 1
        return megatron_core_names(
            MeshCoordinate(("tp",), (tp,), (at.tp,)),
            MeshCoordinate(("etp",), (self.sizes.etp or tp,), (at.etp,)),
            gated=self.gated,
            vocabulary=self.vocabulary,
        )


def learn_model(
    files: RankFiles,
    coordinates: Mapping[str, Coordinate],
    sizes: Sizes,
    args: argparse.Namespace,
    vocab_size: int | None,
) -> MegatronModel:
    """Return what the files say together.

    Args:
        files: The files.
        coordinates: Where the writer of each stands.
        sizes: Of the run.
        args: The run's arguments; empty where the files hold none.
        vocab_size: Rows of the vocabulary without padding; None for what ``args`` say.

    Raises:
        PlacementError: What contradicts itself, all at once.
    """
    learner = _Learner(sizes, args, vocab_size)
    for name, at in coordinates.items():
        learner.look(name, at, files.open(name))
    return learner.model()


@dataclass(slots=True)
class _Learner:
    sizes: Sizes
    args: argparse.Namespace
    vocab_size: int | None
    counts: dict[tuple[str, int, int], ByFile] = field(default_factory=dict)
    local_experts: ByFile = field(default_factory=dict)
    forms: dict[bool, str] = field(default_factory=dict)
    rows: ByFile = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fault(self, where: str, headline: str, *details: str) -> None:
        self.faults.append(Fault(where, headline, details))

    def look(self, name: str, at: Coordinate, held: Mapping[str, Any]) -> None:
        """Note what one file says."""
        self._check_version(name, held)
        chunks = model_chunks(held)
        if not any(chunk for _, chunk in chunks):
            self.fault(f"{name}/{WEIGHTS}", "has no model in it")
        for number, chunk in chunks:
            layers: dict[str, set[int]] = {}
            experts = []
            for key, value in chunk.items():
                if found := _LAYER.search(key):
                    layers.setdefault(found[1], set()).add(int(found[2]))
                if found := _EXPERT.search(key):
                    experts.append(int(found[1] or found[2]))
                if key in VOCABULARY and isinstance(value, torch.Tensor) and value.dim() == 2:
                    self.rows.setdefault(tuple(value.shape), []).append(name)
            for block, numbers in layers.items():
                if numbers != set(range(len(numbers))):
                    self.fault(f"{name}: {block}.layers", "are not numbered from 0 up")
                by_file = self.counts.setdefault((block, at.pp, number), {})
                by_file.setdefault(len(numbers), []).append(name)
            if experts:
                self.local_experts.setdefault(1 + max(experts), []).append(name)
            self.forms.update({gated: key for key, gated in _forms(chunk)})

    def model(self) -> MegatronModel:
        """Return the whole.

        Raises:
            PlacementError: What does not fit.
        """
        first_layer, layers = self._number_layers()
        made = MegatronModel(
            self.sizes,
            layers,
            first_layer,
            self._count_experts(),
            self._form(),
            getattr(self.args, "untie_embeddings_and_output_weights", None) is False,
            self._vocabulary(),
            tuple(self.notes),
        )
        raise_faults("the files do not make one model", self.faults)
        return made

    def _check_version(self, name: str, held: Mapping[str, Any]) -> None:
        version = held.get("checkpoint_version", 3.0)
        if isinstance(version, int | float) and version < 2.0:
            self.fault(
                f"{name}/{WEIGHTS}",
                f"is of checkpoint version {version}, which orders query, key and value otherwise",
                "way out:     load it in Megatron, which reorders them, and save it anew",
            )

    def _number_layers(self) -> tuple[dict[tuple[str, int, int], int], dict[str, int]]:
        for (block, stage, chunk), found in self.counts.items():
            if len(found) > 1:
                told = f"stage {stage}, chunk {chunk} has different numbers: {_told(found)}"
                self.fault(f"{block}.layers", told)
        first: dict[tuple[str, int, int], int] = {}
        layers: dict[str, int] = {}
        # Chunk 0 of all stages comes first, then chunk 1 of all stages.
        for key in sorted(self.counts, key=lambda key: (key[0], key[2], key[1])):
            first[key] = layers.get(key[0], 0)
            layers[key[0]] = first[key] + max(self.counts[key])
        declared = getattr(self.args, "num_layers", None)
        if isinstance(declared, int) and layers.get("decoder", declared) != declared:
            told = f"{layers['decoder']} in all stages together, where args say {declared}"
            self.fault("decoder.layers", told)
        return first, layers

    def _count_experts(self) -> int:
        found = self.local_experts
        if len(found) > 1:
            self.fault("experts", f"differ in number from file to file: {_told(found)}")
        if not found:
            return 0
        experts = int(max(found)) * (self.sizes.ep or 1)
        declared = getattr(self.args, "num_experts", None)
        if isinstance(declared, int) and declared != experts:
            told = f"{max(found)} in a file, {experts} over EP {self.sizes.ep}, where args say "
            self.fault("experts", told + str(declared))
        if self.sizes.etp is None and (self.sizes.tp or 1) > 1:
            self.fault(
                "experts",
                "may be cut or replicated over TP: nothing in the files says which",
                "way out:     expert_tensor_parallel_size= (--expert-tensor-parallel-size)",
            )
        return experts

    def _form(self) -> bool:
        forms = self.forms
        if len(forms) > 1:
            told = f"is gate and up in {forms[True]}, and one tensor in {forms[False]}"
            self.fault("linear_fc1", told)
        declared = getattr(self.args, "swiglu", None)
        gated = next(iter(forms), bool(declared))
        if declared is True and not gated:
            self.fault("linear_fc1", "has as many rows as linear_fc2 columns, and args say swiglu")
        return gated

    def _vocabulary(self) -> tuple[int, int, int] | None:
        if not self.rows:
            return None
        if len(self.rows) > 1:
            self.fault("embedding", f"differs in shape from file to file: {_told(self.rows)}")
            return None
        ((local, hidden),) = self.rows
        padded = local * (self.sizes.tp or 1)
        declared = getattr(self.args, "padded_vocab_size", None)
        if isinstance(declared, int) and declared != padded:
            self.fault("embedding", f"{padded} rows over all ranks, where args say {declared}")
        true = self.vocab_size
        if true is None and isinstance(told := getattr(self.args, "vocab_size", None), int):
            # It counts no end-of-document token, which this tokenizer puts behind all words.
            kind = getattr(self.args, "tokenizer_type", None)
            true = min(padded, told + 1) if kind == "NullTokenizer" else told
        if true is None:
            self.notes.append(
                f"all {padded} rows of the vocabulary are kept, padding included: neither args nor "
                "vocab_size= (--vocab-size) says how many are words"
            )
        elif true > padded or true < 1:
            self.fault("embedding", f"vocab_size {true}, but it has {padded} rows")
        elif true < padded:
            return true, padded, hidden
        return None


def _forms(chunk: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield ``(key, whether it is gate and up)`` of the ``linear_fc1`` weights: by rows alone."""
    for key, value in chunk.items():
        found = _FC1.search(key)
        if found is None or not isinstance(value, torch.Tensor):
            continue
        second = chunk.get(f"{key[: found.start()]}linear_fc2.{found[1]}")
        if isinstance(second, torch.Tensor) and second.dim() == value.dim() == 2:
            if len(value) == 2 * second.shape[1]:
                yield key, True
            elif len(value) == second.shape[1]:
                yield key, False


def _told(found: ByFile) -> str:
    return "; ".join(f"{what} in {format_names(names)}" for what, names in found.items())
