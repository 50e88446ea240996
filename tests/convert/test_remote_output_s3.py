"""Outputs in a bucket, by several processes: killed midway, and two at one URL."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dcp_placements.offline import open_source
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.output import MARKER
from tests.convert.test_output import WORKER, line_of, start_worker
from tests.offline_scenes import Run, save_hugging_face
from tests.remote_scenes import bucket, contents, names

STOPPING = """
import sys, time
from dcp_placements.offline import export_safetensors

def stop(done, total):
    if done > total // 2:
        print("half", flush=True)
        time.sleep(600)

export_safetensors(*sys.argv[1:], max_shard_size=400_000, progress=stop)
"""


def tensors() -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.arange(100_000.0) + n for n in range(6)}


def killed(source: Path, out: str) -> None:
    """Begin an export in another process, and kill it midway."""
    with ExitStack() as stack:
        worker = start_worker(stack, STOPPING, str(source), out)
        assert line_of(worker) == "half"
        worker.send_signal(signal.SIGKILL)
        worker.wait()


def test_a_killed_export_goes_on_and_ends_as_one_that_was_not(
    tmp_path: Path, s3: str, run: Run
) -> None:
    save_hugging_face(tmp_path, tensors())
    options = ("--max-shard-size", "400000", "--json")
    killed(tmp_path, f"{s3}/out")
    left = [name for name in names(f"{s3}/out") if not name.startswith(MARKER)]
    assert left == [f"model-0000{n}-of-00006.safetensors" for n in (1, 2, 3)]
    for command in (("verify", f"{s3}/out"), ("import", f"{s3}/out", f"{s3}/x")):
        ran = run(*command)
        assert (ran.code, "the export to this directory has not finished" in ran.err) == (2, True)
    ran = run("export", tmp_path, f"{s3}/out", *options)
    assert (ran.code, ran.json["kept"]) == (0, left), ran.err
    assert run("export", tmp_path, f"{s3}/whole", *options).code == 0
    one, other = contents(f"{s3}/out"), contents(f"{s3}/whole")
    assert len(one) == 7
    assert one == other


@pytest.fixture(scope="module")
def workers(s3_server: str) -> Iterator[list[Any]]:
    """Start two processes that run commands."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        bucket(s3_server, patched)
        started = [start_worker(stack, WORKER) for _ in range(2)]
        assert [line_of(worker) for worker in started] == ["ready"] * 2
        yield started


@pytest.mark.parametrize("command", ["import", "export"])
def test_of_two_at_one_url_one_succeeds(
    tmp_path: Path, s3: str, workers: list[Any], command: str
) -> None:
    for number in range(2):
        (tmp_path / f"hf{number}").mkdir()
        held = {"w": torch.full((300, 1000), float(number)), f"only{number}": torch.ones(3)}
        save_file(held, tmp_path / f"hf{number}" / "model.safetensors")
    for attempt in range(2):
        out = f"{s3}/{attempt}"
        for number, worker in enumerate(workers):
            line = [command, str(tmp_path / f"hf{number}"), out]
            worker.stdin.write(json.dumps(line) + "\n")
            worker.stdin.flush()
        ended = [json.loads(line_of(worker)) for worker in workers]
        codes = [code for code, _ in ended]
        assert sorted(codes) == [0, 2], ended
        winner = codes.index(0)
        refusal = ended[1 - winner][1]
        assert "another output was begun here" in refusal or "is there already" in refusal
        assert out in refusal
        found = open_source(out)
        with BoxReader(found) as reader:
            w = found.tensors["w"]
            assert torch.equal(reader.read(w, w.whole), torch.full((300, 1000), float(winner)))
        assert sorted(found.tensors) == [f"only{winner}", "w"]
        assert not [name for name in names(out) if name.startswith(MARKER)]
