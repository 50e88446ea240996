"""Fixtures that several files of tests use."""

from tests.offline_scenes import run

__all__ = ["run"]

# Programs of ranks, started by tests; pytest would import them to look for doctests.
collect_ignore = ["ranks"]
