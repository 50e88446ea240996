"""Calls that ``torch.load(weights_only=True)`` allows, with arguments that take long to print."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._weights_only_unpickler import _get_allowed_globals

from dcp_placements import PlacementFileSystemReader
from dcp_placements.convert.conversion import export_safetensors
from dcp_placements.errors import PlacementError
from dcp_placements.offline import diff, verify
from dcp_placements.storage.torch_load import load_plain, load_saved_tensor
from tests.offline.test_untrusted_objects import saved

LEVELS = 17
"""What is not bounded prints, or hashes, 2**17 values here, and would 2**60 as well."""

TUPLES = b"K\x01\x85" + b"q\x00h\x00\x86" * LEVELS
LISTS = b"]" + b"q\x00]h\x00ah\x00a" * LEVELS
VALUES = {"tuples": TUPLES, "lists": LISTS, "text": b"X\x40\x42\x0f\x00" + b"a" * 1_000_000}
ENDS = {"a call": b"R.", "an instance": b"\x81.", "a state": b"b."}
LONGEST = 2000
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
    for args in (TUPLES, b"(" + LISTS * 7 + b"t", b"(NK\x00))" + TUPLES + b"NNt"):
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


def untrusted(path: Path, record: bytes) -> Path:
    """Return a checkpoint whose tensor has another record."""
    dcp.save({"w": torch.ones(2000), "v": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    metadata = dcp.FileSystemReader(path).read_metadata()
    (info,) = [i for at, i in metadata.storage_data.items() if at.fqn == "w"]
    data = bytearray((path / info.relative_path).read_bytes())
    data[info.offset : info.offset + info.length] = record + bytes(info.length - len(record))
    (path / info.relative_path).write_bytes(data)
    return path


RECORDS = {
    "call": b"\x80\x02" + TUPLES + b")R.",
    "instance": b"\x80\x02" + TUPLES + b")\x81.",
    "sparse": b"\x80\x02ctorch._utils\n_rebuild_sparse_tensor\n" + TUPLES + b"N\x86R.",
    "quantized": b"\x80\x02ctorch._utils\n_rebuild_qtensor\n(NK\x00))" + TUPLES + b"NNtR.",
}


@pytest.mark.parametrize("name", RECORDS)
def test_m159_commands_and_restricted_loads_refuse_such_records(name: str, tmp_path: Path) -> None:
    path = untrusted(tmp_path / "a", saved(RECORDS[name]))
    dcp.save({"w": torch.ones(2000), "v": torch.ones(3)}, checkpoint_id=tmp_path / "b")
    faults = verify(path, contents=True).faults
    assert faults
    assert all(len(str(fault)) < LONGEST for fault in faults)
    found = diff(path, tmp_path / "b")
    assert not found.same
    assert len(str(found)) < LONGEST
    with pytest.raises(PlacementError) as refused:
        export_safetensors(path, tmp_path / "out")
    assert len(str(refused.value)) < LONGEST
    reader = PlacementFileSystemReader(path, restricted=True)
    with pytest.raises(dcp.CheckpointException) as failed:
        dcp.load({"w": torch.zeros(2000)}, storage_reader=reader, no_dist=True)
    assert len(str(failed.value.failures[0][0])) < LONGEST


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
