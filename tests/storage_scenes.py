"""Tensors of all kinds, and saves and loads of them, for the tests of storage."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import Shard

from dcp_placements.storage.reader import PlacementFileSystemReader
from dcp_placements.testing import World, cut, real_dtensor
from tests.strategies import arange

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16),
)
SHAPES = ((), (1,), (0,), (3, 0), (5, 7), (3, 4, 5), (1, 6, 1), (130, 140))


def data_file(path: Path, rank: int) -> Path:
    """Return the first data file that a rank wrote, whichever writer it was."""
    (file,) = [*path.glob(f"__{rank}_0.distcp"), *path.glob(f"__{rank}_????????_0.distcp")]
    return file


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, tensors byte for byte."""
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return one.dtype == other.dtype and one.shape == other.shape and raw(one).equal(raw(other))


def assert_record_of(record: bytes, tensor: torch.Tensor) -> None:
    """Compare a record with that of torch.save, in C order; but for the id, which none compares."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    with zipfile.ZipFile(io.BytesIO(record)) as found:
        assert found.testzip() is None
        with zipfile.ZipFile(io.BytesIO(saved_by_torch(plain))) as wanted:
            assert found.namelist() == wanted.namelist()
            for name in wanted.namelist()[:-1]:
                assert found.read(name) == wanted.read(name), name
    assert same(torch.load(io.BytesIO(record), weights_only=False), tensor)


def saved_by_torch(tensor: torch.Tensor) -> bytes:
    """Return the record of a tensor in a file of torch's writer."""
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8)


class Flipped(StreamTransformExtension):
    """A transform of files that no zip reader understands: every bit is flipped."""

    @staticmethod
    def from_descriptor(version: str) -> Flipped:
        return Flipped()

    @staticmethod
    def registry_name() -> str:
        return "flipped"

    def get_descriptor(self) -> str:
        return "flipped"

    def transform_to(self, output: Any) -> Any:
        class Writer(io.BytesIO):
            def close(self) -> None:
                output.write(_flip(self.getvalue()))
                output.close()

        return Writer()

    def transform_from(self, input: Any) -> Any:
        class Reader(io.BytesIO):
            def seekable(self) -> bool:
                return False

        return Reader(_flip(input.read(-1)))


def _flip(data: bytes) -> bytes:
    return bytes(255 - byte for byte in data)


def flipped_registry() -> ExtensionRegistry:
    """Return what a reader undoes ``Flipped`` with."""
    registry = ExtensionRegistry()
    registry.register(Flipped)
    return registry


@pytest.fixture
def flipped_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every reader know how to undo ``Flipped``, as ZStandard is known."""
    default = ExtensionRegistry.__init__

    def init(self: ExtensionRegistry) -> None:
        default(self)
        self.register(Flipped)

    monkeypatch.setattr(ExtensionRegistry, "__init__", init)


def all_kinds() -> dict[str, Any]:
    """Return tensors of every dtype and shape, some with unusual strides, and objects."""
    found: dict[str, Any] = {
        f"{dtype}.{shape}": (torch.randn(shape) * 5).to(dtype)
        for dtype in DTYPES
        for shape in SHAPES
    }
    found |= {
        "transposed": torch.randn(40, 30).t(),
        "transposed.large": torch.randn(400, 300).t(),
        "part": torch.randn(50, 60)[3:9, ::2],
        "conjugate": torch.randn(4, 4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, 4, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(7, 3)),
        "large": torch.randn(700, 500),
        "object": ("lr", 0.1),
        "step": 7,
    }
    return found


def blank(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what a state dict can be loaded into, with nothing of its contents."""
    return {
        key: torch.zeros_like(value).detach() if isinstance(value, torch.Tensor) else ""
        for key, value in state_dict.items()
    }


def load(path: Path, into: dict[str, Any], reader: Any) -> dict[str, Any]:
    """Load into tensors and objects with torch's own planner; return them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(into, storage_reader=reader)
    return into


def sharded(
    world: World, rank: int, wholes: dict[str, torch.Tensor], dim: int, *, empty: bool = False
) -> dict[str, Any]:
    """Return DTensors of one rank that are cut along ``dim``, by torch's own ``DTensor``."""
    mesh = world.mesh(rank, fsdp=world.size)
    made = {}
    for key, whole in wholes.items():
        local = cut(whole, [Shard(dim)], mesh.shape, (rank,))
        made[key] = real_dtensor(
            torch.zeros_like(local) if empty else local, mesh, [Shard(dim)], whole.shape
        )
    return made


def save_alone(
    path: Path, rank: int, state_dict: dict[str, Any], planner: Any = None, writer: Any = None
) -> None:
    """Save one rank's part as ``dcp.save(..., use_collectives=False)`` does on that rank.

    Args:
        path: The directory.
        rank: The rank in the process group.
        state_dict: What it holds.
        planner: Torch's by default.
        writer: Torch's by default.
    """
    planner = planner or DefaultSavePlanner()
    storage = writer or dcp.FileSystemWriter(path)
    planner.set_up_planner(state_dict, storage.storage_meta(), rank == 0)
    storage.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    plan = storage.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    final = planner.finish_plan(storage.prepare_global_plan(plans)[0])
    storage.finish(metadata, [storage.write_data(final, planner).wait()])


def save_no_dist(
    world: World, rank: int, path: Path, state_dict: dict[str, Any], planner: Any
) -> None:
    """Save as ``dcp.save(..., no_dist=True)`` does on a rank of a world."""
    writer = dcp.FileSystemWriter(path)
    with world._as(rank):
        planner.set_up_planner(state_dict, writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        final = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        writer.finish(metadata, [writer.write_data(final, planner).value()])


def wholes(count: int = 3, shape: tuple[int, ...] = (12, 8)) -> dict[str, torch.Tensor]:
    """Return a few whole tensors."""
    return {f"layers.{n}.weight": arange(shape) + n for n in range(count)}


def stock_metadata(path: Path) -> Metadata:
    """Return what plain DCP reads of a checkpoint."""
    with open(path / ".metadata", "rb") as file:
        read: Metadata = pickle.load(file)
    return read


def pickle_nbytes(data: bytes) -> int:
    """Return the length of the pickle that a file begins with."""
    stream = io.BytesIO(data)
    pickle.load(stream)
    return stream.tell()


def assert_index_agrees(path: Path) -> None:
    """Compare what our reader returns, row by row, with what ``pickle.load`` makes of the file."""
    with open(path / ".metadata", "rb") as stream:
        plain = pickle.load(stream)
    ours = PlacementFileSystemReader(path, restricted=True).read_metadata()
    assert dict(ours.state_dict_metadata) == plain.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(plain.state_dict_metadata)
    assert ours.planner_data == plain.planner_data
    assert len(ours.storage_data) == len(plain.storage_data)
    assert set(ours.storage_data) == set(plain.storage_data)
    for index, info in plain.storage_data.items():
        assert ours.storage_data[index] == info, index
        assert MetadataIndex(index.fqn, (*(index.offset or ()), 1)) not in ours.storage_data
