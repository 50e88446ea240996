"""Assembled tensors as safetensors files, in the form of the Hugging Face hub."""

from __future__ import annotations

import json
from typing import IO

from dcp_placements.convert.sources import Source
from dcp_placements.convert.writing import Elements, identity_of
from dcp_placements.errors import Fault, raise_faults
from dcp_placements.offline.assembly import AssembledTensor
from dcp_placements.offline.safetensors_files import DTYPES, write_header

INDEX = "model.safetensors.index.json"


class SafetensorsOut:
    """Writes files of up to ``max_shard_size`` bytes; a larger tensor has a file to itself.

    The last file is the index, if there are several.

    Raises:
        PlacementError: The format has no such dtype.
    """

    def __init__(
        self, source: Source, tensors: dict[str, AssembledTensor], max_shard_size: int
    ) -> None:
        self.tensors = tensors
        self.identity = identity_of(source, tensors, [max_shard_size])
        unknown = [tensor for tensor in tensors.values() if tensor.dtype not in DTYPES.values()]
        faults = [Fault(t.fqn, f"safetensors files have no dtype {t.dtype}") for t in unknown]
        raise_faults("the checkpoint cannot be exported", faults)
        shards: list[list[AssembledTensor]] = [[]]
        filled = 0
        for tensor in tensors.values():
            if shards[-1] and filled + tensor.nbytes > max_shard_size:
                shards.append([])
                filled = 0
            shards[-1].append(tensor)
            filled += tensor.nbytes
        count = len(shards)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        names = names if count > 1 else ["model.safetensors"]
        self._shards = dict(zip(names, shards, strict=True))
        self.files = {name: sum(t.nbytes for t in held) for name, held in self._shards.items()}
        self.last = INDEX if count > 1 else names[0]

    def write(self, name: str, stream: IO[bytes], elements: Elements) -> None:
        """Write one file of tensors, those with the largest elements first; or the index."""
        if name == INDEX:
            weights = {t.fqn: file for file, tensors in self._shards.items() for t in tensors}
            index = {
                "metadata": {"total_size": sum(self.files.values())},
                "weight_map": dict(sorted(weights.items())),
            }
            stream.write((json.dumps(index, indent=2) + "\n").encode())
            return
        tensors = sorted(self._shards[name], key=lambda tensor: -tensor.dtype.itemsize)
        entries = [(tensor.fqn, tensor.dtype, tensor.shape) for tensor in tensors]
        stream.write(write_header(entries, {"format": "pt"}))
        for tensor in tensors:
            for block in elements.of(tensor, tensor.whole):
                stream.write(block)
