"""N ranks in one process, through DCP's own order of calls and torch's real files.

``dcp.save`` and ``dcp.load`` call planner and storage in a fixed order, and send plans between
ranks by pickle. ``World`` does the same for every rank in turn. It refuses what the real one
refuses: an error on one rank is an error on all, as a ``CheckpointException``.
"""

from __future__ import annotations

import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    LoadPlanner,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from dcp_placements import _torch

from .mesh import FakeMesh

T = TypeVar("T")


class World:
    """Runs saves and loads of ``size`` ranks.

    Args:
        size: Number of ranks.
        meshes: Sizes by axis name of each mesh that the program has made, where a refusal of theirs
            is to know it.
    """

    def __init__(self, size: int, *meshes: Mapping[str, int]) -> None:
        self.size = size
        self.meshes = meshes

    def mesh(self, rank: int, **axes: int) -> FakeMesh:
        """Return the mesh of all ranks with these axes, C order, seen from ``rank``.

        Args:
            rank: The rank.
            axes: Numbers of ranks by axis name; their product is the number of ranks.

        Raises:
            ValueError: The product is another.
        """
        mesh = FakeMesh(tuple(axes.values()), tuple(axes), rank=rank)
        if mesh.size() != self.size:
            raise ValueError(f"axes {axes} make {mesh.size()} ranks, not {self.size}")
        return mesh

    def save(
        self,
        path: str | Path,
        state_dict: Callable[[int], dict[str, Any]],
        planner: Callable[[int], SavePlanner],
        writer: Callable[[int], StorageWriter] | None = None,
    ) -> list[SavePlanner]:
        """Save as ``dcp.save`` does on all ranks; return the planners, one per rank.

        Args:
            path: The checkpoint directory.
            state_dict: Each rank's state dict.
            planner: Each rank's planner; may be the same object from save to save.
            writer: Each rank's storage writer; a ``FileSystemWriter`` by default.

        Raises:
            CheckpointException: An error on any rank.
        """
        planners = [planner(rank) for rank in range(self.size)]
        make = writer or (lambda rank: FileSystemWriter(path))
        writers = [make(rank) for rank in range(self.size)]

        def local_step(rank: int) -> SavePlan:
            planners[rank].set_up_planner(
                state_dict=state_dict(rank),
                storage_meta=writers[rank].storage_meta(),
                is_coordinator=rank == 0,
            )
            writers[rank].set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            return writers[rank].prepare_local_plan(planners[rank].create_local_plan())

        plans = self._on_all("plan", local_step)

        def global_step() -> tuple[list[SavePlan], Metadata]:
            global_plans, metadata = planners[0].create_global_plan(plans)
            return writers[0].prepare_global_plan(global_plans), metadata

        central, metadata = self._on_one("plan", global_step)
        central = _sent(central)

        def write(rank: int) -> Any:
            final = planners[rank].finish_plan(central[rank])
            written = writers[rank].write_data(final, planners[rank])
            written.wait()
            return written.value()

        results = self._on_all("write", write)
        self._on_one("write", lambda: writers[0].finish(metadata, results))
        return planners

    def load(
        self,
        path: str | Path,
        state_dict: Callable[[int], dict[str, Any]],
        planner: Callable[[int], LoadPlanner],
        reader: Callable[[int], StorageReader] | None = None,
    ) -> list[dict[str, Any]]:
        """Load as ``dcp.load`` does on all ranks; return the filled state dicts.

        Args:
            path: The directory of the checkpoint.
            state_dict: Returns what a rank wants to be filled.
            planner: Returns the planner of a rank.
            reader: Returns the reader of a rank; torch's ``FileSystemReader`` without it.

        Raises:
            CheckpointException: An error on any rank.
            ValueError: A planner with ``exchange=``, which needs a process group.
        """
        planners = [planner(rank) for rank in range(self.size)]
        if any(getattr(of_rank, "exchange", False) for of_rank in planners):
            raise ValueError(
                "a simulated world has no process group, so its ranks cannot exchange what they "
                "read: load without exchange="
            )
        make = reader or (lambda rank: FileSystemReader(path))
        readers = [make(rank) for rank in range(self.size)]
        state_dicts = [state_dict(rank) for rank in range(self.size)]

        def local_step(rank: int) -> LoadPlan:
            metadata = readers[rank].read_metadata()
            planners[rank].set_up_planner(state_dicts[rank], metadata, rank == 0)
            readers[rank].set_up_storage_reader(
                metadata, rank == 0, rank=rank, use_collectives=True
            )
            return readers[rank].prepare_local_plan(planners[rank].create_local_plan())

        plans = self._on_all("plan", local_step)
        central = _sent(
            self._on_one(
                "plan",
                lambda: readers[0].prepare_global_plan(planners[0].create_global_plan(plans)),
            )
        )

        def read(rank: int) -> None:
            final = planners[rank].finish_plan(central[rank])
            readers[rank].read_data(final, planners[rank]).wait()

        self._on_all("read", read)
        return state_dicts

    def check(
        self,
        state_dict: Callable[[int], dict[str, Any]],
        planner: Callable[[int], SavePlanner],
    ) -> SavePlanner:
        """Plan a save as ``dcp.save`` does, and write nothing; return the coordinator's planner.

        Its ``report`` is that of the save.

        Args:
            state_dict: Returns what a rank would save.
            planner: Returns the planner of a rank.

        Raises:
            CheckpointException: A save would be refused.
        """
        planners = [planner(rank) for rank in range(self.size)]

        def local_step(rank: int) -> SavePlan:
            planners[rank].set_up_planner(state_dict=state_dict(rank), is_coordinator=rank == 0)
            return planners[rank].create_local_plan()

        plans = self._on_all("check", local_step)
        self._on_one("check", lambda: planners[0].create_global_plan(plans))
        return planners[0]

    def _on_all(self, step: str, work: Callable[[int], T]) -> list[T]:
        """Run ``work`` on every rank; its results are sent to the coordinator."""
        failures: dict[int, Any] = {}
        results: list[T] = []
        for rank in range(self.size):
            try:
                with self._as(rank):
                    results.append(_sent(work(rank)))
            except Exception as error:
                failures[rank] = (error, traceback.extract_tb(error.__traceback__))
        if failures:
            raise CheckpointException(step, failures)
        return results

    def _on_one(self, step: str, work: Callable[[], T]) -> T:
        """Run ``work`` on the coordinator."""
        try:
            with self._as(0):
                return work()
        except Exception as error:
            failure = (error, traceback.extract_tb(error.__traceback__))
            raise CheckpointException(step, {0: failure}) from error

    @contextmanager
    def _as(self, rank: int) -> Iterator[None]:
        """Within the block, torch.distributed answers as on ``rank``."""
        with (
            mock.patch.multiple(
                dist,
                is_initialized=lambda: True,
                get_rank=lambda group=None: rank,
                get_world_size=lambda group=None: self.size,
            ),
            mock.patch.object(
                _torch,
                "recorded_meshes",
                return_value=[self.mesh(rank, **axes) for axes in self.meshes],
            ),
            warnings.catch_warnings(),
        ):
            # Ranks share one directory here; torch warns on each that overwrites an older one.
            warnings.filterwarnings("ignore", "Detected an existing checkpoint")
            yield


def _sent(value: T) -> T:
    """Return what arrives when ``value`` is sent to another rank."""
    return pickle.loads(pickle.dumps(value))  # type: ignore[no-any-return]
