"""The storage reader: what torch's reads, with fewer bytes and calls."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_placements import PlacementError
from dcp_placements.storage.reader import PlacementFileSystemReader
from dcp_placements.storage.record import BUFFER_NBYTES
from dcp_placements.storage.record_head import parse_record
from dcp_placements.storage.writer import PlacementFileSystemWriter
from dcp_placements.testing import World
from tests.storage_scenes import (
    DTYPES,
    all_kinds,
    blank,
    load,
    raw,
    same,
    sharded,
    stock_metadata,
)
from tests.strategies import examples
from tests.versions import passes_on_errors


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint that torch's writer wrote, and what is in it."""
    path = tmp_path_factory.mktemp("kinds")
    saved = all_kinds()
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(path))
    return path, saved


def test_it_reads_into_tensors_that_are_no_run_of_bytes(tmp_path: Path) -> None:
    saved = {"w": torch.randn(40, 30), "big": torch.randn(300, 200), "conj": torch.randn(6) * 1j}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    reader = PlacementFileSystemReader(tmp_path)
    into = {
        "w": torch.zeros(30, 40).t(),
        "big": torch.zeros(300, 400)[:, ::2],
        "conj": torch.zeros(6, dtype=torch.complex64).conj(),
    }
    load(tmp_path, into, reader)
    assert all(same(saved[key], into[key]) for key in saved)


def test_it_casts_as_torch_does(kinds: tuple[Path, dict[str, Any]]) -> None:
    path, _ = kinds
    keys = [f"{dtype}.{shape}" for dtype in DTYPES[:4] for shape in ((), (5, 7), (130, 140))]
    found = []
    for maker in (dcp.FileSystemReader, PlacementFileSystemReader):
        into = {
            key: torch.zeros(eval(key.rpartition(".")[2]), dtype=torch.bfloat16) for key in keys
        }
        found.append(load(path, into, maker(path)))
    assert all(same(found[0][key], found[1][key]) for key in keys)


def test_large_casts_go_through_a_buffer_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcp_placements.storage.record.BUFFER_NBYTES", 10_000)
    saved = {"w": torch.randn(300, 70)}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    reader = PlacementFileSystemReader(tmp_path)
    into = load(tmp_path, {"w": torch.zeros(300, 70, dtype=torch.float64)}, reader)
    assert same(into["w"], saved["w"].double())
    assert reader.reads > 9
    assert BUFFER_NBYTES == 16 << 20


# Slices, against plain slicing.


class Into(DefaultLoadPlanner):
    """Reads each item into a tensor of its own."""

    def __init__(self, targets: list[torch.Tensor]) -> None:
        super().__init__()
        self.targets = targets
        self.committed: list[int] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.targets[read_item.dest_index.index or 0]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(read_item.dest_index.index or 0)


def read_slices(
    path: Any, slices: list[tuple[str, tuple[int, ...], tuple[int, ...]]], targets: list[Any]
) -> PlacementFileSystemReader:
    reader = PlacementFileSystemReader(path)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    items = [
        ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(key, None, number),
            dest_offsets=torch.Size([0] * len(lengths)),
            storage_index=MetadataIndex(key, [0] * len(lengths), 0),
            storage_offsets=torch.Size(offsets),
            lengths=torch.Size(lengths),
        )
        for number, (key, offsets, lengths) in enumerate(slices)
    ]
    planner = Into(targets)
    reader.read_data(LoadPlan(items), planner).wait()
    assert sorted(planner.committed) == list(range(len(slices)))
    return reader


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[Any, Any]], bool]:
    """Draw a tensor, of any order in memory, and slices of it; large ones among them."""
    if draw(st.booleans()):
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    else:
        shape = (draw(st.integers(1, 50)), draw(st.integers(1, 3)), draw(st.integers(1, 1500)))
    dtype = draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 99)))
    order = draw(st.permutations(range(len(shape))))
    tensor = (torch.randn([shape[dim] for dim in order]) * 9).to(dtype)
    tensor = tensor.permute([order.index(dim) for dim in range(len(shape))])
    slices = []
    for _ in range(draw(st.integers(1, 4))):
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        pairs = zip(shape, offsets, strict=True)
        lengths = tuple(draw(st.integers(0, size - offset)) for size, offset in pairs)
        slices.append((offsets, lengths))
    return tensor, slices, draw(st.booleans())


@examples(120)
@given(cut_tensors(), st.booleans())
def test_a_slice_is_what_plain_slicing_gives(
    drawn: tuple[torch.Tensor, list[tuple[Any, Any]], bool], ours: bool
) -> None:
    tensor, slices, strided = drawn
    wanted = [
        tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        for offsets, lengths in slices
    ]
    targets = [torch.zeros_like(one.contiguous()) for one in wanted]
    if strided:
        targets = [torch.stack([one, one], -1)[..., 0] for one in targets]
    maker = PlacementFileSystemWriter if ours else dcp.FileSystemWriter
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        dcp.save({"a": torch.ones(3), "w": tensor}, storage_writer=maker(path, sync_files=False))
        read_slices(path, [("w", *one) for one in slices], targets)
    assert all(raw(a).equal(raw(b)) for a, b in zip(wanted, targets, strict=True))


# How much it reads.


def test_at_a_url_columns_take_few_calls(memory: str, tmp_path: Path) -> None:
    whole = torch.arange(600.0 * 4096).view(600, 4096)
    for path, calls in ((memory, range(1, 8)), (tmp_path, range(600, 700))):
        dcp.save({"w": whole}, storage_writer=PlacementFileSystemWriter(path), no_dist=True)
        target = torch.zeros(600, 2048)
        reader = read_slices(path, [("w", (0, 1024), (600, 2048))], [target])
        assert torch.equal(target, whole[:, 1024:3072])
        assert reader.reads in calls


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_of_elements_in_another_order_the_wanted_ones_are_read(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """Torch's writer keeps the order of a transposed tensor, or of one in channels_last."""
    stored = torch.arange(20.0 * 40 * 60).view(20, 40, 60)
    whole = stored.permute(order)
    dcp.save({"w": whole}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    offsets, lengths = [0, 0, 0], list(whole.shape)
    offsets[order.index(0)], lengths[order.index(0)] = 7, 2
    target = torch.zeros(lengths)
    reader = read_slices(tmp_path, [("w", tuple(offsets), tuple(lengths))], [target])
    assert torch.equal(target, stored[7:9].permute(order))
    assert reader.bytes_read < target.nbytes + (4 << 10)


def test_resharding_reads_hardly_more_than_is_needed(tmp_path: Path) -> None:
    world = World(4)
    whole = {f"w{n}": torch.randn(256, 2048) for n in range(2)}
    world.save(
        tmp_path,
        lambda rank: sharded(world, rank, whole, 0),
        lambda rank: DefaultSavePlanner(),
    )
    readers = [PlacementFileSystemReader(tmp_path) for _ in range(4)]
    loaded = world.load(
        tmp_path,
        lambda rank: sharded(world, rank, whole, 1, empty=True),
        lambda rank: DefaultLoadPlanner(),
        lambda rank: readers[rank],
    )
    for rank, reader in enumerate(readers):
        wanted = sharded(world, rank, whole, 1)
        assert all(same(loaded[rank][k].to_local(), wanted[k].to_local()) for k in whole)
        needed = sum(value.to_local().nbytes for value in wanted.values())
        assert needed <= reader.bytes_read <= 1.05 * needed
        assert reader.opens == 4


# What it leaves to torch.load.


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\xff", b"\x96" + b"\xff" * 5 + bytes(3)])
def test_a_damaged_head_takes_no_memory(put: bytes) -> None:
    """A place in the memo, or a length, that nobody has the memory for."""
    buffer = io.BytesIO()
    torch.save(torch.arange(6.0).reshape(2, 3), buffer)
    saved = bytearray(buffer.getvalue())
    at = saved.index(b"ctorch._utils")
    saved[at : at + len(put)] = put
    assert parse_record(bytes(saved), len(saved)) is None


@examples(200)
@given(st.integers(0, 703), st.integers(0, 255))
def test_damaged_heads_are_refused_or_mean_the_same(at: int, value: int) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(6.0).reshape(2, 3), buffer)
    saved = bytearray(buffer.getvalue())
    whole = parse_record(bytes(saved), len(saved))
    assert whole is not None
    saved[at] = value
    found = parse_record(bytes(saved), len(saved))
    if found is not None and found != whole:
        # Torch believes it, too: the pickle says so.
        loaded = torch.load(io.BytesIO(bytes(saved)), weights_only=True)
        assert (loaded.dtype, tuple(loaded.shape)) == (found.dtype, found.shape)


def test_a_stream_needs_no_descriptor(
    kinds: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saved = kinds
    reader = PlacementFileSystemReader(path)
    monkeypatch.setattr(reader.store, "open", lambda n: io.BytesIO((path / n).read_bytes()))
    loaded = dict(blank(saved))
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert all(same(loaded[key], saved[key]) for key in saved)


def test_files_of_another_interface_would_not_be_asked_and_are_refused(tmp_path: Path) -> None:
    class Elsewhere(FileSystem):
        pass

    for made in (PlacementFileSystemReader(tmp_path), PlacementFileSystemWriter(tmp_path)):
        with pytest.raises(PlacementError, match="fs of class Elsewhere"):
            made.fs = Elsewhere()


# Damage.


def failure(path: Path, into: dict[str, Any], planner: Any = None) -> str:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(into, storage_reader=PlacementFileSystemReader(path), planner=planner)
    error = caught.value.failures[0][0]
    assert isinstance(error, PlacementError)
    return str(error)


def test_m21_records_beyond_the_end_of_a_file_are_one_fault(tmp_path: Path) -> None:
    saved = {name: torch.randn(500, 500) for name in ("a", "b", "c")}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    os.truncate(tmp_path / "__0_0.distcp", 1_100_000)
    message = failure(tmp_path, blank(saved))
    assert "\nb, c: __0_0.distcp ends before it: 1100000 bytes, 300" in message
    assert message.count("way out:") == 1


def test_a_file_that_is_cut_off_during_a_load_is_named(tmp_path: Path) -> None:
    class Cutting(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            os.truncate(tmp_path / "__0_0.distcp", 100)
            return super().resolve_tensor(read_item)

    saved = {name: torch.randn(500, 500) for name in ("a", "b")}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    message = failure(tmp_path, blank(saved), Cutting())
    assert "\n__0_0.distcp: it cannot be read: the file ends at " in message
    assert "way out:" in message


@pytest.mark.parametrize("place", [{"offset": -1}, {"length": -1}])
@pytest.mark.parametrize("key", ["a", "b.0"])
def test_a_place_that_no_file_has_is_named(tmp_path: Path, key: str, place: dict[str, int]) -> None:
    saved = {"a": torch.ones(40, 40), **{f"b.{at}": torch.ones(3) for at in range(8)}}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    metadata = stock_metadata(tmp_path)
    for index, info in metadata.storage_data.items():
        if index.fqn[0] == key[0]:
            vars(info).update(place)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(dcp.CheckpointException, match=f"{key}.*: .* has no bytes"):
        load(tmp_path, blank(saved), PlacementFileSystemReader(tmp_path))


@pytest.mark.parametrize("size", [3, 100_000])
def test_what_is_no_tensor_is_named(tmp_path: Path, size: int) -> None:
    saved = {"a": torch.randn(size)}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    with open(tmp_path / "__0_0.distcp", "r+b") as file:
        file.write(bytes(64))
    message = failure(tmp_path, blank(saved))
    assert "\na: what __0_0.distcp holds of it is no tensor" in message
    assert "found:       ValueError: it is no zip file of torch.save\n" in message


def test_files_of_another_save_are_refused(tmp_path: Path) -> None:
    for name, shape in (("a", (500, 40)), ("b", (400, 50))):
        dcp.save({"w": torch.randn(shape)}, checkpoint_id=tmp_path / name)
    os.replace(tmp_path / "b/__0_0.distcp", tmp_path / "a/__0_0.distcp")
    message = failure(tmp_path / "a", {"w": torch.zeros(500, 40)})
    assert "w: __0_0.distcp holds a (400, 50) tensor" in message


def test_elements_beyond_the_end_of_a_record_are_not_read(tmp_path: Path) -> None:
    """Also where its head is that of a whole one, and its length that of another."""
    saved = {"a": torch.randn(500, 500), "b": torch.randn(500, 400), "c": torch.randn(500, 500)}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    infos = {index.fqn: info for index, info in metadata.storage_data.items()}
    infos["c"].length = infos["b"].length
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert (
        f"\nc: the record at byte {infos['c'].offset} of __0_0.distcp is not what was"
        in failure(tmp_path, blank(saved))
    )


def test_without_any_metadata_the_error_is_of_torchs_type(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"\.metadata"):
        PlacementFileSystemReader(tmp_path).read_metadata()
    with pytest.raises(FileNotFoundError, match=r"\.metadata"):
        PlacementFileSystemReader(tmp_path / "nowhere").read_metadata()


def refused_load(path: Path) -> str:
    """Return why a load from a path is refused."""
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"w": torch.zeros(3)}, storage_reader=PlacementFileSystemReader(path))
    return str(caught.value)


@passes_on_errors
def test_a_path_without_metadata_is_described(tmp_path: Path) -> None:
    for step in (10, 9):  # 9 is the newer one
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / str(step))
    os.utime(tmp_path / "10" / ".metadata", ns=(0, 1))
    beside = "way out:     the newest complete one beside it: 9"
    text = refused_load(tmp_path / "11")
    assert f"{tmp_path}/11: no complete checkpoint, as there is no .metadata" in text
    assert "found:       no such directory" in text
    assert text.count(beside) == 1
    assert "rank local metadata read failed: for the same reason" in text
    (tmp_path / "12").mkdir()
    assert "found:       an empty directory" in refused_load(tmp_path / "12")
    (tmp_path / "12" / ".metadata.tmp").touch()
    (tmp_path / "12" / "__0_0.distcp").touch()
    text = refused_load(tmp_path / "12")
    assert "found:       .metadata.tmp, __0_0.distcp" in text
    assert "likely:      a save that was cut off, as .metadata comes last" in text
    assert "way out:     one of the checkpoints inside: 10, 9" in refused_load(tmp_path)
    (tmp_path / "file").touch()
    assert "found:       a file, and no directory" in refused_load(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        PlacementFileSystemReader(tmp_path / "12").read_metadata()


@passes_on_errors
@pytest.mark.parametrize("kept", [0, 0.5])
def test_metadata_that_are_cut_off_are_named(tmp_path: Path, kept: float) -> None:
    for step in "ab":
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / step)
    data = (tmp_path / "b" / ".metadata").read_bytes()
    size = int(kept * len(data))
    (tmp_path / "b" / ".metadata").write_bytes(data[:size])
    text = refused_load(tmp_path / "b")
    assert f"{tmp_path}/b/.metadata: this is no metadata of DCP's that can be read" in text
    assert f", in {size} bytes\n    likely:      the file was damaged or cut short" in text
    assert "way out:     the newest complete one beside it: a" in text
