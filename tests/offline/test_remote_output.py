"""The command line on URLs: checkpoints, outputs and their last file, errors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load as load_safetensors

from dcp_placements import PlacementFileSystemReader
from dcp_placements.offline import Checkpoint, diff, merge_metadata
from dcp_placements.offline.remote_output import RemoteOutput
from tests.offline.test_doctor import save as save_unaware
from tests.offline_scenes import Run, save_hugging_face, save_sharded, wholes
from tests.remote_scenes import memory, names
from tests.storage_scenes import load, same

__all__ = ["memory"]


@pytest.fixture
def writes(memory: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the names of files in memory in the order in which they are begun."""
    order: list[str] = []
    for name in ("pipe_file", "_open"):
        real = getattr(MemoryFileSystem, name)

        def noted(self: Any, path: str, *args: Any, _real: Any = real, **kwargs: Any) -> Any:
            if _real.__name__ == "pipe_file" or "wb" in (*args, *kwargs.values()):
                order.append(path.rpartition("/")[2])
            return _real(self, path, *args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, name, noted)
    return order


def upload(source: Path, url: str) -> None:
    fs = fsspec.filesystem("memory")
    for path in source.iterdir():
        fs.pipe_file(f"{url}/{path.name}", path.read_bytes())


def test_safetensors_are_exported_to_a_url_and_imported_from_it(
    tmp_path: Path, memory: str, run: Run
) -> None:
    save_sharded(tmp_path / "ckpt")
    upload(tmp_path / "ckpt", f"{memory}/ckpt")
    out = f"{memory}/hf"
    ran = run("export", f"{memory}/ckpt", out, "--to", "hf", "--max-shard-size", "500", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["out"] == out
    held = names(out)
    assert held[-1] == "model.safetensors.index.json"
    tensors: dict[str, torch.Tensor] = {}
    for name in held[:-1]:
        tensors |= load_safetensors(fsspec.filesystem("memory").cat_file(f"{out}/{name}"))
    assert tensors.keys() == wholes().keys()
    assert all(same(tensors[key], value) for key, value in wholes().items())
    again = run("export", f"{memory}/ckpt", out, "--to", "hf")
    assert (again.code, "is there already" in again.err) == (2, True)
    ran = run("import", out, f"{memory}/dcp", "--from", "hf")
    assert ran.code == 0, ran.err
    assert diff(f"{memory}/dcp", out).same
    assert run("verify", f"{memory}/dcp", "--contents").code == 0
    assert run("diff", f"{memory}/dcp", tmp_path / "ckpt", "--json").code in (0, 1)


def test_one_file_is_exported_to_a_url(tmp_path: Path, memory: str, run: Run) -> None:
    save_sharded(tmp_path)
    ran = run("export", tmp_path, f"{memory}/weights.pt", "--to", "torch", "--json")
    assert ran.code == 0, ran.err
    assert list(ran.json["files"]) == ["weights.pt"]
    saved = torch.load(io.BytesIO(fsspec.filesystem("memory").cat_file(f"{memory}/weights.pt")))
    assert all(same(saved[key], value) for key, value in wholes().items())


def test_the_last_file_completes_an_output(
    tmp_path: Path, memory: str, run: Run, writes: list[str]
) -> None:
    save_hugging_face(tmp_path / "hf", wholes())
    assert run("import", tmp_path / "hf", f"{memory}/dcp", "--from", "hf").code == 0
    assert writes[-1] == ".metadata"
    assert len(writes) > 1
    writes.clear()
    out = f"{memory}/out"
    assert run("export", tmp_path / "hf", out, "--to", "hf", "--max-shard-size", "500").code == 0
    assert writes[-1] == "model.safetensors.index.json"
    assert len(writes) > 2


def test_what_fails_leaves_nothing_at_a_url(memory: str) -> None:
    def directory() -> None:
        with RemoteOutput(f"{memory}/out") as output, output.directory() as folder:
            folder.write("one", b"x")
            with folder.file("two") as stream:
                stream.write(b"x")
            with folder.file("three") as stream:
                stream.write(b"x")
                raise KeyboardInterrupt

    def file() -> None:
        with RemoteOutput(f"{memory}/file") as output, output.file() as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    for fails in (directory, file):
        with pytest.raises(KeyboardInterrupt):
            fails()
        assert names(memory) == []


def test_a_stopped_import_leaves_no_checkpoint_at_a_url(tmp_path: Path, memory: str) -> None:
    from dcp_placements.offline import import_safetensors

    save_hugging_face(tmp_path, {f"w{n}": torch.arange(1000.0) + n for n in range(20)})

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_safetensors(tmp_path, f"{memory}/out", progress=stop)
    assert names(memory) == []
    import_safetensors(tmp_path, f"{memory}/out")
    assert len(Checkpoint(f"{memory}/out").tensors) == 20


def test_metadata_of_ranks_are_merged_at_a_url(tmp_path: Path, memory: str, run: Run) -> None:
    save_sharded(tmp_path, collectives=False)
    upload(tmp_path, memory)
    assert ".metadata" not in names(memory)
    ran = run("merge-metadata", memory)
    assert ran.code == 0, ran.err
    assert ".metadata" in names(memory)
    merge_metadata(memory)  # again, over the first
    read = load(Path("none"), {"scale": torch.zeros(())}, PlacementFileSystemReader(memory))
    assert float(read["scale"]) == 3.5


def test_what_is_rescued_goes_to_a_url(
    tmp_path: Path, memory: str, run: Run, writes: list[str]
) -> None:
    save_unaware(tmp_path, {"ep": 2, "edp": 2})
    upload(tmp_path, f"{memory}/ckpt")
    writes.clear()
    out = f"{memory}/rescued"
    ran = run("doctor", f"{memory}/ckpt", "--mesh", "ep=2,edp=2", "--rescue", out, "--json")
    assert ran.code == 1, ran.err
    assert ran.json["rescue"]["path"] == out
    assert writes[-2:] == ["rescue.json", ".metadata"]
    document = json.loads(fsspec.filesystem("memory").cat_file(f"{out}/rescue.json"))
    assert document["rescued_from"] == f"{memory}/ckpt"
    assert run("verify", out, "--contents").code == 0


def test_a_picture_goes_to_a_url(tmp_path: Path, memory: str, run: Run) -> None:
    pytest.importorskip("matplotlib")
    save_sharded(tmp_path)
    assert run("draw", tmp_path, "-o", f"{memory}/a.png").code == 0
    assert fsspec.filesystem("memory").cat_file(f"{memory}/a.png").startswith(b"\x89PNG")


def test_no_command_makes_a_folder_of_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    save_sharded(tmp_path / "ckpt", collectives=False)
    monkeypatch.chdir(tmp_path)
    for command in (
        ("verify", "nothing://b/x"),
        ("merge-metadata", "nothing://b/x"),
        ("doctor", "nothing://b/x", "--rescue", "nothing://b/y"),
        ("export", "ckpt", "nothing://b/x", "--to", "hf"),
        ("export", "ckpt", "nothing://b/x", "--to", "torch"),
        ("import", "ckpt", "nothing://b/x", "--from", "hf"),
        ("import", "ckpt", "nothing://b/x", "--from", "megatron"),
        ("draw", "ckpt", "-o", "nothing://b/x.png"),
    ):
        ran = run(*command)
        assert (ran.code, ran.out) == (2, ""), command
        assert "Protocol not known: nothing" in ran.err
        assert ran.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_options_of_the_storage_are_given_by_name(memory: str, tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path)
    upload(tmp_path, memory)
    options = ("--storage-option", f"path={memory}", "--storage-option", "target_protocol=memory")
    before = dict(fsspec.config.conf)
    ran = run("verify", "dir://ckpt/..", *options)
    assert fsspec.config.conf == before
    assert ran.code in (0, 2)
    ran = run("verify", memory, "--storage-option", "nonsense")
    assert (ran.code, "write KEY=VALUE" in ran.err) == (2, True)
