"""The commands: each calls a function of ``dcp_placements.offline``, and returns what is shown."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dcp_placements import offline
from dcp_placements.cli.printing import BYTES, Shown, progress
from dcp_placements.cli.shared_options import (
    MESH,
    RULES,
    CheckpointPath,
    DryRun,
    Files,
    Fqn,
    Fsdp,
    Memory,
    Mesh,
    Out,
    fsdp_of,
    function_option,
    number,
    parse_dtype,
    parse_pair,
    size,
)
from dcp_placements.errors import CannotLook, format_count, format_name
from dcp_placements.rules.mesh import MeshAxes


def inspect_command(
    ckpt: CheckpointPath,
    tensor: Annotated[
        str | None,
        typer.Argument(
            metavar="[FQN]", help="A tensor's key: list its chunks, and where they are."
        ),
    ] = None,
    fqn: Fqn = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key and every file.")] = False,
) -> Shown:
    """Sum up tensors, small objects with their values, and the record of the save."""
    with progress("inspect"):
        if tensor is not None:
            return Shown(offline.inspect_tensor(ckpt, tensor))
        inspection = offline.inspect(ckpt, fqn=fqn)
    return Shown(inspection, text=partial(inspection.text, keys=keys))


def draw_command(
    ckpt: CheckpointPath,
    fqn: Annotated[
        str | None,
        typer.Argument(
            metavar="[FQN]", help="The tensor's key; without it, draw the bytes of each rank."
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help="The .png or .svg file to write.")
    ] = "checkpoint.png",
) -> Shown:
    """Draw a tensor's chunks by writer rank, or the bytes that each rank wrote."""
    with progress("draw"):
        offline.check_picture_name(output)
        offline.save_figure(offline.draw(ckpt, fqn), output)
    document = {"path": ckpt, "fqn": fqn, "written": str(output)}
    return Shown(document, text=lambda: format_name(f"{output}: written"))


def megatron_command(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="The directory of an iteration, or of all of them."),
    ],
    expert_parallel_size: Annotated[
        int | None, number("Of the run that will load the files. It decides.")
    ] = None,
    tensor_parallel_size: Annotated[int | None, number("Of the same run.")] = None,
    pipeline_parallel_size: Annotated[int | None, number("Of the same run.")] = None,
) -> Shown:
    """Report which ranks wrote mp_rank_* files, and what is missing or does not fit."""
    with progress("megatron", "files") as step:
        layout = offline.megatron_layout(
            path,
            expert_parallel_size=expert_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            progress=step,
        )
    return Shown(layout, 0 if layout.fits else 1)


def verify_command(
    ckpt: CheckpointPath,
    contents: Annotated[
        bool,
        typer.Option("--contents", help="Read all contents; compare the checksums of torch.save."),
    ] = False,
    all_faults: Annotated[bool, typer.Option("--all", help="Print every fault.")] = False,
    memory: Memory = "2GiB",
) -> Shown:
    """Find holes, overlaps, missing and damaged files, mixed saves."""
    with progress("verify", BYTES) as step:
        result = offline.verify(ckpt, contents=contents, memory=memory, progress=step)
    text = partial(result.text, sys.maxsize) if all_faults else None
    return Shown(result, 0 if result.sound else 1, text)


def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one, of any layout and format.")],
    fqn: Fqn = None,
    rtol: Annotated[float, typer.Option(min=0.0, help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0.0, help="Absolute tolerance.")] = 0.0,
    rename: Annotated[Any, function_option("--rename", "A function from A's keys to B's.")] = None,
    prefix: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of A's keys, where B is an export, as export has it."),
    ] = None,
    all_families: Annotated[bool, typer.Option("--all", help="Print every difference.")] = False,
    memory: Memory = "2GiB",
) -> Shown:
    """Compare two checkpoints element by element; --rename maps A's keys to B's."""
    with progress("diff", BYTES) as step:
        diff = offline.diff(
            a,
            b,
            fqn=fqn,
            rtol=rtol,
            atol=atol,
            rename=rename,
            prefix=prefix,
            memory=memory,
            progress=step,
        )
    text = partial(diff.text, sys.maxsize) if all_families else None
    return Shown(diff, 0 if diff.same else 1, text)


def rehearse_command(
    ckpt: CheckpointPath,
    rules: Annotated[Any, RULES],
    mesh: Annotated[MeshAxes, MESH],
    fsdp: Fsdp = None,
    expect: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's keys: a JSON list, or one per line."),
    ] = None,
    fqn: Fqn = None,
) -> Shown:
    """Plan a load on every rank of a mesh that need not exist. No data is read."""
    keys = None if expect is None else _keys(expect)
    with progress("rehearse", "ranks") as step:
        rehearsal = offline.rehearse(
            ckpt,
            rules,
            mesh,
            fsdp=fsdp_of(fsdp),
            expect=keys,
            fqn=fqn,
            progress=step,
        )
    code = 0 if rehearsal.loads and not rehearsal.unmatched else 1
    return Shown(rehearsal, code)


def reshard_command(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint to rewrite.")],
    out: Out,
    rules: Annotated[Any, RULES],
    mesh: Annotated[MeshAxes, MESH],
    fsdp: Fsdp = None,
    dry_run: DryRun = False,
) -> Shown:
    """Rewrite a checkpoint for the mesh that will load it: each rank's bytes in one file.

    After an interruption the same command continues. Other files in the checkpoint's directory
    are not copied.
    """
    with progress("reshard", BYTES) as step:
        result = offline.reshard(
            src, out, rules, mesh, fsdp=fsdp_of(fsdp), dry_run=dry_run, progress=step
        )
    return Shown(result)


def _keys(path: Path) -> list[str]:
    try:
        text = path.read_text()
        if not text.lstrip().startswith("["):
            return [line.strip() for line in text.splitlines() if line.strip()]
        keys = json.loads(text)
    except (OSError, ValueError) as error:
        raise CannotLook(f"{path}: no list of keys: {error}") from error
    if not all(isinstance(key, str) for key in keys):
        raise CannotLook(f"{path}: a list of keys must be of text")
    return list(keys)


def doctor_command(
    ckpt: CheckpointPath,
    experts_per_layer: Annotated[int | None, number("The number of experts in a layer.")] = None,
    mesh: Mesh = None,
) -> Shown:
    """Report tensors whose experts were taken for replicas, so that only a part is stored.

    --mesh is the mesh of the run that saved. One of its axes must be ep. It is used where neither
    the checkpoint nor a router's shape tells how many experts there are.
    """
    with progress("doctor"):
        diagnosis = offline.diagnose(ckpt, experts_per_layer=experts_per_layer, axes=mesh)
    return Shown(diagnosis, 0 if diagnosis.healthy else 1)


def stock_metadata_command(ckpt: CheckpointPath) -> Shown:
    """Write .metadata anew for plain DCP, which cannot read an index alone or a later torch's."""
    with progress("stock-metadata"):
        metadata = offline.stock_metadata(ckpt)
    keys, chunks = len(metadata.state_dict_metadata), len(metadata.storage_data)
    document = {"path": ckpt, "written": ".metadata", "keys": keys, "chunks": chunks}
    counts = f"{format_count(keys, 'key')} in {format_count(chunks, 'record')}"
    line = f"{ckpt}/.metadata: written, {counts}"
    return Shown(document, text=lambda: format_name(line))


def import_command(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The directory to import.")],
    out: Out,
    rename: Annotated[
        Any, function_option("--rename", "From the files' names to the checkpoint's.")
    ] = None,
    files: Files = None,
    rules: Annotated[Any, RULES] = None,
    mesh: Mesh = None,
    vocab_size: Annotated[
        int | None, number("Megatron: rows without padding, if the files lack the number.")
    ] = None,
    expert_parallel_size: Annotated[
        int | None, number("Megatron: if the files leave it open.")
    ] = None,
    expert_tensor_parallel_size: Annotated[
        int | None, number("Megatron: if the files hold no arguments.")
    ] = None,
    memory: Memory = "1GiB",
    dry_run: DryRun = False,
) -> Shown:
    """Turn safetensors, Megatron's mp_rank_*, torch_checkpointing's or ranks' files into DCP's.

    Such as: dcp-placements import Mixtral-8x7B step-0
    """
    with progress("import", BYTES) as step:
        source = offline.open_source(
            src,
            files=files,
            rules=rules,
            axes=mesh,
            vocab_size=vocab_size,
            expert_parallel_size=expert_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
        )
        result = offline.import_checkpoint(
            source, out, rename=rename, memory=memory, dry_run=dry_run, progress=step
        )
    return Shown(result)


def export_command(
    checkpoint: CheckpointPath,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The directory to write; must not exist.")
    ],
    max_shard_size: Annotated[Any, size("The most bytes in one file.")] = "5GiB",
    dtype: Annotated[
        Any, typer.Option(parser=parse_dtype, metavar="DTYPE", help="Cast to it, such as bfloat16.")
    ] = None,
    rename: Annotated[
        Any, function_option("--rename", "From the model's names to the files'.")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The prefix of the model's keys, which is removed; by default that of the dict "
            "that was saved.",
        ),
    ] = None,
    tied: Annotated[
        list[Any] | None,
        typer.Option(
            parser=parse_pair,
            metavar="NAME=NAME",
            help="Leave out the first; it equals the second.",
        ),
    ] = None,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Also optimizer state.")] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Leave out keys that match.")
    ] = None,
    files: Files = None,
    rules: Annotated[Any, RULES] = None,
    mesh: Mesh = None,
    memory: Memory = "1GiB",
    dry_run: DryRun = False,
) -> Shown:
    """Write a checkpoint, or a torch file per rank, as the files that from_pretrained reads."""
    with progress("export", BYTES) as step:
        exported = offline.export_safetensors(
            offline.open_source(checkpoint, files=files, rules=rules, axes=mesh),
            out,
            max_shard_size=max_shard_size,
            dtype=dtype,
            rename=rename,
            prefix=prefix,
            tied=dict(tied or ()),
            optimizer=optimizer,
            exclude=exclude or (),
            memory=memory,
            dry_run=dry_run,
            progress=step,
        )
    return Shown(exported)
