"""Checkpoints of unknown origin: no hang, no way out of the directory, one line, little memory."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open

from dcp_placements import (
    PlacementError,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    offline,
)
from dcp_placements.offline import open_source, verify
from tests.convert.hostile import Hostile
from tests.offline_scenes import Run, save_hugging_face, save_sharded
from tests.storage_scenes import stock_metadata

ROOT = Path(__file__).parents[2]


def replaced_by_link(path: Path, outside: Path) -> str:
    """Move a data file out of a checkpoint, and leave a link to it."""
    name = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size).name
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    return name


def test_links_out_of_the_checkpoint_are_not_followed(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "ckpt")
    name = replaced_by_link(tmp_path / "ckpt", tmp_path / "outside")
    found = verify(tmp_path / "ckpt", contents=True)
    assert {(fault.kind, fault.files) for fault in found.faults} == {("missing_file", (name,))}
    assert f"leads out of the directory, to {tmp_path / 'outside'}" in found.faults[0].message
    ran = run("export", tmp_path / "ckpt", tmp_path / "out", "--prefix", "")
    assert ran.code in (1, 2)
    assert not (tmp_path / "out").exists()
    (tmp_path / "ckpt" / ".metadata").rename(tmp_path / "metadata")
    (tmp_path / "ckpt" / ".metadata").symlink_to(tmp_path / "metadata")
    assert "leads out of the directory" in run.fails("inspect", tmp_path / "ckpt")


def test_links_within_a_checkpoint_or_to_it_are_followed(tmp_path: Path) -> None:
    save_sharded(tmp_path / "ckpt")
    file = next((tmp_path / "ckpt").glob("*.distcp"))
    (tmp_path / "ckpt" / "kept").mkdir()
    file.rename(tmp_path / "ckpt" / "kept" / "data")
    file.symlink_to(Path("kept") / "data")
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    assert verify(tmp_path / "link", contents=True).sound


def test_a_snapshot_of_the_hubs_cache_is_read(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    save_hugging_face(snapshot, {"a": torch.ones(2), "b": torch.ones(3)})
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / ".." / "blobs" / str(number))
    assert sorted(open_source(snapshot).tensors) == ["a", "b"]
    assert verify(snapshot).sound


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("out", "it leads out of the directory, to "),
        ("dangling", "it is a link to what is not there"),
        ("fifo", "it is no plain file"),
        ("directory", "it is no plain file"),
    ],
)
def test_safetensors_that_are_not_opened_are_refused_by_name(
    tmp_path: Path, run: Run, kind: str, why: str, indexed: bool
) -> None:
    path, other = tmp_path / "hf", tmp_path / "other"
    for one in (path, other):
        save_hugging_face(one, {"a": torch.ones(2), "b": torch.ones(3)})
    if not indexed:
        (path / "model.safetensors.index.json").unlink()
    file = max(path.glob("*.safetensors"))
    file.rename(tmp_path / "kept")
    if kind in ("out", "dangling"):
        file.symlink_to(tmp_path / ("kept" if kind == "out" else "nowhere"))
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    for asked in (
        ("verify", path, "--contents"),
        ("inspect", path),
        ("diff", path, path),
        ("diff", other, path),
        ("import", path, tmp_path / "out"),
    ):
        err = run.fails(*asked)
        assert f"{file}: {why}" in err
        assert "way out:     fetch the file into the directory: cp -L" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["inspect", "verify", "doctor"])
def test_a_fifo_does_not_hang(tmp_path: Path, run: Run, command: str) -> None:
    save_sharded(tmp_path)
    name = max(tmp_path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    name.unlink()
    os.mkfifo(name)
    ran = run(command, tmp_path)
    assert ran.code in (0, 1, 2)
    if command == "verify":
        assert "no plain file" in ran.out
    (tmp_path / ".metadata").unlink()
    os.mkfifo(tmp_path / ".metadata")
    assert "no plain file" in run.fails(command, tmp_path)


def load(path: Path, state_dict: dict[str, Any], *, planner: Any = None) -> dict[str, Any]:
    """Load with the restricted reader."""
    reader = PlacementFileSystemReader(path, restricted=True)
    dcp.load(state_dict, storage_reader=reader, planner=planner, no_dist=True)
    return state_dict


def refusal(path: Path, state_dict: dict[str, Any], *, planner: Any = None) -> str:
    """Return what a load with the restricted reader says."""
    with pytest.raises(dcp.CheckpointException) as caught:
        load(path, state_dict, planner=planner)
    return str(caught.value.failures[0][0])


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("planner", [PlacementLoadPlanner, dcp.DefaultLoadPlanner])
def test_the_restricted_reader_loads_what_runs_nothing(
    tmp_path: Path, lean: bool, planner: Any
) -> None:
    """M65."""
    writer = PlacementFileSystemWriter(tmp_path) if lean else dcp.FileSystemWriter(tmp_path)
    held = {"w": torch.arange(12.0).reshape(3, 4), "step": 3, "nested": {"lr": [0.1, "a"]}}
    dcp.save(held, storage_writer=writer, no_dist=True)
    found = load(
        tmp_path,
        {"w": torch.zeros(3, 4), "step": 0, "nested": {"lr": [0.0, ""]}},
        planner=planner(),
    )
    assert torch.equal(found["w"], held["w"])  # type: ignore[arg-type]
    assert (found["step"], found["nested"]) == (3, {"lr": [0.1, "a"]})


@pytest.mark.parametrize("planner", [PlacementLoadPlanner, dcp.DefaultLoadPlanner])
def test_the_restricted_reader_runs_no_object(tmp_path: Path, planner: Any) -> None:
    marker = tmp_path / "executed"
    held = {"w": torch.ones(3), "object": Hostile(marker)}
    dcp.save(held, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    message = refusal(tmp_path / "ckpt", {"w": torch.zeros(3), "object": 0}, planner=planner())
    assert message.startswith("object: this object is not loaded")
    assert not marker.exists()
    found = load(tmp_path / "ckpt", {"w": torch.zeros(3)}, planner=planner())
    assert torch.equal(found["w"], torch.ones(3))
    dcp.load({"w": torch.zeros(3), "object": 0}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert marker.exists(), "the object of the test should do something"


def test_the_restricted_reader_runs_no_metadata(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "executed"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    metadata = stock_metadata(tmp_path / "ckpt")
    metadata.planner_data = Hostile(marker)
    (tmp_path / "ckpt" / ".metadata").write_bytes(pickle.dumps(metadata))
    # Torch 2.10 drops the message, which is logged then.
    assert "posix.system" in refusal(tmp_path / "ckpt", {"w": torch.zeros(3)}) + caplog.text
    assert not marker.exists()


@pytest.mark.parametrize("how", ["link", "path", "fifo"])
def test_the_restricted_reader_stays_in_its_directory(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ckpt"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    if how == "fifo":
        (path / "__0_0.distcp").unlink()
        os.mkfifo(path / "__0_0.distcp")
    elif how == "link":
        replaced_by_link(path, tmp_path / "outside")
    else:
        (path / "__0_0.distcp").rename(tmp_path / "outside")
        metadata = stock_metadata(path)
        for info in metadata.storage_data.values():
            info.relative_path = "../outside"
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    expected = {
        "link": "leads out of the directory",
        "path": "a file outside of the checkpoint",
        "fifo": "no plain file",
    }
    assert expected[how] in refusal(path, {"w": torch.zeros(3)}) + caplog.text


FORGED = "w\nall: sound (5 tensors)\x1b[2K\u202e\udc80"


def rewritten(path: Path, metadata: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def save_stock(path: Path, **held: Any) -> Any:
    """Save with torch's own writer; return the metadata."""
    dcp.save(held or {"w": torch.ones(3, 4)}, checkpoint_id=path, no_dist=True)
    return stock_metadata(path)


@pytest.mark.parametrize(
    "command", ["inspect", "verify", "diff", "rehearse", "doctor", "export", "draw"]
)
def test_names_are_escaped_wherever_they_are_printed(
    tmp_path: Path, run: Run, command: str
) -> None:
    """M62: a key must not forge a line, nor move the cursor."""
    path = tmp_path / "ckpt"
    save_stock(path, **{FORGED: torch.ones(3, 4), f"{FORGED}.object": 3})
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:100])
    more = {
        "diff": [path],
        "rehearse": ["--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=2"],
        "export": [tmp_path / "out", "--prefix", ""],
        "draw": [FORGED, "-o", tmp_path / "a.png"],
    }
    ran = run(command, path, *more.get(command, []))
    for text in (ran.out, ran.err):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert not any(line.startswith("all: sound") for line in text.splitlines())
    if command not in ("doctor", "draw", "rehearse"):
        assert r"w\nall: sound (5 tensors)\x1b[2K\u202e\udc80" in ran.out + ran.err


def test_files_and_provenance_that_forge_lines_are_escaped(tmp_path: Path, run: Run) -> None:
    metadata = save_stock(tmp_path)
    metadata.planner_data = {"dcp_placements": {"save_id": FORGED, "versions": {FORGED: FORGED}}}
    for info in metadata.storage_data.values():
        info.relative_path = "x\nall: sound\x1b[2K"
    rewritten(tmp_path, metadata)
    for command in ("inspect", "verify"):
        ran = run(command, tmp_path)
        assert ran.code in (0, 1)
        assert "\x1b" not in ran.out
        assert not any(line.startswith("all: sound") for line in ran.out.splitlines())


@pytest.mark.parametrize("file", ["\ud800", "a\0b", ""])
def test_names_that_no_file_has_are_one_message(tmp_path: Path, run: Run, file: str) -> None:
    metadata = save_stock(tmp_path)
    for info in metadata.storage_data.values():
        info.relative_path = file
    rewritten(tmp_path, metadata)
    run.fails("verify", tmp_path)


def safetensors_of(path: Path, header: bytes) -> None:
    path.mkdir(exist_ok=True)
    data = struct.pack("<Q", len(header)) + header + bytes(64)
    (path / "model.safetensors").write_bytes(data)


HEADERS = {
    "deep": b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "shape": b'{"w":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]}}',
    "product": b'{"w":{"dtype":"F32","shape":[' + b"9," * 10_000 + b'9],"data_offsets":[0,4]}}',
    "digits": b'{"w":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,4]}}',
    "dtype": b'{"w":{"dtype":{"a":1},"shape":[1],"data_offsets":[0,4]}}',
    "offsets": b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"__metadata__":'
    b'{"DCP_SHARDING_INFO":"{\\"w\\":{\\"saved_offsets\\":[9223372036854775807]}}"}}',
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_no_tensor_has_is_one_message(tmp_path: Path, run: Run, name: str) -> None:
    safetensors_of(tmp_path / "hf", HEADERS[name])
    for command in ("inspect", "verify"):
        err = run.fails(command, tmp_path / "hf")
        assert len(err) < 1000


@pytest.mark.parametrize("command", ["inspect", "verify", "rehearse", "reshard"])
def test_m102_parts_of_a_tensor_larger_than_any_are_one_message(
    tmp_path: Path, run: Run, command: str
) -> None:
    sharding = json.dumps({"w": {"saved_offsets": [1 << 62]}})
    header = {"w": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}
    header["__metadata__"] = {"DCP_SHARDING_INFO": sharding}
    safetensors_of(tmp_path / "hf", json.dumps(header).encode())
    out = [tmp_path / "out"] if command == "reshard" else []
    rules = ["--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=2"]
    err = run.fails(command, tmp_path / "hf", *out, *(rules if command.startswith("re") else []))
    assert f"w is larger than any tensor: ({(1 << 62) + 16},) of torch.float32" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


RANGES = {
    "sound": b'{"w":{"dtype":"U8","shape":[60],"data_offsets":[4,64]},'
    b'"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
    b'"none":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}}',
    "overlap": b'{"w":{"dtype":"U8","shape":[64],"data_offsets":[0,64]},'
    b'"v":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}',
    "hole": b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
    b'"v":{"dtype":"U8","shape":[4],"data_offsets":[60,64]}}',
    "one name twice": b'{"w":{"dtype":"U8","shape":[32],"data_offsets":[0,32]},'
    b'"w":{"dtype":"U8","shape":[32],"data_offsets":[32,64]}}',
    "rest": b'{"w":{"dtype":"U8","shape":[63],"data_offsets":[0,63]}}',
}


@pytest.mark.parametrize("name", RANGES)
def test_tensors_that_share_bytes_or_leave_some_are_refused(
    tmp_path: Path, run: Run, name: str
) -> None:
    safetensors_of(tmp_path / "hf", RANGES[name])
    is_sound = name == "sound"
    with nullcontext() if is_sound else pytest.raises(SafetensorError):
        safe_open(tmp_path / "hf" / "model.safetensors", "pt")
    assert run("verify", tmp_path / "hf").code == (0 if is_sound else 2)
    ran = run(
        "import",
        tmp_path / "hf",
        tmp_path / "out",
    )
    assert ran.code == (0 if is_sound else 2)
    assert (tmp_path / "out").exists() == is_sound


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"weight_map": {"w": 3}}', b"\xff\xfe"])
def test_an_index_that_is_none_is_one_message(tmp_path: Path, run: Run, text: bytes) -> None:
    save_hugging_face(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)})
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    run.fails("verify", tmp_path)
    metadata = save_stock(tmp_path / "dist")
    assert metadata is not None
    (tmp_path / "dist" / "metadata.json").write_bytes(text)
    assert run("inspect", tmp_path / "dist").code == 0


def test_what_nobody_foresaw_is_one_line(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("a\nb\x1b")

    monkeypatch.setattr(offline, "open_source", fails)
    with pytest.raises(ZeroDivisionError):
        run("verify", tmp_path)
    monkeypatch.delenv("DCP_PLACEMENTS_DEBUG")
    err = run.fails("verify", tmp_path)
    expected = r"dcp-placements: ZeroDivisionError: a\nb\x1b (DCP_PLACEMENTS_DEBUG=1 shows where)"
    assert err == expected + "\n"


def of_tensor(**changes: Any) -> Any:
    return lambda m: vars(m.state_dict_metadata["w"]).update(changes)


def of_places(**changes: Any) -> Any:
    return lambda m: [vars(info).update(changes) for info in m.storage_data.values()]


def of_record(**values: Any) -> Any:
    return lambda m: m.planner_data.update(dcp_placements={"save_id": "x", **values})


BROKEN = "its provenance is broken: "
WRONG: dict[str, Any] = {
    "a tuple in place of a Metadata": lambda m: (1, 2),
    "storage_meta is a str": lambda m: vars(m).update(storage_meta="x"),
    "storage_data is a NoneType": lambda m: vars(m).update(storage_data=None),
    "a key is a int": lambda m: m.state_dict_metadata.update({3: m.state_dict_metadata["w"]}),
    "the metadata of a key is a int": lambda m: m.state_dict_metadata.update(w=3),
    "state_dict_metadata is a list": lambda m: vars(m).update(state_dict_metadata=[]),
    "planner_data is a int": lambda m: vars(m).update(planner_data=3),
    "the chunks of a tensor is a int": of_tensor(chunks=3),
    "a chunk is a int": of_tensor(chunks=[3]),
    "a chunk has other dims than its tensor": lambda m: vars(
        m.state_dict_metadata["w"].chunks[0]
    ).update(sizes=(3,)),
    "size is a NoneType": of_tensor(size=None),
    "size is negative": of_tensor(size=(-1, 4)),
    "size is larger than any tensor": of_tensor(size=(1 << 70, 4)),
    "the properties of a tensor is a str": of_tensor(properties="x"),
    "dtype is a str": lambda m: vars(m.state_dict_metadata["w"].properties).update(dtype="x"),
    "relative_path is a list": of_places(relative_path=["x"]),
    "a file outside of the checkpoint: '../x'": of_places(relative_path="../x"),
    "a file outside of the checkpoint: '/etc/passwd'": of_places(relative_path="/etc/passwd"),
    "length is negative": of_places(length=-1),
    "offset is a str": of_places(offset="x"),
    "offset is larger than any tensor": of_places(offset=1 << 70),
    "the key of a place is a int": lambda m: [vars(at).update(fqn=3) for at in m.storage_data],
    "a place is a int": lambda m: m.storage_data.update({next(iter(m.storage_data)): 3}),
    f"{BROKEN}world_size is a NoneType": of_record(world_size=None),
    f"{BROKEN}save_id is a NoneType": of_record(save_id=None),
    f"{BROKEN}versions": of_record(versions=3),
}


AS_TORCH = [*list(WRONG)[:3], *(found for found in WRONG if found.startswith("a file"))]
"""What torch fails on by itself, or reads; a reader that is not restricted does as torch."""

PLACE = "the key of a place is a int"


@pytest.mark.parametrize("found", WRONG)
def test_m61_metadata_of_wrong_types_are_one_message(tmp_path: Path, run: Run, found: str) -> None:
    metadata = save_stock(tmp_path, w=torch.ones(3, 4), v=torch.ones(2))
    changed = WRONG[found](metadata)
    rewritten(tmp_path, changed if isinstance(changed, tuple) else metadata)
    before = (tmp_path / ".metadata").read_bytes()
    into = {"w": torch.zeros(3, 4), "v": torch.zeros(2)}
    stock, ours = dcp.FileSystemReader(tmp_path), PlacementFileSystemReader(tmp_path)
    for reader in () if found in AS_TORCH else (ours, stock):
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.load(into, storage_reader=reader, planner=PlacementLoadPlanner(), no_dist=True)
        (error, _), *_ = caught.value.failures.values()
        assert isinstance(error, PlacementError)
        assert f"found:       {found}" in str(error)
    assert not into["w"].any()
    text = "the index of a chunk that is no key and offset" if found == PLACE else found
    with pytest.raises(PlacementError, match=re.escape(text)):
        PlacementFileSystemReader(tmp_path, restricted=True).read_metadata()
    for command in (["inspect"], ["verify"], ["stock-metadata"]):
        err = run.fails(command[0], tmp_path, *command[1:])
        assert text in err
        assert "DCP_PLACEMENTS_DEBUG" not in err
    assert (tmp_path / ".metadata").read_bytes() == before


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("planner", [PlacementLoadPlanner, dcp.DefaultLoadPlanner])
def test_chunks_without_a_place_are_one_message(
    tmp_path: Path, lean: bool, restricted: bool, planner: Any
) -> None:
    """As after one flipped bit in a key of ``storage_data``, where no index is read."""
    whole = save_sharded(tmp_path, lean=lean)
    keys = ("layers.0.experts.w1", "layers.1.attention")
    metadata = stock_metadata(tmp_path)
    for index in [at for at in metadata.storage_data if at.fqn in keys]:
        del metadata.storage_data[index]
    rewritten(tmp_path, metadata)
    reader = PlacementFileSystemReader(tmp_path, restricted=restricted)
    into = {key: torch.zeros_like(value) for key, value in whole.items()}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(into, storage_reader=reader, planner=planner(), no_dist=True)
    (error, _), *_ = caught.value.failures.values()
    assert isinstance(error, PlacementError)
    assert "layers.0.experts.w1: the metadata name no file for the chunk at (0, 0, 0)" in str(error)
    assert "layers.1.attention: the metadata name no file for the chunk at (0, 0)" in str(error)
    assert not any(value.any() for value in into.values())


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
def test_a_pickle_for_which_torch_would_need_gigabytes_is_not_sound(
    tmp_path: Path, run: Run
) -> None:
    """The unpickler in C has an array as long as the largest slot of the memo."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = (tmp_path / ".metadata").read_bytes()
    put = b"r" + 0x7FFFFFFF.to_bytes(4, "little")
    (tmp_path / ".metadata").write_bytes(metadata[:-1] + put + b".")
    err = run.fails("--most-memory", "1GiB", "verify", tmp_path)
    assert "it asks for more memory than there is" in err


def test_damaged_files_are_never_more_than_a_message(tmp_path: Path) -> None:
    """Some seconds of damage to ``.metadata`` of both writers, headers and indices."""
    save_sharded(tmp_path / "lean")
    save_sharded(tmp_path / "stock", lean=False)
    save_hugging_face(tmp_path / "hf", {"a": torch.ones(2, 3), "b": torch.ones(3)})
    commands = ["inspect", "verify", "doctor"]
    jobs = [
        (str(tmp_path / "lean" / ".metadata"), commands),
        (str(tmp_path / "stock" / ".metadata"), commands),
        (str(next((tmp_path / "hf").glob("*.safetensors"))), commands[:2]),
        (str(tmp_path / "hf" / "model.safetensors.index.json"), commands[:2]),
    ]
    seconds = os.environ.get("DCP_PLACEMENTS_FUZZ_S", "4")
    program = ROOT / "tests" / "ranks" / "fuzz_worker.py"
    done = subprocess.run(
        [sys.executable, program, seconds, json.dumps(jobs)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DCP_PLACEMENTS_DEBUG": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert found["rounds"] > 20
    assert found["grown"] < 256 << 20
