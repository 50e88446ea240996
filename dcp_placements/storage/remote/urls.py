"""Paths that are URLs, and the options of their file systems."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dcp_placements.errors import CannotLook, format_name

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL that is read through fsspec.

    >>> is_url("s3://bucket/checkpoint"), is_url("/tmp/a://b"), is_url("file:///tmp")
    (True, False, False)
    """
    text = os.fspath(path)
    return _URL.match(text) is not None and not text.startswith(_LOCAL)


def local_or_url(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return a path as it is, and of a ``file://`` URL the local path.

    Raises:
        CannotLook: A relative path begins as a URL does, as ``pathlib.Path`` leaves one.
    """
    text = os.fspath(path)
    if text.startswith(_LOCAL):
        return text.partition("://")[2] or "/"
    if is_url(path) or not _ONE_SLASH.match(text):
        return path
    scheme, _, rest = text.partition(":/")
    raise CannotLook(
        f"{format_name(text)}: this is neither a URL nor an absolute path\n"
        "    likely:      pathlib.Path made it of a URL, of which it joins the slashes\n"
        f"    way out:     give the URL as a str: {format_name(f'{scheme}://{rest}')}; for a "
        "local directory an absolute path"
    )


_LOCAL = ("file://", "local://")


@contextmanager
def default_options(urls: list[str], options: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, pass options to the file systems of these URLs.

    Raises:
        CannotLook: fsspec is not installed.
    """
    if not options:
        yield
        return
    try:
        from fsspec.config import conf
    except ModuleNotFoundError as error:
        raise CannotLook("--storage-option needs fsspec: pip install fsspec") from error
    before = {protocol: conf.get(protocol) for protocol in {u.partition("://")[0] for u in urls}}
    conf.update({protocol: {**(held or {}), **options} for protocol, held in before.items()})
    try:
        yield
    finally:
        for protocol, held in before.items():
            del conf[protocol]
            if held is not None:
                conf[protocol] = held
