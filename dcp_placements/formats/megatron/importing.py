"""Megatron-LM's files as one DCP checkpoint of whole tensors.

Each legacy file is one rank's part. Its coordinate comes from its name and the run's arguments, its
layers and experts get the numbers that they have in the whole, and the rules say where each tensor
lies. Every byte of the source is written, found equal to one that is, or listed with the reason why
not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace

import torch

from dcp_placements.errors import Fault, PlacementError, raise_faults
from dcp_placements.formats.megatron.dist import plan_dist
from dcp_placements.formats.megatron.files import RankFiles
from dcp_placements.formats.megatron.layout import MegatronLayout, megatron_layout
from dcp_placements.formats.megatron.model import learn_model
from dcp_placements.formats.megatron.optimizer import FLAT, NotRecoverable
from dcp_placements.formats.megatron.parts import Parts, state_entries
from dcp_placements.formats.megatron.report import OF_THE_RUN, ImportReport, LeftOut
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.chunk_writer import write_chunks
from dcp_placements.offline.output import Output


def import_megatron(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    preset: str = "megatron_core",
    vocab_size: int | None = None,
    optimizer: bool | None = None,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel_size: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ImportReport:
    """Turn Megatron's files into an ordinary DCP checkpoint of the model's keys, chunk by chunk.

    From ``mp_rank_*`` files, or from ``torch_dist`` with its axes of layers and experts.

    Keys are Megatron's own, layers and experts numbered over all ranks; gate stands before up, and
    the padding rows of the vocabulary are left out. Optimizer state is
    ``optimizer.state.<parameter>.<name>``. Layers are counted over the stages in the order of their
    chunks; a tied output layer is the word embedding, once.

    Args:
        source: The directory of one iteration, or of all with the tracker file.
        out: The checkpoint's directory, which must not be there. It appears when all is written.
        preset: Whose names the weights have; ``"megatron_core"``.
        vocab_size: Rows of the vocabulary without padding; by default what the run's arguments say,
            and all rows where they say nothing.
        optimizer: True: an error where its state cannot be imported. False: leave it out. None:
            import it where it can be, and list it with the reason where not.
        expert_parallel_size: As in ``megatron_layout``; needed where the directory is ambiguous.
        expert_tensor_parallel_size: Of the experts, where the files hold no arguments.
        progress: Told the bytes written, and to be written.

    Returns:
        What was written, what was found equal, and what was left out.

    Raises:
        CannotLook: No Megatron checkpoint, or a file that cannot be read or is refused; ``out`` is
            there, or being written.
        PlacementError: Files that are missing or contradict each other, weights that no rule names,
            chunks that do not make whole tensors; all of them at once, and nothing is written.
    """
    if preset != "megatron_core":
        raise PlacementError(f"there is no preset {preset!r} for this: use 'megatron_core'")
    with Output(out) as output:
        layout = megatron_layout(source, expert_parallel_size=expert_parallel_size)
        _check_layout(layout)
        if layout.format != "torch":
            return _import_dist(layout, output, vocab_size, optimizer, progress)
        layout = _with_expert_cut(layout, expert_tensor_parallel_size)
        return _import_legacy(layout, output, vocab_size, optimizer, progress)


def _import_legacy(
    layout: MegatronLayout,
    output: Output,
    vocab_size: int | None,
    optimizer: bool | None,
    progress: Callable[[int, int], None],
) -> ImportReport:
    """Import ``mp_rank_*`` files: each is one rank's part."""
    files = RankFiles(layout.path)
    args = files.open(next(iter(layout.coordinates))).get("args")
    if not isinstance(args, argparse.Namespace):
        args = argparse.Namespace()
    model = learn_model(files, layout.coordinates, layout.sizes, args, vocab_size)
    refused = "not asked for"
    if optimizer is not False:
        refused = _refusal(layout, files)
        if optimizer and refused:
            raise PlacementError(f"{layout.path}: the optimizer cannot be imported: {refused}")
    parts = Parts(layout, files, model, refused)
    parts.place()
    raise_faults(f"{layout.path} cannot be put together", parts.faults)
    parts.compare()
    raise_faults(f"{layout.path}: files contradict each other", parts.faults)
    report = parts.report(output.path)
    write_chunks(output, parts.targets, parts.pieces(), _counted(progress, report.nbytes))
    return report


def _check_layout(layout: MegatronLayout) -> None:
    if layout.layout == "ambiguous":
        raise PlacementError(f"{layout.path}: {layout.reason}")
    raise_faults(
        f"{layout.path} cannot be imported as it is",
        [Fault("checkpoint", line) for line in layout.mismatches],
    )


def _counted(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    done = 0

    def step(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return step


def _import_dist(
    layout: MegatronLayout,
    output: Output,
    vocab_size: int | None,
    optimizer: bool | None,
    progress: Callable[[int, int], None],
) -> ImportReport:
    """Import a DCP checkpoint of Megatron's: one key per layer and expert."""
    checkpoint = Checkpoint(layout.path)
    left_out = [
        LeftOut(key, "an object, which is not executed", 1, 0) for key in checkpoint.objects
    ]
    left_out += [
        LeftOut(name, OF_THE_RUN, 1, nbytes)
        for name, nbytes in checkpoint.other_files.items()
        if name not in (".metadata", "metadata.json")
    ]
    for key in list(checkpoint.tensors):
        why = None
        if key.startswith("optimizer.") and optimizer is False:
            why = "not asked for"
        elif key.startswith("optimizer.distributed."):
            why = FLAT
            if optimizer:
                raise PlacementError(f"{layout.path}: the optimizer cannot be imported: {why}")
        if why is not None:
            tensor = checkpoint.tensors.pop(key)
            nbytes = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
            left_out.append(LeftOut(key, why, 1, nbytes))
    with BoxReader(checkpoint) as reader:
        plan = plan_dist(checkpoint, reader, vocab_size)
        write_chunks(output, plan.targets, plan.files, _counted(progress, plan.nbytes))
    return ImportReport(
        source=str(layout.path),
        out=str(output.path),
        layout=layout,
        keys=tuple(sorted(plan.targets)),
        nbytes=plan.nbytes,
        copies=0,
        tied=0,
        padding=plan.padding,
        left_out=tuple(left_out),
    )


def _with_expert_cut(layout: MegatronLayout, etp: int | None) -> MegatronLayout:
    """Return the layout with the experts' tensor-parallel size that is given."""
    known, tp = layout.sizes.etp, layout.sizes.tp or 1
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


def _refusal(layout: MegatronLayout, files: RankFiles) -> str:
    """Return why the optimizer cannot be imported; empty where it can."""
    for name in layout.coordinates:
        try:
            state_entries(layout, name, files.open(name))
        except NotRecoverable as error:
            return str(error)
    return ""
