"""The metadata that ``dcp.save`` returns: what it was, and what a user makes of it, stay."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementSavePlanner,
)

DUPLICATES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda metadata: pickle.loads(pickle.dumps(metadata)),
    "pickle 2": lambda metadata: pickle.loads(pickle.dumps(metadata, 2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def saved(path: Path, layers: int = 3) -> Any:
    state = {f"layers.{layer}.w": torch.full((4, 3), float(layer)) for layer in range(layers)}
    writer = PlacementFileSystemWriter(path)
    planner = PlacementSavePlanner()
    return dcp.save({"model": state, "lr": 0.1}, storage_writer=writer, planner=planner)


def plain(metadata: Any) -> dict[str, Any]:
    """Return the content of metadata as values that are compared by their contents."""
    return {
        **vars(metadata),
        "state_dict_metadata": {
            key: (
                type(entry),
                getattr(entry, "size", None),
                getattr(entry, "properties", None),
                tuple(map(str, getattr(entry, "chunks", ()))),
            )
            for key, entry in metadata.state_dict_metadata.items()
        },
        "storage_data": dict(metadata.storage_data),
    }


def drop(metadata: Any) -> None:
    metadata.state_dict_metadata.pop("model.layers.1.w")


def resize(metadata: Any) -> None:
    metadata.state_dict_metadata["model.layers.0.w"].size = torch.Size((4, 3, 1))


def no_chunks(metadata: Any) -> None:
    metadata.state_dict_metadata["model.layers.0.w"].chunks = []


def add(metadata: Any) -> None:
    metadata.state_dict_metadata["extra"] = BytesStorageMetadata()
    metadata.planner_data["extra"] = ("extra",)


def note(metadata: Any) -> None:
    metadata.storage_meta = replace(metadata.storage_meta, save_id="mine")
    metadata.note = {"loss": 0.5}


def without_rows(metadata: Any) -> None:
    metadata.storage_data = None


def fewer_rows(metadata: Any) -> None:
    rows = dict(metadata.storage_data)
    rows.popitem()
    metadata.storage_data = rows


def new_dict(metadata: Any) -> None:
    metadata.state_dict_metadata = dict(metadata.state_dict_metadata)


CHANGES = [None, drop, resize, no_chunks, add, note, fewer_rows, new_dict]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: getattr(change, "__name__", "none"))
@pytest.mark.parametrize("kind", DUPLICATES)
def test_m136_what_a_user_changes_is_in_every_duplicate(
    kind: str, change: Callable[[Any], None] | None, tmp_path: Path
) -> None:
    metadata = saved(tmp_path)
    assert type(metadata) is Metadata
    before = plain(metadata)
    if change is not None:
        change(metadata)
    if change not in (None, new_dict):
        assert plain(metadata) != before
    for duplicate in (DUPLICATES[kind](metadata), pickle.loads(pickle.dumps(metadata))):
        assert type(duplicate) is Metadata
        assert plain(duplicate) == plain(metadata)


def test_m136_rows_that_are_taken_out_stay_out(tmp_path: Path) -> None:
    metadata = saved(tmp_path)
    without_rows(metadata)
    for duplicate in DUPLICATES.values():
        assert duplicate(metadata).storage_data is None


def test_m136_a_duplicate_changes_alone(tmp_path: Path) -> None:
    metadata = saved(tmp_path)
    for kind in ("pickle", "deepcopy"):
        before, duplicate = plain(metadata), DUPLICATES[kind](metadata)
        drop(duplicate)
        resize(duplicate)
        assert plain(metadata) == before
        assert plain(duplicate) != before


def test_it_is_what_is_read_and_takes_few_bytes(tmp_path: Path) -> None:
    metadata = saved(tmp_path, layers=500)
    read = PlacementFileSystemReader(tmp_path).read_metadata()
    stock = dcp.FileSystemReader(tmp_path).read_metadata()
    duplicate = pickle.loads(pickle.dumps(metadata))
    assert plain(duplicate)["state_dict_metadata"] == plain(read)["state_dict_metadata"]
    assert dict(duplicate.storage_data) == dict(read.storage_data) == stock.storage_data
    assert duplicate.planner_data == stock.planner_data
    for one in (duplicate, stock):
        one.planner_data = None
    assert len(pickle.dumps(duplicate)) * 5 < len(pickle.dumps(stock))
