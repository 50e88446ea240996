"""A real S3 API on this machine: saves, loads and the command line, with s3fs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.tensor import Shard

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.offline import diff
from dcp_placements.testing import World, cut
from tests.offline_scenes import Run, rules_by_ep, wholes
from tests.remote_scenes import names, s3, s3_server
from tests.storage_scenes import load, same

__all__ = ["s3", "s3_server"]


def state_of(world: World, rank: int, ep: int, blank: bool = False) -> dict[str, Any]:
    mesh = world.mesh(rank, ep=ep)
    state: dict[str, Any] = {}
    for fqn, whole in wholes().items():
        local = cut(whole, [Shard(0)], (ep,), mesh.get_coordinate()) if "experts" in fqn else whole
        state[fqn] = torch.zeros_like(local) if blank else local.clone()
    return {**state, "step": 0 if blank else 5}


def save_from_4(url: str, **options: Any) -> None:
    world = World(4)
    world.save(
        url,
        lambda rank: state_of(world, rank, 4),
        lambda rank: PlacementSavePlanner(
            rules_by_ep(world.mesh(rank, ep=4)), digests="full", **options
        ),
        lambda rank: PlacementFileSystemWriter(url),
    )


def load_to(url: str, ep: int, check: Callable[[PlacementFileSystemReader], None]) -> None:
    world, readers = World(ep), [PlacementFileSystemReader(url) for _ in range(ep)]
    states = world.load(
        url,
        lambda rank: state_of(world, rank, ep, blank=True),
        lambda rank: PlacementLoadPlanner(rules_by_ep(world.mesh(rank, ep=ep)), verify="digests"),
        lambda rank: readers[rank],
    )
    for rank, state in enumerate(states):
        expected = state_of(world, rank, ep)
        assert [key for key in expected if not same(expected[key], state[key])] == []
        check(readers[rank])


def test_what_4_ranks_save_any_world_loads(s3: str, run: Run) -> None:
    save_from_4(s3)
    assert names(s3)[0] == ".metadata"
    assert len(names(s3)) == 5
    for ep in (4, 2):
        load_to(s3, ep, lambda reader: None)
    read = {key: torch.zeros_like(value) for key, value in wholes().items()} | {"step": 0}
    load(Path("none"), read, FsspecReader(s3))
    assert all(same(read[key], value) for key, value in wholes().items())
    ran = run("verify", s3, "--digests", "--json")
    assert (ran.code, ran.json["faults"]) == (0, [])


def test_shadows_are_read_from_a_ranks_own_file(s3: str) -> None:
    save_from_4(s3, shadows=1 << 20)

    def check(reader: PlacementFileSystemReader) -> None:
        assert reader.opens == 1

    load_to(s3, 4, check)


def test_an_export_to_a_bucket_and_back(s3: str, run: Run) -> None:
    save_from_4(f"{s3}/dcp")
    out = f"{s3}/hf"
    ran = run("export", f"{s3}/dcp", out, "--to", "hf", "--max-shard-size", "500")
    assert ran.code == 0, ran.err
    assert "model.safetensors.index.json" in names(out)
    assert run("import", out, f"{s3}/again", "--from", "hf").code == 0
    assert diff(f"{s3}/again", out).same


def test_an_upload_that_is_cut_off_leaves_the_older_checkpoint(s3: str) -> None:
    save_from_4(s3)
    before = names(s3)

    class Stopped(PlacementSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "layers.1.attention":
                raise RuntimeError("cut off")
            return super().resolve_data(write_item)

    with pytest.raises(dcp.CheckpointException, match="cut off"):
        dcp.save(
            {**wholes(), "step": 6},
            storage_writer=PlacementFileSystemWriter(s3),
            planner=Stopped(),
            no_dist=True,
        )
    assert names(s3) == before, "a part of a file was uploaded"
    load_to(s3, 2, lambda reader: None)


def test_what_is_missing_is_one_line(
    s3: str, s3_server: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dcp.save(wholes(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    monkeypatch.chdir(tmp_path)

    def fails(*command: Any) -> str:
        ran = run(*command)
        assert (ran.code, ran.out) == (2, ""), ran
        assert ran.err.count("\n") == 1, ran.err
        assert "s3://" in ran.err
        return ran.err

    assert "there is no such path" in fails("verify", "s3://no-such-bucket/x")
    for format in ("hf", "torch"):
        text = fails("export", "ckpt", f"s3://no-such-bucket/{format}", "--to", format)
        assert "bucket does not exist" in text
    assert not fsspec.filesystem("s3", endpoint_url=s3_server).exists("no-such-bucket")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    fsspec.filesystem("s3").clear_instance_cache()
    assert "Unable to locate credentials" in fails("verify", s3)
    assert "Unable to locate credentials" in fails("export", "ckpt", s3, "--to", "hf")
    keys = ("--storage-option", "key=key", "--storage-option", "secret=secret")
    ran = run("export", "ckpt", f"{s3}/out", "--to", "hf", *keys)
    assert ran.code == 0, ran.err
    assert os.listdir(tmp_path) == ["ckpt"]
