"""Where each tensor of Megatron-LM's legacy files belongs in the whole tensors.

Each file is one rank's part of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dcp_placements.bind.state_dict import place
from dcp_placements.errors import PlacementError
from dcp_placements.formats.megatron.files import (
    DISTRIBUTED,
    EMBEDDING,
    WEIGHTS,
    RankFiles,
    chunk_number,
    model_chunks,
)
from dcp_placements.formats.megatron.layout import MegatronLayout
from dcp_placements.formats.megatron.model import MegatronModel
from dcp_placements.formats.megatron.plan import OF_THE_RUN, OPTIMIZER, ImportPlan
from dcp_placements.formats.megatron.torch_files import tensors_in
from dcp_placements.layout.sharding import Box
from dcp_placements.names.renames import Renames
from dcp_placements.offline.chunk_writer import Piece, Target
from dcp_placements.rules.patterns import PlacementRules

OUTPUT = "output_layer.weight"

_EXTRA_STATE = "_extra_state"


def plan_legacy(
    layout: MegatronLayout,
    files: RankFiles,
    model: MegatronModel,
) -> ImportPlan:
    """Return the plan of an import of ``mp_rank_*`` files; no weight is read.

    Raises:
        PlacementError: Bytes of the source that the plan does not account for.
    """
    plan = ImportPlan()
    nbytes = 0
    for name, at in layout.coordinates.items():
        contents = files.open(name)
        nbytes += _nbytes(contents)
        renames = {number: model.rename(at, number) for number, _ in model_chunks(contents)}
        part = _Part(plan, files, model, name, model.rules(at), renames)
        for top, value in contents.items():
            number = chunk_number(top, value)
            if number is not None:
                part.place_chunk(top, value, number)
            else:
                why = OPTIMIZER if top == "optimizer" else OF_THE_RUN
                plan.leave_out(str(top), why, _nbytes(value))
        for file in sorted((layout.path / name).iterdir()):
            if file.name != WEIGHTS:
                why = OPTIMIZER if file.name == DISTRIBUTED else "another file, which is not read"
                nbytes += file.stat().st_size
                plan.leave_out(file.name, why, file.stat().st_size)
    plan.left_out = dict(sorted(plan.left_out.items()))
    plan.check_whole()
    planned = plan.report(layout, layout.path, ()).source_nbytes
    if not plan.faults and planned != nbytes:
        raise PlacementError(f"{layout.path}: {nbytes} bytes, of which {planned} are accounted for")
    return plan


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of the model, placed in the whole: its chunks go into the plan."""

    plan: ImportPlan
    files: RankFiles
    model: MegatronModel
    name: str
    rules: PlacementRules
    renames: Mapping[int, Renames]

    def place_chunk(self, top: str, chunk: Mapping[str, Any], number: int) -> None:
        """Place the weights of one model chunk."""
        for key, value in chunk.items():
            if key.endswith(_EXTRA_STATE) or value is None:
                why = "private state of Transformer Engine, one per rank"
                self.plan.leave_out(_EXTRA_STATE, why, _nbytes(value))
            elif isinstance(value, torch.Tensor):
                self._place(top, key, self.renames[number].name(key), value)
            else:
                self.plan.fault(
                    key,
                    f"{self.name} has a {type(value).__name__} there, not a plain tensor",
                    "way out:     save it in Megatron with plain weights (no fp8 parameters)",
                )

    def _place(self, top: str, key: str, parameter: str, tensor: torch.Tensor) -> None:
        """Note the chunks of a parameter, which the file has as ``key`` of the chunk ``top``."""
        plan = self.plan
        is_tied = self.model.tied and parameter == OUTPUT
        fqn = EMBEDDING if is_tied else parameter
        if tensor.dim() and self._needs_rule(fqn) and self.rules.find(fqn) is None:
            plan.fault(
                fqn,
                "no rule of the preset says whether parallelism cuts it",
                f"found:       a tensor of {tuple(tensor.shape)} in {self.name}",
            )
            return
        placing = place({fqn: tensor}, self.rules)
        if placing.faults:
            plan.faults += placing.faults
            return
        placed = placing.placed.get(fqn)
        whole = Box.whole(tuple(tensor.shape))
        target, parts = Target(whole.sizes, tensor.dtype), [(whole, whole)]
        if placed is not None:
            target = Target(placed.global_shape, tensor.dtype)
            parts = [(Box(chunk.local_offsets, chunk.sizes), chunk.box) for chunk in placed.chunks]
        if not plan.declare(fqn, target, self.name):
            return
        # Elements in no part are padding.
        plan.padding += tensor.nbytes
        for local, box in parts:
            nbytes = box.numel * tensor.itemsize
            plan.padding -= nbytes
            read = partial(_read, self.files, self.name, top, key, local, nbytes)
            if not plan.add(Piece(fqn, box, self.name, nbytes, read)) and is_tied:
                plan.tied += nbytes

    def _needs_rule(self, parameter: str) -> bool:
        sizes = self.model.sizes
        return sizes.tp > 1 or (sizes.ep > 1 and ".experts." in parameter)


def _read(files: RankFiles, name: str, top: str, key: str, local: Box, nbytes: int) -> torch.Tensor:
    """Return a part of a tensor; mapped, not copied."""
    tensor: torch.Tensor = files.open(name, nbytes)[top][key].detach()
    for dim, (offset, size) in enumerate(zip(*local, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))
