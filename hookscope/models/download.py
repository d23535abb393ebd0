"""Weights files from the internet, in torch.hub's cache or downloaded into it; without a network this fails quickly."""

import re
import socket
import sys
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch

from hookscope.errors import CheckpointError
from hookscope.parameters import arg


class DownloadError(CheckpointError):
    """Weights cannot be had from the internet."""


# Together with importing torch, a dead network must be noticed within 15 s. A server that accepts
# the connection gets more time: it may only be slow.
PROBE_SECONDS = 3.0
STALL_SECONDS = 7.0


def download_remedy() -> str:
    """Return what to do without a network."""
    return f"Download it elsewhere, and give the file with {arg('weights')}, or to `check` with {arg('arch')}."


def cached_file(url: str) -> Path:
    """Return where torch.hub keeps the file of `url`, whether it is there or not."""
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(url).path).name


def is_cached(url: str) -> bool:
    """Return whether the file of `url` is in torch.hub's cache and can be reached."""
    try:
        return cached_file(url).exists()
    except OSError:  # a cache folder of somebody else's
        return False


def fetch(url: str) -> Path:
    """Return the file of `url` out of torch.hub's cache, downloading it first if it is not there.

    A digest in the file's name, as in "resnet34-b627a593.pth", is compared with what arrives. Raises DownloadError,
    without a network within 15 s; then nothing is left behind.
    """
    path = cached_file(url)
    if is_cached(url):
        return path
    if reason := unreachable(url):
        raise DownloadError(f"{url} cannot be downloaded: {reason}. {download_remedy()}")
    digest = re.search(r"-([a-f0-9]{8,})\.", path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:  # limits every socket operation, also deep inside urllib
            stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
            socket.setdefaulttimeout(STALL_SECONDS)
            torch.hub.download_url_to_file(url, str(path), digest and digest[1], progress=sys.stderr.isatty())
    except (OSError, HTTPException, RuntimeError) as error:  # torch.hub raises RuntimeError for a wrong digest
        raise DownloadError(f"{url} cannot be downloaded: {_reason(error)}. {download_remedy()}") from error
    return path


def with_deletion(error: CheckpointError, weights: str) -> CheckpointError:
    """Return an error about a cached file; if the file is damaged, with the advice to delete it."""
    is_damaged = "download it again" in str(error)  # not out of memory, or not to be read
    return CheckpointError(
        f"{error} Delete this file to have {weights} downloaded again." if is_damaged else str(error)
    )


def unreachable(url: str) -> str | None:
    """Return why the host of `url` (or the proxy in front of it) cannot be reached; None if it accepts a connection.

    Resolving a name has no timeout, so a thread does it, which may be left behind.
    """
    address = _address(url)
    outcome: SimpleQueue[str | None] = SimpleQueue()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=PROBE_SECONDS).close()
        except OSError as error:
            outcome.put(f"{address[0]}: {_reason(error)}")
        else:
            outcome.put(None)

    Thread(target=connect, daemon=True).start()
    try:
        return outcome.get(timeout=PROBE_SECONDS)
    except Empty:
        return f"{address[0]}: no answer within {PROBE_SECONDS:g} s"


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"the server answers {error.code}"
    cause = error.reason if isinstance(error, URLError) and isinstance(error.reason, Exception) else error
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    if isinstance(cause, socket.gaierror):
        return "the host name does not resolve"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return "the download is not the expected file" if isinstance(cause, RuntimeError) else type(cause).__name__
