"""What a session of benchmarks found, as frozen dataclasses, and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter

Verdict = Literal["same", "differs", "shapes only", "does not run"]


@dataclass(frozen=True)
class Machine:
    """Where it was measured.

    Attributes:
        processor: The CPU's name.
        core_count: Processors the system offers.
        thread_count: Threads torch was told to use.
        device: "cpu" or "cuda".
        accelerator: The GPU's name; "" on the CPU.
        system: Operating system and architecture.
        python: Its version.
        versions: Of hookscope, of what it stands on, and of each peer that is installed.
    """

    processor: str
    core_count: int
    thread_count: int
    device: str
    accelerator: str
    system: str
    python: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing, in `unit`."""

    median: float
    low: float
    high: float
    unit: str
    rounds: int

    @property
    def text(self) -> str:
        """For people: "median (minimum to maximum) unit"."""
        digits = 3 if self.unit in ("s", "ms") else 1
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f}) {self.unit}"


@dataclass(frozen=True)
class Work:
    """Whether a way did the work it is compared on.

    Attributes:
        verdict: "differs" if a row has other values or is absent.
        wanted: Rows that there are.
        wrong: Rows with other values.
        missing: Rows that the way does not give.
        reason: Why it does not run; "" otherwise.
    """

    verdict: Verdict
    wanted: int = 0
    wrong: int = 0
    missing: int = 0
    reason: str = ""

    @property
    def text(self) -> str:
        """For people: "same, 132 rows", "33 of 132 rows wrong", "does not run: …"."""
        if self.verdict == "does not run":
            return f"does not run: {self.reason}"
        parts = [f"{self.verdict}, {self.wanted} rows"] if self.verdict in ("same", "shapes only") else []
        parts += [f"{self.wrong} of {self.wanted} rows wrong"] if self.wrong else []
        parts += [f"{self.missing} of {self.wanted} missing"] if self.missing else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Measurement:
    """One way of doing one thing.

    Attributes:
        subject: What was done: "resnet34".
        way: By what: "hookscope", "torchlens".
        figure: The result in `unit`; None if it does not run.
        unit: "×" over the first way of the subject, "s", "ms" or "MB".
        spread: The absolute figures behind it.
        work: Whether the same was done; None for the yardstick, and where there is nothing to compare.
        at_most: The limit of `figure`, if it has one.
    """

    subject: str
    way: str
    figure: float | None
    unit: str
    spread: Spread | None = None
    work: Work | None = None
    at_most: float | None = None

    @property
    def what(self) -> str:
        """For people: the subject, and by what it was done if not by hookscope."""
        return self.subject if self.way == "hookscope" else f"{self.subject}, {self.way}"

    @property
    def missed(self) -> bool:
        """Whether there is a limit and it does not hold."""
        return self.at_most is not None and (self.figure is None or self.figure > self.at_most)


def shown(figure: float | None, unit: str) -> str:
    """Return a figure for people: "×1.25", "0.25 s", "0.048 s"; "" for None."""
    if figure is None:
        return ""
    digits = 1 if unit == "MB" else 3 if unit == "s" and figure < 0.1 else 2
    return f"×{figure:.2f}" if unit == "×" else f"{figure:.{digits}f} {unit}"


@dataclass(frozen=True)
class Section:
    """One concern of the session.

    Attributes:
        title: For people.
        note: What was done and how it was kept fair.
        measurements: By subject; the yardstick of each comes first.
        date: When it was measured, ISO 8601.
    """

    title: str
    note: str
    measurements: tuple[Measurement, ...]
    date: str = ""


@dataclass(frozen=True)
class Report:
    """A session.

    Attributes:
        machine: Where.
        sections: By name, in the order in which they were measured.
        schema_version: Of this class.
    """

    machine: Machine
    sections: Mapping[str, Section] = field(default_factory=dict)
    schema_version: Literal[2] = 2

    @property
    def missed(self) -> bool:
        """Whether a limit is missed."""
        return any(measurement.missed for section in self.sections.values() for measurement in section.measurements)


_REPORT = TypeAdapter(Report)


def to_json(report: Report) -> str:
    """Return a report as JSON text, ending in a newline."""
    return _REPORT.dump_json(report, indent=1).decode() + "\n"


def from_json(text: str) -> Report:
    """Read back what `to_json` wrote.

    Raises:
        pydantic.ValidationError: If it is something else, or of another schema version.
    """
    return _REPORT.validate_json(text)
