"""What the hazard tests share: reading a file with stock torch, and catching a refusal."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from dcp_placements import (
    LoadReport,
    PlacementError,
    PlacementLoadPlanner,
    PlacementSavePlanner,
    SaveReport,
)
from dcp_placements.table import digests
from dcp_placements.testing import FakeDTensor, World

FILL = 77
"""What templates hold before a load: no test saves it."""


def arange(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of ``shape`` whose elements all differ."""
    numel = int(torch.Size(shape).numel())
    return torch.arange(start, start + numel).reshape(shape).to(dtype)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of values that no test saves."""
    if dtype == torch.float4_e2m1fn_x2:  # which torch does not fill
        return torch.full(shape, 0xEE, dtype=torch.uint8).view(dtype)
    return torch.full(shape, FILL, dtype=dtype)


def read_whole(path: Path, *names: str) -> dict[str, Any]:
    """Return a checkpoint's tensors, all of them by default, as stock torch reads them alone."""
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    whole: dict[str, Any] = {
        name: filled(tuple(stored[name].size), stored[name].properties.dtype)
        for name in names or stored
        if hasattr(stored[name], "size")
    }
    dcp.load(whole, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    return whole


def assert_holds(path: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """Assert that the file holds just these whole tensors, bit for bit, as stock torch reads it."""
    found = read_whole(path)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same_bits(found[name], tensor), f"{name}: {found[name]} is not {tensor}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*raw)


def blank(value: Any) -> Any:
    """Return a template of a state dict: same structure, every tensor filled with ``FILL``."""
    if isinstance(value, dict):
        return {key: blank(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [blank(entry) for entry in value]
    if isinstance(value, FakeDTensor):
        return FakeDTensor(
            blank(value.to_local()), value.device_mesh, value.placements, value.shape
        )
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, FILL)
    return None


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(key, local value)`` of a nested state dict."""
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else None
    )
    if entries is not None:
        for key, entry in entries:
            yield from leaves(entry, f"{path}.{key}" if path else str(key))
    else:
        yield path, value.to_local() if isinstance(value, FakeDTensor) else value


def assert_same(found: Any, wanted: Any) -> None:
    """Assert that two nested state dicts hold the same local tensors and objects."""
    one, other = dict(leaves(found)), dict(leaves(wanted))
    assert one.keys() == other.keys()
    for key, value in other.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(one[key], value), f"{key}: {one[key]} is not {value}"
        else:
            assert np.all(one[key] == value), key


class Caught:
    """A refusal: the text of every failing rank, and of all together."""

    def __init__(self) -> None:
        self.by_rank: dict[int, str] = {}

    @property
    def text(self) -> str:
        """The texts of all failing ranks."""
        return "\n".join(self.by_rank.values())

    def says(self, *parts: str) -> None:
        """Assert that the text holds each of ``parts``."""
        for part in parts:
            assert part in self.text, f"{part!r} is not in:\n{self.text}"


@contextmanager
def refused() -> Iterator[Caught]:
    """Catch a refusal by this package; anything else that is raised fails the test."""
    caught = Caught()
    with pytest.raises(dcp.CheckpointException) as raised:
        yield caught
    for rank, (error, _) in raised.value.failures.items():
        assert isinstance(error, PlacementError), f"rank {rank}: {error!r}"
        caught.by_rank[rank] = str(error)


def refusal(work: Callable[[], Any]) -> str:
    """Return the text that ``work`` is refused with by this package."""
    with refused() as caught:
        work()
    return caught.text


@contextmanager
def refused_save(path: Path) -> Iterator[Caught]:
    """Catch a refused save, and assert that it left nothing that looks like a checkpoint."""
    with refused() as caught:
        yield caught
    assert [file.name for file in path.rglob("*") if file.is_file()] == []


@contextmanager
def without_warning() -> Iterator[None]:
    """Turn every warning into an error, but for torch's own two about one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        yield


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collect the texts of the warnings that the package gives; there must be one at least."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    ours = [w for w in caught if "torch.distributed is disabled" not in str(w.message)]
    assert ours, "no warning was given"
    assert {w.category for w in ours} == {UserWarning}
    texts += [str(w.message) for w in ours]


StateOf = Callable[[int], dict[str, Any]]
RulesOf = Callable[[int], Any]


def save(
    world: World, path: Path, state: StateOf, rules: RulesOf | None = None, **options: Any
) -> SaveReport:
    """Save with the planner on every rank; return the coordinator's report."""
    planners = world.save(
        path,
        state,
        lambda rank: PlacementSavePlanner(None if rules is None else rules(rank), **options),
    )
    return planners[0].report  # type: ignore[attr-defined, no-any-return]


def load(
    world: World, path: Path, state: StateOf, rules: RulesOf | None = None, **options: Any
) -> tuple[list[dict[str, Any]], list[LoadReport]]:
    """Load with the planner on every rank; return the filled state dicts and the reports."""
    planners = [
        PlacementLoadPlanner(None if rules is None else rules(rank), **options)
        for rank in range(world.size)
    ]
    loaded = world.load(path, state, lambda rank: planners[rank])
    return loaded, [planner.report for planner in planners]


@contextmanager
def digest_budget(nbytes: int) -> Iterator[None]:
    """Let the digests of all ranks take so many bytes, as if there were too many ranks for more."""
    with mock.patch.object(digests, "WORLD_BUDGET_NBYTES", nbytes):
        yield


def edit_metadata(path: Path, edit: Callable[[Metadata], None]) -> None:
    """Change a checkpoint's ``.metadata`` in place."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))
