"""Metadata from anywhere: what is admitted, what is refused, and that nothing happens."""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import random
import re
import sys
import types
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_placements import PlacementFileSystemReader, PlacementFileSystemWriter
from dcp_placements._torch import MemoryFormat, StorageInfo
from dcp_placements.offline import CannotLook, open_source
from dcp_placements.storage.metadata_file import read_metadata
from dcp_placements.storage.metadata_unpickler import load_safely
from dcp_placements.storage.safe_pickle import RefusedGlobal
from tests.offline_scenes import Run, save_sharded
from tests.storage_scenes import all_kinds, pickle_nbytes, stock_metadata


def of_global(module: str, name: str, *, protocol: int = 2) -> bytes:
    """Return a pickle of a global, before its last opcode."""
    return pickle.PROTO + bytes([protocol]) + f"c{module}\n{name}\n".encode()


def of_text(text: str) -> bytes:
    """Return the opcode of a short text."""
    return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()


@pytest.mark.parametrize("lean", [True, False])
def test_what_dcp_writes_is_read_as_pickle_reads_it(tmp_path: Path, lean: bool) -> None:
    writer = PlacementFileSystemWriter(tmp_path) if lean else dcp.FileSystemWriter(tmp_path)
    dcp.save({**all_kinds(), "nested": {"a": [torch.ones(2), {"b": 3}]}}, storage_writer=writer)
    with open(tmp_path / ".metadata", "rb") as stream:
        plain = pickle.load(stream)
    found = read_metadata(partial(open, tmp_path / ".metadata", "rb"), restricted=True)
    assert found.state_dict_metadata == plain.state_dict_metadata
    assert found.planner_data == plain.planner_data
    assert dict(found.storage_data) == plain.storage_data
    assert str(found.storage_meta.checkpoint_id) == str(plain.storage_meta.checkpoint_id)
    assert found.version == plain.version


def drawn_metadata(draw: random.Random) -> Metadata:
    """Return metadata with few keys of some forms, which share chunks, files and nothing."""
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for key in [f"layers.{n}.{draw.choice('abc')}" for n in range(draw.randrange(12))]:
        size = [draw.randrange(4) for _ in range(draw.randrange(3))]
        half = [0] * len(size), [*[n // 2 for n in size[:1]], *size[1:]]
        rest = [*half[1][:1], *half[0][1:]], [*[n - n // 2 for n in size[:1]], *size[1:]]
        boxes = draw.choice([[half, rest], [rest, half], [([0] * len(size), size)]])
        chunks = [ChunkStorageMetadata(*map(torch.Size, box)) for box in boxes]
        properties = TensorProperties(draw.choice([torch.int8, torch.float32]))
        entries[key] = TensorStorageMetadata(properties, torch.Size(size), chunks)
        if draw.random() < 0.2:
            entries[key], chunks = BytesStorageMetadata(), [None]
        for number, chunk in enumerate(chunks):
            index = MetadataIndex(key, chunk and chunk.offsets, number)
            steps = draw.choice([None, None, ["zstd"]])
            places[index] = StorageInfo(
                f"__{draw.randrange(3)}_0.distcp", *draw.sample(range(99), 2), steps
            )
    mixed = draw.sample(list(places.items()), len(places))
    return Metadata(entries, {"a": ("a",)}, dict(mixed))


def test_drawn_metadata_are_read_as_pickle_reads_them() -> None:
    for seed in range(60):
        data = pickle.dumps(drawn_metadata(random.Random(seed)))
        found = read_metadata(partial(io.BytesIO, data), restricted=True)
        plain = pickle.loads(data)
        assert found.state_dict_metadata == plain.state_dict_metadata
        assert dict(found.storage_data) == plain.storage_data


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("os", "system"), ("posix", "mkdir"), ("builtins", "eval"), ("builtins", "__import__")),
        *(("copyreg", "_reconstructor"), ("functools", "partial"), ("operator", "attrgetter")),
        *(("torch", "load"), ("torch", "hub.load"), ("torch.serialization", "load")),
        *(("torch.distributed.checkpoint.metadata", "os"), ("subprocess", "Popen")),
        *(("torch.distributed.checkpoint.metadata", "Metadata.__init__"), ("torch", "Tensor")),
        *(("dcp_placements.storage.index", "RowIndex"), ("pathlib", "Path")),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_other_globals_are_refused_by_name(module: str, name: str, protocol: int) -> None:
    if protocol == 4:
        data = pickle.PROTO + b"\x04"
        data += of_text(module) + of_text(name) + pickle.STACK_GLOBAL + b"."
    else:
        data = of_global(module, name, protocol=protocol) + b"."
    with pytest.raises(RefusedGlobal) as caught:
        load_safely(io.BytesIO(data))
    assert caught.value.name == f"{module}.{name}"


def test_getattr_reaches_members_of_the_enumeration_only() -> None:
    encoding = "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"
    getter = of_global("builtins", "getattr")
    member = getter + b"(" + of_global(*encoding)[2:] + of_text("TORCH_CHANNELS_LAST") + b"tR."
    assert load_safely(io.BytesIO(member)) == MemoryFormat.TORCH_CHANNELS_LAST.value
    for target, name in (
        (encoding, "__class__"),
        (("torch", "Size"), "__class__"),
        (("builtins", "getattr"), "__globals__"),
    ):
        data = getter + b"(" + of_global(*target)[2:] + of_text(name) + b"tR."
        with pytest.raises(pickle.UnpicklingError):
            load_safely(io.BytesIO(data))


STATEFUL = [
    ("torch.distributed.checkpoint.metadata", "Metadata", Metadata),
    ("torch.distributed.checkpoint.metadata", "TensorProperties", TensorProperties),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex", MetadataIndex),
    ("pathlib", "PosixPath", pathlib.PurePosixPath),
    ("collections", "OrderedDict", collections.OrderedDict),
]


@pytest.mark.parametrize(("module", "name", "real"), STATEFUL)
def test_a_pickle_cannot_change_a_class(module: str, name: str, real: Any) -> None:
    """BUILD with ``(None, {name: value})`` sets attributes on whatever it is given."""
    before = dict(vars(real))
    attributes = b"}" + of_text("__eq__") + of_text("marked") + b"s"
    state = b"N" + attributes + b"\x86"
    data = of_global(module, name) + state + b"b."
    with pytest.raises(pickle.UnpicklingError):
        load_safely(io.BytesIO(data))
    # Through a dict of the class, too, and on an instance, which has attributes of its own.
    for made in (b"", b")\x81", b")R"):
        refusing = suppress if made else pytest.raises
        with refusing(pickle.UnpicklingError):
            load_safely(io.BytesIO(of_global(module, name) + made + attributes + b"b."))
    assert dict(vars(real)) == before
    assert load_safely(io.BytesIO(of_global(module, name) + attributes[:1] + b"0.")) is not real


SHARED = {
    "member": of_global("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
    + b"K\x00\x85R",
    "layout": of_global("torch.serialization", "_get_layout") + of_text("torch.strided") + b"\x85R",
    "dtype": of_global("torch", "float32"),
}


@pytest.mark.parametrize("made", SHARED)
def test_a_pickle_cannot_change_what_others_share(made: str) -> None:
    """M59: a changed member of torch's enumeration would break every later load."""
    reached = SHARED[made]
    value = load_safely(io.BytesIO(reached + b"."))
    before = dict(getattr(value, "__dict__", {}))
    for state in (
        b"}" + of_text("_value_") + b"K\x07s",
        b"N}" + of_text("_value_") + b"K\x07s\x86",
        b"N}" + of_text("__class__") + of_global("torch", "Size")[2:] + b"s\x86",
    ):
        with pytest.raises(pickle.UnpicklingError):
            load_safely(io.BytesIO(reached + state + b"b."))
    assert dict(getattr(value, "__dict__", {})) == before
    again = pickle.loads(pickle.dumps(TensorProperties()))
    assert again.memory_format == torch.contiguous_format


def doubled(depth: int) -> Any:
    """Return a tuple that is short in a pickle, and 2**depth values when it is printed."""
    value: Any = (0,)
    for _ in range(depth):
        value = (value, value)
    return value


def itself() -> Any:
    """Return a list that holds itself."""
    value: list[Any] = []
    value.append(value)
    return value


MANY = {number: b"" for number in range(5000)}
UNFOLDING: dict[str, dict[str, Any]] = {
    "save_id": {"save_id": doubled(60)},
    "step": {"step": doubled(60)},
    "world_size": {"world_size": [3]},
    "another": {"another": {"ep": doubled(60)}},
    "itself": {"options": {"waive": itself()}},
    "a long text": {"versions": dict.fromkeys(map(str, range(5000)), "x" * 100_000)},
    "by key": {"by key": {str(key): MANY for key in range(5000)}},
    "a cut": {"cuts": {"groups": (((doubled(60), 2, 0, "plain", 1, False),),)}},
    "groups": {"cuts": {"groups": ((("ep", 2, 0, "plain", 1, False),) * 5000,) * 5000}},
}


PLANNER_DATA: dict[str, Any] = {
    **{
        f"provenance: {name}": {"dcp_placements": {"save_id": "x", **value}}
        for name, value in UNFOLDING.items()
    },
    "digits": {"dcp_placements": {"save_id": "x", "step": 10**5000}},
    "without an id": {"dcp_placements": {"x": doubled(60)}},
    "the path of a key": {"w": doubled(60)},
    "digits in a path": {"w": ("w", 10**5000)},
    "a list in a path": {"w": ["w", itself()]},
    "paths of one text": {str(key): ("x" * 1000,) * 1000 for key in range(100)},
}


@pytest.mark.parametrize("name", PLANNER_DATA)
def test_what_a_planner_stored_and_unfolds_is_refused(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file can refer to one value again and again, and whoever prints it writes for ever."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = stock_metadata(tmp_path)
    metadata.planner_data = PLANNER_DATA[name]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    refusal = r"far more of itself|its provenance is broken|thousands of digits"
    with pytest.raises(CannotLook, match=refusal):
        open_source(tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(
            {"w": torch.zeros(3)},
            storage_reader=PlacementFileSystemReader(tmp_path, restricted=True),
            no_dist=True,
        )
    assert re.search(refusal, f"{caught.value}{caplog.text}")  # torch 2.10 drops it: logged


def test_more_chunks_than_places_are_refused(tmp_path: Path) -> None:
    """Keys that share one list of chunks: each key would be looked at with all of them."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = stock_metadata(tmp_path)
    tensor = metadata.state_dict_metadata["w"]
    tensor.chunks = tensor.chunks * 5000
    metadata.state_dict_metadata = {f"w{n}": tensor for n in range(5000)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CannotLook, match="chunks or more, and places for 1"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps({"a": 1}),
        pickle.dumps(None),
        pickle.dumps(Metadata({})),
        pickle.dumps(Metadata({"a": 1}, storage_data={})),
        pickle.dumps(Metadata({}, storage_data={MetadataIndex("a"): "somewhere"})),
        b"\x80\x02" + b"(" * 1000,
        b"\x80\x02]" + b"]a" * 5000 + b".",
        b"dcp_placements/6" * 20,
    ],
    ids=range(10),
)
def test_broken_metadata_is_one_message(tmp_path: Path, run: Run, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    assert "no metadata of DCP's that can be read" in run.fails("inspect", tmp_path)


@pytest.mark.filterwarnings("ignore:the index of .metadata cannot be used")
def test_every_cut_of_a_lean_file_is_one_message(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    end = pickle_nbytes(data)
    for cut in (*range(0, end, max(end // 60, 1)), end - 1):
        (tmp_path / ".metadata").write_bytes(data[:cut])
        with pytest.raises(CannotLook):
            open_source(tmp_path)


@pytest.mark.parametrize(
    "module", ["olmo_core.distributed.checkpoint.filesystem", "torch.distributed.checkpoint.later"]
)
@pytest.mark.parametrize("restricted", [True, False])
def test_m149_places_of_another_class_are_read_by_their_fields_and_nothing_is_imported(
    tmp_path: Path, run: Run, module: str, restricted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Place:
        """OLMo-core's has these fields alone."""

        def __init__(self, place: Any) -> None:
            self.relative_path = place.relative_path
            self.offset, self.length = place.offset, place.length

    held = {"w": torch.arange(12.0).reshape(3, 4), "v": torch.ones(3, dtype=torch.int8)}
    dcp.save(held, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    metadata = stock_metadata(tmp_path / "ckpt")
    metadata.storage_data = {at: Place(place) for at, place in metadata.storage_data.items()}
    Place.__module__, Place.__qualname__, Place.__name__ = module, "_StorageInfo", "_StorageInfo"
    names = module.split(".")
    for count in range(1, len(names) + 1):
        name = ".".join(names[:count])
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[module], "_StorageInfo", Place, raising=False)
    (tmp_path / "ckpt" / ".metadata").write_bytes(pickle.dumps(metadata))
    monkeypatch.undo()
    # A module of that name, which must not be imported.
    for count in range(1, len(names) if names[0] == "olmo_core" else 0):
        (tmp_path / "path").joinpath(*names[:count]).mkdir(parents=True)
        (tmp_path / "path").joinpath(*names[:count], "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path / "path")
    reader = PlacementFileSystemReader(tmp_path / "ckpt", restricted=restricted)
    loaded = {fqn: torch.zeros_like(value) for fqn, value in held.items()}
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert all(torch.equal(loaded[fqn], value) for fqn, value in held.items())
    for command in ("verify", "inspect"):
        assert run(command, tmp_path / "ckpt").code == 0
    assert run("export", tmp_path / "ckpt", tmp_path / "out", "--prefix", "").code == 0
