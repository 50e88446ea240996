"""The one conversion, by its names: ``export_safetensors``, ``import_checkpoint``, ``reshard``.

A source has tensors; a rename assembles the tensors to write; a layout says which file has which
boxes; a writer knows a format; an output appears when it is complete. Every fault that can be found
without reading data is reported before anything is written.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dcp_placements.convert.dequantize import Dequantized, dequantized
from dcp_placements.convert.format_writers import (
    NOT_REWRITTEN,
    Converted,
    DcpOut,
    SafetensorsOut,
    whole_files,
    world_files,
    write_output,
)
from dcp_placements.errors import (
    CannotLook,
    Fault,
    PlacementError,
    format_faults,
    raise_faults,
)
from dcp_placements.names.rename_results import Rename
from dcp_placements.names.renames import Transpose, Unstack, number_in, steps
from dcp_placements.names.scales import scale_of
from dcp_placements.offline.assembly import AnyTensor, AssembledTensor, assemble
from dcp_placements.offline.box_reads import BoxReader, sub_boxes
from dcp_placements.offline.checkpoint import AnySource, Checkpoint, StoredTensor
from dcp_placements.offline.doctor import OVERWRITTEN, WERE_OVERWRITTEN, diagnose
from dcp_placements.offline.element_bits import same_bits
from dcp_placements.offline.key_patterns import matcher
from dcp_placements.offline.model_keys import model_tensors
from dcp_placements.offline.output import output_at
from dcp_placements.offline.rehearsals.fsdp_axes import Fsdp
from dcp_placements.offline.rehearsals.rehearsed_world import RehearsedWorld
from dcp_placements.offline.sources.opening import open_source
from dcp_placements.offline.texts import Progress
from dcp_placements.offline.verification import structural_faults
from dcp_placements.rules.mesh_axes import MeshAxes, MeshCoordinate
from dcp_placements.rules.patterns import unmatched_faults
from dcp_placements.short_text import (
    folded_names,
    format_name,
    format_names,
    without_numbers,
)
from dcp_placements.storage.store import StorageOptions

SHARD_NBYTES = 5 << 30
MEMORY_NBYTES = 1 << 30

MAX_NAMES_BEFORE = 32
"""Renamed names, numbers apart, that an export notes in its files."""


def _opened(source: AnySource, storage_options: StorageOptions) -> Checkpoint:
    """Return a source whose files have noted versions, and hold what was written."""
    opened = open_source(source, storage_options=storage_options)
    opened.begin_conversion()
    return opened


def _path_of(source: AnySource) -> str | os.PathLike[str]:
    return source.path if isinstance(source, Checkpoint) else source


def export_safetensors(
    checkpoint: AnySource,
    out: str | os.PathLike[str],
    *,
    max_shard_size: int = SHARD_NBYTES,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    prefix: str | None = None,
    tied: Mapping[str, str] | None = None,
    optimizer: bool = False,
    exclude: Sequence[str] = (),
    memory: int = MEMORY_NBYTES,
    dry_run: bool = False,
    storage_options: StorageOptions = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write a checkpoint's tensors as a directory of safetensors files, as on the Hugging Face hub.

    Args:
        checkpoint: The checkpoint, or ranks' files; data is read box by box.
        out: The directory or URL, which must not exist.
        max_shard_size: Bytes of tensors in a file; a larger tensor has a file to itself.
        dtype: The dtype that floating-point tensors of 16 bits or more are cast to, of 16 bits or
            more itself; None casts none.
        rename: From the model's name of a tensor to the file's: to a name, or to a ``Rows`` or
            ``Parts`` (of an ``Unstack`` or a ``Split``), or a ``Row``. ``presets.hub`` has some.
        prefix: The prefix of the model's names in the checkpoint; keys without it are left out. By
            default that of the saved state dict: ``model`` of ``{"model": ..., "rng": ...}``.
        tied: Names in the file of tensors that share another one's elements, by the other name:
            ``{"lm_head.weight": "model.embed_tokens.weight"}``. They are left out if they are equal
            bit for bit.
        optimizer: Whether to write optimizer state too.
        exclude: Patterns of keys to leave out.
        memory: Bytes that data may take.
        dry_run: Whether to plan only.
        storage_options: Options that fsspec passes to the file system of a URL.
        progress: Called as files are written.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; ``out`` exists, or another process
            is writing it.
        PlacementError: The checkpoint is not whole; a name is missing or given twice; safetensors
            has no such dtype, or elements are not cast to ``dtype``; tied tensors differ. All
            these are found before anything is written. A record is not what was written.
    """
    _check_cast("dtype", dtype)
    output = output_at(out, source=_path_of(checkpoint), storage_options=storage_options)
    source, tied = _opened(checkpoint, storage_options), dict(tied or {})
    tensors, head, left_out = _model_of(source, prefix, optimizer, exclude)
    renamed, unchanged = _renamed(tensors, rename, "the checkpoint cannot be exported")
    notes = []
    if dtype is not None:
        cast = {f: tensor for f, tensor in renamed.items() if tensor.dtype in _CAST}
        if kept := [f"{f} ({renamed[f].dtype_name})" for f in sorted(renamed) if f not in cast]:
            notes.append(f"kept in their own dtype: {format_names(folded_names(kept), 4)}")
        renamed |= {fqn: replace(tensor, dtype=dtype) for fqn, tensor in cast.items()}
    raise_faults("the checkpoint cannot be exported", _scale_faults(source, renamed, dtype))
    _check_tied(source, renamed, tied, memory)
    written = {fqn: tensor for fqn, tensor in renamed.items() if fqn not in tied}
    writer = SafetensorsOut(source, written, max_shard_size, _names_before(tensors, written))
    converted = write_output(output, source, writer, memory, dry_run, progress)
    return replace(
        converted,
        prefix=head,
        left_out=left_out,
        unchanged=unchanged,
        tied=tuple(tied),
        notes=(*converted.notes, *notes),
    )


def import_checkpoint(
    source: AnySource,
    out: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    dequantize: torch.dtype | None = None,
    memory: int = MEMORY_NBYTES,
    dry_run: bool = False,
    storage_options: StorageOptions = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write safetensors or ranks' files as a DCP checkpoint, without a model or a process group.

    Without a rename the tensors keep the files' names. A model in which they are stacked or fused
    loads such a checkpoint like the files, with ``rename=`` of its planner: that of its export.

    Args:
        source: A directory or URL of ``*.safetensors``, with or without an index; or ranks' files.
        out: The checkpoint's directory or URL, which must not exist.
        rename: Map from the files' names to the checkpoint's, such as a ``Stack``. The rename of
            an export leads the other way, and is refused.
        dequantize: The dtype of the numbers that quantized tensors of safetensors files are made,
            with their scales multiplied in; None writes elements and scales as they are. The
            renamed names are those of the numbers: ``gate_up_proj`` of ``gate_up_proj_blocks``.
        memory: Bytes that data may take.
        dry_run: Whether to plan only.
        storage_options: Options that fsspec passes to the file system of a URL.
        progress: Called with ``(done, total)`` bytes as files are written.

    Raises:
        CannotLook: There are no such files, or they cannot be read; ``out`` exists, or another
            process is writing it. The files were overwritten meanwhile; nothing is written then.
        PlacementError: The files are not whole; a name is missing or given twice; ``rename``
            changes no name, or unstacks names that have a number already; a quantized tensor is of
            a scheme without a formula here. All these are found before anything is written.
    """
    _check_cast("dequantize", dequantize)
    output = output_at(out, source=_path_of(source), storage_options=storage_options)
    opened = _opened(source, storage_options)
    if opened.is_dcp:
        raise PlacementError(
            f"{opened.path}: this is a DCP checkpoint already\n"
            "    way out:     load it as it is; with rename=Stack(...) where layers are one tensor"
        )
    _check_whole(opened)
    if dequantize is not None and not opened.is_of_hub:
        raise PlacementError(
            f"{opened.path}: dequantize= is for safetensors files, as the Hub has them\n"
            "    way out:     leave it out"
        )
    opening = "the files cannot be imported"
    numbers = Dequantized({**opened.tensors})
    if dequantize is not None:
        numbers = dequantized(opened, dequantize)
    way_out = "way out:     no rename, if the names are those that are wanted"
    numbered = [
        Fault(name, f"has a number already where {unstack!r} puts one", (way_out,))
        for unstack in [step.rename for step in steps(rename) if isinstance(step.rename, Unstack)]
        for name in numbers.tensors
        if number_in(unstack.pattern, name) and unstack(name) != name
    ]
    raise_faults(opening, numbered)
    if rename is not None:
        raise_faults(opening, _applied_already(opened, rename))
    renamed, _ = _renamed(numbers.tensors, rename, opening)
    raise_faults(opening, _scale_faults(opened, renamed))
    writer = DcpOut(opened, renamed, whole_files(renamed))
    converted = write_output(output, opened, writer, memory, dry_run, progress)
    return replace(
        converted,
        notes=(*converted.notes, *numbers.notes),
        accounted={**converted.accounted, **numbers.accounted},
        beside=(*converted.beside, *numbers.left_out),
    )


def reshard(
    checkpoint: AnySource,
    out: str | os.PathLike[str],
    rules: Callable[[MeshCoordinate], Any],
    axes: MeshAxes,
    *,
    fsdp: Fsdp = (),
    dry_run: bool = False,
    storage_options: StorageOptions = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Rewrite a checkpoint for the world that is to load it.

    Each box of a tensor goes into the file of the lowest rank that holds it, objects into that of
    rank 0. So a rank whose boxes no other holds reads one file, from its beginning to its end. An
    interrupted attempt is continued, if it has the same arguments and source.

    Args:
        checkpoint: The source; its data is read box by box.
        out: A directory or URL where nothing is yet.
        rules: Argument of ``rehearse``: what each rank of the world declares.
        axes: The mesh: sizes by axis name, the last axis fastest in rank order.
        fsdp: Argument of ``rehearse``: axes over which FSDP cuts dim 0.
        dry_run: Whether to plan only.
        storage_options: Options that fsspec passes to the file system of a URL.
        progress: Called as files are written.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; ``out`` exists, another process
            is writing it, or there is no room; an axis in ``fsdp`` is unknown, or ``rules`` fails.
            The checkpoint was overwritten while it was read; nothing is written then.
        PlacementError: The checkpoint is not whole; a load in that world would be refused; its
            ranks do not hold all of a tensor; a pattern of the rules, or a step of the rename,
            matches no key. All these are found before anything is written.
    """
    output = output_at(out, source=_path_of(checkpoint), storage_options=storage_options)
    source = _opened(checkpoint, storage_options)
    if source.why_not_resharded:
        raise CannotLook(
            f"{source.path}: {source.why_not_resharded}\n"
            "    way out:     load it as it is: Stack makes one tensor of all layers of its layers"
        )
    _check_whole(source)
    world = RehearsedWorld(source, rules, axes, fsdp)
    layout = world_files(world)
    raise_faults(NOT_REWRITTEN, unmatched_faults(world.unmatched(), list(source.tensors)))
    tensors, _ = assemble(source.tensors, None)
    writer = DcpOut(source, tensors, layout)
    # Asked for before: once the output is complete, no error of the source may say that it is not.
    others = tuple([name for name in source.other_files if not name.startswith(".")])
    objects = len(source.objects)
    converted = write_output(output, source, writer, MEMORY_NBYTES, dry_run, progress)
    few = world.size - len(layout.files)
    notes = [*converted.notes]
    notes += [f"without a file of their own: {few} ranks, replicas of lower ones"] if few else []
    return replace(converted, objects=objects, left_out=others, notes=tuple(notes))


def _check_whole(source: Checkpoint, keys: Container[str] | None = None) -> None:
    """Refuse a checkpoint, or keys of it, that metadata or sizes of files show as damaged.

    Experts that a save took for replicas are warned of: what is left of them is converted.
    """
    faults = []
    for fault in structural_faults(source):
        names = [fqn for fqn in fault.tensors if keys is None or fqn in keys]
        if names or keys is None:
            where = format_names(names or fault.files, 4)
            faults.append(Fault(where, f"{fault.kind}: {fault.message}"))
    raise_faults(f"{source.path}: it is not whole", faults)
    lost = [
        replace(fault, details=WERE_OVERWRITTEN)
        for verdict, fault in (diagnose(source).findings() if source.is_dcp else ())
        if verdict == OVERWRITTEN
    ]
    if lost:
        opening = f"look at {source.path}: experts of the model are not in it"
        warnings.warn(format_faults(opening, lost, "note"), stacklevel=4)


def _model_of(
    source: Checkpoint, prefix: str | None, optimizer: bool, exclude: Sequence[str]
) -> tuple[dict[str, StoredTensor], str, tuple[str, ...]]:
    """Return the tensors to export, by the model's own names, their prefix, and the other keys.

    Raises:
        CannotLook: A pattern with an empty component.
        PlacementError: No tensor is left, or a selected tensor is not whole.
    """
    unwanted = {pattern: matcher(pattern) for pattern in exclude}
    rows = source.rows
    of_tensors = {*(rows.classes.listed >= 0).nonzero()[0].tolist()}
    unlisted = [
        fqn
        for fqn, number in zip(rows.fqns, rows.class_of.tolist(), strict=True)
        if number in of_tensors and fqn not in source.tensors
    ]
    absent = {*source.absent, *unlisted}
    keys = [*source.tensors, *source.objects, *absent]
    unmatched = [pattern for pattern, matches in unwanted.items() if not any(map(matches, keys))]
    if unmatched:
        headline = f"exclude= matches none of the {len(keys)} keys"
        note = Fault(", ".join(map(repr, unmatched)), headline, ("way out:     drop it",))
        warnings.warn(format_faults("look at this export", [note], "note"), stacklevel=3)

    def is_excluded(fqn: str) -> bool:
        return any(matches(fqn) for matches in unwanted.values())

    tensors = {fqn: tensor for fqn, tensor in source.tensors.items() if not is_excluded(fqn)}
    saved = source.metadata.planner_data
    classified = model_tensors(tensors, {**source.tensors, **source.objects}, saved, prefix)
    start = f"{classified.prefix}." if classified.prefix else ""
    states = {} if optimizer else classified.states
    selected = {**classified.model, **(classified.states if optimizer else {})}
    if not selected:
        is_there = tensors.keys() > classified.states.keys()
        raise PlacementError(
            f"{source.path}: none of its {len(source.tensors)} tensors is selected"
            + (f": no key of a model begins with {start!r}" if is_there else "")
            + f"\n    it has:      {format_names(list(source.tensors), 4) or 'no tensors'}"
            + ("\n    way out:     --optimizer for the states of an optimizer" if states else "")
        )
    kept = {tensor.fqn for tensor in selected.values()}
    # Tensors that an index names and no file has, or of which there are chunks alone.
    lost = {fqn for fqn in absent if fqn.startswith(start) and not is_excluded(fqn)}
    _check_whole(source, kept | lost)
    rest = sorted({*source.tensors, *source.objects} - kept)
    return selected, classified.prefix, tuple(rest)


def _renamed(
    tensors: Mapping[str, AnyTensor], rename: Rename | None, opening: str
) -> tuple[dict[str, AssembledTensor], tuple[str, ...]]:
    """Return the tensors that a rename makes, and the names that it does not change.

    Raises:
        PlacementError: It cannot make them, or changes no name.
    """
    renamed, faults = assemble(tensors, rename)
    unchanged = tuple(
        fqn
        for fqn, tensor in renamed.items()
        if rename is not None
        and fqn in tensors
        and all(
            block.source.fqn == tensors[fqn].fqn and not block.is_turned for block in tensor.blocks
        )
    )
    if tensors and len(unchanged) == len(tensors):
        details: tuple[str, ...] = (
            f"names:       {format_names(unchanged, 4)}",
            "likely:      the map of another model, names with another prefix, or a map that leads "
            "the other way: an import takes the files' names",
            "way out:     the map of this model; prefix=; or no rename=",
        )
        headline = f"matches none of the {len(tensors)} tensors"
        if met := _too_few_dims(tensors, rename):
            headline = f"changes none of the {len(tensors)} tensors: Transpose swaps two dims"
            details = (*met, *details[2:])
        faults.append(Fault("rename=", headline, details))
    raise_faults(opening, faults)
    return renamed, unchanged


def _too_few_dims(tensors: Mapping[str, AnyTensor], rename: Rename | None) -> list[str]:
    """Return what the pattern of each ``Transpose`` meets, in a rename that changes nothing.

    Args:
        tensors: The tensors, by name.
        rename: A rename that leaves all names as they are.
    """
    lines = []
    for step in steps(rename):
        if isinstance(step.rename, Transpose):
            met = [f"{fqn} {of.shape}" for fqn, of in tensors.items() if step.rename(fqn) != fqn]
            lines += [f"{step.rename!r} meets {format_names(met, 4)}"] if met else []
    return lines


def _names_before(
    tensors: Mapping[str, StoredTensor], renamed: Mapping[str, AssembledTensor]
) -> dict[str, str]:
    """Map names after a rename to names before it: one of all names that differ in numbers alone.

    >>> _names_before({"model.w": one}, {"net.w": of_one})  # doctest: +SKIP
    {'net.w': 'model.w'}
    """
    names = {tensor.fqn: name for name, tensor in tensors.items()}
    by_form: dict[str, tuple[str, str]] = {}
    for fqn, tensor in renamed.items():
        before = names[tensor.blocks[0].source.fqn] if len(tensor.blocks) == 1 else fqn
        if before != fqn and tensor.blocks[0].source.shape == tensor.shape:
            by_form.setdefault(without_numbers(fqn), (fqn, before))
    return dict(list(by_form.values())[:MAX_NAMES_BEFORE])


def _applied_already(source: Checkpoint, rename: Rename) -> list[Fault]:
    """Return the fault of the rename of the export that wrote these files."""
    names = source.names_before_export()
    try:
        is_of_export = all(rename(before) == name for name, before in names.items())
        wrong = {name: rename(name) for name, before in names.items() if rename(name) != before}
    except Exception:  # whatever a function of the user's raises of names that it does not take
        return []
    if not (names and is_of_export and wrong):
        return []
    name, again = next(iter(wrong.items()))
    details = (
        f"exported:    {format_name(names[name])} as {format_name(name)}",
        f"now:         {format_name(name)} as {format_name(again)}",
        "way out:     a rename= from the names of the files; or none, as the planners of the model "
        "load such a checkpoint with the rename of the export",
    )
    return [
        Fault("rename=", "is that of the export of these files, applied a second time", details)
    ]


def _check_cast(name: str, dtype: torch.dtype | None) -> None:
    """Refuse a dtype that numbers are not cast to."""
    if dtype is not None and dtype not in _CAST:
        raise PlacementError(
            f"{name} {dtype}: floating-point tensors are cast to {', '.join(map(str, _CAST))} "
            "only\n"
            "    why:         integers cut off fractions, and 8 bits need scales beside them\n"
            "    way out:     one of these; or quantize the exported model"
        )


def _scale_faults(
    source: Checkpoint, written: Mapping[str, AssembledTensor], dtype: torch.dtype | None = None
) -> list[Fault]:
    """Return the faults of quantized tensors that would be written without their scales.

    Args:
        source: Checkpoint of the tensors.
        written: Tensors to write, by key.
        dtype: Dtype that floating-point numbers are cast to; quantized numbers are not.
    """
    faults = []
    for fqn, tensor in written.items():
        scales = [scale_of(b.source.fqn, b.source.dtype, source.tensors) for b in tensor.blocks]
        scale = next(filter(None, scales), None)
        if scale is None or (dtype is None and scale_of(fqn, tensor.dtype, written)):
            continue
        headline = f"is quantized ({tensor.dtype_name}), and would be written without its scales"
        way_out = "way out:     a rename= that has both names alike; or neither of them"
        if dtype is not None:
            headline = f"is quantized, so that dtype={dtype} does not apply to it"
            way_out = "way out:     no dtype=, and both are written as they are"
        details = (f"{way_out}; import --dequantize bfloat16 makes numbers of such files",)
        faults.append(Fault(fqn, headline, details, (f"its scales:  {scale}",)))
    return faults


_CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that are cast, and cast to; those of 8 bits have scales in other tensors."""


def _check_tied(
    source: Checkpoint, tensors: Mapping[str, AssembledTensor], tied: Mapping[str, str], memory: int
) -> None:
    """Refuse tied tensors that are missing, or differ."""
    faults = []
    with BoxReader(source, check_crc=True) as reader:
        for name, whose in tied.items():
            missing = [fqn for fqn in (name, whose) if fqn not in tensors]
            if missing or whose in tied:
                why = f"there is no {missing[0]}" if missing else f"{whose} is tied itself"
                faults.append(Fault(name, f"cannot be tied to {whose}: {why}"))
                continue
            tensor, other = tensors[name], tensors[whose]
            boxes = sub_boxes(tensor.whole, max(memory // 8 // tensor.dtype.itemsize, 1))
            if (tensor.shape, tensor.dtype) != (other.shape, other.dtype) or not all(
                same_bits(tensor.read(reader, box), other.read(reader, box)) for box in boxes
            ):
                way_out = "way out:     export both, the model did not tie them"
                faults.append(Fault(name, f"is not {whose}: they differ", (way_out,)))
    raise_faults("tied tensors cannot be written once", faults)
