"""The n-th request of a save or a command fails, comes late, lies, or is the last of a process.

What is at the URL is then the older checkpoint or the new one, by torch's own reader; and what is
said of it is true: no failure of a save that is complete, and the other way round.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import PlacementFileSystemReader, PlacementFileSystemWriter
from dcp_placements.offline import open_source
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.output import MARKER
from dcp_placements.storage import store
from tests.engines import test_saved_items as engine_items
from tests.faulty_urls import SERVICE, Fault, Killed, ServiceError, faults
from tests.offline_scenes import Run, save_sharded, save_torch_dist
from tests.remote_scenes import FsspecReader, failures_of, save
from tests.storage_scenes import load

RESET = OSError("connection reset")
LATE = TimeoutError("read timed out")
DENIED = PermissionError("Forbidden")
BROKEN = ServiceError("An error occurred (InternalError)")
GONE = FileNotFoundError("NoSuchUpload")
ALWAYS = 99


@pytest.fixture(autouse=True)
def empty_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty the URLs; nobody waits before another try."""
    monkeypatch.setattr("dcp_placements.storage.remote.PAUSE_S", 0.0)
    SERVICE.files.clear()
    SERVICE.folders.clear()
    yield
    SERVICE.delay_s = 0.0


def state(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{n}.w": torch.arange(60.0) + n + value for n in range(5)}


def value_at(url: str) -> float | None:
    """Return which state is at a URL, by torch's reader; None if it finds no checkpoint."""
    read = state(-1.0)
    try:
        dcp.load(read, storage_reader=FsspecReader(url), no_dist=True)
    except dcp.CheckpointException:
        return None
    added = torch.cat([read[key] - tensor for key, tensor in state(0.0).items()])
    (value,) = added.unique().tolist()
    return float(value)


def names_at(url: str) -> list[str]:
    return sorted(p.rpartition("/")[2] for p in SERVICE.files if p.startswith(url.split("://")[1]))


def upload(folder: Path, name: str) -> None:
    for file in folder.iterdir():
        SERVICE.put(f"b/{name}/{file.name}", file.read_bytes())


# What happens at which request of a save over an older checkpoint; and whether it succeeds.
SAVES: list[tuple[str, Fault, bool]] = [
    ("oss", Fault("info", 0, RESET), True),
    ("oss", Fault("info", 0, RESET, ALWAYS), False),
    ("oss", Fault("info", 2, BROKEN), False),
    ("oss", Fault("open", 1, DENIED), False),
    ("oss", Fault("write", 1, LATE), False),
    ("oss", Fault("close", 0, RESET), False),
    ("oss", Fault("close", 0, GONE, is_late=True), True),
    ("oss", Fault("close", 1, LATE, is_late=True), True),
    ("oss", Fault("read", 0, DENIED, ALWAYS), True),
    ("oss", Fault("put", 0, RESET), True),
    ("oss", Fault("put", 0, DENIED), False),
    ("oss", Fault("put", 0, BROKEN, is_late=True), True),
    ("oss", Fault("put", 0, LATE, ALWAYS, is_late=True), True),
    ("oss", Fault("ls", 0, RESET, ALWAYS), True),
    ("oss", Fault("rm", 0, RESET, is_late=True), True),
    ("oss", Fault("rm", 1, GONE), True),
    ("pieces", Fault("mkdir", 0, RESET), True),
    ("pieces", Fault("mkdir", 0, DENIED), False),
    ("pieces", Fault("open", 2, DENIED), False),
    ("pieces", Fault("write", 0, "short"), False),
    ("pieces", Fault("write", 3, "short", name=".tmp"), False),
    ("pieces", Fault("write", 3, DENIED, name=".tmp"), False),
    ("pieces", Fault("close", 1, RESET), False),
    ("pieces", Fault("close", 2, RESET), False),
    ("pieces", Fault("mv", 0, RESET), False),
    ("pieces", Fault("mv", 0, RESET, is_late=True), True),
    ("pieces", Fault("mv", 1, BROKEN), False),
    ("pieces", Fault("mv", 1, LATE, is_late=True), True),
    ("pieces", Fault("rm", 0, DENIED), True),
    ("pieces", Fault("rm", 1, RESET, is_late=True), True),
]


def name_of(row: Any) -> str:
    if not isinstance(row, Fault):
        return " ".join(row) if isinstance(row, tuple) else str(row)
    kind = row.error if isinstance(row.error, str) else type(row.error).__name__
    late = "-late" if row.is_late else ""
    return f"{row.call}{row.at}-{kind}{late}{'-always' if row.times > 1 else ''}"


@pytest.mark.parametrize(("protocol", "fault", "succeeds"), SAVES, ids=name_of)
def test_a_save_succeeds_or_leaves_the_older_checkpoint(
    protocol: str, fault: Fault, succeeds: bool
) -> None:
    url = f"{protocol}://b/ckpt"
    save(url, state(1000.0), thread_count=2)
    if succeeds:
        with faults(fault) as service:
            save(url, state(2000.0), thread_count=2)
    else:
        with faults(fault) as service, pytest.raises(dcp.CheckpointException) as caught:
            save(url, state(2000.0), thread_count=2)
        error = failures_of(caught.value)
        assert isinstance(error, OSError)
        assert url in str(error)
    assert service.happened
    value = 2000.0 if succeeds else 1000.0
    assert value_at(url) == value
    read = load(Path("none"), state(-1.0), PlacementFileSystemReader(url))
    assert all(torch.equal(read[key], tensor) for key, tensor in state(value).items())
    if fault.call in ("rm", "close", "write", "mv") and fault.times == 1:
        left = {name for name in names_at(url) if not name.endswith(".distcp")}
        assert left - {".metadata"} == set() or name_of(fault) == "rm0-PermissionError"
    if fault.call == "rm" and protocol == "oss":
        assert len(names_at(url)) == 3, "files of the older checkpoint"


@pytest.mark.parametrize("older", [b"older", None])
def test_an_older_file_of_the_same_size_is_not_taken_for_the_new_one(older: bytes | None) -> None:
    """Torch's writer gives its metadata one temporary name, which a killed save leaves behind."""
    url = "oss://b/ckpt/.metadata.tmp"
    if older is not None:
        SERVICE.put("b/ckpt/.metadata.tmp", older)
    files = PlacementFileSystemWriter("oss://b/ckpt").fs

    def write() -> None:
        with files.create_stream(url, "wb") as stream:
            stream.write(b"newer")

    with faults(Fault("close", 0, RESET)), pytest.raises(OSError, match="reset"):
        write()
    with faults(Fault("close", 0, RESET, is_late=True)):
        if older is None:
            write()
        else:
            with pytest.raises(OSError, match="reset"):
                write()


KILLS = [("oss", "write", 3), ("oss", "put", 0), ("oss", "rm", 0)]
KILLS += [("pieces", call, at) for call, at in [("write", 12), ("close", 2), ("mv", 0), ("mv", 1)]]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("protocol", "call", "at"), KILLS)
def test_a_killed_save_leaves_nothing_that_is_taken_for_a_checkpoint(
    protocol: str, call: str, at: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.excepthook", lambda raised: None)
    url = f"{protocol}://b/ckpt"
    save(url, state(1000.0), thread_count=2)
    with faults(Fault(call, at, Killed(), is_late=late)) as service:
        try:
            save(url, state(2000.0), thread_count=2)
        except (Killed, dcp.CheckpointException):
            assert call != "rm"
    assert service.happened
    is_between = (call, at, late) in [("mv", 0, True), ("mv", 1, False)]
    assert value_at(url) in ((None,) if is_between else (1000.0, 2000.0))
    save(url, state(3000.0), thread_count=2)
    assert value_at(url) == 3000.0
    assert [name for name in names_at(url) if name.endswith(".tmp")] == []


# A request of a command at a URL that fails for good; and what the message names.
COMMANDS: list[tuple[tuple[str, ...], Fault, str]] = [
    (
        ("verify", "oss://b/items"),
        Fault("read", 0, RESET, ALWAYS, name="0.pt"),
        "b/items/model_0.pt",
    ),
    (
        ("verify", "oss://b/large"),
        Fault("read", 0, RESET, ALWAYS, name="0.pt"),
        "0.pt: it cannot be",
    ),
    (
        ("verify", "oss://b/large"),
        Fault("read", 1, "short", ALWAYS, name="0.pt"),
        "0.pt: it cannot be",
    ),
    (
        ("inspect", "oss://b/large"),
        Fault("read", 2, LATE, ALWAYS, name="0.pt"),
        "0.pt: it cannot be",
    ),
    (("inspect", "oss://b/items"), Fault("info", 2, DENIED), "oss://b/items/model_0.pt: cannot"),
    (
        ("stock-metadata", "oss://b/megatron"),
        Fault("info", 2, DENIED, ALWAYS, name="data.json"),
        "",
    ),
    (("stock-metadata", "oss://b/megatron"), Fault("read", 0, LATE, ALWAYS, name="data.json"), ""),
    (("verify", "oss://b/torch"), Fault("read", 0, DENIED, name="__1_0.distcp"), "__1_0.distcp"),
    (("verify", "oss://b/own"), Fault("info", 1, LATE, ALWAYS), "oss://b/own"),
    (("inspect", "oss://b/own"), Fault("ls", 0, BROKEN), "oss://b/own"),
    (("export", "oss://b/own", "oss://b/out"), Fault("close", 0, RESET), "oss://b/out/model"),
    (("export", "oss://b/own", "oss://b/out"), Fault("put", 0, DENIED), f"oss://b/out/{MARKER}"),
]


@pytest.mark.parametrize(("command", "fault", "named"), COMMANDS, ids=name_of)
def test_a_command_that_is_not_answered_says_where_and_finds_nothing(
    tmp_path: Path,
    run: Run,
    command: tuple[str, ...],
    fault: Fault,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = command[1].rpartition("/")[2]
    if source == "large":  # its files are not read at once
        monkeypatch.setattr(store, "READ_AHEAD_NBYTES", 256)
    if source in ("items", "large"):
        halves = [{"w": torch.arange(4.0)}, {"w": torch.arange(4.0) + 4}]
        engine_items.save(tmp_path, halves, engine_items.sharded())
    elif source == "megatron":
        save_torch_dist(tmp_path)
    else:
        save_sharded(tmp_path, lean=source == "own")
    upload(tmp_path, source)
    before = dict(SERVICE.files)
    if source == "megatron":
        fault.at = 0
    with faults(fault) as service:
        err = run.fails(*command)
    assert service.happened
    assert (named or "oss://b/megatron/metadata.json") in err
    assert {name: SERVICE.files[name] for name in before} == before
    if command[0] == "export":
        assert run("verify", "oss://b/out").code == 2
        assert run(*command).code == 0
        assert run("verify", "oss://b/out").code == 0


def test_an_object_that_is_not_answered_is_shown_with_the_reason(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path)
    upload(tmp_path, "own")
    with faults(Fault("read", 0, DENIED, ALWAYS, name=".distcp")):
        ran = run("inspect", "oss://b/own")
    assert "its record cannot be read: " in ran.out
    assert "oss://b/own/__0_" in ran.out


@pytest.mark.parametrize("call", ["close", "rm"])
def test_an_export_whose_last_answers_are_lost_is_complete(
    tmp_path: Path, run: Run, call: str
) -> None:
    save_sharded(tmp_path)
    upload(tmp_path, "own")
    fault = Fault(call, 0, DENIED, ALWAYS, is_late=call == "close")
    with faults(fault) as service, warnings.catch_warnings():
        warnings.simplefilter("default")
        ran = run("export", "oss://b/own", "oss://b/out")
    assert service.happened
    assert ran.code == 0
    assert (f"remove {MARKER}" in ran.err) == (call == "rm")
    SERVICE.files.pop(f"b/out/{MARKER}", None)
    assert run("diff", "oss://b/own", "oss://b/out", "--fqn", "scale").code == 0


@pytest.mark.parametrize("protocol", ["oss", "pieces"])
def test_a_first_save_removes_nothing(protocol: str) -> None:
    with faults(None) as service:
        save(f"{protocol}://b/ckpt", state(0.0))
    calls = [call for call, _ in service.calls]
    assert "rm" not in calls
    assert (calls.count("ls"), calls.count("info")) == ((0, 4) if protocol == "oss" else (3, 2))


def test_a_listing_that_lacks_the_newest_file_makes_no_checkpoint_of_others(run: Run) -> None:
    save("oss://b/ckpt", state(0.0))
    with faults(Fault("ls", 0, "stale", ALWAYS)):
        assert "no complete checkpoint" in run.fails("inspect", "oss://b/ckpt")


def test_a_service_of_one_request_at_a_time_is_asked_so(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(store, "ONE_AT_A_TIME", {"pieces"})
    for protocol, alone in (("oss", False), ("pieces", True)):
        url = f"{protocol}://b/ckpt"
        writer = PlacementFileSystemWriter(url, single_file_per_rank=False)
        dcp.save(state(0.0), storage_writer=writer, no_dist=True)
        SERVICE.delay_s = 0.005
        with faults(None) as service:
            load(Path("none"), state(-1.0), PlacementFileSystemReader(url))
            assert run("verify", url, "--contents").code == 0
        SERVICE.delay_s = 0.0
        assert (service.most_running == 1) == alone


def reads_of(service: Any, ending: str) -> list[int]:
    """Return how often each file of that ending was read."""
    return [
        *Counter(p for call, p in service.calls if call == "read" and p.endswith(ending)).values()
    ]


def test_a_command_reads_a_small_file_once(run: Run, tmp_path: Path) -> None:
    """Tensors that follow each other are in other files, and come back to the first ones."""
    url = "oss://b/ckpt"
    save(url, {f"layers.{n}.w": torch.arange(6.0) + n for n in range(160)}, thread_count=40)
    for command in (
        ("export", url, "oss://b/hf", "--max-shard-size", "500", "--prefix", ""),
        ("diff", url, "oss://b/hf"),
        ("verify", url, "--contents"),
    ):
        with faults(None) as service:
            assert run(*command).code == 0
        assert reads_of(service, ".distcp") == [1] * 40, command
    halves = [{f"{n}.w": torch.arange(4.0) for n in range(9)}] * 2
    engine_items.save(tmp_path, halves, engine_items.sharded("*.w"))
    upload(tmp_path, "items")
    with faults(None) as service:
        assert run("verify", "oss://b/items", "--contents").code == 0
    assert max(reads_of(service, ".pt")) <= 2


def test_files_that_are_held_open_at_a_url_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "oss://b/ckpt"
    state = {f"layers.{n}.w": torch.arange(6.0) + n for n in range(20)}
    save(url, state, thread_count=20)
    nbytes = max(len(data) for path, (data, _) in SERVICE.files.items() if path.endswith("cp"))
    monkeypatch.setattr("dcp_placements.offline.box_reads.HELD_NBYTES", 9 * nbytes)
    checkpoint = open_source(url)
    with BoxReader(checkpoint) as reader:
        for key, tensor in state.items():
            stored = checkpoint.tensors[key]
            assert torch.equal(reader.read(stored, stored.whole), tensor)
            assert sum(held.file.size for held in reader._files.values()) <= 9 * nbytes
