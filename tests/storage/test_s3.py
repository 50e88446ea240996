"""A real S3 API on this machine: saves, loads and the command line, with s3fs."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementSavePlanner,
)
from dcp_placements.offline.directory import existing_directory
from tests.offline_scenes import Run, wholes
from tests.remote_scenes import names
from tests.storage_scenes import load
from tests.torchrun import python


def test_what_is_missing_is_one_line(
    s3: str, s3_server: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dcp.save(wholes(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    monkeypatch.chdir(tmp_path)

    def fails(*command: Any) -> str:
        err = run.fails(*command)
        assert err.count("\n") == 1, err
        assert "s3://" in err
        return err

    assert "there is no such path" in fails("verify", "s3://no-such-bucket/x")
    assert "bucket does not exist" in fails("export", "ckpt", "s3://no-such-bucket/hf")
    assert not fsspec.filesystem("s3", endpoint_url=s3_server).exists("no-such-bucket")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    fsspec.filesystem("s3").clear_instance_cache()
    assert "Unable to locate credentials" in fails("verify", s3)
    assert "Unable to locate credentials" in fails("export", "ckpt", s3)
    keys = ("--storage-option", "key=key", "--storage-option", "secret=secret")
    ran = run("export", "ckpt", f"{s3}/out", *keys)
    assert ran.code == 0, ran.err
    assert os.listdir(tmp_path) == ["ckpt"]


@pytest.mark.parametrize(
    "key",
    [
        "run1",
        "a b/c d",
        "100%/%41%2F",
        "ünï/日本",
        "h#1/x?y=1&z",
        "a+b",
        "star*[x]?",
        "a//b/",
        "back\\s",
    ],
)
def test_any_key_is_a_checkpoints_name(s3: str, run: Run, key: str) -> None:
    url = f"{s3}/{key}"
    other = f"{url.rstrip('/')}0"
    for path, add in ((other, 100), (url, 0)):
        state = {"w": torch.arange(10.0) + add, "step": 3}
        writer = PlacementFileSystemWriter(path)
        dcp.save(state, storage_writer=writer, planner=PlacementSavePlanner(), no_dist=True)
    read = load(Path("none"), {"w": torch.zeros(10), "step": 0}, PlacementFileSystemReader(url))
    assert torch.equal(read["w"], torch.arange(10.0))
    ran = run("inspect", url, "--json")
    assert ran.code == 0, ran.err
    assert len(names(url.rstrip("/"))) == 2
    # The name of one is the beginning of the other's.
    for name in names(url.rstrip("/")):
        fsspec.filesystem("s3").rm_file(f"{url.rstrip('/')}/{name}")
    assert len(names(other)) == 2
    assert run("verify", url).code == 2
    assert run("export", other, url).code == 0


def test_what_another_process_wrote_is_there_at_once(s3: str, tmp_path: Path, run: Run) -> None:
    """fsspec remembers listings, and answers from memory where nobody tells it to ask again."""
    other = fsspec.filesystem("s3", skip_instance_cache=True)
    other.pipe_file(f"{s3}/", b"")  # what a console creates for a folder
    reader, directory = PlacementFileSystemReader(s3), existing_directory(s3)
    assert directory.names() == []
    assert fsspec.filesystem("s3").ls(s3) != []
    with pytest.raises(FileNotFoundError, match=re.escape(f"{s3}: no complete checkpoint")):
        reader.read_metadata()
    for step in range(2):
        state = {"w": torch.arange(10.0 + step)}
        dcp.save(state, checkpoint_id=tmp_path / str(step), no_dist=True)
        for path in (tmp_path / str(step)).iterdir():
            other.pipe_file(f"{s3}/{path.name}", path.read_bytes())
        assert directory.names() == [".metadata", "__0_0.distcp"]
        assert reader.read_metadata().state_dict_metadata["w"].size[0] == 10 + step
        read = load(Path("none"), {"w": torch.zeros(10 + step)}, reader)
        assert torch.equal(read["w"], state["w"])
        assert run("verify", s3, "--contents").code == 0


def test_threads_of_one_process_load_at_once(s3: str) -> None:
    urls = [f"{s3}/{n}" for n in range(3)]
    for number, url in enumerate(urls):
        state = {"w": torch.arange(1000.0) + number}
        dcp.save(state, storage_writer=PlacementFileSystemWriter(url), no_dist=True)

    def read(number: int) -> bool:
        state = {"w": torch.zeros(1000)}
        reader = PlacementFileSystemReader(urls[number % 3])
        load(Path("none"), state, reader)
        return torch.equal(state["w"], torch.arange(1000.0) + number % 3)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read, range(12)))


FORKED = """
import os, sys
import torch, torch.distributed.checkpoint as dcp
from dcp_placements import PlacementFileSystemReader, PlacementFileSystemWriter

url = sys.argv[1]
writer, reader = PlacementFileSystemWriter(url), PlacementFileSystemReader(url)
dcp.save({"w": torch.arange(10.0)}, storage_writer=writer, no_dist=True)
for number in range(2):
    child = os.fork()
    if not child:
        state = {"w": torch.zeros(10)}
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert torch.equal(state["w"], torch.arange(10.0))
        dcp.save({"w": torch.arange(10.0)}, storage_writer=writer, no_dist=True)
        print("done", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""

SPAWNED = """
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from dcp_placements import PlacementFileSystemWriter, PlacementSavePlanner

if __name__ == "__main__":
    dist.init_process_group("cpu:gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
    writer = PlacementFileSystemWriter(sys.argv[1])
    writer.store.entry()  # connected
    dcp.async_save(
        {"w": torch.arange(10.0)},
        storage_writer=writer,
        planner=PlacementSavePlanner(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    ).result()
    print("done", flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("program", "lines"), [(FORKED, 2), (SPAWNED, 1)])
def test_another_process_connects_by_itself(
    s3: str, tmp_path: Path, program: str, lines: int
) -> None:
    (tmp_path / "program.py").write_text(program)
    done = python(tmp_path / "program.py", s3, tmp_path / "store")
    assert done.stdout.count("done") == lines, done.stderr
    read = load(Path("none"), {"w": torch.zeros(10)}, PlacementFileSystemReader(s3))
    assert torch.equal(read["w"], torch.arange(10.0))
