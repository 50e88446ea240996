"""Fixtures that several files of tests use."""

from tests.offline_scenes import run

__all__ = ["run"]
