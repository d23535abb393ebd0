"""Each process of a survey writes that it is alive and how far it is, into a file next to the chunks."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from hookscope.commands.survey.plan import ChunkFolder, Share
from hookscope.errors import InputError
from hookscope.parameters import arg
from hookscope.regular_files import read_bounded
from hookscope.results.runs.atomic import reported

_BETWEEN_BEATS = 2.0  # seconds
_LONGEST_SILENCE = 20.0
_LONGEST_HEARTBEAT = 64  # bytes
_DONE = "done"


@dataclass(slots=True)
class Heartbeat:
    """The heartbeat of this process, with its `finished` inputs, and the last one of each other process."""

    folder: ChunkFolder
    share: Share
    finished: int = 0
    _heard: dict[int, tuple[str, float]] = field(default_factory=dict)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Write this process's file every few seconds, in a thread that dies with the process, and at the end.

        Raises:
            OutputError: If it cannot be written at the end.
        """
        stopped = threading.Event()
        path = self._path(self.share.index)

        def beat() -> None:
            for beats in count():
                with suppress(OSError):  # a full disk: chunks cannot be written either, and that is reported
                    path.write_text(f"{beats} {self.finished}", encoding="ascii")
                if stopped.wait(_BETWEEN_BEATS):
                    return

        thread = threading.Thread(target=beat, name="hookscope-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
        with reported(self.folder.path, kind="folder"):
            path.write_text(f"{_DONE} {self.finished}", encoding="ascii")

    def listen(self) -> int:
        """Return how many inputs all processes have finished.

        Raises:
            InputError: If a process that has not finished its share was silent for long.
        """
        total, now = self.finished, time.monotonic()
        for index in range(self.share.count):
            if index == self.share.index:
                continue
            text = ""
            with suppress(OSError, UnicodeDecodeError):
                text = read_bounded(self._path(index), _LONGEST_HEARTBEAT).decode("ascii")
            last, since = self._heard.get(index, ("", now))
            if text != last or index not in self._heard:
                self._heard[index] = text, now
            elif now - since > _LONGEST_SILENCE and not text.startswith(_DONE):
                raise InputError(
                    f"Process {index + 1} of {self.share.count} has ended: nothing was heard of it for "
                    f"{_LONGEST_SILENCE:.0f} s. Finished chunks stay; go on with {arg('resume')}."
                )
            finished = text.rpartition(" ")[2]
            total += int(finished) if finished.isdecimal() else 0
        return total

    @property
    def others_are_done(self) -> bool:
        """Whether all other processes had finished their shares when this one last listened."""
        return sum(text.startswith(_DONE) for text, _ in self._heard.values()) == self.share.count - 1

    def _path(self, index: int) -> Path:
        return self.folder.path / f"{index}-of-{self.share.count}.alive"
