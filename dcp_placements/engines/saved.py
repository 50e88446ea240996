"""The items that an engine saved, as a checkpoint: its keys, who has which boxes, and the proof.

What ranks say of their paths is brought into the tables of a save, and proved as a save is: boxes
that make the whole, equal boxes with equal contents, one shape and dtype. Of a checkpoint that was
saved without this package, the files say what is in them, and the placements of its world where.

``metadata.pkl`` of the engine, version 2.0, in plain values::

    {"metadata": {"model": {
         "nested_path_to_metadata": {'["experts.w"]': [
             {"sharding_metadata": {"type": ..., "data": {...}}, "ranks": (0, 1)}]},
         "rank_to_layout_info": {0: None, 1: None}}},
     "world_size": 2, "version": "2.0"}
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.tensor import Replicate, Shard

from dcp_placements._torch import StridedShard, rehearsed
from dcp_placements.bind.rank_shard import RankShard
from dcp_placements.engines.described import (
    VERSION,
    ChunkOfPath,
    RankParts,
    rank_parts,
)
from dcp_placements.engines.rank_file import Location, RankFile
from dcp_placements.errors import Fault, PlacementError, format_names, raise_faults
from dcp_placements.layout.sharding import Box
from dcp_placements.names.flat import Path
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.save.coordinator import Coordinator, LocalPlan, Statement
from dcp_placements.storage.provenance import RESERVED_KEY
from dcp_placements.storage.safe_pickle import SafeUnpickler
from dcp_placements.storage.tensor_record import StridedTensor
from dcp_placements.table.digests import WIDTHS, SentDigests, may_have_replicas
from dcp_placements.table.table import OBJECT, Group, Held, as_holding

METADATA_FILE = "metadata.pkl"
OURS = "dcp_placements"
"""The type, in the engine's metadata, of what this package says of a path."""

_ENGINES = "DTensorShardingMetadata"
_SERIALIZATION = "TorchSerialization"

Open = Callable[[str], IO[bytes]]


class EngineUnpickler(SafeUnpickler):
    """Reads ``metadata.pkl``, which has plain values alone."""

    subject = "the metadata of torch_checkpointing"


@dataclass
class SavedItems:
    """Items of one checkpoint.

    Attributes:
        metadata: In DCP's terms, with a record of the save; without places.
        places: By key and offsets (None of an object), where the ranks have it; this rank first.
    """

    metadata: Metadata
    places: dict[tuple[str, tuple[int, ...] | None], list[Location]] = field(default_factory=dict)


def saved_items(
    path: str,
    items: Mapping[str, Mapping[str, Any]],
    open_file: Open,
    *,
    source: Any = None,
    rank: int = 0,
    waive: Mapping[str, str] | None = None,
    strict: bool = True,
) -> SavedItems:
    """Return items as a checkpoint.

    Args:
        path: Of the checkpoint, for messages.
        items: By item, its part of the engine's metadata.
        open_file: Opens a file of it.
        source: The world that saved it, a ``TransferWorld``, where it was saved without this
            package; None: what its DTensors say is all.
        rank: Whose own copies are preferred.
        waive: Patterns of keys whose numbers need not be complete.
        strict: Whether equal boxes with different contents are refused.

    Raises:
        PlacementError: The ranks' parts do not make a checkpoint, or metadata cannot be used.
    """
    ranks: dict[int, RankParts] = {}
    files: dict[tuple[int, str], str] = {}
    for item_key, item in items.items():
        for one, layout in item["rank_to_layout_info"].items():
            ranks.setdefault(int(one), RankParts())
            files[int(one), item_key] = _file_of(path, item_key, int(one), layout)
        if _is_ours(path, item_key, item):
            _take_described(path, item_key, item, ranks)
        else:
            _take_files(path, item_key, item, ranks, files, open_file, source)
    saved = _proved(path, [ranks[one] for one in sorted(ranks)], waive or {}, strict)
    for one in sorted(ranks, key=lambda other: (other != rank, other)):
        for whole, parts in ranks[one].paths.items():
            for part in parts:
                for chunk in part.chunks:
                    at = None if part.group.kind == OBJECT else chunk.box.offsets
                    file, shape, dtype = (
                        files[one, str(whole[0])],
                        part.local_shape,
                        part.group.dtype,
                    )
                    sizes, steps = chunk.box.sizes, chunk.steps
                    location = Location(file, whole[1:], shape, dtype, sizes, chunk.start, steps)
                    saved.places.setdefault((part.fqn, at), []).append(location)
    return saved


def _file_of(path: str, item_key: str, rank: int, layout: Mapping[str, Any] | None) -> str:
    if layout is None:
        return f"{item_key}_{rank}.pt"
    kind = layout["serialization_format"]["type"]
    if kind != _SERIALIZATION:
        headline = f"is saved by {kind}, and {_SERIALIZATION} is read"
        way_out = "way out:     ItemSpec(layout=None) for items with a resharder"
        raise_faults(f"{path} cannot be read", [Fault(item_key, headline, (way_out,))])
    return str(layout["file_path"])


def _groups(item: Mapping[str, Any]) -> Iterator[tuple[Path, Mapping[str, Any], Sequence[int]]]:
    """Yield path, typed metadata and ranks of what an item's metadata say, in order of paths."""
    for text, groups in sorted(item["nested_path_to_metadata"].items()):
        for group in groups:
            yield tuple(json.loads(text)), group["sharding_metadata"], group["ranks"]


def _is_ours(path: str, item_key: str, item: Mapping[str, Any]) -> bool:
    """Whether this package described an item.

    Raises:
        PlacementError: A newer version did, or another resharder than the engine's.
    """
    described = [typed for _, typed, _ in _groups(item)]
    kinds = {typed["type"] for typed in described}
    newest = max([one["data"].get("version", 0) for one in described if one["type"] == OURS] or [0])
    if newest > VERSION:
        headline = f"its metadata are of version {newest}, and this release reads {VERSION}"
        details = ["way out:     a newer dcp-placements"]
    elif kinds == {OURS} or kinds <= {_ENGINES}:
        return kinds == {OURS}
    else:
        headline = f"is described by {format_names(sorted(kinds))}"
        details = [f"known:       {OURS}, {_ENGINES}", "way out:     the resharder that saved it"]
    raise_faults(f"{path} cannot be read", [Fault(item_key, headline, tuple(details))])
    raise AssertionError


def _take_described(
    path: str, item_key: str, item: Mapping[str, Any], ranks: Mapping[int, RankParts]
) -> None:
    """Take in what this package said of the paths of an item when it was saved."""
    try:
        for own, typed, of_ranks in _groups(item):
            for rank in of_ranks:
                ranks[rank].add_plain((item_key, *own), typed["data"])
    except (LookupError, TypeError, ValueError) as error:
        headline = f"its metadata cannot be read: {type(error).__name__}: {error}"
        raise_faults(f"{path} is damaged", [Fault(item_key, headline)])


def _take_files(
    path: str,
    item_key: str,
    item: Mapping[str, Any],
    ranks: Mapping[int, RankParts],
    files: Mapping[tuple[int, str], str],
    open_file: Open,
    source: Any,
) -> None:
    """Take in what is in the files of an item, placed as the placements of its world say."""
    if source is not None and source.size != len(ranks):
        headline = f"was saved by {len(ranks)} ranks, and source= is a world of {source.size}"
        way_out = f"way out:     the mesh that saved it; source= has {dict(source.axes)}"
        raise_faults(f"{path} cannot be read", [Fault(item_key, headline, (way_out,))])
    specs: dict[Path, dict[int, Mapping[str, Any]]] = {}
    for own, typed, of_ranks in _groups(item):
        specs.setdefault(own, {}).update(dict.fromkeys(of_ranks, typed["data"]))
    forms: dict[tuple[str, Box], set[Any]] = {}
    for rank in sorted(ranks):
        rules = rename = None
        if source is not None:
            rules, rename, _ = source.rules_at(rank)
        with (
            closing(opened(files[rank, item_key], open_file, rank)) as file,
            rehearsed(rank, len(ranks)),
        ):
            crcs: dict[Path, int | None] = {}

            def as_value(own: Path, tensor: StridedTensor, is_dtensor: bool) -> Any:
                local = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                return _dtensor(local, specs[own][rank], rank) if is_dtensor else local  # noqa: B023

            def digest_of(own: Path, chunk: ChunkOfPath) -> bytes:
                crc = crcs.setdefault(own, file.crc(own))  # noqa: B023
                return b"" if crc is None else crc.to_bytes(8, "little")

            parts = rank_parts(item_key, file.state(as_value), rules, rename, digest_of=digest_of)
        raise_faults(f"{path}: what rank {rank} saved cannot be placed", parts.faults)
        ranks[rank].renames = parts.renames
        for own, of_path in parts.paths.items():
            ranks[rank].paths[item_key, *own] = of_path
            for part in of_path:
                for chunk in part.chunks:
                    form = chunk.start, chunk.steps, part.local_shape
                    forms.setdefault((part.fqn, chunk.box), set()).add(form)
    # A checksum is that of a whole local tensor: of other parts of one, it says nothing.
    several = {at for at, found in forms.items() if len(found) > 1}
    for of_rank in ranks.values() if several else ():
        for of_path in of_rank.paths.values():
            for at, part in enumerate(of_path):
                chunks = [
                    one._replace(digest=b"") if (part.fqn, one.box) in several else one
                    for one in part.chunks
                ]
                of_path[at] = part._replace(chunks=tuple(chunks))


def _dtensor(local: torch.Tensor, spec: Mapping[str, Any], rank: int) -> RankShard:
    """Return a DTensor of a rank, as the engine's metadata describe it."""
    mesh = spec["mesh_spec"]
    sizes = tuple(mesh["mesh_shape"])
    coordinate = torch.unravel_index(torch.tensor(mesh["mesh_data"].index(rank)), sizes)
    names = mesh["mesh_dim_names"] or [f"dim_{dim}" for dim in range(len(sizes))]
    at = MeshCoordinate(tuple(names), sizes, tuple(map(int, coordinate)))
    placements = tuple(map(_placement, spec["placements"]))
    return RankShard(local, at, placements, torch.Size(spec["global_shape"]))


def _placement(plain: Mapping[str, Any]) -> Any:
    if plain["type"] == "Shard":
        return Shard(plain["dim"])
    if plain["type"] == "StridedShard":
        return StridedShard(plain["dim"], split_factor=plain["split_factor"])
    return Replicate()


def opened(name: str, open_file: Open, rank: int | None = None) -> RankFile:
    """Return a rank's file, opened.

    Raises:
        PlacementError: It is missing, or no whole file of ``torch.save``.
    """
    try:
        return RankFile(name, open_file(name))
    except FileNotFoundError:
        whose = "" if rank is None else f" of rank {rank}"
        way_out = "way out:     the files of all ranks, of one save"
        raise_faults(
            "the checkpoint is not complete",
            [Fault(name, f"this file{whose} is missing", (way_out,))],
        )
        raise AssertionError from None


def _proved(
    path: str, ranks: Sequence[RankParts], waive: Mapping[str, str], strict: bool
) -> SavedItems:
    """Return the checkpoint that the ranks' parts make.

    Raises:
        PlacementError: They make none.
    """
    plans = []
    for rank, of_rank in enumerate(ranks):
        tables: dict[Any, dict[Any, Held]] = {}
        digests: dict[tuple[str, Box], bytes] = {}
        by_key: dict[str, tuple[Group, list[Box]]] = {}
        for parts in of_rank.paths.values():
            for part in parts:
                boxes = by_key.setdefault(part.fqn, (part.group, []))[1]
                boxes += [one.box for one in part.chunks]
                digests |= {(part.fqn, one.box): one.digest for one in part.chunks}
        for fqn, (group, held_boxes) in by_key.items():
            table = tables.setdefault((group.kind, group.axis_names), {})
            key = group, tuple(dict.fromkeys(held_boxes))
            held = table.setdefault(key, Held(*key))
            held.fqns.append(fqn)
            held.values.append(None)
        holding = as_holding([list(table.values()) for table in tables.values()], {})
        packed = b"".join(
            digests[fqn, box].ljust(WIDTHS[0], b"\0")
            for held in holding.groups
            if may_have_replicas(held.group, len(ranks))
            for fqn in held.fqns
            for box in held.boxes
        )
        statement = Statement(renames=of_rank.renames, digest_kind="sampled", world=len(ranks))
        sent = zlib.compress(pickle.dumps(statement))
        plans.append(LocalPlan(rank, holding.sent, (), SentDigests(packed), sent))
    coordinator = Coordinator(plans, size=len(ranks), complete=True, waived=waive, strict=strict)
    try:
        coordinator.prove()
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from None
    keys = coordinator.metadata([])
    provenance = {"save_id": "", "world_size": len(ranks), **coordinator.record(keys)}
    return SavedItems(Metadata(keys, planner_data={RESERVED_KEY: provenance}, storage_data={}))
