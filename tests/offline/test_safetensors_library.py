"""Headers of safetensors files are read as the library reads them: what it refuses is refused."""

from __future__ import annotations

import json
import random
import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dcp_placements.errors import CannotLook
from dcp_placements.layout.sharding import Box
from dcp_placements.offline import open_source
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.safetensors_files import NAMED_DTYPES

DTYPES = list(NAMED_DTYPES.values())


def drawn(rng: random.Random) -> dict[str, torch.Tensor]:
    """Return tensors of random dtypes and shapes, also without elements."""
    held = {}
    for number in range(rng.randint(1, 6)):
        dtype = rng.choice(DTYPES)
        shape = tuple(rng.choice([0, 1, 2, 3, 5]) for _ in range(rng.randint(1, 3)))
        raw = torch.randint(0, 2, (prod(shape) * dtype.itemsize,), dtype=torch.uint8)
        held[f"t{number}"] = raw.view(dtype).reshape(shape)
    return held


def damaged(rng: random.Random, header: dict[str, Any]) -> None:
    """Change a header in one place."""
    entry = header[rng.choice(sorted(header))]
    match rng.choice(["dtype", "shape", "start", "stop", "another"]):
        case "dtype":
            entry["dtype"] = rng.choice([*NAMED_DTYPES, "F3", "f32"])
        case "shape":
            entry["shape"] = [
                rng.choice([0, 1, 2, 3, 7, 1 << 62]) for _ in range(rng.randint(0, 3))
            ]
        case "start":
            entry["data_offsets"][0] += rng.choice([-1, 1, 4])
        case "stop":
            entry["data_offsets"][1] += rng.choice([-1, 1, 4])
        case _:
            header["more"] = dict(entry)


@pytest.mark.parametrize("seed", range(200))
def test_a_header_is_what_the_library_says(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    path = tmp_path / "model.safetensors"
    save_file(drawn(rng), path)
    if seed % 2:
        data = path.read_bytes()
        base = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:base])
        damaged(rng, header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[base:])
    library: dict[str, Any] | None = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                library[name] = tuple(tensor.shape), tensor.dtype
    except (SafetensorError, RuntimeError, TypeError, ValueError):
        library = None
    try:
        checkpoint = open_source(tmp_path)
    except CannotLook:
        assert library is None
        return
    assert {f: (t.shape, t.dtype) for f, t in checkpoint.tensors.items()} == library


@pytest.mark.parametrize("seed", range(50))
def test_a_slice_is_what_the_library_reads(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    path = tmp_path / "model.safetensors"
    save_file(drawn(rng), path)
    checkpoint = open_source(tmp_path)
    with safe_open(path, "pt") as library, BoxReader(checkpoint) as reader:
        for fqn, tensor in checkpoint.tensors.items():
            starts = [rng.randint(0, size) for size in tensor.shape]
            ends = [rng.randint(a, b) for a, b in zip(starts, tensor.shape, strict=True)]
            sizes = tuple([b - a for a, b in zip(starts, ends, strict=True)])
            read = reader.read(tensor, Box(tuple(starts), sizes))
            whole = library.get_tensor(fqn)
            assert (read.shape, read.dtype) == (sizes, whole.dtype)
            if prod(sizes):
                wanted = of_bytes(whole)[tuple(map(slice, starts, ends))]
                assert of_bytes(read).equal(wanted)


def of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, as torch compares no floats of four or eight bits."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    return raw.reshape(*tensor.shape, tensor.dtype.itemsize)


@pytest.mark.parametrize("shape", [[], [3], [2, 5]])
def test_m148_four_bits_that_are_no_whole_bytes_are_refused(
    tmp_path: Path, shape: list[int]
) -> None:
    text = json.dumps({"w": {"dtype": "F4", "shape": shape, "data_offsets": [0, 5]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(5))
    with pytest.raises(CannotLook, match="no sound safetensors file"):
        open_source(tmp_path)
