"""A service that is slow, short or wrong: requests are repeated, or errors name the URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import (
    PlacementFileSystemReader,
)
from dcp_placements.storage.store import UrlStore
from tests.offline_scenes import Run
from tests.remote_scenes import Proxy, failures_of, names, save
from tests.storage_scenes import load, same

SAVED = {"w": torch.arange(70_000.0), "v": torch.arange(300), "step": 3}
SMALL_PARTS = {"default_block_size": 5 << 20}
LARGE = {"w": torch.arange(3_000_000.0), "step": 4}


def load_all(url: str, **options: Any) -> dict[str, Any]:
    blank = {"w": torch.zeros(70_000), "v": torch.zeros(300, dtype=torch.int64), "step": 0}
    return load(Path("none"), blank, PlacementFileSystemReader(url, **options))


def is_data(request: Proxy) -> bool:
    return request.path.endswith(".distcp")


def refused(status: int, code: str) -> Callable[[Proxy], bool]:
    """Answer with an error of S3, without doing what was requested."""

    def answer(request: Proxy) -> bool:
        document = f"<Error><Code>{code}</Code><Message>{code}, please wait</Message></Error>"
        request.answer(status, {"Content-Type": "application/xml"}, document.encode())
        return True

    return answer


def dropped(request: Proxy) -> bool:
    """Close the connection without an answer, after it was done."""
    request.forward()
    request.close_connection = True
    return True


def cut_off(request: Proxy) -> bool:
    """Announce the whole answer, and send a half."""
    if request.command != "GET" or not is_data(request):
        return False
    status, headers, data = request.forward()
    request.answer(status, headers, data[: len(data) // 2], announced=len(data))
    return True


def changed(request: Proxy) -> bool:
    """Answer with other bytes; of whole files S3 sends a checksum, which differs."""
    if request.command != "GET" or not is_data(request):
        return False
    status, headers, data = request.forward()
    request.answer(status, headers, bytes(len(data)))
    return True


def shortened(request: Proxy) -> bool:
    """Answer with a half of the range as if that was all."""
    if request.command != "GET" or not is_data(request):
        return False
    status, headers, data = request.forward()
    request.answer(status, headers, data[: len(data) // 2])
    return True


@pytest.mark.parametrize(
    "fault",
    [
        refused(503, "SlowDown"),
        refused(429, "TooManyRequests"),
        refused(500, "InternalError"),
        dropped,
    ],
)
def test_a_save_and_a_load_go_on_after_what_passes(
    proxy: tuple[type[Proxy], str], fault: Callable[[Proxy], bool]
) -> None:
    service, url = proxy
    service.faults += [fault]
    save(url, SAVED)
    service.faults += [
        lambda request: request.command == "GET" and is_data(request) and fault(request)
    ]
    read = load_all(url)
    assert service.faults == []
    assert [key for key in SAVED if not same(read[key], SAVED[key])] == []
    assert len(names(url)) == 2


@pytest.mark.parametrize("fault", [cut_off, shortened, changed])
@pytest.mark.parametrize("threads", [1, 8])
def test_short_and_changed_answers_are_repeated(
    proxy: tuple[type[Proxy], str], fault: Callable[[Proxy], bool], threads: int
) -> None:
    service, url = proxy
    save(url, SAVED)
    service.faults += [fault, fault]
    read = load_all(url, thread_count=threads)
    assert service.faults == []
    assert [key for key in SAVED if not same(read[key], SAVED[key])] == []


def test_a_service_that_ignores_ranges_is_refused(
    proxy: tuple[type[Proxy], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcp_placements.storage.store.READ_AHEAD_NBYTES", 4096)
    service, url = proxy
    save(url, SAVED)

    def whole(request: Proxy) -> bool:
        if request.command == "GET" and is_data(request):
            del request.headers["Range"]
            request.answer(*request.forward())
            service.faults.append(whole)
            return True
        return False

    service.faults += [whole]
    state = {"v": torch.zeros(300, dtype=torch.int64)}  # not all of the file
    reader = PlacementFileSystemReader(url, thread_count=1)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, no_dist=True)
    error = failures_of(caught.value)
    assert isinstance(error, OSError)
    assert str(error).startswith(f"{url}/__0_")
    assert "the service returned" in str(error)


def test_a_file_of_several_parts(proxy: tuple[type[Proxy], str]) -> None:
    service, url = proxy
    save(url, LARGE, storage_options=SMALL_PARTS)
    assert sum("partNumber" in line for line in service.seen) >= 2
    read = load(
        Path("none"), {"w": torch.zeros(3_000_000), "step": 0}, PlacementFileSystemReader(url)
    )
    assert [key for key in LARGE if not same(read[key], LARGE[key])] == []


@pytest.mark.parametrize("kind", ["wrong tag", "forbidden"])
def test_a_part_that_fails_leaves_no_file(proxy: tuple[type[Proxy], str], kind: str) -> None:
    """The tag of a part is wrong, so that S3 refuses to join the parts; or a part is refused."""
    service, url = proxy
    save(url, SAVED)
    before = names(url)

    def fails(request: Proxy) -> bool:
        if "partNumber=2" not in request.path:
            return False
        if kind == "forbidden":
            return refused(403, "AccessDenied")(request)
        status, headers, data = request.forward()
        request.answer(status, {**headers, "ETag": '"0123"'}, data)
        return True

    service.faults += [fails]
    with pytest.raises(dcp.CheckpointException) as caught:
        save(url, LARGE, storage_options=SMALL_PARTS)
    error = failures_of(caught.value)
    assert isinstance(error, OSError)
    assert f"{url}/__0_" in str(error)
    assert isinstance(error, PermissionError) == (kind == "forbidden")
    assert names(url) == before
    assert any(line.startswith("DELETE") and "uploadId" in line for line in service.seen)
    read = load_all(url)
    assert [key for key in SAVED if not same(read[key], SAVED[key])] == []


def test_a_file_is_created_once_though_the_answer_is_lost(proxy: tuple[type[Proxy], str]) -> None:
    service, url = proxy
    store = UrlStore(url)
    service.faults += [lambda request: request.command == "PUT" and dropped(request)]
    assert store.create_new("one", b"mine")
    assert service.faults == []
    assert not store.create_new("one", b"other")
    assert store.read("one") == b"mine"


@pytest.mark.parametrize("flags", [[], ["--contents"]])
@pytest.mark.parametrize("command", ["HEAD", "GET"])
def test_m102_a_checkpoint_that_may_not_be_read_is_not_called_damaged(
    proxy: tuple[type[Proxy], str], run: Run, command: str, flags: list[str]
) -> None:
    service, url = proxy
    save(url, SAVED)
    forbidden = refused(403, "AccessDenied")
    service.faults += [lambda r: r.command == command and is_data(r) and forbidden(r)] * 99
    err = run.fails("verify", url, *flags)
    (line,) = err.splitlines()
    assert line.startswith(f"dcp-placements: {url}/__0_")
    assert "it cannot be read: " in line
    service.faults.clear()
    assert run("verify", url, *flags).code == 0
