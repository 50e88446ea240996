"""The command line on URLs: checkpoints, outputs and their last file, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load as load_safetensors
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from dcp_placements import offline
from dcp_placements.errors import CannotLook
from dcp_placements.offline import (
    diff,
    export_safetensors,
    open_source,
    stock_metadata,
)
from dcp_placements.offline.output import MARKER, UrlOutput
from dcp_placements.storage.store import UrlStore, open_store
from tests.offline_scenes import Run, rules_by_ep, save_hugging_face, save_sharded, wholes
from tests.remote_scenes import contents, names
from tests.storage_scenes import load, same


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
    ran = run("export", f"{memory}/ckpt", out, "--max-shard-size", "500", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["out"] == out
    held = names(out)
    assert held[-1] == "model.safetensors.index.json"
    tensors: dict[str, torch.Tensor] = {}
    for name in held[:-1]:
        tensors |= load_safetensors(fsspec.filesystem("memory").cat_file(f"{out}/{name}"))
    assert tensors.keys() == wholes().keys()
    assert all(same(tensors[key], value) for key, value in wholes().items())
    again = run("export", f"{memory}/ckpt", out)
    assert (again.code, "is there already" in again.err) == (2, True)
    ran = run("import", out, f"{memory}/dcp")
    assert ran.code == 0, ran.err
    assert diff(f"{memory}/dcp", out).same
    assert run("verify", f"{memory}/dcp", "--contents").code == 0
    assert run("diff", f"{memory}/dcp", tmp_path / "ckpt", "--json").code in (0, 1)


class Sftp(MemoryFileSystem):
    """A file system that is no object store: a file may be there in part."""

    protocol = "parts"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("parts://", "memory://"))


def test_what_fails_leaves_nothing_where_a_file_may_be_there_in_part(tmp_path: Path) -> None:
    fsspec.register_implementation("parts", Sftp, clobber=True)
    four_files(tmp_path)
    stopped_export(tmp_path, "parts://there/out")
    assert names("parts://there/out") == []
    export_safetensors(tmp_path, "parts://there/out", max_shard_size=4000)
    assert len(names("parts://there/out")) == 5
    fsspec.filesystem("parts").pipe_file("parts://there/two/.unfinished", b"x y")
    with pytest.raises(CannotLook, match="another output was begun here"):
        export_safetensors(tmp_path, "parts://there/two", max_shard_size=4000)


def test_of_two_that_begin_at_the_same_moment_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a service lets both create the marker, and the loser removes nothing of the other's."""
    fsspec.register_implementation("parts", Sftp, clobber=True)
    four_files(tmp_path)
    out, begun = "parts://there/both", []
    create, file = UrlStore.create_new, UrlOutput.file

    def both(self: UrlStore, name: str, data: bytes) -> bool:
        create(self, name, data)
        return True

    def late(self: UrlOutput, name: str) -> Any:
        if not begun:
            begun.append(name)
            other = UrlStore(out)
            other.remove([MARKER])  # as if it had looked before the first one created it
            export_safetensors(tmp_path, f"{out}2", max_shard_size=4000)
            for path in names(f"{out}2"):
                if not path.startswith("model.safetensors.index"):
                    other.create_new(path, other_bytes(f"{out}2/{path}"))
            other.create_new(MARKER, b"other 1")
        return file(self, name)

    def other_bytes(url: str) -> bytes:
        data: bytes = fsspec.filesystem("parts").cat_file(url)
        return data

    monkeypatch.setattr(UrlStore, "create_new", both)
    monkeypatch.setattr(UrlOutput, "file", late)
    with pytest.raises(CannotLook, match="another output was begun here"):
        export_safetensors(tmp_path, out, max_shard_size=4000)
    assert len(names(out)) == 5


@pytest.mark.parametrize("refused", [(0,), (1,), (1, 2)], ids=str)
def test_a_replacement_that_is_not_renamed_leaves_the_older_file(
    monkeypatch: pytest.MonkeyPatch, refused: tuple[int, ...]
) -> None:
    """The older file has another name meanwhile, as no file is renamed over another one."""
    fsspec.register_implementation("parts", Sftp, clobber=True)
    held = open_store("parts://there/ckpt")
    with held.create(".metadata") as stream:
        stream.write(b"older")
    move, calls = Sftp.mv, iter(range(9))

    def moved(self: Any, *paths: str, **options: Any) -> None:
        if next(calls) in refused:
            raise OSError("no more requests")
        move(self, *paths, **options)

    monkeypatch.setattr(Sftp, "mv", moved)
    with (
        pytest.raises(OSError, match="no more requests") as raised,
        held.replace(".metadata") as new,
    ):
        new.write(b"newer")
    (name,) = names("parts://there/ckpt")
    if len(refused) == 1:
        assert name == ".metadata"
    else:
        way_out = f"way out:     rename parts://there/ckpt/{name} to parts://there/ckpt/.metadata"
        assert way_out in str(raised.value)
    with held.open(name) as stream:
        assert stream.read() == b"older"


def stopped_export(source: Path, url: str, **options: Any) -> None:
    """Begin an export of four files, and stop it after two of them."""

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_safetensors(source, url, max_shard_size=4000, progress=stop, **options)


def four_files(path: Path) -> dict[str, torch.Tensor]:
    tensors = {f"w{n}": torch.arange(1000.0) + n for n in range(4)}
    save_hugging_face(path, tensors)
    return tensors


def held_at(url: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an export, and check that nothing but its files is there."""
    fs = fsspec.filesystem("memory")
    index = json.loads(fs.cat_file(f"{url}/model.safetensors.index.json"))
    files = sorted(set(index["weight_map"].values()))
    assert names(url) == [*files, "model.safetensors.index.json"]
    return {
        k: v for file in files for k, v in load_safetensors(fs.cat_file(f"{url}/{file}")).items()
    }


def test_an_export_goes_on_where_it_was_stopped(tmp_path: Path, memory: str) -> None:
    tensors = four_files(tmp_path)
    out = f"{memory}/out"
    stopped_export(tmp_path, out)
    assert [name for name in names(out) if not name.startswith(MARKER)] == [
        f"model-0000{n}-of-00004.safetensors" for n in (1, 2)
    ]
    with pytest.raises(CannotLook, match="the export to this directory has not finished"):
        open_source(out)
    exported = export_safetensors(tmp_path, out, max_shard_size=4000)
    assert len(exported.kept) == 2
    held = held_at(out)
    assert held.keys() == tensors.keys()
    assert all(same(held[key], value) for key, value in tensors.items())
    with pytest.raises(CannotLook, match="is there already"):
        export_safetensors(tmp_path, out, max_shard_size=4000)


def test_another_export_takes_nothing_from_the_one_that_was_stopped(
    tmp_path: Path, memory: str
) -> None:
    four_files(tmp_path)
    out = f"{memory}/out"
    stopped_export(tmp_path, out)
    before = contents(out)
    with pytest.raises(CannotLook, match="another output was begun here") as caught:
        export_safetensors(tmp_path, out, max_shard_size=4000, dtype=torch.bfloat16)
    assert f"remove what is there, {MARKER} last" in str(caught.value)
    assert contents(out) == before
    fsspec.filesystem("memory").rm(out, recursive=True)
    exported = export_safetensors(tmp_path, out, max_shard_size=4000, dtype=torch.bfloat16)
    assert exported.kept == ()
    assert {tensor.dtype for tensor in held_at(out).values()} == {torch.bfloat16}


def test_a_source_that_was_written_again_is_another_output(tmp_path: Path, memory: str) -> None:
    source, out = f"{memory}/source", f"{memory}/out"
    four_files(tmp_path)
    upload(tmp_path, source)
    stopped_export(source, out)  # type: ignore[arg-type]
    upload(tmp_path, source)
    with pytest.raises(CannotLook, match="another output was begun here"):
        export_safetensors(source, out, max_shard_size=4000)


def test_of_two_with_one_identity_the_second_goes_on_and_the_bytes_are_the_same(
    tmp_path: Path, memory: str
) -> None:
    four_files(tmp_path)
    out, ended = f"{memory}/out", []

    def meanwhile(done: int, total: int) -> None:
        if done > total // 2 and not ended:
            ended.append(export_safetensors(tmp_path, out, max_shard_size=4000))

    with pytest.raises(CannotLook, match="is there already"):
        export_safetensors(tmp_path, out, max_shard_size=4000, progress=meanwhile)
    assert len(ended) == 1
    assert len(held_at(out)) == 4
    export_safetensors(tmp_path, f"{memory}/alone", max_shard_size=4000)
    assert contents(out) == contents(f"{memory}/alone")


@pytest.mark.parametrize("note", [b"", b"no json", b"\xff", b'{"files": [], "identity": null}'])
def test_a_marker_of_somebody_else_is_left_alone(memory: str, note: bytes) -> None:
    fs, url = fsspec.filesystem("memory"), f"{memory}/out"
    fs.pipe_file(f"{url}/{MARKER}", note)
    fs.pipe_file(f"{url}/part", b"x")
    before = contents(url)
    with pytest.raises(CannotLook, match=f"found:       {MARKER}"):
        UrlOutput(url).directory(["part", "whole"], "mine").__enter__()
    assert contents(url) == before


def test_an_output_that_was_finished_meanwhile_stays(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process begins and finishes between any two requests."""
    url = f"{memory}/out"
    real = UrlStore.create_new

    def late(self: UrlStore, path: str, data: bytes) -> bool:
        monkeypatch.setattr(UrlStore, "create_new", real)
        output = UrlOutput(url)
        with output.directory(["theirs"], "their"), output.file("theirs") as stream:
            stream.write(b"x")
        return real(self, path, data)

    waiting = UrlOutput(url)
    monkeypatch.setattr(UrlStore, "create_new", late)
    with pytest.raises(CannotLook, match="is there already"):
        waiting.directory(["mine"], "mine").__enter__()
    assert names(url) == ["theirs"]
    with pytest.raises(CannotLook, match="is there already"):
        UrlOutput(url)
    with pytest.raises(CannotLook, match="is there already"):
        UrlOutput(f"{url}/theirs")


def test_a_finished_output_with_its_marker_left_over_stays(memory: str) -> None:
    fs, url = fsspec.filesystem("memory"), f"{memory}/out"
    for name, data in ((MARKER, b"mine 1"), ("__0_0.distcp", b"x"), (".metadata", b"x")):
        fs.pipe_file(f"{url}/{name}", data)
    with pytest.raises(CannotLook, match="is there already"):
        UrlOutput(url).directory(["__0_0.distcp", ".metadata"], "mine").__enter__()
    assert names(url) == [".metadata", "__0_0.distcp"]


OTHER_FILES = ("step-100/.metadata", ".metadata", "notes.txt", f"step/{MARKER}1", f"{MARKER}01")


@pytest.mark.parametrize("name", OTHER_FILES)
def test_an_interrupted_export_goes_on_beside_no_file_of_others(
    tmp_path: Path, memory: str, name: str
) -> None:
    four_files(tmp_path)
    out = f"{memory}/out"
    stopped_export(tmp_path, out)
    fsspec.filesystem("memory").pipe_file(f"{out}/{name}", b"theirs")
    before = contents(out)
    with pytest.raises(CannotLook, match="another output was begun here") as caught:
        export_safetensors(tmp_path, out, max_shard_size=4000)
    assert f"found:       {name}: not of this output\n" in str(caught.value)
    assert contents(out) == before


def test_stock_metadata_are_written_at_a_url(tmp_path: Path, memory: str, run: Run) -> None:
    save_sharded(tmp_path, stock_metadata=False)
    upload(tmp_path, memory)
    ran = run("stock-metadata", memory)
    assert ran.code == 0, ran.err
    stock_metadata(memory)  # again, over the first
    read = load(Path("none"), {"scale": torch.zeros(())}, FsspecReader(memory))
    assert float(read["scale"]) == 3.5


def test_a_picture_goes_to_a_url(tmp_path: Path, memory: str, run: Run) -> None:
    pytest.importorskip("matplotlib")
    save_sharded(tmp_path)
    assert run("draw", tmp_path, "-o", f"{memory}/a.png").code == 0
    assert fsspec.filesystem("memory").cat_file(f"{memory}/a.png").startswith(b"\x89PNG")


def test_no_command_makes_a_folder_of_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    save_sharded(tmp_path / "ckpt")
    monkeypatch.chdir(tmp_path)
    for command in (
        ("verify", "nothing://b/x"),
        ("stock-metadata", "nothing://b/x"),
        ("doctor", "nothing://b/x"),
        ("export", "ckpt", "nothing://b/x"),
        ("import", "ckpt", "nothing://b/x"),
        ("draw", "ckpt", "-o", "nothing://b/x.png"),
    ):
        err = run.fails(*command)
        assert "Protocol not known: nothing" in err
        assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.fixture
def by_options(memory: str, tmp_path: Path) -> dict[str, str]:
    """Save a checkpoint, and safetensors, that only these options reach: as ``dir://ckpt``."""
    save_sharded(tmp_path / "ckpt")
    save_hugging_face(tmp_path / "hub", {"w": torch.arange(4.0)})
    for name in ("ckpt", "hub"):
        upload(tmp_path / name, f"{memory}/{name}")
    return {"path": memory.removeprefix("memory:/"), "target_protocol": "memory"}


def test_every_function_takes_options_of_the_storage(
    by_options: dict[str, str], tmp_path: Path
) -> None:
    url, given = "dir://ckpt", {"storage_options": by_options}
    before = dict(fsspec.config.conf)
    assert len(offline.inspect(url, **given).tensors) == 5
    assert offline.inspect_tensor(url, "scale", **given).chunks
    assert len(offline.shapes(url, **given)) == 5
    assert offline.verify(url, contents=True, **given).sound
    assert offline.diff(url, tmp_path / "ckpt", **given).same
    assert offline.diagnose(url, **given).tensors
    assert offline.rehearse(url, rules_by_ep, {"ep": 2}, **given).loads
    assert len(offline.open_source(url, **given).tensors) == 5
    assert len(offline.open_source(url, **given).tensors) == 5
    assert offline.export_safetensors(url, "dir://hf", prefix="", **given).is_written
    assert offline.import_checkpoint("dir://hub", "dir://dcp", **given).is_written
    assert offline.reshard(url, "dir://ep2", rules_by_ep, {"ep": 2}, **given).is_written
    offline.stock_metadata(url, **given)
    for whole in ("dir://hf", "dir://hf/model.safetensors"):
        assert offline.verify(url, whole=whole, **given).sound
        assert offline.diagnose("dir://hub", whole=whole, **given).lost
    for name in ("ckpt", "hf", "dcp", "ep2"):
        assert offline.verify(f"dir://{name}", **given).sound
    assert fsspec.config.conf == before
    with pytest.raises(CannotLook, match="dir://ckpt"):
        offline.inspect(url)


RULES = ("--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=2")


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "dir://ckpt"),
        ("inspect", "dir://ckpt", "scale"),
        ("verify", "dir://ckpt", "--contents"),
        ("diff", "dir://ckpt", "dir://ckpt"),
        ("doctor", "dir://ckpt"),
        ("doctor", "dir://hub", "--whole", "dir://hub"),
        ("rehearse", "dir://ckpt", *RULES),
        ("reshard", "dir://ckpt", "dir://ep2", *RULES),
        ("export", "dir://ckpt", "dir://hf"),
        ("import", "dir://hub", "dir://dcp"),
        ("stock-metadata", "dir://ckpt"),
    ],
    ids=" ".join,
)
def test_every_command_takes_options_of_the_storage(
    by_options: dict[str, str], run: Run, command: tuple[str, ...]
) -> None:
    options = [x for item in by_options.items() for x in ("--storage-option", "=".join(item))]
    before = dict(fsspec.config.conf)
    ran = run(*command, *options)
    assert fsspec.config.conf == before
    assert ran.code == 0, ran.err
    assert run(*command).code == 2
    ran = run(*command, "--storage-option", "nonsense")
    assert (ran.code, "write KEY=VALUE" in ran.err) == (2, True)
