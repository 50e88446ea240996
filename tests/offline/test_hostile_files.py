"""Files of some hundred bytes that would take gigabytes or hours, or print as much.

Every command ends on each of them, with the exit code that it documents and a few lines, under the
limits that it has by default. A restricted load in a trainer executes nothing of any of them, and
refuses those that need no limit of the process.
"""

from __future__ import annotations

import collections
import faulthandler
import io
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch._weights_only_unpickler import _get_allowed_globals

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    PlacementError,
    PlacementFileSystemReader,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.cli.app import run
from dcp_placements.cli.own_process import in_own_process, why_ended
from dcp_placements.errors import CannotLook
from dcp_placements.offline import verify
from dcp_placements.offline.sources.mapped_files import load_torch_file
from dcp_placements.storage import process_limits
from dcp_placements.storage.process_limits import limited_memory
from dcp_placements.storage.store import open_store
from dcp_placements.storage.torch_load import load_plain, load_saved_tensor
from dcp_placements.testing import World
from tests.offline_scenes import Run

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

LONGEST = 2000
"""The most characters that any error has here."""


def saved(pickled: bytes) -> bytes:
    """Return a file as ``torch.save`` writes it, with this pickle."""
    buffer = io.BytesIO()
    torch.save(0, buffer)
    with zipfile.ZipFile(buffer) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in entries.items():
            file.writestr(name, pickled if name.endswith("/data.pkl") else data)
    return buffer.getvalue()


LEVELS = 17
"""What is not bounded prints, or hashes, 2**17 values here, and would 2**60 as well."""

PAIRS = b"K\x01\x85" + b"q\x00h\x00\x86" * 45
"""A tuple that is short in a file, and 2**45 values when it is hashed."""

LISTS = b"]" + b"q\x00]h\x00ah\x00a" * 45
"""The same of lists, when they are looked at or printed."""

OBJECTS = {
    "bytearray": b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x01\x85R.",
    "dict": b"\x80\x02}" + PAIRS + b"K\x01s.",
    "set": b"\x80\x02cbuiltins\nset\n]" + PAIRS + b"a\x85R.",
    "Counter": b"\x80\x02ccollections\nCounter\n}" + PAIRS + b"K\x01s\x85R.",
    "OrderedDict": b"\x80\x02ccollections\nOrderedDict\n)R" + PAIRS + b"K\x01s.",
    "lists": b"\x80\x02" + LISTS + b".",
    "storage": b"\x80\x02ctorch.storage\nUntypedStorage\n\x8a\x05\x00\x00\x00\x00\x01\x85R.",
    "name": b"\x80\x02X\x00\x02\x00\x00" + b"a" * 512 + b"q\x00(" + b"h\x00h\x00\x93" * 9 + b"t.",
    "number": b"\x80\x02}\x8a\x09" + (2**61 - 1).to_bytes(9, "little") + b"Ns.",
    "again": b"\x80\x02(" + b"N" * 300 + b"t\x85q\x00cbuiltins\ndict\nq\x01"
    b"(" + b"h\x01h\x00R" * 250 + b"t.",
    "a call of no function": b"\x80\x02" + PAIRS + b")R.",
    "an instance of no class": b"\x80\x02" + PAIRS + b")\x81.",
    "quantizer": b"\x80\x02ctorch._utils\n_rebuild_qtensor\n(NK\x00))" + PAIRS + b"NNtR.",
    "layout": b"\x80\x02ctorch._utils\n_rebuild_sparse_tensor\n" + PAIRS + b"N\x86R.",
    "name of a layout": b"\x80\x02ctorch.serialization\n_get_layout\n" + PAIRS + b"\x85R.",
}


def of_global(module: str, name: str) -> bytes:
    """Return the opcode of a global."""
    return f"c{module}\n{name}\n".encode()


def repeated(value: bytes, opcodes: bytes, count: int) -> bytes:
    """Return a pickle that remembers a value, and does something with it again and again."""
    return b"\x80\x02](" + value + b"q\x000" + opcodes * count + b"e."


_PATH = b"cpathlib\nPosixPath\n(" + b"\x8c\x00" * 20000 + b"tR"

METADATA = {
    "memo": b"\x80\x02]r\xff\xff\xff\xff.",
    "long": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b"x.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b".",
    "sizes": repeated(
        b"(" + b"K\x01" * 20_000 + b"t", of_global("torch", "Size") + b"h\x00\x85R", 10_000
    ),
    "long keys": repeated(b"(" + b"K\x01" * 20_000 + b"t", b"}h\x00Ns", 10_000),
    "deep key": b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"Ns.",
    "deep index": b"\x80\x02}"
    + of_global("torch.distributed.checkpoint.metadata", "MetadataIndex")
    + b")\x81}"
    + b"\x8c\x03fqn"
    + b")"
    + b"\x85" * 200_000
    + b"sbNs.",
    "marks": b"(" * 200_000,
    "deep": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "path": b"\x80\x04" + _PATH + b".",
    "number": b"\x80\x04ctorch\nSize\n\x8a\x09" + (2**61 - 1).to_bytes(9, "little") + b"\x85\x85R.",
    "name": b"\x80\x04\x8c\xff" + b"a" * 255 + b"\x8c\x01a\x93.",
}

TUPLES = b"K\x01\x85" + b"q\x00h\x00\x86" * LEVELS
SHORT_LISTS = b"]" + b"q\x00]h\x00ah\x00a" * LEVELS
RECORDS = {
    "call": b"\x80\x02" + TUPLES + b")R.",
    "instance": b"\x80\x02" + TUPLES + b")\x81.",
    "sparse": b"\x80\x02ctorch._utils\n_rebuild_sparse_tensor\n" + TUPLES + b"N\x86R.",
    "quantized": b"\x80\x02ctorch._utils\n_rebuild_qtensor\n(NK\x00))" + TUPLES + b"NNtR.",
}


NEED_LIMITS = {
    ("object", "dict"),
    ("object", "Counter"),
    ("object", "OrderedDict"),
    ("metadata", "memo"),
    ("metadata", "deep key"),
    ("metadata", "long keys"),  # seconds
}
"""Those that only a limit of the process ends: no reader prevents them at a low price."""

FILES = [
    *[("object", name) for name in OBJECTS],
    *[("metadata", name) for name in METADATA],
    *[("record", name) for name in RECORDS],
]

BY_EP = ("--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=2")

COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": (),
    "verify": ("--contents",),
    "diff": ("{sound}",),
    "export": ("{out}",),
    "import": ("{out}",),
    "reshard": ("{out}", *BY_EP),
    "rehearse": BY_EP,
    "draw": ("w", "-o", "{out}.png"),
    "doctor": (),
}


def hostile_checkpoint(path: Path, kind: str, name: str) -> Path:
    """Return a checkpoint with a file of the table in one place."""
    held = {"object": b"x" * 2000, "w": torch.ones(2000), "v": torch.ones(3)}
    dcp.save(held, checkpoint_id=path, no_dist=True)
    if kind == "metadata":
        (path / ".metadata").write_bytes(METADATA[name])
        return path
    key, pickled = ("object", OBJECTS[name]) if kind == "object" else ("w", RECORDS[name])
    metadata = dcp.FileSystemReader(path).read_metadata()
    (info,) = [place for index, place in metadata.storage_data.items() if index.fqn == key]
    data = bytearray((path / info.relative_path).read_bytes())
    data[info.offset : info.offset + info.length] = saved(pickled).ljust(info.length, b"\0")
    (path / info.relative_path).write_bytes(data)
    return path


def in_limits(*arguments: Any) -> tuple[int, int | None]:
    """Run a command as a program does, in a process of its own; return what that returns."""

    def child() -> int:
        code = 99
        faulthandler.disable()  # which pytest enables
        try:
            process_limits.limit_time()
            code = run(list(map(str, arguments)))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    return in_own_process(child)


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of a process")
@pytest.mark.parametrize(
    ("kind", "name", "command"),
    [
        pytest.param(kind, name, command, marks=[] if (row + column) % 4 == 0 else pytest.mark.rare)
        for row, (kind, name) in enumerate(FILES)
        for column, command in enumerate(COMMANDS)
    ],
)
def test_every_command_ends_on_every_file(
    tmp_path: Path,
    kind: str,
    name: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """M60, M101, M159 to M161."""
    monkeypatch.setattr(process_limits, "LEAST_S", 0.3)
    if command == "draw":
        pytest.importorskip("matplotlib.figure")  # once, before the processes of the commands
    path = hostile_checkpoint(tmp_path / "hostile", kind, name)
    dcp.save({"w": torch.ones(2000)}, checkpoint_id=tmp_path / "sound", no_dist=True)
    more = [
        text.format(sound=tmp_path / "sound", out=tmp_path / "out") for text in COMMANDS[command]
    ]
    begun = time.monotonic()
    code, number = in_limits(command, path, *more)
    assert time.monotonic() - begun < 60
    printed = capfd.readouterr()
    assert len(printed.out + printed.err) < 2 * LONGEST
    if number is not None:
        assert (kind, name) in NEED_LIMITS
        assert number in (signal.SIGPROF, signal.SIGSEGV)
        why = why_ended(number) or ""
        assert "file of unknown origin" in why
        assert str(path) in why
        return
    # A file may hold what nobody reads: its value is not shown, and its record is sound.
    assert code in ((2,) if kind == "metadata" else (0, 1, 2))
    if code == 2:
        assert (printed.out, len(printed.err.splitlines()) < 12) == ("", True)
    if command in ("verify", "diff", "export", "reshard") and kind == "record":
        assert code in (1, 2)


@pytest.mark.parametrize(("kind", "name"), [file for file in FILES if file not in NEED_LIMITS])
def test_a_restricted_load_ends_on_every_file_that_needs_no_limit(
    tmp_path: Path, kind: str, name: str
) -> None:
    path = hostile_checkpoint(tmp_path / "hostile", kind, name)
    wanted = {"w": torch.zeros(2000)} if kind == "record" else {"object": b""}
    begun = time.process_time()
    reader = PlacementFileSystemReader(path, restricted=True)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    assert time.process_time() - begun < 20
    assert len(str(caught.value.failures[0][0])) < LONGEST


@pytest.mark.parametrize("name", [name for name in OBJECTS if ("object", name) not in NEED_LIMITS])
def test_a_file_of_a_rank_is_refused_or_read_in_a_moment(tmp_path: Path, name: str) -> None:
    (tmp_path / "model_optim_rng.pt").write_bytes(saved(OBJECTS[name]))
    begun = time.process_time()
    with suppress(CannotLook):
        load_torch_file(open_store(tmp_path), "model_optim_rng.pt")
    assert time.process_time() - begun < 20


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of a process")
def test_a_program_says_why_it_ended(tmp_path: Path) -> None:
    path = hostile_checkpoint(tmp_path / "hostile", "metadata", "deep key")
    program = [sys.executable, "-m", "dcp_placements", "inspect", str(path)]
    ran = subprocess.run([*program, "--json"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "it crashed (SIGSEGV)" in ran.stderr
    assert f"last opened: {path}/.metadata" in ran.stderr
    assert '"error"' in ran.stdout


_SMALL = ("--memory", "8MiB")
_OF_RANKS = ("ranks", "--files", "model_{rank}.pt", *BY_EP)
ABOVE = {
    "inspect": ("inspect", "a"),
    "verify": ("verify", "a", "--contents", *_SMALL),
    "diff": ("diff", "a", "b", *_SMALL),
    "export": ("export", "a", "out", *_SMALL),
    "reshard": ("reshard", "a", "out", *BY_EP),
    "rehearse": ("rehearse", "a", *BY_EP),
    "draw": ("draw", "a", "experts.w", "-o", "out.png"),
    "doctor": ("doctor", "a", "--experts-per-layer", "8"),
    "import": ("import", "hub", "out", *_SMALL),
    "verify of safetensors": ("verify", "hub", "--contents", *_SMALL),
    "M151 export of files per rank": ("export", _OF_RANKS[0], "out", *_OF_RANKS[1:], *_SMALL),
    "import of files per rank": ("import", _OF_RANKS[0], "out", *_OF_RANKS[1:], *_SMALL),
    "verify of files per rank": ("verify", *_OF_RANKS, "--contents", *_SMALL),
    "inspect of files per rank": ("inspect", *_OF_RANKS),
}
"""Commands by name; ``a`` and ``b`` are of DCP, ``hub`` of safetensors, ``ranks`` of two ranks."""

MESHES = {"a long axis": "ep=1000000000", "many axes": ",".join(f"a{n}=2" for n in range(300))}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("command", ["rehearse", "reshard"])
def test_m160_a_mesh_of_too_many_ranks_is_refused_in_a_line(
    tmp_path: Path, run: Run, command: str, mesh: str
) -> None:
    dcp.save({"w": torch.ones(8, 2)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    out = [tmp_path / "out"] if command == "reshard" else []
    err = run.fails(command, tmp_path / "ckpt", *out, *BY_EP[:2], "--mesh", mesh)
    assert (err.count("\n"), len(err) < 200, "262,144" in err) == (1, True, True)
    assert not (tmp_path / "out").exists()


def test_m160_contents_of_many_chunks_are_verified_as_fast_as_they_are_loaded(
    tmp_path: Path,
) -> None:
    """Each as a zip file of its own takes eight times as long."""
    count = 1000
    rows = IndexShard(0, [*reversed(range(count))])
    mesh = World(1).mesh(0, ep=1)
    placement = CheckpointPlacement(mesh, {"ep": rows}, global_shape=(count, 4))
    planner = PlacementSavePlanner(PlacementRules({"w": placement}))
    whole = torch.arange(4.0 * count).reshape(count, 4)
    dcp.save({"w": whole}, checkpoint_id=tmp_path, planner=planner, no_dist=True)

    def seconds(function: Callable[[], Any]) -> float:
        begun = time.process_time()
        function()
        return time.process_time() - begun

    def load() -> None:
        held = {"w": torch.zeros(count, 4)}
        reader = PlacementFileSystemReader(tmp_path)
        dcp.load(held, storage_reader=reader, no_dist=True)
        assert held["w"].equal(whole.flip(0))

    def checked() -> None:
        found = verify(tmp_path, contents=True)
        assert (found.sound, found.checked["chunks"]) == (True, count)

    load()  # which imports what both need
    assert min(seconds(checked) for _ in range(2)) < 4 * max(seconds(load) for _ in range(2))


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
@pytest.mark.parametrize("command", ABOVE.values(), ids=ABOVE)
def test_files_above_the_default_limit_are_read(
    tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """The default is half of the memory, as if this machine had 128 MiB of it."""
    monkeypatch.setattr("dcp_placements.cli.app.default_limit", lambda: 64 << 20)
    monkeypatch.chdir(tmp_path)
    held = {"experts.w": torch.arange(24 << 20, dtype=torch.int32).reshape(8, -1)}
    if "hub" in command:
        Path("hub").mkdir()
        save_file(held, "hub/model.safetensors")
    elif "ranks" in command:
        Path("ranks").mkdir()
        for rank, half in enumerate(held["experts.w"].chunk(2)):
            torch.save({"experts.w": half.clone()}, f"ranks/model_{rank}.pt")
    else:
        for name in {"a", "b"} & {*command}:
            dcp.save(held, checkpoint_id=name, no_dist=True)
    ran = run(*command)
    assert ran.code == 0, ran


@pytest.mark.skipif(sys.platform != "linux", reason="needs a process of its own")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_command_ends_with_the_process_that_was_started(tmp_path: Path, sent: int) -> None:
    os.mkfifo(tmp_path / "fifo")
    program = (
        "import signal, sys, time\n"
        # Of a shell's background job, SIGINT is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from dcp_placements import offline\n"
        "from dcp_placements.cli import main\n"
        "def wait(*args, **kwargs):\n"
        f"    open({str(tmp_path / 'fifo')!r}, 'w').write('x')\n"
        "    time.sleep(60)\n"
        f"    open({str(tmp_path / 'left')!r}, 'w')\n"
        "offline.open_source = wait\n"
        f"sys.argv[1:] = ['verify', {str(tmp_path)!r}]\n"
        "sys.exit(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    with open(tmp_path / "fifo") as stream:
        assert stream.read() == "x"  # and the end of the file: the child has written it
    process.send_signal(sent)
    assert process.wait(30) != 0
    assert not (tmp_path / "left").exists()


VALUES = {"tuples": TUPLES, "lists": SHORT_LISTS, "text": b"X\x40\x42\x0f\x00" + b"a" * 1_000_000}
ENDS = {"a call": b"R.", "an instance": b"\x81.", "a state": b"b."}
LOADS: tuple[Callable[[Any], Any], ...] = (load_plain, load_saved_tensor)


def is_short(data: bytes, *loads: Callable[[Any], Any]) -> None:
    """Check that a file is refused or loaded, and no more of it printed than a few lines."""
    for load in loads or LOADS:
        text = ""
        try:
            load(io.BytesIO(data))
        except Exception as error:
            text = str(error)
        assert len(text) < LONGEST, text[:LONGEST]


@pytest.mark.parametrize("name", sorted(_get_allowed_globals()))
def test_m159_no_argument_of_an_allowed_call_is_printed(name: str) -> None:
    module, _, function = name.rpartition(".")
    called = b"\x80\x02c" + f"{module}\n{function}\n".encode()
    for args in (TUPLES, b"(" + SHORT_LISTS * 7 + b"t", b"(NK\x00))" + TUPLES + b"NNt"):
        is_short(saved(called + args + b"R."), load_plain)
    for end in (b"\x81.", b"b."):
        is_short(saved(called + TUPLES + end), load_plain)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", VALUES)
def test_m159_what_is_no_call_is_not_printed(kind: str, end: str) -> None:
    for args in (b")", b"N", VALUES[kind]):
        is_short(saved(b"\x80\x02" + VALUES[kind] + args + ENDS[end]))
        is_short(saved(b"\x80\x02" + VALUES[kind] + b"\x85" + args + ENDS[end]))


class CallOf:
    """Pickled as a call."""

    def __init__(self, called: Any, *args: Any) -> None:
        self.called, self.args = called, args

    def __reduce__(self) -> Any:
        return self.called, self.args


WIDE = torch.zeros(1).expand((2,) * 12)
"""A tensor whose text has 2**12 numbers; more dims would make more of them."""

OF_WIDE = {
    "layout": CallOf(torch._utils._rebuild_sparse_tensor, WIDE, (WIDE, WIDE, WIDE)),
    "quantizer": CallOf(torch._utils._rebuild_qtensor, 0, 0, (1,), (1,), (WIDE,), False, None),
    "axis": CallOf(
        torch._utils._rebuild_qtensor,
        *(0, 0, [WIDE, WIDE], (1,), (torch.per_channel_affine, [1], [1], 5), False, None),
    ),
    "state": CallOf(
        torch._utils._rebuild_parameter_with_state, torch.zeros(1), False, None, (WIDE, 1, 2)
    ),
    "type": CallOf(
        torch._tensor._rebuild_from_type_v2,
        *(torch._utils._rebuild_parameter, torch.Tensor, (WIDE, False, None), (WIDE, 1, 2)),
    ),
}


@pytest.mark.parametrize("name", OF_WIDE)
def test_m159_no_tensor_that_takes_long_to_print_is_printed(name: str) -> None:
    buffer = io.BytesIO()
    torch.save(OF_WIDE[name], buffer)
    is_short(buffer.getvalue())


def of_kind(kind: str) -> Any:
    match kind:
        case "sparse":
            return torch.arange(6.0).reshape(2, 3).to_sparse()
        case "quantized":
            return torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8)
        case "by channel":
            scales, zeros = torch.ones(2), torch.zeros(2)
            return torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.qint8)
        case "parameter":
            return torch.nn.Parameter(torch.ones(2, 3))
        case "many dims":
            return torch.zeros((2,) * 12)
    return [torch.zeros(2, 3), {"a": torch.zeros((), device="meta")}]


@pytest.mark.parametrize(
    "kind", ["sparse", "quantized", "by channel", "parameter", "many dims", "meta"]
)
@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_m159_tensors_of_these_kinds_are_loaded(kind: str) -> None:
    buffer, value = io.BytesIO(), of_kind(kind)
    torch.save(value, buffer)
    found = load_plain(buffer)
    assert type(found) is type(value)
    assert str(found) == str(value)


@pytest.mark.parametrize(
    "value",
    [
        {"a": {("b", 1): [1.5, None]}, 3: {"x"}},
        collections.OrderedDict(a=torch.arange(3), b=torch.float32),
        collections.Counter("abc"),
        bytearray(b"abc"),
        [torch.Size((1, 2)), b"bytes", 1 << 80],
    ],
)
def test_plain_objects_are_loaded(value: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    found = load_plain(buffer)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def made(path: str) -> str:
    """Make a directory, where an unpickler calls what a file names."""
    Path(path).mkdir()
    return path


class Makes:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return made, (str(self.path),)


@pytest.mark.parametrize("planner", [PlacementLoadPlanner, dcp.DefaultLoadPlanner])
def test_a_planner_gets_the_object_that_was_checked_and_not_the_bytes_in_the_file(
    tmp_path: Path, planner: Any
) -> None:
    marker = tmp_path / "executed"
    dcp.save({"object": Makes(marker)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    found = {"object": ""}
    reader = PlacementFileSystemReader(tmp_path / "ckpt", restricted=True)
    # With this the two unpicklers of torch.load read one object as two values.
    with torch.serialization.safe_globals([(str.upper, f"{__name__}.made")]):
        dcp.load(found, storage_reader=reader, planner=planner(), no_dist=True)
    assert found["object"] == str(marker).upper()
    assert not marker.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
def test_m101_a_command_that_takes_more_memory_than_it_may_ends_with_one_message(
    tmp_path: Path,
) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    program = (
        "import sys\n"
        "from dcp_placements import offline\n"
        "from dcp_placements.cli import main\n"
        "offline.open_source = lambda *args, **kwargs: bytearray(1 << 30)\n"
        f"sys.exit(main(['--most-memory', '256MiB', 'verify', {str(tmp_path)!r}]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "more memory is needed than a command may take" in ran.stderr


def test_a_metadata_file_that_claims_more_than_it_has_is_damaged(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    data = bytearray((tmp_path / ".metadata").read_bytes())
    assert data[2:3] == pickle.FRAME
    data[7] ^= 1 << 5
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CannotLook, match=r"\.metadata: this is no metadata of DCP's"):
        verify(tmp_path, contents=True)
    found = r"found: .*, in \d+ bytes\n"
    if sys.platform == "linux":
        found = rf"found: +MemoryError: it asks for more memory than there is, in {len(data)} bytes"
    with limited_memory(1 << 28), pytest.raises(PlacementError, match=found):
        PlacementFileSystemReader(tmp_path).read_metadata()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
def test_a_metadata_file_larger_than_memory_is_told_so(tmp_path: Path, run: Run) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    os.truncate(tmp_path / ".metadata", 1 << 40)
    err = run.fails("--most-memory", "256MiB", "verify", tmp_path, "--contents")
    assert "found:       it asks for more memory than there is\n" in err


def test_the_limit_of_memory_is_lifted_when_a_command_ends(tmp_path: Path, run: Run) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    assert run("--most-memory", "4GiB", "verify", tmp_path).code == 0
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
