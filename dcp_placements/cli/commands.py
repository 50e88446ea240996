"""The commands: each calls a function of ``dcp_placements.offline`` and returns what to print."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_placements import offline
from dcp_placements.cli.printing import BYTES, Shown, progress
from dcp_placements.cli.shared_options import (
    Parsed,
    argument,
    checkpoint_argument,
    dry_run_option,
    fqn_option,
    fsdp_option,
    function_option,
    memory_option,
    mesh_option,
    number_option,
    out_argument,
    parse_dtype,
    parse_pair,
    rules_option,
    size_option,
    source_options,
    whole_option,
)
from dcp_placements.errors import CannotLook
from dcp_placements.rules.mesh_axes import MeshAxes
from dcp_placements.short_text import format_count, format_name

if TYPE_CHECKING:
    import torch

    from dcp_placements.storage.store import StorageOptions

Opening = dict[str, Any]
"""Arguments of ``open_source``: what the names of files do not say."""


@checkpoint_argument
@argument("tensor", "[FQN]", "A tensor's key: list its chunks, and where they are.", required=False)
@fqn_option
@click.option("--keys", is_flag=True, help="List every key and every file.")
@source_options()
def inspect_command(
    *, ckpt: str, tensor: str | None, fqn: str | None, keys: bool, opening: Opening
) -> Shown:
    """Sum up tensors, small objects with their values, and the record of the save."""
    with progress("inspect"):
        source = offline.open_source(ckpt, **opening)
        if tensor is not None:
            return Shown(offline.inspect_tensor(source, tensor))
        inspection = offline.inspect(source, fqn=fqn)
    return Shown(inspection, text=partial(inspection.text, keys=keys))


@checkpoint_argument
@argument(
    "fqns",
    "[FQN]...",
    "Keys of tensors; without any, draw the bytes of each rank.",
    required=False,
    nargs=-1,
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default="checkpoint.png",
    help="The .png or .svg file to write.",
)
@source_options()
def draw_command(*, ckpt: str, fqns: tuple[str, ...], output: str, opening: Opening) -> Shown:
    """Draw chunks of tensors by writer rank, or the bytes that each rank wrote."""
    with progress("draw"):
        offline.check_picture_name(output)
        figure = offline.draw(offline.open_source(ckpt, **opening), *fqns)
        offline.save_figure(figure, output, storage_options=opening["storage_options"])
    document = {"path": ckpt, "fqns": fqns, "written": str(output)}
    return Shown(document, text=lambda: format_name(f"{output}: written"))


@argument("path", "PATH", "The directory of an iteration, or of all of them.")
@number_option("--expert-parallel-size", "Of the run that will load the files. It decides.")
@number_option("--tensor-parallel-size", "Of the same run.")
@number_option("--pipeline-parallel-size", "Of the same run.")
def megatron_command(
    *,
    path: str,
    expert_parallel_size: int | None,
    tensor_parallel_size: int | None,
    pipeline_parallel_size: int | None,
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


@checkpoint_argument
@click.option(
    "--contents", is_flag=True, help="Read all contents; compare the checksums of torch.save."
)
@click.option("--all", "all_faults", is_flag=True, help="Print every fault.")
@whole_option
@memory_option("2GiB")
@source_options()
def verify_command(
    *,
    ckpt: str,
    contents: bool,
    all_faults: bool,
    whole: Any,
    memory: int,
    opening: Opening,
) -> Shown:
    """Find holes, overlaps, missing and damaged files, mixed saves.

    --whole compares every key and shape with the unsharded model, too.
    """
    with progress("verify", BYTES) as step:
        source = offline.open_source(ckpt, **opening)
        result = offline.verify(
            source,
            contents=contents,
            whole=whole,
            memory=memory,
            storage_options=opening["storage_options"],
            progress=step,
        )
    text = partial(result.text, sys.maxsize) if all_faults else None
    return Shown(result, 0 if result.sound else 1, text)


@argument("a", "A", "A checkpoint.")
@argument("b", "B", "Another one, of any layout and format.")
@fqn_option
@click.option("--rtol", type=click.FloatRange(min=0.0), default=0.0, help="Relative tolerance.")
@click.option("--atol", type=click.FloatRange(min=0.0), default=0.0, help="Absolute tolerance.")
@function_option("--rename", "A function from A's keys to B's.")
@click.option(
    "--prefix", metavar="NAME", help="Of A's keys, where B is an export, as export has it."
)
@click.option("--all", "all_families", is_flag=True, help="Print every difference.")
@memory_option("2GiB")
@source_options()
def diff_command(
    *,
    a: str,
    b: str,
    fqn: str | None,
    rtol: float,
    atol: float,
    rename: Any,
    prefix: str | None,
    all_families: bool,
    memory: int,
    opening: Opening,
) -> Shown:
    """Compare two checkpoints element by element; --rename maps A's keys to B's."""
    with progress("diff", BYTES) as step:
        first, second = offline.open_pair(a, b, **opening)
        diff = offline.diff(
            first,
            second,
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


@checkpoint_argument
@rules_option
@mesh_option
@fsdp_option
@click.option(
    "--expect",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The model's keys on all ranks together, as the checkpoint names them: a JSON list, or "
    "one per line.",
)
@fqn_option
@click.option(
    "--draw",
    "picture",
    metavar="FILE",
    help="A .png or .svg file: which rank reads what of the tensors of --fqn from which file; "
    "without --fqn, the bytes that each rank reads.",
)
@source_options("source-")
def rehearse_command(
    *,
    ckpt: str,
    rules: Any,
    mesh: MeshAxes,
    fsdp: dict[str, list[str]],
    expect: Path | None,
    fqn: str | None,
    picture: str | None,
    opening: Opening,
) -> Shown:
    """Plan a load on every rank of a mesh that need not exist. No data is read."""
    keys = None if expect is None else _keys(expect)
    if picture is not None:
        offline.check_picture_name(picture)
    with progress("rehearse", "ranks") as step:
        source = offline.open_source(ckpt, **opening)
        rehearsal = offline.rehearse(
            source, rules, mesh, fsdp=fsdp, expect=keys, fqn=fqn, progress=step
        )
        if picture is not None:
            figure = offline.draw_rehearsal(source, rehearsal)
            offline.save_figure(figure, picture, storage_options=opening["storage_options"])
    code = 0 if rehearsal.loads and not rehearsal.unmatched else 1
    written = "" if picture is None else f"\n{format_name(picture)}: written"
    return Shown(rehearsal, code, lambda: f"{rehearsal}{written}")


@argument("src", "SRC", "The checkpoint to rewrite.")
@out_argument
@rules_option
@mesh_option
@fsdp_option
@dry_run_option
@source_options("source-")
def reshard_command(
    *,
    src: str,
    out: str,
    rules: Any,
    mesh: MeshAxes,
    fsdp: dict[str, list[str]],
    dry_run: bool,
    opening: Opening,
) -> Shown:
    """Rewrite a checkpoint for the mesh that will load it: each rank's bytes in one file.

    After an interruption the same command continues. Other files in the checkpoint's directory
    are not copied.
    """
    with progress("reshard", BYTES) as step:
        result = offline.reshard(
            offline.open_source(src, **opening),
            out,
            rules,
            mesh,
            fsdp=fsdp,
            dry_run=dry_run,
            storage_options=opening["storage_options"],
            progress=step,
        )
    return Shown(result)


def _keys(path: Path) -> list[str]:
    from dcp_placements.storage.store import open_plain

    try:
        with open_plain(path) as stream:
            text = stream.read().decode()
        if not text.lstrip().startswith("["):
            return [line.strip() for line in text.splitlines() if line.strip()]
        keys = json.loads(text)
    except (OSError, ValueError) as error:
        raise CannotLook(f"{path}: no list of keys: {error}") from error
    if not all(isinstance(key, str) for key in keys):
        raise CannotLook(f"{path}: a list of keys must be of text")
    return list(keys)


@checkpoint_argument
@number_option("--experts-per-layer", "The number of experts in a layer.")
@whole_option
@source_options()
def doctor_command(
    *,
    ckpt: str,
    experts_per_layer: int | None,
    whole: Any,
    opening: Opening,
) -> Shown:
    """Report tensors whose experts were taken for replicas, so that only a part is stored.

    --mesh is the mesh of the run that saved. Without --rules, which place files per rank, one of
    its axes must be ep: it is used where neither the checkpoint nor a router's shape tells how many
    experts there are. --whole compares every key and shape with the unsharded model.
    """
    with progress("doctor"):
        axes = None
        if opening["rules"] is None:  # the mesh places nothing then
            axes, opening["axes"] = opening["axes"], None
        diagnosis = offline.diagnose(
            offline.open_source(ckpt, **opening),
            experts_per_layer=experts_per_layer,
            axes=axes,
            whole=whole,
            storage_options=opening["storage_options"],
        )
    return Shown(diagnosis, 0 if diagnosis.healthy else 1)


@checkpoint_argument
def stock_metadata_command(*, ckpt: str, storage_options: StorageOptions) -> Shown:
    """Write .metadata anew for plain DCP, which cannot read an index alone or a later torch's."""
    with progress("stock-metadata"):
        metadata = offline.stock_metadata(ckpt, storage_options=storage_options)
    keys, chunks = len(metadata.state_dict_metadata), len(metadata.storage_data)
    document = {"path": ckpt, "written": ".metadata", "keys": keys, "chunks": chunks}
    counts = f"{format_count(keys, 'key')} in {format_count(chunks, 'record')}"
    line = f"{ckpt}/.metadata: written, {counts}"
    return Shown(document, text=lambda: format_name(line))


@argument("src", "SRC", "The directory to import.")
@out_argument
@function_option("--rename", "From the files' names to the checkpoint's.")
@click.option(
    "--dequantize",
    metavar="DTYPE",
    type=Parsed(parse_dtype),
    help="Make quantized weights numbers of it, such as bfloat16, by their scales.",
)
@memory_option("1GiB")
@dry_run_option
@source_options()
def import_command(
    *,
    src: str,
    out: str,
    rename: Any,
    dequantize: torch.dtype | None,
    memory: int,
    dry_run: bool,
    opening: Opening,
) -> Shown:
    """Turn safetensors, Megatron's mp_rank_*, torch_checkpointing's or ranks' files into DCP's.

    Such as: dcp-placements import Mixtral-8x7B step-0
    """
    with progress("import", BYTES) as step:
        result = offline.import_checkpoint(
            offline.open_source(src, **opening),
            out,
            rename=rename,
            dequantize=dequantize,
            memory=memory,
            dry_run=dry_run,
            storage_options=opening["storage_options"],
            progress=step,
        )
    return Shown(result)


@checkpoint_argument
@argument("out", "OUT", "The directory to write; must not exist.")
@size_option("--max-shard-size", "The most bytes in one file.", "5GiB")
@click.option(
    "--dtype", metavar="DTYPE", type=Parsed(parse_dtype), help="Cast to it, such as bfloat16."
)
@function_option("--rename", "From the model's names to the files'.")
@click.option(
    "--prefix",
    metavar="NAME",
    help="The prefix of the model's keys, which is removed; by default that of the dict that was "
    "saved.",
)
@click.option(
    "--tied",
    metavar="NAME=NAME",
    type=Parsed(parse_pair),
    multiple=True,
    help="Leave out the first; it equals the second.",
)
@click.option("--optimizer", is_flag=True, help="Also optimizer state.")
@click.option("--exclude", metavar="PATTERN", multiple=True, help="Leave out keys that match.")
@memory_option("1GiB")
@dry_run_option
@source_options()
def export_command(
    *,
    ckpt: str,
    out: str,
    max_shard_size: int,
    dtype: torch.dtype | None,
    rename: Any,
    prefix: str | None,
    tied: tuple[tuple[str, str], ...],
    optimizer: bool,
    exclude: tuple[str, ...],
    memory: int,
    dry_run: bool,
    opening: Opening,
) -> Shown:
    """Write a checkpoint, or a torch file per rank, as the files that from_pretrained reads."""
    with progress("export", BYTES) as step:
        exported = offline.export_safetensors(
            offline.open_source(ckpt, **opening),
            out,
            max_shard_size=max_shard_size,
            dtype=dtype,
            rename=rename,
            prefix=prefix,
            tied=dict(tied),
            optimizer=optimizer,
            exclude=exclude,
            memory=memory,
            dry_run=dry_run,
            storage_options=opening["storage_options"],
            progress=step,
        )
    return Shown(exported)
