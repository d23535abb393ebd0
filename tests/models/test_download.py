import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hookscope.errors import CheckpointError
from hookscope.models import download
from hookscope.models.download import cached_file, fetch, unreachable

from .conftest import Server

BODY = b"some weights" * 1000


def url_of(server: Server, body: bytes = BODY, digest: str | None = None) -> str:
    path = f"/net-{digest or hashlib.sha256(BODY).hexdigest()[:8]}.pth"
    server.bodies[path] = body
    return server.url + path


@pytest.fixture
def silent_url() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/net-12345678.pth"


def test_download_lands_in_torch_hubs_cache_once_and_prints_nothing(
    server: Server, hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of(server)
    path = fetch(url)
    assert fetch(url) == path == cached_file(url)
    assert path.parent == hub_cache
    assert path.read_bytes() == BODY
    assert len(server.requests) == 1
    assert capsys.readouterr() == ("", "")


def test_other_digest_is_an_error_that_leaves_no_file(server: Server, hub_cache: Path) -> None:
    with pytest.raises(CheckpointError, match="not the expected file"):
        fetch(url_of(server, digest="0" * 8))
    assert list(hub_cache.iterdir()) == []


def test_closed_port_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"127\.0\.0\.1: Connection refused"):
        fetch(f"http://127.0.0.1:{port}/net.pth")
    assert time.monotonic() - started < 2


def test_silent_server_is_given_up_and_the_socket_timeout_put_back(
    silent_url: str, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 15 s for the whole command; importing torch and torchvision takes up to 4 of them.
    assert download.PROBE_SECONDS + download.STALL_SECONDS < 11
    monkeypatch.setattr(download, "STALL_SECONDS", 0.1)
    socket.setdefaulttimeout(123.0)
    try:
        with pytest.raises(CheckpointError, match="no answer"):
            fetch(silent_url)
        assert socket.getdefaulttimeout() == 123.0
    finally:
        socket.setdefaulttimeout(None)
    assert list(hub_cache.iterdir()) == []


def test_name_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        release.wait(60)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(download, "PROBE_SECONDS", 0.2)
    started = time.monotonic()
    try:
        assert unreachable("https://example.invalid/net.pth") == "example.invalid: no answer within 0.2 s"
        assert time.monotonic() - started < 2
    finally:
        release.set()


def test_proxy_is_probed_in_place_of_the_host(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://no.such.host.invalid/net.pth"
    monkeypatch.setenv("https_proxy", server.url)
    assert unreachable(url) is None
    monkeypatch.setenv("no_proxy", "no.such.host.invalid")
    assert unreachable(url) is not None
