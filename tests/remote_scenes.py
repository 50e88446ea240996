"""Checkpoints at URLs: a clean memory file system, a flaky one, and a real S3 API."""

from __future__ import annotations

import http.client
import importlib.util
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec
import pytest
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem

from dcp_placements import PlacementFileSystemWriter, PlacementSavePlanner

BUCKET = "checkpoints"

# Public from torch 2.15 on, where the private module warns.
_public = importlib.util.find_spec("torch.distributed.checkpoint.fsspec_filesystem")
_fsspec = importlib.import_module(
    f"torch.distributed.checkpoint.{'' if _public else '_'}fsspec_filesystem"
)
FsspecReader, FsspecWriter = _fsspec.FsspecReader, _fsspec.FsspecWriter


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give a URL in memory below which nothing is; what is written there goes with the test."""
    fs = fsspec.filesystem("memory")
    root = f"/{re.sub('[^a-z0-9_]', '-', request.node.name)}"
    yield f"memory:/{root}"
    if fs.exists(root):
        fs.rm(root, recursive=True)


def names(url: str, **options: Any) -> list[str]:
    """Return the names of the files below a URL, sorted."""
    fs, root = fsspec.core.url_to_fs(url, **options)
    fs.invalidate_cache()
    return sorted(path.removeprefix(root).strip("/") for path in fs.find(root))


def save(url: str, state: dict[str, Any], **options: Any) -> None:
    """Save the state of one process to a URL."""
    writer = PlacementFileSystemWriter(url, **options)
    dcp.save(state, storage_writer=writer, planner=PlacementSavePlanner(), no_dist=True)


def failures_of(error: BaseException) -> BaseException:
    """Return what a rank raised."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def contents(url: str) -> dict[str, bytes]:
    """Return the contents of the files below a URL, by name."""
    fs, root = fsspec.core.url_to_fs(url)
    return {name: fs.cat_file(f"{root}/{name}") for name in names(url)}


class Flaky(MemoryFileSystem):
    """A file system on which calls fail in a given way before they are answered."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    failures: list[Exception] = []  # noqa: RUF012
    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("flaky://", "memory://"))

    def _answer(self, name: str, *args: Any, **kwargs: Any) -> Any:
        type(self).calls.append(name)
        if type(self).failures:
            raise type(self).failures.pop(0)
        return getattr(super(), name)(*args, **kwargs)

    def cat_file(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer("cat_file", *args, **kwargs)

    def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer("pipe_file", *args, **kwargs)

    def info(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer("info", *args, **kwargs)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> type[Flaky]:
    """Give the flaky file system, empty and in order; nobody waits before another try."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr("dcp_placements.storage.remote.PAUSE_S", 0.0)
    monkeypatch.setattr(Flaky, "store", {})
    monkeypatch.setattr(Flaky, "failures", [])
    monkeypatch.setattr(Flaky, "calls", [])
    return Flaky


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Start a process that answers as S3 does; give its address."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    pytest.importorskip("flask_cors")
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(program, **quiet) as server:  # type: ignore[call-overload]
        try:
            _wait_for(port, lambda: server.poll() is None)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def _wait_for(port: int, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while alive() and time.monotonic() < deadline:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError("the S3 server did not start")


@pytest.fixture
def s3(s3_server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give a URL in a bucket of the S3 server; its address and keys are in the environment."""
    return f"{bucket(s3_server, monkeypatch)}/{re.sub('[^a-z0-9_]', '-', request.node.name)}"


def bucket(server: str, patched: pytest.MonkeyPatch) -> str:
    """Return the URL of a bucket, after setting the environment for it."""
    for name, value in s3_environment(server).items():
        patched.setenv(name, value)
    # A connection keeps the keys, or the lack of them, with which it began.
    fsspec.filesystem("s3").clear_instance_cache()
    fs = fsspec.filesystem("s3", endpoint_url=server)
    if not fs.exists(BUCKET):
        fs.mkdir(BUCKET)
    return f"s3://{BUCKET}"


def s3_environment(server: str) -> dict[str, str]:
    """Return the environment variables of a client of the S3 server."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": server,
        "NO_PROXY": "127.0.0.1",
        "HOME": os.environ.get("HOME", "/"),
    }


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to the S3 server, and answers some of them wrongly.

    Attributes:
        backend: Host and port of the S3 server.
        faults: Each is given requests until it answers one itself, and returns True.
        seen: The method and path of each request.
    """

    protocol_version = "HTTP/1.1"
    backend = ""
    faults: list[Callable[[Proxy], bool]] = []  # noqa: RUF012
    seen: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else self._chunks()
        type(self).seen.append(f"{self.command} {self.path}")
        for fault in list(type(self).faults):
            if fault(self):
                type(self).faults.remove(fault)
                return
        status, headers, data = self.forward()
        self.answer(status, headers, data)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def forward(self) -> tuple[int, dict[str, str], bytes]:
        """Return the S3 server's answer."""
        connection = http.client.HTTPConnection(self.backend, timeout=60)
        left_out = ("transfer-encoding", "content-length", "connection", "expect")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in left_out}
        connection.request(self.command, self.path, self.body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), data

    def answer(
        self, status: int, headers: dict[str, str], data: bytes, *, announced: int | None = None
    ) -> None:
        """Answer; of more bytes announced than there are the connection ends too early."""
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        nbytes = len(data)
        if self.command == "HEAD":
            nbytes = next((int(v) for k, v in headers.items() if k.lower() == "content-length"), 0)
        self.send_header("Content-Length", str(nbytes if announced is None else announced))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.close_connection = announced is not None

    def _chunks(self) -> bytes:
        parts = []
        while "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            parts.append(self.rfile.read(int(self.rfile.readline(), 16)))
            self.rfile.readline()
            if not parts[-1]:
                break
        return b"".join(parts)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def proxy(
    s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[type[Proxy], str]]:
    """Give a proxy that passes all on, and a URL in a bucket that is behind it."""
    monkeypatch.setattr(Proxy, "backend", s3_server.removeprefix("http://"))
    monkeypatch.setattr(Proxy, "faults", [])
    monkeypatch.setattr(Proxy, "seen", [])
    monkeypatch.setattr("dcp_placements.storage.remote.PAUSE_S", 0.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        fsspec.filesystem("s3").clear_instance_cache()
        yield Proxy, s3
        fsspec.filesystem("s3").clear_instance_cache()
        server.shutdown()
        thread.join()
