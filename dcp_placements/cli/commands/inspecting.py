"""``inspect``: what is in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, Fqn, Json
from dcp_placements.cli.printing import print_lines, print_table, ranges, short, show
from dcp_placements.cli.progress import progress
from dcp_placements.errors import format_count, format_nbytes
from dcp_placements.offline.texts import families, natural_key

if TYPE_CHECKING:
    from dcp_placements.offline.experts import ExpertLayer
    from dcp_placements.offline.views.inspection import Inspection, ObjectInfo

MAX_GROUPS = 12
"""Groups of tensors, and of objects, that are printed without ``--keys``."""

MAX_CUTS = 6
MAX_VALUE = 60
"""Characters of an object's value."""

_T = TypeVar("_T")


def inspect_command(
    ckpt: CheckpointPath,
    fqn: Fqn = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key and every file.")] = False,
    experts: Annotated[
        bool, typer.Option("--experts", help="List the experts of each layer.")
    ] = False,
    json: Json = False,
) -> int:
    """Sum up tensors, small objects with their values, and the record of the save."""
    with progress("inspect"):
        inspection = offline.inspect(ckpt, fqn=fqn, experts=experts)

    def print_result() -> None:
        if inspection.experts is not None:
            _print_experts(inspection.experts)
            return
        if keys:
            _print_keys(inspection)
        else:
            _print_groups(inspection)
        print_lines("")
        _print_save(inspection)

    return show(inspection, print_result, json=json)


def _print_groups(inspection: Inspection) -> None:
    groups = inspection.groups
    largest = sorted(groups, key=lambda group: group.nbytes, reverse=True)[:MAX_GROUPS]
    names = {group.name for group in largest}
    if groups:
        print_table(
            ("tensors", "keys", "shape", "dtype", "bytes", "chunks", "ranks"),
            [
                (
                    group.name,
                    f"{group.tensors:,}",
                    str(group.shape),
                    group.dtype,
                    format_nbytes(group.nbytes),
                    f"{group.chunks:,}",
                    ranges(group.ranks),
                )
                for group in groups
                if group.name in names
            ],
            right="keys bytes chunks",
        )
    if rest := len(groups) - len(largest):
        print_lines(f"... and {format_count(rest, 'smaller group')}; --keys lists every key")
    _print_objects(inspection.objects)


def _print_objects(objects: Mapping[str, ObjectInfo]) -> None:
    of_keys = families(list(objects))
    if of_keys:
        print_lines("")
        rows = []
        for family in of_keys[:MAX_GROUPS]:
            first = objects[family.keys[0]]
            nbytes = sum(objects[key].nbytes for key in family.keys)
            value = _brief(first.value) if len(family.keys) == 1 else "-"
            rows.append((family.name, value, f"{len(family.keys):,}", format_nbytes(nbytes)))
        print_table(("object", "value", "keys", "bytes"), rows, right="keys bytes")
    if len(of_keys) > MAX_GROUPS:
        rest = format_count(len(of_keys) - MAX_GROUPS, "more group")
        print_lines(f"... and {rest}; --keys lists every key")


def _print_save(inspection: Inspection) -> None:
    tensors, objects = len(inspection.tensors), len(inspection.objects)
    files = {name: file for name, file in inspection.files.items() if file.data}
    missing = [name for name, file in files.items() if file.nbytes is None]
    print_lines(
        f"format:    {inspection.format}",
        f"totals:    {format_count(tensors, 'tensor')} in "
        f"{format_count(inspection.chunks, 'chunk')}, {format_nbytes(inspection.nbytes)}; "
        f"{format_count(objects, 'object')}",
        f"files:     {format_count(len(files), 'file')} of data, "
        f"{format_nbytes(sum(file.nbytes or 0 for file in files.values()))}"
        + (f"; missing: {short(missing)}" if missing else ""),
        f"ranks:     {ranges(inspection.ranks)}",
    )
    if inspection.provenance is None:
        print_lines("save:      the checkpoint has no record of it")
    for key, value in (inspection.provenance or {}).items():
        if value in ({}, None):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{name}={item}" for name, item in value.items())
        print_lines(f"{key + ':':<10} {value}")
    for group in inspection.cuts[:MAX_CUTS]:
        names = short([family.name for family in families(group.keys)])
        print_lines(f"saved with: {', then '.join(group.cuts)}: {names}")
    if len(inspection.cuts) > MAX_CUTS:
        print_lines(f"... and {format_count(len(inspection.cuts) - MAX_CUTS, 'more cut')}; --json")
    for rename in inspection.renames:
        print_lines(f"saved with: rename={rename}")


def _brief(value: object) -> str:
    if value is None:
        return "-"
    text = repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def _print_keys(inspection: Inspection) -> None:
    if inspection.tensors:
        print_table(
            ("tensor", "shape", "dtype", "bytes", "chunks", "files", "ranks"),
            [
                (
                    fqn,
                    str(tensor.shape),
                    tensor.dtype,
                    format_nbytes(tensor.nbytes),
                    f"{tensor.chunks:,}",
                    short(tensor.files, 1),
                    ranges(tensor.ranks),
                )
                for fqn, tensor in _naturally(inspection.tensors)
            ],
            right="bytes chunks",
        )
    if inspection.objects:
        print_lines("")
        print_table(
            ("object", "value", "bytes", "file"),
            [
                (fqn, _brief(stored.value), format_nbytes(stored.nbytes), short(stored.files, 1))
                for fqn, stored in _naturally(inspection.objects)
            ],
            right="bytes",
        )
    print_lines("")
    print_table(
        ("file", "bytes", "rank"),
        [
            (
                name,
                "missing" if file.nbytes is None else format_nbytes(file.nbytes),
                "-" if file.rank is None else str(file.rank),
            )
            for name, file in _naturally(inspection.files)
        ],
        right="bytes",
    )


def _naturally(by_name: Mapping[str, _T]) -> list[tuple[str, _T]]:
    return sorted(by_name.items(), key=lambda item: natural_key(item[0]))


def _print_experts(layers: tuple[ExpertLayer, ...]) -> None:
    if not layers:
        print_lines("no key names experts")
        return
    print_table(
        ("layer", "experts", "gaps", "doubles", "tensors"),
        [
            (
                layer.layer + (" (stacked)" if layer.stacked else ""),
                ranges(layer.experts),
                ranges(layer.gaps),
                ranges(layer.doubles),
                short(layer.tensors),
            )
            for layer in layers
        ],
    )
