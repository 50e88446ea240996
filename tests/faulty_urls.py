"""A file system at URLs on which the n-th call of an operation fails, is late, or lies.

``oss://`` is an object store: a file appears whole when its upload is complete. ``pieces://`` is
none: a file is there from its first byte on, and is renamed only where no other one is. Both are
in memory, and each call counts::

    with faults(Fault("put", 0, OSError("reset"), times=9)):
        save("oss://bucket/ckpt", state)      # .metadata is not put
"""

from __future__ import annotations

import hashlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

LIES = ("short", "long", "other", "stale")


class Killed(BaseException):
    """The process is killed: nothing that it calls afterwards has an effect."""


class ServiceError(Exception):
    """An error of a service's library, as botocore's: no OSError."""


@dataclass
class Fault:
    """What happens at a call.

    Attributes:
        call: The operation.
        at: Number of the first call that it happens at, of those of the operation.
        error: What is raised, ``Killed`` for the end of the process; or a lie of ``LIES``.
        times: Number of calls that it happens at.
        is_late: Whether the call has its effect before.
        name: The end of the path of the calls that are counted.
    """

    call: str
    at: int
    error: BaseException | str
    times: int = 1
    is_late: bool = False
    name: str = ""


class Service:
    """What is at the URLs, and what happens to calls."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.files: dict[str, tuple[bytes, float]] = {}
        self.folders: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self.fault: Fault | None = None
        self.counted = self.happened = 0
        self.is_dead = False
        self.delay_s = 0.0
        self.clock = 0.0
        self.running = self.most_running = 0

    def put(self, path: str, data: bytes) -> None:
        self.clock += 1.0
        self.files[path] = data, self.clock

    def call(self, call: str, path: str, effect: Callable[[], Any]) -> Any:
        if self.delay_s:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            time.sleep(self.delay_s)
            self.running -= 1
        with self.lock:
            if self.is_dead:
                raise Killed
            self.calls.append((call, path))
            fault = self.fault
            if fault is None or fault.call != call or not path.endswith(fault.name):
                return effect()
            number, self.counted = self.counted, self.counted + 1
            if not fault.at <= number < fault.at + fault.times:
                return effect()
            self.happened += 1
            if isinstance(fault.error, str):
                return _lie(fault.error, effect())
            if fault.is_late:
                effect()
            self.is_dead = isinstance(fault.error, Killed)
            raise fault.error


def _lie(kind: str, answer: Any) -> Any:
    if isinstance(answer, bytes):
        half = answer[: len(answer) // 2]
        return {"short": half, "long": answer + b"x", "other": bytes(len(answer))}.get(kind, answer)
    if isinstance(answer, list) and kind == "stale":
        newest = max(answer, key=lambda info: info["mtime"], default=None)
        return [info for info in answer if info is not newest]
    if isinstance(answer, int) and kind == "short":
        return answer // 2
    return answer


SERVICE = Service()


@contextmanager
def faults(fault: Fault | None) -> Iterator[Service]:
    """Let something happen in the block."""
    SERVICE.fault, SERVICE.is_dead, SERVICE.counted, SERVICE.happened = fault, False, 0, 0
    SERVICE.calls.clear()
    SERVICE.most_running = 0
    try:
        yield SERVICE
    finally:
        SERVICE.fault, SERVICE.is_dead = None, False


class _Files(AbstractFileSystem):
    cachable = False
    is_object_store = True

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return str(path).partition("://")[2].rstrip("/") if "://" in path else path.rstrip("/")

    def _info(self, path: str) -> dict[str, Any]:
        if path in SERVICE.files:
            data, written = SERVICE.files[path]
            etag = hashlib.md5(data).hexdigest()
            facts = {"size": len(data), "type": "file", "mtime": written, "ETag": etag}
            return {"name": path, **facts}
        held = [path in SERVICE.folders, *(f.startswith(f"{path}/") for f in SERVICE.files)]
        if not any(held):
            raise FileNotFoundError(path)
        return {"name": path, "size": 0, "type": "directory", "mtime": 0.0}

    def info(self, path: str, **options: Any) -> Any:
        path = self._strip_protocol(path)
        return SERVICE.call("info", path, lambda: self._info(path))

    def _ls(self, path: str) -> list[Any]:
        if path in SERVICE.files:
            return [self._info(path)]
        self._info(path)
        inside = [f.removeprefix(f"{path}/") for f in SERVICE.files if f.startswith(f"{path}/")]
        below = {name.partition("/")[0] for name in inside}
        return [self._info(f"{path}/{name}") for name in sorted(below)]

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        infos = SERVICE.call("ls", path, lambda: self._ls(path))
        return infos if detail else [info["name"] for info in infos]

    def _cat(self, path: str, start: int | None, end: int | None) -> bytes:
        if path not in SERVICE.files:
            raise FileNotFoundError(path)
        return SERVICE.files[path][0][start:end]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> Any:
        path = self._strip_protocol(path)
        return SERVICE.call("read", path, lambda: self._cat(path, start, end))

    def rm_file(self, path: str) -> None:
        assert "://" not in path, "fsspec's SFTP takes none here"

        def gone() -> None:
            if SERVICE.files.pop(path, None) is None:
                raise FileNotFoundError(path)

        SERVICE.call("rm", path, gone)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for each in [path] if isinstance(path, str) else path:
            self.rm_file(each)


class Objects(_Files):
    """An object store."""

    protocol = "oss"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "wb":
            SERVICE.call("open", path, lambda: None)
        return _Upload(self, path, mode, block_size=512, **_known(options))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        path = self._strip_protocol(path)

        def put() -> None:
            if mode == "create" and path in SERVICE.files:
                raise FileExistsError(path)
            SERVICE.put(path, bytes(value))

        SERVICE.call("put", path, put)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key == "autocommit"}


class _Upload(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.sent: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        data = self.buffer.getvalue()
        SERVICE.call("write", self.path, lambda: self.sent.append(data))
        if final:
            SERVICE.call("close", self.path, lambda: SERVICE.put(self.path, b"".join(self.sent)))
        return True

    def _fetch_range(self, start: int, end: int) -> Any:
        return self.fs.cat_file(self.path, start, end)

    def discard(self) -> None:
        SERVICE.call("discard", self.path, lambda: self.sent.clear())


class Pieces(_Files):
    """A file system whose files are there in part."""

    protocol = "pieces"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            return _Upload(self, path, mode, **_known(options))
        SERVICE.call("open", path, lambda: SERVICE.put(path, b""))
        return _Growing(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        assert "://" not in path, "fsspec's SFTP takes none here"
        SERVICE.call("mkdir", path, lambda: SERVICE.folders.add(path))

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)

        def moved() -> None:
            if new in SERVICE.files:
                raise OSError("Failure")
            if old not in SERVICE.files:
                raise FileNotFoundError(old)
            SERVICE.put(new, SERVICE.files.pop(old)[0])

        SERVICE.call("mv", old, moved)


class _Growing(io.RawIOBase):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._nbytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._nbytes

    def write(self, data: Any) -> Any:
        new = bytes(data)

        def grow() -> int:
            held = SERVICE.files.get(self._path, (b"", 0.0))[0]
            SERVICE.put(self._path, held + new)
            return len(new)

        count = int(SERVICE.call("write", self._path, grow))
        if count < len(new):  # a part was taken
            SERVICE.put(self._path, SERVICE.files[self._path][0][: self._nbytes + count])
        self._nbytes += count
        return None if count == len(new) else count  # as paramiko does

    def close(self) -> None:
        if not self.closed:
            super().close()
            SERVICE.call("close", self._path, lambda: None)


fsspec.register_implementation("oss", Objects, clobber=True)
fsspec.register_implementation("pieces", Pieces, clobber=True)
