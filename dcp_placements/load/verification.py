"""``verify="digests"``: what is read is compared with the digests that the save stored."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from dcp_placements._torch import Metadata, MetadataIndex, ReadItem, TensorStorageMetadata
from dcp_placements.errors import Fault, PlacementError, format_faults
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import format_box
from dcp_placements.report import LoadReport
from dcp_placements.storage.hashing import full_digest
from dcp_placements.storage.metadata.provenance import stored, stored_digest

VERIFY = ("off", "digests")


class Verification:
    """Compares what one rank reads with the checkpoint's digests.

    A digest is that of a whole chunk, so a chunk that is read in part, or cast, cannot be compared.

    Args:
        metadata: The checkpoint's.
        rank: The global rank, for messages.
        report: Takes in how many chunks were compared.
    """

    def __init__(self, metadata: Metadata, rank: int, report: LoadReport) -> None:
        self._metadata = metadata
        self._provenance: Mapping[str, Any] = stored(metadata) or {}
        self.rank = rank
        self._report = report

    def faults(self) -> list[Fault]:
        """Return that the checkpoint has no digests, where it has none."""
        if self._provenance.get("digests"):
            return []
        return [
            Fault(
                "this checkpoint",
                "has no digests, but verify='digests' asks for them",
                (
                    "way out:     save with PlacementSavePlanner(digests='full'); or load "
                    "without verify=, which proves nothing",
                ),
            )
        ]

    def notes(self, items: Sequence[ReadItem], state_dict: Mapping[str, Any]) -> list[Fault]:
        """Return how many of the chunks cannot be compared, if not all can."""
        without = sum(
            self._digest_of(item, getattr(state_dict.get(item.dest_index.fqn), "dtype", None))
            is None
            for item in items
        )
        if not without:
            return []
        note = Fault(
            "verify='digests'",
            f"rank {self.rank} cannot compare {without} of the {len(items)} chunks that it reads",
            (
                "because:     a digest is that of a whole chunk, and these are read in "
                "part (saved and loaded in different layouts), or cast",
                "instead:     the id of the save that wrote each file is compared",
                "way out:     dcp-placements verify --digests compares all of them",
            ),
        )
        return [note]

    def check_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Compare what an item read into a tensor.

        Raises:
            PlacementError: Bytes that are not those that were saved.
        """
        digest = self._digest_of(item, tensor.dtype)
        if digest is None:
            self._report.unverified += 1
            return
        if full_digest(tensor) != digest:
            chunk = self._stored(item.storage_index).chunks[item.storage_index.index or 0]
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            raise self._damaged(item.storage_index, format_box(box))
        self._report.verified += 1

    def check_object(self, item: ReadItem, value: io.BytesIO) -> None:
        """Compare the bytes of an object.

        Raises:
            PlacementError: Bytes that are not those that were saved.
        """
        digest = stored_digest(self._provenance, item.storage_index.fqn, item.storage_index.offset)
        if digest is None:
            self._report.unverified += 1
            return
        if xxhash.xxh3_128_digest(value.getbuffer()) != digest:
            raise self._damaged(item.storage_index, "this object")
        self._report.verified += 1

    def _stored(self, index: MetadataIndex) -> Any:
        return self._metadata.state_dict_metadata[index.fqn]

    def _digest_of(self, item: ReadItem, dtype: torch.dtype | None) -> bytes | None:
        """Return the digest of all that an item reads; None where there is none.

        Args:
            item: The read.
            dtype: Of the tensor that is filled.
        """
        index = item.storage_index
        entry = self._stored(index)
        if isinstance(entry, TensorStorageMetadata) and (
            dtype != entry.properties.dtype or item.lengths != entry.chunks[index.index or 0].sizes
        ):
            return None
        return stored_digest(self._provenance, index.fqn, index.offset)

    def _damaged(self, index: MetadataIndex, what: str) -> PlacementError:
        files = self._metadata.storage_data
        info = files.get(index) if isinstance(files, Mapping) else None
        file = getattr(info, "relative_path", "unknown")
        step = self._provenance.get("step")
        saved = f"save {self._provenance.get('save_id')}" + (
            "" if step is None else f", step {step}"
        )
        fault = Fault(
            index.fqn,
            f"rank {self.rank} read {what}, and it is not what was saved",
            (
                f"in file:     {file}",
                f"saved as:    {saved}",
                "likely:      the file was damaged, or a later save into the same directory was "
                "cut off and left files of two saves",
                "way out:     load an older checkpoint; this one is not sound",
            ),
        )
        return PlacementError(format_faults("the checkpoint is damaged", [fault]))
