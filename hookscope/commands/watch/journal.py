"""What a watch writes to its file, keeps in memory and prints."""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from hookscope.commands.watch.closing import Watched, say
from hookscope.commands.watch.training_log import TrainingLogFile
from hookscope.results.training import (
    TrainingEnd,
    TrainingFinding,
    TrainingLog,
    TrainingRecord,
    TrainingStart,
    TrainingStep,
    WatchedStep,
)
from hookscope.text import safe_text

# Watched steps and verdicts kept in memory; the file has all of them.
_KEPT_WATCHED = 20
_KEPT_VERDICTS = 1_000


class Journal:
    """Writes each record to the file, keeps the last ones in memory, and prints lines."""

    def __init__(
        self, out: Path | None, *, resume: bool, on_line: Callable[[str], None] | None, counts: Watched
    ) -> None:
        """Open the file in `out`; `on_line` gets the lines instead of stderr, and `counts` all records.

        Raises:
            OutputError: As `TrainingLogFile`.
        """
        self._on_line = on_line or partial(say, name="hookscope.watch")
        self._counts = counts
        self._topics: set[str] = set()
        self._starts: list[TrainingStart] = []
        self._watched: deque[WatchedStep] = deque(maxlen=_KEPT_WATCHED)
        self._verdicts: deque[TrainingFinding] = deque(maxlen=_KEPT_VERDICTS)
        self._ends: list[TrainingEnd] = []
        self._file = None if out is None else TrainingLogFile(out, resume=resume, warn=self.say)
        self.last_step = 0 if self._file is None else self._file.last_step  # when the file was opened

    @property
    def verdicts(self) -> tuple[TrainingFinding, ...]:
        """The last verdicts, in order."""
        return tuple(self._verdicts)

    def log(self, steps: Iterable[TrainingStep]) -> TrainingLog:
        """Return the records in memory, with the steps, which are not kept here."""
        return TrainingLog(tuple(self._starts), tuple(steps), tuple(self._watched), self.verdicts, tuple(self._ends))

    def add(self, record: TrainingRecord) -> None:
        """Record it; print the notes of a start and the sentence of a verdict, and close the file at an end."""
        self._counts.add(record)
        if self._file is not None:
            self._file.append(record)
        if isinstance(record, TrainingStart):
            self._starts.append(record)
            for note in record.notes:
                self.say(note)
        elif isinstance(record, WatchedStep):
            self._watched.append(record)
        elif isinstance(record, TrainingFinding):
            self._verdicts.append(record)
            message = record.message
            message = f": {message}" if record.state == "began" else f" {message[0].lower()}{message[1:]}"
            self.say(f"step {record.step}: {record.rule}{message}")
        elif isinstance(record, TrainingEnd):
            self._ends.append(record)
            if self._file is not None:
                self._file.close()

    def say(self, line: str) -> None:
        """Print a line."""
        self._on_line(safe_text(line))

    def say_failure(self, line: str) -> None:
        """Print that hookscope failed; the last line then covers only what was seen."""
        self._counts.has_failed = True
        self.say(line)

    def say_once(self, topic: str, line: str) -> None:
        """Print a line, unless one about the same thing was printed."""
        if topic not in self._topics:
            self._topics.add(topic)
            self.say(line)

    def say_unseen(self, line: str, topic: str = "") -> None:
        """Print what cannot be seen, unless a line on the topic was printed; the last line then covers the rest."""
        self._counts.has_blind_spots = True
        self.say_once(topic or line, line)
