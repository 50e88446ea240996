"""Sequences of one content are one, whichever objects they are; others never are."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, assert_holds
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from dcp_placements import PlacementFileSystemReader, PlacementFileSystemWriter
from dcp_placements.layout.alike import MAX_CANDIDATES, BySequence


def chunk(start: int) -> ChunkStorageMetadata:
    """Return a chunk of two rows."""
    return ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((2, 3)))


def test_equal_sequences_have_one_value() -> None:
    known: BySequence[str] = BySequence()
    assert known.get((1, 2, 3)) is None
    assert known.put((1, 2, 3), "a") == "a"
    assert known.get((1, 2, 3)) == "a"
    assert known.get(pickle.loads(pickle.dumps((1, 2, 3)))) == "a"
    assert known.get((1, 5, 3)) is None  # the same ends
    known.put((1, 5, 3), "b")
    assert (known.get((1, 2, 3)), known.get((1, 5, 3))) == ("a", "b")
    assert known.get((1, 2, 3), like="another") is None
    known.put((), "empty")
    assert known.get(()) == "empty"


def test_elements_without_a_hash_are_told_apart_by_what_is_named() -> None:
    known: BySequence[int] = BySequence(lambda c: (tuple(c.offsets), tuple(c.sizes)))
    known.put([chunk(0), chunk(2), chunk(4)], 1)
    assert known.get([chunk(0), chunk(2), chunk(4)]) == 1
    assert known.get([chunk(0), chunk(3), chunk(4)]) is None


def test_a_list_that_is_gone_leaves_nothing_to_one_in_its_place() -> None:
    known: BySequence[int] = BySequence()
    for at in range(200):
        values = [at, at % 7, 0]
        assert known.get(values) is None
        known.put(values, at)
        del values


def test_only_so_many_of_one_length_and_ends_are_kept() -> None:
    known: BySequence[int] = BySequence()
    for at in range(3 * MAX_CANDIDATES):
        known.put((0, at, 0), at)
    found = [known.get((0, at, 0)) for at in range(3 * MAX_CANDIDATES)]
    assert found == [None] * (2 * MAX_CANDIDATES) + list(
        range(2 * MAX_CANDIDATES, 3 * MAX_CANDIDATES)
    )


@pytest.mark.parametrize("copied", [False, True])
def test_keys_that_are_words_of_the_metadata_file_are_kept(tmp_path: Path, copied: bool) -> None:
    """Equal text is found by its content in the file, also where it is another object."""
    words = ["fqn", "offset", "relative_path", "length", "transform_descriptors", "path", "w"]
    keys = ["".join(list(word)) if copied else word for word in words]
    state: dict[str, Any] = {key: arange(2, 3, start=10 * at) for at, key in enumerate(keys)}
    dcp.save(dict(state), storage_writer=PlacementFileSystemWriter(tmp_path), no_dist=True)
    assert_holds(tmp_path, state)
    reader = PlacementFileSystemReader(tmp_path)
    assert list(reader.read_metadata().state_dict_metadata) == keys
