"""An index, a pickle and files that do not agree, all with right checksums."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import BytesStorageMetadata, ChunkStorageMetadata

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.offline import verify
from dcp_placements.storage.index import archive_in, index_of, packed_index, unpacked_archive
from dcp_placements.storage.metadata_file import read_metadata
from dcp_placements.storage.metadata_pickler import (
    MARKER_NBYTES,
    marked_digest,
    marker,
    stock_pickle,
)
from tests.offline_scenes import Run
from tests.storage_scenes import Flipped, pickle_nbytes, stock_metadata


def with_other_index(path: Path, change: Callable[[Any], Any]) -> None:
    """Write the index of ``.metadata`` anew, behind the same pickle."""
    data = (path / ".metadata").read_bytes()
    archive = archive_in(io.BytesIO(data))
    assert archive is not None
    metadata: Any = read_metadata(lambda: io.BytesIO(data))
    rows = metadata.storage_data
    change(rows)
    packed, digest = packed_index(rows, unpacked_archive(archive[0])["values"])
    body = marker(digest) + data[MARKER_NBYTES : pickle_nbytes(data)]
    (path / ".metadata").write_bytes(body + packed)


def saved_norms(path: Path) -> dict[str, torch.Tensor]:
    saved = {f"norm{number}": torch.randn(1024) for number in range(5)}
    dcp.save(saved, storage_writer=PlacementFileSystemWriter(path), planner=PlacementSavePlanner())
    return saved


def test_of_an_index_that_is_wrong_behind_right_checksums_nothing_is_used(tmp_path: Path) -> None:
    """Commands and loads go by the pickle, which is right."""
    saved = saved_norms(tmp_path)

    def change(rows: Any) -> None:
        rows.rows.start[:2] = rows.rows.start[1::-1].tolist()
        rows.class_of[4] = -1

    with_other_index(tmp_path, change)
    note = "a key of no class; the pickle before it is read"
    with pytest.warns(UserWarning, match=note):
        (fault,) = verify(tmp_path, contents=True).faults
    assert (fault.kind, fault.files) == ("index", (".metadata",))
    into = {key: torch.zeros(1024) for key in saved}
    with pytest.warns(UserWarning, match=note):
        dcp.load(
            into,
            storage_reader=PlacementFileSystemReader(tmp_path),
            planner=PlacementLoadPlanner(),
        )
    assert all(torch.equal(into[key], value) for key, value in saved.items())


def test_verify_compares_the_places_of_the_pickle_with_those_of_the_index(tmp_path: Path) -> None:
    """Torch goes by the pickle, and our reader by the index."""
    saved_norms(tmp_path)
    with_other_index(tmp_path, lambda rows: None)
    assert verify(tmp_path, contents=True).sound

    def change(rows: Any) -> None:
        rows.rows.start[:2] = rows.rows.start[1::-1].tolist()

    with_other_index(tmp_path, change)
    faults = verify(tmp_path, contents=True).faults
    (fault,) = [one for one in faults if one.kind == "stock_metadata"]
    assert fault.tensors == ("norm0", "norm1")
    assert fault.files == (".metadata",)
    assert "stock-metadata" in fault.message


def with_other_pickle(path: Path, change: Callable[[Any], Any]) -> None:
    """Write the pickle of ``.metadata`` anew, before the same index."""
    data = (path / ".metadata").read_bytes()
    digest = marked_digest(data)
    assert digest is not None
    metadata = stock_metadata(path)
    change(metadata)
    pickled = b"".join(stock_pickle(metadata, index_of(metadata), digest))
    (path / ".metadata").write_bytes(pickled + data[pickle_nbytes(data) :])


def lose_rows(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["norm1"]
    chunk = ChunkStorageMetadata(entry.chunks[0].offsets, torch.Size([1008]))
    metadata.state_dict_metadata["norm1"] = replace(entry, chunks=[chunk])


def cast(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["norm1"]
    properties = replace(entry.properties, dtype=torch.int32)
    metadata.state_dict_metadata["norm1"] = replace(entry, properties=properties)


def resize(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["norm1"]
    metadata.state_dict_metadata["norm1"] = replace(entry, size=torch.Size([1040]))


def forget(metadata: Any) -> None:
    del metadata.state_dict_metadata["norm1"]


def unmake(metadata: Any) -> None:
    metadata.state_dict_metadata["norm1"] = BytesStorageMetadata()


def path_of_key(metadata: Any) -> None:
    metadata.planner_data["norm1"] = ("norm2",)


def version(metadata: Any) -> None:
    metadata.version = "other"


@pytest.mark.parametrize(
    ("change", "what", "fqns"),
    [
        *[
            (change, "other shapes, dtypes or chunks", ("norm1",))
            for change in (lose_rows, cast, resize, forget, unmake)
        ],
        (path_of_key, "another planner_data", ()),
        (version, "another version", ()),
    ],
)
def test_verify_compares_all_that_torch_reads_with_the_index(
    tmp_path: Path, change: Callable[[Any], None], what: str, fqns: tuple[str, ...]
) -> None:
    """A bit of the pickle that flipped makes torch leave rows as they were."""
    saved_norms(tmp_path)
    with_other_pickle(tmp_path, lambda metadata: None)
    assert verify(tmp_path, contents=True).sound
    with_other_pickle(tmp_path, change)
    (fault,) = verify(tmp_path, contents=True).faults
    assert (fault.kind, fault.tensors) == ("stock_metadata", fqns)
    assert what in fault.message
    assert verify(tmp_path).sound


@pytest.mark.parametrize("rows", [9, 3000])
def test_a_record_of_another_shape_than_its_chunk_is_refused_where_a_part_is_read(
    tmp_path: Path, rows: int
) -> None:
    """The part would be elements of other places, however well it fits into the record."""
    dcp.save({"w": torch.randn(rows * 2, 40)}, checkpoint_id=tmp_path)
    metadata = stock_metadata(tmp_path)
    stored = metadata.state_dict_metadata["w"]
    stored.chunks[0].sizes = stored.size = torch.Size((rows, 40))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        dcp.CheckpointException, match=rf"w: __0_0.distcp holds a \({rows * 2}, 40\) tensor, where"
    ):
        dcp.load(
            {"w": torch.zeros(rows, 40)},
            storage_reader=PlacementFileSystemReader(tmp_path),
            planner=PlacementLoadPlanner(),
        )


@pytest.mark.parametrize("kind", ["large", "small", "transposed", "flipped"])
@pytest.mark.parametrize("other", [torch.float64, torch.int32, torch.Size((4, 3))])
@pytest.mark.usefixtures("flipped_is_known")
def test_no_command_goes_by_metadata_that_the_head_of_a_record_contradicts(
    tmp_path: Path, run: Run, kind: str, other: Any
) -> None:
    """Elements of the dtype that the record has would be cast to another one."""
    path, extensions = tmp_path / "ckpt", [Flipped()] if kind == "flipped" else None
    tensors = {
        "large": {"experts": torch.randn(600, 400)},
        "small": {
            f"{number}.experts" if number else "experts": torch.randn(6, 4) for number in range(5)
        },
        "transposed": {"experts": torch.randn(4, 6).t()},
        "flipped": {"experts": torch.randn(6, 4)},
    }
    writer = dcp.FileSystemWriter(path, _extensions=extensions)
    dcp.save({**tensors[kind]}, storage_writer=writer, no_dist=True)
    metadata = stock_metadata(path)
    entry = metadata.state_dict_metadata["experts"]
    if isinstance(other, torch.Size):
        entry.size = entry.chunks[0].sizes = other
    else:
        entry.properties.dtype = other
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    shutil.copytree(path, tmp_path / "copy")
    rules = "--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=2"
    for asked in (
        ("export", path, tmp_path / "out", "--prefix", ""),
        ("reshard", path, tmp_path / "out", *rules),
        ("diff", path, tmp_path / "copy"),
    ):
        ran = run(*asked)
        assert ran.code in (1, 2), asked
        assert "torch.float32 tensor at byte" in ran.out + ran.err
        assert f"where the metadata says {tuple(entry.size)} {entry.properties.dtype}" in (
            ran.out + ran.err
        )
        assert not (tmp_path / "out").exists()


def without_entry(metadata: Any) -> None:
    del metadata.state_dict_metadata["experts"]


def as_object(metadata: Any) -> None:
    metadata.state_dict_metadata["experts"] = BytesStorageMetadata()


def without_chunks(metadata: Any) -> None:
    metadata.state_dict_metadata["experts"].chunks = []


@pytest.mark.parametrize("change", [without_entry, as_object, without_chunks])
def test_a_tensor_that_has_chunks_and_lists_none_is_named_by_every_command(
    tmp_path: Path, run: Run, change: Callable[[Any], None]
) -> None:
    path = tmp_path / "ckpt"
    dcp.save({"a": torch.ones(3), "experts": torch.ones(4, 2)}, checkpoint_id=path, no_dist=True)
    metadata = stock_metadata(path)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    rules = "--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=2"
    export = "export", path, tmp_path / "out", "--prefix", ""
    asked: list[Any] = [("verify", path), export, ("reshard", path, tmp_path / "out", *rules)]
    if change is without_chunks:
        asked += [("rehearse", path, *rules)]
    for command in asked:
        ran = run(*command)
        assert ran.code in (1, 2), command
        assert "experts" in ran.out + ran.err
        assert not (tmp_path / "out").exists()
    assert run(*export, "--exclude", "experts").code == 0
