"""Read the next files in threads while the network works on the current ones; results are the same as without threads.

Threads, because Pillow lets go of the interpreter while it decodes and resizes: processes would have to be started,
and what they read sent over.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, wait
from itertools import islice

import torch

from hookscope.inputs.clips import Source
from hookscope.inputs.loading import is_quiet, load_input, load_quietly
from hookscope.results.inputs import InputRecord, Preprocessing

Loaded = tuple[torch.Tensor, InputRecord]

_MOST_READERS = 4  # each may hold a decoded picture of MAX_PIXELS


class Prefetcher:
    """Files in order, of which the next few are read ahead from the first one on.

    A thread ends when there is nothing to read.
    """

    def __init__(
        self, paths: Iterable[Source], preprocessing: Preprocessing, depth: int, readers: int | None = None
    ) -> None:
        """Read nothing yet; `depth` files at most are read ahead, by `readers` threads; None for the usual number."""
        self._readers = min(_MOST_READERS, os.cpu_count() or 1) if readers is None else readers
        self._waiting = iter(paths)
        self._preprocessing = preprocessing
        self._depth = depth
        self._coming: deque[tuple[Source, Future[Loaded] | None]] = deque()  # None: read when its turn comes
        self._unread: deque[tuple[Source, Future[Loaded]]] = deque()  # by any thread; those of `_coming`
        self._reader_count = 0
        self._lock = threading.Lock()

    def load(self) -> Loaded | None:
        """Return what `load_input` returns for the file whose turn it is, or raise what it raises; None at the end."""
        path, reading = self._coming.popleft() if self._coming else (next(self._waiting, None), None)
        if path is None:
            return None
        if reading is None or reading.exception() is not None:
            # `load_input` may read it in a forked process, or while stderr is closed: no other thread may run during
            # either.
            wait([other for _, other in self._coming if other is not None])
            loaded = load_input(path, self._preprocessing)
        else:
            loaded = reading.result()
        for coming in islice(self._waiting, self._depth - len(self._coming)):
            may_read = self._readers > 0 and is_quiet(coming)
            self._coming.append((coming, self._hand_over(coming) if may_read else None))
        return loaded

    def cancel(self) -> None:
        """Leave unread what no thread has begun with; it is the end."""
        self._unread.clear()

    def _hand_over(self, path: Source) -> Future[Loaded]:
        reading: Future[Loaded] = Future()
        with self._lock:
            self._unread.append((path, reading))
            is_missing = self._reader_count < self._readers
            self._reader_count += is_missing
        if is_missing:
            threading.Thread(target=self._read, name="hookscope-reader").start()
        return reading

    def _read(self) -> None:
        while True:
            with self._lock:
                try:
                    path, reading = self._unread.popleft()
                except IndexError:
                    self._reader_count -= 1
                    return
            try:
                reading.set_result(load_quietly(path, self._preprocessing))
            except BaseException as error:  # noqa: BLE001 - raised again, or something else, when its turn comes
                reading.set_exception(error)
