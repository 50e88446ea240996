"""Functions of zlib that take a quarter of the time where isal is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

_ZLIB = import_module("isal.isal_zlib" if find_spec("isal") else "zlib")

crc32: Callable[..., int] = _ZLIB.crc32
"""The checksum of zip files."""
