"""Assembled tensors as safetensors files, in the form of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import IO

from dcp_placements.convert.elements import Elements
from dcp_placements.errors import Fault, raise_faults
from dcp_placements.offline.assembly import AssembledTensor
from dcp_placements.offline.safetensors_files import DTYPES, write_header
from dcp_placements.storage.file_reads import write_all

INDEX = "model.safetensors.index.json"


class SafetensorsOut:
    """Writes files of up to ``max_shard_size`` bytes; a larger tensor has a file to itself.

    Attributes:
        files: Bytes of tensors by file.
        last: The file that completes the output.

    Raises:
        PlacementError: The format has no such dtype.
    """

    def __init__(self, tensors: Sequence[AssembledTensor], max_shard_size: int) -> None:
        unknown = [tensor for tensor in tensors if tensor.dtype not in DTYPES.values()]
        faults = [Fault(t.fqn, f"safetensors files have no dtype {t.dtype}") for t in unknown]
        raise_faults("the checkpoint cannot be exported", faults)
        self._tensors = _shards(tensors, max_shard_size)
        self.files = {name: sum(t.nbytes for t in held) for name, held in self._tensors.items()}
        self.last = INDEX if len(self.files) > 1 else next(iter(self.files))

    def text(self) -> Iterator[str]:
        """Yield what decides the bytes of the files, beside the tensors."""
        for name, tensors in self._tensors.items():
            yield f"{name} {[tensor.fqn for tensor in tensors]}"

    def begin(self, identity: str) -> None:
        """Do nothing: the files are named by their number."""

    def write(self, name: str, stream: IO[bytes], elements: Elements) -> None:
        """Write one file of tensors."""
        tensors = self._tensors[name]
        entries = [(tensor.fqn, tensor.dtype, tensor.shape) for tensor in tensors]
        write_all(stream, memoryview(write_header(entries, {"format": "pt"})))
        for tensor in tensors:
            for block in elements.of(tensor, tensor.whole):
                write_all(stream, block)

    def finish(self, stream: IO[bytes]) -> None:
        """Write the index."""
        weights = {t.fqn: name for name, tensors in self._tensors.items() for t in tensors}
        index = {
            "metadata": {"total_size": sum(self.files.values())},
            "weight_map": dict(sorted(weights.items())),
        }
        stream.write((json.dumps(index, indent=2) + "\n").encode())


def _shards(tensors: Sequence[AssembledTensor], limit: int) -> dict[str, list[AssembledTensor]]:
    """Return the tensors of each file, those with the largest elements first."""
    shards: list[list[AssembledTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    count = len(shards)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return {
        name: sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
        for name, shard in zip(names if count > 1 else ["model.safetensors"], shards, strict=True)
    }
