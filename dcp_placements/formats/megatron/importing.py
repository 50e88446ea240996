"""Megatron-LM's files as one DCP checkpoint of whole tensors.

Each legacy file is one rank's part. Its coordinate comes from its name and the run's arguments, its
layers and experts get their numbers in the whole model, and the rules place each tensor.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial
from math import prod

from dcp_placements.errors import Fault, PlacementError, raise_faults
from dcp_placements.formats.megatron.dist import plan_dist
from dcp_placements.formats.megatron.files import DISTRIBUTED, WEIGHTS, RankFiles
from dcp_placements.formats.megatron.layout import MegatronLayout, megatron_layout
from dcp_placements.formats.megatron.model import learn_model
from dcp_placements.formats.megatron.optimizer import (
    FLAT,
    MASTER,
    NotRecoverable,
    StateEntry,
    optimizer_entries,
)
from dcp_placements.formats.megatron.parts import plan_legacy
from dcp_placements.formats.megatron.plan import OF_THE_RUN, ImportPlan, ImportReport
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.chunk_writer import write_chunks
from dcp_placements.offline.declared import Progress
from dcp_placements.offline.directory import Directory
from dcp_placements.offline.remote_output import AnyOutput, output_at

NOT_ASKED_FOR = "not asked for"


def import_megatron(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    preset: str = "megatron_core",
    vocab_size: int | None = None,
    optimizer: bool | None = None,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel_size: int | None = None,
    progress: Progress = lambda done, total: None,
) -> ImportReport:
    """Turn Megatron's files into an ordinary DCP checkpoint of the model's keys, chunk by chunk.

    From ``mp_rank_*`` files, or from ``torch_dist`` with its axes of layers and experts.

    Keys are Megatron's own, with layers and experts numbered over all ranks; gate is before up, and
    the padding rows of the vocabulary are left out. Optimizer state is
    ``optimizer.state.<parameter>.<name>``. Layers are counted over the stages in the order of their
    chunks; a tied output layer is stored once, as the word embedding.

    Args:
        source: The directory of one iteration, or of all with the tracker file.
        out: The checkpoint's directory or URL, which must not exist. A directory appears when all
            is written.
        preset: The preset for the names of the weights; ``"megatron_core"``.
        vocab_size: Rows of the vocabulary without padding; by default from the run's arguments,
            and all rows if they do not say.
        optimizer: True: an error if its state cannot be imported. False: leave it out. None:
            import it if possible, and otherwise list it with the reason.
        expert_parallel_size: As in ``megatron_layout``; needed if the directory is ambiguous.
        expert_tensor_parallel_size: Of the experts, if the files hold no arguments.
        progress: Called with the bytes written, and those to write.

    Returns:
        What was written, found equal, and left out.

    Raises:
        CannotLook: There is no Megatron checkpoint, or a file cannot be read or is refused; ``out``
            exists, or another process is writing it; the files were overwritten meanwhile.
        PlacementError: Files are missing or contradict each other, a weight has no rule, or chunks
            do not make whole tensors; all of them at once, and nothing is written.
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
            return _import_dist(layout, output, vocab_size, optimizer, progress)
        layout = _with_expert_cut(layout, expert_tensor_parallel_size)
        return _import_legacy(layout, output, vocab_size, optimizer, progress)


def _import_legacy(
    layout: MegatronLayout,
    output: AnyOutput,
    vocab_size: int | None,
    optimizer: bool | None,
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
    states, refusal = _optimizer_states(layout, files, optimizer)
    plan = plan_legacy(layout, files, model, states, refusal)
    raise_faults(f"{layout.path} cannot be put together", plan.faults)
    plan.compare_copies()
    raise_faults(f"{layout.path}: files contradict each other", plan.faults)
    write_chunks(output, plan.targets, plan.pieces.values(), progress, check)
    notes = model.notes
    imported = {entry.name for entries in states.values() for entry in entries}
    if imported and MASTER not in imported:
        notes += (
            "the order of the optimizer's tensors is checked by counts and shapes alone: there are "
            "no float32 copies of weights in the files",
        )
    return plan.report(layout, output.path, notes)


def _optimizer_states(
    layout: MegatronLayout, files: RankFiles, optimizer: bool | None
) -> tuple[dict[str, list[StateEntry]], str]:
    """Return the optimizer state in each rank's file, and why it is left out, if it is."""
    if optimizer is False:
        return {}, NOT_ASKED_FOR
    states = {}
    for name in layout.coordinates:
        is_flat = (layout.path / name / DISTRIBUTED).is_file()
        try:
            states[name] = optimizer_entries(files.open(name), has_flat_files=is_flat)
        except NotRecoverable as error:
            if optimizer:
                raise _optimizer_error(layout, str(error)) from None
            return {}, str(error)
    return states, ""


def _optimizer_error(layout: MegatronLayout, why: str) -> PlacementError:
    return PlacementError(f"{layout.path}: the optimizer cannot be imported: {why}")


def _import_dist(
    layout: MegatronLayout,
    output: AnyOutput,
    vocab_size: int | None,
    optimizer: bool | None,
    progress: Progress,
) -> ImportReport:
    """Import a DCP checkpoint of Megatron's."""
    checkpoint, plan = Checkpoint(layout.path), ImportPlan()
    directory = checkpoint.directory
    check = partial(directory.check_versions, directory.versions(checkpoint.files))
    for key in checkpoint.objects:
        plan.leave_out(key, "an object, which is not executed", 0)
    for name, nbytes in checkpoint.other_files.items():
        if name not in (".metadata", "metadata.json"):
            plan.leave_out(name, OF_THE_RUN, nbytes)
    for key in [key for key in checkpoint.tensors if key.startswith("optimizer.")]:
        is_flat = key.startswith("optimizer.distributed.")
        if is_flat and optimizer:
            raise _optimizer_error(layout, FLAT)
        if is_flat or optimizer is False:
            tensor = checkpoint.tensors.pop(key)
            nbytes = prod(tensor.shape) * tensor.dtype.itemsize
            plan.leave_out(key, FLAT if is_flat else NOT_ASKED_FOR, nbytes)
    with BoxReader(checkpoint) as reader:
        plan_dist(plan, checkpoint, reader, vocab_size)
        raise_faults(f"{checkpoint.path} cannot be put together", plan.faults)
        write_chunks(output, plan.targets, plan.pieces.values(), progress, check)
    return plan.report(layout, output.path, ())


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
