"""Megatron-LM's files as one DCP checkpoint of whole tensors.

Each legacy file is one rank's part. Its coordinate comes from its name and the run's arguments, its
layers and experts get their numbers in the whole model, and the rules place each tensor.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial

from dcp_placements.errors import Fault, PlacementError, raise_faults
from dcp_placements.formats.megatron.files import WEIGHTS, RankFiles
from dcp_placements.formats.megatron.layout import MegatronLayout, megatron_layout
from dcp_placements.formats.megatron.model import learn_model
from dcp_placements.formats.megatron.parts import plan_legacy
from dcp_placements.formats.megatron.plan import ImportReport
from dcp_placements.offline.chunk_writer import write_chunks
from dcp_placements.offline.declared import Progress
from dcp_placements.offline.directory import Directory
from dcp_placements.offline.remote_output import AnyOutput, output_at


def import_megatron(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    preset: str = "megatron_core",
    vocab_size: int | None = None,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel_size: int | None = None,
    progress: Progress = lambda done, total: None,
) -> ImportReport:
    """Turn ``mp_rank_*`` files into an ordinary DCP checkpoint of the model's keys, chunk by chunk.

    Keys are Megatron's own, with layers and experts numbered over all ranks; gate is before up, and
    the padding rows of the vocabulary are left out. Layers are counted over the stages in the order
    of their chunks; a tied output layer is stored once, as the word embedding. Optimizer state is
    left out.

    Args:
        source: The directory of one iteration, or of all with the tracker file.
        out: The checkpoint's directory or URL, which must not exist. A directory appears when all
            is written.
        preset: The preset for the names of the weights; ``"megatron_core"``.
        vocab_size: Rows of the vocabulary without padding; by default from the run's arguments,
            and all rows if they do not say.
        expert_parallel_size: As in ``megatron_layout``; needed if the directory is ambiguous.
        expert_tensor_parallel_size: Of the experts, if the files hold no arguments.
        progress: Called with the bytes written, and those to write.

    Returns:
        What was written, found equal, and left out.

    Raises:
        CannotLook: There is no Megatron checkpoint, or a file cannot be read or is refused; ``out``
            exists, or another process is writing it; the files were overwritten meanwhile.
        PlacementError: It is a DCP checkpoint already (``torch_dist``); files are missing or
            contradict each other, a weight has no rule, or chunks do not make whole tensors; all of
            them at once, and nothing is written.
    """
    if preset != "megatron_core":
        raise PlacementError(f"there is no preset {preset!r} for this: use 'megatron_core'")
    with output_at(out, source=source) as output:
        layout = megatron_layout(source, expert_parallel_size=expert_parallel_size)
        if layout.layout == "ambiguous":
            raise PlacementError(f"{layout.path}: {layout.reason}")
        raise_faults(
            f"{layout.path} cannot be imported as it is",
            [Fault("checkpoint", line) for line in layout.mismatches],
        )
        if layout.format != "torch":
            raise PlacementError(
                f"{layout.path}: this is a DCP checkpoint already, of whole tensors "
                f"({layout.format})\n"
                "    way out:     load it as it is; where all layers are one tensor, with "
                "rename=Stack('decoder.layers.{}', total=layers)"
            )
        layout = _with_expert_cut(layout, expert_tensor_parallel_size)
        return _import_legacy(layout, output, vocab_size, progress)


def _import_legacy(
    layout: MegatronLayout,
    output: AnyOutput,
    vocab_size: int | None,
    progress: Progress,
) -> ImportReport:
    """Import ``mp_rank_*`` files: each is one rank's part."""
    files = RankFiles(layout.path)
    read = [f"{name}/{WEIGHTS}" for name in layout.coordinates]
    directory = Directory(layout.path)
    check = partial(directory.check_versions, directory.versions(read))
    args = files.open(next(iter(layout.coordinates))).get("args")
    if not isinstance(args, argparse.Namespace):
        args = argparse.Namespace()
    model = learn_model(files, layout.coordinates, layout.sizes, args, vocab_size)
    plan = plan_legacy(layout, files, model)
    raise_faults(f"{layout.path} cannot be put together", plan.faults)
    plan.compare_copies()
    raise_faults(f"{layout.path}: files contradict each other", plan.faults)
    write_chunks(output, plan.targets, plan.pieces.values(), progress, check)
    return plan.report(layout, output.path, model.notes)


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
