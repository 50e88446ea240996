"""Fixtures that several files of tests use, the options of the random worlds, and the order."""

import os
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.offline_scenes import run
from tests.remote_scenes import flaky, memory, proxy, s3, s3_server
from tests.storage_scenes import flipped_is_known

__all__ = ["flaky", "flipped_is_known", "memory", "proxy", "run", "s3", "s3_server"]

# A busy machine draws slowly at times, which says nothing of what is drawn.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Programs of ranks, started by tests; pytest would import them to look for doctests.
collect_ignore = ["ranks"]

WORLDS_PER_TEST = 10

# Of the files that start no processes of ranks, those that take longest.
LONG = {"test_matrix", "test_megatron_import", "test_differential"}

# Once per process the writer of torch 2.10 warns of this call, which is its own.
with warnings.catch_warnings(action="ignore"):
    torch.empty(0).storage()


@pytest.fixture(scope="session", autouse=True)
def no_waits_for_the_disk() -> Iterator[None]:
    """Leave out fsync: no test takes the power away."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("random worlds")
    group.addoption("--worlds", type=int, help="how many of each kind are tried")
    group.addoption("--world-seed", type=int, default=0, help="the first one (0)")
    parser.addoption("--all", action="store_true", help="try what is marked as rare, too")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        (default,) = metafunc.definition.get_closest_marker("worlds").args
        count = metafunc.config.getoption("--worlds")
        first = metafunc.config.getoption("--world-seed")
        stop = first + (default if count is None else count)
        groups = [
            range(start, min(start + WORLDS_PER_TEST, stop))
            for start in range(first, stop, WORLDS_PER_TEST)
        ]
        metafunc.parametrize("seeds", groups, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a parallel run, begin with the files that take longest: no core waits at the end."""
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("rare")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        first = {item.path for item in items if item.get_closest_marker("dist")}
        items.sort(key=lambda item: (item.path not in first, item.path.stem not in LONG))
