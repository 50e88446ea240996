"""The directory of a checkpoint to examine: that it is there, and is not written meanwhile."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from dcp_placements.errors import CannotLook
from dcp_placements.short_text import format_name, format_names
from dcp_placements.storage.file_reads import CountedFile, is_damage
from dcp_placements.storage.store import LocalStore, StorageOptions, Store, open_store

MARKER = ".unfinished"
"""The marker of an unfinished output at a URL. Older versions put a number behind it."""


class OpenedFile(NamedTuple):
    """A file that is open for reading."""

    stream: IO[bytes]  # the one to close
    file: CountedFile  # reads of it


_DESCRIBING = (".metadata", ".index.json", "metadata.json")
"""Endings of the names of files that describe where the tensors are."""


def existing_directory(
    path: str | os.PathLike[str], storage_options: StorageOptions = None
) -> Store:
    """Return the files of a directory, of which only plain ones inside it are opened.

    Args:
        path: A directory, or a URL that fsspec knows.
        storage_options: Options that fsspec passes to the file system of a URL.

    Raises:
        CannotLook: There is no such directory, or fsspec is needed and not installed.
        OSError: The service cannot be reached or refuses.
    """
    store = open_store(path, storage_options, restricted=True)
    entry = store.entry()
    if entry is None:
        raise CannotLook(f"{store.path}: there is no such path")
    if entry.nbytes is not None:
        raise CannotLook(
            f"{store.path}: this is a file\n    way out:     give the checkpoint's directory"
        )
    return store


def local_path(store: Store, name: str = "") -> Path | None:
    """Return the path of a file on this machine's disk; None for a URL."""
    return store.file(name) if isinstance(store, LocalStore) else None


@contextmanager
def opened_ahead(store: Store, names: Iterable[str]) -> Iterator[Iterator[OpenedFile | OSError]]:
    """Yield an iterator of files, open for reading, in order; of the error where one is not opened.

    At a URL the next few are opened at the same time, and their first bytes are read: all of a
    small one. Files that were opened ahead, and not asked for, are closed when the block ends.
    """
    ahead: set[IO[bytes]] = set()

    def opened(name: str) -> OpenedFile | OSError:
        try:
            with ExitStack() as stack:
                stream = stack.enter_context(store.open(name))
                held = OpenedFile(stream, CountedFile(stream))
                if not store.is_local:
                    stream.seek(0)
                    stream.read(1)
                stack.pop_all()
        except OSError as error:
            return error
        ahead.add(stream)
        return held

    def asked_for() -> Iterator[OpenedFile | OSError]:
        for held in results:
            if isinstance(held, OpenedFile):
                ahead.discard(held.stream)
            yield held

    results = store.ahead(opened, names)
    try:
        yield asked_for()
    finally:
        results.close()  # waits for those that are being opened
        for stream in ahead:
            stream.close()


def check_damage(store: Store, name: str, error: Exception) -> None:
    """Raise an error of reading a file anew unless it is about the file: ``is_damage``.

    Raises:
        CannotLook: The error is no damage of the file.
    """
    if isinstance(error, OSError) and not is_damage(error):
        raise CannotLook(f"{store.path}/{name}: it cannot be read: {error}") from error


def versions_of(store: Store, files: Iterable[str]) -> dict[str, str]:
    """Return the versions of files by name, and of those that describe the checkpoint.

    The version of metadata is a digest of the bytes, that of other ``files`` the store's.
    """
    described = [name for name in store.names() if name.endswith(_DESCRIBING)]

    def version(name: str) -> str:
        try:
            if name not in described:
                return store.version(name)
            contents: Any = store.open(name)
            with contents as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except (FileNotFoundError, PermissionError):
            return ""  # missing, or barred, as long as nobody reads it

    names = [*{*files, *described}]
    return dict(zip(names, store.ahead(version, names), strict=True))


def check_versions(store: Store, versions: Mapping[str, str]) -> None:
    """Refuse what was read if a file was written again since.

    Args:
        store: The files.
        versions: Result of ``versions_of`` before anything was read.

    Raises:
        CannotLook: A file was written again, or is not there any more.
    """
    now = versions_of(store, versions)
    changed = sorted(n for n in {*now, *versions} if now.get(n) != versions.get(n))
    if changed:
        raise overwritten(store, changed)


def overwritten(store: Store, changed: Sequence[str]) -> CannotLook:
    """Return the error of files that were written again while they were read."""
    return CannotLook(
        f"{format_name(store.path)}: it was overwritten while it was read, so nothing of it "
        "is kept\n"
        f"    found:       {format_names(changed, 4)}: other contents than at the start\n"
        "    likely:      a save into the same directory\n"
        "    way out:     run it again when the save has ended"
    )
