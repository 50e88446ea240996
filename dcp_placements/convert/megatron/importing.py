"""Megatron-LM's files as a source of whole tensors.

Each ``mp_rank_*`` file is one rank's part. Its coordinate comes from its name and the run's
arguments, its layers and experts get their numbers in the whole model, and the rules place each
tensor. Every byte is written, found equal to a byte that is, or left out with a reason.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcp_placements.convert.megatron.files import (
    DISTRIBUTED,
    EMBEDDING,
    WEIGHTS,
    Coordinate,
    chunk_number,
)
from dcp_placements.convert.megatron.layout import MegatronLayout, megatron_layout
from dcp_placements.convert.megatron.model import MegatronModel, learn_model
from dcp_placements.convert.rank_files import RankTensors
from dcp_placements.convert.sources import Source
from dcp_placements.convert.torch_files import load_torch_file, tensors_in
from dcp_placements.errors import Fault, PlacementError, raise_faults
from dcp_placements.offline.directory import Directory

OUTPUT = "output_layer.weight"
_EXTRA_STATE = "_extra_state"

OF_THE_RUN = "of the run, not of the model"
OPTIMIZER = "only weights are imported: load optimizer state in Megatron, and save it as torch_dist"


def megatron_source(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel_size: int | None = None,
) -> Source:
    """Return ``mp_rank_*`` files as a source of the model's whole tensors.

    Keys are Megatron's own, with layers and experts numbered over all ranks; gate is before up, and
    the padding rows of the vocabulary are left out. Layers are counted over the stages in the order
    of their chunks; a tied output layer is stored once, as the word embedding. Optimizer state is
    left out.

    Args:
        path: The directory of one iteration, or of all with the tracker file.
        vocab_size: Rows of the vocabulary without padding; by default from the run's arguments,
            and all rows if they do not say.
        expert_parallel_size: As in ``megatron_layout``; needed if the directory is ambiguous.
        expert_tensor_parallel_size: Of the experts, if the files hold no arguments.

    Raises:
        CannotLook: There are no such files, or one cannot be read or is refused.
        PlacementError: Files are missing or contradict each other, a weight has no rule, or parts
            do not make whole tensors; all of them at once.
    """
    layout = megatron_layout(path, expert_parallel_size=expert_parallel_size)
    if layout.layout == "ambiguous":
        raise PlacementError(f"{layout.path}: {layout.reason}")
    raise_faults(
        f"{layout.path} cannot be imported as it is",
        [Fault("checkpoint", line) for line in layout.mismatches],
    )
    layout = _with_expert_cut(layout, expert_tensor_parallel_size)
    directory = Directory(layout.path)
    versions = directory.versions([f"{name}/{WEIGHTS}" for name in layout.coordinates])
    contents = {name: load_torch_file(layout.path / name / WEIGHTS) for name in layout.coordinates}
    args = next(iter(contents.values())).get("args")
    if not isinstance(args, argparse.Namespace):
        args = argparse.Namespace()
    model = learn_model(contents, layout.coordinates, layout.sizes, args, vocab_size)
    found = RankTensors()
    nbytes = 0
    for name, at in layout.coordinates.items():
        nbytes += _nbytes(contents[name])
        _Part(found, model, name, at).place(contents[name])
        for file in sorted((layout.path / name).iterdir()):
            if file.name != WEIGHTS:
                why = OPTIMIZER if file.name == DISTRIBUTED else "another file, which is not read"
                nbytes += file.stat().st_size
                found.leave_out(file.name, why, file.stat().st_size)
    if not found.faults and found.nbytes != nbytes:
        raise PlacementError(
            f"{layout.path}: {nbytes} bytes, of which {found.nbytes} are accounted for"
        )
    return found.source(directory, versions, (f"layout: {layout.reason}", *model.notes))


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of the model."""

    found: RankTensors
    model: MegatronModel
    name: str
    at: Coordinate

    def place(self, contents: Mapping[Any, Any]) -> None:
        """Place what a file holds."""
        for top, value in contents.items():
            number = chunk_number(top, value)
            if number is not None:
                self._place_chunk(value, number)
            else:
                why = OPTIMIZER if top == "optimizer" else OF_THE_RUN
                self.found.leave_out(str(top), why, _nbytes(value))

    def _place_chunk(self, chunk: Mapping[str, Any], number: int) -> None:
        """Place the weights of one model chunk."""
        found, rename, rules = self.found, self.model.rename(self.at, number), self._rules
        placed: dict[str, torch.Tensor] = {}
        for key, value in chunk.items():
            if key.endswith(_EXTRA_STATE) or value is None:
                why = "private state of Transformer Engine, one per rank"
                found.leave_out(_EXTRA_STATE, why, _nbytes(value))
            elif type(value) is not torch.Tensor:
                headline = f"{self.name} has a {type(value).__name__} there, not a plain tensor"
                way_out = "way out:     save it in Megatron with plain weights (no fp8 parameters)"
                found.faults.append(Fault(key, headline, (way_out,)))
            else:
                fqn = rename.name(key)
                is_tied = self.model.tied and fqn == OUTPUT
                name = EMBEDDING if is_tied else fqn
                if value.dim() and self._needs_rule(name) and rules.find(name) is None:
                    headline = "no rule of the preset says whether parallelism cuts it"
                    shape = f"found:       a tensor of {tuple(value.shape)} in {self.name}"
                    found.faults.append(Fault(name, headline, (shape,)))
                elif is_tied:
                    copied = found.copied
                    found.add(self.name, {EMBEDDING: value}, rules)
                    found.tied += found.copied - copied
                    found.copied = copied
                else:
                    placed[fqn] = value
        found.add(self.name, placed, rules)

    @property
    def _rules(self) -> Any:
        return self.model.rules(self.at)

    def _needs_rule(self, parameter: str) -> bool:
        sizes = self.model.sizes
        return sizes.tp > 1 or (sizes.ep > 1 and ".experts." in parameter)


def _nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


def _with_expert_cut(layout: MegatronLayout, etp: int | None) -> MegatronLayout:
    """Return the layout with the given tensor-parallel size of the experts."""
    known, tp = layout.sizes.etp, layout.sizes.tp
    if etp is None or etp == known:
        return layout
    if known is not None or tp % etp:
        raise PlacementError(
            f"expert_tensor_parallel_size={etp} does not fit: "
            + (f"the files say {known}" if known is not None else f"it must divide TP {tp}")
        )
    # ETP is innermost and divides TP, so it counts the same ranks anew.
    coordinates = {n: replace(at, etp=at.tp % etp) for n, at in layout.coordinates.items()}
    return replace(layout, sizes=replace(layout.sizes, etp=etp), coordinates=coordinates)
