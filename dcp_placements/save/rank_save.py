"""One save, seen from one rank: all that belongs to it and to no other save."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_placements._torch import (
    Metadata,
    MetadataIndex,
    SavePlan,
    global_rank,
)
from dcp_placements.bind.aliases import meta_faults
from dcp_placements.bind.placed import Placing
from dcp_placements.bind.placing import optimizer_faults
from dcp_placements.bind.reshaping import place_renamed
from dcp_placements.errors import Fault, PlacementError, RankFaults
from dcp_placements.layout.sharding import Chunk
from dcp_placements.names.flat import Path, Reshaped, checkpoint_path, rename_keys
from dcp_placements.names.optimizer_state import listed_notes
from dcp_placements.names.renames import Recorded, numbering, recorded
from dcp_placements.names.target import Rename
from dcp_placements.report import SaveReport
from dcp_placements.rules.matches import Matches, rule_matches
from dcp_placements.rules.patterns import Rules
from dcp_placements.save.held_digests import chunk_data
from dcp_placements.table.table import Holding, Table, held_chunks, holding_of

REFUSED = "cannot be placed in the checkpoint"


@dataclass
class RankSave:
    """The state of one save on one rank.

    Attributes:
        state_dict: Flat, with the checkpoint's keys.
        mappings: Where each key stands in the nested dict.
        plan: What the rank writes, when all ranks have agreed.
        global_plan: Coordinator only: the plans of all ranks.
        metadata: Coordinator only: what will be in ``.metadata``.
        is_coordinator: Whether this rank is the coordinator.
        placing: Its tensors' places.
        paths: By key, where it stands in the nested dict of the checkpoint; empty where the state
            dict was not flattened.
        holding: What it holds, by group.
        packed_tables: The tables of that, by their packed form.
        report: The report on the save; None before it is made.
        renames: What the checkpoint is to keep of the rename.
        is_planned: Whether the local plan has been made.
        directory: That it writes into; empty for none.
        target: A checksum of the name of the directory that it writes into; 0 for no name.
        refusal: Why the rank cannot save; the coordinator raises it for all ranks.
        notes: What is saved with a warning.
    """

    state_dict: dict[str, Any] = field(default_factory=dict)
    mappings: dict[str, Path] = field(default_factory=dict)
    plan: SavePlan | None = None
    global_plan: list[SavePlan] = field(default_factory=list)
    metadata: Metadata | None = None
    is_coordinator: bool = False
    placing: Placing = field(default_factory=Placing)
    paths: Mapping[str, Path] = field(default_factory=dict)
    holding: Holding = field(default_factory=Holding)
    packed_tables: Mapping[bytes, Table] = field(default_factory=dict)
    report: SaveReport | None = None
    renames: tuple[Recorded, ...] = ()
    is_planned: bool = False
    directory: str = ""
    target: int = 0
    refusal: RankFaults | None = None
    notes: list[Fault] = field(default_factory=list)
    _reshaped: Reshaped = field(default_factory=Reshaped)
    _rename_matches: Matches = field(default_factory=dict)
    _chunks: dict[str, dict[tuple[int, ...], Chunk]] = field(default_factory=dict)

    def rename(self, rename: Rename | None) -> None:
        """Take the checkpoint's keys for this rank's.

        Raises:
            RankFaults: Keys that cannot be renamed.
        """
        local = self.state_dict
        renamed = rename_keys(local, self.mappings, rename)
        self.state_dict, self.mappings, self._reshaped, self._rename_matches = renamed
        self.renames = recorded(rename, local, self.state_dict)

    def place(self, rules: Rules | None, rename: Rename | None, *, flat: bool) -> None:
        """Work out where the tensors lie, and what the rank holds.

        Args:
            rules: The user's rules.
            rename: The user's renaming.
            flat: Whether the state dict was flattened, so that ``mappings`` holds paths.

        Raises:
            RankFaults: Tensors and rules that do not fit, all of them in one error.
        """
        unfolded = place_renamed(self.state_dict, self.mappings, self._reshaped, rules)
        self.placing = unfolded.placing
        self.state_dict, self.mappings = unfolded.state_dict, unfolded.mappings
        faults = self.placing.faults
        faults += optimizer_faults(self.state_dict, self.placing, rename)
        faults += meta_faults(self.state_dict, self.placing)
        if faults:
            raise RankFaults(f"rank {global_rank()} {REFUSED}", faults)
        if flat:
            self.paths = self.mappings
            if rename is not None:
                self.paths = {key: checkpoint_path(key, at) for key, at in self.mappings.items()}
        patterns = [numbered.pattern for numbered in numbering(rename)]
        self.notes = listed_notes(self.state_dict, patterns) if patterns else []
        self.hold()
        self.is_planned = True

    def declared(self, rules: Rules | None) -> Matches:
        """Return what is declared by pattern, and whether a key of this rank matches."""
        return {**rule_matches(rules, self.placing.matched), **self._rename_matches}

    def hold(self, left: Collection[str] = ()) -> None:
        """Take all keys for what the rank holds, but for those that are left to other ranks."""
        without = self.placing.absent.union(left)
        self.holding = holding_of(self.state_dict, self.placing.placed, self.paths, without)

    def data(self, index: MetadataIndex) -> torch.Tensor | None:
        """Return a view of what a placed tensor has at ``index``; None for others.

        Raises:
            PlacementError: The rank has no chunk there.
        """
        placed = self.placing.placed.get(index.fqn)
        if placed is None:
            return None
        if len(placed.chunks) == 1 and placed.chunks[0].offsets == index.offset:
            return placed.view(placed.chunks[0])
        chunks = self._chunks.get(index.fqn)
        if chunks is None:
            chunks = {chunk.offsets: chunk for chunk in held_chunks(placed)}
            if len(chunks) > 1:
                self._chunks[index.fqn] = chunks
        chunk = chunks.get(tuple(index.offset or ()))
        if chunk is None:
            raise PlacementError(f"{index.fqn}: this rank has no chunk at offset {index.offset}")
        return chunk_data(placed, chunk)
